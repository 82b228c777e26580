// SPDX-License-Identifier: Apache-2.0
// What every face of the router does before and beside the core, whatever it
// speaks: requests validated and tokenised, text, and facts about the model.
// Const methods run on many threads at once.

#ifndef TANDEM_ROUTER_INTAKE_INTAKE_H_
#define TANDEM_ROUTER_INTAKE_INTAKE_H_

#include <atomic>
#include <functional>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/mutex.h"
#include "router/core/request.h"
#include "router/intake/model_text.h"
#include "router/telemetry/metrics.h"
#include "router/tenants/access.h"

namespace tandem::router {

// What threads other than the loop's may know of the cluster: written by it.
class ClusterFacts {
 public:
  std::atomic<int> context_length = 0;  // 0: no decode worker
  // Of the decode worker whose KV cache is the largest.
  std::atomic<int> kv_blocks = 0;
  std::atomic<int> kv_block_size = 0;
  std::atomic<int64_t> kv_bytes_per_token = 0;
  std::atomic<int> kv_sequences = 0;  // KvRoom's
  std::atomic<int> ready_decode = 0;
  std::atomic<int> ready_prefill = 0;

  void set_adapters(std::vector<std::string> names) {
    const MutexLock lock(&mutex_);
    adapters_ = std::move(names);
  }
  // Of all decode workers, ascending.
  std::vector<std::string> adapters() const {
    const MutexLock lock(&mutex_);
    return adapters_;
  }

 private:
  mutable Mutex mutex_;
  std::vector<std::string> adapters_ ABSL_GUARDED_BY(mutex_);
};

// What a call brings beside its request; "" where it does not.
struct CallHeaders {
  std::string_view request_id;  // x-request-id
  std::string_view traceparent;
  std::string_view tracestate;
  std::string_view tenant;  // whose key it is; empty: none is asked for
};

class Intake {
 public:
  // `trace_ratio`: of the requests that come without a trace, those of which
  // one is begun; negative: no spans are wanted of any. `room`, called from
  // many threads, refuses a request before anything is made of it.
  Intake(const ModelText* model, const ClusterFacts* facts,
         const Offers& offers, const StructuredBudget& structured,
         RouterMetrics* metrics, Access* access,
         std::function<absl::Status(int priority)> room,
         double trace_ratio = -1)
      : model_(model),
        facts_(facts),
        offers_(offers),
        structured_(structured),
        metrics_(metrics),
        access_(access),
        room_(std::move(room)),
        trace_ratio_(trace_ratio) {}

  const Access& access() const { return *access_; }

  // All that can be done without the core, for a client of `api`. A request id
  // among the headers names the request where it has no name of its own;
  // `time_left` is the call's, infinite if it has no deadline. Refusals are
  // counted. The last step is to charge the tenant for it.
  absl::StatusOr<AdmittedRequest> Prepare(Api api,
                                          const v1::GenerateRequest& request,
                                          const CallHeaders& headers,
                                          absl::Duration time_left) const;

  // The two steps of Prepare, for a call of several requests, which its tenant
  // is charged for together: all or none. `bounded`: they say max_tokens.
  absl::StatusOr<AdmittedRequest> PrepareUncharged(
      Api api, const v1::GenerateRequest& request, const CallHeaders& headers,
      absl::Duration time_left) const;
  absl::Status Charge(Api api, bool bounded,
                      absl::Span<AdmittedRequest> admitted) const;

  // OpenAI's x-ratelimit-* of the tenant.
  std::vector<std::pair<std::string, std::string>> RateHeaders(
      const std::string& tenant) const {
    return access_->tenants().RateHeaders(tenant);
  }

  // Whether a request of that priority would be let in now, asked before
  // anything is made of it: what Prepare asks first. Refusals are counted.
  absl::Status HasRoom(Api api, const std::string& tenant, int priority) const;

  // An empty one has none.
  TenantLimits LimitsOf(const std::string& tenant) const {
    return tenant.empty() ? TenantLimits()
                          : access_->tenants().LimitsOf(tenant);
  }

  // A call of the tenant's that needs no worker, against its requests per
  // minute. Nothing is asked of an empty one.
  absl::Status AdmitCall(const std::string& tenant) const {
    return tenant.empty() ? absl::OkStatus()
                          : access_->tenants().AdmitCall(tenant);
  }

  // A call that did not come as far as Prepare.
  void CountRefused(Api api, const absl::Status& status) const {
    metrics_->OnInvalid(api, status);
  }

  absl::StatusOr<v1::TokenizeResponse> Tokenize(
      const v1::TokenizeRequest& request) const;
  absl::StatusOr<v1::DetokenizeResponse> Detokenize(
      const v1::DetokenizeRequest& request) const;
  // Of the model, or of an adapter by its name.
  v1::ModelInfo Info(const std::string& name = "") const;
  // The same of one of Infos(); NOT_FOUND.
  absl::StatusOr<v1::ModelInfo> Find(const std::string& name) const;
  // The model's, then those of its adapters.
  std::vector<v1::ModelInfo> Infos() const;
  ModelLimits Limits() const;

 private:
  TraceContext TraceOf(const CallHeaders& headers) const;
  absl::StatusOr<AdmittedRequest> Admit(
      const v1::GenerateRequest& request) const;

  const ModelText* const model_;
  const ClusterFacts* const facts_;
  const Offers offers_;
  const StructuredBudget structured_;
  RouterMetrics* const metrics_;
  Access* const access_;
  const std::function<absl::Status(int)> room_;
  const double trace_ratio_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_INTAKE_INTAKE_H_
