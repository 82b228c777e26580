// SPDX-License-Identifier: Apache-2.0
// What a model may write under a structural tag: texts in the tokens of
// models/tales, where ^3 is its special token 3.

#ifndef TANDEM_TESTS_ROUTER_VALIDATE_TAG_WRITER_H_
#define TANDEM_TESTS_ROUTER_VALIDATE_TAG_WRITER_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "text/grammar.h"
#include "text/tokenizer.h"

namespace tandem::router {

class TagWriter {
 public:
  TagWriter()
      : tokenizer_(*text::Tokenizer::Load(TANDEM_SOURCE_DIR "/models/tales")),
        vocabulary_(*text::GrammarVocabulary::Create(
            tokenizer_, tokenizer_.vocab_size())) {}

  int vocab_size() const { return tokenizer_.vocab_size(); }

  // Whether all of `text` may be written, and be all.
  bool Allows(const std::string& tag, std::string_view text) {
    auto grammar = vocabulary_.Compile(text::GrammarKind::kStructuralTag, tag,
                                       absl::Seconds(20));
    EXPECT_TRUE(grammar.ok()) << grammar.status() << tag;
    if (!grammar.ok()) return false;
    const std::vector<int32_t> ids = Ids(text);
    const auto taken = grammar->Consume(ids);
    EXPECT_TRUE(taken.ok()) << taken.status();
    if (!taken.ok() || *taken != static_cast<int>(ids.size())) return false;
    std::vector<uint32_t> mask(static_cast<size_t>(vocabulary_.mask_words()),
                               0);
    const auto may_end = grammar->Mask(mask);
    EXPECT_TRUE(may_end.ok()) << may_end.status();
    return may_end.ok() && *may_end;
  }

 private:
  std::vector<int32_t> Ids(std::string_view text) const {
    std::vector<int32_t> ids;
    const auto add = [&](std::string_view plain) {
      const auto more = *tokenizer_.Encode(plain, false);
      ids.insert(ids.end(), more.begin(), more.end());
    };
    for (size_t at; (at = text.find('^')) != std::string_view::npos;) {
      add(text.substr(0, at));
      ids.push_back(text[at + 1] - '0');
      text.remove_prefix(at + 2);
    }
    add(text);
    return ids;
  }

  text::Tokenizer tokenizer_;
  text::GrammarVocabulary vocabulary_;
};

}  // namespace tandem::router

#endif  // TANDEM_TESTS_ROUTER_VALIDATE_TAG_WRITER_H_
