#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Looks for new inputs with libFuzzer, guided by coverage, under the address
# and undefined-behaviour sanitizers. CI runs the committed corpora only.
#
#   scripts/fuzz.sh [--keep] [SECONDS each, default 60] [TARGET...]
#
# What adds coverage is kept in build/corpus/TARGET for the next time, reduced
# to what the committed corpus does not reach; --keep adds it to that, to be
# looked at and committed. An input that crashes, takes 5 s or 1 GiB ends its
# target, and lies in build/corpus/TARGET-*: put it into the corpus with what
# mends it.
source "$(dirname "$0")/lib.sh"

keep=
if [ "${1:-}" = --keep ]; then
  keep=1
  shift
fi
seconds=60
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
  seconds=$1
  shift
fi

build fuzz "${@:-fuzzers}"
targets=("$@")
if [ ${#targets[@]} = 0 ]; then
  for fuzzer in "$BUILD"/fuzz/fuzz/*; do targets+=("$(basename "$fuzzer")"); done
fi

export UBSAN_OPTIONS=print_stacktrace=1

# One target; a line of what it did. Its log is build/logs/TARGET.log.
run_target() {
  local name=$1 log=$LOGS/$1.log found=$BUILD/corpus/$1 status=0
  local fuzzer=$BUILD/fuzz/fuzz/$name seeds=$BUILD/fuzz/seeds/$name
  # New inputs go to the first folder.
  mkdir -p "$found"
  "$fuzzer" -max_total_time="$seconds" -timeout=5 -rss_limit_mb=1024 \
    -print_final_stats=1 -artifact_prefix="$found-" "$found" "$seeds/" \
    >"$log" 2>&1 || status=$?
  printf '%-20s %10s runs, coverage %6s, %5s inputs  %s\n' "$name" \
    "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")" \
    "$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -n 1)" \
    "$(find -H "$found" "$seeds" -type f | wc -l)" \
    "$([ $status = 0 ] && echo ok || echo "FAILED, see $log")"
  [ $status = 0 ] || return 1
  local into=$seeds
  if [ -z "$keep" ]; then
    into=$found.merged
    rm -rf "$into"
    cp -rL "$seeds" "$into"
  fi
  "$fuzzer" -merge=1 -timeout=5 "$into/" "$found" >>"$log" 2>&1
  rm -rf "$found"
  mkdir "$found"
  [ -n "$keep" ] && return
  # Without what is committed.
  local file
  for file in "$into"/*; do
    [ -e "$seeds/$(basename "$file")" ] || mv "$file" "$found"
  done
  rm -rf "$into"
}

failed=0
for name in "${targets[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "${TANDEM_JOBS:-$(nproc)}" ]; do
    wait -n || failed=1
  done
  run_target "$name" &
done
while [ -n "$(jobs -rp)" ]; do wait -n || failed=1; done
[ $failed = 0 ] || die "fuzzing found something"
