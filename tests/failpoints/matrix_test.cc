// SPDX-License-Identifier: Apache-2.0
// Each failpoint with each of its actions, in a cluster of real processes under
// load: every stream goes on with the tokens of its undisturbed run, and
// nothing is left behind. TANDEM_FAILPOINT_CASES says how many are drawn
// (default 12; "all"), TANDEM_FAILPOINT_SEED which.

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "common/random.h"
#include "tests/integration/cluster.h"
#include "tests/integration/load.h"

namespace tandem::integration {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

constexpr int kStreams = 8;

// What brings a process to the place.
enum class By {
  kLoad,     // requests
  kStart,    // it is armed when it starts
  kPeer,     // a worker of the other role is killed and comes back
  kStall,    // its loop or its peer stands still for longer than a beat
  kAlone,    // the other decode worker leaves: blocks are short,
             // and what is granted waits for slow prefill workers
  kCancel,   // clients that go away
  kTerm,     // SIGTERM
  kAdapter,  // an adapter that is to be loaded, of a folder that is not there
  kWedge,    // requests; then whoever watches /livez kills it
};

struct Row {
  const char* site;
  const char* actions;  // one after another, as they are armed
  const char* victims;
  By by = By::kLoad;
  bool told = false;  // clients are told UNAVAILABLE, and come again
};

// A stall is shorter than any lease, or longer than all: 1.5 s and 6 s. What is
// silent for long is dropped forty times.
constexpr Row kRows[] = {
    {"router.admit", "stall(1500)", "router"},
    {"router.admit", "crash fail", "router", By::kLoad, true},
    {"router.submit", "stall(1500)", "router"},
    {"router.submit", "crash", "router", By::kLoad, true},
    {"router.place", "fail fail*20", "router"},
    {"router.place", "crash", "router", By::kLoad, true},
    {"router.open", "delay(300)", "router"},
    {"router.open", "crash", "router", By::kLoad, true},
    {"router.between", "stall(1500)", "router"},
    {"router.between", "crash", "router", By::kLoad, true},
    {"router.first_token", "crash", "router", By::kLoad, true},
    {"router.relay", "delay(300)", "router"},
    {"router.relay", "crash@40", "router", By::kLoad, true},
    {"router.retry", "drop", "router", By::kPeer},
    {"router.retry", "crash", "router", By::kPeer, true},
    {"router.requeue", "crash", "router", By::kPeer, true},
    {"router.client_gone", "crash", "router", By::kCancel, true},
    {"router.hello", "fail", "router", By::kPeer},
    {"router.hello", "crash", "router", By::kPeer, true},
    {"router.load", "drop*40 delay", "router"},
    {"router.drain", "crash stall(1500)", "router", By::kTerm, true},

    {"prefill.open", "crash fail stall(1500)", "prefill"},
    {"prefill.offer", "crash", "prefill"},
    {"prefill.alloc", "crash fail", "prefill"},
    {"prefill.chunk", "crash crash@5 stall(1500) stall(6000) delay", "prefill"},
    {"prefill.sampled", "crash", "prefill"},
    {"prefill.before_commit", "crash stall(1500)", "prefill"},
    {"prefill.gather", "crash crash@7 stall(1500)", "prefill"},
    {"prefill.done", "crash drop", "prefill"},
    {"prefill.beat", "drop*40", "prefill", By::kStall},
    {"engine.step", "crash fail stall(1500) stall(6000)", "prefill decode"},
    {"engine.step", "drop", "prefill decode", By::kWedge},
    {"engine.evict", "crash", "prefill decode"},
    {"engine.offload_write", "crash fail stall(1500)", "decode"},
    {"engine.offload_read", "fail corrupt stall(1500)", "decode"},

    {"decode.open", "crash fail stall(1500)", "decode"},
    {"decode.admit", "fail", "decode"},
    {"decode.ticket", "crash corrupt", "decode"},
    {"decode.offer", "crash fail stall(1500)", "decode"},
    {"decode.reserve", "crash fail", "decode"},
    {"decode.scatter", "crash crash@7 stall(1500) stall(6000)", "decode"},
    {"decode.digest", "crash stall(1500)", "decode"},
    {"decode.commit", "crash fail", "decode"},
    {"decode.started", "crash drop", "decode"},
    {"decode.sampled", "crash crash@17", "decode"},
    {"decode.write", "crash crash@30 delay(300)", "decode"},
    {"decode.preempt", "crash", "decode", By::kAlone},
    {"decode.revoke", "crash", "decode", By::kAlone},
    {"decode.retry", "crash", "decode", By::kPeer},
    {"decode.finish", "crash", "decode"},
    {"decode.retire", "crash", "decode"},
    {"decode.beat", "drop*40", "decode", By::kStall},

    {"handoff.dial", "fail delay(300)", "prefill", By::kPeer},
    {"handoff.hello", "crash fail", "decode", By::kPeer},
    {"handoff.welcome", "crash delay(300)", "prefill", By::kPeer},
    {"handoff.way", "fail stall(1500)", "prefill", By::kPeer},
    {"handoff.door", "crash fail stall(1500)", "decode", By::kPeer},
    {"handoff.descriptor", "fail stall(1500)", "prefill", By::kPeer},
    {"handoff.offer", "drop duplicate", "prefill"},
    {"handoff.answer", "drop duplicate", "decode"},
    {"handoff.announce", "crash drop duplicate", "prefill"},
    {"handoff.credit", "drop duplicate delay(300)", "decode"},
    {"handoff.payload", "corrupt", "prefill"},
    {"handoff.slice", "crash drop duplicate", "prefill"},
    {"handoff.landed", "corrupt", "decode"},
    {"handoff.scattered", "crash delay(300)", "decode"},
    {"handoff.manifest", "crash corrupt truncate duplicate", "prefill"},
    {"handoff.ack", "crash drop duplicate", "decode"},
    {"handoff.withdraw", "crash drop", "prefill", By::kCancel},
    {"handoff.sender_break", "crash", "prefill", By::kPeer},
    {"handoff.receiver_break", "crash", "decode", By::kPeer},
    {"handoff.quiet", "drop stall(1500)", "decode", By::kPeer},

    {"load.open", "crash fail stall(1500)", "prefill decode", By::kStart},
    {"load.index", "fail", "prefill decode", By::kStart},
    {"load.header", "fail truncate", "prefill decode", By::kStart},
    {"load.pack", "crash@3 fail@3", "prefill decode", By::kStart},
    {"load.adapter", "crash fail stall(1500)", "decode", By::kAdapter},
    {"load.adapter_read", "stall(1500)", "decode", By::kAdapter},
    {"load.tokenizer", "fail", "router", By::kStart, true},
    {"load.template", "fail", "router", By::kStart, true},

    {"worker.listen", "fail", "prefill decode", By::kStart},
    {"worker.register", "crash drop", "prefill decode", By::kStart},
    {"worker.load", "drop*40 delay(300)", "prefill decode"},
    {"worker.drain", "crash stall(1500)", "prefill decode", By::kTerm},
    {"worker.stop", "crash stall(1500)", "prefill decode", By::kTerm},
    {"worker.grammar", "crash stall(1500)", "decode"},
};

struct Case {
  Row row;
  std::string action;  // with its numbers
  std::string victim;

  std::string fault() const { return absl::StrCat(row.site, "=", action); }
  std::string word() const {
    return action.substr(0, action.find_first_of("(@*"));
  }
  std::string line() const {
    return absl::StrCat("failpoint ", row.site, " ", word(), "\n");
  }
  // How the victim ends by this; none: it lives on.
  std::optional<int> exit() const {
    if (word() == "crash") return 128 + SIGKILL;
    if (row.by == By::kTerm) return 128 + SIGTERM;
    const bool loading = row.by == By::kStart && word() != "stall" &&
                         std::string(row.site) != "worker.register";
    if (loading) return 1;
    return std::nullopt;
  }
};

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  for (const Row& row : kRows) {
    for (const absl::string_view role : absl::StrSplit(row.victims, ' ')) {
      for (const absl::string_view action : absl::StrSplit(row.actions, ' ')) {
        const std::string name(role);
        cases.push_back(
            {row, std::string(action), name == "router" ? name : name + "-0"});
      }
    }
  }
  return cases;
}

// Some without order, each once.
std::vector<Case> SomeCases() {
  std::vector<Case> cases = AllCases();
  const char* const count = std::getenv("TANDEM_FAILPOINT_CASES");
  if (count != nullptr && std::string(count) == "all") return cases;
  if (const char* only = std::getenv("TANDEM_FAILPOINT_ONLY")) {
    std::erase_if(cases, [&](const Case& c) {
      return c.fault().find(only) == std::string::npos;
    });
    return cases;
  }
  int wanted = 12;
  uint64_t seed = 1;
  if (count != nullptr && !absl::SimpleAtoi(count, &wanted)) std::abort();
  const char* const text = std::getenv("TANDEM_FAILPOINT_SEED");
  if (text != nullptr && !absl::SimpleAtoi(text, &seed)) std::abort();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  SeededRandom random(seed);
  // Those that wait for silence or a dead link take long.
  std::erase_if(cases, [](const Case& c) {
    return c.word() == "drop" || c.action == "stall(6000)";
  });
  while (static_cast<int>(cases.size()) > wanted) {
    cases.erase(cases.begin() + static_cast<long>(random.Below(cases.size())));
  }
  return cases;
}

// The model in a shard, so that an index is read.
std::string ShardedModel() {
  const std::string folder = testing::TempDir() + "/tales-in-shards";
  std::filesystem::remove_all(folder);
  std::filesystem::copy(EmbeddedModel(), folder);
  const std::string shard = "model-00001-of-00001.safetensors";
  std::filesystem::rename(folder + "/model.safetensors", folder + "/" + shard);
  std::ifstream file(folder + "/" + shard, std::ios::binary);
  uint64_t size = 0;
  file.read(reinterpret_cast<char*>(&size), sizeof size);
  std::string header(size, '\0');
  file.read(header.data(), static_cast<std::streamsize>(size));
  nlohmann::json map = nlohmann::json::object();
  const nlohmann::json tensors = nlohmann::json::parse(header);
  for (const auto& [tensor, value] : tensors.items()) {
    if (tensor != "__metadata__") map[tensor] = shard;
  }
  std::ofstream(folder + "/model.safetensors.index.json")
      << nlohmann::json{{"weight_map", map}};
  return folder;
}

// Little memory: blocks are evicted, offloaded, short, and sequences preempted.
ClusterOptions SmallCluster() {
  return {
      .model_dir = ShardedModel(),
      .prefill = 2,
      .decode = 2,
      // One that places nothing fails /livez before its requests give up.
      .router_arguments = {"--liveness-timeout", "4s", "--queue-wait", "60s"},
      .worker_arguments = {"--liveness-timeout", "4s",
                           "--max-num-batched-tokens", "16",
                           "--handoff-slab-bytes", "4KiB", "--shutdown-timeout",
                           "5s", "--max-loras", "1"},
      .prefill_arguments = {"--max-num-seqs", "2", "--num-kv-blocks", "40"},
      .decode_arguments = {"--num-kv-blocks", "16", "--kv-offload-bytes",
                           "256KiB", "--kv-offload-path", testing::TempDir(),
                           "--kv-offload-file-bytes", "4MiB"},
      .faulty = true};
}

std::vector<v1::GenerateRequest> Requests() {
  std::vector<v1::GenerateRequest> requests;
  uint64_t i = 0;
  for (const std::string& prompt : SomePrompts(24, 77)) {
    v1::GenerateRequest request = TextRequest(prompt, i % 4 == 1 ? 120 : 40);
    request.set_placement(v1::PLACEMENT_SPLIT);
    request.mutable_stopping()->set_ignore_eos(true);
    if (++i % 2 == 0) {
      request.mutable_sampling()->set_temperature(0.8f);
      request.mutable_sampling()->set_seed(i);
    }
    if (i % 8 == 3) {
      request.mutable_stopping()->set_ignore_eos(false);
      request.mutable_structured()->set_regex("[a-z ]{20,30}");
    }
    if (i % 8 == 4) request.mutable_sampling()->set_n(2);
    requests.push_back(request);
  }
  return requests;
}

std::string PeerOf(const Case& c) {
  const bool prefill =
      c.victim == "decode-0" || c.row.site == std::string_view("router.retry");
  return prefill ? "prefill-0" : "decode-0";
}

class MatrixTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    cluster_ = new Cluster(SmallCluster());
    const absl::Status started = cluster_->Start();
    ASSERT_TRUE(started.ok())
        << started << cluster_->Log("router") << cluster_->Log("decode-0");
    expectations_ =
        new std::vector<Expectation>(RunAlone(cluster_, Requests()));
    for (const Expectation& e : *expectations_) {
      ASSERT_GE(e.token_ids.size(), 5u) << e.request.ShortDebugString();
    }
  }
  static void TearDownTestSuite() {
    delete expectations_;
    delete cluster_;
  }

  static bool Fired(const Case& c, size_t seen, seconds timeout) {
    const auto end = Clock::now() + timeout;
    do {
      if (cluster_->Log(c.victim).find(c.line(), seen) != std::string::npos) {
        return true;
      }
      std::this_thread::sleep_for(milliseconds(10));
    } while (Clock::now() < end);
    return false;
  }

  // Whether /livez answers `code` within `timeout`.
  static bool Says(const std::string& name, const std::string& code,
                   seconds timeout) {
    const auto end = Clock::now() + timeout;
    while (cluster_->Probe(name, "/livez").substr(0, 3) != code) {
      if (Clock::now() >= end) return false;
      std::this_thread::sleep_for(milliseconds(50));
    }
    return true;
  }

  // Clients that go away at any time, until the case's line is there; before
  // all others that wait, or most would go before they were placed.
  static void Cancel(const Case& c, size_t seen) {
    SeededRandom random(3);
    for (int i = 0; i < 1200; ++i) {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() +
                           std::chrono::microseconds(random.Below(30'000)));
      v1::GenerateRequest request = (*expectations_)[i % 24].request;
      request.set_priority(-1);
      request.mutable_cache()->set_bypass_prefix_cache(true);
      (void)cluster_->Generate(request, &context);
      if (Fired(c, seen, seconds(0))) return;
    }
  }

  static void LoadAdapter() {
    const auto stub =
        v1::AdminService::NewStub(cluster_->Channel(cluster_->admin_port()));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + seconds(10));
    v1::LoadLoraAdapterRequest request;
    request.set_lora_name("nobody");
    request.set_lora_path("/nowhere");
    v1::LoadLoraAdapterResponse response;
    EXPECT_FALSE(stub->LoadLoraAdapter(&context, request, &response).ok());
  }

  // Brings the victim to the place; what went wrong.
  static std::string Provoke(const Case& c, size_t seen) {
    if (c.row.by == By::kStart) {
      cluster_->Kill(c.victim);
      cluster_->ArmAtStart(c.victim, c.fault());
      if (!cluster_->Restart(c.victim).ok()) return "does not start; ";
    } else {
      const std::string armed = cluster_->Arm(c.victim, c.fault());
      if (!armed.empty()) {
        // A request that was at the place may end it before it has answered.
        const bool ended = c.word() == "crash" && Fired(c, seen, seconds(1));
        return ended ? "" : armed;
      }
    }
    if (c.row.by == By::kWedge) {
      if (!Fired(c, seen, seconds(20))) return "never fired; ";
      if (!Says(c.victim, "503", seconds(20))) return "stays alive; ";
      cluster_->Kill(c.victim);
      return cluster_->Restart(c.victim).ok() ? "" : "no restart; ";
    }
    if (c.row.by == By::kTerm) cluster_->Signal(c.victim, SIGTERM);
    if (c.row.by == By::kCancel) Cancel(c, seen);
    if (c.row.by == By::kAdapter) LoadAdapter();
    // More than once, where it depends on what the peer was at.
    for (int i = 0; i < 6 && c.row.by == By::kPeer; ++i) {
      if (PeerOf(c) == "prefill-0") {  // in the midst of a prompt
        (void)cluster_->Arm("prefill-0", "prefill.chunk=delay(60)*200");
        std::this_thread::sleep_for(milliseconds(300));
      }
      cluster_->Kill(PeerOf(c));
      if (!cluster_->Restart(PeerOf(c)).ok()) return "peer does not start; ";
      if (Fired(c, seen, seconds(3))) return "";
    }
    for (int i = 0; i < 12 && c.row.by == By::kStall; ++i) {
      // Of more than two beats: whatever of one had passed before.
      (void)cluster_->Arm(c.victim, "engine.step=stall(2500)");
      cluster_->Signal(PeerOf(c), SIGSTOP);
      const bool fired = Fired(c, seen, seconds(3));
      cluster_->Signal(PeerOf(c), SIGCONT);
      if (fired) return "";
    }
    bool fired = false;
    if (c.row.by == By::kAlone) {
      // Of one that is killed they would be suspects, which are served alone.
      cluster_->Signal("decode-1", SIGTERM);
      // What is granted to a slow one waits, while those of the other grow.
      for (int i = 0; i < 30 && !fired; ++i) {
        const char* const slow = i % 2 == 0 ? "prefill-0" : "prefill-1";
        (void)cluster_->Arm(slow, absl::StrCat("prefill.chunk=delay(",
                                               25 << (i % 4), ")*1000"));
        fired = Fired(c, seen, seconds(2));
        (void)cluster_->Arm(slow, "prefill.chunk=off");
      }
      (void)cluster_->WaitForExit("decode-1", seconds(10));
      if (!cluster_->Restart("decode-1").ok()) return "no restart; ";
    }
    fired = fired || Fired(c, seen, seconds(20));
    return fired ? "" : "never fired; ";
  }

  static std::string Doctor() {
    const std::string command =
        absl::StrCat(Cluster::BinaryPath("tandem"),
                     " doctor --admin 127.0.0.1:", cluster_->admin_port());
    std::string text;
    FILE* const pipe = popen(command.c_str(), "r");
    if (pipe == nullptr) return text;
    char line[512];
    while (std::fgets(line, sizeof line, pipe) != nullptr) text += line;
    pclose(pipe);
    return text;
  }

  // A slab whose message was lost comes back when its quarantine is over.
  static std::string WhatIsLeft(const Case& c) {
    std::string left = cluster_->WhatIsLeft("Story");
    for (int i = 0; i < 4 && c.word() == "drop" && !left.empty(); ++i) {
      left = cluster_->WhatIsLeft("Story");
    }
    return left;
  }

  // All that is wrong.
  static std::string Run(const Case& c) {
    const size_t seen = cluster_->Log(c.victim).size();
    std::vector<Expectation> asked = *expectations_;
    if (c.row.by == By::kAlone) {  // which grow
      std::erase_if(asked, [](const Expectation& e) {
        return e.request.stopping().max_tokens() <= 40;
      });
    }
    Load load(cluster_, &asked, kStreams,
              c.row.told ? Load::Again::kAll : Load::Again::kNone);
    std::string wrong = Provoke(c, seen);
    const bool fired = wrong.empty();
    if (fired && c.exit().has_value()) {
      const std::optional<int> code =
          cluster_->WaitForExit(c.victim, seconds(15));
      if (code != c.exit()) {
        absl::StrAppend(&wrong, "ended with ", code.value_or(-1), ", not ",
                        *c.exit(), "; ");
      }
      if (!cluster_->Restart(c.victim).ok()) return wrong + "no restart; ";
    }
    const absl::Status ready = cluster_->WaitUntilReady(2, 2, seconds(40));
    if (!ready.ok()) {
      absl::StrAppend(&wrong, ready.ToString().substr(0, 300), "; ");
      // Nobody is left in a state of its own for the next case.
      for (const char* name : {"router", "prefill-0", "decode-0"}) {
        (void)cluster_->Restart(name);
      }
      (void)cluster_->WaitUntilReady(2, 2, seconds(40));
    }
    // A lost message of a handoff is waited for while others use its link.
    if (!load.WaitForEveryStream(seconds(c.word() == "drop" ? 90 : 30))) {
      absl::StrAppend(&wrong, "a stream stands still; ");
    }
    // A process that lives must not meet the fault again.
    (void)cluster_->Arm(c.victim, absl::StrCat(c.row.site, "=off"));
    if (!load.Finish()) absl::StrAppend(&wrong, "a stream hangs; ");
    absl::StrAppend(&wrong, load.faults(), WhatIsLeft(c));
    return wrong;
  }

  static Cluster* cluster_;
  static std::vector<Expectation>* expectations_;
};
Cluster* MatrixTest::cluster_ = nullptr;
std::vector<Expectation>* MatrixTest::expectations_ = nullptr;

// "site action" of what a running process lists.
std::set<std::string> Listed(Cluster* cluster, const std::string& name) {
  std::set<std::string> all;
  std::istringstream lines(cluster->Probe(name, "/failpoints").substr(4));
  std::string line;
  while (std::getline(lines, line)) {
    const std::string site = line.substr(0, line.find(' '));
    const std::string actions = line.substr(line.find(": ") + 2);
    for (const absl::string_view action : absl::StrSplit(actions, ' ')) {
      all.insert(absl::StrCat(site, " ", action));
    }
  }
  return all;
}

TEST_F(MatrixTest, EachActionOfEachPlaceHasACase) {
  std::set<std::string> listed, tested;
  for (const char* name : {"router", "prefill-0", "decode-0"}) {
    listed.merge(Listed(cluster_, name));
  }
  for (const Case& c : AllCases()) {
    tested.insert(absl::StrCat(c.row.site, " ", c.word()));
  }
  for (const std::string& place : listed) {
    EXPECT_TRUE(tested.contains(place)) << place;
  }
  for (const std::string& place : tested) {
    EXPECT_TRUE(listed.contains(place)) << place;
  }
  std::set<std::string> sites;
  for (const std::string& place : listed) {
    sites.insert(place.substr(0, place.find(' ')));
  }
  EXPECT_GE(sites.size(), 48u);
}

// One in a file that CMakeLists.txt does not name would never fire.
TEST_F(MatrixTest, EachPlaceInTheSourcesIsListedOnce) {
  std::set<std::string> listed;
  for (const char* name : {"router", "prefill-0", "decode-0"}) {
    for (const std::string& place : Listed(cluster_, name)) {
      listed.insert(place.substr(0, place.find(' ')));
    }
  }
  std::set<std::string> found;
  for (const char* folder :
       {"common", "engine", "decode_worker", "handoff", "kernels",
        "prefill_worker", "router", "text", "worker"}) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(
             absl::StrCat(TANDEM_SOURCE_DIR, "/", folder))) {
      const std::string ending = entry.path().extension();
      if (ending != ".cc" && ending != ".h") continue;
      if (entry.path().stem() == "failpoint") continue;
      std::ifstream file(entry.path());
      const std::string text(std::istreambuf_iterator<char>(file), {});
      const std::string macro = "TANDEM_FAILPOINT(";
      for (size_t at = text.find(macro); at != std::string::npos;
           at = text.find(macro, at + 1)) {
        EXPECT_EQ(ending, ".cc") << entry.path();
        const size_t begin = text.find('"', at) + 1;
        const std::string name =
            text.substr(begin, text.find('"', begin) - begin);
        EXPECT_TRUE(found.insert(name).second) << name << " is there twice";
        EXPECT_TRUE(listed.contains(name)) << name << " of " << entry.path();
      }
    }
  }
  EXPECT_EQ(found, listed);
}

// A worker that beats and whose steps never end is seen by its liveness alone:
// here both roles at once. Whoever kills it for that lets its streams go on.
TEST_F(MatrixTest, AWedgedStepFailsLivenessAndItsStreamsGoOnElsewhere) {
  std::vector<std::unique_ptr<Load>> loads;
  const auto add_load = [&] {
    loads.push_back(std::make_unique<Load>(cluster_, expectations_, kStreams));
  };
  add_load();
  ASSERT_TRUE(loads[0]->WaitForEveryStream(seconds(30))) << loads[0]->faults();
  // In this order: what stands in a prefill worker holds blocks of both decode
  // workers, and might leave no step to the one that is to be wedged.
  const char* const wedged[] = {"decode-0", "prefill-0"};
  for (const char* name :
       {"router", "prefill-0", "prefill-1", "decode-0", "decode-1"}) {
    EXPECT_EQ(cluster_->Probe(name, "/livez").substr(0, 3), "200") << name;
  }
  for (const char* name : wedged) {
    ASSERT_EQ(cluster_->Arm(name, "engine.step=drop"), "");
    // Clients of what is wedged already wait for it and ask for nothing more.
    add_load();
    EXPECT_TRUE(Says(name, "503", seconds(30))) << name;
    EXPECT_NE(cluster_->Probe(name, "/livez").find("nothing has advanced"),
              std::string::npos);
  }
  const std::string doctor = Doctor();
  for (const char* name : wedged) {
    EXPECT_NE(doctor.find(absl::StrFormat("%-12s is not alive: work is", name)),
              std::string::npos)
        << doctor;
    EXPECT_EQ(doctor.find("prefill-1    is not alive"), std::string::npos);
  }
  // At once: who went from one to the other would be under suspicion.
  for (const char* name : wedged) cluster_->Signal(name, SIGKILL);
  for (const char* name : wedged) {
    cluster_->Kill(name);
    ASSERT_TRUE(cluster_->Restart(name).ok());
  }
  for (const auto& load : loads) {
    EXPECT_TRUE(load->WaitForEveryStream(seconds(40)))
        << "a stream stands still";
  }
  for (const auto& load : loads) {
    EXPECT_TRUE(load->Finish());
    EXPECT_EQ(load->faults(), "");
  }
  EXPECT_TRUE(cluster_->WaitUntilReady(2, 2, seconds(40)).ok());
  EXPECT_EQ(cluster_->WhatIsLeft("Story"), "");
}

// The same of a router that could place its requests and does not.
TEST_F(MatrixTest, ARouterThatPlacesNothingFailsLiveness) {
  ASSERT_EQ(cluster_->Arm("router", "router.place=fail*1000000"), "");
  Load load(cluster_, expectations_, kStreams);
  EXPECT_TRUE(Says("router", "503", seconds(40)));
  ASSERT_EQ(cluster_->Arm("router", "router.place=off"), "");
  EXPECT_TRUE(load.WaitForEveryStream(seconds(40))) << "a stream stands still";
  EXPECT_TRUE(Says("router", "200", seconds(10)));
  EXPECT_TRUE(load.Finish());
  EXPECT_EQ(load.faults(), "");
  EXPECT_EQ(cluster_->WhatIsLeft("Story"), "");
}

TEST_F(MatrixTest, EveryStreamGoesOnAsIfNothingHadHappened) {
  for (const Case& c : SomeCases()) {
    const auto begun = Clock::now();
    const size_t logged = cluster_->Log("router").size();
    const std::string wrong = Run(c);
    EXPECT_EQ(wrong, "") << c.victim << " " << c.fault();
    std::printf("%-9s %-28s %4.1f s %s\n", c.victim.c_str(), c.fault().c_str(),
                std::chrono::duration<double>(Clock::now() - begun).count(),
                wrong.c_str());
    std::fflush(stdout);
    if (wrong.empty()) continue;
    std::printf("%s\n%s\n", cluster_->State()->ShortDebugString().c_str(),
                cluster_->Log("router").substr(logged).c_str());
  }
}

TEST_F(MatrixTest, AWorkerThatStartsSaysSo) {
  cluster_->Kill("decode-0");
  cluster_->ArmAtStart("decode-0", "load.open=stall(1500)");
  ASSERT_TRUE(cluster_->Restart("decode-0").ok());
  ASSERT_TRUE(Says("decode-0", "503", seconds(30)));
  for (const char* path : {"/livez", "/readyz", "/health", "/metrics"}) {
    EXPECT_EQ(cluster_->Probe("decode-0", path), "503 starting\n") << path;
  }
  EXPECT_TRUE(cluster_->WaitUntilReady(2, 2, seconds(40)).ok());
  EXPECT_TRUE(Says("decode-0", "200", seconds(10)));
}

// As one of files on a server that is away.
TEST_F(MatrixTest, AWorkerThatReadsAnAdapterStopsAtOnce) {
  const size_t seen = cluster_->Log("decode-0").size();
  ASSERT_EQ(cluster_->Arm("decode-0", "load.adapter_read=stall(60000)"), "");
  std::thread loads(LoadAdapter);
  const auto read = [&] {
    return cluster_->Log("decode-0").find("load.adapter_read stall", seen) !=
           std::string::npos;
  };
  for (int i = 0; i < 2000 && !read(); ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_TRUE(read());
  cluster_->Signal("decode-0", SIGTERM);
  EXPECT_EQ(cluster_->WaitForExit("decode-0", seconds(30)), 143);
  loads.join();
  ASSERT_TRUE(cluster_->Restart("decode-0").ok());
  EXPECT_TRUE(cluster_->WaitUntilReady(2, 2, seconds(40)).ok());
}

}  // namespace
}  // namespace tandem::integration
