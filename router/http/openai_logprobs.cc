// SPDX-License-Identifier: Apache-2.0
#include "router/http/openai_logprobs.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/utf8.h"

namespace tandem::router {

using nlohmann::json;

void CharacterCount::Add(std::string_view bytes) {
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    const bool goes_on = (byte & 0xC0) == 0x80;
    if (goes_on && open_ > 0) {
      --open_;
      continue;
    }
    ++count_;
    open_ = goes_on || byte < 0xC0 ? 0 : byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
  }
}

json CompletionLogprobs(
    const google::protobuf::RepeatedPtrField<v1::TokenLogprob>& records,
    CharacterCount* before) {
  json offsets = json::array();
  json tokens = json::array();
  json values = json::array();
  json tops = json::array();
  for (const v1::TokenLogprob& token : records) {
    offsets.push_back(before->count());
    before->Add(token.token());
    tokens.push_back(token.token());
    if (token.rank() == 0) {
      values.push_back(nullptr);
      tops.push_back(nullptr);
      continue;
    }
    values.push_back(token.logprob());
    // Tokens of one text, or of bytes that no text has: the more probable one,
    // so that it is seen that the chosen one was not the first.
    std::map<std::string, float> top = {
        {ValidUtf8(token.token()), token.logprob()}};
    for (const v1::TokenAlternative& other : token.top()) {
      float& logprob =
          top.emplace(ValidUtf8(other.token()), other.logprob()).first->second;
      logprob = std::max(logprob, other.logprob());
    }
    tops.push_back(std::move(top));
  }
  return {{"text_offset", std::move(offsets)},
          {"tokens", std::move(tokens)},
          {"token_logprobs", std::move(values)},
          {"top_logprobs", std::move(tops)}};
}

json PromptLogprob(const v1::TokenLogprob& token) {
  if (token.rank() == 0) return nullptr;
  const auto record = [](float logprob, int rank, const std::string& text) {
    return json{{"logprob", logprob}, {"rank", rank}, {"decoded_token", text}};
  };
  json records = json::object();
  int rank = 0;
  for (const v1::TokenAlternative& other : token.top()) {
    records[absl::StrCat(other.token_id())] =
        record(other.logprob(), ++rank, other.token());
  }
  records[absl::StrCat(token.token_id())] =
      record(token.logprob(), token.rank(), token.token());
  return records;
}

json ChatLogprob(const std::string& token, float logprob) {
  json bytes = json::array();
  for (const char byte : token)
    bytes.push_back(static_cast<unsigned char>(byte));
  return {{"token", token}, {"logprob", logprob}, {"bytes", std::move(bytes)}};
}

}  // namespace tandem::router
