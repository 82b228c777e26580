// SPDX-License-Identifier: Apache-2.0
// Shared memory between real threads and real processes: who is let in, what
// is sealed, what a peer's death proves and what it does not.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <string>
#include <thread>
#include <vector>

#include "common/thread_loop.h"
#include "gtest/gtest.h"
#include "handoff/shm/arena.h"
#include "handoff/shm/doorman.h"
#include "handoff/shm/shm_way.h"
#include "tests/handoff/pinned.h"
#include "tests/handoff/real_time.h"
#include "tests/handoff/stream_pair.h"
#include "tests/handoff/workers.h"

namespace tandem::handoff::testing {
namespace {

using Pair = tandem::testing::StreamPair<v1::LinkRequest, v1::LinkResponse>;

TEST(SharedArena, CannotChangeSizeByEitherSide) {
  auto arena = SharedArena::Create(1 << 16);
  ASSERT_TRUE(arena.ok());
  const int fd = (*arena)->fd().get();
  EXPECT_NE(ftruncate(fd, 0), 0);
  EXPECT_NE(ftruncate(fd, 1 << 20), 0);
  EXPECT_NE(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
  std::memset((*arena)->data(), 7, (*arena)->size());
}

TEST(SharedArena, IsRefusedUnsealedOrOfAnotherSize) {
  Fd loose(memfd_create("loose", MFD_ALLOW_SEALING | MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(loose.get(), 4096), 0);
  EXPECT_FALSE(SharedArena::Map(Fd(dup(loose.get())), 4096).ok());
  auto arena = SharedArena::Create(4096);
  ASSERT_TRUE(arena.ok());
  EXPECT_FALSE(SharedArena::Map(Fd(dup((*arena)->fd().get())), 8192).ok());
  auto mapped = SharedArena::Map(Fd(dup((*arena)->fd().get())), 4096);
  ASSERT_TRUE(mapped.ok());
  (*mapped)->data()[5] = std::byte{9};
  EXPECT_EQ((*arena)->data()[5], std::byte{9});
}

// A decode worker on its own loop, with a device thread behind it.
struct RealDecode {
  explicit RealDecode(const Shape& shape, absl::Duration quarantine,
                      int64_t slab_bytes = 512)
      : loop("decode"), device("decode-device"), side(shape, 16, &device) {
    side.scattering.home = side.digesting.home = &loop;
    options.self = Ref("decode");
    options.fingerprint = {{"weights", "w1"}};
    options.host_id = "host";
    options.kv_dtype = "f32";
    options.layers.count = shape.layers;
    options.kv_heads = shape.kv_heads;
    options.head_dim = shape.head_dim;
    options.slab_bytes = slab_bytes;
    options.slabs_per_peer = 4;
    options.num_slabs = 16;
    options.quarantine_timeout = quarantine;
    side.pinned = &pinned;
    options.host_memory = &pinned;
    loop.RunSync([this] {
      receiver = std::make_unique<Receiver>(options, &loop, &random, &side);
      auto way = NewShmReceiverWay(&loop, &random, &pinned);
      EXPECT_TRUE(way.ok()) << way.status();
      receiver->AddWay(*std::move(way));
    });
  }
  ~RealDecode() {
    loop.RunSync([this] { receiver.reset(); });
  }
  // Until it has heard that a link is gone: nothing of its streams refers to
  // the other end's loop any more.
  void Settle() {
    for (int i = 0; i < 3; ++i) loop.RunSync([] {});
  }
  SlabCounts Slabs() {
    SlabCounts counts;
    loop.RunSync([&] { counts = receiver->slabs(); });
    return counts;
  }
  HandoffCounters Counters() {
    HandoffCounters counters;
    loop.RunSync([&] { counters = receiver->counters(); });
    return counters;
  }

  Pinned pinned;
  ThreadLoop loop;
  ThreadLoop device;
  // Its socket has one name on the whole host: another run may be going on.
  SeededRandom random{static_cast<uint64_t>(getpid())};
  DecodeSide side;
  ReceiverOptions options;
  std::unique_ptr<Receiver> receiver;
};

struct RealPrefill {
  RealPrefill(const Shape& shape, RealDecode* decode, const std::string& id,
              int64_t slab_bytes = 512)
      : peer(decode),
        self(Ref(id)),
        loop(id),
        device(id + "-device"),
        side(shape, 8, &device) {
    side.gathering.home = &loop;
    SenderOptions options;
    *options.hello.mutable_sender() = self;
    (*options.hello.mutable_fingerprint())["weights"] = "w1";
    options.hello.set_host_id("host");
    options.hello.add_ways("shm");
    options.hello.add_ways("grpc");
    options.hello.set_kv_dtype("f32");
    options.layers.count = shape.layers;
    options.kv_heads = shape.kv_heads;
    options.head_dim = shape.head_dim;
    options.slab_bytes = slab_bytes;
    options.staging_bytes = 16 * slab_bytes;
    side.pinned = &pinned;
    options.host_memory = &pinned;
    loop.RunSync([&] {
      sender = std::make_unique<Sender>(
          options, &loop, &random,
          [this, decode](const v1::WorkerRef&) {
            pair = std::make_shared<Pair>(&loop, &decode->loop);
            if (on_dial) on_dial(pair.get());
            decode->loop.Post([decode, pair = pair] {
              decode->receiver->AddLink(pair->Server());
            });
            return pair->Client();
          },
          &side);
      sender->AddWay(NewShmSenderWay(&loop, &pinned));
    });
  }
  ~RealPrefill() {
    loop.RunSync([this] { sender.reset(); });
    peer->Settle();
  }

  void Run(RealDecode* decode, int n, int positions,
           const std::vector<std::string>& avoid = {}) {
    const Attempt attempt = MakeAttempt(n);
    std::string ticket;
    decode->loop.RunSync([&] {
      ticket = decode->receiver->IssueTicket(attempt, self, positions,
                                             absl::Seconds(120));
    });
    loop.RunSync([&] {
      side.Fill(attempt, positions, n);
      sender->Offer(attempt, decode->options.self, ticket, positions, 0,
                    absl::Seconds(1), avoid);
      for (int l = 0; l < decode->options.layers.count; ++l) {
        sender->Computed(attempt, {l, l + 1, 0, positions});
      }
      FirstToken first;
      first.position = positions;
      sender->Commit(attempt, first);
    });
  }
  PrefillSide::Seen Seen(int n) {
    PrefillSide::Seen seen;
    loop.RunSync([&] { seen = side.seen[n]; });
    return seen;
  }

  RealDecode* const peer;
  v1::WorkerRef self;
  Pinned pinned;
  ThreadLoop loop;
  ThreadLoop device;
  SeededRandom random{8};
  PrefillSide side;
  std::shared_ptr<Pair> pair;
  std::function<void(Pair*)> on_dial;
  std::unique_ptr<Sender> sender;
};

bool SameKv(const Shape& shape, PrefillSide* from, DecodeSide* to, int n,
            int positions) {
  Grant all;
  all.head_end = shape.kv_heads;
  for (int l = 0; l < shape.layers; ++l) {
    for (int p = 0; p < positions; ++p) {
      if (from->kv(MakeAttempt(n))->Wire(l, p, all) !=
          to->kv(MakeAttempt(n))->Wire(l, p, all)) {
        return false;
      }
    }
  }
  return true;
}

TEST(Shm, ManyHandoffsOfTwoPairsOnRealThreads) {
  const int before = Entries("/proc/self/fd");
  {
    const Shape shape;
    RealDecode decode(shape, absl::Seconds(30));
    RealPrefill a(shape, &decode, "a");
    RealPrefill b(shape, &decode, "b");
    for (int n = 1; n <= 60; ++n) {
      (n % 2 == 0 ? a : b).Run(&decode, n, 40);
    }
    for (int n = 1; n <= 60; ++n) {
      RealPrefill& from = n % 2 == 0 ? a : b;
      ASSERT_TRUE(Eventually([&] { return from.Seen(n).acknowledged == 1; }))
          << n << ' ' << from.Seen(n).status;
      EXPECT_EQ(from.Seen(n).timings.way, "shm");
      decode.loop.RunSync([&] {
        from.loop.RunSync([&] {
          EXPECT_TRUE(SameKv(shape, &from.side, &decode.side, n, 40));
        });
      });
    }
    EXPECT_EQ(decode.Slabs().free, 16);
    EXPECT_EQ(decode.Counters().ways.at("shm").committed, 60);
  }
  EXPECT_EQ(Entries("/proc/self/fd"), before);
}

// Eight slices through four slabs: each end's way lets them wait.
TEST(Shm, SlicesAndCreditsGoInPairs) {
  std::set<int> slices, credits;  // messages that had some
  RealDecode decode(Shape(), absl::Seconds(30));
  RealPrefill prefill(Shape(), &decode, "prefill");
  prefill.on_dial = [&](Pair* pair) {
    pair->requests.filter = [&, pair](int, v1::LinkRequest* message) {
      if (message->has_slice()) slices.insert(pair->requests.written);
      return 1;
    };
    pair->responses.filter = [&, pair](int, v1::LinkResponse* message) {
      if (message->has_credit()) credits.insert(pair->responses.written);
      return 1;
    };
  };
  prefill.Run(&decode, 1, 8);
  ASSERT_TRUE(Eventually([&] { return prefill.Seen(1).acknowledged == 1; }));
  prefill.loop.RunSync([&] { EXPECT_EQ(slices.size(), 4u); });
  // The first four answer one batch of announcements.
  decode.loop.RunSync([&] { EXPECT_EQ(credits.size(), 3u); });
  EXPECT_EQ(decode.Counters().ways.at("shm").slices, 8);
}

TEST(Shm, LinksCutUnderLoadComeBackAndLeaveNoSlab) {
  const Shape shape;
  RealDecode decode(shape, absl::Seconds(30));
  {
    RealPrefill prefill(shape, &decode, "prefill");
    for (int n = 1; n <= 30; ++n) {
      prefill.Run(&decode, n, 40);
      if (n % 3 == 0) {
        prefill.loop.RunSync([&] {
          if (prefill.pair != nullptr) prefill.pair->Cut();
        });
      }
    }
    for (int n = 1; n <= 30; ++n) {
      EXPECT_TRUE(Eventually([&] {
        const auto seen = prefill.Seen(n);
        return seen.acknowledged + seen.failed == 1;
      })) << n;
    }
    // The sender lives, and says of every lost link that it is done with it.
    EXPECT_TRUE(Eventually([&] { return decode.Slabs().free == 16; }));
    EXPECT_EQ(decode.Counters().arenas_dropped, 0);
  }
}

TEST(Shm, OtherHostsUseTheOtherWay) {
  const Shape shape;
  RealDecode decode(shape, absl::Seconds(30));
  decode.loop.RunSync([&] {
    decode.options.host_id = "elsewhere";
    decode.receiver = std::make_unique<Receiver>(decode.options, &decode.loop,
                                                 &decode.random, &decode.side);
    auto way = NewShmReceiverWay(&decode.loop, &decode.random);
    ASSERT_TRUE(way.ok());
    decode.receiver->AddWay(*std::move(way));
  });
  RealPrefill prefill(shape, &decode, "prefill");
  prefill.Run(&decode, 1, 40);
  ASSERT_TRUE(Eventually([&] { return prefill.Seen(1).acknowledged == 1; }));
  EXPECT_EQ(prefill.Seen(1).timings.way, "grpc");
}

TEST(Shm, StrangersGetNoDescriptor) {
  ThreadLoop loop("decode");
  SeededRandom random(static_cast<uint64_t>(getpid()));
  std::unique_ptr<ReceiverWay> way;
  std::unique_ptr<ReceiverChannel> channel;
  v1::LinkWelcome welcome;
  welcome.set_slab_bytes(4096);
  welcome.set_num_slabs(2);
  loop.RunSync([&] {
    way = *NewShmReceiverWay(&loop, &random);
    channel = *way->NewChannel({}, 2, 4096, &welcome);
  });
  for (int bit = 0; bit < 256; bit += 5) {
    v1::LinkWelcome forged = welcome;
    (*forged.mutable_shm_secret())[bit / 8] ^= static_cast<char>(1 << bit % 8);
    EXPECT_FALSE(ConnectShm(forged, absl::Seconds(5)).ok()) << bit;
  }
  v1::LinkWelcome short_secret = welcome;
  short_secret.mutable_shm_secret()->pop_back();
  EXPECT_FALSE(ConnectShm(short_secret, absl::Seconds(5)).ok());
  v1::LinkWelcome other_size = welcome;
  loop.RunSync([&] { EXPECT_FALSE(channel->ready()); });

  auto first = ConnectShm(welcome, absl::Seconds(5));
  ASSERT_TRUE(first.ok()) << first.status();
  loop.RunSync([&] { EXPECT_TRUE(channel->ready()); });
  // A secret is good once.
  EXPECT_FALSE(ConnectShm(welcome, absl::Seconds(5)).ok());
  loop.RunSync([&] {
    channel.reset();
    way.reset();
  });
}

TEST(Shm, WithoutDescriptorsADoormanWaitsForThem) {
  const std::string name = "tandem-test-door-" + std::to_string(getpid());
  const auto doorman = Doorman::Listen(name);
  ASSERT_TRUE(doorman.ok()) << doorman.status();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  Fd visitor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval patience{20, 0};
  setsockopt(visitor.get(), SOL_SOCKET, SO_RCVTIMEO, &patience,
             sizeof(patience));
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = 256;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<Fd> all;
  for (int fd; (fd = dup(visitor.get())) >= 0;) all.emplace_back(fd);
  EXPECT_EQ(errno, EMFILE);
  ASSERT_EQ(connect(visitor.get(), reinterpret_cast<sockaddr*>(&address),
                    static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                           name.size())),
            0);  // by the kernel
  const std::clock_t begun = std::clock();
  std::this_thread::sleep_for(std::chrono::seconds(1));
  // Of all threads: the others sleep.
  EXPECT_LT(std::clock() - begun, CLOCKS_PER_SEC * 3 / 10);
  char nonce[shm::kNonceBytes];
  EXPECT_EQ(recv(visitor.get(), nonce, sizeof(nonce), MSG_DONTWAIT), -1);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(recv(visitor.get(), nonce, sizeof(nonce), MSG_WAITALL),
            shm::kNonceBytes);
}

TEST(Shm, AnAbsentReceiverFailsAtOnce) {
  v1::LinkWelcome welcome;
  welcome.set_shm_socket("tandem-nobody-listens-here");
  welcome.set_shm_secret(std::string(32, 's'));
  welcome.set_slab_bytes(4096);
  welcome.set_num_slabs(1);
  EXPECT_FALSE(ConnectShm(welcome, absl::Seconds(5)).ok());
  welcome.clear_shm_socket();
  EXPECT_FALSE(ConnectShm(welcome, absl::Seconds(5)).ok());
}

// A child process that connects, stores a byte into slab 0 over and over, and
// can be stopped or killed. Forked before this process has threads.
class Child {
 public:
  Child() {
    EXPECT_EQ(pipe(to_), 0);
    EXPECT_EQ(pipe(from_), 0);
    pid_ = fork();
    if (pid_ == 0) Live();
  }
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    for (int fd : {to_[0], to_[1], from_[0], from_[1]}) close(fd);
  }
  void Connect(const v1::LinkWelcome& welcome) {
    const std::string bytes = welcome.SerializeAsString();
    const uint32_t size = static_cast<uint32_t>(bytes.size());
    ASSERT_EQ(write(to_[1], &size, sizeof(size)), 4);
    ASSERT_EQ(write(to_[1], bytes.data(), size), ssize_t{size});
    char ok = 0;
    ASSERT_EQ(read(from_[0], &ok, 1), 1);
    ASSERT_EQ(ok, 'y');
  }
  // Closes the child's socket but keeps its mapping.
  void Signal(int signal) { kill(pid_, signal); }

 private:
  [[noreturn]] void Live() {
    uint32_t size = 0;
    if (read(to_[0], &size, sizeof(size)) != 4) _exit(1);
    std::string bytes(size, '\0');
    if (read(to_[0], bytes.data(), size) != ssize_t{size}) _exit(1);
    v1::LinkWelcome welcome;
    welcome.ParseFromString(bytes);
    auto channel = ConnectShm(welcome, absl::Seconds(10));
    const char answer = channel.ok() ? 'y' : 'n';
    if (write(from_[1], &answer, 1) != 1 || !channel.ok()) _exit(1);
    volatile std::byte* slab = (*channel)->Staging(0);
    while (true) {
      *slab = std::byte{0x5A};
      usleep(1000);
    }
  }
  int to_[2];
  int from_[2];
  pid_t pid_ = -1;
};

// Plays a sender by hand, up to one credit for slab 0 with the store
// outstanding in the child.
class ByHand final : public StreamHandler<v1::LinkResponse> {
 public:
  ByHand(RealDecode* decode, ThreadLoop* loop) : decode_(decode), loop_(loop) {
    pair_ = std::make_shared<Pair>(loop, &decode->loop);
    loop->RunSync([this] {
      stream_ = pair_->Client();
      stream_->Start(this);
    });
    decode->loop.RunSync(
        [this] { decode_->receiver->AddLink(pair_->Server()); });
    v1::LinkRequest request;
    v1::LinkHello* hello = request.mutable_hello();
    *hello->mutable_sender() = Ref("child");
    hello->set_receiver_incarnation(decode->options.self.incarnation());
    hello->set_protocol_min(1);
    hello->set_protocol_max(1);
    (*hello->mutable_fingerprint())["weights"] = "w1";
    hello->set_host_id("host");
    hello->add_ways("shm");
    hello->set_kv_dtype("f32");
    Say(request);
  }
  ~ByHand() override {
    loop_->RunSync([this] { stream_.reset(); });
    decode_->Settle();
  }
  void OnMessage(v1::LinkResponse message) override {
    if (message.has_welcome()) welcome = message.welcome();
    if (message.has_credit()) credit = message.credit();
    if (message.has_welcome()) welcomed = true;
    if (message.has_credit()) credited = true;
  }
  void OnClosed(absl::Status) override {}
  void Say(const v1::LinkRequest& request) {
    loop_->RunSync([&] { stream_->Send(request); });
  }
  void Transfer() {
    const Attempt attempt = MakeAttempt(1);
    v1::LinkRequest request;
    v1::HandoffOffer* offer = request.mutable_offer();
    offer->mutable_key()->set_request_id(attempt.request_id);
    offer->mutable_key()->set_attempt(attempt.number);
    decode_->loop.RunSync([&] {
      offer->set_ticket(decode_->receiver->IssueTicket(attempt, Ref("child"), 4,
                                                       absl::Seconds(60)));
    });
    offer->set_way("shm");
    offer->set_positions(4);
    Say(request);
    const v1::AttemptKey key = request.offer().key();
    request.Clear();
    *request.mutable_slice_ready()->mutable_key() = key;
    request.mutable_slice_ready()->set_layer_end(1);
    request.mutable_slice_ready()->set_position_end(4);
    request.mutable_slice_ready()->set_bytes(4 * 2 * 2 * 8 * 4);
    Say(request);
    ASSERT_TRUE(Eventually([this] { return credited.load(); }));
  }
  void Cut() {
    loop_->RunSync([this] { pair_->Cut(); });
  }

  std::atomic<bool> welcomed = false;
  std::atomic<bool> credited = false;
  v1::LinkWelcome welcome;
  v1::SliceCredit credit;

 private:
  RealDecode* const decode_;
  ThreadLoop* const loop_;
  std::shared_ptr<Pair> pair_;
  std::unique_ptr<SenderStream> stream_;
};

TEST(ShmProcess, AKilledPeerFreesItsSlabsByItsExitAlone) {
  Child child;
  RealDecode decode(Shape(), absl::Seconds(300));
  ThreadLoop loop("child");
  ByHand hand(&decode, &loop);
  ASSERT_TRUE(Eventually([&] { return hand.welcomed.load(); }));
  child.Connect(hand.welcome);
  hand.Transfer();
  hand.Cut();
  ASSERT_TRUE(Eventually([&] { return decode.Slabs().quarantined == 1; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(decode.Slabs().quarantined, 1);
  child.Signal(SIGKILL);
  EXPECT_TRUE(Eventually([&] { return decode.Slabs().free == 16; }));
  EXPECT_EQ(decode.Counters().arenas_dropped, 0);
}

TEST(ShmProcess, AStoppedPeersArenaIsDroppedAtTheDeadline) {
  Child child;
  RealDecode decode(Shape(), absl::Milliseconds(300));
  ThreadLoop loop("child");
  {
    ByHand hand(&decode, &loop);
    ASSERT_TRUE(Eventually([&] { return hand.welcomed.load(); }));
    child.Connect(hand.welcome);
    hand.Transfer();
    child.Signal(SIGSTOP);
    hand.Cut();
    EXPECT_TRUE(Eventually([&] { return decode.Slabs().free == 16; }));
    EXPECT_EQ(decode.Counters().arenas_dropped, 1);
    EXPECT_TRUE(decode.side.fatal.ok());
  }
  // It goes on storing, into memory that nobody here has any more, while the
  // next handoff runs.
  child.Signal(SIGCONT);
  RealPrefill prefill(Shape(), &decode, "prefill");
  prefill.Run(&decode, 2, 40);
  ASSERT_TRUE(Eventually([&] { return prefill.Seen(2).acknowledged == 1; }));
  decode.loop.RunSync([&] {
    EXPECT_TRUE(SameKv(Shape(), &prefill.side, &decode.side, 2, 40));
  });
  EXPECT_EQ(prefill.Seen(2).timings.way, "shm");
}

}  // namespace
}  // namespace tandem::handoff::testing
