// SPDX-License-Identifier: Apache-2.0
// What tests of products with codes have in common: shapes, batches and every
// way to take an integer dot product.

#ifndef TANDEM_TESTS_KERNELS_CODE_PRODUCTS_H_
#define TANDEM_TESTS_KERNELS_CODE_PRODUCTS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "tests/kernels/fixture.h"

namespace tandem::kernels {

// Around every edge: panels of 32, groups of 32, blocks of 64 and pieces of
// 768 inputs.
inline const MatrixShape kCodeShapes[] = {{1, 1},     {7, 3},     {31, 33},
                                          {32, 64},   {33, 96},   {130, 576},
                                          {126, 800}, {140, 1600}};
inline const int kCodeBatches[] = {1,  2,  3,  4,  5,  6,  7,  8, 13,
                                   16, 17, 23, 24, 31, 32, 40, 66};
inline constexpr int kMostCodeRows = 66;

// Each way to take an integer dot product.
inline const Config kCodeConfigs[] = {
    {"avx2", 1},       {"avxvnni", 1},    {"avxvnni", 2}, {"avx512", 2},
    {"avx512vnni", 1}, {"avx512vnni", 2}, {"amx", 1},     {"auto", 3}};

inline size_t ElementAt(int row, int stride, int col) {
  return static_cast<size_t>(row) * static_cast<size_t>(stride) +
         static_cast<size_t>(col);
}

// Every batch against `expected`, of kMostCodeRows rows.
inline void ExpectProducts(Device& device, const Matrix& matrix,
                           const std::vector<float>& x,
                           const std::vector<float>& bias,
                           const std::vector<float>& expected,
                           const std::string& what) {
  const float* const device_x = device.Upload(x);
  const float* const device_bias = bias.empty() ? nullptr : device.Upload(bias);
  const int n = matrix.rows();
  float* const out = device.New<float>(ElementAt(kMostCodeRows, n, 0));
  for (const int m : kCodeBatches) {
    device->MatMul(device.queue(), m, device_x, matrix, device_bias, out);
    const size_t count = ElementAt(m, n, 0);
    EXPECT_TRUE(
        SameBits(device.Download(out, count),
                 {expected.begin(),
                  expected.begin() + static_cast<std::ptrdiff_t>(count)}))
        << what << " n " << n << " k " << matrix.cols() << " m " << m;
  }
}

}  // namespace tandem::kernels

#endif  // TANDEM_TESTS_KERNELS_CODE_PRODUCTS_H_
