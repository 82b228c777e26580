// SPDX-License-Identifier: Apache-2.0
// OpenEngine's messages against those of tandem.v1, field by field and both
// ways, what its clients are told of a cluster, and its service and the
// operators' where no cluster is needed.

#include "router/openengine/translate.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/random.h"
#include "common/rpc/channel.h"
#include "common/rpc/server.h"
#include "common/rpc/status.h"
#include "common/thread_loop.h"
#include "router/grpc/service.h"
#include "router/openengine/facts.h"
#include "router/openengine/service.h"
#include "router/openengine/stream.h"
#include "router/telemetry/metrics.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using absl::StatusCode;
using testing::ElementsAre;

template <typename Message>
Message Parse(const std::string& text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message))
      << text;
  return message;
}
template <typename Message>
std::string Canonical(const std::string& text) {
  return Parse<Message>(text).ShortDebugString();
}

TEST(FromOpenEngineTest, EveryFieldHasItsPlace) {
  const struct {
    const char* theirs;
    const char* ours;
  } kCases[] = {
      {"prompt: 'p'", "text: 'p'"},
      {"prompt: ''", "text: ''"},
      {"token_ids { ids: 7 ids: 9 }", "token_ids { ids: 7 ids: 9 }"},
      {"prompt: '' request_id: 'r' model: 'm' lora_name: 'verse'",
       "text: '' request_id: 'r' model: 'm' adapter: 'verse'"},
      {"prompt: '' sampling { temperature: 0.5 top_p: 0.25 top_k: -1 "
       "min_p: 0.125 frequency_penalty: -1.5 presence_penalty: 1.5 "
       "repetition_penalty: 1.25 seed: 18446744073709551615 "
       "num_sequences: 3 }",
       "text: '' sampling { temperature: 0.5 top_p: 0.25 top_k: -1 "
       "min_p: 0.125 frequency_penalty: -1.5 presence_penalty: 1.5 "
       "repetition_penalty: 1.25 seed: 18446744073709551615 n: 3 }"},
      // Zeros are said, and what no field of ours can hold stays too much.
      {"prompt: '' sampling { temperature: 0 top_k: 0 num_sequences: 0 }",
       "text: '' sampling { temperature: 0 top_k: 0 n: 0 }"},
      {"prompt: '' sampling { temperature: 1e300 min_p: -1e300 "
       "num_sequences: 4294967295 } stopping { max_tokens: 4294967295 }",
       "text: '' sampling { temperature: inf min_p: -inf n: 2147483647 } "
       "stopping { max_tokens: 2147483647 }"},
      {"prompt: '' stopping { max_tokens: 5 min_tokens: 2 ignore_eos: true "
       "include_stop_in_output: true conditions { stop_text: 'a' } "
       "conditions { stop_token_id: 4 } conditions { stop_text: 'b' } }",
       "text: '' stopping { max_tokens: 5 min_tokens: 2 ignore_eos: true "
       "include_stop_str_in_output: true stop: 'a' stop: 'b' "
       "stop_token_ids: 4 }"},
      {"prompt: '' response { return_prompt_logprobs: true "
       "return_output_logprobs: true }",
       "text: '' output { prompt_logprobs: 0 logprobs: 0 }"},
      {"prompt: '' response { return_prompt_logprobs: true "
       "prompt_candidates { top_n: 2 } output_candidates { top_n: 3 } "
       "prompt_logprob_start: 0 }",
       "text: '' output { prompt_logprobs: 2 logprobs: 3 }"},
      {"prompt: '' response { return_output_logprobs: true "
       "output_candidates {} }",
       "text: '' output { logprobs: 0 }"},
      {"prompt: '' response { return_output_logprobs: false }", "text: ''"},
      {"prompt: '' kv { cache_salt: 's' bypass_prefix_cache: true }",
       "text: '' cache { cache_salt: 's' bypass_prefix_cache: true }"},
      {"prompt: '' guided { json_schema: '{}' backend: 'llguidance' }",
       "text: '' structured { json_schema: '{}' }"},
      {"prompt: '' guided { regex: 'a+' }",
       "text: '' structured { regex: 'a+' }"},
      {"prompt: '' guided { ebnf_grammar: 'start: \"a\"' }",
       "text: '' structured { grammar: 'start: \"a\"' }"},
      {"prompt: '' guided { structural_tag: '{}' }",
       "text: '' structured { structural_tag: '{}' }"},
      {"prompt: '' guided { choice { choices: 'x' choices: 'y' } }",
       "text: '' structured { choice { values: 'x' values: 'y' } }"},
      {"prompt: '' guided { json_object {} }",
       "text: '' structured { json_object: true }"},
      {"prompt: '' guided {}", "text: ''"},
      {"prompt: '' extra { fields { key: 'k' value { bool_value: true } } }",
       "text: ''"},
  };
  for (const auto& c : kCases) {
    const auto ours = FromOpenEngine(Parse<oe::GenerateRequest>(c.theirs));
    ASSERT_TRUE(ours.ok()) << c.theirs << ours.status();
    // Token ids are always wanted; groups that are empty say nothing.
    v1::GenerateRequest expected = Parse<v1::GenerateRequest>(c.ours);
    expected.mutable_output()->set_return_token_ids(true);
    expected.mutable_sampling();
    expected.mutable_stopping();
    EXPECT_EQ(ours->ShortDebugString(), expected.ShortDebugString());
  }
}

TEST(FromOpenEngineTest, WhatThereIsNotIsRefusedByName) {
  const struct {
    const char* theirs;
    StatusCode code;
    const char* field;
  } kCases[] = {
      {"", StatusCode::kInvalidArgument, "input"},
      {"prompt: '' kv { session {} }", StatusCode::kFailedPrecondition,
       "kv.session"},
      {"prompt: '' media {}", StatusCode::kUnimplemented, "media"},
      {"prompt: '' stopping { conditions {} }", StatusCode::kInvalidArgument,
       "stopping.conditions"},
      {"prompt: '' response { output_candidates { all {} } }",
       StatusCode::kUnimplemented, "response.output_candidates"},
      {"prompt: '' response { prompt_candidates { token_ids { ids: 1 } } }",
       StatusCode::kUnimplemented, "response.prompt_candidates"},
      {"prompt: '' response { return_prompt_logprobs: false "
       "prompt_candidates { top_n: 1 } }",
       StatusCode::kInvalidArgument, "response.prompt_candidates"},
      {"prompt: '' response { prompt_logprob_start: 1 }",
       StatusCode::kUnimplemented, "response.prompt_logprob_start"},
      {"prompt: '' guided { regex: 'a' backend: 'xgrammar' }",
       StatusCode::kUnimplemented, "guided.backend"},
  };
  for (const auto& c : kCases) {
    const absl::Status status =
        FromOpenEngine(Parse<oe::GenerateRequest>(c.theirs)).status();
    EXPECT_EQ(status.code(), c.code) << c.theirs;
    EXPECT_EQ(ErrorMetadata(status)["field"], c.field);
    EXPECT_TRUE(absl::StrContains(std::string(status.message()), c.field));
    EXPECT_EQ(ErrorReason(status),
              c.code == StatusCode::kUnimplemented     ? "UNSUPPORTED_FEATURE"
              : c.code == StatusCode::kInvalidArgument ? "FIELD_INVALID"
                                                       : "ROLE_MISMATCH");
  }
}

// Of whatever Validate refuses.
TEST(FromOpenEngineTest, RefusalsNameFieldsAsItsClientsKnowThem) {
  const struct {
    const char* theirs;
    const char* field;
  } kCases[] = {
      {"sampling { temperature: 3 }", "sampling.temperature"},
      {"sampling { temperature: nan }", "sampling.temperature"},
      {"sampling { num_sequences: 0 }", "sampling.num_sequences"},
      {"sampling { num_sequences: 33 }", "sampling.num_sequences"},
      {"stopping { max_tokens: 4294967295 }", "stopping.max_tokens"},
      {"stopping { conditions { stop_text: '' } }", "stopping.conditions"},
      {"stopping { conditions { stop_token_id: 1000 } }",
       "stopping.conditions"},
      {"response { output_candidates { top_n: 21 } }",
       "response.output_candidates"},
      {"response { prompt_candidates { top_n: 21 } }",
       "response.prompt_candidates"},
      {"guided { json_object {} } stopping { max_tokens: 0 } "
       "response { return_prompt_logprobs: true }",
       "guided"},
      {"kv { cache_salt: "
       "'12345678901234567890123456789012345678901234567890123456789012345' }",
       "kv.cache_salt"},
  };
  ModelLimits limits;
  limits.model = "m";
  limits.context_length = 100;
  limits.vocabulary_size = 1000;
  limits.eos_token_ids = {2};
  for (const auto& c : kCases) {
    const auto ours = FromOpenEngine(
        Parse<oe::GenerateRequest>(absl::StrCat("prompt: 'x' ", c.theirs)));
    ASSERT_TRUE(ours.ok()) << ours.status();
    const absl::Status status =
        InOpenEngineTerms(Validate(*ours, limits).status());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << c.theirs;
    EXPECT_EQ(ErrorReason(status), "FIELD_INVALID");
    EXPECT_EQ(ErrorMetadata(status)["field"], c.field) << status;
    EXPECT_TRUE(absl::StartsWith(std::string(status.message()), c.field))
        << status;
  }
  const absl::Status full = MakeError(StatusCode::kResourceExhausted,
                                      "QUEUE_FULL", "2", {}, absl::Seconds(1));
  EXPECT_EQ(InOpenEngineTerms(full), full);
}

TEST(OpenEngineRequestTest, ARefusalKeepsAllElseThatItSays) {
  absl::Status ours = MakeError(
      StatusCode::kInvalidArgument, "CONTEXT_LENGTH", "prompt = x: too long",
      {{"field", "prompt"}, {"prompt_tokens", "9"}, {"context_length", "8"}},
      absl::Seconds(3));
  SetViolation(&ours, "prompt", "too long");
  const absl::Status theirs = InOpenEngineTerms(ours);
  EXPECT_EQ(theirs.message(), "input = x: too long");
  EXPECT_EQ(ErrorReason(theirs), "CONTEXT_LENGTH");
  EXPECT_EQ(ErrorMetadata(theirs),
            (std::map<std::string, std::string>{{"field", "input"},
                                                {"prompt_tokens", "9"},
                                                {"context_length", "8"}}));
  EXPECT_EQ(ErrorViolation(theirs)->field, "input");
  EXPECT_EQ(ErrorViolation(theirs)->description, "too long");
  EXPECT_EQ(RetryAfter(theirs), absl::Seconds(3));
}

TEST(OpenEngineMetadataTest, ReservedKeysAreCheckedAndOthersAreNot) {
  using Metadata = std::vector<std::pair<std::string, std::string>>;
  const struct {
    Metadata metadata;
    const char* field;  // of the refusal; "": none
  } kCases[] = {
      {{}, ""},
      {{{"openengine-priority", "-2147483648"},
        {"openengine-routing-key", "a"},
        {"openengine-target-dp-rank", "0"},
        {"x-priority", "high"},
        {"x-priority", "low"}},
       ""},
      {{{"openengine-priority", "high"}}, "openengine-priority"},
      {{{"openengine-priority", "2147483648"}}, "openengine-priority"},
      {{{"openengine-priority", "1 "}}, "openengine-priority"},
      {{{"openengine-priority", "1"}, {"openengine-priority", "1"}},
       "openengine-priority"},
      {{{"openengine-routing-key", ""}}, "openengine-routing-key"},
      {{{"openengine-target-dp-rank", "-1"}}, "openengine-target-dp-rank"},
      {{{"openengine-target-dp-rank", "1"}}, "openengine-target-dp-rank"},
  };
  for (const auto& c : kCases) {
    const absl::Status status = CheckOpenEngineMetadata(c.metadata);
    EXPECT_EQ(status.ok(), *c.field == '\0') << status;
    EXPECT_EQ(ErrorMetadata(status)["field"], c.field);
  }
}

// What comes of events, one line each; "-" is nothing.
std::vector<std::string> Answers(const std::vector<const char*>& events) {
  static Letters letters;
  OpenEngineAnswer answer(&letters);
  std::vector<std::string> answers;
  for (const char* event : events) {
    const auto sent = answer.Add(Parse<v1::GenerateResponse>(event));
    answers.push_back(sent ? sent->ShortDebugString() : "-");
  }
  return answers;
}
std::string Response(const std::string& text) {
  return Canonical<oe::GenerateResponse>(
      absl::StrCat("request_id: 'r' ", text));
}

constexpr char kStartedEvent[] =
    "request_id: 'r' started { prompt_tokens: 3 cached_tokens: 1 "
    "sampling { n: 1 } }";

TEST(OpenEngineAnswerTest, TokensThenTheEndWithTheUsage) {
  EXPECT_THAT(
      Answers(
          {kStartedEvent, "delta { text: 'ab' token_ids: 1 token_ids: 2 }",
           "delta { token_ids: 26 }",
           "finished { finish_reason: FINISH_REASON_STOP eos_token_id: 26 }",
           "done { usage { prompt_tokens: 3 completion_tokens: 3 "
           "total_tokens: 6 cached_tokens: 1 reasoning_tokens: 0 } }"}),
      ElementsAre(
          "-",
          Response("token { output_index: 0 text: 'ab' tokens { token_id: 1 "
                   "token: 'a' } tokens { token_id: 2 token: 'b' } }"),
          Response("token { output_index: 0 "
                   "tokens { token_id: 26 token: 'z' } }"),
          "-",
          Response("finished { output_index: 0 reason: FINISH_REASON_STOP "
                   "stop_match { eos_token_id: 26 } } usage { prompt_tokens: 3 "
                   "completion_tokens: 3 total_tokens: 6 "
                   "cached_prompt_tokens: 1 }")));
}

TEST(OpenEngineAnswerTest, LogProbabilitiesAreRecordsOfTheirTokens) {
  EXPECT_THAT(
      Answers({kStartedEvent,
               "prompt_logprobs { tokens { token_id: 7 token: 'g' } }",
               "prompt_logprobs { position: 1 tokens { token_id: 8 "
               "token: '\\303' logprob: -1.5 rank: 2 } tokens { token_id: 9 "
               "token: 'i' logprob: -0.5 rank: 1 top { token_id: 9 token: 'i' "
               "logprob: -0.5 } top { token_id: 5 token: '\\377e' "
               "logprob: -2 } } }",
               "delta { text: 'a' token_ids: 1 logprobs { token_id: 1 "
               "token: 'a' logprob: -0.25 rank: 1 top { token_id: 1 token: 'a' "
               "logprob: -0.25 } } }"}),
      ElementsAre(
          "-", "-",
          Response("prompt { tokens { token_id: 7 token: 'g' } tokens { "
                   "token_id: 8 token: '\\357\\277\\275' logprob: -1.5 rank: 2 "
                   "} tokens { token_id: 9 token: 'i' logprob: -0.5 rank: 1 "
                   "candidates { token_id: 9 token: 'i' logprob: -0.5 rank: 1 "
                   "} candidates { token_id: 5 token: '\\357\\277\\275e' "
                   "logprob: -2 rank: 2 } } }"),
          Response("token { output_index: 0 text: 'a' tokens { token_id: 1 "
                   "token: 'a' logprob: -0.25 rank: 1 candidates { token_id: 1 "
                   "token: 'a' logprob: -0.25 rank: 1 } } }")));
}

TEST(OpenEngineAnswerTest, OnlyTheLastOutputsEndWaitsForTheUsage) {
  EXPECT_THAT(
      Answers({"request_id: 'r' started { sampling { n: 2 } }",
               "delta { index: 1 text: 'a' token_ids: 1 }",
               "finished { index: 1 finish_reason: FINISH_REASON_STOP "
               "stop_string: 'x' }",
               "delta { text: 'b' token_ids: 2 }",
               "finished { finish_reason: FINISH_REASON_LENGTH }",
               "done { usage { completion_tokens: 2 total_tokens: 2 } }"}),
      ElementsAre(
          "-",
          Response("token { output_index: 1 text: 'a' "
                   "tokens { token_id: 1 token: 'a' } }"),
          Response("finished { output_index: 1 reason: FINISH_REASON_STOP "
                   "stop_match { stop_text: 'x' } }"),
          Response("token { output_index: 0 text: 'b' "
                   "tokens { token_id: 2 token: 'b' } }"),
          "-",
          Response("finished { output_index: 0 reason: FINISH_REASON_LENGTH } "
                   "usage { completion_tokens: 2 total_tokens: 2 "
                   "prompt_tokens: 0 cached_prompt_tokens: 0 }")));
  EXPECT_THAT(Answers({kStartedEvent,
                       "finished { finish_reason: FINISH_REASON_CANCELLED }",
                       "done {}"})[2],
              testing::HasSubstr("FINISH_REASON_CANCELLED"));
  EXPECT_THAT(Answers({kStartedEvent,
                       "finished { finish_reason: FINISH_REASON_STOP "
                       "stop_token_id: 4 }",
                       "done {}"})[2],
              testing::HasSubstr("stop_match { stop_token_id: 4 }"));
}

TEST(OpenEngineAnswerTest, FailuresAreEventsOnceTheRequestWasAccepted) {
  Letters letters;
  OpenEngineAnswer answer(&letters);
  const absl::Status lost =
      MakeError(StatusCode::kUnavailable, "WORKER_LOST", "gone");
  EXPECT_FALSE(answer.Fail(lost).has_value());
  answer.Add(Parse<v1::GenerateResponse>(kStartedEvent));
  answer.Add(Parse<v1::GenerateResponse>("delta { token_ids: 1 }"));
  ASSERT_TRUE(answer.Fail(lost).has_value());
  EXPECT_EQ(answer.Fail(lost)->ShortDebugString(),
            Response("error { code: ERROR_CODE_INTERNAL message: 'gone' "
                     "retryable: true } usage { prompt_tokens: 3 "
                     "completion_tokens: 1 total_tokens: 4 "
                     "cached_prompt_tokens: 1 }"));
  EXPECT_FALSE(answer.Fail(absl::DeadlineExceededError("")).has_value());
  EXPECT_FALSE(answer.Fail(absl::CancelledError("")).has_value());

  const struct {
    StatusCode code;
    const char* reason;
    oe::ErrorCode expected;
    bool retryable;
  } kCases[] = {
      {StatusCode::kInvalidArgument, "FIELD_INVALID",
       oe::ERROR_CODE_INVALID_ARGUMENT, false},
      {StatusCode::kUnimplemented, "UNSUPPORTED_FEATURE",
       oe::ERROR_CODE_UNSUPPORTED_FEATURE, false},
      {StatusCode::kNotFound, "ADAPTER_NOT_FOUND",
       oe::ERROR_CODE_MODEL_NOT_FOUND, false},
      {StatusCode::kAlreadyExists, "REQUEST_ID_IN_USE",
       oe::ERROR_CODE_DUPLICATE_REQUEST, false},
      {StatusCode::kResourceExhausted, "QUEUE_FULL", oe::ERROR_CODE_OVERLOADED,
       true},
      {StatusCode::kUnavailable, "HANDOFF_FAILED",
       oe::ERROR_CODE_KV_TRANSFER_FAILED, true},
      {StatusCode::kUnavailable, "DRAINING", oe::ERROR_CODE_INTERNAL, true},
      {StatusCode::kCancelled, "CLIENT_GONE", oe::ERROR_CODE_CANCELLED, false},
      {StatusCode::kInternal, "SUSPECT", oe::ERROR_CODE_INTERNAL, false},
  };
  for (const auto& c : kCases) {
    const oe::EngineError error =
        ToEngineError(MakeError(c.code, c.reason, "why"));
    EXPECT_EQ(error.code(), c.expected) << c.reason;
    EXPECT_EQ(error.retryable(), c.retryable) << c.reason;
    EXPECT_EQ(error.message(), "why");
  }
}

// Through the core: streams as its clients hold them.
struct OpenEngineStreamTest : testing::Test {
  using Call = Pipe<oe::GenerateResponse, v1::GenerateRequest>;
  OpenEngineStreamTest() { w.Decode("d"); }
  Call* Submit(const std::string& id, const std::string& tenant = "") {
    Call* const call = &calls.emplace_back();
    AdmittedRequest ask = World::Ask();
    ask.effective.request_id = id;
    ask.tenant = tenant;
    w.core->Submit(
        std::move(ask),
        std::make_unique<OpenEngineStream>(
            std::make_unique<
                FakeStream<oe::GenerateResponse, v1::GenerateRequest>>(call),
            &w.letters));
    return call;
  }
  void FirstToken(size_t decode) {
    w.decodes[decode].Say(World::Opened(1, ""));
    w.decodes[decode].Say(World::Started(1));
    w.decodes[decode].Say(World::Tokens(40, {1}));
  }

  std::deque<Call> calls;  // the core's streams end in them: they outlive it
  World w;
};

TEST_F(OpenEngineStreamTest, AWholeRequest) {
  Call* const call = Submit("r");
  FirstToken(0);
  w.decodes[0].Say(World::Tokens(41, {2, 26}));
  w.decodes[0].Say(World::Finished(v1::FINISH_REASON_STOP));
  w.Settle();
  EXPECT_TRUE(call->status.ok()) << call->status;
  std::string text;
  std::vector<uint32_t> ids;
  for (const oe::GenerateResponse& response : call->sent) {
    EXPECT_EQ(response.request_id(), "r");
    EXPECT_EQ(response.has_usage(), &response == &call->sent.back());
    text += response.token().text();
    for (const oe::TokenInfo& token : response.token().tokens()) {
      ids.push_back(token.token_id());
    }
  }
  EXPECT_EQ(text, "ab");
  EXPECT_THAT(ids, ElementsAre(1, 2, 26));
  EXPECT_EQ(call->sent.back().usage().completion_tokens(), 3u);
  EXPECT_EQ(call->sent.back().finished().stop_match().eos_token_id(), 26u);
  EXPECT_TRUE(w.core->idle());
}

TEST_F(OpenEngineStreamTest, AClientThatGoesFreesItsRequest) {
  Call* const call = Submit("r");
  FirstToken(0);
  call->Break(absl::CancelledError("gone"));
  w.Settle();
  EXPECT_TRUE(w.decodes[0].dropped);
  EXPECT_TRUE(w.core->idle());
}

TEST_F(OpenEngineStreamTest, RefusedBeforeFailedAfterItWasAccepted) {
  Submit("r");
  Call* const again = Submit("r");
  EXPECT_EQ(ErrorReason(again->status), "REQUEST_ID_IN_USE");
  EXPECT_TRUE(again->sent.empty());
  FirstToken(0);
  w.core->CloseAll(
      MakeError(StatusCode::kUnavailable, "DRAINING", "going away"));
  EXPECT_TRUE(calls[0].status.ok());
  EXPECT_EQ(calls[0].sent.back().error().code(), oe::ERROR_CODE_INTERNAL);
  EXPECT_TRUE(calls[0].sent.back().error().retryable());
}

TEST_F(OpenEngineStreamTest, AbortsAreOfTheCallersOwnRequests) {
  Call* const mine = Submit("same", "a");
  Call* const other = Submit("same", "b");
  Call* const second = Submit("more", "a");
  EXPECT_EQ(w.core->Abort("more", "b").status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(w.core->Abort("same", "a").ok());
  EXPECT_FALSE(mine->open);
  EXPECT_TRUE(other->open);
  EXPECT_EQ(mine->sent.back().finished().reason(), oe::FINISH_REASON_CANCELLED);
  EXPECT_EQ(w.core->AbortAll(""), 0);
  EXPECT_EQ(w.core->AbortAll("a"), 1);
  EXPECT_FALSE(second->open);
  EXPECT_TRUE(other->open);
  EXPECT_TRUE(w.core->Abort("same").ok());  // an operator may
  EXPECT_FALSE(other->open);
}

v1::GetClusterStateResponse SomeState() {
  return Parse<v1::GetClusterStateResponse>(
      "router_incarnation: '\\001\\253' model: 'm' "
      "requests { total: 9 queued: 2 queued_tokens: 70 } "
      "workers { hello { role: WORKER_ROLE_DECODE block_size: 16 "
      "num_blocks: 100 max_num_seqs: 8 } load { running: 3 queued_tokens: 5 "
      "blocks_free: 60 blocks_live: 20 blocks_reserved: 4 "
      "blocks_cached: 16 } } "
      "workers { hello { role: WORKER_ROLE_DECODE block_size: 16 "
      "num_blocks: 50 max_num_seqs: 4 } load { running: 2 blocks_live: 7 } } "
      "workers { hello { role: WORKER_ROLE_PREFILL block_size: 32 "
      "num_blocks: 999 max_num_seqs: 99 } "
      "load { running: 1 queued_tokens: 200 blocks_live: 900 } }");
}

TEST(OpenEngineFactsTest, AServerIsItsDecodeWorkersTogether) {
  const oe::ServerInfo info = MakeServerInfo(SomeState());
  EXPECT_EQ(info.engine_name(), "tandem");
  EXPECT_EQ(info.engine_role(), oe::ENGINE_ROLE_AGGREGATED);
  EXPECT_EQ(info.instance_id(), "01ab");
  EXPECT_THAT(info.supported_models(), ElementsAre("m"));
  EXPECT_EQ(info.schema_revision(), 1u);
  EXPECT_EQ(info.minimum_client_revision(), 1u);
  EXPECT_EQ(info.schema_release().size(), 32u);
  EXPECT_EQ(info.parallelism().data_parallel_size(), 1u);
  EXPECT_TRUE(info.kv_connector().has_enabled());
  EXPECT_FALSE(info.kv_connector().enabled());
  EXPECT_EQ(info.capacity().ShortDebugString(),
            Canonical<oe::DeploymentCapacity>(
                "kv_block_size: 16 total_kv_blocks: 150 "
                "max_running_requests: 12"));
  v1::GetClusterStateResponse mixed = SomeState();
  mixed.mutable_workers(1)->mutable_hello()->set_block_size(32);
  EXPECT_FALSE(MakeServerInfo(mixed).capacity().has_kv_block_size());
}

TEST(OpenEngineFactsTest, LoadIsCountedByRole) {
  const absl::Time now = absl::FromUnixNanos(1234567890123);
  const oe::LoadInfo load = MakeLoadInfo(SomeState(), now, false);
  EXPECT_EQ(load.ShortDebugString(),
            Canonical<oe::LoadInfo>(
                "instance_id: '01ab' timestamp_unix_nanos: 1234567890123 "
                "running_requests: 7 queued_requests: 2 used_kv_blocks: 31 "
                "total_kv_blocks: 150 waiting_tokens: 275 "
                "prefill_batch_size: 1 decode_batch_size: 5"));
  const oe::LoadInfo ranks = MakeLoadInfo(SomeState(), now, true);
  ASSERT_EQ(ranks.ranks_size(), 1);
  EXPECT_EQ(ranks.ranks(0).ShortDebugString(),
            Canonical<oe::RankLoadInfo>(
                "data_parallel_rank: 0 running_requests: 7 queued_requests: 2 "
                "used_kv_blocks: 31 total_kv_blocks: 150 prefill_batch_size: 1 "
                "decode_batch_size: 5"));
}

TEST(OpenEngineFactsTest, AModelAndItsLimits) {
  ModelLimits limits;
  limits.model = "m";
  oe::ModelInfo info = MakeModelInfo(limits, false);
  EXPECT_EQ(info.model_id(), "m");
  EXPECT_FALSE(info.has_max_context_length());  // no worker, not known
  EXPECT_EQ(info.tool_call_parser(), "");
  EXPECT_FALSE(info.supports_lora());
  EXPECT_EQ(info.generation().output_logprobs().max_top_n(), 20u);
  EXPECT_EQ(info.generation().max_num_sequences(), 32u);
  EXPECT_THAT(
      info.generation().guided_decoding().modes(),
      testing::Not(testing::Contains(oe::GUIDED_DECODING_MODE_EBNF_GRAMMAR)));
  limits.context_length = 2048;
  limits.tool_call_style = ToolCallStyle::kHermes;
  info = MakeModelInfo(limits, true);
  EXPECT_EQ(info.max_context_length(), 2048u);
  EXPECT_EQ(info.max_output_tokens(), 2047u);
  EXPECT_EQ(info.tool_call_parser(), "hermes");
  EXPECT_TRUE(info.supports_lora());
}

TEST(OpenEngineFactsTest, HealthIsThatOfTheWorstCheck) {
  oe::HealthResponse health;
  AddCheck("grpc", absl::OkStatus(), &health);
  EXPECT_EQ(health.state(), oe::HEALTH_STATE_READY);
  AddCheck("model", absl::UnavailableError("no decode worker"), &health);
  AddCheck("scheduler", absl::OkStatus(), &health);
  EXPECT_EQ(health.ShortDebugString(),
            Canonical<oe::HealthResponse>(
                "state: HEALTH_STATE_NOT_READY "
                "checks { name: 'grpc' state: HEALTH_STATE_READY } "
                "checks { name: 'model' state: HEALTH_STATE_NOT_READY "
                "message: 'no decode worker' } "
                "checks { name: 'scheduler' state: HEALTH_STATE_READY }"));
}

TEST(OpenEngineFactsTest, NumbersOfAdaptersAreTheirOwn) {
  std::vector<v1::LoraAdapter> loaded(1);
  loaded[0].set_lora_name("verse");
  AdapterIds ids;
  const int64_t made = AdapterIds::Made("verse");
  EXPECT_GT(made, 0);
  EXPECT_NE(made, AdapterIds::Made("prose"));
  EXPECT_EQ(ids.Of("verse"), made);
  EXPECT_EQ(ErrorReason(ids.Take("prose", made, loaded)), "ADAPTER_EXISTS");
  EXPECT_EQ(ErrorReason(ids.Take("verse", 7, loaded)), "ADAPTER_EXISTS");
  EXPECT_TRUE(ids.Take("verse", made, loaded).ok());
  EXPECT_TRUE(ids.Take("prose", 7, loaded).ok());
  EXPECT_EQ(ids.Of("prose"), 7);
  loaded.emplace_back().set_lora_name("prose");
  EXPECT_EQ(ErrorReason(ids.Take("rhyme", 7, loaded)), "ADAPTER_EXISTS");
  EXPECT_TRUE(ids.Take("prose", 7, loaded).ok());
  // Unloaded by others: its number is free again.
  loaded.pop_back();
  EXPECT_TRUE(ids.Take("rhyme", 7, loaded).ok());
  EXPECT_NE(ids.Of("prose"), 7);
  loaded.back().set_lora_name("rhyme");
  ids.Keep(loaded);
  EXPECT_EQ(ids.Of("rhyme"), 7);
  ids.Keep({});
  EXPECT_NE(ids.Of("rhyme"), 7);
}

// A router without workers, whose compiler is never done.
class ServicesTest : public testing::Test {
 protected:
  struct Compiler final : StructuredChecker {
    bool Known(const v1::StructuredOptions&) const override { return false; }
    void Check(const v1::StructuredOptions&, Done) override {}
  };

  ServicesTest() {
    options_.incarnation = std::string(16, 'r');
    options_.model = "m";
    loop_.RunSync([this] {
      core_ = std::make_unique<RouterCore>(options_, &loop_, &random_, &dialer_,
                                           &letters_, &nobody_);
      gate_ = std::make_unique<StructuredGate>(
          StructuredGateOptions(), &loop_, &compiler_,
          [this](AdmittedRequest admitted,
                 std::unique_ptr<ClientStream> client) {
            core_->Submit(std::move(admitted), std::move(client));
          },
          [](Api, const absl::Status&) {});
    });
    admin_ = std::make_unique<AdminServer>(&loop_, core_.get(), gate_.get(),
                                           &access_.tenants());
    control_ = std::make_unique<OpenEngineControl>(
        &loop_, core_.get(), gate_.get(), &intake_, OpenEngineOptions());
    inference_ = std::make_unique<InferenceServer>(&loop_, gate_.get(),
                                                   &intake_, 1 << 20);
    auto server = rpc::Server::Start(
        {}, {admin_.get(), control_.get(), inference_.get()});
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = rpc::MakeChannel(server_->address(), {});
  }
  ~ServicesTest() override {
    server_->Shutdown(absl::ZeroDuration());
    loop_.RunSync([this] {
      gate_.reset();
      core_.reset();
    });
    loop_.Stop();
  }

  ClientPipe* Enter(const std::string& id) {
    AdmittedRequest admitted = World::Ask();
    admitted.effective.structured.emplace().set_regex("x");
    admitted.effective.request_id = id;
    ClientPipe* const client = &clients_.emplace_back();
    loop_.RunSync([&] {
      gate_->Enter(
          std::move(admitted),
          std::make_unique<
              FakeStream<v1::GenerateResponse, v1::GenerateRequest>>(client));
    });
    return client;
  }
  bool Cancelled(const ClientPipe* client) {
    bool cancelled = false;
    loop_.RunSync([&] {
      cancelled = !client->open &&
                  World::Reason(*client) == v1::FINISH_REASON_CANCELLED;
    });
    return cancelled;
  }

  RouterOptions options_;
  SystemRandom random_;
  Letters letters_;
  RouterObserver nobody_;
  Compiler compiler_;
  std::deque<ClientPipe> clients_;
  ThreadLoop loop_{"services"};
  RpcDialer dialer_{&loop_, {}};
  Access access_{[this] { return loop_.Now(); }, &nobody_};
  Metrics metrics_{"router", "m"};
  RouterMetrics router_metrics_{&metrics_, Policy::kRoundRobin};
  const Intake intake_{
      nullptr,
      nullptr,
      {},
      {},
      &router_metrics_,
      &access_,
      [this](int priority) { return core_->HasRoom(priority); }};
  std::unique_ptr<RouterCore> core_;
  std::unique_ptr<StructuredGate> gate_;
  std::unique_ptr<AdminServer> admin_;
  std::unique_ptr<OpenEngineControl> control_;
  std::unique_ptr<InferenceServer> inference_;
  std::unique_ptr<rpc::Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(ServicesTest, AbortsReachWhatWaitsForACompiler) {
  ClientPipe* const first = Enter("first");
  ClientPipe* const second = Enter("second");
  ClientPipe* const third = Enter("third");
  const auto operators = v1::AdminService::NewStub(channel_);
  const auto clients = oe::Control::NewStub(channel_);
  for (const StatusCode code : {StatusCode::kOk, StatusCode::kNotFound}) {
    grpc::ClientContext context, other;
    v1::AbortRequest request;
    v1::AbortResponse response;
    request.set_request_id("first");
    EXPECT_EQ(
        rpc::FromGrpc(operators->Abort(&context, request, &response), context)
            .code(),
        code);
    oe::AbortRequest theirs;
    oe::AbortResponse answer;
    theirs.set_request_id("second");
    EXPECT_EQ(
        rpc::FromGrpc(clients->Abort(&other, theirs, &answer), other).code(),
        code);
  }
  EXPECT_TRUE(Cancelled(first));
  EXPECT_TRUE(Cancelled(second));
  EXPECT_FALSE(Cancelled(third));
  grpc::ClientContext context;
  oe::AbortRequest all;
  oe::AbortResponse answer;
  all.mutable_all_requests();
  EXPECT_TRUE(clients->Abort(&context, all, &answer).ok());
  EXPECT_EQ(answer.message(), "1 requests aborted");
  EXPECT_TRUE(Cancelled(third));
}

TEST_F(ServicesTest, WhatIsTooMuchForOneMessageIsCounted) {
  const auto stub = v1::InferenceService::NewStub(channel_);
  grpc::ClientContext context;
  v1::GenerateRequest request;
  v1::GenerateOnceResponse response;
  request.mutable_output()->mutable_attention()->set_mean(true);
  const absl::Status status =
      rpc::FromGrpc(stub->GenerateOnce(&context, request, &response), context);
  EXPECT_EQ(ErrorMetadata(status)["field"], "output.attention");
  EXPECT_THAT(metrics_.Text(),
              testing::ContainsRegex("tandem_requests_total\\{[^\n]*} 1\n"));
}

// The model, which this one has not, is asked for nothing.
TEST_F(ServicesTest, AFullRouterRefusesBeforeItPreparesAnything) {
  ClientPipe* const waits = &clients_.emplace_back();
  loop_.RunSync([&] {  // for workers that there are none of
    for (int i = 0; i < options_.max_queued; ++i) {
      core_->Submit(
          World::Ask(),
          std::make_unique<
              FakeStream<v1::GenerateResponse, v1::GenerateRequest>>(waits));
    }
  });
  const auto stub = v1::InferenceService::NewStub(channel_);
  grpc::ClientContext context;
  v1::GenerateRequest request;
  v1::GenerateOnceResponse response;
  request.set_text("Once upon a time");
  const absl::Status status =
      rpc::FromGrpc(stub->GenerateOnce(&context, request, &response), context);
  EXPECT_EQ(ErrorReason(status), "QUEUE_FULL") << status;
  EXPECT_EQ(RetryAfter(status), absl::Seconds(1));
  EXPECT_THAT(metrics_.Text(),
              testing::ContainsRegex("tandem_requests_total\\{[^\n]*} 1\n"));
}

}  // namespace
}  // namespace tandem::router
