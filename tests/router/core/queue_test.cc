// SPDX-License-Identifier: Apache-2.0
// The router's queue: who is passed over, who comes first, and what it says of
// a new request's wait.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A long prompt, or a beam search, whose first token comes with its last.
TEST(QueueTest, WhoIsBeingComputedRefusesNobody) {
  for (const bool split : {false, true}) {
    World w;
    if (split) w.Prefill("p");
    w.Decode("d");
    const auto begin = [&w] {
      ClientPipe* const client = w.Submit(World::Ask());
      if (client->open) w.decodes.back().Say(World::Opened(1, ""));
      return client;
    };
    const auto serve = [&] {
      ClientPipe* const client = begin();
      if (!client->open) return client->status;
      w.RunFor(absl::Milliseconds(100));
      w.decodes.back().Say(World::Started(1));
      w.decodes.back().Say(World::Tokens(kPrompt, {1}));
      w.decodes.back().Say(World::Finished(v1::FINISH_REASON_LENGTH));
      w.RunFor(absl::Seconds(3));
      return client->status;
    };
    w.waiting = 1000;  // so that the rate is known
    w.RunFor(absl::Seconds(1));
    for (int i = 0; i < 20; ++i) EXPECT_EQ(serve(), absl::OkStatus());
    w.waiting = 0;
    for (int i = 0; i < 4; ++i) begin();
    w.RunFor(absl::Minutes(2));
    EXPECT_EQ(w.core->HasRoom(0), absl::OkStatus());
    for (int i = 0; i < 20; ++i) EXPECT_EQ(serve(), absl::OkStatus()) << i;
    EXPECT_EQ(w.core->in_flight(), 4);
  }
}

// A stream on "a", which was lost: it waits for a worker that can go on.
ClientPipe* Lost(World* w, int max_tokens) {
  LeasePipe* const a = w->Decode("a");
  ClientPipe* const client = w->Submit(World::Ask({}, max_tokens));
  w->decodes[0].Say(World::Opened(1, ""));
  w->decodes[0].Say(World::Started(1));
  w->decodes[0].Say(World::Tokens(kPrompt, {1}));
  a->Break(absl::UnavailableError("reset"));
  w->decodes[0].Break(absl::UnavailableError("reset"));
  return client;
}

struct Misfit {
  const char* what;
  v1::WorkerHello worker;  // cannot go on with the stream
  const char* wanted;
};

std::vector<Misfit> Misfits() {
  v1::WorkerHello other = World::Hello("b", v1::WORKER_ROLE_DECODE);
  (*other.mutable_fingerprint())["numerics"] = "other";
  v1::WorkerHello small = World::Hello("b", v1::WORKER_ROLE_DECODE);
  small.set_max_model_len(500);
  return {{"numerics", other,
           "no decode worker with the same weights and numerics for"},
          {"length", small, "no decode worker with 940 positions for"}};
}

TEST(QueueTest, WhoWaitsForAnotherWorkerIsInNobodysWay) {
  for (const Misfit& misfit : Misfits()) {
    SCOPED_TRACE(misfit.what);
    World w;
    ClientPipe* const lost = Lost(&w, 900);
    w.Register(misfit.worker);
    w.RunFor(absl::Seconds(2));
    ASSERT_EQ(w.decodes.size(), 1u);
    EXPECT_FALSE(w.core->CouldPlace());
    ClientPipe* const fresh = w.Submit(World::Ask());
    ASSERT_EQ(w.decodes.size(), 2u);
    EXPECT_EQ(w.decode_ids[1], "b");
    fresh->Break(absl::CancelledError("gone"));
    // It is no worse off: one that fits takes it.
    w.RunFor(absl::Seconds(50));
    w.Decode("c");
    ASSERT_EQ(w.decodes.size(), 3u);
    EXPECT_EQ(w.decode_ids[2], "c");
    EXPECT_TRUE(lost->open);
  }
}

TEST(QueueTest, WhatWasMissingIsSaidAfterTheWaitForARestart) {
  for (const Misfit& misfit : Misfits()) {
    SCOPED_TRACE(misfit.what);
    World w;
    ClientPipe* const lost = Lost(&w, 900);
    w.Register(misfit.worker);
    w.RunFor(w.options.recovery_wait - absl::Seconds(2));
    EXPECT_TRUE(lost->open);
    w.RunFor(absl::Seconds(4));
    EXPECT_EQ(ErrorReason(lost->status), "NO_WORKERS");
    EXPECT_THAT(std::string(lost->status.message()), HasSubstr(misfit.wanted));
  }
}

// A worker refuses all and then takes one after the other: who, by the length
// of its prompt beyond 10.
std::vector<int> ServedAfterRefusals(World* w, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    w->decodes[i].Break(absl::ResourceExhaustedError("full"));
  }
  std::vector<int> order;
  size_t call = count;
  for (int i = 0; i < 200 && order.size() < count; ++i) {
    w->loop.RunFor(absl::Milliseconds(5));
    for (; call < w->decodes.size(); ++call) {
      const v1::DecodeOpen& open = w->decodes[call].sent[0].open();
      order.push_back(open.prompt_token_ids_size() - 10);
      w->decodes[call].Say(World::Opened(1, ""));
    }
  }
  return order;
}

TEST(QueueTest, WhoWasRefusedComesInTheOrderOfArrival) {
  World w;
  w.Decode("d");
  for (int i = 0; i < 6; ++i) {
    w.Submit(World::Ask(std::vector<int32_t>(10 + i, 7)));
    w.loop.RunFor(absl::Milliseconds(1));
  }
  ASSERT_EQ(w.decodes.size(), 6u);
  EXPECT_THAT(ServedAfterRefusals(&w, 6), ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST(QueueTest, WhoWasRefusedKeepsItsPriority) {
  World w;
  w.Decode("d");
  for (const int priority : {3, 0, 5, 0, 3}) {
    AdmittedRequest ask = World::Ask(std::vector<int32_t>(10 + priority, 7));
    ask.effective.priority = priority;
    w.Submit(std::move(ask));
    w.loop.RunFor(absl::Milliseconds(1));
  }
  ASSERT_EQ(w.decodes.size(), 5u);
  EXPECT_THAT(ServedAfterRefusals(&w, 5), ElementsAre(0, 0, 3, 3, 5));
}

// Whatever their priority: what they have is lost otherwise.
TEST(QueueTest, WhoWasComputedComesBeforeWhoWasRefused) {
  World w;
  LeasePipe* const d = w.Decode("d");
  for (const int priority : {2, 1, 0}) {
    AdmittedRequest ask = World::Ask(std::vector<int32_t>(10 + priority, 7));
    ask.effective.priority = priority;
    w.Submit(std::move(ask));
    w.loop.RunFor(absl::Milliseconds(1));
  }
  w.decodes[1].Say(World::Opened(1, ""));
  w.decodes[0].Say(World::Opened(1, ""));
  w.Load(d, v1::WORKER_STATE_DRAINING);
  w.decodes[2].Break(absl::ResourceExhaustedError("full"));
  w.decodes[1].Break(absl::InternalError("lost"));
  w.decodes[0].Break(absl::InternalError("lost"));
  w.Decode("e");
  w.Settle();
  ASSERT_EQ(w.decodes.size(), 6u);
  std::vector<int> order;
  for (size_t i = 3; i < 6; ++i) {
    const v1::DecodeOpen& open = w.decodes[i].sent[0].open();
    order.push_back(open.prompt_token_ids_size() - 10);
  }
  EXPECT_THAT(order, ElementsAre(2, 1, 0));
}

TEST(QueueTest, AnUrgentOneThatComesLaterIsBehindWhoWasComputed) {
  World w;
  LeasePipe* const d = w.Decode("d");
  const auto submit = [&w](int priority) {
    AdmittedRequest ask = World::Ask(std::vector<int32_t>(10 + priority, 7));
    ask.effective.priority = priority;
    w.Submit(std::move(ask));
    w.loop.RunFor(absl::Milliseconds(1));
  };
  submit(1);
  w.decodes[0].Say(World::Opened(1, ""));
  w.Load(d, v1::WORKER_STATE_DRAINING);
  w.decodes[0].Break(absl::InternalError("lost"));
  submit(0);
  w.Decode("e");
  w.Settle();
  ASSERT_EQ(w.decodes.size(), 3u);
  EXPECT_EQ(w.decodes[1].sent[0].open().prompt_token_ids_size(), 11);
  EXPECT_EQ(w.decodes[2].sent[0].open().prompt_token_ids_size(), 10);
}

// What others find out meanwhile does not put it off.
TEST(QueueTest, WhereAWorkerTookOneTheNextFollowAtOnce) {
  for (const bool refused : {false, true}) {
    World w;
    w.Prefill("p");
    w.Decode("d");
    for (int i = 0; i < 9; ++i) w.Submit(World::Ask());
    for (DecodePipe& pipe : w.decodes) {
      pipe.Break(absl::ResourceExhaustedError("full"));
    }
    w.RunFor(absl::Milliseconds(60));
    ASSERT_EQ(w.decodes.size(), 10u);
    w.decodes.back().Say(World::Opened(1, "ticket"));
    ASSERT_EQ(w.prefills.size(), 1u);
    if (refused) w.prefills[0].Break(absl::ResourceExhaustedError("full"));
    w.Settle();
    EXPECT_EQ(w.decodes.size(), 12u) << refused;
  }
}

}  // namespace
}  // namespace tandem::router
