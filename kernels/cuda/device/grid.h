// SPDX-License-Identifier: Apache-2.0
// What every kernel is written against. A kernel is a functor,
//
//   struct Kernel { Params p; TANDEM_DEVICE void operator()(Grid&) const; };
//
// started by Launch(stream, blocks, threads, shared bytes, kernel). nvcc
// compiles it over the thin wrappers of grid_nvcc.h; any other compiler over
// the emulator (kernels/cuda/emulator/), where the threads of a block are
// fibers, so that tests run the same source on a CPU. Both offer:
//
//   Grid          thread() lane() warp() block_x/y/z() grid_x/y/z(): indices;
//                 threads(): of a block; shared(): dynamic shared memory, 16
//                 bytes aligned; Barrier(); WarpBarrier(); GroupBarrier<n>(id)
//                 of n threads, an aligned group; ShuffleXor(v, mask),
//                 Shuffle(v, lane): v of 4 bytes, all 32 lanes; Any(v): is v
//                 true in some lane; ThreadFence(); AtomicAdd(pointer, value):
//                 int32 or uint64, returns the old
//   order         a kernel may start before the one in front of it on its
//                 stream has ended. WaitForPrevious(g) returns when that one,
//                 and so all before it, have ended and what they wrote is
//                 visible; LaunchNext(g) lets the one behind start once all
//                 blocks have called it. Both are called before operator(),
//                 unless the kernel says kWaits = true: then it must call them
//                 itself, WaitForPrevious in every block, and before that it
//                 may touch weights alone (prefetch them): it may neither read
//                 nor write what another kernel of a step reads or writes
//   copies        CopyAsync16(g, shared, global, bytes): 16 bytes, zeros from
//                 `bytes` (0 .. 16) on; CopyAsyncCommit(g) closes a group;
//                 CopyAsyncWait<n>(g) until all but n groups have landed
//                 device/async_copy.h for copies that arrive at barriers
//   matrices      LoadMatrix4, LoadMatrix4Transposed (ldmatrix.x4), MmaBf16,
//                 MmaF16 (m16n8k16, f32); MmaS8 (m16n8k32, s32); device/wgmma.h
//                 for Hopper's own; StoreMatrix4Transposed (stmatrix.x4, sm_90)
//   arithmetic    Fma Add Sub Mul Div Sqrt Max Min: f32, rounded to nearest,
//                 denormals flushed, never contracted; Exp: one polynomial,
//                 the CPU backend's, so the same bits everywhere; Exp2: the
//                 device's approximation, exact at 0 and -infinity
//                 BytePermute(low, high, picks): byte i is that of the eight
//                 which bits 4i to 4i + 2 of `picks` name, `low`'s first
//   types         BFloat16, Half: ToFloat(v), FromFloat<T>(f) to nearest even;
//                 PackPairBf16/F16(low, high), MulPairBf16/F16(a, b)

#ifndef TANDEM_KERNELS_CUDA_DEVICE_GRID_H_
#define TANDEM_KERNELS_CUDA_DEVICE_GRID_H_

#include "kernels/types.h"

#ifdef __CUDACC__
#include "kernels/cuda/device/grid_nvcc.h"
#else
#include "kernels/cuda/emulator/emulator.h"
#endif

namespace tandem::kernels::cuda {

// exp(x), relative error below 2e-7; exactly 1 at 0; 0 below -87.33 and
// exp(88) above 88: operation by operation kernels/cpu/simd-inl.h.
TANDEM_DEVICE float Exp(float x) {
  const bool tiny = x < -87.33f;
  x = Min(Max(x, -87.33f), 88.0f);
  const float n = RoundEven(Mul(x, 1.44269504f));
  float r = Fma(n, -0.693359375f, x);
  r = Fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = Fma(p, r, 1.3981999507e-3f);
  p = Fma(p, r, 8.3334519073e-3f);
  p = Fma(p, r, 4.1665795894e-2f);
  p = Fma(p, r, 1.6666665459e-1f);
  p = Fma(p, r, 5.0000001201e-1f);
  p = Fma(p, Mul(r, r), r);
  p = Add(p, 1.0f);
  return tiny ? 0.0f
              : Mul(p, BitsToFloat(static_cast<uint32_t>(
                           (static_cast<int32_t>(n) + 127) << 23)));
}

// The CPU backend's expressions (kernels/cpu/elementwise.cc, simd-inl.h).
TANDEM_DEVICE float Activated(Activation activation, float x) {
  const float inner =
      activation == Activation::kSilu
          ? x
          : Mul(x, Fma(Mul(x, x), 0.07135481627f, 1.595769122f));
  return Div(x, Add(1.0f, Exp(Sub(0.0f, inner))));
}
TANDEM_DEVICE float Gelu(float x) {
  const float size = Sub(0.0f, x) > x ? Sub(0.0f, x) : x;
  const float z = size > 12.8f ? 12.8f : size;
  const float t = Div(1.0f, Fma(z, 0.2316419f, 1.0f));
  float p = -0.0713041499f;
  p = Fma(p, t, 0.251481026f);
  p = Fma(p, t, -0.20847325f);
  p = Fma(p, t, 0.231842637f);
  p = Fma(p, t, 0.00985183939f);
  p = Fma(p, t, 0.10385438f);
  p = Fma(p, t, 0.0902101845f);
  p = Fma(p, t, 0.0925373584f);
  const float e = Exp(Mul(Mul(z, z), -0.5f));
  return Sub(0.0f > x ? 0.0f : x, Mul(z, Mul(Mul(p, t), e)));
}
// Of a layer without gates.
TANDEM_DEVICE float Alone(Activation activation, float x) {
  if (activation == Activation::kGelu) return Gelu(x);
  if (activation != Activation::kRelu2) return Activated(activation, x);
  const float positive = 0.0f > x ? 0.0f : x;
  return Mul(positive, positive);
}
// Of a layer with gates. NaN stays NaN.
TANDEM_DEVICE float Gated(Activation activation, float gate, float up) {
  if (activation != Activation::kClampedSwiGlu) {
    return Mul(Activated(activation, gate), up);
  }
  const float g = gate > kSwiGluLimit ? kSwiGluLimit : gate;
  const float below = up > kSwiGluLimit ? kSwiGluLimit : up;
  const float u = below < -kSwiGluLimit ? -kSwiGluLimit : below;
  const float e = Exp(Mul(g, -kSwiGluAlpha));
  return Mul(Div(g, Add(1.0f, e)), Add(u, 1.0f));
}
TANDEM_DEVICE float SoftCap(float x, float cap) {
  const float e = Exp(Mul(x, Div(2.0f, cap)));
  return Mul(Sub(1.0f, Div(2.0f, Add(1.0f, e))), cap);
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_DEVICE_GRID_H_
