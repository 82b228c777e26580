#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hostile clients of a router's public ports: what they cost, what honest clients
see meanwhile, and that the next of them is served.

    python3 tests/network/public_port_test.py build/release/bin [--size full]

HTTP is our own server, whose limits must hold. gRPC is the library's: what it does
is printed, for SECURITY.md, and required is that it lives and serves afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import resource
import select
import socket
import ssl
import struct
import sys
import tempfile
import time

import http2
from http2 import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    call_headers,
    frame,
    header,
    integer,
)
from serving import Others, Serving, certificate, grpc_call, http_call, trusting

# gRPC may still be at work: 30 000 calls that were reset take it up to 4.5 s of a
# core that nobody else uses.
NEXT_WITHIN = 20.0


WAITING = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def take(s: socket.socket) -> None:
    """What has come, so that nobody waits for us; raises at its end."""
    with contextlib.suppress(*WAITING):
        while s.recv(1 << 16):
            pass
        raise ConnectionError("closed")


def send_all(s: socket.socket, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        take(s)
        try:
            rest = rest[s.send(rest):]
        except WAITING:
            if select.select([s], [s], [], 20) == ([], [], []):
                raise


def send(s: socket.socket, pieces, stay: float = 0) -> int:
    """How many bytes went before the other side hung up; and stays for so many
    seconds."""
    sent = 0
    # By one thread: two may not use a TLS connection at a time.
    s.setblocking(False)
    try:
        for piece in pieces:
            send_all(s, piece)
            sent += len(piece)
        end = time.monotonic() + stay
        while (left := end - time.monotonic()) > 0:
            select.select([s], [], [], left)
            take(s)
    except OSError:
        pass
    return sent


def hung_up(s: socket.socket) -> bool:
    """Whether the other side has, whatever it said before; closes ours."""
    s.setblocking(False)
    try:
        while s.recv(1 << 16):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        s.close()


def header_flood(serving: Serving, scale: int) -> str:
    """One header without an end, in CONTINUATION frames (CVE-2023-33953)."""
    total = scale * 2 << 20
    begin = call_headers(b"/x") + b"\0" + integer(1, 0, 7) + b"x" + integer(total, 0, 7)
    with http2.connect(serving.grpc) as s:
        sent = send(s, [frame(HEADERS, 0, 1, begin)]
                    + [frame(CONTINUATION, 0, 1, b"a" * 16384)] * (total >> 14)
                    + [frame(CONTINUATION, END_HEADERS, 1)])
    return f"{sent >> 10} KiB of {total >> 10} taken"


def many_headers(serving: Serving, scale: int) -> str:
    """Headers beyond the limit in one block, call after call."""
    big = b"".join(header(b"x%d" % i, b"v" * 100) for i in range(120))
    with http2.connect(serving.grpc) as s:
        sent = send(s, (frame(HEADERS, END_HEADERS | END_STREAM, 2 * i + 1,
                              call_headers(http2.GENERATE, big))
                        for i in range(100 * scale)))
    return f"{sent >> 10} KiB in {100 * scale} calls"


def empty_continuations(serving: Serving, scale: int) -> str:
    """CONTINUATION frames with nothing in them, for ever."""
    with http2.connect(serving.grpc) as s:
        batch = frame(CONTINUATION, 0, 1) * 1000
        sent = send(s, [frame(HEADERS, 0, 1, call_headers(b"/x"))]
                    + [batch] * 50 * scale)
    return f"{sent // 9} frames taken"


def stream_resets(serving: Serving, scale: int) -> str:
    """Calls that are begun and reset at once (CVE-2023-44487)."""
    calls = 2500 * scale
    block = call_headers(http2.GENERATE)

    def pieces():
        for first in range(0, calls, 50):
            yield b"".join(
                frame(HEADERS, END_HEADERS, 2 * i + 1, block)
                + frame(RST_STREAM, 0, 2 * i + 1, struct.pack(">I", 8))
                for i in range(first, first + 50))

    with http2.connect(serving.grpc) as s:
        sent = send(s, pieces())
    return f"{calls} calls, {sent >> 10} KiB taken"


def pings_and_settings(serving: Serving, scale: int) -> str:
    batch = (frame(PING, 0, 0, b"12345678") + frame(SETTINGS)) * 500
    with http2.connect(serving.grpc) as s:
        sent = send(s, [batch] * 20 * scale)
    return f"{sent >> 10} of {len(batch) * 20 * scale >> 10} KiB taken"


def open_streams(serving: Serving, scale: int) -> str:
    """Calls that never say what they want."""
    block = call_headers(http2.GENERATE)
    with http2.connect(serving.grpc) as s:
        sent = send(s, [b"".join(frame(HEADERS, END_HEADERS, 2 * i + 1, block)
                                 for i in range(1000))], stay=0.5 * scale)
    return f"1000 calls open, {sent >> 10} KiB"


def no_descriptors(serving: Serving) -> str:
    """More connections than the process may have descriptors: both ports serve again
    afterwards (gRPC's own listener would be deaf, CVE-2023-4785)."""
    open_now = len(list(pathlib.Path(f"/proc/{serving.router}/fd").iterdir()))
    soft, hard = resource.prlimit(serving.router, resource.RLIMIT_NOFILE)
    if soft != hard:
        return f"no descriptors: {soft} of {hard} allowed"
    resource.prlimit(serving.router, resource.RLIMIT_NOFILE, (open_now + 64, hard))
    held = []
    for address in (serving.grpc, serving.http) * 2:
        for _ in range(150):
            s = socket.socket()
            s.settimeout(0.2)
            try:
                s.connect(address)
                held.append(s)
            except OSError:
                s.close()
    time.sleep(0.5)
    for s in held:
        s.close()
    resource.prlimit(serving.router, resource.RLIMIT_NOFILE, (hard, hard))
    for port, call in {"gRPC": grpc_call(serving.grpc, timeout=2),
                       "HTTP": http_call(serving.http, timeout=2)}.items():
        if why := next_is_served(call, port):
            return f"no descriptors: {why}"
    print("no descriptors left: both ports serve again")
    return ""


def one_byte(address):
    """Writers of a byte now and then (slowloris), beside 100 that write nothing."""
    def probe(serving: Serving, scale: int) -> str:
        target = getattr(serving, address)
        idle = [socket.create_connection(target, 5) for _ in range(100)]
        slow = [socket.create_connection(target, 5) for _ in range(20)]
        first = http2.PREFACE if address == "grpc" else b"POST /v1/completions HTTP/1.1"
        end = time.monotonic() + scale
        for i in range(1000):
            for s in slow:
                try:
                    s.sendall(first[i % len(first):i % len(first) + 1])
                except OSError:
                    pass
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        closed = sum(hung_up(s) for s in idle + slow)
        return f"after {scale} s {closed} of 120 are closed"
    return probe


def http_headers(serving: Serving, scale: int) -> str:
    with socket.create_connection(serving.http, 20) as s:
        sent = send(s, [b"GET / HTTP/1.1\r\n"] + [b"X: " + b"a" * 1000 + b"\r\n"]
                    * 1000 * scale)
    if sent > 1 << 20:
        raise AssertionError(f"{sent} bytes of headers were taken")
    return "refused"


def connections(address):
    """1500 connections at once, of which 1024 are allowed."""
    def probe(serving: Serving, scale: int) -> str:
        held = []
        for _ in range(1500):
            s = socket.socket()
            s.settimeout(1)
            try:
                s.connect(getattr(serving, address))
                held.append(s)
            except OSError:
                s.close()
        time.sleep(0.3)
        refused = sum(hung_up(s) for s in held)
        if refused < 400:
            raise AssertionError(f"only {refused} of {len(held)} were refused")
        return f"{refused} of {len(held)} refused"
    return probe


def half_open_tls(address):
    """Handshakes that stop within their first message."""
    def probe(serving: Serving, scale: int) -> str:
        held = [socket.create_connection(getattr(serving, address), 5)
                for _ in range(100)]
        for s in held:
            s.sendall(b"\x16\x03\x01\x02\x00\x01")
        time.sleep(12 if scale > 4 else 0.5)
        closed = sum(hung_up(s) for s in held)
        if scale > 4 and closed < 100:
            raise AssertionError(f"{100 - closed} are open after 12 s")
        return f"{closed} of 100 closed by the server"
    return probe


GRPC = {"one endless header": header_flood,
        "headers beyond the limit": many_headers,
        "empty CONTINUATION frames": empty_continuations,
        "streams that are reset": stream_resets,
        "pings and settings": pings_and_settings,
        "streams that stay open": open_streams,
        "too many connections (gRPC)": connections("grpc"),
        "one-byte and idle writers (gRPC)": one_byte("grpc")}
HTTP = {"endless headers (HTTP)": http_headers,
        "too many connections (HTTP)": connections("http"),
        "one-byte and idle writers (HTTP)": one_byte("http")}
TLS = {"half-open TLS (gRPC)": half_open_tls("grpc"),
       "half-open TLS (HTTP)": half_open_tls("http")}


def next_is_served(call, name: str) -> str:
    """"" or why not, though there was time."""
    end, why = time.monotonic() + NEXT_WITHIN, ""
    while time.monotonic() < end:
        try:
            call()
            return ""
        except (OSError, ValueError) as error:
            why = f"{name} serves nobody afterwards: {error!r}"
            time.sleep(0.2)
    return why


def run(serving: Serving, probes: dict, scale: int, grpc_tls: ssl.SSLContext | None,
        http_tls: ssl.SSLContext | None) -> list[str]:
    faults = []
    after = {"gRPC": grpc_call(serving.grpc, grpc_tls, timeout=2),
             "HTTP": http_call(serving.http, http_tls, timeout=2)}
    for name, probe in probes.items():
        cpu, rss = serving.cpu_seconds(), serving.rss_mib()
        with Others(gRPC=grpc_call(serving.grpc, grpc_tls),
                    HTTP=http_call(serving.http, http_tls)) as others:
            time.sleep(0.2)
            begun = time.monotonic()
            try:
                what = probe(serving, scale)
            except AssertionError as error:
                what = str(error)
                faults.append(f"{name}: {what}")
            took = time.monotonic() - begun
        if not serving.alive():
            return [*faults, f"{name}: the router died: {serving.log()[-2000:]}"]
        print(f"{name}: {what} in {took:.1f} s; router: "
              f"{serving.cpu_seconds() - cpu:.2f} s of CPU, "
              f"{serving.rss_mib() - rss:+.0f} MiB; {others.words()}", flush=True)
        for port, call in after.items():
            if why := next_is_served(call, port):
                faults.append(f"{name}: {why}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("binaries", type=pathlib.Path)
    parser.add_argument("--size", choices=("small", "full"), default="small")
    arguments = parser.parse_args()
    scale = 12 if arguments.size == "full" else 1
    resource.setrlimit(resource.RLIMIT_NOFILE,
                       (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory(prefix="tandem-public-") as name:
        folder = pathlib.Path(name)
        with Serving(arguments.binaries, folder / "log") as serving:
            faults = run(serving, GRPC | HTTP, scale, None, None)
            if why := no_descriptors(serving):
                faults.append(why)
        cert, key = certificate(folder)
        with Serving(arguments.binaries, folder / "tls.log", "--ssl-certfile",
                     str(cert), "--ssl-keyfile", str(key)) as serving:
            faults += run(serving, TLS, scale, trusting(cert, "h2"), trusting(cert))
    for fault in faults:
        print(f"FAULT {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
