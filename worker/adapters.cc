// SPDX-License-Identifier: Apache-2.0
#include "worker/adapters.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/error.h"
#include "engine/kv_pool.h"

namespace tandem::worker {
namespace {

constexpr size_t kMaxNameBytes = 64;

bool IsName(const std::string& name) {
  return !name.empty() && name.size() <= kMaxNameBytes &&
         std::all_of(name.begin(), name.end(),
                     [](char c) { return c > ' ' && c <= '~'; });
}

}  // namespace

absl::Status AdapterTable::Add(const std::string& name,
                               const std::string& digest) {
  if (!IsName(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("adapter '", name.substr(0, 128),
                     "': a name has 1..64 printable characters, no spaces"));
  }
  if (!by_name_.try_emplace(name, Entry{size(), digest}).second) {
    return absl::InvalidArgumentError(
        absl::StrCat("adapter ", name, " is named twice"));
  }
  return absl::OkStatus();
}

absl::StatusOr<int> AdapterTable::SlotOf(const v1::AdapterRef& adapter) const {
  if (adapter.name().empty() && adapter.digest().empty()) return -1;
  const auto it = by_name_.find(adapter.name());
  if (it == by_name_.end()) {
    std::vector<std::string> names;
    for (const auto& [name, entry] : by_name_) names.push_back(name);
    return MakeError(
        absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND",
        absl::StrCat("adapter = ", adapter.name().substr(0, 128),
                     ": this worker has ",
                     names.empty() ? "none" : absl::StrJoin(names, ", ")));
  }
  if (it->second.digest != adapter.digest()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "ADAPTER_MISMATCH",
        absl::StrCat("adapter ", adapter.name(), ": ",
                     adapter.digest().substr(0, 16), " is asked for, ",
                     it->second.digest.substr(0, 16), " is here"));
  }
  return it->second.slot;
}

void AdapterTable::List(
    google::protobuf::RepeatedPtrField<v1::AdapterRef>* out) const {
  for (const auto& [name, entry] : by_name_) {
    v1::AdapterRef* const ref = out->Add();
    ref->set_name(name);
    ref->set_digest(entry.digest);
  }
}

absl::StatusOr<int> SlotOf(const AdapterTable* table,
                           const v1::AdapterRef& adapter) {
  return table == nullptr ? AdapterTable().SlotOf(adapter)
                          : table->SlotOf(adapter);
}

std::string AdapterKey(const v1::AdapterRef& adapter) {
  return engine::AdapterKey(adapter.name(), adapter.digest());
}

}  // namespace tandem::worker
