// SPDX-License-Identifier: Apache-2.0
// Tensors of a checkpoint that a model did not take: those that say nothing
// new, and those for which its files and its config are of two models.

#ifndef TANDEM_ENGINE_MODEL_LEFTOVERS_H_
#define TANDEM_ENGINE_MODEL_LEFTOVERS_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "engine/checkpoint/model_config.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/model/weight_packer.h"

namespace tandem::engine {

// A tensor of what a checkpoint has to guess several tokens at once, behind its
// layers or apart from them. It is not read.
bool IsOfDrafts(const ModelSpec& spec, std::string_view name);

// INVALID_ARGUMENT names the first tensor that `packer` did not take and that
// has no place in the model; or a head that differs from the embedding, to
// which it should be tied. `embedding`, `head`: what theirs are called.
absl::Status RefuseLeftovers(const ModelSpec& spec,
                             const Checkpoint& checkpoint,
                             const WeightPacker& packer,
                             const std::string& embedding,
                             const std::string& head);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_LEFTOVERS_H_
