// SPDX-License-Identifier: Apache-2.0
#include "worker/adapters.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/error.h"
#include "common/utf8.h"
#include "engine/kv/kv_pool.h"

namespace tandem::worker {
namespace {

constexpr size_t kMaxNameBytes = 64;

}  // namespace

AdapterUse::~AdapterUse() {
  if (table_ != nullptr) table_->EndUse(slot_);
}

absl::Status AdapterTable::CheckName(const std::string& name) {
  if (!name.empty() && name.size() <= kMaxNameBytes &&
      std::all_of(name.begin(), name.end(),
                  [](char c) { return c > ' ' && c <= '~'; })) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("adapter '", std::string(Utf8Head(name, 128)),
                   "': a name has 1..64 printable characters, no spaces"));
}

absl::StatusOr<int> AdapterTable::Take() {
  const auto it =
      std::find_if(slots_.begin(), slots_.end(),
                   [](const Slot& slot) { return slot.state == State::kFree; });
  if (it != slots_.end()) {
    it->state = State::kTaken;
    return static_cast<int>(it - slots_.begin());
  }
  const int leaving = counts().leaving;
  return MakeError(
      absl::StatusCode::kResourceExhausted, "ADAPTER_SLOTS",
      absl::StrCat("no slot is free: --max-loras is ", slots_.size(),
                   leaving == 0 ? ""
                                : absl::StrCat(", ", leaving,
                                               " of them wait for calls of "
                                               "unloaded adapters to end")));
}

void AdapterTable::GiveBack(int slot) {
  slots_[static_cast<size_t>(slot)].state = State::kFree;
}

absl::Status AdapterTable::Add(const v1::AdapterRef& adapter, int slot) {
  const absl::Status status = CheckName(adapter.name());
  if (!status.ok()) return status;
  if (!by_name_.try_emplace(adapter.name(), slot).second) {
    return absl::InvalidArgumentError(
        absl::StrCat("adapter ", adapter.name(), " is named twice"));
  }
  Slot& into = slots_[static_cast<size_t>(slot)];
  into.state = State::kNamed;
  into.adapter = adapter;
  return absl::OkStatus();
}

absl::StatusOr<int> AdapterTable::Remove(const std::string& name) {
  const auto it = by_name_.find(name);
  if (it == by_name_.end()) {
    return MakeError(absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND",
                     absl::StrCat("this worker has no adapter ",
                                  std::string(Utf8Head(name, 128))));
  }
  const int slot = it->second;
  by_name_.erase(it);
  Slot& leaving = slots_[static_cast<size_t>(slot)];
  leaving.state = State::kLeaving;
  leaving.adapter.Clear();
  if (leaving.uses == 0) leaving.state = State::kFree;
  return slot;
}

void AdapterTable::EndUse(int slot) {
  Slot& used = slots_[static_cast<size_t>(slot)];
  if (--used.uses > 0 || used.state != State::kLeaving) return;
  used.state = State::kFree;
  if (on_freed_) on_freed_(slot);
}

absl::StatusOr<AdapterUse> AdapterTable::Use(const v1::AdapterRef& adapter) {
  if (adapter.name().empty() && adapter.digest().empty()) return AdapterUse();
  const auto it = by_name_.find(adapter.name());
  if (it == by_name_.end()) {
    std::vector<std::string> names;
    for (const auto& [name, slot] : by_name_) names.push_back(name);
    return MakeError(
        absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND",
        absl::StrCat("adapter = ", std::string(Utf8Head(adapter.name(), 128)),
                     ": this worker has ",
                     names.empty() ? "none" : absl::StrJoin(names, ", ")));
  }
  Slot& slot = slots_[static_cast<size_t>(it->second)];
  if (slot.adapter.digest() != adapter.digest()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "ADAPTER_MISMATCH",
        absl::StrCat("adapter ", adapter.name(), ": ",
                     adapter.digest().substr(0, 16), " is asked for, ",
                     slot.adapter.digest().substr(0, 16), " is here"));
  }
  ++slot.uses;
  return AdapterUse(this, it->second);
}

const v1::AdapterRef* AdapterTable::Find(const std::string& name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end()
             ? nullptr
             : &slots_[static_cast<size_t>(it->second)].adapter;
}

void AdapterTable::List(
    google::protobuf::RepeatedPtrField<v1::AdapterRef>* out) const {
  for (const auto& [name, slot] : by_name_) {
    *out->Add() = slots_[static_cast<size_t>(slot)].adapter;
  }
}

AdapterCounts AdapterTable::counts() const {
  AdapterCounts counts;
  for (const Slot& slot : slots_) {
    counts.free += slot.state == State::kFree;
    counts.taken += slot.state == State::kTaken;
    counts.named += slot.state == State::kNamed;
    counts.leaving += slot.state == State::kLeaving;
  }
  return counts;
}

absl::StatusOr<AdapterUse> UseAdapter(AdapterTable* table,
                                      const v1::AdapterRef& adapter) {
  AdapterTable none;
  return table == nullptr ? none.Use(adapter) : table->Use(adapter);
}

std::string AdapterKey(const v1::AdapterRef& adapter) {
  return engine::AdapterKey(adapter.name(), adapter.digest());
}

}  // namespace tandem::worker
