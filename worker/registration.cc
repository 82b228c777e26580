// SPDX-License-Identifier: Apache-2.0
#include "worker/registration.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/types/span.h"
#include "common/error.h"
#include "common/failpoint.h"

namespace tandem::worker {
namespace {

// Slow readers lose the increments and get everything anew: the queue to a
// router is bounded by a few messages.
constexpr size_t kMaxUnsent = 16;

// Moves what there is room for.
void MoveSome(absl::Span<const uint64_t>* from, size_t* room,
              google::protobuf::RepeatedField<uint64_t>* to) {
  const auto some = from->first(std::min(from->size(), *room));
  to->Add(some.begin(), some.end());
  from->remove_prefix(some.size());
  *room -= some.size();
}

// All in order, and no message with more than `most`; one at least.
void SendCache(bool reset, const engine::CacheChanges& changes, int most,
               RegistryStream* stream) {
  absl::Span<const uint64_t> removed = changes.removed;
  absl::Span<const uint64_t> added = changes.added;
  absl::Span<const uint64_t> lacking = changes.lacking;
  do {
    v1::RegisterRequest message;
    v1::CacheChange* const cache = message.mutable_cache();
    cache->set_reset(std::exchange(reset, false));
    auto room = static_cast<size_t>(most);
    MoveSome(&removed, &room, cache->mutable_removed());
    MoveSome(&added, &room, cache->mutable_added());
    MoveSome(&lacking, &room, cache->mutable_lacking());
    stream->Send(std::move(message));
  } while (!removed.empty() || !added.empty() || !lacking.empty());
}

bool Idle(const v1::WorkerLoad& load) {
  return load.streams() == 0 && load.tickets() == 0 && load.running() == 0 &&
         load.waiting() == 0 && load.blocks_live() == 0 &&
         load.blocks_reserved() == 0;
}

}  // namespace

struct Registration::Link final : StreamHandler<v1::RegisterResponse> {
  Link(Registration* owner_in, std::string endpoint_in)
      : owner(owner_in),
        endpoint(std::move(endpoint_in)),
        named(owner->loop_->Now()),
        redial(owner->loop_) {}

  void OnMessage(v1::RegisterResponse message) override {
    heard = owner->loop_->Now();
    if (message.has_welcome()) {
      welcomed = true;
      router = absl::BytesToHexString(message.welcome().router_incarnation());
      backoff = owner->options_.min_backoff;
    }
    if (owner->loader_ == nullptr) return;
    if (message.has_load_adapter()) {
      owner->loader_->Load(std::move(*message.mutable_load_adapter()),
                           owner->AnswerTo(*this));
    } else if (message.has_unload_adapter()) {
      owner->loader_->Unload(std::move(*message.mutable_unload_adapter()),
                             owner->AnswerTo(*this));
    }
  }
  void OnClosed(absl::Status status) override { owner->Lost(this, status); }

  Registration* const owner;
  const std::string endpoint;
  const absl::Time named;  // since when it is one of the routers
  std::unique_ptr<RegistryStream> stream;
  Timer redial;
  absl::Duration backoff;
  absl::Time heard;
  bool welcomed = false;
  std::string router;        // its incarnation, as errors tell it
  bool cache_known = false;  // the router holds our cache's hashes
  bool adapters_known = false;
  uint64_t number = 0;  // of the stream
};

Registration::Registration(const RegistrationOptions& options, Loop* loop,
                           Random* random, Dial dial,
                           std::function<v1::WorkerLoad()> load,
                           engine::KvPool* pool, OnTrouble on_trouble)
    : options_(options),
      loop_(loop),
      random_(random),
      dial_(std::move(dial)),
      load_(std::move(load)),
      pool_(pool),
      on_trouble_(std::move(on_trouble)),
      look_(loop),
      tick_(loop) {
  look_.Start(options_.idle_interval, [this] { Look(); });
  tick_.Start(options_.load_interval, [this] { Tick(); });
}

Registration::~Registration() = default;

void Registration::SetRouters(const std::vector<std::string>& endpoints) {
  for (auto it = links_.begin(); it != links_.end();) {
    const bool named = std::find(endpoints.begin(), endpoints.end(),
                                 it->first) != endpoints.end();
    it = named ? std::next(it) : links_.erase(it);
  }
  for (const std::string& endpoint : endpoints) {
    std::unique_ptr<Link>& link = links_[endpoint];
    if (link != nullptr) continue;
    link = std::make_unique<Link>(this, endpoint);
    link->backoff = options_.min_backoff;
    Connect(link.get());
  }
}

void Registration::Connect(Link* link) {
  link->welcomed = false;
  link->cache_known = false;
  link->adapters_known = true;  // the hello has them
  link->number = ++streams_;
  link->heard = loop_->Now();
  link->stream = dial_(link->endpoint);
  link->stream->Start(link);
  v1::RegisterRequest hello;
  *hello.mutable_hello() = options_.hello;
  if (TANDEM_FAILPOINT("worker.register", "crash drop")) return;
  link->stream->Send(std::move(hello));
  v1::RegisterRequest load;
  *load.mutable_load() = load_();
  link->stream->Send(std::move(load));
}

bool Registration::Knows(const std::string& router) const {
  return std::any_of(links_.begin(), links_.end(), [&](const auto& entry) {
    const Link& link = *entry.second;
    return link.stream != nullptr && link.welcomed && link.router == router;
  });
}

void Registration::Lost(Link* link, const absl::Status& status) {
  link->stream.reset();
  const bool registered = ErrorReason(status) == "ALREADY_REGISTERED";
  if (registered && Knows(ErrorMetadata(status)["router"])) {
    // Another address of a router that is known by one: of use once that is
    // lost.
    link->backoff = options_.max_backoff;
  } else {
    // The router takes the stream before this one for alive, but not for long.
    if (registered) link->backoff = options_.min_backoff;
    // One that took its leave is not back at once.
    if (ErrorReason(status) == "DRAINING") {
      link->backoff = options_.left_backoff;
    }
    // One that starts beside its workers may not be there yet.
    if (!link->router.empty() || !absl::IsUnavailable(status) ||
        loop_->Now() >= link->named + options_.patience) {
      on_trouble_(link->endpoint, status);
    }
  }
  const absl::Duration delay =
      link->backoff * (0.75 + 0.5 * random_->Uniform());
  link->backoff = std::min(link->backoff * 2, options_.max_backoff);
  link->redial.Start(delay, [this, link] { Connect(link); });
}

void Registration::SetAdapters(const v1::AdapterList& list) {
  *options_.hello.mutable_adapters() = list.adapters();
  for (const auto& [endpoint, link] : links_) link->adapters_known = false;
  SayAdapters();
}

void Registration::SayAdapters() {
  for (const auto& [endpoint, link] : links_) {
    if (link->stream == nullptr || link->adapters_known ||
        link->stream->unsent() > kMaxUnsent) {
      continue;
    }
    link->adapters_known = true;
    v1::RegisterRequest message;
    *message.mutable_adapters()->mutable_adapters() = options_.hello.adapters();
    link->stream->Send(std::move(message));
  }
}

AdapterLoader::Done Registration::AnswerTo(const Link& link) {
  return [this, endpoint = link.endpoint,
          number = link.number](v1::AdapterOutcome outcome) {
    const auto it = links_.find(endpoint);
    if (it == links_.end() || it->second->stream == nullptr ||
        it->second->number != number) {
      return;
    }
    v1::RegisterRequest message;
    *message.mutable_adapter_outcome() = std::move(outcome);
    it->second->stream->Send(std::move(message));
  };
}

void Registration::SayLoad() {
  if (TANDEM_FAILPOINT("worker.load", "drop delay")) return;
  SayAdapters();
  const v1::WorkerLoad load = load_();
  const engine::CacheChanges changes = pool_->TakeChanges();
  for (const auto& [endpoint, link] : links_) {
    if (link->stream == nullptr) continue;
    if (link->stream->unsent() > kMaxUnsent) {
      link->cache_known = false;
      continue;
    }
    v1::RegisterRequest message;
    *message.mutable_load() = load;
    link->stream->Send(std::move(message));
    if (!link->cache_known) {
      link->cache_known = true;
      engine::CacheChanges all;
      all.lacking = pool_->LackingHashes();
      absl::c_set_difference(pool_->CachedHashes(options_.max_cached_hashes),
                             all.lacking, std::back_inserter(all.added));
      SendCache(/*reset=*/true, all, options_.max_hashes_per_message,
                link->stream.get());
    } else if (!changes.added.empty() || !changes.lacking.empty() ||
               !changes.removed.empty()) {
      SendCache(/*reset=*/false, changes, options_.max_hashes_per_message,
                link->stream.get());
    }
  }
}

// What stands free is to be known at once: requests may wait for it, and who
// drains it.
void Registration::Look() {
  look_.Start(options_.idle_interval, [this] { Look(); });
  const bool was_idle = std::exchange(idle_, Idle(load_()));
  if (idle_ && !was_idle) SayLoad();
}

void Registration::Tick() {
  tick_.Start(options_.load_interval, [this] { Tick(); });
  SayLoad();
  for (const auto& [endpoint, link] : links_) {
    if (link->stream != nullptr &&
        loop_->Now() - link->heard > options_.silence) {
      Lost(link.get(), absl::UnavailableError("the router went silent"));
    }
  }
}

int Registration::connected() const {
  return static_cast<int>(
      std::count_if(links_.begin(), links_.end(), [](const auto& entry) {
        return entry.second->welcomed && entry.second->stream != nullptr;
      }));
}

}  // namespace tandem::worker
