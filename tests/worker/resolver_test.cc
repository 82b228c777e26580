// SPDX-License-Identifier: Apache-2.0
#include "worker/resolver.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "common/thread_loop.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem::worker {
namespace {

using ::testing::ElementsAre;

TEST(Resolver, ANameThatIsGoneKeepsOnlyItsOwnAddresses) {
  // What each name comes to, round after round.
  const std::map<std::string, std::vector<std::vector<std::string>>> answers = {
      {"gone", {{"10.0.1.1:1"}, {}, {}, {}}},
      {"moves", {{"10.0.0.1:1"}, {"10.0.0.2:1"}, {}, {"10.0.0.3:1"}}}};
  Mutex mutex;
  CondVar changed;
  std::vector<std::string> heard;
  std::map<std::string, size_t> rounds;  // of the resolver's thread
  ThreadLoop loop("test");
  {
    Resolver resolver(
        {{"gone", 1}, {"moves", 1}}, absl::Milliseconds(1), &loop,
        [&](const std::map<std::string, std::string>& routers) {
          std::string line;
          for (const auto& [address, name] : routers) {
            line += name + "=" + address + " ";
          }
          MutexLock lock(&mutex);
          heard.push_back(line);
          changed.NotifyAll();
        },
        [&](const Endpoint& name) {
          const auto& rows = answers.at(name.host);
          return rows[std::min(rounds[name.host]++, rows.size() - 1)];
        });
    MutexLock lock(&mutex);
    while (heard.size() < 3) {
      ASSERT_TRUE(changed.WaitFor(&mutex, std::chrono::seconds(30)));
    }
  }
  MutexLock lock(&mutex);
  EXPECT_THAT(heard, ElementsAre("moves=10.0.0.1:1 gone=10.0.1.1:1 ",
                                 "moves=10.0.0.2:1 gone=10.0.1.1:1 ",
                                 "moves=10.0.0.3:1 gone=10.0.1.1:1 "));
}

TEST(Resolver, AnAddressIsItsOwn) {
  EXPECT_THAT(ResolveAddresses({"127.0.0.1", 5}), ElementsAre("127.0.0.1:5"));
}

}  // namespace
}  // namespace tandem::worker
