// SPDX-License-Identifier: Apache-2.0
// The protobuf encodings by hand:
//   ErrorInfo { string reason = 1; string domain = 2;
//               map<string, string> metadata = 3; }
//   RetryInfo { Duration retry_delay = 1; }
//   Duration { int64 seconds = 1; int32 nanos = 2; }
//   BadRequest { repeated FieldViolation field_violations = 1; }
//   FieldViolation { string field = 1; string description = 2; }
// All need only varints and length-delimited fields.
#include "common/error.h"

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace tandem {
namespace {

constexpr int kVarint = 0, kFixed64 = 1, kDelimited = 2, kFixed32 = 5;

absl::string_view View(std::string_view s) { return {s.data(), s.size()}; }

void AppendVarint(std::string* out, uint64_t value) {
  while (value >= 0x80) {
    out->push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out->push_back(static_cast<char>(value));
}

void AppendString(std::string* out, int field, std::string_view value) {
  AppendVarint(out, static_cast<uint64_t>(field) << 3 | kDelimited);
  AppendVarint(out, value.size());
  out->append(value);
}

void AppendInteger(std::string* out, int field, int64_t value) {
  if (value == 0) return;
  AppendVarint(out, static_cast<uint64_t>(field) << 3 | kVarint);
  AppendVarint(out, static_cast<uint64_t>(value));
}

bool TakeVarint(std::string_view* in, uint64_t* value) {
  *value = 0;
  for (int shift = 0; shift < 64 && !in->empty(); shift += 7) {
    const uint8_t byte = static_cast<uint8_t>(in->front());
    in->remove_prefix(1);
    *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

struct Field {
  int number = 0;
  uint64_t integer = 0;
  std::string_view bytes;
};

// Calls `visit` for every field of the message `in`; false if it is malformed
// (`visit` may have seen a part of it by then).
bool ForEachField(std::string_view in,
                  absl::FunctionRef<void(const Field&)> visit) {
  while (!in.empty()) {
    uint64_t tag = 0, size = 0;
    if (!TakeVarint(&in, &tag)) return false;
    Field field;
    field.number = static_cast<int>(tag >> 3);
    switch (tag & 7) {
      case kVarint:
        if (!TakeVarint(&in, &field.integer)) return false;
        break;
      case kDelimited:
        if (!TakeVarint(&in, &size) || size > in.size()) return false;
        field.bytes = in.substr(0, size);
        in.remove_prefix(size);
        break;
      case kFixed64:
      case kFixed32:
        size = (tag & 7) == kFixed64 ? 8 : 4;
        if (size > in.size()) return false;
        in.remove_prefix(size);
        break;
      default:
        return false;
    }
    visit(field);
  }
  return true;
}

struct ErrorInfo {
  std::string reason;
  std::string domain;
  std::map<std::string, std::string> metadata;
};

ErrorInfo ParseErrorInfo(const absl::Status& status) {
  const auto payload = status.GetPayload(View(kErrorInfoUrl));
  if (!payload.has_value()) return {};
  const std::string bytes(*payload);
  ErrorInfo info;
  bool entries_fine = true;
  const bool fine = ForEachField(bytes, [&](const Field& field) {
    if (field.number == 1) info.reason = field.bytes;
    if (field.number == 2) info.domain = field.bytes;
    if (field.number != 3) return;
    std::string key, value;
    entries_fine &= ForEachField(field.bytes, [&](const Field& entry) {
      if (entry.number == 1) key = entry.bytes;
      if (entry.number == 2) value = entry.bytes;
    });
    info.metadata[key] = value;
  });
  return fine && entries_fine ? info : ErrorInfo();
}

}  // namespace

absl::Status MakeError(
    absl::StatusCode code, std::string_view reason, std::string_view message,
    std::initializer_list<std::pair<std::string_view, std::string_view>>
        metadata,
    std::optional<absl::Duration> retry_after) {
  absl::Status status(code, View(message));
  std::string info;
  AppendString(&info, 1, reason);
  AppendString(&info, 2, kErrorDomain);
  for (const auto& [key, value] : metadata) {
    std::string entry;
    AppendString(&entry, 1, key);
    AppendString(&entry, 2, value);
    AppendString(&info, 3, entry);
  }
  status.SetPayload(View(kErrorInfoUrl), absl::Cord(info));
  if (retry_after.has_value()) SetRetryAfter(&status, *retry_after);
  return status;
}

void SetRetryAfter(absl::Status* status, absl::Duration retry_after) {
  std::string duration;
  absl::Duration rest;
  AppendInteger(&duration, 1,
                absl::IDivDuration(retry_after, absl::Seconds(1), &rest));
  AppendInteger(&duration, 2, absl::ToInt64Nanoseconds(rest));
  std::string info;
  AppendString(&info, 1, duration);
  status->SetPayload(View(kRetryInfoUrl), absl::Cord(info));
}

std::string ErrorReason(const absl::Status& status) {
  return ParseErrorInfo(status).reason;
}

std::string ErrorDomain(const absl::Status& status) {
  return ParseErrorInfo(status).domain;
}

std::map<std::string, std::string> ErrorMetadata(const absl::Status& status) {
  return ParseErrorInfo(status).metadata;
}

std::optional<absl::Duration> RetryAfter(const absl::Status& status) {
  const auto payload = status.GetPayload(View(kRetryInfoUrl));
  if (!payload.has_value()) return std::nullopt;
  const std::string bytes(*payload);
  std::optional<absl::Duration> delay;
  bool duration_fine = true;
  const bool fine = ForEachField(bytes, [&](const Field& field) {
    if (field.number != 1) return;
    delay = absl::ZeroDuration();
    duration_fine &= ForEachField(field.bytes, [&](const Field& part) {
      const int64_t value = static_cast<int64_t>(part.integer);
      if (part.number == 1) *delay += absl::Seconds(value);
      if (part.number == 2) *delay += absl::Nanoseconds(value);
    });
  });
  return fine && duration_fine ? delay : std::nullopt;
}

void SetViolation(absl::Status* status, std::string_view field,
                  std::string_view description) {
  std::string violation;
  AppendString(&violation, 1, field);
  AppendString(&violation, 2, description);
  std::string bad_request;
  AppendString(&bad_request, 1, violation);
  status->SetPayload(View(kBadRequestUrl), absl::Cord(bad_request));
}

std::optional<FieldViolation> ErrorViolation(const absl::Status& status) {
  const auto payload = status.GetPayload(View(kBadRequestUrl));
  if (!payload.has_value()) return std::nullopt;
  const std::string bytes(*payload);
  std::optional<FieldViolation> first;
  bool entries_fine = true;
  const bool fine = ForEachField(bytes, [&](const Field& field) {
    if (field.number != 1 || first) return;
    first.emplace();
    entries_fine &= ForEachField(field.bytes, [&](const Field& part) {
      if (part.number == 1) first->field = part.bytes;
      if (part.number == 2) first->description = part.bytes;
    });
  });
  return fine && entries_fine ? first : std::nullopt;
}

absl::Status WithMessage(const absl::Status& status, std::string_view message) {
  absl::Status changed(status.code(), View(message));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    changed.SetPayload(url, payload);
  });
  return changed;
}

absl::Status Annotate(const absl::Status& status, std::string_view context) {
  if (status.ok()) return status;
  std::string message(context);
  message += ": ";
  message += std::string_view(status.message().data(), status.message().size());
  return WithMessage(status, message);
}

}  // namespace tandem
