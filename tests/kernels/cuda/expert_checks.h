// SPDX-License-Identifier: Apache-2.0
// What the kernels of layers with many experts must do, as checks.h has it for
// the others.

#ifndef TANDEM_TESTS_KERNELS_CUDA_EXPERT_CHECKS_H_
#define TANDEM_TESTS_KERNELS_CUDA_EXPERT_CHECKS_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/experts.h"
#include "tests/kernels/cuda/checks.h"

namespace tandem::kernels::cuda {

// ---- Which rows an expert has, and where their copies are.

struct ExpertCase {
  int rows;
  int experts;
  int chosen;
  int tile_rows;
  int columns;  // of weights
};
// More rows, and more experts, than a block has threads.
inline constexpr ExpertCase kExpertCases[] = {{1, 4, 2, 8, 4},
                                              {150, 9, 3, 8, 10},
                                              {5, 3, 3, 128, 3},
                                              {290, 130, 2, 32, 131}};

// Of each row `chosen` weights, but of row 1 one, of row 2 none; row 3 is not
// finite and has all. What all rows take is no expert's.
inline std::vector<float> ExpertWeights(const ExpertCase& c) {
  std::vector<float> weights(At(int64_t{c.rows} * c.columns));
  for (int row = 0; row < c.rows; ++row) {
    float* const own = &weights[At(int64_t{row} * c.columns)];
    own[c.columns - 1] = c.columns > c.experts ? 1.0f : 0.0f;
    const int count = row == 1 ? 1 : row == 2 ? 0 : c.chosen;
    for (int i = 0; i < count; ++i) {
      // Some experts have many rows, and the second to last has none.
      int e = (row * row + 5 * i) % c.experts;
      while (own[e] != 0 || (e == c.experts - 2 && c.chosen < c.experts)) {
        e = (e + 1) % c.experts;
      }
      own[e] = 0.25f + 0.001f * static_cast<float>(row + i);
    }
    if (row == 3) {
      std::fill_n(own, c.experts, std::numeric_limits<float>::quiet_NaN());
    }
  }
  return weights;
}

struct ExpertPlan {
  std::vector<int32_t> counts, places, tiles;  // tiles: three numbers each
  std::vector<float> shares;

  // Word for word what launch.h says.
  ExpertPlan(const ExpertCase& c, const std::vector<float>& weights)
      : counts(At(c.experts)),
        places(At(c.rows * c.chosen), -1),
        shares(At(c.rows * c.chosen)) {
    int begin = 0;
    for (int e = 0; e < c.experts; ++e) {
      int next = begin;
      for (int row = 0; row < c.rows; ++row) {
        const float* const own = &weights[At(int64_t{row} * c.columns)];
        const int64_t before =
            std::count_if(own, own + e, [](float w) { return w != 0; });
        if (own[e] == 0 || before >= c.chosen) continue;
        places[At(row * c.chosen + before)] = next++;
        shares[At(row * c.chosen + before)] = own[e];
      }
      counts[At(e)] = next - begin;
      for (int tile = begin; tile < next; tile += c.tile_rows) {
        tiles.insert(tiles.end(), {e, tile, next});
      }
      begin = (next + 7) / 8 * 8;
    }
  }
};

using ExpertPlanFn = int (*)(const Stream&, const ExpertPlanParams&);

inline AssertionResult CheckExpertPlan(const ExpertPlanFn& launch) {
  const auto same = [](Guarded& got, const void* expected, size_t bytes) {
    return std::memcmp(got.data(), expected, bytes) == 0;
  };
  for (const ExpertCase& c : kExpertCases) {
    const auto weights = ExpertWeights(c);
    const ExpertPlan expected(c, weights);
    const int64_t most =
        MostExpertTiles(c.rows, c.experts, c.chosen, c.tile_rows);
    Guarded counts(DType::kF32, c.experts);
    Guarded places(DType::kF32, c.rows * c.chosen);
    Guarded shares(DType::kF32, c.rows * c.chosen);
    Guarded tiles(DType::kF32, 3 * most);
    Guarded num_tiles(DType::kF32, 1);
    TANDEM_LAUNCHED(
        launch(StreamOf(Generation::kHopper),
               {.weights = weights.data(),
                .counts = reinterpret_cast<int32_t*>(counts.data()),
                .places = reinterpret_cast<int32_t*>(places.data()),
                .shares = reinterpret_cast<float*>(shares.data()),
                .tiles = reinterpret_cast<ExpertTile*>(tiles.data()),
                .num_tiles = reinterpret_cast<int32_t*>(num_tiles.data()),
                .num_rows = c.rows,
                .experts = c.experts,
                .chosen = c.chosen,
                .tile_rows = c.tile_rows,
                .columns = c.columns}));
    const auto number = static_cast<int32_t>(expected.tiles.size() / 3);
    if (number > most ||
        *std::max_element(expected.places.begin(), expected.places.end()) >=
            MostExpertRows(c.rows, c.experts, c.chosen)) {
      return AssertionFailure() << "more than there can be";
    }
    if (!same(counts, expected.counts.data(), expected.counts.size() * 4)) {
      return AssertionFailure() << "counts, " << c.experts << " experts";
    }
    if (!same(places, expected.places.data(), expected.places.size() * 4)) {
      return AssertionFailure() << "places, " << c.experts << " experts";
    }
    for (size_t i = 0; i < expected.places.size(); ++i) {
      if (expected.places[i] >= 0 &&
          std::memcmp(shares.data() + i * 4, &expected.shares[i], 4) != 0) {
        return AssertionFailure() << "share " << i;
      }
    }
    if (!same(num_tiles, &number, 4) ||
        !same(tiles, expected.tiles.data(), expected.tiles.size() * 4)) {
      return AssertionFailure() << "tiles, " << c.experts << " experts";
    }
    for (const Guarded* memory :
         {&counts, &places, &shares, &tiles, &num_tiles}) {
      if (!memory->Kept()) return AssertionFailure() << "overrun";
    }
  }
  return AssertionSuccess();
}

// ---- Copies of rows, and sums of what becomes of them.

using SpreadRowsFn = int (*)(const Stream&, DType, const SpreadRowsParams&);

inline AssertionResult CheckSpreadRows(const SpreadRowsFn& launch) {
  const std::vector<int32_t> places = {8, 0, -1, -1, 1, 9};
  for (const DType type : kTypes) {
    for (const int dim : kSizes) {
      const auto x = RandomOf(type, int64_t{3} * dim, 91);
      const auto bytes = Encode(type, x);
      Guarded out(type, int64_t{10} * dim);
      auto expected = out.Values();
      TANDEM_LAUNCHED(
          launch(StreamOf(Generation::kHopper), type,
                 {bytes.data(), places.data(), out.data(), 3, 2, dim}));
      for (size_t i = 0; i < places.size(); ++i) {
        if (places[i] < 0) continue;
        std::copy_n(x.begin() + static_cast<ptrdiff_t>(i / 2) * dim, dim,
                    expected.begin() + ptrdiff_t{places[i]} * dim);
      }
      if (auto same = SameBits(out.Values(), expected); !same) {
        return same << ", " << Name(type) << " dim " << dim;
      }
      if (!out.Kept()) return AssertionFailure() << "overrun";
    }
  }
  return AssertionSuccess();
}

using SumExpertsFn = int (*)(const Stream&, DType, const SumExpertsParams&);

// Each size with and without.
inline std::vector<std::pair<int, bool>> SizesTwice() {
  std::vector<std::pair<int, bool>> sizes;
  for (const int size : kSizes) {
    sizes.emplace_back(size, false);
    sizes.emplace_back(size, true);
  }
  return sizes;
}

inline AssertionResult CheckSumExperts(const SumExpertsFn& launch) {
  // Of the rows' experts: three, the last, two, none.
  const std::vector<int32_t> places = {3, 0, 8,  9,  -1, -1,
                                       4, 1, -1, -1, -1, -1};
  const std::vector<float> shares = {0.5f, 0.25f, 0.3f, 1.5f, 9, 9,
                                     0.7f, 0.6f,  9,    9,    9, 9};
  // The last column is of what all rows take.
  const std::vector<float> weights = {9, 1, 9, 0.3f, 9, 0, 9, -0.7f};
  for (const DType type : kTypes) {
    for (const auto& [dim, shared] : SizesTwice()) {
      const auto y = RandomOf(type, int64_t{10} * dim, 92);
      const auto bytes = Encode(type, y);
      Guarded out(type, int64_t{4} * dim);  // what was there is not added
      std::vector<float> expected(At(int64_t{4} * dim));
      if (shared) {
        expected = RandomOf(type, int64_t{4} * dim, 93);
        const auto all = Encode(type, expected);
        std::copy(all.begin(), all.end(), out.data());
        for (size_t at = 0; at < expected.size(); ++at) {
          const float weight = weights[2 * (at / At(dim)) + 1];
          expected[at] = RoundedTo(type, weight * expected[at]);
        }
      }
      TANDEM_LAUNCHED(launch(StreamOf(Generation::kHopper), type,
                             {.y = bytes.data(),
                              .places = places.data(),
                              .shares = shares.data(),
                              .out = out.data(),
                              .num_rows = 4,
                              .chosen = 3,
                              .dim = dim,
                              .weights = shared ? weights.data() : nullptr,
                              .columns = 2}));
      for (size_t i = 0; i < places.size(); ++i) {
        if (places[i] < 0) continue;
        for (int j = 0; j < dim; ++j) {
          float& sum = expected[i / 3 * At(dim) + At(j)];
          const float term = y[At(int64_t{places[i]} * dim + j)];
          sum = RoundedTo(type, std::fma(shares[i], term, sum));
        }
      }
      if (auto same = SameBits(out.Values(), expected); !same) {
        return same << ", " << Name(type) << " dim " << dim;
      }
      if (!out.Kept()) return AssertionFailure() << "overrun";
    }
  }
  return AssertionSuccess();
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_TESTS_KERNELS_CUDA_EXPERT_CHECKS_H_
