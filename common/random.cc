// SPDX-License-Identifier: Apache-2.0
#include "common/random.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdlib>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace tandem {

uint64_t SystemRandom::Next() {
  uint64_t value = 0;
  for (;;) {
    const ssize_t n = getrandom(&value, sizeof(value), 0);
    if (n == static_cast<ssize_t>(sizeof(value))) return value;
    // Only a signal while the pool is not yet seeded can interrupt a read of
    // eight bytes; a kernel without getrandom cannot make keys at all.
    if (n < 0 && errno != EINTR) std::abort();
  }
}

// Steele, Lea and Flood's SplitMix64: a Weyl sequence and a mixing function,
// so any seed, even 0, starts a full-period sequence.
uint64_t SeededRandom::Next() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::string Uuid(Random* random) {
  std::string bytes = random->Bytes(16);
  bytes[6] = static_cast<char>((bytes[6] & 0x0f) | 0x40);
  bytes[8] = static_cast<char>((bytes[8] & 0x3f) | 0x80);
  const std::string hex = absl::BytesToHexString(bytes);
  return absl::StrCat(hex.substr(0, 8), "-", hex.substr(8, 4), "-",
                      hex.substr(12, 4), "-", hex.substr(16, 4), "-",
                      hex.substr(20));
}

}  // namespace tandem
