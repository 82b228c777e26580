#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks a bill of materials against deploy/advisories.json: what is known
against each crate, and what Debian has left open in the libraries.

    scripts/sbom.py build/release/bin/tandem* | scripts/advisories.py
    scripts/advisories.py --refresh FOLDER    takes the crates' advisories anew
                                              from a checkout of RustSec's
                                              advisory-db
    ... | scripts/advisories.py --apt         also asks apt for newer packages

Works without a network, but for --apt. What Debian has mended comes with its
updates; an advisory that is known and lived with has its reason in the file.
Status 1: something is known and not accepted, a crate is in no list, or a
reason is left over from what is gone.
"""

import argparse
import datetime
import json
import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIST = ROOT / "deploy/advisories.json"
STALE = datetime.timedelta(days=180)


def numbers(version: str) -> tuple:
    """Orders versions as Cargo does; one before a release comes before it."""
    core, _, before = version.partition("+")[0].partition("-")
    padded = [int(part) for part in core.split(".")] + [0, 0]
    parts = [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in before.split(".")
        if part
    ]
    return (*padded[:3], not before, parts)


def after_caret(version: str) -> str:
    """The first version that `^version` leaves out."""
    parts = [int(part) for part in version.split("-")[0].split(".")]
    first = next((i for i, part in enumerate(parts) if part), len(parts) - 1)
    return ".".join(map(str, [*parts[:first], parts[first] + 1]))


def within(version: str, requirement: str) -> bool:
    """Whether `version` is within, say, ">= 1.2, < 2"."""
    have = numbers(version)
    for part in requirement.split(","):
        match = re.fullmatch(r"\s*(>=|<=|>|<|=|\^)?\s*([0-9][^\s]*)\s*", part)
        if not match:
            raise SystemExit(f"no such requirement: {requirement}")
        sign, limit = match.group(1) or "^", numbers(match.group(2))
        holds = {
            ">=": have >= limit,
            "<=": have <= limit,
            ">": have > limit,
            "<": have < limit,
            "=": have == limit,
            "^": limit <= have < numbers(after_caret(match.group(2))),
        }
        if not holds[sign]:
            return False
    return True


def crate_findings(crates: dict, components: list[dict]) -> list[tuple[str, str]]:
    found = []
    for component in components:
        name, version = component["name"], component["version"]
        if name not in crates["covered"]:
            found.append(("", f"{name} is in no list: run --refresh"))
        for advisory in crates["advisories"]:
            safe = advisory["patched"] + advisory.get("unaffected", [])
            if advisory["crate"] == name and not any(within(version, s) for s in safe):
                kind = advisory.get("kind", "a vulnerability")
                found.append((advisory["id"], f"{name} {version}: {kind}"))
    return found


def older(version: str, than: str) -> bool:
    command = ["dpkg", "--compare-versions", version, "lt", than]
    return subprocess.run(command, check=False).returncode == 0


def debian_findings(known: list[dict], components: list[dict]) -> list[tuple[str, str]]:
    found = set()
    for component in components:
        source = component["properties"][0]["value"]
        for advisory in known:
            fixed = advisory.get("fixed")
            if advisory["source"] == source and (
                fixed is None or older(component["version"], fixed)
            ):
                found.add((advisory["id"], f"{source} {component['version']}"))
    return sorted(found)


def newer_in_apt(components: list[dict]) -> list[tuple[str, str]]:
    found = []
    for component in components:
        name = component["name"]
        policy = subprocess.run(
            ["apt-cache", "policy", name], check=True, capture_output=True, text=True
        ).stdout
        candidate = re.search(r"Candidate: (\S+)", policy)
        if candidate and older(component["version"], candidate.group(1)):
            found.append(("", f"{name}: apt has {candidate.group(1)}"))
    return found


def check(bill: dict, apt: bool) -> int:
    carried = json.loads(LIST.read_text())
    components = {"cargo": [], "deb": []}
    for component in bill["components"]:
        components[re.match(r"pkg:(\w+)/", component["purl"]).group(1)].append(
            component
        )
    found = crate_findings(carried["crates"], components["cargo"])
    found += debian_findings(carried["debian"], components["deb"])
    if apt:
        found += newer_in_apt(components["deb"])
    accepted, faults = carried["accepted"], 0
    for advisory, what in found:
        reason = accepted.get(advisory)
        faults += reason is None
        print(f"{advisory} {what}: {reason or 'NOT ACCEPTED'}".strip())
    for advisory in sorted(accepted.keys() - {advisory for advisory, _ in found}):
        faults += 1
        print(f"{advisory}: accepted, and nothing has it: take it out")
    as_of = datetime.date.fromisoformat(carried["crates"]["as_of"])
    if datetime.date.today() - as_of > STALE:
        print(f"warning: the list is of {as_of}: run --refresh", file=sys.stderr)
    return 1 if faults else 0


def refresh(folder: pathlib.Path):
    lock = tomllib.loads((ROOT / "text/rust/Cargo.lock").read_text())
    covered = sorted({crate["name"] for crate in lock["package"]})
    advisories = []
    for path in sorted(folder.glob("crates/*/RUSTSEC-*.md")):
        if path.parent.name not in covered:
            continue
        entry = tomllib.loads(path.read_text().split("```")[1].removeprefix("toml"))
        if "withdrawn" in entry["advisory"]:
            continue
        versions = entry["versions"]
        advisories.append(
            {"id": entry["advisory"]["id"], "crate": path.parent.name}
            | {"patched": versions["patched"]}
            | ({"unaffected": u} if (u := versions.get("unaffected")) else {})
            | ({"kind": k} if (k := entry["advisory"].get("informational")) else {})
        )
    commit = ["git", "-C", folder, "log", "-1", "--format=%cs"]
    as_of = subprocess.run(commit, check=True, capture_output=True, text=True).stdout
    carried = json.loads(LIST.read_text())
    carried["crates"] = {
        "as_of": as_of.strip(),
        "covered": covered,
        "advisories": advisories,
    }
    LIST.write_text(json.dumps(carried, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--refresh", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--apt", action="store_true")
    arguments = parser.parse_args()
    if arguments.refresh:
        return refresh(arguments.refresh)
    return check(json.load(sys.stdin), arguments.apt)


if __name__ == "__main__":
    sys.exit(main())
