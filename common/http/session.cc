// SPDX-License-Identifier: Apache-2.0
#include "common/http/session.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/http/host.h"

namespace tandem::http_internal {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using tcp = asio::ip::tcp;

// How often a peer is looked at that has sent more than its request.
constexpr auto kLookAgain = std::chrono::milliseconds(500);
// Read at once, beside a header. What a parser waits for must fit: the end of a
// chunk's extension or of a trailer.
constexpr size_t kReadBytes = 64 << 10;
// Of a next request, while an answer over TLS is on the way.
constexpr size_t kReadAhead = 4 << 10;
// Before a request line. RFC 9112, 2.2: a server should ignore one at least, as
// some clients send one behind a body.
constexpr int kMaxEmptyLines = 4;
// Connections beyond the limits that may hold a descriptor until they have read
// so.
constexpr int kMaxRefused = 64;
constexpr char kRequestIdHeader[] = "X-Request-Id";
constexpr char kContinue[] = "HTTP/1.1 100 Continue\r\n\r\n";

// As RFC 9110 asks of every answer.
std::string DateNow() {
  return absl::FormatTime("%a, %d %b %Y %H:%M:%S GMT", absl::Now(),
                          absl::UTCTimeZone());
}

// RFC 9112, 3.2.2: every server takes targets as proxies get them,
// "http://host/path"; that host counts, whatever the header says. False where
// `target` is a path already.
bool TakeOrigin(absl::string_view* target, absl::string_view* host) {
  for (const absl::string_view scheme : {"http://", "https://"}) {
    if (!absl::StartsWithIgnoreCase(*target, scheme)) continue;
    target->remove_prefix(scheme.size());
    *host = target->substr(0, target->find_first_of("/?"));
    target->remove_prefix(host->size());
    return true;
  }
  return false;
}

HttpRequest Convert(const http::request<http::string_body>& message) {
  HttpRequest request;
  request.method = std::string(message.method_string());
  absl::string_view target(message.target().data(), message.target().size());
  absl::string_view host;
  const bool absolute = TakeOrigin(&target, &host);
  const size_t mark = target.find('?');
  request.path = std::string(target.substr(0, mark));
  if (absolute && request.path.empty()) request.path = "/";
  if (mark != absl::string_view::npos) {
    request.query = std::string(target.substr(mark + 1));
  }
  request.body = message.body();
  for (const auto& field : message) {
    if (absolute && field.name() == http::field::host) continue;
    request.headers.emplace_back(std::string(field.name_string()),
                                 std::string(field.value()));
  }
  if (absolute) request.headers.emplace_back("Host", std::string(host));
  return request;
}

// Bytes of the request line and header fields, as a plain client writes them.
template <typename Message>
size_t HeaderBytes(const Message& message) {
  size_t bytes = message.method_string().size() + message.target().size() + 14;
  for (const auto& field : message) {  // with colon, space, line end
    bytes += field.name_string().size() + field.value().size() + 4;
  }
  return bytes;
}

// What a handler holds. Every call goes to the server's thread with the number
// of its exchange, as the connection may have gone on to a next one.
class Exchange final : public HttpExchange {
 public:
  Exchange(std::shared_ptr<ServerState> state, std::shared_ptr<Session> session,
           uint64_t number, HttpRequest request)
      : state_(std::move(state)),
        session_(std::move(session)),
        number_(number),
        request_(std::move(request)) {}
  ~Exchange() override {
    // The session itself must end on that thread, too.
    asio::post(state_->context,
               [session = std::move(session_), number = number_] {
                 if (session->number() == number) session->Dropped();
               });
  }

  const HttpRequest& request() const override { return request_; }
  void Answer(HttpResponse response) override {
    Post([response = std::move(response)](Session* session) mutable {
      session->AnswerLater(std::move(response));
    });
  }
  void Begin(HttpResponse head) override {
    Post([head = std::move(head)](Session* session) mutable {
      session->Begin(std::move(head));
    });
  }
  void Write(std::string piece, std::function<void()> written) override {
    Post([piece = std::move(piece),
          written = std::move(written)](Session* session) mutable {
      session->Write(std::move(piece), std::move(written));
    });
  }
  void End() override {
    Post([](Session* session) { session->End(); });
  }
  void OnGone(std::function<void()> gone) override {
    Post([gone = std::move(gone)](Session* session) mutable {
      session->OnGone(std::move(gone));
    });
  }

 private:
  template <typename Call>
  void Post(Call call) {
    asio::post(state_->context, [session = session_, number = number_,
                                 call = std::move(call)]() mutable {
      if (session->number() == number) call(session.get());
    });
  }

  const std::shared_ptr<ServerState> state_;
  std::shared_ptr<Session> session_;
  const uint64_t number_;
  const HttpRequest request_;
};

}  // namespace

bool ServerState::IsOpen(std::string_view path) const {
  return std::any_of(
      open_paths.begin(), open_paths.end(), [path](const std::string& open) {
        const bool folder = open.size() > 1 && open.back() == '/';
        return path == open || (folder && path.substr(0, open.size()) == open);
      });
}

Session::Session(tcp::socket socket, ServerState* state)
    : stream_(std::move(socket), state->tls),
      timer_(stream_.get_executor()),
      buffer_(kReadBytes + state->options.max_header_bytes),
      state_(state) {
  Error ignored;  // gone already: that of nobody
  peer_ = stream_.tcp().socket().remote_endpoint(ignored).address();
  state_->sessions.insert(this);
  ++state_->open_now;
}

Session::~Session() {
  Leave();
  state_->sessions.erase(this);
  --state_->open_now;
}

// A handshake belongs to a connection like a request: it has its time, and
// nobody else waits for it.
void Session::Serve() {
  served_ = true;
  ++state_->served;
  ++state_->served_of_peer[peer_];
  if (!stream_.is_tls()) return Read();
  stream_.tcp().expires_after(
      absl::ToChronoMilliseconds(state_->options.handshake_timeout));
  stream_.tls().async_handshake(asio::ssl::stream_base::server,
                                [self = shared_from_this()](Error error) {
                                  if (error) return self->Close();
                                  self->Read();
                                });
}

void Session::RefuseConnection() {
  const int refused =
      static_cast<int>(state_->sessions.size()) - state_->served;
  // To say why would take a handshake.
  if (!stream_.is_tls() && refused <= kMaxRefused) return Refuse();
  ++state_->refused_so_far;
  Close();
}

void Session::Refuse() {
  ++state_->refused_so_far;
  if (id_.empty()) Name("");
  HttpResponse response = ErrorPage(503, "too many connections");
  response.headers.emplace_back("Retry-After", "1");
  RefuseMessage(std::move(response));
}

HttpResponse Session::ErrorPage(int code, const std::string& message) const {
  if (const auto& page = state_->options.error_page) {
    return page(code, path_, message);
  }
  return {.code = code, .body = message + "\n"};
}

HttpResponse Session::OverLimit(int code, const char* what,
                                size_t bytes) const {
  return ErrorPage(code,
                   absl::StrCat(what, " over the limit of ", bytes, " bytes"));
}

// The request at hand, for its answers.
void Session::Name(std::string_view sent) {
  if (state_->options.request_id) id_ = state_->options.request_id(sent);
}

// ------------------------------------------------------------- a request

void Session::Read() {
  path_.clear();
  id_.clear();
  parser_.emplace();
  parser_->header_limit(
      static_cast<std::uint32_t>(state_->options.max_header_bytes));
  parser_->body_limit(state_->options.max_body_bytes);
  ExpiresWhenIdle();
  ReadHeader(/*empty_lines=*/0);
}

// Beast takes an empty line for a broken request line. `empty_lines`: ignored.
void Session::ReadHeader(int empty_lines) {
  const auto first = [this] {
    const auto bytes = buffer_.data();
    return std::string_view(static_cast<const char*>(bytes.data()),
                            std::min<size_t>(bytes.size(), 2));
  };
  for (; empty_lines < kMaxEmptyLines && first() == "\r\n"; ++empty_lines) {
    buffer_.consume(2);
  }
  if (empty_lines < kMaxEmptyLines && (first().empty() || first() == "\r")) {
    stream_.async_read_some(
        buffer_.prepare(beast::read_size(buffer_, kReadBytes)),
        [self = shared_from_this(), empty_lines](Error error, size_t bytes) {
          if (error) return self->Close();  // the peer left, or was idle
          self->buffer_.commit(bytes);
          self->ReadHeader(empty_lines);
        });
    return;
  }
  http::async_read_header(stream_, buffer_, *parser_,
                          [self = shared_from_this()](Error error, size_t) {
                            self->OnHeader(error);
                          });
}

void Session::OnHeader(Error error) {
  const auto target = parser_->get().target();
  path_.assign(target.data(), std::min(target.find('?'), target.size()));
  const auto id = parser_->get()[kRequestIdHeader];
  Name(std::string_view(id.data(), id.size()));
  if (RefuseBroken(error)) return;
  // Beast limits the request line and the fields, but each by itself.
  if (HeaderBytes(parser_->get()) > state_->options.max_header_bytes) {
    return RefuseMessage(
        OverLimit(431, "header", state_->options.max_header_bytes));
  }
  if (!LetIn()) return;
  // Where such a body ends, two readers may see differently (RFC 9112, 6.1).
  if (parser_->get().count(http::field::transfer_encoding) > 0 &&
      (!parser_->chunked() || parser_->get().version() < 11)) {
    return RefuseMessage(
        ErrorPage(400, "transfer encoding other than chunked"));
  }
  const auto expects = parser_->get()[http::field::expect];
  if (parser_->get().version() < 11 ||
      !absl::EqualsIgnoreCase(absl::string_view(expects.data(), expects.size()),
                              "100-continue")) {
    return ReadBody();
  }
  // A body for nothing need not come (RFC 9110, 10.1.1).
  HttpResponse wrong;
  if (Find(Convert(parser_->get()), &wrong) == nullptr) {
    return RefuseMessage(std::move(wrong));
  }
  asio::async_write(stream_, asio::buffer(kContinue, sizeof(kContinue) - 1),
                    [self = shared_from_this()](Error failed, size_t) {
                      if (failed) return self->Close();
                      self->ReadBody();
                    });
}

// Whether the guard has nothing against it.
bool Session::LetIn() {
  caller_.clear();
  const HttpOptions& options = state_->options;
  if (state_->guard == nullptr && !options.local_hosts_only) return true;
  HttpRequest head = Convert(parser_->get());
  head.id = id_;
  if (options.local_hosts_only &&
      !IsLocalHost(head.Header("host"), options.host)) {
    RefuseMessage(ErrorPage(
        403, absl::StrCat("Host = ", std::string(head.Header("host")),
                          ": this server listens on loopback without a key, "
                          "and so answers local names alone, such as "
                          "localhost")));
    return false;
  }
  if (state_->guard == nullptr) return true;
  if (state_->IsOpen(head.path)) return true;
  std::optional<HttpResponse> refusal = state_->guard(&head);
  if (refusal) {
    RefuseMessage(*std::move(refusal));
    return false;
  }
  caller_ = std::move(head.caller);
  return true;
}

void Session::ReadBody() {
  ExpiresWhenIdle();  // its time is not that which the header left
  http::async_read(stream_, buffer_, *parser_,
                   [self = shared_from_this()](Error error, size_t) {
                     self->OnRead(error);
                   });
}

void Session::OnRead(Error error) {
  if (RefuseBroken(error)) return;
  // A trailer's fields have joined those of the header, which bounds both.
  if (HeaderBytes(parser_->get()) > state_->options.max_header_bytes) {
    return RefuseMessage(
        OverLimit(431, "header and trailer", state_->options.max_header_bytes));
  }
  const auto message = parser_->release();
  version_ = message.version() == 10 ? 10 : 11;
  keep_alive_ = message.keep_alive();
  HttpRequest request = Convert(message);
  request.caller = std::move(caller_);
  request.id = id_;
  head_ = request.method == "HEAD";
  Dispatch(std::move(request));
}

// Whether the connection is over for what could be read of it.
bool Session::RefuseBroken(Error error) {
  if (!error) return false;
  if (error == http::error::header_limit) {
    RefuseMessage(OverLimit(431, "header", state_->options.max_header_bytes));
  } else if (error == http::error::body_limit) {
    RefuseMessage(OverLimit(413, "body", state_->options.max_body_bytes));
  } else if (error.category() ==
                 http::make_error_code(http::error::bad_method).category() &&
             error != http::error::end_of_stream &&
             error != http::error::partial_message) {
    RefuseMessage(ErrorPage(400, "not an HTTP/1 request"));
  } else {
    Close();  // the peer left, or was idle for too long
  }
  return true;
}

const Route* Session::Find(const HttpRequest& request,
                           HttpResponse* wrong) const {
  auto at = state_->routes.find(request.path);
  for (size_t slash = request.path.rfind('/');
       at == state_->routes.end() && slash != std::string::npos && slash > 0;
       slash = request.path.rfind('/', slash - 1)) {
    at = state_->routes.find(request.path.substr(0, slash + 1));
  }
  if (at == state_->routes.end()) {
    *wrong = ErrorPage(404, absl::StrCat("nothing at ", request.path));
    return nullptr;
  }
  const auto route =
      at->second.find(request.method == "HEAD" ? "GET" : request.method);
  if (route != at->second.end()) return &route->second;
  std::vector<std::string> allowed;
  for (const auto& [name, unused] : at->second) {
    allowed.push_back(name);
    if (name == "GET") allowed.push_back("HEAD");
  }
  *wrong = ErrorPage(405, absl::StrCat(request.path, " knows ",
                                       absl::StrJoin(allowed, ", "), " only"));
  wrong->headers.emplace_back("Allow", absl::StrJoin(allowed, ", "));
  return nullptr;
}

void Session::Dispatch(HttpRequest request) {
  answering_ = true;
  HttpResponse wrong;
  const Route* const route = Find(request, &wrong);
  if (route == nullptr) return Answer(std::move(wrong));
  if (const auto* handler = std::get_if<HttpServer::Handler>(route)) {
    return Answer((*handler)(request));
  }
  while (state_->served > state_->options.max_connections) {
    if (!state_->MakeRoom()) return Refuse();
  }
  const auto* later = &std::get<Later>(*route);
  if (later->refuse != nullptr) {
    if (std::optional<HttpResponse> refusal = later->refuse(request)) {
      return Answer(*std::move(refusal));
    }
  }
  later_ = true;
  begun_ = ended_ = false;
  ++number_;
  auto exchange =
      std::make_unique<Exchange>(state_->shared_from_this(), shared_from_this(),
                                 number_, std::move(request));
  stream_.tcp().expires_never();
  Watch();
  asio::post(*state_->handlers,
             [later, exchange = std::move(exchange)]() mutable {
               later->handler(std::move(exchange));
             });
}

// The rest of the message is not read: the connection cannot be used again.
void Session::RefuseMessage(HttpResponse response) {
  answering_ = true;
  keep_alive_ = false;
  head_ = parser_ && parser_->get().method() == http::verb::head;
  version_ = 11;
  Answer(std::move(response));
}

// ------------------------------------------------------- a whole answer

template <typename Message>
void Session::SetHead(const HttpResponse& answer, Message* message) const {
  message->version(version_);
  message->result(static_cast<unsigned>(answer.code));
  message->set(http::field::date, DateNow());
  message->set(http::field::content_type, answer.content_type);
  if (!id_.empty()) message->set(kRequestIdHeader, id_);
  for (const auto& [name, value] : answer.headers) message->set(name, value);
}

void Session::Answer(HttpResponse answer) {
  if (state_->closing) keep_alive_ = false;
  response_ = {};
  SetHead(answer, &response_);
  const size_t size = answer.body.size();
  response_.body() = std::move(answer.body);
  response_.prepare_payload();
  if (head_) {
    response_.body().clear();
    response_.content_length(size);
  }
  response_.keep_alive(keep_alive_);
  serializer_.emplace(response_);
  WriteAnswer();
}

// A peer that takes it slowly is not one that takes nothing.
void Session::WriteAnswer() {
  ExpiresWhenIdle();
  http::async_write_some(stream_, *serializer_,
                         [self = shared_from_this()](Error error, size_t) {
                           if (error) return self->Gone();
                           if (!self->serializer_->is_done()) {
                             return self->WriteAnswer();
                           }
                           self->AfterAnswer();
                         });
}

void Session::AfterAnswer() {
  answering_ = later_ = false;
  on_gone_ = nullptr;
  ++number_;
  timer_.cancel();
  if (!watching_) return NextRequest();
  // Two readers of one socket would get in each other's way.
  beast::error_code ignored;
  stream_.tcp().socket().cancel(ignored);
}

void Session::NextRequest() {
  if (keep_alive_ && !state_->stopping) return Read();
  Linger();
}

// ---------------------------------------------- an answer that comes later

void Session::AnswerLater(HttpResponse response) {
  if (!later_ || begun_ || gone_) return;
  later_ = false;
  Answer(std::move(response));
}

void Session::Begin(HttpResponse head) {
  if (!later_ || begun_ || gone_) return;
  begun_ = true;
  const bool chunked = version_ == 11;
  if (!chunked || state_->closing) keep_alive_ = false;
  http::response<http::empty_body> message;
  SetHead(head, &message);
  message.chunked(chunked);
  message.keep_alive(keep_alive_);
  std::ostringstream text;
  text << message.base();
  pieces_.push_back({text.str(), nullptr});
  Write(std::move(head.body), nullptr);
}

void Session::Write(std::string piece, std::function<void()> written) {
  if (!later_ || !begun_ || ended_ || gone_) return;
  if (head_ || piece.empty()) {
    pieces_.push_back({"", std::move(written)});
  } else if (version_ == 11) {
    pieces_.push_back(
        {absl::StrCat(absl::Hex(piece.size()), "\r\n", piece, "\r\n"),
         std::move(written)});
  } else {
    pieces_.push_back({std::move(piece), std::move(written)});
  }
  WriteNext();
}

void Session::End() {
  if (!later_ || !begun_ || ended_ || gone_) return;
  ended_ = true;
  if (version_ == 11 && !head_) pieces_.push_back({"0\r\n\r\n", nullptr});
  WriteNext();
}

// All that has gathered, in one write.
void Session::WriteNext() {
  if (writing_ || gone_) return;
  if (pieces_.empty()) {
    if (ended_) AfterAnswer();
    return;
  }
  chunk_.clear();
  for (Piece& piece : pieces_) {
    chunk_ += piece.bytes;
    if (piece.written) written_.push_back(std::move(piece.written));
  }
  pieces_.clear();
  chunk_written_ = 0;
  writing_ = true;
  WriteChunk();
}

// As WriteAnswer: whatever a slow peer takes gives it time for the rest.
void Session::WriteChunk() {
  ExpiresWhenIdle();
  stream_.async_write_some(
      asio::buffer(chunk_) + chunk_written_,
      [self = shared_from_this()](Error error, size_t bytes) {
        self->OnWritten(error, bytes);
      });
}

void Session::OnWritten(Error error, size_t bytes) {
  chunk_written_ += bytes;
  if (!error && chunk_written_ < chunk_.size()) return WriteChunk();
  writing_ = false;
  if (error) return Gone();
  stream_.tcp().expires_never();
  for (const auto& written : std::exchange(written_, {})) written();
  WriteNext();
}

void Session::OnGone(std::function<void()> gone) {
  if (gone_) return gone();
  on_gone_ = std::move(gone);
}

void Session::Dropped() {
  if (!later_ || ended_) return;
  if (begun_) return Close();
  AnswerLater(ErrorPage(500, "no answer"));
}

// A peer that closes while its answer is on the way does not want it. What it
// sends meanwhile (the next request) stays where it is.
void Session::Watch() {
  if (stream_.is_tls()) return WatchTls();
  watching_ = true;
  stream_.tcp().socket().async_wait(
      tcp::socket::wait_read,
      [self = shared_from_this()](Error error) { self->OnReadable(error); });
}

void Session::OnReadable(Error error) {
  watching_ = false;
  if (gone_) return;
  if (!answering_) return NextRequest();  // it waited for this
  if (error) return;
  char byte;
  const ssize_t n = recv(stream_.tcp().socket().native_handle(), &byte, 1,
                         MSG_PEEK | MSG_DONTWAIT);
  if (n > 0) return LookAgain();  // it stays readable
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Watch();
  Gone();
}

// Of TLS only who reads can tell a peer's end from its next request, which is
// kept for the next reader. Nobody writes slower for it: the two directions are
// apart.
void Session::WatchTls() {
  if (buffer_.size() >= kReadAhead) return LookAgain();
  watching_ = true;
  stream_.tcp().expires_never();  // of what is not under way
  stream_.async_read_some(
      buffer_.prepare(kReadAhead),
      [self = shared_from_this()](Error error, size_t bytes) {
        self->OnReadAhead(error, bytes);
      });
}

void Session::OnReadAhead(Error error, size_t bytes) {
  watching_ = false;
  buffer_.commit(bytes);
  if (gone_) return;
  if (!answering_) return NextRequest();  // it waited for this
  if (error == asio::error::operation_aborted) return;
  if (error) return Gone();
  WatchTls();
}

// Whether the peer has closed behind what it sent and nobody has read yet.
void Session::LookAgain() {
  pollfd state{.fd = stream_.tcp().socket().native_handle(),
               .events = POLLRDHUP,
               .revents = 0};
  if (poll(&state, 1, 0) > 0) return Gone();
  timer_.expires_after(kLookAgain);
  timer_.async_wait([self = shared_from_this(), number = number_](Error error) {
    if (error || self->gone_ || self->number_ != number) return;
    self->LookAgain();
  });
}

void Session::Gone() {
  gone_ = true;
  pieces_.clear();
  if (const auto gone = std::exchange(on_gone_, nullptr)) gone();
  Close();
}

// ------------------------------------------------------------ the end

void Session::ExpiresWhenIdle() {
  idle_since_ = std::chrono::steady_clock::now();
  stream_.tcp().expires_after(
      absl::ToChronoMilliseconds(state_->options.idle_timeout));
}

void Session::Leave() {
  if (!std::exchange(served_, false)) return;
  --state_->served;
  const auto of_peer = state_->served_of_peer.find(peer_);
  if (--of_peer->second == 0) state_->served_of_peer.erase(of_peer);
}

// Gone, as what its peer sent may be on the way to a handler. Its operations
// still hold it for a while.
void Session::MakeRoom() {
  ++state_->refused_so_far;
  Leave();
  Gone();
}

void Session::Close() {
  timer_.cancel();
  beast::error_code ignored;
  stream_.tcp().socket().close(ignored);
}

// Closing with unread bytes resets the connection and may take the answer
// with it: say goodbye, then read what still comes for a short while.
void Session::Linger() {
  if (!stream_.is_tls()) return LingerBelowTls();
  stream_.tcp().expires_after(std::chrono::seconds(1));
  stream_.tls().async_shutdown(
      [self = shared_from_this()](Error) { self->LingerBelowTls(); });
}

void Session::LingerBelowTls() {
  beast::error_code ignored;
  stream_.tcp().socket().shutdown(tcp::socket::shutdown_send, ignored);
  stream_.tcp().expires_after(std::chrono::seconds(1));
  Discard();
}

void Session::Discard() {
  buffer_.consume(buffer_.size());
  stream_.tcp().async_read_some(
      buffer_.prepare(4096), [self = shared_from_this()](Error error, size_t) {
        if (error) return self->Close();
        self->Discard();
      });
}

}  // namespace tandem::http_internal
