// SPDX-License-Identifier: Apache-2.0
// Workers on GPUs, through real processes. Without a GPU their kernels run on
// the grid emulator and their NCCL is the double, which really moves the bytes
// from process to process and breaks on command. With TANDEM_TEST_DEVICE=cuda:0
// they are the real ones, both on that GPU, and what needs the double is
// skipped; NCCL_MULTI_RANK_GPU_ENABLE=1 then says that `nccl` is expected.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/handoff/nccl/double.h"
#include "tests/integration/cluster.h"

namespace tandem::integration {
namespace {

using handoff::nccl::testing::Act;
using handoff::nccl::testing::Fabric;
using handoff::nccl::testing::On;
using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

// Of the double. Each worker's own, as their `--device`.
constexpr int kDecodeGpu = 0;
constexpr int kPrefillGpu = 1;

std::string Environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool Eventually(const std::function<bool()>& condition,
                seconds timeout = seconds(20)) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (std::chrono::steady_clock::now() < end) {
    if (condition()) return true;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return condition();
}

int Count(const std::string& text, const std::string& what) {
  int count = 0;
  for (size_t at = text.find(what); at != std::string::npos;
       at = text.find(what, at + 1)) {
    ++count;
  }
  return count;
}

class GpuClusterTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string data = Environment("TANDEM_TEST_DATA");
    if (data.empty()) GTEST_SKIP() << "TANDEM_TEST_DATA is not set";
    model_ = data + "/models/stories260K";
    golden_ = json::parse(std::ifstream(model_ + "/golden.json"))["cases"];
    device_ = Environment("TANDEM_TEST_DEVICE");
    if (!device_.empty()) return;
    path_ = absl::StrCat(testing::TempDir(), "/fabric-", getpid());
    fabric_ = Fabric::Open(path_);
    ASSERT_NE(fabric_, nullptr) << path_;
    setenv("TANDEM_TEST_FABRIC", path_.c_str(), 1);
  }
  void TearDown() override {
    if (cluster_ != nullptr && !HasFatalFailure()) {
      EXPECT_EQ(cluster_->WhatIsLeft(), "");
    }
    if (fabric_ == nullptr) return;
    EXPECT_EQ(fabric_->orphan_sends.load(), 0);
    EXPECT_EQ(fabric_->changed_sends.load(), 0);
    cluster_.reset();
    std::filesystem::remove(path_);
  }

  // What puts a worker on a GPU.
  std::vector<std::string> Gpu(int ordinal, const std::string& dtype = "f32") {
    std::vector<std::string> arguments = {"--dtype", dtype};
    if (!device_.empty()) {
      arguments.insert(arguments.end(), {"--device", device_,
                                         "--gpu-memory-utilization", "0.3"});
    } else {
      arguments.insert(
          arguments.end(),
          {"--device", absl::StrCat("cuda:", ordinal), "--cuda-library",
           EMULATED_CUDA, "--nccl-library", DOUBLE_NCCL});
    }
    return arguments;
  }
  // Small enough for the emulator. Slabs of few positions, so that a prompt
  // takes several operations.
  void Begin(std::vector<std::string> prefill, std::vector<std::string> decode,
             const std::string& slab_bytes = "8KiB") {
    cluster_ = std::make_unique<Cluster>(ClusterOptions{
        .model_dir = model_,
        .router_arguments = router_arguments_,
        .worker_arguments = {"--num-kv-blocks", "64", "--max-num-seqs", "4",
                             "--max-num-batched-tokens", "64",
                             "--handoff-slab-bytes", slab_bytes},
        .prefill_arguments = std::move(prefill),
        .decode_arguments = std::move(decode)});
    const absl::Status status = cluster_->Start();
    ASSERT_TRUE(status.ok()) << status;
  }
  void BeginOnGpus(const std::string& slab_bytes = "8KiB") {
    std::vector<std::string> prefill = Gpu(kPrefillGpu);
    std::vector<std::string> decode = Gpu(kDecodeGpu);
    // Beside grpc, that is.
    for (auto* worker : {&prefill, &decode}) {
      worker->insert(worker->end(), {"--handoff", "nccl"});
    }
    Begin(prefill, decode, slab_bytes);
    if (HasFatalFailure() || !ExpectsNccl()) return;
    // The pair comes up behind its first link.
    ASSERT_TRUE(Run(0, 2).status.ok());
    ASSERT_TRUE(WaitUntilUp(1));
    ASSERT_EQ(cluster_->WhatIsLeft(), "");
  }
  bool ExpectsNccl() const {
    return device_.empty() || Environment("NCCL_MULTI_RANK_GPU_ENABLE") == "1";
  }
  // Communicators that came up so far, at both ends.
  bool WaitUntilUp(int times) {
    return Eventually([&] {
      return Count(cluster_->Log("prefill-0"), "handoff pair is up") >= times &&
             Count(cluster_->Log("decode-0"), "handoff pair is up") >= times;
    });
  }

  v1::GenerateRequest Request(size_t which, int tokens) {
    v1::GenerateRequest request =
        TextRequest(golden_[which]["prompt"].get<std::string>(), tokens);
    request.set_placement(v1::PLACEMENT_SPLIT);
    request.mutable_stopping()->set_ignore_eos(true);
    request.mutable_cache()->set_bypass_prefix_cache(true);
    return request;
  }
  Outcome Run(size_t which, int tokens) {
    return cluster_->Generate(Request(which, tokens));
  }
  std::vector<int32_t> Golden(size_t which, int tokens) {
    auto ids = golden_[which]["greedy_ids"].get<std::vector<int32_t>>();
    ids.resize(static_cast<size_t>(tokens));
    return ids;
  }
  // The router tries a way again a second after it failed.
  bool RunsBy(const std::string& way) {
    return Eventually([&] {
      const Outcome outcome = Run(1, 2);
      EXPECT_TRUE(outcome.status.ok()) << outcome.status;
      return outcome.done.timings().way() == way;
    });
  }
  void ExpectGolden(size_t which, int tokens, const Outcome& outcome) {
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.token_ids, Golden(which, tokens));
  }
  // Of the golden prompts, the one with the most positions.
  size_t Longest() const {
    size_t longest = 0;
    for (size_t i = 0; i < golden_.size(); ++i) {
      if (golden_[i]["prompt_ids"].size() >
          golden_[longest]["prompt_ids"].size()) {
        longest = i;
      }
    }
    return longest;
  }

  std::string model_;
  std::vector<std::string> router_arguments_;
  json golden_;
  std::string device_;  // of a machine that has one
  std::string path_;
  Fabric* fabric_ = nullptr;
  std::unique_ptr<Cluster> cluster_;
};

TEST_F(GpuClusterTest, EveryGoldenComesOutExactly) {
  BeginOnGpus();
  ASSERT_FALSE(HasFatalFailure());
  for (size_t i = 0; i < golden_.size(); ++i) {
    const Outcome outcome = Run(i, 8);
    ExpectGolden(i, 8, outcome);
    EXPECT_EQ(outcome.done.timings().way(), ExpectsNccl() ? "nccl" : "grpc");
    EXPECT_FALSE(outcome.done.not_reproducible());
  }
  if (fabric_ != nullptr) {
    EXPECT_EQ(fabric_->gpus[kDecodeGpu].most_receives.load(), 1);
  }
  if (!ExpectsNccl()) return;
  // Told once a second. Dashboards hang on the names and labels.
  const auto metric = [&](const std::string& name, const char* event = "") {
    return cluster_->Metrics("decode-0")[absl::StrCat(
        "tandem_nccl_", name, "{model_name=\"stories260K\",role=\"decode\"",
        event, "}")];
  };
  EXPECT_TRUE(Eventually([&] { return metric("communicators") == 1; }));
  EXPECT_GT(metric("communicator_bytes"), 0);
  EXPECT_GT(metric("operations_total"), 7);
  EXPECT_EQ(metric("pairs_total", ",event=\"up\""), 1);
  EXPECT_EQ(metric("pairs_total", ",event=\"broken\""), 0);
  EXPECT_EQ(cluster_->WhatIsLeft(), "");
  // A pair that is up does not hold its workers up.
  for (const char* worker : {"prefill-0", "decode-0"}) {
    cluster_->Signal(worker, SIGTERM);
    EXPECT_EQ(cluster_->WaitForExit(worker, seconds(10)), 128 + SIGTERM);
  }
}

// One line says so, and the other ways serve.
TEST_F(GpuClusterTest, WithoutNcclTheOtherWaysServe) {
  if (!device_.empty()) GTEST_SKIP() << "a double's";
  unsetenv("TANDEM_TEST_FABRIC");
  Begin(Gpu(kPrefillGpu), Gpu(kDecodeGpu));
  ASSERT_FALSE(HasFatalFailure());
  Outcome outcome = Run(1, 2);
  ExpectGolden(1, 2, outcome);
  EXPECT_EQ(outcome.done.timings().way(), "shm");
  for (const char* worker : {"prefill-0", "decode-0"}) {
    EXPECT_THAT(cluster_->Log(worker),
                AllOf(HasSubstr("\"ways\":\"shm,grpc\""),
                      HasSubstr("no NCCL: libnccl.so.2 cannot be loaded")));
  }
  EXPECT_EQ(cluster_->WhatIsLeft(), "");

  setenv("TANDEM_TEST_FABRIC", path_.c_str(), 1);
  Begin(Gpu(kDecodeGpu), Gpu(kDecodeGpu));
  ASSERT_FALSE(HasFatalFailure());
  outcome = Run(1, 2);
  ExpectGolden(1, 2, outcome);
  EXPECT_EQ(outcome.done.timings().way(), "shm");
  EXPECT_THAT(cluster_->Log("decode-0"),
              AllOf(HasSubstr("handoff pair goes without NCCL"),
                    HasSubstr("both workers are on GPU double-gpu-0"),
                    HasSubstr("NCCL_MULTI_RANK_GPU_ENABLE=1")));
}

// In the middle of a transfer of many operations. The answer is the same, by
// the next way; the pair comes back; the log tells what it was.
TEST_F(GpuClusterTest, AFaultOfNcclCostsAnAttemptAndNothingElse) {
  if (!device_.empty()) GTEST_SKIP() << "a double's";
  BeginOnGpus();
  ASSERT_FALSE(HasFatalFailure());
  const struct {
    const char* what;
    int gpu;
    On on;
    Act act;
    const char* log;    // of whom
    const char* stage;  // null: the pair stays up
    const char* cause;
  } kFaults[] = {
      {"the receive fails", kDecodeGpu, On::kReceive, Act::kFail, "decode-0",
       "receive", "remote process exited"},
      {"the send stalls", kPrefillGpu, On::kSend, Act::kStall, "prefill-0",
       "send", "did not end within 2000 ms"},
      {"a bit changes", kDecodeGpu, On::kReceive, Act::kCorrupt, "decode-0",
       nullptr, nullptr},
  };
  const size_t prompt = Longest();
  int ups = 1, by_grpc = 0;
  for (const auto& fault : kFaults) {
    SCOPED_TRACE(fault.what);
    fabric_->Arm(fault.gpu, fault.on, fault.act, /*skip=*/3);
    const Outcome outcome = Run(prompt, 6);
    ExpectGolden(prompt, 6, outcome);
    // Or the decode worker did it alone. What is merely wrong once may be sent
    // again the same way.
    if (fault.stage != nullptr) {
      EXPECT_THAT(outcome.done.timings().way(), AnyOf("grpc", ""));
    }
    by_grpc += outcome.done.timings().way() == "grpc";
    EXPECT_GE(outcome.done.timings().retries(), 1);
    if (fault.stage != nullptr) {
      std::string broke;
      const std::string log = cluster_->Log(fault.log);
      const size_t at = log.rfind("handoff pair broke");
      if (at != std::string::npos)
        broke = log.substr(at, log.find('\n', at) - at);
      EXPECT_THAT(
          broke,
          AllOf(HasSubstr("\"pair\":\"prefill-0>decode-0\""),
                HasSubstr(absl::StrCat("\"stage\":\"", fault.stage, "\"")),
                HasSubstr("\"bytes\":"), testing::Not(HasSubstr("\"bytes\":0")),
                HasSubstr(fault.cause)));
      EXPECT_TRUE(WaitUntilUp(++ups));
    }
    EXPECT_TRUE(RunsBy("nccl"));
    EXPECT_EQ(cluster_->WhatIsLeft(), "");
  }
  EXPECT_GE(by_grpc, 1);
}

// With the slabs of production, and workers killed at any time.
TEST_F(GpuClusterTest, KilledWorkersOfARealGpuComeBack) {
  if (device_.empty()) GTEST_SKIP() << "a GPU's";
  BeginOnGpus("8MiB");
  ASSERT_FALSE(HasFatalFailure());
  const std::string way = ExpectsNccl() ? "nccl" : "grpc";
  const size_t prompt = Longest();
  for (int round = 0; round < 10; ++round) {
    const char* const victim = round % 2 == 0 ? "prefill-0" : "decode-0";
    SCOPED_TRACE(absl::StrCat(round, " ", victim));
    EXPECT_TRUE(RunsBy(way));
    Outcome outcome;
    std::thread client([&] { outcome = Run(prompt, 90); });
    std::this_thread::sleep_for(milliseconds(2 + 7 * round));
    cluster_->Kill(victim);
    EXPECT_TRUE(cluster_->Restart(victim).ok());
    client.join();
    ExpectGolden(prompt, 90, outcome);
    const absl::Status ready = cluster_->WaitUntilReady(1, 1, seconds(60));
    ASSERT_TRUE(ready.ok()) << ready;
  }
  EXPECT_TRUE(RunsBy(way));
}

TEST_F(GpuClusterTest, AWorkerKilledInAHandoffIsMadeUpFor) {
  if (!device_.empty()) GTEST_SKIP() << "a double's";
  BeginOnGpus();
  ASSERT_FALSE(HasFatalFailure());
  const size_t prompt = Longest();
  for (const char* victim : {"prefill-0", "decode-0"}) {
    SCOPED_TRACE(victim);
    fabric_->Arm(kPrefillGpu, On::kSend, Act::kStall, /*skip=*/3);
    const int64_t before = fabric_->gpus[kDecodeGpu].operations.load();
    Outcome outcome;
    std::thread client([&] { outcome = Run(prompt, 6); });
    EXPECT_TRUE(Eventually([&] {
      return fabric_->gpus[kDecodeGpu].operations.load() >= before + 3 &&
             fabric_->gpus[kDecodeGpu].receives.load() > 0;
    }));
    cluster_->Kill(victim);
    fabric_->Disarm();
    if (victim == std::string("decode-0")) {
      fabric_->gpus[kDecodeGpu].receives = 0;  // it died with its holder
    }
    EXPECT_TRUE(cluster_->Restart(victim).ok());
    client.join();
    ExpectGolden(prompt, 6, outcome);
    const absl::Status ready = cluster_->WaitUntilReady(1, 1, seconds(30));
    ASSERT_TRUE(ready.ok()) << ready;
    EXPECT_TRUE(RunsBy("nccl"));
    EXPECT_EQ(cluster_->WhatIsLeft(), "");
  }
}

// A call that never returns: the process ends, as the GPU's failures end it.
TEST_F(GpuClusterTest, ACommunicatorThatStaysTakesItsProcessAlong) {
  if (!device_.empty()) GTEST_SKIP() << "a double's";
  BeginOnGpus();
  ASSERT_FALSE(HasFatalFailure());
  fabric_->Arm(kPrefillGpu, On::kAbort, Act::kHang);
  fabric_->Arm(kPrefillGpu, On::kSend, Act::kFail, /*skip=*/3);
  const size_t prompt = Longest();
  const Outcome outcome = Run(prompt, 6);
  ExpectGolden(prompt, 6, outcome);
  EXPECT_NE(outcome.done.timings().way(), "nccl");
  EXPECT_EQ(cluster_->WaitForExit("prefill-0", seconds(20)), 70);
  EXPECT_THAT(
      cluster_->Log("prefill-0"),
      HasSubstr("fatal: GPU: the communicator of prefill-0>decode-0 did "
                "not go within"));
  ASSERT_TRUE(cluster_->Restart("prefill-0").ok());
  ASSERT_TRUE(cluster_->WaitUntilReady(1, 1, seconds(30)).ok());
  EXPECT_TRUE(RunsBy("nccl"));
}

// A pair of a GPU and a CPU converts what it hands over, and says so.
TEST_F(GpuClusterTest, GpusAndCpusWorkTogetherIfTheyMay) {
  const std::vector<std::string> cpu = {"--device", "cpu", "--dtype", "f32"};
  const struct {
    const char* what;
    bool gpu_prefills;
    const char* dtype;  // of the GPU; the CPU's is f32
    const char* way;
  } kPairs[] = {
      {"f32 to f32", true, "f32", "shm"},
      {"f32 from f32", false, "f32", "grpc"},
      {"bf16 to f32", true, "bf16", "grpc"},
      {"f32 to bf16", false, "bf16", "shm"},
  };
  const size_t prompt = Longest();
  for (const auto& pair : kPairs) {
    SCOPED_TRACE(pair.what);
    std::vector<std::string> prefill =
        pair.gpu_prefills ? Gpu(kPrefillGpu, pair.dtype) : cpu;
    std::vector<std::string> decode =
        pair.gpu_prefills ? cpu : Gpu(kDecodeGpu, pair.dtype);
    for (auto* worker : {&prefill, &decode}) {
      worker->insert(worker->end(),
                     {"--mixed-numerics", "--handoff", pair.way});
    }
    Begin(prefill, decode);
    ASSERT_FALSE(HasFatalFailure());
    const Outcome outcome = Run(prompt, 6);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.done.workers().prefill(), "prefill-0");
    EXPECT_EQ(outcome.done.timings().way(), pair.way);
    EXPECT_TRUE(outcome.done.not_reproducible());
    EXPECT_EQ(outcome.token_ids.size(), 6u);
    // The emulator has the CPU's bits in f32. In bf16 KV the first tokens of
    // this prompt are clear enough to be the same.
    if (device_.empty() || std::string(pair.dtype) == "f32") {
      ExpectGolden(prompt, 6, outcome);
    }
    EXPECT_EQ(cluster_->WhatIsLeft(), "");
  }
}

// What a request may ask for, each through a handoff.
struct Asked {
  const char* what;
  std::function<void(v1::GenerateRequest&)> ask;
};
std::vector<Asked> EverythingAsked() {
  const auto draws = [](v1::GenerateRequest& request, float temperature) {
    request.mutable_sampling()->set_temperature(temperature);
    request.mutable_sampling()->set_seed(7);
    request.mutable_output()->set_logprobs(2);
    return request.mutable_sampling();
  };
  return {
      {"top-p", [=](auto& request) { draws(request, 0.9f)->set_top_p(0.8f); }},
      {"min-p, penalties and bad words",
       [=](auto& request) {
         v1::SamplingOptions* const sampling = draws(request, 1.2f);
         sampling->set_min_p(0.02f);
         sampling->set_repetition_penalty(1.3f);
         sampling->set_frequency_penalty(0.4f);
         sampling->set_presence_penalty(-0.2f);
         for (const char* word : {"there", "was", "a little"}) {
           sampling->add_bad_words(word);
         }
       }},
      {"the best of three",
       [=](auto& request) {
         draws(request, 0.9f)->set_n(2);
         request.mutable_sampling()->set_best_of(3);
       }},
      {"beams",
       [](auto& request) {
         request.mutable_sampling()->set_n(3);
         request.mutable_beam()->set_width(3);
         request.mutable_output()->set_logprobs(2);
       }},
      {"a scored prompt",
       [](auto& request) { request.mutable_output()->set_prompt_logprobs(2); }},
      {"guesses",
       [](auto& request) {
         request.set_text("The dog ran. The dog ran. The dog ran. The dog");
         request.mutable_output()->set_logprobs(2);
       }},
      {"attention weights",
       [](auto& request) {
         request.mutable_output()->mutable_attention()->add_layers(0);
         request.mutable_output()->mutable_attention()->add_layers(4);
       }},
      {"no KV cache",
       [](auto& request) { request.mutable_cache()->set_no_kv_cache(true); }}};
}

// Of attention weights, which are no part of what tokens are drawn from: their
// sums may be taken in another order. Infinite where their number differs.
double LargestDifference(const v1::GeneratedSequence& a,
                         const v1::GeneratedSequence& b) {
  const auto flat = [](const v1::GeneratedSequence& sequence) {
    std::vector<float> weights;
    for (const v1::TokenAttention& token : sequence.attention()) {
      for (const v1::AttentionWeights& row : token.layers()) {
        weights.insert(weights.end(), row.weights().begin(),
                       row.weights().end());
      }
    }
    return weights;
  };
  const std::vector<float> of_a = flat(a), of_b = flat(b);
  if (of_a.size() != of_b.size()) return INFINITY;
  double largest = 0;
  for (size_t i = 0; i < of_a.size(); ++i) {
    largest = std::max(largest, std::abs(double{of_a[i]} - double{of_b[i]}));
  }
  return largest;
}

TEST_F(GpuClusterTest, WhateverIsAskedForIsTheCpusInF32) {
  router_arguments_ = {"--enable-attention-output", "--enable-no-kv-cache"};
  const std::vector<Asked> all = EverythingAsked();
  std::vector<Outcome> outcomes[2];
  for (const bool gpu : {false, true}) {
    std::vector<std::string> prefill = {"--device", "cpu", "--dtype", "f32"};
    std::vector<std::string> decode = prefill;
    if (gpu) prefill = Gpu(kPrefillGpu), decode = Gpu(kDecodeGpu);
    for (auto* worker : {&prefill, &decode}) {
      worker->insert(worker->end(),
                     {"--enable-attention-output", "--handoff", "shm"});
    }
    decode.insert(
        decode.end(),
        {"--speculative-config",
         R"({"method": "ngram", "num_speculative_tokens": 3, "adaptive": false,
             "prompt_lookup_min": 1, "prompt_lookup_max": 4})"});
    Begin(prefill, decode);
    ASSERT_FALSE(HasFatalFailure());
    int guesses = 0;
    for (const Asked& one : all) {
      SCOPED_TRACE(one.what);
      v1::GenerateRequest request = Request(1, 7);
      one.ask(request);
      outcomes[gpu].push_back(cluster_->Generate(request));
      const Outcome& outcome = outcomes[gpu].back();
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      EXPECT_EQ(outcome.done.workers().prefill(), "prefill-0");
      guesses += outcome.done.usage().accepted_prediction_tokens() +
                 outcome.done.usage().rejected_prediction_tokens();
    }
    EXPECT_GT(guesses, 0);
    EXPECT_EQ(cluster_->WhatIsLeft(), "");
  }
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(all[i].what);
    const Outcome& cpu = outcomes[0][i];
    const Outcome& gpu = outcomes[1][i];
    ASSERT_EQ(gpu.sequences.size(), cpu.sequences.size());
    for (const auto& [index, sequence] : cpu.sequences) {
      EXPECT_EQ(sequence.token_ids_size(), 7) << index;
      v1::GeneratedSequence on_gpu = gpu.sequences.at(index);
      v1::GeneratedSequence on_cpu = sequence;
      EXPECT_LE(LargestDifference(on_gpu, on_cpu), 2e-5);
      on_gpu.clear_attention();
      on_cpu.clear_attention();
      // Log probabilities by all their digits.
      EXPECT_EQ(on_gpu.DebugString(), on_cpu.DebugString());
    }
    EXPECT_EQ(gpu.prompt_logprobs.DebugString(),
              cpu.prompt_logprobs.DebugString());
  }
  EXPECT_EQ(outcomes[0][2].sequences.size(), 2u);
  EXPECT_EQ(outcomes[0][3].sequences.size(), 3u);
  EXPECT_EQ(outcomes[0][4].prompt_logprobs.tokens_size(), 5);
  EXPECT_EQ(outcomes[0][6].sequences.at(0).attention_size(), 7);
}

TEST_F(GpuClusterTest, CodesGiveOneTextWhereverItIsPrefilled) {
  std::vector<std::string> prefill = Gpu(kPrefillGpu, "bf16");
  std::vector<std::string> decode = Gpu(kDecodeGpu, "bf16");
  for (auto* worker : {&prefill, &decode}) {
    worker->insert(worker->end(), {"--handoff", "shm", "--quantization", "int8",
                                   "--kv-cache-dtype", "int4"});
  }
  Begin(prefill, decode);
  ASSERT_FALSE(HasFatalFailure());
  v1::GenerateRequest request = Request(1, 6);
  const Outcome split = cluster_->Generate(request);
  ASSERT_TRUE(split.status.ok()) << split.status;
  EXPECT_EQ(split.done.workers().prefill(), "prefill-0");
  EXPECT_EQ(split.token_ids.size(), 6u);
  request.set_placement(v1::PLACEMENT_LOCAL);
  EXPECT_EQ(split.token_ids, cluster_->Generate(request).token_ids);
}

TEST_F(GpuClusterTest, GpusAndCpusAreNoPairUnlessAllowed) {
  Begin(Gpu(kPrefillGpu), {"--device", "cpu", "--dtype", "f32"});
  ASSERT_FALSE(HasFatalFailure());
  const auto state = cluster_->State();
  ASSERT_TRUE(state.ok()) << state.status();
  ASSERT_EQ(state->avoided_pairs_size(), 1);
  EXPECT_THAT(state->avoided_pairs(0).reason(),
              AllOf(HasSubstr("fingerprint numerics: cuda-"),
                    HasSubstr(" != cpu-"), HasSubstr("--mixed-numerics")));
  // So the decode worker does it alone.
  const Outcome alone = Run(1, 2);
  ExpectGolden(1, 2, alone);
  EXPECT_EQ(alone.done.workers().prefill(), "");
  EXPECT_FALSE(alone.done.not_reproducible());
}

}  // namespace
}  // namespace tandem::integration
