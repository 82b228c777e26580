// SPDX-License-Identifier: Apache-2.0
// Who is registered, which of them fit together, and what is held against
// them for how long.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "common/error.h"
#include "engine/kv/kv_pool.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

TEST(RegistryTest, BrokenOrSilentLeasesGetNothingNew) {
  World w;
  LeasePipe* d0 = w.Decode("d0");
  EXPECT_TRUE(d0->sent[0].has_welcome());
  EXPECT_EQ(w.core->ready_workers(v1::WORKER_ROLE_DECODE), 1);
  w.RunFor(absl::Seconds(20));
  EXPECT_EQ(w.core->ready_workers(v1::WORKER_ROLE_DECODE), 1);
  EXPECT_TRUE(d0->sent.back().has_beat());
  w.frozen.insert(d0);
  w.RunFor(absl::Seconds(6));
  EXPECT_EQ(w.core->ready_workers(v1::WORKER_ROLE_DECODE), 0);
  EXPECT_TRUE(d0->dropped);
  LeasePipe* d1 = w.Decode("d1");
  EXPECT_EQ(w.core->ready_workers(v1::WORKER_ROLE_DECODE), 1);
  d1->Break(absl::UnavailableError(""));
  EXPECT_EQ(w.core->ready_workers(v1::WORKER_ROLE_DECODE), 0);
}

TEST(RegistryTest, WrongHellosAreRefusedByName) {
  struct Case {
    const char* field;
    std::function<void(v1::WorkerHello*)> spoil;
  };
  for (const Case& c : {
           Case{"worker_id",
                [](auto* h) { h->mutable_worker()->set_worker_id(""); }},
           Case{"worker_id",
                [](auto* h) { h->mutable_worker()->set_worker_id("a\nb"); }},
           Case{"incarnation",
                [](auto* h) { h->mutable_worker()->set_incarnation("short"); }},
           Case{"endpoint",
                [](auto* h) { h->mutable_worker()->set_endpoint(""); }},
           Case{"role",
                [](auto* h) { h->set_role(v1::WORKER_ROLE_UNSPECIFIED); }},
           Case{"max_model_len", [](auto* h) { h->set_max_model_len(0); }},
           Case{"block_size", [](auto* h) { h->set_block_size(0); }},
           Case{"num_blocks", [](auto* h) { h->set_num_blocks(-1); }},
           Case{"max_num_seqs", [](auto* h) { h->set_max_num_seqs(0); }},
           Case{"protocol_min", [](auto* h) { h->set_protocol_min(2); }},
           Case{"serves", [](auto* h) { h->set_model("other"); }},
       }) {
    World w;
    v1::WorkerHello hello = World::Hello("d0", v1::WORKER_ROLE_DECODE);
    c.spoil(&hello);
    LeasePipe* lease = w.Register(hello);
    EXPECT_TRUE(lease->dropped) << c.field;
    EXPECT_THAT(std::string(lease->status.message()),
                ::testing::HasSubstr(c.field));
    EXPECT_EQ(w.core->State(false).rejected_size(), 1);
  }
}

TEST(RegistryTest, AWorkerRegistersAsWhatItsCertificateSays) {
  using enum rpc::PeerRole;
  const auto peer = [](rpc::PeerRole role, const char* id) {
    return rpc::PeerIdentity{.authenticated = true,
                             .identities = {{.role = role, .worker_id = id}}};
  };
  struct Case {
    rpc::PeerIdentity peer;
    v1::WorkerRole role;
    bool taken;
  };
  for (const Case& c : {
           Case{{}, v1::WORKER_ROLE_DECODE, true},  // plain text
           Case{peer(kDecode, "w0"), v1::WORKER_ROLE_DECODE, true},
           Case{peer(kDecode, ""), v1::WORKER_ROLE_DECODE, true},
           Case{peer(kPrefill, "w0"), v1::WORKER_ROLE_PREFILL, true},
           Case{peer(kDecode, "w1"), v1::WORKER_ROLE_DECODE, false},
           Case{peer(kPrefill, "w1"), v1::WORKER_ROLE_PREFILL, false},
           Case{peer(kDecode, "w0"), v1::WORKER_ROLE_PREFILL, false},
           Case{peer(kPrefill, "w0"), v1::WORKER_ROLE_DECODE, false},
           Case{peer(kRouter, ""), v1::WORKER_ROLE_DECODE, false},
           Case{{.authenticated = true}, v1::WORKER_ROLE_DECODE, false},
       }) {
    World w;
    // Whom it would take the place of.
    LeasePipe* const rightful = w.Register(World::Hello("w0", c.role));
    w.frozen.insert(rightful);
    w.RunFor(absl::Seconds(1));
    LeasePipe* const lease =
        w.Register(World::Hello("w0", c.role, 'x'), c.peer);
    EXPECT_EQ(lease->dropped, !c.taken);
    EXPECT_EQ(rightful->dropped, c.taken);
    EXPECT_EQ(w.core->ready_workers(c.role), 1);
    if (c.taken) continue;
    EXPECT_EQ(lease->status.code(), absl::StatusCode::kPermissionDenied);
    EXPECT_EQ(ErrorReason(lease->status), "IDENTITY_MISMATCH");
    EXPECT_EQ(w.core->State(false).rejected(0).worker_id(), "w0");
  }
}

TEST(RegistryTest, PairsThatDifferAreNamedFieldByField) {
  World w;
  v1::WorkerHello p = World::Hello("p0", v1::WORKER_ROLE_PREFILL);
  (*p.mutable_fingerprint())["weights"] = "v2";
  w.Register(p);
  w.Decode("d0");
  w.Submit(World::Ask());
  EXPECT_FALSE(w.decodes[0].sent[0].open().has_prefill_worker());
  const v1::GetClusterStateResponse state = w.core->State(true);
  ASSERT_EQ(state.avoided_pairs_size(), 1);
  EXPECT_EQ(state.avoided_pairs(0).reason(), "fingerprint weights: v2 != w");
  EXPECT_EQ(state.in_flight(0).phase(), "opening");
}

// A model's config is longer than what is shown of it.
TEST(RegistryTest, OfAConfigTheWordsThatDifferAreNamed) {
  const std::string config =
      "LlamaForCausalLM hidden=64 intermediate=128 layers=4 heads=4 ";
  World w;
  v1::WorkerHello p = World::Hello("p0", v1::WORKER_ROLE_PREFILL);
  (*p.mutable_fingerprint())["config"] = config + "rope_theta=10000 tied=1";
  w.Register(p);
  v1::WorkerHello d = World::Hello("d0", v1::WORKER_ROLE_DECODE);
  (*d.mutable_fingerprint())["config"] = config + "rope_theta=500000 tied=1";
  w.Register(d);
  const v1::GetClusterStateResponse state = w.core->State(false);
  ASSERT_EQ(state.avoided_pairs_size(), 1);
  EXPECT_EQ(state.avoided_pairs(0).reason(),
            "fingerprint config: rope_theta=10000 != rope_theta=500000");
}

TEST(RegistryTest, AWorkerThatRefusesIsShownAsFullForAMoment) {
  World w;
  w.Decode("d0");
  w.Submit(World::Ask());
  const auto full = [&] { return w.core->State(false).workers(0).full(); };
  EXPECT_FALSE(full());
  w.decodes[0].Break(absl::ResourceExhaustedError("no slot"));
  w.Settle();
  EXPECT_TRUE(full());
  w.RunFor(absl::Milliseconds(60));
  ASSERT_EQ(w.decodes.size(), 2u);
  w.decodes[1].Say(World::Opened(1, "t"));
  w.RunFor(absl::Milliseconds(60));
  EXPECT_FALSE(full());
}

TEST(RegistryTest, NumericsMayDifferWhereBothAllowIt) {
  for (const bool decode_allows : {false, true}) {
    World w;
    v1::WorkerHello p = World::Hello("p0", v1::WORKER_ROLE_PREFILL);
    (*p.mutable_fingerprint())["numerics"] = "other";
    p.set_mixed_numerics(true);
    w.Register(p);
    v1::WorkerHello d = World::Hello("d0", v1::WORKER_ROLE_DECODE);
    d.set_mixed_numerics(decode_allows);
    w.Register(d);
    w.Submit(World::Ask());
    EXPECT_EQ(w.decodes[0].sent[0].open().has_prefill_worker(), decode_allows);
  }
}

TEST(RegistryTest, APrefillWorkerMustKnowTheOthersKvFormat) {
  struct Row {
    const char* decodes;
    std::vector<const char*> sends;  // none: an older worker
    bool fits;
  };
  for (const Row& row : std::vector<Row>{{"bf16", {}, true},
                                         {"fp8", {}, false},
                                         {"fp8", {"f32", "fp8"}, true},
                                         {"int4", {"f32", "fp8"}, false}}) {
    World w;
    v1::WorkerHello p = World::Hello("p0", v1::WORKER_ROLE_PREFILL);
    (*p.mutable_fingerprint())["numerics"] = "other";
    p.set_mixed_numerics(true);
    p.set_kv_dtype("f32");
    for (const char* format : row.sends) p.add_kv_formats(format);
    w.Register(p);
    v1::WorkerHello d = World::Hello("d0", v1::WORKER_ROLE_DECODE);
    d.set_mixed_numerics(true);
    d.set_kv_dtype(row.decodes);
    w.Register(d);
    w.Submit(World::Ask());
    EXPECT_EQ(w.decodes[0].sent[0].open().has_prefill_worker(), row.fits)
        << row.decodes;
  }
}

TEST(RegistryTest, ADecodeWorkerMustKnowThePrefillWorkersKvFormat) {
  // It refuses links from a format that it has not heard of.
  for (const bool knows : {false, true}) {
    World w;
    v1::WorkerHello p = World::Hello("p0", v1::WORKER_ROLE_PREFILL);
    (*p.mutable_fingerprint())["numerics"] = "other";
    p.set_mixed_numerics(true);
    p.set_kv_dtype("fp8");
    for (const char* format : {"f32", "bf16", "fp8"}) p.add_kv_formats(format);
    w.Register(p);
    v1::WorkerHello d = World::Hello("d0", v1::WORKER_ROLE_DECODE);
    d.set_mixed_numerics(true);
    d.set_kv_dtype("bf16");
    if (knows) d.add_kv_formats("bf16"), d.add_kv_formats("fp8");
    w.Register(d);
    w.Submit(World::Ask());
    EXPECT_EQ(w.decodes[0].sent[0].open().has_prefill_worker(), knows);
    const v1::GetClusterStateResponse state = w.core->State(false);
    EXPECT_EQ(state.avoided_pairs_size(), knows ? 0 : 1);
    if (!knows) {
      EXPECT_EQ(state.avoided_pairs(0).reason(),
                "KV format: fp8, which the decode worker does not know");
    }
  }
}

TEST(RegistryTest, ARestartClearsWhatWasHeldAgainstAPair) {
  struct Case {
    const char* worker;
    char incarnation;
    bool breaks;  // or its lease is silent
    int left;
  };
  for (const Case& c : {Case{"p0", '1', false, 2}, Case{"p0", '1', true, 2},
                        Case{"p0", '2', false, 0}, Case{"p0", '2', true, 0},
                        Case{"d0", '1', false, 2}, Case{"d0", '1', true, 2},
                        Case{"d0", '2', false, 1}, Case{"d0", '2', true, 1}}) {
    World w;
    w.around_recorder = true;
    LeasePipe* const p0 = w.Prefill("p0");
    LeasePipe* const d0 = w.Decode("d0");
    w.Decode("d00");  // whose pair is another
    w.core->registry().PairFailed("p0", "d0", "shm", "digest");
    w.core->registry().PairFailed("p0", "d00", "shm", "digest");
    const bool is_prefill = c.worker[0] == 'p';
    LeasePipe* const lease = is_prefill ? p0 : d0;
    if (c.breaks) {
      lease->Break(absl::UnavailableError("reset"));
    } else {
      w.frozen.insert(lease);
    }
    w.RunFor(absl::Milliseconds(750));
    w.Register(World::Hello(
        c.worker, is_prefill ? v1::WORKER_ROLE_PREFILL : v1::WORKER_ROLE_DECODE,
        c.incarnation));
    EXPECT_EQ(w.core->State(false).avoided_pairs_size(), c.left)
        << c.worker << " " << c.incarnation << " " << c.breaks;
  }
}

TEST(RegistryTest, AWorkerThatRegistersAnewIsAvoidedNoMore) {
  for (const char incarnation : {'1', '2'}) {
    World w;
    w.around_recorder = true;
    LeasePipe* const lease = w.Decode("d0");
    w.core->registry().CallFailed(
        World::Hello("d0", v1::WORKER_ROLE_DECODE).worker(), "reset");
    ASSERT_FALSE(w.core->State(false).workers(0).placeable());
    lease->Break(absl::UnavailableError("reset"));
    w.Register(World::Hello("d0", v1::WORKER_ROLE_DECODE, incarnation));
    EXPECT_TRUE(w.core->State(false).workers(0).placeable()) << incarnation;
  }
}

TEST(RegistryTest, AWayIsAvoidedForItsTime) {
  World w;
  w.around_recorder = true;
  w.Prefill("p0");
  w.Decode("d0");
  w.core->registry().PairFailed("p0", "d0", "shm", "digest");
  const auto ways = [&] { return w.core->registry().WaysToAvoid("p0", "d0"); };
  EXPECT_THAT(ways(), ::testing::ElementsAre("shm"));
  w.RunFor(w.options.avoid_first);
  EXPECT_THAT(ways(), ::testing::IsEmpty());
  // That was the probe, and others wait for what comes of it.
  EXPECT_THAT(ways(), ::testing::ElementsAre("shm"));
  w.core->registry().PairFailed("p0", "d0", "shm", "digest");
  w.RunFor(w.options.avoid_first);
  EXPECT_THAT(ways(), ::testing::ElementsAre("shm"));
  w.RunFor(w.options.avoid_first);
  EXPECT_THAT(ways(), ::testing::IsEmpty());
  w.core->registry().PairWorked("p0", "d0", "shm");
  EXPECT_THAT(ways(), ::testing::IsEmpty());
}

// The probe of a pair whose every way failed may find another one than the last
// that failed.
TEST(RegistryTest, APairOfWhichAWayWorksIsNotAvoided) {
  World w;
  w.around_recorder = true;
  w.Prefill("p0");
  w.Decode("d0");
  Registry& registry = w.core->registry();
  const auto allowed = [&] {
    return registry.PairAllowed(*registry.Find("p0"), *registry.Find("d0"));
  };
  registry.PairFailed("p0", "d0", "grpc", "refused");
  EXPECT_FALSE(allowed());
  w.RunFor(w.options.avoid_first);
  EXPECT_TRUE(allowed());
  EXPECT_THAT(registry.WaysToAvoid("p0", "d0"), ::testing::IsEmpty());
  EXPECT_FALSE(allowed());
  registry.PairWorked("p0", "d0", "shm");
  EXPECT_TRUE(allowed());
}

TEST(RegistryTest, WhatBefallsWorkersIsToldWithItsCause) {
  using ::testing::ElementsAre;
  World w;
  w.around_recorder = true;
  LeasePipe* d0 = w.Decode("d0");
  LeasePipe* p0 = w.Prefill("p0");
  // Many failures within its time are one.
  for (int i = 0; i < 3; ++i) {
    w.core->registry().CallFailed(
        World::Hello("d0", v1::WORKER_ROLE_DECODE).worker(), "reset");
    w.core->registry().PairFailed("p0", "d0", "shm", "no progress");
  }
  EXPECT_THAT(w.told, ElementsAre("avoided d0", "avoided p0 d0 shm"));
  w.told.clear();
  d0->Break(absl::UnavailableError(""));
  w.frozen.insert(p0);
  w.RunFor(absl::Seconds(6));
  EXPECT_THAT(w.told, ElementsAre("lost d0 reset", "lost p0 silence"));
  w.told.clear();
  LeasePipe* d1 = w.Decode("d1");
  w.Load(d1, v1::WORKER_STATE_DRAINING);
  d1->Break(absl::UnavailableError(""));
  EXPECT_THAT(w.told, ElementsAre("lost d1 left"));
  w.told.clear();
  v1::WorkerHello strange = World::Hello("d2", v1::WORKER_ROLE_DECODE);
  strange.set_model("other");
  w.Register(strange);
  EXPECT_THAT(w.told, ElementsAre("refused d2"));
}

TEST(RegistryTest, ARouterThatGoesAwayLosesNobody) {
  World w;
  w.around_recorder = true;
  LeasePipe* d0 = w.Decode("d0");
  w.core->LeaveWorkers();
  EXPECT_FALSE(d0->open);
  EXPECT_EQ(ErrorReason(d0->status), "DRAINING");
  w.RunFor(absl::Seconds(10));
  EXPECT_THAT(w.told, ::testing::IsEmpty());
}

TEST(RegistryTest, OfTwoOfOneNameTheFirstKeepsItUnlessItIsSilent) {
  using ::testing::ElementsAre;
  const auto hello = [](char incarnation) {
    return World::Hello("d0", v1::WORKER_ROLE_DECODE, incarnation);
  };
  {
    World w;
    LeasePipe* old = w.Register(hello('1'));
    w.frozen.insert(old);
    w.RunFor(absl::Seconds(2));
    w.Register(hello('2'));
    EXPECT_THAT(w.told, ElementsAre("lost d0 restarted"));
    EXPECT_EQ(w.core->State(false).rejected_size(), 0);
  }
  World w;
  LeasePipe* const first = w.Register(hello('1'));
  for (int i = 0; i < 4; ++i) {
    w.RunFor(absl::Seconds(1));
    w.Register(hello('2'));
    EXPECT_EQ(w.told.back(), "refused d0");
  }
  EXPECT_EQ(w.told.size(), 4u);
  ASSERT_EQ(w.core->State(false).workers_size(), 1);
  EXPECT_EQ(w.core->State(false).workers(0).hello().worker().incarnation(),
            hello('1').worker().incarnation());
  ASSERT_EQ(w.core->State(false).rejected_size(), 1);
  EXPECT_THAT(w.core->State(false).rejected(0).reason(),
              ::testing::HasSubstr("two processes have this --worker-id"));
  w.RunFor(absl::Minutes(1) + absl::Seconds(1));
  EXPECT_EQ(w.core->State(false).rejected_size(), 0);
  w.Register(hello('2'));
  EXPECT_EQ(w.core->State(false).rejected_size(), 1);
  first->Break(absl::UnavailableError(""));
  w.told.clear();
  w.Register(hello('2'));
  EXPECT_THAT(w.told, ElementsAre());
  EXPECT_EQ(w.core->State(false).rejected_size(), 0);
  EXPECT_EQ(w.core->State(false).workers(0).hello().worker().incarnation(),
            hello('2').worker().incarnation());
}

// As one does that has found two addresses of a router: its registrations
// would end each other for ever.
TEST(RegistryTest, AWorkerThatIsHeardIsNotRegisteredTwice) {
  World w;
  LeasePipe* const first = w.Decode("d0");
  for (int i = 0; i < 3; ++i) {
    LeasePipe* const second = w.Decode("d0");
    EXPECT_EQ(second->status.code(), absl::StatusCode::kAlreadyExists);
    EXPECT_EQ(ErrorReason(second->status), "ALREADY_REGISTERED");
    EXPECT_EQ(ErrorMetadata(second->status)["router"],
              absl::BytesToHexString(w.options.incarnation));
    w.RunFor(absl::Seconds(1));
  }
  EXPECT_TRUE(first->open);
  EXPECT_EQ(w.core->registry().registrations(), 1);
  EXPECT_THAT(w.told, ::testing::IsEmpty());
  EXPECT_EQ(w.core->State(false).rejected_size(), 0);
  // Its stream broke, of which nothing has come here yet.
  w.frozen.insert(first);
  w.RunFor(absl::Seconds(1));
  LeasePipe* const anew = w.Decode("d0");
  EXPECT_TRUE(anew->open);
  EXPECT_TRUE(first->dropped);
}

TEST(RegistryTest, ContextIsWhatEveryDecodeWorkerHolds) {
  World w;
  EXPECT_EQ(w.core->context_length(), 0);
  w.Decode("d0");
  v1::WorkerHello small = World::Hello("d1", v1::WORKER_ROLE_DECODE);
  small.set_max_model_len(300);
  w.Register(small);
  EXPECT_EQ(w.core->context_length(), 300);
}

TEST(AvoidListTest, ProbesBackWithDoublingTimeouts) {
  AvoidList list(absl::Seconds(1), absl::Seconds(4));
  absl::Time now = absl::FromUnixSeconds(100);
  for (const int seconds : {1, 2, 4, 4}) {
    list.Failed("x", now, "why");
    EXPECT_TRUE(list.Avoided(
        "x", now + absl::Seconds(seconds) - absl::Milliseconds(1)));
    now += absl::Seconds(seconds);
    EXPECT_FALSE(list.Avoided("x", now));
  }
  list.Using("x", now);  // the probe: others stay away
  EXPECT_TRUE(list.Avoided("x", now));
  list.Succeeded("x");
  EXPECT_FALSE(list.Avoided("x", now));
}

// As calls do that are refused: long before the others' time to stay away.
TEST(AvoidListTest, AProbeThatFailsAtOnceDoublesTheTimeout) {
  AvoidList list(absl::Seconds(1), absl::Seconds(4));
  absl::Time now = absl::FromUnixSeconds(100);
  EXPECT_EQ(list.Failed("x", now, "why"), absl::Seconds(1));
  absl::Duration timeout = absl::Seconds(1);
  for (const int seconds : {2, 4, 4}) {
    now += timeout;
    list.Using("x", now);
    now += absl::Milliseconds(5);
    timeout = list.Failed("x", now, "why");
    EXPECT_EQ(timeout, absl::Seconds(seconds));
    // Those that failed with it.
    EXPECT_EQ(list.Failed("x", now, "why"), absl::ZeroDuration());
    EXPECT_TRUE(list.Avoided("x", now + timeout - absl::Milliseconds(1)));
    EXPECT_FALSE(list.Avoided("x", now + timeout));
  }
}

TEST(AvoidListTest, WhatFailedIsRememberedBeyondItsTime) {
  AvoidList list(absl::Seconds(1), absl::Seconds(4));
  const absl::Time now = absl::FromUnixSeconds(100);
  list.Failed("x", now, "why");
  list.Sweep(now + absl::Seconds(9));
  EXPECT_EQ(list.Failed("x", now + absl::Seconds(9), "why"), absl::Seconds(2));
  list.Sweep(now + absl::Seconds(20));
  EXPECT_TRUE(list.entries().empty());
}

TEST(RegistryTest, AWorkerWhoseCallsFailIsProbedEverMoreSeldom) {
  World w;
  w.Decode("good");
  w.Decode("bad");
  std::vector<absl::Time> probes;
  size_t seen = 0;
  for (int i = 0; i < 300; ++i) {
    w.Submit(World::Ask());
    for (; seen < w.decodes.size(); ++seen) {
      if (w.decode_ids[seen] == "bad") {
        probes.push_back(w.loop.Now());
        w.decodes[seen].Break(absl::UnavailableError("refused"));
      } else {
        w.decodes[seen].Say(World::Opened(1, ""));
        w.decodes[seen].Say(World::Started(1));
        w.decodes[seen].Say(World::Tokens(kPrompt, {1}));
        w.decodes[seen].Say(World::Finished(v1::FINISH_REASON_LENGTH));
      }
      w.Settle();
    }
    w.RunFor(absl::Milliseconds(100));
  }
  ASSERT_GE(probes.size(), 4u);
  for (size_t i = 1; i < 4; ++i) {
    EXPECT_GE(probes[i] - probes[i - 1],
              w.options.avoid_first * (1 << (i - 1)));
  }
}

// Behind a window the beginning of a prompt is not needed, and seldom there.
TEST(RegistryTest, AWindowedPromptIsCachedWhereItsEndIs) {
  for (const int window : {0, 32}) {
    RouterOptions options;
    options.window = window;
    World w(options);
    w.Prefill("p0");
    w.Decode("d0");
    LeasePipe* const d1 = w.Decode("d1");
    const std::vector<int32_t> prompt(160, 7);
    const auto hashes =
        engine::HashBlocks(engine::RootHash("", 16, "", ""), prompt, 16);
    v1::RegisterRequest message;
    // Position 144, behind nine of ten blocks, sees 113 and on.
    for (const size_t block : {7, 8}) {
      message.mutable_cache()->add_added(hashes[block].Short());
    }
    d1->Say(message);
    w.Submit(World::Ask(prompt));
    EXPECT_EQ(w.decodes[0].sent[0].open().has_prefill_worker(), window == 0);
    if (window == 0) continue;
    EXPECT_EQ(w.decode_ids[0], "d1");
  }
}

// Where some layers see all, the beginning is, and may lack what the others
// had.
TEST(RegistryTest, APrefixIsCachedWhereItsLastWindowIsWhole) {
  for (const std::vector<size_t>& lacking :
       std::vector<std::vector<size_t>>{{}, {0, 1, 2, 6}, {7}, {7, 8}}) {
    RouterOptions options;
    options.window = 32;
    options.some_see_all = true;
    World w(options);
    w.Prefill("p0");
    w.Decode("d0");
    LeasePipe* const d1 = w.Decode("d1");
    const std::vector<int32_t> prompt(160, 7);
    const auto hashes =
        engine::HashBlocks(engine::RootHash("", 16, "", ""), prompt, 16);
    v1::RegisterRequest message;
    for (size_t block = 0; block < 9; ++block) {
      message.mutable_cache()->add_added(hashes[block].Short());
    }
    d1->Say(message);
    message.mutable_cache()->Clear();
    for (const size_t block : lacking) {
      message.mutable_cache()->add_lacking(hashes[block].Short());
    }
    d1->Say(message);
    w.Submit(World::Ask(prompt));
    // Position 144 sees from block 7 on; of fewer blocks too much is computed.
    const bool cached = lacking.empty() || lacking.back() < 7;
    EXPECT_EQ(w.decodes[0].sent[0].open().has_prefill_worker(), !cached);
    if (cached) {
      EXPECT_EQ(w.decode_ids[0], "d1");
    }
    if (lacking != std::vector<size_t>{7}) continue;
    // It has it again.
    message.mutable_cache()->Clear();
    message.mutable_cache()->add_added(hashes[7].Short());
    d1->Say(message);
    w.Submit(World::Ask(prompt));
    EXPECT_FALSE(w.decodes[1].sent[0].open().has_prefill_worker());
    EXPECT_EQ(w.decode_ids[1], "d1");
  }
}

}  // namespace
}  // namespace tandem::router
