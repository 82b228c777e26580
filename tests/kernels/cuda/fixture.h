// SPDX-License-Identifier: Apache-2.0
// What tests of CUDA kernels share: values in the device's types, the ways the
// emulator can run, and streams of each generation.

#ifndef TANDEM_TESTS_KERNELS_CUDA_FIXTURE_H_
#define TANDEM_TESTS_KERNELS_CUDA_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "kernels/cuda/device/grid.h"
#include "tests/kernels/cuda/where.h"
#include "tests/kernels/fixture.h"

namespace tandem::kernels::cuda {

inline Stream StreamOf(Generation generation) {
  Stream stream;
  stream.generation = OnDevice()                          ? DeviceGeneration()
                      : generation == Generation::kHopper ? 90
                                                          : 80;
  stream.multiprocessors = 4;
  return stream;
}

// A GPU is of one: tests run on Hopper and what has the same step.
inline std::vector<Generation> Generations() {
  if (OnDevice()) return {Generation::kHopper};
  return {Generation::kAmpere, Generation::kHopper};
}

// Results must not depend on when copies land and who runs first.
inline constexpr emulator::Settings kSettings[] = {
    {emulator::Landing::kLate, emulator::Order::kForward, 1},
    {emulator::Landing::kEarly, emulator::Order::kReverse, 1},
    {emulator::Landing::kLate, emulator::Order::kRandom, 7},
};

// Back to the first of them when a test ends.
class ScopedSettings {
 public:
  explicit ScopedSettings(const emulator::Settings& settings) {
    emulator::SetSettings(settings);
  }
  ~ScopedSettings() { emulator::SetSettings(kSettings[0]); }
  ScopedSettings(const ScopedSettings&) = delete;
  ScopedSettings& operator=(const ScopedSettings&) = delete;
};

inline size_t At(int64_t i) { return static_cast<size_t>(i); }

inline float RoundedTo(DType type, float value) {
  return type == DType::kBF16  ? ToFloat(FromFloat<BFloat16>(value))
         : type == DType::kF16 ? ToFloat(FromFloat<Half>(value))
                               : value;
}
inline uint16_t BitsOf(DType type, float value) {
  return type == DType::kBF16 ? FromFloat<BFloat16>(value).bits
                              : FromFloat<Half>(value).bits;
}

// Values as the device holds them.
inline std::vector<std::byte> Encode(DType type,
                                     const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * SizeOf(type));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = BitsOf(type, values[i]);
    if (type == DType::kF32) {
      std::memcpy(&bytes[i * 4], &values[i], 4);
    } else {
      std::memcpy(&bytes[i * 2], &bits, 2);
    }
  }
  return bytes;
}
inline std::vector<float> Decode(DType type,
                                 const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / SizeOf(type));
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits;
    if (type == DType::kF32) {
      std::memcpy(&values[i], &bytes[i * 4], 4);
    } else {
      std::memcpy(&bits, &bytes[i * 2], 2);
      values[i] =
          type == DType::kBF16 ? ToFloat(BFloat16{bits}) : ToFloat(Half{bits});
    }
  }
  return values;
}

inline TensorVector VectorOf(DType type, const float* values, int count) {
  TensorVector vector;
  for (int i = 0; i < 16; ++i) {
    const uint16_t bits = i < count ? BitsOf(type, values[i]) : 0;
    if (type == DType::kF16) {
      vector.SetF16(i, bits);
    } else {
      vector.SetBf16(i, bits);
    }
  }
  return vector;
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_TESTS_KERNELS_CUDA_FIXTURE_H_
