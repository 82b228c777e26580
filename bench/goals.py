# SPDX-License-Identifier: Apache-2.0
"""Counts the goals of CPU figures that a run of cpu_goals.sh met.

compare_llama.py and system_goals.py note each goal in a file where they are told
one (--goals). Those of prefill's bf16 matrix products, 80 % of the FMA peak, are read
from what kernels_bench printed: prompts of 512 and of 2 048 tokens take 512 rows at once.
A goal that is noted twice, as of int8 weights by groups and by rows (W8A8), is met if
either is.

Usage: bench/goals.py GOALS KERNELS
"""

from __future__ import annotations

import json
import pathlib
import re
import sys

PREFILLS = (512, 2048)
PRODUCT_ROWS = 512
PRODUCT_SHARE = 0.8


def note(file: pathlib.Path | None, goal: str, met: bool) -> None:
    if file is not None:
        with file.open("a") as out:
            out.write(json.dumps({"goal": goal, "met": met}) + "\n")


def products(text: str) -> dict[str, bool]:
    """Goals of the products that kernels_bench measured."""
    met: dict[str, bool] = {}
    peak, shape = 0.0, ""
    for line in text.splitlines():
        if found := re.match(r"FMA peak (\S+) GFLOP/s", line):
            peak = float(found[1])
        elif found := re.match(r"(\S+): .* weights, read at", line):
            shape = found[1]
        elif found := re.match(rf" +{PRODUCT_ROWS} +\S+ +\S+ +\S+% +(\S+) +\S+%", line):
            for prefill in PREFILLS:
                met[f"{shape} bf16 prefill {prefill}, products"] = (
                    float(found[1]) >= PRODUCT_SHARE * peak)
    return met


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: bench/goals.py GOALS KERNELS")
    met = products(pathlib.Path(sys.argv[2]).read_text())
    for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
        noted = json.loads(line)
        met[noted["goal"]] = met.get(noted["goal"], False) or noted["met"]
    print(f"{sum(met.values())} of {len(met)} goals met; missed:\n")
    for goal, is_met in met.items():
        if not is_met:
            print(f"- {goal}")


if __name__ == "__main__":
    main()
