// SPDX-License-Identifier: Apache-2.0
// Which tokens may come next, so that a text matches a JSON schema, a regex, a
// grammar or one of some choices.
//
//   auto vocabulary = GrammarVocabulary::Create(tokenizer, model_vocab_size);
//   auto grammar = vocabulary->Compile(GrammarKind::kRegex, "[0-9]+", budget);
//   grammar->Mask(words);             // what the first token may be
//   grammar->Consume({&token, 1});    // it was that one
//
// A token stands for the bytes that it adds behind other text, byte tokens for
// their byte; special tokens for no text, so that only a grammar that names
// one lets it through. rust/src/grammar.rs says more.

#ifndef TANDEM_TEXT_GRAMMAR_H_
#define TANDEM_TEXT_GRAMMAR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "text/tokenizer.h"

namespace tandem::text {

namespace ffi {
struct GrammarVocabulary;
struct GrammarHandle;
}  // namespace ffi

enum class GrammarKind : int32_t {
  kJsonSchema = 0,
  kJsonObject = 1,  // its text is not looked at
  kRegex = 2,       // of Rust's regex crate; matches the whole text
  kLark = 3,        // llguidance's dialect; begins with the rule `start`
  kChoice = 4,      // text is a JSON list of strings
  kStructuralTag = 5,
};

// One sequence's place in its text: a function of the grammar and the tokens so
// far. Used by one thread at a time.
class Grammar {
 public:
  Grammar(Grammar&&) noexcept;
  Grammar& operator=(Grammar&&) noexcept;
  ~Grammar();

  // A state of its own, as this one is now. INTERNAL where it cannot be made.
  // Many threads at once may copy one state that nobody uses meanwhile.
  absl::StatusOr<Grammar> Copy() const;

  // Sets bit i % 32 of words[i / 32] for every id i that may come next, and
  // clears all others. Of as many words as the vocabulary needs. Gives whether
  // the text may end here. RESOURCE_EXHAUSTED or INVALID_ARGUMENT where the
  // grammar came to more work than it may take, or no token goes on and the
  // text may not end: then it is of no more use.
  absl::StatusOr<bool> Mask(std::span<uint32_t> words);
  // Goes on by these, up to the first one that may not come there; how many.
  // Errors as of Mask.
  absl::StatusOr<int> Consume(std::span<const int32_t> tokens);
  // About what it took when it was new, and takes as long as it is only copied.
  size_t new_bytes() const;
  // No more token may come: the text is whole.
  bool ended() const;

 private:
  friend class GrammarVocabulary;
  struct Free {
    void operator()(ffi::GrammarHandle* handle) const;
  };
  explicit Grammar(ffi::GrammarHandle* handle);

  std::unique_ptr<ffi::GrammarHandle, Free> handle_;
};

// A model's tokens, as its grammars need them: some 100 bytes for each. Const
// methods may be called from many threads at once.
class GrammarVocabulary {
 public:
  // `vocab_size` is the model's, which may be larger than the tokenizer's; ids
  // that this has no token for never come.
  static absl::StatusOr<GrammarVocabulary> Create(const Tokenizer& tokenizer,
                                                  int vocab_size);

  GrammarVocabulary(GrammarVocabulary&&) noexcept;
  GrammarVocabulary& operator=(GrammarVocabulary&&) noexcept;
  ~GrammarVocabulary();

  // On a thread of its own, for which this one waits no longer than `budget`:
  // then DEADLINE_EXCEEDED. INVALID_ARGUMENT with the compiler's reason, also
  // where it takes too much; RESOURCE_EXHAUSTED where too many are being
  // compiled. How long `source` may be is up to the caller.
  absl::StatusOr<Grammar> Compile(GrammarKind kind, std::string_view source,
                                  absl::Duration budget) const;

  int vocab_size() const { return vocab_size_; }
  int mask_words() const { return (vocab_size_ + 31) / 32; }

 private:
  struct Free {
    void operator()(const ffi::GrammarVocabulary* handle) const;
  };
  GrammarVocabulary(const ffi::GrammarVocabulary* handle, int vocab_size);

  std::unique_ptr<const ffi::GrammarVocabulary, Free> handle_;
  int vocab_size_;
};

}  // namespace tandem::text

#endif  // TANDEM_TEXT_GRAMMAR_H_
