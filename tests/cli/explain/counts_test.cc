// SPDX-License-Identifier: Apache-2.0
// Counts against figures worked out by hand.

#include "cli/explain/counts.h"

#include <gtest/gtest.h>

#include "cli/explain/command.h"
#include "engine/model/model_work.h"

namespace tandem::explain {
namespace {

using engine::MatrixBytes;
using engine::ModelSpec;
using engine::QueryKeyPairs;
using kernels::DType;

// 2 layers, hidden 8, 4 heads and 2 KV heads of 4, feed-forward 16, 32 tokens.
ModelSpec Toy() {
  ModelSpec spec;
  spec.hidden_size = 8;
  spec.intermediate_size = 16;
  spec.layers = 2;
  spec.heads = 4;
  spec.kv_heads = 2;
  spec.head_dim = 4;
  spec.vocab_size = 32;
  spec.max_positions = 64;
  spec.tied_head = true;
  return spec;
}

// Of one of its layers: q, k and v; the output; gate, up and down.
constexpr double kQkv = (4 + 2 * 2) * 4 * 8;
constexpr double kOutput = 8 * 16;
constexpr double kFeedForward = 3 * 8 * 16;
constexpr double kHead = 32 * 8;

TEST(CountsTest, QuotedLengthsGiveQuotedRatios) {
  const struct {
    Lengths lengths;
    double without, with, ratio;
  } cases[] = {{{100, 50}, 6225, 150, 41.5},
               {{500, 200}, 119900, 700, 171},
               {{1000, 500}, 624750, 1500, 416},
               {{2000, 1000}, 2499500, 3000, 833}};
  for (size_t i = 0; i < 4; ++i) {
    const Lengths lengths = kQuotedLengths[i];
    EXPECT_EQ(lengths.prompt, cases[i].lengths.prompt);
    EXPECT_EQ(lengths.output, cases[i].lengths.output);
    const double without = KvRowsWithoutCache(lengths);
    const double with = KvRowsWithCache(lengths);
    EXPECT_EQ(without, cases[i].without);
    EXPECT_EQ(with, cases[i].with);
    EXPECT_NEAR(without / with, cases[i].ratio, 0.6);
    EXPECT_EQ(KvRowsInLoop(lengths), with - 1);
  }
  EXPECT_EQ(PositionsAttended({2000, 200}), 419900);
}

TEST(CountsTest, PairsAreCausalAndEndWithTheWindow) {
  EXPECT_EQ(QueryKeyPairs(0, 4), 1 + 2 + 3 + 4);
  EXPECT_EQ(QueryKeyPairs(5, 3), 6 + 7 + 8);
  EXPECT_EQ(QueryKeyPairs(0, 5, 3), 1 + 2 + 3 + 3 + 3);
  EXPECT_EQ(QueryKeyPairs(1, 3, 3), 2 + 3 + 3);
  EXPECT_EQ(QueryKeyPairs(9, 2, 3), 3 + 3);
}

TEST(CountsTest, CurvesEndAtTheSums) {
  EXPECT_EQ(CumulativeKvRows({3, 4}, false),
            std::vector<double>({3, 7, 12, 18}));
  EXPECT_EQ(CumulativeKvRows({3, 4}, true), std::vector<double>({3, 4, 5, 6}));
  EXPECT_EQ(CumulativeKvRows({100, 50}, false).back(), 6225);
}

TEST(CountsTest, ThreePromptTokensAndFourStepsAreSixCellsAndTwelve) {
  const auto grid = StepGrid({3, 4});
  ASSERT_EQ(grid.size(), 4u);
  ASSERT_EQ(grid[0].size(), 6u);
  EXPECT_EQ(CountCells(grid, Cell::kComputed), 6);
  EXPECT_EQ(CountCells(grid, Cell::kAgain), 12);
  EXPECT_EQ(CountCells(grid, Cell::kNone), 3 + 2 + 1);
  EXPECT_EQ(grid[0], std::vector<Cell>({Cell::kComputed, Cell::kComputed,
                                        Cell::kComputed, Cell::kNone,
                                        Cell::kNone, Cell::kNone}));
  EXPECT_EQ(grid[2][4], Cell::kComputed) << "the token of the step before";
  EXPECT_EQ(grid[2][3], Cell::kAgain);
}

TEST(CountsTest, KvBytesOfKnownModels) {
  const auto llama = LoadConfig("");
  ASSERT_TRUE(llama.ok()) << llama.status();
  EXPECT_EQ(KvBytesPerToken(*llama, DType::kBF16), 131072);
  EXPECT_EQ(KvBytesPerToken(*llama, DType::kF32), 262144);
  // 512 vectors a token (32 layers, 8 heads, K and V), a scale of 4 bytes each.
  EXPECT_EQ(KvBytesPerToken(*llama, DType::kInt8), 512 * (128 + 4));
  // Of int4 one of 2 bytes for each 32 of the 128 dimensions.
  EXPECT_EQ(KvBytesPerToken(*llama, DType::kInt4), 512 * (64 + 4 * 2));
  // 8.03e9 as published, of which norms are 266 240.
  EXPECT_EQ(Parameters(*llama), 8030261248.0 - 266240);
  // 32 layers of 4096 KV dimensions: 512 KiB. 70B: 4096 tokens are 1.25 GiB.
  ModelSpec spec = *llama;
  spec.kv_heads = 32;
  EXPECT_EQ(KvBytesPerToken(spec, DType::kBF16), 512 << 10);
  spec.layers = 80;
  spec.kv_heads = 8;
  EXPECT_EQ(KvBytesPerToken(spec, DType::kBF16) * 4096, int64_t{5} << 28);
}

TEST(CountsTest, ParametersOfOtherFamilies) {
  const struct {
    const char* config;
    double published, norms_and_biases;
  } cases[] = {
      // GPT-2: learned positions, no gates, a tied head. Biases of 2304 + 768 +
      // 3072 + 768 and two norms of 2 x 768 in 12 layers, and one at the end.
      {R"({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
           "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
           "vocab_size": 50257, "activation_function": "gelu_new"})",
       124439808, 12 * (6912 + 4 * 768) + 2 * 768},
      // Mixtral 8x7B: 8 experts and a router in each layer.
      {R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
           "hidden_size": 4096, "intermediate_size": 14336,
           "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 32000,
           "num_local_experts": 8, "num_experts_per_tok": 2,
           "hidden_act": "silu"})",
       46702792704, 65 * 4096}};
  for (const auto& c : cases) {
    const auto spec = engine::ParseModelSpec("config.json", c.config, "", "");
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(Parameters(*spec), c.published - c.norms_and_biases)
        << spec->architecture;
    // Each parameter of a matrix is read by a step of many rows, once.
    const Formats formats{.weights = DType::kF32, .layers = DType::kF32};
    const double embedding =
        static_cast<double>(spec->hidden_size) *
        (spec->tied_head ? spec->max_positions : spec->vocab_size);
    EXPECT_NEAR(StepWork(*spec, formats, 1000, 0, 1).weight_bytes,
                4 * (Parameters(*spec) - embedding), 1)
        << spec->architecture;
  }
}

// What turns goes through matrices, so those have more numbers than the file.
TEST(CountsTest, ParametersOfLatentAttentionAreTheFiles) {
  const auto spec = engine::ParseModelSpec("config.json", R"({
      "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
      "hidden_size": 2048, "intermediate_size": 10944,
      "moe_intermediate_size": 1408, "num_hidden_layers": 27,
      "num_attention_heads": 16, "num_key_value_heads": 16,
      "kv_lora_rank": 512, "q_lora_rank": null, "qk_nope_head_dim": 128,
      "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
      "num_experts_per_tok": 6, "n_shared_experts": 2,
      "first_k_dense_replace": 1, "vocab_size": 102400})",
                                           "", "");
  ASSERT_TRUE(spec.ok()) << spec.status();
  // V2 Lite, whose files have 31 412 968 448 bytes of bf16. Norms of each layer
  // are of the hidden state twice, and of what keys and values are made of.
  EXPECT_EQ(Parameters(*spec),
            31412968448.0 / 2 - (27 * (2 * 2048 + 512) + 2048));
  EXPECT_EQ(KvBytesPerToken(*spec, DType::kBF16), 27 * 2 * 576 * 2);
  // A step reads its matrices: q, what keys and values are made of, where that
  // comes to lie, and what makes queries meet it; values, and the output.
  const Formats formats{.weights = DType::kF32, .layers = DType::kF32};
  const engine::WorkShape shape = ShapeOf(*spec, formats);
  EXPECT_EQ(shape.qkv,
            27 * (3072 * 2048 + 576 * 2048 + 2 * 576 * 576 + 16 * 576 * 192));
  EXPECT_EQ(shape.qkv_bytes, 4 * shape.qkv);
  const int64_t dense = 3 * 2048 * 10944;
  const int64_t routed = 64 * 2048 + (2 + 6) * 3 * 2048 * 1408;
  const int64_t output = 16 * 128 * (576 + 2048);
  EXPECT_EQ(shape.after_attention, 26 * output + dense + 25 * routed);
  EXPECT_EQ(shape.drawn, output + routed);
}

// The second layer sees all, with one KV head of 16.
TEST(CountsTest, LayersMayHaveOtherHeads) {
  ModelSpec spec = Toy();
  const Formats formats{
      .weights = DType::kF32, .layers = DType::kF32, .kv = DType::kInt8};
  EXPECT_EQ(KvHeads(spec), "2 KV heads of 4");
  const double before = Parameters(spec);
  spec.window = 8;
  spec.windowed = {true, false};
  spec.full_kv_heads = 1;
  spec.full_head_dim = 16;
  EXPECT_EQ(KvHeads(spec),
            "2 KV heads of 4 in layers with a window, 1 KV head of 16 in "
            "others");
  EXPECT_EQ(KvBytesPerToken(spec, DType::kInt8), 2 * (2 * (4 + 4) + 16 + 4));
  // Queries, keys and values of 8 numbers, and 4 heads of output.
  const double wide = (4 + 2) * 16 * 8;
  EXPECT_EQ(Parameters(spec) - before, wide - kQkv + 4 * 16 * 8 - kOutput);
  const engine::WorkShape shape = ShapeOf(spec, formats);
  EXPECT_EQ(shape.qkv, kQkv + wide);
  const engine::Work work = shape.EntryWork(/*first=*/10, /*rows=*/1, 1);
  EXPECT_EQ(work.kv_rows, 2 + 1);
  EXPECT_EQ(work.kv_bytes_written, KvBytesPerToken(spec, DType::kInt8));
  EXPECT_EQ(work.kv_bytes_read, 8 * 2 * 2 * (4 + 4) + 11 * 2 * (16 + 4));
  EXPECT_EQ(work.attention_flops, 4 * 4 * (8 * 4 + 11 * 16));
}

// The second layer looks at the first one's K and V, with a feed-forward layer
// twice as wide, and both are told 3 numbers of each of 9 tokens.
TEST(CountsTest, LayersWithoutKvAreLeftOutWhereNothingIsDrawn) {
  ModelSpec spec = Toy();
  spec.layers = 3;
  spec.shared_kv_layers = 2;
  spec.wide_shared = true;
  spec.told = 3;
  spec.told_vocab = 9;
  const Formats formats{
      .weights = DType::kF32, .layers = DType::kF32, .kv = DType::kF32};
  EXPECT_EQ(KvHeads(spec), "2 KV heads of 4, K and V in the first 1");
  EXPECT_EQ(KvBytesPerToken(spec, DType::kF32), 2 * 2 * 4 * 4);
  const double query = 4 * 4 * 8;
  const double told = 2 * 3 * 8;
  const double projection = 3 * 3 * 8;
  const double first = kOutput + kFeedForward + told;
  const double later = kOutput + 2 * kFeedForward + told;
  const double all = projection + kQkv + first + 2 * (query + later) + kHead;
  EXPECT_EQ(Parameters(spec), all + 9 * 3 * 3);
  EXPECT_EQ(WeightBytes(spec, formats, 0), 4 * (all + 9 * 3 * 3));
  const engine::WorkShape shape = ShapeOf(spec, formats);
  EXPECT_EQ(shape.StepWeightBytes(5, 1), 4 * all);
  EXPECT_EQ(shape.StepWeightBytes(5, 0), 4 * (projection + kQkv));
  const engine::Work drawn = shape.EntryWork(/*first=*/4, /*rows=*/2, 1);
  EXPECT_EQ(drawn.kv_rows, 2 * 2);
  EXPECT_EQ(drawn.kv_bytes_written, 2 * 2 * 2 * 4 * 4);
  EXPECT_EQ(drawn.kv_bytes_read, 3 * 6 * 2 * 2 * 4 * 4);
  // Behind K and V the row that draws goes on alone.
  EXPECT_EQ(drawn.query_key_pairs, 3 * 4 * 6);
  EXPECT_EQ(drawn.matrix_flops, 2 * (2 * (projection + kQkv) + first +
                                     2 * (query + later) + kHead));
  const engine::Work part = shape.EntryWork(4, 2, 0);
  EXPECT_EQ(part.kv_rows, drawn.kv_rows);
  EXPECT_EQ(part.query_key_pairs, 0);
  EXPECT_EQ(part.matrix_flops, 2 * 2 * (projection + kQkv));
}

TEST(CountsTest, AStepIsMultipliedByLayersAndHeads) {
  const Formats formats{
      .weights = DType::kF32, .layers = DType::kF32, .kv = DType::kBF16};
  // 3 rows after 5: one drawn, so the last layer has one row but for K and V.
  const Work work = StepWork(Toy(), formats, 1, 5, 3);
  EXPECT_EQ(work.kv_rows, 3 * 2 * 2);
  EXPECT_EQ(work.positions_attended, 8 * 2 * 4);
  EXPECT_EQ(work.query_key_pairs, (6 + 7 + 8 + 8) * 4);
  EXPECT_EQ(work.kv_bytes_written, 3 * 2 * 2 * (2 * 4 * 2));
  EXPECT_EQ(work.kv_bytes_read, 8 * 2 * 2 * (2 * 4 * 2));
  EXPECT_EQ(work.weight_bytes,
            4 * (2 * (kQkv + kOutput + kFeedForward) + kHead));
  EXPECT_EQ(work.matrix_flops,
            2 * (2 * 3 * kQkv + 3 * kOutput + 3 * kFeedForward + kOutput +
                 kFeedForward + kHead));
  EXPECT_EQ(work.attention_flops, 4 * 4 * (6 + 7 + 8 + 8) * 4);
  EXPECT_EQ(Parameters(Toy()), 2 * (kQkv + kOutput + kFeedForward) + kHead);
}

TEST(CountsTest, SequencesShareWeightsButNotKv) {
  const Work one = StepWork(Toy(), {}, 1, 9, 1);
  const Work eight = StepWork(Toy(), {}, 8, 9, 1);
  EXPECT_EQ(eight.weight_bytes, one.weight_bytes);
  EXPECT_EQ(eight.kv_bytes_read, 8 * one.kv_bytes_read);
  EXPECT_EQ(eight.flops(), 8 * one.flops());
}

TEST(CountsTest, AGenerationIsTheSumOfItsSteps) {
  const Work with = GenerationWork(Toy(), {}, {3, 4}, true);
  const Work without = GenerationWork(Toy(), {}, {3, 4}, false);
  EXPECT_EQ(with.kv_rows, 6 * 2 * 2);
  EXPECT_EQ(without.kv_rows, 18 * 2 * 2);
  EXPECT_EQ(with.positions_attended, 18 * 2 * 4);
  EXPECT_EQ(without.positions_attended, with.positions_attended);
  EXPECT_EQ(with.query_key_pairs, (6 + 4 + 5 + 6 + 3 + 4 + 5 + 6) * 4);
  EXPECT_EQ(without.query_key_pairs, (6 + 10 + 15 + 21 + 3 + 4 + 5 + 6) * 4);
  EXPECT_EQ(without.bytes_read(), with.bytes_read());
}

TEST(CountsTest, WindowedLayersReadTheirWindow) {
  ModelSpec spec = Toy();
  spec.window = 4;
  spec.windowed = {true, false};
  const Work work = StepWork(spec, {}, 1, 9, 2);  // queries 9 and 10
  EXPECT_EQ(work.query_key_pairs, ((4 + 4) + 11) * 4);
  EXPECT_EQ(work.positions_attended, (4 + 11) * 4);
  // Positions 6 to 10 of the one, 0 to 10 of the other.
  EXPECT_EQ(work.kv_bytes_read, (5 + 11) * 2 * (2 * 4 * 2));
}

TEST(CountsTest, ExpertsAreReadAsDrawn) {
  ModelSpec spec = Toy();
  spec.routes = {.experts = 4, .chosen = 2};
  spec.expert_size = spec.intermediate_size;
  const Formats formats{.weights = DType::kF32, .layers = DType::kF32};
  const double rest = 2 * (kQkv + kOutput + 4 * 8) + kHead;
  EXPECT_EQ(StepWork(spec, formats, 1, 0, 1).weight_bytes,
            4 * (rest + 2 * 2 * kFeedForward));
  // Half of them are missed by each row: of 4, 3 by two rows.
  EXPECT_EQ(StepWork(spec, formats, 2, 0, 1).weight_bytes,
            4 * (rest + 2 * 3 * kFeedForward));
  EXPECT_EQ(StepWork(spec, formats, 1, 0, 1).matrix_flops,
            2 * (rest + 2 * 2 * kFeedForward));
}

TEST(CountsTest, WhatAllRowsTakeIsCountedWhereItIs) {
  ModelSpec spec = Toy();
  spec.layers = 3;
  spec.routes = {
      .experts = 4, .chosen = 2, .shared = kernels::SharedExpert::kGated};
  spec.expert_size = 16;
  spec.shared_size = 8;
  spec.dense = {true, false, false};
  const Formats formats{.weights = DType::kF32, .layers = DType::kF32};
  const double router = 5 * 8;
  const double shared = kFeedForward / 2;
  const double rest =
      3 * (kQkv + kOutput) + kFeedForward + 2 * (router + shared) + kHead;
  const Work one = StepWork(spec, formats, 1, 0, 1);
  EXPECT_EQ(one.weight_bytes, 4 * (rest + 2 * 2 * kFeedForward));
  EXPECT_EQ(one.matrix_flops, 2 * (rest + 2 * 2 * kFeedForward));
  EXPECT_EQ(Parameters(spec), rest + 2 * 4 * kFeedForward);
  EXPECT_EQ(WeightBytes(spec, formats, 0), 4 * (rest + 2 * 4 * kFeedForward));
  // All of the last layer but its K and V is left to nobody.
  spec.dense = {false, false, true};
  const Work last = StepWork(spec, formats, 1, 0, 1);
  EXPECT_EQ(last.weight_bytes, one.weight_bytes);
}

TEST(CountsTest, ExpertsMayBeInAFormatOfTheirOwn) {
  ModelSpec spec = Toy();
  spec.routes = {.experts = 4, .chosen = 2};
  spec.expert_size = spec.intermediate_size;
  spec.quantisation.method = engine::Quantisation::Method::kMxfp4;
  const Formats formats = FormatsOf(spec, {.weights = DType::kBF16});
  EXPECT_EQ(formats.layers, DType::kBF16);
  EXPECT_EQ(formats.experts, DType::kInt4);
  const double rest = 2 * (kQkv + kOutput + 4 * 8) + kHead;
  const double expert =
      MatrixBytes(DType::kInt4, 2 * 16, 8) + MatrixBytes(DType::kInt4, 8, 16);
  EXPECT_EQ(StepWork(spec, formats, 1, 0, 1).weight_bytes,
            2 * rest + 2 * 2 * expert);
}

TEST(CountsTest, CodesBringTheirScales) {
  EXPECT_EQ(MatrixBytes(DType::kBF16, 10, 64), 1280);
  EXPECT_EQ(MatrixBytes(DType::kFp8, 10, 64), 640 + 40);
  EXPECT_EQ(MatrixBytes(DType::kInt8, 10, 64), 640 + 10 * 2 * 2);
  EXPECT_EQ(MatrixBytes(DType::kInt4, 10, 64), 320 + 10 * 2 * 2);
  EXPECT_EQ(MatrixBytes(DType::kW8A8, 10, 64), 640 + 40);
  EXPECT_EQ((Formats{.layers = DType::kInt4}.head()), DType::kInt8);
  EXPECT_EQ((Formats{.layers = DType::kW8A8}.head()), DType::kInt8);
  EXPECT_EQ((Formats{.layers = DType::kFp8}.head()), DType::kBF16);
}

TEST(CountsTest, W8A8OfACheckpointLeavesTheHeadAlone) {
  engine::ModelSpec spec;
  spec.quantisation.method = engine::Quantisation::Method::kPlain;
  EXPECT_EQ(FormatsOf(spec, {}).layers, DType::kInt8);
  spec.quantisation.w8a8 = true;
  EXPECT_EQ(FormatsOf(spec, {}).layers, DType::kW8A8);
  EXPECT_EQ(FormatsOf(spec, {}, /*gpu=*/true).layers, DType::kW8A8);
  EXPECT_EQ(FormatsOf(spec, {}).head(), DType::kBF16);
}

TEST(CountsTest, CpusKeepE4m3AsBf16) {
  engine::ModelSpec spec;
  spec.quantisation.method = engine::Quantisation::Method::kPlain;
  spec.quantisation.e4m3 = true;
  EXPECT_EQ(FormatsOf(spec, {}).layers, DType::kBF16);
  EXPECT_EQ(FormatsOf(spec, {}, /*gpu=*/true).layers, DType::kFp8);
}

}  // namespace
}  // namespace tandem::explain
