// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/counts.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/model/model_work.h"
#include "engine/model/rope.h"

namespace tandem::explain {
namespace {

using engine::ModelSpec;
using kernels::DType;

double Sum(int64_t terms, int64_t first) {  // first + (first + 1) + ...
  const auto n = static_cast<double>(terms);
  return n * static_cast<double>(first) + n * (n - 1) / 2;
}

// Parameters of a layer's feed-forward part.
double FeedForward(const ModelSpec& spec, int layer) {
  const double row = (spec.is_gated() ? 3.0 : 2.0) * spec.hidden_size;
  double count = row * spec.dense_size(layer) +
                 2.0 * spec.told * spec.hidden_size;  // what it is told
  if (spec.has_experts(layer)) {
    count += static_cast<double>(spec.hidden_size) * spec.routes.logits() +
             spec.routes.experts * row * spec.expert_size;
  }
  return count;
}

}  // namespace

double KvRowsWithoutCache(Lengths lengths) {
  return Sum(lengths.output, lengths.prompt);
}

double KvRowsWithCache(Lengths lengths) {
  return static_cast<double>(lengths.prompt + lengths.output);
}

double KvRowsInLoop(Lengths lengths) { return KvRowsWithCache(lengths) - 1; }

double PositionsAttended(Lengths lengths) {
  return Sum(lengths.output, lengths.prompt);
}

std::vector<double> CumulativeKvRows(Lengths lengths, bool cached) {
  std::vector<double> sums;
  sums.reserve(static_cast<size_t>(lengths.output));
  double sum = 0;
  for (int64_t step = 0; step < lengths.output; ++step) {
    sum += cached && step > 0 ? 1
           : cached           ? static_cast<double>(lengths.prompt)
                              : static_cast<double>(lengths.prompt + step);
    sums.push_back(sum);
  }
  return sums;
}

DType Formats::head() const {
  const bool codes = kernels::HasIntegerProducts(layers);
  return codes && !from_checkpoint ? DType::kInt8 : weights;
}

Formats FormatsOf(const ModelSpec& spec, Formats formats, bool gpu) {
  using Method = engine::Quantisation::Method;
  const engine::Quantisation& quantisation = spec.quantisation;
  if (quantisation.method == Method::kNone) return formats;
  formats.from_checkpoint = true;
  if (!quantisation.DequantisedFor().empty()) {
    formats.layers = formats.weights;
  } else if (quantisation.method == Method::kMxfp4) {
    formats.layers = formats.weights;
    formats.experts = DType::kInt4;
  } else if (quantisation.method != Method::kPlain && quantisation.bits == 4) {
    formats.layers = DType::kInt4;
    formats.zero_bytes = engine::ZeroBytes(quantisation, gpu);
  } else {
    // CPUs keep e4m3 as bf16, which has all of its numbers.
    formats.layers = quantisation.w8a8    ? DType::kW8A8
                     : !quantisation.e4m3 ? DType::kInt8
                     : gpu                ? DType::kFp8
                                          : DType::kBF16;
  }
  return formats;
}

double AttentionParameters(const ModelSpec& spec, int layer) {
  const double hidden = spec.hidden_size;
  const double heads = spec.heads;
  if (!spec.latent()) {
    const auto output = heads * spec.kv_heads_of(layer).dim;
    return hidden * (spec.qkv_rows(layer) + output);
  }
  const double query = spec.query_rank > 0 ? spec.query_rank : hidden;
  return (spec.query_rank > 0 ? hidden * query : 0) +
         query * heads * spec.query_dim() + hidden * spec.head_dim +
         spec.kv_rank * heads * (spec.still_dim + spec.value_dim) +
         heads * spec.value_dim * hidden;
}

double Parameters(const ModelSpec& spec) {
  const double hidden = spec.hidden_size;
  double layers = 0;
  for (int layer = 0; layer < spec.layers; ++layer) {
    layers += AttentionParameters(spec, layer) + FeedForward(spec, layer);
  }
  const double positions =
      spec.names.positions.empty() ? 0 : hidden * spec.max_positions;
  const double told =
      (hidden + spec.told_vocab) * static_cast<double>(spec.told_numbers());
  return layers + positions + told +
         (spec.tied_head ? 1 : 2) * hidden * spec.vocab_size;
}

std::string KvHeads(const ModelSpec& spec) {
  const auto heads = [](int count, int dim) {
    return absl::StrCat(count, count == 1 ? " KV head" : " KV heads", " of ",
                        dim);
  };
  std::string text = heads(spec.kv_heads, spec.head_dim);
  if (spec.mixed_heads()) {
    absl::StrAppend(&text, " in layers with a window, ",
                    heads(spec.full_kv_heads, spec.full_head_dim),
                    " in others");
  }
  if (spec.shared_kv_layers > 0) {
    absl::StrAppend(&text, ", K and V in the first ", spec.kv_layers());
  }
  return text;
}

int64_t KvBytesPerToken(const ModelSpec& spec, DType type) {
  int64_t bytes = 0;
  for (int layer = 0; layer < spec.kv_layers(); ++layer) {
    const ModelSpec::KvHeads kv = spec.kv_heads_of(layer);
    bytes += int64_t{2} * kv.count * kernels::KvVectorBytes(type, kv.dim);
  }
  return bytes;
}

int64_t WeightBytes(const ModelSpec& spec, const Formats& formats,
                    int positions) {
  const engine::WorkShape shape = ShapeOf(spec, formats);
  const int expert_layers = shape.expert_layers + shape.drawn_expert_layers;
  int64_t bytes = shape.qkv_bytes + shape.after_attention_bytes +
                  shape.drawn_bytes +
                  int64_t{expert_layers} * shape.experts * shape.expert_bytes +
                  (spec.tied_head ? 1 : 2) * shape.head_bytes;
  if (!spec.names.positions.empty()) {
    bytes += int64_t{4} * spec.hidden_size * spec.max_positions;
  }
  bytes += engine::MatrixBytes(formats.weights, spec.told_vocab,
                               spec.told_numbers());
  // A cosine and a sine each, in f32.
  const auto tables = [&](const engine::RopeSpec& rope, int head_dim) {
    return rope.kind == engine::RopeSpec::Kind::kNone
               ? 0
               : static_cast<int64_t>(
                     8 * engine::RopeFrequencies(rope, head_dim).size()) *
                     positions;
  };
  bytes += tables(spec.rope, spec.full_dim());
  if (spec.window > 0) bytes += tables(spec.local_rope, spec.head_dim);
  return bytes;
}

engine::WorkShape ShapeOf(const ModelSpec& spec, const Formats& formats) {
  return engine::MakeWorkShape(spec, {.layers = formats.layers,
                                      .zero_bytes = formats.zero_bytes,
                                      .experts = formats.experts,
                                      .routers = formats.weights,
                                      .head = formats.head(),
                                      .kv = formats.kv});
}

namespace {

Work StepWork(const engine::WorkShape& shape, int64_t sequences, int64_t first,
              int64_t rows) {
  const engine::Work one = shape.EntryWork(first, rows, /*draws=*/1);
  Work work;
  for (int64_t i = 0; i < sequences; ++i) work += one;
  work.steps = 1;
  work.weight_bytes =
      static_cast<double>(shape.StepWeightBytes(sequences * rows, sequences));
  return work;
}

}  // namespace

Work StepWork(const ModelSpec& spec, const Formats& formats, int64_t sequences,
              int64_t first, int64_t rows) {
  return StepWork(ShapeOf(spec, formats), sequences, first, rows);
}

Work GenerationWork(const ModelSpec& spec, const Formats& formats,
                    Lengths lengths, bool cached) {
  const engine::WorkShape shape = ShapeOf(spec, formats);
  Work sum = StepWork(shape, 1, 0, lengths.prompt);
  for (int64_t step = 1; step < lengths.output; ++step) {
    const int64_t context = lengths.prompt + step;
    sum += cached ? StepWork(shape, 1, context - 1, 1)
                  : StepWork(shape, 1, 0, context);
  }
  return sum;
}

std::vector<std::vector<Cell>> StepGrid(Lengths lengths) {
  const auto prompt = static_cast<size_t>(lengths.prompt);
  const auto steps = static_cast<size_t>(lengths.output);
  std::vector<std::vector<Cell>> grid;
  for (size_t step = 0; step < steps; ++step) {
    const size_t known = step == 0 ? 0 : prompt + step - 1;
    std::vector<Cell>& row = grid.emplace_back();
    for (size_t position = 0; position < prompt + steps - 1; ++position) {
      row.push_back(position < known           ? Cell::kAgain
                    : position < prompt + step ? Cell::kComputed
                                               : Cell::kNone);
    }
  }
  return grid;
}

int CountCells(const std::vector<std::vector<Cell>>& grid, Cell kind) {
  int64_t count = 0;
  for (const auto& row : grid)
    count += std::count(row.begin(), row.end(), kind);
  return static_cast<int>(count);
}

}  // namespace tandem::explain
