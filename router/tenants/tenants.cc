// SPDX-License-Identifier: Apache-2.0
#include "router/tenants/tenants.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/error.h"

namespace tandem::router {
namespace {

// Nobody knows when a request in flight ends.
constexpr absl::Duration kParallelRetry = absl::Seconds(1);

std::string Reset(absl::Duration until) {
  return absl::FormatDuration(absl::Ceil(until, absl::Milliseconds(1)));
}

// No two tenants and purposes have the same.
KeyDigest DigestFor(absl::string_view purpose, const std::string& tenant,
                    const std::string& more) {
  std::string size;
  for (int shift = 0; shift < 64; shift += 8) {
    size += static_cast<char>(uint64_t{tenant.size()} >> shift);
  }
  return DigestOf(absl::StrCat(purpose, size, tenant, more));
}

// What is taken of the minute's `limit` before the first token.
int64_t Reserve(const TenantAsk& ask, int64_t limit) {
  if (ask.bounded) return ask.prompt_tokens + ask.completion_tokens;
  const int64_t reserved =
      ask.prompt_tokens + std::min(ask.completion_tokens, kUnstatedTokens);
  const bool may_fit = limit != 0 && ask.prompt_tokens < limit;
  return may_fit ? std::min(reserved, limit) : reserved;
}

}  // namespace

void Tenants::Set(const std::map<std::string, TenantLimits>& limits) {
  const absl::Time now = clock_();
  const MutexLock lock(&mutex_);
  for (auto it = accounts_.begin(); it != accounts_.end();) {
    const auto next = std::next(it);
    if (!limits.contains(it->first)) gone_.insert(accounts_.extract(it));
    it = next;
  }
  std::erase_if(gone_, [now](const auto& entry) {
    Account& account = *entry.second;
    return account.in_flight == 0 &&
           account.tokens.UntilFull(now) <= absl::ZeroDuration() &&
           account.requests.UntilFull(now) <= absl::ZeroDuration();
  });
  for (const auto& [tenant, stated] : limits) {
    TenantLimits set = stated;
    if (set.parallel_requests == 0) set.parallel_requests = parallel_requests_;
    std::shared_ptr<Account>& account = accounts_[tenant];
    if (account == nullptr) {
      if (auto before = gone_.extract(tenant)) {
        account = std::move(before.mapped());
      }
    }
    if (account == nullptr) {
      account = std::make_shared<Account>(set, now);
      continue;
    }
    account->limits = set;
    account->tokens.SetLimit(set.tokens_per_minute, now);
    account->requests.SetLimit(set.requests_per_minute, now);
  }
}

absl::Status Tenants::Refused(const std::string& tenant, const char* limit,
                              const std::string& what,
                              std::optional<absl::Duration> wait) const {
  observer_->OnTenantRefused(tenant, limit);
  return MakeError(
      absl::StatusCode::kResourceExhausted, "RATE_LIMITED",
      absl::StrCat(
          "Rate limit reached for tenant ", tenant, " on ", what,
          wait ? absl::StrCat(". Try again in ", Reset(*wait), ".") : ""),
      {{"tenant", tenant}, {"limit", limit}}, wait);
}

absl::StatusOr<Tenants::Account*> Tenants::Find(const std::string& tenant) {
  const auto found = accounts_.find(tenant);
  if (found != accounts_.end()) return found->second.get();
  // Its key was revoked a moment ago.
  return MakeError(absl::StatusCode::kUnauthenticated, "API_KEY_INVALID",
                   "the API key has been revoked");
}

absl::Status Tenants::CheckRequests(const std::string& tenant, Account* account,
                                    int64_t requests, absl::Time now) {
  if (account->requests.Has(requests, now)) return absl::OkStatus();
  const int64_t limit = account->limits.requests_per_minute;
  std::string what = absl::StrCat("requests per minute (RPM): limit ", limit);
  if (requests > limit) {
    absl::StrAppend(&what, ", requested ", requests,
                    ". That is more than a whole minute's: send fewer prompts "
                    "at a time");
    return Refused(tenant, "requests_per_minute", what, std::nullopt);
  }
  return Refused(tenant, "requests_per_minute", what,
                 account->requests.Until(requests, now));
}

absl::Status Tenants::CheckCounts(const std::string& tenant, Account* account,
                                  int64_t requests, int64_t sequences,
                                  absl::Time now) {
  const int64_t limit = account->limits.parallel_requests;
  if (limit != 0 && account->in_flight + sequences > limit) {
    const std::string what =
        absl::StrCat("requests at a time: limit ", limit, ", in flight ",
                     account->in_flight, ", requested ", sequences);
    if (sequences > limit) {
      return Refused(tenant, "max_parallel_requests",
                     absl::StrCat(what,
                                  ". That is more than there may ever be: ask "
                                  "for fewer sequences"),
                     std::nullopt);
    }
    return Refused(tenant, "max_parallel_requests", what, kParallelRetry);
  }
  return CheckRequests(tenant, account, requests, now);
}

absl::Status Tenants::CheckTokens(const std::string& tenant, Account* account,
                                  int64_t requests, int64_t tokens,
                                  absl::Time now) {
  if (account->tokens.Has(tokens, now)) return absl::OkStatus();
  const int64_t limit = account->limits.tokens_per_minute;
  const std::string what =
      absl::StrCat("tokens per minute (TPM): limit ", limit, ", left ",
                   account->tokens.Left(now), ", requested ", tokens);
  if (tokens > limit) {
    return Refused(
        tenant, "tokens_per_minute",
        absl::StrCat(what, ". That is more than a whole minute's: ",
                     requests > 1 ? "send fewer prompts at a time, " : "",
                     "shorten the prompt or lower max_tokens"),
        std::nullopt);
  }
  return Refused(tenant, "tokens_per_minute", what,
                 account->tokens.Until(tokens, now));
}

absl::StatusOr<std::vector<std::shared_ptr<Tenants::Charge>>> Tenants::AdmitAll(
    const std::string& tenant, const std::vector<TenantAsk>& asks) {
  const absl::Time now = clock_();
  const MutexLock lock(&mutex_);
  const absl::StatusOr<Account*> found = Find(tenant);
  if (!found.ok()) return found.status();
  Account& account = **found;
  const auto requests = static_cast<int64_t>(asks.size());
  int64_t sequences = 0, tokens = 0;
  std::vector<int64_t> reserved;
  for (const TenantAsk& ask : asks) {
    reserved.push_back(Reserve(ask, account.limits.tokens_per_minute));
    sequences += ask.sequences;
    tokens += reserved.back();
  }
  absl::Status status = CheckCounts(tenant, &account, requests, sequences, now);
  if (status.ok()) {
    status = CheckTokens(tenant, &account, requests, tokens, now);
  }
  if (!status.ok()) return status;
  account.in_flight += sequences;
  account.requests.Take(requests, now);
  account.tokens.Take(tokens, now);
  std::vector<std::shared_ptr<Charge>> charges;
  for (size_t i = 0; i < asks.size(); ++i) {
    charges.push_back(std::make_shared<Charge>(this, tenant, accounts_[tenant],
                                               asks[i], reserved[i]));
  }
  return charges;
}

absl::StatusOr<std::shared_ptr<Tenants::Charge>> Tenants::Admit(
    const std::string& tenant, const TenantAsk& ask) {
  auto charges = AdmitAll(tenant, {ask});
  if (!charges.ok()) return charges.status();
  return std::move(charges->front());
}

absl::Status Tenants::HasRoom(const std::string& tenant) {
  const absl::Time now = clock_();
  const MutexLock lock(&mutex_);
  const absl::StatusOr<Account*> account = Find(tenant);
  if (!account.ok()) return account.status();
  return CheckCounts(tenant, *account, /*requests=*/1, /*sequences=*/1, now);
}

TenantLimits Tenants::LimitsOf(const std::string& tenant) {
  const MutexLock lock(&mutex_);
  const absl::StatusOr<Account*> account = Find(tenant);
  return account.ok() ? (*account)->limits : TenantLimits();
}

absl::Status Tenants::AdmitCall(const std::string& tenant) {
  const absl::Time now = clock_();
  const MutexLock lock(&mutex_);
  const absl::StatusOr<Account*> account = Find(tenant);
  if (!account.ok()) return account.status();
  absl::Status status = CheckRequests(tenant, *account, /*requests=*/1, now);
  if (status.ok()) (*account)->requests.Take(1, now);
  return status;
}

std::vector<v1::TenantStatus> Tenants::Describe() {
  const absl::Time now = clock_();
  const MutexLock lock(&mutex_);
  std::vector<v1::TenantStatus> all;
  for (const auto& [tenant, account] : accounts_) {
    v1::TenantStatus& status = all.emplace_back();
    status.set_tenant(tenant);
    status.set_running(static_cast<int32_t>(account->in_flight));
    const TenantLimits& limits = account->limits;
    if (limits.parallel_requests != 0) {
      status.set_max_parallel_requests(limits.parallel_requests);
    }
    if (limits.requests_per_minute != 0) {
      status.set_requests_per_minute(limits.requests_per_minute);
      status.set_requests_left(account->requests.Left(now));
    }
    if (limits.tokens_per_minute != 0) {
      status.set_tokens_per_minute(limits.tokens_per_minute);
      status.set_tokens_left(account->tokens.Left(now));
    }
  }
  return all;
}

std::vector<std::pair<std::string, std::string>> Tenants::RateHeaders(
    const std::string& tenant) {
  std::vector<std::pair<std::string, std::string>> headers;
  const absl::Time now = clock_();
  const MutexLock lock(&mutex_);
  const auto found = accounts_.find(tenant);
  if (found == accounts_.end()) return headers;
  const auto add = [&](const char* what, TokenBucket* bucket) {
    if (bucket->limit() == 0) return;
    headers.emplace_back(absl::StrCat("x-ratelimit-limit-", what),
                         absl::StrCat(bucket->limit()));
    headers.emplace_back(absl::StrCat("x-ratelimit-remaining-", what),
                         absl::StrCat(bucket->Left(now)));
    headers.emplace_back(absl::StrCat("x-ratelimit-reset-", what),
                         Reset(bucket->UntilFull(now)));
  };
  add("requests", &found->second->requests);
  add("tokens", &found->second->tokens);
  return headers;
}

void Tenants::Charge::Begun() {
  const MutexLock lock(&tenants_->mutex_);
  begun_ = true;
}

void Tenants::Charge::CoverLocked(int64_t generated) {
  generated_ = generated;
  const int64_t used = prompt_tokens_ + generated_;
  if (used <= reserved_) return;
  account_->tokens.Take(used - reserved_, tenants_->clock_());
  reserved_ = used;
}

void Tenants::Charge::Generated(int64_t tokens) {
  const MutexLock lock(&tenants_->mutex_);
  if (!ended_) CoverLocked(generated_ + tokens);
}

void Tenants::Charge::GeneratedInAll(int64_t tokens) {
  const MutexLock lock(&tenants_->mutex_);
  if (!ended_ && tokens > generated_) CoverLocked(tokens);
}

void Tenants::Charge::End(Outcome outcome) {
  int64_t prompt = 0, generated = 0;
  {
    const MutexLock lock(&tenants_->mutex_);
    if (std::exchange(ended_, true)) return;
    const bool free =
        generated_ == 0 && (outcome == Outcome::kFailed || !begun_);
    prompt = free ? 0 : prompt_tokens_;
    generated = generated_;
    // Who gave each up in time would have them for the prompt alone.
    if (!free && told_at_end_ && generated == 0) {
      generated = reserved_ - prompt;
    }
    const absl::Time now = tenants_->clock_();
    account_->in_flight -= sequences_;
    account_->tokens.Give(reserved_ - prompt - generated, now);
    if (free && outcome == Outcome::kFailed) account_->requests.Give(1, now);
  }
  tenants_->observer_->OnTenantTokens(tenant_, prompt, generated);
}

std::string TenantSalt(const std::string& tenant, const std::string& salt) {
  if (tenant.empty()) return salt;
  const KeyDigest digest = DigestFor("tandem tenant salt", tenant, salt);
  // 0xff begins no UTF-8 text, which is what clients' salts are.
  return absl::StrCat(
      "\xff", absl::string_view(reinterpret_cast<const char*>(digest.data()),
                                digest.size()));
}

uint64_t CacheOwner(const std::string& tenant) {
  if (tenant.empty()) return 0;
  const KeyDigest digest = DigestFor("tandem cache owner", tenant, "");
  uint64_t owner;
  std::memcpy(&owner, digest.data(), sizeof(owner));
  return owner;
}

}  // namespace tandem::router
