// SPDX-License-Identifier: Apache-2.0
// How many copies of rows a GPU keeps for layers of many experts: each row has
// one for each of its experts, and each expert's lie one behind the other from
// a multiple of eight on.

#ifndef TANDEM_KERNELS_EXPERTS_H_
#define TANDEM_KERNELS_EXPERTS_H_

#include <algorithm>
#include <cstdint>

namespace tandem::kernels {

// Most places that so many rows' copies take.
constexpr int64_t MostExpertRows(int num_rows, int experts, int chosen) {
  const int64_t copies = int64_t{num_rows} * chosen;
  return copies + 7 * std::min<int64_t>(copies, experts);
}

}  // namespace tandem::kernels

#endif  // TANDEM_KERNELS_EXPERTS_H_
