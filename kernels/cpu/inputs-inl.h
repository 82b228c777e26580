// SPDX-License-Identifier: Apache-2.0
// Inputs of chains as their weights want them: as they are, or rounded to bf16
// (chains-inl.h).

#if defined(TANDEM_KERNELS_CPU_INPUTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_INPUTS_INL_H_
#undef TANDEM_KERNELS_CPU_INPUTS_INL_H_
#else
#define TANDEM_KERNELS_CPU_INPUTS_INL_H_
#endif

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/chains-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// Rounded to bf16, which the upper halves are then.
HWY_INLINE hn::Vec<U32> RoundToBf16(Vec x) {
  const U32 d;
  const auto bits = hn::BitCast(d, x);
  const auto even = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1));
  const auto rounded = hn::Add(bits, hn::Add(even, hn::Set(d, 0x7fff)));
  const auto quiet = hn::Or(bits, hn::Set(d, 0x400000));
  const auto nan = hn::RebindMask(d, hn::IsNaN(x));
  return hn::And(hn::IfThenElse(nan, quiet, rounded), hn::Set(d, 0xffff0000u));
}

// The words of a vector of inputs.
template <typename W>
using WordsTag = std::conditional_t<kWordInputs<W> == 2, hn::Half<F32>, F32>;
template <typename W>
HWY_INLINE hn::Vec<WordsTag<W>> WordsOf(Vec inputs) {
  const auto rounded = RoundToBf16(inputs);
  if constexpr (std::is_same_v<W, Bf16Groups>) {
    // As vcvtne2ps2bf16 does: denormals are zeros before they are rounded.
    const auto tiny = hn::RebindMask(
        U32(), hn::Lt(hn::Abs(inputs), hn::Set(F32(), 0x1p-126f)));
    const auto sign =
        hn::And(hn::BitCast(U32(), inputs), hn::Set(U32(), 0x80000000u));
    return hn::BitCast(F32(), hn::IfThenElse(tiny, sign, rounded));
  } else if constexpr (kWordInputs<W> == 1) {
    return hn::BitCast(F32(), hn::Shuffle2301(rounded));
  } else {
    const hn::RepartitionToWide<U32> d;
    const auto both = hn::BitCast(d, rounded);
    const auto words =
        hn::Or(hn::ShiftRight<16>(both), hn::ShiftRight<32>(both));
    return hn::BitCast(WordsTag<W>(), hn::TruncateTo(hn::Half<U32>(), words));
  }
}

// `to` may be `from`, or lie before it.
template <typename W>
void CopyInputs(const float* from, int inputs, float* to) {
  if constexpr (!kRoundsInputs<W>) {
    std::memmove(to, from, static_cast<size_t>(inputs) * sizeof(float));
  } else {
    constexpr int kWords = kLanes / kWordInputs<W>;
    for (; inputs > kLanes; inputs -= kLanes) {
      hn::StoreU(WordsOf<W>(hn::LoadU(F32(), from)), WordsTag<W>(), to);
      from += kLanes;
      to += kWords;
    }
    const auto count = static_cast<size_t>(inputs);
    const Vec last = hn::MaskedLoad(hn::FirstN(F32(), count), F32(), from);
    const WordsTag<W> d;
    const size_t words = (count + 1) / 2 * 2 / kWordInputs<W>;
    hn::BlendedStore(WordsOf<W>(last), hn::FirstN(d, words), d, to);
  }
}

// The odd one of a pair's inputs, which lie at `pair`.
template <typename W>
HWY_INLINE float OddInput(const float* pair) {
  if constexpr (kWordInputs<W> == 1) {
    return std::is_same_v<W, Bf16OddFirst> ? pair[0] : pair[1];
  } else {
    return std::bit_cast<float>(std::bit_cast<uint32_t>(*pair) & 0xffff0000u);
  }
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
