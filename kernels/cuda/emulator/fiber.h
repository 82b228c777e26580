// SPDX-License-Identifier: Apache-2.0
// A function on a stack of its own that can be left and entered again: the
// emulator's threads. Switching is a handful of instructions (ucontext makes
// two system calls of it). x86-64.

#ifndef TANDEM_KERNELS_CUDA_EMULATOR_FIBER_H_
#define TANDEM_KERNELS_CUDA_EMULATOR_FIBER_H_

#include <cstddef>
#include <memory>

namespace tandem::kernels::cuda::emulator {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the next Enter() begin entry(argument). What ran here before is
  // forgotten; nothing of it is destroyed.
  void Start(void (*entry)(void*), void* argument);

  // Runs it until it leaves or ends.
  void Enter();
  // Called on it: goes back to where Enter() was called.
  void Leave();
  bool done() const { return done_; }

 private:
  static void Begin();

  std::byte* stack_;
  void* own_ = nullptr;     // stack pointer while it is not running
  void* caller_ = nullptr;  // of Enter()
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  bool done_ = true;
  // AddressSanitizer's.
  void* fake_stack_ = nullptr;
  const void* caller_bottom_ = nullptr;
  size_t caller_size_ = 0;
};

}  // namespace tandem::kernels::cuda::emulator

#endif  // TANDEM_KERNELS_CUDA_EMULATOR_FIBER_H_
