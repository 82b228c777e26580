// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/testing/host_device.h"

#include <cstring>
#include <deque>
#include <map>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/mutex.h"
#include "kernels/cuda/emulator/emulator.h"

namespace tandem::kernels::cuda::testing {
namespace {

inline constexpr size_t kAlignment = 256;  // as cudaMalloc's

class HostDevice final : public Device {
 public:
  explicit HostDevice(const HostDeviceOptions& options)
      : facts_{.name = absl::StrCat("emulated (sm_", options.generation, ")"),
               .generation = options.generation,
               .multiprocessors = options.multiprocessors,
               .shared_bytes = options.shared_bytes,
               .total_bytes = options.total_bytes},
        broken_(options.broken),
        captures_left_(options.most_captures),
        thread_([this] { Serve(); }) {}

  ~HostDevice() override {
    {
      MutexLock lock(&mutex_);
      stop_ = true;
      changed_.NotifyAll();
    }
    thread_.join();
  }

  const DeviceFacts& facts() const override { return facts_; }
  void Enter() override {}

  absl::StatusOr<std::byte*> Allocate(size_t bytes) override {
    {
      MutexLock lock(&mutex_);
      if (used_ + bytes > facts_.total_bytes) {
        return absl::ResourceExhaustedError(
            absl::StrCat(facts_.name, ": no ", bytes, " bytes (",
                         facts_.total_bytes - used_, " are free)"));
      }
      used_ += bytes;
    }
    return New(bytes);
  }
  void Free(std::byte* data, size_t bytes) override {
    {
      MutexLock lock(&mutex_);
      used_ -= bytes;
    }
    Delete(data);
  }
  absl::StatusOr<std::byte*> AllocateHost(size_t bytes) override {
    return New(bytes);
  }
  void FreeHost(std::byte* data) override { Delete(data); }

  absl::Status RegisterHost(std::byte* data, size_t bytes) override {
    MutexLock lock(&mutex_);
    if (!reached_.emplace(data, bytes).second) {
      return absl::AlreadyExistsError("registered already");
    }
    return absl::OkStatus();
  }
  void UnregisterHost(std::byte* data) override {
    MutexLock lock(&mutex_);
    reached_.erase(data);
  }

  size_t FreeBytes() override {
    MutexLock lock(&mutex_);
    return facts_.total_bytes - used_;
  }
  size_t UsedBytes() const override {
    MutexLock lock(&mutex_);
    return used_;
  }

  bool Reaches(const void* data) override {
    const auto* const at = static_cast<const std::byte*>(data);
    MutexLock lock(&mutex_);
    auto after = reached_.upper_bound(at);
    if (after == reached_.begin()) return false;
    --after;
    return at < after->first + after->second;
  }

  absl::StatusOr<void*> NewStream(bool /*urgent*/) override {
    return new HeldStream;
  }
  void DestroyStream(void* stream) override {
    {
      MutexLock lock(&mutex_);
      last_call_.erase(stream);
    }
    delete static_cast<HeldStream*>(stream);
  }
  int Synchronize(void* stream) override {
    const int error = Flush(stream);
    MutexLock lock(&mutex_);
    while (!calls_.empty() || running_) changed_.Wait(&mutex_);
    return error;
  }
  int ErrorOf(void* /*stream*/) override { return broken() ? kBroken : 0; }
  int Copy(void* stream, void* to, const void* from, size_t bytes) override {
    const int error = FlushBehindCalls(stream);
    std::memcpy(to, from, bytes);
    return error;
  }
  int Zero(void* stream, void* data, size_t bytes) override {
    const int error = FlushBehindCalls(stream);
    std::memset(data, 0, bytes);
    return error;
  }
  int HostCall(void* stream, void (*call)(void*), void* argument) override {
    const int error = Flush(stream);
    MutexLock lock(&mutex_);
    calls_.emplace_back(call, argument);
    last_call_[stream] = ++calls_made_;
    changed_.NotifyAll();
    return error;
  }

  absl::StatusOr<void*> NewEvent() override { return this; }
  void DestroyEvent(void* /*event*/) override {}
  int Record(void* /*event*/, void* stream) override {
    return FlushBehindCalls(stream);
  }
  int Wait(void* stream, void* /*event*/) override { return Flush(stream); }

  int BeginCapture(void* stream) override {
    const int error = Flush(stream);
    if (--captures_left_ < 0) return kRefused;
    static_cast<HeldStream*>(stream)->Record(new Graph);
    return error;
  }
  absl::StatusOr<void*> EndCapture(void* stream) override {
    auto* const held = static_cast<HeldStream*>(stream);
    Graph* const graph = held->recorded();
    held->Record(nullptr);
    if (graph == nullptr) return absl::InternalError("no capture");
    return graph;
  }
  int LaunchGraph(void* stream, void* graph) override {
    for (const emulator::Task& task : *static_cast<Graph*>(graph)) {
      const int error = static_cast<HeldStream*>(stream)->Launch(task);
      if (error != 0) return error;
    }
    return 0;
  }
  void DestroyGraph(void* graph) override { delete static_cast<Graph*>(graph); }

  std::string ErrorText(int error) const override {
    return error == kEmulatorFault ? emulator::LastFault()
                                   : absl::StrCat("error ", error);
  }

 private:
  using HeldStream = emulator::HeldStream;
  using Graph = std::vector<emulator::Task>;
  static constexpr int kRefused = 900;  // cudaErrorStreamCaptureUnsupported
  static constexpr int kBroken = 700;   // cudaErrorIllegalAddress

  bool broken() const { return broken_ != nullptr && *broken_; }

  int Flush(void* stream) {
    if (broken()) return kBroken;
    auto* const held = static_cast<HeldStream*>(stream);
    // No graph holds anything but launches here.
    return held->recorded() != nullptr ? kRefused : held->Flush();
  }

  // A stream's operations wait for its host calls. (Kernels behind a call do
  // not here; no queue has any.)
  int FlushBehindCalls(void* stream) {
    {
      MutexLock lock(&mutex_);
      const auto last = last_call_.find(stream);
      while (last != last_call_.end() && calls_ended_ < last->second) {
        changed_.Wait(&mutex_);
      }
    }
    return Flush(stream);
  }

  std::byte* New(size_t bytes) {
    auto* const data = static_cast<std::byte*>(
        ::operator new (bytes, std::align_val_t{kAlignment}));
    std::memset(data, 0, bytes);
    MutexLock lock(&mutex_);
    reached_[data] = bytes;
    return data;
  }
  void Delete(std::byte* data) {
    {
      MutexLock lock(&mutex_);
      reached_.erase(data);
    }
    ::operator delete (data, std::align_val_t{kAlignment});
  }

  void Serve() {
    MutexLock lock(&mutex_);
    for (;;) {
      while (calls_.empty() && !stop_) changed_.Wait(&mutex_);
      if (calls_.empty()) return;
      const auto [call, argument] = calls_.front();
      calls_.pop_front();
      running_ = true;
      mutex_.Unlock();
      if (!broken()) call(argument);
      mutex_.Lock();
      running_ = false;
      ++calls_ended_;
      changed_.NotifyAll();
    }
  }

  const DeviceFacts facts_;
  const std::atomic<bool>* const broken_;
  int captures_left_;  // of one thread at a time
  mutable Mutex mutex_;
  CondVar changed_;
  std::map<const std::byte*, size_t> reached_ ABSL_GUARDED_BY(mutex_);
  size_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<std::pair<void (*)(void*), void*>> calls_ ABSL_GUARDED_BY(mutex_);
  std::map<void*, uint64_t> last_call_ ABSL_GUARDED_BY(mutex_);  // by stream
  uint64_t calls_made_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t calls_ended_ ABSL_GUARDED_BY(mutex_) = 0;
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Device> NewHostDevice(const HostDeviceOptions& options) {
  return std::make_unique<HostDevice>(options);
}

absl::StatusOr<std::unique_ptr<Backend>> NewEmulatedBackend(
    const CudaOptions& options, const HostDeviceOptions& device) {
  return NewCudaBackend(options, NewHostDevice(device));
}

}  // namespace tandem::kernels::cuda::testing
