#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every CPU figure that has a goal, as Markdown tables, beside its peer or limit
# of the same run: kernels, engine beside llama.cpp, whole system; and how many
# are met. About a quarter of an hour on two quiet hardware threads.
#
#   bench/cpu_goals.sh [--threads N] [--work DIR] [--no-amx]
#                      [--activation-dtype f32|bf16|bf16-amx]
#
# --work holds llama.cpp's build and the models (build/llama); --no-amx builds
# llama.cpp without AMX, where its kernels end with an illegal instruction;
# --activation-dtype (f32) is one for all of Tandem's figures.
source "$(dirname "$0")/../scripts/lib.sh"

THREADS=2 WORK=$BUILD/llama AMX=() INPUTS=() DTYPE=()
while [ $# -gt 0 ]; do
  case $1 in
    --threads) THREADS=${2:?} && shift 2 ;;
    --work) WORK=${2:?} && shift 2 ;;
    --no-amx) AMX=(--no-amx) && shift ;;
    --activation-dtype)
      case ${2:?} in
        f32) ;;
        bf16) INPUTS=(--bf16-inputs) ;;
        bf16-amx) INPUTS=(--bf16-amx-inputs) ;;
        *) die "--activation-dtype '$2': one of f32, bf16, bf16-amx" ;;
      esac
      DTYPE=(--activation-dtype "$2") && shift 2
      ;;
    -h | --help) sed -n '3,12s/^# \{0,1\}//p' "$0" && exit 0 ;;
    *) die "unknown argument '$1' (--threads, --work, --no-amx, --activation-dtype)" ;;
  esac
done
build release tandem tandem-router tandem-decode tandem-prefill kernels_bench \
  cpu_bench handoff_bench rpc_relay_bench
PYTHON=$BUILD/venv/bin/python
"$PYTHON" -c 'import gguf' 2>/dev/null || step gguf "gguf (build/venv)" \
  "$BUILD/venv/bin/pip" install -q --disable-pip-version-check gguf==0.19.0

KERNELS=$WORK/kernels.txt GOALS=$WORK/goals.jsonl
mkdir -p "$WORK"
rm -f "$GOALS"

kernels() {
  "$BUILD/release/bin/kernels_bench" --threads "$THREADS" --quick \
    --weights "$1" --rows 1,4,8,16,32,512 "${INPUTS[@]}"
}
printf '## Kernels, %s threads\n\n```\n' "$THREADS"
kernels bf16 | tee "$KERNELS"
for weights in int8 int4 w8a8; do kernels $weights; done
printf '```\n\n## Engine\n\n'
"$PYTHON" "$ROOT/bench/compare_llama.py" --quick --repeats 5 --threads "$THREADS" \
  --goals "$GOALS" --work "$WORK" "${AMX[@]}" "${DTYPE[@]}"
printf '\n## Whole system\n\n'
"$PYTHON" "$ROOT/bench/system_goals.py" --quick --threads "$THREADS" \
  --goals "$GOALS" --work "$WORK" "${AMX[@]}" "${DTYPE[@]}"
printf '\n## Goals\n\n'
"$PYTHON" "$ROOT/bench/goals.py" "$GOALS" "$KERNELS"
