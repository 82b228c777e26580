// SPDX-License-Identifier: Apache-2.0
// The engine over the CUDA backend against what others computed: the families'
// tiny checkpoints and the trained model, in every activation type; that a
// stream goes on with the same bits where it was taken over; and that nothing
// is left behind. On a GPU or the emulator: test_device.h.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/rig.h"
#include "tests/engine/test_device.h"

namespace tandem::engine {
namespace {

using kernels::DType;
using nlohmann::json;

RigOptions Options(DType type) {
  RigOptions options;
  options.load.weight_dtype = type;
  options.executor.max_rows = 512;
  options.executor.max_sequences = 8;
  options.executor.num_blocks = 1024;
  options.executor.kv_dtype = type;
  return options;
}

// Of the largest logit in a row: activations are rounded about ten times a
// layer, to 8 bits or 11.
double ToleranceOf(DType type) {
  return type == DType::kF32 ? 1e-4 : type == DType::kBF16 ? 4e-2 : 5e-3;
}

class Families : public testing::TestWithParam<std::string> {};

TEST_P(Families, LogitsAreNearTheGoldens) {
  const json spec = LoadCases()[GetParam()];
  const json golden = ReadGolden(GetParam() + ".json");
  TempDir dir;
  WriteCheckpoint(spec, dir);
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    if (kFewExamples && type != DType::kBF16) continue;
    const auto backend = NewTestDevice(type);
    RigOptions options = Options(type);
    options.load.max_positions = spec.value("served", 0);
    Rig rig(dir.path(), backend.get(), options);
    int prompts = 0;
    double worst = 0;
    for (const json& prompt : golden["prompts"]) {
      auto ids = prompt["ids"].get<std::vector<int32_t>>();
      const int length = static_cast<int>(ids.size());
      if (!TestsRunOnGpu() && (length > 40 || ++prompts > 2)) continue;
      TestSequence sequence = rig.NewSequence(std::move(ids), length);
      TestSequence* const one = &sequence;
      const StepOutput output = rig.Advance({&one, 1}, 512);
      ASSERT_TRUE(output.status.ok()) << output.status;
      const json& row = prompt["last"];
      for (size_t i = 0; i < row["ids"].size(); ++i) {
        const int id = row["ids"][i];
        const double error =
            std::fabs(output.logits[0][id] - row["logits"][i].get<double>()) /
            row["max_abs"].get<double>();
        worst = std::max(worst, error);
      }
    }
    EXPECT_LE(worst, ToleranceOf(type)) << kernels::Name(type);
    std::printf("%s %s: largest error %.1e of the largest logit\n",
                GetParam().c_str(), std::string(kernels::Name(type)).c_str(),
                worst);
  }
}

std::vector<std::string> CaseNames() {
  std::vector<std::string> names;
  const json cases = LoadCases();
  for (const auto& [name, spec] : cases.items()) names.push_back(name);
  return names;
}
INSTANTIATE_TEST_SUITE_P(Device, Families, testing::ValuesIn(CaseNames()),
                         [](const auto& test) { return test.param; });

// The trained model's published text, fed as it is, token by token: every
// log-probability is near, and the likeliest token is the published one
// wherever another is not as likely.
class Stories : public testing::TestWithParam<DType> {};

TEST_P(Stories, EveryGoldenTokenIsTheLikeliest) {
  const char* const data = std::getenv("TANDEM_TEST_DATA");
  if (data == nullptr) {
    GTEST_SKIP() << "TANDEM_TEST_DATA is not set: no trained model to test";
  }
  const std::string directory = absl::StrCat(data, "/models/stories260K");
  std::ifstream stream(directory + "/golden.json");
  const json golden = json::parse(stream, nullptr, false);
  ASSERT_TRUE(golden.is_object()) << directory;
  const DType type = GetParam();
  const double near = type == DType::kF32 ? 1e-3 : 0.15;
  const auto backend = NewTestDevice(type);
  Rig rig(directory, backend.get(), Options(type));
  int cases = 0;
  int tokens = 0;
  int others = 0;
  double worst = 0;
  for (const json& one_case : golden["cases"]) {
    if (!TestsRunOnGpu() && ++cases > 1) break;
    const auto prompt = one_case["prompt_ids"].get<std::vector<int32_t>>();
    auto expected = one_case["greedy_ids"].get<std::vector<int32_t>>();
    if (!TestsRunOnGpu()) expected.resize(std::min<size_t>(4, expected.size()));
    TestSequence sequence = rig.NewSequence(
        prompt, static_cast<int>(prompt.size() + expected.size()));
    sequence.sampling.logprobs = 2;
    TestSequence* const one = &sequence;
    for (const int32_t id : expected) {
      const StepOutput output = rig.Advance({&one, 1}, 512);
      ASSERT_TRUE(output.status.ok()) << output.status;
      const SampledToken& token = output.tokens[0];
      const double logprob =
          one_case["token_logprobs"][sequence.ids.size()].get<double>();
      ++tokens;
      if (token.token_id == id) {
        worst = std::max(worst, std::fabs(token.logprob - logprob));
      } else {
        ++others;
        EXPECT_NE(type, DType::kF32) << "after " << sequence.ids.size();
        EXPECT_NEAR(token.logprob, logprob, near);  // nearly as likely
      }
      sequence.ids.push_back(id);
    }
  }
  EXPECT_LE(worst, near);
  std::printf("%s: %d tokens, %d others, logprobs within %.1e\n",
              std::string(kernels::Name(type)).c_str(), tokens, others, worst);
}
INSTANTIATE_TEST_SUITE_P(
    Device, Stories, testing::Values(DType::kF32, DType::kBF16, DType::kF16),
    [](const auto& test) { return std::string(kernels::Name(test.param)); });

// A worker that takes a stream over computes what was generated so far by
// prefill, and must go on as the first would have.
TEST(DeviceStream, GoesOnWithTheSameBitsWhereItWasTakenOver) {
  const int prompt = TestsRunOnGpu() ? 150 : 9;
  const int steps = TestsRunOnGpu() ? 60 : 6;
  const json spec = LoadCases()["llama3_scaled_bf16"];
  TempDir dir;
  WriteCheckpoint(spec, dir);
  const auto backend = NewTestDevice(DType::kBF16);
  Rig rig(dir.path(), backend.get(), Options(DType::kBF16));
  const auto go_on = [&](TestSequence& sequence, int count) {
    std::vector<std::vector<float>> logits;
    TestSequence* const one = &sequence;
    for (int i = 0; i < count; ++i) {
      StepOutput output = rig.Advance({&one, 1}, 512);
      EXPECT_TRUE(output.status.ok()) << output.status;
      if (!output.status.ok()) break;
      logits.push_back(std::move(output.logits[0]));
      sequence.ids.push_back(output.tokens[0].token_id);
    }
    return logits;
  };
  TestSequence first = rig.NewSequence(PromptIds(spec, prompt), prompt + steps);
  const auto whole = go_on(first, steps);
  for (const int after : {1, steps / 2}) {
    TestSequence second =
        rig.NewSequence({first.ids.begin(), first.ids.begin() + prompt + after},
                        prompt + steps);
    const auto rest = go_on(second, steps - after);
    ASSERT_EQ(rest.size() + static_cast<size_t>(after), whole.size());
    for (size_t i = 0; i < rest.size(); ++i) {
      const auto& expected = whole[i + static_cast<size_t>(after)];
      ASSERT_EQ(std::memcmp(rest[i].data(), expected.data(),
                            expected.size() * sizeof(float)),
                0)
          << "taken over after " << after << ", step " << i;
    }
    EXPECT_EQ(second.ids, first.ids);
  }
}

int OpenDescriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

TEST(DeviceLeaks, NothingIsLeftOfManyEngines) {
  const json spec = LoadCases()["llama3_scaled_bf16"];
  TempDir dir;
  WriteCheckpoint(spec, dir);
  const auto use = [&] {
    const auto backend = NewTestDevice(DType::kBF16);
    Rig rig(dir.path(), backend.get(), Options(DType::kBF16));
    TestSequence sequence = rig.NewSequence(PromptIds(spec, 5), 5);
    TestSequence* const one = &sequence;
    EXPECT_TRUE(rig.Advance({&one, 1}, 512).status.ok());
  };
  use();  // the driver's own memory and files
  const auto watcher = NewTestDevice(DType::kBF16);
  const size_t free = watcher->memory().free_bytes;
  const int descriptors = OpenDescriptors();
  for (int i = 0; i < (TestsRunOnGpu() ? 100 : 3); ++i) use();
  EXPECT_GE(watcher->memory().free_bytes + (size_t{8} << 20), free);
  EXPECT_LE(OpenDescriptors(), descriptors);
}

}  // namespace
}  // namespace tandem::engine
