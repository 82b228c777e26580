// SPDX-License-Identifier: Apache-2.0
// `tandem serve MODEL`: a local cluster as child processes of one command:
// a router, prefill workers, decode workers. Prints one ready block, restarts
// what dies, drains on the first Ctrl-C, kills on the second, leaves nothing.

#ifndef TANDEM_CLI_SERVE_H_
#define TANDEM_CLI_SERVE_H_

#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace tandem::cli {

struct ServeFlags {
  std::string model_dir;          // holds a config.json
  std::string served_model_name;  // empty: the directory's name
  int prefill = 1;
  int decode = 1;
  std::string host = "127.0.0.1";
  int grpc_port = 50051;
  int http_port = 8000;
  bool webui = true;
  bool json_log = false;  // else text, each line with its process's name
  int admin_port = 0;     // 0: kAdminPort, or if that is taken a free one
  int threads = 0;        // per worker; 0: the cores, divided
  absl::Duration shutdown_timeout = absl::Seconds(30);
  std::string tls_cert;
  std::string tls_key;
  std::string tls_ca;
  bool public_tls = false;    // clients' ports, by the router's arguments
  bool asks_for_key = false;  // of clients
  std::vector<std::string> router_arguments;  // passed on as they are
  std::vector<std::string> worker_arguments;
  std::vector<std::string> decode_arguments;  // behind worker_arguments
};

// Runs until a signal. Returns the process's exit code: 130 or 143 after a
// drained signal, 1 if a child cannot be kept alive.
absl::StatusOr<int> Serve(const ServeFlags& flags);

// `wanted` (0: any) if it was free a moment ago, on `host`. UNAVAILABLE: it
// was not.
absl::StatusOr<int> FreePort(const std::string& host, int wanted = 0);

// One of loopback for a listener of a process that is yet to start: free a
// moment ago and none of `ours`, to which it is added. Below the ephemeral
// range where there is one, since connections and the ports of workers come
// from there, and one of them may be there first.
absl::StatusOr<int> OwnPort(std::set<int>* ours);

}  // namespace tandem::cli

#endif  // TANDEM_CLI_SERVE_H_
