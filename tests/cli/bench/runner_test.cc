// SPDX-License-Identifier: Apache-2.0
// The runner against a server of our own making, on virtual time: every
// latency is known to the microsecond.

#include "cli/bench/runner.h"

#include <gtest/gtest.h>

#include <optional>

#include "cli/bench/metrics.h"
#include "common/testing/virtual_loop.h"

namespace tandem::bench {
namespace {

// Serves any number at once: the first token after `first`, the others each
// after `gap`. From `stalled_from` to `stalled_to` it does nothing at all.
struct FakeServer {
  absl::Duration first = absl::Milliseconds(100);
  absl::Duration gap = absl::Milliseconds(10);
  absl::Duration stalled_from = absl::InfiniteDuration();
  absl::Duration stalled_to = absl::InfiniteDuration();
  // What the call of this index ends with instead of tokens.
  std::optional<size_t> failing;
  int lost_tokens = 0;  // generated, as it says, and not sent
  bool says_why_finished = true;

  int in_flight = 0;
  int most_in_flight = 0;
  std::vector<double> received_s;
};

class FakeStream final : public Runner::GenerateStream {
 public:
  FakeStream(Loop* loop, absl::Time start, FakeServer* server)
      : loop_(loop), start_(start), server_(server), timer_(loop) {
    server_->most_in_flight =
        std::max(server_->most_in_flight, ++server_->in_flight);
  }
  ~FakeStream() override { --server_->in_flight; }

  void Start(StreamHandler<v1::GenerateResponse>* handler) override {
    handler_ = handler;
  }
  void Send(v1::GenerateRequest request) override {
    const size_t index = server_->received_s.size();
    server_->received_s.push_back(absl::ToDoubleSeconds(loop_->Now() - start_));
    tokens_ = request.stopping().max_tokens();
    fails_ = server_->failing == index;
    After(server_->first, [this] { First(); });
  }
  size_t unsent() const override { return 0; }
  void PauseReading(bool) override {}
  void Close(absl::Status) override {}
  std::string peer() const override { return "fake"; }

 private:
  // `delay` of work, which stands still while the server is stalled.
  void After(absl::Duration delay, Loop::Task task) {
    const absl::Duration now = loop_->Now() - start_;
    if (now < server_->stalled_to && now + delay > server_->stalled_from) {
      delay += server_->stalled_to - std::max(now, server_->stalled_from);
    }
    timer_.Start(delay, std::move(task));
  }
  void First() {
    if (fails_) {
      handler_->OnClosed(absl::ResourceExhaustedError("full"));  // *this dies
      return;
    }
    v1::GenerateResponse started;
    started.mutable_started()->set_prompt_tokens(7);
    handler_->OnMessage(started);
    Token();
  }
  void Token() {
    v1::GenerateResponse delta;
    delta.mutable_delta()->add_token_ids(1);
    handler_->OnMessage(delta);
    if (++sent_ < tokens_) {
      After(server_->gap, [this] { Token(); });
      return;
    }
    v1::GenerateResponse end;
    if (server_->says_why_finished) {
      end.mutable_finished()->set_finish_reason(v1::FINISH_REASON_LENGTH);
      handler_->OnMessage(end);
    }
    v1::GenerateDone* const done = end.mutable_done();
    done->mutable_usage()->set_completion_tokens(sent_ + server_->lost_tokens);
    done->mutable_timings()->mutable_prefill()->set_nanos(5'000'000);
    done->mutable_workers()->set_prefill("prefill-0");
    handler_->OnMessage(end);
    handler_->OnClosed(absl::OkStatus());  // *this dies
  }

  Loop* const loop_;
  const absl::Time start_;
  FakeServer* const server_;
  Timer timer_;
  StreamHandler<v1::GenerateResponse>* handler_ = nullptr;
  int tokens_ = 0;
  int sent_ = 0;
  bool fails_ = false;
};

struct World {
  World(const RunOptions& options, std::vector<PlannedRequest> the_plan)
      : plan(std::move(the_plan)),
        start(loop.Now()),
        runner(&loop, options, &plan,
               {.open =
                    [this] {
                      return std::make_unique<FakeStream>(&loop, start,
                                                          &server);
                    },
                .compose =
                    [this](size_t index) {
                      v1::GenerateRequest request;
                      request.mutable_stopping()->set_max_tokens(
                          plan[index].output_tokens);
                      return request;
                    },
                .finished = [this] { ++finished; }}) {}

  const std::vector<RequestRecord>& Run() {
    runner.Start();
    loop.RunUntilIdle(100000);
    EXPECT_EQ(finished, 1);
    EXPECT_EQ(server.in_flight, 0) << "a stream was left";
    return runner.records();
  }

  VirtualLoop loop;
  std::vector<PlannedRequest> plan;
  absl::Time start;
  FakeServer server;
  int finished = 0;
  Runner runner;
};

std::vector<PlannedRequest> Every(double gap_s, int count, int tokens) {
  std::vector<PlannedRequest> plan(count);
  for (int i = 0; i < count; ++i) {
    plan[i].at_s = gap_s * i;
    plan[i].output_tokens = tokens;
  }
  return plan;
}

double Sample(const RequestRecord& record, Metric metric) {
  return Samples(record, metric).at(0);
}

TEST(RunnerTest, MeasuresWhatTheServerDoes) {
  World world({}, Every(0.05, 20, 5));
  for (const RequestRecord& record : world.Run()) {
    ASSERT_TRUE(record.completed());
    EXPECT_NEAR(Sample(record, Metric::kTtft), 100, 1e-3);
    EXPECT_NEAR(Sample(record, Metric::kTpot), 10, 1e-3);
    EXPECT_NEAR(Sample(record, Metric::kE2el), 140, 1e-3);
    EXPECT_EQ(record.output_tokens, 5);
    EXPECT_EQ(record.prompt_tokens, 7);
    EXPECT_EQ(record.finish_reason, "FINISH_REASON_LENGTH");
    EXPECT_NEAR(record.server.prefill_ms, 5, 1e-9);
    EXPECT_TRUE(record.server.split);
    EXPECT_NEAR(record.sent_s, record.scheduled_s, 1e-6);
  }
}

TEST(RunnerTest, AnOpenLoopDoesNotWaitForASlowServer) {
  World world({}, Every(0.1, 50, 1));
  world.server.first = absl::Seconds(60);
  world.Run();
  EXPECT_EQ(world.server.most_in_flight, 50);
  ASSERT_EQ(world.server.received_s.size(), 50u);
  for (int i = 0; i < 50; ++i) {
    EXPECT_NEAR(world.server.received_s[i], 0.1 * i, 1e-6);
  }
}

// The classic mistake is to let a stall keep requests from being sent, and
// then to count one slow request instead of all that users would have sent.
TEST(RunnerTest, AStallIsFeltByAllThatArriveInItEvenUnderALimit) {
  for (const int limit : {0, 1}) {
    World world({.max_concurrency = limit}, Every(0.2, 20, 1));
    world.server.stalled_from = absl::Seconds(1);
    world.server.stalled_to = absl::Seconds(3);
    const std::vector<RequestRecord>& records = world.Run();
    for (size_t i = 0; i < records.size(); ++i) {
      const double at = 0.2 * static_cast<double>(i);
      const double ttft_s = Sample(records[i], Metric::kTtft) * 1e-3;
      EXPECT_NEAR(records[i].scheduled_s, at, 1e-9);
      if (at > 1 && at < 3) {
        EXPECT_GE(ttft_s, 3 - at) << "limit " << limit << ", request " << i;
      }
      // None of it is the generator's fault.
      EXPECT_NEAR(records[i].sent_s, records[i].due_s, 1e-6);
    }
    if (limit == 1) {
      // Ten waited when it woke, 100 ms each: the last of them left the queue
      // only when the arrivals had stopped.
      EXPECT_NEAR(records[14].sent_s, 3.0 + 0.1 * 9, 0.11);
      EXPECT_EQ(world.server.most_in_flight, 1);
    }
  }
}

TEST(RunnerTest, AClosedLoopKeepsItsPlacesFull) {
  World world({.closed_loop = true, .max_concurrency = 4}, Every(0, 20, 1));
  const std::vector<RequestRecord>& records = world.Run();
  EXPECT_EQ(world.server.most_in_flight, 4);
  for (size_t i = 0; i < records.size(); ++i) {
    // Scheduled when a place is free, so that waiting for one is no latency.
    EXPECT_NEAR(records[i].scheduled_s, 0.1 * static_cast<double>(i / 4), 1e-6);
    EXPECT_NEAR(Sample(records[i], Metric::kTtft), 100, 1e-3);
  }
}

TEST(RunnerTest, AFailureIsRecordedAndTheRunGoesOn) {
  World world({.closed_loop = true, .max_concurrency = 1}, Every(0, 5, 2));
  world.server.failing = 2;
  const std::vector<RequestRecord>& records = world.Run();
  for (size_t i = 0; i < records.size(); ++i) {
    EXPECT_EQ(records[i].completed(), i != 2) << i;
  }
  EXPECT_EQ(records[2].status.message(), "full");
  const RunProgress progress = world.runner.progress();
  EXPECT_EQ(progress.completed, 4);
  EXPECT_EQ(progress.failed, 1);
  EXPECT_EQ(progress.output_tokens, 8);
}

TEST(RunnerTest, AStreamThatLosesTokensOrItsEndIsAFailure) {
  World losing({}, Every(0.1, 1, 3));
  losing.server.lost_tokens = 1;
  EXPECT_EQ(losing.Run()[0].status.code(), absl::StatusCode::kDataLoss);

  World cut({}, Every(0.1, 1, 3));
  cut.server.says_why_finished = false;
  EXPECT_FALSE(cut.Run()[0].completed());
  EXPECT_EQ(cut.runner.progress().failed, 1);
}

TEST(RunnerTest, StopCancelsWhatRunsAndSendsNoMore) {
  World world({}, Every(0.1, 100, 1000));
  world.runner.Start();
  world.loop.RunFor(absl::Milliseconds(950));
  world.runner.Stop();
  EXPECT_EQ(world.finished, 1);
  EXPECT_EQ(world.server.in_flight, 0);
  world.loop.RunUntilIdle(100000);
  EXPECT_EQ(world.server.received_s.size(), 10u);
  EXPECT_EQ(world.finished, 1);
  int sent = 0;
  for (const RequestRecord& record : world.runner.records()) {
    sent += record.sent;
    if (record.sent) {
      EXPECT_EQ(record.status.code(), absl::StatusCode::kCancelled);
      EXPECT_NEAR(record.ended_s, 0.95, 1e-6);
    }
  }
  EXPECT_EQ(sent, 10);
}

TEST(RunnerTest, AnEmptyPlanEndsAtOnce) {
  World world({}, {});
  EXPECT_TRUE(world.Run().empty());
}

}  // namespace
}  // namespace tandem::bench
