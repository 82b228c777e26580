// SPDX-License-Identifier: Apache-2.0
// The LoRA adapters that a worker has, by name: in which slot of device memory
// each lies, what is in it, and how many calls use it.
//
// A slot is in exactly one state: free; taken (something is on its way into
// it); named (calls may begin with it); leaving (its name is gone, calls still
// use it). On the worker's loop.

#ifndef TANDEM_WORKER_ADAPTERS_H_
#define TANDEM_WORKER_ADAPTERS_H_

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "tandem/v1/generation.pb.h"

namespace tandem::worker {

inline constexpr size_t kMaxAdapters = 1024;

class AdapterTable;

// A call's hold on a slot: what is in it stays as long as this lives. The
// table outlives it.
class AdapterUse {
 public:
  AdapterUse() = default;  // of the model as it is
  AdapterUse(AdapterUse&& other) noexcept
      : table_(std::exchange(other.table_, nullptr)),
        slot_(std::exchange(other.slot_, -1)) {}
  AdapterUse& operator=(AdapterUse&& other) noexcept {
    std::swap(table_, other.table_);
    std::swap(slot_, other.slot_);
    return *this;
  }
  ~AdapterUse();

  int slot() const { return slot_; }  // -1: none

 private:
  friend class AdapterTable;
  AdapterUse(AdapterTable* table, int slot) : table_(table), slot_(slot) {}

  AdapterTable* table_ = nullptr;
  int slot_ = -1;
};

struct AdapterCounts {
  int free = 0;
  int taken = 0;
  int named = 0;
  int leaving = 0;
};

class AdapterTable {
 public:
  explicit AdapterTable(int slots = 0) : slots_(static_cast<size_t>(slots)) {}

  // 1..64 printable ASCII characters without spaces; else INVALID_ARGUMENT.
  static absl::Status CheckName(const std::string& name);

  // A free slot to put something into. RESOURCE_EXHAUSTED: there is none.
  absl::StatusOr<int> Take();
  // Nothing was put into it after all.
  void GiveBack(int slot);
  // Names a taken slot. INVALID_ARGUMENT: not a name, or it is there already;
  // then the slot is still taken.
  absl::Status Add(const v1::AdapterRef& adapter, int slot);
  // Takes a name's away: its slot is free when the last call that uses it has
  // ended. The slot, or NOT_FOUND.
  absl::StatusOr<int> Remove(const std::string& name);
  // Calls still use what has no name any more.
  bool leaving(int slot) const {
    return slots_[static_cast<size_t>(slot)].state == State::kLeaving;
  }
  // Told of each slot that leaves no longer.
  void set_on_freed(std::function<void(int slot)> on_freed) {
    on_freed_ = std::move(on_freed);
  }

  // For a call that asks for it; of none where it asks for none (no name).
  // NOT_FOUND names those that there are; FAILED_PRECONDITION: the one of this
  // name is another.
  absl::StatusOr<AdapterUse> Use(const v1::AdapterRef& adapter);

  // Null: none of that name.
  const v1::AdapterRef* Find(const std::string& name) const;
  void List(google::protobuf::RepeatedPtrField<v1::AdapterRef>* out) const;
  int slots() const { return static_cast<int>(slots_.size()); }
  AdapterCounts counts() const;

 private:
  friend class AdapterUse;
  enum class State { kFree, kTaken, kNamed, kLeaving };
  struct Slot {
    State state = State::kFree;
    int uses = 0;
    v1::AdapterRef adapter = {};  // while named
  };

  void EndUse(int slot);

  std::vector<Slot> slots_;
  std::map<std::string, int> by_name_;
  std::function<void(int slot)> on_freed_;
};

// The same where a worker may have no table.
absl::StatusOr<AdapterUse> UseAdapter(AdapterTable* table,
                                      const v1::AdapterRef& adapter);

// What an adapter adds to the hash of a prefix: "" of none.
std::string AdapterKey(const v1::AdapterRef& adapter);

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_ADAPTERS_H_
