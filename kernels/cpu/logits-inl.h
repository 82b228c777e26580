// SPDX-License-Identifier: Apache-2.0
// One row of logits, as draws and log probabilities look at it: in groups of
// 64, whose greatest logits tell which of them have nothing that matters.

#if defined(TANDEM_KERNELS_CPU_LOGITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_LOGITS_INL_H_
#undef TANDEM_KERNELS_CPU_LOGITS_INL_H_
#else
#define TANDEM_KERNELS_CPU_LOGITS_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/simd-inl.h"
#include "kernels/sampling.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// Ids whose random bits are made together (kernels/sampling.h).
inline constexpr int kGroup = 64;
inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Candidate {
  float logit;
  int32_t id;
};

// The order that everything here means by "first".
inline bool Before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

HWY_INLINE F16 LoadUpTo16(const float* p, int count) {
  return count >= 16 ? Load16(p) : LoadFirst16(p, count);
}

// -inf where all are NaNs.
inline float MaxLogit(const float* logits, int count) {
  F16 most = Set16(kMinusInfinity);
  int i = 0;
  // In this order: where either is a NaN the instruction takes the second.
  for (; i + 16 <= count; i += 16) most = Max(Load16(logits + i), most);
  float r = Max16(most);
  for (; i < count; ++i) r = logits[i] > r ? logits[i] : r;
  return r;
}

// y and exp(-y) of one group, as step 4 says.
struct Weights {
  alignas(64) float y[kGroup];
  alignas(64) float w[kGroup];

  HWY_INLINE void Of(const float* logits, int count, float best,
                     float temperature) {
    const F16 top = Set16(best);
    const F16 divisor = Set16(temperature);
    const F16 zero = Set16(0.0f);
    for (int i = 0; i < count; i += 16) {
      const F16 distance =
          Div(Sub(top, LoadUpTo16(logits + i, count - i)), divisor);
      Store16(distance, y + i);
      Store16(Exp(Sub(zero, distance)), w + i);
    }
  }
};

HWY_INLINE uint64_t Integer(float weight) {
  return static_cast<uint64_t>(
      static_cast<int64_t>(weight * static_cast<float>(kSampleWeightOne)));
}

// A row of logits, and after FindBest() what is known of it.
struct Row {
  const float* logits;
  int size;
  float best;
  float temperature;
  float most[kMaxVocab / kGroup];  // of each group of ids

  int groups() const { return (size + kGroup - 1) / kGroup; }

  void FindBest() {
    best = kMinusInfinity;
    for (int group = 0; group < groups(); ++group) {
      const int begin = group * kGroup;
      most[group] = MaxLogit(logits + begin, std::min(kGroup, size - begin));
      best = std::max(best, most[group]);
    }
  }

  int First() const {
    for (int group = 0; group < groups(); ++group) {
      if (most[group] != best) continue;
      for (int i = group * kGroup;; ++i) {
        if (logits[i] == best) return i;
      }
    }
    return 0;  // only NaN everywhere comes here
  }

  // Calls each(id, y, exp(-y)) for all logits of [low, high].
  template <typename Each>
  HWY_INLINE void ForEachOf(float low, float high, const Each& each) const {
    Weights weights;
    for (int group = 0; group < groups(); ++group) {
      if (most[group] < low) continue;
      const int begin = group * kGroup;
      const int count = std::min(kGroup, size - begin);
      uint64_t members = Members(logits + begin, count, low, high);
      if (members == 0) continue;
      weights.Of(logits + begin, count, best, temperature);
      for (; members != 0; members &= members - 1) {
        const int i = std::countr_zero(members);
        each(begin + i, weights.y[i], weights.w[i]);
      }
    }
  }
  template <typename Each>
  HWY_INLINE void ForEachFrom(float low, const Each& each) const {
    ForEachOf(low, best, each);
  }

  // All integer weights together. Floats are whole numbers from 2^24 on, so
  // both halves of a weight are exact.
  uint64_t SumOfWeights() const {
    const F32 d;
    Weights weights;
    uint64_t sum = 0;
    for (int begin = 0; begin < size; begin += kGroup) {
      const int count = std::min(kGroup, size - begin);
      weights.Of(logits + begin, count, best, temperature);
      if (count < kGroup) {
        for (int i = 0; i < count; ++i) sum += Integer(weights.w[i]);
        continue;
      }
      auto high = hn::Zero(I32());
      auto low = hn::Zero(I32());
      for (int i = 0; i < kGroup; i += kLanes) {
        const auto weight = hn::Floor(
            hn::Mul(hn::Load(d, weights.w + i),
                    hn::Set(d, static_cast<float>(kSampleWeightOne))));
        const auto upper =
            hn::Floor(hn::Mul(weight, hn::Set(d, 1.0f / 1048576.0f)));
        const auto lower = hn::NegMulAdd(upper, hn::Set(d, 1048576.0f), weight);
        high = hn::Add(high, hn::ConvertTo(I32(), upper));
        low = hn::Add(low, hn::ConvertTo(I32(), lower));
      }
      sum += static_cast<uint64_t>(hn::GetLane(hn::SumOfLanes(I32(), high)))
             << 20;
      sum += static_cast<uint64_t>(hn::GetLane(hn::SumOfLanes(I32(), low)));
    }
    return sum;
  }

  // A logit from which on there are at least `ids`: the least of the greatest
  // ones of as many groups.
  float BoundOf(int ids) {
    if (ids >= groups()) return kMinusInfinity;
    std::copy(most, most + groups(), ranked_);
    float* const last = ranked_ + ids - 1;
    std::nth_element(ranked_, last, ranked_ + groups(), std::greater<float>());
    return *last;
  }

  // How many ids are before one of the row.
  int CountBefore(const Candidate& one) const {
    const F32 d;
    const Vec logit = hn::Set(d, one.logit);
    size_t before = 0;
    int i = 0;
    for (; i + kLanes <= one.id; i += kLanes) {
      before += hn::CountTrue(d, hn::Ge(hn::LoadU(d, logits + i), logit));
    }
    for (; i <= one.id; ++i) before += Before({logits[i], i}, one) ? 1 : 0;
    for (; i + kLanes <= size; i += kLanes) {
      before += hn::CountTrue(d, hn::Gt(hn::LoadU(d, logits + i), logit));
    }
    for (; i < size; ++i) before += logits[i] > one.logit ? 1 : 0;
    return static_cast<int>(before);
  }

  // Logits of all that are nearer to the best one than y, and of all that are
  // farther, whatever was rounded; up to a few others.
  float LowestBefore(double y) const {
    return std::nextafter(static_cast<float>(At(y * (1 + 1e-6))),
                          kMinusInfinity);
  }
  float HighestFrom(double y) const {
    return std::nextafter(static_cast<float>(At(y * (1 - 1e-6))),
                          -kMinusInfinity);
  }

 private:
  double At(double y) const {
    return static_cast<double>(best) - static_cast<double>(temperature) * y;
  }

  // Which of `count` logits, at most a group, are in [low, high].
  static HWY_INLINE uint64_t Members(const float* logits, int count, float low,
                                     float high) {
    const F32 d;
    uint64_t members = 0;
    for (int i = 0; i < count; i += 16) {
      const F16 x = LoadUpTo16(logits + i, count - i);
      TANDEM_PARTS(part) {
        uint8_t bits[8] = {};
        hn::StoreMaskBits(d,
                          hn::And(hn::Ge(x.v[part], hn::Set(d, low)),
                                  hn::Le(x.v[part], hn::Set(d, high))),
                          bits);
        uint64_t own;
        std::memcpy(&own, bits, sizeof(own));
        members |= own << (i + part * kLanes);
      }
    }
    return count < kGroup ? members & ((uint64_t{1} << count) - 1) : members;
  }

  float ranked_[kMaxVocab / kGroup];  // BoundOf's
};

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
