// SPDX-License-Identifier: Apache-2.0
// Keys, buckets and what tenants are charged, against a clock of the test's.
#include "router/tenants/tenants.h"

#include <openssl/evp.h>

#include <cstdio>
#include <fstream>
#include <limits>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/intake/charged_stream.h"
#include "router/tenants/access.h"
#include "router/tenants/key_file.h"
#include "router/tenants/token_bucket.h"

namespace tandem::router {
namespace {

using Outcome = Tenants::Charge::Outcome;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Of "secret", as coreutils' sha256sum has it.
constexpr char kHash[] =
    "sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
// Of "other".
constexpr char kOther[] =
    "sha256:d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa";

class Ledger final : public RouterObserver {
 public:
  void OnTenantRefused(const std::string& tenant,
                       std::string_view limit) override {
    const MutexLock lock(&mutex);
    refused.push_back(absl::StrCat(tenant, ":", std::string(limit)));
  }
  void OnTenantTokens(const std::string& tenant, int64_t prompt,
                      int64_t generated) override {
    const MutexLock lock(&mutex);
    prompt_tokens += prompt;
    generated_tokens += generated;
  }
  Mutex mutex;
  std::vector<std::string> refused;
  int64_t prompt_tokens = 0, generated_tokens = 0;
};

TEST(KeyFileTest, EntriesShareTheirTenantsLimits) {
  const auto file = ParseKeyFile(absl::StrCat(
      "# who may call\n\nacme ", kHash, "  tpm_limit=1000 name=laptop # hers\n",
      "\tacme ", kOther, " rpm_limit=5 tpm_limit=1000\r\n"));
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->keys.size(), 2u);
  EXPECT_EQ(file->keys[0].digest, DigestOf("secret"));
  EXPECT_EQ(file->keys[0].name, "laptop");
  EXPECT_EQ(file->keys[0].line, 3);
  EXPECT_EQ(file->keys[1].digest, DigestOf("other"));
  EXPECT_THAT(file->tenants,
              ElementsAre(::testing::Pair(
                  "acme", TenantLimits{.tokens_per_minute = 1000,
                                       .requests_per_minute = 5,
                                       .parallel_requests = 0})));
}

TEST(KeyFileTest, WhatIsWrongIsNamedByLineAndNeverShown) {
  const std::string good = absl::StrCat("acme ", kHash);
  const struct {
    std::string text;
    const char* want;
  } kCases[] = {
      {"acme sk-live-abcdef", "line 1: the key's hash comes second"},
      {"\nacme", "line 2: the key's hash"},
      {"acme sha256:12", "line 1: the key's hash"},
      {absl::StrCat("acme ", kHash, "0"), "line 1: the key's hash"},
      {absl::StrCat("acme ", std::string(kHash, 70), "g"), "line 1: the key's"},
      {absl::StrCat("a/b ", kHash), "line 1: a tenant's name comes first"},
      {absl::StrCat(std::string(65, 'a'), " ", kHash), "line 1: a tenant's"},
      {good + " tpm=5", "line 1: an option is none of tpm_limit"},
      {good + " tpm_limit", "name=value"},
      {good + " tpm_limit=0", "tpm_limit is given once: a number from 1"},
      {good + " tpm_limit=-5", "a number from 1"},
      {good + " rpm_limit=1000000000001", "a number from 1 to 1000000000000"},
      {good + " max_parallel_requests=1000001", "from 1 to 1000000;"},
      {good + " rpm_limit=5x", "a number from 1"},
      {good + " rpm_limit=5 rpm_limit=5", "rpm_limit is given once"},
      {good + " name=", "name = is given once"},
      {good + "\n" + good, "line 2: the key of line 1 again"},
      {absl::StrCat(good, " tpm_limit=5\nacme ", kOther, " tpm_limit=6"),
       "line 2: tpm_limit = 6: an entry of the same tenant above says 5"},
      {good + " " + std::string(1024, ' '), "line 1: over 1024 bytes"},
  };
  for (const auto& c : kCases) {
    const auto file = ParseKeyFile(c.text);
    ASSERT_FALSE(file.ok()) << c.text;
    EXPECT_THAT(std::string(file.status().message()), HasSubstr(c.want));
    EXPECT_EQ(file.status().message().find("abcdef"), absl::string_view::npos);
  }
  EXPECT_FALSE(ParseKeyFile(std::string(kMaxKeyFileBytes + 1, '\n')).ok());
  EXPECT_TRUE(ParseKeyFile(std::string(kMaxKeyFileBytes, '\n')).ok());
  EXPECT_TRUE(ParseKeyFile("").ok());
  EXPECT_FALSE(ReadKeyFile("/nonexistent").ok());
}

TEST(KeyFileTest, HoldsAsManyKeysAsAllowedAndNoMore) {
  std::string text;
  for (size_t i = 0; i < kMaxKeys; ++i) {
    text += FormatKeyEntry({.tenant = "t", .digest = DigestOf(absl::StrCat(i))},
                           {}) +
            "\n";
  }
  ASSERT_TRUE(ParseKeyFile(text).ok());
  text += absl::StrCat("t ", kHash);
  EXPECT_THAT(std::string(ParseKeyFile(text).status().message()),
              HasSubstr("line 4097: more than 4096 keys"));
}

TEST(KeyFileTest, NewKeysAreLongDifferentAndReadBack) {
  SystemRandom random;
  std::set<std::string> keys;
  for (int i = 0; i < 100; ++i) keys.insert(NewKey(&random));
  ASSERT_EQ(keys.size(), 100u);
  const TenantLimits limits{7, 8, 9};
  for (const std::string& key : keys) {
    EXPECT_EQ(key.size(), 53u) << key;
    EXPECT_EQ(key.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP"
                                    "QRSTUVWXYZ0123456789-_"),
              std::string::npos);
    const auto file = ParseKeyFile(FormatKeyEntry(
        {.tenant = "acme", .digest = DigestOf(key), .name = "ci"}, limits));
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->keys[0].digest, DigestOf(key));
    EXPECT_EQ(file->keys[0].name, "ci");
    EXPECT_EQ(file->tenants.at("acme"), limits);
  }
}

TEST(TokenBucketTest, IsExactAtItsBoundaries) {
  absl::Time now = absl::UnixEpoch();
  TokenBucket bucket(7, now);
  EXPECT_TRUE(bucket.Has(7, now));
  EXPECT_FALSE(bucket.Has(8, now));
  bucket.Take(3, now);
  bucket.Take(4, now);
  EXPECT_FALSE(bucket.Has(1, now));
  // 60/7 s a token: rounded up to a nanosecond, it is there; one before, not.
  const absl::Duration wait = bucket.Until(1, now);
  EXPECT_EQ(wait, absl::Nanoseconds(8'571'428'572));
  EXPECT_FALSE(bucket.Has(1, now + wait - absl::Nanoseconds(1)));
  EXPECT_TRUE(bucket.Has(1, now + wait));
  EXPECT_EQ(bucket.Until(8, now), absl::InfiniteDuration());
  // Looked at in the oddest steps, a minute is a minute.
  std::mt19937_64 random(1);
  const absl::Time end = absl::UnixEpoch() + absl::Minutes(1);
  while (now < end) {
    now = std::min(end, now + absl::Nanoseconds(
                                  static_cast<int64_t>(random() % 99999999)));
    EXPECT_EQ(bucket.Has(7, now), now == end);
  }
  EXPECT_EQ(bucket.Left(now), 7);
  EXPECT_EQ(bucket.Left(now + absl::Hours(1000)), 7);
}

TEST(TokenBucketTest, OwesWhatItGaveTooMuch) {
  const absl::Time now = absl::UnixEpoch();
  TokenBucket bucket(60, now);
  bucket.Take(90, now);
  EXPECT_EQ(bucket.Left(now), 0);
  EXPECT_EQ(bucket.Until(1, now), absl::Seconds(31));
  bucket.Give(1000, now);
  EXPECT_EQ(bucket.Left(now), 60);
}

TEST(TokenBucketTest, NewLimitsKeepWhatWasTaken) {
  const absl::Time now = absl::UnixEpoch();
  TokenBucket bucket(100, now);
  bucket.Take(60, now);
  bucket.SetLimit(70, now);
  EXPECT_EQ(bucket.Left(now), 10);
  bucket.SetLimit(0, now);
  bucket.Take(1'000'000, now);
  EXPECT_TRUE(bucket.Has(std::numeric_limits<int64_t>::max(), now));
  bucket.SetLimit(kMaxLimitPerMinute, now);
  EXPECT_EQ(bucket.Left(now + absl::Hours(24 * 365)), kMaxLimitPerMinute);
}

TEST(TokenBucketTest, AMuchLowerLimitLeavesNoMoreThanAnEmptyBucket) {
  absl::Time now = absl::UnixEpoch();
  TokenBucket bucket(1'000'000, now);
  bucket.Take(900'000, now);
  bucket.SetLimit(1'000, now);
  EXPECT_EQ(bucket.Left(now), 0);
  EXPECT_EQ(bucket.UntilFull(now), absl::Minutes(1));
  // A debt is no more and no less than before, and ends where no limit is.
  bucket.Take(500, now);
  bucket.SetLimit(100, now);
  EXPECT_EQ(bucket.UntilFull(now), absl::Minutes(6));
  bucket.SetLimit(0, now);
  now += absl::Hours(24);
  bucket.SetLimit(100, now);
  EXPECT_EQ(bucket.Left(now), 100);
}

class TenantsTest : public testing::Test {
 protected:
  static constexpr TenantLimits kLimits{100, 10, 3};
  TenantsTest() {
    tenants_.Set({{"acme", kLimits}, {"zen", kLimits}, {"free", {}}});
  }
  absl::StatusOr<std::shared_ptr<Tenants::Charge>> Ask(
      int64_t prompt, int64_t completion, bool bounded = true,
      const std::string& tenant = "acme") {
    return tenants_.Admit(tenant, {prompt, completion, bounded});
  }
  std::string Remaining(const std::string& what) {
    for (const auto& [name, value] : tenants_.RateHeaders("acme")) {
      if (name == "x-ratelimit-remaining-" + what) return value;
    }
    return "";
  }

  absl::Time now_ = absl::UnixEpoch();
  Ledger ledger_;
  Tenants tenants_{[this] { return now_; }, &ledger_};
};

TEST_F(TenantsTest, TokensRunOutExactlyAndComeBack) {
  const auto first = Ask(30, 30);
  ASSERT_TRUE(first.ok());
  const auto beyond = Ask(20, 21);
  ASSERT_FALSE(beyond.ok());
  EXPECT_EQ(beyond.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(beyond.status()), "RATE_LIMITED");
  EXPECT_THAT(ErrorMetadata(beyond.status()),
              ElementsAre(::testing::Pair("limit", "tokens_per_minute"),
                          ::testing::Pair("tenant", "acme")));
  EXPECT_EQ(RetryAfter(beyond.status()), absl::Milliseconds(600));
  EXPECT_THAT(
      std::string(beyond.status().message()),
      HasSubstr("limit 100, left 40, requested 41. Try again in 600ms"));
  const auto boundary = Ask(20, 20);
  ASSERT_TRUE(boundary.ok());
  EXPECT_FALSE(Ask(1, 0).ok());
  EXPECT_TRUE(Ask(1, 0, true, "zen").ok()) << "another tenant's";
  now_ += absl::Milliseconds(600);
  EXPECT_TRUE(Ask(1, 0).ok());
  EXPECT_THAT(ledger_.refused,
              ElementsAre("acme:tokens_per_minute", "acme:tokens_per_minute"));
}

TEST_F(TenantsTest, WhatNeverFitsIsNotToBeTriedAgain) {
  const auto all = Ask(99, 1);
  EXPECT_TRUE(all.ok());
  const auto more = Ask(99, 2);
  ASSERT_FALSE(more.ok());
  EXPECT_EQ(RetryAfter(more.status()), std::nullopt);
  EXPECT_THAT(std::string(more.status().message()),
              HasSubstr("shorten the prompt or lower max_tokens"));
}

TEST_F(TenantsTest, ACallsRequestsFitTogetherOrNotAtAll) {
  const auto all = [this](const std::vector<TenantAsk>& asks) {
    return tenants_.AdmitAll("acme", asks);
  };
  {
    const auto charges = all({{30, 10}, {20, 10}});
    ASSERT_TRUE(charges.ok());
    ASSERT_EQ(charges->size(), 2u);
    EXPECT_EQ(Remaining("tokens"), "30");
    EXPECT_EQ(Remaining("requests"), "8");
    (*charges)[0]->Begun();
    (*charges)[0]->End(Outcome::kDone);
    EXPECT_EQ(Remaining("tokens"), "40");
    // The first alone would fit now.
    const absl::Status later = all({{30, 1}, {10, 9}}).status();
    EXPECT_EQ(RetryAfter(later), absl::Seconds(6));
    EXPECT_THAT(std::string(later.message()),
                HasSubstr("left 40, requested 50. Try again in 6s"));
    EXPECT_EQ(Remaining("tokens"), "40");
    EXPECT_EQ(Remaining("requests"), "8");
  }
  const absl::Status tokens = all({{40, 20}, {40, 1}}).status();
  EXPECT_EQ(RetryAfter(tokens), std::nullopt);
  EXPECT_THAT(std::string(tokens.message()),
              HasSubstr("requested 101. That is more than a whole minute's: "
                        "send fewer prompts at a time"));
  const absl::Status parallel = all(std::vector<TenantAsk>(4)).status();
  EXPECT_EQ(RetryAfter(parallel), std::nullopt);
  EXPECT_THAT(std::string(parallel.message()),
              HasSubstr("more than there may ever be"));
  tenants_.Set({{"acme", {.requests_per_minute = 3}}});
  const absl::Status requests = all(std::vector<TenantAsk>(4)).status();
  EXPECT_EQ(RetryAfter(requests), std::nullopt);
  EXPECT_THAT(std::string(requests.message()),
              HasSubstr("limit 3, requested 4. That is more than a whole "
                        "minute's: send fewer prompts at a time"));
}

TEST_F(TenantsTest, UnstatedLengthsPayAsTheyGo) {
  tenants_.Set({{"acme", {.tokens_per_minute = 1000}}});
  auto charge = Ask(44, 1'000'000, false);
  ASSERT_TRUE(charge.ok());
  EXPECT_EQ(Remaining("tokens"), "700");
  (*charge)->Generated(256);
  EXPECT_EQ(Remaining("tokens"), "700");
  (*charge)->Generated(1);
  EXPECT_EQ(Remaining("tokens"), "699");
  (*charge)->Generated(1000);
  EXPECT_EQ(Remaining("tokens"), "0");
  (*charge)->End(Outcome::kDone);
  EXPECT_EQ(ledger_.generated_tokens, 1257);
  // 301 owed.
  const auto next = Ask(1, 0);
  EXPECT_EQ(RetryAfter(next.status()), absl::Milliseconds(60 * 302));
  // A prompt that takes nearly all leaves less than is usually set aside.
  now_ += absl::Minutes(2);
  EXPECT_TRUE(Ask(999, 1'000'000, false).ok());
  const absl::Status all = Ask(1000, 1'000'000, false).status();
  EXPECT_EQ(all.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(RetryAfter(all), std::nullopt);
}

TEST_F(TenantsTest, PaysForWhatItGot) {
  const struct {
    bool begun;
    int64_t generated;
    Outcome outcome;
    const char* tokens;
    const char* requests;
  } kCases[] = {
      {true, 5, Outcome::kDone, "75", "9"},
      {true, 5, Outcome::kFailed, "75", "9"},
      {true, 5, Outcome::kGivenUp, "75", "9"},
      {true, 0, Outcome::kDone, "80", "9"},  // scores of the prompt
      {false, 0, Outcome::kDone, "100", "9"},
      {true, 0, Outcome::kFailed, "100", "10"},
      {false, 0, Outcome::kFailed, "100", "10"},
      {true, 0, Outcome::kGivenUp, "80", "9"},
      {false, 0, Outcome::kGivenUp, "100", "9"},
  };
  for (const auto& c : kCases) {
    auto charge = Ask(20, 80);
    ASSERT_TRUE(charge.ok()) << charge.status();
    EXPECT_EQ(Remaining("tokens"), "0");
    EXPECT_EQ(Remaining("requests"), "9");
    if (c.begun) (*charge)->Begun();
    if (c.generated > 0) (*charge)->Generated(c.generated);
    (*charge)->End(c.outcome);
    (*charge)->End(Outcome::kFailed);  // the first word is the last
    (*charge)->Generated(50);
    EXPECT_EQ(Remaining("tokens"), c.tokens);
    EXPECT_EQ(Remaining("requests"), c.requests);
    charge->reset();
    EXPECT_EQ(Remaining("tokens"), c.tokens);
    now_ += absl::Minutes(1);
  }
}

// Beams: how far a search has come is not known before its end.
TEST_F(TenantsTest, WhatOnlyTheEndTellsIsPaidForWhenGivenUp) {
  const struct {
    bool begun;
    int64_t generated;
    Outcome outcome;
    const char* tokens;
  } kCases[] = {
      {true, 0, Outcome::kGivenUp, "0"},   {false, 0, Outcome::kGivenUp, "100"},
      {true, 0, Outcome::kFailed, "100"},  {true, 30, Outcome::kDone, "50"},
      {true, 30, Outcome::kGivenUp, "50"}, {true, 0, Outcome::kDone, "0"},
  };
  for (const auto& c : kCases) {
    auto charge = tenants_.Admit(
        "acme",
        {.prompt_tokens = 20, .completion_tokens = 80, .told_at_end = true});
    ASSERT_TRUE(charge.ok()) << charge.status();
    if (c.begun) (*charge)->Begun();
    if (c.generated > 0) (*charge)->GeneratedInAll(c.generated);
    const int64_t before = ledger_.generated_tokens;
    (*charge)->End(c.outcome);
    EXPECT_EQ(Remaining("tokens"), c.tokens);
    EXPECT_EQ(ledger_.generated_tokens - before,
              c.tokens == std::string("0") ? 80 : c.generated);
    now_ += absl::Minutes(1);
  }
}

// A tenant's own number goes before that of all others.
TEST_F(TenantsTest, RequestsAtATimeOfWhoSaysNothing) {
  Tenants tenants([this] { return now_; }, &ledger_, /*parallel_requests=*/2);
  tenants.Set({{"some", {}}, {"more", {.parallel_requests = 3}}});
  for (const auto& [tenant, most] : {std::pair("some", 2), {"more", 3}}) {
    std::vector<std::shared_ptr<Tenants::Charge>> charges;
    for (int i = 0; i < most; ++i) {
      EXPECT_TRUE(tenants.HasRoom(tenant).ok());
      auto charge = tenants.Admit(tenant, {});
      ASSERT_TRUE(charge.ok()) << i;
      charges.push_back(*std::move(charge));
    }
    const absl::Status beyond = tenants.Admit(tenant, {}).status();
    EXPECT_EQ(ErrorMetadata(beyond).at("limit"), "max_parallel_requests");
    EXPECT_EQ(tenants.HasRoom(tenant), beyond);
    charges.pop_back();
    EXPECT_TRUE(tenants.HasRoom(tenant).ok());
  }
}

// As the router counts them: else a few calls of many fill it.
TEST_F(TenantsTest, EachSequenceIsARequestAtATime) {
  const auto ask = [this](int64_t sequences) {
    return tenants_.Admit("acme", {.sequences = sequences});
  };
  const absl::Status never = ask(4).status();
  EXPECT_EQ(ErrorMetadata(never).at("limit"), "max_parallel_requests");
  EXPECT_EQ(RetryAfter(never), std::nullopt);
  EXPECT_THAT(std::string(never.message()),
              HasSubstr("limit 3, in flight 0, requested 4"));
  const auto two = ask(2);
  ASSERT_TRUE(two.ok());
  EXPECT_EQ(tenants_.Describe()[0].running(), 2);
  const absl::Status later = ask(2).status();
  EXPECT_EQ(ErrorMetadata(later).at("limit"), "max_parallel_requests");
  EXPECT_EQ(RetryAfter(later), absl::Seconds(1));
  EXPECT_TRUE(tenants_.HasRoom("acme").ok());
  const auto one = ask(1);
  ASSERT_TRUE(one.ok());
  EXPECT_FALSE(tenants_.HasRoom("acme").ok());
  (*two)->End(Outcome::kDone);
  EXPECT_EQ(tenants_.Describe()[0].running(), 1);
  EXPECT_TRUE(ask(2).ok());
}

TEST_F(TenantsTest, RequestsAtATimeAndPerMinute) {
  std::vector<std::shared_ptr<Tenants::Charge>> charges;
  for (int i = 0; i < 3; ++i) {
    auto charge = Ask(1, 1);
    ASSERT_TRUE(charge.ok());
    charges.push_back(*charge);
  }
  const auto fourth = Ask(1, 1);
  EXPECT_EQ(ErrorMetadata(fourth.status()).at("limit"),
            "max_parallel_requests");
  EXPECT_EQ(RetryAfter(fourth.status()), absl::Seconds(1));
  EXPECT_EQ(Remaining("requests"), "7") << "a refused one is none";
  charges.pop_back();
  for (int i = 0; i < 7; ++i) {
    auto charge = Ask(1, 1);
    ASSERT_TRUE(charge.ok()) << i;
    (*charge)->Generated(1);
    (*charge)->End(Outcome::kDone);
  }
  // One of the ten failed without a token (its charge was dropped): one more.
  EXPECT_TRUE(Ask(1, 1).ok());  // dropped, too
  auto last = Ask(1, 1);
  ASSERT_TRUE(last.ok());
  (*last)->Generated(1);
  (*last)->End(Outcome::kDone);
  const auto beyond = Ask(1, 1);
  EXPECT_EQ(ErrorMetadata(beyond.status()).at("limit"), "requests_per_minute");
  EXPECT_EQ(RetryAfter(beyond.status()), absl::Seconds(6));
}

TEST_F(TenantsTest, LimitsHoldWhateverComesAtOnce) {
  tenants_.Set({{"acme", {1000, 0, 0}}});
  std::atomic<int> admitted = 0;
  std::vector<std::shared_ptr<Tenants::Charge>> kept[8];
  std::vector<std::thread> threads;
  for (auto& mine : kept) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        auto charge = Ask(3, 4);
        if (!charge.ok()) continue;
        if (i % 2 == 0) {
          (*charge)->End(Outcome::kFailed);
        } else {
          ++admitted;
          mine.push_back(*std::move(charge));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(admitted, 142);  // of 7 tokens each
  EXPECT_EQ(Remaining("tokens"), "6");
}

TEST_F(TenantsTest, NewLimitsTakeEffectAndOldRequestsGoOn) {
  auto charge = Ask(50, 10);
  ASSERT_TRUE(charge.ok());
  tenants_.Set({{"acme", {.tokens_per_minute = 70}}});
  EXPECT_EQ(Remaining("tokens"), "10");
  tenants_.Set({{"zen", {}}});
  EXPECT_EQ(Ask(1, 1).status().code(), absl::StatusCode::kUnauthenticated);
  (*charge)->Generated(4);
  (*charge)->End(Outcome::kDone);
  EXPECT_EQ(ledger_.prompt_tokens, 50);
  EXPECT_EQ(ledger_.generated_tokens, 4);
}

TEST_F(TenantsTest, OneThatGoesAndComesBackHasWhatItHad) {
  auto charge = Ask(50, 10);
  ASSERT_TRUE(charge.ok());
  (*charge)->Begun();
  tenants_.Set({{"zen", kLimits}});
  tenants_.Set({{"zen", kLimits}});
  tenants_.Set({{"acme", kLimits}, {"zen", kLimits}});
  EXPECT_EQ(Remaining("tokens"), "40");
  EXPECT_EQ(Remaining("requests"), "9");
  EXPECT_EQ(tenants_.Describe()[0].running(), 1);
  (*charge)->End(Outcome::kDone);
  EXPECT_EQ(Remaining("tokens"), "50");
  EXPECT_EQ(tenants_.Describe()[0].running(), 0);
  // With other limits, and once more with all that it had.
  tenants_.Set({{"zen", kLimits}});
  tenants_.Set({{"acme", {.tokens_per_minute = 70}}, {"zen", kLimits}});
  EXPECT_EQ(Remaining("tokens"), "20");
  tenants_.Set({{"zen", kLimits}});
  now_ += absl::Minutes(1);
  tenants_.Set({{"acme", kLimits}, {"zen", kLimits}});
  EXPECT_EQ(Remaining("tokens"), "100");
}

// Whichever of the three is all that it has.
TEST_F(TenantsTest, WhatIsLeftOfOneThatGoesIsRemembered) {
  const auto go_and_come_back = [this] {
    tenants_.Set({{"zen", kLimits}});
    tenants_.Set({{"zen", kLimits}});
    tenants_.Set({{"acme", kLimits}, {"zen", kLimits}});
  };
  EXPECT_TRUE(tenants_.AdmitCall("acme").ok());
  go_and_come_back();
  EXPECT_EQ(Remaining("requests"), "9");
  now_ += absl::Minutes(1);
  auto charge = Ask(50, 0);
  ASSERT_TRUE(charge.ok());
  (*charge)->Begun();
  now_ += absl::Minutes(1);
  go_and_come_back();
  EXPECT_EQ(tenants_.Describe()[0].running(), 1);
  (*charge)->End(Outcome::kDone);
  auto next = Ask(50, 0);
  ASSERT_TRUE(next.ok());
  (*next)->Begun();
  (*next)->End(Outcome::kDone);
  now_ += absl::Seconds(6);
  EXPECT_EQ(Remaining("requests"), "10");
  go_and_come_back();
  EXPECT_EQ(Remaining("tokens"), "60");
}

TEST_F(TenantsTest, TokensAreCountedOnceAndBeforeTheEnd) {
  auto charge = Ask(10, 40);
  ASSERT_TRUE(charge.ok());
  (*charge)->Begun();
  (*charge)->Generated(30);
  (*charge)->GeneratedInAll(20);  // heard of before
  (*charge)->End(Outcome::kDone);
  EXPECT_EQ(ledger_.generated_tokens, 30);
  EXPECT_EQ(Remaining("tokens"), "60");
  (*charge)->Generated(60);
  (*charge)->GeneratedInAll(90);
  EXPECT_EQ(Remaining("tokens"), "60");
}

TEST_F(TenantsTest, CallsWithoutAWorkerAreRequestsOfTheMinute) {
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(tenants_.AdmitCall("acme").ok());
  EXPECT_EQ(ErrorReason(tenants_.AdmitCall("acme")), "RATE_LIMITED");
  EXPECT_EQ(ErrorReason(Ask(1, 1).status()), "RATE_LIMITED");
  EXPECT_THAT(ledger_.refused, ElementsAre("acme:requests_per_minute",
                                           "acme:requests_per_minute"));
  EXPECT_EQ(Remaining("tokens"), "100");
  EXPECT_TRUE(tenants_.AdmitCall("free").ok());
  EXPECT_EQ(tenants_.AdmitCall("nobody").code(),
            absl::StatusCode::kUnauthenticated);
  now_ += absl::Seconds(6);
  EXPECT_TRUE(tenants_.AdmitCall("acme").ok());
}

TEST_F(TenantsTest, OperatorsSeeLimitsAndWhatIsLeft) {
  const auto charge = Ask(50, 10);
  const std::vector<v1::TenantStatus> all = tenants_.Describe();
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].ShortDebugString(),
            "tenant: \"acme\" running: 1 max_parallel_requests: 3 "
            "requests_per_minute: 10 requests_left: 9 "
            "tokens_per_minute: 100 tokens_left: 40");
  EXPECT_EQ(all[1].ShortDebugString(), "tenant: \"free\"");
}

TEST_F(TenantsTest, HeadersAreOfTheLimitsThereAre) {
  EXPECT_TRUE(tenants_.RateHeaders("free").empty());
  EXPECT_TRUE(tenants_.RateHeaders("nobody").empty());
  auto charge = Ask(25, 25);
  EXPECT_THAT(
      tenants_.RateHeaders("acme"),
      ElementsAre(::testing::Pair("x-ratelimit-limit-requests", "10"),
                  ::testing::Pair("x-ratelimit-remaining-requests", "9"),
                  ::testing::Pair("x-ratelimit-reset-requests", "6s"),
                  ::testing::Pair("x-ratelimit-limit-tokens", "100"),
                  ::testing::Pair("x-ratelimit-remaining-tokens", "50"),
                  ::testing::Pair("x-ratelimit-reset-tokens", "30s")));
}

TEST(CacheOwnerTest, IsOfTheTenantAlone) {
  EXPECT_EQ(CacheOwner(""), 0u);
  EXPECT_EQ(CacheOwner("a"), CacheOwner("a"));
  EXPECT_NE(CacheOwner("a"), CacheOwner("b"));
  EXPECT_NE(CacheOwner("a"), 0u);
}

TEST(TenantSaltTest, NoTwoTenantsMeet) {
  EXPECT_EQ(TenantSalt("", "mine"), "mine");
  EXPECT_EQ(TenantSalt("a", "x"), TenantSalt("a", "x"));
  const std::vector<std::pair<std::string, std::string>> kPairs = {
      {"a", ""},   {"b", ""},   {"a", "b"}, {"ab", ""},
      {"a", "bc"}, {"ab", "c"}, {"abc", ""}};
  std::set<std::string> salts;
  for (const auto& [tenant, salt] : kPairs) {
    const std::string derived = TenantSalt(tenant, salt);
    EXPECT_EQ(derived.size(), 33u);
    EXPECT_EQ(derived[0], '\xff') << "no text begins so";
    salts.insert(derived);
  }
  EXPECT_EQ(salts.size(), kPairs.size());
}

TEST(AccessTest, AsksForKeysOnceThereAreSome) {
  Ledger ledger;
  Access access([] { return absl::UnixEpoch(); }, &ledger);
  EXPECT_FALSE(access.closed());
  EXPECT_EQ(access.Authenticate("").value(), "");
  const auto file = ParseKeyFile(
      absl::StrCat("acme ", kHash, "\nzen ", kOther, " rpm_limit=5"));
  access.Install(*file);
  EXPECT_TRUE(access.closed());
  const struct {
    const char* sent;
    const char* want;  // a tenant, or a reason
  } kCases[] = {
      {"Bearer secret", "acme"},
      {"bearer  secret ", "acme"},
      {"Bearer other", "zen"},
      {"", "CREDENTIALS_MISSING"},
      {"Bearer", "CREDENTIALS_MISSING"},
      {"secret", "CREDENTIALS_MISSING"},
      {"Basic c2VjcmV0", "CREDENTIALS_MISSING"},
      {"Bearer ", "CREDENTIALS_MISSING"},
      {"Bearer Secret", "API_KEY_INVALID"},
      {"Bearer secre", "API_KEY_INVALID"},
      {"Bearer secret2", "API_KEY_INVALID"},
      {"Bearer secret, Bearer other", "API_KEY_INVALID"},
      {kHash, "CREDENTIALS_MISSING"},
      // The hash is no key.
      {"Bearer "
       "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b",
       "API_KEY_INVALID"},
  };
  for (const auto& c : kCases) {
    const auto tenant = access.Authenticate(c.sent);
    EXPECT_EQ(tenant.ok() ? *tenant : ErrorReason(tenant.status()), c.want)
        << c.sent;
    if (tenant.ok()) continue;
    EXPECT_EQ(tenant.status().code(), absl::StatusCode::kUnauthenticated);
    EXPECT_EQ(tenant.status().message().find("ecret"), absl::string_view::npos);
  }
  // Nobody's key.
  access.Install({});
  EXPECT_FALSE(access.Authenticate("Bearer secret").ok());
  EXPECT_FALSE(access.Authenticate("").ok());
  access.Install(Access::SharedKeys({"one", "two", ""}));
  EXPECT_FALSE(access.Authenticate("Bearer  ").ok());
  EXPECT_EQ(access.Authenticate("Bearer two").value(), kDefaultTenant);
}

}  // namespace
}  // namespace tandem::router
