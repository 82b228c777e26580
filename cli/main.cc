// SPDX-License-Identifier: Apache-2.0
// tandem: the command line for people. Subcommands are files beside this one.

#include <initializer_list>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cli/bench/command.h"
#include "cli/chat/chat.h"
#include "cli/cordon.h"
#include "cli/doctor/doctor.h"
#include "cli/explain/command.h"
#include "cli/flight.h"
#include "cli/generate.h"
#include "cli/keys.h"
#include "cli/lora.h"
#include "cli/model_source.h"
#include "cli/output.h"
#include "cli/plan/command.h"
#include "cli/replay.h"
#include "cli/sampling_flags.h"
#include "cli/serve.h"
#include "cli/status.h"
#include "cli/version.h"
#include "common/flags.h"
#include "common/lifecycle.h"
#include "common/progress.h"
#include "kernels/cpu/cpu_backend.h"
#include "router/core/options.h"

namespace tandem::cli {
namespace {

struct ServeCommand {
  ServeFlags flags;
  ModelSource source;
  TlsFlags tls;
  LogFlags log;
  std::string record_session_dir;
  // Handed on to the children where given.
  std::string policy = "prefix_aware";
  std::string chat_template;
  std::string tool_call_parser = "auto";
  std::string reasoning_parser = "auto";
  std::string dtype = "auto", activation_dtype = "auto", kv_dtype = "auto",
              handoff = "auto";
  std::string quantization = "none";
  int max_model_len = 0, max_num_seqs = 64, max_batched = 512;
  int block_size = 16;
  int64_t kv_bytes = 0;
  std::vector<std::string> lora_modules;
  int max_loras = 0;
  int max_lora_rank = 16;
  bool lora_updating = false;
  absl::Duration default_deadline = absl::Seconds(600);
  std::string api_key;
  std::string api_keys_file;
  std::string ssl_certfile, ssl_keyfile, ssl_ca_certs;
  int64_t offload_bytes = 0;
  std::string offload_path;
  int64_t offload_file_bytes = 0;
  std::string kv_cache = "on";
  bool prefix_caching = true;
  std::string speculative_config;
  int max_requests = router::RouterOptions().max_requests;
  int max_queued = router::RouterOptions().max_queued;
  std::string metrics_compat = "none";
  std::string otlp_traces_endpoint;
  bool no_kv_cache = false;
  bool attention_output = false;
  std::string live_feed = "auto";
  std::string device = "auto";
  double gpu_memory_utilization = 0.9;

  void AddTo(CommandLine* line);
  void Complete(const CommandLine& line);
  // Fetches the model if it is not here, and runs.
  absl::StatusOr<int> Run();
};

void ServeCommand::AddTo(CommandLine* line) {
  line->Example("tandem serve models/tales --prefill 2 --decode 2");
  line->AddConfigFile();
  source.AddTo(line);
  line->Group("Cluster");
  line->AddInt("prefill", &flags.prefill, "Prefill workers", {0, 64});
  line->AddInt("decode", &flags.decode, "Decode workers", {1, 64});
  line->Add("served-model-name", &flags.served_model_name,
            "Name of the model in the API; the directory's by default");
  line->AddChoice("policy", &policy,
                  {"prefix_aware", "least_loaded", "round_robin"},
                  "How requests are placed");
  line->Add("chat-template", &chat_template,
            "File in place of the model's own chat template");
  line->AddChoice("tool-call-parser", &tool_call_parser,
                  {"auto", "llama3_json", "hermes", "mistral", "openai",
                   "qwen3_coder", "qwen3_xml", "glm45", "glm47", "minimax_m2",
                   "deepseek_v3", "deepseek_v31", "kimi_k2", "gemma4", "none"},
                  "How the model writes tool calls");
  line->AddChoice("reasoning-parser", &reasoning_parser,
                  {"auto", "deepseek_r1", "qwen3", "glm45", "minimax_m2",
                   "deepseek_v3", "kimi_k2", "gemma4", "openai_gptoss", "none"},
                  "How the model reasons before it answers");
  line->Add("enable-no-kv-cache", &no_kv_cache,
            "Requests may ask to be computed without a KV cache");
  line->Add("enable-attention-output", &attention_output,
            "Requests may ask for attention weights with every token");
  line->Add("allow-runtime-lora-updating", &lora_updating,
            "Clients may load and unload LoRA adapters over HTTP");
  line->AddInt("max-requests", &max_requests,
               "Requests in flight, waiting ones included", {1, 1 << 20});
  line->AddInt("max-queued", &max_queued,
               "Of them waiting for room on a worker", {1, 1 << 20});
  line->AddDuration("shutdown-timeout", &flags.shutdown_timeout,
                    "For the drain after Ctrl-C");
  line->AddDuration("default-deadline", &default_deadline,
                    "Of requests that bring none", absl::Milliseconds(1));
  line->Group("Listening");
  line->Add("host", &flags.host, "Address of the public ports");
  line->AddInt("grpc-port", &flags.grpc_port, "Public gRPC", {1, 65535});
  line->AddInt("port", &flags.http_port,
               "HTTP: OpenAI's API, the page, /metrics, /health", {1, 65535});
  line->AddInt("admin-port", &flags.admin_port,
               "Admin gRPC on loopback; 0: 50053, or a free one if that is "
               "taken",
               {0, 65535});
  line->Add("webui", &flags.webui, "The page at /");
  line->AddChoice("live-feed", &live_feed, {"auto", "on", "off"},
                  "Workers and requests as numbers, for the page; auto: on if "
                  "--host is of loopback and no --api-keys-file is given");
  line->Group("Workers");
  line->AddInt(
      "threads", &flags.threads,
      "Per worker; 0 divides the cores among them (two: among those of "
      "a role)",
      {0, kernels::kMaxCpuThreads});
  line->Add("device", &device, "auto, cpu or cuda:N");
  line->Add("gpu-memory-utilization", &gpu_memory_utilization,
            "Share of the GPU's memory, divided among the workers", 0.01, 1);
  line->AddChoice("dtype", &dtype, {"auto", "f32", "bf16", "f16"},
                  "Format of the weights");
  line->AddChoice("activation-dtype", &activation_dtype,
                  {"auto", "f32", "bf16", "bf16-amx"},
                  "What products round their inputs to on a CPU; auto: f32, "
                  "that is not at all; bf16 does up to twice the arithmetic, "
                  "and bf16-amx many times where a CPU has AMX");
  line->AddChoice("quantization", &quantization,
                  {"none", "fp8", "int8", "int4", "w8a8"},
                  "Quantise the layers' weights when loading");
  line->AddChoice(
      "kv-cache-dtype", &kv_dtype,
      {"auto", "f32", "bf16", "f16", "fp8", "fp8_e4m3", "int8", "int4"},
      "Format of the KV cache");
  line->AddInt("max-model-len", &max_model_len, "Positions per sequence",
               {0, 1 << 24});
  line->AddInt("max-num-seqs", &max_num_seqs, "Sequences per step", {1, 4096});
  line->AddInt("max-num-batched-tokens", &max_batched, "Positions per step",
               {1, 1 << 20});
  line->AddInt("block-size", &block_size, "Positions per KV block", {8, 256});
  line->AddBytes("kv-cache-memory-bytes", &kv_bytes,
                 "Per worker, at most; 0: 1 GiB, or the GPU's share");
  line->AddBytes("kv-offload-bytes", &offload_bytes,
                 "Per worker: host memory for evicted KV; 0: none");
  line->Add("kv-offload-path", &offload_path,
            "Directory for evicted KV that falls out of that memory");
  line->AddBytes("kv-offload-file-bytes", &offload_file_bytes,
                 "Per worker: in that directory at most");
  line->AddChoice("kv-cache", &kv_cache, {"on", "off"},
                  "off: every token computes its whole sequence again");
  line->Add("enable-prefix-caching", &prefix_caching,
            "Keep full KV blocks for later prompts that start alike");
  line->Add("speculative-config", &speculative_config,
            "Of decode workers, JSON as in vLLM: {\"method\": \"ngram\", "
            "\"num_speculative_tokens\": N}, or {\"model\": DIRECTORY, ...} "
            "for a draft model");
  line->AddList("lora-modules", &lora_modules,
                "LoRA adapters as PEFT saves them, NAME=DIRECTORY each");
  line->AddInt("max-loras", &max_loras,
               "Adapters at once, loaded in service ones included; 0: as many "
               "as --lora-modules",
               {0, 1024});
  line->AddInt("max-lora-rank", &max_lora_rank, "Largest rank of an adapter",
               {1, 512});
  line->AddChoice("handoff", &handoff, {"auto", "nccl", "shm", "grpc"},
                  "How KV moves");
  line->Group("Access");
  line->Add("api-key", &api_key,
            "Clients must bring it as 'Authorization: Bearer KEY'");
  line->Add("api-keys-file", &api_keys_file,
            "Keys of several tenants and their limits; see `tandem keys`");
  line->Add("ssl-certfile", &ssl_certfile,
            "PEM: certificate chain of the HTTP and gRPC ports for clients");
  line->Add("ssl-keyfile", &ssl_keyfile, "PEM: its private key");
  line->Add("ssl-ca-certs", &ssl_ca_certs,
            "PEM: authorities, of one of which clients must show a "
            "certificate");
  line->Group("TLS");
  tls.AddTo(line);
  line->Group("Watching");
  line->AddChoice("metrics-compat", &metrics_compat, {"none", "vllm"},
                  "Further names on /metrics, for what reads those of vLLM");
  line->Add("otlp-traces-endpoint", &otlp_traces_endpoint,
            "Collector that takes spans over OTLP/gRPC, http://host:4317");
  line->Group("Logs");
  log.AddTo(line);
  line->Add("record-session-dir", &record_session_dir,
            "Where to record all that the router takes in and does, prompts "
            "and answers too, for `tandem replay`");
}

void ServeCommand::Complete(const CommandLine& line) {
  // The children get what it says as flags; its keys are not theirs.
  unsetenv("TANDEM_CONFIG");
  // To a decode worker it would be the number of its own sequences.
  unsetenv("TANDEM_MAX_REQUESTS");
  flags.tls_cert = tls.cert;
  flags.tls_key = tls.key;
  flags.tls_ca = tls.ca;
  const auto both = [&](const char* name, const std::string& value) {
    if (!line.given(name)) return;
    for (auto* arguments : {&flags.router_arguments, &flags.worker_arguments}) {
      arguments->insert(arguments->end(), {absl::StrCat("--", name), value});
    }
  };
  const auto worker = [&](const char* name, const std::string& value) {
    if (!line.given(name)) return;
    flags.worker_arguments.insert(flags.worker_arguments.end(),
                                  {absl::StrCat("--", name), value});
  };
  both("log-level", log.level);
  // The children's output is a pipe, whatever this one's is.
  flags.json_log =
      log.format == "json" || (log.format == "auto" && !IsTerminal(stderr));
  for (auto* arguments : {&flags.router_arguments, &flags.worker_arguments}) {
    arguments->insert(arguments->end(),
                      {"--log-format", flags.json_log ? "json" : "text"});
  }
  both("flight-record-dir", log.flight_record_dir);
  both("metrics-compat", metrics_compat);
  // Not as an argument, which every user of the machine may read.
  if (!api_key.empty()) setenv("TANDEM_API_KEY", api_key.c_str(), 1);
  const auto router = [&](const char* name, const std::string& value) {
    if (!line.given(name)) return;
    flags.router_arguments.insert(flags.router_arguments.end(),
                                  {absl::StrCat("--", name), value});
  };
  // As well where it is off: the environment, which children inherit, may have
  // it on.
  const auto flag = [&](const char* name, bool value,
                        std::initializer_list<std::vector<std::string>*> of) {
    if (!line.given(name)) return;
    for (auto* arguments : of) {
      arguments->push_back(absl::StrCat(value ? "--" : "--no-", name));
    }
  };
  router("record-session-dir", record_session_dir);
  router("default-deadline", absl::FormatDuration(default_deadline));
  router("api-keys-file", api_keys_file);
  router("ssl-certfile", ssl_certfile);
  router("ssl-keyfile", ssl_keyfile);
  router("ssl-ca-certs", ssl_ca_certs);
  flags.public_tls = !ssl_certfile.empty();
  flags.asks_for_key = !api_key.empty() || !api_keys_file.empty();
  router("policy", policy);
  router("chat-template", chat_template);
  router("tool-call-parser", tool_call_parser);
  router("reasoning-parser", reasoning_parser);
  router("max-requests", absl::StrCat(max_requests));
  router("max-queued", absl::StrCat(max_queued));
  router("otlp-traces-endpoint", otlp_traces_endpoint);
  flag("enable-no-kv-cache", no_kv_cache, {&flags.router_arguments});
  flag("webui", flags.webui, {&flags.router_arguments});
  router("live-feed", live_feed);
  flag("allow-runtime-lora-updating", lora_updating, {&flags.router_arguments});
  flag("enable-attention-output", attention_output,
       {&flags.router_arguments, &flags.worker_arguments});
  worker("device", device);
  // The workers of one host share its first GPU.
  flags.worker_arguments.insert(
      flags.worker_arguments.end(),
      {"--gpu-memory-utilization",
       absl::StrCat(gpu_memory_utilization /
                    std::max(1, flags.prefill + flags.decode))});
  worker("dtype", dtype);
  worker("activation-dtype", activation_dtype);
  worker("quantization", quantization);
  worker("kv-cache-dtype", kv_dtype);
  worker("max-model-len", absl::StrCat(max_model_len));
  worker("max-num-seqs", absl::StrCat(max_num_seqs));
  worker("max-num-batched-tokens", absl::StrCat(max_batched));
  worker("block-size", absl::StrCat(block_size));
  for (const std::string& module : lora_modules) worker("lora-modules", module);
  worker("max-loras", absl::StrCat(max_loras));
  worker("max-lora-rank", absl::StrCat(max_lora_rank));
  worker("kv-cache-memory-bytes", absl::StrCat(kv_bytes));
  worker("kv-offload-bytes", absl::StrCat(offload_bytes));
  worker("kv-offload-path", offload_path);
  worker("kv-offload-file-bytes", absl::StrCat(offload_file_bytes));
  worker("kv-cache", kv_cache);
  flag("enable-prefix-caching", prefix_caching, {&flags.worker_arguments});
  // Prefill workers inherit the environment, and refuse it.
  unsetenv("TANDEM_SPECULATIVE_CONFIG");
  if (!speculative_config.empty()) {
    flags.decode_arguments = {"--speculative-config", speculative_config};
  }
  worker("handoff", handoff);
}

absl::StatusOr<int> ServeCommand::Run() {
  absl::StatusOr<std::string> directory = source.Directory();
  if (!directory.ok()) return directory.status();
  flags.model_dir = *std::move(directory);
  // A snapshot's folder is named by its commit.
  if (flags.served_model_name.empty() && flags.model_dir != source.model) {
    flags.served_model_name = source.model;
  }
  return Serve(flags);
}

int RunTandem(int argc, char** argv) {
  CommandLine line("tandem",
                   "Serves large language models with prefill and decode on "
                   "separate workers.");
  line.Example("tandem serve models/tales");
  line.Example("tandem generate \"Once upon a time\"");
  line.Example("tandem bench --request-rate 4");
  line.Example("tandem explain models/tales");
  line.Example("tandem plan models/tales --memory 80GiB");
  line.Example("tandem status");

  ServeCommand serve;
  CommandLine* const serve_line = line.AddCommand(
      "serve", "Start a local cluster: a router and its workers");
  serve.AddTo(serve_line);

  GenerateFlags generate;
  generate.router.address = kDefaultRouter;
  generate.router.flag = "--router";
  SamplingFlags sampling;
  TlsFlags generate_tls;
  CommandLine* const generate_line =
      line.AddCommand("generate", "Generate from a prompt, streaming");
  generate_line->Example(
      "tandem generate --temperature 0 \"Once upon a time\"");
  generate_line->Example("echo Hello | tandem generate --chat --json");
  generate_line->AddPositional("PROMPT", &generate.prompt,
                               "Text; read from standard input if not given",
                               false);
  generate_line->Group("Router");
  generate_line->Add("router", &generate.router.address,
                     "The router's gRPC address");
  generate_line->Add("api-key", &generate.router.api_key,
                     "The key that the router asks for");
  generate_line->Add("timeout", &generate.timeout_seconds,
                     "Deadline in seconds", 0.001, 1e6);
  generate_line->Group("Prompt");
  generate_line->Add("chat", &generate.chat,
                     "The prompt is a user's message to the chat template");
  generate_line->Add("system", &generate.system, "A system message before it");
  sampling.AddTo(generate_line);
  generate_line->Group("Output");
  generate_line->Add("json", &generate.json, "One JSON object at the end");
  generate_line->Add("timings", &generate.timings,
                     "A table of times on standard error");
  generate_line->Group("TLS");
  generate_tls.AddTo(generate_line);

  chat::ChatCommand chat;
  CommandLine* const chat_line =
      line.AddCommand("chat", "Talk to a model, in a terminal");
  chat.AddTo(chat_line);

  bench::BenchCommand bench_command;
  CommandLine* const bench_line = line.AddCommand(
      "bench", "Load a running cluster and report its latencies");
  bench_command.AddTo(bench_line);

  ModelSource explain_source;
  explain::ExplainCommand explain_command;
  CommandLine* const explain_line = line.AddCommand(
      "explain", "What the KV cache saves, and what bounds each phase here");
  explain_source.AddTo(explain_line, "the shape of Llama 3.1 8B");
  explain_command.AddTo(explain_line);

  ModelSource pull;
  CommandLine* const pull_line = line.AddCommand(
      "pull", "Fetch a model from the Hugging Face hub into its cache");
  pull_line->Example("tandem pull HuggingFaceTB/SmolLM2-135M-Instruct");
  pull.AddTo(pull_line);

  ModelSource plan_source;
  plan::PlanCommand plan_command;
  CommandLine* const plan_line = line.AddCommand(
      "plan", "What a model takes of a device, and which contexts fit");
  plan_source.AddTo(plan_line);
  plan_command.AddTo(plan_line);

  StatusFlags status_flags;
  status_flags.admin.address = kDefaultAdmin;
  TlsFlags status_tls;
  CommandLine* const status_line =
      line.AddCommand("status", "Workers, load and blocks of a cluster");
  status_line->Group("Router");
  status_line->Add("admin", &status_flags.admin.address,
                   "The router's admin address");
  status_line->Add("json", &status_flags.json, "All of it, as JSON");
  status_line->Add("watch", &status_flags.watch,
                   "Again and again until q or Ctrl-C");
  status_line->AddDuration("interval", &status_flags.interval, "Of --watch",
                           absl::Milliseconds(10));
  status_line->Group("TLS");
  status_tls.AddTo(status_line);

  CordonCommand cordon(/*cordoned=*/true);
  CommandLine* const cordon_line = line.AddCommand(
      "cordon", "Give a worker nothing new; what runs on it goes on");
  cordon.AddTo(cordon_line);
  FlightCommand flight;
  CommandLine* const flight_line = line.AddCommand(
      "flight", "The last decisions of processes, as they wrote them");
  flight.AddTo(flight_line);
  ReplayCommand replay;
  CommandLine* const replay_line = line.AddCommand(
      "replay", "A router's recorded session, decided once more");
  replay.AddTo(replay_line);
  CordonCommand uncordon(/*cordoned=*/false);
  CommandLine* const uncordon_line =
      line.AddCommand("uncordon", "Give a worker requests again");
  uncordon.AddTo(uncordon_line);

  LoraCommand lora;
  CommandLine* const lora_line = line.AddCommand(
      "lora", "Load, unload and list a cluster's LoRA adapters");
  lora.AddTo(lora_line);

  doctor::DoctorCommand doctor_command;
  CommandLine* const doctor_line = line.AddCommand(
      "doctor", "Check this machine, a model, or a running cluster");
  doctor_command.AddTo(doctor_line);

  bool version_json = false;
  CommandLine* const version_line = line.AddCommand(
      "version", "Version, commit, build, backends and CPU features");
  version_line->Add("json", &version_json, "One JSON object");

  std::string shell;
  CommandLine* const completion_line = line.AddCommand(
      "completion", "Completions of all commands and flags for a shell");
  completion_line->Example("source <(tandem completion bash)");
  completion_line->Example(
      "tandem completion fish > ~/.config/fish/completions/tandem.fish");
  completion_line->AddPositional("SHELL", &shell, "bash, zsh or fish", true);

  KeysCommand keys;
  CommandLine* const keys_line = line.AddCommand(
      "keys", "Make and list the API keys of a router's clients");
  keys.AddTo(keys_line);

  if (const std::optional<int> code = line.Parse(argc, argv)) return *code;
  const CommandLine* const chosen = line.chosen();
  if (chosen == serve_line) {
    serve.Complete(*serve_line);
    const absl::StatusOr<int> code = serve.Run();
    return code.ok() ? *code : ReportFailure("tandem serve", code.status());
  }
  if (chosen == bench_line) {
    const absl::StatusOr<bench::BenchOptions> options =
        bench_command.Complete(*bench_line);
    if (!options.ok()) {
      return ReportFailure("tandem bench",
                           UsageError(std::string(options.status().message())));
    }
    const absl::StatusOr<int> code = bench::Bench(*options);
    return code.ok() ? *code : ReportFailure("tandem bench", code.status());
  }
  if (chosen == doctor_line) {
    const absl::StatusOr<int> code = doctor_command.Run();
    return code.ok() ? *code : ReportFailure("tandem doctor", code.status());
  }
  absl::Status status;
  if (chosen == explain_line) {
    if (explain_source.model.empty() && explain_line->typed("revision")) {
      return ReportFailure("tandem explain",
                           UsageError("--revision needs a MODEL"));
    }
    explain::ExplainOptions options = explain_command.Complete(*explain_line);
    // Weights are worth fetching to be timed alone.
    const absl::StatusOr<std::string> model =
        explain_source.model.empty()
            ? ""
            : explain_source.Directory(!options.measure.value_or(false));
    if (model.ok()) {
      if (*model != explain_source.model) options.name = explain_source.model;
      options.model = *model;
    }
    status = model.ok() ? explain::Explain(options) : model.status();
  } else if (chosen == version_line) {
    const VersionInfo info = GetVersionInfo();
    std::cout << (version_json ? VersionJson(info) : VersionText(info));
  } else if (chosen == completion_line) {
    const absl::StatusOr<std::string> script = line.Completion(shell);
    if (script.ok()) std::cout << *script;
    if (!script.ok())
      status = UsageError(std::string(script.status().message()));
  } else if (chosen == chat_line) {
    status = chat.Run();
  } else if (chosen == pull_line) {
    status = Pull(pull);
  } else if (chosen == plan_line) {
    status = plan_command.Complete(*plan_line);
    if (!status.ok()) return ReportFailure("tandem plan", status);
    const absl::StatusOr<std::string> directory =
        plan_source.Directory(/*config_only=*/true);
    status = directory.ok() ? plan_command.Run(plan_source.model,
                                               plan_source.revision, *directory)
                            : directory.status();
  } else if (chosen == cordon_line) {
    status = cordon.Run();
  } else if (chosen == flight_line) {
    status = flight.Run();
  } else if (chosen == replay_line) {
    status = replay.Run();
  } else if (chosen == uncordon_line) {
    status = uncordon.Run();
  } else if (chosen == lora_line) {
    status = lora.Run();
  } else if (chosen == keys_line) {
    status = keys.Run();
  } else if (chosen == generate_line) {
    generate.prompt_given = generate_line->given("PROMPT");
    if (!generate.chat && !generate_line->typed("system")) {
      generate.system.clear();
    }
    generate.router.tls_cert = generate_tls.cert;
    generate.router.tls_key = generate_tls.key;
    generate.router.tls_ca = generate_tls.ca;
    status = sampling.Fill(&generate.request);
    if (status.ok()) {
      const absl::StatusOr<int> code = Generate(generate);
      if (code.ok()) return *code;
      status = code.status();
    }
  } else {
    status_flags.admin.tls_cert = status_tls.cert;
    status_flags.admin.tls_key = status_tls.key;
    status_flags.admin.tls_ca = status_tls.ca;
    if (status_flags.watch && !status_line->typed("json")) {
      status_flags.json = false;
    }
    status = ShowStatus(status_flags);
  }
  if (status.ok()) return kExitOk;
  return ReportFailure(chosen->name(), status);
}

}  // namespace
}  // namespace tandem::cli

int main(int argc, char** argv) {
  const int code = tandem::cli::RunTandem(argc, argv);
  const absl::Status written = tandem::cli::FlushOutput();
  const bool lost = code == tandem::kExitOk && !written.ok();
  return lost ? tandem::ReportFailure("tandem", written) : code;
}
