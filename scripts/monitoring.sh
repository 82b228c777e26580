#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# By promtool: the alert rules, their tests, and the names and help texts of the
# metrics that each kind of process has. By prometheus: that every panel of the
# dashboard has data under a load of two minutes.
#
#   scripts/monitoring.sh         test
#   scripts/monitoring.sh docs    and draw docs/dashboard.svg anew
source "$(dirname "$0")/lib.sh"
source "$(dirname "$0")/tools.sh"

picture=$LOGS/dashboard.svg
case ${1-} in
  '') ;;
  docs) picture=$ROOT/docs/dashboard.svg ;;
  *) die "unknown argument '$1' (docs)" ;;
esac
debian_program promtool prometheus usr/bin/promtool
debian_program prometheus prometheus usr/bin/prometheus
promtool=$TOOLS/bin/promtool
step rules "promtool check rules" \
  "$promtool" check rules "$ROOT/deploy/prometheus/tandem.rules.yaml"
step rules-test "promtool test rules" \
  "$promtool" test rules "$ROOT/deploy/prometheus/tandem_test.yaml"

"$ROOT/scripts/setup.sh"
build release tandem tandem-router tandem-prefill tandem-decode
INTERNAL=$(free_port)
declare -A HTTP=([router]=$(free_port) [prefill]=$(free_port) [decode]=$(free_port))
declare -A FLAGS=(
  [router]="--grpc-port $(free_port) --admin-port $(free_port) --internal-port $INTERNAL"
  [prefill]="--router 127.0.0.1:$INTERNAL"
  [decode]="--router 127.0.0.1:$INTERNAL"
)
PIDS=()
trap 'kill "${PIDS[@]}" 2>/dev/null; wait || true' EXIT
for role in router prefill decode; do
  # shellcheck disable=SC2086
  "$BUILD/release/bin/tandem-$role" "$ROOT/models/tales" ${FLAGS[$role]} \
    --port "${HTTP[$role]}" >"$LOGS/monitoring-$role.log" 2>&1 &
  PIDS+=($!)
done
check_metrics() {
  "$BUILD/venv/bin/python" - "$LOGS" "router=${HTTP[router]}" \
    "prefill=${HTTP[prefill]}" "decode=${HTTP[decode]}" <<'PYTHON'
import sys, time, urllib.error, urllib.request

def get(port, path):
    return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5).read()

for role, port in (argument.split("=") for argument in sys.argv[2:]):
    for _ in range(200):
        try:
            get(port, "/readyz")
            break
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.1)
    else:
        sys.exit(f"{role} does not become ready")
    with open(f"{sys.argv[1]}/metrics-{role}.txt", "wb") as file:
        file.write(get(port, "/metrics"))
PYTHON
}
step metrics-scrape "scrape three processes" check_metrics
for role in router prefill decode; do
  step "metrics-$role" "promtool check metrics ($role)" \
    bash -c '"$1" check metrics <"$2" && grep -q ^tandem_ "$2"' _ \
    "$promtool" "$LOGS/metrics-$role.txt"
done
step dashboard "every panel of the dashboard, under load" \
  "$BUILD/venv/bin/python" "$ROOT/scripts/dashboard.py" "$TOOLS/bin/prometheus" \
  "$BUILD/release/bin" "$ROOT/models/tales" "$LOGS" "$picture"
