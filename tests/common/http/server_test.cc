// SPDX-License-Identifier: Apache-2.0
// The listener over raw sockets: what is on the wire, byte for byte.
#include "common/http/server.h"

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/http/host.h"
#include "common/metrics.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/http/socket.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class HttpServerTest : public ::testing::Test {
 protected:
  void StartServer(HttpOptions options = {}) {
    server_ = std::make_unique<HttpServer>(options);
    server_->Handle("GET", "/health", [](const HttpRequest&) {
      return HealthResponse(absl::OkStatus());
    });
    server_->Handle("POST", "/echo", [](const HttpRequest& request) {
      HttpResponse response;
      response.body = request.query + "|" +
                      std::string(request.Header("x-TEST")) + "|" +
                      request.body;
      response.headers.emplace_back("X-Answer", "42");
      return response;
    });
    server_->Handle("GET", "/below/", [](const HttpRequest& request) {
      return HttpResponse{.body = request.path + "\n"};
    });
    server_->Handle("GET", "/below/one", [](const HttpRequest&) {
      return HttpResponse{.body = "its own\n"};
    });
    const absl::Status started = server_->Start();
    ASSERT_TRUE(started.ok()) << started;
    ASSERT_GT(server_->port(), 0);
  }

  // One request on a connection of its own, up to the peer's close.
  std::string Exchange(const std::string& request) {
    Socket socket(server_->port());
    socket.Send(request);
    return socket.Receive();
  }

  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AnswersByPathAndMethod) {
  StartServer();
  struct Case {
    const char* request;
    const char* status;
    const char* also;
  };
  const Case cases[] = {
      {"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n",
       "HTTP/1.1 200 OK\r\n", "\r\n\r\nok\n"},
      {"GET /health?verbose HTTP/1.0\r\n\r\n", "HTTP/1.0 200 OK\r\n",
       "\r\n\r\nok\n"},
      {"HEAD /health HTTP/1.1\r\nConnection: close\r\n\r\n",
       "HTTP/1.1 200 OK\r\n", "Content-Length: 3\r\n"},
      {"GET /nothing HTTP/1.1\r\nConnection: close\r\n\r\n",
       "HTTP/1.1 404 Not Found\r\n", "nothing at /nothing\n"},
      {"GET /below/a/b HTTP/1.0\r\n\r\n", "HTTP/1.0 200 OK\r\n",
       "\r\n\r\n/below/a/b\n"},
      {"GET /below/one HTTP/1.0\r\n\r\n", "HTTP/1.0 200 OK\r\n",
       "\r\n\r\nits own\n"},
      {"GET /below HTTP/1.0\r\n\r\n", "HTTP/1.0 404 Not Found\r\n",
       "nothing at /below\n"},
      {"POST /below/a HTTP/1.0\r\n\r\n", "HTTP/1.0 405 ", "Allow: GET, HEAD"},
      {"DELETE /health HTTP/1.1\r\nConnection: close\r\n\r\n",
       "HTTP/1.1 405 Method Not Allowed\r\n", "Allow: GET, HEAD\r\n"},
      {"GET /echo HTTP/1.1\r\nConnection: close\r\n\r\n",
       "HTTP/1.1 405 Method Not Allowed\r\n", "Allow: POST\r\n"},
      {"POST /echo?a=b%20c HTTP/1.1\r\nX-Test: yes\r\nConnection: close\r\n"
       "Content-Length: 4\r\n\r\nbody",
       "HTTP/1.1 200 OK\r\n", "a=b%20c|yes|body"},
      {"POST /echo HTTP/1.1\r\nConnection: close\r\n"
       "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
       "HTTP/1.1 200 OK\r\n", "||abc"},
      {"POST /echo HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
       "HTTP/1.1 400 Bad Request\r\n", "transfer encoding"},
      {"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked, identity\r\n\r\n",
       "HTTP/1.1 400 Bad Request\r\n", "transfer encoding"},
      {"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
       "HTTP/1.1 400 Bad Request\r\n", "transfer encoding"},
      {"nonsense\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n", ""},
      {"POST /echo HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
       "HTTP/1.1 400 Bad Request\r\n", ""},
  };
  for (const Case& c : cases) {
    const std::string answer = Exchange(c.request);
    EXPECT_THAT(answer, StartsWith(c.status)) << c.request;
    EXPECT_THAT(answer, HasSubstr(c.also)) << c.request;
  }
  // Refusals, too, have no body then.
  for (const char* const request :
       {"HEAD /health HTTP/1.1\r\nConnection: close\r\n\r\n",
        "HEAD /nothing HTTP/1.1\r\nConnection: close\r\n\r\n",
        "HEAD /echo HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n"}) {
    EXPECT_THAT(Exchange(request), ::testing::EndsWith("\r\n\r\n")) << request;
  }
}

// Names that public DNS can have must not reach a listener that trusts whoever
// reaches it.
TEST_F(HttpServerTest, HostsOfElsewhereAreRefusedWhereOnlyLocalOnesMayAsk) {
  struct Case {
    const char* host;
    bool local;
  };
  const Case cases[] = {
      {"localhost", true},
      {"LOCALHOST:8000", true},
      {"localhost.:8000", true},
      {"app.localhost:80", true},
      {"host.docker.internal:8000", true},
      {"printer.local", true},
      {"127.0.0.1:8000", true},
      {"10.1.2.3", true},
      {"[::1]:8000", true},
      {"[::1]", true},
      {"evil.example", false},
      {"evil.example:8000", false},
      {"127.0.0.1.evil.example", false},
      {"localhost.evil.example:8000", false},
      {"notlocalhost", false},
      {"xlocal", false},
      {"127.0.0.1x", false},
      {"[evil.example]", false},
      {"[::1", false},
      {".", false},
      {":8000", false},
  };
  StartServer({.local_hosts_only = true});
  const auto ask = [&](const std::string& host) {
    return Exchange("GET /health HTTP/1.1\r\nConnection: close\r\nHost: " +
                    host + "\r\n\r\n");
  };
  for (const Case& c : cases) {
    EXPECT_THAT(ask(c.host),
                StartsWith(c.local ? "HTTP/1.1 200" : "HTTP/1.1 403"))
        << c.host;
    EXPECT_TRUE(IsLocalHost(c.host, "evil.EXAMPLE") ==
                (c.local || std::string(c.host).rfind("evil.", 0) == 0))
        << c.host;
  }
  EXPECT_THAT(ask("evil.example"), HasSubstr("Host = evil.example: this"));
  EXPECT_THAT(Exchange("GET /health HTTP/1.0\r\n\r\n"),
              StartsWith("HTTP/1.0 200"));
  // Of an absolute target that host counts, whatever the header says.
  const auto absolute = [&](const std::string& target) {
    return Exchange(
        "GET " + target +
        " HTTP/1.1\r\nConnection: close\r\nHost: localhost\r\n\r\n");
  };
  EXPECT_THAT(absolute("http://localhost:8000/health"),
              StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(absolute("HTTP://127.0.0.1/health?x=1"),
              StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(absolute("http://evil.example/health"),
              HasSubstr("Host = evil.example: this"));
  EXPECT_THAT(absolute("http://evil@localhost/health"),
              StartsWith("HTTP/1.1 403"));
  EXPECT_THAT(absolute("http://localhost"), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(Exchange("GET http://evil.example/health HTTP/1.0\r\n\r\n"),
              HasSubstr("Host = evil.example: this"));
  StartServer();
  EXPECT_THAT(ask("evil.example"), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTest, ConnectionsAreKeptAndPipelined) {
  StartServer();
  Socket socket(server_->port());
  const std::string request =
      "POST /echo HTTP/1.1\r\nContent-Length: 1\r\n\r\n";
  socket.Send(request + "1" + request + "2");
  EXPECT_THAT(socket.Receive("||2"), HasSubstr("||1"));
  socket.Send(request + "3");
  EXPECT_THAT(socket.Receive("||3"), HasSubstr("X-Answer: 42\r\n"));
}

// RFC 9112, 2.2: an empty line before a request is none of it.
TEST_F(HttpServerTest, EmptyLinesBeforeARequestAreIgnored) {
  StartServer();
  const std::string request =
      "POST /echo HTTP/1.1\r\nContent-Length: 1\r\n\r\n";
  Socket socket(server_->port());
  socket.Send("\r\n" + request + "1\r\n" + request + "2\r\n\r\n\r\n\r\n");
  EXPECT_THAT(socket.Receive("||2"), HasSubstr("||1"));
  socket.Send(request + "3");
  EXPECT_THAT(socket.Receive("||3"), HasSubstr("X-Answer: 42\r\n"));
  for (const char* const part : {"\r", "\n", "\r", "\n"}) {
    socket.Send(part);
    // They are to be read one by one, but may come together.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  socket.Send(request + "4");
  EXPECT_THAT(socket.Receive("||4"), StartsWith("HTTP/1.1 200 OK\r\n"));
  // But not without an end, nor anything else.
  const std::string last = "GET /health HTTP/1.0\r\n\r\n";
  EXPECT_THAT(Exchange("\r\n\r\n\r\n\r\n" + last), StartsWith("HTTP/1.0 200"));
  EXPECT_THAT(Exchange("\r\n\r\n\r\n\r\n\r\n" + last),
              StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Exchange("\r" + last), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Exchange("\n" + last), StartsWith("HTTP/1.1 400"));
}

TEST_F(HttpServerTest, HeadersAndBodiesAreAcceptedToTheLimitAndNoFurther) {
  StartServer({.max_header_bytes = 1024, .max_body_bytes = 2048});
  const auto with_header = [&](size_t bytes) {
    std::string request = "GET /health HTTP/1.1\r\nConnection: close\r\nX: ";
    request += std::string(bytes - request.size() - 4, 'x') + "\r\n\r\n";
    return Exchange(request);
  };
  EXPECT_THAT(with_header(1024), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(with_header(1025), StartsWith("HTTP/1.1 431"));
  EXPECT_THAT(with_header(100'000), StartsWith("HTTP/1.1 431"));
  // What follows a body in chunks counts as if it stood in the header.
  const auto with_trailers = [&](size_t bytes) {
    std::string header =
        "POST /echo HTTP/1.1\r\nConnection: close\r\n"
        "Transfer-Encoding: chunked\r\n\r\n";
    std::string trailers;
    while (header.size() + trailers.size() + 12 <= bytes) {
      trailers += "A: b\r\n";
    }
    trailers += "X: ";
    trailers += std::string(bytes - header.size() - trailers.size() - 2, 'x');
    return Exchange(header + "0\r\n" + trailers + "\r\n\r\n");
  };
  EXPECT_THAT(with_trailers(1024), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(with_trailers(1025), StartsWith("HTTP/1.1 431"));
  const auto with_body = [&](size_t bytes) {
    return Exchange(
        "POST /echo HTTP/1.1\r\nConnection: close\r\nContent-Length: " +
        std::to_string(bytes) + "\r\n\r\n" + std::string(bytes, 'b'));
  };
  EXPECT_THAT(with_body(2048), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(with_body(2049), StartsWith("HTTP/1.1 413"));
  EXPECT_THAT(with_body(1'000'000), StartsWith("HTTP/1.1 413"));
}

TEST_F(HttpServerTest, ChunksHoldNoMoreThanTheirBytes) {
  StartServer();
  const std::string head =
      "POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
  const std::string endless(1'000'000, 'x');
  EXPECT_THAT(Exchange(head + "5;" + endless), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Exchange(head + "0\r\nX: " + endless), StartsWith("HTTP/1.1 4"));
  Socket socket(server_->port());
  socket.Send(head + "5;a=b\r\nabcde\r\n0\r\nX: y\r\n\r\n");
  EXPECT_THAT(socket.Receive("||abcde"), HasSubstr("||abcde"));
}

// Whether a peer that reads by `take` gets all of a long answer of a server
// with some patience. `window`: of its own buffer; 0: the usual one.
constexpr size_t kLong = 24 << 20;
template <typename Take>
bool GetsAll(int window, Take take) {
  return WithSomePatience([&](std::chrono::milliseconds patience) {
    HttpServer server({.idle_timeout = absl::FromChrono(patience)});
    server.Handle("GET", "/much", [](const HttpRequest&) {
      return HttpResponse{.body = std::string(kLong, 'x')};
    });
    if (!server.Start().ok()) return false;
    Socket socket;
    if (window > 0) {
      setsockopt(socket.fd(), SOL_SOCKET, SO_RCVBUF, &window, sizeof(window));
    }
    socket.Connect(server.port());
    socket.Send("GET /much HTTP/1.1\r\nConnection: close\r\n\r\n");
    return take(socket, patience) > kLong;
  });
}

TEST_F(HttpServerTest, APeerThatTakesAnAnswerSlowlyGetsAllOfIt) {
  EXPECT_TRUE(GetsAll(0, [](Socket& socket, auto patience) {
    return socket.TakeSlowly(kLong / 2, patience);
  }));
}

// A buffer that a fast start has made large says nothing for long while it
// empties.
TEST_F(HttpServerTest, APeerThatBecomesSlowGetsAllOfAnAnswer) {
  EXPECT_TRUE(GetsAll(64 << 10, [](Socket& socket, auto patience) {
    const size_t fast = socket.Take(kLong / 2);
    return fast + socket.TakeSlowly(12 * (96 << 10), patience);
  }));
}

TEST_F(HttpServerTest, ConnectionsOfAPeerBeyondItsLimitAreRefusedUntilOneGoes) {
  StartServer({.max_connections = 4, .max_connections_per_peer = 3});
  const std::string request = "GET /health HTTP/1.1\r\n\r\n";
  std::vector<std::unique_ptr<Socket>> sockets;
  for (int i = 0; i < 3; ++i) {
    sockets.push_back(std::make_unique<Socket>(server_->port()));
    sockets.back()->Send(request);
    EXPECT_THAT(sockets.back()->Receive("ok\n"), HasSubstr(" 200 "));
  }
  EXPECT_THAT(Exchange(request), StartsWith("HTTP/1.1 503"));
  sockets.clear();
  std::string answer;
  for (int i = 0; i < 400 && answer.find(" 200 ") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    answer = Exchange("GET /health HTTP/1.1\r\nConnection: close\r\n\r\n");
  }
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTest, WhoIsSilentForLongestMakesRoom) {
  StartServer({.max_connections = 4, .spare_connections = 2});
  const std::string request = "GET /health HTTP/1.1\r\n\r\n";
  std::vector<std::unique_ptr<Socket>> silent;
  for (int i = 0; i < 6; ++i) {
    silent.push_back(std::make_unique<Socket>(server_->port()));
  }
  while (server_->connections() < 6) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  silent[0]->Send(request);  // and so is not the first to go
  EXPECT_THAT(silent[0]->Receive("ok\n"), HasSubstr(" 200 "));
  silent[3]->Send("GET /hea");  // of no use to it
  std::vector<std::unique_ptr<Socket>> probes;
  for (int i = 1; i < 6; ++i) {
    probes.push_back(std::make_unique<Socket>(server_->port()));
    probes.back()->Send(request);
    EXPECT_THAT(probes.back()->Receive("ok\n"), HasSubstr(" 200 "));
    EXPECT_EQ(silent[i]->Receive(), "");
    EXPECT_TRUE(silent[i]->ended());
  }
  silent[0]->Send(request);
  EXPECT_THAT(silent[0]->Receive("ok\n"), HasSubstr(" 200 "));
  EXPECT_EQ(server_->refused_connections(), 5);
}

TEST_F(HttpServerTest, IdleAndSlowConnectionsAreClosed) {
  StartServer({.idle_timeout = absl::Milliseconds(100)});
  Socket idle(server_->port());
  Socket slow(server_->port());
  slow.Send("GET /hea");
  EXPECT_EQ(idle.Receive(), "");
  EXPECT_EQ(slow.Receive(), "");
}

TEST_F(HttpServerTest, ABodyHasTimeOfItsOwn) {
  StartServer({.idle_timeout = absl::Seconds(2)});
  Socket socket(server_->port());
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  socket.Send("POST /echo HTTP/1.1\r\nContent-Length: 2\r\n\r\n");
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  socket.Send("hi");
  EXPECT_THAT(socket.Receive("||hi"), HasSubstr("||hi"));
}

// In the shape that a path's clients read, as far as there is a path.
TEST_F(HttpServerTest, ItsOwnRefusalsHaveTheShapeThatIsWanted) {
  HttpOptions options{.max_header_bytes = 1024, .max_body_bytes = 10};
  options.error_page = [](int code, const std::string& path,
                          const std::string& message) {
    return HttpResponse{.code = code,
                        .content_type = "application/json",
                        .body = path + "!" + message};
  };
  StartServer(options);
  for (const auto& [request, status, body] :
       std::vector<std::array<std::string, 3>>{
           {"GET /a/b?c HTTP/1.1\r\nConnection: close\r\n\r\n", "404",
            "/a/b!nothing at /a/b"},
           {"PUT /echo HTTP/1.1\r\nConnection: close\r\n\r\n", "405",
            "/echo!/echo knows POST only"},
           {"POST /echo?d HTTP/1.1\r\nContent-Length: 11\r\n\r\n", "413",
            "/echo!body over the limit of 10 bytes"},
           {"GET /health HTTP/1.1\r\nX: " + std::string(2000, 'x') + "\r\n\r\n",
            "431", "/health!header over the limit of 1024 bytes"},
           {"GET /health HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", "400",
            "/health!transfer encoding other than chunked"},
           {"nonsense\r\n\r\n", "400", "!not an HTTP/1 request"}}) {
    const std::string answer = Exchange(request);
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 " + status)) << request;
    EXPECT_THAT(answer, HasSubstr("Content-Type: application/json\r\n"));
    EXPECT_THAT(answer, ::testing::EndsWith("\r\n\r\n" + body)) << request;
  }
  options.max_connections = 0;
  StartServer(options);
  const std::string full = Exchange("GET /health HTTP/1.1\r\n\r\n");
  EXPECT_THAT(full, StartsWith("HTTP/1.1 503"));
  EXPECT_THAT(full, HasSubstr("Retry-After: 1\r\n"));
  EXPECT_THAT(full, ::testing::EndsWith("!too many connections"));
}

TEST_F(HttpServerTest, EveryAnswerHasItsRequestsId) {
  int asked = 0;
  HttpOptions options{.max_body_bytes = 10, .local_hosts_only = true};
  options.request_id = [&](std::string_view sent) {
    return sent.empty() ? absl::StrCat("made-", ++asked) : std::string(sent);
  };
  server_ = std::make_unique<HttpServer>(options);
  server_->SetGuard([](HttpRequest* head) -> std::optional<HttpResponse> {
    if (head->path != "/guarded") return std::nullopt;
    return HttpResponse{.code = 401, .body = head->id};
  });
  server_->Handle("GET", "/id", [](const HttpRequest& request) {
    return HttpResponse{.body = request.id};
  });
  server_->Handle("GET", "/own", [](const HttpRequest&) {
    return HttpResponse{.headers = {{"X-Request-Id", "own"}}};
  });
  server_->HandleLater("GET", "/pieces",
                       [](std::unique_ptr<HttpExchange> exchange) {
                         exchange->Begin({.body = exchange->request().id});
                         exchange->End();
                       });
  ASSERT_TRUE(server_->Start().ok());
  struct Case {
    const char* line;
    const char* status;
    bool in_body;
  };
  for (const Case& c : std::vector<Case>{
           {"GET /id", "200", true},
           {"GET /pieces", "200", true},
           {"GET /guarded", "401", true},
           {"GET /nothing", "404", false},
           {"POST /id", "405", false},
           {"GET /id HTTP/1.1\r\nContent-Length: 11", "413", false},
           {"GET /id HTTP/1.1\r\nHost: elsewhere.example", "403", false}}) {
    const std::string line(c.line);
    const std::string head =
        line.find("HTTP/") == std::string::npos ? line + " HTTP/1.1" : line;
    const std::string answer =
        Exchange(head + "\r\nX-Request-Id: mine\r\nConnection: close\r\n\r\n");
    EXPECT_THAT(answer, StartsWith(std::string("HTTP/1.1 ") + c.status));
    EXPECT_THAT(answer, HasSubstr("\r\nX-Request-Id: mine\r\n"));
    if (c.in_body) {
      EXPECT_THAT(answer.substr(answer.find("\r\n\r\n")), HasSubstr("mine"));
    }
  }
  EXPECT_EQ(asked, 0);
  // One each, of a connection that goes on as well.
  const std::string two = Exchange(
      "GET /id HTTP/1.1\r\n\r\nGET /id HTTP/1.1\r\nConnection: "
      "close\r\n\r\n");
  EXPECT_THAT(two, HasSubstr("X-Request-Id: made-1\r\n"));
  EXPECT_THAT(two, HasSubstr("X-Request-Id: made-2\r\n"));
  EXPECT_THAT(Exchange("GET /own HTTP/1.1\r\nConnection: close\r\n\r\n"),
              HasSubstr("X-Request-Id: own\r\n"));
  EXPECT_THAT(Exchange("no request\r\n\r\n"), HasSubstr("X-Request-Id: made-"));
}

TEST_F(HttpServerTest, StopClosesWhatIsOpen) {
  StartServer();
  Socket idle(server_->port());
  Socket half(server_->port());
  half.Send("POST /echo HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc");
  const int port = server_->port();
  server_->Stop();
  EXPECT_EQ(idle.Receive(), "");
  EXPECT_EQ(half.Receive(), "");
  EXPECT_FALSE(Socket(port).connected());
  server_->Stop();
}

TEST_F(HttpServerTest, AnAddressInUseIsSaidSo) {
  StartServer();
  HttpServer second({.port = server_->port()});
  const absl::Status status = second.Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(
      std::string(status.message()),
      HasSubstr("Address already in use: end what listens there, or take "
                "another --port"));
  HttpServer nowhere({.host = "nowhere.example"});
  EXPECT_EQ(nowhere.Start().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(HttpServerTest, MetricsAndSicknessAreServed) {
  Metrics metrics("decode", "tales");
  metrics.AddCounter("tandem_requests_total", "Requests").Add(7);
  HttpServer server(HttpOptions{});
  server.Handle("GET", "/metrics", [&](const HttpRequest&) {
    return HttpResponse{.content_type = Metrics::kContentType,
                        .body = metrics.Text()};
  });
  server.Handle("GET", "/health", [](const HttpRequest&) {
    return HealthResponse(absl::UnavailableError("no step for 11.0 s"));
  });
  ASSERT_TRUE(server.Start().ok());
  Socket socket(server.port());
  socket.Send("GET /metrics HTTP/1.1\r\n\r\n");
  const std::string text = socket.Receive("process_threads{");
  EXPECT_THAT(text, HasSubstr("Content-Type: text/plain; version=0.0.4"));
  EXPECT_THAT(text, HasSubstr("tandem_requests_total{model_name=\"tales\","
                              "role=\"decode\"} 7\n"));
  Socket sick(server.port());
  sick.Send("GET /health HTTP/1.1\r\nConnection: close\r\n\r\n");
  const std::string answer = sick.Receive();
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 503"));
  EXPECT_THAT(answer, HasSubstr("no step for 11.0 s\n"));
}

}  // namespace
}  // namespace tandem
