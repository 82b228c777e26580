// SPDX-License-Identifier: Apache-2.0
// A structure is taken apart by all its fields: one that is added compiles
// nothing here until it has its place.

#include "router/session/admitted.h"

#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/utf8.h"

namespace tandem::router::session {
namespace {

absl::Duration Tick() { return absl::Nanoseconds(1) / 4; }

template <typename From, typename To>
void Copy(const From& from, To* to) {
  to->Assign(from.begin(), from.end());
}

// Calls `each(name, field)` for every option.
template <typename Options, typename Each>
void EachOption(Options& options, Each each) {
  auto& [incarnation, model, policy, vocabulary, window, some_see_all,
         max_local_tokens, max_requests, max_queued, queue_wait,
         max_expected_wait, no_workers_wait, recovery_wait, default_deadline,
         beat, silence, open_limit, crash_verdict, proof_of_life, refusal_pause,
         rate_holds, timings_wait, max_attempts, max_failures, max_preemptions,
         retry_budget, suspect_quarantine, max_unsent, stall_limit, lease,
         load_interval, max_workers, adapter_wait, max_cached_hashes,
         max_hashed_blocks, avoid_first, avoid_longest] = options;
  each("incarnation", incarnation);
  each("model", model);
  each("policy", policy);
  each("vocabulary", vocabulary);
  each("window", window);
  each("some_see_all", some_see_all);
  each("max_local_tokens", max_local_tokens);
  each("max_requests", max_requests);
  each("max_queued", max_queued);
  each("queue_wait", queue_wait);
  each("max_expected_wait", max_expected_wait);
  each("no_workers_wait", no_workers_wait);
  each("recovery_wait", recovery_wait);
  each("default_deadline", default_deadline);
  each("beat", beat);
  each("silence", silence);
  each("open_limit", open_limit);
  each("crash_verdict", crash_verdict);
  each("proof_of_life", proof_of_life);
  each("refusal_pause", refusal_pause);
  each("rate_holds", rate_holds);
  each("timings_wait", timings_wait);
  each("max_attempts", max_attempts);
  each("max_failures", max_failures);
  each("max_preemptions", max_preemptions);
  each("retry_budget", retry_budget);
  each("suspect_quarantine", suspect_quarantine);
  each("max_unsent", max_unsent);
  each("stall_limit", stall_limit);
  each("lease", lease);
  each("load_interval", load_interval);
  each("max_workers", max_workers);
  each("adapter_wait", adapter_wait);
  each("max_cached_hashes", max_cached_hashes);
  each("max_hashed_blocks", max_hashed_blocks);
  each("avoid_first", avoid_first);
  each("avoid_longest", avoid_longest);
}

void Set(const std::string& field, v1::SessionOption* option) {
  option->set_text(field);
}
void Set(absl::Duration field, v1::SessionOption* option) {
  option->set_integer(ToTicks(field));
}
void Set(double field, v1::SessionOption* option) { option->set_real(field); }
template <typename Integer>
void Set(Integer field, v1::SessionOption* option) {
  option->set_integer(static_cast<int64_t>(field));
}

void Get(const v1::SessionOption& option, std::string* field) {
  *field = option.text();
}
void Get(const v1::SessionOption& option, absl::Duration* field) {
  *field = FromTicks(option.integer());
}
void Get(const v1::SessionOption& option, double* field) {
  *field = option.real();
}
template <typename Integer>
void Get(const v1::SessionOption& option, Integer* field) {
  *field = static_cast<Integer>(option.integer());
}

v1::SessionToolCalls ToEntry(const ToolCallOptions& options) {
  const auto& [style, names, json_parameters, parallel, markers, id_seed] =
      options;
  v1::SessionToolCalls entry;
  entry.set_style(static_cast<uint32_t>(style));
  Copy(names, entry.mutable_names());
  entry.set_parallel(parallel);
  entry.mutable_markers()->insert(markers.begin(), markers.end());
  entry.set_id_seed(id_seed);
  for (const auto& [function, parameters] : json_parameters) {
    v1::SessionParameters* const of = entry.add_json_parameters();
    of->set_function(function);
    Copy(parameters, of->mutable_names());
  }
  return entry;
}

ToolCallOptions FromEntry(const v1::SessionToolCalls& entry) {
  JsonParameters json_parameters;
  for (const v1::SessionParameters& of : entry.json_parameters()) {
    json_parameters[of.function()] = {of.names().begin(), of.names().end()};
  }
  return {.style = static_cast<ToolCallStyle>(entry.style()),
          .names = {entry.names().begin(), entry.names().end()},
          .json_parameters = std::move(json_parameters),
          .parallel = entry.parallel(),
          .markers = {entry.markers().begin(), entry.markers().end()},
          .id_seed = entry.id_seed()};
}

void ToEntry(const EffectiveRequest& effective, v1::SessionSubmit* entry) {
  const auto& [request_id, chat, sampling, stopping, output, placement,
               priority, adapter, cache_salt, cache_owner, bypass_prefix_cache,
               no_kv_cache, features, decode_features, max_time, beam,
               structured, constraint_of, constraint_field, model_end_ids,
               tool_calls, reasoning, harmony, bad_word_ids, end_token_ids] =
      effective;
  entry->set_request_id(request_id);
  entry->set_chat(chat);
  *entry->mutable_sampling() = sampling;
  *entry->mutable_stopping() = stopping;
  *entry->mutable_output() = output;
  entry->set_placement(placement);
  entry->set_priority(priority);
  entry->set_adapter(adapter);
  entry->set_cache_salt(cache_salt);
  entry->set_cache_owner(cache_owner);
  entry->set_bypass_prefix_cache(bypass_prefix_cache);
  entry->set_no_kv_cache(no_kv_cache);
  Copy(features, entry->mutable_features());
  Copy(decode_features, entry->mutable_decode_features());
  if (max_time) entry->set_max_time(ToTicks(*max_time));
  if (beam) *entry->mutable_beam() = *beam;
  if (structured) *entry->mutable_structured() = *structured;
  entry->set_constraint_of(static_cast<uint32_t>(constraint_of));
  entry->set_constraint_field(constraint_field);
  Copy(model_end_ids, entry->mutable_model_end_ids());
  if (tool_calls) *entry->mutable_tool_calls() = ToEntry(*tool_calls);
  if (reasoning) {
    const auto& [style, begin_id, end_id, calls_id, content_first] = *reasoning;
    entry->mutable_reasoning()->set_style(static_cast<uint32_t>(style));
    entry->mutable_reasoning()->set_begin_id(begin_id);
    entry->mutable_reasoning()->set_end_id(end_id);
    if (calls_id >= 0) entry->mutable_reasoning()->set_calls_id(calls_id);
    entry->mutable_reasoning()->set_content_first(content_first);
  }
  if (harmony) {
    const auto& [marks, reasons] = *harmony;
    entry->mutable_harmony()->mutable_marks()->insert(marks.begin(),
                                                      marks.end());
    entry->mutable_harmony()->set_reasoning(reasons);
  }
  for (const std::vector<int32_t>& word : bad_word_ids) {
    Copy(word, entry->add_bad_words()->mutable_ids());
  }
  Copy(end_token_ids, entry->mutable_end_token_ids());
}

EffectiveRequest EffectiveOf(v1::SessionSubmit* entry) {
  EffectiveRequest effective;
  effective.request_id = entry->request_id();
  effective.chat = entry->chat();
  effective.sampling = std::move(*entry->mutable_sampling());
  effective.stopping = std::move(*entry->mutable_stopping());
  effective.output = std::move(*entry->mutable_output());
  effective.placement = entry->placement();
  effective.priority = entry->priority();
  effective.adapter = entry->adapter();
  effective.cache_salt = entry->cache_salt();
  effective.cache_owner = entry->cache_owner();
  effective.bypass_prefix_cache = entry->bypass_prefix_cache();
  effective.no_kv_cache = entry->no_kv_cache();
  effective.features = {entry->features().begin(), entry->features().end()};
  effective.decode_features = {entry->decode_features().begin(),
                               entry->decode_features().end()};
  if (entry->has_max_time()) effective.max_time = FromTicks(entry->max_time());
  if (entry->has_beam()) effective.beam = entry->beam();
  if (entry->has_structured()) effective.structured = entry->structured();
  effective.constraint_of = static_cast<ConstraintOf>(entry->constraint_of());
  effective.constraint_field = entry->constraint_field();
  effective.model_end_ids = {entry->model_end_ids().begin(),
                             entry->model_end_ids().end()};
  if (entry->has_tool_calls()) {
    effective.tool_calls = FromEntry(entry->tool_calls());
  }
  if (entry->has_reasoning()) {
    const v1::SessionReasoning& reasoning = entry->reasoning();
    effective.reasoning = ReasoningMarks{
        .style = static_cast<ReasoningStyle>(reasoning.style()),
        .begin_id = reasoning.begin_id(),
        .end_id = reasoning.end_id(),
        .calls_id = reasoning.has_calls_id() ? reasoning.calls_id() : -1,
        .content_first = reasoning.content_first()};
  }
  if (entry->has_harmony()) {
    const v1::SessionHarmony& harmony = entry->harmony();
    effective.harmony =
        HarmonyFormat{.marks = {harmony.marks().begin(), harmony.marks().end()},
                      .reasoning = harmony.reasoning()};
  }
  for (const v1::SessionTokens& word : entry->bad_words()) {
    effective.bad_word_ids.emplace_back(word.ids().begin(), word.ids().end());
  }
  effective.end_token_ids = {entry->end_token_ids().begin(),
                             entry->end_token_ids().end()};
  return effective;
}

}  // namespace

int64_t ToTicks(absl::Duration duration) {
  absl::Duration rest;
  return absl::IDivDuration(duration, Tick(), &rest);
}

absl::Duration FromTicks(int64_t ticks) {
  return ticks == INT64_MAX ? absl::InfiniteDuration() : Tick() * ticks;
}

v1::SessionStatus ToEntry(const absl::Status& status) {
  v1::SessionStatus entry;
  entry.set_code(status.raw_code());
  entry.set_message(ValidUtf8(std::string(status.message())));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    (*entry.mutable_payloads())[std::string(url)] = std::string(payload);
  });
  return entry;
}

absl::Status FromEntry(const v1::SessionStatus& entry) {
  absl::Status status(static_cast<absl::StatusCode>(entry.code()),
                      entry.message());
  for (const auto& [url, payload] : entry.payloads()) {
    status.SetPayload(url, absl::Cord(payload));
  }
  return status;
}

v1::SessionSubmit ToEntry(const AdmittedRequest& admitted) {
  const auto& [effective, prompt, deadline, whole_deadline, sequence_index,
               binding, api, id_from_header, since, ended, trace, tenant,
               charge] = admitted;
  v1::SessionSubmit entry;
  ToEntry(effective, &entry);
  Copy(prompt, entry.mutable_prompt());
  entry.set_deadline(ToTicks(deadline));
  entry.set_sequence_index(sequence_index);
  entry.set_api(static_cast<uint32_t>(api));
  entry.set_id_from_header(id_from_header);
  if (since) entry.set_since(ToTicks(*since - absl::UnixEpoch()));
  entry.set_ended(static_cast<uint32_t>(ended));
  const auto& [trace_id, span_id, sampled, state] = trace;
  entry.set_trace_id(trace_id);
  entry.set_span_id(span_id);
  entry.set_trace_sampled(sampled);
  entry.set_trace_state(state);
  entry.set_tenant(tenant);
  return entry;
}

AdmittedRequest FromEntry(v1::SessionSubmit entry) {
  AdmittedRequest admitted;
  admitted.effective = EffectiveOf(&entry);
  admitted.prompt = {entry.prompt().begin(), entry.prompt().end()};
  admitted.deadline = FromTicks(entry.deadline());
  admitted.sequence_index = entry.sequence_index();
  admitted.api = static_cast<Api>(entry.api());
  admitted.id_from_header = entry.id_from_header();
  if (entry.has_since())
    admitted.since = absl::UnixEpoch() + FromTicks(entry.since());
  admitted.ended = static_cast<AdmittedRequest::Ended>(entry.ended());
  admitted.trace = {.trace_id = entry.trace_id(),
                    .span_id = entry.span_id(),
                    .sampled = entry.trace_sampled(),
                    .state = entry.trace_state()};
  admitted.tenant = entry.tenant();
  return admitted;
}

void ToEntry(const RouterOptions& options, v1::SessionStart* start) {
  EachOption(options, [&](const char* name, const auto& field) {
    v1::SessionOption* const option = start->add_options();
    option->set_name(name);
    Set(field, option);
  });
}

absl::StatusOr<RouterOptions> OptionsOf(const v1::SessionStart& start) {
  std::map<std::string, const v1::SessionOption*> by_name;
  for (const v1::SessionOption& option : start.options()) {
    by_name[option.name()] = &option;
  }
  RouterOptions options;
  std::string missing;
  EachOption(options, [&](const char* name, auto& field) {
    const auto it = by_name.find(name);
    if (it == by_name.end()) {
      missing = name;
    } else {
      Get(*it->second, &field);
    }
  });
  if (!missing.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "option ", missing, " is missing: recorded by another version (",
        start.version(), ")"));
  }
  return options;
}

}  // namespace tandem::router::session
