// SPDX-License-Identifier: Apache-2.0
// `tandem chat [MODEL]`: a conversation with a running router, or with a
// server of its own. On a terminal with line editing, history and commands;
// on a pipe one message a line and nothing but answers.

#ifndef TANDEM_CLI_CHAT_CHAT_H_
#define TANDEM_CLI_CHAT_CHAT_H_

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "cli/chat/answer.h"
#include "cli/chat/conversation.h"
#include "cli/connect.h"
#include "cli/model_source.h"
#include "cli/sampling_flags.h"
#include "common/flags.h"

namespace tandem::chat {

struct ChatOptions {
  bool terminal = false;  // both ends of it
  bool colour = false;
  bool timings = false;
  double timeout_seconds = 600;
};

// What lines do. Asks through `ask`, writes to standard output.
class ChatSession {
 public:
  using AskFunction = std::function<absl::StatusOr<Answer>(
      const v1::GenerateRequest&, const ShowFunction&)>;

  ChatSession(ChatOptions options, cli::SamplingFlags sampling,
              AskFunction ask);

  // A message, or a command that begins with '/'. False: it was /exit.
  // Failures are told, and end nothing.
  bool HandleLine(const std::string& line);

  Conversation* conversation() { return &conversation_; }
  // Of the last failure that was told; what a pipe's exit code goes by.
  const absl::Status& last_status() const { return status_; }

 private:
  bool HandleCommand(const std::string& line);
  void Respond();
  void Set(const std::string& name, const std::string& value);
  void ShowStats();
  void Tell(const absl::Status& status);
  void Say(const std::string& line);  // dim, on a terminal
  absl::Status FillSampling(v1::GenerateRequest* request) const;

  const ChatOptions options_;
  const cli::SamplingFlags sampling_;       // of the command line
  std::map<std::string, std::string> set_;  // by /set, over it
  const AskFunction ask_;
  Conversation conversation_;
  absl::Status status_;
  std::string footer_;
  int answers_ = 0;
  int64_t prompt_tokens_ = 0, cached_tokens_ = 0, completion_tokens_ = 0;
};

class ChatCommand {
 public:
  void AddTo(CommandLine* line);
  absl::Status Run();

 private:
  cli::ModelSource source_;
  cli::ConnectFlags router_;
  TlsFlags tls_;
  cli::SamplingFlags sampling_;
  ChatOptions options_;
  std::string system_;
  std::string device_ = "auto";
  std::string history_;
  CommandLine* line_ = nullptr;
};

}  // namespace tandem::chat

#endif  // TANDEM_CLI_CHAT_CHAT_H_
