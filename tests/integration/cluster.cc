// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/cluster.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/random.h"
#include "common/rpc/channel.h"
#include "common/rpc/credentials.h"
#include "common/rpc/status.h"
#include "gtest/gtest.h"
#include "tests/inner_words.h"

namespace tandem::integration {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// So much of a prompt is not in a message by chance.
constexpr size_t kTelling = 8;

// Ports below the ephemeral range, so that no outgoing connection takes one
// between its choice and its use; spread by process id over parallel tests.
int FreePort() {
  static std::set<int> given;
  static int next = 12000 + static_cast<int>(getpid() % 700) * 28;
  for (int tries = 0; tries < 20000; ++tries) {
    if (++next > 31999) next = 12000;
    if (given.contains(next)) continue;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(next));
    const bool free =
        bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    close(fd);
    if (free) {
      given.insert(next);
      return next;
    }
  }
  std::abort();
}

int CountEntries(const std::string& directory) {
  int count = 0;
  DIR* const handle = opendir(directory.c_str());
  if (handle == nullptr) return -1;
  while (const dirent* entry = readdir(handle)) {
    count += entry->d_name[0] != '.';
  }
  closedir(handle);
  return count;
}

// GET, or POST of `body`.
std::string Http(int port, const std::string& path,
                 const std::string* body = nullptr) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  std::string response;
  timeval timeout{.tv_sec = 5, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
    const std::string request =
        absl::StrCat(body == nullptr ? "GET " : "POST ", path,
                     " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n",
                     "Content-Length: ", body == nullptr ? 0 : body->size(),
                     "\r\n\r\n", body == nullptr ? "" : *body);
    (void)!send(fd, request.data(), request.size(), MSG_NOSIGNAL);
    char buffer[8192];
    ssize_t count;
    while ((count = recv(fd, buffer, sizeof buffer, 0)) > 0) {
      response.append(buffer, static_cast<size_t>(count));
    }
  }
  close(fd);
  return response;
}

}  // namespace

std::string EmbeddedModel() {
  return absl::StrCat(TANDEM_SOURCE_DIR, "/models/tales");
}

std::string Cluster::BinaryPath(const std::string& binary) {
  return absl::StrCat(TANDEM_BINARY_DIR, "/bin/", binary);
}

std::string Cluster::Program(const std::string& name) const {
  return options_.faulty
             ? absl::StrCat(TANDEM_BINARY_DIR, "/tests/", name, "-faulty")
             : BinaryPath(name);
}

Cluster::Cluster(ClusterOptions options) : options_(std::move(options)) {
  char directory[] = "/tmp/tandem-test-XXXXXX";
  directory_ = mkdtemp(directory);
  for (int i = 0; i < options_.routers; ++i) {
    routers_.push_back({.name = i == 0 ? "router" : absl::StrCat("router-", i),
                        .grpc_port = FreePort(),
                        .internal_port = FreePort(),
                        .admin_port = FreePort(),
                        .http_port = FreePort()});
  }

  const std::string model =
      options_.model_dir.empty() ? EmbeddedModel() : options_.model_dir;
  std::vector<std::string> common = {"--log-format", "json"};
  // All workers on one GPU, with the bits that the CPU has.
  std::vector<std::string> device;
  if (const char* name = std::getenv("TANDEM_TEST_DEVICE"); name != nullptr) {
    device = {"--device", name,      "--gpu-memory-utilization",
              "0.1",      "--dtype", "f32"};
  }
  for (const auto* arguments :
       {&options_.worker_arguments, &options_.prefill_arguments,
        &options_.decode_arguments}) {
    // The test itself says where they run.
    if (std::find(arguments->begin(), arguments->end(), "--device") !=
        arguments->end()) {
      device.clear();
    }
  }
  const auto add =
      [&](const std::string& name, std::vector<std::string> argv,
          std::initializer_list<const std::vector<std::string>*> more) {
        argv.insert(argv.end(), common.begin(), common.end());
        if (!options_.tls_directory.empty()) {
          argv.insert(argv.end(), {"--tls-cert", TlsFile(name, ".pem"),
                                   "--tls-key", TlsFile(name, ".key"),
                                   "--tls-ca", TlsFile("ca", ".pem")});
        }
        for (const auto* arguments : more) {
          argv.insert(argv.end(), arguments->begin(), arguments->end());
        }
        processes_[name] = {
            .argv = std::move(argv),
            .log_path = absl::StrCat(directory_, "/", name, ".log")};
      };
  std::vector<std::string> registries;
  // A machine that many tests share is no overload.
  std::vector<std::string> patience = {"--max-expected-wait", "inf"};
  const auto& given = options_.router_arguments;
  if (std::find(given.begin(), given.end(), patience[0]) != given.end()) {
    patience.clear();
  }
  for (const Router& router : routers_) {
    add(router.name,
        {Program("tandem-router"), model, "--grpc-port",
         absl::StrCat(router.grpc_port), "--internal-port",
         absl::StrCat(router.internal_port), "--admin-port",
         absl::StrCat(router.admin_port), "--port",
         absl::StrCat(router.http_port)},
        {&patience, &options_.router_arguments});
    processes_[router.name].http_port = router.http_port;
    registries.insert(
        registries.end(),
        {"--router", absl::StrCat("localhost:", router.internal_port)});
  }
  const auto add_workers = [&](const std::string& role, int count,
                               const std::vector<std::string>& own) {
    for (int i = 0; i < count; ++i) {
      const std::string name = absl::StrCat(role, "-", i);
      const int http_port = FreePort(), grpc_port = FreePort();
      add(name,
          {Program(absl::StrCat("tandem-", role)), model, "--worker-id", name,
           "--threads", "1", "--port", absl::StrCat(http_port), "--grpc-port",
           absl::StrCat(grpc_port)},
          {&registries, &device, &options_.worker_arguments, &own});
      processes_[name].http_port = http_port;
      processes_[name].grpc_port = grpc_port;
    }
  };
  add_workers("prefill", options_.prefill, options_.prefill_arguments);
  add_workers("decode", options_.decode, options_.decode_arguments);
}

Cluster::~Cluster() {
  for (auto& [name, process] : processes_) {
    if (process.pid > 0) Kill(name);
  }
  std::error_code error;
  if (std::getenv("TANDEM_KEEP_LOGS") == nullptr) {
    std::filesystem::remove_all(directory_, error);
  }
}

absl::Status Cluster::Spawn(const std::string& name) {
  Process& process = processes_.at(name);
  std::vector<char*> argv;
  for (std::string& argument : process.argv) argv.push_back(argument.data());
  argv.push_back(nullptr);
  std::vector<char*> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    environment.push_back(*entry);
  }
  std::string faults = absl::StrCat("TANDEM_FAILPOINTS=", process.faults);
  if (!std::exchange(process.faults, "").empty()) {
    environment.push_back(faults.data());
  }
  if (!process.variable.empty()) {
    environment.push_back(process.variable.data());
  }
  environment.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return absl::InternalError("fork failed");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    setpgid(0, 0);
    const int log =
        open(process.log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    const int null = open("/dev/null", O_RDONLY);
    dup2(null, STDIN_FILENO);
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    // Descriptors of the test's own sockets must not keep ports busy.
    for (int fd = 3; fd < 1024; ++fd) close(fd);
    execve(argv[0], argv.data(), environment.data());
    _exit(127);
  }
  process.pid = pid;
  return absl::OkStatus();
}

absl::Status Cluster::Start() {
  for (const auto& [name, process] : processes_) {
    absl::Status status = Spawn(name);
    if (!status.ok()) return status;
  }
  absl::Status status = WaitUntilReady(options_.prefill, options_.decode,
                                       std::chrono::seconds(60));
  if (!status.ok()) return status;
  WarmUp();
  for (auto& [name, process] : processes_) {
    process.baseline = FootprintOf(name);
  }
  return absl::OkStatus();
}

// Where keys are asked for it is refused, and changes nothing.
void Cluster::WarmUp() {
  v1::GenerateRequest request = TextRequest("Once", 2);
  request.mutable_cache()->set_bypass_prefix_cache(true);
  if (options_.prefill > 0) request.set_placement(v1::PLACEMENT_SPLIT);
  for (int i = 0; i < std::max(options_.prefill, options_.decode); ++i) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::seconds(10));
    Generate(request, &context);
  }
}

std::string Cluster::TlsFile(const std::string& name,
                             const std::string& ending) const {
  if (options_.tls_directory.empty()) return "";
  const std::string role =
      absl::StrCat(options_.tls_directory, "/", name.substr(0, name.find('-')));
  const std::string own = absl::StrCat(role, "-", name, ending);
  return std::filesystem::exists(own) ? own : role + ending;
}

std::shared_ptr<grpc::Channel> Cluster::Channel(int port,
                                                const std::string& who) {
  absl::StatusOr<rpc::Credentials> tls = rpc::LoadCredentials(
      TlsFile(who, ".pem"), TlsFile(who, ".key"), TlsFile("ca", ".pem"));
  return rpc::MakeChannel(absl::StrCat("localhost:", port), *tls);
}

std::unique_ptr<v1::InferenceService::Stub> Cluster::Client(int router) {
  Router& of = routers_[static_cast<size_t>(router)];
  if (of.channel == nullptr) of.channel = Channel(of.grpc_port, "client");
  return v1::InferenceService::NewStub(of.channel);
}

absl::StatusOr<v1::GetClusterStateResponse> Cluster::State(int router,
                                                           bool requests) {
  Router& of = routers_[static_cast<size_t>(router)];
  if (of.admin_channel == nullptr) {
    of.admin_channel = Channel(of.admin_port, "operator");
  }
  const auto stub = v1::AdminService::NewStub(of.admin_channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::seconds(5));
  v1::GetClusterStateRequest request;
  request.set_include_requests(requests);
  v1::GetClusterStateResponse response;
  const grpc::Status status =
      stub->GetClusterState(&context, request, &response);
  if (!status.ok()) return rpc::FromGrpc(status);
  return response;
}

// What clients are told of workers follows a moment later.
bool Cluster::ClientsSee(int router, int decode) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::seconds(5));
  v1::GetModelResponse response;
  const grpc::Status status = Client(router)->GetModel(&context, {}, &response);
  return !status.ok() || response.model().ready_decode_workers() >= decode;
}

std::string Cluster::Missing(int router, int prefill, int decode) {
  const auto state = State(router);
  if (!state.ok()) return state.status().ToString();
  int p = 0, d = 0;
  for (const v1::WorkerStatus& worker : state->workers()) {
    if (!worker.placeable()) continue;
    p += worker.hello().role() == v1::WORKER_ROLE_PREFILL;
    d += worker.hello().role() == v1::WORKER_ROLE_DECODE;
  }
  if (p >= prefill && d >= decode && ClientsSee(router, decode)) return "";
  return state->ShortDebugString();
}

absl::Status Cluster::WaitUntilReady(int prefill, int decode,
                                     std::chrono::seconds timeout) {
  const auto end = Clock::now() + timeout;
  std::string missing = "never answered";
  while (Clock::now() < end) {
    missing.clear();
    for (int i = 0; i < routers() && missing.empty(); ++i) {
      missing = Missing(i, prefill, decode);
    }
    if (missing.empty()) return absl::OkStatus();
    for (auto& [name, process] : processes_) {
      int wait_status;
      if (process.pid > 0 &&
          waitpid(process.pid, &wait_status, WNOHANG) == process.pid) {
        process.pid = -1;
        return absl::AbortedError(
            absl::StrCat(name, " ended while starting: ", Log(name)));
      }
    }
    std::this_thread::sleep_for(milliseconds(50));
  }
  return absl::DeadlineExceededError(absl::StrCat("not ready: ", missing));
}

pid_t Cluster::pid(const std::string& name) const {
  return processes_.at(name).pid;
}

void Cluster::Signal(const std::string& name, int signal) {
  if (processes_.at(name).pid > 0) kill(processes_.at(name).pid, signal);
}

void Cluster::ArmAtStart(const std::string& name, const std::string& faults) {
  processes_.at(name).faults = faults;
}

void Cluster::SetEnvironment(const std::string& name,
                             const std::string& variable) {
  processes_.at(name).variable = variable;
}

std::string Cluster::Arm(const std::string& name, const std::string& faults) {
  const std::string response =
      Http(processes_.at(name).http_port, "/failpoints", &faults);
  if (response.size() > 12 && response.substr(9, 3) == "200") return "";
  return absl::StrCat(name, " is not armed: ", response);
}

void Cluster::Kill(const std::string& name) {
  Process& process = processes_.at(name);
  if (process.pid <= 0) return;
  kill(process.pid, SIGKILL);
  waitpid(process.pid, nullptr, 0);
  process.pid = -1;
  process.baseline.reset();
}

absl::Status Cluster::Restart(const std::string& name) {
  Kill(name);
  return Spawn(name);
}

std::optional<int> Cluster::WaitForExit(const std::string& name,
                                        std::chrono::seconds timeout) {
  Process& process = processes_.at(name);
  const auto end = Clock::now() + timeout;
  int wait_status;
  while (Clock::now() < end) {
    if (waitpid(process.pid, &wait_status, WNOHANG) == process.pid) {
      process.pid = -1;
      process.baseline.reset();
      return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status)
                                    : 128 + WTERMSIG(wait_status);
    }
    std::this_thread::sleep_for(milliseconds(10));
  }
  return std::nullopt;
}

void Cluster::SetDeadline(grpc::ClientContext* context) {
  context->set_deadline(std::chrono::system_clock::now() +
                        std::chrono::seconds(120));
}

Outcome Cluster::Generate(const v1::GenerateRequest& request,
                          grpc::ClientContext* context, int router) {
  const auto stub = Client(router);
  grpc::ClientContext own;
  if (context == nullptr) {
    context = &own;
    SetDeadline(context);
  }
  Outcome outcome;
  outcome.sent = Clock::now();
  const auto reader = stub->Generate(context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    if (response.has_started()) ++outcome.started;
    if (response.has_delta()) {
      const v1::GenerateDelta& delta = response.delta();
      v1::GeneratedSequence& sequence = outcome.sequences[delta.index()];
      sequence.mutable_text()->append(delta.text());
      sequence.mutable_token_ids()->MergeFrom(delta.token_ids());
      sequence.mutable_logprobs()->MergeFrom(delta.logprobs());
      sequence.mutable_attention()->MergeFrom(delta.attention());
      if (delta.token_ids_size() > 0) outcome.deltas.push_back(Clock::now());
    }
    if (response.has_prompt_logprobs()) {
      EXPECT_EQ(response.prompt_logprobs().position(),
                outcome.prompt_logprobs.tokens_size());
      outcome.prompt_logprobs.mutable_tokens()->MergeFrom(
          response.prompt_logprobs().tokens());
    }
    if (response.has_finished()) {
      ++outcome.finished;
      *outcome.sequences[response.finished().index()].mutable_finished() =
          response.finished();
      outcome.reason = response.finished().finish_reason();
    }
    if (response.has_done()) {
      ++outcome.ends;
      outcome.done = response.done();
    }
  }
  outcome.status = rpc::FromGrpc(reader->Finish());
  outcome.ended = Clock::now();
  EXPECT_EQ(InnerWordIn(outcome.status), "") << outcome.status;
  if (const std::string& text = request.text(); text.size() >= kTelling) {
    EXPECT_EQ(outcome.status.message().find(text), std::string::npos)
        << outcome.status;
  }
  for (const auto& [index, sequence] : outcome.sequences) {
    outcome.text += sequence.text();
    outcome.token_ids.insert(outcome.token_ids.end(),
                             sequence.token_ids().begin(),
                             sequence.token_ids().end());
  }
  return outcome;
}

Footprint Cluster::FootprintOf(const std::string& name) const {
  const std::string proc = absl::StrCat("/proc/", processes_.at(name).pid);
  Footprint found = {.descriptors = CountEntries(proc + "/fd"),
                     .threads = CountEntries(proc + "/task")};
  std::ifstream maps(proc + "/maps");
  std::string line;
  while (std::getline(maps, line)) {
    if (line.find("/memfd:tandem-slabs") != std::string::npos) {
      ++found.arenas;
    } else if (line.find(" /") != std::string::npos) {
      ++found.files;
    }
  }
  return found;
}

std::string Cluster::Log(const std::string& name) const {
  std::ifstream file(processes_.at(name).log_path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::string Cluster::Probe(const std::string& name, const std::string& path) {
  const std::string response = Http(processes_.at(name).http_port, path);
  const size_t body = response.find("\r\n\r\n");
  if (body == std::string::npos) return "";
  return absl::StrCat(response.substr(9, 3), " ", response.substr(body + 4));
}

std::map<std::string, double> Cluster::Metrics(const std::string& name) {
  std::map<std::string, double> values;
  std::istringstream lines(Http(processes_.at(name).http_port, "/metrics"));
  std::string line;
  while (std::getline(lines, line)) {
    const size_t space = line.rfind(' ');
    double value;
    if (line.empty() || line[0] == '#' || space == std::string::npos ||
        !absl::SimpleAtod(line.substr(space + 1), &value)) {
      continue;
    }
    values[line.substr(0, space)] = value;
  }
  return values;
}

std::string Cluster::CheckWorkers(const v1::GetClusterStateResponse& state) {
  std::string wrong;
  if (state.requests().total() != 0) {
    absl::StrAppend(&wrong, "router still has ", state.requests().total(),
                    " requests; ");
  }
  for (const v1::WorkerStatus& worker : state.workers()) {
    const v1::WorkerLoad& load = worker.load();
    const std::string& id = worker.hello().worker().worker_id();
    const auto expect_zero = [&](const char* what, int value) {
      if (value != 0) absl::StrAppend(&wrong, id, ": ", value, " ", what, "; ");
    };
    expect_zero("blocks live", load.blocks_live());
    expect_zero("blocks reserved", load.blocks_reserved());
    expect_zero("tickets", load.tickets());
    expect_zero("streams", load.streams());
    expect_zero("slabs granted", load.slabs_granted());
    expect_zero("slabs in flight", load.slabs_in_flight());
    expect_zero("slabs quarantined", load.slabs_quarantined());
    expect_zero("sequences running", load.running());
    expect_zero("sequences waiting", load.waiting());
    const int sum = load.blocks_free() + load.blocks_cached() +
                    load.blocks_live() + load.blocks_reserved();
    if (sum != worker.hello().num_blocks()) {
      absl::StrAppend(&wrong, id, ": blocks add up to ", sum, " of ",
                      worker.hello().num_blocks(), "; ");
    }
  }
  return wrong;
}

// Descriptors, threads and mapped files may settle below or a little above what
// they were (gRPC keeps a few pollers and connections, libraries are loaded at
// their first use); what grows with requests stands out by far more than the
// slack. A worker shares one arena with each peer that lives, and a decode
// worker keeps one for the next.
std::string Cluster::CheckFootprints() {
  constexpr int kSlack = 16;
  std::map<std::string, int> most_arenas;  // by role
  for (const auto& [name, process] : processes_) {
    if (process.pid <= 0) continue;
    most_arenas["decode"] += name.starts_with("prefill");
    most_arenas["prefill"] += name.starts_with("decode");
  }
  ++most_arenas["decode"];
  std::string wrong;
  for (auto& [part, process] : processes_) {
    const std::string& name = part;  // a binding cannot be captured
    if (process.pid <= 0) continue;
    const Footprint now = FootprintOf(name);
    if (const int most = most_arenas[name.substr(0, name.find('-'))];
        now.arenas > most) {
      absl::StrAppend(&wrong, name, ": ", now.arenas, " arenas, at most ", most,
                      "; ");
    }
    if (!process.baseline.has_value()) {
      process.baseline = now;
      continue;
    }
    const auto compare = [&](const char* what, int count, int first) {
      if (count <= first + kSlack) return;
      absl::StrAppend(&wrong, name, ": ", count, " ", what, ", first ", first,
                      "; ");
    };
    compare("descriptors", now.descriptors, process.baseline->descriptors);
    compare("threads", now.threads, process.baseline->threads);
    compare("mapped files", now.files, process.baseline->files);
  }
  return wrong;
}

std::string Cluster::WhatIsLeft(const std::string& canary) {
  std::string wrong;
  const auto end = Clock::now() + std::chrono::seconds(8);
  while (Clock::now() < end) {
    wrong = CheckFootprints();
    for (int i = 0; i < routers(); ++i) {
      const auto state = State(i);
      absl::StrAppend(&wrong, state.ok() ? CheckWorkers(*state)
                                         : state.status().ToString());
    }
    if (wrong.empty()) break;
    // Loads are reported four times a second.
    std::this_thread::sleep_for(milliseconds(100));
  }
  for (const auto& [name, process] : processes_) {
    absl::StrAppend(&wrong, CheckLog(name, canary));
  }
  return wrong;
}

std::string Cluster::CheckLog(const std::string& name,
                              const std::string& canary) const {
  std::string wrong;
  std::istringstream lines(Log(name));
  std::string line;
  while (std::getline(lines, line)) {
    if (!canary.empty() && line.find(canary) != std::string::npos) {
      absl::StrAppend(&wrong, name, ": prompt text in the log; ");
      break;
    }
    if (line.find("\"level\":\"error\"") != std::string::npos &&
        std::none_of(expected_.begin(), expected_.end(),
                     [&line](const std::string& part) {
                       return line.find(part) != std::string::npos;
                     })) {
      absl::StrAppend(&wrong, name, ": ", line, "; ");
    }
  }
  return wrong;
}

v1::GenerateRequest TextRequest(const std::string& prompt, int max_tokens) {
  v1::GenerateRequest request;
  request.set_text(prompt);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(max_tokens);
  request.mutable_output()->set_return_token_ids(true);
  return request;
}

std::vector<std::string> SomePrompts(int count, uint64_t seed) {
  static const char* const kWords[] = {
      "Mia", "found", "a",     "red",   "ball",  "near", "the",   "old",
      "oak", "and",   "ran",   "to",    "Tom",   "who",  "was",   "in",
      "his", "small", "house", "with",  "blue",  "door", "cat",   "dog",
      "big", "happy", "river", "stone", "apple", "said", "hello", "sun"};
  SeededRandom random(seed);
  std::vector<std::string> prompts;
  for (int i = 0; i < count; ++i) {
    std::string prompt = absl::StrCat("Story ", i, ".");
    const int words = 5 + static_cast<int>(random.Below(60));
    for (int w = 0; w < words; ++w) {
      absl::StrAppend(&prompt, " ", kWords[random.Below(std::size(kWords))]);
    }
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

}  // namespace tandem::integration
