#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints a bill of materials (CycloneDX 1.5, JSON) of built programs: the
Debian packages of every library that they load, and the crates in them.

    scripts/sbom.py build/release/bin/tandem* > sbom.cdx.json

The same programs on the same system give the same bytes.
"""

import json
import pathlib
import re
import subprocess
import sys
import tomllib
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[1]


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def libraries(programs: list[str]) -> set[str]:
    """Paths of what the dynamic linker would load."""
    found = set()
    for program in programs:
        for line in output("ldd", program).splitlines():
            if "not found" in line:
                raise SystemExit(f"{program}: {line.strip()}")
            path = re.search(r"(/\S+) \(0x", line)
            if path:
                found.add(path.group(1))
    return found


def packages_of(paths: set[str]) -> set[str]:
    """Debian's names of the packages, with their architectures."""
    # On a merged /usr, dpkg knows some files by their old places.
    names = {}
    for path in paths:
        for name in [path, str(pathlib.Path(path).resolve())]:
            names[name] = names[name.removeprefix("/usr")] = path
    found = subprocess.run(
        ["dpkg-query", "--search", *names], check=False, capture_output=True, text=True
    )
    packages = {}
    for line in found.stdout.splitlines():
        package, name = line.rsplit(": ", 1)
        if name in names:
            packages[names[name]] = package.split(",")[0]
    for path in sorted(paths - packages.keys()):
        raise SystemExit(f"{path} is of no Debian package")
    return set(packages.values())


def debian_components(programs: list[str]) -> list[dict]:
    release = dict(
        line.split("=", 1)
        for line in pathlib.Path("/etc/os-release").read_text().splitlines()
        if "=" in line
    )
    distribution = f"{release['ID']}-{release['VERSION_ID']}".replace('"', "")
    components = []
    packages = packages_of(libraries(programs))
    form = "${Package}\t${Version}\t${Architecture}\t${source:Package}\n"
    for line in output("dpkg-query", "--show", f"-f={form}", *packages).splitlines():
        name, version, architecture, source = line.split("\t")
        quoted = urllib.parse.quote(version, safe="")
        components.append(
            {
                "type": "library",
                "name": name,
                "version": version,
                "purl": f"pkg:deb/debian/{urllib.parse.quote(name)}@{quoted}"
                f"?arch={architecture}&distro={distribution}",
                "properties": [{"name": "debian:source", "value": source}],
            }
        )
    return components


def crate_components() -> list[dict]:
    """All of the lock file: a crate that only another system's build would
    take is among them."""
    lock = tomllib.loads((ROOT / "text/rust/Cargo.lock").read_text())
    return [
        {
            "type": "library",
            "name": crate["name"],
            "version": crate["version"],
            "purl": f"pkg:cargo/{crate['name']}@{crate['version']}",
            "hashes": [{"alg": "SHA-256", "content": crate["checksum"]}],
        }
        for crate in lock["package"]
        if "checksum" in crate
    ]


def version() -> str:
    text = (ROOT / "CMakeLists.txt").read_text()
    return re.search(r"project\(tandem VERSION (\S+)", text).group(1)


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        raise SystemExit(__doc__.strip())
    components = debian_components(sys.argv[1:]) + crate_components()
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": "tandem",
                "version": version(),
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": sorted(components, key=lambda item: item["purl"]),
    }
    json.dump(bill, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
