// SPDX-License-Identifier: Apache-2.0
#include "common/rpc/server_stream.h"

#include <chrono>

#include "common/rpc/authorization.h"

namespace tandem::rpc {
namespace {

constexpr size_t kMaxRequestIdBytes = 128;

}  // namespace

std::string_view CallInfo::Find(std::string_view key) const {
  for (const auto& [name, value] : metadata) {
    if (name == key) return value;
  }
  return {};
}

CallInfo MakeCallInfo(const grpc::CallbackServerContext& context) {
  CallInfo info;
  info.peer = context.peer();
  // gRPC's "none" is the end of the clock's range.
  const auto deadline = context.deadline();
  info.time_left =
      deadline == std::chrono::system_clock::time_point::max()
          ? absl::InfiniteDuration()
          : absl::FromChrono(deadline - std::chrono::system_clock::now());
  for (const auto& [key, value] : context.client_metadata()) {
    info.metadata.emplace_back(std::string(key.data(), key.size()),
                               std::string(value.data(), value.size()));
  }
  const auto auth = context.auth_context();
  if (auth != nullptr) info.identity = PeerOf(*auth);
  return info;
}

std::string RequestIdToEcho(const grpc::CallbackServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto id = metadata.find(kRequestId);
  if (id == metadata.end() || id->second.size() > kMaxRequestIdBytes) return "";
  return {id->second.data(), id->second.size()};
}

absl::Status CancelReason(const grpc::CallbackServerContext& context) {
  if (context.deadline() <= std::chrono::system_clock::now()) {
    return absl::DeadlineExceededError("the caller's deadline passed");
  }
  return absl::CancelledError("the caller went away or cancelled");
}

}  // namespace tandem::rpc
