// SPDX-License-Identifier: Apache-2.0
// Answers that come later or in pieces, over raw sockets.
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/http/server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/http/socket.h"

namespace tandem {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kRequest[] =
    "POST /later HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi";

// Something that another thread waits for.
class Event {
 public:
  void Set() {
    const std::lock_guard<std::mutex> lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }
  bool Wait(std::chrono::milliseconds limit = std::chrono::seconds(20)) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, limit, [this] { return set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

// The handler hands its exchange to the test.
class HttpExchangeTest : public ::testing::Test {
 protected:
  void StartServer(HttpOptions options = {}) {
    server_ = std::make_unique<HttpServer>(options);
    server_->HandleLater("POST", "/later",
                         [this](std::unique_ptr<HttpExchange> exchange) {
                           const std::lock_guard<std::mutex> lock(mutex_);
                           exchanges_.push_back(std::move(exchange));
                           arrived_.notify_all();
                         });
    server_->Handle("GET", "/now", [](const HttpRequest&) {
      return HttpResponse{.body = "now"};
    });
    ASSERT_TRUE(server_->Start().ok());
  }
  std::unique_ptr<HttpExchange> Next() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!arrived_.wait_for(lock, std::chrono::seconds(20),
                           [this] { return !exchanges_.empty(); })) {
      return nullptr;
    }
    std::unique_ptr<HttpExchange> first = std::move(exchanges_.front());
    exchanges_.erase(exchanges_.begin());
    return first;
  }

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<std::unique_ptr<HttpExchange>> exchanges_;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpExchangeTest, AnswersLaterAndTheConnectionGoesOn) {
  StartServer();
  Socket socket(server_->port());
  socket.Send(kRequest);
  std::unique_ptr<HttpExchange> exchange = Next();
  ASSERT_NE(exchange, nullptr);
  EXPECT_EQ(exchange->request().body, "hi");
  // Others are served meanwhile.
  Socket other(server_->port());
  other.Send("GET /now HTTP/1.1\r\n\r\n");
  EXPECT_THAT(other.Receive("now"), StartsWith("HTTP/1.1 200 OK\r\n"));

  exchange->Answer({.code = 202, .body = "done"});
  exchange->Answer({.code = 500, .body = "twice"});
  EXPECT_THAT(socket.Receive("done"), StartsWith("HTTP/1.1 202 Accepted\r\n"));
  socket.Send("GET /now HTTP/1.1\r\n\r\n");
  EXPECT_THAT(socket.Receive("now"), StartsWith("HTTP/1.1 200 OK\r\n"));
  // What the first exchange still says is not for the next request.
  socket.Send(kRequest);
  std::unique_ptr<HttpExchange> second = Next();
  exchange->Answer({.body = "stale"});
  exchange.reset();
  second->Answer({.body = "fresh"});
  EXPECT_THAT(socket.Receive("fresh"), Not(HasSubstr("stale")));
}

// However long handlers take; whoever is refused need not connect anew.
TEST_F(HttpExchangeTest, ARefusalNeedsNoHandlerThread) {
  HttpServer server(HttpOptions{.handler_threads = 1});
  Event began, may_end;
  server.HandleLater(
      "POST", "/later",
      [&](std::unique_ptr<HttpExchange> exchange) {
        began.Set();
        EXPECT_TRUE(may_end.Wait());
        exchange->Answer({.body = "done"});
      },
      [](const HttpRequest& request) -> std::optional<HttpResponse> {
        if (request.body == "hi") return std::nullopt;
        return HttpResponse{.code = 429, .body = "full"};
      });
  ASSERT_TRUE(server.Start().ok());
  Socket slow(server.port());
  slow.Send(kRequest);
  ASSERT_TRUE(began.Wait());
  Socket socket(server.port());
  for (int i = 0; i < 2; ++i) {
    socket.Send("POST /later HTTP/1.1\r\nContent-Length: 2\r\n\r\nno");
    EXPECT_THAT(socket.Receive("full"), StartsWith("HTTP/1.1 429 "));
  }
  may_end.Set();
  EXPECT_THAT(slow.Receive("done"), StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(HttpExchangeTest, PiecesAreChunksInOrder) {
  StartServer();
  Socket socket(server_->port());
  socket.Send(kRequest);
  std::unique_ptr<HttpExchange> exchange = Next();
  exchange->Begin({.content_type = "text/event-stream",
                   .body = "one",
                   .headers = {{"X-Answer", "42"}}});
  const std::string head = socket.Receive("one\r\n");
  EXPECT_THAT(head, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(head, HasSubstr("Content-Type: text/event-stream\r\n"));
  EXPECT_THAT(head, HasSubstr("X-Answer: 42\r\n"));
  EXPECT_THAT(head, HasSubstr("Transfer-Encoding: chunked\r\n"));
  EXPECT_THAT(head, EndsWith("\r\n\r\n3\r\none\r\n"));
  Event written;
  exchange->Write(std::string(17, 'x'), [&] { written.Set(); });
  EXPECT_EQ(socket.Receive("\r\nxxxxxxxxxxxxxxxxx\r\n"),
            "11\r\nxxxxxxxxxxxxxxxxx\r\n");
  EXPECT_TRUE(written.Wait());
  exchange->End();
  exchange->Write("late", nullptr);
  EXPECT_EQ(socket.Receive("0\r\n\r\n"), "0\r\n\r\n");
  socket.Send("GET /now HTTP/1.1\r\n\r\n");
  EXPECT_THAT(socket.Receive("now"), StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(HttpExchangeTest, PipelinedRequestsWaitForTheirTurn) {
  StartServer();
  Socket socket(server_->port());
  socket.Send(std::string(kRequest) + "GET /now HTTP/1.1\r\n\r\n");
  std::unique_ptr<HttpExchange> exchange = Next();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  exchange->Answer({.body = "first"});
  const std::string both = socket.Receive("now");
  EXPECT_LT(both.find("first"), both.find("now"));
}

TEST_F(HttpExchangeTest, OldClientsReadUpToTheEnd) {
  StartServer();
  for (const std::string wish : {"", "Connection: keep-alive\r\n"}) {
    Socket socket(server_->port());
    socket.Send("POST /later HTTP/1.0\r\n" + wish +
                "Content-Length: 2\r\n\r\nhi");
    std::unique_ptr<HttpExchange> exchange = Next();
    exchange->Begin({.body = "one,"});
    exchange->Write("two", nullptr);
    exchange->End();
    const std::string answer = socket.Receive();
    EXPECT_THAT(answer, StartsWith("HTTP/1.0 200 OK\r\n"));
    EXPECT_THAT(answer, EndsWith("\r\n\r\none,two"));
    EXPECT_TRUE(socket.ended()) << wish;
  }
}

// What stands behind it would be read as the next answer.
TEST_F(HttpExchangeTest, TheHeadOfAStreamHasNoPieces) {
  HttpServer server{HttpOptions()};
  server.HandleLater("GET", "/stream",
                     [](std::unique_ptr<HttpExchange> exchange) {
                       exchange->Begin({.body = "one"});
                       exchange->Write("two", nullptr);
                       exchange->End();
                     });
  ASSERT_TRUE(server.Start().ok());
  Socket socket(server.port());
  socket.Send(
      "HEAD /stream HTTP/1.1\r\n\r\n"
      "GET /stream HTTP/1.1\r\nConnection: close\r\n\r\n");
  const std::string both = socket.Receive();
  const size_t head = both.find("\r\n\r\n") + 4;
  EXPECT_THAT(both.substr(head), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(both, EndsWith("3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"));
}

TEST_F(HttpExchangeTest, APeerThatGoesIsNoticedWithoutAWrite) {
  StartServer();
  for (const bool half : {false, true}) {
    auto socket = std::make_unique<Socket>(server_->port());
    socket->Send(kRequest);
    std::unique_ptr<HttpExchange> exchange = Next();
    Event gone;
    exchange->OnGone([&] { gone.Set(); });
    EXPECT_FALSE(gone.Wait(std::chrono::milliseconds(20)));
    if (half) {
      socket->Finish();
    } else {
      socket.reset();
    }
    EXPECT_TRUE(gone.Wait());
    Event later;
    exchange->OnGone([&] { later.Set(); });
    EXPECT_TRUE(later.Wait());
    exchange->Answer({.body = "to nobody"});
  }
}

TEST_F(HttpExchangeTest, APeerThatGoesBehindWhatNobodyReadsIsNoticed) {
  StartServer();
  auto socket = std::make_unique<Socket>(server_->port());
  socket->Send(kRequest);
  std::unique_ptr<HttpExchange> exchange = Next();
  socket->Send("\r\n");
  Event gone;
  exchange->OnGone([&] { gone.Set(); });
  EXPECT_FALSE(gone.Wait(std::chrono::milliseconds(20)));
  socket.reset();
  EXPECT_TRUE(gone.Wait());
}

TEST_F(HttpExchangeTest, ProbesAreServedWhenClientsHoldAllConnections) {
  StartServer({.max_connections = 1, .spare_connections = 1});
  Socket client(server_->port());
  client.Send(kRequest);
  std::unique_ptr<HttpExchange> exchange = Next();
  {
    Socket probe(server_->port());
    probe.Send("GET /now HTTP/1.1\r\n\r\n");
    EXPECT_THAT(probe.Receive("now"), StartsWith("HTTP/1.1 200 OK\r\n"));
    probe.Send(kRequest);
    EXPECT_THAT(probe.Receive(), StartsWith("HTTP/1.1 503"));
  }
  exchange->Answer({.body = "served"});
  EXPECT_THAT(client.Receive("served"), StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(HttpExchangeTest, SilentConnectionsMakeRoomForRequests) {
  StartServer({.max_connections = 2, .spare_connections = 2});
  Socket first(server_->port());
  first.Send(kRequest);
  std::unique_ptr<HttpExchange> exchange = Next();
  std::vector<std::unique_ptr<Socket>> silent;
  for (int i = 0; i < 2; ++i) {
    silent.push_back(std::make_unique<Socket>(server_->port()));
  }
  Socket second(server_->port());
  second.Send(kRequest);
  Next()->Answer({.body = "served"});
  EXPECT_THAT(second.Receive("served"), StartsWith("HTTP/1.1 200"));
  for (const auto& socket : silent) EXPECT_EQ(socket->Receive(), "");
  exchange->Answer({.body = "served"});
  EXPECT_THAT(first.Receive("served"), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpExchangeTest, ConnectionsBeingAnsweredMakeNoRoom) {
  StartServer({.max_connections = 2});
  std::vector<std::unique_ptr<Socket>> clients;
  std::vector<std::unique_ptr<HttpExchange>> exchanges;
  for (int i = 0; i < 2; ++i) {
    clients.push_back(std::make_unique<Socket>(server_->port()));
    clients.back()->Send(kRequest);
    exchanges.push_back(Next());
  }
  EXPECT_THAT(Socket(server_->port()).Receive(), StartsWith("HTTP/1.1 503"));
  exchanges[1]->Answer({.body = "served"});
  EXPECT_THAT(clients[1]->Receive("served"), StartsWith("HTTP/1.1 200"));
  Socket next(server_->port());
  next.Send("GET /now HTTP/1.1\r\n\r\n");
  EXPECT_THAT(next.Receive("now"), StartsWith("HTTP/1.1 200"));
  EXPECT_EQ(clients[1]->Receive(), "");
}

TEST_F(HttpExchangeTest, WhoHasTooManyConnectionsTakesNobodyElsesPlace) {
  StartServer({.max_connections = 8, .max_connections_per_peer = 2});
  Socket open(server_->port(), "127.0.0.2");
  std::vector<std::unique_ptr<Socket>> flood;
  for (int i = 0; i < 100; ++i) {
    flood.push_back(std::make_unique<Socket>(server_->port()));
  }
  // Behind the flood in the kernel's queue: all of it has been accepted.
  Socket fresh(server_->port(), "127.0.0.2");
  fresh.Send("GET /now HTTP/1.1\r\n\r\n");
  EXPECT_THAT(fresh.Receive("now"), StartsWith("HTTP/1.1 200"));
  EXPECT_EQ(server_->refused_connections(), 98);
  EXPECT_LE(server_->connections(), 4 + 64);
  open.Send(kRequest);
  Next()->Answer({.body = "served"});
  EXPECT_THAT(open.Receive("served"), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpExchangeTest, APeerThatTakesNothingIsCutAndNotWaitedFor) {
  StartServer({.idle_timeout = absl::Milliseconds(150)});
  Socket socket(server_->port());
  socket.Send(kRequest);
  std::unique_ptr<HttpExchange> exchange = Next();
  Event gone;
  Event written;
  exchange->OnGone([&] { gone.Set(); });
  exchange->Begin({});
  for (int i = 0; i < 64; ++i) {
    exchange->Write(std::string(1 << 20, 'x'),
                    i == 63 ? [&] { written.Set(); } : std::function<void()>());
  }
  EXPECT_TRUE(gone.Wait());
  EXPECT_FALSE(written.Wait(std::chrono::milliseconds(1)));
}

TEST_F(HttpExchangeTest, APeerThatTakesAPieceSlowlyGetsAllOfIt) {
  const size_t bytes = 24 << 20;
  EXPECT_TRUE(WithSomePatience([&](std::chrono::milliseconds patience) {
    StartServer({.idle_timeout = absl::FromChrono(patience)});
    Socket socket(server_->port());
    socket.Send(kRequest);
    std::unique_ptr<HttpExchange> exchange = Next();
    exchange->Begin({.body = std::string(bytes, 'x')});
    exchange->End();
    return socket.TakeSlowly(bytes / 2, patience, "0\r\n\r\n") > bytes;
  }));
}

TEST_F(HttpExchangeTest, SilenceOfAnAnswerIsNoIdleness) {
  StartServer({.idle_timeout = absl::Milliseconds(100)});
  Socket socket(server_->port());
  socket.Send(kRequest);
  std::unique_ptr<HttpExchange> exchange = Next();
  exchange->Begin({.body = "begun"});
  EXPECT_THAT(socket.Receive("begun\r\n"), HasSubstr("200 OK"));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  exchange->Write("still", nullptr);
  EXPECT_EQ(socket.Receive("still\r\n"), "5\r\nstill\r\n");
}

TEST_F(HttpExchangeTest, AnExchangeThatIsDroppedTellsThePeer) {
  StartServer();
  Socket nothing(server_->port());
  nothing.Send(kRequest);
  Next().reset();
  EXPECT_THAT(nothing.Receive("no answer"),
              StartsWith("HTTP/1.1 500 Internal Server Error\r\n"));
  Socket begun(server_->port());
  begun.Send(kRequest);
  std::unique_ptr<HttpExchange> exchange = Next();
  exchange->Begin({.body = "begun"});
  exchange.reset();
  const std::string cut = begun.Receive();
  EXPECT_THAT(cut, EndsWith("begun\r\n"));  // and no last chunk
  EXPECT_TRUE(begun.ended());
}

TEST_F(HttpExchangeTest, ContinueIsSaidBeforeTheBody) {
  StartServer();
  Socket socket(server_->port());
  socket.Send(
      "POST /later HTTP/1.1\r\nExpect: 100-continue\r\n"
      "Content-Length: 2\r\n\r\n");
  EXPECT_EQ(socket.Receive("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  socket.Send("hi");
  std::unique_ptr<HttpExchange> exchange = Next();
  EXPECT_EQ(exchange->request().body, "hi");
  exchange->Answer({.body = "heard"});
  EXPECT_THAT(socket.Receive("heard"), StartsWith("HTTP/1.1 200"));
  // Clients of HTTP/1.0 do not know it (RFC 9110, 10.1.1).
  Socket older(server_->port());
  older.Send(
      "POST /later HTTP/1.0\r\nExpect: 100-continue\r\n"
      "Content-Length: 2\r\n\r\nhi");
  exchange = Next();
  exchange->Answer({.body = "heard"});
  EXPECT_THAT(older.Receive("heard"), StartsWith("HTTP/1.0 200"));
}

TEST_F(HttpExchangeTest, NoBodyIsAskedForThatNobodyReads) {
  StartServer();
  for (const auto& [target, says] :
       {std::pair("POST /nothing?a", "HTTP/1.1 404 "),
        std::pair("POST /now", "HTTP/1.1 405 ")}) {
    Socket socket(server_->port());
    socket.Send(std::string(target) +
                " HTTP/1.1\r\nExpect: 100-continue\r\n"
                "Content-Length: 2\r\n\r\n");
    EXPECT_THAT(socket.Receive(), StartsWith(says));
    EXPECT_TRUE(socket.ended());  // what comes may be the body or a request
  }
}

TEST_F(HttpExchangeTest, ClosingIsOfAnswersThatBeginFromThenOn) {
  StartServer();
  Socket idle(server_->port()), later(server_->port()), piece(server_->port()),
      before(server_->port());
  idle.Send("GET /now HTTP/1.1\r\n\r\n");
  EXPECT_THAT(idle.Receive("now"), Not(HasSubstr("Connection: close")));
  before.Send(kRequest);
  std::unique_ptr<HttpExchange> begun = Next();
  begun->Begin({.body = "begun"});
  EXPECT_THAT(before.Receive("begun\r\n"), Not(HasSubstr("close")));
  later.Send(kRequest);
  std::unique_ptr<HttpExchange> whole = Next();
  piece.Send(kRequest);
  std::unique_ptr<HttpExchange> pieces = Next();
  server_->CloseAfterAnswers();
  whole->Answer({.code = 503, .body = "gone"});
  pieces->Begin({.body = "one"});
  pieces->End();
  for (Socket* socket : {&later, &piece}) {
    EXPECT_THAT(socket->Receive(), HasSubstr("Connection: close\r\n"));
    EXPECT_TRUE(socket->ended());
  }
  // Its head has said that it goes on: until the next answer it does.
  begun->End();
  EXPECT_THAT(before.Receive("0\r\n\r\n"), EndsWith("0\r\n\r\n"));
  for (Socket* socket : {&before, &idle}) {
    socket->Send("GET /now HTTP/1.1\r\n\r\n");
    EXPECT_THAT(socket->Receive(), HasSubstr("Connection: close\r\n"));
    EXPECT_TRUE(socket->ended());
  }
  Socket probe(server_->port());
  probe.Send("GET /now HTTP/1.1\r\n\r\n");
  EXPECT_THAT(probe.Receive(), EndsWith("now"));
}

TEST_F(HttpExchangeTest, StopTakesNoNextRequest) {
  StartServer();
  Socket socket(server_->port());
  socket.Send(kRequest);
  std::unique_ptr<HttpExchange> exchange = Next();
  std::thread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    exchange->Answer({.body = "ended"});
    exchange.reset();
  });
  const auto begin = std::chrono::steady_clock::now();
  server_->Stop(absl::Seconds(15));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
  writer.join();
  EXPECT_THAT(socket.Receive(), EndsWith("ended"));
  EXPECT_TRUE(socket.ended());
}

TEST_F(HttpExchangeTest, StopWaitsForLastWordsAsLongAsItSays) {
  StartServer();
  Socket ends(server_->port());
  ends.Send(kRequest);
  std::unique_ptr<HttpExchange> first = Next();
  Socket hangs(server_->port());
  hangs.Send(kRequest);
  std::unique_ptr<HttpExchange> second = Next();
  Event gone;
  second->OnGone([&] { gone.Set(); });
  first->Begin({.body = "begun"});
  std::thread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    first->Write("ended", nullptr);
    first->End();
  });
  server_->Stop(absl::Seconds(1));
  writer.join();
  EXPECT_THAT(ends.Receive(), EndsWith("5\r\nended\r\n0\r\n\r\n"));
  EXPECT_EQ(hangs.Receive(), "");
  EXPECT_TRUE(gone.Wait());
  // Both outlive the server.
  server_.reset();
  second->Answer({.body = "to nobody"});
}

}  // namespace
}  // namespace tandem
