// SPDX-License-Identifier: Apache-2.0
#include "worker/load_adapters.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "engine/lora.h"

namespace tandem::worker {

absl::StatusOr<LoadedAdapters> LoadAdapters(
    const std::vector<std::string>& modules, int max_rank,
    const engine::ModelSpec& spec, kernels::Backend* backend) {
  LoadedAdapters loaded;
  if (modules.empty()) return loaded;
  if (modules.size() > kMaxAdapters) {
    return absl::InvalidArgumentError(
        absl::StrCat("--lora-modules names ", modules.size(),
                     " adapters, at most ", kMaxAdapters, " are served"));
  }
  absl::StatusOr<std::unique_ptr<engine::LoraSlots>> made =
      engine::LoraSlots::Create(spec, static_cast<int>(modules.size()),
                                max_rank, backend);
  if (!made.ok()) return made.status();
  loaded.slots = *std::move(made);
  const std::unique_ptr<kernels::Queue> queue = backend->NewQueue("adapters");
  for (const std::string& module : modules) {
    const size_t equals = module.find('=');
    if (equals == module.npos) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--lora-modules is '", module, "', expected NAME=DIRECTORY"));
    }
    const absl::StatusOr<engine::LoraAdapter> adapter = engine::ReadLoraAdapter(
        module.substr(equals + 1), spec, loaded.slots->layout());
    if (!adapter.ok()) return adapter.status();
    const int slot = loaded.table.size();
    const std::string name = module.substr(0, equals);
    const absl::Status added = loaded.table.Add(name, adapter->digest);
    if (!added.ok()) return added;
    loaded.slots->Put(slot, *adapter, *queue);
    queue->Synchronize();
    LogInfo("loaded an adapter",
            {{"adapter", name}, {"digest", adapter->digest.substr(0, 16)}});
  }
  return loaded;
}

}  // namespace tandem::worker
