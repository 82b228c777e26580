#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the documents point to is there: tests by name, files, headings. And what
users look for is in the documents: flags, metrics, routes.
"""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(sys.argv.pop() if len(sys.argv) > 1 else "/none")
DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
TEST = re.compile(r"\bTEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\s*\)")
NAMED = re.compile(r"`(\w+)\.(\w+)`")
# Of other programs, in the pages for users.
FOREIGN_FLAGS = {"args", "create-namespace", "flag", "from-file", "gpus", "help", "no-flag",
                 "now", "preset", "shm-size", "target"}


def anchors(document: pathlib.Path) -> set[str]:
    """The names that GitHub gives to headings."""
    found = set()
    for line in document.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("#").strip().lower()
            found.add(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-"))
    return found


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def flags() -> set[str]:
    """Of all programs and commands, as their help names them, with the --no- form
    of those that have one.
    """
    found: set[str] = set()

    def ask(*words: str) -> None:
        text = subprocess.run([BIN / words[0], *words[1:], "--help"], check=True,
                              capture_output=True, text=True).stdout
        for no, name in re.findall(r"^  --(\[no-\])?([\w-]+)", text, re.MULTILINE):
            found.update([name, f"no-{name}"] if no else [name])
        commands = text.partition("\nCommands:")[2]
        for command in re.findall(r"^  (\w+)  +\S", commands, re.MULTILINE):
            ask(*words, command)

    for program in ("tandem", "tandem-router", "tandem-prefill", "tandem-decode"):
        ask(program)
    return found


class DocumentsTest(unittest.TestCase):
    def test_links_lead_somewhere(self):
        for document in DOCUMENTS:
            for link in LINK.findall(document.read_text()):
                if "://" in link or link.startswith("mailto:"):
                    continue
                with self.subTest(document=document.name, link=link):
                    path, _, anchor = link.partition("#")
                    target = document.parent / path if path else document
                    self.assertTrue(target.exists())
                    if anchor and target.suffix == ".md":
                        self.assertIn(anchor, anchors(target))

    def test_tests_that_are_named_exist(self):
        tests = set()
        for source in (ROOT / "tests").rglob("*.cc"):
            tests.update(TEST.findall(source.read_text()))
        suites = {suite for suite, _ in tests}
        named = 0
        for document in DOCUMENTS:
            for suite, name in NAMED.findall(document.read_text()):
                if suite in suites or suite.endswith("Test"):
                    named += 1
                    with self.subTest(document=document.name):
                        self.assertIn((suite, name), tests)
        self.assertGreater(named, 20)

    @unittest.skipUnless((BIN / "tandem").exists(), "no programs")
    def test_every_flag_is_documented_and_every_documented_flag_exists(self):
        there = flags()
        self.assertGreater(len(there), 200)
        pages = [(ROOT / "README.md").read_text()]
        pages += [page(name) for name in ("benchmarking.md", "command-line.md",
                                          "deploying.md", "http-api.md",
                                          "operations.md", "page.md")]
        named = set(re.findall(r"(?<![\w-])--([a-z](?:[\w-]*\w)?)", "\n".join(pages)))
        self.assertEqual(named - there - FOREIGN_FLAGS, set())
        named.update(name.removeprefix("no-") for name in list(named))
        self.assertEqual({f for f in there if f.removeprefix("no-") not in named
                          and f not in named}, set())

    def test_every_metric_is_documented(self):
        names = {line.split()[1].removesuffix("_bucket") for line in
                 (ROOT / "tests/golden/metrics.txt").read_text().splitlines()}
        for folder in ("router", "worker", "common", "handoff"):
            for source in (ROOT / folder).rglob("*.cc"):
                names.update(re.findall(r'"(tandem_\w+[a-z])"', source.read_text()))
        documented = set(re.findall(r"\w+", page("operations.md")))
        self.assertEqual({name for name in names if name not in documented
                          and name.removeprefix("tandem_") not in documented}, set())

    def test_every_route_is_documented(self):
        source = (ROOT / "router/http/front.cc").read_text()
        for path in re.findall(r'"(/[\w/]+)"', source):
            with self.subTest(path):
                self.assertIn(path, page("http-api.md"))


if __name__ == "__main__":
    unittest.main()
