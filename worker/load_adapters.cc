// SPDX-License-Identifier: Apache-2.0
#include "worker/load_adapters.h"

#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/failpoint.h"
#include "common/lifecycle.h"
#include "common/log.h"

namespace tandem::worker {
namespace {

int SlotsFor(const AdapterFlags& flags) {
  return flags.max_loras > 0 ? flags.max_loras
                             : static_cast<int>(flags.modules.size());
}

// Of one module. REQUIRES: it has a '='.
std::pair<std::string, std::string> NameAndDirectory(
    const std::string& module) {
  const size_t equals = module.find('=');
  return {module.substr(0, equals), module.substr(equals + 1)};
}

absl::Status CheckCount(const AdapterFlags& flags) {
  const size_t modules = flags.modules.size();
  if (modules > kMaxAdapters) {
    return UsageError(absl::StrCat("--lora-modules names ", modules,
                                   " adapters, at most ", kMaxAdapters,
                                   " are served"));
  }
  if (flags.max_loras > 0 && static_cast<size_t>(flags.max_loras) < modules) {
    return UsageError(absl::StrCat("--max-loras is ", flags.max_loras,
                                   ", and --lora-modules names ", modules,
                                   " adapters: raise it, or name fewer"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckAdapters(const AdapterFlags& flags,
                           const std::string& model_name) {
  const absl::Status count = CheckCount(flags);
  if (!count.ok()) return count;
  std::set<std::string> names;
  for (const std::string& module : flags.modules) {
    const size_t equals = module.find('=');
    if (equals == module.npos || equals + 1 == module.size()) {
      return UsageError(absl::StrCat("--lora-modules is '", module,
                                     "', expected NAME=DIRECTORY"));
    }
    const std::string name = NameAndDirectory(module).first;
    const absl::Status good = AdapterTable::CheckName(name);
    if (!good.ok()) {
      return UsageError(absl::StrCat("--lora-modules: ", good.message()));
    }
    if (name == model_name) {
      return UsageError(
          absl::StrCat("--lora-modules: '", name,
                       "' is the model's own name; requests could not ask for "
                       "both"));
    }
    if (!names.insert(name).second) {
      return UsageError(absl::StrCat(
          "--lora-modules names '", name,
          "' twice; requests could not ask for both: rename one of them"));
    }
  }
  return absl::OkStatus();
}

int64_t AdapterBytes(const AdapterFlags& flags, const engine::ModelSpec& spec) {
  return SlotsFor(flags) *
         engine::LoraSlots::SlotBytes(engine::LoraLayout(spec, flags.max_rank));
}

int64_t UntouchedBytes(const LoadedAdapters& adapters) {
  if (adapters.slots == nullptr) return 0;
  return adapters.table.counts().free *
         engine::LoraSlots::SlotBytes(adapters.slots->layout());
}

absl::StatusOr<LoadedAdapters> LoadAdapters(const AdapterFlags& flags,
                                            const engine::ModelSpec& spec,
                                            kernels::Backend* backend) {
  LoadedAdapters loaded;
  const int slots = SlotsFor(flags);
  if (slots == 0) return loaded;
  loaded.table = AdapterTable(slots);
  absl::StatusOr<std::unique_ptr<engine::LoraSlots>> made =
      engine::LoraSlots::Create(spec, slots, flags.max_rank, backend);
  if (!made.ok()) return made.status();
  loaded.slots = *std::move(made);
  const std::unique_ptr<kernels::Queue> queue = backend->NewQueue("adapters");
  for (const std::string& module : flags.modules) {
    const auto [name, directory] = NameAndDirectory(module);
    const absl::StatusOr<engine::LoraAdapter> adapter =
        engine::ReadLoraAdapter(directory, spec, loaded.slots->layout());
    if (!adapter.ok()) return adapter.status();
    v1::AdapterRef ref;
    ref.set_name(name);
    ref.set_path(directory);
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
