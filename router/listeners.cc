// SPDX-License-Identifier: Apache-2.0
// The ports: HTTP and gRPC for clients, under a certificate that may be
// replaced while they are open, gRPC for workers and for operators. See
// process.h.

#include <sys/resource.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/available_cpus.h"
#include "common/http/failpoints.h"
#include "common/lifecycle.h"
#include "common/log.h"
#include "common/rpc/certificate.h"
#include "router/process.h"

namespace tandem::router {
namespace {

// For /health and /metrics when clients have taken all others.
constexpr int kProbeConnections = 32;
// Listeners, files, and a few of each worker.
constexpr int kOwnDescriptors = 128;
// gRPC's, and the one by which the listener sees the end (rpc/listener.cc).
constexpr int kOfEachGrpcConnection = 2;
constexpr char kRegistry[] = "tandem.v1.RegistryService";

absl::StatusOr<rpc::Credentials> LoadSsl(const Flags& flags) {
  return rpc::LoadCredentials(
      flags.ssl_certfile, flags.ssl_keyfile, flags.ssl_ca_certs,
      {"--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"});
}

HttpTls ForHttp(const rpc::Credentials& tls) {
  return {.cert = tls.cert, .key = tls.key, .client_ca = tls.ca};
}

}  // namespace

absl::Status Process::LoadPublicTls() {
  if (flags_.ssl_certfile.empty() && !flags_.ssl_ca_certs.empty()) {
    return UsageError("--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile");
  }
  // Watched before they are read: no change is missed.
  if (!flags_.ssl_certfile.empty()) {
    std::vector<std::string> paths = {flags_.ssl_certfile, flags_.ssl_keyfile};
    if (!flags_.ssl_ca_certs.empty()) paths.push_back(flags_.ssl_ca_certs);
    watcher_.Watch(std::move(paths), [this] { ReloadPublicTls(); });
  }
  absl::StatusOr<rpc::Credentials> tls = LoadSsl(flags_);
  if (!tls.ok()) return tls.status();
  public_tls_ = *std::move(tls);
  if (!public_tls_.cert.empty()) {
    public_certificate_ =
        std::make_unique<rpc::CertificateMetrics>(metrics_.get(), "public");
    public_certificate_->Uses(public_tls_.cert);
  }
  return absl::OkStatus();
}

void Process::ReloadPublicTls() {
  absl::StatusOr<rpc::Credentials> tls = LoadSsl(flags_);
  absl::Status status = tls.status();
  if (status.ok()) status = rpc::CheckNotExpired(tls->cert, "--ssl-certfile");
  // Checks the pair, too.
  if (status.ok()) status = http_->ReplaceTls(ForHttp(*tls));
  if (status.ok()) status = public_credentials_->Replace(*tls);
  public_certificate_->Reloaded(status.ok());
  if (status.ok()) {
    public_certificate_->Uses(tls->cert);
    LogInfo("certificate reloaded", {{"file", flags_.ssl_certfile}});
  } else {
    LogError("certificate not reloaded: the one before stays",
             {{"status", status}});
  }
}

void Process::WarnIfExposed() const {
  const std::string& host = flags_.host;
  if (rpc::OnLoopback(host)) return;
  if (!access_->closed()) {
    LogWarning(
        "whoever reaches this address may use it: set --api-key or "
        "--api-keys-file",
        {{"host", host}});
  }
  if (public_tls_.cert.empty()) {
    LogWarning(
        "prompts, answers and keys can be read on the way: set "
        "--ssl-certfile, or have TLS in front",
        {{"host", host}});
  }
}

void Process::WarnIfFewDescriptors() const {
  rlimit files{};
  const int64_t wanted =
      int64_t{flags_.max_http_connections} + kProbeConnections +
      int64_t{kOfEachGrpcConnection} * flags_.max_grpc_connections +
      kOwnDescriptors;
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 ||
      files.rlim_cur >= static_cast<rlim_t>(wanted)) {
    return;
  }
  LogWarning(
      "connections may take all file descriptors, probes' and workers' too: "
      "raise the hard limit (ulimit -Hn, LimitNOFILE=), or lower "
      "--max-http-connections and --max-grpc-connections",
      {{"limit", static_cast<int64_t>(files.rlim_cur)}, {"wanted", wanted}});
}

absl::Status Process::StartServers() {
  absl::Status status = StartHttp();
  if (status.ok()) status = StartInternal();
  if (status.ok()) status = StartAdmin();
  if (status.ok()) status = StartPublic();
  if (!status.ok()) return status;
  loop_.RunSync([this] {
    health_ = public_server_.get();
    UpdateFacts();
  });
  return absl::OkStatus();
}

absl::Status Process::StartHttp() {
  http_ = std::make_unique<HttpServer>(HttpOptions{
      .host = flags_.host,
      .port = flags_.http_port,
      .max_header_bytes = static_cast<size_t>(flags_.max_header_bytes),
      .max_body_bytes = static_cast<size_t>(flags_.max_message_bytes),
      .max_connections = flags_.max_http_connections,
      .spare_connections = kProbeConnections,
      .max_connections_per_peer = flags_.max_http_connections_per_peer,
      // They tokenise; a refusal waits for none of them.
      .handler_threads = std::max(2, AvailableCpus()),
      .tls = public_tls_.cert.empty()
                 ? std::nullopt
                 : std::make_optional(ForHttp(public_tls_)),
      // Elsewhere a key or a certificate tells who may.
      .local_hosts_only = rpc::OnLoopback(flags_.host) && !access_->closed() &&
                          public_tls_.cert.empty(),
      .handshake_timeout = flags_.handshake_timeout,
      .error_page = &HttpFront::ErrorPage,
      .request_id = &HttpFront::RequestId});
  ServeProbes();
#ifdef TANDEM_FAILPOINTS
  ServeFailpoints(http_.get());
#endif
  http_front_->Register(http_.get());
  if (flags_.webui) page_.Register(http_.get());
  return http_->Start();
}

void Process::ServeProbes() {
  http_->Handle("GET", "/metrics", [this](const HttpRequest&) {
    return HttpResponse{.content_type = Metrics::kContentType,
                        .body = metrics_->Text()};
  });
  http_->Handle("GET", "/health", [this](const HttpRequest&) {
    return HealthResponse(draining_ ? absl::UnavailableError("draining")
                                    : watchdog_->Check(loop_.Now()));
  });
  http_->Handle("GET", "/livez", [this](const HttpRequest&) {
    return HealthResponse(watchdog_->Check(loop_.Now()));
  });
  http_->Handle("GET", "/readyz",
                [this](const HttpRequest&) { return HealthResponse(Ready()); });
  for (const char* path : {"/metrics", "/health", "/livez", "/readyz"}) {
    http_->Open(path);
  }
}

absl::Status Process::StartInternal() {
  rpc::ServerOptions internal;
  internal.port_flag = "internal-port";
  internal.rotating = tls_->rotating();
  internal.connections = rpc::kClusterConnections;
  auto internal_server = Listen(internal, flags_.internal_host,
                                flags_.internal_port, {registry_.get()});
  if (!internal_server.ok()) return internal_server.status();
  internal_server_ = *std::move(internal_server);
  internal_server_->SetServing(kRegistry, true);
  return absl::OkStatus();
}

absl::Status Process::StartAdmin() {
  rpc::ServerOptions admin;
  admin.port_flag = "admin-port";
  admin.rotating = tls_->rotating();
  auto admin_server =
      Listen(admin, "127.0.0.1", flags_.admin_port, {admin_.get()});
  if (!admin_server.ok()) return admin_server.status();
  admin_server_ = *std::move(admin_server);
  admin_server_->SetServing("tandem.v1.AdminService", true);
  return absl::OkStatus();
}

absl::Status Process::StartPublic() {
  rpc::ServerOptions front;
  front.rotating = tls_->rotating();
  if (!public_tls_.cert.empty()) {
    auto rotating = rpc::RotatingCredentials::Create(public_tls_);
    if (!rotating.ok()) return rotating.status();
    public_credentials_ = *std::move(rotating);
    front.rotating = public_credentials_.get();
    front.rules.reset();  // its clients are not the cluster's
  }
  front.max_receive_bytes = static_cast<int>(flags_.max_message_bytes);
  front.max_metadata_bytes = static_cast<int>(flags_.max_header_bytes);
  front.connections = {.all = flags_.max_grpc_connections,
                       .per_peer = flags_.max_grpc_connections_per_peer};
  front.max_concurrent_streams = flags_.max_concurrent_streams;
  front.handshake_timeout = flags_.handshake_timeout;
  front.max_connection_age = flags_.max_connection_age;
  auto public_server =
      Listen(front, flags_.host, flags_.grpc_port,
             {inference_.get(), openengine_.get(), openengine_control_.get()});
  if (!public_server.ok()) return public_server.status();
  public_server_ = *std::move(public_server);
  // "" is the process, for who restarts it; services are what /readyz says.
  for (const char* service : kServices) {
    public_server_->SetServing(service, false);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<rpc::Server>> Process::Listen(
    rpc::ServerOptions options, const std::string& host, int port,
    const std::vector<grpc::Service*>& services) {
  options.address = Endpoint{host, port}.ToString();
  options.metrics = call_metrics_.get();
  return rpc::Server::Start(options, services);
}

}  // namespace tandem::router
