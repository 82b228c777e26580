// SPDX-License-Identifier: Apache-2.0
// What the way "nccl" decides, on virtual time over the double: pairing,
// order, stalls, errors, aborts, rebuilding, falling back, quarantine. Every
// scenario ends with every communicator gone, every buffer and slab free, and
// no token from KV that is not the sender's.

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "handoff/nccl/pair.h"
#include "tests/handoff/nccl/nccl_world.h"

namespace tandem::handoff::nccl::testing {
namespace {

using ::testing::HasSubstr;

using Link = handoff::testing::Pair;

constexpr int kPositions = 24;  // 24 slices of one slab each

int WarmSteps(const NcclWorld& w) {
  return 2 * static_cast<int>(WarmSizes(w.setting.station.slab_bytes).size());
}

// ---- Pairing and order.

TEST(NcclPair, FirstRequestTakesTheOtherWayWhileThePairComesUp) {
  NcclWorld w(Usual());
  EXPECT_EQ(w.Try(1, kPositions), absl::OkStatus());
  EXPECT_EQ(w.WayOf(1), "grpc");
  w.world.loop.RunFor(absl::Seconds(1));
  for (int gpu : {0, 1}) {
    EXPECT_EQ(w.counters(gpu).ups, 1);
    EXPECT_EQ(w.counters(gpu).communicators, 1);
    EXPECT_EQ(w.counters(gpu).memory_bytes, 1 << 20);
    // Every size class, there and back.
    EXPECT_EQ(w.counters(gpu).operations, WarmSteps(w));
  }
  EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus());
  EXPECT_EQ(w.WayOf(2), "nccl");
  EXPECT_EQ(w.counters(0).operations, WarmSteps(w) + kPositions);
  EXPECT_EQ(w.world.receiver->counters().ways.at("nccl").slices, kPositions);
  w.world.ExpectBaseline();
}

TEST(NcclPair, SizesOfTheWarmUpEndWithTheSlab) {
  EXPECT_THAT(WarmSizes(512), ::testing::ElementsAre(8, 512));
  EXPECT_THAT(WarmSizes(1 << 20),
              ::testing::ElementsAre(8, 128 << 10, 1 << 20));
}

TEST(NcclPair, OneReceivePerGpuAndNoPairWaitsForAnother) {
  NcclSetting setting = Usual();
  setting.prefills = 4;
  setting.setting.num_slabs = 16;
  NcclWorld w(setting);
  for (int i = 0; i < 4; ++i) w.ComeUp(w.world.prefills[i].get(), 900 + i);
  ASSERT_EQ(w.counters(0).communicators, 4);
  for (int n = 1; n <= 40; ++n) {
    w.world.Run(n, kPositions, w.world.prefills[n % 4].get());
  }
  w.world.loop.RunFor(absl::Seconds(5));
  for (int n = 1; n <= 40; ++n) {
    Prefill* from = w.world.prefills[n % 4].get();
    EXPECT_EQ(w.WayOf(n, from), "nccl") << n;
    EXPECT_TRUE(w.world.SameKv(MakeAttempt(n), kPositions, from)) << n;
  }
  EXPECT_EQ(w.fabric->gpus[0].most_receives.load(), 1);
  EXPECT_EQ(w.fabric->gpus[0].late_stores.load(), 0);
  w.world.ExpectBaseline();
}

TEST(NcclPair, PeersWithOtherSlabsKeepToTheOtherWay) {
  NcclSetting setting = Usual();
  setting.station.slab_bytes = 1024;
  NcclWorld w(setting);
  EXPECT_EQ(w.Try(1, kPositions), absl::OkStatus());
  w.world.loop.RunFor(absl::Seconds(30));
  EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus());
  EXPECT_EQ(w.WayOf(2), "grpc");
  EXPECT_EQ(w.counters(0).joins, 0);
}

TEST(NcclPair, WithoutBuffersItKeepsToTheOtherWay) {
  NcclSetting setting = Usual();
  setting.station.buffers = 3;  // four slabs per pair
  NcclWorld w(setting);
  EXPECT_EQ(w.Try(1, kPositions), absl::OkStatus());
  w.world.loop.RunFor(absl::Seconds(30));
  EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus());
  EXPECT_EQ(w.WayOf(2), "grpc");
  EXPECT_EQ(w.counters(1).joins, 0);
}

// ---- Faults: where, what, and what it must lead to.

struct Fault {
  const char* why;
  int gpu;
  On on;
  Act act;
};

const std::vector<Fault>& TransferFaults() {
  static const std::vector<Fault> faults = {
      {"the receive stalls", kDecodeGpu, On::kReceive, Act::kStall},
      {"the send stalls", kPrefillGpu, On::kSend, Act::kStall},
      {"the receive fails", kDecodeGpu, On::kReceive, Act::kFail},
      {"the send fails", kPrefillGpu, On::kSend, Act::kFail},
      {"the receive is refused", kDecodeGpu, On::kReceive, Act::kRefuse},
      {"the send is refused", kPrefillGpu, On::kSend, Act::kRefuse},
  };
  return faults;
}

TEST(NcclFault, AnyOfATransferFailsItsAttemptAndThePairComesBack) {
  for (const Fault& fault : TransferFaults()) {
    for (int slice = 0; slice < kPositions; slice += 5) {
      NcclWorld w(Usual());
      w.ComeUp();
      w.fabric->Arm(fault.gpu, fault.on, fault.act, slice);
      const absl::Status status = w.Try(1, kPositions);
      EXPECT_FALSE(status.ok()) << fault.why << slice;
      EXPECT_EQ(w.WayOf(1), "failed nccl") << fault.why << slice;
      EXPECT_EQ(w.world.decode.seen[1].failed_way, "nccl");
      EXPECT_EQ(w.world.decode.seen[1].committed, 0);
      w.ExpectInvariants();
      // What is told names pair, life, stage, bytes and cause.
      ASSERT_EQ(w.seen[fault.gpu]->broken.size(), 1) << fault.why;
      const Seen::Broken& told = w.seen[fault.gpu]->broken[0];
      EXPECT_EQ(told.pair, "prefill>decode");
      EXPECT_EQ(told.life, 1);
      EXPECT_EQ(told.stage, fault.on == On::kSend ? "send" : "receive");
      EXPECT_EQ(told.bytes, 512);
      EXPECT_FALSE(told.cause.ok());
      // The request goes on at once, by the other way.
      EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus());
      EXPECT_EQ(w.WayOf(2), "grpc") << fault.why;
      // In the background the pair is made anew.
      w.world.loop.RunFor(absl::Seconds(3));
      EXPECT_EQ(w.counters(0).ups, 2) << fault.why << slice;
      EXPECT_EQ(w.counters(0).broken, 1) << fault.why << slice;
      EXPECT_EQ(w.counters(1).broken, 1) << fault.why << slice;
      EXPECT_EQ(w.counters(0).gone, 1);
      EXPECT_EQ(w.Try(3, kPositions), absl::OkStatus());
      EXPECT_EQ(w.WayOf(3), "nccl") << fault.why << slice;
      EXPECT_EQ(w.world.receiver->links(), 1);
      EXPECT_EQ(w.world.prefill().dials, 1);
      w.world.ExpectBaseline();
      EXPECT_TRUE(w.fatal(0).ok() && w.fatal(1).ok());
    }
  }
}

TEST(NcclFault, AnyOfBringingUpIsTriedAgain) {
  const std::vector<Fault> faults = {
      {"no id", kDecodeGpu, On::kId, Act::kRefuse},
      {"no join", kDecodeGpu, On::kJoin, Act::kRefuse},
      {"no join", kPrefillGpu, On::kJoin, Act::kRefuse},
      {"the join fails", kDecodeGpu, On::kJoin, Act::kFail},
      {"the join fails", kPrefillGpu, On::kJoin, Act::kFail},
      {"the join stalls", kDecodeGpu, On::kJoin, Act::kStall},
      {"the join stalls", kPrefillGpu, On::kJoin, Act::kStall},
      {"warm-up there", kDecodeGpu, On::kReceive, Act::kStall},
      {"warm-up there", kPrefillGpu, On::kSend, Act::kFail},
      {"warm-up back", kPrefillGpu, On::kReceive, Act::kStall},
      {"warm-up back", kDecodeGpu, On::kSend, Act::kFail},
  };
  for (const Fault& fault : faults) {
    NcclWorld w(Usual());
    w.fabric->Arm(fault.gpu, fault.on, fault.act);
    EXPECT_EQ(w.Try(1, kPositions), absl::OkStatus()) << fault.why;
    EXPECT_EQ(w.WayOf(1), "grpc");
    w.world.loop.RunFor(absl::Seconds(40));
    EXPECT_EQ(w.counters(0).ups, 1) << fault.why << fault.gpu;
    EXPECT_EQ(w.counters(1).broken, 1) << fault.why << fault.gpu;
    EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus());
    EXPECT_EQ(w.WayOf(2), "nccl") << fault.why << fault.gpu;
    w.world.ExpectBaseline();
  }
}

TEST(NcclFault, AnErrorOfAnIdlePairIsNoticedBeforeItIsUsed) {
  for (const int gpu : {kDecodeGpu, kPrefillGpu}) {
    NcclWorld w(Usual());
    w.ComeUp();
    w.fabric->Arm(gpu, On::kIdle, Act::kFail);
    w.world.loop.RunFor(absl::Milliseconds(400));
    EXPECT_EQ(w.counters(0).broken, 1);
    EXPECT_EQ(w.counters(1).broken, 1);
    w.world.loop.RunFor(absl::Seconds(3));
    EXPECT_EQ(w.Try(1, kPositions), absl::OkStatus());
    EXPECT_EQ(w.WayOf(1), "nccl");
  }
}

TEST(NcclFault, ACorruptedByteIsNeverCommitted) {
  for (int slice = 0; slice < kPositions; slice += 7) {
    NcclWorld w(Usual());
    w.ComeUp();
    w.fabric->Arm(kDecodeGpu, On::kReceive, Act::kCorrupt, slice);
    EXPECT_EQ(w.Try(1, kPositions).code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(w.world.decode.seen[1].failed_way, "nccl");
    EXPECT_EQ(w.world.decode.seen[1].committed, 0);
    // Nothing says that the communicator is at fault.
    EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus());
    EXPECT_EQ(w.WayOf(2), "nccl");
    w.world.ExpectBaseline();
  }
}

TEST(NcclFault, ADelayBelowTheDeadlineIsNone) {
  NcclWorld w(Usual());
  w.ComeUp();
  w.fabric->Arm(kDecodeGpu, On::kReceive, Act::kDelay, 3, 1'500'000);
  w.fabric->Arm(kPrefillGpu, On::kSend, Act::kDelay, 9, 1'500'000);
  EXPECT_EQ(w.Try(1, kPositions), absl::OkStatus());
  EXPECT_EQ(w.WayOf(1), "nccl");
  EXPECT_EQ(w.counters(0).broken, 0);
}

TEST(NcclFault, AStalledPairHoldsUpNoOther) {
  NcclSetting setting = Usual();
  setting.prefills = 2;
  NcclWorld w(setting);
  Prefill* other = w.world.prefills[1].get();
  w.ComeUp();
  w.ComeUp(other, 901);
  // The send never comes; the receive has the GPU's turn until its deadline.
  w.fabric->Arm(kPrefillGpu, On::kSend, Act::kStall, 2);
  w.world.Run(1, kPositions);
  w.world.loop.RunFor(absl::Milliseconds(200));
  EXPECT_EQ(w.Try(2, kPositions, other), absl::OkStatus());
  EXPECT_EQ(w.WayOf(2, other), "nccl");
  EXPECT_EQ(w.counters(2).broken, 0);
  EXPECT_EQ(w.counters(0).broken, 1);
  w.world.loop.RunFor(absl::Seconds(5));
  w.world.receiver->EndAttempt(MakeAttempt(1), absl::OkStatus());
  w.world.ExpectBaseline();
}

// Waits between lives double up to `most`, and once the fault is gone the pair
// comes up.
void ExpectWaitsThatDouble(On on, absl::Duration most, size_t count) {
  NcclSetting setting = Usual();
  // Less than an unused link lives.
  setting.station.join_backoff_max = absl::Minutes(2);
  NcclWorld w(setting);
  w.fabric->Arm(kPrefillGpu, on, Act::kFail, 0, 0, 1'000);
  EXPECT_EQ(w.Try(1, 8), absl::OkStatus());
  std::vector<absl::Duration> waits;
  int64_t seen = w.counters(1).joins;
  absl::Time last = w.world.loop.Now();
  while (waits.size() < count &&
         w.world.loop.Now() - last <= most + absl::Minutes(1)) {
    w.world.loop.RunFor(absl::Milliseconds(10));
    if (w.counters(1).joins == seen) continue;
    seen = w.counters(1).joins;
    waits.push_back(w.world.loop.Now() - last);
    last = w.world.loop.Now();
  }
  ASSERT_EQ(waits.size(), count);
  absl::Duration full = absl::Seconds(1);
  for (size_t i = 0; i < waits.size(); ++i) {
    EXPECT_GE(waits[i], full / 2 - absl::Seconds(0.1)) << i;
    EXPECT_LE(waits[i], full + absl::Seconds(0.5)) << i;
    full = std::min(full * 2, most);
  }
  EXPECT_EQ(full, most);
  w.fabric->Disarm();
  w.world.loop.RunFor(most + absl::Seconds(1));
  EXPECT_EQ(w.counters(0).ups, 1);
}

TEST(NcclFault, WaitsDoubleWhileItKeepsFailing) {
  ExpectWaitsThatDouble(On::kSend, absl::Seconds(30), 9);
}

TEST(NcclFault, WaitsGrowLongerWhileJoinsFail) {
  EXPECT_EQ(StationOptions().join_backoff_max, absl::Hours(1));
  ExpectWaitsThatDouble(On::kJoin, absl::Minutes(2), 8);
}

// ---- Quarantine.

// The decode worker's end stalls in slice 3, and its abort takes 3 s.
void StallSlowly(NcclWorld& w) {
  w.fabric->Arm(kDecodeGpu, On::kReceive, Act::kStall, 3);
  w.fabric->Arm(kDecodeGpu, On::kAbort, Act::kDelay, 0, 3'000'000);
}

TEST(NcclQuarantine, HoldsWhatAnUnfinishedReceiveMayWriteUntilItIsGone) {
  NcclWorld w(Usual());
  w.ComeUp();
  StallSlowly(w);
  w.world.Run(1, kPositions);
  ASSERT_TRUE(w.Until([&] { return w.world.decode.seen[1].failed > 0; }));
  EXPECT_EQ(w.world.decode.seen[1].failed_way, "nccl");
  w.world.loop.RunFor(absl::Seconds(2));
  // The attempt is long over. The slab of the posted receive is not, and it
  // alone: what was only waiting for its turn is free.
  EXPECT_EQ(w.world.receiver->slabs().quarantined, 1);
  EXPECT_EQ(w.fabric->gpus[0].late_stores.load(), 0);
  EXPECT_EQ(w.counters(0).communicators, 1);
  w.world.loop.RunFor(absl::Seconds(2));
  EXPECT_EQ(w.fabric->gpus[0].late_stores.load(), 1);
  EXPECT_EQ(w.world.receiver->slabs().quarantined, 0);
  EXPECT_GE(w.world.receiver->counters().quarantines, 1);
  w.world.loop.RunFor(absl::Seconds(10));
  EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus());
  w.world.ExpectBaseline();
}

TEST(NcclQuarantine, EndsByNoWordOfThePeer) {
  NcclWorld w(Usual());
  w.ComeUp();
  w.fabric->Arm(kDecodeGpu, On::kReceive, Act::kStall, 3);
  w.fabric->Arm(kDecodeGpu, On::kAbort, Act::kDelay, 0, 9'000'000);
  // The stalled slice again, or its credit back, in the place of each beat.
  v1::Slice stalled;
  bool again = false;
  int told = 0;
  w.world.prefill().pair->requests.filter = [&](int, v1::LinkRequest* m) {
    if (m->has_slice() && m->slice().slice() == 3) stalled = m->slice();
    if (m->has_beat() && again) {
      if (++told % 2 == 1) {
        *m->mutable_slice() = stalled;
      } else {
        m->mutable_credit_return()->set_slab(stalled.slab());
        m->mutable_credit_return()->set_generation(stalled.generation());
      }
    }
    return 1;
  };
  w.world.Run(1, kPositions);
  ASSERT_TRUE(w.Until([&] { return w.world.decode.seen[1].failed > 0; }));
  again = true;
  w.world.loop.RunFor(absl::Seconds(8));
  EXPECT_GE(told, 2);
  EXPECT_EQ(w.fabric->gpus[0].late_stores.load(), 0);
  EXPECT_EQ(w.world.receiver->slabs().quarantined, 1);
  w.world.loop.RunFor(absl::Seconds(3));
  EXPECT_EQ(w.world.receiver->slabs().quarantined, 0);
  w.world.prefill().pair->requests.filter = nullptr;
}

TEST(NcclQuarantine, KeepsTheLateStoreFromEverybodyElse) {
  // So few buffers that any which is free too early is used at once.
  NcclSetting setting = Usual();
  setting.prefills = 2;
  setting.station.buffers = 8;
  NcclWorld w(setting);
  Prefill* other = w.world.prefills[1].get();
  w.ComeUp();
  w.ComeUp(other, 901);
  StallSlowly(w);
  w.world.decode.scattering.delay = absl::Milliseconds(40);
  w.world.Run(1, kPositions);
  ASSERT_TRUE(w.Until([&] { return w.world.decode.seen[1].failed > 0; }));
  const absl::Time end = w.world.loop.Now() + absl::Seconds(6);
  for (int n = 2; w.world.loop.Now() < end; ++n) {
    // Try compares the KV of both ends.
    EXPECT_EQ(w.Try(n, kPositions, other), absl::OkStatus()) << n;
    EXPECT_EQ(w.WayOf(n, other), "nccl");
  }
  EXPECT_EQ(w.fabric->gpus[0].late_stores.load(), 1);
}

TEST(NcclQuarantine, EndsWithTheCommunicatorWhenTheLinkIsLost) {
  NcclWorld w(Usual());
  w.ComeUp();
  StallSlowly(w);
  w.world.Run(1, kPositions);
  ASSERT_TRUE(w.Until([&] { return w.counters(0).operations > 2; }));
  w.world.loop.RunFor(absl::Milliseconds(100));
  w.world.prefill().pair->Cut();
  w.world.loop.RunFor(absl::Seconds(2));
  EXPECT_GE(w.world.receiver->slabs().quarantined, 1);
  EXPECT_EQ(w.world.receiver->links(), 0);
  w.world.loop.RunFor(absl::Seconds(2));
  w.world.ExpectBaseline();
  w.ComeUp(nullptr, 902);
  EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus());
  EXPECT_EQ(w.WayOf(2), "nccl");
}

TEST(NcclQuarantine, ACommunicatorThatStaysEndsTheProcess) {
  for (const int gpu : {kDecodeGpu, kPrefillGpu}) {
    for (const Act act : {Act::kUnquiet, Act::kHang}) {
      NcclWorld w(Usual());
      w.ComeUp();
      w.fabric->Arm(kDecodeGpu, On::kReceive, Act::kStall, 3);
      w.fabric->Arm(gpu, On::kAbort, act);
      EXPECT_FALSE(w.Try(1, kPositions).ok());
      w.world.loop.RunFor(absl::Seconds(5));
      EXPECT_TRUE(w.fatal(gpu).ok());
      EXPECT_EQ(w.counters(gpu).communicators, 1);
      // Meanwhile it works by the other way.
      EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus());
      EXPECT_EQ(w.WayOf(2), "grpc");
      w.world.loop.RunFor(absl::Seconds(10));
      EXPECT_EQ(w.fatal(gpu).code(), absl::StatusCode::kDeadlineExceeded);
      EXPECT_THAT(std::string(w.fatal(gpu).message()),
                  HasSubstr("prefill>decode"));
      EXPECT_TRUE(w.fatal(1 - gpu).ok());
    }
  }
}

TEST(NcclQuarantine, ACallThatHangsEndsTheProcess) {
  const std::vector<Fault> faults = {
      {"receive", kDecodeGpu, On::kReceive, Act::kHang},
      {"send", kPrefillGpu, On::kSend, Act::kHang},
      {"join", kDecodeGpu, On::kJoin, Act::kHang},
      {"join", kPrefillGpu, On::kJoin, Act::kHang},
  };
  for (const Fault& fault : faults) {
    NcclWorld w(Usual());
    if (fault.on != On::kJoin) w.ComeUp();
    w.fabric->Arm(fault.gpu, fault.on, fault.act,
                  fault.on == On::kJoin ? 0 : 3);
    w.world.Run(1, kPositions);
    w.world.loop.RunFor(absl::Seconds(45));
    EXPECT_EQ(w.fatal(fault.gpu).code(), absl::StatusCode::kDeadlineExceeded)
        << fault.why << fault.gpu;
    EXPECT_TRUE(w.fatal(1 - fault.gpu).ok()) << fault.why << fault.gpu;
  }
}

// ---- Agreed operations.

TEST(NcclOperation, IsCarriedOutWhateverBecameOfItsRequest) {
  for (const bool cancel : {true, false}) {
    NcclWorld w(Usual());
    w.ComeUp();
    const int64_t before = w.counters(0).operations;
    // Agreed and slow, so that the attempt ends in the middle of it.
    w.fabric->Arm(kPrefillGpu, On::kSend, Act::kDelay, 4, 500'000);
    w.world.Run(1, kPositions);
    ASSERT_TRUE(
        w.Until([&] { return w.counters(0).operations == before + 4; }));
    w.world.loop.RunFor(absl::Milliseconds(100));
    ASSERT_EQ(w.fabric->gpus[0].receives.load(), 1);
    if (cancel) {
      w.world.prefill().side.seen[1].cancelled = true;
      w.world.sender().Cancel(MakeAttempt(1));
    } else {
      w.world.decode.seen[1].ended = true;
      w.world.receiver->EndAttempt(MakeAttempt(1), absl::OkStatus());
    }
    w.world.loop.RunFor(absl::Seconds(2));
    EXPECT_GE(w.counters(0).operations, before + 5);
    EXPECT_LT(w.counters(0).operations, before + kPositions);
    EXPECT_EQ(w.counters(0).broken, 0);
    EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus());
    EXPECT_EQ(w.WayOf(2), "nccl");
    w.world.ExpectBaseline();
  }
}

TEST(NcclOperation, KeepsItsSlabUntilTheSenderSawItsEnd) {
  // The receiver has everything, scatters, and gives the slab out again while
  // the sender's own kernel is still ending. The double compares what was sent
  // from before and after.
  NcclWorld w(Usual());
  w.ComeUp();
  w.fabric->Arm(kPrefillGpu, On::kSend, Act::kLinger, 0, 20'000, 100);
  EXPECT_EQ(w.Try(1, kPositions), absl::OkStatus());
  EXPECT_EQ(w.WayOf(1), "nccl");
  EXPECT_EQ(w.fabric->changed_sends.load(), 0);
}

TEST(NcclFault, TheSenderNeedsNoWordOfTheReceiverToGoOn) {
  NcclWorld w(Usual());
  w.ComeUp();
  w.world.prefill().pair->responses.filter = [](int, v1::LinkResponse* m) {
    return m->has_dead() || (m->has_nccl() && m->nccl().has_end()) ? 0 : 1;
  };
  w.fabric->Arm(kPrefillGpu, On::kSend, Act::kFail, 3);
  const absl::Time start = w.world.loop.Now();
  EXPECT_FALSE(w.Try(1, kPositions).ok());
  EXPECT_EQ(w.WayOf(1), "failed nccl");
  EXPECT_LT(w.world.loop.Now() - start, absl::Seconds(1));
  w.world.prefill().pair->responses.filter = nullptr;
}

TEST(NcclOperation, OfSlicesThatFitNoLiveGrantIsNeverPosted) {
  NcclWorld w(Usual());
  w.ComeUp();
  const int64_t before = w.counters(0).operations;
  w.world.prefill().pair->requests.filter = [](int, v1::LinkRequest* m) {
    if (m->has_slice() && m->slice().slice() == 2) {
      m->mutable_slice()->mutable_key()->set_attempt(77);
    }
    return 1;
  };
  w.world.Run(1, kPositions);
  w.world.loop.RunFor(absl::Seconds(15));
  EXPECT_EQ(w.world.receiver->counters().slices_refused, 1);
  EXPECT_EQ(w.world.decode.seen[1].committed, 0);
  w.world.prefill().pair->requests.filter = nullptr;
  // The sender skips what was not agreed, and goes on.
  EXPECT_EQ(w.counters(0).operations, before + kPositions - 1);
  EXPECT_EQ(w.counters(0).broken, 0);
  EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus());
  EXPECT_EQ(w.WayOf(2), "nccl");
}

TEST(NcclOperation, LiesAboutItEndTheAttemptBeforeAReceiveIsPosted) {
  struct Lie {
    const char* why;
    std::function<void(v1::Slice*)> change;
  };
  const std::vector<Lie> lies = {
      {"a payload", [](v1::Slice* s) { s->set_payload("x"); }},
      {"another life", [](v1::Slice* s) { s->set_nccl_life(77); }},
      {"an old operation", [](v1::Slice* s) { s->set_nccl_operation(1); }},
      {"no operation", [](v1::Slice* s) { s->clear_nccl_operation(); }},
  };
  for (const Lie& lie : lies) {
    NcclWorld w(Usual());
    w.ComeUp();
    w.world.prefill().pair->requests.filter = [&](int, v1::LinkRequest* m) {
      if (m->has_slice() && m->slice().slice() == 2) {
        lie.change(m->mutable_slice());
      }
      return 1;
    };
    EXPECT_FALSE(w.Try(1, kPositions).ok()) << lie.why;
    w.world.loop.RunFor(absl::Seconds(2));
    EXPECT_EQ(w.world.receiver->counters().slices_refused, 1) << lie.why;
    w.world.prefill().pair->requests.filter = nullptr;
    EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus()) << lie.why;
    w.world.ExpectBaseline();
  }
}

TEST(NcclOperation, AGoForWhatWasNotAnnouncedEndsTheLife) {
  NcclWorld w(Usual());
  w.ComeUp();
  w.world.prefill().pair->responses.filter = [](int, v1::LinkResponse* m) {
    if (m->has_nccl() && m->nccl().has_go()) {
      m->mutable_nccl()->mutable_go()->set_operation(
          m->nccl().go().operation() + 1'000);
    }
    return 1;
  };
  EXPECT_FALSE(w.Try(1, kPositions).ok());
  EXPECT_EQ(w.counters(0).broken, 1);
  w.world.prefill().pair->responses.filter = nullptr;
  w.world.loop.RunFor(absl::Seconds(3));
  EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus());
  EXPECT_EQ(w.WayOf(2), "nccl");
}

// ---- Messages.

class NcclMessage : public ::testing::Test {
 protected:
  // Two attempts over a pair that is up, with `act` at message `at` of one
  // direction; false if there is none.
  bool RunWith(bool requests, int at, const std::function<int(Link*)>& act) {
    NcclWorld w(Usual());
    w.ComeUp();
    bool reached = false;
    Link* link = w.world.prefill().pair.get();
    int index = 0;
    const auto filter = [&, link](int, auto*) {
      if (reached || index++ != at) return 1;
      reached = true;
      return act(link);
    };
    if (requests) {
      link->requests.filter = filter;
    } else {
      link->responses.filter = filter;
    }
    w.world.Run(1, kPositions);
    w.world.Run(2, kPositions);
    w.world.loop.RunFor(absl::Seconds(1));
    w.ExpectInvariants();
    w.world.loop.RunFor(absl::Seconds(45));
    link->requests.filter = nullptr;
    link->responses.filter = nullptr;
    for (int n = 1; n <= 2; ++n) {
      if (w.world.prefill().side.seen[n].failed > 0) {
        w.world.receiver->EndAttempt(MakeAttempt(n), absl::OkStatus());
      }
      if (w.world.decode.seen[n].committed > 0) {
        EXPECT_TRUE(w.world.SameKv(MakeAttempt(n), kPositions)) << at;
      }
      EXPECT_LE(w.world.prefill().side.seen[n].acknowledged,
                w.world.decode.seen[n].committed);
    }
    w.world.loop.RunFor(absl::Seconds(25));
    w.world.ExpectBaseline();
    EXPECT_EQ(w.Try(3, kPositions), absl::OkStatus()) << at;
    w.world.loop.RunFor(absl::Seconds(5));
    EXPECT_EQ(w.Try(4, kPositions), absl::OkStatus()) << at;
    EXPECT_EQ(w.WayOf(4), "nccl") << at;
    return reached;
  }
  void Sweep(const std::function<int(Link*)>& act) {
    for (const bool requests : {true, false}) {
      int at = 0;
      while (RunWith(requests, at, act) && !HasFailure()) ++at;
      EXPECT_GT(at, 80);
    }
  }
};

TEST_F(NcclMessage, MayBeWhereTheLinkIsCut) {
  Sweep([](Link* link) {
    link->Cut();
    return 0;
  });
}
TEST_F(NcclMessage, MayBeLostWithoutAWrongToken) {
  Sweep([](Link*) { return 0; });
}
TEST_F(NcclMessage, MayArriveTwice) {
  Sweep([](Link*) { return 2; });
}

TEST(NcclMessages, OfBringingUpMayBeLostOrDoubled) {
  for (const int copies : {0, 2}) {
    for (const bool requests : {true, false}) {
      // Of requests: want, two goes, up; of responses: open, two goes, up.
      for (int at = 0; at < 4; ++at) {
        NcclWorld w(Usual());
        int index = 0;
        w.world.prefill().on_dial = [&](Link* link) {
          const auto filter = [&](int, auto* message) {
            return message->has_nccl() && index++ == at ? copies : 1;
          };
          if (requests) {
            link->requests.filter = filter;
          } else {
            link->responses.filter = filter;
          }
        };
        EXPECT_EQ(w.Try(1, kPositions), absl::OkStatus());
        w.world.loop.RunFor(absl::Seconds(50));
        EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus());
        EXPECT_EQ(w.WayOf(2), "nccl") << copies << requests << at;
        EXPECT_GT(index, at);  // there was such a message
        w.world.ExpectBaseline();
        w.world.prefill().pair->requests.filter = nullptr;
        w.world.prefill().pair->responses.filter = nullptr;
      }
    }
  }
}

// ---- Places.

TEST(NcclPlaces, AnIdlePairIsDroppedAndComesBackWhenWanted) {
  NcclWorld w(Usual());
  w.ComeUp();
  w.world.loop.RunFor(absl::Minutes(6));
  for (const int gpu : {0, 1}) {
    EXPECT_EQ(w.counters(gpu).communicators, 0);
    EXPECT_EQ(w.counters(gpu).dropped, 1);
    EXPECT_EQ(w.counters(gpu).broken, 0);
  }
  EXPECT_EQ(w.Try(1, kPositions), absl::OkStatus());
  EXPECT_EQ(w.WayOf(1), "grpc");
  w.world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(w.Try(2, kPositions), absl::OkStatus());
  EXPECT_EQ(w.WayOf(2), "nccl");
}

TEST(NcclPlaces, ThePairUnusedForLongestMakesRoom) {
  NcclSetting setting = Usual();
  setting.prefills = 3;
  setting.station.max_communicators = 2;
  NcclWorld w(setting);
  w.ComeUp(w.world.prefills[0].get(), 900);
  w.ComeUp(w.world.prefills[1].get(), 901);
  w.world.loop.RunFor(absl::Seconds(20));
  EXPECT_EQ(w.Try(1, kPositions), absl::OkStatus());  // the first is used
  EXPECT_EQ(w.WayOf(1), "nccl");
  w.ComeUp(w.world.prefills[2].get(), 902);
  EXPECT_EQ(w.counters(0).communicators, 2);
  EXPECT_EQ(w.counters(2).dropped, 1);
  EXPECT_EQ(w.counters(1).dropped, 0);
  EXPECT_EQ(w.Try(2, kPositions, w.world.prefills[2].get()), absl::OkStatus());
  EXPECT_EQ(w.WayOf(2, w.world.prefills[2].get()), "nccl");
}

TEST(NcclPlaces, JoinsAreFewAtOnceAndNotTooFast) {
  NcclSetting setting = Usual();
  setting.prefills = 6;
  setting.station.max_joining = 2;
  setting.station.join_interval = absl::Milliseconds(100);
  setting.station.buffers = 40;
  NcclWorld w(setting);
  for (int i = 0; i < 6; ++i) {
    w.fabric->Arm(kPrefillGpu + i, On::kJoin, Act::kDelay, 0, 700'000);
    w.world.Run(1 + i, 8, w.world.prefills[i].get());
  }
  int most = 0;
  for (int i = 0; i < 5'000; ++i) {
    w.world.loop.RunFor(absl::Milliseconds(1));
    w.ExpectInvariants();
    most = std::max(most, static_cast<int>(w.counters(0).communicators -
                                           w.counters(0).ups));
  }
  EXPECT_EQ(most, 2);
  EXPECT_EQ(w.counters(0).ups, 6);
}

// ---- All of it.

TEST(NcclFault, RandomFaultsOfManyPairsKeepEveryInvariant) {
  int committed = 0;
  int64_t broken = 0;
  std::map<std::string, int> ways;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SeededRandom random(seed);
    NcclSetting setting = Usual();
    setting.prefills = 3;
    setting.setting.num_slabs = 4 + static_cast<int>(random.Below(12));
    setting.station.buffers = 18 + static_cast<int>(random.Below(8));
    NcclWorld w(setting);
    std::map<int, Prefill*> from;
    for (int n = 1; n <= 60; ++n) {
      Prefill* one = w.world.prefills[random.Below(3)].get();
      from[n] = one;
      w.world.Run(n, kPositions, one);
      w.world.loop.RunFor(absl::Microseconds(random.Below(60'000)));
      const int victim = 1 + static_cast<int>(random.Below(n));
      auto& sent = from[victim]->side.seen[victim];
      auto& landed = w.world.decode.seen[victim];
      const int gpu = static_cast<int>(random.Below(4));
      switch (random.Below(16)) {
        case 0:
          if (one->pair != nullptr) one->pair->Cut();
          break;
        case 1:
          sent.cancelled = sent.acknowledged + sent.failed == 0;
          from[victim]->sender->Cancel(MakeAttempt(victim));
          break;
        case 2:
          landed.ended = landed.committed + landed.failed == 0;
          w.world.receiver->EndAttempt(MakeAttempt(victim), absl::OkStatus());
          break;
        case 3:
          w.fabric->Disarm();
          w.fabric->Arm(gpu, random.Below(2) == 0 ? On::kSend : On::kReceive,
                        random.Below(2) == 0 ? Act::kStall : Act::kFail,
                        static_cast<int64_t>(random.Below(9)));
          w.fabric->Arm(gpu, On::kAbort, Act::kDelay, 0,
                        static_cast<int64_t>(random.Below(4'000'000)));
          break;
        case 4:
          w.fabric->Disarm();
          w.fabric->Arm(gpu, On::kJoin, Act::kFail);
          break;
        case 5:
          w.world.loop.RunFor(absl::Seconds(2));
          break;
        default:
          break;
      }
      w.ExpectInvariants();
      if (HasFatalFailure()) FAIL() << "seed " << seed;
    }
    w.fabric->Disarm();
    w.world.loop.RunFor(absl::Seconds(61));
    for (int n = 1; n <= 60; ++n) {
      const auto& sent = from[n]->side.seen[n];
      const auto& landed = w.world.decode.seen[n];
      committed += landed.committed;
      if (sent.acknowledged > 0) ++ways[sent.timings.way];
      EXPECT_LE(sent.acknowledged, landed.committed) << seed << ' ' << n;
      EXPECT_EQ(sent.acknowledged + sent.failed + (sent.cancelled ? 1 : 0), 1)
          << seed << ' ' << n;
      if (landed.committed > 0) {
        EXPECT_TRUE(w.world.SameKv(MakeAttempt(n), kPositions, from[n]))
            << seed << ' ' << n;
      }
    }
    broken += w.counters(0).broken;
    w.world.ExpectBaseline();
    for (const auto& seen : w.seen) EXPECT_TRUE(seen->fatal.ok());
  }
  EXPECT_GT(committed, 1'000);
  EXPECT_GT(broken, 20);
  EXPECT_GT(ways["nccl"], 300);
  EXPECT_GT(ways["grpc"], 100);
}

}  // namespace
}  // namespace tandem::handoff::nccl::testing
