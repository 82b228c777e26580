// SPDX-License-Identifier: Apache-2.0
// Safetensors files of a test's own tensors, whatever they say.

#ifndef TANDEM_TESTS_ENGINE_CHECKPOINT_SAFETENSORS_FILE_H_
#define TANDEM_TESTS_ENGINE_CHECKPOINT_SAFETENSORS_FILE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace tandem::engine {

struct FileTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using FileTensors = std::map<std::string, FileTensor>;  // by name

inline std::string Zeros(size_t bytes) { return std::string(bytes, '\0'); }

// The bytes of numbers as they lie in memory.
template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()),
          values.size() * sizeof(T)};
}

inline std::string SafetensorsFile(const FileTensors& tensors) {
  nlohmann::json header;
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {
        {"dtype", tensor.dtype},
        {"shape", tensor.shape},
        {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data += tensor.bytes;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  return BytesOf(std::vector<uint64_t>{text.size()}) + text + data;
}

}  // namespace tandem::engine

#endif  // TANDEM_TESTS_ENGINE_CHECKPOINT_SAFETENSORS_FILE_H_
