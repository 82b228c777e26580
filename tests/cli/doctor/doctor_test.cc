// SPDX-License-Identifier: Apache-2.0
// What is seeded into a cluster's state, or into what a process tells, `tandem
// doctor` names, with what to do.

#include "cli/doctor/doctor.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cli/status.h"
#include "common/http/server.h"
#include "tests/common/http/certificates.h"

namespace tandem::doctor {
namespace {

v1::WorkerStatus* Add(v1::GetClusterStateResponse* state, const char* id,
                      v1::WorkerRole role) {
  v1::WorkerStatus* const worker = state->add_workers();
  v1::WorkerHello* const hello = worker->mutable_hello();
  hello->mutable_worker()->set_worker_id(id);
  hello->mutable_worker()->set_incarnation(std::string(16, 'i'));
  hello->mutable_worker()->set_endpoint("127.0.0.1:7000");
  hello->set_role(role);
  (*hello->mutable_fingerprint())["weights"] = "w";
  hello->set_protocol_min(1);
  hello->set_protocol_max(1);
  hello->set_max_num_seqs(8);
  worker->set_placeable(true);
  worker->mutable_load_age();
  worker->mutable_load()->set_blocks_free(100);
  worker->mutable_load()->set_steps(7);
  return worker;
}

v1::GetClusterStateResponse Healthy() {
  v1::GetClusterStateResponse state;
  Add(&state, "p0", v1::WORKER_ROLE_PREFILL);
  Add(&state, "d0", v1::WORKER_ROLE_DECODE);
  return state;
}

Checks All(const v1::GetClusterStateResponse& state,
           const std::string& unreachable = "") {
  Checks checks;
  CheckCluster(
      state, [&](const std::string&) { return unreachable; }, &checks);
  CheckPlaintext(state, /*tls=*/false, &checks);
  return checks;
}

// Those that are not in order.
Checks Wrong(Checks checks) {
  std::erase_if(
      checks, [](const Check& check) { return check.verdict == Verdict::kOk; });
  return checks;
}

TEST(DoctorTest, AHealthyClusterIsInOrder) {
  EXPECT_EQ(ChecksText(Wrong(All(Healthy())), false), "");
  EXPECT_EQ(All(Healthy()).size(), 5u);  // two workers, room, and how they fit
}

struct Seed {
  const char* name;
  std::function<void(v1::GetClusterStateResponse*)> spoil;
  const char* what;    // of the one check
  const char* reason;  // in its text
  const char* remedy;  // likewise
};

TEST(DoctorTest, EachSeededReasonIsNamedWithARemedy) {
  using State = v1::GetClusterStateResponse;
  const Seed seeds[] = {
      {"a stuck pair",
       [](State* s) {
         v1::AvoidedPair* const pair = s->add_avoided_pairs();
         pair->set_prefill_worker_id("p0");
         pair->set_decode_worker_id("d0");
         pair->set_way("shm");
         pair->set_reason("no progress for 10 s");
         pair->mutable_retry_in()->set_seconds(3);
       },
       "pair", "p0 and d0 by shm is tried again in 3.0 s, after: no progress",
       "network between them"},
      {"a pair that does not fit",
       [](State* s) {
         v1::AvoidedPair* const pair = s->add_avoided_pairs();
         pair->set_prefill_worker_id("p0");
         pair->set_decode_worker_id("d0");
         pair->set_reason("fingerprint numerics: a != b");
       },
       "pair", "do not fit: fingerprint numerics", "one build"},
      {"different weights",
       [](State* s) {
         (*s->mutable_workers(1)
               ->mutable_hello()
               ->mutable_fingerprint())["weights"] = "v";
       },
       "fingerprint", "weights differs", "one model and one build"},
      {"words of a config",
       [](State* s) {
         for (const int i : {0, 1}) {
           (*s->mutable_workers(i)
                 ->mutable_hello()
                 ->mutable_fingerprint())["config"] =
               absl::StrCat("layers=12 rope=longrope factors=", i, " heads=8");
         }
       },
       "fingerprint",
       "config differs: factors=0 and factors=1 (is --max-model-len the same",
       "one model and one build"},
      {"different numerics",
       [](State* s) {
         s->mutable_workers(0)->mutable_hello()->set_mixed_numerics(true);
         (*s->mutable_workers(0)
               ->mutable_hello()
               ->mutable_fingerprint())["numerics"] = "cuda";
         (*s->mutable_workers(1)
               ->mutable_hello()
               ->mutable_fingerprint())["numerics"] = "cpu";
       },
       "fingerprint", "numerics differs: cpu and cuda", "--mixed-numerics"},
      {"protocol versions apart",
       [](State* s) {
         s->mutable_workers(1)->mutable_hello()->set_protocol_min(2);
         s->mutable_workers(1)->mutable_hello()->set_protocol_max(2);
       },
       "protocol", "one worker needs 2", "upgrade"},
      {"no room",
       [](State* s) {
         v1::WorkerLoad* const load = s->mutable_workers(1)->mutable_load();
         load->set_blocks_free(2);
         load->set_blocks_live(98);
         s->mutable_requests()->set_queued(5);
       },
       "room", "every decode worker is full, and 5", "--kv-cache-dtype"},
      {"no slot",
       [](State* s) { s->mutable_workers(1)->mutable_load()->set_running(8); },
       "room", "every decode worker is full", "--max-num-seqs"},
      {"a worker that refuses for another reason",
       [](State* s) {
         s->mutable_workers(1)->set_full(true);
         s->mutable_requests()->set_queued(5);
       },
       "room", "every decode worker is full, and 5", "--max-requests"},
      {"requests that nobody can take",
       [](State* s) { s->mutable_requests()->set_queued(1); }, "room",
       "1 requests wait though a decode worker seems to have room", "too long"},
      {"a worker that is avoided",
       [](State* s) {
         s->mutable_workers(0)->set_placeable(false);
         s->mutable_workers(0)->set_reason("avoided: connection refused");
       },
       "p0", "avoided: connection refused", "last log line"},
      {"a cordoned worker",
       [](State* s) {
         s->mutable_workers(0)->set_placeable(false);
         s->mutable_workers(0)->set_reason("cordoned");
       },
       "p0", "cordoned", "tandem uncordon"},
      {"a silent worker",
       [](State* s) {
         s->mutable_workers(0)->mutable_load_age()->set_seconds(3);
       },
       "p0", "has said nothing for 3.0 s", "network"},
      {"slabs in quarantine",
       [](State* s) {
         s->mutable_workers(1)->mutable_load()->set_slabs_quarantined(4);
       },
       "d0", "4 slabs of a broken link", "30 s"},
      {"a registration refused",
       [](State* s) {
         v1::RejectedWorker* const worker = s->add_rejected();
         worker->set_worker_id("d7");
         worker->set_reason("the certificate is of router");
       },
       "d7", "rejected: the certificate is of router (0 s ago)", ""},
      {"no decode worker", [](State* s) { s->mutable_workers()->RemoveLast(); },
       "workers", "no decode worker", "--router"},
      {"a router that drains", [](State* s) { s->set_draining(true); },
       "router", "drains", "ends by itself"},
      {"plain text beyond loopback",
       [](State* s) {
         s->mutable_workers(0)->mutable_hello()->mutable_worker()->set_endpoint(
             "10.0.0.3:7000");
       },
       "plaintext", "p0 at 10.0.0.3:7000", "--tls-cert"},
  };
  for (const Seed& seed : seeds) {
    v1::GetClusterStateResponse state = Healthy();
    seed.spoil(&state);
    const Checks wrong = Wrong(All(state));
    const std::string text = ChecksText(wrong, false);
    ASSERT_EQ(wrong.size(), 1u) << seed.name << "\n" << text;
    EXPECT_EQ(wrong[0].what, seed.what) << seed.name;
    EXPECT_TRUE(absl::StrContains(wrong[0].text, seed.reason)) << text;
    EXPECT_TRUE(absl::StrContains(wrong[0].text, seed.remedy)) << text;
  }
}

TEST(DoctorTest, NumericsMayDifferWhereAllWorkersAllowIt) {
  v1::GetClusterStateResponse state = Healthy();
  for (v1::WorkerStatus& worker : *state.mutable_workers()) {
    v1::WorkerHello* const hello = worker.mutable_hello();
    hello->set_mixed_numerics(true);
    (*hello->mutable_fingerprint())["numerics"] = hello->worker().worker_id();
  }
  EXPECT_EQ(ChecksText(Wrong(All(state)), false), "");
  EXPECT_TRUE(absl::StrContains(ChecksText(All(state), false),
                                "but for numerics, as --mixed-numerics"));
  (*state.mutable_workers(0)
        ->mutable_hello()
        ->mutable_fingerprint())["weights"] = "v";
  EXPECT_TRUE(absl::StrContains(ChecksText(Wrong(All(state)), false),
                                "weights differs"));
}

// It comes again within seconds, or it has gone.
TEST(DoctorTest, ARejectionThatIsOverIsNoFailure) {
  for (const int age : {9, 11}) {
    v1::GetClusterStateResponse state = Healthy();
    state.add_rejected()->mutable_age()->set_seconds(age);
    const Checks wrong = Wrong(All(state));
    ASSERT_EQ(wrong.size(), 1u);
    EXPECT_EQ(wrong[0].verdict, age < 10 ? Verdict::kFail : Verdict::kWarn);
    EXPECT_TRUE(
        absl::StrContains(wrong[0].text, absl::StrCat("(", age, " s ago")));
  }
}

TEST(DoctorTest, WorkersTextSteersNoTerminal) {
  v1::GetClusterStateResponse state = Healthy();
  v1::WorkerStatus* const worker = state.mutable_workers(1);
  worker->mutable_hello()->mutable_worker()->set_worker_id("d\x1b[2J");
  worker->mutable_hello()->set_http_endpoint("h\x1b[3J");
  worker->set_placeable(false);
  worker->set_reason(
      "avoided: \xc2\x9b"
      "1m\n  all is well");
  v1::AvoidedPair* const pair = state.add_avoided_pairs();
  pair->set_decode_worker_id("d\x1b[4J");
  pair->set_reason("\x1b[5J");
  v1::RejectedWorker* const rejected = state.add_rejected();
  rejected->set_worker_id("\x1b[6J");
  rejected->set_reason("\x1b[7J");
  for (const std::string& text :
       {ChecksText(All(state), false), cli::StatusTable(state)}) {
    EXPECT_EQ(text.find('\x1b'), std::string::npos) << text;
    EXPECT_EQ(text.find("\xc2\x9b"), std::string::npos) << text;
    EXPECT_EQ(text.find("\n  all"), std::string::npos) << text;
    EXPECT_TRUE(absl::StrContains(text, "\\u001b[7J")) << text;
  }
}

class Files {
 public:
  Files() { std::filesystem::create_directories(directory_); }
  ~Files() { std::filesystem::remove_all(directory_); }
  std::string Write(const std::string& name, const std::string& text) const {
    const std::string path = directory_ + name;
    std::ofstream(path) << text;
    return path;
  }

 private:
  const std::string directory_ =
      absl::StrCat(testing::TempDir(), "/doctor-", getpid(), "/");
};

TEST(DoctorTest, ACertificateOfAnotherAuthorityIsNamed) {
  const Authority ours("ours"), theirs("theirs");
  const Files files;
  const Pem leaf = ours.Issue(2, {"spiffe://tandem/router"});
  TlsFlags tls;
  tls.cert = files.Write("cert.pem", leaf.cert);
  tls.key = files.Write("key.pem", leaf.key);
  for (const Authority* const authority : {&ours, &theirs}) {
    tls.ca = files.Write("ca.pem", authority->cert());
    Checks checks;
    CheckCertificates(tls, absl::Now(), &checks);
    std::erase_if(checks, [](const Check& check) {
      return check.verdict != Verdict::kFail;
    });
    EXPECT_EQ(checks.size(), authority == &ours ? 0u : 1u);
    if (checks.empty()) continue;
    EXPECT_TRUE(absl::StrContains(checks[0].text, "is of no authority of"))
        << checks[0].text;
  }
}

TEST(DoctorTest, AnEndpointThatCannotBeReachedSaysWhy) {
  const Checks wrong = Wrong(All(Healthy(), "TLS: certificate has expired"));
  ASSERT_EQ(wrong.size(), 2u);
  EXPECT_TRUE(absl::StrContains(wrong[0].text, "certificate has expired"));
}

TEST(DoctorTest, WithoutADecodeWorkerThatTakesRequestsItFails) {
  v1::GetClusterStateResponse state = Healthy();
  state.mutable_workers(1)->set_placeable(false);
  state.mutable_workers(1)->set_reason("cordoned");
  const Checks wrong = Wrong(All(state));
  ASSERT_EQ(wrong.size(), 2u);
  EXPECT_EQ(wrong[0].verdict, Verdict::kWarn);
  EXPECT_EQ(wrong[1].verdict, Verdict::kFail);
  EXPECT_EQ(wrong[1].what, "workers");
  EXPECT_TRUE(absl::StrContains(wrong[1].text, "takes new requests"));
}

TEST(DoctorTest, SequencesWithoutAStepAreAWedge) {
  const auto verdict = [](int running, int64_t steps, char incarnation) {
    v1::GetClusterStateResponse before = Healthy(), after;
    before.mutable_workers(1)->mutable_load()->set_running(2);
    after = before;
    after.mutable_workers(1)->mutable_load()->set_running(running);
    after.mutable_workers(1)->mutable_load()->set_steps(steps);
    after.mutable_workers(1)
        ->mutable_hello()
        ->mutable_worker()
        ->set_incarnation(std::string(16, incarnation));
    Checks checks;
    CheckProgress(before, after, &checks);
    return checks.size();
  };
  EXPECT_EQ(verdict(2, 7, 'i'), 1u);
  EXPECT_EQ(verdict(2, 8, 'i'), 0u);
  EXPECT_EQ(verdict(0, 7, 'i'), 0u);
  EXPECT_EQ(verdict(2, 7, 'j'), 0u);
}

TEST(DoctorTest, WhatAProcessTellsOfItselfIsJudged) {
  const absl::Time now = absl::FromUnixSeconds(1'800'000'000);
  struct Case {
    ProcessFacts facts;
    Verdict verdict;
    const char* reason;
  };
  const Case cases[] = {
      {{.answers = false}, Verdict::kWarn, "are not checked"},
      {{.counts = false}, Verdict::kWarn, "its /metrics does not"},
      {{.stuck = "work is waiting"}, Verdict::kFail, "restart it"},
      {{.open_fds = 900, .max_fds = 1000}, Verdict::kFail, "LimitNOFILE"},
      {{.date = now + absl::Seconds(95)}, Verdict::kFail, "95 s ahead"},
      {{.date = now - absl::Seconds(7)}, Verdict::kFail, "7 s behind"},
      {{.certificate_expiry = now + absl::Hours(24)}, Verdict::kWarn, "renew"},
      {{.certificate_expiry = now - absl::Hours(1)}, Verdict::kFail, "expired"},
  };
  for (const Case& c : cases) {
    Checks checks;
    CheckProcess("d0", c.facts, now, &checks);
    ASSERT_EQ(checks.size(), 1u) << c.reason;
    EXPECT_EQ(checks[0].verdict, c.verdict) << c.reason;
    EXPECT_TRUE(absl::StrContains(checks[0].text, c.reason)) << checks[0].text;
  }
  Checks checks;
  CheckProcess("d0",
               {.open_fds = 100,
                .max_fds = 1000,
                .date = now - absl::Seconds(1),
                .certificate_expiry = now + absl::Hours(24 * 30)},
               now, &checks);
  EXPECT_TRUE(checks.empty());
}

TEST(DoctorTest, AProcessThatTellsNothingIsNotTakenForAHealthyOne) {
  // Nothing listens there, and nothing is an address.
  EXPECT_FALSE(AskProcess("127.0.0.1:1").answers);
  EXPECT_FALSE(AskProcess("").answers);
}

TEST(DoctorTest, AProcessMayAnswerAndNotCount) {
  HttpServer server({.port = 0});
  server.Handle("GET", "/livez", [](const HttpRequest&) {
    return HealthResponse(absl::OkStatus());
  });
  ASSERT_TRUE(server.Start().ok());
  const std::string endpoint = absl::StrCat("127.0.0.1:", server.port());
  EXPECT_TRUE(AskProcess(endpoint).answers);
  EXPECT_FALSE(AskProcess(endpoint).counts);
}

}  // namespace
}  // namespace tandem::doctor
