// SPDX-License-Identifier: Apache-2.0
// Requests for several sequences: one answer with all of them, or the best.

#include "router/core/sequence_group.h"

#include <map>
#include <optional>

#include "common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SequenceGroupTest : public ::testing::Test {
 protected:
  SequenceGroupTest() {
    w.Prefill("p0");
    w.Decode("d0");
  }

  ClientPipe* Submit(int n, int best_of,
                     std::optional<ReasoningMarks> reasoning = {}) {
    AdmittedRequest admitted = World::Ask();
    admitted.effective.reasoning = reasoning;
    admitted.effective.sampling.set_n(n);
    admitted.effective.sampling.set_best_of(best_of);
    admitted.effective.request_id = "group";
    return w.Submit(std::move(admitted));
  }
  // The i-th call's sequence computes and gives its first token.
  void Begin(size_t i, int32_t token) {
    w.decodes[i].Say(World::Opened(static_cast<uint32_t>(i) + 1, "ticket"));
    w.prefills[i].Say(World::Computing());
    w.prefills[i].Say(World::First(kPrompt, token));
    w.decodes[i].Say(World::Started(static_cast<uint32_t>(i) + 1));
    w.prefills[i].Say(World::Done());
    w.prefills[i].Break(absl::OkStatus());
  }
  void Token(size_t i, int position, int32_t token, float logprob = 0) {
    v1::DecodeResponse message = World::Tokens(position, {token});
    message.mutable_tokens()->mutable_tokens(0)->set_logprob(logprob);
    w.decodes[i].Say(message);
    w.Settle();
  }
  void End(size_t i) {
    w.decodes[i].Say(World::Finished(v1::FINISH_REASON_LENGTH));
  }
  static std::map<int, std::string> Texts(const ClientPipe& client) {
    std::map<int, std::string> texts;
    for (const v1::GenerateResponse& sent : client.sent) {
      if (sent.has_delta()) texts[sent.delta().index()] += sent.delta().text();
    }
    return texts;
  }
  static std::vector<int> FinishedOf(const ClientPipe& client) {
    std::vector<int> indices;
    for (const v1::GenerateResponse& sent : client.sent) {
      if (sent.has_finished()) indices.push_back(sent.finished().index());
    }
    return indices;
  }

  World w;
};

TEST_F(SequenceGroupTest, OthersFollowOnceThePromptIsThereAndStreamTogether) {
  ClientPipe* const client = Submit(2, 2);
  ASSERT_EQ(w.decodes.size(), 1u);
  EXPECT_EQ(w.decodes[0].sent[0].open().sequence_index(), 0u);
  Begin(0, 1);
  w.Settle();
  EXPECT_EQ(w.decodes.size(), 1u);  // the decode worker may not hold it yet
  Token(0, kPrompt + 1, 2);
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_EQ(w.decodes[1].sent[0].open().sequence_index(), 1u);
  Begin(1, 3);
  EXPECT_EQ(w.prefills[1].sent[0].open().sequence_index(), 1u);
  Token(0, kPrompt + 2, 4);
  Token(1, kPrompt + 1, 5);
  EXPECT_THAT(Texts(*client),
              ElementsAre(std::pair(0, "abd"), std::pair(1, "ce")));
  End(1);
  EXPECT_TRUE(client->open);
  EXPECT_FALSE(w.core->idle());
  End(0);
  EXPECT_THAT(FinishedOf(*client), ElementsAre(1, 0));
  const v1::GenerateDone& done = client->sent.back().done();
  EXPECT_EQ(done.usage().prompt_tokens(), kPrompt);
  EXPECT_EQ(done.usage().completion_tokens(), 5);
  EXPECT_EQ(done.usage().total_tokens(), kPrompt + 5);
  EXPECT_EQ(done.timings().kv_bytes(), 2 * 4096);
  EXPECT_TRUE(client->dropped);
  EXPECT_TRUE(client->status.ok()) << client->status;
  int started = 0;
  for (const auto& sent : client->sent) started += sent.has_started();
  EXPECT_EQ(started, 1);
  w.Settle();
  EXPECT_TRUE(w.core->idle());
}

// A sequence that began later has less time, and names the request's.
TEST_F(SequenceGroupTest, ADeadlineIsToldAsItWasAskedFor) {
  AdmittedRequest admitted = World::Ask();
  admitted.deadline = absl::Seconds(2);
  admitted.effective.sampling.set_n(2);
  admitted.effective.sampling.set_best_of(2);
  ClientPipe* const client = w.Submit(std::move(admitted));
  w.RunFor(absl::Seconds(1));
  Begin(0, 1);
  Token(0, kPrompt + 1, 2);
  End(0);
  Begin(1, 3);
  w.RunFor(absl::Seconds(1));
  EXPECT_EQ(ErrorReason(client->status), "DEADLINE");
  EXPECT_THAT(std::string(client->status.message()), HasSubstr("within 2s,"));
}

// What may be a call of a tool is held back, and is nobody else's wait.
TEST_F(SequenceGroupTest, HeldTextOfTheFirstKeepsNobodyWaiting) {
  AdmittedRequest admitted = World::Ask();
  admitted.effective.sampling.set_n(2);
  admitted.effective.sampling.set_best_of(2);
  admitted.effective.request_id = "group";
  admitted.effective.output.set_return_token_ids(false);
  admitted.effective.tool_calls.emplace();
  admitted.effective.tool_calls->style = ToolCallStyle::kLlama3Json;
  admitted.effective.tool_calls->names = {"f"};
  ClientPipe* const client = w.Submit(std::move(admitted));
  const int32_t brace = '{' - 'a' + 1;  // the codec's letters go on behind z
  Begin(0, brace);
  w.Settle();
  EXPECT_EQ(w.decodes.size(), 1u);
  Token(0, kPrompt + 1, 1);
  ASSERT_EQ(w.decodes.size(), 2u);
  Begin(1, 3);
  End(0);
  End(1);
  EXPECT_EQ(Texts(*client), (std::map<int, std::string>{{0, "{a"}, {1, "c"}}));
  for (const v1::GenerateResponse& sent : client->sent) {
    EXPECT_TRUE(sent.delta().token_ids().empty());
    EXPECT_TRUE(sent.started().prompt_token_ids().empty());
    EXPECT_FALSE(sent.has_delta() && sent.delta().text().empty());
  }
}

TEST_F(SequenceGroupTest, TheBestAreReturnedAndNothingBefore) {
  ClientPipe* const client = Submit(2, 3);
  const float logprobs[] = {-3, -1, -2};
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_EQ(w.decodes.size(), i == 0 ? 1u : 3u);
    Begin(i, static_cast<int32_t>(i) + 1);
    Token(i, kPrompt + 1, 24, logprobs[i]);
  }
  for (const size_t i : {2u, 0u, 1u}) {
    EXPECT_EQ(client->sent.size(), 1u);  // started
    End(i);
  }
  EXPECT_THAT(Texts(*client),
              ElementsAre(std::pair(0, "bx"), std::pair(1, "cx")));
  EXPECT_THAT(FinishedOf(*client), ElementsAre(0, 1));
  for (const auto& sent : client->sent) {
    EXPECT_EQ(sent.delta().logprobs_size(), 0);
  }
  EXPECT_FALSE(client->sent[0].started().output().has_logprobs());
  EXPECT_EQ(client->sent.back().done().usage().completion_tokens(), 6);
  EXPECT_TRUE(client->status.ok());
}

TEST_F(SequenceGroupTest, ReasoningOfTheBestComesWithThem) {
  ClientPipe* const client = Submit(1, 2, ReasoningMarks{.end_id = 24});
  for (size_t i = 0; i < 2; ++i) {
    Begin(i, static_cast<int32_t>(i) + 1);
    Token(i, kPrompt + 1, 24, -1);
    Token(i, kPrompt + 2, 3, i == 0 ? -3 : -1);
  }
  End(0);
  End(1);
  std::string thought, text;
  for (const auto& sent : client->sent) {
    thought += sent.delta().reasoning_content();
    EXPECT_EQ(sent.delta().reasoning_tokens(), sent.has_delta() ? 1 : 0);
    text += sent.delta().text();
  }
  EXPECT_EQ(thought, "bx");
  EXPECT_EQ(text, "c");
  EXPECT_EQ(client->sent.back().done().usage().reasoning_tokens(), 2);
}

TEST_F(SequenceGroupTest, ASequenceWithoutTokensIsNeverTheBest) {
  ClientPipe* const client = Submit(1, 3);
  Begin(0, 1);
  Token(0, kPrompt + 1, 24, -3);
  ASSERT_EQ(w.decodes.size(), 3u);
  EXPECT_TRUE(w.core->Abort("group").ok());  // before the others' first
  EXPECT_THAT(Texts(*client), ElementsAre(std::pair(0, "ax")));
  EXPECT_TRUE(client->status.ok()) << client->status;
  w.Settle();
}

TEST_F(SequenceGroupTest, TheStartIsToldBeforeAnySequencesToken) {
  AdmittedRequest admitted = World::Ask();
  admitted.effective.sampling.set_n(2);
  admitted.effective.sampling.set_best_of(2);
  admitted.effective.bypass_prefix_cache = true;  // both begin at once
  ClientPipe* const client = w.Submit(std::move(admitted));
  ASSERT_EQ(w.decodes.size(), 2u);
  // The second is first, so its prefill call is the first one.
  w.decodes[1].Say(World::Opened(1, "t"));
  w.prefills[0].Say(World::Computing());
  w.prefills[0].Say(World::First(kPrompt, 3));
  ASSERT_FALSE(client->sent.empty());
  EXPECT_TRUE(client->sent[0].has_started());
  w.decodes[0].Say(World::Opened(2, "t"));
  w.prefills[1].Say(World::Computing());
  w.prefills[1].Say(World::First(kPrompt, 1));
  EXPECT_THAT(Texts(*client),
              ElementsAre(std::pair(0, "a"), std::pair(1, "c")));
  int started = 0;
  for (const auto& sent : client->sent) started += sent.has_started();
  EXPECT_EQ(started, 1);
}

TEST_F(SequenceGroupTest, EachSequenceEchoesThePrompt) {
  AdmittedRequest admitted = World::Ask(std::vector<int32_t>(kPrompt, 7));
  admitted.effective.sampling.set_n(2);
  admitted.effective.sampling.set_best_of(2);
  admitted.effective.output.set_echo(true);
  admitted.effective.output.set_return_token_ids(false);
  ClientPipe* const client = w.Submit(std::move(admitted));
  Begin(0, 1);
  w.Settle();
  ASSERT_EQ(w.decodes.size(), 1u);
  Token(0, kPrompt + 1, 2);
  ASSERT_EQ(w.decodes.size(), 2u);
  Begin(1, 3);
  const std::string prompt(kPrompt, 'g');
  EXPECT_THAT(Texts(*client), ElementsAre(std::pair(0, prompt + "ab"),
                                          std::pair(1, prompt + "c")));
  EXPECT_EQ(client->sent[0].started().prompt_token_ids_size(), 0);
}

TEST_F(SequenceGroupTest, AFailureEndsAll) {
  ClientPipe* const client = Submit(2, 2);
  Begin(0, 1);
  Token(0, kPrompt + 1, 2);
  ASSERT_EQ(w.decodes.size(), 2u);
  Token(0, kPrompt + 1, 3);  // contradicts itself
  EXPECT_EQ(client->status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(w.decodes[1].dropped);
  w.Settle();
  EXPECT_TRUE(w.core->idle());
  ASSERT_EQ(w.ended.size(), 2u);
  for (const RequestSummary& ended : w.ended) {
    EXPECT_FALSE(ended.client_gone);
    EXPECT_EQ(ended.status.code(), absl::StatusCode::kInternal);
  }
}

TEST_F(SequenceGroupTest, AClientThatLeavesEndsAll) {
  ClientPipe* const client = Submit(2, 3);
  Begin(0, 1);
  Token(0, kPrompt + 1, 2);
  ASSERT_EQ(w.decodes.size(), 3u);
  client->Break(absl::CancelledError("gone"));
  for (const DecodePipe& decode : w.decodes) EXPECT_TRUE(decode.dropped);
  w.Settle();
  EXPECT_TRUE(w.core->idle());
  for (const RequestSummary& ended : w.ended) EXPECT_TRUE(ended.client_gone);
}

TEST_F(SequenceGroupTest, AbortEndsAllWithTheirOutput) {
  for (const bool early : {true, false}) {
    ClientPipe* const client = Submit(2, 2);
    const size_t first = w.decodes.size() - 1;
    Begin(first, 1);
    if (!early) Token(first, kPrompt + 1, 2);
    ASSERT_EQ(w.decodes.size(), first + (early ? 1 : 2));
    EXPECT_TRUE(w.core->Abort("group").ok());
    EXPECT_EQ(Texts(*client)[0], early ? "a" : "ab");
    EXPECT_THAT(FinishedOf(*client), ElementsAre(0, 1));
    EXPECT_EQ(World::Reason(*client), v1::FINISH_REASON_CANCELLED);
    EXPECT_TRUE(client->status.ok()) << client->status;
    w.Settle();
    EXPECT_TRUE(w.core->idle());
  }
}

TEST_F(SequenceGroupTest, ASequenceThatEndsAtOnceLetsTheOthersBegin) {
  ClientPipe* const client = Submit(2, 2);
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Say(World::First(kPrompt, 26, v1::FINISH_REASON_STOP));
  w.prefills[0].Say(World::Done());
  EXPECT_FALSE(w.core->idle());
  w.Settle();
  ASSERT_EQ(w.decodes.size(), 2u);
  Begin(1, 3);
  End(1);
  EXPECT_THAT(FinishedOf(*client), ElementsAre(0, 1));
  EXPECT_TRUE(client->status.ok());
}

TEST_F(SequenceGroupTest, ASlowClientPausesEverySequence) {
  ClientPipe* const client = Submit(2, 2);
  Begin(0, 1);
  Token(0, kPrompt + 1, 2);
  Begin(1, 1);
  client->unsent = 1000;
  Token(0, kPrompt + 2, 3);
  Token(1, kPrompt + 1, 3);
  EXPECT_TRUE(w.decodes[0].paused && w.decodes[1].paused);
  client->unsent = 0;
  client->handler->OnDrained();
  EXPECT_FALSE(w.decodes[0].paused || w.decodes[1].paused);
}

// A rolling change of weights, or of an adapter, between the first's start and
// the others'.
TEST(SequenceGroupBinding, OthersTakeTheWeightsOfTheFirst) {
  const auto hello = [](const char* id, const char* weights, char adapter) {
    v1::WorkerHello worker = World::Hello(id, v1::WORKER_ROLE_DECODE);
    (*worker.mutable_fingerprint())["weights"] = weights;
    worker.add_adapters()->set_name("style");
    worker.mutable_adapters(0)->set_digest(std::string(64, adapter));
    return worker;
  };
  for (const v1::WorkerHello& other :
       {hello("d1", "other", 'a'), hello("d1", "w", 'b')}) {
    for (const bool returns : {true, false}) {
      SCOPED_TRACE(other.DebugString());
      World w;
      LeasePipe* const lease = w.Register(hello("d0", "w", 'a'));
      AdmittedRequest admitted = World::Ask();
      admitted.effective.adapter = "style";
      admitted.effective.sampling.set_n(2);
      admitted.effective.sampling.set_best_of(2);
      ClientPipe* const client = w.Submit(std::move(admitted));
      w.decodes[0].Say(World::Opened(1, ""));
      w.decodes[0].Say(World::Started(1));
      w.draining.insert(lease);
      w.Load(lease, v1::WORKER_STATE_DRAINING);
      w.Register(other);
      w.decodes[0].Say(World::Tokens(kPrompt, {1}));
      w.decodes[0].Say(World::Tokens(kPrompt + 1, {2}));
      w.RunFor(absl::Seconds(2));
      ASSERT_EQ(w.decodes.size(), 1u);  // waits
      if (returns) {
        w.Register(hello("d2", "w", 'a'));
        ASSERT_EQ(w.decodes.size(), 2u);
        EXPECT_EQ(w.decode_ids[1], "d2");
      } else {
        w.RunFor(absl::Seconds(10));
        EXPECT_EQ(client->status.code(), absl::StatusCode::kUnavailable);
        EXPECT_THAT(std::string(client->status.message()),
                    HasSubstr("with the same weights and numerics for 10s"));
        EXPECT_TRUE(w.decodes[0].dropped);
      }
    }
  }
}

TEST_F(SequenceGroupTest, BoundByTheFirstThatIsPlacedUntilAllLostTheirWorkers) {
  v1::WorkerHello other = World::Hello("d1", v1::WORKER_ROLE_DECODE);
  (*other.mutable_fingerprint())["weights"] = "other";
  LeasePipe* const other_lease = w.Register(other);
  AdmittedRequest admitted = World::Ask();
  admitted.effective.sampling.set_n(3);
  admitted.effective.sampling.set_best_of(3);
  admitted.effective.bypass_prefix_cache = true;  // all begin at once
  ClientPipe* const client = w.Submit(std::move(admitted));
  ASSERT_EQ(w.decodes.size(), 3u);
  const std::string first = w.decode_ids[0];
  const std::string second = first == "d0" ? "d1" : "d0";
  LeasePipe* const lease = first == "d0" ? &w.leases[1] : other_lease;
  w.draining.insert(lease);
  w.Load(lease, v1::WORKER_STATE_DRAINING);
  const absl::Status refusal =
      MakeError(absl::StatusCode::kUnavailable, "DRAINING", "drains");
  for (size_t i = 0; i < 2; ++i) {
    w.decodes[i].Break(refusal);
    w.Settle();
    EXPECT_EQ(w.decodes.size(), 3u);  // the third may yet be taken
  }
  w.decodes[2].Break(refusal);
  w.Settle();
  EXPECT_THAT(w.decode_ids,
              ElementsAre(first, first, first, second, second, second));
  EXPECT_TRUE(client->open);
}

TEST(SequenceGroupLimits, SequencesThatWillStartAreCounted) {
  RouterOptions options;
  options.max_requests = 5;
  World w(options);
  w.Prefill("p0");
  w.Decode("d0");
  const auto submit = [&](int n) {
    AdmittedRequest admitted = World::Ask();
    admitted.effective.sampling.set_n(n);
    admitted.effective.sampling.set_best_of(n);
    return w.Submit(std::move(admitted));
  };
  // Waiting would not help.
  EXPECT_EQ(submit(6)->status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(submit(3)->open);
  // One of the three runs, and all three are counted.
  EXPECT_EQ(submit(3)->status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(submit(2)->open);
  EXPECT_EQ(submit(1)->status.code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace tandem::router
