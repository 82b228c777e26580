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
  const int dim = spec_.head_dim;
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

absl::Status ModelLoader::LoadLatentQkv(int index, Model::Latent& latent) {
  const LatentNames& names = spec_.names.latent;
  const int hidden = spec_.hidden_size;
  const int dim = spec_.head_dim;
  const int query = spec_.heads * dim;
  const int rank = spec_.kv_rank;
  const int size = spec_.latent_size();
  const int turned = spec_.rope.rotary_dim;
  const int still = dim - turned;
  const auto name = [&](std::string_view part) {
    return NameOf(index, part, ".weight");
  };
  const auto product = [&](std::string_view part, int rows, int cols,
                           std::unique_ptr<kernels::Matrix>& matrix) {
    return packer_.Pack({{name(part), rows}}, cols, MatrixUse::kProduct,
                        matrix);
  };
  const std::vector<int> order = RotaryOrder(spec_.rope, dim, 1);
  absl::Status status;
  if (spec_.query_rank > 0) {
    status.Update(
        product(names.query_down, spec_.query_rank, hidden, latent.query_down));
    status.Update(
        AddNorm(index, names.query_norm, spec_.query_rank, latent.query_norm));
  }
  status.Update(packer_.Pack(
      {{name(spec_.query_rank > 0 ? names.query_up : spec_.names.query), query,
        RotaryOrder(spec_.rope, dim, spec_.heads)}},
      spec_.query_rank > 0 ? spec_.query_rank : hidden, MatrixUse::kProduct,
      latent.query));
  status.Update(product(names.kv_down, size, hidden, latent.kv_down));
  status.Update(AddNorm(index, names.kv_norm, rank, latent.kv_norm));
  const auto spread = [&](absl::Span<const float> up) {
    const auto to = static_cast<size_t>(size);
    std::vector<float> values(2 * static_cast<size_t>(query) * to);
    for (int head = 0; head < spec_.heads; ++head) {
      const auto copy = [&](int from, int row) {
        std::copy_n(up.begin() + (head * (still + spec_.value_dim) + from) *
                                     int64_t{rank},
                    rank, values.begin() + int64_t{row} * size);
      };
      for (int i = 0; i < dim; ++i) {
        const int row = head * dim + i;
        const int from = order.empty() ? i : order[static_cast<size_t>(i)];
        if (from < still) {
          copy(from, row);
        } else {
          values[static_cast<size_t>(row) * to +
                 static_cast<size_t>(rank + from - still)] = 1;
        }
        if (i < spec_.value_dim) copy(still + i, query + row);
      }
    }
    return values;
  };
  status.Update(packer_.PackReshaped(
      {name(names.kv_up), spec_.heads * (still + spec_.value_dim)}, rank,
      spread, size, MatrixUse::kExact, latent.kv));
  return status;
}

absl::Status ModelLoader::LoadOutput(int index, Model::Layer& layer) {
  const int hidden = spec_.hidden_size;
  const int dim = spec_.head_dim;
  const int query = spec_.heads * dim;
  const TensorPart part{NameOf(index, spec_.names.output, ".weight"), hidden};
  if (!spec_.latent() || spec_.value_dim == dim) {
    return packer_.Pack({part}, query, MatrixUse::kProduct, layer.output);
  }
  const auto widen = [&](absl::Span<const float> narrow) {
    std::vector<float> values(static_cast<size_t>(hidden) *
                              static_cast<size_t>(query));
    auto from = narrow.begin();
    for (auto to = values.begin(); to < values.end(); to += dim) {
      std::copy_n(from, spec_.value_dim, to);
      from += spec_.value_dim;
    }
    return values;
  };
  return packer_.PackReshaped(part, spec_.heads * spec_.value_dim, widen, query,
                              MatrixUse::kProduct, layer.output);
}

absl::Status ModelLoader::LoadQkv(int index, Model::Layer& layer) {
  const TensorNames& names = spec_.names;
  const int hidden = spec_.hidden_size;
  const int query = spec_.heads * spec_.head_dim;
  const int key = spec_.kv_heads * spec_.head_dim;
  const auto name = [&](std::string_view part, std::string_view what) {
    return NameOf(index, part, what);
  };
  const auto order = [&](int heads) {
    return RotaryOrder(spec_.rope, spec_.head_dim, heads);
  };
  const auto qkv = [&](std::string_view what) -> std::vector<TensorPart> {
    if (!names.qkv.empty()) {
      return {{name(names.qkv, what), query + 2 * key,
               FusedOrder(spec_.rope, spec_.head_dim, spec_.heads,
                          spec_.kv_heads, names.qkv_in_groups)}};
    }
    return {{name(names.query, what), query, order(spec_.heads)},
            {name(names.key, what), key, order(spec_.kv_heads)},
            {name(names.value, what), key}};
  };
  absl::Status status =
      packer_.Pack(qkv(".weight"), hidden, MatrixUse::kProduct, layer.qkv);
  status.Update(
      AddHeadNorms(index, names.query_norm, spec_.heads, layer.query_norm));
  status.Update(
      AddHeadNorms(index, names.key_norm, spec_.kv_heads, layer.key_norm));
  if (spec_.qkv_bias) {
    status.Update(AddVector(qkv(".bias"), &layer.qkv_bias));
  }
  return status;
}

absl::Status ModelLoader::LoadAttention(int index, Model::Layer& layer) {
  const TensorNames& names = spec_.names;
  const int hidden = spec_.hidden_size;
  absl::Status status =
      AddNorm(index, names.input_norm, hidden, layer.input_norm);
  status.Update(spec_.latent() ? LoadLatentQkv(index, layer.latent)
                               : LoadQkv(index, layer));
  status.Update(LoadOutput(index, layer));
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
