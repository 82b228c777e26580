// SPDX-License-Identifier: Apache-2.0
// Row "rotation": the certificates of every process and of the public ports,
// and the authority behind them, replaced again and again under load.

#include <signal.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/rpc/channel.h"
#include "tests/figures/figures.h"
#include "tests/integration/tls_files.h"

namespace tandem::figures {
namespace {

using integration::ClusterTlsFiles;
using std::chrono::seconds;

// Whose certificates are in use; the next one comes of a step. Clients trust
// all of them from the start, servers those that a step names.
class Authorities {
 public:
  explicit Authorities(int count) {
    for (int i = 0; i < count; ++i) {
      all_.push_back(
          std::make_unique<Authority>(absl::StrFormat("authority %d", i)));
      absl::StrAppend(&bundle_, all_.back()->cert());
    }
  }
  const Authority& operator[](int i) const {
    return *all_[static_cast<size_t>(i)];
  }
  const std::string& bundle() const { return bundle_; }

 private:
  std::vector<std::unique_ptr<Authority>> all_;
  std::string bundle_;
};

class RotationRow : public Row {
 protected:
  // Calls on connections of their own, with fresh certificates where some are
  // asked for, until told to stop.
  void CallAnew(const std::function<bool()>& call) {
    clients_.emplace_back([this, call] {
      while (!stop_) {
        ++(call() ? served_ : failed_);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    });
  }
  bool ListsOverGrpc() const {
    rpc::Credentials tls;
    tls.ca = authorities_.bundle();
    grpc::ClientContext context;
    Cluster::SetDeadline(&context);
    v1::ListModelsResponse models;
    return v1::InferenceService::NewStub(Dial(cluster_->grpc_port(), tls))
        ->ListModels(&context, {}, &models)
        .ok();
  }
  bool ListsOverHttp() const {
    TlsSocket socket(cluster_->http_port(), {.ca = authorities_.bundle()});
    socket.Send("GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n");
    return socket.Receive().find("HTTP/1.1 200") == 0;
  }
  bool TellsAnOperator() const {
    const Pem own =
        authorities_[trusted_].Issue(3, {"spiffe://tandem/operator"});
    grpc::ClientContext context;
    Cluster::SetDeadline(&context);
    v1::GetClusterStateResponse state;
    return v1::AdminService::NewStub(
               Dial(cluster_->admin_port(),
                    integration::CredentialsOf(own, authorities_.bundle())))
        ->GetClusterState(&context, {}, &state)
        .ok();
  }
  static std::shared_ptr<grpc::Channel> Dial(int port,
                                             const rpc::Credentials& tls) {
    return rpc::MakeChannel(absl::StrCat("localhost:", port), tls);
  }

  // By `authority`, for every process and the public ports.
  bool Renew(int authority) {
    ++serial_;
    files_.Renew(authorities_[authority], serial_);
    files_.Put("public", authorities_[authority].Issue(serial_));
    return integration::Until([this] {
      std::vector<int> ports = {cluster_->grpc_port(),
                                cluster_->internal_port(),
                                cluster_->admin_port()};
      for (const char* const name :
           {"prefill-0", "prefill-1", "decode-0", "decode-1"}) {
        ports.push_back(cluster_->worker_port(name));
      }
      return integration::AllShow(ports, serial_) &&
             integration::AllShow({cluster_->http_port()}, serial_, "");
    });
  }
  // Of four steps the authority changes: certificates, the next one is trusted
  // too, certificates by that, the former is trusted no more.
  bool Step(int step) {
    const int now = step / 4;
    switch (step % 4) {
      case 0:
        return Renew(now);
      case 1:
        if (!files_.Trust(*cluster_, authorities_[now].cert() +
                                         authorities_[now + 1].cert())) {
          return false;
        }
        trusted_ = now + 1;
        return true;
      case 2:
        return Renew(now + 1);
      default:
        return files_.Trust(*cluster_, authorities_[now + 1].cert());
    }
  }

  const Authorities authorities_{4};
  const ClusterTlsFiles files_{"rotation",
                               authorities_[0],
                               {"prefill/prefill-0", "prefill/prefill-1",
                                "decode/decode-0", "decode/decode-1"}};
  std::vector<std::thread> clients_;
  std::atomic<bool> stop_ = false;
  std::atomic<int> served_ = 0, failed_ = 0;
  std::atomic<int> trusted_ = 0;
  int serial_ = 10;
};

TEST_F(RotationRow, Holds) {
  const int streams = Sized(64, 16), steps = Sized(12, 10);
  const seconds every(Sized(10, 1));
  files_.Put("public", authorities_[0].Issue(2));
  Begin({.prefill = 2,
         .decode = 2,
         .router_arguments = {"--ssl-certfile", files_.Path("public.pem"),
                              "--ssl-keyfile", files_.Path("public.key")},
         .worker_arguments = {"--max-num-batched-tokens", "64"},
         .tls_directory = files_.directory()},
        Requests(48, seed_, 5, 65, 40));
  if (HasFatalFailure()) return;
  Load load(cluster_.get(), &expectations_, streams);
  CallAnew([this] { return ListsOverGrpc(); });
  CallAnew([this] { return ListsOverHttp(); });
  CallAnew([this] { return TellsAnOperator(); });
  std::string trouble;
  double slowest = 0;
  TimePoint next = Clock::now();
  for (int step = 0; step < steps && trouble.empty(); ++step) {
    std::this_thread::sleep_until(next);
    const TimePoint begun = Clock::now();
    if (!Step(step)) trouble = absl::StrFormat("step %d was not taken", step);
    slowest = std::max(slowest, Served::Seconds(Clock::now() - begun));
    next = std::max(begun + every, Clock::now());
  }
  std::this_thread::sleep_until(next);
  stop_ = true;
  for (std::thread& client : clients_) client.join();
  load.Finish();
  // One that has seen none of it finds the others, and they it.
  cluster_->Signal("decode-0", SIGTERM);
  if (!cluster_->WaitForExit("decode-0", seconds(60))) trouble = "stays";
  ASSERT_TRUE(cluster_->Restart("decode-0").ok());
  const absl::Status ready = cluster_->WaitUntilReady(2, 2, seconds(60));
  if (!ready.ok()) trouble = ready.ToString();
  for (size_t i = 0; i < 4 && trouble.empty(); ++i) {
    const Expectation& expected = expectations_[i];
    trouble =
        integration::Compare(expected, cluster_->Generate(expected.request));
  }
  Tell(absl::StrFormat("certificates of all processes and ports, and their "
                       "authority, replaced every %d s, %d times, %d streams: "
                       "no call fails",
                       every.count(), steps, streams),
       absl::StrFormat("%s; %d calls on new connections, %d failed; taken "
                       "within %.1f s%s%s",
                       Counts(load), served_ + failed_, failed_, slowest,
                       trouble.empty() ? "" : "; ", trouble),
       Clean(load) && failed_ == 0 && served_ > 0 && trouble.empty());
  EXPECT_EQ(load.faults(), "");
  TellWhatIsLeft();
}

}  // namespace
}  // namespace tandem::figures
