// SPDX-License-Identifier: Apache-2.0
// Row "cancellation": requests that end before their time, in each phase that
// the router sees them in, by each way that a client has.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/rpc/status.h"
#include "tests/figures/figures.h"

namespace tandem::figures {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

enum class Way { kCancel, kDeadline, kDisconnect };
constexpr int kPhases = 4;
constexpr double kStopped = 0.25;  // 200 ms, and what a worker takes to say it
constexpr const char* kPhaseNames[kPhases] = {"queued", "prefill", "handoff",
                                              "decode"};

int PhaseOf(const std::string& name) {
  if (name == "queued") return 0;
  if (name == "opening" || name == "prefilling") return 1;
  if (name == "handing_over") return 2;
  return name == "decoding" ? 3 : -1;
}

class CancellationRow : public Row {
 protected:
  // A request that some client waits for.
  struct Open {
    std::function<void()> cancel;
    int phase = -1;  // last seen
    bool cancelled = false;
  };

  void RunWay(Way way);
  void Burst(int count);
  void Client(Way way, int client);
  // Returns when the request has ended.
  void CallGrpc(Way way, const std::string& id, const std::string& prompt);
  void CallHttp(const std::string& id, const std::string& prompt);
  // Looks at all in flight once, and ends those in phases that are wanted.
  void Look(Way way);
  bool Enough();
  milliseconds DrawDeadline();
  // Seconds until no request and nothing on any worker is left.
  double Quiet();
  v1::RouterCounters Counters();

  std::mutex mutex_;
  std::map<std::string, Open> open_;
  // Ages at which requests were seen in a phase, in ms.
  std::vector<double> ages_[kPhases];
  int hits_[kPhases] = {};
  int wanted_ = 0;
  std::atomic<int> ended_ = 0;     // as their clients wanted
  std::atomic<int> finished_ = 0;  // before that
  std::atomic<int> failed_ = 0;    // otherwise
  std::atomic<bool> stop_ = false;
  std::string failure_;
};

v1::RouterCounters CancellationRow::Counters() {
  const auto state = cluster_->State(/*router=*/0, /*requests=*/false);
  return state.ok() ? state->counters() : v1::RouterCounters();
}

bool CancellationRow::Enough() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const int hits : hits_) {
    if (hits < wanted_) return false;
  }
  return true;
}

// Of ages that were seen in the phase that lacks most.
milliseconds CancellationRow::DrawDeadline() {
  std::lock_guard<std::mutex> lock(mutex_);
  int rarest = 0;
  for (int p = 0; p < kPhases; ++p) {
    if (hits_[p] < hits_[rarest]) rarest = p;
  }
  const std::vector<double>& ages = ages_[rarest];
  const auto any = milliseconds(5 + random_.Below(800));
  if (ages.empty() || random_.Below(4) == 0) return any;
  return milliseconds(1 + static_cast<int>(ages[random_.Below(ages.size())]));
}

void CancellationRow::CallGrpc(Way way, const std::string& id,
                               const std::string& prompt) {
  v1::GenerateRequest request = integration::TextRequest(prompt, 300);
  request.set_placement(v1::PLACEMENT_SPLIT);
  request.mutable_stopping()->set_ignore_eos(true);
  request.set_request_id(id);
  grpc::ClientContext context;
  if (way == Way::kDeadline) {
    context.set_deadline(std::chrono::system_clock::now() + DrawDeadline());
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    open_[id].cancel = [&context] { context.TryCancel(); };
  }
  const integration::Outcome outcome = cluster_->Generate(request, &context);
  std::lock_guard<std::mutex> lock(mutex_);
  const int phase = open_[id].phase;
  open_.erase(id);
  if (outcome.status.ok()) {
    ++finished_;
  } else if (outcome.status.code() == (way == Way::kDeadline
                                           ? absl::StatusCode::kDeadlineExceeded
                                           : absl::StatusCode::kCancelled)) {
    ++ended_;
    if (way == Way::kDeadline && phase >= 0) ++hits_[phase];
  } else if (++failed_ == 1) {
    failure_ = outcome.status.ToString();
  }
}

void CancellationRow::CallHttp(const std::string& id,
                               const std::string& prompt) {
  const std::string body = nlohmann::json{
      {"prompt", prompt},
      {"max_tokens", 300},
      {"temperature", 0},
      {"ignore_eos", true},
      {"stream", true}}.dump();
  const std::string request = absl::StrCat(
      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close"
      "\r\nContent-Type: application/json\r\nX-Request-Id: ",
      id, "\r\nContent-Length: ", body.size(), "\r\n\r\n", body);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(cluster_->http_port()));
  const bool connected =
      connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    open_[id].cancel = [fd] { shutdown(fd, SHUT_RDWR); };
  }
  std::string answer;
  if (connected) {
    (void)!send(fd, request.data(), request.size(), MSG_NOSIGNAL);
    char buffer[4096];
    ssize_t count;
    while ((count = recv(fd, buffer, sizeof buffer, 0)) > 0) {
      answer.append(buffer, static_cast<size_t>(count));
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const bool cancelled = open_[id].cancelled;
  open_.erase(id);
  close(fd);
  if (cancelled) {
    ++ended_;
  } else if (answer.find("[DONE]") != std::string::npos) {
    ++finished_;
  } else if (++failed_ == 1) {
    failure_ = answer.substr(0, 400);
  }
}

void CancellationRow::Client(Way way, int client) {
  const std::string& words =
      expectations_[static_cast<size_t>(client) % expectations_.size()]
          .request.text();
  for (int round = 0; !stop_; ++round) {
    const std::string id =
        absl::StrCat("w", static_cast<int>(way), "-", client, "-", round);
    // None begins as another does.
    const std::string prompt = absl::StrCat("Story ", id, " ", words);
    if (way == Way::kDisconnect) {
      CallHttp(id, prompt);
    } else {
      CallGrpc(way, id, prompt);
    }
  }
}

void CancellationRow::Look(Way way) {
  const auto state = cluster_->State();
  if (!state.ok()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const v1::RequestStatus& request : state->in_flight()) {
    const int phase = PhaseOf(request.phase());
    const auto it = open_.find(request.request_id());
    if (it == open_.end() || phase < 0 || it->second.cancelled) continue;
    it->second.phase = phase;
    if (way == Way::kDeadline) {
      std::vector<double>& ages = ages_[phase];
      const double age = 1e3 * static_cast<double>(request.age().seconds()) +
                         static_cast<double>(request.age().nanos()) / 1e6;
      if (ages.size() < 1000) {
        ages.push_back(age);
      } else {
        ages[random_.Below(ages.size())] = age;
      }
      continue;
    }
    // Who decodes keeps others waiting.
    if (hits_[phase] >= wanted_ && phase != 3) continue;
    ++hits_[phase];
    it->second.cancelled = true;
    it->second.cancel();
  }
}

double CancellationRow::Quiet() {
  const TimePoint since = Clock::now();
  while (Clock::now() < since + seconds(20)) {
    const auto state = cluster_->State(/*router=*/0, /*requests=*/false);
    int left = state.ok() ? state->requests().total() : 1;
    for (int i = 0; state.ok() && i < state->workers_size(); ++i) {
      const v1::WorkerLoad& load = state->workers(i).load();
      left += load.streams() + load.tickets() + load.running() +
              load.waiting() + load.blocks_live() + load.blocks_reserved();
    }
    if (left == 0) return Served::Seconds(Clock::now() - since);
    std::this_thread::sleep_for(milliseconds(20));
  }
  return 20;
}

void CancellationRow::RunWay(Way way) {
  wanted_ = Sized(250, 15);
  for (int p = 0; p < kPhases; ++p) hits_[p] = 0;
  ended_ = finished_ = failed_ = 0;
  stop_ = false;
  const v1::RouterCounters before = Counters();
  std::vector<std::thread> clients;
  for (int i = 0; i < 48; ++i) {
    clients.emplace_back([this, way, i] { Client(way, i); });
  }
  const TimePoint end = Clock::now() + seconds(Sized(240, 15));
  while (!Enough() && Clock::now() < end) Look(way);
  stop_ = true;
  {  // the rest at once
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [id, open] : open_) {
      if (open.cancelled || way == Way::kDeadline) continue;
      open.cancelled = true;
      open.cancel();
    }
  }
  double quiet = way == Way::kDeadline ? 0 : Quiet();
  for (std::thread& client : clients) client.join();
  if (way == Way::kDeadline) quiet = Quiet();
  const v1::RouterCounters now = Counters();
  const int64_t cancelled = now.cancelled() - before.cancelled();
  const int64_t expired = now.failed() - before.failed();
  const int64_t router = cancelled + (way == Way::kDeadline ? expired : 0);
  // Some end before their requests come to the router: it knows of all others.
  // And some that it finished had ended for their clients a moment before.
  const int64_t answered = now.finished_ok() - before.finished_ok();
  const int64_t known = router + answered;
  int seen = 0;
  for (const int hits : hits_) seen += hits;
  const bool equal = known == now.accepted() - before.accepted() &&
                     answered >= finished_ && known <= ended_ + finished_ &&
                     known >= seen;
  static const char* const kNames[] = {"TryCancel", "a deadline",
                                       "a disconnect"};
  std::string phases;
  for (int p = 0; p < kPhases; ++p) {
    absl::StrAppend(&phases, p > 0 ? ", " : "", kPhaseNames[p], " ", hits_[p]);
  }
  // A worker says within 50 ms that it is free.
  Tell(
      absl::StrFormat("%d times each of queued, prefill, handoff and decode "
                      "ended by %s: the router counts all that came to "
                      "it, all stopped in 200 ms",
                      wanted_, kNames[static_cast<int>(way)]),
      absl::StrFormat(
          "%s; clients ended %d, the router %d; %d had finished, for "
          "the router %d; %d failed; workers said that they were "
          "free within %.0f ms, which takes them up to 50%s",
          phases, ended_.load(), router, finished_.load(), answered,
          failed_.load(), quiet * 1e3, failure_.empty() ? "" : "; " + failure_),
      failed_ == 0 && equal, Enough() && quiet <= kStopped);
}

// In which most requests wait.
integration::ClusterOptions Crowded() {
  return {.prefill = 2,
          .decode = 2,
          .router_arguments = {"--max-requests", "4096", "--max-queued", "4096",
                               "--queue-wait", "60s"},
          .worker_arguments = {"--max-num-batched-tokens", "64",
                               "--handoff-slab-bytes", "4KiB"},
          .decode_arguments = {"--max-requests", "8"}};
}

// None of them has a thread of its own.
void CancellationRow::Burst(int count) {
  struct Call {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientAsyncReader<v1::GenerateResponse>> reader;
    grpc::Status status;
  };
  grpc::CompletionQueue queue;
  // More streams than a connection takes.
  std::vector<std::unique_ptr<v1::InferenceService::Stub>> stubs;
  for (int i = 0; i < 4; ++i) {
    stubs.push_back(v1::InferenceService::NewStub(
        cluster_->Channel(cluster_->grpc_port())));
  }
  const v1::RouterCounters before = Counters();
  std::vector<Call> calls(static_cast<size_t>(count));
  for (size_t i = 0; i < calls.size(); ++i) {
    v1::GenerateRequest request =
        integration::TextRequest(absl::StrCat("Story ", i, " of many."), 300);
    request.mutable_stopping()->set_ignore_eos(true);
    request.set_placement(v1::PLACEMENT_SPLIT);
    calls[i].reader = stubs[i % stubs.size()]->PrepareAsyncGenerate(
        &calls[i].context, request, &queue);
    calls[i].reader->StartCall(nullptr);
  }
  const auto accepted = [&] {
    return Counters().accepted() - before.accepted();
  };
  const TimePoint end = Clock::now() + seconds(60);
  while (accepted() < count && Clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  const int64_t taken = accepted();
  for (Call& call : calls) call.context.TryCancel();
  const double quiet = Quiet();
  for (Call& call : calls) call.reader->Finish(&call.status, &call);
  int ended = 0, cancelled = 0;
  void* tag;
  bool ok;
  while (ended < count && queue.Next(&tag, &ok)) {
    if (tag == nullptr) continue;
    ++ended;
    cancelled += static_cast<Call*>(tag)->status.error_code() ==
                 grpc::StatusCode::CANCELLED;
  }
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  const v1::RouterCounters now = Counters();
  const int64_t router = now.cancelled() - before.cancelled();
  const int64_t finished = now.finished_ok() - before.finished_ok();
  Tell(absl::StrFormat("%d in one burst, then cancelled at once: all counted, "
                       "all stopped in 200 ms",
                       count),
       absl::StrFormat("%d taken; clients cancelled %d, the router %d, %d had "
                       "finished; workers free within %.0f ms",
                       taken, cancelled, router, finished, quiet * 1e3),
       taken == count && router + finished == count && quiet < 20,
       quiet <= kStopped);
}

TEST_F(CancellationRow, Holds) {
  Begin(Crowded(), Requests(48, seed_, 40, 120, 1));
  if (HasFatalFailure()) return;
  RunWay(Way::kCancel);
  RunWay(Way::kDeadline);
  RunWay(Way::kDisconnect);
  TellWhatIsLeft();
}

TEST_F(CancellationRow, HoldsInABurst) {
  Begin(Crowded(), Requests(48, seed_, 40, 120, 1));
  if (HasFatalFailure()) return;
  Burst(Sized(2000, 500));
  TellWhatIsLeft();
}

}  // namespace
}  // namespace tandem::figures
