// SPDX-License-Identifier: Apache-2.0
#include "common/log.h"

#include <cstdio>
#include <cstdlib>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem {
namespace {

using ::testing::MatchesRegex;

// What `body` logs. A file, since isatty wants a descriptor.
std::string Capture(LogOptions options, const std::function<void()>& body) {
  std::FILE* file = std::tmpfile();
  options.output = file;
  EXPECT_TRUE(InitLog(options).ok());
  body();
  std::string text(static_cast<size_t>(std::ftell(file)), '\0');
  std::rewind(file);
  EXPECT_EQ(std::fread(text.data(), 1, text.size(), file), text.size());
  EXPECT_TRUE(InitLog({}).ok());
  std::fclose(file);
  return text;
}

TEST(LogTest, JsonIsOneObjectPerLineWithTheKeysInOrder) {
  const std::string text = Capture(
      {.format = "auto", .level = "info", .role = "decode", .worker = "w1"},
      [] {
        LogInfo("ready", {{"port", 8000},
                          {"took", absl::Milliseconds(1500)},
                          {"tls", false},
                          {"request_id", "r\"1"},
                          {"msg", "mine"},
                          {"nan", std::nan("")},
                          {"status", absl::NotFoundError("no\nmodel")}});
      });
  EXPECT_THAT(
      text,
      MatchesRegex(
          R"re(\{"ts":"[0-9-]+T[0-9:]+\.[0-9]{6}Z","level":"info","role":"decode","worker":"w1","request_id":"r\\"1","msg":"ready","port":8000,"took":1.5,"tls":false,"field_msg":"mine","nan":"nan","status":"NOT_FOUND: no\\nmodel"\}
)re"));
}

TEST(LogTest, TextIsOneReadableLine) {
  const std::string text =
      Capture({.format = "text", .level = "debug", .role = "router"}, [] {
        LogDebug("worker\nlost",
                 {{"worker", "p0"}, {"why", "no beat"}, {"n", 3}});
      });
  EXPECT_THAT(
      text,
      MatchesRegex(
          R"re([0-9:]+\.[0-9]{3} debug   router worker\\nlost worker=p0 why="no beat" n=3
)re"));
}

TEST(LogTest, LevelsBelowTheChosenOneAreSilent) {
  const std::string text = Capture({.format = "text", .level = "warning"}, [] {
    LogDebug("one");
    LogInfo("two");
    LogWarning("three");
    LogError("four");
  });
  EXPECT_EQ(text.find("one"), std::string::npos);
  EXPECT_EQ(text.find("two"), std::string::npos);
  EXPECT_NE(text.find("warning three"), std::string::npos);
  EXPECT_NE(text.find("error   four"), std::string::npos);
}

TEST(LogTest, UnknownFormatsAndLevelsAreRefused) {
  EXPECT_EQ(InitLog({.format = "xml"}).message(),
            "--log-format: xml is none of auto, text, json");
  EXPECT_EQ(InitLog({.level = "loud"}).message(),
            "--log-level: loud is none of debug, info, warning, error");
}

TEST(LogTest, LinesOfManyThreadsStayWhole) {
  const std::string text = Capture({.format = "json"}, [] {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([t] {
        for (int i = 0; i < 250; ++i) LogInfo("m", {{"thread", t}});
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  std::vector<std::string> lines = absl::StrSplit(text, '\n');
  ASSERT_EQ(lines.size(), 1001u);
  lines.pop_back();
  for (const std::string& line : lines) {
    EXPECT_EQ(line.front(), '{');
    EXPECT_EQ(line.back(), '}');
  }
}

TEST(LogLimiterTest, PassesOnePerIntervalAndCountsTheOthers) {
  LogLimiter limiter(absl::Seconds(10));
  const absl::Time start = absl::UnixEpoch();
  int64_t hidden = -1;
  EXPECT_TRUE(limiter.Allow(start, &hidden));
  EXPECT_EQ(hidden, 0);
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(limiter.Allow(start + absl::Seconds(i), &hidden));
  }
  EXPECT_TRUE(limiter.Allow(start + absl::Seconds(10), &hidden));
  EXPECT_EQ(hidden, 5);
  EXPECT_FALSE(limiter.Allow(start + absl::Seconds(19), &hidden));
}

}  // namespace
}  // namespace tandem
