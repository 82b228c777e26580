// SPDX-License-Identifier: Apache-2.0
// A whole small transformer, every operation in line: its logits have the
// same bits for every batch, chunk, block size, thread count and instruction
// set, and on a backend that finishes late and hides its memory.

#include <algorithm>
#include <functional>
#include <numeric>

#include "kernels/testing/late_backend.h"
#include "tests/kernels/fixture.h"

namespace tandem::kernels {
namespace {

inline constexpr int kLayers = 2;
inline constexpr int kHeads = 6;
inline constexpr int kKvHeads = 2;
inline constexpr int kHeadDim = 24;
inline constexpr int kDim = kHeads * kHeadDim;
inline constexpr int kQkv = (kHeads + 2 * kKvHeads) * kHeadDim;
inline constexpr int kHidden = 200;
inline constexpr int kVocab = 211;
inline constexpr int kLength = 100;

struct Layer {
  Matrix* qkv;
  Matrix* out;
  Matrix* gate_up;
  Matrix* down;
};

class Transformer {
 public:
  Transformer(Device& device, DType type, int block_size, int copies)
      : device_(device), block_size_(block_size), copies_(copies) {
    uint64_t seed = 50;
    const auto pack = [&](int rows, int cols) {
      return &device.Pack(
          RandomFloats(static_cast<size_t>(rows * cols), seed++, 0.08f), rows,
          cols, type);
    };
    table_ = pack(kVocab, kDim);
    const auto pack_gated = [&](int rows, int cols) {
      return &device.PackGated(
          RandomFloats(static_cast<size_t>(rows * cols), seed++, 0.08f), rows,
          cols, type);
    };
    for (Layer& layer : layers_) {
      layer = {pack(kQkv, kDim), pack(kDim, kDim),
               pack_gated(2 * kHidden, kDim), pack(kDim, kHidden)};
    }
    norm_ = device.Upload(RandomFloats(kDim, seed++));
    const int blocks = (kLength + block_size - 1) / block_size;
    cache_ = *device->NewKvCache(
        {kLayers, kKvHeads, kHeadDim, block_size, blocks * copies, type});
    table_ids_.resize(static_cast<size_t>(blocks * copies));
    std::iota(table_ids_.rbegin(), table_ids_.rend(), 0);
    std::vector<float> cos, sin;
    for (int p = 0; p < kLength; ++p) {
      for (int i = 0; i < kHeadDim / 2; ++i) {
        const double angle = p * std::pow(10000.0, -2.0 * i / kHeadDim);
        cos.push_back(static_cast<float>(std::cos(angle)));
        sin.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    rope_ = {device.Upload(cos), device.Upload(sin), kHeadDim / 2};
  }

  // Logits [count, vocab] of positions [begin, begin + count) of the first
  // copy of the sequence; all copies run in the step.
  std::vector<float> Step(int begin, int count) {
    const int blocks = (kLength + block_size_ - 1) / block_size_;
    std::vector<RowSpan> spans;
    std::vector<int32_t> ids, positions, slots;
    for (int c = 0; c < copies_; ++c) {
      spans.push_back({c * count, count, begin, c * blocks});
      for (int p = begin; p < begin + count; ++p) {
        ids.push_back(p * 37 % kVocab);
        positions.push_back(p);
        slots.push_back(
            table_ids_[static_cast<size_t>(c * blocks + p / block_size_)] *
                block_size_ +
            p % block_size_);
      }
    }
    Rows rows;
    rows.num_rows = count * copies_;
    rows.num_spans = copies_;
    rows.token_ids = device_.Upload(ids);
    rows.positions = device_.Upload(positions);
    rows.slots = device_.Upload(slots);
    rows.spans = device_.Upload(spans);
    rows.block_tables = device_.Upload(table_ids_);
    rows.host_spans = spans.data();
    const auto floats = [&](int width) {
      return device_.New<float>(static_cast<size_t>(rows.num_rows * width));
    };
    float* const x = floats(kDim);
    float* const normed = floats(kDim);
    float* const qkv = floats(kQkv);
    float* const delta = floats(kDim);
    float* const hidden = floats(kHidden);
    float* const logits = floats(kVocab);
    Backend& b = *device_;
    Queue& q = device_.queue();
    const int n = rows.num_rows;
    b.Embed(q, rows, *table_, 1, nullptr, x);
    const float* residual = nullptr;
    for (int l = 0; l < kLayers; ++l) {
      const Layer& layer = layers_[l];
      b.RmsNorm(q, n, kDim, 1e-5f, x, residual, norm_, normed);
      b.MatMul(q, n, normed, *layer.qkv, nullptr, qkv);
      b.RopeAppend(q, rows, kHeads, rope_, {}, qkv, nullptr, *cache_, l);
      b.Attention(q, rows, kHeads, {0.2f}, qkv, kQkv, *cache_, l, normed);
      b.MatMul(q, n, normed, *layer.out, nullptr, delta);
      b.RmsNorm(q, n, kDim, 1e-5f, x, delta, norm_, normed);
      b.GatedMatMul(q, n, normed, *layer.gate_up, nullptr, Activation::kSilu,
                    hidden);
      b.MatMul(q, n, hidden, *layer.down, nullptr, delta);
      residual = delta;
    }
    b.RmsNorm(q, n, kDim, 1e-5f, x, residual, norm_, normed);
    b.MatMul(q, n, normed, *table_, nullptr, logits);
    const auto all = device_.Download(logits, static_cast<size_t>(n * kVocab));
    const auto own = static_cast<std::ptrdiff_t>(count) * kVocab;
    for (int c = 1; c < copies_; ++c) {
      EXPECT_TRUE(
          std::equal(all.begin(), all.begin() + own, all.begin() + c * own))
          << "sequence " << c << " of a batch differs";
    }
    return {all.begin(), all.begin() + own};
  }

 private:
  Device& device_;
  const int block_size_;
  const int copies_;
  Matrix* table_;
  Layer layers_[kLayers];
  float* norm_;
  std::unique_ptr<KvCache> cache_;
  std::vector<int32_t> table_ids_;
  RopeTable rope_;
};

std::vector<float> Logits(std::unique_ptr<Backend> backend, DType type,
                          int block_size, int copies, int chunk) {
  Device device(std::move(backend));
  Transformer model(device, type, block_size, copies);
  std::vector<float> logits;
  for (int begin = 0; begin < kLength; begin += chunk) {
    const auto part = model.Step(begin, std::min(chunk, kLength - begin));
    logits.insert(logits.end(), part.begin(), part.end());
  }
  return logits;
}

class StackTest : public ::testing::TestWithParam<DType> {};

TEST_P(StackTest, LogitsHaveOneValueHoweverTheyAreComputed) {
  const auto expected = Logits(MakeBackend("avx2"), GetParam(), 16, 1, kLength);
  ASSERT_TRUE(std::all_of(expected.begin(), expected.end(),
                          [](float x) { return std::isfinite(x); }));
  for (const char* isa : {"avx2", "avx512"}) {
    for (const int threads : {1, 2}) {
      for (const auto& [copies, chunk] :
           {std::pair{1, 1}, std::pair{1, 7}, std::pair{1, 64}, std::pair{3, 7},
            std::pair{8, 64}, std::pair{8, 1}, std::pair{32, 64},
            std::pair{32, 7}}) {
        auto backend = MakeBackend(isa, threads);
        if (backend == nullptr) continue;
        EXPECT_TRUE(
            SameBits(Logits(std::move(backend), GetParam(), 16, copies, chunk),
                     expected))
            << isa << " threads " << threads << " batch " << copies << " chunk "
            << chunk;
      }
    }
  }
  EXPECT_TRUE(
      SameBits(Logits(MakeBackend("auto", 2), GetParam(), 8, 3, 64), expected));
}

TEST_P(StackTest, TheLateBackendComputesTheSame) {
  testing::LateOptions options;
  options.cpu.threads = 2;
  options.max_delay_microseconds = 300;
  auto late = testing::NewLateBackend(options);
  ASSERT_TRUE(late.ok());
  EXPECT_TRUE(SameBits(Logits(*std::move(late), GetParam(), 16, 2, 40),
                       Logits(MakeBackend(), GetParam(), 16, 1, kLength)));
}

TEST(InstructionSetTest, ThisMachineComparesAvx2WithAvx512) {
  if (MakeBackend("avx512") == nullptr) {
    GTEST_SKIP() << "this CPU has no AVX-512: nothing to compare AVX2 with";
  }
  EXPECT_NE((*MakeBackend("avx512")).description().find("avx512"),
            std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Types, StackTest,
                         ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& param) {
                           return std::string(Name(param.param));
                         });

}  // namespace
}  // namespace tandem::kernels
