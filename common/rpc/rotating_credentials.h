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
#include <grpcpp/security/tls_certificate_provider.h>

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

  // For one server each.
  std::shared_ptr<grpc::ServerCredentials> MakeServerSide() const;
  // Whether clients must show a certificate.
  bool mutual() const { return ca_ >= 0; }

 private:
  RotatingCredentials() = default;

  int cert_ = -1, key_ = -1, ca_ = -1;  // memfd_create's
  // Reads the files on a thread of its own; ends with its last server.
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_ROTATING_CREDENTIALS_H_
