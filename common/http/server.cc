// SPDX-License-Identifier: Apache-2.0
// Boost.Beast on one io_context and one thread; sessions and all that they
// share belong to that thread, so nothing here is locked but the start.
#include "common/http/server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/http/session.h"
#include "common/lifecycle.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
using http_internal::ServerState;
using http_internal::Session;
using tcp = asio::ip::tcp;

constexpr auto kGracePoll = std::chrono::milliseconds(5);

// Of what a socket has taken and not sent, so that a peer that reads slowly is
// seen to read: a socket asks for more only when a third of its buffer, which
// grows to megabytes, is free.
constexpr int kMostUnsent = 64 << 10;

}  // namespace

namespace http_internal {

bool ServerState::MakeRoom() {
  Session* longest = nullptr;
  for (Session* session : sessions) {
    if (session->served() && session->idle() &&
        (longest == nullptr || session->idle_since() < longest->idle_since())) {
      longest = session;
    }
  }
  if (longest == nullptr) return false;
  longest->MakeRoom();
  return true;
}

}  // namespace http_internal

class HttpServer::Impl {
 public:
  explicit Impl(HttpOptions options) { state_->options = std::move(options); }

  void Handle(std::string method, std::string path,
              http_internal::Route handler) {
    state_->routes[std::move(path)][std::move(method)] = std::move(handler);
  }

  void SetGuard(HttpServer::Guard guard) { state_->guard = std::move(guard); }
  void Open(std::string path) { state_->open_paths.insert(std::move(path)); }

  absl::Status Start() {
    const HttpOptions& options = state_->options;
    if (options.tls) {
      auto context = http_internal::MakeTlsContext(*options.tls);
      if (!context.ok()) return context.status();
      state_->tls = *std::move(context);
    }
    const std::string where = absl::StrCat(options.host, ":", options.port);
    beast::error_code error;
    const auto address = asio::ip::make_address(
        options.host == "localhost" ? "127.0.0.1" : options.host, error);
    if (error) {
      return UsageError(
          absl::StrCat("--host: ", options.host, " is not an IP address"));
    }
    const tcp::endpoint endpoint(address,
                                 static_cast<unsigned short>(options.port));
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error)
      acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (error) {
      const bool taken = error == asio::error::address_in_use;
      return MakeError(
          absl::StatusCode::kUnavailable, "CANNOT_LISTEN",
          absl::StrCat(
              "cannot listen on ", where, ": ", error.message(),
              taken ? ": end what listens there, or take another --port" : ""));
    }
    port_ = acceptor_.local_endpoint().port();
    handlers_ = std::make_unique<asio::thread_pool>(options.handler_threads);
    state_->handlers = handlers_.get();
    Accept();
    thread_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "http");
      state_->context.run();
    });
    return absl::OkStatus();
  }

  void CloseAfterAnswers() {
    asio::post(state_->context, [state = state_] { state->closing = true; });
  }

  void Stop(absl::Duration grace) {
    if (!thread_.joinable()) return;
    asio::post(state_->context, [this, grace] {
      beast::error_code ignored;
      acceptor_.close(ignored);
      pause_.cancel();
      state_->stopping = true;
      for (Session* session : state_->sessions) {
        if (session->idle()) session->Close();
      }
      CloseAfter(std::chrono::steady_clock::now() +
                 absl::ToChronoMilliseconds(grace));
    });
    thread_.join();  // run() returns when the last operation was cancelled
    handlers_->join();
  }

  absl::Status ReplaceTls(const HttpTls& tls) {
    auto context = http_internal::MakeTlsContext(tls);
    if (!context.ok()) return context.status();
    asio::post(state_->context,
               [state = state_, context = *std::move(context)]() mutable {
                 state->tls = std::move(context);
               });
    return absl::OkStatus();
  }

  int port() const { return port_; }
  int64_t connections() const { return state_->open_now; }
  int64_t refused_connections() const { return state_->refused_so_far; }
  bool is_tls() const { return state_->options.tls.has_value(); }
  const std::string& host() const { return state_->options.host; }

 private:
  void Accept() {
    acceptor_.async_accept([this](beast::error_code error, tcp::socket socket) {
      if (!acceptor_.is_open()) return;
      if (error) {
        // Out of descriptors, most likely: trying again at once would spin.
        pause_.expires_after(std::chrono::milliseconds(100));
        pause_.async_wait([this](beast::error_code stopped) {
          if (!stopped && acceptor_.is_open()) Accept();
        });
        return;
      }
      beast::error_code ignored;  // tokens are small, and wanted now
      socket.set_option(tcp::no_delay(true), ignored);
      setsockopt(socket.native_handle(), IPPROTO_TCP, TCP_NOTSENT_LOWAT,
                 &kMostUnsent, sizeof(kMostUnsent));
      auto session = std::make_shared<Session>(std::move(socket), state_.get());
      if (HasTooMany(session->peer()) || (IsFull() && !state_->MakeRoom())) {
        session->RefuseConnection();
      } else {
        session->Serve();
      }
      Accept();
    });
  }

  bool IsFull() const {
    return state_->served >=
           state_->options.max_connections + state_->options.spare_connections;
  }

  bool HasTooMany(const asio::ip::address& peer) const {
    const int most = state_->options.max_connections_per_peer;
    const auto of_peer = state_->served_of_peer.find(peer);
    return most > 0 && of_peer != state_->served_of_peer.end() &&
           of_peer->second >= most;
  }

  void CloseAfter(std::chrono::steady_clock::time_point end) {
    if (state_->sessions.empty()) return;
    if (std::chrono::steady_clock::now() >= end) {
      for (Session* session : state_->sessions) session->Gone();
      return;
    }
    pause_.expires_after(kGracePoll);
    pause_.async_wait([this, end](beast::error_code) { CloseAfter(end); });
  }

  // First, as exchanges may outlive this.
  const std::shared_ptr<ServerState> state_ = std::make_shared<ServerState>();
  tcp::acceptor acceptor_{state_->context};
  asio::steady_timer pause_{state_->context};
  std::unique_ptr<asio::thread_pool> handlers_;
  int port_ = 0;
  std::thread thread_;
};

std::string_view HttpRequest::Header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (absl::EqualsIgnoreCase(absl::string_view(key),
                               absl::string_view(name.data(), name.size()))) {
      return value;
    }
  }
  return {};
}

HttpServer::HttpServer(HttpOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}

HttpServer::~HttpServer() { Stop(); }

void HttpServer::Handle(std::string method, std::string path, Handler handler) {
  impl_->Handle(std::move(method), std::move(path), std::move(handler));
}

void HttpServer::HandleLater(std::string method, std::string path,
                             LaterHandler handler, Refuse refuse) {
  impl_->Handle(std::move(method), std::move(path),
                http_internal::Later{.handler = std::move(handler),
                                     .refuse = std::move(refuse)});
}

void HttpServer::SetGuard(Guard guard) { impl_->SetGuard(std::move(guard)); }

void HttpServer::Open(std::string path) { impl_->Open(std::move(path)); }

absl::Status HttpServer::Start() { return impl_->Start(); }

absl::Status HttpServer::ReplaceTls(const HttpTls& tls) {
  return impl_->ReplaceTls(tls);
}

int HttpServer::port() const { return impl_->port(); }

int64_t HttpServer::connections() const { return impl_->connections(); }

int64_t HttpServer::refused_connections() const {
  return impl_->refused_connections();
}

std::string HttpServer::url() const {
  const bool v6 = impl_->host().find(':') != std::string::npos;
  return absl::StrCat(impl_->is_tls() ? "https://" : "http://", v6 ? "[" : "",
                      impl_->host(), v6 ? "]:" : ":", impl_->port());
}

void HttpServer::CloseAfterAnswers() { impl_->CloseAfterAnswers(); }

void HttpServer::Stop(absl::Duration grace) { impl_->Stop(grace); }

HttpResponse HealthResponse(const absl::Status& status) {
  if (status.ok()) return {.body = "ok\n"};
  return {.code = 503, .body = absl::StrCat(status.message(), "\n")};
}

}  // namespace tandem
