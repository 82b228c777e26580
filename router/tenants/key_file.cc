// SPDX-License-Identifier: Apache-2.0
#include "router/tenants/key_file.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/check.h"
#include "common/error.h"
#include "common/read_file.h"

namespace tandem::router {
namespace {

constexpr std::string_view kHashPrefix = "sha256:";
constexpr size_t kMaxLineBytes = 1024;

absl::Status Bad(int line, std::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "API_KEYS_FILE",
                   absl::StrCat("line ", line, ": ", std::string(what)));
}

bool IsName(std::string_view text) {
  return !text.empty() && text.size() <= kMaxTenantNameBytes &&
         std::all_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
                  c == '.' || c == '_' || c == '-';
         });
}

std::optional<KeyDigest> ParseDigest(std::string_view text) {
  if (text.substr(0, kHashPrefix.size()) != kHashPrefix) return std::nullopt;
  const std::string hex(text.substr(kHashPrefix.size()));
  KeyDigest digest;
  if (hex.size() != 2 * digest.size() ||
      !std::all_of(hex.begin(), hex.end(), [](char c) {
        return absl::ascii_isxdigit(static_cast<unsigned char>(c));
      })) {
    return std::nullopt;
  }
  const std::string bytes = absl::HexStringToBytes(hex);
  std::copy(bytes.begin(), bytes.end(), digest.begin());
  return digest;
}

// One "name=value" behind an entry's hash.
class Options {
 public:
  explicit Options(int line) : line_(line) {}

  absl::Status Take(std::string_view text) {
    const size_t mark = text.find('=');
    if (mark == std::string_view::npos) {
      return Bad(line_, "name=value is expected behind the hash");
    }
    const std::string_view name = text.substr(0, mark);
    const std::string_view value = text.substr(mark + 1);
    if (name == "tpm_limit") {
      return Number(name, value, kMaxLimitPerMinute, &limits.tokens_per_minute);
    }
    if (name == "rpm_limit") {
      return Number(name, value, kMaxLimitPerMinute,
                    &limits.requests_per_minute);
    }
    if (name == "max_parallel_requests") {
      return Number(name, value, kMaxParallelRequests,
                    &limits.parallel_requests);
    }
    if (name != "name") {
      return Bad(line_,
                 "an option is none of tpm_limit, rpm_limit, "
                 "max_parallel_requests and name");
    }
    if (!IsName(value) || !key_name.empty()) {
      return Bad(line_, "name = is given once: letters, digits, . _ - only");
    }
    key_name = std::string(value);
    return absl::OkStatus();
  }

  TenantLimits limits;
  std::string key_name;

 private:
  absl::Status Number(std::string_view name, std::string_view value,
                      int64_t most, int64_t* limit) const {
    int64_t number = 0;
    const absl::string_view text(value.data(), value.size());
    if (*limit != 0 || !absl::SimpleAtoi(text, &number) || number < 1 ||
        number > most) {
      return Bad(line_, absl::StrCat(std::string(name),
                                     " is given once: a number from 1 to ",
                                     most, "; left out, this file sets none"));
    }
    *limit = number;
    return absl::OkStatus();
  }

  const int line_;
};

// What an entry states of its tenant's limits, into what is known of them.
absl::Status Merge(int line, const TenantLimits& stated, TenantLimits* known) {
  const auto merge = [line](const char* name, int64_t value, int64_t* all) {
    if (value == 0 || *all == value) return absl::OkStatus();
    if (*all != 0) {
      return Bad(line, absl::StrCat(name, " = ", value,
                                    ": an entry of the same tenant above says ",
                                    *all));
    }
    *all = value;
    return absl::OkStatus();
  };
  absl::Status status =
      merge("tpm_limit", stated.tokens_per_minute, &known->tokens_per_minute);
  if (status.ok()) {
    status = merge("rpm_limit", stated.requests_per_minute,
                   &known->requests_per_minute);
  }
  if (status.ok()) {
    status = merge("max_parallel_requests", stated.parallel_requests,
                   &known->parallel_requests);
  }
  return status;
}

absl::Status ParseLine(std::string_view text, int line, KeyFile* file,
                       std::map<KeyDigest, int>* seen) {
  if (text.size() > kMaxLineBytes) {
    return Bad(line, absl::StrCat("over ", kMaxLineBytes, " bytes"));
  }
  const absl::string_view entry_text(text.data(),
                                     std::min(text.find('#'), text.size()));
  const std::vector<std::string> words =
      absl::StrSplit(entry_text, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
  if (words.empty()) return absl::OkStatus();
  if (!IsName(words[0])) {
    return Bad(line,
               "a tenant's name comes first: 1 to 64 letters, digits, . _ -");
  }
  const std::optional<KeyDigest> digest =
      words.size() > 1 ? ParseDigest(words[1]) : std::nullopt;
  if (!digest) {
    return Bad(line,
               "the key's hash comes second: sha256: and 64 hexadecimal "
               "digits, as `tandem keys new` writes it; never the key itself");
  }
  Options options(line);
  for (size_t i = 2; i < words.size(); ++i) {
    const absl::Status status = options.Take(words[i]);
    if (!status.ok()) return status;
  }
  const auto [before, fresh] = seen->emplace(*digest, line);
  if (!fresh) {
    return Bad(line, absl::StrCat("the key of line ", before->second,
                                  " again: a key is of one entry"));
  }
  if (file->keys.size() == kMaxKeys) {
    return Bad(line, absl::StrCat("more than ", kMaxKeys, " keys"));
  }
  const absl::Status merged =
      Merge(line, options.limits, &file->tenants[words[0]]);
  if (!merged.ok()) return merged;
  file->keys.push_back({.tenant = words[0],
                        .digest = *digest,
                        .name = options.key_name,
                        .line = line});
  return absl::OkStatus();
}

}  // namespace

KeyDigest DigestOf(std::string_view key) {
  KeyDigest digest;
  unsigned size = 0;
  TANDEM_CHECK(EVP_Digest(key.data(), key.size(), digest.data(), &size,
                          EVP_sha256(), nullptr) == 1 &&
                   size == digest.size(),
               "SHA-256 cannot fail");
  return digest;
}

bool SameDigest(const KeyDigest& a, const KeyDigest& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

absl::Status CheckTenantName(std::string_view name) {
  if (IsName(name)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_NAME",
                   absl::StrCat("'", std::string(name),
                                "': a name is 1 to 64 letters, digits, ., _ "
                                "and -"));
}

absl::StatusOr<KeyFile> ParseKeyFile(std::string_view text) {
  if (text.size() > kMaxKeyFileBytes) {
    return MakeError(absl::StatusCode::kInvalidArgument, "API_KEYS_FILE",
                     absl::StrCat("over ", kMaxKeyFileBytes, " bytes"));
  }
  KeyFile file;
  std::map<KeyDigest, int> seen;  // and the line
  for (int line = 1; !text.empty(); ++line) {
    const size_t end = std::min(text.find('\n'), text.size());
    const absl::Status status =
        ParseLine(text.substr(0, end), line, &file, &seen);
    if (!status.ok()) return status;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return file;
}

absl::StatusOr<KeyFile> ReadKeyFile(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path, kMaxKeyFileBytes);
  if (!text.ok()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "API_KEYS_FILE",
                     std::string(text.status().message()));
  }
  absl::StatusOr<KeyFile> file = ParseKeyFile(*text);
  if (!file.ok()) return Annotate(file.status(), path);
  return file;
}

std::string NewKey(Random* random) {
  return absl::StrCat("sk-tandem-",
                      absl::WebSafeBase64Escape(random->Bytes(32)));
}

std::string FormatKeyEntry(const KeyEntry& entry, const TenantLimits& limits) {
  std::string line =
      absl::StrCat(entry.tenant, " ", std::string(kHashPrefix),
                   absl::BytesToHexString(absl::string_view(
                       reinterpret_cast<const char*>(entry.digest.data()),
                       entry.digest.size())));
  const auto add = [&line](const char* name, int64_t value) {
    if (value != 0) absl::StrAppend(&line, " ", name, "=", value);
  };
  add("tpm_limit", limits.tokens_per_minute);
  add("rpm_limit", limits.requests_per_minute);
  add("max_parallel_requests", limits.parallel_requests);
  if (!entry.name.empty()) absl::StrAppend(&line, " name=", entry.name);
  return line;
}

}  // namespace tandem::router
