// SPDX-License-Identifier: Apache-2.0
// What was said so far, as OpenAI's messages.

#ifndef TANDEM_CLI_CHAT_CONVERSATION_H_
#define TANDEM_CLI_CHAT_CONVERSATION_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::chat {

struct Message {
  std::string role;
  std::string content;
};

class Conversation {
 public:
  // Empty: no system message.
  void set_system(std::string text) { system_ = std::move(text); }
  const std::string& system() const { return system_; }
  const std::vector<Message>& messages() const { return messages_; }

  void Add(std::string role, std::string content) {
    messages_.push_back({std::move(role), std::move(content)});
  }
  // Takes the last answer back, so that the last question is open again.
  // False: there is no question.
  bool ReopenLastQuestion();
  // Takes back a question that got no answer.
  void DropOpenQuestion();
  void Clear() { messages_.clear(); }

  void Fill(v1::Chat* chat) const;

  // {"messages": [{"role": ..., "content": ...}, ...]}, the system message
  // first.
  std::string ToJson() const;
  // Replaces everything. INVALID_ARGUMENT says what is wrong; then nothing
  // has changed.
  absl::Status FromJson(std::string_view text);

 private:
  std::string system_;
  std::vector<Message> messages_;
};

}  // namespace tandem::chat

#endif  // TANDEM_CLI_CHAT_CONVERSATION_H_
