// SPDX-License-Identifier: Apache-2.0
// What a kernel must do, as a check of any function that is launched like it:
// the kernel itself passes, and one with a seeded fault does not. f32 has the
// CPU backend's bits; bf16 and f16 are near float64 and do not depend on the
// batch. Nothing behind an output is written.

#ifndef TANDEM_TESTS_KERNELS_CUDA_CHECKS_H_
#define TANDEM_TESTS_KERNELS_CUDA_CHECKS_H_

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "kernels/kv_digest.h"
#include "tests/kernels/cuda/fixture.h"

namespace tandem::kernels::cuda {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

inline constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
inline constexpr int kSizes[] = {1, 8, 15, 100, 576, 2056};

// Half a unit in the last place of 1.
inline double UnitOf(DType type) {
  return type == DType::kF32    ? 0x1p-24
         : type == DType::kBF16 ? 0x1p-8
                                : 0x1p-11;
}

inline std::vector<float> RandomOf(DType type, int64_t count, uint64_t seed,
                                   float scale = 1.0f) {
  auto values = RandomFloats(At(count), seed, scale);
  for (float& value : values) value = RoundedTo(type, value);
  return values;
}

// Memory that a kernel writes `count` elements of, and what it must leave.
class Guarded {
 public:
  Guarded(DType type, int64_t count)
      : type_(type), bytes_(At(count) * SizeOf(type) + kGuard, kMark) {}

  std::byte* data() { return bytes_.data(); }
  std::vector<float> Values() const {
    return Decode(type_, {bytes_.begin(), bytes_.end() - kGuard});
  }
  bool Kept() const {
    return std::all_of(bytes_.end() - kGuard, bytes_.end(),
                       [](std::byte b) { return b == kMark; });
  }

 private:
  static constexpr int kGuard = 64;
  static constexpr std::byte kMark{0xab};
  const DType type_;
  std::vector<std::byte> bytes_;
};

// Runs a launch; in words what came of it, if not 0.
#define TANDEM_LAUNCHED(call)                                            \
  if (const int result = (call); result != 0) {                          \
    return AssertionFailure() << result << " " << emulator::LastFault(); \
  }

// ---- The choice of rows.

using GatherRowsFn = int (*)(const Stream&, DType, const GatherRowsParams&);

inline AssertionResult CheckGatherRows(const GatherRowsFn& launch) {
  const std::vector<int32_t> ids = {4, 0, 2, 2};
  for (const DType type : kTypes) {
    for (const int dim : kSizes) {
      const auto x = RandomOf(type, int64_t{5} * dim, 81);
      const auto bytes = Encode(type, x);
      Guarded out(type, int64_t{4} * dim);
      TANDEM_LAUNCHED(launch(StreamOf(Generation::kHopper), type,
                             {ids.data(), bytes.data(), out.data(), 4, dim}));
      std::vector<float> expected;
      for (const int32_t id : ids) {
        expected.insert(expected.end(), x.begin() + ptrdiff_t{id} * dim,
                        x.begin() + ptrdiff_t{id + 1} * dim);
      }
      const AssertionResult same = SameBits(out.Values(), expected);
      if (!same || !out.Kept()) {
        return AssertionFailure() << Name(type) << " " << dim << ": "
                                  << same.message() << " " << out.Kept();
      }
    }
  }
  return AssertionSuccess();
}

// ---- The norm.

using RmsNormFn = int (*)(const Stream&, DType, const RmsNormParams&);

// x after the residual, then the output.
struct Normed {
  std::vector<float> x;
  std::vector<float> out;
};

inline AssertionResult CheckRmsNormRow(DType type, int dim, const Normed& got,
                                       const std::vector<float>& weight,
                                       int row) {
  double squares = 0;
  for (int i = 0; i < dim; ++i) {
    const double v = got.x[At(int64_t{row} * dim + i)];
    squares += v * v;
  }
  const double scale = 1 / std::sqrt(squares / dim + 1e-5);
  for (int i = 0; i < dim; ++i) {
    const size_t at = At(int64_t{row} * dim + i);
    const double expected = got.x[at] * scale * weight[At(i)];
    const double bound = (1.01 * UnitOf(type) + 2e-6) * std::fabs(expected);
    if (!(std::fabs(got.out[at] - expected) <= bound + 1e-7)) {
      return AssertionFailure() << Name(type) << " " << dim << ", element " << i
                                << ": " << got.out[at] << " for " << expected;
    }
  }
  return AssertionSuccess();
}

inline AssertionResult CheckRmsNorm(const RmsNormFn& launch) {
  const int rows = 3;
  for (const DType type : kTypes) {
    for (const int dim : kSizes) {
      for (const bool residual : {false, true}) {
        const auto x = RandomOf(type, int64_t{rows} * dim, 21);
        const auto delta =
            Encode(type, RandomOf(type, int64_t{rows} * dim, 22));
        const auto weight = RandomFloats(At(dim), 23);
        const auto run = [&](int first, int count, Normed* normed) {
          Guarded in(type, int64_t{count} * dim);
          const auto bytes = Encode(type, x);
          const size_t skip = At(int64_t{first} * dim) * SizeOf(type);
          std::memcpy(in.data(), bytes.data() + skip,
                      At(int64_t{count} * dim) * SizeOf(type));
          // Rows of odd length are not aligned; a copy of them is.
          const std::vector<std::byte> added(
              delta.begin() + static_cast<std::ptrdiff_t>(skip), delta.end());
          Guarded out(type, int64_t{count} * dim);
          TANDEM_LAUNCHED(
              launch(StreamOf(Generation::kHopper), type,
                     {in.data(), residual ? added.data() : nullptr,
                      weight.data(), out.data(), count, dim, 1e-5f}));
          *normed = {in.Values(), out.Values()};
          return in.Kept() && out.Kept() ? AssertionSuccess()
                                         : AssertionFailure() << "overrun";
        };
        Normed all;
        if (auto ran = run(0, rows, &all); !ran) return ran;
        auto sums = x;
        const auto deltas = Decode(type, delta);
        for (size_t i = 0; residual && i < sums.size(); ++i) {
          sums[i] = RoundedTo(type, sums[i] + deltas[i]);
        }
        if (auto same = SameBits(all.x, sums); !same) return same;
        if (type == DType::kF32) {
          Device cpu(MakeBackend());
          float* const out = cpu.New<float>(sums.size());
          cpu->RmsNorm(cpu.queue(), rows, dim, 1e-5f, cpu.Upload(sums), nullptr,
                       cpu.Upload(weight), out);
          if (auto same = SameBits(all.out, cpu.Download(out, sums.size()));
              !same) {
            return same;
          }
        }
        for (int row = 0; row < rows; ++row) {
          if (auto near = CheckRmsNormRow(type, dim, all, weight, row); !near) {
            return near;
          }
          Normed alone;
          if (auto ran = run(row, 1, &alone); !ran) return ran;
          const auto begin = all.out.begin() + int64_t{row} * dim;
          if (auto same = SameBits(alone.out, {begin, begin + dim}); !same) {
            return same;
          }
        }
      }
    }
  }
  return AssertionSuccess();
}

// ---- Rotary embedding and append.

using RopeAppendFn = int (*)(const Stream&, DType, const RopeAppendParams&);

inline AssertionResult CheckRopeAppend(const RopeAppendFn& launch) {
  struct Case {
    DType type, cache;
    int heads, kv_heads, head_dim, block_size;
    bool scales;  // queries
    bool apart;   // Q from K and V
  };
  const Case cases[] = {
      {DType::kF32, DType::kF32, 4, 2, 8, 16, true, false},
      {DType::kF32, DType::kF32, 4, 2, 8, 16, true, true},
      {DType::kF32, DType::kBF16, 3, 1, 24, 8, false, false},
      {DType::kBF16, DType::kBF16, 4, 4, 256, 16, true, false},
      {DType::kBF16, DType::kBF16, 3, 3, 24, 16, true, true},
      {DType::kBF16, DType::kBF16, 3, 1, 576, 16, true, true},
      {DType::kF16, DType::kF16, 8, 2, 64, 32, false, false}};
  const std::vector<int32_t> positions = {0, 5, 17, 3};
  for (const Case& c : cases) {
    const std::vector<int32_t> slots = {c.block_size - 1, 0, 2 * c.block_size,
                                        c.block_size + 3};
    const int rows = static_cast<int>(slots.size());
    const int width = (c.heads + 2 * c.kv_heads) * c.head_dim;
    const int half = c.head_dim / 2;
    const auto qkv = RandomOf(c.type, int64_t{rows} * width, 51);
    const int pairs = half > 4 ? half - 3 : half;  // the rest stays
    const auto cos = RandomFloats(At(18 * pairs), 52);
    const auto sin = RandomFloats(At(18 * pairs), 53);
    const auto scales = RandomFloats(18, 54);
    KvView kv{nullptr, c.cache, 3, c.kv_heads, c.head_dim, c.block_size};
    Guarded cache(c.cache, 2 * kv.layer_stride());
    kv.data = cache.data();
    const std::vector<float> before = cache.Values();
    Guarded rotated(c.type, int64_t{rows} * width);
    // Row by row Q, K and V; or all Q, then all of the rest.
    const int query = c.heads * c.head_dim;
    const auto place = [&](int row, int column) {
      if (!c.apart) return int64_t{row} * width + column;
      return column < query
                 ? int64_t{row} * query + column
                 : int64_t{rows} * query + int64_t{row} * (width - query) +
                       column - query;
    };
    std::vector<float> given(qkv.size());
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < width; ++i) {
        given[At(place(row, i))] = qkv[At(int64_t{row} * width + i)];
      }
    }
    const auto bytes = Encode(c.type, given);
    std::memcpy(rotated.data(), bytes.data(), bytes.size());
    RopeAppendParams params = {
        positions.data(), slots.data(), cos.data(), sin.data(), pairs,
        rotated.data(),   kv,           rows,       c.heads,    1};
    if (c.scales) params.query_scale = scales.data();
    if (c.apart) {
      params.kv_rows = rotated.data() + At(place(0, query)) * SizeOf(c.type);
    }
    TANDEM_LAUNCHED(launch(StreamOf(Generation::kHopper), c.type, params));
    auto expected_cache = before;
    auto expected = qkv;
    for (int row = 0; row < rows; ++row) {
      for (int head = 0; head < c.heads + 2 * c.kv_heads; ++head) {
        for (int i = 0; i < half; ++i) {
          const size_t at = At(int64_t{row} * width + head * c.head_dim + i);
          const size_t angle = At(positions[At(row)] * pairs + i);
          float a = qkv[at];
          float b = qkv[at + At(half)];
          if (head < c.heads + c.kv_heads && i < pairs) {
            const float turned = a * cos[angle] - b * sin[angle];
            b = RoundedTo(c.type, b * cos[angle] + a * sin[angle]);
            a = RoundedTo(c.type, turned);
          }
          if (head < c.heads) {
            const float scale = c.scales ? scales[At(positions[At(row)])] : 1;
            expected[at] = RoundedTo(c.type, a * scale);
            expected[at + At(half)] = RoundedTo(c.type, b * scale);
            continue;
          }
          const int kv_head = head - c.heads;
          const int64_t to =
              kv.Offset(1, slots[At(row)] / c.block_size, kv_head / c.kv_heads,
                        kv_head % c.kv_heads, slots[At(row)] % c.block_size);
          expected_cache[At(to + i)] = RoundedTo(c.cache, a);
          expected_cache[At(to + i + half)] = RoundedTo(c.cache, b);
        }
      }
    }
    const auto left = rotated.Values();
    auto got = expected;  // K and V of qkv are spent
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < query; ++i) {
        got[At(int64_t{row} * width + i)] = left[At(place(row, i))];
      }
    }
    if (auto same = SameBits(got, expected); !same) return same;
    if (auto same = SameBits(cache.Values(), expected_cache); !same) {
      return same;
    }
    if (!cache.Kept() || !rotated.Kept())
      return AssertionFailure() << "overrun";
  }
  return AssertionSuccess();
}

// ---- KV to the wire.

using KvSliceFn = int (*)(const Stream&, const KvSliceParams&);

struct KvCase {
  DType cache, wire;
  int kv_heads, head_dim, block_size;
  int position_begin, position_end;
  int head_begin, head_end;
};

// Rows below, at and above a piece; parts of blocks, full ones, one position.
inline constexpr KvCase kKvCases[] = {
    {DType::kBF16, DType::kBF16, 2, 8, 16, 0, 40, 0, 2},
    {DType::kF32, DType::kF32, 2, 24, 8, 3, 21, 1, 2},
    {DType::kBF16, DType::kBF16, 8, 128, 16, 30, 33, 0, 8},
    {DType::kF16, DType::kF16, 6, 256, 16, 16, 17, 0, 6},
    {DType::kBF16, DType::kBF16, 1, 576, 16, 14, 19, 0, 1},
    {DType::kF32, DType::kBF16, 5, 64, 24, 5, 29, 1, 4},
    {DType::kBF16, DType::kF32, 3, 72, 16, 0, 16, 0, 3},
    {DType::kF16, DType::kBF16, 2, 16, 8, 7, 9, 0, 1},
};
inline constexpr uint64_t kDigestKey = 0x123456789abcdef0u;
inline constexpr int kKvLayers = 3;

// A cache of random values and the parameters of a slice of two layers.
struct KvProblem {
  explicit KvProblem(const KvCase& kv_case) : c(kv_case) {
    const int blocks = (c.position_end + c.block_size - 1) / c.block_size;
    params = {};
    params.kv = {nullptr,    c.cache,    blocks + 1,
                 c.kv_heads, c.head_dim, c.block_size};
    values = RandomOf(c.cache, kKvLayers * params.kv.layer_stride(), 61);
    cache = Encode(c.cache, values);
    params.kv.data = cache.data();
    params.wire = c.wire;
    params.digest_key = kDigestKey;
    params.position_begin = c.position_begin;
    params.position_end = c.position_end;
    params.layer_begin = 1;
    params.layer_end = kKvLayers;
    params.head_begin = c.head_begin;
    params.head_end = c.head_end;
    params.layer_stride =
        row_bytes() * (c.position_end - c.position_begin) + 32;
    std::vector<int32_t> table(At(blocks));
    std::iota(table.begin(), table.end(), 1);
    std::shuffle(table.begin(), table.end(), std::mt19937_64(3));
    std::copy(table.begin() + c.position_begin / c.block_size, table.end(),
              params.blocks);
  }

  int heads() const { return c.head_end - c.head_begin; }
  int row_elements() const { return 2 * heads() * c.head_dim; }
  int64_t row_bytes() const {
    return int64_t{row_elements()} * static_cast<int64_t>(SizeOf(c.wire));
  }
  int64_t wire_bytes() const { return params.layer_stride * 2; }
  int64_t CacheAt(int layer, int position, int element) const {
    const int head = element / c.head_dim % heads();
    const int block =
        params
            .blocks[position / c.block_size - c.position_begin / c.block_size];
    return params.kv.Offset(layer, block, element / c.head_dim / heads(),
                            c.head_begin + head, position % c.block_size) +
           element % c.head_dim;
  }
  // run(layer, position, its first byte on the wire).
  template <typename Function>
  void ForRows(const Function& run) const {
    for (int layer = 1; layer < kKvLayers; ++layer) {
      for (int p = c.position_begin; p < c.position_end; ++p) {
        run(layer, p,
            (layer - 1) * params.layer_stride +
                (p - c.position_begin) * row_bytes());
      }
    }
  }

  const KvCase c;
  KvSliceParams params;
  std::vector<float> values;
  std::vector<std::byte> cache;
};

inline AssertionResult CheckKvGather(const KvSliceFn& launch) {
  std::string wrong;
  for (const KvCase& c : kKvCases) {
    KvProblem problem(c);
    const DigestKeys keys(kDigestKey);
    std::vector<std::byte> expected(At(problem.wire_bytes()), std::byte{0xab});
    KvDigest digest;
    problem.ForRows([&](int layer, int position, int64_t at) {
      std::vector<float> row;
      for (int i = 0; i < problem.row_elements(); ++i) {
        row.push_back(problem.values[At(problem.CacheAt(layer, position, i))]);
      }
      const auto bytes = Encode(c.wire, row);
      std::copy(bytes.begin(), bytes.end(), expected.begin() + at);
      digest += DigestRow(keys, bytes.data(), bytes.size(), layer, position);
    });
    std::vector<std::byte> staging(expected.size(), std::byte{0xab});
    const KvDigest start{5, 7};
    for (const bool moves : {true, false}) {
      KvDigest got = start;
      problem.params.staging = moves ? staging.data() : nullptr;
      problem.params.digest = &got;
      TANDEM_LAUNCHED(launch(StreamOf(Generation::kHopper), problem.params));
      KvDigest sum = start;
      sum += digest;
      if (got != sum) wrong += "digest of " + std::to_string(c.head_dim) + "; ";
    }
    if (staging != expected) {
      wrong += "bytes of " + std::to_string(c.head_dim) + "; ";
    }
  }
  return wrong.empty() ? AssertionSuccess() : AssertionFailure() << wrong;
}

inline AssertionResult CheckKvScatter(const KvSliceFn& launch) {
  for (const KvCase& c : kKvCases) {
    KvProblem problem(c);
    std::vector<std::byte> wire(At(problem.wire_bytes()));
    auto expected = problem.values;
    problem.ForRows([&](int layer, int position, int64_t at) {
      const auto row = RandomOf(c.wire, problem.row_elements(),
                                static_cast<uint64_t>(layer * 1000 + position));
      const auto bytes = Encode(c.wire, row);
      std::copy(bytes.begin(), bytes.end(), wire.begin() + at);
      for (int i = 0; i < problem.row_elements(); ++i) {
        expected[At(problem.CacheAt(layer, position, i))] =
            RoundedTo(c.cache, row[At(i)]);
      }
    });
    problem.params.staging = wire.data();
    TANDEM_LAUNCHED(launch(StreamOf(Generation::kHopper), problem.params));
    if (auto same = SameBits(Decode(c.cache, problem.cache), expected); !same) {
      return same;
    }
  }
  return AssertionSuccess();
}

// ---- Sampling: the CPU backend's draws and log-probabilities.

using SampleFn = int (*)(const Stream&, const SampleKernelParams&);

// One row of logits, drawn from with each of some parameters.
struct SampleProblem {
  std::vector<float> logits;
  std::vector<SampleParams> params;
  std::vector<LogitEdit> edits;
  std::vector<uint32_t> masks = {};
};

inline AssertionResult CheckSample(const SampleFn& launch,
                                   const SampleProblem& problem) {
  const int count = static_cast<int>(problem.params.size());
  const int vocab = static_cast<int>(problem.logits.size());
  std::vector<float> rows;
  for (int i = 0; i < count; ++i) {
    rows.insert(rows.end(), problem.logits.begin(), problem.logits.end());
  }
  Device cpu(MakeBackend());
  SampleResult* const out = cpu.New<SampleResult>(At(count));
  cpu->Sample(cpu.queue(), count, vocab, cpu.Upload(rows),
              cpu.Upload(problem.params), cpu.Upload(problem.edits),
              cpu.Upload(problem.masks), out);
  const auto expected = cpu.Download(out, At(count));
  std::vector<SampleResult> got(At(count));
  std::memset(static_cast<void*>(got.data()), 0xab,
              got.size() * sizeof(SampleResult));
  const std::vector<float> before = rows;
  std::vector<LogitEdit> edits = problem.edits;
  TANDEM_LAUNCHED(
      launch(StreamOf(Generation::kHopper),
             {rows.data(), problem.params.data(), edits.data(),
              problem.masks.data(), got.data(), nullptr, count, vocab}));
  if (rows != before) {
    return AssertionFailure() << "the rows are not as they were";
  }
  for (int i = 0; i < count; ++i) {
    const SampleResult& a = got[At(i)];
    const SampleResult& b = expected[At(i)];
    if (std::memcmp(&a, &b, sizeof(SampleResult)) == 0) continue;
    const SampleParams& p = problem.params[At(i)];
    return AssertionFailure()
           << "vocabulary " << vocab << ", T " << p.temperature << " k "
           << p.top_k << " p " << p.top_p << " min " << p.min_p << " typical "
           << p.typical_p << ", mask " << p.mask << ", draw " << i << ": "
           << a.token_id << " for " << b.token_id << ", logprob " << a.logprob
           << " for " << b.logprob << ", rank " << a.rank << " for " << b.rank;
  }
  return AssertionSuccess();
}

// Adds a mask that names a share of the ids, 1 to all of 8 of 8, or, with
// share 0, three of them.
inline void AddMask(int share, int row, SampleProblem* problem) {
  const int vocab = static_cast<int>(problem->logits.size());
  const size_t begin = problem->masks.size();
  problem->masks.resize(begin + At(MaskWords(vocab)), 0);
  for (int id = 0; id < vocab; ++id) {
    const bool named = share == 0
                           ? id == row % vocab || id == vocab - 1 || id == 0
                           : (id * 5 + id / 8 + row) % 8 < share;
    if (named) problem->masks[begin + At(id / 32)] |= 1u << (id % 32);
  }
}

// Draws at many positions of three sequences, half of them with edits, a
// quarter from ids with edits alone; of a quarter the token is given, and
// three fifths have a mask.
inline SampleProblem DrawsOf(const std::vector<float>& logits,
                             const SampleParams& base, int draws) {
  SampleProblem problem{logits, {}, {}};
  const auto vocab = static_cast<int32_t>(logits.size());
  for (int i = 0; i < draws; ++i) {
    SampleParams params = base;
    params.position = i;
    params.sequence_index = static_cast<uint32_t>(i % 3);
    if (i % 8 >= 6) params.given = i % vocab;
    if (i % 5 >= 2) {
      params.mask =
          static_cast<int32_t>(problem.masks.size() / At(MaskWords(vocab)));
      AddMask(i % 5 == 4 ? 0 : 1 + i % 8, i, &problem);
    }
    if (i % 2 == 1) {
      params.first_edit = static_cast<int32_t>(problem.edits.size());
      params.only_edited = i % 4 == 3 ? 1 : 0;
      for (int32_t id = i % 3; id < vocab; id += 1 + id % 5) {
        const float unit = static_cast<float>((id * 37 + i * 11) % 64) / 64.0f;
        problem.edits.push_back({.token_id = id,
                                 .bias = id % 7 == 1   ? 4.0f * unit - 2.0f
                                         : id % 7 == 5 ? -INFINITY
                                                       : 0.0f,
                                 .repetition = id % 4 != 2 ? 0.5f + unit : 1.0f,
                                 .penalty = id % 3 == 0 ? 2.0f * unit : 0.0f});
      }
      params.num_edits =
          static_cast<int32_t>(problem.edits.size()) - params.first_edit;
    }
    problem.params.push_back(params);
  }
  return problem;
}

inline AssertionResult CheckSampleDraws(const SampleFn& launch) {
  return CheckSample(launch, DrawsOf(RandomFloats(500, 41, 3.0f),
                                     {.temperature = 1.2f,
                                      .top_p = 0.95f,
                                      .min_p = 0.02f,
                                      .top_k = 50,
                                      .seed = 99},
                                     12));
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_TESTS_KERNELS_CUDA_CHECKS_H_
