// SPDX-License-Identifier: Apache-2.0
#include "router/process.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "common/log.h"
#include "common/memory_limit.h"
#include "router/validate/errors.h"

namespace tandem::router {
namespace {

constexpr absl::Duration kLastSpans = absl::Seconds(1);
// So many may be chance.
constexpr int kMisses = 2;
constexpr absl::Duration kDrainPoll = absl::Milliseconds(20);
constexpr absl::Duration kLastCalls = absl::Milliseconds(250);

}  // namespace

absl::Status Process::Run() {
  absl::Status status = Start();
  if (status.ok()) status = finished_.get_future().get();
  Stop();
  return status;
}

void Process::EachSecond() {
  second_->Start(absl::Seconds(1), [this] { EachSecond(); });
  // Placing takes no time: who could be placed a second ago has been.
  const int64_t placed = core_->placements();
  if (std::exchange(placed_, placed) != placed) {
    missed_ = 0;
  } else if (core_->CouldPlace()) {
    ++missed_;
  }
  watchdog_->Beat(loop_.Now(), placed, /*has_work=*/missed_ > kMisses);
  CheckMemory();
  router_metrics_->Update(core_->State(/*include_requests=*/false));
  if (health_ != nullptr) {  // they all serve
    router_metrics_->UpdateConnections("http", http_->connections(),
                                       http_->refused_connections());
    router_metrics_->UpdateConnections("grpc", public_server_->connections(),
                                       public_server_->refused_connections());
  }
  security_metrics_->Update();
}

void Process::UpdateFacts() {
  facts_timer_->Start(absl::Milliseconds(50), [this] { UpdateFacts(); });
  facts_.context_length = core_->context_length();
  const KvRoom room = core_->kv_room();
  facts_.kv_block_size = room.block_size;
  facts_.kv_blocks = room.blocks;
  facts_.kv_bytes_per_token = room.bytes_per_token;
  facts_.kv_sequences = room.sequences;
  facts_.ready_decode = core_->ready_workers(v1::WORKER_ROLE_DECODE);
  facts_.ready_prefill = core_->ready_workers(v1::WORKER_ROLE_PREFILL);
  facts_.set_adapters(core_->adapters());
  const bool serving = !draining_ && facts_.ready_decode > 0;
  if (health_ == nullptr || serving == serving_) return;
  serving_ = serving;
  for (const char* service : kServices) health_->SetServing(service, serving);
}

absl::Status Process::Ready() const {
  if (draining_) return absl::UnavailableError("draining");
  if (facts_.ready_decode == 0) {
    return absl::UnavailableError("no decode worker is ready");
  }
  return watchdog_->Check(loop_.Now());
}

void Process::DrainForFault(absl::Status fault) {
  if (draining_) return;
  LogError("draining for a fault", {{"fault", std::string(fault.message())}});
  outcome_ = std::move(fault);
  Drain();
}

void Process::CheckMemory() {
  const int64_t ceiling = flags_.max_memory_bytes;
  const int64_t held = ceiling > 0 ? OwnMemory() : 0;
  if (held <= ceiling) {
    seconds_above_ceiling_ = 0;
    return;
  }
  if (++seconds_above_ceiling_ < 3) return;
  DrainForFault(absl::ResourceExhaustedError(
      absl::StrCat(held >> 20, " MiB of memory, above --max-memory-bytes (",
                   ceiling >> 20, " MiB): to be started anew")));
}

void Process::Drain() {
  if (draining_) return;
  TANDEM_FAILPOINT("router.drain", "crash stall");
  LogInfo("draining", {{"timeout", flags_.shutdown_timeout},
                       {"requests", core_->in_flight()}});
  draining_ = true;
  UpdateFacts();  // the services have ended
  public_server_->SetServing("", false);
  http_->CloseAfterAnswers();  // before the first refusal
  core_->Drain();
  gate_->Drain(Draining());
  drain_ends_ = loop_.Now() + flags_.shutdown_timeout;
  PollDrained();
}

void Process::PollDrained() {
  const absl::Time now = loop_.Now();
  if (!core_->idle()) idle_since_ = absl::InfiniteFuture();
  idle_since_ = std::min(idle_since_, now);
  // Whose stream was the last one calls again at once: told that this router
  // drains it goes elsewhere, by a server that shuts down it is cancelled.
  if ((core_->idle() && now >= idle_since_ + kLastCalls) ||
      now >= drain_ends_) {
    feed_->Close();
    core_->CloseAll(MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                              "this router is going away", {},
                              absl::Seconds(1)));
    finished_.set_value(outcome_);
    return;
  }
  drain_poll_->Start(kDrainPoll, [this] { PollDrained(); });
}

void Process::Stop() {
  self_connect_.reset();
  watcher_.Stop();
  loop_.RunSync([&] {
    second_.reset();
    facts_timer_.reset();
    drain_poll_.reset();
    if (feed_ != nullptr) feed_->Close();
    if (gate_ != nullptr) gate_->Drain(Draining());
    if (core_ != nullptr) {
      core_->Drain();
      core_->CloseAll(absl::UnavailableError("this router is going away"));
      // Servers wait for their calls, and those for workers.
      core_->adapter_control().Close(Draining());
    }
  });
  // Streams that were just closed still have their last word to write.
  if (public_server_ != nullptr) public_server_->Shutdown(absl::Seconds(2));
  if (admin_server_ != nullptr) admin_server_->Shutdown(absl::ZeroDuration());
  if (http_ != nullptr) http_->Stop(absl::Seconds(2));
  // The core goes when no server can send it anything more.
  if (internal_server_ != nullptr) {
    if (core_ != nullptr) loop_.RunSync([&] { core_->LeaveWorkers(); });
    internal_server_->Shutdown(absl::Seconds(1));
  }
  checkers_.reset();  // posts nothing from here on
  loop_.RunSync([&] {
    gate_.reset();
    core_.reset();
  });
  if (spans_ != nullptr) spans_->Stop(kLastSpans);
  loop_.RunSync([&] {
    feed_.reset();
    spans_.reset();
  });
  http_.reset();
  loop_.Stop();
  dialer_.reset();
}

}  // namespace tandem::router
