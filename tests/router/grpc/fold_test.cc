// SPDX-License-Identifier: Apache-2.0
// A unary answer made of a stream: whole, or refused where it grows too large.

#include "router/grpc/fold.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "common/error.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using OncePipe = Pipe<v1::GenerateOnceResponse, v1::GenerateRequest>;

struct FoldTest : testing::Test {
  FoldTest() { w.Decode("d"); }
  // A request for 64 tokens, of which none has come.
  void Begin(size_t max_bytes) {
    w.core->Submit(World::Ask({}, 64),
                   std::make_unique<FoldingStream>(
                       &w.loop,
                       std::make_unique<FakeStream<v1::GenerateOnceResponse,
                                                   v1::GenerateRequest>>(&once),
                       max_bytes));
    w.decodes[0].Say(World::Opened(1, ""));
    w.decodes[0].Say(World::Started(1));
  }
  void Tokens(int begin, int count) {
    for (int i = begin; i < begin + count; ++i) {
      w.decodes[0].Say(World::Tokens(kPrompt + i, {1 + i % 20}));
    }
  }

  OncePipe once;  // told of the world's end
  World w;
};

TEST_F(FoldTest, EventsBecomeOneAnswer) {
  Begin(1 << 20);
  Tokens(0, 64);
  w.decodes[0].Say(World::Finished(v1::FINISH_REASON_LENGTH));
  w.Settle();
  EXPECT_TRUE(once.status.ok()) << once.status;
  ASSERT_EQ(once.sent.size(), 2u);  // the headers, and the answer
  EXPECT_EQ(once.sent[1].sequences(0).token_ids_size(), 64);
  EXPECT_EQ(once.sent[1].sequences(0).text().size(), 64u);
  EXPECT_EQ(once.sent[1].done().usage().completion_tokens(), 64);
}

// A client's own retries repeat a call that fails before its headers.
TEST_F(FoldTest, TheHeadersAreSentWhenTheRequestBegins) {
  Begin(1 << 20);
  ASSERT_EQ(once.sent.size(), 1u);
  EXPECT_EQ(once.sent[0].ByteSizeLong(), 0u);
  Tokens(0, 8);
  EXPECT_EQ(once.sent.size(), 1u);
}

TEST_F(FoldTest, OneThatGrowsTooLargeIsRefusedAndItsRequestEnds) {
  Begin(400);
  Tokens(0, 8);
  w.Settle();
  EXPECT_TRUE(once.open);
  Tokens(8, 56);
  EXPECT_TRUE(once.open);
  w.Settle();
  EXPECT_EQ(once.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(once.status), "ANSWER_TOO_LARGE");
  EXPECT_EQ(once.sent.size(), 1u);  // the headers
  EXPECT_TRUE(w.decodes[0].dropped);
  EXPECT_TRUE(w.core->idle());
  EXPECT_FALSE(w.ended.back().client_gone);
  EXPECT_EQ(ErrorReason(w.ended.back().status), "ANSWER_TOO_LARGE");
}

// It ends by itself before the core hears that nobody wants it.
TEST_F(FoldTest, TheLastEventMayBeTheOneTooMany) {
  Begin(400);
  Tokens(0, 64);
  w.decodes[0].Say(World::Finished(v1::FINISH_REASON_LENGTH));
  w.Settle();
  EXPECT_EQ(ErrorReason(once.status), "ANSWER_TOO_LARGE");
  EXPECT_TRUE(w.core->idle());
}

}  // namespace
}  // namespace tandem::router
