// SPDX-License-Identifier: Apache-2.0
#include "router/flags.h"

#include <array>
#include <cstdint>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "common/lifecycle.h"

namespace tandem::router {
namespace {

void AddModel(CommandLine* line, Flags* flags) {
  line->AddConfigFile();
  line->AddModel(&flags->model_dir,
                 "Hugging Face directory: tokenizer, template, limits", true);
  line->Add("served-model-name", &flags->served_model_name,
            "Name of the model in the API; the directory's by default");
  line->Add("chat-template", &flags->chat_template,
            "File, in Jinja, in place of the model's own chat template");
  line->AddChoice("tool-call-parser", &flags->tool_call_parser,
                  {"auto", "llama3_json", "hermes", "mistral", "openai",
                   "qwen3_coder", "qwen3_xml", "glm45", "glm47", "minimax_m2",
                   "deepseek_v3", "deepseek_v31", "kimi_k2", "gemma4", "none"},
                  "How the model writes tool calls, with vLLM's names; auto "
                  "goes by its chat template, none leaves calls in the text");
  line->AddChoice(
      "reasoning-parser", &flags->reasoning_parser,
      {"auto", "deepseek_r1", "qwen3", "glm45", "minimax_m2", "deepseek_v3",
       "kimi_k2", "gemma4", "openai_gptoss", "none"},
      "How the model reasons before it answers, with vLLM's names; auto is "
      "openai_gptoss, glm45, minimax_m2, deepseek_r1, deepseek_v3, kimi_k2 or "
      "gemma4 by its chat template, else none, which leaves that in the text");
}

void AddListening(CommandLine* line, Flags* flags) {
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
}

void AddAccess(CommandLine* line, Flags* flags) {
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
}

void AddPlacement(CommandLine* line, Flags* flags) {
  RouterOptions& options = flags->options;
  line->Group("Placement");
  line->AddChoice("policy", &flags->policy,
                  {"prefix_aware", "least_loaded", "round_robin"},
                  "How workers are chosen");
  line->AddInt("max-local-prefill-tokens", &options.max_local_tokens,
               "Uncached prompt tokens that a decode worker computes itself",
               {0, 1 << 24});
}

void AddOffers(CommandLine* line, Flags* flags) {
  line->Group("Offers");
  line->Add("enable-no-kv-cache", &flags->offers.no_kv_cache,
            "Requests may ask to be computed without a KV cache, which is slow "
            "and shows what it saves");
  line->Add("enable-attention-output", &flags->offers.attention,
            "Requests may ask for attention weights with every token, of "
            "workers that run with this flag too");
}

void AddMetricsAndTraces(CommandLine* line, Flags* flags) {
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
}

void AddLimits(CommandLine* line, Flags* flags) {
  RouterOptions& options = flags->options;
  line->Group("Limits");
  line->AddInt("max-requests", &options.max_requests,
               "Requests in flight, waiting ones included", {1, 1 << 20});
  line->AddInt("tenant-max-requests", &flags->tenant_max_requests,
               "Of them of one tenant of --api-keys-file whose entry has no "
               "max_parallel_requests; 0: all",
               {0, 1 << 20});
  line->AddInt("max-queued", &options.max_queued,
               "Of them waiting for room on a worker", {1, 1 << 20});
  line->AddDuration("queue-wait", &options.queue_wait, "For room on a worker");
  line->AddDuration("max-expected-wait", &options.max_expected_wait,
                    "For a first token, by the rate of late; beyond it a "
                    "request is refused at once");
  line->AddDuration("no-workers-wait", &options.no_workers_wait,
                    "For any decode worker");
  line->AddDuration("recovery-wait", &options.recovery_wait,
                    "For a decode worker in place of a lost one");
  line->AddDuration("default-deadline", &options.default_deadline,
                    "Of calls that bring none", absl::Milliseconds(1));
  line->AddInt("max-attempts", &options.max_attempts,
               "Failures of a request without a new token in between; in all "
               "it may have 16",
               {1, 100});
  line->Add("retry-budget", &options.retry_budget,
            "Retries of all requests together, per request, beyond twice "
            "--max-requests a minute, 600 at least",
            0, 1);
  line->AddBytes("max-memory-bytes", &flags->max_memory_bytes,
                 "Memory of this process above which it drains and ends, to be "
                 "started anew; by default nine tenths of what its control "
                 "group may have; 0: none");
  line->AddDuration("stall-limit", &options.stall_limit,
                    "For a client that takes nothing", absl::Milliseconds(1));
  line->AddDuration("adapter-wait", &options.adapter_wait,
                    "For workers to load or let go a LoRA adapter",
                    absl::Milliseconds(1));
  line->AddDuration("lease", &options.lease,
                    "Silence of a worker's registration after which it is lost",
                    2 * options.beat);
  line->AddDuration("silence", &options.silence,
                    "Silence of a worker's call after which it is lost",
                    2 * options.beat);
}

void AddConnectionLimits(CommandLine* line, Flags* flags) {
  line->Group("Limits of connections");
  line->AddInt("max-http-connections", &flags->max_http_connections,
               "Open at once; one more closes the one idle for longest, or is "
               "refused where none is idle",
               {1, 1 << 16});
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
  line->AddDuration("handshake-timeout", &flags->handshake_timeout, "Of TLS",
                    absl::Milliseconds(1));
  line->AddDuration("max-connection-age", &flags->max_connection_age,
                    "Clients of gRPC are asked to connect anew after this",
                    absl::Seconds(1));
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
                    "For compiling one; beyond it the request is refused",
                    absl::Milliseconds(1));
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

void AddClusterTls(CommandLine* line, Flags* flags) {
  line->Group("TLS");
  flags->tls.AddTo(line);
}

void AddLogs(CommandLine* line, Flags* flags) {
  line->Group("Logs");
  flags->log.AddTo(line);
  line->Add(
      "record-session-dir", &flags->record_session_dir,
      "Where to record all that the router takes in and does, prompts and "
      "answers too, for `tandem replay`; empty: it does not");
  line->AddBytes("record-session-bytes", &flags->record_session_bytes,
                 "Of a session; what comes behind is not recorded",
                 {1 << 20, int64_t{1} << 40});
}

}  // namespace

// The order of --help.
void AddFlags(CommandLine* line, Flags* flags) {
  AddModel(line, flags);
  AddListening(line, flags);
  AddAccess(line, flags);
  AddPlacement(line, flags);
  AddOffers(line, flags);
  AddMetricsAndTraces(line, flags);
  AddLimits(line, flags);
  AddConnectionLimits(line, flags);
  AddRequestLimits(line, flags);
  AddClusterTls(line, flags);
  AddLogs(line, flags);
}

absl::Status CheckPorts(const Flags& flags) {
  struct Port {
    const char* flag;
    std::string_view host;
    int number;
  };
  const std::array<Port, 4> ports = {
      {{"--grpc-port", flags.host, flags.grpc_port},
       {"--port", flags.host, flags.http_port},
       {"--internal-port", flags.internal_host, flags.internal_port},
       {"--admin-port", "127.0.0.1", flags.admin_port}}};
  const auto all = [](std::string_view host) {
    return host == "0.0.0.0" || host == "::";
  };
  for (size_t i = 0; i < ports.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const Port &a = ports[j], &b = ports[i];
      if (a.number == 0 || a.number != b.number) continue;
      if (a.host != b.host && !all(a.host) && !all(b.host)) continue;
      return UsageError(absl::StrCat(a.flag, " and ", b.flag, " are both ",
                                     a.number, ": give each its own"));
    }
  }
  return absl::OkStatus();
}

}  // namespace tandem::router
