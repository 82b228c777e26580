#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What takes longer than CI may: clang-tidy over every file, fuzzing with
# fresh inputs, the simulation over many more seeds, the slow tests under
# AddressSanitizer (emulated GPUs, whole models and processes), kernels with
# seeded faults, kernels for GPUs as they ship, the page in a browser, the Helm
# chart in a real API server, the client libraries, and the table of
# docs/reliability.md.
#
#   scripts/nightly.sh [MINUTES per fuzz target, default 10]
source "$(dirname "$0")/lib.sh"
minutes=${1:-10}

"$ROOT/scripts/setup.sh" --tests
build release
"$ROOT/scripts/lint.sh" --all
check_advisories() {
  apt-get update -qq || echo "apt was not updated: its last lists are used"
  "$ROOT/scripts/sbom.py" "$BUILD"/release/bin/tandem{,-router,-prefill,-decode} |
    "$ROOT/scripts/advisories.py" --apt
}
step advisories "known advisories, newer packages" check_advisories
step fuzz "fuzzing, $minutes min for each target" \
  "$ROOT/scripts/fuzz.sh" $((minutes * 60))
step page "the page in a browser" "$ROOT/scripts/page.sh"
# Others each day of the year.
step simulation "simulation, 200 000 seeds" \
  env TANDEM_SIM_SEEDS=200000 TANDEM_SIM_FIRST=$((10#$(date +%j) * 200000)) \
  "$BUILD/release/tests/simulation_test"
step faults "workers killed in every phase, 20 times" \
  env TANDEM_FAULT_SEEDS=20 "$BUILD/release/tests/integration_test" \
  --gtest_filter='*FaultTest*'
step failpoints "each action of each failpoint" \
  env TANDEM_FAILPOINT_CASES=all "$BUILD/release/tests/failpoint_matrix_test"
step options "all options to clusters that differ, and kills" \
  python3 -B "$ROOT/tests/network/options_test.py" "$BUILD/release/bin" \
  --seconds 120 --seed $((10#$(date +%j)))
# What needs network namespaces or HAProxy says so where it finds none.
or_skipped() { "$@" || [ $? = 77 ]; }
step network "partitions, loss, slow links, resets" \
  or_skipped python3 -B "$ROOT/tests/network/partition_test.py" "$BUILD/release/bin" \
  --size full
step public-ports "hostile clients of the public ports" \
  python3 -B "$ROOT/tests/network/public_port_test.py" "$BUILD/release/bin" \
  --size full
step proxy "HAProxy in front" \
  or_skipped python3 -B "$ROOT/tests/network/proxy_test.py" "$BUILD/release/bin"
grep -h SKIPPED "$LOGS"/{network,proxy}.log >&2 || true
run_nightly() {
  ctest --test-dir "$BUILD/$1" --output-on-failure --timeout 1800 \
    --parallel "$(nproc)" -L nightly
}
build release nightly-tests
step seeded-faults "kernels with a fault in them turn tests red" \
  run_nightly release
build asan all nightly-tests
set_asan_options
step asan "what CI has no time for under asan" run_nightly asan
"$ROOT/scripts/setup.sh" --cuda
build cuda cuda-parts
# Kubernetes' tools are built from source the first time, about 20 min.
"$ROOT/scripts/chart.sh"
"$ROOT/scripts/sdk.sh"
"$ROOT/scripts/clients.sh" --guidellm
"$ROOT/scripts/monitoring.sh"
# By chroot, so only as root.
[ "$(id -u)" != 0 ] ||
  "$ROOT/scripts/image.sh" --programs "$BUILD/release/bin"
# Last, since a time that a busy machine misses ends it.
"$ROOT/scripts/figures.sh"
