// SPDX-License-Identifier: Apache-2.0
// Attention over an int8 cache equals the formula of kernels/quantise.h, worked
// out here number by number in exact integers, bit for bit, on every
// instruction set. tests/kernels/attention_test.cc compares it with float64.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cpu/float_env.h"
#include "kernels/cpu/kernel_table.h"
#include "tests/kernels/fixture.h"

namespace tandem::kernels {
namespace {

struct Int8Case {
  int heads;
  int kv_heads;
  int head_dim;
  int block_size;
  int context;  // keys of the last row
  int rows;
  int window = 0;
};

// K or V of all positions of one head.
using Vectors = std::vector<Quantised>;

// With integers up to `limit` instead.
Quantised InIntegers(const std::vector<float>& x, float limit) {
  float most = 0;
  for (const float value : x) most = std::max(most, std::fabs(value));
  Quantised result{std::vector<float>(x.size()), 0};
  if (most < 0x1p-100f) return result;
  result.scale = most / limit;
  const float inverse = limit / most;
  for (size_t i = 0; i < x.size(); ++i) {
    result.codes[i] = std::nearbyint(x[i] * inverse);
  }
  return result;
}

int64_t Dot(const std::vector<float>& a, const std::vector<float>& b) {
  int64_t sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    sum += static_cast<int64_t>(a[i]) * static_cast<int64_t>(b[i]);
  }
  return sum;
}

// ((0 8) (4 12)) ...
float Fold(std::array<float, 16> lanes) {
  for (size_t half = 8; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

struct Formula {
  const cpu::KernelTable& table;  // for exp alone

  float Exp(float x) const {
    table.exp(1, &x, &x);
    return x;
  }

  struct Sums {
    float maximum;
    float sum;
    std::vector<float> values;
  };

  // Keys [begin, end) of the segment that begins at `start`.
  Sums Segment(const Quantised& q, const Vectors& keys, const Vectors& values,
               int start, int begin, int end) const {
    std::vector<float> weights;
    Sums sums{-std::numeric_limits<float>::infinity(), 0, {}};
    for (int j = begin; j < end; ++j) {
      const Quantised& key = keys[static_cast<size_t>(j)];
      const float score = static_cast<float>(Dot(q.codes, key.codes)) *
                          (key.scale * q.scale) * kAttentionScale;
      weights.push_back(score);
      sums.maximum = std::max(sums.maximum, score);
    }
    std::array<float, 16> lanes{};
    for (int j = begin; j < end; ++j) {
      float& weight = weights[static_cast<size_t>(j - begin)];
      weight = Exp(weight - sums.maximum);
      lanes[static_cast<size_t>(j - start) % 16] += weight;
      weight *= values[static_cast<size_t>(j)].scale;
    }
    sums.sum = Fold(lanes);
    const Quantised rounded = InIntegers(weights, kWeightLimit);
    for (size_t i = 0; i < q.codes.size(); ++i) {
      int64_t dot = 0;
      for (int j = begin; j < end; ++j) {
        dot += static_cast<int64_t>(
                   rounded.codes[static_cast<size_t>(j - begin)]) *
               static_cast<int64_t>(values[static_cast<size_t>(j)].codes[i]);
      }
      sums.values.push_back(static_cast<float>(dot) * rounded.scale);
    }
    return sums;
  }

  // Of a query at `position`.
  std::vector<float> operator()(const std::vector<float>& query,
                                const Vectors& keys, const Vectors& values,
                                int position, int window) const {
    const Quantised q = InIntegers(query, kQueryLimit);
    const int first = window > 0 ? std::max(0, position + 1 - window) : 0;
    Sums all{};
    for (int start = first / kAttentionSegment * kAttentionSegment;
         start <= position; start += kAttentionSegment) {
      const Sums next =
          Segment(q, keys, values, start, std::max(first, start),
                  std::min(position + 1, start + kAttentionSegment));
      if (all.values.empty()) {
        all = next;
        continue;
      }
      const float maximum = std::max(all.maximum, next.maximum);
      const float before = Exp(all.maximum - maximum);
      const float now = Exp(next.maximum - maximum);
      all.sum = all.sum * before + next.sum * now;
      all.maximum = maximum;
      for (size_t i = 0; i < all.values.size(); ++i) {
        all.values[i] = std::fma(next.values[i], now, all.values[i] * before);
      }
    }
    const float factor = 1.0f / all.sum;
    for (float& value : all.values) value *= factor;
    return all.values;
  }
};

// [row][vector] of `count` vectors: some long, some short, one of zeros.
std::vector<float> RowsOfVectors(int rows, int count, int dim, int seed) {
  auto x = RandomFloats(static_cast<size_t>(rows * count * dim),
                        static_cast<uint64_t>(seed));
  for (int i = 0; i < rows * count; ++i) {
    const float by = i % 7 == 3 ? 20.0f : i % 7 == 5 ? 1e-3f : 1.0f;
    for (int k = 0; k < dim; ++k) {
      x[static_cast<size_t>(i * dim + k)] *= i == 11 ? 0.0f : by;
    }
  }
  return x;
}

std::vector<float> Attend(Device& device, const Int8Case& c,
                          const std::vector<float>& kv,
                          const std::vector<float>& q) {
  const int blocks = (c.context + c.block_size - 1) / c.block_size;
  auto cache = *device->NewKvCache(
      {1, c.kv_heads, c.head_dim, c.block_size, blocks, DType::kInt8});
  std::vector<int32_t> table(static_cast<size_t>(blocks));
  std::iota(table.rbegin(), table.rend(), 0);
  const KvRange range{table.data(), 0, c.context, 0, 1, 0, c.kv_heads};
  const float* const wire = device.Upload(kv);
  device->KvScatter(device.queue(), *cache, range, DType::kF32,
                    reinterpret_cast<const std::byte*>(wire));
  const std::vector<RowSpan> spans = {{0, c.rows, c.context - c.rows, 0}};
  Rows rows;
  rows.num_rows = c.rows;
  rows.num_spans = 1;
  rows.block_tables = device.Upload(table);
  rows.spans = device.Upload(spans);
  rows.host_spans = spans.data();
  const int width = c.heads * c.head_dim;
  const auto count = static_cast<size_t>(c.rows * width);
  float* const out = device.New<float>(count);
  device->Attention(device.queue(), rows, c.heads,
                    {kAttentionScale, 0, c.window, nullptr}, device.Upload(q),
                    width, *cache, 0, out);
  return device.Download(out, count);
}

TEST(Int8AttentionTest, EqualsTheFormulaBitForBit) {
  const Int8Case cases[] = {
      {9, 3, 64, 16, 70, 1},          {9, 3, 64, 16, 1, 1},
      {4, 2, 40, 24, 67, 20},         {13, 1, 8, 8, 33, 5, 6},
      {2, 1, 256, 64, 530, 3},        {6, 2, 24, 16, 1100, 2, 601},
      {3, 1, kMaxHeadDim, 16, 90, 2}, {2, 1, 64, 256, 600, 40, 19},
  };
  const auto table = cpu::MakeKernelTable("auto");
  ASSERT_TRUE(table.ok());
  const cpu::ScopedFlushDenormals flush;
  int compared = 0;
  for (const Int8Case& c : cases) {
    const auto kv =
        RowsOfVectors(c.context, 2 * c.kv_heads, c.head_dim, 1 + c.heads);
    const auto q = RowsOfVectors(c.rows, c.heads, c.head_dim, 2 + c.heads);
    const auto vector = [&](const std::vector<float>& of, int index) {
      const auto from = of.begin() + std::ptrdiff_t{index} * c.head_dim;
      return std::vector<float>(from, from + c.head_dim);
    };
    std::vector<float> expected;
    for (int row = 0; row < c.rows; ++row) {
      for (int head = 0; head < c.heads; ++head) {
        const int kv_head = head / (c.heads / c.kv_heads);
        Vectors keys, values;
        for (int j = 0; j < c.context; ++j) {
          for (const bool value : {false, true}) {
            const auto x = vector(
                kv, j * 2 * c.kv_heads + (value ? c.kv_heads : 0) + kv_head);
            (value ? values : keys)
                .push_back(QuantisedOf(x.data(), x.size(), DType::kInt8));
          }
        }
        const auto out =
            Formula{*table}(vector(q, row * c.heads + head), keys, values,
                            c.context - c.rows + row, c.window);
        expected.insert(expected.end(), out.begin(), out.end());
      }
    }
    for (const char* isa :
         {"avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx"}) {
      for (const CpuInputs inputs : kAllInputs) {
        auto backend = MakeBackend(isa, 2, inputs);
        if (backend == nullptr) continue;
        Device device(std::move(backend));
        ++compared;
        EXPECT_TRUE(SameBits(Attend(device, c, kv, q), expected))
            << isa << " " << Name(inputs) << " dim " << c.head_dim
            << " context " << c.context << " rows " << c.rows;
      }
    }
  }
  EXPECT_GE(compared, 8);
}

}  // namespace
}  // namespace tandem::kernels
