// SPDX-License-Identifier: Apache-2.0
// Matrix products over packed weights (packed_matrix.h), on one thread. Three
// paths with equal bits, since each output is the same chain:
//
//   one row       the weights stream by, several panels at once so that the
//                 latency of the chains hides, prefetched ahead
//   a few rows    rows are copied to a fixed stride (powers of two would
//                 collide in the cache), weights widen in registers; of several
//                 tiles with AVX-512 the first one leaves them for the others
//   many rows     a block of weights is widened to f32 once and then reused
//                 by every tile of rows
//
// Intel's memory gives its bandwidth to four streams or more: with as much
// arithmetic as 8 rows need beside it, one stream gets 13 GB/s and four get 20.
// Tiles of few rows read as many panels at once; taller ones read one, and
// fetch what comes next from four. On AMD tiles of 3 rows are such taller ones,
// and what comes next is fetched in the order of memory (Fetching::streams).

#if defined(TANDEM_KERNELS_CPU_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_MATMUL_INL_H_
#undef TANDEM_KERNELS_CPU_MATMUL_INL_H_
#else
#define TANDEM_KERNELS_CPU_MATMUL_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/inputs-inl.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// Inputs per block of few rows: a panel's block and a tile's rows fit the
// first-level cache. Strides, in words, are an odd number of lines.
inline constexpr int kFewBlock = 288;
// The same where tiles share a panel's block of f32.
inline constexpr int kWidenedBlock = 192;
template <typename W>
inline constexpr int kFewStride = kWordInputs<W> == 2 ? 144 : kFewBlock + 16;
// Blocks of rows copied together: at most 1.4 MB.
inline constexpr int kFewBlocks = 8;
// Words per block of many rows.
inline constexpr int kWideBlock = 576;
inline constexpr int kWideStride = kWideBlock + 16;
// Inputs of one row that fit scratch memory.
inline constexpr int kOneRowInputs = kMatMulScratchBytes / 4;
// Rows copied together, 1.2 MB, and panels widened together, 590 KB; with AVX2,
// whose CPUs have second-level caches of 256 or 512 KB, 147 KB.
inline constexpr int kWideRows = 512;
inline constexpr int kWidePanels = kParts == 1 ? 8 : 2;
// From here on widening once beats widening in registers per tile.
inline constexpr int kManyRows = 144;
inline constexpr int64_t kPairBytes = kPanel * 4;  // also one f32 input

// The rows' blocks, then a panel's block, widened.
inline constexpr int kFewRowsFloats =
    kManyRows * kFewBlocks * kFewStride<F32Weights>;
static_assert((kFewRowsFloats + kWidenedBlock * kPanel) * sizeof(float) <=
              kMatMulScratchBytes);
static_assert(kWideRows * kWideStride * sizeof(float) +
                  kWidePanels * kWideBlock * kPairBytes <=
              kMatMulScratchBytes);

struct TileArgs {
  const float* a;  // words
  const std::byte* w[kMaxUnits];
  int inputs;
  float* c;
  int64_t c_stride;
  bool first;  // chains start here, not at what c holds
  TileEnd finish;
  // What to fetch for later: one of these at a step in turn, and then so many
  // bytes behind it.
  const std::byte* next[kMaxStreams];
  int64_t next_stride;
  float* wide;  // where a tile that widens leaves its weights
  // Where units end, and how far on those that come after them begin.
  int64_t end;
  int64_t jump;
  bool far;  // Fetching's
};

// Lines of one unit in two inputs.
template <typename W>
inline constexpr int kUnitLines = std::is_same_v<W, F32Weights> ? 2 : 1;

// Each unit's own lines, shortly before they are needed, and at its end those
// of the unit that comes next.
struct OwnStreams {
  int64_t ahead;
  int64_t end;
  int64_t jump;
  bool far;

  HWY_INLINE explicit OwnStreams(const TileArgs& t)
      : ahead(t.far         ? 1024
              : kParts == 1 ? 2048
                            : 4096),
        end(t.end),
        jump(t.jump),
        far(t.far) {}
  template <int U>
  HWY_INLINE void Step(const std::byte* const (&unit)[U], int64_t offset) {
    int64_t next = offset + ahead;
    if (next >= end) next += jump;
    KeepIndex(next);
    PrefetchLines(unit, next, far);
  }
};

// kLines lines of one of TileArgs::next in turn, to the second-level cache.
template <int kLines>
struct NextStreams {
  const std::byte* now;
  const std::byte* second;
  const std::byte* third;
  const std::byte* last;
  int64_t stride;

  HWY_INLINE explicit NextStreams(const TileArgs& t)
      : now(t.next[0]),
        second(t.next[1]),
        third(t.next[2]),
        last(t.next[3]),
        stride(t.next_stride) {}
  template <int U>
  HWY_INLINE void Step(const std::byte* const (&)[U], int64_t) {
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      PrefetchFar(now + i * 64);
    }
    const std::byte* const end = now + stride;
    now = second;
    second = third;
    third = last;
    last = end;
  }
};

// The first of several tiles of few rows, which leaves its weights widened for
// the others.
struct Widening : NextStreams<1> {
  HWY_INLINE explicit Widening(const TileArgs& t) : NextStreams<1>(t) {}
};

template <typename W, int R, int U, int kStride, typename Prefetch>
void Tile(const TileArgs& t) {
  Chains<R, U> chains;
  if (t.first) {
    chains.Clear();
  } else {
    chains.Load(t.c, t.c_stride);
  }
  if constexpr (std::is_same_v<Prefetch, NoPrefetch>) {
    Advance<W>(chains, t.a, kStride, t.w, kPairBytes, t.inputs, Prefetch());
  } else if constexpr (std::is_same_v<Prefetch, Widening>) {
    AdvanceWidening<W>(chains, t.a, kStride, t.w, t.inputs, Prefetch(t),
                       t.wide);
  } else {
    Advance<W>(chains, t.a, kStride, t.w, kPairBytes, t.inputs, Prefetch(t));
  }
  t.finish.Apply(chains);
  chains.Store(t.c, t.c_stride);
}

using TileFn = void (*)(const TileArgs&);

// Few rows: what a tile fetches beside its work.
enum class Fetch { kNothing, kHalf, kAll };

// A tile of R rows and at most `limit` units.
template <typename W, int R, int limit, Fetch fetch>
constexpr TileFn FewTile() {
  constexpr int U = HWY_MIN(limit, UnitsFor(R));
  if constexpr (U > 2) {
    return Tile<W, R, U, kFewStride<W>, OwnStreams>;
  } else if constexpr (fetch == Fetch::kNothing) {
    return Tile<W, R, U, kFewStride<W>, NoPrefetch>;
  } else {
    constexpr int kLines = kUnitLines<W> * U;
    return Tile<
        W, R, U, kFewStride<W>,
        NextStreams<fetch == Fetch::kAll ? kLines : HWY_MAX(1, kLines / 2)>>;
  }
}

template <typename W, int limit, Fetch fetch>
TileFn FewTileOf(int rows) {
  return TileFor<1, kMaxRows>(
      rows, [](auto count) { return FewTile<W, count, limit, fetch>(); });
}

#if HWY_TARGET == HWY_AVX3

// Of several tiles, which have half of the most rows or more, half of what
// comes next is fetched by the one that widens and half by the second one.
template <typename W>
TileFn WideningTileOf(int tile, int rows) {
  constexpr int kStride = kFewStride<F32Weights>;
  static_assert(kStride == kFewStride<W>);
  constexpr int kLeast = kMaxRows / 2;
  if (tile == 0) {
    return TileFor<kLeast, kMaxRows>(
        rows, [](auto count) { return Tile<W, count, 2, kStride, Widening>; });
  }
  if (tile == 1) {
    return TileFor<kLeast, kMaxRows>(rows, [](auto count) {
      return Tile<F32Weights, count, 2, kStride, NextStreams<1>>;
    });
  }
  return TileFor<kLeast, kMaxRows>(rows, [](auto count) {
    return Tile<F32Weights, count, 2, kStride, NoPrefetch>;
  });
}

#endif  // HWY_TARGET == HWY_AVX3

// Tiles of many rows.
template <typename W>
TileFn WideTileOf(int rows) {
  return TileFor<1, kMaxWideRows>(rows, [](auto count) {
    return Tile<W, count, HWY_MIN(2, UnitsFor(count)), kWideStride, NoPrefetch>;
  });
}

inline const std::byte* UnitOf(const std::byte* w, int64_t panel_bytes,
                               int unit) {
  return w + unit / 2 * panel_bytes + unit % 2 * 64;
}

template <typename W>
void CopyRows(const MatMulPiece& p, int row, int rows, int begin, int inputs,
              int64_t stride, float* a) {
  for (int r = 0; r < rows; ++r) {
    CopyInputs<W>(p.x + (row + r) * p.x_stride + begin, inputs, a + r * stride);
  }
}

// Inputs per block: equal ones, even so that bf16 pairs stay whole.
inline int BlockInputs(int inputs, int most) {
  const int blocks = (inputs + most - 1) / most;
  return ((inputs + blocks - 1) / blocks + 1) / 2 * 2;
}

template <typename W>
void OneRow(const MatMulPiece& p) {
  constexpr int kGroup = UnitsFor(1);
  const int64_t panel_bytes = PackedMatrix::PanelBytes(p.k, p.type);
  TileArgs args{};
  args.a = p.x + p.row_begin * p.x_stride;
  if constexpr (kRoundsInputs<W>) {
    float* const a = reinterpret_cast<float*>(p.scratch);
    CopyRows<W>(p, p.row_begin, 1, 0, p.k, 0, a);
    args.a = a;
  }
  args.inputs = p.k;
  args.first = true;
  args.far = p.fetching.far;
  const int end = p.panel_end * 2;
  for (int unit = p.panel_begin * 2; unit < end;) {
    const int units = end - unit >= kGroup ? kGroup : 2;
    args.end = panel_bytes;
    args.jump = (units / 2 - 1) * panel_bytes;
    for (int u = 0; u < units; ++u) {
      args.w[u] = UnitOf(p.w, panel_bytes, unit + u);
    }
    RunTile(p,
            units == kGroup ? Tile<W, 1, kGroup, 0, OwnStreams>
                            : Tile<W, 1, 2, 0, OwnStreams>,
            args, 1, p.row_begin, unit * 16, units, true);
    unit += units;
  }
}

// One block of inputs of several panels, and what comes after it: the next
// block of the same panels or the first one of those behind.
struct PanelBlocks {
  const std::byte* first;  // the first panel's
  int panels;
  int64_t panel_bytes;
  int64_t bytes;  // of each panel's block
  // If fewer come next, the last panel several times.
  const std::byte* next[kMaxStreams];
};

// What a tile at panel `panel` of these fetches, `lines` lines at a step, once
// `done` bytes of what is fetched beside that panel are: from all that come
// next a quarter of it, or in order the panel behind it.
inline void FetchBeside(const MatMulPiece& p, const PanelBlocks& blocks,
                        int panel, int64_t done, int lines, TileArgs& args) {
  if (p.fetching.streams > 1) {
    const int64_t begin =
        (panel * blocks.bytes + done) / kMaxStreams / 128 * 128;
    for (int i = 0; i < kMaxStreams; ++i) args.next[i] = blocks.next[i] + begin;
    args.next_stride = lines * int64_t{64};
    return;
  }
  const std::byte* const begin =
      (panel + 1 < blocks.panels
           ? blocks.first + (panel + 1) * blocks.panel_bytes
           : blocks.next[0]) +
      done;
  for (int i = 0; i < kMaxStreams; ++i) {
    args.next[i] = begin + i * lines * int64_t{64};
  }
  args.next_stride = kMaxStreams * lines * int64_t{64};
}

template <typename W>
inline constexpr bool kWidens =
    std::is_same_v<W, Bf16Weights> || std::is_same_v<W, Bf16OddFirst>;

#if HWY_TARGET == HWY_AVX3

// FewRowsBlock of several tiles, whose weights are widened once, into `wide`.
// `inputs` is even.
template <typename W>
void WidenedBlock(const MatMulPiece& p, const PanelBlocks& blocks, int first,
                  int begin, int inputs, const float* a, float* wide) {
  const int rows = p.row_end - p.row_begin;
  const int tiles = (rows + kMaxRows - 1) / kMaxRows;
  TileArgs args{};
  args.inputs = inputs;
  args.first = begin == 0;
  args.wide = wide;
  for (int panel = 0; panel < blocks.panels; ++panel) {
    for (int tile = 0; tile < tiles; ++tile) {
      const int row = rows * tile / tiles;
      const int count = rows * (tile + 1) / tiles - row;
      args.a = a + int64_t{row} * kFewStride<W>;
      FetchBeside(p, blocks, panel, tile * blocks.bytes / 2, 1, args);
      args.w[0] = tile == 0 ? blocks.first + panel * blocks.panel_bytes
                            : reinterpret_cast<const std::byte*>(wide);
      args.w[1] = args.w[0] + 64;
      RunTile(p, WideningTileOf<W>(tile, count), args, count, p.row_begin + row,
              (first + panel) * kPanel, 2, begin + inputs == p.k);
    }
  }
}

#endif  // HWY_TARGET == HWY_AVX3

// Inputs [begin, begin + inputs) of the panels from `first` on, whose blocks
// these are, for all rows, which lie at `a`.
template <typename W>
void FewRowsBlock(const MatMulPiece& p, const PanelBlocks& blocks, int first,
                  int begin, int inputs, const float* a) {
  const int rows = p.row_end - p.row_begin;
  const int tiles = (rows + kMaxRows - 1) / kMaxRows;
  const int panels = blocks.panels;
  TileArgs args{};
  args.inputs = inputs;
  args.first = begin == 0;
  args.far = p.fetching.far;
  const bool last = begin + inputs == p.k;
  // The first two tiles share what is to be fetched, panel after panel; of one
  // unit, which passes over a panel twice, the first one fetches all.
  const int fetchers = kParts == 1 ? std::min(tiles, 2) : 1;
  // Several panels at once, each with its own lines ahead; or, where one stream
  // is faster, one panel, from where there is arithmetic to hide the fetching.
  const bool side_by_side = p.fetching.streams > 1 || rows <= 2;
  const int group =
      tiles == 1 && side_by_side ? std::max(2, UnitsFor(rows)) : 2;
  for (int unit = 0; unit < 2 * panels;) {
    const int units = 2 * panels - unit >= group ? group : 2;
    for (int tile = 0; tile < tiles; ++tile) {
      const int row = rows * tile / tiles;
      const int count = rows * (tile + 1) / tiles - row;
      args.a = a + int64_t{row} * kFewStride<W>;
      const TileFn run = units > 2 ? FewTileOf<W, kMaxUnits, Fetch::kAll>(count)
                         : tile >= fetchers
                             ? FewTileOf<W, 2, Fetch::kNothing>(count)
                         : fetchers == 1 ? FewTileOf<W, 2, Fetch::kAll>(count)
                                         : FewTileOf<W, 2, Fetch::kHalf>(count);
      const int step = std::min(units, UnitsFor(count));
      for (int u = 0; u < units; u += step) {
        FetchBeside(p, blocks, unit / 2,
                    (tile * units + u) * blocks.bytes / (fetchers * units),
                    std::max(1, kUnitLines<W> * step / fetchers), args);
        args.end = blocks.panel_bytes - begin * int64_t{kUnitLines<W> * 64};
        args.jump = (units / 2 - 1) * blocks.panel_bytes;
        for (int i = 0; i < step; ++i) {
          args.w[i] = UnitOf(blocks.first, blocks.panel_bytes, unit + u + i);
        }
        RunTile(p, run, args, count, p.row_begin + row,
                (2 * first + unit + u) * 16, step, last);
      }
    }
    unit += units;
  }
}

template <typename W>
void FewRows(const MatMulPiece& p) {
  const int rows = p.row_end - p.row_begin;
  const int64_t panel_bytes = PackedMatrix::PanelBytes(p.k, p.type);
  float* const a = reinterpret_cast<float*>(p.scratch);
  [[maybe_unused]] float* const wide = a + kFewRowsFloats;
  const bool widens = kParts == 1 && kWidens<W> && rows > kMaxRows;
  const int block = BlockInputs(p.k, widens ? kWidenedBlock : kFewBlock);
  // Usually once: all inputs' rows together stay in the second-level cache.
  for (int from = 0; from < p.k; from += kFewBlocks * block) {
    const int to = std::min(from + kFewBlocks * block, p.k);
    const auto block_rows = [&](int begin) {
      return a + int64_t{begin - from} / block * rows * kFewStride<W>;
    };
    for (int begin = from; begin < to; begin += block) {
      CopyRows<W>(p, p.row_begin, rows, begin, std::min(block, to - begin),
                  kFewStride<W>, block_rows(begin));
    }
    for (int first = p.panel_begin; first < p.panel_end; first += kMaxStreams) {
      const int panels = std::min(kMaxStreams, p.panel_end - first);
      for (int begin = from; begin < to; begin += block) {
        const int end = std::min(begin + block, to);
        const int next_panel = end < to ? first : first + panels;
        const int next = end < to ? end : from;
        constexpr int64_t kInputBytes = kUnitLines<W> * 64;
        PanelBlocks blocks{p.w + first * panel_bytes + begin * kInputBytes,
                           panels,
                           panel_bytes,
                           (end - begin) * kInputBytes,
                           {}};
        for (int i = 0; i < kMaxStreams; ++i) {
          blocks.next[i] =
              p.w + std::min(next_panel + i, p.panel_end - 1) * panel_bytes +
              next * kInputBytes;
        }
#if HWY_TARGET == HWY_AVX3
        if constexpr (kWidens<W>) {
          if (widens && (end - begin) % 2 == 0) {
            WidenedBlock<W>(p, blocks, first, begin, end - begin,
                            block_rows(begin), wide);
            continue;
          }
        }
#endif
        FewRowsBlock<W>(p, blocks, first, begin, end - begin,
                        block_rows(begin));
      }
    }
  }
}

// target [inputs][32] = one panel's inputs from `source` on, widened, in the
// order in which W's rows have them.
template <typename W>
void Widen(const std::byte* source, int inputs, float* target) {
  constexpr int kOdd = std::is_same_v<W, Bf16OddFirst> ? 0 : 32;
  const U32 du;
  for (int k = 0; k < inputs; k += 2, source += kPairBytes, target += 64) {
#pragma GCC unroll 4
    for (int i = 0; i < 2 * kParts; ++i) {
      const auto raw =
          hn::LoadU(du, reinterpret_cast<const uint32_t*>(source) + i * kLanes);
      hn::StoreU(hn::BitCast(F32(), hn::ShiftLeft<16>(raw)), F32(),
                 target + (32 - kOdd) + i * kLanes);
      hn::StoreU(hn::BitCast(F32(), hn::And(raw, hn::Set(du, 0xffff0000u))),
                 F32(), target + kOdd + i * kLanes);
    }
  }
}

// Rows [row_begin, row_end), at most kWideRows.
template <typename W>
void ManyRows(const MatMulPiece& p, int row_begin, int row_end) {
  const int rows = row_end - row_begin;
  const int tiles = (rows + kMaxWideRows - 1) / kMaxWideRows;
  const int64_t panel_bytes = PackedMatrix::PanelBytes(p.k, p.type);
  float* const a = reinterpret_cast<float*>(p.scratch);
  std::byte* const wide = p.scratch + kWideRows * kWideStride * sizeof(float);
  constexpr int64_t kWideBytes = int64_t{kWideBlock} * kPairBytes;
  const int block = BlockInputs(p.k, kWideBlock * kWordInputs<W>);
  for (int begin = 0; begin < p.k; begin += block) {
    const int inputs = std::min(block, p.k - begin);
    TileArgs args{};
    args.inputs = kRoundsInputs<W> ? inputs + inputs % 2 : inputs;
    args.first = begin == 0;
    const bool last = begin + inputs == p.k;
    CopyRows<W>(p, row_begin, rows, begin, inputs, kWideStride, a);
    for (int panel = p.panel_begin; panel < p.panel_end; panel += kWidePanels) {
      const int panels = std::min(kWidePanels, p.panel_end - panel);
      if constexpr (kWidens<W>) {
        for (int i = 0; i < panels; ++i) {
          Widen<W>(p.w + (panel + i) * panel_bytes + begin / 2 * kPairBytes,
                   args.inputs,
                   reinterpret_cast<float*>(wide + i * kWideBytes));
        }
      }
      for (int tile = 0; tile < tiles; ++tile) {
        const int row = static_cast<int>(int64_t{rows} * tile / tiles);
        const int count =
            static_cast<int>(int64_t{rows} * (tile + 1) / tiles) - row;
        args.a = a + int64_t{row} * kWideStride;
        const TileFn run =
            WideTileOf<std::conditional_t<kWidens<W>, F32Weights, W>>(count);
        const int step = std::min(2, UnitsFor(count));
        for (int i = 0; i < panels; ++i) {
          const std::byte* const w =
              kWidens<W> ? wide + i * kWideBytes
                         : p.w + (panel + i) * panel_bytes +
                               begin / kWordInputs<W> * kPairBytes;
          for (int u = 0; u < 2; u += step) {
            for (int j = 0; j < step; ++j) args.w[j] = w + (u + j) * 64;
            RunTile(p, run, args, count, row_begin + row,
                    (panel + i) * kPanel + u * 16, step, last);
          }
        }
      }
    }
  }
}

template <typename W>
void MatMulOf(const MatMulPiece& p) {
  const int rows = p.row_end - p.row_begin;
  if (rows == 1 && p.k <= kOneRowInputs) {
    OneRow<W>(p);
  } else if (rows < kManyRows) {
    FewRows<W>(p);
  } else {
    const int parts = (rows + kWideRows - 1) / kWideRows;
    for (int part = 0; part < parts; ++part) {
      ManyRows<W>(
          p, p.row_begin + static_cast<int>(int64_t{rows} * part / parts),
          p.row_begin + static_cast<int>(int64_t{rows} * (part + 1) / parts));
    }
  }
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
