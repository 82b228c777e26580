#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A cluster of real processes, each on a host of its own, while the network
between them is cut, lossy, slow and reset: every token of every stream is as
undisturbed, none hangs, nothing is left, and what was cut is left alone in time
and used again soon after.

    python3 tests/network/partition_test.py build/release/bin [--size full] [--seed N]

With $TANDEM_FIGURES its figure is appended to that file as a line of JSON, for
scripts/figures.py. Where
there are no network namespaces it is skipped (exit 77), and says so.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import json
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile
import time

from cluster import Cluster, Feed
from hosts import enter_own_network
from load import Load, generate, requests

SKIPPED = 77
# Of a cut to where nothing is sent over it any more, and of its end to where
# something is again.
AVOIDED_WITHIN, BACK_WITHIN = 5.0, 15.0
GOAL = (f"0 wrong, 0 hung, 0 lost to partitions, nothing left; avoided within "
        f"{AVOIDED_WITHIN:.0f} s, back within {BACK_WITHIN:.0f} s")


@dataclasses.dataclass(frozen=True)
class Size:
    streams: int
    cuts: int            # short ones
    cut_s: float
    watched: int         # long ones, of which the router must know
    trouble_s: float     # loss, slow links and resets, each


SIZES = {"ci": Size(streams=4, cuts=3, cut_s=1.2, watched=0, trouble_s=1),
         "full": Size(streams=16, cuts=20, cut_s=3, watched=9, trouble_s=30)}
ENDS = ("prefill-decode", "router-prefill", "router-decode")
WAYS = ("both", "from", "to")


class Run:
    def __init__(self, cluster: Cluster, size: Size, seed: int) -> None:
        self._cluster = cluster
        self._size = size
        self._chance = random.Random(seed)
        self._bodies = requests(32, 64, seed)
        self._expected = [generate(cluster.address, body) for body in self._bodies]
        self.faults = [outcome.error for outcome in self._expected if outcome.error]
        cluster.note_footprints()
        self._feed = Feed(cluster)
        self._load: Load | None = None
        self.streams = self.failed = 0
        self.gap = 0.0
        self.avoided: list[float] = []
        self.back: list[float] = []

    def all(self) -> None:
        kinds = [(ends, way) for way in WAYS for ends in ENDS]
        with self._phase(f"{self._size.cuts} cuts of {self._size.cut_s} s"):
            for i in range(self._size.cuts):
                self._cut(*kinds[i % len(kinds)])
        if self._size.watched:
            with self._phase(f"{self._size.watched} long cuts, watched"):
                for ends, way in kinds[:self._size.watched]:
                    self._watched_cut(ends, way)
        hosts = self._cluster.network.hosts.values()
        for name, trouble in (
                ("5 % loss", lambda host: host.lose(5)),
                ("resets", lambda host: host.reset(4)),
                ("1 Mbit/s", lambda host: host.slow("1mbit"))):
            # Whoever loses link after link may be told so, but nothing else.
            with self._phase(f"{name} for {self._size.trouble_s} s", lossless=False):
                for host in hosts:
                    trouble(host)
                time.sleep(self._size.trouble_s)
                self._cluster.network.heal()
                self._watch_all_come_back()

    def _phase(self, name: str, lossless: bool = True) -> _Phase:
        return _Phase(self, name, lossless)

    def _ends(self, ends: str) -> tuple[str, str]:
        pick = {"router": ["router"], "prefill": self._cluster.prefill,
                "decode": self._cluster.decode}
        a, b = (self._chance.choice(pick[end]) for end in ends.split("-"))
        return a, b

    def _cut(self, ends: str, way: str) -> None:
        time.sleep(self._chance.uniform(0.2, 0.5))
        self._cluster.network.cut(*self._ends(ends), way)
        time.sleep(self._size.cut_s)
        self._cluster.network.heal()

    def _watched_cut(self, ends: str, way: str) -> None:
        a, b = self._ends(ends)
        time.sleep(1)
        cut = time.monotonic()
        self._cluster.network.cut(a, b, way)
        took = self._until(lambda: self._cluster.avoided(a, b), cut, 12)
        time.sleep(max(0, cut + 8 - time.monotonic()))
        self._cluster.network.heal()
        healed = time.monotonic()
        back = self._until(lambda: self._used_since(a, b, healed), healed, 40)
        self.avoided.append(took)
        self.back.append(back)
        print(f"  {a} {b} {way}: avoided after {took:.1f} s, back after {back:.1f} s",
              flush=True)

    def _watch_all_come_back(self) -> None:
        if not self._size.watched:
            return
        healed = time.monotonic()
        pairs = [(a, b) for a in self._cluster.prefill for b in self._cluster.decode]
        self.back.append(self._until(
            lambda: all(self._used_since(a, b, healed) for a, b in pairs), healed, 60))
        print(f"  all pairs are back after {self.back[-1]:.1f} s", flush=True)

    @staticmethod
    def _until(holds, since: float, at_most: float) -> float:
        while not holds():
            if time.monotonic() - since > at_most:
                return float("inf")
            time.sleep(0.05)
        return time.monotonic() - since

    def _used_since(self, a: str, b: str, since: float) -> bool:
        return any(began > since and b in pair and (a == "router" or a in pair)
                   for pair, began in list(self._feed.began.items()))

    def begin(self) -> Load:
        self._load = Load(self._cluster.address, self._bodies, self._expected,
                          self._size.streams)
        return self._load

    def end(self, name: str, lossless: bool) -> None:
        self._cluster.network.heal()
        load = self._load
        load.finish()
        self._cluster.check_alive()
        left = self._cluster.what_is_left()
        self.streams += load.completed
        self.failed += len(load.failed)
        self.gap = max(self.gap, load.gap)
        faults = [f"wrong tokens: {wrong}" for wrong in load.wrong]
        faults += [f"{load.hung} streams hang"] if load.hung else []
        faults += [f"lost: {why}" for why in load.failed] if lossless else []
        # Nobody crashed, and nobody is to be called the cause of it.
        faults += [f"accused: {why}" for why in load.failed if "suspect" in why]
        faults += [f"left behind: {left}"] if left else []
        self.faults += [f"{name}: {fault}" for fault in faults[:5]]
        kinds = collections.Counter(kind(why) for why in load.failed)
        told = ", ".join(f"{count} {what}" for what, count in kinds.items())
        print(f"{name}: {load.completed} streams, {len(load.wrong)} wrong, "
              f"{load.hung} hung, told of a failure: {told or 'none'}, "
              f"longest silence {load.gap:.1f} s, left: {left or 'nothing'}",
              flush=True)


def kind(error: str) -> str:
    """Of an answer its code."""
    code = re.search(r'"code": ?"(\w+)"', error)
    return code[1] if code else error[:100]


class _Phase:
    """A load around what disturbs it, and what it left."""

    def __init__(self, run: Run, name: str, lossless: bool) -> None:
        self._run, self._name, self._lossless = run, name, lossless

    def __enter__(self) -> None:
        self._run.begin()

    def __exit__(self, *_) -> None:
        self._run.end(self._name, self._lossless)


def report(run: Run, seed: int, size: str) -> bool:
    slow = [f"avoided after {took:.1f} s" for took in run.avoided
            if took > AVOIDED_WITHIN]
    slow += [f"back after {took:.1f} s" for took in run.back if took > BACK_WITHIN]
    for fault in run.faults + slow:
        print(f"FAULT {fault}", flush=True)
    passed = not run.faults and not slow
    value = f"{run.streams} streams, {len(run.faults)} faults"
    if run.avoided:
        value += (f"; avoided within {max(run.avoided):.1f} s, back within "
                  f"{max(run.back):.1f} s")
    value += f"; {run.failed} told of a failure; longest silence {run.gap:.1f} s"
    line = {"row": "network", "asked": GOAL, "measured": value, "held": passed,
            "form": "full" if size == "full" else "small", "seed": seed,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    if figures := os.environ.get("TANDEM_FIGURES"):
        with open(figures, "a") as out:
            out.write(json.dumps(line) + "\n")
    print(value)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("binaries", type=pathlib.Path)
    parser.add_argument("--size", choices=SIZES, default="ci")
    parser.add_argument("--seed", type=int,
                        default=int(os.environ.get("TANDEM_SEED", "1")))
    arguments = parser.parse_args()
    if lacking := enter_own_network():
        print(f"SKIPPED: {lacking}")
        return SKIPPED
    print(f"seed {arguments.seed}, {arguments.size}", flush=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tandem-network-"))
    try:
        with Cluster(arguments.binaries, folder, 2, 2) as cluster:
            run = Run(cluster, SIZES[arguments.size], arguments.seed)
            run.all()
    finally:
        if not os.environ.get("TANDEM_KEEP_LOGS"):
            shutil.rmtree(folder)
    return 0 if report(run, arguments.seed, arguments.size) else 1


if __name__ == "__main__":
    sys.exit(main())
