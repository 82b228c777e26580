// SPDX-License-Identifier: Apache-2.0
// Attention weights of single rows against float64 on the CPU: every KV
// format, groups of heads, windows, soft caps; the
// same bits with every number of threads and instruction set.

#include <algorithm>
#include <numeric>

#include "tests/kernels/fixture.h"

namespace tandem::kernels {
namespace {

struct WeightsCase {
  int heads;
  int kv_heads;
  int head_dim;
  int block_size;
  DType type;
  int position;
  int window = 0;
  float soft_cap = 0;
  bool sinks = false;
};

const WeightsCase kWeightsCases[] = {
    {4, 4, 16, 16, DType::kF32, 0},
    {4, 2, 64, 16, DType::kF32, 300},
    {9, 3, 40, 8, DType::kBF16, 127},
    {9, 3, 40, 24, DType::kBF16, 128},
    {2, 1, 256, 16, DType::kFp8, 200},
    {6, 2, 32, 16, DType::kInt8, 143},
    {6, 2, 72, 24, DType::kInt4, 143},
    {4, 2, 24, 16, DType::kF32, 290, 37},
    {4, 2, 24, 16, DType::kBF16, 20, 64},
    {4, 1, 24, 16, DType::kF32, 260, 1},
    {4, 2, 16, 16, DType::kF32, 150, 0, 0.4f},
    {6, 2, 32, 16, DType::kBF16, 150, 37, 0, true},
};

std::vector<float> Sinks(const WeightsCase& c) {
  return RandomFloats(static_cast<size_t>(c.heads), 7, 6.0f);
}

// A sequence's keys, [position][kv_head][dim], and one row's queries.
struct Data {
  std::vector<float> keys;
  std::vector<float> q;  // [heads, head_dim]
  std::vector<int32_t> table;
};

Data Make(const WeightsCase& c) {
  const auto positions = static_cast<size_t>(c.position) + 1;
  Data data{
      RandomFloats(positions * static_cast<size_t>(c.kv_heads) *
                       static_cast<size_t>(c.head_dim),
                   5),
      RandomFloats(static_cast<size_t>(c.heads * c.head_dim), 6),
      std::vector<int32_t>(positions / static_cast<size_t>(c.block_size) + 1)};
  std::iota(data.table.begin(), data.table.end(), 1);
  std::shuffle(data.table.begin(), data.table.end(), std::mt19937_64(9));
  return data;
}

// Averaged over heads, in float64, of keys as the cache holds them.
std::vector<double> Reference(const WeightsCase& c, const Data& data) {
  const auto dim = static_cast<size_t>(c.head_dim);
  std::vector<double> sums(static_cast<size_t>(c.position) + 1);
  const int first = c.window > 0 ? std::max(0, c.position + 1 - c.window) : 0;
  for (int head = 0; head < c.heads; ++head) {
    const int kv_head = head / (c.heads / c.kv_heads);
    std::vector<double> scores;
    for (int key = first; key <= c.position; ++key) {
      const float* const at =
          data.keys.data() +
          (static_cast<size_t>(key * c.kv_heads + kv_head)) * dim;
      const std::vector<float> k = CachedVector(at, dim, c.type);
      double score = 0;
      for (size_t i = 0; i < dim; ++i) {
        score += double{data.q[static_cast<size_t>(head) * dim + i]} * k[i];
      }
      score *= kAttentionScale;
      if (c.soft_cap > 0) score = c.soft_cap * std::tanh(score / c.soft_cap);
      scores.push_back(score);
    }
    double most = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    if (c.sinks) {
      const double sink = Sinks(c)[static_cast<size_t>(head)];
      most = std::max(most, sink);
      sum = std::exp(sink - most);
    }
    for (double& score : scores) sum += score = std::exp(score - most);
    for (size_t i = 0; i < scores.size(); ++i) {
      sums[static_cast<size_t>(first) + i] += scores[i] / sum / c.heads;
    }
  }
  return sums;
}

// Keys (and zeros as values) come in by way of KvScatter.
std::vector<float> OnCpu(const WeightsCase& c, const Data& data,
                         const Config& config, bool twice = false) {
  auto backend = MakeBackend(config.isa, config.threads);
  if (backend == nullptr) return {};
  Device device(std::move(backend));
  auto cache =
      *device->NewKvCache({2, c.kv_heads, c.head_dim, c.block_size,
                           static_cast<int>(data.table.size()) + 1, c.type});
  const auto vectors = static_cast<size_t>(c.kv_heads * c.head_dim);
  std::vector<float> wire;
  for (int key = 0; key <= c.position; ++key) {
    const auto from =
        data.keys.begin() + static_cast<std::ptrdiff_t>(vectors) * key;
    wire.insert(wire.end(), from, from + static_cast<std::ptrdiff_t>(vectors));
    wire.insert(wire.end(), vectors, 0.0f);
  }
  device->KvScatter(device.queue(), *cache,
                    {data.table.data(), 0, c.position + 1, 1, 2, 0, c.kv_heads},
                    DType::kF32,
                    reinterpret_cast<const std::byte*>(wire.data()));
  Rows rows;
  // Behind another sequence's table.
  std::vector<int32_t> tables(3, 0);
  tables.insert(tables.end(), data.table.begin(), data.table.end());
  rows.block_tables = device.Upload(tables);
  // The second of two rows, with something behind its queries.
  const auto width = data.q.size() + 8;
  std::vector<float> q(2 * width, 99.0f);
  std::copy(data.q.begin(), data.q.end(),
            q.begin() + static_cast<std::ptrdiff_t>(width));
  const auto positions = static_cast<size_t>(c.position) + 1;
  AttentionLook look{.row = 1,
                     .position = c.position,
                     .block_table = 3,
                     .factor = 1.0f / static_cast<float>(c.heads)};
  look.states = device.New<float>(2 * static_cast<size_t>(c.heads));
  look.out = device.Upload(std::vector<float>(positions + 1, -7.0f));
  for (int i = 0; i < (twice ? 2 : 1); ++i) {
    look.add = i == 1;
    device->AttentionWeights(device.queue(), rows, c.heads,
                             {kAttentionScale, c.soft_cap, c.window,
                              c.sinks ? device.Upload(Sinks(c)) : nullptr},
                             device.Upload(q), static_cast<int64_t>(width),
                             *cache, 1, look);
    device.queue().Synchronize();
  }
  std::vector<float> got = device.Download(look.out, positions + 1);
  EXPECT_EQ(got.back(), -7.0f) << "written behind the weights";
  got.pop_back();
  return got;
}

void ExpectNear(const std::vector<float>& got, const std::vector<double>& want,
                double error) {
  ASSERT_EQ(got.size(), want.size());
  double sum = 0;
  double all = 0;  // 1 without a sink
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], want[i], error) << "position " << i;
    if (want[i] == 0) {
      EXPECT_EQ(got[i], 0) << "outside the window: " << i;
    }
    sum += got[i];
    all += want[i];
  }
  EXPECT_NEAR(sum, all, 1e-5);
}

TEST(AttentionWeightsTest, OnTheCpuTheyAreNearFloat64) {
  for (const WeightsCase& c : kWeightsCases) {
    SCOPED_TRACE(c.position);
    const Data data = Make(c);
    // f32 chains of up to 256 terms of size 1, in scores of up to 10.
    ExpectNear(OnCpu(c, data, {"auto", 2}), Reference(c, data), 3e-6);
  }
}

TEST(AttentionWeightsTest, ThreadsAndInstructionSetsGiveTheSameBits) {
  for (const WeightsCase& c : {kWeightsCases[1], kWeightsCases[2],
                               kWeightsCases[5], kWeightsCases[6]}) {
    const Data data = Make(c);
    const auto expected = OnCpu(c, data, {"avx2", 1});
    for (const Config& config : AllConfigs()) {
      const auto got = OnCpu(c, data, config);
      if (got.empty()) continue;
      EXPECT_TRUE(SameBits(got, expected)) << config.isa;
    }
  }
}

TEST(AttentionWeightsTest, AddingIsForMeans) {
  const WeightsCase& c = kWeightsCases[1];
  const Data data = Make(c);
  const auto once = OnCpu(c, data, {"auto", 1});
  const auto twice = OnCpu(c, data, {"auto", 1}, /*twice=*/true);
  for (size_t i = 0; i < once.size(); ++i) EXPECT_EQ(twice[i], 2 * once[i]);
}

}  // namespace
}  // namespace tandem::kernels
