#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a copy of libnccl.so.2 that has device code for one architecture.

The wheel's library is hundreds of megabytes, most of it code for other GPUs;
what is left compresses to about 15 MB and can be carried to a GPU machine for a
test run. NCCL's wheel is NVIDIA's: the copy is for such runs and is never
published.

    trim_nccl.py LIBRARY OUT [--arch 90]

Device code lies in `.nv_fatbin` as containers (magic, version, header bytes,
body bytes), each of entries (kind, header bytes, body bytes, ..., arch). The
host code names containers by address, so they stay where they are: within each
the wanted entries move to the front and the rest becomes zeros.
`__nv_relfatbin` is for linking other programs only and becomes zeros whole.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import sys
from pathlib import Path

CONTAINER_MAGIC = 0xBA55ED50
CONTAINER_HEADER = struct.Struct("<IHHQ")  # magic, version, header, body
ENTRY_HEADER = struct.Struct("<HHIQIIHHI")  # kind, version, header, body, ..., arch
KIND_PTX = 1


def sections(image: bytearray) -> dict[str, tuple[int, int]]:
    """Offset and size of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", image, 40)
    count, names = struct.unpack_from("<HH", image, 60)
    headers = [struct.unpack_from("<IIQQQQ", image, table + 64 * i) for i in range(count)]
    strings = headers[names][4]
    found = {}
    for header in headers:
        start = strings + header[0]
        name = bytes(image[start : image.index(0, start)]).decode()
        found[name] = (header[4], header[5])
    return found


def trim_containers(image: bytearray, begin: int, end: int, arch: int) -> tuple[int, int]:
    """Returns how many containers there are and the bytes of code kept."""
    containers = kept_bytes = 0
    at = begin
    while at + CONTAINER_HEADER.size <= end:
        magic, _, header, body = CONTAINER_HEADER.unpack_from(image, at)
        if magic != CONTAINER_MAGIC:
            at += 8  # padding
            continue
        kept = bytearray()
        entry = at + header
        stop = entry + body
        while entry < stop:
            kind, _, entry_header, entry_body, *_, entry_arch = ENTRY_HEADER.unpack_from(image, entry)
            size = entry_header + entry_body
            if kind != KIND_PTX and entry_arch == arch:
                kept += image[entry : entry + size]
            entry += size
        if entry != stop:
            raise ValueError(f"a container at {at:#x} does not end with an entry")
        image[at + header : stop] = kept + bytes(body - len(kept))
        struct.pack_into("<Q", image, at + 8, len(kept))
        containers += 1
        kept_bytes += len(kept)
        at = stop
    return containers, kept_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", type=int, default=90)
    arguments = parser.parse_args()

    image = bytearray(arguments.library.read_bytes())
    found = sections(image)
    if ".nv_fatbin" not in found:
        print(f"{arguments.library}: no .nv_fatbin", file=sys.stderr)
        return 1
    offset, size = found[".nv_fatbin"]
    containers, kept = trim_containers(image, offset, offset + size, arguments.arch)
    if containers == 0 or kept == 0:
        print(f"{arguments.library}: no code for sm_{arguments.arch}", file=sys.stderr)
        return 1
    if "__nv_relfatbin" in found:
        offset, size = found["__nv_relfatbin"]
        image[offset : offset + size] = bytes(size)
    arguments.out.write_bytes(image)
    subprocess.run(["strip", "--strip-debug", str(arguments.out)], check=True)
    print(f"{containers} containers, {kept >> 20} MiB of code for sm_{arguments.arch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
