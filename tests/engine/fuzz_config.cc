// SPDX-License-Identifier: Apache-2.0
// Any bytes as config.json and generation_config.json (parted by a NUL): an
// answer, and a good one only with shapes that memory can be planned by.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "engine/model_config.h"
#include "tests/fuzz.h"

TANDEM_FUZZ_TARGET(fuzz_config)(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t cut = text.find('\0');
  const std::string_view generation =
      cut == text.npos ? std::string_view() : text.substr(cut + 1);
  const auto spec = tandem::engine::ParseModelSpec(
      "config", text.substr(0, cut), "generation", generation);
  if (!spec.ok()) return 0;
  if (spec->layers < 1 || spec->layers > 1024 || spec->head_dim % 8 != 0 ||
      spec->heads % spec->kv_heads != 0 || spec->hidden_size > 1 << 20 ||
      !(spec->norm_eps > 0) || !(spec->rope.theta >= 1)) {
    abort();
  }
  for (const int32_t id : spec->eos_ids) {
    if (id < 0 || id >= spec->vocab_size) abort();
  }
  return 0;
}
