// SPDX-License-Identifier: Apache-2.0
// Any bytes as a request, through all that a router does with one before it is
// queued: refused with a status that its client may read, or admitted within
// the model's limits.

#include "tests/fuzz.h"
#include "tests/router/front.h"

TANDEM_FUZZ_TARGET(fuzz_request)(const uint8_t* data, size_t size) {
  using namespace tandem::router;  // NOLINT(google-build-using-namespace)
  static auto* const front = new Front();
  tandem::v1::GenerateRequest request;
  if (!request.ParsePartialFromArray(data, static_cast<int>(size))) return 0;
  const auto admitted = front->Prepare(request);
  const std::string wrong =
      admitted.ok()
          ? front->WhatIsWrong(*admitted)
          : WhatIsWrongWithRefusal(admitted.status(),
                                   {reinterpret_cast<const char*>(data), size});
  tandem::fuzz::Require(wrong.empty(), wrong.c_str());
  return 0;
}
