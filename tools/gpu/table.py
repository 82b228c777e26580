#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the GPU section of docs/performance.md of what gpu.sh run left.

    table.py [FOLDER or FILE]...

Reads lines of tab-separated words: FACT key value, RESULT name value note,
CASE part name verdict time. What no file has is "not measured"; of two results
of one name the later file's counts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Goal:
    name: str  # of a RESULT
    figure: str
    goal: str
    least: float | None = None
    most: float | None = None
    unit: str = "%"  # of a ratio; else what follows the number


def decode(weights: str, batch: int) -> Goal:
    limit = "copy bandwidth" if batch == 1 else "the limit"
    least = 0.85 if batch == 1 else 0.75
    return Goal(
        f"decode.{weights}.{batch}",
        f"decode, {weights}, batch {batch}, context 1 K",
        f"at least {least:.0%} of {limit}".replace("%", " %"),
        least=least,
    )


def prefill(weights: str, tokens: int) -> Goal:
    return Goal(
        f"prefill.{weights}.{tokens}",
        f"prefill, {weights}, {tokens} tokens",
        "at least 75 % of the matrix rate",
        least=0.75,
    )


GOALS = [
    *(decode(weights, batch) for weights in ("bf16", "fp8") for batch in (1, 64, 256)),
    *(prefill(weights, tokens) for weights in ("bf16", "fp8") for tokens in (2048, 8192)),
    # How far they come is to be seen first.
    *(
        Goal(f"decode.{weights}.{batch}", decode(weights, batch).figure, "")
        for weights in ("int8", "int4", "w8a8")
        for batch in (1, 64, 256)
    ),
    *(
        Goal(f"prefill.{weights}.2048", prefill(weights, 2048).figure, "")
        for weights in ("int8", "int4", "w8a8")
    ),
    Goal(
        "attention.decode",
        "paged decode attention alone, batch 64, context 8 K",
        "at least 85 % of copy bandwidth",
        least=0.85,
    ),
    Goal(
        "attention.prefill",
        "prefill attention alone, 8 K, head dimension 128, causal",
        "at least 550 TFLOP/s",
        least=550,
        unit=" TFLOP/s",
    ),
    Goal(
        "handoff.device",
        "handoff of a 2 K prompt not hidden, KV gathered into device slabs",
        "under 5 % of prefill",
        most=0.05,
    ),
    Goal(
        "handoff.host",
        "the same, into pinned host memory",
        "under 5 % of prefill",
        most=0.05,
    ),
    *(
        Goal(
            f"host.bf16.{batch}",
            f"host time per decode step not overlapped, batch {batch}",
            "under 100 us",
            most=100,
            unit=" us",
        )
        for batch in (1, 64, 256)
    ),
]
MOST_EXACT = 1.05
LIMITS = [("limit.copy", "copy bandwidth"), ("limit.matrix", "matrix rate")]


@dataclass
class Results:
    facts: dict[str, str] = field(default_factory=dict)
    values: dict[str, tuple[float, str]] = field(default_factory=dict)
    cases: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)

    def read(self, path: Path) -> None:
        for line in path.read_text(errors="replace").splitlines():
            words = line.split("\t")
            if words[0] == "FACT" and len(words) >= 3:
                self.facts[words[1]] = words[2]
            elif words[0] == "RESULT" and len(words) >= 4:
                self.values[words[1]] = (float(words[2]), words[3])
            elif words[0] == "CASE" and len(words) >= 5:
                self.cases[words[1], words[2]] = (words[3], words[4])


def row(goal: Goal, results: Results) -> str:
    if goal.name not in results.values:
        return f"| {goal.figure} | {goal.goal} | not measured | | |"
    value, note = results.values[goal.name]
    met = (goal.least is None or value >= goal.least) and (
        goal.most is None or value <= goal.most
    )
    verdict = "" if not goal.goal else "yes" if met else "**no**"
    shown = f"{value * 100:.1f} %" if goal.unit == "%" else f"{value:.4g}{goal.unit}"
    return f"| {goal.figure} | {goal.goal} | {shown} | {verdict} | {note} |"


def markdown(results: Results) -> str:
    facts = results.facts
    lines = ["## GPU", ""]
    if results.values or results.cases:
        known = [f"{key} {value}" for key, value in facts.items() if key != "date"]
        lines += [f"{facts.get('date', 'no date')}: " + "; ".join(known) + ".", ""]
    limits = [
        f"{name} {results.values[key][0]:.4g} {results.values[key][1]}"
        for key, name in LIMITS
        if key in results.values
    ]
    if limits:
        lines += ["Limits of the same run: " + ", ".join(limits) + ".", ""]
    lines += ["| figure | goal | measured | met | |", "| --- | --- | --- | --- | --- |"]
    lines += [row(goal, results) for goal in GOALS]
    exact = {k: v for k, v in results.values.items() if k.startswith("exact.")}
    worst = max(exact, key=lambda k: exact[k][0], default=None)
    shown = "not measured | | |"
    if worst is not None:
        ratio = exact[worst][0]
        met = "yes" if ratio <= MOST_EXACT else "**no**"
        shown = f"{ratio:.3f} | {met} | at worst, {worst[6:]} |"
    lines.append(
        f"| exact kernels over the best unconstrained, per shape | at most {MOST_EXACT} | {shown}"
    )
    if exact:
        lines += ["", "| product | exact over best | |", "| --- | --- | --- |"]
        lines += [f"| {k[6:]} | {v:.3f} | {note} |" for k, (v, note) in exact.items()]
    if results.cases:
        lines += ["", "| tests | | |", "| --- | --- | --- |"]
        lines += [
            f"| {part}: {name} | {verdict} | {took} |"
            for (part, name), (verdict, took) in results.cases.items()
        ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    results = Results()
    files: list[Path] = []
    for argument in map(Path, arguments):
        files += sorted(argument.rglob("*.txt")) if argument.is_dir() else [argument]
    for path in sorted((p for p in files if p.exists()), key=lambda p: p.stat().st_mtime):
        results.read(path)
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
