// SPDX-License-Identifier: Apache-2.0
#include "common/http/host.h"

#include <arpa/inet.h>

#include <string>

#include "absl/strings/ascii.h"

namespace tandem {
namespace {

bool IsAddress(int family, const std::string& text) {
  in6_addr address;  // room for either
  return inet_pton(family, text.c_str(), &address) == 1;
}

}  // namespace

bool IsLocalHost(std::string_view header, std::string_view own) {
  if (header.empty()) return true;
  if (header.front() == '[') {
    const size_t end = header.find(']');
    return end != std::string_view::npos &&
           IsAddress(AF_INET6, std::string(header.substr(1, end - 1)));
  }
  std::string name(header.substr(0, header.find(':')));
  absl::AsciiStrToLower(&name);
  if (name.size() > 1 && name.back() == '.') name.pop_back();
  std::string own_name(own);
  absl::AsciiStrToLower(&own_name);
  return name == own_name || name == "localhost" ||
         name.ends_with(".localhost") || name.ends_with(".local") ||
         name.ends_with(".internal") || IsAddress(AF_INET, name);
}

}  // namespace tandem
