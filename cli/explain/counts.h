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
// layers and heads of a model and adds bytes and operations, by the definition
// that workers count with (engine/work.h).
//
// Counts are doubles: exact up to 2^53, and of any length.

#ifndef TANDEM_CLI_EXPLAIN_COUNTS_H_
#define TANDEM_CLI_EXPLAIN_COUNTS_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/checkpoint/model_config.h"
#include "engine/work.h"
#include "kernels/types.h"

namespace tandem::explain {

struct Lengths {
  int64_t prompt = 0;  // p, at least 1
  int64_t output = 0;  // g, at least 1

  bool operator==(const Lengths&) const = default;
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

// K/V rows computed, one layer and head, after each of the g steps.
std::vector<double> CumulativeKvRows(Lengths lengths, bool cached);

// How a model is kept in memory.
struct Formats {
  kernels::DType weights = kernels::DType::kBF16;  // as loaded
  // kFp8, kInt8, kInt4 or kW8A8 where the layers' matrices are quantised.
  kernels::DType layers = kernels::DType::kBF16;
  std::optional<kernels::DType> experts = std::nullopt;  // unset: as layers
  kernels::DType kv = kernels::DType::kBF16;

  bool from_checkpoint = false;  // which holds codes for the layers
  int zero_bytes = 0;            // of theirs in kInt4, beside each scale
  // The head's: kInt8 beside layers that have integer products, else as the
  // weights; a checkpoint that was quantised before leaves it alone.
  kernels::DType head() const;
};

// What a quantised checkpoint's matrices are, on a GPU or a CPU; of others
// `formats` as they are.
Formats FormatsOf(const engine::ModelSpec& spec, Formats formats,
                  bool gpu = false);

// Matrices, with all experts; a tied head counts once.
double Parameters(const engine::ModelSpec& spec);

// In memory, with all experts, learned positions and rotary tables for so many
// positions; left out are norms and biases, below a thousandth.
int64_t WeightBytes(const engine::ModelSpec& spec, const Formats& formats,
                    int positions);

// Formats that a KV cache may have.
inline constexpr std::array<kernels::DType, 6> kKvFormats = {
    kernels::DType::kF32, kernels::DType::kBF16, kernels::DType::kF16,
    kernels::DType::kFp8, kernels::DType::kInt8, kernels::DType::kInt4};

// For people: "8 KV heads of 128", and others where layers differ.
std::string KvHeads(const engine::ModelSpec& spec);

// All layers, K and V, scales included.
int64_t KvBytesPerToken(const engine::ModelSpec& spec, kernels::DType type);

// Of a whole model. Doubles: a long generation without a cache outgrows 2^63.
using Work = engine::WorkOf<double>;

// The shape that workers count by, of a model as it would be loaded.
engine::WorkShape ShapeOf(const engine::ModelSpec& spec,
                          const Formats& formats);

// One step of `sequences`, each of which computes positions [first, first +
// rows) and draws a token from the last.
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
