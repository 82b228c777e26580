// SPDX-License-Identifier: Apache-2.0
// The prefill worker's decisions: whom it queues and refuses, in which order
// it offers and computes, how much KV may wait for others, and how calls end.
// What the handoff does to the decode worker is in ../decode_worker.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/simulation/parts.h"
#include "tests/worker/rig.h"

namespace tandem::worker {
namespace {

using absl::StatusCode;
using testing::IsEmpty;

int Count(const Rig& rig, const std::function<bool(const Request&)>& is) {
  int count = 0;
  for (const auto& request : rig.requests) count += is(*request) ? 1 : 0;
  return count;
}

// ---- Who is not admitted

TEST(PrefillCoreTest, AGrammarThatIsNotCompiledInTimeIsRefused) {
  StuckGrammars stuck;
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill = rig.AddPrefill(
      "prefill", {}, [&](prefill_worker::PrefillOptions* options) {
        options->grammars = &stuck;
      });
  const auto ask = [&] {
    Request* const request = rig.NewRequest({.prompt = Prompt(40)});
    request->tweak_prefill.mutable_sampling()
        ->mutable_structured()
        ->mutable_options()
        ->set_regex("x");
    request->Decode(decode, prefill);
    return request;
  };
  Request* const slow = ask();
  Request* const gone = ask();
  rig.Run(absl::Seconds(1));
  gone->DropPrefill();
  gone->DropDecode();
  const absl::Time begun = rig.world.Now();
  rig.RunUntil([&] { return slow->prefill_ended.has_value(); });
  EXPECT_EQ(slow->prefill_ended->code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(slow->prefill_reason(), "QUEUE_FULL");
  EXPECT_LT(rig.world.Now() - begun, absl::Milliseconds(2800));
  EXPECT_GE(slow->prefill_beats, 1);
  EXPECT_THAT(stuck.cancelled, testing::ElementsAre(2, 1));
  slow->DropDecode();
  rig.ExpectNothingLeft();
}

TEST(PrefillCoreTest, BadOpensAreRefusedAndChangeNothing) {
  struct Case {
    const char* why;
    std::function<void(v1::PrefillOpen*)> tweak;
    StatusCode code;
    const char* reason;
  };
  const Case cases[] = {
      {"another incarnation",
       [](auto* open) { open->set_prefill_incarnation("another one's"); },
       StatusCode::kUnavailable, "WORKER_RESTARTED"},
      {"id", [](auto* open) { open->set_request_id("short"); },
       StatusCode::kInvalidArgument, ""},
      {"longer than the model",
       [](auto* open) {
         for (int i = 0; i < 256; ++i) open->add_prompt_token_ids(5);
       },
       StatusCode::kInvalidArgument, ""},
      {"top_p", [](auto* open) { open->mutable_sampling()->set_top_p(2); },
       StatusCode::kInvalidArgument, ""},
      {"no time", [](auto* open) { open->set_deadline_ms(-5); },
       StatusCode::kInvalidArgument, ""},
  };
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill = rig.AddPrefill();
  for (const Case& c : cases) {
    SCOPED_TRACE(c.why);
    Request* const request = rig.NewRequest({.prompt = Prompt(40)});
    c.tweak(&request->tweak_prefill);
    request->Decode(decode, prefill);
    rig.RunUntil([&] { return request->prefill_ended.has_value(); });
    EXPECT_EQ(request->prefill_ended->code(), c.code);
    EXPECT_EQ(request->prefill_reason(), c.reason);
    request->DropDecode();
  }
  EXPECT_EQ(prefill->core->counters().refused, 5);
  EXPECT_EQ(prefill->core->counters().calls, 0);
  EXPECT_EQ(prefill->device->steps(), 0);
  rig.ExpectNothingLeft();
}

TEST(PrefillCoreTest, TheQueueIsBoundedInCallsAndInTokens) {
  const struct {
    const char* why;
    int max_queue;
    int64_t max_tokens;
    int refused;
  } cases[] = {{"calls", 3, 1 << 20, 5}, {"tokens", 256, 100, 6}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.why);
    Rig rig;
    DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 256});
    PrefillMachine* const prefill = rig.AddPrefill("prefill", {}, [&](auto* o) {
      o->max_queue = c.max_queue;
      o->max_queued_tokens = c.max_tokens;
      o->max_offered = 1;
    });
    for (int i = 0; i < 9; ++i) {
      Request* const request = rig.NewRequest({.prompt = Prompt(40, i)});
      request->prefills = false;
      request->Decode(decode, prefill);
    }
    rig.Run(absl::Milliseconds(10));
    // One is offered, and gets no answer; of 40 tokens each, the rest queues.
    decode->host->loop.Freeze();
    for (const auto& request : rig.requests) {
      request->Prefill(prefill, request->opened[0]);
    }
    rig.Run(absl::Milliseconds(20));
    const auto refused = [](const Request& r) {
      return r.prefill_reason() == "QUEUE_FULL";
    };
    EXPECT_EQ(Count(rig, refused), c.refused);
    decode->host->loop.Thaw();
    for (const auto& request : rig.requests) {
      if (refused(*request)) request->Retry(nullptr);
    }
    rig.RunUntilEnded();
    for (const auto& request : rig.requests) request->ExpectAllRight();
    rig.ExpectNothingLeft();
  }
}

TEST(PrefillCoreTest, AHistoryThatThePoolCanNeverHoldIsRefused) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  // The pool holds one history of the model's longest, 256, and no more.
  PrefillMachine* const prefill = rig.AddPrefill("prefill", {.num_blocks = 16});
  Request* const most =
      rig.Split({.prompt = Prompt(255), .max_tokens = 1}, decode, prefill);
  rig.RunUntil([&] { return most->prefill_ended.has_value(); });
  EXPECT_TRUE(most->prefill_ended->ok()) << *most->prefill_ended;
  rig.ExpectNothingLeft();
}

TEST(PrefillCoreTest, AnAttemptIsPrefilledOnce) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill =
      rig.AddPrefill("prefill", {.step = absl::Milliseconds(100)});
  Request* const request = rig.Split({.prompt = Prompt(60)}, decode, prefill);
  rig.RunUntil([&] { return request->prefill_started.has_value(); });
  Request* const twin = rig.NewRequest({.prompt = Prompt(60)});
  twin->request_id = request->request_id;
  twin->prefills = false;
  twin->Listen(decode);
  twin->Prefill(prefill, request->opened[0]);
  rig.RunUntil([&] { return twin->prefill_ended.has_value(); });
  EXPECT_EQ(twin->prefill_ended->code(), StatusCode::kAlreadyExists);
  rig.RunUntil([&] { return request->decode_ended.has_value(); });
  request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

// ---- Order and sharing

TEST(PrefillCoreTest, TheOldestOfTheQueueIsOfferedFirst) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 256});
  PrefillMachine* const prefill =
      rig.AddPrefill("prefill", {.step = absl::Milliseconds(100)},
                     [](auto* o) { o->max_offered = 1; });
  std::vector<Request*> order;
  for (const int age : {0, 1, 2, 3}) {
    order.push_back(rig.Split({.prompt = Prompt(100, age),
                               .bypass_prefix_cache = true,
                               .age = absl::Seconds(60) * age},
                              decode, prefill));
  }
  rig.RunUntilEnded();
  // What came first had no rival; the others went by age.
  for (const auto& request : rig.requests) request->ExpectAllRight();
  EXPECT_LT(order[3]->token_times[0], order[2]->token_times[0]);
  EXPECT_LT(order[2]->token_times[0], order[1]->token_times[0]);
  rig.ExpectNothingLeft();
}

TEST(PrefillCoreTest, AShortPromptOvertakesALongOneThatCameALittleEarlier) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 512});
  PrefillMachine* const prefill = rig.AddPrefill(
      "prefill", {.num_blocks = 512, .step = absl::Milliseconds(50)},
      [](auto* o) { o->max_offered = 1; });
  const auto ask = [&](int length, int salt, absl::Duration age) {
    return rig.Split({.prompt = Prompt(length, salt),
                      .max_tokens = 2,
                      .bypass_prefix_cache = true,
                      .age = age},
                     decode, prefill);
  };
  // Its rate is known from here on: 32 positions in 50 ms or somewhat more.
  ask(64, 1, absl::ZeroDuration());
  rig.RunUntilEnded();
  ASSERT_GT(prefill->core->engine_stats().tokens_per_second, 100);
  ask(90, 2, absl::ZeroDuration());  // what the others wait for
  Request* const long_one = ask(90, 3, absl::Milliseconds(60));
  Request* const old = ask(90, 4, absl::Seconds(10));
  Request* const short_one = ask(20, 5, absl::ZeroDuration());
  rig.RunUntilEnded();
  for (const auto& request : rig.requests) request->ExpectAllRight();
  EXPECT_LT(old->token_times[0], short_one->token_times[0]);
  EXPECT_LT(short_one->token_times[0], long_one->token_times[0]);
  rig.ExpectNothingLeft();
}

TEST(PrefillCoreTest, WhatIsCachedOfAPromptDoesNotHoldItBack) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 512});
  PrefillMachine* const prefill = rig.AddPrefill(
      "prefill", {.num_blocks = 512, .step = absl::Milliseconds(50)},
      [](auto* o) { o->max_offered = 1; });
  const auto ask = [&](int length, int salt, bool bypass = false) {
    return rig.Split({.prompt = Prompt(length, salt),
                      .max_tokens = 2,
                      .bypass_prefix_cache = bypass},
                     decode, prefill);
  };
  ask(200, 1);  // from here on its rate is known, and 192 of these are cached
  rig.RunUntilEnded();
  ASSERT_GT(prefill->core->engine_stats().tokens_per_second, 100);
  ask(90, 2);  // what the others wait for
  Request* const unused = ask(200, 1, /*bypass=*/true);
  Request* const uncached = ask(90, 3);
  Request* const cached = ask(200, 1);
  rig.RunUntilEnded();
  for (const auto& request : rig.requests) request->ExpectAllRight();
  EXPECT_EQ(cached->prefill_started->cached_tokens(), 192);
  EXPECT_LT(cached->token_times[0], uncached->token_times[0]);
  EXPECT_LT(uncached->token_times[0], unused->token_times[0]);
  rig.ExpectNothingLeft();
}

TEST(PrefillCoreTest, LoadCountsWhatIsToBeComputed) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 512});
  PrefillMachine* const prefill =
      rig.AddPrefill("prefill", {.num_blocks = 512}, [](auto* o) {
        o->max_offered = 1;
        o->max_queued_tokens = 100;
      });
  const auto run = [&](int length, int salt) {
    rig.Split({.prompt = Prompt(length, salt)}, decode, prefill);
    rig.RunUntilEnded();
  };
  run(200, 1);
  run(100, 2);
  std::vector<Request*> asked;
  const auto ask = [&](int length, int salt) {
    asked.push_back(rig.NewRequest({.prompt = Prompt(length, salt)}));
    asked.back()->prefills = false;
    asked.back()->Decode(decode, prefill);
  };
  ask(100, 2);  // offered, and gets no answer: 96 cached, 4 left
  ask(200, 1);  // 192 cached, 8 left
  ask(70, 3);   // none cached
  ask(208, 1);  // 192 cached, 16 left
  ask(20, 4);   // more than the queue takes
  rig.Run(absl::Milliseconds(10));
  decode->host->loop.Freeze();
  const int left[] = {4, 4 + 8, 4 + 8 + 70, 4 + 8 + 70 + 16, 4 + 8 + 70 + 16};
  for (size_t i = 0; i < asked.size(); ++i) {
    asked[i]->Prefill(prefill, asked[i]->opened[0]);
    rig.Run(absl::Milliseconds(5));
    EXPECT_EQ(prefill->Load().queued_tokens(), left[i]) << i;
  }
  EXPECT_EQ(asked[4]->prefill_reason(), "QUEUE_FULL");
  asked[2]->DropPrefill();
  asked[3]->DropPrefill();
  rig.Run(absl::Milliseconds(5));
  EXPECT_EQ(prefill->Load().queued_tokens(), 4 + 8);
  rig.ExpectInvariants();
  decode->host->loop.Thaw();
  for (const int i : {2, 3, 4}) asked[i]->Retry(nullptr);
  rig.RunUntilEnded();
  for (const auto& request : rig.requests) request->ExpectAllRight();
  EXPECT_EQ(prefill->Load().queued_tokens(), 0);
  rig.ExpectNothingLeft();
}

TEST(PrefillCoreTest, PromptsShareStepsWithinTheTokenBudget) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 256});
  PrefillMachine* const prefill =
      rig.AddPrefill("prefill", {.num_blocks = 256});
  for (int i = 0; i < 6; ++i) {
    rig.Split({.prompt = Prompt(20, i), .max_tokens = 2}, decode, prefill);
  }
  rig.RunUntilEnded();
  for (const auto& request : rig.requests) request->ExpectAllRight();
  EXPECT_EQ(prefill->device->rows(), 6 * 20);
  EXPECT_LT(prefill->device->steps(), 6);
  EXPECT_GE(prefill->device->steps(), 3) << "48 rows a step";
  rig.ExpectNothingLeft();
}

TEST(PrefillCoreTest, ASuspectIsComputedAlone) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 256});
  PrefillMachine* const prefill =
      rig.AddPrefill("prefill", {.num_blocks = 256});
  for (int i = 0; i < 6; ++i) {
    rig.Split({.prompt = Prompt(20, i), .suspect = i == 3}, decode, prefill);
  }
  rig.RunUntilEnded();
  for (const auto& request : rig.requests) request->ExpectAllRight();
  int alone = 0, shared = 0;
  for (const auto& step : prefill->log->steps) {
    alone += step.size() == 1;
    shared += step.size() > 1;
  }
  EXPECT_GE(alone, 1);
  EXPECT_GE(shared, 1);
  rig.ExpectNothingLeft();
}

// So that a crash makes one of them a suspect twice.
TEST(PrefillCoreTest, OneSuspectAtATimeIsBegun) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 256});
  PrefillMachine* const prefill =
      rig.AddPrefill("prefill", {.num_blocks = 256});
  for (int i = 0; i < 6; ++i) {
    rig.Split({.prompt = Prompt(190, i), .suspect = i < 4}, decode, prefill);
  }
  // Milliseconds with more than one, and with one and somebody else.
  int suspects_together = 0, begun_with_others = 0;
  for (bool ended = false; !ended;) {
    rig.Run(absl::Milliseconds(1));
    int suspects = 0, others = 0;
    ended = true;
    for (size_t i = 0; i < rig.requests.size(); ++i) {
      const auto& request = *rig.requests[i];
      ended = ended && request.finished.has_value();
      if (!request.prefill_started || request.first) continue;
      ++(i < 4 ? suspects : others);
    }
    suspects_together += suspects > 1;
    begun_with_others += suspects > 0 && others > 0;
  }
  // What it hears of two streams may be late by a message's way.
  EXPECT_LE(suspects_together, 3 * 3);
  EXPECT_GT(begun_with_others, 0) << "nobody else waits for suspects";
  rig.RunUntilEnded();
  for (const auto& request : rig.requests) request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(PrefillCoreTest, NothingThatWasComputedIsEverPreempted) {
  const struct {
    int window;
    int full_layers;
    int blocks;
    bool run_ahead;
  } cases[] = {{0, 0, 30, false},  {0, 0, 30, true},   {40, 0, 20, false},
               {40, 0, 20, true},  {40, 1, 20, false}, {40, 1, 20, true},
               {40, 1, 10, false}, {40, 1, 10, true}};
  for (const auto& c : cases) {
    SCOPED_TRACE(absl::StrCat(c.window, ", ", c.full_layers, ", ", c.blocks,
                              c.run_ahead ? ", ahead" : ""));
    Rig rig(1, c.window, c.full_layers);
    // Few of these histories fit, twelve want to; none of the decode workers
    // has more than its share.
    PrefillMachine* const prefill = rig.AddPrefill(
        "prefill", {.num_blocks = c.blocks},
        [&](auto* options) { options->engine.run_ahead = c.run_ahead; });
    for (const char* const name : {"one", "two", "three"}) {
      rig.AddDecode(name, {.num_blocks = 512});
    }
    for (int i = 0; i < 12; ++i) {
      rig.Split({.prompt = Prompt(200, i), .max_tokens = 4},
                rig.decodes[static_cast<size_t>(i % 3)].get(), prefill);
    }
    rig.RunUntilEnded();
    for (const auto& request : rig.requests) {
      request->ExpectAllRight();
      EXPECT_EQ(request->opened.size(), 1u);
    }
    EXPECT_EQ(prefill->core->engine_stats().preemptions, 0);
    EXPECT_EQ(prefill->device->rows(), 12 * 200);
    rig.ExpectNothingLeft();
  }
}

// ---- KV that waits for a decode worker

TEST(PrefillCoreTest, KvThatWaitsForOneDecodeWorkerIsBounded) {
  Rig rig;
  DecodeMachine* const stuck = rig.AddDecode("stuck", {.num_blocks = 512});
  DecodeMachine* const good = rig.AddDecode("good", {.num_blocks = 512});
  PrefillMachine* const prefill = rig.AddPrefill(
      "prefill", {.num_blocks = 64}, [](auto* o) { o->waiting_share = 0.5; });
  for (int i = 0; i < 4; ++i) {  // 12 blocks each, 32 are its share
    rig.Split({.prompt = Prompt(190, i)}, stuck, prefill);
    rig.Run(absl::Milliseconds(5));
  }
  // Granted, but no credit comes any more.
  stuck->host->loop.Freeze();
  const auto begun = [&] {
    return Count(
        rig, [](const Request& r) { return r.prefill_started.has_value(); });
  };
  rig.Run(absl::Milliseconds(200));
  EXPECT_EQ(begun(), 2);
  EXPECT_EQ(prefill->Load().blocks_live(), 24);
  // Others are served meanwhile.
  Request* const other = rig.Split({.prompt = Prompt(190, 9)}, good, prefill);
  rig.RunUntil([&] { return other->decode_ended.has_value(); });
  other->ExpectAllRight();
  EXPECT_EQ(begun(), 3);
  stuck->host->loop.Thaw();
  rig.RunUntilEnded();
  for (const auto& request : rig.requests) request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(PrefillCoreTest, AHistoryLargerThanTheShareGoesAlone) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 512});
  PrefillMachine* const prefill = rig.AddPrefill(
      "prefill", {.num_blocks = 64}, [](auto* o) { o->waiting_share = 0.1; });
  for (int i = 0; i < 3; ++i) {
    rig.Split({.prompt = Prompt(190, i)}, decode, prefill);
  }
  int most = 0;
  rig.RunUntil([&] {
    most = std::max(most, prefill->Load().blocks_live());
    return Count(rig, [](const Request& r) {
             return r.decode_ended.has_value();
           }) == 3;
  });
  EXPECT_EQ(most, 12);
  for (const auto& request : rig.requests) request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

// ---- Ends

TEST(PrefillCoreTest, CallsEndInEveryPhase) {
  struct Case {
    const char* why;
    std::function<void(Rig*, Request*, DecodeMachine*, PrefillMachine*)> act;
    StatusCode code;
    const char* reason;
  };
  const Case cases[] = {
      {"the router goes away",
       [](Rig*, Request* r, auto*, auto*) { r->DropPrefill(); },
       StatusCode::kOk, ""},
      {"the grace is over",
       [](Rig*, Request*, auto*, PrefillMachine* p) {
         p->core->CloseAll(absl::UnavailableError("bye"));
       },
       StatusCode::kUnavailable, ""},
      {"the decode worker ended the attempt",
       [](Rig*, Request* r, auto*, auto*) { r->DropDecode(); },
       StatusCode::kUnknown, "HANDOFF_FAILED"},
      {"the decode worker crashed",
       [](Rig* rig, Request*, DecodeMachine* d, auto*) { rig->Crash(d); },
       StatusCode::kUnavailable, "HANDOFF_FAILED"},
      {"the device failed",
       [](Rig*, Request*, auto*, PrefillMachine* p) {
         p->device->FailNextStep(absl::InternalError("broken"));
       },
       StatusCode::kInternal, ""},
  };
  for (const Case& c : cases) {
    for (int at_ms : {8, 300, 900, 1500}) {
      SCOPED_TRACE(absl::StrCat(c.why, " after ", at_ms, " ms"));
      Rig rig;
      DecodeMachine* const decode =
          rig.AddDecode("decode", {.copy = absl::Milliseconds(100)});
      PrefillMachine* const prefill =
          rig.AddPrefill("prefill", {.step = absl::Milliseconds(400)});
      Request* const request =
          rig.Split({.prompt = Prompt(190)}, decode, prefill);
      rig.Run(absl::Milliseconds(at_ms));
      ASSERT_FALSE(request->opened.empty());
      c.act(&rig, request, decode, prefill);
      rig.Run(absl::Seconds(12));
      EXPECT_EQ(prefill->Load().streams(), 0);
      EXPECT_EQ(prefill->Load().tickets(), 0);
      if (c.code != StatusCode::kOk) {
        ASSERT_TRUE(request->prefill_ended.has_value());
        // Ended before its offer or after it: two codes say so.
        if (c.code != StatusCode::kUnknown) {
          EXPECT_EQ(request->prefill_ended->code(), c.code)
              << *request->prefill_ended;
        }
        EXPECT_EQ(request->prefill_reason(), c.reason);
      }
      request->DropDecode();
      request->DropPrefill();
      rig.ExpectNothingLeft();
    }
  }
}

TEST(PrefillCoreTest, ASilentRouterLosesItsPrefill) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill =
      rig.AddPrefill("prefill", {.step = absl::Seconds(3)});
  Request* const request = rig.Split({.prompt = Prompt(190)}, decode, prefill);
  rig.RunUntil([&] { return request->prefill_started.has_value(); });
  request->prefill_beats_too = false;
  rig.Run(absl::Seconds(3));
  EXPECT_FALSE(request->prefill_ended.has_value());
  rig.Run(absl::Seconds(3));
  ASSERT_TRUE(request->prefill_ended.has_value());
  EXPECT_EQ(request->prefill_ended->code(), StatusCode::kUnavailable);
  EXPECT_EQ(request->prefill_reason(), "") << "the handoff was well";
  EXPECT_GE(request->prefill_beats, 3);
  request->DropDecode();
  rig.ExpectNothingLeft();
}

TEST(PrefillCoreTest, TheDeadlineEndsAPrefill) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill =
      rig.AddPrefill("prefill", {.step = absl::Seconds(2)});
  Request* const request = rig.Split(
      {.prompt = Prompt(190), .deadline = absl::Seconds(3)}, decode, prefill);
  rig.RunUntil([&] { return request->prefill_ended.has_value(); });
  EXPECT_EQ(request->prefill_ended->code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(request->tokens, IsEmpty());
  rig.ExpectNothingLeft();
}

TEST(PrefillCoreTest, AWorkerThatStoodStillDoesNotCallItsRoutersSilent) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill =
      rig.AddPrefill("prefill", {.step = absl::Milliseconds(400)});
  Request* const request = rig.Split({.prompt = Prompt(190)}, decode, prefill);
  rig.RunUntil([&] { return request->prefill_started.has_value(); });
  prefill->host->loop.Freeze();
  rig.Run(absl::Seconds(20));
  prefill->host->loop.Thaw();
  rig.Run(absl::Milliseconds(50));
  // Its link is lost, but the router's call is judged by what it said.
  ASSERT_FALSE(request->dead.empty());
  if (request->prefill_ended.has_value()) {
    EXPECT_EQ(request->prefill_reason(), "HANDOFF_FAILED");
  }
  request->Retry(prefill);
  rig.RunUntilEnded();
  request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(PrefillCoreTest, AWorkerThatStoodStillReadsTheOpeningFirst) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill = rig.AddPrefill();
  rig.network.Cut("router", "prefill");  // it is connected all the same
  Request* const request = rig.Split({.prompt = Prompt(40)}, decode, prefill);
  rig.RunUntil([&] { return prefill->core->Load().streams() == 1; });
  prefill->host->loop.Freeze();
  rig.Run(absl::Seconds(20));
  ASSERT_FALSE(request->prefill_started.has_value());
  prefill->host->loop.Thaw();
  rig.network.HealAll();
  rig.RunUntilEnded();
  request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(PrefillCoreTest, DrainingServesTheQueueAndTakesNothingNew) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 256});
  PrefillMachine* const prefill =
      rig.AddPrefill("prefill", {.step = absl::Milliseconds(100)},
                     [](auto* o) { o->max_offered = 1; });
  for (int i = 0; i < 4; ++i) {
    rig.Split({.prompt = Prompt(100, i)}, decode, prefill);
  }
  rig.Run(absl::Milliseconds(30));
  prefill->core->Drain();
  EXPECT_EQ(prefill->Load().state(), v1::WORKER_STATE_DRAINING);
  Request* const late = rig.Split({.prompt = Prompt(100, 5)}, decode, prefill);
  rig.RunUntil([&] { return late->prefill_ended.has_value(); });
  EXPECT_EQ(late->prefill_ended->code(), StatusCode::kUnavailable);
  EXPECT_EQ(late->prefill_reason(), "DRAINING");
  EXPECT_FALSE(prefill->core->idle());
  late->DropDecode();
  rig.RunUntil([&] {
    return Count(rig, [](const Request& r) {
             return r.decode_ended.has_value();
           }) == 4;
  });
  for (int i = 0; i < 4; ++i) rig.requests[i]->ExpectAllRight();
  EXPECT_TRUE(prefill->core->idle());
  rig.ExpectNothingLeft();
}

// ---- Liveness

TEST(PrefillLivenessTest, WorkThatDoesNotAdvanceIsSeen) {
  for (const char* const swallows : {"step", "gather", ""}) {
    SCOPED_TRACE(swallows);
    Rig rig;
    DecodeMachine* const decode = rig.AddDecode();
    PrefillMachine* const prefill = rig.AddPrefill();
    std::vector<engine::BlockRef> lost;
    Pulse pulse(prefill);
    rig.Split({.prompt = Prompt(100)}, decode, prefill);
    rig.RunUntilEnded();
    rig.Run(absl::Seconds(60));  // idle
    EXPECT_TRUE(pulse.always_lived());
    prefill->log->swallows = swallows;
    if (*swallows == '\0') {
      lost = prefill->pool->Allocate(prefill->pool->available());
    }
    rig.Split({.prompt = Prompt(100, 1)}, decode, prefill);
    rig.Run(Pulse::kLimit - absl::Seconds(1));
    EXPECT_TRUE(pulse.lives());
    rig.Run(absl::Seconds(4));
    EXPECT_FALSE(pulse.lives());
  }
}

TEST(PrefillLivenessTest, SlowStepsAreHealthy) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  // Four layers.
  PrefillMachine* const prefill =
      rig.AddPrefill("prefill", {.step = Pulse::kLimit * 2});
  Pulse pulse(prefill);
  for (const int i : {0, 1}) {
    rig.Split({.prompt = Prompt(96, i)}, decode, prefill);
  }
  rig.Run(absl::Seconds(120));
  for (const auto& request : rig.requests) request->ExpectAllRight();
  EXPECT_TRUE(pulse.always_lived());
  rig.ExpectNothingLeft();
}

// A reader keeps the decode worker's blocks: it says wait, to as many as may be
// offered, and others queue.
class FullDecodeWorkerTest : public testing::Test {
 protected:
  FullDecodeWorkerTest() {
    full_ = rig_.AddDecode("full",
                           {.num_blocks = simulation::kLeastBlocks,
                            .step = absl::Milliseconds(100)},
                           [](decode_worker::DecodeOptions* options) {
                             options->stall_limit = absl::InfiniteDuration();
                             options->admission_factor = 9;
                           });
    prefill_ = rig_.AddPrefill("prefill", {},
                               [](prefill_worker::PrefillOptions* options) {
                                 options->max_offered = 2;
                               });
    unread_ = rig_.Local({.prompt = Prompt(170), .max_tokens = 80}, full_);
    unread_->PauseReading(true);
    rig_.RunUntil([&] { return full_->core->engine_stats().paused == 1; });
    for (const int i : {1, 2, 3}) {
      rig_.Split({.prompt = Prompt(240, i)}, full_, prefill_);
    }
  }

  void ReadAndEnd() {
    unread_->PauseReading(false);
    rig_.RunUntilEnded();
    for (const auto& request : rig_.requests) request->ExpectAllRight();
    rig_.ExpectNothingLeft();
  }

  Rig rig_;
  DecodeMachine* full_;
  PrefillMachine* prefill_;
  Request* unread_;
};

TEST_F(FullDecodeWorkerTest, WhoMustWaitForItIsHealthy) {
  Pulse pulse(prefill_);
  rig_.Run(Pulse::kLimit * 4);
  EXPECT_EQ(prefill_->Load().waiting(), 3);
  EXPECT_EQ(prefill_->Load().running(), 0);
  ReadAndEnd();
  EXPECT_TRUE(pulse.always_lived());
}

TEST_F(FullDecodeWorkerTest, WhoWaitsForItKeepsNobodyFromAnother) {
  DecodeMachine* const empty = rig_.AddDecode("empty");
  rig_.Run(absl::Seconds(1));
  Request* const other = rig_.Split({.prompt = Prompt(40, 9)}, empty, prefill_);
  rig_.RunUntil([&] { return other->decode_ended.has_value(); });
  EXPECT_EQ(prefill_->Load().waiting(), 3);
  ReadAndEnd();
}

// Of which positions KV is wanted the grant says: all of it, without a KV
// cache.
TEST(PrefillCoreTest, WhatAGrantWantsMayBeMoreThanThePool) {
  for (const int blocks : {13, 10}) {
    Rig rig(1, 40, /*full_layers=*/1);
    DecodeMachine* const decode = rig.AddDecode(
        "decode", {}, [](auto* options) { options->kv_cache = false; });
    PrefillMachine* const prefill = rig.AddPrefill(
        "prefill", {.num_blocks = blocks},
        [](auto* options) { options->engine.max_num_batched_tokens = 32; });
    Request* const request = rig.Split(
        {.prompt = Prompt(200), .bypass_prefix_cache = true}, decode, prefill);
    if (blocks == 13) {
      rig.RunUntilEnded();
      request->ExpectAllRight();
    } else {
      rig.RunUntil([&] { return request->prefill_ended.has_value(); });
      EXPECT_EQ(request->prefill_ended->code(),
                StatusCode::kFailedPrecondition);
      EXPECT_EQ(request->prefill_reason(), "HANDOFF_FAILED");
      EXPECT_THAT(std::string(request->prefill_ended->message()),
                  testing::HasSubstr("takes 13 blocks here, and there are 10"));
      EXPECT_EQ(prefill->device->steps(), 0);
      request->DropDecode();
    }
    rig.ExpectNothingLeft();
  }
}

}  // namespace
}  // namespace tandem::worker
