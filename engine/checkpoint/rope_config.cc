// SPDX-License-Identifier: Apache-2.0
#include "engine/checkpoint/rope_config.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/checkpoint/file.h"
#include "engine/checkpoint/json.h"

namespace tandem::engine {
namespace {

using nlohmann::json;
using Kind = RopeSpec::Kind;

constexpr double kMaxFactor = 1e6;

// What the scalings need to know about the rest of the config.
struct Context {
  const Family& family;
  int head_dim;
  int max_positions;           // as the config has it
  int original_max_positions;  // beside the scaling; 0: not given
  double rotary_fallback;      // where no factor is given
  double rotary_factor;        // beside the scaling; 0: not given
};

// What the file says of layers, and under which key.
struct Given {
  std::string key;
  json object = nullptr;  // null: nothing
};

// Without nulls, and with the kind under its newer name where it scales.
json Plain(const json& object) {
  json plain = json::object();
  for (const auto& [name, value] : object.items()) {
    if (!value.is_null()) plain[name] = value;
  }
  if (const auto old = plain.find("type"); old != plain.end()) {
    plain.emplace("rope_type", *old);
    plain.erase("type");
  }
  const auto kind = plain.find("rope_type");
  if (kind != plain.end() && *kind == "default") plain.erase(kind);
  return plain;
}

json WithoutTheta(json object) {
  object.erase("rope_theta");
  return object;
}

// Adds what is said under another key: a file of transformers 5 has theta in
// rope_parameters, and what models' pages tell to add is a rope_scaling.
// transformers itself would forget the former.
void Add(ConfigFields& fields, const Given& second, Given& first) {
  if (first.object.is_null()) {
    first = second;
    return;
  }
  const bool scales = second.object.contains("rope_type");
  if (scales && first.object.contains("rope_type") &&
      WithoutTheta(first.object) != WithoutTheta(second.object)) {
    fields.Refuse(
        second.key, ShowJson(second.object),
        absl::StrCat("as ", first.key, ", which scales too, or left out"));
    return;
  }
  for (const auto& [name, value] : second.object.items()) {
    const auto [known, added] = first.object.emplace(name, value);
    if (!added && *known != value) {
      fields.Refuse(absl::StrCat(second.key, ".", name), ShowJson(value),
                    absl::StrCat(ShowJson(*known), ", as in ", first.key,
                                 ", or left out"));
    }
  }
  if (scales) first.key = second.key;
}

// Adds what `key` says of all layers (`full`), or of each type of them, as
// transformers 5 writes it where these differ. Only Gemma 3's may.
void AddKey(ConfigFields& fields, const char* key, const Family& family,
            bool slides, Given& full, Given& sliding) {
  const json* object = fields.Find(key);
  if (object == nullptr) return;
  const auto add = [&](const std::string& name, const json* value, Given& to) {
    if (value == nullptr) return;
    if (!value->is_object()) {
      return fields.Refuse(name, ShowJson(*value), "an object or null");
    }
    Add(fields, {name, Plain(*value)}, to);
  };
  if (!object->is_object() || (!object->contains("full_attention") &&
                               !object->contains("sliding_attention"))) {
    return add(key, object, full);
  }
  const ConfigFields types(fields.path(), *object);
  const json* of_full = types.Find("full_attention");
  const json* of_sliding = types.Find("sliding_attention");
  if (family.local_rope_theta > 0) {
    add(absl::StrCat(key, ".sliding_attention"), of_sliding, sliding);
  } else if (of_full == nullptr ||
             (of_sliding == nullptr ? slides : *of_sliding != *of_full)) {
    fields.Refuse(key, ShowJson(*object),
                  "the same for full_attention and sliding_attention, or one "
                  "object for all layers, in this family");
  }
  add(absl::StrCat(key, ".full_attention"), of_full, full);
}

Kind KindOf(ConfigFields& scaling, const Family& family) {
  const std::string kind = scaling.String("rope_type", "default");
  if (kind == "default") return Kind::kDefault;
  if (kind == "linear") return Kind::kLinear;
  if (kind == "dynamic") return Kind::kDynamic;
  if (kind == "llama3") return Kind::kLlama3;
  // Old files of Phi-3 have other names for it.
  const bool phi = family.model_type == "phi3";
  if (kind == "longrope" || kind == "su" || (phi && kind == "yarn")) {
    return Kind::kLongRope;
  }
  if (kind == "yarn") return Kind::kYarn;
  if (kind == "proportional" && family.plain_scores) {
    return Kind::kProportional;
  }
  // Of pictures' positions: those of text are the same in all sections.
  if (kind == "mrope" && family.flat_whole) return Kind::kDefault;
  scaling.Refuse("rope_type", Quote(kind),
                 "default, linear, dynamic, yarn, longrope or llama3");
  return Kind::kDefault;
}

// Where it stands beside the scaling too, transformers 4 and 5 take different
// ones.
int OriginalPositions(ConfigFields& scaling, const Context& context,
                      std::optional<int> fallback) {
  static constexpr char kField[] = "original_max_position_embeddings";
  const int beside = context.original_max_positions;
  if (beside > 0) fallback = beside;
  const int own = scaling.Int(kField, 1, kMaxPositions, fallback);
  if (beside > 0 && own != beside) {
    scaling.Refuse(kField, absl::StrCat(own),
                   absl::StrCat(beside, ", as beside it, or left out"));
  }
  return own;
}

// RopeSpec's rotary_dim.
int ReadRotaryDim(ConfigFields& fields, const Context& context,
                  bool proportional = false) {
  static constexpr char kField[] = "partial_rotary_factor";
  const double beside = context.rotary_factor;
  const double factor = fields.Double(
      kField, 0, 1, beside > 0 ? beside : context.rotary_fallback);
  if (beside > 0 && factor != beside) {
    fields.Refuse(kField, absl::StrCat(factor),
                  absl::StrCat(beside, ", as beside it, or left out"));
  }
  const auto dim = static_cast<int>(context.head_dim * factor);
  if (dim == context.head_dim) return 0;
  if (proportional && dim >= 2) return dim / 2 * 2;
  if (!context.family.partial_rope && !proportional) {
    fields.Refuse(kField, "below 1", "1 or left out, in this family");
  } else if (dim < 2 || dim % 2 != 0) {
    fields.Refuse(kField, absl::StrCat(factor),
                  absl::StrCat("an even number of the ", context.head_dim,
                               " dimensions of a head"));
  }
  return dim;
}

void ReadLlama3(ConfigFields& scaling, const Context& context, RopeSpec& rope) {
  rope.low_freq_factor = scaling.Double("low_freq_factor", 1e-3, kMaxFactor);
  rope.high_freq_factor = scaling.Double("high_freq_factor", 1e-3, kMaxFactor);
  rope.original_max_positions =
      OriginalPositions(scaling, context, std::nullopt);
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    scaling.Refuse(
        "high_freq_factor", absl::StrCat(rope.high_freq_factor),
        absl::StrCat("above low_freq_factor, ", rope.low_freq_factor));
  }
}

double YarnScale(double factor, double scale) {
  return factor <= 1 ? 1 : 0.1 * scale * std::log(factor) + 1;
}

void ReadYarn(ConfigFields& scaling, const Context& context, RopeSpec& rope) {
  rope.original_max_positions =
      OriginalPositions(scaling, context, context.max_positions);
  rope.beta_fast = scaling.Double("beta_fast", 1e-3, kMaxFactor, 32.0);
  rope.beta_slow = scaling.Double("beta_slow", 1e-3, kMaxFactor, 1.0);
  rope.truncate = scaling.Bool("truncate", true);
  if (rope.beta_fast < rope.beta_slow) {
    scaling.Refuse("beta_fast", absl::StrCat(rope.beta_fast),
                   absl::StrCat("at least beta_slow, ", rope.beta_slow));
  }
  const double scale = scaling.Double("mscale", 0, 100, 0.0);
  const double all = scaling.Double("mscale_all_dim", 0, 100, 0.0);
  const double implied = scale > 0 && all > 0 ? YarnScale(rope.factor, scale) /
                                                    YarnScale(rope.factor, all)
                                              : YarnScale(rope.factor, 1);
  rope.attention_factor =
      scaling.Double("attention_factor", 1e-3, 1e3, implied);
  if (context.family.latent && all > 0) {
    const double each = YarnScale(rope.factor, all);  // of queries and of keys
    rope.score_scale = each * each;
  }
}

std::vector<double> ReadFactors(ConfigFields& scaling, const char* field,
                                int count) {
  std::vector<double> factors;
  const json* list = scaling.Find(field);
  const std::string expected = absl::StrCat(
      "a list of ", count,
      " positive numbers, one for each pair of dimensions that turn");
  if (list == nullptr || !list->is_array() ||
      static_cast<int>(list->size()) != count) {
    scaling.Refuse(field, list == nullptr ? "missing" : ShowJson(*list),
                   expected);
    return factors;
  }
  for (const json& element : *list) {
    const double value = element.is_number() ? element.get<double>() : 0;
    if (value < 1e-3 || value > kMaxFactor) {
      scaling.Refuse(field, ShowJson(element), expected);
    }
    factors.push_back(value);
  }
  return factors;
}

constexpr int kPhi3OriginalPositions = 4096;  // where its config is silent

void ReadLongRope(ConfigFields& scaling, const Context& context,
                  RopeSpec& rope) {
  // Beside the scaling it goes before what stands in it, as transformers has
  // it; Phi3's configuration always has the former.
  const int own = scaling.Int("original_max_position_embeddings", 2,
                              kMaxPositions, context.max_positions);
  rope.original_max_positions =
      context.original_max_positions > 0    ? context.original_max_positions
      : context.family.model_type == "phi3" ? kPhi3OriginalPositions
                                            : own;
  const int pairs = rope.turned(context.head_dim) / 2;
  rope.short_factors = ReadFactors(scaling, "short_factor", pairs);
  rope.long_factors = ReadFactors(scaling, "long_factor", pairs);
  const double original = std::max(2, rope.original_max_positions);
  const double factor = scaling.Double("factor", 1e-3, kMaxFactor,
                                       context.max_positions / original);
  const double implied =
      factor <= 1 ? 1 : std::sqrt(1 + std::log(factor) / std::log(original));
  rope.attention_factor =
      scaling.Double("attention_factor", 1e-3, 1e3, implied);
}

// Positions that a scaling makes of those that the model was trained with.
int Stretched(const RopeSpec& rope, const Context& context) {
  const double trained = rope.kind == Kind::kYarn ? rope.original_max_positions
                                                  : context.max_positions;
  const bool stretches = rope.kind == Kind::kLinear ||
                         rope.kind == Kind::kDynamic ||
                         rope.kind == Kind::kYarn;
  if (!stretches || context.family.positions_include_scaling) {
    return context.max_positions;
  }
  return static_cast<int>(std::clamp<double>(
      trained * rope.factor, context.max_positions, kMaxPositions));
}

// Fills `rope`, which has the theta to fall back to; what positions it makes.
int ReadScaling(ConfigFields& fields, const Given& given,
                const Context& context, RopeSpec& rope) {
  if (given.object.is_null()) return context.max_positions;
  ConfigFields scaling(fields.path(), given.object,
                       absl::StrCat(given.key, "."));
  rope.theta = scaling.Double("rope_theta", 1, 1e12, rope.theta);
  rope.kind = KindOf(scaling, context.family);
  const bool proportional = rope.kind == Kind::kProportional;
  rope.rotary_dim = ReadRotaryDim(scaling, context, proportional);
  if (rope.kind == Kind::kDynamic && context.family.rope_alpha &&
      scaling.Find("alpha") != nullptr) {
    // A theta for all lengths, as if they were alpha times the original ones.
    const double dim = rope.turned(context.head_dim);
    rope.theta *=
        std::pow(scaling.Double("alpha", 1, kMaxFactor), dim / (dim - 2));
    rope.kind = Kind::kDefault;
  }
  if (proportional) {
    rope.factor = scaling.Double("factor", 1, kMaxFactor, 1.0);
  } else if (rope.kind != Kind::kDefault && rope.kind != Kind::kLongRope) {
    rope.factor = scaling.Double("factor", 1, kMaxFactor);
  }
  if (rope.kind == Kind::kLlama3) ReadLlama3(scaling, context, rope);
  if (rope.kind == Kind::kDynamic) {
    rope.original_max_positions = context.max_positions;
  }
  if (rope.kind == Kind::kYarn) ReadYarn(scaling, context, rope);
  if (rope.kind == Kind::kLongRope) ReadLongRope(scaling, context, rope);
  if (context.family.scaled_queries) {
    rope.query_beta = scaling.Double("llama_4_scaling_beta", 0, 100, 0.0);
    if (rope.query_beta > 0 && rope.kind != Kind::kYarn) {
      scaling.Refuse("rope_type", Quote(scaling.String("rope_type", "default")),
                     "yarn beside llama_4_scaling_beta");
    }
  }
  fields.Fail(scaling.status());
  return Stretched(rope, context);
}

}  // namespace

void ReadRope(ConfigFields& fields, const Family& family, int head_dim,
              int local_head_dim, bool slides, int* max_positions,
              RopeSpec* rope, RopeSpec* local) {
  if (!family.rope) {
    rope->kind = local->kind = Kind::kNone;
    return;
  }
  Context context{
      family,
      head_dim,
      *max_positions,
      fields.Int("original_max_position_embeddings", 1, kMaxPositions, 0),
      family.rotary_factor,
      0};
  const std::string_view rotary_dim = family.keys.rotary_dim;
  if (!rotary_dim.empty() && fields.Find(rotary_dim) != nullptr) {
    context.rotary_fallback =
        static_cast<double>(fields.Int(rotary_dim, 2, head_dim)) / head_dim;
  }
  const ConfigKeys& keys = family.keys;
  if (!keys.rotary_factor.empty() && fields.Find(keys.rotary_factor)) {
    context.rotary_factor = fields.Double(keys.rotary_factor, 0, 1);
  }
  rope->rotary_dim = local->rotary_dim = ReadRotaryDim(fields, context);
  if (fields.Find("partial_rotary_factor") != nullptr) {
    context.rotary_factor = fields.Double("partial_rotary_factor", 0, 1);
  }
  rope->interleaved = local->interleaved = family.interleaved_rope;
  rope->theta = fields.Double(keys.rope_theta, 1, 1e12, family.rope_theta);
  const bool has_local = family.local_rope_theta > 0;
  if (has_local) {
    local->theta =
        fields.Double("rope_local_base_freq", 1, 1e12, family.local_rope_theta);
  }
  Given full, sliding;
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    AddKey(fields, key, family, slides, full, sliding);
  }
  if (family.scaling_is_said && full.object.is_null()) {
    fields.Refuse("rope_parameters", "missing", "an object");
  }
  *max_positions = ReadScaling(fields, full, context, *rope);
  context.head_dim = local_head_dim;
  ReadScaling(fields, sliding, context, *local);
  if (!has_local) *local = *rope;
}

std::string RopeSpec::Canonical() const {
  const auto list = [](const std::vector<double>& values) {
    std::string text;
    for (const double value : values) {
      absl::StrAppendFormat(&text, "%s%.17g", text.empty() ? "" : ",", value);
    }
    return text;
  };
  switch (kind) {
    case Kind::kNone:
      return " rope=none";
    case Kind::kDefault:
      return "";
    case Kind::kLinear:
      return absl::StrFormat(" rope=linear factor=%.17g", factor);
    case Kind::kDynamic:
      return absl::StrFormat(
          " rope=dynamic factor=%.17g original=%d served=%d", factor,
          original_max_positions,
          std::max(served_positions, original_max_positions));
    case Kind::kYarn:
      return absl::StrFormat(
          " rope=yarn factor=%.17g attention=%.17g original=%d fast=%.17g "
          "slow=%.17g truncate=%d%s",
          factor, attention_factor, original_max_positions, beta_fast,
          beta_slow, truncate,
          query_beta > 0 ? absl::StrFormat(" query_beta=%.17g", query_beta)
                         : "");
    case Kind::kLongRope:
      return absl::StrFormat(
          " rope=longrope attention=%.17g factors=%s", attention_factor,
          list(served_positions > original_max_positions ? long_factors
                                                         : short_factors));
    case Kind::kProportional:
      return absl::StrFormat(" rope=proportional factor=%.17g", factor);
    case Kind::kLlama3:
      break;
  }
  return absl::StrFormat(
      " rope=llama3 factor=%.17g low=%.17g high=%.17g original=%d", factor,
      low_freq_factor, high_freq_factor, original_max_positions);
}

}  // namespace tandem::engine
