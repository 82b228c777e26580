// SPDX-License-Identifier: Apache-2.0
// Attention of spans of one row: split over segments, so that a long context
// keeps many multiprocessors busy. A block of threads takes the heads that
// share a KV head (up to 16) through one segment; its warps share out the keys
// of a tile for the scores and the columns for the values. Where a span touches
// several segments each leaves its part in global memory, and the last to
// arrive merges them in order.
//
// Grid: max_segments x (kv_heads * narrow_tiles) x num_spans.

#ifndef TANDEM_KERNELS_CUDA_ATTENTION_DECODE_CUH_
#define TANDEM_KERNELS_CUDA_ATTENTION_DECODE_CUH_

#include "kernels/cuda/attention_tile.cuh"

namespace tandem::kernels::cuda {

// Stream: KeyStream, or what gives its chunks from another cache.
template <typename T, int D, int kSlots,
          template <typename, int, int, int> typename Stream = KeyStream>
struct AttentionDecodeKernel {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16;
  using Keys = Stream<T, D, kSlots, kThreads>;
  static constexpr int kQueryBytes = kRows * D * 2;
  static constexpr int kWeightBytes = kRows * kAttentionTile * 2;
  static constexpr int kMaximaBytes = kWarps * kRows * 4;
  static constexpr int kSharedBytes =
      Keys::kBytes + kQueryBytes + kWeightBytes + kMaximaBytes + 16;
  static constexpr int kColumns = D / kWarps;  // of values, per warp
  static constexpr int kColumnTiles = kColumns / 8;
  static constexpr int kScoreTiles = kAttentionTile / kWarps / 8;
  static_assert(kColumns % 16 == 0);

  AttentionKernelParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const RowSpan span = p.spans[g.block_z()];
    if (!IsNarrow(span)) return;
    const int kv_head = g.block_y() / p.narrow_tiles;
    const int row0 = g.block_y() % p.narrow_tiles * kRows;
    const int rows = Smaller(p.group - row0, kRows);
    const int position = span.first_position;
    const KeyRange range(position, position, p.window);
    const int segment = range.first_segment + g.block_x();
    if (segment >= range.end_segment) return;

    std::byte* const ring = g.shared();
    std::byte* const queries = ring + Keys::kBytes;
    std::byte* const weights = queries + kQueryBytes;
    float* const maxima = reinterpret_cast<float*>(weights + kWeightBytes);
    const int first_tile = Larger(segment * kSegmentTiles, range.first_tile);
    const int end_tile = Smaller((segment + 1) * kSegmentTiles, range.end_tile);
    Keys keys{p,         p.block_tables + span.block_table,
              kv_head,   range.begin,
              range.end, first_tile,
              end_tile,  ring};
    CopyQueries<T, D, kRows, kThreads>(g, p, span, kv_head, row0, g.thread(),
                                       queries);
    keys.Start(g);

    const float c = ExponentScale(p);
    const int lane = g.lane();
    // This thread's accumulators are of rows lane / 4 and 8 more; one that is
    // no head sees nothing.
    const int sees[2] = {lane / 4 < rows ? position : -1,
                         lane / 4 + 8 < rows ? position : -1};
    RowMaximum maximum[2];
    float sum[2] = {};
    float values[kColumnTiles][4] = {};
    // The queries stay in registers, but for the widest heads.
    constexpr bool kHold = D <= 128;
    uint32_t held[kHold ? D / 16 : 1][4];
    for (int tile = first_tile; tile < end_tile; ++tile) {
      float scores[kScoreTiles][4] = {};
#pragma unroll
      for (int part = 0; part < kChunksPerTile / 2; ++part) {
        const std::byte* const chunk = keys.Next(g);
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
          uint32_t(&a)[4] = held[kHold ? step : 0];
          if (!kHold || (part == 0 && tile == first_tile)) {
            LoadRows<kRows>(g, queries, 0, step, a);
          }
          ScoreStep<T>(g, chunk, g.warp() * 16, step, a, scores[part * 2],
                       scores[part * 2 + 1]);
        }
      }
      CapScores(p, scores);
      float most[2] = {-kInfinity, -kInfinity};
#pragma unroll
      for (int i = 0; i < kScoreTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = tile * kAttentionTile + KeyOf(g, i, e);
          if (!Sees(sees[e / 2], key, p.window)) {
            scores[i][e] = -kInfinity;
          }
          most[e / 2] = Max(most[e / 2], scores[i][e]);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        most[h] = Max(most[h], g.ShuffleXor(most[h], 1));
        most[h] = Max(most[h], g.ShuffleXor(most[h], 2));
        if (lane % 4 == 0) {
          maxima[g.warp() * kRows + lane / 4 + h * 8] = most[h];
        }
      }
      g.Barrier();
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          most[h] = Max(most[h], maxima[w * kRows + lane / 4 + h * 8]);
        }
        factor[h] = maximum[h].Raise(most[h], c);
      }
#pragma unroll
      for (int i = 0; i < kScoreTiles; ++i) {
        // Two keys side by side in each of two rows.
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int r = lane / 4 + h * 8;
          const int key = KeyOf(g, i, h * 2);
          *reinterpret_cast<uint32_t*>(
              weights + PieceOffset<kRows>(r, key / 8) + key % 8 * 2) =
              PackPair<T>(maximum[h].Weight(scores[i][h * 2], c),
                          maximum[h].Weight(scores[i][h * 2 + 1], c));
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h] = Mul(sum[h], factor[h]);
#pragma unroll
        for (int i = 0; i < kColumnTiles; ++i) {
          values[i][h * 2] = Mul(values[i][h * 2], factor[h]);
          values[i][h * 2 + 1] = Mul(values[i][h * 2 + 1], factor[h]);
        }
      }
#pragma unroll
      for (int part = 0; part < kChunksPerTile / 2; ++part) {
        const std::byte* const chunk = keys.Next(g);
#pragma unroll
        for (int step = 0; step < kChunkKeys / 16; ++step) {
          uint32_t a[4];
          LoadRows<kRows>(g, weights, 0, part * (kChunkKeys / 16) + step, a);
          SumStep<T>(a, sum);
#pragma unroll
          for (int i = 0; i < kColumnTiles; i += 2) {
            ValueStep<T>(g, chunk, step * 16, g.warp() * kColumns + i * 8, a,
                         values[i], values[i + 1]);
          }
        }
      }
    }
    CopyAsyncWait<0>(g);
    sum[0] = FoldSum(g, sum[0]);
    sum[1] = FoldSum(g, sum[1]);

    const int segments = range.end_segment - range.first_segment;
    if (segments == 1) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = lane / 4 + h * 8;
        if (r >= rows) continue;
        T* const out = OutRow<T>(p, span, kv_head, row0 + r);
        const float factor = FinalFactor(p, HeadOf(p, kv_head, row0 + r),
                                         maximum[h].maximum, sum[h]);
#pragma unroll
        for (int i = 0; i < kColumnTiles; ++i) {
          const int column = g.warp() * kColumns + i * 8 + lane % 4 * 2;
          if (column < p.head_dim) {
            *reinterpret_cast<uint32_t*>(out + column) =
                PackPair<T>(Mul(values[i][h * 2], factor),
                            Mul(values[i][h * 2 + 1], factor));
          }
        }
      }
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = lane / 4 + h * 8;
      if (r >= rows) continue;
      float* const part = Part(g, kv_head, row0 + r, g.block_x());
      if (g.warp() == 0 && lane % 4 == 0) {
        part[0] = maximum[h].maximum;
        part[1] = sum[h];
      }
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) {
        const int column = g.warp() * kColumns + i * 8 + lane % 4 * 2;
        if (column < p.head_dim) {
          part[2 + column] = values[i][h * 2];
          part[3 + column] = values[i][h * 2 + 1];
        }
      }
    }
    const int64_t work =
        int64_t{g.block_z()} * p.kv_heads * p.narrow_tiles + g.block_y();
    if (!LastToArrive(g, p.arrivals + work, segments, maxima)) return;
    Merge(g, segments, rows, span, kv_head, row0, c);
  }

 private:
  // Which key of a tile is element e of score tile i of this thread: chunks of
  // 64 keys, 16 of each to a warp.
  TANDEM_DEVICE static int KeyOf(Grid& g, int i, int e) {
    return i / 2 * kChunkKeys + g.warp() * 16 + i % 2 * 8 + g.lane() % 4 * 2 +
           e % 2;
  }

  // Has every segment's block been here? Then all they wrote is visible.
  TANDEM_DEVICE static bool LastToArrive(Grid& g, int32_t* arrivals,
                                         int segments, float* flag) {
    g.ThreadFence();
    g.Barrier();
    if (g.thread() == 0) {
      const bool last = g.AtomicAdd(arrivals, 1) == segments - 1;
      if (last) *arrivals = 0;
      *flag = last ? 1.0f : 0.0f;
    }
    g.Barrier();
    const bool last = *flag != 0.0f;
    g.ThreadFence();
    return last;
  }

  // What segment `s` of a query head leaves for the merge.
  TANDEM_DEVICE float* Part(Grid& g, int kv_head, int row, int s) const {
    const int64_t head =
        (int64_t{g.block_z()} * p.kv_heads + kv_head) * p.group + row;
    return p.partials + (head * p.max_segments + s) * (p.head_dim + 2);
  }

  TANDEM_DEVICE void Merge(Grid& g, int segments, int rows, const RowSpan& span,
                           int kv_head, int row0, float c) const {
    const int half = p.head_dim / 2;
    for (int i = g.thread(); i < rows * half; i += kThreads) {
      const int r = i / half;
      const int column = i % half * 2;
      const float* part = Part(g, kv_head, row0 + r, 0);
      float maximum = part[0];
      float sum = part[1];
      float low = part[2 + column];
      float high = part[3 + column];
      // Loads of several segments at once; the merges wait for each other.
#pragma unroll 4
      for (int s = 1; s < segments; ++s) {
        part += p.head_dim + 2;
        const MergeFactors merge(maximum, part[0], c);
        maximum = merge.maximum;
        sum = merge(sum, part[1]);
        low = merge(low, part[2 + column]);
        high = merge(high, part[3 + column]);
      }
      const float factor =
          FinalFactor(p, HeadOf(p, kv_head, row0 + r), maximum, sum);
      *reinterpret_cast<uint32_t*>(OutRow<T>(p, span, kv_head, row0 + r) +
                                   column) =
          PackPair<T>(Mul(low, factor), Mul(high, factor));
    }
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ATTENTION_DECODE_CUH_
