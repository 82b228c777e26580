// SPDX-License-Identifier: Apache-2.0
// The numerics contract of the CUDA kernels, stated once. Every kernel that
// computes a position's K, V or logits keeps it, whatever its tiles, so that
// the bits depend on tokens and weights alone, not on the batch, the chunk,
// the number of splits or the kind of step:
//
//   products     Each output is one f32 chain from zero over the inputs in
//                ascending steps of kChainStep, a tensor core step each; no
//                part of it is ever summed apart. A per-channel scale (e4m3
//                weights) multiplies the finished chain. The result is rounded
//                to the activation type before anything else happens to it;
//                a bias is added to that and rounded again. Chains with int8,
//                int4 and W8A8 weights are those of kernels/quantise.h, the
//                CPU backend's bits: exact sums of integers, scaled by group or
//                once.
//   attention    Keys are cut at absolute multiples of kSegmentKeys. In a
//                segment, tiles of kAttentionTile keys ascend: scores are one
//                chain over the head's dimensions; the maximum so far is
//                exact; weights are Exp2(score * c - maximum * c) with
//                c = scale * log2(e), rounded to the activation type (a
//                capped score is scaled first: c = log2(e)); the
//                values are a chain against V, and the weights' sum is four
//                of f32 additions, of the keys with key % 8 / 2 = 0, 1, 2, 3,
//                all scaled by Exp2((old - new maximum) * c) before each
//                tile. At a segment's end its sums are added as
//                (0 + 1) + (2 + 3). Segments are merged in ascending order.
//                A key that a row may not see (later, before its window) never
//                reaches it, be it Inf or NaN.
//   KV cache     Attention reads what was rounded to the cache's type; of a
//                quantised one (kernels/quantise.h) each code times its
//                vector's scale, rounded to the activation type.
//   draws        kernels/sampling.h, the CPU backend's bits.
//   f32 models   One chain of fused multiply-adds in ascending order, and the
//                attention of the CPU backend, formula by formula.
//
// Zeros may be added anywhere (padding, masked keys): no chain notices, as
// long as the other factor is finite; so rows that were never written are
// replaced by zeros when they are read.

#ifndef TANDEM_KERNELS_CUDA_NUMERICS_H_
#define TANDEM_KERNELS_CUDA_NUMERICS_H_

namespace tandem::kernels::cuda {

inline constexpr int kChainStep = 16;
inline constexpr int kAttentionTile = 128;
inline constexpr int kSegmentKeys = 512;  // kernels::kAttentionSegment

// Part of the fingerprint, with the generation: raise it with any change of
// what is said above.
inline constexpr int kNumericsVersion = 3;

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_NUMERICS_H_
