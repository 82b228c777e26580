// SPDX-License-Identifier: Apache-2.0
// Products with adapters of several ranks in their slots, rows that take one of
// them or none, and what float64 makes of them.

#ifndef TANDEM_TESTS_KERNELS_LORA_CASE_H_
#define TANDEM_TESTS_KERNELS_LORA_CASE_H_

#include <vector>

#include "tests/kernels/fixture.h"

namespace tandem::kernels {

struct LoraCase {
  int cols;
  int rows;      // outputs of the factors
  int first;     // of them, in out
  int stride;    // of out
  int max_rank;  // of the slots
  int num_rows = 9;
};
inline const std::vector<LoraCase>& LoraCases() {
  static const std::vector<LoraCase> cases = {
      {1, 1, 0, 1, 1},         // the least
      {255, 17, 3, 40, 8},     // one segment, not whole
      {256, 64, 0, 64, 16},    // one segment
      {300, 96, 0, 96, 20},    // odd ranks
      {1100, 65, 8, 100, 70},  // four segments and a rest, more than 64 ranks
      {1536, 130, 0, 130, 3},
      {131'200, 2, 0, 2, 3}};  // more segments than are summed at a time, twice
  return cases;
}

struct LoraValues {
  std::vector<float> x;        // [num_rows, cols]
  std::vector<float> out;      // [num_rows, stride], before
  std::vector<int32_t> slots;  // [num_rows]
  std::vector<int> ranks;      // [slots]
  std::vector<float> scales;   // [slots]
  // One slot after the other: rank, scale, A and B, both transposed.
  std::vector<float> image;
  int64_t slot_stride = 0;
};

inline LoraValues MakeLora(const LoraCase& c) {
  LoraValues v;
  const auto count = [](int64_t n) { return static_cast<size_t>(n); };
  v.x = RandomFloats(count(int64_t{c.num_rows} * c.cols), 71);
  v.out = RandomFloats(count(int64_t{c.num_rows} * c.stride), 72);
  v.ranks = {c.max_rank, 1, 0, (c.max_rank + 1) / 2};  // slot 2: of another
  v.scales = {2.0f, 0.37f, 5.0f, -1.5f};
  for (int r = 0; r < c.num_rows; ++r) v.slots.push_back((r * 3) % 5 - 1);
  v.slot_stride = 2 + int64_t{c.max_rank} * (c.cols + c.rows) + 5;
  for (size_t s = 0; s < v.ranks.size(); ++s) {
    const size_t at = v.image.size();
    v.image.resize(at + count(v.slot_stride), 1e30f);  // nobody reads
    v.image[at] = std::bit_cast<float>(v.ranks[s]);
    v.image[at + 1] = v.scales[s];
    const auto a = RandomFloats(count(int64_t{v.ranks[s]} * c.cols), 73 + s);
    const auto b = RandomFloats(count(int64_t{v.ranks[s]} * c.rows), 83 + s);
    std::copy(a.begin(), a.end(), v.image.begin() + static_cast<long>(at) + 2);
    std::copy(b.begin(), b.end(),
              v.image.begin() + static_cast<long>(at) + 2 +
                  int64_t{c.max_rank} * c.cols);
  }
  return v;
}

// Where the image lies.
inline LoraFactors FactorsOf(const LoraCase& c, const LoraValues& v,
                             const float* image) {
  return {.a = image + 2,
          .b = image + 2 + int64_t{c.max_rank} * c.cols,
          .rank = reinterpret_cast<const int32_t*>(image),
          .scale = image + 1,
          .slot_stride = v.slot_stride,
          .max_rank = c.max_rank,
          .cols = c.cols,
          .rows = c.rows};
}

// `out` afterwards, by f32 activations.
inline std::vector<float> RunLora(Device& device, const LoraCase& c,
                                  const LoraValues& v) {
  const auto count = static_cast<size_t>(c.num_rows * c.stride);
  float* const out = device.Upload(v.out);
  float* const scratch =
      device.New<float>(static_cast<size_t>(c.num_rows * c.max_rank));
  device->AddLora(
      device.queue(), c.num_rows, device.Upload(v.x), device.Upload(v.slots),
      FactorsOf(c, v, device.Upload(v.image)),
      {.out = out, .stride = c.stride, .first = c.first, .scratch = scratch});
  return device.Download(out, count);
}

// Row `r`, and the sums of the magnitudes of all its terms.
struct LoraSums {
  std::vector<double> value;  // [stride]
  std::vector<double> magnitude;
};
inline LoraSums LoraInFloat64(const LoraCase& c, const LoraValues& v, int r) {
  LoraSums sums;
  for (int o = 0; o < c.stride; ++o) {
    sums.value.push_back(v.out[static_cast<size_t>(r * c.stride + o)]);
    sums.magnitude.push_back(std::abs(sums.value.back()));
  }
  const int slot = v.slots[static_cast<size_t>(r)];
  if (slot < 0) return sums;
  const int rank = v.ranks[static_cast<size_t>(slot)];
  const float* const a = v.image.data() + slot * v.slot_stride + 2;
  const float* const b = a + int64_t{c.max_rank} * c.cols;
  for (int j = 0; j < rank; ++j) {
    double h = 0;
    double size = 0;
    for (int k = 0; k < c.cols; ++k) {
      const double term =
          double{v.x[static_cast<size_t>(r * c.cols + k)]} * a[k * rank + j];
      h += term;
      size += std::abs(term);
    }
    const double scale = v.scales[static_cast<size_t>(slot)];
    for (int o = 0; o < c.rows; ++o) {
      const auto at = static_cast<size_t>(c.first + o);
      sums.value[at] += scale * b[j * c.rows + o] * h;
      sums.magnitude[at] += std::abs(scale * b[j * c.rows + o] * size);
    }
  }
  return sums;
}

}  // namespace tandem::kernels

#endif  // TANDEM_TESTS_KERNELS_LORA_CASE_H_
