// SPDX-License-Identifier: Apache-2.0
#include "router/structured_gate.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "router/errors.h"

namespace tandem::router {
namespace {

absl::Status Overloaded(int waiting) {
  return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                   absl::StrCat(waiting,
                                " schemas or grammars wait to be compiled "
                                "already: try again"),
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
    client_->Close(std::move(status));
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
    if (handler_ != nullptr) {
      std::exchange(handler_, nullptr)->OnClosed(std::move(status));
    } else if (Loop::Task gone = std::exchange(gone_, nullptr)) {
      gone();  // destroys this
    }
  }

  const std::unique_ptr<ClientStream> client_;
  StreamHandler<v1::GenerateRequest>* handler_ = nullptr;
  Loop::Task gone_;
};

struct StructuredGate::Waiting {
  Key key;
  AdmittedRequest admitted;
  absl::Time since;
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

absl::Status StructuredGate::RoomFor(const std::string& tenant) const {
  const auto it = tenants_.find(tenant);
  const int own = it == tenants_.end() ? 0 : it->second.waiting;
  if (sources_waiting_ >= options_.waiting) {
    return Overloaded(sources_waiting_);
  }
  if (!tenant.empty() && own >= options_.waiting_per_tenant) {
    return Overloaded(own);
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
  std::unique_ptr<Source>& source = sources_[key];
  if (source == nullptr) {
    if (absl::Status room = RoomFor(key.first); !room.ok()) {
      sources_.erase(key);
      refused_(admitted.api, room);
      client->Close(std::move(room));
      return;
    }
    source = std::make_unique<Source>(loop_);
    source->key = key;
    source->order = next_++;
    source->structured = *admitted.effective.structured;
    source->limit.Start(options_.wait, [this, key] { WaitedTooLong(key); });
    ++tenants_[key.first].waiting;
    ++sources_waiting_;
  }
  const uint64_t id = next_++;
  source->requests.push_back(id);
  auto waiting = std::make_unique<Waiting>();
  waiting->key = std::move(key);
  waiting->admitted = std::move(admitted);
  waiting->since = loop_->Now();
  Waiting* const raw = waiting.get();
  requests_.emplace(id, std::move(waiting));
  raw->client =
      std::make_unique<Held>(std::move(client), [this, id] { Left(id); });
  Pump();
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
    const auto it = requests_.find(id);
    if (it == requests_.end()) continue;
    const std::unique_ptr<Waiting> waiting = std::move(it->second);
    requests_.erase(it);
    AdmittedRequest& admitted = waiting->admitted;
    if (admitted.deadline > absl::ZeroDuration()) {
      admitted.deadline =
          std::max(admitted.deadline - (loop_->Now() - waiting->since),
                   absl::Milliseconds(1));
    }
    submit_(std::move(admitted), std::move(waiting->client));
  }
  Pump();
}

void StructuredGate::WaitedTooLong(const Key& key) {
  const std::vector<uint64_t> requests = std::move(sources_.at(key)->requests);
  const absl::Status status = Overloaded(sources_waiting_);
  DropSource(key);
  for (const uint64_t id : requests) Refuse(id, status);
}

void StructuredGate::Left(uint64_t request) {
  const auto it = requests_.find(request);
  if (it == requests_.end()) return;
  const std::unique_ptr<Waiting> waiting = std::move(it->second);
  requests_.erase(it);
  Source& source = *sources_.at(waiting->key);
  std::erase(source.requests, request);
  // What runs runs to its end, and may serve the next one.
  if (source.requests.empty() && !source.running) DropSource(waiting->key);
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
  if (tenant->second.running == 0 && tenant->second.waiting == 0) {
    tenants_.erase(tenant);
  }
  sources_.erase(it);
}

void StructuredGate::Refuse(uint64_t request, absl::Status status) {
  const auto it = requests_.find(request);
  if (it == requests_.end()) return;
  const std::unique_ptr<Waiting> waiting = std::move(it->second);
  requests_.erase(it);
  if (waiting->admitted.effective.forced_call &&
      absl::IsInvalidArgument(status)) {
    status = ConstraintInvalid("chat.tools", "(schemas)",
                               std::string(status.message()));
  }
  refused_(waiting->admitted.api, status);
  waiting->client->Close(std::move(status));
}

void StructuredGate::CloseAll(const absl::Status& status) {
  while (!requests_.empty()) {
    const uint64_t id = requests_.begin()->first;
    const Key key = requests_.begin()->second->key;
    Source& source = *sources_.at(key);
    std::erase(source.requests, id);
    if (source.requests.empty() && !source.running) DropSource(key);
    Refuse(id, status);
  }
}

}  // namespace tandem::router
