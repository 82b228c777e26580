#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the documents point to is there: tests by name, files, headings."""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
TEST = re.compile(r"\bTEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\s*\)")
NAMED = re.compile(r"`(\w+)\.(\w+)`")


def anchors(document: pathlib.Path) -> set[str]:
    """The names that GitHub gives to headings."""
    found = set()
    for line in document.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("#").strip().lower()
            found.add(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-"))
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


if __name__ == "__main__":
    unittest.main()
