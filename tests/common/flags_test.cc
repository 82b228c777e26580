// SPDX-License-Identifier: Apache-2.0
#include "common/flags.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::internal::CaptureStderr;
using ::testing::internal::CaptureStdout;
using ::testing::internal::GetCapturedStderr;
using ::testing::internal::GetCapturedStdout;

struct Options {
  std::string host = "127.0.0.1";
  int port = 50051;
  std::optional<int64_t> seed;
  double ratio = 0.5;
  bool cache = true;
  absl::Duration grace = absl::Seconds(30);
  int64_t pool = int64_t{64} << 20;
  std::string way = "auto";
  std::string api_key;
  std::vector<std::string> routers = {"127.0.0.1:1"};
  std::string model;
  LogFlags log;
};

struct Line {
  Options options;
  CommandLine line{"tandem-x", "Does what an example has to do."};

  Line() {
    line.Example("tandem-x MODEL --port 8000");
    line.AddPositional("MODEL", &options.model, "Folder of the model", false);
    line.Group("Serving");
    line.Add("host", &options.host, "Address to listen on");
    line.AddInt("port", &options.port, "Port to listen on", {0, 65535});
    line.AddInt("seed", &options.seed, "Seed");
    line.Add("ratio", &options.ratio, "A ratio", 0, 1);
    line.Add("prefix-cache", &options.cache, "Keep finished blocks for reuse");
    line.AddDuration("shutdown-timeout", &options.grace, "Grace of a drain",
                     absl::Milliseconds(1));
    line.AddBytes("pool", &options.pool, "Size of the pool");
    line.AddChoice("handoff", &options.way, {"auto", "shm", "grpc"}, "The way");
    line.Add("api-key", &options.api_key, "Key that clients must show");
    line.AddList("routers", &options.routers, "Routers to register with");
    options.log.AddTo(&line);
  }

  std::optional<int> Parse(std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "tandem-x");
    return line.Parse(static_cast<int>(arguments.size()), arguments.data());
  }
};

TEST(FlagsTest, ValuesOfAllKindsAreRead) {
  Line l;
  ASSERT_EQ(l.Parse({"dir",
                     "--host=0.0.0.0",
                     "--port",
                     "8000",
                     "--seed=-3",
                     "--ratio",
                     "0.25",
                     "--no-prefix-cache",
                     "--shutdown-timeout",
                     "1m30s",
                     "--pool",
                     "1GiB",
                     "--handoff",
                     "shm",
                     "--api-key",
                     "s3cret",
                     "--routers",
                     "a:1,b:2",
                     "--routers",
                     "c:3"}),
            std::nullopt);
  EXPECT_EQ(l.options.model, "dir");
  EXPECT_EQ(l.options.host, "0.0.0.0");
  EXPECT_EQ(l.options.port, 8000);
  EXPECT_EQ(l.options.seed, -3);
  EXPECT_EQ(l.options.ratio, 0.25);
  EXPECT_FALSE(l.options.cache);
  EXPECT_EQ(l.options.grace, absl::Seconds(90));
  EXPECT_EQ(l.options.pool, int64_t{1} << 30);
  EXPECT_EQ(l.options.way, "shm");
  EXPECT_THAT(l.options.routers, ElementsAre("a:1", "b:2", "c:3"));
  EXPECT_THAT(
      l.line.NonDefaults(),
      ElementsAre(Pair("MODEL", "dir"), Pair("host", "0.0.0.0"),
                  Pair("port", "8000"), Pair("seed", "-3"),
                  Pair("ratio", "0.25"), Pair("prefix-cache", "off"),
                  Pair("shutdown-timeout", "1m30s"), Pair("pool", "1GiB"),
                  Pair("handoff", "shm"), Pair("api-key", "(set)"),
                  Pair("routers", "a:1,b:2,c:3")));
}

TEST(FlagsTest, AListTakesOneValueAndLeavesTheNextWord) {
  CommandLine line("tandem-x", "Does what an example has to do.");
  std::vector<std::string> stops;
  std::string prompt;
  line.AddPositional("PROMPT", &prompt, "Text", false);
  line.AddList("stop", &stops, "Text that ends the output", /*separator=*/0);
  const char* arguments[] = {"tandem-x", "--stop", "a,b", "--stop", "c", "say"};
  EXPECT_EQ(line.Parse(6, arguments), std::nullopt);
  EXPECT_THAT(stops, ElementsAre("a,b", "c"));
  EXPECT_EQ(prompt, "say");
}

// As from --stop="$EMPTY".
TEST(FlagsTest, AnEmptyValueBehindEqualsIsNotTheNextWord) {
  Line parsed;
  EXPECT_EQ(parsed.Parse({"--api-key=", "model"}), std::nullopt);
  EXPECT_EQ(parsed.options.api_key, "");
  EXPECT_EQ(parsed.options.model, "model");
  Line wrong;
  CaptureStderr();
  EXPECT_EQ(wrong.Parse({"--port=", "1234"}), 2);
  EXPECT_THAT(GetCapturedStderr(), HasSubstr("port"));
  CommandLine line("tandem-x", "Does what an example has to do.");
  std::vector<std::string> stops;
  std::string prompt;
  line.AddPositional("PROMPT", &prompt, "Text", false);
  line.AddList("stop", &stops, "Text that ends the output", /*separator=*/0);
  const char* arguments[] = {"tandem-x", "--stop=", "say"};
  EXPECT_EQ(line.Parse(3, arguments), std::nullopt);
  EXPECT_THAT(stops, ElementsAre(""));
  EXPECT_EQ(prompt, "say");
}

TEST(FlagsTest, AModelIsGivenByPlaceOrByName) {
  struct Case {
    std::vector<const char*> words;
    const char* model;  // null: refused
    const char* says = "";
  };
  for (const Case& c :
       {Case{{"dir"}, "dir"}, Case{{"--model", "dir"}, "dir"},
        Case{{"--model=a b"}, "a b"}, Case{{"-m", "dir"}, "dir"},
        Case{{"--quiet", "-m", "dir"}, "dir"},
        Case{{"one", "--model", "two"},
             nullptr,
             "MODEL is given twice, as 'one' and with --model as 'two'"},
        Case{{"-m", "two", "one"},
             nullptr,
             "MODEL is given twice, as 'one' and with --model as 'two'"},
        Case{{"-m", "two", "--model", "two"},
             nullptr,
             "--model is given more than once"},
        Case{{"--model"}, nullptr, "--model needs a value"},
        Case{{"--modle", "x"}, nullptr, "did you mean --model?"},
        Case{{}, nullptr, "MODEL is required"}}) {
    CommandLine line("tandem-x", "Does what an example has to do.");
    std::string model;
    bool quiet = false;
    line.AddModel(&model, "Folder", true);
    line.Add("quiet", &quiet, "Say less");
    std::vector<const char*> words = c.words;
    words.insert(words.begin(), "tandem-x");
    const absl::Status status =
        line.TryParse(static_cast<int>(words.size()), words.data());
    ASSERT_EQ(status.ok(), c.model != nullptr) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.says));
    if (!status.ok()) continue;
    EXPECT_EQ(model, c.model);
    EXPECT_TRUE(line.given("MODEL"));
    EXPECT_THAT(line.NonDefaults(), Contains(Pair("MODEL", c.model)));
    EXPECT_THAT(line.Help(), HasSubstr("Usage: tandem-x MODEL [FLAGS]\n"));
    EXPECT_THAT(
        line.Help(),
        HasSubstr("\n  MODEL, --model MODEL, -m MODEL\n      Folder\n"));
  }
}

TEST(FlagsTest, AListOfSeveralWordsEndsAtTheNextFlag) {
  CommandLine line("tandem-x", "Does what an example has to do.");
  std::vector<std::string> goodput;
  bool quiet = false;
  line.AddList("goodput", &goodput, "Limits");
  line.LastTakesSeveralWords();
  line.Add("quiet", &quiet, "Say less");
  const char* arguments[] = {"tandem-x", "--goodput", "a:1", "b:2,c:3",
                             "--quiet",  "--goodput", "d:4"};
  EXPECT_EQ(line.Parse(7, arguments), std::nullopt);
  EXPECT_THAT(goodput, ElementsAre("a:1", "b:2", "c:3", "d:4"));
  EXPECT_TRUE(quiet);
}

TEST(FlagsTest, DefaultsStandWhereNothingIsGiven) {
  Line l;
  ASSERT_EQ(l.Parse({"--port", "50051"}), std::nullopt);
  EXPECT_EQ(l.options.port, 50051);
  EXPECT_EQ(l.options.seed, std::nullopt);
  EXPECT_TRUE(l.options.cache);
  EXPECT_THAT(l.options.routers, ElementsAre("127.0.0.1:1"));
  EXPECT_THAT(l.line.NonDefaults(), IsEmpty());
  EXPECT_TRUE(l.line.given("port"));
  EXPECT_FALSE(l.line.given("host"));
}

TEST(FlagsTest, TheCommandLineBeatsTheEnvironmentBeatsTheDefault) {
  setenv("TANDEM_PORT", "7000", 1);
  setenv("TANDEM_PREFIX_CACHE", "false", 1);
  setenv("TANDEM_SHUTDOWN_TIMEOUT", "5s", 1);
  Line environment, both;
  EXPECT_EQ(environment.Parse({}), std::nullopt);
  EXPECT_EQ(both.Parse({"--port", "9000", "--prefix-cache"}), std::nullopt);
  EXPECT_TRUE(environment.line.given("port"));
  EXPECT_FALSE(environment.line.typed("port"));
  EXPECT_FALSE(environment.line.typed("host"));
  EXPECT_TRUE(both.line.typed("port"));
  setenv("TANDEM_PORT", "many", 1);
  Line wrong;
  CaptureStderr();
  EXPECT_EQ(wrong.Parse({}), 2);
  EXPECT_EQ(GetCapturedStderr(),
            "tandem-x: TANDEM_PORT: 'many' is not a whole number from 0 to "
            "65535 (see tandem-x --help)\n");
  // Where the command line has it, nobody reads the other.
  EXPECT_EQ(Line().Parse({"--port", "9000"}), std::nullopt);
  for (const char* name :
       {"TANDEM_PORT", "TANDEM_PREFIX_CACHE", "TANDEM_SHUTDOWN_TIMEOUT"}) {
    unsetenv(name);
  }
  EXPECT_EQ(environment.options.port, 7000);
  EXPECT_FALSE(environment.options.cache);
  EXPECT_EQ(environment.options.grace, absl::Seconds(5));
  EXPECT_EQ(both.options.port, 9000);
  EXPECT_TRUE(both.options.cache);
}

TEST(FlagsTest, TheEnvironmentGivesListsAndWhatIsNotItsIsLeftAlone) {
  setenv("TANDEM_ROUTERS", "a:1,b:2", 1);
  setenv("TANDEM_JSON", "1", 1);
  setenv("TANDEM_PREFIX_CACHE", "perhaps", 1);
  std::string file;
  Line l, wrong;
  l.line.Add("json", &file, "Where to write");
  l.line.LastNotFromEnvironment();
  EXPECT_EQ(l.Parse({"--prefix-cache"}), std::nullopt);
  EXPECT_THAT(l.options.routers, ElementsAre("a:1", "b:2"));
  EXPECT_EQ(file, "");
  CaptureStderr();
  EXPECT_EQ(wrong.Parse({}), 2);
  EXPECT_THAT(GetCapturedStderr(),
              HasSubstr("tandem-x: TANDEM_PREFIX_CACHE: 'perhaps' is neither "
                        "on nor off (see"));
  for (const char* name :
       {"TANDEM_ROUTERS", "TANDEM_JSON", "TANDEM_PREFIX_CACHE"}) {
    unsetenv(name);
  }
}

TEST(FlagsTest, WrongUseIsOneLineAndExitCode2) {
  struct Case {
    std::vector<const char*> arguments;
    const char* says;
  };
  const Case cases[] = {
      {{"--prot", "1"}, "unknown flag --prot; did you mean --port?"},
      {{"--no-prefix-cach"}, "did you mean --no-prefix-cache?"},
      {{"--handof=shm"}, "unknown flag --handof; did you mean --handoff?"},
      {{"--completely-else"}, "unknown flag --completely-else (see"},
      {{"--prefix-cache=perhaps"}, "'perhaps' is neither on nor off"},
      {{"one", "two"}, "unexpected argument two"},
      {{"--port", "65536"}, "'65536' is not a whole number from 0 to 65535"},
      {{"--port", "-1"}, "'-1' is not a whole number from 0 to 65535"},
      {{"--port", "80x"}, "'80x' is not a whole number"},
      {{"--port"}, "tandem-x: --port needs a value (see"},
      {{"--port", "1", "--port", "2"},
       "tandem-x: --port is given more than once (see"},
      {{"--ratio", "1.01"}, "'1.01' is not a number from 0 to 1"},
      {{"--ratio", "nan"}, "'nan' is not a number from 0 to 1"},
      {{"--shutdown-timeout", "30"}, "'30' is not a duration such as 30s"},
      {{"--pool", "64mb"}, "'64mb' is not a size such as 64MiB"},
      {{"--handoff", "tcp"}, "'tcp' is none of auto, shm, grpc"},
  };
  for (const Case& c : cases) {
    Line l;
    CaptureStderr();
    EXPECT_EQ(l.Parse(c.arguments), 2) << c.says;
    const std::string text = GetCapturedStderr();
    EXPECT_THAT(text, HasSubstr(c.says));
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    EXPECT_EQ(text.rfind("tandem-x: ", 0), 0u) << text;
  }
}

TEST(FlagsTest, HelpShowsDefaultAndEnvironmentWithin100Columns) {
  Line l;
  l.line.Add("long", &l.options.host,
             "A flag about which so much can be said that it needs more than "
             "one line of a hundred columns, whatever is done to shorten it");
  CaptureStdout();
  EXPECT_EQ(l.Parse({"--help"}), 0);
  const std::string help = GetCapturedStdout();
  for (absl::string_view row : absl::StrSplit(help, '\n')) {
    EXPECT_LE(row.size(), 100u) << row;
  }
  EXPECT_EQ(help.rfind("Examples:\n  tandem-x MODEL --port 8000\n", 0), 0u);
  for (const char* part :
       {"Usage: tandem-x [MODEL] [FLAGS]\n", "\nServing:\n", "\nLogging:\n",
        "  --port INT\n      Port to listen on [50051] (TANDEM_PORT)\n",
        "  --[no-]prefix-cache\n      Keep finished blocks for reuse [on] "
        "(TANDEM_PREFIX_CACHE)\n",
        "  --seed INT\n      Seed (TANDEM_SEED)\n",
        "  --pool SIZE\n      Size of the pool [64MiB] (TANDEM_POOL)\n",
        "  --handoff auto|shm|grpc\n"}) {
    EXPECT_THAT(help, HasSubstr(part));
  }
}

TEST(FlagsTest, VersionIsOneLine) {
  Line l;
  CaptureStdout();
  EXPECT_EQ(l.Parse({"--version"}), 0);
  EXPECT_THAT(GetCapturedStdout(),
              ::testing::MatchesRegex("tandem-x [0-9]+\\.[0-9]+\\.[0-9]+\n"));
}

TEST(FlagsTest, SubcommandsHaveTheirOwnFlagsAndHelp) {
  int prefill = 1, max_tokens = 16;
  const auto make = [&] {
    auto line = std::make_unique<CommandLine>("tandem", "Serves models.");
    CommandLine* serve = line->AddCommand("serve", "Start a local cluster");
    serve->AddInt("prefill", &prefill, "Prefill workers", {0, 64});
    CommandLine* generate = line->AddCommand("generate", "Generate text");
    generate->AddInt("max-tokens", &max_tokens, "Tokens", {1, 4096});
    return line;
  };
  const auto parse = [](CommandLine* line, std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "tandem");
    return line->Parse(static_cast<int>(arguments.size()), arguments.data());
  };
  auto line = make();
  ASSERT_EQ(parse(line.get(), {"serve", "--prefill", "2"}), std::nullopt);
  EXPECT_EQ(line->chosen()->name(), "tandem serve");
  EXPECT_EQ(prefill, 2);
  EXPECT_THAT(line->NonDefaults(), ElementsAre(Pair("prefill", "2")));

  struct Case {
    std::vector<const char*> arguments;
    const char* says;
  };
  for (const Case& c :
       {Case{{}, "tandem: "}, Case{{"serv"}, "did you mean serve?"},
        Case{{"generate", "--max-token", "3"}, "did you mean --max-tokens?"}}) {
    auto wrong = make();
    CaptureStderr();
    EXPECT_EQ(parse(wrong.get(), c.arguments), 2);
    EXPECT_THAT(GetCapturedStderr(), HasSubstr(c.says));
  }
  auto help = make();
  CaptureStdout();
  EXPECT_EQ(parse(help.get(), {"generate", "--help"}), 0);
  EXPECT_THAT(GetCapturedStdout(), HasSubstr("Usage: tandem generate [FLAGS]"));
  auto top = make();
  CaptureStdout();
  EXPECT_EQ(parse(top.get(), {"--help"}), 0);
  EXPECT_THAT(GetCapturedStdout(),
              HasSubstr("  serve        Start a local cluster\n"));
}

TEST(FlagsTest, TwoPlusesAreAWordLikeOthers) {
  for (const bool by_name : {false, true}) {
    CommandLine line("tandem", "Serves models.");
    CommandLine* const chat = line.AddCommand("chat", "Talk");
    std::string model, system;
    int tokens = 16;
    std::vector<std::string> stops;
    chat->AddModel(&model, "Folder", false);
    chat->Add("system", &system, "Text");
    chat->AddList("stop", &stops, "Text", /*separator=*/0);
    chat->AddInt("max-tokens", &tokens, "Tokens", {1, 4096});
    std::vector<const char*> words = {"tandem", "chat",     "--stop",
                                      "++",     "--system", "++"};
    if (by_name) words.push_back("--model");
    for (const char* word : {"++", "--max-tokens", "3"}) words.push_back(word);
    EXPECT_EQ(line.TryParse(static_cast<int>(words.size()), words.data()),
              absl::OkStatus());
    EXPECT_THAT(chat->NonDefaults(),
                ElementsAre(Pair("MODEL", "++"), Pair("system", "++"),
                            Pair("stop", "++"), Pair("max-tokens", "3")));
  }
  CommandLine line("tandem", "Serves models.");
  line.AddCommand("status", "Show the cluster");
  const char* const words[] = {"tandem", "status", "++"};
  EXPECT_EQ(line.TryParse(3, words).message(), "unexpected argument ++");
}

// A line with --config, and a file for it.
struct Configured : Line {
  std::string path;

  explicit Configured(const std::string& text) {
    line.AddConfigFile();
    path = ::testing::TempDir() + "config.yaml";
    std::ofstream(path) << text;
  }
  ~Configured() { std::remove(path.c_str()); }

  std::optional<int> Run(std::vector<const char*> arguments) {
    arguments.insert(arguments.end(), {"--config", path.c_str()});
    return Parse(arguments);
  }
};

TEST(ConfigFileTest, ValuesOfAllKindsAreRead) {
  Configured l(
      "# as vLLM's\n"
      "model: /models/x\n"
      "port: 8000\n"
      "seed: -3\n"
      "ratio: 0.25\n"
      "prefix-cache: false\n"
      "shutdown-timeout: 1m30s\n"
      "pool: 1GiB\n"
      "host: {a: 1, b: [2.5, true, 'yes', '7'], c: null}\n"
      "routers:\n  - a:1\n  - b:2\n");
  ASSERT_EQ(l.Run({}), std::nullopt);
  EXPECT_EQ(l.options.model, "/models/x");
  EXPECT_EQ(l.options.port, 8000);
  EXPECT_EQ(l.options.seed, -3);
  EXPECT_EQ(l.options.ratio, 0.25);
  EXPECT_FALSE(l.options.cache);
  EXPECT_EQ(l.options.grace, absl::Seconds(90));
  EXPECT_EQ(l.options.pool, int64_t{1} << 30);
  EXPECT_EQ(l.options.host, R"({"a":1,"b":[2.5,true,"yes","7"],"c":null})");
  EXPECT_THAT(l.options.routers, ElementsAre("a:1", "b:2"));
  EXPECT_TRUE(l.line.given("port"));
  EXPECT_TRUE(l.line.typed("port"));
  EXPECT_FALSE(l.line.given("api-key"));
}

TEST(ConfigFileTest, AMapIsNamesAndValuesToAList) {
  Configured l("routers: {one: /a, two: /b}\n");
  ASSERT_EQ(l.Run({}), std::nullopt);
  EXPECT_THAT(l.options.routers, ElementsAre("one=/a", "two=/b"));
}

TEST(ConfigFileTest, CommandLineAndEnvironmentBeatTheFile) {
  const char* const text =
      "port: 1\nhost: file\nseed: 1\nprefix-cache: false\nrouters: [a:1]\n"
      "model: file\n";
  setenv("TANDEM_HOST", "environment", 1);
  setenv("TANDEM_PORT", "2", 1);
  Configured l(text);
  ASSERT_EQ(l.Run({"--port", "3", "--prefix-cache", "--routers", "b:2", "dir"}),
            std::nullopt);
  unsetenv("TANDEM_HOST");
  unsetenv("TANDEM_PORT");
  EXPECT_EQ(l.options.port, 3);
  EXPECT_EQ(l.options.host, "environment");
  EXPECT_EQ(l.options.seed, 1);
  EXPECT_TRUE(l.options.cache);
  EXPECT_THAT(l.options.routers, ElementsAre("b:2"));
  EXPECT_EQ(l.options.model, "dir");
  Configured by_environment(text);
  setenv("TANDEM_CONFIG", by_environment.path.c_str(), 1);
  EXPECT_EQ(by_environment.Parse({}), std::nullopt);
  unsetenv("TANDEM_CONFIG");
  EXPECT_EQ(by_environment.options.port, 1);
}

TEST(ConfigFileTest, AFileWithNothingChangesNothing) {
  for (const char* const text : {"", "# nothing\n", "---\n", "{}\n"}) {
    Configured l(text);
    EXPECT_EQ(l.Run({}), std::nullopt) << text;
    EXPECT_EQ(l.options.port, 50051);
  }
}

TEST(ConfigFileTest, ErrorsNameFileLineAndKey) {
  struct Case {
    const char* text;
    const char* says;
  };
  for (const Case& c : {
           Case{"port: 1\n\nprot: 2\n",
                "config.yaml:3: unknown key prot; did you mean port?"},
           Case{"something-else: 1\n",
                "config.yaml:1: unknown key something-else (see"},
           Case{"host: x\nport: 65536\n",
                "config.yaml:2: --port: '65536' is not a whole number"},
           Case{"prefix-cache: maybe\n", "config.yaml:1: "},
           Case{"port: [1, 2]\n", "config.yaml:1: port takes one value"},
           Case{"port: {a: 1}\n", "config.yaml:1: --port: '{\"a\":1}' is not"},
           Case{"host: a\nport:\n", "config.yaml:2: port has no value"},
           Case{"port: 1\nhost: a\nport: 2\n",
                "config.yaml:3: port is in line 1 already"},
           Case{"routers: [[a]]\n", "routers is a list of single values"},
           Case{"port: 1\nrouters: {a: b, c: [x]}\n",
                "config.yaml:2: routers is a map of single values"},
           Case{"host: {a: 1,\n  b: \"\xff\"}\n",
                "config.yaml:2: not valid UTF-8"},
           Case{"host: {a: 1,\n  \"\xc3\": b}\n",
                "config.yaml:2: not valid UTF-8"},
           Case{"port: 1\nhost: &all {a: *all}\n",
                "config.yaml:2: nested more than 32 deep"},
           Case{"host: {a: &a [0,0,0,0,0,0,0,0,0],\n"
                "  b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a],\n"
                "  c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b],\n"
                "  d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c],\n"
                "  e: [*d,*d,*d,*d,*d,*d,*d,*d,*d]}\n",
                "too many values"},
           Case{"port 1\n", "config.yaml:1: expected flags' names"},
           Case{"port: 1\nhost: {a: b\n", "config.yaml:3: "},
           Case{"port: 1\n---\nport: 2\n", "a second document"},
           Case{"config: other.yaml\n", "cannot name another"},
       }) {
    Configured l(c.text);
    CaptureStderr();
    EXPECT_EQ(l.Run({}), 2) << c.text;
    const std::string text = GetCapturedStderr();
    EXPECT_THAT(text, HasSubstr(c.says));
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  }
  for (const auto& [path, why] :
       {std::pair("/does/not/exist.yaml", "No such file"),
        std::pair("/tmp", "Is a directory")}) {
    Configured l("");
    CaptureStderr();
    EXPECT_EQ(l.Parse({"--config", path}), 2);
    EXPECT_THAT(GetCapturedStderr(),
                HasSubstr(std::string("cannot read ") + path + ": " + why));
  }
}

TEST(ConfigFileTest, WhatIsRequiredMayComeFromTheFile) {
  const auto parse = [](const std::string& text, std::string* model) {
    const std::string path = ::testing::TempDir() + "required.yaml";
    std::ofstream(path) << text;
    CommandLine line("tandem", "Serves models.");
    CommandLine* const serve = line.AddCommand("serve", "Start a cluster");
    serve->AddConfigFile();
    serve->AddPositional("MODEL_DIR", model, "Folder", true);
    const char* const words[] = {"tandem", "serve", "--config", path.c_str()};
    const std::optional<int> code = line.Parse(4, words);
    std::remove(path.c_str());
    return code;
  };
  std::string model;
  EXPECT_EQ(parse("model-dir: /m\n", &model), std::nullopt);
  EXPECT_EQ(model, "/m");
  CaptureStderr();
  EXPECT_EQ(parse("", &model), 2);
  EXPECT_THAT(GetCapturedStderr(), HasSubstr("tandem: MODEL_DIR is required"));
}

TEST(FlagValuesTest, SizesParseExactlyOrNotAtAll) {
  struct Case {
    const char* text;
    int64_t bytes;  // -1: refused
  };
  for (const Case& c : {Case{"0", 0}, Case{"4096", 4096}, Case{"1.5KiB", 1536},
                        Case{"64MiB", 67108864}, Case{"2 GiB", 2147483648},
                        Case{"500KB", 500000}, Case{"1TiB", 1099511627776},
                        Case{"", -1}, Case{"MiB", -1}, Case{"-1", -1},
                        Case{"1mib", -1}, Case{"0.1", -1}, Case{"1e30", -1},
                        Case{"nan", -1}, Case{"inf", -1}, Case{"1MiBx", -1}}) {
    const auto parsed = ParseBytes(c.text);
    EXPECT_EQ(parsed.value_or(-1), c.bytes) << c.text;
    if (c.bytes >= 0) {
      EXPECT_EQ(*ParseBytes(FormatBytes(c.bytes)), c.bytes);
    }
  }
}

TEST(FlagValuesTest, DurationsNeedAUnitAndASignThatMakesSense) {
  EXPECT_EQ(*ParseDuration("1m30s"), absl::Seconds(90));
  EXPECT_EQ(*ParseDuration("0"), absl::ZeroDuration());
  EXPECT_EQ(*ParseDuration("inf"), absl::InfiniteDuration());
  for (const char* text : {"", "30", "-1s", "1 s", "s", "1day"}) {
    EXPECT_FALSE(ParseDuration(text).ok()) << text;
  }
}

TEST(FlagValuesTest, EndpointsReadBack) {
  for (const char* text :
       {"127.0.0.1:50051", "localhost:0", "[::1]:65535", "a-b.c:8"}) {
    const auto endpoint = ParseEndpoint(text);
    ASSERT_TRUE(endpoint.ok()) << endpoint.status();
    EXPECT_EQ(endpoint->ToString(), text);
  }
  for (const char* text : {"", ":1", "host", "host:", "host:65536", "host:-1",
                           "::1:80", "[]:1", "host:1x", "host:+1"}) {
    EXPECT_FALSE(ParseEndpoint(text).ok()) << text;
  }
}

}  // namespace
}  // namespace tandem
