// SPDX-License-Identifier: Apache-2.0
// The engine over the CUDA backend, with its kernels on the grid emulator or on
// a GPU (test_device.h): the bits of the CPU in f32; in bf16 and f16 the same
// bits whatever the chunks and the batch; and KV that a CPU can take over.

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/rig.h"
#include "tests/engine/test_device.h"

namespace tandem::engine {
namespace {

using kernels::DType;

const int kLength = TestsRunOnGpu() ? 200 : 21;

RigOptions Options(DType type) {
  RigOptions options;
  options.load.weight_dtype = type;
  options.executor.max_rows = TestsRunOnGpu() ? 4096 : 128;
  options.executor.max_sequences = TestsRunOnGpu() ? 256 : 4;
  options.executor.num_blocks = TestsRunOnGpu() ? 4096 : 64;
  options.executor.kv_dtype = type;
  return options;
}

struct Checkpoint {
  explicit Checkpoint(const std::string& name) : spec(LoadCases()[name]) {
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

TEST(CudaEngine, GivesTheCpusBitsInF32) {
  for (const char* name : {"llama_biases_f32", "mistral_wide_head_f32"}) {
    SCOPED_TRACE(name);
    const Checkpoint checkpoint(name);
    const auto cpu = NewCpu(1);
    const auto cuda = NewTestDevice(DType::kF32);
    Rig expected_rig(checkpoint.dir.path(), cpu.get(), Options(DType::kF32));
    Rig rig(checkpoint.dir.path(), cuda.get(), Options(DType::kF32));
    const auto expected = LastLogits(expected_rig, checkpoint.spec, 16, 1);
    const auto logits = LastLogits(rig, checkpoint.spec, 16, 1);
    ASSERT_EQ(logits.size(), expected.size());
    EXPECT_EQ(
        memcmp(logits.data(), expected.data(), logits.size() * sizeof(float)),
        0);
  }
}

TEST(CudaEngine, ChunksAndBatchChangeNoBit) {
  const struct {
    const char* name;
    DType type;
  } cases[] = {{"llama3_scaled_bf16", DType::kBF16},
               {"llama_f16", DType::kF16}};
  for (const auto& [name, type] : cases) {
    SCOPED_TRACE(name);
    const Checkpoint checkpoint(name);
    const auto cuda = NewTestDevice(type);
    Rig alone(checkpoint.dir.path(), cuda.get(), Options(type));
    // Every position by a decode step.
    const auto expected = LastLogits(alone, checkpoint.spec, 1, 1);
    ASSERT_FALSE(expected.empty());
    using Way = std::pair<int, int>;
    const auto ways =
        TestsRunOnGpu() ? std::vector<Way>{{kLength, 1}, {kLength, 8}, {37, 64},
                                           {16, 256},    {1, 256},     {1, 8}}
                        : std::vector<Way>{{kLength, 1}, {8, 3}};
    for (const auto& [chunk, batch] : ways) {
      Rig rig(checkpoint.dir.path(), cuda.get(), Options(type));
      const auto logits = LastLogits(rig, checkpoint.spec, chunk, batch);
      ASSERT_EQ(logits.size(), expected.size());
      EXPECT_EQ(
          memcmp(logits.data(), expected.data(), logits.size() * sizeof(float)),
          0)
          << "chunks of " << chunk << ", batch " << batch;
    }
  }
}

TEST(CudaEngine, ACpuTakesItsKvOver) {
  const Checkpoint checkpoint("llama3_scaled_bf16");
  const auto cuda = NewTestDevice(DType::kBF16);
  const auto cpu = NewCpu(1);
  Rig from(checkpoint.dir.path(), cuda.get(), Options(DType::kBF16));
  Rig to(checkpoint.dir.path(), cpu.get(), Options(DType::kBF16));
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
  const auto all = cuda->memory();
  EXPECT_EQ(cuda->Allocate(all.free_bytes + 1).status().code(),
            absl::StatusCode::kResourceExhausted);
  const auto buffer = cuda->Allocate(4096);
  EXPECT_EQ(cuda->memory().used_bytes, all.used_bytes + 4096);
}

}  // namespace
}  // namespace tandem::engine
