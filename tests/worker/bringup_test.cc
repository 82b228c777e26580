// SPDX-License-Identifier: Apache-2.0
#include "worker/bringup.h"

#include <cstdint>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/testing/virtual_loop.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint_maker.h"

namespace tandem::worker {
namespace {

using testing::HasSubstr;

// All its layers have a window of 11.
class WindowedBringUpTest : public testing::Test {
 protected:
  WindowedBringUpTest() {
    engine::WriteCheckpoint(engine::LoadCases()["mistral_window_f32"], model_);
    flags_.model_dir = model_.path();
    flags_.device = "cpu";
    flags_.threads = 1;
    flags_.block_size = 8;
    flags_.num_blocks = 6;
    flags_.max_num_batched_tokens = 8;
    flags_.handoff = "grpc";
  }

  absl::StatusOr<WorkerParts> Begin() {
    return BringUp(flags_, v1::WORKER_ROLE_DECODE, &loop_, &progress_);
  }

  engine::TempDir model_;
  VirtualLoop loop_;
  StartupProgress progress_;
  WorkerFlags flags_;
};

TEST_F(WindowedBringUpTest, AWindowMakesRoomForLongSequences) {
  const auto parts = Begin();
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_EQ(parts->engine_options.window.positions, 11);
  EXPECT_GT(parts->engine_options.max_model_len, 48);
  // The window and a step's rows are in three blocks, or parts of four.
  EXPECT_EQ(parts->hello.blocks_at_once(), 4);
}

TEST_F(WindowedBringUpTest, TellsHowFarItIs) {
  EXPECT_EQ(progress_.Status(), absl::UnavailableError("starting"));
  progress_.Update("loading weights", 999, 2000);
  EXPECT_EQ(progress_.Status(),
            absl::UnavailableError("starting: loading weights, 49 %"));
  progress_.Update("reserving memory for KV");
  EXPECT_EQ(progress_.Status(),
            absl::UnavailableError("starting: reserving memory for KV"));
  ASSERT_TRUE(Begin().ok());
  EXPECT_EQ(progress_.Status(),
            absl::UnavailableError("starting: checking weights, 100 %"));
}

TEST_F(WindowedBringUpTest, WithoutACacheASequenceNeedsAllItsBlocks) {
  flags_.kv_cache = "off";
  const auto parts = Begin();
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_EQ(parts->engine_options.window.positions, 0);
  EXPECT_EQ(parts->engine_options.max_model_len, 48);
  EXPECT_TRUE(
      engine::Engine::Validate(parts->engine_options, *parts->pool).ok());
  flags_.max_model_len = 64;
  EXPECT_THAT(std::string(Begin().status().message()),
              HasSubstr("holds 48 tokens"));
}

// What the plan does not look at is the engine's to refuse, not to abort on.
TEST_F(WindowedBringUpTest, WhatTheEngineRefusesIsTold) {
  flags_.max_model_len = 1;
  EXPECT_THAT(std::string(Begin().status().message()),
              HasSubstr("max_model_len is 1, expected at least 2"));
}

TEST_F(WindowedBringUpTest, WhatFlagsHaveWrongIsToldBeforeAnythingIsRead) {
  flags_.model_dir = "/no/such/model";
  for (const auto& [modules, says] :
       std::vector<std::pair<std::vector<std::string>, const char*>>{
           {{"a"}, "--lora-modules is 'a', expected NAME=DIRECTORY"},
           {{"a="}, "--lora-modules is 'a=', expected NAME=DIRECTORY"},
           {{"=/x"}, "--lora-modules: adapter ''"},
           {{"a b=/x"}, "--lora-modules: adapter 'a b'"},
           {{"model=/x"}, "--lora-modules: 'model' is the model's own name"},
           {{"a=/x", "b=/y", "a=/z"}, "--lora-modules names 'a' twice"}}) {
    flags_.adapters.modules = modules;
    EXPECT_THAT(std::string(Begin().status().message()), HasSubstr(says));
  }
  flags_.adapters.modules.clear();
  flags_.kv_offload_bytes = flags_.kv_offload_file_bytes = 1 << 20;
  for (const char* const path : {"/no/such", "/dev/null"}) {
    flags_.kv_offload_path = path;
    EXPECT_THAT(std::string(Begin().status().message()),
                HasSubstr(absl::StrCat("--kv-offload-path is '", path,
                                       "', which is no directory")));
  }
}

// What is used and coming, of the refusal of a KV cache that fits nowhere.
int64_t UsedBytes(const absl::Status& refused) {
  const std::string message(refused.message());
  std::smatch said;
  EXPECT_TRUE(std::regex_search(
      message, said, std::regex("of the ([0-9]+) that .* ([0-9]+) are left")))
      << message;
  return said.size() < 3 ? 0 : std::stoll(said[1]) - std::stoll(said[2]);
}

TEST_F(WindowedBringUpTest, SlotsOfAdaptersCountBesideTheKvCache) {
  flags_.num_blocks = 1 << 27;
  const int64_t without = UsedBytes(Begin().status());
  flags_.adapters.max_loras = 100;
  flags_.adapters.max_rank = 512;
  const int64_t slots =
      AdapterBytes(flags_.adapters, *engine::LoadModelSpec(model_.path()));
  EXPECT_GT(slots, 100 << 20);
  const absl::Status refused = Begin().status();
  EXPECT_GT(UsedBytes(refused), without + slots / 2);
  EXPECT_THAT(
      std::string(refused.message()),
      HasSubstr(absl::StrCat("--max-lora-rank (adapters take ", slots)));
}

TEST_F(WindowedBringUpTest, WhatNoAdapterIsInIsYetToBeTouched) {
  flags_.adapters.max_loras = 3;
  auto parts = Begin();
  ASSERT_TRUE(parts.ok()) << parts.status();
  const int64_t all = AdapterBytes(flags_.adapters, parts->model->spec());
  EXPECT_EQ(UntouchedBytes(parts->adapters), all);
  ASSERT_TRUE(parts->adapters.table.Take().ok());
  EXPECT_EQ(UntouchedBytes(parts->adapters), all / 3 * 2);
}

TEST_F(WindowedBringUpTest, InputsAreRoundedWhereProductsTakeThem) {
  flags_.activation_dtype = "bf16";
  EXPECT_THAT(std::string(Begin().status().message()),
              HasSubstr("add --dtype bf16"));
  for (const std::string codes : {"w8a8", "int8"}) {
    flags_.quantization = codes;
    EXPECT_THAT(std::string(Begin().status().message()),
                HasSubstr("here they are " + codes + " and f32"));
  }
  flags_.kv_cache_dtype = "bf16";
  EXPECT_TRUE(Begin().ok());
  flags_.quantization = "fp8";
  flags_.kv_cache_dtype = "f32";
  for (const auto& [dtype, numerics] : {std::pair("bf16", "cpu-3-bf16"),
                                        {"bf16-amx", "cpu-3-bf16-amx"},
                                        {"f32", "cpu-3"},
                                        {"auto", "cpu-3"}}) {
    flags_.activation_dtype = dtype;
    const auto parts = Begin();
    ASSERT_TRUE(parts.ok()) << parts.status();
    EXPECT_EQ(parts->backend->numerics(), numerics);
  }
}

}  // namespace
}  // namespace tandem::worker
