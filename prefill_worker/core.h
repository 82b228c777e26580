// SPDX-License-Identifier: Apache-2.0
// The prefill worker's decisions: queue prompts, offer the one at the head to
// its decode worker, run it in chunks, pass every layer group of every chunk
// to the handoff while the next one computes, return the first token at once,
// and stay with the attempt until its commit is acknowledged. DESIGN.md
// section 4, steps 3 to 5.
//
// One call is one attempt. Its phases:
//
//   queued     waits for its turn
//   offered    at the head; the decode worker is asked
//   computing  in the engine
//   sending    first token out; KV and commit on their way
//
// A prompt that is scored sends its scores with every chunk. Where nothing else
// is wanted of it no decode worker takes part: it is `offered` to nobody, and
// ends with the last score.
//
// A call holds its blocks (through the engine's sequence) until it ends; then
// they are ordinary prefix cache.

#ifndef TANDEM_PREFILL_WORKER_CORE_H_
#define TANDEM_PREFILL_WORKER_CORE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "common/random.h"
#include "common/stream.h"
#include "engine/engine.h"
#include "engine/executor.h"
#include "engine/kv/kv_offload.h"
#include "engine/kv/kv_pool.h"
#include "engine/kv/prefix_cache.h"
#include "handoff/sender.h"
#include "tandem/v1/prefill.pb.h"
#include "tandem/v1/registry.pb.h"
#include "worker/adapters.h"
#include "worker/call_clock.h"
#include "worker/grammars.h"

namespace tandem::prefill_worker {

using PrefillStream = Stream<v1::PrefillResponse, v1::PrefillRequest>;

struct PrefillOptions {
  std::string incarnation;  // 16 bytes
  engine::EngineOptions engine;
  int attention_layers = 0;  // whose weights may be asked for: all, or none
  engine::KvOffload* offload = nullptr;  // behind the pool; outlives the core
  handoff::SenderOptions sender;
  // Null: none; outlives the core.
  worker::AdapterTable* adapters = nullptr;
  worker::Grammars* grammars = nullptr;  // likewise
  int max_queue = 256;                   // calls that wait for their turn
  int64_t max_queued_tokens = 1 << 20;   // of theirs, uncached, together
  // Asked for, or told to wait, at once, for each decode worker: a full one
  // keeps nobody from another.
  int max_offered = 16;
  // What is computed and not yet handed over fills at most this share of the
  // pool per decode worker.
  double waiting_share = 0.5;
  size_t max_unsent = 64;  // messages, before a prompt's scores pause
  absl::Duration stall_limit = absl::Seconds(30);  // of a paused one
  absl::Duration lease = absl::Seconds(4);         // of a silent router
  // Hears of every handoff that was committed, on the loop; may be null.
  std::function<void(const handoff::HandoffTimings&)> on_handoff;
};

struct PrefillCounters {
  int64_t calls = 0;
  int64_t refused = 0;
  int64_t finished = 0;
  int64_t failed = 0;
  int64_t cached_positions = 0;
  int64_t history_positions = 0;
};

class PrefillCore final : private engine::EngineListener,
                          private handoff::SenderDelegate {
 public:
  PrefillCore(const PrefillOptions& options, Loop* loop, Random* random,
              engine::Executor* executor, engine::KvPool* pool,
              handoff::Sender::Dial dial);
  ~PrefillCore() override;

  void AddCall(std::unique_ptr<PrefillStream> stream);

  // A way beside "grpc". REQUIRES: nothing was linked yet.
  void AddWay(std::unique_ptr<handoff::SenderWay> way) {
    sender_.AddWay(std::move(way));
  }

  // Takes no new call from here on; queued ones are still served.
  void Drain() { draining_ = true; }
  bool idle() const { return calls_.empty(); }

  // For liveness: a count of what was done since the start (layers, steps,
  // gathers, offers), and whether something could be done now. A call that
  // waits for others is no work: for a decode worker, a reader, a grammar, or
  // blocks that those hold.
  int64_t progress() const { return progress_ + engine_.progress(); }
  bool has_work() const;

  void CloseAll(const absl::Status& status);

  v1::WorkerLoad Load() const;
  const PrefillCounters& counters() const { return counters_; }
  const engine::EngineStats& engine_stats() const { return engine_.stats(); }
  const handoff::Sender& sender() const { return sender_; }
  // Every call's phase and promises against what engine and sender hold for
  // it: INTERNAL with the first contradiction. For tests.
  absl::Status CheckInvariants() const;

 private:
  using CallId = engine::SequenceId;
  enum class Phase { kNew, kQueued, kOffered, kComputing, kSending };
  struct Call;

  void OnMessage(Call* call, v1::PrefillRequest message);
  // Ends the call, if it may not be opened.
  void Refuse(CallId id, const absl::Status& status);
  // Opens it when its grammar is there.
  void CompileThenOpen(Call* call, v1::PrefillOpen open);
  absl::Status Open(Call* call, v1::PrefillOpen open);
  absl::Status CheckOpen(const v1::PrefillOpen& open) const;
  // Offers from the queue's head, and starts what may compute.
  void Advance();
  void ScheduleAdvance();
  void Offer(Call* call);
  bool TryCompute(Call* call);
  // Fails who waits for a grant where that keeps a granted one from its own.
  void BreakCircles();
  // The youngest of a decode worker's (null: of all) that wait here for their
  // grants, if all that is begun for it does, and has done so for a while; else
  // null.
  const Call* YoungestInTheWay(const std::string* decode_worker_id) const;
  // Of the blocks that its prompt may find in the cache.
  engine::BlockHash Root(const v1::PrefillOpen& open) const;
  std::vector<engine::BlockHash> CacheableHashes(const Call& call) const;
  // By decode worker: calls that it was asked for, and blocks of what computes
  // or waits for its handoff.
  std::map<std::string, int> Offered() const;
  std::map<std::string, int> BlocksHeld() const;
  void Retire(CallId id, const absl::Status& status);
  void Say(Call* call, v1::PrefillResponse response);
  void SendDone(Call* call, const handoff::HandoffTimings& timings);
  void Tick(bool judge);
  int BlocksFor(int positions) const;
  // That the call's history takes at most while it is computed and handed over:
  // all until its grant says what is kept of it.
  int BlocksAtOnce(const Call& call) const;
  // At the measured rate, alone; 0 before there is one.
  absl::Duration WorkOf(int positions) const;
  // Behind what the engine has to compute already.
  absl::Duration ExpectedPrefill(int positions) const;
  Call* FindAttempt(const handoff::Attempt& attempt);
  static handoff::Attempt AttemptOf(const Call& call);

  // engine::EngineListener
  void OnToken(CallId id, int position, const engine::SampledToken& token,
               std::optional<engine::Finish> finish) override;
  void OnScores(CallId id, int position,
                absl::Span<const engine::SampledToken> scores,
                std::optional<engine::Finish> finish) override;
  void OnComputed(CallId id, int begin, int end, int layers_done) override;
  void OnWork(CallId id, const engine::Work& work) override;
  void OnPreempted(CallId id) override;
  bool OnBlocksShort(int blocks) override { return false; }
  void OnBlocksFreed() override { ScheduleAdvance(); }
  void OnStepFailed(const std::vector<CallId>& ids,
                    const absl::Status& status) override;

  // handoff::SenderDelegate
  void OnAnswer(const handoff::Attempt& attempt, Answer answer,
                const handoff::Grant& grant) override;
  void Gather(const handoff::Attempt& attempt, const handoff::SliceRange& range,
              const handoff::Grant& grant, std::byte* staging,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override;
  void OnAcknowledged(const handoff::Attempt& attempt,
                      const handoff::HandoffTimings& timings) override;
  void OnFailed(const handoff::Attempt& attempt, const absl::Status& status,
                const std::string& failed_way) override;

  const PrefillOptions options_;
  Loop* const loop_;
  engine::Executor* const executor_;
  engine::KvPool* const pool_;
  engine::PrefixCache cache_;
  engine::Engine engine_;
  handoff::Sender sender_;
  PrefillCounters counters_;
  int64_t progress_ = 0;  // without the engine's
  int gathers_ = 0;       // that run
  bool draining_ = false;
  bool advance_scheduled_ = false;
  CallId next_call_ = 1;
  int promised_blocks_ = 0;    // of computing calls, not yet allocated
  int64_t queued_tokens_ = 0;  // uncached ones of queued calls
  std::map<CallId, std::unique_ptr<Call>> calls_;  // in order of arrival
  // Live attempts: (request, sequence, number) of one decode worker is unique,
  // and so is the decode worker's incarnation within the request.
  absl::flat_hash_map<handoff::Attempt, CallId> attempts_;
  worker::CallClock clock_;
};

}  // namespace tandem::prefill_worker

#endif  // TANDEM_PREFILL_WORKER_CORE_H_
