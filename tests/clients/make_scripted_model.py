# SPDX-License-Identifier: Apache-2.0
"""Makes a model that calls tools: a real checkpoint whose weights say which
token follows which, so that what clients see is known to the letter.

Attention and MLP add nothing, a token's embedding is a unit vector, and the
head gives the largest logit to the token's successor. So the text is a function
of the last token of the prompt, which the chat template chooses: by whether
there are tools, and results of tools.

With style qwen3 it reasons before its calls, which are those of hermes, and not
otherwise, as its template says. chat_template_kwargs {"think": true} is as if
there were tools.

With style openai it answers in messages, of which the template opens the first,
since no mark may stand twice: a thought, with an answer behind it; a call of
get_weather, with tools; an answer, with results; and with chat_template_kwargs
{"answer": true} none, for the answer alone.

Usage: make_scripted_model.py hermes|llama3_json|mistral|qwen3_coder|glm45|minimax_m2|deepseek_v3|deepseek_v31|kimi_k2|gemma4|qwen3|openai DIRECTORY
"""

import itertools
import json
import pathlib
import struct
import sys

WEATHER = '{"city": "Rome", "days": 2}'
CLOCK = '{"zone": "CET"}'
ANSWER = ["It is ", "warm", " in Rome."]
TALK = ["I have ", "no tools", " here."]
# What each style writes for two calls, cut as tokenizers do: within words and
# across marks. No piece stands twice, since it has one successor; so Mistral's
# marks are special tokens once, and then text. Nor is one a single byte, which
# the vocabulary has already.
CALLS = {
    "hermes": ["Let me look", ".\n", "<tool_", "call>\n{\"name\": \"get_wea", "ther\", \"argume",
               "nts\": {\"city\": \"Ro", "me\", \"days\": 2}}\n</tool_call>\n<tool_call>\n",
               "{\"name\": \"clock\", \"arguments\"", ": {\"zone\": \"CET\"}}\n</tool_call>"],
    "llama3_json": ["<|python_tag|>", "{\"name\": \"get_wea", "ther\", \"parame", "ters\": ",
                    "{\"city\": \"Ro", "me\", \"days\": 2}}", "; {\"name\": \"clo",
                    "ck\", \"parameters\": {\"zone\": \"CET\"}}"],
    "mistral": ["Let me look", ".\n", "[TOOL_CALLS]", "get_wea", "ther", "[ARGS]", "{\"city\": \"Ro",
                "me\", \"days\": 2}", "[TOOL", "_CALLS]clo", "ck[AR", "GS]{\"zone\": \"CET\"}"],
    "qwen3_coder": ["Let me look", ".\n", "<tool_", "call>\n<function=get_wea", "ther>\n<para",
                    "meter=city>\nRo", "me\n</parameter>\n<parameter=days>", "\n2\n</parame",
                    "ter>\n</function>\n</tool_call>\n<tool_call>\n<function=clo",
                    "ck>\n<parameter=zone>\nCET\n</parameter>\n</function>\n</tool_call>"],
    "glm45": ["Let me look", ".\n", "<tool_call>", "get_wea", "ther\n", "<arg_key>", "city",
              "</arg_key>\n<arg_value>Ro", "me</arg_", "value>\n<arg_key>days</arg_key>\n",
              "<arg_value>", "2</arg_value>\n</tool", "_call>\n<tool_call>clo",
              "ck<arg_key>zone</arg_key><arg_value>CET</arg_value>", "</tool_call>"],
    "minimax_m2": ["Let me look", ".\n", "<minimax:tool_call>", "\n<invoke name=\"get_wea",
                   "ther\">\n<parameter name=\"ci", "ty\">Ro", "me</parame", "ter>\n<parameter name=\"days\">",
                   "2</parameter>\n</invoke>\n<inv", "oke name=\"clock\">\n",
                   "<parameter name=\"zone\">CET</parameter>\n</invoke>", "\n</minimax:tool_call>"],
    "deepseek_v3": ["Let me look", ".\n", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function",
                    "<｜tool▁sep｜>", "get_wea", "ther\n```js", "on\n{\"city\": \"Ro", "me\", \"days\": 2}\n`", "``",
                    "<｜tool▁call▁end｜>", "\n<｜tool▁call▁beg", "in｜>function<｜tool▁s", "ep｜>clock\n```json\n",
                    "{\"zone\": \"CET\"}\n```<｜tool▁call▁e", "nd｜>", "<｜tool▁calls▁end｜>"],
    "deepseek_v31": ["Let me look", ".\n", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "get_wea", "ther",
                     "<｜tool▁sep｜>", "{\"city\": \"Ro", "me\", \"days\": 2}", "<｜tool▁call▁end｜>", "<｜tool▁call▁beg",
                     "in｜>clock<｜tool▁s", "ep｜>{\"zone\": ", "\"CET\"}<｜tool▁call▁e", "nd｜>", "<｜tool▁calls▁end｜>"],
    "kimi_k2": ["Let me look", ".\n", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.get_wea",
                "ther", ":0", "<|tool_call_argument_begin|>", "{\"city\": \"Ro", "me\", \"days\": 2}",
                "<|tool_call_end|>", "<|tool_call_be", "gin|>functions.clock:1<|tool_call_arg", "ument_begin|>{\"zone\": ",
                "\"CET\"}<|tool_call_", "end|>", "<|tool_calls_section_end|>"],
    "gemma4": ["Let me look", ".\n", "<|tool_call>", "call:get_wea", "ther{ci", "ty:", "<|\"|>", "Ro", "me<|\"", "|>,da",
               "ys:2}<tool_", "call|><|tool_", "call>call:", "clock{zone:<|", "\"|>CET<|\"|>}", "<tool_call|>"],
}
THOUGHT = ["I should ", "lo", "ok."]
CALLS["qwen3"] = ["<think>", *THOUGHT, "</think>", "\n\n", *CALLS["hermes"]]
CALLS["openai"] = ["{\"city\": \"Ro", "me\", \"days\": 2}", "<|call|>"]
SPECIAL = {"<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|start|>", "<|channel|>", "<|message|>", "<|end|>",
           "<|call|>", "<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>", "<minimax:tool_call>",
           "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
           "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
           "<|tool_calls_section_end|>", "<|tool_call>", "<tool_call|>", "<|\"|>"}
# How templates of the style write a call, by which servers know it.
WRITTEN = {
    "hermes": "'<tool_call>\\n' ~ call.function | tojson ~ '\\n</tool_call>'",
    "llama3_json": "'<|python_tag|>' ~ {'name': call.function.name, 'parameters': call.function.arguments} | tojson",
    "mistral": "'[TOOL_CALLS]' ~ call.function.name ~ '[ARGS]' ~ call.function.arguments | tojson",
    "deepseek_v3": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' ~ call.type ~ '<｜tool▁sep｜>' ~ call.function.name"
                   " ~ '\\n```json\\n' ~ call.function.arguments | tojson"
                   " ~ '\\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'",
    "deepseek_v31": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' ~ call.function.name ~ '<｜tool▁sep｜>'"
                    " ~ call.function.arguments | tojson ~ '<｜tool▁call▁end｜><｜tool▁calls▁end｜>'",
    "kimi_k2": "'<|tool_calls_section_begin|><|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>'"
               " ~ call.function.arguments | tojson ~ '<|tool_call_end|><|tool_calls_section_end|>'",
}
WRITTEN["qwen3"] = WRITTEN["hermes"]
# Of a call with tags for its arguments: what stands before a key, a value, the end.
TAGS = {
    "qwen3_coder": ("<tool_call>\\n<function=", ">", "\\n<parameter=", ">\\n", "\\n</parameter>",
                    "\\n</function>\\n</tool_call>"),
    "glm45": ("<tool_call>", "", "\\n<arg_key>", "</arg_key>\\n<arg_value>", "</arg_value>", "\\n</tool_call>"),
    "minimax_m2": ("<minimax:tool_call>\\n<invoke name=\"", "\">", "\\n<parameter name=\"", "\">", "</parameter>",
                   "\\n</invoke>\\n</minimax:tool_call>"),
    "gemma4": ("<|tool_call>call:", "{", "", ":", ",", "}<tool_call|>"),
}


def written(style: str) -> str:
    """The template of `call`."""
    if style not in TAGS:
        return "{{ " + WRITTEN[style] + " }}"
    begin, name_end, key, value, value_end, end = (f"{{{{ '{tag}' }}}}" for tag in TAGS[style])
    return (begin + "{{ call.function.name }}" + name_end + "{%- for key, value in call.function.arguments | items %}"
            + key + "{{ key }}" + value + "{{ value if value is string else value | tojson }}" + value_end
            + "{%- endfor %}" + end)


STARTS = ["<|talk|>", "<|call|>", "<|answer|>"]
END = "<|end|>"
# What the prompts of style openai end with, and how.
OPENED = {"Hm. ": "<|channel|>analysis<|message|>Hm. ",
          "\n": "<|channel|>commentary to=functions.get_weather json<|message|>\n",
          "So: ": "<|channel|>final<|message|>So: "}
SCRIPTS = {style: (STARTS, (TALK, CALLS[style], ANSWER), END) for style in CALLS}
SCRIPTS["openai"] = (list(OPENED), (
    [*THOUGHT, "<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", *TALK],
    CALLS["openai"], ANSWER), "<|return|>")


def bytes_to_letters() -> dict[int, str]:
    """GPT-2's printable letters for all bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = {}, 0
    for byte in range(256):
        letters[byte] = chr(byte) if byte in kept else chr(256 + extra)
        extra += byte not in kept
    return letters


def harmony_template() -> str:
    thought, call, answer = OPENED.values()
    return (
        "{%- for tool in tools or [] %}{{ tool.function.description ~ ' ' }}{% endfor %}"
        "{%- for message in messages %}<|start|>{{ message.role }}<|message|>"
        "{{ (message.thinking or '') ~ (message.content or '') }}<|end|>{% endfor %}"
        "<|start|>assistant{%- if messages[-1].role == 'tool' %}" + answer
        + "{% elif tools %}" + call.replace("\n", "{{ '\\n' }}")
        + "{% elif not answer %}" + thought + "{% endif %}")


def chat_template(style: str) -> str:
    if style == "openai":
        return harmony_template()
    closed = "<think>\n\n</think>\n\n" if style == "qwen3" else ""
    return (
        "{%- for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
        "{%- for message in messages %}{{ message.role ~ ': ' ~ (message.content or '') ~ '\n' }}"
        "{%- for call in message.tool_calls or [] %}" + written(style) + "{% endfor %}"
        "{%- endfor %}"
        "{%- if messages[-1].role == 'tool' %}" + closed + "<|answer|>"
        "{%- elif tools or think %}<|call|>{% else %}" + closed + "<|talk|>{% endif %}")


def pieces_and_chains(style: str) -> tuple[list[str], list[list[int]]]:
    """Added tokens, and lists of those that follow each other."""
    starts, scripts, end = SCRIPTS[style]
    pieces = [*starts, end]
    chains = []
    for start, texts in zip(starts, scripts, strict=True):
        chain = [pieces.index(start)]
        for text in texts:
            if text not in pieces:
                pieces.append(text)
            chain.append(pieces.index(text))
        chains.append([*chain, pieces.index(end)])
    return pieces, chains


def write_safetensors(path: pathlib.Path, tensors: dict[str, tuple[list[int], bytes]]) -> None:
    header, offset = {}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, data in tensors.values():
            file.write(data)


def main(style: str, directory: str) -> None:
    out = pathlib.Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    pieces, chains = pieces_and_chains(style)
    vocabulary = {letter: byte for byte, letter in bytes_to_letters().items()}
    count = 256 + len(pieces)
    hidden = -(-count // 64) * 64
    rows = {"embed": {}, "head": {}}
    for token in range(count):
        rows["embed"][token] = {token: 1.0}
    successors: dict[int, int] = {}
    for chain in chains:
        for token, follower in itertools.pairwise(chain):
            if successors.setdefault(token, follower) != follower:
                raise SystemExit(f"{pieces[token]!r} would have two successors")
    for token, follower in successors.items():
        rows["head"].setdefault(256 + follower, {})[256 + token] = 20.0

    def matrix(entries: dict[int, dict[int, float]]) -> tuple[list[int], bytes]:
        data = bytearray(count * hidden * 4)
        for row, columns in entries.items():
            for column, value in columns.items():
                struct.pack_into("<f", data, (row * hidden + column) * 4, value)
        return [count, hidden], bytes(data)

    def filled(shape: list[int], value: float) -> tuple[list[int], bytes]:
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        return shape, struct.pack("<f", value) * size

    layer = "model.layers.0."
    write_safetensors(out / "model.safetensors", {
        "model.embed_tokens.weight": matrix(rows["embed"]),
        "lm_head.weight": matrix(rows["head"]),
        "model.norm.weight": filled([hidden], 1),
        layer + "input_layernorm.weight": filled([hidden], 1),
        layer + "post_attention_layernorm.weight": filled([hidden], 1),
        **{f"{layer}self_attn.{name}_proj.weight": filled([hidden, hidden], 0) for name in "qkvo"},
        layer + "mlp.gate_proj.weight": filled([64, hidden], 0),
        layer + "mlp.up_proj.weight": filled([64, hidden], 0),
        layer + "mlp.down_proj.weight": filled([hidden, 64], 0),
    })
    end = SCRIPTS[style][2]
    special = {*STARTS, end, *SPECIAL}
    files = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": count,
            "hidden_size": hidden, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
            "eos_token_id": 256 + pieces.index(end)},
        "tokenizer_config.json": {"eos_token": end, "chat_template": chat_template(style)},
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                              "use_regex": True},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                        "use_regex": True},
            "post_processor": None,
            "added_tokens": [
                {"id": 256 + i, "content": text, "single_word": False, "lstrip": False,
                 "rstrip": False, "normalized": False, "special": text in special}
                for i, text in enumerate(pieces)],
            "model": {"type": "BPE", "dropout": None, "unk_token": None,
                      "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": vocabulary, "merges": []}},
    }
    for name, value in files.items():
        (out / name).write_text(json.dumps(value))


if __name__ == "__main__":
    main(*sys.argv[1:])
