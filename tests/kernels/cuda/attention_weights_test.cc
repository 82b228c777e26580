// SPDX-License-Identifier: Apache-2.0
// Attention weights of single rows on the emulated device, against float64:
// every activation and KV format, groups of heads, windows, soft caps. A kernel
// that counts a key twice, or none of a window's, is found.

#include <algorithm>
#include <numeric>

#include "kernels/quantise.h"
#include "tests/kernels/cuda/checks.h"

namespace tandem::kernels::cuda {
namespace {

struct WeightsCase {
  int heads;
  int kv_heads;
  int head_dim;
  int position;
  int window = 0;
  float soft_cap = 0;
  bool sinks = false;
};
constexpr WeightsCase kWeightsCases[] = {{2, 2, 8, 0},
                                         {4, 2, 40, 150},
                                         {3, 1, 24, 127, 0, 2},
                                         {4, 4, 16, 200, 60},
                                         {2, 1, 16, 130, 1},
                                         {2, 1, 16, 20, 64},
                                         {6, 2, 40, 150, 0, 0, true},
                                         {3, 1, 576, 130}};

inline constexpr int kBlockSize = 16;

std::vector<float> Sinks(const WeightsCase& c) {
  return RandomFloats(At(c.heads), 33, 6.0f);
}

struct Bytes {
  std::vector<std::byte> data;
  KvView view;
};

// One layer behind another; K as `type` holds it, V left alone.
Bytes MakeCache(const WeightsCase& c, DType type,
                const std::vector<int32_t>& table,
                const std::vector<float>& keys) {
  Bytes cache;
  const int blocks = static_cast<int>(table.size()) + 1;
  cache.view = {nullptr, type, blocks, c.kv_heads, c.head_dim, kBlockSize};
  const size_t element = IsQuantised(type) ? 1 : SizeOf(type);
  cache.data.resize(At(cache.view.layer_stride()) * 2 * element);
  cache.view.data = cache.data.data();
  for (int key = 0; key <= c.position; ++key) {
    for (int head = 0; head < c.kv_heads; ++head) {
      const float* const from =
          keys.data() + At(int64_t{key} * c.kv_heads + head) * At(c.head_dim);
      const int block = table[At(key / kBlockSize)];
      const int slot = key % kBlockSize;
      std::byte* const to =
          cache.data.data() + cache.view.Offset(1, block, 0, head, slot) *
                                  static_cast<int64_t>(element);
      if (!IsQuantised(type)) {
        const auto bytes =
            Encode(type, std::vector<float>(from, from + c.head_dim));
        std::copy(bytes.begin(), bytes.end(), to);
        continue;
      }
      const StoredVector stored = StoredOf(from, At(c.head_dim), type);
      std::copy(stored.codes.begin(), stored.codes.end(), to);
      for (size_t i = 0; i < stored.scales.size(); i += stored.scale_bytes) {
        std::copy_n(stored.scales.data() + i, stored.scale_bytes,
                    cache.data.data() +
                        cache.view.ScaleOffset(1, block, 0, head, slot) +
                        static_cast<int64_t>(i / stored.scale_bytes) *
                            cache.view.scale_stride());
      }
    }
  }
  return cache;
}

std::vector<double> Reference(const WeightsCase& c, DType activation,
                              DType type, const std::vector<float>& keys,
                              const std::vector<float>& q) {
  std::vector<double> sums(At(c.position) + 1);
  const int first = c.window > 0 ? std::max(0, c.position + 1 - c.window) : 0;
  for (int head = 0; head < c.heads; ++head) {
    const int kv_head = head / (c.heads / c.kv_heads);
    std::vector<double> scores;
    for (int key = first; key <= c.position; ++key) {
      const float* const from =
          keys.data() +
          At(int64_t{key} * c.kv_heads + kv_head) * At(c.head_dim);
      std::vector<float> k(from, from + c.head_dim);
      if (IsQuantised(type)) {
        k = CachedVector(from, k.size(), type);
        for (float& value : k) value = RoundedTo(activation, value);
      } else {
        for (float& value : k) value = RoundedTo(type, value);
      }
      double score = 0;
      for (int i = 0; i < c.head_dim; ++i) {
        score += double{q[At(head * c.head_dim + i)]} * k[At(i)];
      }
      score *= 0.25;
      if (c.soft_cap > 0) score = c.soft_cap * std::tanh(score / c.soft_cap);
      scores.push_back(score);
    }
    double most = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    if (c.sinks) {
      const double sink = Sinks(c)[At(head)];
      most = std::max(most, sink);
      sum = std::exp(sink - most);
    }
    for (double& score : scores) sum += score = std::exp(score - most);
    for (size_t i = 0; i < scores.size(); ++i) {
      sums[At(first) + i] += scores[i] / sum / c.heads;
    }
  }
  return sums;
}

AssertionResult Check(const WeightsCase& c, DType activation, DType type) {
  const auto keys =
      RandomFloats(At(int64_t{c.position + 1} * c.kv_heads * c.head_dim), 31);
  const auto q = RandomOf(activation, int64_t{c.heads} * c.head_dim, 32);
  std::vector<int32_t> table(At(c.position / kBlockSize) + 1);
  std::iota(table.begin(), table.end(), 1);
  std::shuffle(table.begin(), table.end(), std::mt19937_64(4));
  Bytes cache = MakeCache(c, type, table, keys);
  const auto q_bytes = Encode(activation, q);
  std::vector<float> states(2 * At(c.heads));
  const auto sinks = Sinks(c);
  Guarded out(DType::kF32, c.position + 1);
  const auto expected = Reference(c, activation, type, keys, q);
  AttentionWeightsParams params{.block_table = table.data(),
                                .q = q_bytes.data(),
                                .states = states.data(),
                                .out = reinterpret_cast<float*>(out.data()),
                                .kv = cache.view,
                                .scale = 0.25f,
                                .factor = 1.0f / static_cast<float>(c.heads),
                                .position = c.position,
                                .heads = c.heads,
                                .layer = 1,
                                .add = false,
                                .window = c.window,
                                .soft_cap = c.soft_cap,
                                .sinks = c.sinks ? sinks.data() : nullptr};
  for (const bool add : {false, true}) {
    params.add = add;
    TANDEM_LAUNCHED(LaunchAttentionWeights(StreamOf(Generation::kHopper),
                                           activation, params));
    const auto got = out.Values();
    for (size_t i = 0; i < got.size(); ++i) {
      const double want = (add ? 2 : 1) * expected[i];
      // So that NaN is noticed, too.
      if (!(std::abs(got[i] - want) <= 5e-6) || (want == 0 && got[i] != 0)) {
        return AssertionFailure()
               << "position " << i << ": " << got[i] << ", expected " << want;
      }
    }
  }
  if (!out.Kept()) return AssertionFailure() << "wrote behind the weights";
  return AssertionSuccess();
}

TEST(CudaAttentionWeights, AreNearFloat64WhateverTheSchedule) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    for (const WeightsCase& c : kWeightsCases) {
      for (const DType activation : kTypes) {
        for (const DType type :
             {activation, DType::kFp8, DType::kInt8, DType::kInt4}) {
          EXPECT_TRUE(Check(c, activation, type))
              << Name(activation) << " over " << Name(type) << " at "
              << c.position;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem::kernels::cuda
