// SPDX-License-Identifier: Apache-2.0
// Products with int8, int4 and W8A8 weights, on one thread, with equal bits on
// every path (dot-inl.h):
//
//   a row or two  panels side by side, each a stream of its own: four, of two
//                 rows with AVX2 two; with AVX-512 on AMD's one row, of int4
//                 one panel, and on Intel's up to five rows
//   a few rows    codes are read from the panel by every tile of rows
//   many rows     a panel's int4 codes become bytes once, reused by every tile
//                 (for vpdpbusd; other instructions take them as they are)
//
// With AMX, 16 rows at once from the eighth row on.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul_codes.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/amx_codes-inl.h"
#include "kernels/cpu/dot-inl.h"
#include "kernels/cpu/quantise-inl.h"
// clang-format on

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/quantise.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// Sums and chains of a tile, which are one of W8A8, are 28 registers with
// AVX-512; with AVX2 sums are 8, or 12 where nothing but lines and inputs is
// beside them, and chains stay in memory.
template <typename D, Read read>
inline constexpr int kDotRows = kParts == 1 ? kIsW8A8<read> ? 14 : 7
                                : D::kBias != 0 && kReadsBytes<read> ? 6
                                                                     : 4;
inline constexpr int kDotUnits = kParts == 1 ? 2 : 1;
// As many rows are read by AVX-512 as several streams where those are faster.
template <Read read>
inline constexpr int kStreamRows = kReadsBytes<read> ? 5 : 3;
// From here on int4 codes are made ready once for all tiles.
inline constexpr int kReadyRows = 24;
// As much of the rows' codes as stays in the second-level cache.
inline constexpr int64_t kCodeCacheBytes = int64_t{1} << 20;

// ---- Products.

using DotFn = void (*)(const CodeTile&);

template <typename D, Read read>
DotFn DotTileOf(int rows) {
  return TileFor<1, kDotRows<D, read>>(
      rows, [](auto count) { return DotTile<D, read, count, kDotUnits>; });
}

// The piece of a product that one block of inputs takes part in.
struct Range {
  int piece;
  int begin;  // block
  int blocks;
};
Range RangeOf(const MatMulPiece& p, int piece) {
  const int begin = PieceBegin(p.k, piece);
  return {piece, begin, PieceBegin(p.k, piece + 1) - begin};
}

// All tiles of rows against one panel's blocks at `w`.
template <typename D, Read read>
void PanelTiles(const MatMulPiece& p, const Range& range, int panel,
                const std::byte* w, CodeTile t) {
  const int rows = p.row_end - p.row_begin;
  constexpr int kRows = kDotRows<D, read>;
  const int tiles = (rows + kRows - 1) / kRows;
  t.w_stride = 2 * CodeUnitBytes(kKindOf<read>);
  t.blocks = range.blocks;
  t.first = range.piece == 0;
  const RowPiece* const a =
      p.codes + int64_t{range.piece} * p.rows + p.row_begin;
  for (int tile = 0; tile < tiles; ++tile) {
    const int row = static_cast<int>(int64_t{rows} * tile / tiles);
    const int count =
        static_cast<int>(int64_t{rows} * (tile + 1) / tiles) - row;
    const DotFn run = DotTileOf<D, read>(count);
    t.a = a + row;
    for (int unit = 0; unit < 2; unit += kDotUnits) {
      SharePass(t, (2 * tile + unit) / kDotUnits, 2 * tiles / kDotUnits);
      for (int u = 0; u < kDotUnits; ++u) {
        t.w[u] = w + (unit + u) * CodeUnitBytes(kKindOf<read>);
      }
      RunTile(p, run, t, count, p.row_begin + row, panel * kPanel + unit * 16,
              kDotUnits, range.piece + 1 == RowPieces(p.k));
    }
  }
}

// A tile that fetches, while all tiles work on a panel, what comes after its
// group of p.fetching.streams: a part of each of the next ones.
template <CodeKind kind>
CodeTile FetchingTile(const MatMulPiece& p, const Range& range, int panel) {
  const int64_t panel_bytes = CodePanelBytes(p.k, kind);
  const int of_group = (panel - p.panel_begin) % p.fetching.streams;
  const int next = panel - of_group + p.fetching.streams;
  CodeTile t{};
  t.streams = p.fetching.streams;
  t.fetch = 2 * CodeUnitBytes(kind) / p.fetching.streams;
  for (int i = 0; i < p.fetching.streams; ++i) {
    t.next[i] = p.w + std::min(next + i, p.panel_end - 1) * panel_bytes +
                range.begin * 2 * CodeUnitBytes(kind) +
                of_group * range.blocks * t.fetch;
  }
  return t;
}

// R rows against panels [panel, panel + kPanels), each a stream of its own.
template <typename D, Read read, int R, int kPanels>
void StreamPanels(const MatMulPiece& p, int panel) {
  constexpr int64_t kUnitBytes = CodeUnitBytes(kKindOf<read>);
  const int64_t panel_bytes = CodePanelBytes(p.k, kKindOf<read>);
  for (int piece = 0; piece < RowPieces(p.k); ++piece) {
    const Range range = RangeOf(p, piece);
    CodeTile t{};
    t.a = p.codes + int64_t{piece} * p.rows + p.row_begin;
    t.blocks = range.blocks;
    t.first = piece == 0;
    const int64_t begin = range.begin * 2 * kUnitBytes;
    for (int i = 0; i < kPanels; ++i) {
      t.w[i] = p.w + (panel + i) * panel_bytes + begin;
    }
    t.end = panel_bytes - begin;
    t.jump = (kPanels - 1) * panel_bytes;
    t.far = p.fetching.far;
    RunTile(p, StreamTile<D, read, R, kPanels>, t, R, p.row_begin,
            panel * kPanel, 2 * kPanels, piece + 1 == RowPieces(p.k));
  }
}

template <typename D, Read read, int R, int kPanels>
void StreamRows(const MatMulPiece& p) {
  int panel = p.panel_begin;
  for (; panel + kPanels <= p.panel_end; panel += kPanels) {
    StreamPanels<D, read, R, kPanels>(p, panel);
  }
  for (; panel < p.panel_end; ++panel) StreamPanels<D, read, R, 1>(p, panel);
}

// Runs body(range, panel, blocks) over all pieces and panels, in the order
// that reads weights as a stream while all rows' codes stay in the cache.
template <typename Body>
void ForPanels(const MatMulPiece& p, CodeKind kind, const Body& body) {
  const int64_t panel_bytes = CodePanelBytes(p.k, kind);
  const int pieces = RowPieces(p.k);
  const auto run = [&](int piece, int panel) {
    const Range range = RangeOf(p, piece);
    body(range, panel,
         p.w + panel * panel_bytes + range.begin * 2 * CodeUnitBytes(kind));
  };
  if (int64_t{p.row_end - p.row_begin} * pieces *
          static_cast<int64_t>(sizeof(RowPiece)) <=
      kCodeCacheBytes) {
    for (int panel = p.panel_begin; panel < p.panel_end; ++panel) {
      for (int piece = 0; piece < pieces; ++piece) run(piece, panel);
    }
  } else {
    for (int piece = 0; piece < pieces; ++piece) {
      for (int panel = p.panel_begin; panel < p.panel_end; ++panel) {
        run(piece, panel);
      }
    }
  }
}

// target = one panel's blocks of int4 as Read::kReady has them.
template <typename D, Read read>
void MakeReady(const std::byte* from, int blocks, std::byte* to) {
  static_assert(!kReadsBytes<read>);
  constexpr int kBegin = read == Read::kInt4Zeros ? 2 : 1;
  const VecI low = hn::Set(I32(), 0x0f0f0f0f);
  for (int unit = 0; unit < 2 * blocks; ++unit) {
    std::memcpy(to, from, 64);
    for (int group = 0; group < 2; ++group) {
      TANDEM_PARTS(i) {
        // Two's complement bytes do not borrow: 0 <= zero < 256 - 15.
        VecI zero = hn::Set(I32(), 0x08080808);
        if (read == Read::kInt4Zeros) {
          const VecI one = hn::PromoteTo(
              I32(), hn::LoadU(hn::Rebind<int16_t, I32>(),
                               reinterpret_cast<const int16_t*>(from + 64) +
                                   group * 16 + i * kLanes));
          zero = hn::Mul(one, hn::Set(I32(), 0x01010101));
        }
        const hn::Repartition<int8_t, I32> d8;
        const auto put = [&](VecI nibbles, int line) {
          VecI codes;
          if constexpr (read == Read::kE2m1) {
            codes = TwiceE2m1<0>(nibbles);
          } else {
            codes = hn::BitCast(I32(), hn::Sub(hn::BitCast(d8, nibbles),
                                               hn::BitCast(d8, zero)));
          }
          hn::StoreU(
              D::Bias(codes), I32(),
              reinterpret_cast<int32_t*>(to + line * 64 + i * 4 * kLanes));
        };
        for (int quad = 0; quad < 4; ++quad) {
          const VecI both =
              LoadI(from + (kBegin + group * 4 + quad) * 64 + i * 4 * kLanes);
          put(hn::And(both, low), 1 + group * 8 + quad);
          put(hn::And(hn::ShiftRight<4>(both), low), 1 + group * 8 + quad + 4);
        }
      }
    }
    from += CodeUnitBytes(kKindOf<read>);
    to += CodeUnitBytes(CodeKind::kInt8);
  }
}

template <typename D, Read read>
void CodeRows(const MatMulPiece& p) {
  const int rows = p.row_end - p.row_begin;
  if constexpr (kParts == 2) {
    if (rows == 1) return StreamRows<D, read, 1, 4>(p);
    if (rows == 2) return StreamRows<D, read, 2, 2>(p);
  } else if (p.fetching.streams == 1) {
    // A panel of int4 is a stream of its own, four take 1.2 times as long.
    constexpr int kPanels = kReadsBytes<read> ? kMaxStreams : 1;
    if (rows == 1) return StreamRows<D, read, 1, kPanels>(p);
  } else if (rows <= kStreamRows<read>) {
    const auto run = TileFor<1, kStreamRows<read>>(rows, [](auto count) {
      return StreamRows<D, read, count, kMaxStreams>;
    });
    return run(p);
  }
  // int8 is ready as it lies in the panel, and so is all without a bias.
  constexpr bool kAlways = D::kBias == 0 || kReadsBytes<read>;
  const bool ready = kAlways || rows < kReadyRows;
  ForPanels(p, kKindOf<read>,
            [&](const Range& range, int panel, const std::byte* w) {
              const CodeTile t = FetchingTile<kKindOf<read>>(p, range, panel);
              if (ready) {
                PanelTiles<D, read>(p, range, panel, w, t);
              } else if constexpr (!kAlways) {
                MakeReady<D, read>(w, range.blocks, p.scratch);
                PanelTiles<D, Read::kReady>(p, range, panel, p.scratch, t);
              }
            });
}

#if HWY_TARGET == HWY_AVX3

// From here on tiles beat vectors.
inline constexpr int kAmxRows = 8;

DotFn AmxTileOf(int rows) {
  return TileFor<kAmxRows, kTileRows>(
      rows, [](auto count) { return AmxTile<count>; });
}

// At least kAmxRows rows, so that balanced tiles have as many too.
void AmxPanel(const MatMulPiece& p, const Range& range, int panel,
              const std::byte* w, CodeTile t) {
  const int rows = p.row_end - p.row_begin;
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  t.w_stride = 2 * CodeUnitBytes(CodeKind::kInt8);
  t.blocks = range.blocks;
  t.first = range.piece == 0;
  for (int tile = 0; tile < tiles; ++tile) {
    const int row = static_cast<int>(int64_t{rows} * tile / tiles);
    const int count =
        static_cast<int>(int64_t{rows} * (tile + 1) / tiles) - row;
    t.a = p.codes + int64_t{range.piece} * p.rows + p.row_begin + row;
    for (int unit = 0; unit < 2; ++unit) {
      SharePass(t, 2 * tile + unit, 2 * tiles);
      t.w[0] = w + unit * CodeUnitBytes(CodeKind::kInt8);
      RunTile(p, AmxTileOf(count), t, count, p.row_begin + row,
              panel * kPanel + unit * 16, 1, range.piece + 1 == RowPieces(p.k));
    }
  }
}

template <Read read>
void AmxRows(const MatMulPiece& p) {
  ConfigureTiles(kGroupShapes);
  ForPanels(p, kKindOf<read>,
            [&](const Range& range, int panel, const std::byte* w) {
              const CodeTile t = FetchingTile<kKindOf<read>>(p, range, panel);
              if constexpr (read == Read::kInt8) {
                AmxPanel(p, range, panel, w, t);
              } else {
                MakeReady<MultiplyAdd, read>(w, range.blocks, p.scratch);
                AmxPanel(p, range, panel, p.scratch, t);
              }
            });
  ReleaseTiles();
}

void AmxWholePanel(const MatMulPiece& p, const Range& range, int panel,
                   const std::byte* w, const CodeTile& fetching,
                   const TilePairs& pairs) {
  WholeTile t{fetching, 0, 0};
  t.w_stride = 2 * CodeUnitBytes(CodeKind::kW8A8);
  t.blocks = range.blocks;
  t.first = range.piece == 0;
  t.w[0] = w;
  for (int pass = 0; pass < pairs.passes; ++pass) {
    const int row = pairs.Begin(pass);
    t.rows = pairs.Rows(pass);
    t.second = t.rows - pairs.of_tile;
    t.a = p.codes + int64_t{range.piece} * p.rows + p.row_begin + row;
    SharePass(t, pass, pairs.passes);
    RunTile(p, pairs.paired() ? AmxWholeTile<2> : AmxWholeTile<1>, t, t.rows,
            p.row_begin + row, panel * kPanel, 2,
            range.piece + 1 == RowPieces(p.k));
  }
}

void AmxWholeRows(const MatMulPiece& p) {
  constexpr CodeKind kKind = CodeKind::kW8A8;
  const TilePairs pairs(p.row_end - p.row_begin);
  ConfigureTiles(ProductShapes(pairs.of_tile));
  ForPanels(p, kKind, [&](const Range& range, int panel, const std::byte* w) {
    AmxWholePanel(p, range, panel, w, FetchingTile<kKind>(p, range, panel),
                  pairs);
  });
  ReleaseTiles();
}

#endif  // HWY_TARGET == HWY_AVX3

template <typename D>
void MatMulCodes(const MatMulPiece& p) {
  switch (p.kind) {
    case CodeKind::kInt8:
      return CodeRows<D, Read::kInt8>(p);
    case CodeKind::kW8A8:
      return CodeRows<D, Read::kW8A8>(p);
    case CodeKind::kInt8Raised:
      if constexpr (D::kBias != 0) return CodeRows<D, Read::kReady>(p);
      std::abort();  // packed for another table
    case CodeKind::kW8A8Raised:
      if constexpr (D::kBias != 0) return CodeRows<D, Read::kW8A8Ready>(p);
      std::abort();
    case CodeKind::kInt4:
      return CodeRows<D, Read::kInt4>(p);
    case CodeKind::kInt4Zeros:
      return CodeRows<D, Read::kInt4Zeros>(p);
    case CodeKind::kE2m1:
      return CodeRows<D, Read::kE2m1>(p);
  }
}

#if HWY_TARGET == HWY_AVX3

void MatMulAmx(const MatMulPiece& p) {
  if (p.row_end - p.row_begin < kAmxRows) return MatMulCodes<Vnni>(p);
  switch (p.kind) {
    case CodeKind::kInt8:
      return AmxRows<Read::kInt8>(p);
    case CodeKind::kW8A8:
      return AmxWholeRows(p);
    case CodeKind::kInt8Raised:
    case CodeKind::kW8A8Raised:
      std::abort();  // packed for another table
    case CodeKind::kInt4:
      return AmxRows<Read::kInt4>(p);
    case CodeKind::kInt4Zeros:
      return AmxRows<Read::kInt4Zeros>(p);
    case CodeKind::kE2m1:
      return AmxRows<Read::kE2m1>(p);
  }
}

#endif  // HWY_TARGET == HWY_AVX3

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

void AddMatMulCodes(KernelTable& table) {
  const bool wide = table.isa == Isa::kAvx512;
  table.quantise_row = wide ? N_AVX3::QuantiseRow : N_AVX2::QuantiseRow;
  table.quantise_whole_row =
      wide ? N_AVX3::QuantiseWholeRow : N_AVX2::QuantiseWholeRow;
  switch (table.dot) {
    case Dot::kMultiplyAdd:
      table.matmul_codes = wide ? N_AVX3::MatMulCodes<N_AVX3::MultiplyAdd>
                                : N_AVX2::MatMulCodes<N_AVX2::MultiplyAdd>;
      break;
    case Dot::kVnni:
      table.matmul_codes = wide ? N_AVX3::MatMulCodes<N_AVX3::Vnni>
                                : N_AVX2::MatMulCodes<N_AVX2::Vnni>;
      break;
    case Dot::kAmx:
      table.matmul_codes = N_AVX3::MatMulAmx;
      break;
  }
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
