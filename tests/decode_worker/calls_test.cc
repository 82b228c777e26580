// SPDX-License-Identifier: Apache-2.0
// The decode worker's calls: whom it admits, how it prefills by itself, how
// slow readers, silent routers, deadlines and drains end, and what becomes of
// the blocks. Handoffs are in attempts_test.cc.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/testing/noisy_drafter.h"
#include "tests/simulation/parts.h"
#include "tests/worker/rig.h"

namespace tandem::worker {
namespace {

using absl::StatusCode;
using testing::SizeIs;

TEST(DecodeCallsTest, TheShortWayGivesTheTokensOfTheModel) {
  const struct {
    int prompt;
    int max_tokens;
    float temperature;
  } cases[] = {{1, 1, 0},   {1, 40, 0.7f}, {15, 5, 0},     {16, 5, 0},
               {17, 5, 0},  {100, 60, 1},  {255, 1, 0.5f}, {200, 56, 0},
               {47, 17, 0}, {48, 17, 0},   {49, 17, 0}};
  for (const int block_size : {8, 16}) {
    Rig rig;
    DecodeMachine* const decode = rig.AddDecode(
        "decode", {.block_size = block_size, .num_blocks = 2048 / block_size});
    for (const auto& c : cases) {
      rig.Local({.prompt = Prompt(c.prompt, c.prompt),
                 .max_tokens = c.max_tokens,
                 .temperature = c.temperature},
                decode);
    }
    rig.RunUntilEnded();
    for (const auto& request : rig.requests) {
      request->ExpectAllRight();
      EXPECT_EQ(request->repeated, 0);
      EXPECT_EQ(request->story.substr(0, 3), "OST");
      EXPECT_EQ(request->finished->reason(), v1::FINISH_REASON_LENGTH);
    }
    EXPECT_EQ(decode->core->counters().attempts_local, 11);
    EXPECT_EQ(decode->core->counters().finished, 11);
    rig.ExpectNothingLeft();
  }
}

// g p + g (g - 1) / 2 positions and, with a cache, p + g - 1.
int64_t PositionsOf(int prompt, int output, bool cached) {
  return cached ? prompt + output - 1
                : output * prompt + output * (output - 1) / 2;
}

TEST(DecodeCallsTest, WithoutAKvCacheTheTokensAreTheSameAndTheWorkIsNot) {
  for (const bool flag : {false, true}) {  // of the worker, or of the request
    Rig rig;
    DecodeMachine* const decode =
        rig.AddDecode("decode", {.num_blocks = 128},
                      [&](decode_worker::DecodeOptions* options) {
                        options->kv_cache = !flag;
                      });
    PrefillMachine* const prefill = rig.AddPrefill("prefill");
    std::vector<Request*> local, split;
    for (const int prompt : {1, 16, 33, 100}) {
      for (auto* const requests : {&local, &split}) {
        Request* const request =
            rig.NewRequest({.prompt = Prompt(prompt, prompt),
                            .max_tokens = 9,
                            .temperature = 0.7f});
        request->tweak_open.set_no_kv_cache(!flag);
        request->tweak_open.mutable_sampling()->set_report_work(true);
        request->tweak_prefill.mutable_sampling()->set_report_work(true);
        request->Decode(decode, requests == &split ? prefill : nullptr);
        requests->push_back(request);
      }
    }
    rig.RunUntilEnded();
    size_t i = 0;
    for (const int prompt : {1, 16, 33, 100}) {
      const v1::Work& alone = local[i]->finished->work();
      EXPECT_EQ(alone.positions_computed(), PositionsOf(prompt, 9, false));
      // The prefill worker's one pass, and what was handed over not used.
      ASSERT_TRUE(split[i]->done.has_value());
      EXPECT_EQ(split[i]->done->work().positions_computed(), prompt);
      EXPECT_EQ(split[i]->finished->work().positions_computed(),
                PositionsOf(prompt, 9, false) - prompt);
      // With every token, what was done by then.
      EXPECT_EQ(split[i]->first->work().positions_computed(), prompt);
      ASSERT_EQ(local[i]->works.size(), 9u);
      for (int n = 1; n <= 9; ++n) {
        EXPECT_EQ(local[i]->works[n - 1].positions_computed(),
                  PositionsOf(prompt, n, false));
      }
      local[i]->ExpectAllRight();
      split[i]->ExpectAllRight();
      ++i;
    }
    EXPECT_EQ(decode->core->Load().blocks_cached(), 0);
    rig.ExpectNothingLeft();
  }
}

// With a window the pool may be smaller than the longest sequence.
TEST(DecodeCallsTest, WhatNeverFitsWithoutACacheIsRefusedAndStopsNobody) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode(
      "decode", {.num_blocks = 8}, [](decode_worker::DecodeOptions* options) {
        options->engine.window = 16;
      });
  std::vector<Request*> requests;
  for (const int max_tokens : {29, 100, 28}) {
    Request* const request =
        rig.NewRequest({.prompt = Prompt(100), .max_tokens = max_tokens});
    request->tweak_open.set_no_kv_cache(true);
    request->Decode(decode, nullptr);
    requests.push_back(request);
  }
  rig.RunUntilEnded();
  for (Request* const refused : {requests[0], requests[1]}) {
    EXPECT_EQ(refused->reason(), "CONTEXT_LENGTH_EXCEEDED");
    EXPECT_EQ(refused->decode_ended->code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(refused->story, "");
  }
  requests[2]->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, APreemptedSequenceTellsOfAllThatItComputed) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode(
      "decode", {.num_blocks = 17}, [](decode_worker::DecodeOptions* options) {
        options->admission_factor = 16;
      });
  for (int i = 0; i < 3; ++i) {
    rig.Local({.prompt = Prompt(60, i),
               .max_tokens = 60,
               .bypass_prefix_cache = true},
              decode);
  }
  rig.RunUntilEnded();
  int64_t again = 0;
  for (const auto& request : rig.requests) {
    request->ExpectAllRight();
    // Times are those of the first stay, however many came after it.
    EXPECT_GT(request->finished->local_prefill_us(), 0);
    EXPECT_GT(request->finished->decode_us(),
              request->finished->local_queue_us());
    const int64_t computed = request->finished->work().positions_computed();
    EXPECT_GE(computed, PositionsOf(60, 60, true));
    EXPECT_EQ(request->finished->preemptions() > 0,
              computed > PositionsOf(60, 60, true));
    again += computed - PositionsOf(60, 60, true);
  }
  EXPECT_GT(again, 0) << "nobody was preempted";
  // Every row that the device ran belongs to somebody.
  EXPECT_EQ(again, decode->device->rows() - 3 * PositionsOf(60, 60, true));
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, APreemptedSequenceTellsOfAllItsGuesses) {
  engine::NoisyDrafters drafters(simulation::Model(), /*seed=*/1);
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode(
      "decode", {.num_blocks = 17}, [&](decode_worker::DecodeOptions* options) {
        options->admission_factor = 16;
        options->engine.speculation = {.num_tokens = 4, .drafters = &drafters};
      });
  for (int i = 0; i < 3; ++i) {
    rig.Local({.prompt = Prompt(60, i), .max_tokens = 60}, decode);
  }
  rig.RunUntilEnded();
  int preemptions = 0;
  engine::DraftCounts told;
  for (const auto& request : rig.requests) {
    request->ExpectAllRight();
    preemptions += request->finished->preemptions();
    told.verified += request->finished->draft_tokens();
    told.accepted += request->finished->accepted_draft_tokens();
  }
  EXPECT_GT(preemptions, 0);
  EXPECT_GT(told.accepted, 0);
  const engine::DraftCounts& all = decode->core->engine_stats().drafts;
  EXPECT_EQ(told.verified, all.verified);
  EXPECT_EQ(told.accepted, all.accepted);
  rig.ExpectNothingLeft();
}

void AskForGrammar(v1::DecodeOpen* open) {
  open->mutable_sampling()->mutable_structured()->mutable_options()->set_regex(
      "x");
}

// Routers take a worker for lost that does not answer for 4 s.
TEST(DecodeCallsTest, AGrammarThatIsNotCompiledInTimeIsRefused) {
  StuckGrammars stuck;
  Rig rig;
  DecodeMachine* const decode =
      rig.AddDecode("decode", {}, [&](decode_worker::DecodeOptions* options) {
        options->grammars = &stuck;
      });
  const auto ask = [&] {
    Request* const request = rig.NewRequest({.prompt = Prompt(40)});
    request->tweak_open.set_cache_salt("tenant");
    AskForGrammar(&request->tweak_open);
    request->Decode(decode, nullptr);
    return request;
  };
  Request* const slow = ask();
  Request* const gone = ask();
  rig.Run(absl::Seconds(1));
  gone->DropDecode();
  const absl::Time begun = rig.world.Now();
  rig.RunUntil([&] { return slow->decode_ended.has_value(); });
  EXPECT_EQ(slow->decode_ended->code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(slow->reason(), "QUEUE_FULL");
  EXPECT_LT(rig.world.Now() - begun, absl::Milliseconds(2800));
  EXPECT_GE(slow->decode_beats, 1);
  EXPECT_EQ(stuck.orders[0].party, "tenant");
  EXPECT_THAT(stuck.cancelled, testing::ElementsAre(2, 1));
  rig.ExpectNothingLeft();
}

// From when the request came, not from when its grammar did.
TEST(DecodeCallsTest, ADeadlineRunsWhileTheGrammarIsCompiled) {
  struct Anything final : CallGrammar {
    std::unique_ptr<engine::TokenConstraint> Follow(
        absl::Span<const int32_t>) const override {
      return nullptr;
    }
    bool IsWhole() const override { return false; }
  };
  for (const bool comes : {false, true}) {
    StuckGrammars stuck;
    Rig rig;
    DecodeMachine* const decode =
        rig.AddDecode("decode", {.step = absl::Milliseconds(100)},
                      [&](decode_worker::DecodeOptions* options) {
                        options->grammars = &stuck;
                      });
    Request* const request =
        rig.NewRequest({.prompt = Prompt(20),
                        .max_tokens = 200,
                        .deadline = absl::Milliseconds(comes ? 3500 : 1500)});
    AskForGrammar(&request->tweak_open);
    request->Decode(decode, nullptr);
    const absl::Time begun = rig.world.Now();
    rig.Run(absl::Seconds(1));
    if (comes) stuck.waiting[0](std::make_unique<Anything>());
    rig.RunUntilEnded();
    EXPECT_EQ(request->decode_ended->code(), StatusCode::kDeadlineExceeded);
    EXPECT_EQ(request->tokens.empty(), !comes);
    // To the next look.
    EXPECT_LT(rig.world.Now() - begun, absl::Milliseconds(comes ? 4100 : 2100));
    rig.ExpectNothingLeft();
  }
}

TEST(DecodeCallsTest, AttentionComesFromWhoeverComputedTheToken) {
  Rig rig;
  DecodeMachine* const decode =
      rig.AddDecode("decode", {}, [](decode_worker::DecodeOptions* options) {
        options->attention_layers = 4;
      });
  PrefillMachine* const prefill = rig.AddPrefill(
      "prefill", {}, [](prefill_worker::PrefillOptions* options) {
        options->attention_layers = 4;
      });
  engine::AttentionAsk ask;
  ask.layers = {1, 3};
  for (const bool mean : {false, true}) {
    ask.mean = mean;
    for (const bool split : {true, false}) {
      Request* const request =
          rig.NewRequest({.prompt = Prompt(50), .max_tokens = 5});
      for (v1::SamplingParams* const sampling :
           {request->tweak_open.mutable_sampling(),
            request->tweak_prefill.mutable_sampling()}) {
        sampling->mutable_attention()->add_layers(1);
        sampling->mutable_attention()->add_layers(3);
        sampling->mutable_attention()->set_mean(mean);
      }
      request->Decode(decode, split ? prefill : nullptr);
      rig.RunUntilEnded();
      request->ExpectAllRight();
      ASSERT_THAT(request->attention, SizeIs(5));
      for (int i = 0; i < 5; ++i) {
        EXPECT_EQ(request->attention[static_cast<size_t>(i)],
                  engine::FakeModel::Attention(ask, 50 + i));
      }
    }
  }
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, AttentionThatIsNotOfferedOrTooMuchIsRefused) {
  const struct {
    const char* why;
    int offered;
    std::vector<int32_t> layers;
    int max_tokens;
  } cases[] = {{"not offered", 0, {0}, 5},
               {"no layer", 4, {}, 5},
               {"no such layer", 4, {4}, 5},
               {"not ascending", 4, {2, 1}, 5},
               {"more than 16384", 4, {0, 1, 2, 3}, 4096}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.why);
    Rig rig;
    DecodeMachine* const decode =
        rig.AddDecode("decode", {}, [&](decode_worker::DecodeOptions* options) {
          options->attention_layers = c.offered;
        });
    Request* const request =
        rig.NewRequest({.prompt = Prompt(50), .max_tokens = 5});
    auto* const attention =
        request->tweak_open.mutable_sampling()->mutable_attention();
    for (const int32_t layer : c.layers) attention->add_layers(layer);
    request->tweak_open.mutable_stopping()->set_max_tokens(c.max_tokens);
    request->Decode(decode, nullptr);
    rig.RunUntilEnded();
    ASSERT_TRUE(request->decode_ended.has_value());
    EXPECT_EQ(request->decode_ended->code(), StatusCode::kInvalidArgument);
    rig.ExpectNothingLeft();
  }
}

TEST(DecodeCallsTest, AStopTokenEndsWithItsId) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  Job job{.prompt = Prompt(30), .max_tokens = 20};
  const std::vector<int32_t> all = job.Expected();
  job.stop_token_ids = {all[4]};
  Request* const request = rig.Local(job, decode);
  rig.RunUntilEnded();
  request->ExpectAllRight();
  EXPECT_EQ(request->finished->reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(request->finished->stop_token_id(), all[4]);
  EXPECT_EQ(request->tokens.back(), all[4]);
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, ThePrefixCacheIsUsedByThoseWhoMay) {
  const struct {
    const char* why;
    int prompt;
    const char* salt;
    bool bypass;
    int cached;
  } cases[] = {
      {"the same prompt; the last position is computed", 64, "", false, 48},
      {"a longer one", 70, "", false, 64},
      {"a shorter one", 40, "", false, 32},
      {"another tenant", 64, "other", false, 0},
      {"not wanted", 64, "", true, 0}};
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  rig.Local({.prompt = Prompt(64)}, decode);
  rig.RunUntilEnded();
  for (const auto& c : cases) {
    SCOPED_TRACE(c.why);
    Request* const request = rig.Local({.prompt = Prompt(c.prompt),
                                        .bypass_prefix_cache = c.bypass,
                                        .cache_salt = c.salt},
                                       decode);
    rig.RunUntilEnded();
    request->ExpectAllRight();
    EXPECT_EQ(request->opened[0].cached_tokens(), c.cached);
    EXPECT_EQ(request->finished->cached_tokens(), c.cached);
  }
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, LoadCountsWhatALocalPromptLeavesToCompute) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode(
      "decode", {.num_blocks = 20}, [](decode_worker::DecodeOptions* options) {
        options->stall_limit = absl::InfiniteDuration();
        options->admission_factor = 9;
      });
  rig.Local({.prompt = Prompt(64, 1)}, decode);
  rig.RunUntilEnded();
  // A reader that takes nothing keeps the blocks that the next one waits for.
  Request* const unread =
      rig.Local({.prompt = Prompt(170, 2), .max_tokens = 80}, decode);
  unread->PauseReading(true);
  rig.RunUntil([&] { return decode->core->engine_stats().paused == 1; });
  const int before = decode->Load().queued_tokens();
  Request* const behind = rig.Local({.prompt = Prompt(200, 1)}, decode);
  rig.Run(absl::Seconds(1));
  EXPECT_EQ(behind->story, "O");
  EXPECT_EQ(decode->Load().queued_tokens(), before + 200 - 64);
  unread->PauseReading(false);
  rig.RunUntilEnded();
  behind->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, OutputOfAnEarlierWorkerIsAnInput) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  for (const int held : {1, 7, 19}) {
    Job job{.prompt = Prompt(33, held), .max_tokens = 20, .temperature = 1};
    const std::vector<int32_t> all = job.Expected();
    job.output.assign(all.begin(), all.begin() + held);
    Request* const request = rig.Local(job, decode);
    rig.RunUntilEnded();
    request->ExpectAllRight();
    EXPECT_EQ(request->repeated, 0);
    EXPECT_THAT(request->token_times, SizeIs(20 - held));
  }
  rig.ExpectNothingLeft();
}

// ---- Who is not admitted

TEST(DecodeCallsTest, BadOpensAreRefusedAndChangeNothing) {
  struct Case {
    const char* why;
    std::function<void(v1::DecodeOpen*)> tweak;
    StatusCode code;
    const char* reason;
  };
  const Case cases[] = {
      {"another incarnation",
       [](auto* open) { open->set_decode_incarnation("another one's"); },
       StatusCode::kUnavailable, "WORKER_RESTARTED"},
      {"id", [](auto* open) { open->set_request_id("short"); },
       StatusCode::kInvalidArgument, ""},
      {"too long",
       [](auto* open) {
         for (int i = 0; i < 256; ++i) open->add_prompt_token_ids(5);
       },
       StatusCode::kInvalidArgument, ""},
      {"nothing left to say",
       [](auto* open) { open->mutable_stopping()->set_max_tokens(-1); },
       StatusCode::kInvalidArgument, ""},
      {"no time", [](auto* open) { open->set_deadline_ms(-1); },
       StatusCode::kInvalidArgument, ""},
      {"temperature",
       [](auto* open) { open->mutable_sampling()->set_temperature(9); },
       StatusCode::kInvalidArgument, ""},
  };
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  for (const Case& c : cases) {
    SCOPED_TRACE(c.why);
    Request* const request = rig.NewRequest({.prompt = Prompt(20)});
    c.tweak(&request->tweak_open);
    request->Decode(decode, nullptr);
    rig.RunUntilEnded();
    EXPECT_EQ(request->decode_ended->code(), c.code);
    EXPECT_EQ(request->reason(), c.reason);
    EXPECT_EQ(request->story, "");
    EXPECT_EQ(decode->log->steps.size(), 0u);
  }
  EXPECT_EQ(decode->core->counters().refused, 6);
  EXPECT_EQ(decode->core->counters().calls, 0);
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, AdmitsUpToItsNumberOfCalls) {
  Rig rig;
  DecodeMachine* const decode =
      rig.AddDecode("decode", {}, [](auto* o) { o->max_calls = 3; });
  for (int i = 0; i < 3; ++i) {
    rig.Local({.prompt = Prompt(10, i), .max_tokens = 30}, decode);
  }
  rig.Run(absl::Milliseconds(20));
  Request* const fourth = rig.Local({.prompt = Prompt(10, 4)}, decode);
  rig.RunUntilEnded();
  EXPECT_EQ(fourth->decode_ended->code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(fourth->reason(), "QUEUE_FULL");
  for (int i = 0; i < 3; ++i) rig.requests[i]->ExpectAllRight();
  // There is room again.
  Request* const fifth = rig.Local({.prompt = Prompt(10, 5)}, decode);
  rig.RunUntil([&] { return fifth->decode_ended.has_value(); });
  fifth->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, AdmitsWhileTheExpectedNeedFitsAndOneAlways) {
  Rig rig;
  // Each comes to (100 + 24) / 16 = 8 blocks; 0.95 * 20 = 19 hold two.
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 20});
  PrefillMachine* const prefill = rig.AddPrefill();
  rig.Split({.prompt = Prompt(100, 1)}, decode, prefill);
  rig.Split({.prompt = Prompt(100, 2)}, decode, prefill);
  rig.Run(absl::Milliseconds(5));
  Request* const third = rig.Split({.prompt = Prompt(100, 3)}, decode, prefill);
  rig.RunUntilEnded();
  EXPECT_EQ(third->decode_ended->code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(third->reason(), "NO_BLOCKS");
  rig.requests[0]->ExpectAllRight();
  rig.requests[1]->ExpectAllRight();
  // More than the share, but alone: 250 positions are 16 of 20 blocks.
  Request* const large =
      rig.Local({.prompt = Prompt(250, 4), .max_tokens = 6}, decode);
  rig.RunUntil([&] { return large->decode_ended.has_value(); });
  large->ExpectAllRight();
  rig.ExpectNothingLeft();
}

// ---- Second calls

TEST(DecodeCallsTest, ASecondCallForALiveSequenceRetiresTheFirst) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  Job job{.prompt = Prompt(50), .max_tokens = 40};
  Request* const first = rig.Local(job, decode);
  rig.RunUntil([&] { return first->tokens.size() >= 5; });
  job.output = first->tokens;
  Request* const second = rig.NewRequest(job);
  second->request_id = first->request_id;
  second->Decode(decode, nullptr);
  rig.RunUntilEnded();
  EXPECT_EQ(first->decode_ended->code(), StatusCode::kAborted);
  second->ExpectAllRight();
  EXPECT_EQ(decode->core->counters().calls, 2);
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, ABadSecondCallLeavesTheFirstAlone) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  Request* const first =
      rig.Local({.prompt = Prompt(50), .max_tokens = 40}, decode);
  rig.RunUntil([&] { return first->tokens.size() >= 5; });
  Request* const second = rig.NewRequest({.prompt = Prompt(50)});
  second->request_id = first->request_id;
  second->tweak_open.set_deadline_ms(-1);
  second->Decode(decode, nullptr);
  rig.RunUntilEnded();
  EXPECT_EQ(second->decode_ended->code(), StatusCode::kInvalidArgument);
  first->ExpectAllRight();
  rig.ExpectNothingLeft();
}

// ---- Readers

TEST(DecodeCallsTest, ASlowReaderPausesItsOwnSequenceOnly) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  Request* const slow =
      rig.Local({.prompt = Prompt(20, 1), .max_tokens = 150}, decode);
  Request* const quick =
      rig.Local({.prompt = Prompt(20, 2), .max_tokens = 150}, decode);
  rig.RunUntil([&] { return slow->tokens.size() >= 5; });
  slow->PauseReading(true);
  rig.RunUntil([&] { return quick->decode_ended.has_value(); });
  quick->ExpectAllRight();
  // The network's window, max_unsent, and the step under way.
  const int64_t steps = decode->core->engine_stats().steps;
  rig.Run(absl::Seconds(5));
  EXPECT_EQ(decode->core->engine_stats().steps, steps) << "it still computes";
  EXPECT_EQ(decode->core->engine_stats().paused, 1);
  EXPECT_LT(steps, 200);
  slow->PauseReading(false);
  rig.RunUntilEnded();
  slow->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, AReaderThatTakesNothingEndsAtTheStallLimit) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode(
      "decode", {}, [](auto* o) { o->stall_limit = absl::Seconds(7); });
  Request* const request =
      rig.Local({.prompt = Prompt(20), .max_tokens = 150}, decode);
  rig.RunUntil([&] { return request->tokens.size() >= 5; });
  request->PauseReading(true);
  rig.Run(absl::Seconds(6));
  EXPECT_EQ(decode->Load().streams(), 1);
  rig.Run(absl::Seconds(4));
  EXPECT_EQ(decode->Load().streams(), 0);
  EXPECT_EQ(decode->Load().blocks_live(), 0);
  request->PauseReading(false);  // what was sent before is still heard
  rig.RunUntilEnded();
  EXPECT_EQ(request->decode_ended->code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(request->reason(), "SLOW_READER");
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, ARouterThatWaitsForItsClientIsNoSlowReader) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode(
      "decode", {}, [](auto* o) { o->stall_limit = absl::Seconds(7); });
  Request* const request =
      rig.Local({.prompt = Prompt(20), .max_tokens = 150}, decode);
  rig.RunUntil([&] { return request->tokens.size() >= 5; });
  request->PauseReading(true);
  request->says_not_reading = true;
  rig.Run(absl::Seconds(60));
  EXPECT_EQ(decode->Load().streams(), 1);
  request->PauseReading(false);
  rig.RunUntilEnded();
  request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

// ---- Ends

TEST(DecodeCallsTest, TheDeadlineEndsASequence) {
  Rig rig;
  DecodeMachine* const decode =
      rig.AddDecode("decode", {.step = absl::Milliseconds(100)});
  Request* const request = rig.Local(
      {.prompt = Prompt(20), .max_tokens = 200, .deadline = absl::Seconds(3)},
      decode);
  rig.RunUntilEnded();
  EXPECT_EQ(request->decode_ended->code(), StatusCode::kDeadlineExceeded);
  EXPECT_GT(request->tokens.size(), 20u);
  EXPECT_FALSE(request->finished.has_value());
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, ASilentRouterLosesItsSequencesAndNoOther) {
  Rig rig;
  DecodeMachine* const decode =
      rig.AddDecode("decode", {.step = absl::Milliseconds(100)});
  Request* const silent =
      rig.Local({.prompt = Prompt(20, 1), .max_tokens = 200}, decode);
  Request* const other =
      rig.Local({.prompt = Prompt(20, 2), .max_tokens = 200}, decode);
  rig.RunUntil([&] { return silent->tokens.size() >= 5; });
  silent->beats = false;
  rig.Run(absl::Seconds(3));
  EXPECT_FALSE(silent->decode_ended.has_value());
  rig.RunUntilEnded();
  EXPECT_EQ(silent->decode_ended->code(), StatusCode::kUnavailable);
  other->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, AWorkerThatStoodStillDoesNotCallItsRoutersSilent) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  Request* const request =
      rig.Local({.prompt = Prompt(20), .max_tokens = 100}, decode);
  rig.RunUntil([&] { return request->tokens.size() >= 5; });
  decode->host->loop.Freeze();
  rig.Run(absl::Seconds(20));
  decode->host->loop.Thaw();
  rig.RunUntilEnded();
  request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, AWorkerThatStoodStillReadsTheOpeningFirst) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  rig.network.Cut("router", "decode");  // it is connected all the same
  Request* const request = rig.Local({.prompt = Prompt(20)}, decode);
  rig.RunUntil([&] { return decode->core->Load().streams() == 1; });
  decode->host->loop.Freeze();
  rig.Run(absl::Seconds(20));
  ASSERT_TRUE(request->opened.empty());
  decode->host->loop.Thaw();
  rig.network.HealAll();
  rig.RunUntilEnded();
  request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, AWorkerThatStoodStillHearsOfTheGrammarFirst) {
  StuckGrammars stuck;
  Rig rig;
  DecodeMachine* const decode =
      rig.AddDecode("decode", {}, [&](decode_worker::DecodeOptions* options) {
        options->grammars = &stuck;
      });
  Request* const request = rig.NewRequest({.prompt = Prompt(20)});
  AskForGrammar(&request->tweak_open);
  request->Decode(decode, nullptr);
  rig.RunUntil([&] { return stuck.orders.size() == 1; });
  decode->host->loop.Freeze();
  rig.Run(absl::Seconds(20));
  decode->host->loop.Thaw();
  rig.Run(absl::Milliseconds(50));
  EXPECT_FALSE(request->decode_ended.has_value());
  rig.RunUntilEnded();
  EXPECT_EQ(request->reason(), "QUEUE_FULL");
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, ACallThatWasNeverOpenedEndsWithOrWithoutBeats) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  struct Ears final : StreamHandler<v1::DecodeResponse> {
    void OnMessage(v1::DecodeResponse) override { ++heard; }
    void OnClosed(absl::Status s) override { ended = std::move(s); }
    int heard = 0;
    std::optional<absl::Status> ended;
  };
  for (const bool beats : {false, true}) {
    Ears ears;
    auto stream = rig.network.Connect<v1::DecodeRequest, v1::DecodeResponse>(
        rig.router, decode->host, false,
        [&](auto s) { decode->core->AddCall(std::move(s)); });
    stream->Start(&ears);
    for (int second = 0; second < 7 && !ears.ended; ++second) {
      v1::DecodeRequest beat;
      beat.mutable_beat();
      if (beats) stream->Send(beat);
      rig.Run(absl::Seconds(1));
    }
    ASSERT_TRUE(ears.ended.has_value()) << beats;
    EXPECT_EQ(ears.ended->code(),
              beats ? StatusCode::kDeadlineExceeded : StatusCode::kUnavailable);
    EXPECT_EQ(ears.heard, 0);
    rig.ExpectNothingLeft();
  }
}

TEST(DecodeCallsTest, ARouterThatGoesAwayEndsItsSequencesAtOnce) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  Request* const request =
      rig.Local({.prompt = Prompt(20), .max_tokens = 200}, decode);
  rig.RunUntil([&] { return request->tokens.size() >= 5; });
  request->DropDecode();
  rig.Run(absl::Milliseconds(20));
  EXPECT_EQ(decode->Load().streams(), 0);
  EXPECT_EQ(decode->Load().blocks_live(), 0);
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, DrainingFinishesWhatItHasAndTakesNothingNew) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill = rig.AddPrefill();
  Request* const running =
      rig.Local({.prompt = Prompt(20, 1), .max_tokens = 60}, decode);
  Request* const ticketed =
      rig.Split({.prompt = Prompt(60, 2), .max_tokens = 10}, decode, prefill);
  ticketed->prefills = false;
  rig.RunUntil([&] { return !ticketed->opened.empty(); });
  decode->core->Drain();
  EXPECT_FALSE(decode->core->idle());
  EXPECT_EQ(decode->Load().state(), v1::WORKER_STATE_DRAINING);
  Request* const late = rig.Local({.prompt = Prompt(20, 3)}, decode);
  // An issued ticket is good, and so is a new attempt.
  ticketed->prefills = true;
  ticketed->Retry(prefill);
  rig.RunUntilEnded();
  EXPECT_EQ(late->decode_ended->code(), StatusCode::kUnavailable);
  EXPECT_EQ(late->reason(), "DRAINING");
  running->ExpectAllRight();
  ticketed->ExpectAllRight();
  EXPECT_TRUE(decode->core->idle());
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, CloseAllEndsCallsInEveryPhase) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill =
      rig.AddPrefill("prefill", {.step = absl::Seconds(1)});
  rig.Local({.prompt = Prompt(20, 1), .max_tokens = 200}, decode);
  Request* const ticketed = rig.NewRequest({.prompt = Prompt(20, 2)});
  ticketed->prefills = false;
  ticketed->Decode(decode, prefill);
  rig.Split({.prompt = Prompt(50, 3)}, decode, prefill);
  rig.Run(absl::Milliseconds(400));
  EXPECT_GT(decode->Load().blocks_reserved(), 0);
  EXPECT_EQ(decode->Load().tickets(), 2);
  decode->core->CloseAll(absl::UnavailableError("the grace is over"));
  EXPECT_TRUE(decode->core->idle());
  rig.RunUntilEnded();
  for (const auto& request : rig.requests) {
    EXPECT_EQ(request->decode_ended->code(), StatusCode::kUnavailable);
    EXPECT_FALSE(request->finished.has_value());
    request->DropPrefill();
  }
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, AFailedStepEndsThoseWhoWereInItAndNoOther) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  Request* const in = rig.Local({.prompt = Prompt(20, 1)}, decode);
  rig.RunUntil([&] { return in->tokens.size() >= 2; });
  decode->device->FailNextStep(absl::InternalError("the device is gone"));
  rig.RunUntilEnded();
  EXPECT_EQ(in->decode_ended->code(), StatusCode::kInternal);
  Request* const after = rig.Local({.prompt = Prompt(20, 2)}, decode);
  rig.RunUntil([&] { return after->decode_ended.has_value(); });
  after->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, ASuspectRunsAloneUntilItsFirstToken) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  rig.Local({.prompt = Prompt(20, 1), .max_tokens = 60}, decode);
  Request* const suspect = rig.Local(
      {.prompt = Prompt(100, 2), .max_tokens = 20, .suspect = true}, decode);
  rig.RunUntil([&] { return suspect->tokens.size() == 1; });
  const std::vector<engine::SequenceId> alone = {2};
  int chunks = 0;
  for (const auto& step : decode->log->steps) {
    if (step == alone) ++chunks;
  }
  EXPECT_EQ(chunks, 3);  // 100 positions, 48 a step
  rig.RunUntilEnded();
  int shared = 0;
  for (const auto& step : decode->log->steps) shared += step.size() == 2;
  EXPECT_GE(shared, 15) << "it proved harmless";
  for (const auto& request : rig.requests) request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(DecodeCallsTest, BeatsFillTheSilence) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill = rig.AddPrefill();
  Request* const request = rig.NewRequest({.prompt = Prompt(20)});
  request->prefills = false;
  request->Decode(decode, prefill);
  rig.Run(absl::Milliseconds(10'500));
  EXPECT_GE(request->decode_beats, 9);
  EXPECT_LE(request->decode_beats, 11);
  request->DropDecode();
  rig.ExpectNothingLeft();
}

}  // namespace
}  // namespace tandem::worker
