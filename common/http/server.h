// SPDX-License-Identifier: Apache-2.0
// An HTTP/1.1 listener: GET /metrics, GET /health and what else a process
// registers. One thread of its own for all sockets, so it answers while the
// role's loop is busy, or stuck; a few more for handlers that take time.
//
//   HttpServer server(HttpOptions{.port = 8000});
//   server.Handle("GET", "/health", [&](const HttpRequest&) {
//     return HealthResponse(watchdog.Check(loop.Now()));
//   });
//   RETURN_IF_ERROR(server.Start());
//   Announce(server.port());
//
// Limits: header 8 KiB (431), body 1 MiB (413), idle connections and peers that
// take nothing 60 s, TLS handshakes 10 s, 256 connections, those that shake
// hands included. One more closes the one that has been idle for longest; where
// all are being answered it is refused (503; with TLS the connection is cut).
// Wrong paths are 404, wrong methods 405 with Allow. A peer that closes, by TLS
// or below it, is gone.

#ifndef TANDEM_COMMON_HTTP_SERVER_H_
#define TANDEM_COMMON_HTTP_SERVER_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace tandem {

struct HttpRequest {
  std::string method;
  std::string path;   // without the query
  std::string query;  // after '?', not decoded
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;  // as sent
  std::string caller;  // who sent it, as the server's guard found
  std::string id;      // HttpOptions::request_id's

  // The first value; the name's case does not matter. "" if there is none.
  std::string_view Header(std::string_view name) const;
};

struct HttpResponse {
  int code = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body = "";
  std::vector<std::pair<std::string, std::string>> headers = {};
};

// PEM texts. With `client_ca` clients must show a certificate of it.
struct HttpTls {
  std::string cert;  // chain, leaf first
  std::string key;
  std::string client_ca;
};

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 0;  // 0: a free one
  size_t max_header_bytes = 8 << 10;
  size_t max_body_bytes = 1 << 20;
  absl::Duration idle_timeout = absl::Seconds(60);
  int max_connections = 256;
  // Beyond those: served by Handle's handlers, and by HandleLater's in place of
  // idle ones, if there are any.
  int spare_connections = 0;
  int max_connections_per_peer = 0;  // of one address; 0: no such limit
  int handler_threads = 2;           // for HandleLater
  std::optional<HttpTls> tls = {};
  // 403 to every request whose Host is not local (host.h).
  bool local_hosts_only = false;
  absl::Duration handshake_timeout = absl::Seconds(10);
  // The listener's own refusals in the shape that clients of `path` read; the
  // path is empty where none could be read. Null: `message` as plain text.
  std::function<HttpResponse(int code, const std::string& path,
                             const std::string& message)>
      error_page = {};
  // Of the X-Request-Id that was sent ("": none) the one that every answer
  // has, unless its handler gives another. Null: answers have none.
  std::function<std::string(std::string_view sent)> request_id = {};
};

// A request whose answer comes later, or in pieces: either Answer, or Begin,
// Write as often as it takes, End. From any thread, in the order of the calls;
// what comes after the end, or for a peer that has gone, is dropped. Destroyed
// before the end: 500 if nothing was sent, else the connection is cut, so that
// the peer can tell. May outlive the server.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;
  virtual const HttpRequest& request() const = 0;

  virtual void Answer(HttpResponse response) = 0;
  // The head of an answer in chunks (to HTTP/1.0: up to the connection's end).
  // `head.body` is the first piece, and may be empty.
  virtual void Begin(HttpResponse head) = 0;
  // `written` runs on the server's thread when the system has taken the piece;
  // never if the peer has gone.
  virtual void Write(std::string piece, std::function<void()> written) = 0;
  virtual void End() = 0;

  // Runs once on the server's thread when the peer goes before the end, at
  // once if it has. Replaces an earlier one.
  virtual void OnGone(std::function<void()> gone) = 0;
};

class HttpServer {
 public:
  // Runs on the server's thread and must not block it for long.
  using Handler = std::function<HttpResponse(const HttpRequest&)>;

  explicit HttpServer(HttpOptions options);
  ~HttpServer();  // Stop
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // Runs on one of the handler threads.
  using LaterHandler = std::function<void(std::unique_ptr<HttpExchange>)>;

  // Before Start. GET serves HEAD too. A path that ends in '/' serves all
  // below it that nothing else does. Handlers must live until Stop.
  void Handle(std::string method, std::string path, Handler handler);
  // `refuse`, which runs as a Handler does, answers a request in the later
  // handler's place, if it returns an answer: no handler thread has to be free
  // for that. May be null.
  using Refuse = std::function<std::optional<HttpResponse>(const HttpRequest&)>;
  void HandleLater(std::string method, std::string path, LaterHandler handler,
                   Refuse refuse = nullptr);

  // Asked on the server's thread about every request's head, before its body
  // is read: sets `caller`, or returns the refusal, after which the connection
  // ends. Paths of Open are let in unasked, with all below those that end in
  // '/' as Handle's do. Before Start.
  using Guard = std::function<std::optional<HttpResponse>(HttpRequest* head)>;
  void SetGuard(Guard guard);
  void Open(std::string path);

  // UNAVAILABLE with the system's reason if the address cannot be had.
  absl::Status Start();
  int port() const;
  // From any thread: those open now, and those refused so far, or closed, for
  // their number.
  int64_t connections() const;
  int64_t refused_connections() const;
  // For connections from now on; those open keep theirs. INVALID_ARGUMENT, and
  // nothing changes, if it is no pair of key and certificate. Of a server that
  // was started with TLS.
  absl::Status ReplaceTls(const HttpTls& tls);

  // "http://127.0.0.1:8000", or "https:"
  std::string url() const;

  // Answers that begin from here on end their connections, and say so: clients
  // that keep theirs move to another server. New ones are still taken, for
  // probes, and idle ones left alone. From any thread.
  void CloseAfterAnswers();

  // Takes no more connections, gives answers that have begun `grace` to reach
  // their peers, closes what is left and joins. Idempotent.
  void Stop(absl::Duration grace = absl::ZeroDuration());

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

// 200 "ok", or 503 with the status's message.
HttpResponse HealthResponse(const absl::Status& status);

}  // namespace tandem

#endif  // TANDEM_COMMON_HTTP_SERVER_H_
