// SPDX-License-Identifier: Apache-2.0
// Products with codes by AMX's tiles, with the bits of dot-inl.h.

#if defined(TANDEM_KERNELS_CPU_AMX_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_AMX_CODES_INL_H_
#undef TANDEM_KERNELS_CPU_AMX_CODES_INL_H_
#else
#define TANDEM_KERNELS_CPU_AMX_CODES_INL_H_
#endif

#include "kernels/cpu/amx-inl.h"
#include "kernels/cpu/dot-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET && HWY_TARGET == HWY_AVX3

// ---- Groups: R rows, at most 16, against one unit, int8 codes as they lie in
// the packed matrix (Read::kInt8) or in scratch.

// 0, 3: rows [16][32 bytes]; 1, 4: codes [8 quads][64]; 2, 5: sums
inline constexpr TileShapes kGroupShapes = {
    .row_bytes = {32, 64, 64, 32, 64, 64}, .rows = {16, 8, 16, 16, 8, 16}};

// Dot products of one group: out [16 rows][16].
#define TANDEM_TILE_GROUP(rows, codes, sums)                       \
  asm volatile("tilezero %%tmm" sums                               \
               "\n\t"                                              \
               "tileloadd (%0,%1,1), %%tmm" rows                   \
               "\n\t"                                              \
               "tileloadd (%2,%3,1), %%tmm" codes                  \
               "\n\t"                                              \
               "tdpbssd %%tmm" codes ", %%tmm" rows ", %%tmm" sums \
               "\n\t"                                              \
               "tilestored %%tmm" sums ", (%4,%3,1)"               \
               :                                                   \
               : "r"(a), "r"(int64_t{sizeof(RowPiece)}), "r"(w),   \
                 "r"(int64_t{64}), "r"(out)                        \
               : "memory")

template <int group>
HWY_INLINE void TileGroup(const int8_t* a, const std::byte* w, int32_t* out) {
  if constexpr (group == 0) {
    TANDEM_TILE_GROUP("0", "1", "2");
  } else {
    TANDEM_TILE_GROUP("3", "4", "5");
  }
}
#undef TANDEM_TILE_GROUP

// Chains of R rows go on by one group with `sums` [16][16].
template <int R>
HWY_INLINE void TileChains(const int32_t* sums, const std::byte* unit,
                           int group, const GroupRows& rows,
                           Chains<R, 1>& chains) {
  const F32 d;
  const Vec scale = hn::PromoteTo(
      d, hn::LoadU(hn::Rebind<hwy::float16_t, F32>(),
                   reinterpret_cast<const hwy::float16_t*>(unit) + group * 16));
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const VecI sum = hn::Load(I32(), sums + r * kUnit);
    chains.v[r][0] =
        hn::MulAdd(hn::ConvertTo(d, sum),
                   hn::Mul(scale, hn::Set(d, rows.Scale(r))), chains.v[r][0]);
  }
}

// As DotTile<.., kReady, R, 1>. Reads codes of 16 rows, whatever R is. Tiles
// are one group ahead of the vectors, which work at the same time: so no load
// of sums may come after a store with the same lowest 12 bits, with which it
// would be taken to depend on it (three times slower). Two sums, side by side,
// and chains that stay in registers keep to that.
template <int R>
void AmxTile(const CodeTile& t) {
  alignas(2048) int32_t sums[2][kTileRows * kUnit];
  Chains<R, 1> chains;
  if (t.first) {
    chains.Clear();
  } else {
    chains.Load(t.c, t.c_stride);
  }
  constexpr int64_t kBegin = kCodesBegin<Read::kReady>;
  constexpr int64_t kBytes = kGroupBytes<Read::kReady>;
  const std::byte* unit = t.w[0];
  const int8_t* codes = t.a->codes;
  GroupRows rows(t.a);
  TileGroup<0>(codes, unit + kBegin, sums[0]);
  for (int block = 0; block < t.blocks; ++block) {
    FetchNext(t, block);
    // Tiles wait for each line from the second-level cache; two blocks ahead.
#pragma GCC unroll 17
    for (int64_t line = 0; line < CodeUnitBytes(CodeKind::kInt8); line += 64) {
      PrefetchLine(unit + 2 * t.w_stride + line);
    }
    TileGroup<1>(codes + kCodeGroup, unit + kBegin + kBytes, sums[1]);
    TileChains<R>(sums[0], unit, 0, rows, chains);
    rows.Next();
    const std::byte* const next = unit + t.w_stride;
    codes += 2 * kCodeGroup;
    if (block + 1 < t.blocks) TileGroup<0>(codes, next + kBegin, sums[0]);
    TileChains<R>(sums[1], unit, 1, rows, chains);
    rows.Next();
    unit = next;
  }
  t.finish.Apply(chains);
  chains.Store(t.c, t.c_stride);
}

// ---- W8A8: the rows of one or two tiles against a panel (ProductShapes). A
// block of 64 inputs is one instruction's, codes [16 quads][16 outputs], and
// sums stay in their tiles until the last one.

struct WholeTile : CodeTile {
  int rows;    // of both tiles
  int second;  // from the first row to the second tile's
};

// A unit's codes; tiles wait for each line from the second-level cache.
HWY_INLINE void FetchUnit(const std::byte* unit) {
#pragma GCC unroll 16
  for (int64_t line = 0; line < CodeUnitBytes(CodeKind::kW8A8); line += 64) {
    PrefetchLine(unit + line);
  }
}

template <int kTiles>
void AmxWholeTile(const WholeTile& t) {
  static_assert(kTiles == 1 || kTiles == 2);
  const int64_t stride = t.c_stride * int64_t{sizeof(float)};
  float* const below = t.c + t.second * t.c_stride;
  if (t.first) {
    TANDEM_CLEAR_TILE("0");
    TANDEM_CLEAR_TILE("1");
    TANDEM_CLEAR_TILE("2");
    TANDEM_CLEAR_TILE("3");
  } else {
    TANDEM_LOAD_TILE("0", t.c, stride);
    TANDEM_LOAD_TILE("1", t.c + kUnit, stride);
    if constexpr (kTiles == 2) {
      TANDEM_LOAD_TILE("2", below, stride);
      TANDEM_LOAD_TILE("3", below + kUnit, stride);
    }
  }
  constexpr int64_t kUnitBytes = CodeUnitBytes(CodeKind::kW8A8);
  constexpr int64_t kRowBytes = sizeof(RowPiece);
  constexpr int kDots = 2 * kTiles;  // of a block
  const std::byte* w = t.w[0];
  const auto* a = reinterpret_cast<const std::byte*>(t.a->codes);
  for (int block = 0; block < t.blocks; ++block) {
    // Evenly: a burst of prefetches stops what is behind it.
    const std::byte* const ahead = w + 2 * t.w_stride;
    TANDEM_LOAD_TILE("4", a, kRowBytes);
    TANDEM_LOAD_TILE("6", w, 64);
    TANDEM_DOT_CODES("0", "4", "6");
    FetchNext(t, block, 0, kDots);
    FetchUnit(ahead);
    TANDEM_LOAD_TILE("7", w + kUnitBytes, 64);
    TANDEM_DOT_CODES("1", "4", "7");
    FetchNext(t, block, 1, kDots);
    FetchUnit(ahead + kUnitBytes);
    if constexpr (kTiles == 2) {
      TANDEM_LOAD_TILE("5", a + t.second * kRowBytes, kRowBytes);
      TANDEM_DOT_CODES("2", "5", "6");
      FetchNext(t, block, 2, kDots);
      TANDEM_DOT_CODES("3", "5", "7");
      FetchNext(t, block, 3, kDots);
    }
    a += kCodeInputs;
    w += t.w_stride;
  }
  TANDEM_STORE_TILE("0", t.c, stride);
  TANDEM_STORE_TILE("1", t.c + kUnit, stride);
  if constexpr (kTiles == 2) {
    TANDEM_STORE_TILE("2", below, stride);
    TANDEM_STORE_TILE("3", below + kUnit, stride);
  }
  if (!t.last()) return;
  for (int row = 0; row < t.rows; ++row) {
    Chains<1, 2> sums;
    sums.Load(t.c + row * t.c_stride, 0);
    EndPiece<MultiplyAdd, Read::kW8A8, 1, 2>(sums, t.a + row, true);
    t.finish.Apply(sums);
    sums.Store(t.c + row * t.c_stride, 0);
  }
}

#endif  // TANDEM_SIMD_TARGET && HWY_TARGET == HWY_AVX3
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
