// SPDX-License-Identifier: Apache-2.0
// One channel per peer address, kept for its next call. Bounded: beyond the
// limit the one that was asked for longest ago is dropped (calls on it keep
// it alive until they end). Lives on one loop.

#ifndef TANDEM_WORKER_CHANNELS_H_
#define TANDEM_WORKER_CHANNELS_H_

#include <algorithm>
#include <list>
#include <memory>
#include <string>
#include <utility>

#include "common/rpc/channel.h"
#include "common/rpc/credentials.h"

namespace tandem::worker {

class Channels {
 public:
  explicit Channels(rpc::Credentials tls, size_t limit = 256)
      : tls_(std::move(tls)), limit_(limit) {}

  std::shared_ptr<grpc::Channel> Get(const std::string& address) {
    const auto it =
        std::find_if(entries_.begin(), entries_.end(),
                     [&](const Entry& e) { return e.first == address; });
    if (it != entries_.end()) {
      entries_.splice(entries_.begin(), entries_, it);
      return it->second;
    }
    if (entries_.size() >= limit_) entries_.pop_back();
    entries_.emplace_front(address, rpc::MakeChannel(address, tls_));
    return entries_.front().second;
  }

 private:
  using Entry = std::pair<std::string, std::shared_ptr<grpc::Channel>>;
  const rpc::Credentials tls_;
  const size_t limit_;
  std::list<Entry> entries_;  // the latest first
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_CHANNELS_H_
