// SPDX-License-Identifier: Apache-2.0
// Which tensors make which matrix. Q, K and V become one matrix, and so do
// gate and up: fewer, wider products.

#include "engine/model/model.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "engine/checkpoint/quantisation.h"
#include "engine/checkpoint/widen.h"
#include "engine/model/rope.h"

namespace tandem::engine {

using kernels::DType;
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
        progress_(progress),
        model_(new Model()) {}

  absl::StatusOr<std::unique_ptr<Model>> Load();

 private:
  // One tensor of the checkpoint and how many rows it has.
  struct Part {
    std::string name;
    int rows;
  };

  // What a matrix is for: the embedding and the head, the choice of experts,
  // or a layer's product, by GatedMatMul or not.
  enum class Use { kTokens, kRouter, kProduct, kGated };

  // How a matrix that is given as `given` is kept.
  DType KeptAs(DType given, Use use) const;
  absl::Status LoadLayer(int index, Model::Layer& layer);
  absl::Status LoadExperts(int index, Model::Layer& layer);
  // Packs the parts, stacked by rows, as one matrix.
  absl::Status Pack(const std::vector<Part>& parts, int cols, Use use,
                    std::unique_ptr<kernels::Matrix>& matrix);
  // The same of parts some of which were quantised before: as they are where
  // all have one form, else dequantised.
  absl::Status PackQuantised(const std::vector<Part>& parts, int cols, Use use,
                             std::unique_ptr<kernels::Matrix>& matrix);
  absl::Status PackDequantised(
      const std::vector<Part>& parts,
      const std::vector<std::optional<CodeRows>>& codes, int cols, Use use,
      std::unique_ptr<kernels::Matrix>& matrix);
  absl::Status Keep(absl::StatusOr<std::unique_ptr<kernels::Matrix>> packed,
                    std::unique_ptr<kernels::Matrix>& matrix);
  // Puts the parts one after another among the f32 vectors; `target` becomes
  // their device address when they are uploaded.
  absl::Status AddVector(const std::vector<Part>& parts, const float** target);
  // A matrix [rows, hidden] among the vectors.
  absl::Status AddMatrixValues(const std::string& name, int rows,
                               const float** target);
  // The norm of this name.
  absl::Status AddNorm(const std::string& name, int size, Model::Norm& norm);
  void AddValues(const std::vector<float>& values, const float** target);
  void AddRope(RopeSpec& rope, kernels::RopeTable& table);
  absl::Status UploadVectors();
  absl::Status RefuseLeftovers() const;
  void RoundEmbeddingScale();
  bool IsBuffer(std::string_view name) const;
  bool IsTiedHead(std::string_view name) const;
  absl::Status CheckTiedHead(const TensorInfo& head) const;
  bool IsNoBias(const TensorInfo& tensor) const;
  // A tensor's name in this checkpoint.
  std::string NameOf(std::string_view name, std::string_view what) const;
  std::string NameOf(int layer, std::string_view name,
                     std::string_view what) const;
  absl::Status CheckLimits();
  void Used(const std::string& name);

  const ModelSpec& spec_;
  const Checkpoint& checkpoint_;
  const LoadOptions& options_;
  kernels::Backend* const backend_;
  LoadProgress progress_;
  std::unique_ptr<Model> model_;
  uint64_t done_bytes_ = 0;
  bool bare_ = false;  // names are without the optional prefix
  absl::flat_hash_set<std::string> used_;
  std::set<std::string> formats_;
  std::vector<float> vectors_;
  std::vector<std::pair<size_t, const float**>> targets_;
};

namespace {

std::vector<float> FloatsOf(const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

const char* WhyDequantised(const std::vector<std::optional<CodeRows>>& codes) {
  for (const std::optional<CodeRows>& part : codes) {
    if (!part.has_value()) continue;
    if (!part->group_of.empty()) return "act-order";
    if (part->dtype == DType::kFp8 && part->group != part->cols) {
      return "fp8 in groups";
    }
  }
  return "rows of several forms";
}

}  // namespace

void ModelLoader::Used(const std::string& name) {
  used_.insert(name);
  const TensorInfo* const tensor = checkpoint_.Find(name);
  if (tensor != nullptr) done_bytes_ += tensor->end - tensor->begin;
  progress_(done_bytes_, checkpoint_.total_bytes());
}

DType ModelLoader::KeptAs(DType given, Use use) const {
  if (options_.quantisation.has_value() && use != Use::kRouter) {
    if (use != Use::kTokens) return *options_.quantisation;
    if (*options_.quantisation != DType::kFp8) return DType::kInt8;
  }
  return options_.weight_dtype.value_or(given == DType::kBF16 ? DType::kBF16
                                                              : DType::kF32);
}

absl::Status ModelLoader::PackQuantised(
    const std::vector<Part>& parts, int cols, Use use,
    std::unique_ptr<kernels::Matrix>& matrix) {
  std::vector<std::optional<CodeRows>> codes;  // by part; none: a float type
  bool same = true;
  for (const Part& part : parts) {
    std::optional<CodeRows>& rows = codes.emplace_back();
    const std::string product(absl::StripSuffix(part.name, ".weight"));
    if (HasCodes(checkpoint_, product)) {
      absl::StatusOr<CodeRows> read =
          ReadCodes(checkpoint_, spec_.quantisation, product, part.rows, cols);
      if (!read.ok()) return read.status();
      for (const std::string& name : read->names) Used(name);
      rows = *std::move(read);
    }
    same = same && rows.has_value() && SameForm(*codes[0], *rows);
  }
  if (!same) return PackDequantised(parts, codes, cols, use, matrix);
  CodeRows& whole = *codes[0];
  for (size_t i = 1; i < codes.size(); ++i) AppendRows(*codes[i], whole);
  absl::StatusOr<std::unique_ptr<kernels::Matrix>> packed =
      use == Use::kGated ? backend_->PackGatedCodes(whole.View())
                         : backend_->PackCodes(whole.View());
  return Keep(std::move(packed), matrix);
}

absl::Status ModelLoader::PackDequantised(
    const std::vector<Part>& parts,
    const std::vector<std::optional<CodeRows>>& codes, int cols, Use use,
    std::unique_ptr<kernels::Matrix>& matrix) {
  std::vector<float> values;
  // bf16 has twice the digits of e4m3; other codes' numbers need more.
  bool bf16 = true;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (codes[i].has_value()) {
      bf16 = bf16 && codes[i]->dtype == DType::kFp8;
      Dequantise(*codes[i], values);
      continue;
    }
    const absl::StatusOr<HostTensor> tensor =
        checkpoint_.Matrix(parts[i].name, parts[i].rows, cols);
    if (!tensor.ok()) return tensor.status();
    bf16 = bf16 && tensor->dtype == DType::kBF16;
    std::vector<std::byte> bytes;
    Append(*tensor, DType::kF32, bytes);
    const std::vector<float> numbers = FloatsOf(bytes);
    values.insert(values.end(), numbers.begin(), numbers.end());
    Used(parts[i].name);
  }
  const HostTensor whole{reinterpret_cast<const std::byte*>(values.data()),
                         DType::kF32,
                         static_cast<int64_t>(values.size()) / cols, cols};
  const DType kept = KeptAs(bf16 ? DType::kBF16 : DType::kF32, use);
  model_->dequantised_.push_back(
      absl::StrCat(parts[0].name, " (", WhyDequantised(codes), ")"));
  return Keep(use == Use::kGated ? backend_->PackGatedMatrix(whole, kept)
                                 : backend_->PackMatrix(whole, kept),
              matrix);
}

absl::Status ModelLoader::Keep(
    absl::StatusOr<std::unique_ptr<kernels::Matrix>> packed,
    std::unique_ptr<kernels::Matrix>& matrix) {
  if (!packed.ok()) return packed.status();
  matrix = *std::move(packed);
  formats_.insert(std::string(kernels::Name(matrix->dtype())));
  return absl::OkStatus();
}

absl::Status ModelLoader::Pack(const std::vector<Part>& parts, int cols,
                               Use use,
                               std::unique_ptr<kernels::Matrix>& matrix) {
  if (TANDEM_FAILPOINT("load.pack", "crash fail")) return failpoint::Error();
  for (const Part& part : parts) {
    if (HasCodes(checkpoint_,
                 std::string(absl::StripSuffix(part.name, ".weight")))) {
      return PackQuantised(parts, cols, use, matrix);
    }
  }
  std::vector<HostTensor> tensors;
  HostTensor whole{nullptr, DType::kF32, 0, cols};
  bool same = true;
  const bool turned = use != Use::kTokens && spec_.names.transposed;
  for (const Part& part : parts) {
    const absl::StatusOr<HostTensor> tensor =
        turned ? checkpoint_.Matrix(part.name, cols, part.rows)
               : checkpoint_.Matrix(part.name, part.rows, cols);
    if (!tensor.ok()) return tensor.status();
    tensors.push_back(*tensor);
    whole.rows += part.rows;
    same = same && tensor->dtype == tensors[0].dtype;
  }
  std::vector<std::byte> stacked;
  whole.data = tensors[0].data;
  whole.dtype = same ? tensors[0].dtype : DType::kF32;
  if (tensors.size() > 1 || turned) {
    std::vector<std::byte> values;
    for (const HostTensor& tensor : tensors) {
      Append(turned ? Transpose(tensor, values) : tensor, whole.dtype, stacked);
    }
    whole.data = stacked.data();
  }
  const DType kept = KeptAs(whole.dtype, use);
  for (const Part& part : parts) Used(part.name);
  return Keep(use == Use::kGated ? backend_->PackGatedMatrix(whole, kept)
                                 : backend_->PackMatrix(whole, kept),
              matrix);
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
  AddValues(FloatsOf(bytes), target);
  return absl::OkStatus();
}

absl::Status ModelLoader::AddMatrixValues(const std::string& name, int rows,
                                          const float** target) {
  const absl::StatusOr<HostTensor> tensor =
      checkpoint_.Matrix(name, rows, spec_.hidden_size);
  if (!tensor.ok()) return tensor.status();
  std::vector<std::byte> bytes;
  Append(*tensor, DType::kF32, bytes);
  Used(name);
  AddValues(FloatsOf(bytes), target);
  return absl::OkStatus();
}

absl::Status ModelLoader::AddNorm(const std::string& name, int size,
                                  Model::Norm& norm) {
  absl::Status status =
      AddVector({{absl::StrCat(name, ".weight"), size}}, &norm.weight);
  if (!status.ok()) return status;
  if (spec_.norm == NormKind::kOffset) {
    for (size_t i = vectors_.size() - static_cast<size_t>(size);
         i < vectors_.size(); ++i) {
      vectors_[i] += 1;
    }
  }
  if (spec_.norm == NormKind::kLayer) {
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

absl::Status ModelLoader::LoadExperts(int index, Model::Layer& layer) {
  const TensorNames& names = spec_.names;
  const int hidden = spec_.hidden_size;
  const int wide = spec_.intermediate_size;
  // What chooses is small, and its errors are whole experts: never quantised.
  absl::Status status =
      Pack({{NameOf(index, names.router, ".weight"), spec_.experts}}, hidden,
           Use::kRouter, layer.router);
  std::vector<kernels::Expert> experts;
  for (int e = 0; e < spec_.experts && status.ok(); ++e) {
    const auto name = [&](std::string_view part) {
      return NameOf(
          index,
          absl::StrCat(std::string(names.experts), e, ".", std::string(part)),
          ".weight");
    };
    auto& gate_up = layer.expert_matrices.emplace_back();
    status = Pack({{name(names.gate), wide}, {name(names.up), wide}}, hidden,
                  Use::kGated, gate_up);
    if (!status.ok()) break;
    kernels::Expert expert{.gate_up = gate_up.get()};
    auto& down = layer.expert_matrices.emplace_back();
    status = Pack({{name(names.down), hidden}}, wide, Use::kProduct, down);
    expert.down = down.get();
    experts.push_back(expert);
  }
  if (!status.ok()) return status;
  auto set = backend_->GroupExperts(experts);
  if (!set.ok()) {
    return WithMessage(
        set.status(),
        absl::StrCat("experts of layer ", index, ": ", set.status().message()));
  }
  layer.experts = *std::move(set);
  return absl::OkStatus();
}

absl::Status ModelLoader::LoadLayer(int index, Model::Layer& layer) {
  const TensorNames& names = spec_.names;
  const int hidden = spec_.hidden_size;
  const int wide = spec_.intermediate_size;
  const int query = spec_.heads * spec_.head_dim;
  const int key = spec_.kv_heads * spec_.head_dim;
  const auto name = [&](std::string_view part, std::string_view what) {
    return NameOf(index, part, what);
  };
  const auto qkv = [&](std::string_view what) -> std::vector<Part> {
    if (!names.qkv.empty()) return {{name(names.qkv, what), query + 2 * key}};
    return {{name(names.query, what), query},
            {name(names.key, what), key},
            {name(names.value, what), key}};
  };
  const auto gate_up = [&](std::string_view what) -> std::vector<Part> {
    if (!names.gate_up.empty()) return {{name(names.gate_up, what), 2 * wide}};
    if (!spec_.is_gated()) return {{name(names.up, what), wide}};
    return {{name(names.gate, what), wide}, {name(names.up, what), wide}};
  };
  const auto norm = [&](std::string_view part, int size, Model::Norm& to) {
    return part.empty() ? absl::OkStatus() : AddNorm(name(part, ""), size, to);
  };
  absl::Status status;
  status.Update(norm(names.input_norm, hidden, layer.input_norm));
  status.Update(Pack(qkv(".weight"), hidden, Use::kProduct, layer.qkv));
  status.Update(norm(names.query_norm, spec_.head_dim, layer.query_norm));
  status.Update(norm(names.key_norm, spec_.head_dim, layer.key_norm));
  status.Update(Pack({{name(names.output, ".weight"), hidden}}, query,
                     Use::kProduct, layer.output));
  status.Update(
      norm(names.attention_output_norm, hidden, layer.attention_output_norm));
  status.Update(norm(names.mlp_norm, hidden, layer.mlp_norm));
  if (spec_.experts > 0) {
    status.Update(LoadExperts(index, layer));
  } else {
    status.Update(Pack(gate_up(".weight"), hidden,
                       spec_.is_gated() ? Use::kGated : Use::kProduct,
                       layer.gate_up));
    status.Update(Pack({{name(names.down, ".weight"), hidden}}, wide,
                       Use::kProduct, layer.down));
  }
  status.Update(norm(names.mlp_output_norm, hidden, layer.mlp_output_norm));
  if (spec_.qkv_bias) {
    status.Update(AddVector(qkv(".bias"), &layer.qkv_bias));
  }
  if (spec_.output_bias) {
    status.Update(
        AddVector({{name(names.output, ".bias"), hidden}}, &layer.output_bias));
  }
  if (spec_.mlp_bias) {
    status.Update(AddVector(gate_up(".bias"), &layer.gate_up_bias));
    status.Update(
        AddVector({{name(names.down, ".bias"), hidden}}, &layer.down_bias));
  }
  return status;
}

// transformers multiplies in the embedding's type.
void ModelLoader::RoundEmbeddingScale() {
  const TensorInfo* const embedding =
      checkpoint_.Find(NameOf(spec_.names.embedding, ".weight"));
  if (embedding == nullptr || embedding->dtype != "BF16") return;
  auto bits = std::bit_cast<uint32_t>(
      static_cast<float>(model_->spec_.embedding_scale));
  bits += 0x7fffu + (bits >> 16 & 1u);  // to nearest, ties to even
  model_->spec_.embedding_scale = std::bit_cast<float>(bits & 0xffff0000u);
}

// Old conversions carry what follows from the config (frequencies, masks).
bool ModelLoader::IsBuffer(std::string_view name) const {
  const auto& ignored = spec_.names.ignored_suffixes;
  return std::any_of(ignored.begin(), ignored.end(),
                     [&](std::string_view suffix) {
                       return !suffix.empty() && name.ends_with(suffix);
                     });
}

// A tied head may be there twice.
bool ModelLoader::IsTiedHead(std::string_view name) const {
  return spec_.tied_head && name == NameOf(spec_.names.head, ".weight");
}

// Trainers that untie the head and keep the config would lose what they
// trained.
absl::Status ModelLoader::CheckTiedHead(const TensorInfo& head) const {
  const TensorInfo* const embedding =
      checkpoint_.Find(NameOf(spec_.names.embedding, ".weight"));
  if (embedding != nullptr && embedding->dtype == head.dtype &&
      embedding->shape == head.shape &&
      memcmp(checkpoint_.bytes(*embedding).data(),
             checkpoint_.bytes(head).data(), head.end - head.begin) == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      checkpoint_.path(head), ": ", head.name,
      " differs from the embedding, but tie_word_embeddings is true: set it to "
      "false in config.json to use ",
      head.name, ", or remove that tensor to use the embedding"));
}

// Quantisers to GPTQ give every product a bias, of zeros where there is none.
bool ModelLoader::IsNoBias(const TensorInfo& tensor) const {
  if (spec_.quantisation.method != Quantisation::Method::kGptq ||
      !absl::EndsWith(tensor.name, ".bias") ||
      !HasCodes(checkpoint_,
                std::string(absl::StripSuffix(tensor.name, ".bias")))) {
    return false;
  }
  const absl::Span<const std::byte> bytes = checkpoint_.bytes(tensor);
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte b) { return b == std::byte{0}; });
}

absl::Status ModelLoader::RefuseLeftovers() const {
  for (const TensorInfo& tensor : checkpoint_.tensors()) {
    if (IsTiedHead(tensor.name)) {
      const absl::Status status = CheckTiedHead(tensor);
      if (!status.ok()) return status;
      continue;
    }
    if (used_.contains(tensor.name) || IsBuffer(tensor.name) ||
        IsNoBias(tensor) ||
        (spec_.quantisation.kv_scales && IsKvScale(tensor.name))) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat(checkpoint_.path(tensor), ": tensor ", Quote(tensor.name),
                     " has no place in the model that config.json describes (",
                     spec_.architecture, ", num_hidden_layers ", spec_.layers,
                     ", attention_bias ", spec_.output_bias ? "true" : "false",
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
  status = Pack({{NameOf(names.embedding, ".weight"), spec_.vocab_size}},
                spec_.hidden_size, Use::kTokens, model_->embedding_);
  if (!status.ok()) return status;
  RoundEmbeddingScale();
  if (!names.positions.empty()) {
    // One vector: row after row.
    status = AddMatrixValues(NameOf(names.positions, ".weight"),
                             spec_.max_positions, &model_->positions_);
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
  if (!spec_.tied_head) {
    status.Update(Pack({{NameOf(names.head, ".weight"), spec_.vocab_size}},
                       spec_.hidden_size, Use::kTokens, model_->head_));
  }
  status.Update(RefuseLeftovers());
  if (!status.ok()) return status;
  AddRope(model_->spec_.rope, model_->rope_);
  if (spec_.window > 0) AddRope(model_->spec_.local_rope, model_->local_rope_);
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
