// SPDX-License-Identifier: Apache-2.0
// One tile of a product at the edge of `out`: what matrix kernels share.

#if defined(TANDEM_KERNELS_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_TILE_INL_H_
#undef TANDEM_KERNELS_CPU_TILE_INL_H_
#else
#define TANDEM_KERNELS_CPU_TILE_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/cpu/chains-inl.h"
#include "kernels/cpu/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// Of f32 inputs (matmul.cc), of ones rounded to bf16 (matmul_bf16.cc), and of
// such in groups (matmul_tiles.cc).
void MatMulRows(const MatMulPiece& p);
void MatMulRounded(const MatMulPiece& p);
void MatMulPairs(const MatMulPiece& p);
void MatMulGrouped(const MatMulPiece& p);
void MatMulTiles(const MatMulPiece& p);

inline constexpr int kMaxUnits = 8;
inline constexpr int kMaxTileRows = 16;

// What finished chains of 16 outputs each become.
struct TileEnd {
  const float* scales = nullptr;  // [units * 16], or null
  const float* bias = nullptr;    // likewise

  template <int R, int U>
  HWY_INLINE void Apply(Chains<R, U>& chains) const {
    const F32 d;
    if (scales != nullptr) {
#pragma GCC unroll 8
      for (int i = 0; i < U * kParts; ++i) {
        const Vec scale = hn::LoadU(d, scales + i * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          chains.v[r][i] = hn::Mul(chains.v[r][i], scale);
        }
      }
    }
    if (bias != nullptr) {
#pragma GCC unroll 8
      for (int i = 0; i < U * kParts; ++i) {
        const Vec add = hn::LoadU(d, bias + i * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          chains.v[r][i] = hn::Add(chains.v[r][i], add);
        }
      }
    }
  }
};

// The tile for `rows`, kFirst to kLast of them: of_rows(rows), of a number that
// is a constant, is a function.
template <int kFirst, int kLast, typename OfRows>
HWY_INLINE auto TileFor(int rows, OfRows of_rows) {
  using Tile = decltype(of_rows(std::integral_constant<int, kFirst>()));
  static constexpr auto kTiles =
      []<int... kNext>(std::integer_sequence<int, kNext...> /*counts*/) {
    return std::array<Tile, sizeof...(kNext)>{
        OfRows()(std::integral_constant<int, kFirst + kNext>())...};
  }
  (std::make_integer_sequence<int, kLast - kFirst + 1>());
  return kTiles[static_cast<size_t>(rows - kFirst)];
}

// Runs `tile`, whose chains come from and go to args.c (stride args.c_stride,
// not read if args.first), for `units` units from output column `column` on.
// With `last`, chains are finished and args.finish is applied to them. The last
// panel's padding must not reach `out`, and has no scale, so such tiles go
// through copies.
template <typename Args, typename Tile>
void RunTile(const MatMulPiece& p, const Tile& tile, Args& args, int rows,
             int row, int column, int units, bool last) {
  float* const out = p.out + row * p.out_stride + column;
  const int width = units * 16;
  const int valid = std::min(width, p.n - column);
  if (valid <= 0) return;
  args.finish = {};
  if (last && p.scales != nullptr) args.finish.scales = p.scales + column;
  if (last && p.bias != nullptr) args.finish.bias = p.bias + column;
  if (valid == width) {
    // Rows of outputs lie far apart: their lines come while the tile works.
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < width; i += 16) {
        __builtin_prefetch(out + r * p.out_stride + i, 1);
      }
    }
    args.c = out;
    args.c_stride = p.out_stride;
    tile(args);
    return;
  }
  alignas(64) float copy[kMaxTileRows * kMaxUnits * 16];
  alignas(64) float numbers[2][kMaxUnits * 16] = {};
  const auto padded = [&](const float* from, float* to) {
    if (from != nullptr) std::copy(from, from + valid, to);
    return from == nullptr ? nullptr : to;
  };
  args.finish.scales = padded(args.finish.scales, numbers[0]);
  args.finish.bias = padded(args.finish.bias, numbers[1]);
  if (!args.first) {
    for (int r = 0; r < rows; ++r) {
      std::memcpy(copy + r * width, out + r * p.out_stride,
                  static_cast<size_t>(valid) * sizeof(float));
      std::fill(copy + r * width + valid, copy + (r + 1) * width, 0.0f);
    }
  }
  args.c = copy;
  args.c_stride = width;
  tile(args);
  for (int r = 0; r < rows; ++r) {
    std::memcpy(out + r * p.out_stride, copy + r * width,
                static_cast<size_t>(valid) * sizeof(float));
  }
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
