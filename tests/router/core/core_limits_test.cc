// SPDX-License-Identifier: Apache-2.0
// The router's core at its limits: queues, places, rates and shares, between
// scripted clients and workers.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <deque>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "common/error.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using ::testing::ElementsAre;

// A request that a decode worker is to compute, and has begun with.
ClientPipe* Begin(World* w, int priority = 0) {
  AdmittedRequest ask = World::Ask();
  ask.effective.priority = priority;
  const size_t calls = w->decodes.size();
  ClientPipe* const client = w->Submit(std::move(ask));
  if (w->decodes.size() > calls) w->decodes.back().Say(World::Opened(1, ""));
  return client;
}
void Answer(World* w, size_t call) {
  w->decodes[call].Say(World::Started(1));
  w->decodes[call].Say(World::Tokens(kPrompt, {1}));
}

// All that are placed wait for it.
void QueueOnPrefillWorker(World* w) {
  w->waiting = 1000;
  w->Prefill("p0");
}

// What an autoscaler of prefill workers goes by.
TEST(QueuedTokensTest, ThoseOfPromptsThatWaitForAWorker) {
  World w;
  w.Submit(World::Ask());
  w.Submit(World::Ask({1, 2, 3}));
  EXPECT_EQ(w.core->Counts().queued(), 2);
  EXPECT_EQ(w.core->Counts().queued_tokens(), kPrompt + 3);
  w.Decode("d");
  w.Settle();
  EXPECT_EQ(w.core->Counts().queued(), 0);
  EXPECT_EQ(w.core->Counts().queued_tokens(), 0);
}

TEST(CoreLimits, WhoIsPreemptedTooOftenMayComeAgain) {
  RouterOptions options;
  options.max_preemptions = 1;
  World w(options);
  w.Decode("d0");
  ClientPipe* const client = w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, "t"));
  w.decodes[0].Say(World::Dead(1, /*preempted=*/true));
  EXPECT_TRUE(w.decodes[0].sent.back().has_retry());
  w.decodes[0].Say(World::Opened(2, "t"));
  w.decodes[0].Say(World::Dead(2, /*preempted=*/true));
  EXPECT_EQ(ErrorReason(client->status), "QUEUE_FULL");
  EXPECT_EQ(RetryAfter(client->status), absl::Seconds(2));
}

// Where everything fails at once, attempts come to a fifth more than requests,
// beside a number that one worker's loss may need; nobody is given up for it.
TEST(CoreLimits, RetriesAreAShareOfTheRequests) {
  RouterOptions options;
  options.max_requests = 300;
  for (const auto& [budget, earned] :
       {std::pair(options.retry_budget, 500u / 5), {0.0, 0u}}) {
    options.retry_budget = budget;
    World w(options);
    w.Decode("d0");
    std::vector<ClientPipe*> clients;
    size_t calls = 0;
    for (int i = 0; i < 500; ++i) {
      clients.push_back(w.Submit(World::Ask()));
      w.Settle();
      while (calls < w.decodes.size()) {
        w.decodes[calls++].Break(absl::InternalError("lost"));
        w.Settle();
      }
    }
    EXPECT_EQ(calls, 500u + 600u + earned);
    EXPECT_GE(w.core->in_flight(), 150);  // the others have had three attempts
    w.RunFor(absl::Seconds(2));
    EXPECT_NEAR(w.decodes.size() - calls, 20, 1);
    EXPECT_TRUE(clients.back()->open);
  }
}

TEST(CoreLimits, WhetherThereIsRoomIsKnownBeforehand) {
  RouterOptions options;
  options.max_requests = 3;
  options.max_queued = 1;
  World w(options);
  EXPECT_TRUE(w.core->HasRoom(0).ok());
  ClientPipe* const waits = w.Submit(World::Ask());  // there is no worker
  EXPECT_EQ(ErrorReason(w.core->HasRoom(0)), "QUEUE_FULL");
  waits->Break(absl::CancelledError("gone"));
  EXPECT_TRUE(w.core->HasRoom(0).ok());
  w.Decode("d0");
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(w.core->HasRoom(0).ok()) << i;
    w.Submit(World::Ask());
  }
  EXPECT_EQ(ErrorReason(w.core->HasRoom(0)), "QUEUE_FULL");
  w.decodes[0].Say(World::Opened(1, ""));
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Finished(v1::FINISH_REASON_LENGTH));
  w.RunFor(absl::Seconds(1));
  EXPECT_TRUE(w.core->HasRoom(0).ok());
}

// Who asks one question after the other is never one too many.
TEST(CoreLimits, APlaceIsFreeBeforeItsClientLearnsOfTheEnd) {
  RouterOptions options;
  options.max_requests = 2;
  World w(options);
  w.Decode("d0");
  const auto watch = [&w](ClientPipe* client, int* times) {
    client->seen = [&w, times](const v1::GenerateResponse* message) {
      if (message != nullptr && !message->has_done()) return;
      EXPECT_TRUE(w.core->HasRoom(0).ok());
      EXPECT_EQ(w.core->in_flight(), 0);
      ++*times;
    };
  };
  const auto finish = [&w](DecodePipe* decode) {
    decode->Say(World::Opened(1, ""));
    decode->Say(World::Started(1));
    decode->Say(World::Tokens(40, {1}));
    decode->Say(World::Finished(v1::FINISH_REASON_LENGTH));
    w.Settle();
  };
  int one = 0;
  watch(w.Submit(World::Ask()), &one);
  finish(&w.decodes.back());
  EXPECT_EQ(one, 2);

  int failed = 0;
  ClientPipe* const poor = w.Submit(World::Ask());
  watch(poor, &failed);
  w.decodes.back().Break(absl::InvalidArgumentError("no"));
  w.RunFor(absl::Seconds(100));
  EXPECT_FALSE(poor->status.ok());
  EXPECT_EQ(failed, 1);

  int group = 0;
  AdmittedRequest two = World::Ask();
  two.effective.sampling.set_n(2);
  two.effective.sampling.set_best_of(2);
  const size_t before = w.decodes.size();
  watch(w.Submit(std::move(two)), &group);
  finish(&w.decodes[before]);
  ASSERT_EQ(w.decodes.size(), before + 2);
  finish(&w.decodes[before + 1]);
  EXPECT_EQ(group, 2);
}

// Retries that keep the decode worker are of the same share.
TEST(CoreLimits, RetriesOfThePrefillAreAShareOfTheRequests) {
  RouterOptions options;
  options.max_requests = 300;
  World w(options);
  w.Prefill("p0");
  w.Decode("d0");
  std::deque<size_t> retries;  // sent, of each decode call
  const auto lose_all = [&] {
    for (size_t i = 0; i < w.decodes.size(); ++i) {
      DecodePipe& decode = w.decodes[i];
      if (i == retries.size()) {
        retries.push_back(0);
        decode.Say(World::Opened(1, "t"));
      }
      if (decode.sent.size() == 1) decode.Say(World::Dead(1, false));
      w.Settle();
      retries[i] = static_cast<size_t>(
          std::count_if(decode.sent.begin(), decode.sent.end(),
                        [](const auto& m) { return m.has_retry(); }));
    }
  };
  const auto sent = [&] {
    return std::accumulate(retries.begin(), retries.end(), size_t{0});
  };
  for (int i = 0; i < 900; ++i) {
    ClientPipe* const client = w.Submit(World::Ask());
    w.Settle();
    lose_all();
    // Those that got their retry go.
    if (retries.back() == 1) client->Break(absl::CancelledError("gone"));
    if (w.core->in_flight() == 300) break;
  }
  EXPECT_NEAR(static_cast<double>(sent()), 600 + 900 / 5, 2);
  const size_t before = sent();
  w.RunFor(absl::Seconds(2));
  lose_all();
  EXPECT_NEAR(static_cast<double>(sent() - before), 20, 2);
}

TEST(ExpectedWaitTest, IsThoseThatWaitByTheRateWhileTheyWaited) {
  absl::Time now = absl::UnixEpoch();
  ExpectedWait wait(now);
  wait.SetWaiting(1000, now);
  EXPECT_EQ(wait.Behind(100), absl::ZeroDuration());  // nothing is known
  EXPECT_EQ(wait.MostWithin(absl::Seconds(1)), INT_MAX);
  for (int left = 999; left >= 0; --left) {  // 10 a second
    now += absl::Milliseconds(100);
    wait.OnServed(now);
    wait.SetWaiting(left, now);
  }
  EXPECT_NEAR(absl::ToDoubleSeconds(wait.Behind(20)), 2, 0.05);
  EXPECT_NEAR(wait.MostWithin(absl::Seconds(3)), 30, 1);
  EXPECT_EQ(wait.Behind(0), absl::ZeroDuration());
  EXPECT_EQ(wait.MostWithin(absl::InfiniteDuration()), INT_MAX);
  // Hours without requests change nothing.
  now += absl::Hours(5);
  wait.SetWaiting(1, now);
  EXPECT_NEAR(absl::ToDoubleSeconds(wait.Behind(20)), 2, 0.05);
  // Time in which none is served does: in 5 s, a half-life, the rate halves.
  now += absl::Seconds(5);
  wait.SetWaiting(1, now);
  EXPECT_NEAR(absl::ToDoubleSeconds(wait.Behind(20)), 4, 0.2);
  wait.Forget();
  EXPECT_EQ(wait.Behind(20), absl::ZeroDuration());
}

TEST(ExpectedWaitTest, FollowsTheRateUpAndDown) {
  absl::Time now = absl::UnixEpoch();
  ExpectedWait wait(now);
  wait.SetWaiting(1, now);
  const auto serve = [&](int count, absl::Duration apart) {
    for (int i = 0; i < count; ++i) {
      now += apart;
      wait.OnServed(now);
    }
    return absl::ToDoubleSeconds(wait.Behind(100));
  };
  EXPECT_NEAR(serve(1000, absl::Milliseconds(20)), 2, 0.1);
  EXPECT_NEAR(serve(250, absl::Milliseconds(200)), 20, 1);
  EXPECT_NEAR(serve(1000, absl::Milliseconds(20)), 2, 0.2);
}

TEST(CoreLimits, WhoWouldWaitTooLongIsRefusedAtOnce) {
  RouterOptions options;
  options.max_expected_wait = absl::Seconds(2);
  World w(options);
  QueueOnPrefillWorker(&w);
  w.Decode("d0");
  size_t served = 0;
  const auto serve = [&] {  // 10 a second
    w.RunFor(absl::Milliseconds(100));
    Answer(&w, served++);
  };
  for (int i = 0; i < 60; ++i) Begin(&w);  // nothing is known
  EXPECT_EQ(w.core->in_flight(), 60);
  for (int i = 0; i < 40; ++i) serve();
  // 20 wait: exactly what may be ahead.
  EXPECT_TRUE(w.core->HasRoom(0).ok());
  EXPECT_FALSE(Begin(&w)->dropped);
  const absl::Status room = w.core->HasRoom(0);
  ClientPipe* const refused = Begin(&w);
  EXPECT_EQ(refused->status, room);
  EXPECT_EQ(ErrorReason(room), "QUEUE_FULL");
  EXPECT_EQ(room.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(RetryAfter(room), absl::Seconds(1));
  serve();
  EXPECT_FALSE(Begin(&w)->dropped);
  EXPECT_FALSE(w.core->HasRoom(0).ok());
  // One that goes makes room, too.
  w.clients[59].Break(absl::CancelledError("gone"));
  EXPECT_TRUE(w.core->HasRoom(0).ok());
  // Where none is served the wait is longer by the second.
  w.RunFor(absl::Seconds(3));
  EXPECT_FALSE(w.core->HasRoom(0).ok());
  // A further worker is measured anew.
  w.Decode("d1");
  EXPECT_FALSE(Begin(&w)->dropped);
}

// Only those before it in the queue are in a request's way.
TEST(CoreLimits, TheUrgentAreLetInWhereOthersWouldWaitTooLong) {
  RouterOptions options;
  options.max_expected_wait = absl::Seconds(2);
  World w(options);
  QueueOnPrefillWorker(&w);
  LeasePipe* const lease = w.Decode("d0");
  for (int i = 0; i < 40; ++i) Begin(&w);
  for (size_t i = 0; i < 30; ++i) {
    w.RunFor(absl::Milliseconds(100));
    Answer(&w, i);
  }
  w.Load(lease, v1::WORKER_STATE_DRAINING);  // the others wait in the queue
  for (int i = 0; i < 10; ++i) Begin(&w, i % 2 == 0 ? 1 : 2);
  EXPECT_TRUE(Begin(&w, 2)->dropped == false);
  EXPECT_TRUE(Begin(&w, 2)->dropped);  // behind 21
  EXPECT_FALSE(w.core->HasRoom(2).ok());
  EXPECT_TRUE(w.core->HasRoom(1).ok());
  for (int i = 0; i < 6; ++i) EXPECT_FALSE(Begin(&w, 1)->dropped) << i;
  EXPECT_TRUE(Begin(&w, 1)->dropped);
  EXPECT_FALSE(Begin(&w, 0)->dropped);
}

// Else nobody would be let in who could show that it goes on.
TEST(CoreLimits, AfterAStandstillRequestsAreServedAgain) {
  RouterOptions options;
  options.max_expected_wait = absl::Seconds(2);
  World w(options);
  QueueOnPrefillWorker(&w);
  w.Decode("d0");
  for (int i = 0; i < 40; ++i) Begin(&w);
  for (size_t i = 0; i < 20; ++i) {
    w.RunFor(absl::Milliseconds(10));
    Answer(&w, i);
  }
  w.RunFor(absl::Minutes(1));
  EXPECT_FALSE(w.core->HasRoom(0).ok());
  for (size_t i = 20; i < 40; ++i) {
    w.clients[i].Break(absl::CancelledError("gone"));
  }
  int refused = 0;
  for (int i = 0; i < 200; ++i) {
    refused += Begin(&w)->dropped;
    Begin(&w);
    w.RunFor(absl::Milliseconds(10));
    for (size_t call = 40; call < w.decodes.size(); ++call) {
      if (w.decodes[call].open) {
        Answer(&w, call);
        w.decodes[call].Say(World::Finished(v1::FINISH_REASON_LENGTH));
      }
    }
  }
  EXPECT_EQ(refused, 0);
  EXPECT_TRUE(w.core->HasRoom(0).ok());
}

// Who limits its time gets what there is by then, also beyond the deadline of
// those that say nothing.
TEST(CoreLimits, ALimitOfTimeIsNoDeadline) {
  RouterOptions options;
  options.default_deadline = absl::Seconds(3);
  World w(options);
  AdmittedRequest ask = World::Ask();
  ClientPipe* const silent = w.Submit(ask);
  ask.effective.max_time = absl::Seconds(5);
  ClientPipe* const limited = w.Submit(std::move(ask));
  w.Decode("d0");
  for (DecodePipe& pipe : w.decodes) pipe.Say(World::Opened(1, "t"));
  w.RunFor(absl::Seconds(4));
  EXPECT_EQ(ErrorReason(silent->status), "DEADLINE");
  EXPECT_FALSE(limited->dropped);
  w.RunFor(absl::Seconds(3));
  EXPECT_TRUE(limited->status.ok()) << limited->status;
  EXPECT_EQ(World::Reason(*limited), v1::FINISH_REASON_TIME_LIMIT);
}

// -------------------------------------------------------------------- limits

TEST(CoreLimits, RequestsBeyondTheLimitAreRefusedAtOnce) {
  RouterOptions options;
  options.max_requests = 3;
  options.max_queued = 2;
  World w(options);
  ClientPipe* a = w.Submit(World::Ask());
  ClientPipe* b = w.Submit(World::Ask());
  ClientPipe* c = w.Submit(World::Ask());  // the queue holds 2
  EXPECT_FALSE(a->dropped || b->dropped);
  EXPECT_EQ(ErrorReason(c->status), "QUEUE_FULL");
  EXPECT_TRUE(RetryAfter(c->status).has_value());
  w.Decode("d0");
  EXPECT_EQ(w.decodes.size(), 2u);
  EXPECT_FALSE(w.Submit(World::Ask())->dropped);
  EXPECT_EQ(ErrorReason(w.Submit(World::Ask())->status), "QUEUE_FULL");
}

TEST(CoreLimits, WithoutDecodeWorkersARequestWaitsABoundedTime) {
  World w;
  ClientPipe* client = w.Submit(World::Ask());
  w.RunFor(absl::Seconds(9));
  EXPECT_FALSE(client->dropped);
  w.RunFor(absl::Seconds(3));
  EXPECT_EQ(ErrorReason(client->status), "NO_WORKERS");
  EXPECT_EQ(client->status.code(), absl::StatusCode::kUnavailable);
}

TEST(CoreLimits, EndlessRefusalsEndAtTheQueueWait) {
  World w;
  w.Decode("d0");
  ClientPipe* client = w.Submit(World::Ask());
  for (int i = 0; i < 120 && !client->dropped; ++i) {
    if (!w.decodes.empty()) {
      w.decodes.back().Break(absl::ResourceExhaustedError("no blocks"));
    }
    w.RunFor(absl::Milliseconds(100));
  }
  EXPECT_EQ(ErrorReason(client->status), "QUEUE_FULL");
}

// All that wait would get the same answer.
TEST(CoreLimits, AFullWorkerIsOfferedAsManyAsItSeemsToTake) {
  World w;
  w.Decode("d0");
  std::vector<ClientPipe*> clients;
  for (int i = 0; i < 20; ++i) clients.push_back(w.Submit(World::Ask()));
  EXPECT_EQ(w.decodes.size(), 20u);
  for (DecodePipe& pipe : w.decodes) {
    pipe.Break(absl::ResourceExhaustedError("no blocks"));
  }
  w.Settle();
  EXPECT_EQ(w.decodes.size(), 20u);
  w.RunFor(absl::Milliseconds(60));
  ASSERT_EQ(w.decodes.size(), 21u);
  // Silence is no answer; a little later it is asked again.
  w.RunFor(absl::Milliseconds(20));
  EXPECT_EQ(w.decodes.size(), 21u);
  w.RunFor(absl::Milliseconds(40));
  EXPECT_EQ(w.decodes.size(), 22u);
  // Two more for each that it takes.
  for (const auto& [answer, calls] : {std::pair(20, 24u), std::pair(21, 26u)}) {
    w.decodes[answer].Say(World::Opened(1, "t"));
    w.Settle();
    EXPECT_EQ(w.decodes.size(), calls);
  }
  for (int i = 22; i < 26; ++i) {
    w.decodes[i].Break(absl::ResourceExhaustedError("no blocks"));
  }
  w.Settle();
  EXPECT_EQ(w.decodes.size(), 26u);
  // One that ends makes room at once, for one.
  clients[0]->Break(absl::CancelledError("gone"));
  w.Settle();
  EXPECT_EQ(w.decodes.size(), 27u);
  // Who takes many is no longer full, and is offered all there are.
  for (size_t i = 26; i < w.decodes.size() && i < 60; ++i) {
    w.decodes[i].Say(World::Opened(1, "t"));
    w.Settle();
  }
  EXPECT_EQ(w.core->State(false).requests().queued(), 0);
}

TEST(CoreLimits, RequestIdsInFlightAreUnique) {
  World w;
  AdmittedRequest ask = World::Ask();
  ask.effective.request_id = "one";
  AdmittedRequest again = ask;
  ClientPipe* first = w.Submit(std::move(ask));
  EXPECT_EQ(w.Submit(again)->status.code(), absl::StatusCode::kAlreadyExists);
  first->Break(absl::CancelledError(""));
  EXPECT_FALSE(w.Submit(again)->dropped);
}

// A header of that name may come with several calls of one trace.
TEST(CoreLimits, AHeadersIdInUseMakesRoomForAFreshOne) {
  World w;
  w.Decode("d0");
  AdmittedRequest ask = World::Ask();
  ask.effective.request_id = "trace";
  ask.id_from_header = true;
  std::vector<std::string> ids;
  for (int i = 0; i < 3; ++i) {
    ASSERT_FALSE(w.Submit(ask)->dropped) << i;
  }
  const v1::GetClusterStateResponse state = w.core->State(true);
  for (const v1::RequestStatus& status : state.in_flight()) {
    ids.push_back(status.request_id());
  }
  ASSERT_EQ(ids.size(), 3u);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), "trace"), 1);
  EXPECT_EQ(std::set<std::string>(ids.begin(), ids.end()).size(), 3u);
  // Named by its own field, it is refused as ever.
  ask.id_from_header = false;
  EXPECT_EQ(ErrorReason(w.Submit(ask)->status), "REQUEST_ID_IN_USE");
}

TEST(CoreLimits, TheLowerPriorityIsPlacedFirstAndOfEqualsTheOlder) {
  World w;
  for (const int priority : {0, 5, -1, 0, 5, -1}) {
    AdmittedRequest ask = World::Ask();
    ask.prompt.back() = static_cast<int32_t>(w.clients.size());
    ask.effective.priority = priority;
    w.Submit(std::move(ask));
  }
  w.Decode("d0");
  std::vector<int> order;
  for (const DecodePipe& pipe : w.decodes) {
    order.push_back(*pipe.sent[0].open().prompt_token_ids().rbegin());
  }
  EXPECT_THAT(order, ElementsAre(2, 5, 0, 3, 1, 4));
}

// Slow as it was said to be it would get nothing for ever.
TEST(CoreLimits, AWorkerThatWasSlowOnceIsTriedAgainLater) {
  World w;
  w.Decode("d0");
  LeasePipe* const slow = w.Prefill("slow");
  LeasePipe* const quick = w.Prefill("quick");
  const auto say = [&](LeasePipe* lease, double rate, int steps, int queued) {
    v1::RegisterRequest message;
    message.mutable_load()->set_state(v1::WORKER_STATE_READY);
    message.mutable_load()->set_blocks_free(100);
    message.mutable_load()->set_prefill_tokens_per_second(rate);
    message.mutable_load()->set_steps(steps);
    message.mutable_load()->set_queued_tokens(queued);
    lease->Say(message);
  };
  for (int i = 0; i < 50; ++i) {
    w.loop.RunFor(absl::Milliseconds(250));
    w.Load(&w.leases.front());
    say(slow, 10, /*steps=*/7, /*queued=*/0);
    say(quick, 1000, /*steps=*/i, /*queued=*/5);
    // As near to its tenth second as the reports come.
    const bool tried = i >= 41;
    if (i != 1 && i != 38 && !tried) continue;
    ClientPipe* const client = w.Submit(World::Ask());
    w.Settle();
    ASSERT_EQ(w.decodes.back().sent[0].open().prefill_worker().worker_id(),
              tried ? "slow" : "quick")
        << i;
    client->Break(absl::CancelledError("gone"));
    w.Settle();
    if (tried) break;
  }
}

TEST(CoreLimits, APromptIsOutOfTheQueueWhenItIsComputed) {
  World w;
  w.Decode("d0");
  LeasePipe* const lease = w.Prefill("p0");
  const auto say = [&] {
    v1::RegisterRequest message;
    message.mutable_load()->set_state(v1::WORKER_STATE_READY);
    message.mutable_load()->set_blocks_free(100);
    message.mutable_load()->set_prefill_tokens_per_second(1000);
    lease->Say(message);
  };
  const auto goes_to_prefill = [&] {
    w.Submit(World::Ask());
    return w.decodes.back().sent[0].open().has_prefill_worker();
  };
  const auto compute = [&](DecodePipe* decode) {
    decode->Say(World::Opened(1, "ticket"));
    w.prefills.back().Say(World::Computing());
    w.prefills.back().Say(World::First(kPrompt, 1));
  };
  say();
  for (int i = 0; i < 6; ++i) {
    ASSERT_TRUE(goes_to_prefill()) << i;
    compute(&w.decodes.back());
  }
  // What ended after a report takes nothing from those given since.
  ASSERT_TRUE(goes_to_prefill());
  DecodePipe* const before = &w.decodes.back();
  w.loop.RunFor(absl::Milliseconds(1));
  say();
  ASSERT_TRUE(goes_to_prefill());
  ASSERT_TRUE(goes_to_prefill());
  compute(before);
  EXPECT_FALSE(goes_to_prefill());
}

TEST(CoreLimits, ACordonedWorkerKeepsWhatItHasAndGetsNothingNew) {
  World w;
  LeasePipe* const lease = w.Decode("d0");
  ClientPipe* const running = w.Submit(World::Ask());
  ASSERT_EQ(w.decodes.size(), 1u);
  EXPECT_EQ(ErrorReason(w.core->Cordon("d1", true).status()),
            "WORKER_NOT_FOUND");
  EXPECT_EQ(ErrorReason(w.core->Cordon("d1", false).status()),
            "WORKER_NOT_FOUND");
  EXPECT_EQ(*w.core->Cordon("d0", true), 1);
  EXPECT_EQ(w.core->ready_workers(v1::WORKER_ROLE_DECODE), 0);
  EXPECT_EQ(w.core->State(false).workers(0).reason(), "cordoned");
  EXPECT_FALSE(w.core->State(false).workers(0).placeable());
  w.Submit(World::Ask());
  w.RunFor(absl::Seconds(1));
  EXPECT_EQ(w.decodes.size(), 1u);
  EXPECT_FALSE(running->dropped || w.decodes[0].dropped);
  // A restart does not undo what an operator decided.
  lease->Break(absl::UnavailableError("gone"));
  EXPECT_TRUE(w.core->Cordon("d0", true).status().code() ==
              absl::StatusCode::kNotFound);
  w.Register(World::Hello("d0", v1::WORKER_ROLE_DECODE, '2'));
  w.RunFor(absl::Seconds(1));
  EXPECT_EQ(w.core->ready_workers(v1::WORKER_ROLE_DECODE), 0);
  EXPECT_TRUE(w.core->Cordon("d0", false).ok());
  EXPECT_EQ(w.core->ready_workers(v1::WORKER_ROLE_DECODE), 1);
  EXPECT_GE(w.decodes.size(), 2u);
}

TEST(CoreLimits, DrainRefusesNewRequestsAndFinishesOld) {
  World w;
  w.Decode("d0");
  ClientPipe* old = w.Submit(World::Ask(std::vector<int32_t>(4, 7)));
  w.core->Drain();
  EXPECT_EQ(ErrorReason(w.Submit(World::Ask())->status), "DRAINING");
  EXPECT_FALSE(old->dropped);
  EXPECT_FALSE(w.core->idle());
  w.core->CloseAll(absl::UnavailableError("over"));
  EXPECT_TRUE(w.core->idle());
  EXPECT_TRUE(w.decodes[0].dropped);
}
}  // namespace
}  // namespace tandem::router
