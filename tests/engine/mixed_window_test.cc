// SPDX-License-Identifier: Apache-2.0
// Models of which some layers have a window and others see all: blocks in parts
// (engine/model/layer_parts.h), of which the windowed ones are let go and used
// again as others, give the bits of whole blocks, on both backends.

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/kv/prefix_cache.h"
#include "engine/model/layer_parts.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/notification.h"
#include "tests/engine/rig.h"
#include "tests/engine/test_device.h"

namespace tandem::engine {
namespace {

using kernels::DType;
using kernels::KvDigest;

constexpr int kBlock = 8;
constexpr int kMaxLength = 192;

struct Request {
  std::vector<int32_t> prompt;
  int max_tokens = 0;
};

// Every request of a list, a few at once, on the rig's device.
class Served final : public EngineListener {
 public:
  Served(Rig* rig, KvPool* pool, const EngineOptions& options,
         const std::vector<Request>& requests)
      : rig_(rig), pool_(pool), cache_(pool, nullptr, options.window) {
    for (size_t i = 0; i < requests.size(); ++i) {
      Waiting& waiting = waiting_.emplace_back();
      waiting.id = i + 1;
      waiting.history = requests[i].prompt;
      waiting.prompt_tokens = static_cast<int>(requests[i].prompt.size());
      waiting.max_tokens = requests[i].max_tokens;
    }
    left_ = requests.size();
    rig->loop().RunSync([&] {
      engine_ = std::make_unique<Engine>(options, &rig->loop(),
                                         &rig->executor(), pool, this);
      Fill();
    });
    done_.WaitForNotification();
    rig->loop().RunSync([&] {
      stats = engine_->stats();
      engine_.reset();
      EXPECT_EQ(pool->counts().live, 0);
      EXPECT_EQ(pool->counts().reserved, 0);
      const absl::Status pool_status = pool->CheckInvariants();
      EXPECT_TRUE(pool_status.ok()) << pool_status;
    });
  }

  std::map<SequenceId, std::vector<std::pair<int32_t, float>>> tokens;
  EngineStats stats;
  int cached_positions = 0;

 private:
  struct Waiting {
    SequenceId id = 0;
    std::vector<int32_t> history;
    int prompt_tokens = 0;
    int max_tokens = 0;
  };

  void Fill() {
    while (!waiting_.empty() && running_.size() < 5) {
      Waiting one = std::move(waiting_.front());
      waiting_.pop_front();
      SequenceSpec spec;
      spec.history = one.history;
      spec.prompt_tokens = one.prompt_tokens;
      spec.stopping.max_tokens = one.max_tokens;
      spec.root = RootHash("", kBlock, "");
      spec.admitted = absl::FromUnixSeconds(static_cast<int64_t>(one.id));
      CachedPrefix found = cache_.Find(HashBlocks(
          spec.root,
          absl::MakeConstSpan(one.history).first(one.history.size() - 1),
          kBlock));
      const int computed = found.size() * kBlock;
      cached_positions += computed;
      const SequenceId id = one.id;
      running_[id] = std::move(one);
      const absl::Status status =
          engine_->Add(id, std::move(spec), std::move(found.blocks), computed);
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  void OnToken(SequenceId id, int, const SampledToken& token,
               std::optional<Finish> finish) override {
    tokens[id].emplace_back(token.token_id, token.logprob);
    running_[id].history.push_back(token.token_id);
    const absl::Status status = engine_->CheckInvariants();
    EXPECT_TRUE(status.ok()) << status;
    const absl::Status pool_status = pool_->CheckInvariants();
    EXPECT_TRUE(pool_status.ok()) << pool_status;
    if (!finish.has_value()) return;
    engine_->Retire(id);
    running_.erase(id);
    if (--left_ == 0) return done_.Notify();
    rig_->loop().Post([this] { Fill(); });
  }
  void OnPreempted(SequenceId id) override {
    waiting_.push_front(std::move(running_[id]));
    running_.erase(id);
  }
  void OnComputed(SequenceId, int, int, int) override {}
  bool OnBlocksShort(int) override { return false; }
  void OnStepFailed(const std::vector<SequenceId>&,
                    const absl::Status& status) override {
    ADD_FAILURE() << status;
    done_.Notify();
  }

  Rig* const rig_;
  KvPool* const pool_;
  PrefixCache cache_;
  std::unique_ptr<Engine> engine_;
  std::deque<Waiting> waiting_;
  std::map<SequenceId, Waiting> running_;
  size_t left_ = 0;
  Notification done_;
};

struct Case {
  std::string checkpoint;
  bool cuda;
  DType kv;
  std::string name() const {
    return checkpoint + (cuda ? "_cuda_" : "_cpu_") +
           std::string(kernels::Name(kv));
  }
};

class MixedWindowTest : public testing::TestWithParam<Case> {
 protected:
  MixedWindowTest()
      : spec_(LoadCases()[GetParam().checkpoint]),
        backend_(GetParam().cuda ? NewTestDevice(DType::kF32) : NewCpu(2)) {
    WriteCheckpoint(spec_, dir_);
  }

  RigOptions Options(int blocks, const BlockCells* cells) const {
    RigOptions options;
    options.executor.max_rows = 40;
    options.executor.max_sequences = 6;
    options.executor.block_size = kBlock;
    options.executor.num_blocks = blocks;
    options.executor.kv_dtype = GetParam().kv;
    options.executor.cells = cells;
    return options;
  }

  // Prompts of any length, every third one of a common beginning.
  std::vector<Request> Requests() const {
    std::vector<Request> requests;
    for (const int length : {150, 9, 100, 61, 33, 140, 72, 120, 19, 100, 88, 47,
                             130, 100, 5, 64, 110, 28}) {
      if (GetParam().cuda && requests.size() == 6) break;
      Request& one = requests.emplace_back();
      one.prompt = PromptIds(spec_, length);
      one.max_tokens = GetParam().cuda ? 4 : 3 + length % 37;
      if (requests.size() % 3 != 0) continue;
      const std::vector<int32_t> shared = PromptIds(spec_, 100);
      std::copy_n(shared.begin(), std::min<size_t>(one.prompt.size(), 48),
                  one.prompt.begin());
    }
    return requests;
  }

  EngineOptions Engines(const KvWindow& window) const {
    EngineOptions options;
    options.max_num_seqs = 6;
    options.max_num_batched_tokens = 40;
    options.max_model_len = kMaxLength;
    options.window = window;
    return options;
  }

  const nlohmann::json spec_;
  TempDir dir_;
  const std::unique_ptr<kernels::Backend> backend_;
};

TEST_P(MixedWindowTest, PartsLetGoChangeNoBit) {
  Rig plain(dir_.path(), backend_.get(), Options(200, nullptr));
  const LayerParts layers = PartsOf(plain.spec());
  ASSERT_GT(layers.parts.windowed, 0);
  const KvWindow window = WindowOf(plain.spec());
  ASSERT_TRUE(window.frees_parts());
  KvPool roomy(200, kBlock);
  const Served expected(&plain, &roomy, Engines({}), Requests());

  for (const bool speculative : {false, true}) {
    SCOPED_TRACE(speculative);
    EngineOptions options = Engines(window);
    if (speculative) {
      options.speculation = {
          .num_tokens = 3, .lookup_min = 1, .lookup_max = 2, .adapt = false};
      options.max_draws = 24;
    }
    // As few as hold one sequence, which does not fit as a whole.
    const int blocks = Engine::BlocksAtOnce(options, kBlock, kMaxLength);
    ASSERT_LT(blocks, kMaxLength / kBlock);
    KvPool pool(blocks, kBlock, 1, layers.parts);
    RigOptions rig_options = Options(blocks, &pool.cells());
    rig_options.executor.max_draws = options.max_draws;
    Rig rig(dir_.path(), backend_.get(), rig_options);
    if (GetParam().cuda) {
      rig.loop().RunSync([&] {
        const absl::Status status =
            rig.executor().RecordDecodes([](int, int) {});
        EXPECT_TRUE(status.ok()) << status;
      });
    }
    const Served served(&rig, &pool, options, Requests());
    EXPECT_EQ(served.tokens, expected.tokens);
    EXPECT_GT(served.stats.window_blocks, 0);
    EXPECT_GT(served.stats.preemptions, 0);
    // Few requests run on the emulated GPU.
    EXPECT_EQ(served.cached_positions > 0, !GetParam().cuda);
  }
}

// Slices of any layers, on the wire, are those of whole blocks, digests too.
TEST_P(MixedWindowTest, MovesTheSameBytes) {
  const std::vector<int32_t> ids = PromptIds(spec_, 61);
  Rig plain(dir_.path(), backend_.get(), Options(32, nullptr));
  KvPool pool(32, kBlock, 1, PartsOf(plain.spec()).parts);
  Rig parted(dir_.path(), backend_.get(), Options(32, &pool.cells()));
  // Blocks from all over, so that no cell is where it would be by itself.
  std::vector<BlockRef> blocks = pool.Allocate(30);
  std::reverse(blocks.begin(), blocks.end());
  const auto place = [&](TestSequence* sequence, size_t first) {
    for (size_t b = 0; b < sequence->blocks.size(); ++b) {
      sequence->blocks[b] = blocks[first + 2 * b].id();
    }
  };
  TestSequence there = plain.NewSequence(ids, 62);
  TestSequence here = parted.NewSequence(ids, 62);
  TestSequence landed = parted.NewSequence(ids, 62);
  place(&here, 0);
  place(&landed, 1);
  TestSequence* one = &there;
  ASSERT_TRUE(plain.Advance({&one, 1}, 33).status.ok());
  ASSERT_TRUE(plain.Advance({&one, 1}, 27).status.ok());
  one = &here;
  ASSERT_TRUE(parted.Advance({&one, 1}, 33).status.ok());
  ASSERT_TRUE(parted.Advance({&one, 1}, 27).status.ok());

  const kernels::KvShape& shape = plain.executor().kv_shape();
  EXPECT_EQ(parted.executor().kv_shape().num_layers, shape.num_layers);
  const DType wire = GetParam().kv;
  std::vector<std::byte> expected(60 * 2 * shape.bytes_per_position());
  std::vector<std::byte> got(expected.size());
  for (int begin = 0; begin < shape.num_layers; ++begin) {
    for (int end = begin + 1; end <= shape.num_layers; ++end) {
      const auto part = [&](const TestSequence& sequence) {
        KvPart slice = WholePart(sequence, shape, 5, 60);
        slice.layer_begin = begin;
        slice.layer_end = end;
        return slice;
      };
      const KvDigest digest = plain.Gather(part(there), wire, expected.data());
      EXPECT_EQ(parted.Gather(part(here), wire, got.data()), digest);
      EXPECT_EQ(got, expected) << begin << " to " << end;
      EXPECT_EQ(parted.Digest(part(here), wire), digest);
    }
  }
  // Of layers with a window from a later position on.
  KvPart seen = WholePart(here, shape, 5, 60);
  seen.windowed_begin = 24;
  KvDigest sum;
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    KvPart one_layer =
        WholePart(there, shape, parted.spec().is_windowed(layer) ? 24 : 5, 60);
    one_layer.layer_begin = layer;
    one_layer.layer_end = layer + 1;
    sum += plain.Digest(one_layer, wire);
  }
  EXPECT_EQ(parted.Digest(seen, wire), sum);
  // All of it lands elsewhere, and goes on as it does where it was computed.
  plain.Gather(WholePart(there, shape, 0, 60), wire, expected.data());
  parted.Scatter(WholePart(landed, shape, 0, 60), wire, expected.data());
  landed.computed = 60;
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    there.attention.layers.push_back(layer);
  }
  landed.attention = there.attention;
  one = &there;
  const StepOutput next = plain.Advance({&one, 1}, 1);
  one = &landed;
  const StepOutput after = parted.Advance({&one, 1}, 1);
  EXPECT_EQ(after.logits, next.logits);
  ASSERT_EQ(next.tokens[0].attention.size(), 61u * shape.num_layers);
  EXPECT_EQ(after.tokens[0].attention, next.tokens[0].attention);
  // And so does a block that was saved, and whose cells somebody else wrote.
  std::vector<std::byte> saved(
      static_cast<size_t>(parted.executor().block_bytes()));
  const auto move = [&](auto call) {
    Notification moved;
    parted.loop().RunSync([&] { call([&] { moved.Notify(); }); });
    moved.WaitForNotification();
  };
  move([&](auto done) {
    parted.executor().SaveBlock(here.blocks[6], saved.data(), done);
  });
  move([&](auto done) {
    parted.executor().RestoreBlock(here.blocks[0], saved.data(), done);
  });
  here.blocks[6] = here.blocks[0];
  here.blocks[0] = landed.blocks[0];
  one = &here;
  EXPECT_EQ(parted.Advance({&one, 1}, 1).logits, next.logits);
}

TEST(MixedWindowExecutor, RefusesABlockThatLacksWhatIsSeen) {
  const nlohmann::json spec = LoadCases()["gemma3_f32"];
  TempDir dir;
  WriteCheckpoint(spec, dir);
  const auto backend = NewCpu(1);
  RigOptions options;
  options.executor.block_size = kBlock;
  options.executor.num_blocks = 16;
  const LayerParts layers =
      PartsOf(Rig(dir.path(), backend.get(), options).spec());
  KvPool pool(16, kBlock, 1, layers.parts);
  options.executor.cells = &pool.cells();
  Rig rig(dir.path(), backend.get(), options);
  TestSequence sequence = rig.NewSequence(PromptIds(spec, 60), 64);
  std::vector<BlockRef> blocks = pool.Allocate(8);
  for (size_t b = 0; b < blocks.size(); ++b) {
    sequence.blocks[b] = blocks[b].id();
  }
  TestSequence* one = &sequence;
  ASSERT_TRUE(rig.Advance({&one, 1}, 40).status.ok());
  blocks[1].LetWindowedGo();  // position 40 sees from 22 on
  ASSERT_TRUE(rig.Advance({&one, 1}, 1).status.ok());
  blocks[2].LetWindowedGo();  // up to 23
  EXPECT_TRUE(absl::IsInvalidArgument(rig.Advance({&one, 1}, 1).status));
  // Parts that are not the model's.
  KvPool other(16, kBlock);
  EXPECT_FALSE(
      DeviceExecutor::Create({.num_blocks = 16, .cells = &other.cells()},
                             &rig.model(), backend.get(), &rig.loop())
          .ok());
}

INSTANTIATE_TEST_SUITE_P(
    Devices, MixedWindowTest,
    testing::Values(Case{"gemma2_f32", false, DType::kF32},
                    Case{"gemma3_f32", false, DType::kF32},
                    Case{"gemma3_f32", false, DType::kInt8},
                    Case{"qwen2_window_f32", false, DType::kF32},
                    Case{"gemma4_f32", false, DType::kF32},
                    Case{"gemma4_whole_bf16", false, DType::kInt8},
                    Case{"gemma4_few_f32", false, DType::kInt4},
                    Case{"gemma4_few_f32", true, DType::kF32}),
    [](const auto& test) { return test.param.name(); });

}  // namespace
}  // namespace tandem::engine
