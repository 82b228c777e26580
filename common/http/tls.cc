// SPDX-License-Identifier: Apache-2.0
#include "common/http/tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "common/error.h"

namespace tandem::http_internal {
namespace {

namespace asio = boost::asio;
using Error = boost::beast::error_code;

constexpr unsigned char kProtocols[] = {8,   'h', 't', 't', 'p',
                                        '/', '1', '.', '1'};
// Of TLS 1.2; those of 1.3 are all of this kind.
constexpr char kCiphers[] =
    "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:"
    "ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384:"
    "ECDHE-ECDSA-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305";

// A client that offers other protocols only (h2) must hear so, rather than
// wait for frames.
int ChooseProtocol(SSL* /*ssl*/, const unsigned char** out,
                   unsigned char* out_size, const unsigned char* in,
                   unsigned int in_size, void* /*unused*/) {
  unsigned char* chosen = nullptr;
  if (SSL_select_next_proto(&chosen, out_size, kProtocols, sizeof(kProtocols),
                            in, in_size) != OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  }
  *out = chosen;
  return SSL_TLSEXT_ERR_OK;
}

absl::Status Bad(std::string_view what, const std::string& why) {
  ERR_clear_error();
  return MakeError(absl::StatusCode::kInvalidArgument, "TLS_FILE",
                   absl::StrCat(std::string(what), ": ", why));
}

}  // namespace

absl::StatusOr<std::shared_ptr<asio::ssl::context>> MakeTlsContext(
    const HttpTls& tls) {
  auto context = std::make_shared<asio::ssl::context>(asio::ssl::context::tls);
  SSL_CTX* const native = context->native_handle();
  Error error;
  SSL_CTX_set_min_proto_version(native, TLS1_2_VERSION);
  SSL_CTX_set_options(native, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION |
                                  SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_mode(native, SSL_MODE_RELEASE_BUFFERS);
  if (SSL_CTX_set_cipher_list(native, kCiphers) != 1) {
    return Bad("TLS ciphers", "this OpenSSL has none of them");
  }
  SSL_CTX_set_alpn_select_cb(native, ChooseProtocol, nullptr);
  context->use_certificate_chain(asio::buffer(tls.cert), error);
  if (error) return Bad("certificate", error.message());
  context->use_private_key(asio::buffer(tls.key), asio::ssl::context::pem,
                           error);
  if (error || SSL_CTX_check_private_key(native) != 1) {
    return Bad("private key",
               error ? error.message() : "not that of the certificate");
  }
  if (!tls.client_ca.empty()) {
    context->add_certificate_authority(asio::buffer(tls.client_ca), error);
    if (error) return Bad("certificate authority", error.message());
    context->set_verify_mode(asio::ssl::verify_peer |
                             asio::ssl::verify_fail_if_no_peer_cert);
    // Sessions resumed are of clients that this authority has vouched for.
    constexpr unsigned char kSession[] = "tandem";
    SSL_CTX_set_session_id_context(native, kSession, sizeof(kSession) - 1);
  }
  return context;
}

}  // namespace tandem::http_internal
