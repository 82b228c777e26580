// SPDX-License-Identifier: Apache-2.0
// The ports that `tandem serve` chooses.

#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cli/serve.h"
#include "common/rpc/listener.h"
#include "tests/integration/cluster.h"
#include "tests/integration/serve_process.h"

namespace tandem::integration {
namespace {

int FirstEphemeralPort() {
  int first = 0;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> first;
  return first;
}

// What stands behind `flag` in a process's command line; 0: it is not there.
int PortOf(pid_t pid, const std::string& flag) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/cmdline"));
  std::string word;
  int port = 0;
  while (std::getline(file, word, '\0') && word != flag) {
  }
  if (std::getline(file, word, '\0')) (void)absl::SimpleAtoi(word, &port);
  return port;
}

std::unique_ptr<rpc::Listener> Take(int port) {
  auto taken = rpc::Listener::Bind(absl::StrCat("127.0.0.1:", port), {}, "");
  return taken.ok() ? *std::move(taken) : nullptr;
}

TEST(CliTest, OwnPortsAreFreeDifferAndAreBelowTheEphemeralOnes) {
  std::set<int> before;
  std::vector<std::unique_ptr<rpc::Listener>> taken;
  for (int i = 0; i < 20; ++i) {
    const absl::StatusOr<int> port = cli::OwnPort(&before);
    ASSERT_TRUE(port.ok()) << port.status();
    EXPECT_LT(*port, FirstEphemeralPort());
    EXPECT_EQ(before.size(), static_cast<size_t>(i + 1)) << *port;
    taken.push_back(Take(*port));
    ASSERT_NE(taken.back(), nullptr) << *port;
  }
  // Who knows nothing of those is given none of them.
  std::set<int> ours;
  for (int i = 0; i < 20; ++i) {
    const absl::StatusOr<int> port = cli::OwnPort(&ours);
    ASSERT_TRUE(port.ok()) << port.status();
    EXPECT_FALSE(before.contains(*port)) << *port;
  }
}

TEST(CliTest, ServeTakesSuchPortsWhereItChoosesThem) {
  constexpr int kAdminPort = 50053;
  const auto other = Take(kAdminPort);  // null: a cluster is there already
  ServeProcess served(EmbeddedModel(), "--prefill 0", /*admin=*/false);
  ASSERT_TRUE(served.WaitUntilReady()) << served.Log();
  std::set<int> ports;
  for (const pid_t child : served.Children()) {
    for (const char* const flag :
         {"--grpc-port", "--port", "--internal-port", "--admin-port"}) {
      // A worker has those that the system gives.
      const int port = PortOf(child, flag);
      if (port == 0) continue;
      EXPECT_LT(port, FirstEphemeralPort()) << flag;
      EXPECT_TRUE(ports.insert(port).second) << flag << " " << port;
    }
  }
  EXPECT_EQ(ports.size(), 4u);
  EXPECT_EQ(served.Stop(SIGTERM), 143);
}

}  // namespace
}  // namespace tandem::integration
