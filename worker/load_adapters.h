// SPDX-License-Identifier: Apache-2.0
// From the flags of adapters to what is on the device, and what a router asks
// for later.

#ifndef TANDEM_WORKER_LOAD_ADAPTERS_H_
#define TANDEM_WORKER_LOAD_ADAPTERS_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/loop.h"
#include "common/thread_loop.h"
#include "engine/device_executor.h"
#include "engine/lora_slots.h"
#include "engine/model_config.h"
#include "kernels/backend.h"
#include "worker/adapter_loader.h"
#include "worker/adapters.h"

namespace tandem::worker {

struct AdapterFlags {
  std::vector<std::string> modules;  // NAME=DIRECTORY each
  int max_loras = 0;                 // slots; 0: one for each module
  int max_rank = 16;                 // that each slot has room for
};

struct LoadedAdapters {
  std::unique_ptr<engine::LoraSlots> slots;  // null: there are none
  AdapterTable table;
};

// Reads the modules and puts them on the device, which keeps room for
// `max_loras` with `max_rank` each. Errors name the flag or the file.
absl::StatusOr<LoadedAdapters> LoadAdapters(const AdapterFlags& flags,
                                            const engine::ModelSpec& spec,
                                            kernels::Backend* backend);

// Reads adapters on a thread of its own, and has the executor put them into
// their slots.
class DeviceAdapters final : public AdapterMemory {
 public:
  // All outlive it. Destroyed when the loop has stopped and the device has
  // done all that it was asked for.
  DeviceAdapters(const engine::ModelSpec* spec, const engine::LoraSlots* slots,
                 engine::DeviceExecutor* executor, Loop* loop)
      : spec_(spec),
        slots_(slots),
        executor_(executor),
        loop_(loop),
        reader_("adapters") {}

  void Read(
      const std::string& path,
      absl::AnyInvocable<void(absl::StatusOr<std::string>)> done) override;
  void Put(int slot, absl::AnyInvocable<void()> done) override;
  void Forget() override { read_.reset(); }

 private:
  const engine::ModelSpec* const spec_;
  const engine::LoraSlots* const slots_;
  engine::DeviceExecutor* const executor_;
  Loop* const loop_;
  std::unique_ptr<engine::LoraAdapter> read_;
  ThreadLoop reader_;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_LOAD_ADAPTERS_H_
