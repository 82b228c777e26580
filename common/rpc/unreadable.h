// SPDX-License-Identifier: Apache-2.0
// What a call comes to whose message cannot be read. gRPC ends it before any
// handler sees it, with UNIMPLEMENTED and no word; here it is INVALID_ARGUMENT,
// FIELD_INVALID, which says so. Of calls with one message from the client: of
// streams gRPC does not tell such a message from the stream's end.

#ifndef TANDEM_COMMON_RPC_UNREADABLE_H_
#define TANDEM_COMMON_RPC_UNREADABLE_H_

#include <grpcpp/support/server_interceptor.h>

#include <memory>

namespace tandem::rpc {

// Before those of metrics, which then see what clients see.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>
NewUnreadableInterceptors();

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_UNREADABLE_H_
