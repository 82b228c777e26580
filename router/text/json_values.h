// SPDX-License-Identifier: Apache-2.0
// JSON of what calls say in a syntax of their own.

#ifndef TANDEM_ROUTER_TEXT_JSON_VALUES_H_
#define TANDEM_ROUTER_TEXT_JSON_VALUES_H_

#include <string>
#include <string_view>

namespace tandem::router {

std::string JsonString(std::string_view text);

// Whether it is one value that an object of arguments can hold.
bool IsJsonValue(std::string_view text);

// As it stands where it is such a value, also Python's True, False and None;
// else a string.
std::string JsonOf(std::string_view value);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TEXT_JSON_VALUES_H_
