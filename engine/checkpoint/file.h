// SPDX-License-Identifier: Apache-2.0
// Files of a model directory, read with suspicion: only regular files (a
// FIFO would block for ever, a device has no length), never more than a
// stated number of bytes. Symbolic links are followed, since model caches
// are made of them.

#ifndef TANDEM_ENGINE_CHECKPOINT_FILE_H_
#define TANDEM_ENGINE_CHECKPOINT_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem::engine {

// A read-only mapping of a whole file, gone with its owner. A file that is
// cut short while it is mapped kills the process with SIGBUS on the next
// touch: checkpoints are replaced by renaming, never written in place.
class MappedFile {
 public:
  static absl::StatusOr<MappedFile> Open(const std::string& path);
  // The same of a copy in memory, for files that may be written at any time:
  // what they hold later shows nowhere. INVALID_ARGUMENT if that is more than
  // `max_bytes`, or changes its length meanwhile.
  static absl::StatusOr<MappedFile> Copy(const std::string& path,
                                         uint64_t max_bytes);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const std::string& path() const { return path_; }
  const std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  MappedFile(std::string path, std::byte* data, uint64_t size)
      : path_(std::move(path)), data_(data), size_(size) {}

  std::string path_;
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

// The whole file; INVALID_ARGUMENT beyond `max_bytes`, or of a Git LFS pointer.
absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     uint64_t max_bytes);

bool FileExists(const std::string& path);

// For error messages: names that came from a file, quoted, escaped, and cut
// to a length that a person can read.
std::string Quote(std::string_view name);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_CHECKPOINT_FILE_H_
