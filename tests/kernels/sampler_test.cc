// SPDX-License-Identifier: Apache-2.0
// The sampler against an independent statement of kernels/sampling.h that
// sorts everything and filters step by step in plain code.

#include <algorithm>
#include <map>
#include <numeric>

#include "kernels/cpu/kernel_table.h"
#include "kernels/sampling.h"
#include "tests/kernels/fixture.h"

namespace tandem::kernels {
namespace {

std::vector<SampleResult> Sample(Device& device, int vocab,
                                 const std::vector<float>& logits,
                                 const std::vector<SampleParams>& params,
                                 const std::vector<LogitEdit>& edits = {},
                                 const std::vector<uint32_t>& masks = {}) {
  SampleResult* const results = device.New<SampleResult>(params.size());
  float* const rows = device.Upload(logits);
  device->Sample(device.queue(), static_cast<int>(params.size()), vocab, rows,
                 device.Upload(params), device.Upload(edits),
                 device.Upload(masks), results);
  EXPECT_EQ(device.Download(rows, logits.size()), logits);
  return device.Download(results, params.size());
}

std::vector<int> Order(const std::vector<float>& logits) {
  std::vector<int> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  return ids;
}

// Ids that may be drawn and their weights, in order. exp comes from the
// kernel table: its accuracy is tested elsewhere, its bits decide ties here.
struct Candidates {
  std::vector<int> ids;
  std::vector<uint64_t> weights;
  std::vector<float> exact;  // exp(-y)
};

// Step 1, of one row.
std::vector<float> Edited(const std::vector<float>& logits,
                          const SampleParams& params,
                          const std::vector<LogitEdit>& edits) {
  std::vector<float> result = logits;
  if (params.only_edited != 0) {
    std::fill(result.begin(), result.end(), -INFINITY);
  }
  for (int i = 0; i < params.num_edits; ++i) {
    const LogitEdit& edit = edits[static_cast<size_t>(params.first_edit + i)];
    const auto id = static_cast<size_t>(edit.token_id);
    float x = logits[id];
    x += edit.bias;
    if (edit.repetition != 1) {
      x = x > 0 ? x / edit.repetition : x * edit.repetition;
    }
    x -= edit.penalty;
    result[id] = x;
  }
  const float best = *std::max_element(result.begin(), result.end());
  return std::isinf(best) ? logits : result;
}

Candidates Filter(const std::vector<float>& logits,
                  const SampleParams& params) {
  const auto table = *cpu::MakeKernelTable("auto");
  Candidates kept;
  float best = 0;
  std::vector<int64_t> information;
  for (const int id : Order(logits)) {
    const float logit = logits[static_cast<size_t>(id)];
    if (kept.ids.empty()) best = logit;
    const float y = -((best - logit) / params.temperature);
    float weight;
    table.exp(1, &y, &weight);
    const auto integer =
        static_cast<uint64_t>(std::floor(double{weight} * std::ldexp(1, 40)));
    if (integer == 0) continue;
    kept.ids.push_back(id);
    kept.weights.push_back(integer);
    kept.exact.push_back(weight);
    information.push_back(
        static_cast<int64_t>(std::floor(double{-y} * std::ldexp(1, 16))));
  }
  const auto cut = [&](size_t count) {
    kept.ids.resize(std::min(count, kept.ids.size()));
    kept.weights.resize(kept.ids.size());
    kept.exact.resize(kept.ids.size());
    information.resize(kept.ids.size());
  };
  if (params.top_k > 0) cut(static_cast<size_t>(params.top_k));
  if (params.top_p < 1) {
    const double total = static_cast<double>(
        std::accumulate(kept.weights.begin(), kept.weights.end(), uint64_t{0}));
    uint64_t before = kept.weights[0];
    size_t count = 1;
    while (count < kept.ids.size() &&
           static_cast<double>(before) < double{params.top_p} * total) {
      before += kept.weights[count++];
    }
    cut(count);
  }
  if (params.min_p > 0) {
    size_t count = 1;
    while (count < kept.ids.size() &&
           static_cast<double>(kept.weights[count]) >=
               double{params.min_p} * std::ldexp(1, 40)) {
      ++count;
    }
    cut(count);
  }
  if (params.typical_p < 1) {
    unsigned __int128 sum = 0;
    uint64_t total = 0;
    for (size_t i = 0; i < kept.ids.size(); ++i) {
      sum += static_cast<unsigned __int128>(kept.weights[i]) *
             static_cast<uint64_t>(information[i]);
      total += kept.weights[i];
    }
    const auto mean = static_cast<int64_t>(sum / total);
    std::map<int64_t, uint64_t> by_distance;
    for (size_t i = 0; i < kept.ids.size(); ++i) {
      by_distance[std::abs(information[i] - mean)] += kept.weights[i];
    }
    uint64_t inside = 0;
    int64_t limit = 0;
    for (const auto& [distance, weight] : by_distance) {
      inside += weight;
      limit = distance;
      if (static_cast<double>(inside) >=
          double{params.typical_p} * static_cast<double>(total)) {
        break;
      }
    }
    Candidates typical;
    for (size_t i = 0; i < kept.ids.size(); ++i) {
      if (std::abs(information[i] - mean) > limit) continue;
      typical.ids.push_back(kept.ids[i]);
      typical.weights.push_back(kept.weights[i]);
      typical.exact.push_back(kept.exact[i]);
    }
    return typical;
  }
  return kept;
}

// Of a mask, as kernels/types.h says.
bool Names(const std::vector<uint32_t>& masks, int vocab, int mask, int id) {
  const int word = mask * MaskWords(vocab) + id / 32;
  return (masks[static_cast<size_t>(word)] >> (id % 32) & 1) != 0;
}

int Expected(const std::vector<float>& logits, const SampleParams& params,
             const std::vector<LogitEdit>& edits,
             const std::vector<uint32_t>& masks) {
  std::vector<float> edited = Edited(logits, params, edits);
  const auto hide = [&] {
    const int vocab = static_cast<int>(logits.size());
    for (int id = 0; params.mask >= 0 && id < vocab; ++id) {
      if (!Names(masks, vocab, params.mask, id)) {
        edited[static_cast<size_t>(id)] = -INFINITY;
      }
    }
    return *std::max_element(edited.begin(), edited.end()) > -INFINITY;
  };
  if (!hide()) {
    edited = logits;
    if (!hide()) edited = logits;
  }
  if (params.temperature == 0) return Order(edited)[0];
  const Candidates kept = Filter(edited, params);
  std::vector<std::pair<float, int>> scores;
  for (size_t i = 0; i < kept.ids.size(); ++i) {
    const int id = kept.ids[i];
    const std::array<uint32_t, 4> bits =
        Philox({static_cast<uint32_t>(params.position), params.sequence_index,
                static_cast<uint32_t>(id / 64 * 16 + id % 16), 0},
               params.seed);
    scores.emplace_back(
        Exponential(bits[static_cast<size_t>(id / 16 % 4)]) / kept.exact[i],
        id);
  }
  return std::min_element(scores.begin(), scores.end())->second;
}

TEST(SamplerTest, PhiloxGivesThePublishedVectors) {
  // From the reference implementation's known-answer file.
  EXPECT_EQ(Philox({0, 0, 0, 0}, 0),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c,
                                     0x9b00dbd8}));
  EXPECT_EQ(Philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
                   0xffffffffffffffffu),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6,
                                     0x6d5451fd}));
  EXPECT_EQ(Philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                   0x299f31d0a4093822u),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420,
                                     0x24126ea1}));
}

TEST(SamplerTest, GreedyTakesTheLowestIdAmongTies) {
  Device device(MakeBackend());
  for (const int vocab : {5, 16, 17, 1000}) {
    std::vector<float> logits(static_cast<size_t>(vocab), -2.0f);
    logits[3] = logits[4] = logits[static_cast<size_t>(vocab - 1)] = 1.5f;
    const auto got = Sample(device, vocab, logits, {SampleParams{}});
    EXPECT_EQ(got[0].token_id, 3);
    EXPECT_EQ(got[0].num_top, 0);
  }
}

// As a row of the vocabulary that nobody trained may make them.
TEST(SamplerTest, NansAreNeverDrawnAndHideNothing) {
  Device device(MakeBackend());
  const int vocab = 1000;
  for (const int nan : {0, 3, 480, 992, 999}) {
    for (const int best : {16, 35, 464, 496, 984, 991}) {
      std::vector<float> logits(static_cast<size_t>(vocab));
      for (int i = 0; i < vocab; ++i) {
        logits[static_cast<size_t>(i)] = static_cast<float>(i % 7) * 0.25f;
      }
      logits[static_cast<size_t>(best)] = 40;
      logits[static_cast<size_t>(nan)] = NAN;
      std::vector<SampleParams> params(3);
      params[1].temperature = 1e-5f;
      params[2].temperature = 1;
      for (SampleParams& row : params) row.logprobs = 3;
      std::vector<float> rows;
      for (size_t i = 0; i < params.size(); ++i) {
        rows.insert(rows.end(), logits.begin(), logits.end());
      }
      SampleResult* const results = device.New<SampleResult>(params.size());
      device->Sample(device.queue(), static_cast<int>(params.size()), vocab,
                     device.Upload(rows), device.Upload(params),
                     device.Upload(std::vector<LogitEdit>()),
                     device.Upload(std::vector<uint32_t>()), results);
      for (const SampleResult& got : device.Download(results, params.size())) {
        EXPECT_EQ(got.token_id, best) << nan;
        EXPECT_NEAR(got.logprob, 0, 1e-6) << nan;
        EXPECT_EQ(got.rank, 1);
        ASSERT_EQ(got.num_top, 3);
        for (int i = 0; i < 3; ++i) EXPECT_NE(got.top_ids[i], nan);
      }
    }
  }
}

LogitEdit Ban(int id) { return {.token_id = id, .bias = -INFINITY}; }

// Nothing else has a weight beside it, nor has it one itself.
TEST(SamplerTest, AnInfiniteLogitIsDrawn) {
  Device device(MakeBackend("auto", 2));
  const std::vector<float> logits = {0, 1, INFINITY, 2};
  for (const SampleParams& params :
       {SampleParams{.temperature = 1}, SampleParams{.temperature = 0},
        SampleParams{.temperature = 1, .top_k = 2},
        SampleParams{.temperature = 1, .top_p = 0.5f},
        SampleParams{.temperature = 1, .min_p = 0.1f},
        SampleParams{.temperature = 1, .typical_p = 0.5f}}) {
    EXPECT_EQ(Sample(device, 4, logits, {params})[0].token_id, 2);
  }
}

TEST(SamplerTest, BansHoldForTheirOwnRow) {
  Device device(MakeBackend());
  std::vector<float> logits = {1, 5, 4, 5, 0};
  const SampleParams banned{.first_edit = 0, .num_edits = 2};
  const SampleParams random{
      .temperature = 1.0f, .top_k = 1, .first_edit = 2, .num_edits = 2};
  logits.insert(logits.end(), logits.begin(), logits.begin() + 5);
  logits.insert(logits.end(), logits.begin(), logits.begin() + 5);
  const auto got = Sample(device, 5, logits, {banned, SampleParams{}, random},
                          {Ban(1), Ban(3), Ban(1), Ban(3)});
  EXPECT_EQ(got[0].token_id, 2);
  EXPECT_EQ(got[1].token_id, 1);
  EXPECT_EQ(got[2].token_id, 2);
}

TEST(SamplerTest, EditsChangeWhatIsDrawnButNotItsLogprob) {
  Device device(MakeBackend());
  const std::vector<float> logits = {1, 5, 4, -2, 0};
  struct Case {
    const char* why;
    std::vector<LogitEdit> edits;
    bool only_edited;
    int token;
  };
  const Case cases[] = {
      {"a bias", {{.token_id = 3, .bias = 7.5f}}, false, 3},
      {"positive logits are divided",
       {{.token_id = 1, .repetition = 1.3f}},
       false,
       2},
      {"not below another", {{.token_id = 1, .repetition = 1.2f}}, false, 1},
      {"negative ones are multiplied",
       {{.token_id = 1, .bias = -5.5f, .repetition = 0.5f},
        {.token_id = 2, .bias = -4.25f, .repetition = 0.5f},
        Ban(0),
        Ban(4)},
       false,
       2},
      {"a penalty", {{.token_id = 1, .penalty = 1.5f}}, false, 2},
      {"only some", {{.token_id = 3}, {.token_id = 4}}, true, 4},
      {"only some, one banned", {{.token_id = 0}, Ban(1)}, true, 0},
      {"nothing left", {Ban(0), Ban(1), Ban(2), Ban(3), Ban(4)}, false, 1},
      {"nothing left of some", {Ban(0), Ban(2)}, true, 1}};
  const std::vector<int> rank = {3, 1, 2, 5, 4};
  for (const Case& c : cases) {
    for (const float temperature : {0.0f, 1e-3f}) {
      const SampleParams params{
          .temperature = temperature,
          .logprobs = 2,
          .num_edits = static_cast<int32_t>(c.edits.size()),
          .only_edited = c.only_edited ? 1 : 0};
      const SampleResult got = Sample(device, 5, logits, {params}, c.edits)[0];
      EXPECT_EQ(got.token_id, c.token) << c.why;
      EXPECT_EQ(got.rank, rank[static_cast<size_t>(c.token)]) << c.why;
      EXPECT_EQ(got.top_ids[0], 1) << c.why;
      EXPECT_EQ(got.top_ids[1], 2) << c.why;
      EXPECT_FLOAT_EQ(got.top_logprobs[1] - got.logprob,
                      4 - logits[static_cast<size_t>(c.token)])
          << c.why;
    }
  }
}

// What penalties, biases and bans make of some ids, for odd rows of a batch.
std::vector<LogitEdit> SomeEdits(int vocab, int row) {
  std::vector<LogitEdit> edits;
  for (int id = row % 3; id < vocab; id += 1 + id % 5) {
    const float unit = static_cast<float>((id * 37 + row * 11) % 64) / 64.0f;
    LogitEdit edit{.token_id = id};
    if (id % 7 == 1) edit.bias = 4.0f * unit - 2.0f;
    if (id % 4 != 2) edit.repetition = 0.5f + unit;
    if (id % 3 == 0) edit.penalty = 2.0f * unit;
    if (id % 11 == 5) edit = Ban(id);
    edits.push_back(edit);
  }
  return edits;
}

// Of half of the ids, of one, of none, or of the first ones; and where the row
// is odd with all bits behind the last id, which say nothing.
std::vector<uint32_t> SomeMask(int vocab, int row) {
  std::vector<uint32_t> mask(static_cast<size_t>(MaskWords(vocab)), 0);
  for (int id = 0; id < vocab; ++id) {
    const bool named = row % 4 == 0   ? (id * 7 + row) % 13 < 6
                       : row % 4 == 1 ? id == row * 31 % vocab
                       : row % 4 == 2 ? row % 8 == 2 && id > vocab / 2
                                      : id <= row % 40;
    if (named) mask[static_cast<size_t>(id / 32)] |= 1u << (id % 32);
  }
  if (row % 2 != 0 && vocab % 32 != 0) mask.back() |= ~0u << (vocab % 32);
  return mask;
}

TEST(SamplerTest, DrawsEqualTheStatementForEveryFilter) {
  struct Case {
    float temperature, top_p, min_p;
    int top_k;
    float typical_p = 1;
  };
  const Case cases[] = {
      {1.0f, 1.0f, 0.0f, 0},         {0.7f, 1.0f, 0.0f, 40},
      {1.5f, 0.9f, 0.0f, 0},         {1.0f, 1.0f, 0.05f, 0},
      {1.2f, 0.95f, 0.02f, 50},      {5.0f, 0.5f, 0.0f, 0},
      {0.1f, 0.99f, 0.0f, 3},        {1.0f, 0.0f, 0.0f, 0},
      {1.0f, 1.0f, 1.0f, 0},         {100.0f, 1.0f, 0.0f, 7},
      {2.0f, 0.7f, 0.3f, 1000},      {1.0f, 1.0f, 0.0f, 0, 0.2f},
      {1.0f, 1.0f, 0.0f, 0, 0.9f},   {1.5f, 0.9f, 0.01f, 30, 0.5f},
      {0.3f, 1.0f, 0.0f, 0, 0.999f}, {9.0f, 0.9f, 0.0f, 0, 1e-6f}};
  int compared = 0;
  for (const char* isa : {"avx2", "avx512"}) {
    auto backend = MakeBackend(isa, 2);
    if (backend == nullptr) continue;
    Device device(std::move(backend));
    for (const int vocab : {2, 50, 3001}) {
      for (const bool ties : {false, true}) {
        auto logits = RandomFloats(static_cast<size_t>(vocab), 41, 3.0f);
        if (ties) {
          for (float& logit : logits) logit = std::round(logit);
        }
        for (const Case& c : cases) {
          std::vector<SampleParams> params;
          std::vector<LogitEdit> edits;
          std::vector<uint32_t> masks;
          std::vector<float> rows;
          for (int i = 0; i < 40; ++i) {
            const auto own =
                i % 2 == 0 ? std::vector<LogitEdit>{} : SomeEdits(vocab, i);
            params.push_back({.temperature = c.temperature,
                              .top_p = c.top_p,
                              .min_p = c.min_p,
                              .typical_p = c.typical_p,
                              .top_k = c.top_k,
                              .seed = 99,
                              .sequence_index = 1,
                              .position = i,
                              .first_edit = static_cast<int32_t>(edits.size()),
                              .num_edits = static_cast<int32_t>(own.size()),
                              .only_edited = i % 4 == 3 ? 1 : 0});
            if (i % 3 != 0) {
              params.back().mask =
                  static_cast<int32_t>(masks.size()) / MaskWords(vocab);
              const auto own_mask = SomeMask(vocab, i);
              masks.insert(masks.end(), own_mask.begin(), own_mask.end());
            }
            edits.insert(edits.end(), own.begin(), own.end());
            rows.insert(rows.end(), logits.begin(), logits.end());
          }
          const auto got = Sample(device, vocab, rows, params, edits, masks);
          for (size_t i = 0; i < got.size(); ++i) {
            ASSERT_EQ(got[i].token_id,
                      Expected(logits, params[i], edits, masks))
                << isa << " vocab " << vocab << " ties " << ties << " T "
                << c.temperature << " p " << c.top_p << " min " << c.min_p
                << " typical " << c.typical_p << " k " << c.top_k << " draw "
                << i;
            ++compared;
          }
        }
      }
    }
  }
  EXPECT_GE(compared, 40 * 16 * 6);
}

// Upper 1e-6 point of chi-square by Wilson and Hilferty's formula.
double ChiSquareLimit(int degrees) {
  const double a = 2.0 / (9.0 * degrees);
  return degrees * std::pow(1 - a + 4.753 * std::sqrt(a), 3);
}

TEST(SamplerTest, HundredThousandDrawsFollowTheDistribution) {
  Device device(MakeBackend("auto", 2));
  const int vocab = 40, batch = 1000;
  const auto logits = RandomFloats(vocab, 42, 1.5f);
  std::vector<float> rows;
  for (int i = 0; i < batch; ++i) {
    rows.insert(rows.end(), logits.begin(), logits.end());
  }
  const SampleParams cases[] = {
      {.temperature = 1.0f, .seed = 7},
      {.temperature = 0.8f, .top_k = 10, .seed = 8},
      {.temperature = 1.3f, .top_p = 0.8f, .seed = 9},
      {.temperature = 1.0f, .min_p = 0.1f, .seed = 10},
      {.temperature = 1.1f, .typical_p = 0.6f, .seed = 11}};
  for (const SampleParams& base : cases) {
    std::map<int, int> seen;
    for (int draw = 0; draw < 100000; draw += batch) {
      std::vector<SampleParams> params(batch, base);
      for (int i = 0; i < batch; ++i) {
        // Positions and sequences both vary: neither may repeat the other.
        params[static_cast<size_t>(i)].position = i;
        params[static_cast<size_t>(i)].sequence_index =
            static_cast<uint32_t>(draw / batch);
      }
      for (const SampleResult& result : Sample(device, vocab, rows, params)) {
        ++seen[result.token_id];
      }
    }
    const Candidates kept = Filter(logits, base);
    double sum = 0;
    for (const int id : kept.ids) {
      sum +=
          std::exp(double{logits[static_cast<size_t>(id)]} / base.temperature);
    }
    double statistic = 0;
    int counted = 0;
    for (const int id : kept.ids) {
      const double expected =
          100000 *
          std::exp(double{logits[static_cast<size_t>(id)]} / base.temperature) /
          sum;
      statistic += (seen[id] - expected) * (seen[id] - expected) / expected;
      counted += seen[id];
    }
    EXPECT_EQ(counted, 100000) << "an id outside the kept set was drawn";
    EXPECT_LT(statistic, ChiSquareLimit(static_cast<int>(kept.ids.size()) - 1))
        << "seed " << base.seed;
  }
}

// What a draft model lives on. Of two distributions p and q that race with the
// same numbers, i wins both with the probability 1 / sum over j of
// max(p[j] / p[i], q[j] / q[i]): the least of both scores of j is exponential
// with the greater rate.
TEST(SamplerTest, RowsThatAreAlikeDrawAlike) {
  Device device(MakeBackend("auto", 2));
  const int vocab = 200, batch = 500;
  const int draws = 20000;
  const auto one = RandomFloats(vocab, 44, 2.0f);
  const auto noise = RandomFloats(vocab, 45, 0.2f);
  std::vector<float> rows;
  for (int i = 0; i < batch; ++i) {
    for (const bool other : {false, true}) {
      for (size_t j = 0; j < one.size(); ++j) {
        rows.push_back(one[j] + (other ? noise[j] : 0));
      }
    }
  }
  std::vector<double> p, q;
  for (size_t j = 0; j < one.size(); ++j) {
    p.push_back(std::exp(double{one[j]}));
    q.push_back(std::exp(double{one[j] + noise[j]}));
  }
  double expected = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    double sum = 0;
    for (size_t j = 0; j < p.size(); ++j) {
      sum += std::max(p[j] / p[i], q[j] / q[i]);
    }
    expected += 1 / sum;
  }
  int alike = 0;
  for (int draw = 0; draw < draws; draw += batch) {
    std::vector<SampleParams> params;
    for (int i = 0; i < 2 * batch; ++i) {
      params.push_back(
          {.temperature = 1.0f, .seed = 12, .position = draw + i / 2});
    }
    const auto got = Sample(device, vocab, rows, params);
    for (size_t i = 0; i < got.size(); i += 2) {
      alike += got[i].token_id == got[i + 1].token_id ? 1 : 0;
    }
  }
  EXPECT_GT(expected, 0.75);
  EXPECT_NEAR(alike / double{draws}, expected,
              5 * std::sqrt(expected * (1 - expected) / draws));
}

// Only the numbers near 0 win: they must be as exact as others.
TEST(SamplerTest, ExponentialNumbersAreLogarithms) {
  std::vector<uint32_t> bits = {0, 1, 2, 0x7fffffff, 0x80000000, 0x80000001};
  for (uint32_t i = 0; i < 300; ++i) bits.push_back(~i);
  for (uint64_t i = 0; i < 100000; ++i) {
    bits.push_back(static_cast<uint32_t>(i * 2654435761u));
  }
  double worst = 0;
  for (const uint32_t b : bits) {
    const double exact =
        -std::log1p(-((~b & 0xffffffffu) + 0.5) / 4294967296.0);
    worst = std::max(worst, std::abs(double{Exponential(b)} / exact - 1));
  }
  EXPECT_LT(worst, 3e-7);
}

TEST(SamplerTest, DrawsDoNotDependOnTheBatch) {
  const int vocab = 500;
  const auto logits = RandomFloats(vocab, 43, 2.0f);
  const SampleParams params{.temperature = 1.0f,
                            .top_p = 0.95f,
                            .seed = 3,
                            .position = 12,
                            .logprobs = 5};
  std::vector<SampleResult> all;
  for (const Config& config : AllConfigs()) {
    auto backend = MakeBackend(config.isa, config.threads);
    if (backend == nullptr) continue;
    Device device(std::move(backend));
    for (const size_t batch : {1, 3, 32}) {
      auto rows = RandomFloats(batch * vocab, 44);
      std::copy(logits.begin(), logits.end(), rows.end() - vocab);
      std::vector<SampleParams> batch_params(batch, params);
      for (size_t i = 0; i + 1 < batch; ++i) batch_params[i].position = 99;
      all.push_back(Sample(device, vocab, rows, batch_params).back());
    }
  }
  for (const SampleResult& result : all) {
    EXPECT_EQ(std::memcmp(&result, &all[0], sizeof(result)), 0);
  }
}

TEST(SamplerTest, LogprobsRankAndAlternativesAreOfTheRawLogits) {
  Device device(MakeBackend());
  // The second of each is in steps of 1: ties are ranked by their ids.
  for (const auto& [vocab, ties, seed] :
       {std::tuple(3, false, 5), std::tuple(3, true, 5),
        std::tuple(100, false, 5), std::tuple(100, true, 6),
        std::tuple(5000, false, 5), std::tuple(5000, true, 7),
        std::tuple(5000, true, 8)}) {
    auto logits = RandomFloats(static_cast<size_t>(vocab), 45, 4.0f);
    if (ties) {
      for (float& logit : logits) logit = std::round(logit);
    }
    SampleParams params{.temperature = 2.0f,
                        .top_k = 50,
                        .seed = static_cast<uint64_t>(seed),
                        .logprobs = kMaxTopLogprobs};
    const SampleResult got = Sample(device, vocab, logits, {params})[0];
    double sum = 0;
    for (const float logit : logits) sum += std::exp(double{logit});
    const auto log_prob = [&](int id) {
      return logits[static_cast<size_t>(id)] - std::log(sum);
    };
    const auto order = Order(logits);
    // Weights are floored to 2^-40 and exp is good to 2.4e-7.
    EXPECT_NEAR(got.logprob, log_prob(got.token_id), 2e-6);
    EXPECT_EQ(got.rank, std::find(order.begin(), order.end(), got.token_id) -
                            order.begin() + 1);
    ASSERT_EQ(got.num_top, std::min(vocab, kMaxTopLogprobs));
    for (int i = 0; i < got.num_top; ++i) {
      EXPECT_EQ(got.top_ids[i], order[static_cast<size_t>(i)]);
      EXPECT_NEAR(got.top_logprobs[i], log_prob(got.top_ids[i]), 2e-6);
    }
  }
}

TEST(SamplerTest, ZeroAlternativesStillGiveTheChosenLogprob) {
  Device device(MakeBackend());
  SampleParams params;
  params.logprobs = 0;
  const SampleResult got = Sample(device, 4, {0, 0, 0, 0}, {params})[0];
  EXPECT_EQ(got.token_id, 0);
  EXPECT_NEAR(got.logprob, std::log(0.25), 1e-6);
  EXPECT_EQ(got.rank, 1);
  EXPECT_EQ(got.num_top, 0);
}

TEST(SamplerTest, AGivenTokenIsScoredAndNothingIsDrawn) {
  Device device(MakeBackend());
  const std::vector<float> logits = {1, 5, 4, -2, 5};
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double{logit});
  const std::vector<int> rank = {4, 1, 3, 5, 2};
  for (int id = 0; id < 5; ++id) {
    const SampleParams params{
        .temperature = 1.0f, .seed = 3, .logprobs = 2, .given = id};
    const SampleResult got = Sample(device, 5, logits, {params})[0];
    EXPECT_EQ(got.token_id, id);
    EXPECT_EQ(got.rank, rank[static_cast<size_t>(id)]);
    EXPECT_NEAR(got.logprob, logits[static_cast<size_t>(id)] - std::log(sum),
                1e-6);
    EXPECT_EQ(got.top_ids[0], 1);
    EXPECT_EQ(got.top_ids[1], 4);
  }
}

// Log probabilities first, then their edits, in f64.
TEST(SamplerTest, EditedLogProbabilitiesAreTheModelsWithTheirEdits) {
  Device device(MakeBackend());
  for (const int vocab : {30, 3001}) {
    const auto logits = RandomFloats(static_cast<size_t>(vocab), 46, 3.0f);
    double sum = 0;
    for (const float logit : logits) sum += std::exp(double{logit});
    for (int row = 0; row < 6; ++row) {
      const bool only_edited = row % 2 == 1;
      const auto edits =
          row < 2 ? std::vector<LogitEdit>{} : SomeEdits(vocab, row);
      std::vector<double> expected;
      for (const float logit : logits) {
        expected.push_back(only_edited && !edits.empty()
                               ? -INFINITY
                               : double{logit} - std::log(sum));
      }
      for (const LogitEdit& edit : edits) {
        const auto id = static_cast<size_t>(edit.token_id);
        const double biased = double{logits[id]} - std::log(sum) + edit.bias;
        expected[id] =
            (biased > 0 ? biased / edit.repetition : biased * edit.repetition) -
            edit.penalty;
      }
      const SampleParams params{.temperature = 1.0f,
                                .logprobs = 10,
                                .num_edits = static_cast<int32_t>(edits.size()),
                                .only_edited = only_edited ? 1 : 0,
                                .edited_logprobs = 1};
      const SampleResult got =
          Sample(device, vocab, logits, {params}, edits)[0];
      ASSERT_EQ(got.num_top,
                std::min<int>(10, only_edited && !edits.empty()
                                      ? static_cast<int>(edits.size())
                                      : vocab));
      std::vector<double> sorted = expected;
      std::sort(sorted.begin(), sorted.end(), std::greater<>());
      for (int i = 0; i < got.num_top; ++i) {
        const auto id = static_cast<size_t>(got.top_ids[i]);
        const double top = double{got.top_logprobs[i]};
        if (std::isinf(top)) {
          EXPECT_EQ(top, expected[id]);
          continue;
        }
        EXPECT_NEAR(top, expected[id], 1e-5) << "row " << row << " id " << id;
        EXPECT_NEAR(top, sorted[static_cast<size_t>(i)], 1e-5);
      }
      EXPECT_EQ(got.token_id, got.top_ids[0]);
      EXPECT_EQ(got.logprob, got.top_logprobs[0]);
      EXPECT_EQ(got.rank, 1);
    }
  }
}

TEST(SamplerTest, EditsOfLogProbabilitiesThatLeaveNothingAreVoid) {
  Device device(MakeBackend());
  const std::vector<float> logits = {1, 5, 4, 5};
  for (const int only_edited : {0, 1}) {
    const SampleParams params{.logprobs = 3,
                              .num_edits = 4,
                              .only_edited = only_edited,
                              .edited_logprobs = 1};
    const SampleResult got = Sample(device, 4, logits, {params},
                                    {Ban(0), Ban(1), Ban(2), Ban(3)})[0];
    EXPECT_EQ(got.num_top, 3);
    EXPECT_EQ(got.top_ids[0], 1);
    EXPECT_EQ(got.top_ids[1], 3);
    EXPECT_EQ(got.top_ids[2], 2);
  }
}

}  // namespace
}  // namespace tandem::kernels
