// SPDX-License-Identifier: Apache-2.0
// Flags of `tandem generate` beside the fields that they stand for: the same
// answer to the last bit, and what excludes each other.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/integration/adapter_file.h"
#include "tests/integration/cluster.h"
#include "tests/integration/shell.h"

namespace tandem::integration {
namespace {

using nlohmann::json;
using testing::HasSubstr;

constexpr char kStoryOpening[] = "Once upon a time";

// Drawn so freely that every filter tells.
constexpr char kFreely[] =
    "--temperature 2 --seed 3 --max-tokens 24 --placement split";
v1::GenerateRequest Freely() {
  v1::GenerateRequest request = TextRequest(kStoryOpening, 24);
  request.mutable_sampling()->set_temperature(2);
  request.mutable_sampling()->set_seed(3);
  request.mutable_stopping()->set_ignore_eos(true);
  request.set_placement(v1::PLACEMENT_SPLIT);
  return request;
}

constexpr char kSchema[] =
    R"({"type":"object","properties":{"a":{"type":"boolean"}},)"
    R"("required":["a"],"additionalProperties":false})";
constexpr char kGrammar[] = "start: \"to \" (\"be\" | \"do\")";
constexpr char kTag[] =
    R"({"structures":[{"begin":" ","schema":{"type":"boolean"},)"
    R"("end":"."}],"triggers":[" "]})";

// As --json has it, of one sequence.
template <typename Tokens>
json Logprobs(const Tokens& tokens) {
  json records = json::array();
  for (const v1::TokenLogprob& token : tokens) {
    json record = {{"token_id", token.token_id()}, {"token", token.token()}};
    record["logprob"] = token.logprob();
    if (token.rank() == 0) {  // nothing precedes it
      record["logprob"] = nullptr;
      records.push_back(record);
      continue;
    }
    record["rank"] = token.rank();
    record["top"] = json::array();
    for (const v1::TokenAlternative& top : token.top()) {
      record["top"].push_back({{"token_id", top.token_id()},
                               {"token", top.token()},
                               {"logprob", top.logprob()}});
    }
    records.push_back(record);
  }
  return records;
}

// What --json has of what clients see over gRPC. Numbers of both are compared
// as doubles, which hold every float.
json Seen(const Outcome& outcome) {
  const v1::GeneratedSequence& sequence = outcome.sequences.at(0);
  json seen = {{"text", sequence.text()}, {"token_ids", sequence.token_ids()}};
  seen["finish_reason"] = absl::AsciiStrToLower(
      v1::FinishReason_Name(sequence.finished().finish_reason()).substr(14));
  if (sequence.logprobs_size() > 0) {
    seen["logprobs"] = Logprobs(sequence.logprobs());
  }
  if (outcome.prompt_logprobs.tokens_size() > 0) {
    seen["prompt_logprobs"] = Logprobs(outcome.prompt_logprobs.tokens());
  }
  for (const v1::TokenAttention& token : sequence.attention()) {
    json layers = json::array();
    for (const v1::AttentionWeights& row : token.layers()) {
      layers.push_back({{"layer", row.layer()}, {"weights", row.weights()}});
    }
    seen["attention"].push_back(layers);
  }
  seen["positions"] = outcome.done.work().positions_computed();
  // Bytes of a token need not be a whole character.
  return json::parse(seen.dump(-1, ' ', false, json::error_handler_t::replace));
}

// The same of what it printed.
json Printed(const std::string& output) {
  json answer = json::parse(output);
  json printed;
  for (const char* const key : {"text", "token_ids", "finish_reason",
                                "logprobs", "prompt_logprobs", "attention"}) {
    if (answer.contains(key)) printed[key] = answer[key];
  }
  printed["positions"] =
      answer.contains("work") ? answer["work"]["positions_computed"] : json(0);
  return printed;
}

class GenerateFlagsTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    char pattern[] = "/tmp/tandem-flags.XXXXXX";
    directory_ = new std::string(mkdtemp(pattern));
    WriteAdapter(*directory_ + "/verse", 1);
    std::ofstream(*directory_ + "/schema") << kSchema;
    std::ofstream(*directory_ + "/grammar") << kGrammar;
    cluster_ = new Cluster(
        {.router_arguments = {"--enable-attention-output",
                              "--enable-no-kv-cache"},
         .worker_arguments = {"--enable-attention-output",
                              "--no-enable-prefix-caching", "--lora-modules",
                              absl::StrCat("verse=", *directory_, "/verse")}});
    ASSERT_TRUE(cluster_->Start().ok());
  }
  static void TearDownTestSuite() {
    EXPECT_EQ(cluster_->WhatIsLeft(), "");
    delete cluster_;
    std::filesystem::remove_all(*directory_);
    delete directory_;
  }

  // Standard error too, unless it is discarded.
  static Result Generate(const std::string& flags, const char* error = "&1") {
    return Shell(absl::StrCat(Tandem("generate --router 127.0.0.1:"),
                              cluster_->grpc_port(), " ", flags, " '",
                              kStoryOpening, "' 2>", error, " </dev/null"));
  }

  static std::string* directory_;
  static Cluster* cluster_;
};
std::string* GenerateFlagsTest::directory_;
Cluster* GenerateFlagsTest::cluster_;

TEST_F(GenerateFlagsTest, FlagsAreTheFieldsOfTheirNames) {
  const json plain = Seen(cluster_->Generate(Freely()));
  const std::string text = plain["text"];
  // Both are somewhere in the middle.
  const std::string stop = text.substr(text.size() / 3, 2);
  const uint32_t stop_id = plain["token_ids"][9];
  ASSERT_EQ(stop.find('\''), std::string::npos);
  using Request = v1::GenerateRequest;
  struct Case {
    std::string flags;
    std::function<void(Request*)> fields;
    const char* changes;    // what of the answer they change
    const char* text = "";  // a pattern, if it must match one
  };
  const Case cases[] = {
      {"--top-k 2", [](Request* r) { r->mutable_sampling()->set_top_k(2); },
       "token_ids"},
      {"--top-p 0.3",
       [](Request* r) { r->mutable_sampling()->set_top_p(0.3f); }, "token_ids"},
      {"--min-p 0.4",
       [](Request* r) { r->mutable_sampling()->set_min_p(0.4f); }, "token_ids"},
      {absl::StrCat("--stop '", stop, "'"),
       [&](Request* r) { r->mutable_stopping()->add_stop(stop); }, "text"},
      {absl::StrCat("--stop '", stop, "' --stop zzz --min-tokens 20"),
       [&](Request* r) {
         r->mutable_stopping()->add_stop(stop);
         r->mutable_stopping()->add_stop("zzz");
         r->mutable_stopping()->set_min_tokens(20);
       },
       ""},
      {absl::StrCat("--stop '", stop, "' --include-stop-str-in-output"),
       [&](Request* r) {
         r->mutable_stopping()->add_stop(stop);
         r->mutable_stopping()->set_include_stop_str_in_output(true);
       },
       "text"},
      {absl::StrCat("--stop-token-ids ", stop_id, ",1000"),
       [&](Request* r) {
         r->mutable_stopping()->add_stop_token_ids(stop_id);
         r->mutable_stopping()->add_stop_token_ids(1000);
       },
       "finish_reason"},
      {"--logprobs 2", [](Request* r) { r->mutable_output()->set_logprobs(2); },
       "logprobs"},
      {"--prompt-logprobs 3",
       [](Request* r) { r->mutable_output()->set_prompt_logprobs(3); },
       "prompt_logprobs"},
      {"--echo", [](Request* r) { r->mutable_output()->set_echo(true); },
       "text", "Once upon a time[^]*"},
      {"--attention all",
       [](Request* r) { r->mutable_output()->mutable_attention(); },
       "attention"},
      {"--attention mean",
       [](Request* r) {
         r->mutable_output()->mutable_attention()->set_mean(true);
       },
       "attention"},
      {"--attention 0,3,5",
       [](Request* r) {
         for (const int layer : {0, 3, 5}) {
           r->mutable_output()->mutable_attention()->add_layers(layer);
         }
       },
       "attention"},
      {"--no-kv-cache",
       [](Request* r) { r->mutable_cache()->set_no_kv_cache(true); },
       "positions"},
      {"--lora verse", [](Request* r) { r->set_adapter("verse"); },
       "token_ids"},
      {"--model verse", [](Request* r) { r->set_model("verse"); }, "token_ids"},
      {absl::StrCat("--json-schema '", kSchema, "'"),
       [](Request* r) { r->mutable_structured()->set_json_schema(kSchema); },
       "text", R"(\s*\{\s*"a"\s*:\s*(true|false)\s*\}\s*)"},
      {absl::StrCat("--json-schema-file ", *directory_, "/schema"),
       [](Request* r) { r->mutable_structured()->set_json_schema(kSchema); },
       "text", R"(\s*\{\s*"a"\s*:\s*(true|false)\s*\}\s*)"},
      {"--json-object",
       [](Request* r) { r->mutable_structured()->set_json_object(true); },
       "text", R"(\s*\{[^]*)"},
      {"--regex '[a-c]{4}'",
       [](Request* r) { r->mutable_structured()->set_regex("[a-c]{4}"); },
       "text", "[a-c]{4}"},
      {absl::StrCat("--grammar '", kGrammar, "'"),
       [](Request* r) { r->mutable_structured()->set_grammar(kGrammar); },
       "text", "to (be|do)"},
      {absl::StrCat("--grammar-file ", *directory_, "/grammar"),
       [](Request* r) { r->mutable_structured()->set_grammar(kGrammar); },
       "text", "to (be|do)"},
      {"--choice 'to be' --choice 'or not, to be'",
       [](Request* r) {
         auto* const choice = r->mutable_structured()->mutable_choice();
         choice->add_values("to be");
         choice->add_values("or not, to be");
       },
       "text", "to be|or not, to be"},
      {absl::StrCat("--structural-tag '", kTag, "'"),
       [](Request* r) { r->mutable_structured()->set_structural_tag(kTag); },
       "text"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.flags);
    Request request = Freely();
    c.fields(&request);
    // Under a constraint it would go on for as long as it can.
    const bool ignore_eos = !request.has_structured();
    request.mutable_stopping()->set_ignore_eos(ignore_eos);
    const Outcome outcome = cluster_->Generate(request);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    const Result result =
        Generate(absl::StrCat("--json ", kFreely,
                              ignore_eos ? " --ignore-eos " : " ", c.flags),
                 "/dev/null");
    ASSERT_EQ(result.code, 0) << result.output;
    json seen = Seen(outcome), printed = Printed(result.output);
    if (request.stopping().stop_size() > 0) {  // the workers may be told later
      seen.erase("positions");
      printed.erase("positions");
    }
    EXPECT_EQ(printed, seen);
    if (*c.changes != '\0') {
      EXPECT_NE(printed.value(c.changes, json()),
                plain.value(c.changes, json()))
          << "it changes nothing";
    }
    if (*c.text != '\0') {
      EXPECT_TRUE(std::regex_match(printed["text"].get<std::string>(),
                                   std::regex(c.text)))
          << printed["text"];
    }
  }
}

TEST_F(GenerateFlagsTest, LogprobsAreATableWithoutJson) {
  v1::GenerateRequest request = Freely();
  request.mutable_output()->set_logprobs(0);
  request.mutable_output()->set_prompt_logprobs(0);
  const Outcome outcome = cluster_->Generate(request);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  const int prompt = outcome.done.usage().prompt_tokens();
  const Result one = Generate(
      absl::StrCat(kFreely, " --ignore-eos --logprobs 2 --prompt-logprobs 2"),
      "/dev/null");
  ASSERT_EQ(one.code, 0);
  EXPECT_TRUE(one.output.starts_with(outcome.text + "\n")) << one.output;
  const auto row = [](int position, const v1::TokenLogprob& token) {
    return absl::StrFormat("%8d  %8d  %10.4f  %6d  ", position,
                           token.token_id(), token.logprob(), token.rank());
  };
  for (int i = 1; i < prompt; ++i) {
    EXPECT_THAT(one.output,
                HasSubstr(row(i, outcome.prompt_logprobs.tokens(i))));
  }
  const auto& tokens = outcome.sequences.at(0).logprobs();
  for (int i = 0; i < tokens.size(); ++i) {
    EXPECT_THAT(one.output, HasSubstr(row(prompt + i, tokens[i])));
  }
  // A table for each sequence, below its text.
  const Result two = Generate(
      absl::StrCat(kFreely, " --ignore-eos --n 2 --logprobs 0"), "/dev/null");
  ASSERT_EQ(two.code, 0);
  const size_t second = two.output.find("\n[1] ");
  ASSERT_NE(second, std::string::npos) << two.output;
  EXPECT_TRUE(two.output.starts_with("[0] " + outcome.text + "\n"));
  EXPECT_LT(two.output.find("perplexity"), second);
  EXPECT_GT(two.output.rfind("perplexity"), second);
}

TEST_F(GenerateFlagsTest, WhatExcludesEachOtherIsRefusedByName) {
  struct Case {
    const char* flags;
    int code;
    std::vector<std::string> says;
  };
  const Case cases[] = {
      {"--attention all", 2, {"--attention", "give --json as well"}},
      {"--system Hi", 2, {"--system", "give --chat as well"}},
      {"--json --attention first", 2, {"--attention: 'first'", "mean"}},
      {"--regex a --choice b", 2, {"--regex and --choice exclude each other"}},
      {"--json-schema {} --grammar-file g",
       2,
       {"--json-schema and --grammar-file exclude each other"}},
      {"--grammar-file /no/such", 1, {"cannot read /no/such"}},
      {"--stop-token-ids the", 2, {"--stop-token-ids: 'the' is no token id"}},
      {"--json --attention 9", 2, {"--attention = 9", "0..5"}},
      {"--json --attention all --beam-width 2",
       2,
       {"--attention", "excludes --beam-width"}},
      {"--json --attention all --stop x",
       2,
       {"--attention", "excludes strings in --stop"}},
      {"--json --attention all --best-of 2",
       2,
       {"--attention", "excludes a --best-of above --n"}},
      {"--beam-width 2 --top-k 5", 2, {"--top-k", "excludes --beam-width"}},
      {"--beam-width 2 --stop x", 2, {"--stop", "excludes --beam-width"}},
      {"--beam-width 2 --no-kv-cache",
       2,
       {"--no-kv-cache", "excludes --beam-width"}},
      {"--beam-width 2 --prompt-logprobs 0",
       2,
       {"--prompt-logprobs", "excludes --beam-width"}},
      {"--beam-width 2 --regex a", 2, {"--regex", "excludes --beam-width"}},
      {"--beam-width 2 --n 3", 2, {"--n = 3", "at most --beam-width, 2"}},
      {"--n 3 --best-of 2", 2, {"--best-of = 2", "3..32"}},
      {"--n 2 --temperature 0",
       2,
       {"--n = 2", "needs a --temperature above 0"}},
      {"--max-tokens 0", 2, {"--max-tokens = 0", "without --prompt-logprobs"}},
      {"--max-tokens 0 --prompt-logprobs 0 --n 2",
       2,
       {"--max-tokens = 0", "excludes a --n above 1"}},
      {"--max-tokens 0 --prompt-logprobs 0 --regex a",
       2,
       {"--regex", "excludes --max-tokens = 0"}},
      {"--max-tokens -5", 2, {"error: --max-tokens = -5: must be in 1.."}},
      {"--max-tokens 4294967297", 2, {"--max-tokens", "'4294967297'"}},
      {"--min-tokens 4294967296", 2, {"--min-tokens", "'4294967296'"}},
      {"--top-k 4294967297", 2, {"--top-k", "'4294967297'"}},
      {"--max-time 1e12", 2, {"--max-time", "'1e12'"}},
      {"--max-tokens 8 --min-tokens 9", 2, {"--min-tokens = 9"}},
      {"--allowed-token-ids 40 --banned-token-ids 40",
       2,
       {"--allowed-token-ids", "no token is left by --banned-token-ids"}},
      {"--lora nobody", 1, {"adapter = nobody", "there are verse"}},
      {"--lora verse --model prose", 1, {"prose"}},
  };
  for (const Case& c : cases) {
    const Result result = Generate(c.flags);
    EXPECT_EQ(result.code, c.code) << c.flags << ": " << result.output;
    for (const std::string& part : c.says) {
      EXPECT_THAT(result.output, HasSubstr(part)) << c.flags;
    }
  }
}

}  // namespace
}  // namespace tandem::integration
