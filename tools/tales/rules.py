# SPDX-License-Identifier: Apache-2.0
"""Writes and reads text by the rules of `world.py`, whatever they say.

`write` expands a template at random; `read` is the recursive descent that
finds the bindings under which a text is a template, trying every alternative.
Both keep one environment: what each variable stands for, and which rules were
used.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import world

Env = dict[str, str]  # variable -> value; "#rule" -> "" for rules used


# ---- One alternative of a rule, compiled ----------------------------------


@dataclass(frozen=True)
class Item:
    """Literal text, a variable in one of its forms, or a call of a rule."""

    what: str  # "text", "slot" or "rule"
    value: str
    form: str = ""


@cache
def compiled(template: str) -> tuple[Item, ...]:
    items = []
    position = 0
    for found in re.finditer(r"<(\w+)>|\{(\w+)(?::(\w+))?\}", template):
        if found.start() > position:
            items.append(Item("text", template[position : found.start()]))
        rule, variable, form = found.groups()
        if rule:
            items.append(Item("rule", rule))
        else:
            items.append(Item("slot", variable, form or ""))
        position = found.end()
    if position < len(template):
        items.append(Item("text", template[position:]))
    return tuple(items)


def variables(template: str) -> list[str]:
    return [i.value for i in compiled(template) if i.what == "slot"]


_PRONOUNS = {
    "child": ("girl", "boy"),
    "she": ("she", "he"),
    "She": ("She", "He"),
    "her": ("her", "his"),
    "Her": ("Her", "His"),
    "him": ("her", "him"),
}


def inflect(value: str, form: str) -> str:
    """The value of a variable in one of its forms."""
    if not form:
        return value
    if form == "a":
        return f"{'an' if value[0] in 'aeiou' else 'a'} {value}"
    return _PRONOUNS[form][value in world.BOYS]


def class_of(variable: str) -> str:
    return world.VARIABLES[variable]


def _values(variable: str) -> list[str]:
    kind = class_of(variable)
    return world.GIRLS + world.BOYS if kind == "name" else world.CLASSES[kind]


def _free(env: Env, variable: str, value: str) -> bool:
    """No other variable of the class has this value (numbers may repeat)."""
    kind = class_of(variable)
    return kind == "int" or not any(
        bound == value and not name.startswith("#") and class_of(name) == kind
        for name, bound in env.items()
    )


# ---- Writing --------------------------------------------------------------

_SYLLABLES = [
    "al", "ba", "bri", "cor", "da", "del", "el", "fa", "fin", "ga", "hal", "is",
    "jo", "ka", "la", "li", "lo", "ma", "mi", "na", "ne", "no", "o", "pa", "ra",
    "ri", "ro", "sa", "se", "si", "ta", "ti", "to", "va", "vi", "we", "ya",
    "zi",
]


def invent_name(rng: random.Random) -> str:
    """A name that the model has probably not seen, to be copied by letters."""
    count = rng.choice((2, 2, 3))
    return "".join(rng.choice(_SYLLABLES) for _ in range(count)).capitalize()


def any_name(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return invent_name(rng)
    return rng.choice(_values("H"))


def write(template: str, env: Env, rng: random.Random) -> str:
    """Expands a template at random and binds its variables in `env`."""
    parts = []
    for item in compiled(template):
        if item.what == "text":
            parts.append(item.value)
        elif item.what == "rule":
            env["#" + item.value] = ""
            parts.append(write(rng.choice(world.RULES[item.value]), env, rng))
        else:
            while item.value not in env:
                named = class_of(item.value) == "anyname"
                value = (
                    any_name(rng) if named else rng.choice(_values(item.value))
                )
                if _free(env, item.value, value):
                    env[item.value] = value
            parts.append(inflect(env[item.value], item.form))
    return "".join(parts)


def fill(template: str, env: Env) -> str:
    """The template with every variable, all of them bound, written out."""
    return "".join(
        i.value if i.what == "text" else inflect(env[i.value], i.form)
        for i in compiled(template)
    )


# ---- Reading --------------------------------------------------------------


def _candidates(
    item: Item, text: str, position: int, env: Env
) -> Iterator[str]:
    """Values that the variable may have at this position."""
    if item.value in env:
        yield env[item.value]
        return
    kind = class_of(item.value)
    if kind in ("anyname", "int"):
        pattern = r"[A-Z][a-z]{1,11}" if kind == "anyname" else r"0|[1-9]\d*"
        found = re.compile(pattern).match(text, position)
        values = [found.group()] if found else []
    else:
        values = _values(item.value)
    for value in values:
        if _free(env, item.value, value):
            yield value


def descend(
    items: tuple[Item, ...], text: str, position: int, env: Env
) -> Iterator[tuple[int, Env]]:
    """Every way to read `items` from `position`: where it ends, with what."""
    if not items:
        yield position, env
        return
    item, rest = items[0], items[1:]
    if item.what == "text":
        if text.startswith(item.value, position):
            yield from descend(rest, text, position + len(item.value), env)
    elif item.what == "slot":
        for value in _candidates(item, text, position, env):
            form = inflect(value, item.form)
            if text.startswith(form, position):
                bound = env | {item.value: value}
                yield from descend(rest, text, position + len(form), bound)
    else:
        inside = env | {"#" + item.value: ""}
        for alternative in world.RULES[item.value]:
            for end, after in descend(
                compiled(alternative), text, position, inside
            ):
                yield from descend(rest, text, end, after)


def read(template: str, text: str, env: Env | None = None) -> Env | None:
    """The bindings under which the whole text is the template, or None."""
    for end, bound in descend(compiled(template), text, 0, env or {}):
        if end == len(text):
            return bound
    return None
