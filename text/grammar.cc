// SPDX-License-Identifier: Apache-2.0
#include "text/grammar.h"

#include <algorithm>
#include <string>
#include <utility>

#include "text/ffi.h"

namespace tandem::text {

void Grammar::Free::operator()(ffi::GrammarHandle* handle) const {
  ffi::tandem_text_grammar_free(handle);
}

Grammar::Grammar(ffi::GrammarHandle* handle) : handle_(handle) {}
Grammar::Grammar(Grammar&&) noexcept = default;
Grammar& Grammar::operator=(Grammar&&) noexcept = default;
Grammar::~Grammar() = default;

absl::StatusOr<Grammar> Grammar::Copy() const {
  ffi::GrammarHandle* handle = nullptr;
  std::string error;
  const int32_t kind =
      ffi::tandem_text_grammar_copy(handle_.get(), &handle, ffi::Into(error));
  if (kind != 0) return ffi::ToStatus(kind, "", error);
  return Grammar(handle);
}

absl::StatusOr<bool> Grammar::Mask(std::span<uint32_t> words) {
  bool may_end = false;
  std::string error;
  const int32_t kind = ffi::tandem_text_grammar_mask(
      handle_.get(), words.data(), words.size(), &may_end, ffi::Into(error));
  if (kind != 0) return ffi::ToStatus(kind, "", error);
  return may_end;
}

absl::StatusOr<int> Grammar::Consume(std::span<const int32_t> tokens) {
  size_t consumed = 0;
  std::string error;
  const int32_t kind = ffi::tandem_text_grammar_consume(
      handle_.get(), reinterpret_cast<const uint32_t*>(tokens.data()),
      tokens.size(), &consumed, ffi::Into(error));
  if (kind != 0) return ffi::ToStatus(kind, "", error);
  return static_cast<int>(consumed);
}

size_t Grammar::new_bytes() const {
  return ffi::tandem_text_grammar_new_bytes(handle_.get());
}

bool Grammar::ended() const {
  return ffi::tandem_text_grammar_ended(handle_.get());
}

void GrammarVocabulary::Free::operator()(
    const ffi::GrammarVocabulary* handle) const {
  ffi::tandem_text_vocabulary_free(handle);
}

GrammarVocabulary::GrammarVocabulary(const ffi::GrammarVocabulary* handle,
                                     int vocab_size)
    : handle_(handle), vocab_size_(vocab_size) {}
GrammarVocabulary::GrammarVocabulary(GrammarVocabulary&&) noexcept = default;
GrammarVocabulary& GrammarVocabulary::operator=(GrammarVocabulary&&) noexcept =
    default;
GrammarVocabulary::~GrammarVocabulary() = default;

absl::StatusOr<GrammarVocabulary> GrammarVocabulary::Create(
    const Tokenizer& tokenizer, int vocab_size) {
  const ffi::GrammarVocabulary* handle = nullptr;
  std::string error;
  const int32_t kind = ffi::tandem_text_vocabulary_new(
      tokenizer.handle_.get(), static_cast<size_t>(std::max(vocab_size, 0)),
      &handle, ffi::Into(error));
  if (kind != 0) return ffi::ToStatus(kind, "grammar vocabulary", error);
  return GrammarVocabulary(handle, vocab_size);
}

absl::StatusOr<Grammar> GrammarVocabulary::Compile(
    GrammarKind kind, std::string_view source, absl::Duration budget) const {
  ffi::GrammarHandle* handle = nullptr;
  std::string error;
  const int32_t failure = ffi::tandem_text_grammar_new(
      handle_.get(), static_cast<int32_t>(kind), ffi::Borrow(source),
      static_cast<uint64_t>(
          std::max<int64_t>(absl::ToInt64Milliseconds(budget), 0)),
      &handle, ffi::Into(error));
  if (failure != 0) return ffi::ToStatus(failure, "", error);
  return Grammar(handle);
}

}  // namespace tandem::text
