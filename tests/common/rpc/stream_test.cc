// SPDX-License-Identifier: Apache-2.0
// Streams over real gRPC on loopback: what stream.h promises, call by call.
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/rpc/echo.h"

namespace tandem::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class StreamTest : public ::testing::Test {
 protected:
  // Each call the server gets becomes a recorder, kept until the end.
  void StartServer(std::function<void(ServerRecorder*)> prepare = {}) {
    EchoAccept accept = [this, prepare](auto stream, CallInfo info) {
      auto recorder = std::make_unique<ServerRecorder>();
      ServerRecorder* r = recorder.get();
      r->stream = std::move(stream);
      if (prepare) prepare(r);
      info_ = std::move(info);
      {
        MutexLock lock(&mutex_);
        calls_.push_back(std::move(recorder));
      }
      if (r->stream != nullptr) r->stream->Start(r);
    };
    service_ = std::make_unique<EchoServer>(&server_loop_, std::move(accept));
    auto server = Server::Start({}, {service_.get()});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = MakeChannel(server_->address(), {});
  }

  ServerRecorder* call(size_t i) {
    MutexLock lock(&mutex_);
    return i < calls_.size() ? calls_[i].get() : nullptr;
  }

  std::unique_ptr<ClientRecorder> Chat(
      absl::Duration timeout = absl::Seconds(60)) {
    auto client = std::make_unique<ClientRecorder>();
    client_loop_.RunSync([&] {
      client->stream = OpenChat(&client_loop_, channel_, timeout);
      client->stream->Start(client.get());
    });
    return client;
  }

  void OnClient(absl::FunctionRef<void()> task) { client_loop_.RunSync(task); }
  void OnServer(absl::FunctionRef<void()> task) { server_loop_.RunSync(task); }

  void TearDown() override {
    OnServer([&] {
      MutexLock lock(&mutex_);
      for (auto& call : calls_) call->stream.reset();
    });
    if (server_ != nullptr) server_->Shutdown(absl::Seconds(10));
    server_loop_.Stop();
    client_loop_.Stop();
  }

  static void Echo(ServerRecorder* server) {
    server->on_message = [](ServerRecorder* r, const EchoRequest& request) {
      r->stream->Send(Response(request.number()));
    };
  }

  ThreadLoop server_loop_{"server"};
  ThreadLoop client_loop_{"client"};
  CallInfo info_;
  Mutex mutex_;
  std::vector<std::unique_ptr<ServerRecorder>> calls_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<EchoServer> service_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(StreamTest, MessagesArriveInOrderBothWaysAndQueuesDrain) {
  StartServer(Echo);
  auto client = Chat();
  std::vector<int64_t> expected;
  for (int i = 0; i < 500; ++i) expected.push_back(i);
  OnClient([&] {
    for (int i = 0; i < 500; ++i) client->stream->Send(Request(i));
    EXPECT_GT(client->stream->unsent(), 0u);
  });
  ASSERT_TRUE(Eventually([&] { return client->numbers().size() == 500; }));
  EXPECT_EQ(client->numbers(), expected);
  EXPECT_EQ(call(0)->numbers(), expected);
  EXPECT_TRUE(Eventually([&] { return client->drained() > 0; }));
  OnClient([&] {
    EXPECT_EQ(client->stream->unsent(), 0u);
    client->stream.reset();
  });
  EXPECT_TRUE(Eventually([&] { return call(0)->closed() == 1; }));
  EXPECT_EQ(call(0)->status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(client->closed(), 0);
}

TEST_F(StreamTest, CloseEndsTheCallAfterWhatIsQueued) {
  StartServer([](ServerRecorder* server) {
    server->on_message = [](ServerRecorder* r, const EchoRequest&) {
      for (int i = 0; i < 100; ++i) r->stream->Send(Response(i));
      r->stream->Close(absl::OkStatus());
      r->stream->Send(Response(1000));  // dropped
      r->stream.reset();                // inside its own callback
    };
  });
  auto client = Chat();
  OnClient([&] { client->stream->Send(Request(1)); });
  ASSERT_TRUE(Eventually([&] { return client->closed() == 1; }));
  EXPECT_EQ(client->numbers().size(), 100u);
  EXPECT_EQ(client->numbers().back(), 99);
  EXPECT_TRUE(client->status().ok()) << client->status();
  EXPECT_EQ(call(0)->closed(), 0);
  OnClient([&] { client->stream.reset(); });
  EXPECT_FALSE(client->late());
}

TEST_F(StreamTest, ErrorsCarryReasonMetadataAndRetryTime) {
  StartServer([](ServerRecorder* server) {
    server->stream->Close(MakeError(
        absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
        "8 wait, the limit is 8", {{"limit", "8"}}, absl::Milliseconds(1500)));
    server->stream.reset();  // never started: refused
  });
  auto client = Chat();
  OnClient([&] { client->stream->Send(Request(1)); });
  ASSERT_TRUE(Eventually([&] { return client->closed() == 1; }));
  const absl::Status status = client->status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "8 wait, the limit is 8");
  EXPECT_EQ(ErrorReason(status), "QUEUE_FULL");
  EXPECT_EQ(ErrorDomain(status), "tandem");
  EXPECT_EQ(ErrorMetadata(status).at("limit"), "8");
  EXPECT_EQ(RetryAfter(status), absl::Milliseconds(1500));
  OnClient([&] { client->stream.reset(); });
}

TEST_F(StreamTest, WhoHasRetriedIsPushedBackLonger) {
  StartServer([](ServerRecorder* server) {
    server->stream->Close(MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                                    "draining", {}, absl::Milliseconds(100)));
    server->stream.reset();
  });
  const auto stub = EchoService::NewStub(channel_);
  const struct {
    const char* attempts;
    const char* milliseconds;
  } cases[] = {{"0", "100"},  {"1", "200"},  {"3", "800"},
               {"4", "1600"}, {"9", "1600"}, {"1000", "1600"}};
  for (const auto& c : cases) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::seconds(60));
    context.AddMetadata("grpc-previous-rpc-attempts", c.attempts);
    EchoResponse response;
    EXPECT_EQ(stub->Once(&context, Request(1), &response).error_code(),
              grpc::StatusCode::UNAVAILABLE);
    const auto& trailers = context.GetServerTrailingMetadata();
    const auto pushback = trailers.find("grpc-retry-pushback-ms");
    ASSERT_TRUE(pushback != trailers.end());
    EXPECT_EQ(std::string(pushback->second.data(), pushback->second.size()),
              c.milliseconds)
        << c.attempts;
  }
}

TEST_F(StreamTest, AServerStreamHandleThatIsDroppedCancels) {
  StartServer([](ServerRecorder* server) {
    server->on_message = [](ServerRecorder* r, const EchoRequest&) {
      r->stream.reset();
    };
  });
  auto client = Chat();
  OnClient([&] { client->stream->Send(Request(1)); });
  ASSERT_TRUE(Eventually([&] { return client->closed() == 1; }));
  EXPECT_EQ(client->status().code(), absl::StatusCode::kCancelled);
  OnClient([&] { client->stream.reset(); });
}

TEST_F(StreamTest, HandlersMayDestroyTheStreamInEachCallback) {
  StartServer(Echo);
  auto in_message = Chat();
  in_message->on_message = [](ClientRecorder* r, const EchoResponse&) {
    r->stream.reset();
  };
  auto in_drained = Chat();
  in_drained->on_drained = [](ClientRecorder* r) { r->stream.reset(); };
  auto in_closed = Chat(absl::Milliseconds(50));
  in_closed->on_closed = [](ClientRecorder* r) { r->stream.reset(); };
  OnClient([&] {
    for (auto* client : {in_message.get(), in_drained.get(), in_closed.get()}) {
      for (int i = 0; i < 3; ++i) client->stream->Send(Request(i));
    }
  });
  EXPECT_TRUE(Eventually([&] { return in_message->numbers().size() == 1; }));
  EXPECT_TRUE(Eventually([&] { return in_drained->drained() == 1; }));
  EXPECT_TRUE(Eventually([&] { return in_closed->closed() == 1; }));
  EXPECT_EQ(in_closed->status().code(), absl::StatusCode::kDeadlineExceeded);
  OnClient([&] {
    EXPECT_EQ(in_message->stream, nullptr);
    EXPECT_EQ(in_drained->stream, nullptr);
    EXPECT_EQ(in_closed->stream, nullptr);
  });
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(Eventually([&] { return call(i)->closed() == 1; }));
  }
  EXPECT_EQ(in_message->numbers().size(), 1u);
  EXPECT_EQ(in_message->closed() + in_drained->closed(), 0);
}

TEST_F(StreamTest, DeadlinesReachBothEnds) {
  StartServer();
  auto client = Chat(absl::Milliseconds(200));
  OnClient([&] { client->stream->Send(Request(1)); });
  ASSERT_TRUE(Eventually([&] { return client->closed() == 1; }));
  EXPECT_EQ(client->status().code(), absl::StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(Eventually([&] { return call(0)->closed() == 1; }));
  OnServer([&] {
    EXPECT_GT(info_.time_left, absl::ZeroDuration());
    // gRPC rounds timeouts up on the wire.
    EXPECT_LT(info_.time_left, absl::Seconds(1));
  });
  OnClient([&] { client->stream.reset(); });
}

TEST_F(StreamTest, AnUnlimitedCallHasNoDeadline) {
  StartServer(Echo);
  auto client = Chat(absl::InfiniteDuration());
  OnClient([&] { client->stream->Send(Request(1)); });
  ASSERT_TRUE(Eventually([&] { return client->numbers().size() == 1; }));
  OnServer([&] { EXPECT_EQ(info_.time_left, absl::InfiniteDuration()); });
  OnClient([&] { client->stream.reset(); });
}

TEST_F(StreamTest, PausedReadingDeliversNothingUntilResumed) {
  StartServer(Echo);
  auto client = Chat();
  client->on_message = [](ClientRecorder* r, const EchoResponse&) {
    if (r->numbers().size() == 2) r->stream->PauseReading(true);
  };
  OnClient([&] {
    for (int i = 0; i < 5; ++i) client->stream->Send(Request(i));
  });
  ASSERT_TRUE(
      Eventually([&] { return call(0) && call(0)->numbers().size() == 5; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_THAT(client->numbers(), ElementsAre(0, 1));
  OnClient([&] { client->stream->PauseReading(false); });
  ASSERT_TRUE(Eventually([&] { return client->numbers().size() == 5; }));
  EXPECT_THAT(client->numbers(), ElementsAre(0, 1, 2, 3, 4));
  OnClient([&] { client->stream.reset(); });
}

TEST_F(StreamTest, AGoodEndWaitsForPausedMessagesACancelDoesNot) {
  StartServer([](ServerRecorder* server) {
    server->on_message = [](ServerRecorder* r, const EchoRequest& request) {
      if (request.number() == 0) return;  // this one is left open
      r->stream->Send(Response(1));
      r->stream->Close(absl::OkStatus());
    };
  });
  auto good = Chat();
  OnClient([&] {
    good->stream->Send(Request(1));
    good->stream->PauseReading(true);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(good->closed(), 0);
  OnClient([&] { good->stream->PauseReading(false); });
  ASSERT_TRUE(Eventually([&] { return good->closed() == 1; }));
  EXPECT_THAT(good->numbers(), ElementsAre(1));

  // A paused server hears of a client that went away.
  auto client = Chat();
  OnClient([&] { client->stream->Send(Request(0)); });
  ASSERT_TRUE(
      Eventually([&] { return call(1) && !call(1)->numbers().empty(); }));
  OnServer([&] { call(1)->stream->PauseReading(true); });
  OnClient([&] {
    client->stream->Send(Request(0));
    client->stream.reset();
  });
  ASSERT_TRUE(Eventually([&] { return call(1)->closed() == 1; }));
  EXPECT_EQ(call(1)->numbers().size(), 1u);
  OnClient([&] { good->stream.reset(); });
}

// A message may cross the server's end of the call.
TEST_F(StreamTest, AWriteThatFailsLosesNothingThatTheServerSaid) {
  StartServer([](ServerRecorder* server) {
    server->on_message = [](ServerRecorder* r, const EchoRequest&) {
      for (int i = 0; i < 5; ++i) r->stream->Send(Response(i));
      r->stream->Close(absl::OkStatus());
    };
  });
  auto client = Chat();
  OnClient([&] {
    client->stream->Send(Request(1));
    client->stream->PauseReading(true);
  });
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    OnClient([&] { client->stream->Send(Request(2)); });
  }
  OnClient([&] { client->stream->PauseReading(false); });
  ASSERT_TRUE(Eventually([&] { return client->closed() == 1; }));
  EXPECT_THAT(client->numbers(), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_TRUE(client->status().ok()) << client->status();
  OnClient([&] { client->stream.reset(); });
}

TEST_F(StreamTest, AReaderThatStopsMakesUnsentGrowAndLaterDrains) {
  constexpr int kMessages = 400;
  constexpr size_t kBytes = 64 << 10;  // 25 MiB in all: more than any window
  StartServer([](ServerRecorder* server) {
    server->on_message = [](ServerRecorder* r, const EchoRequest&) {
      for (int i = 0; i < kMessages; ++i) r->stream->Send(Response(i, kBytes));
    };
  });
  auto client = Chat();
  OnClient([&] {
    client->stream->Send(Request(1));
    client->stream->PauseReading(true);
  });
  ASSERT_TRUE(
      Eventually([&] { return call(0) && call(0)->numbers().size() == 1; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  size_t unsent = 0;
  OnServer([&] { unsent = call(0)->stream->unsent(); });
  EXPECT_GT(unsent, kMessages / 2u);
  EXPECT_EQ(call(0)->drained(), 0);
  OnClient([&] { client->stream->PauseReading(false); });
  ASSERT_TRUE(
      Eventually([&] { return client->numbers().size() == kMessages; }));
  EXPECT_TRUE(Eventually([&] { return call(0)->drained() == 1; }));
  OnClient([&] { client->stream.reset(); });
}

TEST_F(StreamTest, ACallWhoseClientNeverSendsDoesNotExistOnTheWire) {
  StartServer(Echo);
  auto silent = Chat();
  auto unstarted = std::make_unique<ClientRecorder>();
  OnClient([&] { unstarted->stream = OpenChat(&client_loop_, channel_); });
  auto speaking = Chat();
  OnClient([&] { speaking->stream->Send(Request(1)); });
  ASSERT_TRUE(Eventually([&] { return speaking->numbers().size() == 1; }));
  EXPECT_EQ(call(1), nullptr);
  OnClient([&] {
    silent->stream.reset();
    unstarted->stream.reset();
    speaking->stream.reset();
  });
}

TEST_F(StreamTest, AnUnreachablePeerIsUnavailable) {
  channel_ = MakeChannel("127.0.0.1:1", {});
  auto client = Chat();
  OnClient([&] { client->stream->Send(Request(1)); });
  ASSERT_TRUE(Eventually([&] { return client->closed() == 1; }));
  EXPECT_EQ(client->status().code(), absl::StatusCode::kUnavailable);
  OnClient([&] { client->stream.reset(); });
}

TEST_F(StreamTest, ServerStreamingDeliversTheRequestThenStreams) {
  StartServer([](ServerRecorder* server) {
    server->on_message = [](ServerRecorder* r, const EchoRequest& request) {
      for (int i = 0; i < request.number(); ++i) r->stream->Send(Response(i));
      r->stream->Close(absl::OkStatus());
    };
  });
  ClientRecorder client, never_sent;
  OnClient([&] {
    for (ClientRecorder* r : {&client, &never_sent}) {
      r->stream = OpenServerStream<EchoRequest, EchoResponse>(
          &client_loop_,
          {.timeout = absl::Seconds(60),
           .peer = "",
           .metadata = {{"x-request-id", "r1"}}},
          [stub = EchoService::NewStub(channel_)](auto* context, auto* request,
                                                  auto* reactor) {
            stub->async()->Count(context, request, reactor);
          });
      r->stream->Start(r);
    }
    client.stream->Send(Request(3));
    never_sent.stream.reset();
  });
  ASSERT_TRUE(Eventually([&] { return client.closed() == 1; }));
  EXPECT_THAT(client.numbers(), ElementsAre(0, 1, 2));
  EXPECT_TRUE(client.status().ok()) << client.status();
  OnServer([&] { EXPECT_EQ(info_.Find("x-request-id"), "r1"); });
  OnClient([&] { client.stream.reset(); });
}

TEST_F(StreamTest, UnaryDeliversOneMessageOrAnError) {
  StartServer([](ServerRecorder* server) {
    server->on_message = [](ServerRecorder* r, const EchoRequest& request) {
      if (request.number() < 0) {
        r->stream->Close(absl::InvalidArgumentError("number: below 0"));
        return;
      }
      r->stream->Send(Response(request.number() * 2));
      r->stream->Close(absl::OkStatus());
    };
  });
  ClientRecorder good, bad;
  OnClient([&] {
    for (ClientRecorder* r : {&good, &bad}) {
      r->stream = OpenUnary<EchoRequest, EchoResponse>(
          &client_loop_, {.timeout = absl::Seconds(60), .peer = ""},
          [stub = EchoService::NewStub(channel_)](auto* context, auto* request,
                                                  auto* response, auto done) {
            stub->async()->Once(context, request, response, std::move(done));
          });
      r->stream->Start(r);
      r->stream->Send(Request(r == &good ? 21 : -1));
    }
  });
  ASSERT_TRUE(Eventually([&] { return good.closed() + bad.closed() == 2; }));
  EXPECT_THAT(good.numbers(), ElementsAre(42));
  EXPECT_TRUE(good.status().ok());
  EXPECT_THAT(bad.numbers(), IsEmpty());
  EXPECT_EQ(bad.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(bad.status().message(), "number: below 0");
  OnClient([&] {
    good.stream.reset();
    bad.stream.reset();
  });
}

// Clients with retries repeat what is UNAVAILABLE, but not after its headers.
TEST_F(StreamTest, AUnaryCallThatHasBegunIsNotRepeated) {
  StartServer([](ServerRecorder* server) {
    server->on_message = [](ServerRecorder* r, const EchoRequest& request) {
      if (request.number() > 0) r->stream->Send(Response(1));
      r->stream->Close(absl::UnavailableError("a worker was lost"));
    };
  });
  const auto stub = EchoService::NewStub(RetryingChannel(server_->address()));
  const auto once = [&](int64_t number) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::seconds(60));
    EchoResponse response;
    return stub->Once(&context, Request(number), &response).error_code();
  };
  const auto calls = [&] {
    MutexLock lock(&mutex_);
    return calls_.size();
  };
  EXPECT_EQ(once(1), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(calls(), 1u);
  EXPECT_EQ(once(0), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(calls(), 4u);
}

}  // namespace
}  // namespace tandem::rpc
