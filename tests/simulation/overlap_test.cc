// SPDX-License-Identifier: Apache-2.0
// The handoff hides behind the prefill: slices travel while later layers
// compute, the first token waits for no transfer, and what is not hidden is
// said in the timings. Both cores on virtual time, over a slow link.

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "tests/simulation/network.h"
#include "tests/simulation/parts.h"

namespace tandem::simulation {
namespace {

// Notes when a layer group of a step is computed and when a slice lands.
class NotingExecutor final : public engine::Executor,
                             private engine::StepListener {
 public:
  NotingExecutor(engine::FakeExecutor* inner, Loop* loop)
      : inner_(inner), loop_(loop) {}
  void Submit(const engine::Step* step,
              engine::StepListener* listener) override {
    listener_ = listener;
    inner_->Submit(step, this);
  }
  void Gather(const engine::KvPart& part, kernels::DType wire, uint64_t key,
              std::byte* staging,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override {
    inner_->Gather(part, wire, key, staging, std::move(done));
  }
  void Scatter(const engine::KvPart& part, kernels::DType wire,
               const std::byte* staging,
               absl::AnyInvocable<void()> done) override {
    scatters.push_back(loop_->Now());
    inner_->Scatter(part, wire, staging, std::move(done));
  }
  void Digest(const engine::KvPart& part, kernels::DType wire, uint64_t key,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override {
    inner_->Digest(part, wire, key, std::move(done));
  }
  const kernels::KvShape& kv_shape() const override {
    return inner_->kv_shape();
  }

  std::vector<absl::Time> layers;    // when each layer was done
  std::vector<absl::Time> scatters;  // when each slice had arrived

 private:
  void OnLayersDone(uint64_t step_id, int layers_done) override {
    layers.push_back(loop_->Now());
    listener_->OnLayersDone(step_id, layers_done);
  }
  void OnStepDone(uint64_t step_id,
                  absl::StatusOr<engine::StepResult> result) override {
    listener_->OnStepDone(step_id, std::move(result));
  }

  engine::FakeExecutor* const inner_;
  Loop* const loop_;
  engine::StepListener* listener_ = nullptr;
};

struct Worker {
  Worker(VirtualLoop* world, const std::string& name, uint64_t seed)
      : host(std::make_shared<Host>(world, name)), random(seed) {
    engine::FakeExecutorOptions options;
    options.model = Model();
    options.num_blocks = 64;
    options.step_base = absl::Milliseconds(80);  // 20 ms per layer
    device = std::make_unique<engine::FakeExecutor>(options, &host->loop);
    executor = std::make_unique<NotingExecutor>(device.get(), &host->loop);
    pool = std::make_unique<engine::KvPool>(64, 16);
    incarnation = random.Bytes(16);
  }

  std::shared_ptr<Host> host;
  SeededRandom random;
  std::string incarnation;
  std::unique_ptr<engine::FakeExecutor> device;
  std::unique_ptr<NotingExecutor> executor;
  std::unique_ptr<engine::KvPool> pool;
};

// A router of two calls.
struct DecodeCall final : StreamHandler<v1::DecodeResponse> {
  void OnMessage(v1::DecodeResponse message) override {
    if (message.has_opened()) opened = message.opened();
    if (message.has_tokens()) {
      for (const v1::Token& token : message.tokens().tokens()) {
        tokens.push_back(token.token_id());
      }
    }
    finished |= message.has_finished();
  }
  void OnClosed(absl::Status s) override { status = std::move(s); }
  v1::AttemptOpened opened;
  std::vector<int32_t> tokens;
  bool finished = false;
  absl::Status status = absl::UnknownError("open");
};
struct PrefillCall final : StreamHandler<v1::PrefillResponse> {
  explicit PrefillCall(Loop* l) : loop(l) {}
  void OnMessage(v1::PrefillResponse message) override {
    if (message.has_first_token()) {
      first = message.first_token();
      first_at = loop->Now();
    }
    if (message.has_done()) {
      done = message.done();
      done_at = loop->Now();
    }
  }
  void OnClosed(absl::Status s) override { status = std::move(s); }
  Loop* const loop;
  v1::PrefillFirstToken first;
  v1::PrefillDone done;
  absl::Time first_at, done_at;
  absl::Status status = absl::UnknownError("open");
};

TEST(OverlapTest, SlicesLandWhileLaterLayersCompute) {
  VirtualLoop world;
  SeededRandom random(1);
  // A link on which every message takes 3 to 4 ms.
  Network network(
      &world, &random,
      {.min_delay = absl::Milliseconds(3), .max_delay = absl::Milliseconds(4)});
  Worker d(&world, "decode-0", 2), p(&world, "prefill-0", 3);
  auto decode = std::make_unique<decode_worker::DecodeCore>(
      MakeDecodeOptions("decode-0", d.incarnation, d.device->kv_shape()),
      &d.host->loop, &d.random, d.executor.get(), d.pool.get());
  auto prefill = std::make_unique<prefill_worker::PrefillCore>(
      MakePrefillOptions("prefill-0", p.incarnation, p.device->kv_shape()),
      &p.host->loop, &p.random, p.executor.get(), p.pool.get(),
      [&](const v1::WorkerRef&) {
        return network.Connect<v1::LinkRequest, v1::LinkResponse>(
            p.host, d.host, /*messy=*/true,
            [&](auto stream) { decode->AddLink(std::move(stream)); });
      });

  auto router = std::make_shared<Host>(&world, "router");
  std::vector<int32_t> prompt;
  for (int i = 0; i < 40; ++i) prompt.push_back(100 + i);  // one chunk
  v1::SamplingParams sampling;
  sampling.set_top_p(1);
  sampling.set_logprobs(-1);
  v1::StoppingParams stopping;
  stopping.set_max_tokens(6);

  DecodeCall decode_call;
  auto decode_stream = network.Connect<v1::DecodeRequest, v1::DecodeResponse>(
      router, d.host, false,
      [&](auto stream) { decode->AddCall(std::move(stream)); });
  decode_stream->Start(&decode_call);
  v1::DecodeRequest open;
  const std::string id = random.Bytes(16);
  open.mutable_open()->set_request_id(id);
  open.mutable_open()->set_decode_incarnation(d.incarnation);
  open.mutable_open()->mutable_prompt_token_ids()->Add(prompt.begin(),
                                                       prompt.end());
  *open.mutable_open()->mutable_sampling() = sampling;
  *open.mutable_open()->mutable_stopping() = stopping;
  open.mutable_open()->set_deadline_ms(60000);
  *open.mutable_open()->mutable_prefill_worker() =
      MakeHello("prefill-0", v1::WORKER_ROLE_PREFILL, p.incarnation,
                p.device->kv_shape())
          .worker();
  decode_stream->Send(open);
  world.RunFor(absl::Milliseconds(30));
  ASSERT_NE(decode_call.opened.ticket(), "");

  PrefillCall prefill_call(&world);
  auto prefill_stream =
      network.Connect<v1::PrefillRequest, v1::PrefillResponse>(
          router, p.host, false,
          [&](auto stream) { prefill->AddCall(std::move(stream)); });
  prefill_stream->Start(&prefill_call);
  v1::PrefillRequest request;
  v1::PrefillOpen* const call = request.mutable_open();
  call->set_request_id(id);
  call->set_prefill_incarnation(p.incarnation);
  call->set_attempt(decode_call.opened.attempt());
  call->set_ticket(decode_call.opened.ticket());
  *call->mutable_decode_worker() =
      MakeHello("decode-0", v1::WORKER_ROLE_DECODE, d.incarnation,
                d.device->kv_shape())
          .worker();
  call->mutable_prompt_token_ids()->Add(prompt.begin(), prompt.end());
  *call->mutable_sampling() = sampling;
  *call->mutable_stopping() = stopping;
  call->set_deadline_ms(60000);
  prefill_stream->Send(request);
  world.RunFor(absl::Seconds(3));

  ASSERT_TRUE(decode_call.finished) << decode_call.status;
  ASSERT_TRUE(prefill_call.status.ok()) << prefill_call.status;
  EXPECT_EQ(decode_call.tokens, engine::Expected(Model(), prompt, 6, {}));
  // Layer n starts when layer n - 1 is done; there are four in the one chunk.
  ASSERT_EQ(p.executor->layers.size(), 4u);
  ASSERT_GE(d.executor->scatters.size(), 4u);
  EXPECT_LT(d.executor->scatters.front(), p.executor->layers[2])
      << "the first slice was not received before the last layer started";
  // The first token waits for nothing of it.
  EXPECT_LT(prefill_call.first_at,
            d.executor->scatters.back() + absl::Milliseconds(5));
  EXPECT_LT(prefill_call.first_at, prefill_call.done_at);
  // What the timings say is what happened: the exposed part lies between the
  // first token and the acknowledgement.
  EXPECT_GT(prefill_call.done.handoff_exposed_us(), 0);
  EXPECT_LT(prefill_call.done.handoff_exposed_us(),
            prefill_call.done.handoff_us());
  EXPECT_EQ(prefill_call.done.handoff_bytes(), 40 * 4 * 8);

  EXPECT_TRUE(d.pool->CheckInvariants().ok());
  EXPECT_EQ(d.pool->counts().live + d.pool->counts().reserved, 0);
  EXPECT_EQ(p.pool->counts().live, 0);
  EXPECT_TRUE(d.device->violations().empty());
  EXPECT_TRUE(p.device->violations().empty());
  decode_stream.reset();
  prefill_stream.reset();
  d.host->loop.Stop();
  p.host->loop.Stop();
  d.device.reset();
  p.device.reset();
  prefill.reset();
  decode.reset();
}

}  // namespace
}  // namespace tandem::simulation
