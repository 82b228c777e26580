// SPDX-License-Identifier: Apache-2.0
// Errors that a client's program can act on: an absl::Status whose payloads
// are the google.rpc details that gRPC and HTTP clients read, in their wire
// encoding, so that common/rpc passes them on without knowing them and
// nothing else needs protobuf.
//
//   return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
//                    "512 requests are waiting, the limit is 512",
//                    {{"limit", "512"}}, absl::Seconds(2));
//
// The reason is UPPER_SNAKE and stable: programs compare it. The message is
// for people and may change.

#ifndef TANDEM_COMMON_ERROR_H_
#define TANDEM_COMMON_ERROR_H_

#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace tandem {

inline constexpr std::string_view kErrorDomain = "tandem";
inline constexpr std::string_view kErrorInfoUrl =
    "type.googleapis.com/google.rpc.ErrorInfo";
inline constexpr std::string_view kRetryInfoUrl =
    "type.googleapis.com/google.rpc.RetryInfo";
inline constexpr std::string_view kBadRequestUrl =
    "type.googleapis.com/google.rpc.BadRequest";

// `retry_after`: when the same call may succeed; sent as RetryInfo and, by
// common/rpc, as grpc-retry-pushback-ms.
absl::Status MakeError(
    absl::StatusCode code, std::string_view reason, std::string_view message,
    std::initializer_list<std::pair<std::string_view, std::string_view>>
        metadata = {},
    std::optional<absl::Duration> retry_after = std::nullopt);

// Of a status from MakeError or from another process; empty if it has none.
// Malformed details read as none.
std::string ErrorReason(const absl::Status& status);
std::string ErrorDomain(const absl::Status& status);
std::map<std::string, std::string> ErrorMetadata(const absl::Status& status);
std::optional<absl::Duration> RetryAfter(const absl::Status& status);

void SetRetryAfter(absl::Status* status, absl::Duration retry_after);

// What is wrong with which field of a request; sent as BadRequest.
struct FieldViolation {
  std::string field;
  std::string description;
};
void SetViolation(absl::Status* status, std::string_view field,
                  std::string_view description);
// The first, if there is one.
std::optional<FieldViolation> ErrorViolation(const absl::Status& status);

// The same status and details with another message.
absl::Status WithMessage(const absl::Status& status, std::string_view message);

// The same code and details with "`context`: " before the message.
absl::Status Annotate(const absl::Status& status, std::string_view context);

}  // namespace tandem

#endif  // TANDEM_COMMON_ERROR_H_
