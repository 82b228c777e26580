// SPDX-License-Identifier: Apache-2.0
// Grammars that were compiled of late, for sequences of one request and
// requests of one program, which have the same. Bounded in bytes; who keeps
// more than an eighth drives out himself. Of one thread.

#ifndef TANDEM_WORKER_GRAMMAR_CACHE_H_
#define TANDEM_WORKER_GRAMMAR_CACHE_H_

#include <cstddef>
#include <list>
#include <map>
#include <string>

#include "text/grammar.h"
#include "text/grammar_source.h"

namespace tandem::worker {

class GrammarCache {
 public:
  explicit GrammarCache(size_t bytes) : bytes_(bytes) {}

  // As it was when it was new, and only to be copied; null: not here.
  const text::Grammar* Find(const text::GrammarSource& source);
  // Of `party`, unless it alone takes more than there may be.
  void Keep(const text::GrammarSource& source, const std::string& party,
            text::Grammar grammar);

  size_t held_bytes() const { return held_; }

 private:
  struct Entry {
    text::GrammarSource source;
    std::string party;
    text::Grammar grammar;
    size_t bytes = 0;
  };
  using Entries = std::list<Entry>;

  // What goes first.
  Entries::iterator First();
  void Erase(Entries::iterator entry);

  const size_t bytes_;
  size_t held_ = 0;
  Entries entries_;  // the one used last is the last
  std::map<std::string, size_t> of_party_;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_GRAMMAR_CACHE_H_
