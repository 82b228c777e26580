// SPDX-License-Identifier: Apache-2.0
#include "worker/load_adapters.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/failpoint.h"
#include "common/lifecycle.h"
#include "common/log.h"

namespace tandem::worker {
namespace {

absl::StatusOr<int> SlotsFor(const AdapterFlags& flags) {
  const size_t modules = flags.modules.size();
  if (modules > kMaxAdapters) {
    return UsageError(absl::StrCat("--lora-modules names ", modules,
                                   " adapters, at most ", kMaxAdapters,
                                   " are served"));
  }
  if (flags.max_loras == 0) return static_cast<int>(modules);
  if (static_cast<size_t>(flags.max_loras) < modules) {
    return UsageError(absl::StrCat("--max-loras is ", flags.max_loras,
                                   ", and --lora-modules names ", modules,
                                   " adapters: raise it, or name fewer"));
  }
  return flags.max_loras;
}

}  // namespace

absl::StatusOr<LoadedAdapters> LoadAdapters(const AdapterFlags& flags,
                                            const std::string& model_name,
                                            const engine::ModelSpec& spec,
                                            kernels::Backend* backend) {
  LoadedAdapters loaded;
  const absl::StatusOr<int> slots = SlotsFor(flags);
  if (!slots.ok()) return slots.status();
  if (*slots == 0) return loaded;
  loaded.table = AdapterTable(*slots);
  absl::StatusOr<std::unique_ptr<engine::LoraSlots>> made =
      engine::LoraSlots::Create(spec, *slots, flags.max_rank, backend);
  if (!made.ok()) return made.status();
  loaded.slots = *std::move(made);
  const std::unique_ptr<kernels::Queue> queue = backend->NewQueue("adapters");
  for (const std::string& module : flags.modules) {
    const size_t equals = module.find('=');
    if (equals == module.npos) {
      return UsageError(absl::StrCat("--lora-modules is '", module,
                                     "', expected NAME=DIRECTORY"));
    }
    if (module.substr(0, equals) == model_name) {
      return UsageError(
          absl::StrCat("--lora-modules: '", model_name,
                       "' is the model's own name; requests could not ask for "
                       "both"));
    }
    const absl::StatusOr<engine::LoraAdapter> adapter = engine::ReadLoraAdapter(
        module.substr(equals + 1), spec, loaded.slots->layout());
    if (!adapter.ok()) return adapter.status();
    v1::AdapterRef ref;
    ref.set_name(module.substr(0, equals));
    ref.set_path(module.substr(equals + 1));
    ref.set_digest(adapter->digest);
    const absl::StatusOr<int> slot = loaded.table.Take();
    if (!slot.ok()) return slot.status();
    const absl::Status added = loaded.table.Add(ref, *slot);
    if (!added.ok()) return added;
    loaded.slots->Put(*slot, *adapter, *queue);
    queue->Synchronize();
    LogInfo("loaded an adapter", {{"adapter", ref.name()},
                                  {"digest", adapter->digest.substr(0, 16)}});
  }
  return loaded;
}

DeviceAdapters::DeviceAdapters(const engine::ModelSpec& spec,
                               const engine::LoraSlots& slots,
                               engine::DeviceExecutor* executor, Loop* loop)
    : executor_(executor),
      reader_(new Reader{.spec = spec, .layout = slots.layout(), .loop = loop}),
      thread_(std::make_unique<ThreadLoop>("adapters")) {}

DeviceAdapters::~DeviceAdapters() {
  const auto until = std::chrono::steady_clock::now() + kReadGrace;
  MutexLock lock(&reader_->mutex);
  reader_->loop = nullptr;
  while (reader_->reads > 0) {
    const auto left = until - std::chrono::steady_clock::now();
    if (left <= left.zero()) break;
    reader_->idle.WaitFor(&reader_->mutex, left);
  }
  if (reader_->reads == 0) return;
  LogWarning("an adapter is still being read: not waiting for it", {});
  (void)thread_.release();
}

void DeviceAdapters::Read(
    const std::string& path,
    absl::AnyInvocable<void(absl::StatusOr<std::string>)> done) {
  {
    MutexLock lock(&reader_->mutex);
    ++reader_->reads;
  }
  thread_->Post(
      [this, path, reader = reader_, done = std::move(done)]() mutable {
        TANDEM_FAILPOINT("load.adapter_read", "stall");
        absl::StatusOr<engine::LoraAdapter> adapter =
            engine::ReadLoraAdapter(path, reader->spec, reader->layout);
        MutexLock lock(&reader->mutex);
        --reader->reads;
        reader->idle.NotifyOne();
        if (reader->loop == nullptr) return;
        reader->loop->Post([this, adapter = std::move(adapter),
                            done = std::move(done)]() mutable {
          if (!adapter.ok()) return done(std::move(adapter).status());
          read_ = std::make_unique<engine::LoraAdapter>(*std::move(adapter));
          done(read_->digest);
        });
      });
}

void DeviceAdapters::Put(int slot, absl::AnyInvocable<void()> done) {
  executor_->PutAdapter(slot, *read_, std::move(done));
}

}  // namespace tandem::worker
