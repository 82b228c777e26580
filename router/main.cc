// SPDX-License-Identifier: Apache-2.0
// tandem-router: the front door.
//
// Threads: gRPC's own and the HTTP listener's handlers (validation,
// tokenisation), the loop "router" (all of RouterCore), and the HTTP
// listener's.

#include <algorithm>
#include <atomic>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/build_info.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "common/file_watcher.h"
#include "common/flags.h"
#include "common/flight_recorder.h"
#include "common/http/failpoints.h"
#include "common/http/server.h"
#include "common/lifecycle.h"
#include "common/log.h"
#include "common/memory_limit.h"
#include "common/metrics.h"
#include "common/random.h"
#include "common/rpc/cluster_credentials.h"
#include "common/rpc/credentials.h"
#include "common/rpc/rotating_credentials.h"
#include "common/rpc/security_metrics.h"
#include "common/rpc/server.h"
#include "common/self_connect.h"
#include "common/thread_loop.h"
#include "common/version.h"
#include "router/core.h"
#include "router/errors.h"
#include "router/http/front.h"
#include "router/http/live_feed.h"
#include "router/intake.h"
#include "router/metrics.h"
#include "router/model_text.h"
#include "router/openengine/service.h"
#include "router/otlp_exporter.h"
#include "router/page/page.h"
#include "router/service.h"
#include "router/session/recorded_core.h"
#include "router/session/session_file.h"
#include "router/structured_checkers.h"
#include "router/structured_gate.h"
#include "router/tenants/access.h"

namespace tandem::router {
namespace {

// For /health and /metrics when clients have taken all others.
constexpr int kProbeConnections = 32;
// With more requests in flight who watches sees sums alone.
constexpr int kMostDescribed = 2048;
constexpr absl::Duration kLastSpans = absl::Seconds(1);
// So many may be chance.
constexpr int kMisses = 2;
constexpr absl::Duration kDrainPoll = absl::Milliseconds(20);
constexpr absl::Duration kLastCalls = absl::Milliseconds(250);
// Of the port for clients.
constexpr const char* kServices[] = {"tandem.v1.InferenceService",
                                     "openengine.v1.Inference",
                                     "openengine.v1.Control"};
constexpr char kRegistry[] = "tandem.v1.RegistryService";

struct Flags {
  std::string model_dir;
  std::string served_model_name;
  std::string chat_template;
  std::string tool_call_parser = "auto";
  std::string reasoning_parser = "none";
  std::string host = "127.0.0.1";
  std::string internal_host = "127.0.0.1";
  int grpc_port = 50051;
  int http_port = 8000;
  int internal_port = 50052;
  int admin_port = 50053;
  std::string policy = "prefix_aware";
  int64_t max_message_bytes = 1 << 20;
  int64_t max_answer_bytes = 64 << 20;
  int max_http_connections = 1024;
  int max_http_connections_per_peer = 0;
  int max_grpc_connections = 1024;
  int max_grpc_connections_per_peer = 0;
  int max_concurrent_streams = 1024;
  int64_t max_header_bytes = 8 << 10;
  absl::Duration handshake_timeout = absl::Seconds(10);
  int tenant_max_requests = 128;
  bool lora_updating = false;
  bool webui = true;
  std::string live_feed = "auto";
  std::vector<std::string> api_keys;
  std::string api_keys_file;
  std::string ssl_certfile, ssl_keyfile, ssl_ca_certs;
  absl::Duration shutdown_timeout = absl::Seconds(30);
  absl::Duration max_connection_age = absl::Minutes(30);
  absl::Duration liveness_timeout = absl::Seconds(30);
  int64_t max_memory_bytes = ControlGroupMemoryLimit() / 10 * 9;
  std::string otlp_traces_endpoint;
  double traces_sample_ratio = 1;
  std::string metrics_compat = "none";
  RouterOptions options;
  Offers offers;
  StructuredBudget structured;
  LogFlags log;
  std::string record_session_dir;
  int64_t record_session_bytes = int64_t{1} << 30;
  ClusterTlsFlags tls;
};

void AddConnectionLimits(CommandLine* line, Flags* flags) {
  line->Group("Limits of connections");
  line->AddInt("max-http-connections", &flags->max_http_connections,
               "Open at once; more are refused", {1, 1 << 16});
  line->AddInt(
      "max-http-connections-per-peer", &flags->max_http_connections_per_peer,
      "Of them of one address, as all of a proxy's are; 0: all", {0, 1 << 16});
  line->AddInt("max-grpc-connections", &flags->max_grpc_connections,
               "Open at once; more are closed as they come", {1, 1 << 16});
  line->AddInt(
      "max-grpc-connections-per-peer", &flags->max_grpc_connections_per_peer,
      "Of them of one address, as all of a proxy's are; 0: all", {0, 1 << 16});
  line->AddInt("max-concurrent-streams", &flags->max_concurrent_streams,
               "Calls of one gRPC connection; further ones wait in its client",
               {1, 1 << 20});
  line->AddBytes("max-header-bytes", &flags->max_header_bytes,
                 "Head of an HTTP request, or metadata of a gRPC call",
                 {1 << 10, 1 << 20});
  line->AddDuration("handshake-timeout", &flags->handshake_timeout, "Of TLS");
  line->AddDuration("max-connection-age", &flags->max_connection_age,
                    "Clients of gRPC are asked to connect anew after this");
}

void AddRequestLimits(CommandLine* line, Flags* flags) {
  Offers& offers = flags->offers;
  line->Group("Limits of one request");
  line->AddBytes("max-request-bytes", &flags->max_message_bytes,
                 "Size of one request message", {1 << 10, 64 << 20});
  line->AddBytes("max-response-bytes", &flags->max_answer_bytes,
                 "Size of an answer that is not streamed",
                 {1 << 10, int64_t{1} << 32});
  line->AddBytes("structured-max-bytes", &flags->structured.bytes,
                 "Size of one request's schema, regex, grammar or choices",
                 {1, 1 << 20});
  line->AddDuration("structured-compile-timeout", &flags->structured.compile,
                    "For compiling one; beyond it the request is refused");
  line->AddInt("default-max-tokens", &offers.default_max_tokens,
               "max_tokens where a request has none, if the context has room",
               {1, 1 << 30});
  line->AddInt("max-n", &offers.n, "n, best_of, and beams of a search",
               {1, kMaxSequences});
  line->AddInt("max-logprobs", &offers.logprobs,
               "logprobs, top_logprobs and prompt_logprobs", {0, kMaxLogprobs});
  line->AddInt("max-logit-bias", &offers.logit_bias, "Ids of logit_bias",
               {0, kMaxListedTokenIds});
  line->AddInt("max-stop-strings", &offers.stop_strings, "Strings of stop",
               {0, kMaxStopStrings});
  line->AddInt("max-stop-bytes", &offers.stop_bytes, "Bytes of each of them",
               {1, kMaxStopStringBytes});
}

void AddFlags(CommandLine* line, Flags* flags) {
  RouterOptions& options = flags->options;
  line->AddConfigFile();
  line->AddPositional("MODEL", &flags->model_dir,
                      "Hugging Face directory: tokenizer, template, limits",
                      true);
  line->Add("served-model-name", &flags->served_model_name,
            "Name of the model in the API; the directory's by default");
  line->Add("chat-template", &flags->chat_template,
            "File, in Jinja, in place of the model's own chat template");
  line->AddChoice("tool-call-parser", &flags->tool_call_parser,
                  {"auto", "llama3_json", "hermes", "mistral", "none"},
                  "How the model writes tool calls, with vLLM's names; auto "
                  "goes by its chat template, none leaves calls in the text");
  line->AddChoice("reasoning-parser", &flags->reasoning_parser,
                  {"none", "deepseek_r1", "qwen3"},
                  "How the model reasons before it answers, with vLLM's "
                  "names; none leaves that in the text");
  line->Group("Listening");
  line->Add("host", &flags->host, "Address for clients");
  line->AddInt("grpc-port", &flags->grpc_port, "Clients; 0 takes a free one",
               {0, 65535});
  line->AddInt("port", &flags->http_port,
               "HTTP: OpenAI's API, /metrics and /health", {0, 65535});
  line->Add("internal-host", &flags->internal_host,
            "Address for workers that register");
  line->AddInt("internal-port", &flags->internal_port, "Workers that register",
               {0, 65535});
  line->AddInt("admin-port", &flags->admin_port, "Operators, on loopback only",
               {0, 65535});
  line->Add("allow-runtime-lora-updating", &flags->lora_updating,
            "Clients may load and unload LoRA adapters over HTTP, as with "
            "vLLM; operators may over --admin-port without this");
  line->Add("webui", &flags->webui, "The page at /");
  line->AddChoice(
      "live-feed", &flags->live_feed, {"auto", "on", "off"},
      "GET /v1/tandem/events, for the page: workers, requests and "
      "timings, no text. auto: on if --host is of loopback and there "
      "are no --api-keys-file's tenants to watch each other");
  line->AddDuration("shutdown-timeout", &flags->shutdown_timeout,
                    "For the drain after SIGTERM; then calls end");
  line->AddDuration("liveness-timeout", &flags->liveness_timeout,
                    "Without progress, where some could be made, /livez fails");
  line->Group("Access");
  line->AddList("api-key", &flags->api_keys,
                "Clients must bring it as 'Authorization: Bearer KEY'; may be "
                "given several times",
                0);
  line->Add("api-keys-file", &flags->api_keys_file,
            "Keys of several tenants and their limits, as `tandem keys new` "
            "writes them; read again when it changes");
  line->Add("ssl-certfile", &flags->ssl_certfile,
            "PEM: certificate chain of the HTTP and gRPC ports for clients; "
            "read again when it changes");
  line->Add("ssl-keyfile", &flags->ssl_keyfile, "PEM: its private key");
  line->Add("ssl-ca-certs", &flags->ssl_ca_certs,
            "PEM: authorities, of one of which clients must show a "
            "certificate");
  line->Group("Placement");
  line->AddChoice("policy", &flags->policy,
                  {"prefix_aware", "least_loaded", "round_robin"},
                  "How workers are chosen");
  line->AddInt("max-local-prefill-tokens", &options.max_local_tokens,
               "Uncached prompt tokens that a decode worker computes itself",
               {0, 1 << 24});
  line->Group("Offers");
  line->Add("enable-no-kv-cache", &flags->offers.no_kv_cache,
            "Requests may ask to be computed without a KV cache, which is slow "
            "and shows what it saves");
  line->Add("enable-attention-output", &flags->offers.attention,
            "Requests may ask for attention weights with every token, of "
            "workers that run with this flag too");
  line->Group("Metrics and traces");
  line->AddChoice("metrics-compat", &flags->metrics_compat, {"none", "vllm"},
                  "Further names on /metrics, for what reads those of vLLM");
  line->Add("otlp-traces-endpoint", &flags->otlp_traces_endpoint,
            "Collector that takes spans over OTLP/gRPC, http://host:4317; also "
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
  line->Add("traces-sample-ratio", &flags->traces_sample_ratio,
            "Of requests that come without a trace, those of which one is "
            "begun; others are as their traceparent says",
            0, 1);
  line->Group("Limits");
  line->AddInt("max-requests", &options.max_requests,
               "Requests in flight, waiting ones included", {1, 1 << 20});
  line->AddInt("tenant-max-requests", &flags->tenant_max_requests,
               "Of them of one tenant of --api-keys-file whose entry has no "
               "max_parallel_requests; 0: all",
               {0, 1 << 20});
  line->AddBytes("max-memory-bytes", &flags->max_memory_bytes,
                 "Memory of this process above which it drains and ends, to be "
                 "started anew; by default nine tenths of what its control "
                 "group may have; 0: none");
  line->AddInt("max-queued", &options.max_queued,
               "Of them waiting for room on a worker", {0, 1 << 20});
  line->AddDuration("queue-wait", &options.queue_wait, "For room on a worker");
  line->AddDuration("max-expected-wait", &options.max_expected_wait,
                    "For a first token, by the rate of late; beyond it a "
                    "request is refused at once");
  line->AddDuration("no-workers-wait", &options.no_workers_wait,
                    "For any decode worker");
  line->AddDuration("recovery-wait", &options.recovery_wait,
                    "For a decode worker in place of a lost one");
  line->AddDuration("default-deadline", &options.default_deadline,
                    "Of calls that bring none");
  line->AddInt("max-attempts", &options.max_attempts,
               "Failures of a request without a new token in between",
               {1, 100});
  line->Add("retry-budget", &options.retry_budget,
            "Retries of all requests together, per request, beyond 600 a "
            "minute",
            0, 1);
  line->AddDuration("stall-limit", &options.stall_limit,
                    "For a client that takes nothing");
  line->AddDuration("adapter-wait", &options.adapter_wait,
                    "For workers to load or let go a LoRA adapter");
  line->AddDuration(
      "lease", &options.lease,
      "Silence of a worker's registration after which it is lost");
  line->AddDuration("silence", &options.silence,
                    "Silence of a worker's call after which it is lost");
  AddConnectionLimits(line, flags);
  AddRequestLimits(line, flags);
}

bool FeedIsOn(const Flags& flags) {
  return flags.live_feed == "on" ||
         (flags.live_feed == "auto" && rpc::OnLoopback(flags.host) &&
          flags.api_keys_file.empty());
}

class Process {
 public:
  Process(Flags* flags, SignalWatcher* signals)
      : flags_(*flags), signals_(signals), loop_("router") {}

  absl::Status Run() {
    absl::Status status = Start();
    if (status.ok()) status = finished_.get_future().get();
    Stop();
    return status;
  }

 private:
  absl::Status Start();
  absl::Status StartAccess();
  std::unique_ptr<RouterCore> MakeCore();
  absl::Status LoadPublicTls();
  void ReloadPublicTls();
  void WarnIfExposed() const;
  absl::Status StartServers();
  absl::StatusOr<std::unique_ptr<rpc::Server>> Listen(
      rpc::ServerOptions options, const std::string& host, int port,
      const std::vector<grpc::Service*>& services);
  void EachSecond();
  void UpdateFacts();
  // Can serve: for readiness probes, from any thread.
  absl::Status Ready() const;
  void Drain();
  // Nothing but a new process mends what `fault` says. What runs may end first.
  void DrainForFault(absl::Status fault);
  // Once above the ceiling for three seconds.
  void CheckMemory();
  void PollDrained();
  void Stop();

  Flags& flags_;
  SignalWatcher* const signals_;
  SystemRandom random_;
  // Before the loop, with which requests go that still are charged.
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<rpc::CallMetrics> call_metrics_;
  std::unique_ptr<RouterMetrics> router_metrics_;
  std::unique_ptr<Access> access_;
  ThreadLoop loop_;
  FileWatcher watcher_;
  std::unique_ptr<LiveFeed> feed_;
  std::unique_ptr<Watchdog> watchdog_;
  std::unique_ptr<ModelText> model_;
  std::unique_ptr<rpc::ClusterCredentials> tls_;
  rpc::Credentials public_tls_;  // of --ssl-certfile; may be empty
  std::unique_ptr<rpc::RotatingCredentials> public_credentials_;
  std::unique_ptr<rpc::CertificateMetrics> public_certificate_;
  std::unique_ptr<rpc::SecurityMetrics> security_metrics_;
  ClusterFacts facts_;
  std::unique_ptr<RpcDialer> dialer_;
  std::unique_ptr<OtlpExporter> spans_;
  std::unique_ptr<session::SessionFile> session_;  // null: none is recorded
  std::unique_ptr<RouterCore> core_;
  std::unique_ptr<StructuredCheckers> checkers_;
  std::unique_ptr<StructuredGate> gate_;
  std::unique_ptr<Intake> intake_;
  std::unique_ptr<InferenceServer> inference_;
  std::unique_ptr<OpenEngineInference> openengine_;
  std::unique_ptr<OpenEngineControl> openengine_control_;
  std::unique_ptr<HttpFront> http_front_;
  Page page_;
  std::unique_ptr<RegistryServer> registry_;
  std::unique_ptr<AdminServer> admin_;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<rpc::Server> public_server_, internal_server_, admin_server_;
  std::unique_ptr<SelfConnect> self_connect_;
  std::unique_ptr<Timer> second_, facts_timer_, drain_poll_;
  std::atomic<bool> draining_ = false;
  // On the loop: whose health says whether a decode worker is ready.
  rpc::Server* health_ = nullptr;
  bool serving_ = false;
  int64_t placed_ = 0;
  // Seconds since then at which one could have been placed.
  int missed_ = 0;
  absl::Time idle_since_ = absl::InfiniteFuture();
  absl::Time drain_ends_;
  absl::Status outcome_;  // what the drain ends in; the loop's
  int seconds_above_ceiling_ = 0;
  std::promise<absl::Status> finished_;
};

absl::Status Process::StartAccess() {
  const std::string& path = flags_.api_keys_file;
  // Keys without a file are all of one tenant.
  access_ = std::make_unique<Access>(
      [this] { return loop_.Now(); }, router_metrics_.get(),
      path.empty() ? 0 : flags_.tenant_max_requests);
  if (path.empty()) {
    for (const std::string& key : flags_.api_keys) {
      if (!key.empty() && key.find_first_of(" \t\r\n") == std::string::npos) {
        continue;
      }
      return MakeError(absl::StatusCode::kInvalidArgument, "API_KEYS",
                       "--api-key (or TANDEM_API_KEY) is empty, or has a "
                       "space in it: no client can send that");
    }
    if (!flags_.api_keys.empty()) {
      access_->Install(Access::SharedKeys(flags_.api_keys));
    }
    return absl::OkStatus();
  }
  if (!flags_.api_keys.empty()) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "API_KEYS",
        "--api-key (or TANDEM_API_KEY) and --api-keys-file exclude each "
        "other: put the key into the file");
  }
  // Watched before it is read: no change is missed.
  watcher_.Watch({path}, [this, path] {
    const absl::StatusOr<KeyFile> file = ReadKeyFile(path);
    if (!file.ok()) {
      LogError("API keys not reloaded: those before stay",
               {{"status", file.status()}});
      return;
    }
    access_->Install(*file);
    LogInfo("API keys reloaded",
            {{"keys", file->keys.size()}, {"tenants", file->tenants.size()}});
  });
  const absl::StatusOr<KeyFile> file = ReadKeyFile(path);
  if (!file.ok()) return Annotate(file.status(), "--api-keys-file");
  access_->Install(*file);
  return absl::OkStatus();
}

absl::Status Process::Start() {
  const absl::Time begun = absl::Now();
  absl::Status status = Watchdog::CheckLimit(flags_.liveness_timeout);
  if (!status.ok()) return status;
  auto tls = rpc::ClusterCredentials::Load(
      flags_.tls, rpc::PeerRole::kRouter, "", &watcher_,
      [this](rpc::Credentials now) {
        loop_.Post([this, now = std::move(now)]() mutable {
          dialer_->Replace(std::move(now));
        });
      });
  if (!tls.ok()) return tls.status();
  tls_ = *std::move(tls);
  status = rpc::CheckPlaintext(tls_->first(), flags_.tls.allow_plaintext,
                               "--internal-host", flags_.internal_host);
  if (!status.ok()) return status;
  absl::StatusOr<Policy> policy = ParsePolicy(flags_.policy);
  if (!policy.ok()) return policy.status();
  absl::StatusOr<std::unique_ptr<ModelText>> model = ModelText::Load(
      flags_.model_dir, {.served_name = flags_.served_model_name,
                         .chat_template = flags_.chat_template,
                         .tool_call_parser = flags_.tool_call_parser,
                         .reasoning_parser = flags_.reasoning_parser});
  if (!model.ok()) return model.status();
  model_ = *std::move(model);
  const absl::Duration loading = absl::Now() - begun;

  const absl::StatusOr<OtlpOptions> otlp =
      ReadOtlpOptions(flags_.otlp_traces_endpoint);
  if (!otlp.ok()) return otlp.status();

  RouterOptions& options = flags_.options;
  options.incarnation = random_.Bytes(16);
  options.model = model_->limits().model;
  options.policy = *policy;
  options.window = model_->window();
  metrics_ = std::make_unique<Metrics>("router", options.model);
  if (flags_.metrics_compat == "vllm") metrics_->ExportVllmNames();
  AddBuildInfo("none", metrics_.get());
  call_metrics_ = std::make_unique<rpc::CallMetrics>(metrics_.get());
  router_metrics_ = std::make_unique<RouterMetrics>(metrics_.get(), *policy);
  security_metrics_ =
      std::make_unique<rpc::SecurityMetrics>(metrics_.get(), tls_.get());
  watchdog_ = std::make_unique<Watchdog>(flags_.liveness_timeout, loop_.Now());
  status = StartAccess();
  if (!status.ok()) return status;
  if (const std::string& directory = flags_.record_session_dir;
      !directory.empty()) {
    auto session = session::CreateSessionFile(directory);
    if (!session.ok()) {
      return Annotate(session.status(), "--record-session-dir");
    }
    session_ = *std::move(session);
  }
  loop_.RunSync([&] {
    flight::Attach();
    dialer_ = std::make_unique<RpcDialer>(&loop_, tls_->first());
    feed_ = std::make_unique<LiveFeed>(&loop_, router_metrics_.get(), [this] {
      return core_->State(core_->in_flight() <= kMostDescribed);
    });
    if (!otlp->address.empty()) {
      spans_ = std::make_unique<OtlpExporter>(*otlp, &loop_, metrics_.get());
    }
    core_ = MakeCore();
    checkers_ = std::make_unique<StructuredCheckers>(model_.get(),
                                                     flags_.structured, &loop_);
    gate_ = std::make_unique<StructuredGate>(
        StructuredGateOptions{
            .running = checkers_->threads(),
            .running_per_tenant = checkers_->threads() / 2,
            .requests = options.max_queued,
            .requests_per_tenant = std::max(1, options.max_queued / 2)},
        &loop_, checkers_.get(),
        [this](AdmittedRequest admitted, std::unique_ptr<ClientStream> client) {
          core_->Submit(std::move(admitted), std::move(client));
        },
        [this](Api api, const absl::Status& why) {
          router_metrics_->OnInvalid(api, why);
        });
    second_ = std::make_unique<Timer>(&loop_);
    facts_timer_ = std::make_unique<Timer>(&loop_);
    drain_poll_ = std::make_unique<Timer>(&loop_);
    EachSecond();
    UpdateFacts();
    core_->adapter_control().Watch([this] { UpdateFacts(); });
  });
  intake_ = std::make_unique<Intake>(
      model_.get(), &facts_, flags_.offers, flags_.structured,
      router_metrics_.get(), access_.get(),
      [core = core_.get()](int priority) { return core->HasRoom(priority); },
      spans_ == nullptr ? -1 : flags_.traces_sample_ratio);
  inference_ = std::make_unique<InferenceServer>(
      &loop_, gate_.get(), intake_.get(),
      static_cast<size_t>(flags_.max_answer_bytes));
  openengine_ = std::make_unique<OpenEngineInference>(
      &loop_, gate_.get(), intake_.get(), model_.get());
  openengine_control_ = std::make_unique<OpenEngineControl>(
      &loop_, core_.get(), gate_.get(), intake_.get(),
      OpenEngineOptions{
          .lora_updating = flags_.lora_updating,
          .alive = [this] { return watchdog_->Check(loop_.Now()); },
          .ready = [this] { return Ready(); }});
  http_front_ = std::make_unique<HttpFront>(
      &loop_, core_.get(), gate_.get(), intake_.get(),
      HttpFrontOptions{
          .max_bytes = static_cast<size_t>(flags_.max_answer_bytes),
          .lora_updating = flags_.lora_updating,
          .feed = FeedIsOn(flags_) ? feed_.get() : nullptr});
  registry_ = std::make_unique<RegistryServer>(&loop_, core_.get());
  admin_ = std::make_unique<AdminServer>(&loop_, core_.get(), gate_.get(),
                                         &access_->tenants());
  status = LoadPublicTls();
  if (status.ok()) status = StartServers();
  if (!status.ok()) return status;
  WarnIfExposed();
  watcher_.Start();
  GaugeSet& startup = metrics_->AddGauges(
      "tandem_startup_seconds", "Start to serving, by phase", "phase", 2);
  startup["model"].Set(absl::ToDoubleSeconds(loading));
  startup["total"].Set(absl::ToDoubleSeconds(absl::Now() - begun));
  LogInfo(
      "ready",
      {{"endpoint", public_server_->address()},
       {"internal", internal_server_->address()},
       {"admin", admin_server_->address()},
       {"http", http_->url()},
       {"model", options.model},
       {"tool_calls",
        std::string(ToolCallStyleName(
            model_->limits().tool_call_style.value_or(ToolCallStyle::kNone)))},
       {"policy", flags_.policy}});
  signals_->OnDrain(&loop_, [this] { Drain(); });
  self_connect_ = std::make_unique<SelfConnect>(
      std::vector<std::string>{public_server_->address(),
                               internal_server_->address()},
      SelfConnectOptions(), [this](const std::string& address) {
        loop_.Post([this, address] {
          DrainForFault(absl::UnavailableError(absl::StrCat(
              address, " takes no connections any more: to be started anew")));
        });
      });
  return absl::OkStatus();
}

std::unique_ptr<RouterCore> Process::MakeCore() {
  if (session_ == nullptr) {
    return std::make_unique<RouterCore>(flags_.options, &loop_, &random_,
                                        dialer_.get(), model_.get(),
                                        feed_.get(), spans_.get());
  }
  LogWarning("prompts and answers are recorded", {{"file", session_->path}});
  return std::make_unique<session::RecordedCore>(
      session::RecorderOptions{.version = absl::StrCat(kVersion, " ", Commit()),
                               .max_bytes = flags_.record_session_bytes,
                               .on_end =
                                   [](const absl::Status& why) {
                                     LogWarning(
                                         "the session is recorded no further",
                                         {{"status", why}});
                                   }},
      &session_->stream, flags_.options, &loop_, &random_, dialer_.get(),
      model_.get(), feed_.get(), spans_.get());
}

absl::StatusOr<std::unique_ptr<rpc::Server>> Process::Listen(
    rpc::ServerOptions options, const std::string& host, int port,
    const std::vector<grpc::Service*>& services) {
  options.address = Endpoint{host, port}.ToString();
  options.metrics = call_metrics_.get();
  return rpc::Server::Start(options, services);
}

absl::StatusOr<rpc::Credentials> LoadSsl(const Flags& flags) {
  return rpc::LoadCredentials(
      flags.ssl_certfile, flags.ssl_keyfile, flags.ssl_ca_certs,
      {"--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"});
}

HttpTls ForHttp(const rpc::Credentials& tls) {
  return {.cert = tls.cert, .key = tls.key, .client_ca = tls.ca};
}

absl::Status Process::LoadPublicTls() {
  if (flags_.ssl_certfile.empty() && !flags_.ssl_ca_certs.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "TLS_PAIR",
                     "--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile");
  }
  // Watched before they are read: no change is missed.
  if (!flags_.ssl_certfile.empty()) {
    std::vector<std::string> paths = {flags_.ssl_certfile, flags_.ssl_keyfile};
    if (!flags_.ssl_ca_certs.empty()) paths.push_back(flags_.ssl_ca_certs);
    watcher_.Watch(std::move(paths), [this] { ReloadPublicTls(); });
  }
  absl::StatusOr<rpc::Credentials> tls = LoadSsl(flags_);
  if (!tls.ok()) return tls.status();
  public_tls_ = *std::move(tls);
  if (!public_tls_.cert.empty()) {
    public_certificate_ =
        std::make_unique<rpc::CertificateMetrics>(metrics_.get(), "public");
    public_certificate_->Uses(public_tls_.cert);
  }
  return absl::OkStatus();
}

void Process::ReloadPublicTls() {
  absl::StatusOr<rpc::Credentials> tls = LoadSsl(flags_);
  absl::Status status = tls.status();
  // Checks the pair, too.
  if (status.ok()) status = http_->ReplaceTls(ForHttp(*tls));
  if (status.ok()) status = public_credentials_->Replace(*tls);
  public_certificate_->Reloaded(status.ok());
  if (status.ok()) {
    public_certificate_->Uses(tls->cert);
    LogInfo("certificate reloaded", {{"file", flags_.ssl_certfile}});
  } else {
    LogError("certificate not reloaded: the one before stays",
             {{"status", status}});
  }
}

void Process::WarnIfExposed() const {
  const std::string& host = flags_.host;
  if (rpc::OnLoopback(host)) return;
  if (!access_->closed()) {
    LogWarning(
        "whoever reaches this address may use it: set --api-key or "
        "--api-keys-file",
        {{"host", host}});
  }
  if (public_tls_.cert.empty()) {
    LogWarning(
        "prompts, answers and keys can be read on the way: set "
        "--ssl-certfile, or have TLS in front",
        {{"host", host}});
  }
}

absl::Status Process::StartServers() {
  http_ = std::make_unique<HttpServer>(HttpOptions{
      .host = flags_.host,
      .port = flags_.http_port,
      .max_header_bytes = static_cast<size_t>(flags_.max_header_bytes),
      .max_body_bytes = static_cast<size_t>(flags_.max_message_bytes),
      .max_connections = flags_.max_http_connections,
      .spare_connections = kProbeConnections,
      .max_connections_per_peer = flags_.max_http_connections_per_peer,
      // They tokenise; a refusal waits for none of them.
      .handler_threads =
          std::max(2, static_cast<int>(std::thread::hardware_concurrency())),
      .tls = public_tls_.cert.empty()
                 ? std::nullopt
                 : std::make_optional(ForHttp(public_tls_)),
      // Elsewhere a key or a certificate tells who may.
      .local_hosts_only = rpc::OnLoopback(flags_.host) && !access_->closed() &&
                          public_tls_.cert.empty(),
      .handshake_timeout = flags_.handshake_timeout,
      .error_page = &HttpFront::ErrorPage,
      .request_id = &HttpFront::RequestId});
  http_->Handle("GET", "/metrics", [this](const HttpRequest&) {
    return HttpResponse{.content_type = Metrics::kContentType,
                        .body = metrics_->Text()};
  });
  http_->Handle("GET", "/health", [this](const HttpRequest&) {
    return HealthResponse(draining_ ? absl::UnavailableError("draining")
                                    : watchdog_->Check(loop_.Now()));
  });
  http_->Handle("GET", "/livez", [this](const HttpRequest&) {
    return HealthResponse(watchdog_->Check(loop_.Now()));
  });
  http_->Handle("GET", "/readyz",
                [this](const HttpRequest&) { return HealthResponse(Ready()); });
  for (const char* path : {"/metrics", "/health", "/livez", "/readyz"}) {
    http_->Open(path);
  }
#ifdef TANDEM_FAILPOINTS
  ServeFailpoints(http_.get());
#endif
  http_front_->Register(http_.get());
  if (flags_.webui) page_.Register(http_.get());
  absl::Status status = http_->Start();
  if (!status.ok()) return status;

  rpc::ServerOptions internal;
  internal.rotating = tls_->rotating();
  auto internal_server = Listen(internal, flags_.internal_host,
                                flags_.internal_port, {registry_.get()});
  if (!internal_server.ok()) return internal_server.status();
  internal_server_ = *std::move(internal_server);
  internal_server_->SetServing(kRegistry, true);

  rpc::ServerOptions admin;
  admin.rotating = tls_->rotating();
  auto admin_server =
      Listen(admin, "127.0.0.1", flags_.admin_port, {admin_.get()});
  if (!admin_server.ok()) return admin_server.status();
  admin_server_ = *std::move(admin_server);
  admin_server_->SetServing("tandem.v1.AdminService", true);

  rpc::ServerOptions front;
  front.rotating = tls_->rotating();
  if (!public_tls_.cert.empty()) {
    auto rotating = rpc::RotatingCredentials::Create(public_tls_);
    if (!rotating.ok()) return rotating.status();
    public_credentials_ = *std::move(rotating);
    front.rotating = public_credentials_.get();
    front.rules.reset();  // its clients are not the cluster's
  }
  front.max_receive_bytes = static_cast<int>(flags_.max_message_bytes);
  front.max_metadata_bytes = static_cast<int>(flags_.max_header_bytes);
  front.connections = {.all = flags_.max_grpc_connections,
                       .per_peer = flags_.max_grpc_connections_per_peer};
  front.max_concurrent_streams = flags_.max_concurrent_streams;
  front.handshake_timeout = flags_.handshake_timeout;
  front.max_connection_age = flags_.max_connection_age;
  auto public_server =
      Listen(front, flags_.host, flags_.grpc_port,
             {inference_.get(), openengine_.get(), openengine_control_.get()});
  if (!public_server.ok()) return public_server.status();
  public_server_ = *std::move(public_server);
  // "" is the process, for who restarts it; services are what /readyz says.
  for (const char* service : kServices) {
    public_server_->SetServing(service, false);
  }
  loop_.RunSync([this] {
    health_ = public_server_.get();
    UpdateFacts();
  });
  return absl::OkStatus();
}

void Process::EachSecond() {
  second_->Start(absl::Seconds(1), [this] { EachSecond(); });
  // Placing takes no time: who could be placed a second ago has been.
  const int64_t placed = core_->placements();
  if (std::exchange(placed_, placed) != placed) {
    missed_ = 0;
  } else if (core_->CouldPlace()) {
    ++missed_;
  }
  watchdog_->Beat(loop_.Now(), placed, /*has_work=*/missed_ > kMisses);
  CheckMemory();
  router_metrics_->Update(core_->State(/*include_requests=*/false));
  if (health_ != nullptr) {  // they all serve
    router_metrics_->UpdateConnections("http", http_->connections(),
                                       http_->refused_connections());
    router_metrics_->UpdateConnections("grpc", public_server_->connections(),
                                       public_server_->refused_connections());
  }
  security_metrics_->Update();
}

void Process::UpdateFacts() {
  facts_timer_->Start(absl::Milliseconds(50), [this] { UpdateFacts(); });
  facts_.context_length = core_->context_length();
  const KvRoom room = core_->kv_room();
  facts_.kv_block_size = room.block_size;
  facts_.kv_blocks = room.blocks;
  facts_.kv_bytes_per_token = room.bytes_per_token;
  facts_.ready_decode = core_->ready_workers(v1::WORKER_ROLE_DECODE);
  facts_.ready_prefill = core_->ready_workers(v1::WORKER_ROLE_PREFILL);
  facts_.set_adapters(core_->adapters());
  const bool serving = !draining_ && facts_.ready_decode > 0;
  if (health_ == nullptr || serving == serving_) return;
  serving_ = serving;
  for (const char* service : kServices) health_->SetServing(service, serving);
}

absl::Status Process::Ready() const {
  if (draining_) return absl::UnavailableError("draining");
  if (facts_.ready_decode == 0) {
    return absl::UnavailableError("no decode worker is ready");
  }
  return watchdog_->Check(loop_.Now());
}

void Process::DrainForFault(absl::Status fault) {
  if (draining_) return;
  LogError("draining for a fault", {{"fault", std::string(fault.message())}});
  outcome_ = std::move(fault);
  Drain();
}

void Process::CheckMemory() {
  const int64_t ceiling = flags_.max_memory_bytes;
  const int64_t held = ceiling > 0 ? OwnMemory() : 0;
  if (held <= ceiling) {
    seconds_above_ceiling_ = 0;
    return;
  }
  if (++seconds_above_ceiling_ < 3) return;
  DrainForFault(absl::ResourceExhaustedError(
      absl::StrCat(held >> 20, " MiB of memory, above --max-memory-bytes (",
                   ceiling >> 20, " MiB): to be started anew")));
}

void Process::Drain() {
  if (draining_) return;
  TANDEM_FAILPOINT("router.drain", "crash stall");
  LogInfo("draining", {{"timeout", flags_.shutdown_timeout},
                       {"requests", core_->in_flight()}});
  draining_ = true;
  UpdateFacts();  // the services have ended
  public_server_->SetServing("", false);
  core_->Drain();
  gate_->Drain(Draining());
  drain_ends_ = loop_.Now() + flags_.shutdown_timeout;
  PollDrained();
}

void Process::PollDrained() {
  const absl::Time now = loop_.Now();
  if (!core_->idle()) idle_since_ = absl::InfiniteFuture();
  idle_since_ = std::min(idle_since_, now);
  // Whose stream was the last one calls again at once: told that this router
  // drains it goes elsewhere, by a server that shuts down it is cancelled.
  if ((core_->idle() && now >= idle_since_ + kLastCalls) ||
      now >= drain_ends_) {
    feed_->Close();
    core_->CloseAll(MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                              "this router is going away", {},
                              absl::Seconds(1)));
    finished_.set_value(outcome_);
    return;
  }
  drain_poll_->Start(kDrainPoll, [this] { PollDrained(); });
}

void Process::Stop() {
  self_connect_.reset();
  watcher_.Stop();
  loop_.RunSync([&] {
    second_.reset();
    facts_timer_.reset();
    drain_poll_.reset();
    if (feed_ != nullptr) feed_->Close();
    if (gate_ != nullptr) gate_->Drain(Draining());
    if (core_ != nullptr) {
      core_->Drain();
      core_->CloseAll(absl::UnavailableError("this router is going away"));
      // Servers wait for their calls, and those for workers.
      core_->adapter_control().Close(Draining());
    }
  });
  // Streams that were just closed still have their last word to write.
  if (public_server_ != nullptr) public_server_->Shutdown(absl::Seconds(2));
  if (admin_server_ != nullptr) admin_server_->Shutdown(absl::ZeroDuration());
  if (http_ != nullptr) http_->Stop(absl::Seconds(2));
  // The core goes when no server can send it anything more.
  if (internal_server_ != nullptr) {
    internal_server_->Shutdown(absl::ZeroDuration());
  }
  checkers_.reset();  // posts nothing from here on
  loop_.RunSync([&] {
    gate_.reset();
    core_.reset();
  });
  if (spans_ != nullptr) spans_->Stop(kLastSpans);
  loop_.RunSync([&] {
    feed_.reset();
    spans_.reset();
  });
  http_.reset();
  loop_.Stop();
  dialer_.reset();
}

}  // namespace
}  // namespace tandem::router

int main(int argc, char** argv) {
  using namespace tandem;  // NOLINT(google-build-using-namespace)
  router::Flags flags;
  CommandLine line("tandem-router",
                   "The front door: takes prompts over gRPC, places them on "
                   "workers, and streams tokens back.");
  line.Example("tandem-router models/tales");
  router::AddFlags(&line, &flags);
  line.Group("TLS");
  flags.tls.AddTo(&line);
  line.Group("Logs");
  flags.log.AddTo(&line);
  line.Add("record-session-dir", &flags.record_session_dir,
           "Where to record all that the router takes in and does, prompts and "
           "answers too, for `tandem replay`; empty: it does not");
  line.AddBytes("record-session-bytes", &flags.record_session_bytes,
                "Of a session; what comes behind is not recorded",
                {1 << 20, int64_t{1} << 40});
  if (const std::optional<int> code = line.Parse(argc, argv)) return *code;
  const absl::Status logging = InitLog(
      {.format = flags.log.format, .level = flags.log.level, .role = "router"});
  if (!logging.ok()) return ReportFailure("tandem-router", logging);
  for (const auto& [name, value] : line.NonDefaults()) {
    LogDebug("flag", {{name, value}});
  }
  RaiseDescriptorLimit();
  const absl::Status recording =
      flight::Install("router", flags.log.flight_record_dir);
  if (!recording.ok()) return ReportFailure("tandem-router", recording);
  SignalWatcher signals;
  router::Process process(&flags, &signals);
  const absl::Status status = process.Run();
  if (!status.ok()) return ReportFailure("tandem-router", status);
  return signals.ExitCode(kExitOk);
}
