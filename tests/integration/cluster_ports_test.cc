// SPDX-License-Identifier: Apache-2.0
// The ports between routers and workers: how many connections they take, and
// what becomes of a worker whose port is taken.

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/lifecycle.h"
#include "common/rpc/listener.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/http/socket.h"
#include "tests/integration/cluster.h"
#include "tests/integration/shell.h"

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

// Loading one may take minutes.
TEST(ClusterPortsTest, ATakenPortOfAWorkerIsToldBeforeTheModelIsLookedAt) {
  const auto other = rpc::Listener::Bind("127.0.0.1:0", {}, "");
  ASSERT_TRUE(other.ok()) << other.status();
  for (const char* const worker : {"tandem-prefill", "tandem-decode"}) {
    const Result result =
        Shell(absl::StrCat(Cluster::BinaryPath(worker),
                           " /no/such/model --router 127.0.0.1:1 --grpc-port ",
                           (*other)->port(), " 2>&1"));
    EXPECT_EQ(result.code, 1);
    EXPECT_THAT(result.output,
                ::testing::HasSubstr(absl::StrCat(
                    "cannot listen on 127.0.0.1:", (*other)->port(),
                    ": Address already in use: end what listens there, or take "
                    "another --grpc-port")));
  }
}

}  // namespace
}  // namespace tandem::integration
