// SPDX-License-Identifier: Apache-2.0
// Shell completions, generated from the flags and commands themselves. What is
// typed so far selects a command's path ("tandem lora load"); its flags, its
// commands and the choices of a flag's value are what may follow.

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "common/flags.h"

namespace tandem {
namespace {

// In single quotes, as all three shells read them.
std::string Quoted(const std::string& text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", ""}}), "'");
}

std::string Joined(const std::vector<std::string>& words) {
  return absl::StrJoin(words, " ");
}

}  // namespace

// What may stand behind a command's path.
struct CommandLine::Completions {
  struct Value {
    std::string flag;  // with its dashes
    std::string help;
    std::vector<std::string> choices;  // empty: anything
    bool takes_value = false;
  };
  std::string path;
  std::string help;
  std::vector<std::string> commands;
  std::vector<Value> flags;

  std::vector<std::string> Words() const {
    std::vector<std::string> words = commands;
    for (const Value& flag : flags) words.push_back(flag.flag);
    words.emplace_back("--help");
    return words;
  }
};

void CommandLine::Collect(std::vector<Completions>* all) const {
  Completions own;
  own.path = name_;
  own.help = Description();
  for (const auto& command : commands_) {
    own.commands.push_back(command->name_.substr(name_.size() + 1));
  }
  for (const Flag& flag : flags_) {
    if (flag.by_name != nullptr) {
      own.flags.push_back({.flag = "--model",
                           .help = flag.help,
                           .choices = {},
                           .takes_value = true});
    }
    if (flag.positional) continue;
    const bool choice = flag.type.find('|') != std::string::npos;
    own.flags.push_back({.flag = "--" + flag.name,
                         .help = flag.help,
                         .choices = choice ? std::vector<std::string>(
                                                 absl::StrSplit(flag.type, '|'))
                                           : std::vector<std::string>(),
                         .takes_value = !flag.type.empty()});
    if (flag.type.empty()) {
      own.flags.push_back({.flag = "--no-" + flag.name,
                           .help = flag.help,
                           .choices = {},
                           .takes_value = false});
    }
  }
  all->push_back(std::move(own));
  for (const auto& command : commands_) command->Collect(all);
}

absl::StatusOr<std::string> CommandLine::Completion(
    std::string_view shell) const {
  std::vector<Completions> all;
  Collect(&all);
  if (shell == "bash") return ForBash(all);
  if (shell == "zsh") return ForZsh(all);
  if (shell == "fish") return ForFish(all);
  return absl::InvalidArgumentError(absl::StrCat(
      "no completion for '", std::string(shell), "': bash, zsh or fish"));
}

std::string CommandLine::ForBash(const std::vector<Completions>& all) const {
  std::string paths, choices, words;
  for (const Completions& command : all) {
    if (command.path != name_) {
      absl::StrAppend(&paths, paths.empty() ? "" : "|", Quoted(command.path));
    }
    for (const Completions::Value& flag : command.flags) {
      if (flag.choices.empty()) continue;
      absl::StrAppend(&choices, "    ",
                      Quoted(absl::StrCat(command.path, " ", flag.flag)),
                      ") candidates=", Quoted(Joined(flag.choices)), " ;;\n");
    }
    absl::StrAppend(&words, "      ", Quoted(command.path),
                    ") candidates=", Quoted(Joined(command.Words())), " ;;\n");
  }
  return absl::StrCat("_", name_, R"(() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}
  local command_path=)",
                      name_, R"( candidates= i
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case "$command_path ${COMP_WORDS[i]}" in
      )",
                      paths,
                      R"() command_path="$command_path ${COMP_WORDS[i]}" ;;
    esac
  done
  case "$command_path $prev" in
)",
                      choices, R"(    *) case "$command_path" in
)",
                      words, R"(    esac ;;
  esac
  COMPREPLY=($(compgen -W "$candidates" -- "$cur"))
  if [[ $cur != -* && ${#COMPREPLY[@]} -eq 0 ]]; then
    COMPREPLY=($(compgen -f -- "$cur"))
  fi
}
complete -o filenames -F _)",
                      name_, " ", name_, "\n");
}

std::string CommandLine::ForZsh(const std::vector<Completions>& all) const {
  // zsh runs bash's function as it is.
  return absl::StrCat("#compdef ", name_,
                      "\nautoload -U +X compinit && compinit\n"
                      "autoload -U +X bashcompinit && bashcompinit\n",
                      ForBash(all));
}

std::string CommandLine::ForFish(const std::vector<Completions>& all) const {
  std::string script;
  for (const Completions& command : all) {
    std::vector<std::string> path = absl::StrSplit(command.path, ' ');
    path.erase(path.begin());
    std::string when;
    for (const std::string& word : path) {
      absl::StrAppend(&when, when.empty() ? "" : "; and ",
                      "__fish_seen_subcommand_from ", word);
    }
    if (path.empty()) when = "__fish_use_subcommand";
    const std::string head =
        absl::StrCat("complete -c ", name_, " -n ", Quoted(when));
    for (const std::string& name : command.commands) {
      std::string help;
      for (const Completions& other : all) {
        if (other.path == command.path + " " + name) help = other.help;
      }
      absl::StrAppend(&script, head, " -f -a ", name, " -d ", Quoted(help),
                      "\n");
    }
    for (const Completions::Value& flag : command.flags) {
      absl::StrAppend(
          &script, head, " -l ", flag.flag.substr(2),
          !flag.choices.empty()
              ? absl::StrCat(" -x -a ", Quoted(Joined(flag.choices)))
          : flag.takes_value ? " -r"
                             : "",
          " -d ", Quoted(flag.help), "\n");
    }
  }
  return script;
}

}  // namespace tandem
