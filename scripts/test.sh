#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that CI runs, in its order; each stage prints its minutes.
#
#   scripts/test.sh                 all stages
#   scripts/test.sh release lint    only these
#   scripts/test.sh --oracles       compare live with transformers (gigabytes)
#
# release  build and all tests          asan  address and undefined behaviour
# tsan     threads, below the gRPC line  lint  formats and clang-tidy
# cuda     compiles all that needs CUDA's toolkit; no GPU
#
# TANDEM_TEST_DATA names a folder with further models and traces; without it
# the tests that need it are skipped, visibly.
source "$(dirname "$0")/lib.sh"

STAGES=()
for argument in "$@"; do
  case $argument in
    release | asan | tsan | cuda | lint) STAGES+=("$argument") ;;
    --oracles) STAGES+=(oracles) ;;
    -h | --help)
      sed -n '3,16s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    *) die "unknown stage '$argument' (release, asan, tsan, cuda, lint, --oracles)" ;;
  esac
done
[ ${#STAGES[@]} -gt 0 ] || STAGES=(release asan tsan cuda lint)

"$ROOT/scripts/setup.sh" --tests
case " ${STAGES[*]} " in *" cuda "*) "$ROOT/scripts/setup.sh" --cuda ;; esac

# run_tests PRESET CTEST-ARGUMENTS...: failures are shown, not only counted.
run_tests() {
  local preset=$1 start=$SECONDS
  shift
  say "tests ($preset)"
  ctest --test-dir "$BUILD/$preset" --output-on-failure --no-tests=error \
    --timeout 600 "$@" </dev/null 2>&1 | tee "$LOGS/ctest-$preset.log" |
    sed -u -n '/Test  *#.*Passed/!p'
  grep -hE '\[  SKIPPED \]|Skipped$' "$BUILD/$preset"/Testing/Temporary/LastTest.log \
    >"$LOGS/skipped-$preset.log" 2>/dev/null || true
  printf 'tests (%s): %d gtest cases skipped, %d s\n' "$preset" \
    "$(grep -cE '^\[  SKIPPED \] [A-Za-z/0-9_.]+ \(' \
      "$LOGS/skipped-$preset.log" || true)" $((SECONDS - start)) >&2
}

# Labels of tests that run side by side: those of one process each.
BESIDE='unit|sim|golden'

stage_release() {
  # Kills of a worker in each phase; scripts/nightly.sh has more.
  export TANDEM_FAULT_SEEDS=${TANDEM_FAULT_SEEDS:-5}
  build release
  # What is labelled nightly is scripts/nightly.sh's.
  run_tests release -L "$BESIDE" -LE nightly --parallel "$(nproc)"
  run_tests release -LE "nightly|$BESIDE"
}

stage_asan() {
  set_asan_options
  # The same schedules ran in the release stage: here they look for memory.
  export TANDEM_FAULT_SEEDS=1
  export TANDEM_SIM_SEEDS=${TANDEM_SIM_SEEDS:-10}
  build asan
  run_tests asan -L "$BESIDE" -LE 'no-sanitizer|nightly' --parallel "$(nproc)"
  run_tests asan -LE "no-sanitizer|nightly|$BESIDE"
}

stage_tsan() {
  export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
  build tsan tsan-tests
  run_tests tsan -L tsan --parallel "$(nproc)"
}

# The CUDA backend's logic runs over the grid emulator in the other stages.
stage_cuda() {
  build cuda-check cuda-parts
  # Those of a GPU say that there is none.
  run_tests cuda-check -R '^(kernels_cuda_loader_test|gpu_kernels_.*)$'
}

# Last, with what is left of the hour.
stage_lint() {
  local left=$((53 - SECONDS / 60))
  left=$((left > 7 ? 7 : left < 1 ? 1 : left))
  TIDY_MINUTES=${TIDY_MINUTES:-$left} "$ROOT/scripts/lint.sh"
}

stage_oracles() {
  local venv=$BUILD/oracle-venv
  if [ ! -e "$venv/ready" ]; then
    make_oracles() {
      python3 -m venv "$venv" && "$venv/bin/pip" install -q \
        -r "$ROOT/tools/oracle/requirements.txt" && touch "$venv/ready"
    }
    step oracles "transformers and torch (build/oracle-venv)" make_oracles
  fi
  build release
  "$venv/bin/python" "$ROOT/tools/oracle/compare_live.py" \
    --probe "$BUILD/release/tests/engine_probe"
}

for stage in "${STAGES[@]}"; do
  say "== $stage"
  start=$SECONDS
  "stage_$stage"
  minutes=$(((SECONDS - start) * 10 / 60))
  SUMMARY+=("$(printf '%-8s %3d.%d min' "$stage" $((minutes / 10)) \
    $((minutes % 10)))")
done
say "all stages passed"
printf '%s\n' "${SUMMARY[@]}"
