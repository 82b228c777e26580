// SPDX-License-Identifier: Apache-2.0
// Servers, channels, credentials and the mapping of statuses.
#include "common/rpc/server.h"

#include <grpcpp/generic/generic_stub.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "common/error.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"
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
                    absl::Duration timeout = absl::Seconds(20)) {
    ClientRecorder client;
    ThreadLoop loop("client");
    loop.RunSync([&] {
      client.stream = OpenUnary<EchoRequest, EchoResponse>(
          &loop, {.timeout = timeout},
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

TEST_F(ServerTest, PortZeroPicksOneAndAUsedOneIsRefused) {
  Start();
  EXPECT_GT(server_->port(), 0);
  EXPECT_EQ(server_->address(), "127.0.0.1:" + std::to_string(server_->port()));
  ServerOptions same;
  same.address = server_->address();
  const auto second = Server::Start(same, {});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()),
              HasSubstr(server_->address()));
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

// Certificates of two authorities, made by the openssl tool.
class TlsTest : public ServerTest {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("tandem-tls-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
    Run("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes "
        "-keyout ca.key -out ca.pem -subj /CN=ca -days 2");
    Run("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes "
        "-keyout other.key -out other.pem -subj /CN=other -days 2");
    Leaf("ca", "worker");
    Leaf("other", "stranger");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void Run(const std::string& arguments) {
    const std::string command =
        "cd " + folder_.string() + " && openssl " + arguments + " >log 2>&1";
    ASSERT_EQ(std::system(command.c_str()), 0) << arguments;
  }
  void Leaf(const std::string& ca, const std::string& name) {
    std::ofstream(folder_ / "san")
        << "subjectAltName=DNS:" + name + ",IP:127.0.0.1\n";
    Run("req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout " +
        name + ".key -out " + name + ".csr -subj /CN=" + name);
    Run("x509 -req -in " + name + ".csr -CA " + ca + ".pem -CAkey " + ca +
        ".key -CAcreateserial -days 2 -extfile san -out " + name + ".pem");
  }
  std::string Path(const std::string& name) {
    return name.empty() ? "" : (folder_ / name).string();
  }
  Credentials Load(const std::string& leaf, const std::string& ca) {
    auto tls = LoadCredentials(Path(leaf.empty() ? "" : leaf + ".pem"),
                               Path(leaf.empty() ? "" : leaf + ".key"),
                               Path(ca.empty() ? "" : ca + ".pem"));
    EXPECT_TRUE(tls.ok()) << tls.status();
    return *tls;
  }
  absl::Status CallWith(const Credentials& tls) {
    return Call(MakeChannel(server_->address(), tls), Request(3));
  }

  std::filesystem::path folder_;
};

TEST_F(TlsTest, MutualTlsAdmitsOnlyCertificatesOfTheAuthority) {
  ServerOptions options;
  options.tls = Load("worker", "ca");
  EXPECT_TRUE(options.tls.mutual());
  Start(options);
  EXPECT_TRUE(CallWith(Load("worker", "ca")).ok());
  loop_.RunSync([&] {
    EXPECT_THAT(info_.identities, ElementsAre("worker", "127.0.0.1"));
  });
  struct Case {
    const char *leaf, *ca;
  };
  for (const Case& c : {Case{"", "ca"}, Case{"stranger", "ca"},
                        Case{"worker", "other"}, Case{"", ""}}) {
    EXPECT_EQ(CallWith(Load(c.leaf, c.ca)).code(),
              absl::StatusCode::kUnavailable)
        << c.leaf << " " << c.ca;
  }
}

TEST_F(TlsTest, WithoutAnAuthorityTheServerTakesAnyClient) {
  ServerOptions options;
  options.tls = Load("worker", "");
  Start(options);
  EXPECT_TRUE(CallWith(Load("", "ca")).ok());
  EXPECT_EQ(CallWith(Load("", "")).code(), absl::StatusCode::kUnavailable);
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

TEST_F(TlsTest, WrongFilesAreNamed) {
  std::ofstream(folder_ / "empty.pem") << "no pem";
  struct Case {
    const char *cert, *key, *ca, *says;
  };
  const Case cases[] = {
      {"worker.pem", "", "", "--tls-cert and --tls-key come together"},
      {"", "worker.key", "", "--tls-cert and --tls-key come together"},
      {"missing.pem", "worker.key", "", "--tls-cert: cannot read"},
      {"worker.pem", "worker.pem", "", "--tls-key: "},
      {"worker.pem", "worker.key", "empty.pem", "--tls-ca: "},
  };
  for (const Case& c : cases) {
    const auto tls = LoadCredentials(Path(c.cert), Path(c.key), Path(c.ca));
    EXPECT_EQ(tls.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(tls.status().message()), HasSubstr(c.says));
  }
}

}  // namespace
}  // namespace tandem::rpc
