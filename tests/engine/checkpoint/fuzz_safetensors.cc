// SPDX-License-Identifier: Apache-2.0
// Any bytes as a safetensors file: an answer, and every tensor of a good one
// within the file, none touching another.

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "engine/checkpoint/safetensors.h"
#include "tests/fuzz.h"

TANDEM_FUZZ_TARGET(fuzz_safetensors)(const uint8_t* data, size_t size) {
  const auto tensors = tandem::engine::ParseSafetensors(
      "fuzz", {reinterpret_cast<const std::byte*>(data), size});
  if (!tensors.ok()) return 0;
  uint64_t end = 0;
  for (const auto& tensor : *tensors) {
    if (tensor.begin > tensor.end || tensor.end > size || tensor.begin < end) {
      abort();
    }
    end = tensor.end;
  }
  return 0;
}
