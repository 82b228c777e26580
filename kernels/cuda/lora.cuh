// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters (Backend::AddLora): first h of a row's inputs, a block for
// each row and 64 ranks, where a thread makes a chain of one segment, of so
// many at a time as shared memory is asked for; then what is added, a thread
// for each output. Rows without an adapter end at once.

#ifndef TANDEM_KERNELS_CUDA_LORA_CUH_
#define TANDEM_KERNELS_CUDA_LORA_CUH_

#include <algorithm>

#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {

template <typename T>
struct LoraShrinkKernel {
  static constexpr int kThreads = 256;
  static constexpr int kRanks = 64;      // of a block
  static constexpr int kSegments = 256;  // at a time
  LoraParams p;

  TANDEM_HOST_DEVICE static int Segments(int cols) {
    return (cols + kLoraSegment - 1) / kLoraSegment;
  }
  // The chains, [segments][ranks].
  static int SharedBytes(const LoraParams& p) {
    return std::min(kSegments, Segments(p.factors.cols)) *
           std::min(kRanks, p.factors.max_rank) * 4;
  }

  TANDEM_DEVICE void operator()(Grid& g) const {
    const LoraFactors& f = p.factors;
    const int row = g.block_x();
    const int slot = p.slots[row];
    if (slot < 0) return;
    const int64_t at = slot * f.slot_stride;
    const int rank = f.rank[at];
    const int first = g.block_y() * kRanks;
    const int ranks = Smaller(kRanks, rank - first);
    if (ranks <= 0) return;
    const float* const a = f.a + at + first;
    const T* const x = static_cast<const T*>(p.x) + int64_t{row} * f.cols;
    float* const chains = reinterpret_cast<float*>(g.shared());
    const int segments = Segments(f.cols);
    float sum = 0.0f;  // of this thread's rank
    for (int first_of = 0; first_of < segments; first_of += kSegments) {
      const int count = Smaller(kSegments, segments - first_of);
      for (int i = g.thread(); i < count * ranks; i += kThreads) {
        const int begin = (first_of + i / ranks) * kLoraSegment;
        const int end = Smaller(f.cols, begin + kLoraSegment);
        float chain = 0.0f;
#pragma unroll 8
        for (int k = begin; k < end; ++k) {
          chain = Fma(ToFloat(x[k]), a[int64_t{k} * rank + i % ranks], chain);
        }
        chains[i] = chain;
      }
      g.Barrier();
      if (g.thread() < ranks) {
        for (int s = 0; s < count; ++s) {
          sum = Add(sum, chains[s * ranks + g.thread()]);
        }
      }
      g.Barrier();
    }
    if (g.thread() < ranks) {
      p.sum.scratch[int64_t{row} * f.max_rank + first + g.thread()] =
          RoundTo<T>(sum);
    }
  }
  static_assert(kRanks <= kThreads);
};

template <typename T>
struct LoraExpandKernel {
  static constexpr int kThreads = 128;
  LoraParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const LoraFactors& f = p.factors;
    const int row = g.block_x();
    const int output = g.block_y() * kThreads + g.thread();
    const int slot = p.slots[row];
    if (slot < 0 || output >= f.rows) return;
    const int64_t at = slot * f.slot_stride;
    const int rank = f.rank[at];
    if (rank == 0) return;
    const float* const b = f.b + at + output;
    const float* const h = p.sum.scratch + int64_t{row} * f.max_rank;
    float chain = 0.0f;
#pragma unroll 8
    for (int j = 0; j < rank; ++j) {
      chain = Fma(h[j], b[int64_t{j} * f.rows], chain);
    }
    T* const out = static_cast<T*>(p.sum.out) + Element(row, output);
    *out = FromFloat<T>(Fma(f.scale[at], chain, ToFloat(*out)));
  }

  TANDEM_DEVICE int64_t Element(int row, int output) const {
    const int column = p.sum.first + output;
    const int halves = p.sum.halves;
    if (halves == 0) return row * p.sum.stride + column;
    const int gate = column % halves;
    return int64_t{row} * PackedRows(2 * halves, RowOrder::kGated) +
           gate / 8 * 16 + gate % 8 + column / halves * 8;
  }
};

template <typename T>
struct GateHalvesKernel {
  static constexpr int kThreads = 128;
  GateHalvesParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int64_t row = g.block_x();
    const int i = g.block_y() * kThreads + g.thread();
    if (i >= p.dim) return;
    const T* const gate = static_cast<const T*>(p.halves) +
                          row * PackedRows(2 * p.dim, RowOrder::kGated) +
                          i / 8 * 16 + i % 8;
    static_cast<T*>(p.out)[row * p.dim + i] =
        FromFloat<T>(Gated(p.activation, ToFloat(gate[0]), ToFloat(gate[8])));
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_LORA_CUH_
