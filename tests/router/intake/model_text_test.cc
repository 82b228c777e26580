// SPDX-License-Identifier: Apache-2.0
// What the router learns of a model's directory.

#include "router/intake/model_text.h"

#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/engine/temp_dir.h"

namespace tandem::router {
namespace {

using nlohmann::json;

// vLLM stops at the tokenizer's end token and at those of the configs: many a
// fine-tune has another in its tokenizer than its base has in its configs.
TEST(ModelText, EndTokensAreTheConfigsAndTheTokenizers) {
  const struct {
    const char* why;
    json config, generation;
    std::vector<int32_t> expected;
  } cases[] = {{"the tokenizer's alone", nullptr, nullptr, {2}},
               {"the same", 2, 2, {2}},
               {"another in config.json", 7, nullptr, {7, 2}},
               {"others in generation_config.json", 7, {8, 9}, {8, 9, 2}},
               {"it among others", nullptr, {2, 9}, {2, 9}}};
  const std::string tales = TANDEM_SOURCE_DIR "/models/tales/";
  for (const auto& c : cases) {
    SCOPED_TRACE(c.why);
    const engine::TempDir dir;
    for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
      std::filesystem::copy(tales + name, dir.path());  // which ends by 2
    }
    dir.Write("config.json", json({{"architectures", {"LlamaForCausalLM"}},
                                   {"hidden_size", 64},
                                   {"intermediate_size", 128},
                                   {"num_hidden_layers", 2},
                                   {"num_attention_heads", 4},
                                   {"vocab_size", 1024},
                                   {"eos_token_id", c.config}})
                                 .dump());
    dir.Write("generation_config.json",
              json({{"eos_token_id", c.generation}}).dump());
    const auto model = ModelText::Load(dir.path(), {});
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ((*model)->limits().eos_token_ids, c.expected);
  }
}

}  // namespace
}  // namespace tandem::router
