// SPDX-License-Identifier: Apache-2.0
// One answer: streamed to the screen, stopped by Ctrl-C, with what it took.

#ifndef TANDEM_CLI_CHAT_ANSWER_H_
#define TANDEM_CLI_CHAT_ANSWER_H_

#include <functional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "cli/connect.h"
#include "tandem/v1/inference.grpc.pb.h"

namespace tandem::chat {

struct Answer {
  std::string text;
  bool interrupted = false;  // by Ctrl-C; the rest is not there
  v1::GenerateDone done;     // of an answer that was not interrupted
};

// `reasoning`: what comes before the answer, of models that do that.
using ShowFunction = std::function<void(std::string_view text, bool reasoning)>;

// `show` gets text as it comes. With `stoppable` SIGINT stops the answer while
// this runs, and does afterwards what it did before.
absl::StatusOr<Answer> Ask(v1::InferenceService::StubInterface* stub,
                           const v1::GenerateRequest& request,
                           double timeout_seconds, bool stoppable,
                           const ShowFunction& show);

// "57 prompt tokens (48 cached), first after 12 ms, 128 tokens at 85.3/s".
std::string Footer(const v1::GenerateDone& done);

}  // namespace tandem::chat

#endif  // TANDEM_CLI_CHAT_ANSWER_H_
