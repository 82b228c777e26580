// SPDX-License-Identifier: Apache-2.0
#include "cli/chat/line_reader.h"

#include <fcntl.h>
#include <histedit.h>
#include <unistd.h>

#include <clocale>
#include <filesystem>
#include <iostream>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem::chat {
namespace {

constexpr int kHistoryLines = 1000;
constexpr std::string_view kFence = "\"\"\"";

}  // namespace

struct LineReader::Editor {
  EditLine* line = nullptr;
  History* history = nullptr;
  std::string history_file;
  std::string prompt;
  bool colour = false;
  bool more = false;
  bool interrupted = false;

  static Editor* Of(EditLine* line) {
    void* data = nullptr;
    el_get(line, EL_CLIENTDATA, &data);
    return static_cast<Editor*>(data);
  }
  // \1 stands around what takes no room.
  static char* Prompt(EditLine* line) {
    Editor* const editor = Of(line);
    const char* const mark = editor->more ? "... " : ">>> ";
    editor->prompt = editor->colour
                         ? absl::StrCat("\1\033[1;32m\1", mark, "\1\033[0m\1")
                         : mark;
    return editor->prompt.data();
  }
  // After each line: a terminal that goes (SIGHUP) leaves no time for it.
  void Save() const {
    if (history_file.empty()) return;
    std::error_code error;
    std::filesystem::create_directories(
        std::filesystem::path(history_file).parent_path(), error);
    // H_SAVE would make a new file as the umask says.
    const int fd =
        open(history_file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0) close(fd);
    HistEvent event;
    ::history(history, &event, H_SAVE, history_file.c_str());
  }
  static unsigned char OnInterrupt(EditLine* line, int /*key*/) {
    Of(line)->interrupted = true;
    return CC_NEWLINE;
  }
};

LineReader::LineReader(bool terminal, bool colour, std::string history) {
  if (!terminal) return;
  std::setlocale(LC_CTYPE, "");
  editor_ = std::make_unique<Editor>();
  editor_->colour = colour;
  EditLine* const line = el_init("tandem", stdin, stdout, stderr);
  editor_->line = line;
  el_set(line, EL_CLIENTDATA, editor_.get());
  el_set(line, EL_PROMPT_ESC, Editor::Prompt, '\1');
  el_set(line, EL_EDITOR, "emacs");
  el_set(line, EL_SIGNAL, 1);  // the terminal's size, and stop and go on
  // Ctrl-C is a key while a line is edited, and a signal at other times.
  el_set(line, EL_SETTY, "-d", "-isig", nullptr);
  el_set(line, EL_ADDFN, "tandem-interrupt", "Give this line up",
         Editor::OnInterrupt);
  el_set(line, EL_BIND, "^C", "tandem-interrupt", nullptr);
  el_set(line, EL_BIND, "^R", "em-inc-search-prev", nullptr);
  HistEvent event;
  editor_->history = history_init();
  ::history(editor_->history, &event, H_SETSIZE, kHistoryLines);
  ::history(editor_->history, &event, H_SETUNIQUE, 1);
  el_set(line, EL_HIST, ::history, editor_->history);
  editor_->history_file = std::move(history);
  if (!editor_->history_file.empty()) {
    ::history(editor_->history, &event, H_LOAD, editor_->history_file.c_str());
  }
}

LineReader::~LineReader() {
  if (editor_ == nullptr) return;
  history_end(editor_->history);
  el_end(editor_->line);
}

std::optional<std::string> LineReader::ReadLine(bool more) {
  if (editor_ == nullptr) {
    std::string line;
    if (!std::getline(std::cin, line)) return std::nullopt;
    return line;
  }
  editor_->more = more;
  editor_->interrupted = false;
  int count = 0;
  // Before the prompt shows, since el_gets makes Ctrl-C a key only after it.
  el_set(editor_->line, EL_PREP_TERM, 1);
  const char* const text = el_gets(editor_->line, &count);
  if (editor_->interrupted) return std::string();
  if (text == nullptr || count <= 0) return std::nullopt;
  std::string line(text, static_cast<size_t>(count));
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) {
    line.pop_back();
  }
  HistEvent event;
  if (!line.empty()) {
    ::history(editor_->history, &event, H_ENTER, line.c_str());
    editor_->Save();
  }
  return line;
}

std::optional<std::string> LineReader::Read() {
  std::optional<std::string> line = ReadLine(false);
  if (!line.has_value()) return std::nullopt;
  const auto given_up = [this] {
    return editor_ != nullptr && editor_->interrupted;
  };
  std::string text = *std::move(line);
  if (text.rfind(kFence, 0) == 0) {
    text.erase(0, kFence.size());
    size_t end;
    while ((end = text.find(kFence)) == std::string::npos) {
      const std::optional<std::string> next = ReadLine(true);
      if (given_up()) return std::string();
      if (!next.has_value()) return text;
      absl::StrAppend(&text, text.empty() ? "" : "\n", *next);
    }
    return text.substr(0, end);
  }
  while (!text.empty() && text.back() == '\\') {
    text.back() = '\n';
    const std::optional<std::string> next = ReadLine(true);
    if (given_up()) return std::string();
    if (!next.has_value()) break;
    text += *next;
  }
  return text;
}

}  // namespace tandem::chat
