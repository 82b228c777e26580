// SPDX-License-Identifier: Apache-2.0
// The listener over TLS, and the guard before its handlers.
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/http/server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/http/certificates.h"
#include "tests/common/http/socket.h"
#include "tests/common/http/tls_socket.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kGet[] = "GET /hello HTTP/1.1\r\n\r\n";
constexpr char kGetAndClose[] =
    "GET /hello HTTP/1.1\r\nConnection: close\r\n\r\n";
constexpr char kHello[] = "\r\n\r\nhello";

class TlsServerTest : public testing::Test {
 protected:
  static HttpTls Of(const Pem& pem, const std::string& client_ca = "") {
    return {.cert = pem.cert, .key = pem.key, .client_ca = client_ca};
  }
  void Start(HttpOptions options) {
    server_ = std::make_unique<HttpServer>(std::move(options));
    server_->Handle("GET", "/hello", [](const HttpRequest&) {
      return HttpResponse{.body = "hello"};
    });
    server_->Handle("GET", "/long", [](const HttpRequest&) {
      return HttpResponse{.body = std::string(1 << 20, 'x')};
    });
    server_->HandleLater("POST", "/stream",
                         [this](std::unique_ptr<HttpExchange> exchange) {
                           exchange->Begin({.body = exchange->request().body});
                           exchange_ = std::move(exchange);
                           begun_ = true;
                         });
    ASSERT_TRUE(server_->Start().ok());
  }
  void Start() { Start({.tls = Of(authority_.Issue(7))}); }
  TlsClientOptions Trusting() const { return {.ca = authority_.cert()}; }
  int port() const { return server_->port(); }
  void AwaitExchange() const {
    while (!begun_) std::this_thread::yield();
  }

  const Authority authority_{"ours"};
  std::unique_ptr<HttpServer> server_;
  std::unique_ptr<HttpExchange> exchange_;
  std::atomic<bool> begun_ = false;
};

TEST_F(TlsServerTest, ServesOverBothVersionsAndNoOlderOne) {
  Start();
  EXPECT_THAT(server_->url(), StartsWith("https://127.0.0.1:"));
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    TlsClientOptions options = Trusting();
    options.min_version = options.max_version = version;
    TlsSocket socket(port(), options);
    ASSERT_TRUE(socket.connected());
    EXPECT_EQ(socket.serial(), 7);
    for (int i = 0; i < 3; ++i) {  // a connection is kept
      socket.Send(kGet);
      EXPECT_THAT(socket.Receive(kHello), StartsWith("HTTP/1.1 200"));
    }
    socket.Send(kGetAndClose);
    EXPECT_THAT(socket.Receive(), HasSubstr(kHello));
    EXPECT_FALSE(socket.cut()) << "the end is told, not cut";
  }
  TlsClientOptions old;
  old.min_version = old.max_version = TLS1_1_VERSION;
  EXPECT_FALSE(TlsSocket(port(), old).connected());
  TlsClientOptions weak;  // no forward secrecy
  weak.max_version = TLS1_2_VERSION;
  weak.ciphers = "AES128-SHA:AES256-GCM-SHA384:ECDHE-ECDSA-AES128-SHA";
  EXPECT_FALSE(TlsSocket(port(), weak).connected());
}

TEST_F(TlsServerTest, AgreesOnHttp1OrSaysThatItCannot) {
  Start();
  const struct {
    std::string offered;
    const char* want;  // null: refused
  } kCases[] = {
      {"", ""},
      {"\x08http/1.1", "http/1.1"},
      {"\x02h2\x08http/1.1", "http/1.1"},
      {"\x02h2", nullptr},
  };
  for (const auto& c : kCases) {
    TlsClientOptions options = Trusting();
    options.protocols = c.offered;
    TlsSocket socket(port(), options);
    EXPECT_EQ(socket.connected(), c.want != nullptr) << c.offered;
    if (c.want != nullptr) {
      EXPECT_EQ(socket.protocol(), c.want);
    }
  }
}

TEST_F(TlsServerTest, StrangersGetNothing) {
  Start();
  TlsClientOptions other;
  other.ca = Authority("theirs").cert();
  EXPECT_FALSE(TlsSocket(port(), other).connected());
  // Plain text on a TLS port, a greeting of nonsense, one cut short.
  for (const std::string& bytes :
       {std::string(kGet), std::string(1000, '\x16'), std::string("\x16\x03"),
        std::string(100'000, '\0')}) {
    Socket socket(port());
    socket.Send(bytes);
    socket.Finish();
    EXPECT_EQ(socket.Receive().find("HTTP"), std::string::npos);
  }
  TlsSocket socket(port(), Trusting());
  socket.Send(kGetAndClose);
  EXPECT_THAT(socket.Receive(), HasSubstr(kHello));
}

TEST_F(TlsServerTest, AsksClientsForACertificateIfTold) {
  Start({.tls = Of(authority_.Issue(1), authority_.cert())});
  const auto served = [&](const Pem& own) {
    TlsClientOptions options = Trusting();
    options.own = own;
    TlsSocket socket(port(), options);
    socket.Send(kGetAndClose);
    return socket.Receive().find(kHello) != std::string::npos;
  };
  EXPECT_FALSE(served({}));
  EXPECT_FALSE(served(Authority("theirs").Issue(1)));
  EXPECT_TRUE(served(authority_.Issue(2)));
}

TEST_F(TlsServerTest, HalfOpenHandshakesCountAndExpireAndHoldNobodyUp) {
  Start({.max_connections = 3,
         .tls = Of(authority_.Issue(1)),
         .handshake_timeout = absl::Milliseconds(300)});
  std::vector<std::unique_ptr<Socket>> half_open;
  half_open.push_back(std::make_unique<Socket>(port()));
  half_open.push_back(std::make_unique<Socket>(port()));
  half_open.back()->Send("\x16\x03\x01");
  {
    TlsSocket third(port(), Trusting());
    third.Send(kGet);
    EXPECT_THAT(third.Receive(kHello), HasSubstr("200"));
    EXPECT_EQ(server_->refused_connections(), 0);
    // One too many: who has been at it for longest makes room.
    EXPECT_TRUE(TlsSocket(port(), Trusting()).connected());
    EXPECT_EQ(server_->refused_connections(), 1);
    // The server hangs up on both.
    EXPECT_EQ(half_open[0]->Receive(), "");
    EXPECT_EQ(half_open[1]->Receive(), "");
    third.Send(kGet);
    EXPECT_THAT(third.Receive(kHello), HasSubstr("200"));
  }
}

TEST_F(TlsServerTest, NewCertificatesAreForNewConnections) {
  Start();
  TlsSocket old(port(), Trusting());
  old.Send("POST /stream HTTP/1.1\r\nContent-Length: 3\r\n\r\none");
  EXPECT_THAT(old.Receive("one"), HasSubstr("200"));
  const Pem fresh = authority_.Issue(8);
  ASSERT_TRUE(server_->ReplaceTls(Of(fresh)).ok());
  {
    TlsSocket next(port(), Trusting());
    EXPECT_EQ(next.serial(), 8);
    next.Send(kGetAndClose);
    EXPECT_THAT(next.Receive(), HasSubstr(kHello));
  }
  // A key of another certificate, and no PEM at all, change nothing.
  const Pem other = authority_.Issue(9);
  for (const Pem& bad :
       {Pem{other.cert, fresh.key}, Pem{"", fresh.key}, Pem{fresh.cert, ""},
        Pem{fresh.cert.substr(0, 200), fresh.key}}) {
    EXPECT_EQ(server_->ReplaceTls(Of(bad)).code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(TlsSocket(port(), Trusting()).serial(), 8);
  // The stream that began before goes on.
  AwaitExchange();
  exchange_->Write("two", nullptr);
  EXPECT_THAT(old.Receive("two"), HasSubstr("two"));
  exchange_->End();
  EXPECT_THAT(old.Receive("0\r\n\r\n"), HasSubstr("0\r\n\r\n"));
}

TEST_F(TlsServerTest, LongAnswersAndClientsThatGo) {
  Start();
  {
    TlsSocket socket(port(), Trusting());
    socket.Send("GET /long HTTP/1.1\r\nConnection: close\r\n\r\n");
    const std::string answer = socket.Receive();
    EXPECT_EQ(answer.size() - answer.find("\r\n\r\n") - 4, size_t{1} << 20);
  }
  auto socket = std::make_unique<TlsSocket>(port(), Trusting());
  socket->Send("POST /stream HTTP/1.1\r\nContent-Length: 3\r\n\r\none");
  EXPECT_THAT(socket->Receive("one"), HasSubstr("200"));
  AwaitExchange();
  std::promise<void> gone;
  exchange_->OnGone([&gone] { gone.set_value(); });
  socket.reset();
  EXPECT_EQ(gone.get_future().wait_for(std::chrono::seconds(20)),
            std::future_status::ready);
}

// By TLS alone, as clients do that still read, and behind a request that nobody
// has read yet: the end is known within a few of a generation's steps.
TEST_F(TlsServerTest, ACloseNotifyEndsAnExchange) {
  Start();
  for (const bool pipelined : {false, true}) {
    begun_ = false;
    TlsSocket socket(port(), Trusting());
    socket.Send("POST /stream HTTP/1.1\r\nContent-Length: 3\r\n\r\none");
    EXPECT_THAT(socket.Receive("one"), HasSubstr("200"));
    AwaitExchange();
    std::atomic<bool> gone = false;
    exchange_->OnGone([&gone] { gone = true; });
    if (pipelined) socket.Send(kGet);
    socket.CloseNotify();
    int steps = 0;
    for (; !gone && steps < 1000; ++steps) {
      exchange_->Write("x", nullptr);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_LT(steps, 25) << pipelined;
    exchange_.reset();
  }
}

// What a client sends before it has its answer is read while that is written,
// and answered after it.
TEST_F(TlsServerTest, PipelinedRequestsWaitForTheirTurn) {
  Start();
  TlsSocket socket(port(), Trusting());
  socket.Send("POST /stream HTTP/1.1\r\nContent-Length: 3\r\n\r\none");
  EXPECT_THAT(socket.Receive("one"), HasSubstr("200"));
  AwaitExchange();
  // More than is read ahead.
  const std::string filler(3000, 'x');
  for (int i = 0; i < 3; ++i) {
    socket.Send(absl::StrCat("GET /hello HTTP/1.1\r\nX: ", filler, "\r\n\r\n"));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  exchange_->Write("two", nullptr);
  exchange_->End();
  EXPECT_THAT(socket.Receive("0\r\n\r\n"), HasSubstr("two"));
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(socket.Receive(kHello), HasSubstr("200"));
  }
  socket.Send(kGetAndClose);
  EXPECT_THAT(socket.Receive(), HasSubstr(kHello));
}

TEST(GuardTest, DecidesBeforeBodiesAreRead) {
  HttpServer server({});
  server.Handle("GET", "/open", [](const HttpRequest& request) {
    return HttpResponse{.body = "caller=" + request.caller};
  });
  server.Handle("GET", "/folder/", [](const HttpRequest&) {
    return HttpResponse{.body = "file"};
  });
  server.Handle("POST", "/closed", [](const HttpRequest& request) {
    return HttpResponse{.body =
                            absl::StrCat(request.caller, ":", request.body)};
  });
  server.SetGuard([](HttpRequest* head) -> std::optional<HttpResponse> {
    EXPECT_EQ(head->body, "");
    if (head->Header("x-who").empty()) return HttpResponse{.code = 401};
    head->caller = std::string(head->Header("x-who"));
    return std::nullopt;
  });
  server.Open("/open");
  server.Open("/folder/");
  ASSERT_TRUE(server.Start().ok());
  const struct {
    const char* request;
    const char* want;
  } kCases[] = {
      {"GET /open HTTP/1.1\r\nConnection: close\r\n\r\n", "caller="},
      {"GET /open HTTP/1.1\r\nX-Who: me\r\nConnection: close\r\n\r\n",
       "caller="},
      {"GET /open?x HTTP/1.1\r\nConnection: close\r\n\r\n", "caller="},
      {"GET /folder/x HTTP/1.1\r\nConnection: close\r\n\r\n", "file"},
      {"GET /open/ HTTP/1.1\r\n\r\n", "401"},
      {"GET /openx HTTP/1.1\r\n\r\n", "401"},
      {"GET /folder HTTP/1.1\r\n\r\n", "401"},
      {"GET /nothing HTTP/1.1\r\n\r\n", "401"},
      {"PUT /closed HTTP/1.1\r\n\r\n", "401"},
      // Its body never comes, nor is it waited for.
      {"POST /closed HTTP/1.1\r\nContent-Length: 1000\r\n\r\n", "401"},
      {"POST /closed HTTP/1.1\r\nExpect: 100-continue\r\n"
       "Content-Length: 1000\r\n\r\n",
       "401"},
      {"POST /closed HTTP/1.1\r\nX-Who: me\r\nContent-Length: 2\r\n"
       "Connection: close\r\n\r\nhi",
       "me:hi"},
  };
  for (const auto& c : kCases) {
    Socket socket(server.port());
    socket.Send(c.request);
    const std::string answer = socket.Receive();
    EXPECT_THAT(answer, HasSubstr(c.want)) << c.request;
    EXPECT_EQ(answer.find("100 Continue"), std::string::npos);
  }
  // Each request of a connection has its own caller.
  Socket socket(server.port());
  socket.Send(
      "POST /closed HTTP/1.1\r\nX-Who: a\r\nContent-Length: 1\r\n\r\n1");
  EXPECT_THAT(socket.Receive("a:1"), HasSubstr("a:1"));
  socket.Send("POST /closed HTTP/1.1\r\nContent-Length: 1\r\n\r\n1");
  EXPECT_THAT(socket.Receive(), HasSubstr("401"));
}

}  // namespace
}  // namespace tandem
