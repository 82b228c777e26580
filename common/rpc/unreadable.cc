// SPDX-License-Identifier: Apache-2.0
#include "common/rpc/unreadable.h"

#include <google/protobuf/descriptor.h>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/rpc/called_method.h"
#include "common/rpc/status.h"

namespace tandem::rpc {
namespace {

using google::protobuf::MethodDescriptor;
using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::ServerRpcInfo;

// One call; gRPC frees it behind the call's end.
class Unreadable final : public grpc::experimental::Interceptor {
 public:
  Unreadable(ServerRpcInfo* info, const MethodDescriptor* method)
      : info_(info), method_(method) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(
            InterceptionHookPoints::POST_RECV_MESSAGE)) {
      unreadable_ = batch->GetRecvMessage() == nullptr;
    }
    if (unreadable_ && batch->QueryInterceptionHookPoint(
                           InterceptionHookPoints::PRE_SEND_STATUS)) {
      batch->ModifySendStatus(ToGrpc(Status()));
    }
    batch->Proceed();
  }

 private:
  absl::Status Status() const {
    // Nor is there a message where the client has gone before it came.
    if (info_->server_context()->IsCancelled()) {
      return absl::CancelledError("the client has gone");
    }
    return MakeError(
        absl::StatusCode::kInvalidArgument, "FIELD_INVALID",
        absl::StrCat("what came is no message ",
                     method_->input_type()->full_name(),
                     ", or a text in it is not UTF-8, or it nests too deep"));
  }

  ServerRpcInfo* const info_;
  const MethodDescriptor* const method_;
  bool unreadable_ = false;
};

class Interceptors final
    : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  grpc::experimental::Interceptor* CreateServerInterceptor(
      ServerRpcInfo* info) override {
    const MethodDescriptor* const method = CalledMethod(*info);
    return method == nullptr || method->client_streaming()
               ? nullptr
               : new Unreadable(info, method);
  }
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>
NewUnreadableInterceptors() {
  return std::make_unique<Interceptors>();
}

}  // namespace tandem::rpc
