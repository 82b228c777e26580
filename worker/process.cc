// SPDX-License-Identifier: Apache-2.0
#include "worker/process.h"

#include <algorithm>
#include <future>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/build_info.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "common/flight_recorder.h"
#include "common/freed_buffers.h"
#include "common/http/failpoints.h"
#include "common/http/server.h"
#include "common/lifecycle.h"
#include "common/log.h"
#include "common/rpc/channel.h"
#include "common/rpc/client_stream.h"
#include "common/rpc/cluster_credentials.h"
#include "common/rpc/security_metrics.h"
#include "common/rpc/server.h"
#include "common/thread_loop.h"
#include "kernels/cpu/cpu_backend.h"
#include "tandem/v1/registry.grpc.pb.h"
#include "worker/offload_metrics.h"
#include "worker/offload_watch.h"
#include "worker/registration.h"
#include "worker/resolver.h"
#include "worker/startup_progress.h"

namespace tandem::worker {
namespace {

constexpr absl::Duration kResolveInterval = absl::Seconds(5);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(20);

struct AllFlags {
  WorkerFlags worker;
  LogFlags log;
  ClusterTlsFlags tls;
};

void AddWorkerFlags(CommandLine* line, AllFlags* flags) {
  WorkerFlags& worker = flags->worker;
  line->AddConfigFile();
  line->AddModel(&worker.model_dir, "Hugging Face directory with the model",
                 true);
  line->Group("Cluster");
  line->AddList("router", &worker.routers,
                "Internal endpoints (host:port) of the routers to register "
                "with: addresses or DNS names");
  line->Add("worker-id", &worker.worker_id,
            "Unique, stable name in the cluster; drawn if empty");
  line->Add("served-model-name", &worker.served_model_name,
            "Name of the model in the API; the directory's by default");
  line->Add("host", &worker.host, "Address to listen on");
  line->AddInt("grpc-port", &worker.grpc_port, "0 takes a free one",
               {0, 65535});
  line->AddInt("port", &worker.http_port,
               "HTTP: /metrics and /health; 0 takes a free one", {0, 65535});
  line->AddChoice("metrics-compat", &worker.metrics_compat, {"none", "vllm"},
                  "Further names on /metrics, for what reads those of vLLM");
  line->Add("advertise-host", &worker.advertise_host,
            "What others dial, where it is not --host");
  line->AddDuration("shutdown-timeout", &worker.shutdown_timeout,
                    "For the drain after SIGTERM; then sequences move");
  line->AddDuration("lease", &worker.lease,
                    "Silence of a router after which its calls end",
                    absl::Seconds(2));
  line->AddDuration("liveness-timeout", &worker.liveness_timeout,
                    "Without progress, where some could be made, /livez fails");
  line->Group("Model and memory");
  line->Add("device", &worker.device,
            "auto, cpu or cuda:N; auto is a GPU if one works, else the CPU");
  line->Add("gpu-memory-utilization", &worker.gpu_memory_utilization,
            "Share of the GPU's memory for this process", 0.0001, 1);
  line->Add("cuda-library", &worker.cuda_library,
            "libtandem_cuda.so, where it is not beside the program");
  line->Add("nccl-library", &worker.nccl_library,
            "libtandem_nccl.so, where it is not beside the program");
  line->AddInt("threads", &worker.threads,
               "0: one for each CPU that the process may use, by affinity and "
               "quota",
               {0, kernels::kMaxCpuThreads});
  line->AddChoice("dtype", &worker.dtype, {"auto", "f32", "bf16", "f16"},
                  "Format of the weights; auto is the checkpoint's");
  line->AddChoice("activation-dtype", &worker.activation_dtype,
                  {"auto", "f32", "bf16", "bf16-amx"},
                  "What products round their inputs to on a CPU; auto: f32, "
                  "that is not at all; bf16 does up to twice the arithmetic, "
                  "and bf16-amx many times where a CPU has AMX");
  line->AddChoice("quantization", &worker.quantization,
                  {"none", "fp8", "int8", "int4", "w8a8"},
                  "Quantise the layers' weights when loading");
  line->AddChoice(
      "kv-cache-dtype", &worker.kv_cache_dtype,
      {"auto", "f32", "bf16", "f16", "fp8", "fp8_e4m3", "int8", "int4"},
      "Format of the KV cache; auto: the activations' on a GPU, else "
      "f32 for f32 weights, bf16 for others");
  line->AddInt("max-model-len", &worker.max_model_len,
               "Positions per sequence; 0: as the model and the KV cache allow",
               {0, 1 << 24});
  line->AddInt("max-num-seqs", &worker.max_num_seqs, "Sequences per step",
               {1, 4096});
  line->AddInt("max-num-batched-tokens", &worker.max_num_batched_tokens,
               "Positions per step: the size of a prefill chunk", {1, 1 << 20});
  line->AddInt("block-size", &worker.block_size,
               "Positions per KV block, a multiple of 8", {8, 256});
  line->AddBytes("kv-cache-memory-bytes", &worker.kv_cache_bytes,
                 "KV cache at most, less where every slot fits in less; 0: 1 "
                 "GiB, or the GPU's share");
  line->AddInt("num-kv-blocks", &worker.num_blocks,
               "KV blocks exactly; 0: from the bytes", {0, 1 << 28});
  line->Add("enable-prefix-caching", &worker.prefix_caching,
            "Keep full blocks for later prompts that start alike");
  line->Add("tenant-cache-share", &worker.tenant_cache_share,
            "Of the KV blocks, what one tenant's cached ones may take before "
            "they are evicted first",
            0.01, 1);
  line->AddBytes("kv-offload-bytes", &worker.kv_offload_bytes,
                 "Host memory for what the prefix cache evicts; 0: none");
  line->Add("kv-offload-path", &worker.kv_offload_path,
            "Directory of a nameless file for what falls out of that memory");
  line->AddBytes("kv-offload-file-bytes", &worker.kv_offload_file_bytes,
                 "Size of that file at most");
  line->AddBytes("structured-cache-bytes", &worker.structured_cache_bytes,
                 "Compiled grammars that are kept for requests to come");
  line->AddChoice("kv-cache", &worker.kv_cache, {"on", "off"},
                  "off: every token's step computes its whole sequence again, "
                  "to show what the cache saves: the same tokens, slower");
  line->Add("enable-attention-output", &worker.attention_output,
            "Tokens bring attention weights along where a request asks for "
            "them");
  line->AddChoice("async-scheduling", &worker.async_scheduling,
                  {"auto", "on", "off"},
                  "Submit the next step of decodes while one runs; auto: on a "
                  "GPU");
  line->Add("speculative-config", &worker.speculative_config,
            "Of decode workers, JSON as in vLLM: {\"method\": \"ngram\", "
            "\"num_speculative_tokens\": N}, \"prompt_lookup_min\" and "
            "\"prompt_lookup_max\"; or {\"model\": DIRECTORY, "
            "\"num_speculative_tokens\": N} for a draft model");
  line->Add(
      "enforce-eager", &worker.enforce_eager,
      "On a GPU, put steps on it operation by operation (no CUDA graphs)");
  line->AddList("lora-modules", &worker.adapters.modules,
                "LoRA adapters as PEFT saves them, NAME=DIRECTORY each");
  line->AddInt("max-loras", &worker.adapters.max_loras,
               "Adapters at once, loaded in service ones included; memory is "
               "kept for each; 0: as many as --lora-modules",
               {0, kMaxAdapters});
  line->AddInt("max-lora-rank", &worker.adapters.max_rank,
               "Largest rank of an adapter, for which memory is kept",
               {1, 512});
  line->Group("Handoff");
  line->AddChoice("handoff", &worker.handoff, {"auto", "nccl", "shm", "grpc"},
                  "How KV moves; auto: between GPUs NCCL, else shared memory "
                  "on one host, else gRPC");
  line->AddBytes("handoff-slab-bytes", &worker.slab_bytes,
                 "Size of a staging buffer; 0: 8 MiB on a GPU, else 1 MiB",
                 {0, 64 << 20});
  line->AddInt("handoff-layers-per-group", &worker.layers_per_group,
               "Layers that move together; 0: as many as fill half a buffer",
               {0, 1024});
  line->Add("mixed-numerics", &worker.mixed_numerics,
            "Accept pairs that differ in number formats or device (not "
            "reproducible)");
}

absl::StatusOr<std::vector<Endpoint>> ParseRouters(
    const std::vector<std::string>& routers) {
  std::vector<Endpoint> endpoints;
  for (const std::string& text : routers) {
    absl::StatusOr<Endpoint> endpoint = ParseEndpoint(text);
    if (!endpoint.ok()) {
      return UsageError(
          absl::StrCat("--router: ", std::string(endpoint.status().message())));
    }
    endpoints.push_back(*std::move(endpoint));
  }
  if (endpoints.empty()) {
    return UsageError(
        "--router is empty: name the router's internal endpoint, host:port");
  }
  return endpoints;
}

// As routers would refuse it, again and again.
absl::Status CheckWorkerId(const std::string& id) {
  constexpr size_t kMost = 256;
  const bool fine =
      id.size() <= kMost && std::none_of(id.begin(), id.end(), [](char c) {
        return static_cast<unsigned char>(c) < 0x21 || c == 0x7f;
      });
  if (fine) return absl::OkStatus();
  return UsageError(
      absl::StrCat("--worker-id: at most ", kMost,
                   " bytes without spaces and control characters are taken"));
}

// An address that is every machine's own leads a router on another one nowhere.
absl::Status CheckAdvertised(const WorkerFlags& flags,
                             const std::vector<Endpoint>& routers) {
  const bool is_any = flags.host == "0.0.0.0" || flags.host == "::";
  if (!is_any || !flags.advertise_host.empty() ||
      std::all_of(routers.begin(), routers.end(), [](const Endpoint& one) {
        return rpc::OnLoopback(one.host);
      })) {
    return absl::OkStatus();
  }
  return UsageError(
      absl::StrCat("--host is ", flags.host,
                   ", and routers and other workers need this machine's own "
                   "name or address: give it as --advertise-host"));
}

// One worker process, from bring-up to the end of its drain. Members in order
// of construction; the loop stops before what its tasks use goes away.
class Process {
 public:
  Process(const RoleSpec& spec, const AllFlags& flags, SignalWatcher* signals)
      : spec_(spec),
        flags_(flags),
        signals_(signals),
        offload_watch_(flags.worker.kv_offload_path) {}

  absl::Status Run() {
    absl::Status status = Start();
    if (status.ok()) status = WaitUntilDrained();
    Stop();
    return status;
  }

 private:
  absl::Status Start();
  absl::Status StartHttp();
  absl::Status BindGrpc();
  absl::Status StartRole();
  absl::Status StartGrpc();
  void StartRegistration(std::vector<Endpoint> routers);
  void StartAdapters();
  void EachSecond();
  // Can be given work: for readiness probes, from any thread.
  absl::Status Ready() const;
  void Drain();
  void PollDrained();
  void Finish(const absl::Status& status);
  absl::Status WaitUntilDrained() { return finished_.get_future().get(); }
  void SynchronizeExecutors();
  void Stop();
  std::unique_ptr<RegistryStream> DialRouter(const std::string& endpoint);

  const RoleSpec& spec_;
  const AllFlags& flags_;
  SignalWatcher* const signals_;
  std::unique_ptr<rpc::ClusterCredentials> credentials_;
  rpc::Credentials tls_;  // of calls to others; the loop's once it runs
  SystemRandom random_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<rpc::SecurityMetrics> security_metrics_;
  std::unique_ptr<rpc::CallMetrics> call_metrics_;
  std::unique_ptr<Watchdog> watchdog_;
  std::unique_ptr<HttpServer> http_;
  rpc::ServerOptions grpc_;
  std::unique_ptr<rpc::Listener> bound_;  // until the server has it
  std::unique_ptr<ThreadLoop> loop_;
  FileWatcher watcher_;
  WorkerParts parts_;
  std::unique_ptr<MeasuredExecutor> executor_;
  std::unique_ptr<MeasuredExecutor> draft_executor_;  // may be null
  std::unique_ptr<OffloadMetrics> offload_metrics_;
  OffloadWatch offload_watch_;
  std::unique_ptr<Role> role_;
  std::unique_ptr<rpc::Server> server_;
  std::map<std::string, std::string> tls_names_;    // by router address
  std::unique_ptr<DeviceAdapters> adapter_memory_;  // null: no slots
  std::unique_ptr<Registration> registration_;
  std::unique_ptr<AdapterLoader> adapter_loader_;
  std::unique_ptr<Resolver> resolver_;
  std::unique_ptr<Timer> second_;
  std::unique_ptr<Timer> drain_poll_;
  StartupProgress progress_;
  std::atomic<bool> started_ = false;  // all above that probes look at is there
  std::atomic<bool> ready_ = false;
  std::atomic<bool> registered_ = false;  // with a router at least
  absl::Time drain_ends_;
  bool finished_told_ = false;
  std::promise<absl::Status> finished_;
};

absl::Status CheckPlaintext(const AllFlags& flags, const rpc::Credentials& tls,
                            const std::vector<Endpoint>& routers) {
  const bool allowed = flags.tls.allow_plaintext;
  absl::Status status =
      rpc::CheckPlaintext(tls, allowed, "--host", flags.worker.host);
  for (const Endpoint& router : routers) {
    if (!status.ok()) break;
    status = rpc::CheckPlaintext(tls, allowed, "--router", router.host);
  }
  return status;
}

absl::Status Process::Start() {
  const absl::Time begun = absl::Now();
  absl::Status status = Watchdog::CheckLimit(flags_.worker.liveness_timeout);
  if (!status.ok()) return status;
  absl::StatusOr<std::vector<Endpoint>> routers =
      ParseRouters(flags_.worker.routers);
  if (!routers.ok()) return routers.status();
  status = CheckWorkerId(flags_.worker.worker_id);
  if (!status.ok()) return status;
  status = CheckAdvertised(flags_.worker, *routers);
  if (!status.ok()) return status;
  auto tls = rpc::ClusterCredentials::Load(
      flags_.tls,
      spec_.role == v1::WORKER_ROLE_PREFILL ? rpc::PeerRole::kPrefill
                                            : rpc::PeerRole::kDecode,
      flags_.worker.worker_id, &watcher_, [this](const rpc::Credentials& now) {
        loop_->Post([this, now] {
          tls_ = now;
          role_->ReplaceCredentials(now);
        });
      });
  if (!tls.ok()) return tls.status();
  credentials_ = *std::move(tls);
  tls_ = credentials_->first();
  status = CheckPlaintext(flags_, tls_, *routers);
  if (!status.ok()) return status;
  loop_ = std::make_unique<ThreadLoop>(
      spec_.role == v1::WORKER_ROLE_PREFILL ? "prefill" : "decode");
  status = StartHttp();
  if (status.ok()) status = BindGrpc();
  if (!status.ok()) return status;
  absl::StatusOr<WorkerParts> parts =
      BringUp(flags_.worker, spec_.role, loop_.get(), &progress_);
  if (!parts.ok()) return parts.status();
  parts_ = *std::move(parts);
  const absl::Duration loading = absl::Now() - begun;
  status = StartRole();
  if (status.ok()) status = StartGrpc();
  if (!status.ok()) return status;
  started_ = true;
  parts_.clock.End("serving");
  *parts_.hello.mutable_startup() = parts_.clock.phases();
  StartRegistration(*std::move(routers));
  GaugeSet& startup = metrics_->AddGauges(
      "tandem_startup_seconds", "Start to registered, by phase", "phase", 16);
  startup["model"].Set(absl::ToDoubleSeconds(loading));
  startup["total"].Set(absl::ToDoubleSeconds(absl::Now() - begun));
  for (const v1::StartupPhase& phase : parts_.clock.phases()) {
    startup[phase.name()].Set(phase.seconds());
  }
  const kernels::KvShape& shape = parts_.executor->kv_shape();
  LogInfo("ready", {{"endpoint", parts_.hello.worker().endpoint()},
                    {"http", parts_.hello.http_endpoint()},
                    {"device", parts_.backend->description()},
                    {"kv_tokens", int64_t{shape.num_blocks} * shape.block_size},
                    {"kv_dtype", parts_.kv_dtype},
                    {"max_model_len", parts_.engine_options.max_model_len},
                    {"took", absl::Now() - begun}});
  watcher_.Start();
  signals_->OnDrain(loop_.get(), [this] { Drain(); });
  return absl::OkStatus();
}

// First of all, so that whoever waits for the model sees how far it is.
absl::Status Process::StartHttp() {
  if (TANDEM_FAILPOINT("worker.listen", "fail")) return failpoint::Error();
  http_ = std::make_unique<HttpServer>(
      HttpOptions{.host = flags_.worker.host, .port = flags_.worker.http_port});
  const auto handle = [this](const char* path, auto answer) {
    http_->Handle("GET", path, [this, answer](const HttpRequest&) {
      return started_ ? answer() : HealthResponse(progress_.Status());
    });
  };
  handle("/metrics", [this] {
    return HttpResponse{.content_type = Metrics::kContentType,
                        .body = metrics_->Text()};
  });
  handle("/health", [this] {
    return HealthResponse(ready_
                              ? watchdog_->Check(loop_->Now())
                              : absl::UnavailableError("starting or draining"));
  });
  handle("/livez",
         [this] { return HealthResponse(watchdog_->Check(loop_->Now())); });
  handle("/readyz", [this] { return HealthResponse(Ready()); });
#ifdef TANDEM_FAILPOINTS
  ServeFailpoints(http_.get());
#endif
  return http_->Start();
}

// Before the model is loaded: a port that is taken is told at once, and nobody
// else takes it meanwhile.
absl::Status Process::BindGrpc() {
  grpc_.address =
      Endpoint{flags_.worker.host, flags_.worker.grpc_port}.ToString();
  grpc_.rotating = credentials_->rotating();
  grpc_.connections = rpc::kClusterConnections;
  // Each router's calls are on one connection, and as many as the longest queue
  // takes, and more that are to hear that it is full.
  grpc_.max_concurrent_streams = 1 << 20;
  auto bound =
      rpc::Listener::Bind(grpc_.address, grpc_.connections, grpc_.port_flag);
  if (!bound.ok()) return bound.status();
  bound_ = *std::move(bound);
  return absl::OkStatus();
}

absl::Status Process::StartRole() {
  InitLog({.format = flags_.log.format,
           .level = flags_.log.level,
           .role = spec_.role == v1::WORKER_ROLE_PREFILL ? "prefill" : "decode",
           .worker = parts_.hello.worker().worker_id()})
      .IgnoreError();
  metrics_ = std::make_unique<Metrics>(
      spec_.role == v1::WORKER_ROLE_PREFILL ? "prefill" : "decode",
      parts_.hello.model());
  if (flags_.worker.metrics_compat == "vllm") metrics_->ExportVllmNames();
  security_metrics_ = std::make_unique<rpc::SecurityMetrics>(
      metrics_.get(), credentials_.get());
  watchdog_ =
      std::make_unique<Watchdog>(flags_.worker.liveness_timeout, loop_->Now());
  AddBuildInfo(parts_.gpu != nullptr ? "cuda" : "cpu", metrics_.get());
  call_metrics_ = std::make_unique<rpc::CallMetrics>(metrics_.get());
  offload_metrics_ = std::make_unique<OffloadMetrics>(metrics_.get());
  executor_ = std::make_unique<MeasuredExecutor>(parts_.executor.get(),
                                                 loop_.get(), metrics_.get(),
                                                 parts_.engine_options.work);
  if (parts_.draft.executor != nullptr) {
    draft_executor_ = std::make_unique<MeasuredExecutor>(
        parts_.draft.executor.get(), loop_.get(), metrics_.get(),
        parts_.draft.work, "draft");
    parts_.engine_options.speculation.draft_model.executor =
        draft_executor_.get();
  }
  absl::Status made = absl::CancelledError("the loop stopped");
  loop_->RunSync([&] {
    flight::Attach();
    made = parts_.gpu == nullptr
               ? absl::OkStatus()
               : parts_.gpu->Start(parts_.hello.worker().worker_id(),
                                   loop_.get(), &random_, metrics_.get());
    if (!made.ok()) return;
    role_ = spec_.make({flags_.worker, parts_, executor_.get(), loop_.get(),
                        &random_, metrics_.get(), tls_});
  });
  return made;
}

absl::Status Process::StartGrpc() {
  grpc_.metrics = call_metrics_.get();
  absl::StatusOr<std::unique_ptr<rpc::Server>> server =
      rpc::Server::Start(grpc_, role_->services(), std::move(bound_));
  if (!server.ok()) return server.status();
  server_ = *std::move(server);
  for (const std::string& service : spec_.health_services) {
    server_->SetServing(service, true);
  }
  const std::string host = flags_.worker.advertise_host.empty()
                               ? flags_.worker.host
                               : flags_.worker.advertise_host;
  parts_.hello.mutable_worker()->set_endpoint(
      Endpoint{host, server_->port()}.ToString());
  parts_.hello.set_http_endpoint(Endpoint{host, http_->port()}.ToString());
  return absl::OkStatus();
}

std::unique_ptr<RegistryStream> Process::DialRouter(
    const std::string& endpoint) {
  rpc::ChannelOptions options;
  if (tls_.tls()) options.tls_server_name = tls_names_[endpoint];
  options.server = rpc::Identity{rpc::PeerRole::kRouter};
  auto stub = std::make_shared<v1::RegistryService::Stub>(
      rpc::MakeChannel(endpoint, tls_, options));
  // The registration is the lease: it lives as long as both ends.
  return rpc::OpenBidi<v1::RegisterRequest, v1::RegisterResponse>(
      loop_.get(), {.timeout = absl::InfiniteDuration(), .peer = endpoint},
      [stub](auto* context, auto* reactor) {
        stub->async()->Register(context, reactor);
      });
}

void Process::StartRegistration(std::vector<Endpoint> routers) {
  RegistrationOptions options;
  options.hello = parts_.hello;
  loop_->RunSync([&] {
    registration_ = std::make_unique<Registration>(
        options, loop_.get(), &random_,
        [this](const std::string& endpoint) { return DialRouter(endpoint); },
        [this] { return role_->Load(); }, parts_.pool.get(),
        [](const std::string& endpoint, const absl::Status& status) {
          if (ErrorReason(status) == "DRAINING") {
            LogInfo("router left", {{"router", endpoint}});
            return;
          }
          static LogLimiter limiter(absl::Seconds(10));
          int64_t hidden;
          if (limiter.Allow(absl::Now(), &hidden)) {
            // Its other ports answer so, without a word.
            const bool port = absl::IsUnimplemented(status);
            LogWarning("router lost",
                       {{"router", endpoint},
                        {"status", port ? absl::UnimplementedError(
                                              "--router is the router's "
                                              "internal port, 50052 unless "
                                              "changed, and this is another")
                                        : status},
                        {"hidden", hidden}});
          }
        });
    StartAdapters();
    second_ = std::make_unique<Timer>(loop_.get());
    drain_poll_ = std::make_unique<Timer>(loop_.get());
    EachSecond();
  });
  ready_ = true;
  resolver_ = std::make_unique<Resolver>(
      std::move(routers), kResolveInterval, loop_.get(),
      [this](const std::map<std::string, std::string>& found) {
        tls_names_ = found;
        std::vector<std::string> endpoints;
        endpoints.reserve(found.size());
        for (const auto& [address, name] : found) {
          endpoints.push_back(address);
        }
        registration_->SetRouters(endpoints);
      });
}

// What routers ask for while this worker serves.
void Process::StartAdapters() {
  if (parts_.adapters.slots != nullptr) {
    adapter_memory_ = std::make_unique<DeviceAdapters>(
        parts_.model->spec(), *parts_.adapters.slots, parts_.executor.get(),
        loop_.get());
  }
  adapter_loader_ = std::make_unique<AdapterLoader>(
      &parts_.adapters.table, adapter_memory_.get(), [this] {
        v1::AdapterList list;
        parts_.adapters.table.List(list.mutable_adapters());
        LogInfo("adapters", {{"served", list.adapters_size()},
                             {"free", parts_.adapters.table.counts().free}});
        registration_->SetAdapters(list);
      });
  registration_->ServeAdapters(adapter_loader_.get());
}

void Process::EachSecond() {
  second_->Start(absl::Seconds(1), [this] { EachSecond(); });
  watchdog_->Beat(loop_->Now(), role_->progress(), role_->has_work());
  registered_ = registration_->connected() > 0;
  role_->UpdateMetrics();
  security_metrics_->Update();
  if (parts_.gpu != nullptr) parts_.gpu->UpdateMetrics();
  if (parts_.offload != nullptr) {
    offload_metrics_->Update(*parts_.offload);
    offload_watch_.Update(parts_.offload->file_status());
  }
  if (!role_->fatal().ok()) Finish(role_->fatal());
}

absl::Status Process::Ready() const {
  if (!ready_) return absl::UnavailableError("starting or draining");
  if (!registered_) return absl::UnavailableError("no router knows it");
  return watchdog_->Check(loop_->Now());
}

void Process::Drain() {
  TANDEM_FAILPOINT("worker.drain", "crash stall");
  LogInfo("draining", {{"timeout", flags_.worker.shutdown_timeout}});
  ready_ = false;
  for (const std::string& service : spec_.health_services) {
    server_->SetServing(service, false);
  }
  role_->Drain();
  registration_->SayLoad();
  drain_ends_ = loop_->Now() + flags_.worker.shutdown_timeout;
  PollDrained();
}

void Process::PollDrained() {
  if (role_->idle()) {
    Finish(absl::OkStatus());
    return;
  }
  if (loop_->Now() >= drain_ends_) {
    role_->CloseAll(absl::UnavailableError(
        "this worker is going away: the drain's time is over"));
    Finish(absl::OkStatus());
    return;
  }
  drain_poll_->Start(kDrainPoll, [this] { PollDrained(); });
}

void Process::Finish(const absl::Status& status) {
  if (std::exchange(finished_told_, true)) return;
  finished_.set_value(status);
}

void Process::SynchronizeExecutors() {
  if (parts_.executor != nullptr) parts_.executor->Synchronize();
  if (parts_.draft.executor != nullptr) parts_.draft.executor->Synchronize();
}

void Process::Stop() {
  TANDEM_FAILPOINT("worker.stop", "crash stall");
  watcher_.Stop();
  resolver_.reset();
  if (loop_ != nullptr && role_ != nullptr) {
    loop_->RunSync([&] {
      second_.reset();
      drain_poll_.reset();
      if (adapter_loader_ != nullptr) adapter_loader_->Stop();
      registration_.reset();
      role_->CloseAll(absl::UnavailableError("this worker is going away"));
    });
  }
  // Streams that were just closed still have their last word to write.
  if (server_ != nullptr) server_->Shutdown(absl::Seconds(2));
  http_.reset();
  if (loop_ != nullptr) {
    // Gathers and scatters that run use memory of the role's; what they tell
    // the loop at their end is to arrive there.
    loop_->RunSync([&] { SynchronizeExecutors(); });
    loop_->RunSync([] {});
    loop_->Stop();
  }
  // Nothing runs but what those last words began.
  SynchronizeExecutors();
  role_.reset();
  adapter_loader_.reset();
  adapter_memory_.reset();
  server_.reset();
  executor_.reset();
  draft_executor_.reset();
  parts_.draft.pool.reset();
  parts_.offload.reset();
  parts_.offload_file.reset();
  parts_.pool.reset();
  // Its wait for communicators has an end; freeing the executor's memory would
  // wait for whatever of theirs is still on the device.
  parts_.gpu.reset();
  parts_.draft.executor.reset();
  parts_.executor.reset();
}

}  // namespace

int RunWorker(int argc, char** argv, const RoleSpec& spec) {
  KeepFreedBuffers();
  AllFlags flags;
  CommandLine line(spec.binary, spec.description);
  line.Example(
      absl::StrCat(spec.binary, " models/tales --router 127.0.0.1:50052"));
  AddWorkerFlags(&line, &flags);
  if (spec.add_flags) spec.add_flags(&line);
  line.Group("TLS");
  flags.tls.AddTo(&line);
  line.Group("Logs");
  flags.log.AddTo(&line);
  if (const std::optional<int> code = line.Parse(argc, argv)) return *code;
  const std::string role = spec.binary.substr(spec.binary.find('-') + 1);
  const absl::Status logging = InitLog({.format = flags.log.format,
                                        .level = flags.log.level,
                                        .role = role,
                                        .worker = flags.worker.worker_id});
  if (!logging.ok()) return ReportFailure(spec.binary, logging);
  for (const auto& [name, value] : line.NonDefaults()) {
    LogDebug("flag", {{name, value}});
  }
  RaiseDescriptorLimit();
  const absl::Status recording =
      flight::Install(role, flags.log.flight_record_dir);
  if (!recording.ok()) return ReportFailure(spec.binary, recording);
  SignalWatcher signals;
  Process process(spec, flags, &signals);
  const absl::Status status = process.Run();
  if (!status.ok()) return ReportFailure(spec.binary, status);
  return signals.ExitCode(kExitOk);
}

}  // namespace tandem::worker
