// SPDX-License-Identifier: Apache-2.0
#include "worker/gpu_handoff.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/log.h"
#include "common/thread_loop.h"
#include "handoff/nccl/loader.h"
#include "handoff/nccl/nccl_way.h"

namespace tandem::worker {
namespace {

// A prefill worker keeps the buffers of a pair while its link lives, so this
// bounds them too.
constexpr int kMaxCommunicators = 16;
constexpr int kMaxJoining = 2;

}  // namespace

class GpuHandoff::Host final : public handoff::HostMemory {
 public:
  explicit Host(kernels::Backend* backend) : backend_(backend) {}
  absl::Status Register(std::byte* data, size_t bytes) override {
    const absl::Status status = backend_->RegisterHost(data, bytes);
    if (!status.ok()) {
      LogWarning("handoff buffers are not pinned: slower",
                 {{"bytes", static_cast<int64_t>(bytes)}, {"status", status}});
    }
    return status;
  }
  void Unregister(std::byte* data) override { backend_->UnregisterHost(data); }

 private:
  kernels::Backend* const backend_;
};

class GpuHandoff::Buffers final : public handoff::nccl::DeviceMemory {
 public:
  explicit Buffers(kernels::Backend* backend) : backend_(backend) {}
  absl::StatusOr<std::byte*> Allocate(size_t bytes) override {
    absl::StatusOr<std::unique_ptr<kernels::Buffer>> buffer =
        backend_->Allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    std::byte* const data = (*buffer)->data();
    buffers_[data] = *std::move(buffer);
    return data;
  }
  void Free(std::byte* memory) override { buffers_.erase(memory); }

 private:
  kernels::Backend* const backend_;
  std::map<std::byte*, std::unique_ptr<kernels::Buffer>> buffers_;
};

class GpuHandoff::Figures {
 public:
  explicit Figures(Metrics* metrics)
      : communicators_(metrics->AddGauge("tandem_nccl_communicators",
                                         "Two-rank communicators that exist")),
        memory_(metrics->AddGauge("tandem_nccl_communicator_bytes",
                                  "Device memory that they take, measured")),
        ups_(Event(metrics, "up")),
        broken_(Event(metrics, "broken")),
        dropped_(Event(metrics, "dropped")),
        operations_(metrics->AddCounter("tandem_nccl_operations_total",
                                        "Sends and receives that ended")) {}

  void Update(const handoff::nccl::StationCounters& counters) {
    communicators_.Set(counters.communicators);
    memory_.Set(static_cast<double>(counters.memory_bytes));
    ups_.Set(counters.ups);
    broken_.Set(counters.broken);
    dropped_.Set(counters.dropped);
    operations_.Set(counters.operations);
  }

 private:
  static GrowingCounter Event(Metrics* metrics, const char* event) {
    return GrowingCounter(metrics->AddCounter("tandem_nccl_pairs_total",
                                              "What communicators came to",
                                              {{"event", event}}));
  }

  Gauge& communicators_;
  Gauge& memory_;
  GrowingCounter ups_;
  GrowingCounter broken_;
  GrowingCounter dropped_;
  GrowingCounter operations_;
};

GpuHandoff::GpuHandoff(const GpuHandoffOptions& options,
                       kernels::Backend* backend)
    : options_(options),
      host_(std::make_unique<Host>(backend)),
      buffers_(std::make_unique<Buffers>(backend)) {}

GpuHandoff::~GpuHandoff() = default;

absl::StatusOr<std::unique_ptr<GpuHandoff>> GpuHandoff::Open(
    const GpuHandoffOptions& options, kernels::Backend* backend,
    std::vector<std::string>* ways) {
  std::unique_ptr<GpuHandoff> made(new GpuHandoff(options, backend));
  const auto nccl = std::find(ways->begin(), ways->end(), "nccl");
  std::string reason = "--handoff";
  if (nccl != ways->end()) {
    handoff::nccl::LibraryOptions library;
    library.device = options.ordinal;
    library.library = options.nccl_library;
    auto opened = handoff::nccl::OpenNccl(library);
    if (opened.ok()) {
      made->library_ = *std::move(opened);
      reason = made->library_->version();
    } else {
      ways->erase(nccl);
      reason =
          absl::StrCat("no NCCL: ", std::string(opened.status().message()));
    }
  }
  LogInfo("handoff", {{"ways", absl::StrJoin(*ways, ",")},
                      {"reason", reason},
                      {"slab_bytes", options.slab_bytes}});
  return made;
}

handoff::HostMemory* GpuHandoff::host_memory() { return host_.get(); }

std::string GpuHandoff::gpu() const {
  return library_ == nullptr ? "" : library_->device();
}

int GpuHandoff::Slabs(v1::WorkerRole role) {
  const int slabs = role == v1::WORKER_ROLE_PREFILL
                        ? kSlabsPerPeer * kMaxCommunicators
                        : kSlabs;
  return slabs + kMaxJoining;
}

int64_t GpuHandoff::BufferBytes(v1::WorkerRole role, int64_t slab_bytes) {
  return Slabs(role) * slab_bytes;
}

int64_t GpuHandoff::buffer_bytes() const {
  return library_ == nullptr ? 0
                             : BufferBytes(options_.role, options_.slab_bytes);
}

absl::Status GpuHandoff::Start(const std::string& self, Loop* loop,
                               Random* random, Metrics* metrics) {
  if (library_ == nullptr) return absl::OkStatus();
  handoff::nccl::StationOptions options;
  options.self = self;
  options.slab_bytes = options_.slab_bytes;
  options.buffers = Slabs(options_.role);
  options.max_communicators = kMaxCommunicators;
  options.max_joining = kMaxJoining;
  auto station = handoff::nccl::Station::Create(
      options, loop, random, library_.get(), buffers_.get(),
      [](const std::string& name) -> std::unique_ptr<Loop> {
        return std::make_unique<ThreadLoop>(name);
      },
      &watcher_);
  if (!station.ok()) return station.status();
  station_ = *std::move(station);
  figures_ = std::make_unique<Figures>(metrics);
  return absl::OkStatus();
}

std::unique_ptr<handoff::SenderWay> GpuHandoff::NewSenderWay() {
  return station_ == nullptr ? nullptr
                             : handoff::NewNcclSenderWay(station_.get());
}

std::unique_ptr<handoff::ReceiverWay> GpuHandoff::NewReceiverWay() {
  return station_ == nullptr ? nullptr
                             : handoff::NewNcclReceiverWay(station_.get());
}

void GpuHandoff::UpdateMetrics() {
  if (figures_ != nullptr) figures_->Update(station_->counters());
}

}  // namespace tandem::worker
