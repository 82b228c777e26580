// SPDX-License-Identifier: Apache-2.0
#include "tests/router/validate/bad_requests.h"

#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"
#include "router/validate/validate.h"

namespace tandem::router {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

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
  std::set<int64_t> values = {low, high,      least,    most,     0,
                              1,   least + 1, most - 1, most / 2, least / 2};
  for (const int64_t beyond : {1, 2, 1000}) {
    if (low - beyond >= least) values.insert(low - beyond);
    if (high + beyond <= most) values.insert(high + beyond);
  }
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
  for (const float value : {low,
                            high,
                            std::nextafter(low, -kInfinity),
                            std::nextafter(low, kInfinity),
                            std::nextafter(high, kInfinity),
                            std::nextafter(high, -kInfinity),
                            (low + high) / 2,
                            0.0f,
                            -0.0f,
                            std::numeric_limits<float>::denorm_min(),
                            low - 1,
                            high + 1,
                            low - 1000,
                            2 * high + 1,
                            std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::lowest(),
                            1e30f,
                            -1e30f,
                            kInfinity,
                            -kInfinity,
                            std::numeric_limits<float>::quiet_NaN()}) {
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
  const std::set<size_t> sizes = {0,        1,        least,   most,
                                  most + 1, 2 * most, 1 << 16, 1 << 20};
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
  probes.push_back(Text("a\tb", any && most >= 3, "a tab"));
  probes.push_back(Text("\x1b[0m", any && most >= 4, "an escape sequence"));
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
  for (const int count : {most, most + 1, 2 * most, 100'000}) {
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
Probes Ids(uint32_t top, int most) {
  Probes probes = Unsigned(top);
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

constexpr const char* kText = kGoodRequest;
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

}  // namespace

std::vector<Row> BadRequests(const Served& served) {
  const auto top = static_cast<uint32_t>(served.vocabulary - 1);
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
      // While no decode worker is there its adapters are not known.
      {"model", kText, Bytes(0, 64, true) + Probes{Text("m", true)}, "model",
       absl::StatusCode::kNotFound},
      {"text", kText, any_text},
      {"text",
       kText,
       {Text(std::string(1 << 20, 'a'), false, "1 MiB")},
       "prompt"},
      {"token_ids.ids", "token_ids { ids: 5 }", Unsigned(top)},
      {"token_ids.ids", "token_ids { ids: 5 }",
       Count(served.context - 1,
             [](Message* m, const Reflection* r, const FieldDescriptor* f) {
               r->AddUInt32(m, f, 7);
             }),
       "prompt"},
      {"chat.messages.role",
       chat,
       {Text("", false), Text("user", true), Text("assistant", true)},
       "chat.messages[0].role"},
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
        Text("null", false), Text("1", false), Text("\"a\"", false),
        Text("{'a': 1}", false), Text("{\"a\": 1,}", false),
        Text("{\"a\" 1}", false), Text("{\"a\": 01}", false),
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
        Text(" ", false), Text("{}x", false), Text("1", false),
        Text("\"a\"", false), Text("{,}", false), Text("[{}]", false)},
       "chat.tools[0].parameters_json_schema"},
      {"chat.tools.strict", Tools("name: 'f'"), Flag()},
      {"chat.tool_choice",
       Tools("name: 'f'"),
       {Text("auto", true), Text("none", true), Text("required", true),
        Text("", false), Text("any", false), Text("AUTO", false),
        Text("auto ", false), Text("f", false),
        Text(std::string(1 << 20, 'a'), false, "1 MiB")}},
      {"chat.tool_choice_function",
       Tools("name: 'f'"),
       {Text("f", true), Text("g", false), Text("F", false), Text("f ", false),
        Text("", false)}},
      {"chat.parallel_tool_calls", Tools("name: 'f'"), Flag()},
      {"chat.add_generation_prompt", chat, Flag()},
      {"chat.continue_final_message", chat, Flag()},
      {"chat.chat_template_kwargs", chat, {}},  // of any values
      {"sampling.temperature", kText, Real(0, 2)},
      {"sampling.top_p", kText, Real(0, 1, /*open=*/true)},
      {"sampling.top_k", kText, Whole(-1, served.vocabulary)},
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
      {"sampling.allowed_token_ids", kText, Ids(top, 1024)},
      {"sampling.banned_token_ids", kText, Ids(top, 1024)},
      {"sampling.bad_words", kText, Texts(1, 64, 64)},
      {"stopping.max_tokens",
       "token_ids { ids: 5 }",
       {Number(1, true), Number(served.context - 1, true), Number(0, false),
        Number(-1, false), Number(-2, false), Number(served.context + 1, false),
        Number(served.context + 2, false), Number(2 * served.context, false),
        Number(1 << 20, false), Number(kMaxInt, false),
        Number(kMinInt, false)}},
      {"stopping.max_tokens",
       "token_ids { ids: 5 }",
       {Number(served.context, false)},
       "prompt"},
      {"stopping.min_tokens", "text: 'x' stopping { max_tokens: 9 }",
       Whole(0, 9)},
      {"stopping.stop", kText, Texts(1, 256, 32)},
      {"stopping.stop_token_ids", kText, Ids(top, 64)},
      {"stopping.ignore_eos", kText, Flag()},
      {"stopping.include_stop_str_in_output", kText, Flag()},
      {"stopping.max_time.seconds",
       "text: 'x' stopping { max_time { } }",
       {Number(1, true), Number(3600, true), Number(3601, false),
        Number(3602, false), Number(86400, false), Number(-3600, false),
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
       {Number(0, false, true), Number(-1, false, true), Number(1, false, true),
        Number(1000, false, true), Number(kMaxInt, false, true)},
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
        Number(3, true), Number(4, false), Number(5, false), Number(-2, false),
        Number(1000, false), Number(kMaxInt, false), Number(kMinInt, false)}},
      {"cache.cache_salt", kText, Bytes(0, 64, true)},
      {"cache.bypass_prefix_cache", kText, Flag()},
      {"cache.no_kv_cache", kText, Flag(true, false)},  // not offered here
      {"priority", kText, Whole(kMinInt, kMaxInt)},
      {"beam.width", kText, Whole(1, kMaxBeamCandidates - served.end_tokens)},
      {"beam.length_penalty", "text: 'x' beam { width: 2 }", Real(-10, 10)},
      {"beam.early_stopping",
       "text: 'x' beam { width: 2 }",
       {Number(-1, false), Number(0, true), Number(1, true), Number(2, true),
        Number(3, false), Number(4, false), Number(-2, false),
        Number(1000, false), Number(kMaxInt, false)}},
      {"adapter", kText, Bytes(0, 64, true)},  // as model
      {"add_special_tokens", kText, Flag()},
  };
}

v1::GenerateRequest RequestWith(const Row& row, const Probe& probe) {
  v1::GenerateRequest request = ParseRequest(row.base);
  const auto [message, field] = Find(&request, row.path);
  probe.set(message, message->GetReflection(), field);
  return request;
}

v1::GenerateRequest ParseRequest(const std::string& text) {
  v1::GenerateRequest request;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &request))
      << text;
  return request;
}

}  // namespace tandem::router
