# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/engine/<case>.json with `transformers` in float64.

For each tiny checkpoint and prompt: a subset of the logits of the first and
the last prompt position, and 64 greedy ids with the smallest gap between the
two best logits on the way (a gap near the tolerance would make the ids a
matter of luck: such a case is refused, and gets another seed).

A case of a family that names its tensors in its own way gets them written to
tensors.json: as `transformers` saves a model of that config. Cases may have
prompt lengths and steps of their own, so that their goldens are small, and
"served", the positions of a sequence that dynamic and long rope scalings are
fixed for.

Needs: pip install numpy torch transformers. Usage: make_goldens.py [CASE ...]
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
import tempfile

import make_checkpoints as checkpoints
import numpy as np
import torch
import transformers

LENGTHS = [1, 2, 7, 15, 16, 17, 33, 64, 100, 129, 200, 257, 300]
STEPS = 64
SHOWN = 32  # logits per row, evenly spaced
MIN_GAP = 2e-4

GOLDENS = checkpoints.CASES.parent


def model_class(case: dict) -> type:
    if "vision_config" in case["config"]:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def load(case: dict, directory: pathlib.Path) -> torch.nn.Module:
    model = model_class(case).from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager",
        experts_implementation="eager")
    model.eval()
    if case.get("served"):
        fix_rope(model, case["served"])
    # Its own loading computes inverse frequencies in float32: part of the
    # model as published, kept as it is.
    return model


def fix_rope(model: torch.nn.Module, served: int) -> None:
    """Frequencies for `served` positions at every length."""
    rope = model.model.rotary_emb
    init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope.rope_type]
    rope.inv_freq, rope.attention_scaling = init(model.config, None, seq_len=served)
    rope.rope_type = "default"  # no updates


def saved_tensors(case: dict) -> list:
    """Names and shapes of what transformers saves for the case's config."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        (path / "config.json").write_text(json.dumps(case["config"]))
        config = transformers.AutoConfig.from_pretrained(path)
        model_class(case).from_config(config).save_pretrained(path)
        raw = (path / "model.safetensors").read_bytes()
    header = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])
    return [[name, entry["shape"]] for name, entry in sorted(header.items())
            if name != "__metadata__"]


def greedy(model: torch.nn.Module, ids: list[int], steps: int) -> tuple[list[int], float]:
    """With the cache of transformers; also the smallest gap to the runner-up."""
    out, gap, cache, feed = [], float("inf"), None, ids
    with torch.no_grad():
        for _ in range(steps):
            result = model(torch.tensor([feed]), past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            best = torch.topk(result.logits[0, -1], 2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            feed = [int(best.indices[0])]
            out += feed
    return out, gap


def row(logits: np.ndarray) -> dict:
    ids = np.linspace(0, len(logits) - 1, SHOWN).astype(int)
    return {"max_abs": float(f"{np.abs(logits).max():.9g}"),
            "ids": [int(i) for i in ids],
            "logits": [float(f"{logits[i]:.9g}") for i in ids]}


def goldens(case: dict, directory: pathlib.Path, lengths: list[int] | None = None) -> list[dict]:
    model = load(case, directory)
    prompts = []
    for length in lengths or case.get("lengths", LENGTHS):
        ids = checkpoints.prompt_ids(case, length)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].numpy()
        out, gap = greedy(model, ids, case.get("steps", STEPS))
        prompts.append({"ids": ids, "first": row(logits[0]), "last": row(logits[-1]),
                        "greedy_ids": out, "min_gap": float(f"{gap:.3g}")})
    return prompts


def weights_fingerprint(directory: pathlib.Path) -> str:
    """engine/model/fingerprint.h's "weights", stated once more; of the text part."""
    def text(value: str) -> bytes:
        return f"{len(value.encode())}:{value}".encode()

    entries = {}
    for path in directory.glob("*.safetensors"):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:8 + length]).items():
            if name == "__metadata__" or name.removeprefix("model.").startswith(
                    ("vision_tower.", "multi_modal_projector.", "visual.", "audio_tower.",
                     "embed_vision.", "embed_audio.")):
                continue
            begin, end = (8 + length + o for o in entry["data_offsets"])
            name = name.removeprefix("language_model.").replace("model.language_model.", "model.")
            entries[name] = (
                entry["dtype"], entry["shape"], raw[begin:end])
    whole = hashlib.sha256()
    for name, (dtype, shape, data) in sorted(entries.items()):
        pieces = hashlib.sha256()
        for at in range(0, len(data), 16 << 20):
            pieces.update(hashlib.sha256(data[at:at + (16 << 20)]).digest())
        whole.update(text(name) + text(dtype) + text(",".join(map(str, shape))) + pieces.digest())
    return whole.hexdigest()


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        for name, case in json.loads(checkpoints.CASES.read_text()).items():
            if sys.argv[1:] and name not in sys.argv[1:]:
                continue
            if case.get("own_names"):
                tensors = json.loads(checkpoints.TENSORS.read_text())
                tensors[name] = case["tensors"] = saved_tensors(case)
                lines = [f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}"
                         for key, value in sorted(tensors.items())]
                checkpoints.TENSORS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            directory = pathlib.Path(temporary) / name
            checkpoints.write_case(case, directory)
            prompts = goldens(case, directory)
            smallest = min(p["min_gap"] for p in prompts)
            print(f"{name}: smallest gap {smallest:.3g}, "
                  f"{len({t for p in prompts for t in p['greedy_ids']})} different ids")
            if smallest < MIN_GAP:
                raise SystemExit(f"{name}: gap {smallest} below {MIN_GAP}: choose another seed")
            content = {"made_by": "tools/oracle/make_goldens.py",
                       "versions": {"transformers": transformers.__version__,
                                    "torch": torch.__version__, "numpy": np.__version__},
                       "weights_fingerprint": weights_fingerprint(directory),
                       "prompts": prompts}
            (GOLDENS / f"{name}.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
