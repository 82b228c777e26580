// SPDX-License-Identifier: Apache-2.0
#include "router/placement/quarantine.h"

#include <openssl/sha.h>

#include <algorithm>
#include <utility>

namespace tandem::router {
namespace {

constexpr size_t kMost = 64;

}  // namespace

std::string Quarantine::FingerprintOf(
    const std::vector<int32_t>& prompt) const {
  std::string bytes = salt_;
  bytes.append(reinterpret_cast<const char*>(prompt.data()),
               prompt.size() * sizeof(int32_t));
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  return digest;
}

void Quarantine::Add(const std::vector<int32_t>& prompt,
                     std::vector<std::string> incarnations, absl::Time now) {
  if (Holds(prompt, now)) return;  // another sequence of it
  if (entries_.size() == kMost) entries_.pop_front();
  entries_.push_back(
      {FingerprintOf(prompt), std::move(incarnations), now + length_});
}

void Quarantine::Acquit(const std::string& incarnation) {
  entries_.remove_if([&](const Entry& entry) {
    return std::find(entry.incarnations.begin(), entry.incarnations.end(),
                     incarnation) != entry.incarnations.end();
  });
}

bool Quarantine::Holds(const std::vector<int32_t>& prompt, absl::Time now) {
  while (!entries_.empty() && entries_.front().until <= now) {
    entries_.pop_front();
  }
  if (entries_.empty()) return false;
  const std::string fingerprint = FingerprintOf(prompt);
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.fingerprint == fingerprint;
  });
}

}  // namespace tandem::router
