// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/kernel_table.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/cpu_limits.h"
#include "hwy/highway.h"
#include "hwy/targets.h"

namespace tandem::kernels::cpu {
namespace {

// The kernel saves and restores the tiles of AMX for those who ask alone.
bool AskForTiles() {
  constexpr unsigned long kRequest = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr unsigned long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// The best one that this CPU has beside AVX-512.
Dot BestDot() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (c >> 11 & 1) == 0) {
    return Dot::kMultiplyAdd;
  }
  const bool tiles = (d >> 24 & 1) != 0 && (d >> 25 & 1) != 0;
  return tiles && AskForTiles() ? Dot::kAmx : Dot::kVnni;
}

bool HasPairs() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 5 & 1) != 0;
}

// By ascending order, each with all before it.
struct Named {
  std::string_view name;
  Isa isa;
  Dot dot;
  bool pairs;
};
constexpr Named kNamed[] = {
    {"avx2", Isa::kAvx2, Dot::kMultiplyAdd, false},
    {"avx512", Isa::kAvx512, Dot::kMultiplyAdd, false},
    {"avx512vnni", Isa::kAvx512, Dot::kVnni, false},
    {"avx512bf16", Isa::kAvx512, Dot::kVnni, true},
    {"amx", Isa::kAvx512, Dot::kAmx, true},
};

}  // namespace

absl::StatusOr<KernelTable> MakeKernelTable(std::string_view instruction_set,
                                            bool rounds_inputs) {
  const int64_t supported = hwy::SupportedTargets();
  const bool avx2 = (supported & HWY_AVX2) != 0;
  const bool avx512 = (supported & HWY_AVX3) != 0;
  const bool pairs = avx512 && HasPairs();
  const Dot best = avx512 ? BestDot() : Dot::kMultiplyAdd;
  KernelTable table{};
  const Named* chosen = nullptr;
  for (const Named& named : kNamed) {
    const bool here = (named.isa == Isa::kAvx2 ? avx2 : avx512) &&
                      static_cast<int>(named.dot) <= static_cast<int>(best) &&
                      (!named.pairs || pairs);
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
    return absl::InvalidArgumentError(absl::StrCat(
        "instruction set is '", std::string(instruction_set),
        "', expected auto, avx2, avx512, avx512vnni, avx512bf16 or "
        "amx"));
  }
  table.isa = chosen->isa;
  table.dot = chosen->dot;
  table.rounds_inputs = rounds_inputs;
  // Chains of f32 give the same bits.
  table.pairs =
      chosen->pairs && (instruction_set != "auto" || CpuGainsByBf16Dots());
  table.fetching =
      __builtin_cpu_is("intel") != 0 ? kIntelFetching : kAmdFetching;
  AddMatMul(table);
  AddMatMulCodes(table);
  AddAttention(table);
  AddSample(table);
  AddElementwise(table);
  AddKvRows(table);
  AddLoraRows(table);
  return table;
}

}  // namespace tandem::kernels::cpu
