// SPDX-License-Identifier: Apache-2.0
#include "engine/model/leftovers.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <string_view>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/error.h"
#include "engine/checkpoint/quantisation.h"

namespace tandem::engine {
namespace {

// Behind a layer's number.
constexpr std::array<std::string_view, 4> kKvParts = {
    ".self_attn.k_proj.", ".self_attn.v_proj.", ".self_attn.k_norm.",
    ".self_attn.v_norm."};

// Old conversions carry what follows from the config (frequencies, masks).
bool IsBuffer(const ModelSpec& spec, std::string_view name) {
  const auto& ignored = spec.names.ignored_suffixes;
  return std::any_of(ignored.begin(), ignored.end(),
                     [&](std::string_view suffix) {
                       return !suffix.empty() && name.ends_with(suffix);
                     });
}

// Files carry what would make K and V of layers that look at other layers'.
bool IsOfSharedKv(const ModelSpec& spec, std::string_view name) {
  if (spec.shared_kv_layers == 0 || !name.starts_with(spec.names.layers)) {
    return false;
  }
  name.remove_prefix(spec.names.layers.size());
  int layer = -1;
  const auto [end, error] =
      std::from_chars(name.data(), name.data() + name.size(), layer);
  if (error != std::errc() || layer < spec.kv_layers() ||
      layer >= spec.layers) {
    return false;
  }
  name.remove_prefix(static_cast<size_t>(end - name.data()));
  return std::any_of(
      kKvParts.begin(), kKvParts.end(),
      [&](std::string_view part) { return name.starts_with(part); });
}

// Quantisers to GPTQ give every product a bias, of zeros where there is none.
bool IsNoBias(const ModelSpec& spec, const Checkpoint& checkpoint,
              const TensorInfo& tensor) {
  if (spec.quantisation.method != Quantisation::Method::kGptq ||
      !absl::EndsWith(tensor.name, ".bias") ||
      !HasCodes(checkpoint,
                std::string(absl::StripSuffix(tensor.name, ".bias")))) {
    return false;
  }
  const absl::Span<const std::byte> bytes = checkpoint.bytes(tensor);
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte b) { return b == std::byte{0}; });
}

// A tied head may be there twice. Trainers that untie it and keep the config
// would lose what they trained.
absl::Status CheckTiedHead(const Checkpoint& checkpoint,
                           const std::string& embedding_name,
                           const TensorInfo& head) {
  const TensorInfo* const embedding = checkpoint.Find(embedding_name);
  if (embedding != nullptr && embedding->dtype == head.dtype &&
      embedding->shape == head.shape &&
      memcmp(checkpoint.bytes(*embedding).data(), checkpoint.bytes(head).data(),
             head.end - head.begin) == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      checkpoint.path(head), ": ", head.name,
      " differs from the embedding, but tie_word_embeddings is true: set it to "
      "false in config.json to use ",
      head.name, ", or remove that tensor to use the embedding"));
}

}  // namespace

bool IsOfDrafts(const ModelSpec& spec, std::string_view name) {
  if (spec.draft_layers == 0) return false;
  if (name.starts_with("model.mtp_")) return true;
  if (!name.starts_with(spec.names.layers)) return false;
  name.remove_prefix(spec.names.layers.size());
  int layer = -1;
  std::from_chars(name.data(), name.data() + name.size(), layer);
  return layer >= spec.layers && layer < spec.layers + spec.draft_layers;
}

absl::Status RefuseLeftovers(const ModelSpec& spec,
                             const Checkpoint& checkpoint,
                             const WeightPacker& packer,
                             const std::string& embedding,
                             const std::string& head) {
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    if (spec.tied_head && tensor.name == head) {
      const absl::Status status = CheckTiedHead(checkpoint, embedding, tensor);
      if (!status.ok()) return status;
      continue;
    }
    if (packer.taken(tensor.name) || IsBuffer(spec, tensor.name) ||
        IsOfDrafts(spec, tensor.name) || IsOfSharedKv(spec, tensor.name) ||
        IsNoBias(spec, checkpoint, tensor) ||
        (spec.quantisation.kv_scales && IsKvScale(tensor.name))) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat(checkpoint.path(tensor), ": tensor ", Quote(tensor.name),
                     " has no place in the model that config.json describes (",
                     spec.architecture, ", num_hidden_layers ", spec.layers,
                     ", attention_bias ", spec.output_bias ? "true" : "false",
                     ", mlp_bias ", spec.mlp_bias ? "true" : "false", ")"));
  }
  return absl::OkStatus();
}

}  // namespace tandem::engine
