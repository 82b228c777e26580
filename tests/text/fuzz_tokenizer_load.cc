// SPDX-License-Identifier: Apache-2.0
// Loading any bytes as a tokenizer ends in a tokenizer or an error, and what
// loads can encode and decode without breaking.

#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "tests/fuzz.h"
#include "text/tokenizer.h"

TANDEM_FUZZ_TARGET(fuzz_tokenizer_load)(const uint8_t* data, size_t size) {
  auto tokenizer = tandem::text::Tokenizer::FromJson(
      {reinterpret_cast<const char*>(data), size});
  if (!tokenizer.ok()) {
    // An error says something.
    if (tokenizer.status().message().empty()) std::abort();
    return 0;
  }
  auto ids = tokenizer->Encode("A b  \xC3\xA9<s>1\n", true);
  if (!ids.ok()) return 0;
  if (!tokenizer->Decode(*ids, false).ok()) std::abort();
  std::vector<int32_t> all;
  for (int32_t id = 0; id < tokenizer->vocab_size() && id < 1000; ++id) {
    all.push_back(id);
  }
  if (!tokenizer->Decode(all, true).ok()) std::abort();
  return 0;
}
