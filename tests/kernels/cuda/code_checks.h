// SPDX-License-Identifier: Apache-2.0
// Products with int8, int4 and W8A8 weights, and what they must be: of the
// first two what the CPU backend makes of them, of W8A8 its formula
// (kernels/quantise.h) in words of its own.

#ifndef TANDEM_TESTS_KERNELS_CUDA_CODE_CHECKS_H_
#define TANDEM_TESTS_KERNELS_CUDA_CODE_CHECKS_H_

#include <algorithm>
#include <memory>
#include <random>
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
  // Quantised before, with so many inputs to a scale (0: all) and, of int4,
  // with zeros. -1: quantised here.
  int group = -1;
  bool zeros = false;
  bool e2m1 = false;

  int outputs() const { return gated ? rows / 2 : rows; }
};

inline std::string NameOf(const CodeProblem& p) {
  return std::string(Name(p.type)) + " by " + std::string(Name(p.weight)) +
         " " + std::to_string(p.rows) + " x " + std::to_string(p.cols) +
         (p.group < 0 ? "" : " in groups of " + std::to_string(p.group)) +
         (p.zeros ? " with zeros" : "") + (p.e2m1 ? ", e2m1" : "");
}
inline WeightType CodeWeight(DType type) {
  return type == DType::kInt8   ? WeightType::kInt8
         : type == DType::kW8A8 ? WeightType::kW8A8
                                : WeightType::kInt4;
}

// Random codes and zeros, with scales that are f16 beside a power of two.
struct GivenCodes {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  std::vector<uint8_t> zeros;
  HostCodes view;

  explicit GivenCodes(const CodeProblem& p) {
    std::mt19937 random(9);
    const int group = p.group == 0 ? p.cols : p.group;
    const int groups = (p.cols + group - 1) / group;
    for (int i = 0; i < p.rows * p.cols; ++i) {
      codes.push_back(static_cast<uint8_t>(
          p.weight == DType::kInt4 ? random() % 16 : random()));
      // NaNs have no products to compare.
      if (p.weight == DType::kFp8 && codes.back() % 128 == 127) --codes.back();
    }
    for (int i = 0; i < p.rows * groups; ++i) {
      scales.push_back(
          RoundToBf16(static_cast<float>(1 + random() % 1000) * 1e-6f));
      if (p.zeros) zeros.push_back(static_cast<uint8_t>(random() % 17));
    }
    view = {p.weight,
            p.rows,
            p.cols,
            codes.data(),
            group,
            scales.data(),
            p.zeros ? zeros.data() : nullptr,
            p.e2m1};
  }
  GivenCodes(const GivenCodes&) = delete;
  GivenCodes& operator=(const GivenCodes&) = delete;

  // The number that a code stands for.
  float Value(int row, int col) const {
    const int64_t groups = (view.cols + view.group - 1) / view.group;
    const size_t group = At(row * groups + col / view.group);
    const uint8_t code = codes[At(row * view.cols + col)];
    const float number =
        view.e2m1 ? kTwiceE2m1[code]
        : view.dtype != DType::kInt4
            ? FloatFromCode(view.dtype, code)
            : static_cast<float>(code - (zeros.empty() ? 8 : zeros[group]));
    return number * scales[group];
  }
};

// Rows [count, cols], each quantised as a whole.
inline std::vector<Quantised> WholeRows(const std::vector<float>& values,
                                        int count, int cols) {
  std::vector<Quantised> rows;
  for (int row = 0; row < count; ++row) {
    rows.push_back(
        QuantisedOf(&values[At(int64_t{row} * cols)], At(cols), DType::kInt8));
  }
  return rows;
}

struct CodeData {
  CodeProblem problem;
  std::vector<float> w;
  std::vector<float> x;
  std::vector<float> bias;
  PackedWeights weights;
  std::unique_ptr<GivenCodes> given;

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
    const RowOrder order = problem.gated ? RowOrder::kGated : RowOrder::kPlain;
    if (problem.group >= 0) {
      given = std::make_unique<GivenCodes>(problem);
      weights = PackWeights(given->view, order);
      return;
    }
    weights = PackWeights({reinterpret_cast<const std::byte*>(w.data()),
                           DType::kF32, problem.rows, problem.cols},
                          CodeWeight(problem.weight), order);
  }
  WeightType type() const {
    return given == nullptr ? CodeWeight(problem.weight)
                            : TypeOfCodes(given->view);
  }

  using LaunchFn = int (*)(const Stream&, DType, WeightType,
                           const MatMulParams&);
  std::vector<float> Multiply(int tokens, LaunchFn launch) const {
    const CodeProblem& p = problem;
    const auto encoded = Encode(p.type, x);
    std::vector<std::byte> codes(At(CodeRowsBytes(tokens, p.cols)),
                                 std::byte{0xff});
    const Stream stream = StreamOf(Generation::kHopper);
    EXPECT_EQ(LaunchQuantiseRows(stream, p.type,
                                 {encoded.data(), codes.data(), p.cols, tokens,
                                  p.cols, p.weight == DType::kW8A8}),
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
    EXPECT_EQ(launch(stream, p.type, type(), params), 0)
        << emulator::LastFault();
    return Decode(p.type, out);
  }

  std::vector<float> WholeChains(int tokens) const {
    const CodeProblem& p = problem;
    std::vector<Quantised> rows;
    if (given == nullptr) {
      rows = WholeRows(w, p.rows, p.cols);
    } else {
      for (int row = 0; row < p.rows; ++row) {
        rows.push_back({{}, given->scales[At(row)]});
        for (int col = 0; col < p.cols; ++col) {
          const uint8_t code = given->codes[At(int64_t{row} * p.cols + col)];
          rows.back().codes.push_back(
              static_cast<float>(code < 128 ? code : code - 256));
        }
      }
    }
    std::vector<float> chains;
    for (const Quantised& token : WholeRows(x, tokens, p.cols)) {
      for (const Quantised& row : rows) {
        double dot = 0;  // exact
        for (size_t i = 0; i < At(p.cols); ++i) {
          dot += static_cast<double>(row.codes[i]) *
                 static_cast<double>(token.codes[i]);
        }
        const float scaled = static_cast<float>(dot) * token.scale;
        chains.push_back(row.scale * scaled);
      }
    }
    return chains;
  }

  std::vector<float> CpuChains(int tokens) const {
    const CodeProblem& p = problem;
    Device cpu(MakeBackend());
    float* const out = cpu.New<float>(At(int64_t{tokens} * p.rows));
    cpu->MatMul(cpu.queue(), tokens, cpu.Upload(x),
                given == nullptr ? cpu.Pack(w, p.rows, p.cols, p.weight)
                                 : cpu.PackCodes(given->view),
                nullptr, out);
    return cpu.Download(out, At(int64_t{tokens} * p.rows));
  }

  // Chains, rounded where a product in the type is.
  std::vector<float> Expected(int tokens) const {
    const CodeProblem& p = problem;
    auto chains =
        p.weight == DType::kW8A8 ? WholeChains(tokens) : CpuChains(tokens);
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
