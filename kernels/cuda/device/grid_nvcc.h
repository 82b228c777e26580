// SPDX-License-Identifier: Apache-2.0
// grid.h for nvcc: thin wrappers, one instruction each.

#ifndef TANDEM_KERNELS_CUDA_DEVICE_GRID_NVCC_H_
#define TANDEM_KERNELS_CUDA_DEVICE_GRID_NVCC_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device/types.h"
#include "kernels/cuda/launch.h"

#define TANDEM_DEVICE __device__ __forceinline__

namespace tandem::kernels::cuda {

class Grid {
 public:
  TANDEM_DEVICE int thread() const { return static_cast<int>(threadIdx.x); }
  TANDEM_DEVICE int threads() const { return static_cast<int>(blockDim.x); }
  TANDEM_DEVICE int lane() const { return thread() % 32; }
  TANDEM_DEVICE int warp() const { return thread() / 32; }
  TANDEM_DEVICE int block_x() const { return static_cast<int>(blockIdx.x); }
  TANDEM_DEVICE int block_y() const { return static_cast<int>(blockIdx.y); }
  TANDEM_DEVICE int block_z() const { return static_cast<int>(blockIdx.z); }
  TANDEM_DEVICE int grid_x() const { return static_cast<int>(gridDim.x); }
  TANDEM_DEVICE int grid_y() const { return static_cast<int>(gridDim.y); }
  TANDEM_DEVICE int grid_z() const { return static_cast<int>(gridDim.z); }
  TANDEM_DEVICE std::byte* shared() const {
    extern __shared__ __align__(1024) std::byte memory[];
    return memory;
  }
  TANDEM_DEVICE void Barrier() const { __syncthreads(); }
  // Of the kThreads threads of an aligned group; `id` is 1 .. 15.
  template <int kThreads>
  TANDEM_DEVICE void GroupBarrier(int id) const {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
  }
  TANDEM_DEVICE void WarpBarrier() const { __syncwarp(); }
  TANDEM_DEVICE void ThreadFence() const { __threadfence(); }
  template <typename V>
  TANDEM_DEVICE V ShuffleXor(V value, int mask) const {
    return __shfl_xor_sync(0xffffffffu, value, mask);
  }
  template <typename V>
  TANDEM_DEVICE V Shuffle(V value, int lane) const {
    return __shfl_sync(0xffffffffu, value, lane);
  }
  TANDEM_DEVICE bool Any(bool value) const {
    return __any_sync(0xffffffffu, value) != 0;
  }
  TANDEM_DEVICE int32_t AtomicAdd(int32_t* to, int32_t value) const {
    return atomicAdd(to, value);
  }
  TANDEM_DEVICE uint64_t AtomicAdd(uint64_t* to, uint64_t value) const {
    return atomicAdd(reinterpret_cast<unsigned long long*>(to),
                     static_cast<unsigned long long>(value));
  }
};

TANDEM_DEVICE uint32_t SharedAddress(Grid&, const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// The next address that is a multiple of kAlignment.
template <int kAlignment>
TANDEM_DEVICE std::byte* AlignShared(Grid& g, std::byte* p) {
  return p + (kAlignment - SharedAddress(g, p) % kAlignment) % kAlignment;
}

// ---- Order. "griddepcontrol.wait causes the executing thread to wait until
// all prerequisite grids in flight have completed and all the memory operations
// from the prerequisite grids are performed and made visible to the current
// grid" (PTX ISA, griddepcontrol). A grid that waits thus ends after the one
// before it; since every kernel waits, whoever waits for the last one has
// waited for all. One that does not would let the next overtake its own
// predecessor. launch_dependents promises nothing about memory; behind the wait
// it keeps two kernels of a chain on the device at most.

TANDEM_DEVICE void WaitForPrevious(Grid&) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
TANDEM_DEVICE void LaunchNext(Grid&) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- Copies.

TANDEM_DEVICE void CopyAsync16(Grid& g, void* shared, const void* global,
                               int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   SharedAddress(g, shared)),
               "l"(global), "r"(bytes)
               : "memory");
}
TANDEM_DEVICE void CopyAsyncCommit(Grid&) {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
TANDEM_DEVICE void CopyAsyncWait(Grid&) {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 16 bytes of shared memory.
TANDEM_DEVICE void LoadShared16(Grid&, const void* shared, uint32_t (&r)[4]) {
  const uint4 v = *static_cast<const uint4*>(shared);
  r[0] = v.x;
  r[1] = v.y;
  r[2] = v.z;
  r[3] = v.w;
}

// ---- Matrices.

TANDEM_DEVICE void LoadMatrix4(Grid& g, uint32_t (&r)[4], const void* row) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
      : "r"(SharedAddress(g, row))
      : "memory");
}
TANDEM_DEVICE void LoadMatrix4Transposed(Grid& g, uint32_t (&r)[4],
                                         const void* row) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
      : "r"(SharedAddress(g, row))
      : "memory");
}
// Four matrices of 8 x 8 (16 bits), as LoadMatrix4 has them, turned over:
// lane 8 m + j says where column j of matrix m goes, 16 bytes.
TANDEM_DEVICE void StoreMatrix4Transposed(Grid& g, void* column,
                                          const uint32_t (&r)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, "
      "%4};" ::"r"(SharedAddress(g, column)),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
#endif
}

TANDEM_DEVICE void MmaBf16(Grid&, float (&d)[4], const uint32_t (&a)[4],
                           const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
TANDEM_DEVICE void MmaF16(Grid&, float (&d)[4], const uint32_t (&a)[4],
                          const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
TANDEM_DEVICE void MmaS8(Grid&, int32_t (&d)[4], const uint32_t (&a)[4],
                         const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- Arithmetic.

#define TANDEM_BINARY(name, instruction)                        \
  TANDEM_DEVICE float name(float a, float b) {                  \
    float r;                                                    \
    asm(instruction " %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); \
    return r;                                                   \
  }
TANDEM_BINARY(Add, "add.rn.ftz.f32")
TANDEM_BINARY(Sub, "sub.rn.ftz.f32")
TANDEM_BINARY(Mul, "mul.rn.ftz.f32")
TANDEM_BINARY(Div, "div.rn.ftz.f32")
TANDEM_BINARY(Max, "max.ftz.f32")
TANDEM_BINARY(Min, "min.ftz.f32")
#undef TANDEM_BINARY
TANDEM_DEVICE float Fma(float a, float b, float c) {
  float r;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}
TANDEM_DEVICE float Sqrt(float a) {
  float r;
  asm("sqrt.rn.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}
TANDEM_DEVICE float Exp2(float a) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}
TANDEM_DEVICE float RoundEven(float a) {
  float r;
  asm("cvt.rni.ftz.f32.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}
TANDEM_DEVICE float BitsToFloat(uint32_t bits) { return __uint_as_float(bits); }
TANDEM_DEVICE uint32_t BytePermute(uint32_t low, uint32_t high,
                                   uint32_t picks) {
  return __byte_perm(low, high, picks);
}
TANDEM_DEVICE uint32_t FloatToBits(float value) {
  return __float_as_uint(value);
}

// ---- Types.

TANDEM_DEVICE uint32_t PackPairBf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
TANDEM_DEVICE uint32_t PackPairF16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// a * b, by pairs; the sum with -0 is exact.
TANDEM_DEVICE uint32_t MulPairBf16(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(r)
      : "r"(a), "r"(b), "r"(0x80008000u));
  return r;
}
TANDEM_DEVICE uint32_t MulPairF16(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;"
      : "=r"(r)
      : "r"(a), "r"(b), "r"(0x80008000u));
  return r;
}

TANDEM_DEVICE float ToFloat(float value) { return value; }
TANDEM_DEVICE float ToFloat(BFloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
TANDEM_DEVICE float ToFloat(Half value) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(value.bits));
  return r;
}
template <typename T>
TANDEM_DEVICE T FromFloat(float value);
template <>
TANDEM_DEVICE float FromFloat<float>(float value) {
  return value;
}
template <>
TANDEM_DEVICE BFloat16 FromFloat<BFloat16>(float value) {
  return {static_cast<uint16_t>(PackPairBf16(value, 0.0f) & 0xffffu)};
}
template <>
TANDEM_DEVICE Half FromFloat<Half>(float value) {
  return {static_cast<uint16_t>(PackPairF16(value, 0.0f) & 0xffffu)};
}

// ---- Launches.

// The second bound lets setmaxnreg count on the registers it starts with.
template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    RunKernel(const __grid_constant__ Kernel kernel) {
  Grid g;
  if constexpr (!kWaitsItself<Kernel>) {
    WaitForPrevious(g);
    LaunchNext(g);
  }
  kernel(g);
}

// Whether the code that this device runs has WaitForPrevious in it: a device
// that none was compiled for makes its own from compute_80's.
template <typename Kernel>
bool Waits() {
  static const bool waits = [] {
    cudaFuncAttributes attributes{};
    return cudaFuncGetAttributes(&attributes, RunKernel<Kernel>) ==
               cudaSuccess &&
           attributes.ptxVersion >= 90;
  }();
  return waits;
}

template <typename Kernel>
int Launch(const Stream& stream, const Dim3& blocks, int threads,
           int shared_bytes, const Kernel& kernel) {
  if (shared_bytes > 48 * 1024) {
    // Once per process would do; it is a write to the driver's memory.
    const cudaError_t error = cudaFuncSetAttribute(
        RunKernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
        shared_bytes);
    if (error != cudaSuccess) return static_cast<int>(error);
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(blocks.x), static_cast<unsigned>(blocks.y),
           static_cast<unsigned>(blocks.z));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &early;
  config.numAttrs =
      stream.after_kernel && stream.generation >= 90 && Waits<Kernel>() ? 1 : 0;
  return static_cast<int>(
      cudaLaunchKernelEx(&config, RunKernel<Kernel>, kernel));
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_DEVICE_GRID_NVCC_H_
