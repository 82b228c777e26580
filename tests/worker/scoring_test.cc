// SPDX-License-Identifier: Apache-2.0
// Prompts that workers score, for themselves and before a handoff: every score
// is compared on arrival.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/simulation/parts.h"
#include "tests/worker/rig.h"
#include "worker/convert.h"

namespace tandem::worker {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

Request* Scored(Rig* rig, Job job, int alternatives = 2) {
  Request* const request = rig->NewRequest(std::move(job));
  request->scoring = alternatives;
  return request;
}

TEST(WorkerScoringTest, SplitAndLocalGiveTheSameScoresAndTokens) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 256});
  PrefillMachine* const prefill = rig.AddPrefill("prefill");
  for (const int prompt : {2, 16, 17, 49, 100}) {
    for (PrefillMachine* const by :
         {prefill, static_cast<PrefillMachine*>(nullptr)}) {
      Request* const request =
          Scored(&rig, {.prompt = Prompt(prompt, prompt), .temperature = 0.7f},
                 prompt % 5);
      request->Decode(decode, by);
      rig.RunUntilEnded();
      request->ExpectAllRight();
      EXPECT_EQ(request->scores, prompt - 1);
    }
  }
  rig.ExpectNothingLeft();
}

TEST(WorkerScoringTest, WhatIsCachedIsComputedAllTheSame) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 256});
  PrefillMachine* const prefill = rig.AddPrefill("prefill");
  for (PrefillMachine* const by :
       {prefill, static_cast<PrefillMachine*>(nullptr)}) {
    for (const bool again : {false, true}) {
      Request* const request = Scored(&rig, {.prompt = Prompt(80)});
      request->Decode(decode, by);
      rig.RunUntilEnded();
      request->ExpectAllRight();
      EXPECT_EQ(request->scores, 79) << again;
      if (by != nullptr) {
        EXPECT_EQ(request->prefill_started->cached_tokens(), 0);
        // The decode worker has no use for what it has already.
        EXPECT_EQ(request->done->handoff_bytes() == 0, again);
      } else {
        EXPECT_EQ(request->opened[0].cached_tokens(), 0);
        EXPECT_EQ(request->finished->cached_tokens(), 0);
      }
    }
  }
  // Others find what it computed.
  Request* const plain = rig.Local({.prompt = Prompt(80)}, decode);
  rig.RunUntilEnded();
  EXPECT_EQ(plain->finished->cached_tokens(), 64);
  rig.ExpectNothingLeft();
}

TEST(WorkerScoringTest, ScoresThatWereToldAreLeftOut) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 256});
  PrefillMachine* const prefill = rig.AddPrefill("prefill");
  for (PrefillMachine* const by :
       {prefill, static_cast<PrefillMachine*>(nullptr)}) {
    Request* const request = Scored(&rig, {.prompt = Prompt(80)});
    request->scores = 40;
    request->Decode(decode, by);
    rig.RunUntilEnded();
    request->ExpectAllRight();
    EXPECT_EQ(request->scores, 79);
  }
  // Two blocks of 16 lie before the row that scores position 41.
  EXPECT_EQ(rig.requests[1]->finished->cached_tokens(), 32);
  rig.ExpectNothingLeft();
}

TEST(WorkerScoringTest, OnlyScoresTakeNoDecodeWorker) {
  Rig rig;
  PrefillMachine* const prefill = rig.AddPrefill("prefill");
  Request* const request =
      Scored(&rig, {.prompt = Prompt(100), .max_tokens = 0});
  v1::AttemptOpened attempt;
  attempt.set_attempt(5);
  request->Prefill(prefill, attempt);
  rig.RunUntil([&] { return request->prefill_ended.has_value(); });
  EXPECT_TRUE(request->prefill_ended->ok()) << *request->prefill_ended;
  EXPECT_EQ(request->scores, 99);
  EXPECT_FALSE(request->first.has_value());
  ASSERT_TRUE(request->done.has_value());
  EXPECT_GT(request->done->prefill_us(), 0);
  EXPECT_EQ(request->done->handoff_bytes(), 0);
  EXPECT_EQ(request->done->work().positions_computed(), 99);
  rig.ExpectNothingLeft();
}

TEST(WorkerScoringTest, OnlyScoresOfADecodeWorker) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  Request* const request = Scored(
      &rig, {.prompt = Prompt(simulation::kMaxModelLen), .max_tokens = 0});
  request->Decode(decode, nullptr);
  rig.RunUntilEnded();
  EXPECT_TRUE(request->decode_ended->ok()) << *request->decode_ended;
  EXPECT_EQ(request->scores, simulation::kMaxModelLen - 1);
  EXPECT_EQ(request->finished->reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_GT(request->finished->local_prefill_us(), 0);
  EXPECT_THAT(request->story, ::testing::EndsWith("PSF"));
  rig.ExpectNothingLeft();
}

TEST(WorkerScoringTest, APromptThatFillsThePoolHoldsUpNobody) {
  for (const bool split : {false, true}) {
    Rig rig;
    const int blocks = simulation::kMaxModelLen / 16;
    DecodeMachine* const decode =
        rig.AddDecode("decode", {.num_blocks = blocks});
    PrefillMachine* const prefill =
        rig.AddPrefill("prefill", {.num_blocks = blocks});
    Request* const request = Scored(
        &rig, {.prompt = Prompt(simulation::kMaxModelLen), .max_tokens = 0});
    if (split) {
      v1::AttemptOpened attempt;
      attempt.set_attempt(5);
      request->Prefill(prefill, attempt);
      rig.RunUntil([&] { return request->prefill_ended.has_value(); });
      EXPECT_TRUE(request->prefill_ended->ok()) << *request->prefill_ended;
    } else {
      request->Decode(decode, nullptr);
    }
    Request* const other = rig.Local({.prompt = Prompt(20)}, decode);
    rig.RunUntil([&] {
      return other->decode_ended.has_value() &&
             (split || request->decode_ended.has_value());
    });
    EXPECT_EQ(request->scores, simulation::kMaxModelLen - 1) << split;
    other->ExpectAllRight();
    rig.ExpectNothingLeft();
  }
}

TEST(WorkerScoringTest, MessagesAreBounded) {
  Rig rig;
  PrefillMachine* const prefill = rig.AddPrefill(
      "prefill", {.num_blocks = 64}, [](prefill_worker::PrefillOptions* o) {
        o->engine.max_num_batched_tokens = 1024;
        o->engine.max_draws = 1024;
        o->engine.max_model_len = 1024;
      });
  Request* const request =
      Scored(&rig, {.prompt = Prompt(900), .max_tokens = 0}, 20);
  v1::AttemptOpened attempt;
  attempt.set_attempt(5);
  request->Prefill(prefill, attempt);
  rig.RunUntil([&] { return request->prefill_ended.has_value(); });
  EXPECT_EQ(request->scores, 899);
  EXPECT_EQ(request->most_scores, static_cast<int>(kTokensPerMessage));
  rig.ExpectNothingLeft();
}

TEST(WorkerScoringTest, APreemptedPromptGoesOnWithItsScores) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode(
      "decode", {.num_blocks = 18}, [](decode_worker::DecodeOptions* options) {
        options->admission_factor = 2;
        options->engine.max_num_seqs = 4;  // two rows a step
      });
  // The older ones grow into the blocks of the one that is scored.
  std::vector<Request*> others;
  for (int i = 0; i < 2; ++i) {
    others.push_back(rig.Local(
        {.prompt = Prompt(36, i), .max_tokens = 90, .age = absl::Seconds(9)},
        decode));
  }
  rig.Run(absl::Milliseconds(10));
  Request* const request =
      Scored(&rig, {.prompt = Prompt(150, 7), .max_tokens = 0});
  request->Decode(decode, nullptr);
  rig.RunUntilEnded();
  ASSERT_TRUE(request->decode_ended->ok()) << *request->decode_ended;
  EXPECT_EQ(request->scores, 149);
  EXPECT_GT(request->finished->preemptions(), 0);
  for (Request* const other : others) other->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(WorkerScoringTest, ALostPrefillIsScoredFromWhereItWasHeard) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 256});
  PrefillMachine* const first = rig.AddPrefill("first");
  PrefillMachine* const second = rig.AddPrefill("second");
  for (PrefillMachine* const next :
       {second, static_cast<PrefillMachine*>(nullptr)}) {
    Request* const request = Scored(&rig, {.prompt = Prompt(150)});
    request->Decode(decode, first);
    rig.RunUntil([&] { return request->scores > 20; });
    request->Retry(next);
    rig.RunUntilEnded();
    request->ExpectAllRight();
    EXPECT_EQ(request->scores, 149);
  }
  rig.ExpectNothingLeft();
}

TEST(WorkerScoringTest, WhatIsWhollyScoredIsNotScoredAgain) {
  Rig rig;
  // The scatters are slow: the first token is out long before the commit.
  DecodeMachine* const decode =
      rig.AddDecode("decode", {.copy = absl::Milliseconds(100)});
  PrefillMachine* const prefill = rig.AddPrefill("prefill");
  Request* const request = Scored(&rig, {.prompt = Prompt(150)});
  request->Decode(decode, prefill);
  rig.RunUntil([&] { return request->tokens.size() == 1; });
  EXPECT_EQ(request->scores, 149);
  request->Retry(nullptr);
  rig.RunUntilEnded();
  request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(WorkerScoringTest, ASlowReaderPausesItsPromptAndFailsAtLast) {
  // A router that says that it waits for its client may do so for longer.
  for (const auto& [goes_on, says_so] :
       {std::pair(true, false), {false, false}, {true, true}}) {
    Rig rig;
    PrefillMachine* const prefill = rig.AddPrefill(
        "prefill", {}, [](prefill_worker::PrefillOptions* options) {
          options->max_unsent = 2;
          options->stall_limit = absl::Seconds(3);
          options->engine.max_model_len = 1024;  // in steps of eight rows
        });
    Request* const request =
        Scored(&rig, {.prompt = Prompt(900), .max_tokens = 0}, 20);
    v1::AttemptOpened attempt;
    attempt.set_attempt(5);
    request->Prefill(prefill, attempt);
    rig.RunUntil([&] { return request->scores > 0; });
    request->PausePrefill(true);
    request->says_not_reading = says_so;
    rig.Run(absl::Seconds(says_so ? 20 : 2));
    EXPECT_EQ(prefill->core->Load().running(), 1);
    const int64_t steps = prefill->device->steps();
    // The network's window, max_unsent, and the step under way.
    EXPECT_LT(steps, 40);
    rig.Run(absl::Milliseconds(500));
    EXPECT_EQ(prefill->device->steps(), steps) << "it still computes";
    if (goes_on) {
      request->PausePrefill(false);
    } else {
      rig.Run(absl::Seconds(3));
      request->PausePrefill(false);
    }
    rig.RunUntil([&] { return request->prefill_ended.has_value(); });
    if (goes_on) {
      EXPECT_TRUE(request->prefill_ended->ok()) << *request->prefill_ended;
      EXPECT_EQ(request->scores, 899);
    } else {
      EXPECT_EQ(request->prefill_reason(), "SLOW_READER");
    }
    rig.ExpectNothingLeft();
  }
}

TEST(WorkerScoringTest, WhatMakesNoSenseIsRefused) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill = rig.AddPrefill();
  const struct {
    const char* complaint;
    int alternatives, position, max_tokens;
    bool output;
  } kCases[] = {
      {"scoring.alternatives is 21", 21, 1, 4, false},
      {"scoring.alternatives is -1", -1, 1, 4, false},
      {"scoring.position is 0", 0, 0, 4, false},
      {"scoring.position is 30", 0, 30, 4, false},
      {"excludes output_token_ids", 0, 1, 4, true},
      {"nothing is handed over", 0, 1, 0, false},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.complaint);
    const Job job{.prompt = Prompt(30), .max_tokens = c.max_tokens};
    const auto ask = [&](auto* open) {
      open->mutable_scoring()->set_alternatives(c.alternatives);
      open->mutable_scoring()->set_position(c.position);
      if (c.output) open->add_output_token_ids(12);
    };
    Request* const local = rig.NewRequest(job);
    ask(&local->tweak_open);
    local->Decode(decode, c.max_tokens == 0 ? prefill : nullptr);
    Request* const split = rig.NewRequest(job);
    ask(&split->tweak_prefill);
    split->Listen(decode);
    v1::AttemptOpened attempt;
    attempt.set_attempt(5);
    split->Prefill(prefill, attempt);
    rig.RunUntil([&] {
      return local->decode_ended.has_value() &&
             split->prefill_ended.has_value();
    });
    for (const absl::Status& status :
         {*local->decode_ended, *split->prefill_ended}) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()), HasSubstr(c.complaint));
    }
  }
  // Nothing asked for but nothing: not without scores.
  Request* const nothing =
      rig.NewRequest({.prompt = Prompt(30), .max_tokens = 0});
  nothing->Decode(decode, nullptr);
  rig.RunUntil([&] { return nothing->decode_ended.has_value(); });
  EXPECT_THAT(std::string(nothing->decode_ended->message()),
              HasSubstr("max_tokens is 0"));
  rig.ExpectNothingLeft();
}

}  // namespace
}  // namespace tandem::worker
