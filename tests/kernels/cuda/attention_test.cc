// SPDX-License-Identifier: Apache-2.0
// Paged attention on the emulated device: bit for bit what
// kernels/cuda/numerics.h states, whoever computes a position, and near
// float64. Cache rows that were never written hold NaNs.

#include <algorithm>
#include <numeric>

#include "kernels/cpu/float_env.h"
#include "kernels/cuda/numerics.h"
#include "kernels/quantise.h"
#include "tests/kernels/cuda/fixture.h"

namespace tandem::kernels::cuda {
namespace {

struct Model {
  DType type;
  int heads;
  int kv_heads;
  int head_dim;
  int block_size = 16;
  int window = 0;
  DType quantised = DType::kF32;  // of a quantised cache; else none
  bool sinks = false;
  float soft_cap = 0;
  DType cache() const { return IsQuantised(quantised) ? quantised : type; }
  int group() const { return heads / kv_heads; }
  int width() const { return heads * head_dim; }
};

std::string NameOf(const Model& m) {
  return std::string(Name(m.type)) + " " + std::to_string(m.heads) + "/" +
         std::to_string(m.kv_heads) + " heads of " +
         std::to_string(m.head_dim) + ", window " + std::to_string(m.window) +
         ", KV " + std::string(Name(m.cache()));
}

inline constexpr float kScale = 0.125f;

// One sequence: what attention reads in its cache, and its queries.
struct Sequence {
  Model model;
  int length;
  std::vector<float> q;  // [length, heads, head_dim]
  std::vector<float> k;  // [length, kv_heads, head_dim]
  std::vector<float> v;
  // What was appended, if that is something else.
  std::vector<float> appended_k;
  std::vector<float> appended_v;
  std::vector<float> sinks;  // [heads]: some outweigh all keys

  Sequence(const Model& m, int n) : model(m), length(n) {
    const int64_t kv = int64_t{n} * m.kv_heads * m.head_dim;
    q = RandomFloats(At(int64_t{n} * m.width()), 1);
    k = RandomFloats(At(kv), 2);
    v = RandomFloats(At(kv), 3);
    for (auto* values : {&q, &k, &v}) {
      for (float& value : *values) value = RoundedTo(m.type, value);
    }
    appended_k = k;
    appended_v = v;
    ReadBack();
    sinks = RandomFloats(At(m.heads), 4, 9.0f);
  }
  void ReadBack() {
    const Model& m = model;
    k = appended_k;
    v = appended_v;
    if (!IsQuantised(m.quantised)) return;
    for (auto* values : {&k, &v}) {
      for (size_t i = 0; i < values->size(); i += At(m.head_dim)) {
        const auto cached =
            CachedVector(&(*values)[i], At(m.head_dim), m.quantised);
        for (size_t d = 0; d < cached.size(); ++d) {
          (*values)[i + d] = RoundedTo(m.type, cached[d]);
        }
      }
    }
  }
  // One vector as the cache holds it, and its scales if it has any.
  StoredVector Stored(int side, int position, int kv_head) const {
    const std::vector<float>& all = side == 0 ? appended_k : appended_v;
    const float* const row = &all[At(
        (int64_t{position} * model.kv_heads + kv_head) * model.head_dim)];
    const std::vector<float> values(row, row + model.head_dim);
    if (!IsQuantised(model.quantised)) {
      return {Encode(model.type, values), {}, 1};
    }
    return StoredOf(values.data(), values.size(), model.quantised);
  }
  const float* K(int position, int kv_head) const {
    return &k[At((int64_t{position} * model.kv_heads + kv_head) *
                 model.head_dim)];
  }
  const float* V(int position, int kv_head) const {
    return &v[At((int64_t{position} * model.kv_heads + kv_head) *
                 model.head_dim)];
  }
  const float* Q(int position, int head) const {
    return &q[At((int64_t{position} * model.heads + head) * model.head_dim)];
  }
};

// Consecutive positions that are one span of a step.
struct Range {
  int first;
  int count;
};

// The rows' outputs [rows, heads * head_dim], spans one after the other. What
// split contexts leave for the merge has room for `room` spans' (0: all).
std::vector<float> Attend(const Sequence& s, const std::vector<Range>& ranges,
                          const Stream& stream, int layer = 1, int room = 0) {
  const Model& m = s.model;
  const int blocks = (s.length + m.block_size - 1) / m.block_size;
  std::vector<int32_t> table(At(blocks));
  std::iota(table.begin(), table.end(), 1);
  std::shuffle(table.begin(), table.end(), std::mt19937_64(9));

  KvView kv{};
  kv.dtype = m.cache();
  kv.num_blocks = blocks + 1;
  kv.kv_heads = m.kv_heads;
  kv.head_dim = m.head_dim;
  kv.block_size = m.block_size;
  std::vector<std::byte> cache(At(2 * kv.layer_stride()) * SizeOf(kv.dtype),
                               std::byte{0xff});
  kv.data = cache.data();
  for (int p = 0; p < s.length; ++p) {
    for (int h = 0; h < m.kv_heads; ++h) {
      for (int side = 0; side < 2; ++side) {
        const StoredVector stored = s.Stored(side, p, h);
        const int block = table[At(p / m.block_size)];
        const int slot = p % m.block_size;
        std::memcpy(&cache[At(kv.Offset(layer, block, side, h, slot)) *
                           SizeOf(kv.dtype)],
                    stored.codes.data(), stored.codes.size());
        for (size_t i = 0; i < stored.scales.size(); i += stored.scale_bytes) {
          std::memcpy(&cache[At(kv.ScaleOffset(layer, block, side, h, slot)) +
                             i / stored.scale_bytes * At(kv.scale_stride())],
                      &stored.scales[i], stored.scale_bytes);
        }
      }
    }
  }
  std::vector<RowSpan> spans;
  std::vector<float> q;
  int most_rows = 0;
  for (const Range& range : ranges) {
    spans.push_back({static_cast<int32_t>(q.size() / At(m.width())),
                     range.count, range.first, 0});
    q.insert(q.end(), s.Q(range.first, 0),
             s.Q(range.first, 0) + int64_t{range.count} * m.width());
    most_rows = std::max(most_rows, range.count);
  }
  const auto encoded = Encode(m.type, q);
  std::vector<std::byte> out(encoded.size(), std::byte{0xff});
  const auto scratch_bytes = [&](int count) {
    return AttentionScratchBytes(count, m.heads, m.head_dim, s.length);
  };
  const size_t most =
      scratch_bytes(room > 0 ? room : static_cast<int>(spans.size()));
  std::vector<float> scratch(most / sizeof(float));
  scratch.resize(scratch.size() + 64, 7.0f);  // nobody's
  AttentionParams params{};
  params.partial_bytes = most - scratch_bytes(0);
  params.spans = spans.data();
  params.block_tables = table.data();
  params.q = encoded.data();
  params.out = out.data();
  params.scratch = scratch.data();
  params.kv = kv;
  params.q_stride = m.width();
  params.scale = kScale;
  params.num_rows = static_cast<int>(q.size() / At(m.width()));
  params.num_spans = static_cast<int>(spans.size());
  params.heads = m.heads;
  params.layer = layer;
  params.max_span_rows = most_rows;
  params.max_positions = s.length;
  params.window = m.window;
  params.soft_cap = m.soft_cap;
  if (m.sinks) params.sinks = s.sinks.data();
  EXPECT_EQ(LaunchAttention(stream, m.type, params), 0)
      << emulator::LastFault();
  EXPECT_TRUE(std::all_of(scratch.end() - 64, scratch.end(),
                          [](float value) { return value == 7.0f; }));
  return Decode(m.type, out);
}

std::vector<float> Attend(const Sequence& s, const std::vector<Range>& ranges,
                          Generation generation) {
  return Attend(s, ranges, StreamOf(generation));
}

// One head of one position, straight from the contract's words.
struct Part {
  float maximum = -HUGE_VALF;
  float sum = 0;
  std::vector<float> values;
};

Part Segment(const Sequence& s, int position, int head, int segment,
             Generation generation) {
  const Model& m = s.model;
  const bool half = m.type == DType::kF16;
  const int kv_head = head / m.group();
  const int begin = m.window > 0 ? std::max(0, position - m.window + 1) : 0;
  const float c = kScale * 1.44269504f;
  float sums[4] = {};
  Part part;
  part.values.resize(At(m.head_dim));
  const int tiles = kSegmentKeys / kAttentionTile;
  for (int tile = segment * tiles; tile < (segment + 1) * tiles; ++tile) {
    const int first = tile * kAttentionTile;
    const auto seen = [&](int key) { return key >= begin && key <= position; };
    std::vector<float> weights(kAttentionTile);
    float maximum = part.maximum;
    bool any = false;
    for (int i = 0; i < kAttentionTile; ++i) {
      weights[At(i)] = -HUGE_VALF;
      if (!seen(first + i)) continue;
      any = true;
      float chain = 0;
      for (int d = 0; d < m.head_dim; d += kChainStep) {
        chain = TensorCoreStep(
            generation,
            VectorOf(m.type, s.Q(position, head) + d, m.head_dim - d),
            VectorOf(m.type, s.K(first + i, kv_head) + d, m.head_dim - d),
            chain, half);
      }
      weights[At(i)] = chain;
      maximum = std::max(maximum, chain);
    }
    if (!any) continue;
    const float factor = Exp2((part.maximum - maximum) * c);
    part.maximum = maximum;
    for (float& sum : sums) sum *= factor;
    for (float& value : part.values) value *= factor;
    for (float& weight : weights) {
      weight = RoundedTo(m.type, Exp2(std::fma(weight, c, -(maximum * c))));
    }
    for (int i = 0; i < kAttentionTile; ++i) sums[i % 8 / 2] += weights[At(i)];
    for (int i = 0; i < kAttentionTile; i += kChainStep) {
      const TensorVector step = VectorOf(m.type, &weights[At(i)], 16);
      for (int d = 0; d < m.head_dim; ++d) {
        float column[16];
        for (int j = 0; j < 16; ++j) {
          const int key = first + i + j;
          column[j] = seen(key) ? s.V(key, kv_head)[d] : 0.0f;
        }
        part.values[At(d)] =
            TensorCoreStep(generation, step, VectorOf(m.type, column, 16),
                           part.values[At(d)], half);
      }
    }
  }
  part.sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return part;
}

std::vector<float> Reference(const Sequence& s,
                             const std::vector<Range>& ranges,
                             Generation generation) {
  const cpu::ScopedFlushDenormals flush;
  const Model& m = s.model;
  const float c = kScale * 1.44269504f;
  std::vector<float> out;
  for (const Range& range : ranges) {
    for (int p = range.first; p < range.first + range.count; ++p) {
      for (int head = 0; head < m.heads; ++head) {
        Part merged;
        for (int segment = 0; segment <= p / kSegmentKeys; ++segment) {
          Part next = Segment(s, p, head, segment, generation);
          if (next.maximum == -HUGE_VALF) continue;
          if (merged.maximum == -HUGE_VALF) {
            merged = std::move(next);
            continue;
          }
          const float maximum = std::max(merged.maximum, next.maximum);
          const float a = Exp2((merged.maximum - maximum) * c);
          const float b = Exp2((next.maximum - maximum) * c);
          merged.maximum = maximum;
          merged.sum = std::fma(next.sum, b, merged.sum * a);
          for (int d = 0; d < m.head_dim; ++d) {
            merged.values[At(d)] =
                std::fma(next.values[At(d)], b, merged.values[At(d)] * a);
          }
        }
        float factor = 1.0f / merged.sum;
        if (m.sinks) {
          const float sink = s.sinks[At(head)] * 1.44269504f / c;
          const float maximum = std::max(merged.maximum, sink);
          const float before = Exp2((merged.maximum - maximum) * c);
          factor = before / std::fma(1.0f, Exp2((sink - maximum) * c),
                                     merged.sum * before);
        }
        for (const float value : merged.values) {
          out.push_back(RoundedTo(m.type, value * factor));
        }
      }
    }
  }
  return out;
}

std::vector<float> Float64(const Sequence& s,
                           const std::vector<Range>& ranges) {
  const Model& m = s.model;
  std::vector<float> out;
  for (const Range& range : ranges) {
    for (int p = range.first; p < range.first + range.count; ++p) {
      const int begin = m.window > 0 ? std::max(0, p - m.window + 1) : 0;
      for (int head = 0; head < m.heads; ++head) {
        std::vector<double> weights;
        for (int key = begin; key <= p; ++key) {
          const float* const k = s.K(key, head / m.group());
          weights.push_back(kScale * std::inner_product(k, k + m.head_dim,
                                                        s.Q(p, head), 0.0));
        }
        double most = *std::max_element(weights.begin(), weights.end());
        double sum = 0;
        if (m.sinks) {
          most = std::max(most, double{s.sinks[At(head)]});
          sum = std::exp(s.sinks[At(head)] - most);
        }
        for (double& weight : weights) {
          sum += weight = std::exp(weight - most);
        }
        for (int d = 0; d < m.head_dim; ++d) {
          double value = 0;
          for (int key = begin; key <= p; ++key) {
            value += weights[At(key - begin)] * s.V(key, head / m.group())[d];
          }
          out.push_back(static_cast<float>(value / sum));
        }
      }
    }
  }
  return out;
}

// Families' heads, reduced, and odd ones; windows that begin anywhere.
struct AttentionCase {
  Model model;
  int length;
  std::vector<Range> ranges;
};
const AttentionCase kAttentionCases[] = {
    // Within one tile, at its end, in the next; one key alone.
    {{DType::kBF16, 4, 2, 64}, 140, {{0, 3}, {60, 10}, {120, 20}}},
    // Around the ends of segments.
    {{DType::kBF16, 2, 1, 64}, 1100, {{505, 12}, {1020, 9}, {1090, 10}}},
    {{DType::kF16, 2, 2, 128}, 530, {{505, 14}}},
    {{DType::kBF16, 8, 1, 128, 32}, 300, {{250, 5}}},
    {{DType::kBF16, 2, 1, 256}, 520, {{508, 6}}},
    {{DType::kBF16, 2, 2, 8, 8}, 200, {{0, 140}}},
    {{DType::kBF16, 3, 1, 80, 24}, 130, {{100, 30}}},
    {{DType::kF16, 20, 1, 32}, 150, {{140, 2}}},
    {{DType::kBF16, 2, 1, 64, 16, 100}, 700, {{0, 2}, {95, 10}, {600, 20}}},
    {{DType::kBF16, 1, 1, 16, 16, 520}, 1600, {{1020, 12}, {1535, 3}}},
    // Quantised caches: pieces that hold two keys, blocks in mid-chunk.
    {{DType::kBF16, 4, 2, 64, 16, 0, DType::kFp8}, 530, {{60, 6}, {505, 14}}},
    {{DType::kF16, 2, 1, 128, 16, 0, DType::kInt8}, 300, {{250, 9}}},
    {{DType::kBF16, 2, 1, 24, 24, 100, DType::kInt8}, 600, {{95, 4}, {590, 9}}},
    {{DType::kBF16, 2, 2, 8, 8, 0, DType::kFp8}, 140, {{120, 15}}},
    {{DType::kF16, 1, 1, 256, 16, 0, DType::kFp8}, 140, {{130, 5}}},
    {{DType::kBF16, 4, 2, 64, 16, 0, DType::kInt4}, 530, {{60, 6}, {505, 14}}},
    {{DType::kF16, 2, 1, 128, 16, 0, DType::kInt4}, 300, {{250, 9}}},
    {{DType::kBF16, 2, 1, 40, 24, 100, DType::kInt4}, 600, {{95, 4}, {590, 9}}},
    {{DType::kBF16, 2, 2, 8, 8, 0, DType::kInt4}, 140, {{120, 15}}},
    {{DType::kF16, 1, 1, 256, 16, 0, DType::kInt4}, 140, {{130, 5}}},
    {{DType::kBF16, 4, 2, 64, 16, 0, DType::kF32, true},
     1100,
     {{0, 2}, {505, 12}, {1090, 10}}},
    {{DType::kF16, 6, 1, 128, 16, 600, DType::kInt8, true},
     700,
     {{60, 6}, {690, 9}}},
    // Heads of one position in two tiles.
    {{DType::kBF16, 40, 2, 16, 16, 0, DType::kF32, true}, 530, {{506, 8}}},
    // Latent attention: wide heads, of which many share one KV head.
    {{DType::kBF16, 16, 1, 576}, 530, {{60, 2}, {509, 5}}},
    {{DType::kF16, 20, 1, 320}, 140, {{0, 2}, {126, 3}}},
    {{DType::kBF16, 128, 1, 576, 32}, 40, {{37, 2}}},
    {{DType::kBF16, 2, 1, 288, 16, 520, DType::kF32, true},
     1600,
     {{1020, 6}, {1534, 3}}},
    {{DType::kBF16, 17, 1, 576, 16, 0, DType::kFp8}, 140, {{126, 3}}},
    {{DType::kF16, 2, 1, 328, 24, 100, DType::kInt8}, 600, {{95, 4}, {590, 9}}},
    {{DType::kBF16, 2, 1, 296, 8, 0, DType::kInt4}, 530, {{508, 6}}},
    {{DType::kF16, 3, 1, 576, 16, 0, DType::kInt4, true}, 140, {{125, 5}}},
};

std::vector<Range> OneByOne(const std::vector<Range>& ranges) {
  std::vector<Range> ones;
  for (const Range& range : ranges) {
    for (int i = 0; i < range.count; ++i) ones.push_back({range.first + i, 1});
  }
  return ones;
}

std::vector<Range> Chunked(const std::vector<Range>& ranges, int size) {
  std::vector<Range> chunks;
  for (const Range& range : ranges) {
    for (int i = 0; i < range.count; i += size) {
      chunks.push_back({range.first + i, std::min(size, range.count - i)});
    }
  }
  return chunks;
}

// Bit for bit in the emulator. A GPU's Exp2 is within two units of the last
// place of the emulator's, so that now and then a weight is rounded otherwise.
testing::AssertionResult AsContract(const Model& m,
                                    const std::vector<float>& got,
                                    const std::vector<float>& expected) {
  if (!OnDevice()) return SameBits(got, expected);
  const float bound = m.type == DType::kBF16 ? 0x1p-7f : 0x1p-10f;
  size_t others = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!(std::fabs(got[i] - expected[i]) <= bound)) {
      return testing::AssertionFailure()
             << "element " << i << ": " << got[i] << " for " << expected[i];
    }
    others += got[i] != expected[i];
  }
  if (others * 20 <= got.size()) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << others << " of " << got.size() << " have other bits";
}

TEST(CudaAttention, PrefillAndDecodeGiveTheContractsBits) {
  for (const AttentionCase& c : kAttentionCases) {
    const Sequence sequence(c.model, c.length);
    for (const Generation generation : Generations()) {
      // Generations differ in the step alone: two shapes show that.
      if (generation == Generation::kAmpere && &c - kAttentionCases > 1) {
        continue;
      }
      const auto reference = Reference(sequence, c.ranges, generation);
      const auto prefill = Attend(sequence, c.ranges, generation);
      ASSERT_TRUE(AsContract(c.model, prefill, reference))
          << NameOf(c.model) << ", prefill";
      ASSERT_TRUE(
          SameBits(Attend(sequence, OneByOne(c.ranges), generation), prefill))
          << NameOf(c.model) << ", decode";
      if (OnDevice() || generation != Generation::kHopper) continue;
      // The same step without warpgroup instructions.
      Stream newer = StreamOf(generation);
      newer.generation = 100;
      ASSERT_TRUE(SameBits(Attend(sequence, c.ranges, newer), prefill))
          << NameOf(c.model) << ", mma.sync";
    }
  }
}

// Scores that a cap hardly bends weigh as without it, beside sinks too.
TEST(CudaAttention, SinksAreNotCapped) {
  for (const int head_dim : {64, 320}) {
    Model model{DType::kBF16, 4, 2, head_dim, 16, 0, DType::kF32, true};
    const Sequence plain(model, 530);
    model.soft_cap = head_dim == 64 ? 100 : 400;  // scores are larger, too
    const Sequence capped(model, 530);
    const std::vector<Range> ranges = {{20, 3}, {505, 10}};
    for (const auto& rows : {ranges, OneByOne(ranges)}) {
      const auto expected = Attend(plain, rows, Generation::kHopper);
      const auto got = Attend(capped, rows, Generation::kHopper);
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_NEAR(got[i], expected[i],
                    0x1p-7 * std::max(1.0f, std::fabs(expected[i])))
            << i;
      }
    }
  }
}

TEST(CudaAttention, ChunksAndBatchesDoNotShow) {
  for (const int i : {0, 1, 4, 5, 10, 12, 23, 26, 28}) {
    const AttentionCase& c = kAttentionCases[i];
    const Sequence sequence(c.model, c.length);
    const auto whole = Attend(sequence, c.ranges, Generation::kHopper);
    // The last chunk is often one row.
    ASSERT_TRUE(SameBits(
        Attend(sequence, Chunked(c.ranges, 7), Generation::kHopper), whole))
        << NameOf(c.model);
    // The last row among several sequences.
    const Range last = OneByOne(c.ranges).back();
    for (const int batch : {1, 3, 17}) {
      const auto got = Attend(sequence, std::vector<Range>(At(batch), last),
                              Generation::kHopper);
      for (int n = 0; n < batch; ++n) {
        const auto row = got.begin() + int64_t{n} * c.model.width();
        ASSERT_TRUE(SameBits(std::vector<float>(row, row + c.model.width()),
                             {whole.end() - c.model.width(), whole.end()}))
            << NameOf(c.model) << ", " << n << " of " << batch;
      }
    }
  }
}

TEST(CudaAttention, LaunchesAreCutToTheRoomForSplitContexts) {
  for (const int i : {1, 10, 20, 23, 26}) {
    const AttentionCase& c = kAttentionCases[i];
    ASSERT_GT(c.length, kAttentionSegment);
    const Sequence sequence(c.model, c.length);
    // A prompt's chunk among decodes.
    std::vector<Range> ranges(5, OneByOne(c.ranges).back());
    ranges.push_back({ranges[0].first - 3, 3});
    const Stream stream = StreamOf(Generation::kHopper);
    const auto whole = Attend(sequence, ranges, stream);
    for (const int room : {1, 2, 5}) {
      ASSERT_TRUE(SameBits(Attend(sequence, ranges, stream, 1, room), whole))
          << NameOf(c.model) << ", room for " << room;
    }
  }
}

TEST(CudaAttention, ScratchOfManyLongContextsIsBounded) {
  const auto parts = [](int spans, int heads, int dim, int positions) {
    return AttentionScratchBytes(spans, heads, dim, positions) -
           AttentionScratchBytes(0, heads, dim, positions);
  };
  EXPECT_EQ(parts(3, 32, 128, 1000), size_t{3} * 32 * 3 * 130 * 4);
  EXPECT_LE(parts(256, 32, 128, 131072), size_t{256} << 20);
  EXPECT_GT(parts(256, 32, 128, 131072), size_t{250} << 20);
  // One is always possible.
  EXPECT_EQ(parts(9, 128, 576, 1 << 20), size_t{128} * 2049 * 578 * 4);
}

// A launch over a window has smaller spans, and puts as many there as fit.
TEST(CudaAttention, ScratchOfLessIsWithinThatOfMore) {
  constexpr int kPositions = 262144;
  for (const int heads : {8, 64, 96}) {
    for (const int dim : {64, 128, 256}) {
      for (const int spans : {1, 64, 128, 1024, 4096}) {
        const size_t all = AttentionScratchBytes(spans, heads, dim, kPositions);
        for (int less = 512; less < kPositions; less *= 2) {
          EXPECT_LE(AttentionScratchBytes(spans, heads, dim, less), all);
        }
        EXPECT_LE(AttentionScratchBytes(spans, heads, dim / 2, kPositions),
                  all);
        EXPECT_LE(AttentionScratchBytes(spans / 2, heads, dim, kPositions),
                  all);
        EXPECT_LE(all, AttentionScratchBytes(0, heads, dim, kPositions) +
                           kAttentionPartialBytes);
      }
    }
  }
}

TEST(CudaAttention, LandingAndScheduleDoNotShow) {
  for (const int i : {0, 2, 10, 24, 27}) {
    const AttentionCase& c = kAttentionCases[i];
    const Sequence sequence(c.model, c.length);
    const auto whole = Attend(sequence, c.ranges, Generation::kHopper);
    for (const emulator::Settings& settings : kSettings) {
      const ScopedSettings scoped(settings);
      for (const auto& ranges : {c.ranges, OneByOne(c.ranges)}) {
        ASSERT_TRUE(
            SameBits(Attend(sequence, ranges, Generation::kHopper), whole))
            << NameOf(c.model);
      }
    }
  }
}

TEST(CudaAttention, IsNearFloat64) {
  for (const AttentionCase& c : kAttentionCases) {
    const Sequence sequence(c.model, c.length);
    const auto expected = Float64(sequence, c.ranges);
    // Weights are rounded to the type, then the result is.
    const float bound = c.model.type == DType::kBF16 ? 0x1p-6f : 0x1p-9f;
    const auto got = Attend(sequence, c.ranges, Generation::kHopper);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], expected[i], bound) << NameOf(c.model);
    }
  }
}

// Keys and values that are Inf or NaN reach the rows that see them, and no
// others in the same tile.
TEST(CudaAttention, WhatARowMayNotSeeCannotSpoilIt) {
  struct {
    Model model;
    int length;
    int poisoned;  // position
    std::vector<Range> ranges;
  } const kPoisoned[] = {
      {{DType::kBF16, 4, 2, 64}, 140, 60, {{54, 12}, {126, 5}}},
      {{DType::kF16, 1, 1, 128}, 140, 129, {{124, 11}}},
      // The window's beginning passes it.
      {{DType::kBF16, 2, 1, 64, 16, 100}, 230, 33, {{128, 11}}},
      {{DType::kBF16, 2, 1, 64, 16, 0, DType::kFp8}, 140, 129, {{126, 7}}},
      {{DType::kF16, 2, 1, 64, 16, 100, DType::kInt8}, 230, 33, {{128, 8}}},
      {{DType::kBF16, 2, 1, 24, 16, 0, DType::kInt4}, 140, 129, {{126, 7}}},
      {{DType::kBF16, 20, 1, 320}, 140, 129, {{126, 7}}},
      {{DType::kF16, 1, 1, 576, 16, 100, DType::kInt8}, 230, 33, {{128, 8}}},
  };
  for (const auto& c : kPoisoned) {
    for (const float poison : {HUGE_VALF, std::nanf("")}) {
      for (const bool in_values : {true, false}) {
        Sequence sequence(c.model, c.length);
        std::vector<float>& side =
            in_values ? sequence.appended_v : sequence.appended_k;
        const int64_t row = int64_t{c.poisoned} * c.model.kv_heads;
        side[At(row * c.model.head_dim + 5)] = poison;
        sequence.ReadBack();
        const auto prefill = Attend(sequence, c.ranges, Generation::kHopper);
        if (!OnDevice()) {
          ASSERT_TRUE(SameBits(
              prefill, Reference(sequence, c.ranges, Generation::kHopper)))
              << NameOf(c.model) << ", prefill, " << poison;
        }
        size_t at = 0;
        for (const Range& range : c.ranges) {
          for (int p = range.first; p < range.first + range.count; ++p) {
            const bool sees =
                p >= c.poisoned &&
                (c.model.window == 0 || p < c.poisoned + c.model.window);
            const auto begin = prefill.begin() + static_cast<int64_t>(at);
            const bool finite =
                std::all_of(begin, begin + c.model.width(),
                            [](float x) { return std::isfinite(x); });
            EXPECT_TRUE(sees || finite) << p;
            // A score of -Inf is no more than a weight of zero.
            EXPECT_FALSE(sees && finite && in_values) << p;
            at += At(c.model.width());
          }
        }
        ASSERT_TRUE(SameBits(
            Attend(sequence, OneByOne(c.ranges), Generation::kHopper), prefill))
            << NameOf(c.model) << ", decode, " << poison;
      }
    }
  }
}

// But over int8 caches, whose codes a CPU multiplies as integers.
TEST(CudaAttention, F32ModelsHaveTheBitsOfTheCpuBackend) {
  for (const Model& m : {Model{DType::kF32, 4, 2, 8},
                         {DType::kF32, 2, 2, 64},
                         {DType::kF32, 3, 1, 136, 24},
                         {DType::kF32, 2, 1, 576},
                         {DType::kF32, 4, 2, 40, 16, 0, DType::kFp8},
                         {DType::kF32, 3, 1, 8, 24, 0, DType::kFp8},
                         {DType::kF32, 4, 2, 72, 16, 0, DType::kInt4}}) {
    const int length = 1030;
    const Sequence s(m, length);
    Device cpu(MakeBackend());
    const int blocks = (length + m.block_size - 1) / m.block_size;
    auto cache = *cpu->NewKvCache(
        {1, m.kv_heads, m.head_dim, m.block_size, blocks, m.cache()});
    std::vector<int32_t> table(At(blocks)), positions(At(length));
    std::iota(table.begin(), table.end(), 0);
    std::iota(positions.begin(), positions.end(), 0);
    std::vector<float> qkv;
    const auto add = [&](const float* row, int count) {
      qkv.insert(qkv.end(), row, row + count);
    };
    for (int p = 0; p < length; ++p) {
      add(s.Q(p, 0), m.width());
      const int64_t at = int64_t{p} * m.kv_heads * m.head_dim;
      add(&s.appended_k[At(at)], m.kv_heads * m.head_dim);
      add(&s.appended_v[At(at)], m.kv_heads * m.head_dim);
    }
    const int64_t angles = int64_t{length} * m.head_dim / 2;
    const RopeTable still{cpu.Upload(std::vector<float>(At(angles), 1.0f)),
                          cpu.Upload(std::vector<float>(At(angles), 0.0f)),
                          m.head_dim / 2};
    const std::vector<RowSpan> spans = {{0, length, 0, 0}};
    Rows rows;
    rows.num_rows = length;
    rows.num_spans = 1;
    rows.positions = rows.slots = cpu.Upload(positions);
    rows.spans = cpu.Upload(spans);
    rows.block_tables = cpu.Upload(table);
    rows.host_spans = spans.data();
    float* const device_qkv = cpu.Upload(qkv);
    float* const out = cpu.New<float>(At(int64_t{length} * m.width()));
    cpu->RopeAppend(cpu.queue(), rows, m.heads, still, {}, device_qkv, nullptr,
                    *cache, 0);
    cpu->Attention(cpu.queue(), rows, m.heads, {kScale}, device_qkv,
                   m.width() + 2 * m.kv_heads * m.head_dim, *cache, 0, out);
    const auto expected = cpu.Download(out, At(int64_t{length} * m.width()));
    for (const Range& range : {Range{0, 20}, Range{500, 30}, Range{1020, 10}}) {
      const auto from = expected.begin() + int64_t{range.first} * m.width();
      ASSERT_TRUE(SameBits(Attend(s, {range}, Generation::kHopper),
                           {from, from + int64_t{range.count} * m.width()}))
          << NameOf(m);
    }
  }
}

}  // namespace
}  // namespace tandem::kernels::cuda
