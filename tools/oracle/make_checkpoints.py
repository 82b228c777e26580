# SPDX-License-Identifier: Apache-2.0
"""Writes the tiny checkpoints of tests/golden/engine/cases.json.

Every value comes from SplitMix64, seeded by the case and the tensor's name,
and is exact in the case's type, so that tests/engine/checkpoint_maker.cc
makes the same bytes and only goldens need to be committed:

  state   = case seed XOR FNV-1a-64(name); z_i = SplitMix64's i-th output
  matrix  F32: (z >> 40) * 2^-23 - 1, else ((z >> 56) - 128) / 128;
          times 2^matrix_exponent (embedding and head: embedding_exponent;
          biases: 2^-3)
  norm, or another factor
          F32: 1 + ((z >> 40) * 2^-23 - 1) / 2,
          else 1 + ((z >> 57) - 64) / 128

Usage: make_checkpoints.py OUT_DIR [CASE ...] [--seed-offset N]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import struct

import numpy as np

CASES = pathlib.Path(__file__).parents[2] / "tests/golden/engine/cases.json"
TENSORS = CASES.parent / "tensors.json"
MASK = (1 << 64) - 1


def fnv1a(name: str) -> int:
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 & MASK
    return value


def splitmix(state: int, count: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        steps = np.arange(1, count + 1, dtype=np.uint64)
        z = np.uint64(state) + steps * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)


def tensor_shapes(case: dict) -> list[tuple[str, tuple[int, ...]]]:
    """All tensors of the model, in the order of the file."""
    if "tensors" in case:
        return [(name, tuple(shape)) for name, shape in case["tensors"]]
    return llama_shapes(case["config"])


def llama_shapes(config: dict) -> list[tuple[str, tuple[int, ...]]]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    query, key = heads * head_dim, config["num_key_value_heads"] * head_dim
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (config["vocab_size"], hidden))]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        projections = [
            ("self_attn.q_proj", query, hidden, "attention_bias"),
            ("self_attn.k_proj", key, hidden, "attention_bias"),
            ("self_attn.v_proj", key, hidden, "attention_bias"),
            ("self_attn.o_proj", hidden, query, "attention_bias"),
            ("mlp.gate_proj", wide, hidden, "mlp_bias"),
            ("mlp.up_proj", wide, hidden, "mlp_bias"),
            ("mlp.down_proj", hidden, wide, "mlp_bias")]
        shapes.append((at + "input_layernorm.weight", (hidden,)))
        shapes.append((at + "post_attention_layernorm.weight", (hidden,)))
        for name, rows, cols, bias in projections:
            shapes.append((f"{at}{name}.weight", (rows, cols)))
            if config.get(bias, False):
                shapes.append((f"{at}{name}.bias", (rows,)))
    shapes.append(("model.norm.weight", (hidden,)))
    if not config["tie_word_embeddings"]:
        shapes.append(("lm_head.weight", (config["vocab_size"], hidden)))
    return shapes


def is_norm(name: str) -> bool:
    """Or another factor that is 1 or so."""
    return (name.endswith(("norm.weight", "_scalar", ".scale", "_scale"))
            or ".norms." in name or "layernorm_" in name)


def tensor_values(case: dict, name: str, shape: tuple[int, ...]) -> np.ndarray:
    z = splitmix(case["seed"] ^ fnv1a(name), int(np.prod(shape)))
    wide = case["dtype"] == "F32"
    fraction = (z >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1
    if is_norm(name):
        coarse = ((z >> np.uint64(57)).astype(np.float64) - 64) / 128
        values = 1 + (fraction / 2 if wide else coarse)
    else:
        coarse = ((z >> np.uint64(56)).astype(np.float64) - 128) / 128
        exponent = (-3 if name.endswith(".bias") else
                    case["embedding_exponent"]
                    if "embed_tokens" in name or "lm_head" in name else
                    case["matrix_exponent"])
        values = (fraction if wide else coarse) * 2.0**exponent
    return values.astype(np.float32).reshape(shape)


def tensor_bytes(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    bits = values.astype("<f4").view("<u4")
    assert not (bits & 0xFFFF).any(), "not exact in bf16"
    return (bits >> 16).astype("<u2").tobytes()


def safetensors_file(case: dict, shapes: list) -> bytes:
    header, data = {}, b""
    for name, shape in shapes:
        chunk = tensor_bytes(tensor_values(case, name, shape), case["dtype"])
        header[name] = {"dtype": case["dtype"], "shape": list(shape),
                        "data_offsets": [len(data), len(data) + len(chunk)]}
        data += chunk
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def shard_name(index: int, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_case(case: dict, out: pathlib.Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(case["config"]))
    shapes, shards = tensor_shapes(case), case["shards"]
    weight_map = {}
    for index in range(shards):
        part = shapes[index::shards]  # dealt out in turn
        name = shard_name(index, shards)
        (out / name).write_bytes(safetensors_file(case, part))
        weight_map |= {tensor: name for tensor, _ in part}
    if shards > 1:
        (out / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map}))


def load_cases() -> dict[str, dict]:
    """With what a family's tensors are called where that is not as in Llama."""
    cases, tensors = json.loads(CASES.read_text()), json.loads(TENSORS.read_text())
    return {name: case | ({"tensors": tensors[name]} if name in tensors else {})
            for name, case in cases.items()}


def prompt_ids(case: dict, length: int) -> list[int]:
    z = splitmix(case["seed"] ^ fnv1a(f"prompt {length}"), length)
    return [int(v) for v in z % np.uint64(case["config"]["vocab_size"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--seed-offset", type=int, default=0)
    args = parser.parse_args()
    for name, case in load_cases().items():
        if args.cases and name not in args.cases:
            continue
        case["seed"] += args.seed_offset
        write_case(case, args.out / name)


if __name__ == "__main__":
    main()
