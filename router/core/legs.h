// SPDX-License-Identifier: Apache-2.0
// A request's two calls: a stream, its handler, and when either side spoke
// last. Private to router/.

#ifndef TANDEM_ROUTER_CORE_LEGS_H_
#define TANDEM_ROUTER_CORE_LEGS_H_

#include <memory>
#include <utility>

#include "router/core/request.h"

namespace tandem::router {

struct Request::DecodeLeg final : StreamHandler<v1::DecodeResponse> {
  DecodeLeg(Request* request_in, std::unique_ptr<DecodeStream> stream_in,
            absl::Time now)
      : request(request_in), stream(std::move(stream_in)), heard(now) {}

  void OnMessage(v1::DecodeResponse message) override {
    heard = request->context_.loop->Now();
    request->OnDecode(message);
  }
  void OnClosed(absl::Status status) override {
    request->OnDecodeClosed(status);
  }

  Request* const request;
  std::unique_ptr<DecodeStream> stream;
  absl::Time heard;
};

struct Request::PrefillLeg final : StreamHandler<v1::PrefillResponse> {
  PrefillLeg(Request* request_in, std::unique_ptr<PrefillStream> stream_in,
             absl::Time now)
      : request(request_in), stream(std::move(stream_in)), heard(now) {}

  void OnMessage(v1::PrefillResponse message) override {
    heard = request->context_.loop->Now();
    request->OnPrefill(message);
  }
  void OnClosed(absl::Status status) override {
    request->OnPrefillClosed(status);
  }

  Request* const request;
  std::unique_ptr<PrefillStream> stream;
  absl::Time heard;
  bool admitted = false;  // said anything but a beat: no refusal from here on
  bool done = false;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_CORE_LEGS_H_
