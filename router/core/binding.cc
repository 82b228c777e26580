// SPDX-License-Identifier: Apache-2.0
#include "router/core/binding.h"

#include <algorithm>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/fnv.h"
#include "router/placement/compatibility.h"

namespace tandem::router {

bool Binding::Allows(const v1::WorkerHello& worker) const {
  if (!to_) return true;
  return SameResults(*to_, worker) &&
         std::all_of(to_->adapters().begin(), to_->adapters().end(),
                     [&worker](const v1::AdapterRef& adapter) {
                       return AdapterDigest(worker, adapter.name()) ==
                              adapter.digest();
                     });
}

void Binding::Enter(const v1::WorkerHello& worker,
                    const v1::AdapterRef& adapter) {
  ++placed_;
  if (to_) return;
  // A whole hello names many adapters.
  *to_.emplace().mutable_fingerprint() = worker.fingerprint();
  if (!adapter.name().empty()) *to_->add_adapters() = adapter;
}

std::string Binding::SystemFingerprint() const {
  if (!to_) return "";
  const std::map<std::string, std::string> parts(to_->fingerprint().begin(),
                                                 to_->fingerprint().end());
  std::string text;
  for (const auto& [name, value] : parts) {
    absl::StrAppend(&text, name, "=", value, "\n");
  }
  for (const v1::AdapterRef& adapter : to_->adapters()) {
    absl::StrAppend(&text, "adapter=", adapter.digest(), "\n");
  }
  return absl::StrCat("fp_", absl::Hex(Fnv1a(text), absl::kZeroPad16));
}

void Binding::Leave() {
  if (--placed_ == 0 && !kept_) to_.reset();
}

}  // namespace tandem::router
