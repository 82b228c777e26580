// SPDX-License-Identifier: Apache-2.0
// What the router's gRPC services do alike: whose call it is, what came with
// it, answers without a stream, and aborts.

#ifndef TANDEM_ROUTER_GRPC_GRPC_CALLS_H_
#define TANDEM_ROUTER_GRPC_GRPC_CALLS_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/rpc/server_stream.h"
#include "common/rpc/status.h"
#include "router/core/core.h"
#include "router/intake/charged_stream.h"
#include "router/intake/intake.h"
#include "router/intake/structured_gate.h"
#include "router/validate/errors.h"

namespace tandem::router {

// The tenant whose key the call brings; every method for clients asks first.
// Refusals are counted.
inline absl::StatusOr<std::string> Caller(
    const Intake& intake, Api api, const grpc::CallbackServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("authorization");
  absl::StatusOr<std::string> caller = intake.access().Authenticate(
      found == metadata.end()
          ? std::string_view()
          : std::string_view(found->second.data(), found->second.size()));
  if (!caller.ok()) intake.CountRefused(api, caller.status());
  return caller;
}

// Of `info` and `tenant`, which outlive it.
inline CallHeaders Headers(const rpc::CallInfo& info,
                           const std::string& tenant) {
  return {.request_id = info.Find("x-request-id"),
          .traceparent = info.Find("traceparent"),
          .tracestate = info.Find("tracestate"),
          .tenant = tenant};
}

inline grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context,
                                        const absl::Status& status) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(rpc::ToGrpc(status, context));
  return reactor;
}

// Refuses a call that will never reach the core.
template <typename Response>
class RefusedStream final : public grpc::ServerWriteReactor<Response> {
 public:
  explicit RefusedStream(const grpc::Status& status) { this->Finish(status); }
  void OnDone() override { delete this; }
};

// Runs on the loop what a default reactor waits for. A reactor must be
// finished even where a stopped loop drops the task.
class LoopAnswer {
 public:
  explicit LoopAnswer(grpc::CallbackServerContext* context)
      : context_(context), reactor_(context->DefaultReactor()) {}
  LoopAnswer(LoopAnswer&& other) noexcept
      : context_(other.context_),
        reactor_(std::exchange(other.reactor_, nullptr)) {}
  LoopAnswer& operator=(LoopAnswer&&) = delete;
  ~LoopAnswer() {
    if (reactor_ != nullptr) Finish(Draining());
  }
  void Finish(const absl::Status& status) {
    std::exchange(reactor_, nullptr)->Finish(rpc::ToGrpc(status, context_));
  }
  grpc::ServerUnaryReactor* reactor() const { return reactor_; }

 private:
  grpc::CallbackServerContext* const context_;
  grpc::ServerUnaryReactor* reactor_;
};

// `stream` is its client's; settles the charge.
inline void EnterGate(Loop* loop, StructuredGate* gate,
                      AdmittedRequest admitted,
                      std::unique_ptr<ClientStream> stream) {
  stream = Charged(std::move(stream), admitted.charge);
  loop->Post([gate, admitted = std::move(admitted),
              stream = std::move(stream)]() mutable {
    gate->Enter(std::move(admitted), std::move(stream));
  });
}

// Wherever the request is: waiting for what it must match, or with the core.
// As RouterCore's; on the loop.
inline absl::StatusOr<int> AbortRequest(
    RouterCore* core, StructuredGate* gate, const std::string& id,
    const std::optional<std::string>& tenant = std::nullopt) {
  const int waited = gate->Abort(id, tenant);
  const absl::StatusOr<int> tokens = core->Abort(id, tenant);
  return waited > 0 && !tokens.ok() ? 0 : tokens;
}
inline int AbortAllRequests(RouterCore* core, StructuredGate* gate,
                            const std::string& tenant) {
  const int waited = gate->AbortAll(tenant);
  return waited + core->AbortAll(tenant);
}

// Where log probabilities of the prompt come in one message. Clients take
// 4 MiB unless told otherwise, and a record has some 30 bytes.
inline absl::Status FitsOneMessage(const AdmittedRequest& admitted) {
  constexpr int64_t kMaxRecords = 65536;
  const v1::OutputOptions& output = admitted.effective.output;
  if (!output.has_prompt_logprobs()) return absl::OkStatus();
  const auto tokens = static_cast<int64_t>(admitted.prompt.size());
  if (tokens * (output.prompt_logprobs() + 1) <= kMaxRecords) {
    return absl::OkStatus();
  }
  return FieldInvalid(
      "output.prompt_logprobs", absl::StrCat(output.prompt_logprobs()),
      absl::StrCat("of a prompt of ", tokens,
                   " tokens is too much for one message: tandem.v1's Generate "
                   "streams it"));
}

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_GRPC_GRPC_CALLS_H_
