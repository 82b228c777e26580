# SPDX-License-Identifier: Apache-2.0
"""What models/tales promises and can be told without running it: that it is
small, complete and one whole. Standard library only.
"""

from __future__ import annotations

import array
import json
import math
import pathlib
import re
import sys
import unittest

MODEL = pathlib.Path(__file__).parents[2] / "models" / "tales"
SIZE_LIMIT = 6_000_000  # it is part of every clone


def read(name: str) -> dict:
    return json.loads((MODEL / name).read_text(encoding="utf-8"))


def expected_shapes(config: dict) -> dict[str, list[int]]:
    """Every tensor of a Llama with tied embeddings and no biases."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "model.embed_tokens.weight": [config["vocab_size"], hidden],
        "model.norm.weight": [hidden],
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
            "self_attn.q_proj": [q, hidden],
            "self_attn.k_proj": [kv, hidden],
            "self_attn.v_proj": [kv, hidden],
            "self_attn.o_proj": [hidden, q],
            "mlp.gate_proj": [inner, hidden],
            "mlp.up_proj": [inner, hidden],
            "mlp.down_proj": [hidden, inner],
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return shapes


class Folder(unittest.TestCase):
    def test_is_small_enough_for_every_clone(self) -> None:
        size = sum(p.stat().st_size for p in MODEL.iterdir())
        self.assertLessEqual(size, SIZE_LIMIT)

    def test_holds_what_a_checkpoint_has_and_nothing_else(self) -> None:
        self.assertEqual(
            sorted(p.name for p in MODEL.iterdir()),
            ["README.md", "config.json", "generation_config.json",
             "model.safetensors", "tokenizer.json", "tokenizer_config.json"])


class Config(unittest.TestCase):
    def test_is_a_llama_that_any_reader_of_the_format_takes(self) -> None:
        config = read("config.json")
        self.assertEqual(config["architectures"], ["LlamaForCausalLM"])
        self.assertEqual(config["model_type"], "llama")
        self.assertEqual(config["torch_dtype"], "bfloat16")
        self.assertIs(config["tie_word_embeddings"], True)
        self.assertIs(config["attention_bias"], False)
        self.assertIs(config["mlp_bias"], False)
        heads, kv_heads = (config["num_attention_heads"],
                           config["num_key_value_heads"])
        self.assertEqual(heads * config["head_dim"], config["hidden_size"])
        self.assertEqual(heads % kv_heads, 0)

    def test_has_the_same_special_ids_everywhere(self) -> None:
        config, generation = read("config.json"), read("generation_config.json")
        added = {token["content"]: token["id"]
                 for token in read("tokenizer.json")["added_tokens"]}
        names = read("tokenizer_config.json")
        for kind in ("bos", "eos", "pad"):
            with self.subTest(kind=kind):
                wanted = added[names[f"{kind}_token"]]
                self.assertEqual(config[f"{kind}_token_id"], wanted)
                self.assertEqual(generation[f"{kind}_token_id"], wanted)

    def test_has_the_context_of_the_tokenizer(self) -> None:
        self.assertEqual(read("config.json")["max_position_embeddings"],
                         read("tokenizer_config.json")["model_max_length"])

    def test_has_a_chat_template_for_every_role(self) -> None:
        names = read("tokenizer_config.json")
        added = {token["content"]
                 for token in read("tokenizer.json")["added_tokens"]}
        for role in ("<|system|>", "<|user|>", "<|assistant|>"):
            self.assertIn(role, added)
            self.assertIn(role, names["chat_template"])


class Vocabulary(unittest.TestCase):
    def test_has_each_id_of_the_embedding_once(self) -> None:
        tokenizer = read("tokenizer.json")
        ids = set(tokenizer["model"]["vocab"].values())
        ids |= {token["id"] for token in tokenizer["added_tokens"]}
        self.assertEqual(ids, set(range(read("config.json")["vocab_size"])))


class Weights(unittest.TestCase):
    def setUp(self) -> None:
        self.data = (MODEL / "model.safetensors").read_bytes()
        self.begin = 8 + int.from_bytes(self.data[:8], "little")
        self.header = json.loads(self.data[8 : self.begin])
        self.header.pop("__metadata__")

    def test_are_the_tensors_that_the_config_asks_for(self) -> None:
        self.assertEqual(
            {name: entry["shape"] for name, entry in self.header.items()},
            expected_shapes(read("config.json")))
        self.assertEqual({e["dtype"] for e in self.header.values()}, {"BF16"})

    def test_fill_the_file_without_gap_or_overlap(self) -> None:
        end = 0
        for begin, next_end in sorted(e["data_offsets"]
                                      for e in self.header.values()):
            self.assertEqual(begin, end)
            end = next_end
        for name, entry in self.header.items():
            begin, next_end = entry["data_offsets"]
            self.assertEqual(next_end - begin, 2 * math.prod(entry["shape"]),
                             name)
        self.assertEqual(self.begin + end, len(self.data))

    def test_are_finite_and_not_all_zero(self) -> None:
        for name, entry in self.header.items():
            begin, end = entry["data_offsets"]
            values = array.array("H", self.data[self.begin + begin :
                                                self.begin + end])
            if sys.byteorder == "big":
                values.byteswap()
            with self.subTest(tensor=name):
                self.assertTrue(any(v & 0x7FFF for v in values))
                self.assertFalse(any(v & 0x7F80 == 0x7F80 for v in values))

    def test_are_as_many_as_the_model_card_says(self) -> None:
        card = (MODEL / "README.md").read_text(encoding="utf-8")
        said = re.search(r"of ([0-9][0-9 ]+) parameters", card)
        self.assertIsNotNone(said)
        count = sum(math.prod(e["shape"]) for e in self.header.values())
        self.assertEqual(int(said[1].replace(" ", "")), count)


if __name__ == "__main__":
    unittest.main()
