// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/trace.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/time/civil_time.h"
#include "cli/bench/lengths.h"
#include "cli/bench/prompt.h"
#include "common/read_file.h"

namespace tandem::bench {
namespace {

// Seconds; far beyond any trace, and exact to microseconds in a double.
constexpr double kLatest = 1e9;

absl::Status Malformed(const std::string& message) {
  return absl::InvalidArgumentError(message);
}

// Quoted in a message: what a hostile file puts there must not run on.
std::string Quoted(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text.substr(0, 40)) {
    quoted += std::isprint(static_cast<unsigned char>(c)) ? c : '?';
  }
  return quoted + (text.size() > 40 ? "...'" : "'");
}

std::string_view TakeLine(std::string_view* text) {
  const size_t end = text->find('\n');
  std::string_view line = text->substr(0, end);
  text->remove_prefix(end == std::string_view::npos ? text->size() : end + 1);
  if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  return line;
}

std::vector<std::string_view> SplitFields(std::string_view line) {
  std::vector<std::string_view> fields;
  for (;;) {
    const size_t comma = line.find(',');
    fields.push_back(line.substr(0, comma));
    if (comma == std::string_view::npos) return fields;
    line.remove_prefix(comma + 1);
  }
}

absl::StatusOr<int> ParseTokens(std::string_view text, const char* column) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end || value < 1 || value > kMaxTokens) {
    return Malformed(absl::StrCat(column, " is ", Quoted(text),
                                  ", not a whole number from 1 to ",
                                  kMaxTokens));
  }
  return static_cast<int>(value);
}

// Takes `digits` digits and the `separator` behind them (0: none).
bool TakeNumber(std::string_view* text, size_t digits, char separator,
                int* value) {
  const size_t length = digits + (separator == 0 ? 0 : 1);
  if (text->size() < length) return false;
  *value = 0;
  for (size_t i = 0; i < digits; ++i) {
    const char c = (*text)[i];
    if (c < '0' || c > '9') return false;
    *value = *value * 10 + (c - '0');
  }
  if (separator != 0 && (*text)[digits] != separator) return false;
  text->remove_prefix(length);
  return true;
}

// "2023-11-16 18:15:46.6805900", in seconds since 1970; a zone behind it must
// be UTC's.
std::optional<double> ParseTimestamp(std::string_view text) {
  int year, month, day, hour, minute, second;
  if (!TakeNumber(&text, 4, '-', &year) || !TakeNumber(&text, 2, '-', &month) ||
      !(TakeNumber(&text, 2, ' ', &day) || TakeNumber(&text, 2, 'T', &day)) ||
      !TakeNumber(&text, 2, ':', &hour) ||
      !TakeNumber(&text, 2, ':', &minute) ||
      !TakeNumber(&text, 2, 0, &second)) {
    return std::nullopt;
  }
  double fraction = 0;
  if (!text.empty() && text.front() == '.') {
    text.remove_prefix(1);
    if (text.empty()) return std::nullopt;
    int digit;
    for (double unit = 0.1; TakeNumber(&text, 1, 0, &digit); unit /= 10) {
      fraction += unit * digit;
    }
  }
  if (!text.empty() && text != "Z" && text != "+00:00") return std::nullopt;
  const absl::CivilSecond civil(year, month, day, hour, minute, second);
  // A date that does not exist comes out as another one.
  if (civil.month() != month || civil.day() != day || civil.hour() != hour ||
      civil.minute() != minute || civil.second() != second) {
    return std::nullopt;
  }
  return static_cast<double>(civil - absl::CivilSecond()) + fraction;
}

struct Columns {
  size_t timestamp = 0, prompt = 0, output = 0, count = 0;
};

absl::StatusOr<Columns> ParseHeader(std::string_view line) {
  const std::vector<std::string_view> names = SplitFields(line);
  Columns columns;
  columns.count = names.size();
  const auto find = [&](std::string_view name, size_t* index) {
    const auto it = std::find(names.begin(), names.end(), name);
    *index = static_cast<size_t>(it - names.begin());
    return it != names.end();
  };
  if (!find("TIMESTAMP", &columns.timestamp) ||
      !find("ContextTokens", &columns.prompt) ||
      !find("GeneratedTokens", &columns.output)) {
    return Malformed(absl::StrCat(
        "the header is ", Quoted(line),
        "; expected the columns TIMESTAMP, ContextTokens, GeneratedTokens "
        "(Azure's trace), or a JSON object per line (Mooncake's)"));
  }
  return columns;
}

absl::StatusOr<TraceRow> ParseCsvRow(std::string_view line,
                                     const Columns& columns) {
  const std::vector<std::string_view> fields = SplitFields(line);
  if (fields.size() != columns.count) {
    return Malformed(
        absl::StrCat(fields.size(), " fields; the header has ", columns.count));
  }
  TraceRow row;
  const std::optional<double> at = ParseTimestamp(fields[columns.timestamp]);
  if (!at.has_value()) {
    return Malformed(absl::StrCat("TIMESTAMP is ",
                                  Quoted(fields[columns.timestamp]),
                                  ", not like 2023-11-16 18:15:46.6805900"));
  }
  row.at_s = *at;
  const auto prompt = ParseTokens(fields[columns.prompt], "ContextTokens");
  if (!prompt.ok()) return prompt.status();
  const auto output = ParseTokens(fields[columns.output], "GeneratedTokens");
  if (!output.ok()) return output.status();
  row.prompt_tokens = *prompt;
  row.output_tokens = *output;
  return row;
}

absl::StatusOr<int64_t> WholeNumber(const nlohmann::json& object,
                                    const char* key, int64_t min, int64_t max) {
  const auto it = object.find(key);
  if (it == object.end()) return Malformed(absl::StrCat("no \"", key, "\""));
  // One above 2^63 - 1 comes out negative.
  if (!it->is_number_integer() || it->get<int64_t>() < min ||
      it->get<int64_t>() > max) {
    return Malformed(absl::StrCat("\"", key, "\" is ", Quoted(it->dump()),
                                  ", not a whole number from ", min, " to ",
                                  max));
  }
  return it->get<int64_t>();
}

absl::StatusOr<TraceRow> ParseJsonRow(std::string_view line) {
  const nlohmann::json object =
      nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) {
    return Malformed(absl::StrCat(Quoted(line), " is no JSON object"));
  }
  TraceRow row;
  const auto it = object.find("timestamp");
  if (it == object.end()) return Malformed("no \"timestamp\"");
  if (!it->is_number() || !(it->get<double>() >= 0) ||
      !(it->get<double>() <= kLatest * 1e3)) {
    return Malformed(absl::StrCat("\"timestamp\" is ", Quoted(it->dump()),
                                  ", not a number of milliseconds from 0"));
  }
  row.at_s = it->get<double>() * 1e-3;
  const auto prompt = WholeNumber(object, "input_length", 1, kMaxTokens);
  if (!prompt.ok()) return prompt.status();
  const auto output = WholeNumber(object, "output_length", 1, kMaxTokens);
  if (!output.ok()) return output.status();
  row.prompt_tokens = static_cast<int>(*prompt);
  row.output_tokens = static_cast<int>(*output);
  const auto ids = object.find("hash_ids");
  if (ids == object.end()) return row;
  const int expected =
      (row.prompt_tokens + kTraceBlockTokens - 1) / kTraceBlockTokens;
  if (!ids->is_array() || ids->size() != static_cast<size_t>(expected)) {
    return Malformed(absl::StrCat("\"hash_ids\" is not a list of ", expected,
                                  " ids, one for every ", kTraceBlockTokens,
                                  " of ", row.prompt_tokens, " tokens"));
  }
  for (const nlohmann::json& id : *ids) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 ||
        id.get<int64_t>() > kLargestBlockId) {
      return Malformed(absl::StrCat("\"hash_ids\" holds ", Quoted(id.dump()),
                                    ", not an id from 0"));
    }
    row.blocks.push_back(id.get<int64_t>());
  }
  return row;
}

}  // namespace

absl::StatusOr<std::vector<TraceRow>> ParseTrace(std::string_view text,
                                                 const std::string& name,
                                                 int max_rows) {
  int line_number = 0;
  const auto at_line = [&](const absl::Status& status) {
    return Malformed(absl::StrCat(name, ":", line_number, ": ",
                                  std::string(status.message())));
  };
  const bool is_json = !text.empty() && text.front() == '{';
  Columns columns;
  if (!is_json) {
    ++line_number;
    absl::StatusOr<Columns> header = ParseHeader(TakeLine(&text));
    if (!header.ok()) return at_line(header.status());
    columns = *header;
  }
  std::vector<TraceRow> rows;
  double first_s = 0, last_s = 0;
  while (!text.empty() && static_cast<int>(rows.size()) < max_rows) {
    ++line_number;
    const std::string_view line = TakeLine(&text);
    if (line.empty()) continue;
    absl::StatusOr<TraceRow> row =
        is_json ? ParseJsonRow(line) : ParseCsvRow(line, columns);
    if (!row.ok()) return at_line(row.status());
    if (rows.empty()) first_s = last_s = row->at_s;
    if (row->at_s < last_s) {
      return at_line(Malformed("it is earlier than the line before"));
    }
    last_s = row->at_s;
    row->at_s -= first_s;
    rows.push_back(*std::move(row));
  }
  if (rows.empty()) return Malformed(absl::StrCat(name, " has no requests"));
  return rows;
}

absl::StatusOr<std::vector<TraceRow>> ReadTrace(const std::string& path,
                                                int max_rows) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return text.status();
  return ParseTrace(*text, path, max_rows);
}

}  // namespace tandem::bench
