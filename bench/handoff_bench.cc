// SPDX-License-Identifier: Apache-2.0
// What a handoff carries by shm and by grpc, both over a link of real gRPC on
// loopback, beside one thread's memcpy: 128 MiB of KV in slabs of 1 MiB, from
// one loop's thread to another's. Gather and scatter are plain copies, so that
// the handoff is what is measured: "shm" is two copies, of which the second one
// runs beside the first. For bench/system_goals.py; every byte is compared.
//
//   handoff_bench
//
// Prints one JSON object, GB/s: the best of four handoffs each.
#include <emmintrin.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/freed_buffers.h"
#include "common/random.h"
#include "common/rpc/channel.h"
#include "common/rpc/server.h"
#include "common/thread_loop.h"
#include "handoff/receiver.h"
#include "handoff/sender.h"
#include "handoff/shm/shm_way.h"
#include "worker/links.h"

namespace tandem::handoff {
namespace {

constexpr int kLayers = 8;
constexpr int kHeads = 8;
constexpr int kHeadDim = 128;
constexpr int kPositions = 2048;
constexpr int64_t kRowBytes = int64_t{2} * kHeads * kHeadDim * 4;  // f32
constexpr int64_t kBytes = kLayers * kPositions * kRowBytes;
constexpr int kRounds = 4;

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "handoff_bench: %s\n", what.c_str());
  std::exit(1);
}

// The contiguous parts of a slice: where each lies in the slab and in the
// whole, and its size.
template <typename Copy>
void Each(const SliceRange& range, const Copy& copy) {
  const int64_t size = (range.position_end - range.position_begin) * kRowBytes;
  for (int l = range.layer_begin; l < range.layer_end; ++l) {
    copy((l - range.layer_begin) * size,
         (int64_t{l} * kPositions + range.position_begin) * kRowBytes, size);
  }
}

// A copy past the caches, as a CPU's scatter stores; `size` is a multiple of 64
// and `to` aligned to 16.
void StreamCopy(std::byte* to, const std::byte* from, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) {
    _mm_stream_si128(
        reinterpret_cast<__m128i*>(to + i),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
  _mm_sfence();
}

class Prefill final : public SenderDelegate {
 public:
  explicit Prefill(Loop* loop) : loop_(loop) {}
  void OnAnswer(const Attempt&, Answer, const Grant&) override {}
  void Gather(const Attempt&, const SliceRange& range, const Grant&,
              std::byte* staging,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override {
    // As in a worker: begun now, done later.
    loop_->Post([this, range, staging, done = std::move(done)]() mutable {
      Each(range, [&](int64_t at, int64_t from, int64_t size) {
        std::memcpy(staging + at, source.data() + from, size);
      });
      done({1, 1});
    });
  }
  void OnAcknowledged(const Attempt&, const HandoffTimings& t) override {
    timings = t;
    ended->Notify();
  }
  void OnFailed(const Attempt&, const absl::Status& status,
                const std::string&) override {
    Fail(status.ToString());
  }

  std::vector<std::byte> source = std::vector<std::byte>(kBytes);
  HandoffTimings timings;
  std::unique_ptr<absl::Notification> ended;

 private:
  Loop* const loop_;
};

class Decode final : public ReceiverDelegate {
 public:
  explicit Decode(Loop* loop) : loop_(loop) {}
  absl::StatusOr<Verdict> OnOffer(const Ticket&, const v1::HandoffOffer& offer,
                                  const std::string&, Grant* grant) override {
    grant->position_end = offer.positions();
    return Verdict::kGranted;
  }
  void Scatter(const Attempt&, const SliceRange& range, const Grant&,
               const std::byte* staging,
               absl::AnyInvocable<void()> done) override {
    loop_->Post([this, range, staging, done = std::move(done)]() mutable {
      Each(range, [&](int64_t at, int64_t to, int64_t size) {
        StreamCopy(sink.data() + to, staging + at, size);
      });
      slices += 1;
      done();
    });
  }
  void Digest(const Attempt&, const Grant&,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override {
    done({slices, std::exchange(slices, 0)});
  }
  absl::Status OnCommit(const Attempt&, const FirstToken&) override {
    return absl::OkStatus();
  }
  void OnFailed(const Attempt&, const absl::Status& status,
                const std::string&) override {
    Fail(status.ToString());
  }
  void OnFatal(const absl::Status& status) override { Fail(status.ToString()); }

  std::vector<std::byte> sink = std::vector<std::byte>(kBytes);
  uint64_t slices = 0;

 private:
  Loop* const loop_;
};

// Keeps the loop's thread on the nth of the CPUs that this process may use.
// Linux wakes a thread where its waker runs, so that two threads that copy in
// turns stay on one core with the other one idle.
void PinTo(ThreadLoop& loop, int nth) {
  cpu_set_t may;
  CPU_ZERO(&may);
  if (sched_getaffinity(0, sizeof(may), &may) != 0) Fail("sched_getaffinity");
  nth %= CPU_COUNT(&may);
  int cpu = 0;
  while (!CPU_ISSET(cpu, &may) || nth-- > 0) ++cpu;
  loop.RunSync([cpu] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    if (sched_setaffinity(0, sizeof(one), &one) != 0) {
      Fail("sched_setaffinity");
    }
  });
}

double MemcpyRate() {
  std::vector<std::byte> from(kBytes, std::byte{1});
  std::vector<std::byte> to(kBytes);
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const absl::Time start = absl::Now();
    std::memcpy(to.data(), from.data(), from.size());
    best = std::max(best, kBytes / absl::ToDoubleSeconds(absl::Now() - start));
    from[static_cast<size_t>(round)] = to[static_cast<size_t>(round) + 1];
  }
  return best;
}

class Bench {
 public:
  Bench() : from_("prefill"), to_("decode") {
    for (size_t i = 0; i < prefill_.source.size(); ++i) {
      prefill_.source[i] = static_cast<std::byte>(i * 7 + i / 4099);
    }
    StartDecode();
    StartPrefill();
    PinTo(from_, 0);
    PinTo(to_, 1);
  }
  ~Bench() {
    from_.RunSync([this] { sender_.reset(); });
    server_->Shutdown(absl::Seconds(5));
    to_.RunSync([this] { receiver_.reset(); });
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  // Bytes per second by `way`, of which `avoid` are the others.
  double Rate(const std::string& way, const std::vector<std::string>& avoid) {
    double best = 0;
    for (int round = 0; round < kRounds; ++round) {
      std::fill(decode_.sink.begin(), decode_.sink.end(), std::byte{0});
      const Attempt attempt{absl::StrFormat("request-%08d", ++attempts_)};
      std::string ticket;
      to_.RunSync([&] {
        ticket = receiver_->IssueTicket(attempt, Ref("prefill", ""), kPositions,
                                        absl::Minutes(1));
      });
      prefill_.ended = std::make_unique<absl::Notification>();
      from_.RunSync([&] {
        sender_->Offer(attempt, Ref("decode", server_->address()), ticket,
                       kPositions, 0, absl::Seconds(1), avoid);
        for (int l = 0; l < kLayers; ++l) {
          sender_->Computed(attempt, {l, l + 1, 0, kPositions});
        }
        sender_->Commit(attempt, {});
      });
      prefill_.ended->WaitForNotification();
      if (prefill_.timings.way != way || prefill_.timings.bytes != kBytes ||
          prefill_.source != decode_.sink) {
        Fail(absl::StrCat("wrong handoff by ", prefill_.timings.way));
      }
      best = std::max(
          best, kBytes / absl::ToDoubleSeconds(prefill_.timings.transfer));
    }
    return best;
  }

 private:
  static v1::WorkerRef Ref(const std::string& id, const std::string& endpoint) {
    v1::WorkerRef ref;
    ref.set_worker_id(id);
    ref.set_incarnation(id);
    ref.set_endpoint(endpoint);
    return ref;
  }

  void StartDecode() {
    ReceiverOptions options;
    options.self = Ref("decode", "");
    options.fingerprint = {{"weights", "w1"}};
    options.host_id = "host";
    options.kv_dtype = "f32";
    options.layers.count = kLayers;
    options.kv_heads = kHeads;
    options.head_dim = kHeadDim;
    to_.RunSync([&] {
      receiver_ =
          std::make_unique<Receiver>(options, &to_, &to_random_, &decode_);
      auto way = NewShmReceiverWay(&to_, &to_random_);
      if (!way.ok()) Fail(way.status().ToString());
      receiver_->AddWay(*std::move(way));
    });
    service_ = std::make_unique<worker::LinkServer>(
        &to_, [this](auto stream, const rpc::CallInfo& info) {
          receiver_->AddLink(std::move(stream), info.identity);
        });
    auto server = rpc::Server::Start({}, {service_.get()});
    if (!server.ok()) Fail(server.status().ToString());
    server_ = *std::move(server);
  }

  void StartPrefill() {
    SenderOptions options;
    *options.hello.mutable_sender() = Ref("prefill", "");
    (*options.hello.mutable_fingerprint())["weights"] = "w1";
    options.hello.set_host_id("host");
    options.hello.add_ways("shm");
    options.hello.add_ways("grpc");
    options.hello.set_kv_dtype("f32");
    options.layers.count = kLayers;
    options.kv_heads = kHeads;
    options.head_dim = kHeadDim;
    from_.RunSync([&] {
      sender_ = std::make_unique<Sender>(
          options, &from_, &from_random_,
          [this](const v1::WorkerRef& decode) {
            return worker::OpenLink(&from_,
                                    rpc::MakeChannel(decode.endpoint(), {}),
                                    decode.endpoint());
          },
          &prefill_);
      sender_->AddWay(NewShmSenderWay(&from_));
    });
  }

  ThreadLoop from_;
  ThreadLoop to_;
  SeededRandom from_random_{1};
  SeededRandom to_random_{2};
  Prefill prefill_{&from_};
  Decode decode_{&to_};
  std::unique_ptr<Receiver> receiver_;  // on its loop
  std::unique_ptr<worker::LinkServer> service_;
  std::unique_ptr<rpc::Server> server_;
  std::unique_ptr<Sender> sender_;  // on its loop
  int attempts_ = 0;
};

void Run() {
  KeepFreedBuffers();  // as workers do
  Bench bench;
  const double shm = bench.Rate("shm", {});
  const double grpc = bench.Rate("grpc", {"shm"});
  std::printf("{\"shm\": %.4f, \"grpc\": %.4f, \"memcpy\": %.4f}\n", shm / 1e9,
              grpc / 1e9, MemcpyRate() / 1e9);
}

}  // namespace
}  // namespace tandem::handoff

int main() { tandem::handoff::Run(); }
