// SPDX-License-Identifier: Apache-2.0
// A small file as a whole. A stream's iterators would do, but throw where a
// read fails: of a directory, or of a file on a disk that is gone.

#ifndef TANDEM_COMMON_READ_FILE_H_
#define TANDEM_COMMON_READ_FILE_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace tandem {

inline constexpr size_t kMaxFileBytes = size_t{1} << 30;

// What `path` holds; else "cannot read PATH: why", of errno's code, or
// INVALID_ARGUMENT where there are over `most` bytes.
absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     size_t most = kMaxFileBytes);

}  // namespace tandem

#endif  // TANDEM_COMMON_READ_FILE_H_
