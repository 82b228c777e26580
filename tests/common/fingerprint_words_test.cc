// SPDX-License-Identifier: Apache-2.0
#include "common/fingerprint_words.h"

#include <string>

#include "gtest/gtest.h"

namespace tandem {
namespace {

const std::string kServed = " (is --max-model-len the same on both workers?)";

// As ModelSpec::Canonical() writes them.
std::string Config(const std::string& theta, const std::string& rest) {
  return "LlamaForCausalLM hidden=64 intermediate=128 layers=4 heads=4 "
         "kv_heads=2 head_dim=16 vocab=512 max_positions=2048 norm=rms "
         "eps=1.0000000000000001e-05 act=silu attention_bias=0 mlp_bias=0 "
         "tied=1 rope_theta=" +
         theta + rest;
}

std::string Replaced(std::string text, const std::string& what,
                     const std::string& by) {
  return text.replace(text.find(what), what.size(), by);
}

TEST(FingerprintWords, OnlyWhatDiffersIsShown) {
  struct Row {
    std::string a, b, shown_a, shown_b, hint = "";
  };
  const std::string plain = Config("10000", "");
  const std::string scaled = " rope=linear factor=2";
  const std::string local =
      " window=8 windowed=0101 local_theta=1" + scaled + " parallel=1";
  const std::string flags(60, '0'), long_list(80, '7');
  for (const Row& row : std::initializer_list<Row>{
           {plain, Config("500000", ""), "rope_theta=10000",
            "rope_theta=500000"},
           {plain, Replaced(plain, "Llama", "Mistral"), "LlamaForCausalLM",
            "MistralForCausalLM"},
           {plain, Replaced(plain, "tied=1", "tied=0") + " told=3",
            "tied=1 no told", "tied=0 told=3"},
           {plain, plain + scaled, "no rope no factor", "rope=linear factor=2"},
           // A value of several words.
           {plain + " experts=2 of 8 normalised=1",
            plain + " experts=2 of 16 normalised=1", "experts=2 of 8",
            "experts=2 of 16"},
           // Layers with a window may have a scaling of their own.
           {plain + scaled + local, plain + local, "rope=linear factor=2",
            "nothing more"},
           {plain + scaled + local, plain + " rope=linear factor=4" + local,
            "factor=2", "factor=4"},
           {"x=1 y=2 y=2 z=3", "x=1 z=3 y=2 y=2", "y=2 y=2 z=3", "z=3 y=2 y=2"},
           // One part from where it differs, in a bounded length.
           {plain + " no_rope=" + flags + "1" + long_list,
            plain + " no_rope=" + flags + "0" + long_list,
            "no_rope=...000000001" + std::string(39, '7') + "...",
            "no_rope=...000000000" + std::string(39, '7') + "..."},
           {"x=1 no_rope=" + flags, "x=1 no_rope=" + flags + "0",
            "no_rope=...00000000", "no_rope=...000000000"},
           // What --max-model-len decides.
           {plain + " rope=dynamic factor=2 original=2048 served=4096",
            plain + " rope=dynamic factor=2 original=2048 served=8192",
            "served=4096", "served=8192", kServed},
           {plain + " rope=longrope attention=1 factors=1,1",
            plain + " rope=longrope attention=1 factors=2,3", "factors=1,1",
            "factors=2,3", kServed},
           {plain + " rope=dynamic factor=2 original=2048 served=4096",
            plain + " rope=dynamic factor=4 original=2048 served=8192",
            "factor=2 served=4096", "factor=4 served=8192"},
           {"cuda-3-sm90-bf16 weights=bf16 kv=bf16",
            "cpu-1 weights=bf16 kv=f32", "cuda-3-sm90-bf16 kv=bf16",
            "cpu-1 kv=f32"},
           // No lists.
           {"w", "v2", "w", "v2"},
           {std::string(64, 'a'), std::string(64, 'b'),
            std::string(48, 'a') + "...", std::string(48, 'b') + "..."},
           {std::string(64, 'a') + "b", std::string(64, 'a') + "c",
            "...aaaaaaaab", "...aaaaaaaac"},
           {"", plain, "", plain.substr(0, 48) + "..."},
       }) {
    const FingerprintWords words = DifferingWords(row.a, row.b, 48);
    EXPECT_EQ(words.a, row.shown_a);
    EXPECT_EQ(words.b, row.shown_b);
    EXPECT_EQ(words.hint, row.hint);
    const FingerprintWords other = DifferingWords(row.b, row.a, 48);
    EXPECT_EQ(other.a, words.b);
    EXPECT_EQ(other.b, words.a);
  }
}

TEST(FingerprintWords, WhatAPeerSendsIsBounded) {
  std::string many, strange = "x=1 y=";
  for (int i = 0; i < 1000; ++i) {
    many += "name" + std::to_string(i) + "=1 ";
    strange += "\xe2\x82\xac";
  }
  const std::string named = "x=1 " + std::string(1000, 'n') + "=1";
  const std::string named_so = "x=1 " + std::string(1000, 'n') + "=2";
  for (const std::string& other :
       {std::string("x=1 y=2"), strange + "z", named_so, many + "end=1"}) {
    for (const std::string& value : {many, strange, named}) {
      const FingerprintWords words = DifferingWords(value, other, 48);
      EXPECT_LE(words.a.size(), 203u);
      EXPECT_LE(words.b.size(), 203u);
      if (value != other) {
        EXPECT_NE(words.a, words.b) << words.a;
      }
    }
  }
  // Cut where a character ends.
  EXPECT_EQ(DifferingWords(strange, strange + "z", 48).a,
            "y=...\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac");
}

}  // namespace
}  // namespace tandem
