// SPDX-License-Identifier: Apache-2.0
// The places and buffers of a prefill worker among more decode workers than it
// has of either: channels alone, on virtual time over the double.

#include <sys/mman.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "handoff/nccl/nccl_way.h"
#include "handoff/nccl/station.h"
#include "tests/handoff/nccl/double.h"
#include "tests/handoff/nccl/nccl_world.h"

namespace tandem::handoff::nccl::testing {
namespace {

constexpr int kSlabs = 4;
constexpr int64_t kSlabBytes = 512;

// A link that carries what channels say.
struct Host final : ChannelHost {
  void Say(v1::NcclControl message) override {
    loop->Post([this, message = std::move(message)] { hear(message); });
  }
  void OnBroken(const absl::Status&) override { ++broken; }
  void OnQuiet() override {}
  Loop* loop = nullptr;
  std::function<void(const v1::NcclControl&)> hear;
  int broken = 0;
};

// Prefill worker and GPU 0, and decode workers 1 to `decodes`.
class Star {
 public:
  Star(int decodes, StationOptions options)
      : fabric_(Fabric::Make()), hands_(&loop), pairs_(decodes) {
    for (int gpu = 0; gpu <= decodes; ++gpu) {
      DoubleOptions library;
      library.gpu = gpu;
      library.now = [this] { return loop.Now(); };
      library.hang = [] {};
      libraries_.push_back(NewDouble(fabric_, library));
      memories_.push_back(std::make_unique<DoubleMemory>(fabric_, gpu));
      options.self = gpu == 0 ? "prefill" : absl::StrCat("decode-", gpu);
      if (gpu > 0) options.buffers = options.max_communicators = 16;  // ample
      stations_.push_back(*Station::Create(
          options, &loop, &random_, libraries_.back().get(),
          memories_.back().get(),
          [this](const std::string& name) { return hands_.Make(name); },
          &seen_));
    }
    sender_ = NewNcclSenderWay(stations_[0].get());
    for (int i = 0; i < decodes; ++i) Connect(i);
  }
  ~Star() {
    for (Link& link : pairs_) {
      link.sender->LinkLost();
      link.receiver->LinkLost([] {});
    }
    loop.RunFor(absl::Seconds(1));
    pairs_.clear();
    loop.RunFor(absl::Seconds(60));
    for (const auto& station : stations_) {
      EXPECT_TRUE(station->CheckIdle().ok()) << station->CheckIdle();
    }
    sender_.reset();
    receivers_.clear();
    stations_.clear();
    munmap(fabric_, sizeof(Fabric));
  }

  bool Usable(int decode) { return pairs_[decode].sender->Usable(); }
  int broken(int decode) const { return pairs_[decode].to_receiver->broken; }
  const StationCounters& counters() const { return stations_[0]->counters(); }

  VirtualLoop loop;

 private:
  struct Link {
    std::unique_ptr<Host> to_receiver = std::make_unique<Host>();
    std::unique_ptr<Host> to_sender = std::make_unique<Host>();
    std::unique_ptr<SenderChannel> sender;
    std::unique_ptr<ReceiverChannel> receiver;
  };

  void Connect(int i) {
    v1::LinkHello hello;
    hello.mutable_sender()->set_worker_id("prefill");
    v1::LinkWelcome welcome;
    welcome.set_worker_id(absl::StrCat("decode-", i + 1));
    welcome.set_slab_bytes(kSlabBytes);
    welcome.set_num_slabs(kSlabs);
    Link& link = pairs_[i];
    receivers_.push_back(NewNcclReceiverWay(stations_[i + 1].get()));
    link.receiver =
        *receivers_.back()->NewChannel(hello, kSlabs, kSlabBytes, &welcome);
    sender_->Connect(welcome, absl::Seconds(1),
                     [&link](auto made) { link.sender = *std::move(made); });
    link.to_receiver->loop = link.to_sender->loop = &loop;
    link.to_receiver->hear = [&link](const v1::NcclControl& message) {
      if (link.receiver != nullptr) link.receiver->Hear(message);
    };
    link.to_sender->hear = [&link](const v1::NcclControl& message) {
      if (link.sender != nullptr) link.sender->Hear(message);
    };
    link.receiver->Attach(link.to_sender.get());
    link.sender->Attach(link.to_receiver.get());
  }

  Fabric* const fabric_;
  SeededRandom random_{1};
  Hands hands_;
  Seen seen_;
  std::vector<std::unique_ptr<Library>> libraries_;
  std::vector<std::unique_ptr<DoubleMemory>> memories_;
  std::vector<std::unique_ptr<Station>> stations_;  // by gpu
  std::unique_ptr<SenderWay> sender_;
  std::vector<std::unique_ptr<ReceiverWay>> receivers_;
  std::vector<Link> pairs_;
};

TEST(NcclPlaces, AreOnlyForPairsThatHaveBuffers) {
  StationOptions options;
  options.slab_bytes = kSlabBytes;
  options.max_communicators = 2;
  options.buffers = 2 * kSlabs + options.max_joining;
  Star star(3, options);
  star.loop.RunFor(absl::Seconds(2));
  for (int second = 0; second < 120; ++second) {
    EXPECT_FALSE(star.Usable(2)) << second;  // as often as it is asked
    if (second % 15 == 0) {                  // beyond what takes a place away
      EXPECT_TRUE(star.Usable(0)) << second;
      EXPECT_TRUE(star.Usable(1)) << second;
    }
    star.loop.RunFor(absl::Seconds(1));
  }
  EXPECT_EQ(star.counters().joins, 2);
  EXPECT_EQ(star.counters().ups, 2);
  EXPECT_EQ(star.counters().dropped, 0);
  EXPECT_EQ(star.broken(0) + star.broken(1), 0);
}

}  // namespace
}  // namespace tandem::handoff::nccl::testing
