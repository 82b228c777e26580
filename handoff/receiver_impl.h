// SPDX-License-Identifier: Apache-2.0
// The receiver's state. receiver.cc moves attempts along, receiver_links.cc
// links, credits and slabs.
//
//   attempt:  issued -> offered -> granted -> digesting -> gone (an outcome)
//   slice:    announced -> credited (a Credit) -> received -> landed
//
// A Credit lives exactly as long as its slab is not free. It knows its
// attempt by serial, so it may outlive it: what then arrives frees the slab
// and changes nothing else.

#ifndef TANDEM_HANDOFF_RECEIVER_IMPL_H_
#define TANDEM_HANDOFF_RECEIVER_IMPL_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "handoff/alive.h"
#include "handoff/link.h"
#include "handoff/receiver.h"
#include "handoff/slabs.h"
#include "handoff/slices.h"

namespace tandem::handoff {

using ReceiverLinkBase = LinkBase<v1::LinkResponse, v1::LinkRequest>;

class Receiver::Impl final : public ReceiverLinkBase::Owner {
 public:
  Impl(const ReceiverOptions& options, Loop* loop, Random* random,
       ReceiverDelegate* delegate);
  ~Impl() override;

  void AddWay(std::unique_ptr<ReceiverWay> way);
  std::string IssueTicket(const Attempt& attempt, const v1::WorkerRef& sender,
                          int max_positions, absl::Duration lifetime);
  void StartLater(const Attempt& attempt);
  void GrantLater(const Attempt& attempt, const struct Grant& grant);
  void EndAttempt(const Attempt& attempt, const absl::Status& why);
  void AddLink(std::unique_ptr<ReceiverStream> stream, rpc::PeerIdentity peer);

  SlabCounts slabs() const { return arena_.counts(); }
  int tickets() const { return static_cast<int>(states_.size()); }
  int links() const;
  const HandoffCounters& counters() const { return counters_; }
  absl::Status CheckInvariants() const;
  bool has_landed(const Attempt& attempt) const;

  void OnLinkMessage(ReceiverLinkBase* link, v1::LinkRequest message) override;
  void OnLinkHandled(ReceiverLinkBase*) override { ServeCredits(); }
  void OnLinkDrained(ReceiverLinkBase*) override {}
  void OnLinkTick(ReceiverLinkBase*) override {}
  void OnLinkBroken(ReceiverLinkBase* link, absl::Status status) override;

 private:
  using Serial = uint64_t;  // of an attempt or a link; never reused

  // What a channel knows of its link.
  struct Host final : ChannelHost {
    Impl* impl = nullptr;
    Serial link_serial = 0;
    size_t way = 0;
    void Say(v1::NcclControl message) override;
    void OnBroken(const absl::Status& status) override;
    void OnQuiet() override;
  };

  struct Usable {
    std::string name;
    std::unique_ptr<Host> host;
    std::unique_ptr<ReceiverChannel> channel;
  };

  struct Link final : ReceiverLinkBase {
    using ReceiverLinkBase::ReceiverLinkBase;
    Serial serial = 0;
    rpc::PeerIdentity peer;
    bool welcomed = false;
    bool buried = false;
    bool dropping = false;  // a quarantine outlived its deadline
    v1::WorkerRef sender;
    std::string mixed;  // the sender's kv_dtype if its numerics differ
    std::vector<Usable> ways;
    SlabArena::Pair pair = 0;
    std::set<Serial> attempts;  // bound to it
    int scattering = 0;         // slabs of ways whose credits may wait
    absl::Time last_progress;
  };

  enum class Phase { kIssued, kOffered, kGranted, kDigesting };
  static std::string_view StageName(Phase phase);
  enum class SliceState { kAnnounced, kCredited, kLanded };

  struct SliceRecord {
    SliceRange range;
    SliceState state = SliceState::kAnnounced;
  };

  struct State {
    explicit State(Loop* loop) : expiry(loop), clock(loop) {}
    Attempt attempt;
    Serial serial = 0;
    Phase phase = Phase::kIssued;
    Link* link = nullptr;
    std::string way;
    Usable* usable = nullptr;
    int positions = 0;         // offered
    v1::HandoffAnswer answer;  // the latest word on the offer
    struct Grant grant;
    Coverage announced;
    absl::flat_hash_map<uint32_t, SliceRecord> slices;
    int credited = 0;
    uint32_t landed_slices = 0;
    int64_t landed_rows = 0;
    bool received = false;  // any slice
    std::optional<v1::HandoffCommit> commit;
    Timer expiry;  // of the ticket
    Timer clock;   // of the transfer, from the first credit on
    absl::Time last_progress;
  };

  // Who a slab was granted to. [arena slab]
  struct Credit {
    Serial attempt_serial = 0;
    Attempt attempt;
    Serial link_serial = 0;
    Link* link = nullptr;
    Usable* usable = nullptr;
    uint32_t slice = 0;
    SliceRange range;
    struct Grant grant;
    int64_t bytes = 0;
    bool begun = false;     // the channel was told to receive it
    bool received = false;  // the channel holds memory for it
    absl::Time quarantined_at;
  };

  struct Request {  // a slice that waits for a slab
    Serial attempt_serial = 0;
    uint32_t slice = 0;
  };

  // ---- Attempts (receiver.cc)
  State* Find(const Attempt& attempt);
  State* Find(Serial serial);
  // The live attempt bound to `link` that a message names; counts others.
  State* Named(Link* link, const v1::AttemptKey& key);
  void OnOffer(Link* link, const v1::HandoffOffer& offer);
  absl::Status CheckOffer(Link* link, const v1::HandoffOffer& offer,
                          Ticket* ticket);
  void Refuse(Link* link, const v1::AttemptKey& key,
              const absl::Status& status);
  void Answer(State* state, v1::HandoffAnswer::Verdict verdict);
  void Grant(State* state, const struct Grant& grant);
  void OnCommit(Link* link, const v1::HandoffCommit& commit);
  absl::Status CheckManifest(const State& state,
                             const v1::HandoffCommit& commit) const;
  void MaybeDigest(State* state);
  void OnDigest(Serial serial, kernels::KvDigest digest);
  void Progress(State* state);
  void CheckClock(Serial serial);
  // An attempt's failure: counted, and told.
  void CountFailed(const State& state, const absl::Status& status);
  void CountFailed(const Link* link, const std::string& way,
                   std::string_view stage, const absl::Status& status);
  void Report(const HandoffFault& fault) const {
    if (options_.on_fault) options_.on_fault(fault);
  }
  enum class Tell { kNothing, kDead, kAck };
  void Fail(State* state, const absl::Status& status,
            const std::string& failed_way, Tell tell);
  // Takes the attempt out with its requests; its granted slabs go into
  // quarantine. Remembers how it ended.
  void Remove(State* state, const absl::Status& outcome);
  void SendEnd(Link* link, const Attempt& attempt, const absl::Status& status,
               Tell tell);

  // ---- Links, credits, slabs (receiver_links.cc)
  void OnHello(Link* link, const v1::LinkHello& hello);
  absl::Status CheckHello(const v1::LinkHello& hello, uint32_t* protocol,
                          bool* mixed) const;
  void Break(Link* link, const absl::Status& status, bool refused);
  void MaybeBury(Link* link);
  void OnSliceReady(Link* link, const v1::SliceReady& ready);
  absl::Status CheckSlice(const State& state, const v1::SliceReady& ready,
                          const SliceRange& range) const;
  void ServeCredits();
  void HoldCredit(const Credit& credit, const SlabArena::Loan& loan);
  void FlushCredits(Link* link);
  void OnSlice(Link* link, v1::Slice slice);
  void OnReceived(int slab, uint64_t generation,
                  absl::StatusOr<const std::byte*> memory);
  void OnScattered(int slab, uint64_t generation);
  void OnCreditReturn(Link* link, const v1::CreditReturn& returned);
  void FreeSlab(int slab);
  void QuarantineSlab(int slab);
  void QuarantineUnlanded(Link* link);
  void OnQuiet(Serial link_serial, size_t way);
  void OnWithdraw(State* state, const v1::HandoffWithdraw& withdraw);
  std::string BrokenWay(const State& state) const;
  void OnWayBroken(Serial link_serial, size_t way, const absl::Status& status);
  void WatchQuarantine();
  void OnQuarantineDeadline();
  void MaybeDrop(Link* link);
  Link* FindLink(Serial serial);

  const ReceiverOptions options_;
  Loop* const loop_;
  Random* const random_;
  ReceiverDelegate* const delegate_;
  const std::string ticket_key_;
  const std::string fingerprint_hash_;
  const kernels::DType wire_;
  std::vector<std::unique_ptr<ReceiverWay>> ways_;

  Serial next_serial_ = 1;
  std::map<Serial, std::unique_ptr<State>> states_;
  absl::flat_hash_map<Attempt, Serial> by_attempt_;
  std::map<Serial, std::unique_ptr<Link>> links_;
  std::map<Serial, std::unique_ptr<Link>> ghosts_;

  SlabArena arena_;
  std::vector<Credit> credits_;           // [arena slab]
  std::map<uint64_t, Request> requests_;  // by arena token
  uint64_t next_token_ = 1;
  Timer quarantine_;

  // How recent attempts ended, oldest dropped first.
  absl::flat_hash_map<Attempt, absl::Status> outcomes_;
  std::deque<Attempt> outcome_order_;

  HandoffCounters counters_;
  Alive alive_;
};

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_RECEIVER_IMPL_H_
