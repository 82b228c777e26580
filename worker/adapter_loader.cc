// SPDX-License-Identifier: Apache-2.0
#include "worker/adapter_loader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "common/utf8.h"

namespace tandem::worker {
namespace {

v1::AdapterOutcome OutcomeOf(uint64_t command, const absl::Status& status) {
  v1::AdapterOutcome outcome;
  outcome.set_command(command);
  outcome.set_code(static_cast<int>(status.code()));
  outcome.set_reason(ErrorReason(status));
  outcome.set_message(ValidUtf8(std::string(status.message())));
  return outcome;
}

}  // namespace

AdapterLoader::AdapterLoader(AdapterTable* table, AdapterMemory* memory,
                             std::function<void()> on_change)
    : table_(table), memory_(memory), on_change_(std::move(on_change)) {
  table_->set_on_freed([this](int slot) {
    const auto it = leaving_.find(slot);
    if (it == leaving_.end()) return;
    auto [outcome, done] = std::move(it->second);
    leaving_.erase(it);
    done(std::move(outcome));
  });
}

void AdapterLoader::Stop() {
  if (std::exchange(stopped_, true)) return;
  table_->set_on_freed(nullptr);
  orders_.clear();
  leaving_.clear();
}

void AdapterLoader::Load(v1::LoadAdapter command, Done done) {
  const uint64_t number = command.command();
  absl::Status status = AdapterTable::CheckName(command.name());
  if (status.ok() && (command.path().size() > kMaxPathBytes ||
                      command.path().substr(0, 1) != "/")) {
    status = absl::InvalidArgumentError(absl::StrCat(
        "path = ", std::string(Utf8Head(command.path(), 128)),
        ": an absolute one of at most ", kMaxPathBytes, " bytes is needed"));
  }
  if (!status.ok()) {
    done(OutcomeOf(number, status));
    return;
  }
  Add({.load = std::move(command), .unload = {}, .done = std::move(done)},
      number);
}

void AdapterLoader::Unload(v1::UnloadAdapter command, Done done) {
  const uint64_t number = command.command();
  Add({.load = {}, .unload = std::move(command), .done = std::move(done)},
      number);
}

void AdapterLoader::Add(Order order, uint64_t command) {
  if (stopped_) return;
  if (orders_.size() >= kMaxCommands) {
    order.done(OutcomeOf(
        command,
        MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                  absl::StrCat(orders_.size(),
                               " commands about adapters are waiting here"))));
    return;
  }
  orders_.push_back(std::move(order));
  Next();
}

void AdapterLoader::Next() {
  while (!stopped_ && !busy_ && !orders_.empty()) {
    if (orders_.front().load.name().empty()) {
      Order order = std::move(orders_.front());
      orders_.pop_front();
      StartUnload(std::move(order));
      continue;
    }
    busy_ = true;
    const v1::LoadAdapter& load = orders_.front().load;
    const absl::Status status = CheckLoad(load);
    if (!status.ok()) {
      Finish(status);
      return;  // it has gone on with the next one
    }
    memory_->Read(load.path(), [this](const absl::StatusOr<std::string>& d) {
      if (!stopped_) OnRead(d);
    });
  }
}

// What can be told before files are read.
absl::Status AdapterLoader::CheckLoad(const v1::LoadAdapter& command) const {
  if (memory_ == nullptr) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "ADAPTER_SLOTS",
        "this worker keeps no memory for adapters: start it with --max-loras");
  }
  if (table_->Find(command.name()) != nullptr) return absl::OkStatus();
  absl::StatusOr<int> slot = table_->Take();
  if (slot.ok()) table_->GiveBack(*slot);
  return slot.status();
}

void AdapterLoader::OnRead(const absl::StatusOr<std::string>& digest) {
  if (TANDEM_FAILPOINT("load.adapter", "crash fail stall")) {
    return Finish(failpoint::Error());
  }
  if (!digest.ok()) return Finish(digest.status());
  const v1::LoadAdapter& load = orders_.front().load;
  if (!load.digest().empty() && load.digest() != *digest) {
    return Finish(
        MakeError(absl::StatusCode::kFailedPrecondition, "ADAPTER_MISMATCH",
                  absl::StrCat(load.path(), " holds ", digest->substr(0, 16),
                               ", and ", load.digest().substr(0, 16),
                               " is served as ", load.name())));
  }
  if (const v1::AdapterRef* const here = table_->Find(load.name())) {
    if (here->digest() != *digest) {
      return Finish(MakeError(
          absl::StatusCode::kAlreadyExists, "ADAPTER_EXISTS",
          absl::StrCat("adapter ", load.name(), " is here with other content, ",
                       here->digest().substr(0, 16), ", not ",
                       digest->substr(0, 16), ": unload it first")));
    }
    v1::AdapterOutcome outcome;
    outcome.set_digest(*digest);
    return Finish(outcome);
  }
  absl::StatusOr<int> slot = table_->Take();
  if (!slot.ok()) return Finish(slot.status());
  memory_->Put(*slot, [this, slot = *slot, digest = *digest] {
    if (!stopped_) OnPut(slot, digest);
  });
}

void AdapterLoader::OnPut(int slot, const std::string& digest) {
  const v1::LoadAdapter& load = orders_.front().load;
  v1::AdapterRef adapter;
  adapter.set_name(load.name());
  adapter.set_digest(digest);
  adapter.set_path(load.path());
  adapter.set_in_service(true);
  const absl::Status added = table_->Add(adapter, slot);
  if (!added.ok()) {  // cannot be: commands run one at a time
    table_->GiveBack(slot);
    return Finish(added);
  }
  on_change_();
  v1::AdapterOutcome outcome;
  outcome.set_digest(digest);
  outcome.set_loaded(true);
  Finish(outcome);
}

void AdapterLoader::Finish(const absl::StatusOr<v1::AdapterOutcome>& outcome) {
  Order order = std::move(orders_.front());
  orders_.pop_front();
  if (memory_ != nullptr) memory_->Forget();
  busy_ = false;
  v1::AdapterOutcome told =
      outcome.ok() ? *outcome : OutcomeOf(0, outcome.status());
  told.set_command(order.load.command());
  order.done(std::move(told));
  Next();
}

void AdapterLoader::StartUnload(Order order) {
  const uint64_t command = order.unload.command();
  const std::string& name = order.unload.name();
  const v1::AdapterRef* const here = table_->Find(name);
  v1::AdapterOutcome outcome;
  outcome.set_command(command);
  if (here != nullptr) outcome.set_digest(here->digest());
  const absl::StatusOr<int> slot = table_->Remove(name);
  if (!slot.ok()) {
    order.done(OutcomeOf(command, slot.status()));
    return;
  }
  on_change_();
  if (table_->leaving(*slot)) {
    leaving_[*slot] = {std::move(outcome), std::move(order.done)};
  } else {
    order.done(std::move(outcome));
  }
}

}  // namespace tandem::worker
