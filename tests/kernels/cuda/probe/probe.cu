// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/device/vectors.h"
#include "tests/kernels/cuda/probe/probe.h"
#include "tests/kernels/cuda/probe/wgmma_forms.h"

namespace tandem::kernels::cuda {
namespace {

// The fragment of A that the lane holds: rows [row, row + 16) of one step.
TANDEM_DEVICE void LoadA(Grid& g, const uint16_t* a, int row, int step,
                         uint32_t (&fragment)[4]) {
  for (int i = 0; i < 4; ++i) {
    const int r = row + g.lane() / 4 + i % 2 * 8;
    const int k = step * 16 + g.lane() % 4 * 2 + i / 2 * 8;
    const uint16_t* const at = a + r * kProbeInputs + k;
    fragment[i] = at[0] | static_cast<uint32_t>(at[1]) << 16;
  }
}

TANDEM_DEVICE int RowOf(Grid& g, int row, int i) {
  return row + g.lane() / 4 + i / 2 * 8;
}
TANDEM_DEVICE int TokenOf(Grid& g, int tile, int i) {
  return tile * 8 + g.lane() % 4 * 2 + i % 2;
}

// A warp for every case, 16 rows and 8 tokens.
template <typename T>
struct ProbeMmaKernel {
  static constexpr int kThreads = 32;
  ProbeMatrixParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int64_t one = g.block_x();
    const int row = g.block_y() * 16;
    const int tile = g.block_z();
    const uint16_t* const a = p.a + one * kProbeRows * kProbeInputs;
    const uint16_t* const b = p.b + one * p.tokens * kProbeInputs;
    const int64_t base = one * kProbeRows * p.tokens;
    float d[4];
    for (int i = 0; i < 4; ++i) {
      d[i] = p.c[base + RowOf(g, row, i) * p.tokens + TokenOf(g, tile, i)];
    }
    for (int step = 0; step < p.steps; ++step) {
      uint32_t held[4];
      uint32_t tokens[2];
      LoadA(g, a, row, step, held);
      for (int i = 0; i < 2; ++i) {
        const int k = step * 16 + g.lane() % 4 * 2 + i * 8;
        const uint16_t* const at =
            b + (tile * 8 + g.lane() / 4) * kProbeInputs + k;
        tokens[i] = at[0] | static_cast<uint32_t>(at[1]) << 16;
      }
      MatrixStep<T>(g, d, held, tokens);
    }
    for (int i = 0; i < 4; ++i) {
      p.d[base + RowOf(g, row, i) * p.tokens + TokenOf(g, tile, i)] = d[i];
    }
  }
};

// A warpgroup for every case.
template <typename T, int kTokens, bool kHeld>
struct ProbeWgmmaKernel {
  static constexpr int kThreads = 128;
  static constexpr int kSharedBytes = (kProbeRows + kTokens) * 128 + 1024;
  ProbeMatrixParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    if constexpr (TANDEM_WGMMA) Multiply(g);
  }

 private:
  // Rows of 64 inputs, swizzled.
  TANDEM_DEVICE static void Fill(Grid& g, const uint16_t* from, int rows,
                                 std::byte* to) {
    for (int i = g.thread(); i < rows * 8; i += kThreads) {
      const int r = i / 8;
      const int c = i % 8;
      Store16(to + r * 128 + (c ^ (r % 8)) * 16,
              Load16(from + r * kProbeInputs + c * 8));
    }
  }

  TANDEM_DEVICE void Multiply(Grid& g) const {
    std::byte* const rows = AlignShared<1024>(g, g.shared());
    std::byte* const tokens = rows + kProbeRows * 128;
    const int64_t one = g.block_x();
    const uint16_t* const from = p.a + one * kProbeRows * kProbeInputs;
    Fill(g, from, kProbeRows, rows);
    Fill(g, p.b + one * kTokens * kProbeInputs, kTokens, tokens);
    ProxyFence(g);
    g.Barrier();
    const int row = g.warp() * 16;
    const int64_t base = one * kProbeRows * kTokens;
    float d[kTokens / 8][4];
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        d[n][i] = p.c[base + RowOf(g, row, i) * kTokens + TokenOf(g, n, i)];
      }
    }
    const uint64_t a = WgmmaDescriptor(SharedAddress(g, rows));
    const uint64_t b = WgmmaDescriptor(SharedAddress(g, tokens));
    for (int step = 0; step < p.steps; ++step) {
      uint32_t held[4];
      LoadA(g, from, row, step, held);
      WgmmaFence(g);
      if constexpr (kHeld) {
        WgmmaHeld<T>(g, d, held, b + step * 2, tokens);
      } else {
        WgmmaShared<T>(g, d, a + step * 2, b + step * 2);
      }
      WgmmaCommit(g);
      WgmmaWait<0>(g);
    }
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p.d[base + RowOf(g, row, i) * kTokens + TokenOf(g, n, i)] = d[n][i];
      }
    }
  }
};

template <typename T, int kTokens, bool kHeld>
int RunWgmma(const Stream& stream, const ProbeMatrixParams& p) {
  using Kernel = ProbeWgmmaKernel<T, kTokens, kHeld>;
  return Launch(stream, {p.cases, 1, 1}, Kernel::kThreads, Kernel::kSharedBytes,
                Kernel{p});
}

template <typename T, bool kHeld>
int RunTokens(const Stream& stream, const ProbeMatrixParams& p) {
  switch (p.tokens) {
    case 8:
      return RunWgmma<T, 8, kHeld>(stream, p);
    case 16:
      return RunWgmma<T, 16, kHeld>(stream, p);
    case 32:
      return RunWgmma<T, 32, kHeld>(stream, p);
    case 64:
      return RunWgmma<T, 64, kHeld>(stream, p);
    case 128:
      return RunWgmma<T, 128, kHeld>(stream, p);
    case 256:
      return RunWgmma<T, 256, kHeld>(stream, p);
    default:
      return kInvalidLaunch;
  }
}

template <typename T>
int RunStep(const Stream& stream, ProbeStep step, const ProbeMatrixParams& p) {
  if (step == ProbeStep::kWgmma) return RunTokens<T, false>(stream, p);
  if (step == ProbeStep::kWgmmaRegisters) return RunTokens<T, true>(stream, p);
  return Launch(stream, {p.cases, kProbeRows / 16, p.tokens / 8},
                ProbeMmaKernel<T>::kThreads, 0, ProbeMmaKernel<T>{p});
}

template <ProbeFunction kFunction>
struct ProbeMapKernel {
  static constexpr int kThreads = 256;
  ProbeMapParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int i = g.block_x() * kThreads + g.thread();
    if (i < p.count) p.out[i] = Of(p.x[i], p.y[i]);
  }

 private:
  TANDEM_DEVICE static float Of(float x, float y) {
    if constexpr (kFunction == ProbeFunction::kExp2) return Exp2(x);
    if constexpr (kFunction == ProbeFunction::kExp) return Exp(x);
    if constexpr (kFunction == ProbeFunction::kSqrt) return Sqrt(x);
    if constexpr (kFunction == ProbeFunction::kDiv) return Div(x, y);
    if constexpr (kFunction == ProbeFunction::kFmaChain) {
      for (int i = 0; i < 8; ++i) y = Fma(x, y, x);
      return y;
    }
    if constexpr (kFunction == ProbeFunction::kToBf16) {
      return RoundTo<BFloat16>(x);
    }
    if constexpr (kFunction == ProbeFunction::kToF16) return RoundTo<Half>(x);
    if constexpr (kFunction == ProbeFunction::kE4M3ToBf16) {
      return LowOfPair<BFloat16>(
          FromE4M3Pair<BFloat16>(FloatToBits(x) & 0xffu));
    }
    if constexpr (kFunction == ProbeFunction::kE4M3ToF16) {
      return LowOfPair<Half>(FromE4M3Pair<Half>(FloatToBits(x) & 0xffu));
    }
    return 0.0f;
  }
};

template <ProbeFunction kFunction>
int RunMap(const Stream& stream, const ProbeMapParams& p) {
  using Kernel = ProbeMapKernel<kFunction>;
  return Launch(stream, {(p.count + Kernel::kThreads - 1) / Kernel::kThreads},
                Kernel::kThreads, 0, Kernel{p});
}

}  // namespace

int LaunchProbeMatrix(const Stream& stream, ProbeStep step, bool half,
                      const ProbeMatrixParams& p) {
  return half ? RunStep<Half>(stream, step, p)
              : RunStep<BFloat16>(stream, step, p);
}

int LaunchProbeMap(const Stream& stream, ProbeFunction function,
                   const ProbeMapParams& p) {
  switch (function) {
    case ProbeFunction::kExp2:
      return RunMap<ProbeFunction::kExp2>(stream, p);
    case ProbeFunction::kExp:
      return RunMap<ProbeFunction::kExp>(stream, p);
    case ProbeFunction::kSqrt:
      return RunMap<ProbeFunction::kSqrt>(stream, p);
    case ProbeFunction::kDiv:
      return RunMap<ProbeFunction::kDiv>(stream, p);
    case ProbeFunction::kFmaChain:
      return RunMap<ProbeFunction::kFmaChain>(stream, p);
    case ProbeFunction::kToBf16:
      return RunMap<ProbeFunction::kToBf16>(stream, p);
    case ProbeFunction::kToF16:
      return RunMap<ProbeFunction::kToF16>(stream, p);
    case ProbeFunction::kE4M3ToBf16:
      return RunMap<ProbeFunction::kE4M3ToBf16>(stream, p);
    case ProbeFunction::kE4M3ToF16:
      return RunMap<ProbeFunction::kE4M3ToF16>(stream, p);
  }
  return kInvalidLaunch;
}

}  // namespace tandem::kernels::cuda
