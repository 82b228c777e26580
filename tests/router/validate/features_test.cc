// SPDX-License-Identifier: Apache-2.0
// Options that only some workers know, as in a rolling upgrade, and the work
// that workers count: what reaches whom, and what the client reads.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "common/error.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

v1::WorkerHello Old(const std::string& id, v1::WorkerRole role) {
  v1::WorkerHello hello = World::Hello(id, role);
  hello.clear_features();
  return hello;
}

AdmittedRequest WithRules() {
  AdmittedRequest admitted = World::Ask();
  admitted.effective.sampling.set_presence_penalty(1);
  admitted.effective.features = {kFeatureLogitRules};
  return admitted;
}

AdmittedRequest WithoutCache() {
  AdmittedRequest admitted = World::Ask();
  admitted.effective.no_kv_cache = true;
  admitted.effective.bypass_prefix_cache = true;
  admitted.effective.decode_features = {kFeatureNoKvCache};
  return admitted;
}

v1::Work WorkOf(int64_t positions) {
  v1::Work work;
  work.set_steps(1);
  work.set_positions_computed(positions);
  work.set_kv_rows(2 * positions);
  work.set_positions_attended(3 * positions);
  work.set_query_key_pairs(4 * positions);
  work.set_weight_bytes_read(5 * positions);
  work.set_kv_bytes_read(6 * positions);
  work.set_kv_bytes_written(7 * positions);
  work.set_matrix_flops(8 * positions);
  work.set_attention_flops(9 * positions);
  return work;
}

TEST(FeaturesTest, OlderWorkersGetNoOptionsThatTheyWouldIgnore) {
  World w;
  w.Register(Old("old-p", v1::WORKER_ROLE_PREFILL));
  w.Register(Old("old-d", v1::WORKER_ROLE_DECODE));
  w.Prefill("new-p");
  w.Decode("new-d");
  for (int i = 0; i < 6; ++i) w.Submit(WithRules());
  for (DecodePipe& decode : w.decodes) {
    decode.Say(World::Opened(1, "ticket"));
  }
  EXPECT_THAT(w.decode_ids, testing::SizeIs(6));
  EXPECT_THAT(w.decode_ids, testing::Each("new-d"));
  EXPECT_THAT(w.prefill_ids, testing::Each("new-p"));
  // Without them old workers serve as ever.
  for (int i = 0; i < 6; ++i) w.Submit(World::Ask());
  EXPECT_THAT(w.decode_ids, testing::Contains("old-d"));
}

TEST(FeaturesTest, AnOlderPrefillWorkerIsLeftOut) {
  World w;
  w.Register(Old("old-p", v1::WORKER_ROLE_PREFILL));
  w.Decode("new-d");
  w.Submit(WithRules());
  ASSERT_THAT(w.decodes, testing::SizeIs(1));
  EXPECT_FALSE(w.decodes[0].sent[0].open().has_prefill_worker());
  // It need not know what concerns decoding alone.
  w.Submit(WithoutCache());
  ASSERT_THAT(w.decodes, testing::SizeIs(2));
  EXPECT_TRUE(w.decodes[1].sent[0].open().has_prefill_worker());
  EXPECT_TRUE(w.decodes[1].sent[0].open().no_kv_cache());
  EXPECT_TRUE(w.decodes[1].sent[0].open().bypass_prefix_cache());
}

TEST(FeaturesTest, WhereNoWorkerKnowsAnOptionTheErrorNamesIt) {
  World w;
  w.Register(Old("old-d", v1::WORKER_ROLE_DECODE));
  ClientPipe* const rules = w.Submit(WithRules());
  ClientPipe* const no_cache = w.Submit(WithoutCache());
  EXPECT_THAT(w.decodes, IsEmpty());
  ASSERT_TRUE(rules->dropped);
  EXPECT_EQ(rules->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(rules->status.message()), HasSubstr("logit_rules"));
  ASSERT_TRUE(no_cache->dropped);
  EXPECT_THAT(std::string(no_cache->status.message()),
              HasSubstr("no_kv_cache"));
  // Nobody behind them waits.
  w.Submit(World::Ask());
  EXPECT_THAT(w.decodes, testing::SizeIs(1));
}

TEST(FeaturesTest, WaitingForWorkersOfAFeatureStopsNobodyElse) {
  World w;
  w.Register(Old("old-d", v1::WORKER_ROLE_DECODE));
  w.Decode("new-d");
  w.Submit(WithRules());
  w.decodes[0].Break(absl::ResourceExhaustedError("no blocks"));
  w.Submit(WithRules());
  w.Submit(World::Ask());
  EXPECT_THAT(w.decode_ids, testing::ElementsAre("new-d", "old-d"));
  // First come, first served where it has room again.
  w.RunFor(w.options.beat);
  EXPECT_THAT(w.decode_ids,
              testing::ElementsAre("new-d", "old-d", "new-d", "new-d"));
}

TEST(FeaturesTest, OneWhoseOnlyWorkerWasLostWaitsForItInNobodysWay) {
  World w;
  w.Register(Old("old-d", v1::WORKER_ROLE_DECODE));
  LeasePipe* const lease = w.Decode("new-d");
  ClientPipe* const client = w.Submit(WithRules());
  w.decodes[0].Say(World::Opened(1, ""));
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Tokens(kPrompt, {1}));
  lease->Break(absl::UnavailableError("crashed"));
  w.decodes[0].Break(absl::UnavailableError("crashed"));
  w.Settle();
  w.Submit(World::Ask());
  EXPECT_THAT(w.decode_ids, testing::ElementsAre("new-d", "old-d"));
  EXPECT_FALSE(client->dropped);
  // A restart within the recovery wait continues it.
  w.Register(World::Hello("new-d", v1::WORKER_ROLE_DECODE, '2'));
  w.RunFor(w.options.beat);
  ASSERT_THAT(w.decode_ids, testing::ElementsAre("new-d", "old-d", "new-d"));
  EXPECT_EQ(w.decodes[2].sent[0].open().output_token_ids_size(), 1);
}

TEST(FeaturesTest, TooLongForAWorkerWithoutACacheIsTheClientsError) {
  World w;
  w.Decode("d0");
  w.Decode("d1");
  ClientPipe* const client = w.Submit(WithoutCache());
  w.decodes[0].Break(MakeError(absl::StatusCode::kInvalidArgument,
                               "CONTEXT_LENGTH_EXCEEDED", "at most 20"));
  w.Settle();
  EXPECT_THAT(w.decode_ids, testing::SizeIs(1));
  ASSERT_TRUE(client->dropped);
  EXPECT_EQ(client->status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorReason(client->status), "CONTEXT_LENGTH_EXCEEDED");
  EXPECT_THAT(std::string(client->status.message()), HasSubstr("at most 20"));
}

TEST(FeaturesTest, ValidateSaysWhatARequestNeeds) {
  ModelLimits limits;
  limits.vocabulary_size = 100;
  limits.offers.no_kv_cache = true;
  v1::GenerateRequest request;
  request.set_text("x");
  EXPECT_THAT(Validate(request, limits)->features, IsEmpty());
  EXPECT_THAT(Validate(request, limits)->decode_features, IsEmpty());
  request.mutable_sampling()->set_typical_p(0.5);
  request.mutable_sampling()->add_bad_words("y");
  request.mutable_cache()->set_no_kv_cache(true);
  const auto effective = Validate(request, limits);
  ASSERT_TRUE(effective.ok()) << effective.status();
  EXPECT_THAT(effective->features,
              testing::ElementsAre("typical_p", "logit_rules"));
  EXPECT_THAT(effective->decode_features, testing::ElementsAre("no_kv_cache"));
  EXPECT_TRUE(effective->bypass_prefix_cache);
}

v1::Token TokenWith(int32_t id, std::vector<float> attention) {
  v1::Token token;
  token.set_token_id(id);
  token.mutable_attention()->Add(attention.begin(), attention.end());
  return token;
}

TEST(FeaturesTest, AttentionComesWithEachTokenOnce) {
  World w;
  w.Register(Old("old-d", v1::WORKER_ROLE_DECODE));
  w.Prefill("p0");
  w.Decode("d0");
  AdmittedRequest admitted = World::Ask(std::vector<int32_t>(2, 7));
  admitted.effective.placement = v1::PLACEMENT_SPLIT;
  admitted.effective.features = {kFeatureAttention};
  admitted.effective.output.set_return_token_ids(false);
  admitted.effective.output.set_text(false);
  admitted.effective.output.mutable_attention()->add_layers(1);
  admitted.effective.output.mutable_attention()->add_layers(4);
  ClientPipe* const client = w.Submit(std::move(admitted));
  EXPECT_THAT(w.decode_ids, testing::ElementsAre("d0"));
  const auto& asked = w.decodes[0].sent[0].open().sampling().attention();
  EXPECT_THAT(asked.layers(), testing::ElementsAre(1, 4));
  EXPECT_FALSE(asked.mean());
  w.decodes[0].Say(World::Opened(1, "ticket"));
  EXPECT_EQ(w.prefills[0].sent[0].open().sampling().attention().layers_size(),
            2);
  w.prefills[0].Say(World::Computing());
  v1::PrefillResponse first = World::First(2, 1);
  *first.mutable_first_token()->mutable_token() = TokenWith(1, {1, 2, 3, 4});
  w.prefills[0].Say(first);
  w.decodes[0].Say(World::Started(1));
  v1::DecodeResponse tokens = World::Tokens(2, {});
  *tokens.mutable_tokens()->add_tokens() = TokenWith(1, {1, 2, 3, 4});
  *tokens.mutable_tokens()->add_tokens() = TokenWith(2, {1, 2, 3, 4, 5, 6});
  w.decodes[0].Say(tokens);
  std::vector<v1::TokenAttention> seen;
  for (const v1::GenerateResponse& r : client->sent) {
    seen.insert(seen.end(), r.delta().attention().begin(),
                r.delta().attention().end());
  }
  ASSERT_EQ(seen.size(), 2u);
  ASSERT_EQ(seen[1].layers_size(), 2);
  EXPECT_EQ(seen[0].layers(1).layer(), 4);
  EXPECT_THAT(seen[0].layers(1).weights(), testing::ElementsAre(3, 4));
  EXPECT_THAT(seen[1].layers(0).weights(), testing::ElementsAre(1, 2, 3));
}

TEST(FeaturesTest, AttentionIsBoundedByLayersAndPositions) {
  ModelLimits limits;
  limits.vocabulary_size = 100;
  limits.context_length = 100000;
  limits.layers = 8;
  limits.offers.attention = true;
  v1::GenerateRequest request;
  request.set_text("x");
  request.mutable_output()->mutable_attention();
  auto all = *Validate(request, limits);
  EXPECT_EQ(all.output.attention().layers_size(), 8);
  EXPECT_THAT(all.features, testing::ElementsAre("attention"));
  // 8 layers: 2048 positions.
  EXPECT_TRUE(FitToContext(1000, limits, &all).ok());
  EXPECT_EQ(all.stopping.max_tokens(), 1048);
  auto long_prompt = *Validate(request, limits);
  EXPECT_FALSE(FitToContext(2048, limits, &long_prompt).ok());
  request.mutable_stopping()->set_max_tokens(1049);
  auto many = *Validate(request, limits);
  const absl::Status status = FitToContext(1000, limits, &many);
  EXPECT_THAT(std::string(status.message()), HasSubstr("output.attention"));
  request.mutable_output()->mutable_attention()->set_mean(true);
  auto mean = *Validate(request, limits);
  EXPECT_TRUE(FitToContext(15000, limits, &mean).ok());
  // It would have to be held back without a bound.
  request.mutable_stopping()->add_stop("x");
  EXPECT_THAT(std::string(Validate(request, limits).status().message()),
              testing::AllOf(HasSubstr("output.attention"),
                             HasSubstr("stopping.stop")));
}

TEST(FeaturesTest, WorkOfBothWorkersIsSummed) {
  World w;
  w.Prefill("p0");
  w.Decode("d0");
  ClientPipe* const client = w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, "ticket"));
  w.prefills[0].Say(World::Computing());
  w.prefills[0].Say(World::First(kPrompt, 1));
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Tokens(kPrompt, {1, 2}));
  v1::DecodeResponse finished = World::Finished(v1::FINISH_REASON_LENGTH);
  *finished.mutable_finished()->mutable_work() = WorkOf(7);
  w.decodes[0].Say(finished);
  v1::PrefillResponse done = World::Done();
  *done.mutable_done()->mutable_work() = WorkOf(40);
  w.prefills[0].Say(done);
  v1::Work expected = WorkOf(47);
  expected.set_steps(2);
  EXPECT_EQ(client->sent.back().done().work().SerializeAsString(),
            expected.SerializeAsString());
}

TEST(FeaturesTest, WorkIsAbsentWhereAWorkerCouldNotTell) {
  World w;
  w.Decode("d0");
  ClientPipe* const client = w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, ""));
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Tokens(kPrompt, {1, 2}));
  w.decodes[0].Say(World::Finished(v1::FINISH_REASON_LENGTH));  // an older one
  EXPECT_TRUE(client->sent.back().has_done());
  EXPECT_FALSE(client->sent.back().done().has_work());
}

v1::DecodeResponse FinishedWith(int64_t positions) {
  v1::DecodeResponse finished = World::Finished(v1::FINISH_REASON_LENGTH);
  *finished.mutable_finished()->mutable_work() = WorkOf(positions);
  return finished;
}

v1::PrefillResponse DoneWith(int64_t positions) {
  v1::PrefillResponse done = World::Done();
  *done.mutable_done()->mutable_work() = WorkOf(positions);
  return done;
}

// Of positions; -1 where it is absent, -2 without an end.
int64_t WorkTold(const ClientPipe& client) {
  if (client.sent.empty() || !client.sent.back().has_done()) return -2;
  const v1::GenerateDone& done = client.sent.back().done();
  return done.has_work() ? done.work().positions_computed() : -1;
}

TEST(FeaturesTest, WorkIsAbsentWhereADecodeWorkersPartWasLost) {
  World w;
  w.Decode("d0");
  ClientPipe* const client = w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, ""));
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Tokens(kPrompt, {1, 2}));
  w.decodes[0].Break(absl::InternalError("a step failed"));
  w.Settle();
  ASSERT_THAT(w.decodes, testing::SizeIs(2));
  w.decodes[1].Say(World::Opened(2, ""));
  w.decodes[1].Say(World::Started(2));
  w.decodes[1].Say(World::Tokens(kPrompt + 2, {3}));
  w.decodes[1].Say(FinishedWith(43));
  EXPECT_EQ(WorkTold(*client), -1);
}

TEST(FeaturesTest, WorkIsAbsentWhereAPrefillWorkersPartWasLost) {
  World w;
  w.Prefill("p0");
  w.Decode("d0");
  ClientPipe* const client = w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, "ticket"));
  w.prefills[0].Say(World::Computing());
  w.prefills[0].Break(absl::InternalError("a step failed"));
  w.decodes[0].Say(World::Opened(2, "ticket"));
  ASSERT_THAT(w.prefills, testing::SizeIs(2));
  w.prefills[1].Say(World::First(kPrompt, 1));
  w.decodes[0].Say(World::Started(2));
  w.prefills[1].Say(DoneWith(40));
  w.decodes[0].Say(FinishedWith(7));
  EXPECT_EQ(WorkTold(*client), -1);
}

TEST(FeaturesTest, WorkOfAnAttemptThatWasPreemptedIsNotTakenForTheNext) {
  enum { kTold, kPrefillUntold, kEndsWithoutACommit };
  for (const int end : {kTold, kPrefillUntold, kEndsWithoutACommit}) {
    World w;
    w.Prefill("p0");
    w.Decode("d0");
    ClientPipe* const client = w.Submit(World::Ask());
    w.decodes[0].Say(World::Opened(1, "ticket"));
    w.prefills[0].Say(World::Computing());
    w.prefills[0].Say(World::First(kPrompt, 1));
    w.decodes[0].Say(World::Started(1));
    w.prefills[0].Say(DoneWith(40));
    w.prefills[0].Break(absl::OkStatus());
    w.decodes[0].Say(World::Dead(1, /*preempted=*/true));
    w.decodes[0].Say(World::Opened(2, "ticket"));
    ASSERT_THAT(w.prefills, testing::SizeIs(2));
    w.prefills[1].Say(World::Computing());
    if (end == kEndsWithoutACommit) {
      w.prefills[1].Say(World::First(kPrompt + 1, 2, v1::FINISH_REASON_LENGTH));
      w.prefills[1].Say(DoneWith(41));
      EXPECT_EQ(WorkTold(*client), -1) << "decoding before was not told";
      continue;
    }
    w.prefills[1].Say(World::First(kPrompt + 1, 2));
    w.decodes[0].Say(World::Started(2));
    if (end == kTold) w.prefills[1].Say(DoneWith(41));
    w.decodes[0].Say(FinishedWith(7));
    w.RunFor(2 * w.options.timings_wait);
    EXPECT_EQ(WorkTold(*client), end == kTold ? 88 : -1) << end;
  }
}

TEST(FeaturesTest, WorkersThatRefusedHadNoPart) {
  World w;
  w.Prefill("p0");
  w.Decode("d0");
  ClientPipe* const client = w.Submit(World::Ask());
  w.decodes[0].Break(absl::ResourceExhaustedError("no blocks"));
  w.RunFor(w.options.beat);
  ASSERT_THAT(w.decodes, testing::SizeIs(2));
  w.decodes[1].Say(World::Opened(1, "ticket"));
  w.prefills[0].Break(absl::ResourceExhaustedError("full"));
  w.decodes[1].Say(World::Opened(2, ""));
  w.decodes[1].Say(World::Started(2));
  w.decodes[1].Say(World::Tokens(kPrompt, {1}));
  w.decodes[1].Say(FinishedWith(47));
  EXPECT_EQ(WorkTold(*client), 47);
}

AdmittedRequest Beams(int width, int max_tokens) {
  AdmittedRequest admitted = World::Ask({}, max_tokens);
  admitted.effective.beam.emplace();
  admitted.effective.beam->set_width(width);
  admitted.effective.sampling.set_best_of(width);
  admitted.effective.decode_features = {kFeatureBeamSearch};
  return admitted;
}

v1::WorkerHello WithBlocks(const std::string& id, int blocks) {
  v1::WorkerHello hello = World::Hello(id, v1::WORKER_ROLE_DECODE);
  hello.set_num_blocks(blocks);
  return hello;
}

// No later worker of that cluster could do it either: clients need not ask
// again, as they would where all are of an older version.
TEST(FeaturesTest, WhatAllWorkersWereStartedWithoutIsRefusedForGood) {
  const auto started_without = [](const std::string& id, const char* feature) {
    v1::WorkerHello hello = World::Hello(id, v1::WORKER_ROLE_DECODE);
    auto* const features = hello.mutable_features();
    features->erase(std::remove(features->begin(), features->end(), feature),
                    features->end());
    hello.add_features(kFeatureAdapterLoading);
    return hello;
  };
  AdmittedRequest attention = World::Ask();
  attention.effective.features = {kFeatureAttention};
  const struct {
    AdmittedRequest request;
    const char* feature;
    const char* field;
    const char* says;
  } cases[] = {
      {Beams(2, 8), kFeatureBeamSearch, "beam", "--kv-cache off"},
      {attention, kFeatureAttention, "output.attention",
       "--enable-attention-output"},
  };
  for (const auto& c : cases) {
    World w;
    w.Register(started_without("d0", c.feature));
    ClientPipe* const refused = w.Submit(c.request);
    ASSERT_TRUE(refused->dropped) << c.field;
    EXPECT_EQ(refused->status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorMetadata(refused->status)["field"], c.field);
    EXPECT_THAT(std::string(refused->status.message()), HasSubstr(c.says));
    // One that may be replaced by a newer one.
    w.Register(Old("old", v1::WORKER_ROLE_DECODE));
    ClientPipe* const later = w.Submit(c.request);
    ASSERT_TRUE(later->dropped) << c.field;
    EXPECT_EQ(later->status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(later->status.message()), HasSubstr(c.feature));
    w.Decode("new");
    EXPECT_FALSE(w.Submit(c.request)->dropped) << c.field;
  }
}

// 40 tokens share two blocks of 16; each of four beams has 15 of its own.
TEST(FeaturesTest, ABeamSearchGoesToAPoolThatHoldsIt) {
  for (const int large : {62, 61}) {
    World w;
    w.Register(WithBlocks("small", 20));
    LeasePipe* const lease = w.Register(WithBlocks("large", large));
    ClientPipe* const client = w.Submit(Beams(4, 17 * 16 - 40));
    if (large == 62) {
      EXPECT_EQ(w.decode_ids, std::vector<std::string>{"large"});
      // It waits for that one, and in nobody's way.
      lease->Break(absl::UnavailableError("reset"));
      w.decodes[0].Break(absl::UnavailableError("reset"));
      w.RunFor(absl::Seconds(2));
      w.Submit(World::Ask());
      EXPECT_EQ(w.decode_ids.back(), "small");
      EXPECT_EQ(w.decode_ids.size(), 2u);
      w.Register(WithBlocks("again", 62));
      EXPECT_EQ(w.decode_ids.back(), "again");
      continue;
    }
    w.RunFor(absl::Seconds(12));
    EXPECT_THAT(w.decode_ids, IsEmpty());
    EXPECT_EQ(ErrorReason(client->status), "NO_WORKERS");
    EXPECT_THAT(std::string(client->status.message()),
                HasSubstr("with room for 4 beams"));
  }
}

// 17 blocks hold its positions, but none has more at once than a worker says.
TEST(FeaturesTest, ABeamSearchGoesWhereWindowsLetItFit) {
  for (const int at_once : {0, 5, 6}) {
    World w;
    w.Register(WithBlocks("large", 21));
    v1::WorkerHello windowed = WithBlocks("windowed", 20);
    windowed.set_blocks_at_once(at_once);
    w.Register(windowed);
    EXPECT_EQ(w.core->kv_room().blocks, 21);
    EXPECT_EQ(w.core->kv_room().sequences, at_once == 0 ? 0 : 20 / at_once);
    w.Submit(Beams(4, 17 * 16 - 40));
    EXPECT_EQ(w.decode_ids,
              std::vector<std::string>(at_once == 5 ? 1 : 0, "windowed"))
        << at_once;
  }
}

// Without a cache a sequence holds all its blocks, whatever the window is.
TEST(FeaturesTest, WithoutACacheARequestGoesToAPoolThatHoldsIt) {
  for (const int large : {25, 24}) {  // 400 positions, in blocks of 16
    World w;
    w.Register(WithBlocks("small", 20));
    w.Register(WithBlocks("large", large));
    for (int i = 0; i < 6; ++i) {
      AdmittedRequest admitted = WithoutCache();
      admitted.effective.stopping.set_max_tokens(400 - kPrompt);
      ClientPipe* const client = w.Submit(std::move(admitted));
      if (large == 25) continue;
      ASSERT_TRUE(client->dropped);
      EXPECT_EQ(client->status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(ErrorReason(client->status), "CONTEXT_LENGTH_EXCEEDED");
      EXPECT_EQ(ErrorMetadata(client->status)["field"], "stopping.max_tokens");
      EXPECT_THAT(std::string(client->status.message()),
                  HasSubstr("at most 384 tokens"));
    }
    EXPECT_EQ(w.decode_ids,
              std::vector<std::string>(large == 25 ? 6 : 0, "large"));
  }
}

// Its worker may be restarted; then it says what is missing, not that all are
// busy.
TEST(FeaturesTest, WhatWasComputedWaitsForARestartAndSaysForWhat) {
  World w;
  LeasePipe* const lease = w.Decode("new");
  ClientPipe* const client = w.Submit(WithoutCache());
  w.decodes[0].Say(World::Opened(1, ""));
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Tokens(kPrompt, {1}));
  w.Register(Old("old", v1::WORKER_ROLE_DECODE));
  lease->Break(absl::UnavailableError("reset"));
  w.decodes[0].Break(absl::UnavailableError("reset"));
  w.RunFor(absl::Seconds(50));
  EXPECT_TRUE(client->open);
  w.RunFor(absl::Seconds(15));
  EXPECT_EQ(ErrorReason(client->status), "NO_WORKERS");
  EXPECT_THAT(std::string(client->status.message()),
              HasSubstr("no decode worker that knows no_kv_cache for 1m"));
}

}  // namespace
}  // namespace tandem::router
