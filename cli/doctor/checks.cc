// SPDX-License-Identifier: Apache-2.0
// The checks of this machine, a model and certificates.
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cli/doctor/doctor.h"
#include "cli/plan/command.h"
#include "cli/version.h"
#include "common/cpu_limits.h"
#include "common/memory_limit.h"
#include "common/progress.h"
#include "common/rpc/certificate.h"
#include "common/rpc/channel.h"
#include "common/rpc/credentials.h"
#include "common/rpc/identity.h"
#include "engine/checkpoint/safetensors.h"
#include "handoff/nccl/loader.h"
#include "kernels/cuda/loader.h"
#include "tandem/v1/admin.grpc.pb.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace tandem::doctor {
namespace {

constexpr int64_t kSharedMemory = int64_t{64} << 20;
constexpr int kConnectMs = 2000;
constexpr size_t kMostAnswer = 4 << 20;
// Fewer is what a shell allows where nobody raised it.
constexpr rlim_t kDescriptors = 4096;

std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

std::string Size(int64_t bytes) {
  return HumanBytes(static_cast<double>(bytes));
}

// The first address of host and port, or null.
std::unique_ptr<addrinfo, void (*)(addrinfo*)> Resolve(const std::string& host,
                                                       const std::string& port,
                                                       bool passive) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = passive ? AI_PASSIVE : 0;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) {
    found = nullptr;
  }
  return {found, [](addrinfo* all) {
            if (all != nullptr) freeaddrinfo(all);
          }};
}

}  // namespace

void CheckHost(Checks* checks) {
  const cli::VersionInfo info = cli::GetVersionInfo();
  const std::string faster(FasterActivationDtype());
  checks->push_back(
      CpuHasFma()
          ? Check{Verdict::kOk, "cpu",
                  absl::StrCat(info.cpu, ", ", info.cpus, " in use, ",
                               absl::StrJoin(info.cpu_features, " "),
                               faster.empty()
                                   ? ""
                                   : ": try workers' --activation-dtype ",
                               faster)}
          : Check{Verdict::kFail, "cpu",
                  absl::StrCat(info.cpu,
                               " has no AVX2 with FMA, which the kernels need: "
                               "take another machine")});
  struct statvfs figures {};
  const bool mounted = statvfs("/dev/shm", &figures) == 0;
  const auto free = static_cast<int64_t>(figures.f_bavail * figures.f_frsize);
  const bool cuda = info.backends.size() > 1;
  checks->push_back(
      mounted && free >= kSharedMemory
          ? Check{Verdict::kOk, "/dev/shm", Size(free) + " free"}
          : Check{cuda ? Verdict::kWarn : Verdict::kOk, "/dev/shm",
                  absl::StrCat(mounted ? Size(free) + " free" : "not mounted",
                               ": NCCL between GPUs wants 64 MiB or more "
                               "(--shm-size); CPUs do without")});
  timex clock{};
  const int state = adjtimex(&clock);
  const bool unsynchronised = state >= 0 && (clock.status & STA_UNSYNC) != 0;
  checks->push_back({unsynchronised ? Verdict::kWarn : Verdict::kOk, "clock",
                     unsynchronised
                         ? "is not synchronised: run an NTP client, or "
                           "certificates and logs of several machines disagree"
                         : "is synchronised, as far as the kernel says"});
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  const bool few = files.rlim_max < kDescriptors;
  checks->push_back(
      {few ? Verdict::kWarn : Verdict::kOk, "descriptors",
       files.rlim_max == RLIM_INFINITY
           ? "without a limit"
           : absl::StrCat(files.rlim_max, " file descriptors at most",
                          few ? ": connections take one each and a port that "
                                "runs out goes deaf; raise the hard limit "
                                "(ulimit -Hn, LimitNOFILE=)"
                              : "")});
}

void CheckGpu(Checks* checks) {
  const std::vector<std::string> parts = cli::GetVersionInfo().backends;
  const auto has = [&](const char* part) {
    return std::find(parts.begin(), parts.end(), part) != parts.end();
  };
  if (!has("cuda")) return;
  const auto gpu = kernels::cuda::OpenDevice(kernels::cuda::DeviceOptions());
  if (!gpu.ok() || !gpu->is_cuda()) {
    checks->push_back(
        {Verdict::kWarn, "gpu",
         absl::StrCat(gpu.ok() ? gpu->reason : Message(gpu.status()),
                      ": workers here compute on the CPU unless that is "
                      "mended")});
    return;
  }
  checks->push_back({Verdict::kOk, "gpu", gpu->backend->description()});
  if (!has("nccl")) return;
  handoff::nccl::LibraryOptions options;
  options.device = gpu->ordinal;
  const auto nccl = handoff::nccl::OpenNccl(options);
  checks->push_back(
      nccl.ok() ? Check{Verdict::kOk, "nccl", "loads"}
                : Check{Verdict::kWarn, "nccl",
                        absl::StrCat(Message(nccl.status()),
                                     ": KV moves by gRPC between GPUs")});
}

void CheckPort(const std::string& host, int port, const std::string& flag,
               Checks* checks) {
  Check check{Verdict::kOk, absl::StrCat("port ", port), "free on " + host};
  const auto address = Resolve(host, absl::StrCat(port), /*passive=*/true);
  const int fd = address == nullptr ? -1
                                    : socket(address->ai_family,
                                             SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    check = {Verdict::kFail, check.what,
             absl::StrCat("'", host,
                          "' is no address of this machine: "
                          "change --host")};
  } else {
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, address->ai_addr, address->ai_addrlen) != 0) {
      check = {
          Verdict::kFail, check.what,
          absl::StrCat(std::strerror(errno), " on ", host,
                       ": end what listens there, or take another --", flag)};
    }
    close(fd);
  }
  checks->push_back(std::move(check));
}

void CheckModel(const std::string& directory, Checks* checks) {
  const auto add = [&](const char* what, const absl::Status& status,
                       const std::string& fine, Verdict worst) {
    checks->push_back(status.ok() ? Check{Verdict::kOk, what, fine}
                                  : Check{worst, what, Message(status)});
  };
  plan::PlanInput input;
  input.model = directory;
  const absl::Status config = plan::ReadModel(directory, &input);
  add("config", config, input.spec.architecture, Verdict::kFail);
  const auto checkpoint = engine::Checkpoint::Open(directory);
  add("weights", checkpoint.status(),
      checkpoint.ok()
          ? absl::StrCat(checkpoint->tensors().size(), " tensors, ",
                         Size(static_cast<int64_t>(checkpoint->total_bytes())))
          : "",
      Verdict::kFail);
  const auto tokenizer = text::Tokenizer::Load(directory);
  add("tokenizer", tokenizer.status(), "loads", Verdict::kFail);
  const auto chat = text::ChatTemplate::Load(directory);
  add("chat", chat.status(), "template compiles", Verdict::kWarn);
  if (!config.ok()) return;
  input.memory_bytes = AvailableMemory();
  const absl::StatusOr<plan::Plan> plan = plan::MakePlan(input);
  add("memory", plan.status(),
      plan.ok() ? absl::StrCat(Size(input.memory_bytes), " available, weights ",
                               Size(plan->weight_bytes), ", contexts of ",
                               plan->max_model_len, " fit")
                : "",
      Verdict::kFail);
}

void CheckCertificates(const TlsFlags& tls, absl::Time now, Checks* checks) {
  if (tls.cert.empty() && tls.key.empty() && tls.ca.empty()) return;
  const auto read = rpc::LoadCredentials(tls.cert, tls.key, tls.ca);
  if (!read.ok()) {
    checks->push_back({Verdict::kFail, "tls", Message(read.status())});
    return;
  }
  const auto check = [&](const std::string& pem, const std::string& path,
                         bool names_role) {
    const auto validity = rpc::ValidityOf(pem);
    if (!validity.ok()) {
      checks->push_back({Verdict::kFail, "tls",
                         absl::StrCat(path, " ", Message(validity.status()))});
      return;
    }
    const auto [begin, end] = *validity;
    const std::string until = absl::FormatTime(end, absl::UTCTimeZone());
    if (now < begin || now > end) {
      checks->push_back(
          {Verdict::kFail, "tls",
           absl::StrCat(path, now > end ? " expired " : " is not valid yet, ",
                        now > end ? until : "but until " + until,
                        ": renew it, or set the clock")});
      return;
    }
    std::string roles;
    if (names_role) {
      const auto identities = rpc::IdentitiesIn(pem);
      if (!identities.ok()) {
        checks->push_back(
            {Verdict::kFail, "tls",
             absl::StrCat(path, ": ", Message(identities.status()))});
        return;
      }
      for (const rpc::Identity& identity : *identities) {
        absl::StrAppend(&roles, roles.empty() ? ", as " : " and ",
                        identity.ToString());
      }
    }
    checks->push_back(
        {end - now < kRenewBefore ? Verdict::kWarn : Verdict::kOk, "tls",
         absl::StrCat(path, " is valid until ", until, roles,
                      end - now < kRenewBefore ? ": renew it" : "")});
  };
  if (!read->cert.empty()) check(read->cert, tls.cert, read->mutual());
  if (!read->ca.empty()) check(read->ca, tls.ca, false);
  if (!read->mutual()) return;
  const absl::Status issued = rpc::CheckIssuer(read->cert, read->ca);
  if (issued.ok()) return;
  checks->push_back(
      {Verdict::kFail, "tls",
       absl::StrCat(tls.cert, " is of no authority of ", tls.ca, " (",
                    Message(issued),
                    "): every peer with that --tls-ca refuses it; have it "
                    "issued by one of them, with the certificates between in "
                    "the same file")});
}

namespace {

// A connected socket, or -1 and why not.
int Dial(const std::string& endpoint, std::string* why) {
  const auto fail = [why](std::string reason) {
    *why = std::move(reason);
    return -1;
  };
  const absl::StatusOr<Endpoint> parsed = ParseEndpoint(endpoint);
  if (!parsed.ok()) return fail(Message(parsed.status()));
  const auto address =
      Resolve(parsed->host, absl::StrCat(parsed->port), /*passive=*/false);
  if (address == nullptr) {
    return fail(absl::StrCat("no host '", parsed->host, "'"));
  }
  const int fd =
      socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return fail(std::strerror(errno));
  int error = 0;
  if (connect(fd, address->ai_addr, address->ai_addrlen) != 0) {
    error = errno;
    pollfd ready{fd, POLLOUT, 0};
    if (error == EINPROGRESS) {
      error = ETIMEDOUT;
      socklen_t length = sizeof error;
      if (poll(&ready, 1, kConnectMs) > 0) {
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
      }
    }
  }
  if (error == 0) return fd;
  close(fd);
  return fail(std::strerror(error));
}

// The whole answer to GET `path`, head included; empty: none in time.
std::string HttpGet(const std::string& endpoint, const std::string& path) {
  std::string why;
  const int fd = Dial(endpoint, &why);
  if (fd < 0) return "";
  const std::string request =
      absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: ", endpoint, "\r\n\r\n");
  std::string answer;
  char buffer[4096];
  if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) ==
      static_cast<ssize_t>(request.size())) {
    for (pollfd ready{fd, POLLIN, 0}; poll(&ready, 1, kConnectMs) > 0;) {
      const ssize_t size = recv(fd, buffer, sizeof buffer, 0);
      if (size <= 0 || answer.size() > kMostAnswer) break;
      answer.append(buffer, static_cast<size_t>(size));
    }
  }
  close(fd);
  return answer;
}

// The value of the first sample of metric `name`.
std::optional<double> Sample(const std::string& text, const std::string& name) {
  for (size_t at = text.find("\n" + name); at != std::string::npos;
       at = text.find("\n" + name, at + 1)) {
    const char next = text[at + 1 + name.size()];
    if (next != '{' && next != ' ') continue;
    const size_t end = text.find('\n', at + 1);
    const size_t blank = text.rfind(' ', end);
    double value = 0;
    if (absl::SimpleAtod(text.substr(blank + 1, end - blank - 1), &value)) {
      return value;
    }
  }
  return std::nullopt;
}

}  // namespace

std::string Reach(const std::string& endpoint) {
  std::string why;
  const int fd = Dial(endpoint, &why);
  if (fd >= 0) close(fd);
  return why;
}

std::string ReachByTls(const std::string& endpoint,
                       const rpc::Credentials& tls) {
  const std::string tcp = Reach(endpoint);
  if (!tcp.empty()) return tcp;
  const auto channel = rpc::MakeChannel(endpoint, tls);
  const auto deadline =
      std::chrono::system_clock::now() + std::chrono::milliseconds(kConnectMs);
  if (channel->WaitForConnected(deadline)) return "";
  // Never sent: only a call tells why there is no connection.
  grpc::ClientContext context;
  context.set_deadline(deadline + std::chrono::milliseconds(kConnectMs));
  v1::GetClusterStateResponse response;
  const grpc::Status status =
      v1::AdminService::NewStub(channel)->GetClusterState(
          &context, v1::GetClusterStateRequest(), &response);
  return absl::StrCat(
      "TLS: ", status.error_message(),
      "; check that both certificates are valid now, are of one authority "
      "and that this one names the host");
}

ProcessFacts AskProcess(const std::string& endpoint) {
  ProcessFacts facts;
  const std::string livez = HttpGet(endpoint, "/livez");
  const size_t body = livez.find("\r\n\r\n");
  facts.answers = body != std::string::npos;
  if (!facts.answers) return facts;
  if (absl::StrContains(livez.substr(0, livez.find('\r')), " 503")) {
    facts.stuck = std::string(absl::StripAsciiWhitespace(livez.substr(body)));
  }
  const size_t date = livez.find("\r\nDate: ");
  if (date < body) {
    absl::Time time;
    if (absl::ParseTime(
            "%a, %d %b %Y %H:%M:%S GMT",
            livez.substr(date + 8, livez.find('\r', date + 8) - date - 8),
            &time, nullptr)) {
      facts.date = time;
    }
  }
  const std::string metrics = HttpGet(endpoint, "/metrics");
  facts.counts =
      absl::StrContains(metrics.substr(0, metrics.find('\r')), " 200");
  facts.open_fds = Sample(metrics, "process_open_fds").value_or(0);
  facts.max_fds = Sample(metrics, "process_max_fds").value_or(0);
  if (const auto expiry =
          Sample(metrics, "tandem_tls_certificate_expiry_timestamp_seconds")) {
    facts.certificate_expiry = absl::UnixEpoch() + absl::Seconds(*expiry);
  }
  return facts;
}

}  // namespace tandem::doctor
