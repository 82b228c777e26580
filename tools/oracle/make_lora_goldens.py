# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/engine/adapters.json with `peft` in float64.

Each adapter is of one of the tiny checkpoints of cases.json. Its tensors have
the names and shapes that PEFT gives them and values by make_checkpoints.py's
rule, so that tests/engine/checkpoint_maker.cc writes the same files. Goldens are
those of make_goldens.py: logits of the first and the last prompt position, and
greedy ids.

Needs: pip install numpy torch transformers peft. Usage: make_lora_goldens.py
"""

from __future__ import annotations

import json
import pathlib
import tempfile

import make_checkpoints as checkpoints
import make_goldens
import peft
import torch

GOLDEN = checkpoints.CASES.parent / "adapters.json"
LENGTHS = [1, 17, 66]
STEPS = 12

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS = {
    "llama_all": {
        "why": "every module, f32", "base": "llama2_mha_f32", "seed": 101, "dtype": "F32",
        "config": {"r": 8, "lora_alpha": 16,
                   "target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}},
    "llama_other": {
        "why": "another one of the same model: fewer modules, another rank", "seed": 102,
        "base": "llama2_mha_f32", "dtype": "F32",
        "config": {"r": 3, "lora_alpha": 4, "target_modules": ["v_proj", "up_proj"]}},
    "llama_patterns": {
        "why": "bf16, rslora, ranks and alphas of single modules", "seed": 103,
        "base": "llama3_scaled_bf16", "dtype": "BF16",
        "config": {"r": 4, "lora_alpha": 5, "use_rslora": True,
                   "target_modules": ["q_proj", "v_proj", "down_proj"],
                   "rank_pattern": {"v_proj": 2},
                   "alpha_pattern": {"layers.1.self_attn.q_proj": 9}}},
    "phi3_fused": {
        "why": "products that the family has fused", "base": "phi3_short_f32", "seed": 104,
        "dtype": "F32",
        "config": {"r": 4, "lora_alpha": 8,
                   "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}},
    "phi4_mini_fused": {
        "why": "outputs of which a part turns", "base": "phi4_mini_f32", "seed": 107,
        "dtype": "F32", "config": {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj"]}},
    "glm_all": {
        "why": "outputs whose neighbours turn together", "base": "glm_f32", "seed": 108,
        "dtype": "F32",
        "config": {"r": 4, "lora_alpha": 8,
                   "target_modules": [*ATTENTION, "gate_up_proj", "down_proj"]}},
    "gemma3_whole": {
        "why": "the text part of a model that sees too", "base": "gemma3_whole_f32", "seed": 109,
        "dtype": "F32",
        "config": {"r": 4, "lora_alpha": 8,
                   "target_modules": r".*language_model.*\.(q_proj|v_proj|down_proj)"}},
    "gpt2_all": {
        "why": "transposed matrices, no gates", "base": "gpt2_f32", "seed": 105, "dtype": "F32",
        "config": {"r": 4, "lora_alpha": 8, "fan_in_fan_out": True,
                   "target_modules": ["c_attn", "c_proj", "c_fc"]}},
    "mixtral_attention": {
        "why": "attention beside experts", "base": "mixtral_f32", "seed": 106, "dtype": "F32",
        "config": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION}},
}


def main() -> None:
    cases = checkpoints.load_cases()
    made = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, adapter in ADAPTERS.items():
            case = cases[adapter["base"]]
            base, directory = (pathlib.Path(temporary) / part for part in (name, name + "-lora"))
            checkpoints.write_case(case, base)
            directory.mkdir()
            config = peft.LoraConfig(task_type="CAUSAL_LM", **adapter["config"])
            model = peft.get_peft_model(make_goldens.load(case, base), config)
            model.save_pretrained(directory)
            saved = json.loads((directory / "adapter_config.json").read_text())
            state = peft.get_peft_model_state_dict(model)
            adapter = {**adapter, "matrix_exponent": -2, "embedding_exponent": 0,
                       "tensors": [[key, list(state[key].shape)] for key in sorted(state)]}
            adapter["config"] = {key: saved[key] for key in sorted(saved)
                                 if key not in ("base_model_name_or_path", "peft_version")}
            (directory / "adapter_model.safetensors").write_bytes(
                checkpoints.safetensors_file(adapter, checkpoints.tensor_shapes(adapter)))
            model = peft.PeftModel.from_pretrained(
                make_goldens.load(case, base), directory, autocast_adapter_dtype=False)
            model = model.to(torch.float64).eval()
            adapter["prompts"] = []
            for length in LENGTHS:
                ids = checkpoints.prompt_ids(case, length)
                with torch.no_grad():
                    logits = model(torch.tensor([ids])).logits[0].numpy()
                out, gap = make_goldens.greedy(model, ids, STEPS)
                assert gap >= make_goldens.MIN_GAP, (name, length, gap)
                adapter["prompts"].append(
                    {"ids": ids, "first": make_goldens.row(logits[0]),
                     "last": make_goldens.row(logits[-1]), "greedy_ids": out,
                     "min_gap": float(f"{gap:.3g}")})
            made[name] = adapter
            print(name, [p["min_gap"] for p in adapter["prompts"]])
    lines = [f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}"
             for key, value in made.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
