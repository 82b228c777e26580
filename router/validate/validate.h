// SPDX-License-Identifier: Apache-2.0
// A client's request against the model's limits: either the values in effect,
// all set, or the status that names the field, the value and what is allowed.
// Pure functions; nothing is tokenised here, so what depends on the prompt's
// length is checked in a second step.
//
// validate.cc, validate_chat.cc, validate_sampling.cc: what each field may be.
// effective_request.cc: the values in effect. worker_params.cc: those values as
// workers have them.

#ifndef TANDEM_ROUTER_VALIDATE_VALIDATE_H_
#define TANDEM_ROUTER_VALIDATE_VALIDATE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "router/text/harmony.h"
#include "router/text/reasoning.h"
#include "router/text/tool_calls.h"
#include "tandem/v1/generation.pb.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

inline constexpr int kMaxRequestIdBytes = 128;
inline constexpr int kMaxStopStrings = 32;
inline constexpr int kMaxStopStringBytes = 256;
inline constexpr int kMaxStopTokenIds = 64;
inline constexpr int kMaxLogprobs = 20;
inline constexpr int kMaxSequences = 32;       // of a request, best_of
inline constexpr int kMaxBeamCandidates = 20;  // width and end tokens
inline constexpr float kMaxLengthPenalty = 10;
inline constexpr int kMaxListedTokenIds = 1024;  // biased, allowed, banned
inline constexpr int kMaxBadWords = 64;
inline constexpr int kMaxBadWordBytes = 64;
inline constexpr int kMaxCacheSaltBytes = 64;
inline constexpr int kMaxAttentionWeights = 16384;  // with a token: 64 KiB
inline constexpr int kMaxAdapterName = 64;
inline constexpr int kMaxTools = 128;
inline constexpr size_t kMaxToolBytes = 256 << 10;  // of all together
inline constexpr float kMaxTemperature = 2;
inline constexpr float kMaxPenalty = 2;
inline constexpr float kMaxLogitBias = 100;

// What a server was started to offer: beyond what is always there, and how
// much of it, at most, to one request.
struct Offers {
  bool no_kv_cache = false;
  bool attention = false;
  // Of who says nothing, where the context has it.
  int default_max_tokens = 4096;
  int n = kMaxSequences;  // and best_of
  int stop_strings = kMaxStopStrings;
  int stop_bytes = kMaxStopStringBytes;
  int logit_bias = kMaxListedTokenIds;
  int logprobs = kMaxLogprobs;
};

struct ModelLimits {
  std::string model;       // served name
  int context_length = 0;  // positions; 0: not known, not checked
  int vocabulary_size = 0;
  int layers = 0;
  bool has_chat_template = false;
  // Whether the template shows tools to the model, how that writes its calls
  // (unset: not known), and the special tokens among its marks.
  bool template_has_tools = false;
  std::optional<ToolCallStyle> tool_call_style;
  bool tool_calls_by_name = false;  // Mistral's newer form
  std::map<int32_t, std::string> tool_call_markers;
  std::optional<ReasoningMarks> reasoning;  // unset: answers are content
  // What it answers chats in; unset: plain text. Excludes `reasoning`.
  std::optional<HarmonyFormat> harmony;
  std::vector<int32_t> eos_token_ids;
  // LoRA adapters of the decode workers; unset: not known, not checked.
  std::optional<std::vector<std::string>> adapters;
  // The largest KV cache of a decode worker; 0: not known, not checked.
  int kv_blocks = 0;
  int kv_block_size = 0;
  int64_t kv_bytes_per_token = 0;
  // Sequences, or beams, that fit such a cache together however long they are,
  // as layers with a window let blocks go; 0: not known.
  int kv_sequences = 0;
  // The model's own defaults (generation_config).
  float temperature = 1;
  float top_p = 1;
  int top_k = 0;
  float min_p = 0;
  float repetition_penalty = 1;
  Offers offers;
};

// Whose constraint it is that the output must match: the client's own, that of
// the tools' schemas, or either of them.
enum class ConstraintOf { kClient, kTools, kEither };

// What a request comes down to. The public messages have every field set and
// go back to the client in GenerateStarted.
struct EffectiveRequest {
  std::string request_id;        // the client's; may be empty
  bool chat = false;             // of a chat template's prompt
  v1::SamplingOptions sampling;  // seed unset where the client gave none
  v1::StoppingOptions stopping;  // max_tokens unset until FitToContext
  v1::OutputOptions output;
  v1::Placement placement = v1::PLACEMENT_AUTO;
  int32_t priority = 0;  // lower: served first
  std::string adapter;   // empty: none
  std::string cache_salt;
  uint64_t cache_owner = 0;  // the tenant's, as DecodeOpen has it
  bool bypass_prefix_cache = false;
  bool no_kv_cache = false;
  // What workers must heed (common/features.h): all of them, and those that
  // decode.
  std::vector<std::string> features;
  std::vector<std::string> decode_features;
  std::optional<absl::Duration> max_time;
  std::optional<v1::BeamOptions> beam;  // every field set
  // What the output matches; StructuredGate has it compiled. NoteFeatures and
  // the ends of the model go with it.
  std::optional<v1::StructuredOptions> structured;
  ConstraintOf constraint_of = ConstraintOf::kClient;
  // The client's field whose text `structured` is not, but made of.
  std::string constraint_field;
  std::vector<int32_t> model_end_ids;         // where `structured` is set
  std::optional<ToolCallOptions> tool_calls;  // none: not looked for
  std::optional<ReasoningMarks> reasoning;    // which comes first; none: none
  std::optional<HarmonyFormat> harmony;       // what it is in; none: plain text
  // Nothing is to be generated.
  bool only_scores() const {
    return stopping.has_max_tokens() && stopping.max_tokens() == 0;
  }
  // The tokens of sampling.bad_words, which Validate does not fill in.
  std::vector<std::vector<int32_t>> bad_word_ids;
  // Ids that end the sequence: the request's and the model's.
  std::vector<int32_t> end_token_ids;
};

absl::StatusOr<EffectiveRequest> Validate(const v1::GenerateRequest& request,
                                          const ModelLimits& limits);

// Refuses lists of tokens that together leave none to draw: the allowed ones,
// or all, but for those that are banned, bad words by themselves, or ends
// before min_tokens. REQUIRES: bad_word_ids are filled in.
absl::Status CheckTokensLeft(const EffectiveRequest& request,
                             const ModelLimits& limits);

// The same checks for a chat alone, e.g. of TokenizeRequest.
absl::Status ValidateChat(const v1::Chat& chat, const ModelLimits& limits);
// Whether the model is to know of the chat's tools.
bool WantsTools(const v1::Chat& chat);
// Printable ASCII, of bounded length.
absl::Status ValidateRequestId(std::string_view id);
// NOT_FOUND where `model` is neither empty nor the one served nor an adapter,
// or, where those are not known, cannot be one.
absl::Status ValidateModel(const std::string& model, const ModelLimits& limits);
// Each id must be below the vocabulary size.
template <typename Ids>
absl::Status ValidateTokenIds(const char* field, const Ids& ids,
                              const ModelLimits& limits);

// Whether the answer to `prompt`, which was made of `chat`, begins with
// reasoning. What must match something comes behind that.
void NoteReasoning(const v1::Chat& chat, absl::Span<const int32_t> prompt,
                   const ModelLimits& limits, EffectiveRequest* effective);

// Fills in max_tokens, and refuses what does not fit the context.
absl::Status FitToContext(int prompt_tokens, const ModelLimits& limits,
                          EffectiveRequest* effective);

// Why `effective.structured` is refused, told of what the client sent: not of
// the text that was made of its tools.
absl::Status InClientsTerms(const EffectiveRequest& effective,
                            const absl::Status& status);

// The effective values as workers want them.
v1::SamplingParams ToSamplingParams(const EffectiveRequest& effective);
v1::StoppingParams ToStoppingParams(const EffectiveRequest& effective);

// The model's defaults, as GetModel shows them.
v1::SamplingOptions DefaultSampling(const ModelLimits& limits);
v1::StoppingOptions DefaultStopping(const ModelLimits& limits);

// ------------------------------------------------------ implementation

absl::Status TokenIdOutOfRange(const char* field, uint32_t id,
                               const ModelLimits& limits);

template <typename Ids>
absl::Status ValidateTokenIds(const char* field, const Ids& ids,
                              const ModelLimits& limits) {
  for (uint32_t id : ids) {
    if (id >= static_cast<uint32_t>(limits.vocabulary_size)) {
      return TokenIdOutOfRange(field, id, limits);
    }
  }
  return absl::OkStatus();
}

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_VALIDATE_VALIDATE_H_
