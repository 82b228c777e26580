// SPDX-License-Identifier: Apache-2.0
// The seam between this way's control logic and NCCL: what one rank of a
// two-rank communicator can be asked, and nothing of streams, events or
// devices. nccl_library.cc is the real one, over a library that is loaded at
// run time; tests put a double here that moves bytes between processes and
// breaks in every way that the real one is known to.
//
// All methods of a Communicator are called on one thread of its own (its
// hand, runner.h), because some block in the real library whatever its
// configuration says. None is called with a lock held, and nothing waits for
// that thread but a deadline.

#ifndef TANDEM_HANDOFF_NCCL_COMMUNICATOR_H_
#define TANDEM_HANDOFF_NCCL_COMMUNICATOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem::handoff::nccl {

// One rank. Does one thing at a time: Join, then Sends and Receives, each
// begun only when Poll said that the one before is done; at last Abort.
class Communicator {
 public:
  enum class Progress { kBusy, kDone };

  // REQUIRES: Join was never called, or Quiet() said true.
  virtual ~Communicator() = default;

  // Begins to meet the other rank.
  virtual absl::Status Join(const std::string& unique_id, int rank) = 0;
  // Queued on the device in this order; on return nothing of this rank is
  // ahead of it there. The memory is the device's business until Poll says
  // kDone, or Quiet true.
  virtual absl::Status Send(const std::byte* from, size_t bytes) = 0;
  virtual absl::Status Receive(std::byte* to, size_t bytes) = 0;

  // How the thing begun last stands. An error, also while nothing is under
  // way, is final: only Abort makes sense after it.
  virtual absl::StatusOr<Progress> Poll() = 0;

  // Makes everything of this rank stop, without its peer. May block, in a bad
  // case for ever.
  virtual void Abort() = 0;
  // After Abort: no kernel of this rank runs any more, and nothing touches the
  // memory that it was given.
  virtual bool Quiet() = 0;

  // Device memory that this rank takes beside the buffers it is given.
  virtual int64_t memory_bytes() = 0;
};

class Library {
 public:
  virtual ~Library() = default;
  // For logs and fingerprints of problems: "NCCL 2.30.7".
  virtual std::string version() const = 0;
  // What two ranks must know to meet. Whoever knows it can join in the place
  // of one of them. Thread-safe; called on hands.
  virtual absl::StatusOr<std::string> UniqueId() = 0;
  // Thread-safe; called on hands. `peer` is for the library's own logs.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> NewCommunicator(
      const std::string& peer) = 0;
  // The GPU's own name, in every process of every host: its UUID.
  virtual std::string device() const = 0;
  // Whether two ranks may be on one GPU.
  virtual bool shares_device() const = 0;
};

}  // namespace tandem::handoff::nccl

#endif  // TANDEM_HANDOFF_NCCL_COMMUNICATOR_H_
