// SPDX-License-Identifier: Apache-2.0
// The inner loop of matrix products and of both products in attention: R rows
// of activations against U units of 16 outputs, each output one chain of
// fused multiply-adds over its inputs in ascending order. Accumulators come
// in and go out, so a chain may be cut anywhere without changing a bit.

#if defined(TANDEM_KERNELS_CPU_CHAINS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_CHAINS_INL_H_
#undef TANDEM_KERNELS_CPU_CHAINS_INL_H_
#else
#define TANDEM_KERNELS_CPU_CHAINS_INL_H_
#endif

#include <type_traits>

#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// Accumulators are at most 24 registers with AVX-512 and 12 with AVX2, which
// leaves room for weights, a broadcast and the mask.
inline constexpr int kMaxRows = kParts == 1 ? 12 : 6;
// Without a mask: weights that are f32 already.
inline constexpr int kMaxWideRows = kParts == 1 ? 14 : 6;

// Units that go with R rows: as many as the registers hold, at most eight.
constexpr int UnitsFor(int rows) {
  if (kParts == 1) return rows <= 3 ? 8 : rows <= 6 ? 4 : 2;
  return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

// Never faults, so it may point beyond the end.
HWY_INLINE void PrefetchLine(const std::byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

// To the second-level cache, for what is needed later.
HWY_INLINE void PrefetchFar(const std::byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

// The line `offset` behind each pointer, to the second-level cache if `far`.
template <int N>
HWY_INLINE void PrefetchLines(const std::byte* const (&at)[N], int64_t offset,
                              bool far) {
  if (far) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) PrefetchFar(at[i] + offset);
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) PrefetchLine(at[i] + offset);
  }
}

// Stops the compiler from keeping one more pointer per unit, for which there
// are too few registers.
HWY_INLINE void KeepIndex(int64_t& index) { asm("" : "+r"(index)); }

// chain + x * weight. With AVX2 every register is taken: compilers that choose
// among the forms of the instruction move chains about, and one that ends up in
// memory takes as long as all others together.
HWY_INLINE void Extend(Vec& chain, Vec x, Vec weight) {
#if HWY_TARGET == HWY_AVX2
  // A variable of its own, or compilers keep all chains in memory.
  auto sum = chain.raw;
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x.raw), "x"(weight.raw));
  chain = Vec{sum};
#else
  chain = hn::MulAdd(x, weight, chain);
#endif
}

struct Bf16Weights {};
struct F32Weights {};
// Both inputs and weights are bf16, and chains go from pair to pair, of each
// the odd input first. Either inputs lie in pairs, as weights do; or widened,
// each pair's odd one in front of its even one. Pairs of inputs are whole, with
// zero behind the last one; what lies there of the weights is not read.
struct Bf16Pairs {};
struct Bf16OddFirst {};
// Groups of inputs instead, of each a chain over the even ones and one over the
// odd ones (matmul_tiles.cc); inputs lie widened, as they come.
struct Bf16Groups {};
// Inputs lie in words of 4 bytes: each in its own, or two in one.
template <typename W>
inline constexpr int kWordInputs = std::is_same_v<W, Bf16Pairs> ? 2 : 1;
template <typename W>
inline constexpr bool kRoundsInputs =
    std::is_same_v<W, Bf16Pairs> || std::is_same_v<W, Bf16OddFirst> ||
    std::is_same_v<W, Bf16Groups>;

// What Advance fetches at each step of two inputs, whose units lie at
// unit[u] + offset.
struct NoPrefetch {
  template <int U>
  HWY_INLINE void Step(const std::byte* const (&)[U], int64_t) {}
};

template <int R, int U>
struct Chains {
  Vec v[R][U * kParts];

  HWY_INLINE void Clear() {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < U * kParts; ++i) v[r][i] = hn::Zero(F32());
    }
  }
  HWY_INLINE void Load(const float* from, int64_t stride) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < U * kParts; ++i) {
        v[r][i] = hn::LoadU(F32(), from + r * stride + i * kLanes);
      }
    }
  }
  HWY_INLINE void Store(float* to, int64_t stride) const {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < U * kParts; ++i) {
        hn::StoreU(v[r][i], F32(), to + r * stride + i * kLanes);
      }
    }
  }
};

HWY_INLINE hn::Vec<U32> LoadPairs(const std::byte* unit, int part) {
  return hn::LoadU(U32(),
                   reinterpret_cast<const uint32_t*>(unit) + part * kLanes);
}

// A pair's weights in the order of W's inputs: half 0, then 1.
template <typename W>
HWY_INLINE Vec HalfOf(hn::Vec<U32> pairs, int half) {
  const bool even = (half == 0) != std::is_same_v<W, Bf16OddFirst>;
  return hn::BitCast(F32(), even ? hn::ShiftLeft<16>(pairs)
                                 : hn::And(pairs, hn::Set(U32(), 0xffff0000u)));
}

// The next input of all units.
template <int R, int U>
HWY_INLINE void StepWeights(Chains<R, U>& chains, const float* a,
                            int64_t a_stride,
                            const Vec (&weights)[U * kParts]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Vec x = hn::Set(F32(), a[r * a_stride]);
#pragma GCC unroll 8
    for (int i = 0; i < U * kParts; ++i) {
      Extend(chains.v[r][i], x, weights[i]);
    }
  }
}

// One input of all units, at unit[u] + offset.
template <int R, int U>
HWY_INLINE void StepInput(Chains<R, U>& chains, const float* a,
                          int64_t a_stride, const std::byte* const (&unit)[U],
                          int64_t offset) {
  Vec weights[U * kParts];
#pragma GCC unroll 8
  for (int i = 0; i < U * kParts; ++i) {
    weights[i] = hn::LoadU(
        F32(), reinterpret_cast<const float*>(unit[i / kParts] + offset) +
                   (i % kParts) * kLanes);
  }
  StepWeights<R, U>(chains, a, a_stride, weights);
}

// One unit's 16 pairs at `w`.
template <typename W, int R, int U>
HWY_INLINE void StepPair(Chains<R, U>& chains, int unit, const float* a,
                         int64_t a_stride, const std::byte* w) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    // Broadcasts are made anew for each unit, or they take the chains' place.
    if constexpr (kParts == 2) asm volatile("" : "+r"(a));
    Vec weights[kParts];
    TANDEM_PARTS(i) { weights[i] = HalfOf<W>(LoadPairs(w, i), half); }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec x = hn::Set(F32(), a[r * a_stride + half]);
      TANDEM_PARTS(i) { Extend(chains.v[r][unit * kParts + i], x, weights[i]); }
    }
  }
}

// Both units of a panel: a broadcast serves two products.
template <typename W, int R, int U>
HWY_INLINE void StepPair2(Chains<R, U>& chains, const float* a,
                          int64_t a_stride, const std::byte* w0,
                          const std::byte* w1) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    Vec weights[2 * kParts];
#pragma GCC unroll 4
    for (int i = 0; i < 2 * kParts; ++i) {
      weights[i] = HalfOf<W>(LoadPairs(i < kParts ? w0 : w1, i % kParts), half);
    }
    StepWeights<R, U>(chains, a + half, a_stride, weights);
  }
}

// ---- Two inputs of all units, whose weights lie at unit[u] + offset.
template <int R, int U>
HWY_INLINE void StepTwo(F32Weights, Chains<R, U>& chains, const float* a,
                        int64_t a_stride, const std::byte* const (&unit)[U],
                        int64_t offset, int64_t w_stride) {
  StepInput<R, U>(chains, a, a_stride, unit, offset);
  StepInput<R, U>(chains, a + 1, a_stride, unit, offset + w_stride);
}
template <int R, int U, typename W>
HWY_INLINE void StepTwo(W, Chains<R, U>& chains, const float* a,
                        int64_t a_stride, const std::byte* const (&unit)[U],
                        int64_t offset, int64_t) {
  // Where four weights fit beside the chains.
  if constexpr (U == 2 && (kParts == 1 || R < 3)) {
    StepPair2<W, R, U>(chains, a, a_stride, unit[0] + offset, unit[1] + offset);
  } else {
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      StepPair<W, R, U>(chains, u, a, a_stride, unit[u] + offset);
    }
  }
}

// ---- An input whose pair has no second.
template <int R, int U>
HWY_INLINE void StepLast(F32Weights, Chains<R, U>& chains, const float* a,
                         int64_t a_stride, const std::byte* const (&unit)[U],
                         int64_t offset) {
  StepInput<R, U>(chains, a, a_stride, unit, offset);
}
template <int R, int U, typename W>
HWY_INLINE void StepLast(W, Chains<R, U>& chains, const float* a,
                         int64_t a_stride, const std::byte* const (&unit)[U],
                         int64_t offset) {
  constexpr int kEven = std::is_same_v<W, Bf16OddFirst> ? 1 : 0;
  Vec weights[U * kParts];
#pragma GCC unroll 8
  for (int i = 0; i < U * kParts; ++i) {
    // Adding the odd one's zero makes -0 what it is where both are one step.
    weights[i] = hn::Zero(F32());
  }
  if (kEven == 1) StepWeights<R, U>(chains, a, a_stride, weights);
#pragma GCC unroll 8
  for (int i = 0; i < U * kParts; ++i) {
    weights[i] =
        HalfOf<W>(LoadPairs(unit[i / kParts] + offset, i % kParts), kEven);
  }
  StepWeights<R, U>(chains, a + kEven, a_stride, weights);
}

#if HWY_TARGET == HWY_AVX3
template <int R, int U>
HWY_INLINE void StepWords(Chains<R, U>& chains, const float* a,
                          int64_t a_stride, const hn::Vec<U32> (&weights)[U]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Vec x = hn::Set(F32(), a[r * a_stride]);
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      // A variable of its own, or compilers keep all chains in memory.
      auto chain = chains.v[r][u].raw;
      asm("vdpbf16ps %2, %1, %0"
          : "+v"(chain)
          : "v"(weights[u].raw), "v"(x.raw));
      chains.v[r][u] = Vec{chain};
    }
  }
}
template <int R, int U>
HWY_INLINE void StepTwo(Bf16Pairs, Chains<R, U>& chains, const float* a,
                        int64_t a_stride, const std::byte* const (&unit)[U],
                        int64_t offset, int64_t) {
  hn::Vec<U32> weights[U];
#pragma GCC unroll 8
  for (int u = 0; u < U; ++u) weights[u] = LoadPairs(unit[u] + offset, 0);
  StepWords<R, U>(chains, a, a_stride, weights);
}
template <int R, int U>
HWY_INLINE void StepLast(Bf16Pairs, Chains<R, U>& chains, const float* a,
                         int64_t a_stride, const std::byte* const (&unit)[U],
                         int64_t offset) {
  hn::Vec<U32> weights[U];
#pragma GCC unroll 8
  for (int u = 0; u < U; ++u) {
    weights[u] =
        hn::And(LoadPairs(unit[u] + offset, 0), hn::Set(U32(), 0xffff));
  }
  StepWords<R, U>(chains, a, a_stride, weights);
}
#endif

// Chains go on over `inputs`, an even number. Weights of unit u lie at w[u] + k
// * w_stride bytes for input k, or for pair k. Two inputs a turn: of f32 91 %
// of the FMA peak, against 84 % with one or with four.
template <typename W, int R, int U, typename Prefetch>
HWY_INLINE void AdvanceEven(Chains<R, U>& chains, const float* a,
                            int64_t a_stride, const std::byte* const* w,
                            int64_t w_stride, int inputs, Prefetch prefetch) {
  const int64_t step = std::is_same_v<W, F32Weights> ? 2 * w_stride : w_stride;
  const std::byte* unit[U];
#pragma GCC unroll 8
  for (int u = 0; u < U; ++u) unit[u] = w[u];
  int64_t offset = 0;
  for (int k = 0; k < inputs; k += 2, offset += step, a += 2 / kWordInputs<W>) {
    prefetch.Step(unit, offset);
    StepTwo<R, U>(W(), chains, a, a_stride, unit, offset, w_stride);
  }
}

// The same over any number. Where chains are kept over several calls use the
// one above, or the code behind the loop takes their registers.
template <typename W, int R, int U, typename Prefetch>
HWY_INLINE void Advance(Chains<R, U>& chains, const float* a, int64_t a_stride,
                        const std::byte* const* w, int64_t w_stride, int inputs,
                        Prefetch prefetch) {
  const int even = inputs / 2 * 2;
  AdvanceEven<W>(chains, a, a_stride, w, w_stride, even, prefetch);
  if (even == inputs) return;
  const std::byte* unit[U];
#pragma GCC unroll 8
  for (int u = 0; u < U; ++u) unit[u] = w[u];
  StepLast<R, U>(W(), chains, a + even / kWordInputs<W>, a_stride, unit,
                 (std::is_same_v<W, F32Weights> ? even : even / 2) * w_stride);
}

// ---- Groups (Bf16Groups): both chains of each output, and their sum.
template <int R, int U>
struct GroupChains {
  Chains<R, U> even;
  Chains<R, U> odd;

  HWY_INLINE void Clear() {
    even.Clear();
    odd.Clear();
  }
  HWY_INLINE void AddTo(Chains<R, U>& sums) const {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < U * kParts; ++i) {
        sums.v[r][i] =
            hn::Add(sums.v[r][i], hn::Add(even.v[r][i], odd.v[r][i]));
      }
    }
  }
};

// One input of a pair of each unit, at unit[u] + offset.
template <int R, int U>
HWY_INLINE void StepHalf(Chains<R, U>& chains, int half, const float* a,
                         int64_t a_stride, const std::byte* const (&unit)[U],
                         int64_t offset) {
  Vec weights[U * kParts];
#pragma GCC unroll 8
  for (int i = 0; i < U * kParts; ++i) {
    weights[i] = HalfOf<Bf16Groups>(
        LoadPairs(unit[i / kParts] + offset, i % kParts), half);
  }
  StepWeights<R, U>(chains, a, a_stride, weights);
}

// A group goes on by inputs [begin, end), whose first pair's weights lie at
// unit[u] and the next ones' w_stride bytes further; a is the first input. Each
// unit's lines are fetched `ahead` bytes ahead, of 0 not at all.
template <int R, int U, int ahead = 0>
HWY_INLINE void AdvanceGroup(GroupChains<R, U>& chains, const float* a,
                             int64_t a_stride,
                             const std::byte* const (&unit)[U],
                             int64_t w_stride, int begin, int end) {
  int64_t offset = 0;
  if (begin % 2 != 0) {
    StepHalf<R, U>(chains.odd, 1, a++, a_stride, unit, offset);
    offset += w_stride;
    ++begin;
  }
  for (; begin + 2 <= end; begin += 2, offset += w_stride, a += 2) {
    if constexpr (ahead > 0) PrefetchLines(unit, offset + ahead, false);
    StepHalf<R, U>(chains.even, 0, a, a_stride, unit, offset);
    StepHalf<R, U>(chains.odd, 1, a + 1, a_stride, unit, offset);
  }
  if (begin < end) StepHalf<R, U>(chains.even, 0, a, a_stride, unit, offset);
}

// As AdvanceEven of both units of a panel, whose weights it also leaves widened
// at `wide` [inputs][32], in the order in which W's rows have them.
template <typename W, int R, typename Prefetch>
HWY_INLINE void AdvanceWidening(Chains<R, 2>& chains, const float* a,
                                int64_t a_stride, const std::byte* const* w,
                                int inputs, Prefetch prefetch, float* wide) {
  const std::byte* const unit[2] = {w[0], w[1]};
  int64_t offset = 0;
  for (int k = 0; k < inputs; k += 2, offset += 2 * 64, a += 2) {
    prefetch.Step(unit, offset);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half, wide += 2 * 16) {
      Vec weights[2 * kParts];
#pragma GCC unroll 4
      for (int i = 0; i < 2 * kParts; ++i) {
        weights[i] =
            HalfOf<W>(LoadPairs(unit[i / kParts] + offset, i % kParts), half);
        hn::StoreU(weights[i], F32(), wide + i * kLanes);
      }
      StepWeights<R, 2>(chains, a + half, a_stride, weights);
    }
  }
}

// A quantised cache's codes (kernels/quantise.h), a byte for each lane, of int4
// for two; what is multiplied is code times scale, rounded to f32.
struct Fp8Codes {};
struct Int4Codes {};
template <typename W>
inline constexpr bool kIsInt4 = std::is_same_v<W, Int4Codes>;
template <typename W>
inline constexpr bool kIsCodes = std::is_same_v<W, Fp8Codes> || kIsInt4<W>;

// Times 2^-8: sign, exponent and fraction are where f16 has them, whose
// exponent is biased by 15 instead of 7, also of numbers below the smallest
// exponent.
HWY_INLINE Vec WidenFp8(const std::byte* codes) {
  const hn::Rebind<int16_t, F32> d16;
  const auto words =
      hn::PromoteTo(d16, hn::LoadU(hn::Rebind<int8_t, F32>(),
                                   reinterpret_cast<const int8_t*>(codes)));
  const auto halves = hn::And(hn::ShiftLeft<7>(words),
                              hn::Set(d16, static_cast<int16_t>(0xbfff)));
#if HWY_TARGET == HWY_AVX3
  return Vec{_mm512_cvtph_ps(halves.raw)};
#else
  return Vec{_mm256_cvtph_ps(halves.raw)};
#endif
}

// Keys are lanes: unit u's 16 scales at scale[u], the same for every input.
struct ScaledLanes {
  const float* scale[8];
  HWY_INLINE Vec operator()(int unit, int part, int) const {
    return hn::LoadU(F32(), scale[unit] + part * kLanes);
  }
};
// Keys are inputs: input k's scale at scale[k], the same for every lane.
struct ScaledInputs {
  const float* scale;
  HWY_INLINE Vec operator()(int, int, int k) const {
    return hn::Set(F32(), scale[k]);
  }
};

// Codes of unit u at w[u] + k * w_stride bytes for input k.
template <int R, int U, typename Scales>
HWY_INLINE void AdvanceFp8(const Scales& scales, Chains<R, U>& chains,
                           const float* a, int64_t a_stride,
                           const std::byte* const* w, int64_t w_stride,
                           int inputs) {
  const Vec unit = hn::Set(F32(), 0x1p8f);
  int64_t offset = 0;
  for (int k = 0; k < inputs; ++k, offset += w_stride, ++a) {
    Vec weights[U * kParts];
#pragma GCC unroll 8
    for (int i = 0; i < U * kParts; ++i) {
      weights[i] =
          hn::Mul(WidenFp8(w[i / kParts] + offset + (i % kParts) * kLanes),
                  hn::Mul(scales(i / kParts, i % kParts, k), unit));
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec x = hn::Set(F32(), a[r * a_stride]);
#pragma GCC unroll 8
      for (int i = 0; i < U * kParts; ++i) {
        Extend(chains.v[r][i], x, weights[i]);
      }
    }
  }
}

// ---- int4: codes are the low halves of bytes in 32-bit lanes, whatever is
// above them. With AVX-512 they are looked up, which takes one instruction.
using Bytes = hn::Vec<U32>;
HWY_INLINE Bytes LoadBytes(const std::byte* p) {
  return hn::PromoteTo(U32(), hn::LoadU(hn::Rebind<uint8_t, F32>(),
                                        reinterpret_cast<const uint8_t*>(p)));
}
#if HWY_TARGET == HWY_AVX3
HWY_INLINE Vec Int4Numbers() {
  alignas(64) static constexpr float kNumbers[16] = {
      0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
  return hn::Load(F32(), kNumbers);
}
HWY_INLINE Vec LookUp(Bytes codes, Vec numbers) {
  return Vec{_mm512_permutexvar_ps(codes.raw, numbers.raw)};
}
// Codes times the scales of their lanes.
HWY_INLINE Vec TimesLanes(Bytes codes, Vec scales) {
  return hn::Mul(LookUp(codes, Int4Numbers()), scales);
}
// Codes times one scale.
struct TimesOne {
  Vec products;
  explicit HWY_INLINE TimesOne(float scale)
      : products(hn::Mul(Int4Numbers(), hn::Set(F32(), scale))) {}
  HWY_INLINE Vec operator()(Bytes codes) const {
    return LookUp(codes, products);
  }
};
#else
HWY_INLINE Vec TimesLanes(Bytes codes, Vec scales) {
  const auto signs = hn::BitCast(I32(), hn::ShiftLeft<28>(codes));
  return hn::Mul(hn::ConvertTo(F32(), hn::ShiftRight<28>(signs)), scales);
}
struct TimesOne {
  Vec scale;
  explicit HWY_INLINE TimesOne(float value) : scale(hn::Set(F32(), value)) {}
  HWY_INLINE Vec operator()(Bytes codes) const {
    return TimesLanes(codes, scale);
  }
};
#endif

// Lanes are keys, and a byte has two inputs: those of unit u at w[u] + k / 2 *
// w_stride for input k. `inputs` is even.
template <int R, int U>
HWY_INLINE void AdvanceInt4Keys(const ScaledLanes& scales, Chains<R, U>& chains,
                                const float* a, int64_t a_stride,
                                const std::byte* const* w, int64_t w_stride,
                                int inputs) {
  int64_t offset = 0;
  for (int k = 0; k < inputs; k += 2, offset += w_stride, a += 2) {
    Bytes bytes[U * kParts];
    Vec weights[U * kParts];
#pragma GCC unroll 8
    for (int i = 0; i < U * kParts; ++i) {
      bytes[i] = LoadBytes(w[i / kParts] + offset + (i % kParts) * kLanes);
      weights[i] = TimesLanes(bytes[i], scales(i / kParts, i % kParts, k));
    }
    StepWeights<R, U>(chains, a, a_stride, weights);
#pragma GCC unroll 8
    for (int i = 0; i < U * kParts; ++i) {
      weights[i] = TimesLanes(hn::ShiftRight<4>(bytes[i]),
                              scales(i / kParts, i % kParts, k));
    }
    StepWeights<R, U>(chains, a + 1, a_stride, weights);
  }
}

// Inputs are keys, and a byte has a lane of two units: those of units 2p and
// 2p + 1 at w[p] + k * w_stride for input k, whose scale is scale[p][k]. Of one
// unit alone `high` says which half.
template <int R, int U>
HWY_INLINE void AdvanceInt4Values(const float* const* scale, bool high,
                                  Chains<R, U>& chains, const float* a,
                                  int64_t a_stride, const std::byte* const* w,
                                  int64_t w_stride, int inputs) {
  static_assert(U == 1 || U % 2 == 0);
  int64_t offset = 0;
  for (int k = 0; k < inputs; ++k, offset += w_stride, ++a) {
    Vec weights[U * kParts];
#pragma GCC unroll 4
    for (int p = 0; p < (U + 1) / 2; ++p) {
      const TimesOne scaled(scale[p][k]);
      TANDEM_PARTS(i) {
        const Bytes bytes = LoadBytes(w[p] + offset + i * kLanes);
        if constexpr (U == 1) {
          weights[i] = scaled(hn::ShiftRightSame(bytes, high ? 4 : 0));
        } else {
          weights[2 * p * kParts + i] = scaled(bytes);
          weights[(2 * p + 1) * kParts + i] = scaled(hn::ShiftRight<4>(bytes));
        }
      }
    }
    StepWeights<R, U>(chains, a, a_stride, weights);
  }
}

// 16 bf16 as f32.
HWY_INLINE void WidenScales(const uint16_t* from, float* to) {
  TANDEM_PARTS(i) {
    const auto bits = hn::PromoteTo(
        U32(), hn::LoadU(hn::Rebind<uint16_t, F32>(), from + i * kLanes));
    hn::StoreU(hn::BitCast(F32(), hn::ShiftLeft<16>(bits)), F32(),
               to + i * kLanes);
  }
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
