// SPDX-License-Identifier: Apache-2.0
// How two workers' values of one part of the fingerprint differ, for people. A
// part is a hash or a short word, or a line of `name=value` words of which most
// are equal: a model's config has dozens.

#ifndef TANDEM_COMMON_FINGERPRINT_WORDS_H_
#define TANDEM_COMMON_FINGERPRINT_WORDS_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace tandem {

struct FingerprintWords {
  std::string a, b;  // never equal, unless the values are
  std::string hint;  // what to look at, in parentheses behind a space; or ""
};

// Of two lines of words those that differ; anything else as it is, or
// `longest` bytes of it. Whatever a peer sent, the result is short, and UTF-8
// if that was.
FingerprintWords DifferingWords(std::string_view a, std::string_view b,
                                size_t longest);

}  // namespace tandem

#endif  // TANDEM_COMMON_FINGERPRINT_WORDS_H_
