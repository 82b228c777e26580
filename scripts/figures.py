#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints what rows of tests/figures measured as a table, and puts it between
the markers of a page, in place of those rows' lines there.

    scripts/figures.py RESULTS.jsonl PAGE.md

What was measured in full stays until it is measured in full again.
"""

import json
import pathlib
import sys

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
COLUMNS = ("row", "asked", "measured", "held", "form", "seed", "date")
ORDER = (
    "kills",
    "load",
    "cancellation",
    "network",
    "overload",
    "determinism",
    "simulation",
    "tickets",
    "files",
    "requests",
    "fuzzing",
    "rollout",
    "rotation",
    "timing",
    "soak",
)


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def cells_of(result: dict) -> list[str]:
    held = "yes" if result["held"] else "**no**"
    return [held if c == "held" else str(result[c]) for c in COLUMNS]


def rows_of(block: str) -> list[list[str]]:
    lines = [part for part in block.splitlines() if part.startswith("| ")][2:]
    return [[cell.strip() for cell in part[1:-1].split("|")] for part in lines]


def merge(old: list[list[str]], new: list[list[str]]) -> list[list[str]]:
    kept = {row[0] for row in old if row[4] == "full"}
    kept -= {row[0] for row in new if row[4] == "full"}
    fresh = [row for row in new if row[0] not in kept]
    names = {row[0] for row in fresh}
    rows = [row for row in old if row[0] not in names] + fresh
    return sorted(rows, key=lambda row: ORDER.index(row[0]))


def table(rows: list[list[str]]) -> str:
    head = [line(list(COLUMNS)), line(["---"] * len(COLUMNS))]
    return "\n".join(head + [line(row) for row in rows])


def main(results: str, page: str) -> None:
    text = pathlib.Path(results).read_text()
    new = [cells_of(json.loads(part)) for part in text.splitlines()]
    print(table(new))
    path = pathlib.Path(page)
    before, rest = path.read_text().split(BEGIN)
    block, after = rest.split(END)
    rows = merge(rows_of(block), new)
    path.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")
    if any("no" in row[3] for row in new):
        sys.exit("a row was not held")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
