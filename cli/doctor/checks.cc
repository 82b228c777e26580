// SPDX-License-Identifier: Apache-2.0
// The checks of this machine, a model and certificates.
#include <fcntl.h>
#include <netdb.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cli/doctor/doctor.h"
#include "cli/plan/command.h"
#include "cli/version.h"
#include "common/cpu_limits.h"
#include "common/progress.h"
#include "common/rpc/credentials.h"
#include "common/rpc/identity.h"
#include "engine/safetensors.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace tandem::doctor {
namespace {

constexpr int64_t kSharedMemory = int64_t{64} << 20;
constexpr absl::Duration kSoon = absl::Hours(24 * 14);
constexpr int kConnectMs = 2000;

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

absl::Time TimeOf(const ASN1_TIME* time) {
  tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InfinitePast();
  return absl::FromTM(parts, absl::UTCTimeZone());
}

}  // namespace

void CheckHost(Checks* checks) {
  const cli::VersionInfo info = cli::GetVersionInfo();
  checks->push_back(
      CpuHasFma()
          ? Check{Verdict::kOk, "cpu",
                  absl::StrCat(info.cpu, ", ", info.cpus, " in use, ",
                               absl::StrJoin(info.cpu_features, " "))}
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
  input.memory_bytes = plan::AvailableMemory();
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
    const std::unique_ptr<BIO, int (*)(BIO*)> text(
        BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free);
    const std::unique_ptr<X509, void (*)(X509*)> certificate(
        PEM_read_bio_X509(text.get(), nullptr, nullptr, nullptr), X509_free);
    if (certificate == nullptr) {
      checks->push_back({Verdict::kFail, "tls", path + " is no certificate"});
      return;
    }
    const absl::Time begin = TimeOf(X509_get0_notBefore(certificate.get()));
    const absl::Time end = TimeOf(X509_get0_notAfter(certificate.get()));
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
    checks->push_back({end - now < kSoon ? Verdict::kWarn : Verdict::kOk, "tls",
                       absl::StrCat(path, " is valid until ", until, roles,
                                    end - now < kSoon ? ": renew it" : "")});
  };
  if (!read->cert.empty()) check(read->cert, tls.cert, read->mutual());
  if (!read->ca.empty()) check(read->ca, tls.ca, false);
}

std::string Reach(const std::string& endpoint) {
  const absl::StatusOr<Endpoint> parsed = ParseEndpoint(endpoint);
  if (!parsed.ok()) return Message(parsed.status());
  const auto address =
      Resolve(parsed->host, absl::StrCat(parsed->port), /*passive=*/false);
  if (address == nullptr) return absl::StrCat("no host '", parsed->host, "'");
  const int fd =
      socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return std::strerror(errno);
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
  close(fd);
  return error == 0 ? "" : std::strerror(error);
}

}  // namespace tandem::doctor
