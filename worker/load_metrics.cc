// SPDX-License-Identifier: Apache-2.0
#include "worker/load_metrics.h"

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/thread_loop.h"

namespace tandem::worker {

namespace {

GrowingCounter LinkCounter(Metrics* metrics, const char* event) {
  return GrowingCounter(metrics->AddCounter("tandem_handoff_links_total",
                                            "Links to workers of the other "
                                            "role",
                                            {{"event", event}}));
}

}  // namespace

void LogHandoffFault(const handoff::HandoffFault& fault) {
  static LogLimiter limiter(absl::Milliseconds(100));
  int64_t hidden;
  if (!limiter.Allow(MonotonicNow(), &hidden)) return;
  LogWarning(fault.what, {{"peer", fault.peer},
                          {"way", fault.way},
                          {"stage", fault.stage},
                          {"cause", fault.status},
                          {"hidden", hidden}});
}

LoadMetrics::LoadMetrics(Metrics* metrics, const v1::WorkerHello& hello)
    : metrics_(metrics),
      direction_(hello.role() == v1::WORKER_ROLE_PREFILL ? "sent" : "received"),
      running_(metrics->AddGauge("tandem_num_requests_running",
                                 "Sequences in steps")),
      waiting_(metrics->AddGauge("tandem_num_requests_waiting",
                                 "Sequences queued or waiting for their KV")),
      waiting_tokens_(metrics->AddGauge("tandem_num_prompt_tokens_waiting",
                                        "Prompt tokens not yet computed")),
      usage_(metrics->AddGauge("tandem_kv_cache_usage_ratio",
                               "Blocks in use, of all")),
      blocks_(metrics->AddGauges("tandem_kv_blocks",
                                 "KV blocks by state; the sum is constant",
                                 "state", 4)),
      slabs_(metrics->AddGauges("tandem_kv_slabs", "Handoff slabs by state",
                                "state", 4)),
      tickets_(metrics->AddGauge("tandem_handoff_tickets",
                                 "Attempts of handoffs that have not ended",
                                 {{"state", "granted"}})),
      prefill_tokens_(metrics->AddCounter("tandem_prompt_tokens_total",
                                          "Prompt positions by source",
                                          {{"source", "computed"}})),
      cached_tokens_(metrics->AddCounter("tandem_prompt_tokens_total",
                                         "Prompt positions by source",
                                         {{"source", "cached"}})),
      generated_tokens_(metrics->AddCounter("tandem_generation_tokens_total",
                                            "Tokens drawn")),
      queries_(metrics->AddCounter("tandem_prefix_cache_queries_tokens_total",
                                   "Positions looked up in the prefix cache")),
      hits_(metrics->AddCounter("tandem_prefix_cache_hits_tokens_total",
                                "Positions found there")),
      preemptions_(metrics->AddCounter("tandem_preemptions_total",
                                       "Sequences that gave way",
                                       {{"reason", "blocks"}})),
      window_blocks_(metrics->AddCounter(
          "tandem_kv_window_blocks_total",
          "Blocks that running sequences let go behind their window")),
      drafts_(metrics->AddCounter("tandem_spec_decode_num_drafts_total",
                                  "Times that a step verified guesses of a "
                                  "sequence's tokens")),
      draft_tokens_(
          metrics->AddCounter("tandem_spec_decode_num_draft_tokens_total",
                              "Tokens guessed and verified")),
      accepted_tokens_(
          metrics->AddCounter("tandem_spec_decode_num_accepted_tokens_total",
                              "Guesses that were right")),
      late_(metrics->AddCounter("tandem_handoff_late_messages_total",
                                "Messages about attempts that had ended")),
      refused_(metrics->AddCounter("tandem_handoff_slices_refused_total",
                                   "Slices that fitted no live grant")),
      offers_refused_(
          metrics->AddCounter("tandem_handoff_offers_refused_total",
                              "Offers whose ticket or terms were not taken")),
      ways_failed_(metrics->AddCounter("tandem_handoff_ways_failed_total",
                                       "Ways that could not be set up for a "
                                       "link, or broke")),
      quarantines_(
          metrics->AddCounter("tandem_kv_slab_quarantines_total",
                              "Slabs held back until their writer was quiet")),
      arenas_dropped_(metrics->AddCounter(
          "tandem_handoff_arenas_dropped_total",
          "Slab arenas given up because a writer never was")),
      links_made_(LinkCounter(metrics, "established")),
      links_lost_(LinkCounter(metrics, "lost")),
      links_refused_(LinkCounter(metrics, "refused")) {
  metrics
      ->AddGauge("tandem_cache_config_info", "How the KV cache is laid out",
                 {{"block_size", absl::StrCat(hello.block_size())},
                  {"num_blocks", absl::StrCat(hello.num_blocks())},
                  {"dtype", hello.kv_dtype()}})
      .Set(1);
}

void LoadMetrics::Update(const v1::WorkerLoad& load,
                         const engine::EngineStats& stats,
                         const handoff::HandoffCounters& handoffs,
                         int64_t history_positions, int64_t cached_positions) {
  running_.Set(load.running());
  waiting_.Set(load.waiting());
  waiting_tokens_.Set(load.queued_tokens());
  const double in_use = load.blocks_reserved() + load.blocks_live();
  const double total = in_use + load.blocks_free() + load.blocks_cached();
  usage_.Set(total > 0 ? in_use / total : 0);
  blocks_["free"].Set(load.blocks_free());
  blocks_["reserved"].Set(load.blocks_reserved());
  blocks_["live"].Set(load.blocks_live());
  blocks_["cached"].Set(load.blocks_cached());
  slabs_["free"].Set(load.slabs_free());
  slabs_["granted"].Set(load.slabs_granted());
  slabs_["in_flight"].Set(load.slabs_in_flight());
  slabs_["quarantined"].Set(load.slabs_quarantined());
  tickets_.Set(load.tickets());
  prefill_tokens_.Set(stats.prefill_tokens);
  generated_tokens_.Set(stats.decode_tokens);
  cached_tokens_.Set(cached_positions);
  queries_.Set(history_positions);
  hits_.Set(cached_positions);
  preemptions_.Set(stats.preemptions);
  window_blocks_.Set(stats.window_blocks);
  drafts_.Set(stats.draft_steps);
  draft_tokens_.Set(stats.drafts.verified);
  accepted_tokens_.Set(stats.drafts.accepted);
  UpdateHandoffs(handoffs);
}

void LoadMetrics::Told(const std::string& way, const char* outcome,
                       int64_t total) {
  const std::string key = absl::StrCat(way, "/", outcome);
  auto it = handoffs_.find(key);
  if (it == handoffs_.end()) {
    it = handoffs_
             .emplace(key, GrowingCounter(metrics_->AddCounter(
                               "tandem_handoff_total", "Handoffs ended",
                               {{"way", way}, {"outcome", outcome}})))
             .first;
  }
  it->second.Set(total);
}

void LoadMetrics::UpdateHandoffs(const handoff::HandoffCounters& handoffs) {
  late_.Set(handoffs.late_messages);
  refused_.Set(handoffs.slices_refused);
  offers_refused_.Set(handoffs.offers_refused);
  ways_failed_.Set(handoffs.ways_failed);
  quarantines_.Set(handoffs.quarantines);
  arenas_dropped_.Set(handoffs.arenas_dropped);
  links_made_.Set(handoffs.links);
  links_lost_.Set(handoffs.links_lost);
  links_refused_.Set(handoffs.links_refused);
  for (const auto& [name, way] : handoffs.ways) {
    const std::string label = name.empty() ? "none" : name;
    Told(label, "ok", way.committed);
    Told(label, "failed", way.failed);
    Told(label, "cancelled", way.cancelled);
    auto it = bytes_.find(label);
    if (it == bytes_.end()) {
      it = bytes_
               .emplace(label,
                        GrowingCounter(metrics_->AddCounter(
                            "tandem_handoff_bytes_total", "KV bytes of slices",
                            {{"way", label}, {"direction", direction_}})))
               .first;
    }
    it->second.Set(way.bytes);
    for (const auto& [stage, total] : way.failed_in) {
      auto failures = failures_.find(absl::StrCat(label, "/", stage));
      if (failures == failures_.end()) {
        failures =
            failures_
                .emplace(absl::StrCat(label, "/", stage),
                         GrowingCounter(metrics_->AddCounter(
                             "tandem_handoff_failures_total",
                             "Handoffs failed, by the stage they had reached",
                             {{"way", label}, {"stage", stage}})))
                .first;
      }
      failures->second.Set(total);
    }
  }
}

}  // namespace tandem::worker
