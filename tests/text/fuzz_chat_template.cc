// SPDX-License-Identifier: Apache-2.0
// Any bytes as a chat template, over any messages, tools and variables: text
// within its bound, or an error that is the template's or the input's. Parts
// are divided by NUL: template, messages, tools, variables; flags come first.

#include <unistd.h>

#include <cstdio>
#include <string>

#include "tests/fuzz.h"
#include "text/chat_template.h"

namespace tandem::text {
namespace {

std::string_view Cut(std::string_view* rest) {
  const std::string_view part = rest->substr(0, rest->find('\0'));
  rest->remove_prefix(std::min(part.size() + 1, rest->size()));
  return part;
}

void CheckError(const absl::Status& status) {
  fuzz::Require(absl::IsInvalidArgument(status) || absl::IsNotFound(status) ||
                    absl::IsResourceExhausted(status),
                status.ToString().c_str());
  TANDEM_FUZZ_REQUIRE(!status.message().empty() &&
                      status.message().size() < 4000);
}

}  // namespace
}  // namespace tandem::text

TANDEM_FUZZ_TARGET(fuzz_chat_template)(const uint8_t* data, size_t size) {
  using namespace tandem::text;  // NOLINT(google-build-using-namespace)
  static const std::string* const folder = [] {
    auto* const path = new std::string("/tmp/tandem.template.XXXXXX");
    tandem::fuzz::Require(mkdtemp(path->data()) != nullptr, "a folder");
    std::atexit([] {
      std::remove((*folder + "/chat_template.jinja").c_str());
      rmdir(folder->c_str());
    });
    return path;
  }();
  tandem::fuzz::Input input(data, size);
  const int flags = input.Below(4);
  std::string_view rest = input.Rest();
  const std::string_view source = Cut(&rest);
  std::FILE* const file =
      std::fopen((*folder + "/chat_template.jinja").c_str(), "wb");
  std::fwrite(source.data(), 1, source.size(), file);
  std::fclose(file);
  // Of ten times the usual ones, so that slow inputs are found by time.
  const ChatTemplateLimits limits = {.fuel = 200'000};
  const auto chat = ChatTemplate::Load(*folder, limits);
  if (!chat.ok()) {
    CheckError(chat.status());
    return 0;
  }
  ChatTemplateInput values = {.messages_json = Cut(&rest),
                              .tools_json = Cut(&rest),
                              .extra_json = Cut(&rest),
                              .now_unix_s = 1'700'000'000,
                              .add_generation_prompt = (flags & 1) != 0,
                              .continue_final_message = (flags & 2) != 0};
  if (values.messages_json.empty()) {
    values.messages_json = R"([{"role": "user", "content": "Hi"}])";
  }
  const auto prompt = chat->Render(values);
  if (!prompt.ok()) {
    CheckError(prompt.status());
    return 0;
  }
  TANDEM_FUZZ_REQUIRE(prompt->size() <=
                      limits.max_output_bytes + 2 * size + 4096);
  return 0;
}
