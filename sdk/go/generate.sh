#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tandempb from proto/, by protoc (Debian: protobuf-compiler) and the plugins
# that go.mod pins.
set -euo pipefail
cd "$(dirname "$0")"
plugins=$(mktemp -d)
trap 'rm -rf "$plugins"' EXIT
go build -o "$plugins/" google.golang.org/protobuf/cmd/protoc-gen-go \
  google.golang.org/grpc/cmd/protoc-gen-go-grpc
rm -rf tandempb && mkdir tandempb
options=()
for file in generation inference; do
  options+=("--go_opt=Mtandem/v1/$file.proto=tandem/sdk/tandempb"
    "--go-grpc_opt=Mtandem/v1/$file.proto=tandem/sdk/tandempb")
done
PATH=$plugins:$PATH protoc -I../../proto "${options[@]}" \
  --go_out=. --go_opt=module=tandem/sdk \
  --go-grpc_out=. --go-grpc_opt=module=tandem/sdk \
  tandem/v1/generation.proto tandem/v1/inference.proto
