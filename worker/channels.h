// SPDX-License-Identifier: Apache-2.0
// One channel per worker process, kept for its next call. A new incarnation
// gets a new one: the old channel may still be backing off from the crash.
// Bounded: beyond the limit the one that was asked for longest ago is dropped
// (calls on it keep it alive until they end). Lives on one loop.

#ifndef TANDEM_WORKER_CHANNELS_H_
#define TANDEM_WORKER_CHANNELS_H_

#include <grpcpp/channel.h>

#include <algorithm>
#include <list>
#include <memory>
#include <string>
#include <utility>

#include "common/rpc/channel.h"
#include "common/rpc/credentials.h"
#include "tandem/v1/generation.pb.h"

namespace tandem::worker {

class Channels {
 public:
  explicit Channels(rpc::Credentials tls, size_t limit = 256)
      : tls_(std::move(tls)), limit_(limit) {}

  // Where TLS is mutual, `worker` must show a certificate of `role` and its id.
  std::shared_ptr<grpc::Channel> Get(rpc::PeerRole role,
                                     const v1::WorkerRef& worker) {
    const auto it = std::find_if(
        entries_.begin(), entries_.end(),
        [&](const Entry& e) { return e.endpoint == worker.endpoint(); });
    if (it != entries_.end() && it->incarnation == worker.incarnation()) {
      entries_.splice(entries_.begin(), entries_, it);
      return it->channel;
    }
    if (it != entries_.end()) entries_.erase(it);
    if (entries_.size() >= limit_) entries_.pop_back();
    rpc::ChannelOptions options;
    options.server = rpc::Identity{role, worker.worker_id()};
    entries_.push_front({worker.endpoint(), worker.incarnation(),
                         rpc::MakeChannel(worker.endpoint(), tls_, options)});
    return entries_.front().channel;
  }

  // For channels from now on: those that are open keep their connections until
  // their calls ended.
  void Replace(rpc::Credentials tls) {
    tls_ = std::move(tls);
    entries_.clear();
  }

 private:
  struct Entry {
    std::string endpoint;
    std::string incarnation;
    std::shared_ptr<grpc::Channel> channel;
  };
  rpc::Credentials tls_;
  const size_t limit_;
  std::list<Entry> entries_;  // the latest first
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_CHANNELS_H_
