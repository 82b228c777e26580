// SPDX-License-Identifier: Apache-2.0
// The text of --help: examples, usage, commands, flags by group.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "common/flags.h"

namespace tandem {
namespace {

constexpr size_t kColumns = 100;

// Appends `text` in lines of at most kColumns, each after `indent` spaces.
// The first line goes on at `column`.
void AppendWrapped(std::string* out, const std::string& text, size_t indent,
                   size_t column) {
  bool line_start = column <= indent;
  for (absl::string_view word : absl::StrSplit(text, ' ')) {
    if (!line_start && column + 1 + word.size() > kColumns) {
      absl::StrAppend(out, "\n", std::string(indent, ' '));
      column = indent;
      line_start = true;
    }
    if (!line_start) {
      out->push_back(' ');
      ++column;
    }
    out->append(word.data(), word.size());
    column += word.size();
    line_start = false;
  }
  out->push_back('\n');
}

}  // namespace

std::string CommandLine::Help() const {
  std::string out;
  if (!examples_.empty()) {
    out += "Examples:\n";
    for (const std::string& example : examples_) {
      absl::StrAppend(&out, "  ", example, "\n");
    }
    out += "\n";
  }
  absl::StrAppend(&out, "Usage: ", name_, commands_.empty() ? "" : " COMMAND");
  for (const Flag& flag : flags_) {
    if (!flag.positional) continue;
    absl::StrAppend(&out, flag.required ? " " : " [", flag.name,
                    flag.required ? "" : "]");
  }
  out += " [FLAGS]\n";
  AppendWrapped(&out, Description(), 0, 0);
  if (!commands_.empty()) {
    out += "\nCommands:\n";
    for (const auto& command : commands_) {
      absl::StrAppendFormat(&out, "  %-12s ",
                            command->name_.substr(name_.size() + 1));
      AppendWrapped(&out, command->Description(), 15, 15);
    }
  }
  std::vector<std::string> groups;
  for (const Flag& flag : flags_) {
    if (std::find(groups.begin(), groups.end(), flag.group) == groups.end()) {
      groups.push_back(flag.group);
    }
  }
  for (const std::string& group : groups) {
    absl::StrAppend(&out, "\n", group, ":\n");
    for (const Flag& flag : flags_) {
      if (flag.group != group) continue;
      std::string left =
          flag.positional
              ? absl::StrCat("  ", flag.name)
              : absl::StrCat("  --", flag.type.empty() ? "[no-]" : "",
                             flag.name, flag.type.empty() ? "" : " ",
                             flag.type);
      if (flag.by_name != nullptr) {
        absl::StrAppend(&left, ", --model ", flag.name, ", -m ", flag.name);
      }
      absl::StrAppend(&out, left, "\n      ");
      std::string right = flag.help;
      if (!flag.default_text.empty()) {
        absl::StrAppend(&right, " [", flag.default_text, "]");
      }
      if (!flag.environment.empty()) {
        absl::StrAppend(&right, " (", flag.environment, ")");
      }
      AppendWrapped(&out, right, 6, 6);
    }
  }
  return out;
}

}  // namespace tandem
