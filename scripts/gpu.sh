#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests and figures on a GPU machine that has a driver and nothing of ours.
#
#   scripts/gpu.sh bundle         builds, here, build/gpu-bundle: copy it over
#   scripts/gpu.sh run PART...    there: unpacks it, runs the parts, each below
#                                 eight minutes; results in $OUT, or
#                                 build/gpu-results, a file for each part
#   scripts/gpu.sh table [DIR...] makes one Markdown table of results
#   scripts/gpu.sh list           names the parts
#
# The bundle is three archives, each below 64 MiB: what we build with the
# libraries that it needs; NCCL, cut down to one architecture (for such runs
# only: never publish it); compute-sanitizer. cuBLASLt, which figures are
# compared with, comes from the machine.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

BUNDLE=${TANDEM_GPU_BUNDLE:-$BUILD/gpu-bundle}
ARCHIVE_MIB=64
NCCL=nvidia-nccl-cu13==2.30.7
SANITIZER=nvidia-cuda-sanitizer-api==13.0.85

PARTS=(probe kernels engine system nccl sanitizer
  bench bench-fp8 bench-int8 bench-int4 bench-w8a8 bench-attention
  bench-matmul)
# Programs, and tests that run on a GPU.
PROGRAMS=(tandem tandem-router tandem-prefill tandem-decode cuda_bench)
LIBRARIES=(libtandem_cuda.so libtandem_nccl.so)
TESTS=(device_test integration_test gpu_cluster_test)

# ---- Here: what is carried.

# Every shared library that the files need, but those of the C library, which
# belong to the machine.
libraries_of() {
  ldd "$@" 2>/dev/null | awk '/=> \//{print $3}' | sort -u |
    grep -Ev '/(ld-linux[^/]*|lib(c|m|dl|rt|pthread|resolv|util|anl)\.so[^/]*)$' |
    grep -v "^$BUILD/"
}

pack() { # ARCHIVE FOLDER
  tar -C "$2" --owner=0 --group=0 -c . | xz -T0 -6 >"$BUNDLE/$1.tar.xz" || return
  local bytes
  bytes=$(stat -c %s "$BUNDLE/$1.tar.xz")
  printf '%s %d\n' "$1" "$bytes"
  ((bytes < ARCHIVE_MIB << 20)) || {
    echo "$1.tar.xz has $((bytes >> 20)) MiB, more than $ARCHIVE_MIB"
    return 1
  }
}

collect_base() {
  local stage=$1 build=$BUILD/cuda name file
  mkdir -p "$stage"/build/cuda/{bin,tests} "$stage"/{lib,lib-fallback,data}
  for name in "${PROGRAMS[@]}" "${LIBRARIES[@]}"; do
    cp "$build/bin/$name" "$stage/build/cuda/bin/" || return
  done
  for name in "${TESTS[@]}"; do
    [ ! -e "$build/tests/$name" ] ||
      cp "$build/tests/$name" "$stage/build/cuda/tests/" || return
  done
  cp "$build"/tests/gpu_kernels_*_test "$build/tests/libtandem_cuda_launch.so" \
    "$stage/build/cuda/tests/" || return
  local ours=("$stage"/build/cuda/*/*)
  for file in $(libraries_of "${ours[@]}"); do
    case $(basename "$file") in
      libstdc++* | libgcc_s*) cp -L "$file" "$stage/lib-fallback/" ;;
      *) cp -L "$file" "$stage/lib/" ;;
    esac || return
  done
  find "$stage" -type f \( -perm -u+x -o -name '*.so*' \) \
    -exec strip --strip-unneeded {} +
  # What tests look for under their source folder, and the trained model.
  mkdir -p "$stage/tests" "$stage/models"
  cp -r "$ROOT/tests/golden" "$stage/tests/" &&
    cp -r "$ROOT/models/tales" "$stage/models/" || return
  if [ -d "${TANDEM_TEST_DATA:-}/models/stories260K" ]; then
    mkdir -p "$stage/data/models" &&
      cp -rL "$TANDEM_TEST_DATA/models/stories260K" "$stage/data/models/"
  else
    echo "TANDEM_TEST_DATA is not set: no trained model in the bundle" >&2
  fi
  git -C "$ROOT" describe --always --dirty >"$stage/commit"
  printf '%s\n' "$ROOT" >"$stage/source"
}

wheel() { # REQUIREMENT FOLDER
  "$BUILD/venv/bin/pip" install -q --disable-pip-version-check --no-deps \
    --upgrade --target "$2" "$1"
}
collect_nccl() {
  local wheels=$BUILD/gpu-tools/nccl
  [ -e "$wheels/nvidia/nccl/lib/libnccl.so.2" ] || wheel "$NCCL" "$wheels" ||
    return
  mkdir -p "$1/nccl"
  "$BUILD/venv/bin/python" "$ROOT/tools/gpu/trim_nccl.py" \
    "$wheels/nvidia/nccl/lib/libnccl.so.2" "$1/nccl/libnccl.so.2"
}
collect_sanitizer() {
  local wheels=$BUILD/gpu-tools/sanitizer
  [ -e "$wheels/nvidia/cu13/bin/compute-sanitizer" ] ||
    wheel "$SANITIZER" "$wheels" || return
  mkdir -p "$1/sanitizer"
  # One library is in both folders.
  cp "$wheels"/nvidia/cu13/lib/*.so* "$1/sanitizer/" &&
    cp "$wheels"/nvidia/cu13/bin/* "$1/sanitizer/"
}

bundle() {
  "$ROOT/scripts/setup.sh" --cuda
  local targets=("${PROGRAMS[@]}" tandem_cuda tandem_nccl cuda-parts) name
  step configure-cuda "configure (cuda)" cmake --preset cuda -S "$ROOT"
  for name in "${TESTS[@]}"; do
    # Some came later than others.
    ! ninja -C "$BUILD/cuda" -t query "$name" >/dev/null 2>&1 ||
      targets+=("$name")
  done
  build cuda "${targets[@]}"
  local stage archive
  mkdir -p "$BUNDLE"
  rm -f "$BUNDLE"/*.tar.xz
  for archive in base nccl sanitizer; do
    stage=$(mktemp -d)
    step "collect-$archive" "collect $archive" "collect_$archive" "$stage"
    step "pack-$archive" "pack $archive" pack "$archive" "$stage"
    rm -rf "$stage"
  done
  say "build/gpu-bundle, $(du -sh "$BUNDLE" | cut -f1):"
  ls -l "$BUNDLE"
}

# ---- There.

unpack() {
  local archive name work=${TMPDIR:-/tmp}/tandem-gpu
  [ -e "$BUNDLE/base.tar.xz" ] ||
    die "no $BUNDLE/base.tar.xz: run 'scripts/gpu.sh bundle' and bring it"
  TREE=$work/$(cksum <"$BUNDLE/base.tar.xz" | cut -d' ' -f1)
  mkdir -p "$TREE"
  for archive in "$BUNDLE"/*.tar.xz; do
    name=$(basename "$archive" .tar.xz)
    [ ! -e "$TREE/.$name" ] || continue
    if command -v xz >/dev/null; then
      xz -dc "$archive" | tar -C "$TREE" -x
    else
      python3 -c 'import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)' "$archive" |
        tar -C "$TREE" -x
    fi
    touch "$TREE/.$name"
  done
  # Tests know their folders by the paths of the machine that built them.
  local source
  source=$(cat "$TREE/source")
  if [ ! -e "$source" ]; then
    mkdir -p "$(dirname "$source")"
    ln -sfn "$TREE" "$source"
  elif [ ! "$source" -ef "$TREE" ] && [ ! -e "$source/build/cuda/bin" ]; then
    mkdir -p "$source/build"
    ln -sfn "$TREE/build/cuda" "$source/build/cuda"
  fi
  LIBS=$TREE/lib
  ldconfig -p 2>/dev/null | grep -q 'libstdc++\.so\.6' ||
    LIBS=$LIBS:$TREE/lib-fallback
  [ -z "${LD_LIBRARY_PATH:-}" ] || LIBS=$LIBS:$LD_LIBRARY_PATH
  local place
  for place in /usr/local/nvidia/lib64 /usr/local/nvidia/lib; do
    [ ! -d "$place" ] || LIBS=$LIBS:$place
  done
}

# Ours run with the bundle's libraries; nothing else does.
ours() { env LD_LIBRARY_PATH="$LIBS" "$@"; }

# attempt NAME SECONDS COMMAND...: one line of result whatever happens, the
# output before it.
attempt() {
  local name=$1 limit=$2 start=$SECONDS status=0 verdict
  shift 2
  printf '== %s %s: %s\n' "$PART" "$name" "$*" >>"$RESULT"
  timeout -k 10 "$limit" env LD_LIBRARY_PATH="$LIBS" "$@" >>"$RESULT" 2>&1 \
    </dev/null || status=$?
  case $status in
    0) verdict=passed ;;
    77) verdict=skipped ;;
    124 | 137) verdict="stopped after $limit s" ;;
    *) verdict="FAILED ($status)" ;;
  esac
  printf 'CASE\t%s\t%s\t%s\t%d s\n' "$PART" "$name" "$verdict" \
    $((SECONDS - start)) | tee -a "$RESULT"
  [ $status = 0 ] || [ $status = 77 ] || FAILURES=$((FAILURES + 1))
}

has_gpu() { ours "$TESTS_AT/gpu_kernels_probe_test" \
  --gtest_filter=none >/dev/null 2>&1; }
# A test that would abort without a GPU.
on_gpu() {
  local name=$1 limit=$2
  shift 2
  if [ "$NO_GPU" = 1 ]; then
    printf 'CASE\t%s\t%s\tskipped\tno GPU\n' "$PART" "$name" |
      tee -a "$RESULT"
    return
  fi
  if [ ! -e "$1" ] && [[ $1 == /* ]]; then
    printf 'CASE\t%s\t%s\tskipped\tnot in the bundle\n' "$PART" "$name" |
      tee -a "$RESULT"
    return
  fi
  attempt "$name" "$limit" env TANDEM_TEST_DEVICE=cuda:0 \
    TANDEM_TEST_DATA="$TREE/data" TANDEM_CUBLASLT="$CUBLASLT" "$@"
}

part_probe() { attempt instructions 120 "$TESTS_AT/gpu_kernels_probe_test"; }
part_kernels() {
  local test name tests=("$TESTS_AT"/gpu_kernels_*_test)
  for test in "${tests[@]}"; do
    name=$(basename "$test" _test)
    [ "$name" = gpu_kernels_probe ] ||
      attempt "${name#gpu_kernels_}" $((460 / (${#tests[@]} - 1))) "$test"
  done
}
part_engine() {
  on_gpu goldens 160 "$TESTS_AT/device_test" \
    --gtest_filter='*Families.*:*Stories.*:DeviceLeaks*:DeviceMasks*:DeviceQueue*:DeviceStream*'
  on_gpu bits 160 "$TESTS_AT/device_test" --gtest_filter='CudaEngine.*'
  on_gpu quality 80 "$TESTS_AT/device_test" \
    --gtest_filter='*QualityTest.*Activations*'
  # Before minutes are spent on it: whether the bench itself runs.
  on_gpu bench 60 "$TREE/build/cuda/bin/cuda_bench" --quick --device cuda:0
}
part_system() {
  on_gpu grpc 200 "$TESTS_AT/gpu_cluster_test"
  on_gpu cluster 200 "$TESTS_AT/integration_test" \
    --gtest_filter='ClusterTest*:Conformance*'
}
part_nccl() {
  local LIBS=$TREE/nccl:$LIBS
  # Two ranks on one GPU, from 2.30 on; few CTAs, or they wait for each other.
  on_gpu one-gpu 420 env NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=4 \
    NCCL_DEBUG=WARN "$TESTS_AT/gpu_cluster_test"
}
part_sanitizer() {
  local sanitizer tool
  sanitizer=$(command -v compute-sanitizer ||
    ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null ||
    echo "$TREE/sanitizer/compute-sanitizer")
  for tool in memcheck racecheck initcheck synccheck; do
    on_gpu "$tool" 115 "$sanitizer" --tool "$tool" --error-exitcode 9 \
      --print-limit 20 "$TESTS_AT/device_test" \
      --gtest_filter='*Families*llama3_scaled*:*Families*mistral*'
  done
}
part_bench() {
  on_gpu figures 460 "$TREE/build/cuda/bin/cuda_bench" --seconds 400 \
    --parts limits,decode,prefill,handoff
}
bench_weights() {
  on_gpu figures 460 "$TREE/build/cuda/bin/cuda_bench" --seconds 400 \
    --weights "$1" --parts limits,decode,prefill
}
part_bench-fp8() { bench_weights fp8; }
part_bench-int8() { bench_weights int8; }
part_bench-int4() { bench_weights int4; }
part_bench-w8a8() { bench_weights w8a8; }
part_bench-attention() {
  on_gpu figures 200 "$TREE/build/cuda/bin/cuda_bench" --seconds 150 \
    --parts limits,attention
}
part_bench-matmul() {
  on_gpu figures 300 "$TREE/build/cuda/bin/cuda_bench" --seconds 250 \
    --layers 4 --parts limits,matmul
}

facts() {
  printf 'FACT\tcommit\t%s\n' "$(cat "$TREE/commit")"
  command -v nvidia-smi >/dev/null || return 0
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader \
    2>/dev/null | head -n 1 | awk -F', ' '{
      printf "FACT\tgpu\t%s, %s\nFACT\tdriver\t%s\n", $1, $3, $2 }' || true
}

run() {
  [ $# -gt 0 ] || die "which parts? ${PARTS[*]}"
  for PART in "$@"; do
    [[ " ${PARTS[*]} " == *" $PART "* ]] ||
      die "unknown part '$PART': ${PARTS[*]}"
  done
  unpack
  RESULTS=${OUT:-$BUILD/gpu-results}
  mkdir -p "$RESULTS"
  TESTS_AT=$TREE/build/cuda/tests
  NO_GPU=0 FAILURES=0
  has_gpu || NO_GPU=1
  CUBLASLT=$(ls /usr/local/cuda/lib64/libcublasLt.so.13 2>/dev/null ||
    find / -xdev -name libcublasLt.so.13 -print -quit 2>/dev/null) || true
  CUBLASLT=${CUBLASLT:-libcublasLt.so.13}
  for PART in "$@"; do
    RESULT=$RESULTS/$PART.txt
    facts >"$RESULT"
    "part_$PART"
    grep -hE '^(RESULT|FAILED|SKIPPED)' "$RESULT" || true
  done
  [ "$FAILURES" = 0 ] || {
    say "$FAILURES failed; the outputs are in $RESULTS"
    exit 1
  }
}

case ${1:-} in
  bundle) bundle ;;
  run) shift && run "$@" ;;
  table) shift && python3 "$ROOT/tools/gpu/table.py" \
    "${@:-$BUILD/gpu-results}" ;;
  list) printf '%s\n' "${PARTS[@]}" ;;
  *)
    sed -n '3,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    [ "${1:-}" = -h ] || [ "${1:-}" = --help ] || exit 2
    ;;
esac
