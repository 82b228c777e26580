// SPDX-License-Identifier: Apache-2.0
#include "cli/connect.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/error.h"
#include "common/flags.h"
#include "common/lifecycle.h"
#include "common/rpc/channel.h"
#include "common/rpc/credentials.h"
#include "common/utf8.h"

namespace tandem::cli {

absl::StatusOr<std::string> HostAndPort(const ConnectFlags& flags) {
  absl::string_view address = flags.address;
  const bool files = !flags.tls_cert.empty() || !flags.tls_ca.empty();
  const bool https = absl::ConsumePrefix(&address, "https://");
  if (!https && absl::ConsumePrefix(&address, "http://") && files) {
    return UsageError(
        absl::StrCat(flags.flag, ": ", flags.address,
                     ": http:// is plain text, and TLS files were given: write "
                     "https://"));
  }
  absl::ConsumeSuffix(&address, "/");
  // gRPC would take a port modulo 65536, and look up what is no address.
  const absl::StatusOr<Endpoint> endpoint =
      ParseEndpoint(std::string_view(address.data(), address.size()));
  if (!endpoint.ok() && https) {
    // What such an address has without a port.
    const auto with_port = ParseEndpoint(absl::StrCat(address, ":443"));
    if (with_port.ok()) return with_port->ToString();
  }
  if (!endpoint.ok()) {
    return UsageError(absl::StrCat(flags.flag, ": ",
                                   std::string(endpoint.status().message())));
  }
  return endpoint->ToString();
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(
    const ConnectFlags& flags) {
  const absl::StatusOr<std::string> address = HostAndPort(flags);
  if (!address.ok()) return address.status();
  absl::StatusOr<rpc::Credentials> tls =
      rpc::LoadCredentials(flags.tls_cert, flags.tls_key, flags.tls_ca);
  if (!tls.ok()) return tls.status();
  tls->system_authorities =
      absl::StartsWith(flags.address, "https://") && tls->ca.empty();
  rpc::ChannelOptions options;
  options.bearer = flags.api_key;
  return rpc::MakeChannel(*address, *tls, options);
}

absl::Status Explained(const absl::Status& status, const ConnectFlags& flags) {
  // What Tandem refuses has a reason; gRPC's own failures have none.
  if (!ErrorReason(status).empty()) return status;
  // An HTTP port answers, in a language that gRPC only names.
  const bool http = absl::IsUnavailable(status) &&
                    absl::StrContains(status.message(), "http1.x server");
  if (absl::IsUnimplemented(status) || http) {
    return absl::Status(
        status.code(),
        absl::StrCat(
            flags.address,
            http ? " speaks HTTP and no gRPC" : " is another port of a cluster",
            ": --router is the router's gRPC port, ", kDefaultRouter,
            " unless changed, and --admin its admin port, ", kDefaultAdmin));
  }
  if (!absl::IsUnavailable(status)) return status;
  absl::Status told =
      Annotate(status, absl::StrCat("no router answers at ", flags.address,
                                    " (`tandem serve MODEL` starts one; or "
                                    "give its address)"));
  // What a server of TLS does with plain text, and nothing more is heard of it.
  const bool plain = flags.tls_cert.empty() && flags.tls_ca.empty() &&
                     !absl::StartsWith(flags.address, "https://");
  if (!plain || !absl::StrContains(status.message(), "Socket closed")) {
    return told;
  }
  return absl::UnavailableError(
      absl::StrCat(told.message(),
                   "; if this cluster has TLS, give --tls-cert, --tls-key and "
                   "--tls-ca, or https:// before the address alone where its "
                   "certificate is a public one"));
}

absl::Status CheckUtf8(std::string_view what, std::string_view text) {
  if (ValidUtf8(text) == text) return absl::OkStatus();
  return UsageError(absl::StrCat(std::string(what), " is not UTF-8 text"));
}

}  // namespace tandem::cli
