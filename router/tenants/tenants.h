// SPDX-License-Identifier: Apache-2.0
// What tenants may take, and have taken: tokens and requests per minute, and
// requests at a time, of which each sequence is one. Thread-safe; each decision
// and what it takes are one step under one lock, so limits hold however many
// calls come at once.
//
// A request is admitted for its prompt and all that it may generate, and in
// the end has paid for its prompt and what it did generate. One that does not
// say how much it wants (max_tokens) is taken to want kUnstatedTokens; beyond
// those it pays as tokens come, if need be in advance of the next minute.
//
//   ended well               prompt and generated tokens
//   failed, tokens before    the same
//   failed without a token   nothing, and it was no request
//   given up by its client   generated tokens, and the prompt once a worker
//                            has begun with it; all that it was admitted for
//                            where only the end would have told its tokens

#ifndef TANDEM_ROUTER_TENANTS_TENANTS_H_
#define TANDEM_ROUTER_TENANTS_TENANTS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/mutex.h"
#include "router/telemetry/observer.h"
#include "router/tenants/key_file.h"
#include "router/tenants/token_bucket.h"
#include "tandem/v1/admin.pb.h"

namespace tandem::router {

// Most answers of chats are shorter, and clients seldom bound them.
inline constexpr int64_t kUnstatedTokens = 256;

struct TenantAsk {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;  // at most, of all its sequences
  bool bounded = true;            // the client said so itself
  int64_t sequences = 1;          // as RouterCore::Admit counts them
  bool told_at_end = false;       // what it has generated
};

class Tenants {
 public:
  // `clock` never goes back much, and is asked on any thread, as `observer`
  // is told. Both outlive this and all charges. `parallel_requests`: of a
  // tenant whose limits do not say; 0: no limit.
  Tenants(std::function<absl::Time()> clock, RouterObserver* observer,
          int64_t parallel_requests = 0)
      : clock_(std::move(clock)),
        observer_(observer),
        parallel_requests_(parallel_requests) {}

  class Charge;

  // Instead of those before. Tenants that stay keep what they have taken, and
  // so do those that went and come back; requests in flight go on.
  void Set(const std::map<std::string, TenantLimits>& limits);

  // RESOURCE_EXHAUSTED, RATE_LIMITED with the time to wait, if there is one,
  // when one of the limits is reached. The charge is the request's, shared by
  // its sequences.
  absl::StatusOr<std::shared_ptr<Charge>> Admit(const std::string& tenant,
                                                const TenantAsk& ask);
  // Of one call's requests, all or none: each its charge.
  absl::StatusOr<std::vector<std::shared_ptr<Charge>>> AdmitAll(
      const std::string& tenant, const std::vector<TenantAsk>& asks);

  // Of what Admit would say, that which no prompt needs to be tokenised for.
  // Takes nothing.
  absl::Status HasRoom(const std::string& tenant);

  // As they are now; none of who is not known.
  TenantLimits LimitsOf(const std::string& tenant);

  // Of a call that takes no worker: one of its requests per minute. As Admit.
  absl::Status AdmitCall(const std::string& tenant);

  // All of them as they are now, by name.
  std::vector<v1::TenantStatus> Describe();

  // OpenAI's x-ratelimit-*, of what limits the tenant has.
  std::vector<std::pair<std::string, std::string>> RateHeaders(
      const std::string& tenant);

 private:
  struct Account {
    Account(const TenantLimits& set, absl::Time now)
        : limits(set),
          tokens(set.tokens_per_minute, now),
          requests(set.requests_per_minute, now) {}
    TenantLimits limits;
    TokenBucket tokens;
    TokenBucket requests;
    int64_t in_flight = 0;  // sequences
  };

  absl::Status Refused(const std::string& tenant, const char* limit,
                       const std::string& what,
                       std::optional<absl::Duration> wait) const;
  absl::StatusOr<Account*> Find(const std::string& tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckRequests(const std::string& tenant, Account* account,
                             int64_t requests, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckCounts(const std::string& tenant, Account* account,
                           int64_t requests, int64_t sequences, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckTokens(const std::string& tenant, Account* account,
                           int64_t requests, int64_t tokens, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::function<absl::Time()> clock_;
  RouterObserver* const observer_;
  const int64_t parallel_requests_;
  Mutex mutex_;
  std::map<std::string, std::shared_ptr<Account>> accounts_
      ABSL_GUARDED_BY(mutex_);
  // Of tenants that went, until nothing of what they took is missing any more.
  std::map<std::string, std::shared_ptr<Account>> gone_ ABSL_GUARDED_BY(mutex_);
};

// What one request takes. Thread-safe.
class Tenants::Charge {
 public:
  enum class Outcome { kDone, kFailed, kGivenUp };

  Charge(Tenants* tenants, std::string tenant, std::shared_ptr<Account> account,
         const TenantAsk& ask, int64_t reserved)
      : tenants_(tenants),
        tenant_(std::move(tenant)),
        account_(std::move(account)),
        prompt_tokens_(ask.prompt_tokens),
        sequences_(ask.sequences),
        told_at_end_(ask.told_at_end),
        reserved_(reserved) {}
  ~Charge() { End(Outcome::kFailed); }
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;

  // A worker has its prompt.
  void Begun();
  // So many tokens more.
  void Generated(int64_t tokens);
  // All that were generated, where only the end tells.
  void GeneratedInAll(int64_t tokens);
  // Settles; later calls of anything do nothing.
  void End(Outcome outcome);

 private:
  void CoverLocked(int64_t generated)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(tenants_->mutex_);

  Tenants* const tenants_;
  const std::string tenant_;
  const std::shared_ptr<Account> account_;
  const int64_t prompt_tokens_;
  const int64_t sequences_;
  const bool told_at_end_;
  int64_t reserved_ ABSL_GUARDED_BY(tenants_->mutex_);
  int64_t generated_ ABSL_GUARDED_BY(tenants_->mutex_) = 0;
  bool begun_ ABSL_GUARDED_BY(tenants_->mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(tenants_->mutex_) = false;
};

// The salt of a tenant's requests that bring `salt` of their own: what no
// other tenant, nor a client of a router without tenants, can come to. An
// empty tenant's is `salt` itself.
std::string TenantSalt(const std::string& tenant, const std::string& salt);

// Who a tenant's cached blocks are of for workers, which know no names: 0 of
// the empty tenant, else the same in every router.
uint64_t CacheOwner(const std::string& tenant);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TENANTS_TENANTS_H_
