# SPDX-License-Identifier: Apache-2.0
"""`tandem serve` on free ports of loopback, what its router uses, and honest clients
beside whoever else is there."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import ssl
import subprocess
import sys
import threading
import time
from typing import Self

import http2

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from free_ports import free_port

BODY = json.dumps({"model": "", "prompt": "Once upon a time", "max_tokens": 8,
                   "temperature": 0})
MODEL = pathlib.Path(__file__).parents[2] / "models/tales"


def certificate(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Its own authority, of localhost."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
         "ec_paramgen_curve:P-256", "-nodes", "-keyout", key, "-out", cert, "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-days", "2"], check=True, capture_output=True)
    return cert, key


def trusting(cert: pathlib.Path, *protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(cert))
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def complete(address: tuple[str, int], timeout: float = 20,
             tls: ssl.SSLContext | None = None, key: str = "") -> None:
    """An honest request over HTTP, on a connection of its own."""
    if tls is None:
        connection = http.client.HTTPConnection(*address, timeout=timeout)
    else:
        connection = http.client.HTTPSConnection("localhost", address[1],
                                                 timeout=timeout, context=tls)
    try:
        connection.request("POST", "/v1/completions", BODY,
                           {"Content-Type": "application/json",
                            "Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200 or not json.loads(answer)["choices"]:
            raise ConnectionError(f"{response.status} {answer[:200]}")
    finally:
        connection.close()


class Serving:
    """Use it in a `with`."""

    def __init__(self, binaries: pathlib.Path, log: pathlib.Path, *flags: str,
                 prefill: int = 1, decode: int = 1) -> None:
        self.grpc = ("127.0.0.1", free_port())
        self.http = ("127.0.0.1", free_port())
        self._log = log
        with log.open("w") as out:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", str(binaries / "tandem"), "serve",
                 str(MODEL), "--device", "cpu", "--prefill", str(prefill), "--decode",
                 str(decode), "--threads", "1", "--grpc-port", str(self.grpc[1]), "--port",
                 str(self.http[1]), "--admin-port", str(free_port()), *flags],
                stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        for _ in range(600):
            if "Tandem is ready" in log.read_text():
                break
            if self._process.poll() is not None:
                raise RuntimeError(f"it did not start: {log.read_text()}")
            time.sleep(0.1)
        self.router = self.child("tandem-router")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        self._process.wait()

    def log(self) -> str:
        return self._log.read_text()

    def children(self) -> list[tuple[str, int]]:
        """Their programs' names and process ids, in the order of these."""
        own = self._process.pid
        pids = pathlib.Path(f"/proc/{own}/task/{own}/children").read_text()
        found = []
        for pid in sorted(int(pid) for pid in pids.split()):
            with contextlib.suppress(FileNotFoundError):
                found.append((pathlib.Path(f"/proc/{pid}/comm").read_text().strip(), pid))
        return found

    def child(self, program: str) -> int:
        for name, pid in self.children():
            if name == program:
                return pid
        raise RuntimeError(f"no {program}: {self.log()}")

    def workers(self) -> list[tuple[str, int]]:
        return [(name, pid) for name, pid in self.children()
                if name in ("tandem-prefill", "tandem-decode")]

    def cpu_seconds(self) -> float:
        stat = pathlib.Path(f"/proc/{self.router}/stat").read_text()
        fields = stat.rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> float:
        statm = pathlib.Path(f"/proc/{self.router}/statm").read_text()
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def alive(self) -> bool:
        return pathlib.Path(f"/proc/{self.router}").exists()


class Others(threading.Thread):
    """Honest clients of both ports, one request after another, in a `with`."""

    def __init__(self, **calls) -> None:
        super().__init__(daemon=True)
        self._calls = calls
        self._over = threading.Event()
        self.took: dict[str, list[float]] = {name: [] for name in calls}
        self.failed: dict[str, list[str]] = {name: [] for name in calls}

    def run(self) -> None:
        while not self._over.wait(0.02):
            for name, call in self._calls.items():
                begun = time.monotonic()
                try:
                    call()
                    self.took[name].append(time.monotonic() - begun)
                except (OSError, ValueError, http.client.HTTPException) as error:
                    self.failed[name].append(repr(error))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self.join()

    def words(self) -> str:
        return ", ".join(
            f"{name}: {len(took)} served, slowest {max(took, default=0):.2f} s"
            + (f", {len(self.failed[name])} failed ({self.failed[name][0][:60]})"
               if self.failed[name] else "")
            for name, took in self.took.items())


def grpc_call(address, tls=None, timeout: float = 20, key: str = ""):
    authorization = http2.header(b"authorization", f"Bearer {key}".encode())
    return lambda: http2.generate(address, timeout, tls, authorization)


def http_call(address, tls=None, timeout: float = 20, key: str = ""):
    return lambda: complete(address, timeout, tls, key)
