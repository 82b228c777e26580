// SPDX-License-Identifier: Apache-2.0
// Boost.Beast on one io_context and one thread; every Session belongs to that
// thread, so nothing here is locked but the start.
#include "common/http/server.h"

#include <pthread.h>

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/error.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using tcp = asio::ip::tcp;
using Routes =
    std::map<std::string, std::map<std::string, HttpServer::Handler>>;

HttpResponse Plain(int code, std::string text) {
  HttpResponse response{.code = code};
  response.body = std::move(text) + "\n";
  return response;
}

HttpResponse Dispatch(const Routes& routes, const HttpRequest& request) {
  const auto route = routes.find(request.path);
  if (route == routes.end()) {
    return Plain(404, absl::StrCat("nothing at ", request.path));
  }
  const std::string method = request.method == "HEAD" ? "GET" : request.method;
  const auto handler = route->second.find(method);
  if (handler != route->second.end()) return handler->second(request);
  std::vector<std::string> allowed;
  for (const auto& [name, unused] : route->second) {
    allowed.push_back(name);
    if (name == "GET") allowed.push_back("HEAD");
  }
  HttpResponse response =
      Plain(405, absl::StrCat(request.path, " knows ",
                              absl::StrJoin(allowed, ", "), " only"));
  response.headers.emplace_back("Allow", absl::StrJoin(allowed, ", "));
  return response;
}

HttpRequest Convert(const http::request<http::string_body>& message) {
  HttpRequest request;
  request.method = std::string(message.method_string());
  const std::string target(message.target());
  const size_t mark = target.find('?');
  request.path = target.substr(0, mark);
  if (mark != std::string::npos) request.query = target.substr(mark + 1);
  request.body = message.body();
  for (const auto& field : message) {
    request.headers.emplace_back(std::string(field.name_string()),
                                 std::string(field.value()));
  }
  return request;
}

// Bytes of the request line and header fields, as a plain client writes them.
size_t HeaderBytes(const HttpRequest& request, size_t target_bytes) {
  size_t bytes = request.method.size() + target_bytes + 14;  // with empty line
  for (const auto& [name, value] : request.headers) {
    bytes += name.size() + value.size() + 4;  // colon, space, line end
  }
  return bytes;
}

// What all sessions share; the listener's, on its thread.
struct Shared {
  HttpOptions options;
  Routes routes;
  std::set<class Session*> sessions;
};

// One connection. It lives as long as an operation of it is pending: each
// holds the session (Asio's usual lifetime), and a cancelled one lets go.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(tcp::socket socket, Shared* shared)
      : stream_(std::move(socket)), shared_(shared) {
    shared_->sessions.insert(this);
  }
  ~Session() { shared_->sessions.erase(this); }

  void Serve() { Read(); }
  void Refuse() {
    keep_alive_ = false;
    Answer(Plain(503, "too many connections"), /*head=*/false, 11);
  }
  void Close() {
    beast::error_code ignored;
    stream_.socket().close(ignored);
  }

 private:
  void Read() {
    parser_.emplace();
    parser_->header_limit(
        static_cast<std::uint32_t>(shared_->options.max_header_bytes));
    parser_->body_limit(shared_->options.max_body_bytes);
    stream_.expires_after(
        absl::ToChronoMilliseconds(shared_->options.idle_timeout));
    http::async_read(
        stream_, buffer_, *parser_,
        [self = shared_from_this()](beast::error_code error, size_t) {
          self->OnRead(error);
        });
  }

  void OnRead(beast::error_code error) {
    const unsigned version = parser_->get().version();
    if (error == http::error::header_limit) {
      return RefuseMessage(Plain(431, "header over the limit"));
    }
    if (error == http::error::body_limit) {
      return RefuseMessage(Plain(413, "body over the limit"));
    }
    if (error.category() ==
            http::make_error_code(http::error::bad_method).category() &&
        error != http::error::end_of_stream &&
        error != http::error::partial_message) {
      return RefuseMessage(Plain(400, "not an HTTP/1 request"));
    }
    if (error) return Close();  // the peer left, or was idle for too long
    const auto message = parser_->release();
    keep_alive_ = message.keep_alive();
    const HttpRequest request = Convert(message);
    // Beast limits the request line and the fields, but each by itself.
    if (HeaderBytes(request, message.target().size()) >
        shared_->options.max_header_bytes) {
      return RefuseMessage(Plain(431, "header over the limit"));
    }
    Answer(Dispatch(shared_->routes, request), request.method == "HEAD",
           version);
  }

  // The rest of the message is not read: the connection cannot be used again.
  void RefuseMessage(HttpResponse response) {
    keep_alive_ = false;
    Answer(std::move(response), /*head=*/false, 11);
  }

  void Answer(HttpResponse answer, bool head, unsigned version) {
    response_ = {};
    response_.version(version == 10 ? 10 : 11);
    response_.result(static_cast<unsigned>(answer.code));
    response_.set(http::field::content_type, answer.content_type);
    for (const auto& [name, value] : answer.headers) {
      response_.set(name, value);
    }
    const size_t size = answer.body.size();
    response_.body() = std::move(answer.body);
    response_.prepare_payload();
    if (head) {
      response_.body().clear();
      response_.content_length(size);
    }
    response_.keep_alive(keep_alive_);
    stream_.expires_after(
        absl::ToChronoMilliseconds(shared_->options.idle_timeout));
    http::async_write(
        stream_, response_,
        [self = shared_from_this()](beast::error_code error, size_t) {
          if (error) return self->Close();
          if (self->keep_alive_) return self->Read();
          self->Linger();
        });
  }

  // Closing with unread bytes resets the connection and may take the answer
  // with it: say goodbye, then read what still comes for a short while.
  void Linger() {
    beast::error_code ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
    stream_.expires_after(std::chrono::seconds(1));
    Discard();
  }
  void Discard() {
    buffer_.consume(buffer_.size());
    stream_.async_read_some(
        buffer_.prepare(4096),
        [self = shared_from_this()](beast::error_code error, size_t) {
          if (error) return self->Close();
          self->Discard();
        });
  }

  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  http::response<http::string_body> response_;
  bool keep_alive_ = false;
  Shared* const shared_;
};

}  // namespace

class HttpServer::Impl {
 public:
  explicit Impl(HttpOptions options) { shared_.options = std::move(options); }

  void Handle(std::string method, std::string path, Handler handler) {
    shared_.routes[std::move(path)][std::move(method)] = std::move(handler);
  }

  absl::Status Start() {
    const HttpOptions& options = shared_.options;
    const std::string where = absl::StrCat(options.host, ":", options.port);
    beast::error_code error;
    const auto address = asio::ip::make_address(
        options.host == "localhost" ? "127.0.0.1" : options.host, error);
    if (error) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, "BAD_ADDRESS",
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
      return MakeError(
          absl::StatusCode::kUnavailable, "CANNOT_LISTEN",
          absl::StrCat("cannot listen on ", where, ": ", error.message()));
    }
    port_ = acceptor_.local_endpoint().port();
    Accept();
    thread_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "http");
      context_.run();
    });
    return absl::OkStatus();
  }

  void Stop() {
    if (!thread_.joinable()) return;
    asio::post(context_, [this] {
      beast::error_code ignored;
      acceptor_.close(ignored);
      pause_.cancel();
      for (Session* session : shared_.sessions) session->Close();
    });
    thread_.join();  // run() returns when the last operation was cancelled
  }

  int port() const { return port_; }
  const std::string& host() const { return shared_.options.host; }

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
      const bool full = static_cast<int>(shared_.sessions.size()) >=
                        shared_.options.max_connections;
      auto session = std::make_shared<Session>(std::move(socket), &shared_);
      if (full) {
        session->Refuse();
      } else {
        session->Serve();
      }
      Accept();
    });
  }

  Shared shared_;  // outlives the context, whose pending operations use it
  asio::io_context context_{1};
  tcp::acceptor acceptor_{context_};
  asio::steady_timer pause_{context_};
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

absl::Status HttpServer::Start() { return impl_->Start(); }

int HttpServer::port() const { return impl_->port(); }

std::string HttpServer::url() const {
  const bool v6 = impl_->host().find(':') != std::string::npos;
  return absl::StrCat("http://", v6 ? "[" : "", impl_->host(), v6 ? "]:" : ":",
                      impl_->port());
}

void HttpServer::Stop() { impl_->Stop(); }

HttpResponse HealthResponse(const absl::Status& status) {
  if (status.ok()) return Plain(200, "ok");
  return Plain(503, std::string(status.message()));
}

}  // namespace tandem
