// SPDX-License-Identifier: Apache-2.0
// What the attention kernels for bf16 and f16 share: arguments, who sees which
// keys, how rows lie in shared memory, and the stream of keys and values out of
// the paged cache. A query row is one head of one position; the `group` heads
// that share a KV head are rows side by side (row = position in the span *
// group + head in the group), so that they share every load.
//
// A span of one row goes to the decode kernel, a longer one to a prefill
// kernel, of wide heads the one of attention_wide.cuh. All give the same bits:
// attention_tile.cuh has their arithmetic.

#ifndef TANDEM_KERNELS_CUDA_ATTENTION_CUH_
#define TANDEM_KERNELS_CUDA_ATTENTION_CUH_

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/numerics.h"

namespace tandem::kernels::cuda {

struct AttentionKernelParams {
  const void* q;  // [rows, heads, head_dim], stride q_stride elements
  void* out;      // [rows, heads, head_dim]
  const void* k;  // of the layer: position p of KV head h of block b is at
  const void* v;  // b * block_stride + h * head_stride + p * slot_stride
  const void* k_scales;         // of a quantised layer, in bytes: of group s at
  const void* v_scales;         // b * block_stride + h * head_scales
                                // + s * scale_stride + p * KvScaleBytes
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
  int64_t head_scales;
  int64_t scale_stride;
  int slot_stride;
  DType kv;
  int kv_heads;
  int group;                  // query heads per KV head
  int head_dim;               // multiple of 8, at most kMaxHeadDim
  int block_size;             // multiple of 8
  uint32_t block_reciprocal;  // 2^32 / block_size, rounded up
  int window;                 // positions seen, the row's own included; 0: all
  int narrow_tiles;           // of 16 rows that one position's group takes
  int max_segments;           // that a span of one row may touch
  float scale;
  float soft_cap;      // of scores; 0: none
  const float* sinks;  // [heads]; null: none
};

// What scores are multiplied by on their way to Exp2; capped ones are what the
// softmax takes.
TANDEM_DEVICE float ExponentScale(const AttentionKernelParams& p) {
  return p.soft_cap > 0 ? kLog2E : Mul(p.scale, kLog2E);
}
template <int kScoreTiles>
TANDEM_DEVICE void CapScores(const AttentionKernelParams& p,
                             float (&scores)[kScoreTiles][4]) {
  if (p.soft_cap <= 0) return;
#pragma unroll
  for (int i = 0; i < kScoreTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[i][e] = SoftCap(Mul(scores[i][e], p.scale), p.soft_cap);
    }
  }
}

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

// Heads of more than 256 dimensions go through shared memory in strips of
// columns, so that chunks stay small.
template <int D>
inline constexpr int kStrips = D <= 256 ? 1 : D / 192;
template <int D>
inline constexpr int kStripColumns = D / kStrips<D>;
// Those that hold some of head_dim.
template <int D>
TANDEM_DEVICE int StripsOf(const AttentionKernelParams& p) {
  if constexpr (kStrips<D> == 1) {
    return 1;
  } else {
    return (p.head_dim + kStripColumns<D> - 1) / kStripColumns<D>;
  }
}

// Copies chunks of keys and values through a ring of shared memory. Tile by
// tile: the tile's keys, then its values. A chunk is a strip of 64 rows of D,
// padded with zeros; those of the same rows follow one another.
template <typename T, int D, int kSlots, int kThreads>
struct KeyStream {
  static constexpr int kColumns = kStripColumns<D>;
  static constexpr int kChunkBytes = kChunkKeys * kColumns * 2;
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
  int strip = 0;  // of the part
  int slot = 0;   // where it goes
  int taken = 0;  // slot of the next chunk to use

  TANDEM_DEVICE void Start(Grid& g) {
#pragma unroll
    for (int i = 0; i < kSlots - 1; ++i) CopyNext(g);
  }

  TANDEM_DEVICE void CopyNext(Grid& g) {
    if (tile < end_tile) {
      constexpr int kPieces = kColumns / 8;
      const int column0 = strip * kColumns;
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
        const bool valid =
            key >= begin && key < end && column0 + piece * 8 < p.head_dim;
        const T* from = base;
        if (valid) {
          const int block = BlockOf(p, key);
          from += table[block] * p.block_stride +
                  int64_t{key - block * p.block_size} * p.head_dim + column0 +
                  piece * 8;
        }
        CopyAsync16(g, to + PieceOffset<kChunkKeys>(row, piece), from,
                    valid ? 16 : 0);
      }
      if (kStrips<D> == 1 || ++strip == StripsOf<D>(p)) {
        strip = 0;
        if (++part == kChunksPerTile) {
          part = 0;
          ++tile;
        }
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

// True if `row_position` may look at `key`.
TANDEM_DEVICE bool Sees(int row_position, int key, int window) {
  return key <= row_position && (window == 0 || key > row_position - window);
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
    return first >= 0 && (!Sees(first, last_key, window) ||
                          !Sees(last, Larger(first_key, range.begin), window));
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

// The query head of row `row` of a span.
TANDEM_DEVICE int HeadOf(const AttentionKernelParams& p, int kv_head, int row) {
  return kv_head * p.group + row % p.group;
}

// Where row `row` of a span writes its head.
template <typename T>
TANDEM_DEVICE T* OutRow(const AttentionKernelParams& p, const RowSpan& span,
                        int kv_head, int row) {
  return static_cast<T*>(p.out) +
         (span.first_row + row / p.group) * p.out_stride +
         HeadOf(p, kv_head, row) * p.head_dim;
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ATTENTION_CUH_
