// SPDX-License-Identifier: Apache-2.0
// Attention (attention-inl.h) over an int8 cache, in integers: queries and
// weights become ones of 16 bits, so that sums of their products with codes are
// exact in 32 bits and have no order. kernels/quantise.h says how.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_int8.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/attention-inl.h"
#include "kernels/cpu/quantise-inl.h"
// clang-format on

#include "kernels/cpu/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET
namespace {

using I16 = hn::Repartition<int16_t, F32>;
using VecI16 = hn::Vec<I16>;

// A word is two integers of 16 bits, a lane's two codes two bytes.
inline constexpr int kWordCodes = 2;
inline constexpr int kUnitBytes = 16 * kWordCodes;

constexpr int Int8Units(int rows) { return HWY_MIN(4, UnitsFor(rows)); }
// Units whose codes are widened before any is multiplied.
template <int U>
inline constexpr int kUnitsAtOnce = kParts == 1 ? U : 1;

// sum + both products of each lane.
struct MultiplyAddWords {
  static HWY_INLINE VecI Dot(VecI sum, VecI16 codes, VecI words) {
#if HWY_TARGET == HWY_AVX3
    return VecI{
        _mm512_add_epi32(sum.raw, _mm512_madd_epi16(codes.raw, words.raw))};
#else
    return VecI{
        _mm256_add_epi32(sum.raw, _mm256_madd_epi16(codes.raw, words.raw))};
#endif
  }
};
struct VnniWords {
  static HWY_INLINE VecI Dot(VecI sum, VecI16 codes, VecI words) {
#if HWY_TARGET == HWY_AVX3
    asm("vpdpwssd %2, %1, %0" : "+v"(sum.raw) : "v"(codes.raw), "v"(words.raw));
#else
    asm("%{vex%} vpdpwssd %2, %1, %0"
        : "+x"(sum.raw)
        : "x"(codes.raw), "x"(words.raw));
#endif
    return sum;
  }
};

HWY_INLINE VecI16 WidenCodes(const std::byte* at) {
  const hn::Rebind<int8_t, I16> d8;
  return hn::PromoteTo(I16(),
                       hn::LoadU(d8, reinterpret_cast<const int8_t*>(at)));
}

// from [count] times `factor` to the nearest, two in a word; behind the last
// one a zero. `to` may be `from`, or lie before it.
void StoreWords(const float* from, int count, float factor, float* to) {
  const Vec by = hn::Set(F32(), factor);
  const hn::Half<I32> half;
  const auto words = [&](Vec numbers) HWY_ATTR {
    const VecI codes = NearestSmall(hn::Mul(numbers, by));
    const hn::RepartitionToWide<U32> wide;
    const auto pairs =
        hn::BitCast(wide, hn::And(codes, hn::Set(I32(), 0xffff)));
    return hn::BitCast(
        half, hn::TruncateTo(hn::Half<U32>(),
                             hn::Or(pairs, hn::ShiftRight<16>(pairs))));
  };
  for (; count >= kLanes; count -= kLanes) {
    hn::StoreU(words(hn::LoadU(F32(), from)), half,
               reinterpret_cast<int32_t*>(to));
    from += kLanes;
    to += kLanes / 2;
  }
  if (count == 0) return;
  const auto here = static_cast<size_t>(count);
  hn::BlendedStore(words(hn::MaskedLoad(hn::FirstN(F32(), here), F32(), from)),
                   hn::FirstN(half, (here + 1) / 2), half,
                   reinterpret_cast<int32_t*>(to));
}

// What a tile fetches beside its work: a line of each unit every second word,
// or where units lie further apart every word.
template <int U>
struct CodesAhead {
  const std::byte* at[U];
  int64_t stride;
  bool far;

  HWY_INLINE void Step(int word) {
    if (word % 2 == 0 || stride > kUnitBytes) PrefetchLines(at, 0, far);
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) at[u] += stride;
  }
};
struct NothingAhead {
  HWY_INLINE void Step(int) {}
};

// sums += `count` words at a + r * kStride times the codes of unit u at w[u],
// `stride` bytes from word to word.
template <typename D, int kStride, int R, int U, typename Ahead>
HWY_INLINE void AddWords(VecI (&sums)[R][U * kParts], const float* a,
                         const std::byte* const (&w)[U], int64_t stride,
                         int count, Ahead ahead) {
  constexpr int kAtOnce = kUnitsAtOnce<U>;
  int64_t offset = 0;
  for (int k = 0; k < count; ++k, offset += stride) {
    ahead.Step(k);
#pragma GCC unroll 4
    for (int unit = 0; unit < U; unit += kAtOnce) {
      VecI16 codes[kAtOnce * kParts];
#pragma GCC unroll 4
      for (int i = 0; i < kAtOnce * kParts; ++i) {
        codes[i] = WidenCodes(w[unit + i / kParts] + offset +
                              i % kParts * (kUnitBytes / kParts));
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const VecI words =
            hn::BitCast(I32(), hn::Set(F32(), a[r * kStride + k]));
#pragma GCC unroll 4
        for (int i = 0; i < kAtOnce * kParts; ++i) {
          VecI& sum = sums[r][unit * kParts + i];
          sum = D::Dot(sum, codes[i], words);
        }
      }
    }
  }
}

// As ScoreTile of chains; a query's scale is behind its words.
inline constexpr int kQueryScale = kHeadStride - 1;

template <typename D, int R>
void Int8Scores(const Pages& pages, const float* q, int begin, int end,
                float* scores) {
  constexpr int U = Int8Units(R);
  const KvLayout& layout = *pages.layout;
  const int64_t stride = int64_t{layout.slots} * kWordCodes;
  const int words = layout.head_dim / 2;
  for (int position = begin; position < end;) {
    const std::byte* w[U] = {};
    const float* scales[U] = {};
    int column[U] = {};
    int units = 0;
    for (; units < U && position < end; ++units) {
      const int block = position / layout.block_size;
      const int slot = position % layout.block_size;
      w[units] = pages.K(block) + slot * kWordCodes;
      scales[units] = pages.Scales(false, block) + slot;
      column[units] = position - begin;
      position += std::min(16, layout.block_size - slot);
      if constexpr (FetchesAhead(R)) {
        PrefetchLine(reinterpret_cast<const std::byte*>(
            pages.Scales(true, block) + slot));
      }
    }
    for (int u = units; u < U; ++u) w[u] = w[0];  // computed, not stored
    VecI sums[R][U * kParts];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < U * kParts; ++i) sums[r][i] = hn::Zero(I32());
    }
    if constexpr (FetchesAhead(R)) {
      CodesAhead<U> ahead{{}, stride, pages.far};
      for (int u = 0; u < U; ++u) {
        // The keys that come next, or after the last ones the first values.
        const int next = position + u * 16;
        const int block = next / layout.block_size;
        if (next < end) {
          const int slot = next % layout.block_size;
          ahead.at[u] = pages.K(block) + slot * kWordCodes;
          PrefetchLine(reinterpret_cast<const std::byte*>(
              pages.Scales(false, block) + slot));
        } else {
          ahead.at[u] =
              pages.V(std::min(begin + u * 16, end - 1) / layout.block_size);
        }
      }
      AddWords<D, kHeadStride, R, U>(sums, q, w, stride, words, ahead);
    } else {
      AddWords<D, kHeadStride, R, U>(sums, q, w, stride, words, NothingAhead());
    }
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      if (u < units) {
        TANDEM_PARTS(i) {
          const Vec scale = hn::LoadU(F32(), scales[u] + i * kLanes);
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) {
            const Vec query = hn::Set(F32(), q[r * kHeadStride + kQueryScale]);
            hn::StoreU(hn::Mul(hn::ConvertTo(F32(), sums[r][u * kParts + i]),
                               hn::Mul(scale, query)),
                       F32(),
                       scores + r * kScoreStride + column[u] + i * kLanes);
          }
        }
      }
    }
  }
}

// values [R][width] (+)= weights of positions [begin, end) times V, as
// integers; `weights` has the word of position begin, which is even; so is end.
template <typename D, int R>
void Int8Values(const Pages& pages, const float* weights, int begin, int end,
                bool first, float* values) {
  constexpr int U = Int8Units(R);
  const KvLayout& layout = *pages.layout;
  const int64_t stride = int64_t{layout.width} * kWordCodes;
  const int width_units = layout.width / 16;
  for (int unit = 0; unit < width_units; unit += U) {
    const int units = std::min(U, width_units - unit);
    const auto at = [&](int r, int i) {
      return reinterpret_cast<int32_t*>(values + r * kHeadStride + unit * 16 +
                                        i * kLanes);
    };
    VecI sums[R][U * kParts];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < U * kParts; ++i) {
        sums[r][i] = first ? hn::Zero(I32()) : hn::LoadU(I32(), at(r, i));
      }
    }
    for (int position = begin; position < end;) {
      const int slot = position % layout.block_size;
      const int count = std::min(layout.block_size - slot, end - position);
      const int64_t in_block = slot / 2 * stride + int64_t{unit} * kUnitBytes;
      const std::byte* const base =
          pages.V(position / layout.block_size) + in_block;
      const std::byte* w[U];
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u) {
        w[u] = base + (u < units ? u : 0) * kUnitBytes;
      }
      const float* const a = weights + (position - begin) / 2;
      if constexpr (FetchesAhead(R)) {
        // Two units are a line.
        constexpr int kLines = (U + 1) / 2;
        const int next = std::min(position + 64, end - 1) / layout.block_size;
        CodesAhead<kLines> ahead{{}, stride, pages.far};
        for (int i = 0; i < kLines; ++i) {
          ahead.at[i] = pages.V(next) + in_block + i * int64_t{2} * kUnitBytes;
        }
        AddWords<D, kScoreStride, R, U>(sums, a, w, stride, count / 2, ahead);
      } else {
        AddWords<D, kScoreStride, R, U>(sums, a, w, stride, count / 2,
                                        NothingAhead());
      }
      position += count;
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < U * kParts; ++i) {
        if (i < units * kParts) hn::StoreU(sums[r][i], I32(), at(r, i));
      }
    }
  }
}

// Of numbers that are not negative: NaN is the greatest.
HWY_INLINE F16 Greater(const F16& a, const F16& b) {
  F16 r;
  TANDEM_PARTS(i) {
    r.v[i] = hn::BitCast(
        F32(), hn::Max(hn::BitCast(I32(), a.v[i]), hn::BitCast(I32(), b.v[i])));
  }
  return r;
}
HWY_INLINE uint32_t GreatestOf(const F16& a) {
  VecI most = hn::BitCast(I32(), a.v[0]);
  TANDEM_PARTS(i) most = hn::Max(most, hn::BitCast(I32(), a.v[i]));
  return static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(I32(), most)));
}

// weights [count] times `scales`, in place, and the greatest in each lane.
HWY_INLINE F16 TimesScales(const float* scales, int count, float* weights) {
  F16 most = Set16(0.0f);
  int i = 0;
  for (; i + 16 <= count; i += 16) {
    const F16 scaled = Mul(Load16(weights + i), Load16(scales + i));
    Store16(scaled, weights + i);
    most = Greater(most, scaled);
  }
  if (i == count) return most;
  const F16 scaled = Mul(LoadFirst16(weights + i, count - i),
                         LoadFirst16(scales + i, count - i));
  StoreFirst16(scaled, weights + i, count - i);
  return Greater(most, scaled);
}

template <typename D>
struct Int8Keys {
  static constexpr int kQueries = kMaxRows;
  static constexpr int kAligned = 2;  // values lie in pairs

  static void CopyQuery(const float* q, int head_dim, float* to) {
    const VectorScale scale(GreatestMagnitude(q, head_dim), kQueryLimit);
    StoreWords(q, head_dim, scale.inverse, to);
    to[kQueryScale] = scale.scale;
  }
  static void Scores(const Pages& pages, const float* q, int queries, int begin,
                     int end, float* scores) {
    const auto tile = TileFor<1, kQueries>(
        queries, [](auto rows) { return Int8Scores<D, rows>; });
    tile(pages, q, begin, end, scores);
  }
  static float RoundWeights(const Pages& pages, int from, float* scores,
                            int begin, int end) {
    const KvLayout& layout = *pages.layout;
    F16 most = Set16(0.0f);
    int block = (from + begin) / layout.block_size;
    int slot = (from + begin) % layout.block_size;
    for (int i = begin; i < end; ++block, slot = 0) {
      const int count = std::min(layout.block_size - slot, end - i);
      most = Greater(most, TimesScales(pages.Scales(true, block) + slot, count,
                                       scores + i));
      i += count;
    }
    const VectorScale scale(GreatestOf(most), kWeightLimit);
    // The even one's mate before `begin`, if any, is zero.
    const int even = begin / 2 * 2;
    StoreWords(scores + even, end - even, scale.inverse, scores + even / 2);
    return scale.scale;
  }
  static float* Weights(float* scores, int key) { return scores + key / 2; }
  static void Values(const Pages& pages, const float* weights, int queries,
                     int begin, int end, bool first, float* values) {
    const auto tile = TileFor<1, kQueries>(
        queries, [](auto rows) { return Int8Values<D, rows>; });
    tile(pages, weights, begin, end, first, values);
  }
  // A pair's key that is not seen weighs nothing.
  static void OwnValues(const Pages& pages, const float* weights, int begin,
                        int end, bool first, float* values) {
    Int8Values<D, 1>(pages, weights, begin / 2 * 2, (end + 1) / 2 * 2, first,
                     values);
  }
  static void EndValues(int width, float scale, float* values) {
    const Vec factor = hn::Set(F32(), scale);
    for (int i = 0; i < width; i += kLanes) {
      const VecI sum =
          hn::LoadU(I32(), reinterpret_cast<const int32_t*>(values + i));
      hn::StoreU(hn::Mul(hn::ConvertTo(F32(), sum), factor), F32(), values + i);
    }
  }
};

}  // namespace

void AttendInt8(const AttentionPiece& p) {
  AttendOf<Int8Keys<MultiplyAddWords>>(p);
}
void AttendInt8Vnni(const AttentionPiece& p) {
  AttendOf<Int8Keys<VnniWords>>(p);
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

void AddAttentionInt8(KernelTable& table) {
  const bool wide = table.isa == Isa::kAvx512;
  if (table.dot == Dot::kMultiplyAdd) {
    table.attention_int8 = wide ? N_AVX3::AttendInt8 : N_AVX2::AttendInt8;
  } else {
    table.attention_int8 =
        wide ? N_AVX3::AttendInt8Vnni : N_AVX2::AttendInt8Vnni;
  }
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
