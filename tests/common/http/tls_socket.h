// SPDX-License-Identifier: Apache-2.0
// A client's end of a TLS connection.

#ifndef TANDEM_TESTS_COMMON_HTTP_TLS_SOCKET_H_
#define TANDEM_TESTS_COMMON_HTTP_TLS_SOCKET_H_

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <signal.h>

#include <algorithm>
#include <string>

#include "tests/common/http/certificates.h"
#include "tests/common/http/socket.h"

namespace tandem {

struct TlsClientOptions {
  std::string ca = {};  // one or more; empty: any server will do
  Pem own = {};
  int min_version = TLS1_2_VERSION;
  int max_version = TLS1_3_VERSION;
  std::string protocols = {};  // ALPN's list as it goes over the wire
  std::string ciphers = {};    // of TLS 1.2
};

class TlsSocket {
 public:
  TlsSocket(int port, const TlsClientOptions& options)
      : socket_(port), context_(SSL_CTX_new(TLS_client_method())) {
    SSL_CTX_set_security_level(context_, 0);  // what servers refuse
    SSL_CTX_set_min_proto_version(context_, options.min_version);
    SSL_CTX_set_max_proto_version(context_, options.max_version);
    if (!options.ciphers.empty()) {
      SSL_CTX_set_cipher_list(context_, options.ciphers.c_str());
    }
    if (!options.ca.empty()) {
      BIO* const bio = BIO_new_mem_buf(options.ca.data(), -1);
      while (X509* const ca =
                 PEM_read_bio_X509(bio, nullptr, nullptr, nullptr)) {
        X509_STORE_add_cert(SSL_CTX_get_cert_store(context_), ca);
        X509_free(ca);
      }
      ERR_clear_error();  // there was no more
      BIO_free(bio);
      SSL_CTX_set_verify(context_, SSL_VERIFY_PEER, nullptr);
    }
    if (!options.own.cert.empty()) {
      BIO* bio = BIO_new_mem_buf(options.own.cert.data(), -1);
      X509* const cert = PEM_read_bio_X509(bio, nullptr, nullptr, nullptr);
      SSL_CTX_use_certificate(context_, cert);
      X509_free(cert);
      BIO_free(bio);
      bio = BIO_new_mem_buf(options.own.key.data(), -1);
      EVP_PKEY* const key =
          PEM_read_bio_PrivateKey(bio, nullptr, nullptr, nullptr);
      SSL_CTX_use_PrivateKey(context_, key);
      EVP_PKEY_free(key);
      BIO_free(bio);
    }
    signal(SIGPIPE, SIG_IGN);  // OpenSSL writes without MSG_NOSIGNAL
    ssl_ = SSL_new(context_);
    SSL_set_tlsext_host_name(ssl_, "localhost");
    if (!options.protocols.empty()) {
      SSL_set_alpn_protos(
          ssl_,
          reinterpret_cast<const unsigned char*>(options.protocols.data()),
          static_cast<unsigned>(options.protocols.size()));
    }
    SSL_set_fd(ssl_, socket_.fd());
    connected_ = socket_.connected() && SSL_connect(ssl_) == 1;
  }
  ~TlsSocket() {
    SSL_free(ssl_);
    SSL_CTX_free(context_);
  }
  TlsSocket(const TlsSocket&) = delete;
  TlsSocket& operator=(const TlsSocket&) = delete;

  // The handshake went well, as far as this end knows.
  bool connected() const { return connected_; }
  std::string version() const { return SSL_get_version(ssl_); }
  std::string protocol() const {
    const unsigned char* data = nullptr;
    unsigned size = 0;
    SSL_get0_alpn_selected(ssl_, &data, &size);
    return {reinterpret_cast<const char*>(data), size};
  }
  // Of the server's certificate.
  long serial() const {
    X509* const cert = SSL_get1_peer_certificate(ssl_);
    if (cert == nullptr) return -1;
    const long value = ASN1_INTEGER_get(X509_get0_serialNumber(cert));
    X509_free(cert);
    return value;
  }
  void Send(const std::string& text) {
    if (connected_) {
      (void)SSL_write(ssl_, text.data(), static_cast<int>(text.size()));
    }
  }
  // Says that nothing more comes; the connection below stays open.
  void CloseNotify() { SSL_shutdown(ssl_); }
  // Until `end` was seen or the peer said that it is done; `cut` if it just
  // closed.
  std::string Receive(const std::string& end = "") {
    std::string text;
    char buffer[4096];
    while (connected_ && (end.empty() || text.find(end) == std::string::npos)) {
      const int n = SSL_read(ssl_, buffer, sizeof(buffer));
      if (n <= 0) {
        cut_ = SSL_get_error(ssl_, n) != SSL_ERROR_ZERO_RETURN;
        break;
      }
      text.append(buffer, static_cast<size_t>(n));
    }
    return text;
  }
  bool cut() const { return cut_; }

 private:
  Socket socket_;
  SSL_CTX* const context_;
  SSL* ssl_ = nullptr;
  bool connected_ = false;
  bool cut_ = false;
};

}  // namespace tandem

#endif  // TANDEM_TESTS_COMMON_HTTP_TLS_SOCKET_H_
