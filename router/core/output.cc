// SPDX-License-Identifier: Apache-2.0
#include "router/core/output.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

namespace tandem::router {
namespace {

bool Contains(absl::Span<const int32_t> ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

Output::Output(const EffectiveRequest& request,
               absl::Span<const int32_t> prompt, TextCodec* codec,
               ClientStream* client, int index)
    : request_(request),
      prompt_(request.output.return_token_ids() || request.output.echo() ||
                      request.output.has_prompt_logprobs()
                  ? std::vector<int32_t>(prompt.begin(), prompt.end())
                  : std::vector<int32_t>()),
      codec_(codec),
      client_(client),
      index_(index),
      stops_({request.stopping.stop().begin(), request.stopping.stop().end()},
             request.stopping.include_stop_str_in_output()),
      constrained_(request.structured &&
                   (!request.reasoning || request.reasoning->content_first)) {
  if (request.reasoning) reasoning_.emplace(*request.reasoning);
  if (request.output.text() && codec != nullptr) {
    text_ = codec->NewStream(prompt, request.output.skip_special_tokens());
  }
  if (request.harmony && codec != nullptr) {
    const bool calls = request.tool_calls && text_ != nullptr;
    harmony_ = std::make_unique<HarmonyOutput>(
        *request.harmony, calls ? &*request.tool_calls : nullptr, index);
    harmony_->Begin(prompt, codec);
  } else if (request.tool_calls && text_ != nullptr) {
    calls_ = std::make_unique<ToolCallOutput>(*request.tool_calls, index);
  }
}

void Output::Started(std::string request_id, const std::string& model,
                     int prompt_tokens, int cached_tokens,
                     std::string system_fingerprint) {
  if (std::exchange(started_, true)) return;
  v1::GenerateResponse response;
  response.set_request_id(std::move(request_id));
  v1::GenerateStarted* const started = response.mutable_started();
  started->set_model(model);
  started->set_prompt_tokens(prompt_tokens);
  started->set_cached_tokens(cached_tokens);
  started->set_system_fingerprint(std::move(system_fingerprint));
  *started->mutable_sampling() = request_.sampling;
  *started->mutable_stopping() = request_.stopping;
  *started->mutable_output() = request_.output;
  if (request_.beam) *started->mutable_beam() = *request_.beam;
  started->set_placement(request_.placement);
  started->set_adapter(request_.adapter);
  if (request_.output.return_token_ids()) {
    started->mutable_prompt_token_ids()->Add(prompt_.begin(), prompt_.end());
  }
  client_->Send(std::move(response));
  if (request_.output.echo()) Echo();
  if (request_.output.has_prompt_logprobs()) {
    v1::Token first;
    first.set_token_id(prompt_.front());
    const v1::Token* const only = &first;
    Scores(0, {&only, 1});
  }
}

void Output::Scores(int position, absl::Span<const v1::Token* const> tokens) {
  v1::GenerateResponse response;
  response.mutable_prompt_logprobs()->set_position(position);
  for (const v1::Token* token : tokens) {
    Fill(*token, response.mutable_prompt_logprobs()->add_tokens());
  }
  client_->Send(std::move(response));
}

// No stop string is looked for in it.
void Output::Echo() {
  if (codec_ == nullptr) return;
  const std::unique_ptr<TextStream> stream =
      codec_->NewStream({}, request_.output.skip_special_tokens());
  v1::GenerateResponse response;
  response.mutable_delta()->set_index(index_);
  std::string* const text = response.mutable_delta()->mutable_text();
  for (const int32_t id : prompt_) text->append(stream->Push(id));
  // What begins a character the text behind it begins with, too.
  if (text_ == nullptr) text->append(stream->Finish());
  client_->Send(std::move(response));
}

bool Output::EndsSequence(int32_t token_id, int nth) const {
  if (!Contains(request_.end_token_ids, token_id)) return false;
  // Drawn where only it may come, and a text that must match has none in it.
  const bool whole = constrained_ && Contains(request_.model_end_ids, token_id);
  return whole || nth > request_.stopping.min_tokens();
}

Output::Verdict Output::Add(const v1::Token& token) {
  const Verdict verdict = Take(token);
  if (request_.reasoning && token.token_id() == request_.reasoning->end_id) {
    constrained_ = request_.structured.has_value();
  }
  held_.set_reasoning_tokens(reasoning_tokens());
  return verdict;
}

Output::Verdict Output::Take(const v1::Token& token) {
  ++tokens_;
  Record(token);
  const bool ends = EndsSequence(token.token_id(), tokens_);
  if (ends) end_token_ = token.token_id();
  const bool shown = text_ != nullptr &&
                     (!ends || request_.stopping.include_stop_str_in_output());
  if (!shown) {
    ArrivesUnseen(token.token_id());
    return ends ? Verdict::kEndToken : Verdict::kGoesOn;
  }
  const std::string piece = text_->Push(token.token_id());
  Arrives(token.token_id(), piece);
  if (Stops(piece)) return Verdict::kStopString;
  return ends ? Verdict::kEndToken : Verdict::kGoesOn;
}

bool Output::Stops(std::string_view piece) {
  if (tokens_ <= request_.stopping.min_tokens()) {
    Release(stops_.Pass(piece));
    return false;
  }
  const StopStrings::Result result = stops_.Push(piece);
  Release(result.text);
  stop_string_ = result.matched;
  return stop_string_ >= 0;
}

// Marks of calls count in the content alone.
void Output::Arrives(int32_t token_id, std::string_view piece) {
  if (harmony_ != nullptr) return harmony_->Arrives(token_id, piece);
  std::optional<size_t> content = piece.size();
  if (reasoning_) content = reasoning_->Arrives(token_id, piece);
  if (content && calls_ != nullptr) calls_->Arrives(token_id, *content);
}

void Output::ArrivesUnseen(int32_t token_id) {
  if (reasoning_) reasoning_->Arrives(token_id, "");
  if (harmony_ == nullptr) return;
  if (text_ != nullptr) return harmony_->Arrives(token_id, "");
  // Messages are known by their text, also where the client gets none.
  const std::string piece = TokenBytes(token_id);
  harmony_->Arrives(token_id, piece);
  v1::GenerateDelta unsaid;
  harmony_->Release(piece, &unsaid);
}

int Output::reasoning_tokens() const {
  if (harmony_ != nullptr) return harmony_->reasoning_tokens();
  return reasoning_ ? reasoning_->tokens() : 0;
}

void Output::Release(std::string_view text) {
  if (harmony_ != nullptr) return harmony_->Release(text, &delta_);
  std::string content;
  if (reasoning_) {
    reasoning_->Release(text, delta_.mutable_reasoning_content(), &content);
    text = content;
  }
  if (calls_ == nullptr) {
    delta_.mutable_text()->append(text);
  } else {
    calls_->Release(text, &delta_);
  }
}

void Output::Record(const v1::Token& token) {
  if (request_.output.return_token_ids()) held_.add_token_ids(token.token_id());
  if (request_.output.has_attention()) RecordAttention(token);
  if (!request_.output.has_logprobs()) return;
  Fill(token, held_.add_logprobs());
}

void Output::Fill(const v1::Token& token, v1::TokenLogprob* record) const {
  record->set_token_id(token.token_id());
  record->set_token(TokenBytes(token.token_id()));
  record->set_logprob(token.logprob());
  record->set_rank(token.rank());
  for (const v1::TopLogprob& top : token.top()) {
    v1::TokenAlternative* const alternative = record->add_top();
    alternative->set_token_id(top.token_id());
    alternative->set_token(TokenBytes(top.token_id()));
    alternative->set_logprob(top.logprob());
  }
}

// [rows][positions]; of a worker that sent none, rows of none.
void Output::RecordAttention(const v1::Token& token) {
  const v1::AttentionOptions& asked = request_.output.attention();
  const int rows = asked.mean() ? 1 : asked.layers_size();
  v1::TokenAttention* const record = held_.add_attention();
  const int positions = token.attention_size() / rows;
  const float* next = token.attention().data();
  for (int row = 0; row < rows; ++row) {
    v1::AttentionWeights* const weights = record->add_layers();
    weights->set_layer(asked.mean() ? -1 : asked.layers(row));
    weights->mutable_weights()->Add(next, next + positions);
    next += positions;
  }
}

std::string Output::TokenBytes(int32_t token_id) const {
  return codec_ == nullptr ? "" : codec_->TokenBytes(token_id);
}

void Output::Flush() {
  if (!stops_.holding()) {
    delta_.MergeFrom(std::exchange(held_, v1::GenerateDelta()));
  }
  if (delta_.text().empty() && delta_.reasoning_content().empty() &&
      delta_.tool_calls().empty() && delta_.token_ids().empty() &&
      delta_.logprobs().empty() && delta_.attention().empty()) {
    return;
  }
  v1::GenerateResponse response;
  *response.mutable_delta() = std::exchange(delta_, v1::GenerateDelta());
  response.mutable_delta()->set_index(index_);
  client_->Send(std::move(response));
}

v1::FinishReason Output::Finished(v1::FinishReason reason) {
  if (text_ != nullptr && stop_string_ < 0) {
    // The rest of a character may still complete a stop string.
    if (Stops(text_->Finish())) reason = v1::FINISH_REASON_STOP;
    Release(stops_.Flush());
  }
  if (calls_ != nullptr) calls_->Finish(&delta_);
  if (harmony_ != nullptr && text_ != nullptr) harmony_->Finish(&delta_);
  held_.set_reasoning_tokens(reasoning_tokens());
  Flush();
  v1::GenerateResponse response;
  v1::GenerateFinished* const finished = response.mutable_finished();
  finished->set_index(index_);
  const bool called = (calls_ != nullptr && calls_->any()) ||
                      (harmony_ != nullptr && harmony_->called());
  const bool stopped = reason == v1::FINISH_REASON_STOP;
  if (called && stopped) reason = v1::FINISH_REASON_TOOL_CALLS;
  finished->set_finish_reason(reason);
  if (stopped) {
    if (stop_string_ >= 0) {
      finished->set_stop_string(request_.stopping.stop(stop_string_));
    } else if (std::find(request_.stopping.stop_token_ids().begin(),
                         request_.stopping.stop_token_ids().end(),
                         static_cast<uint32_t>(end_token_)) !=
               request_.stopping.stop_token_ids().end()) {
      finished->set_stop_token_id(end_token_);
    } else if (end_token_ >= 0) {
      finished->set_eos_token_id(end_token_);
    }
  }
  client_->Send(std::move(response));
  return reason;
}

void Output::Done(v1::GenerateDone done) {
  v1::GenerateResponse response;
  *response.mutable_done() = std::move(done);
  client_->Send(std::move(response));
}

}  // namespace tandem::router
