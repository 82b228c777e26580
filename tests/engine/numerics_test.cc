// SPDX-License-Identifier: Apache-2.0
// The same tokens give the same logits, bit for bit, however they are
// computed: alone or in a batch, in chunks of any size (a chunk of one is a
// decode step), on any number of threads, with either instruction set, in
// blocks of any size, and on a device that finishes late and hides its
// memory.

#include <cmath>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/checkpoint/safetensors.h"
#include "gtest/gtest.h"
#include "kernels/testing/late_backend.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/rig.h"

namespace tandem::engine {
namespace {

using kernels::CpuInputs;
using nlohmann::json;

// Where logits were taken, by position.
using LogitsAt = std::map<int, std::vector<float>>;

// More than one attention segment for the first sequence.
constexpr int kLength = kernels::kAttentionSegment + 37;

// The case's checkpoint, with room for kLength positions.
json Roomy(const std::string& name) {
  json spec = LoadCases()[name];
  if (name == "llama_dynamic_f32") {  // far behind its first positions
    spec["config"]["rope_scaling"]["factor"] = 8;
    return spec;
  }
  spec["config"]["max_position_embeddings"] = 1024;
  if (spec["config"].contains("text_config")) {
    spec["config"]["text_config"]["max_position_embeddings"] = 1024;
  }
  spec["config"]["n_positions"] = 1024;  // GPT-2's, learned
  if (!spec.contains("tensors")) return spec;
  for (json& tensor : spec["tensors"]) {
    if (tensor[0] == "transformer.wpe.weight") tensor[1][0] = 1024;
  }
  return spec;
}

RigOptions Blocks(int block_size) {
  RigOptions options;
  options.executor.max_rows = 2048;
  options.executor.block_size = block_size;
  options.executor.num_blocks = 8192 / block_size;
  return options;
}

// All positions that its blocks have room for are as another tenant may have
// left them, and show if they are read: what NaN goes into comes out as NaN.
void Poison(Rig& rig, const TestSequence& sequence) {
  const kernels::KvShape& shape = rig.executor().kv_shape();
  const int positions =
      static_cast<int>(sequence.blocks.size()) * shape.block_size;
  const int64_t values = int64_t{2} * shape.num_layers * positions *
                         shape.kv_heads * shape.head_dim;
  const std::vector<float> staging(static_cast<size_t>(values), std::nanf(""));
  rig.Scatter(WholePart(sequence, shape, 0, positions), kernels::DType::kF32,
              reinterpret_cast<const std::byte*>(staging.data()));
}

// Logits of the first of `batch` different sequences of different lengths,
// computed together in chunks.
LogitsAt Compute(Rig& rig, const json& spec, int chunk, int batch,
                 bool poisoned = false) {
  std::vector<TestSequence> sequences;
  for (int i = 0; i < batch; ++i) {
    const int length = i == 0 ? kLength : 3 + 29 * i % 150;
    sequences.push_back(rig.NewSequence(PromptIds(spec, length), length));
    if (poisoned) Poison(rig, sequences.back());
  }
  LogitsAt logits;
  TestSequence& first = sequences[0];
  while (first.computed < kLength) {
    std::vector<TestSequence*> running;
    for (TestSequence& sequence : sequences) {
      if (sequence.computed < static_cast<int>(sequence.ids.size())) {
        running.push_back(&sequence);
      }
    }
    // Not always the first row of the step.
    std::swap(running.front(), running[running.size() / 2]);
    const StepOutput output = rig.Advance(running, chunk);
    EXPECT_TRUE(output.status.ok()) << output.status;
    if (!output.status.ok()) return {};
    logits[first.computed - 1] = output.logits[running.size() / 2];
  }
  return logits;
}

void ExpectSameBits(const LogitsAt& reference, const LogitsAt& logits,
                    const std::string& where) {
  ASSERT_FALSE(logits.empty()) << where;
  for (const auto& [position, row] : logits) {
    const std::vector<float>& expected = reference.at(position);
    ASSERT_EQ(row.size(), expected.size());
    ASSERT_EQ(memcmp(row.data(), expected.data(), row.size() * sizeof(float)),
              0)
        << where << ", position " << position;
  }
}

class Numerics : public testing::TestWithParam<std::string> {
 protected:
  Numerics() : spec_(Roomy(GetParam())) { WriteCheckpoint(spec_, dir_); }

  // Every position by a decode step of its own, alone, on one thread.
  LogitsAt Reference(kernels::DType kv_dtype = kernels::DType::kF32) {
    const auto backend = NewCpu(1, "avx2");
    RigOptions options = Blocks(16);
    options.executor.kv_dtype = kv_dtype;
    Rig rig(dir_.path(), backend.get(), options);
    LogitsAt reference = Compute(rig, spec_, 1, 1);
    EXPECT_EQ(reference.size(), kLength);
    return reference;
  }

  TempDir dir_;
  json spec_;
};

TEST_P(Numerics, BatchChunkThreadsAndInstructionSetChangeNoBit) {
  const LogitsAt reference = Reference();
  for (const std::string isa : {"avx2", "avx512"}) {
    if (!HasIsa(isa)) {
      std::printf("this CPU lacks %s: not compared\n", isa.c_str());
      continue;
    }
    for (const int threads : {1, 2}) {
      const auto backend = NewCpu(threads, isa);
      for (const int chunk : {1, 7, 64}) {
        for (const int batch : {1, 3, 8, 32}) {
          Rig rig(dir_.path(), backend.get(), Blocks(16));
          ExpectSameBits(reference, Compute(rig, spec_, chunk, batch),
                         absl::StrCat(isa, ", threads ", threads, ", chunk ",
                                      chunk, ", batch ", batch));
        }
      }
    }
  }
}

TEST_P(Numerics, OneChunkGivesTheBitsOfDecodeSteps) {
  const auto backend = NewCpu(2);
  Rig rig(dir_.path(), backend.get(), Blocks(16));
  ExpectSameBits(Reference(), Compute(rig, spec_, 1024, 1), "one chunk");
}

TEST_P(Numerics, BlockSizeChangesNoBit) {
  const LogitsAt reference = Reference();
  const auto backend = NewCpu(2);
  for (const int block_size : {8, 16, 32}) {
    for (const int chunk : {7, 64}) {
      Rig rig(dir_.path(), backend.get(), Blocks(block_size));
      ExpectSameBits(reference, Compute(rig, spec_, chunk, 3),
                     absl::StrCat("blocks of ", block_size, ", chunk ", chunk));
    }
  }
}

// Nothing of a block is read before it is written anew: whose it was before
// cannot be told, not by the rest of a block that is not full either.
TEST_P(Numerics, WhatBlocksHeldBeforeChangesNoBit) {
  const LogitsAt reference = Reference();
  const auto backend = NewCpu(2);
  for (const auto& [chunk, batch] : {std::pair(1, 1), {7, 3}, {1024, 8}}) {
    Rig rig(dir_.path(), backend.get(), Blocks(16));
    ExpectSameBits(reference, Compute(rig, spec_, chunk, batch, true),
                   absl::StrCat("chunk ", chunk, ", batch ", batch));
  }
}

TEST_P(Numerics, NorDoTheyWithAnotherKvFormat) {
  for (const kernels::DType type :
       {kernels::DType::kBF16, kernels::DType::kFp8, kernels::DType::kInt8,
        kernels::DType::kInt4}) {
    const LogitsAt reference = Reference(type);
    RigOptions options = Blocks(32);
    options.executor.kv_dtype = type;
    const auto backend = NewCpu(2);
    Rig rig(dir_.path(), backend.get(), options);
    ExpectSameBits(reference, Compute(rig, spec_, 64, 8),
                   absl::StrCat("KV in ", std::string(kernels::Name(type))));
  }
}

TEST_P(Numerics, NorWithQuantisedWeights) {
  for (const kernels::DType type :
       {kernels::DType::kFp8, kernels::DType::kInt8, kernels::DType::kInt4,
        kernels::DType::kW8A8}) {
    RigOptions options = Blocks(16);
    options.load.quantisation = type;
    const auto one = NewCpu(1, "avx2");
    Rig alone(dir_.path(), one.get(), options);
    const LogitsAt reference = Compute(alone, spec_, 1, 1);
    ASSERT_EQ(reference.size(), kLength);
    const auto backend = NewCpu(2);
    Rig rig(dir_.path(), backend.get(), options);
    ExpectSameBits(reference, Compute(rig, spec_, 64, 8),
                   absl::StrCat("weights in ", std::string(Name(type))));
  }
}

TEST_P(Numerics, NorWithRoundedInputs) {
  for (const auto& [weights, inputs, expected] :
       {std::tuple(kernels::DType::kBF16, CpuInputs::kBf16, "cpu-3-bf16"),
        {kernels::DType::kFp8, CpuInputs::kBf16, "cpu-3-bf16"},
        {kernels::DType::kBF16, CpuInputs::kBf16Amx, "cpu-3-bf16-amx"},
        {kernels::DType::kFp8, CpuInputs::kBf16Amx, "cpu-3-bf16-amx"}}) {
    RigOptions options = Blocks(16);
    options.load.weight_dtype = kernels::DType::kBF16;
    if (weights == kernels::DType::kFp8) options.load.quantisation = weights;
    const auto one = NewCpu(1, "avx2", inputs);
    EXPECT_EQ(one->numerics(), expected);
    Rig alone(dir_.path(), one.get(), options);
    const LogitsAt reference = Compute(alone, spec_, 1, 1);
    ASSERT_EQ(reference.size(), kLength);
    for (const std::string isa : {"avx2", "avx512", "auto"}) {
      if (!HasIsa(isa)) continue;
      const auto backend = NewCpu(2, isa, inputs);
      for (const auto& [chunk, batch] : {std::pair(7, 3), {64, 8}, {1024, 1}}) {
        Rig rig(dir_.path(), backend.get(), options);
        ExpectSameBits(
            reference, Compute(rig, spec_, chunk, batch),
            absl::StrCat("weights in ", std::string(Name(weights)), ", ",
                         expected, ", ", isa, ", chunk ", chunk));
      }
    }
  }
}

TEST_P(Numerics, ALateDeviceWithHiddenMemoryGivesTheSameBits) {
  const LogitsAt reference = Reference();
  auto backend = kernels::testing::NewLateBackend(
      {.cpu = {.threads = 2}, .seed = 3, .max_delay_microseconds = 200});
  ASSERT_TRUE(backend.ok()) << backend.status();
  Rig rig(dir_.path(), backend->get(), Blocks(16));
  ExpectSameBits(reference, Compute(rig, spec_, 64, 3), "late, chunk 64");
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, Numerics,
                         testing::Values("llama3_scaled_bf16",
                                         "llama_biases_f32"),
                         [](const auto& test) { return test.param; });

// What other families compute: the same in fewer ways.
using OtherFamilies = Numerics;

TEST_P(OtherFamilies, WhatBlocksHeldBeforeChangesNoBit) {
  const auto backend = NewCpu(2);
  Rig rig(dir_.path(), backend.get(), Blocks(16));
  ExpectSameBits(Reference(), Compute(rig, spec_, 7, 3, true), "poisoned");
}

TEST_P(OtherFamilies, ChunksBatchAndBlocksChangeNoBit) {
  for (const kernels::DType type :
       {kernels::DType::kF32, kernels::DType::kBF16}) {
    const LogitsAt reference = Reference(type);
    for (const auto& [chunk, batch, block] :
         {std::tuple(7, 3, 8), std::tuple(1024, 8, 16)}) {
      RigOptions options = Blocks(block);
      options.executor.kv_dtype = type;
      const auto backend = NewCpu(2);
      Rig rig(dir_.path(), backend.get(), options);
      ExpectSameBits(reference, Compute(rig, spec_, chunk, batch),
                     absl::StrCat("chunk ", chunk, ", batch ", batch));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Checkpoints, OtherFamilies,
    testing::Values("mistral_window_f32", "phi3_short_f32", "phi3_long_f32",
                    "phi4_mini_f32", "gemma2_f32", "gemma3_f32", "gemma4_f32",
                    "gemma4_moe_f32", "gemma4_few_f32", "gemma4_whole_bf16",
                    "gpt2_f32", "gpt_neox_f32", "nemotron_f32", "mixtral_f32",
                    "qwen2_window_f32", "qwen3_f32", "qwen3_moe_f32",
                    "starcoder2_f32", "smollm3_f32", "glm4_f32", "glm4_moe_f32",
                    "cohere2_f32", "phi2_f32", "exaone4_f32",
                    "cohere_norms_f32", "hunyuan_dense_f32", "qwen2_moe_f32",
                    "minimax_m2_f32", "olmo2_f32", "olmo3_f32", "gpt_oss_f32",
                    "ministral3_whole_f32", "llama_dynamic_f32",
                    "llama_yarn_f32", "llama_long_f32", "deepseek_v2_f32",
                    "deepseek_v3_f32"),
    [](const auto& test) { return test.param; });

}  // namespace
}  // namespace tandem::engine
