// SPDX-License-Identifier: Apache-2.0
#include "router/http/openai_structured.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "router/validate/errors.h"

namespace tandem::router {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

std::string Text(const ordered_json& value) {
  return value.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

// Takes constraints, and keeps the name of the one it has.
class Reader {
 public:
  Reader(std::string_view body, JsonFields* fields,
         v1::GenerateRequest* request)
      : body_(body), fields_(fields), request_(request) {}

  void ReadResponseFormat() {
    const json* const format = fields_->Object("response_format");
    if (format == nullptr) return;
    JsonFields inner(*format, "response_format.");
    const std::string type = inner.String("type").value_or("");
    if (type == "json_object" && inner.Find("schema") != nullptr) {
      // As llama.cpp has it.
      if (const auto own = Ordered("response_format")) {
        Set("response_format")->set_json_schema(Text((*own)["schema"]));
      }
    } else if (type == "json_object") {
      Set("response_format")->set_json_object(true);
    } else if (type == "json_schema") {
      const json* const named = inner.Object("json_schema");
      if (named == nullptr ||
          JsonFields(*named, "").Find("schema") == nullptr) {
        inner.Refuse("json_schema", *format,
                     "an object with a schema is needed");
      } else if (const auto own = Ordered("response_format")) {
        Set("response_format")
            ->set_json_schema(Text((*own)["json_schema"]["schema"]));
      }
    } else if (type == "structural_tag") {
      if (const auto own = Ordered("response_format")) {
        Set("response_format")->set_structural_tag(Text(*own));
      }
    } else if (type != "text") {
      inner.Refuse("type", *format,
                   "one of text, json_object, json_schema, structural_tag");
    }
    fields_->Keep(inner.status());
  }

  // vLLM's object, whose members are named by themselves.
  void ReadStructuredOutputs() {
    const json* const options = fields_->Object("structured_outputs");
    if (options == nullptr) return;
    JsonFields inner(*options, "structured_outputs.");
    const auto own = Ordered("structured_outputs");
    if (!own) return;
    ReadMembers("structured_outputs.", "", *own, &inner);
    fields_->Keep(inner.status());
  }

  // Of the constraint, empty for none.
  const std::string& name() const { return set_; }

  // vLLM's older members of the body itself.
  void ReadGuided() {
    const json* const schema = fields_->Find("guided_json");
    ordered_json own = ordered_json::object();
    if (schema != nullptr) {
      const auto ordered = Ordered("guided_json");
      if (!ordered) return;
      own["guided_json"] = *ordered;
    }
    ReadMembers("", "guided_", own, fields_);
  }

 private:
  // `own` has the same members as `fields`, as far as order matters.
  void ReadMembers(const std::string& path, const std::string& prefix,
                   const ordered_json& own, JsonFields* fields) {
    const auto name = [&](const char* member) { return prefix + member; };
    const std::string schema = name("json");
    if (const json* const value = fields->Find(schema.c_str())) {
      Set(path + schema)
          ->set_json_schema(value->is_string() ? value->get<std::string>()
                                               : Text(own.at(schema)));
    }
    const std::string object = name("json_object");
    if (fields->Bool(object.c_str()).value_or(false)) {
      Set(path + object)->set_json_object(true);
    }
    const std::string regex = name("regex");
    if (auto text = fields->String(regex.c_str())) {
      Set(path + regex)->set_regex(*std::move(text));
    }
    const std::string grammar = name("grammar");
    if (auto text = fields->String(grammar.c_str())) {
      Set(path + grammar)->set_grammar(*std::move(text));
    }
    const std::string tag = name("structural_tag");
    if (auto text = fields->String(tag.c_str())) {
      Set(path + tag)->set_structural_tag(*std::move(text));
    }
    const std::string choice = name("choice");
    if (fields->Find(choice.c_str()) == nullptr) return;
    v1::StringList* const list = Set(path + choice)->mutable_choice();
    for (std::string& value : fields->Strings(choice.c_str())) {
      list->add_values(std::move(value));
    }
  }

  std::optional<ordered_json> Ordered(const char* name) {
    absl::StatusOr<ordered_json> ordered = InOrder(body_, name);
    fields_->Keep(ordered.status());
    if (!ordered.ok()) return std::nullopt;
    return *std::move(ordered);
  }

  v1::StructuredOptions* Set(const std::string& name) {
    if (!set_.empty()) {
      fields_->Keep(
          FieldInvalid(name, "(set)", absl::StrCat("excludes ", set_)));
    }
    set_ = name;
    return request_->mutable_structured();
  }

  const std::string_view body_;
  JsonFields* const fields_;
  v1::GenerateRequest* const request_;
  std::string set_;
};

}  // namespace

std::string ReadStructured(std::string_view body, JsonFields* fields,
                           v1::GenerateRequest* request) {
  Reader reader(body, fields, request);
  reader.ReadResponseFormat();
  reader.ReadStructuredOutputs();
  reader.ReadGuided();
  return reader.name();
}

}  // namespace tandem::router
