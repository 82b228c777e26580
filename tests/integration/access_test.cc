// SPDX-License-Identifier: Apache-2.0
// Who may call, how much and over whose cache, of a cluster of real processes:
// keys, limits and tenants over HTTP and gRPC alike.

#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/rpc/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "openengine/v1/control.grpc.pb.h"
#include "openengine/v1/inference.grpc.pb.h"
#include "router/tenants/key_file.h"
#include "tests/common/http/socket.h"
#include "tests/integration/cluster.h"
#include "tests/integration/shell.h"

namespace tandem::integration {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// More than one block of it.
constexpr char kLongPrompt[] =
    "Once upon a time there was a little dog who lived in a big house with a "
    "red door, and every day the little dog went out to play in the garden.";

struct JsonAnswer {
  int code = 0;
  std::string head;  // names in lower case
  json body;
  std::string Header(const std::string& name) const {
    const size_t at = head.find("\r\n" + name + ": ");
    if (at == std::string::npos) return "";
    const size_t begin = at + name.size() + 4;
    return head.substr(begin, head.find("\r\n", begin) - begin);
  }
};

// Standard output of a command of `tandem`, whatever it is given, and its code.
std::string OutputAndExit(const std::string& arguments) {
  const Result result = Shell(Tandem(arguments));
  return absl::StrCat(result.output, "exit ", result.code);
}

class AccessTest : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(folder_); }
  void TearDown() override {
    if (cluster_ != nullptr) {
      // Neither keys nor prompts are in any log.
      EXPECT_EQ(cluster_->WhatIsLeft("sk-tandem"), "");
      EXPECT_EQ(cluster_->Log("router").find("little dog"), std::string::npos);
    }
    std::filesystem::remove_all(folder_);
  }

  // A key of its own, and the file's line for it.
  std::string Line(const std::string& tenant, std::string* key,
                   const router::TenantLimits& limits = {}) {
    *key = router::NewKey(&random_);
    return router::FormatKeyEntry(
               {.tenant = tenant, .digest = router::DigestOf(*key)}, limits) +
           "\n";
  }
  void WriteFile(const std::string& text) {
    std::ofstream(file_ + ".new") << text;
    std::filesystem::rename(file_ + ".new", file_);
  }
  void Begin(const std::string& keys,
             const std::vector<std::string>& worker_arguments = {}) {
    WriteFile(keys);
    cluster_ = std::make_unique<Cluster>(
        ClusterOptions{.prefill = 1,
                       .decode = 1,
                       .router_arguments = {"--api-keys-file", file_},
                       .worker_arguments = worker_arguments});
    const absl::Status status = cluster_->Start();
    ASSERT_TRUE(status.ok()) << status << cluster_->Log("router");
  }

  // `authorization` is the whole header's value; empty: none is sent.
  JsonAnswer Http(const std::string& method, const std::string& path,
                  const std::string& authorization,
                  const json& body = nullptr) {
    const std::string text = body.is_null() ? "" : body.dump();
    Socket socket(cluster_->http_port());
    socket.Send(absl::StrCat(
        method, " ", path, " HTTP/1.1\r\nConnection: close\r\n",
        "Content-Type: application/json\r\n",
        authorization.empty()
            ? ""
            : absl::StrCat("Authorization: ", authorization, "\r\n"),
        "Content-Length: ", text.size(), "\r\n\r\n", text));
    return Parse(socket.Receive());
  }
  static JsonAnswer Parse(const std::string& raw) {
    JsonAnswer answer;
    const size_t end = raw.find("\r\n\r\n");
    if (raw.size() < 12 || end == std::string::npos) return answer;
    answer.code = std::stoi(raw.substr(9, 3));
    answer.head = absl::AsciiStrToLower(raw.substr(0, end + 2));
    answer.body = json::parse(raw.substr(end + 4), nullptr, false);
    return answer;
  }
  JsonAnswer Complete(const std::string& key, int max_tokens = 2) {
    return Http(
        "POST", "/v1/completions", absl::StrCat("Bearer ", key),
        {{"prompt", "Once"}, {"max_tokens", max_tokens}, {"ignore_eos", true}});
  }
  Outcome Grpc(const std::string& key, const v1::GenerateRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + seconds(60));
    context.AddMetadata("authorization", absl::StrCat("Bearer ", key));
    return cluster_->Generate(request, &context);
  }
  // An empty request to any method.
  absl::Status Call(const std::string& method,
                    const std::string& authorization) {
    grpc::GenericStub stub(cluster_->Channel(cluster_->grpc_port()));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + seconds(10));
    if (!authorization.empty()) {
      context.AddMetadata("authorization", authorization);
    }
    grpc::CompletionQueue queue;
    grpc::Slice nothing;
    const grpc::ByteBuffer request(&nothing, 1);
    const auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
    grpc::ByteBuffer response;
    grpc::Status status;
    call->StartCall();
    call->Finish(&response, &status, this);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return rpc::FromGrpc(status, context);
  }
  bool Until(const std::function<bool()>& done) {
    for (int i = 0; i < 200 && !done(); ++i) {
      std::this_thread::sleep_for(milliseconds(50));
    }
    return done();
  }

  SystemRandom random_;
  // Writers lock the folder.
  const std::string folder_ =
      absl::StrCat(testing::TempDir(), "/tandem-keys-", getpid());
  const std::string file_ = folder_ + "/keys";
  std::unique_ptr<Cluster> cluster_;
};

TEST_F(AccessTest, EveryMethodAsksForAKey) {
  std::string key, revoked;
  const std::string line = Line("acme", &key);
  Line("acme", &revoked);
  Begin(line);
  const std::string hash = line.substr(line.find("sha256:") + 7, 64);
  const struct {
    std::string authorization;
    const char* grpc_reason;
    const char* http_code;
  } kRefused[] = {
      {"", "CREDENTIALS_MISSING", "credentials_missing"},
      {absl::StrCat("Basic ", key), "CREDENTIALS_MISSING",
       "credentials_missing"},
      {absl::StrCat("Bearer ", revoked), "API_KEY_INVALID", "invalid_api_key"},
      {absl::StrCat("Bearer ", hash), "API_KEY_INVALID", "invalid_api_key"},
      {absl::StrCat("Bearer ", key, "x"), "API_KEY_INVALID", "invalid_api_key"},
      {absl::StrCat("Bearer ", key.substr(0, key.size() - 1)),
       "API_KEY_INVALID", "invalid_api_key"},
  };
  std::vector<std::string> methods;
  for (const char* service : {v1::InferenceService::service_full_name(),
                              openengine::v1::Inference::service_full_name(),
                              openengine::v1::Control::service_full_name()}) {
    const google::protobuf::ServiceDescriptor* descriptor =
        google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(
            service);
    for (int i = 0; i < descriptor->method_count(); ++i) {
      methods.push_back(
          absl::StrCat("/", service, "/", descriptor->method(i)->name()));
    }
  }
  ASSERT_GE(methods.size(), 17u);
  int calls = 0;
  for (const std::string& method : methods) {
    for (const auto& c : kRefused) {
      const absl::Status status = Call(method, c.authorization);
      EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << method;
      EXPECT_EQ(ErrorReason(status), c.grpc_reason) << method;
      ++calls;
    }
    EXPECT_NE(Call(method, absl::StrCat("Bearer ", key)).code(),
              absl::StatusCode::kUnauthenticated)
        << method;
  }
  // There is no other way to write a method, and health asks for nothing.
  for (const char* path : {"/tandem.v1.inferenceservice/ListModels",
                           "/tandem.v1.InferenceService/ListModels/",
                           "/tandem.v1.InferenceService//ListModels",
                           "/tandem.v1.InferenceService/%4CistModels"}) {
    EXPECT_EQ(Call(path, "").code(), absl::StatusCode::kUnimplemented) << path;
  }
  EXPECT_TRUE(Call("/grpc.health.v1.Health/Check", "").ok());

  const struct {
    const char* method;
    const char* path;
  } kGuarded[] = {
      {"POST", "/v1/chat/completions"},
      {"POST", "/v1/completions"},
      {"GET", "/v1/models"},
      {"HEAD", "/v1/models"},
      {"GET", "/v1/models/tales"},
      {"POST", "/tokenize"},
      {"POST", "/detokenize"},
      {"POST", "/v1/load_lora_adapter"},
      {"OPTIONS", "/v1/models"},
      {"GET", "/nothing"},
      {"GET", "//version"},
      {"GET", "/version/"},
      {"GET", "/health/../v1/models"},
      {"GET", "/V1/models"},
      {"GET", "/v1%2Fmodels"},
  };
  for (const auto& [method, path] : kGuarded) {
    for (const auto& c : kRefused) {
      const JsonAnswer answer = Http(method, path, c.authorization);
      EXPECT_EQ(answer.code, 401) << path;
      ++calls;
      if (std::string(method) == "HEAD") continue;
      const json& error = answer.body["error"];
      EXPECT_EQ(error["code"], c.http_code) << path;
      EXPECT_EQ(error["type"], "authentication_error") << path;
      EXPECT_THAT(answer.Header("www-authenticate"), HasSubstr("bearer realm"));
    }
    const JsonAnswer answer = Http(method, path, absl::StrCat("Bearer ", key));
    EXPECT_NE(answer.code, 401) << path;
    EXPECT_NE(answer.code, 0) << path;
  }
  for (const char* path : {"/health", "/version", "/metrics"}) {
    EXPECT_EQ(Http("GET", path, "").code, 200) << path;
  }
  // Refused before a body is read, or even sent.
  Socket socket(cluster_->http_port());
  socket.Send(
      "POST /v1/completions HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n{");
  EXPECT_EQ(Parse(socket.Receive()).code, 401);
  EXPECT_GT(cluster_->Metrics("router").size(), 0u);
  RecordProperty("calls", calls);
}

TEST_F(AccessTest, KeysComeAndGoInService) {
  std::string first, second;
  const std::string line = Line("acme", &first);
  const std::string other = Line("zen", &second, {.requests_per_minute = 1000});
  Begin(line);
  EXPECT_EQ(Complete(second).code, 401);

  // A stream that began with a key outlives it.
  grpc::ClientContext context;
  context.AddMetadata("authorization", absl::StrCat("Bearer ", first));
  v1::GenerateRequest request = TextRequest("Once upon a time", 200);
  request.mutable_stopping()->set_ignore_eos(true);
  const auto stub = cluster_->Client();
  const auto reader = stub->Generate(&context, request);
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  WriteFile(other);
  ASSERT_TRUE(Until([&] { return Complete(second).code == 200; }));
  EXPECT_EQ(Complete(first).code, 401);
  EXPECT_EQ(ErrorReason(Grpc(first, TextRequest("Once", 1)).status),
            "API_KEY_INVALID");
  v1::GenerateDone done;
  while (reader->Read(&response)) {
    if (response.has_done()) done = response.done();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(done.usage().completion_tokens(), 200);
  EXPECT_EQ(Complete(second).Header("x-ratelimit-limit-requests"), "1000");

  // What cannot be read leaves all as it was, and says why.
  cluster_->ExpectErrors("API keys not reloaded");
  WriteFile(absl::StrCat(other, line, "acme not-a-hash\n"));
  ASSERT_TRUE(Until([&] {
    return cluster_->Log("router").find("line 3: the key's hash") !=
           std::string::npos;
  }));
  EXPECT_EQ(Complete(second).code, 200);
  EXPECT_EQ(Complete(first).code, 401);
  std::filesystem::remove(file_);
  ASSERT_TRUE(Until([&] {
    return cluster_->Log("router").find("cannot read") != std::string::npos;
  }));
  EXPECT_EQ(Complete(second).code, 200);

  // Others' limits are new, the counts are not.
  std::string changed = other;
  changed.replace(changed.find("=1000"), 5, "=7");
  WriteFile(line + changed);
  ASSERT_TRUE(Until([&] { return Complete(first).code == 200; }));
  const JsonAnswer last = Complete(second);
  EXPECT_EQ(last.Header("x-ratelimit-limit-requests"), "7");
}

TEST_F(AccessTest, LimitsAreExactAndSayWhenToComeBack) {
  std::string some, one, few, big;
  const std::string lines = Line("some", &some, {.requests_per_minute = 3}) +
                            Line("one", &one, {.parallel_requests = 1}) +
                            Line("few", &few, {.tokens_per_minute = 30}) +
                            Line("big", &big);
  Begin(lines);
  // Requests per minute, over both ports together.
  EXPECT_EQ(Complete(some).Header("x-ratelimit-remaining-requests"), "2");
  EXPECT_TRUE(Grpc(some, TextRequest("Once", 1)).status.ok());
  EXPECT_EQ(Complete(some).Header("x-ratelimit-remaining-requests"), "0");
  const JsonAnswer beyond = Complete(some);
  EXPECT_EQ(beyond.code, 429);
  EXPECT_EQ(beyond.body["error"]["code"], "rate_limit_exceeded");
  EXPECT_THAT(beyond.body["error"]["message"].get<std::string>(),
              HasSubstr("requests per minute (RPM): limit 3"));
  const int wait = std::stoi(absl::StrCat("0", beyond.Header("retry-after")));
  EXPECT_GE(wait, 1);
  EXPECT_LE(wait, 20);
  EXPECT_EQ(beyond.Header("x-ratelimit-limit-requests"), "3");
  for (const char* path : {"/tokenize", "/detokenize"}) {
    const json body = {{"prompt", "Once"}, {"tokens", {1}}};
    const JsonAnswer refused =
        Http("POST", path, absl::StrCat("Bearer ", some), body);
    EXPECT_EQ(refused.code, 429);
    EXPECT_EQ(refused.Header("x-ratelimit-limit-requests"), "3");
    EXPECT_EQ(refused.Header("x-ratelimit-remaining-requests"), "0");
    const JsonAnswer within =
        Http("POST", path, absl::StrCat("Bearer ", few), body);
    EXPECT_EQ(within.code, 200);
    EXPECT_EQ(within.Header("x-ratelimit-limit-tokens"), "30");
  }
  EXPECT_THAT(OutputAndExit(absl::StrCat("status --admin 127.0.0.1:",
                                         cluster_->admin_port())),
              AllOf(ContainsRegex("some +0 of 128 +0 of 3 left +-"),
                    ContainsRegex("one +0 of 1 +- +-")));
  const absl::Status refused = Grpc(some, TextRequest("Once", 1)).status;
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(refused), "RATE_LIMITED");
  EXPECT_TRUE(RetryAfter(refused).has_value());
  EXPECT_EQ(Complete(big).Header("x-ratelimit-limit-requests"), "");

  // At a time: whoever has read an answer to its end has its place again.
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(Grpc(one, TextRequest("Once", 3)).status.ok()) << i;
    EXPECT_EQ(Complete(one).code, 200) << i;
  }
  const JsonAnswer never =
      Http("POST", "/v1/completions", absl::StrCat("Bearer ", one),
           {{"prompt", {"Once", "The"}}, {"max_tokens", 2}});
  EXPECT_EQ(never.code, 400);
  EXPECT_EQ(never.body["error"]["param"], "prompt");
  EXPECT_EQ(never.body["error"]["message"],
            "prompt = 2 sequences: at most 1 of one call, as many as your "
            "key's max_parallel_requests");
  grpc::ClientContext context;
  context.AddMetadata("authorization", absl::StrCat("Bearer ", one));
  v1::GenerateRequest request = TextRequest("Once upon a time", 400);
  request.mutable_stopping()->set_ignore_eos(true);
  const auto stub = cluster_->Client();
  const auto reader = stub->Generate(&context, request);
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(Complete(one).code, 429);
  EXPECT_EQ(Complete(one).Header("retry-after"), "1");
  context.TryCancel();
  while (reader->Read(&response)) continue;
  EXPECT_FALSE(reader->Finish().ok());
  EXPECT_TRUE(Until([&] { return Complete(one).code == 200; }));

  // Tokens: "Once" and what is asked for fit to the last one.
  const json sized = Http("POST", "/tokenize", absl::StrCat("Bearer ", few),
                          {{"prompt", "Once"}})
                         .body;
  const int prompt = sized["count"];
  EXPECT_EQ(Complete(few, 31 - prompt).code, 429) << "more than all";
  const JsonAnswer all = Complete(few, 30 - prompt);
  EXPECT_EQ(all.code, 200);
  // At admission; meanwhile less than a token has come back.
  EXPECT_EQ(all.Header("x-ratelimit-remaining-tokens"), "0");
  const JsonAnswer none = Complete(few, 20);
  EXPECT_EQ(none.code, 429);
  EXPECT_NE(none.Header("retry-after"), "");
  std::map<std::string, double> metrics = cluster_->Metrics("router");
  double charged = 0, limited = 0;
  for (const auto& [name, value] : metrics) {
    if (name.find("tandem_tenant_tokens_total") == 0 &&
        name.find("\"few\"") != std::string::npos) {
      charged += value;
    }
    if (name.find("tandem_tenant_refused_total") == 0 &&
        name.find("requests_per_minute") != std::string::npos) {
      limited += value;
    }
  }
  EXPECT_EQ(charged, 30);
  EXPECT_EQ(limited, 4);
}

TEST_F(AccessTest, EachSequenceIsARequestAtATime) {
  std::string key, slow;
  const std::string lines = Line("four", &key, {.parallel_requests = 4}) +
                            Line("slow", &slow, {.requests_per_minute = 2});
  Begin(lines);
  const auto ask = [&](const std::string& whose, const json& more) {
    json body = {{"prompt", "Once"}, {"max_tokens", 2}};
    body.update(more);
    return Http("POST", "/v1/completions", absl::StrCat("Bearer ", whose),
                body);
  };
  const struct {
    std::string key;
    json body;
    const char* message;
  } kNever[] = {
      {key,
       {{"n", 5}},
       "n = 5 sequences: at most 4 of one call, as many as your key's "
       "max_parallel_requests"},
      {key,
       {{"prompt", {"a", "b", "c"}}, {"n", 2}},
       "prompt = 6 sequences: at most 4 of one call, as many as your key's "
       "max_parallel_requests"},
      {slow,
       {{"prompt", {"a", "b", "c"}}},
       "prompt = 3 prompts: at most 2 of one call, as many as your key's "
       "rpm_limit"}};
  for (const auto& never : kNever) {
    const JsonAnswer answer = ask(never.key, never.body);
    EXPECT_EQ(answer.code, 400) << never.message;
    EXPECT_EQ(answer.Header("retry-after"), "");
    EXPECT_EQ(answer.body["error"]["message"], never.message);
  }
  v1::GenerateRequest request = TextRequest("Once upon a time", 400);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_sampling()->set_n(5);
  request.mutable_sampling()->set_temperature(1);
  const absl::Status refused = Grpc(key, request).status;
  EXPECT_EQ(ErrorReason(refused), "RATE_LIMITED");
  EXPECT_EQ(RetryAfter(refused), std::nullopt);

  request.mutable_sampling()->set_n(3);
  grpc::ClientContext context;
  context.AddMetadata("authorization", absl::StrCat("Bearer ", key));
  const auto stub = cluster_->Client();
  const auto reader = stub->Generate(&context, request);
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  const JsonAnswer later = ask(key, {{"n", 2}});
  EXPECT_EQ(later.code, 429);
  EXPECT_EQ(later.Header("retry-after"), "1");
  EXPECT_EQ(Complete(key).code, 200) << "a fourth one";
  context.TryCancel();
  while (reader->Read(&response)) continue;
  EXPECT_FALSE(reader->Finish().ok());
  EXPECT_TRUE(Until([&] { return ask(key, {{"n", 2}}).code == 200; }));
}

TEST_F(AccessTest, LimitsHoldUnderAStorm) {
  std::string key;
  Begin(Line("acme", &key, {.requests_per_minute = 12}));
  std::atomic<int> answered = 0, refused = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      for (int j = 0; j < 4; ++j) {
        const bool http = (i + j) % 2 == 0;
        const bool ok = http ? Complete(key).code == 200
                             : Grpc(key, TextRequest("Once", 2)).status.ok();
        ++(ok ? answered : refused);
      }
    });
  }
  const auto begun = std::chrono::steady_clock::now();
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - begun;
  EXPECT_GE(answered, 12);
  // One comes back every 5 s.
  EXPECT_LE(answered, 13 + static_cast<int>(took.count() / 5));
  EXPECT_EQ(answered + refused, 32);
}

TEST_F(AccessTest, NoBlockIsSharedBetweenTenants) {
  std::string a, b;
  const std::string lines = Line("a", &a) + Line("b", &b);
  Begin(lines);
  for (const v1::Placement placement :
       {v1::PLACEMENT_SPLIT, v1::PLACEMENT_LOCAL}) {
    // Neither placement may profit from the other's.
    v1::GenerateRequest request = TextRequest(
        absl::StrCat(v1::Placement_Name(placement), ": ", kLongPrompt), 4);
    request.set_placement(placement);
    // A request that was computed anew finds what it left itself, and one
    // that the decode worker computed in the end leaves the prefill worker's
    // cache without it: hits may take another try, misses must be misses.
    const auto ask = [&](const std::string& key, const std::string& salt) {
      if (!salt.empty()) request.mutable_cache()->set_cache_salt(salt);
      Outcome outcome = Grpc(key, request);
      request.clear_cache();
      EXPECT_TRUE(outcome.status.ok()) << outcome.status;
      EXPECT_EQ(cluster_->WhatIsLeft(), "");  // all of it is in the caches
      return outcome.done;
    };
    const auto misses = [&](const std::string& key, const std::string& salt) {
      const v1::GenerateDone done = ask(key, salt);
      EXPECT_TRUE(done.usage().cached_tokens() == 0 ||
                  done.timings().retries() > 0)
          << (key == a ? "a" : "b") << " with salt '" << salt
          << "': " << done.ShortDebugString();
    };
    const auto hits = [&](const std::string& key, const std::string& salt) {
      v1::GenerateDone done;
      for (int i = 0; i < 5 && done.usage().cached_tokens() == 0; ++i) {
        done = ask(key, salt);
      }
      EXPECT_GE(done.usage().cached_tokens(), 16)
          << (key == a ? "a" : "b") << " with salt '" << salt
          << "': " << done.ShortDebugString();
    };
    misses(a, "");
    hits(a, "");
    misses(b, "");
    misses(b, "a");  // names of others are no salts of theirs
    hits(b, "");
    misses(a, "own");
    hits(a, "own");
    misses(b, "own");
    hits(a, "");
  }
  // Names of requests are a tenant's own, too.
  grpc::ClientContext context;
  context.AddMetadata("authorization", absl::StrCat("Bearer ", a));
  v1::GenerateRequest request = TextRequest("Once upon a time", 300);
  request.set_request_id("same");
  request.mutable_stopping()->set_ignore_eos(true);
  const auto stub = cluster_->Client();
  const auto reader = stub->Generate(&context, request);
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(ErrorReason(Grpc(a, request).status), "REQUEST_ID_IN_USE");
  request.mutable_stopping()->set_max_tokens(2);
  EXPECT_TRUE(Grpc(b, request).status.ok());
  context.TryCancel();
  while (reader->Read(&response)) continue;
  (void)reader->Finish();
}

TEST_F(AccessTest, WhoFloodsTheCacheDrivesOutHimself) {
  std::string a, b;
  const std::string lines = Line("a", &a) + Line("b", &b);
  // Where a tenant may have all of it, the flood takes the other's too: else
  // this says nothing.
  for (const bool all : {true, false}) {
    Begin(lines,
          {"--num-kv-blocks", "64", "--tenant-cache-share", all ? "1" : "0.5"});
    const auto ask = [&](const std::string& key, int number) {
      v1::GenerateRequest request =
          TextRequest(absl::StrCat(number, ": ", kLongPrompt), 4);
      request.set_placement(v1::PLACEMENT_LOCAL);
      const Outcome outcome = Grpc(key, request);
      EXPECT_TRUE(outcome.status.ok()) << outcome.status;
      return outcome.done.usage();
    };
    EXPECT_EQ(ask(b, 0).cached_tokens(), 0);
    EXPECT_GE(ask(b, 0).cached_tokens(), 16);
    int flood = 0;
    for (int i = 1; flood < 2 * 64 * 16; ++i) {
      flood += ask(a, i).prompt_tokens();
    }
    EXPECT_EQ(ask(b, 0).cached_tokens() >= 16, !all);
    EXPECT_EQ(cluster_->WhatIsLeft("sk-tandem"), "");
  }
}

TEST_F(AccessTest, TheCommandLineMakesKeysAndBringsThem) {
  const std::string file = " --api-keys-file " + file_ + " 2>&1";
  const std::string made =
      OutputAndExit(absl::StrCat("keys new acme --name laptop --rpm-limit 600 "
                                 "--api-keys-file ",
                                 file_, " 2>/dev/null"));
  ASSERT_THAT(made, testing::MatchesRegex("sk-tandem-[^\n]{43}\nexit 0"));
  const std::string key = made.substr(0, 53);
  const auto mode = [this] {
    return std::filesystem::status(file_).permissions();
  };
  EXPECT_EQ(mode(), std::filesystem::perms{0600});
  std::filesystem::permissions(file_, std::filesystem::perms{0640});
  EXPECT_THAT(OutputAndExit("keys new zen" + file), HasSubstr("exit 0"));
  EXPECT_EQ(mode(), std::filesystem::perms{0640}) << "the router may read it";
  EXPECT_THAT(OutputAndExit("keys new acme --rpm-limit 5" + file),
              HasSubstr("line 3: rpm_limit = 5: an entry of the same tenant"));
  EXPECT_THAT(OutputAndExit("keys new a/b" + file), HasSubstr("exit 2"));
  const std::string list = OutputAndExit("keys list" + file);
  EXPECT_THAT(list, HasSubstr("acme                 laptop"));
  EXPECT_EQ(list.find(key), std::string::npos);
  // What a link names is written, though it is not there yet.
  const std::filesystem::path link = folder_ + "/link";
  std::filesystem::create_symlink("later", link);
  EXPECT_THAT(
      OutputAndExit("keys new zen --api-keys-file " + link.string() + " 2>&1"),
      HasSubstr("exit 0"));
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_TRUE(std::filesystem::is_regular_file(folder_ + "/later"));
  // Of writers at the same time none loses another's key.
  std::vector<std::thread> writers;
  for (int i = 0; i < 3; ++i) {
    writers.emplace_back([&, i] {
      EXPECT_THAT(OutputAndExit(absl::StrCat("keys new many-", i, file)),
                  HasSubstr("exit 0"));
    });
  }
  for (std::thread& writer : writers) writer.join();
  std::ifstream stream(file_);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 5) << text;
  EXPECT_EQ(text.find(key), std::string::npos) << "only its hash is kept";
  Begin(text);
  const std::string generate =
      absl::StrCat("generate --router 127.0.0.1:", cluster_->grpc_port(),
                   " --max-tokens 2 Once 2>&1");
  EXPECT_THAT(OutputAndExit(generate), HasSubstr("exit 1"));
  EXPECT_THAT(OutputAndExit(
                  absl::StrCat("generate --api-key ", key, generate.substr(8))),
              HasSubstr("exit 0"));
  setenv("TANDEM_API_KEY", key.c_str(), 1);
  EXPECT_THAT(OutputAndExit(generate), HasSubstr("exit 0"));
  unsetenv("TANDEM_API_KEY");
}

}  // namespace
}  // namespace tandem::integration
