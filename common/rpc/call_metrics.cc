// SPDX-License-Identifier: Apache-2.0
#include "common/rpc/call_metrics.h"

#include <google/protobuf/descriptor.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/rpc/called_method.h"

namespace tandem::rpc {
namespace {

using google::protobuf::MethodDescriptor;
using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::ServerRpcInfo;

// Of one process: some 40 methods, of which few end in more than three codes.
constexpr size_t kMaxMethods = 64;
constexpr size_t kMaxOutcomes = 256;

// Streams last as long as an answer.
const Buckets kHandlingBuckets = {.005, .01, .025, .05, .1, .25, .5,  1,
                                  2.5,  5,   10,   30,  60, 120, 300, 600};

// As Go spells them.
constexpr std::array<const char*, 17> kCodes = {"OK",
                                                "Canceled",
                                                "Unknown",
                                                "InvalidArgument",
                                                "DeadlineExceeded",
                                                "NotFound",
                                                "AlreadyExists",
                                                "PermissionDenied",
                                                "ResourceExhausted",
                                                "FailedPrecondition",
                                                "Aborted",
                                                "OutOfRange",
                                                "Unimplemented",
                                                "Internal",
                                                "Unavailable",
                                                "DataLoss",
                                                "Unauthenticated"};

const char* CodeName(grpc::StatusCode code) {
  const auto index = static_cast<size_t>(code);
  return index < kCodes.size() ? kCodes[index] : "Unknown";
}

const char* TypeName(ServerRpcInfo::Type type) {
  switch (type) {
    case ServerRpcInfo::Type::UNARY:
      return "unary";
    case ServerRpcInfo::Type::CLIENT_STREAMING:
      return "client_stream";
    case ServerRpcInfo::Type::SERVER_STREAMING:
      return "server_stream";
    case ServerRpcInfo::Type::BIDI_STREAMING:
      return "bidi_stream";
  }
  return "unknown";
}

// A set's value: "unary pkg.Service Method", with a code behind it where that
// is a label.
Labels LabelsOfValue(const std::string& value) {
  const std::vector<std::string> parts = absl::StrSplit(value, ' ');
  if (parts.size() < 3) {
    return {
        {"grpc_type", value}, {"grpc_service", value}, {"grpc_method", value}};
  }
  Labels labels = {{"grpc_type", parts[0]},
                   {"grpc_service", parts[1]},
                   {"grpc_method", parts[2]}};
  if (parts.size() > 3) labels["grpc_code"] = parts[3];
  return labels;
}

Labels LabelsOfOutcome(const std::string& value) {
  Labels labels = LabelsOfValue(value);
  labels.emplace("grpc_code", value);
  return labels;
}

}  // namespace

// One call; gRPC frees it behind the call's end.
class CallMetrics::Interceptor final : public grpc::experimental::Interceptor {
 public:
  Interceptor(CallMetrics* metrics, ServerRpcInfo* info,
              const MethodDescriptor& method)
      : metrics_(metrics),
        info_(info),
        one_message_(!method.client_streaming()),
        value_(absl::StrCat(TypeName(info->type()), " ",
                            method.service()->full_name(), " ",
                            method.name())) {
    metrics_->started_[value_].Add();
  }
  // Of a call whose peer has gone there may be nobody to send a status to.
  ~Interceptor() override { End(grpc::StatusCode::CANCELLED); }

  void Intercept(grpc::experimental::InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(
            InterceptionHookPoints::POST_RECV_MESSAGE)) {
      no_message_ = one_message_ && batch->GetRecvMessage() == nullptr;
    }
    if (batch->QueryInterceptionHookPoint(
            InterceptionHookPoints::PRE_SEND_STATUS)) {
      const grpc::StatusCode code = batch->GetSendStatus().error_code();
      // A client that took the call back before its message came leaves as
      // little as one whose message cannot be read; the call's end tells.
      if (no_message_) {
        refusal_ = code;
      } else {
        End(code);
      }
    }
    if (batch->QueryInterceptionHookPoint(
            InterceptionHookPoints::POST_RECV_CLOSE) &&
        no_message_) {
      End(info_->server_context()->IsCancelled() ? grpc::StatusCode::CANCELLED
                                                 : refusal_.load());
    }
    batch->Proceed();
  }

 private:
  void End(grpc::StatusCode code) {
    if (ended_.exchange(true)) return;
    metrics_->handled_[absl::StrCat(value_, " ", CodeName(code))].Add();
    metrics_->seconds_[value_].Observe(
        absl::ToDoubleSeconds(absl::Now() - begun_));
  }

  CallMetrics* const metrics_;
  ServerRpcInfo* const info_;
  const bool one_message_;
  const std::string value_;
  const absl::Time begun_ = absl::Now();
  // A call's status and its end may be told at a time.
  std::atomic<bool> no_message_ = false;
  std::atomic<bool> ended_ = false;
  std::atomic<grpc::StatusCode> refusal_ = grpc::StatusCode::CANCELLED;
};

class CallMetrics::Interceptors final
    : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Interceptors(CallMetrics* metrics) : metrics_(metrics) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      ServerRpcInfo* info) override {
    const MethodDescriptor* const method = CalledMethod(*info);
    return method == nullptr ? nullptr
                             : new Interceptor(metrics_, info, *method);
  }

 private:
  CallMetrics* const metrics_;
};

CallMetrics::CallMetrics(Metrics* metrics)
    : started_(metrics->AddCounters("grpc_server_started_total",
                                    "Calls that began", LabelsOfValue,
                                    kMaxMethods)),
      handled_(metrics->AddCounters("grpc_server_handled_total",
                                    "Calls that ended, by code",
                                    LabelsOfOutcome, kMaxOutcomes)),
      seconds_(metrics->AddHistograms("grpc_server_handling_seconds",
                                      "From a call's beginning to its status",
                                      kHandlingBuckets, LabelsOfValue,
                                      kMaxMethods)) {}

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>
CallMetrics::NewInterceptors() {
  return std::make_unique<Interceptors>(this);
}

}  // namespace tandem::rpc
