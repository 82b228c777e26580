// SPDX-License-Identifier: Apache-2.0
#include "common/rpc/grpc_process.h"

#include <google/protobuf/stubs/common.h>
#include <grpcpp/version_info.h>

#include <cstdint>
#include <string>

#include "absl/synchronization/mutex.h"
#include "common/log.h"
#include "common/rpc/refusals.h"

// Later versions log through absl, and have no hook of their own.
#if GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR < 60
#include <grpc/support/log.h>

#include <atomic>
#include <cstring>

namespace tandem::rpc {
namespace {

std::atomic<int64_t> failed_handshakes = 0;

void ToOurLog(gpr_log_func_args* line) {
  static auto& limiter = *new LogLimiter(absl::Seconds(1));
  const bool error = line->severity == GPR_LOG_SEVERITY_ERROR;
  int64_t hidden = 0;
  // Nothing else tells of them: no call begins.
  if (error && std::strstr(line->message, "Handshake failed") != nullptr) {
    ++failed_handshakes;
  }
  if (!error) {
    LogDebug("grpc", {{"what", line->message}});
  } else if (limiter.Allow(absl::Now(), &hidden)) {
    const char* slash = std::strrchr(line->file, '/');
    LogWarning("grpc", {{"what", line->message},
                        {"file", slash == nullptr ? line->file : slash + 1},
                        {"hidden", hidden}});
  }
}

void RouteLogs() { gpr_set_log_function(&ToOurLog); }

}  // namespace

int64_t FailedHandshakes() { return failed_handshakes; }

}  // namespace tandem::rpc

#else

namespace tandem::rpc {
namespace {

void RouteLogs() {}

}  // namespace

int64_t FailedHandshakes() { return 0; }

}  // namespace tandem::rpc

#endif

// The same of Protobuf, which tells of messages that nobody can read: their
// senders hear so (unreadable.h).
#if GOOGLE_PROTOBUF_VERSION < 4022000
#include <google/protobuf/stubs/logging.h>

namespace tandem::rpc {
namespace {

void ProtobufToOurLog(google::protobuf::LogLevel level, const char* /*file*/,
                      int /*line*/, const std::string& message) {
  static auto& limiter = *new LogLimiter(absl::Seconds(10));
  int64_t hidden = 0;
  if (level < google::protobuf::LOGLEVEL_WARNING ||
      !limiter.Allow(absl::Now(), &hidden)) {
    return;
  }
  LogWarning("protobuf", {{"what", message}, {"hidden", hidden}});
}

void RouteProtobufsLog() { google::protobuf::SetLogHandler(&ProtobufToOurLog); }

}  // namespace
}  // namespace tandem::rpc

#else

namespace tandem::rpc {
namespace {

void RouteProtobufsLog() {}

}  // namespace
}  // namespace tandem::rpc

#endif

namespace tandem::rpc {

void PrepareGrpc() {
  RouteLogs();
  RouteProtobufsLog();
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
}

}  // namespace tandem::rpc
