// SPDX-License-Identifier: Apache-2.0
#include "common/rpc/rotating_credentials.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace tandem::rpc {
namespace {

constexpr unsigned kRefreshSeconds = 1;

absl::Status Write(int file, const std::string& text) {
  if (ftruncate(file, 0) == 0 && pwrite(file, text.data(), text.size(), 0) ==
                                     static_cast<ssize_t>(text.size())) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat(
      "cannot keep a certificate in memory: ", std::strerror(errno)));
}

std::string PathOf(int file) {
  return file < 0 ? "" : absl::StrCat("/proc/self/fd/", file);
}

}  // namespace

absl::StatusOr<std::unique_ptr<RotatingCredentials>>
RotatingCredentials::Create(const Credentials& tls) {
  std::unique_ptr<RotatingCredentials> made(new RotatingCredentials());
  made->cert_ = memfd_create("certificate", MFD_CLOEXEC);
  made->key_ = memfd_create("key", MFD_CLOEXEC);
  if (!tls.ca.empty()) made->ca_ = memfd_create("authority", MFD_CLOEXEC);
  const absl::Status status = made->Replace(tls);
  if (!status.ok()) return status;
  made->provider_ =
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          PathOf(made->key_), PathOf(made->cert_), PathOf(made->ca_),
          kRefreshSeconds);
  return made;
}

std::shared_ptr<grpc::ServerCredentials> RotatingCredentials::MakeServerSide()
    const {
  grpc::experimental::TlsServerCredentialsOptions options(provider_);
  options.watch_identity_key_cert_pairs();
  if (mutual()) {
    options.watch_root_certs();
    options.set_cert_request_type(
        GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  } else {
    options.set_cert_request_type(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

RotatingCredentials::~RotatingCredentials() {
  provider_.reset();
  for (const int file : {cert_, key_, ca_}) {
    if (file >= 0) close(file);
  }
}

absl::Status RotatingCredentials::Replace(const Credentials& tls) {
  absl::Status status = Write(key_, tls.key);
  if (status.ok()) status = Write(cert_, tls.cert);
  if (status.ok() && ca_ >= 0) status = Write(ca_, tls.ca);
  return status;
}

}  // namespace tandem::rpc
