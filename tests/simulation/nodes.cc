// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes.h"

#include "absl/strings/str_cat.h"
#include "common/failpoint.h"
#include "router/session/recorded_core.h"
#include "router/session/replay.h"

namespace tandem::simulation {

void Cluster::Add(std::unique_ptr<Node> node) {
  node->random = std::make_unique<SeededRandom>(random.Next());
  node->host = std::make_shared<Host>(&loop, node->name);
  Node* const raw = node.get();
  nodes.emplace(raw->name, std::move(node));
  raw->Start();
}

void Cluster::Wrong(const std::string& what) {
  if (!report.wrong.empty()) return;
  report.wrong = absl::StrCat(
      absl::FormatTime(absl::RFC3339_full, loop.Now(), absl::UTCTimeZone()),
      ": ", what);
}

void WorkerNode::StartParts() {
  incarnation = random->Bytes(16);
  engine::FakeExecutorOptions options;
  options.model = cluster->profile.model();
  pool = std::make_unique<engine::KvPool>(num_blocks, block_size, 1,
                                          WindowOf(options.model).parts);
  if (options.model.full_layers > 0) options.cells = &pool->cells();
  options.num_blocks = num_blocks;
  options.block_size = block_size;
  options.seed = random->Next();
  options.step_base = absl::Milliseconds(8);
  options.step_jitter = absl::Milliseconds(6);
  options.copy_base = absl::Microseconds(500);
  fake = std::make_unique<engine::FakeExecutor>(options, &host->loop);
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
                               .file_blocks = 40,
                               .file_retry = absl::Milliseconds(200)},
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
  options.hello = MakeHello(worker_id, role, incarnation, fake->kv_shape());
  options.hello.mutable_worker()->set_endpoint(name);
  // Every other one is a version ahead.
  options.hello.set_protocol_max(1 + (incarnation.front() >> 2 & 1));
  registration = std::make_unique<worker::Registration>(
      options, &host->loop, random.get(),
      [this](const std::string& endpoint) {
        auto* const router = static_cast<RouterNode*>(cluster->Find(endpoint));
        router::RouterCore* const core = router->core.get();
        return cluster->network
            .Connect<v1::RegisterRequest, v1::RegisterResponse>(
                host, router->host, /*messy=*/false, [core](auto stream) {
                  core->AddRegistration(std::move(stream));
                });
      },
      [this] { return Load(); }, pool.get(),
      [](const std::string&, const absl::Status&) {});
  registration->SetRouters(cluster->router_names);
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
  if (cluster->profile.wrap_decode_executor) {
    wrapped = cluster->profile.wrap_decode_executor(fake.get(), &host->loop,
                                                    random.get());
  }
  decode_worker::DecodeOptions options =
      MakeDecodeOptions(worker_id, incarnation, fake->kv_shape());
  options.receiver.self.set_endpoint(name);
  options.offload = offload.get();
  options.grammars = grammars.get();
  options.engine.window = WindowOf(cluster->profile.model());
  options.receiver.layers.windowed = WindowedLayers(cluster->profile.model());
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
  device.model = cluster->profile.model();
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
  shared.clear();
  grammars.reset();
  draft_pool.reset();
  offload.reset();
  pool.reset();
}

void DecodeNode::AddShared(std::unique_ptr<WorkerShared::Carrier> carrier) {
  shared.push_back(WorkerShared::Start(
      &host->loop, std::move(carrier),
      [this](auto call) { core->AddCall(std::move(call)); }));
}

void PrefillNode::Start() {
  StartParts();
  prefill_worker::PrefillOptions options =
      MakePrefillOptions(worker_id, incarnation, fake->kv_shape());
  options.sender.hello.mutable_sender()->set_endpoint(name);
  options.offload = offload.get();
  options.grammars = grammars.get();
  options.engine.window = WindowOf(cluster->profile.model());
  options.sender.layers.windowed = WindowedLayers(cluster->profile.model());
  core = std::make_unique<prefill_worker::PrefillCore>(
      options, &host->loop, random.get(), executor(), pool.get(),
      [this](const v1::WorkerRef& receiver)
          -> std::unique_ptr<handoff::SenderStream> {
        auto* const decode =
            static_cast<DecodeNode*>(cluster->Find(receiver.endpoint()));
        decode_worker::DecodeCore* const peer = decode->core.get();
        auto link = cluster->network.Connect<v1::LinkRequest, v1::LinkResponse>(
            host, decode->host, /*messy=*/true,
            [peer](auto stream) { peer->AddLink(std::move(stream)); });
        if (cluster->profile.wrap_link) {
          return cluster->profile.wrap_link(std::move(link), random.get());
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

void RouterNode::Start() {
  router::RouterOptions options = MakeRouterOptions(random->Bytes(16));
  options.window = cluster->profile.window;
  options.some_see_all = cluster->profile.full_layers > 0;
  const Profile& profile = cluster->profile;
  if (profile.record &&
      (profile.failpoints == 0 || failpoint::States().empty())) {
    core = std::make_unique<router::session::RecordedCore>(
        router::session::RecorderOptions(), &session, options, &host->loop,
        random.get(), this, nullptr, this);
  } else {
    core = std::make_unique<router::RouterCore>(
        options, &host->loop, random.get(), this, nullptr, this);
  }
}

void RouterNode::Clear() {
  core.reset();
  shared.clear();
  if (session.tellp() > 0) CheckReplay();
  session.str("");
  session.clear();
}

void RouterNode::CheckReplay() {
  RouterObserver nobody;
  const auto replay = router::session::Replay::Create(&session, &nobody);
  const absl::Status status = replay.ok() ? (*replay)->Run() : replay.status();
  if (!status.ok()) {
    cluster->Wrong(absl::StrCat(name, "'s session: ", status.ToString()));
    return;
  }
  cluster->report.replayed += (*replay)->inputs();
}

std::unique_ptr<router::DecodeStream> RouterNode::DialDecode(
    const v1::WorkerRef& worker, absl::Duration, const TraceContext&) {
  auto* const node = static_cast<DecodeNode*>(cluster->Find(worker.endpoint()));
  decode_worker::DecodeCore* const peer = node->core.get();
  std::unique_ptr<router::DecodeStream> call;
  if (cluster->shared_decode) {
    auto& stream = shared[worker.incarnation()];
    if (stream == nullptr || stream->ended()) {
      stream = RouterShared::Start(
          &host->loop,
          cluster->network
              .Connect<v1::DecodeSharedRequest, v1::DecodeSharedResponse>(
                  host, node->host, /*messy=*/false, [node](auto carrier) {
                    node->AddShared(std::move(carrier));
                  }));
    }
    call = stream->Open();
  } else {
    call = cluster->network.Connect<v1::DecodeRequest, v1::DecodeResponse>(
        host, node->host, /*messy=*/false,
        [peer](auto stream) { peer->AddCall(std::move(stream)); });
  }
  const auto& wrap = cluster->profile.wrap_decode_call;
  return wrap ? wrap(std::move(call)) : std::move(call);
}

std::unique_ptr<router::PrefillStream> RouterNode::DialPrefill(
    const v1::WorkerRef& worker, absl::Duration, const TraceContext&) {
  auto* const node =
      static_cast<PrefillNode*>(cluster->Find(worker.endpoint()));
  prefill_worker::PrefillCore* const peer = node->core.get();
  auto call = cluster->network.Connect<v1::PrefillRequest, v1::PrefillResponse>(
      host, node->host, /*messy=*/false,
      [peer](auto stream) { peer->AddCall(std::move(stream)); });
  const auto& wrap = cluster->profile.wrap_prefill_call;
  return wrap ? wrap(std::move(call)) : std::move(call);
}

void RouterNode::OnEnded(const router::RequestSummary& summary) {
  if (!ended.insert(summary.internal_id).second) {
    cluster->Wrong(absl::StrCat(name, " ended a request twice"));
  }
}

}  // namespace tandem::simulation
