// SPDX-License-Identifier: Apache-2.0
// Attempts, from their ticket to their commit or end: the handoff between a
// decode and a prefill worker under a scripted router that retries, drops and
// misunderstands. Whatever happens, the tokens are those of an undisturbed run.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/simulation/parts.h"
#include "tests/worker/rig.h"

namespace tandem::worker {
namespace {

using absl::StatusCode;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr int kBytesPerPosition = 4 * 8;  // layers, and a word of each

// ---- Undisturbed

TEST(DecodeAttemptsTest, SplitGivesTheTokensOfTheModel) {
  const struct {
    int decode_block;
    int prefill_block;
  } sizes[] = {{16, 16}, {8, 16}, {16, 8}, {32, 4}};
  for (const auto& size : sizes) {
    SCOPED_TRACE(absl::StrCat(size.decode_block, " from ", size.prefill_block));
    Rig rig;
    DecodeMachine* const decode =
        rig.AddDecode("decode", {.block_size = size.decode_block,
                                 .num_blocks = 4096 / size.decode_block});
    PrefillMachine* const prefill =
        rig.AddPrefill("prefill", {.block_size = size.prefill_block,
                                   .num_blocks = 4096 / size.prefill_block});
    for (const int prompt : {1, 2, 15, 16, 17, 32, 47, 48, 49, 130, 200}) {
      rig.Split({.prompt = Prompt(prompt, prompt),
                 .max_tokens = 2 + prompt % 30,
                 .temperature = prompt % 2 == 0 ? 0 : 0.8f,
                 .bypass_prefix_cache = true},
                decode, prefill);
    }
    rig.RunUntilEnded();
    int prompt_tokens = 0;
    for (const auto& request : rig.requests) {
      request->ExpectAllRight();
      EXPECT_EQ(request->repeated, 1) << "both legs say the first token";
      EXPECT_EQ(request->opened.size(), 1u);
      EXPECT_THAT(request->started, ElementsAre(request->opened[0].attempt()));
      EXPECT_TRUE(request->dead.empty());
      ASSERT_TRUE(request->done.has_value());
      EXPECT_EQ(request->done->way(), "grpc");
      EXPECT_EQ(request->done->handoff_bytes() % kBytesPerPosition, 0);
      prompt_tokens +=
          static_cast<int>(request->done->handoff_bytes()) / kBytesPerPosition;
    }
    EXPECT_EQ(prompt_tokens, 1 + 2 + 15 + 16 + 17 + 32 + 47 + 48 + 49 + 330);
    EXPECT_EQ(decode->core->counters().commits, 11);
    EXPECT_EQ(decode->core->counters().attempts_dead, 0);
    rig.ExpectNothingLeft();
  }
}

TEST(DecodeAttemptsTest, TheFirstTokenWaitsForNoTransfer) {
  Rig rig;
  DecodeMachine* const decode =
      rig.AddDecode("decode", {.copy = absl::Milliseconds(200)});
  PrefillMachine* const prefill = rig.AddPrefill();
  Request* const request = rig.Split({.prompt = Prompt(100)}, decode, prefill);
  rig.RunUntil([&] { return request->tokens.size() == 1; });
  EXPECT_THAT(request->started, IsEmpty());
  EXPECT_FALSE(request->done.has_value());
  EXPECT_EQ(decode->core->counters().commits, 0);
  rig.RunUntilEnded();
  request->ExpectAllRight();
  EXPECT_GT(request->done->handoff_exposed_us(), 200'000);
  rig.ExpectNothingLeft();
}

// A pool that holds what one sequence sees at once, no more. What is cached of
// a prompt takes of that room too, and is given up where both do not fit.
TEST(DecodeAttemptsTest, ACachedPrefixFitsIntoTheSmallestPoolOfAWindow) {
  for (const int window : {16, 40, 64, 100}) {
    for (const bool split : {false, true}) {
      SCOPED_TRACE(absl::StrCat(window, split ? ", split" : ", local"));
      Rig rig(1, window);
      engine::EngineOptions engine;
      engine.max_num_batched_tokens = 32;
      engine.window = window;
      const int blocks =
          engine::Engine::BlocksAtOnce(engine, 16, simulation::kMaxModelLen);
      DecodeMachine* const decode =
          rig.AddDecode("decode", {.num_blocks = blocks},
                        [](decode_worker::DecodeOptions* options) {
                          options->engine.max_num_batched_tokens = 32;
                        });
      PrefillMachine* const prefill = rig.AddPrefill();
      for (const int prompt : {100, 112, 128, 150, 200, 220, 90}) {
        Job job{.prompt = Prompt(prompt), .max_tokens = 8};
        Request* const request =
            split ? rig.Split(job, decode, prefill) : rig.Local(job, decode);
        rig.RunUntilEnded();
        request->ExpectAllRight();
      }
      rig.ExpectNothingLeft();
    }
  }
}

// The same where the first layer sees all: both pools hold less than the
// longest prompt as a whole, and a prefill worker begins that once it is
// granted.
TEST(DecodeAttemptsTest, WithWindowsInSomeLayersAPoolHoldsLessThanAPrompt) {
  for (const int window : {16, 40, 64}) {
    for (const bool split : {false, true}) {
      SCOPED_TRACE(absl::StrCat(window, split ? ", split" : ", local"));
      Rig rig(1, window, /*full_layers=*/1);
      engine::EngineOptions engine;
      engine.max_num_batched_tokens = 32;
      engine.window = simulation::WindowOf(rig.model);
      const int blocks =
          engine::Engine::BlocksAtOnce(engine, 16, simulation::kMaxModelLen);
      ASSERT_LT(blocks, 220 / 16);
      DecodeMachine* const decode =
          rig.AddDecode("decode", {.num_blocks = blocks},
                        [](decode_worker::DecodeOptions* options) {
                          options->engine.max_num_batched_tokens = 32;
                        });
      PrefillMachine* const prefill =
          rig.AddPrefill("prefill", {.num_blocks = blocks},
                         [](prefill_worker::PrefillOptions* options) {
                           options->engine.max_num_batched_tokens = 32;
                         });
      for (const int prompt : {100, 112, 128, 150, 200, 220, 240, 90}) {
        Job job{.prompt = Prompt(prompt), .max_tokens = 8};
        Request* const request =
            split ? rig.Split(job, decode, prefill) : rig.Local(job, decode);
        rig.RunUntilEnded();
        request->ExpectAllRight();
      }
      rig.ExpectNothingLeft();
    }
  }
}

// One layer of all positions, three of those that the next one sees: from the
// beginning of a block on.
TEST(DecodeAttemptsTest, OfWindowedLayersWhatIsSeenIsHandedOver) {
  const struct {
    int prompt;
    int cached;
    int windowed_begin;
  } cases[] = {{200, 0, 160},    // of position 200 on, which sees 161 and on
               {30, 0, 0},       // less than the window
               {230, 176, 176},  // a longer one
               {230, 0, 176}};
  Rig rig(1, 40, /*full_layers=*/1);
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill = rig.AddPrefill();
  int seed = 0;
  for (const auto& c : cases) {
    SCOPED_TRACE(absl::StrCat(c.prompt, " of which ", c.cached));
    if (c.cached == 0) ++seed;
    const int of = c.cached > 0 ? 1 : seed;
    Request* const request =
        rig.Split({.prompt = Prompt(c.prompt, of)}, decode, prefill);
    rig.RunUntilEnded();
    request->ExpectAllRight();
    EXPECT_EQ(request->done->handoff_bytes(),
              8 * ((c.prompt - c.cached) + 3 * (c.prompt - c.windowed_begin)));
    EXPECT_EQ(request->finished->cached_tokens(), c.cached);
  }
  rig.ExpectNothingLeft();
}

// What came without its windowed parts is a prefix for whoever sees none of
// them: the rest of a longer prompt that begins alike, if that is longer than
// the window.
TEST(DecodeAttemptsTest, AHeadWithoutItsWindowsIsNotSentAgain) {
  Rig rig(1, 40, /*full_layers=*/1);
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill = rig.AddPrefill();
  const auto prompt = [](int own) {
    std::vector<int32_t> ids = Prompt(112);
    for (const int32_t id : Prompt(own, own)) ids.push_back(id);
    return ids;
  };
  int begin = 0;  // of what is sent of the first layer
  for (const int own : {100, 84, 20}) {
    Request* const request =
        rig.Split({.prompt = prompt(own)}, decode, prefill);
    rig.RunUntilEnded();
    request->ExpectAllRight();
    const int seen = (112 + own - 39) / 16 * 16;
    EXPECT_EQ(
        request->done->handoff_bytes(),
        8 * ((112 + own - std::min(begin, seen)) + 3 * (112 + own - seen)))
        << own;
    EXPECT_EQ(request->finished->cached_tokens(), std::min(begin, seen));
    begin = 112;
  }
  rig.ExpectNothingLeft();
}

// One of an earlier version, which sends whole blocks alone.
TEST(DecodeAttemptsTest, ASenderThatKnowsNoWindowsSendsAllOrIsRefused) {
  for (const int blocks : {16, 12}) {
    Rig rig(1, 40, /*full_layers=*/1);
    DecodeMachine* const decode =
        rig.AddDecode("decode", {.num_blocks = blocks});
    PrefillMachine* const prefill = rig.AddPrefill(
        "prefill", {}, [](prefill_worker::PrefillOptions* options) {
          options->sender.layers.windowed.clear();
        });
    Request* const request =
        rig.Split({.prompt = Prompt(200)}, decode, prefill);
    if (blocks == 16) {
      rig.RunUntilEnded();
      request->ExpectAllRight();
      EXPECT_EQ(request->done->handoff_bytes(), 200 * kBytesPerPosition);
    } else {
      rig.RunUntil([&] { return !request->dead.empty(); });
      EXPECT_EQ(request->dead[0].code(),
                static_cast<int>(StatusCode::kFailedPrecondition));
      EXPECT_THAT(request->dead[0].message(),
                  testing::HasSubstr("brings whole blocks, here 13 of 12"));
      request->DropDecode();
      rig.RunUntil([&] { return request->prefill_ended.has_value(); });
    }
    rig.ExpectNothingLeft();
  }
}

TEST(DecodeAttemptsTest, WhatTheDecodeWorkerHasCachedIsNotSent) {
  const struct {
    const char* why;
    int prompt;
    const char* salt;
    bool bypass;
    int decode_cached;
    int prefill_cached;
  } cases[] = {
      {"a longer prompt", 75, "", false, 64, 64},
      {"the same: all of it, and nothing is sent", 64, "", false, 64, 48},
      {"a shorter one", 40, "", false, 32, 32},
      {"another tenant", 64, "other", false, 0, 0},
      {"not wanted", 64, "", true, 0, 0},
  };
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 128});
  PrefillMachine* const prefill =
      rig.AddPrefill("prefill", {.num_blocks = 128});
  rig.Split({.prompt = Prompt(64)}, decode, prefill);
  rig.RunUntilEnded();
  rig.requests[0]->ExpectAllRight();
  EXPECT_EQ(rig.requests[0]->done->handoff_bytes(), 64 * kBytesPerPosition);
  for (const auto& c : cases) {
    SCOPED_TRACE(c.why);
    Request* const request = rig.Split({.prompt = Prompt(c.prompt),
                                        .bypass_prefix_cache = c.bypass,
                                        .cache_salt = c.salt},
                                       decode, prefill);
    rig.RunUntilEnded();
    request->ExpectAllRight();
    EXPECT_EQ(request->opened[0].cached_tokens(), c.decode_cached);
    EXPECT_EQ(request->finished->cached_tokens(), c.decode_cached);
    EXPECT_EQ(request->prefill_started->cached_tokens(), c.prefill_cached);
    EXPECT_EQ(request->done->handoff_bytes(),
              (c.prompt - c.decode_cached) * kBytesPerPosition);
  }
  rig.ExpectNothingLeft();
}

TEST(DecodeAttemptsTest, WhatOnlyThePrefillWorkerHasCachedIsSentToo) {
  Rig rig;
  DecodeMachine* const one = rig.AddDecode("one", {.block_size = 8});
  DecodeMachine* const two = rig.AddDecode("two");
  PrefillMachine* const prefill = rig.AddPrefill();
  for (DecodeMachine* const decode : {one, two}) {
    Request* const request =
        rig.Split({.prompt = Prompt(100)}, decode, prefill);
    rig.RunUntilEnded();
    request->ExpectAllRight();
    EXPECT_EQ(request->prefill_started->cached_tokens(),
              decode == two ? 96 : 0);
    EXPECT_EQ(request->done->handoff_bytes(), 100 * kBytesPerPosition);
  }
  rig.ExpectNothingLeft();
}

TEST(DecodeAttemptsTest, AFirstTokenThatFinishesNeedsNoCommit) {
  for (const bool stop : {false, true}) {
    Rig rig;
    DecodeMachine* const decode = rig.AddDecode();
    PrefillMachine* const prefill = rig.AddPrefill();
    Job job{.prompt = Prompt(100), .max_tokens = stop ? 20 : 1};
    const int32_t token = job.Expected()[0];
    if (stop) job.stop_token_ids = {token};
    Request* const request = rig.Split(job, decode, prefill);
    rig.RunUntil([&] { return request->prefill_ended.has_value(); });
    EXPECT_TRUE(request->prefill_ended->ok());
    EXPECT_THAT(request->tokens, ElementsAre(token));
    EXPECT_EQ(request->first->finish_reason(),
              stop ? v1::FINISH_REASON_STOP : v1::FINISH_REASON_LENGTH);
    EXPECT_EQ(request->first->stop_token_id(), stop ? token : -1);
    EXPECT_TRUE(request->done.has_value());
    EXPECT_EQ(decode->core->counters().commits, 0);
    rig.ExpectNothingLeft();
  }
}

// ---- What is lost is done again

TEST(DecodeAttemptsTest, APrefillWorkerLostAnywhereIsReplacedByAnother) {
  // Moments of an undisturbed run of about 45 ms before the commit.
  for (int at_ms = 0; at_ms < 90; at_ms += 3) {
    SCOPED_TRACE(at_ms);
    Rig rig;
    DecodeMachine* const decode =
        rig.AddDecode("decode", {.step = absl::Milliseconds(8)});
    PrefillMachine* const one =
        rig.AddPrefill("one", {.step = absl::Milliseconds(8)});
    PrefillMachine* const two = rig.AddPrefill("two");
    Request* const request =
        rig.Split({.prompt = Prompt(120), .max_tokens = 20}, decode, one);
    rig.Run(absl::Milliseconds(at_ms));
    rig.Crash(one);
    rig.RunUntil([&] { return !request->opened.empty(); });
    rig.Run(absl::Milliseconds(at_ms % 9));
    if (!request->decode_ended.has_value()) request->Retry(two);
    rig.RunUntilEnded();
    request->ExpectAllRight();
    EXPECT_EQ(decode->core->counters().commits, 1);
    rig.ExpectNothingLeft();
  }
}

TEST(DecodeAttemptsTest, ADeliveredFirstTokenIsNeverSampledAgain) {
  Rig rig;
  // The scatters are slow: the first token is out long before the commit.
  DecodeMachine* const decode =
      rig.AddDecode("decode", {.copy = absl::Milliseconds(100)});
  PrefillMachine* const one = rig.AddPrefill("one");
  PrefillMachine* const two = rig.AddPrefill("two");
  Request* const request = rig.Split(
      {.prompt = Prompt(64), .max_tokens = 10, .temperature = 1}, decode, one);
  rig.RunUntil([&] { return request->tokens.size() == 1; });
  rig.Crash(one);
  request->Retry(two);
  rig.RunUntilEnded();
  request->ExpectAllRight();
  EXPECT_EQ(request->repeated, 1) << "only the second first token, twice";
  EXPECT_EQ(request->first->position(), 65);
  EXPECT_THAT(request->started, ElementsAre(request->opened[1].attempt()));
  rig.ExpectNothingLeft();
}

TEST(DecodeAttemptsTest, ARetryOfACommittedAttemptIsAnsweredStarted) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const one = rig.AddPrefill("one");
  PrefillMachine* const two = rig.AddPrefill("two");
  Request* const request =
      rig.Split({.prompt = Prompt(64), .max_tokens = 30}, decode, one);
  rig.RunUntil([&] { return request->tokens.size() == 3; });
  const uint32_t attempt = request->opened[0].attempt();
  request->Retry(two);
  rig.RunUntilEnded();
  request->ExpectAllRight();
  EXPECT_THAT(request->started, ElementsAre(attempt, attempt));
  EXPECT_EQ(request->opened.size(), 1u);
  EXPECT_EQ(two->core->counters().calls, 0);
  rig.ExpectNothingLeft();
}

TEST(DecodeAttemptsTest, ARetryOfAnOlderAttemptIsNothing) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill = rig.AddPrefill();
  Request* const request = rig.NewRequest({.prompt = Prompt(64)});
  request->prefills = false;
  request->Decode(decode, prefill);
  rig.RunUntil([&] { return request->opened.size() == 1; });
  request->Retry(prefill);
  rig.RunUntil([&] { return request->opened.size() == 2; });
  request->Retry(prefill, request->opened[0].attempt());
  rig.Run(absl::Milliseconds(50));
  EXPECT_EQ(request->opened.size(), 2u);
  EXPECT_GT(request->opened[1].attempt(), request->opened[0].attempt());
  EXPECT_EQ(decode->Load().tickets(), 1);
  request->prefills = true;
  request->Prefill(prefill, request->opened[1]);
  rig.RunUntilEnded();
  request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(DecodeAttemptsTest, ATicketOfAnEndedAttemptIsDead) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill = rig.AddPrefill();
  Request* const request = rig.NewRequest({.prompt = Prompt(64)});
  request->prefills = false;
  request->Decode(decode, prefill);
  rig.RunUntil([&] { return request->opened.size() == 1; });
  request->Retry(prefill);
  rig.RunUntil([&] { return request->opened.size() == 2; });
  request->Prefill(prefill, request->opened[0]);
  rig.RunUntil([&] { return request->prefill_ended.has_value(); });
  EXPECT_EQ(request->prefill_ended->code(), StatusCode::kAborted);
  EXPECT_THAT(request->tokens, IsEmpty());
  EXPECT_TRUE(request->dead.empty()) << "the live attempt is not meant";
  request->Prefill(prefill, request->opened[1]);
  rig.RunUntilEnded();
  request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(DecodeAttemptsTest, ARetryMayEndInALocalPrefill) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill = rig.AddPrefill();
  Request* const request =
      rig.Split({.prompt = Prompt(120), .max_tokens = 20}, decode, prefill);
  rig.RunUntil([&] { return request->prefill_started.has_value(); });
  rig.Crash(prefill);
  request->Retry(nullptr);
  rig.RunUntilEnded();
  request->ExpectAllRight();
  EXPECT_EQ(decode->core->counters().attempts_local, 1);
  EXPECT_EQ(decode->core->counters().commits, 0);
  rig.ExpectNothingLeft();
}

TEST(DecodeAttemptsTest, ALostLinkIsReportedWithItsWayAndUnasked) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const one =
      rig.AddPrefill("one", {.step = absl::Milliseconds(300)});
  Request* const request = rig.Split({.prompt = Prompt(120)}, decode, one);
  rig.RunUntil([&] { return decode->Load().blocks_reserved() > 0; });
  rig.Crash(one);
  rig.RunUntil([&] { return !request->dead.empty(); });
  EXPECT_EQ(request->dead[0].attempt(), request->opened[0].attempt());
  EXPECT_EQ(request->dead[0].code(),
            static_cast<int>(StatusCode::kUnavailable));
  EXPECT_EQ(request->dead[0].failed_way(), "grpc");
  EXPECT_FALSE(request->dead[0].preempted());
  EXPECT_EQ(decode->Load().blocks_reserved(), 0);
  EXPECT_EQ(decode->Load().tickets(), 0);
  request->Retry(nullptr);
  rig.RunUntilEnded();
  request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

// Its router is about to open its next attempt.
TEST(DecodeAttemptsTest, WhoseAttemptDiedIsStillExpected) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 20});
  PrefillMachine* const slow =
      rig.AddPrefill("slow", {.step = absl::Milliseconds(300)});
  Request* const one = rig.Split({.prompt = Prompt(100, 1)}, decode, slow);
  // What is granted counts as used, and no more as expected.
  rig.RunUntil([&] { return decode->Load().blocks_reserved() > 0; });
  Request* const two = rig.Split({.prompt = Prompt(100, 2)}, decode, slow);
  rig.Run(absl::Milliseconds(20));
  ASSERT_FALSE(two->decode_ended.has_value());
  rig.Crash(slow);
  rig.RunUntil([&] { return !one->dead.empty() && !two->dead.empty(); });
  EXPECT_EQ(decode->Load().blocks_reserved(), 0);
  Request* const third = rig.Local({.prompt = Prompt(100, 3)}, decode);
  rig.RunUntil([&] { return third->decode_ended.has_value(); });
  EXPECT_EQ(third->reason(), "NO_BLOCKS");
  for (Request* const request : {one, two}) request->Retry(nullptr);
  rig.RunUntilEnded();
  one->ExpectAllRight();
  two->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(DecodeAttemptsTest, AFrozenPrefillWorkerCostsALinkAndNoBlock) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const one =
      rig.AddPrefill("one", {.step = absl::Milliseconds(300)});
  PrefillMachine* const two = rig.AddPrefill("two");
  Request* const request = rig.Split({.prompt = Prompt(120)}, decode, one);
  rig.RunUntil([&] { return decode->Load().blocks_reserved() > 0; });
  one->host->loop.Freeze();
  rig.RunUntil([&] { return !request->dead.empty(); }, absl::Seconds(10));
  EXPECT_EQ(decode->Load().blocks_reserved(), 0);
  request->Retry(two);
  rig.RunUntilEnded();
  request->ExpectAllRight();
  one->host->loop.Thaw();  // and says what it had to say: nobody minds
  rig.ExpectNothingLeft();
}

// ---- Too few blocks

// Two that grow where only one fits: the younger gives way.
void Preempt(int local_recompute_tokens, bool retries, Rig* rig) {
  DecodeMachine* const decode =
      rig->AddDecode("decode", {.num_blocks = 20}, [&](auto* o) {
        AdmitByBlocks(o);
        o->local_recompute_tokens = local_recompute_tokens;
      });
  PrefillMachine* const prefill = rig->AddPrefill();
  rig->Split({.prompt = Prompt(120, 1), .max_tokens = 120}, decode, prefill);
  rig->Run(absl::Milliseconds(5));
  Request* const younger = rig->Split(
      {.prompt = Prompt(120, 2), .max_tokens = 120}, decode, prefill);
  younger->retries = retries;
  rig->RunUntilEnded();
  for (const auto& request : rig->requests) request->ExpectAllRight();
  EXPECT_GT(decode->core->engine_stats().preemptions, 0);
  EXPECT_EQ(rig->requests[0]->finished->preemptions(), 0);
  // Each is told once: at the end, or when the router is asked for an attempt.
  EXPECT_EQ(younger->finished->preemptions() +
                static_cast<int64_t>(younger->dead.size()),
            decode->core->engine_stats().preemptions);
}

TEST(DecodeAttemptsTest, AShortPreemptedSequenceIsComputedAgainHere) {
  Rig rig;
  Preempt(/*local_recompute_tokens=*/256, /*retries=*/false, &rig);
  EXPECT_TRUE(rig.requests[1]->dead.empty());
  EXPECT_EQ(rig.requests[1]->opened.size(), 1u);
  rig.ExpectNothingLeft();
}

TEST(DecodeAttemptsTest, ALongPreemptedSequenceAsksForAnAttempt) {
  Rig rig;
  Preempt(/*local_recompute_tokens=*/16, /*retries=*/true, &rig);
  const Request& younger = *rig.requests[1];
  ASSERT_FALSE(younger.dead.empty());
  EXPECT_TRUE(younger.dead[0].preempted());
  EXPECT_EQ(younger.opened.size(), younger.dead.size() + 1);
  // All its tokens were there before `dead`.
  EXPECT_EQ(younger.story.find("DT"), std::string::npos);
  rig.ExpectNothingLeft();
}

TEST(DecodeAttemptsTest, ARetryThatCrossedCommitAndPreemptionIsNoMistake) {
  // The router loses sight of the prefill worker just before it would hear
  // that the attempt committed, was decoded, and was preempted. Its retry
  // holds fewer tokens than the worker has said meanwhile.
  Rig rig;
  DecodeMachine* const decode =
      rig.AddDecode("decode", {.num_blocks = 20}, [&](auto* o) {
        AdmitByBlocks(o);
        o->local_recompute_tokens = 16;
      });
  PrefillMachine* const prefill = rig.AddPrefill();
  rig.Split({.prompt = Prompt(120, 1), .max_tokens = 120}, decode, prefill);
  rig.Run(absl::Milliseconds(5));
  Request* const younger =
      rig.Split({.prompt = Prompt(120, 2), .max_tokens = 120}, decode, prefill);
  rig.RunUntil([&] { return younger->first.has_value(); });
  younger->PauseReading(true);
  rig.RunUntil([&] { return decode->core->engine_stats().preemptions > 0; });
  younger->Retry(prefill);
  rig.Run(absl::Milliseconds(20));
  younger->retries = true;
  younger->PauseReading(false);
  rig.RunUntilEnded();
  for (const auto& request : rig.requests) request->ExpectAllRight();
  EXPECT_FALSE(younger->dead.empty());
  rig.ExpectNothingLeft();
}

TEST(DecodeAttemptsTest, PreemptionsAreBounded) {
  int needed = 0;  // found out first
  for (const int allowed : {16, 0, -1}) {
    Rig rig;
    DecodeMachine* const decode =
        rig.AddDecode("decode", {.num_blocks = 20}, [&](auto* o) {
          AdmitByBlocks(o);
          o->max_preemptions = allowed == 16 ? 16 : needed + allowed;
        });
    rig.Local({.prompt = Prompt(120, 1), .max_tokens = 120}, decode);
    rig.Run(absl::Milliseconds(5));
    Request* const younger =
        rig.Local({.prompt = Prompt(120, 2), .max_tokens = 120}, decode);
    rig.RunUntilEnded();
    rig.requests[0]->ExpectAllRight();
    if (allowed >= 0) {
      younger->ExpectAllRight();
      needed = younger->finished->preemptions();
      EXPECT_GT(needed, 0);
    } else {
      EXPECT_EQ(younger->decode_ended->code(), StatusCode::kResourceExhausted);
      EXPECT_EQ(younger->reason(), "PREEMPTED");
    }
    rig.ExpectNothingLeft();
  }
}

// ---- Liveness

TEST(DecodeLivenessTest, WorkThatDoesNotAdvanceIsSeen) {
  const struct {
    const char* swallows;  // empty: all free blocks are lost
    bool split;
  } wedges[] = {
      {"step", false},  {"step", true}, {"scatter", true},
      {"digest", true}, {"", false},    {"", true},
  };
  for (const auto& wedge : wedges) {
    SCOPED_TRACE(absl::StrCat("'", wedge.swallows, "' ", wedge.split));
    Rig rig;
    DecodeMachine* const decode =
        rig.AddDecode("decode", {}, [](decode_worker::DecodeOptions* options) {
          options->admission_factor = 9;  // lost blocks count as used
        });
    PrefillMachine* const prefill = rig.AddPrefill();
    std::vector<engine::BlockRef> lost;
    Pulse pulse(decode);
    const auto ask = [&] {
      rig.Split({.prompt = Prompt(100)}, decode,
                wedge.split ? prefill : nullptr);
    };
    ask();
    rig.RunUntilEnded();
    rig.Run(absl::Seconds(60));  // idle
    EXPECT_TRUE(pulse.always_lived());
    decode->log->swallows = wedge.swallows;
    if (*wedge.swallows == '\0') {
      lost = decode->pool->Allocate(decode->pool->available());
    }
    ask();
    rig.Run(Pulse::kLimit - absl::Seconds(1));
    EXPECT_TRUE(pulse.lives());
    rig.Run(absl::Seconds(4));
    EXPECT_FALSE(pulse.lives());
  }
}

TEST(DecodeLivenessTest, ASequenceThatFindsNoBlockIsSeen) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  Pulse pulse(decode);
  rig.Local({.prompt = Prompt(100), .max_tokens = 100}, decode);
  rig.RunUntil([&] { return rig.requests[0]->tokens.size() > 3; });
  const auto lost = decode->pool->Allocate(decode->pool->available());
  rig.Run(Pulse::kLimit + absl::Seconds(4));
  EXPECT_EQ(decode->core->engine_stats().running, 1);
  EXPECT_FALSE(pulse.lives());
}

TEST(DecodeLivenessTest, SlowStepsAreHealthy) {
  Rig rig;
  // Four layers.
  DecodeMachine* const decode =
      rig.AddDecode("decode", {.step = Pulse::kLimit * 2});
  Pulse pulse(decode);
  rig.Local({.prompt = Prompt(100), .max_tokens = 4}, decode);
  rig.Run(absl::Seconds(150));
  rig.requests[0]->ExpectAllRight();
  EXPECT_TRUE(pulse.always_lived());
}

TEST(DecodeLivenessTest, WhoWaitsForOthersIsHealthy) {
  Rig rig;
  DecodeMachine* const decode =
      rig.AddDecode("decode", {.num_blocks = simulation::kLeastBlocks},
                    [](decode_worker::DecodeOptions* options) {
                      options->stall_limit = absl::InfiniteDuration();
                      options->admission_factor = 9;
                    });
  PrefillMachine* const slow =
      rig.AddPrefill("slow", {.step = absl::Seconds(400)});
  Pulse pulse(decode);
  const absl::Duration long_time = Pulse::kLimit * 4;

  // A prefill worker that is not heard of, and one that takes its time, in
  // whose blocks a local prompt does not fit.
  Request* const silent = rig.NewRequest({.prompt = Prompt(50)});
  silent->prefills = false;
  silent->Decode(decode, slow);
  Request* const granted = rig.Split({.prompt = Prompt(240)}, decode, slow);
  rig.RunUntil([&] { return decode->Load().blocks_reserved() == 15; });
  Request* const waiting = rig.Local({.prompt = Prompt(245, 1)}, decode);
  rig.Run(long_time);
  EXPECT_EQ(decode->Load().running(), 0);
  EXPECT_EQ(waiting->story, "O");
  silent->DropDecode();
  granted->DropDecode();
  rig.Crash(slow);
  rig.RunUntil([&] { return waiting->finished.has_value(); });

  // A reader that takes nothing: likewise.
  Request* const unread =
      rig.Local({.prompt = Prompt(170, 2), .max_tokens = 80}, decode);
  unread->PauseReading(true);
  rig.RunUntil([&] { return decode->core->engine_stats().paused == 1; });
  Request* const behind = rig.Local({.prompt = Prompt(245, 3)}, decode);
  rig.Run(long_time);
  EXPECT_EQ(behind->story, "O");
  unread->PauseReading(false);
  rig.RunUntil([&] {
    return unread->finished.has_value() && behind->finished.has_value();
  });
  EXPECT_TRUE(pulse.always_lived());
  rig.ExpectNothingLeft();
}

}  // namespace
}  // namespace tandem::worker
