// SPDX-License-Identifier: Apache-2.0
// The flags of `tandem generate` that say how tokens are chosen, when the
// output ends and where it is computed. Names are those of vLLM.

#ifndef TANDEM_CLI_SAMPLING_FLAGS_H_
#define TANDEM_CLI_SAMPLING_FLAGS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/flags.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::cli {

// Flags as they are parsed; only those that were given go into the request,
// so that the server's defaults stay the server's.
struct SamplingFlags {
  std::optional<double> temperature, top_p, min_p, typical_p;
  std::optional<double> repetition_penalty, presence_penalty, frequency_penalty;
  std::optional<double> max_time_seconds;
  std::optional<int64_t> n, best_of;
  std::optional<int64_t> beam_width;
  std::optional<double> length_penalty;
  std::string early_stopping = "false";
  std::optional<int64_t> top_k, seed, max_tokens, min_tokens, logprobs;
  std::optional<int64_t> prompt_logprobs;
  std::vector<std::string> logit_bias, allowed_token_ids, banned_token_ids;
  std::vector<std::string> bad_words;
  std::vector<std::string> stop;
  std::vector<std::string> stop_token_ids;
  std::string json_schema, json_schema_file, regex, grammar, grammar_file;
  std::string structural_tag;
  std::vector<std::string> choice;
  bool json_object = false;
  bool ignore_eos = false;
  bool include_stop = false;
  bool echo = false;
  bool bypass_prefix_cache = false;
  bool no_kv_cache = false;
  std::string attention;
  std::string cache_salt;
  std::string placement = "auto";
  std::string request_id;
  std::string model;
  std::string lora;

  void AddTo(CommandLine* line);
  // INVALID_ARGUMENT where a value is not of its flag's form.
  absl::Status Fill(v1::GenerateRequest* request) const;

 private:
  absl::Status FillAttention(v1::OutputOptions* output) const;
  absl::Status FillStructured(v1::GenerateRequest* request) const;
  absl::Status FillBeam(v1::GenerateRequest* request) const;
  absl::Status FillLogitRules(v1::SamplingOptions* sampling) const;
};

}  // namespace tandem::cli

#endif  // TANDEM_CLI_SAMPLING_FLAGS_H_
