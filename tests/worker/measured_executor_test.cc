// SPDX-License-Identifier: Apache-2.0
#include "worker/measured_executor.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "common/testing/virtual_loop.h"
#include "worker/load_metrics.h"

namespace tandem::worker {
namespace {

// Ends each step at once.
class Device final : public engine::Executor {
 public:
  void Submit(const engine::Step* step,
              engine::StepListener* listener) override {
    listener->OnStepDone(step->id, engine::StepResult());
  }
  void Gather(const engine::KvPart&, kernels::DType, uint64_t, std::byte*,
              absl::AnyInvocable<void(kernels::KvDigest)>) override {}
  void Scatter(const engine::KvPart&, kernels::DType, const std::byte*,
               absl::AnyInvocable<void()>) override {}
  void Digest(const engine::KvPart&, kernels::DType, uint64_t,
              absl::AnyInvocable<void(kernels::KvDigest)>) override {}
  const kernels::KvShape& kv_shape() const override { return shape_; }

 private:
  kernels::KvShape shape_;
};

struct Listener final : engine::StepListener {
  void OnLayersDone(uint64_t, int) override {}
  void OnStepDone(uint64_t, absl::StatusOr<engine::StepResult>) override {}
};

TEST(MeasuredExecutorTest, AStepsPhaseIsWhatItsRowsAreFor) {
  VirtualLoop loop;
  Metrics metrics("decode", "model");
  Device device;
  Listener listener;
  MeasuredExecutor executor(&device, &loop, &metrics, engine::WorkShape());
  const std::vector<int32_t> tokens(8);
  const std::vector<engine::RowDraw> draws(8);
  uint64_t id = 0;
  // Rows and draws of a step's entries.
  const auto run = [&](const std::vector<std::pair<size_t, size_t>>& entries) {
    engine::Step step{.id = ++id, .entries = {}};
    for (const auto& [rows, drawn] : entries) {
      engine::StepEntry& entry = step.entries.emplace_back();
      entry.tokens = absl::MakeConstSpan(tokens).first(rows);
      entry.draws = absl::MakeConstSpan(draws).first(drawn);
    }
    executor.Submit(&step, &listener);
  };
  const auto count = [&](const char* phase) {
    const std::string text = metrics.Text();
    const std::string mark = std::string("phase=\"") + phase + "\"";
    for (size_t at = text.find("tandem_step_batch_tokens_count");
         at != std::string::npos;
         at = text.find("tandem_step_batch_tokens_count", at + 1)) {
      const std::string line = text.substr(at, text.find('\n', at) - at);
      if (line.find(mark) != std::string::npos) {
        return std::stoi(line.substr(line.rfind(' ') + 1));
      }
    }
    return 0;
  };
  run({{1, 1}, {1, 1}});
  run({{4, 4}, {1, 1}});  // three guesses are verified
  EXPECT_EQ(count("decode"), 2);
  run({{8, 0}});
  run({{8, 1}});
  EXPECT_EQ(count("prefill"), 2);
  run({{1, 1}, {8, 1}});
  EXPECT_EQ(count("mixed"), 1);
  EXPECT_EQ(count("decode"), 2);
  // Unless it is said.
  MeasuredExecutor draft(&device, &loop, &metrics, engine::WorkShape(),
                         "draft");
  engine::Step step{.id = 1, .entries = {}};
  step.entries.emplace_back().tokens = absl::MakeConstSpan(tokens).first(8);
  draft.Submit(&step, &listener);
  EXPECT_EQ(count("draft"), 1);
  EXPECT_EQ(count("prefill"), 2);
}

TEST(LoadMetricsTest, AQueueIsCountedInRequestsAndInTokens) {
  Metrics metrics("prefill", "m");
  LoadMetrics exported(&metrics, {});
  v1::WorkerLoad load;
  load.set_running(2);
  load.set_waiting(3);
  load.set_queued_tokens(4567);
  exported.Update(load, {}, {}, 0, 0);
  const auto says = [&](const std::string& name, const std::string& value) {
    return metrics.Text().find("\ntandem_" + name +
                               "{model_name=\"m\",role=\"prefill\"} " + value +
                               "\n") != std::string::npos;
  };
  EXPECT_TRUE(says("num_requests_running", "2")) << metrics.Text();
  EXPECT_TRUE(says("num_requests_waiting", "3"));
  EXPECT_TRUE(says("num_prompt_tokens_waiting", "4567"));
  load.set_queued_tokens(0);
  exported.Update(load, {}, {}, 0, 0);
  EXPECT_TRUE(says("num_prompt_tokens_waiting", "0"));
}

}  // namespace
}  // namespace tandem::worker
