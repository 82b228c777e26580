// SPDX-License-Identifier: Apache-2.0
// One router's call of the decode worker: one sequence, from its admission to
// its last token. Private to decode_worker/.

#ifndef TANDEM_DECODE_WORKER_CALL_H_
#define TANDEM_DECODE_WORKER_CALL_H_

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "decode_worker/core.h"

namespace tandem::decode_worker {

struct DecodeCore::Call final : StreamHandler<v1::DecodeRequest>,
                                worker::TimedCall {
  Call(DecodeCore* core_in, CallId id_in, std::unique_ptr<DecodeStream> s)
      : core(core_in), id(id_in), stream(std::move(s)) {}

  void OnMessage(v1::DecodeRequest message) override {
    core->OnMessage(this, message);
  }
  void OnDrained() override;
  void OnClosed(absl::Status status) override { core->Retire(id, status); }

  // Of all attempts so far.
  engine::DraftCounts all_drafts() const {
    return {drafts.verified + live_drafts.verified,
            drafts.accepted + live_drafts.accepted};
  }
  // Its sequence is about to leave the engine, or has left it.
  void EndStay() {
    drafts = all_drafts();
    live_drafts = {};
  }

  absl::Span<const int32_t> output() const {
    return absl::MakeConstSpan(history).subspan(
        static_cast<size_t>(prompt_tokens));
  }

  bool remote_or_idle() const {
    return phase == Phase::kRemote || phase == Phase::kIdle;
  }
  bool waits_for_blocks() const {
    return phase == Phase::kLocal ||
           (phase == Phase::kRemote && landing.offered && !landing.granted);
  }
  bool older_than(const Call& other) const {
    return std::tie(admitted, id) < std::tie(other.admitted, other.id);
  }

  DecodeCore* const core;
  const CallId id;
  std::unique_ptr<DecodeStream> stream;
  Phase phase = Phase::kNew;

  // The request.
  std::string request_key;  // id and sequence index
  std::string request_id;
  uint32_t sequence_index = 0;
  std::vector<int32_t> history;  // prompt, then output so far
  int prompt_tokens = 0;
  engine::Sampling sampling;
  engine::LogitRules rules;
  engine::Stopping stopping;
  engine::AttentionAsk attention;
  bool report_work = false;  // with every token
  // Of a local attempt; its position is the first score that was not sent.
  engine::Scoring scoring;
  engine::BeamOptions beams;  // width 0: none
  std::string cache_salt;
  uint64_t cache_owner = 0;
  v1::AdapterRef adapter;  // no name: none
  worker::AdapterUse adapter_use;
  std::unique_ptr<worker::CallGrammar> grammar;  // null: none
  bool use_prefix_cache = true;
  bool kv_cache = true;
  bool suspect = false;
  absl::Time admitted;  // anywhere, for age

  // The attempt.
  uint32_t attempt = 0;  // the last one opened
  Landing landing;

  // The stream of tokens.
  absl::Time local_since;  // queued for a local prefill
  int local_uncached = 0;  // positions to compute there, when it was queued
  absl::Time local_started;
  absl::Time decode_started;
  bool local = false;         // the live or last attempt was local
  bool started_said = false;  // for the live attempt
  int cached_tokens = 0;
  int preemptions = 0;
  int recomputed_here = 0;  // after so many of them; others AttemptDead tells
  engine::Work work;        // of all attempts
  engine::DraftCounts drafts;       // of stays in the engine that ended
  engine::DraftCounts live_drafts;  // of this one
};

}  // namespace tandem::decode_worker

#endif  // TANDEM_DECODE_WORKER_CALL_H_
