// SPDX-License-Identifier: Apache-2.0
// Reads a small file of a model directory whole, with a limit on its size.

#ifndef TANDEM_TEXT_FILES_H_
#define TANDEM_TEXT_FILES_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace tandem::text {

// NOT_FOUND where there is no such file, INVALID_ARGUMENT where it is larger
// than `max_bytes`, a Git LFS pointer or no regular file; both name it.
absl::StatusOr<std::string> ReadModelFile(const std::string& path,
                                          size_t max_bytes);

// The same, but a file that does not exist is the empty string, and one that is
// empty is INVALID_ARGUMENT.
absl::StatusOr<std::string> ReadOptionalModelFile(const std::string& path,
                                                  size_t max_bytes);

}  // namespace tandem::text

#endif  // TANDEM_TEXT_FILES_H_
