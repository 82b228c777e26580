// SPDX-License-Identifier: Apache-2.0
// A prefill and a decode worker's handoff in two real processes, with real
// threads, over the double: bytes cross from one to the other, and the faults
// are those that only processes have: kills, stops, hangs and leaks.

#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/random.h"
#include "common/thread_loop.h"
#include "gtest/gtest.h"
#include "handoff/nccl/nccl_way.h"
#include "tests/handoff/nccl/double.h"
#include "tests/handoff/nccl/socket_stream.h"
#include "tests/handoff/real_time.h"
#include "tests/handoff/workers.h"

namespace tandem::handoff::nccl::testing {
namespace {

using handoff::testing::DecodeSide;
using handoff::testing::Entries;
using handoff::testing::Eventually;
using handoff::testing::FakeKv;
using handoff::testing::MakeAttempt;
using handoff::testing::PrefillSide;
using handoff::testing::Ref;
using handoff::testing::Shape;

constexpr Shape kShape{.layers = 4, .kv_heads = 4, .head_dim = 64};
constexpr int64_t kSlabBytes = 64 << 10;  // 32 rows
constexpr int kPositions = 48;
constexpr int kSlices = 6;  // of all layers and 8 positions
constexpr int kFatalExit = 7;

StationOptions Quick(const std::string& self) {
  StationOptions options;
  options.self = self;
  options.slab_bytes = kSlabBytes;
  options.buffers = 16;
  options.join_interval = absl::Milliseconds(1);
  options.stall_timeout = absl::Milliseconds(300);
  options.warm_stall_timeout = absl::Seconds(1);
  options.join_timeout = absl::Seconds(3);
  options.ask_timeout = absl::Seconds(3);
  options.burial_timeout = absl::Seconds(2);
  options.backoff_min = absl::Milliseconds(10);
  options.backoff_max = absl::Milliseconds(100);
  options.join_backoff_max = absl::Milliseconds(100);
  return options;
}

DoubleOptions OnGpu(int gpu) {
  DoubleOptions options;
  options.gpu = gpu;
  return options;
}

std::unique_ptr<Loop> RealHand(const std::string& name) {
  return std::make_unique<ThreadLoop>(name);
}

struct Fatal final : Watcher {
  void OnUp(const std::string&, uint64_t, int64_t) override {}
  void OnBroken(const std::string&, uint64_t, const std::string&, int64_t,
                const absl::Status&) override {}
  void OnFatal(const absl::Status& status) override {
    if (on_fatal) on_fatal();
    fatal = true;
  }
  std::function<void()> on_fatal;
  std::atomic<bool> fatal = false;
};

sockaddr_un Address(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return address;
}
socklen_t Length(const std::string& name) {
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                name.size());
}

// ---- The child: a prefill worker that does what is written to it, one
// command a frame, and answers each attempt with how it ended.

class Prefill {
 public:
  Prefill(Fabric* fabric, std::string address, int commands)
      : commands_(commands),
        loop_("prefill"),
        device_("prefill-device"),
        side_(kShape, 8, &device_),
        library_(NewDouble(fabric, OnGpu(1))),
        memory_(fabric, 1) {
    side_.gathering.home = &loop_;
    watcher_.on_fatal = [] { _exit(kFatalExit); };
    SenderOptions options;
    *options.hello.mutable_sender() = Ref("prefill");
    (*options.hello.mutable_fingerprint())["weights"] = "w1";
    options.hello.add_ways("nccl");
    options.hello.add_ways("grpc");
    options.hello.set_kv_dtype("f32");
    options.layers.count = kShape.layers;
    options.kv_heads = kShape.kv_heads;
    options.head_dim = kShape.head_dim;
    options.slab_bytes = kSlabBytes;
    options.staging_bytes = 8 * kSlabBytes;
    loop_.RunSync([&] {
      station_ =
          *Station::Create(Quick("prefill"), &loop_, &random_, library_.get(),
                           &memory_, RealHand, &watcher_);
      sender_ = std::make_unique<Sender>(
          options, &loop_, &random_,
          [this,
           address](const v1::WorkerRef&) -> std::unique_ptr<SenderStream> {
            const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
            const sockaddr_un to = Address(address);
            if (connect(fd, reinterpret_cast<const sockaddr*>(&to),
                        Length(address)) != 0) {
              close(fd);
              return nullptr;
            }
            return std::make_unique<
                SocketStream<v1::LinkRequest, v1::LinkResponse>>(&loop_, fd);
          },
          &side_);
      sender_->AddWay(NewNcclSenderWay(station_.get()));
    });
  }

  // Returns the exit code.
  int Live() {
    std::string command;
    while (ReadFrame(commands_, &command)) {
      const std::vector<std::string> words = absl::StrSplit(command, ' ');
      if (words[0] == "run") {
        Run(std::stoi(words[1]), absl::HexStringToBytes(words[2]));
      } else if (words[0] == "up") {
        int64_t ups = 0;
        loop_.RunSync([&] { ups = station_->counters().ups; });
        WriteFrame(commands_, absl::StrCat(ups));
      }
    }
    loop_.RunSync([this] { sender_.reset(); });
    absl::Status idle;
    Eventually([&] {
      loop_.RunSync([&] { idle = station_->CheckIdle(); });
      return idle.ok();
    });
    loop_.RunSync([this] { station_.reset(); });
    return idle.ok() ? 0 : 1;
  }

 private:
  void Run(int n, const std::string& ticket) {
    const Attempt attempt = MakeAttempt(n);
    loop_.RunSync([&] {
      side_.Fill(attempt, kPositions, static_cast<uint64_t>(n));
      sender_->Offer(attempt, Ref("decode"), ticket, kPositions, 0,
                     absl::Seconds(1), {});
      for (int l = 0; l < kShape.layers; ++l) {
        sender_->Computed(attempt, {l, l + 1, 0, kPositions});
      }
      FirstToken first;
      first.position = kPositions;
      sender_->Commit(attempt, first);
    });
    PrefillSide::Seen seen;
    Eventually([&] {
      loop_.RunSync([&] { seen = side_.seen[n]; });
      return seen.acknowledged + seen.failed > 0;
    });
    WriteFrame(commands_, seen.acknowledged > 0
                              ? seen.timings.way
                              : absl::StrCat("failed ", seen.failed_way));
  }

  const int commands_;
  ThreadLoop loop_;
  ThreadLoop device_;
  SeededRandom random_{8};
  PrefillSide side_;
  std::unique_ptr<Library> library_;
  DoubleMemory memory_;
  Fatal watcher_;
  std::unique_ptr<Station> station_;
  std::unique_ptr<Sender> sender_;
};

// Forked while this process has no threads but the listed ones' absence is
// nobody's matter: the child only uses what it makes itself.
class Child {
 public:
  Child(Fabric* fabric, const std::string& address) {
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    pid_ = fork();
    if (pid_ == 0) {
      close(fds[0]);
      _exit(Prefill(fabric, address, fds[1]).Live());
    }
    close(fds[1]);
    commands_ = fds[0];
  }
  ~Child() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    if (commands_ >= 0) close(commands_);
  }
  void Say(const std::string& command) { WriteFrame(commands_, command); }
  // Empty: it has ended.
  std::string Answer() {
    std::string answer;
    return ReadFrame(commands_, &answer) ? answer : "";
  }
  void Signal(int signal) { kill(pid_, signal); }
  // After its commands ended, or it ended itself.
  int Exit() {
    close(std::exchange(commands_, -1));
    int status = 0;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
  int commands_ = -1;
};

// ---- The decode worker, in this process.

class Decode {
 public:
  explicit Decode(Fabric* fabric, std::string address)
      : fabric_(fabric),
        loop_("decode"),
        device_("decode-device"),
        side_(kShape, 16, &device_),
        library_(NewDouble(fabric, OnGpu(0))),
        memory_(fabric, 0) {
    side_.scattering.home = side_.digesting.home = &loop_;
    ReceiverOptions options;
    options.self = Ref("decode");
    options.fingerprint = {{"weights", "w1"}};
    options.ways = {"nccl", "grpc"};
    options.kv_dtype = "f32";
    options.layers.count = kShape.layers;
    options.kv_heads = kShape.kv_heads;
    options.head_dim = kShape.head_dim;
    options.slab_bytes = kSlabBytes;
    options.slabs_per_peer = 4;
    options.num_slabs = 12;
    options.silence = absl::Seconds(2);
    loop_.RunSync([&] {
      station_ =
          *Station::Create(Quick("decode"), &loop_, &random_, library_.get(),
                           &memory_, RealHand, &watcher_);
      receiver_ = std::make_unique<Receiver>(options, &loop_, &random_, &side_);
      receiver_->AddWay(NewNcclReceiverWay(station_.get()));
    });
    listener_ = socket(AF_UNIX, SOCK_STREAM, 0);
    const sockaddr_un at = Address(address);
    EXPECT_EQ(bind(listener_, reinterpret_cast<const sockaddr*>(&at),
                   Length(address)),
              0);
    EXPECT_EQ(listen(listener_, 8), 0);
    door_ = std::thread([this] {
      while (true) {
        const int fd = accept(listener_, nullptr, nullptr);
        if (fd < 0) return;
        loop_.Post([this, fd] {
          receiver_->AddLink(
              std::make_unique<SocketStream<v1::LinkResponse, v1::LinkRequest>>(
                  &loop_, fd));
        });
      }
    });
  }
  ~Decode() {
    shutdown(listener_, SHUT_RDWR);
    door_.join();
    close(listener_);
    loop_.RunSync([this] { receiver_.reset(); });
    EXPECT_TRUE(Eventually([this] { return Idle().ok(); })) << Idle();
    loop_.RunSync([this] { station_.reset(); });
    EXPECT_EQ(fabric_->orphan_sends.load(), 0);
    EXPECT_EQ(fabric_->changed_sends.load(), 0);
    EXPECT_EQ(fabric_->gpus[0].allocated.load(), 0);
  }

  std::string Ticket(int n) {
    std::string ticket;
    loop_.RunSync([&] {
      ticket = receiver_->IssueTicket(MakeAttempt(n), Ref("prefill"),
                                      kPositions, absl::Seconds(60));
    });
    return absl::BytesToHexString(ticket);
  }
  // The way it took; "failed <way>", or "" if the child has ended. A commit
  // has the very bytes of the sender.
  std::string Try(Child* child, int n) {
    child->Say(absl::StrCat("run ", n, " ", Ticket(n)));
    const std::string answer = child->Answer();
    loop_.RunSync([&] {
      auto& seen = side_.seen[n];
      if (seen.committed > 0) {
        EXPECT_TRUE(SameKv(n)) << n;
      } else {
        seen.ended = seen.failed == 0;
        receiver_->EndAttempt(MakeAttempt(n), absl::OkStatus());
      }
      if (answer == "nccl" || answer == "grpc") {
        EXPECT_EQ(seen.committed, 1) << n;
      }
    });
    return answer;
  }
  bool Up(Child* child, int64_t ups) {
    return Eventually([&] {
      child->Say("up");
      return std::atoi(child->Answer().c_str()) >= ups && Counters().ups >= ups;
    });
  }
  // By attempts from `*n` on: on a busy machine the new link may be lost once
  // more, and only an attempt dials it.
  bool UpAgain(Child* child, int64_t ups, int64_t own, int* n) {
    return Eventually([&] {
      EXPECT_NE(Try(child, (*n)++), "");
      child->Say("up");
      return std::atoi(child->Answer().c_str()) >= ups && Counters().ups >= own;
    });
  }
  absl::Status Idle() {
    absl::Status idle;
    loop_.RunSync([&] { idle = station_->CheckIdle(); });
    return idle;
  }
  absl::Status Invariants() {
    absl::Status status;
    loop_.RunSync([&] {
      status = station_->CheckInvariants();
      status.Update(receiver_->CheckInvariants());
    });
    return status;
  }
  StationCounters Counters() {
    StationCounters counters;
    loop_.RunSync([&] { counters = station_->counters(); });
    return counters;
  }
  SlabCounts Slabs() {
    SlabCounts counts;
    loop_.RunSync([&] { counts = receiver_->slabs(); });
    return counts;
  }
  int Links() {
    int links = 0;
    loop_.RunSync([&] { links = receiver_->links(); });
    return links;
  }
  bool fatal() const { return watcher_.fatal; }

 private:
  bool SameKv(int n) {
    FakeKv sent = FakeKv::Of(kShape, kPositions, 16, static_cast<uint64_t>(n));
    Grant all;
    all.head_end = kShape.kv_heads;
    for (int l = 0; l < kShape.layers; ++l) {
      for (int p = 0; p < kPositions; ++p) {
        if (sent.Wire(l, p, all) != side_.kv(MakeAttempt(n))->Wire(l, p, all)) {
          return false;
        }
      }
    }
    return true;
  }

  Fabric* const fabric_;
  ThreadLoop loop_;
  ThreadLoop device_;
  SeededRandom random_{7};
  DecodeSide side_;
  std::unique_ptr<Library> library_;
  DoubleMemory memory_;
  Fatal watcher_;
  std::unique_ptr<Station> station_;
  std::unique_ptr<Receiver> receiver_;
  int listener_ = -1;
  std::thread door_;
};

// The child is forked first: this process has one thread then.
class NcclProcess : public ::testing::Test {
 protected:
  NcclProcess()
      : fabric_(Fabric::Make()),
        address_(absl::StrCat(
            "tandem-test-", absl::BytesToHexString(SystemRandom().Bytes(8)))) {}

  std::unique_ptr<Child> NewChild() {
    return std::make_unique<Child>(fabric_, address_);
  }
  std::unique_ptr<Decode> NewDecode() {
    return std::make_unique<Decode>(fabric_, address_);
  }

  Fabric* const fabric_;
  const std::string address_;
};

TEST_F(NcclProcess, MovesBytesFromOneToTheOther) {
  auto child = NewChild();
  auto decode = NewDecode();
  EXPECT_EQ(decode->Try(child.get(), 1), "grpc");
  ASSERT_TRUE(decode->Up(child.get(), 1));
  for (int n = 2; n <= 20; ++n) {
    EXPECT_EQ(decode->Try(child.get(), n), "nccl") << n;
    EXPECT_TRUE(decode->Invariants().ok());
  }
  EXPECT_EQ(fabric_->gpus[0].most_receives.load(), 1);
  EXPECT_EQ(fabric_->gpus[1].most_receives.load(), 1);
  EXPECT_EQ(child->Exit(), 0);
}

TEST_F(NcclProcess, ComesThroughEveryFault) {
  struct Fault {
    const char* why;
    int gpu;
    On on;
    Act act;
    const char* way;  // of the attempt that meets it
    int64_t amount = 0;
  };
  const std::vector<Fault> faults = {
      {"late", 1, On::kSend, Act::kDelay, "nccl", 100'000},
      {"corrupted", 0, On::kReceive, Act::kCorrupt, "failed nccl"},
      {"receive stalls", 0, On::kReceive, Act::kStall, "failed nccl"},
      {"send stalls", 1, On::kSend, Act::kStall, "failed nccl"},
      {"receive fails", 0, On::kReceive, Act::kFail, "failed nccl"},
      {"send fails", 1, On::kSend, Act::kFail, "failed nccl"},
      {"receive refused", 0, On::kReceive, Act::kRefuse, "failed nccl"},
      {"send refused", 1, On::kSend, Act::kRefuse, "failed nccl"},
  };
  auto child = NewChild();
  auto decode = NewDecode();
  int n = 1;
  EXPECT_EQ(decode->Try(child.get(), n++), "grpc");
  int64_t ups = 1;
  ASSERT_TRUE(decode->Up(child.get(), ups));
  for (const Fault& fault : faults) {
    fabric_->Arm(fault.gpu, fault.on, fault.act, 2, fault.amount);
    EXPECT_EQ(decode->Try(child.get(), n++), fault.way) << fault.why;
    EXPECT_TRUE(decode->Invariants().ok()) << fault.why;
    if (std::string(fault.way) == "failed nccl" && fault.act != Act::kCorrupt) {
      ASSERT_TRUE(decode->Up(child.get(), ++ups)) << fault.why;
    }
    EXPECT_EQ(decode->Try(child.get(), n++), "nccl") << fault.why;
    EXPECT_EQ(decode->Slabs().free, 12) << fault.why;
  }
  EXPECT_EQ(decode->Links(), 1);
  EXPECT_FALSE(decode->fatal());
  EXPECT_EQ(child->Exit(), 0);
}

TEST_F(NcclProcess, AKilledPeerLeavesNothing) {
  auto child = NewChild();
  auto next = NewChild();  // it does nothing until told
  auto decode = NewDecode();
  decode->Try(child.get(), 1);
  ASSERT_TRUE(decode->Up(child.get(), 1));
  // Killed in the middle of an operation that its end has promised.
  fabric_->Arm(1, On::kSend, Act::kStall, 3);
  child->Say(absl::StrCat("run 2 ", decode->Ticket(2)));
  ASSERT_TRUE(Eventually([&] {
    return fabric_->gpus[0].receives.load() == 1 &&
           decode->Slabs().in_flight > 0;
  }));
  child->Signal(SIGKILL);
  EXPECT_TRUE(Eventually([&] { return decode->Slabs().free == 12; }));
  EXPECT_TRUE(Eventually([&] { return decode->Idle().ok(); }));
  EXPECT_EQ(decode->Counters().communicators, 0);
  fabric_->Disarm();
  int n = 3;
  ASSERT_TRUE(decode->UpAgain(next.get(), 1, 2, &n));
  EXPECT_EQ(decode->Try(next.get(), n), "nccl");
  EXPECT_EQ(next->Exit(), 0);
}

TEST_F(NcclProcess, AStoppedPeerIsGivenUpAndComesBack) {
  auto child = NewChild();
  auto decode = NewDecode();
  decode->Try(child.get(), 1);
  ASSERT_TRUE(decode->Up(child.get(), 1));
  fabric_->Arm(1, On::kSend, Act::kDelay, 3, 200'000);
  child->Say(absl::StrCat("run 2 ", decode->Ticket(2)));
  ASSERT_TRUE(
      Eventually([&] { return fabric_->gpus[0].receives.load() == 1; }));
  child->Signal(SIGSTOP);
  // Its receive ends by the deadline, its link by silence.
  EXPECT_TRUE(Eventually([&] { return decode->Links() == 0; }));
  EXPECT_TRUE(Eventually([&] { return decode->Idle().ok(); }));
  EXPECT_EQ(decode->Slabs().free, 12);
  child->Signal(SIGCONT);
  EXPECT_NE(child->Answer(), "");
  int n = 3;
  ASSERT_TRUE(decode->UpAgain(child.get(), 2, 2, &n));
  EXPECT_EQ(decode->Try(child.get(), n), "nccl");
  EXPECT_EQ(child->Exit(), 0);
}

TEST_F(NcclProcess, OneThatCannotEndItsCommunicatorEndsItself) {
  for (const Act act : {Act::kHang, Act::kUnquiet}) {
    fabric_->Disarm();
    auto child = NewChild();
    auto next = NewChild();
    auto decode = NewDecode();
    decode->Try(child.get(), 1);
    ASSERT_TRUE(decode->Up(child.get(), 1));
    fabric_->Arm(1, On::kAbort, act);
    fabric_->Arm(1, On::kSend, Act::kFail, 2);
    EXPECT_EQ(decode->Try(child.get(), 2), "failed nccl");
    // It still serves by the other way, until its time is over.
    EXPECT_EQ(decode->Try(child.get(), 3), "grpc");
    EXPECT_EQ(child->Answer(), "");
    EXPECT_EQ(child->Exit(), kFatalExit);
    EXPECT_FALSE(decode->fatal());
    decode->Try(next.get(), 4);
    ASSERT_TRUE(decode->Up(next.get(), 1));
    EXPECT_EQ(decode->Try(next.get(), 5), "nccl");
    EXPECT_EQ(next->Exit(), 0);
  }
}

TEST_F(NcclProcess, AHangingReceiveIsFatalHereAndOnlyHere) {
  auto child = NewChild();
  auto decode = NewDecode();
  decode->Try(child.get(), 1);
  ASSERT_TRUE(decode->Up(child.get(), 1));
  // The call itself does not return, so neither can the abort be called.
  fabric_->Arm(0, On::kReceive, Act::kHang, 2);
  EXPECT_EQ(decode->Try(child.get(), 2), "failed nccl");
  EXPECT_TRUE(Eventually([&] { return decode->fatal(); }));
  EXPECT_EQ(decode->Slabs().quarantined, 1);
  EXPECT_EQ(decode->Try(child.get(), 3), "grpc");
  fabric_->released = true;  // so that this process can go on
  EXPECT_TRUE(Eventually([&] { return decode->Slabs().free == 12; }));
  EXPECT_EQ(child->Exit(), 0);
}

TEST_F(NcclProcess, AHundredRebuildsLeakNothing) {
  auto child = NewChild();
  auto decode = NewDecode();
  int n = 1;
  decode->Try(child.get(), n++);
  ASSERT_TRUE(decode->Up(child.get(), 1));
  const int descriptors = Entries("/proc/self/fd");
  const int threads = Entries("/proc/self/task");
  for (int i = 1; i <= 100; ++i) {
    const int gpu = i % 2;
    fabric_->Arm(gpu, gpu == 0 ? On::kReceive : On::kSend,
                 i % 25 == 0 ? Act::kStall : Act::kFail, i % kSlices);
    EXPECT_EQ(decode->Try(child.get(), n++), "failed nccl") << i;
    ASSERT_TRUE(decode->Up(child.get(), i + 1)) << i;
  }
  EXPECT_EQ(decode->Try(child.get(), n++), "nccl");
  EXPECT_EQ(Entries("/proc/self/fd"), descriptors);
  EXPECT_EQ(Entries("/proc/self/task"), threads);
  EXPECT_EQ(decode->Counters().gone, 100);
  EXPECT_EQ(decode->Counters().communicators, 1);
  EXPECT_EQ(decode->Counters().memory_bytes, 1 << 20);
  EXPECT_EQ(decode->Slabs().free, 12);
  EXPECT_EQ(fabric_->gpus[0].communicators.load(), 1);
  EXPECT_EQ(fabric_->gpus[1].communicators.load(), 1);
  EXPECT_EQ(child->Exit(), 0);  // and idle there, too
}

}  // namespace
}  // namespace tandem::handoff::nccl::testing
