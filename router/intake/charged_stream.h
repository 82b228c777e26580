// SPDX-License-Identifier: Apache-2.0
// A client's stream that settles its request's charge: before the client can
// learn that the request has ended, so that whoever has read an answer to its
// end finds its place and its tokens again.

#ifndef TANDEM_ROUTER_INTAKE_CHARGED_STREAM_H_
#define TANDEM_ROUTER_INTAKE_CHARGED_STREAM_H_

#include <memory>
#include <string>
#include <utility>

#include "router/core/dialer.h"
#include "router/tenants/tenants.h"

namespace tandem::router {

class ChargedStream final : public ClientStream {
 public:
  ChargedStream(std::unique_ptr<ClientStream> client,
                std::shared_ptr<Tenants::Charge> charge)
      : client_(std::move(client)), charge_(std::move(charge)) {}
  // The core lets go of a stream that it has not closed when the client went.
  ~ChargedStream() override {
    charge_->End(Tenants::Charge::Outcome::kGivenUp);
  }

  void Start(StreamHandler<v1::GenerateRequest>* handler) override {
    client_->Start(handler);
  }
  void Send(v1::GenerateResponse event) override {
    if (event.has_done()) {
      charge_->GeneratedInAll(event.done().usage().completion_tokens());
      charge_->End(Tenants::Charge::Outcome::kDone);
    }
    client_->Send(std::move(event));
  }
  size_t unsent() const override { return client_->unsent(); }
  void PauseReading(bool paused) override { client_->PauseReading(paused); }
  void Close(absl::Status status) override {
    // The deadline is the client's own.
    charge_->End(status.ok() ? Tenants::Charge::Outcome::kDone
                 : absl::IsDeadlineExceeded(status) || absl::IsCancelled(status)
                     ? Tenants::Charge::Outcome::kGivenUp
                     : Tenants::Charge::Outcome::kFailed);
    client_->Close(std::move(status));
  }
  std::string peer() const override { return client_->peer(); }

 private:
  const std::unique_ptr<ClientStream> client_;
  const std::shared_ptr<Tenants::Charge> charge_;
};

// `client` itself where nothing is charged.
inline std::unique_ptr<ClientStream> Charged(
    std::unique_ptr<ClientStream> client,
    std::shared_ptr<Tenants::Charge> charge) {
  if (charge == nullptr) return client;
  return std::make_unique<ChargedStream>(std::move(client), std::move(charge));
}

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_INTAKE_CHARGED_STREAM_H_
