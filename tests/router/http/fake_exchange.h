// SPDX-License-Identifier: Apache-2.0
// One HTTP exchange whose client is the test.

#ifndef TANDEM_TESTS_ROUTER_HTTP_FAKE_EXCHANGE_H_
#define TANDEM_TESTS_ROUTER_HTTP_FAKE_EXCHANGE_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/http/server.h"

namespace tandem::router {

// A client's end; writes stay under way until told.
struct ClientEnd {
  int code = 0;  // of what was answered or begun
  std::string body;
  bool streaming = false;
  bool ended = false;
  int begun = 0;
  std::vector<std::function<void()>> writes;
  std::function<void()> gone;

  void TakeAll() {
    for (const auto& written : std::exchange(writes, {})) {
      if (written) written();
    }
  }
};

class FakeExchange final : public HttpExchange {
 public:
  explicit FakeExchange(ClientEnd* client) : client_(client) {}
  const HttpRequest& request() const override { return request_; }
  void Answer(HttpResponse response) override {
    client_->code = response.code;
    client_->body = std::move(response.body);
    client_->ended = true;
  }
  void Begin(HttpResponse head) override {
    ++client_->begun;
    client_->code = head.code;
    client_->body = std::move(head.body);
    client_->streaming = true;
  }
  void Write(std::string piece, std::function<void()> written) override {
    client_->body += piece;
    client_->writes.push_back(std::move(written));
  }
  void End() override { client_->ended = true; }
  void OnGone(std::function<void()> gone) override {
    client_->gone = std::move(gone);
  }

 private:
  ClientEnd* const client_;
  const HttpRequest request_;
};

}  // namespace tandem::router

#endif  // TANDEM_TESTS_ROUTER_HTTP_FAKE_EXCHANGE_H_
