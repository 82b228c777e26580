// SPDX-License-Identifier: Apache-2.0
// The sender's state. sender.cc moves attempts along, sender_links.cc links
// and slabs.
//
//   attempt:  linking -> offered -> granted -> committed -> gone
//   slice:    computed -> cut -> announced -> credited (an Op) -> sent
//
// Gone attempts leave nothing but Ops whose gather still runs: those end in a
// CreditReturn. Broken links leave nothing but a ghost that holds the way's
// memory until its last gather ended.

#ifndef TANDEM_HANDOFF_SENDER_IMPL_H_
#define TANDEM_HANDOFF_SENDER_IMPL_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "handoff/alive.h"
#include "handoff/link.h"
#include "handoff/sender.h"
#include "handoff/slabs.h"
#include "handoff/slices.h"

namespace tandem::handoff {

using SenderLinkBase = LinkBase<v1::LinkRequest, v1::LinkResponse>;

class Sender::Impl final : public SenderLinkBase::Owner {
 public:
  Impl(const SenderOptions& options, Loop* loop, Random* random, Dial dial,
       SenderDelegate* delegate);
  ~Impl() override;

  void AddWay(std::unique_ptr<SenderWay> way);
  void Offer(const Attempt& attempt, const v1::WorkerRef& receiver,
             const std::string& ticket, int positions, int cached_positions,
             absl::Duration expected_prefill,
             const std::vector<std::string>& avoid_ways,
             const v1::AdapterRef& adapter);
  void Computed(const Attempt& attempt, const SliceRange& range);
  void Commit(const Attempt& attempt, const FirstToken& first);
  void Cancel(const Attempt& attempt);

  SlabCounts slabs() const { return arena_.counts(); }
  int attempts() const { return static_cast<int>(by_attempt_.size()); }
  int links() const;
  const HandoffCounters& counters() const { return counters_; }
  absl::Status CheckInvariants() const;
  int waiting_positions(const std::string& worker_id) const;

  void OnLinkMessage(SenderLinkBase* link, v1::LinkResponse message) override;
  void OnLinkHandled(SenderLinkBase* link) override;
  void OnLinkDrained(SenderLinkBase* link) override;
  void OnLinkTick(SenderLinkBase* link) override;
  void OnLinkBroken(SenderLinkBase* link, absl::Status status) override;

 private:
  using Serial = uint64_t;  // of an attempt, an op or a link; never reused

  // What a channel knows of its link.
  struct Host final : ChannelHost {
    Impl* impl = nullptr;
    Serial link_serial = 0;
    std::string way;
    void Say(v1::NcclControl message) override;
    void OnBroken(const absl::Status& status) override;
    void OnQuiet() override {}
  };

  struct Usable {
    std::string name;
    std::unique_ptr<Host> host;
    std::unique_ptr<SenderChannel> channel;
  };

  struct Link final : SenderLinkBase {
    using SenderLinkBase::SenderLinkBase;
    std::string key;  // worker id and incarnation
    std::string worker_id;
    Serial serial = 0;
    bool welcomed = false;
    bool ready = false;
    int ways_pending = 0;
    std::vector<Usable> ways;         // best first
    std::unique_ptr<Timer> deadline;  // of dial, hello and ways
    int64_t slab_bytes = 0;
    int num_slabs = 0;
    SlabArena::Pair pair = 0;
    std::set<Serial> attempts;
    std::deque<Serial> turns;               // attempts with slices to announce
    int announced = 0;                      // and not credited
    absl::flat_hash_set<uint64_t> credits;  // generations in use
    int ops = 0;
    int gathering = 0;  // of ops: those whose gather runs
    // Own slabs whose message the transport has not taken: the link's sent()
    // after it, and the slab.
    std::deque<std::pair<uint64_t, int>> sending;
    absl::Time last_progress;
    absl::Time last_used;
  };

  enum class Phase { kLinking, kOffered, kGranted, kCommitted };
  static std::string_view StageName(Phase phase);

  struct State {
    explicit State(Loop* loop) : repeat(loop), clock(loop) {}
    Attempt attempt;
    Serial serial = 0;
    Phase phase = Phase::kLinking;
    bool failing = false;  // its failure is posted
    Link* link = nullptr;
    SenderChannel* channel = nullptr;
    std::string way;  // in use, or the one that would be
    v1::HandoffOffer offer;
    std::vector<std::string> avoid_ways;
    std::optional<SenderDelegate::Answer> answer;
    Grant grant;
    std::vector<SliceRange> computed;  // before the grant
    std::deque<SliceRange> cut;        // to be announced
    absl::flat_hash_map<uint32_t, SliceRange> announced;
    uint32_t next_slice = 0;
    int credited = 0;
    int64_t waiting_rows = 0;  // computed, not sent
    int64_t sent_rows = 0;
    int64_t sent_bytes = 0;
    uint32_t sent_slices = 0;
    kernels::KvDigest digest;
    std::optional<FirstToken> first;
    Timer repeat;
    Timer clock;  // of the transfer, from the first announcement on
    absl::Time last_progress;
    absl::Time granted_at;
    absl::Time computed_at;
  };

  // One credit in use.
  struct Op {
    Serial serial = 0;
    Serial attempt_serial = 0;
    Attempt attempt;
    Grant grant;
    uint32_t slice = 0;
    SliceRange range;
    Link* link = nullptr;
    SenderChannel* channel = nullptr;
    uint32_t slab = 0;
    uint64_t generation = 0;
    int own = -1;  // own slab, once it has one
    bool gathering = false;
    size_t bytes = 0;
    const std::byte* staging = nullptr;
  };

  // ---- Attempts (sender.cc)
  State* Find(const Attempt& attempt);
  State* Find(Serial serial);
  // The live attempt that a message on `link` names; counts late ones.
  State* Named(Link* link, const v1::AttemptKey& key);
  bool ChooseWay(State* state);
  void StartOffer(State* state);
  void SendOffer(State* state);
  void OnAnswer(Link* link, const v1::HandoffAnswer& answer);
  void OnGranted(State* state, const v1::HandoffAnswer& answer);
  void OnCredit(Link* link, const v1::SliceCredit& credit);
  void OnAck(Link* link, const v1::HandoffAck& ack);
  void Enqueue(State* state, const SliceRange& range);
  int64_t SlotRows(const State& state) const;
  void MaybeCommit(State* state);
  void SendCommit(State* state);
  void Progress(State* state);
  void StartClock(State* state);
  void CheckClock(Serial serial);
  void Fail(State* state, const absl::Status& status,
            const std::string& failed_way);
  // An attempt's failure: counted, and told.
  void CountFailed(const State& state, const absl::Status& status);
  void Tell(const HandoffFault& fault) const {
    if (options_.on_fault) options_.on_fault(fault);
  }
  void FailLater(State* state, absl::Status status, std::string failed_way);
  // Takes the attempt out, with everything of it but running gathers.
  void Remove(State* state);
  void Withdraw(State* state, const absl::Status& why);

  // ---- Links and slabs (sender_links.cc)
  Link* LinkTo(const v1::WorkerRef& receiver);
  void OnWelcome(Link* link, const v1::LinkWelcome& welcome);
  void OnWay(Serial link_serial, size_t index,
             absl::StatusOr<std::unique_ptr<SenderChannel>> channel);
  void OnReady(Link* link);
  Link* FindLink(Serial serial);
  void OnWayBroken(Serial link_serial, const std::string& way,
                   const absl::Status& status);
  void Break(Link* link, const absl::Status& status, bool lost);
  void Bury(Link* link);
  void Announce(Link* link);
  void FlushSlices(Link* link);
  void StartOp(Op op);
  void ServeStaging();
  void Gather(Op* op, std::byte* staging);
  void OnGathered(Serial op_serial, kernels::KvDigest digest);
  void OnSendable(Serial op_serial, absl::StatusOr<v1::Slice> slice);
  void EndOp(Serial op_serial, bool return_credit);
  void FreeOwn(int own);
  void ReleaseTaken(Link* link);

  const SenderOptions options_;
  Loop* const loop_;
  const Dial dial_;
  SenderDelegate* const delegate_;
  std::vector<std::unique_ptr<SenderWay>> ways_;

  Serial next_serial_ = 1;
  std::map<Serial, std::unique_ptr<State>> states_;
  absl::flat_hash_map<Attempt, Serial> by_attempt_;
  std::map<std::string, std::unique_ptr<Link>> links_;  // by Link::key
  std::vector<std::unique_ptr<Link>> ghosts_;
  std::map<Serial, Op> ops_;

  SlabArena arena_;  // of own slabs
  const std::unique_ptr<HostSlabs> staging_;
  bool serving_ = false;
  HandoffCounters counters_;
  Alive alive_;
};

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_SENDER_IMPL_H_
