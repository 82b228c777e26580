// SPDX-License-Identifier: Apache-2.0
// Attention of spans of one row: split over segments, so that a long context
// keeps many multiprocessors busy. A block of threads takes the heads that
// share a KV head (up to 16) through one segment. Where a span touches several
// segments each leaves its part in global memory, and the last to arrive merges
// them in order.
//
// Grid: max_segments x (kv_heads * narrow_tiles) x num_spans.

#ifndef TANDEM_KERNELS_CUDA_ATTENTION_DECODE_CUH_
#define TANDEM_KERNELS_CUDA_ATTENTION_DECODE_CUH_

#include "kernels/cuda/attention_segment.cuh"

namespace tandem::kernels::cuda {

// Stream: KeyStream, or what gives its chunks from another cache.
template <typename T, int D, int kSlots,
          template <typename, int, int, int> typename Stream = KeyStream>
struct AttentionDecodeKernel {
  using Segment = AttentionSegment<T, D, kSlots, Stream>;
  static constexpr int kThreads = Segment::kThreads;
  static constexpr int kRows = Segment::kRows;
  static constexpr int kSharedBytes = Segment::kSharedBytes;

  AttentionKernelParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const RowSpan span = p.spans[g.block_z()];
    if (!IsNarrow(span)) return;
    const int kv_head = g.block_y() / p.narrow_tiles;
    const int row0 = g.block_y() % p.narrow_tiles * kRows;
    const int rows = Smaller(p.group - row0, kRows);
    const int position = span.first_position;
    const KeyRange range(position, position, p.window);
    const int index = range.first_segment + g.block_x();
    if (index >= range.end_segment) return;

    const int first_tile = Larger(index * kSegmentTiles, range.first_tile);
    const int end_tile = Smaller((index + 1) * kSegmentTiles, range.end_tile);
    const Segment segment{p, span, kv_head, row0, rows, position};
    typename Segment::Keys keys = segment.Start(g, range, first_tile, end_tile);
    typename Segment::Sums sums;
    segment.Sum(g, keys, first_tile, end_tile, sums);
    CopyAsyncWait<0>(g);

    const int segments = range.end_segment - range.first_segment;
    if (segments == 1) {
      segment.Write(g, sums);
      return;
    }
    const int lane = g.lane();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = lane / 4 + h * 8;
      if (r >= rows) continue;
      float* const part = Part(g, kv_head, row0 + r, g.block_x());
      if (g.warp() == 0 && lane % 4 == 0) {
        part[0] = sums.maximum[h];
        part[1] = sums.sum[h];
      }
#pragma unroll
      for (int i = 0; i < Segment::kColumnTiles; ++i) {
        const int column = Segment::ColumnOf(g, i);
        if (column < p.head_dim) {
          part[2 + column] = sums.values[i][h * 2];
          part[3 + column] = sums.values[i][h * 2 + 1];
        }
      }
    }
    const int64_t work =
        int64_t{g.block_z()} * p.kv_heads * p.narrow_tiles + g.block_y();
    if (!LastToArrive(g, p.arrivals + work, segments, Segment::Maxima(g))) {
      return;
    }
    Merge(g, segments, rows, span, kv_head, row0);
  }

 private:
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
                           int kv_head, int row0) const {
    const float c = ExponentScale(p);
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
