// SPDX-License-Identifier: Apache-2.0
// Feed-forward layers of many experts: each works on the rows that chose it
// and no others, with their number known to the device alone. Rows are copied
// so that those of one expert lie next to one another, in their order, and
// products are made tile by tile of these, whatever kernels/cuda/matmul*.cuh
// has for one matrix; an output is one chain (numerics.h), so none of this
// shows in the bits.

#ifndef TANDEM_KERNELS_CUDA_EXPERTS_CUH_
#define TANDEM_KERNELS_CUDA_EXPERTS_CUH_

#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/device/vectors.h"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {

inline constexpr int kExpertThreads = 128;

// Which of its experts `expert` is for a row, ascending; -1: none of the first
// `chosen`. (A row that is not finite may have a weight for each.)
TANDEM_DEVICE int PlaceAmongChosen(const ExpertPlanParams& p, int row,
                                   int expert) {
  const float* const weights = p.weights + int64_t{row} * p.columns;
  if (weights[expert] == 0) return -1;
  int before = 0;
  for (int e = 0; e < expert; ++e) before += weights[e] != 0 ? 1 : 0;
  return before < p.chosen ? before : -1;
}

// The sum of v over the block's threads; `parts` holds an int for each warp.
TANDEM_DEVICE int BlockSum(Grid& g, int v, int* parts) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) v += g.ShuffleXor(v, mask);
  g.Barrier();  // nobody reads the parts before any more
  if (g.lane() == 0) parts[g.warp()] = v;
  g.Barrier();
  int sum = 0;
  for (int w = 0; w < kExpertThreads / 32; ++w) sum += parts[w];
  return sum;
}

// counts; and all places none. A block for each expert.
struct ExpertCountKernel {
  static constexpr int kThreads = kExpertThreads;
  static constexpr int kSharedBytes = kThreads / 32 * 4;
  ExpertPlanParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int expert = g.block_x();
    int taken = 0;
    for (int row = g.thread(); row < p.num_rows; row += kThreads) {
      taken += PlaceAmongChosen(p, row, expert) < 0 ? 0 : 1;
    }
    const int count = BlockSum(g, taken, reinterpret_cast<int*>(g.shared()));
    if (g.thread() == 0) p.counts[expert] = count;
    const int places = p.num_rows * p.chosen;
    for (int i = expert * kThreads + g.thread(); i < places;
         i += p.experts * kThreads) {
      p.places[i] = -1;
    }
  }
};

// places, shares and tiles. A block for each expert.
struct ExpertPlaceKernel {
  static constexpr int kThreads = kExpertThreads;
  static constexpr int kSharedBytes = kThreads / 32 * 4;
  ExpertPlanParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int expert = g.block_x();
    int* const parts = reinterpret_cast<int*>(g.shared());
    int rows = 0;
    int tiles = 0;
    for (int e = g.thread(); e < expert; e += kThreads) {
      rows += AlignedExpertRows(p.counts[e]);
      tiles += Tiles(p.counts[e]);
    }
    const int begin = BlockSum(g, rows, parts);
    const int first_tile = BlockSum(g, tiles, parts);
    const int end = begin + p.counts[expert];
    const int own_tiles = Tiles(p.counts[expert]);
    for (int i = g.thread(); i < own_tiles; i += kThreads) {
      p.tiles[first_tile + i] = {expert, begin + i * p.tile_rows, end};
    }
    if (expert == p.experts - 1 && g.thread() == 0) {
      *p.num_tiles = first_tile + own_tiles;
    }
    int next = begin;
    for (int row = 0; row < p.num_rows; row += kThreads) {
      next += PlaceRows(g, row, expert, next, parts);
    }
  }

 private:
  TANDEM_DEVICE int Tiles(int rows) const {
    return (rows + p.tile_rows - 1) / p.tile_rows;
  }

  // Of rows [first, first + kThreads), in their order, from `next` on; how many
  // have this expert.
  TANDEM_DEVICE int PlaceRows(Grid& g, int first, int expert, int next,
                              int* parts) const {
    const int row = first + g.thread();
    const int place = row < p.num_rows ? PlaceAmongChosen(p, row, expert) : -1;
    const int mine = place < 0 ? 0 : 1;
    int through = mine;  // those of the warp's lanes up to this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int lower =
          g.Shuffle(through, g.lane() < step ? 0 : g.lane() - step);
      through += g.lane() < step ? 0 : lower;
    }
    g.Barrier();
    if (g.lane() == 31) parts[g.warp()] = through;
    g.Barrier();
    int before = through - mine;
    int all = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      before += w < g.warp() ? parts[w] : 0;
      all += parts[w];
    }
    if (place >= 0) {
      const int at = row * p.chosen + place;
      p.places[at] = next + before;
      p.shares[at] = p.weights[int64_t{row} * p.columns + expert];
    }
    return all;
  }
};

// Grid: places, then eight elements a thread.
template <typename T>
struct SpreadRowsKernel {
  static constexpr int kThreads = kExpertThreads;
  SpreadRowsParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int place = p.places[g.block_x()];
    const int64_t row = g.block_x() / p.chosen;
    const int begin = (g.block_y() * kThreads + g.thread()) * kChunk;
    if (place < 0 || begin >= p.dim) return;
    const int count = Smaller(kChunk, p.dim - begin);
    float v[kChunk];
    LoadChunk(static_cast<const T*>(p.x) + row * p.dim + begin, count,
              Aligned(p.dim), v);
    StoreChunk(static_cast<T*>(p.out) + int64_t{place} * p.dim + begin, count,
               Aligned(p.dim), v);
  }
};

template <typename T>
struct SumExpertsKernel {
  static constexpr int kThreads = kExpertThreads;
  SumExpertsParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int64_t row = g.block_x();
    const int begin = (g.block_y() * kThreads + g.thread()) * kChunk;
    if (begin >= p.dim) return;
    const int count = Smaller(kChunk, p.dim - begin);
    T* const out = static_cast<T*>(p.out) + row * p.dim + begin;
    float sum[kChunk] = {};
    if (p.weights != nullptr) {
      const float weight = p.weights[(row + 1) * p.columns - 1];
      LoadChunk(out, count, Aligned(p.dim), sum);
      for (float& v : sum) v = RoundTo<T>(Mul(weight, v));
    }
    for (int64_t i = row * p.chosen; i < (row + 1) * p.chosen; ++i) {
      if (p.places[i] < 0) continue;
      float y[kChunk];
      LoadChunk(
          static_cast<const T*>(p.y) + int64_t{p.places[i]} * p.dim + begin,
          count, Aligned(p.dim), y);
      for (int j = 0; j < kChunk; ++j) {
        sum[j] = RoundTo<T>(Fma(p.shares[i], y[j], sum[j]));
      }
    }
    StoreChunk(out, count, Aligned(p.dim), sum);
  }
};

// A product's tiles, of all experts: Product is one of matmul*.cuh. Blocks
// beside one another share an expert's rows of inputs.
template <typename Product>
struct ExpertProductKernel {
  static constexpr int kThreads = Product::kThreads;
  static constexpr int kSharedBytes = Product::kSharedBytes;
  ExpertProductParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int row_tiles = Product::RowTiles(p.product.rows);
    const int index = g.block_x() / row_tiles;
    if (index >= *p.num_tiles) return;
    const ExpertTile tile = p.tiles[index];
    const ExpertMatrix matrix = p.matrices[tile.expert];
    Product product{p.product};
    product.p.weights = matrix.weights;
    product.p.scales = matrix.scales;
    product.p.tokens = tile.end;
    if (p.product.bias != nullptr) {
      const int outputs = (p.product.gated() ? 2 : 1) * p.product.outputs;
      product.p.bias += int64_t{tile.expert} * outputs;
    }
    product.Tile(g, g.block_x() % row_tiles, tile.begin);
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_EXPERTS_CUH_
