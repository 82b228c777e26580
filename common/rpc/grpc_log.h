// SPDX-License-Identifier: Apache-2.0
#ifndef TANDEM_COMMON_RPC_GRPC_LOG_H_
#define TANDEM_COMMON_RPC_GRPC_LOG_H_

namespace tandem::rpc {

// gRPC's own error lines go to our log, at most one a second, so that a
// structured log stays one. Idempotent; Server and MakeChannel call it.
void RouteGrpcLogs();

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_GRPC_LOG_H_
