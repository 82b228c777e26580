// SPDX-License-Identifier: Apache-2.0
// Whatever a trace file holds: rows within their limits, or an error.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cli/bench/trace.h"
#include "cli/bench/workload.h"
#include "tests/fuzz.h"

TANDEM_FUZZ_TARGET(fuzz_trace)(const uint8_t* data, size_t size) {
  const auto rows = tandem::bench::ParseTrace(
      std::string_view(reinterpret_cast<const char*>(data), size), "fuzz",
      1000);
  if (!rows.ok()) return 0;
  if (rows->empty() || rows->size() > 1000) std::abort();
  auto plan = tandem::bench::PlanTrace(*rows, 2, 0.3);
  tandem::bench::ClipToContext(512, &plan);
  double last_s = 0;
  for (const auto& request : plan) {
    const int prompt = tandem::bench::PromptTokens(request.prompt);
    if (prompt < 1 || request.output_tokens < 1 ||
        prompt + request.output_tokens > 512 || !(request.at_s >= last_s)) {
      std::abort();
    }
    last_s = request.at_s;
  }
  return 0;
}
