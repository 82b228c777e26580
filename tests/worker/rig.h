// SPDX-License-Identifier: Apache-2.0
// Decode and prefill workers on virtual time under a scripted router: the
// cores that the binaries link, fake devices, the simulation's network. A test
// says what the router does and reads what it heard. Every token is compared
// on arrival; Rig::ExpectNothingLeft ends every test.

#ifndef TANDEM_TESTS_WORKER_RIG_H_
#define TANDEM_TESTS_WORKER_RIG_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/lifecycle.h"
#include "common/random.h"
#include "common/testing/virtual_loop.h"
#include "decode_worker/core.h"
#include "engine/kv/kv_offload.h"
#include "engine/testing/fake_executor.h"
#include "prefill_worker/core.h"
#include "tandem/v1/decode.pb.h"
#include "tandem/v1/prefill.pb.h"
#include "tests/simulation/network.h"
#include "tests/simulation/parts.h"

namespace tandem::worker {

class Rig;

struct MachineOptions {
  int block_size = 16;
  int num_blocks = 64;
  absl::Duration step = absl::Milliseconds(4);  // one per layer and change
  absl::Duration copy = absl::Microseconds(100);
  int offload_blocks = 0;  // of memory, for what a decode worker evicts
};

// Passes everything on, and notes which sequences each step had. Or swallows
// what is named: nothing of it is heard again.
class StepLog final : public engine::Executor {
 public:
  explicit StepLog(engine::FakeExecutor* inner) : inner_(inner) {}
  void Submit(const engine::Step* step,
              engine::StepListener* listener) override;
  void Gather(const engine::KvPart& part, kernels::DType wire, uint64_t key,
              std::byte* staging,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override;
  void Scatter(const engine::KvPart& part, kernels::DType wire,
               const std::byte* staging,
               absl::AnyInvocable<void()> done) override;
  void Digest(const engine::KvPart& part, kernels::DType wire, uint64_t key,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override;
  const kernels::KvShape& kv_shape() const override {
    return inner_->kv_shape();
  }
  std::vector<std::vector<engine::SequenceId>> steps;
  std::string swallows;  // "step", "gather", "scatter", "digest"
  void Forget() { swallowed_.clear(); }

 private:
  template <typename Done>
  bool Swallow(const char* what, Done* done);

  engine::FakeExecutor* const inner_;
  std::vector<absl::AnyInvocable<void()>> swallowed_;  // with what they hold
};

// One worker's process.
struct Machine {
  Machine(Rig* rig, const std::string& name, const MachineOptions& options);
  virtual ~Machine() = default;
  virtual v1::WorkerLoad Load() const = 0;
  virtual absl::Status CheckCore() const = 0;
  virtual v1::WorkerRole role() const = 0;
  virtual int64_t progress() const = 0;
  virtual bool has_work() const = 0;
  v1::WorkerRef ref() const;
  const std::string& name() const { return host->name; }

  std::shared_ptr<simulation::Host> host;
  SeededRandom random;
  std::string incarnation;
  std::unique_ptr<engine::KvPool> pool;
  std::unique_ptr<engine::FakeExecutor> device;
  std::unique_ptr<StepLog> log;  // in front of the device
  std::vector<std::byte> offload_memory;
  std::unique_ptr<engine::KvOffload> offload;  // may be null
};

struct DecodeMachine final : Machine {
  using Machine::Machine;
  v1::WorkerLoad Load() const override { return core->Load(); }
  absl::Status CheckCore() const override { return core->CheckInvariants(); }
  v1::WorkerRole role() const override { return v1::WORKER_ROLE_DECODE; }
  int64_t progress() const override { return core->progress(); }
  bool has_work() const override { return core->has_work(); }
  std::unique_ptr<decode_worker::DecodeCore> core;
};

struct PrefillMachine final : Machine {
  using Machine::Machine;
  v1::WorkerLoad Load() const override { return core->Load(); }
  absl::Status CheckCore() const override { return core->CheckInvariants(); }
  v1::WorkerRole role() const override { return v1::WORKER_ROLE_PREFILL; }
  int64_t progress() const override { return core->progress(); }
  bool has_work() const override { return core->has_work(); }
  std::unique_ptr<prefill_worker::PrefillCore> core;
};

// What a process does each second for its liveness.
class Pulse {
 public:
  static constexpr absl::Duration kLimit = absl::Seconds(10);

  explicit Pulse(const Machine* machine)
      : machine_(machine),
        loop_(&machine->host->loop),
        watchdog_(kLimit, loop_->Now()),
        timer_(loop_) {
    Beat();
  }
  bool lives() const { return watchdog_.Check(loop_->Now()).ok(); }
  // It never was sick.
  bool always_lived() const { return always_lived_; }

 private:
  void Beat() {
    timer_.Start(absl::Seconds(1), [this] { Beat(); });
    watchdog_.Beat(loop_->Now(), machine_->progress(), machine_->has_work());
    always_lived_ &= lives();
  }

  const Machine* const machine_;
  Loop* const loop_;
  Watchdog watchdog_;
  bool always_lived_ = true;
  Timer timer_;
};

// What a client wants.
struct Job {
  std::vector<int32_t> prompt;
  int max_tokens = 8;
  float temperature = 0;
  uint64_t seed = 1;
  std::vector<int32_t> stop_token_ids = {};
  std::vector<int32_t> output = {};  // held by the router already
  bool bypass_prefix_cache = false;
  std::string cache_salt = {};
  bool suspect = false;
  absl::Duration deadline = absl::Minutes(5);
  absl::Duration age = absl::ZeroDuration();

  v1::SamplingParams Sampling() const;
  v1::StoppingParams Stopping() const;
  std::vector<int32_t> Expected(
      const engine::FakeModel& model = simulation::Model()) const;
};

// `count` tokens; equal seeds, equal tokens; a longer one begins alike.
std::vector<int32_t> Prompt(int count, int seed = 0);

// The router's side of one sequence: its Decode call and its Prefill calls.
class Request {
 public:
  Request(Rig* rig, Job job);
  ~Request();

  // ---- What the router does.
  // Opens the Decode call; without `prefill`, for the short way.
  void Decode(DecodeMachine* decode, PrefillMachine* prefill);
  void Prefill(PrefillMachine* prefill, const v1::AttemptOpened& opened);
  // Names the decode worker of a Prefill call without a Decode call.
  void Listen(DecodeMachine* decode) { decode_machine_ = decode; }
  // Asks for the attempt after `attempt` (0: the last one opened).
  void Retry(PrefillMachine* prefill, uint32_t attempt = 0);
  void DropDecode();
  void DropPrefill();
  void PauseReading(bool paused);

  bool prefills = true;  // calls Prefill when an attempt opens
  bool retries = false;  // answers every `dead` with a retry
  bool beats = true;     // says every half second that it is there
  bool prefill_beats_too = true;
  bool says_not_reading = false;  // in beats
  std::string request_id;         // to be changed before Decode
  v1::DecodeOpen tweak_open;      // merged over the open
  v1::PrefillOpen tweak_prefill;
  // Asks for log probabilities of the prompt with so many alternatives.
  std::optional<int> scoring;
  void PausePrefill(bool paused) { prefill_->PauseReading(paused); }

  // ---- What it heard.
  std::vector<int32_t> tokens;  // output, delivered once and in order
  std::vector<std::vector<float>> attention;  // of each of them
  std::vector<v1::Work> works;                // told with tokens
  int scores = 0;       // of the prompt's tokens, each right, once and in order
  int most_scores = 0;  // in one message
  int repeated = 0;     // that came a second time
  std::vector<v1::AttemptOpened> opened;
  std::vector<uint32_t> started;
  std::vector<v1::AttemptDead> dead;
  std::vector<v1::DecodedHypothesis> hypotheses;  // of a beam search
  std::optional<v1::DecodeFinished> finished;
  std::optional<absl::Status> decode_ended;
  std::optional<v1::PrefillStarted> prefill_started;
  std::optional<v1::PrefillFirstToken> first;
  std::optional<v1::PrefillDone> done;
  std::optional<absl::Status> prefill_ended;
  int decode_beats = 0, prefill_beats = 0;
  // Every event's first letter: Opened Started Dead Token Hypothesis Finished
  // and scores as P;
  // Prefill said First token and Done in lower case.
  std::string story;
  std::vector<absl::Time> token_times;

  std::string reason() const;  // of the end of the Decode call
  std::string prefill_reason() const;
  // All tokens came, by the decode worker's word.
  void ExpectAllRight() const;

 private:
  struct DecodeEars;
  struct PrefillEars;
  void OnDecode(const v1::DecodeResponse& message);
  void OnPrefill(const v1::PrefillResponse& message);
  void Take(int position, const v1::Token& token);
  void TakeScores(const v1::ScoredTokens& part);
  template <typename Open>
  void AskForScores(Open* open) const;
  void Beat();

  Rig* const rig_;
  const Job job_;
  const std::vector<int32_t> expected_;
  DecodeMachine* decode_machine_ = nullptr;
  PrefillMachine* prefill_machine_ = nullptr;
  std::unique_ptr<DecodeEars> decode_ears_;
  std::unique_ptr<PrefillEars> prefill_ears_;
  std::unique_ptr<Stream<v1::DecodeRequest, v1::DecodeResponse>> decode_;
  std::unique_ptr<Stream<v1::PrefillRequest, v1::PrefillResponse>> prefill_;
  Timer beat_;
};

// Lets in who has blocks now, however few are left to grow into.
inline void AdmitByBlocks(decode_worker::DecodeOptions* options) {
  options->admission_factor = 9;
  options->expected_new_tokens = 1;
}

// A compiler that does not come to it. Outlives the machines.
struct StuckGrammars final : Grammars {
  uint64_t Compile(GrammarOrder order, Done done) override {
    orders.push_back(std::move(order));
    waiting.push_back(std::move(done));
    return orders.size();
  }
  void Cancel(uint64_t number) override { cancelled.push_back(number); }
  std::vector<GrammarOrder> orders;
  std::vector<Done> waiting;
  std::vector<uint64_t> cancelled;
};

class Rig {
 public:
  // `window`: of the model's layers, but for the first `full_layers`; 0: they
  // see all.
  explicit Rig(uint64_t seed = 1, int window = 0, int full_layers = 0);
  ~Rig();

  template <typename Options>
  using Tweak = std::function<void(Options*)>;
  DecodeMachine* AddDecode(
      const std::string& name = "decode", const MachineOptions& options = {},
      const Tweak<decode_worker::DecodeOptions>& tweak = nullptr);
  PrefillMachine* AddPrefill(
      const std::string& name = "prefill", const MachineOptions& options = {},
      const Tweak<prefill_worker::PrefillOptions>& tweak = nullptr);
  // The process is gone; what it held in memory goes with it.
  void Crash(Machine* machine) { network.Crash(machine->host); }

  Request* NewRequest(Job job);
  // NewRequest, opened at both.
  Request* Split(Job job, DecodeMachine* decode, PrefillMachine* prefill);
  Request* Local(Job job, DecodeMachine* decode);

  // Steps of a millisecond until `done`; fails after `limit`.
  void RunUntil(const std::function<bool()>& done,
                absl::Duration limit = absl::Seconds(60));
  void RunUntilEnded(absl::Duration limit = absl::Seconds(60));
  void Run(absl::Duration duration) { world.RunFor(duration); }

  // No block, ticket, slab, call or violation is left on any live machine,
  // and all sums are right. Takes the quarantine's time.
  void ExpectNothingLeft();
  void ExpectInvariants();

  const engine::FakeModel model;
  VirtualLoop world;
  SeededRandom random;
  simulation::Network network;
  std::shared_ptr<simulation::Host> router;
  std::vector<std::unique_ptr<Request>> requests;
  std::vector<std::unique_ptr<DecodeMachine>> decodes;
  std::vector<std::unique_ptr<PrefillMachine>> prefills;
};

}  // namespace tandem::worker

#endif  // TANDEM_TESTS_WORKER_RIG_H_
