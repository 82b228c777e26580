// SPDX-License-Identifier: Apache-2.0
// Products of inputs rounded to bf16, with weights of bf16 (and of fp8, which
// lie as bf16), summed as AMX's tiles do it: of each group of 32 inputs, the
// last one filled up with zeros, a chain of fused multiply-adds over the even
// ones and a chain over the odd ones, both from zero; their sum is added to the
// output. That is tdpbf16ps to the bit (checked on five million sums of random
// bits, denormals among them, which count as zeros). CPUs without tiles do the
// same with vectors.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul_tiles.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/amx-inl.h"
#include "kernels/cpu/inputs-inl.h"
#include "kernels/cpu/tile-inl.h"
// clang-format on

#include <algorithm>
#include <cstring>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/packed_matrix.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET
namespace {

inline constexpr int kGroup = 32;  // inputs
// A panel's part of a group: 16 pairs of 32 outputs.
inline constexpr int64_t kGroupBytes = kGroup / 2 * int64_t{kPanel} * 4;
// Inputs and rows that are rounded together: half a MB of pairs, which stays in
// the second-level cache.
inline constexpr int kBlockGroups = 32;
inline constexpr int kBlockRows = 256;

struct GroupTile {
  const std::byte* a;  // rounded inputs, the tile's first row
  int64_t a_stride;    // bytes
  const std::byte* w;  // the first panel's first group
  int64_t panel_bytes;
  int groups;
  float* c;
  int64_t c_stride;
  bool first;  // sums start here, not at what c holds
  TileEnd finish;
  // Of tiles: rows of the first and from it to the second one. Tiles fetch a
  // group ahead, beside the last one what is `jump` bytes behind it; those of
  // two, which find that in the second-level cache, so many lines at `next`
  // beside each dot product, evenly.
  int rows;
  int second;
  int64_t jump;
  const std::byte* next;
  int lines;
};
using GroupTileFn = void (*)(const GroupTile&);

// What all rows of a block go through: some groups of some panels.
struct GroupBlock {
  const MatMulPiece* piece;
  const std::byte* a;
  int64_t a_stride;
  int row;  // the first one's, of the piece
  int rows;
  int panel;  // the first one
  int panels;
  const std::byte* w;
  int64_t panel_bytes;
  int groups;
  bool first;
  bool last;
};

// What all tiles of a block have in common.
GroupTile TileOf(const GroupBlock& b) {
  GroupTile t{};
  t.a_stride = b.a_stride;
  t.panel_bytes = b.panel_bytes;
  t.groups = b.groups;
  t.first = b.first;
  return t;
}

// ---- With vectors: R rows against U units, of a panel or several ones. Inputs
// are words of f32.

template <int R, int U>
void VectorTile(const GroupTile& t) {
  Chains<R, U> sums;
  if (t.first) {
    sums.Clear();
  } else {
    sums.Load(t.c, t.c_stride);
  }
  const int64_t a_stride = t.a_stride / int64_t{sizeof(float)};
  const float* a = reinterpret_cast<const float*>(t.a);
  const std::byte* unit[U];
#pragma GCC unroll 8
  for (int u = 0; u < U; ++u)
    unit[u] = t.w + u / 2 * t.panel_bytes + u % 2 * 64;
  for (int group = 0; group < t.groups; ++group) {
    GroupChains<R, U> chains;
    chains.Clear();
    AdvanceGroup<R, U, kGroupBytes>(chains, a, a_stride, unit, kPanel * 4, 0,
                                    kGroup);
    chains.AddTo(sums);
    a += kGroup;
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) unit[u] += kGroupBytes;
  }
  t.finish.Apply(sums);
  sums.Store(t.c, t.c_stride);
}

// Two chains of each output fit the registers; one row reads four panels side
// by side, since memory gives its bandwidth to several streams.
inline constexpr int kVectorUnits = kParts == 1 ? 2 : 1;
inline constexpr int kVectorRows = kParts == 1 ? 6 : 3;
inline constexpr int kRowUnits = kParts == 1 ? 8 : 2;

void VectorPanels(const GroupBlock& b) {
  GroupTile t = TileOf(b);
  const auto run = [&](GroupTileFn tile, int row, int rows, int unit,
                       int units) {
    t.a = b.a + row * b.a_stride;
    t.w = b.w + unit / 2 * b.panel_bytes + unit % 2 * 64;
    RunTile(*b.piece, tile, t, rows, b.row + row, b.panel * kPanel + unit * 16,
            units, b.last);
  };
  int unit = 0;
  for (; b.rows == 1 && unit + kRowUnits <= 2 * b.panels; unit += kRowUnits) {
    run(VectorTile<1, kRowUnits>, 0, 1, unit, kRowUnits);
  }
  const int tiles = (b.rows + kVectorRows - 1) / kVectorRows;
  for (; unit < 2 * b.panels; unit += 2) {
    for (int tile = 0; tile < tiles; ++tile) {
      const int row = b.rows * tile / tiles;
      const int rows = b.rows * (tile + 1) / tiles - row;
      const GroupTileFn of_rows = TileFor<1, kVectorRows>(
          rows, [](auto count) { return VectorTile<count, kVectorUnits>; });
      for (int u = 0; u < 2; u += kVectorUnits) {
        run(of_rows, row, rows, unit + u, kVectorUnits);
      }
    }
  }
}

struct ByVectors {
  static constexpr int kWordInputs = 1;
  static void Round(const float* from, int inputs, float* to) {
    CopyInputs<Bf16Groups>(from, inputs, to);
  }
  static void Panels(const GroupBlock& b) { VectorPanels(b); }
};

// ---- With AMX: as many as 32 rows against a panel, or 16 against two.

#if HWY_TARGET == HWY_AVX3

// Half a group of a panel.
HWY_INLINE void FetchHalf(const std::byte* w) {
#pragma GCC unroll 16
  for (int64_t line = 0; line < kGroupBytes / 2; line += 64) {
    PrefetchLine(w + line);
  }
}

// What comes next, to the second-level cache.
HWY_INLINE void FetchFar(const std::byte*& next, int lines) {
  for (int i = 0; i < lines; ++i, next += 64) PrefetchFar(next);
}

// kRows tiles of rows against kUnits units; two times two, or one times two or
// four.
template <int kRows, int kUnits>
void AmxTile(const GroupTile& t) {
  const int64_t stride = t.c_stride * int64_t{sizeof(float)};
  float* const below = t.c + t.second * t.c_stride;
  constexpr bool kWide = kUnits == 4;
  static_assert(kRows * kUnits == 4 || kRows * kUnits == 2);
  // Tiles 2 and 3: of the second rows, or of the second panel.
  float* const other = kWide ? t.c + kPanel : below;
  if (t.first) {
    TANDEM_CLEAR_TILE("0");
    TANDEM_CLEAR_TILE("1");
    if constexpr (kRows * kUnits == 4) {
      TANDEM_CLEAR_TILE("2");
      TANDEM_CLEAR_TILE("3");
    }
  } else {
    TANDEM_LOAD_TILE("0", t.c, stride);
    TANDEM_LOAD_TILE("1", t.c + 16, stride);
    if constexpr (kRows * kUnits == 4) {
      TANDEM_LOAD_TILE("2", other, stride);
      TANDEM_LOAD_TILE("3", other + 16, stride);
    }
  }
  const std::byte* a = t.a;
  const std::byte* w = t.w;
  const int64_t a_stride = t.a_stride;
  const int64_t second = t.second * a_stride;
  [[maybe_unused]] const std::byte* next = t.next;
  for (int group = 0; group < t.groups; ++group) {
    const int64_t ahead = group + 1 < t.groups ? kGroupBytes : t.jump;
    TANDEM_LOAD_TILE("4", a, a_stride);
    TANDEM_LOAD_TILE("6", w, 128);
    TANDEM_DOT_TILE("0", "4", "6");
    if constexpr (kRows == 2) FetchFar(next, t.lines);
    FetchHalf(w + ahead);
    TANDEM_LOAD_TILE("7", w + 64, 128);
    TANDEM_DOT_TILE("1", "4", "7");
    if constexpr (kRows == 2) FetchFar(next, t.lines);
    FetchHalf(w + ahead + kGroupBytes / 2);
    if constexpr (kRows == 2) {
      TANDEM_LOAD_TILE("5", a + second, a_stride);
      TANDEM_DOT_TILE("2", "5", "6");
      FetchFar(next, t.lines);
      TANDEM_DOT_TILE("3", "5", "7");
      FetchFar(next, t.lines);
    }
    if constexpr (kWide) {
      TANDEM_LOAD_TILE("6", w + t.panel_bytes, 128);
      TANDEM_DOT_TILE("2", "4", "6");
      FetchHalf(w + t.panel_bytes + ahead);
      TANDEM_LOAD_TILE("7", w + t.panel_bytes + 64, 128);
      TANDEM_DOT_TILE("3", "4", "7");
      FetchHalf(w + t.panel_bytes + ahead + kGroupBytes / 2);
    }
    a += kGroup * 2;
    w += kGroupBytes;
  }
  TANDEM_STORE_TILE("0", t.c, stride);
  TANDEM_STORE_TILE("1", t.c + 16, stride);
  if constexpr (kRows * kUnits == 4) {
    TANDEM_STORE_TILE("2", other, stride);
    TANDEM_STORE_TILE("3", other + 16, stride);
  }
  if (t.finish.scales == nullptr && t.finish.bias == nullptr) return;
  const int rows = t.rows + (kRows == 2 ? t.second : 0);
  for (int row = 0; row < rows; ++row) {
    Chains<1, kUnits> sums;
    sums.Load(t.c + row * t.c_stride, 0);
    t.finish.Apply(sums);
    sums.Store(t.c + row * t.c_stride, 0);
  }
}

// RunTile's copies have room for both kinds.
static_assert(2 * kTileRows * 2 <= kMaxTileRows * kMaxUnits);

void AmxPanels(const GroupBlock& b) {
  GroupTile t = TileOf(b);
  const auto run = [&](GroupTileFn tile, int row, int rows, int panel,
                       int panels) {
    t.a = b.a + row * b.a_stride;
    t.w = b.w + panel * b.panel_bytes;
    t.jump = panels * b.panel_bytes - (b.groups - 1) * kGroupBytes;
    RunTile(*b.piece, tile, t, rows, b.row + row, (b.panel + panel) * kPanel,
            2 * panels, b.last);
  };
  const TilePairs pairs(b.rows);
  t.rows = pairs.of_tile;
  ConfigureTiles(ProductShapes(t.rows));
  if (!pairs.paired()) {
    for (int panel = 0; panel < b.panels; panel += 2) {
      if (panel + 1 < b.panels) {
        run(AmxTile<1, 4>, 0, b.rows, panel, 2);
      } else {
        run(AmxTile<1, 2>, 0, b.rows, panel, 1);
      }
    }
    return;
  }
  // All of them share what is to be fetched of the next panel.
  constexpr int kDots = 4;  // of a group
  constexpr int kLines = kGroupBytes / 64 / kDots;
  t.lines = (kLines + pairs.passes - 1) / pairs.passes;
  for (int panel = 0; panel < b.panels; ++panel) {
    for (int pass = 0; pass < pairs.passes; ++pass) {
      const int rows = pairs.Rows(pass);
      t.second = rows - t.rows;
      t.next = b.w + (panel + 1) * b.panel_bytes +
               int64_t{pass} * t.lines * kDots * b.groups * 64;
      run(AmxTile<2, 2>, pairs.Begin(pass), rows, panel, 1);
    }
  }
}

struct ByTiles {
  static constexpr int kWordInputs = 2;
  static void Round(const float* from, int inputs, float* to) {
    RoundPairs(from, inputs, to);
  }
  static void Panels(const GroupBlock& b) { AmxPanels(b); }
};

#endif  // HWY_TARGET == HWY_AVX3

// ---- Both.

// Bytes of a group of rounded inputs.
template <typename By>
inline constexpr int64_t kRoundedBytes = kGroup * 4 / By::kWordInputs;
// An odd number of lines, since powers of two collide in the cache.
template <typename By>
constexpr int64_t RoundedStride(int groups) {
  return (groups * kRoundedBytes<By> / 64 / 2 * 2 + 1) * 64;
}
inline constexpr int64_t kTailBytes = 2 * kGroupBytes;
inline constexpr int64_t kTailBegin = kMatMulScratchBytes - kTailBytes;
static_assert(kBlockRows * RoundedStride<ByVectors>(kBlockGroups) <=
              kTailBegin);

// Inputs [begin, end) of the rows, filled up to whole groups.
template <typename By>
void RoundRows(const MatMulPiece& p, const GroupBlock& b, int begin, int end,
               std::byte* to) {
  const int words = (end - begin + 1) / 2 * 2 / By::kWordInputs;
  const int all = b.groups * kGroup / By::kWordInputs;
  for (int row = 0; row < b.rows; ++row) {
    float* const out = reinterpret_cast<float*>(to + row * b.a_stride);
    By::Round(p.x + (b.row + row) * p.x_stride + begin, end - begin, out);
    std::fill(out + words, out + all, 0.0f);
  }
}

// The group of each panel that is not whole goes through a copy with zeros.
template <typename By>
void TailOf(const MatMulPiece& p, GroupBlock b) {
  const int64_t begin = p.k / kGroup * kGroupBytes;
  std::byte* const tail = p.scratch + kTailBegin;
  std::memset(tail, 0, kTailBytes);
  const int end = b.panel + b.panels;
  for (; b.panel < end; b.panel += b.panels) {
    b.panels = std::min(2, end - b.panel);
    for (int i = 0; i < b.panels; ++i) {
      std::memcpy(tail + i * kGroupBytes,
                  p.w + (b.panel + i) * b.panel_bytes + begin,
                  static_cast<size_t>(b.panel_bytes - begin));
    }
    GroupBlock copy = b;
    copy.w = tail;
    copy.panel_bytes = kGroupBytes;
    By::Panels(copy);
  }
}

template <typename By>
void MatMulGroups(const MatMulPiece& p) {
  const int whole = p.k / kGroup;
  const int groups = (p.k + kGroup - 1) / kGroup;
  const int blocks = (groups + kBlockGroups - 1) / kBlockGroups;
  const int rows = p.row_end - p.row_begin;
  const int parts = (rows + kBlockRows - 1) / kBlockRows;
  for (int part = 0; part < parts; ++part) {
    for (int block = 0; block < blocks; ++block) {
      const int begin = groups * block / blocks;
      const int end = groups * (block + 1) / blocks;
      GroupBlock b{};
      b.piece = &p;
      b.a = p.scratch;
      b.row = p.row_begin + rows * part / parts;
      b.rows = p.row_begin + rows * (part + 1) / parts - b.row;
      b.panel = p.panel_begin;
      b.panels = p.panel_end - p.panel_begin;
      b.panel_bytes = PackedMatrix::PanelBytes(p.k, p.type);
      b.groups = end - begin;
      b.a_stride = RoundedStride<By>(b.groups);
      RoundRows<By>(p, b, begin * kGroup, std::min(p.k, end * kGroup),
                    p.scratch);
      b.first = begin == 0;
      b.groups = std::min(end, whole) - begin;
      b.last = begin + b.groups == groups;
      b.w = p.w + b.panel * b.panel_bytes + begin * kGroupBytes;
      if (b.groups > 0) By::Panels(b);
      if (end <= whole) continue;
      b.a += b.groups * kRoundedBytes<By>;
      b.first = b.first && b.groups == 0;
      b.groups = 1;
      b.last = true;
      TailOf<By>(p, b);
    }
  }
}

}  // namespace

void MatMulGrouped(const MatMulPiece& p) {
  if (p.type == DType::kF32) return MatMulRows(p);
  MatMulGroups<ByVectors>(p);
}
#if HWY_TARGET == HWY_AVX3
void MatMulTiles(const MatMulPiece& p) {
  if (p.type == DType::kF32) return MatMulRows(p);
  // Memory gives one row more by vectors, a tenth.
  if (p.row_end - p.row_begin == 1) return MatMulGroups<ByVectors>(p);
  MatMulGroups<ByTiles>(p);
  ReleaseTiles();
}
#endif

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
