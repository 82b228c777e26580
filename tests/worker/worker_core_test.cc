// SPDX-License-Identifier: Apache-2.0
// What both workers share below their cores: the check of an open, the clock
// of leases and beats, and the registration with every router.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "absl/strings/escaping.h"
#include "common/error.h"
#include "tests/simulation/network.h"
#include "tests/simulation/parts.h"
#include "worker/call_clock.h"
#include "worker/convert.h"
#include "worker/grammars.h"
#include "worker/registration.h"

namespace tandem::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// ---- CheckOpen

struct Open {
  std::string id = std::string(16, 'i');
  int prompt = 10;
  int output = 0;
  float temperature = 0, top_p = 1, min_p = 0;
  int top_k = 0, logprobs = -1;
  int max_tokens = 5, min_tokens = 0;
  int64_t deadline_ms = 1;
  int stop_ids = 0;
};

absl::Status Check(const Open& open) {
  v1::SamplingParams sampling;
  sampling.set_temperature(open.temperature);
  sampling.set_top_p(open.top_p);
  sampling.set_min_p(open.min_p);
  sampling.set_top_k(open.top_k);
  sampling.set_logprobs(open.logprobs);
  v1::StoppingParams stopping;
  stopping.set_max_tokens(open.max_tokens);
  stopping.set_min_tokens(open.min_tokens);
  for (int i = 0; i < open.stop_ids; ++i) stopping.add_stop_token_ids(i);
  return CheckOpen(open.id, open.prompt, open.output, sampling, stopping,
                   /*scoring=*/nullptr, open.deadline_ms,
                   /*max_model_len=*/100);
}

TEST(CheckOpenTest, EveryFieldHasItsRange) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const struct {
    Open open;
    const char* field;  // empty: right
  } cases[] = {
      {{}, ""},
      {{.id = ""}, "request_id"},
      {{.id = std::string(15, 'i')}, "request_id"},
      {{.id = std::string(17, 'i')}, "request_id"},
      {{.prompt = 0}, "prompt_token_ids"},
      {{.prompt = 1}, ""},
      {{.prompt = 99}, ""},
      {{.prompt = 100}, "prompt_token_ids"},
      {{.prompt = 95, .output = 4}, ""},
      {{.prompt = 96, .output = 4}, "prompt_token_ids"},
      {{.temperature = -0.1f}, "temperature"},
      {{.temperature = 2}, ""},
      {{.temperature = 2.1f}, "temperature"},
      {{.temperature = nan}, "temperature"},
      {{.top_p = 0}, "top_p"},
      {{.top_p = 0.1f}, ""},
      {{.top_p = 1.1f}, "top_p"},
      {{.top_p = nan}, "top_p"},
      {{.min_p = -0.1f}, "min_p"},
      {{.min_p = 1}, ""},
      {{.min_p = 1.1f}, "min_p"},
      {{.min_p = nan}, "min_p"},
      {{.top_k = -1}, "top_k"},
      {{.top_k = 1 << 30}, ""},
      {{.logprobs = -2}, "logprobs"},
      {{.logprobs = kernels::kMaxTopLogprobs}, ""},
      {{.logprobs = kernels::kMaxTopLogprobs + 1}, "logprobs"},
      {{.max_tokens = 0}, "max_tokens"},
      {{.output = 4, .max_tokens = 4}, "max_tokens"},
      {{.output = 4, .max_tokens = 5}, ""},
      {{.min_tokens = -1}, "min_tokens"},
      {{.min_tokens = 5}, ""},
      {{.min_tokens = 6}, "min_tokens"},
      {{.deadline_ms = 0}, "deadline_ms"},
      {{.deadline_ms = -1}, "deadline_ms"},
      {{.stop_ids = 512}, ""},
      {{.stop_ids = 513}, "stop_token_ids"},
  };
  for (const auto& c : cases) {
    const absl::Status status = Check(c.open);
    if (*c.field == '\0') {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.field;
      EXPECT_THAT(std::string(status.message()), HasSubstr(c.field));
    }
  }
}

TEST(ConvertTest, SamplingAndStoppingKeepEveryField) {
  v1::SamplingParams sampling;
  sampling.set_temperature(0.5f);
  sampling.set_top_k(7);
  sampling.set_top_p(0.25f);
  sampling.set_min_p(0.125f);
  sampling.set_seed(0xfedcba9876543210);
  sampling.set_logprobs(3);
  const engine::Sampling s = ToEngine(sampling, 9);
  EXPECT_EQ(s.temperature, 0.5f);
  EXPECT_EQ(s.top_k, 7);
  EXPECT_EQ(s.top_p, 0.25f);
  EXPECT_EQ(s.min_p, 0.125f);
  EXPECT_EQ(s.seed, 0xfedcba9876543210);
  EXPECT_EQ(s.logprobs, 3);
  EXPECT_EQ(s.sequence_index, 9u);
  v1::StoppingParams stopping;
  stopping.set_max_tokens(11);
  stopping.set_min_tokens(2);
  stopping.add_stop_token_ids(5);
  stopping.add_stop_token_ids(6);
  const engine::Stopping t = ToEngine(stopping);
  EXPECT_EQ(t.max_tokens, 11);
  EXPECT_EQ(t.min_tokens, 2);
  EXPECT_THAT(t.stop_token_ids, ElementsAre(5, 6));
  EXPECT_EQ(StopTokenOf(t, 6), 6);
  EXPECT_EQ(StopTokenOf(t, 7), -1);
}

// ---- CallClock

// Where this process was stopped, only what is sure ends a call: time that was
// given to a request, not silence.
TEST(TimedCallTest, TimeSleptThroughIsJudgedByDeadlinesAlone) {
  const absl::Time begun = absl::UnixEpoch();
  const struct {
    bool opened;
    uint64_t compiling;
    bool judge;
    const char* ends;  // empty: it goes on
  } cases[] = {
      {true, 0, false, "the request's deadline passed"},
      {true, 0, true, "the request's deadline passed"},
      {false, 0, false, ""},
      {false, 0, true, "the call was not opened"},
      {false, 1, false, "the request's deadline passed"},
      {false, 1, true, "the request's deadline passed"},
  };
  const absl::Time now = begun + kGrammarLimit + absl::Seconds(1);
  TimedCall call;
  call.compiling_since = begun;
  call.times = {.heard = now, .said = now, .deadline = now};
  for (const auto& c : cases) {
    call.compiling = c.compiling;
    const absl::Status status = Overdue(call, c.opened, now, c.judge,
                                        absl::Seconds(4), absl::Seconds(30));
    EXPECT_EQ(std::string(status.message()), c.ends);
  }
  call.times.deadline = absl::InfiniteFuture();
  const auto slow = [&](bool judge) {
    return Overdue(call, false, now, judge, absl::Seconds(4),
                   absl::Seconds(30));
  };
  EXPECT_TRUE(slow(false).ok());
  EXPECT_EQ(slow(true), GrammarOverdue());
}

TEST(TimedCallTest, AReaderThatTakesSomethingIsSlowAndNoMore) {
  const absl::Time begun = absl::UnixEpoch();
  TimedCall call;
  call.times.deadline = absl::InfiniteFuture();
  const auto overdue = [&](size_t unsent, int second) {
    const absl::Time now = begun + absl::Seconds(second);
    call.times.heard = now;
    call.LookAtReader(unsent, now);
    return Overdue(call, true, now, true, absl::Seconds(4), absl::Seconds(30));
  };
  call.Pause(65, begun);
  EXPECT_TRUE(overdue(65, 29).ok());
  EXPECT_TRUE(overdue(64, 30).ok());
  EXPECT_TRUE(overdue(64, 60).ok());
  EXPECT_EQ(ErrorReason(overdue(64, 61)), "SLOW_READER");
}

TEST(CallClockTest, JudgesNobodyAfterItStoodStill) {
  VirtualLoop world;
  VirtualProcess process(&world);
  std::string judged;
  CallClock clock(&process, [&](bool judge) { judged += judge ? 'j' : '-'; });
  world.RunFor(absl::Milliseconds(3500));
  EXPECT_EQ(judged, "jjj");
  process.Freeze();
  world.RunFor(absl::Seconds(10));
  EXPECT_EQ(judged, "jjj");
  process.Thaw();
  world.RunFor(absl::Milliseconds(2500));
  EXPECT_EQ(judged, "jjj-jj") << "what arrived meanwhile is read first";
}

// ---- Registration

// A router's end of all registrations.
struct Router : StreamHandler<v1::RegisterRequest> {
  explicit Router(VirtualLoop* world, const std::string& name)
      : host(std::make_shared<simulation::Host>(world, name)) {}
  void OnMessage(v1::RegisterRequest message) override {
    switch (message.event_case()) {
      case v1::RegisterRequest::kHello: {
        story += 'H';
        if (!refusal.ok()) {
          stream->Close(refusal);
          return;
        }
        v1::RegisterResponse response;
        response.mutable_welcome()->set_router_incarnation("router");
        if (welcomes) stream->Send(std::move(response));
        for (const auto& adapter : message.hello().adapters()) {
          story += adapter.name();
        }
        return;
      }
      case v1::RegisterRequest::kLoad:
        ++loads;
        return;
      case v1::RegisterRequest::kCache:
        if (message.cache().reset()) hashes.clear(), lacking.clear();
        story += message.cache().reset() ? 'R' : 'c';
        most_hashes = std::max(most_hashes, message.cache().added_size() +
                                                message.cache().lacking_size() +
                                                message.cache().removed_size());
        for (const uint64_t hash : message.cache().added()) {
          hashes.insert(hash);
          lacking.erase(hash);
        }
        for (const uint64_t hash : message.cache().lacking()) {
          hashes.insert(hash);
          lacking.insert(hash);
        }
        for (const uint64_t hash : message.cache().removed()) {
          hashes.erase(hash);
          lacking.erase(hash);
        }
        return;
      case v1::RegisterRequest::kAdapters:
        story += 'A';
        for (const auto& adapter : message.adapters().adapters()) {
          story += adapter.name();
        }
        return;
      case v1::RegisterRequest::kAdapterOutcome:
        story += 'O';
        outcomes.push_back(message.adapter_outcome());
        return;
      case v1::RegisterRequest::EVENT_NOT_SET:
        ADD_FAILURE();
    }
  }
  void OnClosed(absl::Status) override { story += 'x'; }
  void Beat() {
    v1::RegisterResponse response;
    response.mutable_beat();
    stream->Send(std::move(response));
  }

  std::shared_ptr<simulation::Host> host;
  std::unique_ptr<Stream<v1::RegisterResponse, v1::RegisterRequest>> stream;
  bool welcomes = true;
  absl::Status refusal;
  int loads = 0;
  std::string story;
  std::set<uint64_t> hashes;
  std::set<uint64_t> lacking;  // of them
  int most_hashes = 0;         // in a message
  std::vector<v1::AdapterOutcome> outcomes;
};

struct RegistrationTest : ::testing::Test {
  RegistrationTest()
      : random(1),
        network(&world, &random, {}),
        worker(std::make_shared<simulation::Host>(&world, "worker")),
        one(&world, "one"),
        two(&world, "two"),
        pool(8, 4, 1, {.full = 1, .windowed = 1}) {
    options.hello.mutable_worker()->set_worker_id("worker");
    options.max_hashes_per_message = 5;
    Register();
  }
  void Register() {
    registration = std::make_unique<Registration>(
        options, &worker->loop, &random,
        [this](const std::string& endpoint) {
          Router* const router = endpoint == "one" ? &one : &two;
          ++dials;
          return network.Connect<v1::RegisterRequest, v1::RegisterResponse>(
              worker, router->host, false, [router](auto stream) {
                router->stream = std::move(stream);
                router->stream->Start(router);
              });
        },
        [this] { return now; }, &pool,
        [this](const std::string& endpoint, const absl::Status&) {
          troubles += endpoint + " ";
        });
  }
  ~RegistrationTest() override {
    one.stream.reset();
    two.stream.reset();
    registration.reset();
    // Messages on their way hold their hosts, whose loops hold them.
    for (const auto& host : {worker, one.host, two.host}) host->loop.Stop();
  }
  // Publishes a block, or several, and lets them go: they are cached.
  void Cache(const std::vector<int32_t>& tokens) {
    auto blocks = pool.Allocate(static_cast<int>(tokens.size()) / 4);
    const auto hashes =
        engine::HashBlocks(engine::RootHash("", 4, ""), tokens, 4);
    for (size_t i = 0; i < blocks.size(); ++i) {
      pool.Publish(blocks[i], hashes[i]);
    }
  }
  void RunWithBeats(absl::Duration duration) {
    for (absl::Duration t; t < duration; t += absl::Milliseconds(500)) {
      for (Router* router : {&one, &two}) {
        if (router->stream != nullptr && router->host->alive) router->Beat();
      }
      world.RunFor(absl::Milliseconds(500));
    }
  }
  std::set<uint64_t> Cached() const {
    const auto all = pool.CachedHashes();
    return {all.begin(), all.end()};
  }

  VirtualLoop world;
  SeededRandom random;
  simulation::Network network;
  std::shared_ptr<simulation::Host> worker;
  Router one, two;
  engine::KvPool pool;
  RegistrationOptions options;
  v1::WorkerLoad now;
  int dials = 0;
  std::string troubles;
  std::unique_ptr<Registration> registration;
};

TEST_F(RegistrationTest, EveryRouterKnowsTheCacheAndItsChanges) {
  Cache({1, 2, 3, 4, 5, 6, 7, 8});
  registration->SetRouters({"one"});
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(registration->connected(), 1);
  EXPECT_EQ(one.hashes, Cached());
  EXPECT_EQ(one.hashes.size(), 2u);
  EXPECT_EQ(one.story, "HR");
  Cache({9, 9, 9, 9});
  // The second comes later, and gets everything.
  registration->SetRouters({"one", "two"});
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(two.hashes, Cached());
  Cache({7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7});
  Cache({6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6});  // evicts
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(one.hashes, Cached());
  EXPECT_EQ(two.hashes, Cached());
  EXPECT_EQ(one.hashes.size(), 8u);
  EXPECT_GE(one.loads, 10);
  EXPECT_EQ(troubles, "");
}

// To who was there before, and to who comes later, in small messages.
TEST_F(RegistrationTest, RoutersHearOfBlocksThatLackParts) {
  registration->SetRouters({"one"});
  RunWithBeats(absl::Seconds(1));
  Cache({1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4,
         5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 8, 8, 8, 8});
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(one.hashes, Cached());
  EXPECT_TRUE(one.lacking.empty());
  {
    const auto hashes =
        engine::HashBlocks(engine::RootHash("", 4, ""),
                           {1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4,
                            5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 8, 8, 8, 8},
                           4);
    const auto blocks = pool.Match(hashes, /*whole=*/false);
    ASSERT_EQ(blocks.size(), 8u);
    pool.Allocate(3);  // takes six of their parts, and gives them back
  }
  registration->SetRouters({"one", "two"});
  RunWithBeats(absl::Seconds(1));
  for (const Router* router : {&one, &two}) {
    EXPECT_EQ(router->hashes, Cached());
    EXPECT_EQ(router->lacking.size(), 6u);
    const auto all = pool.LackingHashes();
    EXPECT_EQ(router->lacking, std::set<uint64_t>(all.begin(), all.end()));
    EXPECT_LE(router->most_hashes, 5);
  }
}

TEST_F(RegistrationTest, ItIsSaidSoonThatAWorkerHasBecomeIdle) {
  options.load_interval = absl::Seconds(2);
  Register();
  now.set_streams(3);
  registration->SetRouters({"one"});
  world.RunFor(absl::Milliseconds(2200));
  const int loads = one.loads;
  now.set_streams(1);  // not idle yet
  world.RunFor(absl::Milliseconds(300));
  EXPECT_EQ(one.loads, loads);
  now.set_streams(0);
  world.RunFor(absl::Milliseconds(300));  // with its way
  EXPECT_EQ(one.loads, loads + 1);        // once
  now.set_blocks_live(1);
  world.RunFor(absl::Milliseconds(100));
  EXPECT_EQ(one.loads, loads + 1);
}

// What is there at once.
struct Files final : AdapterMemory {
  void Read(
      const std::string& /*path*/,
      absl::AnyInvocable<void(absl::StatusOr<std::string>)> done) override {
    if (hold) {
      held = std::move(done);
    } else {
      done(std::string(64, 'a'));
    }
  }
  void Put(int /*slot*/, absl::AnyInvocable<void()> done) override { done(); }
  void Forget() override {}
  bool hold = false;
  absl::AnyInvocable<void(absl::StatusOr<std::string>)> held;
};

TEST_F(RegistrationTest, RoutersCommandAdaptersAndAllHearOfThem) {
  AdapterTable table(2);
  Files files;
  AdapterLoader loader(&table, &files, [&] {
    v1::AdapterList list;
    table.List(list.mutable_adapters());
    registration->SetAdapters(list);
  });
  registration->ServeAdapters(&loader);
  registration->SetRouters({"one", "two"});
  RunWithBeats(absl::Seconds(1));
  const auto load = [&](Router* router, const std::string& name) {
    v1::RegisterResponse command;
    command.mutable_load_adapter()->set_command(7);
    command.mutable_load_adapter()->set_name(name);
    command.mutable_load_adapter()->set_path("/" + name);
    router->stream->Send(std::move(command));
  };
  load(&one, "verse");
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(one.story, "HRAverseO");  // the list before the outcome
  EXPECT_EQ(two.story, "HRAverse");
  ASSERT_EQ(one.outcomes.size(), 1u);
  EXPECT_EQ(one.outcomes[0].command(), 7u);
  EXPECT_EQ(one.outcomes[0].code(), 0);

  // Who asked has come anew since: the number may be of another command.
  files.hold = true;
  load(&one, "prose");
  RunWithBeats(absl::Seconds(1));
  one.stream->Close(absl::UnavailableError("gone"));
  RunWithBeats(absl::Seconds(1));
  files.held(std::string(64, 'b'));
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(one.outcomes.size(), 1u);
  EXPECT_EQ(one.story, "HRAverseOHverseRAproseverse");

  v1::RegisterResponse command;
  command.mutable_unload_adapter()->set_command(8);
  command.mutable_unload_adapter()->set_name("verse");
  two.stream->Send(std::move(command));
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(two.story, "HRAverseAproseverseAproseO");
  EXPECT_EQ(two.outcomes.at(0).command(), 8u);
  loader.Stop();
}

TEST_F(RegistrationTest, AWholeCacheComesInPieces) {
  std::vector<int32_t> tokens(8 * 4, 5);
  Cache(tokens);
  registration->SetRouters({"one"});
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(one.story, "HRc");
  EXPECT_EQ(one.hashes.size(), 8u);
  EXPECT_EQ(one.hashes, Cached());
  tokens.assign(8 * 4, 6);
  Cache(tokens);  // eight that come for eight that go
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(one.story, "HRccccc");
  EXPECT_EQ(one.hashes.size(), 8u);
  EXPECT_EQ(one.hashes, Cached());
  EXPECT_EQ(one.most_hashes, 5);
  EXPECT_EQ(troubles, "");
}

TEST_F(RegistrationTest, WhatGoesAndNothingComesForIsSaid) {
  Cache(std::vector<int32_t>(8 * 4, 5));
  registration->SetRouters({"one"});
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(one.hashes.size(), 8u);
  const std::vector<engine::BlockRef> taken = pool.Allocate(3);
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(one.hashes.size(), 5u);
  EXPECT_EQ(one.hashes, Cached());
}

TEST_F(RegistrationTest, NoMoreIsSaidThanRoutersRemember) {
  options.max_cached_hashes = 7;
  Register();
  Cache(std::vector<int32_t>(8 * 4, 5));
  registration->SetRouters({"one"});
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(one.hashes.size(), 7u);
}

TEST_F(RegistrationTest, ARouterThatStartsLaterIsNotLost) {
  one.host->alive = false;
  registration->SetRouters({"one"});
  world.RunFor(absl::Seconds(4));
  EXPECT_GE(dials, 3);
  EXPECT_EQ(troubles, "");
  world.RunFor(absl::Seconds(12));
  EXPECT_THAT(troubles, ::testing::StartsWith("one "));
}

TEST_F(RegistrationTest, ARouterThatTookItsLeaveIsNotDialledAtOnce) {
  registration->SetRouters({"one"});
  RunWithBeats(absl::Seconds(1));
  one.stream->Close(
      MakeError(absl::StatusCode::kUnavailable, "DRAINING", "going away"));
  world.RunFor(absl::Milliseconds(350));
  EXPECT_EQ(troubles, "one ");
  EXPECT_EQ(dials, 1);
  world.RunFor(absl::Milliseconds(350));
  EXPECT_EQ(dials, 2);
}

TEST_F(RegistrationTest, ABrokenStreamIsDialledAgainAndSaysEverything) {
  registration->SetRouters({"one"});
  RunWithBeats(absl::Seconds(1));
  one.stream->Close(absl::UnavailableError("gone"));
  world.RunFor(absl::Milliseconds(50));
  EXPECT_EQ(registration->connected(), 0);
  Cache({1, 2, 3, 4});
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(troubles, "one ");
  EXPECT_EQ(dials, 2);
  EXPECT_EQ(one.story, "HRHR");
  EXPECT_EQ(one.hashes, Cached());
  EXPECT_EQ(registration->connected(), 1);
}

TEST_F(RegistrationTest, ASilentRouterIsLeftAndDialledMoreAndMoreSeldom) {
  one.welcomes = false;
  registration->SetRouters({"one"});
  world.RunFor(absl::Seconds(4));
  EXPECT_EQ(registration->connected(), 0);
  EXPECT_EQ(dials, 1);
  world.RunFor(absl::Seconds(60));
  // 4 s of silence each, and a back-off of 0.1, 0.2, ... 5 s.
  EXPECT_GE(dials, 7);
  EXPECT_LE(dials, 12);
  world.RunFor(absl::Minutes(5));
  EXPECT_GE(dials, 35);
  // Once it is back, the next time begins at the shortest.
  one.welcomes = true;
  RunWithBeats(absl::Seconds(12));
  ASSERT_EQ(registration->connected(), 1);
  const int before = dials;
  one.welcomes = false;
  one.stream->Close(absl::UnavailableError("gone"));
  world.RunFor(absl::Milliseconds(300));
  EXPECT_EQ(dials, before + 1);
  EXPECT_EQ(registration->connected(), 0);  // not welcomed yet
}

// `router`'s, of a worker that it has already.
absl::Status AlreadyRegistered(const std::string& router) {
  return MakeError(absl::StatusCode::kAlreadyExists, "ALREADY_REGISTERED", "",
                   {{"router", absl::BytesToHexString(router)}});
}

TEST_F(RegistrationTest, ASecondAddressOfARouterIsKeptForWhenTheFirstIsLost) {
  registration->SetRouters({"one"});
  RunWithBeats(absl::Seconds(1));
  two.refusal = AlreadyRegistered("router");
  registration->SetRouters({"one", "two"});
  RunWithBeats(absl::Seconds(20));
  EXPECT_EQ(registration->connected(), 1);
  EXPECT_EQ(one.story, "HR");
  EXPECT_GE(dials, 1 + 4);  // every 5 s, more or less
  EXPECT_LE(dials, 1 + 6);
  EXPECT_EQ(troubles, "");
  one.welcomes = false;
  one.stream->Close(absl::UnavailableError("gone"));
  two.refusal = absl::OkStatus();
  RunWithBeats(absl::Seconds(8));
  EXPECT_EQ(registration->connected(), 1);
  EXPECT_EQ(two.story.substr(two.story.size() - 2), "HR");
}

TEST_F(RegistrationTest, WhereItsOwnLastStreamIsInTheWayItDialsAgainSoon) {
  registration->SetRouters({"one", "two"});
  RunWithBeats(absl::Seconds(1));
  one.refusal = AlreadyRegistered("another");  // that "two" is not
  one.stream->Close(absl::UnavailableError("gone"));
  RunWithBeats(absl::Seconds(2));
  EXPECT_GE(dials, 2 + 8);
  one.refusal = absl::OkStatus();
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(registration->connected(), 2);
}

TEST_F(RegistrationTest, ARouterThatIsNoLongerNamedIsLeft) {
  registration->SetRouters({"one", "two"});
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(registration->connected(), 2);
  registration->SetRouters({"two"});
  RunWithBeats(absl::Seconds(1));
  EXPECT_EQ(registration->connected(), 1);
  EXPECT_EQ(one.story.back(), 'x');
  EXPECT_THAT(troubles, IsEmpty());
}

TEST_F(RegistrationTest, ASlowRouterLosesIncrementsAndGetsAllAnew) {
  registration->SetRouters({"one"});
  RunWithBeats(absl::Seconds(1));
  one.stream->PauseReading(true);
  RunWithBeats(absl::Seconds(20));  // more than its queue holds
  Cache({1, 2, 3, 4});
  RunWithBeats(absl::Seconds(2));
  EXPECT_EQ(one.hashes.size(), 0u);
  one.stream->PauseReading(false);
  RunWithBeats(absl::Seconds(2));
  EXPECT_EQ(one.hashes, Cached());
  EXPECT_EQ(one.story.back(), 'R');
}

}  // namespace
}  // namespace tandem::worker
