// SPDX-License-Identifier: Apache-2.0
// From the flags of adapters to what is on the device, and what a router asks
// for later.

#ifndef TANDEM_WORKER_LOAD_ADAPTERS_H_
#define TANDEM_WORKER_LOAD_ADAPTERS_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "common/loop.h"
#include "common/mutex.h"
#include "common/thread_loop.h"
#include "engine/checkpoint/model_config.h"
#include "engine/device/device_executor.h"
#include "engine/model/lora.h"
#include "engine/model/lora_slots.h"
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

// Before anything is read: a usage error where the flags by themselves, or with
// the model's name, cannot be meant.
absl::Status CheckAdapters(const AdapterFlags& flags,
                           const std::string& model_name);

// What all their slots take.
int64_t AdapterBytes(const AdapterFlags& flags, const engine::ModelSpec& spec);
// What slots take into which nothing has been put yet.
int64_t UntouchedBytes(const LoadedAdapters& adapters);

// Reads the modules and puts them on the device, which keeps room for
// `max_loras` with `max_rank` each. Errors name the file. REQUIRES:
// CheckAdapters found nothing.
absl::StatusOr<LoadedAdapters> LoadAdapters(const AdapterFlags& flags,
                                            const engine::ModelSpec& spec,
                                            kernels::Backend* backend);

// Reads adapters on a thread of its own, and has the executor put them into
// their slots.
class DeviceAdapters final : public AdapterMemory {
 public:
  // The executor and the loop outlive it, and nothing is called on the loop
  // behind its end.
  DeviceAdapters(const engine::ModelSpec& spec, const engine::LoraSlots& slots,
                 engine::DeviceExecutor* executor, Loop* loop);
  // Destroyed when the loop has stopped and the device has done all that it was
  // asked for. A read that hangs (a file server that is away) is waited for no
  // longer than kReadGrace: its thread ends with the process.
  ~DeviceAdapters() override;

  static constexpr std::chrono::seconds kReadGrace{1};

  void Read(
      const std::string& path,
      absl::AnyInvocable<void(absl::StatusOr<std::string>)> done) override;
  void Put(int slot, absl::AnyInvocable<void()> done) override;
  void Forget() override { read_.reset(); }

 private:
  // What a read uses, which may outlive all others.
  struct Reader {
    engine::ModelSpec spec;
    engine::LoraLayout layout;
    Mutex mutex{};
    CondVar idle{};
    Loop* loop ABSL_GUARDED_BY(mutex);  // null: nobody waits for it any more
    int reads ABSL_GUARDED_BY(mutex) = 0;
  };

  engine::DeviceExecutor* const executor_;
  std::unique_ptr<engine::LoraAdapter> read_;
  const std::shared_ptr<Reader> reader_;
  std::unique_ptr<ThreadLoop> thread_;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_LOAD_ADAPTERS_H_
