#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures what docs/reliability.md promises, with real processes on this
# machine, prints the table, and writes it into that page.
#
#   scripts/figures.sh                  every row but the soak, about two hours
#   scripts/figures.sh kills load       only these
#   scripts/figures.sh --small          minutes: the same with smaller numbers
#   scripts/figures.sh soak             TANDEM_SOAK_HOURS (default 8)
#
# Rows: kills load cancellation network overload determinism simulation tickets
# files requests fuzzing rollout rotation timing soak. TANDEM_SEED runs one again.
# Times are goals for an idle machine of two cores. Status 1: a row was not held.
source "$(dirname "$0")/lib.sh"

rows=() size=full
but_the_soak=(kills load cancellation network overload determinism simulation
  tickets files requests fuzzing rollout rotation timing)
for argument in "$@"; do
  case $argument in
    --small) size=ci ;;
    -h | --help)
      sed -n '3,14s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    *)
      [[ " ${but_the_soak[*]} soak " == *" $argument "* ]] ||
        die "unknown row '$argument' (${but_the_soak[*]} soak)"
      rows+=("$argument")
      ;;
  esac
done
[ ${#rows[@]} -gt 0 ] || rows=("${but_the_soak[@]}")

# Tests of ctest that hold a row, and its measured processes.
checks=(simulation_test handoff_test integration_test router_bad_requests_test)
files=(engine_model_test text_test worker_test)
build release reliability_figures "${checks[@]}" "${files[@]}"
[[ $size = ci || " ${rows[*]} " != *" files "* ]] || build asan "${files[@]}"
results=$LOGS/figures.jsonl
: >"$results"
export TANDEM_FIGURES=$results TANDEM_FIGURES_SIZE=$size
run_row() {
  case $1 in
    network)
      python3 -B "$ROOT/tests/network/partition_test.py" "$BUILD/release/bin" \
        --size "$size"
      ;;
    simulation | tickets | files | requests | fuzzing)
      python3 -B "$ROOT/tests/figures/checks.py" "$1" "$BUILD" --size "$size"
      ;;
    *)
      "$BUILD/release/tests/reliability_figures" --gtest_brief=1 \
        --gtest_filter="${1^}Row.*"
      ;;
  esac
}
failed=0
for row in "${rows[@]}"; do
  say "== $row"
  run_row "$row" 2>&1 | tee "$LOGS/figures-$row.log" || failed=1
done
"$ROOT/scripts/figures.py" "$results" "$ROOT/docs/reliability.md" || failed=1
exit $failed
