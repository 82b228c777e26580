// SPDX-License-Identifier: Apache-2.0
// How the command line reaches a router.

#ifndef TANDEM_CLI_CONNECT_H_
#define TANDEM_CLI_CONNECT_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tandem::cli {

// Where a router listens unless told otherwise.
inline constexpr char kDefaultRouter[] = "127.0.0.1:50051";
inline constexpr int kAdminPort = 50053;
inline constexpr char kDefaultAdmin[] = "127.0.0.1:50053";

struct ConnectFlags {
  std::string address;  // host:port, or https://host[:443] for TLS
  std::string tls_cert = {};
  std::string tls_key = {};
  std::string tls_ca = {};
  std::string api_key = {};      // of a router that asks for one
  const char* flag = "--admin";  // that gave the address
};

// What is connected to: the address without http:// or https://. A UsageError,
// naming the flag, where that is no host:port, or not of these TLS files.
absl::StatusOr<std::string> HostAndPort(const ConnectFlags& flags);

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(
    const ConnectFlags& flags);

// `status` of a call to `flags`: where nobody answered, or another port did, it
// says so, with the address.
absl::Status Explained(const absl::Status& status, const ConnectFlags& flags);

// A usage error unless the text of `what` ("--stop") is UTF-8: protobuf sends
// no other, and gRPC's error does not say so.
absl::Status CheckUtf8(std::string_view what, std::string_view text);

}  // namespace tandem::cli

#endif  // TANDEM_CLI_CONNECT_H_
