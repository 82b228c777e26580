// SPDX-License-Identifier: Apache-2.0
// One request from its admission to its last message (DESIGN.md section 4).
//
//   queued        waits for room on a worker
//   opening       a Decode call is open, its first attempt not yet
//   prefilling    an attempt is open (on a prefill worker, or local)
//   handing over  the first token is with the client, its KV on the way
//   decoding      the attempt committed
//   retrying      an attempt was lost; the decode worker opens the next one
//   ending        all is said but the prefill worker's timings
//
// The prompt and every token received are kept: they are the inputs of every
// later attempt. Each position is forwarded once and in order, whoever says
// it. Losing the prefill worker asks the decode worker for a new attempt;
// losing the decode worker asks the core for a new pair; losing the client (or
// a stop string, the deadline, an abort) ends both calls at once.
//
// request.cc: the two calls. recovery.cc: losses, verdicts, ends. scoring.cc:
// log probabilities of the prompt.

#ifndef TANDEM_ROUTER_CORE_REQUEST_H_
#define TANDEM_ROUTER_CORE_REQUEST_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "common/trace_context.h"
#include "router/core/binding.h"
#include "router/core/dialer.h"
#include "router/core/options.h"
#include "router/core/output.h"
#include "router/core/registry.h"
#include "router/placement/short_way.h"
#include "router/telemetry/observer.h"
#include "router/telemetry/request_trace.h"
#include "router/tenants/tenants.h"
#include "router/validate/validate.h"
#include "tandem/v1/admin.pb.h"

namespace tandem::router {

// A request that passed validation and was tokenised.
struct AdmittedRequest {
  EffectiveRequest effective;  // FitToContext done
  std::vector<int32_t> prompt;
  absl::Duration deadline;  // from `since`; zero: the default
  // What is told of it, where part of the time was over before this sequence of
  // the request began.
  std::optional<absl::Duration> whole_deadline;
  uint32_t sequence_index = 0;       // of a request for several; see sampling.n
  std::shared_ptr<Binding> binding;  // of those; null: it is alone
  Api api = Api::kGrpc;
  // Its id is that of a header, which several requests may share.
  bool id_from_header = false;
  // When it came, on the loop's clock, where it waited before it came to the
  // core; and what became of it meanwhile: the core then ends it at once.
  std::optional<absl::Time> since;
  enum class Ended { kNo, kAborted, kClientGone } ended = Ended::kNo;
  TraceContext trace;
  std::string tenant;                       // empty: no keys are asked for
  std::shared_ptr<Tenants::Charge> charge;  // null without a tenant
};

// Who is to serve a request.
struct Choice {
  v1::WorkerRef decode;  // empty: none, nothing but scores is wanted
  std::optional<v1::WorkerRef> prefill;     // none: the decode worker
  v1::AdapterRef adapter;                   // as both have it; no name: none
  absl::Time begun = absl::InfinitePast();  // to choose
};

class Request;

// What a request needs of the core.
class RequestHost {
 public:
  virtual ~RequestHost() = default;
  // It waits for a new pair from here on.
  virtual void OnWaits(Request* request) = 0;
  // Another prefill worker for an admitted sequence; none: prefill there.
  // `full`: some are alive, but none has room.
  virtual std::optional<v1::WorkerRef> ChoosePrefill(Request* request,
                                                     bool* full) = 0;
  // Whether its retry is within what all requests' retries may come to, of
  // which it then is one.
  virtual bool TakeRetry(const Request& request) = 0;
  // Its client has the first token.
  virtual void OnFirstToken() = 0;
  // Two workers crashed while they computed it.
  virtual void OnSuspect(const Request& request, const v1::WorkerRef& first,
                         const v1::WorkerRef& second) = 0;
  // What the adapter of that name must be; empty: whatever a worker has.
  virtual std::string DigestInService(const std::string& adapter) const = 0;
  // It has ended and holds nothing; to be destroyed after the callback.
  virtual void OnEnded(Request* request) = 0;
};

struct RequestContext {
  const RouterOptions* options;
  Loop* loop;
  Dialer* dialer;
  Registry* registry;
  TextCodec* codec;
  RouterObserver* observer;
  v1::RouterCounters* counters;
  RequestHost* host;
  SpanSink* spans = nullptr;  // null: no request is traced
};

class Request final : private StreamHandler<v1::GenerateRequest> {
 public:
  enum class Phase {
    kQueued,
    kOpening,
    kPrefilling,
    kHandingOver,
    kDecoding,
    kRetrying,
    kEnding,
    kEnded
  };

  Request(const RequestContext& context, AdmittedRequest admitted,
          std::string internal_id, std::unique_ptr<ClientStream> client);
  ~Request() override;

  // Nothing is left to be computed: it was lost before it could be said. Then
  // it ends.
  bool ComputedToTheEnd();
  // From kQueued: opens the Decode call.
  void Begin(const Choice& choice, int cached_tokens);
  // Finish reason CANCELLED, with all output so far.
  void Abort();
  // Its client has gone already.
  void Leave() { OnClosed(absl::CancelledError("the client went away")); }
  void Fail(const absl::Status& status);
  // An incarnation has ended, its calls with it.
  void OnVoided(const v1::WorkerRef& worker);
  // A process that registers did not crash.
  void Acquit(const std::string& incarnation);
  // Every beat: says that this router is there, and judges silence
  // unless this router was silent itself.
  void Tick(bool judge);

  Phase phase() const { return phase_; }
  const EffectiveRequest& effective() const { return effective_; }
  const std::vector<int32_t>& prompt() const { return prompt_; }
  const std::vector<int32_t>& output() const { return output_tokens_; }
  bool scores_complete() const {
    return next_score_ >= static_cast<int>(prompt_.size());
  }
  int history_tokens() const {
    return static_cast<int>(prompt_.size() + output_tokens_.size());
  }
  // That its sequence may come to.
  int positions() const {
    return static_cast<int>(prompt_.size()) + effective_.stopping.max_tokens();
  }
  const std::string& client_id() const { return effective_.request_id; }
  const std::string& tenant() const { return tenant_; }
  const std::string& internal_id() const { return internal_id_; }
  // Waits for its first token no more.
  bool answered() const { return first_token_.has_value(); }
  v1::FinishReason finish_reason() const { return finish_reason_; }
  bool suspect() const { return crashed_in_.has_value(); }
  // The last attempt that is allowed needs no handoff: what failed so often
  // is left out, whatever placement was asked for.
  bool last_attempt() const {
    return std::max(attempts_failed_, handoffs_failed_) + 1 >=
           context_.options->max_attempts;
  }
  absl::Time admitted() const { return admitted_; }
  absl::Time waiting_since() const { return waiting_since_; }
  // Since its last new token.
  int attempts_failed() const { return attempts_failed_; }
  bool was_computed() const { return was_computed_; }
  const std::string& decode_worker_id() const {
    return decode_ref_.worker_id();
  }
  const std::string& prefill_worker_id() const {
    return prefill_ref_.worker_id();
  }
  // Once a pair gave tokens or scores, or another sequence of its answer is
  // placed, decode workers must give the same results.
  bool MayContinueOn(const v1::WorkerHello& decode) const;
  // Whether some pair that worked on it differed in numerics.
  bool mixed() const { return mixed_; }
  // MayContinueOn of who computes the prompt, while some of its scores were
  // passed on and others are missing.
  bool MayScoreOn(const v1::WorkerHello& worker) const;
  // The adapter that it asks for as the worker has it; no name: none asked
  // for, or the worker has none of that name.
  v1::AdapterRef AdapterOn(const v1::WorkerHello& worker) const;
  // Once tokens came of one, it must have the same content everywhere.
  bool HasAdapter(const v1::WorkerHello& worker) const;
  void Describe(v1::RequestStatus* status) const;

 private:
  struct DecodeLeg;
  struct PrefillLeg;

  // StreamHandler: the client.
  void OnMessage(v1::GenerateRequest message) override {}
  void OnDrained() override;
  void OnClosed(absl::Status status) override;

  void OnDecode(const v1::DecodeResponse& message);
  void OnDecodeClosed(const absl::Status& status);
  void CountPlacement();
  void OnOpened(const v1::AttemptOpened& opened);
  void OnAttemptStarted(uint32_t attempt);
  void OnDead(const v1::AttemptDead& dead);
  void OnDecodeFinished(const v1::DecodeFinished& finished);
  // What its calls to workers carry.
  const TraceContext& CallTrace() const;
  // An attempt came to nothing.
  void NoteLoss(std::string_view cause, const absl::Status& status);
  // Whether this pair makes the answer depend on where it was computed.
  void NotePair();
  void OpenPrefill(const std::string& ticket);
  void OnPrefill(const v1::PrefillResponse& message);
  void OnPrefillClosed(const absl::Status& status);
  void OnFirstToken(const v1::PrefillFirstToken& first);
  // beams.cc: a beam search, of which nothing is heard before its end.
  void OnHypothesis(const v1::DecodedHypothesis& part);
  void FinishBeams();

  // delivery.cc: forwards what is new of `tokens`, which the decode worker says
  // or else the prefill worker. False: the request has ended, or the worker
  // contradicted what was forwarded.
  bool Take(const v1::DecodedTokens& tokens, bool decoded);
  // What `fresh` new tokens mean to all but the client.
  void NoteFresh(int fresh, bool decoded, absl::Time now);
  void SayStarted();
  // Where the client reads too slowly.
  void Pause();
  void SetReading();

  // scoring.cc
  v1::ScoringParams ScoresLeft() const;
  void BeginScoring();
  void OnScores(const v1::ScoredTokens& scores);
  void BindScores();
  void ComputingLost(const absl::Status& status);
  void ScoresLost(const absl::Status& status);
  void FinishScoring();

  // recovery.cc
  // `call_failed`: its own call said so, not only the decode worker.
  void PrefillLost(const absl::Status& status, bool call_failed = true);
  void DecodeLost(const absl::Status& status);
  // Asks for the next attempt; counts the failure unless it is free.
  void RetryPrefill(bool counts, const absl::Status& why);
  void BeginRetry();
  void SendRetry();
  void Requeue();
  // Judges whether a worker that computed this crashed, then goes on.
  void Judge(const v1::WorkerRef& worker, Loop::Task go_on);
  void SecondLoss(const v1::WorkerRef& worker, Loop::Task go_on);
  // Calls and leases break by a crash, and by resets of the network's: only who
  // is replaced, or does not come back as it was until `end`, has crashed.
  void AwaitProofOfLife(const v1::WorkerRef& worker, absl::Time end,
                        Loop::Task go_on);
  // Whether the one before did too, which else is forgotten for this one.
  bool BothCrashed(const v1::WorkerRef& second);
  void NoteCrash(const v1::WorkerRef& worker);
  bool Crashed(const v1::WorkerRef& worker) const;
  // True if another attempt is allowed, else the request has failed.
  bool CountFailure(const absl::Status& why);
  void Finish(v1::FinishReason reason);
  // Nothing more is wanted of the workers but their timings.
  void BeginEnding();
  void EndCalls();
  void WriteDone();
  v1::GenerateDone Summary() const;
  int ReasoningTokens() const;
  void End(const absl::Status& status);
  void DropPrefill();
  void DropLegs();
  absl::Duration Remaining() const;
  void ArmDeadline();

  const RequestContext context_;
  EffectiveRequest effective_;
  const std::vector<int32_t> prompt_;
  const uint32_t sequence_index_;
  const std::shared_ptr<Binding> binding_;
  bool entered_ = false;  // the binding, with its decode worker
  const Api api_;
  const std::string tenant_;
  const std::shared_ptr<Tenants::Charge> charge_;
  const std::string internal_id_;
  const TraceContext caller_;            // the trace that it is part of
  std::unique_ptr<RequestTrace> trace_;  // null: not sampled
  std::unique_ptr<ClientStream> client_;
  Output output_;
  // Of a beam search, hypotheses 1 .. n-1.
  std::vector<std::unique_ptr<Output>> other_outputs_;
  Phase phase_ = Phase::kQueued;
  Phase lost_in_ = Phase::kRetrying;  // the phase before kRetrying
  // The first retry since a prefill worker last took it, or it last started.
  std::optional<absl::Time> retrying_since_;

  // The two calls.
  v1::WorkerRef decode_ref_;
  v1::WorkerRef prefill_ref_;  // of the attempt; empty: local
  // Of the attempt that a retry asked for, until it opens.
  std::optional<v1::WorkerRef> next_prefill_;
  v1::AdapterRef adapter_;  // that the calls name
  bool mixed_ = false;      // some pair of it differed in numerics
  std::unique_ptr<DecodeLeg> decode_;
  std::unique_ptr<PrefillLeg> prefill_;
  uint32_t attempt_ = 0;  // the newest one opened
  bool opened_ = false;   // the Decode call has opened an attempt
  bool local_ = false;    // the decode worker prefills
  bool decode_computes_ = false;
  bool decode_computed_ = false;  // in this call, an attempt before included
  bool prefill_computes_ = false;
  bool paused_ = false;
  absl::Time paused_since_;   // or since the client took something
  size_t paused_unsent_ = 0;  // when last looked at

  int next_score_;  // position; the prompt's length where all are passed on
  // The decode worker is not read before all are.
  bool waits_for_scores_ = false;
  std::vector<int32_t> output_tokens_;  // empty of a beam search
  // Of a beam search, as this attempt's worker sends them.
  std::vector<v1::DecodedHypothesis> hypotheses_;
  std::optional<v1::WorkerHello> scored_by_;  // see MayScoreOn; in part

  // Recovery.
  int attempts_failed_ = 0;  // since the last new token
  // Since a decode worker started: each may have brought a first token.
  int handoffs_failed_ = 0;
  int failures_ = 0;
  bool attempt_counted_ = false;  // among them, and no other has been opened
  int preemptions_ = 0;
  // Whose call broke while it computed the request, since a new token of such
  // a worker: a decode worker, or else a prefill worker.
  std::optional<v1::WorkerRef> crashed_in_;
  bool crashed_decoding_ = false;
  bool was_computed_ = false;
  absl::Status last_failure_;

  // Times, on the loop's clock.
  const absl::Time admitted_;
  const absl::Time deadline_;
  const absl::Duration told_deadline_;  // in words: of the whole request
  absl::Time waiting_since_;  // for room on a decode worker, refusals included
  bool waiting_ = true;
  absl::Time asked_since_;            // the decode worker, to open an attempt
  std::optional<Queued> queued_;      // until its next token
  std::optional<absl::Time> placed_;  // on who took it, or may yet
  std::optional<absl::Time> first_token_;
  absl::Time last_token_;
  std::optional<int> cached_tokens_;
  absl::Duration worker_queue_;
  v1::PrefillDone prefill_done_;
  v1::DecodeFinished decode_finished_;
  // Guesses that lost calls told of, and the one that goes on or has ended.
  struct Drafts {
    int verified = 0;
    int accepted = 0;
    Drafts& operator+=(Drafts more) {
      verified += more.verified;
      accepted += more.accepted;
      return *this;
    }
  };
  Drafts drafts_;
  Drafts live_drafts_;
  v1::Work work_;  // all that workers told of
  // What calls that go on told of so far, where that is asked for.
  v1::Work prefill_work_;
  v1::Work decode_work_;
  bool work_known_ = false;  // the decode worker's call came to its end
  bool work_lost_ = false;   // some may have been done and was not told of
  v1::FinishReason finish_reason_ = v1::FINISH_REASON_UNSPECIFIED;

  Timer deadline_timer_;
  Timer judge_timer_;
  Timer retry_timer_;
  Timer ending_timer_;
};

std::string_view PhaseName(Request::Phase phase);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_CORE_REQUEST_H_
