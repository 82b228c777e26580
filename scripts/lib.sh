# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts: where things are, quiet steps with progress, one-line
# errors. Sourced, never run.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BUILD=$ROOT/build
LOGS=$BUILD/logs
mkdir -p "$LOGS"

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# step LOG DESCRIPTION COMMAND...: runs quietly, says how long it took; on
# failure shows the log's end and stops.
step() {
  local log=$LOGS/$1.log what=$2 start=$SECONDS
  shift 2
  printf '%-52s' "$what" >&2
  if "$@" >"$log" 2>&1 </dev/null; then
    printf ' ok   %4d s\n' $((SECONDS - start)) >&2
  else
    printf ' FAILED\n' >&2
    tail -n 40 "$log" >&2
    die "$what failed; the whole output is in ${log#"$ROOT"/}"
  fi
}

# Passes ninja's output to the log and one line per tenth to the terminal.
build() {
  local preset=$1 start=$SECONDS
  shift
  # What presets compile alike is compiled once, though their folders differ.
  export CCACHE_BASEDIR=$ROOT
  step "configure-$preset" "configure ($preset)" \
    cmake --preset "$preset" -S "$ROOT"
  local log=$LOGS/build-$preset.log last=-1 done_ total line
  printf '%-52s' "build ($preset)" >&2
  set +e
  (cd "$ROOT" && NINJA_STATUS='[%f/%t] ' cmake --build "$BUILD/$preset" \
    --parallel "${TANDEM_JOBS:-$(nproc)}" ${1+--target "$@"} 2>&1
    echo "exit $?") | tee "$log" | while read -r line; do
    if [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]]; then
      done_=${BASH_REMATCH[1]} total=${BASH_REMATCH[2]}
      if ((total > 9 && done_ * 10 / total != last)); then
        last=$((done_ * 10 / total))
        printf ' %d%%' $((last * 10)) >&2
      fi
    fi
  done
  set -e
  if [ "$(tail -n 1 "$log")" != "exit 0" ]; then
    printf ' FAILED\n' >&2
    grep -E -A12 'error:|FAILED:' "$log" | head -n 60 >&2 || true
    die "the build failed; the whole output is in ${log#"$ROOT"/}"
  fi
  printf ' ok %4d s\n' $((SECONDS - start)) >&2
}

# For tests of the preset asan.
set_asan_options() {
  export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
  export UBSAN_OPTIONS=print_stacktrace=1
  export LSAN_OPTIONS=suppressions=$ROOT/tests/lsan.supp:print_suppressions=0
}

# For a server that is to be started.
free_port() { python3 "$ROOT/tests/free_ports.py"; }
