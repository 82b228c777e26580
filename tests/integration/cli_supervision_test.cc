// SPDX-License-Identifier: Apache-2.0
// Processes of `tandem serve` that die or will not end, and what is known of
// them afterwards: `tandem flight` and `tandem replay`.

#include <gmock/gmock.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/util/delimited_message_util.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tandem/v1/session.pb.h"
#include "tests/integration/cluster.h"
#include "tests/integration/serve_process.h"
#include "tests/integration/shell.h"

namespace tandem::integration {
namespace {

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

// Of a drain that would last for half a minute: the router stands still.
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

}  // namespace
}  // namespace tandem::integration
