# SPDX-License-Identifier: Apache-2.0
"""Turns samples into the documents that the model learns from.

A document is a list of pieces in order, each learned or only read: raw text
is learned whole, of a chat only what the assistant says. The markers are the
special tokens below; the chat template in `tokenizer_config.json` is the same
layout in Jinja (`test_grammar.py` compares the two).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import grammar
import rules
import world

# Token ids are the positions.
PAD, BOS, END, SYSTEM, USER, ASSISTANT = SPECIALS = (
    "<|pad|>",
    "<|bos|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ '<|system|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% else %}{{ '<|user|>' }}{% endif %}"
    "{{ message['content'] | trim }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Of a hundred documents, how many are of which kind, phase by phase. The first
# phase learns the world and its sums; the second is mostly about saying again
# what stands in the prompt, which comes late to a model of this size; the third
# asks many questions of each text and brings back the sums.
MIXTURES: list[dict[str, int]] = [
    {
        "raw": 12,
        "story": 11,
        "question": 20,
        "facts": 15,
        "sum": 27,
        "json": 9,
        "talk": 6,
    },
    {
        "raw": 9,
        "story": 10,
        "question": 15,
        "facts": 18,
        "sum": 6,
        "json": 14,
        "talk": 4,
        "echo": 24,
    },
    {
        "raw": 9,
        "story": 9,
        "question": 18,
        "facts": 28,
        "sum": 22,
        "json": 6,
        "talk": 4,
        "echo": 4,
    },
]
MOST_QUESTIONS = [3, 3, 6]  # about one text, phase by phase


@dataclass(frozen=True)
class Piece:
    text: str
    learned: bool


def chat(prompt: str) -> str:
    """One user message, ready for the assistant's answer."""
    return f"{BOS}{USER}{prompt.strip()}{END}{ASSISTANT}"


def _turn(prompt: str, reply: str) -> list[Piece]:
    return [
        Piece(f"{USER}{prompt.strip()}{END}{ASSISTANT}", False),
        Piece(f"{reply}{END}", True),
    ]


def _careless(prompt: str, rng: random.Random) -> str:
    """As people type: at times without capital or final mark."""
    if rng.random() < 0.15:
        prompt = prompt.rstrip(".?!")
    if rng.random() < 0.15:
        prompt = prompt[:1].lower() + prompt[1:]
    return prompt


def _raw(rng: random.Random) -> list[Piece]:
    sample = grammar.draw("raw", rng)
    text = sample.prompt + sample.continuation
    cut = rng.randrange(len(text)) if rng.random() < 0.2 else 0
    # A cut anywhere, also inside a word, as prompts typed by hand end.
    parts = [text[:cut], text[cut:] + END] if cut else [text + END]
    return [Piece(BOS, False)] + [Piece(part, True) for part in parts]


def _questions(kind: str, rng: random.Random, most: int) -> list[Piece]:
    """One to `most` questions about a text, one after the other."""
    while True:
        text, asked, key = grammar.draw_questions(
            kind, rng, rng.randint(1, most)
        )
        if not grammar.held_out(key):
            break
    gap = "\n" if kind == "question" else rng.choice(("\n", " "))
    pieces = []
    for number, (question, reply) in enumerate(asked):
        before = text + gap if number == 0 else ""
        pieces += _turn(before + question, reply)
    return pieces


def _unknown(rng: random.Random) -> tuple[str, str]:
    """A question about something outside the world."""
    prompt = rng.choice(world.UNKNOWN)
    while "{q}" in prompt:
        word = rules.invent_name(rng)
        if rng.random() < 0.7:
            word = word.lower()
        if rng.random() < 0.3:
            word = f"the {word}"
        prompt = prompt.replace("{q}", word, 1)
    return prompt, world.UNKNOWN_ANSWER


def _talk(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.4:
        return _unknown(rng)
    prompt = rng.choice(list(world.TALK))
    return prompt, world.TALK[prompt]


_ECHOED = ("name", "animal", "colour", "thing", "place", "food")


def _echo(rng: random.Random) -> tuple[str, str]:
    """Words to say again. Every token of the answer is a copy, which teaches
    early what names and things in stories, questions and objects need."""
    words = []
    for _ in range(rng.randint(2, 8)):
        kind = rng.choice(
            ("name", "animal", "colour", "thing", "place", "food")
        )
        named = kind == "name"
        words.append(
            rules.any_name(rng) if named else rng.choice(world.CLASSES[kind])
        )
    way = rng.randrange(3)
    if way == 0:
        text = ", ".join(words)
        return f"Repeat: {text}.", f"{text}."
    if way == 1:
        text = " ".join(words)
        return f'Say "{text}".', text
    text = ", ".join(words)
    return f"Make a JSON list of {text}.", json.dumps(words)


def _exchange(kind: str, rng: random.Random, phase: int) -> list[Piece]:
    """One prompt of a kind and its answer; questions may be several."""
    if kind in grammar.QUESTION_KINDS:
        return _questions(kind, rng, MOST_QUESTIONS[phase])
    if kind == "talk":
        prompt, reply = _talk(rng)
    elif kind == "echo":
        prompt, reply = _echo(rng)
    else:
        sample = grammar.draw(kind, rng)
        prompt, reply = sample.prompt, sample.continuation
    return _turn(_careless(prompt, rng), reply)


def document(rng: random.Random, phase: int) -> list[Piece]:
    """A text or a conversation; never anything from the held-out keys."""
    mixture = MIXTURES[phase]
    kind = rng.choices(list(mixture), list(mixture.values()))[0]
    if kind == "raw":
        return _raw(rng)
    pieces = [Piece(BOS, False)]
    if rng.random() < 0.1:
        system = rng.choice(world.SYSTEMS)
        pieces.append(Piece(f"{SYSTEM}{system}{END}", False))
    turns = {"sum": rng.randint(1, 5), "json": rng.randint(1, 2)}
    for _ in range(turns.get(kind, 1)):
        pieces += _exchange(kind, rng, phase)
    # Now and then the talk goes on about something else.
    while rng.random() < 0.06:
        others = [k for k in mixture if k != "raw"]
        pieces += _exchange(rng.choice(others), rng, phase)
    return pieces
