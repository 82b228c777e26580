// SPDX-License-Identifier: Apache-2.0
// Sample's rows, as kernels/sampling.h says: edits, masks and log probabilities
// around the draw (draw-inl.h). Edits are made in the row itself and taken back
// after the draw; where only those with one may be drawn, or those of a mask,
// the draw is from a copy in which all others are -inf.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/sample.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/draw-inl.h"
// clang-format on

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/kernel_table.h"
#include "kernels/sampling.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// What makes log probabilities of a row's logits.
struct LogSum {
  double best;
  double log_sum;

  explicit LogSum(const Row& row)
      : best(static_cast<double>(row.best)),
        log_sum(std::log(static_cast<double>(row.SumOfWeights()) /
                         kSampleWeightOne)) {}
  float LogProb(float logit) const {
    return static_cast<float>(static_cast<double>(logit) - best - log_sum);
  }
  float Logit(float log_prob) const {
    return static_cast<float>(static_cast<double>(log_prob) + (best + log_sum));
  }
};

// The first ones of those that it is told of.
class Alternatives {
 public:
  explicit Alternatives(int wanted)
      : wanted_(std::min(wanted, kMaxTopLogprobs)) {}

  void Add(const Candidate& own) {
    if (wanted_ == 0 || std::isnan(own.logit)) return;
    if (count_ == wanted_ && !Before(own, top_[count_ - 1])) return;
    int at = count_;
    while (at > 0 && Before(own, top_[at - 1])) --at;
    for (int i = count_; i > at; --i) top_[i] = top_[i - 1];
    top_[at] = own;
    if (count_ < wanted_) ++count_;
  }

  void AddFirstOf(Row& row) {
    row.ForEachFrom(row.BoundOf(std::max(wanted_, 1)),
                    [&](int id, float, float) {
                      Add({row.logits[id], id});
                    });
  }

  void Report(const LogSum& sum, SampleResult& result) const {
    result.num_top = count_;
    for (int i = 0; i < count_; ++i) {
      result.top_ids[i] = top_[i].id;
      result.top_logprobs[i] = sum.LogProb(top_[i].logit);
    }
  }

  // There is one that may be drawn.
  bool some() const { return count_ > 0 && top_[0].logit != kMinusInfinity; }

 private:
  const int wanted_;
  int count_ = 0;
  Candidate top_[kMaxTopLogprobs + 1];
};

void LookAt(Row& row, const float* logits, int vocab) {
  row.logits = logits;
  row.size = vocab;
  row.temperature = 1.0f;
  row.FindBest();
}

void LogProbs(const SamplePiece& p, Row& row, SampleResult& result) {
  LookAt(row, p.logits, p.vocab);
  const LogSum sum(row);
  const Candidate chosen{p.logits[result.token_id], result.token_id};
  Alternatives alternatives(p.params->logprobs);
  if (p.params->logprobs > 0) alternatives.AddFirstOf(row);
  alternatives.Report(sum, result);
  result.logprob = sum.LogProb(chosen.logit);
  result.rank = row.CountBefore(chosen) + 1;
}

// With `memory` for one float of each edit.
void EditedLogProbs(const SamplePiece& p, Row& row, float* memory,
                    SampleResult& result) {
  LookAt(row, p.logits, p.vocab);
  const LogSum sum(row);
  const LogitEdit* const edits = p.edits + p.params->first_edit;
  const int count = p.params->num_edits;
  for (int i = 0; i < count; ++i) {
    float& logit = p.logits[edits[i].token_id];
    memory[i] = logit;
    logit = sum.Logit(EditedLogit(sum.LogProb(logit), edits[i]));
  }
  Alternatives edited(p.params->logprobs);
  if (p.params->only_edited != 0) {
    for (int i = 0; i < count; ++i) {
      const int32_t id = edits[i].token_id;
      edited.Add({p.logits[id], id});
    }
  } else {
    row.FindBest();
    edited.AddFirstOf(row);
  }
  for (int i = 0; i < count; ++i) p.logits[edits[i].token_id] = memory[i];
  if (edited.some()) {
    edited.Report(sum, result);
  } else {
    Alternatives raw(p.params->logprobs);
    row.FindBest();
    raw.AddFirstOf(row);
    raw.Report(sum, result);
  }
  result.token_id = result.top_ids[0];
  result.logprob = result.top_logprobs[0];
  result.rank = 1;
}

// The mask of a row; null: it has none.
const uint32_t* MaskOf(const SamplePiece& p) {
  return p.params->mask < 0
             ? nullptr
             : p.masks + int64_t{p.params->mask} * MaskWords(p.vocab);
}

bool Names(const uint32_t* mask, int id) {
  return (mask[id / 32] >> (id % 32) & 1) != 0;
}

// Copies a row, with -inf for what its mask does not name.
void Hide(const float* logits, int vocab, const uint32_t* mask, float* out) {
  const F32 d;
  const Vec hidden = hn::Set(d, kMinusInfinity);
  const auto* const bytes = reinterpret_cast<const uint8_t*>(mask);
  int id = 0;
  for (; id + kLanes <= vocab; id += kLanes) {
    uint8_t named[8] = {};
    std::memcpy(named, bytes + id / 8, kLanes / 8);
    hn::StoreU(hn::IfThenElse(hn::LoadMaskBits(d, named),
                              hn::LoadU(d, logits + id), hidden),
               d, out + id);
  }
  for (; id < vocab; ++id) {
    out[id] = Names(mask, id) ? logits[id] : kMinusInfinity;
  }
}

// The id that is drawn from a row; -1 where its first is -inf.
int DrawFrom(Sampler& sampler, const float* logits, int vocab,
             const SampleParams& params) {
  sampler.row.logits = logits;
  sampler.row.size = vocab;
  return Draw(sampler, params);
}

// With `hidden` for a row.
int DrawMasked(const SamplePiece& p, Sampler& sampler, float* hidden) {
  const uint32_t* const mask = MaskOf(p);
  if (mask != nullptr) Hide(p.logits, p.vocab, mask, hidden);
  return DrawFrom(sampler, mask != nullptr ? hidden : p.logits, p.vocab,
                  *p.params);
}

// Step 1 and the draw after it, with `memory` for one float of each edit, and
// `hidden` for a row.
int DrawEdited(const SamplePiece& p, Sampler& sampler, float* memory,
               float* hidden) {
  const uint32_t* const mask = MaskOf(p);
  const LogitEdit* const edits = p.edits + p.params->first_edit;
  const int count = p.params->num_edits;
  if (p.params->only_edited != 0) {
    std::fill(hidden, hidden + p.vocab, kMinusInfinity);
    for (int i = 0; i < count; ++i) {
      const int32_t id = edits[i].token_id;
      if (mask != nullptr && !Names(mask, id)) continue;
      hidden[id] = EditedLogit(p.logits[id], edits[i]);
    }
    return DrawFrom(sampler, hidden, p.vocab, *p.params);
  }
  for (int i = 0; i < count; ++i) {
    float& logit = p.logits[edits[i].token_id];
    memory[i] = logit;
    logit = EditedLogit(logit, edits[i]);
  }
  const int id = DrawMasked(p, sampler, hidden);
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
    EditedLogProbs(p, sampler.row, memory, result);
    return;
  }
  float* const hidden = memory + kMaxVocab;
  int id = p.params->given;
  if (id < 0 && p.params->num_edits > 0) {
    id = DrawEdited(p, sampler, memory, hidden);
  }
  if (id < 0) id = DrawMasked(p, sampler, hidden);
  if (id < 0) id = DrawFrom(sampler, p.logits, p.vocab, *p.params);
  result.token_id = std::max(id, 0);
  if (p.params->logprobs >= 0) LogProbs(p, sampler.row, result);
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
