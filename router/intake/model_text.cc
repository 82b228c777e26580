// SPDX-License-Identifier: Apache-2.0
#include "router/intake/model_text.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <filesystem>
#include <span>
#include <string_view>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "engine/checkpoint/model_config.h"
#include "nlohmann/json.hpp"
#include "router/text/gemma_calls.h"
#include "router/text/marked_calls.h"
#include "router/text/tool_calls.h"
#include "router/validate/errors.h"
#include "text/grammar_source.h"

namespace tandem::router {
namespace {

constexpr size_t kMaxCompiled = 256;
constexpr char kHarmonyReasoning[] = "openai_gptoss";

std::string StructuredField(const text::GrammarSource& source) {
  return absl::StrCat("structured.", source.field);
}

size_t HashOf(const text::GrammarSource& source) {
  return absl::HashOf(source.kind, source.text);
}

class Decoder final : public TextStream {
 public:
  Decoder(const text::Tokenizer* tokenizer, absl::Span<const int32_t> prompt,
          bool skip_special_tokens)
      : decoder_(tokenizer,
                 std::span<const int32_t>(prompt.data(), prompt.size()),
                 {.skip_special_tokens = skip_special_tokens}) {}

  std::string Push(int32_t token_id) override {
    // An id beyond the tokenizer's (a padded vocabulary) has no text.
    return decoder_.Push(token_id).value_or("");
  }
  std::string Finish() override { return decoder_.Finish(); }

 private:
  text::StreamDecoder decoder_;
};

// What the chat template tells of the model's tool calls, as far as
// `parser_name` leaves it open.
absl::Status LearnToolCalls(const text::ChatTemplate& chat,
                            const std::string& parser_name,
                            const text::Tokenizer& tokenizer,
                            ModelLimits* limits) {
  const std::string source = chat.Source(/*has_tools=*/true);
  limits->template_has_tools = source.find("tools") != std::string::npos;
  if (parser_name != "auto") {
    limits->tool_call_style = ToolCallStyleByName(parser_name);
    if (!limits->tool_call_style) {
      return absl::InvalidArgumentError(
          absl::StrCat("--tool-call-parser ", parser_name, ": is not known"));
    }
  } else if (const ToolCallStyle style = DetectToolCallStyle(source);
             style != ToolCallStyle::kNone) {
    limits->tool_call_style = style;
  }
  limits->tool_calls_by_name = source.find("[ARGS]") != std::string::npos;
  for (const std::string_view marker : ToolCallMarkers(
           limits->tool_call_style.value_or(ToolCallStyle::kNone))) {
    const std::optional<int32_t> id = tokenizer.TokenToId(marker);
    if (id && tokenizer.IsSpecial(*id)) {
      limits->tool_call_markers.emplace(*id, marker);
    }
  }
  return absl::OkStatus();
}

// A fine-tune may end its turns by another token than the model in whose
// configs it is kept; its tokenizer knows.
std::vector<int32_t> EndTokens(const engine::ModelSpec& spec,
                               const text::Tokenizer& tokenizer) {
  std::vector<int32_t> ids = spec.eos_ids;
  const std::optional<int32_t> own = tokenizer.eos_id();
  if (own && *own < spec.vocab_size &&
      std::find(ids.begin(), ids.end(), *own) == ids.end()) {
    ids.push_back(*own);
  }
  return ids;
}

// Both parsers take the same messages apart: calls by the one, reasoning by the
// other. Where one of them is none, what it is for stays content; where both
// are, the text is left as it is.
absl::Status LearnHarmony(const std::string& chat_template,
                          const ModelTextOptions& options,
                          const text::Tokenizer& tokenizer,
                          ModelLimits* limits) {
  const bool calls = limits->tool_call_style == ToolCallStyle::kOpenAi;
  const bool other_calls =
      !calls && limits->tool_call_style.value_or(ToolCallStyle::kNone) !=
                    ToolCallStyle::kNone;
  const bool asked = options.reasoning_parser == kHarmonyReasoning;
  const bool reasons =
      asked || (options.reasoning_parser == "auto" && !other_calls &&
                (calls || WritesHarmony(chat_template)));
  if (!calls && !reasons) return absl::OkStatus();
  if (other_calls || (!reasons && options.reasoning_parser != "none")) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tool-call-parser ", options.tool_call_parser, " and ",
                     "--reasoning-parser ", options.reasoning_parser,
                     ": openai and openai_gptoss go together, or with none"));
  }
  HarmonyFormat format{.reasoning = reasons};
  for (size_t i = 0; i < kHarmonyMarks.size(); ++i) {
    const std::string mark(kHarmonyMarks[i]);
    const int32_t id = tokenizer.TokenToId(mark).value_or(-1);
    if (id >= 0 && id < limits->vocabulary_size) {
      format.marks.emplace(id, mark);
    } else if (i < kNeededHarmonyMarks) {
      if (asked || options.tool_call_parser == "openai") {
        return absl::InvalidArgumentError(absl::StrCat(
            asked ? "--reasoning-parser openai_gptoss"
                  : "--tool-call-parser openai",
            ": this model has no token ", mark, ": serve it without the flag"));
      }
      if (calls) limits->tool_call_style.reset();
      return absl::OkStatus();
    }
  }
  // As vLLM does, whatever the model's configs say.
  for (const auto& [id, mark] : format.marks) {
    const bool ends = mark == kHarmonyReturn || mark == kHarmonyCall;
    std::vector<int32_t>& eos = limits->eos_token_ids;
    if (ends && std::find(eos.begin(), eos.end(), id) == eos.end()) {
      eos.push_back(id);
    }
  }
  limits->harmony = std::move(format);
  return absl::OkStatus();
}

absl::Status LearnReasoning(const std::string& chat_template,
                            const std::string& parser_name,
                            const text::Tokenizer& tokenizer,
                            ModelLimits* limits) {
  if (parser_name == "none" || parser_name == kHarmonyReasoning) {
    return absl::OkStatus();
  }
  const bool by_itself = parser_name == "auto";
  const auto refuse = [&](auto... why) {
    return absl::InvalidArgumentError(
        absl::StrCat("--reasoning-parser ", parser_name, ": ", why...));
  };
  const std::optional<ReasoningStyle> style =
      by_itself ? DetectReasoningStyle(chat_template)
                : ReasoningStyleByName(parser_name);
  if (!style && by_itself) return absl::OkStatus();
  if (!style) return refuse("is not known");
  ReasoningMarks marks{.style = *style};
  const ReasoningTexts texts = ReasoningTextsOf(*style);
  for (const auto& [mark, id] : {std::pair{texts.begin, &marks.begin_id},
                                 std::pair{texts.end, &marks.end_id}}) {
    *id = tokenizer.TokenToId(mark).value_or(-1);
    if (*id < 0 || *id >= limits->vocabulary_size) {
      if (by_itself) return absl::OkStatus();
      return refuse("this model has no token ", std::string(mark),
                    ": serve it without the flag");
    }
  }
  if (*style == ReasoningStyle::kKimiK2) {
    marks.calls_id =
        tokenizer.TokenToId(CallMarksOf(ToolCallStyle::kKimiK2)->block_begin)
            .value_or(-1);
  } else if (*style == ReasoningStyle::kGemma4) {
    marks.calls_id = tokenizer.TokenToId(kGemmaCallBegin).value_or(-1);
  }
  limits->reasoning = marks;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModelText>> ModelText::Load(
    const std::string& directory, const ModelTextOptions& options) {
  absl::StatusOr<text::Tokenizer> tokenizer = text::Tokenizer::Load(directory);
  if (!tokenizer.ok()) return tokenizer.status();
  absl::StatusOr<engine::ModelSpec> spec = engine::LoadModelSpec(directory);
  if (!spec.ok()) return spec.status();
  absl::StatusOr<text::ChatTemplate> chat = text::ChatTemplate::Load(
      directory, text::ChatTemplateLimits(), options.chat_template);
  if (!chat.ok() && !options.chat_template.empty()) {
    return Annotate(chat.status(), "--chat-template");
  }
  if (!chat.ok() && !absl::IsNotFound(chat.status())) return chat.status();

  ModelLimits limits;
  limits.model = options.served_name;
  if (limits.model.empty()) {
    std::filesystem::path path(directory);
    if (path.filename().empty()) path = path.parent_path();
    limits.model = path.filename().string();
  }
  limits.context_length = spec->max_positions;
  limits.vocabulary_size = spec->vocab_size;
  limits.layers = spec->layers;
  limits.eos_token_ids = EndTokens(*spec, *tokenizer);
  limits.has_chat_template = chat.ok();
  if (chat.ok()) {
    absl::Status status =
        LearnToolCalls(*chat, options.tool_call_parser, *tokenizer, &limits);
    if (!status.ok()) return status;
  }
  const std::string source =
      chat.ok() ? chat->Source(/*has_tools=*/true) : std::string();
  absl::Status reasons =
      LearnReasoning(source, options.reasoning_parser, *tokenizer, &limits);
  if (reasons.ok()) {
    reasons = LearnHarmony(source, options, *tokenizer, &limits);
  }
  if (!reasons.ok()) return reasons;
  absl::StatusOr<text::GrammarVocabulary> grammars =
      text::GrammarVocabulary::Create(*tokenizer, spec->vocab_size);
  if (!grammars.ok()) return grammars.status();
  const engine::SamplingDefaults& sampling = spec->sampling;
  limits.temperature = static_cast<float>(std::clamp(
      sampling.temperature.value_or(1), 0.0, double{kMaxTemperature}));
  if (sampling.do_sample.has_value() && !*sampling.do_sample) {
    limits.temperature = 0;
  }
  if (sampling.top_p.value_or(1) > 0) {
    limits.top_p =
        static_cast<float>(std::min(1.0, sampling.top_p.value_or(1)));
  }
  limits.top_k = std::clamp(sampling.top_k.value_or(0), 0, spec->vocab_size);
  limits.min_p =
      static_cast<float>(std::clamp(sampling.min_p.value_or(0), 0.0, 1.0));
  if (sampling.repetition_penalty.value_or(1) > 0) {
    limits.repetition_penalty = static_cast<float>(
        std::min(double{kMaxPenalty}, sampling.repetition_penalty.value_or(1)));
  }
  std::optional<text::ChatTemplate> chat_template;
  if (chat.ok()) chat_template = *std::move(chat);
  return std::unique_ptr<ModelText>(new ModelText(
      *std::move(tokenizer), *std::move(grammars), std::move(chat_template),
      ChatFormOf(source), std::move(limits), spec->window,
      spec->window > 0 && spec->common_window() == 0));
}

absl::StatusOr<ModelText::Prompt> ModelText::Encode(
    const v1::GenerateRequest& request) const {
  switch (request.prompt_case()) {
    case v1::GenerateRequest::kText:
      return Encode(request.text(), !request.has_add_special_tokens() ||
                                        request.add_special_tokens());
    case v1::GenerateRequest::kChat:
      return Encode(request.chat(), request.add_special_tokens());
    case v1::GenerateRequest::kTokenIds: {
      Prompt prompt;
      prompt.token_ids.assign(request.token_ids().ids().begin(),
                              request.token_ids().ids().end());
      return prompt;
    }
    case v1::GenerateRequest::PROMPT_NOT_SET:
      break;
  }
  return FieldInvalid("prompt", "(not set)",
                      "one of text, token_ids or chat is needed");
}

absl::StatusOr<ModelText::Prompt> ModelText::Encode(
    const std::string& text, bool add_special_tokens) const {
  absl::StatusOr<std::vector<int32_t>> ids =
      tokenizer_.Encode(text, add_special_tokens);
  if (!ids.ok()) {
    return FieldInvalid("text", "(text)", std::string(ids.status().message()));
  }
  Prompt prompt;
  prompt.token_ids = *std::move(ids);
  return prompt;
}

absl::StatusOr<ModelText::Prompt> ModelText::Encode(
    const v1::Chat& chat, bool add_special_tokens) const {
  if (!chat_template_) {
    return FieldInvalid("chat", "(set)", "this model has no chat template");
  }
  const absl::Time begun = absl::Now();
  const std::string messages = MessagesJson(chat, chat_form_);
  const std::string tools = ToolsJson(chat, chat_form_);
  std::string extra;
  if (chat.has_chat_template_kwargs()) {
    const auto status = google::protobuf::util::MessageToJsonString(
        chat.chat_template_kwargs(), &extra);
    if (!status.ok()) {
      return FieldInvalid("chat.chat_template_kwargs", "(set)",
                          "cannot be written as JSON");
    }
    // A Struct's members come in any order; a prompt has but one.
    extra = nlohmann::json::parse(extra).dump();
  }
  text::ChatTemplateInput input;
  input.messages_json = messages;
  input.tools_json = tools;
  input.extra_json = extra;
  input.now_unix_s = absl::ToUnixSeconds(absl::Now());
  input.continue_final_message = chat.continue_final_message();
  input.add_generation_prompt = chat.has_add_generation_prompt()
                                    ? chat.add_generation_prompt()
                                    : !input.continue_final_message;
  absl::StatusOr<std::string> rendered = chat_template_->Render(input);
  if (absl::IsInternal(rendered.status())) return rendered.status();
  if (!rendered.ok()) {
    absl::string_view why = rendered.status().message();
    const bool kwargs = absl::ConsumePrefix(&why, "chat_template_kwargs: ");
    return FieldInvalid(kwargs ? "chat.chat_template_kwargs" : "chat",
                        kwargs ? extra : "(messages)", std::string(why));
  }
  const absl::Duration rendering = absl::Now() - begun;
  absl::StatusOr<Prompt> prompt = Encode(*rendered, add_special_tokens);
  if (prompt.ok()) {
    prompt->rendered = *std::move(rendered);
    prompt->rendering = rendering;
  }
  return prompt;
}

absl::StatusOr<std::vector<std::vector<int32_t>>> ModelText::EncodeBadWords(
    const google::protobuf::RepeatedPtrField<std::string>& words) const {
  std::vector<std::vector<int32_t>> all;
  for (const std::string& word : words) {
    const std::string bare(absl::StripLeadingAsciiWhitespace(word));
    const absl::StatusOr<std::vector<int32_t>> alone =
        tokenizer_.Encode(bare, /*add_special_tokens=*/false);
    const absl::StatusOr<std::vector<int32_t>> spaced =
        tokenizer_.Encode(" " + bare, /*add_special_tokens=*/false);
    if (!alone.ok() || !spaced.ok() || alone->empty()) {
      return FieldInvalid("sampling.bad_words", "(a word)",
                          "this model's tokenizer makes no token of it");
    }
    all.push_back(*alone);
    if (*spaced != *alone) all.push_back(*spaced);
  }
  return all;
}

absl::Status ModelText::CheckStructuredSize(
    const v1::StructuredOptions& structured, const StructuredBudget& budget) {
  const text::GrammarSource source = text::SourceOf(structured);
  const auto bytes = static_cast<int64_t>(source.text.size());
  if (bytes <= budget.bytes) return absl::OkStatus();
  return FieldInvalid(StructuredField(source), absl::StrCat(bytes, " bytes"),
                      absl::StrCat("at most ", budget.bytes,
                                   " bytes (--structured-max-bytes)"));
}

// Programs send the same again and again, and an HTTP call each of its
// prompts. Workers compile it themselves, whatever is said here.
bool ModelText::KnowsStructured(const v1::StructuredOptions& structured) const {
  const size_t hash = HashOf(text::SourceOf(structured));
  const MutexLock lock(&mutex_);
  return std::find(compiled_.begin(), compiled_.end(), hash) != compiled_.end();
}

absl::Status ModelText::CheckStructured(const v1::StructuredOptions& structured,
                                        const StructuredBudget& budget) const {
  // Meanwhile, perhaps, for another tenant.
  if (KnowsStructured(structured)) return absl::OkStatus();
  const text::GrammarSource source = text::SourceOf(structured);
  const std::string field = StructuredField(source);
  const absl::Status status =
      grammars_.Compile(source.kind, source.text, budget.compile).status();
  if (status.ok()) {
    const MutexLock lock(&mutex_);
    compiled_.push_back(HashOf(source));
    if (compiled_.size() > kMaxCompiled) compiled_.pop_front();
    return status;
  }
  const std::string why(status.message());
  if (absl::IsResourceExhausted(status)) {
    return MakeError(status.code(), "QUEUE_FULL",
                     absl::StrCat(field, ": ", why), {{"field", field}},
                     absl::Seconds(1));
  }
  return ConstraintInvalid(field, source.text.empty() ? "(empty)" : source.text,
                           why);
}

absl::StatusOr<std::string> ModelText::Decode(absl::Span<const int32_t> ids,
                                              bool skip_special_tokens) const {
  return tokenizer_.Decode(std::span<const int32_t>(ids.data(), ids.size()),
                           skip_special_tokens);
}

std::unique_ptr<TextStream> ModelText::NewStream(
    absl::Span<const int32_t> prompt, bool skip_special_tokens) {
  return std::make_unique<Decoder>(&tokenizer_, prompt, skip_special_tokens);
}

}  // namespace tandem::router
