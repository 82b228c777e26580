#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/text/added_tokens.json: what `transformers` makes of tokens
that files beside tests/golden/text/qwen2.json name and that file lacks.

    pip install transformers==5.24.0
    python3 tools/oracle/make_added_token_goldens.py            # checks: no output
    python3 tools/oracle/make_added_token_goldens.py --write    # makes it anew
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
import tempfile

import transformers

TEXT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "text"
GOLDEN = TEXT / "added_tokens.json"
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
TEXTS = [
    "<|im_start|>user\nHi <tool>x</tool>  <img>  y<|im_end|>\n",
    "NEW xNEW NEW. <|im_start|>assistant\n<tool><tool>é",
]


def token(content: str, **flags: bool) -> dict:
    names = ["lstrip", "normalized", "rstrip", "single_word", "special"]
    return {"content": content} | {name: flags.get(name, False) for name in names}


def cases() -> list[dict]:
    decoder = {
        "449": token("<img>", lstrip=True, rstrip=True, special=True),
        "447": token("<tool>", special=True),
        "441": token("<|im_start|>", special=True),
        "448": token("</tool>"),
        "450": token("NEW", single_word=True, normalized=True),
    }
    legacy = {"<tool>": 447, "</tool>": 448, "<img>": 449}
    return [
        {"name": "none", "files": {"tokenizer_config.json": CLASS}},
        {"name": "a decoder", "files": {"tokenizer_config.json": CLASS | {"added_tokens_decoder": decoder}}},
        {
            "name": "a decoder whose tokens have roles",
            "files": {
                "tokenizer_config.json": CLASS
                | {
                    "added_tokens_decoder": decoder,
                    "eos_token": "</tool>",
                    "additional_special_tokens": ["<img>", "<|im_start|>"],
                },
                # Not read beside a decoder.
                "added_tokens.json": {"Hi": 447},
            },
        },
        {
            "name": "a decoder that has other flags",
            "files": {
                "tokenizer_config.json": CLASS
                | {"added_tokens_decoder": {"441": token("<|im_start|>", lstrip=True, rstrip=True), "444": token("WORD")}}
            },
        },
        {"name": "added tokens", "files": {"tokenizer_config.json": CLASS, "added_tokens.json": legacy}},
        {
            "name": "added tokens that are special",
            "files": {
                "tokenizer_config.json": CLASS | {"eos_token": "<tool>", "extra_special_tokens": ["</tool>"]},
                "added_tokens.json": legacy,
            },
        },
        {
            "name": "words of the vocabulary",
            "files": {
                "tokenizer_config.json": CLASS
                | {"extra_special_tokens": {"image_token": "er", "other_token": "<|im_start|>"}}
            },
        },
    ]


def golden(case: dict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(TEXT / "qwen2.json", pathlib.Path(folder) / "tokenizer.json")
        for name, content in case["files"].items():
            (pathlib.Path(folder) / name).write_text(json.dumps(content))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        texts = []
        for text in TEXTS + ["user after x WORDx"]:
            ids = tokenizer.encode(text, add_special_tokens=False)
            skipped = tokenizer.decode(ids, skip_special_tokens=True)
            texts.append({"text": text, "ids": ids, "decoded_skip": skipped})
        return case | {"eos": tokenizer.eos_token_id, "texts": texts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write what is expected")
    options = parser.parse_args()
    made = {"transformers": transformers.__version__, "cases": [golden(case) for case in cases()]}
    text = json.dumps(made, indent=1) + "\n"
    if options.write:
        GOLDEN.write_text(text)
        return 0
    if GOLDEN.read_text() == text:
        return 0
    print(f"{GOLDEN.name} differs", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
