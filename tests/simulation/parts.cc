// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/parts.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/features.h"
#include "worker/convert.h"

namespace tandem::simulation {
namespace {

const std::map<std::string, std::string>& Fingerprint() {
  static const auto* const parts = new std::map<std::string, std::string>{
      {"weights", "w"}, {"config", "c"}, {"tokenizer", "t"}, {"numerics", "n"}};
  return *parts;
}

engine::EngineOptions EngineLimits() {
  engine::EngineOptions options;
  options.max_num_seqs = 8;
  options.max_num_batched_tokens = 48;
  options.max_model_len = kMaxModelLen;
  options.vocab_size = kVocabulary;
  return options;
}

}  // namespace

engine::FakeModel Model(int window, int full_layers) {
  return {.num_layers = 4,
          .vocab_size = kVocabulary,
          .weights = 1,
          .window = window,
          .full_layers = full_layers};
}

engine::KvWindow WindowOf(const engine::FakeModel& model) {
  if (model.full_layers == 0) return model.window;
  return {model.window,
          {.full = model.full_layers,
           .windowed = model.num_layers - model.full_layers}};
}

std::vector<bool> WindowedLayers(const engine::FakeModel& model) {
  std::vector<bool> windowed;
  for (int layer = 0; model.full_layers > 0 && layer < model.num_layers;
       ++layer) {
    windowed.push_back(layer >= model.full_layers);
  }
  return windowed;
}

router::ModelLimits Limits() {
  router::ModelLimits limits;
  limits.model = "fake";
  limits.context_length = kMaxModelLen;
  limits.vocabulary_size = kVocabulary;
  limits.eos_token_ids = {3};
  limits.kv_blocks = kLeastBlocks;
  limits.kv_block_size = 16;
  return limits;
}

v1::WorkerHello MakeHello(const std::string& name, v1::WorkerRole role,
                          const std::string& incarnation,
                          const kernels::KvShape& shape) {
  v1::WorkerHello hello;
  hello.mutable_worker()->set_worker_id(name);
  hello.mutable_worker()->set_incarnation(incarnation);
  hello.mutable_worker()->set_endpoint(absl::StrCat(name, ":1"));
  hello.set_role(role);
  hello.set_model("fake");
  for (const auto& [key, value] : Fingerprint()) {
    (*hello.mutable_fingerprint())[key] = value;
  }
  hello.set_protocol_min(1);
  hello.set_protocol_max(1);
  hello.set_max_model_len(kMaxModelLen);
  hello.set_block_size(shape.block_size);
  hello.set_num_blocks(shape.num_blocks);
  hello.set_max_num_seqs(8);
  for (const char* const feature :
       {kFeatureTypicalP, kFeatureLogitRules, kFeatureBeamSearch,
        kFeatureNoKvCache, kFeaturePromptLogprobs, kFeatureStructured}) {
    hello.add_features(feature);
  }
  hello.set_kv_dtype("f32");
  hello.set_kv_bytes_per_token(shape.bytes_per_position());
  hello.set_host_id(name);
  return hello;
}

decode_worker::DecodeOptions MakeDecodeOptions(const std::string& name,
                                               const std::string& incarnation,
                                               const kernels::KvShape& shape) {
  decode_worker::DecodeOptions options;
  options.incarnation = incarnation;
  options.engine = EngineLimits();
  options.engine.run_ahead = (incarnation.back() & 1) != 0;  // every other one
  options.expected_new_tokens = 24;
  options.local_recompute_tokens = 64;
  options.max_unsent = 8;
  handoff::ReceiverOptions& receiver = options.receiver;
  receiver.self =
      MakeHello(name, v1::WORKER_ROLE_DECODE, incarnation, shape).worker();
  receiver.fingerprint = Fingerprint();
  receiver.host_id = name;
  receiver.ways = {"grpc"};
  receiver.kv_dtype = "f32";
  receiver.layers.count = shape.num_layers;
  receiver.kv_heads = shape.kv_heads;
  receiver.head_dim = shape.head_dim;
  receiver.slab_bytes = 512;
  receiver.num_slabs = 12;
  receiver.slabs_per_peer = 4;
  return options;
}

prefill_worker::PrefillOptions MakePrefillOptions(
    const std::string& name, const std::string& incarnation,
    const kernels::KvShape& shape) {
  prefill_worker::PrefillOptions options;
  options.incarnation = incarnation;
  options.engine = EngineLimits();
  v1::LinkHello& hello = options.sender.hello;
  *hello.mutable_sender() =
      MakeHello(name, v1::WORKER_ROLE_PREFILL, incarnation, shape).worker();
  for (const auto& [key, value] : Fingerprint()) {
    (*hello.mutable_fingerprint())[key] = value;
  }
  hello.set_host_id(name);
  hello.add_ways("grpc");
  hello.set_kv_dtype("f32");
  options.sender.layers.count = shape.num_layers;
  options.sender.kv_heads = shape.kv_heads;
  options.sender.head_dim = shape.head_dim;
  options.sender.slab_bytes = 512;
  options.sender.staging_bytes = 512 * 8;
  return options;
}

router::RouterOptions MakeRouterOptions(const std::string& incarnation) {
  router::RouterOptions options;
  options.incarnation = incarnation;
  options.model = "fake";
  options.max_local_tokens = 12;
  // A partition may leave no worker within reach for a while.
  options.queue_wait = options.no_workers_wait = absl::Seconds(60);
  // Whoever comes is to be served, however long that takes.
  options.max_expected_wait = absl::InfiniteDuration();
  options.max_unsent = 8;
  return options;
}

engine::FakeGrammar GrammarOf(const v1::StructuredParams& params) {
  uint64_t seed = 0;
  TANDEM_CHECK(absl::SimpleAtoi(params.options().regex(), &seed),
               "a number stands for a grammar");
  return {
      .seed = seed,
      .vocab_size = kVocabulary,
      .ends = {params.end_token_ids().begin(), params.end_token_ids().end()},
      .ends_ignored = params.ignore_end()};
}

namespace {

class FakeCallGrammar final : public worker::CallGrammar {
 public:
  FakeCallGrammar(const engine::FakeGrammar& grammar,
                  std::vector<int32_t> output, Loop* loop, Random* random)
      : grammar_(grammar),
        output_(std::move(output)),
        loop_(loop),
        random_(random) {}
  std::unique_ptr<engine::TokenConstraint> Follow(
      absl::Span<const int32_t> output) const override {
    const absl::Duration delay = random_->Below(2) == 0
                                     ? absl::ZeroDuration()
                                     : absl::Milliseconds(random_->Below(60));
    return std::make_unique<engine::FakeConstraint>(grammar_, output, loop_,
                                                    delay);
  }
  bool IsWhole() const override {
    return grammar_.Whole(grammar_.Behind(output_));
  }

 private:
  const engine::FakeGrammar grammar_;
  const std::vector<int32_t> output_;
  Loop* const loop_;
  Random* const random_;
};

}  // namespace

uint64_t FakeGrammars::Compile(worker::GrammarOrder order, Done done) {
  const uint64_t number = ++last_;
  auto timer = std::make_unique<Timer>(loop_);
  timer->Start(
      absl::Milliseconds(random_->Below(16) == 0 ? 8000
                                                 : 1 + random_->Below(50)),
      [this, number, order = std::move(order),
       done = std::move(done)]() mutable {
        orders_.erase(number);
        done(std::make_unique<FakeCallGrammar>(
            GrammarOf(order.params), std::move(order.output), loop_, random_));
      });
  orders_.emplace(number, std::move(timer));
  return number;
}

void FakeGrammars::Cancel(uint64_t number) { orders_.erase(number); }

namespace {

// Of few tokens, so that it fits every decode worker's cache.
void AskForBeams(Random* random, v1::GenerateRequest* request) {
  const int width = 2 + static_cast<int>(random->Below(3));
  request->mutable_beam()->set_width(width);
  request->mutable_beam()->set_length_penalty(
      static_cast<float>(random->Below(5)) * 0.5f - 0.5f);
  request->mutable_beam()->set_early_stopping(
      static_cast<v1::EarlyStopping>(random->Below(3)));
  v1::SamplingOptions* const sampling = request->mutable_sampling();
  sampling->set_temperature(0);
  sampling->set_n(
      1 + static_cast<int>(random->Below(static_cast<uint64_t>(width))));
  v1::StoppingOptions* const stopping = request->mutable_stopping();
  stopping->set_max_tokens(1 + static_cast<int32_t>(random->Below(24)));
  for (uint32_t id = 20; id < 420; id += 60) stopping->add_stop_token_ids(id);
}

}  // namespace

absl::StatusOr<Order> DrawOrder(const std::vector<int32_t>& shared,
                                Random* random,
                                const engine::FakeModel& model) {
  Order order;
  std::vector<int32_t>& prompt = order.admitted.prompt;
  if (random->Below(2) == 0) {
    prompt.assign(
        shared.begin(),
        shared.begin() + static_cast<int64_t>(random->Below(shared.size())));
  }
  const int own = 1 + static_cast<int>(random->Below(90));
  for (int t = 0; t < own; ++t) {
    prompt.push_back(static_cast<int32_t>(10 + random->Below(400)));
  }
  v1::GenerateRequest request;
  for (const int32_t id : prompt) {
    request.mutable_token_ids()->add_ids(static_cast<uint32_t>(id));
  }
  const bool greedy = random->Below(2) == 0;
  request.mutable_sampling()->set_temperature(greedy ? 0 : 0.7f);
  request.mutable_sampling()->set_seed(random->Next());
  request.mutable_stopping()->set_max_tokens(
      1 + static_cast<int32_t>(random->Below(60)));
  request.mutable_output()->set_text(false);
  request.mutable_output()->set_return_token_ids(true);
  request.set_placement(random->Below(4) == 0 ? v1::PLACEMENT_AUTO
                                              : v1::PLACEMENT_SPLIT);
  request.mutable_cache()->set_bypass_prefix_cache(random->Below(5) == 0);
  const bool beams = random->Below(5) == 0;
  if (beams) AskForBeams(random, &request);
  const bool scored = !beams && random->Below(4) == 0;
  if (scored) {
    request.mutable_output()->set_prompt_logprobs(
        static_cast<int32_t>(random->Below(4)));
    if (random->Below(3) == 0) request.mutable_stopping()->set_max_tokens(0);
  }
  const bool structured =
      !beams && request.stopping().max_tokens() > 0 && random->Below(4) == 0;
  if (structured) {
    request.mutable_structured()->set_regex(
        absl::StrCat(random->Below(1 << 20)));
    request.mutable_stopping()->set_ignore_eos(random->Below(4) == 0);
  }
  const router::ModelLimits limits = Limits();
  absl::StatusOr<router::EffectiveRequest> effective =
      router::Validate(request, limits);
  if (!effective.ok()) return effective.status();
  const absl::Status fits = router::FitToContext(
      static_cast<int>(prompt.size()), limits, &*effective);
  if (!fits.ok()) return fits;
  order.admitted.deadline = absl::Seconds(300);
  const engine::Stopping stopping =
      worker::ToEngine(router::ToStoppingParams(*effective));
  const v1::SamplingParams sampling = router::ToSamplingParams(*effective);
  if (beams) {
    const engine::BeamResult result =
        engine::ExpectedBeams(model, prompt, worker::ToEngine(sampling.beam()),
                              stopping, kMaxModelLen);
    for (const engine::Hypothesis& hypothesis : result.best) {
      std::vector<int32_t>& ids = order.expected.emplace_back();
      for (const engine::SampledToken& token : hypothesis.tokens) {
        ids.push_back(token.token_id);
      }
    }
  } else if (stopping.max_tokens == 0) {
    order.expected.emplace_back();
  } else if (structured) {
    order.expected.push_back(engine::ExpectedByGrammar(
        model, prompt, GrammarOf(sampling.structured()),
        worker::ToEngine(sampling, 0), stopping, kMaxModelLen));
  } else {
    order.expected.push_back(engine::ExpectedUntilStop(
        model, prompt, static_cast<int>(prompt.size()),
        worker::ToEngine(sampling, 0), stopping, kMaxModelLen));
  }
  if (scored) {
    order.scores = engine::ExpectedScores(model, prompt,
                                          effective->output.prompt_logprobs());
  }
  order.admitted.effective = *std::move(effective);
  return order;
}

}  // namespace tandem::simulation
