// SPDX-License-Identifier: Apache-2.0
// What kernel tests share: backends of every kind at hand, device arrays that
// are filled from and read into vectors, and seeded numbers.

#ifndef TANDEM_TESTS_KERNELS_FIXTURE_H_
#define TANDEM_TESTS_KERNELS_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/quantise.h"
#include "tests/sanitized.h"

namespace tandem::kernels {

// Null where this CPU lacks the instruction set.
inline std::unique_ptr<Backend> MakeBackend(
    const std::string& isa = "auto", int threads = 1,
    CpuInputs inputs = CpuInputs::kF32) {
  CpuOptions options;
  options.inputs = inputs;
  options.instruction_set = isa;
  options.threads = threads;
  // No bit may show how memory is read either.
  if (threads == 1) options.fetching = CpuFetching::kIntel;
  if (threads == 2) options.fetching = CpuFetching::kAmd;
  auto backend = NewCpuBackend(options);
  return backend.ok() ? *std::move(backend) : nullptr;
}

constexpr const char* Name(CpuInputs inputs) {
  return inputs == CpuInputs::kF32    ? "f32"
         : inputs == CpuInputs::kBf16 ? "bf16"
                                      : "bf16_amx";
}
// All that read bf16 weights and caches in a way of their own.
inline constexpr CpuInputs kAllInputs[] = {CpuInputs::kF32, CpuInputs::kBf16,
                                           CpuInputs::kBf16Amx};

// The configurations that must all give the same bits.
struct Config {
  const char* isa;
  int threads;
};
inline const std::vector<Config>& AllConfigs() {
  // Under sanitizers arithmetic takes several times as long.
  static const std::vector<Config> configs =
      kSanitized ? std::vector<Config>{{"avx2", 2}, {"avx512", 1}, {"auto", 5}}
                 : std::vector<Config>{{"avx2", 1},
                                       {"avx2", 2},
                                       {"avx512", 1},
                                       {"avx512", 2},
                                       {"auto", 5}};
  return configs;
}

// One backend and queue, with helpers that block.
class Device {
 public:
  explicit Device(std::unique_ptr<Backend> backend)
      : backend_(std::move(backend)), queue_(backend_->NewQueue("test")) {}

  Backend& operator*() { return *backend_; }
  Backend* operator->() { return backend_.get(); }
  Queue& queue() { return *queue_; }

  template <typename T>
  T* Upload(const std::vector<T>& values) {
    T* const device = New<T>(values.size());
    backend_->CopyToDevice(*queue_, device, values.data(),
                           values.size() * sizeof(T));
    queue_->Synchronize();
    return device;
  }
  template <typename T>
  T* New(size_t count) {
    buffers_.push_back(*backend_->Allocate(count * sizeof(T) + 64));
    return reinterpret_cast<T*>(buffers_.back()->data());
  }
  template <typename T>
  std::vector<T> Download(const T* device, size_t count) {
    std::vector<T> values(count);
    backend_->CopyToHost(*queue_, values.data(), device, count * sizeof(T));
    queue_->Synchronize();
    return values;
  }
  Matrix& Pack(const std::vector<float>& values, int rows, int cols,
               DType dtype) {
    const HostTensor source{reinterpret_cast<const std::byte*>(values.data()),
                            DType::kF32, rows, cols};
    matrices_.push_back(*backend_->PackMatrix(source, dtype));
    return *matrices_.back();
  }
  Matrix& PackGated(const std::vector<float>& values, int rows, int cols,
                    DType dtype) {
    const HostTensor source{reinterpret_cast<const std::byte*>(values.data()),
                            DType::kF32, rows, cols};
    matrices_.push_back(*backend_->PackGatedMatrix(source, dtype));
    return *matrices_.back();
  }

  Matrix& PackCodes(const HostCodes& source) {
    matrices_.push_back(*backend_->PackCodes(source));
    return *matrices_.back();
  }

 private:
  std::unique_ptr<Backend> backend_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<std::unique_ptr<Matrix>> matrices_;
  std::unique_ptr<Queue> queue_;
};

inline float RoundToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rest = bits & 0xffffu;
  uint32_t high = bits >> 16;
  if (rest > 0x8000u || (rest == 0x8000u && (high & 1u) != 0)) ++high;
  return std::bit_cast<float>(high << 16);
}

inline float Rounded(float value, DType type) {
  return type == DType::kBF16 ? RoundToBf16(value) : value;
}

// A vector's codes and scale, of int4 a group's, from the words of
// kernels/quantise.h: the nearest of all codes, found by looking at each.
struct Quantised {
  std::vector<float> codes;  // the numbers they stand for
  float scale;
};
inline Quantised QuantisedGroup(const float* values, size_t count) {
  Quantised result{std::vector<float>(count), 0.0f};
  float most = 0;
  for (size_t i = 0; i < count; ++i) {
    const float value = values[i];
    if (!std::isfinite(value)) return {result.codes, std::nanf("")};
    if (std::fabs(value) > std::fabs(most) || value == -std::fabs(most)) {
      most = value;
    }
  }
  if (std::fabs(most) < 0x1p-100f) return result;
  result.scale = RoundToBf16(most / -8.0f);
  const float inverse = 1.0f / result.scale;
  for (size_t i = 0; i < count; ++i) {
    const double scaled = values[i] * inverse;
    int best = -8;
    for (int code = -7; code <= 7; ++code) {
      const double gain = std::fabs(best - scaled) - std::fabs(code - scaled);
      if (gain > 0 || (gain == 0 && code % 2 == 0)) best = code;
    }
    result.codes[i] = static_cast<float>(best);
  }
  return result;
}
inline Quantised QuantisedOf(const float* values, size_t count, DType type) {
  if (type == DType::kInt4) return QuantisedGroup(values, count);
  std::vector<double> numbers;  // magnitudes, ascending; even ones win ties
  if (type == DType::kInt8) {
    for (int i = 0; i <= 127; ++i) numbers.push_back(i);
  } else {
    for (int i = 0; i < 127; ++i) {
      numbers.push_back(i < 8 ? std::ldexp(i, -9)
                              : std::ldexp(8 + i % 8, i / 8 - 10));
    }
  }
  Quantised result{std::vector<float>(count), 0.0f};
  float amax = 0;
  for (size_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) return {result.codes, std::nanf("")};
    amax = std::max(amax, std::fabs(values[i]));
  }
  if (amax < 0x1p-100f) return result;
  const float limit = static_cast<float>(numbers.back());
  result.scale = amax / limit;
  const float inverse = limit / amax;
  for (size_t i = 0; i < count; ++i) {
    const double scaled = std::fabs(values[i] * inverse);
    size_t best = 0;
    for (size_t n = 1; n < numbers.size(); ++n) {
      const double gain =
          std::fabs(numbers[best] - scaled) - std::fabs(numbers[n] - scaled);
      if (gain > 0 || (gain == 0 && n % 2 == 0)) best = n;
    }
    const float number = static_cast<float>(numbers[best]);
    result.codes[i] = best == 0 && type == DType::kInt8
                          ? 0.0f
                          : std::copysign(number, values[i]);
  }
  return result;
}

// Of int4 one for each group, of others one.
inline std::vector<Quantised> GroupsOf(const float* values, size_t count,
                                       DType type) {
  const size_t most = type == DType::kInt4 ? 32 : count;
  std::vector<Quantised> groups;
  for (size_t begin = 0; begin < count; begin += most) {
    groups.push_back(
        QuantisedOf(values + begin, std::min(most, count - begin), type));
  }
  return groups;
}

// A quantised vector as the wire and GPUs have it.
struct StoredVector {
  std::vector<std::byte> codes;
  std::vector<std::byte> scales;
  size_t scale_bytes;
};
inline StoredVector StoredOf(const float* values, size_t count, DType type) {
  StoredVector stored{{}, {}, type == DType::kInt4 ? size_t{2} : size_t{4}};
  size_t i = 0;
  for (const Quantised& group : GroupsOf(values, count, type)) {
    for (const float code : group.codes) {
      const int whole = static_cast<int>(code);
      if (type == DType::kFp8) {
        stored.codes.push_back(static_cast<std::byte>(E4M3FromFloat(code)));
      } else if (type == DType::kInt8) {
        stored.codes.push_back(static_cast<std::byte>(whole));
      } else if (i++ % 2 == 0) {
        stored.codes.push_back(static_cast<std::byte>(whole & 15));
      } else {
        stored.codes.back() |= static_cast<std::byte>((whole & 15) << 4);
      }
    }
    const uint32_t bits = std::bit_cast<uint32_t>(group.scale);
    for (size_t byte = 4 - stored.scale_bytes; byte < 4; ++byte) {
      stored.scales.push_back(static_cast<std::byte>(bits >> (8 * byte)));
    }
  }
  return stored;
}

// What a cache of `type` gives back for one vector, in f32.
inline std::vector<float> CachedVector(const float* values, size_t count,
                                       DType type) {
  std::vector<float> out(values, values + count);
  if (!IsQuantised(type)) {
    for (float& value : out) value = Rounded(value, type);
    return out;
  }
  out.clear();
  for (const Quantised& group : GroupsOf(values, count, type)) {
    for (const float code : group.codes) out.push_back(code * group.scale);
  }
  return out;
}

// Of products' weights: outputs and inputs.
struct MatrixShape {
  int n;
  int k;
};

// What attention multiplies scores by.
inline constexpr float kAttentionScale = 0.125f;

inline std::vector<float> RandomFloats(size_t count, uint64_t seed,
                                       float scale = 1.0f) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

template <typename T>
::testing::AssertionResult SameBits(const std::vector<T>& a,
                                    const std::vector<T>& b) {
  if (a.size() != b.size()) {
    return ::testing::AssertionFailure()
           << "sizes " << a.size() << " and " << b.size();
  }
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0) {
      return ::testing::AssertionFailure()
             << "element " << i << ": " << a[i] << " and " << b[i];
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace tandem::kernels

#endif  // TANDEM_TESTS_KERNELS_FIXTURE_H_
