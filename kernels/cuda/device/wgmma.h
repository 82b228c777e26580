// SPDX-License-Identifier: Apache-2.0
// Hopper's warpgroup matrix instructions (sm_90a), the second operand in
// shared memory: 64 rows x N tokens over 16 inputs, a step of mma.sync. They
// read shared memory after they were issued, through the asynchronous proxy:
// what ordinary stores and cp.async wrote needs a ProxyFence by the writer
// before the barrier, and may not be overwritten until a WgmmaWait.
//
// Operands lie as 1024-byte groups of eight 128-byte rows (64 inputs each)
// with the 128-byte swizzle: chunk c of row r at c ^ (r % 8).

#ifndef TANDEM_KERNELS_CUDA_DEVICE_WGMMA_H_
#define TANDEM_KERNELS_CUDA_DEVICE_WGMMA_H_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/grid.h"

namespace tandem::kernels::cuda {

// Describes an operand at a shared address: rows 128 bytes apart, groups of
// eight 1024 apart, 128-byte swizzle. A step further along the inputs is 32
// bytes, 2 in the descriptor.
TANDEM_DEVICE uint64_t WgmmaDescriptor(uint32_t shared_address) {
  constexpr uint64_t kUnused = 1;  // leading dimension, by the swizzle
  constexpr uint64_t kStride = 1024 / 16;
  constexpr uint64_t kSwizzle128 = 1;
  return (shared_address & 0x3ffffu) >> 4 | kUnused << 16 | kStride << 32 |
         kSwizzle128 << 62;
}

// Describes a second operand whose inputs are rows: [tokens / 64][inputs][64
// tokens], rows of 128 bytes, swizzled, 64 tokens to the next `column_bytes`
// apart. A step further along the inputs is 2048 bytes, 128 in the descriptor.
TANDEM_DEVICE uint64_t WgmmaColumnsDescriptor(uint32_t shared_address,
                                              int column_bytes) {
  constexpr uint64_t kStride = 1024 / 16;
  constexpr uint64_t kSwizzle128 = 1;
  return (shared_address & 0x3ffffu) >> 4 |
         static_cast<uint64_t>(column_bytes / 16) << 16 | kStride << 32 |
         kSwizzle128 << 62;
}

#ifdef __CUDACC__

// Only sm_90a has them; elsewhere the kernels that use them are empty.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TANDEM_WGMMA 1
#else
#define TANDEM_WGMMA 0
#endif

#if TANDEM_WGMMA
#define TANDEM_WGMMA_ASM(text) asm volatile text
#else
#define TANDEM_WGMMA_ASM(text) static_cast<void>(0)
#endif

TANDEM_DEVICE void ProxyFence(Grid&) {
  TANDEM_WGMMA_ASM(("fence.proxy.async.shared::cta;" ::: "memory"));
}
// Before a WgmmaFence, or around a WgmmaWait, which name no registers: what
// makes or uses these ones stays on its side.
TANDEM_DEVICE void WgmmaPin(Grid&, uint32_t (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}
template <int n>
TANDEM_DEVICE void WgmmaPin(Grid&, float (&d)[n][4]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    asm volatile(""
                 : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]),
                   "+f"(d[i][3])::"memory");
  }
}
TANDEM_DEVICE void WgmmaFence(Grid&) {
  TANDEM_WGMMA_ASM(("wgmma.fence.sync.aligned;" ::: "memory"));
}
TANDEM_DEVICE void WgmmaCommit(Grid&) {
  TANDEM_WGMMA_ASM(("wgmma.commit_group.sync.aligned;" ::: "memory"));
}
template <int kPending>
TANDEM_DEVICE void WgmmaWait(Grid&) {
  TANDEM_WGMMA_ASM(("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending)
                    : "memory"));
}

// Of all threads of a warpgroup that needs no more than so many registers,
// or has that many now that others gave theirs back. Multiples of 8.
template <int kRegisters>
TANDEM_DEVICE void GiveRegisters(Grid&) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
TANDEM_DEVICE void TakeRegisters(Grid&) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

#define TANDEM_D1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define TANDEM_D4(i) \
  TANDEM_D1(i), TANDEM_D1(i + 1), TANDEM_D1(i + 2), TANDEM_D1(i + 3)
#define TANDEM_D8(i) TANDEM_D4(i), TANDEM_D4(i + 4)
#define TANDEM_REGISTERS_32                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, " \
  "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
  "%26, %27, %28, %29, %30, %31"
#define TANDEM_REGISTERS_64                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, " \
  "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
  "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63"
#define TANDEM_REGISTERS_128                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, " \
  "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
  "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, " \
  "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, " \
  "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "   \
  "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, " \
  "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d += a * b; d[n][i] as of mma.sync, of tokens [8 n, 8 n + 8). `a` is a
// descriptor, or registers as of mma.sync, each warp its 16 rows; those must
// stay as they are until a WgmmaWait. WgmmaColumnsStep: b is of
// WgmmaColumnsDescriptor.
#define TANDEM_WGMMA_TEXT(n, type, a_and_b) \
  "{.reg .pred p; setp.ne.b32 p, 1, 0;\n"   \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " a_and_b

#define TANDEM_WGMMA_STEP(tokens, registers, a0, a1, a2, a3, b0, ...)        \
  template <typename T>                                                      \
  TANDEM_DEVICE void WgmmaStep(Grid&, float(&d)[tokens / 8][4], uint64_t a,  \
                               uint64_t b) {                                 \
    if constexpr (std::is_same_v<T, BFloat16>) {                             \
      TANDEM_WGMMA_ASM((TANDEM_WGMMA_TEXT(tokens, "bf16",                    \
                                          "{" registers "}, " a0 ", " a1     \
                                          ", p, 1, 1, 0, 0;}")               \
                        : __VA_ARGS__                                        \
                        : "l"(a), "l"(b)));                                  \
    } else {                                                                 \
      TANDEM_WGMMA_ASM((TANDEM_WGMMA_TEXT(tokens, "f16",                     \
                                          "{" registers "}, " a0 ", " a1     \
                                          ", p, 1, 1, 0, 0;}")               \
                        : __VA_ARGS__                                        \
                        : "l"(a), "l"(b)));                                  \
    }                                                                        \
  }                                                                          \
  template <typename T>                                                      \
  TANDEM_DEVICE void WgmmaStep(Grid&, float(&d)[tokens / 8][4],              \
                               const uint32_t(&a)[4], uint64_t b) {          \
    if constexpr (std::is_same_v<T, BFloat16>) {                             \
      TANDEM_WGMMA_ASM(                                                      \
          (TANDEM_WGMMA_TEXT(tokens, "bf16",                                 \
                             "{" registers "}, {" a0 ", " a1 ", " a2 ", " a3 \
                             "}, " b0 ", p, 1, 1, 0;}")                      \
           : __VA_ARGS__                                                     \
           : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)));           \
    } else {                                                                 \
      TANDEM_WGMMA_ASM(                                                      \
          (TANDEM_WGMMA_TEXT(tokens, "f16",                                  \
                             "{" registers "}, {" a0 ", " a1 ", " a2 ", " a3 \
                             "}, " b0 ", p, 1, 1, 0;}")                      \
           : __VA_ARGS__                                                     \
           : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)));           \
    }                                                                        \
  }                                                                          \
  template <typename T>                                                      \
  TANDEM_DEVICE void WgmmaColumnsStep(Grid&, float(&d)[tokens / 8][4],       \
                                      const uint32_t(&a)[4], uint64_t b) {   \
    if constexpr (std::is_same_v<T, BFloat16>) {                             \
      TANDEM_WGMMA_ASM(                                                      \
          (TANDEM_WGMMA_TEXT(tokens, "bf16",                                 \
                             "{" registers "}, {" a0 ", " a1 ", " a2 ", " a3 \
                             "}, " b0 ", p, 1, 1, 1;}")                      \
           : __VA_ARGS__                                                     \
           : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)));           \
    } else {                                                                 \
      TANDEM_WGMMA_ASM(                                                      \
          (TANDEM_WGMMA_TEXT(tokens, "f16",                                  \
                             "{" registers "}, {" a0 ", " a1 ", " a2 ", " a3 \
                             "}, " b0 ", p, 1, 1, 1;}")                      \
           : __VA_ARGS__                                                     \
           : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)));           \
    }                                                                        \
  }
TANDEM_WGMMA_STEP(64, TANDEM_REGISTERS_32, "%32", "%33", "%34", "%35", "%36",
                  TANDEM_D8(0))
TANDEM_WGMMA_STEP(128, TANDEM_REGISTERS_64, "%64", "%65", "%66", "%67", "%68",
                  TANDEM_D8(0), TANDEM_D8(8))
TANDEM_WGMMA_STEP(256, TANDEM_REGISTERS_128, "%128", "%129", "%130", "%131",
                  "%132", TANDEM_D8(0), TANDEM_D8(8), TANDEM_D8(16),
                  TANDEM_D8(24))

#undef TANDEM_D1
#undef TANDEM_D4
#undef TANDEM_D8
#undef TANDEM_REGISTERS_32
#undef TANDEM_REGISTERS_64
#undef TANDEM_REGISTERS_128
#undef TANDEM_WGMMA_TEXT
#undef TANDEM_WGMMA_STEP

#else

#define TANDEM_WGMMA 1

inline void WgmmaPin(Grid&, uint32_t (&)[4]) {}
template <int n>
void WgmmaPin(Grid&, float (&)[n][4]) {}

template <typename T, int n>
void WgmmaStep(Grid& g, float (&d)[n][4], uint64_t a, uint64_t b,
               emulator::Place place = TANDEM_HERE) {
  WgmmaAny(g, &d[0][0], n * 8, a, nullptr, b, std::is_same_v<T, Half>, place);
}
template <typename T, int n>
void WgmmaStep(Grid& g, float (&d)[n][4], const uint32_t (&a)[4], uint64_t b,
               emulator::Place place = TANDEM_HERE) {
  WgmmaAny(g, &d[0][0], n * 8, 0, a, b, std::is_same_v<T, Half>, place);
}
template <typename T, int n>
void WgmmaColumnsStep(Grid& g, float (&d)[n][4], const uint32_t (&a)[4],
                      uint64_t b, emulator::Place place = TANDEM_HERE) {
  WgmmaAny(g, &d[0][0], n * 8, 0, a, b, std::is_same_v<T, Half>, place, true);
}

#endif  // __CUDACC__

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_DEVICE_WGMMA_H_
