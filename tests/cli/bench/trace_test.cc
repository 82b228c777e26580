// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/trace.h"

#include <gtest/gtest.h>

#include <climits>
#include <cstdlib>
#include <string>

namespace tandem::bench {
namespace {

const char kHeader[] = "TIMESTAMP,ContextTokens,GeneratedTokens\n";

TEST(TraceTest, ReadsAzuresCsv) {
  const auto rows = ParseTrace(
      "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
      "2023-12-31 23:59:59.5000000,374,44\r\n"
      "2024-01-01 00:00:00.2500000,396,109\r\n"
      "2024-01-01T00:01:00+00:00,1,1",
      "t.csv", INT_MAX);
  ASSERT_TRUE(rows.ok()) << rows.status();
  ASSERT_EQ(rows->size(), 3u);
  EXPECT_EQ((*rows)[0].at_s, 0);
  EXPECT_NEAR((*rows)[1].at_s, 0.75, 1e-6);
  EXPECT_NEAR((*rows)[2].at_s, 60.5, 1e-6);
  EXPECT_EQ((*rows)[1].prompt_tokens, 396);
  EXPECT_EQ((*rows)[1].output_tokens, 109);
  EXPECT_TRUE((*rows)[1].blocks.empty());
}

TEST(TraceTest, FindsColumnsByTheirNames) {
  const auto rows = ParseTrace(
      "GeneratedTokens,note,TIMESTAMP,ContextTokens\n"
      "5,x,2024-05-10 00:00:00.009930,7\n",
      "t.csv", INT_MAX);
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(rows->front().prompt_tokens, 7);
  EXPECT_EQ(rows->front().output_tokens, 5);
}

TEST(TraceTest, ReadsMooncakesJsonLines) {
  const auto rows = ParseTrace(
      R"({"timestamp": 1000, "input_length": 513, "output_length": 5, "hash_ids": [3, 9]})"
      "\n\n"
      R"({"timestamp": 1250.5, "input_length": 512, "output_length": 6, "hash_ids": [3]})"
      "\n"
      R"({"timestamp": 1300, "input_length": 10, "output_length": 7})",
      "t.jsonl", INT_MAX);
  ASSERT_TRUE(rows.ok()) << rows.status();
  ASSERT_EQ(rows->size(), 3u);
  EXPECT_NEAR((*rows)[1].at_s, 0.2505, 1e-9);
  EXPECT_EQ((*rows)[0].blocks, std::vector<int64_t>({3, 9}));
  EXPECT_TRUE((*rows)[2].blocks.empty());
}

TEST(TraceTest, StopsAfterTheRowsAskedFor) {
  const std::string text = std::string(kHeader) +
                           "2023-11-16 18:15:46.6,374,44\n"
                           "what is not wanted is not read";
  const auto rows = ParseTrace(text, "t.csv", 1);
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(rows->size(), 1u);
}

TEST(TraceTest, MalformedFilesAreRefusedWithTheirLine) {
  const std::string at = "2023-11-16 18:15:46.6";
  const auto csv = [](const std::string& rows) { return kHeader + rows; };
  struct Case {
    std::string text, says;
  };
  const Case cases[] = {
      {"", "t:1: the header is ''"},
      {"a,b,c\n1,2,3\n", "expected the columns TIMESTAMP"},
      {kHeader, "t has no requests"},
      {csv(at + ",374\n"), "t:2: 2 fields; the header has 3"},
      {csv(at + ",374,44\nyesterday,1,1\n"), "t:3: TIMESTAMP is 'yesterday'"},
      {csv("2023-02-30 00:00:00,1,1\n"), "TIMESTAMP is '2023-02-30"},
      {csv("2023-02-03 24:00:00,1,1\n"), "TIMESTAMP is"},
      {csv("2023-02-03 00:00:00.,1,1\n"), "TIMESTAMP is"},
      {csv("2023-02-03 00:00:00+02:00,1,1\n"), "TIMESTAMP is"},
      {csv(at + ",-3,44\n"), "ContextTokens is '-3', not a whole number"},
      {csv(at + ",3,0\n"), "GeneratedTokens is '0'"},
      {csv(at + ",3,1.5\n"), "GeneratedTokens is '1.5'"},
      {csv(at + ",99999999999999999999,1\n"), "ContextTokens is '9999"},
      {csv(at + ",16777217,1\n"), "from 1 to 16777216"},
      {csv(at + ",1,1\n2023-11-16 18:15:45,1,1\n"),
       "t:3: it is earlier than the line before"},
      {"{\"timestamp\"\n", "t:1: '{\"timestamp\"' is no JSON object"},
      {"{}\n", "t:1: no \"timestamp\""},
      {R"({"timestamp": "0", "input_length": 1, "output_length": 1})",
       "\"timestamp\" is '\"0\"'"},
      {R"({"timestamp": -1, "input_length": 1, "output_length": 1})",
       "\"timestamp\" is '-1"},
      {R"({"timestamp": 1e300, "input_length": 1, "output_length": 1})",
       "\"timestamp\" is"},
      {R"({"timestamp": 0, "output_length": 1})", "no \"input_length\""},
      {R"({"timestamp": 0, "input_length": 2.5, "output_length": 1})",
       "\"input_length\" is '2.5'"},
      {R"({"timestamp": 0, "input_length": 18446744073709551615,
          "output_length": 1})",
       "is no JSON object"},
      {R"({"timestamp": 0, "input_length": 18446744073709551615, "output_length": 1})",
       "\"input_length\" is '18446744073709551615'"},
      {R"({"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]})",
       "is not a list of 2 ids"},
      {R"({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]})",
       "\"hash_ids\" holds '-1'"},
      {R"({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]})",
       "\"hash_ids\" holds '\"a\"'"},
      {R"({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": 7})",
       "is not a list of 1 ids"},
      {std::string("\x01\xff,") + std::string(100, 'x'),
       "the header is '\?\?,xxxxx"},
  };
  for (const Case& c : cases) {
    const auto rows = ParseTrace(c.text, "t", INT_MAX);
    ASSERT_FALSE(rows.ok()) << c.text;
    EXPECT_EQ(rows.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(rows.status().message().find(c.says), std::string::npos)
        << rows.status().message() << "\n  should say: " << c.says;
    EXPECT_LT(rows.status().message().size(), 300u);
  }
}

TEST(TraceTest, AFileThatIsNotThereIsNamed) {
  const auto rows = ReadTrace("/no/such/trace.csv", 1);
  EXPECT_EQ(rows.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(std::string(rows.status().message()),
            "cannot read /no/such/trace.csv: No such file or directory");
}

// Counted in the files by other means (Python's csv and json).
TEST(TraceTest, ReadsThePublishedTraces) {
  const char* const data = std::getenv("TANDEM_TEST_DATA");
  if (data == nullptr) GTEST_SKIP() << "TANDEM_TEST_DATA is not set";
  const std::string folder = std::string(data) + "/traces/";
  const auto azure = ReadTrace(folder + "azure_llm_2023_conv.csv", INT_MAX);
  ASSERT_TRUE(azure.ok()) << azure.status();
  EXPECT_EQ(azure->size(), 19366u);
  EXPECT_NEAR(azure->back().at_s, 3501.721937, 1e-5);
  EXPECT_EQ(azure->back().prompt_tokens, 197);
  const auto mooncake =
      ReadTrace(folder + "mooncake_conversation.jsonl", INT_MAX);
  ASSERT_TRUE(mooncake.ok()) << mooncake.status();
  EXPECT_EQ(mooncake->size(), 12031u);
  EXPECT_NEAR(mooncake->back().at_s, 3536.999, 1e-9);
  int64_t most = 0;
  for (const TraceRow& row : *mooncake) {
    for (const int64_t block : row.blocks) most = std::max(most, block);
  }
  EXPECT_EQ(most, 182789);
}

}  // namespace
}  // namespace tandem::bench
