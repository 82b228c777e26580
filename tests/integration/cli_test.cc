// SPDX-License-Identifier: Apache-2.0
// The command line as a user runs it: serve, generate, status, exit codes.

#include <gmock/gmock.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/util/delimited_message_util.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cli/serve.h"
#include "common/rpc/listener.h"
#include "tandem/v1/session.pb.h"
#include "tests/integration/cluster.h"
#include "tests/integration/shell.h"

namespace tandem::integration {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;
using testing::Not;

// Neither gone nor a zombie that nobody has reaped yet.
bool Runs(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string stat;
  if (!std::getline(file, stat)) return false;
  const size_t name_end = stat.rfind(')');
  return name_end != std::string::npos && stat[name_end + 2] != 'Z';
}

// `tandem serve` in the background.
class ServeProcess {
 public:
  // Without `admin` it chooses that port, too.
  ServeProcess(const std::string& model, const std::string& arguments,
               bool admin = true) {
    base_ = 32000 + static_cast<int>(getpid() % 150) * 4;
    log_ = absl::StrCat(testing::TempDir(), "/tandem-serve-", getpid(), ".log");
    std::remove(log_.c_str());  // an earlier one's
    pid_ = fork();
    if (pid_ == 0) {
      setpgid(0, 0);
      // By environment, which the workers inherit, and must not heed.
      setenv("TANDEM_GRPC_PORT", absl::StrCat(base_).c_str(), 1);
      setenv("TANDEM_PORT", absl::StrCat(base_ + 1).c_str(), 1);
      const std::string command = absl::StrCat(
          "exec ",
          Tandem(absl::StrCat(
              "serve ", model, " ",
              admin ? absl::StrCat("--admin-port ", base_ + 2) : "", " ",
              arguments)),
          " >", log_, " 2>&1");
      execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      _exit(127);
    }
  }
  ~ServeProcess() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }

  bool WaitUntilReady() {
    for (int i = 0; i < 600; ++i) {
      if (Log().find("Tandem is ready") != std::string::npos) return true;
      if (waitpid(pid_, nullptr, WNOHANG) == pid_) {
        pid_ = -1;
        return false;
      }
      std::this_thread::sleep_for(milliseconds(50));
    }
    return false;
  }
  int Stop(int signal) {
    kill(pid_, signal);
    int status;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  std::string Log() const {
    std::ifstream file(log_);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }
  std::string Router() const {
    return absl::StrCat("--router 127.0.0.1:", base_);
  }
  std::string Admin() const {
    return absl::StrCat("--admin 127.0.0.1:", base_ + 2);
  }
  std::string Http() const { return absl::StrCat("127.0.0.1:", base_ + 1); }
  pid_t pid() const { return pid_; }
  // Processes whose parent is the supervisor.
  std::vector<pid_t> Children() const {
    std::vector<pid_t> children;
    const Result ps = Shell(absl::StrCat("ps -o pid= --ppid ", pid_));
    std::istringstream lines(ps.output);
    pid_t child;
    while (lines >> child) children.push_back(child);
    return children;
  }

 private:
  pid_t pid_ = -1;
  int base_ = 0;
  std::string log_;
};

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

// Of a drain that would last for half a minute: the router stands still.
int FirstEphemeralPort() {
  int first = 0;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> first;
  return first;
}

// What stands behind `flag` in a process's command line; 0: it is not there.
int PortOf(pid_t pid, const std::string& flag) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/cmdline"));
  std::string word;
  int port = 0;
  while (std::getline(file, word, '\0') && word != flag) {
  }
  if (std::getline(file, word, '\0')) (void)absl::SimpleAtoi(word, &port);
  return port;
}

std::unique_ptr<rpc::Listener> Take(int port) {
  auto taken = rpc::Listener::Bind(absl::StrCat("127.0.0.1:", port), {}, "");
  return taken.ok() ? *std::move(taken) : nullptr;
}

TEST(CliTest, OwnPortsAreFreeDifferAndAreBelowTheEphemeralOnes) {
  std::set<int> before;
  std::vector<std::unique_ptr<rpc::Listener>> taken;
  for (int i = 0; i < 20; ++i) {
    const absl::StatusOr<int> port = cli::OwnPort(&before);
    ASSERT_TRUE(port.ok()) << port.status();
    EXPECT_LT(*port, FirstEphemeralPort());
    EXPECT_EQ(before.size(), static_cast<size_t>(i + 1)) << *port;
    taken.push_back(Take(*port));
    ASSERT_NE(taken.back(), nullptr) << *port;
  }
  // Who knows nothing of those is given none of them.
  std::set<int> ours;
  for (int i = 0; i < 20; ++i) {
    const absl::StatusOr<int> port = cli::OwnPort(&ours);
    ASSERT_TRUE(port.ok()) << port.status();
    EXPECT_FALSE(before.contains(*port)) << *port;
  }
}

TEST(CliTest, ServeTakesSuchPortsWhereItChoosesThem) {
  constexpr int kAdminPort = 50053;
  const auto other = Take(kAdminPort);  // null: a cluster is there already
  ServeProcess served(EmbeddedModel(), "--prefill 0", /*admin=*/false);
  ASSERT_TRUE(served.WaitUntilReady()) << served.Log();
  std::set<int> ports;
  for (const pid_t child : served.Children()) {
    for (const char* const flag :
         {"--grpc-port", "--port", "--internal-port", "--admin-port"}) {
      // A worker has those that the system gives.
      const int port = PortOf(child, flag);
      if (port == 0) continue;
      EXPECT_LT(port, FirstEphemeralPort()) << flag;
      EXPECT_TRUE(ports.insert(port).second) << flag << " " << port;
    }
  }
  EXPECT_EQ(ports.size(), 4u);
  EXPECT_EQ(served.Stop(SIGTERM), 143);
}

TEST(CliTest, ASecondInterruptEndsTheDrainAtOnce) {
  ServeProcess served(EmbeddedModel(), "--prefill 0");
  ASSERT_TRUE(served.WaitUntilReady()) << served.Log();
  const std::vector<pid_t> children = served.Children();
  ASSERT_EQ(children.size(), 2u);
  kill(children[0], SIGSTOP);
  kill(served.pid(), SIGINT);
  for (int i = 0; i < 100 && served.Log().find("Draining") == std::string::npos;
       ++i) {
    std::this_thread::sleep_for(milliseconds(50));
  }
  const auto second = std::chrono::steady_clock::now();
  EXPECT_EQ(served.Stop(SIGINT), 130) << served.Log();
  EXPECT_LT(std::chrono::steady_clock::now() - second, seconds(5));
  for (const pid_t child : children) {
    EXPECT_FALSE(Runs(child)) << child << " is an orphan";
  }
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

// What `tandem flight` says of `path` once that has `wanted`, or in the end.
std::string FlightUntil(const std::string& path, const std::string& wanted) {
  Result story;
  for (int i = 0; i < 200; ++i) {
    story = Shell(Tandem("flight " + path + " 2>&1"));
    if (story.output.find(wanted) != std::string::npos) break;
    std::this_thread::sleep_for(milliseconds(50));
  }
  return story.output;
}

// Where, in a recorded session, the first request has gone in.
size_t EndOfFirstSubmit(const std::string& session) {
  google::protobuf::io::ArrayInputStream in(session.data(),
                                            static_cast<int>(session.size()));
  v1::SessionEntry entry;
  while (google::protobuf::util::ParseDelimitedFromZeroCopyStream(&entry, &in,
                                                                  nullptr)) {
    if (entry.has_submit()) return static_cast<size_t>(in.ByteCount());
    entry.Clear();
  }
  return 0;
}

TEST(CliTest, RestartsAChildThatDiesAndLeavesNoOrphan) {
  std::string flights = absl::StrCat(testing::TempDir(), "/flights.XXXXXX");
  ASSERT_NE(mkdtemp(flights.data()), nullptr);
  ServeProcess served(EmbeddedModel(),
                      "--prefill 1 --decode 1 --max-loras 1 "
                      "--flight-record-dir " +
                          flights + " --record-session-dir " + flights);
  ASSERT_TRUE(served.WaitUntilReady()) << served.Log();
  const std::string generate =
      Tandem("generate " + served.Router() +
             " --placement split --temperature 0 --max-tokens 5"
             " 'Zanzibar and back' 2>&1");
  ASSERT_EQ(Shell(generate).code, 0) << served.Log();
  EXPECT_NE(Shell(Tandem("lora load verse /none " + served.Admin())).code, 0);
  const std::vector<pid_t> before = served.Children();
  ASSERT_EQ(before.size(), 3u);
  // What the process decided is there after its crash, and on request.
  kill(before[1], SIGABRT);
  const std::string crashed = absl::StrCat(" prefill/", before[1], " written ");
  EXPECT_THAT(FlightUntil(flights, crashed),
              testing::AllOf(HasSubstr(crashed + "signal=6"),
                             HasSubstr(" computed request="),
                             HasSubstr(" step sequences=1 rows=")));
  // All that run are asked at once, by their supervisor.
  kill(served.pid(), SIGUSR1);
  EXPECT_THAT(
      FlightUntil(flights, absl::StrCat(" decode/", before[2], " written ")),
      HasSubstr(absl::StrCat(" decode/", before[2], " written ")));
  const std::string asked = absl::StrCat(" router/", before[0], " written ");
  const std::string story = FlightUntil(flights, asked);
  EXPECT_THAT(story, testing::AllOf(HasSubstr(asked), HasSubstr(crashed),
                                    HasSubstr(" registered decode=decode-0"),
                                    HasSubstr(" prefill=prefill-0 decode="),
                                    Not(HasSubstr("Zanzibar"))));
  // A file that is no record leaves the others to be read.
  std::ofstream(flights + "/foreign.flight") << "a log\n";
  const Result foreign = Shell(Tandem("flight " + flights + " 2>&1"));
  EXPECT_EQ(foreign.code, 0);
  EXPECT_THAT(foreign.output,
              testing::AllOf(HasSubstr("foreign.flight is no flight record\n"),
                             HasSubstr(crashed)));
  // One request, as both saw it.
  const size_t at = story.find(" ended request=");
  ASSERT_NE(at, std::string::npos) << story;
  const Result both = Shell(
      Tandem("flight " + flights + " --request " + story.substr(at + 15, 16)));
  EXPECT_THAT(
      both.output,
      testing::AllOf(HasSubstr("router/"), HasSubstr("prefill/"),
                     HasSubstr(" committed "), Not(HasSubstr(" written "))));
  bool again = false;
  for (int i = 0; i < 200 && !again; ++i) {
    std::this_thread::sleep_for(milliseconds(50));
    again = served.Children().size() == 3 && served.Children() != before;
  }
  EXPECT_TRUE(again) << served.Log();
  // To a file each line of the log is an object, its own words too.
  EXPECT_THAT(served.Log(),
              testing::AllOf(HasSubstr("\n{\"ts\":"),
                             HasSubstr("\"role\":\"serve\",\"worker\":\"\","
                                       "\"msg\":\"was killed by signal 6"),
                             Not(HasSubstr(" | "))));
  const Result text = Shell(generate);
  EXPECT_EQ(text.code, 0) << text.output;

  // Even a supervisor that is killed takes its children along.
  const std::vector<pid_t> children = served.Children();
  served.Stop(SIGKILL);
  std::this_thread::sleep_for(milliseconds(500));
  for (const pid_t child : children) {
    EXPECT_FALSE(Runs(child)) << child << " is an orphan";
  }
  // What the router had recorded until then decides the same once more.
  const Result session = Shell(Tandem("replay " + flights + "/*.session 2>&1"));
  EXPECT_EQ(session.code, 0);
  EXPECT_THAT(
      session.output,
      testing::AllOf(HasSubstr(" worker prefill-0 lost: "),
                     HasSubstr(" adapter verse not loaded"),
                     HasSubstr(" ended OK, 5 tokens, 0 failures"),
                     HasSubstr("the same "), Not(HasSubstr("Zanzibar"))));
  // A request in flight where it is cut did not end; what is damaged does not
  // pass for an end.
  const std::string bytes = Shell("cat " + flights + "/*.session").output;
  const std::string begun = flights + "/begun.session";
  const size_t submit = EndOfFirstSubmit(bytes);
  std::ofstream(begun) << bytes.substr(0, submit);
  const Result cut = Shell(Tandem("replay " + begun + " 2>&1"));
  EXPECT_EQ(cut.code, 0);
  EXPECT_THAT(
      cut.output,
      testing::AllOf(HasSubstr("; the recording ends within the last input\n"),
                     Not(HasSubstr(" ended "))));
  std::ofstream(begun) << bytes.substr(0, submit) << std::string(40, '\xff');
  const Result damaged = Shell(Tandem("replay " + begun + " 2>&1"));
  EXPECT_EQ(damaged.code, 1);
  EXPECT_THAT(damaged.output, HasSubstr(absl::StrCat(" bytes from offset ",
                                                     submit, " are no entry")));
  std::filesystem::remove_all(flights);
}

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
      {"flight /no/such/file", 1, "cannot read"},
      {"flight /dev/null", 1, "no flight record"},
      {"replay /no/such/file", 1, "cannot read"},
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

// Of another server: it is not the business of the one that a chat starts.
TEST(CliTest, AChatsOwnServerHeedsNoVariablesOfOthers) {
  const Result result = Shell(
      "echo hi | TANDEM_HOST=127.0.0.2 TANDEM_API_KEYS_FILE=/no/such/file"
      " TANDEM_SSL_CERTFILE=/no/such/file TANDEM_TLS_CA=/no/such/file"
      " TANDEM_ROUTER=127.0.0.1:1 TANDEM_REVISION=main " +
      Tandem("chat " + EmbeddedModel() + " --max-tokens 4 2>&1"));
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST(CliTest, AStartThatIsInVainEndsAtOnceWithTheCause) {
  const std::filesystem::path model =
      absl::StrCat(testing::TempDir(), "/unfinished-", getpid());
  std::filesystem::copy(EmbeddedModel(), model,
                        std::filesystem::copy_options::recursive);
  std::filesystem::remove(model / "tokenizer.json");
  ServeProcess served(model.string(), "");
  EXPECT_FALSE(served.WaitUntilReady());
  std::filesystem::remove_all(model);
  const std::string log = served.Log();
  EXPECT_THAT(log, Not(HasSubstr("starting it again")));
  EXPECT_THAT(log, testing::EndsWith(absl::StrCat(
                       "tandem serve: error: router ended with exit code 1: "
                       "tandem-router: error: ",
                       model.string(), "/tokenizer.json: no such file\n")));
  const std::string word = "tandem-router: error: ";
  EXPECT_EQ(log.find(word), log.rfind(word)) << log;
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

TEST(CliTest, WhatAProcessLeftTwiceIsToldOnce) {
  const std::string directory =
      absl::StrCat(testing::TempDir(), "/told-once-", getpid());
  std::filesystem::create_directories(directory);
  const std::string both =
      "1.000000000 decode granted request=0123456789abcdef\n"
      "1.000000001 decode granted request=0123456789abcdef\n";
  // Its clock was set between the two.
  std::ofstream(directory + "/a-request.flight")
      << "# decode pid=7 monotonic=2.000000000 wall=100.000000000 signal=10\n"
      << both;
  std::ofstream(directory + "/a-crash.flight")
      << "# decode pid=7 monotonic=3.000000000 wall=101.000000009 signal=11\n"
      << both << "2.500000000 decode step sequences=1\n";
  const std::string flight = "flight " + directory;
  const Result all = Shell(Tandem(flight));
  EXPECT_EQ(std::count(all.output.begin(), all.output.end(), '\n'), 5)
      << all.output;
  const Result one = Shell(Tandem(flight + " --request 0123456789ABCDEF00FF"));
  EXPECT_EQ(std::count(one.output.begin(), one.output.end(), '\n'), 2)
      << one.output;
  for (const char* const other : {"0123456789abcdee", "mine"}) {
    const Result none = Shell(Tandem(flight + " --request " + other + " 2>&1"));
    EXPECT_EQ(none.code, 1);
    EXPECT_THAT(none.output, HasSubstr("no record of that request in"));
  }
  // As somebody whom the directory's mode concerns, where that can be.
  const std::string nobody =
      geteuid() != 0 ? ""
                     : "setpriv --reuid 65534 --regid 65534 --clear-groups ";
  std::filesystem::permissions(directory, std::filesystem::perms::none);
  if (Shell(nobody + Tandem("version 2>&1")).code == 0) {
    EXPECT_THAT(Shell(nobody + Tandem(flight + " 2>&1")).output,
                HasSubstr(directory + ": Permission denied"));
  }
  std::filesystem::permissions(directory, std::filesystem::perms::owner_all);
  std::filesystem::remove_all(directory);
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
