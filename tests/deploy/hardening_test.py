#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The programs are built as an attacker would least like them: addresses
chosen at the start, tables that are read-only once bound, no memory both
writable and executable, canaries on stacks, checked copies. And
nobody can let them fail on command (common/failpoint.h).

    hardening_test.py FOLDER-OF-PROGRAMS
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAMS = ["tandem", "tandem-router", "tandem-prefill", "tandem-decode"]


def readelf(*arguments: str) -> str:
    return subprocess.run(
        ["readelf", "--wide", *arguments], check=True, capture_output=True, text=True
    ).stdout


def faults(program: str) -> list[str]:
    """What is missing in one program."""
    found = []
    if "DYN (" not in readelf("--file-header", program):
        found.append("its address is fixed")
    segments = readelf("--segments", program).splitlines()
    if not any(line.split()[:1] == ["GNU_RELRO"] for line in segments):
        found.append("its relocated tables stay writable")
    for line in segments:
        words = line.split()
        # type, offset, two addresses, two sizes, flags, alignment
        if words[:1] in (["GNU_STACK"], ["LOAD"]) and words[-2:-1] == ["RWE"]:
            found.append(f"{words[0]} is writable and executable")
    if not any(line.split()[:1] == ["GNU_STACK"] for line in segments):
        found.append("its stack may be executable")
    if "tandem_fp" in readelf("--sections", program):
        found.append("it has failpoints")
    if "NOW" not in readelf("--dynamic", program):
        found.append("its functions are bound late")
    symbols = readelf("--dyn-syms", program)
    if "__stack_chk_fail" not in symbols:
        found.append("no stack is protected")
    if "_chk@" not in symbols:
        found.append("no copy is checked")
    return found


class HardeningTest(unittest.TestCase):
    def test_programs(self):
        for name in PROGRAMS:
            with self.subTest(name):
                self.assertEqual(faults(str(pathlib.Path(sys.argv[1]) / name)), [])

    def test_a_program_without_all_of_it_is_found(self):
        if not shutil.which("cc"):
            self.skipTest("no C compiler")
        with tempfile.TemporaryDirectory() as folder:
            program = f"{folder}/soft"
            subprocess.run(
                ["cc", "-O0", "-x", "c", "-", "-o", program, "-no-pie"]
                + ["-fno-stack-protector", "-U_FORTIFY_SOURCE"]
                + ["-Wl,-z,norelro,-z,lazy,-z,execstack"],
                input="int main(void) { return 0; }"
                ' __attribute__((section("tandem_fp"))) int place = 1;\n',
                check=True,
                text=True,
                stderr=subprocess.DEVNULL,
            )
            self.assertEqual(len(faults(program)), 7, faults(program))


if __name__ == "__main__":
    if not shutil.which("readelf"):
        print("no readelf")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1])
