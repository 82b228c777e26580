// SPDX-License-Identifier: Apache-2.0
// From flags to a router that serves: the model, the core on its loop, what is
// before it, and then the ports. See process.h.

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/build_info.h"
#include "common/flight_recorder.h"
#include "common/lifecycle.h"
#include "common/log.h"
#include "common/version.h"
#include "router/process.h"
#include "router/session/recorded_core.h"

namespace tandem::router {
namespace {

// With more requests in flight who watches sees sums alone.
constexpr int kMostDescribed = 2048;

bool FeedIsOn(const Flags& flags) {
  return flags.live_feed == "on" ||
         (flags.live_feed == "auto" && rpc::OnLoopback(flags.host) &&
          flags.api_keys_file.empty());
}

}  // namespace

absl::Status Process::Start() {
  const absl::Time begun = absl::Now();
  absl::Status status = CheckPorts(flags_);
  if (status.ok()) status = Watchdog::CheckLimit(flags_.liveness_timeout);
  if (status.ok()) status = LoadClusterTls();
  if (status.ok()) status = LoadModel();
  if (!status.ok()) return status;
  const absl::Duration loading = absl::Now() - begun;
  const absl::StatusOr<OtlpOptions> otlp =
      ReadOtlpOptions(flags_.otlp_traces_endpoint);
  if (!otlp.ok()) return otlp.status();

  MakeMetrics();
  status = StartAccess();
  if (status.ok()) status = OpenSession();
  if (!status.ok()) return status;
  MakeLoopParts(*otlp);
  MakeServices();
  status = LoadPublicTls();
  if (status.ok()) status = StartServers();
  if (!status.ok()) return status;
  WarnIfExposed();
  WarnIfFewDescriptors();
  watcher_.Start();
  SayReady(begun, loading);
  signals_->OnDrain(&loop_, [this] { Drain(); });
  WatchOwnPorts();
  return absl::OkStatus();
}

absl::Status Process::LoadClusterTls() {
  auto tls = rpc::ClusterCredentials::Load(
      flags_.tls, rpc::PeerRole::kRouter, "", &watcher_,
      [this](rpc::Credentials now) {
        loop_.Post([this, now = std::move(now)]() mutable {
          dialer_->Replace(std::move(now));
        });
      });
  if (!tls.ok()) return tls.status();
  tls_ = *std::move(tls);
  return rpc::CheckPlaintext(tls_->first(), flags_.tls.allow_plaintext,
                             "--internal-host", flags_.internal_host);
}

absl::Status Process::LoadModel() {
  absl::StatusOr<Policy> policy = ParsePolicy(flags_.policy);
  if (!policy.ok()) return policy.status();
  absl::StatusOr<std::unique_ptr<ModelText>> model = ModelText::Load(
      flags_.model_dir, {.served_name = flags_.served_model_name,
                         .chat_template = flags_.chat_template,
                         .tool_call_parser = flags_.tool_call_parser,
                         .reasoning_parser = flags_.reasoning_parser});
  if (!model.ok()) return model.status();
  model_ = *std::move(model);
  RouterOptions& options = flags_.options;
  options.incarnation = random_.Bytes(16);
  options.model = model_->limits().model;
  options.policy = *policy;
  options.vocabulary = model_->limits().vocabulary_size;
  options.window = model_->window();
  options.some_see_all = model_->some_see_all();
  return absl::OkStatus();
}

void Process::MakeMetrics() {
  metrics_ = std::make_unique<Metrics>("router", flags_.options.model);
  if (flags_.metrics_compat == "vllm") metrics_->ExportVllmNames();
  AddBuildInfo("none", metrics_.get());
  call_metrics_ = std::make_unique<rpc::CallMetrics>(metrics_.get());
  router_metrics_ =
      std::make_unique<RouterMetrics>(metrics_.get(), flags_.options.policy);
  security_metrics_ =
      std::make_unique<rpc::SecurityMetrics>(metrics_.get(), tls_.get());
  watchdog_ = std::make_unique<Watchdog>(flags_.liveness_timeout, loop_.Now());
}

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
      return UsageError(
          "--api-key (or TANDEM_API_KEY) is empty, or has a space in it: no "
          "client can send that");
    }
    if (!flags_.api_keys.empty()) {
      access_->Install(Access::SharedKeys(flags_.api_keys));
    }
    return absl::OkStatus();
  }
  if (!flags_.api_keys.empty()) {
    return UsageError(
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

absl::Status Process::OpenSession() {
  const std::string& directory = flags_.record_session_dir;
  if (directory.empty()) return absl::OkStatus();
  auto session = session::CreateSessionFile(directory);
  if (!session.ok()) {
    return Annotate(session.status(), "--record-session-dir");
  }
  session_ = *std::move(session);
  return absl::OkStatus();
}

void Process::MakeLoopParts(const OtlpOptions& otlp) {
  const RouterOptions& options = flags_.options;
  loop_.RunSync([&] {
    flight::Attach();
    dialer_ = std::make_unique<RpcDialer>(&loop_, tls_->first());
    feed_ = std::make_unique<LiveFeed>(&loop_, router_metrics_.get(), [this] {
      return core_->State(core_->in_flight() <= kMostDescribed);
    });
    if (!otlp.address.empty()) {
      spans_ = std::make_unique<OtlpExporter>(otlp, &loop_, metrics_.get());
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
    // Within the core's turn, whose readings of the clock a session records.
    core_->adapter_control().Watch(
        [this] { facts_.set_adapters(core_->adapters()); });
  });
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

void Process::MakeServices() {
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
          .max_requests = flags_.options.max_requests,
          .lora_updating = flags_.lora_updating,
          .feed = FeedIsOn(flags_) ? feed_.get() : nullptr});
  registry_ = std::make_unique<RegistryServer>(&loop_, core_.get());
  admin_ = std::make_unique<AdminServer>(&loop_, core_.get(), gate_.get(),
                                         &access_->tenants());
}

void Process::SayReady(absl::Time begun, absl::Duration loading) {
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
       {"model", flags_.options.model},
       {"tool_calls",
        std::string(ToolCallStyleName(
            model_->limits().tool_call_style.value_or(ToolCallStyle::kNone)))},
       {"policy", flags_.policy}});
}

void Process::WatchOwnPorts() {
  self_connect_ = std::make_unique<SelfConnect>(
      std::vector<std::string>{public_server_->address(),
                               internal_server_->address()},
      SelfConnectOptions(), [this](const std::string& address) {
        loop_.Post([this, address] {
          DrainForFault(absl::UnavailableError(absl::StrCat(
              address, " takes no connections any more: to be started anew")));
        });
      });
}

}  // namespace tandem::router
