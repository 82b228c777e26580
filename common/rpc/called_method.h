// SPDX-License-Identifier: Apache-2.0
// Which method of a linked service a call is of, for interceptors.

#ifndef TANDEM_COMMON_RPC_CALLED_METHOD_H_
#define TANDEM_COMMON_RPC_CALLED_METHOD_H_

#include <google/protobuf/descriptor.h>
#include <grpcpp/support/server_interceptor.h>

#include <string>

namespace tandem::rpc {

// Null of a method that no linked service has.
inline const google::protobuf::MethodDescriptor* CalledMethod(
    const grpc::experimental::ServerRpcInfo& info) {
  std::string name(info.method());  // "/pkg.Service/Method"
  const size_t slash = name.find('/', 1);
  if (name.empty() || name.front() != '/' || slash == std::string::npos) {
    return nullptr;
  }
  name[slash] = '.';
  return google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(
      name.substr(1));
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CALLED_METHOD_H_
