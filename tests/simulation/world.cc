// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/world.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "tests/simulation/nodes.h"
#include "tests/simulation/parts.h"
#include "tests/simulation/trouble.h"

namespace tandem::simulation {
namespace {

// ---- A client: one request, checked token by token.

struct Client final : StreamHandler<v1::GenerateResponse> {
  Client(Cluster* c, int n, bool l) : cluster(c), number(n), late(l) {}
  void Begin();
  void OnMessage(v1::GenerateResponse response) override;
  void OnClosed(absl::Status status) override;
  void CheckScores(const v1::PromptLogprobs& part);
  void Cancel();
  RouterNode* SomeRouter();
  std::string Name() const { return absl::StrCat("client ", number); }

  Cluster* const cluster;
  const int number;
  const bool late;  // it came when the trouble had ended
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
      : cluster_(seed, profile), trouble_(&cluster_) {}

  Report Run();

 private:
  void DrawProfile();
  void Build();
  void Ask(absl::Time begin, bool late);
  void Watch(absl::Duration step);
  void Safety();
  void Liveness();
  void Quiet();
  void SumUp();
  bool AllEnded() const;
  bool right() const { return cluster_.report.wrong.empty(); }

  Cluster cluster_;
  Trouble trouble_;
  std::vector<int32_t> shared_;  // a prompt's head
  std::vector<std::unique_ptr<Client>> clients_;
};

RouterNode* Client::SomeRouter() {
  const std::vector<std::string>& all = cluster->router_names;
  std::vector<std::string> alive;
  for (const std::string& name : all) {
    if (cluster->Find(name)->host->alive) alive.push_back(name);
  }
  const auto& from = alive.empty() ? all : alive;
  return static_cast<RouterNode*>(
      cluster->Find(from[cluster->random.Below(from.size())]));
}

void Client::Begin() {
  RouterNode* const node = SomeRouter();
  router = node->name;
  router::RouterCore* const core = node->core.get();
  stream = cluster->network.Connect<v1::GenerateRequest, v1::GenerateResponse>(
      cluster->clients, node->host, /*messy=*/false,
      [core, request = admitted](auto client) mutable {
        core->Submit(std::move(request), std::move(client));
      });
  stream->Start(this);
}

void Client::OnMessage(v1::GenerateResponse response) {
  if (ended) return cluster->Wrong(Name() + " heard more after the end");
  if (response.has_started() && ++started > 1) {
    cluster->Wrong(Name() + " was told twice that it started");
  }
  const auto index = static_cast<size_t>(response.delta().index());
  if (response.has_delta() && index >= expected.size()) {
    return cluster->Wrong(absl::StrCat(Name(), " got sequence ", index));
  }
  tokens.resize(expected.size());
  for (const uint32_t id : response.delta().token_ids()) {
    if (finished > static_cast<int>(index)) {
      cluster->Wrong(Name() + " got tokens after the finish");
    }
    const std::vector<int32_t>& right = expected[index];
    const size_t at = tokens[index].size();
    if (at >= right.size()) {
      cluster->Wrong(absl::StrCat(Name(), " got more than ", at, " tokens"));
    } else if (static_cast<int32_t>(id) != right[at]) {
      cluster->Wrong(absl::StrCat(Name(), ": token ", at, " is ", id,
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
    cluster->Wrong(Name() + " got scores behind a token");
  }
  for (int i = 0; i < part.tokens_size(); ++i) {
    const v1::TokenLogprob& token = part.tokens(i);
    const int position = part.position() + i;
    if (position == 0) continue;
    if (position != static_cast<int>(scores) + 1 ||
        scores >= expected_scores.size()) {
      return cluster->Wrong(absl::StrCat(Name(), ": the score of ", position,
                                         " came behind ", scores));
    }
    const engine::SampledToken& right = expected_scores[scores++];
    if (static_cast<int32_t>(token.token_id()) != right.token_id ||
        token.logprob() != right.logprob || token.rank() != right.rank ||
        token.top_size() != static_cast<int>(right.top.size())) {
      cluster->Wrong(absl::StrCat(Name(), ": the score of ", position, " is ",
                                  token.logprob(), ", expected ",
                                  right.logprob));
    }
  }
}

void Client::OnClosed(absl::Status s) {
  if (ended) return cluster->Wrong(Name() + " ended twice");
  ended = true;
  status = std::move(s);
  if (!status.ok()) return;
  if (started != 1 || finished != static_cast<int>(expected.size()) ||
      done != 1) {
    cluster->Wrong(absl::StrCat(Name(), " ended OK with ", started,
                                " started, ", finished, " finished, ", done,
                                " done"));
  }
  if (scores != expected_scores.size()) {
    cluster->Wrong(absl::StrCat(Name(), " ended OK with ", scores,
                                " scores of ", expected_scores.size()));
  }
  if (tokens != expected) {
    cluster->Wrong(absl::StrCat(Name(), " ended OK with ", tokens.size(),
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

void World::DrawProfile() {
  Profile& profile = cluster_.profile;
  SeededRandom& random = cluster_.random;
  for (int* most : {&profile.worker_crashes, &profile.router_crashes,
                    &profile.freezes, &profile.partitions, &profile.slow_links,
                    &profile.drains, &profile.twins}) {
    *most = static_cast<int>(random.Below(static_cast<uint64_t>(*most) + 1));
  }
  for (double* most : {&profile.break_probability, &profile.messy}) {
    // None in every third; else small ones as often as large ones.
    const double u = random.Uniform();
    *most *= random.Below(3) == 0 ? 0 : u * u;
  }
  if (random.Below(3) == 0) profile.failpoints = 0;
  if (random.Below(4) != 0) profile.window = 0;
  if (profile.window > 0 && random.Below(2) == 0) profile.full_layers = 1;
}

void World::Build() {
  if (cluster_.profile.drawn) DrawProfile();
  const Profile& profile = cluster_.profile;
  SeededRandom& random = cluster_.random;
  for (int i = 0; i < profile.routers; ++i) {
    cluster_.router_names.push_back(absl::StrCat("router-", i));
  }
  for (const std::string& name : cluster_.router_names) {
    cluster_.Add(std::make_unique<RouterNode>(&cluster_, name));
  }
  for (int i = 0; i < profile.prefill; ++i) {
    auto node =
        std::make_unique<PrefillNode>(&cluster_, absl::StrCat("prefill-", i));
    node->block_size = random.Below(2) == 0 ? 16 : 8;
    node->num_blocks = 64 * 16 / node->block_size;
    // Less than a prompt as a whole: what of it is kept, a grant must say.
    if (profile.full_layers > 0 && random.Below(2) == 0) {
      node->num_blocks =
          (10 + static_cast<int>(random.Below(12))) * 16 / node->block_size;
    }
    cluster_.Add(std::move(node));
  }
  for (int i = 0; i < profile.decode; ++i) {
    auto node =
        std::make_unique<DecodeNode>(&cluster_, absl::StrCat("decode-", i));
    node->block_size = random.Below(2) == 0 ? 16 : 8;
    node->num_blocks = static_cast<int>(kLeastBlocks + random.Below(40)) * 16 /
                       node->block_size;
    cluster_.Add(std::move(node));
  }
  for (int i = 0; i < 96; ++i) {
    shared_.push_back(static_cast<int32_t>(10 + random.Below(400)));
  }
}

void World::Ask(absl::Time begin, bool late) {
  SeededRandom& random = cluster_.random;
  auto client = std::make_unique<Client>(
      &cluster_, static_cast<int>(clients_.size()), late);
  absl::StatusOr<Order> order =
      DrawOrder(shared_, &random, cluster_.profile.model());
  if (!order.ok()) return cluster_.Wrong(order.status().ToString());
  client->admitted = std::move(order->admitted);
  client->expected = std::move(order->expected);
  client->expected_scores = std::move(order->scores);
  Client* const raw = client.get();
  clients_.push_back(std::move(client));
  const auto at = [&](absl::Time time, Loop::Task task) {
    cluster_.clients->loop.After(time - cluster_.loop.Now(), std::move(task));
  };
  at(begin, [raw] { raw->Begin(); });
  const uint64_t kind = late ? 2 : random.Below(10);
  if (kind == 0) {  // goes away
    at(begin + cluster_.SomeTime(absl::Seconds(1)), [raw] { raw->Cancel(); });
  } else if (kind == 1) {  // stops reading for a while
    const absl::Time pause = begin + cluster_.SomeTime(absl::Milliseconds(200));
    at(pause, [raw] {
      if (!raw->ended) raw->stream->PauseReading(true);
    });
    at(pause + cluster_.SomeTime(absl::Seconds(6)), [raw] {
      if (!raw->ended) raw->stream->PauseReading(false);
    });
  }
}

// Lets `step` pass; then no worker may contradict itself.
void World::Watch(absl::Duration step) {
  cluster_.loop.RunFor(step);
  for (const auto& [name, node] : cluster_.nodes) {
    const WorkerNode* const worker = node->AsWorker();
    if (worker == nullptr || !node->host->alive) continue;
    const absl::Status status = worker->CheckInvariants();
    if (!status.ok()) {
      cluster_.Wrong(absl::StrCat(name, ": ", status.ToString()));
    }
  }
  trouble_.CrashTheBroken();
}

void World::Safety() {
  const Profile& profile = cluster_.profile;
  const absl::Time begin = cluster_.loop.Now() + absl::Seconds(1);
  for (int i = 0; i < profile.requests; ++i) {
    Ask(begin + cluster_.SomeTime(profile.trouble_for * 0.5), /*late=*/false);
  }
  trouble_.Begin();
  while (right() && cluster_.loop.Now() < begin + profile.trouble_for) {
    Watch(absl::Milliseconds(20));
  }
  trouble_.End();
}

void World::Liveness() {
  // Restarted workers, leases, slabs in quarantine, retries, and the steps.
  constexpr absl::Duration kBound = absl::Seconds(90);
  const absl::Time begin = cluster_.loop.Now();
  // Once all that was down is up.
  for (int i = 0; i < 2; ++i) {
    Ask(begin + absl::Seconds(3) + cluster_.SomeTime(absl::Seconds(5)),
        /*late=*/true);
  }
  while (right() && !AllEnded() && cluster_.loop.Now() < begin + kBound) {
    Watch(absl::Milliseconds(50));
  }
  cluster_.report.liveness = cluster_.loop.Now() - begin;
  for (const auto& client : clients_) {
    if (client->ended || !right()) continue;
    const auto* const router =
        static_cast<RouterNode*>(cluster_.Find(client->router));
    cluster_.Wrong(absl::StrCat(client->Name(), " hangs at ", client->router,
                                ": ",
                                router->core->State(true).ShortDebugString()));
  }
}

void World::Quiet() {
  if (!right()) return;
  // Leases, idle timers, and the quarantine of slabs whose credit got lost.
  Watch(absl::Seconds(45));
  for (const auto& [name, node] : cluster_.nodes) {
    if (!node->host->alive) continue;  // a twin
    if (const WorkerNode* const worker = node->AsWorker()) {
      const std::string left = worker->WhatIsLeft();
      if (!left.empty()) cluster_.Wrong(left);
    } else if (!static_cast<RouterNode*>(node.get())->core->idle()) {
      cluster_.Wrong(name + " still has requests");
    }
  }
}

bool World::AllEnded() const {
  return std::all_of(clients_.begin(), clients_.end(),
                     [](const auto& client) { return client->ended; });
}

void World::SumUp() {
  Report& report = cluster_.report;
  for (const auto& client : clients_) {
    for (const auto& sequence : client->tokens) {
      report.tokens += static_cast<int64_t>(sequence.size());
    }
    if (client->cancelled) {
      ++report.cancelled;
    } else if (client->status.ok()) {
      ++report.ok;
    } else {
      ++report.failed;
      const std::string reason = ErrorReason(client->status);
      ++report.failures[reason.empty() ? client->status.ToString() : reason];
      const bool may_fail = cluster_.profile.may_fail ||
                            cluster_.crashed_routers.contains(client->router);
      if (client->late || !may_fail) {
        cluster_.Wrong(absl::StrCat(client->Name(),
                                    client->late ? " (late)" : "",
                                    " failed: ", client->status.ToString()));
      }
    }
  }
  for (const std::string& name : cluster_.router_names) {
    const auto* const router = static_cast<RouterNode*>(cluster_.Find(name));
    if (router->core == nullptr) continue;
    report.resumed += router->core->counters().prefill_retries() +
                      router->core->counters().decode_retries();
  }
  report.messages = cluster_.network.delivered;
  report.trace = cluster_.network.trace;
}

Report World::Run() {
  Build();
  Safety();
  Liveness();
  Quiet();
  SumUp();
  // Streams before the processes that they end in.
  for (const auto& client : clients_) client->stream.reset();
  // What is still to be delivered to them holds what it comes from.
  cluster_.clients->loop.Stop();
  for (const auto& [name, node] : cluster_.nodes) node->host->loop.Stop();
  for (const auto& [name, node] : cluster_.nodes) node->Clear();
  return cluster_.report;
}

}  // namespace

Report Simulate(uint64_t seed, const Profile& profile) {
  return World(seed, profile).Run();
}

}  // namespace tandem::simulation
