// SPDX-License-Identifier: Apache-2.0
#include "cli/flight.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"

namespace tandem::cli {
namespace {

using Cut = std::pair<absl::string_view, absl::string_view>;

// "123.456789012", exactly.
bool ParseSeconds(absl::string_view text, absl::Duration* out) {
  const Cut parts = absl::StrSplit(text, absl::MaxSplits('.', 1));
  int64_t seconds = 0, nanos = 0;
  if (!absl::SimpleAtoi(parts.first, &seconds) || parts.second.size() != 9 ||
      !absl::SimpleAtoi(parts.second, &nanos)) {
    return false;
  }
  *out = absl::Seconds(seconds) + absl::Nanoseconds(nanos);
  return true;
}

struct Line {
  absl::Time time;
  std::string text;
  // Of the process, which says it again in its next file.
  absl::Duration monotonic = absl::ZeroDuration();
};

// One process's record as it was written, with its head as the last line.
struct Flight {
  std::string process;     // "decode/4711"
  absl::Duration to_wall;  // to be added to a line's time
  absl::Time written;
  std::string why;  // "signal=6"
};

// Of "# decode pid=1 monotonic=2.000000000 wall=3.000000000 signal=6".
bool ParseHead(absl::string_view line, Flight* flight) {
  const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
  if (words.size() != 6 || words[0] != "#") return false;
  std::map<absl::string_view, absl::string_view> fields;
  for (const absl::string_view word : words) {
    fields.insert(absl::StrSplit(word, absl::MaxSplits('=', 1)));
  }
  absl::Duration monotonic, wall;
  if (!ParseSeconds(fields["monotonic"], &monotonic) ||
      !ParseSeconds(fields["wall"], &wall)) {
    return false;
  }
  flight->process = absl::StrCat(words[1], "/", fields["pid"]);
  flight->to_wall = wall - monotonic;
  flight->written = absl::UnixEpoch() + wall;
  flight->why = absl::StrCat("signal=", fields["signal"]);
  return true;
}

// Adds the lines of a file, or of those with `request` alone. What is before
// a head, or has no time, is not the recorder's: a log may have its lines.
absl::Status Read(const std::filesystem::path& path, const std::string& request,
                  std::vector<Line>* lines) {
  std::ifstream file(path);
  if (!file) {
    return absl::ErrnoToStatus(errno,
                               absl::StrCat("cannot read ", path.string()));
  }
  Flight flight;
  for (std::string line; std::getline(file, line);) {
    if (ParseHead(line, &flight)) {
      if (request.empty()) {
        lines->push_back(
            {flight.written,
             absl::StrCat(flight.process, " written ", flight.why)});
      }
      continue;
    }
    // Its time, its role, and what it did.
    const std::vector<absl::string_view> parts =
        absl::StrSplit(line, absl::MaxSplits(' ', 2));
    absl::Duration time;
    if (flight.process.empty() || parts.size() < 3 ||
        !ParseSeconds(parts[0], &time) || !absl::StrContains(line, request)) {
      continue;
    }
    lines->push_back({absl::UnixEpoch() + time + flight.to_wall,
                      absl::StrCat(flight.process, " ", parts[2]), time});
  }
  if (flight.process.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path.string(), " is no flight record"));
  }
  return absl::OkStatus();
}

// The *.flight of a directory, or the file itself.
absl::StatusOr<std::vector<std::filesystem::path>> Files(
    const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) {
    return std::vector<std::filesystem::path>{path};
  }
  std::vector<std::filesystem::path> files;
  for (std::filesystem::directory_iterator entry(path, error), end;
       !error && entry != end; entry.increment(error)) {
    if (entry->path().extension() == ".flight") files.push_back(*entry);
  }
  if (error) {
    return absl::NotFoundError(
        absl::StrCat("cannot read ", path, ": ", error.message()));
  }
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat(path, " has no *.flight"));
  }
  return files;
}

// One story by time. What a process tells in two of its files is told once,
// though its clock was set between them.
void Merge(std::vector<Line>* lines) {
  const auto same = [](const Line& line) {
    return std::tie(line.monotonic, line.text);
  };
  std::stable_sort(
      lines->begin(), lines->end(),
      [&](const Line& a, const Line& b) { return same(a) < same(b); });
  lines->erase(std::unique(lines->begin(), lines->end(),
                           [&](const Line& a, const Line& b) {
                             return a.monotonic != absl::ZeroDuration() &&
                                    same(a) == same(b);
                           }),
               lines->end());
  std::stable_sort(
      lines->begin(), lines->end(),
      [](const Line& a, const Line& b) { return a.time < b.time; });
}

}  // namespace

void FlightCommand::AddTo(CommandLine* line) {
  line->Example("tandem flight /var/log/tandem");
  line->AddPositional("PATH", &path_,
                      "A file that a process left at its crash or on SIGUSR1, "
                      "or a directory with such *.flight",
                      true);
  line->Add("request", &request_,
            "Only of this request: its internal_id, as logs have it");
}

absl::Status FlightCommand::Run() {
  const absl::StatusOr<std::vector<std::filesystem::path>> files = Files(path_);
  if (!files.ok()) return files.status();
  // The record has an id's first half, in lower case.
  const std::string request =
      request_.empty()
          ? ""
          : absl::StrCat(" request=",
                         absl::AsciiStrToLower(request_.substr(0, 16)));
  std::vector<Line> lines;
  bool any = false;
  absl::Status failed;
  for (const std::filesystem::path& path : *files) {
    const absl::Status read = Read(path, request, &lines);
    if (read.ok()) {
      any = true;
      continue;
    }
    failed = read;
    // The others still tell their part.
    if (files->size() > 1) std::cerr << "left out: " << read.message() << "\n";
  }
  if (!any) return failed;
  if (lines.empty() && !request.empty()) {
    return absl::NotFoundError(
        absl::StrCat("no record of that request in ", path_,
                     ": --request is its internal_id, hex digits as logs and "
                     "`tandem status --json` have them"));
  }
  Merge(&lines);
  for (const Line& line : lines) {
    std::cout << absl::FormatTime("%H:%M:%E6S", line.time, absl::UTCTimeZone())
              << " " << line.text << "\n";
  }
  return absl::OkStatus();
}

}  // namespace tandem::cli
