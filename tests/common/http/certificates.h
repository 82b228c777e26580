// SPDX-License-Identifier: Apache-2.0
// Certificates for tests, made in memory: authorities, and leaves of theirs for
// localhost and 127.0.0.1, with the URIs of roles that they are given.

#ifndef TANDEM_TESTS_COMMON_HTTP_CERTIFICATES_H_
#define TANDEM_TESTS_COMMON_HTTP_CERTIFICATES_H_

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <memory>
#include <string>
#include <vector>

namespace tandem {

struct Pem {
  std::string cert, key;
};

class Authority {
 public:
  explicit Authority(const std::string& name)
      : key_(EVP_EC_gen("P-256"), &EVP_PKEY_free),
        cert_(Make(name, key_.get(), nullptr, key_.get(), 1), &X509_free) {}

  std::string cert() const { return Text(cert_.get()); }
  // `serial` tells one from another; `valid_seconds` from now may be over.
  Pem Issue(int serial, const std::vector<std::string>& uris = {},
            long valid_seconds = kDay) const {
    const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(
        EVP_EC_gen("P-256"), &EVP_PKEY_free);
    const std::unique_ptr<X509, decltype(&X509_free)> leaf(
        Make("leaf", key.get(), cert_.get(), key_.get(), serial, uris,
             valid_seconds),
        &X509_free);
    Pem pem{.cert = Text(leaf.get()), .key = {}};
    BIO* const bio = BIO_new(BIO_s_mem());
    PEM_write_bio_PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr,
                             nullptr);
    pem.key = Drained(bio);
    return pem;
  }

 private:
  static constexpr long kDay = 24 * 3600;

  static std::string Drained(BIO* bio) {
    char* data = nullptr;
    const long size = BIO_get_mem_data(bio, &data);
    std::string text(data, static_cast<size_t>(size));
    BIO_free(bio);
    return text;
  }
  static std::string Text(X509* cert) {
    BIO* const bio = BIO_new(BIO_s_mem());
    PEM_write_bio_X509(bio, cert);
    return Drained(bio);
  }
  // `issuer` null: its own.
  static X509* Make(const std::string& name, EVP_PKEY* key, X509* issuer,
                    EVP_PKEY* issuer_key, int serial,
                    const std::vector<std::string>& uris = {},
                    long valid_seconds = kDay) {
    X509* const cert = X509_new();
    X509_set_version(cert, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(cert), serial);
    X509_gmtime_adj(X509_getm_notBefore(cert), -kDay);
    X509_gmtime_adj(X509_getm_notAfter(cert), valid_seconds);
    X509_set_pubkey(cert, key);
    X509_NAME* const subject = X509_get_subject_name(cert);
    X509_NAME_add_entry_by_txt(
        subject, "CN", MBSTRING_ASC,
        reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
    X509_set_issuer_name(
        cert, issuer == nullptr ? subject : X509_get_subject_name(issuer));
    X509V3_CTX context;
    X509V3_set_ctx(&context, issuer == nullptr ? cert : issuer, cert, nullptr,
                   nullptr, 0);
    const auto extend = [&](int id, const char* value) {
      X509_EXTENSION* const extension =
          X509V3_EXT_conf_nid(nullptr, &context, id, value);
      X509_add_ext(cert, extension, -1);
      X509_EXTENSION_free(extension);
    };
    if (issuer == nullptr) {
      extend(NID_basic_constraints, "critical,CA:TRUE");
      extend(NID_key_usage, "critical,keyCertSign,cRLSign");
    } else {
      std::string names = "DNS:localhost,IP:127.0.0.1";
      for (const std::string& uri : uris) names += ",URI:" + uri;
      extend(NID_subject_alt_name, names.c_str());
    }
    X509_sign(cert, issuer_key, EVP_sha256());
    return cert;
  }

  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key_;
  const std::unique_ptr<X509, decltype(&X509_free)> cert_;
};

}  // namespace tandem

#endif  // TANDEM_TESTS_COMMON_HTTP_CERTIFICATES_H_
