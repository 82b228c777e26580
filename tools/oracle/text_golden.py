#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/text: small tokenizers of every kind, and what the Python
packages `tokenizers` and `jinja2` say about hard inputs.

    python3 -m venv venv && venv/bin/pip install tokenizers==0.23.3 jinja2==3.1.6
    venv/bin/python tools/oracle/text_golden.py            # checks: no output
    venv/bin/python tools/oracle/text_golden.py --write    # makes them anew

Each KIND.json is a tokenizer trained here on text from a seed. Each
KIND.golden.json holds `encode` (text or recipe -> ids with and without special
tokens, decoded text) and `decode` (ids -> text). Long inputs are kept as
recipes and their ids as count and FNV-1a hash. templates.json holds chat
templates, inputs and results. With TANDEM_TEST_DATA set, and once models/tales
exists, the tokenizers there get goldens too (these are not copied).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import random
import sys
import typing

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "tests" / "golden" / "text"
SEED = 20260101
VOCAB = 700

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# The o200k family: case classes and marks inside one word.
O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus() -> list[str]:
    """Lines in several scripts, from a seed."""
    rng = random.Random(SEED)
    names = ["Tom", "Anna", "Lily", "Ben", "Müller", "Zoë", "Дмитрий", "Ольга", "山田", "지민", "محمد"]
    verbs = ["sees", "finds", "likes", "didn't", "can't", "won't", "they're", "we'll", "ran", "says", "любит", "видит"]
    things = ["a cat", "the dog", "two birds", "3 apples", "12345 stones", "кошку", "猫", "고양이", "قطة", "naïve café", "x = y + 1;"]
    ends = [".", "!", "?", "...", "\n", "\r\n", "  ", "\t", " 🙂", " 👩‍👩‍👧"]
    lines = []
    for _ in range(2000):
        words = [rng.choice(names), rng.choice(verbs), rng.choice(things)]
        if rng.random() < 0.3:
            words += ["and", rng.choice(verbs), rng.choice(things)]
        lines.append(" ".join(words) + rng.choice(ends))
    return lines


# Unicode's awkward corners. (name, text)
INPUTS: list[tuple[str, str]] = [
    ("empty", ""),
    ("one space", " "),
    ("runs of spaces", "a  b   c    d     e" + " " * 40 + "f" + " " * 7),
    ("leading and trailing spaces", "   hello   "),
    ("tabs and newlines", "\t\tx\n\n\ny\r\n\r\nz\r"),
    ("newline runs", "\n \n  \n\t\n"),
    ("no-break and wide spaces", "a\u00a0b\u2003c\u3000d\u200be\ufefff\u2028g\u2029h\u0085i"),
    ("NUL and controls", "a\x00b\x01\x02\x1f\x7f\x80\x9fc"),
    ("contractions", "I'm you're he'll SHE'D it'S don't 'tis '' 'x ’s"),
    ("combining marks", "e\u0301 n\u0303 a\u0308\u0323 \u0301 x\u0301\u0301\u0301\u0301"),
    ("precomposed and decomposed", "\u00e9 vs e\u0301, \u1ea5 vs a\u0302\u0301, \uac00 vs \u1100\u1161"),
    ("compatibility forms", "\ufb01 \u2460 \u00bd \uff21\uff22\uff23 \u2122 \u33a5 \ufdfa"),
    ("ZWJ emoji", "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ❤️ 1️⃣ 🙂🙃"),
    ("right to left", "שלום עולם مرحبا بالعالم \u202eabc\u202c \u2067x\u2069"),
    ("Arabic with marks", "بِسْمِ ٱللَّٰهِ ٱلرَّحْمَٰنِ"),
    ("Devanagari and Thai", "नमस्ते दुनिया ภาษาไทย ที่"),
    ("CJK and kana", "你好，世界！山田さんは東京に住んでいます。안녕하세요"),
    ("mixed scripts in a word", "aбвγ漢字x1２३"),
    ("digits", "1 12 123 1234 1234567890 ١٢٣ ２０２６ Ⅷ ² 3.14e-5 0x1F"),
    ("title and modifier letters", "ǅ ʰ ˈ ª º İ ı ſ K Å ẞ"),
    ("case", "HELLO hello Hello hELLO ÉCOLE école ΣΊΣΥΦΟΣ ẞ"),
    ("surrogate edge", "\ud7ff \ue000 \uffff \ufffe \ufffd \U00010000 \U0010ffff"),
    ("private use and unassigned", "\ue000\uf8ff\U000f0000\U00100000 \u0378\u05ff\U000e01ef"),
    ("variation selectors and tags", "☃\ufe0e☃\ufe0f \U000e0061\U000e007f"),
    ("math and symbols", "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ ≤ ∞ 𝒳𝕐𝟙 ←→⇒ ░▒▓"),
    ("metaspace in text", "▁a ▁▁b▁ _c_"),
    ("byte tokens in text", "<0x41><0xE5> <0x0A>"),
    ("added tokens inside text", "a<|endoftext|>b <|endoftext|> c<s>d</s><unk>"),
    ("chat markers", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"),
    ("ChatML markers", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    ("broken markers", "<|endoftext <|endoftext| > <|im_start |> <s <s >s>"),
    ("stripping added tokens", "a   <mask>   b\n<mask>\tc<mask>d"),
    ("single-word added tokens", "WORD xWORD WORDx x WORD. (WORD)"),
    ("normalized added tokens", "Éa ÉÉ Abc ABC abc e\u0301"),
    ("adjacent added tokens", "<mask><mask><|endoftext|><|endoftext|><mask>"),
    ("code", "def f(x):\n    return {\"a\": [1, 2],\n\t'b': None}  # naïve\n\n\n"),
    ("URL and mail", "https://example.com/a?b=c&d=%20#x me@ex-ample.org"),
    ("JSON", '{"k": "v\\n\\u00e9", "n": [-1.5e+3, null, true]}'),
    ("long word", "antidisestablishmentarianism" * 3),
    ("repeated byte", "\u00ff" * 50),
    ("Zalgo", "Z" + "\u0300\u0315\u031b" * 20 + "a"),
    ("Ogham and Mongolian spaces", "a\u1680b\u180ec\u205fd"),
    ("line of dashes", "-" * 70 + "=" * 33),
    ("sentence", "Tom sees a cat. Anna didn't see 3 apples! Дмитрий любит 猫?"),
]

# Long inputs: (name, unit, times). Unit * times is the text.
RECIPES: list[tuple[str, str, int]] = [
    ("100 KB of words on one line", "Tom sees a cat and ", 5400),
    ("100 KB of spaces", " ", 100_000),
    ("100 KB of spaces then a word, twice", " " * 50_000 + "x", 2),
    ("100 KB of newlines", "\n", 100_000),
    ("100 KB of one letter", "a", 100_000),
    ("100 KB of digits", "1234567890", 10_000),
    ("100 KB of punctuation", "!?.,;:", 17_000),
    ("100 KB of combining marks", "e\u0301\u0323", 20_000),
    ("100 KB of Chinese", "你好世界", 8_400),
    ("100 KB of emoji", "👩‍👩‍👧", 5_600),
    ("100 KB mixed", "Zoë 山田 12345 didn't  x\t\r\n<|endoftext|>é", 2_000),
]


def fnv1a(ids: list[int]) -> str:
    """FNV-1a over the ids as little-endian int32, in hex."""
    value = 0xCBF29CE484222325
    for token in ids:
        for byte in token.to_bytes(4, "little"):
            value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def specials(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def extras(tokenizer: Tokenizer) -> None:
    """Added tokens with every flag, so that each is tested."""
    tokenizer.add_tokens(
        [
            AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False),
            AddedToken("WORD", single_word=True, normalized=False),
            AddedToken("Éa", normalized=True),
            AddedToken("ABC", normalized=True, single_word=True),
        ]
    )


def byte_level(split: str | None, normalizer, special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=split is not None))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(specials(*special))
    extras(tokenizer)
    return tokenizer


def bos_template(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )


def sentencepiece_bpe(legacy: bool) -> Tokenizer:
    """Llama 2's form (legacy: normalizer) or Mistral's (pre-tokenizer)."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    head = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=head, limit_alphabet=120, show_progress=False
    )
    trained.train_from_iterator(corpus(), trainer)
    state = json.loads(trained.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < 3]
    state["model"].update(byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer.from_str(json.dumps(state))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.pre_tokenizer = None
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme="first", split=False
        )
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)])
    bos_template(tokenizer, "<s>")
    extras(tokenizer)
    return tokenizer


def gemma() -> Tokenizer:
    """No prefix space, spaces replaced, merges across words."""
    state = json.loads(sentencepiece_bpe(legacy=True).to_str())
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    extras(tokenizer)
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB,
        special_tokens=["[UNK]", "[CLS]", "[SEP]"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in ("[CLS]", "[SEP]")],
    )
    extras(tokenizer)
    return tokenizer


def llama3() -> Tokenizer:
    names = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
    tokenizer = byte_level(LLAMA3_SPLIT, None, names.split())
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                special_tokens=[
                    ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
                ],
            ),
        ]
    )
    return tokenizer


KINDS = {
    "gpt2": lambda: byte_level(None, None, ["<|endoftext|>"]),
    "llama3": llama3,
    "qwen2": lambda: byte_level(
        QWEN2_SPLIT, normalizers.NFC(), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    ),
    "o200k": lambda: byte_level(O200K_SPLIT, None, ["<|endoftext|>"]),
    "llama2": lambda: sentencepiece_bpe(legacy=True),
    "mistral": lambda: sentencepiece_bpe(legacy=False),
    "gemma": gemma,
    "unigram": unigram,
    "wordpiece": wordpiece,
}


def goldens(tokenizer: Tokenizer) -> dict:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encode = []
    for name, text in INPUTS:
        text = text.encode("utf-8", "replace").decode()
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        special = tokenizer.encode(text, add_special_tokens=True).ids
        encode.append(
            {
                "name": name,
                "text": text,
                "ids": plain,
                "ids_special": special,
                "decoded": tokenizer.decode(special, skip_special_tokens=False),
                "decoded_skip": tokenizer.decode(special, skip_special_tokens=True),
            }
        )
    for name, unit, times in RECIPES:
        ids = tokenizer.encode(unit * times, add_special_tokens=False).ids
        encode.append(
            {"name": name, "unit": unit, "times": times, "count": len(ids), "fnv1a": fnv1a(ids)}
        )
    # Byte tokens of SentencePiece kinds are left out: broken runs of them are
    # where our decoder differs on purpose (tests say how).
    rng = random.Random(SEED)
    usable = [
        index
        for index in range(tokenizer.get_vocab_size())
        if (tokenizer.id_to_token(index) or "<0x").startswith("<0x") is False
    ]
    decode = []
    for _ in range(40):
        ids = [rng.choice(usable) for _ in range(rng.randint(1, 24))]
        decode.append(
            {
                "ids": ids,
                "text": tokenizer.decode(ids, skip_special_tokens=False),
                "text_skip": tokenizer.decode(ids, skip_special_tokens=True),
            }
        )
    return {"tokenizers": tokenizers.__version__, "encode": encode, "decode": decode}


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_BLOCKS = """{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {% if loop.first %}
    {# a comment, which vanishes with its line #}
    {% endif %}
<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
LLAMA3_CHAT = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have these functions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
QWEN_TOOLS = """{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- set reasoning = '' %}
    {%- if '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
        {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content }}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
        {%- if tool_call.arguments is string %}
            {{- tool_call.arguments }}
        {%- else %}
            {{- tool_call.arguments | tojson }}
        {%- endif %}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
# Everything that templates print, as Python prints it.
PYTHON_TEXT = (
    "{{ x }}|{{ x ~ '!' }}|{{ x|tojson }}|{{ x|tojson(indent=2) }}|{{ x|string }}|"
    "{{ missing }}|{{ none }}|{{ true }}|{{ [1, 'a', none, true, 1.0] }}"
)
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{%- endif %}{% endfor %}"
)
SUGAR = """{% macro show(a, b='x') %}[{{ a }}/{{ b }}]{% endmacro %}
{{ show(1) }}{{ show(1, b=2) }}{% for k, v in x.items() %}{{ k }}={{ v }};{% endfor %}
{% for m in messages if m.role != 'system' %}{% if loop.index > 2 %}{% break %}{% endif %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ m.role }}{% if not loop.last %},{% endif %}{% else %}none{% endfor %}
{% set text %}<{{ messages[0].content }}>{% endset %}{{ text | upper }}{{ text.replace('<', '(') }}
{{ messages | map(attribute='role') | join(', ') }}|{{ messages | selectattr('role', 'equalto', 'user') | list | length }}|{{ messages | rejectattr('role', 'equalto', 'user') | map(attribute='content') | list }}
{{ [1, 2] + [3] }}|{{ 'ab' * 3 }}|{{ [0] * 2 }}|{{ 7 // 2 }}|{{ 7 % 3 }}|{{ 2 ** 3 }}|{{ 7 / 2 }}|{{ 1.5 + 1 }}|{{ -3 | abs }}
{{ 'a b  c'.split() }}|{{ 'a,b'.split(',') }}|{{ ' x '.strip() }}|{{ 'Abc'.lower() }}|{{ 'x'.title() }}|{{ 'abc'[1:] }}|{{ 'abc'[-1] }}|{{ messages[-1].role }}
{{ x.get('k') }}|{{ x.get('zz', 'd') }}|{{ x.zz is defined }}|{{ x.zz | default('dd') }}|{{ x['k'] in ['v'] }}|{{ 'k' in x }}|{{ x.k is string }}|{{ x is mapping }}|{{ messages is iterable }}|{{ 3 is even }}
{% with y = 5 %}{{ y }}{% endwith %}{{ 'yes' if x.k == 'v' else 'no' }}{{ x.keys() | list }}{{ x.values() | list }}{{ range(3) | list }}{{ 'a\\tb"\\'' | tojson }}{{ 'line1\\nline2' | indent(2) }}
{{ (messages | first).role }}{{ (messages | last).role }}{{ 'a-b' | replace('-', '+') }}{{ '%s:%d' | format('n', 3) }}{{ ['b', 'a'] | sort | join }}{% for k, v in x | dictsort %}{{ k }}{{ v }}{% endfor %}{{ 3.0 | int }}{{ '4' | int + 1 }}{{ [3, 1] | max }}
"""

USER = {"role": "user", "content": "Hello  <b>& \"you\"</b> é 山"}
ASSISTANT = {"role": "assistant", "content": "Hi!\n"}
SYSTEM = {"role": "system", "content": " Be brief. "}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <now> & 'later' é",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "東京"]}, "n": {"default": 1.0}},
            "required": [],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"name": "get_weather", "arguments": {"city": "Paris", "n": 2}, "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    ],
}
RESULT = {"role": "tool", "content": {"temp": 21.5, "ok": True, "note": None}}
NOW = 1767312245  # 2026-01-02T00:04:05Z
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own


def template_cases() -> list[dict]:
    cases: list[dict] = []

    def case(name: str, template, messages: list, **options) -> None:
        cases.append({"name": name, "template": template, "messages": messages, **options})

    talk = [SYSTEM, USER, ASSISTANT, USER]
    case("ChatML", CHATML, talk)
    case("ChatML without generation prompt", CHATML, talk, add_generation_prompt=False)
    case("ChatML over lines", CHATML_BLOCKS, talk[1:])
    case("ChatML over lines with system", CHATML_BLOCKS, talk)
    case("Llama 3", LLAMA3_CHAT, talk)
    case("Llama 3 with a date", LLAMA3_CHAT, talk, extra={"date_string": "1 Jan"})
    case("Llama 3 with tools", LLAMA3_CHAT, [USER, CALL, RESULT], tools=[TOOL, TOOL])
    case("Llama 3 refuses two calls", LLAMA3_CHAT, [USER, {**CALL, "tool_calls": CALL["tool_calls"] * 2}])
    case("Mistral", MISTRAL_CHAT, [USER, ASSISTANT, USER])
    case("Mistral refuses two users", MISTRAL_CHAT, [USER, USER])
    case("Mistral refuses system", MISTRAL_CHAT, [USER, {"role": "system", "content": "x"}])
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nParis."}
    case("Qwen", QWEN_TOOLS, [SYSTEM, USER, thought, USER])
    case("Qwen without thinking", QWEN_TOOLS, [USER], extra={"enable_thinking": False})
    string_call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": '{"a":1}'}]}
    case("Qwen calls", QWEN_TOOLS, [USER, CALL, {"role": "tool", "content": "21"}, string_call], tools=[TOOL])
    case("Qwen thinks after the last user", QWEN_TOOLS, [USER, thought], add_generation_prompt=False)
    for label, value in [
        ("text", "it's \"x\"\n\\ é\x7f\u00ad"),
        ("single quote", "it's"),
        ("integers", [0, -1, 2**53, -(2**63), 2**63 - 1]),
        ("floats", [1.0, 0.1, -2.5, 1e16, 1e-5, 123456789.125, 1e22, 0.0001, 1.5e300]),
        ("booleans and none", [True, False, None]),
        ("nested", {"a": [{"b": {}}, []], "é": {"c": [1, [2, [3]]]}}),
        ("empty", {}),
        ("controls", "\x00\x08\x0c\x1b\u2028</script>"),
        ("order", {"z": 1, "a": 2, "m": {"y": 1, "b": 2}}),
    ]:
        case(f"Python prints {label}", PYTHON_TEXT, [USER], extra={"x": value})
    case("json options", "{{ x|tojson(sort_keys=true) }}{{ x|tojson(separators=(',', ':')) }}{{ x|tojson(ensure_ascii=true) }}", [USER], extra={"x": {"b": "é😀", "a": [1, {}]}})
    case("generation tags", GENERATION, talk)
    case("sugar", SUGAR, talk, extra={"x": {"k": "v", "n": 1}})
    case("dates", "{{ strftime_now('%Y-%m-%d %H:%M:%S %B %b %A %a %j %y %I %p %d') }}", [USER])
    case("list form, default", [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "T{{ tools|length }}"}], talk)
    case("list form, tool_use", [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "T{{ tools|length }}"}], talk, tools=[TOOL])
    case("list form, tools but no tool_use", [{"name": "default", "template": CHATML}], talk, tools=[TOOL])
    case("no such attribute of undefined", "{{ a.b.c }}", [USER])
    case("special tokens", "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token is defined }}", [USER])
    case("nothing", "{{ none is iterable }}{{ x is iterable }}{{ 'a' is iterable }}{{ [] is iterable }}{{ {} is iterable }}{{ 1 is iterable }}{{ x|length }}{{ x|count }}{{ none|trim }}{{ x|trim }}{{ true|trim }}{{ ' a '|trim }}{{ 'xax'|trim('x') }}", [USER])
    case("tools that are not given", "{% if tools is iterable and tools|length > 0 %}{{ tools|length }}{% endif %}-", [USER])
    case("keys that are methods", "{% for k, v in x.items() %}{{ k }}={{ v }};{% endfor %}{{ x.keys()|list }}{{ x.values()|list }}{{ x.get('n', 0) }}{{ x.get('o', 0) }}{{ x['items'] }}", [USER], extra={"x": {"items": ["a"], "keys": 1, "values": {"b": 2}, "get": "c", "n": None}})
    case("filters of what is no text", "{{ x|upper }}{{ x|lower }}{{ none|replace('o', 'O') }}{{ true|capitalize }}{{ y|upper }}{{ ['a', none]|map('title')|join }}", [USER], extra={"x": ["string", None]})
    case("indents", "{{ '{\n'|indent(4, first=true) }}{{ 'a\nb\n\nc\n'|indent(2) }}{{ 'a\n\n'|indent(2, true, true) }}{{ ''|indent }}|", [USER])
    case("counts", "{{ 'abab'.count('ab') }}{{ 'h\u00e9'.count('') }}{{ ''.count('') }}{{ [1, 2, 1].count(1) }}", [USER])
    case("questions to a text", "{% for s in x %}{{ s.isalnum() }}{{ s.isalpha() }}{{ s.isdigit() }}{{ s.isnumeric() }}{{ s.isspace() }}{{ s.islower() }}{{ s.isupper() }}{{ s.isascii() }}|{% endfor %}", [USER], extra={"x": ["", "a\nb", "A1", "12", " \t", "-", "\u00e9"]})
    case("places in a text", "{% for s in x %}{{ s.find('a') }}{{ s.find('a', 1) }}{{ s.rfind('a', 0, -1) }}{{ s.find('', 9) }}{{ s.count('a', 1) }}{{ s.count('', -2) }}|{% endfor %}{{ '\u00e9a'.index('a') }}{{ 'aba'.rindex('a') }}", [USER], extra={"x": ["", "aaa", "\u00e9\u6f22a\U0001f600a", "banana"]})
    case("splits", "{% for s in x %}{{ s.rsplit() }}{{ s.rsplit(none, 1) }}{{ s.split(none, 1) }}{{ s.split(maxsplit=2) }}{{ s.rsplit(',', 1) }}{{ s.split(sep=',', maxsplit=1) }}{{ s.rsplit('aa') }}{{ s.partition(',')|join('/') }}{{ s.rpartition(',')|join('/') }}|{% endfor %}", [USER], extra={"x": ["", " a  b c ", "a,b,,c", "aaa"]})
    case("paddings", "{% for s in x %}{{ s.ljust(6) }}{{ s.rjust(6, '*') }}{{ s.center(6) }}{{ s.center(7, '\u00e9') }}{{ s.zfill(6) }}{{ s.zfill(1) }}{{ s.expandtabs() }}{{ s.expandtabs(tabsize=3) }}|{% endfor %}", [USER], extra={"x": ["", "-42", "+7", "\u6f22\u5b57", "a\tbcd\te\n\tf"]})
    case("cases and ends", "{% for s in x %}{{ s.swapcase() }}{{ s.casefold() }}{{ s.removeprefix('a') }}{{ s.removesuffix('a') }}{{ s.removeprefix('') }}|{% endfor %}", [USER], extra={"x": ["", "aBa", "Stra\u00dfe", "\ufb01\u03c2\u0131"]})
    case("words and addresses", "{% for s in x %}{{ s|wordcount }}{{ s|truncate(9) }}{{ s|truncate(9, true, leeway=0) }}{{ s|truncate(length=9, end='\u2026', leeway=1) }}{{ s|urlencode }}|{% endfor %}{{ {'a b': 'c/d', 'e': 1}|urlencode }}{{ [['a', 'b&']]|urlencode }}{{ none|urlencode }}{{ 7.5|urlencode }}{{ missing|urlencode }}{{ none|wordcount }}", [USER], extra={"x": ["", "a b/c", "the quick brown fox", "na\u00efve_x-~."]})
    case("slices", "{% set x = [1, 2, 3, 4, 5] %}{{ x[1:] }}{{ x[:-2] }}{{ x[::2] }}{{ x[::-1] }}{{ x[3:0:-2] }}{{ x[9:] }}{{ x[1:][0] }}{{ x[1:]|length }}{{ x[1:] is sequence }}{{ 'h\u00e9llo'[1:3] }}{{ 'abc'[::-1] }}{{ ''[::-1] }}{{ [][::-1] }}{{ 'abc'[5:] }}", [USER])
    case("content parts", "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text if p.type == 'text' else '<' + p.type + '>' }}{% endfor %}{% endif %}{% endfor %}", [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}, USER])
    for tail in ["Once upon", " Once upon ", "Once\n", "<", "|", "end", "im_", "assistant", ""]:
        case(f"continues {tail!r}", CHATML, [USER, {"role": "assistant", "content": tail}], add_generation_prompt=False, continue_final_message=True)
    case("continues after trim", CHATML_BLOCKS, [USER, {"role": "assistant", "content": " Once upon "}], add_generation_prompt=False, continue_final_message=True)
    return cases


def render(case: dict) -> str:
    """What transformers' apply_chat_template does with these inputs."""

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return datetime.datetime.fromtimestamp(NOW, datetime.UTC).strftime(form)

    class Generation(jinja2.ext.Extension):
        tags: typing.ClassVar[set[str]] = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.If(jinja2.nodes.Const(True), body, [], [], lineno=line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    template, tools = case["template"], case.get("tools")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named["tool_use"] if tools and "tool_use" in named else named["default"]
    messages = case["messages"]
    if case.get("continue_final_message"):
        messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + MARK}]
    text = environment.from_string(template).render(
        messages=messages,
        tools=tools,
        documents=None,
        add_generation_prompt=case.get("add_generation_prompt", True),
        **TOKENS,
        **case.get("extra", {}),
    )
    if case.get("continue_final_message"):
        end = text.rindex(MARK.strip())
        text = text[:end] if text[end:].startswith(MARK) else text[:end].rstrip()
    return text


def template_goldens() -> dict:
    cases = template_cases()
    for case in cases:
        try:
            case["expected"] = render(case)
        except jinja2.exceptions.UndefinedError:
            case["refused"] = "undefined"  # the wording is each engine's own
        except jinja2.exceptions.TemplateError as error:
            case["refused"] = error.message
    return {"jinja2": jinja2.__version__, "now_unix_s": NOW, "tokens": TOKENS, "cases": cases}


def dump(value: dict) -> str:
    """One case a line, ASCII (odd characters stay readable in a diff)."""
    lines = ["{"]
    for number, (key, item) in enumerate(value.items()):
        comma = "," if number + 1 < len(value) else ""
        if isinstance(item, list):
            lines.append(f' "{key}": [')
            lines += ["  " + json.dumps(x) + ("," if i + 1 < len(item) else "") for i, x in enumerate(item)]
            lines.append(f" ]{comma}")
        else:
            lines.append(f' "{key}": {json.dumps(item)}{comma}')
    return "\n".join([*lines, "}", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write what is expected")
    options = parser.parse_args()
    made: dict[pathlib.Path, str] = {OUT / "templates.json": dump(template_goldens())}
    for kind, make in KINDS.items():
        path = OUT / f"{kind}.json"
        if options.write and not path.exists():
            # Training is not the same on every version: made once, then kept.
            OUT.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(json.loads(make().to_str()), ensure_ascii=False))
        made[OUT / f"{kind}.golden.json"] = dump(goldens(Tokenizer.from_file(str(path))))
    data = os.environ.get("TANDEM_TEST_DATA", "")
    others = {
        "stories260K": pathlib.Path(data) / "models" / "stories260K" / "tokenizer.json",
        "tales": ROOT / "models" / "tales" / "tokenizer.json",
    }
    for name, path in others.items():
        if path.is_file():
            made[OUT / f"{name}.golden.json"] = dump(goldens(Tokenizer.from_file(str(path))))
        else:
            print(f"{name}: no tokenizer here, its goldens are left alone", file=sys.stderr)
    wrong = 0
    for path, text in made.items():
        if options.write:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path.relative_to(ROOT)} differs", file=sys.stderr)
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
