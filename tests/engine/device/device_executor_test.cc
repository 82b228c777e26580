// SPDX-License-Identifier: Apache-2.0
// What DeviceExecutor promises beside numbers: reports in order, two steps in
// flight, handoffs ordered with steps, drawing per entry, and refusal of
// steps that name what is not there. Everything runs on the plain CPU backend
// and on one that finishes late and hides its memory.

#include "engine/device/device_executor.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "engine/device/mask_threads.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/testing/late_backend.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/notification.h"
#include "tests/engine/rig.h"

namespace tandem::engine {
namespace {

using kernels::DType;
using kernels::KvDigest;
using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

// `count` positions of a sequence, from `begin` on.
StepEntry Entry(const TestSequence& sequence, int begin, int count,
                bool sample = false) {
  StepEntry entry;
  entry.position = begin;
  entry.tokens = absl::MakeConstSpan(sequence.ids).subspan(begin, count);
  entry.block_table = sequence.blocks;
  if (sample) entry.draws = kOneDraw;
  return entry;
}

class DeviceExecutorTest : public testing::TestWithParam<bool> {
 protected:
  DeviceExecutorTest() : spec_(LoadCases()["smollm_tied_bf16"]) {
    WriteCheckpoint(spec_, dir_);
    if (GetParam()) {
      auto late = kernels::testing::NewLateBackend({.cpu = {.threads = 2}});
      EXPECT_TRUE(late.ok()) << late.status();
      backend_ = *std::move(late);
    } else {
      backend_ = NewCpu(2);
    }
  }

  std::unique_ptr<Rig> MakeRig(const RigOptions& options = {}) {
    return std::make_unique<Rig>(dir_.path(), backend_.get(), options);
  }
  std::vector<int32_t> Prompt(int length) { return PromptIds(spec_, length); }

  TempDir dir_;
  json spec_;
  std::unique_ptr<kernels::Backend> backend_;
};

TEST_P(DeviceExecutorTest, ReportsLayersInGroupsBeforeTheStepIsDone) {
  const struct {
    int per_group;
    std::vector<int> expected;
  } kGroups[] = {
      {0, {4}}, {1, {1, 2, 3, 4}}, {2, {2, 4}}, {3, {3, 4}}, {9, {4}}};
  for (const auto& [per_group, expected] : kGroups) {
    RigOptions options;
    options.executor.layers_per_group = per_group;
    const auto rig = MakeRig(options);
    TestSequence sequence = rig->NewSequence(Prompt(20), 20);
    TestSequence* one = &sequence;
    EXPECT_EQ(rig->Advance({&one, 1}, 20).layers_done, expected) << per_group;
  }
}

// Nobody waits for layers of decoding, which cost a message each.
TEST_P(DeviceExecutorTest, LayersOfAStepThatDrawsAllItsRowsComeWithItsEnd) {
  RigOptions options;
  options.executor.layers_per_group = 1;
  const auto rig = MakeRig(options);
  TestSequence sequence = rig->NewSequence(Prompt(20), 20);
  TestSequence* one = &sequence;
  rig->Advance({&one, 1}, 17);
  EXPECT_THAT(rig->Advance({&one, 1}, 1).layers_done, ElementsAre(4));
  EXPECT_THAT(rig->Advance({&one, 1}, 2).layers_done, ElementsAre(1, 2, 3, 4));
}

TEST_P(DeviceExecutorTest, GroupsFollowTheLengthOfThePrompt) {
  RigOptions options;
  options.executor.group_bytes = 1;  // every layer is large enough
  auto rig = MakeRig(options);
  TestSequence sequence = rig->NewSequence(Prompt(20), 20);
  TestSequence* one = &sequence;
  EXPECT_EQ(rig->Advance({&one, 1}, 20).layers_done,
            (std::vector<int>{1, 2, 3, 4}));
  // Two of its four layers.
  const kernels::KvShape shape = rig->executor().kv_shape();
  options.executor.group_bytes = 20 * shape.bytes_per_position() / 2;
  rig = MakeRig(options);
  sequence = rig->NewSequence(Prompt(20), 20);
  EXPECT_EQ(rig->Advance({&one, 1}, 20).layers_done, (std::vector<int>{2, 4}));
  sequence = rig->NewSequence(Prompt(19), 19);
  EXPECT_EQ(rig->Advance({&one, 1}, 19).layers_done, (std::vector<int>{4}));
}

TEST_P(DeviceExecutorTest, AStepThatDrawsNothingLeavesItsKv) {
  const auto rig = MakeRig();
  TestSequence whole = rig->NewSequence(Prompt(40), 41);
  TestSequence* one = &whole;
  const StepOutput expected = rig->Advance({&one, 1}, 40);

  TestSequence parts = rig->NewSequence(Prompt(40), 41);
  const Step silent{.id = 100, .entries = {Entry(parts, 0, 33)}};
  const StepOutput nothing = rig->Run(silent);
  ASSERT_TRUE(nothing.status.ok()) << nothing.status;
  EXPECT_TRUE(nothing.tokens.empty());
  EXPECT_THAT(nothing.layers_done, ElementsAre(4));
  parts.computed = 33;
  one = &parts;
  EXPECT_EQ(rig->Advance({&one, 1}, 40).logits, expected.logits);
}

TEST_P(DeviceExecutorTest, AForkGoesOnFromItsOwnCopyOfABlock) {
  const auto rig = MakeRig();
  TestSequence whole = rig->NewSequence(Prompt(45), 45);
  TestSequence* one = &whole;
  const StepOutput expected = rig->Advance({&one, 1}, 45);

  TestSequence parent = rig->NewSequence(Prompt(45), 45);
  one = &parent;
  rig->Run({.id = 100, .entries = {Entry(parent, 0, 40)}});
  TestSequence fork = rig->NewSequence(Prompt(45), 45);
  const BlockCopy copy{.from = parent.blocks[2], .to = fork.blocks[2]};
  fork.blocks[0] = parent.blocks[0];
  fork.blocks[1] = parent.blocks[1];
  // The parent goes on in its own block in the same step, otherwise.
  TestSequence other = parent;
  for (size_t i = 40; i < 45; ++i) other.ids[i] = 7;
  const StepOutput forked =
      rig->Run({.id = 101,
                .entries = {Entry(other, 40, 5), Entry(fork, 40, 5, true)},
                .copies = {copy}});
  ASSERT_TRUE(forked.status.ok()) << forked.status;
  EXPECT_EQ(forked.logits, expected.logits);
  const StepOutput refused = rig->Run({.id = 102,
                                       .entries = {Entry(fork, 40, 5, true)},
                                       .copies = {{.from = 0, .to = 100000}}});
  EXPECT_THAT(refused.status.message(), HasSubstr("a copy's block 100000"));
}

// A listener of several steps, in the order of their ends.
class Recorder final : public StepListener {
 public:
  explicit Recorder(size_t steps) : steps_(steps) {}
  void OnLayersDone(uint64_t id, int layers) override {
    events.push_back({id, layers});
  }
  void OnStepDone(uint64_t id, absl::StatusOr<StepResult> result) override {
    events.push_back({id, -1});
    results.push_back(std::move(result));
    if (results.size() == steps_) done.Notify();
  }
  std::vector<std::pair<uint64_t, int>> events;
  std::vector<absl::StatusOr<StepResult>> results;
  Notification done;

 private:
  const size_t steps_;
};

TEST_P(DeviceExecutorTest, ASecondStepIsSubmittedWhileTheFirstRuns) {
  const auto rig = MakeRig();
  TestSequence expected = rig->NewSequence(Prompt(50), 50);
  TestSequence* one = &expected;
  const int32_t token = rig->Advance({&one, 1}, 50).tokens[0].token_id;

  TestSequence s = rig->NewSequence(Prompt(50), 50);
  const Step first{.id = 1, .entries = {Entry(s, 0, 30)}};
  const Step second{.id = 2, .entries = {Entry(s, 30, 20, true)}};
  Recorder recorder(2);
  rig->loop().RunSync([&] {
    rig->executor().Submit(&first, &recorder);
    rig->executor().Submit(&second, &recorder);
    EXPECT_TRUE(recorder.events.empty()) << "called back inside the call";
  });
  recorder.done.WaitForNotification();
  using Event = std::pair<uint64_t, int>;
  EXPECT_THAT(recorder.events, ElementsAre(Event(1, 4), Event(1, -1),
                                           Event(2, 4), Event(2, -1)));
  ASSERT_TRUE(recorder.results[1].ok());
  EXPECT_EQ(recorder.results[1]->tokens[0].token_id, token);
}

TEST_P(DeviceExecutorTest, WhatIsFedByNoStepInFlightIsRefused) {
  const auto rig = MakeRig();
  TestSequence s = rig->NewSequence(Prompt(40), 80);
  const Step chunk{.id = 1, .entries = {Entry(s, 0, 30, true)}};
  Step fed{.id = 2, .entries = {Entry(s, 30, 1, true)}};
  fed.entries[0].fed = 0;
  // The step that it should be fed by has ended.
  ASSERT_TRUE(rig->Run(chunk).status.ok());
  const StepOutput late = rig->Run(fed);
  EXPECT_EQ(late.status.code(), absl::StatusCode::kFailedPrecondition);
  // It draws too few.
  fed.entries[0].fed = 1;
  Recorder recorder(2);
  rig->loop().RunSync([&] {
    rig->executor().Submit(&chunk, &recorder);
    rig->executor().Submit(&fed, &recorder);
  });
  recorder.done.WaitForNotification();
  int refused = 0;
  for (const auto& result : recorder.results) {
    refused += result.status().code() == absl::StatusCode::kInvalidArgument;
  }
  EXPECT_EQ(refused, 1);
}

TEST_P(DeviceExecutorTest, ARefusalDoesNotOvertakeTheStepThatRuns) {
  const auto rig = MakeRig();
  TestSequence s = rig->NewSequence(Prompt(60), 80);
  const Step good{.id = 1, .entries = {Entry(s, 0, 60, true)}};
  Step bad{.id = 2, .entries = {Entry(s, 0, 1, true)}};
  bad.entries[0].position = -1;
  Recorder recorder(2);
  rig->loop().RunSync([&] {
    rig->executor().Submit(&good, &recorder);
    rig->executor().Submit(&bad, &recorder);
  });
  recorder.done.WaitForNotification();
  EXPECT_EQ(recorder.events[recorder.events.size() - 2].first, 1u);
  EXPECT_EQ(recorder.events.back().first, 2u);
  EXPECT_TRUE(recorder.results[0].ok());
  EXPECT_EQ(recorder.results[1].status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(DeviceExecutorTest, AThirdStepInFlightIsRefused) {
  const auto rig = MakeRig();
  TestSequence s = rig->NewSequence(Prompt(200), 200);
  std::vector<Step> steps(3);
  for (int i = 0; i < 3; ++i) {
    steps[i].id = i + 1;
    steps[i].entries = {Entry(s, 60 * i, 60)};
  }
  Recorder recorder(3);
  rig->loop().RunSync([&] {
    for (const Step& step : steps) rig->executor().Submit(&step, &recorder);
  });
  recorder.done.WaitForNotification();
  int refused = 0;
  for (const auto& result : recorder.results) {
    refused += result.status().code() == absl::StatusCode::kFailedPrecondition;
  }
  EXPECT_EQ(refused, 1);
}

TEST_P(DeviceExecutorTest, DrawsEachEntryByItsOwnParameters) {
  const auto rig = MakeRig();
  std::vector<TestSequence> sequences;
  for (int i = 0; i < 7; ++i) {
    sequences.push_back(rig->NewSequence(Prompt(10 + i), 20 + i));
  }
  std::vector<TestSequence*> all;
  for (TestSequence& s : sequences) all.push_back(&s);
  const StepOutput free = rig->Advance(all, 512);
  ASSERT_TRUE(free.status.ok()) << free.status;

  // Again with bans: of the best, of the best two, of another's best.
  const auto best = [&](int i) { return free.tokens[i].token_id; };
  const auto second = [&](int i) {
    std::vector<float> row = free.logits[i];
    row[best(i)] = -1e30f;
    return static_cast<int32_t>(std::max_element(row.begin(), row.end()) -
                                row.begin());
  };
  sequences[1].edits = {Ban(best(1))};
  sequences[2].edits = {Ban(best(2)), Ban(second(2))};
  sequences[4].edits = {Ban(best(1))};
  sequences[5].sampling.logprobs = 3;
  sequences[6].edits = {Ban(best(6))};
  for (TestSequence& s : sequences) s.computed = 0;
  const StepOutput banned = rig->Advance(all, 512);
  ASSERT_TRUE(banned.status.ok()) << banned.status;
  EXPECT_EQ(banned.logits, free.logits);
  EXPECT_EQ(banned.tokens[0].token_id, best(0));
  EXPECT_EQ(banned.tokens[1].token_id, second(1));
  EXPECT_NE(banned.tokens[2].token_id, best(2));
  EXPECT_NE(banned.tokens[2].token_id, second(2));
  EXPECT_EQ(banned.tokens[3].token_id, best(3));
  EXPECT_EQ(banned.tokens[4].token_id,
            best(4) == best(1) ? second(4) : best(4));
  EXPECT_EQ(banned.tokens[5].token_id, best(5));
  EXPECT_EQ(banned.tokens[6].token_id, second(6));
  ASSERT_EQ(banned.tokens[5].top.size(), 3);
  EXPECT_EQ(banned.tokens[5].top[0].token_id, best(5));
  EXPECT_EQ(banned.tokens[5].top[1].token_id, second(5));
  EXPECT_TRUE(banned.tokens[0].top.empty());
}

// Rows that draw in one step draw what steps of one row each would.
TEST_P(DeviceExecutorTest, DrawsOfManyRowsAreThoseOfSingleSteps) {
  RigOptions options;
  options.executor.max_draws = 40;
  const auto rig = MakeRig(options);
  constexpr int kRows = 20;
  constexpr int kDraws = 9;
  TestSequence single = rig->NewSequence(Prompt(kRows), kRows);
  single.sampling = {.temperature = 1, .seed = 7, .logprobs = 2};
  single.edits = {Ban(3)};
  TestSequence* one = &single;
  rig->Advance({&one, 1}, kRows - kDraws);
  std::vector<std::vector<float>> logits;
  std::vector<SampledToken> tokens;
  for (int i = 0; i < kDraws; ++i) {
    const StepOutput output = rig->Advance({&one, 1}, 1);
    ASSERT_TRUE(output.status.ok()) << output.status;
    logits.push_back(output.logits[0]);
    tokens.push_back(output.tokens[0]);
  }

  std::vector<RowDraw> draws(kDraws, RowDraw{.edits = single.edits});
  draws[4] = {.given = 5, .given_logprobs = 3};
  const TestSequence together = rig->NewSequence(Prompt(kRows), kRows);
  const TestSequence other = rig->NewSequence(Prompt(kRows), kRows);
  Step step{.id = 1000,
            .entries = {Entry(other, 0, 3), Entry(together, 0, kRows),
                        Entry(other, 0, 7, true)}};
  step.entries[0].block_table = single.blocks;
  step.entries[1].draws = draws;
  step.entries[1].sampling = single.sampling;
  const StepOutput output = rig->Run(step);
  ASSERT_TRUE(output.status.ok()) << output.status;
  ASSERT_EQ(output.tokens.size(), kDraws + 1);
  for (int i = 0; i < kDraws; ++i) {
    const SampledToken& token = output.tokens[i];
    EXPECT_EQ(output.logits[i], logits[i]) << i;
    ASSERT_EQ(token.top.size(), i == 4 ? 3 : 2) << i;
    EXPECT_EQ(token.top[0].token_id, tokens[i].top[0].token_id) << i;
    if (i == 4) continue;
    EXPECT_EQ(token.token_id, tokens[i].token_id) << i;
    EXPECT_EQ(token.logprob, tokens[i].logprob) << i;
    EXPECT_EQ(token.rank, tokens[i].rank) << i;
  }
  // What is given is scored.
  const std::vector<float>& row = logits[4];
  double sum = 0;
  for (const float logit : row) sum += std::exp(double{logit});
  const SampledToken& given = output.tokens[4];
  EXPECT_EQ(given.token_id, 5);
  EXPECT_NEAR(given.logprob, double{row[5]} - std::log(sum), 1e-5);
  EXPECT_EQ(given.rank, 1 + std::count_if(row.begin(), row.end(),
                                          [&](float x) { return x > row[5]; }));
}

TEST_P(DeviceExecutorTest, KvThatTravelledContinuesBitForBit) {
  for (const int there : {8, 16, 32}) {  // block size of the receiver
    const auto sender = MakeRig();
    RigOptions options;
    options.executor.block_size = there;
    const auto receiver = MakeRig(options);
    TestSequence sent = sender->NewSequence(Prompt(61), 62);
    TestSequence* one = &sent;
    sender->Advance({&one, 1}, 60);
    const StepOutput expected = sender->Advance({&one, 1}, 1);

    TestSequence landed = receiver->NewSequence(Prompt(61), 62);
    const kernels::KvShape& shape = sender->executor().kv_shape();
    std::vector<std::byte> staging(60 * shape.bytes_per_position());
    const KvDigest digest = sender->Gather(WholePart(sent, shape, 0, 60),
                                           DType::kF32, staging.data());
    // Landed in slices of uneven ranges of positions and of layers.
    KvDigest sum;
    for (const auto& [begin, end] : {std::pair{0, 7}, {7, 33}, {33, 60}}) {
      for (int layer = 0; layer < shape.num_layers; layer += 2) {
        KvPart from = WholePart(sent, shape, begin, end);
        KvPart to = WholePart(landed, shape, begin, end);
        from.layer_begin = to.layer_begin = layer;
        from.layer_end = to.layer_end = layer + 2;
        sum += sender->Gather(from, DType::kF32, staging.data());
        receiver->Scatter(to, DType::kF32, staging.data());
      }
    }
    EXPECT_EQ(sum, digest);
    EXPECT_EQ(receiver->Digest(
                  WholePart(landed, receiver->executor().kv_shape(), 0, 60),
                  DType::kF32),
              digest);
    landed.computed = 60;
    one = &landed;
    EXPECT_EQ(receiver->Advance({&one, 1}, 1).logits, expected.logits)
        << "blocks of " << there;
  }
}

// Nothing but the executor orders these: the step is submitted while the
// scatter that it needs is still queued.
TEST_P(DeviceExecutorTest, AStepWaitsForTheScatterIntoItsBlocks) {
  const auto rig = MakeRig();
  TestSequence source = rig->NewSequence(Prompt(101), 102);
  TestSequence* one = &source;
  rig->Advance({&one, 1}, 100);
  const StepOutput expected = rig->Advance({&one, 1}, 1);
  const kernels::KvShape& shape = rig->executor().kv_shape();
  std::vector<std::byte> staging(100 * shape.bytes_per_position());
  rig->Gather(WholePart(source, shape, 0, 100), DType::kF32, staging.data());

  for (int round = 0; round < 10; ++round) {
    TestSequence target = rig->NewSequence(Prompt(101), 102);
    const Step step{.id = 1000, .entries = {Entry(target, 100, 1, true)}};
    Recorder recorder(1);
    bool scattered = false;
    std::vector<float> logits;
    rig->loop().RunSync([&] {
      rig->executor().set_logits_probe(
          [&](uint64_t, int, absl::Span<const float> row) {
            logits.assign(row.begin(), row.end());
          });
      rig->executor().Scatter(WholePart(target, shape, 0, 100), DType::kF32,
                              staging.data(), [&] { scattered = true; });
      rig->executor().Submit(&step, &recorder);
    });
    recorder.done.WaitForNotification();
    rig->loop().RunSync([&] {
      EXPECT_TRUE(scattered);
      rig->executor().set_logits_probe(nullptr);
    });
    ASSERT_EQ(logits, expected.logits[0]) << round;
  }
}

// And the other way round: blocks given to a handoff while a step that reads
// their old content is still queued.
TEST_P(DeviceExecutorTest, AScatterWaitsForTheStepThatNamesItsBlocks) {
  const auto rig = MakeRig();
  TestSequence source = rig->NewSequence(Prompt(101), 102);
  TestSequence* one = &source;
  const StepOutput expected = rig->Advance({&one, 1}, 101);
  const kernels::KvShape& shape = rig->executor().kv_shape();
  const std::vector<std::byte> zeros(101 * shape.bytes_per_position());

  for (int round = 0; round < 10; ++round) {
    TestSequence target = rig->NewSequence(Prompt(101), 102);
    one = &target;
    rig->Advance({&one, 1}, 100);
    const Step step{.id = 1000, .entries = {Entry(target, 100, 1, true)}};
    Recorder recorder(1);
    std::vector<float> logits;
    Notification scattered;
    rig->loop().RunSync([&] {
      rig->executor().set_logits_probe(
          [&](uint64_t, int, absl::Span<const float> row) {
            logits.assign(row.begin(), row.end());
          });
      rig->executor().Submit(&step, &recorder);
      rig->executor().Scatter(WholePart(target, shape, 0, 101), DType::kF32,
                              zeros.data(), [&] { scattered.Notify(); });
    });
    recorder.done.WaitForNotification();
    scattered.WaitForNotification();
    rig->loop().RunSync([&] { rig->executor().set_logits_probe(nullptr); });
    ASSERT_EQ(logits, expected.logits[0]) << round;
  }
}

// A block is saved, written by the step that comes at once behind, and
// restored elsewhere for the step behind that: nothing but the executor orders
// these.
TEST_P(DeviceExecutorTest, SavedBlocksComeBackWhateverIsWrittenMeanwhile) {
  const auto rig = MakeRig();
  TestSequence source = rig->NewSequence(Prompt(33), 34);
  TestSequence* one = &source;
  rig->Advance({&one, 1}, 32);
  const StepOutput expected = rig->Advance({&one, 1}, 1);
  const auto bytes = static_cast<size_t>(rig->executor().block_bytes());

  for (int round = 0; round < 10; ++round) {
    std::vector<std::byte> saved(2 * bytes);
    std::vector<int32_t> ids = Prompt(33);
    ids[0] += round + 1;
    TestSequence intruder = source;  // in the same blocks
    intruder.ids = ids;
    TestSequence target = rig->NewSequence(Prompt(33), 34);
    const Step writes{.id = 1000, .entries = {Entry(intruder, 0, 32)}};
    const Step reads{.id = 1001, .entries = {Entry(target, 32, 1, true)}};
    Recorder recorder(2);
    int moved = 0;
    std::vector<float> logits;
    rig->loop().RunSync([&] {
      DeviceExecutor& executor = rig->executor();
      executor.set_logits_probe(
          [&](uint64_t, int, absl::Span<const float> row) {
            logits.assign(row.begin(), row.end());
          });
      // So that the copies come late enough.
      for (int i = 0; i < 100; ++i) {
        executor.Digest(WholePart(source, executor.kv_shape(), 0, 32),
                        DType::kF32, 1, [](KvDigest) {});
      }
      for (int i = 0; i < 2; ++i) {
        executor.SaveBlock(source.blocks[i], saved.data() + i * bytes,
                           [&] { ++moved; });
      }
      executor.Submit(&writes, &recorder);
      for (int i = 0; i < 2; ++i) {
        executor.RestoreBlock(target.blocks[i], saved.data() + i * bytes,
                              [&] { ++moved; });
      }
      executor.Submit(&reads, &recorder);
    });
    recorder.done.WaitForNotification();
    rig->loop().RunSync([&] {
      EXPECT_EQ(moved, 4);
      rig->executor().set_logits_probe(nullptr);
    });
    ASSERT_EQ(logits, expected.logits[0]) << round;
    source.blocks = target.blocks;
  }
}

// Slices leave while later layers compute: at each report, what it names is
// there, and the sum is the digest of the whole.
TEST_P(DeviceExecutorTest, WhatALayerReportNamesCanBeGathered) {
  RigOptions options;
  options.executor.layers_per_group = 1;
  const auto rig = MakeRig(options);
  TestSequence sequence = rig->NewSequence(Prompt(90), 90);
  const kernels::KvShape& shape = rig->executor().kv_shape();
  std::vector<std::byte> staging(90 * shape.bytes_per_position());

  class Gatherer final : public StepListener {
   public:
    Gatherer(Rig* owner, TestSequence* s, std::byte* staging)
        : rig_(owner), sequence_(s), staging_(staging) {}
    void OnLayersDone(uint64_t, int layers) override {
      const kernels::KvShape& kv = rig_->executor().kv_shape();
      KvPart part = WholePart(*sequence_, kv, 0, 90);
      part.layer_begin = layers - 1;
      part.layer_end = layers;
      ++open_;
      rig_->executor().Gather(part, DType::kF32, 7,
                              staging_ + (layers - 1) * 90 *
                                             kv.bytes_per_position() /
                                             kv.num_layers,
                              [this](KvDigest digest) {
                                sum += digest;
                                Close();
                              });
    }
    void OnStepDone(uint64_t, absl::StatusOr<StepResult> result) override {
      EXPECT_TRUE(result.ok());
      Close();
    }
    KvDigest sum;
    Notification done;

   private:
    void Close() {
      if (--open_ == 0) done.Notify();
    }
    Rig* const rig_;
    TestSequence* const sequence_;
    std::byte* const staging_;
    int open_ = 1;
  };
  Gatherer gatherer(rig.get(), &sequence, staging.data());
  const Step step{.id = 5, .entries = {Entry(sequence, 0, 90)}};
  rig->loop().RunSync([&] { rig->executor().Submit(&step, &gatherer); });
  gatherer.done.WaitForNotification();
  EXPECT_EQ(gatherer.sum,
            rig->Digest(WholePart(sequence, shape, 0, 90), DType::kF32));
}

TEST_P(DeviceExecutorTest, StepsThatBreakALimitAreRefusedAndTouchNothing) {
  RigOptions options;
  options.executor.max_rows = 64;
  options.executor.max_sequences = 2;
  const auto rig = MakeRig(options);
  TestSequence s = rig->NewSequence(Prompt(64), 512);
  const std::vector<int32_t> wrong_ids = {1, 300};
  const std::vector<int32_t> negative_ids = {-1};
  const std::vector<kernels::LogitEdit> wrong_edit = {Ban(5), Ban(300)};
  const std::vector<kernels::LogitEdit> edits(301, Ban(1));
  const RowDraw edits_no_id[] = {{.edits = wrong_edit}};
  const RowDraw many_edits[] = {{.edits = edits}};
  const RowDraw given[] = {{.given = 300}};
  const std::vector<RowDraw> draws(2);
  const std::vector<RowDraw> many_draws(3);
  const std::vector<int32_t> far_block = {512};
  const std::vector<int32_t> many(65, 1);
  const std::vector<int32_t> blocks(33, 1);
  const StepEntry good = Entry(s, 0, 64, true);
  const auto with = [&](auto change) {
    StepEntry entry = good;
    change(entry);
    return std::vector<StepEntry>{entry};
  };
  const struct {
    const char* why;
    std::vector<StepEntry> entries;
    const char* complaint;
  } kSteps[] = {
      {"no entries", {}, "rows 0 is outside 1 to 64"},
      {"no tokens", with([](auto& e) { e.tokens = {}; }), "tokens 0"},
      {"too many rows", with([&](auto& e) { e.tokens = many; }), "rows 65"},
      {"too many entries",
       [&] {
         StepEntry e = good;
         e.tokens = e.tokens.subspan(0, 1);
         return std::vector<StepEntry>{e, e, e};
       }(),
       "entries 3 is outside 1 to 2"},
      {"negative position", with([](auto& e) { e.position = -1; }),
       "last position"},
      {"beyond the model", with([](auto& e) { e.position = 449; }),
       "last position 512"},
      {"huge position", with([](auto& e) { e.position = INT32_MAX; }),
       "last position"},
      {"an id beyond the vocabulary",
       with([&](auto& e) { e.tokens = wrong_ids; }),
       "token id 300 is outside 0 to 299"},
      {"a negative id", with([&](auto& e) { e.tokens = negative_ids; }),
       "token id -1"},
      {"a table too short",
       with([&](auto& e) { e.block_table = e.block_table.subspan(0, 3); }),
       "blocks 3 is outside 4 to 32"},
      {"a table too long", with([&](auto& e) { e.block_table = blocks; }),
       "blocks 33"},
      {"a block that is not there", with([&](auto& e) {
         e.tokens = e.tokens.subspan(0, 1);
         e.block_table = far_block;
       }),
       "block 512 is outside 0 to 511"},
      {"an edit of no id", with([&](auto& e) { e.draws = edits_no_id; }),
       "token id 300 is outside 0 to 299"},
      {"too many edits", with([&](auto& e) { e.draws = many_edits; }),
       "edits 301"},
      {"a given token of no id", with([&](auto& e) { e.draws = given; }),
       "given token id 300 is outside -1 to 299"},
      {"more draws than rows", with([&](auto& e) {
         e.tokens = e.tokens.subspan(0, 1);
         e.draws = draws;
       }),
       "draws 2 is outside 0 to 1"},
      {"too many draws", with([&](auto& e) { e.draws = many_draws; }),
       "draws 3 is outside 0 to 2"},
      {"too many logprobs", with([](auto& e) { e.sampling.logprobs = 21; }),
       "logprobs 21"}};
  for (const auto& [why, entries, complaint] : kSteps) {
    const StepOutput output = rig->Run({.id = 9, .entries = entries});
    EXPECT_EQ(output.status.code(), absl::StatusCode::kInvalidArgument) << why;
    EXPECT_THAT(std::string(output.status.message()), HasSubstr(complaint))
        << why;
    EXPECT_TRUE(output.layers_done.empty()) << why;
  }
  EXPECT_TRUE(rig->Run({.id = 10, .entries = {good}}).status.ok());
}

TEST_P(DeviceExecutorTest, AStoppedLoopEndsWorkInFlightQuietly) {
  auto rig = MakeRig();
  TestSequence s = rig->NewSequence(Prompt(200), 200);
  const Step step{.id = 1, .entries = {Entry(s, 0, 200)}};
  Recorder recorder(1);
  rig->loop().RunSync([&] { rig->executor().Submit(&step, &recorder); });
  rig.reset();  // stops the loop, then waits for the device
}

INSTANTIATE_TEST_SUITE_P(Backends, DeviceExecutorTest, testing::Bool(),
                         [](const auto& test) {
                           return std::string(test.param ? "Late" : "Cpu");
                         });

TEST(DeviceExecutorOptions, NonsenseIsRefused) {
  TempDir dir;
  WriteCheckpoint(LoadCases()["llama_f16"], dir);
  const auto backend = NewCpu(1);
  Rig rig(dir.path(), backend.get());
  for (const auto& change : std::vector<void (*)(DeviceExecutorOptions&)>{
           [](auto& o) { o.max_rows = 0; },
           [](auto& o) { o.max_sequences = 0; },
           [](auto& o) { o.max_sequences = o.max_rows + 1; },
           [](auto& o) { o.num_blocks = 0; },
           [](auto& o) { o.block_size = 12; },
           [](auto& o) { o.block_size = 0; },
           [](auto& o) { o.layers_per_group = -1; },
           [](auto& o) { o.group_bytes = -1; },
           [](auto& o) { o.kv_dtype = DType::kF16; }}) {
    DeviceExecutorOptions options{.num_blocks = 8};
    change(options);
    EXPECT_EQ(DeviceExecutor::Create(options, &rig.model(), backend.get(),
                                     &rig.loop())
                  .status()
                  .code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(MaskThreadsTest, EachIsMadeOnceHoweverManyHelp) {
  EXPECT_EQ(MaskThreads::HelpersFor(2), 0);
  EXPECT_GT(MaskThreads::HelpersFor(16), 2);
  for (const int helpers : {0, 1, 3}) {
    MaskThreads threads(helpers);
    for (int count = 0; count < 200; ++count) {
      std::vector<int> made(static_cast<size_t>(count), 0);
      threads.Run(count, [&](int i) { ++made[static_cast<size_t>(i)]; });
      EXPECT_EQ(made, std::vector<int>(static_cast<size_t>(count), 1));
    }
  }
}

}  // namespace
}  // namespace tandem::engine
