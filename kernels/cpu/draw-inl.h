// SPDX-License-Identifier: Apache-2.0
// Draws one token from one row of logits, as kernels/sampling.h says from step
// 2 on. The vocabulary is never sorted: ids fall into buckets by how much less
// likely they are than the best one, integer weights are summed per bucket, and
// only a bucket that a limit (top-k, top-p, min-p) falls into is sorted.

#if defined(TANDEM_KERNELS_CPU_DRAW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_DRAW_INL_H_
#undef TANDEM_KERNELS_CPU_DRAW_INL_H_
#else
#define TANDEM_KERNELS_CPU_DRAW_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/logits-inl.h"
#include "kernels/sampling.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// Weights reach zero at exp(-27.73) = 2^-40; a 64th of a nat per bucket.
inline constexpr float kBucketsPerNat = 64.0f;
inline constexpr int kBuckets = 28 * 64;
HWY_INLINE int BucketOf(float y) {
  const float scaled = y * kBucketsPerNat;
  return scaled < static_cast<float>(kBuckets - 1) ? static_cast<int>(scaled)
                                                   : kBuckets - 1;
}

// Step 9's random bits R of a group of ids, and nearly 1 - R / 2^32, than which
// Exponential(R) is not smaller by more than rounding.
struct Noise {
  alignas(64) uint32_t bits[kGroup];
  alignas(64) float least[kGroup];

  HWY_INLINE void Of(const SampleParams& params, int group) {
    const U32 d;
    using Words = hn::Vec<U32>;
    for (int part = 0; part < 16; part += kLanes) {
      Words counter[4] = {hn::Set(d, static_cast<uint32_t>(params.position)),
                          hn::Set(d, params.sequence_index),
                          hn::Iota(d, static_cast<uint32_t>(group * 16 + part)),
                          hn::Set(d, kPurposeSample)};
      uint32_t key0 = static_cast<uint32_t>(params.seed);
      uint32_t key1 = static_cast<uint32_t>(params.seed >> 32);
      for (int round = 0; round < 10; ++round) {
        Words high0, low0, high1, low1;
        Multiply(counter[0], 0xD2511F53u, high0, low0);
        Multiply(counter[2], 0xCD9E8D57u, high1, low1);
        counter[0] = hn::Xor(hn::Xor(high1, counter[1]), hn::Set(d, key0));
        counter[1] = low1;
        counter[2] = hn::Xor(hn::Xor(high0, counter[3]), hn::Set(d, key1));
        counter[3] = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
      }
      for (int word = 0; word < 4; ++word) {
        const int at = word * 16 + part;
        hn::Store(counter[word], d, bits + at);
        const auto rest =
            hn::BitCast(I32(), hn::ShiftRight<1>(hn::Not(counter[word])));
        hn::Store(hn::Mul(hn::ConvertTo(F32(), rest),
                          hn::Set(F32(), 1.0f / 2147483648.0f)),
                  F32(), least + at);
      }
    }
  }

 private:
  // Each lane's product with `by`, of which there are no 64-bit lanes.
  static HWY_INLINE void Multiply(hn::Vec<U32> a, uint32_t by,
                                  hn::Vec<U32>& high, hn::Vec<U32>& low) {
    const U32 d;
    const hn::Repartition<uint64_t, U32> d64;
    const auto factor = hn::Set(d, by);
    const auto even = hn::MulEven(a, factor);
    const auto odd = hn::MulEven(
        hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(d64, a))), factor);
    high = hn::OddEven(hn::BitCast(d, odd),
                       hn::BitCast(d, hn::ShiftRight<32>(even)));
    low = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(odd)),
                      hn::BitCast(d, even));
  }
};

// What stays of the order: all of the buckets before `bucket`, and the first
// `extra` of that one.
struct Prefix {
  int bucket = kBuckets;
  int extra = 0;
  uint64_t weight = 0;
};

struct Sampler {
  Row row;
  // Nothing below is looked at.
  float bound;
  uint64_t total[kBuckets];
  int32_t count[kBuckets];
  // One bucket in order, and each of its weights.
  int sorted_bucket;
  int num_sorted;
  Candidate* sorted;  // room for all

  // Fills the buckets with all from `from` on.
  Prefix Fill(float from) {
    bound = from;
    std::memset(total, 0, sizeof(total));
    std::memset(count, 0, sizeof(count));
    sorted_bucket = -1;
    Prefix all;
    row.ForEachFrom(bound, [&](int, float y, float w) {
      const uint64_t weight = Integer(w);
      if (weight == 0) return;
      const int bucket = BucketOf(y);
      total[bucket] += weight;
      all.weight += weight;
      ++count[bucket];
    });
    return all;
  }

  void Sort(int bucket) {
    if (sorted_bucket == bucket) return;
    sorted_bucket = bucket;
    num_sorted = 0;
    const float low =
        bucket + 1 < kBuckets
            ? row.LowestBefore((bucket + 1) / double{kBucketsPerNat})
            : kMinusInfinity;
    row.ForEachOf(std::max(bound, low),
                  row.HighestFrom(bucket / double{kBucketsPerNat}),
                  [&](int id, float y, float w) {
                    if (Integer(w) == 0 || BucketOf(y) != bucket) return;
                    sorted[num_sorted++] = {row.logits[id], id};
                  });
    std::sort(sorted, sorted + num_sorted, Before);
  }

  uint64_t WeightOf(const Candidate& candidate) const {
    const float y = (row.best - candidate.logit) / row.temperature;
    return Integer(Exp1(0.0f - y));
  }

  // The first behind what is kept.
  Candidate EndOf(const Prefix& kept) {
    Candidate end{bound, row.size};
    if (kept.bucket < kBuckets) {
      Sort(kept.bucket);
      if (kept.extra < num_sorted) end = sorted[kept.extra];
    }
    return end;
  }

  // The longest prefix, at most `limit`, whose members satisfy
  // keep(members before it, weight before it, own weight). All members of a
  // bucket that `whole` accepts (by what its last one would see, at the worst)
  // are taken unsorted.
  template <typename Keep, typename Whole>
  Prefix Take(const Prefix& limit, const Keep& keep, const Whole& whole) {
    int64_t members = 0;
    uint64_t weight = 0;
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      if (bucket > limit.bucket ||
          (bucket == limit.bucket && limit.extra == 0)) {
        break;
      }
      const bool partial = bucket == limit.bucket;
      const int available = partial ? limit.extra : count[bucket];
      if (available == 0) continue;
      if (!partial &&
          whole(members + available, weight + total[bucket], bucket)) {
        members += available;
        weight += total[bucket];
        continue;
      }
      Sort(bucket);
      for (int i = 0; i < available; ++i) {
        const uint64_t own = WeightOf(sorted[i]);
        if (!keep(members, weight, own)) return {bucket, i, weight};
        ++members;
        weight += own;
      }
    }
    return {limit.bucket, limit.extra, weight};
  }
};

// Steps 5 to 7, of which there is one.
Prefix TakeLikely(Sampler& sampler, const SampleParams& params) {
  const Row& row = sampler.row;
  const bool top_p = params.top_p < 1.0f;
  Prefix kept;
  if (params.top_k > 0) {
    kept = sampler.Fill(sampler.row.BoundOf(params.top_k));
    const int64_t most = params.top_k;
    kept = sampler.Take(
        kept,
        [&](int64_t members, uint64_t, uint64_t) { return members < most; },
        [&](int64_t members, uint64_t, int) { return members <= most; });
  } else if (top_p) {
    // Mostly an eighth of the groups is enough.
    kept = sampler.Fill(sampler.row.BoundOf(std::max(1, row.groups() / 8)));
  } else {
    kept = sampler.Fill(row.LowestBefore(
        1.0 / kBucketsPerNat - std::log(static_cast<double>(params.min_p))));
  }
  if (top_p) {
    const uint64_t total = params.top_k > 0 ? kept.weight : row.SumOfWeights();
    const double enough =
        static_cast<double>(params.top_p) * static_cast<double>(total);
    if (!(static_cast<double>(kept.weight) >= enough)) {
      kept = sampler.Fill(kMinusInfinity);
    }
    kept = sampler.Take(
        kept,
        [&](int64_t members, uint64_t weight, uint64_t) {
          return members == 0 || static_cast<double>(weight) < enough;
        },
        [&](int64_t, uint64_t weight, int) {
          return static_cast<double>(weight) < enough;
        });
  }
  if (params.min_p > 0.0f) {
    const double least = static_cast<double>(params.min_p) * kSampleWeightOne;
    // The last of a bucket weighs at least exp(-(bucket + 1) / 64), but for
    // rounding: a bucket more is margin enough.
    kept = sampler.Take(
        kept,
        [&](int64_t members, uint64_t, uint64_t own) {
          return members == 0 || static_cast<double>(own) >= least;
        },
        [&](int64_t, uint64_t, int bucket) {
          return std::exp(-(bucket + 2) / double{kBucketsPerNat}) *
                     kSampleWeightOne >=
                 least;
        });
  }
  return kept;
}

// Step 8: of all that is kept, the ids of z from `low` to `high`.
struct Typical {
  int low = 0;
  int high = kInformationEnd;

  bool Has(float y) const {
    const int z = Information(y);
    return z >= low && z <= high;
  }
  static int Information(float y) {
    return static_cast<int>(y * kInformationUnits);
  }
};

Typical TakeTypical(const Row& row, uint64_t kept_weight, const Candidate& end,
                    float typical_p) {
  // Calls each(z, weight) for all that is kept.
  const auto for_each = [&](const auto& each) {
    row.ForEachFrom(end.logit, [&](int id, float y, float w) {
      const uint64_t weight = Integer(w);
      if (weight == 0 || !Before({row.logits[id], id}, end)) return;
      each(Typical::Information(y), weight);
    });
  };
  uint64_t high = 0;
  uint64_t low = 0;
  for_each([&](int z, uint64_t weight) {
    high += (weight >> 20) * static_cast<uint64_t>(z);
    low += (weight & 0xfffff) * static_cast<uint64_t>(z);
  });
  const int mean = MeanInformation(high, low, kept_weight);
  const double enough =
      static_cast<double>(typical_p) * static_cast<double>(kept_weight);

  // Distances by their high and then by their low ten bits.
  uint64_t coarse[kInformationEnd >> 10] = {};
  for_each([&](int z, uint64_t weight) {
    coarse[std::abs(z - mean) >> 10] += weight;
  });
  uint64_t sum = 0;
  int bin = 0;
  while (static_cast<double>(sum + coarse[bin]) < enough) sum += coarse[bin++];
  uint64_t fine[1 << 10] = {};
  for_each([&](int z, uint64_t weight) {
    const int distance = std::abs(z - mean);
    if (distance >> 10 == bin) fine[distance & 1023] += weight;
  });
  int distance = 0;
  while (static_cast<double>(sum + fine[distance]) < enough) {
    sum += fine[distance++];
  }
  distance += bin << 10;
  return {mean - distance, mean + distance};
}

// Whether any of 16 numbers may be below `factor` times its weight.
HWY_INLINE bool AnyBelow(const float* least, const float* weights,
                         float factor) {
  const F32 d;
  bool any = false;
  TANDEM_PARTS(i) {
    const Vec mark =
        hn::Mul(hn::Load(d, weights + i * kLanes), hn::Set(d, factor));
    any |= !hn::AllFalse(d, hn::Le(hn::Load(d, least + i * kLanes), mark));
  }
  return any;
}

// Step 9, among those before `end`. -1: there is none.
class Race {
 public:
  Race(const Row& row, const SampleParams& params, const Candidate& end,
       const Typical& typical)
      : row_(row), params_(params), end_(end), typical_(typical) {}

  int Winner() {
    for (int group = 0; group < row_.groups(); ++group) {
      if (row_.most[group] < end_.logit) continue;
      const int begin = group * kGroup;
      const int count = std::min(kGroup, row_.size - begin);
      weights_.Of(row_.logits + begin, count, row_.best, row_.temperature);
      noise_.Of(params_, group);
      for (int i = 0; i < count; i += 16) {
        // Nearly nothing has a chance, which is seen without a logarithm.
        if (!AnyBelow(noise_.least + i, weights_.w + i, least_ * 1.0001f)) {
          continue;
        }
        for (int j = i; j < std::min(count, i + 16); ++j) {
          Run(begin + j, weights_.y[j], weights_.w[j], noise_.bits[j]);
        }
      }
    }
    return winner_;
  }

 private:
  void Run(int id, float y, float w, uint32_t bits) {
    if (Integer(w) == 0 || !typical_.Has(y) ||
        !Before({row_.logits[id], id}, end_)) {
      return;
    }
    const float score = Exponential(bits) / w;
    if (score < least_) {
      least_ = score;
      winner_ = id;
    }
  }

  const Row& row_;
  const SampleParams& params_;
  const Candidate end_;
  const Typical typical_;
  Weights weights_;
  Noise noise_;
  float least_ = std::numeric_limits<float>::infinity();
  int winner_ = -1;
};

// The id that is drawn from the sampler's row; -1 where its first is -inf.
inline int Draw(Sampler& sampler, const SampleParams& params) {
  Row& row = sampler.row;
  row.temperature = params.temperature;
  row.FindBest();
  if (row.best == kMinusInfinity) return -1;
  if (!(params.temperature > 0.0f)) return row.First();
  Candidate end{kMinusInfinity, row.size};
  Prefix kept;
  if (params.top_k > 0 || params.top_p < 1.0f || params.min_p > 0.0f) {
    kept = TakeLikely(sampler, params);
    end = sampler.EndOf(kept);
  } else if (params.typical_p < 1.0f) {
    kept.weight = row.SumOfWeights();
  }
  Typical typical;
  if (params.typical_p < 1.0f && kept.weight > 0) {
    typical = TakeTypical(row, kept.weight, end, params.typical_p);
  }
  const int winner = Race(row, params, end, typical).Winner();
  return winner < 0 ? row.First() : winner;
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
