// SPDX-License-Identifier: Apache-2.0
// A thread that runs closures in order from a ring that was allocated once.
// Submitting constructs the closure in its slot: no allocation per operation.
// A full ring blocks the submitter.

#ifndef TANDEM_KERNELS_CPU_CPU_QUEUE_H_
#define TANDEM_KERNELS_CPU_CPU_QUEUE_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "kernels/backend.h"
#include "kernels/cpu/parking.h"

namespace tandem::kernels::cpu {

class CpuQueue final : public Queue {
 public:
  static constexpr size_t kSlots = 1024;
  static constexpr size_t kClosureBytes = 240;
  // Memory that the queue's closures may use, one at a time.
  static constexpr size_t kScratchBytes = size_t{1} << 20;

  // `floats`: what Floats is to have from the start.
  CpuQueue(std::string_view name, std::chrono::nanoseconds spin,
           size_t floats = 0);
  ~CpuQueue() override;
  CpuQueue(const CpuQueue&) = delete;
  CpuQueue& operator=(const CpuQueue&) = delete;

  void Callback(absl::AnyInvocable<void()> callback) override;
  void HostWork(absl::AnyInvocable<void()> work) override {
    Callback(std::move(work));
  }
  void WaitFor(Queue& other) override;
  void Synchronize() override;

  std::byte* scratch() const { return scratch_.get(); }
  // As much as one of them asks for, from within it; grows, and stays.
  float* Floats(size_t count) {
    if (count > num_floats_) {
      floats_ = std::make_unique_for_overwrite<float[]>(count);
      num_floats_ = count;
    }
    return floats_.get();
  }

  // Puts closure() on the queue.
  template <typename Closure>
  void Put(Closure closure) {
    static_assert(sizeof(Closure) <= kClosureBytes);
    static_assert(alignof(Closure) <= alignof(std::max_align_t));
    Slot& slot = FreeSlot();
    std::construct_at(reinterpret_cast<Closure*>(slot.storage),
                      std::move(closure));
    slot.run = [](std::byte* storage) {
      Closure* stored = reinterpret_cast<Closure*>(storage);
      (*stored)();
      std::destroy_at(stored);
    };
    Submit();
  }

 private:
  struct Slot {
    alignas(std::max_align_t) std::byte storage[kClosureBytes];
    void (*run)(std::byte* storage);
  };

  Slot& FreeSlot();
  void Submit();
  void AwaitFinished(uint64_t count);
  void Loop();

  const std::string name_;
  const std::chrono::nanoseconds spin_;
  const std::unique_ptr<Slot[]> slots_;
  const std::unique_ptr<std::byte[]> scratch_;
  std::unique_ptr<float[]> floats_;  // of the thread that runs the closures
  size_t num_floats_ = 0;
  // Closures put on the queue, and run, since the start.
  alignas(64) std::atomic<uint64_t> submitted_{0};
  alignas(64) std::atomic<uint64_t> finished_{0};
  // The smallest count that a sleeper waits for, or a smaller one.
  static constexpr uint64_t kNothing = std::numeric_limits<uint64_t>::max();
  std::atomic<uint64_t> awaited_{kNothing};
  std::atomic<bool> stop_{false};
  Parking work_;
  Parking progress_;
  std::thread thread_;
};

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_CPU_QUEUE_H_
