# SPDX-License-Identifier: Apache-2.0
"""A cluster whose processes each have a host of their own (hosts.py)."""

from __future__ import annotations

import http.client
import json
import os
import pathlib
import subprocess
import threading
import time
from typing import Self

from hosts import Network

HTTP, GRPC, INTERNAL, ADMIN = 8000, 50051, 50052, 50053
# What must be none when nothing runs.
LOAD = ("blocks_live", "blocks_reserved", "tickets", "streams", "slabs_granted",
        "slabs_in_flight", "slabs_quarantined", "running", "waiting")
# gRPC keeps a few pollers and connections; what grows with requests stands out.
SLACK = 16


def model() -> pathlib.Path:
    """The trained model, or where it is not here the embedded one."""
    trained = pathlib.Path(os.environ.get("TANDEM_TEST_DATA", "/nowhere"))
    trained /= "models/stories260K"
    embedded = pathlib.Path(__file__).parents[2] / "models/tales"
    return trained if trained.exists() else embedded


class Cluster:
    """Use it in a `with`."""

    def __init__(self, binaries: pathlib.Path, folder: pathlib.Path,
                 prefill: int, decode: int) -> None:
        self.prefill = [f"prefill-{i}" for i in range(prefill)]
        self.decode = [f"decode-{i}" for i in range(decode)]
        self.workers = self.prefill + self.decode
        self._binaries = binaries
        self._folder = folder
        self._processes: dict[str, subprocess.Popen] = {}
        self._footprints: dict[str, dict[str, int]] = {}
        self.network = Network(["router", *self.workers])
        self.address = self.network["router"].address
        try:
            self._start("router", "tandem-router", "--port", str(HTTP),
                        "--grpc-port", str(GRPC), "--internal-host", self.address,
                        "--internal-port", str(INTERNAL), "--admin-port", str(ADMIN),
                        # Each pair in turn: what nobody uses nobody finds cut.
                        "--policy", "round_robin", "--live-feed", "on",
                        # A slow link is no overload.
                        "--max-expected-wait", "inf")
            for name in self.workers:
                # Small steps and slabs: a handoff has phases to be cut in.
                self._start(name, f"tandem-{name.split('-')[0]}", "--worker-id", name,
                            "--router", f"{self.address}:{INTERNAL}",
                            "--advertise-host", self.network[name].address,
                            "--threads", "1", "--max-num-batched-tokens", "16",
                            "--handoff-slab-bytes", "4KiB",
                            "--kv-cache-memory-bytes", "8MiB")
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self.network.close()

    def _start(self, name: str, program: str, *flags: str) -> None:
        host = self.network[name]
        with (self._folder / f"{name}.log").open("w") as log:
            self._processes[name] = subprocess.Popen(
                host.words(str(self._binaries / program), str(model()), "--host",
                           host.address, "--allow-plaintext", "--log-format", "json",
                           *flags), stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _wait_until_ready(self) -> None:
        for _ in range(600):
            self.check_alive()
            try:
                workers = self.status()["workers"]
                if sum(worker["placeable"] for worker in workers) == len(self.workers):
                    return
            except RuntimeError:
                pass
            time.sleep(0.1)
        raise RuntimeError("the cluster is not ready after a minute")

    def check_alive(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                log = (self._folder / f"{name}.log").read_text()
                raise RuntimeError(f"{name} ended by itself: {log[-2000:]}")

    def status(self) -> dict:
        """The router's view, over its admin port, which is on its loopback."""
        done = subprocess.run(
            self.network["router"].words(str(self._binaries / "tandem"), "status",
                                         "--json", "--admin", f"127.0.0.1:{ADMIN}"),
            capture_output=True, text=True, check=False, timeout=20)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return json.loads(done.stdout)

    def avoided(self, a: str, b: str) -> bool:
        """Whether nothing goes from `a` to `b` now, as the router sees it."""
        state = self.status()
        if a == "router":
            return not any(worker["hello"]["worker"]["worker_id"] == b and
                           worker["placeable"] for worker in state["workers"])
        return any(pair["prefill_worker_id"] == a and pair["decode_worker_id"] == b
                   for pair in state["avoided_pairs"])

    def _footprint(self, name: str) -> dict[str, int]:
        proc = f"/proc/{self._processes[name].pid}"
        return {"descriptors": len(os.listdir(f"{proc}/fd")),
                "threads": len(os.listdir(f"{proc}/task"))}

    def note_footprints(self) -> None:
        self._footprints = {name: self._footprint(name) for name in self._processes}

    def _left(self) -> str:
        state = self.status()
        wrong = [] if state["requests"]["total"] == 0 else ["requests in the router"]
        if len(state["workers"]) != len(self.workers):
            wrong.append(f"{len(state['workers'])} workers")
        for worker in state["workers"]:
            name, load = worker["hello"]["worker"]["worker_id"], worker["load"]
            wrong += [f"{name}: {load[field]} {field}" for field in LOAD
                      if load[field] != 0]
            free = load["blocks_free"] + load["blocks_cached"]
            if free != worker["hello"]["num_blocks"]:
                wrong.append(f"{name}: {free} blocks are free")
        for name, before in self._footprints.items():
            for what, now in self._footprint(name).items():
                if now > before[what] + SLACK:
                    wrong.append(f"{name}: {now} {what}, first {before[what]}")
        return "; ".join(wrong)

    def what_is_left(self, within: float = 40) -> str:
        """What still is there of requests that ended, once all had time to go: a
        slab is in quarantine for 30 s where its writer cannot be asked."""
        end = time.monotonic() + within
        while True:
            left = self._left()
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.25)


class Feed(threading.Thread):
    """Follows the router's live feed: when a request last ran over a pair."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.began: dict[tuple[str, str], float] = {}
        self._known: dict[str, tuple[str, str]] = {}
        self._connection = http.client.HTTPConnection(cluster.address, HTTP)
        self._connection.request("GET", "/v1/tandem/events")
        self._response = self._connection.getresponse()
        self.start()

    def run(self) -> None:
        for line in self._response:
            if not line.startswith(b"data:") or b'"requests"' not in line:
                continue
            requests = json.loads(line[5:])["requests"]
            now, known = time.monotonic(), {}
            for request in requests:
                if request["phase"] != "decoding":
                    continue
                pair = request["prefill_worker"], request["decode_worker"]
                known[request["id"]] = pair
                if self._known.get(request["id"]) != pair:
                    self.began[pair] = now
            self._known = known
