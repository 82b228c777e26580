# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/beams/*.json: what beam searches of `transformers` find.

tables.json is of a model whose logits are a hash of the last token and the
length, so that a test needs no tensors; checkpoints.json of some of the tiny
checkpoints (make_checkpoints.py), in float32. Widths, length penalties, early
stopping, several end tokens, and logits processors vary.

Needs: pip install numpy torch transformers. Usage: make_beam_goldens.py
"""

from __future__ import annotations

import itertools
import json
import pathlib
import tempfile

import make_checkpoints as checkpoints
import torch
import transformers
from transformers.modeling_outputs import CausalLMOutput

GOLDENS = checkpoints.CASES.parent.parent / "beams"
MASK = (1 << 64) - 1
VOCAB = 50
ENDS = [7, 11, 31]
CHECKPOINTS = [
    "llama_biases_f32", "qwen3_f32", "gpt2_f32", "qwen2_bf16", "qwen2_window_f32", "gemma2_f32",
    "gemma3_f32", "gemma4_few_f32", "phi3_short_f32", "mixtral_f32", "mistral_window_f32",
    "gpt_oss_f32", "deepseek_v3_f32", "falcon_f32"]


def splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def table_logits(seed: int, length: int, last: int) -> list[float]:
    """What follows `length` tokens of which `last` is the last."""
    state = splitmix64(seed * 1000003 + length * 1009 + last)
    row = [(splitmix64(state + i) >> 40) / 4194304.0 for i in range(VOCAB)]
    for end in ENDS:
        row[end] += 1.0
    return row


class TableModel(transformers.PreTrainedModel, transformers.GenerationMixin):
    config_class = transformers.PretrainedConfig

    def __init__(self, seed: int):
        config = transformers.PretrainedConfig(vocab_size=VOCAB, is_encoder_decoder=False)
        super().__init__(config)
        self.seed = seed
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, attention_mask=None, **_):
        rows = [[table_logits(self.seed, len(ids), int(ids[-1]))] for ids in input_ids]
        return CausalLMOutput(logits=torch.tensor(rows, dtype=torch.float32))

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return {"input_ids": input_ids}


def search(model, prompt: list[int], case: dict, use_cache: bool) -> list[dict]:
    """The hypotheses: new ids up to the end token, and their scores."""
    ends = case["ends"]
    extra = {}
    if case.get("repetition_penalty", 1.0) != 1.0:
        extra["repetition_penalty"] = case["repetition_penalty"]
    if case.get("banned"):
        extra["suppress_tokens"] = case["banned"]
    if case.get("bias"):
        extra["sequence_bias"] = [[[token], bias] for token, bias in case["bias"]]
    if case.get("min_tokens"):
        extra["min_new_tokens"] = case["min_tokens"]
    with torch.no_grad():
        result = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            do_sample=False, num_beams=case["width"], num_return_sequences=case["best"],
            max_new_tokens=case["max_tokens"], length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"], eos_token_id=ends or None,
            pad_token_id=0, use_cache=use_cache, output_scores=True,
            return_dict_in_generate=True, **extra)
    hypotheses = []
    for ids, score in zip(result.sequences, result.sequences_scores, strict=True):
        new = ids[len(prompt):].tolist()
        stop = next((i for i, token in enumerate(new) if token in ends), None)
        new = new[:case["max_tokens"] if stop is None else stop + 1]
        hypotheses.append({"ids": new, "score": float(f"{float(score):.7g}"),
                           "stopped": stop is not None})
    return hypotheses


def table_cases() -> list[dict]:
    cases = []
    grid = itertools.product([2, 3, 4, 6, 8], [-0.7, 0.0, 1.0, 2.5], [False, True, "never"])
    for i, (width, penalty, early) in enumerate(grid):
        case = {"seed": i, "prompt": [1 + i % 40, 2], "width": width, "best": max(1, width - i % 3),
                "max_tokens": [1, 4, 12, 30][i % 4], "length_penalty": penalty,
                "early_stopping": early, "ends": ENDS[:i % 4]}
        if i % 5 == 1:
            case["repetition_penalty"] = 1.5
        if i % 5 == 2:
            case["banned"] = [5, 9, 20]
        if i % 5 == 3:
            case["min_tokens"] = min(3, case["max_tokens"] - 1)
        if i % 5 == 4:
            case["bias"] = [[4, 1.5], [6, -2.0]]
        cases.append(case)
    return cases


def checkpoint_cases(vocab: int) -> list[dict]:
    cases = []
    for i, (width, penalty, early) in enumerate([
            (2, 1.0, False), (4, 1.0, True), (4, 0.0, "never"), (5, -0.5, False), (8, 2.0, "never"),
            (3, 1.0, False)]):
        # So many end tokens that beams meet them.
        ends = sorted({(i * 31 + k * 37) % vocab for k in range(8)})
        cases.append({"length": [9, 16, 17, 33, 5, 40][i], "width": width, "best": (width + 1) // 2,
                      "max_tokens": 20, "length_penalty": penalty, "early_stopping": early,
                      "ends": ends, **({"repetition_penalty": 1.3} if i == 5 else {})})
    return cases


def load(directory: pathlib.Path, dtype: torch.dtype) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
    return model.eval()


def write(name: str, content: dict) -> None:
    content = {"made_by": "tools/oracle/make_beam_goldens.py",
               "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
               **content}
    GOLDENS.mkdir(exist_ok=True)
    (GOLDENS / name).write_text(json.dumps(content, separators=(",", ":")) + "\n")


def main() -> None:
    cases = []
    for case in table_cases():
        found = search(TableModel(case["seed"]), case["prompt"], case, use_cache=False)
        cases.append({**case, "hypotheses": found})
    stopped = sum(h["stopped"] for c in cases for h in c["hypotheses"])
    print(f"tables: {len(cases)} searches, {stopped} hypotheses ended by a token")
    write("tables.json", {"vocab": VOCAB, "end_tokens": ENDS, "cases": cases})

    models = {}
    every = json.loads(checkpoints.CASES.read_text())
    for name, tensors in json.loads(checkpoints.TENSORS.read_text()).items():
        every[name]["tensors"] = tensors
    with tempfile.TemporaryDirectory() as temporary:
        for name in CHECKPOINTS:
            directory = pathlib.Path(temporary) / name
            checkpoints.write_case(every[name], directory)
            model, exact = load(directory, torch.float32), load(directory, torch.float64)
            models[name] = []
            for case in checkpoint_cases(model.config.vocab_size):
                prompt = checkpoints.prompt_ids(every[name], case["length"])
                found = search(model, prompt, case, use_cache=True)
                others = search(exact, prompt, case, use_cache=True)
                if [h["ids"] for h in found] != [h["ids"] for h in others]:
                    raise SystemExit(f"{name}: which beams win is a matter of rounding")
                models[name].append({**case, "hypotheses": found})
            stopped = sum(h["stopped"] for c in models[name] for h in c["hypotheses"])
            print(f"{name}: {stopped} hypotheses ended by a token")
    write("checkpoints.json", {"cases": models})


if __name__ == "__main__":
    main()
