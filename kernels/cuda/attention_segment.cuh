// SPDX-License-Identifier: Apache-2.0
// A segment's keys against up to 16 heads of one position that share a KV
// head. The warps of a block share out the keys of a tile for the scores and
// the columns for the values.

#ifndef TANDEM_KERNELS_CUDA_ATTENTION_SEGMENT_CUH_
#define TANDEM_KERNELS_CUDA_ATTENTION_SEGMENT_CUH_

#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {

// Stream: KeyStream, or what gives its chunks from another cache.
template <typename T, int D, int kSlots,
          template <typename, int, int, int> typename Stream>
struct AttentionSegment {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16;
  using Keys = Stream<T, D, kSlots, kThreads>;
  static constexpr int kQueryBytes = kRows * D * 2;
  static constexpr int kWeightBytes = kRows * kAttentionTile * 2;
  static constexpr int kMaximaBytes = kWarps * kRows * 4;
  static constexpr int kSharedBytes =
      Keys::kBytes + kQueryBytes + kWeightBytes + kMaximaBytes + 16;
  // Of the values of a strip, per warp.
  static constexpr int kColumns = kStripColumns<D> / kWarps;
  static constexpr int kStripTiles = kColumns / 8;
  static constexpr int kColumnTiles = kStrips<D> * kStripTiles;
  static constexpr int kScoreTiles = kAttentionTile / kWarps / 8;
  static_assert(kColumns % 16 == 0);
  static_assert(kSharedBytes <= kMostSharedBytes);

  // Of rows lane / 4 and 8 more.
  struct Sums {
    float maximum[2];
    float sum[2];
    float values[kColumnTiles][4];
  };

  const AttentionKernelParams& p;
  const RowSpan& span;
  int kv_head;
  int row0;  // of the span
  int rows;  // heads; the others see nothing
  int position;

  TANDEM_DEVICE static std::byte* Queries(Grid& g) {
    return g.shared() + Keys::kBytes;
  }
  TANDEM_DEVICE static std::byte* Weights(Grid& g) {
    return Queries(g) + kQueryBytes;
  }
  TANDEM_DEVICE static float* Maxima(Grid& g) {
    return reinterpret_cast<float*>(Weights(g) + kWeightBytes);
  }

  // The stream of the tiles, and the queries, on their way.
  TANDEM_DEVICE Keys Start(Grid& g, const KeyRange& range, int first_tile,
                           int end_tile) const {
    Keys keys{p,         p.block_tables + span.block_table,
              kv_head,   range.begin,
              range.end, first_tile,
              end_tile,  g.shared()};
    CopyQueries<T, D, kRows, kThreads>(g, p, span, kv_head, row0, g.thread(),
                                       Queries(g));
    keys.Start(g);
    return keys;
  }

  // Sums the next tiles of `keys`, [first_tile, end_tile) of one segment.
  TANDEM_DEVICE void Sum(Grid& g, Keys& keys, int first_tile, int end_tile,
                         Sums& sums) const {
    std::byte* const queries = Queries(g);
    std::byte* const weights = Weights(g);
    float* const maxima = Maxima(g);
    float(&sum)[2] = sums.sum;
    float(&values)[kColumnTiles][4] = sums.values;
    const float c = ExponentScale(p);
    const int strips = StripsOf<D>(p);
    const int lane = g.lane();
    const int sees[2] = {lane / 4 < rows ? position : -1,
                         lane / 4 + 8 < rows ? position : -1};
    RowMaximum maximum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = 0;
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) {
        values[i][h * 2] = 0;
        values[i][h * 2 + 1] = 0;
      }
    }
    // The queries stay in registers, but for the widest heads.
    constexpr bool kHold = D <= 128;
    uint32_t held[kHold ? D / 16 : 1][4];
    for (int tile = first_tile; tile < end_tile; ++tile) {
      float scores[kScoreTiles][4] = {};
#pragma unroll
      for (int part = 0; part < kChunksPerTile / 2; ++part) {
        for (int strip = 0; strip < strips; ++strip) {
          constexpr int kSteps = kStripColumns<D> / 16;
          const std::byte* const chunk = keys.Next(g);
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            uint32_t(&a)[4] = held[kHold ? step : 0];
            if (!kHold || (part == 0 && tile == first_tile)) {
              LoadRows<kRows>(g, queries, 0, strip * kSteps + step, a);
            }
            ScoreStep<T>(g, chunk, g.warp() * 16, step, a, scores[part * 2],
                         scores[part * 2 + 1]);
          }
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
      for (int h = 0; h < 2; ++h) sum[h] = Mul(sum[h], factor[h]);
      ScaleRows(factor, values);
#pragma unroll
      for (int part = 0; part < kChunksPerTile / 2; ++part) {
#pragma unroll
        for (int strip = 0; strip < kStrips<D>; ++strip) {
          if (strip >= strips) break;
          const std::byte* const chunk = keys.Next(g);
#pragma unroll
          for (int step = 0; step < kChunkKeys / 16; ++step) {
            uint32_t a[4];
            LoadRows<kRows>(g, weights, 0, part * (kChunkKeys / 16) + step, a);
            if (strip == 0) SumStep<T>(a, sum);
#pragma unroll
            for (int i = 0; i < kStripTiles; i += 2) {
              const int n = strip * kStripTiles + i;
              ValueStep<T>(g, chunk, step * 16, g.warp() * kColumns + i * 8, a,
                           values[n], values[n + 1]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums.maximum[h] = maximum[h].maximum;
      sum[h] = FoldSum(g, sum[h]);
    }
  }

  // The first of two columns of values[i].
  TANDEM_DEVICE static int ColumnOf(Grid& g, int i) {
    return i / kStripTiles * kStripColumns<D> + g.warp() * kColumns +
           i % kStripTiles * 8 + g.lane() % 4 * 2;
  }

  // The rows' outputs, when all keys are summed.
  TANDEM_DEVICE void Write(Grid& g, const Sums& sums) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = g.lane() / 4 + h * 8;
      if (r >= rows) continue;
      T* const out = OutRow<T>(p, span, kv_head, row0 + r);
      const float factor = FinalFactor(p, HeadOf(p, kv_head, row0 + r),
                                       sums.maximum[h], sums.sum[h]);
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) {
        const int column = ColumnOf(g, i);
        if (column < p.head_dim) {
          *reinterpret_cast<uint32_t*>(out + column) =
              PackPair<T>(Mul(sums.values[i][h * 2], factor),
                          Mul(sums.values[i][h * 2 + 1], factor));
        }
      }
    }
  }

 private:
  // Which key of a tile is element e of score tile i of this thread: chunks of
  // 64 keys, 16 of each to a warp.
  TANDEM_DEVICE static int KeyOf(Grid& g, int i, int e) {
    return i / 2 * kChunkKeys + g.warp() * 16 + i % 2 * 8 + g.lane() % 4 * 2 +
           e % 2;
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ATTENTION_SEGMENT_CUH_
