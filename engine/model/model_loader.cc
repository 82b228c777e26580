// SPDX-License-Identifier: Apache-2.0
#include "engine/model/model_loader.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "engine/checkpoint/quantisation.h"
#include "engine/checkpoint/widen.h"
#include "engine/model/leftovers.h"
#include "engine/model/rope.h"

namespace tandem::engine {

using kernels::HostTensor;

// Of cosines and sines, in one table.
constexpr int64_t kMaxRopeBytes = int64_t{4} << 30;

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
  if (spec_.told > 0) status.Update(LoadToldLayer(index, layer.told));
  if (status.ok() && !names.layer_scale.empty()) {
    status = ReadNumber(NameOf(index, names.layer_scale, ""), &layer.scale);
  }
  return status;
}

absl::Status ModelLoader::ReadNumber(const std::string& name, float* number) {
  const absl::StatusOr<HostTensor> tensor = checkpoint_.Vector(name, 1);
  if (!tensor.ok()) return tensor.status();
  std::vector<float> values;
  AppendFloats(*tensor, values);
  packer_.Take(name);
  *number = values.front();
  return absl::OkStatus();
}

double ModelLoader::RoundedScale(const std::string& table, double scale) const {
  const TensorInfo* const tensor = checkpoint_.Find(table);
  if (tensor == nullptr || tensor->dtype != "BF16") return scale;
  auto bits = std::bit_cast<uint32_t>(static_cast<float>(scale));
  bits += 0x7fffu + (bits >> 16 & 1u);  // to nearest, ties to even
  return std::bit_cast<float>(bits & 0xffff0000u);
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
  const int turned = spec_.rope.turned(spec_.full_dim());
  const int64_t bytes = int64_t{model_->max_positions_} * turned * 8;
  if (bytes > kMaxRopeBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_model_len ", model_->max_positions_, " with ", turned,
                     " dimensions that turn needs ", bytes >> 20,
                     " MiB of rotary tables, at most ", kMaxRopeBytes >> 20,
                     " are made: set --max-model-len to what you serve"));
  }
  return absl::OkStatus();
}

void ModelLoader::AddRope(RopeSpec& rope, int head_dim,
                          kernels::RopeTable& table) {
  rope.served_positions = model_->max_positions_;
  if (rope.kind == RopeSpec::Kind::kNone) return;
  const RopeTables tables =
      MakeRopeTables(rope, head_dim, model_->max_positions_);
  table.pairs = rope.turned(head_dim) / 2;
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
  if (spec_.embedding_scale_rounds) {
    model_->spec_.embedding_scale =
        RoundedScale(NameOf(names.embedding, ".weight"), spec_.embedding_scale);
  }
  if (spec_.told > 0) {
    status = LoadTold(model_->told_);
    if (!status.ok()) return status;
  }
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
  AddRope(model_->spec_.rope, spec_.full_dim(), model_->rope_);
  if (spec_.window > 0) {
    AddRope(model_->spec_.local_rope, spec_.head_dim, model_->local_rope_);
  }
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
