// SPDX-License-Identifier: Apache-2.0
// Adapters loaded and unloaded in service: the test is every worker, and the
// operator.

#include "router/core/adapter_control.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using absl::StatusCode;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::string Digest(char of) { return std::string(64, of); }

v1::AdapterRef Ref(const std::string& name, char content, bool in_service) {
  v1::AdapterRef ref;
  ref.set_name(name);
  ref.set_digest(Digest(content));
  ref.set_path("/" + name);
  ref.set_in_service(in_service);
  return ref;
}

// A worker's registration, as the test plays it.
struct FakeWorker {
  FakeWorker(World* world_in, v1::WorkerHello hello_in)
      : world(world_in), hello(std::move(hello_in)) {}

  World* world;
  v1::WorkerHello hello;
  LeasePipe* lease = nullptr;
  size_t heard = 0;  // of lease->sent

  void Register() {
    heard = 0;
    lease = world->Register(hello);
  }
  // The next command, or nothing.
  std::optional<v1::RegisterResponse> Command() {
    while (heard < lease->sent.size()) {
      const v1::RegisterResponse& next = lease->sent[heard++];
      if (next.has_load_adapter() || next.has_unload_adapter()) return next;
    }
    return std::nullopt;
  }
  // In short: "load verse", "unload verse", "".
  std::string CommandText() {
    const auto command = Command();
    if (!command) return "";
    last = command->has_load_adapter() ? command->load_adapter().command()
                                       : command->unload_adapter().command();
    digest = command->load_adapter().digest();
    return command->has_load_adapter()
               ? "load " + command->load_adapter().name()
               : "unload " + command->unload_adapter().name();
  }
  void Answer(StatusCode code, const std::string& message, char content = 0,
              bool loaded = false) {
    v1::RegisterRequest request;
    v1::AdapterOutcome* const outcome = request.mutable_adapter_outcome();
    outcome->set_command(last);
    outcome->set_code(static_cast<int>(code));
    outcome->set_message(message);
    if (content != 0) outcome->set_digest(Digest(content));
    outcome->set_loaded(loaded);
    lease->Say(request);
  }
  void SayList() {
    v1::RegisterRequest request;
    *request.mutable_adapters()->mutable_adapters() = hello.adapters();
    lease->Say(request);
  }
  // Does what it was told last.
  void Loads(const std::string& name, char content) {
    *hello.add_adapters() = Ref(name, content, true);
    SayList();
    Answer(StatusCode::kOk, "", content, true);
  }
  void Drop(const std::function<bool(const v1::AdapterRef&)>& which) {
    auto* const adapters = hello.mutable_adapters();
    adapters->erase(std::remove_if(adapters->begin(), adapters->end(), which),
                    adapters->end());
  }
  void LetsGo(const std::string& name) {
    Drop([&](const v1::AdapterRef& adapter) { return adapter.name() == name; });
    SayList();
  }
  void Unloads(const std::string& name) {
    LetsGo(name);
    Answer(StatusCode::kOk, "");
  }
  void Restart() {
    if (lease->open) lease->Break(absl::UnavailableError("reset"));
    const std::string& old = hello.worker().incarnation();
    hello.mutable_worker()->set_incarnation(
        std::string(16, static_cast<char>(old[0] + 1)));
    Drop([](const v1::AdapterRef& adapter) { return adapter.in_service(); });
    Register();
  }

  uint64_t last = 0;
  std::string digest;  // that a load must have
};

struct AdapterControlTest : testing::Test {
  AdapterControlTest() {
    for (FakeWorker* const worker : {&p, &d, &e}) {
      worker->hello.add_features(kFeatureAdapterLoading);
    }
    p.Register();
    d.Register();
    e.Register();
  }
  static RouterOptions Options() {
    RouterOptions options;
    options.adapter_wait = absl::Seconds(20);
    return options;
  }

  struct Call {
    std::optional<absl::StatusOr<v1::LoraAdapter>> answer;
    bool ok() const { return answer.has_value() && answer->ok(); }
    absl::Status status() const {
      return answer ? answer->status() : absl::UnknownError("no answer");
    }
  };
  Call* Load(const std::string& name, const std::string& path = "/verse") {
    Call* const call = &calls.emplace_back();
    w.core->LoadAdapter(name, path,
                        [call](absl::StatusOr<v1::LoraAdapter> answer) {
                          call->answer = std::move(answer);
                        });
    return call;
  }
  Call* Unload(const std::string& name) {
    Call* const call = &calls.emplace_back();
    w.core->UnloadAdapter(name, [call](absl::StatusOr<v1::LoraAdapter> answer) {
      call->answer = std::move(answer);
    });
    return call;
  }
  // On every worker.
  void HaveVerse() {
    Call* const call = Load("verse");
    for (FakeWorker* const worker : {&p, &d, &e}) {
      ASSERT_EQ(worker->CommandText(), "load verse");
      worker->Loads("verse", 'a');
    }
    ASSERT_TRUE(call->ok()) << call->status();
  }
  void UnloadVerseWhileDIsAway() {
    HaveVerse();
    d.lease->Break(absl::UnavailableError("reset"));
    Call* const unload = Unload("verse");
    for (FakeWorker* const worker : {&p, &e}) {
      ASSERT_EQ(worker->CommandText(), "unload verse");
      worker->Unloads("verse");
    }
    ASSERT_TRUE(unload->ok()) << unload->status();
  }
  // Two of them by their own start.
  void StartWithOwn() {
    for (FakeWorker* const worker : {&p, &d}) {
      *worker->hello.add_adapters() = Ref("own", 'a', false);
      worker->Restart();
    }
  }
  void UnloadOwnWhileDIsAway() {
    d.lease->Break(absl::UnavailableError("reset"));
    Call* const unload = Unload("own");
    ASSERT_EQ(p.CommandText(), "unload own");
    p.Unloads("own");
    ASSERT_TRUE(unload->ok()) << unload->status();
  }
  ClientPipe* Ask(const std::string& adapter) {
    AdmittedRequest admitted = World::Ask();
    admitted.effective.adapter = adapter;
    admitted.effective.placement = v1::PLACEMENT_LOCAL;
    return w.Submit(std::move(admitted));
  }
  void FinishNewest() {
    w.decodes.back().Say(World::Tokens(kPrompt, {1, 2, 3, 4, 5, 6, 7, 8}));
    w.decodes.back().Say(World::Finished(v1::FINISH_REASON_LENGTH));
    w.Settle();
  }
  void Begin() {
    w.decodes.back().Say(World::Opened(1, ""));
    w.decodes.back().Say(World::Started(1));
  }
  v1::LoraAdapter Shown(const std::string& name) {
    for (const auto& adapter : w.core->adapter_control().List()) {
      if (adapter.lora_name() == name) return adapter;
    }
    return {};
  }

  World w{Options()};
  FakeWorker p{&w, World::Hello("p", v1::WORKER_ROLE_PREFILL)};
  FakeWorker d{&w, World::Hello("d", v1::WORKER_ROLE_DECODE)};
  FakeWorker e{&w, World::Hello("e", v1::WORKER_ROLE_DECODE)};
  std::deque<Call> calls;
};

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
