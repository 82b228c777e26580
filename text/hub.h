// SPDX-License-Identifier: Apache-2.0
// Models by their id on a Hugging Face hub: fetched into the cache that
// Python's huggingface_hub shares, under the same environment variables.

#ifndef TANDEM_TEXT_HUB_H_
#define TANDEM_TEXT_HUB_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tandem::text {

struct HubOptions {
  std::string revision = "main";  // branch, tag or commit
  std::string endpoint = "https://huggingface.co";
  std::string cache;  // directory; made if it is not there
  std::string token;  // empty: none
  bool offline = false;
  bool config_only = false;  // config.json and nothing else
};

// HF_HOME, HF_HUB_CACHE, HF_TOKEN (or the file HF_TOKEN_PATH, by default
// HF_HOME/token), HF_ENDPOINT and HF_HUB_OFFLINE, as huggingface_hub reads
// them.
HubOptions HubOptionsFromEnvironment();

// Both are called on the caller's thread.
struct HubListener {
  std::function<void(std::string_view line)> say;  // a line to show
  std::function<void(int64_t done, int64_t total)> bytes;
};

// The folder of the model's snapshot: config, tokenizer, chat template and
// safetensors. Downloads what is missing and goes on where an earlier download
// was cut off; sizes are checked, and the SHA-256 of weights. Without a
// connection an earlier snapshot will do. Blocks.
//
// NOT_FOUND, PERMISSION_DENIED (gated, a bad token, a cache that cannot be
// written), UNAVAILABLE (no connection and nothing cached), RESOURCE_EXHAUSTED
// (disk), INVALID_ARGUMENT (no model id, an answer that makes no sense): each
// says what to do.
absl::StatusOr<std::string> FetchModel(const std::string& repo,
                                       const HubOptions& options,
                                       const HubListener& listener);

}  // namespace tandem::text

#endif  // TANDEM_TEXT_HUB_H_
