// SPDX-License-Identifier: Apache-2.0
// The decode worker's end of all its handoffs: owns the slab arenas, gives
// credits, lands slices, checks and acknowledges commits. Nothing lands
// without a live grant; a grant dies with its attempt. The arenas are the
// only memory that a peer can touch.

#ifndef TANDEM_HANDOFF_RECEIVER_H_
#define TANDEM_HANDOFF_RECEIVER_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "common/random.h"
#include "common/rpc/identity.h"
#include "handoff/handoff.h"
#include "handoff/host_memory.h"
#include "handoff/ticket.h"
#include "handoff/way.h"

namespace tandem::handoff {

struct ReceiverOptions {
  v1::WorkerRef self;
  std::map<std::string, std::string> fingerprint;
  std::string host_id;
  std::vector<std::string> ways = {"shm", "grpc"};
  std::string kv_dtype;  // of kWireFormats: wanted on the wire
  bool mixed_numerics = false;
  HostMemory* host_memory = nullptr;  // that scatters read from; may be null
  WireLayers layers;
  int kv_heads = 0;
  int head_dim = 0;
  int64_t slab_bytes = 1 << 20;
  int slabs_per_peer = 16;  // credits outstanding per pair at most
  int num_slabs = 128;      // over all peers at most
  int max_links = 256;
  absl::Duration silence = absl::Seconds(4);
  absl::Duration transfer_timeout = absl::Seconds(10);
  absl::Duration quarantine_timeout = absl::Seconds(30);
  FaultListener on_fault = nullptr;  // on the loop; calls nothing back
};

class ReceiverDelegate {
 public:
  virtual ~ReceiverDelegate() = default;

  enum class Verdict { kGranted, kStart, kWait };
  // A first offer with a valid ticket of a live attempt. The delegate grants
  // at once (filling in `grant`'s positions and, if not all, heads; the rest
  // is the receiver's) or later through GrantLater. `mixed` is empty, or the
  // sender's kv_dtype if its numerics differ from ours. An error refuses the
  // offer for good: the attempt has ended, and OnFailed does not follow.
  virtual absl::StatusOr<Verdict> OnOffer(const Ticket& ticket,
                                          const v1::HandoffOffer& offer,
                                          const std::string& mixed,
                                          struct Grant* grant) = 0;
  // Land the slice into the attempt's reserved blocks, which stay held until
  // `done` ran on the loop, even if the attempt ends meanwhile.
  virtual void Scatter(const Attempt& attempt, const SliceRange& range,
                       const struct Grant& grant, const std::byte* staging,
                       absl::AnyInvocable<void()> done) = 0;
  // Digest of everything granted, taken from the blocks.
  virtual void Digest(const Attempt& attempt, const struct Grant& grant,
                      absl::AnyInvocable<void(kernels::KvDigest)> done) = 0;
  // Everything landed and the digest matches. OK: acknowledged to the sender;
  // an error is told to it. Either way the attempt has ended, and OnFailed
  // does not follow.
  virtual absl::Status OnCommit(const Attempt& attempt,
                                const FirstToken& first) = 0;
  // The attempt is over without a commit (link lost, no progress, refused
  // manifest or digest, withdrawn, ticket expired). Not called after
  // EndAttempt.
  virtual void OnFailed(const Attempt& attempt, const absl::Status& status,
                        const std::string& failed_way) = 0;
  // A quarantine outlived its deadline and its memory cannot be replaced: the
  // process must end.
  virtual void OnFatal(const absl::Status& status) = 0;
};

// Delegates may call back into the receiver, but not destroy it.
class Receiver {
 public:
  Receiver(const ReceiverOptions& options, Loop* loop, Random* random,
           ReceiverDelegate* delegate);
  // Closes all links. REQUIRES: no Scatter or Digest is running any more
  // (their `done` may still run later: it does nothing).
  ~Receiver();

  // A way that this process has beside "grpc", which is built in. It is used
  // if options.ways names it. REQUIRES: no link was added yet.
  void AddWay(std::unique_ptr<ReceiverWay> way);

  // Registers an attempt and returns its ticket (ticket.h). From here on
  // offers for it are answered.
  std::string IssueTicket(const Attempt& attempt, const v1::WorkerRef& sender,
                          int max_positions, absl::Duration lifetime);
  // Answers an offer that was told to wait (StartLater), or to wait or start
  // (GrantLater). No-ops for attempts that have ended.
  void StartLater(const Attempt& attempt);
  void GrantLater(const Attempt& attempt, const struct Grant& grant);
  // Ends the attempt in any state: late messages for it are counted no-ops.
  // Idempotent.
  void EndAttempt(const Attempt& attempt, const absl::Status& why);

  // A prefill worker linked. Its hello must name the worker that `peer` is.
  void AddLink(std::unique_ptr<ReceiverStream> stream,
               rpc::PeerIdentity peer = {});

  SlabCounts slabs() const;
  int tickets() const;  // issued, not ended
  int links() const;    // established and not lost
  const HandoffCounters& counters() const;
  // Slab states and their sums agree: for tests and debug builds.
  absl::Status CheckInvariants() const;
  // Progress since the grant: nothing landed yet may be revoked first.
  bool has_landed(const Attempt& attempt) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_RECEIVER_H_
