// SPDX-License-Identifier: Apache-2.0
// How much work a generation is, counted and not measured. A request has p
// prompt tokens and g tokens of output, and takes g steps, each of which draws
// one token. Step i needs K and V of p + i positions:
//
//   with a cache     the first step computes p of them, each later one only
//                    that of the token before, and reads the rest;
//   without a cache  every step computes all p + i of them again.
//
// The first functions count one layer and one head. Work multiplies by the
// layers and heads of a model and adds bytes and operations, following
// engine/forward.h: all rows go through all layers, but behind the last
// layer's attention only those that a token is drawn from. Left out is what is
// below a thousandth: norms, biases, activations, the rows of the embedding.
//
// Counts are doubles: exact up to 2^53, and of any length.

#ifndef TANDEM_CLI_EXPLAIN_COUNTS_H_
#define TANDEM_CLI_EXPLAIN_COUNTS_H_

#include <array>
#include <cstdint>
#include <vector>

#include "engine/model_config.h"
#include "kernels/types.h"

namespace tandem::explain {

struct Lengths {
  int64_t prompt = 0;  // p, at least 1
  int64_t output = 0;  // g, at least 1
};

// Those that the literature quotes: 41.5, 171, 416 and 833 times the work.
inline constexpr std::array<Lengths, 4> kQuotedLengths = {
    {{100, 50}, {500, 200}, {1000, 500}, {2000, 1000}}};

// K/V rows computed for one layer and head.
double KvRowsWithoutCache(Lengths lengths);  // g p + g (g - 1) / 2
// p + g, as quoted; a loop does not feed the last token back: p + g - 1.
double KvRowsWithCache(Lengths lengths);
double KvRowsInLoop(Lengths lengths);

// Positions that the newest token of each step looks at, itself included:
// g p + g (g - 1) / 2, with a cache and without.
double PositionsAttended(Lengths lengths);

// Causal query-key pairs of queries [first, first + rows), each of which sees
// itself and what is before it, `window` positions at most (0: all).
double QueryKeyPairs(int64_t first, int64_t rows, int64_t window = 0);

// K/V rows computed, one layer and head, after each of the g steps.
std::vector<double> CumulativeKvRows(Lengths lengths, bool cached);

// How a model is kept in memory.
struct Formats {
  kernels::DType weights = kernels::DType::kBF16;  // as loaded
  // kFp8, kInt8 or kInt4 where the layers' matrices are quantised.
  kernels::DType layers = kernels::DType::kBF16;
  kernels::DType kv = kernels::DType::kBF16;

  bool from_checkpoint = false;  // which holds codes for the layers
  // The head's: kInt8 beside kInt8 and kInt4, else as the weights; a checkpoint
  // that was quantised before leaves it alone.
  kernels::DType head() const;
};

// Scales included; cols are inputs.
double MatrixBytes(kernels::DType type, double rows, double cols);

// Matrices, with all experts; a tied head counts once.
double Parameters(const engine::ModelSpec& spec);

// Formats that a KV cache may have.
inline constexpr std::array<kernels::DType, 5> kKvFormats = {
    kernels::DType::kF32, kernels::DType::kBF16, kernels::DType::kF16,
    kernels::DType::kFp8, kernels::DType::kInt8};

// All layers, K and V, scales included.
int64_t KvBytesPerToken(const engine::ModelSpec& spec, kernels::DType type);

// Of a whole model: times layers, and times KV heads or heads.
struct Work {
  double kv_rows = 0;  // computed; each is a K and a V of head_dim elements
  double positions_attended = 0;  // by rows that a token is drawn from
  double query_key_pairs = 0;
  double weight_bytes = 0;      // read: each matrix once a step
  double kv_bytes_read = 0;     // each position once a step and sequence
  double kv_bytes_written = 0;  // not in any other figure
  double matrix_flops = 0;
  double attention_flops = 0;

  double bytes_read() const { return weight_bytes + kv_bytes_read; }
  double flops() const { return matrix_flops + attention_flops; }
  // FLOPs per byte read.
  double intensity() const { return flops() / bytes_read(); }
  Work& operator+=(const Work& other);
};

// One step of `sequences`, each of which computes positions [first, first +
// rows) and draws a token from the last. Experts are taken to be chosen evenly
// and independently of one another.
Work StepWork(const engine::ModelSpec& spec, const Formats& formats,
              int64_t sequences, int64_t first, int64_t rows);

// All g steps of one request.
Work GenerationWork(const engine::ModelSpec& spec, const Formats& formats,
                    Lengths lengths, bool cached);

// Steps by positions: what became of each K/V row of one layer and head.
enum class Cell : uint8_t {
  kNone,      // the position does not exist yet
  kComputed,  // for the first time
  kAgain,     // read from the cache or, without one, computed once more
};

// [step][position], each row as long as the last.
std::vector<std::vector<Cell>> StepGrid(Lengths lengths);
int CountCells(const std::vector<std::vector<Cell>>& grid, Cell kind);

}  // namespace tandem::explain

#endif  // TANDEM_CLI_EXPLAIN_COUNTS_H_
