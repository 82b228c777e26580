// SPDX-License-Identifier: Apache-2.0
#include "worker/resolver.h"

#include <netdb.h>
#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem::worker {

std::vector<std::string> ResolveAddresses(const Endpoint& name) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string port = absl::StrCat(name.port);
  if (getaddrinfo(name.host.c_str(), port.c_str(), &hints, &found) != 0) {
    return {};
  }
  std::vector<std::string> addresses;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    char host[NI_MAXHOST];
    if (getnameinfo(info->ai_addr, info->ai_addrlen, host, sizeof host, nullptr,
                    0, NI_NUMERICHOST) == 0) {
      addresses.push_back(Endpoint{host, name.port}.ToString());
    }
  }
  freeaddrinfo(found);
  std::sort(addresses.begin(), addresses.end());
  addresses.erase(std::unique(addresses.begin(), addresses.end()),
                  addresses.end());
  return addresses;
}

Resolver::Resolver(std::vector<Endpoint> names, absl::Duration interval,
                   Loop* loop, Found found, Resolve resolve)
    : names_(std::move(names)),
      interval_(interval),
      loop_(loop),
      found_(std::move(found)),
      resolve_(std::move(resolve)),
      thread_([this] { Run(); }) {
  pthread_setname_np(thread_.native_handle(), "resolver");
}

Resolver::~Resolver() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  thread_.join();
}

void Resolver::Run() {
  std::vector<std::vector<std::string>> last(names_.size());
  std::map<std::string, std::string> known;
  while (true) {
    std::map<std::string, std::string> routers;
    for (size_t i = 0; i < names_.size(); ++i) {
      std::vector<std::string> addresses = resolve_(names_[i]);
      // A name server's bad moment must not cost a working registration.
      if (!addresses.empty()) last[i] = std::move(addresses);
      for (const std::string& address : last[i]) {
        routers.emplace(address, names_[i].host);
      }
    }
    if (routers != known) {
      known = routers;
      loop_->Post([found = found_, routers] { found(routers); });
    }
    MutexLock lock(&mutex_);
    if (!stopping_) {
      wake_.WaitFor(&mutex_, absl::ToChronoNanoseconds(interval_));
    }
    if (stopping_) return;
  }
}

}  // namespace tandem::worker
