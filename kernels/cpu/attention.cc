// SPDX-License-Identifier: Apache-2.0
// Attention of a few queries that share one KV head over a paged cache, on
// one thread. Keys are cut at absolute multiples of kAttentionSegment; per
// segment and query:
//
//   score  one chain over dimensions, times the scale; of quantised keys and
//          values, a code times its scale is rounded to f32 first
//   max, weights exp(score - max), their sum by position modulo 16
//   values one chain over positions per dimension
//
// (a soft cap is applied to each score; keys before a row's window never reach
// it; with a bf16 cache, queries and weights may be rounded to bf16 too, the
// weights' sum is of what they were before)
//
// and segments are merged in ascending order by Merge(), a sink behind them
// all. How many queries are
// worked on together, where blocks end, and which thread does it never show.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/inputs-inl.h"
#include "kernels/cpu/tile-inl.h"
// clang-format on

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/cpu/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// A segment's scores may begin inside a block and end inside a unit.
inline constexpr int kScoreStride = kAttentionSegment + kMaxBlockSize + 48;
inline constexpr int kHeadStride = kMaxHeadDim + 16;
// The sum of a row's weights may begin this far before its first score.
inline constexpr int kScoreSlack = 16;

struct Workspace {
  float q[kMaxQueries][kHeadStride];
  float scores[kMaxQueries][kScoreStride];
  float values[kMaxQueries][kHeadStride];  // of one segment
  float merged[kMaxQueries][kHeadStride];
  SoftmaxState segment_state[kMaxQueries];
  SoftmaxState merged_state[kMaxQueries];
};
static_assert(sizeof(Workspace) <= kAttentionScratchBytes);

// Where one sequence's blocks of one KV head lie.
struct Pages {
  const KvLayout* layout;
  const std::byte* layer;
  const int32_t* table;
  int head;
  bool far;  // Fetching's

  const std::byte* K(int block) const {
    return layer + table[block] * layout->block_bytes + layout->KHead(head);
  }
  const std::byte* V(int block) const {
    return layer + table[block] * layout->block_bytes + layout->VHead(head);
  }
  // [groups][slots]; Scale is what one is.
  template <typename Scale = float>
  const Scale* Scales(bool value, int block) const {
    return reinterpret_cast<const Scale*>(layer +
                                          table[block] * layout->block_bytes +
                                          layout->ScaleHead(value, head));
  }
};

// Blocks lie anywhere, so the hardware cannot guess the next one. Decoding,
// where each key is used by few queries, waits for memory: it fetches the keys
// and values that come next, evenly over its work, since a burst of prefetches
// stops everything behind it.
constexpr bool FetchesAhead(int rows) { return rows <= 8; }

// A line of each unit at each step, kSteps of `stride` bytes apart.
template <int kUnits, int kSteps>
struct UnitsAhead {
  const std::byte* at[kUnits];
  int64_t stride;
  bool far;

  template <int U>
  HWY_INLINE void Step(const std::byte* const (&)[U], int64_t) {
#pragma GCC unroll 2
    for (int i = 0; i < kSteps; ++i) PrefetchLines(at, i * stride, far);
#pragma GCC unroll 8
    for (int u = 0; u < kUnits; ++u) at[u] += kSteps * stride;
  }
};
// Steps of Advance are two inputs: of bf16 one line, of f32 two.
template <typename W>
inline constexpr int kLineSteps = std::is_same_v<W, F32Weights> ? 2 : 1;

// The same of codes, all at once: values of these keys, and keys behind them.
HWY_INLINE void PrefetchCodes(const Pages& pages, int position, int end) {
  const KvLayout& layout = *pages.layout;
  const int slot = position % layout.block_size;
  const std::byte* const v =
      pages.V(position / layout.block_size) + slot * layout.v_row_bytes();
  const int64_t v_bytes =
      std::min(16, layout.block_size - slot) * layout.v_row_bytes();
  const std::byte* const values[1] = {v};
  for (int64_t i = 0; i < v_bytes; i += 64) PrefetchLines(values, i, pages.far);
  const int next = position + 64;
  if (next >= end) return;
  const std::byte* const k =
      pages.K(next / layout.block_size) + next % layout.block_size;
  const int64_t k_rows = KvElementBytes(layout.type, layout.head_dim);
  const std::byte* const keys[1] = {k};
  for (int64_t i = 0; i < k_rows; ++i) {
    PrefetchLines(keys, i * layout.slots, pages.far);
  }
}

constexpr int AttentionUnits(int rows) { return HWY_MIN(4, UnitsFor(rows)); }

// Scores of R queries with positions [begin, end), begin at a block's start;
// scores + (position - begin).
template <typename W, int R>
void ScoreTile(const Pages& pages, const float* q, float scale, int begin,
               int end, float* scores) {
  constexpr int U = AttentionUnits(R);
  const KvLayout& layout = *pages.layout;
  constexpr int kCell = kIsCodes<W> ? 1 : 4;
  const F32 d;
  const Vec factor = hn::Set(d, scale);
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
      AdvanceCodes<W, R, U>(scales, chains, q, kHeadStride, w, layout.slots,
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
            hn::StoreU(hn::Mul(chains.v[r][u * kParts + i], factor), d,
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
        AdvanceCodes<W, R, U>(scales, chains, a, kScoreStride, w, stride,
                              count);
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

// Turns scores [begin, end) into weights in place. The sum's 16 chains begin at
// multiples of 16; weights from there to `begin` become zeros.
SoftmaxState Softmax(float* scores, int begin, int end, float soft_cap) {
  constexpr float kUnseen = -std::numeric_limits<float>::infinity();
  const int skipped = begin / 16 * 16;
  const int padded = (end - skipped + 15) / 16 * 16;
  scores += skipped;
  for (int i = 0; soft_cap > 0 && i < padded; i += 16) {
    Store16(SoftCap(Load16(scores + i), soft_cap), scores + i);
  }
  std::fill(scores, scores + begin - skipped, kUnseen);
  std::fill(scores + end - skipped, scores + padded, kUnseen);
  F16 most = Load16(scores);
  for (int i = 16; i < padded; i += 16) most = Max(most, Load16(scores + i));
  const float maximum = Max16(most);
  const F16 shift = Set16(maximum);
  F16 sums = Set16(0.0f);
  for (int i = 0; i < padded; i += 16) {
    const F16 weight = Exp(Sub(Load16(scores + i), shift));
    sums = Add(sums, weight);
    Store16(weight, scores + i);
  }
  return {maximum, Sum16(sums)};
}

// Folds a later segment into what was merged so far.
void Merge(SoftmaxState& state, float* values, const SoftmaxState& next,
           const float* next_values, int width) {
  const float maximum = std::max(state.maximum, next.maximum);
  const float old_weight = Exp1(state.maximum - maximum);
  const float new_weight = Exp1(next.maximum - maximum);
  state.sum = state.sum * old_weight + next.sum * new_weight;
  state.maximum = maximum;
  const F16 a = Set16(old_weight);
  const F16 b = Set16(new_weight);
  for (int i = 0; i < width; i += 16) {
    Store16(Fma(Load16(next_values + i), b, Mul(Load16(values + i), a)),
            values + i);
  }
}

// What values are multiplied by when all keys are summed; a sink is one more,
// behind them, whose value is zero.
float FinalFactor(const SoftmaxState& state, const float* sink) {
  if (sink == nullptr) return 1.0f / state.sum;
  const float maximum = std::max(state.maximum, *sink);
  const float weight = Exp1(state.maximum - maximum);
  return weight / (state.sum * weight + Exp1(*sink - maximum));
}

void Finish(const SoftmaxState& state, const float* values, int head_dim,
            const float* sink, float* out) {
  const F16 factor = Set16(FinalFactor(state, sink));
  int i = 0;
  for (; i + 16 <= head_dim; i += 16) {
    Store16(Mul(Load16(values + i), factor), out + i);
  }
  if (i < head_dim) {
    StoreFirst16(Mul(LoadFirst16(values + i, head_dim - i), factor), out + i,
                 head_dim - i);
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

// One segment of all queries of a piece: states and values of those that
// reach it.
template <typename W>
void Segment(const AttentionPiece& p, const Pages& pages, int segment,
             Workspace& ws) {
  const int queries = p.rows * p.group;
  const int start = segment * kAttentionSegment;
  // Keys that a query sees, counted from the segment's start.
  const auto end_key = [&](int query) {
    const int position = p.first_position + query / p.group;
    return std::min(kAttentionSegment, position + 1 - start);
  };
  const auto first_key = [&](int query) {
    const int position = p.first_position + query / p.group;
    return std::max(0, FirstKey(position, p.window) - start);
  };
  const int tiles = (queries + kMaxRows - 1) / kMaxRows;
  for (int tile = 0; tile < tiles; ++tile) {
    int begin = queries * tile / tiles;
    int end = queries * (tile + 1) / tiles;
    while (begin < end && end_key(begin) <= 0) ++begin;
    while (begin < end && first_key(end - 1) >= kAttentionSegment) --end;
    if (begin == end) continue;
    const int first = start + first_key(begin);
    const int from = first - first % p.layout->block_size;
    const auto score_tile = TileFor<1, kMaxRows>(
        end - begin, [](auto rows) { return ScoreTile<W, rows>; });
    score_tile(pages, ws.q[begin], p.scale, from, start + end_key(end - 1),
               ws.scores[begin] + kScoreSlack);
    for (int i = begin; i < end; ++i) {
      float* const scores = ws.scores[i] + kScoreSlack;
      ws.segment_state[i] = Softmax(scores + (start - from), first_key(i),
                                    end_key(i), p.soft_cap);
      const int even = (start - from) + first_key(i) / 2 * 2;
      if constexpr (kRoundsInputs<W>) {
        CopyInputs<W>(scores + even, start - from + end_key(i) - even,
                      scores + even / kWordInputs<W>);
      }
    }
    // At a key that is even.
    const auto weights = [&](int query, int key) {
      return ws.scores[query] + kScoreSlack +
             (start - from + key) / kWordInputs<W>;
    };
    // Each alone up to where all see keys, all together as far as the shortest
    // goes, then each alone again.
    const auto values = [&](int query, int count, int key, int end_key,
                            bool fresh) {
      const auto value_tile = TileFor<1, kMaxRows>(
          count, [](auto rows) { return ValueTile<W, rows>; });
      value_tile(pages, weights(query, key), start + key, start + end_key,
                 fresh, ws.values[query]);
    };
    // A query's own keys from its first one on, which may be odd: then that one
    // by itself, so that what stands in a pair with it is not touched.
    const auto own_values = [&](int query, int end_key) {
      const int key = first_key(query);
      if (key % 2 == 0) return values(query, 1, key, end_key, true);
      SeedValues(pages, OddInput<W>(weights(query, key - 1)), start + key,
                 ws.values[query]);
      if (key + 1 < end_key) values(query, 1, key + 1, end_key, false);
    };
    const int common = (first_key(end - 1) + 1) / 2 * 2;
    const int common_end = end_key(begin) / 2 * 2;
    const bool together = common < common_end;
    const bool apart = first_key(begin) / 2 * 2 < common;
    for (int i = begin; i < end && together && apart; ++i) {
      const int own = first_key(i) / 2 * 2;
      if (own < common) {
        own_values(i, common);
      } else {
        std::fill_n(ws.values[i], p.layout->width, 0.0f);
      }
    }
    if (together) values(begin, end - begin, common, common_end, !apart);
    for (int i = begin; i < end; ++i) {
      if (!together) {
        own_values(i, end_key(i));
      } else if (common_end < end_key(i)) {
        values(i, 1, common_end, end_key(i), false);
      }
    }
  }
}

template <typename W>
void AttendOf(const AttentionPiece& p) {
  Workspace& ws = *reinterpret_cast<Workspace*>(p.scratch);
  const KvLayout& layout = *p.layout;
  const Pages pages{&layout, p.layer, p.block_table, p.kv_head, p.far};
  const int queries = p.rows * p.group;
  const auto head = [&](auto* base, int64_t stride, int query) {
    return base + query / p.group * stride +
           query % p.group * int64_t{layout.head_dim};
  };
  for (int i = 0; i < queries; ++i) {
    CopyInputs<W>(head(p.q, p.q_stride, i), layout.head_dim, ws.q[i]);
  }
  for (int segment = p.segment_begin; segment < p.segment_end; ++segment) {
    Segment<W>(p, pages, segment, ws);
    for (int i = 0; i < queries; ++i) {
      const int position = p.first_position + i / p.group;
      const int first = FirstKey(position, p.window) / kAttentionSegment;
      if (segment < first || segment > position / kAttentionSegment) continue;
      if (p.partial_states != nullptr) {
        const int64_t index = int64_t{segment - p.segment_begin} * queries + i;
        p.partial_states[index] = ws.segment_state[i];
        std::memcpy(p.partial_sums + index * layout.width, ws.values[i],
                    static_cast<size_t>(layout.width) * sizeof(float));
      } else if (segment == first) {
        ws.merged_state[i] = ws.segment_state[i];
        std::memcpy(ws.merged[i], ws.values[i],
                    static_cast<size_t>(layout.width) * sizeof(float));
      } else {
        Merge(ws.merged_state[i], ws.merged[i], ws.segment_state[i],
              ws.values[i], layout.width);
      }
    }
  }
  if (p.partial_states != nullptr) return;
  for (int i = 0; i < queries; ++i) {
    Finish(ws.merged_state[i], ws.merged[i], layout.head_dim,
           p.sinks == nullptr ? nullptr : p.sinks + i % p.group,
           head(p.out, p.out_stride, i));
  }
}

void Attend(const AttentionPiece& p) {
  switch (p.layout->type) {
    case DType::kF32:
      return AttendOf<F32Weights>(p);
    case DType::kFp8:
      return AttendOf<Fp8Codes>(p);
    case DType::kInt8:
      return AttendOf<Int8Codes>(p);
    case DType::kInt4:
      return AttendOf<Int4Codes>(p);
    case DType::kBF16:
    case DType::kF16:  // no cache has this
      return AttendOf<Bf16Weights>(p);
  }
}

void AttendRounded(const AttentionPiece& p) {
  if (p.layout->type != DType::kBF16) return Attend(p);
  AttendOf<Bf16OddFirst>(p);
}
#if HWY_TARGET == HWY_AVX3
void AttendPairs(const AttentionPiece& p) {
  if (p.layout->type != DType::kBF16) return Attend(p);
  AttendOf<Bf16Pairs>(p);
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
  table.attention = wide ? N_AVX3::Attend : N_AVX2::Attend;
  if (!table.rounds_inputs) return;
  table.attention = table.pairs ? N_AVX3::AttendPairs
                    : wide      ? N_AVX3::AttendRounded
                                : N_AVX2::AttendRounded;
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
