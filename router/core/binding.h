// SPDX-License-Identifier: Apache-2.0
// What the sequences of one answer are computed with: all of them on decode
// workers that give the same results as the first that was placed, so that a
// rolling change of weights does not mix two models in an answer. Free again
// where all of them lost their workers before a client was told of it.

#ifndef TANDEM_ROUTER_CORE_BINDING_H_
#define TANDEM_ROUTER_CORE_BINDING_H_

#include <optional>
#include <string>

#include "tandem/v1/registry.pb.h"

namespace tandem::router {

class Binding {
 public:
  // Whether a sequence may be placed on that decode worker.
  bool Allows(const v1::WorkerHello& worker) const;
  // A sequence is placed there, or all that it wants, scores, comes from that
  // prefill worker, with that adapter of it (no name: none); it has lost its
  // worker, or ended.
  void Enter(const v1::WorkerHello& worker, const v1::AdapterRef& adapter);
  void Leave();
  // The client knows of a sequence that is placed, and of its fingerprint: for
  // good.
  void Keep() { kept_ = to_.has_value(); }
  // "fp_" and 16 hex digits of what sequences are computed with, the adapter
  // included; empty where none was placed.
  std::string SystemFingerprint() const;

 private:
  std::optional<v1::WorkerHello> to_;  // only what Allows reads
  int placed_ = 0;
  bool kept_ = false;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_CORE_BINDING_H_
