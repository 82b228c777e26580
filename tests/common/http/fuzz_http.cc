// SPDX-License-Identifier: Apache-2.0
// Any bytes on a connection of the HTTP listener, written in two pieces: every
// answer begins with a status line, requests reach a handler within the
// limits, and nothing of the connection is left when the peer has gone. The
// first two bytes say where the pieces part.

#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "common/http/session.h"
#include "tests/fuzz.h"

namespace tandem::http_internal {
namespace {

namespace asio = boost::asio;

constexpr size_t kMaxHeader = 512;
constexpr size_t kMaxBody = 1024;

std::shared_ptr<ServerState> NewState() {
  auto state = std::make_shared<ServerState>();
  state->options.max_header_bytes = kMaxHeader;
  state->options.max_body_bytes = kMaxBody;
  const HttpServer::Handler handler = [](const HttpRequest& request) {
    TANDEM_FUZZ_REQUIRE(request.path.starts_with("/"));
    TANDEM_FUZZ_REQUIRE(request.path.find('?') == std::string::npos);
    TANDEM_FUZZ_REQUIRE(request.body.size() <= kMaxBody);
    size_t bytes = request.path.size() + request.query.size();
    for (const auto& [name, value] : request.headers) {
      TANDEM_FUZZ_REQUIRE(!name.empty());
      TANDEM_FUZZ_REQUIRE(value.find_first_of("\r\n") == std::string::npos);
      bytes += name.size() + value.size();
    }
    TANDEM_FUZZ_REQUIRE(bytes <= kMaxHeader);
    return HttpResponse{.body = request.body};
  };
  state->routes["/a"]["GET"] = handler;
  state->routes["/a"]["POST"] = handler;
  state->routes["/folder/"]["GET"] = handler;
  return state;
}

void Run(ServerState* state) {
  state->context.restart();
  while (state->context.poll() > 0) {
  }
}

std::string Received(int peer) {
  std::string all;
  char part[4096];
  ssize_t n = 0;
  while ((n = recv(peer, part, sizeof(part), MSG_DONTWAIT)) > 0) {
    all.append(part, static_cast<size_t>(n));
  }
  return all;
}

}  // namespace
}  // namespace tandem::http_internal

TANDEM_FUZZ_TARGET(fuzz_http)(const uint8_t* data, size_t size) {
  using namespace tandem::
      http_internal;  // NOLINT(google-build-using-namespace)
  static const std::shared_ptr<ServerState> state = NewState();
  tandem::fuzz::Input input(data, size);
  const std::string_view first = input.Piece(), second = input.Rest();
  int ends[2];
  tandem::fuzz::Require(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0,
                        "a pair of sockets");
  {
    boost::asio::ip::tcp::socket socket(state->context);
    socket.assign(boost::asio::ip::tcp::v4(), ends[0]);
    std::make_shared<Session>(std::move(socket), state.get())->Serve();
  }
  std::string answer;
  for (const std::string_view piece : {first, second}) {
    // A buffer's worth: the rest is not sent.
    send(ends[1], piece.data(), std::min<size_t>(piece.size(), 64 << 10),
         MSG_DONTWAIT | MSG_NOSIGNAL);
    Run(state.get());
    answer += Received(ends[1]);
  }
  shutdown(ends[1], SHUT_WR);
  Run(state.get());
  answer += Received(ends[1]);
  close(ends[1]);
  Run(state.get());
  TANDEM_FUZZ_REQUIRE(answer.empty() || answer.starts_with("HTTP/1."));
  // Lingering ones wait for their time.
  while (!state->sessions.empty()) {
    Session* const left = *state->sessions.begin();
    left->Close();
    Run(state.get());
    TANDEM_FUZZ_REQUIRE(state->sessions.empty() ||
                        *state->sessions.begin() != left);
  }
  return 0;
}
