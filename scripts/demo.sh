#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh machine to a streamed answer: installs what is missing, builds,
# starts a router, a prefill and a decode worker with the embedded model,
# generates, and names a page to open. In a terminal the page stays until Enter
# or Ctrl-C. Stops what it started.
#
#   scripts/demo.sh ["a prompt for the model"]
source "$(dirname "$0")/lib.sh"
PROMPT=${1:-"Tell me a story about Mia."}

"$ROOT/scripts/setup.sh"
build release tandem tandem-router tandem-prefill tandem-decode

BIN=$BUILD/release/bin
LOG=$LOGS/demo.log
GRPC=$(free_port) HTTP=$(free_port) ADMIN=$(free_port)

say "Starting router, prefill worker and decode worker with models/tales"
"$BIN/tandem" serve "$ROOT/models/tales" --prefill 1 --decode 1 \
  --grpc-port "$GRPC" --port "$HTTP" --admin-port "$ADMIN" \
  --enable-attention-output --enable-no-kv-cache >"$LOG" 2>&1 &
SERVER=$!
stop() {
  kill -TERM "$SERVER" 2>/dev/null || true
  wait "$SERVER" 2>/dev/null || true
}
trap stop EXIT

for _ in $(seq 300); do
  grep -q 'Tandem is ready' "$LOG" && break
  kill -0 "$SERVER" 2>/dev/null || {
    tail -n 5 "$LOG" >&2
    die "the server ended before it was ready; its output is in $LOG"
  }
  sleep 0.1
done
grep -q 'Tandem is ready' "$LOG" || die "not ready after 30 s; see $LOG"
"$BIN/tandem" status --admin "127.0.0.1:$ADMIN" >&2

say "$PROMPT"
"$BIN/tandem" generate --router "127.0.0.1:$GRPC" --chat --temperature 0 \
  --max-tokens 256 --placement split --timings "$PROMPT"

if [ -t 0 ] && [ -t 1 ]; then
  say "Open http://127.0.0.1:$HTTP/ and see it at work; Enter stops it."
  read -r || true
else
  say "To see it at work:"
  echo "  build/release/bin/tandem serve models/tales --enable-attention-output --enable-no-kv-cache" >&2
  echo "and open http://127.0.0.1:8000/" >&2
fi
