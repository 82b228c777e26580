// SPDX-License-Identifier: Apache-2.0
// Rows of activations as products with integers take them (launch.h has the
// format), each quantised by itself.

#ifndef TANDEM_KERNELS_CUDA_QUANTISE_ROWS_CUH_
#define TANDEM_KERNELS_CUDA_QUANTISE_ROWS_CUH_

#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/launch.h"
#include "kernels/quantise.h"

namespace tandem::kernels::cuda {

// Grid: tiles of 8 tokens, pieces of kGroups groups. A warp has a token.
template <typename T>
struct QuantiseGroupsKernel {
  static constexpr int kThreads = 32 * kCodeTokens;
  static constexpr int kGroups = 8;
  QuantiseRowsParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int groups = WeightBlocks(p.cols) * kGroupsPerBlock;
    const int end = Smaller((g.block_y() + 1) * kGroups, groups);
    const int token = g.block_x() * kCodeTokens + g.warp();
    const T* const x = static_cast<const T*>(p.x) + token * p.x_stride;
    for (int group = g.block_y() * kGroups; group < end; ++group) {
      const int col = group * kCodeGroup + g.lane();
      const float value =
          token < p.tokens && col < p.cols ? ToFloat(x[col]) : 0.0f;
      const VectorQuantiser quantiser(DType::kInt8,
                                      GreatestOfWarp(g, MagnitudeKey(value)));
      std::byte* const record =
          p.out + (int64_t{g.block_x()} * groups + group) * kCodeRecordBytes;
      record[g.warp() * kCodeGroup + g.lane()] =
          static_cast<std::byte>(quantiser(value));
      if (g.lane() == 0) {
        reinterpret_cast<float*>(record + kCodeTokens * kCodeGroup)[g.warp()] =
            quantiser.scale;
      }
    }
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_QUANTISE_ROWS_CUH_
