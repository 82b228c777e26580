// SPDX-License-Identifier: Apache-2.0
// CPU kernels beside this machine's limits, in one table:
//
//   kernels_bench [--threads N] [--isa auto|avx2|avx512] [--quick] [--cpu-time]
//
// Read bandwidth is measured over a set of the same size as the weights that
// a row reads, and the FMA peak by a loop in assembly (compilers halve it).
// Products of a model's layers run in sequence, so that the weights come from
// where they would in a step. Every figure is the best of several passes: on
// a shared machine the others measure the neighbours. --cpu-time (best with
// one thread) counts the process's CPU time instead of the wall's, which
// leaves preemption out.

#include <time.h>

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

bool count_cpu_time = false;
int cpu_time_threads = 1;

double Now() {
  timespec now;
  clock_gettime(count_cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC,
                &now);
  const double seconds =
      static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  return count_cpu_time ? seconds / cpu_time_threads : seconds;
}

template <typename Body>
double BestSeconds(int passes, const Body& body) {
  double best = 1e30;
  for (int i = 0; i < passes; ++i) {
    const double begin = Now();
    body();
    best = std::min(best, Now() - begin);
  }
  return best;
}

// Sums nothing: four streams of loads per thread, kept by the assembler.
void Read(const std::byte* data, size_t bytes) {
  for (size_t i = 0; i + 256 <= bytes; i += 256) {
    asm volatile(
        "prefetcht0 4096(%0)\n\tprefetcht0 4160(%0)\n\t"
        "prefetcht0 4224(%0)\n\tprefetcht0 4288(%0)\n\t"
        "vmovups (%0), %%ymm0\n\tvmovups 32(%0), %%ymm1\n\t"
        "vmovups 64(%0), %%ymm2\n\tvmovups 96(%0), %%ymm3\n\t"
        "vmovups 128(%0), %%ymm4\n\tvmovups 160(%0), %%ymm5\n\t"
        "vmovups 192(%0), %%ymm6\n\tvmovups 224(%0), %%ymm7\n\t"
        :
        : "r"(data + i)
        : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7");
  }
}

// 12 chains of fused multiply-adds; returns how many operations they were.
#define TANDEM_FMA12(reg)                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "1\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "2\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "3\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "4\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "5\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "6\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "7\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "8\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "9\n\t"                                      \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "10\n\t"                                     \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg \
  "11\n\t"                                     \
  "vfmadd231ps %%" reg "0, %%" reg "0, %%" reg "12\n\t"
#define TANDEM_FMA_CLOBBERS                                               \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", \
      "xmm9", "xmm10", "xmm11", "xmm12"

double FmaLoop(bool wide, int64_t rounds) {
  if (wide) {
    for (int64_t i = 0; i < rounds; ++i) {
      asm volatile(TANDEM_FMA12("zmm") TANDEM_FMA12("zmm") TANDEM_FMA12("zmm")
                       TANDEM_FMA12("zmm")::
                           : TANDEM_FMA_CLOBBERS);
    }
  } else {
    for (int64_t i = 0; i < rounds; ++i) {
      asm volatile(TANDEM_FMA12("ymm") TANDEM_FMA12("ymm") TANDEM_FMA12("ymm")
                       TANDEM_FMA12("ymm")::
                           : TANDEM_FMA_CLOBBERS);
    }
  }
  return static_cast<double>(rounds) * 48 * (wide ? 16 : 8) * 2;
}

class Bench {
 public:
  Bench(std::unique_ptr<Backend> backend, int threads, bool wide, bool quick)
      : backend_(std::move(backend)),
        queue_(backend_->NewQueue("bench")),
        pool_(threads, std::chrono::microseconds(50)),
        wide_(wide),
        passes_(quick ? 3 : 7) {}

  void Limits() {
    double operations = 0;
    const double seconds = BestSeconds(4 * passes_, [&] {
      std::atomic<int64_t> sum{0};
      cpu::ThreadPool::Team team(&pool_);
      team.Run(
          [&](int) { sum += static_cast<int64_t>(FmaLoop(wide_, 200000)); });
      operations = static_cast<double>(sum.load());
    });
    peak_ = operations / seconds * 1e-9;
    std::printf("%s\nFMA peak %.0f GFLOP/s\n", backend_->description().c_str(),
                peak_);
  }

  double ReadBandwidth(size_t bytes) {
    auto buffer = *backend_->Allocate(bytes);
    std::memset(buffer->data(), 1, bytes);
    const size_t share = bytes / static_cast<size_t>(pool_.threads());
    const double seconds = BestSeconds(passes_, [&] {
      cpu::ThreadPool::Team team(&pool_);
      team.Run([&](int member) {
        Read(buffer->data() + share * static_cast<size_t>(member), share);
      });
    });
    return static_cast<double>(bytes) / seconds * 1e-9;
  }

  void Run(const Model& model) {
    const std::pair<int, int> shapes[] = {
        {model.qkv(), model.dim},
        {model.dim, model.heads * model.head_dim},
        {2 * model.hidden, model.dim},
        {model.dim, model.hidden}};
    std::vector<std::unique_ptr<Matrix>> weights;
    double bytes = 0;
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
            DType::kBF16));
        bytes += 2.0 * rows * cols;
      }
    }
    const double bandwidth = ReadBandwidth(static_cast<size_t>(bytes));
    std::printf("\n%s: %.0f MB of bf16 weights, read at %.1f GB/s\n",
                model.name, bytes * 1e-6, bandwidth);
    std::printf("  %5s %10s %8s %8s %10s %8s\n", "rows", "ms", "GB/s",
                "of read", "GFLOP/s", "of peak");
    float* const x = New(512 * std::max(model.hidden, model.dim), 0.5f);
    float* const out = New(512 * 2 * model.hidden, 0.0f);
    for (const int rows : {1, 2, 4, 8, 12, 16, 32, 64, 96, 128, 256, 512}) {
      const int layers = rows >= 64 ? 4 : model.layers;
      const double share = static_cast<double>(layers) / model.layers;
      const double seconds = BestSeconds(passes_, [&] {
        for (int i = 0; i < 4 * layers; ++i) {
          backend_->MatMul(*queue_, rows, x, *weights[static_cast<size_t>(i)],
                           nullptr, out);
        }
        queue_->Synchronize();
      });
      const double rate = bytes * share / seconds * 1e-9;
      const double flops = bytes * share * rows / seconds * 1e-9;
      std::printf("  %5d %10.2f %8.1f %7.0f%% %10.1f %7.0f%%\n", rows,
                  seconds / share * 1e3, rate, 100 * rate / bandwidth, flops,
                  100 * flops / peak_);
    }
    Attention(model, DType::kBF16, bandwidth);
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
        KvRange range{tables.data() + i * blocks,
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
      const double seconds = BestSeconds(passes_, [&] {
        for (int layer = 0; layer < model.layers; ++layer) {
          backend_->Attention(*queue_, rows, model.heads, 0.125f, qkv,
                              model.qkv(), *cache, layer, out);
        }
        queue_->Synchronize();
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
                  flops / seconds * 1e-9, 100 * flops / seconds * 1e-9 / peak_);
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
    for (const auto& [name, params] : cases) {
      SampleResult result;
      const double seconds = BestSeconds(passes_, [&] {
        for (int i = 0; i < 20; ++i) {
          backend_->Sample(*queue_, 1, model.vocab, logits, &params, nullptr, 0,
                           &result);
        }
        queue_->Synchronize();
      });
      std::printf(" %s %.0f;", name, seconds / 20 * 1e6);
    }
    std::printf("\n");
  }

  const std::unique_ptr<Backend> backend_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  const std::unique_ptr<Queue> queue_;
  cpu::ThreadPool pool_;
  const bool wide_;
  const int passes_;
  double peak_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  CpuOptions options;
  bool quick = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag == "--quick") {
      quick = true;
    } else if (flag == "--cpu-time") {
      count_cpu_time = true;
    } else if (flag == "--threads" && i + 1 < argc) {
      options.threads = std::atoi(argv[++i]);
    } else if (flag == "--isa" && i + 1 < argc) {
      options.instruction_set = argv[++i];
    } else {
      std::fprintf(stderr,
                   "usage: kernels_bench [--threads N] "
                   "[--isa auto|avx2|avx512] [--quick] [--cpu-time]\n");
      return 2;
    }
  }
  if (options.threads == 0) {
    options.threads = cpu::AvailableCpus();
  }
  cpu_time_threads = options.threads;
  auto backend = NewCpuBackend(options);
  if (!backend.ok()) {
    std::fprintf(stderr, "kernels_bench: %s\n",
                 std::string(backend.status().message()).c_str());
    return 1;
  }
  const bool wide =
      (*backend)->description().find("avx512") != std::string::npos;
  Bench bench(*std::move(backend), options.threads, wide, quick);
  bench.Limits();
  for (const Model& model : kModels) bench.Run(model);
  return 0;
}
