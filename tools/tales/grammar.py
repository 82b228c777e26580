# SPDX-License-Identifier: Apache-2.0
"""Writes and parses the text of Tales by the rules in `world.py`.

`draw` makes a sample of one kind: a prompt and its continuation. `parses` says
whether any continuation is one that the grammar allows for its prompt (names,
things and pronouns consistent), and `answer` works out the right answer of a
question or a sum from the prompt alone. Both read text by recursive descent
and share nothing with the writer but the rules, so that a model's output is
judged by what it says and not by equality with some training text.

Every sample has a key (who and what a story is about, the numbers of a sum,
the fields of an object). A tenth of all keys, by hash, is held out: `draw`
yields them only when asked to, and training never asks.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import world
from rules import Env, any_name, compiled, descend, fill, read, variables, write

KINDS = ("raw", "story", "question", "facts", "sum", "json")
QUESTION_KINDS = ("question", "facts")
HELD_OUT_SHARE = 10  # one key in so many
LARGEST = 99  # of a number in a sum, and of its result


@dataclass(frozen=True)
class Sample:
    kind: str
    prompt: str  # what the user says; for "raw", how the text begins
    continuation: str
    key: str  # what the held-out split is made by


def held_out(key: str) -> bool:
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


def _mentioned(env: Env, text: str) -> bool:
    """Whether the text says every value that the prompt asked for."""
    return all(
        re.search(rf"\b{re.escape(value)}\b", text)
        for name, value in env.items()
        if not name.startswith("#")
    )


def tidied(prompt: str) -> Iterator[str]:
    """The prompt as it is, then with a capital and a full stop or mark."""
    prompt = prompt.strip()
    for text in (prompt, prompt[:1].upper() + prompt[1:]):
        for mark in ("", "?", "."):
            yield text + mark


# ---- Stories --------------------------------------------------------------


def _tale_key(env: Env) -> str:
    return f"tale|{env['H']}|{env['C']}|{env['O']}"


def _draw_raw(rng: random.Random) -> Sample:
    env: Env = {"#story": ""}
    if rng.random() < 0.8:
        head = write("<open> <thing>", env, rng)
        tail = write(" <trip> <event> <end>", env, rng)
    else:
        head = write("<found>", env, rng)
        tail = write(" <event> <end>", env, rng)
    return Sample("raw", head, tail, _tale_key(env))


def _draw_story(rng: random.Random) -> Sample:
    asked: Env = {}
    # Half of the requests name hero and thing, which the key is made of.
    requests = world.RULES["request"]
    prompt = write(
        rng.choice(requests[6:] if rng.random() < 0.5 else requests[:6]),
        asked,
        rng,
    )
    while True:
        env = dict(asked)
        story = write("<story>", env, rng)
        if _mentioned(asked, story):
            return Sample("story", prompt, story, _tale_key(env))


def _requested(prompt: str) -> Env | None:
    for text in tidied(prompt):
        env = read("<request>", text)
        if env is not None:
            return {k: v for k, v in env.items() if not k.startswith("#")}
    return None


# ---- Questions ------------------------------------------------------------


def _askable(env: Env) -> list[tuple[str, str]]:
    """Questions, with their answers, that a text read as `env` settles."""
    return [
        (question, reply)
        for rule, question, reply in world.QUESTIONS
        if "#" + rule in env
        and all(v in env for v in variables(question) + variables(reply))
    ]


def draw_questions(
    kind: str, rng: random.Random, most: int
) -> tuple[str, list[tuple[str, str]], str]:
    """A text, up to `most` different questions with answers, and the key."""
    env: Env = {}
    text = write("<story>" if kind == "question" else "<facts>", env, rng)
    if kind == "question":
        key = _tale_key(env)
    else:
        values = (v for k, v in env.items() if not k.startswith("#"))
        key = "facts|" + "|".join(sorted(values))
    askable = _askable(env)
    chosen = rng.sample(askable, min(most, len(askable)))
    return text, [(fill(q, env), fill(a, env)) for q, a in chosen], key


def _draw_question(kind: str, rng: random.Random) -> Sample:
    text, asked, key = draw_questions(kind, rng, 1)
    gap = "\n" if kind == "question" else rng.choice(("\n", " "))
    return Sample(kind, text + gap + asked[0][0], asked[0][1], key)


def _understood(kind: str, prompt: str) -> tuple[Env, str, str] | None:
    """Reads text and question: bindings, question and answer templates."""
    template = "<story>" if kind == "question" else "<facts>"
    for end, env in descend(compiled(template), prompt, 0, {}):
        if prompt[end : end + 1] not in (" ", "\n"):
            continue
        for text in tidied(prompt[end + 1 :]):
            for question, reply in _askable(env):
                if fill(question, env) == text:
                    return env, question, reply
    return None


# ---- Sums -----------------------------------------------------------------


def _draw_sum(rng: random.Random) -> Sample:
    prompt, operator, reply = rng.choice(world.SUMS)
    largest = 20 if rng.random() < 0.2 else LARGEST
    first = rng.randint(0, largest)
    second = rng.randint(0, largest)
    if operator == "+" and first + second > LARGEST:
        # Mirrors the pair into the triangle of allowed ones: still uniform.
        first, second = LARGEST - first, LARGEST - second
    if operator == "-" and first < second:
        first, second = second, first
    env = {"I": str(first), "J": str(second)}
    result = first + second if operator == "+" else first - second
    return Sample(
        "sum",
        fill(prompt, env),
        f"{fill(reply, env)} {result}.",
        f"sum|{operator}|{first}|{second}",
    )


def _understood_sum(prompt: str) -> tuple[str, int] | None:
    """The beginning of the answer, and the right result."""
    for text in tidied(prompt):
        for question, operator, reply in world.SUMS:
            env = read(question, text)
            if env is not None:
                first, second = int(env["I"]), int(env["J"])
                sign = 1 if operator == "+" else -1
                return fill(reply, env), first + sign * second
    return None


# ---- JSON -----------------------------------------------------------------

_FIELDS = ("age", "pet", "colour", "toy", "friend", "home", "likes")
Value = str | int | list[str]


def _draw_value(field: str, rng: random.Random) -> Value:
    words = world.CLASSES
    if field == "age":
        return rng.randint(1, LARGEST)
    if field == "toy":
        return f"{rng.choice(words['colour'])} {rng.choice(words['thing'])}"
    if field == "friend":
        return any_name(rng)
    if field == "likes":
        return rng.sample(words["food"], rng.randint(1, 3))
    kind = {"pet": "animal", "colour": "colour", "home": "place"}[field]
    return rng.choice(words[kind])


def _draw_json(rng: random.Random) -> Sample:
    made: dict[str, Value] = {"name": any_name(rng)}
    for field in rng.sample(_FIELDS, rng.randint(1, 4)):
        made[field] = _draw_value(field, rng)
    fields = ", ".join(
        f"{field} {' and '.join(value)}"
        if isinstance(value, list)
        else f"{field} {value}"
        for field, value in made.items()
        if field != "name"
    )
    prompt = rng.choice(world.JSON_PROMPTS).format(
        name=made["name"], fields=fields
    )
    text = json.dumps(made)
    return Sample("json", prompt, text, "json|" + text)


def _understood_json(prompt: str) -> dict[str, Value] | None:
    for text in tidied(prompt):
        for template in world.JSON_PROMPTS:
            pattern = re.escape(template)
            pattern = pattern.replace(r"\{name\}", r"([A-Z][a-z]+)")
            pattern = pattern.replace(r"\{fields\}", r"([\w, ]+)")
            found = re.fullmatch(pattern, text)
            if not found:
                continue
            made: dict[str, Value] = {"name": found.group(1)}
            for field in found.group(2).split(", "):
                name, _, value = field.partition(" ")
                if name not in _FIELDS or not value:
                    return None
                if name == "likes":
                    made[name] = value.split(" and ")
                elif name == "age":
                    if not value.isdecimal():
                        return None
                    made[name] = int(value)
                else:
                    made[name] = value
            return made
    return None


def _is_json(continuation: str, wanted: dict[str, Value]) -> bool:
    """Exactly these pairs, in this order, no key twice, nothing around."""
    if continuation != continuation.strip():
        return False
    try:
        pairs = json.loads(continuation, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return False
    if pairs != tuple(wanted.items()):
        return False
    return type(wanted.get("age", 0)) is type(dict(pairs).get("age", 0))


# ---- What others call -----------------------------------------------------


def draw(kind: str, rng: random.Random, held: bool = False) -> Sample:
    """A sample of one of `KINDS`, from the held-out keys or from the rest."""
    while True:
        if kind == "raw":
            sample = _draw_raw(rng)
        elif kind == "story":
            sample = _draw_story(rng)
        elif kind in QUESTION_KINDS:
            sample = _draw_question(kind, rng)
        elif kind == "sum":
            sample = _draw_sum(rng)
        elif kind == "json":
            sample = _draw_json(rng)
        else:
            raise ValueError(f"kind is {kind!r}, expected one of {KINDS}")
        if held_out(sample.key) == held:
            return sample


def answer(prompt: str) -> str | None:
    """The right answer to a question or a sum; None for any other prompt."""
    understood = _understood_sum(prompt)
    if understood is not None:
        return f"{understood[0]} {understood[1]}."
    for kind in QUESTION_KINDS:
        asked = _understood(kind, prompt)
        if asked is not None:
            return fill(asked[2], asked[0])
    return None


def parses(kind: str, prompt: str, continuation: str) -> bool:
    """Whether the grammar allows this continuation of this prompt.

    For questions and sums the form counts, not whether the answer is right:
    that is `answer`.
    """
    if kind == "raw":
        return read("<story>", prompt + continuation) is not None
    if kind == "story":
        env = _requested(prompt)
        return (
            env is not None
            and read("<story>", continuation, env) is not None
            and _mentioned(env, continuation)
        )
    if kind in QUESTION_KINDS:
        asked = _understood(kind, prompt)
        if asked is None:
            return False
        env, question, reply = asked
        given = {v: env[v] for v in variables(question)}
        return read(reply, continuation, given) is not None
    if kind == "sum":
        understood = _understood_sum(prompt)
        return understood is not None and bool(
            re.fullmatch(
                re.escape(understood[0]) + r" (0|[1-9]\d*)\.", continuation
            )
        )
    if kind == "json":
        wanted = _understood_json(prompt)
        return wanted is not None and _is_json(continuation, wanted)
    raise ValueError(f"kind is {kind!r}, expected one of {KINDS}")
