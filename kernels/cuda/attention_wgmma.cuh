// SPDX-License-Identifier: Apache-2.0
// Attention of spans with many query rows on sm_90a: the tiles of
// attention_prefill.cuh on Hopper's warpgroup instructions, and so its bits.
// One block per multiprocessor takes work items (128 rows of a KV head's
// queries) one after the other. Its first warpgroup copies keys and values
// into a ring of tiles, through the block tables; the two others have 64 rows
// each:
//
//   scores of tile j+1      are on the tensor cores while
//   values of tile j        follow them there, and then
//   weights of tile j+1     are computed while those of tile j are multiplied.
//
// The two take turns in issuing, so that one's weights are computed while the
// other's products run. At a segment's end the values wait for the next one in
// shared memory, thread by thread.
//
// Grid: up to one block per multiprocessor. Work items that see most keys come
// first.

#ifndef TANDEM_KERNELS_CUDA_ATTENTION_WGMMA_CUH_
#define TANDEM_KERNELS_CUDA_ATTENTION_WGMMA_CUH_

#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/device/async_copy.h"
#include "kernels/cuda/device/wgmma.h"

namespace tandem::kernels::cuda {

// D: 64 or 128.
template <typename T, int D, int kStages>
struct AttentionWgmmaKernel {
  static constexpr int kGroups = 2;  // warpgroups that compute
  static constexpr int kThreads = 128 * (1 + kGroups);
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kStageBytes = kAttentionTile * D * 2;
  static constexpr int kQueryBytes = kRows * D * 2;
  static constexpr int kMergedBytes = kRows * D * 4;
  static constexpr int kBarriers = 2 * kStages + 2 + kGroups;
  static constexpr int kAlignment = 1024;  // the swizzle goes by address
  static constexpr int kSharedBytes = kAlignment + kStages * kStageBytes +
                                      kQueryBytes + kMergedBytes +
                                      kBarriers * 8 + kGroups * 16;
  static constexpr int kValueTiles = D / 8;
  static constexpr int kScoreTiles = kAttentionTile / 8;
  static constexpr int kWarps = 4 * kGroups;  // that compute
  static_assert(kSharedBytes <= 227 * 1024);

  AttentionKernelParams p;
  int row_tiles;  // of kRows, of the longest span
  int num_spans;

  TANDEM_DEVICE void operator()(Grid& g) const {
    if constexpr (TANDEM_WGMMA) Attend(g);
  }

 private:
  // What lies where in shared memory.
  struct Places {
    std::byte* ring;
    std::byte* queries;
    std::byte* merged;
    AsyncBarrier* full;   // [kStages]
    AsyncBarrier* empty;  // [kStages]
    AsyncBarrier* queries_full;
    AsyncBarrier* queries_empty;
    AsyncBarrier* turn;  // [kGroups]
    int32_t* votes;      // [kGroups][4]

    TANDEM_DEVICE explicit Places(Grid& g)
        : ring(AlignShared<kAlignment>(g, g.shared())),
          queries(ring + kStages * kStageBytes),
          merged(queries + kQueryBytes),
          full(reinterpret_cast<AsyncBarrier*>(merged + kMergedBytes)),
          empty(full + kStages),
          queries_full(empty + kStages),
          queries_empty(queries_full + 1),
          turn(queries_empty + 1),
          votes(reinterpret_cast<int32_t*>(turn + kGroups)) {}
  };

  // A place in the ring and how often the ring was gone round.
  struct Cursor {
    int slot = 0;
    int parity = 0;
    TANDEM_DEVICE void Advance() {
      if (++slot == kStages) {
        slot = 0;
        parity ^= 1;
      }
    }
  };

  struct Work {
    RowSpan span;
    int kv_head;
    int row0;
    int rows;  // of the span; none of them from row0 on: nothing to do
    KeyRange range{0, 0, 0};

    TANDEM_DEVICE bool some() const { return row0 < rows; }
  };

  TANDEM_DEVICE Work Find(int item) const {
    Work w;
    const int each = p.kv_heads * num_spans;
    const int tile = item / each;  // the longest of all come first
    w.kv_head = item % p.kv_heads;
    w.span = p.spans[item % each / p.kv_heads];
    w.rows = IsNarrow(w.span) ? 0 : w.span.num_rows * p.group;
    w.row0 = (row_tiles - 1 - tile) * kRows;
    if (w.some()) {
      const RowPositions block(p, w.span, w.row0, kRows);
      w.range = KeyRange(block.first, block.last, p.window);
    }
    return w;
  }

  TANDEM_DEVICE int items() const { return row_tiles * p.kv_heads * num_spans; }
  // Forth and back, so that every block gets as much to do.
  TANDEM_DEVICE static int ItemOf(Grid& g, int round) {
    return round * g.grid_x() +
           (round % 2 == 0 ? g.block_x() : g.grid_x() - 1 - g.block_x());
  }

  TANDEM_DEVICE void Attend(Grid& g) const {
    const Places at(g);
    if (g.thread() == 0) {
      for (int s = 0; s < kStages; ++s) {
        InitBarrier(g, at.full + s, 128);
        InitBarrier(g, at.empty + s, kWarps);
      }
      InitBarrier(g, at.queries_full, 128);
      InitBarrier(g, at.queries_empty, kWarps);
      for (int i = 0; i < kGroups; ++i) InitBarrier(g, at.turn + i, 4);
      FenceBarriers(g);
    }
    g.Barrier();
    // 40 and twice 232: what 384 threads of 168 have.
    if (g.warp() < 4) {
      GiveRegisters<40>(g);
      Produce(g, at);
    } else {
      TakeRegisters<232>(g);
      Consume(g, at);
    }
  }

  // ---- The warpgroup that copies.

  TANDEM_DEVICE void Produce(Grid& g, const Places& at) const {
    Cursor cursor;
    int queries_parity = 1;
    for (int round = 0; round * g.grid_x() < items(); ++round) {
      const int item = ItemOf(g, round);
      if (item >= items()) continue;
      const Work w = Find(item);
      if (!w.some()) continue;
      AwaitPhase(g, at.queries_empty, queries_parity);
      queries_parity ^= 1;
      CopyQueries<T, D, kRows, 128>(g, p, w.span, w.kv_head, w.row0, g.thread(),
                                    at.queries);
      CopyAsyncArrive(g, at.queries_full);
      // In the order of use: a tile's values after the next one's keys.
      const KeyRange& range = w.range;
      for (int tile = range.first_tile; tile <= range.end_tile; ++tile) {
        if (tile < range.end_tile) CopyTile(g, at, w, p.k, tile, cursor);
        if (tile > range.first_tile) CopyTile(g, at, w, p.v, tile - 1, cursor);
      }
    }
    // No thread ends with copies on their way.
    CopyAsyncCommit(g);
    CopyAsyncWait<0>(g);
  }

  // Each warp 32 keys. Eight keys are in one block of the cache.
  TANDEM_DEVICE void CopyTile(Grid& g, const Places& at, const Work& w,
                              const void* side, int tile,
                              Cursor& cursor) const {
    constexpr int kPieces = D / 8;
    constexpr int kAtOnce = 32 / kPieces;  // keys
    const int piece = g.lane() % kPieces;
    const int32_t* const table = p.block_tables + w.span.block_table;
    const T* const base =
        static_cast<const T*>(side) + w.kv_head * p.head_stride + piece * 8;
    const int key0 = tile * kAttentionTile;
    AwaitPhase(g, at.empty + cursor.slot, cursor.parity ^ 1);
    std::byte* const to = at.ring + cursor.slot * kStageBytes;
#pragma unroll
    for (int eight = 0; eight < 4; ++eight) {
      const int first = g.warp() * 32 + eight * 8;
      const int block = BlockOf(p, key0 + first);
      const bool some =
          key0 + first < w.range.end && key0 + first + 8 > w.range.begin;
      const T* const from =
          base +
          (some ? table[block] * p.block_stride +
                      int64_t{key0 + first - block * p.block_size} * p.head_dim
                : 0);
#pragma unroll
      for (int i = 0; i < 8 / kAtOnce; ++i) {
        const int row = i * kAtOnce + g.lane() / kPieces;
        const int key = key0 + first + row;
        const bool valid =
            key >= w.range.begin && key < w.range.end && piece * 8 < p.head_dim;
        CopyAsync16(g, to + PieceOffset<kAttentionTile>(first + row, piece),
                    valid ? from + row * p.head_dim : p.k, valid ? 16 : 0);
      }
    }
    CopyAsyncArrive(g, at.full + cursor.slot);
    cursor.Advance();
  }

  // ---- The warpgroups that compute.

  struct alignas(16) Four {
    float v[4];
  };

  TANDEM_DEVICE void Consume(Grid& g, const Places& at) const {
    const int group = g.warp() / 4 - 1;
    const uint64_t queries = WgmmaDescriptor(
        SharedAddress(g, at.queries + group * (64 * kColumnBytes)));
    Cursor cursor;
    int queries_parity = 0;
    int turn_parity = group == 0 ? 1 : 0;  // the first one begins
    const float c = Mul(p.scale, kLog2E);
    for (int round = 0; round * g.grid_x() < items(); ++round) {
      const int item = ItemOf(g, round);
      if (item >= items()) continue;
      const Work w = Find(item);
      if (!w.some()) continue;
      const RowPositions mine(p, w.span, w.row0 + group * 64, 64);
      const int row = w.row0 + group * 64 + g.warp() % 4 * 16 + g.lane() / 4;
      const int position[2] = {PositionOf(p, w.span, row),
                               PositionOf(p, w.span, row + 8)};
      const KeyRange& range = w.range;
      RowMaximum maximum[2];
      float sum[2] = {};
      float merged_maximum[2] = {};
      float merged_sum[2] = {};
      float values[kValueTiles][4] = {};
      uint32_t weights[kScoreTiles / 2][4];
      float factor[2];

      AwaitPhase(g, at.queries_full, queries_parity);
      queries_parity ^= 1;
      {
        float scores[kScoreTiles][4] = {};
        AwaitPhase(g, at.full + cursor.slot, cursor.parity);
        ProxyFence(g);
        WgmmaPin(g, scores);  // the zeros come before the fence
        WgmmaFence(g);
        Scores(g, queries, at.ring + cursor.slot * kStageBytes, scores);
        WgmmaCommit(g);
        WgmmaWait<0>(g);
        WgmmaPin(g, scores);
        Release(g, at.empty + cursor.slot);
        cursor.Advance();
        MaskScores(g, range.first_tile * kAttentionTile, position, p.window,
                   scores);
        WeighTile(g, c, scores, maximum, factor);
        PackWeights<T>(scores, factor, sum, weights);
      }
      for (int tile = range.first_tile + 1; tile < range.end_tile; ++tile) {
        const int last_key0 = (tile - 1) * kAttentionTile;
        float scores[kScoreTiles][4] = {};
        const Cursor keys = cursor;
        cursor.Advance();
        const Cursor last = cursor;
        cursor.Advance();
        std::byte* const v = at.ring + last.slot * kStageBytes;
        AwaitPhase(g, at.full + keys.slot, keys.parity);
        AwaitPhase(g, at.full + last.slot, last.parity);
        ProxyFence(g);
        const bool guard =
            mine.SeeApart(range, last_key0, p.window) && Spoilt(g, at, v);
        if (guard) {
          Guarded(g, v, last_key0, position, weights, values);
        }
        AwaitPhase(g, at.turn + group, turn_parity);
        turn_parity ^= 1;
        WgmmaPin(g, scores);
        WgmmaPin(g, values);
        WgmmaFence(g);
        Scores(g, queries, at.ring + keys.slot * kStageBytes, scores);
        WgmmaCommit(g);
        if (guard) {
          PassTurn(g, at, group);
          WgmmaWait<0>(g);
        } else {
          Values(g, v, weights, values);
          WgmmaCommit(g);
          PassTurn(g, at, group);
          WgmmaWait<1>(g);
        }
        WgmmaPin(g, scores);
        Release(g, at.empty + keys.slot);

        const bool new_segment = tile % kSegmentTiles == 0;
        const float before_maximum[2] = {maximum[0].maximum,
                                         maximum[1].maximum};
        const float before_sum[2] = {sum[0], sum[1]};
        if (new_segment) {
          maximum[0] = maximum[1] = RowMaximum();
          sum[0] = sum[1] = 0;
        }
        MaskScores(g, tile * kAttentionTile, position, p.window, scores);
        WeighTile(g, c, scores, maximum, factor);
        WgmmaPin(g, scores);
        if (new_segment) {
          WgmmaWait<0>(g);
          WgmmaPin(g, values);
          const bool first = (tile - 1) / kSegmentTiles == range.first_segment;
          Fold(g, at, c, first, before_maximum, before_sum, merged_maximum,
               merged_sum, values);
        } else {
          WgmmaWait<0>(g);
          WgmmaPin(g, values);
          ScaleRows(factor, values);
        }
        Release(g, at.empty + last.slot);
        PackWeights<T>(scores, factor, sum, weights);
      }
      Release(g, at.queries_empty);
      {
        const int last_key0 = (range.end_tile - 1) * kAttentionTile;
        std::byte* const v = at.ring + cursor.slot * kStageBytes;
        AwaitPhase(g, at.full + cursor.slot, cursor.parity);
        ProxyFence(g);
        if (mine.SeeApart(range, last_key0, p.window) && Spoilt(g, at, v)) {
          Guarded(g, v, last_key0, position, weights, values);
        } else {
          WgmmaPin(g, values);
          WgmmaFence(g);
          Values(g, v, weights, values);
          WgmmaCommit(g);
          WgmmaWait<0>(g);
          WgmmaPin(g, values);
        }
        Release(g, at.empty + cursor.slot);
        cursor.Advance();
      }
      if (range.end_segment - range.first_segment > 1) {
        const float last_maximum[2] = {maximum[0].maximum, maximum[1].maximum};
        Merge(g, at, c, last_maximum, sum, merged_maximum, merged_sum, values);
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          merged_maximum[h] = maximum[h].maximum;
          merged_sum[h] = FoldSum(g, sum[h]);
        }
      }
      Write(g, w, row, merged_maximum, merged_sum, values);
    }
  }

  TANDEM_DEVICE static void Scores(Grid& g, uint64_t queries,
                                   const std::byte* keys,
                                   float (&scores)[kScoreTiles][4]) {
    const uint64_t k = WgmmaDescriptor(SharedAddress(g, keys));
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      const int column = step / 4;
      WgmmaStep<T>(
          g, scores,
          queries + column * (kRows * kColumnBytes / 16) + step % 4 * 2,
          k + column * (kAttentionTile * kColumnBytes / 16) + step % 4 * 2);
    }
  }

  TANDEM_DEVICE static void Values(
      Grid& g, const std::byte* rows,
      const uint32_t (&weights)[kScoreTiles / 2][4],
      float (&values)[kValueTiles][4]) {
    const uint64_t v = WgmmaColumnsDescriptor(SharedAddress(g, rows),
                                              kAttentionTile * kColumnBytes);
#pragma unroll
    for (int n = 0; n < kAttentionTile / 16; ++n) {
      WgmmaColumnsStep<T>(g, values, weights[n],
                          v + n * (16 * kColumnBytes / 16));
    }
  }

  TANDEM_DEVICE static void PassTurn(Grid& g, const Places& at, int group) {
    if (g.lane() == 0) Arrive(g, at.turn + (1 - group));
  }

  // As the warp that says so is done with what the barrier guards.
  TANDEM_DEVICE static void Release(Grid& g, AsyncBarrier* b) {
    g.WarpBarrier();
    if (g.lane() == 0) Arrive(g, b);
  }

  // Whether a tile of values holds Inf or NaN; all of a warpgroup agree.
  TANDEM_DEVICE static bool Spoilt(Grid& g, const Places& at,
                                   const std::byte* v) {
    const int group = g.warp() / 4 - 1;
    int32_t* const votes = at.votes + group * 4;
    const bool spoilt = g.Any(!LooksFinite<T, D, kAttentionTile>(
        g, v, 0, kAttentionTile, g.thread() % 128, 128));
    if (g.lane() == 0) votes[g.warp() % 4] = spoilt ? 1 : 0;
    g.GroupBarrier<128>(1 + group);
    const bool any = (votes[0] | votes[1] | votes[2] | votes[3]) != 0;
    g.GroupBarrier<128>(1 + group);
    return any;
  }

  TANDEM_DEVICE void Guarded(Grid& g, const std::byte* v, int first_key,
                             const int (&position)[2],
                             const uint32_t (&weights)[kScoreTiles / 2][4],
                             float (&values)[kValueTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kAttentionTile / 16; ++n) {
      GuardedValueStep<T, kAttentionTile>(g, v, first_key, n * 16, position,
                                          p.window, weights[n], values);
    }
  }

  // This thread's values of earlier segments: [value tile][thread].
  TANDEM_DEVICE static Four* Merged(Grid& g, const Places& at) {
    return reinterpret_cast<Four*>(at.merged) + (g.thread() - 128);
  }

  // Merges what earlier segments gave into `values`, and the sum of these into
  // `merged_sum`.
  TANDEM_DEVICE static void Merge(Grid& g, const Places& at, float c,
                                  const float (&maximum)[2],
                                  const float (&sum)[2],
                                  float (&merged_maximum)[2],
                                  float (&merged_sum)[2],
                                  float (&values)[kValueTiles][4]) {
    const MergeFactors merge[2] = {
        MergeFactors(merged_maximum[0], maximum[0], c),
        MergeFactors(merged_maximum[1], maximum[1], c)};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      merged_maximum[h] = merge[h].maximum;
      merged_sum[h] = merge[h](merged_sum[h], FoldSum(g, sum[h]));
    }
    const Four* const merged = Merged(g, at);
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i) {
      const Four before = merged[i * (128 * kGroups)];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        values[i][e] = merge[e / 2](before.v[e], values[i][e]);
      }
    }
  }

  // The end of a segment, `first` of the rows' or not: its values go to those
  // of the earlier ones.
  TANDEM_DEVICE static void Fold(Grid& g, const Places& at, float c, bool first,
                                 const float (&maximum)[2],
                                 const float (&sum)[2],
                                 float (&merged_maximum)[2],
                                 float (&merged_sum)[2],
                                 float (&values)[kValueTiles][4]) {
    if (first) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        merged_maximum[h] = maximum[h];
        merged_sum[h] = FoldSum(g, sum[h]);
      }
    } else {
      Merge(g, at, c, maximum, sum, merged_maximum, merged_sum, values);
    }
    Four* const merged = Merged(g, at);
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i) {
      Four after;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        after.v[e] = values[i][e];
        values[i][e] = 0;
      }
      merged[i * (128 * kGroups)] = after;
    }
  }

  TANDEM_DEVICE void Write(Grid& g, const Work& w, int first_row,
                           const float (&maximum)[2], const float (&sum)[2],
                           const float (&values)[kValueTiles][4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + h * 8;
      if (row >= w.rows) continue;
      T* const out = OutRow<T>(p, w.span, w.kv_head, row);
      const float factor =
          FinalFactor(p, HeadOf(p, w.kv_head, row), maximum[h], sum[h]);
#pragma unroll
      for (int i = 0; i < kValueTiles; ++i) {
        const int column = i * 8 + g.lane() % 4 * 2;
        if (column < p.head_dim) {
          *reinterpret_cast<uint32_t*>(out + column) = PackPair<T>(
              Mul(values[i][h * 2], factor), Mul(values[i][h * 2 + 1], factor));
        }
      }
    }
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ATTENTION_WGMMA_CUH_
