// SPDX-License-Identifier: Apache-2.0
// The router's queue: who is passed over, and who comes first.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using ::testing::HasSubstr;

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
  return {{"numerics", other, "no decode worker with the same numerics for"},
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

}  // namespace
}  // namespace tandem::router
