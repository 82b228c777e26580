// SPDX-License-Identifier: Apache-2.0
// The digest that both ends of a handoff take over a sequence's KV, so that a
// block filled with stale, foreign, torn or swapped bytes is never decoded.
//
// A row is the wire bytes of one layer and one absolute position: K of the
// heads in range, then V of them; its length is a multiple of 16. Its words
// w[0..n) are little-endian 32-bit. For each half h (low, high) with its own
// key table t_h, and pieces c of at most kDigestPieceWords words:
//
//   s = sum over even i in the piece, modulo 2^64, of
//       (w[i] + t_h[i mod P]) mod 2^32 * (w[i+1] + t_h[i+1 mod P]) mod 2^32
//   row_h += Mix(s + Mix(key_h ^ layer * 2^40 ^ position) + c)
//
// (P = kDigestPieceWords; key_low = key, key_high = Mix(key + 1); Mix is the
// finaliser of splitmix64.) The digest of a range is the sum of its rows,
// each half modulo 2^64: any order, any cut. Two different rows collide with
// probability 2^-32 per half for a key that the data does not depend on; it
// guards against faults, not against an attacker who knows the key.

#ifndef TANDEM_KERNELS_KV_DIGEST_H_
#define TANDEM_KERNELS_KV_DIGEST_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/types.h"

namespace tandem::kernels {

inline constexpr int kDigestPieceWords = 1024;

// splitmix64's finaliser: a bijection.
constexpr uint64_t DigestMix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// What the sum of piece `piece` becomes in one half of the digest.
constexpr uint64_t DigestFinish(uint64_t sum, uint64_t half_key, int layer,
                                int position, int piece) {
  const uint64_t where =
      (static_cast<uint64_t>(layer) << 40) ^ static_cast<uint64_t>(position);
  return DigestMix(sum + DigestMix(half_key ^ where) +
                   static_cast<uint64_t>(piece));
}

// The key tables that `key` stands for.
struct DigestKeys {
  explicit DigestKeys(uint64_t key);

  uint64_t key;
  alignas(64) uint32_t low[kDigestPieceWords];
  alignas(64) uint32_t high[kDigestPieceWords];
};

constexpr uint64_t DigestHighKey(uint64_t key) { return DigestMix(key + 1); }

// The definition above, word by word. `bytes` is a multiple of 8.
KvDigest DigestRow(const DigestKeys& keys, const std::byte* row, size_t bytes,
                   int layer, int position);

}  // namespace tandem::kernels

#endif  // TANDEM_KERNELS_KV_DIGEST_H_
