// SPDX-License-Identifier: Apache-2.0
// Matrix products over packed weights (packed_matrix.h), on one thread. Three
// paths with equal bits, since each output is the same chain:
//
//   one row       the weights stream by, several panels at once so that the
//                 latency of the chains hides, prefetched ahead
//   a few rows    rows are copied to a fixed stride (powers of two would
//                 collide in the cache), weights widen in registers
//   many rows     a block of weights is widened to f32 once and then reused
//                 by every tile of rows

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/tile-inl.h"
// clang-format on

#include <algorithm>
#include <cstring>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/packed_matrix.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// Inputs per block of the row paths: 12 rows of activations fit the
// first-level cache. The stride is no multiple of a page.
inline constexpr int kRowBlock = 768;
inline constexpr int kWideBlock = 576;
inline constexpr int kRowStride = kRowBlock + 16;
// Panels widened together: 590 KB of second-level cache.
inline constexpr int kWidePanels = 8;
// From here on widening once beats widening in registers per tile.
inline constexpr int kWideRows = 96;
inline constexpr int64_t kPairBytes = kPanel * 4;  // also one f32 input

struct TileArgs {
  const float* a;
  const std::byte* w[kMaxUnits];
  int inputs;
  float* c;
  int64_t c_stride;
  bool first;     // chains start here, not at what c holds
  int64_t ahead;  // prefetch distance
};

template <typename W, int R, int U>
void Tile(const TileArgs& t) {
  Chains<R, U> chains;
  if (t.first) {
    chains.Clear();
  } else {
    chains.Load(t.c, t.c_stride);
  }
  if (t.ahead != 0) {
    Advance<R, U>(W(), chains, t.a, kRowStride, t.w, kPairBytes, t.inputs,
                  t.ahead);
  } else {
    Advance<R, U>(W(), chains, t.a, kRowStride, t.w, kPairBytes, t.inputs, 0);
  }
  chains.Store(t.c, t.c_stride);
}

using TileFn = void (*)(const TileArgs&);

// Tiles of R rows and at most `limit` units.
template <typename W, int limit>
TileFn TileOf(int rows) {
  switch (rows) {
#define TANDEM_TILE(R)                   \
  case R:                                \
    return Tile<W, HWY_MIN(R, kMaxRows), \
                HWY_MIN(limit, UnitsFor(HWY_MIN(R, kMaxRows)))>
    TANDEM_TILE(1);
    TANDEM_TILE(2);
    TANDEM_TILE(3);
    TANDEM_TILE(4);
    TANDEM_TILE(5);
    TANDEM_TILE(6);
    TANDEM_TILE(7);
    TANDEM_TILE(8);
    TANDEM_TILE(9);
    TANDEM_TILE(10);
    TANDEM_TILE(11);
    TANDEM_TILE(12);
#undef TANDEM_TILE
  }
  return nullptr;
}

const std::byte* UnitOf(const std::byte* w, int64_t panel_bytes, int unit) {
  return w + unit / 2 * panel_bytes + unit % 2 * 64;
}

void CopyRows(const MatMulPiece& p, int row, int rows, int begin, int inputs,
              float* a) {
  for (int r = 0; r < rows; ++r) {
    std::memcpy(a + int64_t{r} * kRowStride,
                p.x + int64_t{row + r} * p.k + begin,
                static_cast<size_t>(inputs) * sizeof(float));
  }
}

// Inputs per block: equal ones, even so that bf16 pairs stay whole.
int BlockInputs(int inputs, int most) {
  const int blocks = (inputs + most - 1) / most;
  return ((inputs + blocks - 1) / blocks + 1) / 2 * 2;
}

template <typename W>
void OneRow(const MatMulPiece& p) {
  constexpr int kGroup = UnitsFor(1);
  const int64_t panel_bytes = PackedMatrix::PanelBytes(p.k, p.type);
  TileArgs args{};
  args.a = p.x + int64_t{p.row_begin} * p.k;
  args.inputs = p.k;
  args.first = true;
  args.ahead = 2048;
  const int end = p.panel_end * 2;
  for (int unit = p.panel_begin * 2; unit < end;) {
    const int units = end - unit >= kGroup ? kGroup : 2;
    for (int u = 0; u < units; ++u) {
      args.w[u] = UnitOf(p.w, panel_bytes, unit + u);
    }
    RunTile(p, units == kGroup ? Tile<W, 1, kGroup> : Tile<W, 1, 2>, args, 1,
            p.row_begin, unit * 16, units, true);
    unit += units;
  }
}

template <typename W>
void FewRows(const MatMulPiece& p) {
  const int rows = p.row_end - p.row_begin;
  const int tiles = (rows + kMaxRows - 1) / kMaxRows;
  const int64_t panel_bytes = PackedMatrix::PanelBytes(p.k, p.type);
  const int64_t input_bytes =
      std::is_same_v<W, Bf16Weights> ? kPairBytes / 2 : kPairBytes;
  float* const a = reinterpret_cast<float*>(p.scratch);
  const int block = BlockInputs(p.k, kRowBlock);
  for (int begin = 0; begin < p.k; begin += block) {
    TileArgs args{};
    args.inputs = std::min(block, p.k - begin);
    args.first = begin == 0;
    const bool last = begin + args.inputs == p.k;
    CopyRows(p, p.row_begin, rows, begin, args.inputs, a);
    const std::byte* const w = p.w + begin * input_bytes;
    // Several tiles share a panel while it is in the cache.
    const int group = tiles == 1 ? std::max(2, UnitsFor(rows)) : 2;
    const int end = p.panel_end * 2;
    for (int unit = p.panel_begin * 2; unit < end;) {
      const int units = end - unit >= group ? group : 2;
      for (int tile = 0; tile < tiles; ++tile) {
        const int row = rows * tile / tiles;
        const int count = rows * (tile + 1) / tiles - row;
        args.a = a + int64_t{row} * kRowStride;
        args.ahead = tile == 0 ? 2048 : 0;
        const TileFn full =
            units == 2 ? TileOf<W, 2>(count) : TileOf<W, kMaxUnits>(count);
        const int step = std::min(units, UnitsFor(count));
        for (int u = 0; u < units; u += step) {
          for (int i = 0; i < step; ++i) {
            args.w[i] = UnitOf(w, panel_bytes, unit + u + i);
          }
          RunTile(p, full, args, count, p.row_begin + row, (unit + u) * 16,
                  step, last);
        }
      }
      unit += units;
    }
  }
}

// target [inputs][32] = one panel's inputs from `source` on, widened.
void Widen(const std::byte* source, int inputs, float* target) {
  const U32 du;
  for (int k = 0; k < inputs; k += 2, source += kPairBytes, target += 64) {
#pragma GCC unroll 4
    for (int i = 0; i < 2 * kParts; ++i) {
      const auto raw =
          hn::LoadU(du, reinterpret_cast<const uint32_t*>(source) + i * kLanes);
      hn::StoreU(hn::BitCast(F32(), hn::ShiftLeft<16>(raw)), F32(),
                 target + i * kLanes);
      hn::StoreU(hn::BitCast(F32(), hn::And(raw, hn::Set(du, 0xffff0000u))),
                 F32(), target + 32 + i * kLanes);
    }
  }
}

template <typename W>
void ManyRows(const MatMulPiece& p) {
  constexpr bool kWiden = std::is_same_v<W, Bf16Weights>;
  const int rows = p.row_end - p.row_begin;
  const int tiles = (rows + kMaxRows - 1) / kMaxRows;
  const int64_t panel_bytes = PackedMatrix::PanelBytes(p.k, p.type);
  float* const a = reinterpret_cast<float*>(p.scratch);
  std::byte* const wide = p.scratch + kMaxRows * kRowStride * sizeof(float);
  constexpr int64_t kWideBytes = int64_t{kWideBlock} * kPairBytes;
  const int block = BlockInputs(p.k, kWideBlock);
  for (int begin = 0; begin < p.k; begin += block) {
    TileArgs args{};
    args.inputs = std::min(block, p.k - begin);
    args.first = begin == 0;
    const bool last = begin + args.inputs == p.k;
    for (int panel = p.panel_begin; panel < p.panel_end; panel += kWidePanels) {
      const int panels = std::min(kWidePanels, p.panel_end - panel);
      if constexpr (kWiden) {
        for (int i = 0; i < panels; ++i) {
          Widen(p.w + (panel + i) * panel_bytes + begin / 2 * kPairBytes,
                args.inputs, reinterpret_cast<float*>(wide + i * kWideBytes));
        }
      }
      for (int tile = 0; tile < tiles; ++tile) {
        const int row = static_cast<int>(int64_t{rows} * tile / tiles);
        const int count =
            static_cast<int>(int64_t{rows} * (tile + 1) / tiles) - row;
        CopyRows(p, p.row_begin + row, count, begin, args.inputs, a);
        args.a = a;
        const TileFn run = TileOf<F32Weights, 2>(count);
        const int step = std::min(2, UnitsFor(count));
        for (int i = 0; i < panels; ++i) {
          const std::byte* const w =
              kWiden ? wide + i * kWideBytes
                     : p.w + (panel + i) * panel_bytes + begin * kPairBytes;
          for (int u = 0; u < 2; u += step) {
            for (int j = 0; j < step; ++j) args.w[j] = w + (u + j) * 64;
            RunTile(p, run, args, count, p.row_begin + row,
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
  if (rows == 1) {
    OneRow<W>(p);
  } else if (rows < kWideRows) {
    FewRows<W>(p);
  } else {
    ManyRows<W>(p);
  }
}

void MatMulRows(const MatMulPiece& p) {
  if (p.type == DType::kF32) {
    MatMulOf<F32Weights>(p);
  } else {
    MatMulOf<Bf16Weights>(p);
  }
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

void AddMatMul(KernelTable& table) {
  table.matmul =
      table.isa == Isa::kAvx512 ? N_AVX3::MatMulRows : N_AVX2::MatMulRows;
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
