# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/engine_scores.json with `transformers` in float64.

For each tiny checkpoint named below and two prompts: of every token of the
prompt but the first its log probability (log_softmax of the logits behind all
tokens before it), its rank, and the five most probable tokens with theirs.
Families differ in groups of heads, windows, soft caps and tied heads.

Needs: pip install numpy torch transformers. Usage: make_scoring_goldens.py
"""

from __future__ import annotations

import json
import pathlib
import tempfile

import make_checkpoints as checkpoints
import make_goldens
import torch
import transformers

CASES = ["llama2_mha_f32", "smollm_tied_bf16", "mistral_window_f32", "gemma2_f32",
         "qwen3_moe_f32", "gpt2_f32"]
LENGTHS = [2, 45]
TOP = 5
TARGET = checkpoints.CASES.parent.parent / "engine_scores.json"


def rounded(value: float) -> float:
    return float(f"{value:.9g}")


def scores(model: torch.nn.Module, ids: list[int]) -> list[dict]:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].to(torch.float64)
    rows = torch.log_softmax(logits, dim=-1)
    records = []
    for row, token in zip(rows, ids[1:]):
        own = row[token].item()
        top = torch.topk(row, TOP)
        records.append({"logprob": rounded(own),
                        "rank": 1 + int((row > own).sum()),
                        "top_ids": top.indices.tolist(),
                        "top_logprobs": [rounded(v) for v in top.values.tolist()]})
    return records


def main() -> None:
    cases = json.loads(checkpoints.CASES.read_text())
    content = {"made_by": "tools/oracle/make_scoring_goldens.py",
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
                {"ids": ids, "scores": scores(model, ids)}
                for ids in (checkpoints.prompt_ids(case, length) for length in LENGTHS)]
    TARGET.write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
