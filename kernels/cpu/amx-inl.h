// SPDX-License-Identifier: Apache-2.0
// AMX: eight registers of tiles, of up to 16 rows of 64 bytes. They belong to a
// thread from ConfigureTiles to ReleaseTiles.

#if defined(TANDEM_KERNELS_CPU_AMX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_AMX_INL_H_
#undef TANDEM_KERNELS_CPU_AMX_INL_H_
#else
#define TANDEM_KERNELS_CPU_AMX_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX3

inline constexpr int kTileRows = 16;

// As ldtilecfg reads it: of each tile the bytes of a row, and the rows.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShapes) == 64);

// Of products: 0 to 3 sums, 4 and 5 rows of inputs, 6 and 7 weights of 16
// outputs. Those have 16 rows, the others as many as inputs have.
inline TileShapes ProductShapes(int rows) {
  TileShapes shapes;
  std::fill_n(shapes.rows, 6, static_cast<uint8_t>(rows));
  return shapes;
}

// How rows are divided among tiles: all in one, or into equal pairs of them.
// Where a pair has fewer rows than two tiles do, its second tile begins in the
// first one, and both say the same of those rows.
struct TilePairs {
  int rows;
  int passes;
  int of_tile;

  explicit TilePairs(int all)
      : rows(all), passes((all + 2 * kTileRows - 1) / (2 * kTileRows)) {
    const int most = (all + passes - 1) / passes;
    of_tile = paired() ? (most + 1) / 2 : all;
  }
  bool paired() const { return rows > kTileRows; }
  int Begin(int pass) const {
    return static_cast<int>(int64_t{rows} * pass / passes);
  }
  int Rows(int pass) const { return Begin(pass + 1) - Begin(pass); }
};

HWY_INLINE void ConfigureTiles(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" : : "m"(shapes));
}
HWY_INLINE void ReleaseTiles() { asm volatile("tilerelease"); }

// Inputs rounded to bf16, two to a word of `to`, which ends with a zero if they
// are odd; as CopyInputs<Bf16Groups> rounds them.
inline void RoundPairs(const float* from, int inputs, float* to) {
  const F32 d;
  const auto pairs_of = [](Vec low, Vec high) HWY_ATTR {
    auto pairs = low.raw;
    asm("vcvtne2ps2bf16 %1, %2, %0"
        : "=v"(pairs)
        : "v"(low.raw), "v"(high.raw));
    return Vec{pairs};
  };
  for (; inputs >= 32; inputs -= 32, from += 32, to += 16) {
    hn::StoreU(pairs_of(hn::LoadU(d, from), hn::LoadU(d, from + 16)), d, to);
  }
  if (inputs == 0) return;
  const auto first = [&](int count) HWY_ATTR {
    return hn::FirstN(d, static_cast<size_t>(HWY_MAX(0, count)));
  };
  hn::BlendedStore(pairs_of(hn::MaskedLoad(first(inputs), d, from),
                            hn::MaskedLoad(first(inputs - 16), d, from + 16)),
                   first((inputs + 1) / 2), d, to);
}

// ---- Tiles are named by a literal, "0" to "7"; strides are in bytes.
#define TANDEM_LOAD_TILE(tile, from, stride)                  \
  asm volatile("tileloadd (%0,%1,1), %%tmm" tile              \
               :                                              \
               : "r"(from), "r"(static_cast<int64_t>(stride)) \
               : "memory")
#define TANDEM_STORE_TILE(tile, to, stride)                 \
  asm volatile("tilestored %%tmm" tile ", (%0,%1,1)"        \
               :                                            \
               : "r"(to), "r"(static_cast<int64_t>(stride)) \
               : "memory")
#define TANDEM_CLEAR_TILE(tile) asm volatile("tilezero %%tmm" tile ::)
// sum += rows * pairs, as kernels/cpu/matmul_tiles.cc says.
#define TANDEM_DOT_TILE(sum, rows, pairs) \
  asm volatile("tdpbf16ps %%tmm" pairs ", %%tmm" rows ", %%tmm" sum ::)
// The same of signed bytes, four to a word: sums are integers.
#define TANDEM_DOT_CODES(sum, rows, quads) \
  asm volatile("tdpbssd %%tmm" quads ", %%tmm" rows ", %%tmm" sum ::)

#endif  // HWY_TARGET == HWY_AVX3
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
