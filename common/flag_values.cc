// SPDX-License-Identifier: Apache-2.0
// Values with units, as flags write them.
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/flags.h"

namespace tandem {
namespace {

struct Unit {
  std::string_view name;
  int64_t bytes;
};
constexpr std::array<Unit, 9> kUnits = {{{"TiB", int64_t{1} << 40},
                                         {"GiB", int64_t{1} << 30},
                                         {"MiB", int64_t{1} << 20},
                                         {"KiB", int64_t{1} << 10},
                                         {"TB", 1'000'000'000'000},
                                         {"GB", 1'000'000'000},
                                         {"MB", 1'000'000},
                                         {"KB", 1'000},
                                         {"B", 1}}};

absl::Status Expected(std::string_view text, std::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("'", std::string(text), "' is not ", std::string(what)));
}

}  // namespace

absl::StatusOr<absl::Duration> ParseDuration(std::string_view text) {
  absl::Duration value;
  // absl takes a bare "0" too, and negative values; only the latter are wrong
  // for every flag.
  if (!absl::ParseDuration(absl::string_view(text.data(), text.size()),
                           &value) ||
      value < absl::ZeroDuration()) {
    return Expected(text, "a duration such as 30s, 500ms or 1m30s");
  }
  return value;
}

absl::StatusOr<int64_t> ParseBytes(std::string_view text) {
  constexpr std::string_view kWhat = "a size such as 64MiB, 1GiB or 4096";
  double number = 0;
  const auto [rest, error] =
      std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !(number >= 0)) return Expected(text, kWhat);
  std::string_view unit(rest, text.data() + text.size() - rest);
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  int64_t scale = unit.empty() ? 1 : 0;
  for (const Unit& known : kUnits) {
    if (unit == known.name) scale = known.bytes;
  }
  const double bytes = number * static_cast<double>(scale);
  if (scale == 0 || bytes >= 9.2e18 || bytes != std::floor(bytes)) {
    return Expected(text, kWhat);
  }
  return static_cast<int64_t>(bytes);
}

std::string FormatBytes(int64_t bytes) {
  for (const Unit& unit : kUnits) {
    const bool binary = unit.name.size() == 3;
    if (binary && bytes != 0 && bytes % unit.bytes == 0) {
      return absl::StrCat(bytes / unit.bytes, std::string(unit.name));
    }
  }
  return absl::StrCat(bytes);
}

absl::StatusOr<Endpoint> ParseEndpoint(std::string_view text) {
  constexpr std::string_view kWhat =
      "an address such as 127.0.0.1:50051, localhost:8000 or [::1]:50051";
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return Expected(text, kWhat);
  std::string_view host = text.substr(0, colon);
  const std::string_view digits = text.substr(colon + 1);
  int port = -1;
  const auto [rest, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc() || rest != digits.data() + digits.size() ||
      port < 0 || port > 65535) {
    return Expected(text, kWhat);
  }
  const bool bracketed =
      host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) {
    host = host.substr(1, host.size() - 2);
  } else if (host.empty() ||
             host.find_first_of(":[]") != std::string_view::npos) {
    return Expected(text, kWhat);
  }
  return Endpoint{std::string(host), port};
}

std::string Endpoint::ToString() const {
  const bool v6 = host.find(':') != std::string::npos;
  return absl::StrCat(v6 ? "[" : "", host, v6 ? "]:" : ":", port);
}

void LogFlags::AddTo(CommandLine* line) {
  line->Group("Logging");
  line->AddChoice("log-level", &level, {"debug", "info", "warning", "error"},
                  "Least level to log");
  line->AddChoice("log-format", &format, {"auto", "text", "json"},
                  "Log lines: auto is text on a terminal, else JSON");
  line->Add("flight-record-dir", &flight_record_dir,
            "Where a crash or SIGUSR1 leaves the process's last decisions, for "
            "`tandem flight`; empty: some of them on stderr");
}

void TlsFlags::AddTo(CommandLine* line) {
  line->Group("Security");
  line->Add("tls-cert", &cert, "PEM file: this process's certificate chain");
  line->Add("tls-key", &key, "PEM file: the certificate's private key");
  line->Add("tls-ca", &ca,
            "PEM file: who signs the peers' certificates; with --tls-cert "
            "both ends must show one");
}

void ClusterTlsFlags::AddTo(CommandLine* line) {
  TlsFlags::AddTo(line);
  line->Add("allow-plaintext", &allow_plaintext,
            "Speak with the rest of the cluster beyond loopback without these: "
            "for a network that nobody else is on");
}

}  // namespace tandem
