// SPDX-License-Identifier: Apache-2.0
// What every backend asks of a matrix that was quantised before.

#ifndef TANDEM_KERNELS_HOST_CODES_H_
#define TANDEM_KERNELS_HOST_CODES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/types.h"

namespace tandem::kernels {

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
  const bool groups = source.dtype != DType::kFp8 &&
                      source.group >= kCodeGroup &&
                      source.group % kCodeGroup == 0;
  if (source.group == source.cols || groups) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "a scale for every ", source.group, " inputs of ",
      std::string(Name(source.dtype)), ", expected one for each row",
      source.dtype == DType::kFp8 ? "" : " or for a multiple of 32"));
}

}  // namespace tandem::kernels

#endif  // TANDEM_KERNELS_HOST_CODES_H_
