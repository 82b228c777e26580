// SPDX-License-Identifier: Apache-2.0
// How many connections the ports between routers and workers take.

#include <memory>
#include <string>
#include <vector>

#include "common/lifecycle.h"
#include "common/rpc/listener.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/http/socket.h"
#include "tests/integration/cluster.h"

namespace tandem::integration {
namespace {

// What clients and servers of HTTP/2 say first.
const std::string kPreface =
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + std::string("\0\0\0\4\0\0\0\0\0", 9);
const std::string kSettings("\4\0\0\0\0\0", 6);

TEST(ClusterPortsTest, ItsOwnPortsTakeConnectionsOfOneAddressToTheLimit) {
  RaiseDescriptorLimit();
  Cluster cluster(ClusterOptions{});
  const absl::Status status = cluster.Start();
  ASSERT_TRUE(status.ok()) << status;
  for (const int port :
       {cluster.internal_port(), cluster.worker_port("prefill-0"),
        cluster.worker_port("decode-0")}) {
    std::vector<std::unique_ptr<Socket>> silent;
    for (int i = 0; i < rpc::kClusterConnections.per_peer; ++i) {
      silent.push_back(std::make_unique<Socket>(port));
      ASSERT_TRUE(silent.back()->connected()) << i;
    }
    Socket beyond(port);
    beyond.Send(kPreface);
    EXPECT_EQ(beyond.Receive(), "");
    Socket other(port, "127.0.0.2");
    other.Send(kPreface);
    EXPECT_THAT(other.Receive(kSettings), ::testing::HasSubstr(kSettings));
  }
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

}  // namespace
}  // namespace tandem::integration
