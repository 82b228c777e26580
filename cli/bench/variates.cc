// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/variates.h"

#include <cmath>

namespace tandem::bench {
namespace {

// In (0, 1], so that its logarithm is finite.
double PositiveUniform(Random* random) { return 1.0 - random->Uniform(); }

}  // namespace

double DrawNormal(Random* random) {
  const double radius = std::sqrt(-2 * std::log(PositiveUniform(random)));
  return radius * std::cos(2 * M_PI * random->Uniform());
}

double DrawGammaOfMeanOne(double shape, Random* random) {
  // Below 1 the method does not hold: a gamma of shape + 1 times U^(1/shape).
  const double boosted = shape < 1 ? shape + 1 : shape;
  const double d = boosted - 1.0 / 3;
  const double c = 1 / std::sqrt(9 * d);
  double value = 0;
  for (;;) {
    const double normal = DrawNormal(random);
    const double root = 1 + c * normal;
    if (root <= 0) continue;
    const double cube = root * root * root;
    if (std::log(PositiveUniform(random)) <
        normal * normal / 2 + d - d * cube + d * std::log(cube)) {
      value = d * cube;
      break;
    }
  }
  if (shape < 1) value *= std::pow(PositiveUniform(random), 1 / shape);
  return value / shape;
}

}  // namespace tandem::bench
