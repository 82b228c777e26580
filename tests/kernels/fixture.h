// SPDX-License-Identifier: Apache-2.0
// What kernel tests share: backends of every kind at hand, device arrays that
// are filled from and read into vectors, and seeded numbers.

#ifndef TANDEM_TESTS_KERNELS_FIXTURE_H_
#define TANDEM_TESTS_KERNELS_FIXTURE_H_

#include <gtest/gtest.h>

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

namespace tandem::kernels {

// Null where this CPU lacks the instruction set.
inline std::unique_ptr<Backend> MakeBackend(const std::string& isa = "auto",
                                            int threads = 1) {
  CpuOptions options;
  options.instruction_set = isa;
  options.threads = threads;
  auto backend = NewCpuBackend(options);
  return backend.ok() ? *std::move(backend) : nullptr;
}

// The configurations that must all give the same bits.
struct Config {
  const char* isa;
  int threads;
};
inline const std::vector<Config>& AllConfigs() {
  static const std::vector<Config> configs = {
      {"avx2", 1}, {"avx2", 2}, {"avx512", 1}, {"avx512", 2}, {"auto", 5}};
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
