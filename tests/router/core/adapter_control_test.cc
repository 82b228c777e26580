// SPDX-License-Identifier: Apache-2.0
// What an operator's load or unload does: all workers or none, one at a time,
// and what it is told.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "common/error.h"
#include "tests/router/core/adapter_control_fixture.h"

namespace tandem::router {
namespace {

using absl::StatusCode;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST_F(AdapterControlTest, OneIsServedWhenEveryWorkerHasIt) {
  Call* const call = Load("verse");
  EXPECT_EQ(p.CommandText(), "load verse");
  EXPECT_EQ(d.CommandText(), "load verse");
  EXPECT_EQ(e.CommandText(), "load verse");
  p.Loads("verse", 'a');
  d.Loads("verse", 'a');
  EXPECT_FALSE(call->answer.has_value());
  EXPECT_THAT(w.core->adapters(), IsEmpty());
  EXPECT_EQ(Shown("verse").state(), "loading");
  // A moment before, other threads may have known otherwise.
  EXPECT_EQ(ErrorReason(Ask("verse")->status), "ADAPTER_NOT_FOUND");
  e.Loads("verse", 'a');
  ASSERT_TRUE(call->ok()) << call->status();
  EXPECT_EQ((*call->answer)->digest(), Digest('a'));
  EXPECT_EQ((*call->answer)->lora_path(), "/verse");
  EXPECT_EQ((*call->answer)->workers_size(), 3);
  EXPECT_THAT(w.core->adapters(), ElementsAre("verse"));
  Ask("verse");
  ASSERT_EQ(w.decodes.size(), 1u);
  EXPECT_EQ(w.decodes[0].sent[0].open().adapter().digest(), Digest('a'));
  // Only name and content go with requests.
  EXPECT_FALSE(w.decodes[0].sent[0].open().adapter().in_service());
  EXPECT_EQ(Shown("verse").state(), "ready");
  EXPECT_EQ(Shown("verse").requests(), 1);
}

TEST_F(AdapterControlTest, AllOrNoneOfThem) {
  Call* const call = Load("verse");
  for (FakeWorker* const worker : {&p, &d, &e}) worker->CommandText();
  p.Loads("verse", 'a');
  d.Answer(StatusCode::kInvalidArgument, "rank 64, at most 16 are served");
  EXPECT_FALSE(call->answer.has_value());
  e.Loads("verse", 'a');
  EXPECT_FALSE(call->answer.has_value());  // until it is gone again
  EXPECT_THAT(w.core->adapters(), IsEmpty());
  EXPECT_EQ(p.CommandText(), "unload verse");
  EXPECT_EQ(d.CommandText(), "");
  EXPECT_EQ(e.CommandText(), "unload verse");
  p.Unloads("verse");
  e.Unloads("verse");
  EXPECT_EQ(call->status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(call->status().message()),
              HasSubstr("worker d: rank 64"));
  EXPECT_THAT(w.core->adapter_control().List(), IsEmpty());
}

TEST_F(AdapterControlTest, WorkersMustReadTheSame) {
  Call* const call = Load("verse");
  for (FakeWorker* const worker : {&p, &d, &e}) worker->CommandText();
  p.Loads("verse", 'a');
  d.Loads("verse", 'b');
  e.Loads("verse", 'a');
  for (FakeWorker* const worker : {&p, &d, &e}) {
    EXPECT_EQ(worker->CommandText(), "unload verse");
    worker->Unloads("verse");
  }
  EXPECT_EQ(ErrorReason(call->status()), "ADAPTER_MISMATCH");
  EXPECT_THAT(std::string(call->status().message()), HasSubstr("worker d: "));
}

TEST_F(AdapterControlTest, AWorkerThatDoesNotAnswerUndoesItToo) {
  Call* const call = Load("verse");
  for (FakeWorker* const worker : {&p, &d, &e}) worker->CommandText();
  p.Loads("verse", 'a');
  e.Loads("verse", 'a');
  w.RunFor(absl::Seconds(19));
  EXPECT_EQ(p.CommandText(), "");
  w.RunFor(absl::Seconds(3));
  EXPECT_EQ(p.CommandText(), "unload verse");
  EXPECT_EQ(d.CommandText(), "unload verse");  // behind its load
  p.Unloads("verse");
  e.CommandText();
  e.Unloads("verse");
  EXPECT_FALSE(call->answer.has_value());
  w.RunFor(absl::Seconds(22));
  EXPECT_EQ(call->status().code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(call->status().message()),
              HasSubstr("no answer from d within 20s"));
}

TEST_F(AdapterControlTest, WhatIsLoadedIsLoadedOnce) {
  HaveVerse();
  Call* const same = Load("verse", "/copy");
  Ask("verse");  // served all the while
  EXPECT_EQ(w.decodes.size(), 1u);
  for (FakeWorker* const worker : {&p, &d, &e}) {
    ASSERT_EQ(worker->CommandText(), "load verse");
    worker->Answer(StatusCode::kOk, "", 'a', false);
  }
  EXPECT_TRUE(same->ok());
  Call* const other = Load("verse", "/other");
  for (FakeWorker* const worker : {&p, &d, &e}) {
    worker->CommandText();
    worker->Answer(StatusCode::kAlreadyExists, "is here with other content");
  }
  EXPECT_EQ(other->status().code(), StatusCode::kAlreadyExists);
  for (FakeWorker* const worker : {&p, &d, &e}) {
    EXPECT_EQ(worker->CommandText(), "");
  }
  EXPECT_THAT(w.core->adapters(), ElementsAre("verse"));
  EXPECT_EQ(Shown("verse").lora_path(), "/copy");
}

TEST_F(AdapterControlTest, OneChangeOfAnAdapterAtATime) {
  Call* const first = Load("verse");
  Call* const other = Load("prose");  // of others, as many as may be
  EXPECT_EQ(ErrorReason(Load("verse")->status()), "ADAPTER_BUSY");
  EXPECT_EQ(ErrorReason(Unload("verse")->status()), "ADAPTER_BUSY");
  for (FakeWorker* const worker : {&p, &d, &e}) {
    worker->CommandText();
    worker->Loads("verse", 'a');
    worker->CommandText();
    worker->Loads("prose", 'b');
  }
  EXPECT_TRUE(first->ok());
  EXPECT_TRUE(other->ok());
  EXPECT_THAT(w.core->adapters(), ElementsAre("prose", "verse"));
}

TEST_F(AdapterControlTest, WhatCannotBeIsRefusedAtOnce) {
  const struct {
    const char* name;
    const char* path;
    const char* field;
  } cases[] = {{"", "/x", "lora_name"},
               {"a b", "/x", "lora_name"},
               {"m", "/x", "lora_name"},  // the model
               {"verse", "", "lora_path"},
               {"verse", "relative", "lora_path"}};
  for (const auto& c : cases) {
    const Call* const call = Load(c.name, c.path);
    EXPECT_EQ(call->status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorMetadata(call->status())["field"], c.field);
  }
  EXPECT_EQ(Unload("verse")->status().code(), StatusCode::kNotFound);
  EXPECT_EQ(p.CommandText(), "");
  w.Decode("old");
  EXPECT_THAT(std::string(Load("verse")->status().message()),
              HasSubstr("worker old is of a version"));
  World none;
  std::optional<absl::Status> status;
  none.core->LoadAdapter("verse", "/verse",
                         [&](absl::StatusOr<v1::LoraAdapter> answer) {
                           status = answer.status();
                         });
  EXPECT_EQ(ErrorReason(*status), "NO_WORKERS");
}

TEST_F(AdapterControlTest, AnUnloadWaitsForTheRequestsInFlight) {
  HaveVerse();
  ClientPipe* const running = Ask("verse");
  Begin();
  Call* const call = Unload("verse");
  EXPECT_THAT(w.core->adapters(), IsEmpty());
  EXPECT_EQ(ErrorReason(Ask("verse")->status), "ADAPTER_NOT_FOUND");
  EXPECT_EQ(Shown("verse").state(), "draining");
  w.RunFor(absl::Seconds(30));
  EXPECT_EQ(d.CommandText(), "");
  // Even where its worker is lost.
  FakeWorker* const lost = w.decode_ids.back() == "d" ? &d : &e;
  FakeWorker* const left = lost == &d ? &e : &d;
  lost->lease->Break(absl::UnavailableError("reset"));
  w.decodes.back().Break(absl::UnavailableError("reset"));
  w.Settle();
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_EQ(w.decode_ids.back(), left->hello.worker().worker_id());
  w.PrefillAndCommit(1, kPrompt, 1);
  FinishNewest();
  EXPECT_EQ(World::Reason(*running), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(p.CommandText(), "unload verse");
  EXPECT_EQ(left->CommandText(), "unload verse");
  EXPECT_EQ(Shown("verse").state(), "unloading");
  p.Unloads("verse");
  EXPECT_FALSE(call->answer.has_value());
  left->LetsGo("verse");
  EXPECT_FALSE(call->answer.has_value());  // its memory is not free yet
  left->Answer(StatusCode::kOk, "");
  ASSERT_TRUE(call->ok()) << call->status();
  EXPECT_THAT(w.core->adapter_control().List(), IsEmpty());
  // The one that was lost does not bring it back.
  lost->Register();
  EXPECT_EQ(lost->CommandText(), "unload verse");
}

TEST_F(AdapterControlTest, WhatAWorkerCouldNotUnloadIsNotInServiceForThat) {
  HaveVerse();
  Call* const unload = Unload("verse");
  for (FakeWorker* const worker : {&p, &d}) {
    ASSERT_EQ(worker->CommandText(), "unload verse");
    worker->Unloads("verse");
  }
  ASSERT_EQ(e.CommandText(), "unload verse");
  e.Answer(StatusCode::kInternal, "no");
  EXPECT_EQ(unload->status().code(), StatusCode::kInternal);
  EXPECT_FALSE(Shown("verse").in_service());
  EXPECT_EQ(p.CommandText(), "");
}

TEST_F(AdapterControlTest, AnswersOfOthersCountForNobody) {
  Call* const call = Load("verse");
  for (FakeWorker* const worker : {&p, &d, &e}) worker->CommandText();
  p.last = d.last;
  p.Answer(StatusCode::kOk, "", 'a', true);
  d.last = 12345;
  d.Answer(StatusCode::kOk, "", 'a', true);
  e.Answer(StatusCode::kOk, "", 'a', true);
  e.Answer(StatusCode::kOk, "", 'a', true);
  EXPECT_FALSE(call->answer.has_value());
}

TEST_F(AdapterControlTest, WhoWaitsHearsOfTheRoutersEnd) {
  HaveVerse();
  ASSERT_TRUE(Ask("verse")->open);
  Begin();
  Call* const load = Load("prose", "/prose");
  Call* const unload = Unload("verse");
  ASSERT_FALSE(load->answer || unload->answer);
  w.around_recorder = true;
  w.core->adapter_control().Close(absl::UnavailableError("draining"));
  EXPECT_EQ(load->status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(unload->status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(Load("rhyme")->status().message(), "draining");
  EXPECT_EQ(Unload("prose")->status().message(), "draining");
  // What had begun goes on, for nobody.
  for (FakeWorker* const worker : {&p, &d, &e}) {
    ASSERT_EQ(worker->CommandText(), "load prose");
    worker->Loads("prose", 'b');
  }
  EXPECT_EQ(Shown("prose").state(), "ready");
}

}  // namespace
}  // namespace tandem::router
