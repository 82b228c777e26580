// SPDX-License-Identifier: Apache-2.0
// What a client of a healthy cluster sees, through real processes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/rpc/status.h"
#include "tests/integration/cluster_fixture.h"

namespace tandem::integration {
namespace {

TEST_F(ClusterTest, StreamsOneAnswerWithAllItsEvents) {
  Begin({});
  v1::GenerateRequest request = TextRequest("Mia found a red ball.", 24);
  request.set_placement(v1::PLACEMENT_SPLIT);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_output()->set_logprobs(2);
  grpc::ClientContext context;
  const auto stub = cluster_->Client();
  const auto reader = stub->Generate(&context, request);
  std::vector<v1::GenerateResponse> events;
  v1::GenerateResponse event;
  while (reader->Read(&event)) events.push_back(event);
  ASSERT_TRUE(reader->Finish().ok());
  ASSERT_GE(events.size(), 4u);
  ASSERT_TRUE(events.front().has_started());
  EXPECT_TRUE(events[events.size() - 2].has_finished());
  ASSERT_TRUE(events.back().has_done());
  const v1::GenerateStarted& started = events.front().started();
  EXPECT_EQ(started.sampling().temperature(), 0);
  EXPECT_EQ(started.stopping().max_tokens(), 24);
  EXPECT_EQ(started.prompt_token_ids_size(), started.prompt_tokens());
  int tokens = 0, logprobs = 0;
  for (const v1::GenerateResponse& response : events) {
    tokens += response.delta().token_ids_size();
    logprobs += response.delta().logprobs_size();
    for (const v1::TokenLogprob& token : response.delta().logprobs()) {
      EXPECT_LE(token.logprob(), 0);
      EXPECT_EQ(token.rank(), 1);  // greedy
      EXPECT_EQ(token.top_size(), 2);
      EXPECT_EQ(token.top(0).token_id(), token.token_id());
    }
  }
  EXPECT_EQ(tokens, 24);
  EXPECT_EQ(logprobs, 24);
  const v1::GenerateDone& done = events.back().done();
  EXPECT_EQ(done.usage().completion_tokens(), 24);
  EXPECT_EQ(done.usage().prompt_tokens(), started.prompt_tokens());
  EXPECT_EQ(done.workers().prefill(), "prefill-0");
  EXPECT_EQ(done.workers().decode(), "decode-0");
  EXPECT_EQ(done.timings().way(), "shm");
  // 2 (K and V) * layers * kv heads * head size * 2 bytes per position.
  EXPECT_GT(done.timings().kv_bytes(), 0);
  EXPECT_EQ(done.timings().kv_bytes() % done.usage().prompt_tokens(), 0);
}

TEST_F(ClusterTest, OneCallGivesWhatTheStreamGives) {
  Begin({});
  const v1::GenerateRequest request = TextRequest("The cat", 16);
  const Outcome streamed = cluster_->Generate(request);
  v1::GenerateOnceResponse once;
  grpc::ClientContext context;
  ASSERT_TRUE(cluster_->Client()->GenerateOnce(&context, request, &once).ok());
  ASSERT_EQ(once.sequences_size(), 1);
  EXPECT_EQ(once.sequences(0).text(), streamed.text);
  EXPECT_EQ(once.sequences(0).finished().finish_reason(), streamed.reason);
  EXPECT_TRUE(once.has_done());
}

TEST_F(ClusterTest, TextAndModelCallsAnswer) {
  Begin({});
  const auto stub = cluster_->Client();
  v1::TokenizeRequest tokenize;
  tokenize.set_text("The cat said: héllo 🐈");
  v1::TokenizeResponse tokens;
  grpc::ClientContext c1, c2, c3, c4, c5;
  ASSERT_TRUE(stub->Tokenize(&c1, tokenize, &tokens).ok());
  ASSERT_GT(tokens.token_ids_size(), 3);
  v1::DetokenizeRequest detokenize;
  *detokenize.mutable_token_ids() = tokens.token_ids();
  v1::DetokenizeResponse text;
  ASSERT_TRUE(stub->Detokenize(&c2, detokenize, &text).ok());
  EXPECT_EQ(text.text(), tokenize.text());
  v1::ListModelsResponse models;
  ASSERT_TRUE(stub->ListModels(&c3, {}, &models).ok());
  ASSERT_EQ(models.models_size(), 1);
  EXPECT_EQ(models.models(0).model(), "tales");
  EXPECT_GT(models.models(0).context_length(), 0);
  v1::GetModelRequest get;
  v1::GetModelResponse model;
  ASSERT_TRUE(stub->GetModel(&c4, get, &model).ok());
  EXPECT_EQ(model.model().ready_decode_workers(), 1);
  get.set_model("no-such-model");
  const absl::Status missing = rpc::FromGrpc(stub->GetModel(&c5, get, &model));
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ErrorReason(missing), "MODEL_NOT_FOUND");
}

TEST_F(ClusterTest, BadRequestsAreRefusedAndTheNextGoodOneIsServed) {
  Begin({});
  struct Case {
    const char* field;
    std::function<void(v1::GenerateRequest*)> spoil;
  };
  const Case cases[] = {
      {"temperature",
       [](auto* r) { r->mutable_sampling()->set_temperature(-1); }},
      {"top_p", [](auto* r) { r->mutable_sampling()->set_top_p(0); }},
      {"max_tokens", [](auto* r) { r->mutable_stopping()->set_max_tokens(0); }},
      {"logprobs", [](auto* r) { r->mutable_output()->set_logprobs(21); }},
      {"n", [](auto* r) { r->mutable_sampling()->set_n(33); }},
      {"prompt", [](auto* r) { r->clear_prompt(); }},
  };
  for (const Case& c : cases) {
    v1::GenerateRequest request = TextRequest("Hello", 4);
    c.spoil(&request);
    const Outcome outcome = cluster_->Generate(request);
    EXPECT_EQ(outcome.status.code(), absl::StatusCode::kInvalidArgument)
        << c.field << ": " << outcome.status;
    EXPECT_NE(outcome.status.message().find(c.field), std::string::npos)
        << outcome.status;
    EXPECT_EQ(ErrorReason(outcome.status), "FIELD_INVALID") << c.field;
    EXPECT_TRUE(cluster_->Generate(TextRequest("Hello", 4)).status.ok());
  }
}

// Every rule through the whole system: it holds, and holds alike where the
// prompt is prefilled elsewhere.
TEST_F(ClusterTest, RulesOnLogitsHoldWhereverThePromptIsPrefilled) {
  Begin({});
  const auto run = [&](const std::function<void(v1::SamplingOptions*)>& set) {
    v1::GenerateRequest request = TextRequest("Once upon a time", 48);
    request.mutable_stopping()->set_ignore_eos(true);
    request.mutable_cache()->set_bypass_prefix_cache(true);
    set(request.mutable_sampling());
    request.set_placement(v1::PLACEMENT_SPLIT);
    const Outcome split = cluster_->Generate(request);
    EXPECT_TRUE(split.status.ok()) << split.status;
    EXPECT_EQ(split.token_ids.size(), 48u);
    EXPECT_EQ(split.done.workers().prefill(), "prefill-0");
    request.set_placement(v1::PLACEMENT_LOCAL);
    EXPECT_EQ(cluster_->Generate(request).token_ids, split.token_ids);
    return split;
  };
  const auto distinct = [](const Outcome& outcome) {
    return std::set<int32_t>(outcome.token_ids.begin(), outcome.token_ids.end())
        .size();
  };
  const Outcome free = run([](auto*) {});
  const std::set<int32_t> usual(free.token_ids.begin(), free.token_ids.end());
  ASSERT_NE(free.text.find(" was"), std::string::npos) << free.text;

  const Outcome penalised = run([](auto* s) { s->set_frequency_penalty(2); });
  EXPECT_GT(distinct(penalised), distinct(free));
  const Outcome present = run([](auto* s) { s->set_presence_penalty(2); });
  EXPECT_GT(distinct(present), distinct(free));
  const Outcome repeated = run([](auto* s) { s->set_repetition_penalty(2); });
  EXPECT_GT(distinct(repeated), distinct(free));

  const auto chosen = static_cast<uint32_t>(free.token_ids[0]);
  const Outcome biased =
      run([&](auto* s) { (*s->mutable_logit_bias())[chosen] = 100; });
  EXPECT_EQ(distinct(biased), 1u);
  EXPECT_EQ(biased.token_ids[0], free.token_ids[0]);

  const Outcome banned = run([&](auto* s) {
    for (const int32_t id : usual) {
      s->add_banned_token_ids(static_cast<uint32_t>(id));
    }
  });
  for (const int32_t id : banned.token_ids) EXPECT_FALSE(usual.contains(id));

  const std::set<int32_t> few(free.token_ids.begin() + 20,
                              free.token_ids.begin() + 40);
  const Outcome allowed = run([&](auto* s) {
    s->set_temperature(2);
    s->set_seed(4);
    for (const int32_t id : few) {
      s->add_allowed_token_ids(static_cast<uint32_t>(id));
    }
  });
  EXPECT_GT(distinct(allowed), 3u);
  for (const int32_t id : allowed.token_ids) EXPECT_TRUE(few.contains(id));

  v1::GenerateRequest none = TextRequest("Once upon a time", 4);
  none.mutable_sampling()->add_allowed_token_ids(chosen);
  none.mutable_sampling()->add_bad_words(
      free.text.substr(0, free.text.find(' ', 1)));
  EXPECT_EQ(cluster_->Generate(none).status.code(),
            absl::StatusCode::kInvalidArgument)
      << "no token is left: " << none.sampling().bad_words(0);

  const Outcome wordless = run([](auto* s) { s->add_bad_words("was"); });
  EXPECT_EQ(wordless.text.find(" was"), std::string::npos) << wordless.text;
  std::vector<int32_t> by_typical_p[2];
  for (const bool set : {false, true}) {
    by_typical_p[set] = run([set](auto* s) {
                          s->set_temperature(1);
                          s->set_seed(4);
                          if (set) s->set_typical_p(0.2f);
                        }).token_ids;
  }
  EXPECT_NE(by_typical_p[true], by_typical_p[false]);
}

TEST_F(ClusterTest, SequencesOfAPromptDifferAndTheBestOfThemIsChosen) {
  Begin({});
  v1::GenerateRequest request = TextRequest(SomePrompts(1, 3)[0], 24);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_sampling()->set_temperature(1);
  request.mutable_sampling()->set_seed(11);
  const Outcome single = cluster_->Generate(request);
  ASSERT_TRUE(single.status.ok()) << single.status;
  request.mutable_output()->set_echo(true);
  const Outcome echoed = cluster_->Generate(request);
  EXPECT_EQ(echoed.text, request.text() + single.text);
  EXPECT_EQ(echoed.token_ids, single.token_ids);
  request.mutable_output()->clear_echo();

  request.mutable_sampling()->set_n(4);
  request.mutable_output()->set_logprobs(0);
  const Outcome four = cluster_->Generate(request);
  ASSERT_TRUE(four.status.ok()) << four.status;
  ASSERT_EQ(four.sequences.size(), 4u);
  EXPECT_EQ(four.sequences.at(0).text(), single.text);
  std::set<std::string> texts;
  std::vector<std::pair<double, std::string>> ranking;
  for (const auto& [index, sequence] : four.sequences) {
    EXPECT_EQ(sequence.token_ids_size(), 24) << index;
    EXPECT_EQ(sequence.finished().finish_reason(), v1::FINISH_REASON_LENGTH);
    texts.insert(sequence.text());
    double logprob = 0;
    for (const auto& token : sequence.logprobs()) logprob += token.logprob();
    ranking.emplace_back(logprob, sequence.text());
  }
  EXPECT_EQ(texts.size(), 4u);
  EXPECT_EQ(four.done.usage().completion_tokens(), 4 * 24);
  EXPECT_EQ(four.done.usage().prompt_tokens(),
            single.done.usage().prompt_tokens());

  request.mutable_sampling()->set_n(2);
  request.mutable_sampling()->set_best_of(4);
  request.mutable_output()->clear_logprobs();
  const Outcome best = cluster_->Generate(request);
  ASSERT_TRUE(best.status.ok()) << best.status;
  ASSERT_EQ(best.sequences.size(), 2u);
  std::sort(ranking.rbegin(), ranking.rend());
  EXPECT_EQ(best.sequences.at(0).text(), ranking[0].second);
  EXPECT_EQ(best.sequences.at(1).text(), ranking[1].second);
  EXPECT_EQ(best.sequences.at(0).logprobs_size(), 0);  // not asked for
}

TEST_F(ClusterTest, StopStringsEndTheTextBeforeThem) {
  Begin({});
  v1::GenerateRequest request = TextRequest("Once upon a time", 64);
  request.mutable_stopping()->set_ignore_eos(true);
  const Outcome whole = cluster_->Generate(request);
  ASSERT_TRUE(whole.status.ok());
  const std::string stop = whole.text.substr(20, 6);  // spans tokens
  request.mutable_stopping()->add_stop(stop);
  const Outcome stopped = cluster_->Generate(request);
  ASSERT_TRUE(stopped.status.ok());
  EXPECT_EQ(stopped.text, whole.text.substr(0, whole.text.find(stop)));
  EXPECT_EQ(stopped.reason, v1::FINISH_REASON_STOP);
}

}  // namespace
}  // namespace tandem::integration
