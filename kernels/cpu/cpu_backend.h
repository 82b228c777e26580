// SPDX-License-Identifier: Apache-2.0
// The backend for x86-64 CPUs with AVX2 or AVX-512, chosen at run time; both
// give the same bits.

#ifndef TANDEM_KERNELS_CPU_CPU_BACKEND_H_
#define TANDEM_KERNELS_CPU_CPU_BACKEND_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/allocator.h"

namespace tandem::kernels {

inline constexpr int kMaxCpuThreads = 256;

// How weights and KV are read from memory (kernels/cpu/kernel_table.h): as
// suits this CPU's maker, or as suits Intel's or AMD's, whose it may not be.
enum class CpuFetching { kAuto, kIntel, kAmd };

// What chains with bf16 and fp8 weights, and with a bf16 KV cache, read their
// inputs as. Each is one formula, with the same bits on every CPU.
enum class CpuInputs {
  kF32,
  // Rounded to bf16, two at a time (kernels/cpu/matmul_bf16.cc): with
  // vdpbf16ps twice the arithmetic on AMD's.
  kBf16,
  // Rounded to bf16, in groups of 32 (kernels/cpu/matmul_tiles.cc): with AMX
  // many times the arithmetic.
  kBf16Amx,
};

struct CpuOptions {
  // Threads that compute, the queue's own included. 0: one per CPU that this
  // process may run on.
  int threads = 0;
  // How long an idle thread waits awake before it sleeps. Ignored where there
  // are fewer CPUs than threads.
  int spin_microseconds = 50;
  // "auto", or a name that MakeKernelTable knows.
  std::string instruction_set = "auto";
  CpuInputs inputs = CpuInputs::kF32;
  // No bit depends on it: for tests and measurements.
  CpuFetching fetching = CpuFetching::kAuto;
  // Source of all memory that operations touch; must outlive the backend and
  // everything made by it. Null: anonymous memory.
  cpu::DeviceAllocator* allocator = nullptr;
};

// FAILED_PRECONDITION: this CPU lacks the instruction set (AVX2 and FMA at
// the least). INVALID_ARGUMENT: an option is out of range.
absl::StatusOr<std::unique_ptr<Backend>> NewCpuBackend(
    const CpuOptions& options);

// Bytes that a block of a CPU's cache takes in all layers: more than
// bytes_per_position() says where blocks or heads are padded
// (kernels/cpu/kv_layout.h).
int64_t CpuKvBlockBytes(const KvShape& shape);

}  // namespace tandem::kernels

#endif  // TANDEM_KERNELS_CPU_CPU_BACKEND_H_
