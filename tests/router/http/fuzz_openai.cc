// SPDX-License-Identifier: Apache-2.0
// Any bytes as a body of the HTTP API: refused with a status that its client
// may read, or requests that are. The first byte is the path's digit.

#include <string>

#include "router/http/openai_request.h"
#include "tests/fuzz.h"
#include "tests/router/front.h"

namespace tandem::router {
namespace {

template <typename Parsed>
void CheckParsed(const Parsed& parsed, std::string_view body) {
  if (parsed.ok()) return;
  const std::string wrong = WhatIsWrongWithRefusal(parsed.status(), body);
  fuzz::Require(wrong.empty(), wrong.c_str());
}

void CheckGenerate(const absl::StatusOr<OpenAiRequest>& parsed,
                   std::string_view body) {
  static const auto* const front = new Front();
  CheckParsed(parsed, body);
  if (!parsed.ok()) return;
  TANDEM_FUZZ_REQUIRE(!parsed->prompts.empty() &&
                      parsed->prompts.size() <= kMaxPrompts);
  for (const v1::GenerateRequest& request : parsed->prompts) {
    const auto admitted = front->Prepare(request);
    const std::string wrong =
        admitted.ok() ? front->WhatIsWrong(*admitted)
                      : WhatIsWrongWithRefusal(admitted.status(), body);
    fuzz::Require(wrong.empty(), wrong.c_str());
    if (!admitted.ok()) return;
  }
}

}  // namespace
}  // namespace tandem::router

TANDEM_FUZZ_TARGET(fuzz_openai)(const uint8_t* data, size_t size) {
  using namespace tandem::router;  // NOLINT(google-build-using-namespace)
  tandem::fuzz::Input input(data, size);
  const int path = input.Below(6);
  const std::string_view body = input.Rest();
  if (path == 0) CheckGenerate(ParseCompletion(body), body);
  if (path == 1) CheckGenerate(ParseChatCompletion(body), body);
  if (path == 2) CheckParsed(ParseTokenize(body), body);
  if (path == 3) CheckParsed(ParseDetokenize(body), body);
  if (path == 4) CheckParsed(ParseLoadLoraAdapter(body), body);
  if (path == 5) CheckParsed(ParseUnloadLoraAdapter(body), body);
  return 0;
}
