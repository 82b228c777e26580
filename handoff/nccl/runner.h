// SPDX-License-Identifier: Apache-2.0
// Calls one communicator on its hand: a loop (a thread, in production) that
// only this communicator uses, so that a call which blocks holds up no other
// pair and no step. Commands come by Post; what became of them goes back to
// the home loop as reports. It decides nothing and has no deadlines: those
// are the pair's (pair.h), which watches from the home loop.

#ifndef TANDEM_HANDOFF_NCCL_RUNNER_H_
#define TANDEM_HANDOFF_NCCL_RUNNER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "handoff/nccl/communicator.h"

namespace tandem::handoff::nccl {

struct Report {
  enum class Kind {
    kId,      // `id` is new; the join has begun
    kJoined,  // `memory_bytes` is known
    kPosted,  // the operation is queued on the device
    kDone,    // the operation is over
    kFailed,  // `status`; comes once
    kGone,    // quiet: the last report
  };
  Kind kind = Kind::kFailed;
  std::string id;
  int64_t memory_bytes = 0;
  absl::Status status;
};

class Runner {
 public:
  // `report` is called on the hand: it posts.
  using Listener = std::function<void(Report)>;

  // `hand` outlives it. `gone` is set with kGone, for whoever cannot wait on
  // the home loop.
  Runner(Library* library, std::string peer, Loop* hand, Listener report,
         std::shared_ptr<std::atomic<bool>> gone);

  // ---- On the hand. The first command is Join; End comes last.

  // With no id: makes one (rank 0), tells it and joins.
  void Join(const std::string& id, int rank);
  void Send(const std::byte* from, size_t bytes);
  void Receive(std::byte* to, size_t bytes);
  void End();

 private:
  enum class Doing { kNothing, kJoining, kOperation, kEnding, kGone };

  void Begin(const absl::Status& status);
  void Poll();
  void PollAgain();
  void Fail(const absl::Status& status);
  void CheckQuiet();
  void Say(Report::Kind kind);

  Library* const library_;
  const std::string peer_;
  Loop* const hand_;
  const Listener report_;
  const std::shared_ptr<std::atomic<bool>> gone_;
  std::unique_ptr<Communicator> communicator_;
  Doing doing_ = Doing::kNothing;
  bool failed_ = false;
  absl::Time since_;
  Timer poll_;
};

}  // namespace tandem::handoff::nccl

#endif  // TANDEM_HANDOFF_NCCL_RUNNER_H_
