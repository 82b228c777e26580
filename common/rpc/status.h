// SPDX-License-Identifier: Apache-2.0
// absl::Status inside, google.rpc.Status on the wire. Code, message and all
// google.rpc details (see common/error.h) survive both ways.

#ifndef TANDEM_COMMON_RPC_STATUS_H_
#define TANDEM_COMMON_RPC_STATUS_H_

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace tandem::rpc {

grpc::Status ToGrpc(const absl::Status& status);

// The status that ends a call. A failure's trailers repeat the caller's
// x-request-id. A RetryAfter also becomes the trailing metadata
// grpc-retry-pushback-ms, which gRPC clients with retries obey; it is doubled
// for each attempt that they made before (gRFC A6).
// Call it once per context, before Finish.
grpc::Status ToGrpc(const absl::Status& status,
                    grpc::CallbackServerContext* context);

// Where the peer gives no text, as gRPC itself does of an unknown method, it is
// the code's name.
absl::Status FromGrpc(const grpc::Status& status);

// Also reads a pushback from the trailers. The call must have ended.
absl::Status FromGrpc(const grpc::Status& status,
                      const grpc::ClientContext& context);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_STATUS_H_
