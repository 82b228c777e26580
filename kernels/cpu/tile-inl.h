// SPDX-License-Identifier: Apache-2.0
// One tile of a product at the edge of `out`: what matrix kernels share.

#if defined(TANDEM_KERNELS_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_TILE_INL_H_
#undef TANDEM_KERNELS_CPU_TILE_INL_H_
#else
#define TANDEM_KERNELS_CPU_TILE_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "kernels/cpu/chains-inl.h"
#include "kernels/cpu/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

inline constexpr int kMaxUnits = 8;
inline constexpr int kMaxTileRows = 16;
// Panels that are fetched side by side: memory gives its bandwidth to several
// streams.
inline constexpr int kStreams = 4;

// Runs `tile`, whose chains come from and go to args.c (stride args.c_stride,
// not read if args.first), for `units` units from output column `column` on.
// The last panel's padding must not reach `out`, so such tiles go through a
// copy. With `last`, chains are finished: scales and bias follow.
template <typename Args, typename Tile>
void RunTile(const MatMulPiece& p, const Tile& tile, Args& args, int rows,
             int row, int column, int units, bool last) {
  float* const out = p.out + int64_t{row} * p.n + column;
  const int width = units * 16;
  const int valid = std::min(width, p.n - column);
  if (valid <= 0) return;
  if (valid == width) {
    args.c = out;
    args.c_stride = p.n;
    tile(args);
  } else {
    alignas(64) float copy[kMaxTileRows * kMaxUnits * 16];
    if (!args.first) {
      for (int r = 0; r < rows; ++r) {
        std::memcpy(copy + r * width, out + int64_t{r} * p.n,
                    static_cast<size_t>(valid) * sizeof(float));
        std::fill(copy + r * width + valid, copy + (r + 1) * width, 0.0f);
      }
    }
    args.c = copy;
    args.c_stride = width;
    tile(args);
    for (int r = 0; r < rows; ++r) {
      std::memcpy(out + int64_t{r} * p.n, copy + r * width,
                  static_cast<size_t>(valid) * sizeof(float));
    }
  }
  if (!last || (p.scales == nullptr && p.bias == nullptr)) return;
  for (int i = 0; i < valid; i += 16) {
    const int count = std::min(16, valid - i);
    const F16 scale = p.scales == nullptr
                          ? Set16(1.0f)
                          : LoadFirst16(p.scales + column + i, count);
    const F16 bias = p.bias == nullptr
                         ? Set16(0.0f)
                         : LoadFirst16(p.bias + column + i, count);
    for (int r = 0; r < rows; ++r) {
      float* const at = out + int64_t{r} * p.n + i;
      F16 value = LoadFirst16(at, count);
      if (p.scales != nullptr) value = Mul(value, scale);
      if (p.bias != nullptr) value = Add(value, bias);
      StoreFirst16(value, at, count);
    }
  }
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
