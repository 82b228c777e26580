// SPDX-License-Identifier: Apache-2.0
#include "handoff/wire.h"

#include <openssl/evp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/fingerprint_words.h"
#include "common/utf8.h"

namespace tandem::handoff {
namespace {

constexpr std::string_view kNumerics = "numerics";

// Hashes and short words fit; anything longer is cut for people.
constexpr size_t kLongest = 80;

std::string Shown(const std::string* value) {
  if (value == nullptr) return "nothing";
  if (value->size() <= kLongest) return absl::StrCat("'", *value, "'");
  return absl::StrCat("'", std::string(Utf8Head(*value, kLongest)), "...'");
}

// Senders convert to the receiver's format.
bool Sends(const v1::LinkHello& hello, std::string_view format) {
  if (hello.kv_formats().empty()) {
    return format == kWireFormats[0] || format == kWireFormats[1];
  }
  return std::find(hello.kv_formats().begin(), hello.kv_formats().end(),
                   format) != hello.kv_formats().end();
}

}  // namespace

Attempt FromKey(const v1::AttemptKey& key) {
  return {key.request_id(), key.sequence_index(), key.attempt()};
}

void ToKey(const Attempt& attempt, v1::AttemptKey* key) {
  key->set_request_id(attempt.request_id);
  key->set_sequence_index(attempt.sequence_index);
  key->set_attempt(attempt.number);
}

absl::Status FailureFrom(int32_t code, const std::string& message) {
  // A peer's text: bounded before it goes into logs.
  constexpr size_t kMostBytes = 512;
  const bool known = code > 0 && code <= 16;
  return absl::Status(
      known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
      std::string(Utf8Head(message, kMostBytes)));
}

std::string Message(const absl::Status& status) {
  const absl::string_view message = status.message();
  return ValidUtf8({message.data(), message.size()});
}

std::optional<kernels::DType> ParseDType(std::string_view name) {
  using kernels::DType;
  for (DType type : {DType::kF32, DType::kBF16, DType::kF16, DType::kFp8,
                     DType::kInt8, DType::kInt4}) {
    if (name == kernels::Name(type)) return type;
  }
  return std::nullopt;
}

std::string HashFingerprint(
    const std::map<std::string, std::string>& fingerprint) {
  std::string text;
  for (const auto& [field, value] : fingerprint) {
    absl::StrAppend(&text, field.size(), ":", field, value.size(), ":", value);
  }
  std::string hash(32, '\0');
  unsigned int size = 0;
  if (EVP_Digest(text.data(), text.size(),
                 reinterpret_cast<unsigned char*>(hash.data()), &size,
                 EVP_sha256(), nullptr) != 1) {
    return "";
  }
  return hash;
}

Compatibility Compare(const v1::LinkHello& hello,
                      const std::map<std::string, std::string>& fingerprint,
                      std::string_view kv_dtype, bool mixed_numerics) {
  std::set<std::string> fields;
  for (const auto& [field, value] : fingerprint) fields.insert(field);
  for (const auto& [field, value] : hello.fingerprint()) fields.insert(field);
  const auto shown = [](const std::string& field, const std::string* sender,
                        const std::string* receiver) {
    const auto said = [&field](const std::string& prefill,
                               const std::string& decode) {
      return absl::StrCat("'", field, "' is ", prefill,
                          " on the prefill worker and ", decode,
                          " on the decode worker");
    };
    if (sender == nullptr || receiver == nullptr) {
      return said(Shown(sender), Shown(receiver));
    }
    const FingerprintWords words = DifferingWords(*sender, *receiver, kLongest);
    return absl::StrCat(
        said(absl::StrCat("'", words.a, "'"), absl::StrCat("'", words.b, "'")),
        words.hint);
  };
  std::vector<std::string> differences;
  std::vector<std::string> numeric;  // that --mixed-numerics would allow
  for (const std::string& field : fields) {
    auto ours = fingerprint.find(field);
    auto theirs = hello.fingerprint().find(field);
    const std::string* receiver =
        ours == fingerprint.end() ? nullptr : &ours->second;
    const std::string* sender =
        theirs == hello.fingerprint().end() ? nullptr : &theirs->second;
    if (sender != nullptr && receiver != nullptr && *sender == *receiver) {
      continue;
    }
    (field == kNumerics ? numeric : differences)
        .push_back(shown(field, sender, receiver));
  }
  if (hello.kv_dtype() != kv_dtype) {
    const std::string receiver(kv_dtype);
    numeric.push_back(shown("kv_dtype", &hello.kv_dtype(), &receiver));
  }
  Compatibility result;
  result.mixed = !numeric.empty();
  const bool allowed = mixed_numerics && hello.mixed_numerics();
  if (!numeric.empty() && !allowed) {
    numeric.back() +=
        " (--mixed-numerics on both workers would allow this pair)";
    differences.insert(differences.end(), numeric.begin(), numeric.end());
  }
  if (!ParseDType(hello.kv_dtype()).has_value()) {
    differences.push_back(absl::StrCat(
        "'kv_dtype' of the prefill worker is ", Shown(&hello.kv_dtype()),
        ", which is none of ",
        absl::StrJoin(std::vector<std::string>(std::begin(kWireFormats),
                                               std::end(kWireFormats)),
                      ", ")));
  } else if (hello.kv_dtype() != kv_dtype && !Sends(hello, kv_dtype)) {
    const std::string wanted(kv_dtype);
    differences.push_back(
        absl::StrCat("'kv_dtype' of the decode worker is ", Shown(&wanted),
                     ", which the prefill worker does not know: upgrade it"));
  }
  if (!differences.empty()) {
    result.status = absl::FailedPreconditionError(
        absl::StrCat("fingerprints differ: ", absl::StrJoin(differences, "; "),
                     ". Start both workers with the same model and flags."));
  }
  return result;
}

ProtocolRange OurProtocol() {
  ProtocolRange range;
#ifdef TANDEM_FAILPOINTS
  if (const char* const text = std::getenv("TANDEM_PROTOCOL")) {
    TANDEM_CHECK(std::sscanf(text, "%u..%u", &range.min, &range.max) == 2,
                 "TANDEM_PROTOCOL is MIN..MAX");
  }
#endif
  return range;
}

absl::StatusOr<uint32_t> NegotiateProtocol(uint32_t peer_min,
                                           uint32_t peer_max) {
  const ProtocolRange ours = OurProtocol();
  const uint32_t version = std::min(peer_max, ours.max);
  if (version < std::max(peer_min, ours.min)) {
    return absl::FailedPreconditionError(
        absl::StrCat("no common handoff protocol: the prefill worker speaks ",
                     peer_min, " to ", peer_max, ", the decode worker ",
                     ours.min, " to ", ours.max, ". Upgrade the older one."));
  }
  return version;
}

}  // namespace tandem::handoff
