#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows of docs/reliability.md's table that tests of ctest hold: runs them, and
tells what they counted (their recorded properties).

    tests/figures/checks.py ROW BUILD [--size full|ci]

BUILD holds release/, and where the row says so asan/ and fuzz/. With
$TANDEM_FIGURES its figure is appended to that file as a line of JSON, for
scripts/figures.py. Status 1: not held.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
Counts = collections.Counter


@dataclasses.dataclass
class Row:
    asked: str
    told: str  # of what was counted
    right: Callable[[Counts], bool]
    programs: dict[str, str]  # of build/release/tests, and which of their tests
    asan: bool = False  # full runs take them from build/asan, too
    full: dict[str, str] = dataclasses.field(default_factory=dict)  # environment


ROWS = {
    "simulation": Row(
        "2 000 seeds, all that once failed among them: 0 failures, equal seeds "
        "give equal runs, each seeded fault is found",
        "{seeds} seeds, {requests} requests, {redone} attempts redone, {replayed} "
        "inputs of recorded cores decided again; {failures} failures in {tests} "
        "tests",
        lambda n: n["seeds"] >= 1990,
        {"simulation_test": "*"},
        full={"TANDEM_SIM_SEEDS": "20000"},
    ),
    "tickets": Row(
        "every bit flipped, cut anywhere, replayed, swapped, of old incarnations, "
        "expired by 1 ms, 10 000 random ones; every method by every kind of "
        "credential: 0 accepted",
        "{bits} bits flipped, {cut} cut, {random} random; {calls} calls with keys "
        "and certificates of all kinds; {failures} failures in {tests} tests",
        lambda n: n["bits"] > 1000 and n["random"] >= 10_000 and n["calls"] >= 500,
        {
            "handoff_test": "Ticket.*:Handoff.*Ticket*:Handoff.Mismatches*:"
            "Handoff.ALinkIsOfTheWorker*",
            "integration_test": "AccessTest.EveryMethodAsksForAKey:"
            "ClusterTlsTest.*Alone",
        },
    ),
    "files": Row(
        "at least 120 made by hand, every byte changed, every truncation: a clear "
        "error within 1 s, memory at most the file and 64 MiB",
        "{files} made by hand, {changed} changed; the slowest took {slowest_ms} ms; "
        "{failures} failures in {tests} tests",
        lambda n: n["files"] >= 120 and n["changed"] >= 5000
        and max(n["slowest_ms"], n["slowest_asan_ms"]) <= 1000,
        {
            "engine_model_test": "Checkpoint.*:Safetensors.*:ModelConfig.*:Quantisation.*:"
            "QuantisedTensors.*",
            "text_test": "HostileTokenizerTest.*:ChatTemplate*",
            "worker_test": "HostileFilesTest.*",
        },
        asan=True,
    ),
    "requests": Row(
        "at least 400 by field and bound, 100 000 changed at random: the right "
        "status, and the next good request is served",
        "{refused} refused by field, of them {sent} sent by gRPC and {posted} by "
        "HTTP to real processes; {messages} changed at random; {failures} failures "
        "in {tests} tests",
        lambda n: min(n["refused"], n["sent"], n["posted"]) >= 400
        and n["messages"] >= 100_000,
        {
            "router_bad_requests_test": "*",
            "integration_test": "BadRequestsTest.*",
        },
    ),
}
FUZZING = (
    "at least ten targets under AddressSanitizer, guided by coverage: 0 crashes, "
    "hangs or floods of memory"
)


def run_program(path: pathlib.Path, which: str, counts: Counts) -> None:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        status = subprocess.run(
            [path, f"--gtest_filter={which}", f"--gtest_output=json:{out.name}",
             "--gtest_brief=1"],
            check=False,
        ).returncode
        text = pathlib.Path(out.name).read_text()
    results = json.loads(text) if text else {"tests": 0, "failures": 0}
    if results["tests"] == 0:
        raise SystemExit(f"{path.name}: no test is called {which}")
    counts["tests"] += results["tests"]
    counts["failures"] += results["failures"]
    if status != 0 and results["failures"] == 0:
        counts["failures"] += 1
    for suite in results["testsuites"]:
        for test in suite["testsuite"]:
            if test.get("result") != "COMPLETED":
                continue
            for key, value in test.items():
                if key == "slowest_ms":
                    counts[key] = max(counts[key], round(float(value)))
                elif str(value).isdigit() and key != "line":
                    counts[key] += int(value)


def check(row: Row, build: pathlib.Path, full: bool) -> tuple[str, bool]:
    os.environ.update(row.full if full else {})
    counts = Counts()
    for program, which in row.programs.items():
        run_program(build / "release/tests" / program, which, counts)
    text = row.told
    if full and row.asan:
        again = Counts()
        for program, which in row.programs.items():
            run_program(build / "asan/tests" / program, which, again)
        counts["failures"] += again["failures"]
        counts["slowest_asan_ms"] = again["slowest_ms"]
        text += "; the same under AddressSanitizer, {slowest_asan_ms} ms"
    held = counts["failures"] == 0 and row.right(counts)
    return text.format_map(counts), held


def fuzz(full: bool) -> tuple[str, bool]:
    seconds = 120 if full else 5
    done = subprocess.run(
        [ROOT / "scripts/fuzz.sh", str(seconds)],
        stdout=subprocess.PIPE, text=True, check=False,
    )
    print(done.stdout)
    targets = re.findall(r"^(fuzz_\w+) +(\d*) runs, .*?(ok|FAILED)", done.stdout, re.MULTILINE)
    failed = [name for name, _, end in targets if end != "ok"]
    runs = sum(int(count or 0) for _, count, _ in targets)
    measured = f"{len(targets)} targets, {seconds} s each, {runs} runs; failed: "
    held = done.returncode == 0 and len(targets) >= 10 and not failed
    return measured + (", ".join(failed) or "none"), held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("row", choices=[*ROWS, "fuzzing"])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--size", choices=("full", "ci"), default="full")
    arguments = parser.parse_args()
    full = arguments.size == "full"
    if arguments.row == "fuzzing":
        asked = FUZZING
        measured, held = fuzz(full)
    else:
        asked = ROWS[arguments.row].asked
        measured, held = check(ROWS[arguments.row], arguments.build, full)
    print(f"{arguments.row}: {asked}\n  {measured}\n  {'held' if held else 'NOT HELD'}")
    if figures := os.environ.get("TANDEM_FIGURES"):
        line = {
            "row": arguments.row,
            "asked": asked,
            "measured": measured,
            "held": held,
            "form": "full" if full else "small",
            "seed": "",
            "date": datetime.date.today().isoformat(),
        }
        with open(figures, "a") as out:
            out.write(json.dumps(line) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
