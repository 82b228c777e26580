// SPDX-License-Identifier: Apache-2.0
// The streams that the router's core holds, and how it opens those to
// workers. common/rpc is behind it in a process, a simulated network in tests.

#ifndef TANDEM_ROUTER_CORE_DIALER_H_
#define TANDEM_ROUTER_CORE_DIALER_H_

#include <memory>

#include "absl/time/time.h"
#include "common/stream.h"
#include "common/trace_context.h"
#include "tandem/v1/decode.pb.h"
#include "tandem/v1/generation.pb.h"
#include "tandem/v1/inference.pb.h"
#include "tandem/v1/prefill.pb.h"
#include "tandem/v1/registry.pb.h"

namespace tandem::router {

using DecodeStream = Stream<v1::DecodeRequest, v1::DecodeResponse>;
using PrefillStream = Stream<v1::PrefillRequest, v1::PrefillResponse>;
using RegistrationStream = Stream<v1::RegisterResponse, v1::RegisterRequest>;
// A client's Generate call, its request already read.
using ClientStream = Stream<v1::GenerateResponse, v1::GenerateRequest>;

class Dialer {
 public:
  virtual ~Dialer() = default;
  // Never null and never blocking: a worker that cannot be reached is an
  // OnClosed(UNAVAILABLE). `deadline` is the call's, from now; `trace` goes
  // with it, where there is one.
  virtual std::unique_ptr<DecodeStream> DialDecode(
      const v1::WorkerRef& worker, absl::Duration deadline,
      const TraceContext& trace) = 0;
  virtual std::unique_ptr<PrefillStream> DialPrefill(
      const v1::WorkerRef& worker, absl::Duration deadline,
      const TraceContext& trace) = 0;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_CORE_DIALER_H_
