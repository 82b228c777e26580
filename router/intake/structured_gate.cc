// SPDX-License-Identifier: Apache-2.0
#include "router/intake/structured_gate.h"

#include <algorithm>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"

namespace tandem::router {
namespace {

absl::Status Overloaded(int waiting,
                        std::string_view what = "schemas or grammars wait") {
  return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                   absl::StrCat(waiting, " ", std::string(what),
                                " to be compiled already: try again"),
                   {{"field", "structured"}}, absl::Seconds(1));
}

}  // namespace

// A client's stream that is heard before the core has it.
class StructuredGate::Held final : public ClientStream,
                                   private StreamHandler<v1::GenerateRequest> {
 public:
  Held(std::unique_ptr<ClientStream> client, Loop::Task gone)
      : client_(std::move(client)), gone_(std::move(gone)) {
    client_->Start(this);
  }

  void Start(StreamHandler<v1::GenerateRequest>* handler) override {
    handler_ = handler;
  }
  void Send(v1::GenerateResponse event) override {
    client_->Send(std::move(event));
  }
  size_t unsent() const override { return client_->unsent(); }
  void PauseReading(bool paused) override { client_->PauseReading(paused); }
  void Close(absl::Status status) override {
    handler_ = nullptr;
    gone_ = nullptr;
    if (!closed_) client_->Close(std::move(status));
  }
  std::string peer() const override { return client_->peer(); }

 private:
  void OnMessage(v1::GenerateRequest message) override {
    if (handler_ != nullptr) handler_->OnMessage(std::move(message));
  }
  void OnDrained() override {
    if (handler_ != nullptr) handler_->OnDrained();
  }
  void OnClosed(absl::Status status) override {
    closed_ = true;
    if (handler_ != nullptr) {
      std::exchange(handler_, nullptr)->OnClosed(std::move(status));
    } else if (Loop::Task gone = std::exchange(gone_, nullptr)) {
      gone();  // destroys this
    }
  }

  const std::unique_ptr<ClientStream> client_;
  StreamHandler<v1::GenerateRequest>* handler_ = nullptr;
  Loop::Task gone_;
  bool closed_ = false;  // by the client
};

struct StructuredGate::Waiting {
  Key key;
  AdmittedRequest admitted;
  std::unique_ptr<Held> client;
};

struct StructuredGate::Source {
  explicit Source(Loop* loop) : limit(loop) {}
  Key key;
  uint64_t order = 0;
  v1::StructuredOptions structured;
  bool running = false;
  std::vector<uint64_t> requests;
  Timer limit;
};

StructuredGate::StructuredGate(const StructuredGateOptions& options, Loop* loop,
                               StructuredChecker* checker, Submit submit,
                               Refused refused)
    : options_(options),
      loop_(loop),
      checker_(checker),
      submit_(std::move(submit)),
      refused_(std::move(refused)) {}

StructuredGate::~StructuredGate() = default;

absl::Status StructuredGate::RoomFor(const std::string& tenant,
                                     bool new_source) const {
  constexpr std::string_view kRequests =
      "requests wait for schemas or grammars";
  const auto it = tenants_.find(tenant);
  const Tenant own = it == tenants_.end() ? Tenant() : it->second;
  if (waiting() >= options_.requests) return Overloaded(waiting(), kRequests);
  if (!tenant.empty() && own.requests >= options_.requests_per_tenant) {
    return Overloaded(own.requests, kRequests);
  }
  if (!new_source) return absl::OkStatus();
  if (sources_waiting_ >= options_.waiting) {
    return Overloaded(sources_waiting_);
  }
  if (!tenant.empty() && own.waiting >= options_.waiting_per_tenant) {
    return Overloaded(own.waiting);
  }
  return absl::OkStatus();
}

void StructuredGate::Enter(AdmittedRequest admitted,
                           std::unique_ptr<ClientStream> client) {
  if (!admitted.effective.structured ||
      checker_->Known(*admitted.effective.structured)) {
    submit_(std::move(admitted), std::move(client));
    return;
  }
  Key key(admitted.tenant, admitted.effective.structured->SerializeAsString());
  const auto there = sources_.find(key);
  absl::Status room = drained_;
  if (room.ok()) room = RoomFor(key.first, there == sources_.end());
  if (!room.ok()) {
    refused_(admitted.api, room);
    client->Close(std::move(room));
    return;
  }
  Source* const source = there != sources_.end()
                             ? there->second.get()
                             : AddSource(key, *admitted.effective.structured);
  const uint64_t id = next_++;
  source->requests.push_back(id);
  ++tenants_.at(key.first).requests;
  auto waiting = std::make_unique<Waiting>();
  waiting->key = std::move(key);
  waiting->admitted = std::move(admitted);
  waiting->admitted.since = loop_->Now();
  Waiting* const raw = waiting.get();
  requests_.emplace(id, std::move(waiting));
  raw->client = std::make_unique<Held>(std::move(client), [this, id] {
    End(id, AdmittedRequest::Ended::kClientGone);
  });
  Pump();
}

StructuredGate::Source* StructuredGate::AddSource(
    const Key& key, const v1::StructuredOptions& structured) {
  auto source = std::make_unique<Source>(loop_);
  source->key = key;
  source->order = next_++;
  source->structured = structured;
  source->limit.Start(options_.wait, [this, key] { WaitedTooLong(key); });
  // Who comes anew comes behind those who wait already: else a tenant of one
  // source at a time would be before all others for ever.
  const auto [tenant, fresh] = tenants_.try_emplace(key.first);
  if (fresh) tenant->second.served = turn_;
  ++tenant->second.waiting;
  ++sources_waiting_;
  return sources_.emplace(key, std::move(source)).first->second.get();
}

// Of the tenants that may have one more, the one that runs least, then the one
// whose last turn is the longest ago; of its sources the oldest.
StructuredGate::Source* StructuredGate::Next() {
  Source* best = nullptr;
  const auto rank = [this](const Source& source) {
    const Tenant& tenant = tenants_.at(source.key.first);
    return std::tuple(tenant.running, tenant.served, source.order);
  };
  for (const auto& [key, source] : sources_) {
    if (source->running) continue;
    const int most =
        key.first.empty() ? options_.running : options_.running_per_tenant;
    if (tenants_.at(key.first).running >= most) continue;
    if (best == nullptr || rank(*source) < rank(*best)) best = source.get();
  }
  return best;
}

void StructuredGate::Pump() {
  while (running_ < options_.running) {
    Source* const source = Next();
    if (source == nullptr) return;
    source->running = true;
    source->limit.Stop();
    Tenant& tenant = tenants_.at(source->key.first);
    --tenant.waiting;
    --sources_waiting_;
    ++tenant.running;
    tenant.served = ++turn_;
    ++running_;
    checker_->Check(source->structured,
                    [this, key = source->key](const absl::Status& status) {
                      Checked(key, status);
                    });
  }
}

void StructuredGate::Checked(const Key& key, const absl::Status& status) {
  const std::vector<uint64_t> requests = std::move(sources_.at(key)->requests);
  DropSource(key);
  for (const uint64_t id : requests) {
    if (!status.ok()) {
      Refuse(id, status);
      continue;
    }
    const std::unique_ptr<Waiting> waiting = Take(id);
    if (waiting == nullptr) continue;
    submit_(std::move(waiting->admitted), std::move(waiting->client));
  }
  Pump();
}

void StructuredGate::WaitedTooLong(const Key& key) {
  const std::vector<uint64_t> requests = std::move(sources_.at(key)->requests);
  const absl::Status status = Overloaded(sources_waiting_);
  DropSource(key);
  for (const uint64_t id : requests) Refuse(id, status);
}

void StructuredGate::End(uint64_t request, AdmittedRequest::Ended how) {
  const std::unique_ptr<Waiting> waiting = Take(request);
  if (waiting == nullptr) return;
  waiting->admitted.ended = how;
  submit_(std::move(waiting->admitted), std::move(waiting->client));
}

int StructuredGate::Abort(const std::string& id,
                          const std::optional<std::string>& tenant) {
  return AbortIf([&](const AdmittedRequest& admitted) {
    return !id.empty() && admitted.effective.request_id == id &&
           admitted.tenant == tenant.value_or(admitted.tenant);
  });
}

int StructuredGate::AbortAll(const std::string& tenant) {
  return AbortIf([&](const AdmittedRequest& admitted) {
    return admitted.tenant == tenant;
  });
}

int StructuredGate::AbortIf(
    absl::FunctionRef<bool(const AdmittedRequest&)> wanted) {
  std::vector<uint64_t> aborted;
  for (const auto& [id, waiting] : requests_) {
    if (wanted(waiting->admitted)) aborted.push_back(id);
  }
  for (const uint64_t id : aborted) End(id, AdmittedRequest::Ended::kAborted);
  return static_cast<int>(aborted.size());
}

std::unique_ptr<StructuredGate::Waiting> StructuredGate::Take(
    uint64_t request) {
  const auto it = requests_.find(request);
  if (it == requests_.end()) return nullptr;
  std::unique_ptr<Waiting> waiting = std::move(it->second);
  requests_.erase(it);
  if (const auto source = sources_.find(waiting->key);
      source != sources_.end()) {
    std::erase(source->second->requests, request);
    // What runs runs to its end, and may serve the next one.
    if (source->second->requests.empty() && !source->second->running) {
      DropSource(waiting->key);
    }
  }
  const auto tenant = tenants_.find(waiting->key.first);
  --tenant->second.requests;
  DropIfIdle(tenant);
  return waiting;
}

void StructuredGate::DropSource(const Key& key) {
  const auto it = sources_.find(key);
  const auto tenant = tenants_.find(key.first);
  if (it->second->running) {
    --running_;
    --tenant->second.running;
  } else {
    --sources_waiting_;
    --tenant->second.waiting;
  }
  DropIfIdle(tenant);
  sources_.erase(it);
}

void StructuredGate::DropIfIdle(
    std::map<std::string, Tenant>::iterator tenant) {
  const Tenant& own = tenant->second;
  if (own.running + own.waiting + own.requests == 0) tenants_.erase(tenant);
}

void StructuredGate::Refuse(uint64_t request, absl::Status status) {
  const std::unique_ptr<Waiting> waiting = Take(request);
  if (waiting == nullptr) return;
  status = InClientsTerms(waiting->admitted.effective, status);
  refused_(waiting->admitted.api, status);
  waiting->client->Close(std::move(status));
}

void StructuredGate::Drain(const absl::Status& status) {
  drained_ = status;
  while (!requests_.empty()) Refuse(requests_.begin()->first, status);
}

}  // namespace tandem::router
