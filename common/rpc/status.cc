// SPDX-License-Identifier: Apache-2.0
#include "common/rpc/status.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/rpc/server_stream.h"
#include "common/utf8.h"
#include "google/rpc/status.pb.h"

namespace tandem::rpc {
namespace {

constexpr char kPushback[] = "grpc-retry-pushback-ms";
constexpr char kPreviousAttempts[] = "grpc-previous-rpc-attempts";
constexpr int kMostDoublings = 4;  // gRPC makes five attempts at most
constexpr std::string_view kDetailPrefix = "type.googleapis.com/google.rpc.";
// Messages travel in one header field; clients refuse headers over 8 KiB.
constexpr size_t kMaxMessageBytes = 2048;
constexpr size_t kMaxDetailBytes = 4096;

// How often gRPC's own retries have made this call before.
int PreviousAttempts(const grpc::CallbackServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto told = metadata.find(kPreviousAttempts);
  int attempts = 0;
  if (told == metadata.end() ||
      !absl::SimpleAtoi(
          absl::string_view(told->second.data(), told->second.size()),
          &attempts)) {
    return 0;
  }
  return std::clamp(attempts, 0, kMostDoublings);
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const auto code = static_cast<grpc::StatusCode>(status.raw_code());
  const std::string valid =
      ValidUtf8({status.message().data(), status.message().size()});
  const std::string message(Utf8Head(valid, kMaxMessageBytes));
  google::rpc::Status details;
  size_t detail_bytes = 0;
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    if (url.substr(0, kDetailPrefix.size()) !=
        absl::string_view(kDetailPrefix.data(), kDetailPrefix.size())) {
      return;
    }
    const size_t bytes = url.size() + payload.size();
    if (detail_bytes + bytes > kMaxDetailBytes) return;
    detail_bytes += bytes;
    auto* any = details.add_details();
    any->set_type_url(std::string(url));
    any->set_value(std::string(payload));
  });
  if (details.details().empty()) return grpc::Status(code, message);
  details.set_code(status.raw_code());
  details.set_message(message);
  return grpc::Status(code, message, details.SerializeAsString());
}

grpc::Status ToGrpc(const absl::Status& status,
                    grpc::CallbackServerContext* context) {
  if (status.ok()) return grpc::Status::OK;
  if (const std::string id = RequestIdToEcho(*context); !id.empty()) {
    context->AddTrailingMetadata(kRequestId, id);
  }
  if (const auto retry_after = RetryAfter(status); retry_after.has_value()) {
    context->AddTrailingMetadata(
        kPushback, std::to_string(absl::ToInt64Milliseconds(*retry_after)
                                  << PreviousAttempts(*context)));
  }
  return ToGrpc(status);
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  // A peer may send any number as code; absl keeps those as kUnknown.
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()),
                      status.error_message());
  if (result.message().empty()) {
    result = absl::Status(
        result.code(),
        absl::StrCat("no reason given (",
                     absl::StatusCodeToString(result.code()), ")"));
  }
  google::rpc::Status details;
  if (status.error_details().empty() ||
      !details.ParseFromString(status.error_details())) {
    return result;
  }
  for (const auto& any : details.details()) {
    result.SetPayload(any.type_url(), absl::Cord(any.value()));
  }
  return result;
}

absl::Status FromGrpc(const grpc::Status& status,
                      const grpc::ClientContext& context) {
  absl::Status result = FromGrpc(status);
  if (result.ok() || RetryAfter(result).has_value()) return result;
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto pushback = trailers.find(kPushback);
  int64_t ms = 0;
  // A negative pushback asks not to retry at all, which is our default.
  if (pushback != trailers.end() &&
      absl::SimpleAtoi(
          absl::string_view(pushback->second.data(), pushback->second.size()),
          &ms) &&
      ms >= 0) {
    SetRetryAfter(&result, absl::Milliseconds(ms));
  }
  return result;
}

}  // namespace tandem::rpc
