// SPDX-License-Identifier: Apache-2.0
// How the router's calls of a decode worker reach it over gRPC: those of one
// worker on one stream, or each on its own where the worker is of a version
// before that.
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "common/rpc/server.h"
#include "common/thread_loop.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/grpc/service.h"

namespace tandem::router {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using WorkerShared =
    SharedStream<v1::DecodeSharedResponse, v1::DecodeSharedRequest>;
using WorkerStream = Stream<v1::DecodeResponse, v1::DecodeRequest>;

bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 4000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

// Answers each request of a call with a token at its attempt's position.
class FakeWorker final : public v1::DecodeService::CallbackService {
 public:
  explicit FakeWorker(Loop* loop) : loop_(loop) {}

  struct Call final : StreamHandler<v1::DecodeRequest> {
    void OnMessage(v1::DecodeRequest message) override {
      v1::DecodeResponse response;
      response.mutable_tokens()->set_position(
          static_cast<int>(message.retry().attempt()));
      stream->Send(std::move(response));
    }
    void OnClosed(absl::Status s) override { status = std::move(s); }
    std::unique_ptr<WorkerStream> stream;
    std::optional<absl::Status> status;
  };

  grpc::ServerBidiReactor<v1::DecodeRequest, v1::DecodeResponse>* Decode(
      grpc::CallbackServerContext* context) override {
    return rpc::ServeBidi<v1::DecodeResponse, v1::DecodeRequest>(loop_, context,
                                                                 &accept_);
  }
  grpc::ServerBidiReactor<v1::DecodeSharedRequest, v1::DecodeSharedResponse>*
  DecodeShared(grpc::CallbackServerContext* context) override {
    return rpc::ServeBidi<v1::DecodeSharedResponse, v1::DecodeSharedRequest>(
        loop_, context, &accept_shared_);
  }

  // On the loop.
  int own = 0;
  std::vector<std::unique_ptr<Call>> calls;
  std::vector<std::shared_ptr<WorkerShared>> shared;

 private:
  void Take(std::unique_ptr<WorkerStream> stream) {
    auto call = std::make_unique<Call>();
    call->stream = std::move(stream);
    call->stream->Start(call.get());
    calls.push_back(std::move(call));
  }

  Loop* const loop_;
  const rpc::Accept<v1::DecodeResponse, v1::DecodeRequest> accept_ =
      [this](auto stream, const rpc::CallInfo&) {
        ++own;
        Take(std::move(stream));
      };
  const rpc::Accept<v1::DecodeSharedResponse, v1::DecodeSharedRequest>
      accept_shared_ = [this](auto stream, const rpc::CallInfo&) {
        shared.push_back(
            WorkerShared::Start(loop_, std::move(stream),
                                [this](auto call) { Take(std::move(call)); }));
      };
};

// One of the router's calls. All but its queries is the loop's.
class StreamCaller final : public StreamHandler<v1::DecodeResponse> {
 public:
  explicit StreamCaller(std::unique_ptr<DecodeStream> call)
      : stream(std::move(call)) {
    stream->Start(this);
  }
  void Ask(int number) {
    v1::DecodeRequest request;
    request.mutable_retry()->set_attempt(static_cast<uint32_t>(number));
    stream->Send(std::move(request));
  }
  void OnMessage(v1::DecodeResponse message) override {
    MutexLock lock(&mutex_);
    positions_.push_back(message.tokens().position());
  }
  void OnClosed(absl::Status status) override {
    MutexLock lock(&mutex_);
    status_ = std::move(status);
  }
  std::vector<int> positions() {
    MutexLock lock(&mutex_);
    return positions_;
  }
  std::optional<absl::Status> status() {
    MutexLock lock(&mutex_);
    return status_;
  }

  std::unique_ptr<DecodeStream> stream;

 private:
  Mutex mutex_;
  std::vector<int> positions_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> status_ ABSL_GUARDED_BY(mutex_);
};

class DialerTest : public ::testing::Test {
 protected:
  DialerTest() {
    auto server = rpc::Server::Start({}, {&worker_});
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  ~DialerTest() override {
    OnLoop([&] {
      callers_.clear();
      dialer_.reset();
      worker_.calls.clear();
      for (const auto& shared : worker_.shared) {
        shared->Close(absl::UnavailableError("done"));
      }
      worker_.shared.clear();
    });
    server_->Shutdown(absl::Seconds(10));
    loop_.Stop();
  }

  void OnLoop(absl::FunctionRef<void()> task) { loop_.RunSync(task); }
  StreamCaller* Dial(const std::string& incarnation, bool shares) {
    StreamCaller* caller = nullptr;
    OnLoop([&] {
      v1::WorkerRef ref;
      ref.set_worker_id("d0");
      ref.set_incarnation(incarnation);
      ref.set_endpoint(server_->address());
      ref.set_shared_decode(shares);
      callers_.push_back(std::make_unique<StreamCaller>(
          dialer_->DialDecode(ref, absl::Seconds(60), {})));
      caller = callers_.back().get();
      caller->Ask(static_cast<int>(callers_.size()));
    });
    return caller;
  }
  static bool Hears(StreamCaller* caller, size_t count) {
    return Eventually([&] { return caller->positions().size() == count; });
  }
  size_t streams() {
    size_t count = 0;
    OnLoop([&] { count = worker_.shared.size(); });
    return count;
  }

  ThreadLoop loop_{"loop"};
  FakeWorker worker_{&loop_};
  std::unique_ptr<rpc::Server> server_;
  std::unique_ptr<RpcDialer> dialer_ =
      std::make_unique<RpcDialer>(&loop_, rpc::Credentials());
  std::vector<std::unique_ptr<StreamCaller>> callers_;
};

TEST_F(DialerTest, CallsOfOneWorkerShareAStream) {
  for (int i = 1; i <= 3; ++i) {
    StreamCaller* const caller = Dial("one", true);
    ASSERT_TRUE(Hears(caller, 1));
    EXPECT_THAT(caller->positions(), ElementsAre(i));
  }
  EXPECT_EQ(streams(), 1u);
  EXPECT_EQ(worker_.own, 0);
  // A call that is dropped ends at the worker, and no other does.
  OnLoop([&] { callers_[0]->stream.reset(); });
  EXPECT_TRUE(Eventually([&] {
    bool ended = false;
    OnLoop([&] { ended = worker_.calls[0]->status.has_value(); });
    return ended;
  }));
  OnLoop([&] {
    EXPECT_TRUE(absl::IsCancelled(*worker_.calls[0]->status));
    EXPECT_EQ(worker_.calls[1]->status, std::nullopt);
    callers_[1]->Ask(9);
  });
  ASSERT_TRUE(Hears(callers_[1].get(), 2));
}

TEST_F(DialerTest, AWorkerThatSharesNoneGetsACallEach) {
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Hears(Dial("one", false), 1));
  OnLoop([&] { EXPECT_EQ(worker_.own, 3); });
  EXPECT_EQ(streams(), 0u);
}

TEST_F(DialerTest, ANewIncarnationOrCertificateGetsAStreamOfItsOwn) {
  StreamCaller* const first = Dial("one", true);
  ASSERT_TRUE(Hears(first, 1));
  ASSERT_TRUE(Hears(Dial("two", true), 1));
  EXPECT_EQ(streams(), 2u);
  OnLoop([&] { dialer_->Replace(rpc::Credentials()); });
  ASSERT_TRUE(Hears(Dial("one", true), 1));
  EXPECT_EQ(streams(), 3u);
  // What was open goes on.
  OnLoop([&] { first->Ask(7); });
  ASSERT_TRUE(Hears(first, 2));
}

TEST_F(DialerTest, AStreamThatEndedEndsItsCallsAndIsDialledAnew) {
  StreamCaller* const first = Dial("one", true);
  StreamCaller* const second = Dial("one", true);
  ASSERT_TRUE(Hears(first, 1));
  ASSERT_TRUE(Hears(second, 1));
  OnLoop([&] { worker_.shared[0]->Close(absl::UnavailableError("restart")); });
  for (StreamCaller* const caller : {first, second}) {
    ASSERT_TRUE(Eventually([&] { return caller->status().has_value(); }));
    EXPECT_TRUE(absl::IsUnavailable(*caller->status())) << *caller->status();
  }
  ASSERT_TRUE(Hears(Dial("one", true), 1));
  EXPECT_EQ(streams(), 2u);
}

TEST_F(DialerTest, AWorkerThatIsGoneEndsTheCall) {
  server_->Shutdown(absl::ZeroDuration());
  StreamCaller* const caller = Dial("one", true);
  ASSERT_TRUE(Eventually([&] { return caller->status().has_value(); }));
  EXPECT_TRUE(absl::IsUnavailable(*caller->status())) << *caller->status();
  EXPECT_THAT(caller->positions(), IsEmpty());
}

}  // namespace
}  // namespace tandem::router
