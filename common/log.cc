// SPDX-License-Identifier: Apache-2.0
#include "common/log.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/base_sink.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/utf8.h"

namespace tandem {
namespace {

// One fwrite per line, so that the lines of processes that share a stderr do
// not mix.
class LineSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit LineSink(std::FILE* output) : output_(output) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    std::fwrite(message.payload.data(), 1, message.payload.size(), output_);
    std::fflush(output_);
  }
  void flush_() override { std::fflush(output_); }

 private:
  std::FILE* const output_;
};

struct State {
  LogOptions options;
  bool json = false;
  bool color = false;
  std::shared_ptr<spdlog::logger> logger;  // spdlog's own currency
};

constexpr const char* kLevelNames[] = {"debug", "info", "warning", "error"};
constexpr const char* kColors[] = {"\033[2m", "\033[32m", "\033[33m",
                                   "\033[31m"};
constexpr spdlog::level::level_enum kSpdlogLevels[] = {
    spdlog::level::debug, spdlog::level::info, spdlog::level::warn,
    spdlog::level::err};

Mutex state_mutex;
std::atomic<int> enabled_level = static_cast<int>(LogLevel::kInfo);

// Never destroyed: threads may log until the last instruction.
std::shared_ptr<const State>& Current()
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex) {
  static auto& state = *new std::shared_ptr<const State>();
  return state;
}

std::shared_ptr<State> MakeState(const LogOptions& options) {
  auto state = std::make_shared<State>();
  state->options = options;
  const bool tty = isatty(fileno(options.output)) == 1;
  state->json = options.format == "json" || (options.format == "auto" && !tty);
  const char* no_color = std::getenv("NO_COLOR");
  state->color = tty && (no_color == nullptr || *no_color == '\0');
  state->logger = std::make_shared<spdlog::logger>(
      "tandem", std::make_shared<LineSink>(options.output));
  state->logger->set_level(spdlog::level::trace);
  return state;
}

std::shared_ptr<const State> GetState() {
  MutexLock lock(&state_mutex);
  auto& state = Current();
  if (state == nullptr) {
    LogOptions options;
    options.format = "text";
    state = MakeState(options);
  }
  return state;
}

void AppendJson(std::string* line, std::string_view key, std::string_view value,
                bool bare) {
  absl::StrAppend(line, line->size() > 1 ? "," : "", "\"", JsonEscaped(key),
                  "\":");
  if (bare) {
    line->append(value);
  } else {
    absl::StrAppend(line, "\"", JsonEscaped(value), "\"");
  }
}

std::string JsonLine(const State& state, LogLevel level,
                     std::string_view message, LogFields fields) {
  std::string line = "{";
  AppendJson(&line, "ts",
             absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::Now(),
                              absl::UTCTimeZone()),
             false);
  AppendJson(&line, "level", kLevelNames[static_cast<int>(level)], false);
  AppendJson(&line, "role", state.options.role, false);
  AppendJson(&line, "worker", state.options.worker, false);
  for (const LogField& field : fields) {
    if (field.key() == "request_id") {
      AppendJson(&line, field.key(), field.value(), field.bare());
    }
  }
  AppendJson(&line, "msg", message, false);
  for (const LogField& field : fields) {
    if (field.key() == "request_id") continue;
    // A field must not stand in for one of the line's own keys.
    const bool taken = field.key() == "ts" || field.key() == "level" ||
                       field.key() == "role" || field.key() == "worker" ||
                       field.key() == "msg";
    AppendJson(&line,
               absl::StrCat(taken ? "field_" : "", std::string(field.key())),
               field.value(), field.bare());
  }
  return line + "}\n";
}

// A value with spaces or quotes is quoted, so that lines stay greppable.
std::string TextValue(const LogField& field) {
  const std::string& value = field.value();
  const bool plain =
      !value.empty() &&
      value.find_first_of(" \"\\=\n\r\t\033") == std::string::npos;
  return field.bare() || plain ? JsonEscaped(value)
                               : absl::StrCat("\"", JsonEscaped(value), "\"");
}

std::string TextLine(const State& state, LogLevel level,
                     std::string_view message, LogFields fields) {
  const int index = static_cast<int>(level);
  std::string line = absl::StrFormat(
      "%s %s%-7s%s ",
      absl::FormatTime("%H:%M:%E3S", absl::Now(), absl::LocalTimeZone()),
      state.color ? kColors[index] : "", kLevelNames[index],
      state.color ? "\033[0m" : "");
  if (!state.options.role.empty()) {
    absl::StrAppend(&line, state.options.role,
                    state.options.worker.empty() ? "" : "/",
                    state.options.worker, " ");
  }
  line += JsonEscaped(message, /*quotes=*/false);
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", std::string(field.key()), "=",
                    TextValue(field));
  }
  return line + "\n";
}

}  // namespace

LogField::LogField(std::string_view key, double value)
    : key_(key),
      value_(absl::StrFormat("%.6g", value)),
      bare_(std::isfinite(value)) {}

LogField::LogField(std::string_view key, absl::Duration value)
    : LogField(key, absl::ToDoubleSeconds(value)) {}

LogField::LogField(std::string_view key, const absl::Status& value)
    : key_(key),
      value_(value.ToString(absl::StatusToStringMode::kWithNoExtraData)) {}

absl::Status InitLog(const LogOptions& options) {
  if (options.format != "auto" && options.format != "text" &&
      options.format != "json") {
    return absl::InvalidArgumentError(absl::StrCat(
        "--log-format: ", options.format, " is none of auto, text, json"));
  }
  int level = -1;
  for (int i = 0; i < 4; ++i) {
    if (options.level == kLevelNames[i]) level = i;
  }
  if (level < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--log-level: ", options.level,
                     " is none of debug, info, warning, error"));
  }
  auto state = MakeState(options);
  MutexLock lock(&state_mutex);
  Current() = std::move(state);
  enabled_level = level;
  return absl::OkStatus();
}

bool LogEnabled(LogLevel level) {
  return static_cast<int>(level) >=
         enabled_level.load(std::memory_order_relaxed);
}

void Log(LogLevel level, std::string_view message, LogFields fields) {
  if (!LogEnabled(level)) return;
  const auto state = GetState();
  const std::string line = state->json
                               ? JsonLine(*state, level, message, fields)
                               : TextLine(*state, level, message, fields);
  state->logger->log(kSpdlogLevels[static_cast<int>(level)],
                     spdlog::string_view_t(line.data(), line.size()));
}

bool LogLimiter::Allow(absl::Time now, int64_t* hidden) {
  MutexLock lock(&mutex_);
  if (now < next_) {
    ++hidden_;
    return false;
  }
  next_ = now + interval_;
  *hidden = std::exchange(hidden_, 0);
  return true;
}

}  // namespace tandem
