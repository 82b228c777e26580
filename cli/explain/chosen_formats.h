// SPDX-License-Identifier: Apache-2.0
// The formats that workers choose by their flags and the checkpoint's type
// (worker/bringup.cc does, which sees the tensors).

#ifndef TANDEM_CLI_EXPLAIN_CHOSEN_FORMATS_H_
#define TANDEM_CLI_EXPLAIN_CHOSEN_FORMATS_H_

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "cli/explain/counts.h"
#include "engine/checkpoint/model_config.h"
#include "kernels/types.h"

namespace tandem::explain {

// As the workers' flags.
struct FormatFlags {
  std::string dtype = "auto", quantization = "none", kv_cache_dtype = "auto";
};

// By its name here or in a config.json.
std::optional<kernels::DType> NamedType(std::string_view name);

// "bfloat16" or "bf16" and so on, of the weights' file beside the config.json
// of `model`, a directory or that file, or else as config.json says; empty:
// neither does. Errors are those of reading it.
absl::StatusOr<std::string> CheckpointType(const std::string& model);

// `checkpoint_type` as above. FormatsOf is still to be asked.
Formats ChooseFormats(const engine::ModelSpec& spec,
                      std::string_view checkpoint_type,
                      const FormatFlags& flags, bool gpu = false);

}  // namespace tandem::explain

#endif  // TANDEM_CLI_EXPLAIN_CHOSEN_FORMATS_H_
