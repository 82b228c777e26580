// SPDX-License-Identifier: Apache-2.0
#include "cli/chat/answer.h"

#include <signal.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "absl/strings/str_format.h"
#include "common/rpc/status.h"

namespace tandem::chat {
namespace {

std::atomic<bool> interrupted = false;

double Seconds(const google::protobuf::Duration& duration) {
  return static_cast<double>(duration.seconds()) +
         static_cast<double>(duration.nanos()) * 1e-9;
}

// Cancels the call at Ctrl-C, from a thread: TryCancel is no signal handler's
// business.
class Interrupt {
 public:
  explicit Interrupt(grpc::ClientContext* context) {
    interrupted = false;
    struct sigaction action {};
    action.sa_handler = [](int) { interrupted = true; };
    sigaction(SIGINT, &action, &before_);
    thread_ = std::thread([this, context] {
      while (!finished_ && !interrupted) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      if (interrupted) context->TryCancel();
    });
  }
  ~Interrupt() {
    finished_ = true;
    thread_.join();
    sigaction(SIGINT, &before_, nullptr);
  }
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

 private:
  struct sigaction before_ {};
  std::atomic<bool> finished_ = false;
  std::thread thread_;
};

}  // namespace

absl::StatusOr<Answer> Ask(v1::InferenceService::StubInterface* stub,
                           const v1::GenerateRequest& request,
                           double timeout_seconds, bool stoppable,
                           const ShowFunction& show) {
  grpc::ClientContext context;
  context.set_deadline(
      std::chrono::system_clock::now() +
      std::chrono::milliseconds(static_cast<int64_t>(timeout_seconds * 1e3)));
  Answer answer;
  std::optional<Interrupt> interrupt;
  if (stoppable) interrupt.emplace(&context);
  const auto reader = stub->Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    if (response.has_delta() && response.delta().index() == 0) {
      const v1::GenerateDelta& delta = response.delta();
      answer.text += delta.text();
      if (!delta.reasoning_content().empty()) {
        show(delta.reasoning_content(), /*reasoning=*/true);
      }
      if (!delta.text().empty()) show(delta.text(), /*reasoning=*/false);
    } else if (response.has_done()) {
      answer.done = response.done();
    }
  }
  const absl::Status status = rpc::FromGrpc(reader->Finish(), context);
  answer.interrupted = stoppable && interrupted && !status.ok();
  if (status.ok() || answer.interrupted) return answer;
  return status;
}

std::string Footer(const v1::GenerateDone& done) {
  const v1::Usage& usage = done.usage();
  std::string text = absl::StrFormat(
      "%d prompt tokens (%d cached), first after %.0f ms, %d tokens",
      usage.prompt_tokens(), usage.cached_tokens(),
      Seconds(done.timings().time_to_first_token()) * 1e3,
      usage.completion_tokens());
  const double per_token = Seconds(done.timings().time_per_output_token());
  if (per_token > 0) absl::StrAppendFormat(&text, " at %.1f/s", 1 / per_token);
  return text;
}

}  // namespace tandem::chat
