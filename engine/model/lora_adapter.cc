// SPDX-License-Identifier: Apache-2.0
// Reads what PEFT's save_pretrained wrote:
//
//   adapter_config.json        r, lora_alpha, use_rslora, rank_pattern,
//                              alpha_pattern; and what is refused
//   adapter_model.safetensors  base_model.model.MODULE.lora_A.weight [r,
//                              inputs] and ...lora_B.weight [outputs, r]
//
// The tensors say which modules are adapted, and by what rank; the scale is
// lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora.

#include <bit>
#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "engine/checkpoint/config_fields.h"
#include "engine/checkpoint/file.h"
#include "engine/checkpoint/json.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/checkpoint/widen.h"
#include "engine/model/fingerprint.h"
#include "engine/model/lora.h"

namespace tandem::engine {
namespace {

constexpr uint64_t kMaxFileBytes = uint64_t{8} << 30;
constexpr char kPrefix[] = "base_model.model.";
constexpr char kFileA[] = ".lora_A.weight";
constexpr char kFileB[] = ".lora_B.weight";

struct PeftConfig {
  int rank = 0;
  double alpha = 0;
  bool root = false;                                   // use_rslora
  std::vector<std::pair<std::string, int>> ranks;      // of modules that end so
  std::vector<std::pair<std::string, double>> alphas;  // likewise
};

// Not there, null, false, or an empty list, object or string.
bool AsksForNothing(const nlohmann::json* value) {
  if (value == nullptr || value->is_null()) return true;
  if (value->is_boolean()) return !value->get<bool>();
  return (value->is_array() || value->is_object() || value->is_string()) &&
         value->empty();
}

void RefuseOthers(ConfigFields& fields) {
  const std::string type = fields.String("peft_type", "");
  if (type != "LORA") fields.Refuse("peft_type", type, "LORA");
  const std::string bias = fields.String("bias", "none");
  if (bias != "none") {
    fields.Refuse("bias", bias, "none: adapters with biases are not supported");
  }
  for (const char* field :
       {"use_dora", "use_qalora", "lora_bias", "modules_to_save",
        "layer_replication", "trainable_token_indices", "target_parameters",
        "alora_invocation_tokens"}) {
    const nlohmann::json* const value = fields.Find(field);
    if (AsksForNothing(value)) continue;
    fields.Refuse(field, ShowJson(*value), "left out: it is not supported");
  }
  // Others (pissa, olora, corda, loftq, lora_ga) change the base model's
  // weights, which the adapter then needs.
  const nlohmann::json* const init = fields.Find("init_lora_weights");
  if (init == nullptr || init->is_null() || init->is_boolean()) return;
  const std::string name =
      init->is_string() ? absl::AsciiStrToLower(init->get<std::string>()) : "";
  if (name == "gaussian" || name == "eva" || name == "orthogonal") return;
  fields.Refuse("init_lora_weights", name.empty() ? ShowJson(*init) : name,
                "true, false, gaussian, eva or orthogonal, which leave the "
                "base model as it is: save the adapter as plain LoRA");
}

constexpr int kMaxRank = 1 << 16;
constexpr double kMaxAlpha = 1e6;

bool IsRank(double value) {
  return value >= 1 && value <= kMaxRank && value == std::trunc(value);
}

bool IsAlpha(double value) { return value > 0 && value <= kMaxAlpha; }

// PEFT's keys are regular expressions; plain ones are ends of module names.
std::vector<std::pair<std::string, double>> Pattern(ConfigFields& fields,
                                                    const char* field,
                                                    bool (*allowed)(double),
                                                    const char* expected) {
  std::vector<std::pair<std::string, double>> pattern;
  const nlohmann::json* const object = fields.Find(field);
  if (AsksForNothing(object)) return pattern;
  if (!object->is_object()) {
    fields.Refuse(field, ShowJson(*object), "an object");
    return pattern;
  }
  for (const auto& [key, value] : object->items()) {
    if (key.find_first_of("^$*+?()[]{}|\\") != key.npos) {
      fields.Refuse(field, ShowJson(key),
                    "a module's name: regular expressions are not supported");
    } else if (!value.is_number() || !allowed(value.get<double>())) {
      fields.Refuse(field, ShowJson(value), expected);
    } else {
      pattern.emplace_back(TextName(key), value.get<double>());
    }
  }
  return pattern;
}

absl::StatusOr<PeftConfig> ReadConfig(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path, kMaxConfigBytes);
  if (!text.ok()) return text.status();
  const absl::StatusOr<nlohmann::json> config_json = ParseJson(path, *text);
  if (!config_json.ok()) return config_json.status();
  if (!config_json->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": must be a JSON object"));
  }
  ConfigFields fields(path, *config_json);
  RefuseOthers(fields);
  PeftConfig config;
  config.rank = fields.Int("r", 1, kMaxRank);
  config.alpha = fields.Double("lora_alpha", 0, kMaxAlpha);
  config.root = fields.Bool("use_rslora", false);
  for (const auto& [module, rank] :
       Pattern(fields, "rank_pattern", IsRank, "a whole number in 1..65536")) {
    config.ranks.emplace_back(module, static_cast<int>(rank));
  }
  config.alphas = Pattern(fields, "alpha_pattern", IsAlpha,
                          "a number above 0, at most 1e6");
  if (!fields.status().ok()) return fields.status();
  return config;
}

// What the first key says that is the module's name or its end.
template <typename T>
T Of(const std::vector<std::pair<std::string, T>>& pattern,
     const std::string& module, T otherwise) {
  for (const auto& [key, value] : pattern) {
    if (module == key || absl::EndsWith(module, absl::StrCat(".", key))) {
      return value;
    }
  }
  return otherwise;
}

// Puts one adapter's tensors where the layout wants them.
class AdapterReader {
 public:
  AdapterReader(const PeftConfig& config, const Checkpoint& file,
                const ModelSpec& spec, const LoraLayout& layout)
      : config_(config), file_(file), spec_(spec), layout_(layout) {
    adapter_.image.resize(static_cast<size_t>(layout.size()));
  }

  absl::StatusOr<LoraAdapter> Read() {
    for (int layer = 0; layer < layout_.layers(); ++layer) {
      for (size_t s = 0; s < layout_.sections().size(); ++s) {
        const absl::Status status = ReadSection(layer, static_cast<int>(s));
        if (!status.ok()) return status;
      }
    }
    for (const TensorInfo& tensor : file_.tensors()) {
      if (used_.contains(tensor.name)) continue;
      if (layout_.sections().empty()) {
        return Invalid(
            tensor.name,
            spec_.latent()
                ? "models with latent attention take no adapters here"
                : "models whose layers differ in their heads or share K and V, "
                  "or whose keys are their values, take no adapters here");
      }
      return Invalid(
          tensor.name,
          absl::StrCat("adapts nothing that is supported here; of a layer (",
                       std::string(spec_.names.layers), "N.) that is ",
                       absl::StrJoin(layout_.sections(), ", ",
                                     [](std::string* out, const auto& section) {
                                       out->append(section.module);
                                     })));
    }
    if (adapter_.sections == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(file_.main_path(), ": holds no adapter's tensors"));
    }
    return std::move(adapter_);
  }

  // Scales are part of what an adapter is; the file's hash has the rest.
  const std::string& scales() const { return scales_; }

 private:
  absl::Status Invalid(const std::string& tensor,
                       const std::string& what) const {
    return absl::InvalidArgumentError(absl::StrCat(
        file_.main_path(), ": tensor '", tensor.substr(0, 256), "': ", what));
  }

  // Some files have no prefix that is optional in the model's own.
  std::string NameOf(const std::string& module) const {
    const std::string full = absl::StrCat(kPrefix, module);
    if (file_.Find(full + kFileA) != nullptr) return full;
    const std::string_view optional = spec_.names.optional_prefix;
    if (optional.empty() || !module.starts_with(optional)) return full;
    const std::string bare =
        absl::StrCat(kPrefix, module.substr(optional.size()));
    return file_.Find(bare + kFileA) != nullptr ? bare : full;
  }

  absl::Status ReadSection(int layer, int s) {
    const LoraSection& section = layout_.sections()[static_cast<size_t>(s)];
    const std::string module = absl::StrCat(std::string(spec_.names.layers),
                                            layer, ".", section.module);
    const std::string name = NameOf(module);
    const TensorInfo* const a = file_.Find(name + kFileA);
    const TensorInfo* const b = file_.Find(name + kFileB);
    if (a == nullptr && b == nullptr) return absl::OkStatus();
    if (a == nullptr || b == nullptr) {
      return Invalid(name + (a == nullptr ? kFileA : kFileB),
                     "is missing beside the other factor");
    }
    const int64_t rank = a->shape.empty() ? 0 : a->shape[0];
    const int said = Of(config_.ranks, module, config_.rank);
    if (rank != said) {
      return Invalid(
          a->name,
          absl::StrCat("rank ", rank, ", but adapter_config.json says ", said));
    }
    if (rank > layout_.max_rank()) {
      return Invalid(
          a->name, absl::StrCat("rank ", rank, ", at most ", layout_.max_rank(),
                                " are served: raise "
                                "--max-lora-rank"));
    }
    absl::Status status =
        Put(a->name, rank, section.cols, {}, layout_.a(layer, s));
    if (status.ok()) {
      status =
          Put(b->name, section.rows, rank, section.order, layout_.b(layer, s));
    }
    if (!status.ok()) return status;
    const double alpha = Of(config_.alphas, module, config_.alpha);
    const auto scale = static_cast<float>(
        alpha / (config_.root ? std::sqrt(static_cast<double>(rank))
                              : static_cast<double>(rank)));
    adapter_.image[static_cast<size_t>(layout_.rank(layer, s))] =
        std::bit_cast<float>(static_cast<int32_t>(rank));
    adapter_.image[static_cast<size_t>(layout_.scale(layer, s))] = scale;
    adapter_.sections |= 1u << s;
    absl::StrAppend(&scales_, module, "=",
                    absl::Hex(std::bit_cast<uint32_t>(scale)), "\n");
    return absl::OkStatus();
  }

  // The tensor [rows, cols], its rows in that order, transposed, at `offset`.
  absl::Status Put(const std::string& name, int64_t rows, int64_t cols,
                   const std::vector<int>& order, int64_t offset) {
    const absl::StatusOr<kernels::HostTensor> tensor =
        file_.Matrix(name, rows, cols);
    if (!tensor.ok()) return tensor.status();
    used_.insert(name);
    std::vector<std::byte> moved;
    std::vector<float> values;
    AppendFloats(RowsInOrder(*tensor, order, moved), values);
    float* const out = adapter_.image.data() + offset;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        out[c * rows + r] = values[r * cols + c];
      }
    }
    return absl::OkStatus();
  }

  const PeftConfig& config_;
  const Checkpoint& file_;
  const ModelSpec& spec_;
  const LoraLayout& layout_;
  std::set<std::string> used_;
  std::string scales_;
  LoraAdapter adapter_;
};

}  // namespace

absl::StatusOr<LoraAdapter> ReadLoraAdapter(const std::string& directory,
                                            const ModelSpec& spec,
                                            const LoraLayout& layout) {
  const absl::StatusOr<PeftConfig> config =
      ReadConfig(absl::StrCat(directory, "/adapter_config.json"));
  if (!config.ok()) return config.status();
  // Adapters are read in service, when whoever trained them may write anew.
  const absl::StatusOr<Checkpoint> file = Checkpoint::CopyFile(
      absl::StrCat(directory, "/adapter_model.safetensors"), kMaxFileBytes);
  if (!file.ok()) return file.status();
  AdapterReader reader(*config, *file, spec, layout);
  absl::StatusOr<LoraAdapter> adapter = reader.Read();
  if (!adapter.ok()) return adapter.status();
  adapter->digest = HashStrings(
      {HashWeights(*file, 1, [](uint64_t, uint64_t) {}), reader.scales()});
  return adapter;
}

}  // namespace tandem::engine
