// SPDX-License-Identifier: Apache-2.0
// What the least relay of streamed tokens costs: bare gRPC callback reactors in
// three processes on loopback. For bench/system_goals.py, which puts the
// router's cost beside it.
//
//   rpc_relay_bench STREAMS MESSAGES INTERVAL_US
//     a source writes one message of 32 bytes to each stream every interval, as
//     a decode worker's step does; prints the relay's CPU per message
//   rpc_relay_bench bulk
//     one stream of 1 MiB messages from one process to another
//
// Prints one JSON object.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "common/mutex.h"
#include "tests/common/rpc/echo.h"

namespace tandem::rpc {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kToken = 32;
constexpr size_t kBulk = size_t{1} << 20;
constexpr int kBulkMessages = 512;

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) +
           1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Answers Count(n) with n messages: at each Tick one, or without pause.
class Source final : public EchoService::CallbackService {
 public:
  Source(size_t payload, bool ticks) : payload_(payload), ticks_(ticks) {}

  void Tick() {
    MutexLock lock(&mutex_);
    for (Reactor* reactor : reactors_) reactor->Tick();
  }

 private:
  struct Reactor final : grpc::ServerWriteReactor<EchoResponse> {
    Reactor(Source* source, int64_t count) : owner(source), left(count) {
      response = Response(1, owner->payload_);
      if (!owner->ticks_) allowed = left;
      MutexLock lock(&owner->mutex_);
      owner->reactors_.insert(this);
      Next();
    }
    void Tick() {
      ++allowed;
      Next();
    }
    // Under the source's mutex.
    void Next() {
      if (writing || finished) return;
      if (left == 0) {
        finished = true;
        Finish(grpc::Status::OK);
      } else if (allowed > 0) {
        --left;
        --allowed;
        writing = true;
        StartWrite(&response);
      }
    }
    void OnWriteDone(bool ok) override {
      MutexLock lock(&owner->mutex_);
      writing = false;
      if (!ok) left = 0;
      Next();
    }
    void OnDone() override {
      {
        MutexLock lock(&owner->mutex_);
        owner->reactors_.erase(this);
      }
      delete this;
    }
    Source* const owner;
    int64_t left;
    int64_t allowed = 0;
    bool writing = false;
    bool finished = false;
    EchoResponse response;
  };
  grpc::ServerWriteReactor<EchoResponse>* Count(
      grpc::CallbackServerContext*, const EchoRequest* request) override {
    return new Reactor(this, request->number());
  }

  const size_t payload_;
  const bool ticks_;
  Mutex mutex_;
  std::set<Reactor*> reactors_ ABSL_GUARDED_BY(mutex_);
};

// Passes each message on, one at a time.
class Relay final : public EchoService::CallbackService {
 public:
  explicit Relay(const std::string& source)
      : stub_(EchoService::NewStub(MakeChannel(source, {}))) {}

 private:
  struct Reactor final : grpc::ServerWriteReactor<EchoResponse>,
                         grpc::ClientReadReactor<EchoResponse> {
    Reactor(EchoService::Stub* stub, const EchoRequest& from) : request(from) {
      stub->async()->Count(&context, &request, this);
      StartRead(&response);
      StartCall();
    }
    void OnReadDone(bool ok) override {
      if (ok) StartWrite(&response);
    }
    void OnWriteDone(bool ok) override {
      if (ok) StartRead(&response);
    }
    void OnDone(const grpc::Status& status) override { Finish(status); }
    void OnDone() override { delete this; }
    grpc::ClientContext context;
    EchoRequest request;
    EchoResponse response;
  };
  grpc::ServerWriteReactor<EchoResponse>* Count(
      grpc::CallbackServerContext*, const EchoRequest* request) override {
    return new Reactor(stub_.get(), *request);
  }

  const std::unique_ptr<EchoService::Stub> stub_;
};

struct Sink final : grpc::ClientReadReactor<EchoResponse> {
  Sink(EchoService::Stub* stub, int count) : request(Request(count)) {
    stub->async()->Count(&context, &request, this);
    StartRead(&response);
    StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    ++messages;
    StartRead(&response);
  }
  void OnDone(const grpc::Status&) override { done = true; }
  grpc::ClientContext context;
  EchoRequest request;
  EchoResponse response;
  int64_t messages = 0;
  std::atomic<bool> done = false;
};

// A process that serves until its input ends, then says what CPU it used.
class Child {
 public:
  template <typename Body>
  explicit Child(const Body& body) {
    int to[2], from[2];
    if (pipe(to) != 0 || pipe(from) != 0) std::exit(1);
    pid_ = fork();
    if (pid_ == 0) {
      close(to[1]);
      close(from[0]);
      body(to[0], from[1]);
      std::_Exit(0);
    }
    close(to[0]);
    close(from[1]);
    to_ = to[1];
    from_ = from[0];
    address_ = Line();
  }
  const std::string& address() const { return address_; }
  // Ends it; its CPU seconds.
  double End() {
    close(to_);
    const std::string cpu = Line();
    waitpid(pid_, nullptr, 0);
    return std::strtod(cpu.c_str(), nullptr);
  }

 private:
  std::string Line() const {
    std::string line;
    for (char c = 0; read(from_, &c, 1) == 1 && c != '\n';) line += c;
    return line;
  }
  pid_t pid_ = 0;
  int to_ = -1;
  int from_ = -1;
  std::string address_;
};

template <typename Service>
void Serve(Service* service, int in, int out, int interval_us) {
  auto server = *Server::Start({}, {service});
  dprintf(out, "%s\n", server->address().c_str());
  std::atomic<bool> ended = false;
  std::thread ticker([&] {
    if constexpr (std::is_same_v<Service, Source>) {
      while (interval_us > 0 && !ended) {
        std::this_thread::sleep_for(std::chrono::microseconds(interval_us));
        service->Tick();
      }
    }
  });
  const double before = CpuSeconds();
  char c = 0;
  while (read(in, &c, 1) > 0) {
  }
  dprintf(out, "%.6f\n", CpuSeconds() - before);
  ended = true;
  ticker.join();
}

void Wait(const std::vector<std::unique_ptr<Sink>>& sinks) {
  for (const auto& sink : sinks) {
    while (!sink->done) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

void Tokens(int streams, int messages, int interval_us) {
  Child source([&](int in, int out) {
    Source service(kToken, interval_us > 0);
    Serve(&service, in, out, interval_us);
  });
  Child relay([&](int in, int out) {
    Relay service(source.address());
    Serve(&service, in, out, 0);
  });
  auto stub = EchoService::NewStub(MakeChannel(relay.address(), {}));
  std::vector<std::unique_ptr<Sink>> sinks;
  const auto begin = Clock::now();
  sinks.reserve(static_cast<size_t>(streams));
  for (int i = 0; i < streams; ++i) {
    sinks.push_back(std::make_unique<Sink>(stub.get(), messages));
  }
  Wait(sinks);
  const double seconds =
      std::chrono::duration<double>(Clock::now() - begin).count();
  int64_t passed = 0;
  for (const auto& sink : sinks) passed += sink->messages;
  const double cpu = relay.End();
  source.End();
  std::printf(
      "{\"streams\": %d, \"messages\": %lld, \"seconds\": %.4f, "
      "\"cpu_us_per_message\": %.3f}\n",
      streams, static_cast<long long>(passed), seconds,
      cpu * 1e6 / static_cast<double>(passed));
}

void Bulk() {
  Child source([&](int in, int out) {
    Source service(kBulk, false);
    Serve(&service, in, out, 0);
  });
  auto stub = EchoService::NewStub(MakeChannel(source.address(), {}));
  double best = 0;
  for (int round = 0; round < 4; ++round) {
    std::vector<std::unique_ptr<Sink>> sinks;
    const auto begin = Clock::now();
    sinks.push_back(std::make_unique<Sink>(stub.get(), kBulkMessages));
    Wait(sinks);
    const double seconds =
        std::chrono::duration<double>(Clock::now() - begin).count();
    best = std::max(
        best, static_cast<double>(sinks[0]->messages * kBulk) / seconds * 1e-9);
  }
  source.End();
  std::printf("{\"gigabytes_per_second\": %.4f}\n", best);
}

}  // namespace
}  // namespace tandem::rpc

int main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == "bulk") {
    tandem::rpc::Bulk();
  } else if (argc == 4) {
    tandem::rpc::Tokens(std::atoi(argv[1]), std::atoi(argv[2]),
                        std::atoi(argv[3]));
  } else {
    std::fprintf(
        stderr, "usage: rpc_relay_bench STREAMS MESSAGES INTERVAL_US | bulk\n");
    return 2;
  }
  return 0;
}
