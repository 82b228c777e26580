// SPDX-License-Identifier: Apache-2.0
// Runs a kernel test on the first GPU. Launches block (CUDA_LAUNCH_BLOCKING),
// and everything that the test allocates from here on, its stack too, is
// pinned host memory, which a GPU reads and writes where it lies: so the
// tests are those of the emulator, object for object.
//
// Ends with 77, ctest's skip, where there is no GPU.

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/device/launch_library.h"
#include "tests/kernels/cuda/where.h"

namespace tandem::kernels::cuda {
namespace {

constexpr int kSkipped = 77;
constexpr size_t kArenaBytes = size_t{1} << 30;  // then plain memory
constexpr size_t kStackBytes = size_t{64} << 20;

// Powers of two, each size with a list of what was given back.
class Arena {
 public:
  void Open(std::byte* begin, size_t bytes) {
    next_ = begin;
    end_ = begin + bytes;
    begin_.store(begin);
  }
  bool holds(const void* p) const {
    const std::byte* const begin = begin_.load();
    return begin != nullptr && p >= begin && p < end_;
  }
  void* New(size_t bytes, size_t alignment) {
    if (begin_.load() == nullptr) return Plain(bytes, alignment);
    const size_t size = std::bit_ceil(std::max({bytes, alignment, kLeast}));
    const int list = std::countr_zero(size);
    std::lock_guard<std::mutex> lock(mutex_);
    if (Free* const free = free_[list]; free != nullptr) {
      free_[list] = free->next;
      return free;
    }
    // Aligned to its size, up to a page; the list's size is kept before it.
    const size_t aligned = std::min(size, size_t{4096});
    auto at = reinterpret_cast<uintptr_t>(next_) + sizeof(size_t);
    at = (at + aligned - 1) / aligned * aligned;
    if (at + size > reinterpret_cast<uintptr_t>(end_)) {
      return Plain(bytes, alignment);
    }
    auto* const p = reinterpret_cast<std::byte*>(at);
    reinterpret_cast<size_t*>(p)[-1] = static_cast<size_t>(list);
    next_ = p + size;
    return p;
  }
  void Delete(void* p) {
    if (!holds(p)) return std::free(p);
    const size_t list = static_cast<size_t*>(p)[-1];
    std::lock_guard<std::mutex> lock(mutex_);
    free_[list] = new (p) Free{free_[list]};
  }

 private:
  struct Free {
    Free* next;
  };
  static constexpr size_t kLeast = 32;
  static void* Plain(size_t bytes, size_t alignment) {
    alignment = std::max(alignment, alignof(std::max_align_t));
    return std::aligned_alloc(alignment,
                              (bytes + alignment - 1) / alignment * alignment);
  }

  std::mutex mutex_;
  std::atomic<std::byte*> begin_{nullptr};
  std::byte* next_ = nullptr;
  std::byte* end_ = nullptr;
  Free* free_[64] = {};
};
constinit Arena arena;
int generation = 0;

void* RunTests(void* result) {
  *static_cast<int*>(result) = RUN_ALL_TESTS();
  return nullptr;
}

int Main(int argc, char** argv) {
  setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  testing::InitGoogleTest(&argc, argv);
  if (testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  auto device = LaunchLibraryDevice();
  if (!device.ok()) {
    std::printf("[  SKIPPED ] every test: %s\n",
                std::string(device.status().message()).c_str());
    return kSkipped;
  }
  const DeviceFacts& facts = (*device)->facts();
  if (facts.generation < 90) {
    std::printf("[  SKIPPED ] every test: %s, expected Hopper or newer\n",
                facts.name.c_str());
    return kSkipped;
  }
  std::printf("device: %s, %d multiprocessors\n", facts.name.c_str(),
              facts.multiprocessors);
  auto memory = (*device)->AllocateHost(kArenaBytes + kStackBytes);
  if (!memory.ok()) {
    std::printf("%s\n", memory.status().ToString().c_str());
    return 1;
  }
  generation = facts.generation;
  arena.Open(*memory + kStackBytes, kArenaBytes);
  pthread_attr_t attributes;
  pthread_t thread;
  int result = 1;
  pthread_attr_init(&attributes);
  pthread_attr_setstack(&attributes, *memory, kStackBytes);
  if (pthread_create(&thread, &attributes, RunTests, &result) != 0) return 1;
  pthread_join(thread, nullptr);
  // What lies in the arena is still named: no destructors.
  std::fflush(nullptr);
  std::_Exit(result);
}

}  // namespace

int DeviceGeneration() { return generation; }

void* ArenaNew(size_t bytes, size_t alignment) {
  void* const p = arena.New(bytes, alignment);
  if (p == nullptr) std::abort();
  return p;
}
void ArenaDelete(void* p) { arena.Delete(p); }

}  // namespace tandem::kernels::cuda

using tandem::kernels::cuda::ArenaDelete;
using tandem::kernels::cuda::ArenaNew;

void* operator new(size_t bytes) { return ArenaNew(bytes, 16); }
void* operator new[](size_t bytes) { return ArenaNew(bytes, 16); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return ArenaNew(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return ArenaNew(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* p) noexcept { ArenaDelete(p); }
void operator delete[](void* p) noexcept { ArenaDelete(p); }
void operator delete(void* p, size_t) noexcept { ArenaDelete(p); }
void operator delete[](void* p, size_t) noexcept { ArenaDelete(p); }
void operator delete(void* p, std::align_val_t) noexcept { ArenaDelete(p); }
void operator delete[](void* p, std::align_val_t) noexcept { ArenaDelete(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept {
  ArenaDelete(p);
}
void operator delete[](void* p, size_t, std::align_val_t) noexcept {
  ArenaDelete(p);
}

int main(int argc, char** argv) {
  return tandem::kernels::cuda::Main(argc, argv);
}
