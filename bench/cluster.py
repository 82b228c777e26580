# SPDX-License-Identifier: Apache-2.0
"""A local cluster of `tandem serve`, and loads from `tandem bench`, for the programs
in this folder."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Self

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))
from free_ports import free_port


class Cluster:
    """Processes on this machine; use it in a `with`."""

    def __init__(self, binaries: pathlib.Path, model: pathlib.Path, log: pathlib.Path,
                 *flags: str) -> None:
        self.binaries = binaries
        self.router = f"127.0.0.1:{free_port()}"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [str(binaries / "tandem"), "serve", str(model), "--device", "cpu",
                 "--grpc-port", self.router.split(":")[1],
                 "--port", str(free_port()), *flags], stdout=out, stderr=out)
        for _ in range(1200):
            if "Tandem is ready" in log.read_text():
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.close()
        raise SystemExit(f"the cluster did not start; see {log}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def cpu_seconds(self, program: str) -> float:
        """What the cluster's processes of this name have used so far."""
        total = 0
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in children.read_text().split():
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
            name, rest = stat.rsplit(")", 1)
            # The kernel keeps 15 characters of a name.
            if name.split("(", 1)[1] == program[:15]:
                fields = rest.split()
                total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def load(self, out: pathlib.Path, *flags: str) -> dict:
        """What `tandem bench` says of a load, each request included."""
        done = subprocess.run(
            [str(self.binaries / "tandem"), "bench", "--router", self.router,
             "--json", str(out), "--save-detailed", "--no-progress", *flags],
            capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(done.stderr)
        return json.loads(out.read_text())
