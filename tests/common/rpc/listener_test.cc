// SPDX-License-Identifier: Apache-2.0
// The count of connections, under a server that ends them when the test says.
#include "common/rpc/listener.h"

#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "gtest/gtest.h"
#include "tests/common/http/socket.h"
#include "tests/common/rpc/echo.h"

namespace tandem::rpc {
namespace {

// The descriptors that a server was given, for as long as the test wants.
struct Given {
  Mutex mutex;
  std::vector<int> open ABSL_GUARDED_BY(mutex);
};

class Keeper final : public grpc::experimental::ExternalConnectionAcceptor {
 public:
  explicit Keeper(Given* given) : given_(given) {}
  void HandleNewConnection(NewConnectionParameters* taken) override {
    MutexLock lock(&given_->mutex);
    given_->open.push_back(taken->fd);
  }

 private:
  Given* const given_;
};

// gRPC shuts a connection some time after its client has reset it, and numbers
// of descriptors come back at once.
TEST(ListenerTest, WhatIsToldOfAForgottenConnectionIsNoneOfTheNextOnes) {
  constexpr int kEach = 30;
  Given given;
  auto listener = Listener::Bind("127.0.0.1:0", {}, "grpc-port");
  ASSERT_TRUE(listener.ok()) << listener.status();
  (*listener)->Start(std::make_unique<Keeper>(&given));
  std::vector<std::unique_ptr<Socket>> clients;
  const auto connect = [&](int count) {
    for (int i = 0; i < count; ++i) {
      clients.push_back(std::make_unique<Socket>((*listener)->port()));
    }
  };
  connect(kEach);
  ASSERT_TRUE(Eventually([&] { return (*listener)->open() == kEach; }));
  for (const auto& client : clients) {
    const linger at_once{1, 0};
    setsockopt(client->fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  }
  clients.clear();
  ASSERT_TRUE(Eventually([&] { return (*listener)->open() == 0; }));
  connect(kEach);
  ASSERT_TRUE(Eventually([&] { return (*listener)->open() == kEach; }));
  std::vector<int> reset;
  {
    MutexLock lock(&given.mutex);
    reset.assign(given.open.begin(), given.open.begin() + kEach);
  }
  for (const int fd : reset) shutdown(fd, SHUT_RDWR);
  connect(1);  // heard behind what was told of those
  EXPECT_TRUE(Eventually([&] { return (*listener)->open() == kEach + 1; }));
  (*listener)->Stop();
  MutexLock lock(&given.mutex);
  for (const int fd : given.open) close(fd);
}

}  // namespace
}  // namespace tandem::rpc
