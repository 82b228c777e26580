// SPDX-License-Identifier: Apache-2.0
// API keys at rest, and the file of --api-keys-file: one entry a line, for
// each key the tenant whose it is, what its SHA-256 is, and what that tenant
// may take. '#' begins a comment.
//
//   # tenant  key's SHA-256       limits, all optional; a name for people
//   acme      sha256:9f86d0...    tpm_limit=100000 rpm_limit=600
//   acme      sha256:60303a...    name=ci
//   zen       sha256:fd61a0...    max_parallel_requests=4
//
// Limits are a tenant's, named as LiteLLM names them: entries of one tenant
// share what any of them states, and must not contradict each other.
//
// A plain hash is enough, and no slow one (bcrypt, Argon2) is needed, since
// keys are 256 random bits: nobody can try them all. Words that people choose
// are no keys.

#ifndef TANDEM_ROUTER_TENANTS_KEY_FILE_H_
#define TANDEM_ROUTER_TENANTS_KEY_FILE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/random.h"

namespace tandem::router {

inline constexpr size_t kMaxKeyFileBytes = size_t{1} << 20;
inline constexpr size_t kMaxKeys = 4096;  // each is compared with every call's
inline constexpr size_t kMaxTenantNameBytes = 64;
inline constexpr int64_t kMaxLimitPerMinute = 1'000'000'000'000;
inline constexpr int64_t kMaxParallelRequests = 1'000'000;

// 0: no limit.
struct TenantLimits {
  int64_t tokens_per_minute = 0;    // tpm_limit: prompt and completion
  int64_t requests_per_minute = 0;  // rpm_limit
  int64_t parallel_requests = 0;    // max_parallel_requests

  bool operator==(const TenantLimits&) const = default;
};

using KeyDigest = std::array<uint8_t, 32>;  // SHA-256

struct KeyEntry {
  std::string tenant;
  KeyDigest digest{};
  std::string name = {};  // for people; may be empty
  int line = 0;           // of the file, from 1
};

struct KeyFile {
  std::vector<KeyEntry> keys;
  std::map<std::string, TenantLimits> tenants;  // of all entries
};

KeyDigest DigestOf(std::string_view key);
// Constant time.
bool SameDigest(const KeyDigest& a, const KeyDigest& b);

// INVALID_ARGUMENT names the line; what may be a key itself is not repeated.
absl::StatusOr<KeyFile> ParseKeyFile(std::string_view text);
// Read and parsed; errors name the path.
absl::StatusOr<KeyFile> ReadKeyFile(const std::string& path);

// What names tenants and keys: letters, digits, '.', '_', '-', 1 to 64.
absl::Status CheckTenantName(std::string_view name);

// "sk-tandem-" and 43 characters of base64url: 256 random bits.
std::string NewKey(Random* random);
// A line of the file, without its end.
std::string FormatKeyEntry(const KeyEntry& entry, const TenantLimits& limits);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TENANTS_KEY_FILE_H_
