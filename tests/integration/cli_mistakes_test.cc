// SPDX-License-Identifier: Apache-2.0
// Exit codes and messages for what a user has wrong on the command line or on
// the machine.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/integration/cluster.h"
#include "tests/integration/shell.h"

namespace tandem::integration {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(CliTest, ExitCodesAndMessagesSayWhatIsWrong) {
  struct Case {
    const char* arguments;
    int code;
    const char* says;
  };
  const Case cases[] = {
      {"--help", 0, "serve"},
      {"generate --help", 0, "--temperature"},
      {"serve x --threads 257", 2, "'257' is not a whole number from 0 to 256"},
      {"generate --temprature 0 hi", 2, "--temperature"},
      {"nonsense", 2, "nonsense"},
      {"serve /no/such/model", 1, "'/no/such/model': no such directory"},
      {"serve /no/such/config.json", 1, "config.json': no such file"},
      {"serve /dev", 1, "'/dev' is no model directory: it holds no config"},
      {"serve /dev/null", 1, "'/dev/null' is a file: give the model's"},
      {"generate --router 127.0.0.1:1 --timeout 2 hi", 1,
       "no router answers at 127.0.0.1:1 (`tandem serve MODEL` starts one"},
      {"generate --length-penalty 2 hi", 2, "--beam-width"},
      {"generate --early-stopping maybe --beam-width 2 hi", 2,
       "--early-stopping"},
      {"generate --temperature 9 hi", 2, "temperature"},
      {"explain --no-machine", 0, "131072 B"},
      {"plan x --memory 8GiB --device h100", 2, "--memory and --device h100"},
      // Workers would refuse it.
      {"plan x --device l40s", 2, "--device: 'l40s' is none of cpu, a100-40gb"},
      {"plan x --gpu-memory-utilization 0.5", 2,
       "--gpu-memory-utilization is of a GPU's memory, and this plan is for"},
      {"plan x --device cpu --memory 8GiB --gpu-memory-utilization 0.5", 2,
       "--gpu-memory-utilization is of a GPU's memory"},
      {"plan /no/such/model", 1,
       "MODEL (--model) '/no/such/model': no such directory"},
      {"plan --model no-such/ --json", 1,
       "MODEL (--model) 'no-such/': no such directory"},
      {"explain /no/such/model", 1, "no such directory"},
      {"explain --measure", 2, "--measure needs a directory"},
      {"status --watch --json", 2, "--watch and --json"},
      {"status --admin 127.0.0.1:1", 1, "no router answers at 127.0.0.1:1"},
      {"lora list --admin 127.0.0.1:1", 1, "no router answers at 127.0.0.1:1"},
      {"cordon w --admin 127.0.0.1:1", 1, "no router answers at 127.0.0.1:1"},
      {"generate --router 127.0.0.1:87587 hi", 2,
       "--router: '127.0.0.1:87587' is not an address such as"},
      {"generate --router https://127.0.0.1 --timeout 2 hi", 1,
       "no router answers at https://127.0.0.1"},
      {"generate --router https://127.0.0.1:99999 hi", 2,
       "--router: '127.0.0.1:99999' is not an address"},
      {"generate --router '' hi", 2, "--router: '' is not an address"},
      {"generate --router http://127.0.0.1:1 --tls-ca x hi", 2,
       "--router: http://127.0.0.1:1: http:// is plain text"},
      {"chat --router ftp://127.0.0.1:1 </dev/null", 2,
       "--router: 'ftp://127.0.0.1:1' is not an address"},
      {"bench --router garbage", 2, "--router: 'garbage' is not an address"},
      {"status --admin 127.0.0.1:65536", 2, "--admin: '127.0.0.1:65536'"},
      {"lora list --admin garbage", 2, "--admin: 'garbage' is not an address"},
      {"cordon w --admin :50053", 2, "--admin: ':50053' is not an address"},
      {"doctor --admin garbage", 2, "--admin: 'garbage' is not an address"},
      {"explain --revision main", 2, "--revision"},
      {"keys list", 2, "--api-keys-file is needed"},
      {"chat x --router 127.0.0.1:1", 2, "--router"},
      {"completion tcsh", 2, "tcsh"},
      {"flight /no/such/file", 1, "cannot read /no/such/file: No such file"},
      {"flight /dev/null", 1, "no flight record"},
      {"replay /no/such/file", 1, "cannot read /no/such/file: No such file"},
      {"replay /dev/null", 1, "no recorded session"},
      {"bench --save-detailed", 2, "--json"},
      {"explain --output-tokens 0", 2, "--output-tokens"},
  };
  for (const Case& c : cases) {
    const Result result = Shell(Tandem(c.arguments) + std::string(" 2>&1"));
    EXPECT_EQ(result.code, c.code) << c.arguments << ": " << result.output;
    EXPECT_NE(result.output.find(c.says), std::string::npos)
        << c.arguments << ": " << result.output;
  }
  EXPECT_THAT(Shell(Cluster::BinaryPath("tandem-router --help")).output,
              Not(HasSubstr("more are refused")));
  // What the command line has wrong is so in every program.
  for (const std::string& command :
       {"tandem plan " + EmbeddedModel() + " --block-size 10",
        std::string("tandem keys new 'a b' --api-keys-file /no/such/file"),
        "tandem-decode --router 127.0.0.1:1 --block-size 10 " + EmbeddedModel(),
        "tandem-decode --router 127.0.0.1:1 --device gpu " + EmbeddedModel(),
        "tandem-decode --router 127.0.0.1:1 --kv-offload-path x " +
            EmbeddedModel(),
        "tandem-decode --router 127.0.0.1:1 --speculative-config '{}' " +
            EmbeddedModel(),
        "tandem-decode --router 127.0.0.1:1 --max-model-len 1000000 " +
            EmbeddedModel(),
        "tandem-decode --router 127.0.0.1:1 --device cpu --kv-cache-dtype "
        "f16 " +
            EmbeddedModel(),
        "tandem-prefill --router 127.0.0.1:1 --max-loras 1 --lora-modules a=/x "
        "--lora-modules b=/y " +
            EmbeddedModel(),
        "tandem-router --api-key a --api-keys-file /x " + EmbeddedModel(),
        "tandem-router --host 300.1.1.1 " + EmbeddedModel(),
        "tandem-router --otlp-traces-endpoint x " + EmbeddedModel(),
        "tandem serve --max-model-len 1000000 " + EmbeddedModel(),
        "tandem plan --max-model-len 1000000 " + EmbeddedModel(),
        "tandem plan --dtype f16 " + EmbeddedModel(),
        "tandem-router --ssl-certfile x " + EmbeddedModel()}) {
    const Result result = Shell(Cluster::BinaryPath(command) + " 2>&1");
    EXPECT_EQ(result.code, 2) << command << ": " << result.output;
  }
  // All name the flag before they read weights.
  for (const auto& [flags, says] :
       {std::pair("--device cpu --dtype f16",
                  "--dtype is f16, expected auto, f32 or bf16 on a CPU"),
        std::pair("--lora-modules a=", "--lora-modules is 'a=', expected"),
        std::pair("--lora-modules =/x", "--lora-modules: adapter ''"),
        std::pair("--lora-modules 'a b=/x'", "--lora-modules: adapter 'a b'"),
        std::pair("--lora-modules a=/x,a=/y", "--lora-modules names 'a' twice"),
        std::pair("--kv-offload-bytes 1MiB --kv-offload-file-bytes 1MiB "
                  "--kv-offload-path /no/such",
                  "--kv-offload-path is '/no/such', which is no directory"),
        std::pair("--kv-offload-bytes 1MiB --kv-offload-file-bytes 1MiB "
                  "--kv-offload-path /dev/null",
                  "--kv-offload-path is '/dev/null', which is no directory")}) {
    const Result result = Shell(absl::StrCat(
        Cluster::BinaryPath("tandem-decode"), " --router 127.0.0.1:1 ", flags,
        " ", EmbeddedModel(), " 2>&1"));
    EXPECT_EQ(result.code, 2) << flags << ": " << result.output;
    EXPECT_THAT(result.output, HasSubstr(says)) << flags;
  }
  const Result twice =
      Shell("echo hi | " + Tandem("chat --router 127.0.0.1:1 2>&1"));
  EXPECT_EQ(twice.output.find("no router answers"),
            twice.output.rfind("no router answers"))
      << twice.output;
  EXPECT_EQ(Shell("echo hi | " + Tandem("chat --n 2 2>&1")).code, 2);
  // Text that protobuf would not send, of the command line and of a file.
  for (const char* const command :
       {"generate --stop $(printf 'caf\\351') hi",
        "generate --request-id $(printf 'caf\\351') hi",
        "generate --chat --system $(printf 'caf\\351') hi",
        "generate $(printf 'caf\\351')", "cordon $(printf 'caf\\351')",
        "lora unload $(printf 'caf\\351')"}) {
    const Result result = Shell(Tandem(command) + std::string(" 2>&1"));
    EXPECT_NE(result.code, 0) << command;
    EXPECT_THAT(result.output, testing::MatchesRegex(
                                   "tandem [a-z]+: error: "
                                   "(--[a-z-]+|NAME|WORKER|the prompt) is not "
                                   "UTF-8 text\n"))
        << command;
  }
  // Defaults of the environment that a command does not use are no mistakes.
  for (const char* const command :
       {"TANDEM_REVISION=main tandem explain --no-machine",
        "TANDEM_GPU_MEMORY_UTILIZATION=0.5 tandem plan /no/such",
        "TANDEM_JSON=1 timeout -s INT 1 tandem status --watch"
        " --admin 127.0.0.1:1",
        "TANDEM_DEVICE=cpu TANDEM_REVISION=v1 tandem chat --router 127.0.0.1:1"
        " </dev/null",
        "TANDEM_SYSTEM=Hi tandem generate --router 127.0.0.1:1 hi"}) {
    const Result result = Shell(absl::StrCat("PATH=", Cluster::BinaryPath("."),
                                             ":$PATH; ", command, " 2>&1"));
    EXPECT_NE(result.code, 2) << command << ": " << result.output;
  }
  // The variable is generate's, in seconds.
  EXPECT_EQ(
      Shell("TANDEM_TIMEOUT=9 " + Tandem("lora list --admin 127.0.0.1:1 2>&1"))
          .code,
      1);
  for (const char* const router : {"", " --router x"}) {
    const Result worker = Shell(Cluster::BinaryPath("tandem-decode") +
                                " /no/such/model" + router + " 2>&1");
    EXPECT_EQ(worker.code, 2) << worker.output;
    EXPECT_THAT(worker.output, HasSubstr("tandem-decode: error: --router"));
  }
}

TEST(CliTest, FlagsThatCannotBeMeantEndWithTwo) {
  const std::string worker =
      Cluster::BinaryPath("tandem-decode /no/such/model ");
  const std::string router =
      Cluster::BinaryPath("tandem-router /no/such/model ");
  const std::string folder = ::testing::TempDir();
  const std::pair<std::string, const char*> kCases[] = {
      {worker + "--router 127.0.0.1:1 --worker-id 'a b'", "--worker-id"},
      {worker + "--router 127.0.0.1:1 --lease 1s", "below 2s"},
      {Tandem("bench --random-prefix-len 5 --random-prefix-ratio 0.5"),
       "exclude each other"},
      {Tandem("status --watch --interval 0s"), "below 10ms"},
      {"timeout 10 " + Tandem("status --watch --admin garbage"),
       "--admin: 'garbage' is not an address"},
      {router + "--grpc-port 7001 --internal-port 7001",
       "--grpc-port and --internal-port are both 7001"},
      {router + "--host 0.0.0.0 --allow-plaintext --port 50053",
       "--port and --admin-port are both 50053"},
  };
  for (const auto& [command, says] : kCases) {
    const Result result = Shell(command + " 2>&1");
    EXPECT_EQ(result.code, 2) << command;
    EXPECT_THAT(result.output, HasSubstr(says)) << command;
  }
  // Free ones, and those of other addresses, are no collision.
  for (const char* const ports :
       {"--grpc-port 0 --port 0",
        "--host 127.0.0.2 --grpc-port 7001 --internal-port 7001"}) {
    EXPECT_EQ(Shell(router + ports + " 2>&1").code, 1) << ports;
  }
}

TEST(CliTest, PlaintextBeyondLoopbackMustBeAllowed) {
  const char* const commands[] = {
      "tandem-router /no/such/model --internal-host 0.0.0.0",
      "tandem-decode /no/such/model --router 127.0.0.1:1 --host 0.0.0.0",
      "tandem-prefill /no/such/model --router 127.0.0.1:1,router.example:1",
  };
  for (const std::string command : commands) {
    const std::string shell = Cluster::BinaryPath(command) + " 2>&1";
    const Result refused = Shell(shell);
    EXPECT_EQ(refused.code, 2) << command << ": " << refused.output;
    EXPECT_NE(refused.output.find("--allow-plaintext"), std::string::npos)
        << command << ": " << refused.output;
    const Result allowed = Shell("TANDEM_ALLOW_PLAINTEXT=true " + shell);
    EXPECT_EQ(allowed.code, 1) << command << ": " << allowed.output;
    EXPECT_NE(allowed.output.find("/no/such/model"), std::string::npos)
        << command << ": " << allowed.output;
  }
}

TEST(CliTest, AWorkerOnEveryAddressMustSayItsOwn) {
  const std::string decode = Cluster::BinaryPath(
      "tandem-decode /no/such/model --allow-plaintext --host 0.0.0.0 "
      "--router ");
  const Result refused = Shell(decode + "192.0.2.1:1 2>&1");
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.output, HasSubstr("--advertise-host"));
  for (const char* const more :
       {"192.0.2.1:1 --advertise-host 192.0.2.2", "127.0.0.1:1"}) {
    const Result taken = Shell(decode + more + " 2>&1");
    EXPECT_EQ(taken.code, 1) << taken.output;
    EXPECT_THAT(taken.output, HasSubstr("/no/such/model"));
  }
}

TEST(CliTest, AConfigIsNoModelDirectoryButPlanReadsIt) {
  const std::string config = EmbeddedModel() + "/config.json";
  const Result serve = Shell(Tandem("serve " + config + " 2>&1"));
  EXPECT_EQ(serve.code, 1);
  EXPECT_EQ(serve.output,
            absl::StrCat("tandem serve: error: MODEL (--model) '", config,
                         "' is a file: give the model's directory\n"));
  EXPECT_EQ(Shell(Tandem("plan " + config)).code, 0);
  const Result router =
      Shell(Cluster::BinaryPath("tandem-router /no/such/model 2>&1"));
  EXPECT_EQ(router.code, 1);
  EXPECT_THAT(router.output, HasSubstr("/no/such/model: no such directory"));
}

TEST(CliTest, AFolderMayBeCalledAsAFileIs) {
  const std::string folder = ::testing::TempDir() + "/model.json";
  std::filesystem::remove_all(folder);
  std::filesystem::copy(EmbeddedModel(), folder);
  const Result planned = Shell(Tandem("plan " + folder + " --device cpu 2>&1"));
  EXPECT_EQ(planned.code, 0) << planned.output;
  // Working memory alone is more: no format of weights would help.
  const Result small =
      Shell(Tandem("plan " + folder + " --device cpu --memory 100MiB 2>&1"));
  EXPECT_EQ(small.code, 1);
  EXPECT_THAT(small.output, HasSubstr("take a larger device"));
  EXPECT_THAT(small.output, Not(HasSubstr("--quantization")));
  std::filesystem::remove_all(folder);
}

TEST(CliTest, ADirectoryInPlaceOfAFileIsSaid) {
  const std::string folder = ::testing::TempDir();
  for (const std::string& command :
       {"generate hi --json-schema-file " + folder,
        "status --tls-ca " + folder + " --tls-cert " + folder + " --tls-key " +
            folder,
        "bench --trace " + folder, "keys new anna --api-keys-file " + folder}) {
    const Result result = Shell(Tandem(command + " 2>&1"));
    EXPECT_THAT(result.code, ::testing::AnyOf(1, 2))
        << command << ": " << result.output;
    EXPECT_THAT(result.output, HasSubstr("Is a directory")) << command;
  }
}

TEST(CliTest, OutputThatIsLostIsAFailure) {
  constexpr char kSays[] =
      "cannot write standard output: No space left on device\n";
  for (const char* const command :
       {"version", "version --json", "completion bash", "explain --no-machine",
        "serve --help", "--version"}) {
    const Result result =
        Shell(Tandem(absl::StrCat(command, " 2>&1 >/dev/full")));
    EXPECT_EQ(result.code, 1) << command;
    EXPECT_EQ(result.output, absl::StrCat("tandem: error: ", kSays)) << command;
  }
  // A key that nobody has seen is in no file.
  const std::string keys = absl::StrCat(testing::TempDir(), "/keys-", getpid());
  const std::string command =
      Tandem(absl::StrCat("keys new acme --api-keys-file ", keys, " 2>&1"));
  const Result unseen = Shell(command + " >/dev/full");
  EXPECT_EQ(unseen.code, 1);
  EXPECT_THAT(unseen.output, testing::EndsWith(kSays));
  EXPECT_FALSE(std::filesystem::exists(keys));
  EXPECT_EQ(Shell(command).code, 0);
  const auto size = std::filesystem::file_size(keys);
  EXPECT_EQ(Shell(command + " >/dev/full").code, 1);
  EXPECT_EQ(std::filesystem::file_size(keys), size);
  std::filesystem::remove(keys);
}

TEST(CliTest, TooFewDescriptorsForAllConnectionsAreToldAtTheStart) {
  // 1024 over HTTP, 32 for probes, twice 1024 over gRPC, 128 of its own.
  for (const int limit : {3231, 3232}) {
    const Result router = Shell(absl::StrCat(
        "ulimit -n ", limit, "; timeout -s INT 2 ",
        Cluster::BinaryPath("tandem-router"), " ", EmbeddedModel(),
        " --port 0 --grpc-port 0 --internal-port 0 --admin-port 0 2>&1"));
    EXPECT_EQ(router.output.find("may take all file descriptors") !=
                  std::string::npos,
              limit == 3231)
        << router.output;
  }
}

}  // namespace
}  // namespace tandem::integration
