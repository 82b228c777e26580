// SPDX-License-Identifier: Apache-2.0
// What two well-behaved ends do: ways, formats, answers, timing, refusals.

#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "handoff/wire.h"
#include "tests/handoff/world.h"

namespace tandem::handoff::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Answer = SenderDelegate::Answer;
using Verdict = ReceiverDelegate::Verdict;

std::string Text(const absl::Status& status) { return status.ToString(); }

// way, sender's block, receiver's block, positions, work
using Case = std::tuple<std::string, int, int, int, int>;
class HappyPath : public ::testing::TestWithParam<Case> {};

TEST_P(HappyPath, KvArrivesWholeAndEverythingIsGivenBack) {
  const auto [way, sender_block, receiver_block, positions, work_ms] =
      GetParam();
  Setting setting;
  setting.way = way;
  setting.sender_block = sender_block;
  setting.receiver_block = receiver_block;
  setting.work = absl::Milliseconds(work_ms);
  setting.inline_done = work_ms < 0;
  World world(setting);
  const Attempt attempt = world.Run(1, positions);
  world.loop.RunFor(absl::Seconds(30));

  const auto& sent = world.prefill().side.seen[1];
  EXPECT_EQ(sent.acknowledged, 1) << Text(sent.status);
  EXPECT_EQ(world.decode.seen[1].committed, 1);
  EXPECT_EQ(world.decode.seen[1].first.position, positions);
  EXPECT_EQ(world.decode.seen[1].first.token.token_id(), 42);
  EXPECT_TRUE(world.SameKv(attempt, positions));
  const int64_t bytes = int64_t{4} * positions * 2 * 2 * 8 * 4;
  EXPECT_EQ(sent.timings.bytes, bytes);
  EXPECT_EQ(sent.timings.way, way);
  EXPECT_EQ(world.sender().counters().ways.at(way).bytes, bytes);
  EXPECT_EQ(world.receiver->counters().ways.at(way).bytes, bytes);
  EXPECT_EQ(world.receiver->counters().ways.at(way).committed, 1);
  EXPECT_EQ(world.receiver->counters().late_messages, 0);
  world.ExpectBaseline();
}

INSTANTIATE_TEST_SUITE_P(Handoff, HappyPath,
                         ::testing::Combine(::testing::Values("grpc", "direct"),
                                            ::testing::Values(8, 16),
                                            ::testing::Values(8, 32),
                                            ::testing::Values(1, 7, 16, 45),
                                            ::testing::Values(-1, 0, 3)));

TEST(Handoff, OnlyWhatIsGrantedIsSent) {
  World world({});
  world.decode.cached = 10;
  const Attempt attempt = world.Run(1, 24);
  world.loop.RunFor(absl::Seconds(2));
  EXPECT_EQ(world.prefill().side.seen[1].acknowledged, 1);
  EXPECT_EQ(world.prefill().side.seen[1].timings.bytes, 4 * 14 * 2 * 2 * 8 * 4);
  EXPECT_TRUE(world.SameKv(attempt, 24));
}

// Layers with a window from where they see on; the rest as a whole.
TEST(Handoff, OfWindowedLayersOnlyWhatIsSeenIsSent) {
  for (const auto& [cached, windowed_begin, rows] :
       {std::tuple{0, 32, 2 * 45 + 3 * 13}, std::tuple{16, 32, 2 * 29 + 3 * 13},
        std::tuple{32, 16, 5 * 13}, std::tuple{0, 45, 2 * 45},
        std::tuple{0, 0, 5 * 45}}) {
    SCOPED_TRACE(absl::StrCat(cached, ", ", windowed_begin));
    Setting setting;
    setting.shape.layers = 5;
    setting.shape.windows = {true, true, false, true, false};
    setting.receiver_block = 8;
    World world(setting);
    world.decode.cached = cached;
    world.decode.windowed_begin = windowed_begin;
    std::vector<SliceRange> gathered;
    world.prefill().side.on_gather = [&](const Attempt&,
                                         const SliceRange& range) {
      gathered.push_back(range);
    };
    const Attempt attempt = world.Run(1, 45);
    world.loop.RunFor(absl::Seconds(2));
    const auto& sent = world.prefill().side.seen[1];
    EXPECT_EQ(sent.acknowledged, 1) << Text(sent.status);
    EXPECT_EQ(sent.timings.bytes, rows * 2 * 2 * 8 * 4);
    EXPECT_TRUE(world.SameKv(attempt, 45));
    for (const SliceRange& range : gathered) {
      for (int l = range.layer_begin; l < range.layer_end; ++l) {
        EXPECT_TRUE(!setting.shape.windowed(l) ||
                    range.position_begin >= windowed_begin);
      }
    }
    world.ExpectBaseline();
  }
}

// An answer of no use ends the attempt, whoever made it up.
TEST(Handoff, AWindowThatBeginsBehindTheEndIsRefused) {
  Setting setting;
  setting.shape.windows = {true, true, false, true};
  World world(setting);
  world.decode.windowed_begin = 46;
  world.Run(1, 45);
  world.loop.RunFor(absl::Seconds(2));
  EXPECT_EQ(world.prefill().side.seen[1].failed, 1);
  EXPECT_EQ(world.decode.seen[1].failed, 1);
  EXPECT_THAT(Text(world.decode.seen[1].status),
              HasSubstr("does not fit an offer of 45 positions"));
  world.ExpectBaseline();
}

TEST(Handoff, SomeHeadsAreSentUnlessOnlyAllCanBe) {
  for (const bool whole : {false, true}) {
    Setting setting;
    setting.whole_heads = whole;
    World world(setting);
    world.decode.heads = 1;
    world.Run(1, 24);
    world.loop.RunFor(absl::Seconds(2));
    const auto& seen = world.prefill().side.seen[1];
    EXPECT_EQ(seen.acknowledged, whole ? 0 : 1);
    EXPECT_EQ(seen.failed, whole ? 1 : 0);
    if (whole) {
      EXPECT_NE(seen.status.message().find("heads 0..1 as 'f32', which this "
                                           "worker cannot send"),
                absl::string_view::npos)
          << seen.status;
    } else {
      EXPECT_EQ(seen.timings.bytes, 4 * 24 * 2 * 1 * 8 * 4);
    }
    world.ExpectBaseline();
  }
}

TEST(Handoff, AGrantOfNothingCommitsWithoutASlice) {
  World world({});
  world.decode.cached = 24;
  world.Run(1, 24);
  world.loop.RunFor(absl::Seconds(2));
  EXPECT_EQ(world.prefill().side.seen[1].acknowledged, 1);
  EXPECT_EQ(world.prefill().side.gathers, 0);
  world.ExpectBaseline();
}

TEST(Handoff, MixedNumericsConvertToTheReceiversFormat) {
  for (const auto& [from, to] :
       std::vector<std::pair<const char*, const char*>>{
           {"f32", "bf16"}, {"bf16", "f32"}, {"f32", "f32"}}) {
    Setting setting;
    setting.sender_dtype = from;
    setting.receiver_dtype = to;
    setting.mixed = true;
    World world(setting);
    const Attempt attempt = world.Run(1, 20);
    world.loop.RunFor(absl::Seconds(2));
    EXPECT_EQ(world.decode.seen[1].committed, 1);
    EXPECT_EQ(world.decode.seen[1].mixed, from);
    EXPECT_TRUE(world.SameKv(attempt, 20));
    EXPECT_EQ(world.prefill().side.seen[1].timings.bytes,
              4 * 20 * 2 * 2 * 8 * (std::string(to) == "f32" ? 4 : 2));
  }
}

TEST(Handoff, StartAndWaitAreToldOnceAndGrantedLater) {
  World world({});
  world.decode.verdict = Verdict::kWait;
  const Attempt attempt = world.Offer(1, 16);
  world.loop.RunFor(absl::Seconds(20));  // offers are repeated meanwhile
  auto& seen = world.prefill().side.seen[1];
  EXPECT_THAT(seen.answers, ElementsAre(Answer::kWait));
  EXPECT_GT(world.receiver->counters().duplicates, 10);
  world.receiver->StartLater(attempt);
  world.loop.RunFor(absl::Seconds(2));
  EXPECT_THAT(seen.answers, ElementsAre(Answer::kWait, Answer::kStart));
  // All is computed before the grant, and waits.
  world.Finish(attempt, 16);
  world.loop.RunFor(absl::Seconds(2));
  EXPECT_EQ(world.sender().waiting_positions("decode"), 16);
  EXPECT_EQ(world.prefill().side.gathers, 0);
  world.receiver->GrantLater(attempt, world.decode.Wanted(16));
  world.loop.RunFor(absl::Seconds(2));
  EXPECT_THAT(seen.answers,
              ElementsAre(Answer::kWait, Answer::kStart, Answer::kGranted));
  EXPECT_EQ(seen.acknowledged, 1);
  EXPECT_TRUE(world.SameKv(attempt, 16));
  world.ExpectBaseline();
}

TEST(Handoff, TheFirstSliceLandsBeforeTheLastLayerIsComputed) {
  World world({});
  const Attempt attempt = world.Offer(1, 8);
  for (int l = 0; l < 4; ++l) {
    world.loop.RunFor(absl::Milliseconds(100));
    EXPECT_EQ(world.receiver->has_landed(attempt), l > 0);
    world.sender().Computed(attempt, {l, l + 1, 0, 8});
  }
  world.sender().Commit(attempt, {});
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.decode.seen[1].committed, 1);
}

TEST(Handoff, AQueueOfAnyLengthIsNotATransfer) {
  // 50 s between grant and first byte, 9 s between chunks, 9.9 s per credit:
  // each has its own budget, and the transfer's is 10 s without progress.
  World world({});
  const Attempt attempt = world.Offer(1, 16);
  world.loop.RunFor(absl::Seconds(50));
  world.sender().Computed(attempt, {0, 4, 0, 8});
  world.loop.RunFor(absl::Seconds(9));
  world.sender().Computed(attempt, {0, 4, 8, 16});
  world.sender().Commit(attempt, {});
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.decode.seen[1].committed, 1);
  world.ExpectBaseline();
}

TEST(Handoff, AStallWithinATransferFailsInOneBudgetAndNamesTheWay) {
  for (const bool sender_stalls : {true, false}) {
    World world({});
    (sender_stalls ? world.prefill().side.gathering : world.decode.scattering)
        .hold = true;
    world.Run(1, 32);
    world.loop.RunFor(absl::Seconds(9));
    EXPECT_EQ(world.prefill().side.seen[1].failed, 0);
    world.loop.RunFor(absl::Seconds(3));
    EXPECT_EQ(world.prefill().side.seen[1].failed, 1);
    EXPECT_EQ(world.decode.seen[1].failed, 1);
    const bool named = world.prefill().side.seen[1].failed_way == "grpc" ||
                       world.decode.seen[1].failed_way == "grpc";
    EXPECT_TRUE(named);
    world.prefill().side.gathering.Release();
    world.decode.scattering.Release();
    world.loop.RunFor(absl::Seconds(1));
    world.ExpectBaseline();
    EXPECT_EQ(world.receiver->links(), 1);
  }
}

// At both ends: nothing failed that anybody should look after.
void ExpectOneCancelled(World& world) {
  for (const HandoffCounters& counters :
       {world.sender().counters(), world.receiver->counters()}) {
    EXPECT_EQ(counters.ways.at("grpc").cancelled, 1);
    EXPECT_EQ(counters.ways.at("grpc").failed, 0);
    EXPECT_TRUE(counters.ways.at("grpc").failed_in.empty());
  }
}

TEST(Handoff, ATicketEndsWithItsTime) {
  World world({});
  world.decode.verdict = Verdict::kWait;
  world.Offer(1, 16);
  world.loop.RunFor(absl::Seconds(61));
  EXPECT_EQ(world.decode.seen[1].failed, 1);
  EXPECT_EQ(world.prefill().side.seen[1].status.code(),
            absl::StatusCode::kDeadlineExceeded);
  world.ExpectBaseline();
}

TEST(Handoff, LinksLiveThroughSilenceOfWorkAndEndWhenIdle) {
  World world({});
  world.Run(1, 16);
  world.loop.RunFor(absl::Minutes(9));
  world.Run(2, 16);
  world.loop.RunFor(absl::Minutes(9));
  EXPECT_EQ(world.prefill().dials, 1);
  EXPECT_EQ(world.sender().links(), 1);
  world.loop.RunFor(absl::Minutes(2));
  EXPECT_EQ(world.sender().links(), 0);
  EXPECT_EQ(world.receiver->links(), 0);
  EXPECT_EQ(world.sender().counters().links_lost, 0);
  EXPECT_EQ(world.receiver->counters().links_lost, 0);
  world.Run(3, 16);
  world.loop.RunFor(absl::Seconds(2));
  EXPECT_EQ(world.prefill().dials, 2);
  EXPECT_EQ(world.prefill().side.seen[3].acknowledged, 1);
  // Nor is one of a worker that ends, but one that is cut is.
  world.prefill().sender.reset();
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.receiver->links(), 0);
  EXPECT_EQ(world.receiver->counters().links_lost, 0);
  Prefill* const other = world.AddPrefill("other");
  world.Run(4, 16, other);
  world.loop.RunFor(absl::Seconds(2));
  other->pair->Cut();
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.receiver->counters().links_lost, 1);
}

TEST(Handoff, ASilentPeerIsLostInTimeAndNamesItsWay) {
  World world({});
  world.decode.verdict = Verdict::kStart;
  world.Offer(1, 16);
  world.loop.RunFor(absl::Seconds(1));
  world.prefill().pair->Stall(true);
  world.loop.RunFor(absl::Seconds(6));
  EXPECT_EQ(world.prefill().side.seen[1].failed_way, "grpc");
  EXPECT_EQ(world.decode.seen[1].failed_way, "grpc");
  EXPECT_EQ(world.prefill().side.seen[1].status.code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(world.sender().links(), 0);
  world.ExpectBaseline();
}

TEST(Handoff, FaultsAreToldWithPairStageAndCause) {
  std::vector<std::string> told;
  const auto listen = [&told](const char* who) {
    return [&told, who](const HandoffFault& fault) {
      told.push_back(absl::StrCat(who, ": ", std::string(fault.what), " ",
                                  fault.peer, " ", fault.way, " ",
                                  std::string(fault.stage)));
      EXPECT_FALSE(fault.status.ok());
    };
  };
  World w{Setting{}};
  w.options.on_fault = listen("receiver");
  w.Restart();
  w.Run(1, 16);
  w.loop.RunFor(absl::Seconds(1));
  EXPECT_TRUE(told.empty()) << told[0];
  w.Offer(2, 16);  // granted, never computed
  w.loop.RunFor(absl::Seconds(1));
  w.prefill().pair->Cut();
  w.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(told, (std::vector<std::string>{
                      "receiver: handoff link lost prefill  ",
                      "receiver: handoff failed prefill grpc granted"}));
  EXPECT_EQ(w.receiver->counters().ways.at("grpc").failed_in.at("granted"), 1);
  EXPECT_EQ(w.sender().counters().ways.at("grpc").failed_in.at("granted"), 1);
}

TEST(Handoff, ALinkThatNeverAnswersFailsInTime) {
  World world({});
  world.prefill().on_dial = [](Pair* pair) { pair->Stall(true); };
  world.Offer(1, 16);
  world.loop.RunFor(absl::Seconds(6));
  EXPECT_EQ(world.prefill().side.seen[1].failed, 1);
  EXPECT_EQ(world.prefill().side.seen[1].failed_way, "grpc");
  EXPECT_EQ(world.sender().attempts(), 0);
}

TEST(Handoff, MismatchesAreRefusedReadably) {
  struct Row {
    const char* why;
    std::function<void(v1::LinkRequest*)> change;
    const char* message;
  };
  const std::vector<Row> rows = {
      {"other weights",
       [](auto* m) {
         (*m->mutable_hello()->mutable_fingerprint())["weights"] = "w2";
       },
       "'weights' is 'w2' on the prefill worker and 'w1' on the decode worker"},
      {"a field only the sender has",
       [](auto* m) {
         (*m->mutable_hello()->mutable_fingerprint())["rope"] = "x";
       },
       "'rope' is 'x' on the prefill worker and nothing on the decode worker"},
      {"a field only the receiver has",
       [](auto* m) {
         m->mutable_hello()->mutable_fingerprint()->erase("weights");
       },
       "'weights' is nothing on the prefill worker"},
      {"other numerics",
       [](auto* m) {
         (*m->mutable_hello()->mutable_fingerprint())["numerics"] = "cuda-1";
       },
       "--mixed-numerics"},
      {"numerics allowed by one side only",
       [](auto* m) {
         (*m->mutable_hello()->mutable_fingerprint())["numerics"] = "cuda-1";
         m->mutable_hello()->set_mixed_numerics(true);
       },
       "--mixed-numerics"},
      {"other KV format",
       [](auto* m) { m->mutable_hello()->set_kv_dtype("bf16"); },
       "'kv_dtype' is 'bf16'"},
      {"unknown KV format",
       [](auto* m) { m->mutable_hello()->set_kv_dtype("q4"); },
       "none of f32, bf16, f16, fp8, int8, int4"},
      {"a sender that cannot convert to the receiver's format",
       [](auto* m) {
         m->mutable_hello()->set_kv_dtype("bf16");
         m->mutable_hello()->add_kv_formats("bf16");
         m->mutable_hello()->add_kv_formats("fp8");
       },
       "which the prefill worker does not know"},
      {"an older receiver",
       [](auto* m) { m->mutable_hello()->set_receiver_incarnation("old"); },
       "was restarted"},
      {"a future protocol",
       [](auto* m) {
         m->mutable_hello()->set_protocol_min(kProtocolMax + 1);
         m->mutable_hello()->set_protocol_max(kProtocolMax + 2);
       },
       "no common handoff protocol"},
      {"no sender", [](auto* m) { m->mutable_hello()->clear_sender(); },
       "names no sender"},
      {"no hello", [](auto* m) { m->mutable_beat(); }, "begins with hello"},
  };
  for (const Row& row : rows) {
    World world({});
    world.prefill().on_dial = [&row](Pair* pair) {
      pair->requests.filter = [&row](int index, v1::LinkRequest* message) {
        if (index == 0) row.change(message);
        return 1;
      };
    };
    const Attempt attempt = world.Run(1, 16);
    world.loop.RunFor(absl::Seconds(1));
    const auto& seen = world.prefill().side.seen[1];
    EXPECT_EQ(seen.failed, 1) << row.why;
    EXPECT_THAT(Text(seen.status), HasSubstr(row.message)) << row.why;
    EXPECT_EQ(world.receiver->counters().links_refused, 1) << row.why;
    EXPECT_EQ(world.decode.seen.count(1), 0u) << row.why;
    world.receiver->EndAttempt(attempt, absl::OkStatus());
    world.ExpectBaseline();
  }
}

TEST(Handoff, OfAConfigTheWordsThatDifferAreNamed) {
  const std::string config = "LlamaForCausalLM hidden=64 layers=4 rope=dynamic";
  v1::LinkHello hello;
  (*hello.mutable_fingerprint())["config"] = config + " served=4096 tied=1";
  hello.set_kv_dtype("f32");
  const Compatibility compatibility =
      Compare(hello, {{"config", config + " served=8192 tied=1"}}, "f32",
              /*mixed_numerics=*/false);
  EXPECT_EQ(compatibility.status.message(),
            "fingerprints differ: 'config' is 'served=4096' on the prefill "
            "worker and 'served=8192' on the decode worker (is --max-model-len "
            "the same on both workers?). Start both workers with the same "
            "model and flags.");
}

TEST(Handoff, ALinkIsOfTheWorkerThatItsCertificateNames) {
  using enum rpc::PeerRole;
  struct Row {
    rpc::PeerRole role;
    const char* id;
    bool taken;
  };
  for (const Row& row :
       {Row{kPrefill, "", true}, Row{kPrefill, "prefill", true},
        Row{kPrefill, "other", false}, Row{kPrefill, "prefil", false},
        Row{kDecode, "prefill", false}, Row{kRouter, "", false}}) {
    World world({});
    world.prefill().identity = {
        .authenticated = true,
        .identities = {{.role = row.role, .worker_id = row.id}}};
    const Attempt attempt = world.Run(1, 16);
    world.loop.RunFor(absl::Seconds(1));
    const auto& seen = world.prefill().side.seen[1];
    EXPECT_EQ(seen.acknowledged, row.taken ? 1 : 0) << row.id;
    EXPECT_EQ(world.receiver->counters().links_refused, row.taken ? 0 : 1);
    if (row.taken) continue;
    EXPECT_EQ(seen.failed, 1);
    EXPECT_THAT(Text(seen.status), HasSubstr("says it is prefill/prefill"));
    world.receiver->EndAttempt(attempt, absl::OkStatus());
    world.ExpectBaseline();
  }
}

TEST(Handoff, ANeighbouringProtocolVersionWorks) {
  for (const uint32_t newest : {kProtocolMax - 1, kProtocolMax + 1}) {
    World world({});
    world.prefill().on_dial = [newest](Pair* pair) {
      pair->requests.filter = [newest](int index, v1::LinkRequest* message) {
        if (index == 0) message->mutable_hello()->set_protocol_max(newest);
        return 1;
      };
    };
    world.Run(1, 16);
    world.loop.RunFor(absl::Seconds(1));
    EXPECT_EQ(world.prefill().side.seen[1].acknowledged, 1) << newest;
  }
}

TEST(Handoff, ForeignTicketsAreRefusedAndChangeNothing) {
  struct Row {
    const char* why;
    std::function<void(v1::HandoffOffer*)> change;
  };
  const std::vector<Row> rows = {
      {"a flipped bit", [](auto* o) { (*o->mutable_ticket())[20] ^= 1; }},
      {"none", [](auto* o) { o->clear_ticket(); }},
      {"another request",
       [](auto* o) { o->mutable_key()->set_request_id("other"); }},
      {"another sequence",
       [](auto* o) { o->mutable_key()->set_sequence_index(1); }},
      {"another attempt", [](auto* o) { o->mutable_key()->set_attempt(9); }},
      {"more positions than allowed",
       [](auto* o) { o->set_positions(o->positions() + 1); }},
      {"no positions", [](auto* o) { o->set_positions(0); }},
      {"more cached than there are",
       [](auto* o) { o->set_cached_positions(o->positions() + 1); }},
  };
  for (const Row& row : rows) {
    World world({});
    world.prefill().on_dial = [&row](Pair* pair) {
      pair->requests.filter = [&row](int, v1::LinkRequest* message) {
        if (message->has_offer()) row.change(message->mutable_offer());
        return 1;
      };
    };
    const Attempt attempt = world.Run(1, 16);
    world.loop.RunFor(absl::Seconds(1));
    EXPECT_EQ(world.decode.seen.count(1), 0u) << row.why;
    EXPECT_GE(world.receiver->counters().offers_refused, 1) << row.why;
    EXPECT_EQ(world.receiver->tickets(), 1) << row.why;
    EXPECT_EQ(world.receiver->links(), 1) << row.why;
    world.receiver->EndAttempt(attempt, absl::OkStatus());
    world.sender().Cancel(attempt);
  }
}

TEST(Handoff, AnotherWorkersTicketIsRefused) {
  World world({});
  Prefill* thief = world.AddPrefill("thief");
  const Attempt attempt = MakeAttempt(1);
  thief->side.Fill(attempt, 16, 1);
  // Issued to the first worker, offered by the second.
  const std::string ticket = world.receiver->IssueTicket(
      attempt, world.prefill().self, 16, absl::Seconds(60));
  thief->sender->Offer(attempt, world.options.self, ticket, 16, 0,
                       absl::Seconds(1), {});
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(thief->side.seen[1].status.code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(world.decode.seen.count(1), 0u);
  world.receiver->EndAttempt(attempt, absl::OkStatus());
  world.ExpectBaseline();
}

// Also where a key has become known: a ticket is of one attempt and of two
// processes.
TEST(Handoff, ATicketOpensItsAttemptOnceAndForItsIncarnationsAlone) {
  World world({});
  const v1::WorkerRef& self = world.prefill().self;
  const auto offer = [&](const Attempt& attempt, const std::string& ticket) {
    world.prefill().side.Fill(attempt, 16, 1);
    world.sender().Offer(attempt, world.options.self, ticket, 16, 0,
                         absl::Seconds(1), {});
    world.loop.RunFor(absl::Seconds(1));
  };
  const auto& prefill = world.prefill().side.seen;
  // Replayed when its attempt has been committed, and when it was ended.
  const std::string used =
      world.receiver->IssueTicket(MakeAttempt(1), self, 16, absl::Seconds(60));
  offer(MakeAttempt(1), used);
  world.Finish(MakeAttempt(1), 16);
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(prefill.at(1).acknowledged, 1);
  world.prefill().side.seen.erase(1);
  offer(MakeAttempt(1), used);
  EXPECT_EQ(prefill.at(1).answers.size(), 0u);  // no room is granted
  const std::string ended =
      world.receiver->IssueTicket(MakeAttempt(2), self, 16, absl::Seconds(60));
  world.receiver->EndAttempt(MakeAttempt(2), absl::OkStatus());
  offer(MakeAttempt(2), ended);
  EXPECT_EQ(prefill.at(2).status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(world.decode.seen[1].offers, 1);
  EXPECT_EQ(world.decode.seen[1].committed, 1);
  EXPECT_EQ(world.decode.seen.count(2), 0u);
  EXPECT_EQ(world.receiver->tickets(), 0);
  // Of the sender before it was restarted.
  offer(MakeAttempt(3),
        world.receiver->IssueTicket(MakeAttempt(3), Ref("prefill", "before"),
                                    16, absl::Seconds(60)));
  // Of the receiver before, with the same key.
  ReceiverOptions options = world.options;
  options.self = Ref("decode", "before");
  SeededRandom same(1);
  Receiver before(options, &world.loop, &same, &world.decode);
  offer(MakeAttempt(4),
        before.IssueTicket(MakeAttempt(4), self, 16, absl::Seconds(60)));
  for (const int n : {3, 4}) {
    EXPECT_EQ(prefill.at(n).status.code(), absl::StatusCode::kPermissionDenied)
        << n << ": " << prefill.at(n).status;
    EXPECT_EQ(world.decode.seen.count(n), 0u) << n;
    before.EndAttempt(MakeAttempt(n), absl::OkStatus());
    world.receiver->EndAttempt(MakeAttempt(n), absl::OkStatus());
  }
  world.ExpectBaseline();
}

TEST(Handoff, AWayThatNobodyKnowsFailsAndIsNotCounted) {
  World world({});
  world.prefill().on_dial = [](Pair* pair) {
    pair->requests.filter = [](int, v1::LinkRequest* message) {
      if (message->has_offer()) message->mutable_offer()->set_way("carrier");
      return 1;
    };
  };
  const Attempt attempt = world.Run(1, 16);
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_FALSE(world.decode.seen[1].status.ok());
  EXPECT_FALSE(world.receiver->counters().ways.contains("carrier"));
  world.sender().Cancel(attempt);
  world.receiver->EndAttempt(attempt, absl::OkStatus());
}

TEST(Handoff, ARefusalByTheWorkerEndsTheAttempt) {
  World world({});
  world.decode.refuse = absl::ResourceExhaustedError("no room, ever");
  world.Run(1, 16);
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.prefill().side.seen[1].status.code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(world.decode.seen[1].failed, 0);
  world.ExpectBaseline();
}

TEST(Handoff, ACommitThatTheWorkerDeclinesFailsTheSender) {
  World world({});
  world.decode.commit_status = absl::CancelledError("the call has ended");
  world.Run(1, 16);
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.prefill().side.seen[1].failed, 1);
  EXPECT_EQ(world.prefill().side.seen[1].status.code(),
            absl::StatusCode::kCancelled);
  ExpectOneCancelled(world);
  world.ExpectBaseline();
}

TEST(Handoff, AvoidedWaysAreNotUsed) {
  Setting setting;
  setting.way = "direct";
  World world(setting);
  Attempt attempt = world.Offer(1, 16, nullptr, {"direct"});
  world.Finish(attempt, 16);
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.prefill().side.seen[1].timings.way, "grpc");
  attempt = world.Offer(2, 16, nullptr, {"direct", "grpc"});
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.prefill().side.seen[2].status.code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(world.prefill().side.seen[2].failed_way, "");
  world.receiver->EndAttempt(attempt, absl::OkStatus());
  world.ExpectBaseline();
}

TEST(Handoff, AWayThatCannotBeSetUpLeavesTheOthers) {
  Setting setting;
  setting.way = "direct";
  World world(setting);
  world.host.fail_connect = true;
  world.Run(1, 16);
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.prefill().side.seen[1].timings.way, "grpc");
  EXPECT_EQ(world.sender().counters().ways_failed, 1);
}

TEST(Handoff, LinksBeyondTheLimitAreRefused) {
  World world({});
  world.options.max_links = 2;
  world.Restart();
  for (int n = 1; n <= 3; ++n) {
    Prefill* from = world.AddPrefill("p" + std::to_string(n));
    world.Run(n, 16, from);
    world.loop.RunFor(absl::Seconds(1));
    EXPECT_EQ(from->side.seen[n].acknowledged, n <= 2 ? 1 : 0);
  }
  EXPECT_EQ(world.receiver->links(), 2);
}

TEST(Handoff, ANewLinkOfASenderReplacesItsOldOne) {
  World world({});
  world.decode.verdict = Verdict::kStart;
  const Attempt old = world.Offer(1, 16);
  world.loop.RunFor(absl::Milliseconds(10));
  // The prefill worker restarted; its old connection looks alive.
  auto stuck = world.prefill().pair;
  stuck->Stall(true);
  Prefill* again = world.AddPrefill("prefill");
  world.decode.verdict = Verdict::kGranted;
  world.Run(2, 16, again);
  world.loop.RunFor(absl::Milliseconds(100));
  EXPECT_EQ(again->side.seen[2].acknowledged, 1);
  EXPECT_EQ(world.decode.seen[1].failed, 1);
  EXPECT_EQ(world.receiver->links(), 1);
}

TEST(Handoff, WaitingPositionsCountWhatIsComputedAndUnsent) {
  World world({});
  world.decode.verdict = Verdict::kWait;
  const Attempt a = world.Offer(1, 32);
  const Attempt b = world.Offer(2, 8);
  world.loop.RunFor(absl::Milliseconds(10));
  world.sender().Computed(a, {0, 4, 0, 16});
  world.sender().Computed(a, {0, 2, 16, 32});  // half the layers
  world.sender().Computed(b, {0, 4, 0, 8});
  EXPECT_EQ(world.sender().waiting_positions("decode"), 16 + 8 + 8);
  EXPECT_EQ(world.sender().waiting_positions("another"), 0);
  world.sender().Cancel(b);
  EXPECT_EQ(world.sender().waiting_positions("decode"), 24);
  world.sender().Cancel(a);
  EXPECT_EQ(world.sender().waiting_positions("decode"), 0);
}

TEST(Handoff, WhatIsNotNeededAnyMoreHasNotFailed) {
  World world({});
  const Attempt attempt = world.Offer(1, 16);
  world.loop.RunFor(absl::Milliseconds(10));
  world.sender().Cancel(attempt);
  world.prefill().side.seen[1].cancelled = true;
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.decode.seen[1].failed, 1);  // the worker's attempt is over
  ExpectOneCancelled(world);
  world.ExpectBaseline();
}

// The decode worker may be heard first: on the link, before the prefill
// worker's own call ends.
TEST(Handoff, WhatEndsWithItsRequestHasNotFailed) {
  for (const bool commits : {false, true}) {
    World world({});
    const Attempt attempt = world.Offer(1, 16);
    world.loop.RunFor(absl::Milliseconds(10));
    if (commits) {
      // The commit crosses the end, and is answered with it.
      world.prefill().pair->Stall(true);
      world.Finish(attempt, 16);
    }
    world.receiver->EndAttempt(attempt, absl::CancelledError("stream dropped"));
    world.prefill().pair->Stall(false);
    world.loop.RunFor(absl::Seconds(1));
    EXPECT_EQ(world.prefill().side.seen[1].failed, 1);
    EXPECT_EQ(world.decode.seen[1].committed, 0);
    ExpectOneCancelled(world);
    world.ExpectBaseline();
  }
}

TEST(Handoff, WhatIsRevokedHasFailed) {
  World world({});
  const Attempt attempt = world.Offer(1, 16);
  world.loop.RunFor(absl::Milliseconds(10));
  world.receiver->EndAttempt(attempt,
                             absl::ResourceExhaustedError("blocks are short"));
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.sender().counters().ways.at("grpc").failed, 1);
  EXPECT_EQ(world.sender().counters().ways.at("grpc").cancelled, 0);
}

TEST(Handoff, ACommitWithoutAllThatIsWantedFailsBeforeItIsSent) {
  World world({});
  const Attempt attempt = world.Offer(1, 16);
  world.sender().Computed(attempt, {0, 4, 0, 12});
  world.sender().Commit(attempt, {});
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.prefill().side.seen[1].failed, 1);
  EXPECT_EQ(world.prefill().side.seen[1].status.code(),
            absl::StatusCode::kInternal);  // its own word, not the receiver's
  EXPECT_EQ(world.decode.seen[1].failed, 1);
  EXPECT_EQ(world.decode.seen[1].committed, 0);
  EXPECT_EQ(world.receiver->counters().ways.at("grpc").failed, 1);
  world.ExpectBaseline();
}

}  // namespace
}  // namespace tandem::handoff::testing
