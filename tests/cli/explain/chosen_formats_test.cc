// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/chosen_formats.h"

#include <cstdlib>
#include <string>

#include "cli/explain/command.h"
#include "common/flags.h"
#include "gtest/gtest.h"
#include "tests/engine/temp_dir.h"

namespace tandem::explain {
namespace {

using kernels::DType;

const std::string kTales = std::string(TANDEM_SOURCE_DIR) + "/models/tales";

// Variables are those of the workers, whose values it must know.
TEST(ChosenFormatsTest, TheEnvironmentOfWorkersIsUnderstood) {
  const struct {
    const char* dtype;  // empty: unset
    const char* kv;
    DType weights;  // of a model in `checkpoint`
    DType cache;
    const char* checkpoint = "bfloat16";
  } cases[] = {
      {"", "", DType::kBF16, DType::kBF16},
      {"", "", DType::kF32, DType::kF32, "float32"},
      {"", "", DType::kF32, DType::kF32, ""},
      {"", "bf16", DType::kF32, DType::kBF16, "float32"},
      {"bf16", "", DType::kBF16, DType::kBF16, "float32"},
      {"f16", "", DType::kF16, DType::kF32},
      {"f16", "auto", DType::kF16, DType::kF32},
      {"f32", "auto", DType::kF32, DType::kF32},
      {"bf16", "auto", DType::kBF16, DType::kBF16, "float32"},
      {"auto", "auto", DType::kBF16, DType::kBF16},
      {"auto", "auto", DType::kF32, DType::kF32, "float32"},
      {"auto", "auto", DType::kF32, DType::kF32, "F16"},  // CPUs widen it
      {"auto", "auto", DType::kF32, DType::kF32, ""},
      {"auto", "f16", DType::kBF16, DType::kF16},
      {"", "fp8_e4m3", DType::kBF16, DType::kFp8},
      {"", "fp8", DType::kBF16, DType::kFp8},
      {"", "int4", DType::kBF16, DType::kInt4},
  };
  const absl::StatusOr<engine::ModelSpec> spec = LoadConfig("");
  ASSERT_TRUE(spec.ok()) << spec.status();
  for (const auto& c : cases) {
    SCOPED_TRACE(std::string(c.dtype) + " " + c.kv + " " + c.checkpoint);
    setenv("TANDEM_DTYPE", c.dtype, 1);
    setenv("TANDEM_KV_CACHE_DTYPE", c.kv, 1);
    CommandLine line("tandem explain", "Counts.");
    ExplainCommand command;
    command.AddTo(&line);
    const char* const words[] = {"tandem"};
    const absl::Status status = line.TryParse(1, words);
    unsetenv("TANDEM_DTYPE");
    unsetenv("TANDEM_KV_CACHE_DTYPE");
    ASSERT_TRUE(status.ok()) << status;
    const Formats formats =
        ChooseFormats(*spec, c.checkpoint, command.Complete(line).formats);
    EXPECT_EQ(formats.weights, c.weights);
    EXPECT_EQ(formats.layers, c.weights);
    EXPECT_EQ(formats.kv, c.cache);
  }
}

TEST(ChosenFormatsTest, AGpuKeepsF16AndAQuantisedModelsCacheIsOfItsWeights) {
  const absl::StatusOr<engine::ModelSpec> spec = LoadConfig("");
  ASSERT_TRUE(spec.ok()) << spec.status();
  for (const auto& [quantization, layers] :
       {std::pair{"int8", DType::kInt8}, {"w8a8", DType::kW8A8}}) {
    const Formats formats = ChooseFormats(
        *spec, "float16", {.quantization = quantization}, /*gpu=*/true);
    EXPECT_EQ(formats.weights, DType::kF16);
    EXPECT_EQ(formats.layers, layers);
    EXPECT_EQ(formats.head(), DType::kInt8);
    EXPECT_EQ(formats.kv, DType::kF16);
  }
}

TEST(ChosenFormatsTest, ACheckpointsTypeIsReadFromItsFiles) {
  for (const std::string& model : {kTales, kTales + "/config.json"}) {
    const absl::StatusOr<std::string> type = CheckpointType(model);
    ASSERT_TRUE(type.ok()) << type.status();
    EXPECT_EQ(*type, "bf16");
  }
  EXPECT_EQ(CheckpointType("/no/such/model").status().code(),
            absl::StatusCode::kNotFound);
}

// Models of text and images say it of their text.
TEST(ChosenFormatsTest, AConfigsTypeMayBeThatOfItsText) {
  const struct {
    const char* config;
    const char* type;
  } cases[] = {
      {R"({"text_config": {"dtype": "bfloat16"}})", "bfloat16"},
      {R"({"text_config": {"torch_dtype": "float16"}})", "float16"},
      {R"({"torch_dtype": null, "text_config": {"dtype": "bfloat16"}})",
       "bfloat16"},
      {R"({"dtype": "float32", "text_config": {"dtype": "bfloat16"}})",
       "float32"},
      {R"({"text_config": "bfloat16"})", ""},
      {R"({"text_config": {}})", ""}};
  for (const auto& c : cases) {
    const engine::TempDir dir;
    dir.Write("config.json", c.config);
    const absl::StatusOr<std::string> type = CheckpointType(dir.path());
    ASSERT_TRUE(type.ok()) << type.status();
    EXPECT_EQ(*type, c.type) << c.config;
  }
}

}  // namespace
}  // namespace tandem::explain
