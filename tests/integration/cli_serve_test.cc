// SPDX-License-Identifier: Apache-2.0
// `tandem serve`, and what the other commands do on the cluster that it serves.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/cluster.h"
#include "tests/integration/serve_process.h"
#include "tests/integration/shell.h"

namespace tandem::integration {
namespace {

using nlohmann::json;
using testing::HasSubstr;

TEST(CliTest, ServesGeneratesAndShowsStatus) {
  // Of the numbers of workers one is given, and the other the file's.
  const std::string config =
      absl::StrCat(testing::TempDir(), "/tandem-serve-", getpid(), ".yaml");
  std::ofstream(config) << "prefill: 2\ndecode: 1\nmax-num-seqs: 7\n"
                           "served-model-name: of-a-file\n";
  setenv("TANDEM_CONFIG", config.c_str(), 1);
  // Durations that routers and workers must be told as they were meant.
  ServeProcess served(
      EmbeddedModel(),
      "--decode 2 --default-deadline 300h --shutdown-timeout inf");
  unsetenv("TANDEM_CONFIG");
  const bool ready = served.WaitUntilReady();
  std::remove(config.c_str());
  ASSERT_TRUE(ready) << served.Log();
  // Room for twice 7 sequences of the model's 1024 positions.
  EXPECT_NE(served.Log().find("\"kv_tokens\":14336"), std::string::npos)
      << served.Log();
  const Result text = Shell(Tandem(
      "generate " + served.Router() +
      " --temperature 0 --max-tokens 20 'Once upon a time' 2>/dev/null"));
  EXPECT_EQ(text.code, 0);
  EXPECT_GT(text.output.size(), 10u);

  const Result ruled = Shell(Tandem(
      "generate " + served.Router() +
      " --json --temperature 1 --seed 3 --max-tokens 8 --ignore-eos"
      " --repetition-penalty 1.1 --presence-penalty 0.1"
      " --frequency-penalty 0.1 --typical-p 0.9 --allowed-token-ids 40,41,42"
      " --banned-token-ids 41 --logit-bias 40=1,42-1.5 --bad-words was"
      " 'Once upon a time' 2>/dev/null"));
  ASSERT_EQ(ruled.code, 0);
  const json drawn = json::parse(ruled.output);
  for (const int id : drawn["token_ids"]) {
    EXPECT_TRUE(id == 40 || id == 42) << id;
  }
  EXPECT_EQ(Shell(Tandem("generate " + served.Router() +
                         " --logit-bias x x 2>/dev/null"))
                .code,
            2);

  // What was drawn without a seed can be had again by the one it was drawn
  // with.
  const auto sampled = [&](const std::string& more) {
    const Result result =
        Shell(Tandem("generate " + served.Router() +
                     " --json --temperature 1.5 --max-tokens 16 --ignore-eos " +
                     more + " Once 2>/dev/null"));
    EXPECT_EQ(result.code, 0);
    return json::parse(result.output);
  };
  const json once = sampled("");
  const json again = sampled("--seed " + once["seed"].dump());
  EXPECT_EQ(again["seed"], once["seed"]);
  EXPECT_EQ(again["token_ids"], once["token_ids"]);
  EXPECT_EQ(again["system_fingerprint"], once["system_fingerprint"]);
  EXPECT_THAT(again["system_fingerprint"].get<std::string>(),
              testing::MatchesRegex("fp_[0-9a-f]{16}"));

  const Result two =
      Shell(Tandem("generate " + served.Router() +
                   " --json --seed 3 --max-tokens 8 --n 2 --best-of 3 'The cat'"
                   " 2>/dev/null"));
  ASSERT_EQ(two.code, 0);
  EXPECT_EQ(json::parse(two.output)["sequences"].size(), 2u);

  const Result beams = Shell(
      Tandem("generate " + served.Router() +
             " --json --max-tokens 8 --n 2 --beam-width 4 --length-penalty 0.5"
             " --early-stopping never --logprobs 0 'The cat' 2>/dev/null"));
  ASSERT_EQ(beams.code, 0);
  const json hypotheses = json::parse(beams.output)["sequences"];
  ASSERT_EQ(hypotheses.size(), 2u);
  EXPECT_NE(hypotheses[0]["token_ids"], hypotheses[1]["token_ids"]);
  EXPECT_EQ(hypotheses[0]["logprobs"].size(),
            hypotheses[0]["token_ids"].size());

  const Result piped =
      Shell("printf 'Once upon a time' | " +
            Tandem("generate " + served.Router() +
                   " --temperature 0 --max-tokens 20 --json --logprobs 1"));
  ASSERT_EQ(piped.code, 0);
  const json answer = json::parse(piped.output);
  EXPECT_EQ(answer["text"].get<std::string>() + "\n", text.output);
  for (const char* key : {"token_ids", "prompt_token_ids", "finish_reason",
                          "usage", "timings", "workers", "logprobs"}) {
    EXPECT_TRUE(answer.contains(key)) << key;
  }
  EXPECT_EQ(answer["usage"]["completion_tokens"].get<size_t>(),
            answer["token_ids"].size());

  const Result status = Shell(Tandem("status --json " + served.Admin()));
  ASSERT_EQ(status.code, 0) << status.output;
  EXPECT_EQ(json::parse(status.output)["workers"].size(), 4u);
  EXPECT_EQ(json::parse(status.output)["model"], "of-a-file");
  EXPECT_NE(Shell(Tandem("status " + served.Admin())).output.find("decode-1"),
            std::string::npos);

  const auto shows_cordoned = [&] {
    const std::string table = Shell(Tandem("status " + served.Admin())).output;
    return table.find("  decode-1         decode   cordoned ") !=
           std::string::npos;
  };
  EXPECT_FALSE(shows_cordoned());
  EXPECT_EQ(Shell(Tandem("cordon decode-1 " + served.Admin())).output,
            "decode-1 cordoned, 0 requests on it\n");
  EXPECT_TRUE(shows_cordoned());
  EXPECT_EQ(Shell(Tandem("uncordon decode-1 " + served.Admin())).code, 0);
  EXPECT_FALSE(shows_cordoned());
  const Result nobody =
      Shell(Tandem("cordon decode-9 " + served.Admin() + " 2>&1"));
  EXPECT_EQ(nobody.code, 1);
  EXPECT_NE(nobody.output.find("decode-9"), std::string::npos);

  const Result chat =
      Shell(Tandem("generate --chat --timings " + served.Router() +
                   " --temperature 0 --max-tokens 30 'Hello' 2>&1"));
  EXPECT_EQ(chat.code, 0);
  EXPECT_NE(chat.output.find("TTFT"), std::string::npos) << chat.output;

  // The cluster's ports, each asked for what another one does.
  const size_t colon = served.Router().rfind(' ');
  const std::string router = served.Router().substr(colon + 1);
  const std::string admin = served.Admin().substr(colon);
  for (const std::string& command :
       {"status --admin " + router, "cordon decode-0 --admin " + router,
        "lora list --admin " + router, "generate --router " + admin + " hi",
        "bench --router " + admin, "doctor --admin " + router,
        "chat --router " + admin + " <<<hi"}) {
    const Result result =
        Shell("bash -c '" + Tandem(command) + "' 2>&1 | grep ' is another'");
    EXPECT_THAT(result.output,
                HasSubstr(" is another port of a cluster: --router is"))
        << command;
  }
  EXPECT_THAT(
      Shell(Tandem("generate --router " + served.Http() + " hi 2>&1")).output,
      HasSubstr(" speaks HTTP and no gRPC: --router is"));
  EXPECT_THAT(
      Shell("timeout -s INT 5 " + Cluster::BinaryPath("tandem-decode ") +
            EmbeddedModel() + " --port 0 --router " + router + " 2>&1")
          .output,
      HasSubstr("--router is the router's internal port"));

  EXPECT_EQ(Shell("timeout --preserve-status -s INT 0.3 " +
                  Tandem("generate " + served.Router() +
                         " --n 32 --ignore-eos --max-tokens 900 'Once'"))
                .code,
            130);

  EXPECT_EQ(served.Stop(SIGINT), 130) << served.Log();
}

TEST(CliTest, AStopIsNobodysLoss) {
  ServeProcess served(EmbeddedModel(), "");
  ASSERT_TRUE(served.WaitUntilReady()) << served.Log();
  EXPECT_EQ(served.Stop(SIGTERM), 143);
  const std::string log = served.Log();
  EXPECT_EQ(log.find("\"warning\""), std::string::npos) << log;
  EXPECT_THAT(log, HasSubstr("router left"));
}

// Children inherit the environment, over which the command line goes.
TEST(CliTest, WhatServeIsToldToLeaveOutIsLeftOutByItsChildren) {
  const std::vector<std::pair<const char*, const char*>> environment = {
      {"TANDEM_ENABLE_NO_KV_CACHE", "true"},
      {"TANDEM_ENABLE_ATTENTION_OUTPUT", "true"},
      {"TANDEM_ENABLE_PREFIX_CACHING", "false"}};
  for (const auto& [name, value] : environment) setenv(name, value, 1);
  ServeProcess served(EmbeddedModel(),
                      "--prefill 0 --no-enable-no-kv-cache"
                      " --no-enable-attention-output --enable-prefix-caching");
  for (const auto& [name, value] : environment) unsetenv(name);
  ASSERT_TRUE(served.WaitUntilReady()) << served.Log();
  const auto generate = [&](const std::string& flags) {
    return Shell(Tandem("generate " + served.Router() +
                        " --json --temperature 0 --max-tokens 8 " + flags +
                        " 'Once upon a time there was a fox who ran and ran,"
                        " and ran, and ran' 2>/dev/null"));
  };
  EXPECT_EQ(generate("--no-kv-cache").code, 2);
  EXPECT_EQ(generate("--attention all").code, 2);
  int cached[2];
  for (int& tokens : cached) {
    const Result result = generate("");
    ASSERT_EQ(result.code, 0);
    tokens = json::parse(result.output)["usage"]["cached_tokens"];
  }
  EXPECT_EQ(cached[0], 0);
  EXPECT_EQ(cached[1], 16);
}

TEST(CliTest, WhatServeSaysToTryWorksUnderMutualTls) {
  const std::string certificates =
      absl::StrCat(testing::TempDir(), "/certificates-", getpid());
  const Result made = Shell(absl::StrCat(
      TANDEM_SOURCE_DIR "/scripts/dev-ca.sh ", certificates, " serve"));
  ASSERT_EQ(made.code, 0) << made.output;
  const Result half =
      Shell(Cluster::BinaryPath(
                "tandem-decode /no/such/model --router 127.0.0.1:1 ") +
            "--tls-ca " + certificates + "/ca.pem 2>&1");
  EXPECT_EQ(half.code, 2);
  EXPECT_THAT(half.output, HasSubstr("--tls-ca alone"));
  ServeProcess served(
      EmbeddedModel(),
      absl::StrCat("--tls-cert ", certificates, "/serve.pem --tls-key ",
                   certificates, "/serve.key --tls-ca ", certificates,
                   "/ca.pem"));
  ASSERT_TRUE(served.WaitUntilReady()) << served.Log();
  int tried = 0;
  std::istringstream lines(served.Log());
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.find("            tandem ");
    if (at != 0) continue;
    const Result result = Shell(
        Tandem(line.substr(std::strlen("            tandem "))) + " 2>&1");
    EXPECT_EQ(result.code, 0) << line << "\n" << result.output;
    ++tried;
  }
  EXPECT_EQ(tried, 2) << served.Log();
  for (const std::string& command :
       {"generate " + served.Router() + " hi", "bench " + served.Router(),
        "status " + served.Admin()}) {
    const Result plain = Shell(Tandem(command) + " 2>&1");
    EXPECT_EQ(plain.code, 1) << command;
    EXPECT_THAT(plain.output,
                HasSubstr("; if this cluster has TLS, give --tls-cert, "
                          "--tls-key and --tls-ca, or https:// before the "
                          "address alone where its certificate is a public "
                          "one\n"))
        << command;
  }
  EXPECT_EQ(served.Stop(SIGTERM), 143);
  std::filesystem::remove_all(certificates);
}

// Of another server: it is not the business of the one that a chat starts.
TEST(CliTest, AChatsOwnServerHeedsNoVariablesOfOthers) {
  const Result result = Shell(
      "echo hi | TANDEM_HOST=127.0.0.2 TANDEM_API_KEYS_FILE=/no/such/file"
      " TANDEM_SSL_CERTFILE=/no/such/file TANDEM_TLS_CA=/no/such/file"
      " TANDEM_ROUTER=127.0.0.1:1 TANDEM_REVISION=main " +
      Tandem("chat " + EmbeddedModel() + " --max-tokens 4 2>&1"));
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST(CliTest, GoldensComeOutOfGenerateJson) {
  const char* const data = std::getenv("TANDEM_TEST_DATA");
  if (data == nullptr) GTEST_SKIP() << "TANDEM_TEST_DATA is not set";
  const std::string model = std::string(data) + "/models/stories260K";
  // Guesses are the decode workers' alone, and change no token.
  ServeProcess served(
      model,
      "--prefill 2 --decode 2 --speculative-config "
      "'{\"method\": \"ngram\", \"num_speculative_tokens\": 4}'");
  ASSERT_TRUE(served.WaitUntilReady()) << served.Log();
  const Result chat =
      Shell(Tandem("generate --chat " + served.Router() + " hi 2>&1"));
  EXPECT_EQ(chat.code, 1);
  EXPECT_EQ(chat.output,
            "tandem generate: error: this model has no chat template: ask "
            "`tandem generate` without --chat, or serve the model with "
            "--chat-template FILE\n");
  std::ifstream file(model + "/golden.json");
  const json golden = json::parse(file);
  for (const json& c : golden["cases"]) {
    std::ofstream(testing::TempDir() + "/prompt")
        << c["prompt"].get<std::string>();
    const Result result =
        Shell(Tandem(absl::StrCat("generate ", served.Router(),
                                  " --json --temperature 0 --ignore-eos "
                                  "--max-tokens ",
                                  c["greedy_ids"].size(), " --logprobs 0")) +
              " <" + testing::TempDir() + "/prompt");
    ASSERT_EQ(result.code, 0) << result.output;
    const json answer = json::parse(result.output);
    EXPECT_EQ(answer["token_ids"], c["greedy_ids"]) << c["prompt"];
    EXPECT_EQ(answer["prompt_token_ids"], c["prompt_ids"]) << c["prompt"];
  }
  EXPECT_EQ(served.Stop(SIGTERM), 143);
}

}  // namespace
}  // namespace tandem::integration
