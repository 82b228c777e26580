// SPDX-License-Identifier: Apache-2.0
#ifndef TANDEM_COMMON_FREED_BUFFERS_H_
#define TANDEM_COMMON_FREED_BUFFERS_H_

namespace tandem {

// glibc gives each freed buffer of a message back to the kernel, and the next
// one's pages are touched, and cleared, anew: of a handoff by gRPC that is half
// of the time. From here on up to 64 MiB of them stay with the process (per
// arena of malloc), and what is above 32 MiB goes back as before. For start-up,
// of processes that move large messages; elsewhere than with glibc it does
// nothing.
void KeepFreedBuffers();

}  // namespace tandem

#endif  // TANDEM_COMMON_FREED_BUFFERS_H_
