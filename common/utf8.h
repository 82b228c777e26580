// SPDX-License-Identifier: Apache-2.0
// Strings on their way into JSON, logs and terminals.

#ifndef TANDEM_COMMON_UTF8_H_
#define TANDEM_COMMON_UTF8_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace tandem {

// Bytes of the well-formed UTF-8 character that `text` starts with; 0 if it
// starts with none (overlong, surrogate, cut short).
size_t Utf8Length(std::string_view text);

// The head of `text`, of at most `bytes`, that ends where a character does.
std::string_view Utf8Head(std::string_view text, size_t bytes);

// What is malformed becomes U+FFFD: a protobuf with other strings is not read.
std::string ValidUtf8(std::string_view text);

// Escapes what JSON wants escaped and replaces malformed UTF-8 by U+FFFD.
// `quotes`: also escape " and \; without it the result only has no control
// characters, for terminals.
std::string JsonEscaped(std::string_view text, bool quotes = true);

// What a model wrote must not steer the terminal: control characters but the
// ends of lines and tabs become U+FFFD.
std::string ForTerminal(std::string_view text);

}  // namespace tandem

#endif  // TANDEM_COMMON_UTF8_H_
