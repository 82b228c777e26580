// SPDX-License-Identifier: Apache-2.0
#include "tests/worker/rig.h"

#include <gtest/gtest.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "tests/simulation/parts.h"
#include "worker/convert.h"

namespace tandem::worker {

// ---- Who shares a step

void StepLog::Submit(const engine::Step* step, engine::StepListener* listener) {
  steps.emplace_back();
  for (const engine::StepEntry& entry : step->entries) {
    steps.back().push_back(entry.sequence);
  }
  if (swallows != "step") inner_->Submit(step, listener);
}

template <typename Done>
bool StepLog::Swallow(const char* what, Done* done) {
  if (swallows != what) return false;
  swallowed_.push_back([done = std::move(*done)] {});
  return true;
}

void StepLog::Gather(const engine::KvPart& part, kernels::DType wire,
                     uint64_t key, std::byte* staging,
                     absl::AnyInvocable<void(kernels::KvDigest)> done) {
  if (Swallow("gather", &done)) return;
  inner_->Gather(part, wire, key, staging, std::move(done));
}

void StepLog::Scatter(const engine::KvPart& part, kernels::DType wire,
                      const std::byte* staging,
                      absl::AnyInvocable<void()> done) {
  if (Swallow("scatter", &done)) return;
  inner_->Scatter(part, wire, staging, std::move(done));
}

void StepLog::Digest(const engine::KvPart& part, kernels::DType wire,
                     uint64_t key,
                     absl::AnyInvocable<void(kernels::KvDigest)> done) {
  if (Swallow("digest", &done)) return;
  inner_->Digest(part, wire, key, std::move(done));
}

// ---- Machines

Machine::Machine(Rig* rig, const std::string& name,
                 const MachineOptions& options)
    : host(std::make_shared<simulation::Host>(&rig->world, name)),
      random(rig->random.Next()),
      incarnation(random.Bytes(16)),
      pool(std::make_unique<engine::KvPool>(
          options.num_blocks, options.block_size, /*owner_share=*/1,
          simulation::WindowOf(rig->model).parts)) {
  engine::FakeExecutorOptions device_options;
  device_options.model = rig->model;
  if (rig->model.full_layers > 0) device_options.cells = &pool->cells();
  device_options.num_blocks = options.num_blocks;
  device_options.block_size = options.block_size;
  device_options.seed = random.Next();
  device_options.step_base = options.step;
  device_options.copy_base = options.copy;
  device = std::make_unique<engine::FakeExecutor>(device_options, &host->loop);
  log = std::make_unique<StepLog>(device.get());
  if (options.offload_blocks == 0) return;
  offload_memory.resize(
      static_cast<size_t>(options.offload_blocks * device->block_bytes()));
  offload = std::make_unique<engine::KvOffload>(
      engine::KvOffloadOptions{.memory_blocks = options.offload_blocks},
      &host->loop, device.get(), pool.get(), offload_memory.data(),
      /*file=*/nullptr);
}

v1::WorkerRef Machine::ref() const {
  return simulation::MakeHello(name(), role(), incarnation, device->kv_shape())
      .worker();
}

// ---- Jobs

v1::SamplingParams Job::Sampling() const {
  v1::SamplingParams sampling;
  sampling.set_temperature(temperature);
  sampling.set_top_p(1);
  sampling.set_seed(seed);
  sampling.set_logprobs(-1);
  return sampling;
}

v1::StoppingParams Job::Stopping() const {
  v1::StoppingParams stopping;
  stopping.set_max_tokens(max_tokens);
  stopping.mutable_stop_token_ids()->Add(stop_token_ids.begin(),
                                         stop_token_ids.end());
  return stopping;
}

std::vector<int32_t> Job::Expected(const engine::FakeModel& model) const {
  if (max_tokens == 0) return {};
  return engine::ExpectedUntilStop(
      model, prompt, static_cast<int>(prompt.size()), ToEngine(Sampling(), 0),
      ToEngine(Stopping()), simulation::kMaxModelLen);
}

std::vector<int32_t> Prompt(int count, int seed) {
  SeededRandom random(static_cast<uint64_t>(seed) + 77);
  std::vector<int32_t> prompt;
  for (int i = 0; i < count; ++i) {
    prompt.push_back(static_cast<int32_t>(10 + random.Below(400)));
  }
  return prompt;
}

// ---- Request

struct Request::DecodeEars final : StreamHandler<v1::DecodeResponse> {
  explicit DecodeEars(Request* r) : request(r) {}
  void OnMessage(v1::DecodeResponse message) override {
    request->OnDecode(message);
  }
  void OnClosed(absl::Status status) override {
    request->decode_ended = std::move(status);
  }
  Request* const request;
};

struct Request::PrefillEars final : StreamHandler<v1::PrefillResponse> {
  explicit PrefillEars(Request* r) : request(r) {}
  void OnMessage(v1::PrefillResponse message) override {
    request->OnPrefill(message);
  }
  void OnClosed(absl::Status status) override {
    request->prefill_ended = std::move(status);
  }
  Request* const request;
};

Request::Request(Rig* rig, Job job)
    : request_id(rig->random.Bytes(16)),
      tokens(job.output),
      rig_(rig),
      job_(std::move(job)),
      expected_(job_.Expected(rig->model)),
      decode_ears_(std::make_unique<DecodeEars>(this)),
      beat_(&rig->router->loop) {
  Beat();
}

Request::~Request() = default;

void Request::Beat() {
  beat_.Start(absl::Milliseconds(500), [this] { Beat(); });
  if (!beats) return;
  if (decode_ != nullptr) {
    v1::DecodeRequest message;
    message.mutable_beat()->set_not_reading(says_not_reading);
    decode_->Send(std::move(message));
  }
  if (prefill_ != nullptr && prefill_beats_too) {
    v1::PrefillRequest message;
    message.mutable_beat()->set_not_reading(says_not_reading);
    prefill_->Send(std::move(message));
  }
}

void Request::Decode(DecodeMachine* decode, PrefillMachine* prefill) {
  decode_machine_ = decode;
  prefill_machine_ = prefill;
  v1::DecodeRequest message;
  v1::DecodeOpen* const open = message.mutable_open();
  open->set_request_id(request_id);
  open->set_decode_incarnation(decode->incarnation);
  open->mutable_prompt_token_ids()->Add(job_.prompt.begin(), job_.prompt.end());
  open->mutable_output_token_ids()->Add(tokens.begin(), tokens.end());
  *open->mutable_sampling() = job_.Sampling();
  *open->mutable_stopping() = job_.Stopping();
  if (prefill != nullptr) *open->mutable_prefill_worker() = prefill->ref();
  open->set_cache_salt(job_.cache_salt);
  open->set_bypass_prefix_cache(job_.bypass_prefix_cache);
  open->set_deadline_ms(absl::ToInt64Milliseconds(job_.deadline));
  open->set_age_ms(absl::ToInt64Milliseconds(job_.age));
  open->set_suspect(job_.suspect);
  AskForScores(open);
  open->MergeFrom(tweak_open);
  decode_ended.reset();
  decode_ = rig_->network.Connect<v1::DecodeRequest, v1::DecodeResponse>(
      rig_->router, decode->host, /*messy=*/false,
      [decode](auto stream) { decode->core->AddCall(std::move(stream)); });
  decode_->Start(decode_ears_.get());
  decode_->Send(std::move(message));
}

void Request::Prefill(PrefillMachine* prefill,
                      const v1::AttemptOpened& attempt) {
  v1::PrefillRequest message;
  v1::PrefillOpen* const open = message.mutable_open();
  open->set_request_id(request_id);
  open->set_prefill_incarnation(prefill->incarnation);
  open->set_attempt(attempt.attempt());
  open->set_ticket(attempt.ticket());
  if (decode_machine_ != nullptr) {
    *open->mutable_decode_worker() = decode_machine_->ref();
  }
  open->mutable_prompt_token_ids()->Add(job_.prompt.begin(), job_.prompt.end());
  open->mutable_output_token_ids()->Add(tokens.begin(), tokens.end());
  *open->mutable_sampling() = job_.Sampling();
  *open->mutable_stopping() = job_.Stopping();
  open->set_cache_salt(job_.cache_salt);
  open->set_bypass_prefix_cache(job_.bypass_prefix_cache);
  open->set_deadline_ms(absl::ToInt64Milliseconds(job_.deadline));
  open->set_age_ms(absl::ToInt64Milliseconds(job_.age));
  open->set_suspect(job_.suspect);
  AskForScores(open);
  open->MergeFrom(tweak_prefill);
  prefill_.reset();
  prefill_ended.reset();
  prefill_started.reset();
  first.reset();
  done.reset();
  prefill_ears_ = std::make_unique<PrefillEars>(this);
  prefill_ = rig_->network.Connect<v1::PrefillRequest, v1::PrefillResponse>(
      rig_->router, prefill->host, /*messy=*/false,
      [prefill](auto stream) { prefill->core->AddCall(std::move(stream)); });
  prefill_->Start(prefill_ears_.get());
  prefill_->Send(std::move(message));
}

void Request::Retry(PrefillMachine* prefill, uint32_t attempt) {
  DropPrefill();  // its tokens are not heard any more
  prefill_machine_ = prefill;
  v1::DecodeRequest message;
  v1::DecodeRetry* const retry = message.mutable_retry();
  retry->set_attempt(attempt != 0 ? attempt : opened.back().attempt());
  retry->mutable_output_token_ids()->Add(tokens.begin(), tokens.end());
  if (prefill != nullptr) *retry->mutable_prefill_worker() = prefill->ref();
  AskForScores(retry);
  decode_->Send(std::move(message));
}

// From the first one on that it does not have.
template <typename Open>
void Request::AskForScores(Open* open) const {
  if (!scoring || scores + 1 >= static_cast<int>(job_.prompt.size())) return;
  open->mutable_scoring()->set_alternatives(*scoring);
  open->mutable_scoring()->set_position(scores + 1);
}

void Request::TakeScores(const v1::ScoredTokens& part) {
  story += 'P';
  EXPECT_TRUE(tokens.empty()) << "scores behind a token";
  most_scores = std::max(most_scores, part.tokens_size());
  const std::vector<engine::SampledToken> right =
      engine::ExpectedScores(rig_->model, job_.prompt, *scoring);
  for (int i = 0; i < part.tokens_size(); ++i) {
    ASSERT_EQ(part.position() + i, scores + 1);
    ASSERT_LT(scores, static_cast<int>(right.size()));
    const engine::SampledToken& expected = right[static_cast<size_t>(scores++)];
    const v1::Token& token = part.tokens(i);
    EXPECT_EQ(token.token_id(), expected.token_id);
    EXPECT_EQ(token.logprob(), expected.logprob);
    EXPECT_EQ(token.rank(), expected.rank);
    ASSERT_EQ(token.top_size(), static_cast<int>(expected.top.size()));
    for (int j = 0; j < token.top_size(); ++j) {
      EXPECT_EQ(token.top(j).logprob(),
                expected.top[static_cast<size_t>(j)].logprob);
    }
  }
}

void Request::DropDecode() { decode_.reset(); }
void Request::DropPrefill() { prefill_.reset(); }
void Request::PauseReading(bool paused) { decode_->PauseReading(paused); }

void Request::OnDecode(const v1::DecodeResponse& message) {
  switch (message.event_case()) {
    case v1::DecodeResponse::kOpened:
      story += 'O';
      opened.push_back(message.opened());
      EXPECT_EQ(message.opened().ticket().empty(), prefill_machine_ == nullptr);
      if (prefills && prefill_machine_ != nullptr) {
        Prefill(prefill_machine_, message.opened());
      }
      return;
    case v1::DecodeResponse::kStarted:
      story += 'S';
      started.push_back(message.started().attempt());
      return;
    case v1::DecodeResponse::kDead:
      story += 'D';
      dead.push_back(message.dead());
      if (retries) Retry(prefill_machine_);
      return;
    case v1::DecodeResponse::kTokens:
      story += 'T';
      EXPECT_FALSE(finished.has_value()) << "a token behind the finish";
      for (int i = 0; i < message.tokens().tokens_size(); ++i) {
        Take(message.tokens().position() + i, message.tokens().tokens(i));
      }
      if (message.tokens().has_work()) works.push_back(message.tokens().work());
      return;
    case v1::DecodeResponse::kScores:
      TakeScores(message.scores());
      return;
    case v1::DecodeResponse::kHypothesis: {
      story += 'H';
      const v1::DecodedHypothesis& part = message.hypothesis();
      hypotheses.resize(
          std::max(hypotheses.size(), static_cast<size_t>(part.index()) + 1));
      v1::DecodedHypothesis& whole =
          hypotheses[static_cast<size_t>(part.index())];
      whole.mutable_tokens()->MergeFrom(part.tokens());
      whole.set_reason(part.reason());
      whole.set_score(part.score());
      return;
    }
    case v1::DecodeResponse::kFinished:
      story += 'F';
      finished = message.finished();
      return;
    case v1::DecodeResponse::kBeat:
      ++decode_beats;
      return;
    case v1::DecodeResponse::EVENT_NOT_SET:
      ADD_FAILURE() << "an empty message";
  }
}

void Request::OnPrefill(const v1::PrefillResponse& message) {
  switch (message.event_case()) {
    case v1::PrefillResponse::kStarted:
      prefill_started = message.started();
      return;
    case v1::PrefillResponse::kFirstToken:
      story += 'f';
      first = message.first_token();
      if (!tweak_prefill.sampling().has_beam()) {
        Take(first->position(), first->token());
      }
      if (first->finish_reason() != v1::FINISH_REASON_UNSPECIFIED) {
        DropDecode();
      }
      return;
    case v1::PrefillResponse::kScores:
      TakeScores(message.scores());
      return;
    case v1::PrefillResponse::kDone:
      story += 'd';
      done = message.done();
      return;
    case v1::PrefillResponse::kBeat:
      ++prefill_beats;
      return;
    case v1::PrefillResponse::EVENT_NOT_SET:
      ADD_FAILURE() << "an empty message";
  }
}

void Request::Take(int position, const v1::Token& token) {
  const int at = position - static_cast<int>(job_.prompt.size());
  ASSERT_GE(at, 0);
  ASSERT_LT(at, static_cast<int>(expected_.size())) << "more than was asked";
  EXPECT_EQ(token.token_id(), expected_[static_cast<size_t>(at)]) << at;
  const int held = static_cast<int>(tokens.size());
  ASSERT_LE(at, held) << "a token was left out";
  if (at < held) {
    ++repeated;
    return;
  }
  tokens.push_back(token.token_id());
  attention.emplace_back(token.attention().begin(), token.attention().end());
  token_times.push_back(rig_->world.Now());
}

std::string Request::reason() const {
  return decode_ended.has_value() ? ErrorReason(*decode_ended) : "open";
}

std::string Request::prefill_reason() const {
  return prefill_ended.has_value() ? ErrorReason(*prefill_ended) : "open";
}

void Request::ExpectAllRight() const {
  EXPECT_EQ(tokens, expected_) << story;
  EXPECT_TRUE(finished.has_value()) << story;
  ASSERT_TRUE(decode_ended.has_value()) << story;
  EXPECT_TRUE(decode_ended->ok()) << *decode_ended;
}

// ---- Rig

Rig::Rig(uint64_t seed, int window, int full_layers)
    : model(simulation::Model(window, full_layers)),
      random(seed),
      network(&world, &random, {}),
      router(std::make_shared<simulation::Host>(&world, "router")) {}

Rig::~Rig() {
  // Streams before the processes that they end in; devices, which call
  // nobody any more, before the cores.
  requests.clear();
  router->loop.Stop();
  const auto stop = [](Machine* machine) {
    machine->host->loop.Stop();
    machine->device.reset();
    machine->log->Forget();
  };
  for (const auto& machine : prefills) stop(machine.get());
  for (const auto& machine : decodes) stop(machine.get());
  for (const auto& machine : prefills) machine->core.reset();
  for (const auto& machine : decodes) machine->core.reset();
}

DecodeMachine* Rig::AddDecode(
    const std::string& name, const MachineOptions& options,
    const Tweak<decode_worker::DecodeOptions>& tweak) {
  auto machine = std::make_unique<DecodeMachine>(this, name, options);
  decode_worker::DecodeOptions core = simulation::MakeDecodeOptions(
      name, machine->incarnation, machine->device->kv_shape());
  core.engine.window = simulation::WindowOf(model);
  core.receiver.layers.windowed = simulation::WindowedLayers(model);
  core.offload = machine->offload.get();
  if (tweak) tweak(&core);
  machine->core = std::make_unique<decode_worker::DecodeCore>(
      core, &machine->host->loop, &machine->random, machine->log.get(),
      machine->pool.get());
  decodes.push_back(std::move(machine));
  return decodes.back().get();
}

PrefillMachine* Rig::AddPrefill(
    const std::string& name, const MachineOptions& options,
    const Tweak<prefill_worker::PrefillOptions>& tweak) {
  auto machine = std::make_unique<PrefillMachine>(this, name, options);
  prefill_worker::PrefillOptions core = simulation::MakePrefillOptions(
      name, machine->incarnation, machine->device->kv_shape());
  core.engine.window = simulation::WindowOf(model);
  core.sender.layers.windowed = simulation::WindowedLayers(model);
  if (tweak) tweak(&core);
  const auto dial =
      [this, host = machine->host](
          const v1::WorkerRef& ref) -> std::unique_ptr<handoff::SenderStream> {
    for (const auto& decode : decodes) {
      if (decode->name() != ref.worker_id()) continue;
      return network.Connect<v1::LinkRequest, v1::LinkResponse>(
          host, decode->host, /*messy=*/true,
          [peer = decode.get()](auto stream) {
            peer->core->AddLink(std::move(stream));
          });
    }
    ADD_FAILURE() << "nobody is called " << ref.worker_id();
    return nullptr;
  };
  machine->core = std::make_unique<prefill_worker::PrefillCore>(
      core, &machine->host->loop, &machine->random, machine->log.get(),
      machine->pool.get(), dial);
  prefills.push_back(std::move(machine));
  return prefills.back().get();
}

Request* Rig::NewRequest(Job job) {
  requests.push_back(std::make_unique<Request>(this, std::move(job)));
  return requests.back().get();
}

Request* Rig::Split(Job job, DecodeMachine* decode, PrefillMachine* prefill) {
  Request* const request = NewRequest(std::move(job));
  request->Decode(decode, prefill);
  return request;
}

Request* Rig::Local(Job job, DecodeMachine* decode) {
  return Split(std::move(job), decode, nullptr);
}

void Rig::RunUntil(const std::function<bool()>& done, absl::Duration limit) {
  const absl::Time last = world.Now() + limit;
  while (!done()) {
    ASSERT_LT(world.Now(), last) << "nothing comes of it";
    world.RunFor(absl::Milliseconds(1));
    ExpectInvariants();
  }
}

void Rig::RunUntilEnded(absl::Duration limit) {
  RunUntil(
      [this] {
        for (const auto& request : requests) {
          if (!request->decode_ended.has_value()) return false;
        }
        return true;
      },
      limit);
}

void Rig::ExpectInvariants() {
  const auto check = [](const Machine& machine) {
    if (!machine.host->alive) return;
    EXPECT_TRUE(machine.pool->CheckInvariants().ok())
        << machine.pool->CheckInvariants();
    EXPECT_TRUE(machine.CheckCore().ok()) << machine.CheckCore();
    for (const std::string& what : machine.device->violations()) {
      ADD_FAILURE() << machine.name() << ": " << what;
    }
  };
  for (const auto& machine : decodes) check(*machine);
  for (const auto& machine : prefills) check(*machine);
}

void Rig::ExpectNothingLeft() {
  Run(absl::Seconds(45));
  ExpectInvariants();
  const auto check = [](const Machine& machine) {
    if (!machine.host->alive) return;
    const v1::WorkerLoad load = machine.Load();
    EXPECT_EQ(load.blocks_live() + load.blocks_reserved() + load.tickets() +
                  load.streams() + load.running() + load.waiting() +
                  load.queued_tokens() + load.slabs_granted() +
                  load.slabs_in_flight() + load.slabs_quarantined(),
              0)
        << machine.name() << ": " << load.ShortDebugString();
    EXPECT_EQ(load.blocks_free() + load.blocks_cached(),
              machine.pool->num_blocks());
  };
  for (const auto& machine : decodes) check(*machine);
  for (const auto& machine : prefills) check(*machine);
}

}  // namespace tandem::worker
