// SPDX-License-Identifier: Apache-2.0
// A router's core on virtual time between scripted streams: the test is every
// client and every worker. Whatever a test does is recorded, and must replay.

#ifndef TANDEM_TESTS_ROUTER_WORLD_H_
#define TANDEM_TESTS_ROUTER_WORLD_H_

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "common/features.h"
#include "common/random.h"
#include "common/testing/virtual_loop.h"
#include "router/core/core.h"
#include "router/session/recorded_core.h"
#include "router/session/replay.h"

namespace tandem::router {

// The far end of one stream, as the test holds it.
template <typename Out, typename In>
struct Pipe {
  StreamHandler<In>* handler = nullptr;
  std::vector<Out> sent;
  bool open = true;      // neither side has ended it
  bool dropped = false;  // the core ended it
  bool paused = false;
  size_t unsent = 0;
  absl::Status status;                   // what the core closed it with
  std::function<void(const Out*)> seen;  // each message; null at the close

  void Say(In message) {
    if (open) handler->OnMessage(std::move(message));
  }
  void Break(absl::Status why) {
    if (!std::exchange(open, false)) return;
    handler->OnClosed(std::move(why));
  }
};

template <typename Out, typename In>
class FakeStream final : public Stream<Out, In> {
 public:
  explicit FakeStream(Pipe<Out, In>* pipe) : pipe_(pipe) {}
  ~FakeStream() override { Close(absl::CancelledError("dropped")); }
  void Start(StreamHandler<In>* handler) override { pipe_->handler = handler; }
  void Send(Out message) override {
    if (!pipe_->open) return;
    if (pipe_->seen) pipe_->seen(&message);
    pipe_->sent.push_back(std::move(message));
  }
  size_t unsent() const override { return pipe_->unsent; }
  void PauseReading(bool paused) override { pipe_->paused = paused; }
  void Close(absl::Status status) override {
    if (!std::exchange(pipe_->open, false)) return;
    pipe_->dropped = true;
    pipe_->status = std::move(status);
    if (pipe_->seen) pipe_->seen(nullptr);
  }
  std::string peer() const override { return "fake"; }

 private:
  Pipe<Out, In>* const pipe_;
};

using DecodePipe = Pipe<v1::DecodeRequest, v1::DecodeResponse>;
using PrefillPipe = Pipe<v1::PrefillRequest, v1::PrefillResponse>;
using LeasePipe = Pipe<v1::RegisterResponse, v1::RegisterRequest>;
using ClientPipe = Pipe<v1::GenerateResponse, v1::GenerateRequest>;

// Token 1 is "a", 2 is "b", ...
class Letters final : public TextCodec {
  class Text final : public TextStream {
    std::string Push(int32_t id) override {
      return std::string(
          1, static_cast<char>('a' + static_cast<uint32_t>(id) - 1));
    }
    std::string Finish() override { return ""; }
  };
  std::unique_ptr<TextStream> NewStream(absl::Span<const int32_t>,
                                        bool) override {
    return std::make_unique<Text>();
  }
  std::string TokenBytes(int32_t id) override {
    return std::string(1,
                       static_cast<char>('a' + static_cast<uint32_t>(id) - 1));
  }
};

constexpr int kPrompt = 40;  // World::Ask's length

struct World final : Dialer, RouterObserver {
  explicit World(RouterOptions options_in = {}, SpanSink* spans = nullptr)
      : options(options_in) {
    options.incarnation = std::string(16, 'r');
    options.model = "m";
    core = std::make_unique<session::RecordedCore>(
        session::RecorderOptions(), &recorded, options, &process, &random, this,
        &letters, this, spans);
  }
  ~World() override {
    core.reset();
    if (around_recorder) return;
    RouterObserver nobody;
    const auto replay = session::Replay::Create(&recorded, &nobody);
    const absl::Status status =
        replay.ok() ? (*replay)->Run() : replay.status();
    if (status.ok()) return;
    std::fprintf(stderr, "replayed: %s\n", status.ToString().c_str());
    std::abort();
  }

  std::unique_ptr<DecodeStream> DialDecode(const v1::WorkerRef& worker,
                                           absl::Duration,
                                           const TraceContext& trace) override {
    decode_ids.push_back(worker.worker_id());
    traces.push_back(trace);
    return std::make_unique<FakeStream<v1::DecodeRequest, v1::DecodeResponse>>(
        &decodes.emplace_back());
  }
  std::unique_ptr<PrefillStream> DialPrefill(
      const v1::WorkerRef& worker, absl::Duration,
      const TraceContext& trace) override {
    prefill_ids.push_back(worker.worker_id());
    traces.push_back(trace);
    return std::make_unique<
        FakeStream<v1::PrefillRequest, v1::PrefillResponse>>(
        &prefills.emplace_back());
  }
  void OnFirstToken(int tokens, absl::Duration) override {
    tokens_told += tokens;
  }
  void OnTokens(int tokens, absl::Duration) override { tokens_told += tokens; }
  void OnEnded(const RequestSummary& summary) override {
    ended.push_back(summary);
  }
  void OnRetry(const AttemptLoss& loss) override {
    lost.push_back(absl::StrCat(std::string(loss.cause), " ",
                                std::string(loss.stage), " ",
                                std::string(loss.prefill_worker), " ",
                                std::string(loss.decode_worker)));
  }
  void OnClusterEvent(const ClusterEvent& event) override {
    using Kind = ClusterEvent::Kind;
    switch (event.kind) {
      case Kind::kRegistered:
        return;
      case Kind::kLost:
        told.push_back(
            absl::StrCat("lost ", event.worker, " ", std::string(event.cause)));
        return;
      case Kind::kRefused:
        told.push_back("refused " + event.worker);
        return;
      case Kind::kWorkerAvoided:
        told.push_back("avoided " + event.worker);
        return;
      case Kind::kPairAvoided:
        told.push_back(absl::StrCat("avoided ", event.worker, " ",
                                    event.decode_worker, " ", event.way));
        return;
    }
  }
  void OnSuspect(std::string_view, const std::string& first,
                 const std::string& second) override {
    told.push_back(absl::StrCat("suspect ", first, " ", second));
  }
  void OnAdapter(const std::string& name, std::string_view what,
                 const absl::Status&) override {
    told.push_back(absl::StrCat("adapter ", name, " ", std::string(what)));
  }

  static v1::WorkerHello Hello(const std::string& id, v1::WorkerRole role,
                               char incarnation = '1') {
    v1::WorkerHello hello;
    hello.mutable_worker()->set_worker_id(id);
    hello.mutable_worker()->set_incarnation(std::string(16, incarnation));
    hello.mutable_worker()->set_endpoint(id + ":1");
    hello.set_role(role);
    hello.set_model("m");
    (*hello.mutable_fingerprint())["weights"] = "w";
    (*hello.mutable_fingerprint())["numerics"] = "n";
    hello.set_protocol_min(1);
    hello.set_protocol_max(1);
    hello.set_max_model_len(1000);
    hello.set_block_size(16);
    hello.set_num_blocks(100);
    hello.set_max_num_seqs(8);
    for (const char* const feature :
         {kFeatureTypicalP, kFeatureLogitRules, kFeatureAttention,
          kFeatureBeamSearch, kFeatureNoKvCache, kFeaturePromptLogprobs}) {
      hello.add_features(feature);
    }
    return hello;
  }
  LeasePipe* Register(const v1::WorkerHello& hello,
                      const rpc::PeerIdentity& peer = {}) {
    LeasePipe* const lease = &leases.emplace_back();
    core->AddRegistration(
        std::make_unique<FakeStream<v1::RegisterResponse, v1::RegisterRequest>>(
            lease),
        peer);
    v1::RegisterRequest message;
    *message.mutable_hello() = hello;
    lease->Say(message);
    Load(lease);
    return lease;
  }
  LeasePipe* Prefill(const std::string& id) {
    return Register(Hello(id, v1::WORKER_ROLE_PREFILL));
  }
  LeasePipe* Decode(const std::string& id) {
    return Register(Hello(id, v1::WORKER_ROLE_DECODE));
  }
  void Load(LeasePipe* lease, v1::WorkerState state = v1::WORKER_STATE_READY) {
    v1::RegisterRequest message;
    message.mutable_load()->set_state(state);
    message.mutable_load()->set_blocks_free(100);
    message.mutable_load()->set_waiting(waiting);
    lease->Say(message);
  }
  // Workers that are not broken speak, on leases and calls.
  void RunFor(absl::Duration duration) {
    const absl::Time end = loop.Now() + duration;
    while (loop.Now() < end) {
      loop.RunFor(std::min(end - loop.Now(), absl::Milliseconds(250)));
      for (LeasePipe& lease : leases) {
        if (lease.open && !frozen.contains(&lease)) {
          Load(&lease, draining.contains(&lease) ? v1::WORKER_STATE_DRAINING
                                                 : v1::WORKER_STATE_READY);
        }
      }
      for (DecodePipe& pipe : decodes) {
        v1::DecodeResponse beat;
        beat.mutable_beat();
        if (!frozen.contains(&pipe)) pipe.Say(beat);
      }
      for (PrefillPipe& pipe : prefills) {
        v1::PrefillResponse beat;
        beat.mutable_beat();
        if (!frozen.contains(&pipe)) pipe.Say(beat);
      }
    }
  }
  void Settle() { loop.RunFor(absl::ZeroDuration()); }

  static AdmittedRequest Ask(std::vector<int32_t> prompt = {},
                             int max_tokens = 8) {
    AdmittedRequest admitted;
    admitted.prompt = std::move(prompt);
    if (admitted.prompt.empty()) admitted.prompt.assign(kPrompt, 7);
    v1::GenerateRequest request;
    request.set_text("x");
    ModelLimits limits;
    limits.model = "m";
    limits.vocabulary_size = 100;
    limits.eos_token_ids = {26};
    admitted.effective = *Validate(request, limits);
    admitted.effective.stopping.set_max_tokens(max_tokens);
    admitted.effective.sampling.set_seed(5);
    admitted.effective.output.set_return_token_ids(true);
    return admitted;
  }
  ClientPipe* Submit(AdmittedRequest admitted) {
    ClientPipe* const client = &clients.emplace_back();
    core->Submit(
        std::move(admitted),
        std::make_unique<FakeStream<v1::GenerateResponse, v1::GenerateRequest>>(
            client));
    return client;
  }

  // What workers say.
  static v1::DecodeResponse Opened(uint32_t attempt,
                                   const std::string& ticket) {
    v1::DecodeResponse r;
    r.mutable_opened()->set_attempt(attempt);
    r.mutable_opened()->set_ticket(ticket);
    return r;
  }
  static v1::DecodeResponse Started(uint32_t attempt) {
    v1::DecodeResponse r;
    r.mutable_started()->set_attempt(attempt);
    return r;
  }
  static v1::DecodeResponse Dead(uint32_t attempt, bool preempted,
                                 const std::string& way = "") {
    v1::DecodeResponse r;
    r.mutable_dead()->set_attempt(attempt);
    r.mutable_dead()->set_code(static_cast<int>(absl::StatusCode::kAborted));
    r.mutable_dead()->set_preempted(preempted);
    r.mutable_dead()->set_failed_way(way);
    return r;
  }
  static v1::DecodeResponse Tokens(int position, std::vector<int32_t> ids) {
    v1::DecodeResponse r;
    r.mutable_tokens()->set_position(position);
    for (int32_t id : ids) r.mutable_tokens()->add_tokens()->set_token_id(id);
    return r;
  }
  static v1::DecodeResponse Finished(v1::FinishReason reason) {
    v1::DecodeResponse r;
    r.mutable_finished()->set_reason(reason);
    return r;
  }
  static v1::PrefillResponse Computing() {
    v1::PrefillResponse r;
    r.mutable_started()->set_cached_tokens(16);
    return r;
  }
  static v1::PrefillResponse First(
      int position, int32_t id,
      v1::FinishReason reason = v1::FINISH_REASON_UNSPECIFIED) {
    v1::PrefillResponse r;
    r.mutable_first_token()->set_position(position);
    r.mutable_first_token()->mutable_token()->set_token_id(id);
    r.mutable_first_token()->set_finish_reason(reason);
    return r;
  }
  static v1::PrefillResponse Done() {
    v1::PrefillResponse r;
    r.mutable_done()->set_prefill_us(1000);
    r.mutable_done()->set_handoff_bytes(4096);
    r.mutable_done()->set_way("shm");
    return r;
  }
  // A whole good prefill on the newest calls; the sequence decodes then.
  void PrefillAndCommit(uint32_t attempt, int position, int32_t token) {
    decodes.back().Say(Opened(attempt, "t"));
    prefills.back().Say(Computing());
    prefills.back().Say(First(position, token));
    decodes.back().Say(Started(attempt));
    prefills.back().Say(Done());
    prefills.back().Break(absl::OkStatus());
  }

  // What the client saw.
  static std::string Text(const ClientPipe& client) {
    std::string text;
    for (const auto& r : client.sent) text += r.delta().text();
    return text;
  }
  static std::vector<uint32_t> Ids(const ClientPipe& client) {
    std::vector<uint32_t> ids;
    for (const auto& r : client.sent) {
      ids.insert(ids.end(), r.delta().token_ids().begin(),
                 r.delta().token_ids().end());
    }
    return ids;
  }
  static v1::FinishReason Reason(const ClientPipe& client) {
    for (const auto& r : client.sent) {
      if (r.has_finished()) return r.finished().finish_reason();
    }
    return v1::FINISH_REASON_UNSPECIFIED;
  }

  RouterOptions options;
  VirtualLoop loop;
  VirtualProcess process{&loop};  // the router's own, to be frozen
  SeededRandom random{1};
  Letters letters;
  std::deque<DecodePipe> decodes;
  std::deque<PrefillPipe> prefills;
  std::deque<LeasePipe> leases;
  std::deque<ClientPipe> clients;
  absl::flat_hash_set<const void*> frozen;    // pipes that say nothing
  absl::flat_hash_set<const void*> draining;  // leases
  int waiting = 0;  // on each worker, as its load says
  std::vector<std::string> decode_ids, prefill_ids;  // dialled, in order
  std::vector<TraceContext> traces;                  // of all calls
  std::vector<RequestSummary> ended;
  int tokens_told = 0;            // of all requests
  std::vector<std::string> lost;  // attempts: cause, stage, pair
  std::vector<std::string> told;  // of the cluster and its adapters
  std::stringstream recorded;
  // The test calls parts of the core that no process calls.
  bool around_recorder = false;
  std::unique_ptr<RouterCore> core;
};

}  // namespace tandem::router

#endif  // TANDEM_TESTS_ROUTER_WORLD_H_
