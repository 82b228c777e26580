// SPDX-License-Identifier: Apache-2.0
// The whole cluster under mutual TLS, with certificates made for the test.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "tests/integration/cluster.h"

namespace tandem::integration {
namespace {

bool Shell(const std::string& command) {
  return std::system(absl::StrCat(command, " >/dev/null 2>&1").c_str()) == 0;
}

// An authority in `directory` with the name's certificate: ca.pem, NAME.pem,
// NAME.key.
void MakeCertificates(const std::string& directory, const std::string& name) {
  std::filesystem::create_directories(directory);
  std::ofstream(directory + "/ext")
      << "subjectAltName=DNS:localhost,IP:127.0.0.1\n";
  const std::string cd = absl::StrCat("cd ", directory, " && ");
  ASSERT_TRUE(Shell(cd + "openssl req -x509 -newkey ec -pkeyopt "
                         "ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "
                         "/CN=test-ca -keyout ca.key -out ca.pem"));
  ASSERT_TRUE(Shell(absl::StrCat(
      cd,
      "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 "
      "-nodes -subj /CN=",
      name, " -keyout ", name, ".key -out ", name, ".csr")));
  ASSERT_TRUE(
      Shell(absl::StrCat(cd,
                         "openssl x509 -req -days 2 -CA ca.pem -CAkey ca.key "
                         "-CAcreateserial -extfile ext -in ",
                         name, ".csr -out ", name, ".pem")));
}

TEST(TlsTest, AClusterUnderMutualTlsServesAndRefusesStrangers) {
  if (!Shell("openssl version")) GTEST_SKIP() << "no openssl command";
  const std::string ours = testing::TempDir() + "/tandem-tls-ours";
  const std::string theirs = testing::TempDir() + "/tandem-tls-theirs";
  ASSERT_NO_FATAL_FAILURE(MakeCertificates(ours, "node"));
  ASSERT_NO_FATAL_FAILURE(MakeCertificates(theirs, "node"));
  const ClusterOptions options = {.prefill = 1,
                                  .decode = 1,
                                  .tls_cert = ours + "/node.pem",
                                  .tls_key = ours + "/node.key",
                                  .tls_ca = ours + "/ca.pem"};
  Cluster cluster(options);
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
  ssl.pem_cert_chain = read(theirs + "/node.pem");
  ssl.pem_private_key = read(theirs + "/node.key");
  EXPECT_FALSE(answers(grpc::SslCredentials(ssl)));
  ssl.pem_cert_chain = read(ours + "/node.pem");
  ssl.pem_private_key = read(ours + "/node.key");
  EXPECT_TRUE(answers(grpc::SslCredentials(ssl)));
  EXPECT_EQ(cluster.WhatIsLeft(), "");
  std::filesystem::remove_all(ours);
  std::filesystem::remove_all(theirs);
}

}  // namespace
}  // namespace tandem::integration
