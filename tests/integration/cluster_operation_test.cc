// SPDX-License-Identifier: Apache-2.0
// What an operator sees of a cluster: metrics, health, drains, memory.

#include <grpcpp/impl/codegen/client_unary_call.h>
#include <grpcpp/support/byte_buffer.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/integration/cluster_fixture.h"
#include "tests/integration/load.h"
#include "tests/sanitized.h"

namespace tandem::integration {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// As grpc.health.v1 has it: 1 is SERVING, 2 is NOT_SERVING; -1: no answer.
int Health(const std::shared_ptr<grpc::Channel>& channel,
           const std::string& service) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + seconds(5));
  const grpc::Slice name(absl::StrCat(
      "\x0a", std::string(1, static_cast<char>(service.size())), service));
  const grpc::ByteBuffer request(&name, 1);
  grpc::ByteBuffer response;
  const grpc::Status status =
      grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(
          channel.get(),
          grpc::internal::RpcMethod("/grpc.health.v1.Health/Check",
                                    grpc::internal::RpcMethod::NORMAL_RPC),
          &context, request, &response);
  grpc::Slice bytes;
  if (!status.ok() || !response.DumpToSingleSlice(&bytes).ok() ||
      bytes.size() != 2) {
    return -1;
  }
  return bytes.begin()[1];
}

// Dashboards and alerts hang on names and labels.
TEST_F(ClusterTest, MetricNamesAndLabelsAreFrozen) {
  Begin({.prefill = 1, .decode = 1});
  for (const v1::Placement way : {v1::PLACEMENT_SPLIT, v1::PLACEMENT_LOCAL}) {
    v1::GenerateRequest request = TextRequest("One day a fox", 4);
    request.set_placement(way);
    ASSERT_TRUE(cluster_->Generate(request).status.ok());
  }
  // A call that ended at each of them: as Kubernetes probes.
  const auto state = cluster_->State();
  ASSERT_TRUE(state.ok()) << state.status();
  for (const v1::WorkerStatus& worker : state->workers()) {
    const std::string& endpoint = worker.hello().worker().endpoint();
    EXPECT_EQ(Health(grpc::CreateChannel(endpoint,
                                         grpc::InsecureChannelCredentials()),
                     ""),
              1);
  }
  std::this_thread::sleep_for(milliseconds(1200));  // gauges follow each second
  std::set<std::string> names;
  for (const char* process : {"router", "prefill-0", "decode-0"}) {
    for (const auto& [series, value] : cluster_->Metrics(process)) {
      const size_t brace = series.find('{');
      const std::string metric = series.substr(0, brace);
      if (metric.rfind("tandem_", 0) != 0 && metric.rfind("process_", 0) != 0 &&
          metric.rfind("grpc_server_", 0) != 0) {
        continue;  // of the response's head
      }
      // A histogram's _bucket stands for its _count and _sum.
      if (metric.ends_with("_count") || metric.ends_with("_sum")) continue;
      std::string name = absl::StrCat(
          std::string(process).substr(0, std::string(process).find('-')), " ",
          metric);
      if (brace != std::string::npos) {
        const std::string labels =
            series.substr(brace + 1, series.size() - brace - 2);
        for (const auto& label : absl::StrSplit(labels, ',')) {
          absl::StrAppend(&name, " ",
                          std::string(label.substr(0, label.find('='))));
        }
      }
      names.insert(name);
    }
  }
  std::ifstream file(TANDEM_SOURCE_DIR "/tests/golden/metrics.txt");
  std::set<std::string> expected;
  for (std::string line; std::getline(file, line);) expected.insert(line);
  std::vector<std::string> missing, unknown;
  std::set_difference(expected.begin(), expected.end(), names.begin(),
                      names.end(), std::back_inserter(missing));
  std::set_difference(names.begin(), names.end(), expected.begin(),
                      expected.end(), std::back_inserter(unknown));
  EXPECT_EQ(absl::StrJoin(missing, "\n"), "");
  EXPECT_EQ(absl::StrJoin(unknown, "\n"), "") << "not in metrics.txt";
}

TEST_F(ClusterTest, ReadyIsWhoCanServeAndAliveWhoRuns) {
  Begin({});
  const auto channel = cluster_->Channel(cluster_->grpc_port());
  // Balancers ask for the service, and who restarts the process for "".
  const auto health_becomes = [&](int want) {
    int said = 0;
    for (int i = 0; i < 200 && said != want; ++i) {
      if (i > 0) std::this_thread::sleep_for(milliseconds(50));
      said = Health(channel, "tandem.v1.InferenceService");
    }
    EXPECT_EQ(said, want);
    EXPECT_EQ(Health(channel, ""), 1);
  };
  health_becomes(1);
  // Readiness is told once a second.
  const auto becomes = [&](const std::string& name, const std::string& want) {
    std::string said;
    for (int i = 0; i < 200 && said != want; ++i) {
      if (i > 0) std::this_thread::sleep_for(milliseconds(50));
      said = cluster_->Probe(name, "/readyz");
    }
    EXPECT_EQ(said, want) << name;
    EXPECT_EQ(cluster_->Probe(name, "/livez"), "200 ok\n") << name;
  };
  for (const char* name : {"router", "prefill-0", "decode-0"}) {
    becomes(name, "200 ok\n");
  }
  cluster_->Kill("decode-0");
  becomes("router", "503 no decode worker is ready\n");
  health_becomes(2);
  becomes("prefill-0", "200 ok\n");
  ASSERT_TRUE(cluster_->Restart("decode-0").ok());
  becomes("router", "200 ok\n");
  health_becomes(1);
  cluster_->Kill("router");
  becomes("decode-0", "503 no router knows it\n");
  ASSERT_TRUE(cluster_->Restart("router").ok());
  ASSERT_TRUE(cluster_->WaitUntilReady(1, 1, seconds(30)).ok());
  becomes("decode-0", "200 ok\n");
}

TEST_F(ClusterTest, DrainingAWorkerUnderLoadFailsNobody) {
  Begin({.prefill = 2, .decode = 2});
  std::vector<v1::GenerateRequest> requests;
  for (const std::string& prompt : SomePrompts(16, 21)) {
    requests.push_back(TextRequest(prompt, 60));
  }
  const auto expectations = RunAlone(cluster_.get(), requests);
  Load load(cluster_.get(), &expectations, 16);
  for (const char* name : {"prefill-0", "decode-0"}) {
    std::this_thread::sleep_for(milliseconds(300));
    cluster_->Signal(name, SIGTERM);
    const std::optional<int> code = cluster_->WaitForExit(name, seconds(40));
    ASSERT_TRUE(code.has_value()) << name << " does not end";
    EXPECT_EQ(*code, 128 + SIGTERM) << cluster_->Log(name);
    ASSERT_TRUE(cluster_->Restart(name).ok());
    ASSERT_TRUE(cluster_->WaitUntilReady(2, 2, seconds(30)).ok());
  }
  EXPECT_TRUE(load.Finish());
  EXPECT_EQ(load.faults(), "");
  EXPECT_GT(load.completed(), 16);
  cluster_->Signal("router", SIGTERM);
  EXPECT_EQ(cluster_->WaitForExit("router", seconds(40)), 128 + SIGTERM);
  ASSERT_TRUE(cluster_->Restart("router").ok());
  ASSERT_TRUE(cluster_->WaitUntilReady(2, 2, seconds(30)).ok());
}

// Pages that a process touched for the first time since they were cleared.
int64_t PageFaults(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  const std::string stat(std::istreambuf_iterator<char>(file), {});
  // Behind the name, which may hold anything.
  const std::vector<std::string> fields =
      absl::StrSplit(stat.substr(stat.rfind(')') + 2), ' ');
  int64_t faults = 0;
  EXPECT_TRUE(absl::SimpleAtoi(fields.at(7), &faults)) << stat;
  return faults;
}

// A message's buffer that went back to the system is cleared, page by page, for
// the next one.
TEST_F(ClusterTest, BuffersOfHandoffsByGrpcStayWithTheirWorkers) {
  if (kSanitized) GTEST_SKIP() << "its allocator is another one";
  Begin({.worker_arguments = {"--handoff", "grpc", "--kv-cache-dtype", "f32",
                              "--max-num-batched-tokens", "1024"}});
  v1::GenerateRequest request;
  for (uint32_t i = 0; i < 1000; ++i) {
    request.mutable_token_ids()->add_ids(100 + i % 700);
  }
  request.mutable_stopping()->set_max_tokens(2);
  request.mutable_cache()->set_bypass_prefix_cache(true);
  request.set_placement(v1::PLACEMENT_SPLIT);
  const std::string workers[] = {"prefill-0", "decode-0"};
  std::map<std::string, int64_t> before;
  int64_t bytes = 0;
  constexpr int kWarm = 10, kCounted = 20;
  for (int i = 0; i < kWarm + kCounted; ++i) {
    if (i == kWarm) {
      for (const std::string& worker : workers) {
        before[worker] = PageFaults(cluster_->pid(worker));
      }
      bytes = 0;
    }
    const Outcome outcome = cluster_->Generate(request);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    ASSERT_EQ(outcome.done.workers().prefill(), "prefill-0");
    bytes += outcome.done.timings().kv_bytes();
  }
  for (const std::string& worker : workers) {
    const int64_t faults = PageFaults(cluster_->pid(worker)) - before[worker];
    // As many as pages, or more, where they go back.
    EXPECT_LT(faults, bytes / 4096 / 4) << worker;
  }
}

}  // namespace
}  // namespace tandem::integration
