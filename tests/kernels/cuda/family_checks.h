// SPDX-License-Identifier: Apache-2.0
// What the kernels of single model families must do, as checks.h has it for
// those of all: LayerNorm, norms of heads, activations without gates, experts,
// scaled and capped logits.

#ifndef TANDEM_TESTS_KERNELS_CUDA_FAMILY_CHECKS_H_
#define TANDEM_TESTS_KERNELS_CUDA_FAMILY_CHECKS_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "tests/kernels/cuda/checks.h"
#include "tests/kernels/route_reference.h"

namespace tandem::kernels::cuda {

inline AssertionResult Near(DType type, const std::vector<float>& got,
                            const std::vector<double>& expected,
                            double slack = 2e-6) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const double bound =
        (1.01 * UnitOf(type) + slack) * std::fabs(expected[i]) + slack;
    if (!(std::fabs(got[i] - expected[i]) <= bound)) {
      return AssertionFailure() << Name(type) << ", element " << i << ": "
                                << got[i] << " for " << expected[i];
    }
  }
  return AssertionSuccess();
}

inline void Fill(Guarded& memory, DType type,
                 const std::vector<float>& values) {
  const auto bytes = Encode(type, values);
  std::memcpy(memory.data(), bytes.data(), bytes.size());
}

// ---- LayerNorm.

using LayerNormFn = int (*)(const Stream&, DType, const LayerNormParams&);

inline AssertionResult CheckLayerNorm(const LayerNormFn& launch) {
  const int rows = 3;
  for (const DType type : kTypes) {
    for (const int dim : kSizes) {
      const auto x = RandomOf(type, int64_t{rows} * dim, 81, 3.0f);
      const auto delta = RandomOf(type, int64_t{rows} * dim, 82);
      const auto weight = RandomFloats(At(dim), 83);
      const auto bias = RandomFloats(At(dim), 84);
      const auto added = Encode(type, delta);
      Guarded in(type, int64_t{rows} * dim);
      Guarded out(type, int64_t{rows} * dim);
      Fill(in, type, x);
      TANDEM_LAUNCHED(launch(StreamOf(Generation::kHopper), type,
                             {in.data(), added.data(), weight.data(),
                              bias.data(), out.data(), rows, dim, 1e-5f}));
      auto sums = x;
      for (size_t i = 0; i < sums.size(); ++i) {
        sums[i] = RoundedTo(type, sums[i] + delta[i]);
      }
      if (auto same = SameBits(in.Values(), sums); !same) return same;
      if (type == DType::kF32) {
        Device cpu(MakeBackend());
        float* const normed = cpu.New<float>(sums.size());
        cpu->LayerNorm(cpu.queue(), rows, dim, 1e-5f, cpu.Upload(sums), nullptr,
                       cpu.Upload(weight), cpu.Upload(bias), normed);
        if (auto same =
                SameBits(out.Values(), cpu.Download(normed, sums.size()));
            !same) {
          return same;
        }
      }
      std::vector<double> expected;
      for (int row = 0; row < rows; ++row) {
        const float* const v = &sums[At(int64_t{row} * dim)];
        const double mean = std::accumulate(v, v + dim, 0.0) / dim;
        double squares = 0;
        for (int i = 0; i < dim; ++i) squares += (v[i] - mean) * (v[i] - mean);
        const double scale = 1 / std::sqrt(squares / dim + 1e-5);
        for (int i = 0; i < dim; ++i) {
          expected.push_back((v[i] - mean) * scale * weight[At(i)] +
                             bias[At(i)]);
        }
      }
      if (auto near = Near(type, out.Values(), expected, 1e-5); !near) {
        return near << ", dim " << dim;
      }
      if (!in.Kept() || !out.Kept()) return AssertionFailure() << "overrun";
    }
  }
  return AssertionSuccess();
}

// Heads 1 to 3 of rows of 5: by weights of their own, as rows of their own.
inline AssertionResult CheckCentredHeads(const LayerNormFn& launch) {
  const int rows = 3, heads = 3, all = 5, dim = 40;
  const auto weight = RandomFloats(At(heads * dim), 88);
  const std::vector<float> zeros(At(dim));
  for (const DType type : kTypes) {
    auto expected = RandomOf(type, int64_t{rows} * all * dim, 89, 3.0f);
    Guarded x(type, int64_t{rows} * all * dim);
    Fill(x, type, expected);
    std::byte* const middle =
        static_cast<std::byte*>(x.data()) + dim * SizeOf(type);
    TANDEM_LAUNCHED(launch(StreamOf(Generation::kHopper), type,
                           {middle, nullptr, weight.data(), nullptr, middle,
                            rows, dim, 1e-5f, heads, all * dim}));
    for (int i = 0; i < rows * heads; ++i) {
      const int head = i % heads;
      const auto begin = expected.begin() + (i / heads * all + 1 + head) * dim;
      Guarded own(type, dim);
      Fill(own, type, {begin, begin + dim});
      TANDEM_LAUNCHED(launch(StreamOf(Generation::kHopper), type,
                             {own.data(), nullptr, &weight[At(head * dim)],
                              zeros.data(), own.data(), 1, dim, 1e-5f}));
      const auto normed = own.Values();
      std::copy(normed.begin(), normed.end(), begin);
    }
    if (auto same = SameBits(x.Values(), expected); !same) return same;
    if (!x.Kept()) return AssertionFailure() << "overrun";
  }
  return AssertionSuccess();
}

// ---- Norms of heads, where nothing is rotated before them, or they are: Q in
// place, K in the cache.

using HeadNormFn = int (*)(const Stream&, DType, const RopeAppendParams&);

inline AssertionResult CheckHeadNorms(const HeadNormFn& launch, bool rotated) {
  const std::vector<int32_t> positions = {0, 9};
  const std::vector<int32_t> slots = {3, 17};
  const int rows = 2, heads = 3, kv_heads = 1;
  for (const DType type : kTypes) {
    for (const int dim : {8, 40, 256, 576}) {
      const int width = (heads + 2 * kv_heads) * dim;
      const int half = dim / 2;
      auto qkv = RandomOf(type, int64_t{rows} * width, 85);
      const auto cos = RandomFloats(At(10 * half), 83);
      const auto sin = RandomFloats(At(10 * half), 84);
      const auto query_norm = RandomFloats(At(dim), 86);
      const auto key_norm = RandomFloats(At(dim), 87);
      const auto value_norm = RandomFloats(At(dim), 92);
      KvView kv{nullptr, type, 2, kv_heads, dim, 16};
      Guarded cache(type, kv.layer_stride());
      kv.data = cache.data();
      Guarded normed(type, int64_t{rows} * width);
      Fill(normed, type, qkv);
      TANDEM_LAUNCHED(launch(StreamOf(Generation::kHopper), type,
                             {.positions = positions.data(),
                              .slots = slots.data(),
                              .cos = rotated ? cos.data() : nullptr,
                              .sin = rotated ? sin.data() : nullptr,
                              .pairs = half,
                              .qkv = normed.data(),
                              .kv = kv,
                              .num_rows = rows,
                              .heads = heads,
                              .layer = 0,
                              .query_norm = query_norm.data(),
                              .key_norm = key_norm.data(),
                              .value_norm = value_norm.data(),
                              .norm_eps = 1e-6f,
                              .norms_rotated = rotated}));
      const auto queries = normed.Values();
      const auto cached = cache.Values();
      std::vector<float> got;
      std::vector<double> expected;
      for (int row = 0; row < rows; ++row) {
        for (int head = 0; head < heads + 2 * kv_heads; ++head) {
          const size_t at = At(int64_t{row} * width + head * dim);
          const bool value = head >= heads + kv_heads;
          for (int i = 0; rotated && !value && i < half; ++i) {
            float& a = qkv[at + At(i)];
            float& b = qkv[at + At(half + i)];
            const size_t angle = At(positions[At(row)] * half + i);
            const float turned = a * cos[angle] - b * sin[angle];
            b = RoundedTo(type, b * cos[angle] + a * sin[angle]);
            a = RoundedTo(type, turned);
          }
          double squares = 0;
          for (int i = 0; i < dim; ++i) {
            squares += double{qkv[at + At(i)]} * qkv[at + At(i)];
          }
          const double scale = 1 / std::sqrt(squares / dim + 1e-6);
          const int slot = slots[At(row)];
          const size_t key =
              At(kv.Offset(0, slot / 16, value ? 1 : 0, 0, slot % 16));
          const bool query = head < heads;
          const auto& weight = query   ? query_norm
                               : value ? value_norm
                                       : key_norm;
          for (int i = 0; i < dim; ++i) {
            got.push_back(query ? queries[at + At(i)] : cached[key + At(i)]);
            expected.push_back(qkv[at + At(i)] * scale * weight[At(i)]);
          }
        }
      }
      if (auto near = Near(type, got, expected); !near) {
        return near << ", head dimension " << dim;
      }
      if (!cache.Kept() || !normed.Kept())
        return AssertionFailure() << "overrun";
    }
  }
  return AssertionSuccess();
}

// ---- Sums that are scaled, activations, and logits scaled and capped.

using AddAndScaleFn = int (*)(const Stream&, DType, const AddAndScaleParams&);

// Of f32 the CPU's bits.
inline AssertionResult CheckAddAndScale(const AddAndScaleFn& launch) {
  const int rows = 3;
  const float scale = 0.37f;
  for (const DType type : kTypes) {
    for (const int dim : kSizes) {
      const auto x = RandomOf(type, int64_t{rows} * dim, 90);
      const auto delta = RandomOf(type, int64_t{rows} * dim, 91);
      Guarded sum(type, int64_t{rows} * dim);
      Guarded added(type, int64_t{rows} * dim);
      Fill(sum, type, x);
      Fill(added, type, delta);
      TANDEM_LAUNCHED(launch(StreamOf(Generation::kHopper), type,
                             {added.data(), sum.data(), rows, dim, scale}));
      std::vector<float> expected;
      for (size_t i = 0; i < x.size(); ++i) {
        expected.push_back(
            RoundedTo(type, RoundedTo(type, x[i] + delta[i]) * scale));
      }
      if (auto same = SameBits(sum.Values(), expected); !same) {
        return same << ", dim " << dim;
      }
      if (type == DType::kF32) {
        Device cpu(MakeBackend());
        float* const same_x = cpu.Upload(x);
        cpu->AddAndScale(cpu.queue(), rows, dim, scale, cpu.Upload(delta),
                         same_x);
        const auto got = cpu.Download(same_x, x.size());
        if (auto same = SameBits(got, expected); !same) return same;
      }
      if (!sum.Kept()) return AssertionFailure() << "overrun";
    }
  }
  return AssertionSuccess();
}

using ActivateFn = int (*)(const Stream&, DType, const ActivateParams&);

// Times rows that lie apart, in f32: as the CPU has it; in other types rounded
// once, so that it is at least as near as the two steps.
inline AssertionResult CheckActivateTimes(const ActivateFn& launch, DType type,
                                          int dim, Activation what,
                                          const std::vector<float>& x) {
  const int rows = static_cast<int>(x.size()) / dim;
  const int stride = dim + 3;
  const auto by = RandomOf(type, int64_t{rows} * stride, 89, 2.0f);
  Guarded in(type, int64_t{rows} * dim);
  Fill(in, type, x);
  Guarded other(type, int64_t{rows} * stride);
  Fill(other, type, by);
  TANDEM_LAUNCHED(launch(StreamOf(Generation::kHopper), type,
                         {in.data(), rows, dim, what, other.data(), stride}));
  Device cpu(MakeBackend());
  float* const same_x = cpu.Upload(x);
  cpu->ActivateTimes(cpu.queue(), rows, dim, what, cpu.Upload(by), stride,
                     same_x);
  const auto expected = cpu.Download(same_x, x.size());
  if (!in.Kept() || !other.Kept()) return AssertionFailure() << "overrun";
  if (type == DType::kF32) return SameBits(in.Values(), expected);
  return Near(type, in.Values(),
              std::vector<double>(expected.begin(), expected.end()));
}

inline AssertionResult CheckActivate(const ActivateFn& launch) {
  const int rows = 3;
  for (const DType type : kTypes) {
    for (const int dim : kSizes) {
      for (const Activation what : {Activation::kSilu, Activation::kGeluTanh,
                                    Activation::kGelu, Activation::kRelu2}) {
        const auto x = RandomOf(type, int64_t{rows} * dim, 88, 4.0f);
        Guarded in(type, int64_t{rows} * dim);
        Fill(in, type, x);
        TANDEM_LAUNCHED(launch(StreamOf(Generation::kHopper), type,
                               {in.data(), rows, dim, what}));
        std::vector<double> expected;
        for (const float v : x) {
          const double cube = v + 0.044715 * v * v * v;
          const double positive = std::max(v, 0.0f);
          expected.push_back(
              what == Activation::kSilu ? v / (1 + std::exp(-double{v}))
              : what == Activation::kGelu
                  ? 0.5 * v * std::erfc(-v / std::sqrt(2.0))
              : what == Activation::kRelu2
                  ? positive * positive
                  : 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * cube)));
        }
        if (auto near = Near(type, in.Values(), expected); !near) {
          return near << ", dim " << dim;
        }
        if (type == DType::kF32) {
          Device cpu(MakeBackend());
          float* const same_x = cpu.Upload(x);
          cpu->Activate(cpu.queue(), rows, dim, what, same_x);
          if (auto same = SameBits(in.Values(), cpu.Download(same_x, x.size()));
              !same) {
            return same;
          }
        }
        if (!in.Kept()) return AssertionFailure() << "overrun";
        if (auto times = CheckActivateTimes(launch, type, dim, what, x);
            !times) {
          return times << ", times, dim " << dim;
        }
      }
    }
  }
  return AssertionSuccess();
}

using ScaleLogitsFn = int (*)(const Stream&, const ScaleLogitsParams&);

inline AssertionResult CheckScaleLogits(const ScaleLogitsFn& launch) {
  const int count = 3;
  for (const int vocab : kSizes) {
    for (const float cap : {0.0f, 5.0f}) {
      const auto logits = RandomFloats(At(count * vocab), 89, 9.0f);
      Guarded memory(DType::kF32, count * vocab);
      Fill(memory, DType::kF32, logits);
      TANDEM_LAUNCHED(launch(
          StreamOf(Generation::kHopper),
          {reinterpret_cast<float*>(memory.data()), count, vocab, 0.75f, cap}));
      std::vector<double> expected;
      for (const float x : logits) {
        const double y = 0.75 * x;
        expected.push_back(cap > 0 ? cap * std::tanh(y / cap) : y);
      }
      if (auto near = Near(DType::kF32, memory.Values(), expected); !near) {
        return near;
      }
      Device cpu(MakeBackend());
      float* const same_logits = cpu.Upload(logits);
      cpu->ScaleLogits(cpu.queue(), count, vocab, 0.75f, cap, same_logits);
      if (auto same = SameBits(memory.Values(),
                               cpu.Download(same_logits, logits.size()));
          !same) {
        return same;
      }
      if (!memory.Kept()) return AssertionFailure() << "overrun";
    }
  }
  return AssertionSuccess();
}

// ---- Experts: which are chosen.

using RouteFn = int (*)(const Stream&, const RouteParams&);

inline AssertionResult CheckRoute(const RouteFn& launch) {
  const int rows = 130;  // more than a block has threads
  auto logits = RandomFloats(At(rows * 13), 90, 2.0f);
  logits[3] = logits[5] = 20;  // a tie goes to the lower id
  const auto bias = RandomFloats(12, 91, 0.5f);
  const auto scales = RandomFloats(12, 92);
  const std::vector<float> none;
  for (RouteOptions options : RouteCases()) {
    for (const auto& [biased, scaled] :
         {std::pair(false, false), {true, false}, {false, true}}) {
      options.choice_bias = biased ? bias.data() : nullptr;
      options.expert_scales = scaled ? scales.data() : nullptr;
      Guarded weights(DType::kF32, rows * options.weights());
      TANDEM_LAUNCHED(
          launch(StreamOf(Generation::kHopper),
                 {logits.data(), reinterpret_cast<float*>(weights.data()), rows,
                  options}));
      std::vector<double> expected;
      for (int row = 0; row < rows; ++row) {
        const auto own = RouteReference(options, biased ? bias : none,
                                        &logits[At(row * options.logits())],
                                        scaled ? scales : none);
        expected.insert(expected.end(), own.begin(), own.end());
      }
      if (auto near = Near(DType::kF32, weights.Values(), expected); !near) {
        return near << ", " << options.chosen << " chosen";
      }
      Device cpu(MakeBackend());
      float* const same_weights = cpu.New<float>(expected.size());
      RouteOptions same_options = options;
      if (biased) same_options.choice_bias = cpu.Upload(bias);
      if (scaled) same_options.expert_scales = cpu.Upload(scales);
      cpu->Route(cpu.queue(), rows, same_options, cpu.Upload(logits),
                 same_weights);
      if (auto same = SameBits(weights.Values(),
                               cpu.Download(same_weights, expected.size()));
          !same) {
        return same;
      }
      if (!weights.Kept()) return AssertionFailure() << "overrun";
    }
  }
  return AssertionSuccess();
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_TESTS_KERNELS_CUDA_FAMILY_CHECKS_H_
