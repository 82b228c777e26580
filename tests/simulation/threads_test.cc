// SPDX-License-Identifier: Apache-2.0
// The decision cores on real threads, one loop each, over an in-process
// network: what the simulation cannot see (races), ThreadSanitizer can.

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <thread>

#include "common/thread_loop.h"
#include "tests/simulation/parts.h"
#include "tests/simulation/pipe.h"
#include "worker/registration.h"

namespace tandem::simulation {
namespace {

class Cluster;

// One worker: made, used and destroyed on its loop.
struct Worker {
  Worker(std::string n, uint64_t seed)
      : name(std::move(n)), loop(name), random(seed) {
    engine::FakeExecutorOptions options;
    options.model = Model();
    options.num_blocks = 64;
    options.seed = seed;
    options.step_base = absl::Microseconds(300);
    options.copy_base = absl::Microseconds(50);
    executor = std::make_unique<engine::FakeExecutor>(options, &loop);
    pool = std::make_unique<engine::KvPool>(64, 16);
    incarnation = random.Bytes(16);
  }

  const std::string name;
  ThreadLoop loop;
  SeededRandom random;
  std::string incarnation;
  std::unique_ptr<engine::FakeExecutor> executor;
  std::unique_ptr<engine::KvPool> pool;
  std::unique_ptr<FakeGrammars> grammars;
  std::unique_ptr<decode_worker::DecodeCore> decode;
  std::unique_ptr<prefill_worker::PrefillCore> prefill;
  std::unique_ptr<worker::Registration> registration;
};

class Cluster final : public router::Dialer, public router::RouterObserver {
 public:
  Cluster() : router_loop_("router"), router_random_(1) {
    router_loop_.RunSync([&] {
      router_ = std::make_unique<router::RouterCore>(
          MakeRouterOptions(router_random_.Bytes(16)), &router_loop_,
          &router_random_, this, nullptr, this);
    });
    for (const char* name : {"decode-0", "decode-1"}) Add(name);
    for (const char* name : {"prefill-0", "prefill-1"}) Add(name);
  }
  ~Cluster() override {
    for (auto& [name, worker] : workers_) {
      worker->loop.RunSync([&w = *worker] { w.registration.reset(); });
    }
    router_loop_.RunSync([&] { router_.reset(); });
    // Device work that is under way ends before what it calls goes.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (auto& [name, worker] : workers_) {
      worker->loop.RunSync([&w = *worker] { w.executor.reset(); });
      worker->loop.RunSync([&w = *worker] {
        w.prefill.reset();
        w.decode.reset();
        w.grammars.reset();
      });
    }
    router_loop_.Stop();
    for (auto& [name, worker] : workers_) worker->loop.Stop();
  }

  std::unique_ptr<router::DecodeStream> DialDecode(
      const v1::WorkerRef& ref, absl::Duration, const TraceContext&) override {
    Worker* const worker = workers_.at(ref.worker_id()).get();
    return OpenPipe<v1::DecodeRequest, v1::DecodeResponse>(
        &router_loop_, &worker->loop,
        [worker](auto stream) { worker->decode->AddCall(std::move(stream)); });
  }
  std::unique_ptr<router::PrefillStream> DialPrefill(
      const v1::WorkerRef& ref, absl::Duration, const TraceContext&) override {
    Worker* const worker = workers_.at(ref.worker_id()).get();
    return OpenPipe<v1::PrefillRequest, v1::PrefillResponse>(
        &router_loop_, &worker->loop,
        [worker](auto stream) { worker->prefill->AddCall(std::move(stream)); });
  }

  ThreadLoop& router_loop() { return router_loop_; }
  router::RouterCore& router() { return *router_; }
  bool AllReady() {
    bool ready = false;
    router_loop_.RunSync([&] {
      ready = router_->ready_workers(v1::WORKER_ROLE_DECODE) == 2 &&
              router_->ready_workers(v1::WORKER_ROLE_PREFILL) == 2;
    });
    return ready;
  }
  // What is still held anywhere, or "".
  std::string WhatIsLeft() {
    std::string left;
    for (auto& [name, worker] : workers_) {
      worker->loop.RunSync([&, &w = *worker] {
        const v1::WorkerLoad load =
            w.decode != nullptr ? w.decode->Load() : w.prefill->Load();
        if (load.blocks_live() + load.blocks_reserved() + load.tickets() +
                load.streams() + load.slabs_in_flight() +
                load.slabs_granted() !=
            0) {
          left += w.name + ": " + load.ShortDebugString() + "; ";
        }
        const absl::Status status = w.pool->CheckInvariants();
        if (!status.ok()) left += status.ToString();
        for (const std::string& what : w.executor->violations()) left += what;
      });
    }
    return left;
  }

 private:
  void Add(const std::string& name) {
    auto owned = std::make_unique<Worker>(name, 7 + workers_.size());
    Worker* const worker = owned.get();
    workers_.emplace(name, std::move(owned));
    worker->loop.RunSync([&] { Begin(worker); });
  }
  void Begin(Worker* worker) {
    const kernels::KvShape& shape = worker->executor->kv_shape();
    const bool decode = worker->name[0] == 'd';
    worker->grammars =
        std::make_unique<FakeGrammars>(&worker->loop, &worker->random);
    if (decode) {
      decode_worker::DecodeOptions options =
          MakeDecodeOptions(worker->name, worker->incarnation, shape);
      options.grammars = worker->grammars.get();
      worker->decode = std::make_unique<decode_worker::DecodeCore>(
          options, &worker->loop, &worker->random, worker->executor.get(),
          worker->pool.get());
    } else {
      prefill_worker::PrefillOptions options =
          MakePrefillOptions(worker->name, worker->incarnation, shape);
      options.grammars = worker->grammars.get();
      worker->prefill = std::make_unique<prefill_worker::PrefillCore>(
          options, &worker->loop, &worker->random, worker->executor.get(),
          worker->pool.get(), [this, worker](const v1::WorkerRef& ref) {
            Worker* const peer = workers_.at(ref.worker_id()).get();
            return OpenPipe<v1::LinkRequest, v1::LinkResponse>(
                &worker->loop, &peer->loop, [peer](auto stream) {
                  peer->decode->AddLink(std::move(stream));
                });
          });
    }
    worker::RegistrationOptions options;
    options.hello = MakeHello(
        worker->name, decode ? v1::WORKER_ROLE_DECODE : v1::WORKER_ROLE_PREFILL,
        worker->incarnation, shape);
    options.load_interval = absl::Milliseconds(20);
    worker->registration = std::make_unique<worker::Registration>(
        options, &worker->loop, &worker->random,
        [this, worker](const std::string&) {
          return OpenPipe<v1::RegisterRequest, v1::RegisterResponse>(
              &worker->loop, &router_loop_, [this](auto stream) {
                router_->AddRegistration(std::move(stream));
              });
        },
        [worker] {
          return worker->decode != nullptr ? worker->decode->Load()
                                           : worker->prefill->Load();
        },
        worker->pool.get(), [](const std::string&, const absl::Status&) {});
    worker->registration->SetRouters({"router"});
  }

  ThreadLoop router_loop_;
  SeededRandom router_random_;
  std::unique_ptr<router::RouterCore> router_;
  std::map<std::string, std::unique_ptr<Worker>> workers_;
};

struct Client final : StreamHandler<v1::GenerateResponse> {
  void OnMessage(v1::GenerateResponse response) override {
    tokens.resize(order.expected.size());
    const auto index = static_cast<size_t>(response.delta().index());
    for (const uint32_t id : response.delta().token_ids()) {
      tokens.at(index).push_back(static_cast<int32_t>(id));
    }
  }
  void OnClosed(absl::Status s) override {
    status = std::move(s);
    ended = true;
  }

  Order order;
  std::unique_ptr<Stream<v1::GenerateRequest, v1::GenerateResponse>> stream;
  std::vector<std::vector<int32_t>> tokens;  // of each sequence
  absl::Status status;
  bool ended = false;
  bool cancelled = false;
};

TEST(ThreadsTest, CoresOnRealThreadsSayTheRightTokens) {
  Cluster cluster;
  while (!cluster.AllReady()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ThreadLoop client_loop("clients");
  SeededRandom random(3);
  std::vector<int32_t> shared;
  for (int i = 0; i < 96; ++i) {
    shared.push_back(static_cast<int32_t>(10 + random.Below(400)));
  }
  std::vector<Client> clients(64);
  client_loop.RunSync([&] {
    for (Client& client : clients) {
      absl::StatusOr<Order> order = DrawOrder(shared, &random);
      ASSERT_TRUE(order.ok()) << order.status();
      client.order = *std::move(order);
      client.stream = OpenPipe<v1::GenerateRequest, v1::GenerateResponse>(
          &client_loop, &cluster.router_loop(),
          [&cluster, admitted = client.order.admitted](auto stream) mutable {
            cluster.router().Submit(std::move(admitted), std::move(stream));
          });
      client.stream->Start(&client);
      if (random.Below(6) == 0) {
        client_loop.After(absl::Milliseconds(random.Below(60)), [&client] {
          if (client.ended) return;
          client.cancelled = client.ended = true;
          client.stream->Close(absl::CancelledError("by the test"));
        });
      }
    }
  });
  bool all_ended = false;
  for (int i = 0; i < 6000 && !all_ended; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    client_loop.RunSync([&] {
      all_ended = true;
      for (const Client& client : clients) all_ended &= client.ended;
    });
  }
  ASSERT_TRUE(all_ended) << "a stream hangs";
  client_loop.RunSync([&] {
    for (size_t i = 0; i < clients.size(); ++i) {
      if (clients[i].cancelled) continue;
      EXPECT_TRUE(clients[i].status.ok()) << i << clients[i].status;
      EXPECT_EQ(clients[i].tokens, clients[i].order.expected) << i;
    }
  });
  std::string left = "not asked";
  for (int i = 0; i < 100 && !left.empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    left = cluster.WhatIsLeft();
  }
  EXPECT_EQ(left, "");
  client_loop.RunSync([&] {
    for (Client& client : clients) client.stream.reset();
  });
  client_loop.Stop();
}

}  // namespace
}  // namespace tandem::simulation
