#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The clients that people use (OpenAI's SDKs for Python and JavaScript,
# LangChain, LiteLLM, lm-eval; versions in tests/clients) against a cluster that
# serves the embedded model, and with models that call tools. Needs the network;
# some minutes the first time.
#
#   scripts/clients.sh [--guidellm]   the load generator too: 6 GB of packages
source "$(dirname "$0")/lib.sh"

"$ROOT/scripts/setup.sh"
build release tandem tandem-router tandem-prefill tandem-decode
CLIENTS=$BUILD/clients
[ -x "$CLIENTS/bin/python" ] || python3 -m venv "$CLIENTS"
step clients-python "Python clients (build/clients)" \
  "$CLIENTS/bin/pip" install -q --disable-pip-version-check \
  -r "$ROOT/tests/clients/requirements.txt"

# Of its own: it pins other versions of what they share.
LM_EVAL=$BUILD/clients-lm-eval
[ -x "$LM_EVAL/bin/python" ] || python3 -m venv "$LM_EVAL"
step clients-lm-eval "lm-eval (build/clients-lm-eval)" \
  "$LM_EVAL/bin/pip" install -q --disable-pip-version-check \
  -r "$ROOT/tests/clients/lm_eval_requirements.txt"

LOG=$LOGS/clients-server.log
SERVER=
stop() {
  [ -z "$SERVER" ] && return
  kill -TERM "$SERVER" 2>/dev/null
  wait "$SERVER" 2>/dev/null || true
  SERVER=
}
trap stop EXIT
# A cluster of this model, at $HTTP.
serve() {
  stop
  HTTP=$(free_port)
  : >"$LOG"
  "$BUILD/release/bin/tandem" serve "$1" \
    --grpc-port "$(free_port)" --port "$HTTP" >"$LOG" 2>&1 &
  SERVER=$!
  for _ in $(seq 300); do
    grep -q 'Tandem is ready' "$LOG" && return
    kill -0 "$SERVER" 2>/dev/null || break
    sleep 0.1
  done
  die "the server is not ready; see $LOG"
}

serve "$ROOT/models/tales"
"$CLIENTS/bin/python" "$ROOT/tests/clients/python_clients.py" \
  "http://127.0.0.1:$HTTP/v1"
"$LM_EVAL/bin/python" "$ROOT/tests/clients/lm_eval_client.py" \
  "http://127.0.0.1:$HTTP/v1" "$ROOT/models/tales" 2>"$LOGS/lm-eval.log" ||
  die "lm-eval failed; see $LOGS/lm-eval.log"
if command -v npm >/dev/null; then
  cp "$ROOT/tests/clients/package.json" "$ROOT/tests/clients/"*.mjs "$CLIENTS/"
  step clients-node "JavaScript client (build/clients)" \
    npm install --prefix "$CLIENTS" --no-audit --no-fund --silent
  node "$CLIENTS/node_client.mjs" "http://127.0.0.1:$HTTP/v1"
else
  say "JavaScript: skipped, there is no npm"
fi

# The same with a key, which `tandem serve` and the clients read there.
export TANDEM_API_KEY=sk-tandem-clients
serve "$ROOT/models/tales"
"$CLIENTS/bin/python" "$ROOT/tests/clients/python_clients.py" \
  "http://127.0.0.1:$HTTP/v1"
if command -v npm >/dev/null; then
  node "$CLIENTS/node_client.mjs" "http://127.0.0.1:$HTTP/v1"
fi
unset TANDEM_API_KEY
serve "$ROOT/models/tales"

if [ "${1-}" = --guidellm ]; then
  GUIDELLM=$BUILD/clients-guidellm
  [ -x "$GUIDELLM/bin/python" ] || python3 -m venv "$GUIDELLM"
  step clients-guidellm "GuideLLM (build/clients-guidellm)" \
    "$GUIDELLM/bin/pip" install -q --disable-pip-version-check \
    -r "$ROOT/tests/clients/guidellm_requirements.txt"
  HF_HUB_OFFLINE=1 "$GUIDELLM/bin/python" \
    "$ROOT/tests/clients/guidellm_client.py" "http://127.0.0.1:$HTTP" \
    "$ROOT/models/tales" 2>"$LOGS/guidellm.log" ||
    die "GuideLLM failed; see $LOGS/guidellm.log"
fi

# Models that call tools by their weights, in each style.
for style in hermes llama3_json mistral qwen3_coder glm45 minimax_m2 \
  deepseek_v3 deepseek_v31 kimi_k2 gemma4; do
  python3 "$ROOT/tests/clients/make_scripted_model.py" "$style" \
    "$CLIENTS/models/$style"
  serve "$CLIENTS/models/$style"
  "$CLIENTS/bin/python" "$ROOT/tests/clients/tool_clients.py" \
    "http://127.0.0.1:$HTTP/v1" "$style"
  if command -v npm >/dev/null; then
    node "$CLIENTS/tool_client.mjs" "http://127.0.0.1:$HTTP/v1" "$style"
  fi
done
