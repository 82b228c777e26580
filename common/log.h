// SPDX-License-Identifier: Apache-2.0
// Structured logs to stderr: text for people on a terminal, else one JSON
// object per line with the keys ts, level, role, worker, request_id, msg and
// the fields given.
//
//   LogInfo("ready", {{"port", server.port()}, {"took", loading_time}});
//   LogWarning("prefill worker lost", {{"request_id", id}, {"worker", name}});
//
// Never prompts, texts or keys. Thread-safe; before InitLog lines go out as
// text at level info.

#ifndef TANDEM_COMMON_LOG_H_
#define TANDEM_COMMON_LOG_H_

#include <concepts>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/mutex.h"

namespace tandem {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

struct LogOptions {
  std::string format = "auto";  // text, json; auto: text if `output` is a TTY
  std::string level = "info";   // debug, info, warning, error
  std::string role = "";        // router, prefill, decode, or the tool's name
  std::string worker = "";      // this worker's id, once it has one
  std::FILE* output = stderr;
};

// INVALID_ARGUMENT for an unknown format or level. May be called again.
absl::Status InitLog(const LogOptions& options);

class LogField {
 public:
  LogField(std::string_view key, std::string_view value)
      : key_(key), value_(value) {}
  LogField(std::string_view key, const char* value)
      : LogField(key, std::string_view(value)) {}
  LogField(std::string_view key, const std::string& value)
      : LogField(key, std::string_view(value)) {}
  LogField(std::string_view key, bool value)
      : key_(key), value_(value ? "true" : "false"), bare_(true) {}
  LogField(std::string_view key, std::integral auto value)
      : key_(key), value_(std::to_string(value)), bare_(true) {}
  LogField(std::string_view key, double value);
  LogField(std::string_view key, absl::Duration value);  // in seconds
  LogField(std::string_view key, const absl::Status& value);

  std::string_view key() const { return key_; }
  const std::string& value() const { return value_; }
  bool bare() const { return bare_; }  // a JSON number or boolean

 private:
  std::string_view key_;
  std::string value_;
  bool bare_ = false;
};
using LogFields = std::initializer_list<LogField>;

bool LogEnabled(LogLevel level);
void Log(LogLevel level, std::string_view message, LogFields fields = {});

inline void LogDebug(std::string_view message, LogFields fields = {}) {
  if (LogEnabled(LogLevel::kDebug)) Log(LogLevel::kDebug, message, fields);
}
inline void LogInfo(std::string_view message, LogFields fields = {}) {
  Log(LogLevel::kInfo, message, fields);
}
inline void LogWarning(std::string_view message, LogFields fields = {}) {
  Log(LogLevel::kWarning, message, fields);
}
inline void LogError(std::string_view message, LogFields fields = {}) {
  Log(LogLevel::kError, message, fields);
}

// For what may go wrong a thousand times a second: passes one line per
// `interval` and counts the others.
//
//   static LogLimiter limiter(absl::Seconds(10));
//   int64_t hidden;
//   if (limiter.Allow(loop->Now(), &hidden)) {
//     LogWarning("slice refused", {{"reason", reason}, {"hidden", hidden}});
//   }
class LogLimiter {
 public:
  explicit LogLimiter(absl::Duration interval) : interval_(interval) {}
  // `hidden`: how many were refused since the last one that passed.
  bool Allow(absl::Time now, int64_t* hidden);

 private:
  const absl::Duration interval_;
  Mutex mutex_;
  absl::Time next_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t hidden_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_LOG_H_
