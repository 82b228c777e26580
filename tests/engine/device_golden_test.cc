// SPDX-License-Identifier: Apache-2.0
// The engine over the CUDA backend against what others computed: the families'
// tiny checkpoints and the trained model, in every activation type; that a
// stream goes on with the same bits where it was taken over; and that nothing
// is left behind. On a GPU or the emulator: test_device.h.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/testing/fake_grammar.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/rig.h"
#include "tests/engine/test_device.h"
#include "tests/sanitized.h"

namespace tandem::engine {
namespace {

using kernels::DType;
using nlohmann::json;

RigOptions GoldenRigOptions(DType type) {
  RigOptions options;
  options.load.weight_dtype = type;
  options.executor.max_rows = 512;
  options.executor.max_sequences = 8;
  options.executor.num_blocks = 1024;
  options.executor.kv_dtype = type;
  return options;
}

// Of the largest logit in a row: activations are rounded about ten times a
// layer, to 8 bits or 11.
double ToleranceOf(DType type) {
  return type == DType::kF32 ? 1e-4 : type == DType::kBF16 ? 4e-2 : 5e-3;
}

class Families : public testing::TestWithParam<std::string> {};

TEST_P(Families, LogitsAreNearTheGoldens) {
  const json spec = LoadCases()[GetParam()];
  const json golden = ReadGolden(GetParam() + ".json");
  TempDir dir;
  WriteCheckpoint(spec, dir);
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    if (kSanitized && type != DType::kBF16) continue;
    const auto backend = NewTestDevice(type);
    RigOptions options = GoldenRigOptions(type);
    options.load.max_positions = spec.value("served", 0);
    Rig rig(dir.path(), backend.get(), options);
    int prompts = 0;
    double worst = 0;
    for (const json& prompt : golden["prompts"]) {
      auto ids = prompt["ids"].get<std::vector<int32_t>>();
      const int length = static_cast<int>(ids.size());
      if (!TestsRunOnGpu() && (length > 40 || ++prompts > 2)) continue;
      TestSequence sequence = rig.NewSequence(std::move(ids), length);
      TestSequence* const one = &sequence;
      const StepOutput output = rig.Advance({&one, 1}, 512);
      ASSERT_TRUE(output.status.ok()) << output.status;
      const json& row = prompt["last"];
      for (size_t i = 0; i < row["ids"].size(); ++i) {
        const int id = row["ids"][i];
        const double error =
            std::fabs(output.logits[0][id] - row["logits"][i].get<double>()) /
            row["max_abs"].get<double>();
        worst = std::max(worst, error);
      }
    }
    EXPECT_LE(worst, ToleranceOf(type)) << kernels::Name(type);
    std::printf("%s %s: largest error %.1e of the largest logit\n",
                GetParam().c_str(), std::string(kernels::Name(type)).c_str(),
                worst);
  }
}

std::vector<std::string> CaseNames() {
  std::vector<std::string> names;
  const json cases = LoadCases();
  for (const auto& [name, spec] : cases.items()) names.push_back(name);
  return names;
}
INSTANTIATE_TEST_SUITE_P(Device, Families, testing::ValuesIn(CaseNames()),
                         [](const auto& test) { return test.param; });

// The trained model's published text, fed as it is, token by token: every
// log-probability is near, and the likeliest token is the published one
// wherever another is not as likely.
class Stories : public testing::TestWithParam<DType> {};

TEST_P(Stories, EveryGoldenTokenIsTheLikeliest) {
  const char* const data = std::getenv("TANDEM_TEST_DATA");
  if (data == nullptr) {
    GTEST_SKIP() << "TANDEM_TEST_DATA is not set: no trained model to test";
  }
  const std::string directory = absl::StrCat(data, "/models/stories260K");
  std::ifstream stream(directory + "/golden.json");
  const json golden = json::parse(stream, nullptr, false);
  ASSERT_TRUE(golden.is_object()) << directory;
  const DType type = GetParam();
  const double near = type == DType::kF32 ? 1e-3 : 0.15;
  const auto backend = NewTestDevice(type);
  Rig rig(directory, backend.get(), GoldenRigOptions(type));
  int cases = 0;
  int tokens = 0;
  int others = 0;
  double worst = 0;
  for (const json& one_case : golden["cases"]) {
    if (!TestsRunOnGpu() && ++cases > 1) break;
    const auto prompt = one_case["prompt_ids"].get<std::vector<int32_t>>();
    auto expected = one_case["greedy_ids"].get<std::vector<int32_t>>();
    if (!TestsRunOnGpu()) expected.resize(std::min<size_t>(4, expected.size()));
    TestSequence sequence = rig.NewSequence(
        prompt, static_cast<int>(prompt.size() + expected.size()));
    sequence.sampling.logprobs = 2;
    TestSequence* const one = &sequence;
    for (const int32_t id : expected) {
      const StepOutput output = rig.Advance({&one, 1}, 512);
      ASSERT_TRUE(output.status.ok()) << output.status;
      const SampledToken& token = output.tokens[0];
      const double logprob =
          one_case["token_logprobs"][sequence.ids.size()].get<double>();
      ++tokens;
      if (token.token_id == id) {
        worst = std::max(worst, std::fabs(token.logprob - logprob));
      } else {
        ++others;
        EXPECT_NE(type, DType::kF32) << "after " << sequence.ids.size();
        EXPECT_NEAR(token.logprob, logprob, near);  // nearly as likely
      }
      sequence.ids.push_back(id);
    }
  }
  EXPECT_LE(worst, near);
  std::printf("%s: %d tokens, %d others, logprobs within %.1e\n",
              std::string(kernels::Name(type)).c_str(), tokens, others, worst);
}
INSTANTIATE_TEST_SUITE_P(
    Device, Stories, testing::Values(DType::kF32, DType::kBF16, DType::kF16),
    [](const auto& test) { return std::string(kernels::Name(test.param)); });

// A worker that takes a stream over computes what was generated so far by
// prefill, and must go on as the first would have.
TEST(DeviceStream, GoesOnWithTheSameBitsWhereItWasTakenOver) {
  const int prompt = TestsRunOnGpu() ? 150 : 9;
  const int steps = TestsRunOnGpu() ? 60 : 6;
  const json spec = LoadCases()["llama3_scaled_bf16"];
  TempDir dir;
  WriteCheckpoint(spec, dir);
  const auto backend = NewTestDevice(DType::kBF16);
  Rig rig(dir.path(), backend.get(), GoldenRigOptions(DType::kBF16));
  const auto go_on = [&](TestSequence& sequence, int count) {
    std::vector<std::vector<float>> logits;
    TestSequence* const one = &sequence;
    for (int i = 0; i < count; ++i) {
      StepOutput output = rig.Advance({&one, 1}, 512);
      EXPECT_TRUE(output.status.ok()) << output.status;
      if (!output.status.ok()) break;
      logits.push_back(std::move(output.logits[0]));
      sequence.ids.push_back(output.tokens[0].token_id);
    }
    return logits;
  };
  TestSequence first = rig.NewSequence(PromptIds(spec, prompt), prompt + steps);
  const auto whole = go_on(first, steps);
  for (const int after : {1, steps / 2}) {
    TestSequence second =
        rig.NewSequence({first.ids.begin(), first.ids.begin() + prompt + after},
                        prompt + steps);
    const auto rest = go_on(second, steps - after);
    ASSERT_EQ(rest.size() + static_cast<size_t>(after), whole.size());
    for (size_t i = 0; i < rest.size(); ++i) {
      const auto& expected = whole[i + static_cast<size_t>(after)];
      ASSERT_EQ(std::memcmp(rest[i].data(), expected.data(),
                            expected.size() * sizeof(float)),
                0)
          << "taken over after " << after << ", step " << i;
    }
    EXPECT_EQ(second.ids, first.ids);
  }
}

// A callback is beside the queue; host work is on it.
TEST(DeviceQueue, ACopyTakesWhatTheHostWorkBeforeItWrote) {
  const auto backend = NewTestDevice(DType::kBF16);
  const auto queue = backend->NewQueue("filled");
  const auto other = backend->NewQueue("reader");
  const auto host = *backend->AllocateHost(64);
  const auto back = *backend->AllocateHost(64);
  const auto device = *backend->Allocate(64);
  for (int round = 1; round <= 5; ++round) {
    queue->HostWork([data = host->data(), round] {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      std::memset(data, round, 64);
    });
    backend->CopyToDevice(*queue, device->data(), host->data(), 64);
    other->WaitFor(*queue);
    backend->CopyToHost(*other, back->data(), device->data(), 64);
    other->Synchronize();
    EXPECT_EQ(std::to_integer<int>(back->data()[63]), round);
  }
}

// The likeliest id that may follow `behind`.
int32_t Likeliest(const std::vector<float>& logits, const FakeGrammar* grammar,
                  const std::vector<int32_t>& behind) {
  int32_t best = -1;
  for (int32_t id = 0; id < static_cast<int32_t>(logits.size()); ++id) {
    const auto at = static_cast<size_t>(id);
    if (grammar != nullptr && !grammar->Allows(grammar->Behind(behind), id)) {
      continue;
    }
    if (best < 0 || logits[at] > logits[static_cast<size_t>(best)]) best = id;
  }
  return best;
}

// Masks are made on host threads beside the step, and copied on a queue of
// their own: a draw heeds the one of its own row, a free one between them none.
TEST(DeviceMasks, EachDrawIsTheLikeliestThatItsOwnMaskAllows) {
  const json spec = LoadCases()["llama3_scaled_bf16"];
  TempDir dir;
  WriteCheckpoint(spec, dir);
  const auto backend = NewTestDevice(DType::kBF16);
  Rig rig(dir.path(), backend.get(), GoldenRigOptions(DType::kBF16));
  const int vocab = rig.spec().vocab_size;
  const int rounds = TestsRunOnGpu() ? 20 : 3;
  int changed = 0;
  for (int round = 0; round < rounds; ++round) {
    const auto seed = static_cast<uint64_t>(round);
    FakeGrammar one, other;
    one.seed = 2 * seed + 1;
    other.seed = 2 * seed + 2;
    one.vocab_size = other.vocab_size = vocab;
    // The other's text goes on behind two guesses.
    std::vector<int32_t> guesses;
    for (int i = 0; i < 2; ++i) {
      for (int32_t id = 0;; ++id) {
        if (!other.Allows(other.Behind(guesses), id)) continue;
        guesses.push_back(id);
        break;
      }
    }
    const std::vector<int32_t> prompt = PromptIds(spec, 5 + round);
    std::vector<int32_t> guessed = prompt;
    guessed.insert(guessed.end(), guesses.begin(), guesses.end());
    const auto run = [&](bool constrained, FakeConstraint* first,
                         FakeConstraint* last) {
      const RowDraw masked{.constrained = constrained};
      const std::vector<RowDraw> several(3, masked);
      const auto entry = [&](const TestSequence& sequence,
                             absl::Span<const RowDraw> draws,
                             TokenConstraint* constraint) {
        StepEntry made;
        made.tokens = sequence.ids;
        made.block_table = sequence.blocks;
        made.draws = draws;
        made.constraint = constrained ? constraint : nullptr;
        return made;
      };
      const TestSequence a = rig.NewSequence(prompt, 64);
      const TestSequence b = rig.NewSequence(prompt, 64);
      const TestSequence c = rig.NewSequence(guessed, 64);
      Step step;
      step.id = static_cast<uint64_t>(2 * round + (constrained ? 1 : 0) + 1);
      step.entries = {entry(a, absl::MakeConstSpan(&masked, 1), first),
                      entry(b, kOneDraw, nullptr), entry(c, several, last)};
      StepOutput output = rig.Run(step);
      EXPECT_TRUE(output.status.ok()) << output.status;
      return output;
    };
    const StepOutput free = run(false, nullptr, nullptr);
    FakeConstraint first(one, {});
    FakeConstraint last(other, {});
    const StepOutput masked = run(true, &first, &last);
    ASSERT_EQ(free.logits.size(), 5u);
    ASSERT_EQ(masked.tokens.size(), 5u);
    const auto expect = [&](size_t draw, const FakeGrammar* grammar,
                            const std::vector<int32_t>& behind) {
      EXPECT_EQ(masked.tokens[draw].token_id,
                Likeliest(free.logits[draw], grammar, behind))
          << "round " << round << ", draw " << draw;
      changed += masked.tokens[draw].token_id != free.tokens[draw].token_id;
    };
    expect(0, &one, {});
    expect(1, nullptr, {});
    for (size_t i = 0; i <= static_cast<size_t>(last.guessed()); ++i) {
      expect(2 + i, &other,
             {guesses.begin(), guesses.begin() + static_cast<int64_t>(i)});
    }
  }
  EXPECT_GT(changed, rounds);  // else this says little
}

int OpenDescriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

TEST(DeviceLeaks, NothingIsLeftOfManyEngines) {
  const json spec = LoadCases()["llama3_scaled_bf16"];
  TempDir dir;
  WriteCheckpoint(spec, dir);
  const auto use = [&] {
    const auto backend = NewTestDevice(DType::kBF16);
    Rig rig(dir.path(), backend.get(), GoldenRigOptions(DType::kBF16));
    TestSequence sequence = rig.NewSequence(PromptIds(spec, 5), 5);
    TestSequence* const one = &sequence;
    EXPECT_TRUE(rig.Advance({&one, 1}, 512).status.ok());
  };
  use();  // the driver's own memory and files
  const auto watcher = NewTestDevice(DType::kBF16);
  const size_t free = watcher->memory().free_bytes;
  const int descriptors = OpenDescriptors();
  for (int i = 0; i < (TestsRunOnGpu() ? 100 : 3); ++i) use();
  EXPECT_GE(watcher->memory().free_bytes + (size_t{8} << 20), free);
  EXPECT_LE(OpenDescriptors(), descriptors);
}

}  // namespace
}  // namespace tandem::engine
