// SPDX-License-Identifier: Apache-2.0
#include "engine/checkpoint/layers_config.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/checkpoint/file.h"
#include "engine/checkpoint/json.h"
#include "engine/checkpoint/rope_config.h"
#include "kernels/types.h"

namespace tandem::engine {
namespace {

using nlohmann::json;

constexpr char kSliding[] = "sliding_attention";  // of "layer_types"

// "layer_types", a name for each layer.
void ReadLayerTypes(ConfigFields& fields, const json& types, ModelSpec& spec) {
  const std::string expected = absl::StrCat(
      "a list of ", spec.layers, " names, full_attention or sliding_attention");
  if (!types.is_array() || static_cast<int>(types.size()) != spec.layers) {
    return fields.Refuse("layer_types", ShowJson(types), expected);
  }
  for (int i = 0; i < spec.layers; ++i) {
    if (types[i] != "full_attention" && types[i] != kSliding) {
      return fields.Refuse("layer_types", ShowJson(types[i]), expected);
    }
    spec.windowed[i] = types[i] == kSliding;
  }
}

// "no_rope_layers", a 1 for each layer that turns.
void ReadUnturned(ConfigFields& fields, const Family& family, ModelSpec& spec) {
  if (family.no_rope_interval == 0) return;
  static constexpr char kField[] = "no_rope_layers";
  const int interval =
      fields.Int("no_rope_layer_interval", 1, 1 << 20, family.no_rope_interval);
  const json* turned = fields.Find(kField);
  const std::string expected = absl::StrCat(
      "a list of ", spec.layers, " numbers, 1 for a layer that turns, else 0");
  if (turned != nullptr &&
      (!turned->is_array() || static_cast<int>(turned->size()) < spec.layers)) {
    return fields.Refuse(kField, ShowJson(*turned), expected);
  }
  for (int i = 0; i < spec.layers; ++i) {
    const json turns = turned != nullptr
                           ? (*turned)[i]
                           : json((i + 1) % interval != 0 ? 1 : 0);
    if (turns != 0 && turns != 1) {
      return fields.Refuse(kField, ShowJson(turns), expected);
    }
    spec.no_rope.push_back(turns == 0);
  }
  if (std::find(spec.no_rope.begin(), spec.no_rope.end(), true) ==
      spec.no_rope.end()) {
    spec.no_rope.clear();
  }
}

// Which layers have a window. One as long as the context is none.
void ReadWindows(ConfigFields& fields, const Family& family, ModelSpec& spec) {
  if (family.windows == Windows::kNone) return;
  const bool opt_in = family.windows == Windows::kOptIn;
  const bool later = opt_in || family.windows == Windows::kLater;
  const json* types = fields.Find("layer_types");
  if (opt_in && !fields.Bool("use_sliding_window", false)) {
    // transformers does one or the other, by the kind of attention.
    if (types != nullptr && types->is_array() &&
        std::find(types->begin(), types->end(), kSliding) != types->end()) {
      fields.Refuse("layer_types", Quote(kSliding),
                    "full_attention where use_sliding_window is not true");
    }
    return;
  }
  if (fields.HasNull("sliding_window")) return;
  if (family.window == 0 && fields.Find("sliding_window") == nullptr) return;
  spec.window = fields.Int("sliding_window", 1, kMaxPositions, family.window);
  spec.windowed.assign(spec.layers, true);
  if (family.no_rope_interval > 0) {
    for (int i = 0; i < spec.layers; ++i) spec.windowed[i] = !spec.turns(i);
  } else if (later) {
    const int from =
        fields.Int("max_window_layers", 0, 1 << 20, family.max_window_layers);
    for (int i = 0; i < spec.layers; ++i) spec.windowed[i] = i >= from;
  }
  if (family.windows == Windows::kMixed && types == nullptr) {
    const int pattern =
        fields.Int("sliding_window_pattern", 1, 1024, family.window_pattern);
    for (int i = 0; i < spec.layers; ++i) {
      spec.windowed[i] = (i + 1) % pattern != 0;
    }
  }
  if (types != nullptr && family.windows != Windows::kAll) {
    ReadLayerTypes(fields, *types, spec);
  }
  if (family.last_sees_all) spec.windowed.back() = false;
}

// The same kind is the smaller one in every format of a KV cache.
void CheckFullHeads(ConfigFields& fields, const Family& family,
                    const ModelSpec& spec) {
  const auto bytes = [](kernels::DType type, int heads, int dim) {
    return kernels::KvRowBytes(type, heads, dim);
  };
  for (const kernels::DType type :
       {kernels::DType::kBF16, kernels::DType::kInt8, kernels::DType::kInt4}) {
    const int64_t full = bytes(type, spec.full_kv_heads, spec.full_head_dim);
    const int64_t windowed = bytes(type, spec.kv_heads, spec.head_dim);
    if (spec.full_take_less() ? full > windowed : windowed > full) {
      fields.Refuse(
          family.keys.full_head_dim, absl::StrCat(spec.full_head_dim),
          absl::StrCat("one with which keys of layers that see all take more "
                       "or less than those of ",
                       spec.kv_heads, " heads of ", spec.head_dim,
                       " in every format of a KV cache"));
    }
  }
}

// "per_layer_config", as transformers 5 saves it: what differs, by the layers'
// numbers. Those that see all have the same heads, the others the config's own.
ModelSpec::KvHeads ReadOverrides(ConfigFields& fields, const json& layers,
                                 const ModelSpec& spec) {
  static constexpr char kField[] = "per_layer_config";
  const ModelSpec::KvHeads own = {spec.kv_heads, spec.head_dim};
  ModelSpec::KvHeads full = own;
  bool first = true;
  // All numbers have as many digits as the largest one.
  std::map<int, json> by_number;
  for (const auto& [key, value] : layers.items()) {
    int number = 0;
    if (absl::SimpleAtoi(key, &number)) by_number[number] = value;
  }
  for (int i = 0; i < spec.layers && layers.is_object(); ++i) {
    ModelSpec::KvHeads heads = own;
    const auto found = by_number.find(i);
    const json given =
        found == by_number.end() ? json::object() : found->second;
    for (const auto& [key, value] : given.items()) {
      int& number = key == "head_dim" ? heads.dim : heads.count;
      if ((key == "head_dim" || key == "num_key_value_heads") &&
          value.is_number_unsigned() && value <= 1024) {
        number = value.get<int>();
      } else {
        fields.Refuse(absl::StrCat(kField, ".", i, ".", key), ShowJson(value),
                      "head_dim or num_key_value_heads, up to 1024");
      }
    }
    const bool windowed = spec.is_windowed(i);
    if (!windowed && std::exchange(first, false)) full = heads;
    if (heads != (windowed ? own : full)) {
      fields.Refuse(absl::StrCat(kField, ".", i), ShowJson(given),
                    "as of the other layers with or without a window");
    }
  }
  if (!layers.is_object()) {
    fields.Refuse(kField, ShowJson(layers), "an object");
  }
  return full;
}

// Of layers that see all.
ModelSpec::KvHeads ReadFullHeads(ConfigFields& fields, const Family& family,
                                 const ModelSpec& spec) {
  const ConfigKeys& keys = family.keys;
  if (const json* layers = fields.Find("per_layer_config")) {
    return ReadOverrides(fields, *layers, spec);
  }
  const int dim = fields.Int(keys.full_head_dim, 8, kernels::kMaxHeadDim,
                             family.full_head_dim);
  return {spec.keys_are_values
              ? fields.Int(keys.full_kv_heads, 1, 1024, spec.kv_heads)
              : spec.kv_heads,
          dim};
}

// Heads of layers that see all, where they are others; without windows they are
// all layers'.
void ReadHeadsByLayer(ConfigFields& fields, const Family& family,
                      ModelSpec& spec) {
  const ConfigKeys& keys = family.keys;
  if (keys.full_head_dim.empty()) return;
  spec.keys_are_values = fields.Bool(keys.keys_are_values, false);
  const ModelSpec::KvHeads full = ReadFullHeads(fields, family, spec);
  if (!fields.status().ok()) return;
  if (full.dim < 8 || full.dim > kernels::kMaxHeadDim || full.dim % 8 != 0) {
    fields.Refuse(
        keys.full_head_dim, absl::StrCat(full.dim),
        absl::StrCat("a multiple of 8 from 8 to ", kernels::kMaxHeadDim));
  }
  if (full.count < 1 || spec.heads % full.count != 0) {
    fields.Refuse(keys.full_kv_heads, absl::StrCat(full.count),
                  absl::StrCat("a divisor of ", std::string(keys.heads), ", ",
                               spec.heads));
  }
  if (!fields.status().ok()) return;
  const bool any_full = spec.common_window() == 0;
  if (!HasWindows(spec)) {
    spec.kv_heads = full.count;
    spec.head_dim = full.dim;
  } else if (any_full &&
             full != ModelSpec::KvHeads{spec.kv_heads, spec.head_dim}) {
    spec.full_kv_heads = full.count;
    spec.full_head_dim = full.dim;
    CheckFullHeads(fields, family, spec);
  }
}

// Of Gemma 4's small models.
void ReadSharedKv(ConfigFields& fields, const Family& family, ModelSpec& spec) {
  if (!family.small_kinds) return;
  static constexpr char kField[] = "num_kv_shared_layers";
  spec.shared_kv_layers = fields.Int(kField, 0, spec.layers - 1, 0);
  const bool windows = HasWindows(spec);
  bool seen[2] = {false, false};  // without a window, and with one
  for (int i = 0; i < spec.layers && fields.status().ok(); ++i) {
    bool& kind = seen[windows && spec.windowed[i] ? 1 : 0];
    kind = kind || spec.has_kv(i);
    if (!kind) {
      fields.Refuse(kField, absl::StrCat(spec.shared_kv_layers),
                    "so many that layers before them see as much as each");
    }
  }
  spec.wide_shared =
      spec.shared_kv_layers > 0 && fields.Bool("use_double_wide_mlp", false);
}

// What layers are told of tokens.
void ReadTold(ConfigFields& fields, const Family& family, ModelSpec& spec) {
  static constexpr char kVocab[] = "vocab_size_per_layer_input";
  if (family.small_kinds) {
    spec.told = fields.Int("hidden_size_per_layer_input", 0, 1 << 14, 256);
  }
  if (spec.told == 0) return;
  spec.told_vocab = fields.Int(kVocab, 2, 1 << 20, family.vocab_size);
  if (spec.told_vocab < spec.vocab_size) {
    fields.Refuse(kVocab, absl::StrCat(spec.told_vocab),
                  absl::StrCat("at least vocab_size, ", spec.vocab_size));
  }
}

// Where layers turn that have a window, and no others.
void TurnWindows(const ConfigFields& fields, const Family& family,
                 ModelSpec& spec) {
  const bool all = family.turning == Turning::kAll ||
                   (family.turning == Turning::kWindowedOrAll &&
                    fields.HasNull("sliding_window"));
  for (int i = 0; i < spec.layers && !all; ++i) {
    spec.no_rope.push_back(spec.windowed.empty() || !spec.windowed[i]);
  }
}

}  // namespace

void ReadLayers(ConfigFields& fields, const Family& family, ModelSpec& spec) {
  ReadUnturned(fields, family, spec);
  ReadWindows(fields, family, spec);
  TurnWindows(fields, family, spec);
  ReadHeadsByLayer(fields, family, spec);
  ReadSharedKv(fields, family, spec);
  ReadTold(fields, family, spec);
}

bool HasWindows(const ModelSpec& spec) {
  return std::find(spec.windowed.begin(), spec.windowed.end(), true) !=
         spec.windowed.end();
}

void DropIdleWindow(const Family& family, ModelSpec& spec) {
  if (HasWindows(spec) &&
      (spec.window < spec.max_positions || family.local_rope_theta > 0)) {
    return;
  }
  spec.window = 0;
  spec.windowed.clear();
}

}  // namespace tandem::engine
