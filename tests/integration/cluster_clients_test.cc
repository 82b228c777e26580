// SPDX-License-Identifier: Apache-2.0
// Clients that cancel in every phase, and one that reads no further.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/random.h"
#include "tests/integration/cluster_fixture.h"

namespace tandem::integration {
namespace {

using std::chrono::seconds;

TEST_F(ClusterTest, CancellationInEveryPhaseLeavesNothing) {
  Begin({.worker_arguments = {"--max-num-batched-tokens", "16"}});
  std::vector<v1::GenerateRequest> requests;
  for (const std::string& prompt : SomePrompts(24, 5)) {
    requests.push_back(TextRequest(prompt, 200));
    requests.back().mutable_stopping()->set_ignore_eos(true);
  }
  std::atomic<int> cancelled = 0;
  SeededRandom random(9);
  for (int round = 0; round < 8; ++round) {
    std::vector<std::thread> threads;
    for (const v1::GenerateRequest& request : requests) {
      const auto after = std::chrono::microseconds(random.Below(60000));
      const bool by_deadline = random.Below(2) == 0;
      threads.emplace_back([&, after, by_deadline] {
        grpc::ClientContext context;
        if (by_deadline) {
          context.set_deadline(std::chrono::system_clock::now() + after);
        }
        std::thread canceller([&] {
          std::this_thread::sleep_for(after);
          if (!by_deadline) context.TryCancel();
        });
        const Outcome outcome = cluster_->Generate(request, &context);
        canceller.join();
        cancelled += !outcome.status.ok();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_GT(cancelled, 24);
  EXPECT_EQ(cluster_->WhatIsLeft("Story"), "");
}

TEST_F(ClusterTest, CancellationHitsEachPhaseAndLeavesNothing) {
  Begin({.worker_arguments = {"--max-num-batched-tokens", "16",
                              "--handoff-slab-bytes", "4KiB"},
         .prefill_arguments = {"--max-num-seqs", "2"}});
  const std::vector<std::string> prompts = SomePrompts(24, 6);
  std::mutex mutex;
  std::map<std::string, grpc::ClientContext*> open;
  std::atomic<bool> stop = false;
  std::atomic<int> cancelled = 0, wrong = 0;
  std::vector<std::thread> clients;
  (void)cluster_->Client();
  for (size_t c = 0; c < prompts.size(); ++c) {
    clients.emplace_back([&, c] {
      for (int round = 0; !stop; ++round) {
        v1::GenerateRequest request = TextRequest(prompts[c], 60);
        request.set_placement(v1::PLACEMENT_SPLIT);
        request.mutable_cache()->set_bypass_prefix_cache(true);
        const std::string id =
            "cancel-" + std::to_string(c) + "-" + std::to_string(round);
        request.set_request_id(id);
        grpc::ClientContext context;
        {
          std::lock_guard<std::mutex> lock(mutex);
          open[id] = &context;
        }
        const Outcome outcome = cluster_->Generate(request, &context);
        {
          std::lock_guard<std::mutex> lock(mutex);
          open.erase(id);
        }
        cancelled += absl::IsCancelled(outcome.status);
        wrong += !outcome.status.ok() && !absl::IsCancelled(outcome.status);
      }
    });
  }
  std::map<std::string, int> hits;
  const auto end = std::chrono::steady_clock::now() + seconds(30);
  for (const char* phase :
       {"opening", "prefilling", "handing_over", "decoding"}) {
    while (hits[phase] < 10 && std::chrono::steady_clock::now() < end) {
      const auto state = cluster_->State();
      if (!state.ok()) continue;
      for (const v1::RequestStatus& request : state->in_flight()) {
        if (request.phase() != phase) continue;
        std::lock_guard<std::mutex> lock(mutex);
        const auto it = open.find(request.request_id());
        if (it == open.end()) continue;
        it->second->TryCancel();
        ++hits[phase];
        break;
      }
    }
    EXPECT_GE(hits[phase], 10) << phase;
  }
  stop = true;
  for (std::thread& client : clients) client.join();
  EXPECT_GE(cancelled, 20);  // some had ended when the cancellation came
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(cluster_->WhatIsLeft("Story"), "");
}

TEST_F(ClusterTest, AReaderThatStopsHoldsUpNobodyElse) {
  Begin({.router_arguments = {"--stall-limit", "2s"},
         .decode_arguments = {"--stall-limit", "2s"}});
  const auto stub = cluster_->Client();
  v1::GenerateRequest request = TextRequest("Once upon a time", 900);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_output()->set_logprobs(20);  // large messages
  grpc::ChannelArguments arguments;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>>>
      readers;
  for (int i = 0; i < 4; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    readers.push_back(stub->Generate(contexts.back().get(), request));
  }
  // Others are served meanwhile.
  for (int i = 0; i < 8; ++i) {
    EXPECT_TRUE(cluster_->Generate(TextRequest("The dog", 8)).status.ok());
  }
  std::this_thread::sleep_for(seconds(5));
  int exhausted = 0, ok = 0;
  for (size_t i = 0; i < readers.size(); ++i) {
    v1::GenerateResponse response;
    while (readers[i]->Read(&response)) {
    }
    const grpc::Status status = readers[i]->Finish();
    exhausted += status.error_code() == grpc::RESOURCE_EXHAUSTED;
    ok += status.ok();
  }
  // What fits into the connection's buffers may have ended well.
  EXPECT_EQ(exhausted + ok, 4);
}

}  // namespace
}  // namespace tandem::integration
