// SPDX-License-Identifier: Apache-2.0
// Draws one token from one row of logits, as kernels/sampling.h says. The
// vocabulary is never sorted: ids fall into buckets by how much less likely
// they are than the best one, integer weights are summed per bucket, and only
// a bucket that a limit (top-k, top-p, min-p, the draw) falls into is sorted.
// Edits are made in the row itself and taken back after the draw; where only
// few ids may be drawn, or those of a mask, the draw is from a row of these.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/sample.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/simd-inl.h"
// clang-format on

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/kernel_table.h"
#include "kernels/sampling.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// Weights reach zero at exp(-27.73) = 2^-40; a 64th of a nat per bucket.
inline constexpr float kBucketsPerNat = 64.0f;
inline constexpr int kBuckets = 28 * 64;
inline constexpr int kChunk = 512;

struct Candidate {
  float logit;
  int32_t id;
};

// The order that everything here means by "first".
inline bool Before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

float MaxLogit(const float* logits, int vocab) {
  const float low = -std::numeric_limits<float>::infinity();
  F16 most = Set16(low);
  int i = 0;
  // In this order: where either is a NaN the instruction takes the second.
  for (; i + 16 <= vocab; i += 16) most = Max(Load16(logits + i), most);
  float r = Max16(most);
  for (; i < vocab; ++i) r = logits[i] > r ? logits[i] : r;
  return r;
}

int FirstAt(const float* logits, int vocab, float value) {
  for (int i = 0; i < vocab; ++i) {
    if (logits[i] == value) return i;
  }
  return 0;  // only NaN everywhere comes here
}

// y and weights of one chunk, as step 4 says.
struct Weights {
  alignas(64) float y[kChunk];
  alignas(64) float w[kChunk];

  HWY_INLINE void Of(const float* logits, int count, float best,
                     float temperature) {
    const F16 top = Set16(best);
    const F16 divisor = Set16(temperature);
    const F16 zero = Set16(0.0f);
    for (int i = 0; i < count; i += 16) {
      const F16 x = i + 16 <= count ? Load16(logits + i)
                                    : LoadFirst16(logits + i, count - i);
      const F16 distance = Div(Sub(top, x), divisor);
      Store16(distance, y + i);
      Store16(Exp(Sub(zero, distance)), w + i);
    }
  }
};

HWY_INLINE uint64_t Integer(float weight) {
  return static_cast<uint64_t>(
      static_cast<int64_t>(weight * static_cast<float>(kSampleWeightOne)));
}

HWY_INLINE int BucketOf(float y) {
  const float scaled = y * kBucketsPerNat;
  return scaled < static_cast<float>(kBuckets - 1) ? static_cast<int>(scaled)
                                                   : kBuckets - 1;
}

struct Sampler {
  const float* logits;
  int vocab;
  float best;
  float temperature;
  uint64_t total[kBuckets];
  int32_t count[kBuckets];
  // One bucket in order, and each of its weights.
  int sorted_bucket;
  int num_sorted;
  Candidate* sorted;

  void Fill() {
    std::memset(total, 0, sizeof(total));
    std::memset(count, 0, sizeof(count));
    sorted_bucket = -1;
    Weights chunk;
    for (int begin = 0; begin < vocab; begin += kChunk) {
      const int size = std::min(kChunk, vocab - begin);
      chunk.Of(logits + begin, size, best, temperature);
      for (int i = 0; i < size; ++i) {
        const uint64_t weight = Integer(chunk.w[i]);
        if (weight == 0) continue;
        const int bucket = BucketOf(chunk.y[i]);
        total[bucket] += weight;
        ++count[bucket];
      }
    }
  }

  void Sort(int bucket) {
    if (sorted_bucket == bucket) return;
    sorted_bucket = bucket;
    num_sorted = 0;
    Weights chunk;
    for (int begin = 0; begin < vocab; begin += kChunk) {
      const int size = std::min(kChunk, vocab - begin);
      chunk.Of(logits + begin, size, best, temperature);
      for (int i = 0; i < size; ++i) {
        if (Integer(chunk.w[i]) == 0 || BucketOf(chunk.y[i]) != bucket) {
          continue;
        }
        sorted[num_sorted++] = {logits[begin + i], begin + i};
      }
    }
    std::sort(sorted, sorted + num_sorted, Before);
  }

  uint64_t WeightOf(const Candidate& candidate) const {
    const float y = (best - candidate.logit) / temperature;
    return Integer(Exp1(0.0f - y));
  }
};

// What stays of the order: all of the buckets before `bucket`, and the first
// `extra` of that one.
struct Prefix {
  int bucket;
  int extra;
  uint64_t weight;
};

// The longest prefix, at most `limit`, whose members satisfy
// keep(members before it, weight before it, own weight). All members of a
// bucket that `whole` accepts (by what its last one would see, at the worst)
// are taken unsorted.
template <typename Keep, typename Whole>
Prefix Take(Sampler& sampler, const Prefix& limit, const Keep& keep,
            const Whole& whole) {
  int64_t members = 0;
  uint64_t weight = 0;
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    if (bucket > limit.bucket || (bucket == limit.bucket && limit.extra == 0)) {
      break;
    }
    const bool partial = bucket == limit.bucket;
    const int available = partial ? limit.extra : sampler.count[bucket];
    if (available == 0) continue;
    if (!partial &&
        whole(members + available, weight + sampler.total[bucket], bucket)) {
      members += available;
      weight += sampler.total[bucket];
      continue;
    }
    sampler.Sort(bucket);
    for (int i = 0; i < available; ++i) {
      const uint64_t own = sampler.WeightOf(sampler.sorted[i]);
      if (!keep(members, weight, own)) return {bucket, i, weight};
      ++members;
      weight += own;
    }
  }
  return {limit.bucket, limit.extra, weight};
}

// Step 8: of all that is kept, the ids of z from `low` to `high`.
struct Typical {
  int low = 0;
  int high = kInformationEnd;
  uint64_t before = 0;  // weight of what is kept before them
  uint64_t weight = 0;  // theirs
};

// Calls each(z, weight) for every id of the prefix.
template <typename Each>
void ForEachKept(Sampler& sampler, const Prefix& kept, const Each& each) {
  Candidate end{-std::numeric_limits<float>::infinity(), sampler.vocab};
  if (kept.bucket < kBuckets) {
    sampler.Sort(kept.bucket);
    if (kept.extra < sampler.num_sorted) end = sampler.sorted[kept.extra];
  }
  Weights chunk;
  for (int begin = 0; begin < sampler.vocab; begin += kChunk) {
    const int size = std::min(kChunk, sampler.vocab - begin);
    chunk.Of(sampler.logits + begin, size, sampler.best, sampler.temperature);
    for (int i = 0; i < size; ++i) {
      const uint64_t weight = Integer(chunk.w[i]);
      const int bucket = BucketOf(chunk.y[i]);
      if (weight == 0 || bucket > kept.bucket) continue;
      if (bucket == kept.bucket &&
          !Before({sampler.logits[begin + i], begin + i}, end)) {
        continue;
      }
      each(static_cast<int>(chunk.y[i] * kInformationUnits), weight);
    }
  }
}

Typical TakeTypical(Sampler& sampler, const Prefix& kept, float typical_p) {
  uint64_t high = 0;
  uint64_t low = 0;
  ForEachKept(sampler, kept, [&](int z, uint64_t weight) {
    high += (weight >> 20) * static_cast<uint64_t>(z);
    low += (weight & 0xfffff) * static_cast<uint64_t>(z);
  });
  const int mean = MeanInformation(high, low, kept.weight);
  const double enough =
      static_cast<double>(typical_p) * static_cast<double>(kept.weight);

  // Distances by their high and then by their low ten bits.
  uint64_t coarse[kInformationEnd >> 10] = {};
  ForEachKept(sampler, kept, [&](int z, uint64_t weight) {
    coarse[std::abs(z - mean) >> 10] += weight;
  });
  uint64_t sum = 0;
  int bin = 0;
  while (static_cast<double>(sum + coarse[bin]) < enough) sum += coarse[bin++];
  uint64_t fine[1 << 10] = {};
  ForEachKept(sampler, kept, [&](int z, uint64_t weight) {
    const int distance = std::abs(z - mean);
    if (distance >> 10 == bin) fine[distance & 1023] += weight;
  });
  int distance = 0;
  while (static_cast<double>(sum + fine[distance]) < enough) {
    sum += fine[distance++];
  }
  distance += bin << 10;

  Typical typical{mean - distance, mean + distance};
  ForEachKept(sampler, kept, [&](int z, uint64_t weight) {
    typical.before += z < typical.low ? weight : 0;
    typical.weight += z >= typical.low && z <= typical.high ? weight : 0;
  });
  return typical;
}

int Draw(Sampler& sampler, const SampleParams& params) {
  sampler.Fill();
  Prefix kept{kBuckets, 0, 0};
  for (int i = 0; i < kBuckets; ++i) kept.weight += sampler.total[i];
  if (params.top_k > 0) {
    const int64_t most = params.top_k;
    kept = Take(
        sampler, kept,
        [&](int64_t members, uint64_t, uint64_t) { return members < most; },
        [&](int64_t members, uint64_t, int) { return members <= most; });
  }
  if (params.top_p < 1.0f) {
    const double enough =
        static_cast<double>(params.top_p) * static_cast<double>(kept.weight);
    kept = Take(
        sampler, kept,
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
    kept = Take(
        sampler, kept,
        [&](int64_t members, uint64_t, uint64_t own) {
          return members == 0 || static_cast<double>(own) >= least;
        },
        [&](int64_t, uint64_t, int bucket) {
          return std::exp(-(bucket + 2) / double{kBucketsPerNat}) *
                     kSampleWeightOne >=
                 least;
        });
  }
  Typical typical;
  typical.weight = kept.weight;
  if (params.typical_p < 1.0f) {
    typical = TakeTypical(sampler, kept, params.typical_p);
  }
  const uint64_t bits =
      SampleBits(params.seed, params.sequence_index, params.position);
  const uint64_t target =
      typical.before +
      static_cast<uint64_t>(
          (static_cast<unsigned __int128>(typical.weight) * bits) >> 64);
  uint64_t weight = 0;
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    if (weight + sampler.total[bucket] <= target) {
      weight += sampler.total[bucket];
      continue;
    }
    sampler.Sort(bucket);
    for (int i = 0; i < sampler.num_sorted; ++i) {
      weight += sampler.WeightOf(sampler.sorted[i]);
      if (weight > target) return sampler.sorted[i].id;
    }
  }
  return FirstAt(sampler.logits, sampler.vocab, sampler.best);
}

// What makes log probabilities of a row's logits.
struct LogSum {
  double best;
  double log_sum;

  LogSum(const float* logits, int vocab) {
    const float most = MaxLogit(logits, vocab);
    Weights chunk;
    uint64_t sum = 0;
    for (int begin = 0; begin < vocab; begin += kChunk) {
      const int size = std::min(kChunk, vocab - begin);
      chunk.Of(logits + begin, size, most, 1.0f);
      for (int i = 0; i < size; ++i) sum += Integer(chunk.w[i]);
    }
    best = static_cast<double>(most);
    log_sum = std::log(static_cast<double>(sum) / kSampleWeightOne);
  }
  float LogProb(float logit) const {
    return static_cast<float>(static_cast<double>(logit) - best - log_sum);
  }
  float Logit(float log_prob) const {
    return static_cast<float>(static_cast<double>(log_prob) + (best + log_sum));
  }
};

// The first `wanted` of candidate(i), i below `count`, as the alternatives,
// and how many of all precede `chosen`.
template <typename At>
int Report(const LogSum& sum, int count, const At& candidate, int wanted,
           const Candidate& chosen, SampleResult& result) {
  int before = 0;
  Candidate top[kMaxTopLogprobs + 1];
  int num_top = 0;
  for (int i = 0; i < count; ++i) {
    const Candidate own = candidate(i);
    before += Before(own, chosen) ? 1 : 0;
    if (wanted == 0 || std::isnan(own.logit)) continue;
    if (num_top == wanted && !Before(own, top[num_top - 1])) continue;
    int at = num_top;
    while (at > 0 && Before(own, top[at - 1])) --at;
    for (int j = num_top; j > at; --j) top[j] = top[j - 1];
    top[at] = own;
    if (num_top < wanted) ++num_top;
  }
  result.num_top = num_top;
  for (int i = 0; i < num_top; ++i) {
    result.top_ids[i] = top[i].id;
    result.top_logprobs[i] = sum.LogProb(top[i].logit);
  }
  return before;
}

int Wanted(const SamplePiece& p, int count) {
  return std::min({p.params->logprobs, kMaxTopLogprobs, count});
}

void LogProbs(const SamplePiece& p, SampleResult& result) {
  const LogSum sum(p.logits, p.vocab);
  const Candidate chosen{p.logits[result.token_id], result.token_id};
  const int before = Report(
      sum, p.vocab,
      [&](int i) {
        return Candidate{p.logits[i], i};
      },
      Wanted(p, p.vocab), chosen, result);
  result.logprob = sum.LogProb(chosen.logit);
  result.rank = before + 1;
}

// With `memory` for one float of each edit.
void EditedLogProbs(const SamplePiece& p, float* memory, SampleResult& result) {
  const LogSum sum(p.logits, p.vocab);
  const LogitEdit* const edits = p.edits + p.params->first_edit;
  const int count = p.params->num_edits;
  for (int i = 0; i < count; ++i) {
    float& logit = p.logits[edits[i].token_id];
    memory[i] = logit;
    logit = sum.Logit(EditedLogit(sum.LogProb(logit), edits[i]));
  }
  const auto take_back = [&] {
    for (int i = 0; i < count; ++i) p.logits[edits[i].token_id] = memory[i];
  };
  const Candidate nobody{std::numeric_limits<float>::infinity(), -1};
  const auto at = [&](int i) { return Candidate{p.logits[i], i}; };
  if (p.params->only_edited != 0) {
    const auto edited = [&](int i) { return at(edits[i].token_id); };
    Report(sum, count, edited, Wanted(p, count), nobody, result);
  } else {
    Report(sum, p.vocab, at, Wanted(p, p.vocab), nobody, result);
  }
  take_back();
  if (result.num_top == 0 || std::isinf(result.top_logprobs[0])) {
    Report(sum, p.vocab, at, Wanted(p, p.vocab), nobody, result);
  }
  result.token_id = result.top_ids[0];
  result.logprob = result.top_logprobs[0];
  result.rank = 1;
}

// Ids that may be drawn, ascending, and their logits.
struct Allowed {
  float* logits;
  int32_t* ids;
  int count = 0;

  void Add(float logit, int32_t id) {
    logits[count] = logit;
    ids[count++] = id;
  }
};

// Those of a whole row that a mask names.
void AddMasked(const float* logits, int vocab, const uint32_t* mask,
               Allowed& allowed) {
  for (int word = 0; word < MaskWords(vocab); ++word) {
    for (uint32_t bits = mask[word]; bits != 0; bits &= bits - 1) {
      const int id = word * 32 + std::countr_zero(bits);
      if (id < vocab) allowed.Add(logits[id], id);
    }
  }
}

// The place in a row of what is drawn from it; -1 where its first is -inf.
int DrawFrom(Sampler& sampler, const float* logits, int vocab,
             const SampleParams& params) {
  sampler.logits = logits;
  sampler.vocab = vocab;
  sampler.temperature = params.temperature;
  sampler.best = MaxLogit(logits, vocab);
  if (sampler.best == -std::numeric_limits<float>::infinity()) return -1;
  return params.temperature > 0.0f ? Draw(sampler, params)
                                   : FirstAt(logits, vocab, sampler.best);
}

int DrawAllowed(Sampler& sampler, const Allowed& allowed,
                const SampleParams& params) {
  const int at = DrawFrom(sampler, allowed.logits, allowed.count, params);
  return at < 0 ? -1 : allowed.ids[at];
}

// Draws from what the row's mask names, which is gathered in `allowed`.
int DrawMasked(const SamplePiece& p, Sampler& sampler, Allowed allowed) {
  AddMasked(p.logits, p.vocab,
            p.masks + int64_t{p.params->mask} * MaskWords(p.vocab), allowed);
  return DrawAllowed(sampler, allowed, *p.params);
}

// Step 1 and the draw after it, with `memory` for one float of each edit, and
// room for what a mask leaves.
int DrawEdited(const SamplePiece& p, Sampler& sampler, float* memory,
               Allowed allowed) {
  const SampleParams& params = *p.params;
  const bool masked = params.mask >= 0;
  const LogitEdit* const edits = p.edits + params.first_edit;
  const int count = params.num_edits;
  if (params.only_edited != 0 && masked) {
    const uint32_t* const mask =
        p.masks + int64_t{params.mask} * MaskWords(p.vocab);
    for (int i = 0; i < count; ++i) {
      const int32_t id = edits[i].token_id;
      if ((mask[id / 32] >> (id % 32) & 1) == 0) continue;
      allowed.Add(EditedLogit(p.logits[id], edits[i]), id);
    }
    return DrawAllowed(sampler, allowed, params);
  }
  if (params.only_edited != 0) {
    for (int i = 0; i < count; ++i) {
      memory[i] = EditedLogit(p.logits[edits[i].token_id], edits[i]);
    }
    const int at = DrawFrom(sampler, memory, count, params);
    return at < 0 ? -1 : edits[at].token_id;
  }
  for (int i = 0; i < count; ++i) {
    float& logit = p.logits[edits[i].token_id];
    memory[i] = logit;
    logit = EditedLogit(logit, edits[i]);
  }
  const int id = masked ? DrawMasked(p, sampler, allowed)
                        : DrawFrom(sampler, p.logits, p.vocab, params);
  for (int i = 0; i < count; ++i) p.logits[edits[i].token_id] = memory[i];
  return id;
}

void SampleRow(const SamplePiece& p) {
  SampleResult& result = *p.result;
  std::memset(&result, 0, sizeof(result));
  Sampler& sampler = *reinterpret_cast<Sampler*>(p.scratch);
  sampler.sorted = reinterpret_cast<Candidate*>(p.scratch + (1 << 20));
  auto* const memory =
      reinterpret_cast<float*>(sampler.sorted + size_t{kMaxVocab});
  if (p.params->edited_logprobs != 0) {
    EditedLogProbs(p, memory, result);
    return;
  }
  const Allowed allowed{
      memory + kMaxVocab,
      reinterpret_cast<int32_t*>(memory + size_t{2} * kMaxVocab)};
  int id = p.params->given;
  if (id < 0 && p.params->num_edits > 0) {
    id = DrawEdited(p, sampler, memory, allowed);
  }
  if (id < 0 && p.params->mask >= 0) id = DrawMasked(p, sampler, allowed);
  if (id < 0) id = DrawFrom(sampler, p.logits, p.vocab, *p.params);
  result.token_id = std::max(id, 0);
  if (p.params->logprobs >= 0) LogProbs(p, result);
}

static_assert(sizeof(Sampler) <= size_t{1} << 20);

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

void AddSample(KernelTable& table) {
  table.sample =
      table.isa == Isa::kAvx512 ? N_AVX3::SampleRow : N_AVX2::SampleRow;
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
