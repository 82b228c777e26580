// SPDX-License-Identifier: Apache-2.0
// A router's core, the workers that load and unload adapters as a test tells
// them to, and the operator's calls.

#ifndef TANDEM_TESTS_ROUTER_CORE_ADAPTER_CONTROL_FIXTURE_H_
#define TANDEM_TESTS_ROUTER_CORE_ADAPTER_CONTROL_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "router/core/adapter_control.h"
#include "tests/router/world.h"

namespace tandem::router {

inline std::string Digest(char of) { return std::string(64, of); }

inline v1::AdapterRef Ref(const std::string& name, char content,
                          bool in_service) {
  v1::AdapterRef ref;
  ref.set_name(name);
  ref.set_digest(Digest(content));
  ref.set_path("/" + name);
  ref.set_in_service(in_service);
  return ref;
}

// A worker's registration, as the test plays it.
struct FakeWorker {
  FakeWorker(World* world_in, v1::WorkerHello hello_in)
      : world(world_in), hello(std::move(hello_in)) {}

  World* world;
  v1::WorkerHello hello;
  LeasePipe* lease = nullptr;
  size_t heard = 0;  // of lease->sent

  void Register() {
    heard = 0;
    lease = world->Register(hello);
  }
  // The next command, or nothing.
  std::optional<v1::RegisterResponse> Command() {
    while (heard < lease->sent.size()) {
      const v1::RegisterResponse& next = lease->sent[heard++];
      if (next.has_load_adapter() || next.has_unload_adapter()) return next;
    }
    return std::nullopt;
  }
  // In short: "load verse", "unload verse", "".
  std::string CommandText() {
    const auto command = Command();
    if (!command) return "";
    last = command->has_load_adapter() ? command->load_adapter().command()
                                       : command->unload_adapter().command();
    digest = command->load_adapter().digest();
    return command->has_load_adapter()
               ? "load " + command->load_adapter().name()
               : "unload " + command->unload_adapter().name();
  }
  void Answer(absl::StatusCode code, const std::string& message,
              char content = 0, bool loaded = false) {
    v1::RegisterRequest request;
    v1::AdapterOutcome* const outcome = request.mutable_adapter_outcome();
    outcome->set_command(last);
    outcome->set_code(static_cast<int>(code));
    outcome->set_message(message);
    if (content != 0) outcome->set_digest(Digest(content));
    outcome->set_loaded(loaded);
    lease->Say(request);
  }
  void SayList() {
    v1::RegisterRequest request;
    *request.mutable_adapters()->mutable_adapters() = hello.adapters();
    lease->Say(request);
  }
  // Does what it was told last.
  void Loads(const std::string& name, char content) {
    *hello.add_adapters() = Ref(name, content, true);
    SayList();
    Answer(absl::StatusCode::kOk, "", content, true);
  }
  void Drop(const std::function<bool(const v1::AdapterRef&)>& which) {
    auto* const adapters = hello.mutable_adapters();
    adapters->erase(std::remove_if(adapters->begin(), adapters->end(), which),
                    adapters->end());
  }
  void LetsGo(const std::string& name) {
    Drop([&](const v1::AdapterRef& adapter) { return adapter.name() == name; });
    SayList();
  }
  void Unloads(const std::string& name) {
    LetsGo(name);
    Answer(absl::StatusCode::kOk, "");
  }
  void Restart() {
    if (lease->open) lease->Break(absl::UnavailableError("reset"));
    const std::string& old = hello.worker().incarnation();
    hello.mutable_worker()->set_incarnation(
        std::string(16, static_cast<char>(old[0] + 1)));
    Drop([](const v1::AdapterRef& adapter) { return adapter.in_service(); });
    Register();
  }

  uint64_t last = 0;
  std::string digest;  // that a load must have
};

struct AdapterControlTest : testing::Test {
  AdapterControlTest() {
    for (FakeWorker* const worker : {&p, &d, &e}) {
      worker->hello.add_features(kFeatureAdapterLoading);
    }
    p.Register();
    d.Register();
    e.Register();
  }
  static RouterOptions Options() {
    RouterOptions options;
    options.adapter_wait = absl::Seconds(20);
    return options;
  }

  struct Call {
    std::optional<absl::StatusOr<v1::LoraAdapter>> answer;
    bool ok() const { return answer.has_value() && answer->ok(); }
    absl::Status status() const {
      return answer ? answer->status() : absl::UnknownError("no answer");
    }
  };
  Call* Load(const std::string& name, const std::string& path = "/verse") {
    Call* const call = &calls.emplace_back();
    w.core->LoadAdapter(name, path,
                        [call](absl::StatusOr<v1::LoraAdapter> answer) {
                          call->answer = std::move(answer);
                        });
    return call;
  }
  Call* Unload(const std::string& name) {
    Call* const call = &calls.emplace_back();
    w.core->UnloadAdapter(name, [call](absl::StatusOr<v1::LoraAdapter> answer) {
      call->answer = std::move(answer);
    });
    return call;
  }
  // On every worker.
  void HaveVerse() {
    Call* const call = Load("verse");
    for (FakeWorker* const worker : {&p, &d, &e}) {
      ASSERT_EQ(worker->CommandText(), "load verse");
      worker->Loads("verse", 'a');
    }
    ASSERT_TRUE(call->ok()) << call->status();
  }
  void UnloadVerseWhileDIsAway() {
    HaveVerse();
    d.lease->Break(absl::UnavailableError("reset"));
    Call* const unload = Unload("verse");
    for (FakeWorker* const worker : {&p, &e}) {
      ASSERT_EQ(worker->CommandText(), "unload verse");
      worker->Unloads("verse");
    }
    ASSERT_TRUE(unload->ok()) << unload->status();
  }
  // Two of them by their own start.
  void StartWithOwn() {
    for (FakeWorker* const worker : {&p, &d}) {
      *worker->hello.add_adapters() = Ref("own", 'a', false);
      worker->Restart();
    }
  }
  void UnloadOwnWhileDIsAway() {
    d.lease->Break(absl::UnavailableError("reset"));
    Call* const unload = Unload("own");
    ASSERT_EQ(p.CommandText(), "unload own");
    p.Unloads("own");
    ASSERT_TRUE(unload->ok()) << unload->status();
  }
  ClientPipe* Ask(const std::string& adapter) {
    AdmittedRequest admitted = World::Ask();
    admitted.effective.adapter = adapter;
    admitted.effective.placement = v1::PLACEMENT_LOCAL;
    return w.Submit(std::move(admitted));
  }
  void FinishNewest() {
    w.decodes.back().Say(World::Tokens(kPrompt, {1, 2, 3, 4, 5, 6, 7, 8}));
    w.decodes.back().Say(World::Finished(v1::FINISH_REASON_LENGTH));
    w.Settle();
  }
  void Begin() {
    w.decodes.back().Say(World::Opened(1, ""));
    w.decodes.back().Say(World::Started(1));
  }
  v1::LoraAdapter Shown(const std::string& name) {
    for (const auto& adapter : w.core->adapter_control().List()) {
      if (adapter.lora_name() == name) return adapter;
    }
    return {};
  }

  World w{Options()};
  FakeWorker p{&w, World::Hello("p", v1::WORKER_ROLE_PREFILL)};
  FakeWorker d{&w, World::Hello("d", v1::WORKER_ROLE_DECODE)};
  FakeWorker e{&w, World::Hello("e", v1::WORKER_ROLE_DECODE)};
  std::deque<Call> calls;
};

}  // namespace tandem::router

#endif  // TANDEM_TESTS_ROUTER_CORE_ADAPTER_CONTROL_FIXTURE_H_
