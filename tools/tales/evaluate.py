# SPDX-License-Identifier: Apache-2.0
"""Measures a model of Tales on held-out prompts at temperature 0.

    python tools/tales/evaluate.py models/tales [--dump FILE]

Reads the checkpoint by itself and runs it in NumPy (float64, weights as
saved), so that the result depends on no other engine. Needs numpy and
tokenizers. Prints a table; the exit code is 1 if a goal is missed:

    ends within 256 tokens and parses under the grammar    >= 95 %
    questions and sums, taken together, answered right     >= 80 %
    outputs that repeat a span of 20 tokens                   none

`--dump` writes one JSON object a line with the ids of prompt and output, for
comparison with what a server makes of the same prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import corpus
import grammar
import numpy as np
from tokenizers import Tokenizer

Array = np.ndarray

LIMIT = 256  # tokens of an output
SPAN = 20  # tokens that no output may repeat
PARSED_GOAL = 0.95
RIGHT_GOAL = 0.80

# 200 prompts: how many of each kind.
COUNTS = {
    "raw": 30,
    "story": 30,
    "question": 30,
    "facts": 20,
    "sum": 50,
    "json": 40,
}


def read_safetensors(path: Path) -> dict[str, Array]:
    """The bf16 tensors of a file, widened to float64."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} is {entry['dtype']}, not BF16")
        begin, end = (8 + length + o for o in entry["data_offsets"])
        high = np.frombuffer(data[begin:end], "<u2").astype(np.uint32)
        values = (high << 16).view(np.float32).astype(np.float64)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


class Model:
    """One sequence at a time, with a cache of keys and values per layer."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.tensors = read_safetensors(directory / "model.safetensors")
        tied = self.config["tie_word_embeddings"]
        self.head = self.tensors[
            "model.embed_tokens.weight" if tied else "lm_head.weight"
        ]
        self.parameters = sum(t.size for t in self.tensors.values())
        self.clear()

    def clear(self) -> None:
        layers = self.config["num_hidden_layers"]
        # Per layer [length, kv_heads, head_dim], or None while empty.
        self.keys: list[Array | None] = [None] * layers
        self.values: list[Array | None] = [None] * layers
        self.length = 0

    def _norm(self, x: Array, name: str) -> Array:
        scale = np.mean(x * x, axis=-1, keepdims=True)
        weight = self.tensors[f"model.{name}.weight"]
        return x / np.sqrt(scale + self.config["rms_norm_eps"]) * weight

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self.tensors[f"model.{name}.weight"].T

    def _rotate(self, x: Array, positions: Array) -> Array:
        """x is [length, heads, head_dim]."""
        size = self.config["head_dim"]
        rates = self.config["rope_theta"] ** -(np.arange(0, size, 2) / size)
        angles = (positions[:, None] * rates)[:, None, :]
        cos, sin = np.cos(angles), np.sin(angles)
        low, high = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate(
            (low * cos - high * sin, high * cos + low * sin), axis=-1
        )

    def _attend(self, x: Array, layer: int) -> Array:
        config = self.config
        name = f"layers.{layer}.self_attn"
        length, size = len(x), config["head_dim"]
        positions = self.length + np.arange(length)

        def heads(projection: str) -> Array:
            return self._linear(x, f"{name}.{projection}").reshape(
                length, -1, size
            )

        q = self._rotate(heads("q_proj"), positions)
        k = self._rotate(heads("k_proj"), positions)
        v = heads("v_proj")
        old_keys, old_values = self.keys[layer], self.values[layer]
        if old_keys is not None and old_values is not None:
            k = np.concatenate((old_keys, k))
            v = np.concatenate((old_values, v))
        self.keys[layer], self.values[layer] = k, v
        groups = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
        future = np.arange(len(k))[None, :] > positions[:, None]
        scores = np.where(future, -np.inf, scores)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", scores, v).reshape(length, -1)
        return self._linear(mixed, f"{name}.o_proj")

    def forward(self, ids: list[int]) -> Array:
        """Appends the ids; logits after each of them, [length, vocab]."""
        embedding = self.tensors["model.embed_tokens.weight"]
        x = embedding[ids]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            x = x + self._attend(
                self._norm(x, f"{name}.input_layernorm"), layer
            )
            y = self._norm(x, f"{name}.post_attention_layernorm")
            gate = self._linear(y, f"{name}.mlp.gate_proj")
            inner = gate / (1 + np.exp(-gate))
            inner = inner * self._linear(y, f"{name}.mlp.up_proj")
            x = x + self._linear(inner, f"{name}.mlp.down_proj")
        self.length += len(ids)
        return self._norm(x, "norm") @ self.head.T

    def greedy(self, ids: list[int]) -> list[int]:
        """Up to LIMIT tokens, the end token included."""
        self.clear()
        output: list[int] = []
        logits = self.forward(ids)[-1]
        while True:
            output.append(int(np.argmax(logits)))
            if output[-1] == self.config["eos_token_id"]:
                return output
            if len(output) == LIMIT:
                return output
            logits = self.forward(output[-1:])[-1]

    def loss(self, ids: list[int], continuation: list[int]) -> float:
        """Summed negative log likelihood of the continuation, in nats."""
        self.clear()
        logits = self.forward(ids + continuation[:-1])[len(ids) - 1 :]
        top = logits.max(axis=-1)
        spread = top + np.log(np.exp(logits - top[:, None]).sum(axis=-1))
        chosen = logits[np.arange(len(continuation)), continuation]
        return float((spread - chosen).sum())


@dataclass
class Result:
    """What the model made of one prompt."""

    sample: grammar.Sample
    text: str  # the prompt as the model reads it, without the raw one's bos
    prompt_ids: list[int]
    output_ids: list[int]
    output: str
    ended: bool
    parsed: bool
    right: bool
    repeats: bool
    loss: float  # nats, of the sample's own continuation
    loss_tokens: int


def repeats(ids: list[int]) -> bool:
    """Whether a span of SPAN tokens occurs twice."""
    seen = set()
    for begin in range(len(ids) - SPAN + 1):
        span = tuple(ids[begin : begin + SPAN])
        if span in seen:
            return True
        seen.add(span)
    return False


def ask(model: Model, tokenizer: Tokenizer, sample: grammar.Sample) -> Result:
    raw = sample.kind == "raw"
    text = sample.prompt if raw else corpus.chat(sample.prompt)
    ids = tokenizer.encode(text, add_special_tokens=raw).ids
    output_ids = model.greedy(ids)
    ended = output_ids[-1] == model.config["eos_token_id"]
    output = tokenizer.decode(output_ids, skip_special_tokens=True)
    reference = tokenizer.encode(
        sample.continuation + corpus.END, add_special_tokens=False
    ).ids
    return Result(
        sample=sample,
        text=text,
        prompt_ids=ids,
        output_ids=output_ids,
        output=output,
        ended=ended,
        parsed=ended and grammar.parses(sample.kind, sample.prompt, output),
        right=ended and output == grammar.answer(sample.prompt),
        repeats=repeats(output_ids),
        loss=model.loss(ids, reference),
        loss_tokens=len(reference),
    )


def held_out_samples(seed: int) -> list[grammar.Sample]:
    """Different held-out prompts, of each kind as many as COUNTS says."""
    rng = random.Random(f"evaluation {seed}")
    samples: dict[str, grammar.Sample] = {}
    for kind, count in COUNTS.items():
        goal = len(samples) + count
        while len(samples) < goal:
            sample = grammar.draw(kind, rng, held=True)
            samples.setdefault(sample.prompt, sample)
    return list(samples.values())


def share(flags: list[bool]) -> float:
    return sum(flags) / len(flags)


def print_table(results: list[Result]) -> None:
    print("kind       prompts  ended  parsed  right  repeats  tokens  loss")
    for kind in [*COUNTS, "all"]:
        rows = [r for r in results if kind in (r.sample.kind, "all")]
        asked = [r for r in rows if grammar.answer(r.sample.prompt)]
        right = f"{share([r.right for r in asked]):6.1%}" if asked else "     -"
        tokens = np.mean([len(r.output_ids) for r in rows])
        loss = sum(r.loss for r in rows) / sum(r.loss_tokens for r in rows)
        print(
            f"{kind:10} {len(rows):7} {share([r.ended for r in rows]):6.1%} "
            f"{share([r.parsed for r in rows]):7.1%} {right} "
            f"{sum(r.repeats for r in rows):8} {tokens:7.1f} {loss:5.3f}"
        )


def missed_goals(results: list[Result]) -> list[str]:
    missed = []
    parsed = share([r.parsed for r in results])
    if parsed < PARSED_GOAL:
        missed.append(f"parsed {parsed:.1%} < {PARSED_GOAL:.0%}")
    asked = [r for r in results if grammar.answer(r.sample.prompt)]
    right = share([r.right for r in asked])
    if right < RIGHT_GOAL:
        missed.append(f"right {right:.1%} < {RIGHT_GOAL:.0%}")
    if any(r.repeats for r in results):
        missed.append(f"an output repeats {SPAN} tokens")
    return missed


def dump(path: Path, results: list[Result]) -> None:
    with path.open("w") as file:
        for r in results:
            row = {
                "kind": r.sample.kind,
                "prompt": r.sample.prompt,
                "text": r.text,
                "prompt_token_ids": r.prompt_ids,
                "output": r.output,
                "output_token_ids": r.output_ids,
                "parsed": r.parsed,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--dump", type=Path)
    parser.add_argument(
        "--failures", action="store_true", help="print what went wrong"
    )
    arguments = parser.parse_args()
    model = Model(arguments.model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    results = [
        ask(model, tokenizer, s) for s in held_out_samples(arguments.seed)
    ]
    if arguments.dump:
        dump(arguments.dump, results)
    if arguments.failures:
        for r in results:
            wanted = grammar.answer(r.sample.prompt)
            if not r.parsed or (wanted and not r.right):
                print(f"{r.sample.kind}: {r.sample.prompt!r}\n  {r.output!r}")
    print(f"{model.parameters} parameters, {len(results)} held-out prompts")
    print_table(results)
    missed = missed_goals(results)
    for line in missed:
        print(f"missed: {line}")
    print("goals missed" if missed else "all goals reached")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
