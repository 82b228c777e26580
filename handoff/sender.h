// SPDX-License-Identifier: Apache-2.0
// The prefill worker's end of all its handoffs: links to decode workers are
// dialled on first use and dropped when idle; every attempt is offered,
// waits for its grant, sends slices as they are computed and credited, and
// commits. An attempt ends exactly once, in OnAcknowledged or OnFailed,
// unless Cancel came first.

#ifndef TANDEM_HANDOFF_SENDER_H_
#define TANDEM_HANDOFF_SENDER_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "common/random.h"
#include "handoff/handoff.h"
#include "handoff/host_memory.h"
#include "handoff/way.h"

namespace tandem::handoff {

struct SenderOptions {
  // Without receiver_incarnation, which each link adds. Protocol versions
  // left at 0 are those of handoff.h.
  v1::LinkHello hello;
  WireLayers layers;
  int kv_heads = 0;
  int head_dim = 0;
  bool whole_heads = false;           // no grant of some of the heads is taken
  int64_t staging_bytes = 64 << 20;   // own slabs, for ways without shared ones
  int64_t slab_bytes = 1 << 20;       // of one own slab
  HostMemory* host_memory = nullptr;  // that gathers fill; may be null
  absl::Duration link_timeout = absl::Seconds(5);       // dial and hello
  absl::Duration silence = absl::Seconds(4);            // of a link: it is lost
  absl::Duration transfer_timeout = absl::Seconds(10);  // without progress
  absl::Duration idle_timeout = absl::Minutes(10);      // of an unused link
  absl::Duration repeat = absl::Milliseconds(500);      // offers, commits
  FaultListener on_fault = nullptr;  // on the loop; calls nothing back
};

class SenderDelegate {
 public:
  virtual ~SenderDelegate() = default;
  enum class Answer { kGranted, kStart, kWait };
  // The receiver's word on an offer; may change from wait or start to
  // granted later. With kGranted, `grant` says which positions are wanted.
  virtual void OnAnswer(const Attempt& attempt, Answer answer,
                        const Grant& grant) = 0;
  // Fill `staging` with the slice as wire elements and digest it; `done`
  // runs on the loop. The attempt's blocks stay pinned until then, even if
  // the attempt ends meanwhile.
  virtual void Gather(const Attempt& attempt, const SliceRange& range,
                      const Grant& grant, std::byte* staging,
                      absl::AnyInvocable<void(kernels::KvDigest)> done) = 0;
  virtual void OnAcknowledged(const Attempt& attempt,
                              const HandoffTimings& timings) = 0;
  // `failed_way` names the way that broke, empty if none did.
  virtual void OnFailed(const Attempt& attempt, const absl::Status& status,
                        const std::string& failed_way) = 0;
};

// Delegates may call back into the sender, but not destroy it. Answers and
// ends are never told from inside Offer, Computed, Commit or Cancel.
class Sender {
 public:
  // Opens a stream to a decode worker. The simulation and the binaries differ
  // only here.
  using Dial = std::function<std::unique_ptr<SenderStream>(
      const v1::WorkerRef& receiver)>;

  Sender(const SenderOptions& options, Loop* loop, Random* random, Dial dial,
         SenderDelegate* delegate);
  // Closes all links. REQUIRES: no Gather is running any more (its `done` may
  // still run later: it does nothing).
  ~Sender();

  // A way that this process has beside "grpc", which is built in. It is used
  // if hello.ways names it. REQUIRES: nothing was offered yet.
  void AddWay(std::unique_ptr<SenderWay> way);

  // Opens the attempt: links to `receiver` if need be and offers. `ticket` is
  // opaque. Ways in `avoid_ways` are not used (fails if none is left).
  // `adapter` is what the history is computed with; the receiver's must be the
  // same.
  void Offer(const Attempt& attempt, const v1::WorkerRef& receiver,
             const std::string& ticket, int positions, int cached_positions,
             absl::Duration expected_prefill,
             const std::vector<std::string>& avoid_ways,
             const v1::AdapterRef& adapter = {});

  // KV of `range` is computed and pinned. Sent once a grant wants it; ranges
  // outside the granted positions are dropped. Layers of one position range
  // come in ascending order.
  void Computed(const Attempt& attempt, const SliceRange& range);

  // All is computed; `first` is what decoding starts with. Commits when every
  // wanted slice is sent.
  void Commit(const Attempt& attempt, const FirstToken& first);

  // Gives the attempt up and tells the receiver. Idempotent, unknown ones are
  // no-ops; no callback about it follows, but a Gather in flight ends first.
  void Cancel(const Attempt& attempt);

  SlabCounts slabs() const;
  int attempts() const;
  int links() const;  // established and not lost
  const HandoffCounters& counters() const;
  // Slab states and their sums agree: for tests and debug builds.
  absl::Status CheckInvariants() const;
  // Elements not yet sent that wait for a grant or credit, as positions: the
  // prefill worker bounds them per decode worker.
  int waiting_positions(const std::string& worker_id) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_SENDER_H_
