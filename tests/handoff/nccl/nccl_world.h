// SPDX-License-Identifier: Apache-2.0
// A decode worker and prefill workers on virtual time, each with a GPU of the
// double: gpu 0 decodes, gpu n+1 is prefill worker n's.

#ifndef TANDEM_TESTS_HANDOFF_NCCL_NCCL_WORLD_H_
#define TANDEM_TESTS_HANDOFF_NCCL_NCCL_WORLD_H_

#include <sys/mman.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "handoff/nccl/nccl_way.h"
#include "handoff/nccl/station.h"
#include "tests/handoff/nccl/double.h"
#include "tests/handoff/world.h"

namespace tandem::handoff::nccl::testing {

using handoff::testing::MakeAttempt;
using handoff::testing::Prefill;
using handoff::testing::Setting;
using handoff::testing::World;

inline constexpr int kDecodeGpu = 0;
inline constexpr int kPrefillGpu = 1;  // the first's

// Loops of communicators, by the name of their pair; the last made stays
// known until it is destroyed.
class Hands {
 public:
  explicit Hands(VirtualLoop* world) : world_(world) {}
  std::unique_ptr<Loop> Make(const std::string& name) {
    return std::make_unique<Hand>(this, name);
  }
  size_t size() const { return all_.size(); }
  void ThawAll() {
    for (auto& [hand, name] : all_) hand->Thaw();
  }
  // The hand whose task runs.
  VirtualProcess* running() const { return running_; }

 private:
  class Hand final : public Loop {
   public:
    Hand(Hands* hands, std::string name)
        : hands_(hands), process_(hands->world_), name_(std::move(name)) {
      hands_->all_[this] = name_;
    }
    ~Hand() override { hands_->all_.erase(this); }
    absl::Time Now() const override { return process_.Now(); }
    void Post(Task task) override { process_.Post(Wrap(std::move(task))); }
    TimerId After(absl::Duration delay, Task task) override {
      return process_.After(delay, Wrap(std::move(task)));
    }
    void Cancel(TimerId timer) override { process_.Cancel(timer); }
    void Thaw() { process_.Thaw(); }

   private:
    Task Wrap(Task task) {
      return [this, task = std::move(task)]() mutable {
        hands_->running_ = &process_;
        task();
        hands_->running_ = nullptr;
      };
    }
    Hands* const hands_;
    VirtualProcess process_;
    const std::string name_;
  };

  VirtualLoop* const world_;
  std::map<Hand*, std::string> all_;
  VirtualProcess* running_ = nullptr;
};

struct NcclSetting {
  Setting setting;
  StationOptions station;
  int prefills = 1;
};

inline NcclSetting Usual() {
  NcclSetting usual;
  usual.setting.way = "nccl";
  usual.setting.work = absl::Milliseconds(2);
  usual.station.slab_bytes = usual.setting.slab_bytes;
  usual.station.buffers = 24;
  return usual;
}

struct Seen final : Watcher {
  struct Broken {
    std::string pair;
    uint64_t life;
    std::string stage;
    int64_t bytes;
    absl::Status cause;
  };
  void OnUp(const std::string&, uint64_t, int64_t) override {}
  void OnBroken(const std::string& pair, uint64_t life,
                const std::string& stage, int64_t bytes,
                const absl::Status& cause) override {
    broken.push_back({pair, life, stage, bytes, cause});
  }
  void OnFatal(const absl::Status& cause) override {
    EXPECT_TRUE(fatal.ok());
    fatal = cause;
  }
  std::vector<Broken> broken;
  absl::Status fatal;
};

class NcclWorld {
 public:
  explicit NcclWorld(const NcclSetting& s)
      : setting(s),
        fabric(Fabric::Make()),
        world(s.setting),
        hands(&world.loop) {
    for (int i = 1; i < s.prefills; ++i) {
      world.AddPrefill("prefill-" + std::to_string(i));
    }
    for (int gpu = 0; gpu <= s.prefills; ++gpu) {
      DoubleOptions options;
      options.gpu = gpu;
      options.now = [this] { return world.loop.Now(); };
      options.hang = [this] { hands.running()->Freeze(); };
      libraries.push_back(NewDouble(fabric, options));
      memories.push_back(std::make_unique<DoubleMemory>(fabric, gpu));
      StationOptions station = s.station;
      station.self =
          gpu == 0 ? "decode" : world.prefills[gpu - 1]->self.worker_id();
      seen.push_back(std::make_unique<Seen>());
      stations.push_back(*Station::Create(
          station, &world.loop, &world.random, libraries[gpu].get(),
          memories[gpu].get(),
          [this](const std::string& name) { return hands.Make(name); },
          seen[gpu].get()));
    }
    world.receiver->AddWay(NewNcclReceiverWay(stations[0].get()));
    for (int i = 0; i < s.prefills; ++i) {
      world.prefills[i]->sender->AddWay(
          NewNcclSenderWay(stations[i + 1].get()));
    }
  }
  ~NcclWorld() {
    world.loop.RunFor(absl::Seconds(1));
    for (auto& prefill : world.prefills) prefill->sender.reset();
    world.receiver.reset();
    // What hangs comes back: nothing may be left then.
    fabric->released = true;
    hands.ThawAll();
    world.loop.RunFor(absl::Seconds(60));
    for (size_t gpu = 0; gpu < stations.size(); ++gpu) {
      EXPECT_TRUE(stations[gpu]->CheckIdle().ok())
          << gpu << ' ' << stations[gpu]->CheckIdle();
      EXPECT_EQ(fabric->gpus[gpu].communicators.load(), 0) << gpu;
    }
    EXPECT_EQ(hands.size(), 0);
    stations.clear();
    for (size_t gpu = 0; gpu < libraries.size(); ++gpu) {
      EXPECT_EQ(fabric->gpus[gpu].allocated.load(), 0) << gpu;
    }
    ExpectOrder();
    munmap(fabric, sizeof(Fabric));
  }

  // What the way promises, whatever happened.
  void ExpectOrder() const {
    EXPECT_EQ(fabric->orphan_sends.load(), 0);
    EXPECT_EQ(fabric->changed_sends.load(), 0);
    for (size_t gpu = 0; gpu < libraries.size(); ++gpu) {
      // One, and those being aborted: they wait for nobody.
      if (fabric->gpus[gpu].late_stores.load() == 0) {
        EXPECT_LE(fabric->gpus[gpu].most_receives.load(), 1) << gpu;
      }
    }
  }
  void ExpectInvariants() const {
    for (const auto& station : stations) {
      ASSERT_TRUE(station->CheckInvariants().ok())
          << station->CheckInvariants();
    }
    ASSERT_TRUE(world.receiver->CheckInvariants().ok());
    for (const auto& prefill : world.prefills) {
      ASSERT_TRUE(prefill->sender->CheckInvariants().ok());
    }
  }

  // Links the first prefill worker (by grpc), then waits until the pair is up.
  void ComeUp(Prefill* from = nullptr, int n = 900) {
    world.Run(n, 8, from);
    Until([&] { return stations[0]->counters().ups > ups_seen_; });
    ups_seen_ = stations[0]->counters().ups;
    world.loop.RunFor(absl::Seconds(1));
  }
  // In steps, for at most a minute of virtual time.
  bool Until(const std::function<bool()>& condition) {
    for (int i = 0; i < 60'000; ++i) {
      if (condition()) return true;
      world.loop.RunFor(absl::Milliseconds(1));
    }
    return condition();
  }
  // Offers, finishes and runs until both ends know how it ended.
  absl::Status Try(int n, int positions, Prefill* from = nullptr) {
    if (from == nullptr) from = world.prefills[0].get();
    world.Run(n, positions, from);
    auto& sent = from->side.seen[n];
    Until([&] {
      auto& landed = world.decode.seen[n];
      return sent.acknowledged + sent.failed > 0 &&
             (landed.offers == 0 || landed.committed + landed.failed > 0 ||
              landed.ended);
    });
    if (sent.acknowledged > 0) {
      EXPECT_TRUE(world.SameKv(MakeAttempt(n), positions, from)) << n;
      return absl::OkStatus();
    }
    // Its own worker hears of it by another road.
    world.decode.seen[n].ended =
        world.decode.seen[n].committed + world.decode.seen[n].failed == 0;
    world.receiver->EndAttempt(MakeAttempt(n), sent.status);
    return sent.status;
  }
  std::string WayOf(int n, Prefill* from = nullptr) {
    if (from == nullptr) from = world.prefills[0].get();
    return from->side.seen[n].acknowledged > 0
               ? from->side.seen[n].timings.way
               : "failed " + from->side.seen[n].failed_way;
  }
  const absl::Status& fatal(int gpu) const { return seen[gpu]->fatal; }
  StationCounters counters(int gpu) const { return stations[gpu]->counters(); }

  NcclSetting setting;
  Fabric* const fabric;
  World world;
  Hands hands;
  std::vector<std::unique_ptr<Library>> libraries;
  std::vector<std::unique_ptr<DoubleMemory>> memories;
  std::vector<std::unique_ptr<Seen>> seen;  // by gpu
  std::vector<std::unique_ptr<Station>> stations;

 private:
  int64_t ups_seen_ = 0;
};

}  // namespace tandem::handoff::nccl::testing

#endif  // TANDEM_TESTS_HANDOFF_NCCL_NCCL_WORLD_H_
