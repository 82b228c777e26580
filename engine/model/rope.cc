// SPDX-License-Identifier: Apache-2.0
#include "engine/model/rope.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>

namespace tandem::engine {
namespace {

// Stretches long wavelengths, keeps short ones, and blends between (the
// context extension of Llama 3.1).
double ScaleLlama3(const RopeSpec& rope, double frequency) {
  const double wavelength = 2 * std::numbers::pi / frequency;
  const double original = rope.original_max_positions;
  if (wavelength < original / rope.high_freq_factor) return frequency;
  if (wavelength > original / rope.low_freq_factor) {
    return frequency / rope.factor;
  }
  const double smooth = (original / wavelength - rope.low_freq_factor) /
                        (rope.high_freq_factor - rope.low_freq_factor);
  return (1 - smooth) * frequency / rope.factor + smooth * frequency;
}

// NTK-aware scaling by a larger theta, such that the longest wavelength is
// stretched as far as served positions go beyond the original ones.
double DynamicTheta(const RopeSpec& rope, int dim) {
  const double original = rope.original_max_positions;
  const double served = std::max<double>(original, rope.served_positions);
  const double stretch = rope.factor * served / original - (rope.factor - 1);
  return rope.theta * std::pow(stretch, dim / (dim - 2.0));
}

// YaRN (Peng et al., 2023): the pairs that turn more than beta_fast times
// within the original positions are kept, those that turn less than beta_slow
// times are divided by the factor, between is a linear ramp over pairs.
double ScaleYarn(const RopeSpec& rope, int dim, int pair, double frequency) {
  const auto pair_of = [&](double turns) {
    return dim *
           std::log(rope.original_max_positions /
                    (turns * 2 * std::numbers::pi)) /
           (2 * std::log(rope.theta));
  };
  double low = pair_of(rope.beta_fast);
  double high = pair_of(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1.0);
  if (low == high) high += 0.001;
  const double ramp = std::clamp((pair - low) / (high - low), 0.0, 1.0);
  return frequency / rope.factor * ramp + frequency * (1 - ramp);
}

}  // namespace

std::vector<double> RopeFrequencies(const RopeSpec& rope, int head_dim) {
  using Kind = RopeSpec::Kind;
  const std::vector<double>& factors =
      rope.served_positions > rope.original_max_positions ? rope.long_factors
                                                          : rope.short_factors;
  const int dim = rope.turned(head_dim);
  const double theta =
      rope.kind == Kind::kDynamic ? DynamicTheta(rope, dim) : rope.theta;
  const bool proportional = rope.kind == Kind::kProportional;
  const int period = proportional ? head_dim : dim;
  std::vector<double> frequencies(dim / 2);
  for (int i = 0; i < dim / 2; ++i) {
    const double frequency = std::pow(theta, -2.0 * i / period);
    frequencies[i] =
        rope.kind == Kind::kLinear || proportional ? frequency / rope.factor
        : rope.kind == Kind::kYarn     ? ScaleYarn(rope, dim, i, frequency)
        : rope.kind == Kind::kLongRope ? frequency / factors[i]
        : rope.kind == Kind::kLlama3   ? ScaleLlama3(rope, frequency)
                                       : frequency;
  }
  return frequencies;
}

RopeTables MakeRopeTables(const RopeSpec& rope, int head_dim, int positions) {
  const std::vector<double> frequencies = RopeFrequencies(rope, head_dim);
  RopeTables tables;
  const size_t size = static_cast<size_t>(positions) * frequencies.size();
  tables.cos.reserve(size);
  tables.sin.reserve(size);
  for (int position = 0; position < positions; ++position) {
    for (size_t i = 0; i < frequencies.size(); ++i) {
      const double angle = position * frequencies[i];
      tables.cos.push_back(
          static_cast<float>(std::cos(angle) * rope.attention_factor));
      tables.sin.push_back(
          static_cast<float>(std::sin(angle) * rope.attention_factor));
    }
  }
  return tables;
}

std::vector<float> QueryScales(const RopeSpec& rope, int positions) {
  std::vector<float> scales;
  if (rope.query_beta == 0) return scales;
  for (int position = 0; position < positions; ++position) {
    const int times = position / rope.original_max_positions;
    scales.push_back(
        static_cast<float>(1 + rope.query_beta * std::log(1.0 + times)));
  }
  return scales;
}

std::vector<int> RotaryOrder(const RopeSpec& rope, int head_dim, int heads) {
  std::vector<int> order;
  const bool in_place = rope.turned(head_dim) == head_dim ||
                        rope.kind == RopeSpec::Kind::kProportional;
  if (in_place && !rope.interleaved) return order;
  const int half = head_dim / 2;
  const int pairs = rope.turned(head_dim) / 2;
  for (int head = 0; head < heads; ++head) {
    for (int place = 0; place < head_dim; ++place) {
      const int pair = place % half;
      const int second = place / half;
      const int turning =
          rope.interleaved ? 2 * pair + second : second * pairs + pair;
      const int row = pair < pairs
                          ? turning
                          : 2 * pairs + second * (half - pairs) + pair - pairs;
      const int before = rope.trailing ? head_dim - 2 * pairs : 0;
      order.push_back(head * head_dim + (before + row) % head_dim);
    }
  }
  return order;
}

std::vector<int> FusedOrder(const RopeSpec& rope, int head_dim, int heads,
                            int kv_heads, bool in_groups) {
  std::vector<int> turned = RotaryOrder(rope, head_dim, heads + kv_heads);
  if (!in_groups) return turned;
  const int queries = heads / kv_heads;  // of a group
  std::vector<int> order;
  for (int head = 0; head < heads + 2 * kv_heads; ++head) {
    const int rest = head - heads;
    const int group = rest < 0 ? head / queries : rest % kv_heads;
    const int within = rest < 0 ? head % queries : queries + rest / kv_heads;
    const int first = (group * (queries + 2) + within) * head_dim;
    const bool turns = rest < kv_heads && !turned.empty();
    for (int i = 0; i < head_dim; ++i) {
      order.push_back(first + (turns ? turned[i] : i));
    }
  }
  return order;
}

}  // namespace tandem::engine
