# SPDX-License-Identifier: Apache-2.0
"""Trains the tokenizer and the model of `models/tales` from a seed.

    python tools/tales/train.py --out models/tales

Needs torch, numpy and tokenizers; one CPU core is enough. Text is written on
the fly by `corpus.document`, so no document is read twice but by chance. The
phases differ in their mixture of documents (`corpus.MIXTURES`); with `--state`
their f32 weights are kept, and `--from-phase` goes on from them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import struct
import time
from pathlib import Path

import corpus
import numpy as np
import torch
from network import Llama, Shape
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from torch.nn import functional

LONGEST = 512  # tokens; a longer document is dropped
DOCUMENTS = 28  # per step, about 2800 tokens
STEPS = [5000, 2600, 850]  # of each phase; each warms up and cools down
RATES = [1.0, 1.0, 0.8]  # of each phase, times the peaks in `optimisers`
MICRO_BATCHES = 4  # per step, by length, so that little is padding


def make_tokenizer(seed: int, vocab_size: int) -> Tokenizer:
    """Byte-level BPE that knows words with their space, and single digits."""
    rng = random.Random(f"tokenizer {seed}")
    texts = (
        piece.text for _ in range(30_000) for piece in corpus.document(rng, 0)
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "merged_with_next"),
            pre_tokenizers.Punctuation("isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(corpus.SPECIALS))
    tokenizer.train_from_iterator(
        (_unmarked(text) for text in texts),
        BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(corpus.SPECIALS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    bos = corpus.BOS
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
    return tokenizer


def _unmarked(text: str) -> str:
    for special in corpus.SPECIALS:
        text = text.replace(special, "")
    return text


def encode(
    tokenizer: Tokenizer, pieces: list[corpus.Piece]
) -> tuple[list[int], list[bool]]:
    """Token ids of a document, and which of them are learned."""
    ids: list[int] = []
    learned: list[bool] = []
    for piece in pieces:
        part = tokenizer.encode(piece.text, add_special_tokens=False).ids
        ids += part
        learned += [piece.learned] * len(part)
    return ids, learned


def batches(
    tokenizer: Tokenizer, rng: random.Random, phase: int, documents: int
) -> list[tuple[Tensor, Tensor]]:
    """One step's documents as [batch, length] ids and targets (-100: none)."""
    encoded = [
        encode(tokenizer, corpus.document(rng, phase)) for _ in range(documents)
    ]
    encoded = sorted(
        (e for e in encoded if len(e[0]) <= LONGEST), key=lambda e: len(e[0])
    )
    # Groups of about equal numbers of tokens.
    total = sum(len(ids) for ids, _ in encoded)
    groups: list[list[tuple[list[int], list[bool]]]] = [
        [] for _ in range(MICRO_BATCHES)
    ]
    seen = 0
    for item in encoded:
        groups[min(MICRO_BATCHES - 1, seen * MICRO_BATCHES // total)].append(
            item
        )
        seen += len(item[0])
    made = []
    for group in filter(None, groups):
        length = len(group[-1][0])
        ids = np.zeros((len(group), length), np.int64)
        targets = np.full((len(group), length), -100, np.int64)
        for row, (tokens, learned) in enumerate(group):
            ids[row, : len(tokens)] = tokens
            targets[row, : len(tokens)] = np.where(learned, tokens, -100)
        made.append(
            (torch.from_numpy(ids[:, :-1]), torch.from_numpy(targets[:, 1:]))
        )
    return made


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to a fiftieth."""
    warm = min(1.0, (step + 1) / 100)
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return peak * warm * (0.02 + 0.98 * cosine)


def optimisers(model: Llama) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices of the layers, AdamW for the rest; peak rates."""
    inner = [p for p in model.layers.parameters() if p.dim() == 2]
    chosen = {id(p) for p in inner}
    outer = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(inner, lr=0.02, weight_decay=0.02, momentum=0.95)
    adam = torch.optim.AdamW(
        outer, lr=0.004, betas=(0.9, 0.98), weight_decay=0.0
    )
    return [(muon, 0.02), (adam, 0.004)]


def train(
    model: Llama, tokenizer: Tokenizer, phase: int, seed: int, out: Path
) -> float:
    """Runs one phase; its mean loss over the last steps."""
    steps = STEPS[phase]
    rng = random.Random(f"training {seed}" + f" {phase}" * (phase > 0))
    used = optimisers(model)
    begin = time.monotonic()
    tokens = 0
    losses: list[float] = []
    for step in range(steps):
        for optimiser, peak in used:
            for group in optimiser.param_groups:
                group["lr"] = RATES[phase] * learning_rate(step, steps, peak)
        step_batches = batches(tokenizer, rng, phase, DOCUMENTS)
        learned = sum(int((t >= 0).sum()) for _, t in step_batches)
        loss = 0.0
        for ids, targets in step_batches:
            tokens += ids.numel()
            where = targets >= 0
            logits = model.logits(model.hidden(ids)[where])
            part = functional.cross_entropy(
                logits, targets[where], reduction="sum"
            )
            part = part / learned
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, _ in used:
            optimiser.step()
            optimiser.zero_grad()
        losses.append(loss)
        if (step + 1) % 50 == 0:
            spent = time.monotonic() - begin
            print(
                f"phase {phase} step {step + 1} loss "
                f"{np.mean(losses[-50:]):.4f} tokens {tokens} "
                f"{tokens / spent:.0f}/s {spent:.0f} s",
                flush=True,
            )
        if (step + 1) % 500 == 0:
            write_model(out, model)
    return float(np.mean(losses[-200:]))


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """8 bytes of header length, JSON header, then the tensors as bf16."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, tensor in sorted(tensors.items()):
        raw = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + raw.nbytes],
        }
        data += raw.astype("<i2").tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_model(out: Path, model: Llama) -> None:
    """Weights and configuration in the layout of Hugging Face."""
    shape = model.shape
    bos, end, pad = (
        corpus.SPECIALS.index(t) for t in (corpus.BOS, corpus.END, corpus.PAD)
    )
    _write_json(
        out / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": shape.max_positions,
            "rms_norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_theta,
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "bos_token_id": bos,
            "eos_token_id": end,
            "pad_token_id": pad,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        },
    )
    _write_json(
        out / "generation_config.json",
        {
            "bos_token_id": bos,
            "eos_token_id": end,
            "pad_token_id": pad,
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.95,
        },
    )
    write_safetensors(out / "model.safetensors", model.tensors())


def write_tokenizer(out: Path, tokenizer: Tokenizer, shape: Shape) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": corpus.BOS,
            "eos_token": corpus.END,
            "pad_token": corpus.PAD,
            "additional_special_tokens": [
                corpus.SYSTEM,
                corpus.USER,
                corpus.ASSISTANT,
            ],
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_positions,
            "chat_template": corpus.CHAT_TEMPLATE,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--state", type=Path, help="folder for the f32 weights of each phase"
    )
    parser.add_argument(
        "--from-phase", type=int, default=0, help="go on from --state"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    shape = Shape()
    tokenizer = make_tokenizer(arguments.seed, shape.vocab_size)
    if tokenizer.get_vocab_size() != shape.vocab_size:
        raise SystemExit(
            f"tokenizer has {tokenizer.get_vocab_size()} tokens, "
            f"expected {shape.vocab_size}"
        )
    write_tokenizer(out, tokenizer, shape)
    torch.manual_seed(arguments.seed)
    model = Llama(shape)
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    if arguments.from_phase > 0:
        before = arguments.state / f"phase{arguments.from_phase - 1}.pt"
        model.load_state_dict(torch.load(before))
    for phase in range(arguments.from_phase, len(STEPS)):
        loss = train(model, tokenizer, phase, arguments.seed, out)
        print(f"phase {phase}: loss {loss:.4f} nats per learned token")
        if arguments.state:
            torch.save(model.state_dict(), arguments.state / f"phase{phase}.pt")
    write_model(out, model)


if __name__ == "__main__":
    main()
