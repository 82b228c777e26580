// SPDX-License-Identifier: Apache-2.0
#include "router/telemetry/metrics.h"

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "common/error.h"
#include "common/log.h"
#include "common/thread_loop.h"

namespace tandem::router {
namespace {

constexpr int64_t kLongestPrompt = 1 << 20;
// Names come from the operator's file; more than these share one series.
constexpr size_t kMaxTenantSeries = 256;
const Buckets kRouterStageBuckets = {1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4,
                                     2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2,
                                     5e-2, 0.1,  0.2,  0.5,  1,    2,    5};

absl::Duration ToDuration(const google::protobuf::Duration& value) {
  return absl::Seconds(value.seconds()) + absl::Nanoseconds(value.nanos());
}

double Seconds(const google::protobuf::Duration& value) {
  return absl::ToDoubleSeconds(ToDuration(value));
}

// Of a cluster that is full, and of a client that is at fault.
std::string_view ExhaustedOutcome(const std::string& reason) {
  return reason == "RATE_LIMITED"       ? "rate_limited"
         : reason == "SLOW_CLIENT"      ? "slow_client"
         : reason == "ANSWER_TOO_LARGE" ? "invalid"
                                        : "overload";
}

std::string_view Outcome(const absl::Status& status, bool client_gone) {
  if (client_gone && !absl::IsDeadlineExceeded(status)) return "cancelled";
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return "ok";
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:
      return "invalid";
    case absl::StatusCode::kNotFound:
      return "not_found";
    case absl::StatusCode::kResourceExhausted:
      return ExhaustedOutcome(ErrorReason(status));
    case absl::StatusCode::kUnauthenticated:
      return "unauthenticated";
    case absl::StatusCode::kUnavailable:
      return "unavailable";
    case absl::StatusCode::kCancelled:
      return "cancelled";
    case absl::StatusCode::kDeadlineExceeded:
      return "deadline";
    default:
      return "internal";
  }
}

std::string_view FinishName(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_STOP:
      return "stop";
    case v1::FINISH_REASON_LENGTH:
      return "length";
    case v1::FINISH_REASON_TIME_LIMIT:
      return "time_limit";
    case v1::FINISH_REASON_CANCELLED:
      return "cancelled";
    case v1::FINISH_REASON_TOOL_CALLS:
      return "tool_calls";
    default:
      return "other";
  }
}

Histogram& RequestTime(Metrics* metrics, const char* name, const char* help) {
  return metrics->AddHistogram(name, help, kRequestTimeBuckets);
}

}  // namespace

RouterMetrics::RouterMetrics(Metrics* m, Policy policy)
    : metrics_(m),
      finished_(m->AddCounters("tandem_requests_finished_total",
                               "Requests that ended well", "finish_reason", 8)),
      placements_(m->AddCounters(
          "tandem_router_placements_total", "Requests placed on workers",
          "path", 2, {{"policy", std::string(PolicyName(policy))}})),
      registrations_(m->AddCounters("tandem_router_registrations_total",
                                    "Workers that registered", "outcome", 2)),
      pairs_avoided_(m->AddCounters(
          "tandem_router_pairs_avoided_total",
          "Times that a pair of workers, or a way between them, failed and "
          "was left alone for a while",
          "way", 4)),
      avoided_pairs_(m->AddGauges("tandem_router_avoided_pairs",
                                  "Pairs of workers that are not used now, "
                                  "or not by this way",
                                  "way", 5)),
      avoided_workers_(m->AddGauge("tandem_router_avoided_workers",
                                   "Registered workers whose calls fail")),
      suspects_(m->AddCounter("tandem_router_suspect_requests_total",
                              "Requests that crashed two workers")),
      refusals_(m->AddCounter("tandem_router_worker_refusals_total",
                              "Calls that workers refused for want of room")),
      resumed_(m->AddCounters("tandem_streams_resumed_total",
                              "Requests that ended well after a loss", "cause",
                              8)),
      prompt_tokens_(m->AddCounters("tandem_prompt_tokens_total",
                                    "Prompt tokens", "source", 2)),
      generation_tokens_(m->AddCounter("tandem_generation_tokens_total",
                                       "Tokens sent to clients")),
      disconnects_(m->AddCounter("tandem_client_disconnects_total",
                                 "Clients gone before the end")),
      connections_(m->AddGauges("tandem_router_connections",
                                "Open connections of clients", "port", 2)),
      refused_connections_(m->AddCounters(
          "tandem_router_connections_refused_total",
          "Connections of clients beyond what the limits allow", "port", 2)),
      running_(
          m->AddGauge("tandem_num_requests_running", "Requests on workers")),
      waiting_(m->AddGauge("tandem_num_requests_waiting",
                           "Requests waiting for room on a worker")),
      waiting_tokens_(m->AddGauge("tandem_num_prompt_tokens_waiting",
                                  "Tokens that workers will have to compute "
                                  "for them")),
      prefill_workers_(m->AddGauges("tandem_router_workers",
                                    "Registered workers", "state", 3,
                                    {{"worker_role", "prefill"}})),
      decode_workers_(m->AddGauges("tandem_router_workers",
                                   "Registered workers", "state", 3,
                                   {{"worker_role", "decode"}})),
      queue_time_(RequestTime(m, "tandem_request_queue_time_seconds",
                              "Admission to the first computation")),
      prefill_time_(RequestTime(m, "tandem_request_prefill_time_seconds",
                                "Computing the prompt")),
      handoff_time_(RequestTime(m, "tandem_request_handoff_time_seconds",
                                "Moving the KV cache")),
      decode_time_(RequestTime(m, "tandem_request_decode_time_seconds",
                               "First token to last")),
      first_token_time_(m->AddHistogram("tandem_time_to_first_token_seconds",
                                        "Admission to the first token",
                                        kTimeToFirstTokenBuckets)),
      inter_token_time_(m->AddHistogram("tandem_inter_token_latency_seconds",
                                        "Between tokens of one request",
                                        kTokenTimeBuckets)),
      output_token_time_(m->AddHistogram("tandem_time_per_output_token_seconds",
                                         "Mean of a request after its first",
                                         kTokenTimeBuckets)),
      total_time_(RequestTime(m, "tandem_e2e_request_latency_seconds",
                              "Admission to the end")),
      prompt_size_(m->AddHistogram("tandem_request_prompt_tokens",
                                   "Prompt tokens of a request",
                                   TokenCountBuckets(kLongestPrompt))),
      generation_size_(m->AddHistogram("tandem_request_generation_tokens",
                                       "Generated tokens of a request",
                                       TokenCountBuckets(kLongestPrompt))) {
  constexpr const char* kStages[] = {"template", "tokenise", "place", "reserve",
                                     "relay"};
  for (int i = 0; i < 5; ++i) {
    stages_[i] = &m->AddHistogram("tandem_stage_duration_seconds",
                                  "Where the router spends time",
                                  kRouterStageBuckets, {{"stage", kStages[i]}});
  }
  // Present from the start, so that rates have a beginning.
  for (const bool decode : {false, true}) {
    lost_[decode] = &m->AddCounters(
        "tandem_router_workers_lost_total", "Registrations that ended", "cause",
        6, {{"worker_role", decode ? "decode" : "prefill"}});
    for (const char* cause : {"reset", "silence", "restarted", "left"}) {
      (*lost_[decode])[cause].Add(0);
    }
  }
  for (const char* outcome : {"accepted", "refused"}) {
    registrations_[outcome].Add(0);
  }
  for (const char* way : {"all", "shm", "grpc", "nccl"}) {
    pairs_avoided_[way].Add(0);
  }
  constexpr const char* kApis[] = {"grpc", "http", "openengine"};
  for (int api = 0; api < 3; ++api) {
    CounterSet& requests =
        m->AddCounters("tandem_requests_total", "Requests by outcome",
                       "outcome", 11, {{"api", kApis[api]}});
    requests_[api] = &requests;
    for (const char* outcome :
         {"ok", "invalid", "not_found", "overload", "slow_client",
          "unavailable", "cancelled", "deadline", "internal", "unauthenticated",
          "rate_limited"}) {
      requests[outcome].Add(0);
    }
  }
}

void RouterMetrics::OnPlaced(bool split) {
  placements_[split ? "split" : "local"].Add();
}

void RouterMetrics::OnStage(Stage stage, absl::Duration took) {
  stages_[static_cast<int>(stage)]->Observe(absl::ToDoubleSeconds(took));
}

void RouterMetrics::OnFirstToken(int tokens, absl::Duration since_admission) {
  first_token_time_.Observe(absl::ToDoubleSeconds(since_admission));
  generation_tokens_.Add(tokens);
}

void RouterMetrics::OnTokens(int tokens, absl::Duration gap) {
  generation_tokens_.Add(tokens);
  inter_token_time_.Observe(absl::ToDoubleSeconds(gap) / tokens);
}

CounterSet& RouterMetrics::RetriesIn(std::string_view stage) {
  auto found = retries_.find(stage);
  if (found == retries_.end()) {
    // As many as a request has phases.
    found = retries_
                .emplace(std::string(stage),
                         &metrics_->AddCounters(
                             "tandem_router_retries_total",
                             "Attempts lost and repeated", "cause", 8,
                             {{"stage", std::string(stage)}}))
                .first;
  }
  return *found->second;
}

void RouterMetrics::OnRetry(const AttemptLoss& loss) {
  RetriesIn(loss.stage)[loss.cause].Add();
  int64_t hidden;
  if (!losses_log_.Allow(MonotonicNow(), &hidden)) return;
  LogWarning("attempt lost", {{"internal_id", loss.internal_id},
                              {"prefill_worker", loss.prefill_worker},
                              {"decode_worker", loss.decode_worker},
                              {"stage", loss.stage},
                              {"cause", loss.cause},
                              {"status", loss.status},
                              {"hidden", hidden}});
}

void RouterMetrics::OnClusterEvent(const ClusterEvent& event) {
  using Kind = ClusterEvent::Kind;
  const std::string way = event.way.empty() ? "all" : event.way;
  const bool decode = event.role == v1::WORKER_ROLE_DECODE;
  const char* const role = decode ? "decode" : "prefill";
  switch (event.kind) {
    case Kind::kRegistered:
      registrations_["accepted"].Add();
      break;
    case Kind::kRefused:
      registrations_["refused"].Add();
      break;
    case Kind::kLost:
      (*lost_[decode])[event.cause].Add();
      break;
    case Kind::kPairAvoided:
      pairs_avoided_[way].Add();
      break;
    case Kind::kWorkerAvoided:
      break;
  }
  int64_t hidden;
  if (!cluster_log_[static_cast<int>(event.kind)].Allow(MonotonicNow(),
                                                        &hidden)) {
    return;
  }
  switch (event.kind) {
    case Kind::kRegistered:
      LogInfo("worker registered", {{"worker", event.worker},
                                    {"worker_role", role},
                                    {"endpoint", event.why},
                                    {"hidden", hidden}});
      break;
    case Kind::kRefused:
      LogWarning(
          "registration refused",
          {{"worker", event.worker}, {"why", event.why}, {"hidden", hidden}});
      break;
    case Kind::kLost:
      // A drain before it is no loss.
      Log(event.cause == "left" ? LogLevel::kInfo : LogLevel::kWarning,
          event.cause == "left" ? "worker left" : "worker lost",
          {{"worker", event.worker},
           {"worker_role", role},
           {"cause", event.cause},
           {"why", event.why},
           {"hidden", hidden}});
      break;
    case Kind::kWorkerAvoided:
      LogWarning("worker avoided", {{"worker", event.worker},
                                    {"worker_role", role},
                                    {"for", event.length},
                                    {"why", event.why},
                                    {"hidden", hidden}});
      break;
    case Kind::kPairAvoided:
      LogWarning("pair avoided", {{"prefill_worker", event.worker},
                                  {"decode_worker", event.decode_worker},
                                  {"way", way},
                                  {"for", event.length},
                                  {"why", event.why},
                                  {"hidden", hidden}});
      break;
  }
}

void RouterMetrics::OnSuspect(std::string_view internal_id,
                              const std::string& first,
                              const std::string& second) {
  suspects_.Add();
  LogWarning(
      "request crashed two workers",
      {{"internal_id", internal_id}, {"first", first}, {"second", second}});
}

void RouterMetrics::OnAdapter(const std::string& name, std::string_view what,
                              const absl::Status& status) {
  if (status.ok()) {
    LogInfo("adapter", {{"adapter", name}, {"what", what}});
  } else {
    LogWarning("adapter",
               {{"adapter", name}, {"what", what}, {"status", status}});
  }
}

RouterMetrics::TenantCounters& RouterMetrics::Of(const std::string& tenant) {
  const bool known = tenants_.contains(tenant);
  const std::string name =
      known || tenants_.size() < kMaxTenantSeries ? tenant : "other";
  const auto found = tenants_.find(name);
  if (found != tenants_.end()) return found->second;
  const Labels labels = {{"tenant", name}};
  return tenants_
      .emplace(name,
               TenantCounters{
                   &metrics_->AddCounters("tandem_tenant_refused_total",
                                          "Calls refused for want of a key, "
                                          "or by a tenant's limits",
                                          "reason", 4, labels),
                   &metrics_->AddCounters("tandem_tenant_tokens_total",
                                          "Tokens charged to a tenant", "kind",
                                          2, labels)})
      .first->second;
}

void RouterMetrics::OnTenantRefused(const std::string& tenant,
                                    std::string_view limit) {
  const MutexLock lock(&tenants_mutex_);
  (*Of(tenant).refused)[absl::AsciiStrToLower(std::string(limit))].Add();
}

void RouterMetrics::OnTenantTokens(const std::string& tenant, int64_t prompt,
                                   int64_t generated) {
  const MutexLock lock(&tenants_mutex_);
  CounterSet& tokens = *Of(tenant).tokens;
  tokens["prompt"].Add(static_cast<double>(prompt));
  tokens["completion"].Add(static_cast<double>(generated));
}

void RouterMetrics::OnInvalid(Api api, const absl::Status& status) {
  const std::string_view outcome = Outcome(status, false);
  (*requests_[static_cast<int>(api)])[outcome].Add();
  // A tenant's own limits have a metric of their own.
  if (outcome != "overload") return;
  int64_t hidden;
  if (refusals_log_.Allow(MonotonicNow(), &hidden)) {
    LogWarning("request refused", {{"reason", ErrorReason(status)},
                                   {"why", std::string(status.message())},
                                   {"hidden", hidden}});
  }
}

void RouterMetrics::OnEnded(const RequestSummary& summary) {
  CounterSet& requests = *requests_[static_cast<int>(summary.api)];
  requests[Outcome(summary.status, summary.client_gone)].Add();
  if (summary.client_gone) disconnects_.Add();
  const v1::Usage& usage = summary.done.usage();
  const v1::Timings& timings = summary.done.timings();
  if (summary.status.ok()) {
    finished_[FinishName(summary.finish_reason)].Add();
    if (summary.failures > 0) resumed_["worker_lost"].Add();
    prompt_tokens_["cached"].Add(usage.cached_tokens());
    prompt_tokens_["computed"].Add(usage.prompt_tokens() -
                                   usage.cached_tokens());
    prompt_size_.Observe(usage.prompt_tokens());
    generation_size_.Observe(usage.completion_tokens());
    queue_time_.Observe(Seconds(timings.queue()));
    total_time_.Observe(Seconds(timings.total()));
    decode_time_.Observe(Seconds(timings.decode()));
    if (timings.has_prefill())
      prefill_time_.Observe(Seconds(timings.prefill()));
    if (!timings.way().empty())
      handoff_time_.Observe(Seconds(timings.handoff()));
    if (usage.completion_tokens() > 1) {
      output_token_time_.Observe(Seconds(timings.time_per_output_token()));
    }
  }
  LogInfo("request ended",
          {{"request_id", summary.request_id},
           {"internal_id", summary.internal_id},
           {"trace_id", summary.trace_id},
           {"tenant", summary.tenant},
           {"code", absl::StatusCodeToString(summary.status.code())},
           {"reason", ErrorReason(summary.status)},
           {"finish_reason", FinishName(summary.finish_reason)},
           {"prompt_tokens", usage.prompt_tokens()},
           {"cached_tokens", usage.cached_tokens()},
           {"completion_tokens", usage.completion_tokens()},
           {"queue", ToDuration(timings.queue())},
           {"prefill", ToDuration(timings.prefill())},
           {"handoff", ToDuration(timings.handoff())},
           {"ttft", ToDuration(timings.time_to_first_token())},
           {"decode", ToDuration(timings.decode())},
           {"total", ToDuration(timings.total())},
           {"retries", timings.retries()},
           {"last_failure", std::string(summary.last_failure.message())},
           {"way", timings.way()},
           {"prefill_worker", summary.done.workers().prefill()},
           {"decode_worker", summary.done.workers().decode()}});
}

void RouterMetrics::UpdateConnections(const std::string& port, int64_t open,
                                      int64_t refused) {
  connections_[port].Set(static_cast<double>(open));
  refused_connections_[port].GrowTo(refused);
}

void RouterMetrics::Update(const v1::GetClusterStateResponse& state) {
  waiting_.Set(state.requests().queued());
  waiting_tokens_.Set(static_cast<double>(state.requests().queued_tokens()));
  running_.Set(state.requests().total() - state.requests().queued());
  int count[2][3] = {};
  int avoided = 0;
  for (const v1::WorkerStatus& worker : state.workers()) {
    const int role = worker.hello().role() == v1::WORKER_ROLE_DECODE;
    const int kind = worker.placeable()                                   ? 0
                     : worker.load().state() == v1::WORKER_STATE_DRAINING ? 1
                                                                          : 2;
    ++count[role][kind];
    avoided += absl::StartsWith(worker.reason(), "avoided");
  }
  std::map<std::string, int> pairs = {
      {"all", 0}, {"shm", 0}, {"grpc", 0}, {"nccl", 0}, {"mismatched", 0}};
  for (const v1::AvoidedPair& pair : state.avoided_pairs()) {
    ++pairs[!pair.has_retry_in() ? "mismatched"
            : pair.way().empty() ? "all"
                                 : pair.way()];
  }
  for (const auto& [way, of_it] : pairs) avoided_pairs_[way].Set(of_it);
  avoided_workers_.Set(avoided);
  const auto refused = static_cast<double>(state.counters().refusals());
  refusals_.Add(refused - refusals_.value());
  // The last: starting, cordoned or avoided.
  const char* const names[] = {"ready", "draining", "unready"};
  for (int kind = 0; kind < 3; ++kind) {
    prefill_workers_[names[kind]].Set(count[0][kind]);
    decode_workers_[names[kind]].Set(count[1][kind]);
  }
}

}  // namespace tandem::router
