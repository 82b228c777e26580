// SPDX-License-Identifier: Apache-2.0
// The fake device is an oracle for all simulations: right KV must give the
// expected tokens, and every kind of wrong KV another one.

#include "engine/testing/fake_executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/testing/virtual_loop.h"

namespace tandem::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr FakeModel kModel = {.num_layers = 3, .vocab_size = 1 << 30};

FakeExecutorOptions SmallDevice(int block_size = 4) {
  return {.model = kModel, .num_blocks = 8, .block_size = block_size};
}

class FakeExecutorTest : public ::testing::Test, public StepListener {
 public:
  void OnLayersDone(uint64_t step_id, int layers_done) override {
    events_.push_back(std::to_string(step_id) + " layer " +
                      std::to_string(layers_done));
    if (on_layers_) on_layers_(layers_done);
  }
  void OnStepDone(uint64_t step_id,
                  absl::StatusOr<StepResult> result) override {
    events_.push_back(
        std::to_string(step_id) + " " +
        std::string(absl::StatusCodeToString(result.status().code())));
    tokens_.clear();
    if (!result.ok()) return;
    for (const SampledToken& token : result->tokens) {
      tokens_.push_back(token.token_id);
    }
  }

 protected:
  // Runs one sequence's positions [begin, end) of `history` as one step.
  std::vector<int32_t> Run(FakeExecutor& executor,
                           const std::vector<int32_t>& history,
                           const std::vector<int32_t>& table, int begin,
                           int end, const Sampling& sampling = {}) {
    Step step;
    step.id = ++step_id_;
    step.entries.push_back(
        {.sequence = 1,
         .position = begin,
         .tokens = absl::MakeConstSpan(history).subspan(
             static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
         .block_table = table,
         .draws = end == static_cast<int>(history.size())
                      ? absl::MakeConstSpan(kOneDraw)
                      : absl::Span<const RowDraw>(),
         .sampling = sampling});
    executor.Submit(&step, this);
    loop_.RunUntilIdle();
    return tokens_;
  }
  kernels::KvDigest DigestOf(FakeExecutor& executor, const KvPart& part,
                             uint64_t key) {
    kernels::KvDigest got;
    executor.Digest(part, kernels::DType::kF32, key,
                    [&](kernels::KvDigest digest) { got = digest; });
    loop_.RunUntilIdle();
    return got;
  }

  VirtualLoop loop_;
  uint64_t step_id_ = 0;
  std::vector<std::string> events_;
  std::vector<int32_t> tokens_;
  std::function<void(int)> on_layers_;
};

const std::vector<int32_t> kHistory = {5, 3, 8, 1, 9, 2, 7};

TEST_F(FakeExecutorTest, TokensEqualTheExpectedOnesHoweverTheyAreCut) {
  const std::vector<int32_t> expected = Expected(kModel, kHistory, 1, {});
  const std::vector<int32_t> table = {6, 2};
  struct Case {
    std::vector<int> cuts;
  };
  for (const Case& c : std::vector<Case>{
           {{0, 7}}, {{0, 1, 2, 3, 4, 5, 6, 7}}, {{0, 4, 7}}, {{0, 5, 6, 7}}}) {
    FakeExecutor executor(SmallDevice(), &loop_);
    std::vector<int32_t> got;
    for (size_t i = 1; i < c.cuts.size(); ++i) {
      got = Run(executor, kHistory, table, c.cuts[i - 1], c.cuts[i]);
    }
    EXPECT_EQ(got, expected) << c.cuts.size();
    EXPECT_THAT(executor.violations(), IsEmpty());
  }
}

TEST_F(FakeExecutorTest, ExpectedFollowsItsOwnTokens) {
  const std::vector<int32_t> tokens = Expected(kModel, kHistory, 3, {});
  std::vector<int32_t> longer = kHistory;
  longer.push_back(tokens[0]);
  const std::vector<int32_t> rest = Expected(kModel, longer, 2, {});
  EXPECT_THAT(rest, ElementsAre(tokens[1], tokens[2]));
}

TEST_F(FakeExecutorTest, ExpectedUntilStopKnowsEveryRule) {
  const int prompt = static_cast<int>(kHistory.size());
  const std::vector<int32_t> free_run = Expected(kModel, kHistory, 6, {});
  struct Case {
    std::string why;
    Stopping stopping;
    int max_model_len;
    size_t length;
  };
  for (const Case& c : std::vector<Case>{
           {"max_tokens", {.max_tokens = 4, .stop_token_ids = {}}, 100, 4},
           {"max_model_len",
            {.max_tokens = 9, .stop_token_ids = {}},
            prompt + 3,
            3},
           {"stop", {.max_tokens = 9, .stop_token_ids = {free_run[2]}}, 99, 3},
       }) {
    const std::vector<int32_t> tokens = ExpectedUntilStop(
        kModel, kHistory, prompt, {}, c.stopping, c.max_model_len);
    EXPECT_EQ(tokens, std::vector<int32_t>(
                          free_run.begin(),
                          free_run.begin() + static_cast<int>(c.length)))
        << c.why;
  }
  // Banned until min_tokens, the next id stands in its place.
  const std::vector<int32_t> banned = ExpectedUntilStop(
      kModel, kHistory, prompt, {},
      {.max_tokens = 2, .min_tokens = 1, .stop_token_ids = {free_run[0]}}, 99);
  EXPECT_EQ(banned[0], free_run[0] + 1);
}

TEST_F(FakeExecutorTest, DrawsDependOnSeedIndexAndPositionButGreedyOnes) {
  const auto draw = [](float temperature, uint64_t seed, uint32_t index) {
    return Expected(
        kModel, kHistory, 1,
        {.temperature = temperature, .seed = seed, .sequence_index = index})[0];
  };
  const std::set<int32_t> different = {draw(1, 0, 0), draw(1, 1, 0),
                                       draw(1, 0, 1), draw(1, 1, 1)};
  EXPECT_EQ(different.size(), 4);
  EXPECT_EQ(draw(0, 1, 0), draw(0, 2, 7));
}

TEST_F(FakeExecutorTest, AnyWrongWordAnywhereChangesTheToken) {
  const std::vector<int32_t> table = {6, 2};
  const int32_t right = Expected(kModel, kHistory, 1, {})[0];
  for (int layer = 0; layer < kModel.num_layers; ++layer) {
    for (int position = 0; position < 6; ++position) {
      FakeExecutor executor(SmallDevice(), &loop_);
      Run(executor, kHistory, table, 0, 6);
      const uint64_t stale = 12345;
      KvPart part = {.block_table = table,
                     .position_begin = position,
                     .position_end = position + 1,
                     .layer_begin = layer,
                     .layer_end = layer + 1,
                     .head_begin = 0,
                     .head_end = 1};
      executor.Scatter(part, kernels::DType::kF32,
                       reinterpret_cast<const std::byte*>(&stale), [] {});
      loop_.RunUntilIdle();
      EXPECT_NE(Run(executor, kHistory, table, 6, 7)[0], right)
          << "layer " << layer << " position " << position;
    }
  }
  // Blocks in another order, or of nobody.
  for (const std::vector<int32_t>& wrong :
       std::vector<std::vector<int32_t>>{{2, 6}, {6, 3}, {3, 2}}) {
    FakeExecutor executor(SmallDevice(), &loop_);
    Run(executor, kHistory, table, 0, 6);
    EXPECT_NE(Run(executor, kHistory, wrong, 6, 7)[0], right);
  }
}

TEST_F(FakeExecutorTest, AHandoffInAnySlicesToOtherBlocksGivesTheSameToken) {
  const std::vector<int32_t> from_table = {6, 2};
  const std::vector<int32_t> to_table = {1, 0, 5, 4};
  for (const int positions_per_slice : {1, 2, 5, 6}) {
    for (const int layers_per_slice : {1, 2, 3}) {
      FakeExecutor from(SmallDevice(4), &loop_);
      FakeExecutor to(SmallDevice(2), &loop_);
      Run(from, kHistory, from_table, 0, 6);
      kernels::KvDigest sent;
      for (int p = 0; p < 6; p += positions_per_slice) {
        for (int l = 0; l < kModel.num_layers; l += layers_per_slice) {
          KvPart part = {
              .block_table = from_table,
              .position_begin = p,
              .position_end = std::min(6, p + positions_per_slice),
              .layer_begin = l,
              .layer_end = std::min(kModel.num_layers, l + layers_per_slice),
              .head_begin = 0,
              .head_end = 1};
          std::vector<uint64_t> slab(
              static_cast<size_t>((part.position_end - part.position_begin) *
                                  (part.layer_end - part.layer_begin)));
          std::byte* const bytes = reinterpret_cast<std::byte*>(slab.data());
          from.Gather(part, kernels::DType::kF32, 77, bytes,
                      [&](kernels::KvDigest digest) { sent += digest; });
          loop_.RunUntilIdle();
          part.block_table = to_table;
          to.Scatter(part, kernels::DType::kF32, bytes, [] {});
          loop_.RunUntilIdle();
        }
      }
      const KvPart whole = {.block_table = to_table,
                            .position_begin = 0,
                            .position_end = 6,
                            .layer_begin = 0,
                            .layer_end = kModel.num_layers,
                            .head_begin = 0,
                            .head_end = 1};
      EXPECT_EQ(DigestOf(to, whole, 77), sent);
      EXPECT_FALSE(DigestOf(to, whole, 78) == sent);
      EXPECT_EQ(Run(to, kHistory, to_table, 6, 7),
                Expected(kModel, kHistory, 1, {}));
    }
  }
}

TEST_F(FakeExecutorTest, AWireRowHasTheSizeThatTheShapeSays) {
  for (const kernels::DType dtype :
       {kernels::DType::kF32, kernels::DType::kBF16}) {
    FakeExecutorOptions options = SmallDevice();
    options.dtype = dtype;
    const FakeExecutor executor(options, &loop_);
    EXPECT_EQ(executor.kv_shape().bytes_per_position(), 8 * kModel.num_layers);
  }
}

TEST_F(FakeExecutorTest, LayersComeOneByOneAndStepsInOrder) {
  FakeExecutor executor(SmallDevice(), &loop_);
  const std::vector<int32_t> table = {0, 1};
  std::vector<Step> steps(2);
  for (size_t i = 0; i < 2; ++i) {
    steps[i].id = i + 1;
    steps[i].entries.push_back({.sequence = i,
                                .position = 0,
                                .tokens = absl::MakeConstSpan(kHistory),
                                .block_table = table,
                                .draws = kOneDraw,
                                .sampling = {}});
    executor.Submit(&steps[i], this);
  }
  EXPECT_THAT(events_, IsEmpty());
  const absl::Time start = loop_.Now();
  loop_.RunUntilIdle();
  EXPECT_THAT(events_,
              ElementsAre("1 layer 1", "1 layer 2", "1 layer 3", "1 OK",
                          "2 layer 1", "2 layer 2", "2 layer 3", "2 OK"));
  const FakeExecutorOptions options = SmallDevice();
  EXPECT_LT(2 * (options.step_base + 7 * options.step_per_row) -
                (loop_.Now() - start),
            absl::Microseconds(1));
  EXPECT_EQ(executor.steps(), 2);
  EXPECT_EQ(executor.rows(), 14);
}

TEST_F(FakeExecutorTest, ALayerReadBeforeItsReportIsRubbish) {
  FakeExecutor executor(SmallDevice(), &loop_);
  const std::vector<int32_t> table = {0, 1};
  KvPart part = {.block_table = table,
                 .position_begin = 0,
                 .position_end = 7,
                 .layer_begin = 0,
                 .layer_end = 1,
                 .head_begin = 0,
                 .head_end = 1};
  std::vector<kernels::KvDigest> digests(3);
  on_layers_ = [&](int layers_done) {
    if (layers_done > 1) return;
    // Layer 0 is there, layer 1 not yet.
    for (const int layer : {0, 1}) {
      part.layer_begin = layer;
      part.layer_end = layer + 1;
      executor.Digest(part, kernels::DType::kF32, 1,
                      [&, layer](kernels::KvDigest digest) {
                        digests[static_cast<size_t>(layer)] = digest;
                      });
    }
  };
  Run(executor, kHistory, table, 0, 7);
  part.layer_begin = 0;
  part.layer_end = 1;
  EXPECT_EQ(DigestOf(executor, part, 1), digests[0]);
  part.layer_begin = 1;
  part.layer_end = 2;
  EXPECT_FALSE(DigestOf(executor, part, 1) == digests[1]);
}

TEST_F(FakeExecutorTest, ReportsBlocksThatTwoSequencesUseInOneStep) {
  const std::vector<int32_t> short_history = {1, 2};
  struct Case {
    std::vector<int32_t> other_table;
    int position;
    std::string violation;
  };
  for (const Case& c : std::vector<Case>{
           {{0}, 2, "block 0 is written twice"},
           {{0, 1}, 4, "block 0 is read and written"},
           {{2, 1}, 4, ""},
       }) {
    FakeExecutor executor(SmallDevice(), &loop_);
    const std::vector<int32_t> table = {0};
    Step step;
    step.id = 1;
    step.entries.push_back({.sequence = 1,
                            .position = 0,
                            .tokens = short_history,
                            .block_table = table,
                            .draws = kOneDraw,
                            .sampling = {}});
    step.entries.push_back({.sequence = 2,
                            .position = c.position,
                            .tokens = short_history,
                            .block_table = c.other_table,
                            .draws = kOneDraw,
                            .sampling = {}});
    executor.Submit(&step, this);
    loop_.RunUntilIdle();
    if (c.violation.empty()) {
      EXPECT_THAT(executor.violations(), IsEmpty());
    } else {
      ASSERT_FALSE(executor.violations().empty()) << c.violation;
      EXPECT_THAT(executor.violations()[0], HasSubstr(c.violation));
    }
  }
}

TEST_F(FakeExecutorTest, FailsOneStepOnDemandAndDestroyedCallsNobody) {
  {
    FakeExecutor executor(SmallDevice(), &loop_);
    const std::vector<int32_t> table = {0, 1};
    executor.FailNextStep(absl::InternalError("device lost"));
    EXPECT_THAT(Run(executor, kHistory, table, 0, 7), IsEmpty());
    EXPECT_EQ(events_.back(), "1 INTERNAL");
    EXPECT_EQ(Run(executor, kHistory, table, 0, 7).size(), 1);
    Step step;
    step.id = 9;
    executor.Submit(&step, this);
    events_.clear();
  }
  loop_.RunUntilIdle();
  EXPECT_THAT(events_, IsEmpty());
}

}  // namespace
}  // namespace tandem::engine
