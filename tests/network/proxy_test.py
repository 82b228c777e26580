#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""deploy/haproxy/haproxy.cfg with a real HAProxy in front of a real router: streams
of both APIs go through as they are, hostile clients end at the proxy, and honest
ones beside them are served.

    python3 tests/network/proxy_test.py build/release/bin

Skipped (exit 77) where there is no haproxy.
"""

from __future__ import annotations

import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from typing import Self

import http2
from http2 import CONTINUATION, END_HEADERS, HEADERS, RST_STREAM, call_headers, frame
from public_port_test import hung_up, send
from serving import (
    BODY,
    Others,
    Serving,
    certificate,
    complete,
    free_port,
    grpc_call,
    http_call,
    trusting,
)

CONFIG = pathlib.Path(__file__).parents[2] / "deploy/haproxy/haproxy.cfg"
BINARIES = pathlib.Path()
KEY = "sesame"


class Proxy:
    """HAProxy with the shipped configuration. Use it in a `with`."""

    def __init__(self, serving: Serving, pem: pathlib.Path, log: pathlib.Path,
                 **more: str) -> None:
        self.http = ("localhost", free_port())
        self.grpc = ("localhost", free_port())
        places = {"TANDEM_PEM": str(pem), "TANDEM_HTTP": f"127.0.0.1:{self.http[1]}",
                  "TANDEM_GRPC": f"127.0.0.1:{self.grpc[1]}",
                  "TANDEM_ROUTER_HTTP": "{}:{}".format(*serving.http),
                  "TANDEM_ROUTER_GRPC": "{}:{}".format(*serving.grpc)}
        with log.open("w") as out:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "haproxy", "-db", "-f",
                 str(CONFIG)], stdout=out, stderr=out,
                env={**os.environ, **places, **more})
        for _ in range(100):
            try:
                socket.create_connection(self.http, 1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"haproxy did not start: {log.read_text()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        self._process.wait()


class ProxyTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = pathlib.Path(
            cls.enterClassContext(tempfile.TemporaryDirectory(prefix="tandem-proxy-")))
        cert, key = certificate(cls.folder)
        cls.pem = cls.folder / "front.pem"
        cls.pem.write_text(cert.read_text() + key.read_text())
        cls.h2, cls.h1 = trusting(cert, "h2"), trusting(cert)
        cls.serving = cls.enterClassContext(
            Serving(BINARIES, cls.folder / "serve.log", "--api-key", KEY))

    def start(self, **more: str) -> Proxy:
        return self.enterContext(
            Proxy(self.serving, self.pem, self.folder / "haproxy.log", **more))

    def others(self, proxy: Proxy) -> Others:
        return Others(gRPC=grpc_call(proxy.grpc, self.h2, key=KEY),
                      HTTP=http_call(proxy.http, self.h1, key=KEY))

    def assert_served(self, others: Others) -> None:
        for name, failed in others.failed.items():
            self.assertEqual(failed, [], name)
            self.assertGreater(len(others.took[name]), 0, name)

    def assert_router_untouched(self, cpu: float, rss: float) -> None:
        self.assertLess(self.serving.cpu_seconds() - cpu, 2)
        self.assertLess(self.serving.rss_mib() - rss, 64)

    def test_streams_and_keys_pass(self):
        proxy = self.start()
        connection = http.client.HTTPSConnection(*proxy.http, context=self.h1)
        body = {**json.loads(BODY), "stream": True, "max_tokens": 32,
                "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body),
                           {"Content-Type": "application/json",
                            "Authorization": f"Bearer {KEY}",
                            "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
        response = connection.getresponse()
        self.assertEqual(response.status, 200)
        events = [line for line in response if line.startswith(b"data: ")]
        self.assertGreater(len(events), 16)
        self.assertEqual(events[-1].strip(), b"data: [DONE]")
        connection.close()
        # One message for each token, and the router's own trailers behind them.
        self.assertGreater(grpc_call(proxy.grpc, self.h2, key=KEY)(), 8)
        with self.assertRaises(ConnectionError):
            grpc_call(proxy.grpc, self.h2, key="wrong")()
        with self.assertRaises(ConnectionError):
            complete(proxy.http, 5, self.h1, "wrong")
        self.assertIn("ab" * 16, self.serving.log())

    def test_a_long_prefill_is_waited_for(self):
        proxy = self.start(TANDEM_CLIENT_TIMEOUT="1s")
        workers = [self.serving.child(f"tandem-{role}")
                   for role in ("prefill", "decode")]
        threading.Timer(2.5, lambda: [os.kill(pid, signal.SIGCONT)
                                      for pid in workers]).start()
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        complete(proxy.http, 20, self.h1, KEY)
        self.assertGreater(time.monotonic() - begun, 2)

    def test_headers_end_at_the_proxy(self):
        proxy = self.start()
        cpu, rss = self.serving.cpu_seconds(), self.serving.rss_mib()
        big = http2.header(b"x", b"v" * 7500)
        with self.others(proxy) as others:
            for _ in range(10):
                with self.assertRaises(ConnectionError):
                    http2.generate(proxy.grpc, 5, self.h2, big)
                with http2.connect(proxy.grpc, tls=self.h2) as s:
                    begin = call_headers(b"/x") + b"\0" + http2.integer(1, 0, 7) + b"x"
                    begin += http2.integer(64 << 20, 0, 7)
                    sent = send(s, [frame(HEADERS, 0, 1, begin)]
                                + [frame(CONTINUATION, 0, 1, b"a" * 16384)] * 4096)
                    self.assertLess(sent, 32 << 20)
        self.assert_served(others)
        self.assert_router_untouched(cpu, rss)

    def test_reset_streams_end_at_the_proxy(self):
        proxy = self.start(TANDEM_REQUEST_RATE="500")
        cpu, rss = self.serving.cpu_seconds(), self.serving.rss_mib()
        block = call_headers(http2.GENERATE)
        calls = (frame(HEADERS, END_HEADERS, 2 * i + 1, block)
                 + frame(RST_STREAM, 0, 2 * i + 1, struct.pack(">I", 8))
                 for i in range(50000))
        with http2.connect(proxy.grpc, tls=self.h2) as s:
            send(s, calls)
        self.assert_router_untouched(cpu, rss)

    def test_one_address_has_a_share_of_the_connections(self):
        proxy = self.start()
        held, closed = [], 0
        for _ in range(100):
            try:
                held.append(socket.create_connection(proxy.http, 1))
            except ConnectionResetError:
                closed += 1
        time.sleep(0.5)
        closed += sum(hung_up(s) for s in held)
        self.assertGreaterEqual(closed, 60)
        time.sleep(0.5)
        complete(proxy.http, 20, self.h1, KEY)

    def test_slow_handshakes_and_headers_are_cut(self):
        # The others call for seconds, a connection each.
        proxy = self.start(TANDEM_CLIENT_TIMEOUT="3s", TANDEM_CONNECTION_RATE="5000")
        half_open = socket.create_connection(proxy.grpc, 20)
        half_open.sendall(b"\x16\x03\x01\x02\x00\x01")
        slow = self.h1.wrap_socket(socket.create_connection(proxy.http, 20),
                                   server_hostname="localhost")
        slow.sendall(b"POST /v1/comp")
        begun = time.monotonic()
        with self.others(proxy) as others:
            for s in (half_open, slow):
                answer = s.recv(1024)
                self.assertIn(answer[9:12], (b"", b"408"))
                s.close()
        self.assertLess(time.monotonic() - begun, 15)
        self.assert_served(others)


if __name__ == "__main__":
    if shutil.which("haproxy") is None:
        print("SKIPPED: no haproxy here")
        raise SystemExit(77)
    BINARIES = pathlib.Path(sys.argv.pop(1))
    unittest.main(warnings="ignore")
