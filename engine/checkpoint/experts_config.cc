// SPDX-License-Identifier: Apache-2.0
#include "engine/checkpoint/experts_config.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/checkpoint/file.h"
#include "kernels/route.h"

namespace tandem::engine {
namespace {

// "mlp_layer_types", a name for each layer.
void ReadLayerTypes(ConfigFields& fields, const nlohmann::json& types,
                    std::vector<bool>& dense) {
  const auto refuse = [&](const nlohmann::json& what) {
    fields.Refuse(
        "mlp_layer_types", ShowJson(what),
        absl::StrCat("a list of ", dense.size(), " names, dense or sparse"));
  };
  if (!types.is_array() || types.size() != dense.size()) return refuse(types);
  for (size_t i = 0; i < dense.size(); ++i) {
    if (types[i] != "dense" && types[i] != "sparse") return refuse(types[i]);
    dense[i] = types[i] == "dense";
  }
}

// Which layers have no experts, by what the family's configs say.
void ReadDenseLayers(ConfigFields& fields, const Family& family,
                     ModelSpec& spec) {
  const int layers = spec.layers;
  std::vector<bool> dense(static_cast<size_t>(layers), false);
  const auto all_but = [&](int step) {
    for (int i = 0; i < layers; ++i) {
      if ((i + 1) % step != 0) dense[static_cast<size_t>(i)] = true;
    }
  };
  switch (family.dense) {
    case DenseLayers::kNone:
      break;
    case DenseLayers::kFirst:
      if (const nlohmann::json* types = fields.Find("mlp_layer_types")) {
        ReadLayerTypes(fields, *types, dense);
        break;
      }
      fields.Int("moe_layer_freq", 1, 1, 1);
      std::fill_n(dense.begin(),
                  std::min(layers, fields.Int("first_k_dense_replace", 0, 1024,
                                              family.dense_layers)),
                  true);
      break;
    case DenseLayers::kListed: {
      all_but(fields.Int("decoder_sparse_step", 1, 1024, 1));
      for (const int layer : fields.Ints("mlp_only_layers", 0, 1023)) {
        if (layer < layers) dense[static_cast<size_t>(layer)] = true;
      }
      break;
    }
    case DenseLayers::kOutside: {
      all_but(fields.Int("moe_layer_interval", 1, 1024, 1));
      const int begin = fields.Int("moe_layer_start_index", 0, 1024, 1);
      const int last = fields.Int("moe_layer_end_index", -1, 1 << 20, -1);
      for (int i = 0; i < layers; ++i) {
        if (i < begin || (last >= 0 && i > last)) {
          dense[static_cast<size_t>(i)] = true;
        }
      }
      break;
    }
  }
  if (std::find(dense.begin(), dense.end(), true) == dense.end()) return;
  spec.dense = std::move(dense);
  if (spec.names.stack != ExpertStack::kNone) {
    fields.Refuse("mlp_only_layers or decoder_sparse_step",
                  "layers without experts",
                  "such that all have some, in this family");
  }
}

// Which groups of experts rows choose among.
void ReadGroups(ConfigFields& fields, const Family& family,
                kernels::RouteOptions& routes) {
  const int groups = fields.Int("n_group", 1, kernels::kMostExpertGroups,
                                family.expert_groups);
  const int chosen = fields.Int("topk_group", 1, groups,
                                std::min(groups, family.chosen_groups));
  // Of one all are compared, whatever there is of it.
  if (groups == 1) return;
  const int size = routes.experts / groups;
  if (routes.experts % groups != 0 || size < 2) {
    return fields.Refuse(
        "n_group", absl::StrCat(groups),
        absl::StrCat("groups of two and more of ", routes.experts, " experts"));
  }
  if (chosen * size < routes.chosen) {
    return fields.Refuse("topk_group", absl::StrCat(chosen),
                         absl::StrCat("groups of ", routes.chosen,
                                      " experts, which a token chooses"));
  }
  routes.groups = groups;
  routes.chosen_groups = chosen;
}

void ReadScale(ConfigFields& fields, const Family& family,
               kernels::RouteOptions& routes) {
  routes.scale = static_cast<float>(
      fields.Double("routed_scaling_factor", 1e-4, 1e4, family.route_scale));
}

// How rows choose, of sigmoids: by groups, and scaled.
void ReadSigmoidRoutes(ConfigFields& fields, const Family& family,
                       kernels::RouteOptions& routes) {
  routes.sigmoid = true;
  if (fields.String("scoring_func", "sigmoid") == "softmax") {
    fields.Refuse("scoring_func", Quote("softmax"), "sigmoid or left out");
  }
  ReadScale(fields, family, routes);
  ReadGroups(fields, family, routes);
}

// Of DeepSeek V2's softmax: by the best of each group, or of all.
void ReadGroupLimits(ConfigFields& fields, const Family& family,
                     kernels::RouteOptions& routes) {
  const std::string scores = fields.String("scoring_func", "softmax");
  if (scores != "softmax") {
    fields.Refuse("scoring_func", Quote(scores), "softmax or left out");
  }
  // The model's own code would scale or normalise, transformers' scales.
  if (routes.normalise) {
    fields.Refuse("norm_topk_prob", "true", "false or left out");
  }
  ReadScale(fields, family, routes);
  const std::string method = fields.String("topk_method", "greedy");
  if (method == "greedy") return;
  if (method != "group_limited_greedy") {
    fields.Refuse("topk_method", Quote(method),
                  "greedy or group_limited_greedy");
  }
  routes.group_scores = 1;
  ReadGroups(fields, family, routes);
}

// What all rows take beside experts.
void ReadSharedExpert(ConfigFields& fields, const Family& family, int max_width,
                      ModelSpec& spec) {
  const ConfigKeys& keys = family.keys;
  if (!keys.shared_size.empty()) {
    const bool may_lack = family.names.shared_gate.empty();
    spec.shared_size =
        fields.Int(keys.shared_size, may_lack ? 0 : 1, max_width,
                   may_lack ? std::optional<int>(0) : std::nullopt);
  } else if (!keys.shared_experts.empty()) {
    spec.shared_size =
        fields.Int(keys.shared_experts, 0, max_width / spec.expert_size, 0) *
        spec.expert_size;
  }
  using Shared = kernels::SharedExpert;
  spec.routes.shared = spec.shared_size == 0              ? Shared::kNone
                       : family.names.shared_gate.empty() ? Shared::kWhole
                                                          : Shared::kGated;
}

// A number, or a list of the same one for each layer.
int SameInt(ConfigFields& fields, std::string_view field, int min, int max,
            std::optional<int> fallback = std::nullopt) {
  const nlohmann::json* value = fields.Find(field);
  if (value == nullptr || !value->is_array()) {
    return fields.Int(field, min, max, fallback);
  }
  const std::vector<int> all = fields.Ints(field, min, max);
  if (all.empty() || std::count(all.begin(), all.end(), all[0]) !=
                         static_cast<int64_t>(all.size())) {
    fields.Refuse(field, ShowJson(*value), "one number for all layers");
    return min;
  }
  return all[0];
}

// Where one key is the size of each expert, what else may be said of them.
void RefuseOtherSizes(ConfigFields& fields, const ModelSpec& spec) {
  const auto expect = [&](const char* field, int value) {
    if (SameInt(fields, field, 0, 1 << 20, value) == value) return;
    fields.Refuse(field, ShowJson(*fields.Find(field)),
                  absl::StrCat(value, ", in all layers, or left out"));
  };
  expect("moe_intermediate_size", spec.expert_size);
  expect("num_shared_expert", 1);
  expect("moe_layer_num_skipped", 0);
  if (!fields.Bool("use_mixed_mlp_moe", true)) {
    fields.Refuse("use_mixed_mlp_moe", "false", "true or left out");
  }
}

void ReadRoutes(ConfigFields& fields, const Family& family, ModelSpec& spec) {
  const ConfigKeys& keys = family.keys;
  // transformers 5 renames many families'.
  static constexpr char kNew[] = "num_local_experts";
  constexpr int kMost = kernels::kMostExperts;
  kernels::RouteOptions& routes = spec.routes;
  const bool renamed =
      fields.Find(keys.experts) == nullptr && fields.Find(kNew);
  routes.experts = SameInt(fields, renamed ? kNew : keys.experts, 1, kMost);
  if (fields.Int(kNew, 1, kMost, routes.experts) != routes.experts) {
    fields.Refuse(kNew, ShowJson(*fields.Find(kNew)),
                  absl::StrCat(routes.experts, ", as ",
                               std::string(keys.experts), ", or left out"));
  }
  routes.chosen =
      SameInt(fields, keys.experts_per_token, 1, std::max(1, routes.experts));
  routes.normalise =
      family.normalised == Normalised::kAlways ||
      fields.Bool("norm_topk_prob",
                  family.normalised == Normalised::kUnlessDenied);
  if (family.sigmoid_routes) ReadSigmoidRoutes(fields, family, routes);
  if (family.group_limits) ReadGroupLimits(fields, family, routes);
}

}  // namespace

void ReadFeedForward(ConfigFields& fields, const Family& family, int max_width,
                     ModelSpec* spec) {
  const ConfigKeys& keys = family.keys;
  const bool block =
      family.expert_block && fields.Bool("enable_moe_block", false);
  if (keys.experts.empty() || (family.expert_block && !block)) {
    spec->names.stack = ExpertStack::kNone;
    std::optional<int> wide;
    if (family.wide_if_silent) {
      wide = std::min(4 * spec->hidden_size, max_width);
    }
    spec->intermediate_size =
        fields.Int(keys.intermediate_size, 1, max_width, wide);
    return;
  }
  ReadRoutes(fields, family, *spec);
  spec->expert_size = fields.Int(
      keys.expert_size.empty() ? keys.intermediate_size : keys.expert_size, 1,
      max_width);
  ReadDenseLayers(fields, family, *spec);
  if (!fields.status().ok()) return;
  if (block) {
    spec->shared_size = fields.Int(keys.intermediate_size, 1, max_width);
  } else {
    ReadSharedExpert(fields, family, max_width, *spec);
  }
  if (keys.shared_size == keys.intermediate_size) {
    RefuseOtherSizes(fields, *spec);
  }
  if (!spec->dense.empty()) {
    spec->intermediate_size = fields.Int(keys.intermediate_size, 1, max_width);
  }
  spec->draft_layers = fields.Int("num_nextn_predict_layers", 0, 64, 0);
  if (family.windows == Windows::kNone &&
      fields.Bool("use_sliding_window", false)) {
    fields.Refuse("use_sliding_window", "true", "false or left out");
  }
}

}  // namespace tandem::engine
