// SPDX-License-Identifier: Apache-2.0
// One connection of the listener. All of it runs on the server's thread, so
// nothing here is locked. Included by session.cc and server.cc only: Beast is
// slow to compile.

#ifndef TANDEM_COMMON_HTTP_SESSION_H_
#define TANDEM_COMMON_HTTP_SESSION_H_

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "common/http/server.h"
#include "common/http/tls.h"

namespace tandem::http_internal {

class Session;

struct Later {
  HttpServer::LaterHandler handler;
  HttpServer::Refuse refuse;  // null: none is refused
};
using Route = std::variant<HttpServer::Handler, Later>;

// What the listener, its sessions and their exchanges share. Exchanges keep it
// alive; the queue of an io_context that has stopped goes with it, sessions
// before the set that they leave.
struct ServerState : std::enable_shared_from_this<ServerState> {
  HttpOptions options;
  std::map<std::string, std::map<std::string, Route>> routes;
  HttpServer::Guard guard;           // may be null: all are let in
  std::set<std::string> open_paths;  // not guarded
  bool IsOpen(std::string_view path) const;
  // Whoever holds connections in silence shuts nobody out, probes least of all:
  // the one that has been idle for longest goes. False: all are being answered.
  bool MakeRoom();
  std::set<Session*> sessions;
  // Of those, the ones that limits are about: not who is only told that there
  // are too many.
  int served = 0;
  std::map<boost::asio::ip::address, int> served_of_peer;
  bool closing = false;  // no connection outlives its next answer
  bool stopping = false;
  // Read from any thread.
  std::atomic<int64_t> open_now = 0;
  std::atomic<int64_t> refused_so_far = 0;
  std::shared_ptr<boost::asio::ssl::context> tls;  // null: plain text
  boost::asio::thread_pool* handlers = nullptr;
  boost::asio::io_context context{1};
};

// It lives as long as an operation of it is pending, or an exchange.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(boost::asio::ip::tcp::socket socket, ServerState* state);
  ~Session();

  void Serve();
  void RefuseConnection();  // there are too many
  const boost::asio::ip::address& peer() const { return peer_; }
  void Close();
  void Gone();  // closes; tells an exchange
  // Nobody waits for what this connection may still bring.
  bool idle() const { return !answering_; }
  // It came, or last had an answer or the head of a request.
  std::chrono::steady_clock::time_point idle_since() const {
    return idle_since_;
  }
  bool served() const { return served_; }
  void MakeRoom();  // closes it, for another one's sake
  // Of the exchange under way; others have no say any more.
  uint64_t number() const { return number_; }

  // An exchange's calls, on the server's thread.
  void AnswerLater(HttpResponse response);
  void Begin(HttpResponse head);
  void Write(std::string piece, std::function<void()> written);
  void End();
  void OnGone(std::function<void()> gone);
  void Dropped();  // its exchange is no more

 private:
  using Error = boost::beast::error_code;
  struct Piece {
    std::string bytes;  // as they go over the wire
    std::function<void()> written;
  };

  HttpResponse ErrorPage(int code, const std::string& message) const;
  HttpResponse OverLimit(int code, const char* what, size_t bytes) const;
  void Name(std::string_view sent);
  template <typename Message>
  void SetHead(const HttpResponse& answer, Message* message) const;
  void Refuse();  // 503: too many connections
  void Read();
  void ReadHeader(int empty_lines);
  void OnHeader(Error error);
  bool LetIn();
  void ReadBody();
  void OnRead(Error error);
  bool RefuseBroken(Error error);
  // Null: `wrong` is the answer, of a path or a method that there is not.
  const Route* Find(const HttpRequest& request, HttpResponse* wrong) const;
  void Dispatch(HttpRequest request);
  void RefuseMessage(HttpResponse response);
  void Answer(HttpResponse answer);
  void WriteAnswer();
  void AfterAnswer();
  void NextRequest();
  void WriteNext();
  void WriteChunk();
  void OnWritten(Error error, size_t bytes);
  void Watch();
  void OnReadable(Error error);
  void WatchTls();
  void OnReadAhead(Error error, size_t bytes);
  void LookAgain();
  void Leave();
  void ExpiresWhenIdle();
  void Linger();
  void LingerBelowTls();
  void Discard();

  Transport stream_;
  boost::asio::steady_timer timer_;
  boost::beast::flat_buffer buffer_;
  std::optional<
      boost::beast::http::request_parser<boost::beast::http::string_body>>
      parser_;
  boost::beast::http::response<boost::beast::http::string_body> response_;
  std::optional<
      boost::beast::http::response_serializer<boost::beast::http::string_body>>
      serializer_;
  unsigned version_ = 11;
  bool head_ = false;  // HEAD: no body goes out
  bool keep_alive_ = false;
  std::string caller_;
  std::string path_;  // of the message at hand; empty: not read
  std::string id_;    // likewise; empty: answers have none

  // Of an exchange.
  uint64_t number_ = 0;
  bool answering_ = false;  // a request was read whose answer is not written
  bool later_ = false;      // an exchange may still write
  bool begun_ = false;
  bool ended_ = false;
  bool gone_ = false;
  bool writing_ = false;
  bool watching_ = false;
  std::function<void()> on_gone_;
  std::deque<Piece> pieces_;
  std::string chunk_;         // what is being written
  size_t chunk_written_ = 0;  // bytes of it
  std::vector<std::function<void()>> written_;

  ServerState* const state_;
  boost::asio::ip::address peer_;
  bool served_ = false;  // counts as such
  std::chrono::steady_clock::time_point idle_since_ =
      std::chrono::steady_clock::now();
};

}  // namespace tandem::http_internal

#endif  // TANDEM_COMMON_HTTP_SESSION_H_
