// SPDX-License-Identifier: Apache-2.0
// Way "shm": both workers on one host. The receiver has one sealed arena of
// slabs per peer; the sender gathers straight into it, so a slice is copied
// twice in all, out of the sender's blocks and into the receiver's.
//
// The arena's descriptor changes hands on an abstract Unix socket whose name
// is random per receiver incarnation:
//
//   sender connects
//   receiver opens a pidfd of the peer, then sends a nonce (16 bytes)
//   sender sends the link's secret from the welcome (32 bytes), and the nonce
//   receiver sends one byte with the descriptor
//   ...
//   sender unmaps and sends 'R': no store of it is outstanding
//
// The nonce comes back only from the process that the pidfd means, so a
// recycled pid cannot stand in for it. After a link is lost its granted slabs
// are quiet when 'R' came or the peer has exited. A socket that merely closed
// proves nothing: a stopped process may still be about to store.

#ifndef TANDEM_HANDOFF_SHM_SHM_WAY_H_
#define TANDEM_HANDOFF_SHM_SHM_WAY_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "common/random.h"
#include "handoff/host_memory.h"
#include "handoff/way.h"

namespace tandem::handoff {

// Each has one thread, for its sockets. Destroyed on `loop`, after the sender
// or receiver that it was given to ended its channels. `memory` may be null.
std::unique_ptr<SenderWay> NewShmSenderWay(Loop* loop,
                                           HostMemory* memory = nullptr);
// An error says why this process cannot share memory.
absl::StatusOr<std::unique_ptr<ReceiverWay>> NewShmReceiverWay(
    Loop* loop, Random* random, HostMemory* memory = nullptr);

// The sender's half of the exchange above; blocks for up to `timeout`.
absl::StatusOr<std::unique_ptr<SenderChannel>> ConnectShm(
    const v1::LinkWelcome& welcome, absl::Duration timeout,
    HostMemory* memory = nullptr);

namespace shm {

inline constexpr int kNonceBytes = 16;
inline constexpr int kSecretBytes = 32;
inline constexpr char kDescriptor = 'D';
inline constexpr char kReleased = 'R';

}  // namespace shm
}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_SHM_SHM_WAY_H_
