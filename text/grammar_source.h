// SPDX-License-Identifier: Apache-2.0
// What a request asks its output to match, as text/grammar.h takes it. A
// template, since this folder knows no messages: `Options` is
// tandem.v1.StructuredOptions.

#ifndef TANDEM_TEXT_GRAMMAR_SOURCE_H_
#define TANDEM_TEXT_GRAMMAR_SOURCE_H_

#include <string>

#include "nlohmann/json.hpp"
#include "text/grammar.h"

namespace tandem::text {

struct GrammarSource {
  GrammarKind kind = GrammarKind::kJsonObject;
  std::string text;
  const char* field = "";  // of Options; empty: none is set
};

template <typename Options>
GrammarSource SourceOf(const Options& options) {
  switch (options.constraint_case()) {
    case Options::kJsonSchema:
      return {GrammarKind::kJsonSchema, options.json_schema(), "json_schema"};
    case Options::kJsonObject:
      return {GrammarKind::kJsonObject, "", "json_object"};
    case Options::kRegex:
      return {GrammarKind::kRegex, options.regex(), "regex"};
    case Options::kGrammar:
      return {GrammarKind::kLark, options.grammar(), "grammar"};
    case Options::kChoice: {
      nlohmann::json list = nlohmann::json::array();
      for (const std::string& value : options.choice().values()) {
        list.push_back(value);
      }
      return {GrammarKind::kChoice, list.dump(), "choice"};
    }
    case Options::kStructuralTag:
      return {GrammarKind::kStructuralTag, options.structural_tag(),
              "structural_tag"};
    case Options::CONSTRAINT_NOT_SET:
      break;
  }
  return {};
}

}  // namespace tandem::text

#endif  // TANDEM_TEXT_GRAMMAR_SOURCE_H_
