// SPDX-License-Identifier: Apache-2.0
// Any bytes as adapter_config.json and adapter_model.safetensors (parted by a
// NUL) of a small model: an error, or an adapter that fills its image, with
// ranks that there is room for.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/model/lora.h"
#include "tests/engine/temp_dir.h"
#include "tests/fuzz.h"

namespace tandem::engine {
namespace {

constexpr int kMaxRank = 4;

ModelSpec Small() {
  return *ParseModelSpec("config",
                         R"({"architectures": ["LlamaForCausalLM"],
      "model_type": "llama", "hidden_act": "silu", "hidden_size": 16,
      "intermediate_size": 24, "num_hidden_layers": 1,
      "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32,
      "max_position_embeddings": 64, "rms_norm_eps": 1e-05,
      "rope_theta": 10000.0, "tie_word_embeddings": false,
      "bos_token_id": 1, "eos_token_id": 2})",
                         "", "");
}

}  // namespace
}  // namespace tandem::engine

TANDEM_FUZZ_TARGET(fuzz_lora)(const uint8_t* data, size_t size) {
  using namespace tandem::engine;  // NOLINT(google-build-using-namespace)
  static const auto* const spec = new ModelSpec(Small());
  static const auto* const layout = new LoraLayout(*spec, kMaxRank);
  static const TempDir dir;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::string_view config = input.substr(0, input.find('\0'));
  dir.Write("adapter_config.json", config);
  dir.Write("adapter_model.safetensors",
            input.substr(std::min(config.size() + 1, input.size())));
  const auto adapter = ReadLoraAdapter(dir.path(), *spec, *layout);
  if (!adapter.ok()) {
    TANDEM_FUZZ_REQUIRE(absl::IsInvalidArgument(adapter.status()));
    TANDEM_FUZZ_REQUIRE(adapter.status().message().size() < 4000);
    return 0;
  }
  TANDEM_FUZZ_REQUIRE(adapter->sections != 0);
  TANDEM_FUZZ_REQUIRE(adapter->image.size() ==
                      static_cast<size_t>(layout->size()));
  for (size_t s = 0; s < layout->sections().size(); ++s) {
    const auto section = static_cast<int>(s);
    const auto rank = std::bit_cast<int32_t>(
        adapter->image[static_cast<size_t>(layout->rank(0, section))]);
    TANDEM_FUZZ_REQUIRE(rank >= 0 && rank <= kMaxRank);
    TANDEM_FUZZ_REQUIRE(std::isfinite(
        adapter->image[static_cast<size_t>(layout->scale(0, section))]));
  }
  return 0;
}
