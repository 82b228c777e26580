// SPDX-License-Identifier: Apache-2.0
#include "common/rpc/credentials.h"

#include <arpa/inet.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_certificate_verifier.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/lifecycle.h"
#include "common/log.h"
#include "common/read_file.h"
#include "common/rpc/certificate.h"

namespace tandem::rpc {
namespace {

absl::StatusOr<std::string> ReadPem(std::string_view flag,
                                    const std::string& path,
                                    std::string_view marker) {
  if (path.empty()) return std::string();
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "TLS_FILE",
        absl::StrCat(std::string(flag), ": ", text.status().message()));
  }
  if (text->find(marker) == std::string::npos) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "TLS_FILE",
        absl::StrCat(std::string(flag), ": ", path, " holds no PEM block '",
                     std::string(marker), "'"));
  }
  return text;
}

using Certificate = std::unique_ptr<X509, void (*)(X509*)>;

// The first of `pem`; null: it has none that can be read.
Certificate ReadCertificate(const std::string& pem) {
  const std::unique_ptr<BIO, int (*)(BIO*)> text(
      BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free);
  return {PEM_read_bio_X509(text.get(), nullptr, nullptr, nullptr), X509_free};
}

std::vector<Certificate> ReadCertificates(const std::string& pem) {
  const std::unique_ptr<BIO, int (*)(BIO*)> text(
      BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free);
  std::vector<Certificate> all;
  while (X509* const next =
             PEM_read_bio_X509(text.get(), nullptr, nullptr, nullptr)) {
    all.emplace_back(next, X509_free);
  }
  return all;
}

absl::Time TimeOf(const ASN1_TIME* time) {
  tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InfinitePast();
  return absl::FromTM(parts, absl::UTCTimeZone());
}

// gRPC takes anything, and fails each handshake with it.
absl::Status CheckUsable(const Credentials& tls, const PemFlags& flags) {
  const auto unusable = [](const std::string& what) {
    return MakeError(absl::StatusCode::kInvalidArgument, "TLS_FILE", what);
  };
  if (!tls.ca.empty() && ReadCertificate(tls.ca) == nullptr) {
    return unusable(absl::StrCat(flags.ca, " holds no certificate"));
  }
  if (tls.cert.empty()) return absl::OkStatus();
  const Certificate certificate = ReadCertificate(tls.cert);
  if (certificate == nullptr) {
    return unusable(absl::StrCat(flags.cert, " holds no certificate"));
  }
  const std::unique_ptr<BIO, int (*)(BIO*)> text(
      BIO_new_mem_buf(tls.key.data(), static_cast<int>(tls.key.size())),
      BIO_free);
  // No callback would ask a terminal for the key's password.
  const std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)> key(
      PEM_read_bio_PrivateKey(
          text.get(), nullptr, [](char*, int, int, void*) { return -1; },
          nullptr),
      EVP_PKEY_free);
  if (key == nullptr) {
    return unusable(absl::StrCat(
        flags.key, " holds no key that can be read without a password"));
  }
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    return unusable(absl::StrCat(flags.cert, " and ", flags.key,
                                 " do not belong together"));
  }
  return absl::OkStatus();
}

// Of a server, after its chain was verified: its name, as gRPC does it, and
// whose certificate it is.
class ServerVerifier final
    : public grpc::experimental::ExternalCertificateVerifier {
 public:
  explicit ServerVerifier(Identity expected) : expected_(std::move(expected)) {}

  bool Verify(grpc::experimental::TlsCustomVerificationCheckRequest* request,
              std::function<void(grpc::Status)> callback,
              grpc::Status* status) override {
    // It answers at once, so `callback` is never called.
    name_.Verify(request, std::move(callback), status);
    if (!status->ok()) return true;
    std::vector<std::string> uris;
    for (const grpc::string_ref& uri : request->uri_names()) {
      uris.emplace_back(uri.data(), uri.size());
    }
    const auto identities = ParseIdentities(uris);
    const absl::Status claim =
        identities.ok()
            ? CheckClaim({.authenticated = true, .identities = *identities},
                         expected_.role, expected_.worker_id)
            : identities.status();
    if (!claim.ok()) {
      *status = grpc::Status(grpc::StatusCode::PERMISSION_DENIED,
                             std::string(claim.message()));
    }
    return true;
  }
  void Cancel(grpc::experimental::TlsCustomVerificationCheckRequest*) override {
  }

 private:
  const Identity expected_;
  grpc::experimental::HostNameCertificateVerifier name_;
};

std::shared_ptr<grpc::ChannelCredentials> ClientOf(const Credentials& tls,
                                                   const Identity& server) {
  using grpc::experimental::ExternalCertificateVerifier;
  const std::vector<grpc::experimental::IdentityKeyCertPair> own = {
      {tls.key, tls.cert}};
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(
      std::make_shared<grpc::experimental::StaticDataCertificateProvider>(
          tls.ca, own));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
#ifndef __clang_analyzer__  // loses sight of the owner within gRPC
  options.set_certificate_verifier(
      ExternalCertificateVerifier::Create<ServerVerifier>(server));
#endif
  return grpc::experimental::TlsCredentials(options);
}

}  // namespace

absl::StatusOr<Credentials> LoadCredentials(const std::string& cert_path,
                                            const std::string& key_path,
                                            const std::string& ca_path,
                                            const PemFlags& flags) {
  if (cert_path.empty() != key_path.empty()) {
    return UsageError(absl::StrCat(flags.cert, " and ", flags.key,
                                   " come together: set both or neither"));
  }
  Credentials tls;
  auto cert = ReadPem(flags.cert, cert_path, "-----BEGIN CERTIFICATE-----");
  if (!cert.ok()) return cert.status();
  auto key = ReadPem(flags.key, key_path, "PRIVATE KEY-----");
  if (!key.ok()) return key.status();
  auto ca = ReadPem(flags.ca, ca_path, "-----BEGIN CERTIFICATE-----");
  if (!ca.ok()) return ca.status();
  tls.cert = *std::move(cert);
  tls.key = *std::move(key);
  tls.ca = *std::move(ca);
  const absl::Status usable = CheckUsable(tls, flags);
  if (!usable.ok()) return usable;
  return tls;
}

absl::StatusOr<std::vector<Identity>> IdentitiesIn(const std::string& pem) {
  const Certificate certificate = ReadCertificate(pem);
  std::vector<std::string> uris;
  if (certificate == nullptr) return ParseIdentities(uris);
  const std::unique_ptr<GENERAL_NAMES, void (*)(GENERAL_NAMES*)> names(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(
          certificate.get(), NID_subject_alt_name, nullptr, nullptr)),
      GENERAL_NAMES_free);
  for (int i = 0; i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_URI) continue;
    const ASN1_IA5STRING* const uri = name->d.uniformResourceIdentifier;
    uris.emplace_back(reinterpret_cast<const char*>(ASN1_STRING_get0_data(uri)),
                      static_cast<size_t>(ASN1_STRING_length(uri)));
  }
  return ParseIdentities(uris);
}

absl::StatusOr<Validity> ValidityOf(const std::string& pem) {
  const Certificate certificate = ReadCertificate(pem);
  if (certificate == nullptr) {
    return absl::InvalidArgumentError("is no certificate");
  }
  return Validity{TimeOf(X509_get0_notBefore(certificate.get())),
                  TimeOf(X509_get0_notAfter(certificate.get()))};
}

absl::Status CheckIssuer(const std::string& chain,
                         const std::string& authorities) {
  const std::unique_ptr<X509_STORE, void (*)(X509_STORE*)> store(
      X509_STORE_new(), X509_STORE_free);
  for (const Certificate& authority : ReadCertificates(authorities)) {
    X509_STORE_add_cert(store.get(), authority.get());
  }
  // An authority of `authorities` need be nobody's root, as with gRPC.
  X509_STORE_set_flags(store.get(),
                       X509_V_FLAG_NO_CHECK_TIME | X509_V_FLAG_PARTIAL_CHAIN);
  const std::vector<Certificate> all = ReadCertificates(chain);
  if (all.empty()) return absl::InvalidArgumentError("is no certificate");
  const std::unique_ptr<STACK_OF(X509), void (*)(STACK_OF(X509)*)> between(
      sk_X509_new_null(), [](STACK_OF(X509) * stack) { sk_X509_free(stack); });
  for (const Certificate& one : all) sk_X509_push(between.get(), one.get());
  const std::unique_ptr<X509_STORE_CTX, void (*)(X509_STORE_CTX*)> context(
      X509_STORE_CTX_new(), X509_STORE_CTX_free);
  X509_STORE_CTX_init(context.get(), store.get(), all[0].get(), between.get());
  X509_STORE_CTX_set_purpose(context.get(), X509_PURPOSE_ANY);
  if (X509_verify_cert(context.get()) == 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      X509_verify_cert_error_string(X509_STORE_CTX_get_error(context.get())));
}

absl::Status CheckNotExpired(const std::string& pem, std::string_view flag) {
  const absl::StatusOr<Validity> validity = ValidityOf(pem);
  if (!validity.ok()) return validity.status();
  if (absl::Now() < validity->end) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(flag), " has expired at ",
                   absl::FormatTime(validity->end, absl::UTCTimeZone())));
}

bool OnLoopback(const std::string& host) {
  if (host == "localhost") return true;
  in_addr v4{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) {
    return ntohl(v4.s_addr) >> 24 == 127;
  }
  in6_addr v6{};
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 &&
         std::memcmp(&v6, &in6addr_loopback, sizeof v6) == 0;
}

absl::Status CheckPlaintext(const Credentials& tls, bool allowed,
                            std::string_view flag, const std::string& host) {
  if (tls.mutual() || OnLoopback(host)) return absl::OkStatus();
  if (!allowed) {
    return UsageError(absl::StrCat(
        std::string(flag), " ", host,
        ": beyond loopback whoever reaches the cluster's own ports may speak "
        "as one of it, and read prompts and KV: set --tls-cert, --tls-key and "
        "--tls-ca, or --allow-plaintext on a network that you trust"));
  }
  LogWarning(
      "whoever reaches the cluster's own ports may speak as one of it, and "
      "read prompts and KV: set --tls-cert, --tls-key and --tls-ca",
      {{"flag", flag}, {"host", host}});
  return absl::OkStatus();
}

std::shared_ptr<grpc::ServerCredentials> ServerSide(const Credentials& tls) {
  if (tls.cert.empty()) return grpc::InsecureServerCredentials();
  grpc::SslServerCredentialsOptions options(
      tls.ca.empty()
          ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
          : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = tls.ca;
  options.pem_key_cert_pairs.push_back({tls.key, tls.cert});
  return grpc::SslServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> ClientSide(
    const Credentials& tls, const std::optional<Identity>& server) {
  if (!tls.tls()) return grpc::InsecureChannelCredentials();
  if (tls.mutual() && server.has_value()) return ClientOf(tls, *server);
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = tls.ca;
  options.pem_private_key = tls.key;
  options.pem_cert_chain = tls.cert;
  return grpc::SslCredentials(options);
}

}  // namespace tandem::rpc
