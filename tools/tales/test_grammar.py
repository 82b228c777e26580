# SPDX-License-Identifier: Apache-2.0
"""Tests of the generator and the parser; needs only the standard library.

python -m unittest discover -s tools/tales
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
import unittest
from importlib import util
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import corpus
import grammar
import rules
import world

PER_KIND = 300

# Of the first samples of seed 1. If this changes, the committed weights no
# longer come from this program, and training has to run again.
GOLDEN = "6f09c876ab8d292d"

STORY = (
    "Once upon a time, there was a little girl named Mia. She had a red "
    "kite. One day, Mia went to the park with her friend Tom. Then the kite "
    "broke, and Mia was very sad. Tom mended it with some tape. "
    '"Thank you, Tom!" said Mia. They played until the sun went down. '
    "The end."
)
FACTS = "Mia has a red kite. Tom is at the lake."


def samples(
    kind: str, seed: int = 1, held: bool = False, count: int = PER_KIND
) -> list[grammar.Sample]:
    rng = random.Random(f"test {seed}")
    return [grammar.draw(kind, rng, held) for _ in range(count)]


class EverySample(unittest.TestCase):
    def test_parses_and_is_right(self) -> None:
        for kind in grammar.KINDS:
            for held in (False, True):
                for s in samples(kind, held=held):
                    with self.subTest(kind=kind, prompt=s.prompt):
                        self.assertTrue(
                            grammar.parses(kind, s.prompt, s.continuation)
                        )
                        asked = kind in (*grammar.QUESTION_KINDS, "sum")
                        wanted = s.continuation if asked else None
                        self.assertEqual(grammar.answer(s.prompt), wanted)

    def test_is_rejected_when_damaged(self) -> None:
        rng = random.Random(2)
        for kind in grammar.KINDS:
            for s in samples(kind):
                text = s.continuation
                half = rng.randrange(1, len(text))
                for damaged in (
                    "",
                    text[:half],
                    text[:-1],
                    text + " ",
                    text + text,
                    "x" + text,
                    text[:half] + "#" + text[half:],
                ):
                    with self.subTest(kind=kind, damaged=damaged):
                        self.assertFalse(
                            grammar.parses(kind, s.prompt, damaged)
                        )

    def test_of_another_prompt_is_rejected(self) -> None:
        """Fields and numbers must be those of the prompt."""
        for kind in ("json", "sum"):
            drawn = samples(kind)
            for mine, other in pairwise(drawn):
                same = mine.continuation == other.continuation
                self.assertEqual(
                    grammar.parses(kind, mine.prompt, other.continuation), same
                )


class Parser(unittest.TestCase):
    def test_judges_by_meaning(self) -> None:
        asked = f"{STORY}\nWho mended the kite?"
        table = [
            # kind, prompt, continuation, parses, why
            ("story", "Tell me a story.", STORY, True, "a story"),
            ("story", "tell me a story", STORY, True, "typed carelessly"),
            ("story", "Tell me a story about Mia.", STORY, True, "hero"),
            ("story", "Tell me a story about Ana.", STORY, False, "no Ana"),
            ("story", "Tell me a story about a fox.", STORY, False, "no fox"),
            ("story", "Sing!", STORY, False, "not a request"),
            ("raw", STORY[:40], STORY[40:], True, "cut anywhere"),
            ("raw", "", STORY, True, "from nothing"),
            (
                "raw",
                STORY[:40],
                STORY[40:].replace("Tom mended", "Ben mended"),
                False,
                "a third person",
            ),
            (
                "raw",
                STORY[:40],
                STORY[40:].replace("the kite broke", "the ball broke"),
                False,
                "another thing",
            ),
            (
                "raw",
                STORY[:40],
                STORY[40:].replace("She had", "He had"),
                False,
                "wrong pronoun",
            ),
            (
                "raw",
                STORY[:40],
                STORY[40:].replace("a red kite", "an red kite"),
                False,
                "wrong article",
            ),
            (
                "raw",
                STORY[:40],
                STORY[40:].replace("Tom", "Mia"),
                False,
                "friend of herself",
            ),
            ("question", asked, "Tom mended the kite.", True, "right"),
            ("question", asked, "Mia mended the kite.", True, "wrong, formed"),
            ("question", asked, "Tom mended the ball.", False, "other thing"),
            ("question", asked, "Tom.", False, "not the form"),
            ("sum", "What is 17 + 25?", "17 + 25 = 42.", True, "right"),
            ("sum", "What is 17 + 25?", "17 + 25 = 43.", True, "wrong, formed"),
            ("sum", "What is 17 + 25?", "17 + 24 = 42.", False, "other sum"),
            ("sum", "What is 17 + 25?", "17 + 25 = 042.", False, "zero first"),
            ("sum", "What is 17 + 25?", "42", False, "not the form"),
            (
                "json",
                "Make a JSON object of Mia: age 7, pet cat.",
                '{"name": "Mia", "age": 7, "pet": "cat"}',
                True,
                "right",
            ),
            (
                "json",
                "Make a JSON object of Mia: age 7, pet cat.",
                '{"name": "Mia", "age": "7", "pet": "cat"}',
                False,
                "a string for a number",
            ),
            (
                "json",
                "Make a JSON object of Mia: age 7, pet cat.",
                '{"name": "Mia", "pet": "cat"}',
                False,
                "a field is missing",
            ),
            (
                "json",
                "Make a JSON object of Mia: age 7, pet cat.",
                '{"name": "Mia", "age": 7, "age": 7, "pet": "cat"}',
                False,
                "a field twice",
            ),
            (
                "json",
                "Make a JSON object of Mia: age 1.",
                '{"name": "Mia", "age": true}',
                False,
                "true is not 1",
            ),
            (
                "json",
                "Make a JSON object of Mia: likes plums and nuts.",
                '{"name": "Mia", "likes": ["plums", "nuts"]}',
                True,
                "a list",
            ),
        ]
        for kind, prompt, continuation, expected, why in table:
            with self.subTest(why=why, continuation=continuation):
                self.assertEqual(
                    grammar.parses(kind, prompt, continuation), expected
                )

    def test_answers_from_the_prompt_alone(self) -> None:
        table = [
            (f"{STORY}\nWho mended the kite?", "Tom mended the kite."),
            (f"{STORY}\nwhere did Mia go", "Mia went to the park."),
            (f"{STORY} What colour was the kite?", "The kite was red."),
            (f"{STORY}\nWho lost the kite?", None),  # nobody did
            (f"{FACTS}\nWho has the kite?", "Mia has the kite."),
            (f"{FACTS} Where is Tom?", "Tom is at the lake."),
            (f"{FACTS} Where is Mia?", None),  # not said
            ("What is 17 + 25?", "17 + 25 = 42."),
            ("90 - 90 = ?", "90 - 90 = 0."),
            ("how much is 3 plus 4", "3 + 4 = 7."),
            ("Hello", None),
        ]
        for prompt, expected in table:
            with self.subTest(prompt=prompt[-40:]):
                self.assertEqual(grammar.answer(prompt), expected)


class Split(unittest.TestCase):
    def test_no_key_is_on_both_sides(self) -> None:
        for kind in grammar.KINDS:
            kept = {s.key for s in samples(kind)}
            held = {s.key for s in samples(kind, held=True)}
            with self.subTest(kind=kind):
                self.assertFalse(kept & held)
                self.assertFalse(any(map(grammar.held_out, kept)))
                self.assertTrue(all(map(grammar.held_out, held)))

    def test_training_documents_hold_nothing_back(self) -> None:
        """Sums are recognisable in a document, whatever wrote it."""
        rng = random.Random(3)
        seen = 0
        for _ in range(3000):
            for piece in corpus.document(rng, 0):
                for first, sign, second in re.findall(
                    r"\b(\d+) ([+-]) (\d+) = \d", piece.text
                ):
                    seen += 1
                    key = f"sum|{sign}|{first}|{second}"
                    self.assertFalse(grammar.held_out(key), key)
        self.assertGreater(seen, 1000)

    def test_about_a_tenth_is_held_out(self) -> None:
        held = sum(grammar.held_out(f"key {i}") for i in range(10_000))
        self.assertTrue(900 < held < 1100, held)


class Generator(unittest.TestCase):
    def test_is_a_function_of_the_seed(self) -> None:
        for kind in grammar.KINDS:
            self.assertEqual(samples(kind), samples(kind))
            self.assertNotEqual(samples(kind, 1), samples(kind, 2))

    def test_is_the_one_that_made_the_weights(self) -> None:
        rng = random.Random("golden")
        text = json.dumps(
            [
                [[p.text, p.learned] for p in corpus.document(rng, phase)]
                for phase in range(len(corpus.MIXTURES))
                for _ in range(1000)
            ]
        )
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.assertEqual(digest[:16], GOLDEN)

    def test_numbers_stay_in_range(self) -> None:
        for s in samples("sum"):
            numbers = [int(n) for n in re.findall(r"\d+", s.continuation)]
            self.assertTrue(all(0 <= n <= grammar.LARGEST for n in numbers), s)

    def test_every_rule_and_variable_is_known(self) -> None:
        templates = [t for ts in world.RULES.values() for t in ts]
        templates += [t for row in world.QUESTIONS for t in row[1:]]
        for template in templates:
            for item in rules.compiled(template):
                if item.what == "rule":
                    self.assertIn(item.value, world.RULES)
                if item.what == "slot":
                    self.assertIn(item.value, world.VARIABLES)


class Template(unittest.TestCase):
    @unittest.skipUnless(util.find_spec("jinja2"), "needs jinja2")
    def test_renders_what_training_wrote(self) -> None:
        import jinja2

        template = jinja2.Template(corpus.CHAT_TEMPLATE)

        def render(messages: list[tuple[str, str]], ask: bool) -> str:
            return template.render(
                messages=[{"role": r, "content": c} for r, c in messages],
                add_generation_prompt=ask,
                bos_token=corpus.BOS,
                eos_token=corpus.END,
            )

        self.assertEqual(
            render([("user", " Hello\n")], True), corpus.chat("Hello")
        )
        self.assertEqual(
            render(
                [
                    ("system", "Be kind."),
                    ("user", "Hi"),
                    ("assistant", "Hello!"),
                    ("user", "1 + 1"),
                ],
                True,
            ),
            "<|bos|><|system|>Be kind.<|end|><|user|>Hi<|end|>"
            "<|assistant|>Hello!<|end|><|user|>1 + 1<|end|><|assistant|>",
        )
        self.assertEqual(
            render([("user", "Hi"), ("assistant", "Hello!")], False),
            "<|bos|><|user|>Hi<|end|><|assistant|>Hello!<|end|>",
        )


if __name__ == "__main__":
    unittest.main()
