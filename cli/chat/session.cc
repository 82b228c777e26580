// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fstream>
#include <iostream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/chat/chat.h"
#include "common/error.h"
#include "common/lifecycle.h"
#include "common/read_file.h"
#include "common/utf8.h"

namespace tandem::chat {
namespace {

constexpr const char* kHelp =
    R"(/clear            forget the conversation, not the system message
/system [TEXT]    show or set the system message
/regen            answer the last message again
/set NAME VALUE   a sampling flag such as temperature or max_tokens;
                  without VALUE its default
/save FILE        the conversation as JSON
/load FILE        and back
/stats            tokens so far, and times of the last answer
/exit             or Ctrl-D
A line that ends with \ goes on in the next; """ opens and ends several lines.
Ctrl-C stops an answer, or gives up a line.
)";

absl::Status WriteAll(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (file) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("cannot write '", path, "'"));
}

}  // namespace

ChatSession::ChatSession(ChatOptions options, cli::SamplingFlags sampling,
                         AskFunction ask)
    : options_(options), sampling_(std::move(sampling)), ask_(std::move(ask)) {}

void ChatSession::Say(const std::string& line) {
  std::cout << (options_.colour ? "\033[2m" : "") << line
            << (options_.colour ? "\033[0m" : "") << "\n"
            << std::flush;
}

void ChatSession::Tell(const absl::Status& status) {
  status_ = status;
  // On a pipe it ends the program, whose last words it is.
  if (status.ok() || !options_.terminal) return;
  std::cout << std::flush;
  std::cerr << "error: " << ForTerminal(std::string(status.message())) << "\n";
}

bool ChatSession::HandleLine(const std::string& line) {
  const std::string text(absl::StripAsciiWhitespace(line));
  if (text.empty()) return true;
  if (ValidUtf8(text) != text) {
    Tell(absl::InvalidArgumentError("this line is not UTF-8 text"));
    return true;
  }
  if (text.front() == '/') return HandleCommand(text);
  conversation_.Add("user", line);
  Respond();
  return true;
}

bool ChatSession::HandleCommand(const std::string& line) {
  const size_t space = line.find_first_of(" \t\n");
  const std::string name = line.substr(0, space);
  const std::string rest(absl::StripAsciiWhitespace(
      space == std::string::npos ? "" : line.substr(space)));
  status_ = absl::OkStatus();
  if (name == "/exit" || name == "/quit" || name == "/bye") return false;
  if (name == "/help" || name == "/?") {
    std::cout << kHelp << std::flush;
  } else if (name == "/clear") {
    conversation_.Clear();
    Say("forgotten");
  } else if (name == "/system") {
    if (!rest.empty()) conversation_.set_system(rest);
    Say(conversation_.system().empty() ? "no system message"
                                       : conversation_.system());
  } else if (name == "/regen") {
    const Conversation before = conversation_;
    if (conversation_.ReopenLastQuestion()) {
      Respond();
    } else {
      Tell(absl::FailedPreconditionError("there is no message to answer"));
    }
    if (!status_.ok()) conversation_ = before;
  } else if (name == "/set") {
    const size_t end = rest.find_first_of(" \t=");
    Set(rest.substr(0, end),
        std::string(absl::StripAsciiWhitespace(
            end == std::string::npos ? "" : rest.substr(end + 1))));
  } else if (name == "/save" || name == "/load") {
    if (rest.empty()) {
      Tell(absl::InvalidArgumentError(absl::StrCat(name, " needs a FILE")));
    } else if (name == "/save") {
      Tell(WriteAll(rest, conversation_.ToJson()));
    } else {
      const absl::StatusOr<std::string> text = ReadFile(rest);
      const absl::Status status =
          text.ok() ? conversation_.FromJson(*text) : text.status();
      Tell(status.ok() ? status : Annotate(status, rest));
    }
    if (status_.ok()) {
      Say(absl::StrFormat("%d messages", conversation_.messages().size()));
    }
  } else if (name == "/stats") {
    ShowStats();
  } else {
    Tell(absl::InvalidArgumentError(
        absl::StrCat("there is no ", name, "; /help lists what there is")));
  }
  return true;
}

absl::Status ChatSession::FillSampling(v1::GenerateRequest* request) const {
  cli::SamplingFlags flags = sampling_;
  CommandLine line("/set", "");
  line.IgnoreEnvironment();
  flags.AddTo(&line);
  std::vector<std::string> words = {"/set"};
  for (const auto& [name, value] : set_) {
    words.push_back(absl::StrCat("--", name, "=", value));
  }
  std::vector<const char*> argv;
  argv.reserve(words.size());
  for (const std::string& word : words) argv.push_back(word.c_str());
  const absl::Status parsed =
      line.TryParse(static_cast<int>(argv.size()), argv.data());
  if (!parsed.ok()) return parsed;
  const absl::Status status = flags.Fill(request);
  if (!status.ok()) return status;
  const v1::OutputOptions& output = request->output();
  if (output.has_logprobs() || output.has_prompt_logprobs() ||
      output.has_attention()) {
    return UsageError(
        "a chat shows text alone: leave out logprobs, prompt-logprobs and "
        "attention, which tandem generate --chat --json prints");
  }
  if (request->sampling().n() > 1 || request->has_beam()) {
    return UsageError("a chat has one answer: leave out n and beam-width");
  }
  return absl::OkStatus();
}

void ChatSession::Set(const std::string& given, const std::string& value) {
  std::string name = given;
  std::replace(name.begin(), name.end(), '_', '-');
  if (name.empty()) {
    for (const auto& [flag, text] : set_) Say(absl::StrCat(flag, " ", text));
    if (set_.empty()) Say("nothing is set; /set NAME VALUE does");
    return;
  }
  const std::map<std::string, std::string> before = set_;
  if (value.empty()) {
    set_.erase(name);
  } else {
    set_[name] = value;
  }
  v1::GenerateRequest request;
  const absl::Status status = FillSampling(&request);
  if (!status.ok()) set_ = before;
  Tell(status);
  if (status.ok()) {
    Say(value.empty() ? name + " is its default again"
                      : absl::StrCat(name, " ", value));
  }
}

void ChatSession::ShowStats() {
  Say(absl::StrFormat(
      "answers %d, prompt tokens %d (%d cached), tokens generated %d", answers_,
      prompt_tokens_, cached_tokens_, completion_tokens_));
  if (!footer_.empty()) Say("last: " + footer_);
}

void ChatSession::Respond() {
  v1::GenerateRequest request;
  absl::Status status = FillSampling(&request);
  if (status.ok()) {
    conversation_.Fill(request.mutable_chat());
    bool newline = false;
    const absl::StatusOr<Answer> answer =
        ask_(request, [&](std::string_view text, bool reasoning) {
          // On a pipe answers are all that is printed.
          if (reasoning && !options_.terminal) return;
          newline = text.back() == '\n';
          const bool dim = reasoning && options_.colour;
          std::cout << (dim ? "\033[2m" : "")
                    << (options_.terminal ? ForTerminal(text)
                                          : std::string(text))
                    << (dim ? "\033[0m" : "") << std::flush;
        });
    if (!newline) std::cout << "\n" << std::flush;
    status = answer.status();
    if (answer.ok()) {
      conversation_.Add("assistant", answer->text);
      if (answer->interrupted) {
        Say("stopped");
      } else {
        const v1::Usage& usage = answer->done.usage();
        ++answers_;
        prompt_tokens_ += usage.prompt_tokens();
        cached_tokens_ += usage.cached_tokens();
        completion_tokens_ += usage.completion_tokens();
        footer_ = Footer(answer->done);
        if (options_.timings) Say(footer_);
      }
    }
  }
  if (!status.ok()) {
    conversation_.DropOpenQuestion();
    if (ErrorReason(status) == "CONTEXT_LENGTH_EXCEEDED") {
      status = absl::InvalidArgumentError(
          absl::StrCat(std::string(status.message()),
                       "; /clear begins anew, /set max_tokens asks for less"));
    }
  }
  Tell(status);
}

}  // namespace tandem::chat
