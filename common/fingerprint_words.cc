// SPDX-License-Identifier: Apache-2.0
#include "common/fingerprint_words.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <vector>

#include "common/utf8.h"

namespace tandem {
namespace {

constexpr size_t kLongestWord = 48;
constexpr size_t kLongestLine = 200;
constexpr std::string_view kCut = "...";

// `name=value`, or the line's head, which has no name. A value may go on behind
// spaces: `experts=2 of 8`.
using Words = std::vector<std::string_view>;

Words Split(std::string_view line) {
  Words words;
  size_t begin = 0;
  for (size_t space = line.find(' '); space != std::string_view::npos;
       space = line.find(' ', space + 1)) {
    const std::string_view next =
        line.substr(space + 1, line.find(' ', space + 1) - space - 1);
    if (next.find('=') == std::string_view::npos) continue;
    words.push_back(line.substr(begin, space - begin));
    begin = space + 1;
  }
  words.push_back(line.substr(begin));
  return words;
}

std::string_view NameOf(std::string_view word) {
  const size_t end = word.find('=');
  return end == std::string_view::npos ? "" : word.substr(0, end);
}

// In their order; a word that one has twice is there for one of the other's.
Words Without(const Words& words, const Words& other) {
  std::multiset<std::string_view> equal(other.begin(), other.end());
  Words rest;
  for (const std::string_view word : words) {
    if (const auto it = equal.find(word); it != equal.end()) {
      equal.erase(it);
    } else {
      rest.push_back(word);
    }
  }
  return rest;
}

std::string Head(std::string_view text, size_t longest) {
  if (text.size() <= longest) return std::string(text);
  return std::string(Utf8Head(text, longest)) + std::string(kCut);
}

// A long one, such as a flag for each layer, from a little before where it
// parts from the other's.
std::string Shown(std::string_view word, std::string_view other,
                  size_t longest) {
  if (word.size() <= longest) return std::string(word);
  const size_t equal = static_cast<size_t>(
      std::mismatch(word.begin(), word.end(), other.begin(), other.end())
          .first -
      word.begin());
  const size_t name = NameOf(word).size();
  const size_t value = name == 0 || name >= longest ? 0 : name + 1;
  constexpr size_t kBefore = 8;
  if (equal <= value + kBefore) return Head(word, longest);
  size_t from = equal - kBefore;
  // Not within a character.
  while (from > value && (word[from] & '\xc0') == '\x80') --from;
  return std::string(word.substr(0, value)) + std::string(kCut) +
         Head(word.substr(from), longest);
}

// Of `words` of a line, which differ, beside the `other` line's that do; `all`
// are the line's.
std::string Line(const Words& words, const Words& other, const Words& all) {
  std::string line;
  const auto add = [&line](const std::string& text) {
    if (!line.empty()) line += ' ';
    line += text;
  };
  for (const std::string_view word : words) {
    if (line.size() > kLongestLine) break;
    const auto beside = std::find_if(
        other.begin(), other.end(),
        [&](std::string_view its) { return NameOf(its) == NameOf(word); });
    add(Shown(word, beside == other.end() ? "" : *beside, kLongestWord));
  }
  // A set, as a peer may send thousands.
  std::set<std::string_view> names;
  for (const std::string_view word : all) names.insert(NameOf(word));
  for (const std::string_view word : other) {
    if (line.size() > kLongestLine) break;
    const std::string_view name = NameOf(word);
    if (!names.contains(name)) add("no " + Head(name, kLongestWord));
  }
  // Twice in the other line, and here once.
  if (line.empty()) line = "nothing more";
  return Head(line, kLongestLine);
}

// Positions that are served are not said by a scaling that has two lists of
// factors, but choose one.
bool OfServedPositions(const Words& words) {
  return std::all_of(words.begin(), words.end(), [](std::string_view word) {
    return NameOf(word) == "served" || NameOf(word) == "factors";
  });
}

}  // namespace

FingerprintWords DifferingWords(std::string_view a, std::string_view b,
                                size_t longest) {
  const Words all_a = Split(a), all_b = Split(b);
  const Words only_a = Without(all_a, all_b), only_b = Without(all_b, all_a);
  const auto heads = [&](size_t from) -> FingerprintWords {
    const std::string_view rest_a = a.substr(from), rest_b = b.substr(from);
    return {Shown(rest_a, rest_b, longest), Shown(rest_b, rest_a, longest), ""};
  };
  if (all_a.size() < 2 || all_b.size() < 2) return heads(0);
  if (only_a.empty() && only_b.empty()) {
    // The same words in another order: what is behind those in place.
    size_t from = 0;
    for (size_t i = 0; i < all_a.size() && all_a[i] == all_b[i]; ++i) {
      from += all_a[i].size() + 1;
    }
    return heads(std::min(from, a.size()));
  }
  FingerprintWords words = {Line(only_a, only_b, all_a),
                            Line(only_b, only_a, all_b), ""};
  if (OfServedPositions(only_a) && OfServedPositions(only_b)) {
    words.hint = " (is --max-model-len the same on both workers?)";
  }
  return words;
}

}  // namespace tandem
