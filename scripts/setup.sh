#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what the build and the tests need and this machine lacks: Debian
# packages, a recent cargo, Python packages in build/venv. Does nothing, in
# under a second, where all is there.
#
#   scripts/setup.sh           what a build for CPUs needs
#   scripts/setup.sh --tests   and the tests' other compilers and checkers
#   scripts/setup.sh --cuda    and a CUDA toolkit (no GPU needed)
#   scripts/setup.sh --page    and a browser, for the tests of the page
source "$(dirname "$0")/lib.sh"

PACKAGES=(
  cmake ninja-build g++ ccache pkg-config git ca-certificates
  libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev
  libabsl-dev libhwy-dev libcli11-dev libedit-dev libspdlog-dev libboost-dev
  nlohmann-json3-dev prometheus-cpp-dev libssl-dev libyaml-cpp-dev zlib1g-dev
  libgtest-dev libgmock-dev libbenchmark-dev python3 python3-venv
)
# Only the tests' other compilers and checkers.
TEST_PACKAGES=(
  clang-14 libclang-rt-14-dev lld-14 clang-format-14 clang-tidy-14 spin gcc
  openssl iproute2 nftables haproxy procps
)
with_cuda=
for argument in "$@"; do
  case $argument in
    --tests) PACKAGES+=("${TEST_PACKAGES[@]}") ;;
    --cuda) with_cuda=1 ;;
    --page)
      # Node of another source is as good, and conflicts with Debian's npm.
      command -v npm >/dev/null || PACKAGES+=(nodejs npm)
      PACKAGES+=(chromium procps fonts-dejavu-core)
      ;;
    *) die "unknown option '$argument' (--tests, --cuda, --page)" ;;
  esac
done

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

missing_packages() {
  local package
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null |
      grep -q 'install ok installed' || echo "$package"
  done
}

install_packages() {
  export DEBIAN_FRONTEND=noninteractive
  as_root apt-get update -qq &&
    as_root apt-get install -y -qq --no-install-recommends "$@"
}

# Another Boost that the user has is as good: only its headers are needed.
if [ -e /usr/include/boost/beast.hpp ]; then
  PACKAGES=("${PACKAGES[@]/libboost-dev/}")
fi
mapfile -t missing < <(missing_packages ${PACKAGES[@]})
if [ ${#missing[@]} -gt 0 ]; then
  command -v apt-get >/dev/null ||
    die "this script knows Debian's apt only; install by hand: ${missing[*]}"
  if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
    die "needs root or sudo without a password to install: ${missing[*]}"
  fi
  step apt "install ${#missing[@]} Debian packages" \
    install_packages "${missing[@]}"
fi

# The llguidance crate needs cargo 1.87; Debian has it as cargo-web.
cargo_is_recent() {
  local version
  version=$(cargo --version 2>/dev/null | sed 's/cargo \([0-9.]*\).*/\1/')
  [ -n "$version" ] && [ "$(printf '%s\n' 1.87 "$version" | sort -V |
    head -n 1)" = 1.87 ]
}
if ! cargo_is_recent; then
  step cargo "install cargo-web" install_packages cargo-web
  cargo_is_recent || die "cargo 1.87 or newer is needed and cargo-web did not
bring it: $(cargo --version 2>&1 | head -n 1)"
fi

# Python: googleapis' protos to build; numpy for live comparisons in tests.
requirements=$ROOT/scripts/requirements.txt
if ! cmp -s "$requirements" "$BUILD/venv/installed.txt"; then
  make_venv() {
    python3 -m venv "$BUILD/venv" &&
      "$BUILD/venv/bin/pip" install -q --disable-pip-version-check \
        -r "$requirements" &&
      cp "$requirements" "$BUILD/venv/installed.txt"
  }
  step venv "Python packages (build/venv)" make_venv
fi

# CUDA: an installed toolkit of version 13, or one of wheels.
# build/cuda-toolkit is a link to either, build/cuda-wheels/nvidia/nccl has
# NCCL's header. No driver and no GPU is needed.
[ -n "$with_cuda" ] || exit 0
requirements=$ROOT/scripts/cuda-requirements.txt
wheels=$BUILD/cuda-wheels
link=$BUILD/cuda-toolkit

is_toolkit() {
  [ -e "$1/include/cuda_runtime.h" ] && [ -e "$1/lib64" ] &&
    "$1/bin/nvcc" --version 2>/dev/null | grep -q 'release 13\.'
}
install_wheels() {
  rm -rf "$wheels" &&
    "$BUILD/venv/bin/pip" install -q --disable-pip-version-check --no-deps \
      --target "$wheels" -r "$1"
}
make_toolkit() {
  local toolkit=${CUDA_HOME:-/usr/local/cuda}
  if is_toolkit "$toolkit"; then
    grep nccl "$requirements" >"$BUILD/cuda-wheels.txt"
  else
    toolkit=$wheels/nvidia/cu13
    cp "$requirements" "$BUILD/cuda-wheels.txt"
  fi
  install_wheels "$BUILD/cuda-wheels.txt" || return 1
  # Wheels say lib where nvcc, which they bring, looks for lib64.
  [ ! -e "$wheels/nvidia/cu13" ] || ln -sfn lib "$wheels/nvidia/cu13/lib64"
  ln -sfn "$toolkit" "$link" && is_toolkit "$link" &&
    [ -e "$wheels/nvidia/nccl/include/nccl.h" ] &&
    cp "$requirements" "$wheels/installed.txt"
}
if ! cmp -s "$requirements" "$wheels/installed.txt" ||
  ! is_toolkit "$link"; then
  step cuda "CUDA 13 toolkit (build/cuda-toolkit)" make_toolkit
fi
