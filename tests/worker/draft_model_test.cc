// SPDX-License-Identifier: Apache-2.0
// Which draft models are taken, and that one is brought up with a cache of its
// own.

#include "worker/draft_model.h"

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/testing/virtual_loop.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/temp_dir.h"
#include "worker/bringup.h"

namespace tandem::worker {
namespace {

using testing::AllOf;
using testing::HasSubstr;

void WriteTokenizer(const engine::TempDir& directory, const std::string& text) {
  std::ofstream(directory.path() + "/tokenizer.json") << text;
}

TEST(DraftVocabularyTest, IdsMustMeanTheSame) {
  const std::string own = R"({"model": {"type": "BPE",
      "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
      "added_tokens": [{"id": 3, "content": "<s>"}]})";
  const struct {
    const char* why;
    const char* draft;
    int vocab_size;
    const char* complaint;  // empty: it is taken
  } kCases[] = {
      {"other settings", R"({"truncation": {}, "model": {"type": "BPE",
         "vocab": {"ab": 2, "b": 1, "a": 0}},
         "added_tokens": [{"id": 3, "content": "<s>", "special": true}]})",
       4, ""},
      {"a list with scores", R"({"model": {"type": "Unigram",
         "vocab": [["a", 0], ["b", -1], ["ab", -2]]},
         "added_tokens": [{"id": 3, "content": "<s>"}]})",
       4, ""},
      {"another size", R"({})", 5, "has 5 ids"},
      {"two ids changed places", R"({"model": {"vocab":
         {"a": 1, "b": 0, "ab": 2}},
         "added_tokens": [{"id": 3, "content": "<s>"}]})",
       4, R"(id 0 is "b" there and "a" here)"},
      {"another added token", R"({"model": {"vocab":
         {"a": 0, "b": 1, "ab": 2}},
         "added_tokens": [{"id": 3, "content": "<bos>"}]})",
       4, R"(id 3 is "<bos>" there and "<s>" here)"},
      {"one id more", R"({"model": {"vocab":
         {"a": 0, "b": 1, "ab": 2, "c": 7}},
         "added_tokens": [{"id": 3, "content": "<s>"}]})",
       4, R"(id 7 is "c" there and nothing here)"},
      {"no JSON", "nonsense", 4, "is not a JSON object"},
      {"no vocabulary", R"({"model": 3, "added_tokens": [4, {"id": "x"}]})", 4,
       "nothing there"},
      {"no file", "", 4, "has no tokenizer.json"}};
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.why);
    engine::TempDir model, draft;
    WriteTokenizer(model, own);
    if (*c.draft != 0) WriteTokenizer(draft, c.draft);
    const absl::Status status =
        CheckSameVocabulary(model.path(), 4, draft.path(), c.vocab_size);
    if (*c.complaint == 0) {
      EXPECT_TRUE(status.ok()) << status;
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(c.complaint), HasSubstr(draft.path()),
                      HasSubstr("--speculative-config")));
  }
}

class DraftBringUpTest : public testing::Test {
 protected:
  DraftBringUpTest() {
    engine::WriteCheckpoint(engine::LoadCases()["llama_biases_f32"], model_);
    engine::WriteCheckpoint(engine::LoadCases()["llama_biases_f32"], other_);
    flags_.model_dir = model_.path();
    flags_.device = "cpu";
    flags_.threads = 1;
    flags_.block_size = 8;
    flags_.max_num_seqs = 2;
    flags_.handoff = "grpc";
  }

  absl::StatusOr<WorkerParts> Begin(const std::string& config) {
    flags_.speculative_config = config;
    return BringUp(flags_, v1::WORKER_ROLE_DECODE, &loop_, &progress_);
  }
  std::string Config(const std::string& more) const {
    return absl::StrCat(R"({"model": ")", model_.path(),
                        R"(", "num_speculative_tokens": 3)", more, "}");
  }

  engine::TempDir model_, other_;
  VirtualLoop loop_;
  StartupProgress progress_;
  WorkerFlags flags_;
};

TEST_F(DraftBringUpTest, ACacheOfItsOwnComesOutOfTheSameMemory) {
  const auto alone = Begin("");
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ(alone->draft.model, nullptr);
  kernels::KvShape block = alone->executor->kv_shape();
  block.num_blocks = 1;
  flags_.kv_cache_bytes = kernels::CpuKvBlockBytes(block) * 100;
  flags_.max_num_seqs = 1000;  // so that this bound is not met
  const auto parts = Begin(Config(""));
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_EQ(parts->pool->num_blocks(), 50);
  EXPECT_EQ(parts->draft.pool->num_blocks(), 50);
  const engine::DraftModelOptions& draft =
      parts->engine_options.speculation.draft_model;
  EXPECT_EQ(draft.executor, parts->draft.executor.get());
  EXPECT_EQ(draft.pool, parts->draft.pool.get());
  EXPECT_EQ(draft.max_positions, parts->engine_options.max_model_len);
  EXPECT_EQ(draft.step_cost, 1);
  EXPECT_EQ(parts->engine_options.speculation.num_tokens, 3);
  EXPECT_GT(parts->engine_options.max_draws, 500);

  const auto few = Begin(Config(R"(, "num_kv_blocks": 20)"));
  ASSERT_TRUE(few.ok()) << few.status();
  EXPECT_EQ(few->pool->num_blocks(), 80);
  EXPECT_EQ(few->draft.pool->num_blocks(), 20);

  // A sequence that it can never hold is not waited for.
  const auto short_one = Begin(Config(R"(, "num_kv_blocks": 2)"));
  ASSERT_TRUE(short_one.ok()) << short_one.status();
  EXPECT_GT(short_one->engine_options.max_model_len, 16);
  EXPECT_EQ(short_one->engine_options.speculation.draft_model.max_positions,
            16);
}

TEST_F(DraftBringUpTest, HasAQuantisationOfItsOwn) {
  for (const auto& [quantization, format] :
       {std::pair{"int8", "int8"}, {"w8a8", "int8+w8a8"}}) {
    const auto parts = Begin(
        Config(absl::StrCat(R"(, "quantization": ")", quantization, "\"")));
    ASSERT_TRUE(parts.ok()) << parts.status();
    EXPECT_EQ(parts->draft.model->weight_format(), format);
    EXPECT_EQ(parts->model->weight_format(), "f32");
    EXPECT_LT(parts->engine_options.speculation.draft_model.step_cost, 0.3);
  }
  EXPECT_THAT(
      std::string(
          Begin(Config(R"(, "quantization": "awq")")).status().message()),
      HasSubstr("--speculative-config: quantization is 'awq', expected none, "
                "fp8, int8, int4 or w8a8"));
  flags_.quantization = "int4";
  const auto target = Begin(Config(""));
  ASSERT_TRUE(target.ok()) << target.status();
  EXPECT_EQ(target->draft.model->weight_format(), "f32");
  EXPECT_EQ(target->model->weight_format(), "int4+int8");
}

TEST_F(DraftBringUpTest, SaysWhatDoesNotGo) {
  WriteTokenizer(model_, R"({"model": {"vocab": {"a": 0}}})");
  WriteTokenizer(other_, R"({"model": {"vocab": {"b": 0}}})");
  const auto other = Begin(absl::StrCat(R"({"model": ")", other_.path(),
                                        R"(", "num_speculative_tokens": 3})"));
  EXPECT_EQ(other.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(other.status().message()),
              AllOf(HasSubstr("vocabulary"), HasSubstr(model_.path()),
                    HasSubstr(other_.path())));
  EXPECT_THAT(std::string(Begin(R"({"model": "/nowhere",
                                    "num_speculative_tokens": 2})")
                              .status()
                              .message()),
              HasSubstr("/nowhere"));
  flags_.kv_cache = "off";
  EXPECT_THAT(std::string(Begin(Config("")).status().message()),
              HasSubstr("--speculative-config and --kv-cache off"));
}

}  // namespace
}  // namespace tandem::worker
