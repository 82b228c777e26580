// SPDX-License-Identifier: Apache-2.0
// Operations in which each output depends on a few inputs at known places:
// embedding, the choice of rows, activations, logits. A thread makes eight
// elements.

#ifndef TANDEM_KERNELS_CUDA_ELEMENTWISE_CUH_
#define TANDEM_KERNELS_CUDA_ELEMENTWISE_CUH_

#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/device/vectors.h"
#include "kernels/cuda/launch.h"
#include "kernels/quantise.h"
#include "kernels/route.h"

namespace tandem::kernels::cuda {

// Threads of these kernels go along a row, blocks in x over the rows: a step
// may have more of them than a grid has places in y (65535).
inline constexpr int kElementwiseThreads = 128;

// A packed weight as the number that it stands for, scale apart.
template <WeightType kType>
TANDEM_DEVICE float LoadWeight(const std::byte* p) {
  if constexpr (kType == WeightType::kF32) {
    return *reinterpret_cast<const float*>(p);
  } else if constexpr (kType == WeightType::kBF16) {
    return ToFloat(BFloat16{*reinterpret_cast<const uint16_t*>(p)});
  } else if constexpr (kType == WeightType::kF16) {
    return ToFloat(Half{*reinterpret_cast<const uint16_t*>(p)});
  } else if constexpr (kType == WeightType::kW8A8) {
    return FloatFromCode(DType::kInt8, *reinterpret_cast<const uint8_t*>(p));
  } else {
    return LowOfPair<BFloat16>(
        FromE4M3Pair<BFloat16>(*reinterpret_cast<const uint8_t*>(p)));
  }
}

// Of IsGrouped with its group's scale.
template <WeightType kType>
TANDEM_DEVICE float LoadGrouped(const std::byte* weights, int row, int col,
                                int cols) {
  const uint8_t byte =
      static_cast<uint8_t>(weights[PackedOffset(row, col, cols, kType)]);
  const bool high = IsFourBit(kType) && col % 8 >= 4;
  const uint8_t bits = static_cast<uint8_t>(high ? byte >> 4 : byte);
  float code = 0;
  if constexpr (kType == WeightType::kInt4Zeros) {
    code = static_cast<float>(
        (bits & 0xf) - static_cast<int>(weights[PackedZero(row, col, cols)]));
  } else if constexpr (kType == WeightType::kE2m1) {
    // The first byte's bits 4i to 4i + 3 are the magnitude of code i.
    const int magnitude = static_cast<int>(0xc8643210u >> (bits & 7) * 4 & 0xf);
    code = static_cast<float>((bits & 8) != 0 ? -magnitude : magnitude);
  } else {
    code = FloatFromCode(IsFourBit(kType) ? DType::kInt4 : DType::kInt8, bits);
  }
  return Mul(code, ToFloat(*reinterpret_cast<const Half*>(
                       weights + PackedScale(row, col, cols, kType))));
}

template <typename T, WeightType kType>
struct EmbedKernel {
  static constexpr int kThreads = kElementwiseThreads;
  EmbedParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int row = g.block_x();
    const int begin = (g.block_y() * kThreads + g.thread()) * kChunk;
    if (begin >= p.cols) return;
    const int fed = p.fed == nullptr ? -1 : p.fed[row];
    const int token = fed < 0 ? p.token_ids[row] : p.drawn[fed].token_id;
    const int count = Smaller(kChunk, p.cols - begin);
    float v[kChunk] = {};
    for (int i = 0; i < count; ++i) {
      if constexpr (IsGrouped(kType)) {
        v[i] = LoadGrouped<kType>(p.weights, token, begin + i, p.cols);
      } else {
        v[i] = LoadWeight<kType>(p.weights +
                                 PackedOffset(token, begin + i, p.cols, kType));
      }
      if constexpr (HasRowScales(kType)) v[i] = Mul(v[i], p.scales[token]);
      v[i] = RoundTo<T>(Mul(v[i], p.scale));
    }
    if (p.added != nullptr) {
      const float* const add =
          p.added + int64_t{p.positions[row]} * p.cols + begin;
      for (int i = 0; i < count; ++i) v[i] = Add(v[i], add[i]);
    }
    StoreChunk(static_cast<T*>(p.out) + int64_t{row} * p.cols + begin, count,
               Aligned(p.cols), v);
  }
};

template <typename T>
struct AddAndScaleKernel {
  static constexpr int kThreads = kElementwiseThreads;
  AddAndScaleParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int begin = (g.block_y() * kThreads + g.thread()) * kChunk;
    if (begin >= p.dim) return;
    const int64_t at = int64_t{g.block_x()} * p.dim + begin;
    T* const x = static_cast<T*>(p.x) + at;
    const int count = Smaller(kChunk, p.dim - begin);
    float v[kChunk];
    float delta[kChunk];
    LoadChunk(x, count, Aligned(p.dim), v);
    LoadChunk(static_cast<const T*>(p.delta) + at, count, Aligned(p.dim),
              delta);
    for (int i = 0; i < kChunk; ++i) {
      v[i] = Mul(RoundTo<T>(Add(v[i], delta[i])), p.scale);
    }
    StoreChunk(x, count, Aligned(p.dim), v);
  }
};

template <typename T>
struct ActivateKernel {
  static constexpr int kThreads = kElementwiseThreads;
  ActivateParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int begin = (g.block_y() * kThreads + g.thread()) * kChunk;
    if (begin >= p.dim) return;
    T* const x = static_cast<T*>(p.x) + int64_t{g.block_x()} * p.dim + begin;
    const int count = Smaller(kChunk, p.dim - begin);
    float v[kChunk];
    LoadChunk(x, count, Aligned(p.dim), v);
    for (int i = 0; i < kChunk; ++i) v[i] = Alone(p.activation, v[i]);
    if (p.by != nullptr) {
      const T* const by =
          static_cast<const T*>(p.by) + g.block_x() * p.by_stride + begin;
      for (int i = 0; i < count; ++i) v[i] = Mul(v[i], ToFloat(by[i]));
    }
    StoreChunk(x, count, Aligned(p.dim), v);
  }
};

// A thread for each row.
struct RouteKernel {
  static constexpr int kThreads = kElementwiseThreads;
  RouteParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int row = g.block_x() * kThreads + g.thread();
    if (row >= p.num_rows) return;
    RouteRow(
        p.options, [](float x) { return Exp(x); },
        p.logits + int64_t{row} * p.options.logits(),
        p.weights + int64_t{row} * p.options.weights());
  }
};

struct ScaleLogitsKernel {
  static constexpr int kThreads = kElementwiseThreads;
  ScaleLogitsParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int begin = (g.block_y() * kThreads + g.thread()) * kChunk;
    if (begin >= p.vocab) return;
    float* const x = p.logits + int64_t{g.block_x()} * p.vocab + begin;
    const int count = Smaller(kChunk, p.vocab - begin);
    float v[kChunk];
    LoadChunk(x, count, Aligned(p.vocab), v);
    for (int i = 0; i < kChunk; ++i) {
      v[i] = Mul(v[i], p.scale);
      if (p.soft_cap > 0) v[i] = SoftCap(v[i], p.soft_cap);
    }
    StoreChunk(x, count, Aligned(p.vocab), v);
  }
};

template <typename T>
struct GatherRowsKernel {
  static constexpr int kThreads = kElementwiseThreads;
  GatherRowsParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int64_t to = g.block_x();
    const int begin = (g.block_y() * kThreads + g.thread()) * kChunk;
    if (begin >= p.dim) return;
    const int64_t from = p.row_ids[to];
    const T* const x = static_cast<const T*>(p.x) + from * p.dim + begin;
    T* const out = static_cast<T*>(p.out) + to * p.dim + begin;
    constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));
    if (Aligned(p.dim)) {
      for (int i = 0; i < kChunk; i += kPerVector)
        Store16(out + i, Load16(x + i));
      return;
    }
    for (int i = 0; i < Smaller(kChunk, p.dim - begin); ++i) out[i] = x[i];
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ELEMENTWISE_CUH_
