// SPDX-License-Identifier: Apache-2.0
// Compiling any text as a schema, regex, grammar, list of choices or structural
// tag ends in a grammar or an error that is the text's, and a grammar's masks
// say what it takes. The first byte is the kind's digit.

#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "tests/fuzz.h"
#include "text/grammar.h"

namespace tandem::text {
namespace {

struct Words {
  Words()
      : tokenizer(*Tokenizer::Load(TANDEM_SOURCE_DIR "/models/tales")),
        vocabulary(*GrammarVocabulary::Create(tokenizer,
                                              tokenizer.vocab_size() + 3)) {}
  Tokenizer tokenizer;
  GrammarVocabulary vocabulary;
};

void Require(bool right) {
  if (!right) std::abort();
}

// Its text's fault, or too much of it; a library's panic is INTERNAL.
void CheckError(const absl::Status& status) {
  fuzz::Require(absl::IsInvalidArgument(status) ||
                    absl::IsResourceExhausted(status) ||
                    absl::IsDeadlineExceeded(status),
                status.ToString().c_str());
  Require(!status.message().empty() && status.message().size() < 4000);
}

// Some tokens of those that the masks allow.
void Walk(Grammar grammar, int vocab_size, size_t words, uint64_t seed) {
  std::vector<uint32_t> mask(words), again(words);
  for (int i = 0; i < 12 && !grammar.ended(); ++i) {
    const absl::StatusOr<bool> may_end = grammar.Mask(mask);
    if (!may_end.ok()) return CheckError(may_end.status());
    std::vector<int32_t> allowed;
    int32_t refused = -1;
    for (int32_t id = 0; id < vocab_size; ++id) {
      if ((mask[static_cast<size_t>(id / 32)] >> (id % 32) & 1) != 0) {
        allowed.push_back(id);
      } else {
        refused = id;
      }
    }
    Require(*may_end || !allowed.empty());
    absl::StatusOr<Grammar> copy = grammar.Copy();
    Require(copy.ok());
    if (refused >= 0) {
      const absl::StatusOr<int> taken = copy->Consume({&refused, 1});
      Require(!taken.ok() || *taken == 0);
    }
    if (allowed.empty()) return;
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    const int32_t next = allowed[(seed >> 33) % allowed.size()];
    // What was tried on a copy has changed nothing.
    const absl::StatusOr<bool> same = grammar.Mask(again);
    if (!same.ok()) return CheckError(same.status());
    Require(again == mask && *same == *may_end);
    const absl::StatusOr<int> taken = grammar.Consume({&next, 1});
    if (!taken.ok()) return CheckError(taken.status());
    Require(*taken == 1);
  }
}

}  // namespace
}  // namespace tandem::text

TANDEM_FUZZ_TARGET(fuzz_grammar)(const uint8_t* data, size_t size) {
  using namespace tandem::text;  // NOLINT(google-build-using-namespace)
  static const auto* const words = new Words();
  if (size == 0) return 0;
  // Of digits what they say.
  const auto kind = static_cast<GrammarKind>(data[0] % 6);
  const std::string_view source(reinterpret_cast<const char*>(data) + 1,
                                size - 1);
  absl::StatusOr<Grammar> grammar =
      words->vocabulary.Compile(kind, source, absl::Seconds(5));
  if (!grammar.ok()) {
    CheckError(grammar.status());
    return 0;
  }
  uint64_t seed = size;
  for (size_t i = 0; i < size; ++i) seed = seed * 31 + data[i];
  Walk(*std::move(grammar), words->vocabulary.vocab_size(),
       static_cast<size_t>(words->vocabulary.mask_words()), seed);
  return 0;
}
