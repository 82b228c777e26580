// SPDX-License-Identifier: Apache-2.0
#include "engine/rope.h"

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

}  // namespace

std::vector<double> RopeFrequencies(const RopeSpec& rope, int head_dim) {
  std::vector<double> frequencies(head_dim / 2);
  for (int i = 0; i < head_dim / 2; ++i) {
    const double frequency = std::pow(rope.theta, -2.0 * i / head_dim);
    frequencies[i] = rope.kind == RopeSpec::Kind::kLlama3
                         ? ScaleLlama3(rope, frequency)
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
      tables.cos.push_back(static_cast<float>(std::cos(position * frequency)));
      tables.sin.push_back(static_cast<float>(std::sin(position * frequency)));
    }
  }
  return tables;
}

}  // namespace tandem::engine
