// SPDX-License-Identifier: Apache-2.0
// KV on its way between workers: what is gathered from one cache and scattered
// into another, of another block size or type, is the same KV, and the digest
// notices everything else.

#include <algorithm>
#include <numeric>

#include "kernels/cpu/allocator.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/kv_digest.h"
#include "kernels/quantise.h"
#include "tests/kernels/fixture.h"
#include "tests/kernels/other_heads.h"

namespace tandem::kernels {
namespace {

inline constexpr uint64_t kKey = 0x123456789abcdef0u;

struct Cache {
  std::unique_ptr<KvCache> kv;
  std::vector<int32_t> table;

  KvRange Range(int position_begin, int position_end) const {
    KvRange range;
    range.block_table = table.data();
    range.position_begin = position_begin;
    range.position_end = position_end;
    range.layer_end = kv->shape().num_layers;
    range.head_end = kv->shape().kv_heads;
    return range;
  }
};

Cache NewCache(Device& device, int head_dim, int block_size, DType type,
               int length) {
  const int blocks = (length + block_size - 1) / block_size;
  Cache cache{
      *device->NewKvCache({3, 2, head_dim, block_size, 2 * blocks + 1, type}),
      std::vector<int32_t>(static_cast<size_t>(blocks))};
  std::iota(cache.table.begin(), cache.table.end(), blocks);
  std::shuffle(cache.table.begin(), cache.table.end(), std::mt19937_64(3));
  return cache;
}

size_t Bytes(const Cache& cache, const KvRange& range, DType wire) {
  return static_cast<size_t>(range.bytes(wire, cache.kv->shape().head_dim));
}

// Wire bytes of a range, and the digest that came with them.
std::vector<uint8_t> Gather(Device& device, const Cache& cache,
                            const KvRange& range, DType wire,
                            KvDigest* digest) {
  const size_t bytes = Bytes(cache, range, wire);
  std::byte* const staging =
      device.Upload(std::vector<std::byte>(bytes, std::byte{0xff}));
  device->KvGather(device.queue(), *cache.kv, range, wire, kKey, staging,
                   digest);
  return device.Download(reinterpret_cast<uint8_t*>(staging), bytes);
}

void Scatter(Device& device, Cache& cache, const KvRange& range, DType wire,
             const std::vector<uint8_t>& bytes) {
  device->KvScatter(device.queue(), *cache.kv, range, wire,
                    reinterpret_cast<const std::byte*>(device.Upload(bytes)));
  device.queue().Synchronize();
}

KvDigest DigestOf(Device& device, const Cache& cache, const KvRange& range,
                  DType wire) {
  KvDigest digest;
  device->KvDigestOf(device.queue(), *cache.kv, range, wire, kKey, &digest);
  device.queue().Synchronize();
  return digest;
}

std::vector<uint8_t> RandomWire(size_t bytes, DType wire, uint64_t seed) {
  const auto values = RandomFloats(bytes / SizeOf(wire), seed);
  std::vector<uint8_t> out(bytes);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(values[i]);
    const uint16_t half = static_cast<uint16_t>(bits >> 16);
    if (wire == DType::kF32) {
      std::memcpy(&out[4 * i], &bits, 4);
    } else {
      std::memcpy(&out[2 * i], &half, 2);
    }
  }
  return out;
}

TEST(KvTest, QueriesMayLieApartFromKeysAndValues) {
  constexpr int kRows = 3, kHeads = 3, kKvHeads = 2, kDim = 24;
  constexpr int kQuery = kHeads * kDim, kKv = 2 * kKvHeads * kDim;
  const auto q = RandomFloats(kRows * kQuery, 61);
  const auto kv = RandomFloats(kRows * kKv, 62);
  const auto cos = RandomFloats(kRows * kDim / 2, 63);
  const auto sin = RandomFloats(kRows * kDim / 2, 64);
  std::vector<float> together;
  for (int row = 0; row < kRows; ++row) {
    together.insert(together.end(), q.begin() + row * kQuery,
                    q.begin() + (row + 1) * kQuery);
    together.insert(together.end(), kv.begin() + row * kKv,
                    kv.begin() + (row + 1) * kKv);
  }
  for (const DType type : {DType::kF32, DType::kBF16}) {
    // Rows' queries, and what the cache has of them.
    const auto run = [&](bool apart, std::vector<float>* queries) {
      Device device(MakeBackend());
      Cache cache = NewCache(device, kDim, 16, type, kRows);
      Rows rows;
      rows.num_rows = kRows;
      rows.positions = device.Upload(std::vector<int32_t>{0, 1, 2});
      const int32_t first = cache.table[0] * 16;
      rows.slots =
          device.Upload(std::vector<int32_t>{first, first + 1, first + 2});
      float* const x = device.Upload(apart ? q : together);
      device->RopeAppend(device.queue(), rows, kHeads,
                         {device.Upload(cos), device.Upload(sin)}, {}, x,
                         apart ? device.Upload(kv) : nullptr, *cache.kv, 0);
      const int stride = apart ? kQuery : kQuery + kKv;
      const auto got = device.Download(x, static_cast<size_t>(kRows) * stride);
      for (int row = 0; row < kRows; ++row) {
        queries->insert(queries->end(), got.begin() + row * stride,
                        got.begin() + row * stride + kQuery);
      }
      KvDigest digest;
      return Gather(device, cache, cache.Range(0, kRows), DType::kF32, &digest);
    };
    std::vector<float> apart, joined;
    EXPECT_EQ(run(true, &apart), run(false, &joined));
    EXPECT_TRUE(SameBits(apart, joined));
  }
}

TEST(KvTest, RoundTripsBetweenBlockSizesAndTypes) {
  Device device(MakeBackend());
  const int length = 100;
  for (const int dim : {8, 24, 64}) {
    for (const DType from : {DType::kF32, DType::kBF16}) {
      for (const DType to : {DType::kF32, DType::kBF16}) {
        for (const int block : {8, 24, 32}) {
          // A bf16 end holds bf16 values, so a bf16 wire loses nothing.
          const DType wire = from == DType::kF32 && to == DType::kF32
                                 ? DType::kF32
                                 : DType::kBF16;
          Cache source = NewCache(device, dim, 16, from, length);
          Cache target = NewCache(device, dim, block, to, length);
          const KvRange source_range = source.Range(0, length);
          const auto sent =
              RandomWire(Bytes(source, source_range, wire), wire, 31);
          Scatter(device, source, source_range, wire, sent);
          KvDigest sender;
          const auto gathered =
              Gather(device, source, source_range, wire, &sender);
          EXPECT_TRUE(gathered == sent);
          // In two slices, the later one first.
          const size_t row = sent.size() / 3 / length;
          for (const auto& [begin, end] :
               {std::pair{41, length}, std::pair{0, 41}}) {
            std::vector<uint8_t> slice;
            for (size_t layer = 0; layer < 3; ++layer) {
              const auto at =
                  gathered.begin() +
                  static_cast<std::ptrdiff_t>(
                      (layer * length + static_cast<size_t>(begin)) * row);
              slice.insert(slice.end(), at,
                           at + static_cast<std::ptrdiff_t>(
                                    static_cast<size_t>(end - begin) * row));
            }
            Scatter(device, target, target.Range(begin, end), wire, slice);
          }
          KvDigest receiver;
          EXPECT_TRUE(Gather(device, target, target.Range(0, length), wire,
                             &receiver) == sent)
              << dim << " block " << block;
          EXPECT_EQ(sender, receiver);
          EXPECT_EQ(sender,
                    DigestOf(device, target, target.Range(0, length), wire));
        }
      }
    }
  }
}

// Whatever one end holds, the other gets it: the wire is in the receiver's
// format, and what it holds then is what it would say again. f32 on the wire
// of a bf16 cache goes vector by vector, and so checks what goes in squares.
class KvOf : public ::testing::TestWithParam<const char*> {};

TEST_P(KvOf, EachPairOfFormatsConvertsOnceAndThenRoundTrips) {
  Device device(MakeBackend(GetParam()));
  const DType types[] = {DType::kF32, DType::kBF16, DType::kFp8, DType::kInt8,
                         DType::kInt4};
  const int length = 20;
  for (const int dim : {8, 40, 64}) {
    for (const DType from : types) {
      for (const DType to : types) {
        Cache source = NewCache(device, dim, 16, from, length);
        Cache target = NewCache(device, dim, 24, to, length);
        const KvRange all = source.Range(0, length);
        const auto values =
            RandomFloats(static_cast<size_t>(all.elements(dim)), 41, 3.0f);
        std::vector<uint8_t> wide(values.size() * 4);
        std::memcpy(wide.data(), values.data(), wide.size());
        Scatter(device, source, all, DType::kF32, wide);
        KvDigest sender;
        const auto sent = Gather(device, source, all, to, &sender);
        const KvRange there = target.Range(0, length);
        Scatter(device, target, there, to, sent);
        KvDigest receiver;
        EXPECT_TRUE(Gather(device, target, there, to, &receiver) == sent);
        EXPECT_EQ(sender, receiver);
        EXPECT_EQ(sender, DigestOf(device, target, there, to));
        const auto got = Gather(device, target, there, DType::kF32, &receiver);
        for (size_t v = 0; v < values.size(); v += static_cast<size_t>(dim)) {
          const auto once =
              CachedVector(&values[v], static_cast<size_t>(dim), from);
          const auto twice = CachedVector(once.data(), once.size(), to);
          std::vector<float> vector(twice.size());
          std::memcpy(vector.data(), &got[v * 4], vector.size() * 4);
          ASSERT_TRUE(SameBits(vector, from == to ? once : twice))
              << Name(from) << " to " << Name(to) << ", " << v;
        }
      }
    }
  }
}

// By vectors of its own, which round as the definition does.
TEST_P(KvOf, WhatIsAppendedIsWhatIsScattered) {
  Device device(MakeBackend(GetParam()));
  const int length = 20;
  const int heads = 2;
  for (const int dim : {8, 40, 64}) {
    for (const DType type :
         {DType::kF32, DType::kBF16, DType::kFp8, DType::kInt8, DType::kInt4}) {
      Cache appended = NewCache(device, dim, 16, type, length);
      Cache scattered = NewCache(device, dim, 16, type, length);
      KvRange range = appended.Range(0, length);
      range.layer_end = 1;
      auto kv = RandomFloats(static_cast<size_t>(range.elements(dim)), 43);
      for (size_t i = 0; i < kv.size(); i += 3) {  // halves between two of bf16
        const uint32_t bits = std::bit_cast<uint32_t>(kv[i]);
        kv[i] = std::bit_cast<float>((bits & 0xffff0000u) | 0x8000u);
      }
      const auto row = static_cast<std::ptrdiff_t>(kv.size()) / length;
      std::vector<float> qkv;
      std::vector<int32_t> positions, slots;
      for (int i = 0; i < length; ++i) {
        qkv.insert(qkv.end(), static_cast<size_t>(heads * dim), 0.0f);
        qkv.insert(qkv.end(), kv.begin() + i * row, kv.begin() + (i + 1) * row);
        positions.push_back(i);
        slots.push_back(appended.table[static_cast<size_t>(i / 16)] * 16 +
                        i % 16);
      }
      Rows rows;
      rows.num_rows = length;
      rows.positions = device.Upload(positions);
      rows.slots = device.Upload(slots);
      device->RopeAppend(device.queue(), rows, heads, {}, {},
                         device.Upload(qkv), nullptr, *appended.kv, 0);
      std::vector<uint8_t> wide(kv.size() * 4);
      std::memcpy(wide.data(), kv.data(), wide.size());
      KvRange there = scattered.Range(0, length);
      there.layer_end = 1;
      Scatter(device, scattered, there, DType::kF32, wide);
      KvDigest digest;
      EXPECT_TRUE(Gather(device, appended, range, type, &digest) ==
                  Gather(device, scattered, there, type, &digest))
          << Name(type) << " " << dim;
    }
  }
}

// The digest is of these bytes, too.
TEST_P(KvOf, WhatRoundsRowsUpIsZero) {
  Device device(MakeBackend(GetParam()));
  for (const DType type : {DType::kFp8, DType::kInt8, DType::kInt4}) {
    const int length = 11;
    const Cache cache = NewCache(device, 24, 16, type, length);
    KvRange range = cache.Range(0, length);
    range.head_end = 1;
    const auto row = static_cast<size_t>(KvRowBytes(type, 1, 24));
    const auto used = static_cast<size_t>(2 * KvVectorBytes(type, 24));
    ASSERT_LT(used, row);
    KvDigest digest;
    const auto wire = Gather(device, cache, range, type, &digest);
    for (size_t at = 0; at < wire.size(); at += row) {
      for (size_t i = used; i < row; ++i) {
        ASSERT_EQ(wire[at + i], 0) << Name(type) << " " << at + i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, KvOf,
                         ::testing::Values("avx2", "auto"));

TEST(KvTest, QuantisedBytesAreCounted) {
  const KvShape shape{3, 2, 64, 16, 5, DType::kInt8};
  EXPECT_EQ(shape.bytes_per_position(), 2 * 3 * 2 * (64 + 4));
  EXPECT_EQ(KvRowBytes(DType::kInt8, 2, 64), 2 * 2 * (64 + 4));
  EXPECT_EQ(KvRowBytes(DType::kFp8, 1, 64), 2 * (64 + 4) + 8) << "padded";
  EXPECT_EQ(KvRowBytes(DType::kBF16, 1, 8), 2 * 8 * 2);
  EXPECT_EQ(KvVectorBytes(DType::kInt4, 128), 64 + 4 * 2);
  EXPECT_EQ(KvVectorBytes(DType::kInt4, 40), 20 + 2 * 2) << "32 and 8";
  EXPECT_EQ(KvRowBytes(DType::kInt4, 2, 40), 4 * (20 + 4));
  EXPECT_EQ(KvRowBytes(DType::kInt4, 1, 8), 2 * (4 + 2) + 4) << "padded";
}

// Counts what it gives.
class Counting final : public cpu::DeviceAllocator {
 public:
  absl::StatusOr<std::byte*> Allocate(size_t bytes) override {
    given_ += bytes;
    return cpu::HostMemory().Allocate(bytes);
  }
  void Free(std::byte* data, size_t bytes) override {
    cpu::HostMemory().Free(data, bytes);
  }
  size_t given() const { return given_; }

 private:
  size_t given_ = 0;
};

TEST(KvTest, ACacheTakesItsBlocksBytes) {
  Counting counting;
  auto backend = NewCpuBackend({.threads = 1, .allocator = &counting});
  ASSERT_TRUE(backend.ok()) << backend.status();
  const auto expect = [&](const KvShape& shape, int64_t block) {
    SCOPED_TRACE(Name(shape.dtype));
    EXPECT_EQ(CpuKvBlockBytes(shape), block);
    const size_t before = counting.given();
    const auto cache = (*backend)->NewKvCache(shape);
    ASSERT_TRUE(cache.ok()) << cache.status();
    EXPECT_EQ(counting.given() - before,
              static_cast<size_t>(block * shape.num_blocks));
  };
  const KvShape plain{3, 2, 64, 16, 5, DType::kBF16};
  expect(plain, plain.bytes_per_position() * 16);
  // Keys of 16 positions, scales of both of 16.
  expect({3, 2, 64, 8, 5, DType::kInt8}, 3 * 2 * (64 * (16 + 8) + 2 * 16 * 4));
  // Values of 96 dimensions.
  expect({3, 2, 80, 16, 5, DType::kInt4},
         3 * 2 * 16 * ((80 + 96) / 2 + 2 * 3 * 2));
  for (const KvShape& shape : testing::MixedShapes(DType::kInt8)) {
    expect(shape, CpuKvBlockBytes(shape));
  }
}

TEST(KvTest, LayersWithOtherHeadsShareACache) {
  const auto backend = MakeBackend();
  testing::OtherHeads heads(*backend);
  for (const DType type :
       {DType::kF32, DType::kBF16, DType::kFp8, DType::kInt8, DType::kInt4}) {
    for (const KvShape& shape : testing::MixedShapes(type)) {
      SCOPED_TRACE(Name(type));
      heads.Check(shape);
    }
  }
  // Two vectors of 256 codes and their scales take more than one of 512.
  const KvShape wide = testing::MixedShapes(DType::kInt8)[1];
  EXPECT_EQ(wide.bytes_per_position(), 3 * 2 * 2 * (256 + 4));
  KvShape bad = wide;
  bad.other_head_dim = 12;
  EXPECT_EQ(backend->NewKvCache(bad).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(KvTest, Int4IsTwoCodesToAByteAndAScaleForEachGroup) {
  Device device(MakeBackend());
  Cache cache = NewCache(device, 40, 16, DType::kInt4, 1);
  const KvRange range = cache.Range(0, 1);
  std::vector<float> values(static_cast<size_t>(range.elements(40)));
  // K of head 0: 32 whole numbers with -8, then 8 halves of which the largest
  // is positive, so that its sign is the scale's.
  for (int i = 0; i < 32; ++i) values[i] = static_cast<float>(i % 16 - 8);
  const float halves[] = {0.5f, -0.5f, 4.0f, 1.25f, -3.5f, 0, -0.25f, 0.75f};
  std::copy(std::begin(halves), std::end(halves), values.begin() + 32);
  std::vector<uint8_t> wide(values.size() * 4);
  std::memcpy(wide.data(), values.data(), wide.size());
  Scatter(device, cache, range, DType::kF32, wide);
  KvDigest digest;
  const auto got = Gather(device, cache, range, DType::kInt4, &digest);
  // Codes of -8, -7, ... 7, twice; then of x / -0.5, ties to even: -1, 1, -8,
  // -2, 7, 0, 0, -2.
  const std::vector<uint8_t> codes = {0x98, 0xba, 0xdc, 0xfe, 0x10, 0x32, 0x54,
                                      0x76, 0x98, 0xba, 0xdc, 0xfe, 0x10, 0x32,
                                      0x54, 0x76, 0x1f, 0xe8, 0x07, 0xe0};
  EXPECT_EQ(std::vector<uint8_t>(got.begin(), got.begin() + 20), codes);
  // Behind the codes of four vectors: 1 and -0.5 as bf16.
  EXPECT_EQ(std::vector<uint8_t>(got.begin() + 80, got.begin() + 84),
            (std::vector<uint8_t>{0x80, 0x3f, 0x00, 0xbf}));
}

TEST(QuantiseTest, CodesAreTheNearestOnesTiesToEven) {
  for (const DType type : {DType::kFp8, DType::kInt8}) {
    // Each code is its own nearest; between two neighbours the even one wins.
    const int last = type == DType::kFp8 ? 0x7e : 127;
    const auto value = [&](int code) {
      return FloatFromCode(type, static_cast<uint8_t>(code));
    };
    const auto nearest = [&](float x) {
      return type == DType::kFp8 ? E4M3FromFloat(x)
                                 : static_cast<uint8_t>(Int8FromFloat(x));
    };
    for (int code = 0; code <= last; ++code) {
      EXPECT_EQ(nearest(value(code)), code);
      EXPECT_EQ(value(nearest(-value(code))), -value(code));
      if (code == last) continue;
      const float middle = (value(code) + value(code + 1)) / 2;
      EXPECT_EQ(nearest(middle), code + code % 2);
      EXPECT_EQ(nearest(std::nextafter(middle, 0.0f)), code);
      EXPECT_EQ(nearest(std::nextafter(middle, 1e9f)), code + 1);
    }
    EXPECT_EQ(nearest(1e30f), last);
  }
  for (int code = -8; code < 7; ++code) {
    const float middle = static_cast<float>(code) + 0.5f;
    EXPECT_EQ(Int4FromFloat(static_cast<float>(code)), code);
    EXPECT_EQ(Int4FromFloat(middle), code + std::abs(code % 2));
    EXPECT_EQ(FloatFromCode(DType::kInt4, static_cast<uint8_t>(code & 15)),
              static_cast<float>(code));
  }
  EXPECT_EQ(Int4FromFloat(1e30f), 7);
  EXPECT_EQ(Int4FromFloat(-1e30f), -8);
  EXPECT_TRUE(std::isnan(FloatFromE4M3(E4M3FromFloat(std::nanf("")))));
}

TEST(QuantiseTest, ZerosAndWhatIsNotFiniteAreAsStated) {
  for (const DType type : {DType::kFp8, DType::kInt8, DType::kInt4}) {
    for (const float tiny : {0.0f, 0x1p-101f, 0x1p-140f}) {
      const VectorQuantiser quantiser(type, MagnitudeKey(tiny));
      EXPECT_EQ(quantiser.scale, 0.0f);
      EXPECT_EQ(quantiser(tiny), 0);
    }
    for (const float bad : {HUGE_VALF, -HUGE_VALF, std::nanf("")}) {
      const VectorQuantiser quantiser(type, MagnitudeKey(bad));
      EXPECT_TRUE(std::isnan(quantiser.scale));
      EXPECT_EQ(quantiser(bad), 0);
      EXPECT_EQ(quantiser(1.0f), 0);
    }
    const VectorQuantiser least(type, MagnitudeKey(-0x1p-100f));
    EXPECT_EQ(FloatFromCode(type, least(-0x1p-100f)) * least.scale, -0x1p-100f);
    const VectorQuantiser most(type, MagnitudeKey(0x1p127f));
    EXPECT_EQ(FloatFromCode(type, most(0x1p127f)) * most.scale, 0x1p127f);
  }
}

TEST(KvTest, ConversionsRoundToNearestEven) {
  Device device(MakeBackend());
  Cache wide = NewCache(device, 8, 16, DType::kF32, 1);
  const std::vector<uint32_t> cases = {
      0x3f800000, 0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff, 0xbf808000,
      0x7f800000, 0xff800000, 0x7fc00000, 0x7f7fffff, 0x7f800001, 0x00000000};
  const KvRange range = wide.Range(0, 1);
  std::vector<uint32_t> words(static_cast<size_t>(range.elements(8)));
  for (size_t i = 0; i < words.size(); ++i) words[i] = cases[i % cases.size()];
  std::vector<uint8_t> bytes(words.size() * 4);
  std::memcpy(bytes.data(), words.data(), bytes.size());
  Scatter(device, wide, range, DType::kF32, bytes);
  KvDigest digest;
  const auto narrow = Gather(device, wide, range, DType::kBF16, &digest);
  const std::vector<uint16_t> expected = {0x3f80, 0x3f80, 0x3f82, 0x3f81,
                                          0x3f80, 0xbf80, 0x7f80, 0xff80,
                                          0x7fc0, 0x7f80, 0x7fc0, 0x0000};
  for (size_t i = 0; i < words.size(); ++i) {
    uint16_t got;
    std::memcpy(&got, &narrow[2 * i], 2);
    EXPECT_EQ(got, expected[i % expected.size()]) << i;
  }
}

TEST(KvTest, AHeadRangeReadsAndWritesOnlyItsHeads) {
  Device device(MakeBackend());
  Cache cache = NewCache(device, 16, 16, DType::kBF16, 20);
  KvRange all = cache.Range(0, 20);
  const auto before =
      RandomWire(Bytes(cache, all, DType::kBF16), DType::kBF16, 32);
  Scatter(device, cache, all, DType::kBF16, before);
  KvRange second = cache.Range(3, 9);
  second.head_begin = 1;
  second.layer_begin = 1;
  second.layer_end = 2;
  const auto fresh =
      RandomWire(Bytes(cache, second, DType::kBF16), DType::kBF16, 33);
  Scatter(device, cache, second, DType::kBF16, fresh);
  KvDigest digest;
  EXPECT_TRUE(Gather(device, cache, second, DType::kBF16, &digest) == fresh);
  const auto after = Gather(device, cache, all, DType::kBF16, &digest);
  // Rows are K head 0, K head 1, V head 0, V head 1 of 32 bytes each.
  for (size_t i = 0; i < after.size(); ++i) {
    const size_t row = i / 128, head = i / 32 % 2;
    const size_t layer = row / 20, position = row % 20;
    const bool written =
        layer == 1 && position >= 3 && position < 9 && head == 1;
    if (written) continue;
    ASSERT_EQ(after[i], before[i]) << i;
  }
}

TEST(KvTest, CopyBlockCopiesAllLayers) {
  Device device(MakeBackend());
  Cache cache = NewCache(device, 24, 16, DType::kF32, 16);
  const KvRange range = cache.Range(0, 16);
  const auto sent =
      RandomWire(Bytes(cache, range, DType::kF32), DType::kF32, 34);
  Scatter(device, cache, range, DType::kF32, sent);
  device->KvCopyBlock(device.queue(), *cache.kv, cache.table[0], 0);
  Cache copy{nullptr, {0}};
  KvRange copied = range;
  copied.block_table = copy.table.data();
  KvDigest digest;
  EXPECT_TRUE(Gather(device, cache, copied, DType::kF32, &digest) == sent);
}

TEST(KvTest, RefusesShapesThatItCannotHold) {
  auto backend = MakeBackend();
  const KvShape good{1, 1, 16, 16, 1, DType::kF32};
  EXPECT_TRUE(backend->NewKvCache(good).ok());
  const auto code = [&](auto change) {
    KvShape shape = good;
    change(shape);
    return backend->NewKvCache(shape).status().code();
  };
  const auto invalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](KvShape& s) { s.head_dim = 12; }), invalid);
  EXPECT_EQ(code([](KvShape& s) { s.head_dim = kMaxHeadDim + 8; }), invalid);
  EXPECT_EQ(code([](KvShape& s) { s.block_size = 4; }), invalid);
  EXPECT_EQ(code([](KvShape& s) { s.num_layers = 0; }), invalid);
  EXPECT_EQ(code([](KvShape& s) { s.num_blocks = 0; }), invalid);
  EXPECT_EQ(code([](KvShape& s) { s.dtype = DType::kF16; }), invalid);
  EXPECT_EQ(code([](KvShape& s) { s.dtype = DType::kW8A8; }), invalid);
}

TEST(KvDigestTest, TheVectorFormEqualsTheDefinition) {
  const DigestKeys keys(kKey);
  for (const char* isa : {"avx2", "avx512"}) {
    const auto table = cpu::MakeKernelTable(isa);
    if (!table.ok()) continue;
    for (const size_t words : {2, 4, 6, 8, 10, 64, 1022, 1024, 1026, 5000}) {
      std::mt19937 random(7);
      std::vector<uint32_t> row(words);
      for (uint32_t& word : row) word = static_cast<uint32_t>(random());
      EXPECT_EQ(table->digest_row(row.data(), static_cast<int>(words), keys.low,
                                  keys.high, kKey, 5, 77),
                DigestRow(keys, reinterpret_cast<const std::byte*>(row.data()),
                          words * 4, 5, 77))
          << isa << " " << words;
    }
  }
}

TEST(KvDigestTest, SlicesAddUpInAnyOrder) {
  Device device(MakeBackend());
  Cache cache = NewCache(device, 16, 16, DType::kBF16, 50);
  const KvRange all = cache.Range(0, 50);
  Scatter(device, cache, all, DType::kBF16,
          RandomWire(Bytes(cache, all, DType::kBF16), DType::kBF16, 35));
  KvDigest sum;
  for (const auto& [begin, end] :
       {std::pair{30, 50}, std::pair{0, 7}, std::pair{7, 30}}) {
    for (const int layer : {2, 0, 1}) {
      KvRange part = cache.Range(begin, end);
      part.layer_begin = layer;
      part.layer_end = layer + 1;
      sum += DigestOf(device, cache, part, DType::kBF16);
    }
  }
  EXPECT_EQ(sum, DigestOf(device, cache, all, DType::kBF16));
}

TEST(KvDigestTest, AnyFlippedBitChangesBothHalves) {
  const DigestKeys keys(kKey);
  std::vector<uint8_t> row(4400);
  std::mt19937 random(8);
  for (uint8_t& byte : row) byte = static_cast<uint8_t>(random());
  const auto digest = [&] {
    return DigestRow(keys, reinterpret_cast<const std::byte*>(row.data()),
                     row.size(), 1, 2);
  };
  const KvDigest whole = digest();
  for (size_t bit = 0; bit < row.size() * 8; ++bit) {
    row[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
    const KvDigest changed = digest();
    EXPECT_NE(changed.low, whole.low) << bit;
    EXPECT_NE(changed.high, whole.high) << bit;
    row[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
  }
}

TEST(KvDigestTest, SwappedRowsLayersHalvesAndKeysChangeIt) {
  Device device(MakeBackend());
  Cache cache = NewCache(device, 16, 16, DType::kBF16, 4);
  const KvRange all = cache.Range(0, 4);
  const auto sent =
      RandomWire(Bytes(cache, all, DType::kBF16), DType::kBF16, 36);
  const auto digest_of = [&](const std::vector<uint8_t>& bytes) {
    Scatter(device, cache, all, DType::kBF16, bytes);
    return DigestOf(device, cache, all, DType::kBF16);
  };
  const KvDigest whole = digest_of(sent);
  const auto swapped = [&](std::ptrdiff_t a, std::ptrdiff_t b,
                           std::ptrdiff_t size) {
    auto bytes = sent;
    std::swap_ranges(bytes.begin() + a, bytes.begin() + a + size,
                     bytes.begin() + b);
    return bytes;
  };
  EXPECT_NE(digest_of(swapped(0, 128, 128)), whole) << "positions 0 and 1";
  EXPECT_NE(digest_of(swapped(0, 4 * 128, 128)), whole) << "layers 0 and 1";
  EXPECT_NE(digest_of(swapped(0, 64, 64)), whole) << "K and V";
  EXPECT_NE(digest_of(swapped(0, 32, 32)), whole) << "heads 0 and 1";
  EXPECT_EQ(digest_of(sent), whole);
  const DigestKeys one(1), two(2);
  const auto* const row = reinterpret_cast<const std::byte*>(sent.data());
  EXPECT_NE(DigestRow(one, row, 128, 0, 0), DigestRow(two, row, 128, 0, 0));
}

TEST(KvDigestTest, TheDefinitionStaysAsItWas) {
  // Both ends of a rolling upgrade must agree: changing this changes the
  // internal protocol.
  std::vector<uint32_t> row(1030);
  for (size_t i = 0; i < row.size(); ++i) {
    row[i] = static_cast<uint32_t>(i * 2654435761u);
  }
  const KvDigest digest =
      DigestRow(DigestKeys(42), reinterpret_cast<const std::byte*>(row.data()),
                row.size() * 4, 3, 1000);
  EXPECT_EQ(digest.low, 0xebc7de158a3b57a6u);
  EXPECT_EQ(digest.high, 0xe2d0938c83c49fcu);
}

}  // namespace
}  // namespace tandem::kernels
