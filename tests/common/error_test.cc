// SPDX-License-Identifier: Apache-2.0
#include "common/error.h"

#include <string>

#include "absl/strings/cord.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST(ErrorTest, EveryPartReadsBack) {
  const absl::Status status =
      MakeError(absl::StatusCode::kInvalidArgument, "OUT_OF_RANGE",
                "temperature is 3, allowed are 0 to 2",
                {{"field", "temperature"}, {"value", "3"}, {"empty", ""}},
                absl::Milliseconds(1250));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "temperature is 3, allowed are 0 to 2");
  EXPECT_EQ(ErrorReason(status), "OUT_OF_RANGE");
  EXPECT_EQ(ErrorDomain(status), "tandem");
  EXPECT_THAT(ErrorMetadata(status),
              ElementsAre(Pair("empty", ""), Pair("field", "temperature"),
                          Pair("value", "3")));
  EXPECT_EQ(RetryAfter(status), absl::Milliseconds(1250));
}

TEST(ErrorTest, AFieldsViolationReadsBackBesideTheReason) {
  absl::Status status =
      MakeError(absl::StatusCode::kInvalidArgument, "FIELD_INVALID", "m");
  EXPECT_FALSE(ErrorViolation(status).has_value());
  SetViolation(&status, "sampling.n", "must be in 1..32");
  for (const absl::Status& same : {status, WithMessage(status, "other")}) {
    ASSERT_TRUE(ErrorViolation(same).has_value());
    EXPECT_EQ(ErrorViolation(same)->field, "sampling.n");
    EXPECT_EQ(ErrorViolation(same)->description, "must be in 1..32");
    EXPECT_EQ(ErrorReason(same), "FIELD_INVALID");
  }
  EXPECT_EQ(WithMessage(status, "other").message(), "other");
}

TEST(ErrorTest, APlainStatusHasNone) {
  for (const absl::Status& status :
       {absl::OkStatus(), absl::InternalError("x")}) {
    EXPECT_EQ(ErrorReason(status), "");
    EXPECT_THAT(ErrorMetadata(status), IsEmpty());
    EXPECT_EQ(RetryAfter(status), std::nullopt);
  }
}

TEST(ErrorTest, RetryTimesOfAllSizesReadBack) {
  for (absl::Duration d :
       {absl::ZeroDuration(), absl::Nanoseconds(1), absl::Milliseconds(999),
        absl::Seconds(1), absl::Seconds(127), absl::Seconds(128),
        absl::Hours(1000) + absl::Nanoseconds(7)}) {
    absl::Status status = absl::UnavailableError("x");
    SetRetryAfter(&status, d);
    EXPECT_EQ(RetryAfter(status), d);
  }
}

TEST(ErrorTest, MalformedDetailsReadAsNone) {
  absl::Status good = MakeError(absl::StatusCode::kInternal, "REASON", "m",
                                {{"key", "value"}}, absl::Seconds(300));
  const std::string_view urls[] = {kErrorInfoUrl, kRetryInfoUrl};
  for (std::string_view url : urls) {
    const absl::string_view key(url.data(), url.size());
    const std::string bytes(*good.GetPayload(key));
    int none = 0;
    for (size_t cut = 1; cut < bytes.size(); ++cut) {
      absl::Status status = absl::InternalError("m");
      status.SetPayload(key, absl::Cord(bytes.substr(0, cut)));
      // A cut at a field's end is a shorter message, anywhere else none.
      const std::string reason = ErrorReason(status);
      EXPECT_TRUE(reason.empty() || reason == "REASON") << cut;
      const auto retry = RetryAfter(status);
      none += reason.empty() && !retry.has_value();
    }
    EXPECT_GT(none, 0);
  }
  for (const std::string& bytes :
       {std::string(11, '\xff'), std::string("\x0a\xff\xff\xff\xff\x0f"),
        std::string("\x0b"), std::string("\x0d\x01")}) {
    absl::Status status = absl::InternalError("m");
    status.SetPayload("type.googleapis.com/google.rpc.ErrorInfo",
                      absl::Cord(bytes));
    EXPECT_EQ(ErrorReason(status), "");
  }
}

TEST(ErrorTest, UnknownFieldsAreSkipped) {
  absl::Status status = absl::InternalError("m");
  status.SetPayload("type.googleapis.com/google.rpc.ErrorInfo",
                    absl::Cord(std::string("\x20\x96\x01"  // 4: varint
                                           "\x29"          // 5: fixed64
                                           "12345678"
                                           "\x35"  // 6: fixed32
                                           "1234"
                                           "\x3a\x02"
                                           "ab"
                                           "\x0a\x01R")));
  EXPECT_EQ(ErrorReason(status), "R");
}

TEST(ErrorTest, AnnotateKeepsCodeAndDetails) {
  const absl::Status status = Annotate(
      MakeError(absl::StatusCode::kNotFound, "NO_MODEL", "no such model"),
      "router");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "router: no such model");
  EXPECT_EQ(ErrorReason(status), "NO_MODEL");
  EXPECT_TRUE(Annotate(absl::OkStatus(), "x").ok());
}

}  // namespace
}  // namespace tandem
