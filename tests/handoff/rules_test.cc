// SPDX-License-Identifier: Apache-2.0
// A receiver against senders that write their messages by hand and break one
// rule at a time; no sender of this project would.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "handoff/wire.h"
#include "tests/handoff/world.h"

namespace tandem::handoff::testing {
namespace {

using ::testing::HasSubstr;

// Four rows of the default shape in f32 fill a slab of 512 bytes.
constexpr int kRowBytes = 128;

// A link whose answers are only noted.
class HandWritten final : public StreamHandler<v1::LinkResponse> {
 public:
  HandWritten(World* world, const v1::WorkerRef& self) : world_(world) {
    auto pair = std::make_shared<Pair>(&world->loop, &world->loop);
    stream_ = pair->Client();
    stream_->Start(this);
    world->receiver->AddLink(pair->Server(), {});
    v1::LinkRequest request;
    v1::LinkHello* hello = request.mutable_hello();
    *hello->mutable_sender() = self;
    hello->set_receiver_incarnation(world->options.self.incarnation());
    hello->set_protocol_min(OurProtocol().min);
    hello->set_protocol_max(OurProtocol().max);
    for (const auto& [field, value] : world->options.fingerprint) {
      (*hello->mutable_fingerprint())[field] = value;
    }
    hello->set_kv_dtype("f32");
    hello->add_ways("grpc");
    Send(std::move(request));
  }

  void OnMessage(v1::LinkResponse message) override {
    heard.push_back(std::move(message));
  }
  void OnClosed(absl::Status) override {}

  void Send(v1::LinkRequest request) {
    stream_->Send(std::move(request));
    world_->loop.RunFor(absl::Milliseconds(1));
  }
  void Offer(const Attempt& attempt, const std::string& ticket, int positions) {
    v1::LinkRequest request;
    ToKey(attempt, request.mutable_offer()->mutable_key());
    request.mutable_offer()->set_ticket(ticket);
    request.mutable_offer()->set_positions(positions);
    request.mutable_offer()->set_way("grpc");
    Send(std::move(request));
  }
  void Announce(const Attempt& attempt, uint32_t slice,
                const SliceRange& range) {
    v1::LinkRequest request;
    v1::SliceReady* ready = request.mutable_slice_ready();
    ToKey(attempt, ready->mutable_key());
    ready->set_slice(slice);
    ready->set_layer_begin(range.layer_begin);
    ready->set_layer_end(range.layer_end);
    ready->set_position_begin(range.position_begin);
    ready->set_position_end(range.position_end);
    ready->set_bytes(Rows(range) * kRowBytes);
    Send(std::move(request));
  }
  void Fill(const Attempt& attempt, const v1::SliceCredit& credit,
            uint64_t generation, int rows) {
    v1::LinkRequest request;
    v1::Slice* slice = request.mutable_slice();
    ToKey(attempt, slice->mutable_key());
    slice->set_slice(credit.slice());
    slice->set_slab(credit.slab());
    slice->set_generation(generation);
    slice->set_payload(std::string(static_cast<size_t>(rows) * kRowBytes, 0));
    Send(std::move(request));
  }
  // Of all layers of `positions`, in `slices`.
  void Commit(const Attempt& attempt, int positions, int slices) {
    v1::LinkRequest request;
    v1::HandoffCommit* commit = request.mutable_commit();
    ToKey(attempt, commit->mutable_key());
    commit->set_slices(slices);
    commit->set_layers(world_->options.layers.count);
    commit->set_position_end(positions);
    commit->set_bytes(int64_t{world_->options.layers.count} * positions *
                      kRowBytes);
    Send(std::move(request));
  }
  const v1::LinkResponse& last() const { return heard.back(); }

  std::vector<v1::LinkResponse> heard;

 private:
  World* const world_;
  std::unique_ptr<SenderStream> stream_;
};

class Rules : public ::testing::Test {
 protected:
  // Attempt `n`, granted all of its positions.
  Attempt Granted(int n, int positions) {
    const Attempt attempt = MakeAttempt(n);
    sender.Offer(attempt,
                 world.receiver->IssueTicket(attempt, Ref("hand"), positions,
                                             absl::Seconds(60)),
                 positions);
    EXPECT_EQ(sender.last().answer().verdict(),
              v1::HandoffAnswer::VERDICT_GRANTED);
    return attempt;
  }
  v1::SliceCredit Credited(const Attempt& attempt, uint32_t slice,
                           const SliceRange& range) {
    sender.Announce(attempt, slice, range);
    EXPECT_TRUE(sender.last().has_credit());
    return sender.last().credit();
  }

  World world{{}};
  HandWritten sender{&world, Ref("hand")};
};

TEST_F(Rules, ASliceIsNoLargerThanItsSlab) {
  const Attempt attempt = Granted(1, 8);
  sender.Announce(attempt, 0, {0, 1, 0, 5});
  EXPECT_TRUE(sender.last().has_dead());
  EXPECT_EQ(world.receiver->counters().slices_refused, 1);
  EXPECT_EQ(world.receiver->slabs().free, world.receiver->slabs().total);
}

// Their blocks have no room for it.
TEST(WindowRules, ASliceOfWhatNoWindowSeesIsRefused) {
  Setting setting;
  setting.shape.windows = {false, true, true, false};
  World world(setting);
  world.decode.windowed_begin = 8;
  for (const auto& [n, range, taken] :
       std::vector<std::tuple<int, SliceRange, bool>>{
           {1, {0, 1, 0, 4}, true},
           {2, {1, 2, 8, 12}, true},
           {3, {0, 4, 8, 9}, true},
           {4, {1, 2, 7, 9}, false},
           {5, {0, 2, 7, 8}, false},
           {6, {2, 4, 0, 1}, false}}) {
    HandWritten sender(&world, Ref("hand"));
    const Attempt attempt = MakeAttempt(n);
    sender.Offer(attempt,
                 world.receiver->IssueTicket(attempt, Ref("hand"), 16,
                                             absl::Seconds(60)),
                 16);
    ASSERT_EQ(sender.last().answer().windowed_begin(), 8);
    sender.Announce(attempt, 0, range);
    EXPECT_EQ(sender.last().has_credit(), taken) << n;
    EXPECT_EQ(world.decode.seen[static_cast<uint32_t>(n)].failed, !taken) << n;
  }
}

TEST_F(Rules, NoSliceComesAfterItsCommit) {
  const Attempt attempt = Granted(1, 8);
  Credited(attempt, 0, {0, 1, 0, 4});
  sender.Commit(attempt, 8, 8);
  EXPECT_EQ(world.decode.seen[1].failed, 0);
  sender.Announce(attempt, 1, {0, 1, 4, 8});
  EXPECT_EQ(world.receiver->counters().slices_refused, 1);
  EXPECT_EQ(world.decode.seen[1].failed, 1);
}

TEST_F(Rules, ASliceOfAnotherGenerationOfItsSlabDoesNotLand) {
  const Attempt attempt = Granted(1, 8);
  const v1::SliceCredit credit = Credited(attempt, 0, {0, 1, 0, 4});
  sender.Fill(attempt, credit, credit.generation() - 1, 4);
  EXPECT_EQ(world.receiver->counters().late_messages, 1);
  EXPECT_EQ(world.decode.scatters, 0);
  sender.Fill(attempt, credit, credit.generation(), 4);
  EXPECT_EQ(world.decode.scatters, 1);
}

TEST_F(Rules, ACreditThatIsUsedCannotBeGivenBack) {
  world.decode.scattering.hold = true;
  const Attempt attempt = Granted(1, 8);
  const v1::SliceCredit credit = Credited(attempt, 0, {0, 1, 0, 4});
  sender.Fill(attempt, credit, credit.generation(), 4);
  v1::LinkRequest request;
  request.mutable_credit_return()->set_slab(credit.slab());
  request.mutable_credit_return()->set_generation(credit.generation());
  sender.Send(std::move(request));
  // Its scatter still reads the slab.
  EXPECT_EQ(world.receiver->slabs().in_flight, 1);
  EXPECT_EQ(world.decode.seen[1].failed, 0);
  world.decode.scattering.Release();
  EXPECT_EQ(world.receiver->slabs().in_flight, 0);
}

TEST_F(Rules, AnAttemptIsCommittedOnItsOwnLinkAlone) {
  const Attempt attempt = Granted(1, 8);
  HandWritten other(&world, Ref("other"));
  other.Commit(attempt, 7, 0);
  EXPECT_EQ(other.last().ack().code(),
            static_cast<int>(absl::StatusCode::kAborted));
  EXPECT_EQ(world.decode.seen[1].failed, 0);
  EXPECT_EQ(world.receiver->tickets(), 1);
}

// It may have heard the other's incarnation.
TEST_F(Rules, ATicketIsOfTheWorkerThatItNames) {
  v1::WorkerRef thief = Ref("hand");
  thief.set_worker_id("thief");
  HandWritten other(&world, thief);
  const Attempt attempt = MakeAttempt(1);
  other.Offer(
      attempt,
      world.receiver->IssueTicket(attempt, Ref("hand"), 8, absl::Seconds(60)),
      8);
  EXPECT_EQ(other.last().answer().verdict(),
            v1::HandoffAnswer::VERDICT_REFUSED);
  EXPECT_FALSE(world.decode.seen.contains(1));
}

TEST_F(Rules, AManifestOfFewerRowsThanWereGrantedIsRefused) {
  const Attempt attempt = Granted(1, 8);
  const v1::SliceCredit credit = Credited(attempt, 0, {0, 1, 0, 4});
  sender.Fill(attempt, credit, credit.generation(), 4);
  sender.Commit(attempt, 8, 1);
  EXPECT_EQ(sender.last().ack().code(),
            static_cast<int>(absl::StatusCode::kDataLoss));
  EXPECT_THAT(sender.last().ack().message(),
              HasSubstr("1 slices with 4 (layer, position) rows"));
}

TEST_F(Rules, AnnouncementsThatWaitForASlabAreBounded) {
  const Attempt attempt = Granted(1, 300);
  // Four are credited, 64 for each slab may wait.
  for (int p = 0; p < 4 + 4 * 64; ++p) {
    sender.Announce(attempt, static_cast<uint32_t>(p), {0, 1, p, p + 1});
  }
  EXPECT_EQ(world.receiver->links(), 1);
  sender.Announce(attempt, 260, {0, 1, 260, 261});
  EXPECT_EQ(world.receiver->links(), 0);
  EXPECT_EQ(world.decode.seen[1].status.code(), absl::StatusCode::kUnavailable);
}

TEST_F(Rules, OutcomesOfEndedAttemptsAreKeptForTheLastFewThousand) {
  constexpr int kKept = 4096;
  for (int n = 1; n <= kKept + 1; ++n) {
    world.receiver->IssueTicket(MakeAttempt(n), Ref("hand"), 8,
                                absl::Seconds(60));
    world.receiver->EndAttempt(MakeAttempt(n),
                               absl::ResourceExhaustedError("no room"));
  }
  sender.Commit(MakeAttempt(1), 8, 0);
  EXPECT_EQ(sender.last().ack().code(),
            static_cast<int>(absl::StatusCode::kAborted));
  sender.Commit(MakeAttempt(2), 8, 0);
  EXPECT_EQ(sender.last().ack().code(),
            static_cast<int>(absl::StatusCode::kResourceExhausted));
}

// A way of memory is for one host; workers that do not know theirs share none.
class NamedShm final : public ReceiverWay {
 public:
  std::string_view name() const override { return "shm"; }
  absl::StatusOr<std::unique_ptr<ReceiverChannel>> NewChannel(
      const v1::LinkHello&, int, int64_t, v1::LinkWelcome*) override {
    ADD_FAILURE() << "asked for";
    return absl::UnavailableError("no");
  }
};

TEST(HandoffRules, WorkersOfUnknownHostsShareNoMemory) {
  Setting setting;
  setting.way = "shm";
  World world(setting);
  world.options.host_id = "";
  world.Restart();
  world.receiver->AddWay(std::make_unique<NamedShm>());
  world.prefill().on_dial = [](Pair* pair) {
    pair->requests.filter = [](int, v1::LinkRequest* message) {
      if (message->has_hello()) message->mutable_hello()->clear_host_id();
      return 1;
    };
  };
  world.Run(1, 8);
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.prefill().side.seen[1].acknowledged, 1);
  EXPECT_EQ(world.prefill().side.seen[1].timings.way, "grpc");
}

// ---- A way that breaks on a link that lives on.

TEST(HandoffWays, WhoDoesNotNeedABrokenWayAnyMoreGoesOn) {
  for (const bool at_sender : {true, false}) {
    SCOPED_TRACE(at_sender);
    Setting setting;
    setting.way = "direct";
    World world(setting);
    world.decode.digesting.hold = true;
    world.Run(1, 8);  // committed, and all of it has landed
    world.loop.RunFor(absl::Milliseconds(10));
    const Attempt half = world.Offer(2, 8);
    world.sender().Computed(half, {0, 2, 0, 8});
    const Attempt other = world.Offer(3, 8, nullptr, {"direct"});
    world.sender().Computed(other, {0, 2, 0, 8});
    world.loop.RunFor(absl::Milliseconds(10));
    (at_sender ? world.host.sender : world.host.receiver)
        ->OnBroken(absl::UnavailableError("a broken way"));
    world.loop.RunFor(absl::Milliseconds(10));
    EXPECT_EQ(world.prefill().side.seen[2].failed, 1);
    EXPECT_EQ(world.decode.seen[2].failed, 1);
    world.decode.digesting.Release();
    world.sender().Computed(other, {2, 4, 0, 8});
    world.sender().Commit(other, {});
    world.loop.RunFor(absl::Seconds(1));
    for (const int n : {1, 3}) {
      EXPECT_EQ(world.decode.seen[n].committed, 1) << n;
      EXPECT_EQ(world.prefill().side.seen[n].acknowledged, 1) << n;
    }
    EXPECT_EQ(world.receiver->links(), 1);
    world.ExpectBaseline();
  }
}

// ---- What one attempt leaves to the next ones of its pair.

TEST(HandoffTurns, AnAttemptThatEndsLeavesItsTurnToTheOthers) {
  for (const bool cancel : {true, false}) {
    World world({});
    world.prefill().side.gathering.hold = true;
    world.Run(1, 64);  // all that may be announced
    world.loop.RunFor(absl::Milliseconds(10));
    world.Run(2, 64);
    world.loop.RunFor(absl::Milliseconds(10));
    if (cancel) {
      world.prefill().side.seen[1].cancelled = true;
      world.sender().Cancel(MakeAttempt(1));
    } else {
      world.decode.seen[1].ended = true;
      world.receiver->EndAttempt(MakeAttempt(1), absl::OkStatus());
    }
    world.loop.RunFor(absl::Milliseconds(10));
    world.prefill().side.gathering.Release();
    world.loop.RunFor(absl::Seconds(1));
    EXPECT_EQ(world.prefill().side.seen[2].acknowledged, 1) << cancel;
    world.ExpectBaseline();
  }
}

TEST(HandoffTurns, CreditsThatWaitForStagingGoBackAtOnce) {
  Setting setting;
  setting.staging_bytes = setting.slab_bytes;
  World world(setting);
  world.prefill().side.gathering.hold = true;
  const Attempt attempt = world.Run(1, 64);
  world.loop.RunFor(absl::Milliseconds(10));
  ASSERT_EQ(world.receiver->slabs().granted, 4);
  world.prefill().side.seen[1].cancelled = true;
  world.sender().Cancel(attempt);
  world.loop.RunFor(absl::Milliseconds(10));
  // Nothing failed: the prefill worker's own call says why.
  EXPECT_EQ(world.decode.seen[1].status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(world.receiver->slabs().quarantined, 1);  // the one that gathers
  world.prefill().side.gathering.Release();
  world.loop.RunFor(absl::Milliseconds(10));
  world.ExpectBaseline();
}

TEST(HandoffTurns, LostLinksKeepNoSlabsBack) {
  Setting setting;
  setting.num_slabs = 6;
  World world(setting);
  for (int n = 1; n <= 6; ++n) {
    world.Run(n, 8);
    world.loop.RunFor(absl::Seconds(1));
    world.prefill().pair->Cut();
    world.loop.RunFor(absl::Seconds(1));
  }
  world.prefill().side.gathering.hold = true;
  world.Run(7, 64);
  world.loop.RunFor(absl::Milliseconds(100));
  EXPECT_EQ(world.receiver->slabs().granted, 4);
  world.prefill().side.gathering.Release();
}

TEST(HandoffTurns, APauseBetweenChunksIsNoTransferHoweverLong) {
  World world({});
  const Attempt attempt = world.Offer(1, 16);
  world.sender().Computed(attempt, {0, 4, 0, 8});
  world.loop.RunFor(absl::Seconds(40));  // a transfer's budget is 10 s
  world.sender().Computed(attempt, {0, 4, 8, 16});
  world.sender().Commit(attempt, {});
  world.loop.RunFor(absl::Seconds(1));
  EXPECT_EQ(world.decode.seen[1].committed, 1);
  world.ExpectBaseline();
}

}  // namespace
}  // namespace tandem::handoff::testing
