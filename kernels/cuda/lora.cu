// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/lora.cuh"

namespace tandem::kernels::cuda {
namespace {

int Blocks(int size, int per_block) {
  return (size + per_block - 1) / per_block;
}

}  // namespace

int LaunchLora(const Stream& stream, DType activation, const LoraParams& p) {
  const LoraFactors& f = p.factors;
  if (p.num_rows == 0 || f.max_rank == 0) return 0;
  return WithElement(activation, [&](auto zero) {
    using Shrink = LoraShrinkKernel<decltype(zero)>;
    using Expand = LoraExpandKernel<decltype(zero)>;
    const int code =
        Launch(stream, {p.num_rows, Blocks(f.max_rank, Shrink::kRanks), 1},
               Shrink::kThreads, Shrink::SharedBytes(p), Shrink{p});
    if (code != 0) return code;
    Stream behind = stream;
    behind.after_kernel = true;
    return Launch(behind, {p.num_rows, Blocks(f.rows, Expand::kThreads), 1},
                  Expand::kThreads, 0, Expand{p});
  });
}

int LaunchGateHalves(const Stream& stream, DType activation,
                     const GateHalvesParams& p) {
  if (p.num_rows == 0 || p.dim == 0) return 0;
  return WithElement(activation, [&](auto zero) {
    using Kernel = GateHalvesKernel<decltype(zero)>;
    return Launch(stream, {p.num_rows, Blocks(p.dim, Kernel::kThreads), 1},
                  Kernel::kThreads, 0, Kernel{p});
  });
}

}  // namespace tandem::kernels::cuda
