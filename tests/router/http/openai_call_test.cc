// SPDX-License-Identifier: Apache-2.0
// One HTTP call between the core and a client, on virtual time: who is told
// what when a prompt fails, the client goes or reads slowly, or nothing is
// said.
#include "router/http/openai_call.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/testing/virtual_loop.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/router/http/fake_exchange.h"

namespace tandem::router {
namespace {

using ::testing::HasSubstr;

// The core's end of one prompt.
class Handler final : public StreamHandler<v1::GenerateRequest> {
 public:
  explicit Handler(std::unique_ptr<ClientStream> prompt)
      : stream(std::move(prompt)) {
    stream->Start(this);
  }
  void OnMessage(v1::GenerateRequest message) override {}
  void OnDrained() override { ++drained; }
  void OnClosed(absl::Status status) override {
    closed = std::move(status);
    if (on_closed) on_closed();
  }
  void Say(const std::string& text) {
    v1::GenerateResponse event;
    event.mutable_delta()->set_text(text);
    stream->Send(std::move(event));
  }

  void Done(int cached_tokens) {
    v1::GenerateResponse event;
    event.mutable_done()->mutable_usage()->set_cached_tokens(cached_tokens);
    stream->Send(std::move(event));
    stream->Close(absl::OkStatus());
  }

  std::unique_ptr<ClientStream> stream;
  int drained = 0;
  absl::Status closed;
  std::function<void()> on_closed;
};

class OpenAiCallTest : public ::testing::Test {
 protected:
  void Begin(const std::string& body, size_t max_bytes = 1 << 20) {
    const auto request = ParseCompletion(body);
    ASSERT_TRUE(request.ok()) << request.status();
    const int prompts = static_cast<int>(request->prompts.size());
    call_ = std::make_shared<OpenAiCall>(
        &loop_, std::make_unique<FakeExchange>(&client_),
        OpenAiAnswer(*request, "tales", 1700), prompts, request->stream,
        max_bytes, std::vector<std::pair<std::string, std::string>>());
    call_->Start();
    for (int i = 0; i < prompts; ++i) {
      parts_.push_back(std::make_unique<Handler>(call_->StreamOf(i)));
    }
  }
  void Settle() { loop_.RunFor(absl::Milliseconds(1)); }

  VirtualLoop loop_;
  ClientEnd client_;
  std::shared_ptr<OpenAiCall> call_;
  std::vector<std::unique_ptr<Handler>> parts_;
};

TEST_F(OpenAiCallTest, AFailureBeforeTheFirstWordIsAStatusAndEndsAllPrompts) {
  Begin(R"({"prompt": ["a", "b", "c"], "stream": true})");
  parts_[1]->stream->Close(absl::ResourceExhaustedError("full"));
  EXPECT_TRUE(call_->ended());
  // Not within the core's own call, and before the client is told: it may ask
  // again at once, and finds their places free.
  EXPECT_TRUE(parts_[0]->closed.ok());
  parts_[2]->on_closed = [this] { EXPECT_FALSE(client_.ended); };
  Settle();
  EXPECT_EQ(client_.code, 429);
  EXPECT_FALSE(client_.streaming);
  EXPECT_EQ(parts_[0]->closed, absl::ResourceExhaustedError("full"));
  EXPECT_TRUE(parts_[1]->closed.ok());
  EXPECT_EQ(parts_[2]->closed, absl::ResourceExhaustedError("full"));
  parts_[0]->Say("late");
  EXPECT_THAT(client_.body, Not(HasSubstr("late")));
}

TEST_F(OpenAiCallTest, AFailureLaterIsAnEventBeforeTheEnd) {
  Begin(R"({"prompt": ["a", "b"], "stream": true})");
  parts_[0]->Say("one");
  parts_[0]->Say("two");
  parts_[1]->stream->Close(absl::UnavailableError("lost"));
  EXPECT_EQ(client_.code, 200);
  EXPECT_TRUE(client_.ended);
  EXPECT_LT(client_.body.find("two"), client_.body.find("lost"));
  EXPECT_THAT(client_.body, ::testing::EndsWith("data: [DONE]\n\n"));
  Settle();
  EXPECT_EQ(parts_[0]->closed, absl::UnavailableError("lost"));
}

TEST_F(OpenAiCallTest, AClientThatGoesEndsAllPrompts) {
  Begin(R"({"prompt": ["a", "b"]})");
  client_.gone();
  Settle();
  EXPECT_TRUE(call_->ended());
  for (const auto& part : parts_) {
    EXPECT_EQ(part->closed.code(), absl::StatusCode::kCancelled);
  }
  // One that the core takes up only now hears it as well.
  const Handler late(call_->StreamOf(0));
  Settle();
  EXPECT_EQ(late.closed.code(), absl::StatusCode::kCancelled);
}

TEST_F(OpenAiCallTest, TheAnswerWaitsForAllPrompts) {
  Begin(R"({"prompt": ["a", "b"]})");
  parts_[0]->Say("one");
  parts_[0]->Done(/*cached_tokens=*/3);
  EXPECT_FALSE(client_.ended);
  parts_[1]->Say("two");
  parts_[1]->Done(/*cached_tokens=*/4);
  EXPECT_TRUE(client_.ended);
  EXPECT_THAT(client_.body, HasSubstr("\"cached_tokens\":7"));
  EXPECT_THAT(client_.body, HasSubstr("\"text\":\"one\""));
  EXPECT_THAT(client_.body, HasSubstr("\"text\":\"two\""));
}

TEST_F(OpenAiCallTest, WritesFollowEachOtherAndPausedPromptsGoOn) {
  Begin(R"({"prompt": ["a", "b"], "stream": true})");
  parts_[0]->Say("0");
  ASSERT_EQ(client_.writes.size(), 1u);  // and no second one meanwhile
  for (int i = 0; i < 100; ++i) parts_[0]->Say("x");
  EXPECT_EQ(client_.writes.size(), 1u);
  EXPECT_EQ(parts_[0]->stream->unsent(), 101u);
  client_.TakeAll();
  Settle();
  EXPECT_EQ(client_.writes.size(), 1u);
  EXPECT_EQ(parts_[0]->stream->unsent(), 100u);
  EXPECT_EQ(parts_[0]->drained, 0);  // still too much
  // The other prompt keeps every write busy; the first goes on all the same.
  parts_[1]->Say("y");
  client_.TakeAll();
  Settle();
  EXPECT_EQ(client_.writes.size(), 1u);
  EXPECT_EQ(parts_[0]->drained, 1);
  client_.TakeAll();
  Settle();
  EXPECT_EQ(parts_[0]->stream->unsent(), 0u);
}

// The core judges by their number whether a client takes something.
TEST_F(OpenAiCallTest, LargeEventsAreTakenFewAtATime) {
  Begin(R"({"prompt": "a", "stream": true})");
  const std::string large(40 << 10, 'x');
  parts_[0]->Say("0");
  for (int i = 0; i < 20; ++i) parts_[0]->Say(large);
  for (size_t left = 20; left > 0; --left) {
    client_.TakeAll();
    Settle();
    EXPECT_EQ(client_.writes.size(), 1u);
    EXPECT_EQ(parts_[0]->stream->unsent(), left);
    EXPECT_EQ(parts_[0]->drained > 0, left <= 16) << left;
  }
  // With the end all go at once, and none is lost.
  for (int i = 0; i < 5; ++i) parts_[0]->Say(large);
  parts_[0]->stream->Close(absl::OkStatus());
  EXPECT_TRUE(client_.ended);
  EXPECT_GT(client_.body.size(), 25 * large.size());
  EXPECT_THAT(client_.body, ::testing::EndsWith("data: [DONE]\n\n"));
}

TEST_F(OpenAiCallTest, APromptThatTheCoreDropsIsAnError) {
  Begin(R"({"prompt": ["a", "b"]})");
  parts_[0].reset();
  Settle();
  EXPECT_TRUE(call_->ended());
  EXPECT_EQ(client_.code, 500);
  EXPECT_EQ(parts_[1]->closed.code(), absl::StatusCode::kInternal);
}

TEST_F(OpenAiCallTest, AWholeAnswerHasNoComments) {
  Begin(R"({"prompt": "a"})");
  loop_.RunFor(absl::Minutes(1));
  EXPECT_EQ(client_.begun, 0);
  parts_[0]->Say("one");
  parts_[0]->stream->Close(absl::OkStatus());
  EXPECT_EQ(client_.code, 200);
  EXPECT_FALSE(client_.streaming);
}

TEST_F(OpenAiCallTest, SilenceIsBrokenByComments) {
  Begin(R"({"prompt": "a", "stream": true})");
  loop_.RunFor(absl::Seconds(14));
  EXPECT_EQ(client_.begun, 0);
  loop_.RunFor(absl::Seconds(2));
  EXPECT_EQ(client_.body, ": keep-alive\n\n");
  client_.TakeAll();
  Settle();
  parts_[0]->Say("word");
  client_.TakeAll();
  Settle();
  const size_t size = client_.body.size();
  loop_.RunFor(absl::Seconds(14));  // of the fifteen
  EXPECT_EQ(client_.body.size(), size);
  parts_[0]->stream->Close(absl::OkStatus());
  const std::string last = client_.body;
  loop_.RunFor(absl::Minutes(2));
  EXPECT_EQ(client_.body, last);
}

TEST_F(OpenAiCallTest, AWholeAnswerIsBounded) {
  Begin(R"({"prompt": ["a", "b"]})", 100);
  parts_[0]->Say(std::string(100, 'x'));
  EXPECT_FALSE(client_.ended);
  parts_[1]->Say("y");
  Settle();
  // No error that SDKs would ask again after, twice.
  EXPECT_EQ(client_.code, 400);
  EXPECT_THAT(client_.body, HasSubstr("answer_too_large"));
  EXPECT_THAT(client_.body, HasSubstr("invalid_request_error"));
  // Nobody has left.
  EXPECT_EQ(ErrorReason(parts_[0]->closed), "ANSWER_TOO_LARGE");
  EXPECT_EQ(ErrorReason(parts_[1]->closed), "ANSWER_TOO_LARGE");
}

TEST_F(OpenAiCallTest, OnlyWhoseClientHasGoneIsToldSo) {
  Begin(R"({"prompt": ["a", "b"]})");
  parts_[0]->stream->Close(
      MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL", "full"));
  Settle();
  EXPECT_EQ(ErrorReason(parts_[1]->closed), "QUEUE_FULL");
}

}  // namespace
}  // namespace tandem::router
