// SPDX-License-Identifier: Apache-2.0
// Norm, activation, rotary embedding: one row each.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/elementwise.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/inputs-inl.h"
#include "kernels/cpu/quantise-inl.h"
#include "kernels/cpu/simd-inl.h"
// clang-format on

#include <cmath>
#include <cstring>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/route.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// Squares are summed by index modulo 16, then over the fixed tree.
void RmsNormRow(int dim, float eps, float* x, const float* delta,
                const float* weight, float* out) {
  F16 squares = Set16(0.0f);
  int i = 0;
  for (; i + 16 <= dim; i += 16) {
    F16 v = Load16(x + i);
    if (delta != nullptr) {
      v = Add(v, Load16(delta + i));
      Store16(v, x + i);
    }
    squares = Fma(v, v, squares);
  }
  if (i < dim) {
    F16 v = LoadFirst16(x + i, dim - i);
    if (delta != nullptr) {
      v = Add(v, LoadFirst16(delta + i, dim - i));
      StoreFirst16(v, x + i, dim - i);
    }
    squares = Fma(v, v, squares);
  }
  if (weight == nullptr) {
    std::memmove(out, x, static_cast<size_t>(dim) * sizeof(float));
    return;
  }
  const float mean = Sum16(squares) / static_cast<float>(dim);
  const F16 scale = Set16(1.0f / std::sqrt(mean + eps));
  for (i = 0; i + 16 <= dim; i += 16) {
    Store16(Mul(Mul(Load16(x + i), scale), Load16(weight + i)), out + i);
  }
  if (i < dim) {
    StoreFirst16(Mul(Mul(LoadFirst16(x + i, dim - i), scale),
                     LoadFirst16(weight + i, dim - i)),
                 out + i, dim - i);
  }
}

// Sums as RmsNormRow's. `bias` may be null.
void LayerNormRow(int dim, float eps, float* x, const float* delta,
                  const float* weight, const float* bias, float* out) {
  F16 sums = Set16(0.0f);
  for (int i = 0; i < dim; i += 16) {
    const int count = HWY_MIN(16, dim - i);
    F16 v = LoadFirst16(x + i, count);
    if (delta != nullptr) {
      v = Add(v, LoadFirst16(delta + i, count));
      StoreFirst16(v, x + i, count);
    }
    sums = Add(sums, v);
  }
  const float mean = Sum16(sums) / static_cast<float>(dim);
  F16 squares = Set16(0.0f);
  for (int i = 0; i < dim; i += 16) {
    alignas(64) float centred[16] = {};
    const int count = HWY_MIN(16, dim - i);
    StoreFirst16(Sub(LoadFirst16(x + i, count), Set16(mean)), centred, count);
    const F16 v = Load16(centred);
    squares = Fma(v, v, squares);
  }
  const float variance = Sum16(squares) / static_cast<float>(dim);
  const F16 scale = Set16(1.0f / std::sqrt(variance + eps));
  for (int i = 0; i < dim; i += 16) {
    const int count = HWY_MIN(16, dim - i);
    F16 v = Mul(Sub(LoadFirst16(x + i, count), Set16(mean)), scale);
    v = Mul(v, LoadFirst16(weight + i, count));
    if (bias != nullptr) v = Add(v, LoadFirst16(bias + i, count));
    StoreFirst16(v, out + i, count);
  }
}

// x / (1 + exp(-inner)), where inner is x or, for GELU, a polynomial in x.
HWY_INLINE F16 Activated(Activation activation, const F16& x) {
  const F16 inner =
      activation == Activation::kSilu
          ? x
          : Mul(x, Fma(Mul(x, x), Set16(0.07135481627f), Set16(1.595769122f)));
  const F16 e = Exp(Sub(Set16(0.0f), inner));
  return Div(x, Add(Set16(1.0f), e));
}

// x * Phi(x) = max(x, 0) - |x| * Phi(-|x|), the latter with Phi(-z) =
// exp(-z * z / 2) * p(t), t = 1 / (1 + 0.2316419 * z): p's relative error is
// below 1.2e-7 up to the cut, where the product is 1e-36. NaN stays NaN.
HWY_INLINE F16 Gelu(const F16& x) {
  const F16 zero = Set16(0.0f);
  const F16 one = Set16(1.0f);
  const F16 z = Min(Set16(12.8f), Max(Sub(zero, x), x));
  const F16 t = Div(one, Fma(z, Set16(0.2316419f), one));
  F16 p = Set16(-0.0713041499f);
  for (const float c :
       {0.251481026f, -0.20847325f, 0.231842637f, 0.00985183939f, 0.10385438f,
        0.0902101845f, 0.0925373584f}) {
    p = Fma(p, t, Set16(c));
  }
  const F16 e = Exp(Mul(Mul(z, z), Set16(-0.5f)));
  return Sub(Max(zero, x), Mul(z, Mul(Mul(p, t), e)));
}

// Of a layer without gates.
HWY_INLINE F16 Alone(Activation activation, const F16& x) {
  if (activation == Activation::kGelu) return Gelu(x);
  if (activation != Activation::kRelu2) return Activated(activation, x);
  const F16 positive = Max(Set16(0.0f), x);
  return Mul(positive, positive);
}

// NaN stays NaN: it is the second operand of minimum and maximum.
HWY_INLINE F16 ClampedSwiGlu(const F16& gate, const F16& up) {
  const F16 limit = Set16(kSwiGluLimit);
  const F16 g = Min(limit, gate);
  const F16 u = Max(Set16(-kSwiGluLimit), Min(limit, up));
  const F16 e = Exp(Mul(g, Set16(-kSwiGluAlpha)));
  return Mul(Div(g, Add(Set16(1.0f), e)), Add(u, Set16(1.0f)));
}

HWY_INLINE F16 Gated(Activation activation, const F16& gate, const F16& up) {
  return activation == Activation::kClampedSwiGlu
             ? ClampedSwiGlu(gate, up)
             : Mul(Activated(activation, gate), up);
}

void GateRow(Activation activation, int dim, const float* gate, const float* up,
             float* out) {
  int i = 0;
  for (; i + 16 <= dim; i += 16) {
    Store16(Gated(activation, Load16(gate + i), Load16(up + i)), out + i);
  }
  if (i < dim) {
    StoreFirst16(Gated(activation, LoadFirst16(gate + i, dim - i),
                       LoadFirst16(up + i, dim - i)),
                 out + i, dim - i);
  }
}

void ActivateRow(Activation activation, int dim, float* x) {
  for (int i = 0; i < dim; i += 16) {
    const int count = HWY_MIN(16, dim - i);
    StoreFirst16(Alone(activation, LoadFirst16(x + i, count)), x + i, count);
  }
}

void ActivateTimesRow(Activation activation, int dim, const float* by,
                      float* x) {
  for (int i = 0; i < dim; i += 16) {
    const int count = HWY_MIN(16, dim - i);
    const F16 activated = Alone(activation, LoadFirst16(x + i, count));
    StoreFirst16(Mul(activated, LoadFirst16(by + i, count)), x + i, count);
  }
}

void ScaleRow(int dim, float scale, float soft_cap, float* x) {
  for (int i = 0; i < dim; i += 16) {
    const int count = HWY_MIN(16, dim - i);
    F16 v = Mul(LoadFirst16(x + i, count), Set16(scale));
    if (soft_cap > 0) v = SoftCap(v, soft_cap);
    StoreFirst16(v, x + i, count);
  }
}

void AddAndScaleRow(int dim, float scale, const float* delta, float* x) {
  for (int i = 0; i < dim; i += 16) {
    const int count = HWY_MIN(16, dim - i);
    const F16 sum =
        Add(LoadFirst16(x + i, count), LoadFirst16(delta + i, count));
    StoreFirst16(Mul(sum, Set16(scale)), x + i, count);
  }
}

// Not inlined: RouteRow is of no instruction set.
HWY_NOINLINE float ExpOf(float x) { return Exp1(x); }

void Route(const RouteOptions& options, const float* logits, float* weights) {
  RouteRow(options, ExpOf, logits, weights);
}

void AddWeightedRow(int dim, float weight, const float* x, float* out) {
  const F16 factor = Set16(weight);
  for (int i = 0; i < dim; i += 16) {
    const int count = HWY_MIN(16, dim - i);
    StoreFirst16(
        Fma(factor, LoadFirst16(x + i, count), LoadFirst16(out + i, count)),
        out + i, count);
  }
}

void ExpRow(int count, const float* x, float* out) {
  int i = 0;
  for (; i + 16 <= count; i += 16) Store16(Exp(Load16(x + i)), out + i);
  if (i < count) {
    StoreFirst16(Exp(LoadFirst16(x + i, count - i)), out + i, count - i);
  }
}

// In place; each product is rounded, as in the usual formula.
void Rotate(int pairs, int half, const float* cos, const float* sin,
            float* head) {
  for (int i = 0; i < pairs; ++i) {
    const float a = head[i];
    const float b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

// bf16 of each; up to 15 more elements behind them are written.
void RoundRow(const float* x, int count, uint16_t* out) {
  const hn::Rebind<uint16_t, U32> d16;
  for (int i = 0; i < count; i += kLanes) {
    const auto lanes = hn::FirstN(F32(), static_cast<size_t>(count - i));
    const auto high =
        hn::ShiftRight<16>(RoundToBf16(hn::MaskedLoad(lanes, F32(), x + i)));
    hn::StoreU(hn::TruncateTo(d16, high), d16, out + i);
  }
}

// x [count] as VectorQuantiser makes it int8; gives its scale. Up to 15 more
// codes behind them are written.
float QuantiseVector(const float* x, int count, int8_t* codes) {
  const VectorScale scale(GreatestMagnitude(x, count), kLargestInt8);
  if (scale.inverse == 0) {
    std::memset(codes, 0, static_cast<size_t>(count));
    return scale.scale;
  }
  const Vec factor = hn::Set(F32(), scale.inverse);
  const hn::Rebind<int8_t, I32> d8;
  for (int i = 0; i < count; i += kLanes) {
    const auto lanes = hn::FirstN(F32(), static_cast<size_t>(count - i));
    const VecI code =
        NearestSmall(hn::Mul(hn::MaskedLoad(lanes, F32(), x + i), factor));
    hn::StoreU(hn::DemoteTo(d8, code), d8, codes + i);
  }
  return scale.scale;
}

void RopeAppendRow(const RopePiece& p) {
  const int half = p.head_dim / 2;
  for (int h = 0; h < p.heads + p.kv_heads; ++h) {
    float* const head = h < p.heads ? p.query + h * p.head_dim
                                    : p.kv + (h - p.heads) * p.head_dim;
    const auto norm_if = [&](bool rotated) {
      if (p.norms.query == nullptr || p.norms.rotated != rotated) return;
      RmsNormRow(p.head_dim, p.norms.eps, head, nullptr,
                 h < p.heads ? p.norms.query : p.norms.key, head);
    };
    norm_if(false);
    if (p.cos != nullptr) Rotate(p.pairs, half, p.cos, p.sin, head);
    norm_if(true);
    if (h < p.heads && p.query_scale != 1) {
      for (int i = 0; i < p.head_dim; ++i) head[i] *= p.query_scale;
    }
  }
  if (p.norms.value != nullptr) {
    for (int h = p.kv_heads; h < 2 * p.kv_heads; ++h) {
      float* const head = p.kv + h * p.head_dim;
      RmsNormRow(p.head_dim, p.norms.eps, head, nullptr, p.norms.value, head);
    }
  }
  if (p.kv_heads == 0) return;
  const DType type = p.layout->type;
  if (type != DType::kBF16 && type != DType::kInt8) {
    WriteKvRow(*p.layout, p.block, p.slot, 0, p.kv_heads, DType::kF32,
               reinterpret_cast<const std::byte*>(p.kv));
    return;
  }
  const int dim = p.head_dim;
  for (int h = 0; h < p.kv_heads; ++h) {
    const float* const k = p.kv + h * dim;
    const float* const v = k + p.kv_heads * dim;
    alignas(64) std::byte row[(2 * kMaxHeadDim + 16) * 2];
    if (type == DType::kBF16) {
      auto* const numbers = reinterpret_cast<uint16_t*>(row);
      RoundRow(k, dim, numbers);
      RoundRow(v, dim, numbers + dim);
    } else {
      auto* const codes = reinterpret_cast<int8_t*>(row);
      const float scales[2] = {QuantiseVector(k, dim, codes),
                               QuantiseVector(v, dim, codes + dim)};
      std::memcpy(codes + 2 * dim, scales, sizeof scales);
    }
    WriteKvRow(*p.layout, p.block, p.slot, h, h + 1, type, row);
  }
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

void AddElementwise(KernelTable& table) {
  const bool wide = table.isa == Isa::kAvx512;
  table.rms_norm = wide ? N_AVX3::RmsNormRow : N_AVX2::RmsNormRow;
  table.layer_norm = wide ? N_AVX3::LayerNormRow : N_AVX2::LayerNormRow;
  table.gate = wide ? N_AVX3::GateRow : N_AVX2::GateRow;
  table.route = wide ? N_AVX3::Route : N_AVX2::Route;
  table.add_weighted = wide ? N_AVX3::AddWeightedRow : N_AVX2::AddWeightedRow;
  table.activate = wide ? N_AVX3::ActivateRow : N_AVX2::ActivateRow;
  table.activate_times =
      wide ? N_AVX3::ActivateTimesRow : N_AVX2::ActivateTimesRow;
  table.scale = wide ? N_AVX3::ScaleRow : N_AVX2::ScaleRow;
  table.add_and_scale = wide ? N_AVX3::AddAndScaleRow : N_AVX2::AddAndScaleRow;
  table.exp = wide ? N_AVX3::ExpRow : N_AVX2::ExpRow;
  table.rope_append = wide ? N_AVX3::RopeAppendRow : N_AVX2::RopeAppendRow;
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
