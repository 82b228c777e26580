// SPDX-License-Identifier: Apache-2.0
// Each field of a request, found by its descriptor, at its bounds, beyond them
// and at what no bound foresees: accepted, or refused with the status that
// names it. A field that has no row in the table fails. Then messages that
// were changed at random, and what workers should never say to a router.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/random.h"
#include "google/protobuf/stubs/logging.h"
#include "google/protobuf/text_format.h"
#include "tests/hostile_messages.h"
#include "tests/router/front.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

const Front& TheFront() {
  static const auto* const front = new Front();
  return *front;
}

v1::GenerateRequest Parse(const std::string& text) {
  v1::GenerateRequest request;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &request))
      << text;
  return request;
}

// ---- Values

// One value of a field, and whether it is accepted.
struct Probe {
  std::string what;
  std::function<void(Message*, const Reflection*, const FieldDescriptor*)> set;
  bool good = false;
};
using Probes = std::vector<Probe>;

void SetNumber(Message* m, const Reflection* r, const FieldDescriptor* f,
               double value, bool add) {
  switch (f->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return add ? r->AddInt32(m, f, static_cast<int32_t>(value))
                 : r->SetInt32(m, f, static_cast<int32_t>(value));
    case FieldDescriptor::CPPTYPE_UINT32:
      return add ? r->AddUInt32(m, f, static_cast<uint32_t>(value))
                 : r->SetUInt32(m, f, static_cast<uint32_t>(value));
    case FieldDescriptor::CPPTYPE_INT64:
      return r->SetInt64(m, f, static_cast<int64_t>(value));
    case FieldDescriptor::CPPTYPE_UINT64:
      return r->SetUInt64(m, f, static_cast<uint64_t>(value));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return r->SetFloat(m, f, static_cast<float>(value));
    case FieldDescriptor::CPPTYPE_ENUM:
      return r->SetEnumValue(m, f, static_cast<int>(value));
    default:
      FAIL() << f->full_name();
  }
}

Probe Number(double value, bool good, bool add = false) {
  return {absl::StrCat(value),
          [=](Message* m, const Reflection* r, const FieldDescriptor* f) {
            SetNumber(m, r, f, value, add);
          },
          good};
}

// [low, high] of an integer of 32 bits.
Probes Whole(int64_t low, int64_t high,
             int64_t least = std::numeric_limits<int32_t>::min(),
             int64_t most = std::numeric_limits<int32_t>::max(),
             bool add = false) {
  std::set<int64_t> values = {low, high,      least,    most,    0,
                              1,   least + 1, most - 1, most / 2};
  if (low > least) values.insert(low - 1);
  if (high < most) values.insert(high + 1);
  if (least < 0) values.insert(-1);
  Probes probes;
  for (const int64_t value : values) {
    probes.push_back(
        Number(static_cast<double>(value), value >= low && value <= high, add));
  }
  return probes;
}
Probes Unsigned(uint32_t high, bool add = true) {
  return Whole(0, high, 0, std::numeric_limits<uint32_t>::max(), add);
}

// [low, high], or above low.
Probes Real(float low, float high, bool open = false) {
  const float kInfinity = std::numeric_limits<float>::infinity();
  Probes probes;
  for (const float value :
       {low, high, std::nextafter(low, -kInfinity),
        std::nextafter(low, kInfinity), std::nextafter(high, kInfinity),
        std::nextafter(high, -kInfinity), (low + high) / 2, 0.0f, -0.0f,
        std::numeric_limits<float>::denorm_min(), 1e30f, -1e30f, kInfinity,
        -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    probes.push_back(
        Number(value, (open ? value > low : value >= low) && value <= high));
  }
  return probes;
}

Probe Text(const std::string& value, bool good, const std::string& what = "") {
  return {what.empty() ? value : what,
          [=](Message* m, const Reflection* r, const FieldDescriptor* f) {
            f->is_repeated() ? r->AddString(m, f, value)
                             : r->SetString(m, f, value);
          },
          good};
}
// Of so many bytes; `any`: of all bytes but what is no UTF-8, which gRPC and
// JSON refuse before.
Probes Bytes(size_t least, size_t most, bool any, bool one_mib = false) {
  Probes probes;
  const std::set<size_t> sizes = {0, 1, least, most, most + 1, 1 << 20};
  for (const size_t size : sizes) {
    const bool good =
        size >= least && size <= most && (size < (1 << 20) || one_mib);
    probes.push_back(
        Text(std::string(size, 'a'), good, absl::StrCat(size, " bytes")));
  }
  const bool fits = most >= 2;
  probes.push_back(Text(std::string("a\0", 2), any && fits, "NUL"));
  probes.push_back(Text("\n\x7f", any && fits, "control characters"));
  probes.push_back(Text("\xc3\xa9", any && fits, "not ASCII"));
  return probes;
}

Probes Flag(bool may_be_false = true, bool may_be_true = true) {
  Probes probes;
  for (const bool value : {false, true}) {
    probes.push_back(
        {value ? "true" : "false",
         [=](Message* m, const Reflection* r, const FieldDescriptor* f) {
           r->SetBool(m, f, value);
         },
         value ? may_be_true : may_be_false});
  }
  return probes;
}

// So many more elements of the list, each of `value`.
Probes Count(int most, const std::function<void(Message*, const Reflection*,
                                                const FieldDescriptor*)>& add) {
  Probes probes;
  for (const int count : {most, most + 1, 100'000}) {
    probes.push_back(
        {absl::StrCat(count, " elements"),
         [=](Message* m, const Reflection* r, const FieldDescriptor* f) {
           r->ClearField(m, f);
           for (int i = 0; i < count; ++i) add(m, r, f);
         },
         count <= most});
  }
  return probes;
}
Probes Ids(int most) {
  Probes probes = Unsigned(static_cast<uint32_t>(TheFront().vocabulary() - 1));
  for (Probe& probe :
       Count(most, [](Message*m, const Reflection*r, const FieldDescriptor*f) {
         r->AddUInt32(m, f, 7);
       })) {
    probes.push_back(std::move(probe));
  }
  return probes;
}
Probes Texts(size_t least, size_t bytes, int most) {
  Probes probes = Bytes(least, bytes, /*any=*/true);
  for (Probe& probe :
       Count(most, [](Message*m, const Reflection*r, const FieldDescriptor*f) {
         r->AddString(m, f, "a");
       })) {
    probes.push_back(std::move(probe));
  }
  return probes;
}

Probes operator+(Probes a, const Probes& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// ---- The table

struct Row {
  std::string path;  // from the request, elements of lists not numbered
  std::string base;  // a good request, in protobuf's text format
  Probes probes;
  std::string field = {};  // that the refusal names, if not the path
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

constexpr char kText[] = "text: 'Once' ";
constexpr char kUser[] = "role: 'user' content: 'x'";
std::string Chat(const std::string& rest) {
  return absl::StrCat("chat { ", rest, " }");
}
std::string Tools(const std::string& tool) {
  return Chat(absl::StrCat("messages { ", kUser, " } tools { ", tool, " }"));
}
std::string Called(const std::string& call, const std::string& rest = "") {
  return Chat(absl::StrCat("messages { ", kUser,
                           " } messages { role: 'assistant' tool_calls { ",
                           call, " } } ", rest));
}

constexpr int kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int kMinInt = std::numeric_limits<int32_t>::min();
// No bound of its own: what does not fit the context is refused by that.
constexpr size_t kAnything = 100;

std::vector<Row> Table() {
  const auto top = static_cast<uint32_t>(TheFront().vocabulary() - 1);
  const std::string chat = Chat(absl::StrCat("messages { ", kUser, " }"));
  const std::string good_call = "id: 'c' name: 'f' arguments_json: '{}'";
  const Probes any_text = {Text("", true), Text("a b", true),
                           Text("\xc3\xa9\n", true),
                           Text(std::string(kAnything, ' '), true, "spaces")};
  const Probes structured = {
      Text("a", true), Text("{", true),
      Text(std::string(256 << 10, 'a'), true, "256 KiB"),
      Text(std::string((256 << 10) + 1, 'a'), false, "256 KiB and one"),
      Text(std::string(1 << 20, 'a'), false, "1 MiB")};
  const Probes names =
      Bytes(1, 64, false) + Probes{Text("get_weather-2", true),
                                   Text("a.b", false), Text("a b", false)};
  return {
      {"request_id", kText, Bytes(0, 128, false)},
      {"model", kText, {Text("", true), Text("m", true)}},
      {"model",
       kText,
       {Text("M", false), Text("m\n", false),
        Text(std::string(64, 'a'), false)},
       "model",
       absl::StatusCode::kNotFound},
      {"text", kText, any_text},
      {"text",
       kText,
       {Text(std::string(1 << 20, 'a'), false, "1 MiB")},
       "prompt"},
      {"token_ids.ids", "token_ids { ids: 5 }", Unsigned(top)},
      {"token_ids.ids", "token_ids { ids: 5 }",
       Count(Front::kContext - 1,
             [](Message* m, const Reflection* r, const FieldDescriptor* f) {
               r->AddUInt32(m, f, 7);
             }),
       "prompt"},
      {"chat.messages.role",
       chat,
       {Text("", false), Text("user", true), Text("assistant", true)}},
      {"chat.messages.content", chat, any_text},
      {"chat.messages.parts.text",
       Chat("messages { role: 'user' parts { text: 'x' } }"), any_text},
      {"chat.messages.name", chat, any_text},
      {"chat.messages.tool_calls.id", Called(good_call), Bytes(1, 128, false),
       "chat.messages[1].tool_calls[0].id"},
      {"chat.messages.tool_calls.name", Called(good_call), names,
       "chat.messages[1].tool_calls[0].name"},
      {"chat.messages.tool_calls.arguments_json",
       Called(good_call),
       {Text("", true), Text("{}", true), Text(R"({"a": [1, null]})", true),
        Text("[]", false), Text("{", false), Text("{} {}", false),
        Text("{\"a\": nan}", false),
        Text(absl::StrCat("{\"a\":", std::string(100, '['),
                          std::string(100, ']'), "}"),
             false, "deep")},
       "chat.messages[1].tool_calls[0].arguments_json"},
      {"chat.messages.tool_call_id",
       Called(good_call, "messages { role: 'tool' tool_call_id: 'c' }"),
       {Text("", false), Text("c", true), Text("d", false),
        Text(std::string(1 << 16, 'c'), false, "64 KiB")},
       "chat.messages[2].tool_call_id"},
      {"chat.messages.reasoning_content", chat, any_text},
      {"chat.tools.name", Tools("name: 'f'"), names, "chat.tools[0].name"},
      {"chat.tools.description",
       Tools("name: 'f'"),
       {Text("", true), Text("d", true)}},
      {"chat.tools.description",
       Tools("name: 'f'"),
       {Text(std::string(1 << 20, 'd'), false, "1 MiB")},
       "chat.tools"},
      {"chat.tools.parameters_json_schema",
       Tools("name: 'f'"),
       {Text("", true), Text("{}", true), Text("[]", false), Text("{", false),
        Text(" ", false), Text("{}x", false)},
       "chat.tools[0].parameters_json_schema"},
      {"chat.tools.strict", Tools("name: 'f'"), Flag()},
      {"chat.tool_choice",
       Tools("name: 'f'"),
       {Text("auto", true), Text("none", true), Text("required", true),
        Text("", false), Text("any", false),
        Text(std::string(1 << 20, 'a'), false, "1 MiB")}},
      {"chat.tool_choice_function",
       Tools("name: 'f'"),
       {Text("f", true), Text("g", false), Text("", false)}},
      {"chat.parallel_tool_calls", Tools("name: 'f'"), Flag()},
      {"chat.add_generation_prompt", chat, Flag()},
      {"chat.continue_final_message", chat, Flag()},
      {"chat.chat_template_kwargs", chat, {}},  // of any values
      {"sampling.temperature", kText, Real(0, 2)},
      {"sampling.top_p", kText, Real(0, 1, /*open=*/true)},
      {"sampling.top_k", kText, Whole(-1, TheFront().vocabulary())},
      {"sampling.min_p", kText, Real(0, 1)},
      {"sampling.seed",
       kText,
       {Number(0, true), Number(1, true), Number(0x1p63, true)}},
      {"sampling.n", "text: 'x' sampling { temperature: 1 }", Whole(1, 32)},
      {"sampling.best_of", "text: 'x' sampling { temperature: 1 n: 3 }",
       Whole(3, 32)},
      {"sampling.frequency_penalty", kText, Real(-2, 2)},
      {"sampling.presence_penalty", kText, Real(-2, 2)},
      {"sampling.repetition_penalty", kText, Real(0, 2, /*open=*/true)},
      {"sampling.typical_p", kText, Real(0, 1, /*open=*/true)},
      {"sampling.logit_bias.key",
       "text: 'x' sampling { logit_bias { key: 1 value: 1 } }",
       Unsigned(top, /*add=*/false), "sampling.logit_bias"},
      {"sampling.logit_bias.value",
       "text: 'x' sampling { logit_bias { key: 1 value: 1 } }", Real(-100, 100),
       "sampling.logit_bias"},
      {"sampling.allowed_token_ids", kText, Ids(1024)},
      {"sampling.banned_token_ids", kText, Ids(1024)},
      {"sampling.bad_words", kText, Texts(1, 64, 64)},
      {"stopping.max_tokens",
       "token_ids { ids: 5 }",
       {Number(1, true), Number(Front::kContext - 1, true), Number(0, false),
        Number(-1, false), Number(Front::kContext + 1, false),
        Number(kMaxInt, false), Number(kMinInt, false)}},
      {"stopping.max_tokens",
       "token_ids { ids: 5 }",
       {Number(Front::kContext, false)},
       "prompt"},
      {"stopping.min_tokens", "text: 'x' stopping { max_tokens: 9 }",
       Whole(0, 9)},
      {"stopping.stop", kText, Texts(1, 256, 32)},
      {"stopping.stop_token_ids", kText, Ids(64)},
      {"stopping.ignore_eos", kText, Flag()},
      {"stopping.include_stop_str_in_output", kText, Flag()},
      {"stopping.max_time.seconds",
       "text: 'x' stopping { max_time { } }",
       {Number(1, true), Number(3600, true), Number(3601, false),
        Number(0, false), Number(-1, false), Number(0x1p62, false),
        Number(-0x1p62, false)},
       "stopping.max_time"},
      {"stopping.max_time.nanos", "text: 'x' stopping { max_time { } }",
       Whole(1, 999'999'999), "stopping.max_time"},
      {"output.logprobs", kText, Whole(0, 20)},
      {"output.prompt_logprobs", kText, Whole(0, 20)},
      {"output.echo", kText, Flag()},
      {"output.skip_special_tokens", kText, Flag()},
      {"output.return_token_ids", kText, Flag()},
      {"output.text", kText, Flag()},
      {"output.attention.layers",
       kText,
       {Number(0, false, true), Number(-1, false, true),
        Number(kMaxInt, false, true)},
       "output.attention"},  // not offered here
      {"output.attention.mean", kText, Flag(false, false), "output.attention"},
      {"output.work", kText, Flag()},
      {"structured.json_schema", kText, structured},
      {"structured.json_object", kText, Flag(false, true)},
      {"structured.regex", kText, structured},
      {"structured.grammar", kText, structured},
      {"structured.structural_tag", kText, structured},
      {"structured.choice.values",
       kText,
       {Text("a", true), Text("", true),
        Text(std::string(1 << 20, 'a'), false, "1 MiB")},
       "structured.choice"},
      {"placement",
       kText,
       {Number(-1, false), Number(0, true), Number(1, true), Number(2, true),
        Number(3, true), Number(4, false), Number(kMaxInt, false),
        Number(kMinInt, false)}},
      {"cache.cache_salt", kText, Bytes(0, 64, true)},
      {"cache.bypass_prefix_cache", kText, Flag()},
      {"cache.no_kv_cache", kText, Flag(true, false)},  // not offered here
      {"priority", kText, Whole(kMinInt, kMaxInt)},
      {"beam.width", kText,
       Whole(1, kMaxBeamCandidates - TheFront().end_tokens())},
      {"beam.length_penalty", "text: 'x' beam { width: 2 }", Real(-10, 10)},
      {"beam.early_stopping",
       "text: 'x' beam { width: 2 }",
       {Number(-1, false), Number(0, true), Number(1, true), Number(2, true),
        Number(3, false), Number(kMaxInt, false)}},
      // While no decode worker is there its adapters are not known.
      {"adapter", kText, Bytes(0, 64, true)},
      {"add_special_tokens", kText, Flag()},
  };
}

// ---- The walk

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

// The message that holds the path's last field; of lists the last element.
std::pair<Message*, const FieldDescriptor*> Find(Message* message,
                                                 const std::string& path) {
  const std::vector<std::string> names = absl::StrSplit(path, '.');
  for (size_t i = 0;; ++i) {
    const auto* const field =
        message->GetDescriptor()->FindFieldByName(names[i]);
    if (field == nullptr || i + 1 == names.size()) return {message, field};
    const Reflection* const r = message->GetReflection();
    const int size = field->is_repeated() ? r->FieldSize(*message, field) : 0;
    message = !field->is_repeated() ? r->MutableMessage(message, field)
              : size > 0 ? r->MutableRepeatedMessage(message, field, size - 1)
                         : r->AddMessage(message, field);
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
    ASSERT_TRUE(TheFront().Prepare(Parse(row.base)).ok() ||
                absl::StartsWith(row.path, "stopping.max_time"))
        << row.path << ": " << TheFront().Prepare(Parse(row.base)).status();
    for (const Probe& probe : row.probes) {
      SCOPED_TRACE(absl::StrCat(row.path, " = ", probe.what.substr(0, 80)));
      v1::GenerateRequest request = Parse(row.base);
      const auto [message, field] = Find(&request, row.path);
      probe.set(message, message->GetReflection(), field);
      const auto admitted = TheFront().Prepare(request);
      ++cases;
      EXPECT_EQ(admitted.ok(), probe.good) << admitted.status();
      if (admitted.ok()) {
        EXPECT_EQ(TheFront().WhatIsWrong(*admitted), "");
        continue;
      }
      ++refused;
      EXPECT_EQ(admitted.status().code(), row.code);
      EXPECT_EQ(WhatIsWrongWithRefusal(admitted.status()), "");
      if (row.code != absl::StatusCode::kInvalidArgument) continue;
      EXPECT_EQ(ErrorMetadata(admitted.status())["field"],
                row.field.empty() ? row.path : row.field)
          << admitted.status();
      // The next good one is served.
      EXPECT_TRUE(TheFront().Prepare(Parse(kText)).ok());
    }
  }
  EXPECT_GE(cases, 400);
  RecordProperty("cases", cases);
  RecordProperty("refused", refused);
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
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
  constexpr int kMessages = 10'000;
#else
  constexpr int kMessages = 100'000;
#endif
#else
  constexpr int kMessages = 100'000;
#endif
  std::vector<std::string> good;
  for (const Row& row : Table())
    good.push_back(Parse(row.base).SerializeAsString());
  for (const char* const text :
       {"text: 'Once upon a time' sampling { temperature: 0.7 top_p: 0.9 "
        "top_k: 5 n: 2 seed: 3 logit_bias { key: 3 value: -1 } bad_words: 'a' }"
        " stopping { max_tokens: 5 stop: 'x' } output { logprobs: 2 }",
        "text: 'x' structured { regex: 'a+' } priority: 3 placement: 2",
        "chat { messages { role: 'user' parts { text: 'hi' } } "
        "chat_template_kwargs { fields { key: 'a' value { list_value { values "
        "{ number_value: 1 } } } } } }"}) {
    good.push_back(Parse(text).SerializeAsString());
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
  EXPECT_TRUE(TheFront().Prepare(Parse(kText)).ok());
  EXPECT_GT(parsed, kMessages / 4);
  EXPECT_GT(admitted, kMessages / 20);
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

template <typename Response, typename Pipes>
void TellEverything(const std::vector<Response>& good, bool prefill,
                    Pipes World::*pipes, int* told) {
  for (const Response& one : good) {
    tandem::testing::HostileField::ForEach(
        one, [&](const Message& message, const std::string& what) {
          World world;
          ++*told;
          world.Decode("d");
          if (prefill) world.Prefill("p");
          const ClientPipe* const client = world.Submit(World::Ask());
          world.Settle();
          if (prefill) {
            ASSERT_EQ(world.decodes.size(), 1u);
            world.decodes.back().Say(World::Opened(1, "t"));
            world.Settle();
          }
          ASSERT_FALSE((world.*pipes).empty()) << what;
          (world.*pipes).back().Say(static_cast<const Response&>(message));
          world.Settle();
          world.core->State(/*include_requests=*/true);
          for (const v1::GenerateResponse& event : client->sent) {
            ASSERT_LE(event.delta().token_ids_size(), 8) << what;
          }
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
      {},
      {}};
  decode[5].mutable_hypothesis()->add_tokens()->set_token_id(3);
  decode[6].mutable_scores()->set_position(1);
  int told = 0;
  TellEverything(decode, false, &World::decodes, &told);
  std::vector<v1::PrefillResponse> prefill = {
      World::Computing(), World::First(40, 3), World::Done(), {}};
  prefill[3].mutable_scores()->set_position(1);
  TellEverything(prefill, true, &World::prefills, &told);
  EXPECT_GE(told, 400);
}

}  // namespace
}  // namespace tandem::router
