// SPDX-License-Identifier: Apache-2.0
// Way "nccl": GPU to GPU. The sender gathers into a buffer of its own and says
// in the Slice message which operation of the pair's communicator will carry
// it; the receiver posts a receive at its turn, says go, and lands what came
// (pair.h has the flow). So the bytes cross once, from GPU to GPU, and a
// slice that fits no live grant is refused before a receive is posted for it.
//
// A link is ready at once, by its other ways: the communicator is made in the
// background, and attempts use it while it is up. When it breaks, its attempts
// fail naming the way, the next ones take another, and it is made anew.

#ifndef TANDEM_HANDOFF_NCCL_NCCL_WAY_H_
#define TANDEM_HANDOFF_NCCL_NCCL_WAY_H_

#include <memory>

#include "handoff/nccl/station.h"
#include "handoff/way.h"

namespace tandem::handoff {

// `station` outlives the ways, and the sender or receiver they are given to.
std::unique_ptr<SenderWay> NewNcclSenderWay(nccl::Station* station);
std::unique_ptr<ReceiverWay> NewNcclReceiverWay(nccl::Station* station);

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_NCCL_NCCL_WAY_H_
