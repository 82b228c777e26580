// SPDX-License-Identifier: Apache-2.0
// What a config says of what follows attention: how wide it is, and of experts
// which layers have some, how rows choose, and what all rows take beside them.

#ifndef TANDEM_ENGINE_CHECKPOINT_EXPERTS_CONFIG_H_
#define TANDEM_ENGINE_CHECKPOINT_EXPERTS_CONFIG_H_

#include "engine/checkpoint/config_fields.h"
#include "engine/checkpoint/families.h"
#include "engine/checkpoint/model_config.h"

namespace tandem::engine {

// Fills the spec's sizes, routes, layers without experts and draft layers;
// errors go to `fields`. REQUIRES: the spec has its names, layers and hidden
// size. No width is above `max_width`.
void ReadFeedForward(ConfigFields& fields, const Family& family, int max_width,
                     ModelSpec* spec);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_CHECKPOINT_EXPERTS_CONFIG_H_
