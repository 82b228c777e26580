// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/kernel_table.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/cpu_limits.h"
#include "hwy/highway.h"
#include "hwy/targets.h"

namespace tandem::kernels::cpu {
namespace {

bool Has(Isa isa, Dot dot) {
  const bool wide = isa == Isa::kAvx512;
  if ((hwy::SupportedTargets() & (wide ? HWY_AVX3 : HWY_AVX2)) == 0) {
    return false;
  }
  switch (dot) {
    case Dot::kMultiplyAdd:
      return true;
    case Dot::kVnni:
      return CpuHas(wide ? IntegerDots::kWideVnni : IntegerDots::kVnni);
    case Dot::kAmx:
      return CpuHasTiles();
  }
  return false;
}

// By ascending speed.
struct Named {
  std::string_view name;
  Isa isa;
  Dot dot;
  bool pairs;
};
constexpr Named kNamed[] = {
    {"avx2", Isa::kAvx2, Dot::kMultiplyAdd, false},
    {"avxvnni", Isa::kAvx2, Dot::kVnni, false},
    {"avx512", Isa::kAvx512, Dot::kMultiplyAdd, false},
    {"avx512vnni", Isa::kAvx512, Dot::kVnni, false},
    {"avx512bf16", Isa::kAvx512, Dot::kVnni, true},
    {"amx", Isa::kAvx512, Dot::kAmx, true},
};

}  // namespace

absl::StatusOr<KernelTable> MakeKernelTable(std::string_view instruction_set,
                                            CpuInputs inputs) {
  KernelTable table{};
  const Named* chosen = nullptr;
  for (const Named& named : kNamed) {
    const bool here =
        Has(named.isa, named.dot) && (!named.pairs || CpuHasBf16Dots());
    if (instruction_set == "auto" ? here : named.name == instruction_set) {
      if (!here) {
        return absl::FailedPreconditionError(
            absl::StrCat("instruction set ", std::string(instruction_set),
                         " was asked for, but this CPU lacks it; use auto"));
      }
      chosen = &named;
    }
  }
  if (chosen == nullptr && instruction_set == "auto") {
    return absl::FailedPreconditionError(
        "this CPU has neither AVX2 with FMA nor AVX-512 (F, BW, CD, DQ, VL); "
        "run on an x86-64-v3 or newer machine");
  }
  if (chosen == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("instruction set is '", std::string(instruction_set),
                     "', expected auto, avx2, avxvnni, avx512, avx512vnni, "
                     "avx512bf16 or amx"));
  }
  table.isa = chosen->isa;
  table.dot = chosen->dot;
  table.inputs = inputs;
  // Chains of f32 give the same bits.
  table.pairs =
      chosen->pairs && (instruction_set != "auto" || CpuGainsByBf16Dots());
  table.fetching =
      __builtin_cpu_is("intel") != 0 ? kIntelFetching : kAmdFetching;
  AddMatMul(table);
  AddMatMulCodes(table);
  AddAttention(table);
  AddAttentionInt8(table);
  AddSample(table);
  AddElementwise(table);
  AddKvRows(table);
  AddLoraRows(table);
  return table;
}

}  // namespace tandem::kernels::cpu
