// SPDX-License-Identifier: Apache-2.0
#include "text/chat_template.h"

#include <filesystem>
#include <map>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/failpoint.h"
#include "text/ffi.h"
#include "text/files.h"
#include "text/tokenizer.h"

namespace tandem::text {
namespace {

constexpr size_t kMaxAdditional = 64;

// NAME.jinja of that folder, by name.
absl::StatusOr<std::map<std::string, std::string>> ReadAdditional(
    const std::string& model_dir) {
  const std::string folder = model_dir + "/additional_chat_templates";
  std::map<std::string, std::string> templates;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator();
       entry.increment(error)) {
    const std::filesystem::path& path = entry->path();
    std::error_code unknown;
    if (path.extension() != ".jinja" || !entry->is_regular_file(unknown)) {
      continue;
    }
    if (templates.size() == kMaxAdditional) {
      return absl::InvalidArgumentError(
          absl::StrCat(folder, ": more than ", kMaxAdditional, " templates"));
    }
    auto source = ReadModelFile(path.string(), kMaxConfigBytes);
    if (!source.ok()) return source.status();
    templates.emplace(path.stem().string(), *std::move(source));
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    return absl::InvalidArgumentError(
        absl::StrCat(folder, ": ", error.message()));
  }
  return templates;
}

}  // namespace

void ChatTemplate::Free::operator()(ffi::ChatTemplateHandle* handle) const {
  ffi::tandem_text_template_free(handle);
}

ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

absl::StatusOr<ChatTemplate> ChatTemplate::Load(
    const std::string& model_dir, const ChatTemplateLimits& limits,
    const std::string& file) {
  if (TANDEM_FAILPOINT("load.template", "fail")) return failpoint::Error();
  auto config = ReadOptionalModelFile(model_dir + "/tokenizer_config.json",
                                      kMaxConfigBytes);
  if (!config.ok()) return config.status();
  auto special_map = ReadOptionalModelFile(
      model_dir + "/special_tokens_map.json", kMaxConfigBytes);
  if (!special_map.ok()) return special_map.status();
  auto jinja = file.empty()
                   ? ReadOptionalModelFile(model_dir + "/chat_template.jinja",
                                           kMaxConfigBytes)
                   : ReadModelFile(file, kMaxConfigBytes);
  if (!jinja.ok()) return jinja.status();
  auto processor = file.empty()
                       ? ReadOptionalModelFile(
                             model_dir + "/chat_template.json", kMaxConfigBytes)
                       : "";
  if (!processor.ok()) return processor.status();
  std::map<std::string, std::string> additional;
  if (file.empty()) {
    auto read = ReadAdditional(model_dir);
    if (!read.ok()) return read.status();
    additional = *std::move(read);
  }
  std::vector<ffi::NamedTemplate> named;
  named.reserve(additional.size());
  for (const auto& [name, source] : additional) {
    named.push_back({.name = ffi::Borrow(name), .source = ffi::Borrow(source)});
  }
  ffi::ChatTemplateHandle* handle = nullptr;
  std::string error;
  const int32_t kind = ffi::tandem_text_template_new(
      ffi::Borrow(*config), ffi::Borrow(*special_map), ffi::Borrow(*jinja),
      ffi::Borrow(*processor), named.data(), named.size(),
      {.fuel = limits.fuel,
       .max_output_bytes = limits.max_output_bytes,
       .max_work_bytes = limits.max_work_bytes,
       .max_template_bytes = limits.max_template_bytes},
      &handle, ffi::Into(error));
  if (kind != 0) {
    return ffi::ToStatus(kind, file.empty() ? model_dir : file, error);
  }
  return ChatTemplate(handle);
}

absl::StatusOr<std::string> ChatTemplate::Render(
    const ChatTemplateInput& input) const {
  const ffi::RenderArguments arguments = {
      .messages_json = ffi::Borrow(input.messages_json),
      .tools_json = ffi::Borrow(input.tools_json),
      .extra_json = ffi::Borrow(input.extra_json),
      .now_unix_s = input.now_unix_s,
      .add_generation_prompt = input.add_generation_prompt,
      .continue_final_message = input.continue_final_message,
  };
  std::string prompt;
  std::string error;
  const int32_t kind = ffi::tandem_text_template_render(
      handle_.get(), &arguments, ffi::Into(prompt), ffi::Into(error));
  if (kind != 0) return ffi::ToStatus(kind, "", error);
  return prompt;
}

std::string ChatTemplate::Source(bool has_tools) const {
  std::string source;
  ffi::tandem_text_template_source(handle_.get(), has_tools, ffi::Into(source));
  return source;
}

}  // namespace tandem::text
