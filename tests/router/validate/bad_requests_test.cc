// SPDX-License-Identifier: Apache-2.0
// Each field of a request at the values of bad_requests.h: accepted, or refused
// with the status that names it. A field that has no row there fails. Then
// messages that
// were changed at random, and what workers should never say to a router.

#include "tests/router/validate/bad_requests.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/random.h"
#include "engine/checkpoint/json.h"
#include "google/protobuf/stubs/logging.h"
#include "tests/hostile_messages.h"
#include "tests/inner_words.h"
#include "tests/router/front.h"
#include "tests/router/world.h"
#include "tests/sanitized.h"

namespace tandem::router {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

const Front& TheFront() {
  static const auto* const front = new Front();
  return *front;
}

std::vector<Row> Table() {
  return BadRequests({.vocabulary = TheFront().vocabulary(),
                      .context = Front::kContext,
                      .end_tokens = TheFront().end_tokens()});
}

// Every field that holds a value, by its path. Types that may hold themselves
// are one field.
void Paths(const google::protobuf::Descriptor* type, const std::string& path,
           std::set<std::string>* paths) {
  for (int i = 0; i < type->field_count(); ++i) {
    const FieldDescriptor* const field = type->field(i);
    const std::string name =
        path.empty() ? field->name() : absl::StrCat(path, ".", field->name());
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE ||
        field->message_type()->full_name() == "google.protobuf.Struct") {
      paths->insert(name);
    } else {
      Paths(field->message_type(), name, paths);
    }
  }
}

TEST(BadRequestsTest, EveryFieldHasItsRow) {
  std::set<std::string> there, rows;
  Paths(v1::GenerateRequest::descriptor(), "", &there);
  for (const Row& row : Table()) rows.insert(row.path);
  EXPECT_EQ(rows, there) << "a field without a row, or a row without a field";
}

TEST(BadRequestsTest, EveryValueIsAcceptedOrRefusedByName) {
  int cases = 0, refused = 0;
  for (const Row& row : Table()) {
    ASSERT_TRUE(TheFront().Prepare(ParseRequest(row.base)).ok() ||
                absl::StartsWith(row.path, "stopping.max_time"))
        << row.path << ": "
        << TheFront().Prepare(ParseRequest(row.base)).status();
    for (const Probe& probe : row.probes) {
      SCOPED_TRACE(absl::StrCat(row.path, " = ", probe.what.substr(0, 80)));
      const auto admitted = TheFront().Prepare(RequestWith(row, probe));
      ++cases;
      EXPECT_EQ(admitted.ok(), probe.good) << admitted.status();
      if (admitted.ok()) {
        EXPECT_EQ(TheFront().WhatIsWrong(*admitted), "");
        continue;
      }
      ++refused;
      EXPECT_EQ(admitted.status().code(), row.code);
      EXPECT_EQ(WhatIsWrongWithRefusal(admitted.status()), "");
      EXPECT_EQ(InnerWordIn(admitted.status()), "") << admitted.status();
      if (row.code != absl::StatusCode::kInvalidArgument) continue;
      EXPECT_EQ(ErrorMetadata(admitted.status())["field"],
                row.field.empty() ? row.path : row.field)
          << admitted.status();
      // The next good one is served.
      EXPECT_TRUE(TheFront().Prepare(ParseRequest(kGoodRequest)).ok());
    }
  }
  EXPECT_GE(cases, 600);
  EXPECT_GE(refused, 400);
  RecordProperty("cases", cases);
  RecordProperty("refused", refused);
}

// A body of so many levels.
absl::Status ParseNested(const char* open, const char* close, int levels) {
  std::string text = "1";
  for (int i = 0; i < levels; ++i) text = absl::StrCat(open, text, close);
  return engine::ParseJson("the body", text).status();
}

TEST(BadRequestsTest, BodiesNestToTheLimitAndNoFurther) {
  for (const auto& [open, close] : {std::pair("[", "]"), {"{\"a\":", "}"}}) {
    EXPECT_TRUE(ParseNested(open, close, engine::kMaxJsonDepth).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(
        ParseNested(open, close, engine::kMaxJsonDepth + 1)));
  }
}

// ---- Changed at random

std::string Changed(std::string bytes, const std::vector<std::string>& others,
                    Random* random) {
  const auto at = [&](size_t size) {
    return size == 0 ? 0 : static_cast<size_t>(random->Below(size));
  };
  for (uint64_t i = random->Below(3) + 1; i > 0; --i) {
    const std::string& other = others[at(others.size())];
    switch (random->Below(7)) {
      case 0:
        if (!bytes.empty()) bytes[at(bytes.size())] ^= 1 << random->Below(8);
        break;
      case 1:
        if (!bytes.empty()) {
          bytes[at(bytes.size())] = static_cast<char>(random->Next());
        }
        break;
      case 2:
        bytes.resize(at(bytes.size() + 1));
        break;
      case 3:  // one message's fields over another's
        bytes += other;
        break;
      case 4:
        bytes.insert(at(bytes.size() + 1), other.substr(at(other.size() + 1)));
        break;
      case 5:  // an unknown field
        bytes += absl::StrCat("\xfa\x3e\x05", random->Bytes(5));
        break;
      default:
        bytes.insert(at(bytes.size() + 1),
                     random->Bytes(static_cast<int>(random->Below(12))));
    }
  }
  return bytes;
}

TEST(BadRequestsTest, ChangedAtRandomTheyEndInAStatus) {
  constexpr int kMessages = kSanitized ? 10'000 : 100'000;
  std::vector<std::string> good;
  for (const Row& row : Table())
    good.push_back(ParseRequest(row.base).SerializeAsString());
  for (const char* const text :
       {"text: 'Once upon a time' sampling { temperature: 0.7 top_p: 0.9 "
        "top_k: 5 n: 2 seed: 3 logit_bias { key: 3 value: -1 } bad_words: 'a' }"
        " stopping { max_tokens: 5 stop: 'x' } output { logprobs: 2 }",
        "text: 'x' structured { regex: 'a+' } priority: 3 placement: 2",
        "chat { messages { role: 'user' parts { text: 'hi' } } "
        "chat_template_kwargs { fields { key: 'a' value { list_value { values "
        "{ number_value: 1 } } } } } }"}) {
    good.push_back(ParseRequest(text).SerializeAsString());
  }
  // It tells of each text that is no UTF-8.
  google::protobuf::SetLogHandler(nullptr);
  SeededRandom random(6);
  int parsed = 0, admitted = 0;
  for (int i = 0; i < kMessages; ++i) {
    const std::string bytes = Changed(
        good[static_cast<size_t>(random.Below(good.size()))], good, &random);
    v1::GenerateRequest request;
    if (!request.ParsePartialFromString(bytes)) continue;
    ++parsed;
    const auto prepared = TheFront().Prepare(request);
    admitted += prepared.ok() ? 1 : 0;
    const std::string wrong = prepared.ok()
                                  ? TheFront().WhatIsWrong(*prepared)
                                  : WhatIsWrongWithRefusal(prepared.status());
    ASSERT_EQ(wrong, "") << i << ": " << request.ShortDebugString();
  }
  EXPECT_TRUE(TheFront().Prepare(ParseRequest(kGoodRequest)).ok());
  EXPECT_GT(parsed, kMessages / 4);
  EXPECT_GT(admitted, kMessages / 20);
  RecordProperty("messages", kMessages);
  RecordProperty("parsed", parsed);
  RecordProperty("admitted", admitted);
}

// ---- What workers say

struct HostileWorkersTest : ::testing::Test {
  // A request that is served by a good pair as ever.
  static void ExpectServed(World* world) {
    world->Decode("good");
    const size_t calls = world->decodes.size();
    ClientPipe* const client = world->Submit(World::Ask({}, 2));
    world->Settle();
    ASSERT_GT(world->decodes.size(), calls);
    DecodePipe& decode = world->decodes.back();
    decode.Say(World::Opened(1, ""));
    decode.Say(World::Started(1));
    decode.Say(World::Tokens(40, {3, 4}));
    decode.Say(World::Finished(v1::FINISH_REASON_LENGTH));
    decode.Break(absl::OkStatus());
    world->Settle();
    EXPECT_EQ(World::Text(*client), "cd");
    EXPECT_TRUE(client->status.ok()) << client->status;
  }
};

TEST_F(HostileWorkersTest, RegistrationsEndTheirOwnLeaseAtMost) {
  std::vector<v1::RegisterRequest> good(5);
  *good[0].mutable_hello() = World::Hello("d", v1::WORKER_ROLE_DECODE);
  good[1].mutable_load()->set_state(v1::WORKER_STATE_READY);
  good[2].mutable_cache()->add_added(1);
  good[3].mutable_adapters()->add_adapters()->set_name("a");
  good[4].mutable_adapter_outcome()->set_command(1);
  int told = 0;
  for (const v1::RegisterRequest& one : good) {
    tandem::testing::HostileField::ForEach(one, [&](const Message& message,
                                                    const std::string& what) {
      World world;
      world.around_recorder = true;  // strings that no wire brings
      ++told;
      LeasePipe* lease = nullptr;
      if (one.has_hello()) {
        lease = &world.leases.emplace_back();
        world.core->AddRegistration(
            std::make_unique<
                FakeStream<v1::RegisterResponse, v1::RegisterRequest>>(lease));
      } else {
        lease = world.Decode("d");
      }
      lease->Say(static_cast<const v1::RegisterRequest&>(message));
      world.Settle();
      const ClientPipe* const early = world.Submit(World::Ask());
      world.Settle();
      world.core->State(/*include_requests=*/true);
      // Whoever has it by now may lose it.
      lease->Break(absl::UnavailableError("gone"));
      for (DecodePipe& pipe : world.decodes) {
        pipe.Break(absl::UnavailableError("gone"));
      }
      ASSERT_TRUE(early != nullptr) << what;
      world.core->CloseAll(absl::CancelledError("over"));
      world.Settle();
      ASSERT_TRUE(world.core->idle()) << what;
      if (told % 16 != 0) return;
      ASSERT_NO_FATAL_FAILURE(ExpectServed(&world)) << what;
    });
  }
  EXPECT_GE(told, 250);
}

constexpr int kVocabulary = 100;

// What comes to a client is what some good worker may have said.
void ExpectSound(const v1::GenerateResponse& event, const std::string& what) {
  for (const uint32_t id : event.delta().token_ids()) {
    EXPECT_LT(id, uint32_t{kVocabulary}) << what;
  }
  for (const v1::TokenLogprob& token : event.delta().logprobs()) {
    EXPECT_GE(token.rank(), 0) << what;
  }
  EXPECT_GE(event.started().cached_tokens(), 0) << what;
  EXPECT_LE(event.finished().finish_reason(), v1::FINISH_REASON_CANCELLED)
      << what;
  const v1::Usage& usage = event.done().usage();
  EXPECT_GE(usage.cached_tokens(), 0) << what;
  EXPECT_GE(usage.completion_tokens(), 0) << what;
  EXPECT_GE(usage.accepted_prediction_tokens(), 0) << what;
  EXPECT_GE(usage.rejected_prediction_tokens(), 0) << what;
  EXPECT_GE(event.done().work().kv_rows(), 0) << what;
  const v1::Timings& timings = event.done().timings();
  for (const auto& duration :
       {timings.queue(), timings.prefill(), timings.handoff(),
        timings.handoff_exposed(), timings.decode(), timings.total()}) {
    EXPECT_GE(duration.seconds(), 0) << what;
    EXPECT_LE(duration.seconds(), 31 * 24 * 3600) << what;
  }
}

// How far a request has come when a worker says what it should not.
enum class Stage { kOpening, kComputing, kDecoding, kSearching };

AdmittedRequest AskFor(Stage stage) {
  AdmittedRequest ask = World::Ask();
  if (stage == Stage::kSearching) {
    ask.effective.beam.emplace();
    ask.effective.beam->set_width(2);
  }
  if (stage == Stage::kComputing) {
    ask.effective.output.set_logprobs(1);
  }
  return ask;
}

v1::DecodeResponse Best() {
  v1::DecodeResponse best;
  best.mutable_hypothesis()->add_tokens()->set_token_id(3);
  best.mutable_hypothesis()->set_reason(v1::FINISH_REASON_LENGTH);
  return best;
}

void BringTo(Stage stage, World* world) {
  if (stage == Stage::kOpening) return;
  ASSERT_EQ(world->decodes.size(), 1u);
  world->decodes[0].Say(World::Opened(1, "t"));
  if (stage != Stage::kComputing) world->decodes[0].Say(World::Started(1));
}

// Says `message`, once the call has come so far, and goes on as a good worker:
// what was counted may come to the client with the end alone.
void Tell(const v1::DecodeResponse& message, Stage stage, World* world) {
  DecodePipe& pipe = world->decodes[0];
  if (stage == Stage::kSearching && message.has_finished()) pipe.Say(Best());
  pipe.Say(message);
  if (!pipe.dropped) pipe.Say(World::Finished(v1::FINISH_REASON_LENGTH));
}
void Tell(const v1::PrefillResponse& message, Stage, World* world) {
  PrefillPipe& pipe = world->prefills[0];
  if (!message.has_started()) pipe.Say(World::Computing());
  if (message.has_done()) pipe.Say(World::First(kPrompt, 3));
  pipe.Say(message);
  if (pipe.dropped || world->decodes[0].dropped) return;
  if (message.has_started()) pipe.Say(World::First(kPrompt, 3));
  world->decodes[0].Say(World::Started(1));
  world->decodes[0].Say(World::Finished(v1::FINISH_REASON_LENGTH));
}

template <typename Response>
void TellEverything(const std::vector<Response>& good, Stage stage, int* told) {
  for (const Response& one : good) {
    tandem::testing::HostileField::ForEach(
        one, [&](const Message& message, const std::string& what) {
          RouterOptions options;
          options.vocabulary = kVocabulary;
          World world(options);
          world.around_recorder = true;  // strings that no wire brings
          ++*told;
          world.Decode("d");
          if (stage == Stage::kComputing) world.Prefill("p");
          const ClientPipe* const client = world.Submit(AskFor(stage));
          world.Settle();
          ASSERT_NO_FATAL_FAILURE(BringTo(stage, &world)) << what;
          world.Settle();
          Tell(static_cast<const Response&>(message), stage, &world);
          world.RunFor(absl::Seconds(1));
          world.core->State(/*include_requests=*/true);
          int tokens = 0;
          for (const v1::GenerateResponse& event : client->sent) {
            tokens += event.delta().token_ids_size();
            ExpectSound(event, what);
          }
          ASSERT_LE(tokens, 8) << what;
          world.core->CloseAll(absl::CancelledError("over"));
          world.Settle();
          ASSERT_TRUE(world.core->idle()) << what;
        });
  }
}

TEST_F(HostileWorkersTest, CallsTellNothingThatIsPassedOnUnchecked) {
  std::vector<v1::DecodeResponse> decode = {
      World::Opened(1, "t"),
      World::Started(1),
      World::Dead(1, false),
      World::Tokens(40, {3}),
      World::Finished(v1::FINISH_REASON_LENGTH),
      Best(),
      {}};
  decode[6].mutable_scores()->set_position(1);
  int told = 0;
  for (const Stage stage :
       {Stage::kOpening, Stage::kDecoding, Stage::kSearching}) {
    TellEverything(decode, stage, &told);
  }
  std::vector<v1::PrefillResponse> prefill = {
      World::Computing(), World::First(40, 3), World::Done(), {}};
  prefill[3].mutable_scores()->set_position(1);
  TellEverything(prefill, Stage::kComputing, &told);
  EXPECT_GE(told, 800);
}

}  // namespace
}  // namespace tandem::router
