// SPDX-License-Identifier: Apache-2.0
// What the kernels of adapters must do, as checks.h has it for the others.

#ifndef TANDEM_TESTS_KERNELS_CUDA_LORA_CHECKS_H_
#define TANDEM_TESTS_KERNELS_CUDA_LORA_CHECKS_H_

#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/kernels/cuda/checks.h"
#include "tests/kernels/lora_case.h"

namespace tandem::kernels::cuda {

using LoraFn = int (*)(const Stream&, DType, const LoraParams&);

// Rows [first, first + count) of the case. Values are of `type` already.
inline AssertionResult LaunchRows(const LoraFn& launch, DType type,
                                  const LoraCase& c, const LoraValues& v,
                                  int first, int count,
                                  std::vector<float>* out) {
  const auto x = Encode(type, v.x);
  const auto before = Encode(type, v.out);
  Guarded after(type, int64_t{count} * c.stride);
  const size_t skip = At(int64_t{first} * c.stride) * SizeOf(type);
  std::memcpy(after.data(), before.data() + skip,
              At(int64_t{count} * c.stride) * SizeOf(type));
  Guarded scratch(DType::kF32, int64_t{count} * c.max_rank);
  TANDEM_LAUNCHED(
      launch(StreamOf(Generation::kHopper), type,
             {.x = x.data() + At(int64_t{first} * c.cols) * SizeOf(type),
              .slots = v.slots.data() + first,
              .factors = FactorsOf(c, v, v.image.data()),
              .sum = {.out = after.data(),
                      .stride = c.stride,
                      .first = c.first,
                      .scratch = reinterpret_cast<float*>(scratch.data())},
              .num_rows = count}));
  if (!after.Kept() || !scratch.Kept()) return AssertionFailure() << "overrun";
  *out = after.Values();
  return AssertionSuccess();
}

// f32 has the CPU backend's bits; all are near float64, and a row is the same
// alone.
inline AssertionResult CheckLora(const LoraFn& launch) {
  for (const DType type : kTypes) {
    for (const LoraCase& c : LoraCases()) {
      LoraValues v = MakeLora(c);
      for (float& value : v.x) value = RoundedTo(type, value);
      for (float& value : v.out) value = RoundedTo(type, value);
      std::vector<float> got;
      if (auto ran = LaunchRows(launch, type, c, v, 0, c.num_rows, &got);
          !ran) {
        return ran;
      }
      if (type == DType::kF32) {
        Device cpu(MakeBackend());
        if (auto same = SameBits(got, RunLora(cpu, c, v)); !same) return same;
      }
      for (int r = 0; r < c.num_rows; ++r) {
        const LoraSums expected = LoraInFloat64(c, v, r);
        for (int o = 0; o < c.stride; ++o) {
          const size_t at = At(int64_t{r} * c.stride + o);
          const double bound = ((c.cols + 40) * 6e-8 + 2.1 * UnitOf(type)) *
                               expected.magnitude[At(o)];
          if (!(std::fabs(got[at] - expected.value[At(o)]) <= bound)) {
            return AssertionFailure()
                   << Name(type) << ", row " << r << ", output " << o << " of "
                   << c.cols << " inputs: " << got[at] << " for "
                   << expected.value[At(o)];
          }
        }
        std::vector<float> alone;
        if (auto ran = LaunchRows(launch, type, c, v, r, 1, &alone); !ran) {
          return ran;
        }
        const auto begin = got.begin() + ptrdiff_t{r} * c.stride;
        if (auto same = SameBits(alone, {begin, begin + c.stride}); !same) {
          return same << ", row " << r << " alone";
        }
      }
    }
  }
  return AssertionSuccess();
}

// Factors of gates and of what they open are added where GateHalves reads them:
// the same as to halves one behind the other.
using GateHalvesFn = int (*)(const Stream&, DType, const GateHalvesParams&);

inline AssertionResult CheckGateHalves(const GateHalvesFn& launch) {
  const int rows = 3;
  for (const DType type : kTypes) {
    for (const int dim : {1, 8, 13, 136}) {
      const int packed = PackedRows(2 * dim, RowOrder::kGated);
      LoraCase c{40, 2 * dim, 0, 2 * dim, 4, rows};
      LoraValues v = MakeLora(c);
      v.slots = {0, -1, 3};
      for (float& value : v.x) value = RoundedTo(type, value);
      for (float& value : v.out) value = RoundedTo(type, value);
      std::vector<float> plain;
      if (auto ran = LaunchRows(LaunchLora, type, c, v, 0, rows, &plain);
          !ran) {
        return ran;
      }
      std::vector<float> order(At(int64_t{rows} * packed), 1e30f);
      for (int i = 0; i < rows * packed; ++i) {
        const int from = SourceRow(i % packed, 2 * dim, RowOrder::kGated);
        if (from >= 0) order[At(i)] = v.out[At(i / packed * 2 * dim + from)];
      }
      Guarded halves(type, int64_t{rows} * packed);
      const auto bytes = Encode(type, order);
      std::memcpy(halves.data(), bytes.data(), bytes.size());
      const auto x = Encode(type, v.x);
      std::vector<float> scratch(At(rows * c.max_rank));
      TANDEM_LAUNCHED(LaunchLora(StreamOf(Generation::kHopper), type,
                                 {.x = x.data(),
                                  .slots = v.slots.data(),
                                  .factors = FactorsOf(c, v, v.image.data()),
                                  .sum = {.out = halves.data(),
                                          .halves = dim,
                                          .scratch = scratch.data()},
                                  .num_rows = rows}));
      Guarded out(type, int64_t{rows} * dim);
      TANDEM_LAUNCHED(launch(StreamOf(Generation::kHopper), type,
                             {.halves = halves.data(),
                              .out = out.data(),
                              .num_rows = rows,
                              .dim = dim,
                              .activation = Activation::kSilu}));
      const auto got = out.Values();
      for (int i = 0; i < rows * dim; ++i) {
        const float* const row = &plain[At(int64_t{i / dim} * 2 * dim)];
        const double gate = row[i % dim];
        const double expected =
            gate / (1 + std::exp(-gate)) * row[dim + i % dim];
        const double bound =
            (1.01 * UnitOf(type) + 2e-6) * std::fabs(expected) + 1e-7;
        if (!(std::fabs(got[At(i)] - expected) <= bound)) {
          return AssertionFailure()
                 << Name(type) << " dim " << dim << ", " << i << ": "
                 << got[At(i)] << " for " << expected;
        }
      }
      if (!halves.Kept() || !out.Kept()) return AssertionFailure() << "overrun";
    }
  }
  return AssertionSuccess();
}

// A gated product at once has the bits of one in two steps.
inline AssertionResult CheckGatedInTwo() {
  const int rows = 5, cols = 72;
  for (const DType type : kTypes) {
    for (const int dim : {8, 13, 136}) {
      const int packed = PackedRows(2 * dim, RowOrder::kGated);
      const auto w = RandomFloats(At(int64_t{2} * dim * cols), 93, 0.2f);
      const WeightType weight = type == DType::kF32    ? WeightType::kF32
                                : type == DType::kBF16 ? WeightType::kBF16
                                                       : WeightType::kF16;
      const PackedWeights weights =
          PackWeights({reinterpret_cast<const std::byte*>(w.data()),
                       DType::kF32, 2 * dim, cols},
                      weight, RowOrder::kGated);
      const auto x = Encode(type, RandomOf(type, int64_t{rows} * cols, 94));
      MatMulParams p{};
      p.weights = weights.bytes.data();
      p.x = x.data();
      p.x_stride = cols;
      p.rows = packed;
      p.cols = cols;
      p.tokens = rows;
      Guarded once(type, int64_t{rows} * dim);
      p.out = once.data();
      p.out_stride = p.outputs = dim;
      p.output = MatMulOutput::kGated;
      TANDEM_LAUNCHED(
          LaunchMatMul(StreamOf(Generation::kHopper), type, weight, p));
      Guarded halves(type, int64_t{rows} * packed);
      p.out = halves.data();
      p.out_stride = p.outputs = packed;
      p.output = MatMulOutput::kPlain;
      TANDEM_LAUNCHED(
          LaunchMatMul(StreamOf(Generation::kHopper), type, weight, p));
      Guarded twice(type, int64_t{rows} * dim);
      TANDEM_LAUNCHED(LaunchGateHalves(
          StreamOf(Generation::kHopper), type,
          {halves.data(), twice.data(), rows, dim, Activation::kSilu}));
      if (auto same = SameBits(twice.Values(), once.Values()); !same) {
        return same << ", " << Name(type) << " dim " << dim;
      }
      if (!halves.Kept() || !twice.Kept())
        return AssertionFailure() << "overrun";
    }
  }
  return AssertionSuccess();
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_TESTS_KERNELS_CUDA_LORA_CHECKS_H_
