// SPDX-License-Identifier: Apache-2.0
// What goes wrong on real connections, and that streams end exactly once,
// whoever closes first and wherever.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/rpc/echo.h"

namespace tandem::rpc {
namespace {

// A TCP listener on loopback that accepts and never answers.
class BlackHole {
 public:
  BlackHole() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address));
    listen(fd_, 64);
    socklen_t size = sizeof(address);
    getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
  }
  ~BlackHole() { close(fd_); }
  int fd() const { return fd_; }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  const int fd_;
  int port_ = 0;
};

// Passes bytes between one client and `port`, until it is cut.
class Wire {
 public:
  explicit Wire(int port) : port_(port), thread_([this] { Run(); }) {}
  ~Wire() {
    Cut();
    thread_.join();
  }
  std::string address() const { return listener_.address(); }
  void Cut() { cut_ = true; }

 private:
  void Run() {
    pollfd waiting{listener_.fd(), POLLIN, 0};
    while (!cut_ && poll(&waiting, 1, 10) == 0) {
    }
    if (cut_) return;
    const int client = accept(listener_.fd(), nullptr, nullptr);
    const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port_));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connect(server, reinterpret_cast<sockaddr*>(&address), sizeof(address));
    std::vector<char> buffer(64 << 10);
    while (!cut_) {
      pollfd fds[] = {{client, POLLIN, 0}, {server, POLLIN, 0}};
      if (poll(fds, 2, 10) <= 0) continue;
      bool open = true;
      for (int i = 0; i < 2; ++i) {
        if (fds[i].revents == 0) continue;
        const ssize_t n = recv(fds[i].fd, buffer.data(), buffer.size(), 0);
        if (n <= 0) open = false;
        for (ssize_t sent = 0; sent < n;) {
          const ssize_t m = send(fds[1 - i].fd, buffer.data() + sent,
                                 static_cast<size_t>(n - sent), MSG_NOSIGNAL);
          if (m <= 0) break;
          sent += m;
        }
      }
      if (!open) break;
    }
    close(client);
    close(server);
  }

  BlackHole listener_;
  const int port_;
  std::atomic<bool> cut_ = false;
  std::thread thread_;
};

int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// One server whose calls are recorders that `prepare` sets up.
class Host {
 public:
  explicit Host(std::function<void(ServerRecorder*)> prepare)
      : service_(&loop_, [this, prepare](auto stream, CallInfo) {
          auto recorder = std::make_unique<ServerRecorder>();
          ServerRecorder* r = recorder.get();
          r->stream = std::move(stream);
          prepare(r);
          {
            MutexLock lock(&mutex_);
            calls_.push_back(std::move(recorder));
          }
          if (r->stream != nullptr) r->stream->Start(r);
        }) {
    auto server = Server::Start({}, {&service_});
    if (!server.ok()) std::abort();
    server_ = *std::move(server);
  }
  ~Host() {
    DropStreams();
    server_->Shutdown(absl::Seconds(20));
    loop_.Stop();
  }

  void DropStreams() {
    loop_.RunSync([&] {
      MutexLock lock(&mutex_);
      for (auto& call : calls_) call->stream.reset();
    });
  }
  ServerRecorder* call(size_t i) {
    MutexLock lock(&mutex_);
    return i < calls_.size() ? calls_[i].get() : nullptr;
  }
  size_t calls() {
    MutexLock lock(&mutex_);
    return calls_.size();
  }
  ThreadLoop& loop() { return loop_; }
  Server& server() { return *server_; }

 private:
  ThreadLoop loop_{"host"};
  Mutex mutex_;
  std::vector<std::unique_ptr<ServerRecorder>> calls_ ABSL_GUARDED_BY(mutex_);
  EchoServer service_;
  std::unique_ptr<Server> server_;
};

void Echo(ServerRecorder* server) {
  server->on_message = [](ServerRecorder* r, const EchoRequest& request) {
    r->stream->Send(Response(request.number()));
  };
}

TEST(RpcFaultTest, CancelReachesTheLeafOfAChainOfThree) {
  Host leaf(Echo);
  ThreadLoop client_loop("client");
  auto to_leaf = MakeChannel(leaf.server().address(), {});
  // Each hop passes requests on and answers back, on its own loop, and drops
  // its call when its caller is gone.
  struct Hop {
    std::vector<std::unique_ptr<ClientRecorder>> onward;
  };
  const auto forward = [](Host** host, Hop* hop,
                          std::shared_ptr<grpc::Channel> channel) {
    return [=](ServerRecorder* server) {
      hop->onward.push_back(std::make_unique<ClientRecorder>());
      ClientRecorder* next = hop->onward.back().get();
      next->stream = OpenChat(&(*host)->loop(), channel);
      next->stream->Start(next);
      next->on_message = [server](ClientRecorder*, const EchoResponse& m) {
        server->stream->Send(m);
      };
      server->on_message = [next](ServerRecorder*, const EchoRequest& m) {
        next->stream->Send(m);
      };
      server->on_closed = [next](ServerRecorder*) { next->stream.reset(); };
    };
  };
  Host* middle_host = nullptr;
  Host* front_host = nullptr;
  Hop middle_hop, front_hop;
  Host middle(forward(&middle_host, &middle_hop, to_leaf));
  middle_host = &middle;
  auto to_middle = MakeChannel(middle.server().address(), {});
  Host front(forward(&front_host, &front_hop, to_middle));
  front_host = &front;

  auto to_front = MakeChannel(front.server().address(), {});
  ClientRecorder client;
  client_loop.RunSync([&] {
    client.stream = OpenChat(&client_loop, to_front);
    client.stream->Start(&client);
    client.stream->Send(Request(7));
  });
  ASSERT_TRUE(Eventually([&] { return client.numbers().size() == 1; }));
  EXPECT_EQ(leaf.call(0)->closed(), 0);
  client_loop.RunSync([&] { client.stream.reset(); });
  EXPECT_TRUE(Eventually([&] { return leaf.call(0)->closed() == 1; }));
  EXPECT_EQ(leaf.call(0)->status().code(), absl::StatusCode::kCancelled);
  client_loop.Stop();
}

TEST(RpcFaultTest, ACutConnectionIsHeardAtBothEnds) {
  Host host(Echo);
  ThreadLoop loop("client");
  auto wire = std::make_unique<Wire>(host.server().port());
  auto channel = MakeChannel(wire->address(), {});
  ClientRecorder client;
  loop.RunSync([&] {
    client.stream = OpenChat(&loop, channel, absl::InfiniteDuration());
    client.stream->Start(&client);
    client.stream->Send(Request(1));
  });
  ASSERT_TRUE(Eventually([&] { return client.numbers().size() == 1; }));
  wire->Cut();
  ASSERT_TRUE(Eventually([&] { return client.closed() == 1; }));
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Eventually([&] { return host.call(0)->closed() == 1; }));
  loop.RunSync([&] { client.stream.reset(); });
}

TEST(RpcFaultTest, APeerThatNeverAnswersEndsByTheDeadline) {
  BlackHole hole;
  ThreadLoop loop("client");
  auto channel = MakeChannel(hole.address(), {});
  ClientRecorder client;
  loop.RunSync([&] {
    client.stream = OpenChat(&loop, channel, absl::Milliseconds(200));
    client.stream->Start(&client);
    client.stream->Send(Request(1));
  });
  ASSERT_TRUE(Eventually([&] { return client.closed() == 1; }));
  EXPECT_EQ(client.status().code(), absl::StatusCode::kDeadlineExceeded);
  loop.RunSync([&] { client.stream.reset(); });
}

TEST(RpcFaultTest, ClientsMayGoWhileTheyConnect) {
  BlackHole hole;
  ThreadLoop loop("client");
  std::vector<std::unique_ptr<ClientRecorder>> clients;
  for (int i = 0; i < 20; ++i) {
    auto channel = MakeChannel(hole.address(), {});
    clients.push_back(std::make_unique<ClientRecorder>());
    ClientRecorder* client = clients.back().get();
    loop.RunSync([&] {
      client->stream = OpenChat(&loop, channel, absl::InfiniteDuration());
      if (i % 4 != 0) client->stream->Start(client);
      if (i % 4 >= 2) client->stream->Send(Request(1));
      channel.reset();
    });
    if (i % 4 == 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    loop.RunSync([&] { client->stream.reset(); });
  }
  loop.Stop();
  for (const auto& client : clients) EXPECT_EQ(client->closed(), 0);
}

TEST(RpcFaultTest, StreamAndChannelMayGoInsideTheLastCallback) {
  Host host([](ServerRecorder* server) {
    server->on_message = [](ServerRecorder* r, const EchoRequest&) {
      r->stream->Close(absl::AbortedError("enough"));
    };
  });
  ThreadLoop loop("client");
  for (int i = 0; i < 20; ++i) {
    auto channel = MakeChannel(host.server().address(), {});
    ClientRecorder client;
    client.on_closed = [&](ClientRecorder* r) {
      r->stream.reset();
      channel.reset();
    };
    loop.RunSync([&] {
      client.stream = OpenChat(&loop, channel);
      client.stream->Start(&client);
      client.stream->Send(Request(1));
    });
    ASSERT_TRUE(Eventually([&] { return client.closed() == 1; }));
    loop.RunSync([&] { EXPECT_EQ(channel, nullptr); });
    EXPECT_EQ(client.status().code(), absl::StatusCode::kAborted);
  }
}

TEST(RpcFaultTest, ShutdownEndsStreamsThatNobodyCloses) {
  auto host = std::make_unique<Host>(Echo);
  ThreadLoop loop("client");
  auto channel = MakeChannel(host->server().address(), {});
  std::vector<std::unique_ptr<ClientRecorder>> clients;
  for (int i = 0; i < 10; ++i) {
    clients.push_back(std::make_unique<ClientRecorder>());
    loop.RunSync([&] {
      clients.back()->stream = OpenChat(&loop, channel);
      clients.back()->stream->Start(clients.back().get());
      clients.back()->stream->Send(Request(i));
    });
  }
  for (auto& client : clients) {
    ASSERT_TRUE(Eventually([&] { return client->numbers().size() == 1; }));
  }
  host->server().Shutdown(absl::Milliseconds(50));
  for (size_t i = 0; i < clients.size(); ++i) {
    EXPECT_TRUE(Eventually([&] { return clients[i]->closed() == 1; }));
    EXPECT_FALSE(clients[i]->status().ok());
    EXPECT_TRUE(Eventually([&] { return host->call(i)->closed() == 1; }));
  }
  loop.RunSync([&] {
    for (auto& client : clients) client->stream.reset();
  });
  host.reset();
}

TEST(RpcFaultTest, CallsThatComeWhenTheLoopHasStoppedEnd) {
  Host host(Echo);
  host.loop().Stop();
  ThreadLoop loop("client");
  auto channel = MakeChannel(host.server().address(), {});
  ClientRecorder client;
  loop.RunSync([&] {
    client.stream = OpenChat(&loop, channel);
    client.stream->Start(&client);
    client.stream->Send(Request(1));
  });
  ASSERT_TRUE(Eventually([&] { return client.closed() == 1; }));
  EXPECT_EQ(client.status().code(), absl::StatusCode::kCancelled);
  loop.RunSync([&] { client.stream.reset(); });
}

TEST(RpcFaultTest, AClosedCallDoesNotWaitForAReaderThatStopped) {
  Host host([](ServerRecorder* server) {
    server->on_message = [](ServerRecorder* r, const EchoRequest&) {
      for (int i = 0; i < 400; ++i) r->stream->Send(Response(i, 64 << 10));
      r->stream->Close(absl::ResourceExhaustedError("reader too slow"));
      r->stream.reset();
    };
  });
  ThreadLoop loop("client");
  auto channel = MakeChannel(host.server().address(), {});
  ClientRecorder client;
  loop.RunSync([&] {
    client.stream = OpenChat(&loop, channel, absl::InfiniteDuration());
    client.stream->Start(&client);
    client.stream->Send(Request(1));
    client.stream->PauseReading(true);
  });
  ASSERT_TRUE(Eventually([&] { return host.calls() == 1; }));
  // It goes by itself, after the linger, though the client holds on.
  const auto start = std::chrono::steady_clock::now();
  host.server().Shutdown(absl::Minutes(2));
  EXPECT_LT(std::chrono::steady_clock::now() - start,
            absl::ToChronoSeconds(absl::Minutes(1)));
  loop.RunSync([&] { client.stream.reset(); });
}

TEST(RpcFaultTest, AWriterThatLooksAtUnsentKeepsMemoryBounded) {
  constexpr int kMessages = 4000;  // of 64 KiB: 250 MiB in all
  std::atomic<int> sent = 0;
  Host host([&sent](ServerRecorder* server) {
    const auto fill = [&sent](ServerRecorder* r) {
      while (sent < kMessages && r->stream->unsent() < 4) {
        r->stream->Send(Response(sent++, 64 << 10));
      }
    };
    server->on_message = [fill](ServerRecorder* r, const EchoRequest&) {
      fill(r);
    };
    server->on_drained = fill;
  });
  ThreadLoop loop("client");
  auto channel = MakeChannel(host.server().address(), {});
  ClientRecorder client;
  const int64_t before = ResidentBytes();
  loop.RunSync([&] {
    client.stream = OpenChat(&loop, channel, absl::InfiniteDuration());
    client.stream->Start(&client);
    client.stream->Send(Request(1));
    client.stream->PauseReading(true);
  });
  // Until nothing moves any more: flow control has stopped the writer.
  int seen = -1;
  while (seen != sent) {
    seen = sent;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  EXPECT_LT(sent, kMessages / 2);
  EXPECT_LT(ResidentBytes() - before, int64_t{64} << 20);
  loop.RunSync([&] { client.stream->PauseReading(false); });
  EXPECT_TRUE(Eventually([&] { return client.numbers().size() == kMessages; }));
  loop.RunSync([&] { client.stream.reset(); });
}

// Both sides do anything at any time, from inside and outside callbacks. What
// must hold: nobody hears anything after the end, messages arrive as a prefix
// of what was sent, every call ends, and the server can then shut down without
// having to cancel anything.
TEST(RpcFaultTest, RandomClosesNeverConfuseAStream) {
  SeededRandom server_random(1);
  Host host([&server_random](ServerRecorder* server) {
    server->on_message = [&server_random](ServerRecorder* r,
                                          const EchoRequest& request) {
      if (r->stream == nullptr) return;
      const int count = static_cast<int>(server_random.Below(3));
      for (int i = 0; i < count; ++i) {
        r->stream->Send(Response(request.number(), server_random.Below(3000)));
      }
      switch (server_random.Below(12)) {
        case 0:
          r->stream->Close(absl::OkStatus());
          break;
        case 1:
          r->stream->Close(absl::InternalError("random"));
          r->stream.reset();
          break;
        case 2:
          r->stream.reset();
          break;
        case 3:
          r->stream->PauseReading(true);
          r->stream->PauseReading(false);
          break;
      }
    };
  });
  ThreadLoop loop("client");
  auto channel = MakeChannel(host.server().address(), {});
  SeededRandom random(2);
  std::vector<std::unique_ptr<ClientRecorder>> clients;
  constexpr int kCalls = 600;
  for (int i = 0; i < kCalls; ++i) {
    clients.push_back(std::make_unique<ClientRecorder>());
    ClientRecorder* client = clients.back().get();
    client->on_message = [&random](ClientRecorder* r, const EchoResponse&) {
      if (r->stream == nullptr) return;
      r->stream->Send(Request(static_cast<int64_t>(r->numbers().size()),
                              random.Below(3000)));
      if (random.Below(15) == 0) r->stream.reset();
    };
    client->on_closed = [](ClientRecorder* r) { r->stream.reset(); };
    loop.RunSync([&] {
      client->stream =
          OpenChat(&loop, channel,
                   random.Below(5) == 0 ? absl::Milliseconds(random.Below(20))
                                        : absl::Seconds(100));
      client->stream->Start(client);
      const int count = static_cast<int>(random.Below(4));
      for (int m = 0; m < count; ++m) client->stream->Send(Request(0, 100));
      if (random.Below(6) == 0) client->stream->Close(absl::OkStatus());
      if (random.Below(20) == 0) client->stream.reset();
    });
    if (i % 8 == 0) {
      loop.RunSync(
          [&] { clients[random.Below(clients.size())]->stream.reset(); });
    }
  }
  // Those that neither side ended so far.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  loop.RunSync([&] {
    for (auto& client : clients) client->stream.reset();
  });
  host.DropStreams();
  const auto start = std::chrono::steady_clock::now();
  host.server().Shutdown(absl::Minutes(5));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(1));
  for (const auto& client : clients) {
    EXPECT_LE(client->closed(), 1);
    EXPECT_FALSE(client->late());
  }
  EXPECT_GT(host.calls(), kCalls / 3u);
  for (size_t i = 0; i < host.calls(); ++i) {
    EXPECT_LE(host.call(i)->closed(), 1);
    EXPECT_FALSE(host.call(i)->late());
  }
}

}  // namespace
}  // namespace tandem::rpc
