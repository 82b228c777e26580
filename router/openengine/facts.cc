// SPDX-License-Identifier: Apache-2.0
#include "router/openengine/facts.h"

#include <algorithm>
#include <optional>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/fnv.h"
#include "common/utf8.h"
#include "common/version.h"

namespace tandem::router {
namespace {

// The release that proto/openengine/v1 is written after, by its name in the
// registry that it is published in.
constexpr char kSchemaRelease[] = "768a93c7b44e40f28c692ad0b471a8f2";
constexpr int kSchemaRevision = 1;

struct Blocks {
  uint64_t used = 0;
  uint64_t total = 0;
};

bool Decodes(const v1::WorkerStatus& worker) {
  return worker.hello().role() == v1::WORKER_ROLE_DECODE;
}

Blocks DecodeBlocks(const v1::GetClusterStateResponse& state) {
  Blocks blocks;
  for (const v1::WorkerStatus& worker : state.workers()) {
    if (!Decodes(worker)) continue;
    blocks.total += static_cast<uint64_t>(worker.hello().num_blocks());
    blocks.used += static_cast<uint64_t>(worker.load().blocks_reserved() +
                                         worker.load().blocks_live());
  }
  return blocks;
}

void SetLogprobs(int most, oe::LogprobCapabilities* logprobs) {
  logprobs->set_supported(true);
  logprobs->add_candidate_selection_modes(
      oe::CANDIDATE_TOKEN_SELECTION_MODE_TOP_N);
  logprobs->set_max_top_n(static_cast<uint32_t>(most));
}

}  // namespace

oe::ServerInfo MakeServerInfo(const v1::GetClusterStateResponse& state) {
  oe::ServerInfo info;
  info.set_engine_name("tandem");
  info.set_engine_version(kVersion);
  info.set_engine_role(oe::ENGINE_ROLE_AGGREGATED);
  info.set_instance_id(absl::BytesToHexString(state.router_incarnation()));
  info.add_supported_models(state.model());
  info.mutable_parallelism()->set_data_parallel_size(1);
  info.mutable_parallelism()->set_data_parallel_rank(0);
  info.mutable_parallelism()->set_data_parallel_start_rank(0);
  info.mutable_kv_connector()->set_enabled(false);
  info.set_schema_revision(kSchemaRevision);
  info.set_minimum_client_revision(kSchemaRevision);
  info.set_schema_release(kSchemaRelease);
  oe::DeploymentCapacity* const capacity = info.mutable_capacity();
  std::optional<int> block_size;
  bool differ = false;
  uint64_t sequences = 0;
  for (const v1::WorkerStatus& worker : state.workers()) {
    if (!Decodes(worker)) continue;
    const int size = worker.hello().block_size();
    differ = differ || block_size.value_or(size) != size;
    block_size = size;
    sequences += static_cast<uint64_t>(worker.hello().max_num_seqs());
  }
  if (block_size && !differ) {
    capacity->set_kv_block_size(static_cast<uint32_t>(*block_size));
  }
  capacity->set_total_kv_blocks(DecodeBlocks(state).total);
  capacity->set_max_running_requests(sequences);
  return info;
}

oe::ModelInfo MakeModelInfo(const ModelLimits& limits, bool lora) {
  oe::ModelInfo info;
  info.set_model_id(limits.model);
  info.set_served_model_name(limits.model);
  if (limits.context_length > 0) {
    const auto positions = static_cast<uint32_t>(limits.context_length);
    info.set_max_context_length(positions);
    info.set_max_output_tokens(positions - 1);  // behind a prompt of one
  }
  info.set_supports_text_input(true);
  info.set_supports_token_ids_input(true);
  oe::GenerationCapabilities* const can = info.mutable_generation();
  SetLogprobs(limits.offers.logprobs, can->mutable_prompt_logprobs());
  SetLogprobs(limits.offers.logprobs, can->mutable_output_logprobs());
  can->mutable_guided_decoding()->set_supported(true);
  // Grammars are another dialect than most clients write.
  for (const oe::GuidedDecodingMode mode :
       {oe::GUIDED_DECODING_MODE_JSON_SCHEMA, oe::GUIDED_DECODING_MODE_REGEX,
        oe::GUIDED_DECODING_MODE_STRUCTURAL_TAG,
        oe::GUIDED_DECODING_MODE_CHOICE,
        oe::GUIDED_DECODING_MODE_JSON_OBJECT}) {
    can->mutable_guided_decoding()->add_modes(mode);
  }
  can->set_max_num_sequences(static_cast<uint32_t>(limits.offers.n));
  can->set_supports_priority(false);
  can->set_supports_stop_in_output(true);
  can->set_supports_cache_salt(true);
  can->set_supports_prefix_cache_bypass(true);
  info.set_supports_lora(lora);
  info.set_supports_multimodal(false);
  if (limits.tool_call_style &&
      *limits.tool_call_style != ToolCallStyle::kNone) {
    info.set_tool_call_parser(
        std::string(ToolCallStyleName(*limits.tool_call_style)));
  }
  return info;
}

oe::LoadInfo MakeLoadInfo(const v1::GetClusterStateResponse& state,
                          absl::Time now, bool per_rank) {
  uint64_t waiting_tokens =
      static_cast<uint64_t>(state.requests().queued_tokens());
  uint32_t prefilling = 0, decoding = 0;
  for (const v1::WorkerStatus& worker : state.workers()) {
    const auto running = static_cast<uint32_t>(worker.load().running());
    (Decodes(worker) ? decoding : prefilling) += running;
    waiting_tokens += static_cast<uint64_t>(worker.load().queued_tokens());
  }
  const auto queued = static_cast<uint32_t>(state.requests().queued());
  const uint32_t running =
      static_cast<uint32_t>(state.requests().total()) - queued;
  const Blocks blocks = DecodeBlocks(state);
  oe::LoadInfo info;
  info.set_instance_id(absl::BytesToHexString(state.router_incarnation()));
  info.set_timestamp_unix_nanos(static_cast<uint64_t>(absl::ToUnixNanos(now)));
  info.set_running_requests(running);
  info.set_queued_requests(queued);
  info.set_used_kv_blocks(blocks.used);
  info.set_total_kv_blocks(blocks.total);
  info.set_waiting_tokens(waiting_tokens);
  info.set_prefill_batch_size(prefilling);
  info.set_decode_batch_size(decoding);
  if (!per_rank) return info;
  oe::RankLoadInfo* const rank = info.add_ranks();
  rank->set_data_parallel_rank(0);
  rank->set_running_requests(running);
  rank->set_queued_requests(queued);
  rank->set_used_kv_blocks(blocks.used);
  rank->set_total_kv_blocks(blocks.total);
  rank->set_prefill_batch_size(prefilling);
  rank->set_decode_batch_size(decoding);
  return info;
}

void AddCheck(const char* name, const absl::Status& status,
              oe::HealthResponse* response) {
  oe::HealthCheck* const check = response->add_checks();
  check->set_name(name);
  check->set_state(status.ok() ? oe::HEALTH_STATE_READY
                               : oe::HEALTH_STATE_NOT_READY);
  check->set_message(ValidUtf8(std::string(status.message())));
  response->set_state(std::max(response->state(), check->state()));
}

int64_t AdapterIds::Made(const std::string& name) {
  return static_cast<int64_t>(std::max<uint64_t>(Fnv1a(name) >> 1, 1));
}

int64_t AdapterIds::Of(const std::string& name) const {
  const auto given = given_.find(name);
  return given == given_.end() ? Made(name) : given->second;
}

void AdapterIds::Keep(const std::vector<v1::LoraAdapter>& adapters) {
  std::erase_if(given_, [&adapters](const auto& given) {
    return std::none_of(adapters.begin(), adapters.end(),
                        [&given](const v1::LoraAdapter& adapter) {
                          return adapter.lora_name() == given.first;
                        });
  });
}

absl::Status AdapterIds::Take(const std::string& name, int64_t id,
                              const std::vector<v1::LoraAdapter>& adapters) {
  Keep(adapters);
  for (const v1::LoraAdapter& adapter : adapters) {
    const bool same = adapter.lora_name() == name;
    if ((Of(adapter.lora_name()) == id) == same) continue;
    return MakeError(
        absl::StatusCode::kAlreadyExists, "ADAPTER_EXISTS",
        absl::StrCat("adapter.lora_id = ", id, ": adapter ",
                     adapter.lora_name(), " has ",
                     same ? absl::StrCat("the number ", Of(name)) : "it"),
        {{"adapter", adapter.lora_name()}});
  }
  given_[name] = id;
  return absl::OkStatus();
}

}  // namespace tandem::router
