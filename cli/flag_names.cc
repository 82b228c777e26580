// SPDX-License-Identifier: Apache-2.0
#include "cli/flag_names.h"

#include <google/protobuf/descriptor.h>

#include <map>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/error.h"
#include "common/lifecycle.h"
#include "router/http/field_names.h"

namespace tandem::cli {
namespace {

std::string Flag(const google::protobuf::FieldDescriptor& field) {
  return absl::StrCat("--", absl::StrReplaceAll(field.name(), {{"_", "-"}}));
}

router::FieldNames Names(const v1::GenerateRequest& request) {
  router::FieldNames names = {{"output.attention.layers", "--attention"},
                              {"beam", "--beam-width"},
                              {"beam.width", "--beam-width"},
                              {"request_id", "--request-id"}};
  // Flags are named as the fields of these messages.
  for (const char* const group :
       {"sampling", "stopping", "output", "cache", "beam"}) {
    const auto& message = *v1::GenerateRequest::descriptor()
                               ->FindFieldByName(group)
                               ->message_type();
    for (int i = 0; i < message.field_count(); ++i) {
      names.emplace(absl::StrCat(group, ".", message.field(i)->name()),
                    Flag(*message.field(i)));
    }
  }
  // One of several flags was given.
  const v1::StructuredOptions& structured = request.structured();
  const auto& kinds = *v1::StructuredOptions::descriptor();
  for (int i = 0; i < kinds.field_count(); ++i) {
    const auto& kind = *kinds.field(i);
    if (kind.containing_oneof() != nullptr &&
        structured.GetReflection()->HasField(structured, &kind)) {
      names.emplace("structured", Flag(kind));
    }
  }
  return names;
}

}  // namespace

absl::Status InFlags(const absl::Status& status,
                     const v1::GenerateRequest& request) {
  const std::map<std::string, std::string> metadata = ErrorMetadata(status);
  const auto field = metadata.find("field");
  if (field == metadata.end()) return status;
  const bool no_template =
      field->second == "chat" &&
      absl::StrContains(status.message(), "no chat template");
  if (!no_template && ErrorReason(status) == "FIELD_INVALID") {
    return UsageError(router::ClientsMessage(status, Names(request)));
  }
  absl::Status told(
      status.code(),
      no_template ? "this model has no chat template: ask `tandem generate` "
                    "without --chat, or serve the model with --chat-template "
                    "FILE"
                  : router::ClientsMessage(status, Names(request)));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    told.SetPayload(url, payload);
  });
  return told;
}

}  // namespace tandem::cli
