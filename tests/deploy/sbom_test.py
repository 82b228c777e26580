#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The bill of materials names what the programs are made of, the same each
time, and docs/dependencies.md gives a reason for all that they name themselves.

    sbom_test.py FOLDER-OF-PROGRAMS
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = [
    str(pathlib.Path(sys.argv[1]) / name)
    for name in ["tandem", "tandem-router", "tandem-prefill", "tandem-decode"]
]
# What every program of the system is made of.
SYSTEM = {"gcc-12", "gcc-13", "gcc-14", "glibc"}
CALLED = {"abseil": "abseil", "fmtlib": "fmt", "highway-hwy": "highway"}


def bill() -> str:
    return subprocess.run(
        [ROOT / "scripts/sbom.py", *PROGRAMS],
        check=True,
        capture_output=True,
        text=True,
    ).stdout


class SbomTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.text = bill()
        cls.components = json.loads(cls.text)["components"]

    def test_it_is_the_same_each_time(self):
        self.assertEqual(self.text, bill())

    def test_each_component_is_named_once_with_its_version(self):
        purls = [component["purl"] for component in self.components]
        self.assertEqual(purls, sorted(set(purls)))
        for component in self.components:
            self.assertTrue(component["version"])

    def test_libraries_and_crates_are_there(self):
        names = {component["name"] for component in self.components}
        for pattern in ["libgrpc", "libprotobuf", "libabsl", "libssl", "libc6"]:
            self.assertTrue(any(name.startswith(pattern) for name in names), pattern)
        manifest = tomllib.loads((ROOT / "text/rust/Cargo.toml").read_text())
        for crate, wanted in manifest["dependencies"].items():
            form = wanted if isinstance(wanted, str) else wanted["version"]
            versions = [c["version"] for c in self.components if c["name"] == crate]
            self.assertTrue(versions, crate)
            if form.startswith("="):  # others may be newer
                self.assertIn(form[1:], versions, crate)

    def test_dependencies_are_documented(self):
        document = (ROOT / "docs/dependencies.md").read_text().lower()
        manifest = tomllib.loads((ROOT / "text/rust/Cargo.toml").read_text())
        for crate in manifest["dependencies"]:
            self.assertIn(f"`{crate}`", document)
        needed = set()
        for program in PROGRAMS:
            dynamic = subprocess.run(
                ["readelf", "-d", program], check=True, capture_output=True, text=True
            ).stdout
            needed.update(re.findall(r"NEEDED.*\[(.*)\]", dynamic))
        loaded = subprocess.run(
            ["ldd", *PROGRAMS], check=True, capture_output=True, text=True
        ).stdout
        packages = subprocess.run(
            ["dpkg-query", "--search"]
            + [f"*{library}" for library in needed if f"{library} =>" in loaded],
            check=False,
            capture_output=True,
            text=True,
        ).stdout
        named = {line.split(":")[0] for line in packages.splitlines()}
        self.assertGreater(len(named), 8)
        for component in self.components:
            if component["name"] not in named:
                continue
            source = component["properties"][0]["value"]
            if source not in SYSTEM:
                with self.subTest(component["name"]):
                    self.assertIn(CALLED.get(source, source), document)


if __name__ == "__main__":
    if not all(map(shutil.which, ["dpkg-query", "readelf", "ldd"])):
        print("no Debian")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1])
