// SPDX-License-Identifier: Apache-2.0
// Adapters through a whole cluster: mixed with the model as it is, by both
// ways, with a decode worker killed among them; who may share prefixes; and
// loaded and unloaded while streams run.

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "openengine/v1/control.grpc.pb.h"
#include "openengine/v1/inference.grpc.pb.h"
#include "tests/common/http/socket.h"
#include "tests/integration/adapter_file.h"
#include "tests/integration/cluster.h"
#include "tests/integration/load.h"

namespace tandem::integration {
namespace {

using nlohmann::json;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;

class LoraTest : public testing::Test {
 protected:
  LoraTest() {
    char pattern[] = "/tmp/tandem-lora.XXXXXX";
    directory_ = mkdtemp(pattern);
    WriteAdapter(directory_ + "/verse", 1);
    WriteAdapter(directory_ + "/prose", 2);
    WriteAdapter(directory_ + "/rhyme", 3);
  }
  ~LoraTest() override { std::filesystem::remove_all(directory_); }

  ClusterOptions Options() const {
    return {.prefill = 1,
            .decode = 2,
            .worker_arguments = {"--max-num-batched-tokens", "32",
                                 "--max-lora-rank", "8", "--lora-modules",
                                 absl::StrCat("verse=", directory_, "/verse"),
                                 "--lora-modules",
                                 absl::StrCat("prose=", directory_, "/prose")}};
  }

  std::string directory_;
};

v1::GenerateRequest With(const std::string& adapter, const std::string& prompt,
                         int max_tokens) {
  v1::GenerateRequest request = TextRequest(prompt, max_tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  request.set_adapter(adapter);
  return request;
}

TEST_F(LoraTest, AdaptersAreMixedAndOutliveADecodeWorker) {
  Cluster cluster(Options());
  ASSERT_TRUE(cluster.Start().ok());
  std::vector<v1::GenerateRequest> requests;
  int i = 0;
  for (const std::string& prompt : SomePrompts(4, 7)) {
    for (const char* adapter : {"", "verse", "prose"}) {
      requests.push_back(With(adapter, prompt, 40));
      requests.back().set_placement(i++ % 2 == 0 ? v1::PLACEMENT_SPLIT
                                                 : v1::PLACEMENT_LOCAL);
    }
  }
  const std::vector<Expectation> expected = RunAlone(&cluster, requests);
  ASSERT_EQ(expected.size(), requests.size());
  for (size_t p = 0; p < expected.size(); p += 3) {
    EXPECT_NE(expected[p].token_ids, expected[p + 1].token_ids);
    EXPECT_NE(expected[p].token_ids, expected[p + 2].token_ids);
    EXPECT_NE(expected[p + 1].token_ids, expected[p + 2].token_ids);
  }
  // So many that the worker that is killed has some: of six it once had none.
  Load load(&cluster, &expected, 12);
  load.WaitForEveryStream();
  cluster.Kill("decode-0");
  load.WaitForEveryStream();
  ASSERT_TRUE(cluster.Restart("decode-0").ok());
  ASSERT_TRUE(cluster.WaitUntilReady(1, 2, seconds(60)).ok());
  load.WaitForEveryStream();
  EXPECT_TRUE(load.Finish());
  EXPECT_EQ(load.faults(), "");
  EXPECT_GT(load.retries(), 0);
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

TEST_F(LoraTest, PrefixesStayWithTheirAdapter) {
  ClusterOptions options = Options();
  options.decode = 1;
  Cluster cluster(options);
  ASSERT_TRUE(cluster.Start().ok());
  const std::string prompt = SomePrompts(1, 9)[0];
  std::string text;
  while (text.size() < 400) absl::StrAppend(&text, prompt, " ");
  for (const auto placement : {v1::PLACEMENT_SPLIT, v1::PLACEMENT_LOCAL}) {
    const auto cached = [&](const std::string& adapter) {
      v1::GenerateRequest request = With(adapter, text, 4);
      request.set_placement(placement);
      const Outcome outcome = cluster.Generate(request);
      EXPECT_TRUE(outcome.status.ok()) << outcome.status;
      return outcome.done.usage().cached_tokens();
    };
    for (const char* adapter : {"", "verse", "prose"}) {
      EXPECT_EQ(cached(adapter), 0) << adapter;
    }
    for (const char* adapter : {"", "verse", "prose"}) {
      EXPECT_GE(cached(adapter), 16) << adapter;
    }
    text.insert(0, "And so ");
  }
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

TEST_F(LoraTest, NamesAreModelsToo) {
  ClusterOptions options = Options();
  options.decode = 1;
  Cluster cluster(options);
  ASSERT_TRUE(cluster.Start().ok());
  const auto client = cluster.Client();
  v1::ListModelsResponse models;
  for (int tries = 0; tries < 100 && models.models_size() < 3; ++tries) {
    grpc::ClientContext context;
    ASSERT_TRUE(client->ListModels(&context, {}, &models).ok());
  }
  std::vector<std::string> names;
  for (const auto& model : models.models()) names.push_back(model.model());
  EXPECT_THAT(names, ElementsAre("tales", "prose", "verse"));
  EXPECT_EQ(models.models(1).parent(), "tales");

  v1::GenerateRequest by_field = With("verse", "One day", 12);
  v1::GenerateRequest by_model = With("", "One day", 12);
  by_model.set_model("verse");
  const Outcome one = cluster.Generate(by_field);
  const Outcome two = cluster.Generate(by_model);
  EXPECT_TRUE(one.status.ok()) << one.status;
  EXPECT_EQ(one.token_ids, two.token_ids);
  EXPECT_NE(one.token_ids, cluster.Generate(With("", "One day", 12)).token_ids);

  const Outcome unknown = cluster.Generate(With("rhyme", "One day", 12));
  EXPECT_EQ(unknown.status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.status.message()),
              HasSubstr("adapter = rhyme: there are prose, verse"));
  by_field.set_model("prose");
  EXPECT_EQ(cluster.Generate(by_field).status.code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

// What no worker could be asked about is not taken for what is not there.
TEST_F(LoraTest, NamesOutliveAPauseOfTheDecodeWorker) {
  ClusterOptions options = Options();
  options.decode = 1;
  options.router_arguments = {"--no-workers-wait", "500ms"};
  Cluster cluster(options);
  ASSERT_TRUE(cluster.Start().ok());
  const auto admin =
      v1::AdminService::NewStub(cluster.Channel(cluster.admin_port()));
  const auto cordon = [&](bool cordoned) {
    grpc::ClientContext context;
    v1::SetWorkerStateRequest request;
    request.set_worker_id("decode-0");
    request.set_cordoned(cordoned);
    v1::SetWorkerStateResponse response;
    EXPECT_TRUE(admin->SetWorkerState(&context, request, &response).ok());
    for (int tries = 0;
         tries < 200 &&
         (cluster.Probe("router", "/readyz").substr(0, 3) == "503") != cordoned;
         ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  };
  const auto post = [&](const std::string& path, const json& body) {
    const std::string text = body.dump();
    Socket socket(cluster.http_port());
    socket.Send(absl::StrCat("POST ", path,
                             " HTTP/1.1\r\nConnection: close\r\nContent-Type: "
                             "application/json\r\nContent-Length: ",
                             text.size(), "\r\n\r\n", text));
    return socket.Receive();
  };
  const json named = {{"model", "verse"}, {"prompt", "One day"}};
  const json ids = {{"model", "verse"}, {"tokens", {1, 2}}};
  EXPECT_THAT(post("/tokenize", named), HasSubstr(" 200 OK"));
  EXPECT_THAT(post("/detokenize", ids), HasSubstr(" 200 OK"));
  json unknown = ids;
  unknown["model"] = "rhyme";
  EXPECT_THAT(post("/detokenize", unknown), HasSubstr("HTTP/1.1 404"));
  cordon(true);
  EXPECT_THAT(post("/tokenize", named), HasSubstr(" 200 OK"));
  EXPECT_THAT(post("/detokenize", ids), HasSubstr(" 200 OK"));
  EXPECT_THAT(post("/v1/completions", named),
              testing::AllOf(HasSubstr("HTTP/1.1 503"),
                             HasSubstr("no decode worker with adapter verse"),
                             HasSubstr("Retry-After: ")));
  for (const char* name : {"verse", "rhyme"}) {  // as the list has them
    grpc::ClientContext context;
    v1::GetModelRequest request;
    request.set_model(name);
    v1::GetModelResponse response;
    EXPECT_EQ(cluster.Client()->GetModel(&context, request, &response).ok(),
              name == std::string("verse"));
  }
  cordon(false);
  EXPECT_THAT(post("/v1/completions", named), HasSubstr(" 200 OK"));
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

// The admin service, as `tandem lora` calls it.
class LoraServiceTest : public LoraTest {
 protected:
  // "prose" from the start, and a slot more.
  ClusterOptions WithRoom() const {
    return {.prefill = 1,
            .decode = 2,
            .router_arguments = {"--allow-runtime-lora-updating"},
            .worker_arguments = {"--max-num-batched-tokens", "32",
                                 "--max-lora-rank", "8", "--max-loras", "2",
                                 "--lora-modules",
                                 absl::StrCat("prose=", directory_, "/prose")}};
  }
  static absl::Status Of(const grpc::Status& status) {
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                        status.error_message());
  }
  absl::Status Load(Cluster* cluster, const std::string& name,
                    const std::string& from) {
    const auto stub =
        v1::AdminService::NewStub(cluster->Channel(cluster->admin_port()));
    grpc::ClientContext context;
    v1::LoadLoraAdapterRequest request;
    request.set_lora_name(name);
    request.set_lora_path(absl::StrCat(directory_, "/", from));
    v1::LoadLoraAdapterResponse response;
    return Of(stub->LoadLoraAdapter(&context, request, &response));
  }
  absl::Status Unload(Cluster* cluster, const std::string& name) {
    const auto stub =
        v1::AdminService::NewStub(cluster->Channel(cluster->admin_port()));
    grpc::ClientContext context;
    v1::UnloadLoraAdapterRequest request;
    request.set_lora_name(name);
    v1::UnloadLoraAdapterResponse response;
    return Of(stub->UnloadLoraAdapter(&context, request, &response));
  }
  // Workers that have it.
  int Holders(Cluster* cluster, const std::string& name) {
    const auto stub =
        v1::AdminService::NewStub(cluster->Channel(cluster->admin_port()));
    grpc::ClientContext context;
    v1::ListLoraAdaptersResponse response;
    EXPECT_TRUE(stub->ListLoraAdapters(&context, {}, &response).ok());
    int holders = 0;
    for (const v1::LoraAdapter& adapter : response.adapters()) {
      if (adapter.lora_name() != name) continue;
      for (const auto& worker : adapter.workers()) {
        holders += worker.digest() == adapter.digest();
      }
    }
    return holders;
  }
  void WaitForHolders(Cluster* cluster, const std::string& name, int count) {
    for (int tries = 0; tries < 600 && Holders(cluster, name) != count;
         ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    EXPECT_EQ(Holders(cluster, name), count);
  }
  absl::Status Ask(Cluster* cluster, const std::string& adapter) {
    return cluster->Generate(With(adapter, "One day", 4)).status;
  }
};

TEST_F(LoraServiceTest, WhatIsLoadedInServiceGivesWhatItGivesFromTheStart) {
  std::vector<v1::GenerateRequest> others, verses;
  int i = 0;
  for (const std::string& prompt : SomePrompts(3, 11)) {
    const auto placement =
        i++ % 2 == 0 ? v1::PLACEMENT_SPLIT : v1::PLACEMENT_LOCAL;
    for (const char* adapter : {"", "prose", "verse"}) {
      auto& requests = std::string(adapter) == "verse" ? verses : others;
      requests.push_back(With(adapter, prompt, 40));
      requests.back().set_placement(placement);
    }
  }
  std::vector<Expectation> expected, other;
  {
    ClusterOptions options = Options();
    options.decode = 1;
    Cluster from_start(options);
    ASSERT_TRUE(from_start.Start().ok());
    expected = RunAlone(&from_start, verses);
    other = RunAlone(&from_start, others);
  }
  ASSERT_EQ(expected.size(), verses.size());
  Cluster cluster(WithRoom());
  ASSERT_TRUE(cluster.Start().ok());
  integration::Load load(&cluster, &other, 4);
  load.WaitForEveryStream();
  absl::Status status = Load(&cluster, "verse", "verse");
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(Holders(&cluster, "verse"), 3);
  EXPECT_TRUE(Ask(&cluster, "verse").ok());
  for (const Expectation& verse : expected) {
    EXPECT_EQ(Compare(verse, cluster.Generate(verse.request)), "");
  }
  // The same once more; another one is refused, as is one too many.
  EXPECT_TRUE(Load(&cluster, "verse", "verse").ok());
  EXPECT_EQ(Load(&cluster, "verse", "rhyme").code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Load(&cluster, "rhyme", "rhyme").code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Load(&cluster, "rhyme", "nowhere").code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Holders(&cluster, "verse"), 3);
  EXPECT_EQ(Holders(&cluster, "rhyme"), 0);

  // A restarted worker has it again, and so does a new router know it.
  integration::Load all(&cluster, &expected, 2);
  all.WaitForEveryStream();
  cluster.Kill("decode-0");
  all.WaitForEveryStream();
  ASSERT_TRUE(cluster.Restart("decode-0").ok());
  WaitForHolders(&cluster, "verse", 3);
  all.WaitForEveryStream();
  EXPECT_TRUE(all.Finish());
  EXPECT_EQ(all.faults(), "");
  load.WaitForEveryStream();
  EXPECT_TRUE(load.Finish());
  EXPECT_EQ(load.faults(), "");

  ASSERT_TRUE(cluster.Restart("router").ok());
  ASSERT_TRUE(cluster.WaitUntilReady(1, 2, seconds(30)).ok());
  WaitForHolders(&cluster, "verse", 3);
  absl::Status asked = Ask(&cluster, "verse");
  for (int tries = 0; tries < 100 && absl::IsNotFound(asked); ++tries) {
    // Its threads hear of workers' adapters a moment later.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    asked = Ask(&cluster, "verse");
  }
  EXPECT_TRUE(asked.ok()) << asked;
  ASSERT_TRUE(cluster.Restart("decode-1").ok());
  WaitForHolders(&cluster, "verse", 3);
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

TEST_F(LoraServiceTest, AnUnloadLetsRequestsEndAndFreesTheSlot) {
  ClusterOptions options = WithRoom();
  options.decode = 1;
  Cluster cluster(options);
  ASSERT_TRUE(cluster.Start().ok());
  ASSERT_TRUE(Load(&cluster, "verse", "verse").ok());
  ASSERT_TRUE(Ask(&cluster, "verse").ok());
  const std::vector<Expectation> expected =
      RunAlone(&cluster, {With("verse", "One day", 600)});
  ASSERT_EQ(expected.size(), 1u);
  std::thread running([&] {
    EXPECT_EQ(Compare(expected[0], cluster.Generate(expected[0].request)), "");
  });
  for (int tries = 0; tries < 1000; ++tries) {
    const auto state = cluster.State();
    if (state.ok() && state->requests().decoding() > 0) break;
  }
  EXPECT_TRUE(Unload(&cluster, "verse").ok());
  running.join();
  EXPECT_EQ(cluster.Generate(With("verse", "One day", 4)).status.code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(Unload(&cluster, "verse").code(), absl::StatusCode::kNotFound);
  // What fails leaves nothing behind; what fits takes the slot.
  const absl::Status missing = Load(&cluster, "rhyme", "nowhere");
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound) << missing;
  EXPECT_THAT(std::string(missing.message()), HasSubstr("worker "));
  WriteAdapter(directory_ + "/wide", 4, /*rank=*/16);
  const absl::Status wide = Load(&cluster, "rhyme", "wide");
  EXPECT_EQ(wide.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(wide.message()), HasSubstr("--max-lora-rank"));
  EXPECT_EQ(Holders(&cluster, "rhyme"), 0);
  EXPECT_TRUE(Load(&cluster, "rhyme", "rhyme").ok());
  // Another content under a name that was in use: nothing of the old one.
  EXPECT_TRUE(Unload(&cluster, "rhyme").ok());
  EXPECT_TRUE(Load(&cluster, "verse", "rhyme").ok());
  ASSERT_TRUE(Ask(&cluster, "verse").ok());
  EXPECT_NE(Compare(expected[0], cluster.Generate(expected[0].request)), "");
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

// Its router hears of the unload by what workers have, and requests may be on
// their way to them or behind a check that was made before.
TEST_F(LoraServiceTest, AnotherRoutersUnloadEndsRequestsAtOnce) {
  ClusterOptions options = WithRoom();
  options.routers = 2;
  Cluster cluster(options);
  ASSERT_TRUE(cluster.Start().ok());
  ASSERT_TRUE(Load(&cluster, "verse", "verse").ok());
  const auto ask = [&] {
    return cluster.Generate(With("verse", "One day", 2), nullptr, /*router=*/1);
  };
  for (int tries = 0; tries < 100 && !ask().status.ok(); ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  std::vector<Outcome> last(8);
  std::vector<std::thread> clients;
  for (Outcome& outcome : last) {
    clients.emplace_back([&] {
      do {
        outcome = ask();
      } while (outcome.status.ok());
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_TRUE(Unload(&cluster, "verse").ok());
  for (std::thread& client : clients) client.join();
  for (const Outcome& outcome : last) {
    EXPECT_EQ(outcome.status.code(), absl::StatusCode::kNotFound)
        << outcome.status;
    EXPECT_LT(outcome.ended - outcome.sent, seconds(5));
  }
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

TEST_F(LoraServiceTest, ByClientsAsWithVllmAndOpenEngine) {
  ClusterOptions options = WithRoom();
  options.decode = 1;
  Cluster cluster(options);
  ASSERT_TRUE(cluster.Start().ok());
  const auto exchange = [&](const std::string& head, const json& body) {
    const std::string text = body.is_null() ? "" : body.dump();
    Socket socket(cluster.http_port());
    socket.Send(absl::StrCat(head,
                             " HTTP/1.1\r\nConnection: close\r\nContent-Type: "
                             "application/json\r\nContent-Length: ",
                             text.size(), "\r\n\r\n", text));
    return socket.Receive();
  };
  const auto load = [&](const std::string& name, const std::string& from) {
    return exchange("POST /v1/load_lora_adapter",
                    {{"lora_name", name},
                     {"lora_path", absl::StrCat(directory_, "/", from)}});
  };
  EXPECT_THAT(load("verse", "verse"),
              HasSubstr("LoRA adapter 'verse' added successfully."));
  ASSERT_TRUE(Ask(&cluster, "verse").ok());
  EXPECT_THAT(load("verse", "rhyme"), HasSubstr("HTTP/1.1 409"));
  EXPECT_THAT(exchange("GET /v1/models/verse", nullptr),
              testing::AllOf(HasSubstr("\"id\":\"verse\""),
                             HasSubstr("\"parent\":\"tales\"")));
  EXPECT_THAT(exchange("GET /v1/models/tales", nullptr),
              HasSubstr("\"parent\":null"));
  EXPECT_THAT(exchange("GET /v1/models/r%68yme", nullptr),
              testing::AllOf(HasSubstr("HTTP/1.1 404"), HasSubstr("rhyme")));
  const json prompt = {
      {"model", "verse"}, {"prompt", "One day"}, {"max_tokens", 2}};
  EXPECT_THAT(exchange("POST /v1/completions", prompt),
              HasSubstr("\"model\":\"verse\""));
  json streamed = prompt;
  streamed["stream"] = true;
  EXPECT_THAT(exchange("POST /v1/completions", streamed),
              HasSubstr("\"model\":\"verse\""));
  EXPECT_THAT(
      exchange("POST /v1/unload_lora_adapter", {{"lora_name", "verse"}}),
      HasSubstr("LoRA adapter 'verse' removed successfully."));
  EXPECT_THAT(
      exchange("POST /v1/unload_lora_adapter", {{"lora_name", "verse"}}),
      HasSubstr("HTTP/1.1 404"));
  EXPECT_EQ(cluster.WhatIsLeft(), "");

  // OpenEngine's calls hang on the same switch.
  const auto channel = cluster.Channel(cluster.grpc_port());
  const auto control = openengine::v1::Control::NewStub(channel);
  openengine::v1::LoadLoraRequest verse;
  verse.mutable_adapter()->set_lora_name("verse");
  verse.mutable_adapter()->set_source_path(directory_ + "/verse");
  openengine::v1::LoadLoraResponse loaded;
  const auto load_lora = [&](int64_t id, const std::string& from) {
    verse.mutable_adapter()->set_lora_id(id);
    verse.mutable_adapter()->set_source_path(directory_ + from);
    grpc::ClientContext context;
    return control->LoadLora(&context, verse, &loaded).error_code();
  };
  EXPECT_EQ(load_lora(0, "/verse"), grpc::StatusCode::INVALID_ARGUMENT);
  ASSERT_EQ(load_lora(7, "/verse"), grpc::StatusCode::OK);
  EXPECT_FALSE(loaded.already_loaded());
  EXPECT_EQ(loaded.adapter().lora_id(), 7);
  ASSERT_EQ(load_lora(7, "/verse"), grpc::StatusCode::OK);
  EXPECT_TRUE(loaded.already_loaded());
  EXPECT_EQ(load_lora(8, "/verse"), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(load_lora(7, "/rhyme"), grpc::StatusCode::ALREADY_EXISTS);
  openengine::v1::ListLorasResponse list;
  grpc::ClientContext listing, generating, unloading;
  ASSERT_TRUE(control->ListLoras(&listing, {}, &list).ok());
  ASSERT_EQ(list.adapters_size(), 2);
  EXPECT_EQ(list.adapters(1).lora_name(), "verse");
  EXPECT_EQ(list.adapters(1).lora_id(), 7);
  EXPECT_EQ(list.adapters(1).source_path(), directory_ + "/verse");
  openengine::v1::GenerateRequest request;
  request.set_prompt("One day");
  request.set_lora_name("verse");
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(40);
  request.mutable_stopping()->set_ignore_eos(true);
  const auto reader = openengine::v1::Inference::NewStub(channel)->Generate(
      &generating, request);
  openengine::v1::GenerateResponse response;
  std::string text;
  while (reader->Read(&response)) text += response.token().text();
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(text, cluster.Generate(With("verse", "One day", 40)).text);
  EXPECT_NE(text, cluster.Generate(With("", "One day", 40)).text);
  openengine::v1::UnloadLoraRequest unload;
  unload.set_lora_name("verse");
  openengine::v1::UnloadLoraResponse unloaded;
  EXPECT_TRUE(control->UnloadLora(&unloading, unload, &unloaded).ok());
  EXPECT_EQ(unloaded.adapter().lora_id(), 7);
  EXPECT_EQ(Holders(&cluster, "verse"), 0);
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

}  // namespace
}  // namespace tandem::integration
