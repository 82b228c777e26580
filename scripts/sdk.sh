#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The client libraries (sdk/) against clusters of real processes: every case of
# tests/sdk/conformance.json with the embedded model, and of tools.json with one
# that reasons and calls tools, through each, from the packages that a user
# would install. Needs the network the first time.
source "$(dirname "$0")/lib.sh"
source "$(dirname "$0")/tools.sh"

"$ROOT/scripts/setup.sh"
build release tandem tandem-router tandem-prefill tandem-decode
SDK=$BUILD/sdk
TESTS=$ROOT/tests/sdk
mkdir -p "$SDK"

SERVERS=()
trap 'kill -TERM "${SERVERS[@]}" 2>/dev/null; wait || true' EXIT
# serve NAME MODEL FLAGS...: a cluster of real processes; its address is in
# ADDRESS.
serve() {
  local log=$LOGS/sdk-$1.log port
  port=$(free_port)
  : >"$log"
  "$BUILD/release/bin/tandem" serve "$2" --grpc-port "$port" \
    --port "$(free_port)" "${@:3}" >"$log" 2>&1 &
  SERVERS+=($!)
  for _ in $(seq 300); do
    grep -q 'Tandem is ready' "$log" && break
    kill -0 "${SERVERS[-1]}" 2>/dev/null || break
    sleep 0.1
  done
  grep -q 'Tandem is ready' "$log" || die "the server is not ready; see $log"
  ADDRESS=127.0.0.1:$port
}

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
else
  say "TypeScript: skipped, there is no npm"
fi

use_go
step sdk-go "Go stubs" "$ROOT/sdk/go/generate.sh"

# conform NAME CASES: every case through every client of the cluster at ADDRESS.
conform() {
  local cases=$TESTS/$2
  say "$1"
  "$SDK/python/bin/python" "$TESTS/conformance.py" "$ADDRESS" "$cases"
  [ ! -e "$SDK/node" ] || node "$SDK/node/conformance.mjs" "$ADDRESS" "$cases"
  step "sdk-go-$1" "go" env TANDEM_ADDRESS="$ADDRESS" TANDEM_CASES="$cases" \
    go -C "$ROOT/sdk/go" test -count=1 -v ./...
  echo "go: $(grep -c '^    --- PASS' "$LOGS/sdk-go-$1.log") passed, 0 failed"
}
serve plain "$ROOT/models/tales"
conform plain conformance.json

# Qwen's style: it reasons, writes a text, and calls two tools.
python3 "$ROOT/tests/clients/make_scripted_model.py" qwen3 "$SDK/models/qwen3"
serve tools "$SDK/models/qwen3" --reasoning-parser qwen3
conform tools tools.json

# The first again over mutual TLS, which clients take from the environment.
step sdk-certificates "certificates" "$ROOT/scripts/dev-ca.sh" "$SDK" serve client
serve tls "$ROOT/models/tales" --tls-cert "$SDK/serve.pem" --tls-key "$SDK/serve.key" --tls-ca "$SDK/ca.pem"
export TANDEM_CA=$SDK/ca.pem TANDEM_CERT=$SDK/client.pem TANDEM_KEY=$SDK/client.key
conform tls conformance.json
