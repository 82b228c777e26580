// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/roofline.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace tandem::explain {

std::vector<Phase> Phases(const engine::ModelSpec& spec, const Formats& formats,
                          Lengths lengths) {
  std::vector<Phase> phases;
  phases.push_back({.name = absl::StrCat("prefill of ", lengths.prompt),
                    .tokens = static_cast<double>(lengths.prompt),
                    .context = lengths.prompt,
                    .work = StepWork(spec, formats, 1, 0, lengths.prompt)});
  const int64_t context = lengths.prompt + lengths.output / 2;
  for (const int64_t batch : {1, 8, 32}) {
    phases.push_back({.name = absl::StrCat("decode, batch ", batch),
                      .tokens = static_cast<double>(batch),
                      .batch = batch,
                      .context = context,
                      .work = StepWork(spec, formats, batch, context - 1, 1)});
  }
  return phases;
}

bool IsComputeBound(const Work& work, const Machine& machine) {
  return work.intensity() > machine.ridge();
}

double PredictSeconds(const Work& work, const Machine& machine) {
  return std::max(work.matrix_flops / machine.matrix_flops_per_second,
                  work.weight_bytes / machine.bytes_per_second) +
         std::max(work.attention_flops / machine.flops_per_second,
                  work.kv_bytes_read / machine.bytes_per_second);
}

}  // namespace tandem::explain
