// SPDX-License-Identifier: Apache-2.0
// What tests of TLS share: files of certificates that processes watch, and
// those of a whole cluster under mutual TLS, replaced while it serves.

#ifndef TANDEM_TESTS_INTEGRATION_TLS_FILES_H_
#define TANDEM_TESTS_INTEGRATION_TLS_FILES_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/rpc/credentials.h"
#include "tests/common/http/certificates.h"
#include "tests/common/http/tls_socket.h"
#include "tests/integration/cluster.h"

namespace tandem::integration {

// False: not within 20 s.
inline bool Until(const std::function<bool()>& done) {
  for (int i = 0; i < 800 && !done(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
  }
  return done();
}

// How often `words` are in the process's log.
inline int CountInLog(const Cluster& cluster, const std::string& process,
                      const std::string& words) {
  const std::string log = cluster.Log(process);
  int count = 0;
  for (size_t at = log.find(words); at != std::string::npos;
       at = log.find(words, at + 1)) {
    ++count;
  }
  return count;
}

// A folder of its own, which goes with it.
class TlsFiles {
 public:
  explicit TlsFiles(const std::string& name)
      : directory_(
            absl::StrCat(testing::TempDir(), "/tandem-", name, "-", getpid())) {
    std::filesystem::create_directories(directory_);
  }
  ~TlsFiles() { std::filesystem::remove_all(directory_); }
  TlsFiles(const TlsFiles&) = delete;
  TlsFiles& operator=(const TlsFiles&) = delete;

  const std::string& directory() const { return directory_; }
  std::string Path(const std::string& name) const {
    return absl::StrCat(directory_, "/", name);
  }
  // At once, as those who renew certificates do.
  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(Path(name + ".new")) << text;
    std::filesystem::rename(Path(name + ".new"), Path(name));
  }
  // As the files of "router" or "prefill/prefill-0".
  void Put(std::string name, const Pem& pem) const {
    std::replace(name.begin(), name.end(), '/', '-');
    Write(name + ".key", pem.key);
    Write(name + ".pem", pem.cert);
  }

 private:
  const std::string directory_;
};

// ClusterOptions::tls_directory of a router and of these workers.
class ClusterTlsFiles : public TlsFiles {
 public:
  // `workers`: "prefill/prefill-0", ... Serial 2, by `authority`.
  ClusterTlsFiles(const std::string& name, const Authority& authority,
                  std::vector<std::string> workers)
      : TlsFiles(name), names_(std::move(workers)) {
    names_.emplace_back("router");
    Write("ca.pem", authority.cert());
    Renew(authority, 2);
    for (const std::string who : {"operator", "client"}) {
      Put(who, authority.Issue(2, {"spiffe://tandem/" + who}));
    }
  }

  // New certificates for all processes, in their files.
  void Renew(const Authority& authority, int serial) const {
    for (const std::string& name : names_) {
      Put(name, authority.Issue(serial, {"spiffe://tandem/" + name}));
    }
  }
  // All trust these authorities and no other ones. False: not in time.
  bool Trust(const Cluster& cluster, const std::string& ca) const {
    std::map<std::string, int> before;
    for (const std::string& name : names_) {
      const std::string process = name.substr(name.find('/') + 1);
      before[process] = CountInLog(cluster, process, kReloaded);
    }
    Write("ca.pem", ca);
    const bool read = Until([&] {
      return std::all_of(before.begin(), before.end(), [&](const auto& each) {
        return CountInLog(cluster, each.first, kReloaded) > each.second;
      });
    });
    // gRPC looks once a second.
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    return read;
  }

  static constexpr char kReloaded[] = "certificate reloaded";

 private:
  std::vector<std::string> names_;
};

// Whether each of these ports shows this certificate; `protocols` as ALPN has
// them.
inline bool AllShow(const std::vector<int>& ports, int serial,
                    const std::string& protocols = "\x02h2") {
  TlsClientOptions options;
  options.protocols = protocols;
  return std::all_of(ports.begin(), ports.end(), [&](int port) {
    return TlsSocket(port, options).serial() == serial;
  });
}

inline rpc::Credentials CredentialsOf(const Pem& own, const std::string& ca) {
  rpc::Credentials tls;
  tls.cert = own.cert;
  tls.key = own.key;
  tls.ca = ca;
  return tls;
}

}  // namespace tandem::integration

#endif  // TANDEM_TESTS_INTEGRATION_TLS_FILES_H_
