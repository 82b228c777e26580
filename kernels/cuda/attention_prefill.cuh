// SPDX-License-Identifier: Apache-2.0
// Attention of spans with many query rows. A block of threads takes
// 16 * kWarps rows through all the keys they see, tile by tile, each warp its
// own 16 rows. At the end of a segment its result is merged into what earlier
// segments gave, which waits in shared memory, thread by thread; so bits are
// those of the decode kernel, which keeps segments apart.
//
// Grid: tiles of rows (of the longest span) x kv_heads x num_spans. Tiles that
// see most keys start first.

#ifndef TANDEM_KERNELS_CUDA_ATTENTION_PREFILL_CUH_
#define TANDEM_KERNELS_CUDA_ATTENTION_PREFILL_CUH_

#include "kernels/cuda/attention_tile.cuh"

namespace tandem::kernels::cuda {

// Stream: KeyStream, or what gives its chunks from another cache.
template <typename T, int D, int kWarps, int kSlots,
          template <typename, int, int, int> typename Stream = KeyStream>
struct AttentionPrefillKernel {
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kWarps;
  using Keys = Stream<T, D, kSlots, kThreads>;
  static constexpr int kQueryBytes = kRows * D * 2;
  static constexpr int kMergedBytes = kRows * D * 4;
  static constexpr int kSharedBytes = Keys::kBytes + kQueryBytes + kMergedBytes;
  static constexpr int kValueTiles = D / 8;
  static constexpr int kScoreTiles = kAttentionTile / 8;

  AttentionKernelParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const RowSpan span = p.spans[g.block_z()];
    if (IsNarrow(span)) return;
    const int rows = span.num_rows * p.group;
    const int row0 = (g.grid_x() - 1 - g.block_x()) * kRows;
    if (row0 >= rows) return;
    const int kv_head = g.block_y();
    const int last_row = Smaller(row0 + kRows, rows) - 1;
    const KeyRange range(span.first_position + row0 / p.group,
                         span.first_position + last_row / p.group, p.window);

    std::byte* const ring = g.shared();
    std::byte* const queries = ring + Keys::kBytes;
    // [value][thread]: everyone finds its own again.
    float* const merged =
        reinterpret_cast<float*>(queries + kQueryBytes) + g.thread();
    Keys keys{p,
              p.block_tables + span.block_table,
              kv_head,
              range.begin,
              range.end,
              range.first_tile,
              range.end_tile,
              ring};
    CopyQueries<T, D, kRows, kThreads>(g, p, span, kv_head, row0, g.thread(),
                                       queries);
    keys.Start(g);

    const float c = ExponentScale(p);
    const int lane = g.lane();
    const int warp_row = g.warp() * 16;
    const RowPositions warp(p, span, row0 + warp_row, 16);
    int position[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      position[h] = PositionOf(p, span, row0 + warp_row + lane / 4 + h * 8);
    }
    RowMaximum maximum[2];
    float sum[2] = {};
    float values[kValueTiles][4] = {};
    float merged_maximum[2];
    float merged_sum[2];
    for (int tile = range.first_tile; tile < range.end_tile; ++tile) {
      const int first_key = tile * kAttentionTile;
      const bool unseen = first_key > warp.last;  // by all rows of the warp
      float scores[kScoreTiles][4] = {};
#pragma unroll
      for (int part = 0; part < kChunksPerTile / 2; ++part) {
        const std::byte* const chunk = keys.Next(g);
        if (unseen) continue;
#pragma unroll 4
        for (int step = 0; step < D / 16; ++step) {
          uint32_t a[4];
          LoadRows<kRows>(g, queries, warp_row, step, a);
#pragma unroll
          for (int i = 0; i < kChunkKeys / 8; i += 2) {
            const int n = part * (kChunkKeys / 8) + i;
            ScoreStep<T>(g, chunk, i * 8, step, a, scores[n], scores[n + 1]);
          }
        }
      }
      uint32_t weights[kAttentionTile / 16][4];
      if (!unseen) {
        CapScores(p, scores);
        MaskScores(g, first_key, position, p.window, scores);
        float factor[2];
        WeighTile(g, c, scores, maximum, factor);
        ScaleRows(factor, values);
        PackWeights<T>(scores, factor, sum, weights);
      }
      const bool partial = warp.SeeApart(range, first_key, p.window);
#pragma unroll
      for (int part = 0; part < kChunksPerTile / 2; ++part) {
        const std::byte* const chunk = keys.Next(g);
        if (unseen) continue;
        if (partial && g.Any(!LooksFinite<T, D, kChunkKeys>(
                           g, chunk, 0, kChunkKeys, lane, 32))) {
#pragma unroll
          for (int step = 0; step < kChunkKeys / 16; ++step) {
            const int n = part * (kChunkKeys / 16) + step;
            GuardedValueStep<T, kChunkKeys>(
                g, chunk, first_key + part * kChunkKeys, step * 16, position,
                p.window, weights[n], values);
          }
          continue;
        }
#pragma unroll
        for (int step = 0; step < kChunkKeys / 16; ++step) {
          const int n = part * (kChunkKeys / 16) + step;
#pragma unroll
          for (int i = 0; i < kValueTiles; i += 2) {
            ValueStep<T>(g, chunk, step * 16, i * 8, weights[n], values[i],
                         values[i + 1]);
          }
        }
      }
      if ((tile + 1) % kSegmentTiles != 0 && tile + 1 != range.end_tile) {
        continue;
      }
      // The end of a segment.
      const bool first = tile / kSegmentTiles == range.first_segment;
      const bool last = tile + 1 == range.end_tile;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h] = FoldSum(g, sum[h]);
        if (!first) {
          const MergeFactors merge(merged_maximum[h], maximum[h].maximum, c);
          maximum[h].maximum = merge.maximum;
          sum[h] = merge(merged_sum[h], sum[h]);
#pragma unroll
          for (int i = 0; i < kValueTiles; ++i) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& value = values[i][h * 2 + e];
              value = merge(merged[(i * 4 + h * 2 + e) * kThreads], value);
            }
          }
        }
        if (!last) {
          merged_maximum[h] = maximum[h].maximum;
          merged_sum[h] = sum[h];
          maximum[h] = RowMaximum();
#pragma unroll
          for (int i = 0; i < kValueTiles; ++i) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& value = values[i][h * 2 + e];
              merged[(i * 4 + h * 2 + e) * kThreads] = value;
              value = 0;
            }
          }
          sum[h] = 0;
        }
      }
    }
    CopyAsyncWait<0>(g);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + warp_row + lane / 4 + h * 8;
      if (row >= rows) continue;
      T* const out = OutRow<T>(p, span, kv_head, row);
      const float factor =
          FinalFactor(p, HeadOf(p, kv_head, row), maximum[h].maximum, sum[h]);
#pragma unroll
      for (int i = 0; i < kValueTiles; ++i) {
        const int column = i * 8 + lane % 4 * 2;
        if (column < p.head_dim) {
          *reinterpret_cast<uint32_t*>(out + column) = PackPair<T>(
              Mul(values[i][h * 2], factor), Mul(values[i][h * 2 + 1], factor));
        }
      }
    }
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ATTENTION_PREFILL_CUH_
