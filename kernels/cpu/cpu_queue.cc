// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/cpu_queue.h"

#include <pthread.h>

#include "kernels/cpu/float_env.h"

namespace tandem::kernels::cpu {

CpuQueue::CpuQueue(std::string_view name, std::chrono::nanoseconds spin,
                   size_t floats)
    : name_(name),
      spin_(spin),
      slots_(std::make_unique<Slot[]>(kSlots)),
      scratch_(std::make_unique<std::byte[]>(kScratchBytes)),
      floats_(std::make_unique_for_overwrite<float[]>(floats)),
      num_floats_(floats),
      thread_([this] { Loop(); }) {}

CpuQueue::~CpuQueue() {
  stop_.store(true);
  work_.Wake();
  thread_.join();
}

void CpuQueue::Callback(absl::AnyInvocable<void()> callback) {
  Put([callback = std::move(callback)]() mutable { callback(); });
}

void CpuQueue::WaitFor(Queue& other) {
  CpuQueue* const source = static_cast<CpuQueue*>(&other);
  const uint64_t count = source->submitted_.load();
  Put([source, count] { source->AwaitFinished(count); });
}

void CpuQueue::Synchronize() { AwaitFinished(submitted_.load()); }

CpuQueue::Slot& CpuQueue::FreeSlot() {
  const uint64_t index = submitted_.load();
  if (index - finished_.load() >= kSlots) AwaitFinished(index - kSlots + 1);
  return slots_[index % kSlots];
}

void CpuQueue::Submit() {
  submitted_.fetch_add(1);
  work_.Wake();
}

void CpuQueue::AwaitFinished(uint64_t count) {
  // The other side is computing: sleep rather than take its core. What is
  // awaited is said anew before each look, since whoever is woken clears it.
  progress_.Await(std::chrono::nanoseconds(0), [&] {
    uint64_t soonest = awaited_.load();
    while (count < soonest && !awaited_.compare_exchange_weak(soonest, count)) {
    }
    return finished_.load() >= count;
  });
}

void CpuQueue::Loop() {
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  FlushDenormals();
  uint64_t next = 0;
  for (;;) {
    work_.Await(spin_,
                [&] { return submitted_.load() != next || stop_.load(); });
    if (submitted_.load() == next) return;  // stopped, and nothing is left
    Slot& slot = slots_[next % kSlots];
    slot.run(slot.storage);
    finished_.store(++next);
    // To wake a sleeper for nothing takes as long as a small closure does.
    if (next < awaited_.load()) continue;
    awaited_.store(kNothing);
    progress_.Wake();
  }
}

}  // namespace tandem::kernels::cpu
