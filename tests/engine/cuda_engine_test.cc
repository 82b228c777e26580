// SPDX-License-Identifier: Apache-2.0
// The engine over the CUDA backend, with its kernels on the grid emulator or on
// a GPU (test_device.h): the bits of the CPU in f32; in bf16 and f16 the same
// bits whatever the chunks and the batch; and KV that a CPU can take over.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cuda/testing/host_device.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/mxfp4_maker.h"
#include "tests/engine/notification.h"
#include "tests/engine/rig.h"
#include "tests/engine/test_device.h"
#include "tests/sanitized.h"

namespace tandem::engine {
namespace {

using kernels::DType;

const int kLength = TestsRunOnGpu() ? 200 : 21;

RigOptions CudaRigOptions(DType type) {
  RigOptions options;
  options.load.weight_dtype = type;
  options.executor.max_rows = TestsRunOnGpu() ? 4096 : 128;
  options.executor.max_sequences = TestsRunOnGpu() ? 256 : 4;
  options.executor.num_blocks = TestsRunOnGpu() ? 4096 : 64;
  options.executor.kv_dtype = type;
  return options;
}

struct TinyCheckpoint {
  explicit TinyCheckpoint(const std::string& name) : spec(LoadCases()[name]) {
    WriteCheckpoint(spec, dir);
  }
  nlohmann::json spec;
  TempDir dir;
};

// The last logits of the first sequence, computed in chunks beside others.
std::vector<float> LastLogits(Rig& rig, const nlohmann::json& spec, int chunk,
                              int batch) {
  std::vector<TestSequence> sequences;
  for (int i = 0; i < batch; ++i) {
    const int length = i == 0 ? kLength : 5 + 11 * (i % 17);
    sequences.push_back(rig.NewSequence(PromptIds(spec, length), length));
  }
  std::vector<float> logits;
  while (sequences[0].computed < kLength) {
    std::vector<TestSequence*> running;
    for (TestSequence& sequence : sequences) {
      if (sequence.computed < static_cast<int>(sequence.ids.size())) {
        running.insert(running.begin(), &sequence);
      }
    }
    StepOutput output = rig.Advance(running, chunk);
    EXPECT_TRUE(output.status.ok()) << output.status;
    if (!output.status.ok()) return {};
    logits = output.logits.back();
  }
  return logits;
}

// The checkpoint's logits on a CPU, and on the GPU.
std::pair<std::vector<float>, std::vector<float>> OnBoth(
    const TempDir& dir, const nlohmann::json& spec, const RigOptions& options) {
  const auto cpu = NewCpu(1);
  const auto cuda = NewTestDevice(DType::kF32);
  Rig expected_rig(dir.path(), cpu.get(), options);
  Rig rig(dir.path(), cuda.get(), options);
  return {LastLogits(expected_rig, spec, 16, 1), LastLogits(rig, spec, 16, 1)};
}

void ExpectTheCpusBits(const TempDir& dir, const nlohmann::json& spec,
                       const RigOptions& options) {
  const auto [expected, logits] = OnBoth(dir, spec, options);
  ASSERT_EQ(logits.size(), expected.size());
  EXPECT_EQ(
      memcmp(logits.data(), expected.data(), logits.size() * sizeof(float)), 0);
}

// What is offloaded and restored, into other blocks, is the same KV.
TEST(CudaEngine, SavedBlocksComeBackElsewhere) {
  for (const DType kv : {DType::kBF16, DType::kFp8, DType::kInt4}) {
    SCOPED_TRACE(kernels::Name(kv));
    const TinyCheckpoint checkpoint("llama_biases_f32");
    const auto cuda = NewTestDevice(DType::kBF16);
    RigOptions options = CudaRigOptions(DType::kBF16);
    options.executor.kv_dtype = kv;
    Rig rig(checkpoint.dir.path(), cuda.get(), options);
    TestSequence source =
        rig.NewSequence(PromptIds(checkpoint.spec, kLength), kLength);
    TestSequence* one = &source;
    ASSERT_TRUE(rig.Advance({&one, 1}, kLength - 1).status.ok());
    const auto bytes = static_cast<size_t>(rig.executor().block_bytes());
    auto memory = cuda->AllocateHost(source.blocks.size() * bytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    TestSequence target = rig.NewSequence(source.ids, kLength);
    target.computed = source.computed;
    Notification done;
    rig.loop().RunSync([&] {
      for (size_t i = 0; i < source.blocks.size(); ++i) {
        std::byte* const at = (*memory)->data() + i * bytes;
        rig.executor().SaveBlock(source.blocks[i], at, [] {});
        const bool last = i + 1 == source.blocks.size();
        rig.executor().RestoreBlock(target.blocks[i], at, [&done, last] {
          if (last) done.Notify();
        });
      }
    });
    done.WaitForNotification();
    const StepOutput expected = rig.Advance({&one, 1}, 1);
    one = &target;
    EXPECT_EQ(rig.Advance({&one, 1}, 1).logits, expected.logits);
  }
}

TEST(CudaEngine, GivesTheCpusBitsInF32) {
  for (const char* name : {"llama_biases_f32",
                           "mistral_wide_head_f32",
                           "mistral_window_f32",
                           "llama_linear_f32",
                           "llama_dynamic_f32",
                           "llama_yarn_f32",
                           "llama_long_f32",
                           "qwen2_window_f32",
                           "qwen3_f32",
                           "phi3_short_f32",
                           "phi3_long_f32",
                           "phi4_mini_f32",
                           "gemma2_f32",
                           "gemma3_f32",
                           "gemma4_f32",
                           "gemma4_moe_f32",
                           "gemma4_few_f32",
                           "gpt2_f32",
                           "mixtral_f32",
                           "qwen3_moe_f32",
                           "starcoder2_f32",
                           "smollm3_f32",
                           "glm4_f32",
                           "glm4_moe_f32",
                           "deepseek_v2_f32",
                           "deepseek_v3_f32",
                           "glm4_moe_lite_f32",
                           "minicpm3_f32",
                           "qwen2_moe_f32",
                           "qwen3_moe_dense_f32",
                           "minimax_m2_f32",
                           "ernie4_5_moe_f32",
                           "cohere2_f32",
                           "phi2_f32",
                           "gpt_neox_f32",
                           "falcon_new_f32",
                           "nemotron_f32",
                           "stablelm_parallel_f32",
                           "cohere_norms_f32",
                           "stablelm_norms_f32",
                           "hunyuan_dense_f32",
                           "hunyuan_moe_f32",
                           "olmo_f32",
                           "olmo2_f32",
                           "olmoe_f32",
                           "granitemoe_f32",
                           "granitemoe_shared_f32",
                           "exaone4_f32",
                           "gpt_oss_f32",
                           "qwen3_vl_moe_f32",
                           "ministral3_whole_f32"}) {
    if (kSanitized && name[0] != 'l' && name[0] != 'g') continue;
    SCOPED_TRACE(name);
    const TinyCheckpoint checkpoint(name);
    RigOptions options = CudaRigOptions(DType::kF32);
    options.load.max_positions = checkpoint.spec.value("served", 0);
    ExpectTheCpusBits(checkpoint.dir, checkpoint.spec, options);
  }
}

TEST(CudaEngine, GivesTheCpusBitsInF32WithQuantisedKvAndWeights) {
  const TinyCheckpoint checkpoint("llama_biases_f32");
  for (const DType kv : {DType::kFp8, DType::kInt4}) {
    SCOPED_TRACE(kernels::Name(kv));
    RigOptions options = CudaRigOptions(DType::kF32);
    options.executor.kv_dtype = kv;
    if (kv == DType::kFp8) options.load.quantisation = kv;
    ExpectTheCpusBits(checkpoint.dir, checkpoint.spec, options);
  }
}

// A CPU rounds queries and weights over an int8 cache to 16 bits.
TEST(CudaEngine, IsCloseToTheCpuInF32WithInt8Kv) {
  const TinyCheckpoint checkpoint("llama_biases_f32");
  RigOptions options = CudaRigOptions(DType::kF32);
  options.executor.kv_dtype = DType::kInt8;
  const auto [expected, logits] =
      OnBoth(checkpoint.dir, checkpoint.spec, options);
  ASSERT_EQ(logits.size(), expected.size());
  float most = 0, difference = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    most = std::max(most, std::fabs(expected[i]));
    difference = std::max(difference, std::fabs(logits[i] - expected[i]));
  }
  EXPECT_LE(difference, 2e-3f * most);
}

TEST(CudaEngine, GivesTheCpusBitsInF32WithIntegerProducts) {
  for (const char* name : {"llama_biases_f32", "mixtral_f32"}) {
    const TinyCheckpoint checkpoint(name);
    for (const DType weights : {DType::kInt8, DType::kInt4, DType::kW8A8}) {
      SCOPED_TRACE(
          absl::StrCat(name, " ", std::string(kernels::Name(weights))));
      RigOptions options = CudaRigOptions(DType::kF32);
      options.load.quantisation = weights;
      ExpectTheCpusBits(checkpoint.dir, checkpoint.spec, options);
    }
  }
}

// Of experts each may have its own order.
TEST(CudaEngine, GivesTheCpusBitsInF32WithInputsInAnOrder) {
  for (const char* name : {"llama2_mha_f32", "mixtral_f32"}) {
    const nlohmann::json spec = LoadCases()[name];
    for (const char* form : {"gptq_act_order", "gptq_orders_apart"}) {
      SCOPED_TRACE(absl::StrCat(name, " ", form));
      const TempDir dir;
      WriteCoded(spec, CodedForms().at(form), dir, nullptr);
      ExpectTheCpusBits(dir, spec, CudaRigOptions(DType::kF32));
    }
  }
}

TEST(CudaEngine, GivesTheCpusBitsInF32WithExpertsInMxfp4) {
  const nlohmann::json spec = LoadCases()["gpt_oss_f32"];
  const TempDir dir;
  WriteMxfp4(spec, 5, dir, nullptr);
  ExpectTheCpusBits(dir, spec, CudaRigOptions(DType::kF32));
}

// Of three sequences, of which the first and the last have the adapter; each
// alone or all together.
std::vector<std::vector<float>> AdaptedLogits(kernels::Backend* backend,
                                              const std::string& name,
                                              DType type, bool together) {
  const nlohmann::json adapter = ReadGolden("adapters.json")[name];
  const TinyCheckpoint checkpoint(adapter["base"].get<std::string>());
  const TempDir lora;
  WriteAdapter(adapter, lora);
  RigOptions options = CudaRigOptions(type);
  options.load.max_positions = checkpoint.spec.value("served", 0);
  options.adapters = {lora.path()};
  Rig rig(checkpoint.dir.path(), backend, options);
  std::vector<TestSequence> sequences;
  for (int i = 0; i < 3; ++i) {
    sequences.push_back(
        rig.NewSequence(PromptIds(checkpoint.spec, 5 + 2 * i), 16));
    sequences.back().adapter = i == 1 ? -1 : 0;
  }
  std::vector<TestSequence*> running;
  std::vector<std::vector<float>> logits;
  for (TestSequence& sequence : sequences) {
    running.push_back(&sequence);
    if (together && running.size() < sequences.size()) continue;
    const StepOutput output = rig.Advance(running, 16);
    EXPECT_TRUE(output.status.ok()) << output.status;
    logits.insert(logits.end(), output.logits.begin(), output.logits.end());
    running.clear();
  }
  return logits;
}

TEST(CudaEngine, AdaptersGiveTheCpusBitsInF32) {
  for (const char* name : {"llama_all", "phi3_fused", "gpt2_all"}) {
    SCOPED_TRACE(name);
    const auto cpu = NewCpu(1);
    const auto cuda = NewTestDevice(DType::kF32);
    EXPECT_EQ(AdaptedLogits(cuda.get(), name, DType::kF32, true),
              AdaptedLogits(cpu.get(), name, DType::kF32, false));
  }
}

TEST(CudaEngine, AdaptersInABatchChangeNoBit) {
  for (const char* name : {"llama_patterns", "llama_all"}) {
    SCOPED_TRACE(name);
    const auto cuda = NewTestDevice(DType::kBF16);
    EXPECT_EQ(AdaptedLogits(cuda.get(), name, DType::kBF16, true),
              AdaptedLogits(cuda.get(), name, DType::kBF16, false));
  }
}

TEST(CudaEngine, ChunksAndBatchChangeNoBit) {
  const struct {
    const char* name;
    DType type;
    DType kv;
    std::optional<DType> weights = std::nullopt;
  } cases[] = {{"llama3_scaled_bf16", DType::kBF16, DType::kBF16},
               {"llama3_scaled_bf16", DType::kBF16, DType::kFp8, DType::kFp8},
               {"llama_f16", DType::kF16, DType::kF16},
               {"llama_f16", DType::kF16, DType::kInt8, DType::kInt8},
               {"llama3_scaled_bf16", DType::kBF16, DType::kInt4, DType::kInt4},
               {"gemma2_f32", DType::kBF16, DType::kBF16},
               {"gemma3_f32", DType::kBF16, DType::kInt8},
               {"gemma4_f32", DType::kBF16, DType::kInt4},
               {"gemma4_few_f32", DType::kF16, DType::kInt8, DType::kInt8},
               {"gpt2_f32", DType::kF16, DType::kF16},
               {"mixtral_f32", DType::kF16, DType::kF16},
               {"qwen3_moe_f32", DType::kBF16, DType::kBF16, DType::kFp8},
               {"mixtral_f32", DType::kBF16, DType::kBF16, DType::kInt8},
               {"llama3_scaled_bf16", DType::kBF16, DType::kBF16, DType::kW8A8},
               {"mixtral_f32", DType::kF16, DType::kInt8, DType::kW8A8},
               {"gpt_oss_f32", DType::kBF16, DType::kBF16},
               {"gpt_oss_f32", DType::kF16, DType::kInt8, DType::kInt8}};
  for (const auto& c : cases) {
    if (kSanitized && c.name[0] != 'l') continue;
    SCOPED_TRACE(c.name);
    const TinyCheckpoint checkpoint(c.name);
    const auto cuda = NewTestDevice(c.type);
    RigOptions options = CudaRigOptions(c.type);
    options.executor.kv_dtype = c.kv;
    options.load.quantisation = c.weights;
    Rig alone(checkpoint.dir.path(), cuda.get(), options);
    // Every position by a decode step.
    const auto expected = LastLogits(alone, checkpoint.spec, 1, 1);
    ASSERT_FALSE(expected.empty());
    using Way = std::pair<int, int>;
    const auto ways =
        TestsRunOnGpu() ? std::vector<Way>{{kLength, 1}, {kLength, 8}, {37, 64},
                                           {16, 256},    {1, 256},     {1, 8}}
                        : std::vector<Way>{{kLength, 1}, {8, 3}};
    for (const auto& [chunk, batch] : ways) {
      Rig rig(checkpoint.dir.path(), cuda.get(), options);
      const auto logits = LastLogits(rig, checkpoint.spec, chunk, batch);
      ASSERT_EQ(logits.size(), expected.size());
      EXPECT_EQ(
          memcmp(logits.data(), expected.data(), logits.size() * sizeof(float)),
          0)
          << "chunks of " << chunk << ", batch " << batch;
    }
  }
}

// What a sender gathers in the receiver's format is what the receiver then
// says that it holds.
TEST(CudaEngine, APeerGetsItsOwnKvFormat) {
  const TinyCheckpoint checkpoint("llama3_scaled_bf16");
  const auto cuda = NewTestDevice(DType::kBF16);
  const auto cpu = NewCpu(1);
  const auto ids = PromptIds(checkpoint.spec, kLength);
  const struct {
    kernels::Backend* from;
    DType from_kv;
    kernels::Backend* to;
    DType to_kv;
  } pairs[] = {{cuda.get(), DType::kBF16, cpu.get(), DType::kF32},
               {cuda.get(), DType::kBF16, cuda.get(), DType::kFp8},
               {cuda.get(), DType::kFp8, cuda.get(), DType::kBF16},
               {cuda.get(), DType::kInt8, cpu.get(), DType::kInt8},
               {cpu.get(), DType::kF32, cuda.get(), DType::kFp8},
               {cpu.get(), DType::kFp8, cuda.get(), DType::kInt8},
               {cuda.get(), DType::kBF16, cpu.get(), DType::kInt4},
               {cpu.get(), DType::kInt4, cuda.get(), DType::kInt4},
               {cpu.get(), DType::kInt8, cuda.get(), DType::kInt4},
               {cuda.get(), DType::kInt4, cuda.get(), DType::kBF16}};
  for (const auto& pair : pairs) {
    RigOptions options = CudaRigOptions(DType::kBF16);
    options.executor.kv_dtype = pair.from_kv;
    Rig from(checkpoint.dir.path(), pair.from, options);
    options.executor.kv_dtype = pair.to_kv;
    Rig to(checkpoint.dir.path(), pair.to, options);
    TestSequence sent = from.NewSequence(ids, kLength);
    TestSequence landed = to.NewSequence(ids, kLength);
    TestSequence* const one[] = {&sent};
    ASSERT_TRUE(from.Advance(one, kLength).status.ok());
    const kernels::KvShape& shape = to.executor().kv_shape();
    std::vector<std::byte> slab(static_cast<size_t>(
        int64_t{kLength} * shape.num_layers *
        KvRowBytes(pair.to_kv, shape.kv_heads, shape.head_dim)));
    const auto digest =
        from.Gather(WholePart(sent, from.executor().kv_shape(), 0, kLength),
                    pair.to_kv, slab.data());
    const KvPart there = WholePart(landed, shape, 0, kLength);
    to.Scatter(there, pair.to_kv, slab.data());
    EXPECT_EQ(digest, to.Digest(there, pair.to_kv))
        << kernels::Name(pair.from_kv) << " to " << kernels::Name(pair.to_kv);
  }
}

TEST(CudaEngine, ACpuTakesItsKvOver) {
  const TinyCheckpoint checkpoint("llama3_scaled_bf16");
  const auto cuda = NewTestDevice(DType::kBF16);
  const auto cpu = NewCpu(1);
  Rig from(checkpoint.dir.path(), cuda.get(), CudaRigOptions(DType::kBF16));
  Rig to(checkpoint.dir.path(), cpu.get(), CudaRigOptions(DType::kBF16));
  const auto ids = PromptIds(checkpoint.spec, kLength);
  TestSequence sent = from.NewSequence(ids, kLength);
  TestSequence landed = to.NewSequence(ids, kLength);
  TestSequence* const one[] = {&sent};
  ASSERT_TRUE(from.Advance(one, kLength).status.ok());
  const KvPart part = WholePart(sent, from.executor().kv_shape(), 0, kLength);
  // Memory that kernels do not reach: the backend goes through its own.
  std::vector<std::byte> slab(kLength *
                              from.executor().kv_shape().bytes_per_position());
  const auto digest = from.Gather(part, DType::kBF16, slab.data());
  EXPECT_EQ(digest, from.Digest(part, DType::kBF16));
  const KvPart there = WholePart(landed, to.executor().kv_shape(), 0, kLength);
  to.Scatter(there, DType::kBF16, slab.data());
  EXPECT_EQ(digest, to.Digest(there, DType::kBF16));
  // And back, into other blocks.
  TestSequence back = from.NewSequence(ids, kLength);
  const KvPart again = WholePart(back, from.executor().kv_shape(), 0, kLength);
  EXPECT_NE(digest, from.Digest(again, DType::kBF16));
  from.Scatter(again, DType::kBF16, slab.data());
  EXPECT_EQ(digest, from.Digest(again, DType::kBF16));
}

// Decodes of 3 and 4 sequences that draw in different ways, one of them with
// banned ids; then all that is in the cache.
struct Decoded {
  std::vector<std::vector<float>> logits;
  std::vector<int32_t> tokens;
  std::vector<kernels::KvDigest> blocks;
};

Decoded DecodeSome(Rig& rig, const nlohmann::json& spec, DType type) {
  Decoded decoded;
  std::vector<TestSequence> all;
  for (int i = 0; i < 4; ++i) {
    all.push_back(rig.NewSequence(PromptIds(spec, 2 + 3 * i), 32));
    all[static_cast<size_t>(i)].sampling.temperature = i == 1 ? 0.7f : 0.0f;
    all[static_cast<size_t>(i)].sampling.seed = static_cast<uint64_t>(i);
    all[static_cast<size_t>(i)].sampling.logprobs = i == 2 ? 3 : -1;
  }
  const auto advance = [&](std::vector<TestSequence*> some, int count) {
    const StepOutput output = rig.Advance(some, count);
    EXPECT_TRUE(output.status.ok()) << output.status;
    for (size_t i = 0; i < some.size() && output.status.ok(); ++i) {
      some[i]->ids.push_back(output.tokens[i].token_id);
      decoded.tokens.push_back(output.tokens[i].token_id);
      for (const TopLogprob& top : output.tokens[i].top) {
        decoded.tokens.push_back(top.token_id);
      }
      decoded.logits.push_back(output.logits[i]);
    }
  };
  advance({&all[0], &all[1], &all[2], &all[3]}, 32);
  advance({&all[0], &all[1], &all[2]}, 1);
  advance({&all[2], &all[0], &all[1]}, 1);
  all[1].edits = {Ban(all[1].ids.back())};
  advance({&all[0], &all[1], &all[2]}, 1);
  all[1].edits.clear();
  advance({&all[3], &all[2], &all[1], &all[0]}, 1);
  advance({&all[2], &all[3], &all[0]}, 1);
  for (int32_t block = 0; block < rig.executor().kv_shape().num_blocks;
       ++block) {
    TestSequence one;
    one.blocks = {block};
    decoded.blocks.push_back(
        rig.Digest(WholePart(one, rig.executor().kv_shape(), 0, 16), type));
  }
  return decoded;
}

TEST(CudaEngine, RecordedDecodesChangeNoBit) {
  for (const DType type : {DType::kBF16, DType::kF32}) {
    const TinyCheckpoint checkpoint(type == DType::kBF16 ? "llama3_scaled_bf16"
                                                         : "llama_biases_f32");
    const auto cuda = NewTestDevice(type);
    RigOptions options = CudaRigOptions(type);
    options.executor.num_blocks = 16;
    Rig plain(checkpoint.dir.path(), cuda.get(), options);
    const Decoded expected = DecodeSome(plain, checkpoint.spec, type);
    Rig rig(checkpoint.dir.path(), cuda.get(), options);
    std::vector<int> progress;
    rig.loop().RunSync([&] {
      const absl::Status status = rig.executor().RecordDecodes(
          [&](int done, int total) { progress.push_back(done * 10 + total); });
      EXPECT_TRUE(status.ok()) << status;
    });
    if (!TestsRunOnGpu()) {
      EXPECT_EQ(progress, (std::vector<int>{13, 23, 33}));
    }
    const Decoded got = DecodeSome(rig, checkpoint.spec, type);
    EXPECT_EQ(got.tokens, expected.tokens);
    EXPECT_EQ(got.logits, expected.logits);
    // Rows that fill a step up are written nowhere.
    EXPECT_EQ(got.blocks, expected.blocks);
  }
}

TEST(CudaEngine, DecodesGoOnWhereNothingCanBeRecorded) {
  const TinyCheckpoint checkpoint("llama_biases_f32");
  const auto cpu = NewCpu(1);
  RigOptions options = CudaRigOptions(DType::kF32);
  options.executor.num_blocks = 16;
  Rig rig(checkpoint.dir.path(), cpu.get(), options);
  const Decoded expected = DecodeSome(rig, checkpoint.spec, DType::kF32);
  const auto refuses = kernels::cuda::testing::NewEmulatedBackend(
      {.activation = DType::kF32}, {.most_captures = 0});
  ASSERT_TRUE(refuses.ok());
  // The sizes that it has recorded are forgotten with the third.
  const auto gives_up = kernels::cuda::testing::NewEmulatedBackend(
      {.activation = DType::kF32}, {.most_captures = 2});
  ASSERT_TRUE(gives_up.ok());
  for (kernels::Backend* backend :
       {cpu.get(), refuses->get(), gives_up->get()}) {
    Rig again(checkpoint.dir.path(), backend, options);
    again.loop().RunSync([&] {
      EXPECT_EQ(again.executor().RecordDecodes([](int, int) {}).code(),
                backend == cpu.get() ? absl::StatusCode::kUnimplemented
                                     : absl::StatusCode::kInternal);
    });
    const Decoded got = DecodeSome(again, checkpoint.spec, DType::kF32);
    EXPECT_EQ(got.tokens, expected.tokens);
    EXPECT_EQ(got.logits, expected.logits);
    EXPECT_EQ(got.blocks, expected.blocks);
  }
}

TEST(CudaEngine, DecodeSizesAreFewAndReachTheLimit) {
  EXPECT_EQ(DeviceExecutor::DecodeSizes(1), std::vector<int>{1});
  EXPECT_EQ(DeviceExecutor::DecodeSizes(20),
            (std::vector<int>{1, 2, 4, 8, 16, 20}));
  EXPECT_EQ(DeviceExecutor::DecodeSizes(256).size(), 35u);
  EXPECT_EQ(DeviceExecutor::DecodeBounds(2048), std::vector<int>{2048});
  EXPECT_EQ(DeviceExecutor::DecodeBounds(131072),
            (std::vector<int>{2048, 8192, 32768, 131072}));
}

TEST(CudaEngine, RefusesTypesThatItHasNoKernelsFor) {
  const auto cuda = NewTestDevice(DType::kBF16);
  kernels::KvShape shape{1, 1, 64, 16, 4, DType::kF32};
  EXPECT_EQ(cuda->NewKvCache(shape).status().code(),
            absl::StatusCode::kInvalidArgument);
  const float value = 1;
  EXPECT_EQ(cuda->PackMatrix({reinterpret_cast<const std::byte*>(&value),
                              DType::kF32, 1, 1},
                             DType::kF32)
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
  // Experts of one layer are multiplied at once.
  const std::vector<float> values(64 * 64, 0.5f);
  std::vector<std::unique_ptr<kernels::Matrix>> matrices;
  for (const DType type : {DType::kBF16, DType::kInt8}) {
    const kernels::HostTensor source{
        reinterpret_cast<const std::byte*>(values.data()), DType::kF32, 64, 64};
    matrices.push_back(*cuda->PackGatedMatrix(source, DType::kBF16));
    matrices.push_back(
        *cuda->PackMatrix({source.data, DType::kF32, 64, 32}, type));
  }
  const auto unlike =
      cuda->GroupExperts({{matrices[0].get(), matrices[1].get()},
                          {matrices[2].get(), matrices[3].get()}});
  EXPECT_EQ(unlike.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(unlike.status().message().find("expert 1"), std::string::npos);
  EXPECT_TRUE(cuda->GroupExperts({{matrices[0].get(), matrices[1].get()},
                                  {matrices[2].get(), matrices[1].get()}})
                  .ok());
  const auto all = cuda->memory();
  EXPECT_EQ(cuda->Allocate(all.free_bytes + 1).status().code(),
            absl::StatusCode::kResourceExhausted);
  const auto buffer = cuda->Allocate(4096);
  EXPECT_EQ(cuda->memory().used_bytes, all.used_bytes + 4096);
}

}  // namespace
}  // namespace tandem::engine
