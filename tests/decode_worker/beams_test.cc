// SPDX-License-Identifier: Apache-2.0
// Beam searches on workers: prefilled elsewhere or here, handed over by their
// first candidates, begun again whenever something is lost. The hypotheses are
// those of a search without blocks or workers.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/simulation/parts.h"
#include "tests/worker/rig.h"
#include "worker/convert.h"

namespace tandem::worker {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kStop = 45;

v1::BeamParams Beam(int width, int best) {
  v1::BeamParams beam;
  beam.set_width(width);
  beam.set_best(best);
  beam.set_length_penalty(1);
  return beam;
}

Job BeamJob(int prompt, int max_tokens) {
  return {.prompt = Prompt(prompt, prompt),
          .max_tokens = max_tokens,
          .stop_token_ids = {kStop, kStop + 100, kStop + 200, kStop + 300}};
}

Request* NewSearch(Rig* rig, const Job& job, const v1::BeamParams& beam) {
  Request* const request = rig->NewRequest(job);
  *request->tweak_open.mutable_sampling()->mutable_beam() = beam;
  *request->tweak_prefill.mutable_sampling()->mutable_beam() = beam;
  return request;
}

void ExpectRight(const Request& request, const Job& job,
                 const v1::BeamParams& beam) {
  const engine::BeamResult expected =
      engine::ExpectedBeams(simulation::Model(), job.prompt, ToEngine(beam),
                            ToEngine(job.Stopping()), simulation::kMaxModelLen);
  ASSERT_TRUE(request.finished.has_value()) << request.story;
  EXPECT_EQ(request.finished->completion_tokens(), expected.tokens);
  ASSERT_EQ(request.hypotheses.size(), expected.best.size());
  for (size_t i = 0; i < expected.best.size(); ++i) {
    const v1::DecodedHypothesis& got = request.hypotheses[i];
    EXPECT_EQ(got.score(), expected.best[i].score);
    EXPECT_EQ(got.reason(), expected.best[i].stopped
                                ? v1::FINISH_REASON_STOP
                                : v1::FINISH_REASON_LENGTH);
    ASSERT_EQ(got.tokens_size(),
              static_cast<int>(expected.best[i].tokens.size()));
    for (int t = 0; t < got.tokens_size(); ++t) {
      EXPECT_EQ(got.tokens(t).token_id(),
                expected.best[i].tokens[static_cast<size_t>(t)].token_id);
    }
  }
  EXPECT_THAT(request.tokens, IsEmpty()) << "nothing streams";
}

TEST(DecodeBeamsTest, HandedOverOrPrefilledHereTheyFindTheSame) {
  for (const bool split : {true, false}) {
    for (const int prompt : {1, 15, 16, 40}) {
      for (const int max_tokens : {1, 2, 30}) {
        SCOPED_TRACE(absl::StrCat(split, " ", prompt, " ", max_tokens));
        Rig rig;
        DecodeMachine* const decode = rig.AddDecode();
        PrefillMachine* const prefill = rig.AddPrefill();
        const Job job = BeamJob(prompt, max_tokens);
        const v1::BeamParams beam = Beam(4, 3);
        Request* const request = NewSearch(&rig, job, beam);
        request->Decode(decode, split ? prefill : nullptr);
        rig.RunUntilEnded();
        ExpectRight(*request, job, beam);
        EXPECT_EQ(decode->core->counters().commits, split ? 1 : 0);
        EXPECT_THAT(request->story, EndsWith("HHHF"));
        rig.ExpectNothingLeft();
      }
    }
  }
}

TEST(DecodeBeamsTest, ManyHypothesisTokensTakeSeveralMessages) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode(
      "decode", {.num_blocks = 128}, [](decode_worker::DecodeOptions* options) {
        options->engine.max_model_len = 700;
      });
  Job job = BeamJob(10, 600);
  job.stop_token_ids.clear();
  const v1::BeamParams beam = Beam(2, 1);
  Request* const request = NewSearch(&rig, job, beam);
  request->Decode(decode, nullptr);
  rig.RunUntilEnded();
  EXPECT_EQ(request->hypotheses.at(0).tokens_size(), 600);
  EXPECT_THAT(request->story, EndsWith("HHHF"));
  rig.ExpectNothingLeft();
}

TEST(DecodeBeamsTest, ALostPrefillBeginsTheSearchAgain) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const lost =
      rig.AddPrefill("lost", {.copy = absl::Milliseconds(100)});
  PrefillMachine* const other = rig.AddPrefill("other");
  const Job job = BeamJob(60, 12);
  const v1::BeamParams beam = Beam(3, 2);
  Request* const request = NewSearch(&rig, job, beam);
  request->Decode(decode, lost);
  rig.RunUntil([&] { return request->first.has_value(); });
  EXPECT_EQ(request->first->finish_reason(), v1::FINISH_REASON_UNSPECIFIED);
  EXPECT_GE(request->first->token().top_size(), 3 + 4);
  rig.Crash(lost);
  request->DropPrefill();
  request->Retry(other);
  rig.RunUntilEnded();
  ExpectRight(*request, job, beam);
  EXPECT_EQ(request->opened.size(), 2u);
  rig.ExpectNothingLeft();
}

TEST(DecodeBeamsTest, ACommitWithoutCandidatesEndsTheAttempt) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  PrefillMachine* const prefill = rig.AddPrefill();
  const Job job = BeamJob(20, 12);
  const v1::BeamParams beam = Beam(3, 2);
  Request* const request = rig.NewRequest(job);
  // A prefill worker that knows nothing of beams.
  *request->tweak_open.mutable_sampling()->mutable_beam() = beam;
  request->Decode(decode, prefill);
  rig.RunUntil([&] { return !request->dead.empty(); });
  EXPECT_THAT(request->dead[0].message(), HasSubstr("0 candidates"));
  request->tokens.clear();
  request->Retry(nullptr);
  rig.RunUntilEnded();
  ExpectRight(*request, job, beam);
  rig.ExpectNothingLeft();
}

TEST(DecodeBeamsTest, PreemptedSearchesBeginAgainAndRoomIsCounted) {
  Rig rig;
  DecodeMachine* const decode =
      rig.AddDecode("decode", {.block_size = 4, .num_blocks = 54},
                    [](decode_worker::DecodeOptions* options) {
                      options->engine.max_model_len = 150;
                      options->admission_factor = 10;
                      options->local_recompute_tokens = 1000;
                    });
  std::vector<Job> jobs;
  const v1::BeamParams beam = Beam(4, 2);
  for (const int prompt : {30, 41, 52}) {
    jobs.push_back(BeamJob(prompt, 40));
    jobs.back().stop_token_ids.resize(1);
    NewSearch(&rig, jobs.back(), beam)->Decode(decode, nullptr);
  }
  rig.RunUntilEnded(absl::Minutes(3));
  int preemptions = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    ExpectRight(*rig.requests[i], jobs[i], beam);
    preemptions += rig.requests[i]->finished->preemptions();
  }
  EXPECT_GT(preemptions, 0);
  rig.ExpectNothingLeft();
}

TEST(DecodeBeamsTest, ASearchThatRunsIsNobodyWhoWaits) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode();
  NewSearch(&rig, BeamJob(30, 40), Beam(4, 2))->Decode(decode, nullptr);
  rig.RunUntil([&] { return decode->Load().running() == 4; });
  EXPECT_EQ(decode->Load().waiting(), 0);
  EXPECT_EQ(decode->Load().streams(), 1);
  rig.RunUntilEnded();
  rig.ExpectNothingLeft();
}

TEST(DecodeBeamsTest, ASearchBeginsWhereItsForksHaveRoom) {
  Rig rig;
  DecodeMachine* const decode =
      rig.AddDecode("decode", {.num_blocks = 20}, AdmitByBlocks);
  Request* const other =
      rig.Local({.prompt = Prompt(200, 1), .max_tokens = 40}, decode);
  rig.RunUntil([&] { return other->tokens.size() >= 3; });
  ASSERT_EQ(decode->pool->available(), 7);
  const Job job = BeamJob(50, 20);  // 4 blocks, one for each fork
  const v1::BeamParams beam = Beam(4, 1);
  Request* const search = NewSearch(&rig, job, beam);
  search->Decode(decode, nullptr);
  rig.RunUntilEnded();
  EXPECT_EQ(decode->core->engine_stats().preemptions, 0);
  other->ExpectAllRight();
  ExpectRight(*search, job, beam);
  rig.ExpectNothingLeft();
}

TEST(DecodeBeamsTest, WhatCannotBeIsRefused) {
  const struct {
    v1::BeamParams beam;
    Job job;
    const char* message;
  } kCases[] = {
      {Beam(17, 1), BeamJob(5, 5), "beam.width is 17, and there are 4 end"},
      {Beam(2, 3), BeamJob(5, 5), "beam.best is 3"},
      {Beam(8, 1), BeamJob(20, 200), "KV blocks may be needed"},
  };
  for (const auto& c : kCases) {
    Rig rig;
    DecodeMachine* const decode = rig.AddDecode();
    Request* const request = NewSearch(&rig, c.job, c.beam);
    request->Decode(decode, nullptr);
    rig.RunUntilEnded();
    EXPECT_EQ(request->decode_ended->code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(request->decode_ended->message()),
                HasSubstr(c.message));
    rig.ExpectNothingLeft();
  }
}

}  // namespace
}  // namespace tandem::worker
