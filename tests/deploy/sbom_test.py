#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The bill of materials names what the programs are made of, the same each
time, docs/dependencies.md gives a reason for all that they name themselves, and
nothing is known against it but what deploy/advisories.json accepts.

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

    def advisories(self, name: str = "", version: str = "") -> tuple[int, str]:
        """What is said of the bill, with another version of one component."""
        components = [
            component | ({"version": version} if component["name"] == name else {})
            for component in self.components
        ]
        if name and name not in {component["name"] for component in components}:
            purl = f"pkg:cargo/{name}@{version}"
            components.append({"name": name, "version": version, "purl": purl})
        done = subprocess.run(
            [ROOT / "scripts/advisories.py"],
            input=json.dumps({"components": components}),
            capture_output=True,
            check=False,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    def test_nothing_is_known_against_it_but_what_is_accepted(self):
        status, said = self.advisories()
        self.assertEqual(status, 0, said)

    def test_what_is_known_is_found_by_its_version(self):
        for name, version, word in [
            ("openssl", "0.10.71", "RUSTSEC-2025-0022"),
            ("openssl", "0.10.38", "RUSTSEC-2023-0072"),
            ("openssl", "0.10.72-beta.1", "RUSTSEC-2025-0022"),
            ("smallvec", "1.6.0", "RUSTSEC-2021-0003"),
            ("rand", "0.8.5", "RUSTSEC-2026-0097"),
            ("paste", "1.0.15", None),
            ("smallvec", "0.6.14", None),
            ("smallvec", "1.6.1", None),
            ("rand", "0.9.3", None),
            ("nobody-knows-this-one", "1.0.0", "is in no list"),
            ("libabsl20220623", "20220623.1-1", "CVE-2025-0838"),
        ]:
            with self.subTest(name, version=version):
                status, said = self.advisories(name, version)
                refused = [line for line in said.splitlines() if "NOT ACC" in line]
                self.assertEqual(status, 1 if word else 0, said)
                self.assertEqual(
                    any(word and word in line for line in refused), word is not None
                )

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
