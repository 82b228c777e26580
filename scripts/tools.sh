#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Pinned tools of checks that CI does not run, in build/tools. Sourced after
# lib.sh, never run.

TOOLS=$BUILD/tools
GO_VERSION=1.26.8

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

debian_packages() {
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null |
      grep -q 'install ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  export DEBIAN_FRONTEND=noninteractive
  as_root apt-get update -qq &&
    as_root apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

# debian_program NAME PACKAGE PATH: TOOLS/bin/NAME out of a package that is not
# installed, since it would start a service.
debian_program() {
  [ -x "$TOOLS/bin/$1" ] && return
  unpack_program() (
    local folder=$TOOLS/src/$1
    rm -rf "$folder" && mkdir -p "$folder" "$TOOLS/bin" && cd "$folder" &&
      { apt-get download -qq "$2" || { as_root apt-get update -qq &&
        apt-get download -qq "$2"; }; } &&
      dpkg -x "$2"_*.deb . && cp "$3" "$TOOLS/bin/$1"
  )
  step "tool-$1" "$1 (Debian)" unpack_program "$@"
}

# A Go of that version in PATH. Debian's is too old for these tools, but not
# for fetching the newer toolchain, which is a module (its sum is checked as any
# module's is).
use_go() {
  export GOFLAGS= GOTOOLCHAIN=local
  if [ "$(go env GOVERSION 2>/dev/null)" = "go$GO_VERSION" ]; then return; fi
  local root=$TOOLS/go-$GO_VERSION
  if [ ! -x "$root/bin/go" ]; then
    command -v go >/dev/null || step golang "install golang-go" \
      debian_packages golang-go
    fetch_go() (
      local directory
      mkdir -p "$TOOLS" && cd "$TOOLS" || return 1
      directory=$(go mod download -json \
        "golang.org/toolchain@v0.0.1-go$GO_VERSION.linux-amd64" |
        sed -n 's/^\t"Dir": "\(.*\)",$/\1/p') && [ -n "$directory" ] || return 1
      # Modules are read-only and without the mark of programs.
      cp -r "$directory" "$root.part" && chmod -R u+w "$root.part" &&
        chmod +x "$root.part"/bin/* "$root.part"/pkg/tool/*/* &&
        mv "$root.part" "$root"
    )
    step go "Go $GO_VERSION (build/tools)" fetch_go
  fi
  export PATH=$root/bin:$PATH
}

# go_tool NAME MODULE VERSION PACKAGE: builds TOOLS/bin/NAME, once a version.
go_tool() {
  local name=$1 module=$2 version=$3 package=$4 mark=$TOOLS/$1.version
  if [ "$(cat "$mark" 2>/dev/null)" = "$version" ]; then return; fi
  build_tool() (
    # A module of our own: `go install` would ask for every prefix of the path.
    local folder=$TOOLS/src/$name
    rm -rf "$folder" && mkdir -p "$folder" "$TOOLS/bin" &&
      cd "$folder" && go mod init tool &&
      go get "$module@$version" &&
      nice go build -mod=mod -o "$TOOLS/bin/$name" "$package" &&
      echo "$version" >"$mark"
  )
  step "tool-$name" "$name $version" build_tool
}

# python_tools REQUIREMENTS: build/tools/venv with these packages.
python_tools() {
  local venv=$TOOLS/venv
  cmp -s "$1" "$venv/installed.txt" && return
  make_tools_venv() {
    mkdir -p "$TOOLS" && python3 -m venv "$venv" &&
      "$venv/bin/pip" install -q --disable-pip-version-check -r "$1" &&
      cp "$1" "$venv/installed.txt"
  }
  step tools-venv "Python tools (build/tools/venv)" make_tools_venv "$1"
}
