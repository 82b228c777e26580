// SPDX-License-Identifier: Apache-2.0
// What happens to requests, for metrics and the log: ids and numbers, never
// text. Called on the router's loop.

#ifndef TANDEM_ROUTER_TELEMETRY_OBSERVER_H_
#define TANDEM_ROUTER_TELEMETRY_OBSERVER_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "tandem/v1/inference.pb.h"
#include "tandem/v1/registry.pb.h"

namespace tandem::router {

// What a client spoke.
enum class Api { kGrpc, kHttp, kOpenEngine };

struct RequestSummary {
  std::string request_id;
  std::string internal_id;  // hex
  Api api = Api::kGrpc;
  std::string operation;  // as OpenTelemetry's GenAI conventions name it
  std::string trace_id;   // hex; empty: it is part of no trace
  std::string tenant;     // empty: no keys are asked for
  absl::Status status;
  bool client_gone = false;
  v1::FinishReason finish_reason = v1::FINISH_REASON_UNSPECIFIED;
  v1::GenerateDone done;  // as the client saw it, or would have
  int failures = 0;
  absl::Status last_failure;  // may name addresses: for logs, not for clients
};

// An attempt at a request that came to nothing and is made again.
struct AttemptLoss {
  std::string_view cause;   // "prefill_lost", "decode_lost"
  std::string_view stage;   // where it was: a field of v1::RequestCounts
  std::string internal_id;  // hex
  std::string_view prefill_worker;  // empty: the decode worker computes
  std::string_view decode_worker;
  absl::Status status;  // may name addresses: for logs
};

// What befalls workers and pairs of them rather than one request.
struct ClusterEvent {
  enum class Kind {
    kRegistered,
    kLost,           // its lease ended
    kRefused,        // its registration
    kWorkerAvoided,  // its calls fail: nothing new for `length`
    kPairAvoided,    // likewise, a way between two workers
  };
  Kind kind;
  std::string worker;  // of a pair: the one that prefills
  std::string decode_worker = {};
  v1::WorkerRole role = v1::WORKER_ROLE_UNSPECIFIED;
  std::string way = {};         // empty: the whole pair
  std::string_view cause = {};  // of a loss: "reset", "silence", "restarted",
                                // "left", "refused"
  std::string why = {};         // may name addresses: for logs
  absl::Duration length = absl::ZeroDuration();
};

// Where the router itself spends a request's time.
enum class Stage {
  kTemplate,  // of chats
  kTokenise,  // with validation
  kPlace,     // choosing workers, once
  kReserve,   // from the choice to the decode worker's attempt
  kRelay,     // one message of tokens, from worker to client
};

class RouterObserver {
 public:
  virtual ~RouterObserver() = default;
  virtual void OnPlaced(bool split) {}
  virtual void OnStage(Stage stage, absl::Duration took) {}
  // The first message of tokens, of which drafts and beams bring several.
  virtual void OnFirstToken(int tokens, absl::Duration since_admission) {}
  // `tokens` came `gap` after the one before them.
  virtual void OnTokens(int tokens, absl::Duration gap) {}
  virtual void OnRetry(const AttemptLoss& loss) {}
  virtual void OnClusterEvent(const ClusterEvent& event) {}
  // Two workers crashed while they computed it; `internal_id` in hex.
  virtual void OnSuspect(std::string_view internal_id, const std::string& first,
                         const std::string& second) {}
  virtual void OnEnded(const RequestSummary& summary) {}
  // "loaded", "unloaded" or, with a status, "not loaded", "not unloaded":
  // on all workers, or on one that came later. "unloaded from ID": by a worker
  // that had what the others have not.
  virtual void OnAdapter(const std::string& name, std::string_view what,
                         const absl::Status& status) {}

  // From any thread. `limit`: tokens_per_minute, requests_per_minute,
  // max_parallel_requests.
  virtual void OnTenantRefused(const std::string& tenant,
                               std::string_view limit) {}
  // What a request of it has paid for.
  virtual void OnTenantTokens(const std::string& tenant, int64_t prompt,
                              int64_t generated) {}
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TELEMETRY_OBSERVER_H_
