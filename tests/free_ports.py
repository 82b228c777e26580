# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that tests, benchmarks and scripts start, as
tests/integration/cluster.cc has them. As a program it prints one."""

from __future__ import annotations

import os
import socket

_next = 12000 + os.getpid() % 700 * 28


def free_port() -> int:
    """Below the ephemeral range, so that no outgoing connection takes it between its
    choice and its use; another each time, and spread over processes."""
    global _next
    for _ in range(20000):
        _next = _next + 1 if _next < 31999 else 12000
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", _next))
            except OSError:
                continue
            return _next
    raise RuntimeError("no port is free")


if __name__ == "__main__":
    print(free_port())
