// SPDX-License-Identifier: Apache-2.0
// A model directory as the router needs it: tokenizer, chat template, limits
// and defaults. Immutable after Load and shared by all threads.

#ifndef TANDEM_ROUTER_INTAKE_MODEL_TEXT_H_
#define TANDEM_ROUTER_INTAKE_MODEL_TEXT_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/mutex.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "router/intake/chat_json.h"
#include "router/text/text_codec.h"
#include "router/validate/validate.h"
#include "tandem/v1/inference.pb.h"
#include "text/chat_template.h"
#include "text/grammar.h"
#include "text/tokenizer.h"

namespace tandem::router {

// What one request's grammar may come to.
struct StructuredBudget {
  int64_t bytes = 256 << 10;  // of all its text
  absl::Duration compile = absl::Seconds(2);
};

struct ModelTextOptions {
  std::string served_name = {};  // empty: the directory's
  // A file in place of the model's own; empty: that.
  std::string chat_template = {};
  // A style's name, or "auto": what the chat template's calls look like.
  std::string tool_call_parser = "auto";
  // A ReasoningStyle's name, "openai_gptoss" of HarmonyFormat, "none", or
  // "auto": openai_gptoss where the chat template writes messages like that,
  // else none.
  std::string reasoning_parser = "auto";
};

class ModelText final : public TextCodec {
 public:
  static absl::StatusOr<std::unique_ptr<ModelText>> Load(
      const std::string& directory, const ModelTextOptions& options);

  // The model's own limits; context_length is what its config says, and
  // nothing is offered beyond.
  const ModelLimits& limits() const { return limits_; }
  // Positions that layers with a window see, 0 if none has one; and whether
  // others see all.
  int window() const { return window_; }
  bool some_see_all() const { return some_see_all_; }

  struct Prompt {
    std::vector<int32_t> token_ids;
    std::string rendered;      // what the chat template made
    absl::Duration rendering;  // the time that it took
  };
  absl::StatusOr<Prompt> Encode(const v1::GenerateRequest& request) const;
  absl::StatusOr<Prompt> Encode(const std::string& text,
                                bool add_special_tokens) const;
  absl::StatusOr<Prompt> Encode(const v1::Chat& chat,
                                bool add_special_tokens) const;
  // The tokens of each word by itself and behind a space, where they differ.
  // INVALID_ARGUMENT where a word has none.
  absl::StatusOr<std::vector<std::vector<int32_t>>> EncodeBadWords(
      const google::protobuf::RepeatedPtrField<std::string>& words) const;
  // Whether it is larger than the budget allows: INVALID_ARGUMENT.
  static absl::Status CheckStructuredSize(
      const v1::StructuredOptions& structured, const StructuredBudget& budget);
  // Whether it has been compiled before.
  bool KnowsStructured(const v1::StructuredOptions& structured) const;
  // Compiles it, to see whether it can be: INVALID_ARGUMENT names the field of
  // `structured` and says why not; RESOURCE_EXHAUSTED where too many are being
  // compiled. Takes no longer than the budget's time, and blocks for it.
  absl::Status CheckStructured(const v1::StructuredOptions& structured,
                               const StructuredBudget& budget) const;
  absl::StatusOr<std::string> Decode(absl::Span<const int32_t> ids,
                                     bool skip_special_tokens) const;

  std::string TokenText(int32_t id) const { return tokenizer_.TokenBytes(id); }

  // TextCodec
  std::unique_ptr<TextStream> NewStream(absl::Span<const int32_t> prompt,
                                        bool skip_special_tokens) override;
  std::string TokenBytes(int32_t token_id) override {
    return tokenizer_.TokenBytes(token_id);
  }

 private:
  ModelText(text::Tokenizer tokenizer, text::GrammarVocabulary grammars,
            std::optional<text::ChatTemplate> chat_template, ChatForm chat_form,
            ModelLimits limits, int window, bool some_see_all)
      : tokenizer_(std::move(tokenizer)),
        grammars_(std::move(grammars)),
        chat_template_(std::move(chat_template)),
        chat_form_(chat_form),
        limits_(std::move(limits)),
        window_(window),
        some_see_all_(some_see_all) {}

  const text::Tokenizer tokenizer_;
  const text::GrammarVocabulary grammars_;
  // Hashes of sources that compile, by a seed of this process.
  mutable Mutex mutex_;
  mutable std::deque<size_t> compiled_ ABSL_GUARDED_BY(mutex_);
  const std::optional<text::ChatTemplate> chat_template_;
  const ChatForm chat_form_;
  const ModelLimits limits_;
  const int window_;
  const bool some_see_all_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_INTAKE_MODEL_TEXT_H_
