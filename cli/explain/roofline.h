// SPDX-License-Identifier: Apache-2.0
// Why prefill is bound by arithmetic and decode by memory: a step's FLOPs per
// byte read beside those of the machine (its ridge, as in Williams, Waterman
// and Patterson, "Roofline", 2009), and the time that follows.

#ifndef TANDEM_CLI_EXPLAIN_ROOFLINE_H_
#define TANDEM_CLI_EXPLAIN_ROOFLINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cli/explain/counts.h"

namespace tandem::explain {

struct Machine {
  int threads = 0;
  double flops_per_second = 0;  // f32 FMA peak, what attention runs on
  // What matrices run on: integer dots where their products are.
  double matrix_flops_per_second = 0;
  double bytes_per_second = 0;  // reads of a set of `read_bytes`
  double read_bytes = 0;

  double ridge() const { return matrix_flops_per_second / bytes_per_second; }
};

struct Phase {
  std::string name;     // "decode, batch 8"
  double tokens = 0;    // computed by the step
  int64_t batch = 0;    // 0: a prefill
  int64_t context = 0;  // positions behind the step's end
  Work work;            // of the step
};

// A prefill of the whole prompt; decode steps of 1, 8 and 32 sequences at the
// context that the output has in its middle.
std::vector<Phase> Phases(const engine::ModelSpec& spec, const Formats& formats,
                          Lengths lengths);

bool IsComputeBound(const Work& work, const Machine& machine);

// Matrices and attention follow one another: for each the longer of bytes /
// bandwidth and operations / peak.
double PredictSeconds(const Work& work, const Machine& machine);

}  // namespace tandem::explain

#endif  // TANDEM_CLI_EXPLAIN_ROOFLINE_H_
