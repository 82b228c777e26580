// SPDX-License-Identifier: Apache-2.0
// What a Stream costs over bare gRPC: the same messages through Streams on
// loops and through minimal callback reactors, client and server in one
// process on loopback. Prints messages per second and CPU per message (both
// ends together).
//
//   echo  one message in flight per stream, to and fro: counts one way
//   pour  the server sends as fast as the stream takes it (tokens)
#include <sys/resource.h>

#include <cstdio>
#include <memory>
#include <vector>

#include "tests/common/rpc/echo.h"

namespace tandem::rpc {
namespace {

constexpr size_t kPayload = 32;  // about a token's message
constexpr int kPour = 256;       // messages per request in `pour`

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) +
           1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// --- Bare reactors ---------------------------------------------------------

class BareServer final : public EchoService::CallbackService {
 public:
  explicit BareServer(int per_request) : per_request_(per_request) {}

 private:
  struct Reactor final : grpc::ServerBidiReactor<EchoRequest, EchoResponse> {
    explicit Reactor(int n) : per_request(n) { StartRead(&request); }
    void OnReadDone(bool ok) override {
      if (!ok) return Finish(grpc::Status::OK);
      left = per_request;
      OnWriteDone(true);
    }
    void OnWriteDone(bool ok) override {
      if (!ok) return Finish(grpc::Status::CANCELLED);
      if (left-- == 0) return StartRead(&request);
      response = Response(request.number(), kPayload);
      StartWrite(&response);
    }
    void OnDone() override { delete this; }
    const int per_request;
    int left = 0;
    EchoRequest request;
    EchoResponse response;
  };
  grpc::ServerBidiReactor<EchoRequest, EchoResponse>* Chat(
      grpc::CallbackServerContext*) override {
    return new Reactor(per_request_);
  }
  const int per_request_;
};

struct BareClient final : grpc::ClientBidiReactor<EchoRequest, EchoResponse> {
  void Start(EchoService::Stub* stub, int rounds, int answers) {
    left = rounds;
    per_request = missing = answers;
    request = Request(1, kPayload);
    stub->async()->Chat(&context, this);
    StartWrite(&request);
    StartRead(&response);
    StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (--missing > 0) return StartRead(&response);
    missing = per_request;
    Next();
  }
  void OnWriteDone(bool) override { Next(); }
  // The next round starts when the last one was both written and answered.
  void Next() {
    if (++finished % 2 != 0) return;
    if (--left == 0) return StartWritesDone();
    StartRead(&response);
    StartWrite(&request);
  }
  void OnDone(const grpc::Status&) override { done = true; }
  grpc::ClientContext context;
  EchoRequest request;
  EchoResponse response;
  int left = 0, missing = 0, per_request = 0;
  std::atomic<int> finished = 0;
  std::atomic<bool> done = false;
};

void Bare(int streams, int rounds, int per_request) {
  BareServer service(per_request);
  auto server = *Server::Start({}, {&service});
  auto stub = EchoService::NewStub(MakeChannel(server->address(), {}));
  std::vector<std::unique_ptr<BareClient>> clients;
  for (int i = 0; i < streams; ++i) {
    clients.push_back(std::make_unique<BareClient>());
    clients.back()->Start(stub.get(), rounds, per_request);
  }
  for (auto& client : clients) {
    while (!client->done)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  server->Shutdown(absl::Seconds(5));
}

// --- Streams on loops -------------------------------------------------------

struct LoopClient final : StreamHandler<EchoResponse> {
  void OnMessage(EchoResponse) override {
    if (--missing > 0) return;
    if (--left == 0) {
      done = true;
      return;
    }
    missing = per_request;
    stream->Send(Request(1, kPayload));
  }
  void OnClosed(absl::Status) override {}
  std::unique_ptr<ClientSideStream> stream;
  int left = 0, missing = 0, per_request = 0;
  std::atomic<bool> done = false;
};

struct LoopHandler final : StreamHandler<EchoRequest> {
  void OnMessage(EchoRequest request) override {
    for (int i = 0; i < per_request; ++i) {
      stream->Send(Response(request.number(), kPayload));
    }
  }
  void OnClosed(absl::Status) override {}
  std::unique_ptr<ServerSideStream> stream;
  int per_request = 0;
};

void OnLoops(int streams, int rounds, int per_request) {
  ThreadLoop server_loop("server"), client_loop("client");
  std::vector<std::unique_ptr<LoopHandler>> handlers;
  EchoServer service(&server_loop, [&](auto stream, CallInfo) {
    handlers.push_back(std::make_unique<LoopHandler>());
    handlers.back()->stream = std::move(stream);
    handlers.back()->per_request = per_request;
    handlers.back()->stream->Start(handlers.back().get());
  });
  auto server = *Server::Start({}, {&service});
  auto channel = MakeChannel(server->address(), {});
  std::vector<std::unique_ptr<LoopClient>> clients;
  client_loop.RunSync([&] {
    for (int i = 0; i < streams; ++i) {
      clients.push_back(std::make_unique<LoopClient>());
      LoopClient* client = clients.back().get();
      client->left = rounds;
      client->per_request = client->missing = per_request;
      client->stream = OpenChat(&client_loop, channel);
      client->stream->Start(client);
      client->stream->Send(Request(1, kPayload));
    }
  });
  for (auto& client : clients) {
    while (!client->done)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  client_loop.RunSync([&] {
    for (auto& client : clients) client->stream.reset();
  });
  server_loop.RunSync([&] {
    for (auto& handler : handlers) handler->stream.reset();
  });
  server->Shutdown(absl::Seconds(5));
}

void Measure(const char* kind, const char* name, int streams, int messages,
             int per_request, void (*run)(int, int, int)) {
  const int rounds = messages / streams / per_request;
  const double cpu = CpuSeconds();
  const auto start = std::chrono::steady_clock::now();
  run(streams, rounds, per_request);
  const double wall =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
          .count();
  const double one_way =
      static_cast<double>(rounds) * streams *
      (per_request == 1 ? 2 : per_request);  // an echo goes both ways
  std::printf("%-5s %-6s %3d streams %9.0f messages/s %6.1f us CPU/message\n",
              kind, name, streams, one_way / wall,
              (CpuSeconds() - cpu) / one_way * 1e6);
  std::fflush(stdout);
}

}  // namespace
}  // namespace tandem::rpc

int main() {
  using tandem::rpc::Bare;
  using tandem::rpc::Measure;
  using tandem::rpc::OnLoops;
  for (int streams : {1, 64}) {
    Measure("echo", "bare", streams, 30'000, 1, Bare);
    Measure("echo", "stream", streams, 30'000, 1, OnLoops);
    Measure("pour", "bare", streams, 131'072, tandem::rpc::kPour, Bare);
    Measure("pour", "stream", streams, 131'072, tandem::rpc::kPour, OnLoops);
  }
  return 0;
}
