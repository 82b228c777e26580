#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The client libraries (sdk/) against a cluster of real processes that serves
# the embedded model: every case of tests/sdk/conformance.json through each,
# from the packages that a user would install. Needs the network the first time.
source "$(dirname "$0")/lib.sh"
source "$(dirname "$0")/tools.sh"

"$ROOT/scripts/setup.sh"
build release tandem tandem-router tandem-prefill tandem-decode
SDK=$BUILD/sdk
TESTS=$ROOT/tests/sdk
mkdir -p "$SDK"

LOG=$LOGS/sdk-server.log
free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
GRPC=$(free_port)
: >"$LOG"
"$BUILD/release/bin/tandem" serve "$ROOT/models/tales" \
  --grpc-port "$GRPC" --port "$(free_port)" >"$LOG" 2>&1 &
SERVER=$!
trap 'kill -TERM "$SERVER" 2>/dev/null; wait "$SERVER" 2>/dev/null || true' EXIT
for _ in $(seq 300); do
  grep -q 'Tandem is ready' "$LOG" && break
  kill -0 "$SERVER" 2>/dev/null || break
  sleep 0.1
done
grep -q 'Tandem is ready' "$LOG" || die "the server is not ready; see $LOG"

python_sdk() {
  python3 -m venv "$SDK/python" &&
    "$SDK/python/bin/pip" install -q --disable-pip-version-check build==1.6.1 &&
    rm -rf "$SDK/wheel" &&
    "$SDK/python/bin/python" -m build -q --wheel --outdir "$SDK/wheel" \
      "$ROOT/sdk/python" &&
    "$SDK/python/bin/pip" install -q --disable-pip-version-check \
      --force-reinstall "$SDK"/wheel/*.whl
}
step sdk-python "Python wheel (build/sdk)" python_sdk
"$SDK/python/bin/python" "$TESTS/conformance.py" "127.0.0.1:$GRPC"

if command -v npm >/dev/null; then
  typescript_sdk() (
    rm -rf "$SDK/node" && mkdir -p "$SDK/node" &&
      cd "$ROOT/sdk/typescript" && npm install --silent --no-audit --no-fund --no-package-lock &&
      npm pack --silent --pack-destination "$SDK/node" &&
      cd "$SDK/node" && echo '{"private": true}' >package.json &&
      npm install --silent --no-audit --no-fund ./tandem-client-*.tgz
  )
  step sdk-typescript "TypeScript package (build/sdk)" typescript_sdk
  cp "$TESTS/conformance.mjs" "$SDK/node/"
  node "$SDK/node/conformance.mjs" "127.0.0.1:$GRPC" "$TESTS/conformance.json"
else
  say "TypeScript: skipped, there is no npm"
fi

use_go
step sdk-go "Go stubs" "$ROOT/sdk/go/generate.sh"
step sdk-go-test "Go" env TANDEM_ADDRESS="127.0.0.1:$GRPC" \
  go -C "$ROOT/sdk/go" test -count=1 -v ./...
say "go: $(grep -c '^    --- PASS' "$LOGS/sdk-go-test.log") passed, 0 failed"
