// SPDX-License-Identifier: Apache-2.0
// The way that always works: the bytes travel in the Slice messages of the
// link itself. The received message is the slab's memory, so no peer ever
// writes into memory of ours and a lost link is quiet at once. A device that
// cannot reach messages reads a copy of the payload in memory that it can.

#ifndef TANDEM_HANDOFF_GRPC_GRPC_WAY_H_
#define TANDEM_HANDOFF_GRPC_GRPC_WAY_H_

#include <memory>

#include "handoff/host_memory.h"
#include "handoff/way.h"

namespace tandem::handoff {

std::unique_ptr<SenderWay> NewGrpcSenderWay();
// `memory` may be null, else outlives it.
std::unique_ptr<ReceiverWay> NewGrpcReceiverWay(HostMemory* memory,
                                                int64_t slab_bytes);

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_GRPC_GRPC_WAY_H_
