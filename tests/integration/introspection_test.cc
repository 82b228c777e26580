// SPDX-License-Identifier: Apache-2.0
// What a request may show of its own computation, through real processes: the
// work that it took, with the KV cache and without it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "tests/integration/cluster.h"

namespace tandem::integration {
namespace {

// The embedded model.
constexpr int64_t kLayers = 6;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeads = 4;
constexpr int64_t kHeadDim = 32;
// Numbers of one layer's matrices, and of the head.
constexpr int64_t kQkv = 128 * (kHeads + 2 * kKvHeads) * kHeadDim;
constexpr int64_t kBehind = kHeads * kHeadDim * 128 + 3 * 128 * 352;
constexpr int64_t kHead = 1024 * 128;

int64_t SumTo(int64_t n) { return n * (n + 1) / 2; }

// By the model's shape alone: what `output` steps take whose prompt is one
// chunk. Of the last layer, behind its K and V, only the row that draws counts.
void ExpectWorkOf(int64_t prompt, int64_t output, bool no_kv_cache,
                  const v1::Work& work) {
  int64_t rows = 0;
  int64_t pairs = 0;  // of a query and a key, one head, layers but the last
  int64_t last_pairs = 0;
  int64_t read = 0;  // positions, each once a step
  for (int64_t step = 0; step < output; ++step) {
    const int64_t context = prompt + step;
    const int64_t known = no_kv_cache || step == 0 ? 0 : context - 1;
    rows += context - known;
    pairs += SumTo(context) - SumTo(known);
    last_pairs += context;
    read += context;
  }
  EXPECT_EQ(work.matrix_flops(),
            2 * rows * (kLayers * kQkv + (kLayers - 1) * kBehind) +
                2 * output * (kBehind + kHead));
  EXPECT_EQ(work.attention_flops(),
            4 * kHeads * kHeadDim * ((kLayers - 1) * pairs + last_pairs));
  EXPECT_EQ(work.query_key_pairs(),
            kHeads * ((kLayers - 1) * pairs + last_pairs));
  constexpr int64_t kBytes = 2;  // bf16
  EXPECT_EQ(work.weight_bytes_read(),
            output * kBytes * (kLayers * (kQkv + kBehind) + kHead));
  const int64_t position = kLayers * kKvHeads * 2 * kHeadDim * kBytes;
  EXPECT_EQ(work.kv_bytes_read(), read * position);
  EXPECT_EQ(work.kv_bytes_written(), rows * position);
}

v1::GenerateRequest Ask(v1::Placement placement, bool no_kv_cache) {
  v1::GenerateRequest request = TextRequest("Once upon a time", 12);
  request.mutable_stopping()->set_ignore_eos(true);
  request.set_placement(placement);
  request.mutable_cache()->set_bypass_prefix_cache(true);
  request.mutable_cache()->set_no_kv_cache(no_kv_cache);
  return request;
}

double RowsCounted(Cluster& cluster) {
  double rows = 0;
  for (const char* const worker : {"prefill-0", "decode-0"}) {
    for (const auto& [name, value] : cluster.Metrics(worker)) {
      if (name.starts_with("tandem_kv_rows_computed_total")) rows += value;
    }
  }
  return rows;
}

// Started, with the connections of a first request.
std::unique_ptr<Cluster> Begin(ClusterOptions options) {
  auto cluster = std::make_unique<Cluster>(std::move(options));
  EXPECT_TRUE(cluster->Start().ok());
  EXPECT_TRUE(cluster->Generate(TextRequest("One day", 4)).status.ok());
  EXPECT_EQ(cluster->WhatIsLeft(), "");
  return cluster;
}

TEST(IntrospectionTest, TheSameTokensWithTheCacheAndWithout) {
  const auto running = Begin({.router_arguments = {"--enable-no-kv-cache"}});
  Cluster& cluster = *running;
  const double before = RowsCounted(cluster);
  const Outcome with = cluster.Generate(Ask(v1::PLACEMENT_LOCAL, false));
  ASSERT_TRUE(with.status.ok()) << with.status;
  const int64_t p = with.done.usage().prompt_tokens();
  constexpr int64_t kOutput = 12;
  for (const auto placement : {v1::PLACEMENT_LOCAL, v1::PLACEMENT_SPLIT}) {
    for (const bool no_kv_cache : {false, true}) {
      const Outcome outcome = cluster.Generate(Ask(placement, no_kv_cache));
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      EXPECT_EQ(outcome.token_ids, with.token_ids);
      const v1::Work& work = outcome.done.work();
      const int64_t rows = no_kv_cache
                               ? kOutput * p + kOutput * (kOutput - 1) / 2
                               : p + kOutput - 1;
      EXPECT_EQ(work.positions_computed(), rows);
      EXPECT_EQ(work.kv_rows(), rows * kLayers * kKvHeads);
      EXPECT_EQ(work.steps(), kOutput);
      ExpectWorkOf(p, kOutput, no_kv_cache, work);
    }
  }
  // The workers' own counters hold the same sum.
  EXPECT_EQ(RowsCounted(cluster) - before,
            (3 * (p + kOutput - 1) +
             2 * (kOutput * p + kOutput * (kOutput - 1) / 2)) *
                kLayers * kKvHeads);
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

TEST(IntrospectionTest, AWorkerMayComputeAllRequestsWithoutACache) {
  Outcome outcomes[2];
  for (const bool off : {false, true}) {
    const auto running =
        Begin({.worker_arguments = {"--kv-cache", off ? "off" : "on"}});
    Cluster& cluster = *running;
    outcomes[off] = cluster.Generate(Ask(v1::PLACEMENT_SPLIT, false));
    ASSERT_TRUE(outcomes[off].status.ok()) << outcomes[off].status;
    // Its router was not told to offer it by request.
    const Outcome refused = cluster.Generate(Ask(v1::PLACEMENT_LOCAL, true));
    EXPECT_EQ(refused.status.code(), absl::StatusCode::kInvalidArgument);
    v1::GenerateRequest beams = TextRequest("One day", 8);
    beams.mutable_beam()->set_width(2);
    const absl::Status searched = cluster.Generate(beams).status;
    EXPECT_EQ(searched.code(),
              off ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kOk);
    if (off) {
      EXPECT_THAT(std::string(searched.message()),
                  ::testing::HasSubstr("--kv-cache off"));
    }
    EXPECT_EQ(cluster.WhatIsLeft(), "");
  }
  EXPECT_EQ(outcomes[0].token_ids, outcomes[1].token_ids);
  EXPECT_LT(outcomes[0].done.work().kv_rows(),
            outcomes[1].done.work().kv_rows());
}

TEST(IntrospectionTest, AttentionWeightsComeWithEveryToken) {
  const auto running =
      Begin({.router_arguments = {"--enable-attention-output"},
             .worker_arguments = {"--enable-attention-output"}});
  Cluster& cluster = *running;
  v1::GenerateRequest request = Ask(v1::PLACEMENT_LOCAL, false);
  const Outcome plain = cluster.Generate(request);
  request.mutable_output()->mutable_attention()->add_layers(0);
  request.mutable_output()->mutable_attention()->add_layers(5);
  Outcome outcomes[2];
  for (const auto placement : {v1::PLACEMENT_LOCAL, v1::PLACEMENT_SPLIT}) {
    request.set_placement(placement);
    const Outcome outcome = cluster.Generate(request);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.token_ids, plain.token_ids);
    const v1::GeneratedSequence& sequence = outcome.sequences.at(0);
    ASSERT_EQ(sequence.attention_size(), 12);
    int positions = outcome.done.usage().prompt_tokens();
    for (const v1::TokenAttention& token : sequence.attention()) {
      ASSERT_EQ(token.layers_size(), 2);
      EXPECT_EQ(token.layers(1).layer(), 5);
      for (const v1::AttentionWeights& row : token.layers()) {
        ASSERT_EQ(row.weights_size(), positions);
        double sum = 0;
        for (const float weight : row.weights()) sum += weight;
        EXPECT_NEAR(sum, 1, 1e-4);
      }
      ++positions;
    }
    outcomes[placement == v1::PLACEMENT_SPLIT] = outcome;
  }
  for (int i = 0; i < 12; ++i) {
    EXPECT_EQ(outcomes[0].sequences.at(0).attention(i).SerializeAsString(),
              outcomes[1].sequences.at(0).attention(i).SerializeAsString())
        << "prefilled elsewhere: token " << i;
  }
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

}  // namespace
}  // namespace tandem::integration
