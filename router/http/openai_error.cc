// SPDX-License-Identifier: Apache-2.0
#include "router/http/openai_error.h"

#include <algorithm>
#include <cstdint>
#include <map>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/error.h"
#include "router/http/json_fields.h"

namespace tandem::router {
namespace {

using nlohmann::json;

struct ErrorKind {
  int code;
  const char* type;
};

ErrorKind KindOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kFailedPrecondition:
      return {400, "invalid_request_error"};
    case absl::StatusCode::kUnauthenticated:
      return {401, "authentication_error"};
    case absl::StatusCode::kPermissionDenied:
      return {403, "permission_error"};
    case absl::StatusCode::kNotFound:
      return {404, "not_found_error"};
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kAborted:
      return {409, "conflict_error"};
    case absl::StatusCode::kResourceExhausted:
      return {429, "rate_limit_error"};
    case absl::StatusCode::kCancelled:
      return {499, "cancelled_error"};
    case absl::StatusCode::kUnimplemented:
      return {501, "not_implemented_error"};
    case absl::StatusCode::kUnavailable:
      return {503, "service_unavailable_error"};
    case absl::StatusCode::kDeadlineExceeded:
      return {504, "timeout_error"};
    default:
      return {500, "server_error"};
  }
}

// Whether the same call can succeed at another time. SDKs ask again twice after
// 409, 429 and all that is 500 or more, which may be a whole generation each.
bool MayRetry(const absl::Status& status) {
  const std::string reason = ErrorReason(status);
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      return RetryAfter(status).has_value();
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kUnimplemented:
      return false;
    default:
      return reason != "SUSPECT";
  }
}

}  // namespace

json ErrorJson(const absl::Status& status, const FieldNames& names) {
  const std::map<std::string, std::string> metadata = ErrorMetadata(status);
  const auto field = metadata.find("field");
  const std::string reason = ErrorReason(status);
  json error = {{"message", ClientsMessage(status, names)},
                {"type", KindOf(status.code()).type},
                {"param", nullptr},
                {"code", nullptr}};
  if (field != metadata.end()) {
    error["param"] = ClientsName(field->second, names);
  }
  // OpenAI's clients know these two by other names.
  if (reason == "RATE_LIMITED") {
    error["code"] = "rate_limit_exceeded";
  } else if (reason == "API_KEY_INVALID") {
    error["code"] = "invalid_api_key";
  } else if (!reason.empty()) {
    error["code"] = absl::AsciiStrToLower(reason);
  }
  return {{"error", std::move(error)}};
}

HttpResponse ErrorResponse(const absl::Status& status,
                           const FieldNames& names) {
  HttpResponse response{.code = KindOf(status.code()).code,
                        .content_type = "application/json",
                        .body = DumpJson(ErrorJson(status, names))};
  if (ErrorReason(status) == "CONTENT_TYPE") response.code = 415;
  if (response.code == 401) {  // RFC 6750, section 3
    response.headers.emplace_back(
        "WWW-Authenticate",
        ErrorReason(status) == "API_KEY_INVALID"
            ? "Bearer realm=\"tandem\", error=\"invalid_token\""
            : "Bearer realm=\"tandem\"");
  }
  if (const auto wait = RetryAfter(status)) {
    const int64_t seconds = std::max<int64_t>(
        1, absl::ToInt64Seconds(absl::Ceil(*wait, absl::Seconds(1))));
    response.headers.emplace_back("Retry-After", absl::StrCat(seconds));
  }
  if (response.code >= 409 && !MayRetry(status)) {
    response.headers.emplace_back("x-should-retry", "false");
  }
  return response;
}

HttpResponse ListenerError(int code, const std::string& message) {
  const char* const type = code == 404   ? "not_found_error"
                           : code == 503 ? "service_unavailable_error"
                           : code >= 500 ? "server_error"
                                         : "invalid_request_error";
  const json error = {{"message", message},
                      {"type", type},
                      {"param", nullptr},
                      {"code", nullptr}};
  return {.code = code,
          .content_type = "application/json",
          .body = DumpJson({{"error", error}})};
}

}  // namespace tandem::router
