// SPDX-License-Identifier: Apache-2.0
// What config.json and generation_config.json of a model directory say, as
// plain data that one forward pass reads. A family of models is a row in the
// table of model_config.cc, not a class.
//
// Both files are untrusted: every value used is checked against a range, and
// an error names the file, the field, the value and what is allowed. Keys
// that are not used are ignored, and nothing is executed.

#ifndef TANDEM_ENGINE_MODEL_CONFIG_H_
#define TANDEM_ENGINE_MODEL_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/quantisation.h"

namespace tandem::engine {

enum class NormKind { kRms };
enum class Activation { kSilu };

struct RopeSpec {
  enum class Kind { kDefault, kLlama3 };
  Kind kind = Kind::kDefault;
  double theta = 10000;
  // kLlama3 only: wavelengths beyond original_max_positions /
  // low_freq_factor are stretched by `factor`, those below
  // original_max_positions / high_freq_factor are kept, between is blended.
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int original_max_positions = 0;
};

// Sampling that the model's authors recommend; unset where they are silent.
struct SamplingDefaults {
  std::optional<bool> do_sample;
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  std::optional<int> top_k;
};

struct ModelSpec {
  std::string architecture;  // "LlamaForCausalLM"
  int hidden_size = 0;
  int intermediate_size = 0;
  int layers = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int vocab_size = 0;
  int max_positions = 0;
  NormKind norm = NormKind::kRms;
  double norm_eps = 1e-6;
  RopeSpec rope;
  bool attention_bias = false;  // of q, k, v and o
  bool mlp_bias = false;        // of gate, up and down
  Activation activation = Activation::kSilu;
  bool tied_head = false;  // logits by the embedding's matrix
  std::optional<int32_t> bos_id;
  std::vector<int32_t> eos_ids;  // any of them ends a sequence
  SamplingDefaults sampling;
  Quantisation quantisation;  // of the checkpoint

  int qkv_rows() const { return (heads + 2 * kv_heads) * head_dim; }

  // One line with all that the forward pass depends on, the same for equal
  // models however their files are written: part of the fingerprint.
  std::string Canonical() const;
};

// Largest config.json that is read.
inline constexpr uint64_t kMaxConfigBytes = 1 << 20;

// Reads config.json and, if it is there, generation_config.json.
absl::StatusOr<ModelSpec> LoadModelSpec(const std::string& directory);

// The same from text; an empty generation config is an absent one. The paths
// are for messages.
absl::StatusOr<ModelSpec> ParseModelSpec(const std::string& config_path,
                                         std::string_view config,
                                         const std::string& generation_path,
                                         std::string_view generation);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_CONFIG_H_
