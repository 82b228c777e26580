// SPDX-License-Identifier: Apache-2.0
// Chat templates: messages to prompt, as `transformers` renders them.
//
//   auto chat = ChatTemplate::Load("models/tales");
//   auto prompt = chat->Render({.messages_json = R"([{"role": "user",
//                               "content": "Hello"}])", .now_unix_s = now});
//   auto ids = tokenizer.Encode(*prompt, /*add_special_tokens=*/false);
//
// Templates are programs that come with a model, so they run in bounds:
// instructions (fuel), bytes made, depth, size of the result. Nothing outside
// the template and its inputs can be reached.

#ifndef TANDEM_TEXT_CHAT_TEMPLATE_H_
#define TANDEM_TEXT_CHAT_TEMPLATE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tandem::text {

namespace ffi {
struct ChatTemplateHandle;
}  // namespace ffi

struct ChatTemplateLimits {
  // Instructions for one render. Real templates take 50 to 200 for a message;
  // gpt-oss' looks from each call at all messages behind it, which comes to
  // 5'000'000 for 600 calls and their results.
  uint64_t fuel = 10'000'000;
  // Bytes of the prompt, beyond twice the bytes of the input.
  uint64_t max_output_bytes = 64 << 10;
  // Bytes of all values made on the way, beyond 64 times the input.
  uint64_t max_work_bytes = 32 << 20;
  // Bytes of one template's source.
  uint64_t max_template_bytes = 256 << 10;
};

struct ChatTemplateInput {
  // A JSON list of objects, as the template expects them (role, content, ...).
  std::string_view messages_json;
  // A JSON list, or empty for none.
  std::string_view tools_json = {};
  // A JSON object of further variables (chat_template_kwargs), or empty.
  std::string_view extra_json = {};
  // What `strftime_now` tells, in UTC; from the caller's clock.
  int64_t now_unix_s = 0;
  // Ends the prompt with the start of an assistant message.
  bool add_generation_prompt = true;
  // Ends the prompt within the last message, for the model to go on with it;
  // excludes add_generation_prompt.
  bool continue_final_message = false;
};

// Const methods may be called from many threads at once.
class ChatTemplate {
 public:
  // Reads chat_template.jinja, else `chat_template` (a string, or a list of
  // {name, template}) of tokenizer_config.json, else of chat_template.json,
  // which models that see too may have, and compiles. Beside it come those of
  // additional_chat_templates/NAME.jinja, by name. A model without a template
  // is NOT_FOUND; a broken one is INVALID_ARGUMENT with file, field and line.
  // `file`, where not empty, is read in place of all of them, and must exist.
  static absl::StatusOr<ChatTemplate> Load(const std::string& model_dir,
                                           const ChatTemplateLimits& limits,
                                           const std::string& file = "");
  static absl::StatusOr<ChatTemplate> Load(const std::string& model_dir) {
    return Load(model_dir, ChatTemplateLimits());
  }

  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  // With tools, a template named "tool_use" is taken where there is one, else
  // "default". INVALID_ARGUMENT: input of the wrong form, or the template
  // refused it (its raise_exception, with that message). RESOURCE_EXHAUSTED:
  // a limit was reached.
  absl::StatusOr<std::string> Render(const ChatTemplateInput& input) const;

  // The source of the template that Render takes with or without tools; empty
  // where there is none for them.
  std::string Source(bool has_tools) const;

 private:
  struct Free {
    void operator()(ffi::ChatTemplateHandle* handle) const;
  };

  explicit ChatTemplate(ffi::ChatTemplateHandle* handle) : handle_(handle) {}

  std::unique_ptr<ffi::ChatTemplateHandle, Free> handle_;
};

}  // namespace tandem::text

#endif  // TANDEM_TEXT_CHAT_TEMPLATE_H_
