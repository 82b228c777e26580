// SPDX-License-Identifier: Apache-2.0
#include "router/telemetry/otlp_exporter.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "common/error.h"
#include "common/lifecycle.h"
#include "common/read_file.h"
#include "common/rpc/channel.h"
#include "common/rpc/status.h"
#include "common/version.h"

namespace tandem::router {
namespace {

constexpr char kSystemRoots[] = "/etc/ssl/certs/ca-certificates.crt";

std::string Environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::Status Wrong(absl::string_view source, absl::string_view endpoint,
                   absl::string_view why) {
  return UsageError(
      absl::StrCat(source, " '", endpoint, "' ", why,
                   ": give http://host:port or https://host:port of a "
                   "collector's OTLP/gRPC receiver (mostly port 4317)"));
}

// `source`: where the endpoint was found, for errors.
absl::Status ReadEndpoint(absl::string_view source, absl::string_view url,
                          OtlpOptions* options) {
  absl::string_view rest = url;
  const bool tls = absl::ConsumePrefix(&rest, "https://");
  if (!tls && !absl::ConsumePrefix(&rest, "http://")) {
    absl::ConsumePrefix(&rest, "grpc://");
  }
  absl::ConsumeSuffix(&rest, "/");
  if (absl::StrContains(rest, "/")) {
    return Wrong(source, url,
                 "has a path, which OTLP/HTTP has and OTLP/gRPC has not");
  }
  const size_t colon = rest.rfind(':');
  if (colon == absl::string_view::npos || colon == 0 ||
      colon + 1 == rest.size()) {
    return Wrong(source, url, "lacks a host or a port");
  }
  if (tls) {
    std::string path = Environment("OTEL_EXPORTER_OTLP_CERTIFICATE");
    if (path.empty()) path = kSystemRoots;
    absl::StatusOr<std::string> roots = ReadFile(path);
    if (!roots.ok() || roots->empty()) {
      return Wrong(
          source, url,
          absl::StrCat("needs certificates: ",
                       roots.ok() ? absl::StrCat(path, " is empty")
                                  : std::string(roots.status().message()),
                       " (set OTEL_EXPORTER_OTLP_CERTIFICATE)"));
    }
    options->tls.ca = *std::move(roots);
  }
  options->address = std::string(rest);
  return absl::OkStatus();
}

std::string PercentDecoded(absl::string_view text) {
  std::string value;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() &&
        absl::ascii_isxdigit(text[i + 1]) &&
        absl::ascii_isxdigit(text[i + 2])) {
      value += absl::HexStringToBytes(text.substr(i + 1, 2));
      i += 2;
    } else {
      value.push_back(text[i]);
    }
  }
  return value;
}

// What gRPC takes for metadata: it would abort at anything else.
bool IsHeader(const std::string& key, const std::string& value) {
  const auto in_key = [](char c) {
    return absl::ascii_islower(c) || absl::ascii_isdigit(c) || c == '-' ||
           c == '_' || c == '.';
  };
  return !key.empty() && std::all_of(key.begin(), key.end(), in_key) &&
         std::all_of(value.begin(), value.end(), absl::ascii_isprint);
}

// key=value,key=value in the form of W3C Baggage.
absl::Status ReadHeaders(OtlpOptions* options) {
  constexpr char kName[] = "OTEL_EXPORTER_OTLP_HEADERS";
  const std::string headers = Environment(kName);
  for (absl::string_view header :
       absl::StrSplit(headers, ',', absl::SkipWhitespace())) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(header, absl::MaxSplits('=', 1));
    const std::string key =
        absl::AsciiStrToLower(absl::StripAsciiWhitespace(parts.first));
    const std::string value =
        PercentDecoded(absl::StripAsciiWhitespace(parts.second));
    if (!IsHeader(key, value)) {
      // Not its value, which may be a secret.
      return MakeError(
          absl::StatusCode::kInvalidArgument, "ENVIRONMENT_INVALID",
          absl::StrCat(kName, ": '", key,
                       "' and its value are no header: a name of letters, "
                       "digits, '-', '_' and '.', and printable ASCII"));
    }
    options->headers.emplace_back(key, value);
  }
  return absl::OkStatus();
}

// What platforms set for all their programs may be of no use to this one.
absl::Status EndpointFromEnvironment(OtlpOptions* options) {
  if (Environment("OTEL_SDK_DISABLED") == "true" ||
      Environment("OTEL_TRACES_EXPORTER") == "none") {
    return absl::OkStatus();
  }
  for (const char* name :
       {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"}) {
    const std::string url = Environment(name);
    if (url.empty()) continue;
    std::string protocol = Environment("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL");
    if (protocol.empty()) protocol = Environment("OTEL_EXPORTER_OTLP_PROTOCOL");
    absl::Status status = ReadEndpoint(name, url, options);
    if (status.ok() && !protocol.empty() && protocol != "grpc") {
      status = Wrong(name, url, absl::StrCat("is for ", protocol));
    }
    if (status.ok()) return ReadHeaders(options);
    LogWarning("requests are not traced", {{"why", status}});
    options->address.clear();
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<OtlpOptions> ReadOtlpOptions(const std::string& endpoint) {
  OtlpOptions options;
  absl::Status status;
  if (endpoint.empty()) {
    status = EndpointFromEnvironment(&options);
  } else {
    status = ReadEndpoint("--otlp-traces-endpoint", endpoint, &options);
    if (status.ok()) status = ReadHeaders(&options);
  }
  if (!status.ok()) return status;
  if (const std::string name = Environment("OTEL_SERVICE_NAME");
      !name.empty()) {
    options.service_name = name;
  }
  return options;
}

namespace {

constexpr absl::Duration kLongestPause = absl::Seconds(30);

// Whether the same may be taken later, as OTLP's specification has it.
bool MayRetry(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDataLoss:
      return true;
    default:
      return false;
  }
}

}  // namespace

struct OtlpExporter::Call {
  grpc::ClientContext context;
  otlp::ExportTraceServiceRequest request;
  otlp::ExportTraceServiceResponse response;
  absl::Notification done;
};

OtlpExporter::OtlpExporter(const OtlpOptions& options, Loop* loop,
                           Metrics* metrics)
    : options_(options),
      loop_(loop),
      counts_(metrics->AddCounters("tandem_trace_spans_total",
                                   "Spans for the collector", "outcome", 3)),
      stub_(otlp::TraceService::NewStub(rpc::MakeChannel(
          options.address, options.tls, {.keepalive = false}))),
      timer_(loop) {
  for (const char* outcome : {"exported", "failed", "dropped"}) {
    counts_[outcome].Add(0);
  }
}

OtlpExporter::~OtlpExporter() = default;

void OtlpExporter::Export(std::vector<otlp::Span> spans) {
  if (queue_.size() + in_flight_ + spans.size() > options_.max_queued) {
    counts_["dropped"].Add(static_cast<double>(spans.size()));
    return;
  }
  const bool first = queue_.empty();
  std::move(spans.begin(), spans.end(), std::back_inserter(queue_));
  // The end of the call sends more, or that of the pause.
  if (call_ != nullptr || failures_ > 0) return;
  if (queue_.size() >= options_.max_batch) {
    Send();
  } else if (first) {
    timer_.Start(options_.interval, [this] { Send(); });
  }
}

void OtlpExporter::Send() {
  timer_.Stop();
  if (queue_.empty() || call_ != nullptr) return;
  const auto call = std::make_shared<Call>();
  call_ = call;
  otlp::ResourceSpans* const resource = call->request.add_resource_spans();
  const auto attribute = [&](const char* key, const std::string& value) {
    otlp::KeyValue* const entry =
        resource->mutable_resource()->add_attributes();
    entry->set_key(key);
    entry->mutable_value()->set_string_value(value);
  };
  attribute("service.name", options_.service_name);
  attribute("service.version", kVersion);
  otlp::ScopeSpans* const scope = resource->add_scope_spans();
  scope->mutable_scope()->set_name("tandem");
  scope->mutable_scope()->set_version(kVersion);
  const size_t count = std::min(queue_.size(), options_.max_batch);
  in_flight_ = count;
  for (size_t i = 0; i < count; ++i) {
    *scope->add_spans() = std::move(queue_[i]);
  }
  queue_.erase(queue_.begin(), queue_.begin() + static_cast<ptrdiff_t>(count));
  call->context.set_deadline(std::chrono::system_clock::now() +
                             absl::ToChronoMicroseconds(options_.timeout));
  for (const auto& [key, value] : options_.headers) {
    call->context.AddMetadata(key, value);
  }
  stub_->async()->Export(
      &call->context, &call->request, &call->response,
      [this, call, count, loop = loop_](const grpc::Status& result) {
        absl::Status status = rpc::FromGrpc(result, call->context);
        loop->Post([this, count, status = std::move(status)] {
          OnSent(status, count);
        });
        call->done.Notify();
      });
}

void OtlpExporter::OnSent(const absl::Status& status, size_t spans) {
  in_flight_ = 0;
  const bool again = MayRetry(status) && !stopping_;
  const auto refused = static_cast<size_t>(
      std::max<int64_t>(0, call_->response.partial_success().rejected_spans()));
  const size_t failed = status.ok() ? std::min(refused, spans) : spans;
  int64_t hidden = 0;
  if (failed > 0 && limiter_.Allow(loop_->Now(), &hidden)) {
    LogWarning(again ? "spans not exported yet" : "spans not exported",
               {{"collector", options_.address},
                {"spans", static_cast<int64_t>(failed)},
                {"status", status},
                {"why", call_->response.partial_success().error_message()},
                {"hidden", hidden}});
  }
  if (again) {
    TakeBack();
  } else {
    failures_ = 0;
    counts_["exported"].Add(static_cast<double>(spans - failed));
    counts_["failed"].Add(static_cast<double>(failed));
  }
  call_.reset();
  if (queue_.empty()) return;
  if (!again && queue_.size() >= options_.max_batch) {
    Send();
  } else {
    const absl::Duration pause = std::ldexp(1.0, failures_) * options_.interval;
    timer_.Start(std::min(pause, std::max(options_.interval, kLongestPause)),
                 [this] { Send(); });
  }
}

// What the call has sent goes first again, after a pause that grows.
void OtlpExporter::TakeBack() {
  auto* const spans = call_->request.mutable_resource_spans(0)
                          ->mutable_scope_spans(0)
                          ->mutable_spans();
  queue_.insert(queue_.begin(), std::make_move_iterator(spans->begin()),
                std::make_move_iterator(spans->end()));
  failures_ = std::min(failures_ + 1, 16);
}

void OtlpExporter::Stop(absl::Duration grace) {
  const absl::Time end = absl::Now() + grace;
  while (true) {
    std::shared_ptr<Call> call;
    absl::Notification looked;
    loop_->Post([&] {
      stopping_ = true;
      if (absl::Now() < end) {
        Send();
      } else {
        counts_["dropped"].Add(static_cast<double>(queue_.size()));
        queue_.clear();
        timer_.Stop();
      }
      call = call_;
      looked.Notify();
    });
    looked.WaitForNotification();
    if (call == nullptr) return;
    if (!call->done.WaitForNotificationWithTimeout(end - absl::Now())) {
      call->context.TryCancel();
      call->done.WaitForNotification();
    }
  }
}

}  // namespace tandem::router
