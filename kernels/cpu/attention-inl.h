// SPDX-License-Identifier: Apache-2.0
// Attention of a few queries that share one KV head over a paged cache, on
// one thread. Keys are cut at absolute multiples of kAttentionSegment; per
// segment and query:
//
//   score  a sum over dimensions, times the scale
//   max, weights exp(score - max), their sum by position modulo 16
//   values a sum over positions per dimension
//
// (a soft cap is applied to each score; keys before a row's window never reach
// it; where queries and weights are rounded to bf16, the weights' sum is of
// what they were before)
//
// and segments are merged in ascending order by Merge(), a sink behind them
// all. How many queries are worked on together, where blocks end, and which
// thread does it never show. How keys and values are summed is a type's
// business: attention.cc has chains, attention_tiles.cc groups.

#if defined(TANDEM_KERNELS_CPU_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_ATTENTION_INL_H_
#undef TANDEM_KERNELS_CPU_ATTENTION_INL_H_
#else
#define TANDEM_KERNELS_CPU_ATTENTION_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/cpu/inputs-inl.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// By what is in the cache; of a bf16 one rounded (attention.cc), and in groups
// (attention_tiles.cc).
void Attend(const AttentionPiece& p);
void AttendRounded(const AttentionPiece& p);
void AttendPairs(const AttentionPiece& p);
void AttendGrouped(const AttentionPiece& p);
void AttendTiles(const AttentionPiece& p);

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
  float factors[kMaxQueries];  // of a segment's values (EndValues)
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

// Turns scores [begin, end), once they are multiplied by `scale`, into weights
// in place. The sum's 16 chains begin at multiples of 16; weights from there to
// `begin` become zeros.
inline SoftmaxState Softmax(float* scores, int begin, int end, float scale,
                            float soft_cap) {
  constexpr float kUnseen = -std::numeric_limits<float>::infinity();
  const int skipped = begin / 16 * 16;
  const int padded = (end - skipped + 15) / 16 * 16;
  scores += skipped;
  if (soft_cap > 0) {
    const F16 factor = Set16(scale);
    for (int i = 0; i < padded; i += 16) {
      Store16(SoftCap(Mul(Load16(scores + i), factor), soft_cap), scores + i);
    }
    scale = 1;
  }
  std::fill(scores, scores + begin - skipped, kUnseen);
  std::fill(scores + end - skipped, scores + padded, kUnseen);
  F16 most = Load16(scores);
  for (int i = 16; i < padded; i += 16) most = Max(most, Load16(scores + i));
  // Rounding keeps the order, so that the largest is the same one scaled.
  const float maximum = Max16(most) * scale;
  const F16 factor = Set16(scale);
  const F16 shift = Set16(maximum);
  F16 sums = Set16(0.0f);
  for (int i = 0; i < padded; i += 16) {
    const F16 weight = Exp(Sub(Mul(Load16(scores + i), factor), shift));
    sums = Add(sums, weight);
    Store16(weight, scores + i);
  }
  return {maximum, Sum16(sums)};
}

// Folds a later segment into what was merged so far.
inline void Merge(SoftmaxState& state, float* values, const SoftmaxState& next,
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
inline float FinalFactor(const SoftmaxState& state, const float* sink) {
  if (sink == nullptr) return 1.0f / state.sum;
  const float maximum = std::max(state.maximum, *sink);
  const float weight = Exp1(state.maximum - maximum);
  return weight / (state.sum * weight + Exp1(*sink - maximum));
}

inline void Finish(const SoftmaxState& state, const float* values, int head_dim,
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

// One segment of all queries of a piece: states and values of those that
// reach it. `Keys` says how keys and values are summed:
//
//   kQueries, kAligned     queries at a time; where sums over keys that several
//                          queries see begin and end
//   CopyQuery              what Scores takes
//   Scores                 of so many queries with keys [begin, end), begin at
//                          a block's start
//   RoundWeights           of keys [begin, end), key 0 at position `from`, in
//                          place, with an even one before them that is zero;
//                          what EndValues is given
//   Weights                where the weights of an even key then are
//   Values, OwnValues      sums of weights times V: of so many queries over
//                          aligned keys, or of one query over any
//   EndValues              makes finished sums values
template <typename Keys>
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
  const int tiles = (queries + Keys::kQueries - 1) / Keys::kQueries;
  for (int tile = 0; tile < tiles; ++tile) {
    int begin = queries * tile / tiles;
    int end = queries * (tile + 1) / tiles;
    while (begin < end && end_key(begin) <= 0) ++begin;
    while (begin < end && first_key(end - 1) >= kAttentionSegment) --end;
    if (begin == end) continue;
    const int first = start + first_key(begin);
    const int from = first - first % p.layout->block_size;
    Keys::Scores(pages, ws.q[begin], end - begin, from,
                 start + end_key(end - 1), ws.scores[begin] + kScoreSlack);
    for (int i = begin; i < end; ++i) {
      float* const scores = ws.scores[i] + kScoreSlack;
      ws.segment_state[i] = Softmax(scores + (start - from), first_key(i),
                                    end_key(i), p.scale, p.soft_cap);
      ws.factors[i] =
          Keys::RoundWeights(pages, from, scores, start - from + first_key(i),
                             start - from + end_key(i));
    }
    // At a key that is even.
    const auto weights = [&](int query, int key) {
      return Keys::Weights(ws.scores[query] + kScoreSlack, start - from + key);
    };
    // Each alone up to where all see keys, all together as far as the shortest
    // goes, then each alone again.
    const auto own_values = [&](int query, int key, int last, bool fresh) {
      Keys::OwnValues(pages, weights(query, key / 2 * 2), start + key,
                      start + last, fresh, ws.values[query]);
    };
    constexpr int kAligned = Keys::kAligned;
    const int common =
        (first_key(end - 1) + kAligned - 1) / kAligned * kAligned;
    const int common_end = end_key(begin) / kAligned * kAligned;
    const bool together = common < common_end;
    const bool apart = first_key(begin) / kAligned * kAligned < common;
    for (int i = begin; i < end && together && apart; ++i) {
      if (first_key(i) / kAligned * kAligned < common) {
        own_values(i, first_key(i), common, true);
      } else {
        std::fill_n(ws.values[i], p.layout->width, 0.0f);
      }
    }
    if (together) {
      Keys::Values(pages, weights(begin, common), end - begin, start + common,
                   start + common_end, !apart, ws.values[begin]);
    }
    for (int i = begin; i < end; ++i) {
      if (!together) {
        own_values(i, first_key(i), end_key(i), true);
      } else if (common_end < end_key(i)) {
        own_values(i, common_end, end_key(i), false);
      }
      Keys::EndValues(p.layout->width, ws.factors[i], ws.values[i]);
    }
  }
}

template <typename Keys>
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
    Keys::CopyQuery(head(p.q, p.q_stride, i), layout.head_dim, ws.q[i]);
  }
  for (int segment = p.segment_begin; segment < p.segment_end; ++segment) {
    Segment<Keys>(p, pages, segment, ws);
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

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
