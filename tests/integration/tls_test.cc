// SPDX-License-Identifier: Apache-2.0
// The whole cluster under mutual TLS, and the ports for clients under TLS of
// their own, with certificates made for the test.

#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/common/http/certificates.h"
#include "tests/common/http/tls_socket.h"
#include "tests/integration/cluster.h"
#include "tests/integration/tls_files.h"

namespace tandem::integration {
namespace {

void MakeCertificates(const std::string& names) {
  ASSERT_EQ(
      std::system(
          absl::StrCat(TANDEM_SOURCE_DIR "/scripts/dev-ca.sh ", names).c_str()),
      0);
}

TEST(TlsTest, AClusterUnderMutualTlsServesAndRefusesStrangers) {
  const std::string ours =
      absl::StrCat(testing::TempDir(), "/tandem-tls-ours-", getpid());
  const std::string theirs = ours + "-not";
  // One worker has a certificate of its own, the other one of its role.
  ASSERT_NO_FATAL_FAILURE(MakeCertificates(ours));
  ASSERT_NO_FATAL_FAILURE(MakeCertificates(ours + " prefill/prefill-0"));
  ASSERT_NO_FATAL_FAILURE(MakeCertificates(theirs + " client"));
  Cluster cluster({.prefill = 1, .decode = 1, .tls_directory = ours});
  const absl::Status status = cluster.Start();
  ASSERT_TRUE(status.ok()) << status << cluster.Log("decode-0");
  v1::GenerateRequest request = TextRequest(SomePrompts(1, 2)[0], 24);
  request.set_placement(v1::PLACEMENT_SPLIT);
  const Outcome outcome = cluster.Generate(request);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.done.workers().prefill(), "prefill-0");

  // Without a certificate, and with one of another authority.
  const auto answers = [&](std::shared_ptr<grpc::ChannelCredentials> creds) {
    const auto stub = v1::InferenceService::NewStub(grpc::CreateChannel(
        absl::StrCat("localhost:", cluster.grpc_port()), creds));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::seconds(3));
    v1::ListModelsResponse models;
    return stub->ListModels(&context, {}, &models).ok();
  };
  const auto read = [](const std::string& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  EXPECT_FALSE(answers(grpc::InsecureChannelCredentials()));
  grpc::SslCredentialsOptions ssl;
  ssl.pem_root_certs = read(ours + "/ca.pem");
  EXPECT_FALSE(answers(grpc::SslCredentials(ssl)));
  ssl.pem_cert_chain = read(theirs + "/client.pem");
  ssl.pem_private_key = read(theirs + "/client.key");
  EXPECT_FALSE(answers(grpc::SslCredentials(ssl)));
  ssl.pem_cert_chain = read(ours + "/client.pem");
  ssl.pem_private_key = read(ours + "/client.key");
  EXPECT_TRUE(answers(grpc::SslCredentials(ssl)));
  EXPECT_EQ(cluster.WhatIsLeft(), "");
  std::filesystem::remove_all(ours);
  std::filesystem::remove_all(theirs);
}

constexpr char kModels[] =
    "GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n";

class PublicTlsTest : public testing::Test {
 protected:
  void TearDown() override {
    if (cluster_ != nullptr) {
      EXPECT_EQ(cluster_->WhatIsLeft(), "");
    }
  }
  void Begin(const std::vector<std::string>& more = {}) {
    const Pem pem = authority_.Issue(1);
    files_.Write("cert", pem.cert);
    files_.Write("key", pem.key);
    std::vector<std::string> arguments = {"--ssl-certfile", files_.Path("cert"),
                                          "--ssl-keyfile", files_.Path("key")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    cluster_ = std::make_unique<Cluster>(ClusterOptions{
        .prefill = 1, .decode = 1, .router_arguments = arguments});
    const absl::Status status = cluster_->Start();
    ASSERT_TRUE(status.ok()) << status << cluster_->Log("router");
  }
  // A connection of its own.
  std::unique_ptr<v1::InferenceService::Stub> Stub(const std::string& ca,
                                                   const Pem& own = {}) {
    grpc::SslCredentialsOptions ssl;
    ssl.pem_root_certs = ca;
    ssl.pem_cert_chain = own.cert;
    ssl.pem_private_key = own.key;
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return v1::InferenceService::NewStub(grpc::CreateCustomChannel(
        absl::StrCat("127.0.0.1:", cluster_->grpc_port()),
        ca.empty() ? grpc::InsecureChannelCredentials()
                   : grpc::SslCredentials(ssl),
        arguments));
  }
  static bool Lists(v1::InferenceService::Stub* stub) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::seconds(10));
    v1::ListModelsResponse models;
    return stub->ListModels(&context, {}, &models).ok();
  }
  bool HttpLists(const TlsClientOptions& options) const {
    TlsSocket socket(cluster_->http_port(), options);
    socket.Send(kModels);
    return socket.Receive().find("HTTP/1.1 200") == 0;
  }
  // Of both ports' certificates.
  bool Shows(int64_t serial) const {
    TlsClientOptions grpc{.ca = authority_.cert()};
    grpc.protocols = "\x02h2";
    return TlsSocket(cluster_->http_port(), {.ca = authority_.cert()})
                   .serial() == serial &&
           TlsSocket(cluster_->grpc_port(), grpc).serial() == serial;
  }

  const Authority authority_{"ours"};
  const TlsFiles files_{"public-tls"};
  std::unique_ptr<Cluster> cluster_;
};

TEST_F(PublicTlsTest, BothPortsSpeakTlsAndNothingElse) {
  Begin();
  EXPECT_TRUE(Shows(1));
  EXPECT_TRUE(HttpLists({.ca = authority_.cert()}));
  EXPECT_TRUE(Lists(Stub(authority_.cert()).get()));
  const std::string other = Authority("theirs").cert();
  EXPECT_FALSE(TlsSocket(cluster_->http_port(), {.ca = other}).connected());
  EXPECT_FALSE(Lists(Stub(other).get()));
  EXPECT_FALSE(Lists(Stub("").get()));
  Socket plain(cluster_->http_port());
  plain.Send(kModels);
  EXPECT_EQ(plain.Receive().find("HTTP"), std::string::npos);
  for (const int port : {cluster_->http_port(), cluster_->grpc_port()}) {
    TlsClientOptions old;
    old.min_version = old.max_version = TLS1_1_VERSION;
    EXPECT_FALSE(TlsSocket(port, old).connected());
  }
}

TEST_F(PublicTlsTest, ClientsShowCertificatesWhereTheyMust) {
  files_.Write("ca", authority_.cert());
  Begin({"--ssl-ca-certs", files_.Path("ca")});
  const Pem ours = authority_.Issue(2);
  const Pem theirs = Authority("theirs").Issue(2);
  EXPECT_TRUE(HttpLists({.ca = authority_.cert(), .own = ours}));
  EXPECT_TRUE(Lists(Stub(authority_.cert(), ours).get()));
  EXPECT_FALSE(HttpLists({.ca = authority_.cert()}));
  EXPECT_FALSE(Lists(Stub(authority_.cert()).get()));
  EXPECT_FALSE(HttpLists({.ca = authority_.cert(), .own = theirs}));
  EXPECT_FALSE(Lists(Stub(authority_.cert(), theirs).get()));
}

TEST_F(PublicTlsTest, CertificatesChangeUnderLoad) {
  Begin();
  // A stream of each port that outlives every change.
  const auto stub = Stub(authority_.cert());
  grpc::ClientContext context;
  v1::GenerateRequest request = TextRequest("Once upon a time", 900);
  request.mutable_stopping()->set_ignore_eos(true);
  const auto reader = stub->Generate(&context, request);
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  TlsSocket kept(cluster_->http_port(), {.ca = authority_.cert()});

  std::atomic<bool> stop = false;
  std::atomic<int> failed = 0, served = 0;
  std::vector<std::thread> clients;
  clients.emplace_back([&] {
    while (!stop) ++(HttpLists({.ca = authority_.cert()}) ? served : failed);
  });
  clients.emplace_back([&] {
    while (!stop) {
      ++(Lists(Stub(authority_.cert()).get()) ? served : failed);
    }
  });
  Pem last;
  for (int serial = 2; serial <= 3; ++serial) {
    last = authority_.Issue(serial);
    files_.Write("cert", last.cert);  // and a moment later
    files_.Write("key", last.key);
    EXPECT_TRUE(Until([&] { return Shows(serial); })) << serial;
  }
  // The key of another one.
  cluster_->ExpectErrors("certificate not reloaded");
  files_.Write("key", authority_.Issue(4).key);
  EXPECT_TRUE(Until([&] {
    return CountInLog(*cluster_, "router", "certificate not reloaded") > 0;
  }));
  // And one that has expired, whole though it is.
  const Pem expired = authority_.Issue(5, {}, -60);
  files_.Write("cert", expired.cert);
  files_.Write("key", expired.key);
  EXPECT_TRUE(Until(
      [&] { return CountInLog(*cluster_, "router", "has expired at") > 0; }));
  EXPECT_TRUE(Shows(3));
  stop = true;
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(failed, 0) << "of " << served;
  EXPECT_GT(served, 20);
  kept.Send(kModels);
  EXPECT_EQ(kept.Receive().find("HTTP/1.1 200"), 0u);
  EXPECT_EQ(kept.serial(), 1);
  v1::GenerateDone done;
  while (reader->Read(&response)) {
    if (response.has_done()) done = response.done();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(done.usage().completion_tokens(), 900);
}

}  // namespace
}  // namespace tandem::integration
