// SPDX-License-Identifier: Apache-2.0
// FNV-1a of 64 bits: the same in every process and release, and no
// secret of what it is made of.

#ifndef TANDEM_COMMON_FNV_H_
#define TANDEM_COMMON_FNV_H_

#include <cstdint>
#include <string_view>

namespace tandem {

inline uint64_t Fnv1a(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : text) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  }
  return hash;
}

}  // namespace tandem

#endif  // TANDEM_COMMON_FNV_H_
