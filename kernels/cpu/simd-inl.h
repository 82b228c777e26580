// SPDX-License-Identifier: Apache-2.0
// Vectors as the kernels see them: 16 logical lanes of f32, one register with
// AVX-512 and two with AVX2. Whatever crosses lanes goes through the fixed
// trees here, so both give the same bits. Included once per target.

#if defined(TANDEM_KERNELS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_SIMD_INL_H_
#undef TANDEM_KERNELS_CPU_SIMD_INL_H_
#else
#define TANDEM_KERNELS_CPU_SIMD_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

// False for the scalar fallback, which stays empty.
#undef TANDEM_SIMD_TARGET
#define TANDEM_SIMD_TARGET (HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3)

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using U32 = hn::RebindToUnsigned<F32>;
using I32 = hn::RebindToSigned<F32>;
using Vec = hn::Vec<F32>;

inline constexpr int kLanes = HWY_TARGET == HWY_AVX3 ? 16 : 8;
inline constexpr int kParts = 16 / kLanes;

// 16 lanes.
struct F16 {
  Vec v[kParts];
};

// The body is written once for all parts; `i` numbers them.
#define TANDEM_PARTS(i) _Pragma("GCC unroll 2") for (int i = 0; i < kParts; ++i)

HWY_INLINE F16 Set16(float value) {
  F16 r;
  TANDEM_PARTS(i) r.v[i] = hn::Set(F32(), value);
  return r;
}
HWY_INLINE F16 Load16(const float* p) {
  F16 r;
  TANDEM_PARTS(i) r.v[i] = hn::LoadU(F32(), p + i * kLanes);
  return r;
}
// Lanes from `count` on are zero; nothing behind them is read.
HWY_INLINE F16 LoadFirst16(const float* p, int count) {
  F16 r;
  TANDEM_PARTS(i) {
    const int part = HWY_MAX(0, HWY_MIN(kLanes, count - i * kLanes));
    r.v[i] = hn::MaskedLoad(hn::FirstN(F32(), static_cast<size_t>(part)), F32(),
                            p + i * kLanes);
  }
  return r;
}
HWY_INLINE void Store16(const F16& a, float* p) {
  TANDEM_PARTS(i) hn::StoreU(a.v[i], F32(), p + i * kLanes);
}
HWY_INLINE void StoreFirst16(const F16& a, float* p, int count) {
  TANDEM_PARTS(i) {
    const int part = HWY_MAX(0, HWY_MIN(kLanes, count - i * kLanes));
    hn::BlendedStore(a.v[i], hn::FirstN(F32(), static_cast<size_t>(part)),
                     F32(), p + i * kLanes);
  }
}
HWY_INLINE F16 Add(const F16& a, const F16& b) {
  F16 r;
  TANDEM_PARTS(i) r.v[i] = hn::Add(a.v[i], b.v[i]);
  return r;
}
HWY_INLINE F16 Sub(const F16& a, const F16& b) {
  F16 r;
  TANDEM_PARTS(i) r.v[i] = hn::Sub(a.v[i], b.v[i]);
  return r;
}
HWY_INLINE F16 Mul(const F16& a, const F16& b) {
  F16 r;
  TANDEM_PARTS(i) r.v[i] = hn::Mul(a.v[i], b.v[i]);
  return r;
}
HWY_INLINE F16 Div(const F16& a, const F16& b) {
  F16 r;
  TANDEM_PARTS(i) r.v[i] = hn::Div(a.v[i], b.v[i]);
  return r;
}
HWY_INLINE F16 Min(const F16& a, const F16& b) {
  F16 r;
  TANDEM_PARTS(i) r.v[i] = hn::Min(a.v[i], b.v[i]);
  return r;
}
HWY_INLINE F16 Max(const F16& a, const F16& b) {
  F16 r;
  TANDEM_PARTS(i) r.v[i] = hn::Max(a.v[i], b.v[i]);
  return r;
}
// a * b + c, rounded once.
HWY_INLINE F16 Fma(const F16& a, const F16& b, const F16& c) {
  F16 r;
  TANDEM_PARTS(i) r.v[i] = hn::MulAdd(a.v[i], b.v[i], c.v[i]);
  return r;
}

// Folds halves until one lane is left: ((0 8) (4 12)) ...
template <typename Op>
HWY_INLINE float Fold16(const F16& a, const Op& op) {
#if HWY_TARGET == HWY_AVX3
  const hn::Half<F32> d8;
  const auto eight = op(hn::LowerHalf(d8, a.v[0]), hn::UpperHalf(d8, a.v[0]));
#else
  const F32 d8;
  const auto eight = op(a.v[0], a.v[1]);
#endif
  const hn::FixedTag<float, 4> d4;
  const auto four = op(hn::LowerHalf(d4, eight), hn::UpperHalf(d4, eight));
  const auto two = op(four, hn::Shuffle1032(four));
  return hn::GetLane(op(two, hn::Shuffle2301(two)));
}
HWY_INLINE float Sum16(const F16& a) {
  return Fold16(a, [](auto x, auto y) HWY_ATTR { return hn::Add(x, y); });
}
HWY_INLINE float Max16(const F16& a) {
  return Fold16(a, [](auto x, auto y) HWY_ATTR { return hn::Max(x, y); });
}

// exp(x), relative error below 2e-7; exactly 1 at 0; 0 below -87.33 and
// exp(88) above 88. x = n ln 2 + r, |r| <= ln 2 / 2, polynomial in r, then n
// is added to the exponent.
HWY_INLINE Vec ExpVec(Vec x) {
  const F32 d;
  const auto tiny = hn::Lt(x, hn::Set(d, -87.33f));
  x = hn::Min(hn::Max(x, hn::Set(d, -87.33f)), hn::Set(d, 88.0f));
  // Rounds to an integer, which then stands in the lowest bits.
  const Vec magic = hn::Set(d, 12582912.0f);  // 1.5 * 2^23
  const Vec shifted = hn::Add(hn::Mul(x, hn::Set(d, 1.44269504f)), magic);
  const Vec n = hn::Sub(shifted, magic);
  Vec r = hn::MulAdd(n, hn::Set(d, -0.693359375f), x);
  r = hn::MulAdd(n, hn::Set(d, 2.12194440e-4f), r);
  Vec p = hn::Set(d, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  p = hn::MulAdd(p, hn::Mul(r, r), r);
  p = hn::Add(p, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(
      hn::Add(hn::BitCast(I32(), shifted), hn::Set(I32(), 127)));
  return hn::IfThenZeroElse(tiny, hn::Mul(p, hn::BitCast(d, exponent)));
}
HWY_INLINE F16 Exp(const F16& a) {
  F16 r;
  TANDEM_PARTS(i) r.v[i] = ExpVec(a.v[i]);
  return r;
}
// cap * tanh(x / cap), by tanh(y) = 1 - 2 / (1 + exp(2 y)): off by at most
// 2e-7 of the cap.
HWY_INLINE F16 SoftCap(const F16& x, float cap) {
  const F16 two = Set16(2.0f);
  const F16 e = Exp(Mul(x, Set16(2.0f / cap)));
  return Mul(Sub(Set16(1.0f), Div(two, Add(Set16(1.0f), e))), Set16(cap));
}
HWY_INLINE float Exp1(float x) {
  return hn::GetLane(ExpVec(hn::Set(F32(), x)));
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
