// SPDX-License-Identifier: Apache-2.0
#include "text/files.h"

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/lfs_pointer.h"

namespace tandem::text {

absl::StatusOr<std::string> ReadModelFile(const std::string& path,
                                          size_t max_bytes) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) {
    const auto folder = std::filesystem::path(path).parent_path();
    if (!folder.empty() && !std::filesystem::exists(folder, error)) {
      return absl::NotFoundError(
          absl::StrCat(folder.string(), ": no such directory"));
    }
    return absl::NotFoundError(absl::StrCat(path, ": no such file"));
  }
  if (status.type() != std::filesystem::file_type::regular) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": not a regular file"));
  }
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(
      std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) {
    return absl::PermissionDeniedError(absl::StrCat(path, ": cannot be read"));
  }
  // Sized by what is read, not by what the directory says: files grow.
  std::string bytes;
  char chunk[1 << 16];
  size_t read = 0;
  while ((read = std::fread(chunk, 1, sizeof(chunk), file.get())) > 0) {
    if (bytes.size() + read > max_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": larger than ", max_bytes, " bytes, the limit for it"));
    }
    bytes.append(chunk, read);
  }
  if (std::ferror(file.get())) {
    return absl::UnavailableError(absl::StrCat(path, ": reading failed"));
  }
  if (IsLfsPointer(bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", kIsLfsPointer));
  }
  return bytes;
}

absl::StatusOr<std::string> ReadOptionalModelFile(const std::string& path,
                                                  size_t max_bytes) {
  auto bytes = ReadModelFile(path, max_bytes);
  if (absl::IsNotFound(bytes.status())) return std::string();
  if (bytes.ok() && bytes->empty()) {  // cut short: it is not the same as none
    return absl::InvalidArgumentError(absl::StrCat(path, ": is empty"));
  }
  return bytes;
}

}  // namespace tandem::text
