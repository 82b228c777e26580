// SPDX-License-Identifier: Apache-2.0
#include "cli/serve.h"

#include <netdb.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cli/connect.h"
#include "cli/status.h"
#include "cli/supervisor.h"
#include "common/available_cpus.h"
#include "common/log.h"
#include "kernels/cpu/cpu_backend.h"

namespace tandem::cli {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

volatile sig_atomic_t signals_seen = 0;
volatile sig_atomic_t last_signal = 0;

void OnSignal(int number) {
  signals_seen = signals_seen + 1;
  last_signal = number;
}

void InstallHandlers() {
  struct sigaction action;
  std::memset(&action, 0, sizeof action);
  action.sa_handler = OnSignal;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

std::string SiblingBinary(const std::string& name) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  return (self.parent_path() / name).string();
}

// Child lines with their name before them, in a colour of its own on a
// terminal. In JSON each line is one object: children's as they come, which
// say whose they are, and what else there is to say as this process's.
class Printer {
 public:
  explicit Printer(bool as_json) : json_(as_json) {}

  void operator()(const std::string& name, const std::string& text) {
    if (json_ && absl::StartsWith(text, "{")) {
      std::cerr << text << "\n";
      return;
    }
    if (json_) {
      LogWarning(text, {{"worker", name}});
      return;
    }
    if (!colour_) {
      std::cerr << absl::StrFormat("%-9s | %s\n", name, text);
      return;
    }
    const auto [it, added] =
        colours_.emplace(name, 31 + static_cast<int>(colours_.size()) % 6);
    std::cerr << absl::StrFormat("\033[%dm%-9s |\033[0m %s\n", it->second, name,
                                 text);
  }

 private:
  const bool json_;
  const bool colour_ =
      isatty(STDERR_FILENO) && std::getenv("NO_COLOR") == nullptr;
  std::map<std::string, int> colours_;
};

struct Ports {
  int internal = 0;
  int admin = 0;
};

std::string Bracketed(const std::string& host) {
  return host.find(':') == std::string::npos ? host
                                             : absl::StrCat("[", host, "]");
}

void AddTls(const ServeFlags& flags, std::vector<std::string>* argv) {
  const auto add = [argv](const char* flag, const std::string& value) {
    if (!value.empty()) argv->insert(argv->end(), {flag, value});
  };
  add("--tls-cert", flags.tls_cert);
  add("--tls-key", flags.tls_key);
  add("--tls-ca", flags.tls_ca);
}

void AddChildren(const ServeFlags& flags, const Ports& ports,
                 Supervisor* supervisor) {
  const std::string timeout = absl::FormatDuration(flags.shutdown_timeout);
  std::vector<std::string> common = {"--shutdown-timeout", timeout};
  if (!flags.served_model_name.empty()) {
    common.insert(common.end(),
                  {"--served-model-name", flags.served_model_name});
  }
  AddTls(flags, &common);

  ChildSpec router{"router",
                   {SiblingBinary("tandem-router"), flags.model_dir, "--host",
                    flags.host, "--grpc-port", absl::StrCat(flags.grpc_port),
                    "--port", absl::StrCat(flags.http_port), "--internal-port",
                    absl::StrCat(ports.internal), "--admin-port",
                    absl::StrCat(ports.admin)}};
  router.argv.insert(router.argv.end(), common.begin(), common.end());
  router.argv.insert(router.argv.end(), flags.router_arguments.begin(),
                     flags.router_arguments.end());
  supervisor->Add(std::move(router));

  const int cores = AvailableCpus();
  // One of two cores does not read all that memory gives, and prefill and
  // decoding take turns more often than not: there each has both.
  const int at_once = cores > 2 ? flags.prefill + flags.decode
                                : std::max(flags.prefill, flags.decode);
  const int threads = flags.threads > 0 ? flags.threads
                                        : std::clamp(cores / at_once, 1,
                                                     kernels::kMaxCpuThreads);
  const auto add_worker = [&](const std::string& name,
                              const std::string& binary,
                              const std::vector<std::string>& more) {
    ChildSpec worker{
        name,
        {SiblingBinary(binary), flags.model_dir, "--router",
         absl::StrCat("127.0.0.1:", ports.internal), "--worker-id", name,
         "--threads", absl::StrCat(threads),
         // TANDEM_HOST and the ports are the router's.
         "--host", "127.0.0.1", "--grpc-port", "0", "--port", "0"}};
    worker.argv.insert(worker.argv.end(), common.begin(), common.end());
    worker.argv.insert(worker.argv.end(), flags.worker_arguments.begin(),
                       flags.worker_arguments.end());
    worker.argv.insert(worker.argv.end(), more.begin(), more.end());
    supervisor->Add(std::move(worker));
  };
  for (int i = 0; i < flags.prefill; ++i) {
    add_worker(absl::StrCat("prefill-", i), "tandem-prefill", {});
  }
  for (int i = 0; i < flags.decode; ++i) {
    add_worker(absl::StrCat("decode-", i), "tandem-decode",
               flags.decode_arguments);
  }
}

bool AllReady(const ServeFlags& flags,
              const v1::GetClusterStateResponse& state) {
  int prefill = 0, decode = 0;
  for (const v1::WorkerStatus& worker : state.workers()) {
    if (!worker.placeable()) continue;
    prefill += worker.hello().role() == v1::WORKER_ROLE_PREFILL;
    decode += worker.hello().role() == v1::WORKER_ROLE_DECODE;
  }
  return prefill >= flags.prefill && decode >= flags.decode;
}

// What workers compute on and with. The same is said once.
std::string WorkerLines(const v1::GetClusterStateResponse& state) {
  std::set<std::string> devices;
  std::set<std::string> formats;
  std::set<std::string> ways;
  bool hands_over = false;
  int64_t decode_tokens = 0;
  int max_len = 0;
  std::string kv;
  for (const v1::WorkerStatus& worker : state.workers()) {
    const v1::WorkerHello& hello = worker.hello();
    devices.insert(hello.device());
    formats.insert(hello.weight_format());
    if (hello.role() != v1::WORKER_ROLE_DECODE) {
      hands_over = true;
      ways.insert(absl::StrJoin(hello.ways(), ", else "));
      continue;
    }
    decode_tokens += int64_t{hello.num_blocks()} * hello.block_size();
    max_len = hello.max_model_len();
    kv = hello.kv_dtype();
  }
  std::string lines = absl::StrFormat("  device    %s\n  weights   %s\n",
                                      absl::StrJoin(devices, "; "),
                                      absl::StrJoin(formats, "; "));
  absl::StrAppendFormat(
      &lines, "  KV        %d tokens in %s for decoding, %d sequences of %d\n",
      decode_tokens, kv, max_len > 0 ? decode_tokens / max_len : 0, max_len);
  if (hands_over) {
    absl::StrAppend(&lines, "  handoff   ", absl::StrJoin(ways, "; "), "\n");
  }
  return lines;
}

double StartupSeconds(const v1::WorkerStatus& worker) {
  double sum = 0;
  for (const v1::StartupPhase& phase : worker.hello().startup()) {
    sum += phase.seconds();
  }
  return sum;
}

// Of the worker that took longest: the others were ready before it.
std::string StartupTable(const v1::GetClusterStateResponse& state) {
  const auto slowest =
      std::max_element(state.workers().begin(), state.workers().end(),
                       [](const auto& one, const auto& other) {
                         return StartupSeconds(one) < StartupSeconds(other);
                       });
  if (slowest == state.workers().end()) return "";
  std::string table = absl::StrCat("  startup   of ",
                                   slowest->hello().worker().worker_id(), "\n");
  for (const v1::StartupPhase& phase : slowest->hello().startup()) {
    absl::StrAppendFormat(&table, "            %-12s %6.2f s\n", phase.name(),
                          phase.seconds());
  }
  return table;
}

// What clients need to be let in by a cluster under TLS.
std::string TlsWords(const ServeFlags& flags) {
  std::vector<std::string> words;
  AddTls(flags, &words);
  return words.empty() ? "" : absl::StrCat(" ", absl::StrJoin(words, " "));
}

std::string ReadyBlock(const ServeFlags& flags, const Ports& ports,
                       const v1::GetClusterStateResponse& state,
                       double seconds) {
  // What can be dialled, where every address is listened on.
  const bool any = flags.host == "0.0.0.0" || flags.host == "::";
  const std::string host = any ? "127.0.0.1" : Bracketed(flags.host);
  std::string block = absl::StrFormat(
      "\nTandem is ready (%.1f s): %s, %d prefill and %d decode worker%s\n",
      seconds, state.model(), flags.prefill, flags.decode,
      flags.decode == 1 ? "" : "s");
  absl::StrAppend(&block, StartupTable(state), WorkerLines(state));
  absl::StrAppendFormat(&block, "  gRPC      %s:%d\n", host, flags.grpc_port);
  const std::string url = absl::StrFormat(
      "http%s://%s:%d", flags.public_tls ? "s" : "", host, flags.http_port);
  absl::StrAppend(&block, "  OpenAI    ", url, "/v1, beside it /metrics, ",
                  "/health\n");
  if (flags.webui) absl::StrAppend(&block, "  page      ", url, "/\n");
  absl::StrAppendFormat(&block, "  admin     127.0.0.1:%d\n", ports.admin);
  const std::string at_router =
      flags.grpc_port == 50051 && !flags.public_tls
          ? ""
          : absl::StrFormat(" --router %s%s:%d",
                            flags.public_tls ? "https://" : "", host,
                            flags.grpc_port);
  absl::StrAppend(&block, "  try       curl -N ", url,
                  "/v1/completions -H content-type:application/json \\\n",
                  flags.asks_for_key
                      ? "              -H \"Authorization: Bearer "
                        "$TANDEM_API_KEY\" \\\n"
                      : "",
                  "              -d '{\"prompt\": \"Once upon a time\", "
                  "\"stream\": true}'\n");
  const std::string tls = TlsWords(flags);
  absl::StrAppend(&block, "            tandem generate", at_router,
                  flags.public_tls ? "" : tls,
                  " \"Once upon a time\"\n            tandem status --admin "
                  "127.0.0.1:",
                  ports.admin, tls, "\n");
  return block;
}

// The first port that the system gives by itself.
int FirstEphemeralPort() {
  int first = 0;
  std::ifstream range("/proc/sys/net/ipv4/ip_local_port_range");
  return range >> first ? first : 32768;
}

absl::StatusOr<Ports> ChoosePorts(const ServeFlags& flags) {
  // None that another listener of the same router is about to take.
  std::set<int> ours = {flags.grpc_port, flags.http_port, flags.admin_port};
  const absl::StatusOr<int> internal = OwnPort(&ours);
  if (!internal.ok()) return internal.status();
  if (flags.admin_port != 0) return Ports{*internal, flags.admin_port};
  // Where `tandem status` looks, unless another cluster is there.
  absl::StatusOr<int> admin = ours.contains(kAdminPort)
                                  ? OwnPort(&ours)
                                  : FreePort("127.0.0.1", kAdminPort);
  if (!admin.ok()) admin = OwnPort(&ours);
  if (!admin.ok()) return admin.status();
  return Ports{*internal, *admin};
}

// The router first, since what it accepted still needs the workers.
void StopAll(const ServeFlags& flags, Supervisor* supervisor) {
  // It may be without end, which no clock can add.
  const milliseconds grace = absl::ToChronoMilliseconds(
      std::min(flags.shutdown_timeout, absl::Hours(24 * 365)) +
      absl::Seconds(2));
  const auto at_once = [] { return signals_seen > 1; };
  for (const char* const role : {"router", "prefill", "decode"}) {
    if (at_once()) break;
    supervisor->Stop(role, grace, at_once);
  }
  supervisor->KillAll();
}

}  // namespace

absl::StatusOr<int> OwnPort(std::set<int>* ours) {
  constexpr int kBegin = 20000, kEnd = 32000, kTries = 200;
  const int below = std::min(kEnd, FirstEphemeralPort());
  for (int tries = 0;; ++tries) {
    const bool any = tries >= kTries || below <= kBegin;
    const int wanted =
        any ? 0 : kBegin + (getpid() * 7 + tries * 61) % (below - kBegin);
    absl::StatusOr<int> port = FreePort("127.0.0.1", wanted);
    if (port.ok() ? ours->insert(*port).second : any) return port;
  }
}

absl::StatusOr<int> FreePort(const std::string& host, int wanted) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), absl::StrCat(wanted).c_str(), &hints, &found) !=
      0) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", host, "' is no address of this machine"));
  }
  int port = 0;
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  // As servers bind: what waits in TIME_WAIT is free.
  const int yes = 1;
  if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (fd >= 0 && bind(fd, found->ai_addr, found->ai_addrlen) == 0) {
    sockaddr_storage bound;
    socklen_t length = sizeof bound;
    char service[16];
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&bound), length, nullptr, 0,
                    service, sizeof service, NI_NUMERICSERV) == 0) {
      port = std::atoi(service);
    }
  }
  if (fd >= 0) close(fd);
  freeaddrinfo(found);
  if (port == 0) {
    return absl::UnavailableError(
        wanted != 0 ? absl::StrCat("port ", wanted, " of ", host, " is taken")
                    : absl::StrCat("no free port to be had on ", host));
  }
  return port;
}

absl::StatusOr<int> Serve(const ServeFlags& flags) {
  absl::StatusOr<Ports> ports = ChoosePorts(flags);
  if (!ports.ok()) return ports.status();
  InstallHandlers();
  absl::Status status =
      InitLog({.format = flags.json_log ? "json" : "text", .role = "serve"});
  if (!status.ok()) return status;
  Supervisor supervisor{Printer(flags.json_log)};
  supervisor.Forward(SIGUSR1);  // the children's flight records are asked for
  AddChildren(flags, *ports, &supervisor);
  status = supervisor.StartAll();
  if (!status.ok()) return status;

  const ConnectFlags admin{absl::StrCat("127.0.0.1:", ports->admin),
                           flags.tls_cert, flags.tls_key, flags.tls_ca};
  const auto started = steady_clock::now();
  auto next_look = started + milliseconds(100);
  bool ready = false;
  while (signals_seen == 0) {
    status = supervisor.Poll(milliseconds(ready ? 200 : 50));
    if (!status.ok()) {
      supervisor.KillAll();
      return status;
    }
    if (ready || steady_clock::now() < next_look) continue;
    next_look = steady_clock::now() + milliseconds(100);
    const auto state = FetchClusterState(admin);
    if (!state.ok() || !AllReady(flags, *state)) continue;
    ready = true;
    const std::chrono::duration<double> took = steady_clock::now() - started;
    std::cout << ReadyBlock(flags, *ports, *state, took.count()) << std::flush;
  }
  if (flags.json_log) {
    LogInfo("draining");
  } else {
    std::cerr << "\nDraining; press Ctrl-C again to stop at once.\n";
  }
  StopAll(flags, &supervisor);
  return 128 + last_signal;
}

}  // namespace tandem::cli
