// SPDX-License-Identifier: Apache-2.0

#include "worker/channels.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace tandem::worker {
namespace {

v1::WorkerRef Worker(int port, const std::string& incarnation) {
  v1::WorkerRef worker;
  worker.set_worker_id(absl::StrCat("decode-", port));
  worker.set_endpoint(absl::StrCat("127.0.0.1:", port));
  worker.set_incarnation(incarnation);
  return worker;
}

TEST(Channels, AWorkersCallsShareOneChannel) {
  Channels channels{rpc::Credentials()};
  const auto first = channels.Get(rpc::PeerRole::kDecode, Worker(1, "a"));
  EXPECT_EQ(channels.Get(rpc::PeerRole::kDecode, Worker(1, "a")), first);
  EXPECT_NE(channels.Get(rpc::PeerRole::kDecode, Worker(2, "a")), first);
}

// The old one may be backing off from the crash.
TEST(Channels, ANewIncarnationGetsANewOne) {
  Channels channels{rpc::Credentials()};
  const auto before = channels.Get(rpc::PeerRole::kDecode, Worker(1, "a"));
  const auto after = channels.Get(rpc::PeerRole::kDecode, Worker(1, "b"));
  EXPECT_NE(after, before);
  EXPECT_EQ(channels.Get(rpc::PeerRole::kDecode, Worker(1, "b")), after);
  EXPECT_NE(channels.Get(rpc::PeerRole::kDecode, Worker(1, "a")), before);
}

TEST(Channels, BeyondTheLimitTheLongestUnusedGoes) {
  Channels channels{rpc::Credentials(), /*limit=*/2};
  const auto one = channels.Get(rpc::PeerRole::kDecode, Worker(1, "a"));
  const auto two = channels.Get(rpc::PeerRole::kDecode, Worker(2, "a"));
  EXPECT_EQ(channels.Get(rpc::PeerRole::kDecode, Worker(1, "a")),
            one);  // used again
  channels.Get(rpc::PeerRole::kDecode, Worker(3, "a"));
  EXPECT_EQ(channels.Get(rpc::PeerRole::kDecode, Worker(1, "a")), one);
  EXPECT_NE(channels.Get(rpc::PeerRole::kDecode, Worker(2, "a")), two);
}

TEST(Channels, NewCredentialsAreOfChannelsFromThenOn) {
  Channels channels{rpc::Credentials()};
  const auto before = channels.Get(rpc::PeerRole::kDecode, Worker(1, "a"));
  channels.Replace(rpc::Credentials());
  const auto after = channels.Get(rpc::PeerRole::kDecode, Worker(1, "a"));
  EXPECT_NE(after, before);
  EXPECT_EQ(channels.Get(rpc::PeerRole::kDecode, Worker(1, "a")), after);
}

}  // namespace
}  // namespace tandem::worker
