// SPDX-License-Identifier: Apache-2.0
// How a row chooses among experts: one function for host and device, so that
// every backend chooses alike, whatever is nearly equal.

#ifndef TANDEM_KERNELS_ROUTE_H_
#define TANDEM_KERNELS_ROUTE_H_

#include <cstdint>
#include <limits>

namespace tandem::kernels {

inline constexpr int kMostExperts = 1024;
inline constexpr int kMostExpertGroups = 32;

// What all rows take beside the experts that they choose.
enum class SharedExpert : uint8_t {
  kNone,
  kWhole,  // once
  kGated,  // times the sigmoid of a logit of its own
};

struct RouteOptions {
  int experts = 0;
  int chosen = 0;          // of them by each row
  bool normalise = false;  // the weights of those chosen add up to one
  bool sigmoid = false;    // scores are sigmoids of logits, else their softmax
  // [experts], device: added to scores to compare them, and nowhere else. Null:
  // nothing is
  const float* choice_bias = nullptr;
  // Experts lie in so many groups, one behind the other. Those of the
  // `chosen_groups` whose two best add up to most are compared, no others
  // (DeepSeek-V3, section 2.1.2); or whose best one is (DeepSeek-V2, 2.2.2).
  int groups = 1;
  int chosen_groups = 1;
  int group_scores = 2;  // best ones that count, or 1
  float scale = 1;       // of the weights
  // [experts], device: of each expert's weight by itself. Null: none
  const float* expert_scales = nullptr;
  SharedExpert shared = SharedExpert::kNone;

  // Columns of a row of logits: a gate's is behind the experts'.
  constexpr int logits() const {
    return experts + (shared == SharedExpert::kGated ? 1 : 0);
  }
  // Of a row of weights: what all rows take is behind the experts.
  constexpr int weights() const {
    return experts + (shared == SharedExpert::kNone ? 0 : 1);
  }
};

template <typename Exp>
constexpr float RouteSigmoid(Exp exp, float x) {
  return 1.0f / (1.0f + exp(0.0f - x));
}

// Of so many values the largest, and of equal ones the first; of NaNs any.
constexpr int LargestOf(int count, const float* values, const uint32_t* taken) {
  int best = -1;
  for (int i = 0; i < count; ++i) {
    if ((taken[i / 32] >> (i % 32) & 1u) != 0) continue;
    if (best < 0 || values[i] > values[best]) best = i;
  }
  return best;
}

// Of values [experts] those in groups that are not chosen become -inf.
constexpr void HideGroups(const RouteOptions& o, float* values) {
  const int size = o.experts / o.groups;
  float sums[kMostExpertGroups] = {};
  for (int group = 0; group < o.groups; ++group) {
    float first = -std::numeric_limits<float>::infinity();
    float second = first;
    for (int i = group * size; i < (group + 1) * size; ++i) {
      if (values[i] > first) {
        second = first;
        first = values[i];
      } else if (values[i] > second) {
        second = values[i];
      }
    }
    sums[group] = o.group_scores == 1 ? first : first + second;
  }
  uint32_t chosen = 0;
  for (int n = 0; n < o.chosen_groups; ++n) {
    chosen |= 1u << LargestOf(o.groups, sums, &chosen);
  }
  for (int i = 0; i < o.groups * size; ++i) {
    if ((chosen >> (i / size) & 1u) == 0) {
      values[i] = -std::numeric_limits<float>::infinity();
    }
  }
}

// One row of Backend::Route. `exp` is the backend's own.
template <typename Exp>
constexpr void RouteRow(const RouteOptions& o, Exp exp, const float* logits,
                        float* weights) {
  float most = logits[0];
  for (int i = 1; i < o.experts; ++i) {
    most = logits[i] > most ? logits[i] : most;
  }
  // Of the softmax without its denominator, which is `all`.
  const auto score = [&](int i) {
    return o.sigmoid ? RouteSigmoid(exp, logits[i]) : exp(logits[i] - most);
  };
  float all = o.sigmoid ? 1.0f : 0.0f;
  for (int i = 0; !o.sigmoid && i < o.experts; ++i) all = all + score(i);

  // Where nothing is added, logits compare as scores do.
  float* const values = weights;
  for (int i = 0; i < o.experts; ++i) {
    values[i] = o.choice_bias == nullptr && o.groups == 1
                    ? logits[i]
                    : score(i) / all +
                          (o.choice_bias == nullptr ? 0 : o.choice_bias[i]);
  }
  if (o.groups > 1) HideGroups(o, values);
  uint32_t taken[kMostExperts / 32] = {};
  for (int n = 0; n < o.chosen; ++n) {
    const int best = LargestOf(o.experts, values, taken);
    taken[best / 32] |= 1u << (best % 32);
  }

  float sum = 0;
  for (int i = 0; i < o.experts; ++i) {
    weights[i] = (taken[i / 32] >> (i % 32) & 1u) != 0 ? score(i) : 0.0f;
    sum = sum + weights[i];
  }
  // Sigmoids may all be zero.
  const float whole = !o.normalise ? all : o.sigmoid ? sum + 1e-20f : sum;
  for (int i = 0; i < o.experts; ++i) {
    weights[i] = weights[i] / whole * o.scale;
    if (o.expert_scales != nullptr) weights[i] *= o.expert_scales[i];
  }
  if (o.shared == SharedExpert::kWhole) weights[o.experts] = 1;
  if (o.shared == SharedExpert::kGated) {
    weights[o.experts] = RouteSigmoid(exp, logits[o.experts]);
  }
}

}  // namespace tandem::kernels

#endif  // TANDEM_KERNELS_ROUTE_H_
