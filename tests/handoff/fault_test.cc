// SPDX-License-Identifier: Apache-2.0
// What ends of a handoff do when the other end, the link or the request is
// not well-behaved. Every scenario ends at the baseline: no attempt, every
// slab free, no callback twice, and KV either whole or never committed.

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/handoff/world.h"
#include "tests/sanitized.h"

namespace tandem::handoff::testing {
namespace {

using ::testing::HasSubstr;
using Verdict = ReceiverDelegate::Verdict;

constexpr int kPositions = 24;

Setting Of(const std::string& way) {
  Setting setting;
  setting.way = way;
  setting.work = absl::Milliseconds(2);
  return setting;
}

// No token from a part: a commit implies equal KV, an acknowledgement a
// commit.
void ExpectSafe(World& world, int attempts) {
  for (int n = 1; n <= attempts; ++n) {
    if (world.decode.seen[n].committed > 0) {
      EXPECT_TRUE(world.SameKv(MakeAttempt(n), kPositions)) << n;
    }
    EXPECT_LE(world.prefill().side.seen[n].acknowledged,
              world.decode.seen[n].committed);
  }
}

class EveryMessage : public ::testing::TestWithParam<std::string> {
 protected:
  // Runs two attempts with `act` at message `index` of one direction; false
  // when there is no such message.
  bool RunWith(bool requests, int at,
               const std::function<int(World*, Pair*)>& act) {
    World world(Of(GetParam()));
    bool reached = false;
    world.prefill().on_dial = [&](Pair* pair) {
      const auto filter = [&world, &reached, pair, at, act](int index, auto*) {
        if (index != at || reached) return 1;
        reached = true;
        return act(&world, pair);
      };
      if (requests) {
        pair->requests.filter = filter;
      } else {
        pair->responses.filter = filter;
      }
    };
    world.Run(1, kPositions);
    world.Run(2, kPositions);
    world.loop.RunFor(absl::Seconds(1));
    EXPECT_TRUE(world.receiver->CheckInvariants().ok());
    EXPECT_TRUE(world.sender().CheckInvariants().ok());
    world.loop.RunFor(absl::Seconds(45));
    for (int n = 1; n <= 2; ++n) {  // what its own worker would do by now
      if (world.prefill().side.seen[n].failed > 0) {
        world.receiver->EndAttempt(MakeAttempt(n), absl::OkStatus());
      }
    }
    world.loop.RunFor(absl::Seconds(25));
    ExpectSafe(world, 2);
    world.ExpectBaseline();
    // The pair works again.
    world.prefill().on_dial = nullptr;
    if (world.prefill().pair != nullptr) {
      world.prefill().pair->requests.filter = nullptr;
      world.prefill().pair->responses.filter = nullptr;
    }
    world.Run(3, kPositions);
    world.loop.RunFor(absl::Seconds(1));
    EXPECT_EQ(world.prefill().side.seen[3].acknowledged, 1) << at;
    EXPECT_TRUE(world.SameKv(MakeAttempt(3), kPositions));
    return reached;
  }
  void Sweep(const std::function<int(World*, Pair*)>& act) {
    for (const bool requests : {true, false}) {
      int at = 0;
      // Sanitizers look for memory: each third message will do.
      while (RunWith(requests, at, act) && !HasFailure()) {
        at += kSanitized ? 3 : 1;
      }
      EXPECT_GT(at, requests ? 40 : 20);  // the sweep reached the end
    }
  }
};

TEST_P(EveryMessage, MayBeWhereTheLinkIsCut) {
  Sweep([](World*, Pair* pair) {
    pair->Cut();
    return 0;
  });
}

TEST_P(EveryMessage, MayBeWhereTheSenderCancels) {
  Sweep([](World* world, Pair*) {
    world->loop.Post([world] {
      world->sender().Cancel(MakeAttempt(1));
      world->prefill().side.seen[1].cancelled =
          world->prefill().side.seen[1].acknowledged +
              world->prefill().side.seen[1].failed ==
          0;
      world->receiver->EndAttempt(MakeAttempt(9), absl::OkStatus());
    });
    return 1;
  });
}

TEST_P(EveryMessage, MayBeWhereTheReceiverEndsTheAttempt) {
  Sweep([](World* world, Pair*) {
    world->loop.Post([world] {
      auto& seen = world->decode.seen[1];
      seen.ended = seen.committed + seen.failed == 0;
      world->receiver->EndAttempt(MakeAttempt(1),
                                  absl::CancelledError("the client left"));
    });
    return 1;
  });
}

TEST_P(EveryMessage, MayArriveTwiceOrThrice) {
  for (const int copies : {2, 3}) {
    Sweep([copies](World*, Pair*) { return copies; });
  }
}

TEST_P(EveryMessage, MayBeLostWithoutAWrongToken) {
  Sweep([](World*, Pair*) { return 0; });
}

INSTANTIATE_TEST_SUITE_P(Handoff, EveryMessage,
                         ::testing::Values("grpc", "direct"));

TEST(HandoffFault, WhatIsLostIsNotWaitedForWhileOthersUseTheLink) {
  for (const bool announcement : {true, false}) {
    World world(Of("grpc"));
    bool lost = false;
    world.prefill().on_dial = [&](Pair* pair) {
      pair->requests.filter = [&](int, v1::LinkRequest* request) {
        const bool it = announcement && request->has_slice_ready();
        return it && !std::exchange(lost, true) ? 0 : 1;
      };
      pair->responses.filter = [&](int, v1::LinkResponse* response) {
        const bool it = !announcement && response->has_credit();
        return it && !std::exchange(lost, true) ? 0 : 1;
      };
    };
    world.Run(1, kPositions);
    for (int n = 2; n <= 59; ++n) {
      world.loop.RunFor(absl::Seconds(1));
      world.Run(n, kPositions);
    }
    EXPECT_TRUE(lost);
    EXPECT_EQ(world.prefill().side.seen[1].failed, 0);  // it might be behind
    for (int n = 60; n <= 64; ++n) {
      world.loop.RunFor(absl::Seconds(1));
      world.Run(n, kPositions);
    }
    world.loop.RunFor(absl::Seconds(1));
    EXPECT_EQ(world.prefill().side.seen[1].failed, 1);
    for (int n = 2; n <= 64; ++n) {
      EXPECT_EQ(world.prefill().side.seen[n].acknowledged, 1) << n;
    }
    world.receiver->EndAttempt(MakeAttempt(1), absl::OkStatus());
    world.loop.RunFor(absl::Seconds(70));
    world.ExpectBaseline();
  }
}

// No credit comes that would start a clock.
TEST(HandoffFault, ATransferOfWhichEveryAnnouncementIsLostEnds) {
  World world(Of("grpc"));
  world.prefill().on_dial = [](Pair* pair) {
    pair->requests.filter = [](int, v1::LinkRequest* request) {
      return request->has_slice_ready() ? 0 : 1;
    };
  };
  world.Run(1, kPositions);
  world.loop.RunFor(absl::Seconds(15));
  EXPECT_EQ(world.prefill().side.seen[1].failed, 1);
  EXPECT_EQ(world.decode.seen[1].failed, 1);
  world.ExpectBaseline();
}

TEST(HandoffFault, EverythingTwiceStillLandsOnce) {
  for (const std::string way : {"grpc", "direct"}) {
    World world(Of(way));
    world.prefill().on_dial = [](Pair* pair) {
      pair->requests.filter = [](int, auto*) { return 2; };
      pair->responses.filter = [](int, auto*) { return 2; };
    };
    const Attempt attempt = world.Run(1, kPositions);
    world.loop.RunFor(absl::Seconds(2));
    EXPECT_EQ(world.prefill().side.seen[1].acknowledged, 1);
    EXPECT_EQ(world.decode.scatters, kPositions);  // 4 layers, 4 rows each
    EXPECT_TRUE(world.SameKv(attempt, kPositions));
    EXPECT_GT(world.receiver->counters().duplicates +
                  world.receiver->counters().late_messages,
              kPositions);
    world.ExpectBaseline();
  }
}

TEST(HandoffFault, ALostAcknowledgementIsSentAgain) {
  for (const bool declined : {false, true}) {
    SCOPED_TRACE(declined);
    World world(Of("grpc"));
    if (declined) {
      world.decode.commit_status = absl::CancelledError("the call has ended");
    }
    int acks = 0;
    world.prefill().on_dial = [&](Pair* pair) {
      pair->responses.filter = [&](int, v1::LinkResponse* message) {
        return message->has_ack() && ++acks < 4 ? 0 : 1;
      };
    };
    world.Run(1, kPositions);
    world.loop.RunFor(absl::Seconds(5));
    EXPECT_EQ(acks, 4);
    EXPECT_EQ(world.decode.seen[1].committed, 1);
    EXPECT_EQ(world.prefill().side.seen[1].acknowledged, declined ? 0 : 1);
    EXPECT_EQ(world.prefill().side.seen[1].failed, declined ? 1 : 0);
    world.ExpectBaseline();
  }
}

// What a faulty sender may say, and how it ends.
struct Lie {
  const char* why;
  std::function<void(v1::LinkRequest*)> change;
  bool refused_slice;
};

TEST(HandoffFault, LiesEndTheAttemptBeforeAnyPayloadIsTouched) {
  const auto ready = [](auto edit) {
    return [edit](v1::LinkRequest* m) {
      if (m->has_slice_ready() && m->slice_ready().slice() == 2) {
        edit(m->mutable_slice_ready());
      }
    };
  };
  const auto commit = [](auto edit) {
    return [edit](v1::LinkRequest* m) {
      if (m->has_commit()) edit(m->mutable_commit());
    };
  };
  const std::vector<Lie> lies = {
      {"positions before the grant",
       ready([](auto* r) { r->set_position_begin(-1); }), true},
      {"positions beyond the grant",
       ready([](auto* r) { r->set_position_end(kPositions + 1); }), true},
      {"no positions",
       ready([](auto* r) { r->set_position_end(r->position_begin()); }), true},
      {"a layer that is not", ready([](auto* r) { r->set_layer_end(5); }),
       true},
      {"negative layer", ready([](auto* r) { r->set_layer_begin(-1); }), true},
      {"bytes that the range does not have",
       ready([](auto* r) { r->set_bytes(r->bytes() + 1); }), true},
      {"rows of another slice", ready([](auto* r) {
         r->set_layer_begin(0);
         r->set_layer_end(1);
         r->set_position_begin(0);
         r->set_position_end(4);
       }),
       true},
      {"a number of another slice", ready([](auto* r) { r->set_slice(0); }),
       true},
      {"a payload of another size",
       [](v1::LinkRequest* m) {
         if (m->has_slice() && m->slice().slice() == 2) {
           m->mutable_slice()->mutable_payload()->push_back('x');
         }
       },
       true},
      {"more slices in the manifest",
       commit([](auto* c) { c->set_slices(c->slices() + 1); }), false},
      {"fewer slices in the manifest",
       commit([](auto* c) { c->set_slices(c->slices() - 1); }), false},
      {"fewer layers", commit([](auto* c) { c->set_layers(3); }), false},
      {"other positions",
       commit([](auto* c) { c->set_position_end(kPositions - 1); }), false},
      {"other bytes", commit([](auto* c) { c->set_bytes(c->bytes() - 1); }),
       false},
      {"a wrong digest",
       commit([](auto* c) { c->set_digest_low(c->digest_low() ^ 1); }), false},
      {"a wrong digest, other half",
       commit([](auto* c) { c->set_digest_high(c->digest_high() ^ 1); }),
       false},
      {"a flipped bit of KV",
       [](v1::LinkRequest* m) {
         if (m->has_slice() && m->slice().slice() == 5) {
           (*m->mutable_slice()->mutable_payload())[3] ^= 0x20;
         }
       },
       false},
  };
  for (const Lie& lie : lies) {
    World world(Of("grpc"));
    world.prefill().on_dial = [&lie](Pair* pair) {
      pair->requests.filter = [&lie](int, v1::LinkRequest* message) {
        lie.change(message);
        return 1;
      };
    };
    world.Run(1, kPositions);
    world.loop.RunFor(absl::Seconds(12));
    EXPECT_EQ(world.decode.seen[1].committed, 0) << lie.why;
    EXPECT_EQ(world.decode.seen[1].failed, 1) << lie.why;
    EXPECT_EQ(world.prefill().side.seen[1].failed, 1) << lie.why;
    EXPECT_EQ(world.receiver->counters().slices_refused,
              lie.refused_slice ? 1 : 0)
        << lie.why;
    EXPECT_EQ(world.receiver->links(), 1) << lie.why;
    world.ExpectBaseline();
  }
}

TEST(HandoffFault, ASliceUnderAForeignNameIsNotLanded) {
  World world(Of("grpc"));
  world.prefill().on_dial = [](Pair* pair) {
    pair->requests.filter = [](int, v1::LinkRequest* message) {
      if (message->has_slice() && message->slice().slice() == 1) {
        message->mutable_slice()->mutable_key()->set_attempt(77);
      }
      return 1;
    };
  };
  world.Run(1, kPositions);
  world.loop.RunFor(absl::Seconds(30));
  EXPECT_EQ(world.receiver->counters().slices_refused, 1);
  EXPECT_EQ(world.decode.seen[1].committed, 0);
  EXPECT_EQ(world.decode.seen[1].failed, 1);
  world.loop.RunFor(absl::Seconds(60));
  world.ExpectBaseline();
}

TEST(HandoffFault, ASlicePayloadInSharedMemoryIsRefused) {
  World world(Of("direct"));
  world.prefill().on_dial = [](Pair* pair) {
    pair->requests.filter = [](int, v1::LinkRequest* message) {
      if (message->has_slice()) message->mutable_slice()->set_payload("x");
      return 1;
    };
  };
  world.Run(1, kPositions);
  world.loop.RunFor(absl::Seconds(2));
  EXPECT_EQ(world.decode.seen[1].failed, 1);
  EXPECT_EQ(world.decode.scatters, 0);
  world.ExpectBaseline();
}

// ---- Quarantine.

class Quarantine : public ::testing::Test {
 protected:
  // A transfer with all credits out and every store still to come.
  void Fill(World& world) {
    world.prefill().side.gathering.hold = true;
    world.Run(1, kPositions);
    world.loop.RunFor(absl::Milliseconds(100));
    ASSERT_EQ(world.receiver->slabs().granted, 4);
  }
};

TEST_F(Quarantine, HoldsSlabsOfAnEndedAttemptUntilTheirStoreIsOver) {
  for (const std::string way : {"grpc", "direct"}) {
    World world(Of(way));
    Fill(world);
    world.decode.seen[1].ended = true;
    world.receiver->EndAttempt(MakeAttempt(1), absl::OkStatus());
    EXPECT_EQ(world.receiver->slabs().quarantined, 4);
    world.loop.RunFor(absl::Seconds(1));
    EXPECT_EQ(world.receiver->slabs().quarantined, 4);
    // A new attempt of the pair gets none of them.
    world.Run(2, kPositions);
    world.loop.RunFor(absl::Seconds(1));
    EXPECT_EQ(world.receiver->slabs().quarantined, 4);
    EXPECT_EQ(world.decode.seen[2].committed, 0);
    world.prefill().side.gathering.Release();
    world.loop.RunFor(absl::Seconds(2));
    EXPECT_EQ(world.decode.seen[2].committed, 1);
    EXPECT_TRUE(world.SameKv(MakeAttempt(2), kPositions));
    EXPECT_EQ(world.decode.scatters, kPositions);  // the second's alone
    world.ExpectBaseline();
  }
}

TEST_F(Quarantine, OfMessagesEndsWithTheLinkAndOfMemoryWithThePeersWord) {
  for (const std::string way : {"grpc", "direct"}) {
    World world(Of(way));
    Fill(world);
    world.prefill().pair->Cut();
    world.loop.RunFor(absl::Milliseconds(10));
    EXPECT_EQ(world.decode.seen[1].failed_way, way);
    EXPECT_EQ(world.prefill().side.seen[1].failed_way, way);
    EXPECT_EQ(world.receiver->slabs().quarantined, way == "grpc" ? 0 : 4);
    world.loop.RunFor(absl::Seconds(5));
    EXPECT_EQ(world.receiver->slabs().quarantined, way == "grpc" ? 0 : 4);
    // The last gather ends: the sender lets go of the memory and says so.
    world.prefill().side.gathering.Release();
    world.loop.RunFor(absl::Milliseconds(10));
    world.ExpectBaseline();
    EXPECT_EQ(world.host.drops, 0);
  }
}

TEST_F(Quarantine, PastItsDeadlineTheArenaIsDropped) {
  World world(Of("direct"));
  Fill(world);
  world.host.sender_speaks = false;
  world.prefill().pair->Cut();
  world.loop.RunFor(absl::Seconds(29));
  EXPECT_EQ(world.receiver->slabs().quarantined, 4);
  world.loop.RunFor(absl::Seconds(2));
  EXPECT_EQ(world.receiver->slabs().quarantined, 0);
  EXPECT_EQ(world.host.drops, 1);
  EXPECT_EQ(world.receiver->counters().arenas_dropped, 1);
  EXPECT_TRUE(world.decode.fatal.ok());
  world.prefill().side.gathering.Release();
  world.loop.RunFor(absl::Seconds(1));
  world.ExpectBaseline();
}

TEST_F(Quarantine, OnALiveLinkPastItsDeadlineBreaksTheLink) {
  World world(Of("direct"));
  Fill(world);
  world.decode.seen[1].ended = true;
  world.receiver->EndAttempt(MakeAttempt(1), absl::OkStatus());
  world.loop.RunFor(absl::Seconds(31));
  EXPECT_EQ(world.receiver->links(), 0);
  EXPECT_EQ(world.host.drops, 1);
  EXPECT_EQ(world.receiver->slabs().free, 16);
  world.prefill().side.gathering.Release();
  world.loop.RunFor(absl::Seconds(1));
  world.ExpectBaseline();
}

TEST_F(Quarantine, WaitsForRunningScattersBeforeMemoryGoes) {
  World world(Of("direct"));
  world.decode.scattering.hold = true;
  world.Offer(1, kPositions);
  world.sender().Computed(MakeAttempt(1), {0, 1, 0, 8});  // two slices
  world.loop.RunFor(absl::Milliseconds(100));
  ASSERT_EQ(world.receiver->slabs().in_flight, 2);
  world.prefill().side.gathering.hold = true;
  world.sender().Computed(MakeAttempt(1), {1, 2, 0, 8});  // two more
  world.loop.RunFor(absl::Milliseconds(100));
  ASSERT_EQ(world.receiver->slabs().granted, 2);
  world.host.sender_speaks = false;
  world.prefill().pair->Cut();
  world.loop.RunFor(absl::Seconds(60));
  EXPECT_EQ(world.host.drops, 0);
  world.decode.scattering.Release();
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.host.drops, 1);
  world.prefill().side.gathering.Release();
  world.loop.RunFor(absl::Seconds(1));
  world.ExpectBaseline();
}

TEST_F(Quarantine, WithoutReplacementEndsTheProcess) {
  World world(Of("direct"));
  Fill(world);
  world.host.sender_speaks = false;
  world.host.drop_status = absl::ResourceExhaustedError("no memory");
  world.prefill().pair->Cut();
  world.loop.RunFor(absl::Seconds(31));
  EXPECT_EQ(world.decode.fatal.code(), absl::StatusCode::kResourceExhausted);
  world.prefill().side.gathering.Release();
}

TEST_F(Quarantine, LateStoresReachNoOtherAttempt) {
  // The canary: what a cut-off sender stores late lies only in slabs that
  // nobody else was given, and no committed block ever holds it.
  World world(Of("direct"));
  Fill(world);
  world.prefill().pair->Cut();
  world.loop.RunFor(absl::Milliseconds(10));
  auto old = world.host.arenas.at("arena 0");
  std::fill(old->memory.begin(), old->memory.end(), std::byte{0xCA});
  Prefill* other = world.AddPrefill("other");
  world.Run(2, kPositions, other);
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(other->side.seen[2].acknowledged, 1);
  EXPECT_TRUE(world.SameKv(MakeAttempt(2), kPositions, other));
  // Nothing but the late stores themselves touched the quarantined arena.
  for (std::byte b : old->memory) ASSERT_EQ(b, std::byte{0xCA});
  world.prefill().side.gathering.Release();
  int stored = 0;
  for (std::byte b : old->memory) stored += b == std::byte{0xCA} ? 0 : 1;
  EXPECT_GT(stored, 0);
  world.loop.RunFor(absl::Seconds(1));
  world.ExpectBaseline();
}

// ---- Load.

TEST(HandoffFault, ThousandsOfCancelsLeaveNothing) {
  const int attempts = kSanitized ? 1'000 : 5'000;
  for (const std::string way : {"grpc", "direct"}) {
    World world(Of(way));
    SeededRandom random(3);
    for (int n = 1; n <= attempts; ++n) {
      const Attempt attempt = world.Run(n, 8);
      world.loop.RunFor(absl::Microseconds(100 * random.Below(250)));
      auto& sent = world.prefill().side.seen[n];
      auto& landed = world.decode.seen[n];
      if (random.Below(2) == 0) {
        sent.cancelled = sent.acknowledged + sent.failed == 0;
        world.sender().Cancel(attempt);
      } else {
        landed.ended = landed.committed + landed.failed == 0;
        world.receiver->EndAttempt(attempt, absl::OkStatus());
      }
    }
    world.loop.RunFor(absl::Seconds(61));
    const HandoffCounters& counters = world.receiver->counters();
    EXPECT_GT(counters.ways.at(way).committed, attempts / 50);
    EXPECT_GT(counters.quarantines, attempts / 50);
    EXPECT_EQ(world.prefill().dials, 1);
    EXPECT_EQ(world.receiver->links(), 1);
    world.ExpectBaseline();
  }
}

TEST(HandoffFault, AStalledPairHoldsUpNoOther) {
  for (const std::string way : {"grpc", "direct"}) {
    Setting setting = Of(way);
    setting.num_slabs = 6;  // the stalled pairs could take them all
    World world(setting);
    Prefill* stalled = world.AddPrefill("stalled");
    stalled->side.gathering.hold = true;
    world.Run(1, 8);  // links the live pair
    world.loop.RunFor(absl::Seconds(1));
    world.Run(100, 64, stalled);
    world.loop.RunFor(absl::Milliseconds(500));
    EXPECT_GE(world.receiver->slabs().granted, 3);
    for (int n = 2; n <= 10; ++n) world.Run(n, 32);
    world.loop.RunFor(absl::Seconds(1));
    for (int n = 2; n <= 10; ++n) {
      EXPECT_EQ(world.prefill().side.seen[n].acknowledged, 1) << way << n;
    }
    EXPECT_EQ(stalled->side.seen[100].failed, 0);
    stalled->side.gathering.Release();
    world.loop.RunFor(absl::Seconds(1));
    EXPECT_EQ(stalled->side.seen[100].acknowledged, 1);
    world.ExpectBaseline();
  }
}

TEST(HandoffFault, APeerThatDoesNotReadHoldsUpNoOtherReceiverOfASender) {
  // One sender, two decode workers; the first reads nothing for a while.
  Setting setting = Of("grpc");
  setting.staging_bytes = 4 * 512;
  setting.slabs_per_peer = 8;
  World slow(setting);
  DecodeSide fast_side(setting.shape, 16, &slow.loop);
  ReceiverOptions options = slow.options;
  options.self = Ref("fast");
  Receiver fast(options, &slow.loop, &slow.random, &fast_side);
  SenderOptions sender_options;
  PrefillSide side(setting.shape, 16, &slow.loop);
  *sender_options.hello.mutable_sender() = Ref("both");
  (*sender_options.hello.mutable_fingerprint())["weights"] = "w1";
  (*sender_options.hello.mutable_fingerprint())["numerics"] = "cpu-1";
  sender_options.hello.add_ways("grpc");
  sender_options.hello.set_kv_dtype("f32");
  sender_options.layers.count = 4;
  sender_options.kv_heads = 2;
  sender_options.head_dim = 8;
  sender_options.staging_bytes = 4 * 512;
  sender_options.slab_bytes = 512;
  std::shared_ptr<Pair> slow_pair;
  Sender sender(
      sender_options, &slow.loop, &slow.random,
      [&](const v1::WorkerRef& to) {
        auto pair = std::make_shared<Pair>(&slow.loop, &slow.loop);
        if (to.worker_id() == "fast") {
          fast.AddLink(pair->Server());
        } else {
          slow.receiver->AddLink(pair->Server());
          slow_pair = pair;
        }
        return pair->Client();
      },
      &side);
  const auto run = [&](Receiver* receiver, const v1::WorkerRef& to, int n) {
    const Attempt attempt = MakeAttempt(n);
    side.Fill(attempt, 32, n);
    sender.Offer(
        attempt, to,
        receiver->IssueTicket(attempt, Ref("both"), 32, absl::Seconds(60)), 32,
        0, absl::Seconds(1), {});
    sender.Computed(attempt, {0, 4, 0, 32});
    sender.Commit(attempt, {});
  };
  run(&fast, Ref("fast"), 1);
  run(slow.receiver.get(), Ref("decode"), 2);
  // Stalled with its first slices on the way.
  while (side.gathers < 4) slow.loop.RunNext();
  slow_pair->Stall(true);
  slow.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(side.seen[1].acknowledged, 1);
  for (int n = 3; n < 8; ++n) run(&fast, Ref("fast"), n);
  slow.loop.RunFor(absl::Seconds(1));
  for (int n = 3; n < 8; ++n) EXPECT_EQ(side.seen[n].acknowledged, 1) << n;
  EXPECT_EQ(side.seen[2].acknowledged, 0);
  slow_pair->Stall(false);
  slow.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(side.seen[2].acknowledged, 1);
  EXPECT_EQ(sender.slabs().free, 4);
}

TEST(HandoffFault, ALostLinkTouchesNoOther) {
  World world(Of("direct"));
  Prefill* other = world.AddPrefill("other");
  world.Run(1, kPositions);
  world.Run(2, kPositions, other);
  world.loop.RunFor(absl::Milliseconds(3));
  world.prefill().pair->Cut();
  world.loop.RunFor(absl::Seconds(2));
  EXPECT_EQ(world.prefill().side.seen[1].failed, 1);
  EXPECT_EQ(other->side.seen[2].acknowledged, 1);
  world.ExpectBaseline();
}

TEST(HandoffFault, AnAttemptThatFailsMayBeOfferedAnewFromItsOwnFailure) {
  World world(Of("grpc"));
  world.prefill().side.on_failed = [&](const Attempt& attempt) {
    if (attempt.number == 1) world.Run(2, kPositions);
  };
  world.Run(1, kPositions);
  world.loop.RunFor(absl::Milliseconds(3));
  world.prefill().pair->Cut();
  world.loop.RunFor(absl::Seconds(2));
  EXPECT_EQ(world.prefill().side.seen[2].acknowledged, 1);
  world.ExpectBaseline();
}

TEST(HandoffFault, RandomSchedulesOfManyPairsKeepEveryInvariant) {
  int committed = 0;
  const uint64_t seeds = kSanitized ? 20 : 60;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    SeededRandom random(seed);
    Setting setting = Of(seed % 2 == 0 ? "grpc" : "direct");
    setting.num_slabs = 4 + static_cast<int>(random.Below(12));
    setting.staging_bytes = 512 * (1 + static_cast<int>(random.Below(8)));
    World world(setting);
    for (int i = 1; i < 4; ++i) world.AddPrefill("p" + std::to_string(i));
    std::map<int, Prefill*> from;
    for (int n = 1; n <= 60; ++n) {
      Prefill* one = world.prefills[random.Below(4)].get();
      from[n] = one;
      world.Run(n, kPositions, one);
      world.loop.RunFor(absl::Microseconds(random.Below(6'000)));
      const int victim = 1 + static_cast<int>(random.Below(n));
      auto& sent = from[victim]->side.seen[victim];
      auto& landed = world.decode.seen[victim];
      switch (random.Below(12)) {
        case 0:
          if (one->pair != nullptr) one->pair->Cut();
          break;
        case 1:
          sent.cancelled = sent.acknowledged + sent.failed == 0;
          from[victim]->sender->Cancel(MakeAttempt(victim));
          break;
        case 2:
          landed.ended = landed.committed + landed.failed == 0;
          world.receiver->EndAttempt(MakeAttempt(victim), absl::OkStatus());
          break;
        default:
          break;
      }
      ASSERT_TRUE(world.receiver->CheckInvariants().ok()) << seed;
    }
    world.loop.RunFor(absl::Seconds(61));
    for (int n = 1; n <= 60; ++n) {
      const auto& sent = from[n]->side.seen[n];
      const auto& landed = world.decode.seen[n];
      committed += landed.committed;
      EXPECT_LE(sent.acknowledged, landed.committed) << seed << ' ' << n;
      EXPECT_EQ(sent.acknowledged + sent.failed + (sent.cancelled ? 1 : 0), 1)
          << seed << ' ' << n;
      if (landed.committed > 0) {
        EXPECT_TRUE(world.SameKv(MakeAttempt(n), kPositions, from[n]));
      }
    }
    world.ExpectBaseline();
  }
  EXPECT_GT(committed, static_cast<int>(seeds) * 1'000 / 60);
}

}  // namespace
}  // namespace tandem::handoff::testing
