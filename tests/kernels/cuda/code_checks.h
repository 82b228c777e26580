// SPDX-License-Identifier: Apache-2.0
// Products with int8 and int4 weights, and what the CPU backend makes of them.

#ifndef TANDEM_TESTS_KERNELS_CUDA_CODE_CHECKS_H_
#define TANDEM_TESTS_KERNELS_CUDA_CODE_CHECKS_H_

#include <algorithm>
#include <string>
#include <vector>

#include "tests/kernels/cuda/fixture.h"

namespace tandem::kernels::cuda {

struct CodeProblem {
  DType type;  // of activations
  DType weight;
  int rows;
  int cols;
  bool bias = false;
  bool gated = false;  // rows: gates, then as many that they open

  int outputs() const { return gated ? rows / 2 : rows; }
};

inline std::string NameOf(const CodeProblem& p) {
  return std::string(Name(p.type)) + " by " + std::string(Name(p.weight)) +
         " " + std::to_string(p.rows) + " x " + std::to_string(p.cols);
}
inline WeightType CodeWeight(DType type) {
  return type == DType::kInt8 ? WeightType::kInt8 : WeightType::kInt4;
}

struct CodeData {
  CodeProblem problem;
  std::vector<float> w;
  std::vector<float> x;
  std::vector<float> bias;
  PackedWeights weights;

  CodeData(const CodeProblem& p, int tokens)
      : problem(p), w(RandomFloats(At(int64_t{p.rows} * p.cols), 5, 0.1f)) {
    // Which of equal magnitudes is a group's, and a group of zeros.
    for (size_t i = 0; i < At(p.cols); ++i) w[i] = i % 3 == 0 ? 0.5f : -0.5f;
    std::fill_n(w.begin() + p.cols, std::min(p.cols, 32), 0.0f);
    x = RandomFloats(At(int64_t{tokens} * p.cols), 6);
    for (float& value : x) value = RoundedTo(p.type, value);
    if (p.bias) bias = RandomFloats(At(p.rows), 7);
    Pack();
  }
  void Pack() {
    weights = PackWeights({reinterpret_cast<const std::byte*>(w.data()),
                           DType::kF32, problem.rows, problem.cols},
                          CodeWeight(problem.weight),
                          problem.gated ? RowOrder::kGated : RowOrder::kPlain);
  }

  using LaunchFn = int (*)(const Stream&, DType, WeightType,
                           const MatMulParams&);
  std::vector<float> Multiply(int tokens, LaunchFn launch) const {
    const CodeProblem& p = problem;
    const auto encoded = Encode(p.type, x);
    std::vector<std::byte> codes(At(CodeRowsBytes(tokens, p.cols)),
                                 std::byte{0xff});
    const Stream stream = StreamOf(Generation::kHopper);
    EXPECT_EQ(LaunchQuantiseRows(
                  stream, p.type,
                  {encoded.data(), codes.data(), p.cols, tokens, p.cols}),
              0)
        << emulator::LastFault();
    // Outputs that nobody writes show.
    std::vector<std::byte> out(
        At(int64_t{tokens} * p.outputs()) * SizeOf(p.type), std::byte{0xff});
    MatMulParams params{};
    params.weights = weights.bytes.data();
    params.scales = weights.scales.data();
    params.x = codes.data();
    params.bias = bias.empty() ? nullptr : bias.data();
    params.out = out.data();
    params.out_stride = p.outputs();
    params.rows =
        PackedRows(p.rows, p.gated ? RowOrder::kGated : RowOrder::kPlain);
    params.cols = p.cols;
    params.tokens = tokens;
    params.outputs = p.outputs();
    if (p.gated) params.output = MatMulOutput::kGated;
    EXPECT_EQ(launch(stream, p.type, CodeWeight(p.weight), params), 0)
        << emulator::LastFault();
    return Decode(p.type, out);
  }

  // The CPU's chains, rounded where a product in the type is.
  std::vector<float> Expected(int tokens) const {
    const CodeProblem& p = problem;
    Device cpu(MakeBackend());
    float* const out = cpu.New<float>(At(int64_t{tokens} * p.rows));
    cpu->MatMul(cpu.queue(), tokens, cpu.Upload(x),
                cpu.Pack(w, p.rows, p.cols, p.weight), nullptr, out);
    auto chains = cpu.Download(out, At(int64_t{tokens} * p.rows));
    for (size_t i = 0; i < chains.size(); ++i) {
      chains[i] = RoundedTo(p.type, chains[i]);
      if (p.bias) {
        chains[i] = RoundedTo(p.type, chains[i] + bias[i % At(p.rows)]);
      }
    }
    if (!p.gated) return chains;
    std::vector<float> gated;
    const int dim = p.rows / 2;
    for (int t = 0; t < tokens; ++t) {
      for (int i = 0; i < dim; ++i) {
        const size_t gate = At(int64_t{t} * p.rows + i);
        gated.push_back(
            RoundedTo(p.type, Activated(Activation::kSilu, chains[gate]) *
                                  chains[gate + At(dim)]));
      }
    }
    return gated;
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_TESTS_KERNELS_CUDA_CODE_CHECKS_H_
