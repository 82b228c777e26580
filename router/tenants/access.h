// SPDX-License-Identifier: Apache-2.0
// Who may call: keys, and whose they are. Thread-safe; keys may be replaced
// while calls are answered.

#ifndef TANDEM_ROUTER_TENANTS_ACCESS_H_
#define TANDEM_ROUTER_TENANTS_ACCESS_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "router/tenants/key_file.h"
#include "router/tenants/tenants.h"

namespace tandem::router {

// The tenant of all keys of --api-key.
inline constexpr char kDefaultTenant[] = "default";

class Access {
 public:
  // As Tenants' constructor.
  Access(std::function<absl::Time()> clock, RouterObserver* observer,
         int64_t parallel_requests = 0)
      : observer_(observer),
        tenants_(std::move(clock), observer, parallel_requests) {}

  // From then on every call needs one of them. Replaces those before.
  void Install(const KeyFile& file);
  // Keys that all are one tenant's, without limits.
  static KeyFile SharedKeys(const std::vector<std::string>& keys);

  // Before the first Install everybody may call.
  bool closed() const;

  // Whose key an `authorization` header or metadata entry brings; empty where
  // no keys are asked for. UNAUTHENTICATED: CREDENTIALS_MISSING, or
  // API_KEY_INVALID for one that was revoked, too. Takes the same time
  // whichever key it is, or how much of one is right.
  absl::StatusOr<std::string> Authenticate(
      std::string_view authorization) const;

  Tenants& tenants() { return tenants_; }

 private:
  absl::Status Refused(const char* reason, const std::string& message) const;

  RouterObserver* const observer_;
  Tenants tenants_;
  mutable Mutex mutex_;
  std::shared_ptr<const std::vector<KeyEntry>> keys_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TENANTS_ACCESS_H_
