// SPDX-License-Identifier: Apache-2.0
// Which tensors make which matrix. Q, K and V become one matrix, and so do
// gate and up: fewer, wider products.

#include "engine/model.h"

#include <cstring>
#include <set>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "engine/quantisation.h"
#include "engine/rope.h"
#include "engine/widen.h"

namespace tandem::engine {

using kernels::DType;
using kernels::HostTensor;

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
        progress_(progress),
        model_(new Model()) {}

  absl::StatusOr<std::unique_ptr<Model>> Load();

 private:
  // One tensor of the checkpoint and how many rows it has.
  struct Part {
    std::string name;
    int rows;
  };

  // What a matrix is for: the embedding and the head, or a layer's product,
  // by GatedMatMul or not.
  enum class Use { kTokens, kProduct, kGated };

  // How a matrix that is given as `given` is kept.
  DType KeptAs(DType given, Use use) const;
  absl::Status LoadLayer(int index, Model::Layer& layer);
  // Packs the parts, stacked by rows, as one matrix.
  absl::Status Pack(const std::vector<Part>& parts, int cols, Use use,
                    std::unique_ptr<kernels::Matrix>& matrix);
  // The same of parts some of which were quantised before: as they are where
  // all have one form and the backend takes it, else dequantised.
  absl::Status PackQuantised(const std::vector<Part>& parts, int cols, Use use,
                             std::unique_ptr<kernels::Matrix>& matrix);
  // Puts the parts one after another among the f32 vectors; `target` becomes
  // their device address when they are uploaded.
  absl::Status AddVector(const std::vector<Part>& parts, const float** target);
  void AddValues(const std::vector<float>& values, const float** target);
  absl::Status UploadVectors();
  absl::Status RefuseLeftovers() const;
  absl::Status CheckLimits();
  void Used(const std::string& name);

  const ModelSpec& spec_;
  const Checkpoint& checkpoint_;
  const LoadOptions& options_;
  kernels::Backend* const backend_;
  LoadProgress progress_;
  std::unique_ptr<Model> model_;
  uint64_t done_bytes_ = 0;
  absl::flat_hash_set<std::string> used_;
  std::set<std::string> formats_;
  std::vector<float> vectors_;
  std::vector<std::pair<size_t, const float**>> targets_;
};

void ModelLoader::Used(const std::string& name) {
  used_.insert(name);
  const TensorInfo* const tensor = checkpoint_.Find(name);
  if (tensor != nullptr) done_bytes_ += tensor->end - tensor->begin;
  progress_(done_bytes_, checkpoint_.total_bytes());
}

DType ModelLoader::KeptAs(DType given, Use use) const {
  if (options_.quantisation.has_value()) {
    if (use != Use::kTokens) return *options_.quantisation;
    if (*options_.quantisation != DType::kFp8) return DType::kInt8;
  }
  return options_.weight_dtype.value_or(given == DType::kBF16 ? DType::kBF16
                                                              : DType::kF32);
}

absl::Status ModelLoader::PackQuantised(
    const std::vector<Part>& parts, int cols, Use use,
    std::unique_ptr<kernels::Matrix>& matrix) {
  CodeRows codes;
  std::vector<float> values;  // where codes have no common form
  bool same = true;
  for (const Part& part : parts) {
    const std::string product(absl::StripSuffix(part.name, ".weight"));
    absl::StatusOr<CodeRows> read;
    if (HasCodes(checkpoint_, product)) {
      read =
          ReadCodes(checkpoint_, spec_.quantisation, product, part.rows, cols);
      if (!read.ok()) return read.status();
      for (const std::string& name : read->names) Used(name);
      const std::vector<float> numbers = Dequantise(*read);
      values.insert(values.end(), numbers.begin(), numbers.end());
      same = same && (codes.rows == 0 || SameForm(codes, *read));
      if (codes.rows == 0) {
        codes = *std::move(read);
      } else if (same) {
        AppendRows(*read, codes);
      }
    } else {
      const absl::StatusOr<HostTensor> tensor =
          checkpoint_.Matrix(part.name, part.rows, cols);
      if (!tensor.ok()) return tensor.status();
      std::vector<std::byte> bytes;
      Append(*tensor, DType::kF32, bytes);
      const size_t begin = values.size();
      values.resize(begin + bytes.size() / sizeof(float));
      memcpy(values.data() + begin, bytes.data(), bytes.size());
      Used(part.name);
      same = false;
    }
  }
  absl::StatusOr<std::unique_ptr<kernels::Matrix>> packed =
      same ? backend_->PackCodes(codes.View())
           : absl::UnimplementedError("rows of several forms");
  if (absl::IsUnimplemented(packed.status())) {
    const HostTensor whole{reinterpret_cast<const std::byte*>(values.data()),
                           DType::kF32,
                           static_cast<int64_t>(values.size()) / cols, cols};
    const DType kept = KeptAs(DType::kF32, use);
    packed = use == Use::kGated ? backend_->PackGatedMatrix(whole, kept)
                                : backend_->PackMatrix(whole, kept);
  }
  if (!packed.ok()) return packed.status();
  matrix = *std::move(packed);
  formats_.insert(std::string(kernels::Name(matrix->dtype())));
  return absl::OkStatus();
}

absl::Status ModelLoader::Pack(const std::vector<Part>& parts, int cols,
                               Use use,
                               std::unique_ptr<kernels::Matrix>& matrix) {
  for (const Part& part : parts) {
    if (HasCodes(checkpoint_,
                 std::string(absl::StripSuffix(part.name, ".weight")))) {
      return PackQuantised(parts, cols, use, matrix);
    }
  }
  std::vector<HostTensor> tensors;
  HostTensor whole{nullptr, DType::kF32, 0, cols};
  bool same = true;
  for (const Part& part : parts) {
    const absl::StatusOr<HostTensor> tensor =
        checkpoint_.Matrix(part.name, part.rows, cols);
    if (!tensor.ok()) return tensor.status();
    tensors.push_back(*tensor);
    whole.rows += tensor->rows;
    same = same && tensor->dtype == tensors[0].dtype;
  }
  std::vector<std::byte> stacked;
  whole.data = tensors[0].data;
  whole.dtype = same ? tensors[0].dtype : DType::kF32;
  if (tensors.size() > 1) {
    for (const HostTensor& tensor : tensors) {
      Append(tensor, whole.dtype, stacked);
    }
    whole.data = stacked.data();
  }
  const DType kept = KeptAs(whole.dtype, use);
  absl::StatusOr<std::unique_ptr<kernels::Matrix>> packed =
      use == Use::kGated ? backend_->PackGatedMatrix(whole, kept)
                         : backend_->PackMatrix(whole, kept);
  if (!packed.ok()) return packed.status();
  matrix = *std::move(packed);
  formats_.insert(std::string(kernels::Name(kept)));
  for (const Part& part : parts) Used(part.name);
  return absl::OkStatus();
}

absl::Status ModelLoader::AddVector(const std::vector<Part>& parts,
                                    const float** target) {
  std::vector<std::byte> bytes;
  for (const Part& part : parts) {
    const absl::StatusOr<HostTensor> tensor =
        checkpoint_.Vector(part.name, part.rows);
    if (!tensor.ok()) return tensor.status();
    Append(*tensor, DType::kF32, bytes);
    Used(part.name);
  }
  std::vector<float> values(bytes.size() / sizeof(float));
  memcpy(values.data(), bytes.data(), bytes.size());
  AddValues(values, target);
  return absl::OkStatus();
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

absl::Status ModelLoader::LoadLayer(int index, Model::Layer& layer) {
  const std::string prefix = absl::StrCat("model.layers.", index, ".");
  const std::string attention = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  const int hidden = spec_.hidden_size;
  const int wide = spec_.intermediate_size;
  const int query = spec_.heads * spec_.head_dim;
  const int key = spec_.kv_heads * spec_.head_dim;
  const auto qkv = [&](std::string_view what) -> std::vector<Part> {
    return {{absl::StrCat(attention, "q_proj.", std::string(what)), query},
            {absl::StrCat(attention, "k_proj.", std::string(what)), key},
            {absl::StrCat(attention, "v_proj.", std::string(what)), key}};
  };
  const auto gate_up = [&](std::string_view what) -> std::vector<Part> {
    return {{absl::StrCat(mlp, "gate_proj.", std::string(what)), wide},
            {absl::StrCat(mlp, "up_proj.", std::string(what)), wide}};
  };
  absl::Status status;
  status.Update(AddVector({{prefix + "input_layernorm.weight", hidden}},
                          &layer.input_norm));
  status.Update(Pack(qkv("weight"), hidden, Use::kProduct, layer.qkv));
  status.Update(Pack({{attention + "o_proj.weight", hidden}}, query,
                     Use::kProduct, layer.output));
  status.Update(
      AddVector({{prefix + "post_attention_layernorm.weight", hidden}},
                &layer.post_attention_norm));
  status.Update(Pack(gate_up("weight"), hidden, Use::kGated, layer.gate_up));
  status.Update(Pack({{mlp + "down_proj.weight", hidden}}, wide, Use::kProduct,
                     layer.down));
  if (spec_.attention_bias) {
    status.Update(AddVector(qkv("bias"), &layer.qkv_bias));
    status.Update(
        AddVector({{attention + "o_proj.bias", hidden}}, &layer.output_bias));
  }
  if (spec_.mlp_bias) {
    status.Update(AddVector(gate_up("bias"), &layer.gate_up_bias));
    status.Update(
        AddVector({{mlp + "down_proj.bias", hidden}}, &layer.down_bias));
  }
  return status;
}

absl::Status ModelLoader::RefuseLeftovers() const {
  for (const TensorInfo& tensor : checkpoint_.tensors()) {
    if (used_.contains(tensor.name)) continue;
    // Old conversions carry the frequencies; a tied head may be there twice.
    if (absl::EndsWith(tensor.name, ".rotary_emb.inv_freq")) continue;
    if (spec_.tied_head && tensor.name == "lm_head.weight") continue;
    return absl::InvalidArgumentError(absl::StrCat(
        checkpoint_.path(tensor), ": tensor ", Quote(tensor.name),
        " has no place in the model that config.json describes (",
        spec_.architecture, ", num_hidden_layers ", spec_.layers,
        ", attention_bias ", spec_.attention_bias ? "true" : "false",
        ", mlp_bias ", spec_.mlp_bias ? "true" : "false", ")"));
  }
  return absl::OkStatus();
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
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Model>> ModelLoader::Load() {
  model_->spec_ = spec_;
  absl::Status status = CheckLimits();
  if (!status.ok()) return status;
  status = Pack({{"model.embed_tokens.weight", spec_.vocab_size}},
                spec_.hidden_size, Use::kTokens, model_->embedding_);
  if (!status.ok()) return status;
  // Vectors find their layers by address when they are uploaded: no moving.
  std::vector<Model::Layer>& layers = model_->layers_;
  layers.reserve(spec_.layers);
  for (int i = 0; i < spec_.layers; ++i) {
    status = LoadLayer(i, layers.emplace_back());
    if (!status.ok()) return status;
  }
  status.Update(AddVector({{"model.norm.weight", spec_.hidden_size}},
                          &model_->final_norm_));
  if (!spec_.tied_head) {
    status.Update(Pack({{"lm_head.weight", spec_.vocab_size}},
                       spec_.hidden_size, Use::kTokens, model_->head_));
  }
  status.Update(RefuseLeftovers());
  if (!status.ok()) return status;
  const RopeTables rope =
      MakeRopeTables(spec_.rope, spec_.head_dim, model_->max_positions_);
  AddValues(rope.cos, &model_->rope_.cos);
  AddValues(rope.sin, &model_->rope_.sin);
  status = UploadVectors();
  if (!status.ok()) return status;
  model_->weight_format_ = absl::StrJoin(formats_, "+");
  progress_(checkpoint_.total_bytes(), checkpoint_.total_bytes());
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
