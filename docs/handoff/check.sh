#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks handoff.pml with spin: the protocol as it is must hold, and each
# seeded fault must be found. Exit 77 (a skipped test) without spin.
set -eu
model=$(cd "$(dirname "$0")" && pwd)/handoff.pml
if ! command -v spin >/dev/null 2>&1; then
  echo "SKIPPED: spin is not installed (Debian package: spin)"
  exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# verify NAME [spin flags]: prints the verdict; leaves the log in NAME.log.
verify() {
  name=$1
  shift
  mkdir "$name"
  (
    cd "$name"
    spin -a "$@" "$model" >spin.log 2>&1 || { cat spin.log; exit 2; }
    ${CC:-cc} -O2 -w -DSAFETY -DVECTORSZ=2048 -DNOCLAIM -DCOLLAPSE \
      -o pan pan.c
    # One live attempt is an invariant: it is checked by its own run below.
    ./pan -m1000000 -w24 >../"$name".log 2>&1 || true
    ${CC:-cc} -O2 -w -DVECTORSZ=2048 -DCOLLAPSE -o ltl pan.c
    ./ltl -a -N one_live -m1000000 -w24 >../"$name".ltl.log 2>&1 || true
  )
}

errors() { grep -ho 'errors: [0-9]*' "$1" | cut -d' ' -f2; }
states() { grep -h 'states, stored' "$1" | sed 's/^ *//; s/ .*//' ; }

failed=0
verify correct
for log in correct.log correct.ltl.log; do
  if [ "$(errors $log)" != 0 ] || grep -q 'max search depth too small' $log
  then
    echo "FAILED: the model does not hold ($log)"
    cat $log
    failed=1
  else
    echo "holds: $log, $(states $log) states"
  fi
done
for fault in 1 2; do
  verify fault$fault -DFAULT_$fault
  if [ "$(errors fault$fault.log)" = 0 ]; then
    echo "FAILED: seeded fault $fault was not found"
    failed=1
  else
    echo "found: seeded fault $fault ($(grep -m1 'pan:1' fault$fault.log))"
  fi
done
exit $failed
