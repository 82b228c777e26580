// SPDX-License-Identifier: Apache-2.0
// Hopper's warpgroup step in every width that the probe asks for, operands in
// shared memory or A in registers. device/wgmma.h has what kernels use, and
// describes the layouts.

#ifndef TANDEM_TESTS_KERNELS_CUDA_PROBE_WGMMA_FORMS_H_
#define TANDEM_TESTS_KERNELS_CUDA_PROBE_WGMMA_FORMS_H_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/device/wgmma.h"

namespace tandem::kernels::cuda {

#ifdef __CUDACC__

#if TANDEM_WGMMA
#define PROBE_ASM(text) asm volatile text
#else
#define PROBE_ASM(text) static_cast<void>(0)
#endif

// Operands by number, sixteen at a time, and as outputs.
#define PROBE_REGISTERS_0            \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define PROBE_REGISTERS_1                    \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define PROBE_REGISTERS_2                    \
  "%32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define PROBE_REGISTERS_3                    \
  "%48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define PROBE_REGISTERS_4                    \
  "%64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79"
#define PROBE_REGISTERS_5                    \
  "%80, %81, %82, %83, %84, %85, %86, %87, " \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define PROBE_REGISTERS_6                        \
  "%96, %97, %98, %99, %100, %101, %102, %103, " \
  "%104, %105, %106, %107, %108, %109, %110, %111"
#define PROBE_REGISTERS_7                            \
  "%112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define PROBE_D1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define PROBE_D2(i) PROBE_D1(i), PROBE_D1(i + 1)
#define PROBE_D4(i) PROBE_D2(i), PROBE_D2(i + 2)
#define PROBE_D8(i) PROBE_D4(i), PROBE_D4(i + 4)
#define PROBE_D16(i) PROBE_D8(i), PROBE_D8(i + 8)

#define PROBE_SHARED_8(type)                                           \
  PROBE_ASM(                                                           \
      ("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                         \
       "wgmma.mma_async.sync.aligned.m64n8k16.f32." type "." type " {" \
       "%0, %1, %2, %3"                                                \
       "}, %4, %5, p, 1, 1, 0, 0;}"                                    \
       : PROBE_D1(0)                                                   \
       : "l"(a), "l"(b)))
#define PROBE_HELD_8(type)                                             \
  PROBE_ASM(                                                           \
      ("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                         \
       "wgmma.mma_async.sync.aligned.m64n8k16.f32." type "." type " {" \
       "%0, %1, %2, %3"                                                \
       "}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;}"                         \
       : PROBE_D1(0)                                                   \
       : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)))

#define PROBE_SHARED_16(type)                                           \
  PROBE_ASM(                                                            \
      ("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                          \
       "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type " {" \
       "%0, %1, %2, %3, %4, %5, %6, %7"                                 \
       "}, %8, %9, p, 1, 1, 0, 0;}"                                     \
       : PROBE_D2(0)                                                    \
       : "l"(a), "l"(b)))
#define PROBE_HELD_16(type)                                             \
  PROBE_ASM(                                                            \
      ("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                          \
       "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type " {" \
       "%0, %1, %2, %3, %4, %5, %6, %7"                                 \
       "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;}"                       \
       : PROBE_D2(0)                                                    \
       : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)))

#define PROBE_SHARED_32(type)                                      \
  PROBE_ASM(                                                       \
      ("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                     \
       "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type \
       " {" PROBE_REGISTERS_0 "}, %16, %17, p, 1, 1, 0, 0;}"       \
       : PROBE_D4(0)                                               \
       : "l"(a), "l"(b)))
#define PROBE_HELD_32(type)                                                \
  PROBE_ASM(                                                               \
      ("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                             \
       "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type         \
       " {" PROBE_REGISTERS_0 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}" \
       : PROBE_D4(0)                                                       \
       : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)))

#define PROBE_SHARED_64(type)                                      \
  PROBE_ASM(                                                       \
      ("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                     \
       "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type \
       " {" PROBE_REGISTERS_0 ", " PROBE_REGISTERS_1               \
       "}, %32, %33, p, 1, 1, 0, 0;}"                              \
       : PROBE_D8(0)                                               \
       : "l"(a), "l"(b)))
#define PROBE_HELD_64(type)                                        \
  PROBE_ASM(                                                       \
      ("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                     \
       "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type \
       " {" PROBE_REGISTERS_0 ", " PROBE_REGISTERS_1               \
       "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"                \
       : PROBE_D8(0)                                               \
       : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)))

#define PROBE_SHARED_128(type)                                              \
  PROBE_ASM(                                                                \
      ("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                              \
       "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type         \
       " {" PROBE_REGISTERS_0 ", " PROBE_REGISTERS_1 ", " PROBE_REGISTERS_2 \
       ", " PROBE_REGISTERS_3 "}, %64, %65, p, 1, 1, 0, 0;}"                \
       : PROBE_D16(0)                                                       \
       : "l"(a), "l"(b)))
#define PROBE_HELD_128(type)                                                \
  PROBE_ASM(                                                                \
      ("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                              \
       "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type         \
       " {" PROBE_REGISTERS_0 ", " PROBE_REGISTERS_1 ", " PROBE_REGISTERS_2 \
       ", " PROBE_REGISTERS_3 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;}"  \
       : PROBE_D16(0)                                                       \
       : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)))

#define PROBE_SHARED_256(type)                                              \
  PROBE_ASM(                                                                \
      ("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                              \
       "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type         \
       " {" PROBE_REGISTERS_0 ", " PROBE_REGISTERS_1 ", " PROBE_REGISTERS_2 \
       ", " PROBE_REGISTERS_3 ", " PROBE_REGISTERS_4 ", " PROBE_REGISTERS_5 \
       ", " PROBE_REGISTERS_6 ", " PROBE_REGISTERS_7                        \
       "}, %128, %129, p, 1, 1, 0, 0;}"                                     \
       : PROBE_D16(0), PROBE_D16(16)                                        \
       : "l"(a), "l"(b)))
#define PROBE_HELD_256(type)                                                \
  PROBE_ASM(                                                                \
      ("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                              \
       "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type         \
       " {" PROBE_REGISTERS_0 ", " PROBE_REGISTERS_1 ", " PROBE_REGISTERS_2 \
       ", " PROBE_REGISTERS_3 ", " PROBE_REGISTERS_4 ", " PROBE_REGISTERS_5 \
       ", " PROBE_REGISTERS_6 ", " PROBE_REGISTERS_7                        \
       "}, {%128, %129, %130, %131}, %132, p, 1, 1, 0;}"                    \
       : PROBE_D16(0), PROBE_D16(16)                                        \
       : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)))

#define PROBE_FORM(tokens)                                                    \
  template <typename T>                                                       \
  TANDEM_DEVICE void WgmmaShared(Grid&, float(&d)[tokens / 8][4], uint64_t a, \
                                 uint64_t b) {                                \
    if constexpr (std::is_same_v<T, BFloat16>) {                              \
      PROBE_SHARED_##tokens("bf16");                                          \
    } else {                                                                  \
      PROBE_SHARED_##tokens("f16");                                           \
    }                                                                         \
  }                                                                           \
  template <typename T>                                                       \
  TANDEM_DEVICE void WgmmaHeld(Grid&, float(&d)[tokens / 8][4],               \
                               const uint32_t(&a)[4], uint64_t b,             \
                               const std::byte*) {                            \
    if constexpr (std::is_same_v<T, BFloat16>) {                              \
      PROBE_HELD_##tokens("bf16");                                            \
    } else {                                                                  \
      PROBE_HELD_##tokens("f16");                                             \
    }                                                                         \
  }
PROBE_FORM(8)
PROBE_FORM(16)
PROBE_FORM(32)
PROBE_FORM(64)
PROBE_FORM(128)
PROBE_FORM(256)
#undef PROBE_FORM

#else  // the emulator

template <typename T, int tiles>
void WgmmaShared(Grid& g, float (&d)[tiles][4], uint64_t a, uint64_t b) {
  WgmmaAny(g, &d[0][0], tiles * 8, a, nullptr, b, std::is_same_v<T, Half>,
           TANDEM_HERE);
}

// A warp's fragment of A is that of mma.sync; `tokens` are b's rows, 128
// swizzled bytes each, at this step's inputs.
template <typename T, int tiles>
void WgmmaHeld(Grid& g, float (&d)[tiles][4], const uint32_t (&a)[4],
               uint64_t b, const std::byte* tokens) {
  const int step =
      static_cast<int>((b - WgmmaDescriptor(SharedAddress(g, tokens))) / 2);
  for (int n = 0; n < tiles; ++n) {
    uint32_t pairs[2];
    const int row = n * 8 + g.lane() / 4;
    for (int i = 0; i < 2; ++i) {
      const int chunk = (step * 2 + i) ^ (row % 8);
      std::memcpy(&pairs[i], tokens + row * 128 + chunk * 16 + g.lane() % 4 * 4,
                  4);
    }
    MatrixStep<T>(g, d[n], a, pairs);
  }
}

#endif

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_TESTS_KERNELS_CUDA_PROBE_WGMMA_FORMS_H_
