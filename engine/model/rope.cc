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
double DynamicTheta(const RopeSpec& rope, int head_dim) {
  const double original = rope.original_max_positions;
  const double served = std::max<double>(original, rope.served_positions);
  const double stretch = rope.factor * served / original - (rope.factor - 1);
  return rope.theta * std::pow(stretch, head_dim / (head_dim - 2.0));
}

// YaRN (Peng et al., 2023): the pairs that turn more than beta_fast times
// within the original positions are kept, those that turn less than beta_slow
// times are divided by the factor, between is a linear ramp over pairs.
double ScaleYarn(const RopeSpec& rope, int head_dim, int pair,
                 double frequency) {
  const auto pair_of = [&](double turns) {
    return head_dim *
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
  high = std::min(high, head_dim - 1.0);
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
  const double theta =
      rope.kind == Kind::kDynamic ? DynamicTheta(rope, head_dim) : rope.theta;
  std::vector<double> frequencies(head_dim / 2);
  for (int i = 0; i < head_dim / 2; ++i) {
    const double frequency = std::pow(theta, -2.0 * i / head_dim);
    frequencies[i] = rope.kind == Kind::kLinear ? frequency / rope.factor
                     : rope.kind == Kind::kYarn
                         ? ScaleYarn(rope, head_dim, i, frequency)
                     : rope.kind == Kind::kLongRope ? frequency / factors[i]
                     : rope.kind == Kind::kLlama3 ? ScaleLlama3(rope, frequency)
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
    for (const double frequency : frequencies) {
      const double angle = position * frequency;
      tables.cos.push_back(
          static_cast<float>(std::cos(angle) * rope.attention_factor));
      tables.sin.push_back(
          static_cast<float>(std::sin(angle) * rope.attention_factor));
    }
  }
  return tables;
}

}  // namespace tandem::engine
