// SPDX-License-Identifier: Apache-2.0
// What lines do to a conversation, with a model that answers as it is told.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cli/chat/chat.h"

namespace tandem::chat {
namespace {

Answer Said(const std::string& text) {
  Answer answer;
  answer.text = text;
  return answer;
}

TEST(ChatSession, AnAnswerThatCannotBeMadeAgainIsKept) {
  absl::StatusOr<Answer> next = Said("Hello.");
  ChatSession session(
      {}, cli::SamplingFlags(),
      [&](const v1::GenerateRequest&, const ShowFunction&) { return next; });
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  EXPECT_TRUE(session.HandleLine("Hi"));
  next = absl::UnavailableError("gone");
  EXPECT_TRUE(session.HandleLine("/regen"));
  EXPECT_FALSE(session.last_status().ok());
  const std::vector<Message>& kept = session.conversation()->messages();
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(kept[0].content, "Hi");
  EXPECT_EQ(kept[1].content, "Hello.");
  // A new question without an answer is another matter.
  EXPECT_TRUE(session.HandleLine("And you?"));
  EXPECT_EQ(kept.size(), 2u);
  next = Said("Good day.");
  EXPECT_TRUE(session.HandleLine("/regen"));
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(kept[1].content, "Good day.");
  testing::internal::GetCapturedStdout();
  testing::internal::GetCapturedStderr();
}

TEST(ChatSession, WhatIsNoUtf8IsNotSent) {
  int asked = 0;
  ChatSession session({}, cli::SamplingFlags(),
                      [&](const v1::GenerateRequest&, const ShowFunction&) {
                        ++asked;
                        return Said("Hello.");
                      });
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  EXPECT_TRUE(session.HandleLine("caf\xe9"));
  EXPECT_EQ(session.last_status(),
            absl::InvalidArgumentError("this line is not UTF-8 text"));
  EXPECT_EQ(asked, 0);
  EXPECT_TRUE(session.HandleLine("caf\xc3\xa9"));
  EXPECT_TRUE(session.last_status().ok());
  EXPECT_EQ(asked, 1);
  testing::internal::GetCapturedStdout();
  testing::internal::GetCapturedStderr();
}

}  // namespace
}  // namespace tandem::chat
