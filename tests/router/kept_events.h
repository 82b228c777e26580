// SPDX-License-Identifier: Apache-2.0
// A client that keeps what it is sent.

#ifndef TANDEM_TESTS_ROUTER_KEPT_EVENTS_H_
#define TANDEM_TESTS_ROUTER_KEPT_EVENTS_H_

#include <string>
#include <utility>
#include <vector>

#include "router/core/output.h"

namespace tandem::router {

class KeptEvents final : public ClientStream {
 public:
  explicit KeptEvents(std::vector<v1::GenerateResponse>* all) : all_(all) {}
  void Start(StreamHandler<v1::GenerateRequest>*) override {}
  void Send(v1::GenerateResponse event) override {
    all_->push_back(std::move(event));
  }
  size_t unsent() const override { return 0; }
  void PauseReading(bool) override {}
  void Close(absl::Status) override {}
  std::string peer() const override { return ""; }

 private:
  std::vector<v1::GenerateResponse>* const all_;
};

}  // namespace tandem::router

#endif  // TANDEM_TESTS_ROUTER_KEPT_EVENTS_H_
