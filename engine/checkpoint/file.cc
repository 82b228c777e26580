// SPDX-License-Identifier: Apache-2.0
#include "engine/checkpoint/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/failpoint.h"
#include "common/lfs_pointer.h"
#include "common/utf8.h"

namespace tandem::engine {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

absl::Status SystemError(const std::string& path, std::string_view what) {
  const int error = errno;
  const std::string message =
      absl::StrCat(path, ": ", std::string(what), ": ", strerror(error));
  return error == ENOENT || error == ENOTDIR ? absl::NotFoundError(message)
         : error == EACCES ? absl::PermissionDeniedError(message)
                           : absl::InvalidArgumentError(message);
}

// The size of an open regular file.
absl::StatusOr<uint64_t> RegularSize(const std::string& path, int fd) {
  if (fd < 0) return SystemError(path, "cannot open");
  struct stat info;
  if (fstat(fd, &info) != 0) return SystemError(path, "cannot stat");
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": not a regular file"));
  }
  return static_cast<uint64_t>(info.st_size);
}

absl::Status TooLarge(const std::string& path, uint64_t size,
                      uint64_t max_bytes) {
  return absl::InvalidArgumentError(absl::StrCat(
      path, ": ", size, " bytes; at most ", max_bytes, " are read"));
}

// O_NONBLOCK: opening a FIFO returns at once, and is then refused.
int OpenForReading(const std::string& path) {
  return open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
}

}  // namespace

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path) {
  if (TANDEM_FAILPOINT("load.open", "crash fail stall")) {
    return failpoint::Error();
  }
  const Descriptor file(OpenForReading(path));
  const absl::StatusOr<uint64_t> size = RegularSize(path, file.get());
  if (!size.ok()) return size.status();
  if (*size == 0) return MappedFile(path, nullptr, 0);
  void* data = mmap(nullptr, *size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) return SystemError(path, "cannot map");
  return MappedFile(path, static_cast<std::byte*>(data), *size);
}

absl::StatusOr<MappedFile> MappedFile::Copy(const std::string& path,
                                            uint64_t max_bytes) {
  const Descriptor file(OpenForReading(path));
  const absl::StatusOr<uint64_t> size = RegularSize(path, file.get());
  if (!size.ok()) return size.status();
  if (*size > max_bytes) return TooLarge(path, *size, max_bytes);
  if (*size == 0) return MappedFile(path, nullptr, 0);
  void* data = mmap(nullptr, *size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return SystemError(path, "no memory for it");
  MappedFile copy(path, static_cast<std::byte*>(data), *size);
  for (uint64_t at = 0; at < *size;) {
    const ssize_t n =
        pread(file.get(), copy.data_ + at, *size - at, static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return SystemError(path, "cannot read");
    if (n == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": was cut short while it was read"));
    }
    at += static_cast<uint64_t>(n);
  }
  return copy;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     uint64_t max_bytes) {
  const Descriptor file(OpenForReading(path));
  const absl::StatusOr<uint64_t> size = RegularSize(path, file.get());
  if (!size.ok()) return size.status();
  if (*size > max_bytes) return TooLarge(path, *size, max_bytes);
  std::string content(*size, '\0');
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t got =
        read(file.get(), content.data() + done, content.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemError(path, "cannot read");
    if (got == 0) break;  // it shrank meanwhile
    done += static_cast<size_t>(got);
  }
  content.resize(done);
  if (IsLfsPointer(content)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", kIsLfsPointer));
  }
  return content;
}

bool FileExists(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0;
}

std::string Quote(std::string_view name) {
  constexpr size_t kShown = 120;
  std::string quoted = "\"";
  for (std::string_view rest = Utf8Head(name, kShown); !rest.empty();) {
    const size_t length = Utf8Length(rest);
    const absl::string_view first(rest.data(), std::max<size_t>(length, 1));
    quoted +=
        length == 0 ? absl::CHexEscape(first) : absl::Utf8SafeCHexEscape(first);
    rest.remove_prefix(first.size());
  }
  quoted += '"';
  if (name.size() > kShown) {
    absl::StrAppend(&quoted, " (", name.size(), " bytes)");
  }
  return quoted;
}

}  // namespace tandem::engine
