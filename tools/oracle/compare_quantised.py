# SPDX-License-Identifier: Apache-2.0
"""Compares the engine on quantised checkpoints with float64 NumPy, over both backends.

Each format's checkpoint is made here from random codes, scales and zeros,
packed as the format's own libraries do (AutoGPTQ, AutoAWQ, compressed-tensors,
Model Optimizer; written from their descriptions, not from the engine's reader). The reference is
forward_numpy.py on the dequantised weights, with activations rounded as
kernels/quantise.h says where the engine takes integer products. Exit 0: equal,
1: not, 77: NumPy is missing (skipped).

Usage: compare_quantised.py --probe build/release/tests/engine_probe
"""

from __future__ import annotations

import argparse
import json
import pathlib
import struct
import tempfile

import compare_numpy

TOLERANCE = 2e-3  # of the largest logit: a code of an activation may differ
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 203, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False}
PRODUCTS = {"self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128),
            "self_attn.v_proj": (64, 128), "self_attn.o_proj": (128, 128),
            "mlp.gate_proj": (192, 128), "mlp.up_proj": (192, 128),
            "mlp.down_proj": (128, 192)}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def compressed(fmt: str, bits: int, kind: str, strategy: str, group: int | None,
               block: list[int] | None = None, activations: dict | None = None) -> dict:
    return {"quant_method": "compressed-tensors", "format": fmt, "ignore": ["lm_head"],
            "kv_cache_scheme": None, "config_groups": {"group_0": {
                "targets": ["Linear"], "input_activations": activations,
                "weights": {"num_bits": bits, "type": kind, "strategy": strategy,
                            "group_size": group, "symmetric": True,
                            "block_structure": block}}}}


def int8_activations(strategy: str, dynamic: bool = True, symmetric: bool = True) -> dict:
    return {"num_bits": 8, "type": "int", "strategy": strategy, "dynamic": dynamic,
            "symmetric": symmetric, "group_size": None}


# name: (quantization_config, bits, group (0: by row), zeros)
FORMATS = {
    "gptq, groups of 128": ({"quant_method": "gptq", "bits": 4, "group_size": 128,
                             "desc_act": False, "sym": True}, 4, 128, False),
    "gptq, groups of 32, zeros": ({"quant_method": "gptq", "bits": 4, "group_size": 32,
                                   "desc_act": False, "sym": False}, 4, 32, True),
    # Inputs of a group lie apart, in one order for all products of the same inputs.
    "gptq, act-order": ({"quant_method": "gptq", "bits": 4, "group_size": 32,
                         "desc_act": True, "sym": True}, 4, 32, False),
    "gptq_v2": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False,
                 "checkpoint_format": "gptq_v2"}, 4, 64, True),
    "gptq, 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": -1,
                      "desc_act": False, "sym": True}, 8, 0, False),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True,
             "version": "gemm"}, 4, 64, True),
    # Stacked with what is quantised, so all of qkv is dequantised.
    "awq, v_proj left": ({"quant_method": "awq", "bits": 4, "group_size": 64,
                          "zero_point": True, "version": "gemm",
                          "modules_to_not_convert": ["v_proj"]}, 4, 64, True),
    "pack-quantized": (compressed("pack-quantized", 4, "int", "group", 32), 4, 32, False),
    "pack-quantized, zeros": (compressed("pack-quantized", 4, "int", "group", 64), 4, 64, True),
    "int-quantized": (compressed("int-quantized", 8, "int", "channel", None), 8, 0, False),
    "float-quantized": (compressed("float-quantized", 8, "float", "channel", None), 8, 0, False),
    "float-quantized, one scale": (
        compressed("float-quantized", 8, "float", "tensor", None), 8, 0, False),
    "float-quantized, groups": (
        compressed("float-quantized", 8, "float", "group", 64), 8, 64, False),
    # 192 is no multiple of 128.
    "float-quantized, blocks": (
        compressed("float-quantized", 8, "float", "block", None, [128, 128]), 8, 128, False),
    "int-quantized, blocks": (
        compressed("int-quantized", 8, "int", "block", None, [128, 128]), 8, 128, False),
    "nvfp4-pack-quantized": (
        compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", 16), 4, 16, False),
    "mxfp4-pack-quantized": (
        compressed("mxfp4-pack-quantized", 4, "float", "group", 32), 4, 32, False),
    "modelopt, NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4",
                         "group_size": 16}, 4, 16, False),
    "modelopt, FP8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8, 0, False),
    "modelopt, FP8 by rows": ({"quant_method": "modelopt",
                               "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, 8, 0, False),
    "fp8, blocks": ({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                     "weight_block_size": [128, 128]}, 8, 128, False),
    # W8A8: scales of activations are of tokens, and found on the fly.
    "int-quantized, tokens": (compressed("int-quantized", 8, "int", "channel", None,
                                         activations=int8_activations("token")), 8, 0, False),
    "naive-quantized, one scale each": (
        compressed("naive-quantized", 8, "int", "tensor", None,
                   activations=int8_activations("tensor", dynamic=False)), 8, 0, False),
    # Not W8A8: tokens have zeros.
    "int-quantized, zeros of tokens": (
        compressed("int-quantized", 8, "int", "channel", None,
                   activations=int8_activations("token", symmetric=False)), 8, 0, False),
    # Act-order in an order for each product: what is multiplied together is dequantised.
    "gptq, orders apart": ({"quant_method": "gptq", "bits": 4, "group_size": 32,
                            "desc_act": True, "sym": True, "orders": "apart"}, 4, 32, False),
}


def pack_words(values, bits: int):
    """Along the last axis, from the low bits up."""
    import numpy as np

    each = 32 // bits
    parts = values.reshape(*values.shape[:-1], -1, each).astype(np.uint64)
    shifts = np.arange(each, dtype=np.uint64) * np.uint64(bits)
    return (parts << shifts).sum(-1).astype(np.uint32).view(np.int32)


def e4m3_value(code: int) -> float:
    exponent, fraction = code >> 3 & 15, code & 7
    value = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
    return -value if code & 0x80 else value


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def make_fp4(rng, name: str, rows: int, cols: int, kind: str):
    """As make_product. NVFP4's scale of the whole tensor divides those of its groups in
    compressed-tensors, and multiplies them in Model Optimizer."""
    import numpy as np

    codes = rng.integers(0, 16, (rows, cols))
    pairs = ("U8", (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
    numbers = np.array(E2M1 + [-number for number in E2M1])[codes]
    if kind == "mxfp4-pack-quantized":
        powers = rng.integers(118, 123, (rows, cols // 32))
        return {name + ".weight_packed": pairs,
                name + ".weight_scale": ("U8", powers.astype(np.uint8))
                }, numbers * np.repeat(2.0 ** (powers - 127), 32, axis=1)
    divides = kind == "nvfp4-pack-quantized"
    scales = rng.integers(0x30, 0x40, (rows, cols // 16))  # 0.5 to 1.875
    of_all = 64.0 if divides else 1 / 64
    spread = np.repeat(np.vectorize(e4m3_value)(scales), 16, axis=1)
    tensors = {
        name + (".weight_packed" if divides else ".weight"):
            pairs,
        name + ".weight_scale": ("F8_E4M3", scales.astype(np.uint8)),
        name + (".weight_global_scale" if divides else ".weight_scale_2"):
            ("F32", np.full((1,) if divides else (), of_all, np.float32)),
        name + (".input_global_scale" if divides else ".input_scale"):
            ("F32", np.ones(1, np.float32))}
    return tensors, numbers * spread / 64


def is_exact(config: dict) -> bool:
    """Whether what enters a product is not rounded to int8."""
    return (config.get("format") in ("float-quantized", "nvfp4-pack-quantized")
            or config["quant_method"] in ("fp8", "modelopt"))


TOGETHER = {"self_attn.k_proj": "self_attn.q_proj", "self_attn.v_proj": "self_attn.q_proj",
            "mlp.up_proj": "mlp.gate_proj"}


def groups_of_inputs(config: dict, name: str, cols: int, group: int):
    """[cols]: neighbours', but in act-order."""
    import numpy as np

    spread = np.repeat(np.arange(-(-cols // group)), group)[:cols]
    if not config.get("desc_act"):
        return spread
    layer, product = name.split(".", 3)[2:]
    if "orders" not in config:
        product = TOGETHER.get(product, product)
    return np.random.default_rng(
        [int(layer), list(PRODUCTS).index(product)]).permutation(spread)


def has_token_scales(config: dict) -> bool:
    """Whether int8 codes of rows meet tokens that have one scale each (W8A8)."""
    group = config.get("config_groups", {}).get("group_0", {})
    inputs = group.get("input_activations")
    return bool(inputs and inputs["symmetric"]
                and group["weights"]["strategy"] in ("channel", "tensor"))


def strategy_of(config: dict) -> str:
    if config.get("quant_algo") == "FP8":
        return "tensor"
    groups = config.get("config_groups")
    return groups["group_0"]["weights"]["strategy"] if groups else ""


def block_of(config: dict) -> list[int] | None:
    """[outputs, inputs] that share a scale."""
    if "weight_block_size" in config:
        return config["weight_block_size"]
    groups = config.get("config_groups")
    return groups["group_0"]["weights"]["block_structure"] if groups else None


def make_product(rng, name: str, rows: int, cols: int, form):
    """The tensors of one product, and the numbers that they stand for."""
    import numpy as np

    config, bits, group, zeroed = form
    method, fmt = config["quant_method"], config.get("format", "")
    if "fp4" in fmt or group == 16:
        return make_fp4(rng, name, rows, cols, fmt)
    group = group or cols
    groups = -(-cols // group)
    spread = groups_of_inputs(config, name, cols, group)
    scales = rng.uniform(0.2, 1.0, (rows, groups)).astype(np.float16) / np.float16(64)
    if bits == 8:
        scales = (scales / np.float16(16)).astype(np.float16)
    stored = scales
    if block := block_of(config):
        stored = scales[:: block[0]]
        scales = np.repeat(stored, block[0], axis=0)[:rows]
    if fmt == "float-quantized" or method in ("fp8", "modelopt"):
        codes = rng.integers(0, 0x7F, (rows, cols)) | rng.integers(0, 2, (rows, cols)) << 7
        codes &= 0xB7 | 0x80  # magnitudes below 1
        numbers = np.vectorize(e4m3_value)(codes)
        if strategy_of(config) == "tensor":
            scales = np.full_like(scales, scales[0, 0])
            stored = scales[0, 0] if method == "modelopt" else scales[0, :1]
        elif method == "modelopt":
            stored = scales[:, 0]
        elif groups > 1 or block:  # expanded to bf16: no digits are left over
            stored, scales = (np.ldexp(np.rint(np.ldexp(s, 13)), -13) for s in (stored, scales))
        weights = numbers * scales.astype(np.float64)[:, spread]
        suffix = ".weight_scale_inv" if method == "fp8" else ".weight_scale"
        return {name + ".weight": ("F8_E4M3", codes.astype(np.uint8)),
                name + suffix: ("F16" if fmt else "F32", stored),
                name + ".input_scale": ("F32", np.ones(1, np.float32))}, weights
    middle = 1 << bits - 1
    codes = rng.integers(0, 1 << bits, (rows, cols))
    zeros = rng.integers(0, 16, (rows, groups)) if zeroed else np.full((rows, groups), middle)
    weights = (codes - zeros[:, spread]) * scales.astype(np.float64)[:, spread]
    if method == "gptq":
        # Words are less by one in each place at once: a zero of 0 borrows.
        ones = pack_words(np.ones(rows, np.int64), bits)
        if config.get("checkpoint_format") == "gptq_v2":
            ones = np.zeros_like(ones)
        return {name + ".qweight": ("I32", pack_words(codes, bits).T),
                name + ".qzeros": ("I32", pack_words(zeros.T, bits) - ones),
                name + ".scales": ("F16", scales.T),
                # Quantisers write biases that models do not have.
                name + ".bias": ("F16", np.zeros(rows)),
                name + ".g_idx": ("I32", spread.astype(np.int32))}, weights
    if method == "awq":
        def reorder(values):
            return values.reshape(-1, values.shape[-1] // 8, 8)[..., AWQ_ORDER].reshape(
                values.shape)
        return {name + ".qweight": ("I32", pack_words(reorder(codes.T), 4)),
                name + ".qzeros": ("I32", pack_words(reorder(zeros.T), 4)),
                name + ".scales": ("F16", scales.T)}, weights
    if fmt in ("int-quantized", "naive-quantized"):
        tensors = {name + ".weight": ("I8", (codes - middle).astype(np.int8))}
        if strategy_of(config) == "tensor":
            stored = scales[0, :1]
            weights = (codes - middle) * np.float64(stored[0])
            tensors[name + ".input_scale"] = ("F32", np.ones(1, np.float32))
        return tensors | {name + ".weight_scale": ("F16", stored)}, weights
    tensors = {name + ".weight_packed": ("I32", pack_words(codes, bits)),
               name + ".weight_scale": ("F16", scales),
               name + ".weight_shape": ("I64", np.array([rows, cols]))}
    if zeroed:
        tensors[name + ".weight_zero_point"] = ("I32", pack_words(zeros.T, bits).T)
    return tensors, weights


def write_safetensors(path: pathlib.Path, tensors: dict) -> None:
    import numpy as np

    kinds = {"I64": "<i8", "I32": "<i4", "I8": "i1", "F16": "<f2", "F32": "<f4",
             "F8_E4M3": "u1", "U8": "u1"}
    header, data = {}, b""
    for name, (kind, values) in sorted(tensors.items()):
        chunk = np.ascontiguousarray(values).astype(kinds[kind]).tobytes()
        header[name] = {"dtype": kind, "shape": list(values.shape),
                        "data_offsets": [len(data), len(data) + len(chunk)]}
        data += chunk
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def make(directory: pathlib.Path, form, seed: int) -> dict:
    """Writes a checkpoint; returns its weights as NumpyModel wants them."""
    import numpy as np

    rng = np.random.default_rng(seed)
    tensors, weights = {}, {}

    def dense(name: str, values) -> None:
        values = values.astype(np.float16)
        tensors[name], weights[name] = ("F16", values), values.astype(np.float64)

    hidden, vocab = CONFIG["hidden_size"], CONFIG["vocab_size"]
    dense("model.embed_tokens.weight", rng.standard_normal((vocab, hidden)))
    dense("lm_head.weight", rng.standard_normal((vocab, hidden)) / 8)
    dense("model.norm.weight", rng.uniform(0.5, 1.5, hidden))
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        dense(at + "input_layernorm.weight", rng.uniform(0.5, 1.5, hidden))
        dense(at + "post_attention_layernorm.weight", rng.uniform(0.5, 1.5, hidden))
        for name, (rows, cols) in PRODUCTS.items():
            if name.split(".")[1] in form[0].get("modules_to_not_convert", []):
                dense(at + name + ".weight", rng.standard_normal((rows, cols)) / 16)
                continue
            parts, numbers = make_product(rng, at + name, rows, cols, form)
            tensors |= parts
            weights[at + name + ".weight"] = numbers
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": form[0]}))
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probe", type=pathlib.Path, required=True)
    args = parser.parse_args()
    compare_numpy.find_numpy()
    import numpy as np
    from forward_numpy import NumpyModel

    class Rounding(NumpyModel):
        """Rounds what enters a quantised product to int8: in groups of 32, which in
        act-order are the weights', of W8A8 each token as a whole."""

        def __init__(self, weights: dict, config: dict) -> None:
            self.config, self.weights = CONFIG, weights
            self.exact = []
            self.quantised = config
            self.tokens = has_token_scales(config)
            if is_exact(config):
                self.exact = list(PRODUCTS)
            elif "orders" in config:
                self.exact = [*TOGETHER, *TOGETHER.values()]
            elif "modules_to_not_convert" in config:
                self.exact = ["q_proj", "k_proj", "v_proj"]

        def linear(self, name, x):
            if not name.endswith(tuple(self.exact)):
                order = np.argsort(
                    groups_of_inputs(self.quantised, name, x.shape[1], 32), kind="stable")
                groups = x[:, order].reshape(len(x), -1, x.shape[1] if self.tokens else 32)
                scale = np.abs(groups).max(-1, keepdims=True) / 127
                x = np.empty_like(x)
                x[:, order] = (np.rint(groups / scale) * scale).reshape(x.shape)
            return super().linear(name, x)

    for seed, (name, form) in enumerate(FORMATS.items()):
        with tempfile.TemporaryDirectory() as temporary:
            directory = pathlib.Path(temporary)
            weights = make(directory, form, seed)
            model = Rounding(weights, form[0])
            prompts = [[7], list(range(1, 180, 9))]
            wanted = [model.logits(ids)[-1] for ids in prompts]
            for device in ("", "cuda"):
                answers = compare_numpy.probe(args.probe, directory,
                                              [(1, ids) for ids in prompts], device)
                worst = max(float(np.abs(np.array(answer["last"]) - want).max()
                                  / np.abs(want).max())
                            for want, answer in zip(wanted, answers, strict=True))
                print(f"{name}, {device or 'cpu'}: largest relative error {worst:.2g}")
                if not worst <= TOLERANCE:
                    raise SystemExit(f"{name}: logits off by {worst:.2g}")


if __name__ == "__main__":
    main()
