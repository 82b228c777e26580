// SPDX-License-Identifier: Apache-2.0
// What Sample draws, exactly, so that any backend (and a NumPy test) can say
// the same. Per row of logits x[0..vocab), with parameters p:
//
// 1. Edits: for each of the row's edits e, in f32, one rounding per operation,
//    x[e.token_id] = EditedLogit(x[e.token_id], e); where p.only_edited is set,
//    x of all other ids is -inf. Mask: where p.mask >= 0, x of all ids that the
//    mask does not name is -inf. If the first in the order (2) is -inf now,
//    nothing may be drawn, and the edits are void; if it still is, the mask is
//    void as well.
// 2. Order: all ids by logit descending, ties by id ascending, NaNs at the end.
// 3. p.temperature == 0: the first in the order. Otherwise
// 4. Temperature: y = (x[first] - x[i]) / temperature, in f32, one rounding
//    per operation; weight = floor(exp(-y) * 2^40), an integer (so sums have
//    no order). Ids of weight 0, less likely than the first by 2^-40, are
//    never drawn and do not count below.
// 5. top_k > 0: only the first top_k in the order stay, exactly that many.
// 6. top_p < 1: of those, with T their total weight, the i-th stays while the
//    weights before it sum to less than top_p * T (f64). One always stays.
// 7. min_p > 0: of those, all before the first with weight < min_p * 2^40
//    (f64).
// 8. typical_p < 1: of those, the ids whose information is nearest to its
//    mean (Meister et al., "Locally typical sampling", 2022). Information is y
//    but for a constant, here z = floor(y * 2^16), an integer; the mean is m =
//    floor(sum of weight * z / T), both sums exact and then rounded to f64.
//    With d the least integer such that the weights of |z - m| <= d sum to at
//    least typical_p * T (f64), those ids stay: a stretch of the order.
// 9. Draw: of what is left, the id with the least E / exp(-y), in f32, ties by
//    id ascending. E = Exponential(R) is an exponentially distributed number
//    of the id's own, made of 32 random bits R. In such a race each id wins
//    with its share of the weights (it is Gumbel's trick, as in Yellott, 1977,
//    without a logarithm of weights); and two rows whose weights are alike
//    mostly draw the same id, whatever the order, which a draft model needs.
//
// R is a pure function of (seed, sequence_index, position, id): Philox4x32-10
// with key (seed low, seed high) and counter (position, sequence_index, id / 64
// * 16 + id % 16, kPurposeSample) gives four words, and R is the one of number
// id / 16 % 4: so 16 blocks make the bits of 64 ids in a row.
//
// Where p.given >= 0 the token is that one, whatever steps 1 to 9 would draw.
// There and where p.edited_logprobs != 0, no mask is looked at.
//
// Where p.logprobs >= 0: logprob = x[id] - x_max - log(sum of
// exp(x[j] - x_max)) over all ids, of the logits before step 1 and before
// temperature, with the sum in the same integers; rank = 1 + ids before it in
// the order of these logits; the first p.logprobs (at most kMaxTopLogprobs) of
// that order are the alternatives. Otherwise logprob, rank and num_top are 0.
//
// Where p.edited_logprobs != 0 nothing is drawn (what a beam search
// adds up, as in Hugging Face): the edits are made to the log probabilities,
// not to the logits, so that those of other ids do not change. With c = x_max +
// log(sum) (f64), l the log probability of an id with an edit (f32), x[id] =
// EditedLogit(l, e) + c (f64, rounded once); where p.only_edited is set, there
// are no other ids. If the first in the order is -inf now, this is void. Rank,
// order and the alternatives' log probabilities, x - x_max - log(sum) with
// these two as before, are then those of this x, and id is its first.

#ifndef TANDEM_KERNELS_SAMPLING_H_
#define TANDEM_KERNELS_SAMPLING_H_

#include <array>
#include <cstdint>

#include "kernels/types.h"

namespace tandem::kernels {

// Keeps streams drawn from one seed for different ends apart.
inline constexpr uint32_t kPurposeSample = 0;

// 2^40: the weight of the most probable id.
inline constexpr double kSampleWeightOne = 1099511627776.0;

// Step 8's units of information per nat, and more of them than any id of
// weight above 0 has.
inline constexpr float kInformationUnits = 65536.0f;
inline constexpr int kInformationEnd = 28 << 16;

// Step 1. Biases come before penalties, as in Hugging Face and vLLM.
constexpr float EditedLogit(float logit, const LogitEdit& edit) {
  logit = logit + edit.bias;
  if (edit.repetition != 1.0f) {
    logit = logit > 0.0f ? logit / edit.repetition : logit * edit.repetition;
  }
  return logit - edit.penalty;
}

// floor(sum of weight * z / sum of weight), of the sums of the weights' high
// parts (from 2^20 on) times z, of their low parts times z, and of the
// weights.
constexpr int MeanInformation(uint64_t high, uint64_t low, uint64_t weight) {
  return static_cast<int>(
      (static_cast<double>(high) * 1048576.0 + static_cast<double>(low)) /
      static_cast<double>(weight));
}

// Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2,
// 3" (2011).
constexpr std::array<uint32_t, 4> Philox(std::array<uint32_t, 4> counter,
                                         uint64_t key) {
  uint32_t key0 = static_cast<uint32_t>(key);
  uint32_t key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key0,
               static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key1,
               static_cast<uint32_t>(a)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// Of the ids id, id + 16, id + 32 and id + 48, where id / 16 % 4 is 0.
constexpr std::array<uint32_t, 4> SampleBits(uint64_t seed,
                                             uint32_t sequence_index,
                                             int32_t position, int id) {
  const uint32_t block = static_cast<uint32_t>(id / 64 * 16 + id % 16);
  return Philox(
      {static_cast<uint32_t>(position), sequence_index, block, kPurposeSample},
      seed);
}

// -log of the uniform number (bits + 1/2) / 2^32, relative error below 3e-7,
// the same bits everywhere: that number is u / 2^n with u in [1/2, 1), and
// -log(u) = 2 artanh(z) with z = (1 - u) / (1 + u), by its series. Numbers near
// 0, which decide a race, are as exact as others.
constexpr float Exponential(uint32_t bits) {
  constexpr uint64_t kOne = uint64_t{1} << 33;
  uint64_t u = 2 * uint64_t{bits} + 1;
  int n = 0;
  for (; u < kOne / 2; u *= 2) ++n;
  const float rest = static_cast<float>(kOne - u) * (1.0f / 8589934592.0f);
  const float z = rest / (2.0f - rest);
  const float square = z * z;
  float sum = 1.0f / 15;
  for (int odd = 13; odd > 0; odd -= 2) {
    sum = sum * square + 1.0f / static_cast<float>(odd);
  }
  return static_cast<float>(n) * 0.693147181f + 2.0f * z * sum;
}

}  // namespace tandem::kernels

#endif  // TANDEM_KERNELS_SAMPLING_H_
