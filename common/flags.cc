// SPDX-License-Identifier: Apache-2.0
// CLI11 parses; the help, the errors and the checks are ours. CLI11 throws: no
// exception leaves this file.
#include "common/flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "common/config_file.h"
#include "common/nearest.h"
#include "common/version.h"

namespace tandem {
namespace {

std::string EnvironmentName(const std::string& flag) {
  std::string name = "TANDEM_";
  for (char c : flag) {
    name += c == '-' ? '_' : static_cast<char>(std::toupper(c));
  }
  return name;
}

template <typename T>
absl::StatusOr<T> ParseNumber(std::string_view text, std::string_view what,
                              T min, T max) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end || !(value >= min) ||
      !(value <= max)) {
    const bool bounded = min > std::numeric_limits<T>::lowest() ||
                         max < std::numeric_limits<T>::max();
    return absl::InvalidArgumentError(
        absl::StrCat("'", std::string(text), "' is not ", std::string(what),
                     bounded ? absl::StrCat(" from ", min, " to ", max) : ""));
  }
  return value;
}

// The doubles of flags are bounded by infinity when they are not bounded.
absl::StatusOr<double> ParseDouble(std::string_view text, double min,
                                   double max) {
  auto value = ParseNumber<double>(text, "a number", min, max);
  if (value.ok() && !(*value > -std::numeric_limits<double>::infinity() &&
                      *value < std::numeric_limits<double>::infinity())) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", std::string(text), "' is not a finite number"));
  }
  return value;
}

absl::StatusOr<int64_t> ParseInt(std::string_view text, Range range) {
  return ParseNumber<int64_t>(text, "a whole number", range.min, range.max);
}

// To CLI11, "++" ends a subcommand's words: it is given this instead, which no
// word of a command line can be.
std::string HidePluses(const std::string& word) {
  return word == "++" ? word + '\0' : word;
}
std::string ShowPluses(const std::string& word) {
  return word == HidePluses("++") ? "++" : word;
}

bool IsSecret(const std::string& name) {
  return name.find("api-key") != std::string::npos ||
         name.find("token-file") != std::string::npos;
}

}  // namespace

CommandLine::CommandLine(std::string name, std::string description)
    : name_(std::move(name)),
      owned_app_(std::make_unique<CLI::App>(std::move(description), name_)),
      app_(owned_app_.get()) {
  app_->set_help_flag("-h,--help", "");
  app_->set_version_flag("--version", absl::StrCat(name_, " ", kVersion));
}

CommandLine::CommandLine(std::string name, CLI::App* app)
    : name_(std::move(name)), app_(app) {}

CommandLine::~CommandLine() = default;

void CommandLine::AddFlag(const std::string& name, const std::string& type,
                          const std::string& help,
                          std::function<std::string()> text, Setter set) {
  std::string default_text = text();
  Flag flag{.name = name,
            .type = type,
            .help = help,
            .group = group_,
            .default_text = std::move(default_text),
            .text = std::move(text)};
  flag.option =
      app_->add_option("--" + name, [](const CLI::results_t&) { return true; })
          ->transform(ShowPluses);
  if (environment_) flag.environment = EnvironmentName(name);
  // Checks run once per value, in order, whatever source it came from.
  flag.option->check([set = std::move(set)](const std::string& value) {
    const absl::Status status = set(value);
    return std::string(status.message());
  });
  flag.option->multi_option_policy(CLI::MultiOptionPolicy::Throw);
  flags_.push_back(std::move(flag));
}

void CommandLine::Add(const std::string& name, std::string* value,
                      const std::string& help) {
  AddFlag(
      name, "TEXT", help, [value] { return *value; },
      [value](std::string_view text) {
        *value = text;
        return absl::OkStatus();
      });
}

void CommandLine::Add(const std::string& name, bool* value,
                      const std::string& help) {
  Flag flag{.name = name,
            .type = "",
            .help = help,
            .group = group_,
            .default_text = *value ? "on" : "off",
            .text = [value] { return *value ? "on" : "off"; }};
  flag.option = app_->add_flag("--" + name + ",!--no-" + name, *value);
  flag.option->check([](const std::string& text) -> std::string {
    bool parsed = false;
    if (CLI::detail::lexical_cast(text, parsed)) return "";
    return absl::StrCat("'", text, "' is neither on nor off");
  });
  if (environment_) flag.environment = EnvironmentName(name);
  flags_.push_back(std::move(flag));
}

void CommandLine::Add(const std::string& name, double* value,
                      const std::string& help, double min, double max) {
  AddFlag(
      name, "NUMBER", help, [value] { return absl::StrCat(*value); },
      [value, min, max](std::string_view text) {
        auto parsed = ParseDouble(text, min, max);
        if (parsed.ok()) *value = *parsed;
        return parsed.status();
      });
}

void CommandLine::Add(const std::string& name, std::optional<double>* value,
                      const std::string& help, double min, double max) {
  AddFlag(
      name, "NUMBER", help,
      [value] { return value->has_value() ? absl::StrCat(**value) : ""; },
      [value, min, max](std::string_view text) {
        auto parsed = ParseDouble(text, min, max);
        if (parsed.ok()) *value = *parsed;
        return parsed.status();
      });
}

void CommandLine::AddInt(const std::string& name, int* value,
                         const std::string& help, Range range) {
  range.min = std::max<int64_t>(range.min, std::numeric_limits<int>::min());
  range.max = std::min<int64_t>(range.max, std::numeric_limits<int>::max());
  AddFlag(
      name, "INT", help, [value] { return absl::StrCat(*value); },
      [value, range](std::string_view text) {
        auto parsed = ParseInt(text, range);
        if (parsed.ok()) *value = static_cast<int>(*parsed);
        return parsed.status();
      });
}

void CommandLine::AddInt(const std::string& name, int64_t* value,
                         const std::string& help, Range range) {
  AddFlag(
      name, "INT", help, [value] { return absl::StrCat(*value); },
      [value, range](std::string_view text) {
        auto parsed = ParseInt(text, range);
        if (parsed.ok()) *value = *parsed;
        return parsed.status();
      });
}

void CommandLine::AddInt(const std::string& name, std::optional<int64_t>* value,
                         const std::string& help, Range range) {
  AddFlag(
      name, "INT", help,
      [value] { return value->has_value() ? absl::StrCat(**value) : ""; },
      [value, range](std::string_view text) {
        auto parsed = ParseInt(text, range);
        if (parsed.ok()) *value = *parsed;
        return parsed.status();
      });
}

void CommandLine::AddDuration(const std::string& name, absl::Duration* value,
                              const std::string& help, absl::Duration min) {
  AddFlag(
      name, "DURATION", help, [value] { return absl::FormatDuration(*value); },
      [value, min](std::string_view text) -> absl::Status {
        auto parsed = ParseDuration(text);
        if (!parsed.ok()) return parsed.status();
        if (*parsed < min) {
          return absl::InvalidArgumentError(
              absl::StrCat("'", std::string(text), "' is below ",
                           absl::FormatDuration(min)));
        }
        *value = *parsed;
        return absl::OkStatus();
      });
}

void CommandLine::AddBytes(const std::string& name, int64_t* value,
                           const std::string& help, Range range) {
  AddFlag(
      name, "SIZE", help, [value] { return FormatBytes(*value); },
      [value, range](std::string_view text) -> absl::Status {
        auto parsed = ParseBytes(text);
        if (!parsed.ok()) return parsed.status();
        if (*parsed < range.min || *parsed > range.max) {
          return absl::InvalidArgumentError(absl::StrCat(
              "'", std::string(text), "' is not from ", FormatBytes(range.min),
              " to ", FormatBytes(range.max)));
        }
        *value = *parsed;
        return absl::OkStatus();
      });
}

void CommandLine::AddChoice(const std::string& name, std::string* value,
                            const std::vector<std::string>& choices,
                            const std::string& help) {
  AddFlag(
      name, absl::StrJoin(choices, "|"), help, [value] { return *value; },
      [value, choices](std::string_view text) -> absl::Status {
        if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
          return absl::InvalidArgumentError(
              absl::StrCat("'", std::string(text), "' is none of ",
                           absl::StrJoin(choices, ", ")));
        }
        *value = text;
        return absl::OkStatus();
      });
}

void CommandLine::AddList(const std::string& name,
                          std::vector<std::string>* value,
                          const std::string& help, char separator) {
  AddFlag(
      name, separator == 0 ? "TEXT" : "TEXT,...", help,
      [value] { return absl::StrJoin(*value, ","); },
      [value, first = true](std::string_view text) mutable {
        if (std::exchange(first, false)) value->clear();
        value->emplace_back(text);
        return absl::OkStatus();
      });
  flags_.back().list = true;
  flags_.back()
      .option->expected(1)
      ->delimiter(separator)
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

void CommandLine::LastTakesSeveralWords() {
  flags_.back().option->expected(1, -1)->allow_extra_args(true);
}

void CommandLine::LastNotFromEnvironment() {
  flags_.back().environment.clear();
}

void CommandLine::AddPositional(const std::string& name, std::string* value,
                                const std::string& help, bool required) {
  Flag flag{.name = name,
            .type = "",
            .help = help,
            .group = "Arguments",
            .default_text = *value,
            .text = [value] { return *value; },
            .positional = true,
            // CLI11 would miss what only the file of --config has.
            .required = required};
  flag.option = app_->add_option(name, *value)->transform(ShowPluses);
  flags_.push_back(std::move(flag));
}

void CommandLine::AddModel(std::string* value, const std::string& help,
                           bool required) {
  AddPositional("MODEL", value, help, required);
  flags_.back().by_name =
      app_->add_option("-m,--model", [](const CLI::results_t&) { return true; })
          ->transform(ShowPluses);
}

CommandLine* CommandLine::AddCommand(const std::string& name,
                                     const std::string& description) {
  CLI::App* app = app_->add_subcommand(name, description);
  app->set_help_flag("-h,--help", "");
  app_->require_subcommand(1);
  commands_.emplace_back(new CommandLine(name_ + " " + name, app));
  return commands_.back().get();
}

std::string CommandLine::Description() const { return app_->get_description(); }

CommandLine* CommandLine::chosen() const {
  for (const auto& command : commands_) {
    if (command->app_->parsed()) return command.get();
  }
  return nullptr;
}

std::string CommandLine::Flag::Key() const {
  return positional
             ? absl::StrReplaceAll(absl::AsciiStrToLower(name), {{"_", "-"}})
             : name;
}

absl::Status CommandLine::Flag::Take(std::vector<std::string> values) const {
  for (std::string& value : values) option->add_result(std::move(value));
  try {
    if (!values.empty()) option->run_callback();
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(error.what());
  }
  return absl::OkStatus();
}

void CommandLine::AddConfigFile() {
  AddFlag(
      "config", "FILE",
      "YAML: flags by their names, for those that neither the command line nor "
      "the environment gives",
      [this] { return config_path_; },
      [this](std::string_view text) {
        config_path_ = text;
        return absl::OkStatus();
      });
}

absl::Status CommandLine::Apply(const ConfigEntry& entry) {
  std::vector<std::string> known;
  for (const Flag& flag : flags_) {
    known.push_back(flag.Key());
    if (flag.Key() != entry.key || flag.name == "config") continue;
    if (flag.option->count() > 0) return absl::OkStatus();
    std::vector<std::string> values = entry.values;
    if (!flag.list && entry.kind == ConfigEntry::Kind::kList) {
      return absl::InvalidArgumentError(
          absl::StrCat(entry.key, " takes one value and no list"));
    }
    if (!flag.list && entry.kind == ConfigEntry::Kind::kMap) {
      values = {entry.json};
    }
    if (flag.list && entry.nested) {
      return absl::InvalidArgumentError(
          absl::StrCat(entry.key, " is a map of single values"));
    }
    return flag.Take(std::move(values));
  }
  if (entry.key == "config") {
    return absl::InvalidArgumentError("config: a file cannot name another one");
  }
  const std::string nearest = Nearest(entry.key, known);
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown key ", entry.key,
      nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?")));
}

absl::Status CommandLine::ApplyNames() {
  for (const Flag& flag : flags_) {
    if (flag.by_name == nullptr || flag.by_name->count() == 0) continue;
    const std::string& value = flag.by_name->results().front();
    if (flag.option->count() > 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          flag.name, " is given twice, as '", flag.option->results().front(),
          "' and with ", flag.by_name->get_name(), " as '", value, "'"));
    }
    const absl::Status status = flag.Take({value});
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CommandLine::ApplyEnvironment() {
  for (Flag& flag : flags_) {
    if (flag.environment.empty() || flag.option->count() > 0) continue;
    const char* const value = std::getenv(flag.environment.c_str());
    if (value == nullptr || *value == '\0') continue;
    const absl::Status status = flag.Take({value});
    flag.inherited = true;
    if (status.ok()) continue;
    // Nobody has typed the flag.
    absl::string_view what = status.message();
    absl::ConsumePrefix(&what, absl::StrCat("--", flag.name, ": "));
    return absl::InvalidArgumentError(
        absl::StrCat(flag.environment, ": ", what));
  }
  return absl::OkStatus();
}

absl::Status CommandLine::ApplyConfig() {
  if (config_path_.empty()) return absl::OkStatus();
  const absl::StatusOr<std::vector<ConfigEntry>> entries =
      ReadConfigFile(config_path_);
  if (!entries.ok()) return entries.status();
  for (const ConfigEntry& entry : *entries) {
    const absl::Status status = Apply(entry);
    if (status.ok()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        config_path_, ":", entry.line, ": ", std::string(status.message())));
  }
  return absl::OkStatus();
}

absl::Status CommandLine::Finish() {
  absl::Status status = ApplyNames();
  if (status.ok()) status = ApplyEnvironment();
  if (status.ok()) status = ApplyConfig();
  if (!status.ok()) return status;
  for (const Flag& flag : flags_) {
    if (flag.required && flag.option->count() == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag.name, " is required"));
    }
  }
  CommandLine* const command = chosen();
  return command == nullptr ? absl::OkStatus() : command->Finish();
}

const CommandLine& CommandLine::Deepest() const {
  const CommandLine* command = chosen();
  return command == nullptr ? *this : command->Deepest();
}

std::string CommandLine::Suggestion(const std::string& unknown) const {
  std::vector<std::string> known = {"--help"};
  for (const CommandLine* line : {this, &Deepest()}) {
    for (const Flag& flag : line->flags_) {
      if (!flag.positional) known.push_back("--" + flag.name);
      if (flag.by_name != nullptr) known.push_back(flag.by_name->get_name());
      if (flag.type.empty()) known.push_back("--no-" + flag.name);
    }
    for (const auto& command : line->commands_) {
      known.push_back(command->app_->get_name());
    }
  }
  return Nearest(unknown.substr(0, unknown.find('=')), known);
}

std::string CommandLine::Stray(const std::string& word) const {
  const std::string nearest = Suggestion(word);
  const bool flag = word.rfind('-', 0) == 0;
  return absl::StrCat(
      flag ? "unknown flag " : "unexpected argument ",
      flag ? word.substr(0, word.find('=')) : word,
      nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?"));
}

std::vector<std::string> CommandLine::Words(int argc,
                                            const char* const* argv) const {
  std::vector<std::string> words(argv, argv + argc);
  for (size_t i = 1; i < words.size() && words[i] != "--"; ++i) {
    std::string& word = words[i];
    word = HidePluses(word);
    if (!absl::StartsWith(word, "--") || !absl::EndsWith(word, "=")) continue;
    if (!TakesValue(word.substr(2, word.size() - 3))) continue;
    word.pop_back();
    words.insert(words.begin() + static_cast<std::ptrdiff_t>(i) + 1, "");
    ++i;
  }
  return words;
}

bool CommandLine::TakesValue(const std::string& name) const {
  const auto is = [&](const Flag& flag) {
    return flag.name == name && !flag.type.empty() &&
           (!flag.positional || flag.by_name != nullptr);
  };
  return std::any_of(flags_.begin(), flags_.end(), is) ||
         std::any_of(commands_.begin(), commands_.end(),
                     [&](const auto& c) { return c->TakesValue(name); });
}

void CommandLine::ParseWords(int argc, const char* const* argv) {
  std::vector<std::string> words = Words(argc, argv);
  std::reverse(words.begin(), words.end());  // as CLI11 has them
  words.pop_back();                          // the program's name
  app_->parse(std::move(words));
}

absl::Status CommandLine::TryParse(int argc, const char* const* argv) {
  try {
    ParseWords(argc, argv);
    return Finish();
  } catch (const CLI::ParseError& parse_error) {
    return absl::InvalidArgumentError(Explain(parse_error));
  }
}

std::string CommandLine::Explain(const std::exception& error) const {
  const auto* const parse_error = dynamic_cast<const CLI::ParseError*>(&error);
  // CLI11 tells of a missing subcommand before it tells of the word that was
  // meant as one.
  const auto extras = app_->remaining(/*recurse=*/true);
  const auto code = static_cast<CLI::ExitCodes>(parse_error->get_exit_code());
  const bool stray = code == CLI::ExitCodes::ExtrasError ||
                     code == CLI::ExitCodes::RequiredError;
  if (code == CLI::ExitCodes::ArgumentMismatch) {
    const std::string what = error.what();
    const std::string flag = what.substr(0, what.find(':'));
    if (absl::EndsWith(what, " missing")) {
      return absl::StrCat(flag, " needs a value");
    }
    if (absl::StrContains(what, "At Most 1 required")) {
      return absl::StrCat(flag, " is given more than once");
    }
  }
  if (!stray || extras.empty()) return error.what();
  const auto flag =
      std::find_if(extras.begin(), extras.end(),
                   [](const auto& word) { return word.rfind('-', 0) == 0; });
  return Stray(ShowPluses(flag != extras.end() ? *flag : extras.front()));
}

std::optional<int> CommandLine::Parse(int argc, const char* const* argv) {
  std::string error;
  try {
    ParseWords(argc, argv);
    const absl::Status status = Finish();
    if (status.ok()) return std::nullopt;
    error = std::string(status.message());
  } catch (const CLI::CallForHelp&) {
    std::fputs(Deepest().Help().c_str(), stdout);
    return 0;
  } catch (const CLI::CallForVersion& version) {
    absl::PrintF("%s\n", version.what());
    return 0;
  } catch (const CLI::ParseError& parse_error) {
    error = Explain(parse_error);
  }
  absl::FPrintF(stderr, "%s: %s (see %s --help)\n", name_, error,
                Deepest().name_);
  return 2;
}

bool CommandLine::given(const std::string& name) const {
  for (const CommandLine* line : {this, &Deepest()}) {
    for (const Flag& flag : line->flags_) {
      if (flag.name == name && flag.option->count() > 0) return true;
    }
  }
  return false;
}

bool CommandLine::typed(const std::string& name) const {
  for (const CommandLine* line : {this, &Deepest()}) {
    for (const Flag& flag : line->flags_) {
      if (flag.name == name && flag.inherited) return false;
    }
  }
  return given(name);
}

std::vector<std::pair<std::string, std::string>> CommandLine::NonDefaults()
    const {
  std::vector<std::pair<std::string, std::string>> changed;
  for (const Flag& flag : flags_) {
    const std::string text = flag.text();
    if (text == flag.default_text) continue;
    changed.emplace_back(flag.name, IsSecret(flag.name) ? "(set)" : text);
  }
  if (const CommandLine* command = chosen(); command != nullptr) {
    for (auto& pair : command->NonDefaults())
      changed.push_back(std::move(pair));
  }
  return changed;
}

}  // namespace tandem
