// SPDX-License-Identifier: Apache-2.0
// What Backend::Route says, in float64 and by sorting; and the ways of choosing
// that models have.

#ifndef TANDEM_TESTS_KERNELS_ROUTE_REFERENCE_H_
#define TANDEM_TESTS_KERNELS_ROUTE_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/route.h"

namespace tandem::kernels {

inline double SigmoidReference(double x) { return 1 / (1 + std::exp(-x)); }

// The ids of the `count` largest, of equal ones the first, in any order.
inline std::vector<int> LargestReference(const std::vector<double>& values,
                                         int count) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  order.resize(static_cast<size_t>(count));
  return order;
}

// One row; `bias` in place of options.choice_bias, empty: none; `scales` in
// that of expert_scales.
inline std::vector<double> RouteReference(
    const RouteOptions& options, const std::vector<float>& bias,
    const float* logits, const std::vector<float>& scales = {}) {
  const auto experts = static_cast<size_t>(options.experts);
  std::vector<double> scores(experts), choice(experts);
  double all = 0;
  for (size_t i = 0; i < experts; ++i) all += std::exp(double{logits[i]});
  for (size_t i = 0; i < experts; ++i) {
    scores[i] = options.sigmoid ? SigmoidReference(logits[i])
                                : std::exp(double{logits[i]}) / all;
    choice[i] = scores[i] + (bias.empty() ? 0 : bias[i]);
  }
  if (options.groups > 1) {
    const size_t size = experts / static_cast<size_t>(options.groups);
    std::vector<double> sums;
    for (size_t begin = 0; begin < experts; begin += size) {
      std::vector<double> group(
          choice.begin() + static_cast<long>(begin),
          choice.begin() + static_cast<long>(begin + size));
      std::sort(group.rbegin(), group.rend());
      sums.push_back(group[0] + (options.group_scores == 1 ? 0 : group[1]));
    }
    const auto chosen = LargestReference(sums, options.chosen_groups);
    for (size_t i = 0; i < experts; ++i) {
      const auto group = static_cast<int>(i / size);
      if (std::find(chosen.begin(), chosen.end(), group) == chosen.end()) {
        choice[i] = -1e9;
      }
    }
  }
  std::vector<double> weights(static_cast<size_t>(options.weights()));
  double sum = 0;
  for (const int i : LargestReference(choice, options.chosen)) {
    weights[static_cast<size_t>(i)] = scores[static_cast<size_t>(i)];
    sum += scores[static_cast<size_t>(i)];
  }
  for (size_t i = 0; i < experts; ++i) {
    weights[i] *= options.scale / (options.normalise ? sum : 1) *
                  (scales.empty() ? 1 : scales[i]);
  }
  if (options.shared == SharedExpert::kWhole) weights.back() = 1;
  if (options.shared == SharedExpert::kGated) {
    weights.back() = SigmoidReference(logits[options.experts]);
  }
  return weights;
}

// Of 12 experts, as families have them (whether a bias is added to compare is
// the caller's).
inline std::vector<RouteOptions> RouteCases() {
  return {
      {.experts = 12, .chosen = 1},
      {.experts = 12, .chosen = 5, .normalise = true},
      {.experts = 12, .chosen = 12},
      {.experts = 12, .chosen = 4, .shared = SharedExpert::kGated},
      {.experts = 12,
       .chosen = 3,
       .normalise = true,
       .shared = SharedExpert::kWhole},
      {.experts = 12, .chosen = 4, .sigmoid = true, .scale = 2.5f},
      {.experts = 12, .chosen = 4, .normalise = true, .sigmoid = true},
      {.experts = 12,
       .chosen = 4,
       .normalise = true,
       .sigmoid = true,
       .groups = 4,
       .chosen_groups = 2,
       .scale = 1.5f,
       .shared = SharedExpert::kWhole},
      {.experts = 12, .chosen = 2, .groups = 3, .chosen_groups = 1},
      {.experts = 12,
       .chosen = 3,
       .groups = 4,
       .chosen_groups = 2,
       .group_scores = 1,
       .scale = 16},
  };
}

}  // namespace tandem::kernels

#endif  // TANDEM_TESTS_KERNELS_ROUTE_REFERENCE_H_
