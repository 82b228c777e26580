// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "engine/model/model_loader.h"
#include "engine/model/rope.h"

namespace tandem::engine {

// Of q or k: of all heads together, the same of each, or each one's own.
absl::Status ModelLoader::AddHeadNorms(int layer, std::string_view part,
                                       int heads, Model::Norm& norm) {
  const int dim = spec_.kv_heads_of(layer).dim;
  if (!spec_.centres_heads()) {
    const int normed = spec_.wide_norms ? heads : 1;
    return AddNorm(layer, part, normed * dim, norm,
                   RotaryOrder(spec_.rope, dim, normed));
  }
  const std::vector<int> order = RotaryOrder(spec_.rope, dim, 1);
  if (!part.ends_with('.')) {
    return AddMatrixValues(NameOf(layer, part, ".weight"), heads, dim, order,
                           &norm.weight);
  }
  std::vector<TensorPart> parts;
  for (int head = 0; head < heads; ++head) {
    const std::string own = absl::StrCat(std::string(part), head);
    parts.push_back({NameOf(layer, own, ".weight"), dim, order});
  }
  return AddVector(parts, &norm.weight);
}

absl::Status ModelLoader::LoadQkv(int index, Model::Layer& layer) {
  const TensorNames& names = spec_.names;
  const int hidden = spec_.hidden_size;
  const int kv_heads = spec_.kv_heads_of(index).count;
  const int dim = spec_.kv_heads_of(index).dim;
  const int query = spec_.heads * dim;
  const int key = kv_heads * dim;
  const auto name = [&](std::string_view part, std::string_view what) {
    return NameOf(index, part, what);
  };
  const auto order = [&](int heads) {
    return RotaryOrder(spec_.rope, dim, heads);
  };
  const auto qkv = [&](std::string_view what) -> std::vector<TensorPart> {
    if (!names.qkv.empty()) {
      return {{name(names.qkv, what), query + 2 * key,
               FusedOrder(spec_.rope, dim, spec_.heads, kv_heads,
                          names.qkv_in_groups)}};
    }
    if (!spec_.has_kv(index)) {
      return {{name(names.query, what), query, order(spec_.heads)}};
    }
    return {{name(names.query, what), query, order(spec_.heads)},
            {name(names.key, what), key, order(kv_heads)},
            {name(spec_.values_are_keys(index) ? names.key : names.value, what),
             key}};
  };
  absl::Status status =
      packer_.Pack(qkv(".weight"), hidden, MatrixUse::kProduct, layer.qkv);
  status.Update(
      AddHeadNorms(index, names.query_norm, spec_.heads, layer.query_norm));
  if (spec_.has_kv(index)) {
    status.Update(
        AddHeadNorms(index, names.key_norm, kv_heads, layer.key_norm));
  }
  if (spec_.normed_values && spec_.has_kv(index)) {
    AddValues(std::vector<float>(static_cast<size_t>(dim), 1.0f),
              &layer.value_norm);
  }
  if (spec_.qkv_bias) {
    status.Update(AddVector(qkv(".bias"), &layer.qkv_bias));
  }
  return status;
}

absl::Status ModelLoader::LoadAttention(int index, Model::Layer& layer) {
  const TensorNames& names = spec_.names;
  const int hidden = spec_.hidden_size;
  const int output_dim =
      spec_.latent() ? spec_.value_dim : spec_.kv_heads_of(index).dim;
  absl::Status status =
      AddNorm(index, names.input_norm, hidden, layer.input_norm);
  status.Update(spec_.latent() ? LoadLatent(index, layer.latent)
                               : LoadQkv(index, layer));
  status.Update(packer_.Pack({{NameOf(index, names.output, ".weight"), hidden}},
                             spec_.heads * output_dim, MatrixUse::kProduct,
                             layer.output));
  status.Update(AddNorm(index, names.attention_output_norm, hidden,
                        layer.attention_output_norm));
  if (spec_.output_bias) {
    status.Update(AddVector({{NameOf(index, names.output, ".bias"), hidden}},
                            &layer.output_bias));
  }
  if (!names.sinks.empty()) {
    status.Update(AddVector({{NameOf(index, names.sinks, ""), spec_.heads}},
                            &layer.sinks));
  }
  return status;
}

}  // namespace tandem::engine
