// SPDX-License-Identifier: Apache-2.0
// How a config's layers differ: which of them see a window alone, which turn,
// and which have heads of their own.

#ifndef TANDEM_ENGINE_CHECKPOINT_LAYERS_CONFIG_H_
#define TANDEM_ENGINE_CHECKPOINT_LAYERS_CONFIG_H_

#include "engine/checkpoint/config_fields.h"
#include "engine/checkpoint/families.h"
#include "engine/checkpoint/model_config.h"

namespace tandem::engine {

// Fills the spec's windows, layers that do not turn, and heads of layers that
// see all; errors go to `fields`. REQUIRES: the spec has its shapes.
void ReadLayers(ConfigFields& fields, const Family& family, ModelSpec& spec);

bool HasWindows(const ModelSpec& spec);

// A window of the whole context is none, unless its layers turn in another
// way. REQUIRES: max_positions has what a scaling makes.
void DropIdleWindow(const Family& family, ModelSpec& spec);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_CHECKPOINT_LAYERS_CONFIG_H_
