# SPDX-License-Identifier: Apache-2.0
"""States the sampler in NumPy and compares it with the kernels', draw by draw.

The order of kernels/sampling.h in float64: edits of single logits (bias,
repetition, penalty), temperature, top-k, top-p, min-p, typical-p, then a race: the id with
the least exponential number of its own, made of bits of Philox4x32-10, by its weight. Exit 0:
all equal, 1: not, 77: no NumPy.

Usage: compare_sampler.py --probe build/release/tests/sampler_probe
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

try:
    import numpy as np
except ImportError:
    print("skipped: NumPy is not installed for this python")
    sys.exit(77)

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def philox(counter: list[int], key: int) -> list[int]:
    low, high = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (b >> 32) ^ counter[1] ^ low,
            b & 0xFFFFFFFF,
            (a >> 32) ^ counter[3] ^ high,
            a & 0xFFFFFFFF,
        ]
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return counter


def draw(case: dict) -> tuple[int, float, int]:
    vocab = case["vocab"]
    bits = np.array([splitmix64(case["logits_seed"] * 1000003 + i) >> 48 for i in range(vocab)])
    raw = bits.astype(np.float64) / 4096.0 - 8.0
    logprobs = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
    logits = edited(raw, case)
    order = np.lexsort((np.arange(vocab), -logits))
    token = pick(logits, order, case)
    rank = int((raw > raw[token]).sum() + (raw[:token] == raw[token]).sum()) + 1
    return token, float(logprobs[token]), rank


def edited(raw: np.ndarray, case: dict) -> np.ndarray:
    logits = np.full_like(raw, -np.inf) if case["only_edited"] else raw.copy()
    for token, bias, repetition, penalty in case["edits"]:
        x = np.float32(raw[token]) + np.float32(bias)
        x = x / np.float32(repetition) if x > 0 else x * np.float32(repetition)
        logits[token] = x - np.float32(penalty)
    return raw if np.isneginf(logits.max()) else logits


def pick(logits: np.ndarray, order: np.ndarray, case: dict) -> int:
    if case["temperature"] == 0:
        return int(order[0])
    weights = np.exp((logits[order] - logits.max()) / float(np.float32(case["temperature"])))
    keep = weights >= 2.0**-40
    order, weights = order[keep], weights[keep]
    if case["top_k"] > 0:
        order, weights = order[: case["top_k"]], weights[: case["top_k"]]
    if case["top_p"] < 1:
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        keep = before < float(np.float32(case["top_p"])) * weights.sum()
        keep[0] = True
        order, weights = order[keep], weights[keep]
    if case["min_p"] > 0:
        keep = weights >= float(np.float32(case["min_p"]))
        keep[0] = True
        order, weights = order[keep], weights[keep]
    if case["typical_p"] < 1:
        p = weights / weights.sum()
        deviation = np.abs(-np.log(p) + (p * np.log(p)).sum())
        by_deviation = np.argsort(deviation, kind="stable")
        enough = np.cumsum(p[by_deviation]) >= float(np.float32(case["typical_p"]))
        last = by_deviation[int(np.argmax(enough))]
        # The kernels tell information apart by 2^-16 nats.
        keep = deviation <= deviation[last] + 2e-5
        order, weights = order[keep], weights[keep]
    scores = []
    for token, weight in zip(order.tolist(), weights.tolist(), strict=True):
        block = token // 64 * 16 + token % 16
        bits = philox([case["position"], case["index"], block, 0], case["seed"])[token // 16 % 4]
        scores.append((-np.log((bits + 0.5) / 2.0**32) / weight, token))
    return int(min(scores)[1])


def random_edits(random: np.random.Generator, vocab: int) -> list[tuple]:
    ids = random.permutation(vocab)[: int(random.integers(0, min(vocab, 40) + 1))]
    return [
        (
            int(token),
            float(random.choice([0.0, 0.0, 1.5, -3.25, -np.inf])),
            float(random.choice([1.0, 1.25, 0.5])),
            float(random.choice([0.0, 0.75, -0.5])),
        )
        for token in sorted(ids)
    ]


def line_of(case: dict) -> str:
    edits = [str(field) for edit in case["edits"] for field in edit]
    head = [str(value) for key, value in case.items() if key != "edits"]
    return " ".join([*head, str(len(case["edits"])), *edits]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probe", type=pathlib.Path, required=True)
    parser.add_argument("--cases", type=int, default=1500)
    args = parser.parse_args()
    random = np.random.default_rng(1)
    cases = []
    for i in range(args.cases):
        vocab = int(random.choice([2, 7, 100, 512]))
        cases.append({
            "vocab": vocab,
            "logits_seed": i,
            "temperature": float(random.choice([0.0, 0.3, 0.7, 1.0, 1.7])),
            "top_k": int(random.choice([0, 1, 5, 40])),
            "top_p": float(random.choice([1.0, 0.95, 0.5, 0.1])),
            "min_p": float(random.choice([0.0, 0.05, 0.3])),
            "typical_p": float(random.choice([1.0, 1.0, 0.9, 0.3])),
            "seed": int(random.integers(0, 2**63)),
            "index": int(random.integers(0, 4)),
            "position": int(random.integers(0, 5000)),
            "only_edited": int(random.integers(0, 5) == 0),
            "edits": random_edits(random, vocab) if i % 2 else [],
        })
    text = "".join(line_of(case) for case in cases)
    answer = subprocess.run([str(args.probe)], input=text, capture_output=True, text=True,
                            check=True).stdout.splitlines()
    assert len(answer) == len(cases), f"{len(answer)} answers to {len(cases)} cases"
    wrong = 0
    for case, line in zip(cases, answer, strict=True):
        token, logprob, rank = line.split()
        want = draw(case)
        if (int(token), int(rank)) != (want[0], want[2]) or abs(float(logprob) - want[1]) > 1e-4:
            wrong += 1
            print(f"{case}: the kernel says {line}, NumPy {want}")
    print(f"{len(cases)} draws compared, {wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
