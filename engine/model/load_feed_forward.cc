// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "engine/checkpoint/quantisation.h"
#include "engine/model/model_loader.h"

namespace tandem::engine {

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
  if (!names.router_norm.empty()) {
    status.Update(LoadExpertNorms(index, layer));
  }
  return status;
}

absl::Status ModelLoader::LoadExpertNorms(int index, Model::Layer& layer) {
  const TensorNames& names = spec_.names;
  const int hidden = spec_.hidden_size;
  absl::Status status =
      AddVector({{NameOf(index, names.router_norm, ""), hidden}},
                &layer.router_norm.weight);
  if (!status.ok()) return status;
  const auto root =
      static_cast<float>(1 / std::sqrt(static_cast<double>(hidden)));
  for (auto i = vectors_.end() - hidden; i < vectors_.end(); ++i) *i *= root;
  status.Update(AddVector(
      {{NameOf(index, names.expert_scales, ""), spec_.routes.experts}},
      &layer.expert_scales));
  status.Update(AddNorm(index, names.expert_norm, hidden, layer.expert_norm));
  status.Update(AddNorm(index, names.expert_output_norm, hidden,
                        layer.expert_output_norm));
  status.Update(AddNorm(index, names.shared_output_norm, hidden,
                        layer.shared_output_norm));
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
  const std::string gate_up =
      name(names.stack_gate_up.empty() ? names.gate_up : names.stack_gate_up);
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

// What all rows take, by itself or beside experts.
absl::Status ModelLoader::LoadDense(int index, Model::Layer& layer) {
  const TensorNames& names = spec_.names;
  const int hidden = spec_.hidden_size;
  const int wide = spec_.dense_size(index);
  const std::string prefix(spec_.has_experts(index) ? names.shared
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

}  // namespace tandem::engine
