// SPDX-License-Identifier: Apache-2.0
// The arithmetic that the attention kernels for bf16 and f16 share, so that all
// give the same bits (numerics.h): the tensor-core steps of a tile of keys, its
// softmax, what keeps Inf and NaN from rows that may not see them, and merging
// segments. Results lie as those of m16n8 instructions: a thread's are of rows
// lane / 4 and 8 more.

#ifndef TANDEM_KERNELS_CUDA_ATTENTION_TILE_CUH_
#define TANDEM_KERNELS_CUDA_ATTENTION_TILE_CUH_

#include <type_traits>

#include "kernels/cuda/attention.cuh"

namespace tandem::kernels::cuda {

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

// What a head's values are multiplied by when all keys are summed; its sink is
// one more, behind them, whose value is zero.
TANDEM_DEVICE float FinalFactor(const AttentionKernelParams& p, int head,
                                float maximum, float sum) {
  if (p.sinks == nullptr) return Div(1.0f, sum);
  const float c = ExponentScale(p);
  const MergeFactors merge(maximum, Div(Mul(p.sinks[head], kLog2E), c), c);
  return Div(merge.before, merge(sum, 1.0f));
}

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

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ATTENTION_TILE_CUH_
