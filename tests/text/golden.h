// SPDX-License-Identifier: Apache-2.0
// Golden files of tests/golden/text, made by tools/oracle/text_golden.py, and
// the tokenizers that they are about.

#ifndef TANDEM_TESTS_TEXT_GOLDEN_H_
#define TANDEM_TESTS_TEXT_GOLDEN_H_

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "text/tokenizer.h"

namespace tandem::text {

inline std::string ReadWhole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::string GoldenPath(const std::string& name) {
  return std::string(TANDEM_SOURCE_DIR) + "/tests/golden/text/" + name;
}

inline nlohmann::json ReadGolden(const std::string& name) {
  return nlohmann::json::parse(ReadWhole(GoldenPath(name)));
}

// Kinds whose tokenizer is committed beside its goldens.
inline const std::vector<std::string>& CommittedKinds() {
  static const std::vector<std::string> kinds = {
      "gpt2",    "llama3", "qwen2",   "o200k",    "llama2",
      "mistral", "gemma",  "unigram", "wordpiece"};
  return kinds;
}

// The tokenizer.json of a kind; empty where this machine has none.
inline std::string TokenizerPath(const std::string& kind) {
  if (kind == "stories260K") {
    const char* data = std::getenv("TANDEM_TEST_DATA");
    if (data == nullptr) return "";
    return std::string(data) + "/models/stories260K/tokenizer.json";
  }
  if (kind == "tales") {
    const std::string path =
        std::string(TANDEM_SOURCE_DIR) + "/models/tales/tokenizer.json";
    return std::filesystem::exists(path) ? path : "";
  }
  return GoldenPath(kind + ".json");
}

inline Tokenizer TokenizerOf(const std::string& kind) {
  return Tokenizer::FromJson(ReadWhole(TokenizerPath(kind))).value();
}

// A model directory of the test's own, removed with it.
class ModelDir {
 public:
  ModelDir() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "tandem-text-XXXXXX")
            .string();
    path_ = ::mkdtemp(pattern.data());
  }
  ModelDir(const ModelDir&) = delete;
  ModelDir& operator=(const ModelDir&) = delete;
  ~ModelDir() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }

  void Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ + "/" + name, std::ios::binary) << bytes;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace tandem::text

#endif  // TANDEM_TESTS_TEXT_GOLDEN_H_
