// SPDX-License-Identifier: Apache-2.0
// How much is kept, whose goes first, and whether a grammar's word about its
// size is true.

#include "worker/grammar_cache.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "text/tokenizer.h"

namespace tandem::worker {
namespace {

using text::Grammar;
using text::GrammarKind;
using text::GrammarSource;

class GrammarCacheTest : public testing::Test {
 protected:
  GrammarCacheTest() {
    const text::Tokenizer tokenizer =
        *text::Tokenizer::Load(TANDEM_SOURCE_DIR "/models/tales");
    vocabulary_ =
        *text::GrammarVocabulary::Create(tokenizer, tokenizer.vocab_size());
  }

  // All of one size.
  static GrammarSource Source(int i) {
    return {.kind = GrammarKind::kRegex,
            .text = absl::StrCat("[a-z]{", 100 + i, "}")};
  }
  Grammar Compile(const GrammarSource& source) const {
    return *vocabulary_->Compile(source.kind, source.text, absl::Seconds(20));
  }
  void Keep(int i, const std::string& party) {
    cache_->Keep(Source(i), party, Compile(Source(i)));
  }
  bool Has(int i) { return cache_->Find(Source(i)) != nullptr; }
  // Of one entry, as the cache counts it.
  size_t EntryBytes() {
    cache_.emplace(size_t{1} << 30);
    Keep(0, "");
    return cache_->held_bytes();
  }

  std::optional<text::GrammarVocabulary> vocabulary_;
  std::optional<GrammarCache> cache_;
};

TEST_F(GrammarCacheTest, KeepsToTheLimitAndNoFurther) {
  const size_t entry = EntryBytes();
  cache_.emplace(3 * entry);
  for (int i = 0; i < 3; ++i) Keep(i, "");
  EXPECT_TRUE(Has(0) && Has(1) && Has(2));
  EXPECT_EQ(cache_->held_bytes(), 3 * entry);
  EXPECT_TRUE(Has(0));  // used last
  Keep(3, "");
  EXPECT_FALSE(Has(1));
  EXPECT_TRUE(Has(0) && Has(2) && Has(3));
  EXPECT_EQ(cache_->held_bytes(), 3 * entry);

  cache_.emplace(3 * entry - 1);
  for (int i = 0; i < 3; ++i) Keep(i, "");
  EXPECT_FALSE(Has(0));
  EXPECT_TRUE(Has(1) && Has(2));

  cache_.emplace(entry - 1);
  Keep(0, "");
  EXPECT_FALSE(Has(0));
  EXPECT_EQ(cache_->held_bytes(), 0U);
  cache_.emplace(0);
  Keep(0, "");
  EXPECT_FALSE(Has(0));
}

TEST_F(GrammarCacheTest, WhoFloodsItDrivesOutHimself) {
  const size_t entry = EntryBytes();
  cache_.emplace(16 * entry);
  Keep(0, "quiet");
  Keep(1, "quiet");  // an eighth
  for (int i = 2; i < 42; ++i) Keep(i, "flood");
  EXPECT_TRUE(Has(0) && Has(1));
  EXPECT_FALSE(Has(2));
  for (int i = 28; i < 42; ++i) EXPECT_TRUE(Has(i)) << i;
  // Beyond its share it goes like any other.
  for (int i = 42; i < 60; ++i) Keep(i, "quiet");
  EXPECT_FALSE(Has(0));
  EXPECT_EQ(cache_->held_bytes(), 16 * entry);
}

TEST_F(GrammarCacheTest, ACopyTakesAboutWhatItSays) {
  if (mallinfo2().uordblks == 0) {
    GTEST_SKIP() << "this allocator tells nothing";
  }
  std::string properties;
  for (int i = 0; i < 60; ++i) {
    absl::StrAppend(&properties, i > 0 ? "," : "", "\"field", i,
                    "\":{\"type\":\"string\",\"maxLength\":", i + 3, "}");
  }
  for (const GrammarSource& source :
       {GrammarSource{.kind = GrammarKind::kJsonSchema,
       .text = absl::StrCat("{\"type\":\"object\",\"properties\":{", properties,
                            "}}")},
        GrammarSource{.kind = GrammarKind::kJsonObject, .text = ""},
        Source(200)}) {
    const Grammar grammar = Compile(source);
    constexpr int kCopies = 20;
    std::vector<Grammar> copies;
    copies.reserve(kCopies);
    const size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
    for (int i = 0; i < kCopies; ++i) copies.push_back(*grammar.Copy());
    const size_t taken =
        (mallinfo2().uordblks + mallinfo2().hblkhd - before) / kCopies;
    EXPECT_GT(grammar.new_bytes(), taken / 3) << source.text.substr(0, 40);
    EXPECT_LT(grammar.new_bytes(), taken * 3) << source.text.substr(0, 40);
  }
}

}  // namespace
}  // namespace tandem::worker
