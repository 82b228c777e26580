// SPDX-License-Identifier: Apache-2.0
#include "worker/grammar_cache.h"

#include <algorithm>
#include <utility>

namespace tandem::worker {
namespace {

constexpr size_t kParties = 8;  // may have the whole together
constexpr size_t kEntryBytes = 512;

}  // namespace

const text::Grammar* GrammarCache::Find(const text::GrammarSource& source) {
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
        return entry.source.kind == source.kind &&
               entry.source.text == source.text;
      });
  if (found == entries_.end()) return nullptr;
  entries_.splice(entries_.end(), entries_, found);
  return &found->grammar;
}

void GrammarCache::Keep(const text::GrammarSource& source,
                        const std::string& party, text::Grammar grammar) {
  const size_t bytes = kEntryBytes + source.text.size() + grammar.new_bytes();
  if (bytes > bytes_) return;
  entries_.push_back({source, party, std::move(grammar), bytes});
  held_ += bytes;
  of_party_[party] += bytes;
  while (held_ > bytes_) Erase(First());
}

GrammarCache::Entries::iterator GrammarCache::First() {
  const auto over =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
        return of_party_.at(entry.party) > bytes_ / kParties;
      });
  return over == entries_.end() ? entries_.begin() : over;
}

void GrammarCache::Erase(Entries::iterator entry) {
  held_ -= entry->bytes;
  const auto party = of_party_.find(entry->party);
  party->second -= entry->bytes;
  if (party->second == 0) of_party_.erase(party);
  entries_.erase(entry);
}

}  // namespace tandem::worker
