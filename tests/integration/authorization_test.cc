// SPDX-License-Identifier: Apache-2.0
// Every method of every server of a cluster under mutual TLS, called with every
// kind of certificate: who comes in, and with which code the others do not.

#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/rpc/channel.h"
#include "openengine/v1/control.pb.h"
#include "openengine/v1/inference.pb.h"
#include "tandem/v1/decode.grpc.pb.h"
#include "tandem/v1/handoff.grpc.pb.h"
#include "tandem/v1/prefill.grpc.pb.h"
#include "tandem/v1/registry.grpc.pb.h"
#include "tests/common/http/certificates.h"
#include "tests/integration/cluster.h"
#include "tests/integration/tls_files.h"

namespace tandem::integration {
namespace {

using grpc::StatusCode;

// Who may call a service's methods, by the roles in certificates.
const std::map<std::string, std::set<std::string>> kMay = {
    {"tandem.v1.RegistryService", {"prefill", "decode"}},
    {"tandem.v1.DecodeService", {"router"}},
    {"tandem.v1.PrefillService", {"router"}},
    {"tandem.v1.HandoffService", {"prefill"}},
    {"tandem.v1.AdminService", {"operator", "router"}},
    {"tandem.v1.InferenceService", {"client", "operator"}},
    {"openengine.v1.Inference", {"client", "operator"}},
    {"openengine.v1.Control", {"client", "operator"}},
};

struct Method {
  std::string path;
  bool streams = false;
};

std::vector<Method> MethodsOf(const std::string& service) {
  // Else the linker leaves them out.
  (void)v1::PrefillRequest::descriptor();
  (void)v1::DecodeRequest::descriptor();
  (void)openengine::v1::GetServerInfoRequest::descriptor();
  (void)openengine::v1::GenerateRequest::descriptor();
  const auto* const descriptor =
      google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(
          service);
  std::vector<Method> methods;
  if (descriptor == nullptr) return methods;
  for (int i = 0; i < descriptor->method_count(); ++i) {
    const auto* const method = descriptor->method(i);
    methods.push_back({absl::StrCat("/", service, "/", method->name()),
                       method->client_streaming()});
  }
  return methods;
}

grpc::Status CallWithNothing(const std::shared_ptr<grpc::Channel>& channel,
                             const std::string& method,
                             std::chrono::milliseconds patience) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + patience);
  grpc::Slice nothing;
  grpc::ByteBuffer request(&nothing, 1), response;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, method, {}, &request, &response,
                 [&](const grpc::Status& status) { done.set_value(status); });
  return done.get_future().get();
}

class ClusterTlsTest : public testing::Test {
 protected:
  ClusterTlsTest() {
    cluster_ = std::make_unique<Cluster>(ClusterOptions{
        .prefill = 1, .decode = 1, .tls_directory = files_.directory()});
  }
  void Start() {
    const absl::Status started = cluster_->Start();
    ASSERT_TRUE(started.ok()) << started << cluster_->Log("decode-0");
  }
  // With all workers, and nothing is left of it.
  void ExpectServes() {
    v1::GenerateRequest request = TextRequest("Once upon a time", 16);
    request.set_placement(v1::PLACEMENT_SPLIT);
    const Outcome outcome = cluster_->Generate(request);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.done.workers().prefill(), "prefill-0");
    EXPECT_EQ(cluster_->WhatIsLeft(), "");
  }

  int Count(const std::string& process, const std::string& words) const {
    return CountInLog(*cluster_, process, words);
  }
  // All gRPC ports show this certificate.
  bool AllPortsShow(int serial) const {
    return AllShow({cluster_->grpc_port(), cluster_->internal_port(),
                    cluster_->admin_port(), cluster_->worker_port("prefill-0"),
                    cluster_->worker_port("decode-0")},
                   serial);
  }

  rpc::Credentials With(const Pem& own) const {
    return CredentialsOf(own, ours_.cert());
  }
  rpc::Credentials As(const std::string& name) const {
    return With(ours_.Issue(3, {"spiffe://tandem/" + name}));
  }
  static std::shared_ptr<grpc::Channel> Dial(int port,
                                             const rpc::Credentials& tls) {
    return rpc::MakeChannel(absl::StrCat("localhost:", port), tls);
  }

  const Authority ours_{"ours"};
  const ClusterTlsFiles files_{
      "authorization", ours_, {"prefill/prefill-0", "decode/decode-0"}};
  std::unique_ptr<Cluster> cluster_;
};

TEST_F(ClusterTlsTest, EachMethodTakesItsRolesAlone) {
  ASSERT_NO_FATAL_FAILURE(Start());
  struct Server {
    int port;
    std::vector<std::string> services;
  };
  const Server servers[] = {
      {cluster_->grpc_port(),
       {"tandem.v1.InferenceService", "openengine.v1.Inference",
        "openengine.v1.Control"}},
      {cluster_->internal_port(), {"tandem.v1.RegistryService"}},
      {cluster_->admin_port(), {"tandem.v1.AdminService"}},
      {cluster_->worker_port("prefill-0"), {"tandem.v1.PrefillService"}},
      {cluster_->worker_port("decode-0"),
       {"tandem.v1.DecodeService", "tandem.v1.HandoffService"}},
  };
  struct Caller {
    std::string what;  // a role's name, where it is one
    rpc::Credentials tls;
    bool connects = true;
    bool has_role = false;
  };
  std::vector<Caller> callers = {
      {"plain text", {}, false},
      {"no certificate", {}, false},
      {"another authority's",
       With(Authority("theirs").Issue(
           4, {"spiffe://tandem/router", "spiffe://tandem/operator"})),
       false},
      {"expired", With(ours_.Issue(5, {"spiffe://tandem/router"}, -60)), false},
      {"no role", With(ours_.Issue(6))},
      {"a mesh's", With(ours_.Issue(7, {"spiffe://mesh.local/ns/tandem"}))},
  };
  callers[1].tls.ca = ours_.cert();
  for (const char* const role :
       {"router", "prefill", "decode", "operator", "client"}) {
    callers.push_back({role, As(role), true, true});
  }

  int calls = 0;
  for (const Server& server : servers) {
    std::vector<std::string> services = server.services;
    services.emplace_back("grpc.health.v1.Health");
    for (const Caller& caller : callers) {
      const auto channel = Dial(server.port, caller.tls);
      for (const std::string& service : services) {
        std::vector<Method> methods = MethodsOf(service);
        if (service == "grpc.health.v1.Health") {
          methods = {{"/grpc.health.v1.Health/Check"},
                     {"/grpc.health.v1.Health/Watch", true}};
        }
        ASSERT_FALSE(methods.empty()) << service;
        const bool health = !kMay.contains(service);
        const bool may = caller.connects &&
                         (health || kMay.at(service).contains(caller.what));
        for (const Method& method : methods) {
          SCOPED_TRACE(absl::StrCat(method.path, " with ", caller.what));
          // A stream that is let in waits for more than nothing.
          const grpc::Status status = CallWithNothing(
              channel, method.path,
              std::chrono::milliseconds(may && method.streams ? 200 : 20'000));
          ++calls;
          const StatusCode code = status.error_code();
          if (may) {
            EXPECT_NE(code, StatusCode::PERMISSION_DENIED)
                << status.error_message();
            EXPECT_NE(code, StatusCode::UNAUTHENTICATED)
                << status.error_message();
            EXPECT_NE(code, StatusCode::UNAVAILABLE) << status.error_message();
          } else if (!caller.connects) {
            EXPECT_EQ(code, StatusCode::UNAVAILABLE) << status.error_message();
          } else {
            EXPECT_EQ(code, caller.has_role ? StatusCode::PERMISSION_DENIED
                                            : StatusCode::UNAUTHENTICATED)
                << status.error_message();
          }
        }
      }
    }
  }
  RecordProperty("calls", calls);
  EXPECT_GT(calls, 200);

  // All that was of no use to strangers serves the cluster.
  ExpectServes();
}

TEST_F(ClusterTlsTest, AWorkerSpeaksForItselfAlone) {
  ASSERT_NO_FATAL_FAILURE(Start());
  v1::RegisterRequest registration;
  v1::WorkerHello* const hello = registration.mutable_hello();
  hello->mutable_worker()->set_worker_id("prefill-0");
  hello->mutable_worker()->set_incarnation(std::string(16, 'x'));
  hello->mutable_worker()->set_endpoint("localhost:1");
  hello->set_role(v1::WORKER_ROLE_PREFILL);
  hello->set_model("another, for which it is refused");
  hello->set_protocol_min(1);
  hello->set_protocol_max(1);
  hello->set_max_model_len(16);
  hello->set_block_size(16);
  hello->set_num_blocks(1);
  hello->set_max_num_seqs(1);
  v1::LinkRequest link;
  *link.mutable_hello()->mutable_sender() = hello->worker();
  link.mutable_hello()->set_protocol_min(1);
  link.mutable_hello()->set_protocol_max(1);
  link.mutable_hello()->set_receiver_incarnation("of no process");
  struct Case {
    const char* certificate;
    StatusCode registers, links;
  };
  for (const Case& c : {
           // Refused for what it says, and not for who says it.
           Case{"prefill/prefill-0", StatusCode::FAILED_PRECONDITION,
                StatusCode::FAILED_PRECONDITION},
           Case{"prefill", StatusCode::FAILED_PRECONDITION,
                StatusCode::FAILED_PRECONDITION},
           Case{"prefill/prefill-1", StatusCode::PERMISSION_DENIED,
                StatusCode::PERMISSION_DENIED},
           Case{"decode/prefill-0", StatusCode::PERMISSION_DENIED,
                StatusCode::PERMISSION_DENIED},
       }) {
    SCOPED_TRACE(c.certificate);
    const rpc::Credentials tls = As(c.certificate);
    grpc::ClientContext registering, linking;
    Cluster::SetDeadline(&registering);
    Cluster::SetDeadline(&linking);
    const auto registry =
        v1::RegistryService::NewStub(Dial(cluster_->internal_port(), tls));
    const auto lease = registry->Register(&registering);
    lease->Write(registration);
    v1::RegisterResponse welcome;
    EXPECT_FALSE(lease->Read(&welcome));
    EXPECT_EQ(lease->Finish().error_code(), c.registers);
    const auto handoff = v1::HandoffService::NewStub(
        Dial(cluster_->worker_port("decode-0"), tls));
    const auto stream = handoff->Link(&linking);
    stream->Write(link);
    v1::LinkResponse answer;
    while (stream->Read(&answer)) EXPECT_FALSE(answer.has_welcome());
    EXPECT_EQ(stream->Finish().error_code(), c.links);
  }
  // The rightful one lost neither its lease nor its link.
  ExpectServes();
}

TEST_F(ClusterTlsTest, CertificatesAndTheAuthorityChangeUnderLoad) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const Authority next("next");
  const std::string both = ours_.cert() + next.cert();
  const auto renew = [&](const Authority& authority, int serial) {
    files_.Renew(authority, serial);
    EXPECT_TRUE(Until([&] { return AllPortsShow(serial); })) << serial;
  };

  // The first authority is trusted until the one, the next from the other on.
  std::atomic<bool> leaving = false, arrived = false, stop = false;
  std::atomic<int> served = 0, failed = 0;
  std::vector<std::thread> clients;
  for (int i = 0; i < 2; ++i) {
    clients.emplace_back([&] {
      v1::GenerateRequest request = TextRequest("Once upon a time", 24);
      request.set_placement(v1::PLACEMENT_SPLIT);
      while (!stop) {
        ++(cluster_->Generate(request).status.ok() ? served : failed);
      }
    });
  }
  // A connection for each call, with certificates of both in turn.
  clients.emplace_back([&] {
    for (int i = 0; !stop; ++i) {
      const bool first = i % 2 == 0, trusted = arrived;
      rpc::Credentials tls =
          With((first ? ours_ : next).Issue(3, {"spiffe://tandem/client"}));
      tls.ca = both;
      grpc::ClientContext context;
      Cluster::SetDeadline(&context);
      v1::ListModelsResponse models;
      const bool ok =
          v1::InferenceService::NewStub(Dial(cluster_->grpc_port(), tls))
              ->ListModels(&context, {}, &models)
              .ok();
      if (first ? !leaving : trusted) ++(ok ? served : failed);
    }
  });
  renew(ours_, 10);
  EXPECT_TRUE(files_.Trust(*cluster_, both));
  arrived = true;
  renew(next, 11);
  leaving = true;
  EXPECT_TRUE(files_.Trust(*cluster_, next.cert()));

  // What cannot be used, or would be refused, changes nothing.
  cluster_->ExpectErrors("certificate not reloaded");
  const int refused = Count("router", "certificate not reloaded");
  files_.Write("router.key", ours_.Issue(12).key);
  EXPECT_TRUE(Until(
      [&] { return Count("router", "certificate not reloaded") > refused; }));
  files_.Put("router", next.Issue(13, {"spiffe://tandem/prefill"}));
  EXPECT_TRUE(Until(
      [&] { return Count("router", "the certificate is of prefill") > 0; }));
  files_.Put("router", next.Issue(15, {"spiffe://tandem/router"}, -60));
  EXPECT_TRUE(Until([&] { return Count("router", "has expired at") > 0; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  EXPECT_TRUE(AllPortsShow(11));
  const int reloaded = Count("router", "certificate reloaded");
  files_.Put("router", next.Issue(14, {"spiffe://tandem/router"}));
  EXPECT_TRUE(Until(
      [&] { return Count("router", "certificate reloaded") > reloaded; }));
  stop = true;
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(failed, 0) << "of " << served;
  EXPECT_GT(served, 50);

  // A process that knows the new authority alone finds the others, and they it.
  cluster_->Kill("decode-0");
  ASSERT_TRUE(cluster_->Restart("decode-0").ok());
  EXPECT_TRUE(cluster_->WaitUntilReady(1, 1, std::chrono::seconds(30)).ok());
  ExpectServes();
}

}  // namespace
}  // namespace tandem::integration
