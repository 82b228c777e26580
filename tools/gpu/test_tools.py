#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What table.py and trim_nccl.py do, on results and containers made up here."""

from __future__ import annotations

import struct
import tempfile
import unittest
from pathlib import Path

import table
import trim_nccl


def entry(kind: int, arch: int, body: bytes) -> bytes:
    header = struct.pack("<HHIQIIHHI", kind, 257, 64, len(body), 0, 0, 0, 9, arch)
    return header + bytes(64 - len(header)) + body


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", trim_nccl.CONTAINER_MAGIC, 1, 16, len(body)) + body


class TrimTest(unittest.TestCase):
    def test_keeps_one_architectures_code_where_containers_were(self) -> None:
        wanted = entry(2, 90, b"90" * 8)
        first = container(entry(2, 80, b"80" * 16), wanted, entry(1, 90, b"ptx."))
        second = container(entry(2, 100, b"!" * 24))
        image = bytearray(b"before.." + first + bytes(8) + second + b"after")
        size = len(image)
        containers, kept = trim_nccl.trim_containers(image, 8, size - 5, 90)
        self.assertEqual((containers, kept), (2, len(wanted)))
        self.assertEqual(len(image), size)
        self.assertEqual(bytes(image[24 : 24 + len(wanted)]), wanted)
        # The first says how much is left of it, and the rest is zeros.
        self.assertEqual(struct.unpack_from("<Q", image, 16)[0], len(wanted))
        self.assertEqual(set(image[24 + len(wanted) : 8 + len(first)]), {0})
        at = 8 + len(first) + 8
        self.assertEqual(struct.unpack_from("<IHHQ", image, at)[3], 0)
        self.assertTrue(image.endswith(b"after"))

    def test_refuses_entries_that_do_not_fit(self) -> None:
        broken = bytearray(container(entry(2, 90, b"x" * 8)))
        struct.pack_into("<Q", broken, 8, 40)
        with self.assertRaises(ValueError):
            trim_nccl.trim_containers(broken, 0, len(broken), 90)


class TableTest(unittest.TestCase):
    def test_says_what_is_met_missed_and_not_measured(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "bench.txt").write_text(
                "FACT\tdate\t2026-11-21\nFACT\tdriver\t580\n"
                "RESULT\tdecode.bf16.1\t0.86\t4 ms\n"
                "RESULT\tattention.prefill\t549\tTFLOP/s\n"
                "RESULT\texact.bf16.qkv.1\t1.01\tfine\n"
                "RESULT\texact.bf16.down.64\t1.2\tslow\n"
                "CASE\tprobe\tinstructions\tpassed\t12 s\n"
            )
            results = table.Results()
            results.read(Path(folder, "bench.txt"))
        text = table.markdown(results)
        self.assertIn("at least 85 % of copy bandwidth | 86.0 % | yes | 4 ms |", text)
        self.assertIn("| 549 TFLOP/s | **no** |", text)
        self.assertIn("| 1.200 | **no** | at worst, bf16.down.64 |", text)
        self.assertIn("batch 64, context 1 K | at least 75 % of the limit | not measured |", text)
        self.assertIn("| probe: instructions | passed | 12 s |", text)
        self.assertIn("2026-11-21: driver 580.", text)


if __name__ == "__main__":
    unittest.main()
