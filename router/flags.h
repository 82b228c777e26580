// SPDX-License-Identifier: Apache-2.0
// What tandem-router is told on its command line, in its environment or in a
// file. docs/operations.md explains each.

#ifndef TANDEM_ROUTER_FLAGS_H_
#define TANDEM_ROUTER_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/flags.h"
#include "common/memory_limit.h"
#include "router/core/options.h"
#include "router/intake/model_text.h"
#include "router/validate/validate.h"

namespace tandem::router {

struct Flags {
  std::string model_dir;
  std::string served_model_name;
  std::string chat_template;
  std::string tool_call_parser = "auto";
  std::string reasoning_parser = "auto";
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

void AddFlags(CommandLine* line, Flags* flags);

// A UsageError where two of the router's own ports are one.
absl::Status CheckPorts(const Flags& flags);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_FLAGS_H_
