// SPDX-License-Identifier: Apache-2.0
// The figures of docs/performance.md's GPU table, each beside a limit that the
// same run measured:
//
//   cuda_bench [--device cuda:0] [--weights bf16|fp8|int8|int4|w8a8]
//              [--seconds 420]
//              [--parts limits,decode,prefill,handoff,attention,matmul]
//              [--layers 32] [--quick]
//
// Random weights of the Llama-3.1-8B shape. A figure is a line "RESULT name
// value note", printed as it is found; scripts/gpu.sh table makes the table of
// them. What no time is left for is said, not begun. --quick: a toy shape (its
// lines say TOY), and without --device the backend over the grid emulator:
// tests this program.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "bench/gpu/arithmetic.h"
#include "bench/gpu/checkpoint.h"
#include "bench/gpu/engine_runs.h"
#include "bench/gpu/operation_runs.h"
#include "bench/gpu/yardstick.h"
#include "engine/model/model.h"
#include "kernels/cuda/loader.h"
#include "kernels/cuda/testing/host_device.h"

namespace tandem::bench {
namespace {

namespace fs = std::filesystem;
using kernels::DType;
using Clock = std::chrono::steady_clock;

struct Flags {
  std::string device;
  std::string weights = "bf16";
  std::string library;
  double seconds = 420;
  std::vector<std::string> parts = {"limits", "attention", "matmul",
                                    "decode", "prefill",   "handoff"};
  int layers = 0;
  bool quick = false;
};

// What is measured, large or as a toy.
struct Plan {
  Shape shape = kLlama8B;
  std::vector<int> batches = {1, 64, 256};
  int context = 1024;
  int decode_steps = 40;
  std::vector<int> prompts = {2048, 8192};
  int handoff_prompt = 2048;
  int repeats = 5;
  int attention_sequences = 64;
  int attention_context = 8192;
  std::vector<int> matmul_tokens = {1, 8, 16, 32, 64, 128, 256, 2048, 8192};
  int most_head_tokens = 256;
  int yardstick = 8192;
};

Plan Toy() {
  Plan plan;
  plan.shape = {2, 64, 4, 2, 16, 128, 256};
  plan.batches = {1, 3};
  plan.context = 20;
  plan.decode_steps = 4;
  plan.prompts = {24};
  plan.handoff_prompt = 24;
  plan.repeats = 1;
  plan.attention_sequences = 2;
  plan.attention_context = 40;
  plan.matmul_tokens = {1, 9};
  plan.most_head_tokens = 1;
  plan.yardstick = 64;
  return plan;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Bench {
 public:
  Bench(Flags flags, Plan plan)
      : flags_(std::move(flags)), plan_(std::move(plan)) {}
  ~Bench() {
    std::error_code ignored;
    if (!toy_folder_.empty()) fs::remove_all(toy_folder_, ignored);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  absl::Status Run() {
    absl::Status status = Open();
    if (!status.ok()) return status;
    const std::pair<const char*, absl::Status (Bench::*)()> parts[] = {
        {"limits", &Bench::MeasureLimits}, {"attention", &Bench::Attention},
        {"matmul", &Bench::MatMuls},       {"decode", &Bench::Decode},
        {"prefill", &Bench::Prefill},      {"handoff", &Bench::Handoff}};
    for (const auto& [name, part] : parts) {
      if (std::find(flags_.parts.begin(), flags_.parts.end(), name) ==
          flags_.parts.end()) {
        continue;
      }
      // One part's failure is not another's.
      if (absl::Status s = (this->*part)(); !s.ok()) {
        Line(absl::StrFormat("FAILED\t%s\t%s", name, s.ToString()));
        status.Update(s);
      }
    }
    return status;
  }

 private:
  double Elapsed() const {
    return std::chrono::duration<double>(Clock::now() - begin_).count();
  }
  bool Late(const std::string& what) const {
    if (Elapsed() < flags_.seconds) return false;
    Line(absl::StrCat("SKIPPED\t", what, "\tno time was left"));
    return true;
  }
  static void Line(const std::string& line) {
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }
  // A toy's are no results.
  void Result(const std::string& name, double value,
              const std::string& note) const {
    Line(absl::StrFormat("%s\t%s\t%.4g\t%s", flags_.quick ? "TOY" : "RESULT",
                         name, value, note));
  }
  static void Fact(const std::string& key, const std::string& value) {
    Line(absl::StrCat("FACT\t", key, "\t", value));
  }
  void Say(const std::string& what) const {
    Line(absl::StrFormat("# %6.1f s  %s", Elapsed(), what));
  }

  absl::Status Open() {
    kernels::cuda::DeviceOptions options;
    options.device = flags_.device;
    options.library = flags_.library;
    if (flags_.device == "emulated") {
      auto backend = kernels::cuda::testing::NewEmulatedBackend({});
      if (!backend.ok()) return backend.status();
      backend_ = *std::move(backend);
      yardstick_ = NewHostYardstick();
    } else {
      auto opened = kernels::cuda::OpenDevice(options);
      if (!opened.ok()) return opened.status();
      backend_ = std::move(opened->backend);
      yardstick_ = NewCudaYardstick();
      if (yardstick_ == nullptr) {
        return absl::FailedPreconditionError(
            "this program was built without CUDA: preset cuda");
      }
    }
    const std::time_t now = std::time(nullptr);
    char date[16];
    std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
    Fact("date", date);
    Fact("backend", backend_->description());
    Fact("numerics", backend_->numerics());
    for (const auto& [key, value] : yardstick_->Facts()) Fact(key, value);
    return SetWidths();
  }

  absl::Status SetWidths() {
    const auto type = WeightType();
    if (!type.ok()) return type.status();
    constexpr double kScales = 2.0 / kernels::kCodeGroup;  // f16
    if (*type == DType::kFp8 || *type == DType::kW8A8) widths_.weight = 1;
    if (*type == DType::kInt8) widths_.weight = 1 + kScales;
    if (*type == DType::kInt4) widths_.weight = 0.5 + kScales;
    if (kernels::HasIntegerProducts(*type)) {
      widths_.head = 1 + kScales;
    }
    return absl::OkStatus();
  }

  // ---- Limits: everything else needs them.

  absl::Status MeasureLimits() {
    auto copy = yardstick_->CopyBandwidth();
    if (!copy.ok()) return copy.status();
    limits_.bytes_per_second = *copy;
    Result("limit.copy", *copy * 1e-9, "GB/s read and written");
    const int n = plan_.yardstick;
    auto seconds = yardstick_->BestMatMul(n, n, n);
    if (!seconds.ok()) return seconds.status();
    limits_.flops_per_second = 2.0 * n * n * n / *seconds;
    Result("limit.matrix", limits_.flops_per_second * 1e-12,
           absl::StrCat("TFLOP/s of cuBLASLt in bf16 at ", n, " cubed"));
    return absl::OkStatus();
  }
  absl::Status NeedLimits() const {
    if (limits_.bytes_per_second > 0 && limits_.flops_per_second > 0) {
      return absl::OkStatus();
    }
    return absl::FailedPreconditionError("no limits to compare with");
  }

  // ---- Attention alone.

  absl::Status Attention() {
    if (Late("attention")) return absl::OkStatus();
    const DType kv = backend_->activation_type();
    const int context = plan_.attention_context;
    const int sequences = plan_.attention_sequences;
    auto decode =
        TimeAttention(*backend_, plan_.shape, sequences, 1, context, kv);
    if (!decode.ok()) return decode.status();
    const double bytes = 2.0 * plan_.shape.kv_heads * plan_.shape.head_dim * 2 *
                         context * sequences;
    Result("attention.decode", bytes / *decode / limits_.bytes_per_second,
           absl::StrFormat("batch %d, context %d: %.1f us, %.0f GB/s of KV",
                           sequences, context, *decode * 1e6,
                           bytes / *decode * 1e-9));
    auto prefill =
        TimeAttention(*backend_, plan_.shape, 1, context, context, kv);
    if (!prefill.ok()) return prefill.status();
    const Work work = AttentionWork(plan_.shape, context, context, widths_);
    Result("attention.prefill", work.flops / *prefill * 1e-12,
           absl::StrFormat("TFLOP/s, %d tokens, causal: %.1f us", context,
                           *prefill * 1e6));
    return absl::OkStatus();
  }

  // ---- The model, once for the parts that need it.

  absl::Status NeedModel() {
    if (model_ != nullptr) return absl::OkStatus();
    auto folder = CheckpointFolder(plan_.shape);
    if (!folder.ok()) return folder.status();
    if (flags_.quick) {  // may run beside others; gone with the program
      toy_folder_ = *folder += absl::StrCat("-", getpid());
    }
    const int positions =
        2 * std::max({plan_.context, *std::max_element(plan_.prompts.begin(),
                                                       plan_.prompts.end())});
    absl::Status status =
        WriteRandomCheckpoint(plan_.shape, positions, *folder);
    if (!status.ok()) return status;
    Say(absl::StrCat("random weights are in ", *folder));
    auto spec = engine::LoadModelSpec(*folder);
    if (!spec.ok()) return spec.status();
    auto checkpoint = engine::Checkpoint::Open(*folder);
    if (!checkpoint.ok()) return checkpoint.status();
    auto type = WeightType();
    if (!type.ok()) return type.status();
    engine::LoadOptions load{.weight_dtype = backend_->activation_type()};
    if (*type != DType::kBF16) load.quantisation = *type;
    auto model = engine::Model::Load(*spec, *checkpoint, load, backend_.get());
    if (!model.ok()) return model.status();
    model_ = *std::move(model);
    Say(absl::StrCat("weights are on the device: ", model_->weight_format()));
    return absl::OkStatus();
  }
  absl::StatusOr<DType> WeightType() const {
    for (const DType type : {DType::kBF16, DType::kFp8, DType::kInt8,
                             DType::kInt4, DType::kW8A8}) {
      if (kernels::Name(type) == flags_.weights) return type;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("--weights ", flags_.weights,
                     ", expected bf16, fp8, int8, int4 or w8a8"));
  }
  // `positions` of KV in all; groups of layers are what a handoff sends.
  absl::StatusOr<std::unique_ptr<EngineRuns>> NewRuns(int max_rows,
                                                      int sequences,
                                                      int64_t positions,
                                                      int layers_per_group) {
    engine::DeviceExecutorOptions options;
    options.max_rows = max_rows;
    options.max_sequences = sequences;
    options.num_blocks = static_cast<int>((positions + options.block_size - 1) /
                                          options.block_size) +
                         sequences;
    options.kv_dtype = backend_->activation_type();
    options.layers_per_group = layers_per_group;
    return EngineRuns::Create(options, model_.get(), backend_.get());
  }

  // ---- Decode.

  absl::Status Decode() {
    if (absl::Status s = NeedLimits(); !s.ok()) return s;
    if (absl::Status s = NeedModel(); !s.ok()) return s;
    const int most = plan_.batches.back();
    const int room = plan_.context + 2 * plan_.decode_steps;
    auto runs = NewRuns(std::max(plan_.prompts.back(), most), most,
                        int64_t{most} * (room + 16), 0);
    if (!runs.ok()) return runs.status();
    for (const int batch : plan_.batches) {
      const std::string name = absl::StrCat(flags_.weights, ".", batch);
      if (Late("decode." + name)) continue;
      absl::Status status = (*runs)->Fill(batch, plan_.context, room);
      if (!status.ok()) return status;
      std::vector<double> alone;
      std::vector<double> ahead;
      for (int i = 0; i < (plan_.repeats > 1 ? 3 : 1); ++i) {
        for (const bool two : {false, true}) {
          auto seconds =
              (*runs)->Decode(plan_.context, plan_.decode_steps, two);
          if (!seconds.ok()) return seconds.status();
          (two ? ahead : alone).push_back(*seconds);
        }
      }
      const double step = Median(alone);
      const double busy = Median(ahead);
      const double bytes =
          DecodeBytes(plan_.shape, batch, plan_.context, widths_);
      const double limit = LimitSeconds(
          StepWork(plan_.shape, batch, 1, plan_.context, widths_), limits_);
      const double ratio =
          batch == 1 ? bytes / limits_.bytes_per_second / busy : limit / busy;
      Result("decode." + name, ratio,
             absl::StrFormat(
                 "%.3f ms a step, limit %.3f ms, %.0f tokens/s", busy * 1e3,
                 (batch == 1 ? bytes / limits_.bytes_per_second : limit) * 1e3,
                 batch / busy));
      Result("host." + name, std::max(0.0, step - busy) * 1e6,
             absl::StrFormat("us, hidden by running ahead; %.3f ms a step "
                             "without",
                             step * 1e3));
    }
    return absl::OkStatus();
  }

  // ---- Prefill, and what a handoff adds.

  absl::Status Prefill() {
    if (absl::Status s = NeedLimits(); !s.ok()) return s;
    if (absl::Status s = NeedModel(); !s.ok()) return s;
    const int most = plan_.prompts.back();
    auto runs = NewRuns(most, 1, most, 0);
    if (!runs.ok()) return runs.status();
    for (const int tokens : plan_.prompts) {
      const std::string name =
          absl::StrCat("prefill.", flags_.weights, ".", tokens);
      if (Late(name)) continue;
      absl::Status status = (*runs)->Fill(1, tokens, tokens);
      if (!status.ok()) return status;
      std::vector<double> times;
      for (int i = 0; i < plan_.repeats; ++i) {
        auto seconds = (*runs)->Prefill(tokens);
        if (!seconds.ok()) return seconds.status();
        times.push_back(*seconds);
      }
      const double flops =
          Sum(StepWork(plan_.shape, 1, tokens, tokens, widths_)).flops;
      const double seconds = Median(times);
      Result(
          name, flops / seconds / limits_.flops_per_second,
          absl::StrFormat("%.2f ms, %.0f TFLOP/s, %.0f tokens/s", seconds * 1e3,
                          flops / seconds * 1e-12, tokens / seconds));
    }
    return absl::OkStatus();
  }

  absl::Status Handoff() {
    if (Late("handoff")) return absl::OkStatus();
    if (absl::Status s = NeedModel(); !s.ok()) return s;
    const int tokens = plan_.handoff_prompt;
    auto runs = NewRuns(tokens, 1, tokens, std::max(1, plan_.shape.layers / 8));
    if (!runs.ok()) return runs.status();
    if (absl::Status s = (*runs)->Fill(1, tokens, tokens); !s.ok()) return s;
    const auto bytes = static_cast<size_t>((*runs)->kv_bytes(tokens));
    auto slab = backend_->Allocate(bytes);
    if (!slab.ok()) return slab.status();
    auto pinned = backend_->AllocateHost(bytes);
    if (!pinned.ok()) return pinned.status();
    const std::pair<const char*, std::byte*> stagings[] = {
        {"handoff.device", (*slab)->data()},
        {"handoff.host", (*pinned)->data()}};
    for (const auto& [name, staging] : stagings) {
      std::vector<double> plain;
      std::vector<double> gathered;
      for (int i = 0; i < plan_.repeats; ++i) {
        auto without = (*runs)->Prefill(tokens);
        if (!without.ok()) return without.status();
        auto with = (*runs)->PrefillAndGather(tokens, staging);
        if (!with.ok()) return with.status();
        plain.push_back(*without);
        gathered.push_back(*with);
      }
      Result(name, Median(gathered) / Median(plain) - 1,
             absl::StrFormat("%d tokens: %.2f ms, with their KV (%.0f MB) "
                             "gathered %.2f ms",
                             tokens, Median(plain) * 1e3,
                             static_cast<double>(bytes) * 1e-6,
                             Median(gathered) * 1e3));
    }
    return absl::OkStatus();
  }

  // ---- What exactness costs: own products over the best of any.

  absl::Status MatMuls() {
    if (absl::Status s = NeedModel(); !s.ok()) return s;
    using Layer = engine::Model::Layer;
    const std::pair<const char*, std::unique_ptr<kernels::Matrix> Layer::*>
        matrices[] = {{"qkv", &Layer::qkv},
                      {"output", &Layer::output},
                      {"gate_up", &Layer::gate_up},
                      {"down", &Layer::down}};
    for (const auto& [name, member] : matrices) {
      std::vector<const kernels::Matrix*> all;
      for (const Layer& layer : model_->layers()) {
        all.push_back((layer.*member).get());
      }
      if (absl::Status s =
              MatMulsOf(name, all, plan_.matmul_tokens.back(), widths_);
          !s.ok()) {
        return s;
      }
    }
    // In bf16, or int8 beside int8, int4 and w8a8.
    return MatMulsOf("head", {&model_->head()}, plan_.most_head_tokens,
                     {.weight = widths_.head});
  }
  absl::Status MatMulsOf(const char* name,
                         const std::vector<const kernels::Matrix*>& all,
                         int most_tokens, const Widths& widths) {
    const int rows = all[0]->rows();
    const int cols = all[0]->cols();
    for (const int tokens : plan_.matmul_tokens) {
      if (tokens > most_tokens) continue;
      const std::string id =
          absl::StrCat("exact.", flags_.weights, ".", name, ".", tokens);
      if (Late(id)) continue;
      auto own = TimeMatMul(*backend_, all, tokens,
                            std::string_view(name) == "gate_up");
      if (!own.ok()) return own.status();
      auto best = yardstick_->BestMatMul(tokens, rows, cols);
      if (!best.ok()) return best.status();
      const Work work = MatMulWork(tokens, rows, cols, widths);
      Result(id, *own / *best,
             absl::StrFormat(
                 "%d x %d: %.1f us, %.0f GB/s, %.0f TFLOP/s; cuBLASLt's best "
                 "%.1f us",
                 rows, cols, *own * 1e6, work.bytes / *own * 1e-9,
                 work.flops / *own * 1e-12, *best * 1e6));
    }
    return absl::OkStatus();
  }

  const Flags flags_;
  const Plan plan_;
  const Clock::time_point begin_ = Clock::now();
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Yardstick> yardstick_;
  Widths widths_;
  Limits limits_;
  std::string toy_folder_;
  std::unique_ptr<engine::Model> model_;
};

absl::StatusOr<Flags> Parse(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--quick") {
      flags.quick = true;
      continue;
    }
    if (i + 1 >= argc) {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown option, or no value: ", argv[i]));
    }
    const char* const value = argv[++i];
    bool good = true;
    if (name == "--device") {
      flags.device = value;
    } else if (name == "--library") {
      flags.library = value;
    } else if (name == "--weights") {
      flags.weights = value;
    } else if (name == "--parts") {
      flags.parts = absl::StrSplit(value, ',');
    } else if (name == "--seconds") {
      good = absl::SimpleAtod(value, &flags.seconds);
    } else if (name == "--layers") {
      good = absl::SimpleAtoi(value, &flags.layers) && flags.layers > 0;
    } else {
      good = false;
    }
    if (!good) {
      return absl::InvalidArgumentError(
          absl::StrCat(argv[i - 1], " ", value, " is not understood"));
    }
  }
  if (flags.device.empty()) flags.device = flags.quick ? "emulated" : "cuda:0";
  return flags;
}

int Main(int argc, char** argv) {
  absl::StatusOr<Flags> flags = Parse(argc, argv);
  absl::Status status = flags.status();
  if (status.ok()) {
    Plan plan = flags->quick ? Toy() : Plan();
    if (flags->layers > 0) plan.shape.layers = flags->layers;
    status = Bench(*flags, plan).Run();
  }
  if (status.ok()) return 0;
  std::fprintf(stderr, "cuda_bench: %s\n", status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace tandem::bench

int main(int argc, char** argv) { return tandem::bench::Main(argc, argv); }
