// SPDX-License-Identifier: Apache-2.0
// Grammars of a real tokenizer as the cores use them: states that follow
// outputs, masks behind guesses, and orders that wait.

#include "worker/text_grammars.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/thread_loop.h"
#include "tests/engine/notification.h"

namespace tandem::worker {
namespace {

constexpr int kEnd = 3;  // stands for the model's own

class TextGrammarsTest : public testing::Test {
 protected:
  TextGrammarsTest() : loop_("test") {
    const std::string model = TANDEM_SOURCE_DIR "/models/tales";
    tokenizer_ =
        std::make_unique<text::Tokenizer>(*text::Tokenizer::Load(model));
    vocab_size_ = tokenizer_->vocab_size();
    words_ = static_cast<size_t>((vocab_size_ + 31) / 32);
    grammars_ =
        *TextGrammars::Load(model, vocab_size_, size_t{1} << 20, &loop_);
  }
  ~TextGrammarsTest() override {
    grammars_.reset();
    loop_.Stop();
  }

  static GrammarOrder Regex(const std::string& regex,
                            std::vector<int32_t> output = {}) {
    GrammarOrder order;
    order.params.mutable_options()->set_regex(regex);
    order.params.add_end_token_ids(kEnd);
    order.output = std::move(output);
    return order;
  }
  absl::StatusOr<std::unique_ptr<CallGrammar>> Compile(GrammarOrder order) {
    absl::StatusOr<std::unique_ptr<CallGrammar>> made;
    engine::Notification done;
    loop_.RunSync([&] {
      grammars_->Compile(std::move(order), [&](auto grammar) {
        made = std::move(grammar);
        done.Notify();
      });
    });
    done.WaitForNotification();
    return made;
  }
  std::vector<int32_t> Ids(const std::string& text) const {
    std::vector<int32_t> ids;
    for (const char c : text) {
      for (int32_t id = 0; id < vocab_size_; ++id) {
        if (tokenizer_->TokenBytes(id) == std::string(1, c)) {
          ids.push_back(id);
          break;
        }
      }
    }
    EXPECT_EQ(ids.size(), text.size()) << text;
    return ids;
  }
  std::vector<std::vector<uint32_t>> Masks(
      engine::TokenConstraint* constraint,
      const std::vector<int32_t>& guesses) {
    std::vector<uint32_t> all((guesses.size() + 1) * words_, 0);
    constraint->FillMasks(guesses, absl::MakeSpan(all));
    std::vector<std::vector<uint32_t>> masks;
    for (size_t i = 0; i <= guesses.size(); ++i) {
      const auto begin = all.begin() + static_cast<int64_t>(i * words_);
      masks.emplace_back(begin, begin + static_cast<int64_t>(words_));
    }
    return masks;
  }
  static bool Names(const std::vector<uint32_t>& mask, int32_t id) {
    return (mask[static_cast<size_t>(id / 32)] >> (id % 32) & 1) != 0;
  }
  // Asked on the loop, as the engine does.
  void WaitUntilReady(const engine::TokenConstraint& constraint) {
    bool ready = false;
    while (!ready) {
      loop_.RunSync([&] { ready = constraint.ready(); });
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  std::unique_ptr<engine::TokenConstraint> Follow(
      const CallGrammar& grammar, const std::vector<int32_t>& output) {
    std::unique_ptr<engine::TokenConstraint> constraint;
    loop_.RunSync([&] { constraint = grammar.Follow(output); });
    WaitUntilReady(*constraint);
    return constraint;
  }

  ThreadLoop loop_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  int vocab_size_ = 0;
  size_t words_ = 0;
  std::unique_ptr<TextGrammars> grammars_;
};

// However a state came there: token by token, behind an output at once, from
// the order's output on, or with wrong and right guesses on the way.
TEST_F(TextGrammarsTest, AStateIsItsTokens) {
  std::string text;
  for (int i = 0; i < 60; ++i) text += absl::StrCat("ab", i % 10, ",");
  const std::vector<int32_t> ids = Ids(text);
  const auto plain = Compile(Regex("([a-z]{2}[0-9],)*"));
  ASSERT_TRUE(plain.ok()) << plain.status();
  const auto stepwise = Follow(**plain, {});
  for (size_t at = 0; at < ids.size(); ++at) {
    const auto rest = ids.begin() + static_cast<int64_t>(at);
    std::vector<int32_t> guesses(rest,
                                 rest + std::min<int64_t>(3, ids.end() - rest));
    const auto masks = Masks(stepwise.get(), guesses);
    EXPECT_EQ(stepwise->guessed(), std::ssize(guesses));
    // A guess that may not come ends them.
    std::swap(guesses[0], guesses.back());
    if (guesses[0] != guesses.back()) {
      Masks(stepwise.get(), guesses);
      EXPECT_EQ(stepwise->guessed(), 0);
    }
    if (at % 37 == 0) {
      const std::vector<int32_t> before(ids.begin(), rest);
      const std::vector<int32_t> half(
          ids.begin(), ids.begin() + static_cast<int64_t>(at / 2));
      const auto resumed = Compile(Regex("([a-z]{2}[0-9],)*", half));
      ASSERT_TRUE(resumed.ok()) << resumed.status();
      for (const auto* grammar : {plain->get(), resumed->get()}) {
        EXPECT_EQ(Masks(Follow(*grammar, before).get(), {})[0], masks[0]) << at;
      }
    }
    EXPECT_FALSE(stepwise->Append(ids[at]));
    ASSERT_TRUE(stepwise->status().ok()) << stepwise->status();
    if (guesses.size() > 1) {
      EXPECT_EQ(Masks(stepwise.get(), {})[0], masks[1]) << at;
    }
  }
}

TEST_F(TextGrammarsTest, WhatDoesNotFollowShows) {
  const std::vector<int32_t> wrong = Ids("ab1,ab1;");
  const auto refused = Compile(Regex("([a-z]{2}[0-9],)*", wrong));
  EXPECT_EQ(ErrorReason(refused.status()), kStructuredReason);
  const auto grammar = Compile(Regex("([a-z]{2}[0-9],)*"));
  ASSERT_TRUE(grammar.ok());
  EXPECT_FALSE(Follow(**grammar, wrong)->status().ok());
  std::vector<int32_t> long_one;
  for (int i = 0; i < 30; ++i) {
    for (const int32_t id : Ids("ab1,")) long_one.push_back(id);
  }
  long_one.push_back(wrong.back());
  const auto followed = Follow(**grammar, long_one);
  Masks(followed.get(), {});
  EXPECT_EQ(ErrorReason(followed->status()), kStructuredReason);
}

TEST_F(TextGrammarsTest, AWholeOutputIsKnown) {
  EXPECT_TRUE((*Compile(Regex("abc", Ids("abc"))))->IsWhole());
  EXPECT_FALSE((*Compile(Regex("abc", Ids("ab"))))->IsWhole());
  EXPECT_FALSE((*Compile(Regex("abc", {})))->IsWhole());
}

std::vector<int32_t> Repeated(const std::vector<int32_t>& ids, int times) {
  std::vector<int32_t> all;
  for (int i = 0; i < times; ++i) all.insert(all.end(), ids.begin(), ids.end());
  return all;
}

// The compiler follows it only where nothing else can tell that it is whole.
TEST_F(TextGrammarsTest, ALongOutputIsLeftToTheReplay) {
  const std::vector<int32_t> output = Repeated(Ids("ab"), 1500);
  for (const bool ignored : {false, true}) {
    GrammarOrder order = Regex("(ab){1500}", output);
    order.params.set_ignore_end(ignored);
    const auto grammar = Compile(order);
    ASSERT_TRUE(grammar.ok()) << grammar.status();
    EXPECT_EQ((*grammar)->IsWhole(), ignored);
    if (ignored) continue;
    const auto constraint = Follow(**grammar, output);
    std::vector<uint32_t> only_end(words_);
    only_end[kEnd / 32] = 1u << kEnd % 32;
    EXPECT_EQ(Masks(constraint.get(), {})[0], only_end);
    EXPECT_TRUE(constraint->Append(kEnd));
    EXPECT_TRUE(constraint->status().ok()) << constraint->status();
  }
}

TEST_F(TextGrammarsTest, AnOrderThatIsCancelledAtWorkIsGivenUp) {
  GrammarOrder order = Regex("(ab)*", Repeated(Ids("ab"), 300'000));
  order.params.set_ignore_end(true);
  bool told = false;
  uint64_t number = 0;
  loop_.RunSync([&] {
    number = grammars_->Compile(std::move(order), [&](auto) { told = true; });
  });
  // It is at work by now, or else this test says nothing.
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  loop_.RunSync([&] { grammars_->Cancel(number); });
  EXPECT_TRUE(Compile(Regex("(ab)*")).ok());
  loop_.RunSync([&] { EXPECT_FALSE(told); });
}

TEST_F(TextGrammarsTest, EndsComeWhereTheTextMayEnd) {
  for (const bool ignored : {false, true}) {
    GrammarOrder order = Regex("(ab)*");
    order.params.set_ignore_end(ignored);
    const auto grammar = Compile(std::move(order));
    ASSERT_TRUE(grammar.ok());
    const auto constraint = Follow(**grammar, {});
    const std::vector<int32_t> ab = Ids("ab");
    const auto masks = Masks(constraint.get(), ab);
    EXPECT_EQ(Names(masks[0], kEnd), !ignored);
    EXPECT_FALSE(Names(masks[1], kEnd));
    EXPECT_EQ(Names(masks[2], kEnd), !ignored);
    if (ignored) continue;
    EXPECT_TRUE(constraint->Append(kEnd));
  }
}

// Free before the mark, and behind it as if the output began there: however a
// state came to it.
TEST_F(TextGrammarsTest, AGrammarMayBeginBehindAToken) {
  const std::vector<int32_t> mark = Ids("z");
  const std::vector<int32_t> free = Ids("hm7");
  const std::vector<int32_t> ids = Ids("ab1,ab2,");
  const std::string regex = "([a-z]{2}[0-9],)*";
  const auto plain = Compile(Regex(regex));
  ASSERT_TRUE(plain.ok()) << plain.status();
  const auto order = [&](std::vector<int32_t> output) {
    GrammarOrder made = Regex(regex, std::move(output));
    made.params.set_after_token_id(mark[0]);
    return made;
  };
  std::vector<int32_t> all = free;
  all.push_back(mark[0]);
  all.insert(all.end(), ids.begin(), ids.end());
  const std::vector<uint32_t> anything(words_, ~0u);
  const auto expected = [&](size_t at) {
    if (at <= free.size()) return anything;
    const std::vector<int32_t> behind(
        all.begin() + static_cast<int64_t>(free.size()) + 1,
        all.begin() + static_cast<int64_t>(at));
    return Masks(Follow(**plain, behind).get(), {})[0];
  };
  // The order's output is before the mark, at it, and behind it.
  for (const size_t known : {size_t{0}, size_t{2}, size_t{4}, size_t{7}}) {
    const auto begin = all.begin();
    const auto grammar =
        Compile(order({begin, begin + static_cast<int64_t>(known)}));
    ASSERT_TRUE(grammar.ok()) << grammar.status();
    EXPECT_FALSE((*grammar)->IsWhole());
    const auto stepwise = Follow(**grammar, {});
    for (size_t at = 0; at < all.size(); ++at) {
      SCOPED_TRACE(absl::StrCat(known, " known, at ", at));
      const auto here = begin + static_cast<int64_t>(at);
      EXPECT_EQ(Masks(stepwise.get(), {})[0], expected(at));
      const std::vector<int32_t> guesses(here, std::min(here + 3, all.end()));
      const auto masks = Masks(stepwise.get(), guesses);
      ASSERT_EQ(stepwise->guessed(), std::ssize(guesses));
      for (size_t i = 0; i <= guesses.size(); ++i) {
        EXPECT_EQ(masks[i], expected(at + i)) << i;
      }
      const auto followed = Follow(**grammar, {begin, here});
      EXPECT_EQ(Masks(followed.get(), {})[0], expected(at));
      EXPECT_FALSE(stepwise->Append(all[at]));
      EXPECT_TRUE(stepwise->status().ok()) << stepwise->status();
    }
  }
  // What cannot follow behind the mark shows; before it nothing does.
  const auto grammar = Compile(order({}));
  EXPECT_TRUE(Follow(**grammar, Ids("9,9,"))->status().ok());
  EXPECT_FALSE(Follow(**grammar, Ids("9z9"))->status().ok());
  // An end before the mark is the engine's matter, and whole is what follows.
  EXPECT_FALSE(Follow(**grammar, {})->Append(kEnd));
  GrammarOrder once = Regex("a", Ids("aza"));
  once.params.set_after_token_id(mark[0]);
  EXPECT_TRUE((*Compile(once))->IsWhole());
  once.output = Ids("aa");
  EXPECT_FALSE((*Compile(once))->IsWhole());
}

// What a guess comes to says nothing about the sequence.
TEST_F(TextGrammarsTest, TooMuchBehindAGuessEndsTheGuessesAlone) {
  GrammarOrder order;
  order.params.mutable_options()->set_grammar(
      "start: s\ns: s s | \"a\" | s s s\n");
  const auto grammar = Compile(std::move(order));
  ASSERT_TRUE(grammar.ok()) << grammar.status();
  const auto constraint = Follow(**grammar, {});
  const int32_t a = Ids("a")[0];
  const auto masks = Masks(constraint.get(), std::vector<int32_t>(400, a));
  EXPECT_GT(constraint->guessed(), 0);
  EXPECT_LT(constraint->guessed(), 400);
  EXPECT_TRUE(constraint->status().ok()) << constraint->status();
  EXPECT_FALSE(constraint->Append(a));
  EXPECT_EQ(Masks(constraint.get(), {})[0], masks[1]);
  EXPECT_TRUE(constraint->status().ok()) << constraint->status();
}

// Nor what it comes to in the lexer, which copies could have in common.
TEST_F(TextGrammarsTest, ALexerThatAGuessBlowsUpIsNotTheSequencesOwn) {
  // It must know of every letter so far how long ago it was.
  const auto grammar = Compile(
      Regex("1*(([a-z ]*[aeiou][a-z ]{60}Y)|([a-z ]*[bcdst][a-z ]{61}Z))?"));
  ASSERT_TRUE(grammar.ok()) << grammar.status();
  const auto guessing = Follow(**grammar, {});
  const auto plain = Follow(**grammar, {});
  std::mt19937 random(1);
  std::string letters;
  while (letters.size() < 300)
    letters += static_cast<char>('a' + random() % 26);
  const std::vector<int32_t> guesses = Ids(letters);
  const int32_t one = Ids("1")[0];
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Masks(guessing.get(), guesses)[0], Masks(plain.get(), {})[0]);
    EXPECT_GT(guessing->guessed(), 0);
    EXPECT_LT(guessing->guessed(), 300);
    EXPECT_FALSE(guessing->Append(one));
    EXPECT_FALSE(plain->Append(one));
    ASSERT_TRUE(guessing->status().ok()) << guessing->status();
  }
}

TEST_F(TextGrammarsTest, PartiesTakeTurnsAndCancelledOrdersDoNotRun) {
  std::vector<std::string> done;
  engine::Notification all;
  loop_.RunSync([&] {
    uint64_t cancelled = 0;
    for (int i = 0; i < 9; ++i) {
      // The first is at work while the others come, or nearly so.
      GrammarOrder order = Regex(absl::StrCat("[a-f]{", 30 + i, "}x*"));
      order.party = i == 7 ? "other" : "busy";
      const uint64_t number =
          grammars_->Compile(std::move(order), [&done, &all, i](auto grammar) {
            EXPECT_TRUE(grammar.ok()) << grammar.status();
            done.push_back(std::to_string(i));
            if (done.size() == 8) all.Notify();
          });
      if (i == 5) cancelled = number;
    }
    grammars_->Cancel(cancelled);
    grammars_->Cancel(12345);
  });
  all.WaitForNotification();
  loop_.RunSync([&] {
    EXPECT_THAT(done, testing::Not(testing::Contains("5")));
    // Behind the one at work, and one that was taken before it came.
    const auto at = std::find(done.begin(), done.end(), "7");
    EXPECT_LE(at - done.begin(), 3) << testing::PrintToString(done);
  });
}

TEST_F(TextGrammarsTest, WhoNeedsNoReplayAnyMoreIsForgotten) {
  const auto grammar = Compile(Regex("(ab)*"));
  const std::vector<int32_t> output = Repeated(Ids("ab"), 500);
  bool told = false;
  loop_.RunSync([&] {
    for (int i = 0; i < 3; ++i) {
      const auto constraint = (*grammar)->Follow(output);
      constraint->OnReady([&] { told = true; });
    }
  });
  const auto last = Follow(**grammar, output);
  Masks(last.get(), {});
  EXPECT_TRUE(last->status().ok());
  loop_.RunSync([&] { EXPECT_FALSE(told); });
}

}  // namespace
}  // namespace tandem::worker
