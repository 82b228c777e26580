// SPDX-License-Identifier: Apache-2.0
// What Git leaves in place of a large file that Git LFS has not fetched: a text
// of three lines. Models are cloned that way, and no parser says what is wrong.

#ifndef TANDEM_COMMON_LFS_POINTER_H_
#define TANDEM_COMMON_LFS_POINTER_H_

#include <string_view>

namespace tandem {

inline bool IsLfsPointer(std::string_view content) {
  return content.starts_with("version https://git-lfs");
}

inline constexpr char kIsLfsPointer[] =
    "is a Git LFS pointer, not the file itself: run `git lfs pull`";

}  // namespace tandem

#endif  // TANDEM_COMMON_LFS_POINTER_H_
