// SPDX-License-Identifier: Apache-2.0
// What a server's calls come to, under the names of go-grpc-prometheus, which
// boards for gRPC read: grpc_server_started_total, grpc_server_handled_total by
// code, and grpc_server_handling_seconds, by type, service and method.

#ifndef TANDEM_COMMON_RPC_CALL_METRICS_H_
#define TANDEM_COMMON_RPC_CALL_METRICS_H_

#include <grpcpp/support/server_interceptor.h>

#include <memory>
#include <string>

#include "common/metrics.h"

namespace tandem::rpc {

// Thread-safe. One for all servers of a process, which it outlives.
class CallMetrics {
 public:
  // `metrics` outlives this. For start-up.
  explicit CallMetrics(Metrics* metrics);

  // For one server. Not counted are calls of methods that this program does
  // not know, whose names are the callers', and messages beyond the limit,
  // which gRPC refuses before anybody hears of them.
  std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>
  NewInterceptors();

 private:
  class Interceptor;
  class Interceptors;

  CounterSet& started_;
  CounterSet& handled_;
  HistogramSet& seconds_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CALL_METRICS_H_
