// SPDX-License-Identifier: Apache-2.0
// Row "determinism": what a client reads of a request is the same, byte for
// byte, whatever shares its steps, however its prompt is cut, wherever it is
// moved in between, and however often it loses its blocks.
//
// In one process: decode workers' cores, grammars, engines and the kernels of
// the CPU on the embedded model, behind the router's output. The router between
// them is this test: it moves a sequence by a new call with the tokens so far,
// as after a worker's loss.

#include <algorithm>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "common/thread_loop.h"
#include "decode_worker/core.h"
#include "engine/checkpoint/model_config.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/device/device_executor.h"
#include "engine/kv/kv_offload.h"
#include "engine/model/model.h"
#include "kernels/cpu/cpu_backend.h"
#include "router/core/output.h"
#include "router/intake/model_text.h"
#include "tests/figures/figures.h"
#include "worker/text_grammars.h"

namespace tandem::figures {
namespace {

constexpr int kBlockSize = 16, kMaxLength = 192, kMaxTokens = 32;

enum class Mode { kGreedy, kTopP, kPenalties, kStops, kGrammar };
constexpr int kModes = 5;
constexpr const char* kModeNames[] = {"greedy", "top-p", "penalties",
                                      "stop strings", "grammar"};

// A request, as a router admits it.
struct Asked {
  std::string what;
  router::EffectiveRequest effective;
  std::vector<int32_t> prompt;
};

// What its client read, all of it.
struct Answer {
  v1::GeneratedSequence sequence;
  std::string trouble;

  bool operator==(const Answer& other) const {
    return trouble.empty() && other.trouble.empty() &&
           sequence.SerializeAsString() == other.sequence.SerializeAsString();
  }
  int tokens() const { return sequence.token_ids_size(); }
};

// How workers are set up, and how many sequences are there at once.
struct Arrangement {
  int batch = 1;
  int chunk = 512;  // of a prompt, where the others decode
  bool run_ahead = false;
  int num_blocks = 0;  // 0: enough for all
  bool prefix_cache = false;
  int offload_blocks = 0;
};

// A request to be played, and where in its output it changes the worker.
struct Job {
  const Asked* asked = nullptr;
  std::set<int> moves = {};
};

struct Played {
  std::vector<Answer> answers;
  int64_t moves = 0;
  int64_t preemptions = 0;
  int64_t restored = 0;  // blocks
};

template <typename T>
T Must(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "%s\n", result.status().ToString().c_str());
  std::abort();
}

// The model and its text: of the whole row.
class Lab {
 public:
  Lab()
      : directory_(integration::EmbeddedModel()),
        backend_(Must(kernels::NewCpuBackend({.threads = 1}))),
        text_(Must(
            router::ModelText::Load(directory_, {.served_name = "tales"}))) {
    const auto checkpoint = Must(engine::Checkpoint::Open(directory_));
    model_ = Must(engine::Model::Load(Must(engine::LoadModelSpec(directory_)),
                                      checkpoint, {}, backend_.get()));
  }

  const std::string& directory() const { return directory_; }
  kernels::Backend* backend() const { return backend_.get(); }
  const engine::Model& model() const { return *model_; }
  router::ModelText* text() const { return text_.get(); }

  Asked Admit(const std::string& what, const v1::GenerateRequest& request) {
    Asked asked{.what = what,
                .effective = Must(router::Validate(request, text_->limits())),
                .prompt = Must(text_->Encode(request)).token_ids};
    const absl::Status fits =
        router::FitToContext(static_cast<int>(asked.prompt.size()),
                             text_->limits(), &asked.effective);
    EXPECT_TRUE(fits.ok()) << fits;
    return asked;
  }

 private:
  const std::string directory_;
  const std::unique_ptr<kernels::Backend> backend_;
  const std::unique_ptr<router::ModelText> text_;
  std::unique_ptr<engine::Model> model_;
};

// A decode worker, without the process around it.
struct Worker {
  Worker(const Lab& lab, const Arrangement& setup, int index,
         worker::Grammars* grammars, Loop* loop)
      : incarnation(16, static_cast<char>('a' + index)), random(1) {
    const int rows = setup.batch - 1 + setup.chunk;
    const int blocks = setup.num_blocks > 0
                           ? setup.num_blocks
                           : setup.batch * (kMaxLength / kBlockSize);
    executor =
        Must(engine::DeviceExecutor::Create({.max_rows = rows,
                                             .max_sequences = setup.batch,
                                             .block_size = kBlockSize,
                                             .num_blocks = blocks},
                                            &lab.model(), lab.backend(), loop));
    pool = std::make_unique<engine::KvPool>(blocks, kBlockSize);
    if (setup.offload_blocks > 0) {
      memory.resize(
          static_cast<size_t>(setup.offload_blocks * executor->block_bytes()));
      offload = std::make_unique<engine::KvOffload>(
          engine::KvOffloadOptions{.memory_blocks = setup.offload_blocks}, loop,
          executor.get(), pool.get(), memory.data(), nullptr);
    }
    decode_worker::DecodeOptions options;
    options.incarnation = incarnation;
    options.engine = {.max_num_seqs = setup.batch,
                      .max_num_batched_tokens = rows,
                      .max_model_len = kMaxLength,
                      .vocab_size = lab.text()->limits().vocabulary_size,
                      .prefix_caching = setup.prefix_cache,
                      .run_ahead = setup.run_ahead};
    options.offload = offload.get();
    options.grammars = grammars;
    // Whoever has room for a prompt comes in, so that room runs short.
    options.admission_factor = 1;
    options.expected_new_tokens = 1;
    options.max_preemptions = 1 << 20;
    options.lease = options.stall_limit = absl::Hours(24);
    const kernels::KvShape& shape = executor->kv_shape();
    options.receiver.layers.count = shape.num_layers;
    options.receiver.kv_heads = shape.kv_heads;
    options.receiver.head_dim = shape.head_dim;
    options.receiver.kv_dtype = "f32";
    options.receiver.ways = {"grpc"};
    core = std::make_unique<decode_worker::DecodeCore>(
        options, loop, &random, executor.get(), pool.get());
  }
  // The loop has stopped. The device first, which then calls nobody.
  ~Worker() { executor.reset(); }

  const std::string incarnation;
  SeededRandom random;
  std::unique_ptr<engine::KvPool> pool;
  std::vector<std::byte> memory;
  std::unique_ptr<engine::KvOffload> offload;
  std::unique_ptr<decode_worker::DecodeCore> core;
  std::unique_ptr<engine::DeviceExecutor> executor;
};

// A call, between a worker's end and the client's.
struct Wire {
  StreamHandler<v1::DecodeRequest>* worker = nullptr;
  StreamHandler<v1::DecodeResponse>* client = nullptr;  // null: hung up
};

class WorkersEnd final : public decode_worker::DecodeStream {
 public:
  WorkersEnd(std::shared_ptr<Wire> wire, Loop* loop)
      : wire_(std::move(wire)), loop_(loop) {}
  ~WorkersEnd() override { wire_->worker = nullptr; }
  void Start(StreamHandler<v1::DecodeRequest>* handler) override {
    wire_->worker = handler;
  }
  void Send(v1::DecodeResponse message) override {
    loop_->Post([wire = wire_, message = std::move(message)] {
      if (wire->client != nullptr) wire->client->OnMessage(message);
    });
  }
  size_t unsent() const override { return 0; }
  void PauseReading(bool) override {}
  void Close(absl::Status status) override {
    wire_->worker = nullptr;
    loop_->Post([wire = wire_, status = std::move(status)] {
      if (wire->client != nullptr) wire->client->OnClosed(status);
    });
  }
  std::string peer() const override { return "here"; }

 private:
  const std::shared_ptr<Wire> wire_;
  Loop* const loop_;
};

// What a client is sent, put together.
class Reader final : public router::ClientStream {
 public:
  explicit Reader(v1::GeneratedSequence* all) : all_(all) {}
  void Start(StreamHandler<v1::GenerateRequest>*) override {}
  void Send(v1::GenerateResponse event) override {
    all_->mutable_text()->append(event.delta().text());
    all_->mutable_token_ids()->MergeFrom(event.delta().token_ids());
    all_->mutable_logprobs()->MergeFrom(event.delta().logprobs());
    if (event.has_finished()) *all_->mutable_finished() = event.finished();
  }
  size_t unsent() const override { return 0; }
  void PauseReading(bool) override {}
  void Close(absl::Status) override {}
  std::string peer() const override { return "here"; }

 private:
  v1::GeneratedSequence* const all_;
};

// Plays jobs on one or two workers, all on a loop of its own.
class Play {
 public:
  Play(Lab* lab, const Arrangement& setup, const std::vector<Job>& jobs)
      : lab_(lab),
        setup_(setup),
        jobs_(jobs),
        grammars_(Must(worker::TextGrammars::Load(
            lab->directory(), lab->text()->limits().vocabulary_size,
            size_t{1} << 20, &loop_))) {
    played_.answers.resize(jobs.size());
  }

  Played Run() {
    loop_.RunSync([this] {
      for (int i = 0; i < 2; ++i) {
        workers_.push_back(std::make_unique<Worker>(*lab_, setup_, i,
                                                    grammars_.get(), &loop_));
      }
      for (int i = 0; i < setup_.batch; ++i) StartNext();
    });
    done_.get_future().wait();
    loop_.RunSync([this] {
      for (const auto& worker : workers_) {
        EXPECT_TRUE(worker->core->idle());
        EXPECT_TRUE(worker->core->CheckInvariants().ok());
        played_.preemptions += worker->core->engine_stats().preemptions;
        if (worker->offload != nullptr) {
          played_.restored += worker->offload->counters().restored;
        }
      }
    });
    loop_.Stop();
    workers_.clear();
    return std::move(played_);
  }

 private:
  class Client;

  void StartNext();
  void OnEnded();

  Lab* const lab_;
  const Arrangement setup_;
  const std::vector<Job>& jobs_;
  ThreadLoop loop_{"determinism"};
  const std::unique_ptr<worker::TextGrammars> grammars_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::unique_ptr<Client>> clients_;  // those started
  size_t ended_ = 0;
  Played played_;
  std::promise<void> done_;
};

// One request, and the router's part of it.
class Play::Client final : StreamHandler<v1::DecodeResponse> {
 public:
  Client(Play* play, size_t number)
      : play_(play),
        number_(number),
        job_(play->jobs_[number]),
        answer_(&play->played_.answers[number]),
        reader_(&answer_->sequence),
        output_(job_.asked->effective, job_.asked->prompt, play->lab_->text(),
                &reader_),
        since_(play->loop_.Now()),
        again_(&play->loop_) {}

  // On the worker whose turn it is, behind what there is of an output.
  void Open() {
    const router::EffectiveRequest& effective = job_.asked->effective;
    const auto count = static_cast<int>(tokens_.size());
    if (count > 0 && output_.EndsSequence(tokens_.back(), count)) {
      return End(v1::FINISH_REASON_STOP);
    }
    if (count >= effective.stopping.max_tokens()) {
      return End(v1::FINISH_REASON_LENGTH);
    }
    Worker* const worker = play_->workers_[turn_ % 2].get();
    v1::DecodeRequest request;
    v1::DecodeOpen* const open = request.mutable_open();
    open->set_request_id(absl::StrFormat("%016d", number_));
    open->set_decode_incarnation(worker->incarnation);
    const std::vector<int32_t>& prompt = job_.asked->prompt;
    open->mutable_prompt_token_ids()->Add(prompt.begin(), prompt.end());
    open->mutable_output_token_ids()->Add(tokens_.begin(), tokens_.end());
    *open->mutable_sampling() = router::ToSamplingParams(effective);
    *open->mutable_stopping() = router::ToStoppingParams(effective);
    open->set_bypass_prefix_cache(!play_->setup_.prefix_cache);
    open->set_deadline_ms(24 * 3600 * 1000);
    open->set_age_ms(absl::ToInt64Milliseconds(play_->loop_.Now() - since_));
    wire_ = std::make_shared<Wire>();
    wire_->client = this;
    worker->core->AddCall(std::make_unique<WorkersEnd>(wire_, &play_->loop_));
    wire_->worker->OnMessage(std::move(request));
    if (job_.moves.contains(count) && moved_at_ != count) Move();
  }

 private:
  void OnMessage(v1::DecodeResponse message) override {
    if (message.has_dead()) {
      v1::DecodeRequest request;
      v1::DecodeRetry* const retry = request.mutable_retry();
      retry->set_attempt(message.dead().attempt());
      retry->mutable_output_token_ids()->Add(tokens_.begin(), tokens_.end());
      if (wire_->worker != nullptr) wire_->worker->OnMessage(request);
    } else if (message.has_finished()) {
      HangUp();
      End(message.finished().reason());
    }
    const v1::DecodedTokens& came = message.tokens();
    for (int i = 0; i < came.tokens_size(); ++i) {
      const size_t next = job_.asked->prompt.size() + tokens_.size();
      if (static_cast<size_t>(came.position() + i) != next) {
        answer_->trouble = absl::StrFormat("position %d came where %d was due",
                                           came.position() + i, next);
      }
      tokens_.push_back(came.tokens(i).token_id());
      const auto verdict = output_.Add(came.tokens(i));
      output_.Flush();
      if (verdict == router::Output::Verdict::kStopString) {
        HangUp();
        return End(v1::FINISH_REASON_STOP);
      }
      if (job_.moves.contains(static_cast<int>(tokens_.size()))) {
        return Move();  // what else came is lost
      }
    }
  }
  void OnClosed(absl::Status status) override {
    wire_.reset();
    if (!absl::IsResourceExhausted(status)) {
      answer_->trouble = status.ToString();
      return End(v1::FINISH_REASON_CANCELLED);
    }
    again_.Start(absl::Milliseconds(1), [this] { Open(); });  // no room
  }

  void HangUp() {
    const std::shared_ptr<Wire> wire = std::exchange(wire_, nullptr);
    wire->client = nullptr;
    if (wire->worker == nullptr) return;
    std::exchange(wire->worker, nullptr)
        ->OnClosed(absl::CancelledError("moved"));
  }
  void Move() {
    moved_at_ = static_cast<int>(tokens_.size());
    ++play_->played_.moves;
    ++turn_;
    HangUp();
    Open();
  }
  void End(v1::FinishReason reason) {
    output_.Finished(reason);
    play_->OnEnded();
  }

  Play* const play_;
  const size_t number_;
  const Job& job_;
  Answer* const answer_;
  Reader reader_;
  router::Output output_;
  const absl::Time since_;
  std::vector<int32_t> tokens_;
  std::shared_ptr<Wire> wire_;
  size_t turn_ = 0;
  int moved_at_ = -1;
  Timer again_;
};

void Play::StartNext() {
  if (clients_.size() == jobs_.size()) return;
  clients_.push_back(std::make_unique<Client>(this, clients_.size()));
  clients_.back()->Open();
}

void Play::OnEnded() {
  if (++ended_ == jobs_.size()) return done_.set_value();
  loop_.Post([this] { StartNext(); });
}

// Regular and context-free, with characters of two to four bytes, which no
// token of the model holds whole.
void Constrain(int number, v1::StructuredOptions* structured) {
  switch (number % 4) {
    case 0:
      structured->set_regex("[äöüß€🙂]{4,12}");
      break;
    case 1:
      structured->set_json_schema(
          R"({"type":"object","properties":{"name":{"type":"string",)"
          R"("maxLength":8},"age":{"type":"integer"}},)"
          R"("required":["name","age"],"additionalProperties":false})");
      break;
    case 2:
      structured->set_regex("(the|a) [a-z]{2,8}( (saw|met) (the|a) [a-z]+)*!");
      break;
    default:
      structured->set_grammar(
          "start: \"(\" (WORD | start)+ \")\"\nWORD: /[a-zé]{1,3} /\n");
  }
}

v1::GenerateRequest RequestOf(const std::string& prompt, int number,
                              Mode mode) {
  v1::GenerateRequest request = integration::TextRequest(prompt, kMaxTokens);
  request.mutable_output()->set_logprobs(2);
  v1::SamplingOptions* const sampling = request.mutable_sampling();
  sampling->set_seed(static_cast<uint64_t>(number) * 77 + 1);
  if (mode != Mode::kGreedy) sampling->set_temperature(0.9f);
  if (mode == Mode::kTopP) sampling->set_top_p(0.85f);
  if (mode == Mode::kPenalties) {
    sampling->set_repetition_penalty(1.3f);
    sampling->set_presence_penalty(0.5f);
    sampling->set_frequency_penalty(0.4f);
  }
  if (mode == Mode::kGrammar) Constrain(number, request.mutable_structured());
  return request;
}

// Of a text that comes without them: one that is there, across tokens, and one
// that begins like what is.
void AddStops(const std::string& text, v1::GenerateRequest* request) {
  request->mutable_stopping()->add_stop("\n\n\n");
  const size_t third = text.size() / 3;
  if (third < 6) return;
  for (const char c : text) {
    if (!absl::ascii_isascii(static_cast<unsigned char>(c))) return;
  }
  request->mutable_stopping()->add_stop(text.substr(third, 5) + "#");
  request->mutable_stopping()->add_stop(text.substr(2 * third, 5));
  request->mutable_stopping()->set_include_stop_str_in_output(third % 2 == 0);
}

class DeterminismRow : public Row {
 protected:
  Played PlayJobs(const Arrangement& setup, const std::vector<Job>& jobs) {
    return Play(&lab_, setup, jobs).Run();
  }
  struct Shortage {
    int answers = 0, different = 0;
    int64_t preemptions = 0;
    int64_t restored = 0;  // blocks
  };

  Played PlayAll(const Arrangement& setup) {
    std::vector<Job> jobs;
    for (const Asked& asked : all_) jobs.push_back({&asked});
    return PlayJobs(setup, jobs);
  }

  // All requests, and what each gives by itself.
  void Prepare(int prompts) {
    const std::vector<std::string> texts =
        integration::SomePrompts(prompts, seed_);
    std::vector<v1::GenerateRequest> stopped;
    for (int i = 0; i < prompts; ++i) {
      stopped.push_back(
          RequestOf(texts[static_cast<size_t>(i)], i, Mode::kStops));
      all_.push_back(lab_.Admit("without stop strings", stopped.back()));
    }
    const std::vector<Answer> probes = PlayAll({}).answers;
    all_.clear();
    for (size_t i = 0; i < texts.size(); ++i) {
      AddStops(probes[i].sequence.text(), &stopped[i]);
      for (int mode = 0; mode < kModes; ++mode) {
        all_.push_back(
            lab_.Admit(absl::StrFormat("prompt %d, %s", i, kModeNames[mode]),
                       static_cast<Mode>(mode) == Mode::kStops
                           ? stopped[i]
                           : RequestOf(texts[i], static_cast<int>(i),
                                       static_cast<Mode>(mode))));
      }
    }
    alone_ = PlayAll({}).answers;
    for (size_t i = 0; i < all_.size(); ++i) {
      EXPECT_EQ(alone_[i].trouble, "") << all_[i].what;
      EXPECT_GT(alone_[i].tokens(), 0) << all_[i].what;
      const v1::GenerateFinished& finished = alone_[i].sequence.finished();
      tokens_ += alone_[i].tokens();
      stop_strings_ += finished.stop_string().empty() ? 0 : 1;
      not_ascii_ += std::any_of(alone_[i].sequence.text().begin(),
                                alone_[i].sequence.text().end(),
                                [](char c) { return (c & 0x80) != 0; });
    }
  }

  // How many of `answers` are others than those of the requests by themselves.
  int Different(const std::vector<Job>& jobs,
                const std::vector<Answer>& answers, const std::string& where) {
    int different = 0;
    for (size_t i = 0; i < jobs.size(); ++i) {
      const auto which = static_cast<size_t>(jobs[i].asked - all_.data());
      if (answers[i] == alone_[which]) continue;
      if (++different > 3) continue;
      ADD_FAILURE() << where << ", " << all_[which].what << ": "
                    << answers[i].trouble << "\n  alone: "
                    << alone_[which].sequence.ShortDebugString()
                    << "\n  now: " << answers[i].sequence.ShortDebugString();
    }
    return different;
  }
  int DifferentOfAll(const Played& played, const std::string& where) {
    std::vector<Job> jobs;
    for (const Asked& asked : all_) jobs.push_back({&asked});
    return Different(jobs, played.answers, where);
  }

  // Who is preempted is a matter of time: again until it were more than `few`.
  Shortage PlayShort(const Arrangement& setup, const std::string& where,
                     int few) {
    Shortage all;
    for (int i = 0; i < 10 && all.preemptions <= few; ++i) {
      const Played played = PlayAll(setup);
      all.answers += static_cast<int>(played.answers.size());
      all.preemptions += played.preemptions;
      all.restored += played.restored;
      all.different += DifferentOfAll(played, where);
    }
    return all;
  }

  Lab lab_;
  std::vector<Asked> all_;
  std::vector<Answer> alone_;
  int64_t tokens_ = 0;
  int stop_strings_ = 0, not_ascii_ = 0;  // requests
};

TEST_F(DeterminismRow, Holds) {
  const int prompts = Sized(200, 8), moved = Sized(20, 1);
  Prepare(prompts);
  const auto all = static_cast<int>(all_.size());

  int different = 0, setups = 0;
  for (const int batch : {1, 3, 8, 32}) {
    for (const int chunk : {1, 7, 64}) {
      ++setups;
      different += DifferentOfAll(
          PlayAll({.batch = batch, .chunk = chunk, .run_ahead = true}),
          absl::StrFormat("batch %d, chunk %d", batch, chunk));
    }
  }
  Tell(absl::StrFormat("%d prompts, %d sampler modes, batches 1/3/8/32, chunks "
                       "1/7/64: identical byte for byte",
                       prompts, kModes),
       absl::StrFormat("%d answers of %d tokens, %d by a stop string, %d not "
                       "in ASCII; %d setups, %d differ",
                       all, tokens_, stop_strings_, not_ascii_, setups,
                       different),
       different == 0 && stop_strings_ > prompts / 4 && not_ascii_ > 0);

  std::vector<Job> jobs;
  for (int i = 0; i < moved * kModes; ++i) {
    Job always{&all_[static_cast<size_t>(i)]};
    for (int at = 0; at <= alone_[static_cast<size_t>(i)].tokens(); ++at) {
      jobs.push_back({always.asked, {at}});
      always.moves.insert(at);
    }
    jobs.push_back(std::move(always));
  }
  Played played = PlayJobs(
      {.batch = 8, .chunk = 64, .run_ahead = true, .prefix_cache = true}, jobs);
  different = Different(jobs, played.answers, "moved");
  Tell(absl::StrFormat("moved to another worker before and behind each token, "
                       "and behind all, %d prompts in each mode: identical",
                       moved),
       absl::StrFormat("%d answers, %d moves, %d differ", jobs.size(),
                       played.moves, different),
       different == 0 && played.moves >= static_cast<int64_t>(jobs.size()));

  const Arrangement short_of_blocks = {.batch = 8,
                                       .chunk = 64,
                                       .run_ahead = true,
                                       .num_blocks = kMaxLength / kBlockSize};
  Shortage shortage = PlayShort(short_of_blocks, "preempted", prompts / 4);
  Tell(
      "preempted for want of blocks, and computed again: identical",
      absl::StrFormat("%d answers, %d preemptions, %d differ", shortage.answers,
                      shortage.preemptions, shortage.different),
      shortage.different == 0 && shortage.preemptions > prompts / 4);

  Arrangement offloaded = short_of_blocks;
  offloaded.prefix_cache = true;
  offloaded.offload_blocks = 64;
  shortage = PlayShort(offloaded, "preempted and brought back", prompts / 4);
  Tell("preempted, and their blocks brought back from memory: identical",
       absl::StrFormat("%d answers, %d preemptions, %d blocks brought back, %d "
                       "differ",
                       shortage.answers, shortage.preemptions,
                       shortage.restored, shortage.different),
       shortage.different == 0 && shortage.preemptions > prompts / 4 &&
           shortage.restored > 0);
}

}  // namespace
}  // namespace tandem::figures
