// SPDX-License-Identifier: Apache-2.0
// The digest of one row of KV (kv_digest.h), eight words at a time. Sums
// modulo 2^64 have no order, so this equals the definition.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/kv_rows.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/simd-inl.h"
// clang-format on

#include <algorithm>

#include "kernels/cpu/kernel_table.h"
#include "kernels/kv_digest.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

KvDigest DigestWords(const uint32_t* words, int count, const uint32_t* low_keys,
                     const uint32_t* high_keys, uint64_t key, int layer,
                     int position) {
  const hn::CappedTag<uint32_t, 8> du;  // 8 lanes with both sets
  const hn::CappedTag<uint64_t, 4> d64;
  KvDigest digest;
  for (int begin = 0; begin < count; begin += kDigestPieceWords) {
    const int words_here = std::min(kDigestPieceWords, count - begin);
    const uint32_t* const w = words + begin;
    auto low = hn::Zero(d64);
    auto high = hn::Zero(d64);
    int i = 0;
    for (; i + 8 <= words_here; i += 8) {
      const auto data = hn::LoadU(du, w + i);
      const auto a = hn::Add(data, hn::LoadU(du, low_keys + i));
      const auto b = hn::Add(data, hn::LoadU(du, high_keys + i));
      const auto a_odd =
          hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(d64, a)));
      const auto b_odd =
          hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(d64, b)));
      low = hn::Add(low, hn::MulEven(a, a_odd));
      high = hn::Add(high, hn::MulEven(b, b_odd));
    }
    alignas(64) uint64_t lanes[8];
    hn::Store(low, d64, lanes);
    hn::Store(high, d64, lanes + 4);
    uint64_t low_sum = lanes[0] + lanes[1] + lanes[2] + lanes[3];
    uint64_t high_sum = lanes[4] + lanes[5] + lanes[6] + lanes[7];
    for (; i + 1 < words_here; i += 2) {
      low_sum += uint64_t{w[i] + low_keys[i]} * (w[i + 1] + low_keys[i + 1]);
      high_sum += uint64_t{w[i] + high_keys[i]} * (w[i + 1] + high_keys[i + 1]);
    }
    const int piece = begin / kDigestPieceWords;
    digest.low += DigestFinish(low_sum, key, layer, position, piece);
    digest.high +=
        DigestFinish(high_sum, DigestHighKey(key), layer, position, piece);
  }
  return digest;
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

void AddKvRows(KernelTable& table) {
  table.digest_row =
      table.isa == Isa::kAvx512 ? N_AVX3::DigestWords : N_AVX2::DigestWords;
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
