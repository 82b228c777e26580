// SPDX-License-Identifier: Apache-2.0
// Several routers, of which each learns from the workers what others loaded and
// unloaded.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "common/error.h"
#include "tests/router/core/adapter_control_fixture.h"

namespace tandem::router {
namespace {

using absl::StatusCode;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// A router that sees no worker with what it knows was away itself.
TEST_F(AdapterControlTest, ARouterThatWasAwayLearnsWhatItIsNow) {
  HaveVerse();
  for (FakeWorker* const worker : {&p, &d, &e}) {
    worker->lease->Break(absl::UnavailableError("reset"));
  }
  for (FakeWorker* const worker : {&p, &d, &e}) {
    worker->Drop([](const v1::AdapterRef&) { return true; });
    *worker->hello.add_adapters() = Ref("verse", 'b', true);
    worker->Register();
    EXPECT_EQ(worker->CommandText(), "");
  }
  EXPECT_EQ(Shown("verse").digest(), Digest('b'));
  Ask("verse");
  ASSERT_EQ(w.decodes.size(), 1u);
  EXPECT_EQ(w.decodes[0].sent[0].open().adapter().digest(), Digest('b'));
}

TEST_F(AdapterControlTest, ANewRouterLearnsFromWorkers) {
  for (FakeWorker* const worker : {&p, &d}) {
    *worker->hello.add_adapters() = Ref("verse", 'a', true);
    *worker->hello.add_adapters() = Ref("own", 'b', false);
    worker->lease->Break(absl::UnavailableError("reset"));
    worker->Register();
  }
  EXPECT_THAT(w.core->adapters(), ElementsAre("own", "verse"));
  EXPECT_FALSE(Shown("own").in_service());
  e.Restart();
  EXPECT_EQ(e.CommandText(), "load verse");
  EXPECT_EQ(e.CommandText(), "");  // not what others were started with
}

TEST_F(AdapterControlTest, AnotherRouterMayUnloadIt) {
  HaveVerse();
  d.LetsGo("verse");
  EXPECT_EQ(d.CommandText(), "");
  for (FakeWorker* const worker : {&p, &e}) worker->LetsGo("verse");
  EXPECT_THAT(w.core->adapters(), IsEmpty());
  e.Restart();
  EXPECT_EQ(e.CommandText(), "");
}

// Those that wait were admitted before, and where threads beside the loop have
// yet to hear of it they are after: none of them waits for what is not to come.
TEST_F(AdapterControlTest, WhoWaitsForWhatAnotherRouterUnloadsEndsAtOnce) {
  for (const bool in_service : {true, false}) {
    const std::string name = in_service ? "verse" : "own";
    if (in_service) {
      HaveVerse();
    } else {
      StartWithOwn();
    }
    ClientPipe* const waits = Ask(name);
    for (size_t i = 0; i < 2; ++i) {  // both decode workers
      w.decodes.back().Break(
          MakeError(StatusCode::kNotFound, "ADAPTER_NOT_FOUND", "let go"));
      w.Settle();
    }
    EXPECT_TRUE(waits->open) << name;
    for (FakeWorker* const worker : {&p, &d, &e}) worker->LetsGo(name);
    for (ClientPipe* const client : {waits, Ask(name)}) {
      ASSERT_TRUE(client->dropped) << name;
      EXPECT_EQ(client->status.code(), StatusCode::kNotFound);
      EXPECT_EQ(ErrorReason(client->status), "ADAPTER_NOT_FOUND");
      EXPECT_THAT(std::string(client->status.message()), HasSubstr(name));
    }
    // Back in another way it is served.
    *d.hello.add_adapters() = Ref(name, 'b', in_service);
    d.SayList();
    const size_t placed = w.decodes.size();
    Ask(name);
    EXPECT_EQ(w.decodes.size(), placed + 1) << name;
  }
}

// Its slots are free when the last request with it has ended, and other routers
// need not wait for that.
TEST_F(AdapterControlTest, AnotherRouterMayLoadItBeforeItsUnloadIsOver) {
  HaveVerse();
  Call* const unload = Unload("verse");
  for (FakeWorker* const worker : {&p, &d, &e}) {
    ASSERT_EQ(worker->CommandText(), "unload verse");
    worker->LetsGo("verse");
    *worker->hello.add_adapters() = Ref("verse", 'b', true);
    worker->SayList();
  }
  bool told = false;  // before the operator hears
  w.core->adapter_control().Watch(
      [&] { told = Shown("verse").in_service() && !unload->answer; });
  for (FakeWorker* const worker : {&p, &d, &e}) {
    EXPECT_FALSE(Shown("verse").in_service());
    worker->Answer(StatusCode::kOk, "");
  }
  ASSERT_TRUE(unload->ok()) << unload->status();
  EXPECT_TRUE(told);
  EXPECT_TRUE(Shown("verse").in_service());
  EXPECT_EQ(Shown("verse").digest(), Digest('b'));
  e.Restart();
  EXPECT_EQ(e.CommandText(), "load verse");
  EXPECT_EQ(e.digest, Digest('b'));
}

// Nobody but this router knows that one was still to have it.
TEST_F(AdapterControlTest, WhatAnotherRouterUnloadsComesBackFromNobody) {
  HaveVerse();
  e.Restart();
  ASSERT_EQ(e.CommandText(), "load verse");
  for (FakeWorker* const worker : {&p, &d}) worker->LetsGo("verse");
  EXPECT_THAT(w.core->adapters(), IsEmpty());
  e.Loads("verse", 'a');
  EXPECT_EQ(e.CommandText(), "unload verse");
  EXPECT_EQ(p.CommandText(), "");
  e.Unloads("verse");
  EXPECT_THAT(w.core->adapter_control().List(), IsEmpty());
  w.RunFor(absl::Seconds(5));
  EXPECT_EQ(e.CommandText(), "");
}

TEST_F(AdapterControlTest, WhatAnotherRouterUnloadsIsNotTriedAgain) {
  HaveVerse();
  e.Restart();
  ASSERT_EQ(e.CommandText(), "load verse");
  e.Answer(StatusCode::kNotFound, "/verse: no such directory");
  for (FakeWorker* const worker : {&p, &d}) worker->LetsGo("verse");
  EXPECT_THAT(w.core->adapter_control().List(), IsEmpty());
  w.RunFor(absl::Seconds(5));
  EXPECT_EQ(e.CommandText(), "");
  // Nor is the old problem shown of the next load.
  Load("verse");
  for (FakeWorker* const worker : {&p, &d}) {
    ASSERT_EQ(worker->CommandText(), "load verse");
    worker->Loads("verse", 'b');
  }
  EXPECT_EQ(Shown("verse").workers(1).problem(), "");
}

}  // namespace
}  // namespace tandem::router
