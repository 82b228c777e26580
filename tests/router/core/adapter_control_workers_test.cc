// SPDX-License-Identifier: Apache-2.0
// Workers that are lost, come back or come late while adapters are loaded and
// unloaded: what each is told to load or to let go.

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

TEST_F(AdapterControlTest, AWorkerLostWhileItLoadsUndoesTheLoad) {
  Call* const call = Load("verse");
  for (FakeWorker* const worker : {&p, &d, &e}) worker->CommandText();
  p.Loads("verse", 'a');
  e.Loads("verse", 'a');
  d.lease->Break(absl::UnavailableError("reset"));
  EXPECT_EQ(p.CommandText(), "unload verse");
  EXPECT_EQ(e.CommandText(), "unload verse");
  p.Unloads("verse");
  e.Unloads("verse");
  EXPECT_EQ(ErrorReason(call->status()), "WORKER_LOST");
  EXPECT_THAT(std::string(call->status().message()), HasSubstr("worker d "));
  // Only its stream had broken: it brings what nobody wants any more.
  *d.hello.add_adapters() = Ref("verse", 'a', true);
  d.Register();
  EXPECT_EQ(d.CommandText(), "unload verse");
  EXPECT_EQ(p.CommandText(), "");
  d.Unloads("verse");
  EXPECT_EQ(w.told.back(), "adapter verse unloaded from d");
  EXPECT_THAT(w.core->adapters(), IsEmpty());
}

// A load that finds it there has brought nothing that could be taken back.
TEST_F(AdapterControlTest, AFailedLoadLeavesWhatALostWorkerHadBefore) {
  StartWithOwn();
  Call* const call = Load("own", "/own");
  for (FakeWorker* const worker : {&p, &d, &e}) {
    ASSERT_EQ(worker->CommandText(), "load own");
  }
  p.Answer(StatusCode::kOk, "", 'a', false);
  d.lease->Break(absl::UnavailableError("reset"));
  e.lease->Break(absl::UnavailableError("reset"));
  EXPECT_EQ(ErrorReason(call->status()), "WORKER_LOST");
  d.Register();
  EXPECT_EQ(d.CommandText(), "");
  EXPECT_THAT(w.core->adapters(), ElementsAre("own"));
  // Who had to read it for this load lets it go.
  *e.hello.add_adapters() = Ref("own", 'a', true);
  e.Register();
  EXPECT_EQ(e.CommandText(), "unload own");
}

TEST_F(AdapterControlTest, AWorkerThatComesBackWhileItReadsLetsItGoToo) {
  for (const bool over : {false, true}) {
    Call* const call = Load("verse");
    for (FakeWorker* const worker : {&p, &d, &e}) worker->CommandText();
    p.Loads("verse", 'a');
    e.Loads("verse", 'a');
    d.lease->Break(absl::UnavailableError("reset"));
    const auto undo = [&] {
      for (FakeWorker* const worker : {&p, &e}) {
        EXPECT_EQ(worker->CommandText(), "unload verse");
        worker->Unloads("verse");
      }
    };
    if (over) undo();
    d.Register();
    EXPECT_EQ(d.CommandText(), "unload verse");
    if (!over) undo();
    EXPECT_EQ(call->answer.has_value(), over);
    // Now it has read them all.
    *d.hello.add_adapters() = Ref("verse", 'a', true);
    d.SayList();
    EXPECT_EQ(e.CommandText(), "");  // nobody else is to have it
    d.Unloads("verse");
    EXPECT_EQ(ErrorReason(call->status()), "WORKER_LOST");
    EXPECT_THAT(w.core->adapters(), IsEmpty());
    EXPECT_THAT(w.core->adapter_control().List(), IsEmpty());
  }
}

// What it was lost with is gone with its memory; what it has now, somebody
// started it with.
TEST_F(AdapterControlTest, AWorkerThatRestartsOwesNothing) {
  Load("verse");
  for (FakeWorker* const worker : {&p, &d, &e}) worker->CommandText();
  p.Loads("verse", 'a');
  e.Loads("verse", 'a');
  d.lease->Break(absl::UnavailableError("reset"));
  for (FakeWorker* const worker : {&p, &e}) {
    EXPECT_EQ(worker->CommandText(), "unload verse");
    worker->Unloads("verse");
  }
  *d.hello.add_adapters() = Ref("verse", 'a', false);
  d.Restart();
  EXPECT_EQ(d.CommandText(), "");
  EXPECT_THAT(w.core->adapters(), ElementsAre("verse"));
}

TEST_F(AdapterControlTest, WorkersThatComeLaterAreToldToLoad) {
  HaveVerse();
  d.Restart();
  EXPECT_THAT(w.core->adapters(), ElementsAre("verse"));
  ASSERT_EQ(d.CommandText(), "load verse");
  EXPECT_EQ(d.digest, Digest('a'));  // no other content
  d.Answer(StatusCode::kNotFound, "/verse: no such directory");
  EXPECT_THAT(Shown("verse").workers(0).problem(), HasSubstr("no such"));
  w.RunFor(absl::Milliseconds(500));
  EXPECT_EQ(d.CommandText(), "");
  w.RunFor(absl::Seconds(3));
  ASSERT_EQ(d.CommandText(), "load verse");
  d.Loads("verse", 'a');
  EXPECT_EQ(Shown("verse").workers(0).problem(), "");
  w.RunFor(absl::Seconds(10));
  EXPECT_EQ(d.CommandText(), "");
}

TEST_F(AdapterControlTest, WhoWasAwayWhileItWasReplacedGetsWhatOthersHave) {
  UnloadVerseWhileDIsAway();
  Call* const load = Load("verse", "/other");
  for (FakeWorker* const worker : {&p, &e}) {
    ASSERT_EQ(worker->CommandText(), "load verse");
    worker->Loads("verse", 'b');
  }
  ASSERT_TRUE(load->ok()) << load->status();
  e.lease->Break(absl::UnavailableError("reset"));
  d.Register();  // as it was
  Ask("verse");
  EXPECT_THAT(w.decodes, IsEmpty());
  e.Register();
  ASSERT_EQ(w.decodes.size(), 1u);
  EXPECT_EQ(w.decodes[0].sent[0].open().adapter().digest(), Digest('b'));
  ASSERT_EQ(d.CommandText(), "unload verse");
  d.Unloads("verse");
  ASSERT_EQ(d.CommandText(), "load verse");
  EXPECT_EQ(d.digest, Digest('b'));
  d.Loads("verse", 'b');
  EXPECT_EQ(d.CommandText(), "");
  EXPECT_EQ(Shown("verse").digest(), Digest('b'));
  EXPECT_EQ(Shown("verse").workers_size(), 3);
}

// Not as it comes back from a pause.
TEST_F(AdapterControlTest, OfItsStartAWorkerBringsItBackByANewStartAlone) {
  StartWithOwn();
  UnloadOwnWhileDIsAway();
  for (int i = 0; i < 2; ++i) {  // nor where it is lost before it answers
    if (d.lease->open) d.lease->Break(absl::UnavailableError("reset"));
    d.Register();
    ASSERT_EQ(d.CommandText(), "unload own");
    EXPECT_EQ(d.CommandText(), "");
  }
  d.Unloads("own");
  EXPECT_EQ(w.told.back(), "adapter own unloaded from d");
  EXPECT_THAT(w.core->adapter_control().List(), IsEmpty());
  *d.hello.add_adapters() = Ref("own", 'a', false);
  d.lease->Break(absl::UnavailableError("reset"));
  d.Restart();
  EXPECT_EQ(d.CommandText(), "");
  EXPECT_THAT(w.core->adapters(), ElementsAre("own"));
}

TEST_F(AdapterControlTest, OfItsStartAWorkerLetsGoWhatWasReplaced) {
  StartWithOwn();
  UnloadOwnWhileDIsAway();
  Call* const load = Load("own", "/other");
  for (FakeWorker* const worker : {&p, &e}) {
    ASSERT_EQ(worker->CommandText(), "load own");
    worker->Loads("own", 'b');
  }
  ASSERT_TRUE(load->ok()) << load->status();
  d.Register();
  ASSERT_EQ(d.CommandText(), "unload own");
  d.Unloads("own");
  ASSERT_EQ(d.CommandText(), "load own");
  EXPECT_EQ(d.digest, Digest('b'));
  d.Loads("own", 'b');
  EXPECT_EQ(d.CommandText(), "");
}

TEST_F(AdapterControlTest, OfItsStartAWorkerKeepsWhatIsInServiceAgain) {
  StartWithOwn();
  UnloadOwnWhileDIsAway();
  Load("own", "/own");
  for (FakeWorker* const worker : {&p, &e}) {
    ASSERT_EQ(worker->CommandText(), "load own");
    worker->Loads("own", 'a');
  }
  d.Register();
  EXPECT_EQ(d.CommandText(), "");
  EXPECT_TRUE(Shown("own").in_service());
}

// It is not of the load, and has the adapter when that is through.
TEST_F(AdapterControlTest, WhoComesBackWhileItIsLoadedAnewLetsGoFirst) {
  UnloadVerseWhileDIsAway();
  Call* const load = Load("verse");
  for (FakeWorker* const worker : {&p, &e}) {
    ASSERT_EQ(worker->CommandText(), "load verse");
  }
  d.Register();
  ASSERT_EQ(d.CommandText(), "unload verse");
  for (FakeWorker* const worker : {&p, &e}) worker->Loads("verse", 'a');
  ASSERT_TRUE(load->ok()) << load->status();
  d.Unloads("verse");
  EXPECT_TRUE(Shown("verse").in_service());  // it was told to
  ASSERT_EQ(d.CommandText(), "load verse");
  d.Loads("verse", 'a');
  EXPECT_EQ(d.CommandText(), "");
  EXPECT_EQ(Shown("verse").workers(0).digest(), Digest('a'));
}

// It was lost with a load behind the unload.
TEST_F(AdapterControlTest, WhatIsAboutToGoIsNotThereForALoad) {
  StartWithOwn();
  UnloadOwnWhileDIsAway();
  d.Register();
  Call* const load = Load("own", "/own");
  ASSERT_EQ(d.CommandText(), "unload own");
  d.Unloads("own");
  ASSERT_EQ(d.CommandText(), "load own");
  d.lease->Break(absl::UnavailableError("reset"));
  for (FakeWorker* const worker : {&p, &e}) {
    ASSERT_EQ(worker->CommandText(), "load own");
    worker->Answer(StatusCode::kNotFound, "/own: no such directory");
  }
  EXPECT_EQ(ErrorReason(load->status()), "WORKER_LOST");
  d.Register();
  EXPECT_EQ(d.CommandText(), "unload own");
}

TEST_F(AdapterControlTest, WhoWasLostWhileItReadLetsGoWhatWasUnloadedSince) {
  HaveVerse();
  e.Restart();
  ASSERT_EQ(e.CommandText(), "load verse");
  e.lease->Break(absl::UnavailableError("reset"));
  Unload("verse");
  for (FakeWorker* const worker : {&p, &d}) {
    ASSERT_EQ(worker->CommandText(), "unload verse");
    worker->Unloads("verse");
  }
  e.Register();  // it reads still
  EXPECT_EQ(e.CommandText(), "unload verse");
  e.Answer(StatusCode::kNotFound, "no such adapter");  // it could not read it
  EXPECT_EQ(w.told.back(), "adapter verse unloaded");  // of p and d
}

TEST_F(AdapterControlTest, WhoMissedAnUnloadIsToldWhenItComesBack) {
  UnloadVerseWhileDIsAway();
  d.Register();  // as it was
  ASSERT_EQ(d.CommandText(), "unload verse");
  EXPECT_FALSE(Shown("verse").in_service());
  d.Unloads("verse");
  // One that this router has never seen.
  FakeWorker other{&w, World::Hello("other", v1::WORKER_ROLE_DECODE)};
  other.hello.add_features(kFeatureAdapterLoading);
  *other.hello.add_adapters() = Ref("verse", 'a', true);
  other.Register();
  ASSERT_EQ(other.CommandText(), "unload verse");
  other.Unloads("verse");
  for (FakeWorker* const worker : {&p, &d, &e}) {
    EXPECT_EQ(worker->CommandText(), "");
  }
  // Whoever let it go and has it again was told so by another router.
  e.lease->Break(absl::UnavailableError("reset"));
  *e.hello.add_adapters() = Ref("verse", 'a', true);
  e.Register();
  EXPECT_EQ(e.CommandText(), "");
  EXPECT_TRUE(Shown("verse").in_service());
}

TEST_F(AdapterControlTest, WhoLacksItTakesNoOtherContent) {
  HaveVerse();
  d.Restart();
  ASSERT_EQ(d.CommandText(), "load verse");
  d.Answer(StatusCode::kNotFound, "/verse: no such directory");
  Load("verse", "/other");
  ASSERT_EQ(d.CommandText(), "load verse");
  EXPECT_EQ(d.digest, Digest('a'));
}

// All workers at once: requests wait for them instead of being refused.
TEST_F(AdapterControlTest, WhatIsInServiceOutlivesItsWorkers) {
  HaveVerse();
  for (FakeWorker* const worker : {&p, &d, &e}) {
    worker->lease->Break(absl::UnavailableError("reset"));
  }
  EXPECT_THAT(w.core->adapters(), ElementsAre("verse"));
  d.Restart();
  ClientPipe* const client = Ask("verse");
  EXPECT_TRUE(client->open);
  EXPECT_THAT(w.decodes, IsEmpty());
  ASSERT_EQ(d.CommandText(), "load verse");
  d.Loads("verse", 'a');
  EXPECT_EQ(w.decodes.size(), 1u);
}

TEST_F(AdapterControlTest, WhoCameWhileItWasLoadedIsToldBehindTheOthers) {
  Call* const call = Load("verse");
  FakeWorker late{&w, World::Hello("late", v1::WORKER_ROLE_DECODE)};
  late.hello.add_features(kFeatureAdapterLoading);
  late.Register();
  EXPECT_EQ(late.CommandText(), "");
  for (FakeWorker* const worker : {&p, &d, &e}) {
    worker->CommandText();
    worker->Loads("verse", 'a');
  }
  EXPECT_TRUE(call->ok());
  EXPECT_EQ(late.CommandText(), "load verse");
  // An unload takes it from there too, though it has not answered.
  Unload("verse");
  EXPECT_EQ(late.CommandText(), "unload verse");
}

}  // namespace
}  // namespace tandem::router
