// SPDX-License-Identifier: Apache-2.0
// OpenAI's HTTP API of a cluster of real processes: the same tokens as over
// gRPC, streams that survive a worker, and errors where clients look for them.
#include <signal.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/http/socket.h"
#include "tests/integration/cluster.h"

namespace tandem::integration {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kCanaryPrompt[] = "Mia found a red ball.";

struct Answer {
  int code = 0;
  std::string head;
  std::string body;  // chunks joined

  json Json() const { return json::parse(body, nullptr, false); }
  // Of server-sent events, comments left out.
  std::vector<std::string> Data() const {
    std::vector<std::string> all;
    for (const absl::string_view event :
         absl::StrSplit(body, "\n\n", absl::SkipEmpty())) {
      if (event.substr(0, 6) == "data: ") all.emplace_back(event.substr(6));
    }
    return all;
  }
  // Of choice 0 of a stream.
  std::string Text() const {
    std::string text;
    for (const std::string& data : Data()) {
      const json chunk = json::parse(data, nullptr, false);
      if (chunk.is_discarded() || !chunk.contains("choices")) continue;
      for (const json& choice : chunk["choices"]) {
        if (choice["index"] != 0) continue;
        text += choice.contains("text") ? choice["text"].get<std::string>()
                                        : choice["delta"].value("content", "");
      }
    }
    return text;
  }
};

std::string Request(const std::string& path, const json& body,
                    const std::string& more = "") {
  const std::string text = body.dump();
  return absl::StrCat("POST ", path, " HTTP/1.1\r\nConnection: close\r\n",
                      "Content-Type: application/json\r\n", more,
                      "Content-Length: ", text.size(), "\r\n\r\n", text);
}

Answer Parse(const std::string& raw) {
  Answer answer;
  const size_t end = raw.find("\r\n\r\n");
  if (raw.size() < 12 || end == std::string::npos) return answer;
  answer.code = std::stoi(raw.substr(9, 3));
  answer.head = raw.substr(0, end + 2);
  std::string rest = raw.substr(end + 4);
  if (answer.head.find("chunked") == std::string::npos) {
    answer.body = rest;
    return answer;
  }
  while (!rest.empty()) {
    const size_t line = rest.find("\r\n");
    if (line == std::string::npos) break;
    const size_t size = std::stoul(rest.substr(0, line), nullptr, 16);
    if (size == 0) break;
    answer.body += rest.substr(line + 2, size);
    rest.erase(0, std::min(rest.size(), line + 2 + size + 2));
  }
  return answer;
}

class HttpTest : public testing::Test {
 protected:
  void Begin(ClusterOptions options) {
    cluster_ = std::make_unique<Cluster>(std::move(options));
    const absl::Status status = cluster_->Start();
    ASSERT_TRUE(status.ok()) << status;
    // Where one request fills the router, that before may count for a moment.
    absl::Status warm = absl::ResourceExhaustedError("");
    for (int i = 0; i < 100 && absl::IsResourceExhausted(warm); ++i) {
      warm = cluster_->Generate(TextRequest("Once upon a time", 4)).status;
    }
    ASSERT_TRUE(warm.ok()) << warm;
    Post("/v1/completions", {{"prompt", "Once"}, {"max_tokens", 2}});
    ASSERT_EQ(cluster_->WhatIsLeft(), "");
  }
  void TearDown() override {
    if (cluster_ != nullptr && !HasFatalFailure()) {
      EXPECT_EQ(cluster_->WhatIsLeft(kCanaryPrompt), "");
    }
  }
  Answer Post(const std::string& path, const json& body,
              const std::string& more = "") {
    Socket socket(cluster_->http_port());
    socket.Send(Request(path, body, more));
    return Parse(socket.Receive());
  }
  static json Greedy(int max_tokens) {
    return {{"model", "tales"},         {"prompt", kCanaryPrompt},
            {"temperature", 0},         {"ignore_eos", true},
            {"max_tokens", max_tokens}, {"return_token_ids", true}};
  }
  double Cancelled() {
    double sum = 0;
    for (const auto& [name, value] : cluster_->Metrics("router")) {
      if (name.rfind("tandem_requests_total", 0) == 0 &&
          name.find("api=\"http\"") != std::string::npos &&
          name.find("cancelled") != std::string::npos) {
        sum += value;
      }
    }
    return sum;
  }

  std::unique_ptr<Cluster> cluster_;
};

TEST_F(HttpTest, AnswersAreThoseOfTheOtherApi) {
  Begin({});
  v1::GenerateRequest request = TextRequest(kCanaryPrompt, 40);
  request.mutable_stopping()->set_ignore_eos(true);
  const Outcome want = cluster_->Generate(request);
  ASSERT_TRUE(want.status.ok()) << want.status;

  const Answer whole =
      Post("/v1/completions", Greedy(40), "X-Request-Id: my-name\r\n");
  ASSERT_EQ(whole.code, 200) << whole.body;
  EXPECT_THAT(whole.head, HasSubstr("X-Request-Id: my-name\r\n"));
  const json body = whole.Json();
  EXPECT_EQ(body["id"], "cmpl-my-name");
  EXPECT_EQ(body["choices"][0]["text"], want.text);
  EXPECT_EQ(body["choices"][0]["token_ids"], json(want.token_ids));
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(body["usage"]["completion_tokens"], 40);
  EXPECT_EQ(body["usage"]["prompt_tokens"], want.done.usage().prompt_tokens());

  json streamed = Greedy(40);
  streamed["stream"] = true;
  streamed["stream_options"] = {{"include_usage", true}};
  const Answer stream = Post("/v1/completions", streamed);
  EXPECT_THAT(stream.head, HasSubstr("Content-Type: text/event-stream"));
  EXPECT_EQ(stream.Text(), want.text);
  const std::vector<std::string> data = stream.Data();
  ASSERT_GE(data.size(), 3u);
  EXPECT_EQ(data.back(), "[DONE]");
  const json last = json::parse(data[data.size() - 2]);
  EXPECT_EQ(last["usage"]["completion_tokens"], 40);
  EXPECT_TRUE(last["choices"].empty());

  // Several prompts, one of them the same, as ids.
  json several = Greedy(40);
  const std::vector<int32_t> ids(want.token_ids.begin(),
                                 want.token_ids.begin() + 3);
  several["prompt"] = {kCanaryPrompt, "Once upon a time"};
  several["request_id"] = "both";
  const Answer answer = Post("/v1/completions", several);
  EXPECT_THAT(answer.head, testing::HasSubstr("\r\nX-Request-Id: both\r\n"));
  const json both = answer.Json();
  EXPECT_EQ(both["id"], "cmpl-both");
  ASSERT_EQ(both["choices"].size(), 2u);
  EXPECT_EQ(both["choices"][0]["text"], want.text);
  EXPECT_EQ(both["choices"][1]["index"], 1);
  EXPECT_EQ(both["usage"]["completion_tokens"], 80);
  several["request_id"] = std::string(127, 'x');  // and "-0" is too long
  const Answer long_name = Post("/v1/completions", several);
  EXPECT_EQ(long_name.code, 400);
  EXPECT_EQ(long_name.Json()["error"]["param"], "request_id");
}

// Without a token to be generated a prefill worker scores the prompt, with one
// the decode worker computes so short a prompt by itself.
TEST_F(HttpTest, EitherWorkerScoresAPromptAlike) {
  Begin({});
  json body = {{"prompt", kCanaryPrompt},
               {"echo", true},
               {"logprobs", 3},
               {"temperature", 0},
               {"max_tokens", 0}};
  const Answer alone = Post("/v1/completions", body);
  ASSERT_EQ(alone.code, 200) << alone.body;
  const json scored = alone.Json();
  EXPECT_EQ(scored["timings"]["decode_worker"], "");
  EXPECT_EQ(scored["usage"]["completion_tokens"], 0);
  const json& choice = scored["choices"][0];
  EXPECT_EQ(choice["text"], kCanaryPrompt);
  EXPECT_EQ(choice["finish_reason"], "length");
  body["max_tokens"] = 1;
  const json more = Post("/v1/completions", body).Json();
  EXPECT_EQ(more["timings"]["prefill_worker"], "");
  const size_t tokens = choice["logprobs"]["tokens"].size();
  EXPECT_EQ(static_cast<int>(tokens), scored["usage"]["prompt_tokens"]);
  for (const auto& [name, list] : choice["logprobs"].items()) {
    json longer = more["choices"][0]["logprobs"][name];
    ASSERT_EQ(longer.size(), tokens + 1) << name;
    longer.erase(tokens);
    EXPECT_EQ(longer, list) << name;
  }
  EXPECT_TRUE(choice["logprobs"]["token_logprobs"][0].is_null());
  EXPECT_LT(choice["logprobs"]["token_logprobs"][1], 0);
}

TEST_F(HttpTest, ChatsUseTheModelsTemplate) {
  Begin({});
  const json messages = json::array(
      {{{"role", "user"}, {"content", "Tell me a story about a cat."}}});
  v1::GenerateRequest request = TextRequest("", 24);
  v1::ChatMessage* const message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content("Tell me a story about a cat.");
  const Outcome want = cluster_->Generate(request);
  ASSERT_TRUE(want.status.ok()) << want.status;
  json chat = {{"messages", messages}, {"temperature", 0}, {"max_tokens", 24}};
  const auto stage = [&](const std::string& name) {
    double count = 0;
    for (const auto& [series, value] : cluster_->Metrics("router")) {
      if (series.starts_with("tandem_stage_duration_seconds_count") &&
          series.find("stage=\"" + name + "\"") != std::string::npos) {
        count += value;
      }
    }
    return count;
  };
  const double templates = stage("template"), prompts = stage("tokenise");
  const json whole = Post("/v1/chat/completions", chat).Json();
  EXPECT_EQ(whole["choices"][0]["message"]["content"], want.text);
  Post("/v1/completions", Greedy(1));
  EXPECT_EQ(stage("template") - templates, 1);
  EXPECT_EQ(stage("tokenise") - prompts, 2);
  EXPECT_EQ(whole["choices"][0]["message"]["role"], "assistant");
  chat["stream"] = true;
  EXPECT_EQ(Post("/v1/chat/completions", chat).Text(), want.text);
  const json tokens = Post("/tokenize", {{"messages", messages}}).Json();
  EXPECT_EQ(tokens["count"], want.done.usage().prompt_tokens());
  const json text = Post("/detokenize", {{"tokens", want.token_ids}}).Json();
  EXPECT_EQ(text["prompt"], want.text);
}

TEST_F(HttpTest, AUsersTemplateGoesBeforeTheModelsAndEveryAnswerHasAnId) {
  const std::string path =
      absl::StrCat(testing::TempDir(), "/http_test_", getpid(), ".jinja");
  std::ofstream(path) << "{% for m in messages %}<{{ m.content }}>{% endfor %}";
  Begin({.router_arguments = {"--chat-template", path}});
  const json messages =
      json::array({{{"role", "user"}, {"content", "Mia found a red ball."}}});
  const json chat = Post("/tokenize", {{"messages", messages}}).Json();
  const json text = Post("/tokenize", {{"prompt", "<Mia found a red ball.>"},
                                       {"add_special_tokens", false}})
                        .Json();
  EXPECT_EQ(chat["tokens"], text["tokens"]);
  std::remove(path.c_str());

  for (const char* const route :
       {"/v1/models", "/v1/models/tales", "/v1/models/none", "/health",
        "/livez", "/readyz", "/version", "/metrics", "/", "/page/chat.js",
        "/v1/tandem/capabilities", "/nothing", "/tokenize"}) {
    Socket socket(cluster_->http_port());
    socket.Send(absl::StrCat("GET ", route,
                             " HTTP/1.1\r\nConnection: close\r\n"
                             "X-Request-Id: of-mine\r\n\r\n"));
    EXPECT_THAT(Parse(socket.Receive()).head,
                HasSubstr("\r\nX-Request-Id: of-mine\r\n"))
        << route;
  }
  EXPECT_THAT(Post("/tokenize", {{"prompt", "a"}}).head,
              testing::ContainsRegex("X-Request-Id: [0-9a-f]{8}-"));
}

// A model whose weights say what it writes: it reasons before it calls tools,
// and answers at once where its template has closed the reasoning.
TEST_F(HttpTest, ReasoningComesApartWithToolsAndStructuredOutputs) {
  const std::string model =
      absl::StrCat(testing::TempDir(), "/http_test_reasons_", getpid());
  ASSERT_EQ(std::system(absl::StrCat("python3 " TANDEM_SOURCE_DIR
                                     "/tests/clients/make_scripted_model.py "
                                     "qwen3 ",
                                     model)
                            .c_str()),
            0);
  Begin({.model_dir = model,
         .router_arguments = {"--reasoning-parser", "qwen3"}});
  const std::string kThought = "I should look.";
  const json messages =
      json::array({{{"role", "user"}, {"content", "Is it warm?"}}});
  const auto tool = [](const char* name) {
    return json{{"type", "function"}, {"function", {{"name", name}}}};
  };
  json chat = {{"messages", messages},
               {"temperature", 0},
               {"tools", {tool("get_weather"), tool("clock")}}};
  const Answer called = Post("/v1/chat/completions", chat);
  ASSERT_EQ(called.code, 200) << called.body;
  const json message = called.Json()["choices"][0]["message"];
  EXPECT_EQ(message["reasoning_content"], kThought);
  EXPECT_EQ(message["content"], "\n\nLet me look.\n");
  ASSERT_EQ(message["tool_calls"].size(), 2u);
  EXPECT_EQ(message["tool_calls"][1]["function"]["name"], "clock");
  EXPECT_EQ(called.Json()["choices"][0]["finish_reason"], "tool_calls");
  const json usage = called.Json()["usage"];
  EXPECT_EQ(usage["completion_tokens"], 16);
  EXPECT_EQ(usage["completion_tokens_details"]["reasoning_tokens"], 3);

  chat["stream"] = true;
  const Answer stream = Post("/v1/chat/completions", chat);
  std::string thought;
  for (const std::string& data : stream.Data()) {
    const json chunk = json::parse(data, nullptr, false);
    if (chunk.is_discarded() || chunk["choices"].empty()) continue;
    const json& delta = chunk["choices"][0]["delta"];
    if (thought.size() < kThought.size()) {
      EXPECT_EQ(delta.value("content", ""), "") << data;
    }
    thought += delta.value("reasoning_content", "");
  }
  EXPECT_EQ(thought, kThought);
  EXPECT_EQ(stream.Text(), "\n\nLet me look.\n");

  // Nothing but the answer must match, whoever draws its tokens.
  for (const char* const placement : {"local", "split"}) {
    for (const bool thinks : {true, false}) {
      const Answer answer =
          Post("/v1/chat/completions",
               {{"messages", messages},
                {"temperature", 0},
                {"placement", placement},
                {"chat_template_kwargs", {{"think", thinks}}},
                {"structured_outputs", {{"choice", {"warm", "cold"}}}}});
      ASSERT_EQ(answer.code, 200) << answer.body;
      const json choice = answer.Json()["choices"][0];
      EXPECT_EQ(choice["message"].value("reasoning_content", ""),
                thinks ? kThought : "");
      EXPECT_EQ(choice["message"]["content"], "cold");
      EXPECT_EQ(choice["finish_reason"], "stop");
    }
  }
  std::filesystem::remove_all(model);
}

TEST_F(HttpTest, AClientThatGoesStopsItsRequest) {
  Begin({});
  for (const bool stream : {true, false}) {
    const double before = Cancelled();
    {
      Socket socket(cluster_->http_port());
      json body = Greedy(900);
      body["n"] = 16;
      body["temperature"] = 1;
      body["stream"] = stream;
      socket.Send(Request("/v1/completions", body));
      if (stream) {
        EXPECT_THAT(socket.Receive("data: "), StartsWith("HTTP/1.1 200"));
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    }
    EXPECT_EQ(cluster_->WhatIsLeft(), "");
    EXPECT_GE(Cancelled(), before + 1) << stream;
  }
}

TEST_F(HttpTest, ARouterThatDrainsKeepsNoClient) {
  Begin({});
  json body = Greedy(900);
  body["stream"] = true;
  body["n"] = 4;
  body["temperature"] = 1;
  Socket stream(cluster_->http_port());
  stream.Send(Request("/v1/completions", body));
  std::string raw = stream.Receive("data: ");
  // An idle connection from before, which its client goes on with.
  Socket kept(cluster_->http_port());
  const std::string version = "GET /version HTTP/1.1\r\n\r\n";
  kept.Send(version);
  EXPECT_THAT(kept.Receive("}"), Not(HasSubstr("Connection: close")));
  cluster_->Signal("router", SIGTERM);
  for (int i = 0; i < 100 && cluster_->Probe("router", "/health") == "200 ok\n";
       ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const std::string text = Greedy(4).dump();
  kept.Send(
      absl::StrCat("POST /v1/completions HTTP/1.1\r\nContent-Type: "
                   "application/json\r\nContent-Length: ",
                   text.size(), "\r\n\r\n", text));
  kept.Send(version);
  const std::string last = kept.Receive();
  EXPECT_TRUE(kept.ended());
  EXPECT_EQ(Parse(last).code, 503) << last;
  EXPECT_THAT(last, HasSubstr("Connection: close\r\n"));
  EXPECT_THAT(last, Not(HasSubstr("200 OK")));
  raw += stream.Receive();
  EXPECT_EQ(Parse(raw).Data().back(), "[DONE]");
  EXPECT_EQ(cluster_->WaitForExit("router", std::chrono::seconds(60)),
            128 + SIGTERM);
  ASSERT_TRUE(cluster_->Restart("router").ok());
  ASSERT_TRUE(cluster_->WaitUntilReady(1, 1, std::chrono::seconds(20)).ok());
}

TEST_F(HttpTest, AStreamSurvivesItsDecodeWorker) {
  Begin({.decode = 2});
  const std::string want =
      Post("/v1/completions", Greedy(900)).Json()["choices"][0]["text"];
  json body = Greedy(900);
  body["stream"] = true;
  Socket socket(cluster_->http_port());
  socket.Send(Request("/v1/completions", body));
  std::string raw = socket.Receive("data: ");
  for (const char* worker : {"decode-0", "decode-1"}) {
    cluster_->Signal(worker, SIGSTOP);  // it stays in flight
  }
  const auto state = cluster_->State();
  ASSERT_TRUE(state.ok()) << state.status();
  ASSERT_EQ(state->in_flight_size(), 1);
  const std::string victim = state->in_flight(0).decode_worker_id();
  cluster_->Signal(victim == "decode-0" ? "decode-1" : "decode-0", SIGCONT);
  cluster_->Kill(victim);
  raw += socket.Receive();
  const Answer answer = Parse(raw);
  EXPECT_EQ(answer.Text(), want);
  EXPECT_EQ(answer.Data().back(), "[DONE]");
  ASSERT_TRUE(cluster_->Restart(victim).ok());
  ASSERT_TRUE(cluster_->WaitUntilReady(1, 2, std::chrono::seconds(20)).ok());
}

TEST_F(HttpTest, ARouterAboveItsCeilingEndsItsStreamsAndItself) {
  Begin({.router_arguments = {"--max-request-bytes", "64MiB"}});
  int64_t held = 0;
  for (const auto& [name, value] : cluster_->Metrics("router")) {
    if (name.rfind("process_resident_memory_bytes", 0) == 0) {
      held = static_cast<int64_t>(value);
    }
  }
  ASSERT_GT(held, 0);
  Begin({.router_arguments = {"--max-request-bytes", "64MiB",
                              "--max-memory-bytes",
                              absl::StrCat(held + (16 << 20))}});
  json body = Greedy(900);
  body["stream"] = true;
  body["n"] = 16;  // for longer than the ceiling is borne
  body["temperature"] = 1;
  Socket stream(cluster_->http_port());
  stream.Send(Request("/v1/completions", body));
  std::string raw = stream.Receive("data: ");
  std::thread reader([&] { raw += stream.Receive(); });
  Socket hoarder(cluster_->http_port());  // its last byte never comes
  hoarder.Send(absl::StrCat("POST /v1/completions HTTP/1.1\r\n",
                            "Content-Type: application/json\r\n",
                            "Content-Length: ", 60 << 20, "\r\n\r\n",
                            std::string((60 << 20) - 1, ' ')));
  EXPECT_EQ(cluster_->WaitForExit("router", std::chrono::seconds(60)), 1);
  reader.join();
  EXPECT_EQ(Parse(raw).Data().back(), "[DONE]");
  // As an error, which no other test may end with.
  const std::string fault = "above --max-memory-bytes";
  EXPECT_THAT(cluster_->WhatIsLeft(), HasSubstr(fault));
  cluster_->ExpectErrors(fault);
  ASSERT_TRUE(cluster_->Restart("router").ok());
  ASSERT_TRUE(cluster_->WaitUntilReady(1, 1, std::chrono::seconds(20)).ok());
  EXPECT_EQ(Post("/v1/completions", Greedy(4)).code, 200);
}

// Random text of the model, held to a grammar, on either way and across a
// worker that dies in the middle.
TEST_F(HttpTest, StructuredOutputIsTheSameWhoeverComputesIt) {
  Begin({.decode = 2});
  json body = {
      {"prompt", kCanaryPrompt},
      {"temperature", 1.6},
      {"seed", 11},
      {"max_tokens", 900},
      {"ignore_eos", true},
      {"structured_outputs", {{"regex", "([0-9]{2} [a-z]{3,9}, )*end"}}}};
  const json whole = Post("/v1/completions", body).Json();
  ASSERT_TRUE(whole.contains("choices")) << whole;
  const std::string want = whole["choices"][0]["text"];
  EXPECT_TRUE(std::regex_match(want.substr(0, want.rfind(", ") + 2),
                               std::regex("([0-9]{2} [a-z]{3,9}, )*")))
      << want;
  body["stream"] = true;
  Socket socket(cluster_->http_port());
  socket.Send(Request("/v1/completions", body));
  std::string raw = socket.Receive("data: ");
  const auto state = cluster_->State();
  ASSERT_TRUE(state.ok()) << state.status();
  std::string victim;
  if (state->in_flight_size() == 1) {
    victim = state->in_flight(0).decode_worker_id();
    cluster_->Kill(victim);
  }
  raw += socket.Receive();
  EXPECT_EQ(Parse(raw).Text(), want);
  if (!victim.empty()) {
    ASSERT_TRUE(cluster_->Restart(victim).ok());
    ASSERT_TRUE(cluster_->WaitUntilReady(1, 2, std::chrono::seconds(20)).ok());
  }

  // Several sequences, each its own; a text that can only end, ends.
  const json choices =
      Post("/v1/completions",
           {{"prompt", kCanaryPrompt},
            {"temperature", 1.6},
            {"n", 4},
            {"max_tokens", 40},
            {"structured_outputs", {{"choice", {"yes", "no", "maybe so"}}}}})
          .Json();
  ASSERT_EQ(choices["choices"].size(), 4) << choices;
  for (const json& choice : choices["choices"]) {
    const std::string text = choice["text"];
    EXPECT_TRUE(text == "yes" || text == "no" || text == "maybe so") << text;
    EXPECT_EQ(choice["finish_reason"], "stop");
  }
  const json object =
      Post("/v1/completions",
           {{"prompt", kCanaryPrompt},
            {"temperature", 1.6},
            {"max_tokens", 60},
            {"response_format",
             {{"type", "json_schema"},
              {"json_schema",
               {{"name", "n"},
                {"schema",
                 {{"type", "object"},
                  {"properties", {{"a", {{"enum", {"red", "green"}}}}}},
                  {"required", {"a"}},
                  {"additionalProperties", false}}}}}}}})
          .Json();
  const json made = json::parse(object["choices"][0]["text"].get<std::string>(),
                                nullptr, false);
  EXPECT_TRUE(made == json({{"a", "red"}}) || made == json({{"a", "green"}}))
      << object;
  const Answer refused = Post(
      "/v1/completions", {{"prompt", kCanaryPrompt}, {"guided_regex", "("}});
  EXPECT_EQ(refused.Json()["error"]["param"], "guided_regex");
  EXPECT_EQ(refused.Json()["error"]["code"], "constraint_invalid");
}

// GET, with more header lines.
Answer Get(int port, const std::string& path, const std::string& more = "") {
  Socket socket(port);
  socket.Send(absl::StrCat("GET ", path, " HTTP/1.1\r\nConnection: close\r\n",
                           more, "\r\n"));
  return Parse(socket.Receive());
}

std::string AssetBytes(const std::string& name) {
  std::ifstream file(
      absl::StrCat(TANDEM_SOURCE_DIR "/router/page/assets/", name),
      std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_F(HttpTest, ThePageAndWhatItAsksFor) {
  Begin({.router_arguments = {"--enable-attention-output"},
         .worker_arguments = {"--enable-attention-output"}});
  const int port = cluster_->http_port();
  for (const auto& [path, name, type] : std::vector<std::array<std::string, 3>>{
           {"/", "index.html", "text/html; charset=utf-8"},
           {"/page/main.js", "main.js", "text/javascript; charset=utf-8"},
           {"/page/page.css", "page.css", "text/css; charset=utf-8"},
           {"/page/icon.svg", "icon.svg", "image/svg+xml"}}) {
    const Answer file = Get(port, path);
    EXPECT_EQ(file.code, 200) << path;
    EXPECT_TRUE(file.body == AssetBytes(name)) << path;
    EXPECT_THAT(file.head, HasSubstr("Content-Type: " + type + "\r\n"));
    EXPECT_THAT(file.head, HasSubstr("\r\nContent-Security-Policy: "
                                     "default-src 'none'; script-src 'self'"));
    EXPECT_THAT(file.head, HasSubstr("X-Content-Type-Options: nosniff\r\n"));
  }
  const Answer page = Get(port, "/");
  const size_t at = page.head.find("ETag: ") + 6;
  const std::string etag =
      page.head.substr(at, page.head.find("\r\n", at) - at);
  const Answer known =
      Get(port, "/", absl::StrCat("If-None-Match: \"x\", ", etag, "\r\n"));
  EXPECT_EQ(known.code, 304);
  EXPECT_EQ(known.body, "");
  const Answer packed = Get(port, "/", "Accept-Encoding: gzip, br\r\n");
  EXPECT_THAT(packed.head, HasSubstr("Content-Encoding: gzip\r\n"));
  EXPECT_LT(packed.body.size(), page.body.size());
  EXPECT_EQ(packed.body.substr(0, 2), "\x1f\x8b");
  EXPECT_EQ(Get(port, "/page/../main.cc").code, 404);
  EXPECT_EQ(Get(port, "/page/").code, 404);

  const json can = Get(port, "/v1/tandem/capabilities").Json();
  EXPECT_EQ(can["model"], "tales");
  EXPECT_EQ(can["chat"], true);
  EXPECT_EQ(can["layers"], 6);
  EXPECT_EQ(can["attention"], true);
  EXPECT_EQ(can["no_kv_cache"], false);

  // A page of elsewhere whose name leads here reads nothing.
  for (const char* const path : {"/", "/v1/models", "/v1/tandem/events"}) {
    EXPECT_EQ(Get(port, path, "Host: evil.example\r\n").code, 403) << path;
  }
  // More than may watch, had they not asked for a head alone.
  for (int i = 0; i < 20; ++i) {
    Socket head(port);
    head.Send("HEAD /v1/tandem/events HTTP/1.1\r\nConnection: close\r\n\r\n");
    const Answer answer = Parse(head.Receive());
    EXPECT_EQ(answer.code, 200);
    EXPECT_THAT(answer.head, HasSubstr("Content-Type: text/event-stream"));
  }

  // The feed hears of a request, whose tokens bring weights along.
  Socket watcher(port);
  watcher.Send("GET /v1/tandem/events HTTP/1.1\r\n\r\n");
  EXPECT_THAT(watcher.Receive("event: state"),
              HasSubstr("Content-Type: text/event-stream"));
  json asked = Greedy(3);
  asked["stream"] = true;
  asked["attention"] = "mean";
  int tokens = 0;
  for (const std::string& data : Post("/v1/completions", asked).Data()) {
    const json chunk = json::parse(data, nullptr, false);
    if (chunk.is_discarded() || chunk["choices"].empty()) continue;
    for (const json& token :
         chunk["choices"][0].value("attention", json::array())) {
      ++tokens;
      double sum = 0;
      for (const json& weight : token[0]["weights"]) {
        sum += weight.get<double>();
      }
      EXPECT_NEAR(sum, 1, 1e-3);
    }
  }
  EXPECT_EQ(tokens, 3);
  const std::string heard = watcher.Receive("\"work\":");
  EXPECT_THAT(heard, HasSubstr("event: ended"));
  EXPECT_THAT(heard, HasSubstr("\"completion_tokens\":3"));
}

TEST_F(HttpTest, ErrorsComeBeforeAStreamAsStatusAndInItAsAnEvent) {
  Begin({.router_arguments = {"--max-requests", "1", "--recovery-wait", "300ms",
                              "--no-workers-wait", "300ms",
                              "--max-response-bytes", "1KiB"}});
  json too_long = Greedy(4);
  too_long["stream"] = true;
  too_long["prompt"] = std::vector<int>(2000, 5);
  const Answer length = Post("/v1/completions", too_long);
  EXPECT_EQ(length.code, 400);
  EXPECT_EQ(length.Json()["error"]["code"], "context_length_exceeded");
  EXPECT_EQ(length.Json()["error"]["param"], "prompt");
  EXPECT_THAT(std::string(length.Json()["error"]["message"]),
              StartsWith("This model's maximum context length is 1024 tokens. "
                         "However, you requested 2004 tokens (2000 in the "
                         "prompt, 4 in the completion)."));
  json other = Greedy(4);
  other["model"] = "other";
  EXPECT_EQ(Post("/v1/completions", other).code, 404);
  EXPECT_EQ(Post("/v1/completions", {{"prompt", "a"}, {"top_p", 2}})
                .Json()["error"]["param"],
            "top_p");

  const Answer large = Post("/v1/completions", Greedy(900));
  EXPECT_EQ(large.code, 400) << large.body;
  EXPECT_EQ(large.Json()["error"]["code"], "answer_too_large");
  EXPECT_EQ(large.Json()["error"]["type"], "invalid_request_error");

  // The listener's own words, and another type of content.
  const Answer nothing = Post("/v1/nothing", json::object());
  EXPECT_EQ(nothing.code, 404);
  EXPECT_EQ(nothing.Json()["error"]["message"], "nothing at /v1/nothing");
  EXPECT_EQ(Get(cluster_->http_port(), "/page/nothing").body.front(), 'n');
  const Answer method = Get(cluster_->http_port(), "/tokenize");
  EXPECT_EQ(method.code, 405);
  EXPECT_EQ(method.Json()["error"]["type"], "invalid_request_error");
  for (const char* path : {"/v1/completions", "/tokenize", "/detokenize"}) {
    Socket plain(cluster_->http_port());
    plain.Send(absl::StrCat("POST ", path, " HTTP/1.1\r\nConnection: close\r\n",
                            "Content-Length: 2\r\n\r\n{}"));
    EXPECT_EQ(Parse(plain.Receive()).code, 415) << path;
  }

  // A limit of time ends with what there is, and beats a deadline.
  json timed = Greedy(900);
  timed["max_time"] = 0.03;
  timed["stream"] = true;
  timed["stream_options"] = {{"include_usage", true}};
  const Answer cut = Post("/v1/completions", timed);
  ASSERT_EQ(cut.code, 200) << cut.body;
  EXPECT_THAT(cut.body, HasSubstr("\"finish_reason\":\"length\""));
  EXPECT_THAT(cut.body, Not(HasSubstr("\"error\"")));
  const std::vector<std::string> events = cut.Data();
  ASSERT_GE(events.size(), 2u);
  EXPECT_LT(
      json::parse(events[events.size() - 2])["usage"]["completion_tokens"],
      900);

  json stream = Greedy(900);
  stream["stream"] = true;
  Socket socket(cluster_->http_port());
  socket.Send(Request("/v1/completions", stream));
  std::string raw = socket.Receive("data: ");
  cluster_->Signal("decode-0", SIGSTOP);  // it stays in flight
  const Answer full = Post("/v1/completions", Greedy(4));
  EXPECT_EQ(full.code, 429) << full.body;
  EXPECT_THAT(full.head, HasSubstr("Retry-After: "));
  EXPECT_EQ(full.Json()["error"]["type"], "rate_limit_error");
  EXPECT_THAT(full.head, HasSubstr("\r\nX-Request-Id: "));
  EXPECT_THAT(full.head, Not(HasSubstr("x-should-retry")));

  cluster_->Kill("decode-0");
  raw += socket.Receive();
  const std::vector<std::string> data = Parse(raw).Data();
  ASSERT_GE(data.size(), 2u);
  EXPECT_EQ(data.back(), "[DONE]");
  EXPECT_EQ(json::parse(data[data.size() - 2])["error"]["type"],
            "service_unavailable_error")
      << data[data.size() - 2];
  const Answer nobody = Post("/v1/completions", Greedy(4));
  EXPECT_EQ(nobody.code, 503) << nobody.body;
  ASSERT_TRUE(cluster_->Restart("decode-0").ok());
  ASSERT_TRUE(cluster_->WaitUntilReady(1, 1, std::chrono::seconds(20)).ok());
}

}  // namespace
}  // namespace tandem::integration
