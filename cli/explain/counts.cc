// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/counts.h"

#include <algorithm>
#include <cmath>

namespace tandem::explain {
namespace {

using engine::ModelSpec;
using kernels::DType;

double Sum(int64_t terms, int64_t first) {  // first + (first + 1) + ...
  const auto n = static_cast<double>(terms);
  return n * static_cast<double>(first) + n * (n - 1) / 2;
}

// Distinct positions that queries [first, first + rows) look at.
int64_t PositionsRead(int64_t first, int64_t rows, int64_t window) {
  const int64_t begin =
      window == 0 ? 0 : std::max<int64_t>(0, first + 1 - window);
  return first + rows - begin;
}

// Parameters of a feed-forward layer, or of one expert.
double FeedForward(const ModelSpec& spec) {
  return (spec.is_gated() ? 3.0 : 2.0) * spec.hidden_size *
         spec.intermediate_size;
}

double FeedForwardBytes(const ModelSpec& spec, DType type) {
  return MatrixBytes(type,
                     (spec.is_gated() ? 2.0 : 1.0) * spec.intermediate_size,
                     spec.hidden_size) +
         MatrixBytes(type, spec.hidden_size, spec.intermediate_size);
}

// Of an even draw of k of n experts for each row: those drawn at least once.
double ExpertsRead(const ModelSpec& spec, double rows) {
  const double missed =
      1 - static_cast<double>(spec.experts_per_token) / spec.experts;
  return spec.experts * (1 - std::pow(missed, rows));
}

// What follows attention in one layer, for `rows` rows.
void AddRowWise(const ModelSpec& spec, const Formats& formats, double rows,
                Work& work) {
  const double query = static_cast<double>(spec.heads) * spec.head_dim;
  work.weight_bytes += MatrixBytes(formats.layers, spec.hidden_size, query);
  work.matrix_flops += 2 * rows * spec.hidden_size * query;
  const double feed_forward = FeedForwardBytes(spec, formats.layers);
  if (spec.experts == 0) {
    work.weight_bytes += feed_forward;
    work.matrix_flops += 2 * rows * FeedForward(spec);
    return;
  }
  work.weight_bytes +=
      MatrixBytes(formats.weights, spec.experts, spec.hidden_size) +
      ExpertsRead(spec, rows) * feed_forward;
  work.matrix_flops += 2 * rows *
                       (static_cast<double>(spec.experts) * spec.hidden_size +
                        spec.experts_per_token * FeedForward(spec));
}

void AddAttention(const ModelSpec& spec, const Formats& formats,
                  double sequences, int64_t first, int64_t rows, int64_t window,
                  Work& work) {
  const double vector = 2.0 * static_cast<double>(kernels::KvVectorBytes(
                                  formats.kv, spec.head_dim));
  const double kv_rows = sequences * static_cast<double>(rows) * spec.kv_heads;
  const double pairs =
      sequences * spec.heads * QueryKeyPairs(first, rows, window);
  const int64_t context = first + rows;
  work.kv_rows += kv_rows;
  work.kv_bytes_written += kv_rows * vector;
  work.kv_bytes_read += sequences * spec.kv_heads * vector *
                        static_cast<double>(PositionsRead(first, rows, window));
  work.positions_attended +=
      sequences * spec.heads *
      static_cast<double>(window == 0 ? context : std::min(context, window));
  work.query_key_pairs += pairs;
  // q k and p v: a multiplication and an addition per element each.
  work.attention_flops += 4 * pairs * spec.head_dim;
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

double QueryKeyPairs(int64_t first, int64_t rows, int64_t window) {
  if (window == 0) return Sum(rows, first + 1);
  // Queries before position window - 1 see less than a window.
  const int64_t growing = std::clamp<int64_t>(window - 1 - first, 0, rows);
  return Sum(growing, first + 1) +
         static_cast<double>(rows - growing) * static_cast<double>(window);
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
  const bool codes = layers == DType::kInt8 || layers == DType::kInt4;
  return codes && !from_checkpoint ? DType::kInt8 : weights;
}

double MatrixBytes(DType type, double rows, double cols) {
  const double elements = rows * cols;
  switch (type) {
    case DType::kFp8:
      return elements + 4 * rows;  // an f32 scale each row
    case DType::kInt8:             // an f16 scale each group
      return elements * (1 + 2.0 / kernels::kCodeGroup);
    case DType::kInt4:
      return elements * (0.5 + 2.0 / kernels::kCodeGroup);
    default:
      return elements * static_cast<double>(kernels::SizeOf(type));
  }
}

double Parameters(const ModelSpec& spec) {
  const double hidden = spec.hidden_size;
  const double feed_forward = spec.experts == 0
                                  ? FeedForward(spec)
                                  : spec.experts * (hidden + FeedForward(spec));
  const double layer =
      hidden *
          (spec.qkv_rows() + static_cast<double>(spec.heads) * spec.head_dim) +
      feed_forward;
  const double positions =
      spec.names.positions.empty() ? 0 : hidden * spec.max_positions;
  return spec.layers * layer + positions +
         (spec.tied_head ? 1 : 2) * hidden * spec.vocab_size;
}

int64_t KvBytesPerToken(const ModelSpec& spec, DType type) {
  return int64_t{2} * spec.layers * spec.kv_heads *
         kernels::KvVectorBytes(type, spec.head_dim);
}

Work& Work::operator+=(const Work& other) {
  kv_rows += other.kv_rows;
  positions_attended += other.positions_attended;
  query_key_pairs += other.query_key_pairs;
  weight_bytes += other.weight_bytes;
  kv_bytes_read += other.kv_bytes_read;
  kv_bytes_written += other.kv_bytes_written;
  matrix_flops += other.matrix_flops;
  attention_flops += other.attention_flops;
  return *this;
}

Work StepWork(const ModelSpec& spec, const Formats& formats, int64_t sequences,
              int64_t first, int64_t rows) {
  const auto drawn = static_cast<double>(sequences);
  const double all = drawn * static_cast<double>(rows);
  Work work;
  for (int layer = 0; layer < spec.layers; ++layer) {
    work.weight_bytes +=
        MatrixBytes(formats.layers, spec.qkv_rows(), spec.hidden_size);
    work.matrix_flops += 2 * all * spec.qkv_rows() * spec.hidden_size;
    AddAttention(spec, formats, drawn, first, rows,
                 spec.is_windowed(layer) ? spec.window : 0, work);
    AddRowWise(spec, formats, layer + 1 < spec.layers ? all : drawn, work);
  }
  work.weight_bytes +=
      MatrixBytes(formats.head(), spec.vocab_size, spec.hidden_size);
  work.matrix_flops += 2 * drawn * spec.vocab_size * spec.hidden_size;
  return work;
}

Work GenerationWork(const ModelSpec& spec, const Formats& formats,
                    Lengths lengths, bool cached) {
  Work sum = StepWork(spec, formats, 1, 0, lengths.prompt);
  for (int64_t step = 1; step < lengths.output; ++step) {
    const int64_t context = lengths.prompt + step;
    sum += cached ? StepWork(spec, formats, 1, context - 1, 1)
                  : StepWork(spec, formats, 1, 0, context);
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
