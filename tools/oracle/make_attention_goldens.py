# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/engine_attention.json with `transformers` in float64.

For each tiny checkpoint named below and two prompts: the attention weights of
the last position, averaged over heads, of each layer (output_attentions of the
eager implementation). Families differ in groups of heads, windows, soft caps,
norms of queries and keys, rope scalings and learned positions.

Needs: pip install numpy torch transformers. Usage: make_attention_goldens.py
"""

from __future__ import annotations

import json
import pathlib
import tempfile

import make_checkpoints as checkpoints
import make_goldens
import torch
import transformers

CASES = ["llama2_mha_f32", "smollm_tied_bf16", "mistral_window_f32", "qwen3_f32",
         "gemma2_f32", "gemma3_f32", "gemma4_f32", "gemma4_few_f32", "gpt2_f32"]
LENGTHS = [7, 45]
TARGET = checkpoints.CASES.parent.parent / "engine_attention.json"


def weights(model: torch.nn.Module, ids: list[int]) -> list[list[float]]:
    with torch.no_grad():
        layers = model(torch.tensor([ids]), output_attentions=True).attentions
    rows = [layer[0, :, -1].mean(dim=0) for layer in layers]
    assert all(len(row) == len(ids) for row in rows)
    return [[float(f"{value:.7g}") for value in row] for row in rows]


def main() -> None:
    cases = json.loads(checkpoints.CASES.read_text())
    content = {"made_by": "tools/oracle/make_attention_goldens.py",
               "versions": {"transformers": transformers.__version__,
                            "torch": torch.__version__}, "cases": {}}
    with tempfile.TemporaryDirectory() as temporary:
        for name in CASES:
            case = cases[name]
            if case.get("own_names"):
                case["tensors"] = make_goldens.saved_tensors(case)
            directory = pathlib.Path(temporary) / name
            checkpoints.write_case(case, directory)
            model = make_goldens.load(case, directory)
            content["cases"][name] = [
                {"ids": ids, "layers": weights(model, ids)}
                for ids in (checkpoints.prompt_ids(case, length) for length in LENGTHS)]
    TARGET.write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
