// SPDX-License-Identifier: Apache-2.0
// Small messages of a link that go together: how many there are, that each is
// handled as if it had come alone, and that none is kept back for ever.

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/testing/virtual_loop.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "handoff/link.h"
#include "tests/handoff/world.h"

namespace tandem::handoff::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int kBatchPositions = 64;
constexpr int kBatchSlices = 64;  // of four rows each

struct MessageCounts {
  int requests = 0;
  int responses = 0;
};

// Messages written for one handoff between ends of which one speaks at most
// `protocol`.
MessageCounts MessagesOf(const std::string& way, uint32_t protocol,
                         absl::Duration work) {
  Setting setting;
  setting.way = way;
  setting.work = work;
  setting.slabs_per_peer = 8;
  World world(setting);
  world.prefill().on_dial = [protocol](Pair* pair) {
    pair->requests.filter = [protocol](int index, v1::LinkRequest* message) {
      if (index == 0) message->mutable_hello()->set_protocol_max(protocol);
      return 1;
    };
  };
  const Attempt attempt = world.Run(1, kBatchPositions);
  world.loop.RunFor(absl::Milliseconds(900));  // before the first beat
  EXPECT_EQ(world.prefill().side.seen[1].acknowledged, 1);
  EXPECT_EQ(world.receiver->counters().ways.at(way).slices, kBatchSlices);
  EXPECT_TRUE(world.SameKv(attempt, kBatchPositions));
  world.ExpectBaseline();
  const Pair& pair = *world.prefill().pair;
  return {pair.requests.written, pair.responses.written};
}

// Hello, offer and commit; welcome, grant and acknowledgement.
constexpr int kOtherMessages = 3;
// Two for each of eight slabs at first, then by eights.
constexpr int kAnnouncements = 1 + (kBatchSlices - 16) / 8;

TEST(HandoffBatches, SharedSlabsTakeTwoAndAHalfMessagesForFour) {
  const MessageCounts counts = MessagesOf("direct", 2, absl::Milliseconds(1));
  EXPECT_EQ(counts.requests,
            kOtherMessages + kAnnouncements + kBatchSlices / 4);
  // The first eight credits answer one batch of announcements; then by fours.
  EXPECT_EQ(counts.responses, kOtherMessages + 1 + (kBatchSlices - 8) / 4);
}

TEST(HandoffBatches, APeerOfTheFirstProtocolGetsNone) {
  const MessageCounts counts = MessagesOf("direct", 1, absl::Milliseconds(1));
  EXPECT_EQ(counts.requests, kOtherMessages + 2 * kBatchSlices);
  EXPECT_EQ(counts.responses, kOtherMessages + kBatchSlices);
}

TEST(HandoffBatches, BytesAndCreditsOfOtherWaysDoNotWait) {
  const MessageCounts counts = MessagesOf("grpc", 2, absl::Milliseconds(1));
  EXPECT_EQ(counts.requests, kOtherMessages + kAnnouncements + kBatchSlices);
  EXPECT_GE(counts.responses, kOtherMessages + 1 + kBatchSlices - 8);
}

// A slice waits only for gathers that run, a credit for scatters that do.
TEST(HandoffBatches, NothingWaitsForWorkThatIsNotUnderWay) {
  Setting setting;
  setting.way = "direct";
  setting.slabs_per_peer = 8;
  World world(setting);
  world.Offer(1, 8);
  const Attempt attempt = MakeAttempt(1);
  world.sender().Computed(attempt, {0, 1, 0, 4});
  world.loop.RunFor(absl::Milliseconds(10));
  EXPECT_EQ(world.decode.scatters, 1);

  world.prefill().side.gathering.hold = true;
  world.sender().Computed(attempt, {1, 3, 0, 4});
  world.loop.RunFor(absl::Milliseconds(10));
  ASSERT_EQ(world.prefill().side.gathering.held.size(), 2u);
  auto held = std::move(world.prefill().side.gathering.held);
  held[0]();
  world.loop.RunFor(absl::Milliseconds(10));
  EXPECT_EQ(world.decode.scatters, 1) << "waits for the other";
  EXPECT_TRUE(world.sender().CheckInvariants().ok());
  held[1]();
  world.loop.RunFor(absl::Milliseconds(10));
  EXPECT_EQ(world.decode.scatters, 3);
}

// Its gather ends after the attempt did: what waited for it goes all the same.
TEST(HandoffBatches, WhatWaitsForACancelledSliceIsNotKept) {
  Setting setting;
  setting.way = "direct";
  setting.slabs_per_peer = 8;
  World world(setting);
  world.prefill().side.gathering.hold = true;
  world.Offer(1, 4);
  world.Offer(2, 4);
  world.sender().Computed(MakeAttempt(1), {0, 1, 0, 4});
  world.sender().Computed(MakeAttempt(2), {0, 1, 0, 4});
  world.loop.RunFor(absl::Milliseconds(10));
  auto held = std::move(world.prefill().side.gathering.held);
  ASSERT_EQ(held.size(), 2u);
  held[0]();
  world.prefill().side.seen[2].cancelled = true;
  world.sender().Cancel(MakeAttempt(2));
  held[1]();
  world.loop.RunFor(absl::Milliseconds(10));
  EXPECT_EQ(world.decode.scatters, 1);
  EXPECT_TRUE(world.sender().CheckInvariants().ok());
}

// ---- The link itself.

using Base = LinkBase<v1::LinkRequest, v1::LinkResponse>;

struct BatchOwner final : Base::Owner {
  void OnLinkMessage(Base* link, v1::LinkResponse message) override {
    heard.push_back(message.has_credit()
                        ? absl::StrCat("credit ", message.credit().slice())
                        : absl::StrCat("case ", message.message_case()));
    if (heard.size() == end_after) link->End(absl::CancelledError("enough"));
  }
  void OnLinkHandled(Base*) override { heard.push_back("handled"); }
  void OnLinkDrained(Base*) override {}
  void OnLinkTick(Base*) override {}
  void OnLinkBroken(Base*, absl::Status) override {}

  std::vector<std::string> heard;
  size_t end_after = 0;
};

struct BatchEars final : StreamHandler<v1::LinkRequest> {
  void OnMessage(v1::LinkRequest message) override {
    std::string text;
    if (message.has_slice()) text = absl::StrCat(message.slice().slice());
    for (const v1::LinkRequest& one : message.batch()) {
      absl::StrAppend(&text, text.empty() ? "" : "+", one.slice().slice());
    }
    heard.push_back(text);
  }
  void OnClosed(absl::Status) override {}

  std::vector<std::string> heard;
};

class BatchLink : public ::testing::Test {
 protected:
  BatchLink()
      : pair_(std::make_shared<Pair>(&loop_, &loop_)),
        server_(pair_->Server()),
        link_(&owner_, &loop_, absl::Seconds(60), absl::Seconds(60),
              pair_->Client()) {
    server_->Start(&ears_);
    link_.Start();
  }
  ~BatchLink() override { link_.End(absl::CancelledError("over")); }

  static v1::LinkRequest Slice(uint32_t number) {
    v1::LinkRequest message;
    message.mutable_slice()->set_slice(number);
    return message;
  }
  static v1::LinkResponse Credit(uint32_t number) {
    v1::LinkResponse message;
    message.mutable_credit()->set_slice(number);
    return message;
  }
  void Run() { loop_.RunFor(absl::Milliseconds(1)); }

  VirtualLoop loop_;
  std::shared_ptr<Pair> pair_;
  BatchOwner owner_;
  BatchEars ears_;
  std::unique_ptr<ReceiverStream> server_;
  Base link_;
};

TEST_F(BatchLink, WhatIsHeldGoesInOrderAndBeforeWhatIsSent) {
  link_.set_batches(true);
  for (uint32_t i = 0; i < 3; ++i) link_.Hold(Slice(i));
  Run();
  EXPECT_THAT(ears_.heard, IsEmpty());
  EXPECT_EQ(link_.held(), 3u);
  EXPECT_EQ(link_.sent(), 0u);
  link_.Send(Slice(3));
  link_.Hold(Slice(4));
  link_.Flush();
  link_.Flush();
  Run();
  EXPECT_THAT(ears_.heard, ElementsAre("0+1+2", "3", "4"));
  EXPECT_EQ(link_.sent(), 3u);
  EXPECT_EQ(link_.held(), 0u);
}

TEST_F(BatchLink, WithoutBatchesEachGoesAlone) {
  link_.Hold(Slice(0));
  link_.Hold(Slice(1));
  link_.Flush();
  Run();
  EXPECT_THAT(ears_.heard, ElementsAre("0", "1"));
}

TEST_F(BatchLink, AnEndedLinkHoldsNothing) {
  link_.Hold(Slice(0));
  link_.End(absl::CancelledError("over"));
  EXPECT_EQ(link_.held(), 0u);
  link_.Hold(Slice(1));
  link_.Flush();
  EXPECT_EQ(link_.sent(), 0u);
}

TEST_F(BatchLink, ABatchIsHeardOneByOneAndBatchesWithinItAreNot) {
  v1::LinkResponse batch;
  *batch.add_batch() = Credit(1);
  *batch.add_batch()->add_batch() = Credit(2);
  *batch.add_batch() = Credit(3);
  server_->Send(batch);
  server_->Send(Credit(4));
  Run();
  EXPECT_THAT(owner_.heard, ElementsAre("credit 1", "case 0", "credit 3",
                                        "handled", "credit 4", "handled"));
}

TEST_F(BatchLink, NothingIsHeardAfterAnEndWithinABatch) {
  owner_.end_after = 2;
  v1::LinkResponse batch;
  for (uint32_t i = 1; i <= 4; ++i) *batch.add_batch() = Credit(i);
  server_->Send(batch);
  Run();
  EXPECT_THAT(owner_.heard, ElementsAre("credit 1", "credit 2"));
}

}  // namespace
}  // namespace tandem::handoff::testing
