// SPDX-License-Identifier: Apache-2.0
// The refusals and failures that the router words itself, one function each
// where several places give the same one. Reasons are listed in
// inference.proto.

#ifndef TANDEM_ROUTER_VALIDATE_ERRORS_H_
#define TANDEM_ROUTER_VALIDATE_ERRORS_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/error.h"
#include "common/utf8.h"

namespace tandem::router {

// INVALID_ARGUMENT: "field = value: what is allowed". Of a long value (it may
// be a whole prompt of nonsense) only the head is shown.
inline absl::Status FieldInvalid(std::string_view field, std::string_view value,
                                 std::string_view allowed,
                                 std::string_view reason = "FIELD_INVALID") {
  constexpr size_t kMaxShown = 80;
  std::string shown(Utf8Head(value, kMaxShown));
  if (value.size() > kMaxShown) shown += "...";
  absl::Status status = MakeError(absl::StatusCode::kInvalidArgument, reason,
                                  absl::StrCat(std::string(field), " = ", shown,
                                               ": ", std::string(allowed)),
                                  {{"field", field}});
  SetViolation(&status, field, allowed);
  return status;
}

// Likewise, of what the output must match and cannot.
inline absl::Status ConstraintInvalid(std::string_view field,
                                      std::string_view value,
                                      std::string_view why) {
  return FieldInvalid(field, value, why, "CONSTRAINT_INVALID");
}

inline absl::Status Draining() {
  return MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                   "this router is draining; ask another one", {},
                   absl::Seconds(1));
}

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_VALIDATE_ERRORS_H_
