# SPDX-License-Identifier: Apache-2.0
"""Makes tests/clients/lm_eval_tales.jsonl with `transformers` in float64.

Each line is a document of a multiple-choice task about the embedded model's
world, with what lm-eval is to read from a server: of each choice the sum of its
tokens' log probabilities behind the context, and whether greedy decoding gives it.

Needs: pip install torch transformers. Usage: make_lm_eval_goldens.py
"""

from __future__ import annotations

import json
import pathlib

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = ROOT / "tests" / "clients" / "lm_eval_tales.jsonl"
DOCUMENTS = [
    ("Once upon a time there was a", ["girl", "cat", "ball"], 0),
    ("Mia found a red", ["ball", "dog", "on"], 0),
    ("The dog was very", ["happy", "sad", "ran"], 0),
    ("Tom lost his hat. Mia found the hat. Now Tom is", ["happy", "lost"], 0),
]


def main() -> None:
    directory = ROOT / "models" / "tales"
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager")
    model.eval()
    with TARGET.open("w") as file:
        for context, choices, answer in DOCUMENTS:
            sums, greedy = [], []
            begin = len(tokenizer(context, add_special_tokens=False).input_ids)
            for choice in choices:
                ids = tokenizer(f"{context} {choice}", add_special_tokens=False).input_ids
                with torch.no_grad():
                    rows = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
                own = [rows[i - 1, ids[i]].item() for i in range(begin, len(ids))]
                sums.append(float(f"{sum(own):.9g}"))
                greedy.append(all(int(rows[i - 1].argmax()) == ids[i]
                                  for i in range(begin, len(ids))))
            file.write(json.dumps({"context": context, "choices": choices, "answer": answer,
                                   "loglikelihoods": sums, "greedy": greedy}) + "\n")


if __name__ == "__main__":
    main()
