// SPDX-License-Identifier: Apache-2.0
// Randomness that decides something (ids, keys, tie-breaks, jitter) comes in
// through this interface, so that a simulation can replay it from a seed.
// Token sampling does not use it: that is a pure function of the request.

#ifndef TANDEM_COMMON_RANDOM_H_
#define TANDEM_COMMON_RANDOM_H_

#include <cstdint>
#include <string>

namespace tandem {

class Random {
 public:
  virtual ~Random() = default;

  virtual uint64_t Next() = 0;  // 64 uniform bits

  // Uniform in [0, n). REQUIRES: n > 0.
  uint64_t Below(uint64_t n) {
    const uint64_t limit = n * (UINT64_MAX / n);
    uint64_t value = Next();
    while (value >= limit) value = Next();
    return value % n;
  }
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

  // `n` random bytes, for request ids (16), incarnations (16) and keys (32).
  std::string Bytes(int n) {
    std::string bytes;
    while (static_cast<int>(bytes.size()) < n) {
      uint64_t value = Next();
      for (int i = 0; i < 8 && static_cast<int>(bytes.size()) < n; ++i) {
        bytes.push_back(static_cast<char>(value >> (8 * i)));
      }
    }
    return bytes;
  }
};

// The operating system's generator (getrandom): what processes run on.
class SystemRandom final : public Random {
 public:
  uint64_t Next() override;
};

// SplitMix64: what simulations and tests run on.
class SeededRandom final : public Random {
 public:
  explicit SeededRandom(uint64_t seed) : state_(seed) {}
  uint64_t Next() override;

 private:
  uint64_t state_;
};

// A random UUID (version 4), 36 characters.
std::string Uuid(Random* random);

}  // namespace tandem

#endif  // TANDEM_COMMON_RANDOM_H_
