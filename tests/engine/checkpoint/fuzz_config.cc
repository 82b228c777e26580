// SPDX-License-Identifier: Apache-2.0
// Any bytes as config.json, generation_config.json and quantize_config.json
// (parted by NULs): an answer, and a good one only with shapes that memory can
// be planned by.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "engine/checkpoint/model_config.h"
#include "tests/fuzz.h"

TANDEM_FUZZ_TARGET(fuzz_config)(const uint8_t* data, size_t size) {
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  std::string_view texts[3];
  for (std::string_view& text : texts) {
    text = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(std::min(rest.size(), text.size() + 1));
  }
  const auto spec = tandem::engine::ParseModelSpec(
      "config", texts[0], "generation", texts[1], "quantize", texts[2]);
  if (!spec.ok()) return 0;
  if (spec->layers < 1 || spec->layers > 1024 || spec->head_dim % 8 != 0 ||
      spec->heads % spec->kv_heads != 0 || spec->hidden_size > 1 << 20 ||
      !(spec->norm_eps > 0) || !(spec->rope.theta >= 1)) {
    abort();
  }
  if (spec->quantisation.group < 0 || spec->quantisation.group % 32 != 0) {
    abort();
  }
  for (const int32_t id : spec->eos_ids) {
    if (id < 0 || id >= spec->vocab_size) abort();
  }
  return 0;
}
