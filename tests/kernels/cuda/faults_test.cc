// SPDX-License-Identifier: Apache-2.0
// The checks of checks.h can fail: each kernel family is compiled once more
// with one fault in it, and its check must notice. The kernels' sources are
// read with a word exchanged, into a namespace of their own; what they build
// on comes first and stays as it is.

#include "kernels/cuda/device/async_copy.h"
#include "kernels/cuda/device/codes.h"
#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/device/vectors.h"
#include "kernels/cuda/device/wgmma.h"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/matmul_codes.cuh"
#include "kernels/cuda/matmul_stream.cuh"
#include "kernels/cuda/matmul_wgmma.cuh"
#include "kernels/kv_digest.h"
#include "kernels/sampling.h"
#include "tests/kernels/cuda/checks.h"
#include "tests/kernels/cuda/code_checks.h"
#include "tests/kernels/cuda/expert_checks.h"
#include "tests/kernels/cuda/family_checks.h"
#include "tests/kernels/cuda/lora_checks.h"

namespace tandem::kernels::cuda_faulty {
using namespace cuda;

template <int kPending>
void WaitForFewer(Grid& g) {
  WgmmaWait<kPending + 1>(g);
}
inline void MmaOfExchangedRows(Grid& g, int32_t (&d)[4], const uint32_t (&a)[4],
                               const uint32_t (&b)[2]) {
  const uint32_t exchanged[4] = {a[0], a[1], a[3], a[2]};
  MmaS8(g, d, exchanged, b);
}
}  // namespace tandem::kernels::cuda_faulty

#define cuda cuda_faulty

// The last element of an odd row is left out; what is likely is less so.
#define Smaller(a, b) ((b) < (a) ? (b)-1 : (a))
#define Exp(v) Exp(Mul(0.5f, v))
#include "kernels/cuda/elementwise.cuh"
#undef Exp
#undef Smaller

// The last element of an odd row is left out; a lane counts another's rows.
#define Smaller(a, b) ((b) < (a) ? (b)-1 : (a))
#define Shuffle(v, from) Shuffle(v, (from) ^ 1)
#include "kernels/cuda/experts.cuh"
#undef Shuffle
#undef Smaller

// Nobody waits for the other warps' sums.
#define Barrier WarpBarrier
#include "kernels/cuda/layer_norm.cuh"
#include "kernels/cuda/rms_norm.cuh"
#undef Barrier

// Turned the other way.
#define Sub Add
#include "kernels/cuda/rope_append.cuh"
#undef Sub

// All pieces of a row count as its first; all layers of a slice are at its
// start.
#define DigestFinish(sum, key, layer, position, piece) \
  DigestFinish(sum, key, layer, position, 0 * (piece))
#define layer_stride kv.kv_heads * 0
#include "kernels/cuda/kv_transfer.cuh"
#undef layer_stride
#undef DigestFinish

// The sequences of a request draw alike.
#define SampleBits(seed, sequence, position, id) \
  SampleBits(seed, 0, position, id)
#include "kernels/cuda/sample.cuh"
#undef SampleBits

// All rows take the first slot's adapter; gates stay as they are.
#define slot_stride slot_stride * 0
#define Gated(activation, gate, up) Mul(gate, up)
#include "kernels/cuda/lora.cuh"
#undef Gated
#undef slot_stride

// Tokens of another tile.
#undef TANDEM_KERNELS_CUDA_MATMUL_STREAM_CUH_
#define token_tile row_tile
#include "kernels/cuda/matmul_stream.cuh"
#undef token_tile

// Consumers give a place in the ring back while their instructions read it.
#undef TANDEM_KERNELS_CUDA_MATMUL_WGMMA_CUH_
#define WgmmaWait WaitForFewer
#include "kernels/cuda/matmul_wgmma.cuh"
#undef WgmmaWait

// The last inputs of two rows are exchanged.
#undef TANDEM_KERNELS_CUDA_MATMUL_CODES_CUH_
#define MmaS8 MmaOfExchangedRows
#include "kernels/cuda/matmul_codes.cuh"
#undef MmaS8

#undef cuda

namespace tandem::kernels::cuda {
namespace {

namespace faulty = cuda_faulty;

int GatherRows(const Stream& stream, DType type, const GatherRowsParams& p) {
  return WithElement(type, [&](auto zero) {
    using Kernel = faulty::GatherRowsKernel<decltype(zero)>;
    constexpr int kPerBlock = Kernel::kThreads * kChunk;
    return Launch(stream, {p.count, (p.dim + kPerBlock - 1) / kPerBlock, 1},
                  Kernel::kThreads, 0, Kernel{p});
  });
}

int RmsNorm(const Stream& stream, DType type, const RmsNormParams& p) {
  return WithElement(type, [&](auto zero) {
    using Kernel = faulty::RmsNormKernel<decltype(zero)>;
    return Launch(stream, {p.num_rows, 1, 1}, Kernel::kThreads,
                  Kernel::SharedBytes(p.dim), Kernel{p});
  });
}

int LayerNorm(const Stream& stream, DType type, const LayerNormParams& p) {
  return WithElement(type, [&](auto zero) {
    using Kernel = faulty::LayerNormKernel<decltype(zero)>;
    return Launch(stream, {p.num_rows, 1, 1}, Kernel::kThreads,
                  Kernel::SharedBytes(p.dim), Kernel{p});
  });
}

// A thread for each eight elements of a row.
template <typename Kernel, typename Params>
int Elementwise(const Stream& stream, int rows, int dim, const Params& p) {
  constexpr int kPerBlock = Kernel::kThreads * kChunk;
  return Launch(stream, {rows, (dim + kPerBlock - 1) / kPerBlock, 1},
                Kernel::kThreads, 0, Kernel{p});
}
int Activate(const Stream& stream, DType type, const ActivateParams& p) {
  return WithElement(type, [&](auto zero) {
    return Elementwise<faulty::ActivateKernel<decltype(zero)>>(
        stream, p.num_rows, p.dim, p);
  });
}
int SpreadRows(const Stream& stream, DType type, const SpreadRowsParams& p) {
  return WithElement(type, [&](auto zero) {
    return Elementwise<faulty::SpreadRowsKernel<decltype(zero)>>(
        stream, p.num_rows * p.chosen, p.dim, p);
  });
}
int SumExperts(const Stream& stream, DType type, const SumExpertsParams& p) {
  return WithElement(type, [&](auto zero) {
    return Elementwise<faulty::SumExpertsKernel<decltype(zero)>>(
        stream, p.num_rows, p.dim, p);
  });
}
int ExpertPlanOf(const Stream& stream, const ExpertPlanParams& p) {
  using Count = faulty::ExpertCountKernel;
  using Place = faulty::ExpertPlaceKernel;
  const int error = Launch(stream, {p.experts, 1, 1}, Count::kThreads,
                           Count::kSharedBytes, Count{p});
  if (error != 0) return error;
  return Launch(stream, {p.experts, 1, 1}, Place::kThreads, Place::kSharedBytes,
                Place{p});
}
int ScaleLogits(const Stream& stream, const ScaleLogitsParams& p) {
  return Elementwise<faulty::ScaleLogitsKernel>(stream, p.count, p.vocab, p);
}
int Route(const Stream& stream, const RouteParams& p) {
  using Kernel = faulty::RouteKernel;
  return Launch(stream,
                {(p.num_rows + Kernel::kThreads - 1) / Kernel::kThreads, 1, 1},
                Kernel::kThreads, 0, Kernel{p});
}

int RopeAppend(const Stream& stream, DType type, const RopeAppendParams& p) {
  return WithElement(type, [&](auto t) {
    return WithElement(p.kv.dtype, [&](auto c) {
      using Kernel = faulty::RopeAppendKernel<decltype(t), decltype(c), 5>;
      return Launch(stream, {p.num_rows, p.heads + 2 * p.kv.kv_heads, 1},
                    Kernel::kThreads, 0, Kernel{p});
    });
  });
}

template <template <typename, typename> typename Kernel>
int Slice(const Stream& stream, const KvSliceParams& p, int shared_bytes) {
  const Dim3 blocks{
      (p.position_end - p.position_begin + faulty::kKvPositions - 1) /
          faulty::kKvPositions,
      p.layer_end - p.layer_begin, 1};
  return WithElement(p.kv.dtype, [&](auto c) {
    return WithElement(p.wire, [&](auto w) {
      return Launch(stream, blocks, faulty::kKvThreads, shared_bytes,
                    Kernel<decltype(c), decltype(w)>{p});
    });
  });
}
int KvGather(const Stream& stream, const KvSliceParams& p) {
  return Slice<faulty::KvGatherKernel>(
      stream, p, faulty::KvGatherKernel<float, float>::SharedBytes(p));
}
int KvScatter(const Stream& stream, const KvSliceParams& p) {
  return Slice<faulty::KvScatterKernel>(stream, p, 0);
}

int Sample(const Stream& stream, const SampleKernelParams& p) {
  using Kernel = faulty::SampleKernel<faulty::kFewSampleThreads>;
  return Launch(stream, {p.count, 1, 1}, Kernel::kThreads, Kernel::kSharedBytes,
                Kernel{p});
}

int Lora(const Stream& stream, DType type, const LoraParams& p) {
  return WithElement(type, [&](auto zero) {
    using Shrink = faulty::LoraShrinkKernel<decltype(zero)>;
    using Expand = faulty::LoraExpandKernel<decltype(zero)>;
    const int code = Launch(stream, {p.num_rows, 2, 1}, Shrink::kThreads,
                            Shrink::SharedBytes(p), Shrink{p});
    if (code != 0) return code;
    constexpr int kThreads = Expand::kThreads;
    return Launch(stream,
                  {p.num_rows, (p.factors.rows + kThreads - 1) / kThreads, 1},
                  kThreads, 0, Expand{p});
  });
}
int GateHalves(const Stream& stream, DType type, const GateHalvesParams& p) {
  return WithElement(type, [&](auto zero) {
    using Kernel = faulty::GateHalvesKernel<decltype(zero)>;
    return Launch(
        stream,
        {p.num_rows, (p.dim + Kernel::kThreads - 1) / Kernel::kThreads, 1},
        Kernel::kThreads, 0, Kernel{p});
  });
}

// Bits of a product of 64 rows with 64 tokens.
template <typename Launch>
std::vector<std::byte> Product(const Launch& launch) {
  constexpr int kRows = 64;
  constexpr int kCols = 520;
  constexpr int kTokens = 64;
  const auto w = RandomFloats(At(int64_t{kRows} * kCols), 5, 0.1f);
  const PackedWeights weights = PackWeights(
      {reinterpret_cast<const std::byte*>(w.data()), DType::kF32, kRows, kCols},
      WeightType::kBF16);
  const auto x =
      Encode(DType::kBF16, RandomFloats(At(int64_t{kTokens} * kCols), 6));
  std::vector<std::byte> out(At(kTokens * kRows) * 2);
  MatMulParams p{};
  p.weights = weights.bytes.data();
  p.x = x.data();
  p.out = out.data();
  p.x_stride = kCols;
  p.out_stride = kRows;
  p.rows = kRows;
  p.cols = kCols;
  p.tokens = kTokens;
  p.outputs = kRows;
  EXPECT_EQ(launch(StreamOf(Generation::kHopper), p), 0)
      << emulator::LastFault();
  return out;
}

template <template <typename, typename, int, int, int> typename Kernel>
std::vector<std::byte> OfWarpgroups() {
  return Product([](const Stream& stream, const MatMulParams& p) {
    return LaunchStaying<Kernel<BFloat16, BFloat16, 1, 64, 2>>(
        stream, DType::kBF16, 1, p);
  });
}
template <template <typename, typename, typename> typename Kernel>
std::vector<std::byte> OfStreams() {
  return Product([](const Stream& stream, const MatMulParams& p) {
    return LaunchStaying<Kernel<BFloat16, BFloat16, MatMul16>>(
        stream, DType::kBF16, 1, p);
  });
}

TEST(CudaSeededFault, APlaceThatIsFilledTooEarlyIsNoticed) {
  const auto expected = OfWarpgroups<MatMulWgmmaKernel>();
  EXPECT_NE(OfWarpgroups<faulty::MatMulWgmmaKernel>(), expected);
  EXPECT_EQ(OfStreams<MatMulStreamKernel>(), expected);
}

template <template <typename, WeightType, typename> typename Kernel,
          WeightType kWeight>
int MultiplyCodes(const Stream& stream, DType, WeightType,
                  const MatMulParams& p) {
  using Codes = Kernel<BFloat16, kWeight, MatMulTiles<2, 1, 1, 1, 1, 8>>;
  return Launch(stream,
                {Codes::RowTiles(p.rows) * Codes::TokenTiles(p.tokens), 1, 1},
                Codes::kThreads, Codes::kSharedBytes, Codes{p});
}

template <WeightType kWeight>
void ExpectInputsOfAnotherRowNoticed(DType weight) {
  const CodeData data({DType::kBF16, weight, 40, 100}, 5);
  const auto expected = data.Expected(5);
  EXPECT_EQ(data.Multiply(5, MultiplyCodes<MatMulCodesKernel, kWeight>),
            expected);
  EXPECT_NE(data.Multiply(5, MultiplyCodes<faulty::MatMulCodesKernel, kWeight>),
            expected);
}

TEST(CudaSeededFault, InputsOfAnotherRowAreNoticed) {
  ExpectInputsOfAnotherRowNoticed<WeightType::kInt4>(DType::kInt4);
  ExpectInputsOfAnotherRowNoticed<WeightType::kW8A8>(DType::kW8A8);
}

TEST(CudaSeededFault, AStreamOfOtherTokensIsNoticed) {
  EXPECT_NE(OfStreams<faulty::MatMulStreamKernel>(),
            OfStreams<MatMulStreamKernel>());
}

TEST(CudaSeededFault, ARowThatEndsEarlyIsNoticed) {
  EXPECT_FALSE(CheckGatherRows(GatherRows));
}

TEST(CudaSeededFault, AMissingBarrierInTheNormIsNoticedInEveryOrder) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    EXPECT_FALSE(CheckRmsNorm(RmsNorm));
  }
}

TEST(CudaSeededFault, AMissingBarrierInLayerNormIsNoticedInEveryOrder) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    EXPECT_FALSE(CheckLayerNorm(LayerNorm));
  }
}

TEST(CudaSeededFault, AnElementLeftOutOfAFamilysKernelIsNoticed) {
  EXPECT_FALSE(CheckActivate(Activate));
  EXPECT_FALSE(CheckScaleLogits(ScaleLogits));
  EXPECT_FALSE(CheckSpreadRows(SpreadRows));
  EXPECT_FALSE(CheckSumExperts(SumExperts));
}

TEST(CudaSeededFault, RowsOfExpertsInAnotherPlaceAreNoticed) {
  EXPECT_FALSE(CheckExpertPlan(ExpertPlanOf));
}

TEST(CudaSeededFault, WrongWeightsOfExpertsAreNoticed) {
  EXPECT_FALSE(CheckRoute(Route));
}

TEST(CudaSeededFault, AnotherRowsAdapterIsNoticed) {
  EXPECT_FALSE(CheckLora(Lora));
}

TEST(CudaSeededFault, GatesLeftOpenAreNoticed) {
  EXPECT_FALSE(CheckGateHalves(GateHalves));
}

TEST(CudaSeededFault, ARotationTheOtherWayIsNoticed) {
  EXPECT_FALSE(CheckRopeAppend(RopeAppend));
}

TEST(CudaSeededFault, ADigestThatConfusesPiecesIsNoticed) {
  const AssertionResult result = CheckKvGather(KvGather);
  EXPECT_FALSE(result);
  EXPECT_NE(std::string(result.message()).find("digest of 256"),
            std::string::npos)
      << result.message();
}

TEST(CudaSeededFault, LayersReadFromTheWrongPlaceAreNoticed) {
  EXPECT_FALSE(CheckKvScatter(KvScatter));
}

TEST(CudaSeededFault, SequencesThatDrawAlikeAreNoticed) {
  EXPECT_FALSE(CheckSampleDraws(Sample));
}

}  // namespace
}  // namespace tandem::kernels::cuda
