// SPDX-License-Identifier: Apache-2.0
// Options of requests that a worker says it heeds (WorkerHello.features), as
// far as they are younger than the protocol. In a rolling upgrade routers and
// workers of two versions meet: fields that a worker does not know would be
// ignored in silence, so a request that needs one of these goes only to
// workers that name it.

#ifndef TANDEM_COMMON_FEATURES_H_
#define TANDEM_COMMON_FEATURES_H_

namespace tandem {

inline constexpr char kFeatureTypicalP[] = "typical_p";
inline constexpr char kFeatureLogitRules[] = "logit_rules";  // SamplingParams
inline constexpr char kFeatureAttention[] = "attention";     // SamplingParams
inline constexpr char kFeatureBeamSearch[] = "beam_search";  // SamplingParams
inline constexpr char kFeatureNoKvCache[] = "no_kv_cache";   // DecodeOpen
inline constexpr char kFeaturePromptLogprobs[] = "prompt_logprobs";  // both
inline constexpr char kFeatureStructured[] = "structured";  // SamplingParams
// StructuredParams.after_token_id
inline constexpr char kFeatureStructuredAfter[] = "structured_after";
// No request's: commands of the registration stream. Younger than attention and
// beam_search, which flags turn off: who names this one and lacks one of those
// was started so.
inline constexpr char kFeatureAdapterLoading[] = "adapter_loading";

}  // namespace tandem

#endif  // TANDEM_COMMON_FEATURES_H_
