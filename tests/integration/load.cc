// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/load.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace tandem::integration {
namespace {

// One record for each token; equal ones are so to the last bit of their floats.
template <typename Record>
std::string CompareRecords(
    const char* what, const google::protobuf::RepeatedPtrField<Record>& a,
    const google::protobuf::RepeatedPtrField<Record>& b) {
  constexpr size_t kShown = 300;
  for (int i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i].SerializeAsString() == b[i].SerializeAsString()) continue;
    return absl::StrCat(
        what, " of token ", i, ": ", a[i].ShortDebugString().substr(0, kShown),
        " expected, ", b[i].ShortDebugString().substr(0, kShown), " came");
  }
  if (a.size() == b.size()) return "";
  return absl::StrCat(what, " of ", a.size(), " tokens expected, of ", b.size(),
                      " came");
}

std::string CompareSequences(const v1::GeneratedSequence& a,
                             const v1::GeneratedSequence& b) {
  std::string wrong =
      CompareRecords("log probabilities", a.logprobs(), b.logprobs());
  if (!wrong.empty()) return wrong;
  wrong = CompareRecords("attention", a.attention(), b.attention());
  if (!wrong.empty()) return wrong;
  const std::string x = a.finished().ShortDebugString();
  const std::string y = b.finished().ShortDebugString();
  return x == y ? "" : absl::StrCat("end: ", x, " expected, ", y, " came");
}

// What comes along with tokens that agree.
std::string CompareRest(const Expectation& expected, const Outcome& outcome) {
  std::string wrong = CompareRecords("prompt's log probabilities",
                                     expected.prompt_logprobs.tokens(),
                                     outcome.prompt_logprobs.tokens());
  if (!wrong.empty()) return wrong;
  for (const auto& [index, sequence] : expected.sequences) {
    const auto other = outcome.sequences.find(index);
    if (other == outcome.sequences.end()) {
      return absl::StrCat("sequence ", index, " is missing");
    }
    wrong = CompareSequences(sequence, other->second);
    if (!wrong.empty()) return absl::StrCat("sequence ", index, ", ", wrong);
  }
  return "";
}

// Who had a part in it.
std::string Way(const Outcome& outcome) {
  return absl::StrCat("prefill ", outcome.done.workers().prefill(), ", decode ",
                      outcome.done.workers().decode(), ", retries ",
                      outcome.done.timings().retries());
}

}  // namespace

std::vector<Expectation> RunAlone(
    Cluster* cluster, const std::vector<v1::GenerateRequest>& requests) {
  std::vector<Expectation> expectations;
  for (const v1::GenerateRequest& request : requests) {
    const Outcome outcome = cluster->Generate(request);
    expectations.push_back({request, outcome.token_ids, outcome.text,
                            outcome.sequences, outcome.prompt_logprobs});
  }
  return expectations;
}

std::string Compare(const Expectation& expected, const Outcome& outcome) {
  if (!outcome.status.ok()) return outcome.status.ToString();
  if (outcome.started != 1 || outcome.ends != 1 ||
      outcome.finished != static_cast<int>(outcome.sequences.size())) {
    return absl::StrCat("ended OK with ", outcome.started, " started, ",
                        outcome.finished, " finished, ", outcome.ends, " done");
  }
  const auto& a = expected.token_ids;
  const auto& b = outcome.token_ids;
  const auto [x, y] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  if (x != a.end() || y != b.end()) {
    return absl::StrCat(
        "tokens differ at ", x - a.begin(), ": ",
        x != a.end() ? absl::StrCat(*x) : "the end", " expected, ",
        y != b.end() ? absl::StrCat(*y) : "the end", " came; ", Way(outcome));
  }
  if (expected.text != outcome.text) return "tokens agree, texts differ";
  const std::string wrong = CompareRest(expected, outcome);
  return wrong.empty() ? "" : absl::StrCat(wrong, "; ", Way(outcome));
}

Served Summary(const Outcome& outcome) {
  Served served;
  served.sent = outcome.sent;
  served.ended = outcome.ended;
  served.code = outcome.status.code();
  served.tokens = static_cast<int>(outcome.token_ids.size());
  if (!outcome.deltas.empty()) served.first = outcome.deltas[0];
  for (size_t i = 1; i < outcome.deltas.size(); ++i) {
    const auto gap = outcome.deltas[i] - outcome.deltas[i - 1];
    if (gap <= served.gap) continue;
    served.gap = gap;
    served.gap_ended = outcome.deltas[i];
  }
  return served;
}

Load::Load(Cluster* cluster, const std::vector<Expectation>* expectations,
           int streams, Again again)
    : cluster_(cluster),
      expectations_(expectations),
      again_(again),
      running_(streams),
      completed_(static_cast<size_t>(streams)),
      calls_(static_cast<size_t>(streams)) {
  for (int i = 0; i < cluster_->routers(); ++i) {
    (void)cluster_->Client(i);  // makes the channel, before threads share it
  }
  for (int i = 0; i < streams; ++i)
    threads_.emplace_back([this, i] { Run(i); });
}

bool Load::MayAgain(const Outcome& outcome, TimePoint first_sent) const {
  if (again_ == Again::kNone || !absl::IsUnavailable(outcome.status)) {
    return false;
  }
  if (again_ == Again::kAll) return true;
  return outcome.started == 0 &&
         outcome.ended - first_sent < std::chrono::seconds(5);
}

std::optional<Outcome> Load::Call(int stream, int router,
                                  const Expectation& expected) {
  grpc::ClientContext context;
  Cluster::SetDeadline(&context);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (cancelled_) return std::nullopt;
    calls_[static_cast<size_t>(stream)] = &context;
  }
  Outcome outcome = cluster_->Generate(expected.request, &context, router);
  std::lock_guard<std::mutex> lock(mutex_);
  calls_[static_cast<size_t>(stream)] = nullptr;
  served_.push_back(Summary(outcome));
  return outcome;
}

void Load::Run(int stream) {
  int router = stream % cluster_->routers();
  std::optional<TimePoint> first_sent;  // of a call that is made again
  size_t i = 0;
  while (!stop_) {
    if (!first_sent) {
      i = static_cast<size_t>(next_++) % expectations_->size();
    }
    const Expectation& expected = (*expectations_)[i];
    const std::optional<Outcome> called = Call(stream, router, expected);
    if (!called) break;
    const Outcome& outcome = *called;
    if (!first_sent) first_sent = outcome.sent;
    if (MayAgain(outcome, *first_sent)) {
      ++unavailable_;
      router = (router + 1) % cluster_->routers();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      continue;
    }
    first_sent.reset();
    const std::string wrong = Compare(expected, outcome);
    retries_ += outcome.done.timings().retries();
    ++completed_[static_cast<size_t>(stream)];
    if (wrong.empty()) continue;
    wrong_count_ += outcome.status.ok();
    if (++fault_count_ <= 5) {
      std::lock_guard<std::mutex> lock(mutex_);
      absl::StrAppend(&faults_, "request ", i, ": ", wrong, "\n");
    }
  }
  --running_;
}

int64_t Load::completed() const {
  return std::accumulate(completed_.begin(), completed_.end(), int64_t{0});
}

bool Load::WaitForEveryStream(std::chrono::seconds timeout) const {
  const auto end = std::chrono::steady_clock::now() + timeout;
  const std::vector<int64_t> before(completed_.begin(), completed_.end());
  for (size_t i = 0; i < before.size(); ++i) {
    while (completed_[i] == before[i] && fault_count_ == 0) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  return true;
}

bool Load::Finish(std::chrono::seconds timeout) {
  stop_ = true;
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (running_ > 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const bool in_time = running_ == 0;
  if (!in_time) {
    hung_ = running_;
    std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = true;
    for (grpc::ClientContext* const call : calls_) {
      if (call != nullptr) call->TryCancel();
    }
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  return in_time;
}

std::vector<Served> Load::served() {
  std::lock_guard<std::mutex> lock(mutex_);
  return served_;
}

std::string Load::faults() {
  std::lock_guard<std::mutex> lock(mutex_);
  return faults_;
}

}  // namespace tandem::integration
