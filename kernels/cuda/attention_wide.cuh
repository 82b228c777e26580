// SPDX-License-Identifier: Apache-2.0
// Attention of spans with many query rows whose heads are too wide for the
// prefill kernel: 16 rows' results alone fill a warp's registers. A block of
// threads takes up to 16 heads of one position, as the decode kernel does, but
// through all segments; each is merged into what earlier ones gave.
//
// Grid: (positions of the longest span * narrow_tiles) x kv_heads x num_spans.
// Positions that see most keys start first, their tiles beside one another.

#ifndef TANDEM_KERNELS_CUDA_ATTENTION_WIDE_CUH_
#define TANDEM_KERNELS_CUDA_ATTENTION_WIDE_CUH_

#include "kernels/cuda/attention_segment.cuh"

namespace tandem::kernels::cuda {

// Stream: KeyStream, or what gives its chunks from another cache.
template <typename T, int D, int kSlots,
          template <typename, int, int, int> typename Stream = KeyStream>
struct AttentionWideKernel {
  using Segment = AttentionSegment<T, D, kSlots, Stream>;
  using Sums = typename Segment::Sums;
  static constexpr int kThreads = Segment::kThreads;
  static constexpr int kSharedBytes = Segment::kSharedBytes;

  AttentionKernelParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const RowSpan span = p.spans[g.block_z()];
    if (IsNarrow(span)) return;
    const int index = g.grid_x() - 1 - g.block_x();
    const int of_span = index / p.narrow_tiles;
    if (of_span >= span.num_rows) return;
    const int head0 = index % p.narrow_tiles * Segment::kRows;
    const int position = span.first_position + of_span;
    const KeyRange range(position, position, p.window);
    const Segment segment{p,
                          span,
                          g.block_y(),
                          of_span * p.group + head0,
                          Smaller(p.group - head0, Segment::kRows),
                          position};
    typename Segment::Keys keys =
        segment.Start(g, range, range.first_tile, range.end_tile);
    Sums merged;
    for (int s = range.first_segment; s < range.end_segment; ++s) {
      Sums sums;
      segment.Sum(g, keys, Larger(s * kSegmentTiles, range.first_tile),
                  Smaller((s + 1) * kSegmentTiles, range.end_tile), sums);
      if (s == range.first_segment) {
        merged = sums;
      } else {
        Merge(sums, merged);
      }
    }
    CopyAsyncWait<0>(g);
    segment.Write(g, merged);
  }

 private:
  TANDEM_DEVICE void Merge(const Sums& later, Sums& sums) const {
    const float c = ExponentScale(p);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const MergeFactors merge(sums.maximum[h], later.maximum[h], c);
      sums.maximum[h] = merge.maximum;
      sums.sum[h] = merge(sums.sum[h], later.sum[h]);
#pragma unroll
      for (int i = 0; i < Segment::kColumnTiles; ++i) {
#pragma unroll
        for (int e = h * 2; e < h * 2 + 2; ++e) {
          sums.values[i][e] = merge(sums.values[i][e], later.values[i][e]);
        }
      }
    }
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ATTENTION_WIDE_CUH_
