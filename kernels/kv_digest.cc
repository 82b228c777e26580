// SPDX-License-Identifier: Apache-2.0

#include "kernels/kv_digest.h"

#include <algorithm>
#include <cstring>

namespace tandem::kernels {

DigestKeys::DigestKeys(uint64_t digest_key) : key(digest_key) {
  // splitmix64 streams: state advances by the golden ratio.
  uint64_t low_state = key;
  uint64_t high_state = DigestHighKey(key);
  for (int i = 0; i < kDigestPieceWords; ++i) {
    low_state += 0x9e3779b97f4a7c15u;
    high_state += 0x9e3779b97f4a7c15u;
    low[i] = static_cast<uint32_t>(DigestMix(low_state) >> 32);
    high[i] = static_cast<uint32_t>(DigestMix(high_state) >> 32);
  }
}

KvDigest DigestRow(const DigestKeys& keys, const std::byte* row, size_t bytes,
                   int layer, int position) {
  KvDigest digest;
  const int words = static_cast<int>(bytes / 4);
  for (int begin = 0; begin < words; begin += kDigestPieceWords) {
    const int end = std::min(begin + kDigestPieceWords, words);
    uint64_t low = 0;
    uint64_t high = 0;
    for (int i = begin; i + 1 < end; i += 2) {
      uint32_t pair[2];
      std::memcpy(pair, row + size_t{4} * static_cast<size_t>(i), 8);
      const int k = i - begin;
      low += uint64_t{pair[0] + keys.low[k]} * (pair[1] + keys.low[k + 1]);
      high += uint64_t{pair[0] + keys.high[k]} * (pair[1] + keys.high[k + 1]);
    }
    const int piece = begin / kDigestPieceWords;
    digest.low += DigestFinish(low, keys.key, layer, position, piece);
    digest.high +=
        DigestFinish(high, DigestHighKey(keys.key), layer, position, piece);
  }
  return digest;
}

}  // namespace tandem::kernels
