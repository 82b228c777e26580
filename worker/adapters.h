// SPDX-License-Identifier: Apache-2.0
// The LoRA adapters that a worker was started with, by name: in which slot each
// lies, and what is in it.

#ifndef TANDEM_WORKER_ADAPTERS_H_
#define TANDEM_WORKER_ADAPTERS_H_

#include <cstddef>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "tandem/v1/generation.pb.h"

namespace tandem::worker {

inline constexpr size_t kMaxAdapters = 1024;

class AdapterTable {
 public:
  // INVALID_ARGUMENT: the name is there already, or is not one (1..64
  // printable ASCII characters without spaces).
  absl::Status Add(const std::string& name, const std::string& digest);

  // The slot of what a call asks for; -1 where it asks for none (no name).
  // NOT_FOUND names those that there are; FAILED_PRECONDITION: the one of this
  // name is another.
  absl::StatusOr<int> SlotOf(const v1::AdapterRef& adapter) const;

  int size() const { return static_cast<int>(by_name_.size()); }
  void List(google::protobuf::RepeatedPtrField<v1::AdapterRef>* out) const;

 private:
  struct Entry {
    int slot;
    std::string digest;
  };
  std::map<std::string, Entry> by_name_;  // slots in the order of Add
};

// The same where a worker may have no table.
absl::StatusOr<int> SlotOf(const AdapterTable* table,
                           const v1::AdapterRef& adapter);

// What an adapter adds to the hash of a prefix: "" of none.
std::string AdapterKey(const v1::AdapterRef& adapter);

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_ADAPTERS_H_
