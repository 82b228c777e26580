// SPDX-License-Identifier: Apache-2.0
// Attention (attention-inl.h) over a bf16 cache in groups, as AMX's tiles sum
// them (matmul_tiles.cc): a score is a sum over groups of 32 dimensions, a
// value one over groups of 16 positions, each begun at a multiple of 16. Of a
// group only what there is and what a query sees is multiplied. With tiles
// where dimensions and blocks are whole groups, with vectors elsewhere and for
// a query's own ends.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_tiles.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/amx-inl.h"
#include "kernels/cpu/attention-inl.h"
// clang-format on

#include "kernels/cpu/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET
namespace {

inline constexpr int kDimGroup = 32;
inline constexpr int kKeyGroup = 16;

// ---- With vectors. Two chains of each sum fit the registers.

inline constexpr int kVectorQueries = kParts == 1 ? 6 : 3;
constexpr int VectorUnits(int queries) {
  if (kParts == 1) return queries <= 3 ? 4 : 2;
  return queries == 1 ? 2 : 1;
}

// As ScoreTile of chains.
template <int R>
void GroupScores(const Pages& pages, const float* q, int begin, int end,
                 float* scores) {
  constexpr int U = VectorUnits(R);
  const KvLayout& layout = *pages.layout;
  const int64_t stride = int64_t{layout.slots} * 4;
  for (int position = begin; position < end;) {
    const std::byte* unit[U];
    int column[U] = {};
    int units = 0;
    for (; units < U && position < end; ++units) {
      const int slot = position % layout.block_size;
      unit[units] = pages.K(position / layout.block_size) + slot * 4;
      column[units] = position - begin;
      position += std::min(16, layout.block_size - slot);
    }
    for (int u = units; u < U; ++u) unit[u] = unit[0];  // computed, not stored
    Chains<R, U> sums;
    sums.Clear();
    for (int dim = 0; dim < layout.head_dim; dim += kDimGroup) {
      const int dims = std::min(kDimGroup, layout.head_dim - dim);
      GroupChains<R, U> chains;
      chains.Clear();
      AdvanceGroup<R, U>(chains, q + dim, kHeadStride, unit, stride, 0, dims);
      chains.AddTo(sums);
      for (int u = 0; u < U; ++u) unit[u] += kDimGroup / 2 * stride;
    }
    for (int u = 0; u < units; ++u) {
      for (int r = 0; r < R; ++r) {
        TANDEM_PARTS(i) {
          hn::StoreU(sums.v[r][u * kParts + i], F32(),
                     scores + r * kScoreStride + column[u] + i * kLanes);
        }
      }
    }
  }
}

// values [R][width] (+)= weights of positions [begin, end) times V; `weights`
// is at the even position at or before begin.
template <int R>
void GroupValues(const Pages& pages, const float* weights, int begin, int end,
                 bool first, float* values) {
  constexpr int U = VectorUnits(R);
  const KvLayout& layout = *pages.layout;
  const int64_t stride = int64_t{layout.width} * 4;
  const int width_units = layout.width / 16;
  for (int unit = 0; unit < width_units; unit += U) {
    const int units = std::min(U, width_units - unit);
    Chains<R, U> sums;
    sums.Clear();
    for (int r = 0; r < R && !first; ++r) {
      for (int i = 0; i < units * kParts; ++i) {
        sums.v[r][i] =
            hn::LoadU(F32(), values + r * kHeadStride + unit * 16 + i * kLanes);
      }
    }
    for (int position = begin; position < end;) {
      const int group_end =
          std::min(end, (position / kKeyGroup + 1) * kKeyGroup);
      GroupChains<R, U> chains;
      chains.Clear();
      while (position < group_end) {
        const int slot = position % layout.block_size;
        const int count =
            std::min(layout.block_size - slot, group_end - position);
        const std::byte* const base =
            pages.V(position / layout.block_size) + slot / 2 * stride;
        const std::byte* w[U];
        for (int u = 0; u < U; ++u) {
          w[u] = base + (unit + (u < units ? u : 0)) * 64;
        }
        AdvanceGroup<R, U>(chains, weights + (position - begin / 2 * 2),
                           kScoreStride, w, stride, slot, slot + count);
        position += count;
      }
      chains.AddTo(sums);
    }
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < units * kParts; ++i) {
        hn::StoreU(sums.v[r][i], F32(),
                   values + r * kHeadStride + unit * 16 + i * kLanes);
      }
    }
  }
}

struct GroupKeys {
  static constexpr int kQueries = kVectorQueries;
  static constexpr int kAligned = kKeyGroup;

  static void CopyQuery(const float* q, int head_dim, float* to) {
    CopyInputs<Bf16Groups>(q, head_dim, to);
  }
  static void Scores(const Pages& pages, const float* q, int queries, int begin,
                     int end, float* scores) {
    const auto tile = TileFor<1, kQueries>(
        queries, [](auto rows) { return GroupScores<rows>; });
    tile(pages, q, begin, end, scores);
  }
  static float RoundWeights(const Pages& /*pages*/, int /*from*/, float* scores,
                            int begin, int end) {
    const int even = begin / 2 * 2;
    CopyInputs<Bf16Groups>(scores + even, end - even, scores + even);
    return 1;
  }
  static void EndValues(int /*width*/, float /*factor*/, float* /*values*/) {}
  static float* Weights(float* scores, int key) { return scores + key; }
  static void Values(const Pages& pages, const float* weights, int queries,
                     int begin, int end, bool first, float* values) {
    const auto tile = TileFor<1, kQueries>(
        queries, [](auto rows) { return GroupValues<rows>; });
    tile(pages, weights, begin, end, first, values);
  }
  static void OwnValues(const Pages& pages, const float* weights, int begin,
                        int end, bool first, float* values) {
    GroupValues<1>(pages, weights, begin, end, first, values);
  }
};

#if HWY_TARGET == HWY_AVX3

// ---- With tiles.

// 0 to 3: sums; 4: queries; 5: weights [queries][8 pairs]; 6: keys [16 pairs of
// dimensions][16 keys]; 7: values [8 pairs of keys][16 dimensions]
TileShapes ShapesOf(int queries) {
  TileShapes shapes;
  std::fill_n(shapes.rows, 6, static_cast<uint8_t>(queries));
  shapes.row_bytes[5] = kKeyGroup * 2;
  shapes.rows[7] = kKeyGroup / 2;
  return shapes;
}

struct TileKeys : GroupKeys {
  static constexpr int kQueries = kTileRows;

  static bool Take(const KvLayout& layout) {
    return layout.head_dim % kDimGroup == 0 &&
           layout.block_size % kKeyGroup == 0;
  }
  static void CopyQuery(const float* q, int head_dim, float* to) {
    RoundPairs(q, head_dim, to);
  }

  // Lines `stride` apart, as a tile reads them.
  template <int kLines>
  static void FetchTile(const std::byte* at, int64_t stride) {
#pragma GCC unroll 16
    for (int i = 0; i < kLines; ++i) PrefetchLine(at + i * stride);
  }

  // Four units of keys at a time. Few queries fetch the next four, and behind
  // the last ones the first values.
  static void Scores(const Pages& pages, const float* q, int queries, int begin,
                     int end, float* scores) {
    const KvLayout& layout = *pages.layout;
    const int64_t stride = int64_t{layout.slots} * 4;
    const bool few = FetchesAhead(queries);
    ConfigureTiles(ShapesOf(queries));
    for (int position = begin; position < end; position += 4 * 16) {
      const int units = std::min(4, (end - position + 15) / 16);
      const std::byte* unit[4];
      const std::byte* next[4];
      for (int u = 0; u < 4; ++u) {
        const int at = position + (u < units ? u : 0) * 16;
        unit[u] = pages.K(at / layout.block_size) + at % layout.block_size * 4;
        const int ahead = position + (4 + u) * 16;
        next[u] = ahead < end ? pages.K(ahead / layout.block_size) +
                                    ahead % layout.block_size * 4
                              : pages.V(std::min(begin + u * 16, end - 1) /
                                        layout.block_size);
      }
      TANDEM_CLEAR_TILE("0");
      TANDEM_CLEAR_TILE("1");
      TANDEM_CLEAR_TILE("2");
      TANDEM_CLEAR_TILE("3");
      for (int dim = 0; dim < layout.head_dim; dim += kDimGroup) {
        const int64_t offset = dim / 2 * stride;
        TANDEM_LOAD_TILE("4", q + dim / 2, kHeadStride * 4);
        TANDEM_LOAD_TILE("6", unit[0] + offset, stride);
        TANDEM_DOT_TILE("0", "4", "6");
        if (few) FetchTile<16>(next[0] + offset, stride);
        if (units > 1) {
          TANDEM_LOAD_TILE("6", unit[1] + offset, stride);
          TANDEM_DOT_TILE("1", "4", "6");
          if (few) FetchTile<16>(next[1] + offset, stride);
        }
        if (units > 2) {
          TANDEM_LOAD_TILE("6", unit[2] + offset, stride);
          TANDEM_DOT_TILE("2", "4", "6");
          if (few) FetchTile<16>(next[2] + offset, stride);
        }
        if (units > 3) {
          TANDEM_LOAD_TILE("6", unit[3] + offset, stride);
          TANDEM_DOT_TILE("3", "4", "6");
          if (few) FetchTile<16>(next[3] + offset, stride);
        }
      }
      float* const to = scores + (position - begin);
      TANDEM_STORE_TILE("0", to, kScoreStride * 4);
      if (units > 1) TANDEM_STORE_TILE("1", to + 16, kScoreStride * 4);
      if (units > 2) TANDEM_STORE_TILE("2", to + 32, kScoreStride * 4);
      if (units > 3) TANDEM_STORE_TILE("3", to + 48, kScoreStride * 4);
    }
  }

  static void FetchValues(const std::byte* at, int64_t stride, int units) {
    for (int u = 0; u < units; ++u) FetchTile<8>(at + u * 64, stride);
  }

  // Four units of dimensions at a time.
  static void Values(const Pages& pages, const float* weights, int queries,
                     int begin, int end, bool first, float* values) {
    constexpr int kPairStride = kAttentionSegment / 2 + 16;
    alignas(64) float pairs[kTileRows][kPairStride];
    for (int row = 0; row < queries; ++row) {
      RoundPairs(weights + row * kScoreStride, end - begin, pairs[row]);
    }
    const bool few = FetchesAhead(queries);
    const KvLayout& layout = *pages.layout;
    const int64_t stride = int64_t{layout.width} * 4;
    for (int dim = 0; dim < layout.width; dim += 4 * 16) {
      const int units = std::min(4, (layout.width - dim) / 16);
      float* const sums = values + dim;
      TANDEM_CLEAR_TILE("0");
      TANDEM_CLEAR_TILE("1");
      TANDEM_CLEAR_TILE("2");
      TANDEM_CLEAR_TILE("3");
      if (!first) {
        TANDEM_LOAD_TILE("0", sums, kHeadStride * 4);
        TANDEM_LOAD_TILE("1", sums + 16, kHeadStride * 4);
        if (units > 2) {
          TANDEM_LOAD_TILE("2", sums + 32, kHeadStride * 4);
          TANDEM_LOAD_TILE("3", sums + 48, kHeadStride * 4);
        }
      }
      for (int position = begin; position < end; position += kKeyGroup) {
        const std::byte* const v = pages.V(position / layout.block_size) +
                                   position % layout.block_size / 2 * stride +
                                   int64_t{dim} * 4;
        TANDEM_LOAD_TILE("5", pairs[0] + (position - begin) / 2,
                         kPairStride * 4);
        TANDEM_LOAD_TILE("7", v, stride);
        TANDEM_DOT_TILE("0", "5", "7");
        if (few) {
          const int next = std::min(position + 64, end - 1);
          FetchValues(pages.V(next / layout.block_size) +
                          next % layout.block_size / 2 * stride +
                          int64_t{dim} * 4,
                      stride, units);
        }
        TANDEM_LOAD_TILE("7", v + 64, stride);
        TANDEM_DOT_TILE("1", "5", "7");
        if (units > 2) {
          TANDEM_LOAD_TILE("7", v + 128, stride);
          TANDEM_DOT_TILE("2", "5", "7");
          TANDEM_LOAD_TILE("7", v + 192, stride);
          TANDEM_DOT_TILE("3", "5", "7");
        }
      }
      TANDEM_STORE_TILE("0", sums, kHeadStride * 4);
      TANDEM_STORE_TILE("1", sums + 16, kHeadStride * 4);
      if (units > 2) {
        TANDEM_STORE_TILE("2", sums + 32, kHeadStride * 4);
        TANDEM_STORE_TILE("3", sums + 48, kHeadStride * 4);
      }
    }
  }
};

#endif  // HWY_TARGET == HWY_AVX3

}  // namespace

void AttendGrouped(const AttentionPiece& p) {
  if (p.layout->type != DType::kBF16) return Attend(p);
  AttendOf<GroupKeys>(p);
}
#if HWY_TARGET == HWY_AVX3
void AttendTiles(const AttentionPiece& p) {
  if (p.layout->type != DType::kBF16) return Attend(p);
  if (!TileKeys::Take(*p.layout)) return AttendOf<GroupKeys>(p);
  AttendOf<TileKeys>(p);
  ReleaseTiles();
}
#endif

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
