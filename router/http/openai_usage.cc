// SPDX-License-Identifier: Apache-2.0
#include "router/http/openai_usage.h"

#include <cmath>

namespace tandem::router {
namespace {

using nlohmann::json;

double Milliseconds(const google::protobuf::Duration& duration) {
  const double ms = static_cast<double>(duration.seconds()) * 1e3 +
                    static_cast<double>(duration.nanos()) / 1e6;
  return std::round(ms * 1e3) / 1e3;
}

}  // namespace

json UsageJson(const v1::Usage& usage) {
  return {
      {"prompt_tokens", usage.prompt_tokens()},
      {"completion_tokens", usage.completion_tokens()},
      {"total_tokens", usage.prompt_tokens() + usage.completion_tokens()},
      {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens()}}},
      {"completion_tokens_details",
       {{"reasoning_tokens", usage.reasoning_tokens()},
        {"accepted_prediction_tokens", usage.accepted_prediction_tokens()},
        {"rejected_prediction_tokens", usage.rejected_prediction_tokens()}}}};
}

json TimingsJson(const v1::GenerateDone& done) {
  const v1::Timings& timings = done.timings();
  return {
      {"queue_ms", Milliseconds(timings.queue())},
      {"prefill_ms", Milliseconds(timings.prefill())},
      {"handoff_ms", Milliseconds(timings.handoff())},
      {"handoff_exposed_ms", Milliseconds(timings.handoff_exposed())},
      {"time_to_first_token_ms", Milliseconds(timings.time_to_first_token())},
      {"decode_ms", Milliseconds(timings.decode())},
      {"total_ms", Milliseconds(timings.total())},
      {"kv_bytes", timings.kv_bytes()},
      {"way", timings.way()},
      {"retries", timings.retries()},
      {"preemptions", timings.preemptions()},
      {"prefill_worker", done.workers().prefill()},
      {"decode_worker", done.workers().decode()}};
}

json WorkJson(const v1::Work& work) {
  return {{"steps", work.steps()},
          {"positions_computed", work.positions_computed()},
          {"kv_rows", work.kv_rows()},
          {"positions_attended", work.positions_attended()},
          {"query_key_pairs", work.query_key_pairs()},
          {"weight_bytes_read", work.weight_bytes_read()},
          {"kv_bytes_read", work.kv_bytes_read()},
          {"kv_bytes_written", work.kv_bytes_written()},
          {"matrix_flops", work.matrix_flops()},
          {"attention_flops", work.attention_flops()}};
}

}  // namespace tandem::router
