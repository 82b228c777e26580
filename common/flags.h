// SPDX-License-Identifier: Apache-2.0
// Command lines. Every flag is --kebab-case with the environment variable
// TANDEM_KEBAB_CASE beside it, and a line of a file's where there is --config;
// the command line wins over the environment, that over the file, and the file
// over the default. Values are checked when they are parsed.
//
//   CommandLine line("tandem-decode", "Generates tokens from handed-over KV.");
//   line.Group("Serving");
//   line.Add("host", &options.host, "Address to listen on");
//   line.AddInt("max-num-seqs", &options.max_num_seqs, "Sequences", {1, 4096});
//   if (auto code = line.Parse(argc, argv)) return *code;
//   LogInfo("starting", line.NonDefaults()...);
//
// A value's default is what its variable holds when the flag is added.
// Variables must outlive Parse.

#ifndef TANDEM_COMMON_FLAGS_H_
#define TANDEM_COMMON_FLAGS_H_

#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace tandem {

struct ConfigEntry;

struct Range {
  int64_t min = std::numeric_limits<int64_t>::min();
  int64_t max = std::numeric_limits<int64_t>::max();
};

struct Endpoint {
  std::string host;  // without the brackets of an IPv6 address
  int port = 0;

  std::string ToString() const;
};

// "30s", "500ms", "1m30s", "inf"; "64MiB", "1GiB", "500KB", "4096";
// "host:port", "[::1]:50051". INVALID_ARGUMENT says what is expected.
absl::StatusOr<absl::Duration> ParseDuration(std::string_view text);
absl::StatusOr<int64_t> ParseBytes(std::string_view text);
absl::StatusOr<Endpoint> ParseEndpoint(std::string_view text);
std::string FormatBytes(int64_t bytes);  // the shortest that parses back

class CommandLine {
 public:
  CommandLine(std::string name, std::string description);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  // The heading of the flags that follow, in the help.
  void Group(std::string title) { group_ = std::move(title); }
  // Shown first in the help, one command a line.
  void Example(std::string command) { examples_.push_back(std::move(command)); }

  // `name` without dashes.
  void Add(const std::string& name, std::string* value,
           const std::string& help);
  void Add(const std::string& name, bool* value, const std::string& help);
  void Add(const std::string& name, double* value, const std::string& help,
           double min = -std::numeric_limits<double>::infinity(),
           double max = std::numeric_limits<double>::infinity());
  void AddInt(const std::string& name, int* value, const std::string& help,
              Range range = {});
  void AddInt(const std::string& name, int64_t* value, const std::string& help,
              Range range = {});
  // Unset unless given: for what must be told from its default.
  void AddInt(const std::string& name, std::optional<int64_t>* value,
              const std::string& help, Range range = {});
  void Add(const std::string& name, std::optional<double>* value,
           const std::string& help,
           double min = -std::numeric_limits<double>::infinity(),
           double max = std::numeric_limits<double>::infinity());
  void AddDuration(const std::string& name, absl::Duration* value,
                   const std::string& help,
                   absl::Duration min = absl::ZeroDuration());
  void AddBytes(const std::string& name, int64_t* value,
                const std::string& help, Range range = {0});
  void AddChoice(const std::string& name, std::string* value,
                 const std::vector<std::string>& choices,
                 const std::string& help);
  // May be given several times, or once with separators (0: each value is
  // taken whole).
  void AddList(const std::string& name, std::vector<std::string>* value,
               const std::string& help, char separator = ',');
  // The list added last takes all words up to the next flag: for a command
  // without positional arguments.
  void LastTakesSeveralWords();
  // In the order added; `name` as the help shows it.
  void AddPositional(const std::string& name, std::string* value,
                     const std::string& help, bool required);
  // MODEL, which vLLM's and llama.cpp's users give as --model or -m.
  void AddModel(std::string* value, const std::string& help, bool required);

  // --config FILE: YAML (config_file.h) whose keys are the names of the flags
  // of this line, and of its positional arguments in lower case.
  void AddConfigFile();

  // A subcommand; owned by this. Exactly one must be given, once there is any.
  CommandLine* AddCommand(const std::string& name,
                          const std::string& description);
  // The subcommand that was given, or null.
  CommandLine* chosen() const;
  const std::string& name() const { return name_; }

  // For flags that are no program's: environment variables are not read. Call
  // it before flags are added.
  void IgnoreEnvironment() { environment_ = false; }

  // The flag added last names what is written, or means something else in
  // another command: its variable is not read.
  void LastNotFromEnvironment();

  // Parses without a word on the screen; --help is as wrong as anything else.
  absl::Status TryParse(int argc, const char* const* argv);
  // The code to exit with, if the process is to end: 0 after --help or
  // --version, 2 after one line on stderr about what is wrong.
  std::optional<int> Parse(int argc, const char* const* argv);

  // A script that completes this command line in bash, zsh or fish.
  // INVALID_ARGUMENT: another shell.
  absl::StatusOr<std::string> Completion(std::string_view shell) const;

  // Was the flag given, on the command line, in the environment or in the file
  // of --config?
  bool given(const std::string& name) const;
  // The same, but for the environment: a variable there is a default for many
  // commands, and no mistake where one of them does not use it.
  bool typed(const std::string& name) const;
  // Flags that differ from their defaults, with the subcommand's, as text for
  // the start-up log. Keys and tokens read "(set)".
  std::vector<std::pair<std::string, std::string>> NonDefaults() const;
  std::string Help() const;

 private:
  using Setter = std::function<absl::Status(std::string_view)>;
  struct Flag {
    std::string name;
    std::string type;  // for the help: INT, TEXT, ...
    std::string help;
    std::string group;
    std::string default_text;
    std::function<std::string()> text;
    std::string environment = {};   // the variable's name; empty: none
    CLI::Option* option = nullptr;  // the App's
    // Where a positional argument may be given by name as well: that.
    CLI::Option* by_name = nullptr;
    bool positional = false;
    bool inherited = false;  // its value is the environment's
    bool required = false;
    bool list = false;

    std::string Key() const;  // in the file of --config
    // Values that were not on the command line.
    absl::Status Take(std::vector<std::string> values) const;
  };

  struct Completions;  // of one command, in completion.cc

  CommandLine(std::string name, CLI::App* app);
  std::string Description() const;
  void Collect(std::vector<Completions>* all) const;
  std::string ForBash(const std::vector<Completions>& all) const;
  std::string ForZsh(const std::vector<Completions>& all) const;
  std::string ForFish(const std::vector<Completions>& all) const;
  // What remains to be done when CLI11 has read the words.
  absl::Status Finish();
  absl::Status ApplyNames();
  absl::Status ApplyEnvironment();
  absl::Status ApplyConfig();
  absl::Status Apply(const ConfigEntry& entry);
  void AddFlag(const std::string& name, const std::string& type,
               const std::string& help, std::function<std::string()> text,
               Setter set);
  // As CLI11 is given them: of "--flag=", for whose value it takes the next
  // word, two, and no "++".
  std::vector<std::string> Words(int argc, const char* const* argv) const;
  bool TakesValue(const std::string& name) const;
  void ParseWords(int argc, const char* const* argv);
  // Of CLI11's errors, which this header does not know.
  std::string Explain(const std::exception& error) const;
  std::string Stray(const std::string& word) const;
  std::string Suggestion(const std::string& unknown) const;
  const CommandLine& Deepest() const;

  const std::string name_;
  std::string config_path_;
  bool environment_ = true;
  std::string group_ = "Options";
  std::vector<std::string> examples_;
  std::vector<Flag> flags_;
  std::vector<std::unique_ptr<CommandLine>> commands_;
  std::unique_ptr<CLI::App> owned_app_;  // of the top line
  CLI::App* app_;
};

// Flags that several binaries share.

struct LogFlags {
  std::string level = "info";
  std::string format = "auto";
  std::string flight_record_dir;  // see flight_recorder.h

  void AddTo(CommandLine* line);
};

struct TlsFlags {
  std::string cert, key, ca;

  void AddTo(CommandLine* line);
};

// Of a process of the cluster.
struct ClusterTlsFlags : TlsFlags {
  bool allow_plaintext = false;

  void AddTo(CommandLine* line);
};

}  // namespace tandem

#endif  // TANDEM_COMMON_FLAGS_H_
