// SPDX-License-Identifier: Apache-2.0
// Rotary embedding, the write to the cache, and attention: values against
// float64, bits over batches, chunks, block sizes, threads and instruction
// sets.

#include <algorithm>
#include <numeric>

#include "tests/kernels/fixture.h"
#include "tests/sanitized.h"

namespace tandem::kernels {
namespace {

struct Model {
  int heads;
  int kv_heads;
  int head_dim;
  DType type;
  int window = 0;
  float soft_cap = 0;
  CpuInputs inputs =
      CpuInputs::kF32;  // what queries and weights are rounded to
  bool sinks = false;
  int qkv() const { return (heads + 2 * kv_heads) * head_dim; }
};

// Of each head; some outweigh all keys, some weigh next to nothing.
std::vector<float> Sinks(const Model& model) {
  return RandomFloats(static_cast<size_t>(model.heads), 14, 9.0f);
}

std::vector<float> Angles(int positions, int half, bool sine) {
  std::vector<float> table;
  for (int p = 0; p < positions; ++p) {
    for (int i = 0; i < half; ++i) {
      const double angle = p * std::pow(10000.0, -double(i) / half);
      table.push_back(
          static_cast<float>(sine ? std::sin(angle) : std::cos(angle)));
    }
  }
  return table;
}

// Rows of one sequence through RopeAppend and Attention in chunks; blocks are
// scattered over the cache. Several copies of the sequence make a batch.
struct AttentionRun {
  int block_size = 16;
  int chunk = 1 << 20;
  int copies = 1;
};

std::vector<float> Attend(Device& device, const Model& model, int length,
                          const AttentionRun& run,
                          const std::vector<float>& qkv) {
  const int blocks_each = (length + run.block_size - 1) / run.block_size;
  KvShape shape{2,
                model.kv_heads,
                model.head_dim,
                run.block_size,
                blocks_each * run.copies + 1,
                model.type};
  auto cache = *device->NewKvCache(shape);
  std::vector<int32_t> tables(static_cast<size_t>(blocks_each * run.copies));
  std::iota(tables.begin(), tables.end(), 1);
  std::shuffle(tables.begin(), tables.end(), std::mt19937_64(9));
  const int32_t* const device_tables = device.Upload(tables);
  const int half = model.head_dim / 2;
  const RopeTable rope{device.Upload(Angles(length, half, false)),
                       device.Upload(Angles(length, half, true)), half};
  const float* const sinks =
      model.sinks ? device.Upload(Sinks(model)) : nullptr;
  const int width = model.heads * model.head_dim;
  std::vector<float> result(static_cast<size_t>(length * width));
  for (int begin = 0; begin < length; begin += run.chunk) {
    const int count = std::min(run.chunk, length - begin);
    std::vector<RowSpan> spans;
    std::vector<int32_t> positions, slots;
    std::vector<float> rows;
    for (int c = 0; c < run.copies; ++c) {
      spans.push_back({c * count, count, begin, c * blocks_each});
      for (int i = 0; i < count; ++i) {
        const int position = begin + i;
        positions.push_back(position);
        slots.push_back(tables[static_cast<size_t>(c * blocks_each +
                                                   position / run.block_size)] *
                            run.block_size +
                        position % run.block_size);
        const auto from = qkv.begin() + std::ptrdiff_t{position} * model.qkv();
        rows.insert(rows.end(), from, from + model.qkv());
      }
    }
    Rows step;
    step.num_rows = count * run.copies;
    step.num_spans = run.copies;
    step.positions = device.Upload(positions);
    step.slots = device.Upload(slots);
    step.spans = device.Upload(spans);
    step.block_tables = device_tables;
    step.host_spans = spans.data();
    float* const device_qkv = device.Upload(rows);
    float* const out =
        device.New<float>(static_cast<size_t>(step.num_rows * width));
    device->RopeAppend(device.queue(), step, model.heads, rope, {}, device_qkv,
                       nullptr, *cache, 1);
    device->Attention(device.queue(), step, model.heads,
                      {kAttentionScale, model.soft_cap, model.window, sinks},
                      device_qkv, model.qkv(), *cache, 1, out);
    const auto got =
        device.Download(out, static_cast<size_t>(step.num_rows * width));
    for (int c = 0; c < run.copies; ++c) {
      const auto from = got.begin() + std::ptrdiff_t{c} * count * width;
      if (c == 0) {
        std::copy(from, from + std::ptrdiff_t{count} * width,
                  result.begin() + std::ptrdiff_t{begin} * width);
      } else {
        EXPECT_TRUE(
            std::equal(from, from + std::ptrdiff_t{count} * width, got.begin()))
            << "sequence " << c << " of a batch differs";
      }
    }
  }
  return result;
}

// What a query over an int8 cache is.
void RoundToIntegers(std::vector<double>& q) {
  double most = 0;
  for (const double x : q) most = std::max(most, std::fabs(x));
  for (double& x : q) {
    x = std::nearbyint(x / most * kQueryLimit) * (most / kQueryLimit);
  }
}

std::vector<double> Reference(const Model& model, int length,
                              const std::vector<float>& qkv) {
  const int half = model.head_dim / 2;
  const int group = model.heads / model.kv_heads;
  std::vector<double> rotated(qkv.begin(), qkv.end());
  for (int p = 0; p < length; ++p) {
    for (int h = 0; h < model.heads + model.kv_heads; ++h) {
      double* const head =
          rotated.data() + p * model.qkv() + h * model.head_dim;
      for (int i = 0; i < half; ++i) {
        const double angle = p * std::pow(10000.0, -double(i) / half);
        const double a = head[i], b = head[i + half];
        if (IsQuantised(model.type)) {
          // In f32, as the kernel does: another last bit can be another code.
          const float c = static_cast<float>(std::cos(angle));
          const float s = static_cast<float>(std::sin(angle));
          const float x = static_cast<float>(a), y = static_cast<float>(b);
          head[i] = x * c - y * s;
          head[i + half] = y * c + x * s;
          continue;
        }
        head[i] = a * std::cos(angle) - b * std::sin(angle);
        head[i + half] = b * std::cos(angle) + a * std::sin(angle);
      }
    }
    for (int h = model.heads; h < model.heads + 2 * model.kv_heads; ++h) {
      double* const head =
          rotated.data() + p * model.qkv() + h * model.head_dim;
      const std::vector<float> values(head, head + model.head_dim);
      const auto cached =
          CachedVector(values.data(), values.size(), model.type);
      std::copy(cached.begin(), cached.end(), head);
    }
  }
  std::vector<double> out;
  for (int p = 0; p < length; ++p) {
    for (int h = 0; h < model.heads; ++h) {
      std::vector<double> q(
          rotated.data() + p * model.qkv() + h * model.head_dim,
          rotated.data() + p * model.qkv() + (h + 1) * model.head_dim);
      if (model.inputs != CpuInputs::kF32 && model.type == DType::kBF16) {
        for (double& x : q) x = RoundToBf16(static_cast<float>(x));
      }
      if (model.type == DType::kInt8) RoundToIntegers(q);
      std::vector<double> weights;
      const int first =
          model.window > 0 ? std::max(0, p + 1 - model.window) : 0;
      for (int j = first; j <= p; ++j) {
        const double* const k = rotated.data() + j * model.qkv() +
                                (model.heads + h / group) * model.head_dim;
        double score = 0;
        for (int i = 0; i < model.head_dim; ++i) {
          score += q[static_cast<size_t>(i)] * k[i];
        }
        score *= kAttentionScale;
        if (model.soft_cap > 0) {
          score = model.soft_cap * std::tanh(score / model.soft_cap);
        }
        weights.push_back(score);
      }
      double most = *std::max_element(weights.begin(), weights.end());
      double sum = 0;
      if (model.sinks) {
        const double sink = Sinks(model)[static_cast<size_t>(h)];
        most = std::max(most, sink);
        sum = std::exp(sink - most);
      }
      for (double& weight : weights) sum += weight = std::exp(weight - most);
      for (int i = 0; i < model.head_dim; ++i) {
        double value = 0;
        for (int j = first; j <= p; ++j) {
          const double* const v =
              rotated.data() + j * model.qkv() +
              (model.heads + model.kv_heads + h / group) * model.head_dim;
          value += weights[static_cast<size_t>(j - first)] * v[i];
        }
        out.push_back(value / sum);
      }
    }
  }
  return out;
}

const Model kModels[] = {
    {9, 3, 64, DType::kBF16},
    {9, 3, 64, DType::kF32},
    {8, 4, 8, DType::kBF16},
    {4, 4, 40, DType::kF32},
    {26, 1, 24, DType::kBF16},
    {2, 1, 256, DType::kBF16},
    {13, 1, 128, DType::kF32},
    {9, 3, 64, DType::kFp8},
    {4, 2, 40, DType::kInt8},
    {9, 3, 64, DType::kInt4},
    {4, 2, 40, DType::kInt4},
    {26, 1, 24, DType::kInt4, 19},
    {9, 3, 64, DType::kBF16, 19},
    {4, 1, 24, DType::kF32, 1},
    {2, 2, 40, DType::kInt8, 40, 0.5f},
    {4, 2, 16, DType::kBF16, 530, 0.3f},
    {9, 3, 64, DType::kBF16, 0, 0, CpuInputs::kBf16},
    {9, 3, 64, DType::kBF16, 0, 0, CpuInputs::kBf16Amx},
    {26, 1, 24, DType::kBF16, 0, 0, CpuInputs::kBf16Amx},
    {7, 1, 40, DType::kBF16, 19, 0, CpuInputs::kBf16Amx},
    {4, 2, 96, DType::kBF16, 530, 0.3f, CpuInputs::kBf16Amx},
    {9, 3, 64, DType::kBF16, 67, 0, CpuInputs::kBf16Amx, true},
    {4, 2, 40, DType::kInt8, 40, 0, CpuInputs::kBf16Amx},
    {26, 1, 24, DType::kBF16, 0, 0, CpuInputs::kBf16},
    {8, 4, 8, DType::kBF16, 1, 0, CpuInputs::kBf16},
    {7, 1, 40, DType::kBF16, 19, 0, CpuInputs::kBf16},
    {2, 1, 256, DType::kBF16, 530, 0.3f, CpuInputs::kBf16},
    {9, 3, 64, DType::kF32, 0, 0, CpuInputs::kBf16},
    {4, 2, 40, DType::kInt8, 40, 0, CpuInputs::kBf16},
    {9, 3, 64, DType::kBF16, 0, 0, CpuInputs::kF32, true},
    {26, 1, 24, DType::kF32, 19, 0.5f, CpuInputs::kF32, true},
    {7, 1, 40, DType::kBF16, 530, 0, CpuInputs::kBf16, true},
    // Latent attention's.
    {16, 1, 576, DType::kBF16},
    {40, 1, 576, DType::kInt4, 130},
    {5, 1, 288, DType::kInt8},
    {3, 1, 320, DType::kBF16, 0, 0, CpuInputs::kBf16},
};

TEST(AttentionTest, IsWithinTheErrorBoundOfFloat64) {
  // f32: some 1e-6 from chains of up to 700 terms and exp. bf16: keys and
  // values are rounded alike on both sides, but a key that the two compute
  // differently in its last f32 bit may round to the other bf16, which moves
  // a score by 2^-9 of one product: 1e-3 covers it. Rounded queries are so on
  // both sides as well; rounded weights move a mean of values by 2^-9 of them,
  // 70 of 16 bits, each off by up to 2^-16 of the largest, by some 1e-4. Codes
  // are exact in f32.
  for (const Model& model : kModels) {
    const int length = 70;
    const auto qkv =
        RandomFloats(static_cast<size_t>(length * model.qkv()), 11);
    const auto expected = Reference(model, length, qkv);
    for (const char* isa : {"avx2", "avx512"}) {
      auto backend = MakeBackend(isa, 2, model.inputs);
      if (backend == nullptr) continue;
      Device device(std::move(backend));
      const auto got = Attend(device, model, length, {}, qkv);
      ASSERT_EQ(got.size(), expected.size());
      const double bound = model.type == DType::kInt8        ? 2e-4
                           : model.type != DType::kBF16      ? 1e-5
                           : model.inputs == CpuInputs::kF32 ? 1e-3
                                                             : 1e-2;
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_NEAR(got[i], expected[i], bound)
            << isa << " heads " << model.heads << " element " << i;
      }
    }
  }
}

TEST(AttentionTest, LongContextsAreWithinTheErrorBoundAcrossSegments) {
  for (const auto& [window, type] : {std::pair(0, DType::kF32),
                                     {37, DType::kF32},
                                     {600, DType::kF32},
                                     {0, DType::kInt8},
                                     {600, DType::kInt8}}) {
    Model model{2, 1, 16, type, window};
    model.sinks = window == 600;
    const int length = 2 * kAttentionSegment + 37;
    const auto qkv =
        RandomFloats(static_cast<size_t>(length * model.qkv()), 12);
    const auto expected = Reference(model, length, qkv);
    Device device(MakeBackend("auto", 2));
    const auto got = Attend(device, model, length, {}, qkv);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], expected[i], model.type == DType::kF32 ? 1e-5 : 5e-5)
          << "window " << model.window << ", " << i;
    }
  }
}

TEST(AttentionTest, BitsDoNotDependOnBatchChunkBlockThreadsOrIsa) {
  for (const Model& model : kModels) {
    const int length = kAttentionSegment + 75;
    const auto qkv =
        RandomFloats(static_cast<size_t>(length * model.qkv()), 13);
    std::vector<float> first;
    int compared = 0;
    const auto check = [&](const Config& config, const AttentionRun& run) {
      auto backend = MakeBackend(config.isa, config.threads, model.inputs);
      if (backend == nullptr) return;
      Device device(std::move(backend));
      const auto got = Attend(device, model, length, run, qkv);
      if (first.empty()) first = got;
      ++compared;
      EXPECT_TRUE(SameBits(got, first))
          << config.isa << " threads " << config.threads << " block "
          << run.block_size << " chunk " << run.chunk << " copies "
          << run.copies << " heads " << model.heads << " dim "
          << model.head_dim;
    };
    if (!kSanitized) {
      for (const Config& config : AllConfigs()) check(config, {});
      check({"auto", 5}, {.chunk = 1, .copies = 2});
    }
    for (const char* isa : {"avx2", "avx512", "amx"}) {
      // It says nothing of other inputs.
      if (isa[1] == 'm' && model.inputs != CpuInputs::kBf16Amx) continue;
      check({isa, 2}, {.chunk = 64});
      check({isa, 1}, {.chunk = 7});
      check({isa, 2}, {.block_size = 24, .chunk = 200});
      check({isa, 1}, {.block_size = 8, .copies = 3});
      check({isa, 2}, {.block_size = 256, .chunk = 64, .copies = 8});
    }
    check({"auto", 2}, {.chunk = 1});
    EXPECT_GE(compared, 5);
  }
}

// Windows begin at odd positions as well as at even ones, and bf16 values lie
// in pairs.
TEST(AttentionTest, IgnoresWhatLiesBeforeAWindow) {
  const int length = 40;
  const int poisoned = 12;
  for (const auto& [type, inputs] : {std::pair(DType::kF32, CpuInputs::kF32),
                                     {DType::kBF16, CpuInputs::kF32},
                                     {DType::kInt8, CpuInputs::kF32},
                                     {DType::kInt4, CpuInputs::kF32},
                                     {DType::kBF16, CpuInputs::kBf16},
                                     {DType::kBF16, CpuInputs::kBf16Amx}}) {
    Device device(MakeBackend("auto", 1, inputs));
    for (const int window : {1, 7, 8}) {
      const Model model{4, 2, 24, type, window};
      auto qkv = RandomFloats(static_cast<size_t>(length * model.qkv()), 21);
      for (const int chunk : {7, 40}) {
        const auto clean = Attend(device, model, length, {.chunk = chunk}, qkv);
        for (const float value : {std::nanf(""), HUGE_VALF}) {
          auto spoiled = qkv;
          const auto values = spoiled.begin() + poisoned * model.qkv() +
                              (model.heads + model.kv_heads) * model.head_dim;
          std::fill(values, values + model.kv_heads * model.head_dim, value);
          const auto got =
              Attend(device, model, length, {.chunk = chunk}, spoiled);
          const auto width = static_cast<size_t>(model.heads * model.head_dim);
          for (int row = 0; row < length; ++row) {
            if (row >= poisoned && row < poisoned + window) continue;
            const auto at = static_cast<size_t>(row) * width;
            EXPECT_TRUE(
                SameBits(std::vector<float>(&clean[at], &clean[at] + width),
                         std::vector<float>(&got[at], &got[at] + width)))
                << Name(type) << " window " << window << " row " << row;
          }
        }
      }
    }
  }
}

// Of the cache, and what inputs are rounded to.
class BehindTest
    : public ::testing::TestWithParam<std::pair<DType, CpuInputs>> {};

TEST_P(BehindTest, IgnoresWhatLiesBehindAPosition) {
  // Another sequence's values, NaN and infinity included, in the same block.
  Device device(MakeBackend("auto", 1, GetParam().second));
  auto cache = *device->NewKvCache({1, 1, 16, 16, 2, GetParam().first});
  const RopeTable rope{device.Upload(std::vector<float>(16 * 8, 1.0f)),
                       device.Upload(std::vector<float>(16 * 8, 0.0f)), 8};
  const auto attend = [&](float behind) {
    std::vector<float> qkv = RandomFloats(2 * 64, 14);
    std::fill(qkv.begin() + 64, qkv.end(), behind);
    const std::vector<RowSpan> spans = {{0, 2, 0, 0}};
    Rows rows;
    rows.num_rows = 2;
    rows.num_spans = 1;
    rows.positions = device.Upload(std::vector<int32_t>{0, 1});
    rows.slots = device.Upload(std::vector<int32_t>{16, 17});
    rows.block_tables = device.Upload(std::vector<int32_t>{1});
    rows.host_spans = spans.data();
    float* const device_qkv = device.Upload(qkv);
    float* const out = device.New<float>(2 * 32);
    device->RopeAppend(device.queue(), rows, 2, rope, {}, device_qkv, nullptr,
                       *cache, 0);
    device->Attention(device.queue(), rows, 2, {kAttentionScale}, device_qkv,
                      64, *cache, 0, out);
    auto got = device.Download(out, 2 * 32);
    got.resize(32);  // the first row's
    return got;
  };
  const auto clean = attend(1.0f);
  EXPECT_TRUE(SameBits(attend(NAN), clean));
  EXPECT_TRUE(SameBits(attend(INFINITY), clean));
}

INSTANTIATE_TEST_SUITE_P(
    AttentionTest, BehindTest,
    ::testing::Values(std::pair(DType::kF32, CpuInputs::kF32),
                      std::pair(DType::kBF16, CpuInputs::kF32),
                      std::pair(DType::kBF16, CpuInputs::kBf16),
                      std::pair(DType::kBF16, CpuInputs::kBf16Amx),
                      std::pair(DType::kFp8, CpuInputs::kF32),
                      std::pair(DType::kInt8, CpuInputs::kF32),
                      std::pair(DType::kInt4, CpuInputs::kF32)),
    [](const auto& test) {
      return std::string(Name(test.param.first)) + "_of_" +
             Name(test.param.second);
    });

TEST(AttentionTest, ANonFiniteQuantisedVectorIsSeenByWhoeverReadsIt) {
  for (const DType type : {DType::kFp8, DType::kInt8, DType::kInt4}) {
    for (const float poison : {HUGE_VALF, std::nanf("")}) {
      Device device(MakeBackend());
      const Model model{2, 1, 16, type};
      auto qkv = RandomFloats(static_cast<size_t>(3 * model.qkv()), 15);
      qkv[static_cast<size_t>(model.qkv() + 3 * 16 + 5)] = poison;  // V of 1
      const auto got = Attend(device, model, 3, {}, qkv);
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(std::isnan(got[i]), i >= 32) << Name(type) << " " << i;
      }
    }
  }
}

}  // namespace
}  // namespace tandem::kernels
