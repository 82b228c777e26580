// SPDX-License-Identifier: Apache-2.0
// One call of an HTTP client as the core sees it: a ClientStream for each of
// its prompts, whose events become one answer. All of it on the router's loop.
//
// An error before the first event is an HTTP status; later it is an `error`
// event, after which the stream ends. One failing prompt ends the call and
// cancels the others, as does a client that goes.

#ifndef TANDEM_ROUTER_HTTP_OPENAI_CALL_H_
#define TANDEM_ROUTER_HTTP_OPENAI_CALL_H_

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/http/server.h"
#include "common/loop.h"
#include "router/core/dialer.h"
#include "router/http/openai_answer.h"

namespace tandem::router {

class OpenAiCall : public std::enable_shared_from_this<OpenAiCall> {
 public:
  // `headers` go out with every answer. Of an answer that is not streamed at
  // most `max_bytes` are gathered.
  OpenAiCall(Loop* loop, std::unique_ptr<HttpExchange> exchange,
             OpenAiAnswer answer, int prompts, bool stream, size_t max_bytes,
             std::vector<std::pair<std::string, std::string>> headers);
  ~OpenAiCall();

  // Begins to watch the client. Once, before any stream is asked for.
  void Start();
  // For the core; may be kept as long as it likes.
  std::unique_ptr<ClientStream> StreamOf(int prompt);
  // Whether there is nobody to answer any more.
  bool ended() const { return ended_; }

 private:
  class Part;

  void OnEvent(int prompt, const v1::GenerateResponse& event);
  void OnPartClosed(const absl::Status& status);
  void OnGone();
  void Fail(const absl::Status& status);
  void End();
  void CancelParts(const absl::Status& status);
  void Write(std::string bytes);
  void OnWritten();
  void Flush();
  std::string NextWrite();  // the first of unsent_
  size_t unsent() const { return unsent_.size() + events_in_flight_; }
  void KeepAlive();
  HttpResponse StreamHead() const;

  Loop* const loop_;
  const std::unique_ptr<HttpExchange> exchange_;
  OpenAiAnswer answer_;
  const bool stream_;
  const size_t max_bytes_;
  const std::vector<std::pair<std::string, std::string>> headers_;
  std::vector<Part*> parts_;  // null: not there yet, or gone
  int open_;                  // prompts that have not ended
  bool begun_ = false;        // the head has gone out
  bool ended_ = false;
  absl::Status over_;  // why, for prompts that come to the core yet
  std::deque<std::string> unsent_;  // events, while a write is in flight
  bool writing_ = false;
  size_t events_in_flight_ = 0;
  Timer keep_alive_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_HTTP_OPENAI_CALL_H_
