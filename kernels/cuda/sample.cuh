// SPDX-License-Identifier: Apache-2.0
// Draws one token per row of logits, exactly as kernels/sampling.h says: the
// same tokens as on a CPU. A block takes a row.
//
// Nothing is sorted. The order (logit descending, id ascending) is that of
// 64-bit keys, and every limit (top-k, top-p) is the first id in the order at
// which a running sum of integers, count or weight, reaches a mark. It is found
// by bins: weights are summed by how much less likely ids are than the best one
// (a 64th of a nat each), the sum is run along the bins to the one that holds
// the mark, that one is cut into finer bins, and so on until a bin holds one
// id; after the two distances, by the bits of the key. The first cut is kept
// for all limits of a row. Integer sums have no order, so threads add as they
// come.
//
// Edits are made in the row itself, keep what was there in the place of their
// bias, and are taken back after the draw. Where only ids with an edit may be
// drawn, the row stays and the draw is from the edits' places: they have the
// changed logits in that field.

#ifndef TANDEM_KERNELS_CUDA_SAMPLE_CUH_
#define TANDEM_KERNELS_CUDA_SAMPLE_CUH_

#include <cmath>

#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/launch.h"
#include "kernels/sampling.h"

namespace tandem::kernels::cuda {

// Threads of a block: few for few ids. The draw does not depend on it.
inline constexpr int kSampleThreads = 1024;
inline constexpr int kFewSampleThreads = 128;
inline constexpr int kFewIds = 4096;
inline constexpr int kSampleWarps = kSampleThreads / 32;
inline constexpr float kBucketsPerNat = 64.0f;
// Weights are zero from exp(-27.73) = 2^-40 on.
inline constexpr int kSampleBuckets = 28 * 64;
inline constexpr int kSampleBins = 2048;
inline constexpr int kSampleLevels = 7;
inline constexpr uint64_t kNoKey = ~uint64_t{0};

// Sums of a level's bins. A tally is the number of members times 2^40 plus
// the sum of their ids: of one member, the id.
struct SampleBins {
  uint64_t weight[kSampleBins];
  uint64_t tally[kSampleBins];
};
inline constexpr int kTallyShift = 40;

struct SampleMemory {
  SampleBins coarse;  // level 0
  SampleBins fine;    // of the level at hand
  uint64_t reduce[kSampleWarps];
  uint64_t warp_weight[kSampleWarps];
  uint64_t warp_count[kSampleWarps];
  // The bin that holds the mark, and the sums before it.
  uint64_t weight_before;
  uint64_t count_before;
  int32_t bin;
};

// An id's place in the order: less is earlier. NaNs are last.
TANDEM_DEVICE uint64_t KeyOf(float logit, int id) {
  const uint32_t bits = FloatToBits(Add(logit, 0.0f));  // -0 is 0
  const uint32_t ascending =
      bits ^ ((bits & 0x80000000u) != 0 ? 0xffffffffu : 0x80000000u);
  const uint32_t place = logit != logit ? 0xffffffffu : ~ascending;
  return static_cast<uint64_t>(place) << 32 | static_cast<uint32_t>(id);
}
TANDEM_DEVICE int IdOf(uint64_t key) {
  return static_cast<int>(key & 0xffffffffu);
}

// At most kSampleWeightOne.
TANDEM_DEVICE uint64_t IntegerWeight(float y) {
  return static_cast<uint64_t>(static_cast<int64_t>(
      Mul(Min(Exp(Sub(0.0f, y)), 1.0f), static_cast<float>(kSampleWeightOne))));
}

// The ids of the order that are left: all up to `key`, which is in `bucket`.
struct SampleCut {
  uint64_t key = kNoKey;
  int bucket = kSampleBuckets;  // none
  uint64_t count = 0;
  uint64_t weight = 0;
};

// Step 8: what is left has information from `low` to `high`.
struct SampleTypical {
  int low = 0;
  int high = kInformationEnd;
};

template <int kThreads>
class RowSampler {
 public:
  TANDEM_DEVICE RowSampler(Grid& g, const SampleKernelParams& p, int row)
      : g_(g),
        memory_(*reinterpret_cast<SampleMemory*>(g.shared())),
        logits_(p.logits + int64_t{row} * p.vocab),
        vocab_(p.vocab),
        params_(p.params[row]),
        edits_(p.edits + params_.first_edit),
        masks_(p.masks) {}

  TANDEM_DEVICE void Run(SampleResult& result) {
    if (params_.edited_logprobs != 0) {
      EditedLogProbs(result);
      return;
    }
    int id = params_.given;
    const bool masked = id < 0 && params_.mask >= 0;
    if (masked) mask_ = masks_ + int64_t{params_.mask} * MaskWords(vocab_);
    if (id < 0 && params_.num_edits > 0) {
      MakeEdits([](float raw, const LogitEdit& e) { return Edited(raw, e); });
      count_ = only_edited() ? params_.num_edits : vocab_;
      id = DrawPlace();
      if (only_edited() && id >= 0) id = edits_[id].token_id;
      TakeBackEdits();
    }
    count_ = vocab_;
    if (id < 0) id = DrawPlace();
    mask_ = nullptr;
    if (id < 0 && masked) id = DrawPlace();
    if (id < 0) id = 0;  // nothing is above -inf
    if (g_.thread() == 0) {
      result = SampleResult{};
      result.token_id = id;
    }
    if (params_.logprobs >= 0) LogProbs(id, result);
  }

 private:
  static constexpr int kBinsPerThread = kSampleBins / kThreads;

  TANDEM_DEVICE bool only_edited() const { return params_.only_edited != 0; }

  // EditedLogit, whose operations a device's compiler must not fuse.
  TANDEM_DEVICE static float Edited(float logit, const LogitEdit& edit) {
    logit = Add(logit, edit.bias);
    if (edit.repetition != 1.0f) {
      logit = logit > 0.0f ? Div(logit, edit.repetition)
                           : Mul(logit, edit.repetition);
    }
    return Sub(logit, edit.penalty);
  }

  // Makes each edit, of the raw logit.
  template <typename Make>
  TANDEM_DEVICE void MakeEdits(const Make& make) {
    for (int i = g_.thread(); i < params_.num_edits; i += kThreads) {
      LogitEdit& edit = edits_[i];
      const float raw = logits_[edit.token_id];
      const float edited = make(raw, edit);
      edit.bias = only_edited() ? edited : raw;
      if (!only_edited()) logits_[edit.token_id] = edited;
    }
    edited_ = only_edited();
    g_.Barrier();
  }
  TANDEM_DEVICE void TakeBackEdits() {
    g_.Barrier();
    const int changed = edited_ ? 0 : params_.num_edits;
    for (int i = g_.thread(); i < changed; i += kThreads) {
      logits_[edits_[i].token_id] = edits_[i].bias;
    }
    edited_ = false;
    g_.Barrier();
  }

  // Of a place in what is drawn from: an id, or an edit that may be drawn.
  TANDEM_DEVICE float LogitAt(int place) const {
    if (mask_ != nullptr) {
      const int id = edited_ ? edits_[place].token_id : place;
      if ((mask_[id >> 5] >> (id & 31) & 1) == 0) return -kInfinity;
    }
    return edited_ ? edits_[place].bias : logits_[place];
  }
  TANDEM_DEVICE uint64_t KeyAt(int place) const {
    return KeyOf(LogitAt(place), place);
  }

  // The first in the order, of `count_` places.
  TANDEM_DEVICE uint64_t FirstKey() {
    uint64_t first = kNoKey;
    for (int place = g_.thread(); place < count_; place += kThreads) {
      first = Least64()(first, KeyAt(place));
    }
    return ReduceBlock(g_, first, memory_.reduce, Least64());
  }

  // -1 if all are -inf.
  TANDEM_DEVICE int DrawPlace() {
    const uint64_t first = FirstKey();
    best_ = LogitAt(IdOf(first));
    if (best_ == -kInfinity) return -1;
    return params_.temperature > 0.0f ? Draw(first) : IdOf(first);
  }

  // How much less likely than the best one, in nats at the temperature.
  TANDEM_DEVICE float Distance(float logit) const {
    return Div(Sub(best_, logit), params_.temperature);
  }

  // The bin of an id within its bin of the level before. Never descends along
  // the order; rounding does not enter.
  TANDEM_DEVICE static int BinOf(int level, float y, uint64_t key) {
    const float buckets = Mul(y, kBucketsPerNat);
    const int bucket = Smaller(static_cast<int>(buckets), kSampleBuckets - 1);
    switch (level) {
      case 0:
        return bucket;
      case 1:
        return Smaller(static_cast<int>(Mul(
                           Sub(buckets, static_cast<float>(bucket)), 2048.0f)),
                       kSampleBins - 1);
      case 2:
        return static_cast<int>(key >> 53);
      case 3:
        return static_cast<int>(key >> 42 & 0x7ff);
      case 4:
        return static_cast<int>(key >> 32 & 0x3ff);
      case 5:
        return static_cast<int>(key >> 10 & 0x3ff);
      default:
        return static_cast<int>(key & 0x3ff);
    }
  }

  // Sums ids up to `last` by their bins of `level`, those that are in the
  // bins `path` of the levels before.
  TANDEM_DEVICE void Fill(SampleBins& bins, int level, uint64_t last,
                          const int (&path)[kSampleLevels]) {
    for (int i = g_.thread(); i < kSampleBins; i += kThreads) {
      bins.weight[i] = 0;
      bins.tally[i] = 0;
    }
    g_.Barrier();
    for (int id = g_.thread(); id < count_; id += kThreads) {
      const float logit = LogitAt(id);
      const float y = Distance(logit);
      const uint64_t weight = IntegerWeight(y);
      const uint64_t key = KeyOf(logit, id);
      if (weight == 0 || key > last) continue;
      bool inside = true;
      for (int i = 0; i < level; ++i) {
        inside = inside && BinOf(i, y, key) == path[i];
      }
      if (!inside) continue;
      const int bin = BinOf(level, y, key);
      g_.AtomicAdd(&bins.weight[bin], weight);
      g_.AtomicAdd(&bins.tally[bin],
                   (uint64_t{1} << kTallyShift) + static_cast<uint64_t>(id));
    }
    g_.Barrier();
  }

  // Inclusive, over the lanes of a warp.
  TANDEM_DEVICE uint64_t RunningSum(uint64_t value) {
    for (int step = 1; step < 32; step *= 2) {
      const uint64_t before =
          Shuffle64(g_, value, g_.lane() >= step ? g_.lane() - step : 0);
      if (g_.lane() >= step) value += before;
    }
    return value;
  }

  // The first bin with members whose running sums, from `before` on,
  // `reached` accepts; in `memory_`. With `limit`, the bins are level 0's and
  // end with the limit's. False: none.
  template <typename Reached>
  TANDEM_DEVICE bool FindBin(const SampleBins& bins, const SampleCut* limit,
                             uint64_t count_before, uint64_t weight_before,
                             const Reached& reached) {
    const int last = limit == nullptr ? kSampleBins : limit->bucket;
    uint64_t count[kBinsPerThread];
    uint64_t weight[kBinsPerThread];
    uint64_t own_count = 0;
    uint64_t own_weight = 0;
    for (int i = 0; i < kBinsPerThread; ++i) {
      const int bin = g_.thread() * kBinsPerThread + i;
      count[i] = bin > last ? 0 : bins.tally[bin] >> kTallyShift;
      weight[i] = bin > last ? 0 : bins.weight[bin];
      own_count += count[i];
      own_weight += weight[i];
    }
    const uint64_t count_sum = RunningSum(own_count);
    const uint64_t weight_sum = RunningSum(own_weight);
    if (g_.lane() == 31) {
      memory_.warp_count[g_.warp()] = count_sum;
      memory_.warp_weight[g_.warp()] = weight_sum;
    }
    if (g_.thread() == 0) memory_.bin = -1;
    g_.Barrier();
    uint64_t counted = count_before + count_sum - own_count;
    uint64_t weighed = weight_before + weight_sum - own_weight;
    for (int i = 0; i < g_.warp(); ++i) {
      counted += memory_.warp_count[i];
      weighed += memory_.warp_weight[i];
    }
    for (int i = 0; i < kBinsPerThread; ++i) {
      const int bin = g_.thread() * kBinsPerThread + i;
      uint64_t counted_after = counted + count[i];
      uint64_t weighed_after = weighed + weight[i];
      if (limit != nullptr && bin == limit->bucket) {
        counted_after = limit->count;
        weighed_after = limit->weight;
      }
      if (counted_after > counted && reached(counted_after, weighed_after) &&
          (counted == count_before || !reached(counted, weighed))) {
        memory_.bin = bin;
        memory_.count_before = counted;
        memory_.weight_before = weighed;
      }
      counted = counted_after;
      weighed = weighed_after;
    }
    g_.Barrier();
    return memory_.bin >= 0;
  }

  // Cuts after the first id within `limit` at which the running sums are
  // `reached`. False: there is none.
  template <typename Reached>
  TANDEM_DEVICE bool Search(const SampleCut& limit, const Reached& reached,
                            SampleCut* cut) {
    int path[kSampleLevels] = {};
    uint64_t count = 0;
    uint64_t weight = 0;
    for (int level = 0; level < kSampleLevels; ++level) {
      SampleBins& bins = level == 0 ? memory_.coarse : memory_.fine;
      if (level > 0) Fill(bins, level, limit.key, path);
      const bool found =
          FindBin(bins, level == 0 ? &limit : nullptr, count, weight, reached);
      const int bin = found ? memory_.bin : 0;
      count = memory_.count_before;
      weight = memory_.weight_before;
      const uint64_t tally = bins.tally[bin];
      const uint64_t bin_weight = bins.weight[bin];
      g_.Barrier();  // before any of it is written again
      if (!found) return false;
      path[level] = bin;
      if (tally >> kTallyShift > 1) continue;
      const int id =
          static_cast<int>(tally & ((uint64_t{1} << kTallyShift) - 1));
      cut->key = KeyAt(id);
      cut->bucket = path[0];
      cut->count = count + 1;
      cut->weight = weight + bin_weight;
      return true;
    }
    return false;  // the last level tells all ids apart
  }

  // Ends before the first id, but for the very first, that weighs less than
  // `least`.
  TANDEM_DEVICE void CutBelow(double least, uint64_t first, SampleCut* cut) {
    uint64_t light = kNoKey;
    for (int id = g_.thread(); id < count_; id += kThreads) {
      const uint64_t key = KeyAt(id);
      const uint64_t weight = IntegerWeight(Distance(LogitAt(id)));
      if (key > cut->key || key == first || weight == 0) continue;
      if (static_cast<double>(weight) < least) light = Least64()(light, key);
    }
    light = ReduceBlock(g_, light, memory_.reduce, Least64());
    if (light == kNoKey) return;
    uint64_t weight = 0;
    uint64_t count = 0;
    for (int id = g_.thread(); id < count_; id += kThreads) {
      const uint64_t own = IntegerWeight(Distance(LogitAt(id)));
      if (KeyAt(id) >= light || own == 0) continue;
      weight += own;
      ++count;
    }
    cut->weight = ReduceBlock(g_, weight, memory_.reduce, Sum64());
    cut->count = ReduceBlock(g_, count, memory_.reduce, Sum64());
    cut->bucket = BinOf(0, Distance(LogitAt(IdOf(light))), light);
    cut->key = light - 1;
  }

  // Calls each(z, weight) for this thread's part of what is kept.
  template <typename Each>
  TANDEM_DEVICE void ForEachKept(const SampleCut& kept, const Each& each) {
    for (int id = g_.thread(); id < count_; id += kThreads) {
      const float y = Distance(LogitAt(id));
      const uint64_t weight = IntegerWeight(y);
      if (weight == 0 || KeyAt(id) > kept.key) continue;
      each(static_cast<int>(Mul(y, kInformationUnits)), weight);
    }
  }

  // Sums what is kept by distance from `mean`: by its bits from ten on where
  // `coarse` is -1, else by the lower ones of those that have these.
  TANDEM_DEVICE void FillDistances(const SampleCut& kept, int mean,
                                   int coarse) {
    SampleBins& bins = memory_.fine;
    for (int i = g_.thread(); i < kSampleBins; i += kThreads) {
      bins.weight[i] = 0;
      bins.tally[i] = 0;
    }
    g_.Barrier();
    ForEachKept(kept, [&](int z, uint64_t weight) {
      const int distance = z < mean ? mean - z : z - mean;
      if (coarse >= 0 && distance >> 10 != coarse) return;
      const int bin = coarse < 0 ? distance >> 10 : distance & 1023;
      g_.AtomicAdd(&bins.weight[bin], weight);
      g_.AtomicAdd(&bins.tally[bin], uint64_t{1} << kTallyShift);
    });
    g_.Barrier();
  }

  // Step 8: the ids of typical information among those kept.
  TANDEM_DEVICE SampleTypical CutTypical(const SampleCut& kept) {
    uint64_t high = 0;
    uint64_t low = 0;
    ForEachKept(kept, [&](int z, uint64_t weight) {
      high += (weight >> 20) * static_cast<uint64_t>(z);
      low += (weight & 0xfffff) * static_cast<uint64_t>(z);
    });
    high = ReduceBlock(g_, high, memory_.reduce, Sum64());
    low = ReduceBlock(g_, low, memory_.reduce, Sum64());
    const int mean = MeanInformation(high, low, kept.weight);
    const double enough = static_cast<double>(params_.typical_p) *
                          static_cast<double>(kept.weight);
    const auto reached = [&](uint64_t, uint64_t weight) {
      return !(static_cast<double>(weight) < enough);
    };
    int distance = 0;
    uint64_t count = 0;
    uint64_t weight = 0;
    for (int level = 0; level < 2; ++level) {
      FillDistances(kept, mean, level == 0 ? -1 : distance);
      if (!FindBin(memory_.fine, nullptr, count, weight, reached)) break;
      count = memory_.count_before;
      weight = memory_.weight_before;
      distance = (level == 0 ? 0 : distance << 10) + memory_.bin;
      g_.Barrier();  // before any of it is written again
    }
    return {mean - distance, mean + distance};
  }

  // Steps 5 to 7; `first` is the first that may be drawn.
  TANDEM_DEVICE SampleCut CutLikely(uint64_t first) {
    const int nowhere[kSampleLevels] = {};
    Fill(memory_.coarse, 0, kNoKey, nowhere);
    SampleCut cut;
    for (int i = g_.thread(); i < kSampleBins; i += kThreads) {
      cut.weight += memory_.coarse.weight[i];
      cut.count += memory_.coarse.tally[i] >> kTallyShift;
    }
    cut.weight = ReduceBlock(g_, cut.weight, memory_.reduce, Sum64());
    cut.count = ReduceBlock(g_, cut.count, memory_.reduce, Sum64());
    if (params_.top_k > 0) {
      const uint64_t most = static_cast<uint64_t>(params_.top_k);
      Search(
          cut, [&](uint64_t count, uint64_t) { return count >= most; }, &cut);
    }
    if (params_.top_p < 1.0f) {
      const double enough =
          static_cast<double>(params_.top_p) * static_cast<double>(cut.weight);
      Search(
          cut,
          [&](uint64_t, uint64_t weight) {
            return !(static_cast<double>(weight) < enough);
          },
          &cut);
    }
    if (params_.min_p > 0.0f) {
      CutBelow(static_cast<double>(params_.min_p) * kSampleWeightOne, first,
               &cut);
    }
    return cut;
  }

  // The place of what is drawn; `first` is the first that may be.
  TANDEM_DEVICE int Draw(uint64_t first) {
    SampleCut kept;
    SampleTypical typical;
    if (params_.top_k > 0 || params_.top_p < 1.0f || params_.min_p > 0.0f ||
        params_.typical_p < 1.0f) {
      kept = CutLikely(first);
      if (params_.typical_p < 1.0f && kept.weight > 0) {
        typical = CutTypical(kept);
      }
    }
    const uint64_t winner =
        ReduceBlock(g_, Race(kept.key, typical), memory_.reduce, Least64());
    return IdOf(winner == kNoKey ? first : winner);
  }

  // Step 9, of this thread's part: the least score's bits, then its place.
  TANDEM_DEVICE uint64_t Race(uint64_t last, const SampleTypical& typical) {
    uint64_t winner = kNoKey;
    if (edited_) {
      for (int place = g_.thread(); place < count_; place += kThreads) {
        const int id = edits_[place].token_id;
        const auto bits = BitsOf(id - id / 16 % 4 * 16);
        winner = Least64()(
            winner, Score(place, last, typical,
                          bits[static_cast<size_t>(id / 16 % 4)], winner));
      }
      return winner;
    }
    // Four ids share what Philox gives.
    for (int block = g_.thread(); block < (count_ + 63) / 64 * 16;
         block += kThreads) {
      const int begin = block / 16 * 64 + block % 16;
      bool any = false;
      for (int id = begin; id < Smaller(begin + 64, count_); id += 16) {
        any = any || KeyAt(id) <= last;
      }
      if (!any) continue;
      const auto bits = BitsOf(begin);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int id = begin + word * 16;
        const uint64_t own =
            id < count_ ? Score(id, last, typical,
                                bits[static_cast<size_t>(word)], winner)
                        : kNoKey;
        winner = Least64()(winner, own);
      }
    }
    return winner;
  }
  TANDEM_DEVICE std::array<uint32_t, 4> BitsOf(int id) const {
    return SampleBits(params_.seed, params_.sequence_index, params_.position,
                      id);
  }

  // kNoKey where the place may not be drawn, or cannot win against `winner`:
  // an exponential number is no less than 1 - (bits + 1) / 2^32.
  TANDEM_DEVICE uint64_t Score(int place, uint64_t last,
                               const SampleTypical& typical, uint32_t bits,
                               uint64_t winner) const {
    const float y = Distance(LogitAt(place));
    if (IntegerWeight(y) == 0 || KeyAt(place) > last) return kNoKey;
    const int z = static_cast<int>(Mul(y, kInformationUnits));
    if (z < typical.low || z > typical.high) return kNoKey;
    const float weight = Exp(Sub(0.0f, y));
    const float least = Mul(static_cast<float>(~bits >> 1), 4.65661287e-10f);
    const float best = BitsToFloat(static_cast<uint32_t>(winner >> 32));
    if (winner != kNoKey && least > Mul(Mul(best, 1.0001f), weight)) {
      return kNoKey;
    }
    const float score = Div(Exponential(bits), weight);
    return static_cast<uint64_t>(FloatToBits(score)) << 32 |
           static_cast<uint32_t>(place);
  }

  // Of the row as the model gave it: what makes its log probabilities.
  TANDEM_DEVICE void SumUp() {
    const float best = logits_[IdOf(FirstKey())];
    uint64_t sum = 0;
    for (int id = g_.thread(); id < vocab_; id += kThreads) {
      sum += IntegerWeight(Sub(best, logits_[id]));
    }
    sum = ReduceBlock(g_, sum, memory_.reduce, Sum64());
    top_ = static_cast<double>(best);
    log_sum_ = std::log(static_cast<double>(sum) / kSampleWeightOne);
  }
  TANDEM_DEVICE float LogProb(float logit) const {
    return static_cast<float>(static_cast<double>(logit) - top_ - log_sum_);
  }

  TANDEM_DEVICE void LogProbs(int chosen_id, SampleResult& result) {
    SumUp();
    const uint64_t chosen = KeyAt(chosen_id);
    uint64_t before = 0;
    for (int id = g_.thread(); id < vocab_; id += kThreads) {
      before += KeyAt(id) < chosen ? 1 : 0;
    }
    before = ReduceBlock(g_, before, memory_.reduce, Sum64());
    ReportTop(result);
    if (g_.thread() != 0) return;
    result.logprob = LogProb(logits_[chosen_id]);
    result.rank = static_cast<int32_t>(before) + 1;
  }

  TANDEM_DEVICE void EditedLogProbs(SampleResult& result) {
    count_ = vocab_;
    SumUp();
    MakeEdits([this](float raw, const LogitEdit& edit) {
      const float edited = Edited(LogProb(raw), edit);
      return static_cast<float>(static_cast<double>(edited) +
                                (top_ + log_sum_));
    });
    if (only_edited()) count_ = params_.num_edits;
    const bool some = count_ > 0 && LogitAt(IdOf(FirstKey())) != -kInfinity;
    if (!some) {
      TakeBackEdits();
      count_ = vocab_;
    }
    if (g_.thread() == 0) result = SampleResult{};
    ReportTop(result);
    if (some) TakeBackEdits();
    if (g_.thread() != 0) return;
    result.token_id = result.top_ids[0];
    result.logprob = result.top_logprobs[0];
    result.rank = 1;
  }

  // The alternatives: the first of the places.
  TANDEM_DEVICE void ReportTop(SampleResult& result) {
    const int wanted =
        Smaller(Smaller(params_.logprobs, kMaxTopLogprobs), count_);
    // A thread's first of those that are not reported yet.
    uint64_t own = LeastAfter(0, true);
    for (int i = 0; i < wanted; ++i) {
      const uint64_t key = ReduceBlock(g_, own, memory_.reduce, Least64());
      if (own == key) own = LeastAfter(key, false);
      if (g_.thread() != 0) continue;
      const int place = IdOf(key);
      result.top_ids[i] = edited_ ? edits_[place].token_id : place;
      result.top_logprobs[i] = LogProb(LogitAt(place));
    }
    if (g_.thread() == 0) result.num_top = wanted;
  }

  // The least key among this thread's places; unless `any`, after `key`.
  TANDEM_DEVICE uint64_t LeastAfter(uint64_t key, bool any) const {
    uint64_t least = kNoKey;
    for (int place = g_.thread(); place < count_; place += kThreads) {
      const uint64_t own = KeyAt(place);
      if (any || own > key) least = Least64()(least, own);
    }
    return least;
  }

  Grid& g_;
  SampleMemory& memory_;
  float* const logits_;
  const int vocab_;
  const SampleParams params_;
  LogitEdit* const edits_;
  const uint32_t* const masks_;
  const uint32_t* mask_ = nullptr;  // of what is drawn; null: all ids may be
  bool edited_ = false;             // draws from the edits' places
  int count_ = 0;                   // places that are drawn from
  float best_ = 0.0f;               // the first of them's logit
  double top_ = 0.0;                // see LogProb
  double log_sum_ = 0.0;
};

template <int kBlockThreads>
struct SampleKernel {
  static constexpr int kThreads = kBlockThreads;
  static constexpr int kSharedBytes = static_cast<int>(sizeof(SampleMemory));
  SampleKernelParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    RowSampler<kThreads>(g, p, g.block_x()).Run(p.results[g.block_x()]);
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_SAMPLE_CUH_
