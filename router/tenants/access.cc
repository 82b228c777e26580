// SPDX-License-Identifier: Apache-2.0
#include "router/tenants/access.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "common/error.h"

namespace tandem::router {

void Access::Install(const KeyFile& file) {
  tenants_.Set(file.tenants);
  auto keys = std::make_shared<const std::vector<KeyEntry>>(file.keys);
  const MutexLock lock(&mutex_);
  keys_ = std::move(keys);
}

KeyFile Access::SharedKeys(const std::vector<std::string>& keys) {
  KeyFile file;
  file.tenants[kDefaultTenant] = {};
  for (const std::string& key : keys) {
    file.keys.push_back({.tenant = kDefaultTenant, .digest = DigestOf(key)});
  }
  return file;
}

bool Access::closed() const {
  const MutexLock lock(&mutex_);
  return keys_ != nullptr;
}

absl::Status Access::Refused(const char* reason,
                             const std::string& message) const {
  observer_->OnTenantRefused("", reason);
  return MakeError(absl::StatusCode::kUnauthenticated, reason, message);
}

absl::StatusOr<std::string> Access::Authenticate(
    std::string_view authorization) const {
  std::shared_ptr<const std::vector<KeyEntry>> keys;
  {
    const MutexLock lock(&mutex_);
    keys = keys_;
  }
  if (keys == nullptr) return std::string();
  constexpr absl::string_view kScheme = "bearer ";
  absl::string_view key(authorization.data(), authorization.size());
  if (!absl::StartsWithIgnoreCase(key, kScheme)) {
    return Refused("CREDENTIALS_MISSING",
                   "an API key is needed: send it as 'Authorization: Bearer "
                   "KEY'");
  }
  key = absl::StripAsciiWhitespace(key.substr(kScheme.size()));
  if (key.empty()) return Refused("CREDENTIALS_MISSING", "the key is empty");
  const KeyDigest digest = DigestOf(std::string_view(key.data(), key.size()));
  const KeyEntry* found = nullptr;
  for (const KeyEntry& entry : *keys) {
    if (SameDigest(entry.digest, digest)) found = &entry;
  }
  if (found == nullptr) {
    return Refused("API_KEY_INVALID",
                   "the API key is not one of this server's");
  }
  return found->tenant;
}

}  // namespace tandem::router
