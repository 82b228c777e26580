// SPDX-License-Identifier: Apache-2.0
// The checks of a running cluster, from what its router tells of it.
#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/doctor/doctor.h"
#include "common/fingerprint_words.h"
#include "common/flags.h"
#include "common/rpc/credentials.h"

namespace tandem::doctor {
namespace {

// A load report comes four times a second.
constexpr double kSilentSeconds = 2;
constexpr double kFull = 0.95;
// One that is turned away comes again within 6.25 s.
constexpr double kTriesAgainSeconds = 10;
constexpr char kNumerics[] = "numerics";
constexpr size_t kLongest = 64;  // of a part of the fingerprint; of hashes all

double Seconds(const google::protobuf::Duration& value) {
  return static_cast<double>(value.seconds()) + value.nanos() * 1e-9;
}

// Fields of the fingerprint that workers differ in, with what differs of both
// values.
void CompareWorkers(const v1::GetClusterStateResponse& state, Checks* checks) {
  std::map<std::string, std::set<std::string>> values;
  uint32_t least = 0, most = UINT32_MAX;
  bool mixed = true;
  for (const v1::WorkerStatus& worker : state.workers()) {
    for (const auto& [field, value] : worker.hello().fingerprint()) {
      values[field].insert(value);
    }
    mixed = mixed && worker.hello().mixed_numerics();
    least = std::max(least, worker.hello().protocol_min());
    most = std::min(most, worker.hello().protocol_max());
  }
  if (state.workers_size() < 2) return;
  bool equal = true;
  std::string but;
  for (const auto& [field, different] : values) {
    if (different.size() < 2) continue;
    if (field == kNumerics && mixed) {
      but =
          " but for numerics, as --mixed-numerics allows: an answer may depend "
          "on the workers that compute it";
      continue;
    }
    equal = false;
    const FingerprintWords words =
        DifferingWords(*different.begin(), *different.rbegin(), kLongest);
    checks->push_back(
        {Verdict::kFail, "fingerprint",
         absl::StrCat(field, " differs: ", words.a, " and ", words.b,
                      words.hint,
                      field == kNumerics
                          ? "; start all workers with the same formats on the "
                            "same kind of device, or all with --mixed-numerics"
                          : "; start all workers with one model and one "
                            "build")});
  }
  if (equal) {
    checks->push_back(
        {Verdict::kOk, "fingerprint", "equal on all workers" + but});
  }
  checks->push_back(
      least <= most
          ? Check{Verdict::kOk, "protocol",
                  absl::StrCat("version ", most, " on all workers")}
          : Check{Verdict::kFail, "protocol",
                  absl::StrCat("one worker needs ", least, ", another knows ",
                               most, ": upgrade the older one")});
}

// What to do about a worker that gets nothing new.
std::string Remedy(const std::string& reason) {
  if (reason == "cordoned") return "; `tandem uncordon` puts it back";
  if (absl::StartsWith(reason, "avoided")) {
    return "; calls to it fail: look at its last log line and at the network "
           "between it and the router";
  }
  return "";
}

void CheckWorker(const v1::WorkerStatus& worker, const std::string& why,
                 Checks* checks) {
  const v1::WorkerHello& hello = worker.hello();
  const std::string& name = hello.worker().worker_id();
  const std::string& endpoint = hello.worker().endpoint();
  if (!why.empty()) {
    checks->push_back(
        {Verdict::kFail, name,
         absl::StrCat(endpoint, " cannot be reached from here (", why,
                      "): check --advertise-host and the network")});
  } else if (worker.has_load_age() &&
             Seconds(worker.load_age()) > kSilentSeconds) {
    checks->push_back(
        {Verdict::kWarn, name,
         absl::StrFormat("has said nothing for %.1f s: it stands still, or the "
                         "network to it does",
                         Seconds(worker.load_age()))});
  } else if (!worker.placeable()) {
    checks->push_back({Verdict::kWarn, name,
                       absl::StrCat("gets no new requests: ", worker.reason(),
                                    Remedy(worker.reason()))});
  } else {
    checks->push_back({Verdict::kOk, name, "ready at " + endpoint});
  }
  if (worker.load().slabs_quarantined() > 0) {
    checks->push_back(
        {Verdict::kWarn, name,
         absl::StrCat("holds back ", worker.load().slabs_quarantined(),
                      " slabs of a broken link; where that does not pass "
                      "within 30 s its process ends by itself")});
  }
}

// Whether requests wait, and for what.
void CheckRoom(const v1::GetClusterStateResponse& state, Checks* checks) {
  int decode = 0, full = 0;
  for (const v1::WorkerStatus& worker : state.workers()) {
    const v1::WorkerLoad& load = worker.load();
    const double used = load.blocks_reserved() + load.blocks_live();
    const double all = used + load.blocks_free() + load.blocks_cached();
    if (worker.hello().role() != v1::WORKER_ROLE_DECODE || all == 0) continue;
    ++decode;
    // The router knows of any reason, once it was told it.
    full += worker.full() || used / all > kFull ||
            load.running() + load.waiting() >= worker.hello().max_num_seqs();
  }
  const int queued = state.requests().queued();
  if (decode > 0 && full == decode) {
    checks->push_back(
        {Verdict::kWarn, "room",
         absl::StrCat("every decode worker is full, and ", queued,
                      " requests wait: add decode workers, or give them more "
                      "KV (--kv-cache-dtype, memory) or slots "
                      "(--max-num-seqs, --max-requests)")});
  } else if (queued > 0 && decode > 0) {
    checks->push_back(
        {Verdict::kWarn, "room",
         absl::StrCat(queued,
                      " requests wait though a decode worker seems to have "
                      "room: they may be too long for it, or need an adapter "
                      "or a version that it has not; where they move on, it "
                      "was full a moment ago")});
  } else if (decode > 0) {
    checks->push_back({Verdict::kOk, "room", "nothing waits"});
  }
}

// A while after its last try it may well have gone.
void CheckRejected(const v1::RejectedWorker& worker, Checks* checks) {
  const double age = Seconds(worker.age());
  const bool gone = age > kTriesAgainSeconds;
  checks->push_back(
      {gone ? Verdict::kWarn : Verdict::kFail, worker.worker_id(),
       absl::StrFormat("was rejected: %s (%.0f s ago%s)", worker.reason(), age,
                       gone ? ", and has not come again" : "")});
}

void CheckPairs(const v1::GetClusterStateResponse& state, Checks* checks) {
  for (const v1::AvoidedPair& pair : state.avoided_pairs()) {
    const std::string names = absl::StrCat(
        pair.prefill_worker_id(), " and ", pair.decode_worker_id(),
        pair.way().empty() ? "" : absl::StrCat(" by ", pair.way()));
    checks->push_back(
        pair.has_retry_in()
            ? Check{Verdict::kWarn, "pair",
                    absl::StrFormat(
                        "%s is tried again in %.1f s, after: %s; where that "
                        "stays, look for `handoff failed` with this pair in "
                        "both logs, and at the network between them",
                        names, Seconds(pair.retry_in()), pair.reason())}
            : Check{Verdict::kFail, "pair",
                    absl::StrCat(names, " do not fit: ", pair.reason(),
                                 "; start both with one model, one build and "
                                 "the same formats")});
  }
}

}  // namespace

void CheckCluster(const v1::GetClusterStateResponse& state,
                  const std::function<std::string(const std::string&)>& reach,
                  Checks* checks) {
  bool decode = false, takes_requests = false;
  for (const v1::WorkerStatus& worker : state.workers()) {
    if (worker.hello().role() == v1::WORKER_ROLE_DECODE) {
      decode = true;
      takes_requests = takes_requests || worker.placeable();
    }
    CheckWorker(worker, reach(worker.hello().worker().endpoint()), checks);
  }
  for (const v1::RejectedWorker& worker : state.rejected()) {
    CheckRejected(worker, checks);
  }
  if (!decode) {
    checks->push_back({Verdict::kFail, "workers",
                       "no decode worker is registered: start one with "
                       "--router at this router's internal port"});
  } else if (!takes_requests) {
    checks->push_back({Verdict::kFail, "workers",
                       "no decode worker takes new requests: see each one's "
                       "line, or start another"});
  }
  if (state.draining()) {
    checks->push_back({Verdict::kWarn, "router",
                       "drains: it takes no new request and ends by itself"});
  }
  CheckRoom(state, checks);
  CheckPairs(state, checks);
  CompareWorkers(state, checks);
}

void CheckProgress(const v1::GetClusterStateResponse& before,
                   const v1::GetClusterStateResponse& after, Checks* checks) {
  for (const v1::WorkerStatus& worker : before.workers()) {
    const std::string& name = worker.hello().worker().worker_id();
    for (const v1::WorkerStatus& now : after.workers()) {
      if (now.hello().worker().worker_id() != name ||
          now.hello().worker().incarnation() !=
              worker.hello().worker().incarnation() ||
          worker.load().running() == 0 || now.load().running() == 0 ||
          now.load().steps() != worker.load().steps()) {
        continue;
      }
      checks->push_back(
          {Verdict::kWarn, name,
           absl::StrCat("has ", now.load().running(),
                        " sequences and finished no step meanwhile: where "
                        "that stays it is wedged; /livez says so in the end, "
                        "and a restart moves its sequences elsewhere")});
    }
  }
}

void CheckPlaintext(const v1::GetClusterStateResponse& state, bool tls,
                    Checks* checks) {
  if (tls) return;
  for (const v1::WorkerStatus& worker : state.workers()) {
    const auto endpoint = ParseEndpoint(worker.hello().worker().endpoint());
    if (!endpoint.ok() || rpc::OnLoopback(endpoint->host)) continue;
    checks->push_back(
        {Verdict::kWarn, "plaintext",
         absl::StrCat(worker.hello().worker().worker_id(), " at ",
                      endpoint->ToString(),
                      " and no --tls-* here: if the cluster has none either, "
                      "whoever reaches its ports may speak as one of it; see "
                      "scripts/dev-ca.sh and --tls-cert")});
    return;
  }
}

void CheckProcess(const std::string& name, const ProcessFacts& facts,
                  absl::Time now, Checks* checks) {
  if (!facts.answers) {
    checks->push_back(
        {Verdict::kWarn, name,
         "its HTTP port does not answer from here: /livez, descriptors, clock "
         "and certificate are not checked; let this machine reach it, or ask "
         "from one that does"});
  }
  if (facts.answers && !facts.counts) {
    checks->push_back(
        {Verdict::kWarn, name,
         "its /livez answers from here and its /metrics does not: descriptors "
         "and certificate are not checked; look at what stands between, and "
         "ask again"});
  }
  if (!facts.stuck.empty()) {
    checks->push_back({Verdict::kFail, name,
                       absl::StrCat("is not alive: ", facts.stuck,
                                    "; restart it, its sequences go on "
                                    "elsewhere")});
  }
  if (facts.max_fds > 0 && facts.open_fds > 0.8 * facts.max_fds) {
    checks->push_back(
        {Verdict::kFail, name,
         absl::StrFormat("has %.0f of %.0f file descriptors open: raise the "
                         "hard limit (ulimit -Hn, LimitNOFILE=)",
                         facts.open_fds, facts.max_fds)});
  }
  if (facts.date) {
    const absl::Duration apart = *facts.date - now;
    if (absl::AbsDuration(apart) > kClockTolerance) {
      checks->push_back(
          {Verdict::kFail, name,
           absl::StrFormat("its clock is %.0f s %s of this machine's: run an "
                           "NTP client on both, or certificates and logs "
                           "disagree",
                           absl::ToDoubleSeconds(absl::AbsDuration(apart)),
                           apart > absl::ZeroDuration() ? "ahead" : "behind")});
    }
  }
  if (facts.certificate_expiry) {
    const absl::Duration left = *facts.certificate_expiry - now;
    if (left < kRenewBefore) {
      checks->push_back(
          {left < absl::ZeroDuration() ? Verdict::kFail : Verdict::kWarn, name,
           absl::StrCat(
               "the certificate that it uses ",
               left < absl::ZeroDuration() ? "expired " : "expires ",
               absl::FormatTime(*facts.certificate_expiry, absl::UTCTimeZone()),
               ": renew --tls-cert; it is read without a restart")});
    }
  }
}

}  // namespace tandem::doctor
