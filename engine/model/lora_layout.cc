// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/model/lora.h"
#include "engine/model/rope.h"

namespace tandem::engine {
namespace {

// Whole cache lines.
int64_t Aligned(int64_t elements) { return (elements + 15) / 16 * 16; }

std::vector<LoraSection> SectionsOf(const ModelSpec& spec) {
  const TensorNames& names = spec.names;
  const int hidden = spec.hidden_size;
  const int wide = spec.intermediate_size;
  const int query = spec.heads * spec.head_dim;
  const int key = spec.kv_heads * spec.head_dim;
  std::vector<LoraSection> sections;
  const auto add = [&](std::string_view module, LoraProduct product, int first,
                       int rows, int cols, int turning_heads = 0) {
    sections.push_back({std::string(module), product, first, rows, cols,
                        RotaryOrder(spec.rope, spec.head_dim, turning_heads)});
  };
  // Of what is reshaped no adapter is known; sections are as large in each
  // layer, and are there; and one of keys that are values would change both.
  if (spec.latent() || spec.mixed_heads() || spec.keys_are_values ||
      spec.shared_kv_layers > 0) {
    return sections;
  }
  if (!names.qkv.empty()) {
    add(names.qkv, LoraProduct::kQkv, 0, query + 2 * key, hidden);
    sections.back().order = FusedOrder(spec.rope, spec.head_dim, spec.heads,
                                       spec.kv_heads, names.qkv_in_groups);
  } else {
    add(names.query, LoraProduct::kQkv, 0, query, hidden, spec.heads);
    add(names.key, LoraProduct::kQkv, query, key, hidden, spec.kv_heads);
    add(names.value, LoraProduct::kQkv, query + key, key, hidden);
  }
  add(names.output, LoraProduct::kOutput, 0, hidden, query);
  if (spec.routes.experts > 0) return sections;
  const auto dense = [&](std::string_view part) {
    return absl::StrCat(std::string(names.dense), std::string(part));
  };
  if (!spec.is_gated() && names.gate_up.empty()) {
    add(names.up, LoraProduct::kGateUp, 0, wide, hidden);
  } else if (spec.mlp_bias) {
    // Gates get their bias and are opened at once.
  } else if (!names.gate_up.empty()) {
    add(names.gate_up, LoraProduct::kGateUp, 0, 2 * wide, hidden);
  } else {
    add(dense(names.gate), LoraProduct::kGateUp, 0, wide, hidden);
    add(dense(names.up), LoraProduct::kGateUp, wide, wide, hidden);
  }
  add(dense(names.down), LoraProduct::kDown, 0, hidden, wide);
  return sections;
}

}  // namespace

LoraLayout::LoraLayout(const ModelSpec& spec, int max_rank)
    : max_rank_(max_rank), layers_(spec.layers), sections_(SectionsOf(spec)) {
  numbers_ = Aligned(int64_t{layers_} * static_cast<int>(sections_.size()));
  for (const LoraSection& section : sections_) {
    offsets_.push_back(layer_size_);
    layer_size_ += Aligned(int64_t{max_rank_} * (section.cols + section.rows));
  }
  size_ = 2 * numbers_ + layers_ * layer_size_;
}

bool LoraLayout::has(LoraProduct product) const {
  return std::any_of(
      sections_.begin(), sections_.end(),
      [product](const LoraSection& s) { return s.product == product; });
}

}  // namespace tandem::engine
