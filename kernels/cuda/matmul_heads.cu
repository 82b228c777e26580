// SPDX-License-Identifier: Apache-2.0
// Products of each head with a matrix of its own: tiles of matmul.cuh, moved to
// their head's weights, inputs and outputs. An output is one chain
// (numerics.h), so bits are those of one product for each head.

#include "kernels/cuda/launch.h"
#include "kernels/cuda/matmul.cuh"
#include "kernels/cuda/matmul_f32.cuh"

namespace tandem::kernels::cuda {

// Product: one of matmul*.cuh. Grid: tiles x heads.
template <typename T, typename Product>
struct HeadProductKernel {
  static constexpr int kThreads = Product::kThreads;
  static constexpr int kSharedBytes = Product::kSharedBytes;
  MatMulParams p;        // the first head's
  int64_t weight_bytes;  // of a head

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int head = g.block_y();
    Product product{p};
    product.p.weights += head * weight_bytes;
    product.p.x = static_cast<const T*>(p.x) + int64_t{head} * p.cols;
    product.p.out = static_cast<T*>(p.out) + int64_t{head} * p.outputs;
    const int row_tiles = Product::RowTiles(p.rows);
    product.Tile(g, g.block_x() % row_tiles,
                 g.block_x() / row_tiles * Product::kTokens);
  }
};

namespace {

template <typename T, typename Product>
int RunHeads(const Stream& stream, WeightType type,
             const MatMulHeadsParams& p) {
  using Kernel = HeadProductKernel<T, Product>;
  const MatMulParams first{.weights = p.weights,
                           .scales = nullptr,
                           .x = p.x,
                           .bias = nullptr,
                           .out = p.out,
                           .x_stride = int64_t{p.heads} * p.cols,
                           .out_stride = int64_t{p.heads} * p.outputs,
                           .rows = p.outputs,
                           .cols = p.cols,
                           .tokens = p.tokens,
                           .outputs = p.outputs};
  const int tiles = Product::RowTiles(p.outputs) *
                    ((p.tokens + Product::kTokens - 1) / Product::kTokens);
  return Launch(stream, {tiles, p.heads, 1}, Kernel::kThreads,
                Kernel::kSharedBytes,
                Kernel{first, PackedBytes(p.outputs, p.cols, type)});
}

template <WeightType kWeight>
int RunHeadsF32(const Stream& stream, const MatMulHeadsParams& p) {
  return RunHeads<float, MatMulF32Kernel<kWeight>>(stream, kWeight, p);
}

// Speed alone depends on the choice.
template <typename T>
int RunHeadTiles(const Stream& stream, WeightType type,
                 const MatMulHeadsParams& p) {
  if (p.tokens <= 8) {
    return RunHeads<T, MatMulKernel<T, T, MatMul8>>(stream, type, p);
  }
  if (p.tokens <= 16) {
    return RunHeads<T, MatMulKernel<T, T, MatMul16>>(stream, type, p);
  }
  if (p.tokens <= 32) {
    return RunHeads<T, MatMulKernel<T, T, MatMul32>>(stream, type, p);
  }
  if (p.tokens <= 64) {
    return RunHeads<T, MatMulKernel<T, T, MatMul64>>(stream, type, p);
  }
  return RunHeads<T, MatMulKernel<T, T, MatMul128>>(stream, type, p);
}

}  // namespace

int LaunchMatMulHeads(const Stream& stream, DType activation, WeightType type,
                      const MatMulHeadsParams& p) {
  if (p.tokens == 0 || p.heads == 0) return 0;
  if (activation == DType::kF32) {
    switch (type) {
      case WeightType::kF32:
        return RunHeadsF32<WeightType::kF32>(stream, p);
      case WeightType::kBF16:
        return RunHeadsF32<WeightType::kBF16>(stream, p);
      case WeightType::kF16:
        return RunHeadsF32<WeightType::kF16>(stream, p);
      case WeightType::kE4M3:
      case WeightType::kInt8:
      case WeightType::kInt4:
      case WeightType::kInt4Zeros:
      case WeightType::kE2m1:
      case WeightType::kW8A8:
        break;
    }
  }
  if (activation == DType::kBF16 && type == WeightType::kBF16) {
    return RunHeadTiles<BFloat16>(stream, type, p);
  }
  if (activation == DType::kF16 && type == WeightType::kF16) {
    return RunHeadTiles<Half>(stream, type, p);
  }
  return kInvalidLaunch;  // such a matrix is quantised or was never packed
}

}  // namespace tandem::kernels::cuda
