// SPDX-License-Identifier: Apache-2.0
// The key file as bytes: refused, or an equal one when written and read back.

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "router/tenants/key_file.h"
#include "tests/fuzz.h"

TANDEM_FUZZ_TARGET(fuzz_key_file)(const uint8_t* data, size_t size) {
  using tandem::router::KeyFile;
  const auto file = tandem::router::ParseKeyFile(
      std::string_view(reinterpret_cast<const char*>(data), size));
  if (!file.ok()) return 0;
  std::string text;
  for (const auto& entry : file->keys) {
    text +=
        tandem::router::FormatKeyEntry(entry, file->tenants.at(entry.tenant)) +
        "\n";
  }
  const auto again = tandem::router::ParseKeyFile(text);
  if (!again.ok() || again->keys.size() != file->keys.size() ||
      again->tenants != file->tenants) {
    std::abort();
  }
  return 0;
}
