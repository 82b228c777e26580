// SPDX-License-Identifier: Apache-2.0
// From a caller's trace headers to the spans that a collector gets.

#include <grpcpp/server_builder.h>

#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "common/error.h"
#include "common/metrics.h"
#include "common/thread_loop.h"
#include "common/trace_context.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "opentelemetry/trace.grpc.pb.h"
#include "router/telemetry/metrics.h"
#include "router/telemetry/otlp_exporter.h"
#include "router/telemetry/request_trace.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kParent[] =
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

// The standard's own examples and rules, section 3.2.
TEST(TraceContextTest, ParentsAreReadAsTheStandardSays) {
  const auto good = ParseTraceContext(kParent, "congo=t61rcWkgMzE");
  ASSERT_TRUE(good);
  EXPECT_EQ(absl::BytesToHexString(good->trace_id),
            "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(absl::BytesToHexString(good->span_id), "b7ad6b7169203331");
  EXPECT_TRUE(good->sampled);
  EXPECT_EQ(good->state, "congo=t61rcWkgMzE");
  EXPECT_EQ(good->Traceparent(), kParent);

  std::string text = kParent;
  text.back() = '2';  // other flags mean nothing here
  ASSERT_TRUE(ParseTraceContext(text, ""));
  EXPECT_FALSE(ParseTraceContext(text, "")->sampled);
  text.replace(0, 2, "cc");  // a later version, with and without more fields
  EXPECT_TRUE(ParseTraceContext(text, ""));
  EXPECT_TRUE(ParseTraceContext(text + "-what", ""));
  EXPECT_FALSE(ParseTraceContext(text + "what", ""));

  EXPECT_EQ(ParseTraceContext(kParent, std::string(513, 'x'))->state, "");
  EXPECT_EQ(ParseTraceContext(kParent, "a=\n")->state, "");
}

TEST(RouterMetricsTest, AFirstMessageMayBringSeveralTokens) {
  Metrics metrics("router", "m");
  RouterMetrics exported(&metrics, Policy::kRoundRobin);
  exported.OnFirstToken(3, absl::Seconds(1));
  exported.OnTokens(2, absl::Seconds(1));
  EXPECT_THAT(metrics.Text(),
              HasSubstr("tandem_generation_tokens_total{model_name=\"m\","
                        "role=\"router\"} 5\n"));
}

TEST(RouterMetricsTest, QueuesAndRefusalsAreCounted) {
  Metrics metrics("router", "m");
  RouterMetrics exported(&metrics, Policy::kRoundRobin);
  v1::GetClusterStateResponse state;
  state.mutable_requests()->set_total(7);
  state.mutable_requests()->set_queued(3);
  state.mutable_requests()->set_queued_tokens(4567);
  exported.Update(state);
  exported.OnInvalid(Api::kOpenEngine, absl::UnimplementedError(""));
  // Not all that is exhausted is the cluster.
  for (const char* const reason :
       {"QUEUE_FULL", "SLOW_CLIENT", "ANSWER_TOO_LARGE", "RATE_LIMITED"}) {
    exported.OnInvalid(
        Api::kGrpc,
        MakeError(absl::StatusCode::kResourceExhausted, reason, ""));
  }
  const std::string text = metrics.Text();
  for (const char* line :
       {"tandem_num_requests_running{model_name=\"m\",role=\"router\"} 4\n",
        "tandem_num_requests_waiting{model_name=\"m\",role=\"router\"} 3\n",
        "tandem_num_prompt_tokens_waiting{model_name=\"m\",role=\"router\"} "
        "4567\n",
        "{model_name=\"m\",role=\"router\",api=\"openengine\","
        "outcome=\"invalid\"} 1\n",
        "api=\"grpc\",outcome=\"overload\"} 1\n",
        "api=\"grpc\",outcome=\"slow_client\"} 1\n",
        "api=\"grpc\",outcome=\"invalid\"} 1\n",
        "api=\"grpc\",outcome=\"rate_limited\"} 1\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST(TraceContextTest, WrongParentsBeginNoTrace) {
  const std::string good = kParent;
  std::vector<std::string> wrong = {"", good + "-", good + "0",
                                    good.substr(0, 54), "0" + good};
  const auto with = [&](size_t at, const std::string& what) {
    std::string text = good;
    text.replace(at, what.size(), what);
    wrong.push_back(text);
  };
  with(0, "ff");
  with(3, "A");
  with(3, std::string(32, '0'));
  with(36, std::string(16, '0'));
  with(53, "g");
  with(2, "_");
  with(35, "_");
  with(52, "_");
  for (const std::string& text : wrong) {
    EXPECT_FALSE(ParseTraceContext(text, "a=b")) << text;
  }
}

struct Kept final : SpanSink {
  void Export(std::vector<otlp::Span> more) override {
    for (otlp::Span& span : more) spans.push_back(std::move(span));
  }
  std::vector<otlp::Span> spans;
};

std::string Value(const otlp::AnyValue& value) {
  switch (value.value_case()) {
    case otlp::AnyValue::kStringValue:
      return value.string_value();
    case otlp::AnyValue::kIntValue:
      return absl::StrCat(value.int_value());
    case otlp::AnyValue::kDoubleValue:
      return absl::StrCat(value.double_value());
    case otlp::AnyValue::kArrayValue:
      return Value(value.array_value().values(0));
    default:
      return "?";
  }
}

std::map<std::string, std::string> Attributes(const otlp::Span& span) {
  std::map<std::string, std::string> all;
  for (const otlp::KeyValue& entry : span.attributes()) {
    all[entry.key()] = Value(entry.value());
  }
  return all;
}

class RequestTraceTest : public testing::Test {
 protected:
  RequestTraceTest() {
    w.Prefill("p0");
    w.Decode("d0");
    w.Settle();
  }
  AdmittedRequest Ask(bool sampled = true) {
    AdmittedRequest admitted = World::Ask();
    admitted.effective.chat = true;
    admitted.effective.request_id = "mine";
    admitted.trace = *ParseTraceContext(kParent, "a=b");
    admitted.trace.sampled = sampled;
    return admitted;
  }
  // Milliseconds since the request's span began, to those at its end.
  std::string When(const std::string& name, int nth = 0) const {
    for (const otlp::Span& span : kept.spans) {
      if (span.name() != name || nth-- > 0) continue;
      const uint64_t zero = kept.spans[0].start_time_unix_nano();
      return absl::StrCat((span.start_time_unix_nano() - zero) / 1000000, "-",
                          (span.end_time_unix_nano() - zero) / 1000000);
    }
    return "none";
  }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const otlp::Span& span : kept.spans) names.push_back(span.name());
    return names;
  }

  Kept kept;
  World w{{}, &kept};
};

TEST_F(RequestTraceTest, SpansFollowARequestThroughItsWorkers) {
  w.Submit(Ask());
  w.RunFor(absl::Milliseconds(10));
  w.decodes[0].Say(World::Opened(1, "t"));
  w.RunFor(absl::Milliseconds(20));
  w.prefills[0].Say(World::Computing());
  w.prefills[0].Say(World::First(40, 1));
  w.decodes[0].Say(World::Started(1));
  w.RunFor(absl::Milliseconds(5));
  v1::PrefillResponse done = World::Done();
  done.mutable_done()->set_handoff_us(15000);
  w.prefills[0].Say(done);
  w.prefills[0].Break(absl::OkStatus());
  w.RunFor(absl::Milliseconds(25));
  w.decodes[0].Say(World::Tokens(41, {2, 3}));
  w.decodes[0].Say(World::Finished(v1::FINISH_REASON_STOP));

  EXPECT_THAT(Names(), ElementsAre("chat m", "queue", "place", "reserve",
                                   "prefill", "handoff", "decode"));
  EXPECT_EQ(When("chat m"), "0-60");
  EXPECT_EQ(When("reserve"), "0-10");
  EXPECT_EQ(When("prefill"), "10-30");
  EXPECT_EQ(When("handoff"), "20-35");
  EXPECT_EQ(When("decode"), "30-60");
  const otlp::Span& root = kept.spans[0];
  EXPECT_EQ(absl::BytesToHexString(root.parent_span_id()), "b7ad6b7169203331");
  EXPECT_EQ(root.kind(), otlp::Span::SPAN_KIND_SERVER);
  std::map<std::string, int> ids;
  for (const otlp::Span& span : kept.spans) {
    EXPECT_EQ(absl::BytesToHexString(span.trace_id()),
              "0af7651916cd43dd8448eb211c80319c");
    EXPECT_EQ(span.span_id().size(), 8u);
    EXPECT_EQ(++ids[span.span_id()], 1) << span.name();
    EXPECT_EQ(span.trace_state(), "a=b");
    if (&span != &root) {
      EXPECT_EQ(span.parent_span_id(), root.span_id());
    }
    EXPECT_EQ(span.status().code(), otlp::Status::STATUS_CODE_UNSET);
  }
  // On the wall's clock, not on the loop's, which starts anywhere.
  const absl::Time ended =
      absl::FromUnixNanos(static_cast<int64_t>(root.end_time_unix_nano()));
  EXPECT_LT(absl::AbsDuration(absl::Now() - ended), absl::Minutes(10));

  const auto attributes = Attributes(root);
  EXPECT_EQ(attributes.at("gen_ai.operation.name"), "chat");
  EXPECT_EQ(attributes.at("gen_ai.response.id"), "mine");
  EXPECT_EQ(attributes.at("gen_ai.request.max_tokens"), "8");
  EXPECT_EQ(attributes.at("gen_ai.request.seed"), "5");
  EXPECT_EQ(attributes.at("gen_ai.usage.input_tokens"), "40");
  EXPECT_EQ(attributes.at("gen_ai.usage.output_tokens"), "3");
  EXPECT_EQ(attributes.at("gen_ai.usage.cache_read.input_tokens"), "16");
  EXPECT_EQ(attributes.at("gen_ai.response.finish_reasons"), "stop");
  EXPECT_EQ(attributes.at("gen_ai.latency.time_to_first_token"), "0.03");
  EXPECT_EQ(attributes.at("tandem.decode_worker"), "d0");
  EXPECT_EQ(Attributes(kept.spans[4]).at("tandem.worker"), "p0");
  EXPECT_EQ(Attributes(kept.spans[5]).at("tandem.way"), "shm");

  // Workers are called as children of the request's span.
  ASSERT_EQ(w.traces.size(), 2u);
  for (const TraceContext& trace : w.traces) {
    EXPECT_EQ(trace.Traceparent(),
              absl::StrCat("00-0af7651916cd43dd8448eb211c80319c-",
                           absl::BytesToHexString(root.span_id()), "-01"));
    EXPECT_EQ(trace.state, "a=b");
  }
  EXPECT_EQ(w.ended[0].trace_id, "0af7651916cd43dd8448eb211c80319c");
}

TEST_F(RequestTraceTest, ALossIsAnEventAndWhatItCutShortAnError) {
  w.Decode("d1");
  w.Submit(Ask());
  w.PrefillAndCommit(1, 40, 1);
  w.RunFor(absl::Milliseconds(10));
  w.decodes.back().Break(absl::UnavailableError("reset"));
  w.RunFor(absl::Milliseconds(10));
  w.PrefillAndCommit(1, 41, 2);
  w.decodes.back().Say(World::Finished(v1::FINISH_REASON_LENGTH));
  ASSERT_EQ(kept.spans[0].events_size(), 1);
  EXPECT_EQ(kept.spans[0].events(0).name(), "retry");
  EXPECT_EQ(kept.spans[0].events(0).attributes(0).value().string_value(),
            "decode_lost");
  std::map<std::string, std::string> told;
  for (const auto& attribute : kept.spans[0].events(0).attributes()) {
    told[attribute.key()] = attribute.value().string_value();
  }
  EXPECT_EQ(told["tandem.stage"], "decoding");
  EXPECT_EQ(told["tandem.prefill_worker"], "p0");
  EXPECT_EQ(told["tandem.decode_worker"], w.decode_ids[0]);
  EXPECT_THAT(w.lost, ElementsAre(absl::StrCat("decode_lost decoding p0 ",
                                               w.decode_ids[0])));
  EXPECT_EQ(kept.spans[0].status().code(), otlp::Status::STATUS_CODE_UNSET);
  EXPECT_EQ(When("decode"), "0-10");
  EXPECT_NE(When("prefill", 1), "none");
  EXPECT_NE(When("decode", 1), "none");
  std::vector<std::string> failed;
  for (const otlp::Span& span : kept.spans) {
    if (span.status().code() == otlp::Status::STATUS_CODE_ERROR) {
      failed.push_back(span.name() + " " + span.status().message());
    }
  }
  EXPECT_THAT(failed, ElementsAre("decode UNAVAILABLE"));
}

TEST_F(RequestTraceTest, ARefusalAndAPreemptionWaitInTheQueue) {
  w.Submit(Ask());
  w.RunFor(absl::Milliseconds(10));
  w.decodes.back().Break(absl::ResourceExhaustedError("no blocks"));
  w.RunFor(absl::Milliseconds(100));
  ASSERT_EQ(w.decodes.size(), 2u);
  w.PrefillAndCommit(1, 40, 1);
  w.RunFor(absl::Milliseconds(10));
  w.decodes.back().Say(World::Dead(1, /*preempted=*/true));
  w.RunFor(absl::Milliseconds(30));
  w.PrefillAndCommit(2, 41, 2);
  w.decodes.back().Say(World::Finished(v1::FINISH_REASON_LENGTH));
  std::vector<std::string> phases;
  for (const otlp::Span& span : kept.spans) {
    EXPECT_EQ(span.status().code(), otlp::Status::STATUS_CODE_UNSET);
    if (span.name() == "place" || span.name() == "handoff") continue;
    phases.push_back(span.name());
  }
  EXPECT_THAT(phases,
              ElementsAre("chat m", "queue", "reserve", "queue", "reserve",
                          "prefill", "decode", "queue", "prefill", "decode"));
  EXPECT_EQ(When("reserve"), "0-10");
}

TEST_F(RequestTraceTest, AnErrorEndsTheRequestsSpan) {
  AdmittedRequest admitted = Ask();
  admitted.deadline = absl::Milliseconds(30);
  w.Submit(std::move(admitted));
  w.RunFor(absl::Milliseconds(100));
  EXPECT_THAT(Names(), ElementsAre("chat m", "queue", "place", "reserve"));
  EXPECT_EQ(When("chat m"), "0-30");
  EXPECT_EQ(kept.spans[0].status().code(), otlp::Status::STATUS_CODE_ERROR);
  EXPECT_EQ(Attributes(kept.spans[0]).at("error.type"), "DEADLINE");
  EXPECT_EQ(Attributes(kept.spans[3]).at("error.type"), "DEADLINE");
}

TEST_F(RequestTraceTest, WhatIsNotSampledIsPassedOnAsItCame) {
  ClientPipe* client = w.Submit(Ask(/*sampled=*/false));
  w.PrefillAndCommit(1, 40, 1);
  w.decodes[0].Say(World::Finished(v1::FINISH_REASON_LENGTH));
  EXPECT_TRUE(client->status.ok());
  EXPECT_THAT(kept.spans, IsEmpty());
  EXPECT_EQ(w.traces[0].Traceparent(),
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00");
}

// ---- To the collector.

otlp::KeyValue Entry(const std::string& key) {
  otlp::KeyValue entry;
  entry.set_key(key);
  return entry;
}

TEST(OtlpTest, BytesAreThoseOfTheOfficialPackage) {
  std::ifstream file(TANDEM_SOURCE_DIR "/tests/golden/otlp/export.bin",
                     std::ios::binary);
  const std::string official(std::istreambuf_iterator<char>(file), {});
  otlp::ExportTraceServiceRequest request;
  otlp::ResourceSpans* const resource = request.add_resource_spans();
  otlp::KeyValue entry = Entry("service.name");
  entry.mutable_value()->set_string_value("tandem");
  *resource->mutable_resource()->add_attributes() = entry;
  otlp::ScopeSpans* const scope = resource->add_scope_spans();
  scope->mutable_scope()->set_name("tandem");
  scope->mutable_scope()->set_version("1.2.3");
  otlp::Span* const span = scope->add_spans();
  for (int i = 0; i < 16; ++i) span->mutable_trace_id()->push_back(i);
  span->set_span_id(span->trace_id().substr(0, 8));
  span->set_trace_state("a=b");
  span->set_parent_span_id(span->trace_id().substr(8));
  span->set_name("chat tales");
  span->set_kind(otlp::Span::SPAN_KIND_SERVER);
  span->set_start_time_unix_nano(1);
  span->set_end_time_unix_nano(uint64_t{1} << 63);
  span->set_flags(1);
  entry = Entry("text");
  entry.mutable_value()->set_string_value("x");
  *span->add_attributes() = entry;
  entry = Entry("truth");
  entry.mutable_value()->set_bool_value(true);
  *span->add_attributes() = entry;
  entry = Entry("count");
  entry.mutable_value()->set_int_value(-7);
  *span->add_attributes() = entry;
  entry = Entry("share");
  entry.mutable_value()->set_double_value(0.5);
  *span->add_attributes() = entry;
  entry = Entry("reasons");
  entry.mutable_value()->mutable_array_value()->add_values()->set_string_value(
      "stop");
  *span->add_attributes() = entry;
  otlp::Span::Event* const event = span->add_events();
  event->set_time_unix_nano(3);
  event->set_name("retry");
  entry = Entry("cause");
  entry.mutable_value()->set_string_value("y");
  *event->add_attributes() = entry;
  span->mutable_status()->set_message("WORKER_LOST");
  span->mutable_status()->set_code(otlp::Status::STATUS_CODE_ERROR);
  EXPECT_EQ(absl::BytesToHexString(request.SerializeAsString()),
            absl::BytesToHexString(official));
}

class Collector final : public otlp::TraceService::Service {
 public:
  Collector() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(),
                             &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~Collector() override { server_->Shutdown(); }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

  grpc::Status Export(grpc::ServerContext* context,
                      const otlp::ExportTraceServiceRequest* request,
                      otlp::ExportTraceServiceResponse* response) override {
    const MutexLock lock(&mutex_);
    const auto key = context->client_metadata().find("x-key");
    if (key != context->client_metadata().end()) {
      key_ = std::string(key->second.data(), key->second.size());
    }
    requests_.push_back(*request);
    response->mutable_partial_success()->set_rejected_spans(reject_);
    return answer_;
  }
  std::vector<otlp::ExportTraceServiceRequest> requests() const {
    const MutexLock lock(&mutex_);
    return requests_;
  }
  std::string key() const {
    const MutexLock lock(&mutex_);
    return key_;
  }
  void set_answer(grpc::Status answer, int64_t reject) {
    const MutexLock lock(&mutex_);
    answer_ = std::move(answer);
    reject_ = reject;
  }

 private:
  mutable Mutex mutex_;
  std::vector<otlp::ExportTraceServiceRequest> requests_
      ABSL_GUARDED_BY(mutex_);
  std::string key_ ABSL_GUARDED_BY(mutex_);
  grpc::Status answer_ ABSL_GUARDED_BY(mutex_);
  int64_t reject_ ABSL_GUARDED_BY(mutex_) = 0;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

class OtlpExporterTest : public testing::Test {
 protected:
  void Begin(const OtlpOptions& options) {
    loop_.RunSync([&] {
      exporter_ = std::make_unique<OtlpExporter>(options, &loop_, &metrics_);
    });
  }
  ~OtlpExporterTest() override {
    loop_.RunSync([&] { exporter_.reset(); });
  }
  void Export(int count) {
    loop_.RunSync([&] {
      std::vector<otlp::Span> spans(count);
      for (otlp::Span& span : spans) span.set_name("s");
      exporter_->Export(std::move(spans));
    });
  }
  std::string Count(const std::string& outcome) {
    const std::string text = metrics_.Text();
    const size_t at = text.find("outcome=\"" + outcome + "\"");
    const size_t space = text.find("} ", at) + 2;
    return text.substr(space, text.find('\n', space) - space);
  }

  Metrics metrics_{"router", "m"};
  ThreadLoop loop_{"test"};
  std::unique_ptr<OtlpExporter> exporter_;
};

TEST_F(OtlpExporterTest, BatchesGoOutAndTheRestAtTheEnd) {
  Collector collector;
  Begin({.address = collector.address(),
         .headers = {{"x-key", "secret"}},
         .service_name = "here",
         .max_batch = 3,
         .interval = absl::Hours(1)});
  for (int i = 0; i < 8; ++i) Export(1);
  exporter_->Stop(absl::Seconds(20));
  int spans = 0;
  for (const auto& request : collector.requests()) {
    const otlp::ResourceSpans& resource = request.resource_spans(0);
    EXPECT_EQ(resource.resource().attributes(0).key(), "service.name");
    EXPECT_EQ(resource.resource().attributes(0).value().string_value(), "here");
    EXPECT_LE(resource.scope_spans(0).spans_size(), 3);
    spans += resource.scope_spans(0).spans_size();
  }
  EXPECT_EQ(spans, 8);
  EXPECT_EQ(collector.key(), "secret");
  EXPECT_EQ(Count("exported"), "8");
  EXPECT_EQ(Count("failed"), "0");
  EXPECT_EQ(Count("dropped"), "0");
}

TEST_F(OtlpExporterTest, WhatACollectorRefusesIsCountedAsFailed) {
  Collector collector;
  collector.set_answer(grpc::Status::OK, /*reject=*/2);
  Begin({.address = collector.address(), .max_batch = 5});
  Export(5);
  exporter_->Stop(absl::Seconds(20));
  EXPECT_EQ(Count("exported"), "3");
  EXPECT_EQ(Count("failed"), "2");
  collector.set_answer({grpc::StatusCode::UNAUTHENTICATED, "who?"}, 0);
  Export(5);
  exporter_->Stop(absl::Seconds(20));
  EXPECT_EQ(Count("failed"), "7");
}

TEST_F(OtlpExporterTest, WhatACollectorMayTakeLaterIsKeptForIt) {
  Collector collector;
  collector.set_answer({grpc::StatusCode::UNAVAILABLE, "restarting"}, 0);
  Begin({.address = collector.address(),
         .max_batch = 4,
         .max_queued = 9,
         .interval = absl::Milliseconds(1)});
  Export(5);
  while (collector.requests().size() < 3) absl::SleepFor(absl::Milliseconds(1));
  Export(4);
  Export(1);  // one too many
  collector.set_answer(grpc::Status::OK, 0);
  exporter_->Stop(absl::Seconds(20));
  EXPECT_EQ(Count("dropped"), "1");
  EXPECT_EQ(std::stoi(Count("exported")) + std::stoi(Count("failed")), 9);
  // But for those of a call that was under way when the end began.
  EXPECT_GE(std::stoi(Count("exported")), 5);
}

TEST_F(OtlpExporterTest, WithoutACollectorMemoryIsBoundedAndTheEndIsNear) {
  Begin({.address = "127.0.0.1:1",
         .max_batch = 4,
         .max_queued = 10,
         .timeout = absl::Hours(1)});
  loop_.RunSync([&] {  // no answer comes in between
    for (int i = 0; i < 50; ++i) {
      exporter_->Export(std::vector<otlp::Span>(1));
    }
  });
  exporter_->Stop(absl::Milliseconds(50));
  EXPECT_EQ(Count("exported"), "0");
  EXPECT_GE(std::stoi(Count("dropped")), 36);
  EXPECT_EQ(std::stoi(Count("dropped")) + std::stoi(Count("failed")), 50);
}

TEST(OtlpOptionsTest, EndpointsAreThoseOfOpenTelemetry) {
  for (const char* name :
       {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_SERVICE_NAME"}) {
    unsetenv(name);
  }
  EXPECT_EQ(ReadOtlpOptions("")->address, "");
  EXPECT_EQ(ReadOtlpOptions("http://collector:4317")->address,
            "collector:4317");
  EXPECT_EQ(ReadOtlpOptions("collector:4317/")->address, "collector:4317");
  for (const char* wrong :
       {"http://collector", "http://:4317", "http://c:4318/v1/traces", "c:"}) {
    const auto options = ReadOtlpOptions(wrong);
    EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(options.status().message()),
                AllOf(HasSubstr(wrong), HasSubstr("--otlp-traces-endpoint")));
  }
  setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:1", 1);
  EXPECT_EQ(ReadOtlpOptions("")->address, "all:1");
  setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:2", 1);
  setenv("OTEL_EXPORTER_OTLP_HEADERS", "Api-Key=a=b, other=c", 1);
  setenv("OTEL_SERVICE_NAME", "mine", 1);
  const auto options = ReadOtlpOptions("");
  EXPECT_EQ(options->address, "traces:2");
  EXPECT_EQ(options->service_name, "mine");
  EXPECT_THAT(options->headers,
              ElementsAre(std::pair<std::string, std::string>("api-key", "a=b"),
                          std::pair<std::string, std::string>("other", "c")));
  setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20a%3D=%zz", 1);
  EXPECT_EQ(ReadOtlpOptions("")->headers[0].second, "Basic a==%zz");
  for (const char* wrong : {"my key=1", "=x", "k=a%0Ab", "k=\xc3\xa4"}) {
    setenv("OTEL_EXPORTER_OTLP_HEADERS", wrong, 1);
    EXPECT_THAT(std::string(ReadOtlpOptions("c:1").status().message()),
                HasSubstr("OTEL_EXPORTER_OTLP_HEADERS"))
        << wrong;
  }
  unsetenv("OTEL_EXPORTER_OTLP_HEADERS");
  // Set for all programs of a platform: this one starts all the same.
  setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://c:4318/v1/traces", 1);
  EXPECT_EQ(ReadOtlpOptions("")->address, "");
  setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://c:4317", 1);
  for (const auto& [name, value] :
       {std::pair("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        std::pair("OTEL_TRACES_EXPORTER", "none"),
        std::pair("OTEL_SDK_DISABLED", "true")}) {
    setenv(name, value, 1);
    EXPECT_EQ(ReadOtlpOptions("")->address, "") << name;
    unsetenv(name);
  }
  EXPECT_EQ(ReadOtlpOptions("")->address, "c:4317");
  setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere", 1);
  EXPECT_THAT(std::string(ReadOtlpOptions("https://c:1").status().message()),
              AllOf(HasSubstr("/nowhere"), Not(HasSubstr("lacks"))));
  unsetenv("OTEL_EXPORTER_OTLP_CERTIFICATE");
}

}  // namespace
}  // namespace tandem::router
