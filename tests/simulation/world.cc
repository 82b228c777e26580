// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/world.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "decode_worker/core.h"
#include "engine/kv_offload.h"
#include "engine/testing/fake_block_file.h"
#include "engine/testing/noisy_drafter.h"
#include "engine/testing/noisy_executor.h"
#include "prefill_worker/core.h"
#include "tests/simulation/parts.h"
#include "worker/registration.h"

namespace tandem::simulation {
namespace {

class World;

// ---- Workers.

struct Node {
  Node(World* w, std::string n) : world(w), name(std::move(n)) {}
  virtual ~Node() = default;
  virtual void Start() = 0;
  // Destroys everything that a crashed process loses.
  virtual void Clear() = 0;

  World* const world;
  const std::string name;
  std::shared_ptr<Host> host;
  std::unique_ptr<SeededRandom> random;
};

struct WorkerNode : Node {
  using Node::Node;
  virtual v1::WorkerLoad Load() const = 0;
  virtual handoff::SlabCounts Slabs() const = 0;
  virtual absl::Status CheckCore() const = 0;
  // What a worker still holds, or "".
  virtual std::string WhatIsLeft() const;
  absl::Status CheckInvariants() const;
  void StartParts();
  void ClearParts();
  void Register(v1::WorkerRole role);

  int block_size = 16;
  int num_blocks = 48;
  std::string incarnation;
  std::unique_ptr<engine::KvPool> pool;
  std::vector<std::byte> offload_memory;
  std::unique_ptr<engine::FakeExecutor> fake;
  std::unique_ptr<engine::Executor> wrapped;
  std::unique_ptr<engine::FakeBlockFile> offload_file;
  std::unique_ptr<engine::KvOffload> offload;
  std::unique_ptr<worker::Registration> registration;
  std::unique_ptr<FakeGrammars> grammars;
  engine::Executor* executor() const {
    return wrapped != nullptr ? wrapped.get() : fake.get();
  }
};

struct DecodeNode final : WorkerNode {
  using WorkerNode::WorkerNode;
  void Start() override;
  void Clear() override;
  v1::WorkerLoad Load() const override { return core->Load(); }
  handoff::SlabCounts Slabs() const override {
    return core->receiver().slabs();
  }
  absl::Status CheckCore() const override {
    absl::Status status = core->CheckInvariants();
    if (!status.ok() || draft_pool == nullptr) return status;
    if (!draft_device->violations().empty()) {
      return absl::InternalError(draft_device->violations().front());
    }
    return draft_pool->CheckInvariants();
  }
  std::string WhatIsLeft() const override {
    std::string left = WorkerNode::WhatIsLeft();
    if (draft_pool != nullptr && draft_pool->counts().live > 0) {
      absl::StrAppend(&left, name, ": blocks of the draft model; ");
    }
    return left;
  }
  engine::Speculation StartDraftModel();
  std::unique_ptr<engine::NoisyDrafters> drafters;
  // Or a draft model, on a device of its own.
  std::unique_ptr<engine::FakeExecutor> draft_device;
  std::unique_ptr<engine::NoisyExecutor> draft_executor;
  std::unique_ptr<engine::KvPool> draft_pool;
  std::unique_ptr<decode_worker::DecodeCore> core;
};

struct PrefillNode final : WorkerNode {
  using WorkerNode::WorkerNode;
  void Start() override;
  void Clear() override;
  v1::WorkerLoad Load() const override { return core->Load(); }
  handoff::SlabCounts Slabs() const override { return core->sender().slabs(); }
  absl::Status CheckCore() const override { return core->CheckInvariants(); }
  std::unique_ptr<prefill_worker::PrefillCore> core;
};

struct RouterNode final : Node, router::Dialer, router::RouterObserver {
  using Node::Node;
  void Start() override;
  void Clear() override { core.reset(); }
  std::unique_ptr<router::DecodeStream> DialDecode(
      const v1::WorkerRef& worker, absl::Duration deadline,
      const TraceContext&) override;
  std::unique_ptr<router::PrefillStream> DialPrefill(
      const v1::WorkerRef& worker, absl::Duration deadline,
      const TraceContext&) override;
  std::unique_ptr<router::RouterCore> core;
};

// ---- A client: one request, checked token by token.

struct Client final : StreamHandler<v1::GenerateResponse> {
  Client(World* w, int n) : world(w), number(n) {}
  void Begin();
  void OnMessage(v1::GenerateResponse response) override;
  void OnClosed(absl::Status status) override;
  void CheckScores(const v1::PromptLogprobs& part);
  void Cancel();
  std::string Name() const { return absl::StrCat("client ", number); }

  World* const world;
  const int number;
  router::AdmittedRequest admitted;
  // Of each sequence.
  std::vector<std::vector<int32_t>> expected;
  std::vector<std::vector<int32_t>> tokens;
  std::vector<engine::SampledToken> expected_scores;
  size_t scores = 0;  // heard, all of them right
  std::unique_ptr<Stream<v1::GenerateRequest, v1::GenerateResponse>> stream;
  std::string router;  // whom it asked
  int started = 0, finished = 0, done = 0;
  bool ended = false;
  bool cancelled = false;
  absl::Status status;
};

class World {
 public:
  World(uint64_t seed, const Profile& profile)
      : profile_(profile), random_(seed), network_(&loop_, &random_, {}) {}

  Report Run();

  VirtualLoop& loop() { return loop_; }
  SeededRandom& random() { return random_; }
  Network& network() { return network_; }
  const Profile& profile() const { return profile_; }
  std::shared_ptr<Host> host() const { return clients_host_; }
  Node* Find(const std::string& name);
  RouterNode* SomeRouter();
  void Wrong(std::string what) {
    if (report_.wrong.empty()) {
      report_.wrong =
          absl::StrCat(absl::FormatTime(absl::RFC3339_full, loop_.Now(),
                                        absl::UTCTimeZone()),
                       ": ", what);
    }
  }
  std::vector<std::string> router_names() const { return router_names_; }
  bool IsRouter(const std::string& name) const {
    return name.rfind("router", 0) == 0;
  }
  std::set<std::string> crashed_routers;

 private:
  void Build();
  void PlanRequests();
  void PlanFaults();
  void CrashLater(const std::string& name, absl::Duration at);
  void StopFaults();
  void CheckAll();
  void CheckQuiet();
  bool AllEnded() const;
  absl::Duration SomeTime(absl::Duration limit) {
    return limit * random_.Uniform();
  }

  const Profile profile_;
  VirtualLoop loop_;
  SeededRandom random_;
  Network network_;
  std::shared_ptr<Host> clients_host_;
  std::vector<std::string> router_names_;
  std::map<std::string, std::unique_ptr<Node>> nodes_;
  std::vector<std::unique_ptr<Client>> clients_;
  Report report_;
};

// ---- WorkerNode

void WorkerNode::StartParts() {
  incarnation = random->Bytes(16);
  engine::FakeExecutorOptions options;
  options.model = Model(world->profile().window);
  options.num_blocks = num_blocks;
  options.block_size = block_size;
  options.seed = random->Next();
  options.step_base = absl::Milliseconds(8);
  options.step_jitter = absl::Milliseconds(6);
  options.copy_base = absl::Microseconds(500);
  fake = std::make_unique<engine::FakeExecutor>(options, &host->loop);
  pool = std::make_unique<engine::KvPool>(num_blocks, block_size);
  grammars = std::make_unique<FakeGrammars>(&host->loop, random.get());
  // Of a disk that fails now and then, and (every third) is too slow.
  const engine::FakeBlockFileOptions disk{
      .latency = absl::Milliseconds(random->Below(3) == 0 ? 80 : 3),
      .full = 0.1,
      .corrupt = 0.1,
      .seed = random->Next()};
  offload_file = std::make_unique<engine::FakeBlockFile>(disk, &host->loop);
  constexpr int kMemoryBlocks = 12;
  offload_memory.resize(
      static_cast<size_t>(kMemoryBlocks * fake->block_bytes()));
  offload = std::make_unique<engine::KvOffload>(
      engine::KvOffloadOptions{.memory_blocks = kMemoryBlocks,
                               .file_blocks = 40},
      &host->loop, fake.get(), pool.get(), offload_memory.data(),
      offload_file.get());
}

void WorkerNode::ClearParts() {
  registration.reset();
  wrapped.reset();
  fake.reset();
  offload_file.reset();
}

void WorkerNode::Register(v1::WorkerRole role) {
  worker::RegistrationOptions options;
  options.hello = MakeHello(name, role, incarnation, fake->kv_shape());
  registration = std::make_unique<worker::Registration>(
      options, &host->loop, random.get(),
      [this](const std::string& endpoint) {
        auto* const router = static_cast<RouterNode*>(world->Find(endpoint));
        router::RouterCore* const core = router->core.get();
        return world->network()
            .Connect<v1::RegisterRequest, v1::RegisterResponse>(
                host, router->host, /*messy=*/false, [core](auto stream) {
                  core->AddRegistration(std::move(stream));
                });
      },
      [this] { return Load(); }, pool.get(),
      [](const std::string&, const absl::Status&) {});
  registration->SetRouters(world->router_names());
}

std::string WorkerNode::WhatIsLeft() const {
  const v1::WorkerLoad load = Load();
  std::string left;
  const auto expect_zero = [&](const char* what, int value) {
    if (value != 0) absl::StrAppend(&left, name, ": ", value, " ", what, "; ");
  };
  expect_zero("blocks live", load.blocks_live());
  expect_zero("blocks reserved", load.blocks_reserved());
  expect_zero("tickets", load.tickets());
  expect_zero("streams", load.streams());
  expect_zero("slabs granted", load.slabs_granted());
  expect_zero("slabs in flight", load.slabs_in_flight());
  expect_zero("slabs quarantined", load.slabs_quarantined());
  expect_zero("running", load.running());
  expect_zero("waiting", load.waiting());
  expect_zero("tokens queued", load.queued_tokens());
  expect_zero("grammars", grammars->compiling());
  return left;
}

absl::Status WorkerNode::CheckInvariants() const {
  absl::Status status = pool->CheckInvariants();
  if (status.ok()) status = offload->CheckInvariants();
  if (status.ok()) status = CheckCore();
  if (status.ok() && !fake->violations().empty()) {
    status = absl::InternalError(fake->violations().front());
  }
  return status;
}

void DecodeNode::Start() {
  StartParts();
  if (world->profile().wrap_decode_executor) {
    wrapped = world->profile().wrap_decode_executor(fake.get(), &host->loop,
                                                    random.get());
  }
  decode_worker::DecodeOptions options =
      MakeDecodeOptions(name, incarnation, fake->kv_shape());
  options.offload = offload.get();
  options.grammars = grammars.get();
  options.engine.window = world->profile().window;
  if ((incarnation.front() & 3) == 3) {
    options.engine.max_draws = 24;
    options.engine.speculation = StartDraftModel();
  } else if ((incarnation.front() & 3) != 0) {
    // Right and wrong guesses, of which no client may notice anything.
    drafters = std::make_unique<engine::NoisyDrafters>(
        Model(), static_cast<uint64_t>(incarnation.front()));
    options.engine.max_draws = 24;
    options.engine.speculation = {.num_tokens = 6,
                                  .adapt = (incarnation.front() & 3) == 1,
                                  .drafters = drafters.get()};
  }
  core = std::make_unique<decode_worker::DecodeCore>(
      options, &host->loop, random.get(), executor(), pool.get());
  Register(v1::WORKER_ROLE_DECODE);
}

// Right by seven of ten, with room for some sequences.
engine::Speculation DecodeNode::StartDraftModel() {
  engine::FakeExecutorOptions device;
  device.model = Model(world->profile().window);
  device.num_blocks = num_blocks / 2;
  device.block_size = block_size;
  device.seed = random->Next();
  device.step_base = absl::Milliseconds(1);
  device.step_jitter = absl::Milliseconds(1);
  draft_device = std::make_unique<engine::FakeExecutor>(device, &host->loop);
  draft_executor = std::make_unique<engine::NoisyExecutor>(
      draft_device.get(), device.model.vocab_size, random->Next(), 0.7);
  draft_pool = std::make_unique<engine::KvPool>(device.num_blocks, block_size);
  return {.num_tokens = 6,
          .adapt = random->Below(2) == 0,
          .draft_model = {.executor = draft_executor.get(),
                          .pool = draft_pool.get(),
                          .max_positions = 400,
                          .max_rows = 64,
                          .max_sequences = 64}};
}

void DecodeNode::Clear() {
  ClearParts();
  draft_executor.reset();
  draft_device.reset();
  core.reset();
  grammars.reset();
  draft_pool.reset();
  offload.reset();
  pool.reset();
}

void PrefillNode::Start() {
  StartParts();
  prefill_worker::PrefillOptions options =
      MakePrefillOptions(name, incarnation, fake->kv_shape());
  options.offload = offload.get();
  options.grammars = grammars.get();
  options.engine.window = world->profile().window;
  core = std::make_unique<prefill_worker::PrefillCore>(
      options, &host->loop, random.get(), executor(), pool.get(),
      [this](const v1::WorkerRef& receiver)
          -> std::unique_ptr<handoff::SenderStream> {
        auto* const decode =
            static_cast<DecodeNode*>(world->Find(receiver.worker_id()));
        decode_worker::DecodeCore* const peer = decode->core.get();
        auto link = world->network().Connect<v1::LinkRequest, v1::LinkResponse>(
            host, decode->host, /*messy=*/true,
            [peer](auto stream) { peer->AddLink(std::move(stream)); });
        if (world->profile().wrap_link) {
          return world->profile().wrap_link(std::move(link), random.get());
        }
        return link;
      });
  Register(v1::WORKER_ROLE_PREFILL);
}

void PrefillNode::Clear() {
  ClearParts();
  core.reset();
  grammars.reset();
  offload.reset();
  pool.reset();
}

// ---- RouterNode

void RouterNode::Start() {
  core = std::make_unique<router::RouterCore>(
      MakeRouterOptions(random->Bytes(16)), &host->loop, random.get(), this,
      nullptr, this);
}

std::unique_ptr<router::DecodeStream> RouterNode::DialDecode(
    const v1::WorkerRef& worker, absl::Duration, const TraceContext&) {
  auto* const node = static_cast<DecodeNode*>(world->Find(worker.worker_id()));
  decode_worker::DecodeCore* const peer = node->core.get();
  auto call = world->network().Connect<v1::DecodeRequest, v1::DecodeResponse>(
      host, node->host, /*messy=*/false,
      [peer](auto stream) { peer->AddCall(std::move(stream)); });
  const auto& wrap = world->profile().wrap_decode_call;
  return wrap ? wrap(std::move(call)) : std::move(call);
}

std::unique_ptr<router::PrefillStream> RouterNode::DialPrefill(
    const v1::WorkerRef& worker, absl::Duration, const TraceContext&) {
  auto* const node = static_cast<PrefillNode*>(world->Find(worker.worker_id()));
  prefill_worker::PrefillCore* const peer = node->core.get();
  auto call = world->network().Connect<v1::PrefillRequest, v1::PrefillResponse>(
      host, node->host, /*messy=*/false,
      [peer](auto stream) { peer->AddCall(std::move(stream)); });
  const auto& wrap = world->profile().wrap_prefill_call;
  return wrap ? wrap(std::move(call)) : std::move(call);
}

// ---- Client

void Client::Begin() {
  RouterNode* const node = world->SomeRouter();
  router = node->name;
  router::RouterCore* const core = node->core.get();
  stream = world->network().Connect<v1::GenerateRequest, v1::GenerateResponse>(
      world->host(), node->host, /*messy=*/false,
      [core, request = admitted](auto client) mutable {
        core->Submit(std::move(request), std::move(client));
      });
  stream->Start(this);
}

void Client::OnMessage(v1::GenerateResponse response) {
  if (ended) return world->Wrong(Name() + " heard more after the end");
  if (response.has_started() && ++started > 1) {
    world->Wrong(Name() + " was told twice that it started");
  }
  const auto index = static_cast<size_t>(response.delta().index());
  if (response.has_delta() && index >= expected.size()) {
    return world->Wrong(absl::StrCat(Name(), " got sequence ", index));
  }
  tokens.resize(expected.size());
  for (const uint32_t id : response.delta().token_ids()) {
    if (finished > static_cast<int>(index)) {
      world->Wrong(Name() + " got tokens after the finish");
    }
    const std::vector<int32_t>& right = expected[index];
    const size_t at = tokens[index].size();
    if (at >= right.size()) {
      world->Wrong(absl::StrCat(Name(), " got more than ", at, " tokens"));
    } else if (static_cast<int32_t>(id) != right[at]) {
      world->Wrong(absl::StrCat(Name(), ": token ", at, " is ", id,
                                ", expected ", right[at]));
    }
    tokens[index].push_back(static_cast<int32_t>(id));
  }
  if (response.has_prompt_logprobs()) CheckScores(response.prompt_logprobs());
  finished += response.has_finished();
  done += response.has_done();
}

void Client::CheckScores(const v1::PromptLogprobs& part) {
  if (finished > 0 || !tokens[0].empty()) {
    world->Wrong(Name() + " got scores behind a token");
  }
  for (int i = 0; i < part.tokens_size(); ++i) {
    const v1::TokenLogprob& token = part.tokens(i);
    const int position = part.position() + i;
    if (position == 0) continue;
    if (position != static_cast<int>(scores) + 1 ||
        scores >= expected_scores.size()) {
      return world->Wrong(absl::StrCat(Name(), ": the score of ", position,
                                       " came behind ", scores));
    }
    const engine::SampledToken& right = expected_scores[scores++];
    if (static_cast<int32_t>(token.token_id()) != right.token_id ||
        token.logprob() != right.logprob || token.rank() != right.rank ||
        token.top_size() != static_cast<int>(right.top.size())) {
      world->Wrong(absl::StrCat(Name(), ": the score of ", position, " is ",
                                token.logprob(), ", expected ", right.logprob));
    }
  }
}

void Client::OnClosed(absl::Status s) {
  ended = true;
  status = std::move(s);
  if (!status.ok()) return;
  if (started != 1 || finished != static_cast<int>(expected.size()) ||
      done != 1) {
    world->Wrong(absl::StrCat(Name(), " ended OK with ", started, " started, ",
                              finished, " finished, ", done, " done"));
  }
  if (scores != expected_scores.size()) {
    world->Wrong(absl::StrCat(Name(), " ended OK with ", scores, " scores of ",
                              expected_scores.size()));
  }
  if (tokens != expected) {
    world->Wrong(absl::StrCat(Name(), " ended OK with ", tokens.size(),
                              " tokens of ", expected.size()));
  }
}

void Client::Cancel() {
  if (ended || stream == nullptr) return;
  cancelled = ended = true;
  status = absl::CancelledError("by the test");
  stream->Close(status);
}

// ---- World

Node* World::Find(const std::string& name) { return nodes_.at(name).get(); }

RouterNode* World::SomeRouter() {
  std::vector<std::string> alive;
  for (const std::string& name : router_names_) {
    if (nodes_.at(name)->host->alive) alive.push_back(name);
  }
  const auto& from = alive.empty() ? router_names_ : alive;
  return static_cast<RouterNode*>(Find(from[random_.Below(from.size())]));
}

void World::Build() {
  clients_host_ = std::make_shared<Host>(&loop_, "clients");
  const auto start = [&](std::unique_ptr<Node> node) {
    node->random = std::make_unique<SeededRandom>(random_.Next());
    node->host = std::make_shared<Host>(&loop_, node->name);
    Node* const raw = node.get();
    nodes_.emplace(raw->name, std::move(node));
    raw->Start();
  };
  for (int i = 0; i < profile_.routers; ++i) {
    router_names_.push_back(absl::StrCat("router-", i));
  }
  for (const std::string& name : router_names_) {
    start(std::make_unique<RouterNode>(this, name));
  }
  for (int i = 0; i < profile_.prefill; ++i) {
    auto node =
        std::make_unique<PrefillNode>(this, absl::StrCat("prefill-", i));
    node->block_size = random_.Below(2) == 0 ? 16 : 8;
    node->num_blocks = 64 * 16 / node->block_size;
    start(std::move(node));
  }
  for (int i = 0; i < profile_.decode; ++i) {
    auto node = std::make_unique<DecodeNode>(this, absl::StrCat("decode-", i));
    node->block_size = random_.Below(2) == 0 ? 16 : 8;
    node->num_blocks = static_cast<int>(kLeastBlocks + random_.Below(40)) * 16 /
                       node->block_size;
    start(std::move(node));
  }
}

void World::PlanRequests() {
  std::vector<int32_t> shared;
  for (int i = 0; i < 96; ++i) {
    shared.push_back(static_cast<int32_t>(10 + random_.Below(400)));
  }
  for (int i = 0; i < profile_.requests; ++i) {
    auto client = std::make_unique<Client>(this, i);
    absl::StatusOr<Order> order = DrawOrder(shared, &random_, profile_.window);
    if (!order.ok()) return Wrong(order.status().ToString());
    client->admitted = std::move(order->admitted);
    client->expected = std::move(order->expected);
    client->expected_scores = std::move(order->scores);
    Client* const raw = client.get();
    const absl::Duration begin =
        absl::Seconds(1) + SomeTime(profile_.faults_for * 0.5);
    clients_host_->loop.After(begin, [raw] { raw->Begin(); });
    const uint64_t kind = random_.Below(10);
    if (kind == 0) {  // goes away
      clients_host_->loop.After(begin + SomeTime(absl::Seconds(1)),
                                [raw] { raw->Cancel(); });
    } else if (kind == 1) {  // stops reading for a while
      const absl::Duration at = begin + SomeTime(absl::Milliseconds(200));
      clients_host_->loop.After(at, [raw] {
        if (!raw->ended) raw->stream->PauseReading(true);
      });
      clients_host_->loop.After(at + SomeTime(absl::Seconds(6)), [raw] {
        if (!raw->ended) raw->stream->PauseReading(false);
      });
    }
    clients_.push_back(std::move(client));
  }
}

void World::CrashLater(const std::string& name, absl::Duration at) {
  loop_.After(at, [this, name] {
    Node* const node = Find(name);
    if (!node->host->alive) return;
    if (IsRouter(name)) crashed_routers.insert(name);
    network_.Crash(node->host);
    node->Clear();
    loop_.After(absl::Milliseconds(300) + SomeTime(absl::Seconds(2)),
                [this, node] {
                  node->host = std::make_shared<Host>(&loop_, node->name);
                  node->Start();
                });
  });
}

void World::PlanFaults() {
  std::vector<std::string> workers, all;
  for (const auto& [name, node] : nodes_) {
    all.push_back(name);
    if (!IsRouter(name)) workers.push_back(name);
  }
  const auto when = [&] {
    return absl::Seconds(1) + SomeTime(profile_.faults_for);
  };
  for (int i = 0; i < profile_.worker_crashes; ++i) {
    CrashLater(workers[random_.Below(workers.size())], when());
  }
  for (int i = 0; i < profile_.router_crashes; ++i) {
    CrashLater(router_names_[random_.Below(router_names_.size())], when());
  }
  for (int i = 0; i < profile_.freezes; ++i) {
    const std::string name = all[random_.Below(all.size())];
    const absl::Duration at = when();
    const absl::Duration length =
        absl::Milliseconds(500) + SomeTime(absl::Milliseconds(7500));
    loop_.After(at, [this, name, length] {
      const std::shared_ptr<Host> host = Find(name)->host;
      if (!host->alive) return;
      host->loop.Freeze();
      loop_.After(length, [host] {
        if (host->alive) host->loop.Thaw();
      });
    });
  }
  for (int i = 0; i < profile_.partitions; ++i) {
    const std::string a = all[random_.Below(all.size())];
    const std::string b = all[random_.Below(all.size())];
    if (a == b) continue;
    const absl::Duration at = when();
    const bool one_way = i % 3 == 2;
    loop_.After(at, [this, a, b, one_way] {
      one_way ? network_.Cut(a, b) : network_.Partition(a, b);
    });
    loop_.After(at + SomeTime(absl::Seconds(12)),
                [this, a, b] { network_.Heal(a, b); });
  }
  network_.options().break_probability = profile_.break_probability;
  network_.options().unbroken = clients_host_->name;
  network_.options().lose_probability = profile_.messy;
  network_.options().duplicate_probability = profile_.messy;
  network_.options().reorder_probability = profile_.messy;
}

void World::StopFaults() {
  network_.options().break_probability = 0;
  network_.options().lose_probability = 0;
  network_.options().duplicate_probability = 0;
  network_.options().reorder_probability = 0;
  network_.HealAll();
}

void World::CheckAll() {
  for (const auto& [name, node] : nodes_) {
    if (IsRouter(name) || !node->host->alive) continue;
    const absl::Status status =
        static_cast<WorkerNode*>(node.get())->CheckInvariants();
    if (!status.ok()) Wrong(absl::StrCat(name, ": ", status.ToString()));
  }
}

void World::CheckQuiet() {
  for (const auto& [name, node] : nodes_) {
    if (IsRouter(name)) {
      const auto* const router = static_cast<RouterNode*>(node.get());
      if (!router->core->idle()) Wrong(name + " still has requests");
      continue;
    }
    const std::string left = static_cast<WorkerNode*>(node.get())->WhatIsLeft();
    if (!left.empty()) Wrong(left);
  }
}

bool World::AllEnded() const {
  return std::all_of(clients_.begin(), clients_.end(),
                     [](const auto& client) { return client->ended; });
}

Report World::Run() {
  Build();
  PlanRequests();
  PlanFaults();
  const absl::Time begun = loop_.Now();
  const absl::Time faults_end = begun + absl::Seconds(1) + profile_.faults_for;
  while (report_.wrong.empty() && loop_.Now() < faults_end) {
    loop_.RunFor(absl::Milliseconds(20));
    CheckAll();
  }
  StopFaults();
  // Liveness: a restarted worker, a lease and a retry or two, and the steps.
  const absl::Time limit = loop_.Now() + absl::Seconds(120);
  while (report_.wrong.empty() && !AllEnded() && loop_.Now() < limit) {
    loop_.RunFor(absl::Milliseconds(50));
    CheckAll();
  }
  if (report_.wrong.empty() && !AllEnded()) {
    for (const auto& client : clients_) {
      if (client->ended) continue;
      const auto* const router = static_cast<RouterNode*>(Find(client->router));
      Wrong(absl::StrCat(client->Name(), " hangs at ", client->router, ": ",
                         router->core->State(true).ShortDebugString()));
      break;
    }
  }
  if (report_.wrong.empty()) {
    // Leases, idle timers, and the quarantine of slabs whose credit got lost.
    loop_.RunFor(absl::Seconds(45));
    CheckAll();
    CheckQuiet();
  }
  for (const auto& client : clients_) {
    for (const auto& sequence : client->tokens) {
      report_.tokens += static_cast<int64_t>(sequence.size());
    }
    if (client->cancelled) {
      ++report_.cancelled;
    } else if (client->status.ok()) {
      ++report_.ok;
    } else {
      ++report_.failed;
      ++report_.failures[client->status.ToString()];
      const bool router_gone = crashed_routers.contains(client->router);
      if (!profile_.may_fail && !router_gone) {
        Wrong(absl::StrCat(client->Name(),
                           " failed: ", client->status.ToString()));
      }
    }
  }
  for (const std::string& name : router_names_) {
    const auto* const router = static_cast<RouterNode*>(Find(name));
    report_.resumed += router->core->counters().prefill_retries() +
                       router->core->counters().decode_retries();
  }
  report_.messages = network_.delivered;
  report_.trace = network_.trace;
  // Streams before the processes that they end in.
  for (const auto& client : clients_) client->stream.reset();
  // What is still to be delivered to them holds what it comes from.
  clients_host_->loop.Stop();
  for (const auto& [name, node] : nodes_) node->host->loop.Stop();
  for (const auto& [name, node] : nodes_) node->Clear();
  return report_;
}

}  // namespace

Report Simulate(uint64_t seed, const Profile& profile) {
  return World(seed, profile).Run();
}

}  // namespace tandem::simulation
