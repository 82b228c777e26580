// SPDX-License-Identifier: Apache-2.0
// What workers say in a call, checked where it arrives: of what is passed on to
// clients or counted, nothing that no worker says. Where tokens belong in a
// sequence is the request's to know (delivery.cc, scoring.cc, beams.cc).

#ifndef TANDEM_ROUTER_CORE_WORKER_ANSWERS_H_
#define TANDEM_ROUTER_CORE_WORKER_ANSWERS_H_

#include "absl/status/status.h"
#include "tandem/v1/decode.pb.h"
#include "tandem/v1/prefill.pb.h"

namespace tandem::router {

// INTERNAL names what is wrong. `vocabulary`: ids are below it; 0: not known.
absl::Status CheckAnswer(const v1::DecodeResponse& answer, int vocabulary);
absl::Status CheckAnswer(const v1::PrefillResponse& answer, int vocabulary);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_CORE_WORKER_ANSWERS_H_
