// SPDX-License-Identifier: Apache-2.0
// A checkpoint, loaded on a backend, behind a DeviceExecutor on a loop of its
// own, and driven step by step: what the tests of the model and of the
// executor share. Failures to load abort with their message.

#ifndef TANDEM_TESTS_ENGINE_RIG_H_
#define TANDEM_TESTS_ENGINE_RIG_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/thread_loop.h"
#include "engine/device/device_executor.h"
#include "engine/executor.h"
#include "engine/model/model.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"

namespace tandem::engine {

// A CPU backend; aborts if it cannot be had. "avx2" or "avx512"; see HasIsa.
std::unique_ptr<kernels::Backend> NewCpu(
    int threads, const std::string& isa = "auto",
    kernels::CpuInputs inputs = kernels::CpuInputs::kF32);
bool HasIsa(const std::string& isa);

struct RigOptions {
  LoadOptions load;
  DeviceExecutorOptions executor{.max_rows = 512,
                                 .max_sequences = 32,
                                 .block_size = 16,
                                 .num_blocks = 512};
  // PEFT directories, in the order of their slots; one slot more is free.
  std::vector<std::string> adapters;
  int max_lora_rank = 8;
};

// A token stream and where its KV lies.
struct TestSequence {
  std::vector<int32_t> ids;
  std::vector<int32_t> blocks;
  int computed = 0;
  Sampling sampling;
  int adapter = -1;
  std::vector<kernels::LogitEdit> edits;
  AttentionAsk attention;
  RowDraw draw = {};  // with them
};

// Of an id that may not be drawn.
kernels::LogitEdit Ban(int32_t token_id);

// What one step gave, entry by entry.
struct StepOutput {
  absl::Status status;
  std::vector<SampledToken> tokens;
  std::vector<std::vector<float>> logits;  // [vocab] each
  std::vector<int> layers_done;
};

class Rig {
 public:
  Rig(const std::string& directory, kernels::Backend* backend,
      const RigOptions& options = {});
  ~Rig();

  const ModelSpec& spec() const { return model_->spec(); }
  const Model& model() const { return *model_; }
  DeviceExecutor& executor() { return *executor_; }
  LoraSlots& loras() { return *loras_; }
  ThreadLoop& loop() { return loop_; }

  // With blocks for `positions`, from all over the pool. They are never
  // given back: a rig is as long as a test.
  TestSequence NewSequence(std::vector<int32_t> ids, int positions);

  // One step: the next `count` uncomputed positions of each, with a token
  // drawn after the last. Blocks.
  StepOutput Advance(absl::Span<TestSequence* const> sequences, int count);
  StepOutput Run(const Step& step);

  // Computes all positions in chunks, together where there are several, then
  // appends `steps` greedy tokens to each.
  void Greedy(absl::Span<TestSequence* const> sequences, int chunk, int steps);

  // Executor calls that wait.
  kernels::KvDigest Gather(const KvPart& part, kernels::DType wire,
                           std::byte* staging);
  void Scatter(const KvPart& part, kernels::DType wire,
               const std::byte* staging);
  kernels::KvDigest Digest(const KvPart& part, kernels::DType wire);

 private:
  class Listener;

  std::unique_ptr<Model> model_;
  std::unique_ptr<LoraSlots> loras_;
  ThreadLoop loop_;
  std::unique_ptr<DeviceExecutor> executor_;
  std::vector<int32_t> free_;
  uint64_t steps_ = 0;
};

// A whole part of a sequence's KV: all layers and heads.
KvPart WholePart(const TestSequence& sequence, const kernels::KvShape& shape,
                 int begin, int end);

}  // namespace tandem::engine

#endif  // TANDEM_TESTS_ENGINE_RIG_H_
