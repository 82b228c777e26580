// SPDX-License-Identifier: Apache-2.0
// What both attention kernels for bf16 and f16 share: arguments, the stream of
// keys and values out of the paged cache, the arithmetic of one tile's softmax
// and of merging segments (numerics.h). A query row is one head of one
// position; the `group` heads that share a KV head are rows side by side
// (row = position in the span * group + head in the group), so that they share
// every load.
//
// A span of one row goes to the decode kernel, a longer one to the prefill
// kernel. Both give the same bits.

#ifndef TANDEM_KERNELS_CUDA_ATTENTION_CUH_
#define TANDEM_KERNELS_CUDA_ATTENTION_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/backend.h"
#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/numerics.h"

namespace tandem::kernels::cuda {

struct AttentionKernelParams {
  const void* q;  // [rows, heads, head_dim], stride q_stride elements
  void* out;      // [rows, heads, head_dim]
  const void* k;  // of the layer: position p of KV head h of block b is at
  const void* v;  // b * block_stride + h * head_stride + p * head_dim
  const RowSpan* spans;         // [num_spans]
  const int32_t* block_tables;  // a span's at its block_table
  float* partials;    // [num_spans, heads, max_segments, head_dim + 2]: the
                      // maximum, the sum and the values of a segment
  int32_t* arrivals;  // [num_spans, kv_heads, narrow_tiles], zeros; they are
                      // zeros again afterwards
  int64_t q_stride;
  int64_t out_stride;
  int64_t block_stride;
  int64_t head_stride;
  int kv_heads;
  int group;                  // query heads per KV head
  int head_dim;               // multiple of 8, at most 256
  int block_size;             // multiple of 8
  uint32_t block_reciprocal;  // 2^32 / block_size, rounded up
  int window;                 // positions seen, the row's own included; 0: all
  int narrow_tiles;           // of 16 rows that one position's group takes
  int max_segments;           // that a span of one row may touch
  float scale;
};

// The block of a span that holds a key: exact for keys below 2^24 and blocks up
// to 256, without a division per copy.
TANDEM_DEVICE int BlockOf(const AttentionKernelParams& p, int key) {
  return static_cast<int>(
      (uint64_t{static_cast<uint32_t>(key)} * p.block_reciprocal) >> 32);
}

// The keys that a tile of rows may see, and the segments they lie in.
struct KeyRange {
  int begin;  // first key that some row sees
  int end;
  int first_tile;  // absolute, of kAttentionTile keys
  int end_tile;
  int first_segment;
  int end_segment;

  TANDEM_DEVICE KeyRange(int first_position, int last_position, int window) {
    begin = window > 0 && first_position >= window ? first_position - window + 1
                                                   : 0;
    end = last_position + 1;
    first_tile = begin / kAttentionTile;
    end_tile = (end + kAttentionTile - 1) / kAttentionTile;
    first_segment = begin / kSegmentKeys;
    end_segment = (end + kSegmentKeys - 1) / kSegmentKeys;
  }
};

inline constexpr int kSegmentTiles = kSegmentKeys / kAttentionTile;
inline constexpr int kChunkKeys = 64;  // copied and waited for together
inline constexpr int kChunksPerTile = 2 * kAttentionTile / kChunkKeys;

// Rows in shared memory (queries, keys, values, weights) lie as columns of 128
// bytes, [columns][kRows][128 bytes], the 16-byte pieces of each permuted by
// row % 8: what ldmatrix reads without conflicts, and wgmma as it is.
inline constexpr int kColumnBytes = 128;
template <int kRows>
TANDEM_DEVICE int PieceOffset(int row, int piece) {
  return piece / 8 * (kRows * kColumnBytes) + row * kColumnBytes +
         (piece % 8 ^ row % 8) * 16;
}
// Half `half` of 16 elements, 16 `step` on, of row `first` + `row`; `first` is
// a multiple of 8. Said like this, so that a compiler sees four addresses and
// constants instead of one address per step.
template <int kRows>
TANDEM_DEVICE int PieceOffset(int first, int row, int step, int half) {
  return first * kColumnBytes + row * kColumnBytes +
         ((step % 4 * 2 + half) ^ (row % 8)) * 16 +
         step / 4 * (kRows * kColumnBytes);
}

// Copies chunks of keys and values through a ring of shared memory. Tile by
// tile: the tile's keys, then its values. A chunk is 64 rows of D, padded with
// zeros.
template <typename T, int D, int kSlots, int kThreads>
struct KeyStream {
  static constexpr int kChunkBytes = kChunkKeys * D * 2;
  static constexpr int kBytes = kSlots * kChunkBytes;

  const AttentionKernelParams& p;
  const int32_t* table;
  int kv_head;
  int begin;  // keys outside [begin, end) read as zeros
  int end;
  int tile;  // of the next chunk to copy
  int end_tile;
  std::byte* ring;
  int part = 0;   // of the tile: 0 .. kChunksPerTile - 1
  int slot = 0;   // where it goes
  int taken = 0;  // slot of the next chunk to use

  TANDEM_DEVICE void Start(Grid& g) {
#pragma unroll
    for (int i = 0; i < kSlots - 1; ++i) CopyNext(g);
  }

  TANDEM_DEVICE void CopyNext(Grid& g) {
    if (tile < end_tile) {
      constexpr int kPieces = D / 8;
      const int key0 =
          tile * kAttentionTile + part % (kChunksPerTile / 2) * kChunkKeys;
      const T* const base =
          static_cast<const T*>(part < kChunksPerTile / 2 ? p.k : p.v) +
          kv_head * p.head_stride;
      std::byte* const to = ring + slot * kChunkBytes;
#pragma unroll
      for (int i = g.thread(); i < kChunkKeys * kPieces; i += kThreads) {
        const int row = i / kPieces;
        const int piece = i % kPieces;
        const int key = key0 + row;
        const bool valid = key >= begin && key < end && piece * 8 < p.head_dim;
        const T* from = base;
        if (valid) {
          const int block = BlockOf(p, key);
          from += table[block] * p.block_stride +
                  int64_t{key - block * p.block_size} * p.head_dim + piece * 8;
        }
        CopyAsync16(g, to + PieceOffset<kChunkKeys>(row, piece), from,
                    valid ? 16 : 0);
      }
      if (++part == kChunksPerTile) {
        part = 0;
        ++tile;
      }
      slot = slot == kSlots - 1 ? 0 : slot + 1;
    }
    CopyAsyncCommit(g);
  }

  // The next chunk, for all threads; puts the copy of another one on its way.
  TANDEM_DEVICE const std::byte* Next(Grid& g) {
    CopyAsyncWait<kSlots - 2>(g);
    g.Barrier();
    CopyNext(g);
    const std::byte* const chunk = ring + taken * kChunkBytes;
    taken = taken == kSlots - 1 ? 0 : taken + 1;
    return chunk;
  }
};

// Query rows `a` (dimensions 16 `step` on) against keys [key, key + 16) of a
// chunk of K, added to two accumulators of 8 keys.
template <typename T>
TANDEM_DEVICE void ScoreStep(Grid& g, const std::byte* chunk, int key, int step,
                             const uint32_t (&a)[4], float (&low)[4],
                             float (&high)[4]) {
  const int lane = g.lane();
  uint32_t m[4];
  LoadMatrix4(g, m,
              chunk + PieceOffset<kChunkKeys>(key, lane % 8 + lane / 16 * 8,
                                              step, lane / 8 % 2));
  const uint32_t b0[2] = {m[0], m[1]};
  const uint32_t b1[2] = {m[2], m[3]};
  MatrixStep<T>(g, low, a, b0);
  MatrixStep<T>(g, high, a, b1);
}

// Operand of 16 rows from `first` (a multiple of 8) of kRows, elements 16
// `step` on.
template <int kRows>
TANDEM_DEVICE void LoadRows(Grid& g, const std::byte* rows, int first, int step,
                            uint32_t (&a)[4]) {
  const int lane = g.lane();
  LoadMatrix4(g, a,
              rows + PieceOffset<kRows>(first, lane % 16, step, lane / 16));
}

// Values of keys [key, key + 16) at columns [column, column + 16) times
// weights a, added to two accumulators of 8 columns.
template <typename T>
TANDEM_DEVICE void ValueStep(Grid& g, const std::byte* chunk, int key,
                             int column, const uint32_t (&a)[4],
                             float (&low)[4], float (&high)[4]) {
  const int lane = g.lane();
  uint32_t m[4];
  LoadMatrix4Transposed(
      g, m,
      chunk + PieceOffset<kChunkKeys>(key, lane % 16, column / 16, lane / 16));
  const uint32_t b0[2] = {m[0], m[1]};
  const uint32_t b1[2] = {m[2], m[3]};
  MatrixStep<T>(g, low, a, b0);
  MatrixStep<T>(g, high, a, b1);
}

// Adds weights a (16 keys) to the sums of rows lane / 4 and 8 more: four
// chains a row, each lane's its own two of every eight keys.
template <typename T>
TANDEM_DEVICE void SumStep(const uint32_t (&a)[4], float (&sum)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i % 2] = Add(Add(sum[i % 2], LowOfPair<T>(a[i])), HighOfPair<T>(a[i]));
  }
}
// The four chains of a row together, for all its lanes.
TANDEM_DEVICE float FoldSum(Grid& g, float sum) {
  sum = Add(sum, g.ShuffleXor(sum, 1));
  return Add(sum, g.ShuffleXor(sum, 2));
}

// True if `row_position` may look at `key`.
TANDEM_DEVICE bool Sees(int row_position, int key, int window) {
  return key <= row_position && (window == 0 || key > row_position - window);
}

// Zero times Inf or NaN is NaN: where some rows may not see a key of a tile,
// its weight of zero keeps it from them only if its value is finite. So such
// tiles (those at the diagonal and at a window's beginning) are searched for
// values that are not, and if there is one, multiplied row by row.

// Whether rows [begin, end) of kRows hold finite values alone, as far as this
// one of `threads` threads looked.
template <typename T, int D, int kRows>
TANDEM_DEVICE bool LooksFinite(Grid& g, const std::byte* rows, int begin,
                               int end, int thread, int threads) {
  constexpr int kPieces = D / 8;
  // An exponent of ones and one more carries into the sign.
  constexpr uint32_t kExponents =
      std::is_same_v<T, BFloat16> ? 0x7f807f80u : 0x7c007c00u;
  constexpr uint32_t kLowest =
      std::is_same_v<T, BFloat16> ? 0x00800080u : 0x04000400u;
  uint32_t signs = 0;
#pragma unroll 4
  for (int i = begin * kPieces + thread; i < end * kPieces; i += threads) {
    uint32_t r[4];
    LoadShared16(g, rows + PieceOffset<kRows>(i / kPieces, i % kPieces), r);
#pragma unroll
    for (const uint32_t pair : r) signs |= (pair & kExponents) + kLowest;
  }
  return (signs & 0x80008000u) == 0;
}

// A step of 16 keys from `key` of a tile of kRows rows (`first_key` is its
// first one's position) times weights a of 16 rows at `position`s, each row
// against the values that it sees alone. For a warp.
template <typename T, int kRows, int kValueTiles>
TANDEM_DEVICE void GuardedValueStep(Grid& g, const std::byte* rows,
                                    int first_key, int key,
                                    const int (&position)[2], int window,
                                    const uint32_t (&a)[4],
                                    float (&values)[kValueTiles][4]) {
  const int lane = g.lane();
#pragma unroll 1
  for (int row = 0; row < 8; ++row) {
    // Of the operand's registers: keys 2 (lane % 4) and the next, 8 more.
    uint32_t seen[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = g.Shuffle(position[h], row * 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = first_key + key + lane % 4 * 2 + i * 8;
        seen[h][i] = (Sees(at, k, window) ? 0x0000ffffu : 0) |
                     (Sees(at, k + 1, window) ? 0xffff0000u : 0);
      }
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; n += 2) {
      uint32_t m[4];
      LoadMatrix4Transposed(
          g, m, rows + PieceOffset<kRows>(key, lane % 16, n / 2, lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i / 2;
        float(&value)[4] = values[n + i % 2];
        const uint32_t b[2] = {m[i % 2 * 2] & seen[h][0],
                               m[i % 2 * 2 + 1] & seen[h][1]};
        float chain[4] = {value[0], value[1], value[2], value[3]};
        MatrixStep<T>(g, chain, a, b);
        if (lane / 4 == row) {
          value[h * 2] = chain[h * 2];
          value[h * 2 + 1] = chain[h * 2 + 1];
        }
      }
    }
  }
}

// One row's maximum as tiles go by, and what goes with it.
struct RowMaximum {
  float maximum = -kInfinity;
  float shift = 0;  // maximum * c; 0 before the first key

  // Takes in a tile's maximum; the factor for what was summed so far.
  TANDEM_DEVICE float Raise(float tile, float c) {
    const float before = maximum;
    maximum = tile > maximum ? tile : maximum;
    if (maximum == -kInfinity) return 1.0f;
    shift = Mul(maximum, c);
    return Exp2(Mul(Sub(before, maximum), c));
  }
  TANDEM_DEVICE float Weight(float score, float c) const {
    return Exp2(Fma(score, c, -shift));
  }
};

// Folding a later segment into an earlier one: factors of both. A segment of
// which the row saw nothing leaves the other as it is, to the bit.
struct MergeFactors {
  float maximum;
  float before;
  float after;

  TANDEM_DEVICE MergeFactors(float m0, float m1, float c) {
    maximum = m0 > m1 ? m0 : m1;
    before = m0 == -kInfinity   ? 0.0f
             : m1 == -kInfinity ? 1.0f
                                : Exp2(Mul(Sub(m0, maximum), c));
    after = m1 == -kInfinity   ? 0.0f
            : m0 == -kInfinity ? 1.0f
                               : Exp2(Mul(Sub(m1, maximum), c));
  }
  TANDEM_DEVICE float operator()(float a, float b) const {
    return Fma(b, after, Mul(a, before));
  }
};

// Hides the scores of keys that a row may not see. `scores` are of the tile
// from `first_key` on, laid out as m16n8 results; `position`s are of rows lane
// / 4 and 8 more.
template <int kScoreTiles>
TANDEM_DEVICE void MaskScores(Grid& g, int first_key, const int (&position)[2],
                              int window, float (&scores)[kScoreTiles][4]) {
  const int last_key = first_key + kScoreTiles * 8 - 1;
  // Most tiles are seen whole by all rows.
  if (Sees(position[0], first_key, window) &&
      Sees(position[0], last_key, window) &&
      Sees(position[1], first_key, window) &&
      Sees(position[1], last_key, window)) {
    return;
  }
#pragma unroll
  for (int i = 0; i < kScoreTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = first_key + i * 8 + g.lane() % 4 * 2 + e % 2;
      if (!Sees(position[e / 2], key, window)) scores[i][e] = -kInfinity;
    }
  }
}

// Turns a tile's scores into weights; `factor` is for what the rows summed
// before.
template <int kScoreTiles>
TANDEM_DEVICE void WeighTile(Grid& g, float c, float (&scores)[kScoreTiles][4],
                             RowMaximum (&maximum)[2], float (&factor)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float most = -kInfinity;
#pragma unroll
    for (int i = 0; i < kScoreTiles; ++i) {
      most = Max(most, Max(scores[i][h * 2], scores[i][h * 2 + 1]));
    }
    most = Max(most, g.ShuffleXor(most, 1));
    most = Max(most, g.ShuffleXor(most, 2));
    factor[h] = maximum[h].Raise(most, c);
#pragma unroll
    for (int i = 0; i < kScoreTiles; ++i) {
#pragma unroll
      for (int e = h * 2; e < h * 2 + 2; ++e) {
        scores[i][e] = maximum[h].Weight(scores[i][e], c);
      }
    }
  }
}

// Rounds weights and lays them out as the operand of the value steps; `sum` is
// scaled, and they are added to it.
template <typename T, int kScoreTiles>
TANDEM_DEVICE void PackWeights(const float (&scores)[kScoreTiles][4],
                               const float (&factor)[2], float (&sum)[2],
                               uint32_t (&weights)[kScoreTiles / 2][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) sum[h] = Mul(sum[h], factor[h]);
#pragma unroll
  for (int n = 0; n < kScoreTiles / 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&pair)[4] = scores[n * 2 + i / 2];
      weights[n][i] = PackPair<T>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
    }
    SumStep<T>(weights[n], sum);
  }
}

template <int kTiles>
TANDEM_DEVICE void ScaleRows(const float (&factor)[2],
                             float (&values)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      values[i][e] = Mul(values[i][e], factor[e / 2]);
    }
  }
}

// The position of row `row` of a span; -1, which sees nothing, behind its end.
TANDEM_DEVICE int PositionOf(const AttentionKernelParams& p,
                             const RowSpan& span, int row) {
  return row < span.num_rows * p.group ? span.first_position + row / p.group
                                       : -1;
}

// The first and last position of rows [row, row + count); -1 without any.
struct RowPositions {
  int first;
  int last;

  TANDEM_DEVICE RowPositions(const AttentionKernelParams& p,
                             const RowSpan& span, int row, int count)
      : first(PositionOf(p, span, row)),
        last(first < 0
                 ? -1
                 : PositionOf(
                       p, span,
                       Smaller(row + count, span.num_rows * p.group) - 1)) {}

  // Whether one sees a key of `range` in the tile that another does not.
  TANDEM_DEVICE bool SeeApart(const KeyRange& range, int first_key,
                              int window) const {
    const int last_key = Smaller(first_key + kAttentionTile, range.end) - 1;
    return !Sees(first, last_key, window) ||
           !Sees(last, Larger(first_key, range.begin), window);
  }
};

TANDEM_DEVICE bool IsNarrow(const RowSpan& span) { return span.num_rows == 1; }

// Copies query rows [row, row + kRows) of a span into shared memory; zeros
// beyond its last row and head_dim. Commits nothing.
template <typename T, int D, int kRows, int kThreads>
TANDEM_DEVICE void CopyQueries(Grid& g, const AttentionKernelParams& p,
                               const RowSpan& span, int kv_head, int row,
                               int thread, std::byte* to) {
  constexpr int kPieces = D / 8;
  const int rows = span.num_rows * p.group;
  const T* const q = static_cast<const T*>(p.q);
#pragma unroll
  for (int i = thread; i < kRows * kPieces; i += kThreads) {
    const int r = i / kPieces;
    const int piece = i % kPieces;
    const bool valid = row + r < rows && piece * 8 < p.head_dim;
    const T* from = q;
    if (valid) {
      const int position = (row + r) / p.group;
      const int head = (row + r) % p.group;
      from += (span.first_row + position) * p.q_stride +
              (kv_head * p.group + head) * p.head_dim + piece * 8;
    }
    CopyAsync16(g, to + PieceOffset<kRows>(r, piece), from, valid ? 16 : 0);
  }
}

// Where row `row` of a span writes its head.
template <typename T>
TANDEM_DEVICE T* OutRow(const AttentionKernelParams& p, const RowSpan& span,
                        int kv_head, int row) {
  return static_cast<T*>(p.out) +
         (span.first_row + row / p.group) * p.out_stride +
         (kv_head * p.group + row % p.group) * p.head_dim;
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ATTENTION_CUH_
