// SPDX-License-Identifier: Apache-2.0
// Attention never reads behind its window: block tables with holes there give
// the bits of whole ones, on both backends and in every KV format. What a hole
// (block -1) leads to is far off: another layer's memory, or nobody's.

#include <algorithm>
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

constexpr int kBlockSize = 8;

struct WindowCase {
  bool cuda;
  DType activations;
  DType kv;
  std::string name() const {
    return std::string(cuda ? "cuda_" : "cpu_") +
           std::string(kernels::Name(activations)) + "_" +
           std::string(kernels::Name(kv));
  }
};

class WindowTest : public testing::TestWithParam<WindowCase> {};

// Logits after each of the chunks; with `holes`, blocks are taken from the
// table as soon as they are behind.
std::vector<std::vector<float>> Logits(Rig& rig, const nlohmann::json& spec,
                                       bool holes) {
  const int window = rig.spec().common_window();
  EXPECT_EQ(window, 11);
  const int length = 62;
  TestSequence sequence = rig.NewSequence(PromptIds(spec, length), length);
  std::vector<std::vector<float>> logits;
  // Prefill in chunks of any size, then decode.
  for (const int chunk : {19, 8, 1, 17, 13, 1, 1, 1}) {
    for (int b = 0;
         holes && (b + 1) * kBlockSize <= sequence.computed - window + 1; ++b) {
      sequence.blocks[static_cast<size_t>(b)] = -1;
    }
    TestSequence* one = &sequence;
    StepOutput output = rig.Advance({&one, 1}, chunk);
    EXPECT_TRUE(output.status.ok()) << output.status;
    if (!output.status.ok()) break;
    logits.push_back(output.logits.back());
  }
  EXPECT_TRUE(!holes || sequence.blocks[5] == -1);
  return logits;
}

TEST_P(WindowTest, HolesBehindItChangeNoBit) {
  const WindowCase& c = GetParam();
  const nlohmann::json spec = LoadCases()["mistral_window_f32"];
  TempDir dir;
  WriteCheckpoint(spec, dir);
  const auto backend = c.cuda ? NewTestDevice(c.activations) : NewCpu(2);
  RigOptions options;
  options.load.weight_dtype = c.activations;
  options.executor.max_rows = 32;
  options.executor.max_sequences = 4;
  options.executor.block_size = kBlockSize;
  options.executor.num_blocks = 32;
  options.executor.kv_dtype = c.kv;
  Rig rig(dir.path(), backend.get(), options);
  EXPECT_EQ(Logits(rig, spec, true), Logits(rig, spec, false));
}

TEST(WindowedExecutor, RefusesAHoleWithinTheWindow) {
  const nlohmann::json spec = LoadCases()["mistral_window_f32"];
  TempDir dir;
  WriteCheckpoint(spec, dir);
  const auto backend = NewCpu(1);
  RigOptions options;
  options.executor.block_size = kBlockSize;
  Rig rig(dir.path(), backend.get(), options);
  TestSequence sequence = rig.NewSequence(PromptIds(spec, 40), 40);
  TestSequence* one = &sequence;
  ASSERT_TRUE(rig.Advance({&one, 1}, 33).status.ok());
  sequence.blocks[2] = -1;  // positions 16 to 23; position 33 sees 23
  EXPECT_TRUE(absl::IsInvalidArgument(rig.Advance({&one, 1}, 1).status));
}

INSTANTIATE_TEST_SUITE_P(
    Devices, WindowTest,
    testing::Values(WindowCase{false, DType::kF32, DType::kF32},
                    WindowCase{false, DType::kBF16, DType::kBF16},
                    WindowCase{false, DType::kF32, DType::kInt8},
                    WindowCase{false, DType::kF32, DType::kInt4},
                    WindowCase{true, DType::kBF16, DType::kInt4},
                    WindowCase{true, DType::kF32, DType::kF32},
                    WindowCase{true, DType::kBF16, DType::kBF16},
                    WindowCase{true, DType::kBF16, DType::kFp8}),
    [](const auto& test) { return test.param.name(); });

}  // namespace
}  // namespace tandem::engine
