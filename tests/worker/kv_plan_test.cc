// SPDX-License-Identifier: Apache-2.0
// How many KV blocks a worker takes on a CPU and on a GPU, and what it says
// where a sequence does not fit.

#include "worker/kv_plan.h"

#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "engine/model/layer_parts.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem::worker {
namespace {

using kernels::DType;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// The shape of Llama 3.1 8B: 128 KiB per position in bf16.
engine::ModelSpec Spec() {
  engine::ModelSpec spec;
  spec.layers = 32;
  spec.kv_heads = 8;
  spec.head_dim = 128;
  spec.max_positions = 131072;
  return spec;
}

constexpr int64_t kPosition = 131072;
constexpr int64_t kGiB = int64_t{1} << 30;

WorkerFlags Flags() {
  WorkerFlags flags;
  flags.block_size = 16;
  flags.max_num_seqs = 64;
  return flags;
}

struct Case {
  const char* what;
  int64_t kv_cache_bytes;
  double utilization;
  std::optional<GpuMemory> gpu;
  int64_t expected_bytes;
};

TEST(KvPlan, TakesWhatIsGivenOrTheShareThatIsLeft) {
  const Case cases[] = {
      {"CPU: a gigabyte", 0, 0.9, std::nullopt, kGiB},
      {"CPU: as asked", 3 * kGiB, 0.9, std::nullopt, 3 * kGiB},
      {"GPU: the share without what is used", 0, 0.5,
       GpuMemory{140 * kGiB, 20 * kGiB, 120 * kGiB}, 50 * kGiB},
      {"GPU: no more than is free", 0, 0.9,
       GpuMemory{140 * kGiB, 20 * kGiB, 30 * kGiB}, 30 * kGiB},
      {"GPU: as asked", 2 * kGiB, 0.9,
       GpuMemory{140 * kGiB, 20 * kGiB, 120 * kGiB}, 2 * kGiB},
      {"GPU: no more than all slots can use", 0, 1,
       GpuMemory{4096 * kGiB, 0, 4096 * kGiB}, 64 * 2 * 131072 * kPosition},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    WorkerFlags flags = Flags();
    flags.kv_cache_bytes = c.kv_cache_bytes;
    flags.gpu_memory_utilization = c.utilization;
    const auto plan = PlanKv(flags, Spec(), DType::kBF16, c.gpu);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->num_blocks, c.expected_bytes / (16 * kPosition));
    EXPECT_EQ(plan->max_model_len,
              std::min<int64_t>(131072, c.expected_bytes / kPosition));
  }
}

// On a CPU keys of eight positions take the room of sixteen.
TEST(KvPlan, CountsWhatBlocksArePaddedBy) {
  WorkerFlags flags = Flags();
  flags.block_size = 8;
  flags.kv_cache_bytes = 3 * kGiB;
  const auto cpu = PlanKv(flags, Spec(), DType::kBF16, std::nullopt);
  ASSERT_TRUE(cpu.ok()) << cpu.status();
  EXPECT_EQ(cpu->num_blocks, 3 * kGiB / (12 * kPosition));
  const auto gpu = PlanKv(flags, Spec(), DType::kBF16,
                          GpuMemory{16 * kGiB, kGiB, 15 * kGiB});
  ASSERT_TRUE(gpu.ok()) << gpu.status();
  EXPECT_EQ(gpu->num_blocks, 3 * kGiB / (8 * kPosition));
}

// A window of 4096 and steps of 512 rows: 4608 positions, and a block more.
TEST(KvPlan, WithAWindowThePoolHoldsWhatASequenceHasAtOnce) {
  WorkerFlags flags = Flags();
  flags.max_model_len = 65536;
  flags.max_num_batched_tokens = 512;
  for (const auto& [positions, window, fits] :
       {std::tuple{4624, 4096, true}, std::tuple{4608, 4096, false},
        std::tuple{4624, 0, false}}) {
    flags.kv_cache_bytes = positions * kPosition;
    const auto plan = PlanKv(flags, Spec(), DType::kBF16, std::nullopt, window);
    ASSERT_EQ(plan.ok(), fits) << positions << " " << plan.status();
    if (fits) {
      EXPECT_EQ(plan->max_model_len, 65536);
    }
  }
}

// Layers are in parts of one size: of 62 of which ten see all, 64 have room, in
// 16 parts of which three see all. A sequence of 8192 positions has 512 blocks
// of those, and of the others' what the window and a step of 512 rows take: 96
// and one more.
TEST(KvPlan, WhereSomeLayersSeeAllASequenceTakesPartsOfItsBlocks) {
  engine::ModelSpec spec = Spec();
  spec.window = 1024;
  spec.layers = 62;
  for (int i = 0; i < spec.layers; ++i) spec.windowed.push_back(i % 6 != 5);
  const engine::LayerParts layers = engine::PartsOf(spec);
  EXPECT_EQ(layers.room(), 64);
  ASSERT_EQ(layers.parts, (engine::KvParts{.full = 3, .windowed = 13}));
  WorkerFlags flags = Flags();
  flags.max_model_len = 8192;
  flags.max_num_batched_tokens = 512;
  const int64_t block = 16 * kPosition / Spec().layers * layers.room();
  const engine::KvWindow window = engine::WindowOf(spec);
  EXPECT_TRUE(window.frees_parts());
  constexpr int kNeeded = (512 * 3 + 97 * 13 + 15) / 16;
  flags.kv_cache_bytes = kNeeded * block;
  const auto plan = PlanKv(flags, spec, DType::kBF16, std::nullopt, window);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->num_blocks, kNeeded);
  flags.kv_cache_bytes -= block;
  const auto refused = PlanKv(flags, spec, DType::kBF16, std::nullopt, window);
  // The longest that fits: a block less takes 16 / 3 blocks' parts that see
  // all.
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("or lower --max-model-len to 8112"));
  flags.max_model_len = 8112;
  EXPECT_TRUE(PlanKv(flags, spec, DType::kBF16, std::nullopt, window).ok());
  flags.max_model_len = 0;
  const auto longest = PlanKv(flags, spec, DType::kBF16, std::nullopt, window);
  ASSERT_TRUE(longest.ok()) << longest.status();
  EXPECT_EQ(longest->max_model_len, 8112);
}

TEST(KvPlan, TooLittleMemorySaysHowMuchContextFits) {
  WorkerFlags flags = Flags();
  flags.max_model_len = 65536;
  flags.gpu_memory_utilization = 0.5;
  const auto gpu = PlanKv(flags, Spec(), DType::kBF16,
                          GpuMemory{40 * kGiB, 16 * kGiB, 24 * kGiB});
  EXPECT_EQ(gpu.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(gpu.status().message()),
              AllOf(HasSubstr("holds 32768 tokens"),
                    HasSubstr("raise --gpu-memory-utilization (now 0.5"),
                    HasSubstr("or lower --max-model-len to 32768")));
  const auto cpu = PlanKv(flags, Spec(), DType::kBF16, std::nullopt);
  EXPECT_THAT(std::string(cpu.status().message()),
              AllOf(HasSubstr("raise --kv-cache-memory-bytes to 8589934592"),
                    HasSubstr("or lower --max-model-len to 8192")));
}

// A machine that is short of memory says so at the start, and not when the
// kernel ends a worker whose cache has filled.
TEST(KvPlan, ACpuTakesNoMoreThanItsMemoryHasLeft) {
  const HostMemory host{.limit_bytes = 4 * kGiB, .used_bytes = 3 * kGiB};
  const auto plan = [&](const WorkerFlags& flags, const HostMemory& memory) {
    return PlanKv(flags, Spec(), DType::kBF16, std::nullopt, {}, {}, memory);
  };
  WorkerFlags flags = Flags();
  flags.kv_cache_bytes = kGiB;
  EXPECT_TRUE(plan(flags, host).ok());
  flags.kv_cache_bytes = kGiB + 16 * kPosition;
  EXPECT_THAT(
      std::string(plan(flags, host).status().message()),
      AllOf(HasSubstr("takes 1075838976 bytes"), HasSubstr("of the 4294967296"),
            HasSubstr("1073741824 are left"),
            HasSubstr("lower --kv-cache-memory-bytes")));
  EXPECT_TRUE(plan(flags, {}).ok()) << "nothing is known of the machine";
  flags.kv_cache_bytes = 0;
  flags.num_blocks = static_cast<int>(kGiB / (16 * kPosition)) + 1;
  EXPECT_FALSE(plan(flags, host).ok());
  --flags.num_blocks;
  EXPECT_TRUE(plan(flags, host).ok());
  // The default shrinks.
  flags.num_blocks = 0;
  const auto half = plan(flags, {kGiB, kGiB / 2});
  ASSERT_TRUE(half.ok()) << half.status();
  EXPECT_EQ(half->num_blocks, kGiB / 2 / (16 * kPosition));
  // What it has not is no advice.
  flags.max_model_len = 8192;
  EXPECT_THAT(
      std::string(plan(flags, {kGiB, kGiB / 2}).status().message()),
      AllOf(HasSubstr("takes 1073741824 bytes"),
            HasSubstr("536870912 are left"), HasSubstr("or --max-model-len")));
  EXPECT_THAT(std::string(plan(flags, {kGiB, kGiB / 2}).status().message()),
              Not(HasSubstr("--max-loras")));
  EXPECT_THAT(
      std::string(plan(flags, {kGiB, kGiB / 2, kGiB / 4}).status().message()),
      HasSubstr("--max-loras, --max-lora-rank (adapters take 268435456"));
  flags.max_model_len = 0;
  // Whatever the machine has, positions are counted by ints.
  flags.num_blocks = 1 << 28;
  EXPECT_THAT(std::string(plan(flags, {}).status().message()),
              HasSubstr("at most 134217727"));
}

TEST(KvPlan, WeightsThatDoNotFitAreNotLoaded) {
  const HostMemory host{.limit_bytes = 4 * kGiB, .used_bytes = kGiB};
  EXPECT_TRUE(CheckWeights(3 * kGiB, host).ok());
  EXPECT_TRUE(CheckWeights(3 * kGiB, {}).ok()) << "nothing is known";
  EXPECT_THAT(
      std::string(CheckWeights(3 * kGiB + 1, host).message()),
      AllOf(HasSubstr("take at least 3221225473 bytes"),
            HasSubstr("of the 4294967296"), HasSubstr("3221225472 are left"),
            HasSubstr("--quantization")));
}

TEST(KvPlan, ACpuKeepsNoMatrixInF16) {
  engine::ModelSpec experts = Spec(), latent = Spec(), told = Spec();
  experts.routes.experts = 8;
  latent.kv_rank = 64;
  told.told = 32;
  const struct {
    const char* why;
    DType weights;
    std::optional<DType> quantisation;
    engine::ModelSpec spec;
    bool kept;
  } cases[] = {
      {"others", DType::kBF16, std::nullopt, Spec(), true},
      {"f16", DType::kF16, std::nullopt, Spec(), false},
      {"embeddings beside fp8", DType::kF16, DType::kFp8, Spec(), false},
      {"codes leave none", DType::kF16, DType::kInt8, Spec(), true},
      {"codes leave none", DType::kF16, DType::kInt4, Spec(), true},
      {"codes leave none", DType::kF16, DType::kW8A8, Spec(), true},
      {"routers of experts", DType::kF16, DType::kInt8, experts, false},
      {"latent attention", DType::kF16, DType::kInt8, latent, false},
      {"a table for each layer", DType::kF16, DType::kInt8, told, false}};
  for (const auto& c : cases) {
    const absl::Status status =
        CheckCpuWeights(c.weights, c.quantisation, c.spec);
    EXPECT_EQ(status.ok(), c.kept) << c.why;
    if (!c.kept) {
      EXPECT_THAT(std::string(status.message()), HasSubstr("--dtype is f16"));
    }
  }
}

TEST(KvPlan, SlotsThatDoNotFitAreNotFilled) {
  const HostMemory host{.limit_bytes = 4 * kGiB, .used_bytes = kGiB};
  EXPECT_TRUE(CheckAdapterSlots(3 * kGiB, host).ok());
  EXPECT_TRUE(CheckAdapterSlots(3 * kGiB, {}).ok()) << "nothing is known";
  EXPECT_THAT(
      std::string(CheckAdapterSlots(3 * kGiB + 1, host).message()),
      AllOf(HasSubstr("take 3221225473 bytes"), HasSubstr("of the 4294967296"),
            HasSubstr("3221225472 are left"),
            HasSubstr("lower --max-loras or --max-lora-rank")));
}

TEST(KvPlan, AdviceCountsTheDraftModelsCache) {
  WorkerFlags flags = Flags();
  flags.max_model_len = 65536;
  const DraftKv draft{.block_bytes = 16384, .num_blocks = 100};
  const auto refused =
      PlanKv(flags, Spec(), DType::kBF16, std::nullopt, 0, draft);
  const int64_t enough = int64_t{8589934592} + int64_t{16384} * 100;
  EXPECT_THAT(
      std::string(refused.status().message()),
      HasSubstr(absl::StrCat("raise --kv-cache-memory-bytes to ", enough)));
  flags.kv_cache_bytes = enough;
  EXPECT_TRUE(PlanKv(flags, Spec(), DType::kBF16, std::nullopt, 0, draft).ok());
  --flags.kv_cache_bytes;
  EXPECT_FALSE(
      PlanKv(flags, Spec(), DType::kBF16, std::nullopt, 0, draft).ok());
}

TEST(KvPlan, WeightsThatFillTheShareLeaveNoContextToOffer) {
  const auto plan = PlanKv(Flags(), Spec(), DType::kBF16,
                           GpuMemory{16 * kGiB, 15 * kGiB, kGiB});
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(plan.status().message()),
              AllOf(HasSubstr("holds 0 tokens"),
                    HasSubstr("raise --gpu-memory-utilization"),
                    Not(HasSubstr("lower --max-model-len"))));
}

}  // namespace
}  // namespace tandem::worker
