// SPDX-License-Identifier: Apache-2.0
// How much memory this process holds, and how much it may. A library's memory
// that a flood took and that is never given back (gRPC 1.51's, for streams that
// are reset at once) is no leak that a test finds, and nothing but a new
// process is rid of it: better one that drains first than one that the kernel
// kills.

#ifndef TANDEM_COMMON_MEMORY_LIMIT_H_
#define TANDEM_COMMON_MEMORY_LIMIT_H_

#include <cstdint>
#include <string>

namespace tandem {

// Bytes that are resident and nobody else's; 0 where /proc does not tell.
int64_t OwnMemory();

// The smallest limit, in bytes, of the control groups (version 1 or 2) that
// this process is in; 0: none. `root` is where /proc and /sys are.
int64_t ControlGroupMemoryLimit(const std::string& root = "");

// What this process can hold at most: that, or the machine's memory.
int64_t MemoryLimit();

// Memory that a new process may take on this machine: what the kernel says is
// available, or less where a control group that this process is in sets a
// limit, of which whatever is in the group has taken its part. Cached pages of
// files do not count as used. 0: not known; 1 at least where it is.
int64_t AvailableMemory(const std::string& root = "");

}  // namespace tandem

#endif  // TANDEM_COMMON_MEMORY_LIMIT_H_
