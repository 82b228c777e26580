// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/kernel_table.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "hwy/highway.h"
#include "hwy/targets.h"

namespace tandem::kernels::cpu {

absl::StatusOr<KernelTable> MakeKernelTable(std::string_view instruction_set) {
  const int64_t supported = hwy::SupportedTargets();
  const bool avx2 = (supported & HWY_AVX2) != 0;
  const bool avx512 = (supported & HWY_AVX3) != 0;
  Isa isa;
  if (instruction_set == "auto") {
    if (!avx2 && !avx512) {
      return absl::FailedPreconditionError(
          "this CPU has neither AVX2 with FMA nor AVX-512 (F, BW, CD, DQ, VL); "
          "run on an x86-64-v3 or newer machine");
    }
    isa = avx512 ? Isa::kAvx512 : Isa::kAvx2;
  } else if (instruction_set == "avx2" || instruction_set == "avx512") {
    isa = instruction_set == "avx2" ? Isa::kAvx2 : Isa::kAvx512;
    if (!(isa == Isa::kAvx2 ? avx2 : avx512)) {
      return absl::FailedPreconditionError(
          absl::StrCat("instruction set ", std::string(instruction_set),
                       " was asked for, but this CPU lacks it; use auto"));
    }
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("instruction set is '", std::string(instruction_set),
                     "', expected auto, avx2 or avx512"));
  }
  KernelTable table{};
  table.isa = isa;
  AddMatMul(table);
  AddAttention(table);
  AddSample(table);
  AddElementwise(table);
  AddKvRows(table);
  return table;
}

}  // namespace tandem::kernels::cpu
