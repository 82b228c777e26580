// SPDX-License-Identifier: Apache-2.0
// The checks that end every integration test are themselves tested: a seeded
// leak, a seeded wrong token and a seeded hang must each be seen.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "common/random.h"
#include "tandem/v1/decode.grpc.pb.h"
#include "tests/integration/cluster.h"
#include "tests/integration/load.h"

namespace tandem::integration {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

TEST(OracleTest, ALeakIsSeen) {
  Cluster cluster({});
  ASSERT_TRUE(cluster.Start().ok());
  // Descriptors that somebody keeps open before the first check.
  std::vector<int> connections;
  for (int i = 0; i < 30; ++i) {
    connections.push_back(Connect(cluster.http_port()));
    ASSERT_GE(connections.back(), 0);
  }
  // A call that somebody forgot: admitted, beating, and never ended.
  const auto state = cluster.State();
  ASSERT_TRUE(state.ok());
  v1::WorkerRef decode;
  for (const v1::WorkerStatus& worker : state->workers()) {
    if (worker.hello().role() == v1::WORKER_ROLE_DECODE) {
      decode = worker.hello().worker();
    }
  }
  const auto channel = grpc::CreateChannel(decode.endpoint(),
                                           grpc::InsecureChannelCredentials());
  const auto stub = v1::DecodeService::NewStub(channel);
  grpc::ClientContext context;
  const auto stream = stub->Decode(&context);
  v1::DecodeRequest request;
  v1::DecodeOpen* const open = request.mutable_open();
  SystemRandom random;
  open->set_request_id(random.Bytes(16));
  open->set_decode_incarnation(decode.incarnation());
  for (int i = 0; i < 20; ++i) open->add_prompt_token_ids(i + 5);
  open->mutable_sampling()->set_top_p(1);
  open->mutable_sampling()->set_logprobs(-1);
  open->mutable_stopping()->set_max_tokens(10);
  open->set_deadline_ms(60000);
  // A prefill worker that will never come: the ticket stays out.
  open->mutable_prefill_worker()->set_worker_id("nobody");
  open->mutable_prefill_worker()->set_incarnation(random.Bytes(16));
  ASSERT_TRUE(stream->Write(request));
  std::atomic<bool> stop = false;
  std::thread beats([&] {
    v1::DecodeRequest beat;
    beat.mutable_beat();
    while (!stop) {
      stream->Write(beat);
      std::this_thread::sleep_for(milliseconds(300));
    }
  });
  std::this_thread::sleep_for(seconds(1));
  const std::string left = cluster.WhatIsLeft();
  EXPECT_NE(left.find("tickets"), std::string::npos) << left;
  EXPECT_NE(left.find("streams"), std::string::npos) << left;
  EXPECT_NE(left.find("router: "), std::string::npos) << left;
  EXPECT_NE(left.find("descriptors"), std::string::npos) << left;
  for (const int connection : connections) close(connection);
  stop = true;
  beats.join();
  context.TryCancel();
  stream->Finish();
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

TEST(OracleTest, AWrongTokenIsSeen) {
  // The same model with one bit of one weight changed.
  const std::string copy = testing::TempDir() + "/tales-with-a-fault";
  std::filesystem::remove_all(copy);
  std::filesystem::copy(EmbeddedModel(), copy);
  {
    std::fstream file(copy + "/model.safetensors",
                      std::ios::in | std::ios::out | std::ios::binary);
    // The sign and exponent of some weights near the end of the file.
    file.seekp(-20001, std::ios::end);
    for (int i = 0; i < 2000; ++i) file.put(static_cast<char>(0x3f + i % 2));
  }
  std::vector<Expectation> expectations;
  {
    Cluster cluster({});
    ASSERT_TRUE(cluster.Start().ok());
    std::vector<v1::GenerateRequest> requests;
    for (const std::string& prompt : SomePrompts(6, 1)) {
      requests.push_back(TextRequest(prompt, 60));
    }
    expectations = RunAlone(&cluster, requests);
  }
  Cluster cluster({.model_dir = copy});
  ASSERT_TRUE(cluster.Start().ok());
  Load load(&cluster, &expectations, 4);
  while (load.completed() < 12) std::this_thread::sleep_for(milliseconds(5));
  load.Finish();
  EXPECT_NE(load.faults().find("tokens differ"), std::string::npos)
      << load.faults();
  std::filesystem::remove_all(copy);
}

TEST(OracleTest, AWrongBitBesideRightTokensIsSeen) {
  Cluster cluster({.router_arguments = {"--enable-attention-output"},
                   .worker_arguments = {"--enable-attention-output"}});
  ASSERT_TRUE(cluster.Start().ok());
  v1::GenerateRequest request = TextRequest("Once upon a time", 8);
  request.mutable_output()->set_logprobs(1);
  request.mutable_output()->set_prompt_logprobs(1);
  request.mutable_output()->mutable_attention();
  const Expectation expected = RunAlone(&cluster, {request})[0];
  const Outcome right = cluster.Generate(request);
  EXPECT_EQ(Compare(expected, right), "");
  const auto nudge = [](float value) { return std::nextafter(value, 1.0f); };
  struct Case {
    const char* says;
    std::function<void(Outcome*)> spoil;
  };
  const Case cases[] = {
      {"sequence 0, log probabilities of token 3: ",
       [&](Outcome* o) {
         auto* const token = o->sequences[0].mutable_logprobs(3);
         token->set_logprob(nudge(token->logprob()));
       }},
      {"sequence 0, log probabilities of token 7: ",
       [&](Outcome* o) {
         auto* const token = o->sequences[0].mutable_logprobs(7);
         token->mutable_top(0)->set_logprob(nudge(token->top(0).logprob()));
       }},
      {"sequence 0, log probabilities of 8 tokens expected, of 7 came",
       [](Outcome* o) { o->sequences[0].mutable_logprobs()->RemoveLast(); }},
      {"prompt's log probabilities of token 1: ",
       [&](Outcome* o) {
         auto* const token = o->prompt_logprobs.mutable_tokens(1);
         token->set_logprob(nudge(token->logprob()));
       }},
      {"sequence 0, attention of token 2: ",
       [&](Outcome* o) {
         auto* const row =
             o->sequences[0].mutable_attention(2)->mutable_layers(5);
         row->set_weights(1, nudge(row->weights(1)));
       }},
      {"sequence 0, end: ",
       [](Outcome* o) {
         o->sequences[0].mutable_finished()->set_finish_reason(
             v1::FINISH_REASON_TIME_LIMIT);
       }},
  };
  for (const Case& c : cases) {
    Outcome wrong = right;
    c.spoil(&wrong);
    const std::string said = Compare(expected, wrong);
    EXPECT_TRUE(said.starts_with(c.says)) << said << ", expected " << c.says;
  }
}

TEST(OracleTest, AHangIsSeen) {
  // Nobody may judge silence, and the only decode worker stands still.
  Cluster cluster({.router_arguments = {"--silence", "300s"}});
  ASSERT_TRUE(cluster.Start().ok());
  std::vector<v1::GenerateRequest> requests;
  for (const std::string& prompt : SomePrompts(4, 1)) {
    requests.push_back(TextRequest(prompt, 100));
  }
  const auto expectations = RunAlone(&cluster, requests);
  Load load(&cluster, &expectations, 4);
  std::this_thread::sleep_for(milliseconds(200));
  cluster.Signal("decode-0", SIGSTOP);
  // All streams may have been at their ends: those that follow stand still.
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_FALSE(load.Finish(seconds(3))) << "the hang was not noticed";
  EXPECT_NE(load.faults().find("CANCELLED"), std::string::npos)
      << "it was waited for: " << load.faults();
  cluster.Signal("decode-0", SIGCONT);
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

TEST(OracleTest, MemoryOfAPeerThatIsGoneIsSeen) {
  Cluster cluster({});
  ASSERT_TRUE(cluster.Start().ok());
  EXPECT_EQ(cluster.FootprintOf("prefill-0").arenas, 1);
  EXPECT_GE(cluster.FootprintOf("decode-0").arenas, 1);
  EXPECT_EQ(cluster.FootprintOf("router").arenas, 0);
  EXPECT_GT(cluster.FootprintOf("router").files, 0);
  // Who stands still gives nothing back.
  cluster.Signal("prefill-0", SIGSTOP);
  cluster.Kill("decode-0");
  EXPECT_NE(cluster.WhatIsLeft().find("prefill-0: 1 arenas, at most 0"),
            std::string::npos);
  cluster.Signal("prefill-0", SIGCONT);
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

TEST(OracleTest, PromptTextInALogIsSeen) {
  Cluster cluster({});
  ASSERT_TRUE(cluster.Start().ok());
  // Text that is in every router log stands for a prompt.
  EXPECT_NE(cluster.WhatIsLeft("\"level\"").find("prompt text"),
            std::string::npos);
}

}  // namespace
}  // namespace tandem::integration
