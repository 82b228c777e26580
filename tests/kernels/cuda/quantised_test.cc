// SPDX-License-Identifier: Apache-2.0
// Quantised KV caches on the emulated device: appended vectors have the codes
// and scales of kernels/quantise.h's words, and slices have the bytes and
// digests of the CPU backend, whichever formats the two ends have.

#include <numeric>

#include "kernels/quantise.h"
#include "tests/kernels/cuda/checks.h"

namespace tandem::kernels::cuda {
namespace {

// Vectors that show rounding, zeros, and what is not finite.
std::vector<float> Vectors(int64_t count, int head_dim) {
  auto values = RandomFloats(At(count), 71, 2.0f);
  const auto fill = [&](int vector, float value) {
    std::fill_n(values.begin() + int64_t{vector} * head_dim, head_dim, value);
  };
  fill(0, 0.0f);
  fill(3, 0x1p-110f);
  values[At(5 * head_dim + 3)] = HUGE_VALF;
  values[At(6 * head_dim + 1)] = std::nanf("");
  fill(7, -1e30f);
  return values;
}

// Where the view's words say, counted out here.
void Put(const KvView& kv, const StoredVector& vector, int block, int side,
         int head, int slot, std::byte* cache) {
  const size_t row = vector.codes.size();
  const size_t scale = vector.scale_bytes;
  const size_t groups = vector.scales.size() / scale;
  const size_t heads = 2 * At(kv.kv_heads);
  const size_t size = At(kv.block_size);
  const size_t block_bytes = heads * size * (row + groups * scale);
  const size_t which = At(side) * At(kv.kv_heads) + At(head);
  std::byte* const at =
      cache + (At(kv.num_blocks) + At(block)) * block_bytes;  // layer 1
  std::copy(vector.codes.begin(), vector.codes.end(),
            at + (which * size + At(slot)) * row);
  for (size_t g = 0; g < groups; ++g) {
    std::copy_n(vector.scales.data() + g * scale, scale,
                at + heads * size * row +
                    ((which * groups + g) * size + At(slot)) * scale);
  }
}

TEST(CudaQuantised, AppendHasTheCodesAndScalesOfTheDefinition) {
  struct Case {
    DType type, cache;
    int heads, kv_heads, head_dim, block_size;
  };
  const Case cases[] = {{DType::kF32, DType::kFp8, 4, 2, 8, 16},
                        {DType::kF32, DType::kInt8, 3, 1, 24, 8},
                        {DType::kBF16, DType::kFp8, 4, 4, 256, 16},
                        {DType::kBF16, DType::kInt8, 2, 2, 128, 16},
                        {DType::kF32, DType::kInt4, 4, 2, 8, 16},
                        {DType::kBF16, DType::kInt4, 3, 1, 40, 8},
                        {DType::kF16, DType::kInt4, 2, 2, 64, 16},
                        {DType::kBF16, DType::kInt4, 2, 1, 256, 32},
                        {DType::kBF16, DType::kInt4, 2, 1, 576, 16},
                        {DType::kF16, DType::kFp8, 2, 1, 576, 16},
                        {DType::kF32, DType::kInt8, 1, 1, 320, 8},
                        {DType::kF16, DType::kInt8, 8, 2, 64, 32}};
  for (const Case& c : cases) {
    const std::vector<int32_t> positions = {0, 5, 17, 3};
    const std::vector<int32_t> slots = {c.block_size - 1, 0, 2 * c.block_size,
                                        c.block_size + 3};
    const int rows = static_cast<int>(slots.size());
    const int width = (c.heads + 2 * c.kv_heads) * c.head_dim;
    const int half = c.head_dim / 2;
    auto qkv = Vectors(int64_t{rows} * width, c.head_dim);
    for (float& value : qkv) value = RoundedTo(c.type, value);
    const auto cos = RandomFloats(At(18 * half), 52);
    const auto sin = RandomFloats(At(18 * half), 53);
    KvView kv{nullptr, c.cache, 3, c.kv_heads, c.head_dim, c.block_size};
    std::vector<std::byte> cache(At(2 * kv.layer_stride()), std::byte{0xab});
    auto expected = cache;
    kv.data = cache.data();
    auto bytes = Encode(c.type, qkv);
    ASSERT_EQ(LaunchRopeAppend(
                  StreamOf(Generation::kHopper), c.type,
                  {positions.data(), slots.data(), cos.data(), sin.data(), half,
                   bytes.data(), kv, rows, c.heads, 1}),
              0)
        << emulator::LastFault();
    for (int row = 0; row < rows; ++row) {
      for (int head = c.heads; head < c.heads + 2 * c.kv_heads; ++head) {
        std::vector<float> x(
            qkv.begin() + int64_t{row} * width + head * c.head_dim,
            qkv.begin() + int64_t{row} * width + (head + 1) * c.head_dim);
        for (int i = 0; head < c.heads + c.kv_heads && i < half; ++i) {
          const size_t angle = At(positions[At(row)] * half + i);
          const float a = x[At(i)];
          const float b = x[At(i + half)];
          x[At(i)] = RoundedTo(c.type, a * cos[angle] - b * sin[angle]);
          x[At(i + half)] = RoundedTo(c.type, b * cos[angle] + a * sin[angle]);
        }
        const int side = (head - c.heads) / c.kv_heads;
        const int kv_head = (head - c.heads) % c.kv_heads;
        const int block = slots[At(row)] / c.block_size;
        const int slot = slots[At(row)] % c.block_size;
        Put(kv, StoredOf(x.data(), x.size(), c.cache), block, side, kv_head,
            slot, expected.data());
      }
    }
    EXPECT_TRUE(cache == expected)
        << Name(c.type) << " into " << Name(c.cache) << ", " << c.head_dim;
  }
}

// One sequence's cache on each backend, both filled from f32 on the wire.
class Pair {
 public:
  Pair(DType type, int kv_heads, int head_dim, int block_size, int length)
      : cpu_(MakeBackend()), kv_heads_(kv_heads), length_(length) {
    const int blocks = (length + block_size - 1) / block_size;
    // The CPU keeps what f16 holds as f32.
    cpu_type_ = type == DType::kF16 ? DType::kF32 : type;
    cache_ = *cpu_->NewKvCache(
        {kLayers, kv_heads, head_dim, block_size, blocks, cpu_type_});
    table_.resize(At(blocks));
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), std::mt19937_64(5));
    params_ = {};
    params_.kv = {nullptr, type, blocks, kv_heads, head_dim, block_size};
    memory_.resize(At(kLayers * params_.kv.layer_stride()) * SizeOf(type));
    params_.kv.data = memory_.data();
    params_.digest_key = kDigestKey;
    params_.position_end = length;
    params_.layer_end = kLayers;
    params_.head_end = kv_heads;
    std::copy(table_.begin(), table_.end(), params_.blocks);
  }

  static constexpr int kLayers = 2;
  size_t Bytes(DType wire) const {
    return At(kLayers * length_ *
              KvRowBytes(wire, kv_heads_, params_.kv.head_dim));
  }

  void Scatter(DType wire, const std::vector<std::byte>& bytes) {
    cpu_->KvScatter(cpu_.queue(), *cache_, Range(), wire, cpu_.Upload(bytes));
    cpu_.queue().Synchronize();
    auto copy = bytes;
    params_.wire = wire;
    params_.staging = copy.data();
    params_.layer_stride = static_cast<int64_t>(bytes.size()) / kLayers;
    ASSERT_EQ(LaunchKvScatter(StreamOf(Generation::kHopper), params_), 0)
        << emulator::LastFault();
  }

  // Of the device; they must be those of the CPU.
  std::vector<std::byte> Gather(DType wire) {
    KvDigest expected_digest;
    std::byte* const staging = cpu_.New<std::byte>(Bytes(wire));
    cpu_->KvGather(cpu_.queue(), *cache_, Range(), wire, kDigestKey, staging,
                   &expected_digest);
    const auto expected = cpu_.Download(staging, Bytes(wire));
    std::vector<std::byte> got(Bytes(wire), std::byte{0xab});
    KvDigest digest;
    params_.wire = wire;
    params_.staging = got.data();
    params_.layer_stride = static_cast<int64_t>(got.size()) / kLayers;
    params_.digest = &digest;
    EXPECT_EQ(LaunchKvGather(StreamOf(Generation::kHopper), params_), 0)
        << emulator::LastFault();
    EXPECT_TRUE(got == expected)
        << Name(params_.kv.dtype) << " to " << Name(wire);
    EXPECT_EQ(digest, expected_digest);
    return got;
  }

 private:
  KvRange Range() const {
    KvRange range;
    range.block_table = table_.data();
    range.position_end = length_;
    range.layer_end = kLayers;
    range.head_end = kv_heads_;
    return range;
  }

  Device cpu_;
  const int kv_heads_;
  const int length_;
  DType cpu_type_;
  std::unique_ptr<KvCache> cache_;
  std::vector<int32_t> table_;
  std::vector<std::byte> memory_;
  KvSliceParams params_;
};

TEST(CudaQuantised, SlicesHaveTheBytesOfTheCpuInEachPairOfFormats) {
  const DType types[] = {DType::kF32, DType::kBF16, DType::kF16,
                         DType::kFp8, DType::kInt8, DType::kInt4};
  struct Case {
    int kv_heads, head_dim, block_size, length;
  };
  // Rows that need padding, vectors shorter than a thread's 16 bytes, more
  // than one piece, the widest vectors.
  for (const Case& c : {Case{1, 64, 16, 10},
                        {3, 24, 8, 9},
                        {2, 8, 24, 9},
                        {9, 256, 16, 1},
                        {1, 576, 16, 3}}) {
    for (const DType cache : types) {
      for (const DType wire : types) {
        if (!IsQuantised(cache) && !IsQuantised(wire)) continue;
        Pair pair(cache, c.kv_heads, c.head_dim, c.block_size, c.length);
        // Values that every type can hold.
        const int64_t count =
            int64_t{Pair::kLayers} * c.length * 2 * c.kv_heads * c.head_dim;
        auto values = RandomOf(DType::kF16, count, 72);
        std::fill_n(values.begin() + 2 * c.head_dim, c.head_dim, 0.0f);
        for (float& value : values) value = RoundedTo(DType::kBF16, value);
        pair.Scatter(DType::kF32, Encode(DType::kF32, values));
        const auto bytes = pair.Gather(wire);
        pair.Scatter(wire, bytes);
        pair.Gather(cache);
        // The CPU keeps what is scattered into f16 unrounded.
        if (cache == DType::kF16) continue;
        pair.Gather(wire);
        pair.Gather(DType::kF32);
      }
    }
  }
}

class CudaQuantisedCopy : public testing::TestWithParam<DType> {};

TEST_P(CudaQuantisedCopy, TakesTheScalesAlong) {
  KvView kv{nullptr, GetParam(), 3, 2, 40, 8};
  const int64_t block = kv.block_stride();
  std::vector<std::byte> cache(At(2 * kv.layer_stride()));
  std::mt19937 random(9);
  for (std::byte& byte : cache) byte = static_cast<std::byte>(random());
  auto expected = cache;
  for (const int64_t layer : {int64_t{0}, kv.layer_stride()}) {
    std::copy_n(cache.begin() + layer + block, block,
                expected.begin() + layer + 2 * block);
  }
  kv.data = cache.data();
  ASSERT_EQ(LaunchKvCopyBlock(StreamOf(Generation::kHopper), {kv, 2, 1, 2}), 0);
  EXPECT_TRUE(cache == expected);
}

INSTANTIATE_TEST_SUITE_P(Formats, CudaQuantisedCopy,
                         testing::Values(DType::kInt8, DType::kInt4),
                         [](const auto& test) {
                           return std::string(Name(test.param));
                         });

}  // namespace
}  // namespace tandem::kernels::cuda
