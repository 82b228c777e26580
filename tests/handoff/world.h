// SPDX-License-Identifier: Apache-2.0
// A decode worker and any number of prefill workers on virtual time.

#ifndef TANDEM_TESTS_HANDOFF_WORLD_H_
#define TANDEM_TESTS_HANDOFF_WORLD_H_

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/random.h"
#include "common/testing/virtual_loop.h"
#include "tests/handoff/direct_way.h"
#include "tests/handoff/stream_pair.h"
#include "tests/handoff/workers.h"

namespace tandem::handoff::testing {

using Pair = tandem::testing::StreamPair<v1::LinkRequest, v1::LinkResponse>;

struct Setting {
  Shape shape;
  std::string way = "grpc";
  int sender_block = 16;
  int receiver_block = 16;
  // Four rows of the default shape in f32.
  int64_t slab_bytes = 512;
  int slabs_per_peer = 4;
  int num_slabs = 16;
  int64_t staging_bytes = 16 * 512;
  std::string sender_dtype = "f32";
  std::string receiver_dtype = "f32";
  bool mixed = false;
  absl::Duration work = absl::ZeroDuration();
  bool inline_done = false;
  bool whole_heads = false;
};

struct World;

// One prefill worker.
struct Prefill {
  Prefill(World* world, const Setting& setting, const std::string& id);

  v1::WorkerRef self;
  PrefillSide side;
  std::shared_ptr<Pair> pair;  // the latest link
  int dials = 0;
  std::function<void(Pair*)> on_dial;
  rpc::PeerIdentity identity;  // of its certificate
  std::unique_ptr<Sender> sender;
};

struct World {
  explicit World(const Setting& s)
      : setting(s), decode(s.shape, s.receiver_block, &loop) {
    options.self = Ref("decode");
    options.fingerprint = {{"weights", "w1"}, {"numerics", "cpu-1"}};
    options.host_id = "host";
    options.ways = {s.way};
    if (s.way != "grpc") options.ways.push_back("grpc");
    options.kv_dtype = s.receiver_dtype;
    options.mixed_numerics = s.mixed;
    options.layers = {s.shape.layers, s.shape.windows};
    options.kv_heads = s.shape.kv_heads;
    options.head_dim = s.shape.head_dim;
    options.slab_bytes = s.slab_bytes;
    options.slabs_per_peer = s.slabs_per_peer;
    options.num_slabs = s.num_slabs;
    decode.scattering.delay = decode.digesting.delay = s.work;
    decode.scattering.inline_done = decode.digesting.inline_done =
        s.inline_done;
    Restart();
    AddPrefill("prefill");
  }
  ~World() {
    // Nothing is gathering or scattering when workers end.
    loop.RunFor(absl::Seconds(1));
  }

  void Restart() {
    receiver = std::make_unique<Receiver>(options, &loop, &random, &decode);
    receiver->AddWay(std::make_unique<DirectReceiverWay>(&host));
  }
  Prefill* AddPrefill(const std::string& id) {
    prefills.push_back(std::make_unique<Prefill>(this, setting, id));
    return prefills.back().get();
  }
  Prefill& prefill() { return *prefills[0]; }
  Sender& sender() { return *prefill().sender; }

  // Ticket, KV and offer of attempt `n`; what is computed comes with Finish.
  Attempt Offer(int n, int positions, Prefill* from = nullptr,
                std::vector<std::string> avoid = {}) {
    if (from == nullptr) from = prefills[0].get();
    const Attempt attempt = MakeAttempt(n);
    from->side.Fill(attempt, positions, static_cast<uint64_t>(n));
    const std::string ticket = receiver->IssueTicket(
        attempt, from->self, positions, absl::Seconds(60));
    from->sender->Offer(attempt, options.self, ticket, positions, 0,
                        absl::Seconds(1), avoid);
    return attempt;
  }
  // All layers, one by one, in chunks; then the commit.
  void Finish(const Attempt& attempt, int positions, int chunk = 8,
              Prefill* from = nullptr) {
    if (from == nullptr) from = prefills[0].get();
    for (int p = 0; p < positions; p += chunk) {
      for (int l = 0; l < setting.shape.layers; ++l) {
        from->sender->Computed(attempt,
                               {l, l + 1, p, std::min(p + chunk, positions)});
      }
    }
    FirstToken first;
    first.position = positions;
    first.token.set_token_id(42);
    from->sender->Commit(attempt, first);
  }
  Attempt Run(int n, int positions, Prefill* from = nullptr) {
    const Attempt attempt = Offer(n, positions, from);
    Finish(attempt, positions, 8, from);
    return attempt;
  }
  bool SameKv(const Attempt& attempt, int positions, Prefill* from = nullptr) {
    if (from == nullptr) from = prefills[0].get();
    Grant all;
    all.head_end = setting.shape.kv_heads;
    for (int l = 0; l < setting.shape.layers; ++l) {
      const int begin = setting.shape.windowed(l) ? decode.windowed_begin : 0;
      for (int p = std::max(begin, decode.cached); p < positions; ++p) {
        if (from->side.kv(attempt)->Wire(l, p, all) !=
            decode.kv(attempt)->Wire(l, p, all)) {
          return false;
        }
      }
    }
    return true;
  }
  // Every slab free, no attempt anywhere.
  void ExpectBaseline() {
    EXPECT_TRUE(receiver->CheckInvariants().ok());
    EXPECT_EQ(receiver->tickets(), 0);
    EXPECT_EQ(receiver->slabs().free, receiver->slabs().total);
    for (auto& one : prefills) {
      EXPECT_TRUE(one->sender->CheckInvariants().ok());
      EXPECT_EQ(one->sender->attempts(), 0);
      EXPECT_EQ(one->sender->slabs().free, one->sender->slabs().total);
      EXPECT_EQ(one->sender->waiting_positions("decode"), 0);
    }
  }

  Setting setting;
  VirtualLoop loop;
  SeededRandom random{1};
  DirectHost host;
  DecodeSide decode;
  ReceiverOptions options;
  std::unique_ptr<Receiver> receiver;
  std::vector<std::unique_ptr<Prefill>> prefills;
};

inline Prefill::Prefill(World* world, const Setting& setting,
                        const std::string& id)
    : self(Ref(id)), side(setting.shape, setting.sender_block, &world->loop) {
  side.gathering.delay = setting.work;
  side.gathering.inline_done = setting.inline_done;
  SenderOptions options;
  *options.hello.mutable_sender() = self;
  (*options.hello.mutable_fingerprint())["weights"] = "w1";
  (*options.hello.mutable_fingerprint())["numerics"] =
      setting.mixed ? "cpu-2" : "cpu-1";
  options.hello.set_host_id("host");
  options.hello.add_ways(setting.way);
  if (setting.way != "grpc") options.hello.add_ways("grpc");
  options.hello.set_kv_dtype(setting.sender_dtype);
  options.hello.set_mixed_numerics(setting.mixed);
  options.layers = {setting.shape.layers, setting.shape.windows};
  options.kv_heads = setting.shape.kv_heads;
  options.head_dim = setting.shape.head_dim;
  options.whole_heads = setting.whole_heads;
  options.staging_bytes = setting.staging_bytes;
  options.slab_bytes = setting.slab_bytes;
  sender = std::make_unique<Sender>(
      options, &world->loop, &world->random,
      [this, world](const v1::WorkerRef&) {
        ++dials;
        pair = std::make_shared<Pair>(&world->loop, &world->loop);
        if (on_dial) on_dial(pair.get());
        world->receiver->AddLink(pair->Server(), identity);
        return pair->Client();
      },
      &side);
  sender->AddWay(std::make_unique<DirectSenderWay>(&world->host));
}

}  // namespace tandem::handoff::testing

#endif  // TANDEM_TESTS_HANDOFF_WORLD_H_
