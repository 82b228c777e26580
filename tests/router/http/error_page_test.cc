// SPDX-License-Identifier: Apache-2.0
// What the listener itself says to clients of the HTTP front.

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "router/http/front.h"

namespace tandem::router {
namespace {

TEST(ErrorPageTest, ClientsReadOpenAisShapeAndAreToldOfAMissingV1) {
  struct Case {
    const char* path;
    int code;
    const char* says;
  };
  const Case cases[] = {
      {"/v1/nothing", 404, "M"},
      {"/nothing", 404, "M"},
      {"", 503, "M"},
      {"/chat/completions", 404, "M; did you mean /v1/chat/completions?"},
      {"/completions", 404, "M; did you mean /v1/completions?"},
      {"/models", 404, "M; did you mean /v1/models?"},
      {"/models/tales", 404, "M; did you mean /v1/models/tales?"},
      {"/chat/completions", 413, "M"},
      {"/v1/chat/completions", 405, "M"},
      {"/modelsx", 404, "M"},
      {"/v1/load_lora_adapter", 404,
       "M: this server was started without --allow-runtime-lora-updating"},
      {"/v1/load_lora_adapter", 405, "M"},
      {"/v1/unload_lora_adapter", 404,
       "M: this server was started without --allow-runtime-lora-updating"},
      {"/v1/tandem/events", 404,
       "M: this server was started without --live-feed on"},
  };
  for (const Case& c : cases) {
    const HttpResponse page = HttpFront::ErrorPage(c.code, c.path, "M");
    EXPECT_EQ(page.code, c.code) << c.path;
    EXPECT_EQ(page.content_type, "application/json") << c.path;
    const auto body = nlohmann::json::parse(page.body, nullptr, false);
    ASSERT_TRUE(body.is_object()) << c.path;
    EXPECT_EQ(body["error"]["message"], c.says) << c.path;
  }
}

TEST(ErrorPageTest, PeopleReadText) {
  for (const char* const path : {"/", "/page/nothing.js"}) {
    const HttpResponse page = HttpFront::ErrorPage(405, path, "M");
    EXPECT_EQ(page.body, "M\n") << path;
    EXPECT_NE(page.content_type, "application/json") << path;
  }
}

}  // namespace
}  // namespace tandem::router
