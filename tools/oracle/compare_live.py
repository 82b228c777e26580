# SPDX-License-Identifier: Apache-2.0
"""Makes the goldens anew with `transformers` and compares; then compares the
engine with float64 NumPy on fresh weights. What `scripts/test.sh --oracles`
runs: not part of CI, since torch takes gigabytes.

Needs: pip install numpy torch transformers.
Usage: compare_live.py [--probe build/release/tests/engine_probe] [--seeds N]
Exit 0: all equal, 1: not.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile

import compare_numpy
import make_checkpoints as checkpoints
import make_goldens
import numpy as np
from forward_numpy import NumpyModel

ROOT = pathlib.Path(__file__).parents[2]


def worst_row(got: dict, want: dict) -> float:
    assert got["ids"] == want["ids"]
    return float(np.abs(np.subtract(got["logits"], want["logits"])).max() / want["max_abs"])


def compare_goldens(name: str, case: dict) -> None:
    committed = json.loads((make_goldens.GOLDENS / f"{name}.json").read_text())["prompts"]
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(temporary)
        checkpoints.write_case(case, directory)
        live = make_goldens.goldens(case, directory)
        numpy_model = NumpyModel(directory)
        worst = ours = 0.0
        for got, want in zip(live, committed, strict=True):
            if got["ids"] != want["ids"] or got["greedy_ids"] != want["greedy_ids"]:
                raise SystemExit(f"{name}, prompt of {len(want['ids'])}: other ids than committed")
            rows = numpy_model.logits(want["ids"])
            for key, row in (("first", rows[0]), ("last", rows[-1])):
                worst = max(worst, worst_row(got[key], want[key]))
                ours = max(ours, worst_row(make_goldens.row(row), want[key]))
    print(f"{name}: goldens differ by {worst:.2g} (transformers now), {ours:.2g} (NumPy)")
    if worst > 1e-7 or ours > 1e-5:
        raise SystemExit(f"{name}: the goldens do not hold")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probe", type=pathlib.Path,
                        default=ROOT / "build/release/tests/engine_probe")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for name, case in checkpoints.load_cases().items():
        compare_goldens(name, case)
    for seed in range(args.seeds):
        for name, case in checkpoints.load_cases().items():
            case["seed"] += 2000 + seed
            worst = compare_numpy.compare(args.probe, name, case, [1, 33, 300], 64)
            print(f"{name}, fresh weights {seed}: largest relative error {worst:.2g}")


if __name__ == "__main__":
    main()
