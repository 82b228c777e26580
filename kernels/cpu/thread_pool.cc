// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "common/available_cpus.h"
#include "kernels/cpu/float_env.h"

namespace tandem::kernels::cpu {
namespace {

// Address space only: a process that cannot map this cannot run at all.
DeviceMemory MapScratch(size_t bytes) {
  absl::StatusOr<DeviceMemory> memory = DeviceMemory::Make(HostMemory(), bytes);
  if (!memory.ok()) {
    std::fprintf(stderr, "kernels: %s\n",
                 std::string(memory.status().message()).c_str());
    std::abort();
  }
  return *std::move(memory);
}

}  // namespace

ThreadPool::ThreadPool(int threads, std::chrono::nanoseconds spin)
    : spin_(threads <= AvailableCpus() ? spin : std::chrono::nanoseconds(0)),
      team_scratch_(MapScratch(kTeamScratchBytes)),
      places_(std::make_unique<Place[]>(static_cast<size_t>(threads))) {
  scratch_.reserve(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) {
    scratch_.push_back(MapScratch(kMemberScratchBytes));
  }
  for (int i = 1; i < threads; ++i) {
    members_.emplace_back([this, i] { Member(i); });
  }
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(&in_use_);
    stop_ = true;
    round_.fetch_add(1);
    forked_.Wake();
  }
  for (std::thread& member : members_) member.join();
}

void ThreadPool::Fork(absl::FunctionRef<void(int)> body) {
  if (members_.empty()) {
    body(0);
    return;
  }
  body_ = &body;
  places_[0].Note();
  const uint64_t finished = (round_.fetch_add(1) + 1) * members();
  forked_.Wake();
  body(0);
  joined_.Await(
      spin_, [&] { return finished_.load() == finished; },
      [this] {
        return std::any_of(places_.get() + 1, places_.get() + threads(),
                           [](const Place& place) { return place.IsHere(); });
      });
}

void ThreadPool::Team::ForEach(int tasks,
                               absl::FunctionRef<void(int, int)> body) {
  if (tasks <= 1) {
    if (tasks == 1) body(0, 0);
    return;
  }
  std::atomic<int> next{0};
  Run([&](int member) {
    for (;;) {
      const int task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks) return;
      body(task, member);
    }
  });
}

void ThreadPool::Member(int index) {
  pthread_setname_np(pthread_self(), "kernels-member");
  FlushDenormals();
  uint64_t seen = 0;
  for (;;) {
    forked_.Await(
        spin_, [&] { return round_.load() != seen; },
        [this] { return places_[0].IsHere(); });
    places_[static_cast<size_t>(index)].Note();
    // One round at a time: the next starts only when all have finished.
    ++seen;
    if (stop_) return;
    (*body_)(index);
    if (finished_.fetch_add(1) + 1 == seen * members()) joined_.Wake();
  }
}

}  // namespace tandem::kernels::cpu
