# SPDX-License-Identifier: Apache-2.0
"""Compares the engine with forward_numpy.py, live, on fresh checkpoints.

The shapes are those of tests/golden/engine/cases.json, the weights come from
another seed than the goldens'. Exit 0: equal, 1: not, 77: NumPy is missing
(skipped). The venv of the build folder is used if it has NumPy.

Usage: compare_numpy.py --probe build/release/tests/engine_probe [--seed N]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
TOLERANCE = 1e-4  # of the largest logit in the row
CASES = ["llama3_scaled_bf16", "smollm_tied_bf16", "mistral_wide_head_f32",
         "llama_biases_f32", "llama_sharded_f32"]


def find_numpy() -> None:
    """Goes on in the build's venv if NumPy is only there."""
    if importlib.util.find_spec("numpy"):
        return
    venv = ROOT / "build/venv/bin/python"
    if not os.environ.get("TANDEM_IN_VENV") and venv.exists():
        os.environ["TANDEM_IN_VENV"] = "1"
        os.execv(venv, [str(venv), *sys.argv])
    print("SKIPPED: NumPy is in neither python3 nor build/venv")
    raise SystemExit(77)


def probe(binary: pathlib.Path, directory: pathlib.Path,
          requests: list[tuple[int, list[int]]], device: str = "") -> list[dict]:
    text = "".join(f"{steps} {' '.join(map(str, ids))}\n" for steps, ids in requests)
    arguments = [binary, directory] + ([device] if device else [])
    done = subprocess.run(arguments, input=text, text=True,
                          capture_output=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{binary}: exit {done.returncode}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare(binary: pathlib.Path, name: str, case: dict, lengths: list[int],
            steps: int) -> float:
    """The largest error of a logit, as a part of the row's largest one."""
    import make_checkpoints as checkpoints
    import numpy as np
    from forward_numpy import NumpyModel

    worst = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(temporary)
        checkpoints.write_case(case, directory)
        model = NumpyModel(directory)
        prompts = [checkpoints.prompt_ids(case, length) for length in lengths]
        answers = probe(binary, directory, [(steps, ids) for ids in prompts])
        assert len(answers) == len(prompts)
        for ids, answer in zip(prompts, answers):
            rows = model.logits(ids)
            for got, want in ((answer["first"], rows[0]), (answer["last"], rows[-1])):
                error = float(np.abs(np.array(got) - want).max() / np.abs(want).max())
                worst = max(worst, error)
                if not error <= TOLERANCE:
                    raise SystemExit(f"{name}, prompt of {len(ids)}: logits off by {error:.2g}")
            # The ids by the logits of the whole text: an id may differ only
            # where the two best are closer than the tolerance.
            text = ids + answer["greedy"]
            rows = model.logits(text[:-1])[len(ids) - 1:]
            for step, (token, row) in enumerate(zip(answer["greedy"], rows)):
                gap = float(row.max() - row[token])
                if gap > 2 * TOLERANCE * float(np.abs(row).max()):
                    raise SystemExit(f"{name}, prompt of {len(ids)}: step {step} took {token}, "
                                     f"{gap:.2g} below the best")
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probe", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=1000)
    args = parser.parse_args()
    find_numpy()
    import make_checkpoints as checkpoints

    cases = checkpoints.load_cases()
    for name in CASES:
        case = cases[name]
        case["seed"] += args.seed
        worst = compare(args.probe, name, case, [1, 9, 48, 160], 32)
        print(f"{name}: largest relative error {worst:.2g}")


if __name__ == "__main__":
    main()
