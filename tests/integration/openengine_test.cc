// SPDX-License-Identifier: Apache-2.0
// OpenEngine's services of a cluster of real processes: the same tokens as
// Generate's, and keys, limits and ends as everywhere.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/random.h"
#include "common/rpc/status.h"
#include "openengine/v1/control.grpc.pb.h"
#include "openengine/v1/inference.grpc.pb.h"
#include "router/tenants/key_file.h"
#include "tests/integration/cluster.h"

namespace tandem::integration {
namespace {

namespace oe = ::openengine::v1;
using std::chrono::seconds;

struct OpenEngineOutcome {
  absl::Status status;
  std::string text[2];
  std::vector<oe::TokenInfo> tokens[2];  // by output
  oe::PromptOutput prompt;
  oe::GenerateResponse last;
  int finished = 0;
};

class OpenEngineTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    std::ofstream(KeysFile()) << Line("acme", &acme_) << Line("zen", &zen_);
    cluster_ = std::make_unique<Cluster>(
        ClusterOptions{.router_arguments = {"--api-keys-file", KeysFile()}});
    const absl::Status status = cluster_->Start();
    ASSERT_TRUE(status.ok()) << status;
  }
  static void TearDownTestSuite() {
    cluster_.reset();
    std::filesystem::remove(KeysFile());
  }
  static std::string KeysFile() {
    return absl::StrCat(testing::TempDir(), "/tandem-openengine-keys-",
                        getpid());
  }

  void SetUp() override {
    const auto channel = cluster_->Channel(cluster_->grpc_port());
    inference_ = oe::Inference::NewStub(channel);
    control_ = oe::Control::NewStub(channel);
    ASSERT_TRUE(Generate(acme_, Ask("Once upon a time", 4)).status.ok());
    ASSERT_EQ(cluster_->WhatIsLeft(), "");
  }
  void TearDown() override { EXPECT_EQ(cluster_->WhatIsLeft("sk-tandem"), ""); }

  static std::string Line(const std::string& tenant, std::string* key) {
    SystemRandom random;
    *key = router::NewKey(&random);
    return router::FormatKeyEntry(
               {.tenant = tenant, .digest = router::DigestOf(*key)}, {}) +
           "\n";
  }
  static std::unique_ptr<grpc::ClientContext> Context(
      const std::string& key, std::chrono::milliseconds limit = seconds(60)) {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + limit);
    context->AddMetadata("authorization", "Bearer " + key);
    return context;
  }
  // Greedy, and as long as it may be.
  static oe::GenerateRequest Ask(const std::string& prompt, int max_tokens) {
    oe::GenerateRequest request;
    request.set_prompt(prompt);
    request.mutable_sampling()->set_temperature(0);
    request.mutable_stopping()->set_max_tokens(
        static_cast<uint32_t>(max_tokens));
    request.mutable_stopping()->set_ignore_eos(true);
    return request;
  }
  OpenEngineOutcome Generate(const std::string& key,
                             const oe::GenerateRequest& request) {
    const auto context = Context(key);
    return Read(context.get(), request);
  }
  OpenEngineOutcome Read(grpc::ClientContext* context,
                         const oe::GenerateRequest& request) {
    OpenEngineOutcome answer;
    const auto reader = inference_->Generate(context, request);
    oe::GenerateResponse response;
    while (reader->Read(&response)) {
      answer.last = response;
      if (response.has_prompt()) answer.prompt = response.prompt();
      if (response.has_finished()) ++answer.finished;
      if (!response.has_token()) continue;
      const uint32_t output = response.token().output_index();
      answer.text[output] += response.token().text();
      for (const oe::TokenInfo& token : response.token().tokens()) {
        answer.tokens[output].push_back(token);
      }
    }
    answer.status = rpc::FromGrpc(reader->Finish(), *context);
    return answer;
  }
  Outcome Ours(const v1::GenerateRequest& request) {
    return cluster_->Generate(request, Context(acme_).get());
  }
  template <typename Request, typename Response>
  Response Ask(grpc::Status (oe::Control::Stub::*method)(grpc::ClientContext*,
                                                         const Request&,
                                                         Response*),
               const Request& request, absl::Status* status,
               const std::string& key) {
    Response response;
    const auto context = Context(key);
    *status = rpc::FromGrpc(
        (control_.get()->*method)(context.get(), request, &response));
    return response;
  }
  // A stream that has begun, and goes on for long.
  std::unique_ptr<grpc::ClientReader<oe::GenerateResponse>> Begin(
      grpc::ClientContext* context, const std::string& id, int outputs = 1,
      bool in_time = true) {
    oe::GenerateRequest request = Ask("Once upon a time", 900);
    request.set_request_id(id);
    request.mutable_sampling()->set_num_sequences(
        static_cast<uint32_t>(outputs));
    if (outputs > 1) request.mutable_sampling()->set_temperature(1);
    auto reader = inference_->Generate(context, request);
    oe::GenerateResponse response;
    const bool heard = reader->Read(&response);
    EXPECT_TRUE(heard || !in_time);
    if (heard) {
      EXPECT_EQ(response.request_id(), id);
    }
    return reader;
  }
  static oe::GenerateResponse Last(
      grpc::ClientReader<oe::GenerateResponse>* reader, absl::Status* status) {
    oe::GenerateResponse response, last;
    while (reader->Read(&response)) last = response;
    *status = rpc::FromGrpc(reader->Finish());
    return last;
  }

  double Succeeded() {
    for (const auto& [name, value] : cluster_->Metrics("router")) {
      if (name.starts_with("tandem_requests_total") &&
          name.find("api=\"openengine\"") != std::string::npos &&
          name.find("outcome=\"ok\"") != std::string::npos) {
        return value;
      }
    }
    return -1;
  }

  // One for all, since nothing may be left of any.
  static inline std::string acme_, zen_;
  static inline std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<oe::Inference::Stub> inference_;
  std::unique_ptr<oe::Control::Stub> control_;
};

TEST_F(OpenEngineTest, TheSameTokensAsGenerates) {
  constexpr char kPrompt[] = "Mia found a red ball.";
  const double before = Succeeded();
  oe::GenerateRequest request = Ask(kPrompt, 16);
  request.mutable_response()->set_return_prompt_logprobs(true);
  request.mutable_response()->mutable_output_candidates()->set_top_n(2);
  const OpenEngineOutcome answer = Generate(acme_, request);
  ASSERT_TRUE(answer.status.ok()) << answer.status;

  v1::GenerateRequest same = TextRequest(kPrompt, 16);
  same.mutable_stopping()->set_ignore_eos(true);
  same.mutable_output()->set_logprobs(2);
  same.mutable_output()->set_prompt_logprobs(0);
  v1::GenerateOnceResponse ours;
  ASSERT_TRUE(
      cluster_->Client()->GenerateOnce(Context(acme_).get(), same, &ours).ok());
  const v1::GeneratedSequence& sequence = ours.sequences(0);
  EXPECT_EQ(answer.text[0], sequence.text());
  ASSERT_EQ(answer.tokens[0].size(), 16u);
  for (int i = 0; i < 16; ++i) {
    const oe::TokenInfo& token = answer.tokens[0][static_cast<size_t>(i)];
    const v1::TokenLogprob& record = sequence.logprobs(i);
    EXPECT_EQ(token.token_id(), sequence.token_ids(i));
    EXPECT_EQ(token.logprob(), double{record.logprob()});
    EXPECT_EQ(token.rank(), 1u);  // greedy
    ASSERT_EQ(token.candidates_size(), 2);
    EXPECT_EQ(token.candidates(1).token_id(), record.top(1).token_id());
    EXPECT_EQ(token.candidates(1).logprob(), double{record.top(1).logprob()});
  }
  ASSERT_EQ(answer.prompt.tokens_size(), ours.prompt_logprobs_size());
  EXPECT_FALSE(answer.prompt.tokens(0).has_logprob());
  for (int i = 1; i < ours.prompt_logprobs_size(); ++i) {
    EXPECT_EQ(answer.prompt.tokens(i).token_id(),
              ours.prompt_logprobs(i).token_id());
    EXPECT_EQ(answer.prompt.tokens(i).logprob(),
              double{ours.prompt_logprobs(i).logprob()});
  }
  EXPECT_EQ(answer.last.finished().reason(), oe::FINISH_REASON_LENGTH);
  EXPECT_EQ(answer.last.usage().completion_tokens(), 16u);
  EXPECT_EQ(answer.last.usage().prompt_tokens(),
            static_cast<uint32_t>(ours.prompt_logprobs_size()));

  // Drawn at random, of several; the prompt as ids.
  oe::GenerateRequest drawn;
  for (const oe::TokenInfo& token : answer.prompt.tokens()) {
    drawn.mutable_token_ids()->add_ids(token.token_id());
  }
  drawn.mutable_sampling()->set_temperature(1.0);
  drawn.mutable_sampling()->set_seed(7);
  drawn.mutable_sampling()->set_num_sequences(2);
  drawn.mutable_stopping()->set_max_tokens(12);
  const OpenEngineOutcome two = Generate(acme_, drawn);
  v1::GenerateRequest seeded;
  *seeded.mutable_token_ids()->mutable_ids() = drawn.token_ids().ids();
  seeded.mutable_sampling()->set_temperature(1.0f);
  seeded.mutable_sampling()->set_seed(7);
  seeded.mutable_sampling()->set_n(2);
  seeded.mutable_stopping()->set_max_tokens(12);
  const Outcome both = Ours(seeded);
  ASSERT_TRUE(both.status.ok() && two.status.ok()) << both.status << two.status;
  EXPECT_EQ(two.text[0], both.sequences.at(0).text());
  EXPECT_EQ(two.text[1], both.sequences.at(1).text());
  EXPECT_EQ(two.finished, 2);
  EXPECT_EQ(two.last.usage().completion_tokens(),
            two.tokens[0].size() + two.tokens[1].size());

  // A stop string, and what a grammar leaves.
  oe::GenerateRequest stopped = Ask(kPrompt, 16);
  const std::string stop = answer.text[0].substr(answer.text[0].size() / 2, 3);
  stopped.mutable_stopping()->add_conditions()->set_stop_text(stop);
  const OpenEngineOutcome cut = Generate(acme_, stopped);
  EXPECT_EQ(cut.text[0], answer.text[0].substr(0, answer.text[0].find(stop)));
  EXPECT_EQ(cut.last.finished().reason(), oe::FINISH_REASON_STOP);
  EXPECT_EQ(cut.last.finished().stop_match().stop_text(), stop);
  oe::GenerateRequest guided = Ask(kPrompt, 16);
  guided.mutable_stopping()->set_ignore_eos(false);
  guided.mutable_guided()->mutable_choice()->add_choices("yes");
  EXPECT_EQ(Generate(acme_, guided).text[0], "yes");

  EXPECT_EQ(Succeeded() - before, 5);  // each output is one
}

TEST_F(OpenEngineTest, RefusalsAreStatusesWithTheirReason) {
  const auto refused = [&](const oe::GenerateRequest& request) {
    const OpenEngineOutcome answer = Generate(acme_, request);
    EXPECT_FALSE(answer.last.has_usage());
    return answer.status;
  };
  oe::GenerateRequest request = Ask("Once", 4);
  request.mutable_sampling()->set_top_p(0);
  EXPECT_EQ(refused(request).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorMetadata(refused(request))["field"], "sampling.top_p");
  request = Ask("Once", 4);
  request.set_model("another");
  EXPECT_EQ(ErrorReason(refused(request)), "MODEL_NOT_FOUND");
  request = Ask("Once", 4);
  request.mutable_kv()->mutable_session();
  EXPECT_EQ(ErrorReason(refused(request)), "ROLE_MISMATCH");
  request = Ask("Once", 4);
  request.set_lora_name("verse");
  EXPECT_EQ(refused(request).code(), absl::StatusCode::kNotFound);
  const auto context = Context(acme_);
  context->AddMetadata("openengine-priority", "urgent");
  EXPECT_EQ(Read(context.get(), Ask("Once", 4)).status.code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Generate("sk-tandem-none", Ask("Once", 4)).status.code(),
            absl::StatusCode::kUnauthenticated);
}

TEST_F(OpenEngineTest, EveryWayToEndOneFreesAll) {
  absl::Status status;
  auto context = Context(acme_);
  auto reader = Begin(context.get(), "cancelled");
  context->TryCancel();
  Last(reader.get(), &status);
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(cluster_->WhatIsLeft(), "");

  context = Context(acme_, std::chrono::milliseconds(800));
  // On a busy machine it may pass before the first answer.
  reader = Begin(context.get(), "late", /*outputs=*/32, /*in_time=*/false);
  Last(reader.get(), &status);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(cluster_->WhatIsLeft(), "");

  context = Context(acme_);
  reader = Begin(context.get(), "aborted");
  oe::AbortRequest abort;
  Ask(&oe::Control::Stub::Abort, abort, &status, acme_);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  abort.mutable_kv_session();
  Ask(&oe::Control::Stub::Abort, abort, &status, acme_);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  abort.set_request_id("aborted");
  Ask(&oe::Control::Stub::Abort, abort, &status, zen_);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << "another's";
  EXPECT_EQ(Ask(&oe::Control::Stub::Abort, abort, &status, acme_).status(),
            oe::ABORT_STATUS_ABORTED);
  EXPECT_TRUE(status.ok()) << status;
  oe::GenerateResponse last = Last(reader.get(), &status);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(last.finished().reason(), oe::FINISH_REASON_CANCELLED);
  EXPECT_GE(last.usage().completion_tokens(), 1u);

  context = Context(zen_);
  reader = Begin(context.get(), "one of all");
  abort.mutable_all_requests();
  Ask(&oe::Control::Stub::Abort, abort, &status, acme_);  // has none
  EXPECT_EQ(Ask(&oe::Control::Stub::Abort, abort, &status, zen_).message(),
            "1 requests aborted");
  last = Last(reader.get(), &status);
  EXPECT_EQ(last.finished().reason(), oe::FINISH_REASON_CANCELLED);
}

TEST_F(OpenEngineTest, WhatThereIsIsToldAsItIs) {
  absl::Status status;
  const auto state = cluster_->State();
  ASSERT_TRUE(state.ok());
  uint64_t blocks = 0;
  for (const v1::WorkerStatus& worker : state->workers()) {
    if (worker.hello().role() == v1::WORKER_ROLE_DECODE) {
      blocks += static_cast<uint64_t>(worker.hello().num_blocks());
    }
  }
  const oe::ServerInfo server =
      Ask(&oe::Control::Stub::GetServerInfo, {}, &status, acme_);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_THAT(server.supported_models(), testing::ElementsAre(state->model()));
  EXPECT_EQ(server.capacity().total_kv_blocks(), blocks);
  oe::GetModelInfoRequest which;
  Ask(&oe::Control::Stub::GetModelInfo, which, &status, acme_);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  which.set_model("another");
  Ask(&oe::Control::Stub::GetModelInfo, which, &status, acme_);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  which.set_model(state->model());
  const oe::ModelInfo model =
      Ask(&oe::Control::Stub::GetModelInfo, which, &status, acme_);
  v1::GetModelResponse ours;
  ASSERT_TRUE(
      cluster_->Client()->GetModel(Context(acme_).get(), {}, &ours).ok());
  EXPECT_EQ(model.max_context_length(),
            static_cast<uint32_t>(ours.model().context_length()));
  EXPECT_FALSE(model.supports_lora());

  const oe::LoadInfo idle =
      Ask(&oe::Control::Stub::GetLoad, {}, &status, acme_);
  EXPECT_EQ(idle.total_kv_blocks(), blocks);
  EXPECT_EQ(idle.running_requests(), 0u);
  EXPECT_EQ(idle.instance_id(), server.instance_id());
  const auto context = Context(acme_);
  const auto reader = Begin(context.get(), "running");
  EXPECT_EQ(
      Ask(&oe::Control::Stub::GetLoad, {}, &status, acme_).running_requests(),
      1u);
  context->TryCancel();
  Last(reader.get(), &status);

  oe::HealthRequest probe;
  probe.set_include_inference_probe(true);
  probe.set_role(oe::ENGINE_ROLE_AGGREGATED);
  const oe::HealthResponse health =
      Ask(&oe::Control::Stub::Health, probe, &status, acme_);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(health.state(), oe::HEALTH_STATE_READY)
      << health.ShortDebugString();
  ASSERT_EQ(health.checks_size(), 5);
  EXPECT_EQ(health.checks(4).name(), "inference_probe");
  probe.set_role(oe::ENGINE_ROLE_DECODE);
  probe.set_include_inference_probe(false);
  EXPECT_EQ(Ask(&oe::Control::Stub::Health, probe, &status, acme_).state(),
            oe::HEALTH_STATE_NOT_READY);

  Ask(&oe::Control::Stub::ListLoras, {}, &status, acme_);
  EXPECT_EQ(ErrorReason(status), "LORA_UPDATING_OFF");
  EXPECT_EQ(Ask(&oe::Control::Stub::GetKvEventSources, {}, &status, acme_)
                .sources_size(),
            0);
  EXPECT_TRUE(status.ok()) << status;
  const auto events_context = Context(acme_);
  const auto events = control_->SubscribeKvEvents(events_context.get(), {});
  oe::SubscribeKvEventsResponse event;
  EXPECT_FALSE(events->Read(&event));
  EXPECT_EQ(events->Finish().error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

}  // namespace
}  // namespace tandem::integration
