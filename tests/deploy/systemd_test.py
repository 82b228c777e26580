# SPDX-License-Identifier: Apache-2.0
"""The systemd units: their variables are flags, the drain fits, and what
systemd-analyze says of them.

    systemd_test.py FOLDER_OF_PROGRAMS
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
PROGRAMS = pathlib.Path(sys.argv.pop(1)).resolve()


class Units(unittest.TestCase):
    def test_variables_are_flags(self) -> None:
        self.assertEqual(len(UNITS), 3)
        for path in UNITS:
            text = path.read_text()
            (program,) = re.findall(r"ExecStart=/usr/local/bin/(\S+)", text)
            help_ = subprocess.run([PROGRAMS / program, "--help"], check=True,
                                   capture_output=True, text=True).stdout
            known = set(re.findall(r"\((TANDEM_[A-Z_]+)\)", help_))
            used = re.findall(r"\b(TANDEM_[A-Z_]+)=", text)
            self.assertTrue(used)
            for variable in used:
                with self.subTest(path.name, variable=variable):
                    self.assertIn(variable, known)

    def test_the_drain_fits(self) -> None:
        for path in UNITS:
            text = path.read_text()
            drain = int(re.search(r"TANDEM_SHUTDOWN_TIMEOUT=(\d+)s", text)[1])
            stop = int(re.search(r"TimeoutStopSec=(\d+)s", text)[1])
            with self.subTest(path.name):
                self.assertGreaterEqual(stop, drain + 10)

    def test_keys_of_the_group_can_be_read(self) -> None:
        """A user that exists while the unit runs can own no key."""
        document = (ROOT / "docs/deploying.md").read_text()
        (group,) = re.findall(r"^groupadd --system (\S+)", document, re.MULTILINE)
        self.assertIn(f"chgrp {group} ", document)
        for path in UNITS:
            with self.subTest(path.name):
                self.assertIn(f"\nSupplementaryGroups={group}\n", path.read_text())

    @unittest.skipUnless(shutil.which("systemd-analyze"), "no systemd-analyze")
    def test_systemd_has_nothing_to_say(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for path in (ROOT / "deploy/systemd").iterdir():
                text = path.read_text().replace("/usr/local/bin", str(PROGRAMS))
                pathlib.Path(folder, path.name).write_text(text)
            units = sorted(map(str, pathlib.Path(folder).glob("*.[st][ea]r*")))
            self.assertEqual(len(units), 4)
            done = subprocess.run(["systemd-analyze", "verify", "--man=no", *units],
                                  capture_output=True, text=True, check=False)
            # Of a machine's own units it may have something to say.
            said = [line for line in done.stderr.splitlines() if "tandem" in line]
            self.assertEqual(said, [])
            for unit in units:
                if not unit.endswith(".service"):
                    continue
                # Exposure of at most 1.5, of 10.
                done = subprocess.run(
                    ["systemd-analyze", "security", "--offline=true",
                     "--threshold=15", unit],
                    capture_output=True, text=True, check=False)
                self.assertEqual(done.returncode, 0, done.stdout[-300:])


if __name__ == "__main__":
    unittest.main()
