// SPDX-License-Identifier: Apache-2.0
// A directory that is gone with the test.

#ifndef TANDEM_TESTS_ENGINE_TEMP_DIR_H_
#define TANDEM_TESTS_ENGINE_TEMP_DIR_H_

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace tandem::engine {

class TempDir {
 public:
  TempDir() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "tandem.XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string Write(std::string_view name, std::string_view content) const {
    const std::string file = path_ + "/" + std::string(name);
    std::ofstream(file, std::ios::binary)
        .write(content.data(), static_cast<std::streamsize>(content.size()));
    return file;
  }

 private:
  std::string path_;
};

}  // namespace tandem::engine

#endif  // TANDEM_TESTS_ENGINE_TEMP_DIR_H_
