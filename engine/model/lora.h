// SPDX-License-Identifier: Apache-2.0
// LoRA adapters (Hu et al., 2021) as PEFT saves them: which products of a layer
// they may change, and one adapter's factors in the form in which a device
// keeps them.
//
// An image is what one slot of device memory holds, elements of 4 bytes: for
// each layer and section its rank (int32; 0: the adapter does not change it)
// and its scale (f32), then for each its factors A [inputs, rank] and B
// [rank, outputs], with room for the largest rank. kernels/backend.h (AddLora)
// says what is computed of them.

#ifndef TANDEM_ENGINE_MODEL_LORA_H_
#define TANDEM_ENGINE_MODEL_LORA_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/model_config.h"

namespace tandem::engine {

inline constexpr int kMaxLoraRank = 512;

// The products that the forward pass adds to.
enum class LoraProduct : uint8_t { kQkv, kOutput, kGateUp, kDown };

// Outputs of a product with factors of their own: Q of QKV, say.
struct LoraSection {
  std::string module;  // "self_attn.q_proj"
  LoraProduct product;
  int first;  // of its outputs, in the product's
  int rows;   // outputs
  int cols;   // inputs
  // Which output of a file stands at each place; empty: as they are.
  std::vector<int> order = {};
};

// Where what lies in an image.
class LoraLayout {
 public:
  LoraLayout(const ModelSpec& spec, int max_rank);

  int max_rank() const { return max_rank_; }
  int layers() const { return layers_; }
  // Of every layer. Experts, the embedding and the head have none, nor have
  // gates with biases.
  const std::vector<LoraSection>& sections() const { return sections_; }
  bool has(LoraProduct product) const;

  // Elements of an image, and offsets in it.
  int64_t size() const { return size_; }
  int64_t rank(int layer, int section) const {
    return int64_t{layer} * static_cast<int>(sections_.size()) + section;
  }
  int64_t scale(int layer, int section) const {
    return numbers_ + rank(layer, section);
  }
  int64_t a(int layer, int section) const {
    return 2 * numbers_ + layer * layer_size_ + offsets_[section];
  }
  int64_t b(int layer, int section) const {
    return a(layer, section) + int64_t{sections_[section].cols} * max_rank_;
  }

 private:
  int max_rank_;
  int layers_;
  std::vector<LoraSection> sections_;
  std::vector<int64_t> offsets_;  // [sections] within a layer's factors
  int64_t numbers_ = 0;           // of ranks; as many scales; whole lines
  int64_t layer_size_ = 0;
  int64_t size_ = 0;
};

struct LoraAdapter {
  std::vector<float> image;
  uint32_t sections = 0;  // bit i: it changes section i of some layer
  std::string digest;     // hex SHA-256 of names, factors and scales
};

// Reads DIRECTORY/adapter_config.json and adapter_model.safetensors. What
// they ask for beyond plain LoRA of a layer's products is refused by name.
// Errors: NOT_FOUND, or INVALID_ARGUMENT that names file and tensor or field.
absl::StatusOr<LoraAdapter> ReadLoraAdapter(const std::string& directory,
                                            const ModelSpec& spec,
                                            const LoraLayout& layout);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_LORA_H_
