// SPDX-License-Identifier: Apache-2.0
// How the command line reaches a router.

#ifndef TANDEM_CLI_CONNECT_H_
#define TANDEM_CLI_CONNECT_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace tandem::cli {

struct ConnectFlags {
  std::string address;  // host:port, or https://host:port for TLS
  std::string tls_cert = {};
  std::string tls_key = {};
  std::string tls_ca = {};
  std::string api_key = {};  // of a router that asks for one
};

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(
    const ConnectFlags& flags);

}  // namespace tandem::cli

#endif  // TANDEM_CLI_CONNECT_H_
