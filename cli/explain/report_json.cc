// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>

#include "cli/explain/report.h"

namespace tandem::explain {
namespace {

using json = nlohmann::ordered_json;
using kernels::DType;

json WorkJson(const Work& work) {
  return {{"kv_rows", work.kv_rows},
          {"positions_attended", work.positions_attended},
          {"query_key_pairs", work.query_key_pairs},
          {"weight_bytes_read", work.weight_bytes},
          {"kv_bytes_read", work.kv_bytes_read},
          {"kv_bytes_written", work.kv_bytes_written},
          {"matrix_flops", work.matrix_flops},
          {"attention_flops", work.attention_flops}};
}

json GenerationJson(const Explanation& e, Lengths lengths) {
  return {{"prompt_tokens", lengths.prompt},
          {"output_tokens", lengths.output},
          {"per_layer_and_head",
           {{"kv_rows_without_cache", KvRowsWithoutCache(lengths)},
            {"kv_rows_with_cache", KvRowsWithCache(lengths)},
            {"kv_rows_in_loop", KvRowsInLoop(lengths)},
            {"positions_attended", PositionsAttended(lengths)},
            {"ratio", KvRowsWithoutCache(lengths) / KvRowsWithCache(lengths)}}},
          {"without_cache",
           WorkJson(GenerationWork(e.spec, e.formats, lengths, false))},
          {"with_cache",
           WorkJson(GenerationWork(e.spec, e.formats, lengths, true))}};
}

json MachineJson(const Explanation& e) {
  const Machine& machine = *e.machine;
  json object = {{"threads", machine.threads},
                 {"flops_per_second", machine.flops_per_second},
                 {"matrix_flops_per_second", machine.matrix_flops_per_second},
                 {"read_bytes_per_second", machine.bytes_per_second},
                 {"read_set_bytes", machine.read_bytes},
                 {"ridge", machine.ridge()}};
  object["phases"] = json::array();
  for (const Phase& phase : Phases(e.spec, e.formats, e.lengths)) {
    object["phases"].push_back(
        {{"name", phase.name},
         {"batch", phase.batch},
         {"context", phase.context},
         {"intensity", phase.work.intensity()},
         {"compute_bound", IsComputeBound(phase.work, machine)},
         {"predicted_seconds_per_token",
          PredictSeconds(phase.work, machine) / phase.tokens},
         {"work", WorkJson(phase.work)}});
  }
  return object;
}

json TimingJson(const Explanation& e) {
  const Timing& timing = *e.timing;
  json object = GenerationJson(e, timing.lengths);
  object.update(json{{"with_cache_seconds", timing.with_seconds},
                     {"without_cache_seconds", timing.without_seconds},
                     {"prefill_seconds_per_token", timing.prefill_per_token()},
                     {"decode_seconds_per_token", timing.decode_per_token()},
                     {"counted_with_cache", WorkJson(timing.with_work)},
                     {"counted_without_cache", WorkJson(timing.without_work)},
                     {"token_ids", timing.tokens}});
  return object;
}

// Of one of the quoted pairs.
void AddTimedPair(const TimedPair& pair, json* object) {
  if (!pair.timing.has_value()) {
    (*object)["left_out"] = pair.left_out;
    return;
  }
  const Timing& timing = *pair.timing;
  const double without = timing.without_total(), with = timing.with_total();
  (*object)["timed"] = {
      {"with_cache_total_seconds", with},
      {"without_cache_total_seconds", without},
      {"ratio", without / with},
      {"counted_with_cache", WorkJson(timing.with_work)},
      {"counted_without_cache", WorkJson(timing.without_work)}};
}

}  // namespace

std::string ReportJson(const Explanation& e) {
  const engine::ModelSpec& spec = e.spec;
  json object = {{"model", e.model},
                 {"architecture", spec.architecture},
                 {"layers", spec.layers},
                 {"heads", spec.heads},
                 {"kv_heads", spec.kv_heads},
                 {"head_dim", spec.head_dim},
                 {"parameters", static_cast<int64_t>(Parameters(spec))},
                 {"weights", std::string(kernels::Name(e.formats.layers))},
                 {"kv_cache", std::string(kernels::Name(e.formats.kv))},
                 {"block_size", e.block_size}};
  if (spec.mixed_heads()) {  // layers that see all positions
    object["full_kv_heads"] = spec.full_kv_heads;
    object["full_head_dim"] = spec.full_head_dim;
  }
  if (spec.shared_kv_layers > 0) object["kv_layers"] = spec.kv_layers();
  object["kv_bytes_per_token"] = json::object();
  for (const DType type : kKvFormats) {
    object["kv_bytes_per_token"][std::string(kernels::Name(type))] =
        KvBytesPerToken(spec, type);
  }
  object["request"] = GenerationJson(e, e.lengths);
  object["quoted"] = json::array();
  for (size_t i = 0; i < kQuotedLengths.size(); ++i) {
    object["quoted"].push_back(GenerationJson(e, kQuotedLengths[i]));
    if (!e.pairs.empty()) AddTimedPair(e.pairs[i], &object["quoted"].back());
  }
  if (e.machine.has_value()) object["machine"] = MachineJson(e);
  if (e.timing.has_value()) object["timed"] = TimingJson(e);
  // A model's name may hold anything.
  return object.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace tandem::explain
