// SPDX-License-Identifier: Apache-2.0
// Attention (attention-inl.h) by chains: a score is one chain over dimensions,
// a value one over positions. Of quantised keys and values, a code times its
// scale is rounded to f32 first.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/attention-inl.h"
// clang-format on

#include "kernels/cpu/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

constexpr int AttentionUnits(int rows) { return HWY_MIN(4, UnitsFor(rows)); }

// Scores of R queries with positions [begin, end), begin at a block's start;
// scores + (position - begin).
template <typename W, int R>
void ScoreTile(const Pages& pages, const float* q, int begin, int end,
               float* scores) {
  constexpr int U = AttentionUnits(R);
  const KvLayout& layout = *pages.layout;
  constexpr int kCell = kIsCodes<W> ? 1 : 4;
  int position = begin;
  while (position < end) {
    const std::byte* w[U] = {};
    ScaledLanes scales{};
    const uint16_t* group_scales[U] = {};
    int column[U] = {};
    int units = 0;
    while (units < U && position < end) {
      const int slot = position % layout.block_size;
      if constexpr (FetchesAhead(R) && kIsCodes<W>) {
        PrefetchCodes(pages, position, end);
      }
      w[units] = pages.K(position / layout.block_size) + slot * kCell;
      if constexpr (kIsInt4<W>) {
        group_scales[units] =
            pages.Scales<uint16_t>(false, position / layout.block_size) + slot;
      } else if constexpr (kIsCodes<W>) {
        scales.scale[units] =
            pages.Scales(false, position / layout.block_size) + slot;
      }
      column[units++] = position - begin;
      position += std::min(16, layout.block_size - slot);
    }
    for (int u = units; u < U; ++u) {  // computed, not stored
      w[u] = w[0];
      scales.scale[u] = scales.scale[0];
      group_scales[u] = group_scales[0];
    }
    Chains<R, U> chains;
    chains.Clear();
    if constexpr (kIsInt4<W>) {
      for (int dim = 0; dim < layout.head_dim; dim += kCodeGroup) {
        alignas(64) float wide[U][16];
        for (int u = 0; u < U; ++u) {
          WidenScales(group_scales[u], wide[u]);
          scales.scale[u] = wide[u];
        }
        AdvanceInt4Keys<R, U>(scales, chains, q + dim, kHeadStride, w,
                              layout.slots,
                              std::min(kCodeGroup, layout.head_dim - dim));
        for (int u = 0; u < U; ++u) {
          w[u] += int64_t{kCodeGroup / 2} * layout.slots;
          group_scales[u] += layout.slots;
        }
      }
    } else if constexpr (kIsCodes<W>) {
      AdvanceFp8<R, U>(scales, chains, q, kHeadStride, w, layout.slots,
                       layout.head_dim);
    } else if constexpr (FetchesAhead(R)) {
      UnitsAhead<U, kLineSteps<W>> ahead{
          {}, int64_t{layout.slots} * 4, pages.far};
      for (int u = 0; u < U; ++u) {
        // The keys that come next, or after the last ones the first values.
        const int next = position + u * 16;
        ahead.at[u] = next < end ? pages.K(next / layout.block_size) +
                                       next % layout.block_size * int64_t{4}
                                 : pages.V(std::min(begin + u * 16, end - 1) /
                                           layout.block_size);
      }
      AdvanceEven<W>(chains, q, kHeadStride, w, int64_t{layout.slots} * 4,
                     layout.head_dim, ahead);
    } else {
      AdvanceEven<W>(chains, q, kHeadStride, w, int64_t{layout.slots} * 4,
                     layout.head_dim, NoPrefetch());
    }
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      if (u < units) {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          TANDEM_PARTS(i) {
            hn::StoreU(chains.v[r][u * kParts + i], F32(),
                       scores + r * kScoreStride + column[u] + i * kLanes);
          }
        }
      }
    }
  }
}

// Values of two positions lie in one word.
template <typename W>
inline constexpr bool kPairsOfValues =
    std::is_same_v<W, Bf16Weights> || kRoundsInputs<W>;

// values [R][width] (+)= weights of positions [begin, end) times V; `weights`
// is at position begin, which is even; so is end for several queries.
template <typename W, int R>
void ValueTile(const Pages& pages, const float* weights, int begin, int end,
               bool first, float* values) {
  constexpr int U = AttentionUnits(R);
  const KvLayout& layout = *pages.layout;
  constexpr int kCell = kIsCodes<W> ? 1 : 4;
  const int64_t stride =
      kIsInt4<W> ? layout.v_row_bytes() : int64_t{layout.width} * kCell;
  const int width_units = layout.width / 16;
  for (int unit = 0; unit < width_units; unit += U) {
    const int units = std::min(U, width_units - unit);
    Chains<R, U> chains;
    if (first) {
      chains.Clear();
    } else {
      chains.Load(values + unit * 16, kHeadStride);
    }
    for (int position = begin; position < end;) {
      const int slot = position % layout.block_size;
      const int count = std::min(layout.block_size - slot, end - position);
      const int step = kPairsOfValues<W> ? slot / 2 : slot;
      const std::byte* const base =
          pages.V(position / layout.block_size) + step * stride;
      const std::byte* w[U] = {};
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) {
        w[u] = base + (unit + (u < units ? u : 0)) * 16 * kCell;
      }
      const float* const a = weights + (position - begin) / kWordInputs<W>;
      if constexpr (kIsInt4<W>) {
        constexpr int kPairs = (U + 1) / 2;
        alignas(64) float wide[kPairs][kMaxBlockSize + 16];
        const float* scales[kPairs];
        const std::byte* pairs[kPairs];
        for (int p = 0; p < kPairs; ++p) {
          const int group = unit / 2 + (2 * p < units ? p : 0);
          const uint16_t* const from =
              pages.Scales<uint16_t>(true, position / layout.block_size) +
              int64_t{group} * layout.slots;
          for (int i = slot / 16 * 16; i < slot + count; i += 16) {
            WidenScales(from + i, wide[p] + i);
          }
          scales[p] = wide[p] + slot;
          pairs[p] = base + group * 16;
        }
        AdvanceInt4Values<R, U>(scales, unit % 2 != 0, chains, a, kScoreStride,
                                pairs, stride, count);
      } else if constexpr (kIsCodes<W>) {
        const ScaledInputs scales{
            pages.Scales(true, position / layout.block_size) + slot};
        AdvanceFp8<R, U>(scales, chains, a, kScoreStride, w, stride, count);
      } else if constexpr (FetchesAhead(R)) {
        const int next = std::min(position + 64, end - 1) / layout.block_size;
        UnitsAhead<U, kLineSteps<W>> ahead{{}, stride, pages.far};
        for (int u = 0; u < U; ++u) {
          ahead.at[u] = pages.V(next) + step * stride + (w[u] - base);
        }
        if constexpr (R == 1) {
          Advance<W>(chains, a, kScoreStride, w, stride, count, ahead);
        } else {
          AdvanceEven<W>(chains, a, kScoreStride, w, stride, count, ahead);
        }
      } else {
        AdvanceEven<W>(chains, a, kScoreStride, w, stride, count, NoPrefetch());
      }
      position += count;
    }
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      if (u < units) {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          TANDEM_PARTS(i) {
            hn::StoreU(chains.v[r][u * kParts + i], F32(),
                       values + r * kHeadStride + (unit + u) * 16 + i * kLanes);
          }
        }
      }
    }
  }
}

// values = weight times V of one position: what a chain is after it.
void SeedValues(const Pages& pages, float weight, int position, float* values) {
  const KvLayout& layout = *pages.layout;
  alignas(64) float row[2 * kMaxHeadDim];  // K, then V
  const int block = position / layout.block_size;
  ReadKvRow(layout, pages.layer + pages.table[block] * layout.block_bytes,
            position % layout.block_size, pages.head, pages.head + 1,
            DType::kF32, reinterpret_cast<std::byte*>(row));
  for (int i = 0; i < layout.head_dim; ++i) {
    values[i] = weight * row[layout.head_dim + i] + 0.0f;  // never -0
  }
  std::fill(values + layout.head_dim, values + layout.width, 0.0f);
}

template <typename W>
struct ChainKeys {
  static constexpr int kQueries = kMaxRows;
  static constexpr int kAligned = 2;  // values lie in pairs

  static void CopyQuery(const float* q, int head_dim, float* to) {
    CopyInputs<W>(q, head_dim, to);
  }
  static void Scores(const Pages& pages, const float* q, int queries, int begin,
                     int end, float* scores) {
    const auto tile = TileFor<1, kQueries>(
        queries, [](auto rows) { return ScoreTile<W, rows>; });
    tile(pages, q, begin, end, scores);
  }
  static float RoundWeights(const Pages& /*pages*/, int /*from*/, float* scores,
                            int begin, int end) {
    if constexpr (kRoundsInputs<W>) {
      const int even = begin / 2 * 2;
      CopyInputs<W>(scores + even, end - even, scores + even / kWordInputs<W>);
    }
    return 1;
  }
  static void EndValues(int /*width*/, float /*factor*/, float* /*values*/) {}
  static float* Weights(float* scores, int key) {
    return scores + key / kWordInputs<W>;
  }
  static void Values(const Pages& pages, const float* weights, int queries,
                     int begin, int end, bool first, float* values) {
    const auto tile = TileFor<1, kQueries>(
        queries, [](auto rows) { return ValueTile<W, rows>; });
    tile(pages, weights, begin, end, first, values);
  }
  // An odd first one goes by itself, so that what stands in a pair with it is
  // not touched.
  static void OwnValues(const Pages& pages, const float* weights, int begin,
                        int end, bool first, float* values) {
    if (begin % 2 == 0) {
      return ValueTile<W, 1>(pages, weights, begin, end, first, values);
    }
    SeedValues(pages, OddInput<W>(weights), begin, values);
    if (begin + 1 == end) return;
    ValueTile<W, 1>(pages, weights + 2 / kWordInputs<W>, begin + 1, end, false,
                    values);
  }
};

void Attend(const AttentionPiece& p) {
  switch (p.layout->type) {
    case DType::kF32:
      return AttendOf<ChainKeys<F32Weights>>(p);
    case DType::kFp8:
      return AttendOf<ChainKeys<Fp8Codes>>(p);
    case DType::kInt4:
      return AttendOf<ChainKeys<Int4Codes>>(p);
    case DType::kBF16:
    case DType::kF16:
    case DType::kInt8:  // attention_int8.cc's
    case DType::kW8A8:  // no cache has this, nor f16
      return AttendOf<ChainKeys<Bf16Weights>>(p);
  }
}

void AttendRounded(const AttentionPiece& p) {
  if (p.layout->type != DType::kBF16) return Attend(p);
  AttendOf<ChainKeys<Bf16OddFirst>>(p);
}
#if HWY_TARGET == HWY_AVX3
void AttendPairs(const AttentionPiece& p) {
  if (p.layout->type != DType::kBF16) return Attend(p);
  AttendOf<ChainKeys<Bf16Pairs>>(p);
}
#endif

void MergeSegments(const MergePiece& p) {
  alignas(64) float values[kMaxHeadDim];
  SoftmaxState state = p.states[0];
  std::memcpy(values, p.sums, static_cast<size_t>(p.width) * sizeof(float));
  for (int segment = 1; segment < p.segments; ++segment) {
    const int64_t index = int64_t{segment} * p.stride;
    Merge(state, values, p.states[index], p.sums + index * p.width, p.width);
  }
  Finish(state, values, p.head_dim, p.sink, p.out);
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

void AddAttention(KernelTable& table) {
  const bool wide = table.isa == Isa::kAvx512;
  table.merge_segments = wide ? N_AVX3::MergeSegments : N_AVX2::MergeSegments;
  switch (table.inputs) {
    case CpuInputs::kF32:
      table.attention = wide ? N_AVX3::Attend : N_AVX2::Attend;
      break;
    case CpuInputs::kBf16:
      table.attention = table.pairs ? N_AVX3::AttendPairs
                        : wide      ? N_AVX3::AttendRounded
                                    : N_AVX2::AttendRounded;
      break;
    case CpuInputs::kBf16Amx:
      table.attention = table.dot == Dot::kAmx ? N_AVX3::AttendTiles
                        : wide                 ? N_AVX3::AttendGrouped
                                               : N_AVX2::AttendGrouped;
      break;
  }
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
