// SPDX-License-Identifier: Apache-2.0
#include "common/cpu_limits.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace tandem {

bool CpuHasFma() {
  return __builtin_cpu_supports("avx2") != 0 &&
         __builtin_cpu_supports("fma") != 0;
}

bool CpuHasWideFma() { return __builtin_cpu_supports("avx512f") != 0; }

bool CpuHasBf16Dots() { return __builtin_cpu_supports("avx512bf16") != 0; }

bool CpuGainsByBf16Dots() {
  return CpuHasBf16Dots() && __builtin_cpu_is("intel") == 0;
}

bool CpuHasTiles() {
  constexpr unsigned kAmx =
      1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, int8
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kAmx) != kAmx) {
    return false;
  }
  // The kernel saves and restores the registers for those who ask alone.
  constexpr unsigned long kRequest = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr unsigned long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

std::string_view FasterActivationDtype() {
  if (CpuHasTiles()) return "bf16-amx";
  return CpuGainsByBf16Dots() ? "bf16" : "";
}

bool CpuHas(IntegerDots how) {
  switch (how) {
    case IntegerDots::kMultiplyAdd:
      return CpuHasFma();
    case IntegerDots::kVnni: {
      unsigned a = 0, b = 0, c = 0, d = 0;
      return CpuHasFma() && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 &&
             (a >> 4 & 1) != 0;
    }
    case IntegerDots::kWideVnni:
      return __builtin_cpu_supports("avx512vnni") != 0;
  }
  return false;
}

IntegerDots FastestIntegerDots() {
  return CpuHas(IntegerDots::kWideVnni) ? IntegerDots::kWideVnni
         : CpuHas(IntegerDots::kVnni)   ? IntegerDots::kVnni
                                        : IntegerDots::kMultiplyAdd;
}

// 12 chains.
#define TANDEM_FMA12(reg)                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "1\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "2\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "3\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "4\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "5\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "6\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "7\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "8\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "9\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "10\n\t"                                     \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "11\n\t"                                     \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg "12\n\t"
#define TANDEM_FMA_CLOBBERS                                               \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", \
      "xmm9", "xmm10", "xmm11", "xmm12"

double RunFma(bool wide, int64_t rounds) {
  if (wide) {
    for (int64_t i = 0; i < rounds; ++i) {
      asm volatile(TANDEM_FMA12("zmm") TANDEM_FMA12("zmm") TANDEM_FMA12("zmm")
                       TANDEM_FMA12("zmm")::
                           : TANDEM_FMA_CLOBBERS);
    }
  } else {
    for (int64_t i = 0; i < rounds; ++i) {
      asm volatile(TANDEM_FMA12("ymm") TANDEM_FMA12("ymm") TANDEM_FMA12("ymm")
                       TANDEM_FMA12("ymm")::
                           : TANDEM_FMA_CLOBBERS);
    }
  }
  return static_cast<double>(rounds) * 48 * (wide ? 16 : 8) * 2;
}

// Dot products on 12 chains too.
#define TANDEM_DOT(of, reg, to) of " %%" reg "0, %%" reg "0, %%" reg to "\n\t"
#define TANDEM_DOT12(of, reg) \
  TANDEM_DOT(of, reg, "1")    \
  TANDEM_DOT(of, reg, "2")    \
  TANDEM_DOT(of, reg, "3")    \
  TANDEM_DOT(of, reg, "4")    \
  TANDEM_DOT(of, reg, "5")    \
  TANDEM_DOT(of, reg, "6")    \
  TANDEM_DOT(of, reg, "7")    \
  TANDEM_DOT(of, reg, "8")    \
  TANDEM_DOT(of, reg, "9")    \
  TANDEM_DOT(of, reg, "10") TANDEM_DOT(of, reg, "11") TANDEM_DOT(of, reg, "12")
#define TANDEM_DOT48(of, reg) \
  TANDEM_DOT12(of, reg)       \
  TANDEM_DOT12(of, reg) TANDEM_DOT12(of, reg) TANDEM_DOT12(of, reg)

// As much of AVX2: products in pairs, pairs in fours, fours behind the chain.
#define TANDEM_DOT_AVX2(to)                \
  "vpmaddubsw %%ymm0, %%ymm0, %%ymm13\n\t" \
  "vpmaddwd %%ymm13, %%ymm0, %%ymm13\n\t"  \
  "vpaddd %%ymm13, %%ymm" to ", %%ymm" to "\n\t"
#define TANDEM_DOT12_AVX2 \
  TANDEM_DOT_AVX2("1")    \
  TANDEM_DOT_AVX2("2")    \
  TANDEM_DOT_AVX2("3")    \
  TANDEM_DOT_AVX2("4")    \
  TANDEM_DOT_AVX2("5")    \
  TANDEM_DOT_AVX2("6")    \
  TANDEM_DOT_AVX2("7")    \
  TANDEM_DOT_AVX2("8")    \
  TANDEM_DOT_AVX2("9")    \
  TANDEM_DOT_AVX2("10")   \
  TANDEM_DOT_AVX2("11")   \
  TANDEM_DOT_AVX2("12")

double RunIntegerDots(IntegerDots how, int64_t rounds) {
  for (int64_t i = 0; i < rounds; ++i) {
    switch (how) {
      case IntegerDots::kMultiplyAdd:
        asm volatile(TANDEM_DOT12_AVX2 TANDEM_DOT12_AVX2 TANDEM_DOT12_AVX2
                         TANDEM_DOT12_AVX2::
                             : TANDEM_FMA_CLOBBERS, "xmm13");
        break;
      case IntegerDots::kVnni:
        asm volatile(TANDEM_DOT48("%{vex%} vpdpbusd", "ymm")::
                         : TANDEM_FMA_CLOBBERS);
        break;
      case IntegerDots::kWideVnni:
        asm volatile(TANDEM_DOT48("vpdpbusd", "zmm")::: TANDEM_FMA_CLOBBERS);
        break;
    }
  }
  const int lanes = how == IntegerDots::kWideVnni ? 64 : 32;
  return static_cast<double>(rounds) * 48 * lanes * 2;
}

double RunBf16Dots(int64_t rounds) {
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile(TANDEM_DOT48("vdpbf16ps", "zmm")::: TANDEM_FMA_CLOBBERS);
  }
  return static_cast<double>(rounds) * 48 * 32 * 2;
}

#define TANDEM_TILE(sum) "tdpbf16ps %%tmm7, %%tmm6, %%tmm" sum "\n\t"
#define TANDEM_TILES \
  TANDEM_TILE("0") TANDEM_TILE("1") TANDEM_TILE("2") TANDEM_TILE("3")

double RunBf16Tiles(int64_t rounds) {
  struct alignas(64) Config {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  std::fill_n(config.row_bytes, 8, uint16_t{64});
  std::fill_n(config.rows, 8, uint8_t{16});
  asm volatile("ldtilecfg %0" : : "m"(config));
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile(TANDEM_TILES TANDEM_TILES TANDEM_TILES::);
  }
  asm volatile("tilerelease");
  return static_cast<double>(rounds) * 12 * (16 * 16 * 32 * 2);
}

void ReadMemory(const std::byte* data, size_t bytes) {
  const size_t quarter = bytes / 4 / 64 * 64;
  const std::byte* const b = data + quarter;
  const std::byte* const c = b + quarter;
  const std::byte* const d = c + quarter;
  for (size_t i = 0; i + 64 <= quarter; i += 64) {
    asm volatile(
        "prefetcht0 2048(%0)\n\tprefetcht0 2048(%1)\n\t"
        "prefetcht0 2048(%2)\n\tprefetcht0 2048(%3)\n\t"
        "vmovups (%0), %%ymm0\n\tvmovups 32(%0), %%ymm1\n\t"
        "vmovups (%1), %%ymm2\n\tvmovups 32(%1), %%ymm3\n\t"
        "vmovups (%2), %%ymm4\n\tvmovups 32(%2), %%ymm5\n\t"
        "vmovups (%3), %%ymm6\n\tvmovups 32(%3), %%ymm7\n\t"
        :
        : "r"(data + i), "r"(b + i), "r"(c + i), "r"(d + i)
        : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7");
  }
}

}  // namespace tandem
