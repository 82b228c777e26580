// SPDX-License-Identifier: Apache-2.0
// A queue is two streams. Work goes on the first, the host's work too.
// Callbacks go on the second, behind an event, so that the device goes on with
// the next step while the host hears of the last.
//
// A device that has failed runs no host call any more: nobody who waits for one
// would hear of it. So a thread asks for the streams' errors once a second.
//
// What an operation must hand to the host apart from copies (a digest) takes
// a slot: device memory that kernels add to, pinned memory that it is copied
// to, and a host call that carries it from there to where it is wanted.

#ifndef TANDEM_KERNELS_CUDA_CUDA_QUEUE_H_
#define TANDEM_KERNELS_CUDA_CUDA_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "kernels/backend.h"
#include "kernels/cuda/device_api.h"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {

// Device memory, or pinned host memory, of one owner.
class Memory final : public Buffer {
 public:
  static absl::StatusOr<std::unique_ptr<Memory>> OnDevice(Device& device,
                                                          size_t bytes);
  static absl::StatusOr<std::unique_ptr<Memory>> OnHost(Device& device,
                                                        size_t bytes);
  ~Memory() override;

 private:
  Memory(Device& device, std::byte* data, size_t size, bool host)
      : Buffer(data, size), device_(device), host_(host) {}

  Device& device_;
  const bool host_;
};

// A broken device cannot be mended from within (its context is lost): ends
// the process with one line, so that it is restarted.
[[noreturn]] void Die(std::string_view what, std::string_view why);

class CudaQueue final : public Queue {
 public:
  explicit CudaQueue(Device& device, bool urgent);
  ~CudaQueue() override;
  CudaQueue(const CudaQueue&) = delete;
  CudaQueue& operator=(const CudaQueue&) = delete;

  void Callback(absl::AnyInvocable<void()> callback) override;
  void HostWork(absl::AnyInvocable<void()> work) override;
  void WaitFor(Queue& other) override;
  void Synchronize() override;

  // Where the caller's launches go; makes the device the calling thread's.
  Stream stream();

  void Copy(void* to, const void* from, size_t bytes);

  // Dies unless `error` is 0.
  void Check(int error, std::string_view what);

  // Backend's, as CUDA graphs.
  absl::Status Record(uint64_t key, absl::FunctionRef<void()> record);
  bool Replay(uint64_t key);

  // A zeroed digest in device memory. SendDigest puts on the queue that it
  // reaches `to`, and then frees it.
  KvDigest* NewDigest();
  void SendDigest(KvDigest* digest, KvDigest* to);

  // Memory for kernels to work in, one after the other; zeroed when it is
  // taken. What was too small is kept as long as the queue: freeing may wait
  // for the whole device, and so for what waits for the caller. Sizes double,
  // so it is less than what has replaced it, and graphs may go on using it.
  enum Scratch {
    kAttention,
    kSampling,
    kStaging,
    kCodes,
    kExperts,
    kScratches
  };
  std::byte* scratch(Scratch which, size_t bytes);
  // Takes over memory that was set aside.
  void Adopt(Scratch which, std::unique_ptr<Memory> memory);
  bool has(Scratch which) const { return scratch_[which] != nullptr; }

 private:
  static constexpr int kDigests = 256;  // on their way at one time

  void DropGraphs();

  void Watch();  // watch_'s

  void Call(void* stream, absl::AnyInvocable<void()> call);

  template <typename T>
  T Must(absl::StatusOr<T> value, std::string_view what);

  Device& device_;
  bool after_kernel_ = false;  // Stream::after_kernel of the next launch
  void* const stream_;
  void* const callbacks_;
  void* const done_;    // of stream_, for callbacks_
  void* const waited_;  // of other queues
  std::unique_ptr<Memory> scratch_[kScratches];
  std::vector<std::unique_ptr<Memory>> outgrown_;  // of scratch_
  std::map<uint64_t, void*> graphs_;
  bool capturing_ = false;
  int capture_error_ = 0;
  const std::unique_ptr<Memory> device_digests_;  // [kDigests]
  const std::unique_ptr<Memory> host_digests_;    // [kDigests], pinned
  Mutex mutex_;
  std::vector<int> free_digests_ ABSL_GUARDED_BY(mutex_);
  Mutex watch_mutex_;  // held while launches are captured, too
  CondVar closing_;
  bool closed_ ABSL_GUARDED_BY(watch_mutex_) = false;
  std::thread watch_;
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_CUDA_QUEUE_H_
