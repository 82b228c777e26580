// SPDX-License-Identifier: Apache-2.0
// Servers, channels, credentials and the mapping of statuses.
#include "common/rpc/server.h"

#include <grpcpp/generic/generic_stub.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"
#include "tests/common/http/certificates.h"
#include "tests/common/http/socket.h"
#include "tests/common/rpc/echo.h"

namespace tandem::rpc {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(StatusTest, AllCodesAndDetailsSurviveBothWays) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code),
                              code == 0 ? "" : "message");
    EXPECT_EQ(FromGrpc(ToGrpc(status)), status);
  }
  absl::Status status =
      MakeError(absl::StatusCode::kInvalidArgument, "BAD_FIELD", "top_p is 2",
                {{"field", "top_p"}}, absl::Seconds(3));
  google::rpc::BadRequest violations;
  auto* violation = violations.add_field_violations();
  violation->set_field("top_p");
  violation->set_description("2 is above 1");
  status.SetPayload("type.googleapis.com/google.rpc.BadRequest",
                    absl::Cord(violations.SerializeAsString()));
  status.SetPayload("tandem.internal/note", absl::Cord("stays here"));
  const absl::Status back = FromGrpc(ToGrpc(status));
  status.ErasePayload("tandem.internal/note");
  EXPECT_EQ(back, status);
}

TEST(StatusTest, WithoutATextTheCodeIsTheMessage) {
  const absl::Status status =
      FromGrpc(grpc::Status(grpc::StatusCode::UNIMPLEMENTED, ""));
  EXPECT_EQ(status,
            absl::UnimplementedError("no reason given (UNIMPLEMENTED)"));
}

TEST(StatusTest, HandWrittenDetailsAreWhatProtobufReads) {
  const absl::Status status = MakeError(
      absl::StatusCode::kUnavailable, "DRAINING", "m", {{"a", "1"}, {"b", ""}},
      absl::Seconds(200) + absl::Nanoseconds(5));
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(info.ParseFromString(std::string(
      *status.GetPayload("type.googleapis.com/google.rpc.ErrorInfo"))));
  EXPECT_EQ(info.reason(), "DRAINING");
  EXPECT_EQ(info.domain(), "tandem");
  EXPECT_EQ(info.metadata().size(), 2u);
  EXPECT_EQ(info.metadata().at("a"), "1");
  google::rpc::RetryInfo retry;
  ASSERT_TRUE(retry.ParseFromString(std::string(
      *status.GetPayload("type.googleapis.com/google.rpc.RetryInfo"))));
  EXPECT_EQ(retry.retry_delay().seconds(), 200);
  EXPECT_EQ(retry.retry_delay().nanos(), 5);

  absl::Status theirs = absl::InternalError("m");
  google::rpc::ErrorInfo other;
  other.set_reason("QUOTA");
  other.set_domain("example.com");
  (*other.mutable_metadata())["k"] = "v";
  theirs.SetPayload("type.googleapis.com/google.rpc.ErrorInfo",
                    absl::Cord(other.SerializeAsString()));
  EXPECT_EQ(ErrorReason(theirs), "QUOTA");
  EXPECT_EQ(ErrorDomain(theirs), "example.com");
  EXPECT_EQ(ErrorMetadata(theirs).at("k"), "v");
}

TEST(StatusTest, WhatDoesNotFitAHeaderIsCut) {
  absl::Status status =
      MakeError(absl::StatusCode::kInternal, "R", std::string(100'000, 'm'));
  status.SetPayload("type.googleapis.com/google.rpc.DebugInfo",
                    absl::Cord(std::string(100'000, 'd')));
  const grpc::Status wire = ToGrpc(status);
  EXPECT_LE(wire.error_message().size() + wire.error_details().size(), 8000u);
  EXPECT_EQ(ErrorReason(FromGrpc(wire)), "R");
  // Garbage from a peer leaves code and message.
  const absl::Status back = FromGrpc(
      grpc::Status(grpc::StatusCode::NOT_FOUND, "gone", "\xff\xff\xff"));
  EXPECT_EQ(back, absl::NotFoundError("gone"));
}

class ServerTest : public ::testing::Test {
 protected:
  ServerTest()
      : service_(&loop_, [this](auto stream, CallInfo info) {
          info_ = std::move(info);
          recorder_.stream = std::move(stream);
          recorder_.on_message = [](ServerRecorder* r, const EchoRequest& m) {
            r->stream->Send(Response(m.number()));
            r->stream->Close(absl::OkStatus());
          };
          recorder_.stream->Start(&recorder_);
        }) {}
  ~ServerTest() override {
    loop_.RunSync([&] { recorder_.stream.reset(); });
    if (server_ != nullptr) server_->Shutdown(absl::Seconds(10));
    loop_.Stop();
  }

  void Start(const ServerOptions& options = {}) {
    auto server = Server::Start(options, {&service_});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  // How one Once call over `channel` ends; its answer is `request` again.
  absl::Status Call(const std::shared_ptr<grpc::Channel>& channel,
                    const EchoRequest& request,
                    absl::Duration timeout = absl::Seconds(20),
                    size_t metadata_bytes = 0) {
    ClientRecorder client;
    ThreadLoop loop("client");
    loop.RunSync([&] {
      client.stream = OpenUnary<EchoRequest, EchoResponse>(
          &loop,
          {.timeout = timeout,
           .peer = "",
           .metadata = {{"x-more", std::string(metadata_bytes, 'm')}}},
          [stub = EchoService::NewStub(channel)](auto* context, auto* out,
                                                 auto* in, auto done) {
            stub->async()->Once(context, out, in, std::move(done));
          });
      client.stream->Start(&client);
      client.stream->Send(request);
    });
    EXPECT_TRUE(Eventually([&] { return client.closed() == 1; }));
    loop.RunSync([&] { client.stream.reset(); });
    if (client.status().ok()) {
      EXPECT_THAT(client.numbers(), ElementsAre(request.number()));
    }
    return client.status();
  }

  // The first answer of a bidi or unary method, without its generated code.
  std::string Raw(const std::string& method, const std::string& request) {
    struct Handler final : StreamHandler<grpc::ByteBuffer> {
      void OnMessage(grpc::ByteBuffer message) override {
        std::vector<grpc::Slice> slices;
        (void)message.Dump(&slices);
        MutexLock lock(&mutex);
        for (const auto& slice : slices) {
          answer.append(reinterpret_cast<const char*>(slice.begin()),
                        slice.size());
        }
        done = true;
      }
      void OnClosed(absl::Status status) override {
        MutexLock lock(&mutex);
        if (!done) answer = status.ToString();
        done = true;
      }
      Mutex mutex;
      std::string answer;
      bool done = false;
    } handler;
    ThreadLoop loop("client");
    auto channel = MakeChannel(server_->address(), {});
    std::unique_ptr<Stream<grpc::ByteBuffer, grpc::ByteBuffer>> stream;
    loop.RunSync([&] {
      stream = OpenBidi<grpc::ByteBuffer, grpc::ByteBuffer>(
          &loop, {.timeout = absl::Seconds(20)},
          [&](auto* context, auto* reactor) {
            grpc::GenericStub(channel).PrepareBidiStreamingCall(context, method,
                                                                {}, reactor);
          });
      stream->Start(&handler);
      const grpc::Slice slice(request);
      stream->Send(grpc::ByteBuffer(&slice, 1));
    });
    EXPECT_TRUE(Eventually([&] {
      MutexLock lock(&handler.mutex);
      return handler.done;
    }));
    loop.RunSync([&] { stream.reset(); });
    MutexLock lock(&handler.mutex);
    return handler.answer;
  }

  ThreadLoop loop_{"server"};
  CallInfo info_;
  ServerRecorder recorder_;
  EchoServer service_;
  std::unique_ptr<Server> server_;
};

// gRPC's own takes some hundred bytes, whatever the limit: a few more or less,
// as the time is long that is left.
TEST_F(ServerTest, MetadataIsAcceptedToTheLimitAndNoFurther) {
  constexpr int kWaver = 8;
  std::vector<int> own;
  for (const int limit : {2 << 10, 4 << 10}) {
    ServerOptions options;
    options.max_metadata_bytes = limit;
    Start(options);
    const auto channel = MakeChannel(server_->address(), {});
    const auto code = [&](int bytes) {
      // gRPC may close a connection behind a call that it refused, in one of
      // 240 runs here, and then the next one on it is to be made again.
      absl::StatusCode ended = absl::StatusCode::kUnavailable;
      for (int i = 0; i < 5 && ended == absl::StatusCode::kUnavailable; ++i) {
        ended = Call(channel, Request(1), absl::Seconds(20),
                     static_cast<size_t>(bytes))
                    .code();
      }
      return ended;
    };
    int fits = 0, over = limit;
    ASSERT_EQ(code(fits), absl::StatusCode::kOk);
    while (over - fits > 1) {
      const int middle = (fits + over) / 2;
      const absl::StatusCode ended = code(middle);
      if (ended != absl::StatusCode::kOk) {
        ASSERT_EQ(ended, absl::StatusCode::kResourceExhausted);
      }
      (ended == absl::StatusCode::kOk ? fits : over) = middle;
    }
    EXPECT_EQ(code(over + kWaver), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(code(fits - kWaver), absl::StatusCode::kOk);
    own.push_back(limit - fits);
    loop_.RunSync([&] { recorder_.stream.reset(); });
  }
  EXPECT_NEAR(own[0], own[1], kWaver);
}

// Clients keep to it by themselves.
TEST_F(ServerTest, AConnectionIsToldHowManyCallsItMayHave) {
  ServerOptions options;
  options.max_concurrent_streams = 7;
  Start(options);
  Socket socket(server_->port());
  socket.Send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" +
              std::string("\0\0\0\4\0\0\0\0\0", 9));  // no settings
  const std::string most("\0\3\0\0\0\7", 6);
  EXPECT_THAT(socket.Receive(most), HasSubstr(most));
}

TEST_F(ServerTest, WhoSaysNothingIsCutWhenItsTimeForThatIsOver) {
  ServerOptions options;
  options.handshake_timeout = absl::Milliseconds(300);
  Start(options);
  const auto patient = Server::Start({}, {});
  ASSERT_TRUE(patient.ok()) << patient.status();
  Socket other((*patient)->port());
  Socket socket(server_->port());
  socket.Receive();  // to the end
  char bytes[1024];
  ssize_t got = 0;
  while ((got = recv(other.fd(), bytes, sizeof(bytes), MSG_DONTWAIT)) > 0) {
  }
  EXPECT_EQ(got, -1);
  EXPECT_EQ(errno, EAGAIN);
}

// What a server says first, to whom it takes.
const std::string kPreface =
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + std::string("\0\0\0\4\0\0\0\0\0", 9);
const std::string kSettings("\4\0\0\0\0\0", 6);

std::unique_ptr<Socket> Connect(int port, const std::string& from = "") {
  auto socket = std::make_unique<Socket>(port, from);
  socket->Send(kPreface);
  return socket;
}

bool IsTaken(Socket* socket) {
  return socket->Receive(kSettings).find(kSettings) != std::string::npos;
}

TEST_F(ServerTest, ConnectionsAreTakenToTheLimitAndNoFurther) {
  for (const auto& [all, peer] : {std::pair(3, 0), {4, 3}}) {
    ServerOptions options;
    options.connections = {.all = all, .per_peer = peer};
    Start(options);
    std::vector<std::unique_ptr<Socket>> sockets;
    for (int i = 0; i < 3; ++i) {
      sockets.push_back(Connect(server_->port()));
      EXPECT_TRUE(IsTaken(sockets.back().get())) << i;
    }
    EXPECT_EQ(server_->connections(), 3);
    EXPECT_EQ(Connect(server_->port())->Receive(), "");
    EXPECT_EQ(server_->refused_connections(), 1);
    const auto other = Connect(server_->port(), "127.0.0.2");
    EXPECT_EQ(IsTaken(other.get()), peer > 0);

    sockets.pop_back();
    bool taken = false;
    for (int i = 0; i < 400 && !taken; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      taken = IsTaken(Connect(server_->port()).get());
    }
    EXPECT_TRUE(taken);
  }
}

// Descriptors' numbers come back at once, before the server has closed all that
// had them.
TEST_F(ServerTest, ConnectionsAreCountedRightWhileOthersAreReset) {
  Start();
  for (int round = 0; round < 40; ++round) {
    std::vector<std::unique_ptr<Socket>> reset;
    for (int i = 0; i < 100; ++i) {
      reset.push_back(std::make_unique<Socket>(server_->port()));
      const linger at_once{1, 0};
      setsockopt(reset.back()->fd(), SOL_SOCKET, SO_LINGER, &at_once,
                 sizeof(at_once));
    }
    ASSERT_TRUE(Eventually([&] { return server_->connections() == 100; }));
    std::thread resetting([&] { reset.clear(); });
    std::vector<std::unique_ptr<Socket>> kept;
    for (int i = 0; i < 20; ++i) kept.push_back(Connect(server_->port()));
    resetting.join();
    for (const auto& socket : kept) ASSERT_TRUE(IsTaken(socket.get()));
    ASSERT_TRUE(Eventually([&] { return server_->connections() <= 20; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ASSERT_EQ(server_->connections(), 20) << round;
    kept.clear();
    ASSERT_TRUE(Eventually([&] { return server_->connections() == 0; }));
  }
}

// With gRPC's own listener it would be the last time.
TEST_F(ServerTest, AProcessThatWasOutOfDescriptorsTakesConnectionsAgain) {
  Start();
  EXPECT_TRUE(IsTaken(Connect(server_->port()).get()));
  while (server_->connections() > 0) {  // its descriptors would be some
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Socket late;  // has its descriptor
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = 256;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<int> all;
  for (int fd; (fd = dup(late.fd())) >= 0;) all.push_back(fd);
  EXPECT_EQ(errno, EMFILE);
  late.Connect(server_->port());  // by the kernel
  late.Send(kPreface);
  std::this_thread::sleep_for(std::chrono::milliseconds(250));
  char byte;
  EXPECT_EQ(recv(late.fd(), &byte, 1, MSG_DONTWAIT), -1);
  // All at once: a connection needs more than one.
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(IsTaken(&late));
  EXPECT_EQ(server_->connections(), 1);
  for (const int fd : all) close(fd);
}

TEST_F(ServerTest, PortZeroPicksOneAndAUsedOneIsRefused) {
  Start();
  EXPECT_GT(server_->port(), 0);
  EXPECT_EQ(server_->address(), "127.0.0.1:" + std::to_string(server_->port()));
  ServerOptions same;
  same.address = server_->address();
  const auto second = Server::Start(same, {});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(second.status().message(),
            absl::StrCat("cannot listen on ", server_->address(),
                         ": Address already in use: end what listens there, or "
                         "take another --grpc-port"));
}

TEST_F(ServerTest, MessagesAreAcceptedToTheLimitAndNoFurther) {
  ServerOptions options;
  options.max_receive_bytes = 1 << 20;
  Start(options);
  auto channel = MakeChannel(server_->address(), {});
  EchoRequest fits = Request(1, (1 << 20) - 6);
  ASSERT_EQ(fits.ByteSizeLong(), 1u << 20);
  EXPECT_TRUE(Call(channel, fits).ok());
  EXPECT_EQ(Call(channel, Request(1, (1 << 20) - 5)).code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_F(ServerTest, HealthIsPerServiceAndReflectionListsThem) {
  Start();
  const std::string check = "/grpc.health.v1.Health/Check";
  const std::string serving = "\x08\x01", not_serving = "\x08\x02";
  const std::string name = "tandem.testing.EchoService";
  const std::string request =
      "\x0a" + std::string(1, static_cast<char>(name.size())) + name;
  EXPECT_EQ(Raw(check, ""), serving);
  EXPECT_THAT(Raw(check, request), HasSubstr("NOT_FOUND"));
  server_->SetServing(name, true);
  EXPECT_EQ(Raw(check, request), serving);
  server_->SetServing(name, false);
  server_->SetServing("", false);
  EXPECT_EQ(Raw(check, request), not_serving);
  EXPECT_EQ(Raw(check, ""), not_serving);
  EXPECT_THAT(Raw("/grpc.reflection.v1alpha.ServerReflection/"
                  "ServerReflectionInfo",
                  std::string("\x3a\x01*")),
              HasSubstr(name));
  // And describes the health service, which tools call by that.
  EXPECT_THAT(Raw("/grpc.reflection.v1alpha.ServerReflection/"
                  "ServerReflectionInfo",
                  std::string("\x22\x15grpc.health.v1.Health")),
              HasSubstr("HealthCheckRequest"));
}

TEST_F(ServerTest, TheRequestIdComesBackInTheHeaders) {
  Start();
  auto stub = EchoService::NewStub(MakeChannel(server_->address(), {}));
  grpc::ClientContext context;
  context.AddMetadata("x-request-id", "abc-1");
  EchoResponse response;
  ASSERT_TRUE(stub->Once(&context, Request(5), &response).ok());
  EXPECT_EQ(response.number(), 5);
  const auto& headers = context.GetServerInitialMetadata();
  ASSERT_EQ(headers.count("x-request-id"), 1u);
  EXPECT_EQ(headers.find("x-request-id")->second, "abc-1");
  loop_.RunSync([&] { EXPECT_EQ(info_.Find("x-request-id"), "abc-1"); });
}

// Headers would make a refusal one that gRPC's own retries may not repeat.
TEST_F(ServerTest, ARefusalHasTheRequestIdInItsTrailersAndIsRepeated) {
  int calls = 0;
  EchoServer refusing(&loop_, [&calls](auto stream, CallInfo) {
    ++calls;
    stream->Close(absl::UnavailableError("no worker"));
  });
  auto server = Server::Start({}, {&refusing});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto stub = EchoService::NewStub(RetryingChannel((*server)->address()));
  const auto judge = [&](const grpc::ClientContext& context) {
    EXPECT_TRUE(context.GetServerInitialMetadata().empty());
    const auto& trailers = context.GetServerTrailingMetadata();
    ASSERT_EQ(trailers.count("x-request-id"), 1u);
    EXPECT_EQ(trailers.find("x-request-id")->second, "abc-2");
    loop_.RunSync([&] { EXPECT_EQ(std::exchange(calls, 0), 3); });
  };
  EchoResponse response;
  {
    grpc::ClientContext context;
    context.AddMetadata("x-request-id", "abc-2");
    EXPECT_EQ(stub->Once(&context, Request(5), &response).error_code(),
              grpc::StatusCode::UNAVAILABLE);
    judge(context);
  }
  {
    grpc::ClientContext context;
    context.AddMetadata("x-request-id", "abc-2");
    const auto reader = stub->Count(&context, Request(5));
    EXPECT_FALSE(reader->Read(&response));
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
    judge(context);
  }
  (*server)->Shutdown(absl::Seconds(10));
}

// Under the names that boards for gRPC read.
TEST_F(ServerTest, CallsAreCountedByMethodAndCode) {
  Metrics metrics("test", "");
  CallMetrics calls(&metrics);
  ServerOptions options;
  options.metrics = &calls;
  options.max_receive_bytes = 1000;
  Start(options);
  auto channel = MakeChannel(server_->address(), {});
  EXPECT_TRUE(Call(channel, Request(1)).ok());
  EXPECT_TRUE(Call(channel, Request(2)).ok());
  // gRPC refuses it before anybody hears of it.
  EXPECT_EQ(Call(channel, Request(3, 2000)).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Raw("/grpc.health.v1.Health/Check", ""), "\x08\x01");
  EXPECT_THAT(Raw("/grpc.health.v1.Health/Check", "\x0a\x01?"),
              HasSubstr("NOT_FOUND"));
  // Nor does a handler see what cannot be read, but its sender hears so.
  EXPECT_THAT(Raw("/tandem.testing.EchoService/Once", "\xff\xff"),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("FIELD_INVALID"),
                    HasSubstr("no message tandem.testing.EchoRequest")));
  // What callers make up is no label.
  EXPECT_THAT(Raw("/tandem.testing.EchoService/None", ""),
              HasSubstr("UNIMPLEMENTED"));
  const auto line = [](const std::string& name, const std::string& code,
                       const std::string& type, const std::string& service,
                       const std::string& method, int value) {
    return name + "{role=\"test\"," +
           (code.empty() ? "" : "grpc_code=\"" + code + "\",") +
           "grpc_method=\"" + method + "\",grpc_service=\"" + service +
           "\",grpc_type=\"" + type + "\"} " + std::to_string(value) + "\n";
  };
  const std::string echo = "tandem.testing.EchoService";
  const std::string health = "grpc.health.v1.Health";
  const std::string handled = "grpc_server_handled_total";
  // The answer may be there before the call has ended here.
  std::string text;
  EXPECT_TRUE(Eventually([&] {
    text = metrics.Text();
    return text.find(line(handled, "NotFound", "unary", health, "Check", 1)) !=
           std::string::npos;
  })) << text;
  for (const std::string& one :
       {line("grpc_server_started_total", "", "unary", echo, "Once", 3),
        line(handled, "OK", "unary", echo, "Once", 2),
        line(handled, "InvalidArgument", "unary", echo, "Once", 1),
        line("grpc_server_handling_seconds_count", "", "unary", echo, "Once",
             3),
        line("grpc_server_started_total", "", "unary", health, "Check", 2),
        line(handled, "OK", "unary", health, "Check", 1)}) {
    EXPECT_THAT(text, HasSubstr(one));
  }
  EXPECT_THAT(text, ::testing::Not(HasSubstr("None")));
  // All that is counted was looked at: nothing else has these names.
  EXPECT_THAT(text, ::testing::Not(HasSubstr("grpc_type=\"other\"")));
}

// There is no message either where one could not be read, which is another
// fault.
TEST_F(ServerTest, ACallThatIsTakenBackBeforeItsMessageCountsAsCancelled) {
  Metrics metrics("test", "");
  CallMetrics calls(&metrics);
  ServerOptions options;
  options.metrics = &calls;
  Start(options);
  grpc::GenericStub stub(MakeChannel(server_->address(), {}));
  constexpr int kCalls = 20;
  for (int i = 0; i < kCalls; ++i) {
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const auto call =
        stub.PrepareCall(&context, "/tandem.testing.EchoService/Once", &queue);
    void* tag = nullptr;
    bool ok = false;
    call->StartCall(nullptr);
    ASSERT_TRUE(queue.Next(&tag, &ok));
    context.TryCancel();
    grpc::Status status;
    call->Finish(&status, nullptr);
    ASSERT_TRUE(queue.Next(&tag, &ok));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_THAT(Raw("/tandem.testing.EchoService/Once", "\xff\xff"),
              HasSubstr("INVALID_ARGUMENT"));
  // Some may be taken back before the server hears of them.
  const auto count = [&](const std::string& name, const std::string& code) {
    const std::string text = metrics.Text();
    const size_t at =
        text.find(name + "{role=\"test\"," +
                  (code.empty() ? "" : "grpc_code=\"" + code + "\",") +
                  "grpc_method=\"Once\"");
    return at == std::string::npos
               ? 0
               : std::stoi(text.substr(text.find("} ", at) + 2));
  };
  const auto ended = [&] {
    return count("grpc_server_handled_total", "Canceled") +
           count("grpc_server_handled_total", "InvalidArgument");
  };
  EXPECT_TRUE(Eventually([&] {
    return count("grpc_server_started_total", "") > 1 &&
           ended() == count("grpc_server_started_total", "");
  })) << metrics.Text();
  EXPECT_EQ(count("grpc_server_handled_total", "InvalidArgument"), 1);
}

// Certificates of two authorities.
class TlsTest : public ServerTest {
 protected:
  // The authority's, and a leaf of it with these URIs.
  static Credentials With(const Authority& authority,
                          const std::vector<std::string>& uris = {}) {
    const Pem leaf = authority.Issue(2, uris);
    Credentials tls;
    tls.cert = leaf.cert;
    tls.key = leaf.key;
    tls.ca = authority.cert();
    return tls;
  }
  static ServerOptions Echo(Credentials tls) {
    static const std::vector<MethodRule> rules = {
        {"/tandem.testing.EchoService/Once", {PeerRole::kRouter}},
        {.method = "/tandem.testing.EchoService/Count", .anybody = true}};
    ServerOptions options;
    options.tls = std::move(tls);
    options.rules = rules;
    return options;
  }
  absl::Status CallWith(const Credentials& tls) {
    return Call(MakeChannel(server_->address(), tls), Request(3));
  }
  // Of one message to any method and no wish for an answer.
  grpc::StatusCode CodeOf(const std::string& method, const Credentials& tls) {
    grpc::GenericStub stub(MakeChannel(server_->address(), tls));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::seconds(10));
    grpc::Slice nothing;
    grpc::ByteBuffer request(&nothing, 1), response;
    std::promise<grpc::Status> done;
    stub.UnaryCall(&context, method, {}, &request, &response,
                   [&](const grpc::Status& status) { done.set_value(status); });
    return done.get_future().get().error_code();
  }

  const Authority ours_{"ours"}, theirs_{"theirs"};
};

TEST_F(TlsTest, MutualTlsAdmitsOnlyCertificatesOfTheAuthority) {
  const Credentials good = With(ours_, {"spiffe://tandem/router"});
  EXPECT_TRUE(good.mutual());
  Start(Echo(good));
  EXPECT_TRUE(CallWith(good).ok());
  Credentials bare, stranger = With(theirs_, {"spiffe://tandem/router"}),
                    deceived = good, late = good;
  bare.ca = good.ca;
  stranger.ca = good.ca;
  deceived.ca = theirs_.cert();
  const Pem expired = ours_.Issue(3, {"spiffe://tandem/router"}, -1);
  late.cert = expired.cert;
  late.key = expired.key;
  for (const Credentials& tls : {bare, stranger, deceived, late, {}}) {
    EXPECT_EQ(CallWith(tls).code(), absl::StatusCode::kUnavailable);
  }
}

TEST_F(TlsTest, EachCallIsAskedForARole) {
  Start(Echo(With(ours_)));
  const char kOnce[] = "/tandem.testing.EchoService/Once";
  struct Case {
    std::vector<std::string> uris;
    grpc::StatusCode code;
  };
  for (const Case& c : {
           Case{{"spiffe://tandem/router"}, grpc::StatusCode::OK},
           Case{{"spiffe://tandem/decode/d0", "spiffe://tandem/router"},
                grpc::StatusCode::OK},
           Case{{"spiffe://mesh/x", "spiffe://tandem/router"},
                grpc::StatusCode::OK},
           Case{{"spiffe://tandem/prefill"},
                grpc::StatusCode::PERMISSION_DENIED},
           Case{{}, grpc::StatusCode::UNAUTHENTICATED},
           Case{{"spiffe://mesh/router"}, grpc::StatusCode::UNAUTHENTICATED},
           Case{{"spiffe://tandem/router/"}, grpc::StatusCode::UNAUTHENTICATED},
       }) {
    const Credentials tls = With(ours_, c.uris);
    SCOPED_TRACE(c.uris.empty() ? "no URI" : c.uris[0]);
    EXPECT_EQ(CodeOf(kOnce, tls), c.code);
    EXPECT_EQ(CodeOf("/tandem.testing.EchoService/Count", tls),
              grpc::StatusCode::OK);
    const auto refused = c.code == grpc::StatusCode::OK
                             ? grpc::StatusCode::PERMISSION_DENIED
                             : c.code;
    // Served, but no rule names it; and not served at all.
    EXPECT_EQ(CodeOf("/tandem.testing.EchoService/Chat", tls), refused);
    EXPECT_EQ(CodeOf("/tandem.testing.EchoService/None", tls), refused);
    EXPECT_EQ(CodeOf("/grpc.health.v1.Health/Check", tls), refused);
  }
}

TEST_F(TlsTest, AClientSpeaksOnlyWithWhomItMeant) {
  Start(Echo(With(ours_, {"spiffe://tandem/decode/d0", "spiffe://mesh/x",
                          "spiffe://tandem/operator"})));
  const Credentials own = With(ours_, {"spiffe://tandem/router"});
  const auto call = [&](Identity server, const std::string& name = "",
                        const std::string& ca = "") {
    Credentials tls = own;
    if (!ca.empty()) tls.ca = ca;
    return Call(
        MakeChannel(server_->address(), tls,
                    {.tls_server_name = name, .server = std::move(server)}),
        Request(3));
  };
  const Identity meant{PeerRole::kDecode, "d0"};
  EXPECT_TRUE(call(meant).ok()) << call(meant);
  EXPECT_TRUE(call({PeerRole::kOperator}).ok());
  for (const Identity& other :
       {Identity{PeerRole::kDecode, "d1"}, Identity{PeerRole::kDecode},
        Identity{PeerRole::kPrefill, "d0"}, Identity{PeerRole::kRouter}}) {
    const absl::Status status = call(other);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable)
        << other.ToString();
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("the certificate is of decode/d0, operator"));
  }
  // Chain and host are checked as ever.
  EXPECT_EQ(call(meant, "elsewhere").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(call(meant, "", theirs_.cert()).code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(TlsTest, AServerOfNoRoleIsNobodyOfTheCluster) {
  Start(Echo(With(ours_)));
  const absl::Status status = Call(
      MakeChannel(server_->address(), With(ours_, {"spiffe://tandem/router"}),
                  {.server = Identity{PeerRole::kDecode, "d0"}}),
      Request(3));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("names no role"));
}

TEST_F(TlsTest, HandlersHearWhoCalls) {
  Start(Echo(With(ours_)));
  ASSERT_TRUE(CallWith(With(ours_, {"spiffe://tandem/router",
                                    "spiffe://tandem/decode/d0"}))
                  .ok());
  loop_.RunSync([&] {
    EXPECT_TRUE(info_.identity.authenticated);
    EXPECT_THAT(
        info_.identity.identities,
        ElementsAre(Identity{.role = PeerRole::kRouter},
                    Identity{.role = PeerRole::kDecode, .worker_id = "d0"}));
  });
}

TEST_F(TlsTest, WithoutAnAuthorityTheServerTakesAnyClient) {
  Credentials server = With(ours_);
  server.ca = "";
  Start(Echo(server));
  Credentials client;
  client.ca = ours_.cert();
  EXPECT_TRUE(CallWith(client).ok());
  loop_.RunSync([&] { EXPECT_FALSE(info_.identity.authenticated); });
  EXPECT_EQ(CallWith({}).code(), absl::StatusCode::kUnavailable);
}

TEST_F(ServerTest, PlainTextHasNoIdentityAndNoRules) {
  Start();
  EXPECT_TRUE(Call(MakeChannel(server_->address(), {}), Request(3)).ok());
  loop_.RunSync([&] {
    EXPECT_FALSE(info_.identity.authenticated);
    EXPECT_TRUE(info_.identity.identities.empty());
  });
}

TEST(PlaintextTest, StaysOnLoopbackUnlessItIsAllowed) {
  for (const char* const host :
       {"localhost", "127.0.0.1", "127.1.2.3", "::1"}) {
    EXPECT_TRUE(OnLoopback(host)) << host;
  }
  const auto with = [](const char* cert, const char* ca) {
    Credentials tls;
    tls.cert = tls.key = cert;
    tls.ca = ca;
    return tls;
  };
  for (const char* const host :
       {"0.0.0.0", "::", "10.0.0.1", "126.0.0.1", "128.0.0.1", "::2", "",
        "router.example", "127.evil.example", "localhost.example"}) {
    SCOPED_TRACE(host);
    EXPECT_FALSE(OnLoopback(host));
    for (const Credentials& tls :
         {with("", ""), with("c", ""), with("", "a")}) {
      const absl::Status status = CheckPlaintext(tls, false, "--host", host);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("--host"), HasSubstr("--allow-plaintext"),
                        HasSubstr("--tls-cert"), HasSubstr("--tls-ca")));
      EXPECT_TRUE(CheckPlaintext(tls, true, "--host", host).ok());
      EXPECT_TRUE(CheckPlaintext(tls, false, "--host", "::1").ok());
    }
    EXPECT_TRUE(CheckPlaintext(with("c", "a"), false, "--host", host).ok());
  }
}

TEST(TlsFilesTest, WrongFilesAreNamed) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() /
      ("tandem-tls-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  const Pem pem = Authority("ours").Issue(2);
  std::ofstream(folder / "worker.pem") << pem.cert;
  std::ofstream(folder / "worker.key") << pem.key;
  std::ofstream(folder / "empty.pem") << "no pem";
  std::ofstream(folder / "other.key") << Authority("ours").Issue(3).key;
  for (const std::string what : {"CERTIFICATE", "PRIVATE KEY"}) {
    std::ofstream(folder / (what.substr(0, 4) + ".pem"))
        << "-----BEGIN " << what << "-----\nAAAA\n-----END " << what
        << "-----\n";
  }
  const auto path = [&](const std::string& name) {
    return name.empty() ? "" : (folder / name).string();
  };
  struct Case {
    const char *cert, *key, *ca, *says;
  };
  const Case cases[] = {
      {"worker.pem", "", "", "--tls-cert and --tls-key come together"},
      {"", "worker.key", "", "--tls-cert and --tls-key come together"},
      {"missing.pem", "worker.key", "", "--tls-cert: cannot read"},
      {"worker.pem", "worker.pem", "", "--tls-key: "},
      {"worker.pem", "worker.key", "empty.pem", "--tls-ca: "},
      {"worker.pem", "other.key", "", "do not belong together"},
      {"CERT.pem", "worker.key", "", "--tls-cert holds no certificate"},
      {"worker.pem", "PRIV.pem", "", "--tls-key holds no key"},
      {"worker.pem", "worker.key", "CERT.pem", "--tls-ca holds no certificate"},
  };
  for (const Case& c : cases) {
    const auto tls = LoadCredentials(path(c.cert), path(c.key), path(c.ca));
    EXPECT_EQ(tls.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(tls.status().message()), HasSubstr(c.says));
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tandem::rpc
