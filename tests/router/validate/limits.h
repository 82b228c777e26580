// SPDX-License-Identifier: Apache-2.0
// A small model's limits, and requests to it.

#ifndef TANDEM_TESTS_ROUTER_VALIDATE_LIMITS_H_
#define TANDEM_TESTS_ROUTER_VALIDATE_LIMITS_H_

#include <gtest/gtest.h>

#include <string>

#include "google/protobuf/text_format.h"
#include "router/validate/validate.h"

namespace tandem::router {

inline constexpr int kVocabulary = 1000;

inline ModelLimits Limits() {
  ModelLimits limits;
  limits.model = "m";
  limits.context_length = 100;
  limits.vocabulary_size = kVocabulary;
  limits.has_chat_template = true;
  limits.template_has_tools = true;
  limits.tool_call_style = ToolCallStyle::kHermes;
  limits.eos_token_ids = {2, 3};
  limits.top_k = 40;
  return limits;
}

// In protobuf's text format.
inline v1::GenerateRequest Parse(const std::string& text) {
  v1::GenerateRequest request;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &request))
      << text;
  return request;
}

}  // namespace tandem::router

#endif  // TANDEM_TESTS_ROUTER_VALIDATE_LIMITS_H_
