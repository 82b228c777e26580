// SPDX-License-Identifier: Apache-2.0
// One set of PEM files for all that a process listens on and calls:
// --tls-cert, --tls-key, --tls-ca.
//
//   cert + key + ca   mutual TLS: both ends must show a certificate of `ca`
//   cert + key        server: TLS without client certificates
//   ca                client: TLS, server checked against `ca`
//   none              plain text: on loopback, or with --allow-plaintext

#ifndef TANDEM_COMMON_RPC_CREDENTIALS_H_
#define TANDEM_COMMON_RPC_CREDENTIALS_H_

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/rpc/identity.h"

namespace tandem::rpc {

// PEM texts, not paths.
struct Credentials {
  std::string cert;  // chain, leaf first
  std::string key;
  std::string ca;
  // Of a client: TLS, against the system's authorities if `ca` is empty.
  bool system_authorities = false;

  bool tls() const {
    return !cert.empty() || !ca.empty() || system_authorities;
  }
  bool mutual() const { return !cert.empty() && !ca.empty(); }
};

// What a message calls the three files.
struct PemFlags {
  const char* cert = "--tls-cert";
  const char* key = "--tls-key";
  const char* ca = "--tls-ca";
};

// Reads the files; an empty path leaves its part empty. A certificate without
// a key, or the reverse, one with the key of another, and files that hold no
// certificate or key are INVALID_ARGUMENT, naming the flag.
absl::StatusOr<Credentials> LoadCredentials(const std::string& cert_path,
                                            const std::string& key_path,
                                            const std::string& ca_path,
                                            const PemFlags& flags = {});

// What the first certificate of `pem` says of its process; see identity.h.
absl::StatusOr<std::vector<Identity>> IdentitiesIn(const std::string& pem);

// Is it of this machine alone: "localhost", 127.0.0.0/8 or ::1? No name is
// looked up.
bool OnLoopback(const std::string& host);

// Whether a process of the cluster may speak with the others over `host`, to
// which `flag` was set: on loopback, with mutual TLS, or where the operator
// allows plain text, of which a warning is logged. Else a UsageError.
absl::Status CheckPlaintext(const Credentials& tls, bool allowed,
                            std::string_view flag, const std::string& host);

std::shared_ptr<grpc::ServerCredentials> ServerSide(const Credentials& tls);
// Where TLS is mutual and `server` is set, the server's certificate must be of
// that role, and of that worker where it names one; else connecting fails with
// UNAVAILABLE, whose message says what it is. Its host's name is checked
// always.
std::shared_ptr<grpc::ChannelCredentials> ClientSide(
    const Credentials& tls, const std::optional<Identity>& server = {});

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CREDENTIALS_H_
