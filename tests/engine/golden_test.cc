// SPDX-License-Identifier: Apache-2.0
// The engine against what others computed: tiny checkpoints of each family
// against `transformers`, and a trained model against a float64 forward and
// against the text that its makers publish for it.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/model/fingerprint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/golden_row.h"
#include "tests/engine/rig.h"
#include "tests/sanitized.h"

namespace tandem::engine {
namespace {

using nlohmann::json;

class Tiny : public testing::TestWithParam<std::string> {
 protected:
  Tiny()
      : spec_(LoadCases()[GetParam()]),
        golden_(ReadGolden(GetParam() + ".json")) {
    WriteCheckpoint(spec_, dir_);
  }

  // Fixed for the positions that the goldens were made for.
  RigOptions Options() const {
    RigOptions options;
    options.load.max_positions = spec_.value("served", 0);
    return options;
  }
  int steps() const { return spec_.value("steps", 64); }

  // The golden's prompts as sequences with room for the greedy ids.
  std::vector<TestSequence> Prompts(Rig& rig) const {
    std::vector<TestSequence> sequences;
    for (const json& prompt : golden_["prompts"]) {
      auto ids = prompt["ids"].get<std::vector<int32_t>>();
      const int positions = static_cast<int>(ids.size()) + 64;
      sequences.push_back(rig.NewSequence(std::move(ids), positions));
    }
    return sequences;
  }
  void ExpectGreedy(const TestSequence& sequence, size_t index) const {
    const json& prompt = golden_["prompts"][index];
    const auto begin = sequence.ids.begin() + prompt["ids"].size();
    EXPECT_EQ(std::vector<int32_t>(begin, sequence.ids.end()),
              prompt["greedy_ids"].get<std::vector<int32_t>>())
        << "prompt of " << prompt["ids"].size();
  }

  TempDir dir_;
  json spec_;
  json golden_;
};

TEST_P(Tiny, CheckpointIsWhatTheGoldensWereMadeFrom) {
  const auto checkpoint = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(HashWeights(*checkpoint, 2, [](uint64_t, uint64_t) {}),
            golden_["weights_fingerprint"]);
  for (const json& prompt : golden_["prompts"]) {
    EXPECT_EQ(PromptIds(spec_, static_cast<int>(prompt["ids"].size())),
              prompt["ids"].get<std::vector<int32_t>>());
  }
}

TEST_P(Tiny, PrefillLogitsOfTheFirstAndLastPosition) {
  const auto backend = NewCpu(2);
  Rig rig(dir_.path(), backend.get(), Options());
  std::vector<TestSequence> sequences = Prompts(rig);
  for (size_t i = 0; i < sequences.size(); ++i) {
    const json& prompt = golden_["prompts"][i];
    const std::string where = absl::StrCat("prompt of ", prompt["ids"].size());
    TestSequence* sequence = &sequences[i];
    const StepOutput first = rig.Advance({&sequence, 1}, 1);
    ASSERT_TRUE(first.status.ok()) << first.status;
    ExpectRow(first.logits[0], prompt["first"], where + ", first");
    // Anew, all positions in one chunk.
    sequence->computed = 0;
    const StepOutput last = rig.Advance({&sequence, 1}, 512);
    ASSERT_TRUE(last.status.ok()) << last.status;
    ExpectRow(last.logits[0], prompt["last"], where + ", last");
  }
}

TEST_P(Tiny, GreedyTokensOneSequenceAtATime) {
  if (kSanitized) return;  // they touch what those together do
  const auto backend = NewCpu(2);
  Rig rig(dir_.path(), backend.get(), Options());
  std::vector<TestSequence> sequences = Prompts(rig);
  for (size_t i = 0; i < sequences.size(); ++i) {
    TestSequence* sequence = &sequences[i];
    rig.Greedy({&sequence, 1}, 512, steps());
    ExpectGreedy(*sequence, i);
  }
}

TEST_P(Tiny, GreedyTokensOfSequencesTogether) {
  const auto backend = NewCpu(2);
  Rig rig(dir_.path(), backend.get(), Options());
  std::vector<TestSequence> sequences = Prompts(rig);
  ASSERT_GE(sequences.size(), 4);
  // Seven, and seven others of which one is the same; or all.
  const size_t count = std::min<size_t>(7, sequences.size());
  for (const size_t begin : {size_t{0}, sequences.size() - count}) {
    std::vector<TestSequence> some(sequences.begin() + begin,
                                   sequences.begin() + begin + count);
    std::vector<TestSequence*> batch;
    for (TestSequence& sequence : some) batch.push_back(&sequence);
    rig.Greedy(batch, 64, steps());
    for (size_t i = 0; i < count; ++i) ExpectGreedy(some[i], begin + i);
  }
}

std::vector<std::string> CaseNames() {
  std::vector<std::string> names;
  const json cases = LoadCases();
  for (const auto& [name, spec] : cases.items()) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Families, Tiny, testing::ValuesIn(CaseNames()),
                         [](const auto& test) { return test.param; });

// ---- The trained model, from the directory that TANDEM_TEST_DATA names.

class Stories : public testing::Test {
 protected:
  void SetUp() override {
    const char* data = std::getenv("TANDEM_TEST_DATA");
    if (data == nullptr) {
      GTEST_SKIP() << "TANDEM_TEST_DATA is not set: no trained model to test";
    }
    directory_ = absl::StrCat(data, "/models/stories260K");
    std::ifstream stream(directory_ + "/golden.json");
    golden_ = json::parse(stream, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(golden_.is_object()) << directory_ << "/golden.json";
    ASSERT_EQ(golden_["cases"].size(), 7);
  }

  std::string directory_;
  json golden_;
};

TEST_F(Stories, EveryGoldenIdAndLogprob) {
  const auto backend = NewCpu(2);
  Rig rig(directory_, backend.get());
  for (const json& golden : golden_["cases"]) {
    const auto prompt = golden["prompt_ids"].get<std::vector<int32_t>>();
    const auto expected = golden["greedy_ids"].get<std::vector<int32_t>>();
    TestSequence sequence = rig.NewSequence(
        prompt, static_cast<int>(prompt.size() + expected.size()));
    sequence.sampling.logprobs = 8;
    const std::string where = golden["prompt"].dump();
    // token_logprobs has one entry per position, null for the first.
    const json& logprobs = golden["token_logprobs"];
    TestSequence* one = &sequence;
    for (size_t i = 0; i < expected.size(); ++i) {
      const StepOutput output = rig.Advance({&one, 1}, 512);
      ASSERT_TRUE(output.status.ok()) << output.status;
      const SampledToken& token = output.tokens[0];
      ASSERT_EQ(token.token_id, expected[i]) << where << " step " << i;
      EXPECT_NEAR(token.logprob, logprobs[sequence.ids.size()].get<double>(),
                  1e-3)
          << where << " step " << i;
      EXPECT_EQ(token.rank, 1);
      ASSERT_EQ(token.top.size(), 8);
      for (size_t k = 0; i == 0 && k < 8; ++k) {
        EXPECT_EQ(token.top[k].token_id, golden["first_top_ids"][k]) << where;
        EXPECT_NEAR(token.top[k].logprob,
                    golden["first_top_logprobs"][k].get<double>(), 1e-3);
      }
      sequence.ids.push_back(token.token_id);
    }
  }
}

// Logprobs of the prompt's own tokens, from a pass that draws at every
// position.
TEST_F(Stories, EveryPromptLogprob) {
  const auto backend = NewCpu(2);
  Rig rig(directory_, backend.get());
  for (const json& golden : golden_["cases"]) {
    const auto prompt = golden["prompt_ids"].get<std::vector<int32_t>>();
    TestSequence sequence =
        rig.NewSequence(prompt, static_cast<int>(prompt.size()));
    TestSequence* one = &sequence;
    for (size_t i = 0; i + 1 < prompt.size(); ++i) {
      const std::vector<float> logits = rig.Advance({&one, 1}, 1).logits[0];
      double sum = 0;
      for (const float logit : logits) sum += std::exp(double{logit});
      EXPECT_NEAR(logits[prompt[i + 1]] - std::log(sum),
                  golden["token_logprobs"][i + 1].get<double>(), 1e-3);
    }
  }
}

}  // namespace
}  // namespace tandem::engine
