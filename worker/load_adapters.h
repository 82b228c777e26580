// SPDX-License-Identifier: Apache-2.0
// From the flags of adapters to what is on the device.

#ifndef TANDEM_WORKER_LOAD_ADAPTERS_H_
#define TANDEM_WORKER_LOAD_ADAPTERS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/lora_slots.h"
#include "engine/model_config.h"
#include "kernels/backend.h"
#include "worker/adapters.h"

namespace tandem::worker {

struct LoadedAdapters {
  std::unique_ptr<engine::LoraSlots> slots;  // null: there are none
  AdapterTable table;
};

// Reads `modules`, NAME=DIRECTORY each, and puts them on the device, which
// keeps room for `max_rank` in each. Errors name the flag or the file.
absl::StatusOr<LoadedAdapters> LoadAdapters(
    const std::vector<std::string>& modules, int max_rank,
    const engine::ModelSpec& spec, kernels::Backend* backend);

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_LOAD_ADAPTERS_H_
