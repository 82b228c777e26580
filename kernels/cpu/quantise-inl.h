// SPDX-License-Identifier: Apache-2.0
// Rows of activations in int8, as products with codes take them
// (kernels/quantise.h): for int8 and int4 weights four groups at a time, since
// what crosses the lanes of one vector takes longer than all else; for W8A8 a
// whole row.

#if defined(TANDEM_KERNELS_CPU_QUANTISE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_QUANTISE_INL_H_
#undef TANDEM_KERNELS_CPU_QUANTISE_INL_H_
#else
#define TANDEM_KERNELS_CPU_QUANTISE_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "kernels/cpu/code_matrix.h"
#include "kernels/cpu/simd-inl.h"
#include "kernels/quantise.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

using VecI = hn::Vec<I32>;

inline constexpr int kGroupsTogether = 4;
static_assert(2 * RowPiece::kBlocks % kGroupsTogether == 0);

// Lane i: all lanes of v[i] by `op`, which may take them in any order.
template <typename Op>
HWY_INLINE hn::Vec<hn::FixedTag<int32_t, 4>> FoldFour(
    const hn::Vec<I32> (&v)[kGroupsTogether], const Op& op) {
  const I32 d;
  const hn::Repartition<int64_t, I32> d64;
  const auto two = [&](int i) HWY_ATTR {
    return hn::BitCast(d64, op(hn::InterleaveLower(d, v[i], v[i + 1]),
                               hn::InterleaveUpper(d, v[i], v[i + 1])));
  };
  const auto low = two(0);
  const auto high = two(2);
  const auto blocks = op(hn::BitCast(d, hn::InterleaveLower(d64, low, high)),
                         hn::BitCast(d, hn::InterleaveUpper(d64, low, high)));
#if HWY_TARGET == HWY_AVX3
  const hn::Half<I32> d8;
  const auto eight = op(hn::LowerHalf(d8, blocks), hn::UpperHalf(d8, blocks));
#else
  const auto eight = blocks;
#endif
  const hn::FixedTag<int32_t, 4> d4;
  return op(hn::LowerHalf(d4, eight), hn::UpperHalf(d4, eight));
}

// REQUIRES: |x| < 2^31.
HWY_INLINE hn::Vec<I32> NearestSmall(Vec x) {
#if HWY_TARGET == HWY_AVX3
  return hn::Vec<I32>{_mm512_cvtps_epi32(x.raw)};
#else
  return hn::Vec<I32>{_mm256_cvtps_epi32(x.raw)};
#endif
}

// As VectorQuantiser does of each group.
HWY_INLINE void QuantiseGroups(const float* const (&x)[kGroupsTogether],
                               int8_t* codes, float* scales, int32_t* minus) {
  const F32 d;
  const I32 di;
  const hn::FixedTag<float, 4> d4;
  const hn::FixedTag<int32_t, 4> di4;
  hn::Vec<I32> of[kGroupsTogether];
#pragma GCC unroll 4
  for (int g = 0; g < kGroupsTogether; ++g) {
    of[g] = hn::Zero(di);
#pragma GCC unroll 4
    for (int i = 0; i < kCodeGroup; i += kLanes) {
      of[g] = hn::Max(of[g], hn::And(hn::BitCast(di, hn::LoadU(d, x[g] + i)),
                                     hn::Set(di, 0x7fffffff)));
    }
  }
  const auto most =
      FoldFour(of, [](auto a, auto b) HWY_ATTR { return hn::Max(a, b); });
  const auto limit = hn::Set(d4, kLargestInt8);
  const auto zeros = hn::RebindMask(d4, hn::Lt(most, hn::Set(di4, 0x0d800000)));
  const auto unseen =
      hn::RebindMask(d4, hn::Gt(most, hn::Set(di4, 0x7f7fffff)));
  const auto quotient = hn::Div(hn::BitCast(d4, most), limit);
  const auto nan = hn::BitCast(d4, hn::Set(di4, 0x7fc00000));
  hn::StoreU(hn::IfThenElse(unseen, nan, hn::IfThenZeroElse(zeros, quotient)),
             d4, scales);
  alignas(16) float inverse[kGroupsTogether];
  hn::Store(hn::IfThenZeroElse(hn::Or(zeros, unseen),
                               hn::Div(limit, hn::BitCast(d4, most))),
            d4, inverse);
#pragma GCC unroll 4
  for (int g = 0; g < kGroupsTogether; ++g) {
    int8_t* const to = codes + g * kCodeGroup;
    of[g] = hn::Zero(di);
    if (inverse[g] == 0) {
      std::memset(to, 0, kCodeGroup);
      continue;
    }
    const Vec factor = hn::Set(d, inverse[g]);
#pragma GCC unroll 4
    for (int i = 0; i < kCodeGroup; i += kLanes) {
      const auto code = NearestSmall(hn::Mul(hn::LoadU(d, x[g] + i), factor));
      of[g] = hn::Add(of[g], code);
      const hn::Rebind<int8_t, I32> d8;
      hn::StoreU(hn::DemoteTo(d8, code), d8, to + i);
    }
  }
  const auto sums =
      FoldFour(of, [](auto a, auto b) HWY_ATTR { return hn::Add(a, b); });
  hn::StoreU(hn::Neg(hn::ShiftLeft<7>(sums)), di4, minus);
}

// x [k] to its pieces, `stride` apart.
inline void QuantiseRow(const float* x, int k, RowPiece* out, int64_t stride) {
  constexpr int kTogether = kGroupsTogether * kCodeGroup;
  for (int piece = 0; piece < RowPieces(k); ++piece) {
    RowPiece& to = out[piece * stride];
    const int begin = PieceBegin(k, piece) * kCodeInputs;
    const int end = PieceBegin(k, piece + 1) * kCodeInputs;
    // A piece's last groups may be the next one's; nothing reads them here.
    for (int at = begin; at < end; at += kTogether) {
      const int valid = std::min(kTogether, k - at);
      const float* from = x + at;
      alignas(64) float copy[kTogether];
      if (valid < kTogether) {
        std::copy_n(from, valid, copy);
        std::fill(copy + valid, copy + kTogether, 0.0f);
        from = copy;
      }
      const int group = (at - begin) / kCodeGroup;
      QuantiseGroups({from, from + kCodeGroup, from + 2 * kCodeGroup,
                      from + 3 * kCodeGroup},
                     to.codes + (at - begin), to.scales + group,
                     to.minus + group);
    }
  }
}

HWY_INLINE VecI MagnitudesAt(const float* x) {
  return hn::And(hn::BitCast(I32(), hn::LoadU(F32(), x)),
                 hn::Set(I32(), 0x7fffffff));
}

// The greatest magnitude of x [k], as bits.
inline uint32_t GreatestMagnitude(const float* x, int k) {
  VecI most = hn::Zero(I32());
  int at = 0;
  for (; at + kLanes <= k; at += kLanes) {
    most = hn::Max(most, MagnitudesAt(x + at));
  }
  uint32_t greatest =
      static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(I32(), most)));
  for (; at < k; ++at) greatest = std::max(greatest, MagnitudeBits(x[at]));
  return greatest;
}

// to [64] = x [64] times `factor` to the nearest; the sum of those.
HWY_INLINE VecI QuantiseBlock(const float* x, Vec factor, int8_t* to) {
  VecI sum = hn::Zero(I32());
#pragma GCC unroll 8
  for (int i = 0; i < kCodeInputs; i += kLanes) {
    const VecI code = NearestSmall(hn::Mul(hn::LoadU(F32(), x + i), factor));
    sum = hn::Add(sum, code);
    const hn::Rebind<int8_t, I32> d8;
    hn::StoreU(hn::DemoteTo(d8, code), d8, to + i);
  }
  return sum;
}

// The same by one scale for all of the row, for W8A8.
inline void QuantiseWholeRow(const float* x, int k, RowPiece* out,
                             int64_t stride) {
  const VectorQuantiser quantiser(DType::kInt8, GreatestMagnitude(x, k) << 1);
  const Vec factor = hn::Set(F32(), quantiser.inverse);
  for (int piece = 0; piece < RowPieces(k); ++piece) {
    RowPiece& to = out[piece * stride];
    const int begin = PieceBegin(k, piece) * kCodeInputs;
    const int end = PieceBegin(k, piece + 1) * kCodeInputs;
    to.scales[0] = quantiser.scale;
    to.minus[0] = 0;
    if (quantiser.inverse == 0) {
      std::memset(to.codes, 0, static_cast<size_t>(end - begin));
      continue;
    }
    VecI sum = hn::Zero(I32());
    for (int at = begin; at < end; at += kCodeInputs) {
      alignas(64) float copy[kCodeInputs];
      const float* from = x + at;
      if (at + kCodeInputs > k) {
        std::fill(std::copy(from, x + k, copy), copy + kCodeInputs, 0.0f);
        from = copy;
      }
      sum = hn::Add(sum, QuantiseBlock(from, factor, to.codes + (at - begin)));
    }
    to.minus[0] = -128 * hn::GetLane(hn::SumOfLanes(I32(), sum));
  }
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
