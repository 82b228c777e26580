// SPDX-License-Identifier: Apache-2.0
// What every backend asks of a matrix that was quantised before.

#ifndef TANDEM_KERNELS_HOST_CODES_H_
#define TANDEM_KERNELS_HOST_CODES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/types.h"

namespace tandem::kernels {

// INVALID_ARGUMENT where a row of so many inputs cannot be multiplied.
inline absl::Status CheckInputs(DType dtype, int64_t cols) {
  if (dtype != DType::kW8A8 || cols <= kMaxW8A8Inputs) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(cols, " inputs of w8a8, expected at most ", kMaxW8A8Inputs));
}

// INVALID_ARGUMENT where `source.order` is not each input once.
inline absl::Status CheckOrder(const HostCodes& source) {
  if (source.order == nullptr) return absl::OkStatus();
  const bool groups =
      source.dtype == DType::kInt8 || source.dtype == DType::kInt4;
  std::vector<bool> seen(static_cast<size_t>(source.cols));
  for (int64_t i = 0; i < source.cols; ++i) {
    const int64_t input = source.order[i];
    if (!groups || input < 0 || input >= source.cols ||
        seen[static_cast<size_t>(input)]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "column ", i, " of ", std::string(Name(source.dtype)),
          " codes is of input ", input,
          groups ? ", expected each input once" : ", expected no order"));
    }
    seen[static_cast<size_t>(input)] = true;
  }
  return absl::OkStatus();
}

// INVALID_ARGUMENT where Backend::PackCodes cannot keep `source`.
inline absl::Status CheckCodes(const HostCodes& source) {
  if (source.codes == nullptr || source.scales == nullptr ||
      (source.zeros != nullptr &&
       (source.dtype != DType::kInt4 || source.e2m1)) ||
      (source.e2m1 && source.dtype != DType::kInt4)) {
    return absl::InvalidArgumentError(
        absl::StrCat("matrix of ", source.rows, " rows and ", source.cols,
                     " columns cannot be packed"));
  }
  if (absl::Status status = CheckOrder(source); !status.ok()) return status;
  const bool by_row =
      source.dtype == DType::kFp8 || source.dtype == DType::kW8A8;
  const bool groups =
      !by_row && source.group >= kCodeGroup && source.group % kCodeGroup == 0;
  if (source.group == source.cols || groups) {
    return CheckInputs(source.dtype, source.cols);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "a scale for every ", source.group, " inputs of ",
      std::string(Name(source.dtype)), ", expected one for each row",
      by_row ? "" : " or for a multiple of 32"));
}

}  // namespace tandem::kernels

#endif  // TANDEM_KERNELS_HOST_CODES_H_
