// SPDX-License-Identifier: Apache-2.0
#ifndef TANDEM_COMMON_RPC_GRPC_PROCESS_H_
#define TANDEM_COMMON_RPC_GRPC_PROCESS_H_

namespace tandem::rpc {

// What gRPC is told once in a process. Idempotent; Server and MakeChannel call
// it.
// - Its own error lines go to our log, at most one a second, so that a
//   structured log stays one.
// - absl's mutexes, which it uses, look for no cycles of locks: Debian builds
//   absl with that check, which takes one lock of the whole process for each.
void PrepareGrpc();

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_GRPC_PROCESS_H_
