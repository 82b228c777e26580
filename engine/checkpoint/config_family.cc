// SPDX-License-Identifier: Apache-2.0
#include "engine/checkpoint/config_family.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/checkpoint/config_fields.h"
#include "engine/checkpoint/file.h"

namespace tandem::engine {
namespace {

using nlohmann::json;

constexpr char kTied[] = "tie_word_embeddings";

// One of `names` of families, and of the wholes that they are part of.
std::string OneOf(std::string_view Family::*name,
                  std::string_view Family::*whole) {
  std::vector<std::string_view> names;
  for (const Family& family : Families()) {
    names.push_back(family.*name);
    const std::string_view part_of = family.*whole;
    const bool known =
        std::find(names.begin(), names.end(), part_of) != names.end();
    if (!part_of.empty() && !known) names.push_back(part_of);
  }
  return absl::StrCat(
      "one of ",
      absl::StrJoin(names, ", ", [](std::string* out, std::string_view one) {
        out->append(one);
      }));
}

// By "architectures"; by "model_type" in the older files without them.
const Family* FindFamily(ConfigFields& fields) {
  const json* architectures = fields.Find("architectures");
  const std::string model_type = fields.String("model_type", "");
  std::string given = "missing";
  if (architectures != nullptr) {
    given = ShowJson(*architectures);
    const json* first = architectures->is_array() && architectures->size() == 1
                            ? &architectures->front()
                            : nullptr;
    if (first != nullptr) given = ShowJson(*first);
    const bool named = first != nullptr && *first != "";
    for (const Family& family : Families()) {
      if (named &&
          (*first == family.architecture || *first == family.old_architecture ||
           *first == family.whole)) {
        return &family;
      }
    }
  } else {
    const bool named = !model_type.empty();
    for (const Family& family : Families()) {
      if (named && (model_type == family.model_type ||
                    model_type == family.whole_type)) {
        return &family;
      }
    }
    if (named) {
      fields.Refuse(
          "model_type", Quote(model_type),
          absl::StrCat(OneOf(&Family::model_type, &Family::whole_type),
                       " where architectures is missing"));
    }
  }
  fields.Refuse("architectures", given,
                OneOf(&Family::architecture, &Family::whole));
  return nullptr;
}

// The part of a model that has others; null: it has none. `family` becomes that
// part's, where several are part of such a model.
json TextConfig(ConfigFields& fields, const json& config,
                const Family*& family) {
  const json* architectures = fields.Find("architectures");
  const bool whole =
      architectures != nullptr
          ? architectures->front() == family->whole
          : fields.String("model_type", "") == family->whole_type;
  if (!whole) return nullptr;
  const json* text = fields.Find("text_config");
  if (text == nullptr && family->flat_whole) return nullptr;
  if (text == nullptr || !text->is_object()) {
    fields.Refuse("text_config", text == nullptr ? "missing" : ShowJson(*text),
                  "an object");
    return nullptr;
  }
  json merged = *text;
  if (const auto type = merged.find("model_type"); type != merged.end()) {
    std::vector<std::string> known;
    const std::string_view name = family->whole;
    family = nullptr;
    for (const Family& part : Families()) {
      if (part.whole != name) continue;
      known.emplace_back(part.model_type);
      if (*type == part.model_type) family = &part;
    }
    if (family == nullptr) {
      fields.Refuse("text_config.model_type", ShowJson(*type),
                    absl::StrJoin(known, " or "));
      return nullptr;
    }
  }
  // The whole's words go first, as in transformers. What either says is not
  // tied may have a head.
  const bool untied = merged.value(kTied, json()) == false;
  for (const char* key : {kTied, "quantization_config", "eos_token_id"}) {
    const auto given = config.find(key);
    if (given != config.end() && !given->is_null()) merged[key] = *given;
  }
  if (untied) merged[kTied] = false;
  // Gemma 3 that sees never caps its logits.
  if (!family->whole_caps) merged.erase("final_logit_softcapping");
  return merged;
}

}  // namespace

absl::StatusOr<TextPart> FindTextPart(const std::string& path,
                                      const json& config) {
  ConfigFields fields(path, config);
  TextPart part;
  part.family = FindFamily(fields);
  if (part.family == nullptr) return fields.status();
  json text = TextConfig(fields, config, part.family);
  if (!fields.status().ok()) return fields.status();
  if (text.is_null()) {
    part.config = config;
    return part;
  }
  const auto ties = [](const json& of) {
    return of.value(kTied, json()) == true;
  };
  part.prefix = "text_config.";
  part.either_ties = ties(config) || ties(config["text_config"]);
  part.config = std::move(text);
  return part;
}

}  // namespace tandem::engine
