// SPDX-License-Identifier: Apache-2.0
#include "common/freed_buffers.h"

#include <malloc.h>

namespace tandem {

void KeepFreedBuffers() {
#ifdef __GLIBC__
  // Both, since one alone leaves the other where it is for good.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 64 << 20);
#endif
}

}  // namespace tandem
