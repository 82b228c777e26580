// SPDX-License-Identifier: Apache-2.0
// A client of OpenEngine's as the core sees it. On the router's loop.

#ifndef TANDEM_ROUTER_OPENENGINE_STREAM_H_
#define TANDEM_ROUTER_OPENENGINE_STREAM_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "router/core/dialer.h"
#include "router/openengine/translate.h"

namespace tandem::router {

// What the call was made with has been read.
using OpenEngineCall = Stream<oe::GenerateResponse, v1::GenerateRequest>;

class OpenEngineStream final : public ClientStream {
 public:
  OpenEngineStream(std::unique_ptr<OpenEngineCall> call, TextCodec* codec)
      : call_(std::move(call)), answer_(codec) {}

  void Start(StreamHandler<v1::GenerateRequest>* handler) override {
    call_->Start(handler);
  }
  void Send(v1::GenerateResponse event) override {
    Pass(answer_.Add(std::move(event)));
  }
  size_t unsent() const override { return call_->unsent(); }
  void PauseReading(bool paused) override { call_->PauseReading(paused); }
  void Close(absl::Status status) override {
    if (!status.ok()) {
      auto error = answer_.Fail(status);
      status = error ? absl::OkStatus() : InOpenEngineTerms(status);
      Pass(std::move(error));
    }
    call_->Close(std::move(status));
  }
  std::string peer() const override { return call_->peer(); }

 private:
  void Pass(std::optional<oe::GenerateResponse> response) {
    if (response) call_->Send(*std::move(response));
  }

  const std::unique_ptr<OpenEngineCall> call_;
  OpenEngineAnswer answer_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_OPENENGINE_STREAM_H_
