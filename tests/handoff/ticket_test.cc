// SPDX-License-Identifier: Apache-2.0
#include "handoff/ticket.h"

#include <string>

#include "common/random.h"
#include "gtest/gtest.h"
#include "tests/handoff/workers.h"

namespace tandem::handoff {
namespace {

const absl::Time kNow = absl::FromUnixSeconds(1000);
const std::string kKey(32, 'k');

Ticket MakeTicket() {
  Ticket ticket;
  ticket.attempt = testing::MakeAttempt(7);
  ticket.attempt.sequence_index = 3;
  ticket.sender_id = "prefill-0";
  ticket.sender_incarnation = std::string(16, '\x01');
  ticket.receiver_incarnation = std::string(16, '\xff');
  ticket.fingerprint = std::string(32, 'f');
  ticket.max_positions = 4096;
  ticket.expires = kNow + absl::Milliseconds(1);
  return ticket;
}

TEST(Ticket, OpensToWhatWasSealed) {
  const absl::StatusOr<Ticket> opened =
      OpenTicket(SealTicket(MakeTicket(), kKey), kKey, kNow);
  ASSERT_TRUE(opened.ok());
  const Ticket sealed = MakeTicket();
  EXPECT_EQ(opened->attempt, sealed.attempt);
  EXPECT_EQ(opened->sender_id, sealed.sender_id);
  EXPECT_EQ(opened->sender_incarnation, sealed.sender_incarnation);
  EXPECT_EQ(opened->receiver_incarnation, sealed.receiver_incarnation);
  EXPECT_EQ(opened->fingerprint, sealed.fingerprint);
  EXPECT_EQ(opened->max_positions, sealed.max_positions);
  EXPECT_EQ(opened->expires, sealed.expires);
}

TEST(Ticket, AnyFlippedBitIsRefusedWithOneMessage) {
  const std::string good = SealTicket(MakeTicket(), kKey);
  int accepted = 0;
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::string bad = good;
    bad[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    const absl::StatusOr<Ticket> opened = OpenTicket(bad, kKey, kNow);
    accepted += opened.ok() ? 1 : 0;
    EXPECT_EQ(opened.status(),
              absl::PermissionDeniedError("handoff ticket is not valid"));
  }
  EXPECT_EQ(accepted, 0);
  RecordProperty("bits", static_cast<int>(good.size() * 8));
}

TEST(Ticket, AnyTruncationAndExtensionIsRefused) {
  const std::string good = SealTicket(MakeTicket(), kKey);
  RecordProperty("cut", static_cast<int>(2 * good.size()));
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(OpenTicket(good.substr(0, size), kKey, kNow).ok()) << size;
    EXPECT_FALSE(OpenTicket(good.substr(good.size() - size), kKey, kNow).ok());
  }
  EXPECT_FALSE(OpenTicket(good + '\0', kKey, kNow).ok());
  EXPECT_FALSE(OpenTicket(good + good, kKey, kNow).ok());
}

TEST(Ticket, LivesUntilItsExpiryAndNotAMillisecondLonger) {
  const std::string good = SealTicket(MakeTicket(), kKey);
  EXPECT_TRUE(OpenTicket(good, kKey, kNow).ok());
  EXPECT_TRUE(OpenTicket(good, kKey, kNow + absl::Microseconds(999)).ok());
  EXPECT_FALSE(OpenTicket(good, kKey, kNow + absl::Milliseconds(1)).ok());
  EXPECT_FALSE(OpenTicket(good, kKey, kNow + absl::Milliseconds(2)).ok());
}

TEST(Ticket, OtherKeysAndSwappedFieldsAreRefused) {
  const std::string good = SealTicket(MakeTicket(), kKey);
  EXPECT_FALSE(OpenTicket(good, std::string(32, 'j'), kNow).ok());
  EXPECT_FALSE(OpenTicket(good, "", kNow).ok());
  // The same MAC over another record.
  Ticket swapped = MakeTicket();
  std::swap(swapped.sender_incarnation, swapped.receiver_incarnation);
  std::string forged = SealTicket(swapped, kKey);
  forged.replace(forged.size() - 32, 32, good.substr(good.size() - 32));
  EXPECT_FALSE(OpenTicket(forged, kKey, kNow).ok());
}

TEST(Ticket, RandomBytesAreNeverAccepted) {
  constexpr int kTickets = 10'000;
  SeededRandom random(5);
  const int size = static_cast<int>(SealTicket(MakeTicket(), kKey).size());
  int accepted = 0;
  for (int i = 0; i < kTickets; ++i) {
    const int n = i % 2 == 0 ? size : static_cast<int>(random.Below(300));
    accepted += OpenTicket(random.Bytes(n), kKey, kNow).ok() ? 1 : 0;
  }
  EXPECT_EQ(accepted, 0);
  RecordProperty("random", kTickets);
}

}  // namespace
}  // namespace tandem::handoff
