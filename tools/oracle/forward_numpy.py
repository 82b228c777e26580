# SPDX-License-Identifier: Apache-2.0
"""An independent Llama forward: float64 NumPy, the whole sequence at once,
no cache, no batch. Slow and plain on purpose: it is what the engine is
checked against.

Usage: forward_numpy.py MODEL_DIR ID [ID ...]: prints the last position's
logits as JSON.
"""

from __future__ import annotations

import json
import math
import pathlib
import struct
import sys

import numpy as np


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8:8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = raw[8 + length + begin:8 + length + end]
        if entry["dtype"] == "BF16":
            wide = np.frombuffer(data, "<u2").astype("<u4") << 16
            flat = wide.view("<f4")
        else:
            flat = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[entry["dtype"]])
        tensors[name] = flat.astype(np.float64).reshape(entry["shape"])
    return tensors


def frequencies(config: dict, head_dim: int) -> np.ndarray:
    theta = config.get("rope_theta", 10000.0)
    freq = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    scaling = config.get("rope_scaling")
    if not scaling:
        return freq
    assert scaling["rope_type"] == "llama3"
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1)  # 0: slow, 1: fast
    return freq * (blend + (1 - blend) / scaling["factor"])


class NumpyModel:
    def __init__(self, directory: str | pathlib.Path) -> None:
        directory = pathlib.Path(directory)
        self.config = json.loads((directory / "config.json").read_text())
        self.weights: dict[str, np.ndarray] = {}
        for path in sorted(directory.glob("*.safetensors")):
            self.weights |= read_safetensors(path)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        y = x @ self.weights[name + ".weight"].T
        bias = self.weights.get(name + ".bias")
        return y if bias is None else y + bias

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        eps = self.config.get("rms_norm_eps", 1e-6)
        return x / np.sqrt(mean + eps) * self.weights[name + ".weight"]

    def attention(self, at: str, x: np.ndarray) -> np.ndarray:
        count = len(x)
        heads = self.config["num_attention_heads"]
        kv_heads = self.config.get("num_key_value_heads", heads)
        head_dim = self.config.get("head_dim") or self.config["hidden_size"] // heads
        angle = np.outer(np.arange(count), frequencies(self.config, head_dim))
        turn = np.exp(1j * angle)[:, None, :]

        def split(name: str, n: int) -> np.ndarray:
            return self.linear(f"{at}self_attn.{name}_proj", x).reshape(count, n, head_dim)

        def rotate(v: np.ndarray) -> np.ndarray:
            half = head_dim // 2
            turned = (v[..., :half] + 1j * v[..., half:]) * turn
            return np.concatenate([turned.real, turned.imag], axis=-1)

        q, k = rotate(split("q", heads)), rotate(split("k", kv_heads))
        k = np.repeat(k, heads // kv_heads, axis=1)
        v = np.repeat(split("v", kv_heads), heads // kv_heads, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
        scores[:, np.triu_indices(count, 1)[0], np.triu_indices(count, 1)[1]] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", scores, v).reshape(count, heads * head_dim)
        return self.linear(f"{at}self_attn.o_proj", mixed)

    def logits(self, ids: list[int]) -> np.ndarray:
        """[len(ids), vocab]"""
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = x + self.attention(at, self.norm(at + "input_layernorm", x))
            h = self.norm(at + "post_attention_layernorm", x)
            gate = self.linear(at + "mlp.gate_proj", h)
            up = self.linear(at + "mlp.up_proj", h)
            x = x + self.linear(at + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        x = self.norm("model.norm", x)
        tied = self.config.get("tie_word_embeddings", False)
        return x @ self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T

    def greedy(self, ids: list[int], steps: int) -> list[int]:
        ids = list(ids)
        for _ in range(steps):
            ids.append(int(np.argmax(self.logits(ids)[-1])))
        return ids[-steps:]


if __name__ == "__main__":
    model = NumpyModel(sys.argv[1])
    print(json.dumps(model.logits([int(i) for i in sys.argv[2:]])[-1].tolist()))
