// SPDX-License-Identifier: Apache-2.0
// Who waits for whom before what they ask for has been compiled, on virtual
// time: the test is every client and the compiler.

#include "router/intake/structured_gate.h"

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/testing/virtual_loop.h"
#include "router/validate/errors.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

struct Compiler final : StructuredChecker {
  struct Job {
    std::string regex;
    Done done;
  };
  bool Known(const v1::StructuredOptions& structured) const override {
    return structured.regex() == known;
  }
  void Check(const v1::StructuredOptions& structured, Done done) override {
    begun.push_back(structured.regex());
    jobs.push_back({structured.regex(), std::move(done)});
  }
  // The job that began first.
  void Finish(absl::Status status = absl::OkStatus()) {
    Job job = std::move(jobs.front());
    jobs.pop_front();
    job.done(std::move(status));
  }
  std::deque<Job> jobs;            // that run
  std::vector<std::string> begun;  // in order
  std::string known;
};

class StructuredGateTest : public testing::Test {
 protected:
  StructuredGateTest() { Build({}); }
  void Build(const StructuredGateOptions& options) {
    gate_ = std::make_unique<StructuredGate>(
        options, &loop_, &compiler_,
        [this](AdmittedRequest admitted, std::unique_ptr<ClientStream> client) {
          if (admitted.ended != AdmittedRequest::Ended::kNo) {
            ended_.push_back(admitted.ended);
            return;
          }
          client->Start(&core_);
          went_on_.push_back(std::move(admitted));
          streams_.push_back(std::move(client));
        },
        [this](Api, const absl::Status& status) {
          refused_.push_back(ErrorReason(status));
        });
  }
  ClientPipe* Enter(const std::string& tenant, const std::string& regex,
                    ConstraintOf of = ConstraintOf::kClient) {
    AdmittedRequest admitted = World::Ask();
    if (!regex.empty()) {
      admitted.effective.structured.emplace().set_regex(regex);
      admitted.effective.constraint_of = of;
    }
    admitted.tenant = tenant;
    admitted.deadline = absl::Seconds(60);
    ClientPipe* const client = &clients_.emplace_back();
    gate_->Enter(
        std::move(admitted),
        std::make_unique<FakeStream<v1::GenerateResponse, v1::GenerateRequest>>(
            client));
    return client;
  }

  struct Core final : StreamHandler<v1::GenerateRequest> {
    void OnMessage(v1::GenerateRequest) override {}
    void OnClosed(absl::Status) override { ++closed; }
    int closed = 0;
  };

  VirtualLoop loop_;
  Compiler compiler_;
  Core core_;
  std::deque<ClientPipe> clients_;
  std::vector<AdmittedRequest> went_on_;
  std::vector<std::unique_ptr<ClientStream>> streams_;
  std::vector<AdmittedRequest::Ended> ended_;
  std::vector<std::string> refused_;
  std::unique_ptr<StructuredGate> gate_;
};

TEST_F(StructuredGateTest, OnlyWhatMustBeCompiledWaits) {
  compiler_.known = "k";
  Enter("a", "");
  Enter("a", "k");
  EXPECT_EQ(went_on_.size(), 2);
  Enter("a", "x");
  EXPECT_EQ(went_on_.size(), 2);
  EXPECT_EQ(gate_->waiting(), 1);
  loop_.RunFor(absl::Seconds(2));
  compiler_.Finish();
  ASSERT_EQ(went_on_.size(), 3);
  // Its time went by meanwhile.
  EXPECT_EQ(loop_.Now() - *went_on_[2].since, absl::Seconds(2));
  EXPECT_EQ(gate_->waiting(), 0);
}

TEST_F(StructuredGateTest, RefusalsAreTypedAndSayWhoseFaultItIs) {
  ClientPipe* const own = Enter("a", "x");
  ClientPipe* const tools = Enter("b", "y", ConstraintOf::kTools);
  compiler_.Finish(ConstraintInvalid("structured.regex", "x", "bad"));
  compiler_.Finish(ConstraintInvalid("structured.regex", "y", "bad"));
  EXPECT_EQ(own->status.message(), "structured.regex = x: bad");
  EXPECT_EQ(tools->status.message(), "chat.tools = (schemas): bad");
  EXPECT_EQ(ErrorMetadata(tools->status)["field"], "chat.tools");
  EXPECT_EQ(refused_.size(), 2);
  EXPECT_TRUE(went_on_.empty());
}

// Sequences and prompts of one call, and calls of one program.
TEST_F(StructuredGateTest, EqualSourcesOfATenantAreCompiledOnce) {
  for (int i = 0; i < 100; ++i) Enter("a", "x");
  EXPECT_EQ(compiler_.begun.size(), 1);
  compiler_.Finish();
  EXPECT_EQ(went_on_.size(), 100);
  EXPECT_EQ(compiler_.begun.size(), 1);
}

TEST_F(StructuredGateTest, OneTenantLeavesRoomForOthers) {
  for (int i = 0; i < 10; ++i) Enter("hostile", absl::StrCat("h", i));
  EXPECT_EQ(compiler_.begun, std::vector<std::string>({"h0"}));
  Enter("a", "a0");
  Enter("b", "b0");
  Enter("a", "a1");
  EXPECT_EQ(compiler_.begun, std::vector<std::string>({"h0", "a0"}));
  compiler_.Finish();                       // h0
  EXPECT_EQ(compiler_.begun.back(), "h1");  // its last turn is the longest ago
  compiler_.Finish();                       // a0
  EXPECT_EQ(compiler_.begun.back(), "b0");
  compiler_.Finish();  // h1
  EXPECT_EQ(compiler_.begun.back(), "a1");
  compiler_.Finish();  // b0
  EXPECT_EQ(compiler_.begun.back(), "h2");
}

// Those that come anew with every source are not always new.
TEST_F(StructuredGateTest, WhoComesAgainAndAgainIsNotAlwaysFirst) {
  Enter("patient", "p0");
  Enter("patient", "p1");
  for (const char* other : {"a", "b", "c"}) Enter(other, other);
  for (int i = 1; compiler_.begun.back() != "p1"; ++i) {
    ASSERT_LT(i, 9) << "it waits for ever";
    const std::string done = compiler_.jobs.front().regex;
    compiler_.Finish();
    if (done[0] != 'p') Enter(done.substr(0, 1), absl::StrCat(done, i));
  }
}

TEST_F(StructuredGateTest, WithoutTenantsAllRoomIsForAll) {
  Enter("", "x");
  Enter("", "y");
  Enter("", "z");
  EXPECT_EQ(compiler_.begun, std::vector<std::string>({"x", "y"}));
}

TEST_F(StructuredGateTest, WhatWaitsIsBounded) {
  Build({.waiting = 5, .waiting_per_tenant = 3});
  std::vector<ClientPipe*> clients;
  for (int i = 0; i < 5; ++i) clients.push_back(Enter("a", absl::StrCat(i)));
  EXPECT_EQ(ErrorReason(clients[4]->status), "QUEUE_FULL");
  EXPECT_EQ(clients[4]->status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfter(clients[4]->status).has_value());
  EXPECT_TRUE(clients[3]->open);
  // Equal to one that waits: no more work.
  EXPECT_TRUE(Enter("a", "3")->open);
  for (const char* tenant : {"b", "c", "d", "e"}) {
    EXPECT_EQ(Enter(tenant, "x")->open, std::string(tenant) != "e") << tenant;
  }
}

// Requests of few sources are as much memory as those of many.
TEST_F(StructuredGateTest, RequestsThatWaitAreBoundedToo) {
  Build({.requests = 5, .requests_per_tenant = 3});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Enter("a", "x")->open);
  ClientPipe* const fourth = Enter("a", "x");
  EXPECT_EQ(ErrorReason(fourth->status), "QUEUE_FULL");
  EXPECT_TRUE(RetryAfter(fourth->status).has_value());
  EXPECT_TRUE(Enter("b", "x")->open);
  EXPECT_TRUE(Enter("c", "x")->open);
  EXPECT_FALSE(Enter("d", "x")->open);
  EXPECT_EQ(gate_->waiting(), 5);
  // One that goes makes room, and so do those that go on.
  clients_.front().Break(absl::CancelledError("gone"));
  EXPECT_TRUE(Enter("a", "x")->open);
  compiler_.Finish();  // a's
  EXPECT_EQ(went_on_.size(), 3);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Enter("a", "x")->open);
  EXPECT_FALSE(Enter("a", "x")->open);
}

TEST_F(StructuredGateTest, NobodyWaitsForEver) {
  Enter("a", "x");
  ClientPipe* const second = Enter("a", "y");
  loop_.RunFor(absl::Seconds(11));
  EXPECT_EQ(ErrorReason(second->status), "QUEUE_FULL");
  EXPECT_TRUE(clients_.front().open) << "it has had its turn";
  compiler_.Finish();
  EXPECT_EQ(compiler_.begun.size(), 1);
  EXPECT_EQ(went_on_.size(), 1);
  EXPECT_EQ(gate_->waiting(), 0);
}

TEST_F(StructuredGateTest, WhoGoesTakesHisSourceAlong) {
  Enter("a", "x");
  ClientPipe* const gone = Enter("a", "y");
  ClientPipe* const shared = Enter("a", "z");
  Enter("a", "z");
  gone->Break(absl::CancelledError("gone"));
  shared->Break(absl::CancelledError("gone"));
  EXPECT_EQ(gate_->waiting(), 2);
  // What runs runs on, for nobody.
  clients_.front().Break(absl::CancelledError("gone"));
  compiler_.Finish();
  EXPECT_EQ(compiler_.begun, std::vector<std::string>({"x", "z"}));
  compiler_.Finish();
  EXPECT_EQ(went_on_.size(), 1);
  EXPECT_TRUE(refused_.empty());
  EXPECT_EQ(ended_, std::vector<AdmittedRequest::Ended>(
                        3, AdmittedRequest::Ended::kClientGone));
  EXPECT_EQ(gate_->waiting(), 0);
}

TEST_F(StructuredGateTest, TheCoreHearsOfAClientThatGoesLater) {
  ClientPipe* const client = Enter("a", "x");
  compiler_.Finish();
  client->Break(absl::CancelledError("gone"));
  EXPECT_EQ(core_.closed, 1);
}

TEST_F(StructuredGateTest, AllWhoWaitHearOfTheEnd) {
  Enter("a", "x");
  Enter("a", "y");
  Enter("b", "y");
  gate_->Drain(absl::UnavailableError("draining"));
  for (const ClientPipe& client : clients_) {
    EXPECT_EQ(client.status.code(), absl::StatusCode::kUnavailable);
  }
  compiler_.Finish();
  compiler_.Finish();
  EXPECT_TRUE(went_on_.empty());
  EXPECT_EQ(Enter("a", "z")->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(compiler_.begun, std::vector<std::string>({"x", "y"}));
  Enter("a", "");  // the core says it itself
  EXPECT_EQ(went_on_.size(), 1);
}

// In front of a core.
struct GateAndCoreTest : testing::Test {
  GateAndCoreTest() {
    w.Decode("d0");
    w.Settle();
  }
  ClientPipe* Enter(const std::string& id, const std::string& tenant, int n,
                    const std::string& regex = "x") {
    AdmittedRequest admitted = World::Ask();
    admitted.effective.structured.emplace().set_regex(regex);
    admitted.effective.request_id = id;
    admitted.effective.sampling.set_n(n);
    admitted.effective.sampling.set_best_of(n);
    admitted.tenant = tenant;
    admitted.deadline = absl::Seconds(30);
    ClientPipe* const client = &w.clients.emplace_back();
    gate.Enter(
        std::move(admitted),
        std::make_unique<FakeStream<v1::GenerateResponse, v1::GenerateRequest>>(
            client));
    return client;
  }

  World w;
  Compiler compiler;
  StructuredGate gate{
      {},
      &w.loop,
      &compiler,
      [this](AdmittedRequest admitted, std::unique_ptr<ClientStream> client) {
        w.core->Submit(std::move(admitted), std::move(client));
      },
      [](Api, const absl::Status&) {}};
};

TEST_F(GateAndCoreTest, AnAbortEndsWhatWaitsAsItDoesWhatRuns) {
  for (const int n : {1, 3}) {
    ClientPipe* const mine = Enter("mine", "a", n);
    ClientPipe* const others = Enter("mine", "b", n);
    ClientPipe* const unnamed = Enter("", "a", n);
    EXPECT_EQ(gate.Abort("yours", std::nullopt), 0);
    EXPECT_EQ(gate.Abort("", "a"), 0);
    EXPECT_EQ(gate.Abort("mine", "a"), 1);
    EXPECT_EQ(gate.AbortAll("a"), 1);
    EXPECT_EQ(gate.waiting(), 1);
    for (const ClientPipe* client : {mine, unnamed}) {
      EXPECT_EQ(World::Reason(*client), v1::FINISH_REASON_CANCELLED);
      EXPECT_TRUE(client->sent.front().has_started());
      EXPECT_TRUE(client->sent.back().has_done());
      EXPECT_TRUE(client->status.ok()) << client->status;
    }
    EXPECT_TRUE(others->open);
    EXPECT_EQ(gate.Abort("mine", std::nullopt), 1);
    w.Settle();
    EXPECT_TRUE(w.core->idle());
    // Their compilations, for nobody.
    while (!compiler.jobs.empty()) compiler.Finish();
  }
  EXPECT_TRUE(w.decodes.empty());
  EXPECT_EQ(w.core->counters().accepted(), w.core->counters().finished_ok());
}

TEST_F(GateAndCoreTest, ALongWaitIsInEveryNumber) {
  ClientPipe* const client = Enter("", "", 1);
  w.RunFor(absl::Seconds(9));
  compiler.Finish();
  ASSERT_EQ(w.decodes.size(), 1u);
  EXPECT_GE(w.decodes[0].sent[0].open().age_ms(), 9000);
  EXPECT_LE(w.decodes[0].sent[0].open().deadline_ms(), 21000);
  w.decodes[0].Say(World::Opened(1, "t"));
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Tokens(40, {1}));
  w.decodes[0].Say(World::Finished(v1::FINISH_REASON_LENGTH));
  ASSERT_TRUE(client->sent.back().has_done());
  const v1::Timings& timings = client->sent.back().done().timings();
  EXPECT_GE(timings.queue().seconds(), 9);
  EXPECT_GE(timings.time_to_first_token().seconds(), 9);
  EXPECT_GE(timings.total().seconds(), 9);
}

TEST_F(GateAndCoreTest, ALimitOfTimeHoldsWhereverItIsSpent) {
  AdmittedRequest ask = World::Ask();
  ask.since = w.loop.Now() - absl::Seconds(9);
  ask.deadline = absl::Seconds(8);
  ClientPipe* const late = w.Submit(ask);
  ask.deadline = absl::Seconds(30);
  ask.effective.max_time = absl::Seconds(10);
  ClientPipe* const limited = w.Submit(ask);
  w.RunFor(absl::Seconds(2));
  EXPECT_EQ(ErrorReason(late->status), "DEADLINE");
  EXPECT_EQ(World::Reason(*limited), v1::FINISH_REASON_TIME_LIMIT);
}

TEST_F(GateAndCoreTest, AClientThatGoesWhileItWaitsIsCounted) {
  for (const int n : {1, 3}) {
    w.ended.clear();
    Enter("mine", "a", n)->Break(absl::CancelledError("gone"));
    ASSERT_EQ(w.ended.size(), 1u);
    EXPECT_TRUE(w.ended[0].client_gone);
    EXPECT_EQ(w.ended[0].tenant, "a");
    w.Settle();
    EXPECT_TRUE(w.core->idle());
    compiler.Finish();
  }
  EXPECT_EQ(w.core->counters().cancelled(), 2);
}

}  // namespace
}  // namespace tandem::router
