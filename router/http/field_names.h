// SPDX-License-Identifier: Apache-2.0
// Errors name the fields of the gRPC API; an HTTP client reads the names that
// it sent ("max_completion_tokens", not "stopping.max_tokens").

#ifndef TANDEM_ROUTER_HTTP_FIELD_NAMES_H_
#define TANDEM_ROUTER_HTTP_FIELD_NAMES_H_

#include <map>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace tandem::router {

// Of one request: fields whose name is not that of inference.proto without its
// message. An entry "structured" stands for all fields of that message.
using FieldNames = std::map<std::string, std::string, std::less<>>;

std::string ClientsName(std::string_view field, const FieldNames& names);

// What `status` says, in the client's names.
std::string ClientsMessage(const absl::Status& status, const FieldNames& names);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_HTTP_FIELD_NAMES_H_
