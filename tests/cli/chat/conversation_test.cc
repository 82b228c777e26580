// SPDX-License-Identifier: Apache-2.0
#include "cli/chat/conversation.h"

#include <gtest/gtest.h>

#include "cli/chat/answer.h"
#include "common/utf8.h"

namespace tandem::chat {
namespace {

TEST(ConversationTest, QuestionsAreReopenedAndTakenBack) {
  Conversation talk;
  EXPECT_FALSE(talk.ReopenLastQuestion());
  talk.Add("user", "one");
  talk.Add("assistant", "two");
  EXPECT_TRUE(talk.ReopenLastQuestion());
  ASSERT_EQ(talk.messages().size(), 1u);
  talk.DropOpenQuestion();
  EXPECT_TRUE(talk.messages().empty());
}

TEST(ConversationTest, SavedAndLoadedItIsTheSame) {
  Conversation talk;
  talk.set_system("Be brief.");
  talk.Add("user", "a \"quoted\"\nline \xc3\xa9");
  talk.Add("assistant", "answer");
  Conversation read;
  read.Add("user", "gone");
  ASSERT_TRUE(read.FromJson(talk.ToJson()).ok());
  EXPECT_EQ(read.ToJson(), talk.ToJson());
  v1::Chat chat;
  read.Fill(&chat);
  ASSERT_EQ(chat.messages_size(), 3);
  EXPECT_EQ(chat.messages(0).role(), "system");
  EXPECT_EQ(chat.messages(1).content(), "a \"quoted\"\nline \xc3\xa9");
}

TEST(ConversationTest, OtherFilesAreRefusedAndChangeNothing) {
  Conversation talk;
  talk.Add("user", "kept");
  for (const char* const text :
       {"", "[]", "{}", R"({"messages": 1})", R"({"messages": [1]})",
        R"({"messages": [{"role": "user"}]})",
        R"({"messages": [{"role": "user", "content": [1]}]})"}) {
    EXPECT_FALSE(talk.FromJson(text).ok()) << text;
  }
  ASSERT_EQ(talk.messages().size(), 1u);
  EXPECT_EQ(talk.messages()[0].content, "kept");
}

TEST(AnswerTest, WhatAModelWroteDoesNotSteerTheTerminal) {
  EXPECT_EQ(ForTerminal("a\tb\nc \xc3\xa9 \xe2\x82\xac"),
            "a\tb\nc \xc3\xa9 \xe2\x82\xac");
  EXPECT_EQ(ForTerminal("\033[2J\r\x7f"),
            "\xef\xbf\xbd[2J\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_EQ(ForTerminal("\xc2\x9b"
                        "2J\xc2\xa0"),
            "\xef\xbf\xbd"
            "2J\xc2\xa0");
}

TEST(AnswerTest, FooterHasTheServersFigures) {
  v1::GenerateDone done;
  done.mutable_usage()->set_prompt_tokens(57);
  done.mutable_usage()->set_cached_tokens(48);
  done.mutable_usage()->set_completion_tokens(128);
  done.mutable_timings()->mutable_time_to_first_token()->set_nanos(12'000'000);
  done.mutable_timings()->mutable_time_per_output_token()->set_nanos(
      10'000'000);
  EXPECT_EQ(Footer(done),
            "57 prompt tokens (48 cached), first after 12 ms, 128 tokens at "
            "100.0/s");
}

}  // namespace
}  // namespace tandem::chat
