#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model of random weights and a draft model for it, for speculation_bench.

    draft_pair.py OUT_DIR [--layers 30] [--draft-layers 3] [--damp 4]
                  [--hidden 576] [--vocab 8192]

The draft model is the first layers of the model, with its embedding and head.
What the layers behind them add is divided by 2^DAMP, so that both agree the more
often the larger it is. Writes OUT_DIR/target and OUT_DIR/draft, bf16.
"""

import argparse
import json
import pathlib
import struct

import numpy as np

HEAD_DIM = 64


def bf16(values: np.ndarray) -> bytes:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16).tobytes()


def tensors(args: argparse.Namespace):
    """Yields (layer or -1, name, float32 array)."""
    random = np.random.default_rng(0)
    hidden, ffn = args.hidden, args.hidden * 8 // 3 // 64 * 64
    heads = hidden // HEAD_DIM
    kv = HEAD_DIM * (heads // 3 if heads % 3 == 0 else heads)

    def draw(rows: int, cols: int) -> np.ndarray:
        return random.standard_normal((rows, cols), np.float32) * 0.05

    yield -1, "model.embed_tokens.weight", draw(args.vocab, hidden)
    yield -1, "model.norm.weight", np.ones(hidden, np.float32)
    for i in range(args.layers):
        damp = 2.0**-args.damp if i >= args.draft_layers else 1.0
        for name, value in (
            ("input_layernorm", np.ones(hidden, np.float32)),
            ("post_attention_layernorm", np.ones(hidden, np.float32)),
            ("self_attn.q_proj", draw(hidden, hidden)),
            ("self_attn.k_proj", draw(kv, hidden)),
            ("self_attn.v_proj", draw(kv, hidden)),
            ("self_attn.o_proj", damp * draw(hidden, hidden)),
            ("mlp.gate_proj", draw(ffn, hidden)),
            ("mlp.up_proj", draw(ffn, hidden)),
            ("mlp.down_proj", damp * draw(hidden, ffn)),
        ):
            yield i, f"model.layers.{i}.{name}.weight", value


def config(args: argparse.Namespace, layers: int) -> dict:
    heads = args.hidden // HEAD_DIM
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden,
        "intermediate_size": args.hidden * 8 // 3 // 64 * 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 3 if heads % 3 == 0 else heads,
        "head_dim": HEAD_DIM,
        "vocab_size": args.vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def write(path: pathlib.Path, args: argparse.Namespace, layers: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    header, data, at = {}, [], 0
    for layer, name, value in tensors(args):
        if layer >= layers:
            continue
        data.append(bf16(value))
        header[name] = {
            "dtype": "BF16",
            "shape": list(value.shape),
            "data_offsets": [at, at + len(data[-1])],
        }
        at += len(data[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(data)
    (path / "config.json").write_text(json.dumps(config(args, layers)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--draft-layers", type=int, default=3)
    parser.add_argument("--damp", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=8192)
    args = parser.parse_args()
    write(args.out_dir / "target", args, args.layers)
    write(args.out_dir / "draft", args, args.draft_layers)


if __name__ == "__main__":
    main()
