// SPDX-License-Identifier: Apache-2.0
#include "text/hub.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "text/ffi.h"
#include "text/files.h"

namespace tandem::text {
namespace {

// The first of these that is set and not empty.
std::string Environment(std::initializer_list<const char*> names) {
  for (const char* const name : names) {
    const char* const value = std::getenv(name);
    if (value != nullptr && *value != '\0') return value;
  }
  return "";
}

bool IsTrue(std::string value) {
  std::transform(value.begin(), value.end(), value.begin(),
                 [](unsigned char c) { return std::toupper(c); });
  return value == "1" || value == "ON" || value == "YES" || value == "TRUE";
}

std::string Stripped(const std::string& text) {
  const char* const space = " \t\r\n";
  const size_t begin = text.find_first_not_of(space);
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(space) - begin + 1);
}

constexpr size_t kMaxTokenBytes = 4096;

std::string TokenFrom(const std::string& path) {
  return Stripped(ReadModelFile(path, kMaxTokenBytes).value_or(""));
}

void Hear(void* context, const char* line, size_t length, uint64_t done,
          uint64_t total) {
  const auto* const listener = static_cast<const HubListener*>(context);
  if (line != nullptr) {
    listener->say(std::string_view(line, length));
  } else {
    listener->bytes(static_cast<int64_t>(done), static_cast<int64_t>(total));
  }
}

}  // namespace

HubOptions HubOptionsFromEnvironment() {
  HubOptions options;
  std::string home = Environment({"HF_HOME"});
  if (home.empty()) {
    const std::string cache = Environment({"XDG_CACHE_HOME"});
    home = (cache.empty() ? Environment({"HOME"}) + "/.cache" : cache) +
           "/huggingface";
  }
  options.cache = Environment({"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"});
  if (options.cache.empty()) options.cache = home + "/hub";
  options.token = Stripped(Environment({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}));
  if (options.token.empty() &&
      !IsTrue(Environment({"HF_HUB_DISABLE_IMPLICIT_TOKEN"}))) {
    const std::string path = Environment({"HF_TOKEN_PATH"});
    options.token = TokenFrom(path.empty() ? home + "/token" : path);
  }
  const std::string endpoint = Environment({"HF_ENDPOINT"});
  if (!endpoint.empty()) options.endpoint = endpoint;
  options.offline =
      IsTrue(Environment({"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}));
  return options;
}

absl::StatusOr<std::string> FetchModel(const std::string& repo,
                                       const HubOptions& options,
                                       const HubListener& listener) {
  const ffi::FetchArguments arguments{ffi::Borrow(repo),
                                      ffi::Borrow(options.revision),
                                      ffi::Borrow(options.endpoint),
                                      ffi::Borrow(options.cache),
                                      ffi::Borrow(options.token),
                                      options.offline,
                                      options.config_only};
  HubListener own = listener;
  std::string path, error;
  const int32_t kind = ffi::tandem_text_hub_fetch(
      &arguments, {&own, Hear}, ffi::Into(path), ffi::Into(error));
  if (kind != 0) return ffi::ToStatus(kind, "", error);
  return path;
}

}  // namespace tandem::text
