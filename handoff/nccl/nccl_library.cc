// SPDX-License-Identifier: Apache-2.0
// The real communicator. NCCL is loaded by name, never linked, so that the
// machine's own is used. What is relied upon, from reading its source:
//
// - With blocking = 0 every call here returns at once but ncclCommAbort,
//   which waits for the device whatever the configuration says. It makes
//   kernels of this rank quit by a flag that they poll, without the peer, and
//   works in every state, also while joining. (ncclCommRevoke does not block,
//   but needs a communicator that has joined, and a destroy after it.)
// - The user's stream is not waited for by the abort: Quiet asks it.
// - Buffers that were not registered (station.h allocates them) are read and
// written by this process's
//   kernels only; peers and network cards see NCCL's own buffers. So nothing
//   is registered here and nothing is captured into a graph.

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "handoff/nccl/loader.h"

namespace tandem::handoff::nccl {
namespace {

// ncclCommMemStats came after the oldest NCCL that will do; its statistic
// "total memory of the GPU".
using MemStats = ncclResult_t(ncclComm_t, int, uint64_t*);
constexpr int kMemTotal = 3;

// From here on NCCL_MULTI_RANK_GPU_ENABLE means something.
constexpr int kMultiRankVersion = 23000;

struct Api {
  decltype(&::ncclGetVersion) get_version;
  decltype(&::ncclGetUniqueId) get_unique_id;
  decltype(&::ncclCommInitRankConfig) init;
  decltype(&::ncclCommGetAsyncError) get_async_error;
  decltype(&::ncclCommAbort) abort;
  decltype(&::ncclSend) send;
  decltype(&::ncclRecv) receive;
  decltype(&::ncclGetErrorString) error_string;
  decltype(&::ncclGetLastError) last_error;
  MemStats* mem_stats;  // may be null
};

absl::Status CudaError(cudaError_t code, const char* what) {
  return absl::UnavailableError(
      absl::StrCat(what, ": ", cudaGetErrorString(code)));
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const Api& api, const LibraryOptions& options,
                   std::string peer)
      : api_(api),
        device_(options.device),
        max_ctas_(options.max_ctas),
        peer_(std::move(peer)) {}

  absl::Status Join(const std::string& unique_id, int rank) override {
    ncclUniqueId id;
    if (unique_id.size() != sizeof(id)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a unique id of ", unique_id.size(), " bytes, not ", sizeof(id)));
    }
    std::memcpy(&id, unique_id.data(), sizeof(id));
    rank_ = rank;
    absl::Status status = MakeStream();
    if (!status.ok()) return status;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.minCTAs = 1;
    config.maxCTAs = max_ctas_;
    config.commName = peer_.c_str();
    return Began(api_.init(&comm_, 2, id, rank, &config), "join");
  }

  absl::Status Send(const std::byte* from, size_t bytes) override {
    const cudaError_t device = cudaSetDevice(device_);
    if (device != cudaSuccess) return CudaError(device, "send");
    launching_ = true;
    return Began(api_.send(from, bytes, ncclInt8, 1 - rank_, comm_, stream_),
                 "send");
  }

  absl::Status Receive(std::byte* to, size_t bytes) override {
    const cudaError_t device = cudaSetDevice(device_);
    if (device != cudaSuccess) return CudaError(device, "receive");
    launching_ = true;
    return Began(api_.receive(to, bytes, ncclInt8, 1 - rank_, comm_, stream_),
                 "receive");
  }

  absl::StatusOr<Progress> Poll() override {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = api_.get_async_error(comm_, &state);
    if (asked != ncclSuccess) return Error(asked, "asking for errors");
    if (state == ncclInProgress) return Progress::kBusy;
    if (state != ncclSuccess) return Error(state, "asynchronous error");
    if (std::exchange(launching_, false)) {
      // Only now is the kernel on the stream.
      const cudaError_t recorded = cudaEventRecord(event_, stream_);
      if (recorded != cudaSuccess) return CudaError(recorded, "event");
      running_ = true;
    }
    if (!running_) return Progress::kDone;
    const cudaError_t over = cudaEventQuery(event_);
    if (over == cudaErrorNotReady) return Progress::kBusy;
    if (over != cudaSuccess) return CudaError(over, "the operation's kernel");
    running_ = false;
    return Progress::kDone;
  }

  void Abort() override {
    if (comm_ == nullptr) return;
    // What it says changes nothing: Quiet looks at the device itself.
    static_cast<void>(cudaSetDevice(device_));
    static_cast<void>(api_.abort(std::exchange(comm_, nullptr)));
  }

  bool Quiet() override {
    if (stream_ == nullptr) return true;
    // Anything but success: it runs, or the context is lost and with it any
    // way to know. The deadline of whoever asks decides.
    if (cudaSetDevice(device_) != cudaSuccess ||
        cudaStreamQuery(stream_) != cudaSuccess) {
      return false;
    }
    if (event_ != nullptr) {
      static_cast<void>(cudaEventDestroy(std::exchange(event_, nullptr)));
    }
    static_cast<void>(cudaStreamDestroy(std::exchange(stream_, nullptr)));
    return true;
  }

  int64_t memory_bytes() override {
    uint64_t bytes = 0;
    if (api_.mem_stats != nullptr &&
        api_.mem_stats(comm_, kMemTotal, &bytes) == ncclSuccess) {
      return static_cast<int64_t>(bytes);
    }
    // What went while it joined, others' allocations included.
    return std::max<int64_t>(0, free_before_ - FreeMemory());
  }

 private:
  static int64_t FreeMemory() {
    size_t free = 0;
    size_t total = 0;
    return cudaMemGetInfo(&free, &total) == cudaSuccess
               ? static_cast<int64_t>(free)
               : 0;
  }

  absl::Status MakeStream() {
    cudaError_t code = cudaSetDevice(device_);
    if (code != cudaSuccess) return CudaError(code, "device");
    int least = 0;
    int greatest = 0;
    code = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (code != cudaSuccess) return CudaError(code, "stream priorities");
    code =
        cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest);
    if (code != cudaSuccess) return CudaError(code, "stream");
    code = cudaEventCreateWithFlags(&event_, cudaEventDisableTiming);
    if (code != cudaSuccess) return CudaError(code, "event");
    free_before_ = FreeMemory();
    return absl::OkStatus();
  }

  absl::Status Began(ncclResult_t result, const char* what) const {
    if (result == ncclSuccess || result == ncclInProgress) {
      return absl::OkStatus();
    }
    return Error(result, what);
  }
  absl::Status Error(ncclResult_t result, const char* what) const {
    const char* const detail = api_.last_error(comm_);
    return absl::UnavailableError(
        absl::StrCat(what, ": ", api_.error_string(result),
                     detail == nullptr || *detail == '\0' ? "" : ": ",
                     detail == nullptr ? "" : detail));
  }

  const Api api_;
  const int device_;
  const int max_ctas_;
  const std::string peer_;
  int rank_ = 0;
  int64_t free_before_ = 0;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
  bool launching_ = false;  // accepted, not known to be on the stream
  bool running_ = false;
};

class NcclLibrary final : public Library {
 public:
  NcclLibrary(const Api& api, const LibraryOptions& options, int version,
              std::string device)
      : api_(api),
        options_(options),
        version_(version),
        device_(std::move(device)) {}

  std::string version() const override {
    return absl::StrCat("NCCL ", version_ / 10'000, ".", version_ / 100 % 100,
                        ".", version_ % 100);
  }
  absl::StatusOr<std::string> UniqueId() override {
    ncclUniqueId id;
    const ncclResult_t result = api_.get_unique_id(&id);
    if (result != ncclSuccess) {
      return absl::UnavailableError(
          absl::StrCat("unique id: ", api_.error_string(result)));
    }
    return std::string(id.internal, sizeof(id.internal));
  }
  absl::StatusOr<std::unique_ptr<Communicator>> NewCommunicator(
      const std::string& peer) override {
    return std::make_unique<NcclCommunicator>(api_, options_, peer);
  }
  std::string device() const override { return device_; }
  bool shares_device() const override {
    const char* const allowed = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return version_ >= kMultiRankVersion && allowed != nullptr &&
           std::strcmp(allowed, "1") == 0;
  }

 private:
  const Api api_;
  const LibraryOptions options_;
  const int version_;
  const std::string device_;
};

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

absl::StatusOr<std::unique_ptr<Library>> Open(const LibraryOptions& options) {
  const char* const blocking = std::getenv("NCCL_COMM_BLOCKING");
  if (blocking != nullptr && std::strcmp(blocking, "0") != 0) {
    return absl::FailedPreconditionError(
        "NCCL_COMM_BLOCKING is set: calls that block have no deadline; unset "
        "it");
  }
  // Never closed: its threads live until the process ends.
  void* const library = dlopen(options.nccl.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::NotFoundError(
        absl::StrCat(options.nccl, " cannot be loaded: ", dlerror()));
  }
  Api api{};
  if (!Find(library, "ncclGetVersion", &api.get_version) ||
      !Find(library, "ncclGetUniqueId", &api.get_unique_id) ||
      !Find(library, "ncclCommInitRankConfig", &api.init) ||
      !Find(library, "ncclCommGetAsyncError", &api.get_async_error) ||
      !Find(library, "ncclCommAbort", &api.abort) ||
      !Find(library, "ncclSend", &api.send) ||
      !Find(library, "ncclRecv", &api.receive) ||
      !Find(library, "ncclGetErrorString", &api.error_string) ||
      !Find(library, "ncclGetLastError", &api.last_error)) {
    return absl::FailedPreconditionError(
        absl::StrCat(options.nccl, " is no NCCL of this interface"));
  }
  Find(library, "ncclCommMemStats", &api.mem_stats);
  int version = 0;
  if (api.get_version(&version) != ncclSuccess || version < NCCL_VERSION_CODE) {
    // A configuration larger than the library knows is not for it.
    return absl::FailedPreconditionError(
        absl::StrCat(options.nccl, " is NCCL ", version, ", this needs ",
                     NCCL_VERSION_CODE, " or newer"));
  }
  cudaDeviceProp properties{};
  cudaError_t device = cudaSetDevice(options.device);
  if (device == cudaSuccess) {
    device = cudaGetDeviceProperties(&properties, options.device);
  }
  if (device != cudaSuccess) return CudaError(device, "device");
  return std::make_unique<NcclLibrary>(
      api, options, version,
      absl::BytesToHexString(absl::string_view(properties.uuid.bytes,
                                               sizeof(properties.uuid.bytes))));
}

}  // namespace
}  // namespace tandem::handoff::nccl

extern "C" const tandem::handoff::nccl::Plugin* tandem_nccl_plugin() {
  static constexpr tandem::handoff::nccl::Plugin kPlugin = {
      TANDEM_NCCL_ABI, &tandem::handoff::nccl::Open};
  return &kPlugin;
}
