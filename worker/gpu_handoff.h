// SPDX-License-Identifier: Apache-2.0
// What a worker on a GPU brings to its handoffs: way "nccl" with buffers in the
// GPU's memory, and pinned host memory for the ways that go through the host.
// Workers on a CPU have none of it.

#ifndef TANDEM_WORKER_GPU_HANDOFF_H_
#define TANDEM_WORKER_GPU_HANDOFF_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/loop.h"
#include "common/metrics.h"
#include "common/random.h"
#include "handoff/host_memory.h"
#include "handoff/nccl/communicator.h"
#include "handoff/nccl/log_watcher.h"
#include "handoff/nccl/station.h"
#include "handoff/way.h"
#include "kernels/backend.h"
#include "tandem/v1/registry.pb.h"
#include "worker/load_metrics.h"

namespace tandem::worker {

struct GpuHandoffOptions {
  v1::WorkerRole role = v1::WORKER_ROLE_UNSPECIFIED;
  int ordinal = 0;           // cuda:N
  std::string nccl_library;  // libtandem_nccl.so; empty: beside the program
  int64_t slab_bytes = 0;
};

class GpuHandoff {
 public:
  // Credits of a pair, and of a decode worker for all of them.
  static constexpr int kSlabsPerPeer = 4;
  static constexpr int kSlabs = 32;

  // Takes "nccl" out of `ways` where NCCL does not work, and says why in one
  // line of the log. `backend` outlives it.
  static absl::StatusOr<std::unique_ptr<GpuHandoff>> Open(
      const GpuHandoffOptions& options, kernels::Backend* backend,
      std::vector<std::string>* ways);

  // For shm and grpc. Outlived by none of their buffers.
  handoff::HostMemory* host_memory();
  // For LinkHello; empty without NCCL.
  std::string gpu() const;
  // Of the GPU, where there is NCCL; and that Start will take of this one.
  static int64_t BufferBytes(v1::WorkerRole role, int64_t slab_bytes);
  int64_t buffer_bytes() const;

  // On the loop, before the ways are asked for. `self` is this worker's id.
  // RESOURCE_EXHAUSTED: the buffers do not fit.
  absl::Status Start(const std::string& self, Loop* loop, Random* random,
                     Metrics* metrics);
  // Null without NCCL. This outlives them.
  std::unique_ptr<handoff::SenderWay> NewSenderWay();
  std::unique_ptr<handoff::ReceiverWay> NewReceiverWay();
  // Once a second, on the loop.
  void UpdateMetrics();

  ~GpuHandoff();

 private:
  class Host;
  class Buffers;
  class Figures;

  GpuHandoff(const GpuHandoffOptions& options, kernels::Backend* backend);
  static int Slabs(v1::WorkerRole role);

  const GpuHandoffOptions options_;
  const std::unique_ptr<Host> host_;
  const std::unique_ptr<Buffers> buffers_;
  std::unique_ptr<handoff::nccl::Library> library_;  // null: without NCCL
  handoff::nccl::LogWatcher watcher_;
  std::unique_ptr<handoff::nccl::Station> station_;
  std::unique_ptr<Figures> figures_;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_GPU_HANDOFF_H_
