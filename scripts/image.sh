#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The container image without Docker: linters, and then the Dockerfile's own
# steps in roots made by debootstrap, the closure of its libraries, and the
# compose file's commands in it as its user. Needs root, some GB in build/, and
# about 10 min with a warm ccache, else a build's time more.
#
#   scripts/image.sh           all of it, for the CPU image
#   scripts/image.sh --quick   the linters
#   scripts/image.sh --programs DIR   with programs built before on Debian 12
#   scripts/image.sh --cuda    the steps of the CUDA image too
source "$(dirname "$0")/lib.sh"
source "$(dirname "$0")/tools.sh"
DOCKER=$ROOT/deploy/docker

python_tools "$ROOT/scripts/deploy-requirements.txt"
use_go
go_tool compose-check github.com/compose-spec/compose-go/v2 v2.16.2 \
  github.com/compose-spec/compose-go/v2/cmd
step hadolint "hadolint" "$TOOLS/venv/bin/hadolint" "$DOCKER/Dockerfile"
mkdir -p "$BUILD/image"
compose() {
  (cd "$DOCKER" && "$TOOLS/bin/compose-check" -format json "${@:2}") \
    >"$BUILD/image/$1"
}
step compose "compose files" compose compose.json compose.yaml
step compose-cuda "compose files, CUDA" compose compose.cuda.json \
  compose.yaml compose.cuda.yaml
targets=(cpu)
programs=()
case ${1:-} in
  '') ;;
  --quick) exit 0 ;;
  --cuda) targets+=(cuda) ;;
  --programs) programs=("$(realpath "$2")") ;;
  *) die "unknown option '$1' (--quick, --programs, --cuda)" ;;
esac
[ "$(id -u)" = 0 ] || die "needs root, for chroot"

step image-packages "debootstrap" debian_packages debootstrap iproute2 util-linux
TANDEM_HOST_MOUNTS=$(readlink /proc/self/ns/mnt)
export TANDEM_HOST_MOUNTS
for target in "${targets[@]}"; do
  # Its mounts are seen by nobody else, and end with it.
  step "image-$target" "build target $target" \
    unshare --mount --propagation private "$TOOLS/venv/bin/python" "$ROOT/tests/deploy/image.py" build "$target" \
    "${programs[@]}"
done
step image-run "run the compose file's commands in it" \
  unshare --net --pid --fork --mount --propagation private --mount-proc \
  "$TOOLS/venv/bin/python" "$ROOT/tests/deploy/image.py" run cpu
