// SPDX-License-Identifier: Apache-2.0
// Loops that do nothing but what an x86-64 CPU is limited by: fused
// multiply-adds, dot products of integers and of bf16, reads of memory. In
// assembly, since compilers halve them. Whoever calls them keeps the time, on
// as many threads as are to be measured.

#ifndef TANDEM_COMMON_CPU_LIMITS_H_
#define TANDEM_COMMON_CPU_LIMITS_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tandem {

// AVX2 with FMA, without which nothing here may be called.
bool CpuHasFma();
bool CpuHasWideFma();   // AVX-512
bool CpuHasBf16Dots();  // vdpbf16ps of 512 bits
// And does more of them than FMA: Emerald Rapids does half as many.
bool CpuGainsByBf16Dots();
// AMX, for int8 and bf16, if the kernel grants this process its registers.
bool CpuHasTiles();

// The value of --activation-dtype with which this CPU does more arithmetic than
// with f32; empty: none.
std::string_view FasterActivationDtype();

// How int8 is multiplied: by AVX2's vpmaddubsw, vpmaddwd and vpaddd, or by one
// vpdpbusd that does what those three do, of 256 bits (AVX-VNNI: Intel's
// clients since Alder Lake) or 512.
enum class IntegerDots { kMultiplyAdd, kVnni, kWideVnni };
bool CpuHas(IntegerDots how);
IntegerDots FastestIntegerDots();

// All return how many additions and multiplications they were. `wide`: of 512
// bits, else 256. A round is 48 instructions on 12 registers.
double RunFma(bool wide, int64_t rounds);
double RunIntegerDots(IntegerDots how, int64_t rounds);
double RunBf16Dots(int64_t rounds);
double RunBf16Tiles(int64_t rounds);  // of 12 instructions

// Loads from four streams, as the hardware's prefetchers like it; up to 255
// bytes at the end are left out.
void ReadMemory(const std::byte* data, size_t bytes);

}  // namespace tandem

#endif  // TANDEM_COMMON_CPU_LIMITS_H_
