// SPDX-License-Identifier: Apache-2.0
// Between two decode steps the device waits for the scheduler, so nothing on
// that path may allocate: this binary counts what its operator new gives out.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "common/testing/virtual_loop.h"
#include "engine/engine.h"

namespace {
std::atomic<int64_t> allocations{0};
}  // namespace

void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  std::abort();
}
// Inlined, gcc takes `free` of what `new` gave for a mistake.
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace tandem::engine {
namespace {

// Keeps the step; the test ends it.
class ManualExecutor final : public Executor {
 public:
  void Submit(const Step* submitted, StepListener* to) override {
    step = submitted;
    listener = to;
  }
  void Gather(const KvPart&, kernels::DType, uint64_t, std::byte*,
              absl::AnyInvocable<void(kernels::KvDigest)>) override {}
  void Scatter(const KvPart&, kernels::DType, const std::byte*,
               absl::AnyInvocable<void()>) override {}
  void Digest(const KvPart&, kernels::DType, uint64_t,
              absl::AnyInvocable<void(kernels::KvDigest)>) override {}
  const kernels::KvShape& kv_shape() const override { return shape_; }

  const Step* step = nullptr;
  StepListener* listener = nullptr;

 private:
  kernels::KvShape shape_;
};

class CountingListener final : public EngineListener {
 public:
  void OnToken(SequenceId, int, const SampledToken&,
               std::optional<Finish>) override {
    ++tokens;
  }
  void OnComputed(SequenceId, int, int, int) override {}
  void OnPreempted(SequenceId) override {}
  bool OnBlocksShort(int) override { return false; }
  void OnStepFailed(const std::vector<SequenceId>&,
                    const absl::Status&) override {}

  int tokens = 0;
};

void RunTokens(int drafts) {
  constexpr int kSequences = 32;
  constexpr int kTokens = 400;
  VirtualLoop loop;
  ManualExecutor executor;
  CountingListener listener;
  KvPool pool(kSequences * 32, 16);
  Engine engine({.max_num_seqs = kSequences,
                 .max_num_batched_tokens = 64,
                 .max_model_len = 500,
                 .prefix_caching = true,
                 .max_draws = 64,
                 .speculation = {.num_tokens = drafts, .adapt = false}},
                &loop, &executor, &pool, &listener);
  for (SequenceId id = 1; id <= kSequences; ++id) {
    SequenceSpec spec;
    spec.history = {static_cast<int32_t>(id), 2, 3};
    spec.prompt_tokens = 3;
    spec.stopping.max_tokens = kTokens;
    ASSERT_TRUE(engine.Add(id, std::move(spec), {}, 0).ok());
  }
  loop.RunUntilIdle();
  int64_t counted = 0;
  int steps = 0;
  while (engine.stats().step_in_flight) {
    StepResult result;
    for (const StepEntry& entry : executor.step->entries) {
      // A period of seven.
      size_t position = static_cast<size_t>(entry.position) +
                        entry.tokens.size() - entry.draws.size();
      for (size_t i = 0; i < entry.draws.size(); ++i) {
        result.tokens.push_back(
            {.token_id = static_cast<int32_t>(++position % 7), .top = {}});
      }
    }
    absl::StatusOr<StepResult> ended(std::move(result));
    const uint64_t id = executor.step->id;
    const int64_t before = allocations;
    executor.listener->OnLayersDone(id, 1);
    executor.listener->OnStepDone(id, std::move(ended));
    // The first steps grow the vectors that all later ones use.
    if (++steps > 4) counted += allocations - before;
  }
  EXPECT_EQ(listener.tokens, kSequences * kTokens);
  EXPECT_EQ(engine.stats().decode_tokens, kSequences * kTokens);
  EXPECT_GT(pool.CachedHashes().size(), kSequences * 20);  // it did publish
  EXPECT_EQ(counted, 0);
  EXPECT_EQ(engine.stats().drafts.accepted > kSequences * kTokens / 4,
            drafts > 0);
  EXPECT_GT(allocations, 0);
}

TEST(EngineAllocationTest, TheTokenPathAllocatesNothing) { RunTokens(0); }

TEST(EngineAllocationTest, NorDoesTheTokenPathWithDrafts) { RunTokens(3); }

}  // namespace
}  // namespace tandem::engine
