// SPDX-License-Identifier: Apache-2.0
// Which tensors make which matrix. Q, K and V become one matrix, and so do
// gate and up: fewer, wider products.

#include "engine/model/model.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "engine/checkpoint/quantisation.h"
#include "engine/checkpoint/widen.h"
#include "engine/model/leftovers.h"
#include "engine/model/rope.h"
#include "engine/model/weight_packer.h"

namespace tandem::engine {

using kernels::HostTensor;

// Of cosines and sines, in one table.
constexpr int64_t kMaxRopeBytes = int64_t{4} << 30;

// Loads one model, then is gone.
class ModelLoader {
 public:
  ModelLoader(const ModelSpec& spec, const Checkpoint& checkpoint,
              const LoadOptions& options, kernels::Backend* backend,
              LoadProgress progress)
      : spec_(spec),
        checkpoint_(checkpoint),
        options_(options),
        backend_(backend),
        packer_(spec, checkpoint, options, backend, progress),
        model_(new Model()) {}

  absl::StatusOr<std::unique_ptr<Model>> Load();

 private:
  absl::Status LoadLayer(int index, Model::Layer& layer);
  absl::Status LoadAttention(int index, Model::Layer& layer);
  absl::Status LoadQkv(int index, Model::Layer& layer);
  absl::Status LoadLatentQkv(int index, Model::Latent& latent);
  // Whose heads are as wide as kernels make them.
  absl::Status LoadOutput(int index, Model::Layer& layer);
  absl::Status LoadDense(int index, Model::Layer& layer);
  absl::Status LoadRouter(int index, Model::Layer& layer);
  absl::Status LoadExperts(int index, Model::Layer& layer);
  absl::Status LoadStackedExperts(int index, Model::Layer& layer);
  absl::Status GroupExperts(int index, Model::Layer& layer);
  // Puts the parts one after another among the f32 vectors; `target` becomes
  // their device address when they are uploaded.
  absl::Status AddVector(const std::vector<TensorPart>& parts,
                         const float** target);
  // A matrix [rows, cols] among the vectors, each row in this order.
  absl::Status AddMatrixValues(const std::string& name, int rows, int cols,
                               const std::vector<int>& order,
                               const float** target);
  // The norm of this name, its numbers in this order.
  absl::Status AddNorm(const std::string& name, int size, Model::Norm& norm,
                       const std::vector<int>& order = {});
  // A layer's; none where that has no name.
  absl::Status AddNorm(int layer, std::string_view part, int size,
                       Model::Norm& norm, const std::vector<int>& order = {});
  absl::Status AddHeadNorms(int layer, std::string_view part, int heads,
                            Model::Norm& norm);
  void AddValues(const std::vector<float>& values, const float** target);
  void AddRope(RopeSpec& rope, kernels::RopeTable& table);
  absl::Status UploadVectors();
  void RoundEmbeddingScale();
  bool HasHead() const;
  // A tensor's name in this checkpoint.
  std::string NameOf(std::string_view name, std::string_view what) const;
  std::string NameOf(int layer, std::string_view name,
                     std::string_view what) const;
  absl::Status CheckLimits();

  const ModelSpec& spec_;
  const Checkpoint& checkpoint_;
  const LoadOptions& options_;
  kernels::Backend* const backend_;
  WeightPacker packer_;
  std::unique_ptr<Model> model_;
  bool bare_ = false;  // names are without the optional prefix
  std::vector<float> vectors_;
  std::vector<std::pair<size_t, const float**>> targets_;
};

absl::Status ModelLoader::AddVector(const std::vector<TensorPart>& parts,
                                    const float** target) {
  std::vector<float> values;
  for (const TensorPart& part : parts) {
    const absl::StatusOr<HostTensor> tensor =
        checkpoint_.Vector(part.name, part.rows);
    if (!tensor.ok()) return tensor.status();
    std::vector<std::byte> moved;
    AppendFloats(RowsInOrder({tensor->data, tensor->dtype, part.rows, 1},
                             part.order, moved),
                 values);
    packer_.Take(part.name);
  }
  AddValues(values, target);
  return absl::OkStatus();
}

absl::Status ModelLoader::AddMatrixValues(const std::string& name, int rows,
                                          int cols,
                                          const std::vector<int>& order,
                                          const float** target) {
  const absl::StatusOr<HostTensor> tensor =
      checkpoint_.Matrix(name, rows, cols);
  if (!tensor.ok()) return tensor.status();
  std::vector<float> values;
  const auto row_bytes =
      static_cast<size_t>(cols) * kernels::SizeOf(tensor->dtype);
  for (int row = 0; row < rows; ++row) {
    std::vector<std::byte> moved;
    AppendFloats(
        RowsInOrder({tensor->data + static_cast<size_t>(row) * row_bytes,
                     tensor->dtype, cols, 1},
                    order, moved),
        values);
  }
  packer_.Take(name);
  AddValues(values, target);
  return absl::OkStatus();
}

absl::Status ModelLoader::AddNorm(int layer, std::string_view part, int size,
                                  Model::Norm& norm,
                                  const std::vector<int>& order) {
  return part.empty() ? absl::OkStatus()
                      : AddNorm(NameOf(layer, part, ""), size, norm, order);
}

absl::Status ModelLoader::AddNorm(const std::string& name, int size,
                                  Model::Norm& norm,
                                  const std::vector<int>& order) {
  const std::vector<float> zeros(static_cast<size_t>(size));
  if (spec_.norm == NormKind::kBare) {
    AddValues(std::vector<float>(static_cast<size_t>(size), 1.0f),
              &norm.weight);
    AddValues(zeros, &norm.bias);
    return absl::OkStatus();
  }
  absl::Status status =
      AddVector({{absl::StrCat(name, ".weight"), size, order}}, &norm.weight);
  if (!status.ok()) return status;
  if (spec_.norm == NormKind::kOffset || spec_.norm == NormKind::kLayerOffset) {
    for (size_t i = vectors_.size() - static_cast<size_t>(size);
         i < vectors_.size(); ++i) {
      vectors_[i] += 1;
    }
  }
  if (spec_.norm == NormKind::kCentred) AddValues(zeros, &norm.bias);
  if (spec_.norm == NormKind::kLayer || spec_.norm == NormKind::kLayerOffset) {
    status = AddVector({{absl::StrCat(name, ".bias"), size}}, &norm.bias);
  }
  return status;
}

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

void ModelLoader::AddValues(const std::vector<float>& values,
                            const float** target) {
  vectors_.resize((vectors_.size() + 15) / 16 * 16);  // whole cache lines
  targets_.emplace_back(vectors_.size(), target);
  vectors_.insert(vectors_.end(), values.begin(), values.end());
}

absl::Status ModelLoader::UploadVectors() {
  const size_t bytes = vectors_.size() * sizeof(float);
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> buffer =
      backend_->Allocate(bytes);
  if (!buffer.ok()) return buffer.status();
  model_->vectors_ = *std::move(buffer);
  const std::unique_ptr<kernels::Queue> queue = backend_->NewQueue("load");
  backend_->CopyToDevice(*queue, model_->vectors_->data(), vectors_.data(),
                         bytes);
  queue->Synchronize();
  const auto* base = reinterpret_cast<const float*>(model_->vectors_->data());
  for (const auto& [offset, target] : targets_) *target = base + offset;
  return absl::OkStatus();
}

std::string ModelLoader::NameOf(std::string_view name,
                                std::string_view what) const {
  const std::string_view prefix = spec_.names.optional_prefix;
  if (bare_ && name.starts_with(prefix)) name.remove_prefix(prefix.size());
  return absl::StrCat(std::string(name), std::string(what));
}

std::string ModelLoader::NameOf(int layer, std::string_view name,
                                std::string_view what) const {
  return absl::StrCat(NameOf(spec_.names.layers, ""), layer, ".",
                      std::string(name), std::string(what));
}

// What chooses is small, and its errors are whole experts: never quantised.
absl::Status ModelLoader::LoadRouter(int index, Model::Layer& layer) {
  const TensorNames& names = spec_.names;
  const int experts = spec_.routes.experts;
  std::vector<TensorPart> parts = {
      {NameOf(index, names.router, ".weight"), experts}};
  if (spec_.routes.shared == kernels::SharedExpert::kGated) {
    parts.push_back({NameOf(index, names.shared_gate, ".weight"), 1});
  }
  absl::Status status =
      packer_.Pack(parts, spec_.hidden_size, MatrixUse::kExact, layer.router);
  if (spec_.router_bias) {
    status.Update(AddVector({{NameOf(index, names.router, ".bias"), experts}},
                            &layer.router_bias));
  }
  if (!names.choice_bias.empty()) {
    const std::string name = NameOf(index, names.choice_bias, "");
    const TensorInfo* const bias = checkpoint_.Find(name);
    status.Update(
        bias != nullptr && bias->shape.size() == 2
            ? AddMatrixValues(name, 1, experts, {}, &layer.choice_bias)
            : AddVector({{name, experts}}, &layer.choice_bias));
  }
  return status;
}

absl::Status ModelLoader::LoadExperts(int index, Model::Layer& layer) {
  const TensorNames& names = spec_.names;
  const int hidden = spec_.hidden_size;
  const int wide = spec_.expert_size;
  absl::Status status;
  for (int e = 0; e < spec_.routes.experts && status.ok(); ++e) {
    const auto name = [&](std::string_view part) {
      return NameOf(
          index,
          absl::StrCat(std::string(names.experts), e, ".", std::string(part)),
          ".weight");
    };
    auto& gate_up = layer.expert_matrices.emplace_back();
    status = packer_.Pack({{name(names.gate), wide}, {name(names.up), wide}},
                          hidden, MatrixUse::kGated, gate_up);
    if (!status.ok()) break;
    auto& down = layer.expert_matrices.emplace_back();
    status = packer_.Pack({{name(names.down), hidden}}, wide,
                          MatrixUse::kProduct, down);
  }
  return status;
}

absl::Status ModelLoader::LoadStackedExperts(int index, Model::Layer& layer) {
  const int hidden = spec_.hidden_size;
  const int wide = spec_.expert_size;
  const int count = spec_.routes.experts;
  const TensorNames& names = spec_.names;
  const auto name = [&](std::string_view part) {
    return NameOf(index,
                  absl::StrCat(std::string(names.experts), std::string(part)),
                  names.stack_suffix);
  };
  const std::string gate_up = name(names.gate_up);
  const std::string down = name(names.down);
  const bool in_turns = names.stack == ExpertStack::kInTurns;
  std::vector<int> halves;
  halves.reserve(size_t{2} * static_cast<size_t>(wide));
  for (const int first : {0, 1}) {
    for (int row = 0; in_turns && row < wide; ++row) {
      halves.push_back(2 * row + first);
    }
  }
  absl::Status status;
  for (int e = 0; e < count && status.ok(); ++e) {
    status.Update(packer_.PackStacked(
        {gate_up, count, e, 2 * wide, hidden, halves}, MatrixUse::kGated,
        layer.expert_matrices.emplace_back()));
    status.Update(packer_.PackStacked({down, count, e, hidden, wide},
                                      MatrixUse::kProduct,
                                      layer.expert_matrices.emplace_back()));
  }
  if (!status.ok()) return status;
  for (const std::string& stack : {gate_up, down}) {
    if (!IsMxfp4(checkpoint_, stack)) {
      packer_.Take(stack);
      continue;
    }
    packer_.Take(stack + "_blocks");
    packer_.Take(stack + "_scales");
  }
  if (!spec_.mlp_bias) return status;
  status.Update(AddMatrixValues(gate_up + "_bias", count, 2 * wide, halves,
                                &layer.expert_biases.gate_up));
  status.Update(AddMatrixValues(down + "_bias", count, hidden, {},
                                &layer.expert_biases.down));
  return status;
}

// The layer's matrices, each expert's gate_up and down in turn.
absl::Status ModelLoader::GroupExperts(int index, Model::Layer& layer) {
  std::vector<kernels::Expert> experts;
  for (size_t i = 0; i < layer.expert_matrices.size(); i += 2) {
    experts.push_back(
        {layer.expert_matrices[i].get(), layer.expert_matrices[i + 1].get()});
  }
  auto set = backend_->GroupExperts(experts);
  if (!set.ok()) {
    return WithMessage(
        set.status(),
        absl::StrCat("experts of layer ", index, ": ", set.status().message()));
  }
  layer.experts = *std::move(set);
  return absl::OkStatus();
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

// What all rows take, by itself or beside experts.
absl::Status ModelLoader::LoadDense(int index, Model::Layer& layer) {
  const TensorNames& names = spec_.names;
  const int hidden = spec_.hidden_size;
  const int wide = spec_.dense_size(index);
  const std::string prefix(spec_.routes.experts == 0  ? ""
                           : spec_.has_experts(index) ? names.shared
                                                      : names.dense);
  const auto name = [&](std::string_view part, std::string_view what) {
    return NameOf(index, absl::StrCat(prefix, std::string(part)), what);
  };
  const auto gate_up = [&](std::string_view what) -> std::vector<TensorPart> {
    if (!names.gate_up.empty()) return {{name(names.gate_up, what), 2 * wide}};
    if (!spec_.is_gated()) return {{name(names.up, what), wide}};
    return {{name(names.gate, what), wide}, {name(names.up, what), wide}};
  };
  absl::Status status =
      packer_.Pack(gate_up(".weight"), hidden,
                   spec_.is_gated() ? MatrixUse::kGated : MatrixUse::kProduct,
                   layer.gate_up);
  status.Update(packer_.Pack({{name(names.down, ".weight"), hidden}}, wide,
                             MatrixUse::kProduct, layer.down));
  if (spec_.mlp_bias) {
    status.Update(AddVector(gate_up(".bias"), &layer.gate_up_bias));
    status.Update(
        AddVector({{name(names.down, ".bias"), hidden}}, &layer.down_bias));
  }
  return status;
}

absl::Status ModelLoader::LoadLayer(int index, Model::Layer& layer) {
  const TensorNames& names = spec_.names;
  const int hidden = spec_.hidden_size;
  absl::Status status = LoadAttention(index, layer);
  status.Update(AddNorm(index, names.mlp_norm, hidden, layer.mlp_norm));
  if (spec_.has_experts(index)) {
    status.Update(LoadRouter(index, layer));
    status.Update(names.stack == ExpertStack::kNone
                      ? LoadExperts(index, layer)
                      : LoadStackedExperts(index, layer));
    if (status.ok()) status = GroupExperts(index, layer);
  }
  if (spec_.dense_size(index) > 0) status.Update(LoadDense(index, layer));
  status.Update(
      AddNorm(index, names.mlp_output_norm, hidden, layer.mlp_output_norm));
  return status;
}

// transformers multiplies in the embedding's type.
void ModelLoader::RoundEmbeddingScale() {
  const TensorInfo* const embedding =
      checkpoint_.Find(NameOf(spec_.names.embedding, ".weight"));
  if (!spec_.embedding_scale_rounds || embedding == nullptr ||
      embedding->dtype != "BF16") {
    return;
  }
  auto bits = std::bit_cast<uint32_t>(
      static_cast<float>(model_->spec_.embedding_scale));
  bits += 0x7fffu + (bits >> 16 & 1u);  // to nearest, ties to even
  model_->spec_.embedding_scale = std::bit_cast<float>(bits & 0xffff0000u);
}

bool ModelLoader::HasHead() const {
  if (!spec_.head_in_doubt) return !spec_.tied_head;
  return checkpoint_.Find(NameOf(spec_.names.head, ".weight")) != nullptr ||
         HasCodes(checkpoint_, std::string(spec_.names.head));
}

absl::Status ModelLoader::CheckLimits() {
  if (options_.quantisation.has_value() &&
      spec_.quantisation.method != Quantisation::Method::kNone) {
    return absl::InvalidArgumentError(
        absl::StrCat("the checkpoint is quantised already; leave out "
                     "--quantization ",
                     std::string(kernels::Name(*options_.quantisation))));
  }
  if (options_.max_positions < 0 ||
      options_.max_positions > spec_.max_positions) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_model_len ", options_.max_positions, " must be from 1 to ",
        spec_.max_positions, ", the model's max_position_embeddings"));
  }
  model_->max_positions_ = options_.max_positions == 0 ? spec_.max_positions
                                                       : options_.max_positions;
  // Half a dimension of sines and of cosines, in up to two tables.
  const int64_t bytes = int64_t{model_->max_positions_} * spec_.head_dim * 8;
  if (bytes > kMaxRopeBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_model_len ", model_->max_positions_,
                     " with heads of ", spec_.head_dim, " needs ", bytes >> 20,
                     " MiB of rotary tables, at most ", kMaxRopeBytes >> 20,
                     " are made: set --max-model-len to what you serve"));
  }
  return absl::OkStatus();
}

void ModelLoader::AddRope(RopeSpec& rope, kernels::RopeTable& table) {
  rope.served_positions = model_->max_positions_;
  if (rope.kind == RopeSpec::Kind::kNone) return;
  const RopeTables tables =
      MakeRopeTables(rope, spec_.head_dim, model_->max_positions_);
  AddValues(tables.cos, &table.cos);
  AddValues(tables.sin, &table.sin);
  const std::vector<float> scales = QueryScales(rope, model_->max_positions_);
  if (!scales.empty()) AddValues(scales, &table.query_scale);
}

absl::StatusOr<std::unique_ptr<Model>> ModelLoader::Load() {
  model_->spec_ = spec_;
  absl::Status status = CheckLimits();
  if (!status.ok()) return status;
  const TensorNames& names = spec_.names;
  if (!names.optional_prefix.empty()) {
    const std::string full = NameOf(names.embedding, ".weight");
    bare_ = std::none_of(
        checkpoint_.tensors().begin(), checkpoint_.tensors().end(),
        [&](const TensorInfo& tensor) { return tensor.name == full; });
  }
  status =
      packer_.Pack({{NameOf(names.embedding, ".weight"), spec_.vocab_size}},
                   spec_.hidden_size, MatrixUse::kTokens, model_->embedding_);
  if (!status.ok()) return status;
  RoundEmbeddingScale();
  if (!names.positions.empty()) {
    // One vector: row after row.
    status =
        AddMatrixValues(NameOf(names.positions, ".weight"), spec_.max_positions,
                        spec_.hidden_size, {}, &model_->positions_);
    if (!status.ok()) return status;
  }
  // Vectors find their layers by address when they are uploaded: no moving.
  std::vector<Model::Layer>& layers = model_->layers_;
  layers.reserve(spec_.layers);
  for (int i = 0; i < spec_.layers; ++i) {
    status = LoadLayer(i, layers.emplace_back());
    if (!status.ok()) return status;
  }
  status.Update(AddNorm(NameOf(names.final_norm, ""), spec_.hidden_size,
                        model_->final_norm_));
  if (HasHead()) {
    status.Update(
        packer_.Pack({{NameOf(names.head, ".weight"), spec_.vocab_size}},
                     spec_.hidden_size, MatrixUse::kTokens, model_->head_));
  }
  if (spec_.head_bias) {
    status.Update(AddVector({{NameOf(names.head, ".bias"), spec_.vocab_size}},
                            &model_->head_bias_));
  }
  status.Update(RefuseLeftovers(spec_, checkpoint_, packer_,
                                NameOf(names.embedding, ".weight"),
                                NameOf(names.head, ".weight")));
  if (!status.ok()) return status;
  AddRope(model_->spec_.rope, model_->rope_);
  if (spec_.window > 0) AddRope(model_->spec_.local_rope, model_->local_rope_);
  status = UploadVectors();
  if (!status.ok()) return status;
  model_->weight_format_ = packer_.format();
  model_->dequantised_ = packer_.dequantised();
  packer_.Finish();
  return std::move(model_);
}

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const ModelSpec& spec,
                                                   const Checkpoint& checkpoint,
                                                   const LoadOptions& options,
                                                   kernels::Backend* backend,
                                                   LoadProgress progress) {
  return ModelLoader(spec, checkpoint, options, backend, progress).Load();
}

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const ModelSpec& spec,
                                                   const Checkpoint& checkpoint,
                                                   const LoadOptions& options,
                                                   kernels::Backend* backend) {
  return Load(spec, checkpoint, options, backend, [](uint64_t, uint64_t) {});
}

}  // namespace tandem::engine
