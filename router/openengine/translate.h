// SPDX-License-Identifier: Apache-2.0
// OpenEngine's messages to those of tandem.v1, and back. Pure functions, but
// for what one answer remembers of its events; inference.proto says what means
// what.

#ifndef TANDEM_ROUTER_OPENENGINE_TRANSLATE_H_
#define TANDEM_ROUTER_OPENENGINE_TRANSLATE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "openengine/v1/inference.pb.h"
#include "router/text/text_codec.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

namespace oe = ::openengine::v1;

// UNIMPLEMENTED, UNSUPPORTED_FEATURE where it asks for what there is not;
// INVALID_ARGUMENT where it contradicts itself. Ranges are left to Validate.
absl::StatusOr<v1::GenerateRequest> FromOpenEngine(
    const oe::GenerateRequest& request);

// A refusal of such a request, with its field named as OpenEngine names it.
absl::Status InOpenEngineTerms(const absl::Status& status);

// What a call's metadata says under OpenEngine's reserved names.
absl::Status CheckOpenEngineMetadata(
    const std::vector<std::pair<std::string, std::string>>& metadata);

oe::EngineError ToEngineError(const absl::Status& status);

// One request's answer. On the router's loop.
class OpenEngineAnswer {
 public:
  // `codec` outlives it.
  explicit OpenEngineAnswer(TextCodec* codec) : codec_(codec) {}

  // What to send for the request's next event, if anything: the prompt's
  // scores are gathered, and the last output's end waits for the usage.
  std::optional<oe::GenerateResponse> Add(v1::GenerateResponse event);

  // What to send where the request failed before its end; nothing if the
  // call's status has to say it.
  std::optional<oe::GenerateResponse> Fail(const absl::Status& status) const;

 private:
  oe::GenerateResponse Event() const;
  std::optional<oe::GenerateResponse> AddScores(
      const v1::PromptLogprobs& scores);
  oe::GenerateResponse AddDelta(v1::GenerateDelta* delta);
  void Fill(const v1::TokenLogprob& record, oe::TokenInfo* token) const;
  std::string TokenText(uint32_t id) const;

  TextCodec* const codec_;
  bool started_ = false;
  std::string request_id_;
  uint32_t prompt_tokens_ = 0;
  uint32_t cached_tokens_ = 0;
  int open_ = 0;            // outputs that have not ended
  uint32_t generated_ = 0;  // tokens, of all
  oe::PromptOutput prompt_;
  std::optional<oe::GenerateResponse> last_;  // waits for the usage
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_OPENENGINE_TRANSLATE_H_
