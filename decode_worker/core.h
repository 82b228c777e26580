// SPDX-License-Identifier: Apache-2.0
// The decode worker's decisions: admit a call, open its attempts, issue
// tickets, pin and reserve at the grant, land, commit, decode, prefill by
// itself where asked (the short way), and end everything with its call.
// DESIGN.md section 4, steps 1, 3 and 5, and "Failure".
//
// One call is one sequence. It is always in one of these phases:
//
//   idle       no attempt is live; the router is expected to ask for one
//   remote     an attempt's ticket is out; `landing` holds its grant
//   local      waits for blocks to be prefilled here
//   running    in the engine
//   finishing  the last message is sent
//
// core.cc: calls and commands. attempts.cc: the handoff's delegate, grants and
// the engine's events.

#ifndef TANDEM_DECODE_WORKER_CORE_H_
#define TANDEM_DECODE_WORKER_CORE_H_

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
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
#include "handoff/receiver.h"
#include "tandem/v1/decode.pb.h"
#include "tandem/v1/registry.pb.h"
#include "worker/adapters.h"
#include "worker/call_clock.h"
#include "worker/grammars.h"

namespace tandem::decode_worker {

using DecodeStream = Stream<v1::DecodeResponse, v1::DecodeRequest>;

struct DecodeOptions {
  std::string incarnation;  // 16 bytes
  engine::EngineOptions engine;
  engine::KvOffload* offload = nullptr;  // behind the pool; outlives the core
  handoff::ReceiverOptions receiver;
  // Null: none; outlives the core.
  worker::AdapterTable* adapters = nullptr;
  worker::Grammars* grammars = nullptr;  // likewise
  int max_calls = 256;                   // sequences admitted at once
  int attention_layers = 0;  // whose weights may be asked for: all, or none
  // False: all sequences compute without a cache, as with no_kv_cache.
  bool kv_cache = true;
  // Admission: blocks in use and the expected need of all tickets stay under
  // this share of the pool.
  double admission_factor = 0.95;
  int expected_new_tokens = 128;     // of one sequence, for that need
  int local_recompute_tokens = 256;  // a preempted one this short stays here
  int max_preemptions = 16;          // of one sequence
  size_t max_unsent = 64;            // messages, before a sequence pauses
  absl::Duration stall_limit = absl::Seconds(30);  // of a paused one
  absl::Duration lease = absl::Seconds(4);         // of a silent router
};

// Counted since start; read on the loop.
struct DecodeCounters {
  int64_t calls = 0;
  int64_t refused = 0;
  int64_t finished = 0;
  int64_t attempts_remote = 0;
  int64_t attempts_local = 0;
  int64_t attempts_dead = 0;
  int64_t commits = 0;
  int64_t grants_revoked = 0;
  int64_t cached_positions = 0;   // found in the prefix cache
  int64_t history_positions = 0;  // asked of it
};

class DecodeCore final : private engine::EngineListener,
                         private handoff::ReceiverDelegate {
 public:
  DecodeCore(const DecodeOptions& options, Loop* loop, Random* random,
             engine::Executor* executor, engine::KvPool* pool);
  ~DecodeCore() override;

  // A router's call; its first message opens it.
  void AddCall(std::unique_ptr<DecodeStream> stream);
  // A prefill worker's link; of which, `peer` knows.
  void AddLink(std::unique_ptr<handoff::ReceiverStream> stream,
               rpc::PeerIdentity peer = {});

  // A way beside "grpc". REQUIRES: nothing was linked yet.
  void AddWay(std::unique_ptr<handoff::ReceiverWay> way) {
    receiver_.AddWay(std::move(way));
  }

  // Takes no new call from here on. idle() tells when all are done.
  void Drain() { draining_ = true; }
  bool idle() const { return calls_.empty(); }

  // For liveness: a count of what was done since the start (layers, steps,
  // copies, grants), and whether something could be done now. A call that
  // waits for others is no work: for a handoff's other end, a reader, a
  // grammar, the router, or blocks that those hold.
  int64_t progress() const { return progress_ + engine_.progress(); }
  bool has_work() const;
  // The grace is over: ends every call, so that routers move its sequence.
  void CloseAll(const absl::Status& status);

  v1::WorkerLoad Load() const;
  const DecodeCounters& counters() const { return counters_; }
  const engine::EngineStats& engine_stats() const { return engine_.stats(); }
  const handoff::Receiver& receiver() const { return receiver_; }
  // Every call's phase against what engine, receiver and pool hold for it:
  // INTERNAL with the first contradiction. For tests.
  absl::Status CheckInvariants() const;
  // Not OK: the process must end (handoff::ReceiverDelegate::OnFatal).
  const absl::Status& fatal() const { return fatal_; }

 private:
  using CallId = engine::SequenceId;
  enum class Phase { kNew, kIdle, kRemote, kLocal, kRunning, kFinishing };

  // What a remote attempt holds between its offer and its end.
  struct Landing {
    engine::CachedPrefix matched;  // pinned
    std::optional<engine::Reservation> reserved;
    std::vector<int32_t> block_table;  // matched, then reserved
    handoff::Grant grant;
    bool offered = false;
    bool granted = false;
    bool windowed_apart = false;  // the sender may leave them out
    std::string formats;          // of a mixed pair, else empty
  };

  struct Call;
  struct HeldBlocks;

  void OnMessage(Call* call, const v1::DecodeRequest& message);
  absl::Status Open(Call* call, const v1::DecodeOpen& open);
  void CompileThenOpen(Call* call, const v1::DecodeOpen& open);
  // Whether it makes sense, and whether there is room.
  // Ends the call, if it may not be opened.
  void Refuse(CallId id, const absl::Status& status);
  absl::Status CheckOpen(const v1::DecodeOpen& open) const;
  absl::Status CheckWithoutCache(const v1::DecodeOpen& open) const;
  absl::Status Admit(const v1::DecodeOpen& open) const;
  engine::SequenceSpec SpecOf(const Call& call,
                              const std::string& formats) const;
  void Retry(Call* call, const v1::DecodeRetry& retry);
  void StartAttempt(Call* call, const v1::WorkerRef* prefill_worker);
  void EndAttempt(Call* call, const absl::Status& why);
  void ReportDead(Call* call, const absl::Status& why, bool preempted,
                  const std::string& failed_way);
  // Ends a call in any phase, closing its stream with `status`. Idempotent
  // through calls_; the one way out.
  void Retire(CallId id, const absl::Status& status);
  void Say(Call* call, v1::DecodeResponse response);
  void Tick(bool judge);

  // Blocks became free: grants the oldest waiting offers and local prefills.
  void UseFreeBlocks();
  engine::CachedPrefix FindForHandoff(
      const Call& call, absl::Span<const engine::BlockHash> hashes);
  bool TryGrant(Call* call);
  bool TryLocal(Call* call);
  void ScheduleUseFreeBlocks();
  int BlocksFor(int positions) const;
  // That a sequence holds at most, and, of a call's history, that it needs to
  // be decoded: from the first one on that is not behind the window.
  int BlocksAtOnce(int positions, bool kv_cache) const;
  int FirstBlock(const Call& call) const;
  // Likewise, of which it needs all parts.
  int FirstWhole(const Call& call) const;
  // Of a call's history, the blocks behind so many that are there, and how many
  // of those, the first, need no windowed parts.
  struct Room {
    int blocks = 0;
    int lacking = 0;
  };
  Room RoomBehind(const Call& call, int there) const;
  int InWhole(const Room& room) const {
    return pool_->InWhole(room.blocks, room.lacking);
  }
  int BlocksAtGrant(const Call& call) const;
  int ExpectedBlocks(const Call& call) const;
  int ExpectedBlocks(int history, int width, bool kv_cache) const;
  engine::BlockHash Root(const Call& call, const std::string& formats) const;
  // Of the full blocks of the first `positions` of its history; none where the
  // prefix cache is bypassed.
  std::vector<engine::BlockHash> Hashes(const Call& call,
                                        const std::string& formats,
                                        int positions) const;
  std::vector<engine::BlockHash> LocalHashes(const Call& call) const;
  bool RoomIsExpected(const Call& waits, absl::Duration within) const;
  absl::Status CheckFirst(const Call& call,
                          const handoff::FirstToken& first) const;
  // Tokens of its history that a local attempt may find cached.
  static int CacheableTokens(const Call& call);
  void SayAttemptStarted(Call* call);
  void PauseIfUnread(Call* call);
  void SendTokens(Call* call, int position, v1::Token token);
  void SendHypothesis(Call* call, int index,
                      const engine::Hypothesis& hypothesis);
  // Its last message, and its end.
  void FinishCall(Call* call, v1::DecodeFinished finished);
  Call* FindAttempt(const handoff::Attempt& attempt);

  // engine::EngineListener
  void OnToken(CallId id, int position, const engine::SampledToken& token,
               std::optional<engine::Finish> finish) override;
  void OnScores(CallId id, int position,
                absl::Span<const engine::SampledToken> scores,
                std::optional<engine::Finish> finish) override;
  void OnBeams(CallId id, const engine::BeamResult& result) override;
  void OnComputed(CallId id, int begin, int end, int layers_done) override {}
  void OnWork(CallId id, const engine::Work& work) override;
  void OnPreempted(CallId id) override;
  bool OnBlocksShort(int blocks) override;
  void OnBlocksFreed() override { ScheduleUseFreeBlocks(); }
  void OnStepFailed(const std::vector<CallId>& ids,
                    const absl::Status& status) override;

  // handoff::ReceiverDelegate
  absl::StatusOr<Verdict> OnOffer(const handoff::Ticket& ticket,
                                  const v1::HandoffOffer& offer,
                                  const std::string& mixed,
                                  handoff::Grant* grant) override;
  void Scatter(const handoff::Attempt& attempt,
               const handoff::SliceRange& range, const handoff::Grant& grant,
               const std::byte* staging,
               absl::AnyInvocable<void()> done) override;
  void Digest(const handoff::Attempt& attempt, const handoff::Grant& grant,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override;
  absl::Status OnCommit(const handoff::Attempt& attempt,
                        const handoff::FirstToken& first) override;
  void OnFailed(const handoff::Attempt& attempt, const absl::Status& status,
                const std::string& failed_way) override;
  void OnFatal(const absl::Status& status) override;

  const DecodeOptions options_;
  Loop* const loop_;
  Random* const random_;
  engine::Executor* const executor_;
  engine::KvPool* const pool_;
  engine::PrefixCache cache_;
  engine::Engine engine_;
  handoff::Receiver receiver_;
  DecodeCounters counters_;
  int64_t progress_ = 0;  // without the engine's
  int copies_ = 0;        // scatters and digests that run
  absl::Status fatal_;
  bool draining_ = false;
  bool use_free_blocks_scheduled_ = false;
  CallId next_call_ = 1;
  uint32_t next_attempt_;  // no number twice in one incarnation
  // In order of admission: ids ascend.
  std::map<CallId, std::unique_ptr<Call>> calls_;
  absl::flat_hash_map<uint32_t, CallId> attempts_;  // live remote ones
  absl::flat_hash_map<std::string, CallId> by_request_;
  worker::CallClock clock_;
};

}  // namespace tandem::decode_worker

#endif  // TANDEM_DECODE_WORKER_CORE_H_
