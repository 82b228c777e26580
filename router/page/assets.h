// SPDX-License-Identifier: Apache-2.0
// The page's files, router/page/assets/, as the build put them into the binary
// (cmake/embed.cmake). They live as long as the process.

#ifndef TANDEM_ROUTER_PAGE_ASSETS_H_
#define TANDEM_ROUTER_PAGE_ASSETS_H_

#include <string_view>

#include "absl/types/span.h"

namespace tandem::router {

struct Asset {
  std::string_view name;  // "index.html"
  std::string_view bytes;
};

absl::Span<const Asset> Assets();

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_PAGE_ASSETS_H_
