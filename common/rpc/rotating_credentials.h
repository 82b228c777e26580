// SPDX-License-Identifier: Apache-2.0
// A server's certificate that is replaced while it serves: connections that
// are made later see the new one, those open go on.
//
// gRPC's own way to this is a thread of its that looks into files every
// second. The files here are in memory and of this process: what it reads is
// always a pair that was checked, whatever state the operator's files are in.

#ifndef TANDEM_COMMON_RPC_ROTATING_CREDENTIALS_H_
#define TANDEM_COMMON_RPC_ROTATING_CREDENTIALS_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/rpc/credentials.h"

namespace tandem::rpc {

class RotatingCredentials {
 public:
  // `tls` has a certificate and its key; with an authority, clients must show
  // a certificate of it.
  static absl::StatusOr<std::unique_ptr<RotatingCredentials>> Create(
      const Credentials& tls);
  ~RotatingCredentials();
  RotatingCredentials(const RotatingCredentials&) = delete;
  RotatingCredentials& operator=(const RotatingCredentials&) = delete;

  // Within about a second. The pair must have been checked; whether there is
  // an authority stays as it was.
  absl::Status Replace(const Credentials& tls);

  const std::shared_ptr<grpc::ServerCredentials>& server_side() const {
    return server_side_;
  }

 private:
  RotatingCredentials() = default;

  int cert_ = -1, key_ = -1, ca_ = -1;  // memfd_create's
  std::shared_ptr<grpc::ServerCredentials> server_side_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_ROTATING_CREDENTIALS_H_
