// SPDX-License-Identifier: Apache-2.0
// CPU kernels beside this machine's limits, in one table:
//
//   kernels_bench [--threads N] [--isa auto|avx2|avxvnni|avx512|avx512vnni|
//                 avx512bf16|amx]
//                 [--fetching auto|intel|amd]
//                 [--weights bf16|int8|int4|w8a8] [--kv bf16|fp8|int8|int4]
//                 [--quick]
//                 [--model 135m|500m] [--rows 1,16,512] [--no-attention]
//   kernels_bench [--threads N] --limits BYTES,BYTES,...
//
// Read bandwidth is measured over a set as large as the weights, and the FMA
// peak by a loop in assembly (compilers halve it). Products of a model's
// layers run in sequence, so that the weights come from where they would in a
// step. A sample is one layer, timed on the queue's own thread; every figure
// is the tenth percentile of many, since on a shared machine the slower ones
// measure the neighbours.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/available_cpus.h"
#include "common/cpu_limits.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"

namespace {

using namespace tandem::kernels;  // NOLINT: a program of one file

struct Model {
  const char* name;
  int layers, dim, heads, kv_heads, head_dim, hidden, vocab;
  int qkv() const { return (heads + 2 * kv_heads) * head_dim; }
};
const Model kModels[] = {{"135m", 30, 576, 9, 3, 64, 1536, 49152},
                         {"500m", 24, 896, 14, 2, 64, 4864, 151936}};

// What to measure.
struct Chosen {
  std::string_view model;  // empty: all
  std::vector<size_t> rows = {1, 2, 4, 8, 12, 16, 32, 64, 96, 128, 256, 512};
  DType weights = DType::kBF16;
  DType kv = DType::kBF16;
  bool attention = true;
};

using Clock = std::chrono::steady_clock;

double TenthPercentile(std::vector<double> seconds) {
  const auto at =
      seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 10);
  std::nth_element(seconds.begin(), at, seconds.end());
  return *at;
}

double Since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

class Bench {
 public:
  Bench(std::unique_ptr<Backend> backend, int threads, bool wide,
        tandem::IntegerDots dots, CpuInputs inputs, bool quick)
      : pool_(threads, std::chrono::microseconds(50)),
        backend_(std::move(backend)),
        queue_(backend_->NewQueue("bench")),
        wide_(wide),
        dots_(dots),
        inputs_(inputs),
        passes_(quick ? 3 : 7) {}

  // FMA, and where this CPU has instructions for them (else 0) dot products:
  // of integers 4 multiplications and additions to a lane, of bf16 2.
  void Limits() {
    std::printf("%s\n", backend_->description().c_str());
    peak_ = Peak([&](int64_t rounds) { return tandem::RunFma(wide_, rounds); });
    std::printf("FMA peak %.0f GFLOP/s\n", peak_);
    dot_peak_ = Peak(
        [&](int64_t rounds) { return tandem::RunIntegerDots(dots_, rounds); });
    std::printf("int8 dot peak (%s) %.0f Gop/s\n",
                dots_ == tandem::IntegerDots::kMultiplyAdd
                    ? "vpmaddubsw, vpmaddwd, vpaddd"
                    : "vpdpbusd",
                dot_peak_);
    if (wide_ && tandem::CpuHasBf16Dots()) {
      pair_peak_ = Peak(tandem::RunBf16Dots);
      std::printf("bf16 dot peak (vdpbf16ps) %.0f GFLOP/s\n", pair_peak_);
    }
    if (tandem::CpuHasTiles()) {
      tile_peak_ = Peak(tandem::RunBf16Tiles);
      std::printf("bf16 tile peak (tdpbf16ps) %.0f GFLOP/s\n", tile_peak_);
    }
  }

  // Billions of operations a second of `run`, on all threads.
  double Peak(absl::FunctionRef<double(int64_t)> run) {
    std::vector<double> seconds;
    double operations = 0;
    for (int i = 0; i < 100 * passes_; ++i) {
      std::atomic<int64_t> sum{0};
      cpu::ThreadPool::Team team(&pool_);
      const auto begin = Clock::now();
      team.Run([&](int) { sum += static_cast<int64_t>(run(20000)); });
      seconds.push_back(Since(begin));
      operations = static_cast<double>(sum.load());
    }
    return operations / TenthPercentile(seconds) * 1e-9;
  }

  double ReadBandwidth(size_t bytes) {
    // Samples of 2 MB per thread, through the whole set again and again.
    constexpr size_t kSample = size_t{2} << 20;
    const size_t step = kSample * static_cast<size_t>(pool_.threads());
    bytes = std::max(bytes, step);
    auto buffer = *backend_->Allocate(bytes);
    std::memset(buffer->data(), 1, bytes);
    std::vector<double> seconds;
    for (int pass = 0; pass < passes_; ++pass) {
      for (size_t at = 0; at + step <= bytes; at += step) {
        cpu::ThreadPool::Team team(&pool_);
        const auto begin = Clock::now();
        team.Run([&](int member) {
          tandem::ReadMemory(
              buffer->data() + at + kSample * static_cast<size_t>(member),
              kSample);
        });
        seconds.push_back(Since(begin));
      }
    }
    return static_cast<double>(step) / TenthPercentile(seconds) * 1e-9;
  }

  // Tenth percentile of one layer's time, over passes through all layers.
  template <typename Layer>
  double LayerSeconds(int layers, int passes, const Layer& put) {
    std::vector<Clock::time_point> times(static_cast<size_t>(layers) + 1);
    std::vector<double> seconds;
    for (int pass = 0; pass < passes; ++pass) {
      queue_->Callback([&times] { times[0] = Clock::now(); });
      for (int layer = 0; layer < layers; ++layer) {
        put(layer);
        const size_t end = static_cast<size_t>(layer) + 1;
        queue_->Callback([&times, end] { times[end] = Clock::now(); });
      }
      queue_->Synchronize();
      for (size_t i = 1; i < times.size(); ++i) {
        seconds.push_back(
            std::chrono::duration<double>(times[i] - times[i - 1]).count());
      }
    }
    return TenthPercentile(seconds);
  }

  // One JSON object, with the read bandwidth over sets of these many bytes.
  void PrintLimits(const std::vector<size_t>& sets) {
    std::printf(
        "{\"fma\": %.6g, \"dot\": %.6g, \"pairs\": %.6g, \"tiles\": %.6g",
        peak_ * 1e9, dot_peak_ * 1e9, pair_peak_ * 1e9, tile_peak_ * 1e9);
    for (const size_t bytes : sets) {
      std::printf(", \"%zu\": %.6g", bytes, ReadBandwidth(bytes) * 1e9);
    }
    std::printf("}\n");
  }

  void Run(const Model& model, const Chosen& chosen) {
    const DType type = chosen.weights;
    const std::pair<int, int> shapes[] = {
        {model.qkv(), model.dim},
        {model.dim, model.heads * model.head_dim},
        {2 * model.hidden, model.dim},
        {model.dim, model.hidden}};
    std::vector<std::unique_ptr<Matrix>> weights;
    double numbers = 0;  // operations per row
    std::vector<uint16_t> source(
        static_cast<size_t>(2 * model.hidden) *
        static_cast<size_t>(std::max(model.dim, model.hidden)));
    std::mt19937 random(1);
    for (uint16_t& value : source) {
      value = static_cast<uint16_t>(0x3c00 + (random() & 0x81ff));
    }
    for (int layer = 0; layer < model.layers; ++layer) {
      for (const auto& [rows, cols] : shapes) {
        weights.push_back(*backend_->PackMatrix(
            {reinterpret_cast<const std::byte*>(source.data()), DType::kBF16,
             rows, cols},
            type));
        numbers += 2.0 * rows * cols;
      }
    }
    // Scales and all: int8 has 2 bytes more per group of 32.
    const double bytes = numbers / 2 *
                         (type == DType::kInt8   ? 34.0 / 32
                          : type == DType::kInt4 ? 18.0 / 32
                          : type == DType::kW8A8 ? 1
                                                 : 2);
    const bool codes = HasIntegerProducts(type);
    const double peak = codes ? dot_peak_ : Bf16Products();
    const double bandwidth = ReadBandwidth(static_cast<size_t>(bytes));
    std::printf("\n%s: %.0f MB of %s weights, read at %.1f GB/s\n", model.name,
                bytes * 1e-6, Name(type).data(), bandwidth);
    std::printf("  %5s %10s %8s %8s %10s %8s\n", "rows", "ms", "GB/s",
                "of read", "GFLOP/s", "of peak");
    float* const x = New(512 * std::max(model.hidden, model.dim), 0.5f);
    float* const out = New(512 * 2 * model.hidden, 0.0f);
    for (const size_t some : chosen.rows) {
      const int rows = static_cast<int>(std::min<size_t>(some, 512));
      // Many rows: weights are no longer the limit, so few layers will do.
      const int layers = rows >= 64 ? 8 : model.layers;
      const double share = 1.0 / model.layers;
      const double seconds =
          LayerSeconds(layers, rows >= 64 ? 2 : passes_, [&](int layer) {
            for (int i = 4 * layer; i < 4 * layer + 4; ++i) {
              backend_->MatMul(*queue_, rows, x,
                               *weights[static_cast<size_t>(i)], nullptr, out);
            }
          });
      const double rate = bytes * share / seconds * 1e-9;
      const double flops = numbers * share * rows / seconds * 1e-9;
      std::printf("  %5d %10.2f %8.1f %7.0f%% %10.1f %7.0f%%\n", rows,
                  seconds / share * 1e3, rate, 100 * rate / bandwidth, flops,
                  peak == 0 ? 0 : 100 * flops / peak);
    }
    if (codes || !chosen.attention) return;
    Attention(model, chosen.kv, bandwidth);
    Sampling(model);
  }

 private:
  float* New(int count, float value) {
    buffers_.push_back(*backend_->Allocate(static_cast<size_t>(count) * 4));
    float* const data = reinterpret_cast<float*>(buffers_.back()->data());
    std::fill(data, data + count, value);
    return data;
  }

  void Attention(const Model& model, DType type, double bandwidth) {
    struct Case {
      const char* name;
      int sequences, rows, context;
    };
    const Case cases[] = {{"decode", 1, 1, 512},    {"decode", 1, 1, 4096},
                          {"decode", 16, 1, 512},   {"decode", 32, 1, 512},
                          {"prefill", 1, 512, 512}, {"prefill", 1, 512, 4096}};
    std::printf("  attention, %s KV, all layers\n", Name(type).data());
    std::printf("  %-8s %5s %5s %8s %10s %8s %8s %10s %8s\n", "", "seqs",
                "rows", "context", "ms", "GB/s", "of read", "GFLOP/s",
                "of peak");
    for (const Case& c : cases) {
      const int blocks = (c.context + 15) / 16;
      auto cache =
          *backend_->NewKvCache({model.layers, model.kv_heads, model.head_dim,
                                 16, blocks * c.sequences, type});
      std::vector<int32_t> tables(static_cast<size_t>(blocks * c.sequences));
      std::iota(tables.begin(), tables.end(), 0);
      std::vector<RowSpan> spans;
      spans.reserve(static_cast<size_t>(c.sequences));
      for (int i = 0; i < c.sequences; ++i) {
        spans.push_back({i * c.rows, c.rows, c.context - c.rows, i * blocks});
      }
      // Ordinary values everywhere: scatter one row to every position.
      std::vector<uint16_t> wire(
          static_cast<size_t>(2 * model.kv_heads * model.head_dim) *
              static_cast<size_t>(c.context) *
              static_cast<size_t>(model.layers),
          0x3e00);
      for (int i = 0; i < c.sequences; ++i) {
        KvRange range{tables.data() + int64_t{i} * blocks,
                      0,
                      c.context,
                      0,
                      model.layers,
                      0,
                      model.kv_heads};
        backend_->KvScatter(*queue_, *cache, range, DType::kBF16,
                            reinterpret_cast<const std::byte*>(wire.data()));
        queue_->Synchronize();
      }
      Rows rows;
      rows.num_rows = c.sequences * c.rows;
      rows.num_spans = c.sequences;
      rows.block_tables = tables.data();
      rows.spans = rows.host_spans = spans.data();
      const float* const qkv = New(rows.num_rows * model.qkv(), 0.1f);
      float* const out =
          New(rows.num_rows * model.heads * model.head_dim, 0.0f);
      const double seconds =
          model.layers *
          LayerSeconds(model.layers, c.rows > 1 ? 1 : passes_, [&](int layer) {
            backend_->Attention(*queue_, rows, model.heads, {0.125f}, qkv,
                                model.qkv(), *cache, layer, out);
          });
      const double kv =
          static_cast<double>(cache->shape().bytes_per_position()) * c.context *
          c.sequences;
      const double keys =
          c.rows * (c.context - c.rows) + 0.5 * c.rows * (c.rows + 1);
      const double flops = 4.0 * keys * c.sequences * model.heads *
                           model.head_dim * model.layers;
      std::printf("  %-8s %5d %5d %8d %10.2f %8.1f %7.0f%% %10.1f %7.0f%%\n",
                  c.name, c.sequences, c.rows, c.context, seconds * 1e3,
                  kv / seconds * 1e-9, 100 * kv / seconds * 1e-9 / bandwidth,
                  flops / seconds * 1e-9,
                  100 * flops / seconds * 1e-9 / F32OrPairs());
    }
  }

  void Sampling(const Model& model) {
    float* const logits = New(model.vocab, 0.0f);
    std::mt19937 random(2);
    std::normal_distribution<float> normal(0.0f, 3.0f);
    for (int i = 0; i < model.vocab; ++i) logits[i] = normal(random);
    std::printf("  one row of %d logits, microseconds:", model.vocab);
    const std::pair<const char*, SampleParams> cases[] = {
        {"greedy", {}},
        {"temperature", {.temperature = 1.0f}},
        {"top-k 40 top-p 0.95",
         {.temperature = 0.8f, .top_p = 0.95f, .top_k = 40}},
        {"greedy with 5 logprobs", {.logprobs = 5}}};
    for (const auto& [name, chosen] : cases) {
      const SampleParams params = chosen;  // clang 14 captures no bindings
      SampleResult result;
      const double seconds = LayerSeconds(100, 1, [&](int) {
        backend_->Sample(*queue_, 1, model.vocab, logits, &params, nullptr,
                         nullptr, &result);
      });
      std::printf(" %s %.0f;", name, seconds * 1e6);
    }
    std::printf("\n");
  }

  cpu::ThreadPool pool_;
  const std::unique_ptr<Backend> backend_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  const std::unique_ptr<Queue> queue_;
  const bool wide_;
  const tandem::IntegerDots dots_;
  const CpuInputs inputs_;
  const int passes_;
  // Of what products and attention with bf16 do.
  double F32OrPairs() const {
    return inputs_ == CpuInputs::kF32 ? peak_ : std::max(pair_peak_, peak_);
  }
  // Of what products with bf16 do.
  double Bf16Products() const {
    return inputs_ == CpuInputs::kBf16Amx && tile_peak_ > 0 ? tile_peak_
                                                            : F32OrPairs();
  }

  double peak_ = 0;
  double dot_peak_ = 0;
  double pair_peak_ = 0;
  double tile_peak_ = 0;
};

}  // namespace

// Numbers with commas between; empty if it is anything else.
std::vector<size_t> Numbers(char* text) {
  std::vector<size_t> numbers;
  for (char* at = text; *at != 0; at += *at == ',' ? 1 : 0) {
    numbers.push_back(std::strtoull(at, &at, 10));
    if (*at != ',' && *at != 0) return {};
  }
  return numbers;
}

int main(int argc, char** argv) {
  CpuOptions options;
  bool quick = false;
  Chosen chosen;
  std::vector<size_t> sets;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag == "--quick") {
      quick = true;
    } else if (flag == "--threads" && i + 1 < argc) {
      options.threads = std::atoi(argv[++i]);
    } else if (flag == "--isa" && i + 1 < argc) {
      options.instruction_set = argv[++i];
    } else if (flag == "--fetching" && i + 1 < argc) {
      const std::string_view value = argv[++i];
      options.fetching = value == "intel" ? CpuFetching::kIntel
                         : value == "amd" ? CpuFetching::kAmd
                                          : CpuFetching::kAuto;
    } else if (flag == "--limits" && i + 1 < argc) {
      sets = Numbers(argv[++i]);
    } else if (flag == "--rows" && i + 1 < argc) {
      chosen.rows = Numbers(argv[++i]);
    } else if (flag == "--model" && i + 1 < argc) {
      chosen.model = argv[++i];
    } else if (flag == "--no-attention") {
      chosen.attention = false;
    } else if (flag == "--bf16-inputs") {
      options.inputs = CpuInputs::kBf16;
    } else if (flag == "--bf16-amx-inputs") {
      options.inputs = CpuInputs::kBf16Amx;
    } else if ((flag == "--weights" || flag == "--kv") && i + 1 < argc) {
      const std::string_view value = argv[++i];
      (flag == "--kv" ? chosen.kv : chosen.weights) =
          value == "int8"   ? DType::kInt8
          : value == "fp8"  ? DType::kFp8
          : value == "int4" ? DType::kInt4
          : value == "w8a8" ? DType::kW8A8
                            : DType::kBF16;
    } else {
      std::fprintf(stderr,
                   "usage: kernels_bench [--threads N] "
                   "[--isa auto|avx2|avxvnni|avx512|avx512vnni|avx512bf16|amx] "
                   "[--fetching auto|intel|amd] "
                   "[--weights bf16|int8|int4|w8a8] [--bf16-inputs | "
                   "--bf16-amx-inputs] [--kv "
                   "bf16|fp8|int8|int4] [--quick] "
                   "[--model 135m|500m] [--rows 1,16,512] [--no-attention]\n");
      return 2;
    }
  }
  if (options.threads == 0) {
    options.threads = tandem::AvailableCpus();
  }
  auto backend = NewCpuBackend(options);
  if (!backend.ok()) {
    std::fprintf(stderr, "kernels_bench: %s\n",
                 std::string(backend.status().message()).c_str());
    return 1;
  }
  const bool wide =
      (*backend)->description().find("avx512") != std::string::npos;
  const std::string& isa = options.instruction_set;
  const tandem::IntegerDots dots =
      isa == "avx2" || isa == "avx512" ? tandem::IntegerDots::kMultiplyAdd
      : isa == "avxvnni"               ? tandem::IntegerDots::kVnni
                                       : tandem::FastestIntegerDots();
  Bench bench(*std::move(backend), options.threads, wide, dots, options.inputs,
              quick);
  bench.Limits();
  if (!sets.empty()) {
    bench.PrintLimits(sets);
    return 0;
  }
  for (const Model& model : kModels) {
    if (chosen.model.empty() || chosen.model == model.name) {
      bench.Run(model, chosen);
    }
  }
  return 0;
}
