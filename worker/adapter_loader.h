// SPDX-License-Identifier: Apache-2.0
// Loads and unloads a worker's LoRA adapters while it serves. Commands run one
// at a time, in their order: files are read and checked off the loop, what they
// hold is put on the device between two steps, and only then has the slot a
// name. An unloaded one's slot is free when the last call that uses it has
// ended; later commands do not wait for that.

#ifndef TANDEM_WORKER_ADAPTER_LOADER_H_
#define TANDEM_WORKER_ADAPTER_LOADER_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "tandem/v1/registry.pb.h"
#include "worker/adapters.h"

namespace tandem::worker {

// Where adapters are read into and put from, one at a time. Called on the
// loop, and calls back there.
class AdapterMemory {
 public:
  virtual ~AdapterMemory() = default;
  // Reads and checks what lies in a directory, and keeps it. The digest of its
  // content, or what is wrong.
  virtual void Read(
      const std::string& path,
      absl::AnyInvocable<void(absl::StatusOr<std::string>)> done) = 0;
  // Puts what was read last into a slot, behind all steps so far.
  virtual void Put(int slot, absl::AnyInvocable<void()> done) = 0;
  // What was read last is no longer needed.
  virtual void Forget() = 0;
};

class AdapterLoader {
 public:
  using Done = absl::AnyInvocable<void(v1::AdapterOutcome)>;

  // `memory` is null where there are no slots. `on_change`: the table's list
  // is another one now. All outlive the loader.
  AdapterLoader(AdapterTable* table, AdapterMemory* memory,
                std::function<void()> on_change);
  ~AdapterLoader() { Stop(); }
  AdapterLoader(const AdapterLoader&) = delete;
  AdapterLoader& operator=(const AdapterLoader&) = delete;

  // A router's commands; `done` hears each one's outcome.
  void Load(v1::LoadAdapter command, Done done);
  void Unload(v1::UnloadAdapter command, Done done);

  // Nobody hears of anything from here on.
  void Stop();

  static constexpr size_t kMaxCommands = 256;  // that wait
  static constexpr size_t kMaxPathBytes = 4096;

 private:
  struct Order {
    v1::LoadAdapter load;  // no name: an unload
    v1::UnloadAdapter unload;
    Done done;
  };

  void Add(Order order, uint64_t command);
  void Next();
  absl::Status CheckLoad(const v1::LoadAdapter& command) const;
  void OnRead(const absl::StatusOr<std::string>& digest);
  void OnPut(int slot, const std::string& digest);
  void Finish(const absl::StatusOr<v1::AdapterOutcome>& outcome);
  void StartUnload(Order order);

  AdapterTable* const table_;
  AdapterMemory* const memory_;
  std::function<void()> on_change_;
  std::deque<Order> orders_;  // the first of them under way if busy_
  bool busy_ = false;
  bool stopped_ = false;
  // By slot: those that wait for calls to end.
  std::map<int, std::pair<v1::AdapterOutcome, Done>> leaving_;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_ADAPTER_LOADER_H_
