// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/emulator/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define TANDEM_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TANDEM_ASAN 1
#endif
#endif
#ifndef TANDEM_ASAN
#define TANDEM_ASAN 0
#endif

#if TANDEM_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Saves the registers that a call keeps and goes on where `to` was saved.
extern "C" void tandem_fiber_switch(void** from, void* to);
asm(R"(
.text
.globl tandem_fiber_switch
.type tandem_fiber_switch, @function
tandem_fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tandem_fiber_switch, .-tandem_fiber_switch
)");

namespace tandem::kernels::cuda::emulator {
namespace {

// Touched pages alone take memory; AddressSanitizer widens frames.
constexpr size_t kStackBytes = size_t{TANDEM_ASAN ? 512 : 128} * 1024;

thread_local Fiber* entering = nullptr;

// Stacks that ended fibers of this thread left: each launch has hundreds of
// threads, and mapping and first touching their stacks took half of its time.
class Stacks {
 public:
  Stacks() = default;
  ~Stacks() {
    for (std::byte* const stack : free_) munmap(stack, kStackBytes);
  }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  std::byte* Take() {
    if (free_.empty()) {
      void* const memory =
          mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) std::abort();
      return static_cast<std::byte*>(memory);
    }
    std::byte* const stack = free_.back();
    free_.pop_back();
    return stack;
  }
  void Give(std::byte* stack) { free_.push_back(stack); }

 private:
  std::vector<std::byte*> free_;
};

Stacks& StacksOfThread() {
  thread_local Stacks stacks;
  return stacks;
}

}  // namespace

Fiber::Fiber() : stack_(StacksOfThread().Take()) {}

Fiber::~Fiber() { StacksOfThread().Give(stack_); }

void Fiber::Start(void (*entry)(void*), void* argument) {
  entry_ = entry;
  argument_ = argument;
  done_ = false;
  fake_stack_ = nullptr;
#if TANDEM_ASAN
  ASAN_UNPOISON_MEMORY_REGION(stack_, kStackBytes);
#endif
  // As if Begin had been called from nowhere and had then switched away.
  void** top = reinterpret_cast<void**>(stack_ + kStackBytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&Fiber::Begin);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  own_ = top;
}

void Fiber::Enter() {
  entering = this;
#if TANDEM_ASAN
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, stack_, kStackBytes);
  tandem_fiber_switch(&caller_, own_);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  tandem_fiber_switch(&caller_, own_);
#endif
}

void Fiber::Leave() {
#if TANDEM_ASAN
  __sanitizer_start_switch_fiber(done_ ? nullptr : &fake_stack_, caller_bottom_,
                                 caller_size_);
  tandem_fiber_switch(&own_, caller_);
  __sanitizer_finish_switch_fiber(fake_stack_, &caller_bottom_, &caller_size_);
#else
  tandem_fiber_switch(&own_, caller_);
#endif
}

void Fiber::Begin() {
  Fiber* const self = entering;
#if TANDEM_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &self->caller_bottom_,
                                  &self->caller_size_);
#endif
  self->entry_(self->argument_);
  self->done_ = true;
  self->Leave();
  std::abort();  // nobody enters what is done
}

}  // namespace tandem::kernels::cuda::emulator
