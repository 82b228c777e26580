// SPDX-License-Identifier: Apache-2.0
// Templates render as Python's Jinja2 renders them with the settings of
// `transformers`, and hostile ones end in a bounded error.

#include "text/chat_template.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "golden.h"
#include "gtest/gtest.h"

namespace tandem::text {
namespace {

// Keys keep their order, as templates see it.
using nlohmann::ordered_json;
using testing::HasSubstr;

constexpr char kUserMessage[] = R"([{"role": "user", "content": "Hi"}])";

// A model directory with this template in its config.
absl::StatusOr<ChatTemplate> FromConfig(const ordered_json& config,
                                        const ChatTemplateLimits& limits = {}) {
  ModelDir dir;
  dir.Write("tokenizer_config.json", config.dump());
  return ChatTemplate::Load(dir.path(), limits);
}

absl::StatusOr<std::string> RenderSource(const std::string& source) {
  auto chat = FromConfig({{"chat_template", source}});
  if (!chat.ok()) return chat.status();
  return chat->Render({.messages_json = kUserMessage});
}

TEST(ChatTemplateGoldenTest, RendersAsPythonDoes) {
  const ordered_json golden =
      ordered_json::parse(ReadWhole(GoldenPath("templates.json")));
  ASSERT_GT(golden["cases"].size(), 35u);
  for (const ordered_json& c : golden["cases"]) {
    SCOPED_TRACE(c["name"].get<std::string>());
    ordered_json config = golden["tokens"];
    config["chat_template"] = c["template"];
    auto chat = FromConfig(config);
    ASSERT_TRUE(chat.ok()) << chat.status();
    const std::string messages = c["messages"].dump();
    const std::string tools = c.contains("tools") ? c["tools"].dump() : "";
    const std::string extra = c.contains("extra") ? c["extra"].dump() : "";
    auto text = chat->Render({
        .messages_json = messages,
        .tools_json = tools,
        .extra_json = extra,
        .now_unix_s = golden["now_unix_s"].get<int64_t>(),
        .add_generation_prompt = c.value("add_generation_prompt", true),
        .continue_final_message = c.value("continue_final_message", false),
    });
    if (c.contains("refused")) {
      EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(text.status().message()),
                  HasSubstr(c["refused"].get<std::string>()));
      continue;
    }
    ASSERT_TRUE(text.ok()) << text.status();
    EXPECT_EQ(*text, c["expected"].get<std::string>());
  }
}

TEST(ChatTemplateTest, AJinjaFileGoesBeforeTheConfig) {
  ModelDir dir;
  dir.Write("tokenizer_config.json",
            R"({"chat_template": "config", "bos_token": "<s>"})");
  EXPECT_EQ(ChatTemplate::Load(dir.path())
                ->Render({.messages_json = kUserMessage})
                .value(),
            "config");
  dir.Write("chat_template.jinja", "{{ bos_token }}file\n");
  EXPECT_EQ(ChatTemplate::Load(dir.path())
                ->Render({.messages_json = kUserMessage})
                .value(),
            "<s>file");
}

TEST(ChatTemplateTest, TheFileOfModelsThatSeeIsReadWhereOthersAreSilent) {
  ModelDir dir;
  const auto rendered = [&] {
    return ChatTemplate::Load(dir.path())
        ->Render({.messages_json = kUserMessage})
        .value();
  };
  dir.Write("tokenizer_config.json",
            R"({"chat_template": null, "bos_token": "<s>"})");
  dir.Write("chat_template.json",
            R"({"chat_template": "{{ bos_token }}processor"})");
  EXPECT_EQ(rendered(), "<s>processor");
  dir.Write("tokenizer_config.json", R"({"chat_template": "config"})");
  EXPECT_EQ(rendered(), "config");
  dir.Write("tokenizer_config.json", "{}");
  for (const char* const broken :
       {R"({"chat_template": 1})", "[]", R"({"chat_template": "{% if %}"})"}) {
    dir.Write("chat_template.json", broken);
    EXPECT_THAT(std::string(ChatTemplate::Load(dir.path()).status().message()),
                HasSubstr("chat_template.json"))
        << broken;
  }
}

TEST(ChatTemplateTest, AdditionalTemplatesAreBesideTheDefault) {
  ModelDir dir;
  const std::string folder = dir.path() + "/additional_chat_templates";
  std::filesystem::create_directories(folder + "/folder.jinja");
  dir.Write("tokenizer_config.json", R"({"chat_template": "config"})");
  dir.Write("additional_chat_templates/tool_use.jinja",
            "tools: {{ tools|length }}");
  dir.Write("additional_chat_templates/README.md", "{% if %}");
  const auto rendered = [&](const std::string& tools) {
    return ChatTemplate::Load(dir.path())
        ->Render({.messages_json = kUserMessage, .tools_json = tools})
        .value();
  };
  EXPECT_EQ(rendered(""), "config");
  EXPECT_EQ(rendered("[{}]"), "tools: 1");
  dir.Write("chat_template.jinja", "file");
  EXPECT_EQ(rendered(""), "file");
  EXPECT_EQ(rendered("[{}]"), "tools: 1");
  dir.Write("own.jinja", "own");
  const auto own = ChatTemplate::Load(dir.path(), ChatTemplateLimits(),
                                      dir.path() + "/own.jinja");
  EXPECT_EQ(own->Source(true), "own");
  dir.Write("additional_chat_templates/rag.jinja", "{% if %}");
  EXPECT_THAT(std::string(ChatTemplate::Load(dir.path()).status().message()),
              HasSubstr(": additional_chat_templates/rag.jinja: "));
  for (int i = 0; i < 64; ++i) {
    dir.Write("additional_chat_templates/" + std::to_string(i) + ".jinja", "");
  }
  EXPECT_THAT(std::string(ChatTemplate::Load(dir.path()).status().message()),
              HasSubstr("more than 64 templates"));
}

TEST(ChatTemplateTest, AFileOfTheUsersGoesBeforeBoth) {
  ModelDir dir;
  dir.Write("tokenizer_config.json", R"({"bos_token": "<s>"})");
  dir.Write("chat_template.jinja", "model's");
  dir.Write("own.jinja", "{{ bos_token }}own: {{ messages[0].content }}");
  const ChatTemplateLimits limits;
  const auto own =
      ChatTemplate::Load(dir.path(), limits, dir.path() + "/own.jinja");
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_EQ(
      own->Render({.messages_json = R"([{"role": "user", "content": "Hi"}])"})
          .value(),
      "<s>own: Hi");
  dir.Write("own.jinja", "{% if %}");
  for (const char* const name : {"/own.jinja", "/none.jinja"}) {
    const absl::Status status =
        ChatTemplate::Load(dir.path(), limits, dir.path() + name).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr(name));
    EXPECT_EQ(absl::IsNotFound(status), std::string(name) == "/none.jinja");
  }
}

TEST(ChatTemplateTest, AModelWithoutATemplateIsNotFound) {
  ModelDir dir;
  EXPECT_EQ(ChatTemplate::Load(dir.path()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(FromConfig({{"chat_template", nullptr}}).status().code(),
            absl::StatusCode::kNotFound);
}

struct BrokenTemplate {
  std::string what;
  ordered_json chat_template;
  std::string message;
};

TEST(ChatTemplateTest, ABrokenTemplateIsALoadErrorThatNamesTheField) {
  const BrokenTemplate cases[] = {
      {"unclosed block", "{% for m in messages %}", "chat_template"},
      {"unclosed expression", "a\nb {{ x", "chat_template"},
      {"unknown tag", "{% frobnicate %}", "frobnicate"},
      {"line is named", "a\n\n{{ 1 + }}", "line 3"},
      {"a number", 5, "neither a string nor a list"},
      {"entry without name", ordered_json::array({{{"template", "x"}}}),
       "chat_template[0]"},
      {"entry is a string", ordered_json::array({"x"}), "chat_template[0]"},
      {"includes", "{% include 'x' %}", "include"},
      {"imports", "{% import 'x' as y %}", "import"},
      {"extends", "{% extends 'x' %}", "extends"},
      {"blocks", "{% block x %}{% endblock %}", "block"},
  };
  for (const BrokenTemplate& c : cases) {
    auto chat = FromConfig({{"chat_template", c.chat_template}});
    ASSERT_FALSE(chat.ok()) << c.what;
    EXPECT_EQ(chat.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(chat.status().message()), HasSubstr(c.message))
        << c.what;
    EXPECT_THAT(std::string(chat.status().message()),
                HasSubstr("tokenizer_config.json"))
        << c.what;
  }
}

TEST(ChatTemplateTest, AListWithoutDefaultIsRefusedWhenItIsNeeded) {
  auto chat = FromConfig(
      {{"chat_template",
        ordered_json::array({{{"name", "tool_use"}, {"template", "T"}}})}});
  ASSERT_TRUE(chat.ok()) << chat.status();
  EXPECT_EQ(chat->Render({.messages_json = kUserMessage,
                          .tools_json = R"([{"type": "function"}])"})
                .value(),
            "T");
  EXPECT_THAT(
      std::string(
          chat->Render({.messages_json = kUserMessage}).status().message()),
      HasSubstr("default"));
}

struct InputCase {
  std::string what;
  ChatTemplateInput input;
  std::string message;
};

TEST(ChatTemplateTest, WrongInputsAreRefusedByName) {
  auto chat = FromConfig({{"chat_template", "{{ messages[0].content }}"}});
  ASSERT_TRUE(chat.ok());
  const InputCase cases[] = {
      {"no JSON", {.messages_json = "hello"}, "messages: "},
      {"empty", {.messages_json = ""}, "messages: "},
      {"an object", {.messages_json = "{}"}, "messages: "},
      {"a list of strings", {.messages_json = R"(["x"])"}, "messages: "},
      {"not UTF-8", {.messages_json = "[\"\xFF\"]"}, "messages is not"},
      {"deep",
       {.messages_json = std::string_view(
            "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["
            "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["
            "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[")},
       "messages: "},
      {"tools are no list",
       {.messages_json = kUserMessage, .tools_json = "{}"},
       "tools: "},
      {"extra is no object",
       {.messages_json = kUserMessage, .extra_json = "[]"},
       "chat_template_kwargs: "},
      {"extra sets messages",
       {.messages_json = kUserMessage, .extra_json = R"({"messages": []})"},
       "\"messages\" cannot be set"},
      {"extra sets a token",
       {.messages_json = kUserMessage, .extra_json = R"({"bos_token": "x"})"},
       "\"bos_token\" cannot be set"},
      {"extra reaches for the sandbox",
       {.messages_json = kUserMessage, .extra_json = R"({"%check": 1})"},
       "\"%check\" cannot be set"},
      {"both ends",
       {.messages_json = kUserMessage, .continue_final_message = true},
       "continue_final_message: "},
      {"nothing to continue",
       {.messages_json = R"([{"role": "user"}])",
        .add_generation_prompt = false,
        .continue_final_message = true},
       "continue_final_message: "},
  };
  for (const InputCase& c : cases) {
    auto text = chat->Render(c.input);
    ASSERT_FALSE(text.ok()) << c.what;
    EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(text.status().message()), HasSubstr(c.message))
        << c.what;
  }
}

// An answer that has not begun goes on where it would begin.
TEST(ChatTemplateTest, ATemplateThatTrimsKeepsItsOwnSpacesInAnEmptyAnswer) {
  auto chat = FromConfig({{"chat_template",
                           "{% for m in messages %}<{{ m.role }}>\n"
                           "{{ m.content | trim }}<end>{% endfor %}"}});
  ASSERT_TRUE(chat.ok()) << chat.status();
  EXPECT_EQ(chat->Render({.messages_json =
                              R"([{"role": "assistant", "content": ""}])",
                          .add_generation_prompt = false,
                          .continue_final_message = true})
                .value(),
            "<assistant>\n");
}

std::string Repeat(const std::string& unit, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += unit;
  return out;
}

struct HostileTemplate {
  std::string what;
  std::string source;
};

// Each must end in an error, and the table as a whole in bounded memory.
std::vector<HostileTemplate> HostileTemplates() {
  const std::string loop = "{% for a in range(99999) %}";
  const std::string end = "{% endfor %}";
  const std::string ns = "{% set ns = namespace(x='ab', l=[]) %}";
  return {
      {"range of a billion", "{% for i in range(10**9) %}x{% endfor %}"},
      {"nested loops",
       loop + "{% for b in range(99999) %}{% set c = 1 %}" + end + end},
      {"endless text",
       loop + "{% for b in range(99999) %}xxxxxxxxxx" + end + end},
      {"recursion", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"},
      {"two macros",
       "{% macro f(x) %}{{ g(x) }}{% endmacro %}{% macro g(x) %}{{ f(x) }}"
       "{% endmacro %}{{ f(1) }}"},
      {"tree of macros",
       "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
       "{% endmacro %}{{ f(40) }}"},
      {"loop recursion",
       "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}"},
      {"constant repetition", "{{ 'a' * 1000000000 }}"},
      {"constant repetition, reversed", "{{ 1000000000000 * 'a' }}"},
      {"constant repetition of a list", "{{ ([0] * 1000000000) | length }}"},
      {"constant repetition, in steps",
       "{{ 'a' * 1000 * 1000 * 1000 * 1000 }}"},
      {"constant repetition, hidden",
       "{{ ('a' ~ 'b') * (1000 * 1000 * 1000) }}"},
      {"repetition by a variable", "{% set n = 10**12 %}{{ 'a' * n }}"},
      {"repetition of a list", "{% set n = 10**12 %}{{ [1] * n }}"},
      {"repetition overflow",
       "{% set n = 9223372036854775807 %}{{ 'abc' * n }}"},
      {"doubling lines",
       "{% set x = 'ab' %}" + Repeat("{% set x = x ~ x %}", 60) + "{{ x }}"},
      {"doubling sums",
       "{% set x = 'ab' %}" + Repeat("{% set x = x + x %}", 60) + "{{ x }}"},
      {"doubling in a loop",
       ns + loop + "{% set ns.x = ns.x ~ ns.x %}" + end + "{{ ns.x }}"},
      {"doubling captures",
       "{% set x = 'ab' %}" +
           Repeat("{% set x %}{{ x }}{{ x }}{% endset %}", 60) + "{{ x }}"},
      {"doubling lists",
       "{% set x = [1] %}" + Repeat("{% set x = x + x %}", 60) + "{{ x }}"},
      {"many big strings", ns + "{% set n = 100000 %}{% set big = 'a' * n %}" +
                               loop + "{% set ns.l = ns.l + [big ~ a] %}" +
                               end},
      {"captured raw text", ns + "{% set x %}" + loop + loop +
                                std::string(1000, 'x') + end + end +
                                "{% endset %}"},
      {"nested lists",
       ns + loop + "{% set ns.l = [ns.l] %}" + end + "{{ ns.l }}"},
      {"nested lists, doubled",
       "{% set x = [1] %}" + Repeat("{% set x = [x, x] %}", 60) + "{{ x }}"},
      {"nested maps", ns + loop + "{% set ns.l = {'a': ns.l} %}" + end},
      {"a namespace in itself", ns + "{% set ns.self = ns %}{{ ns | tojson }}"},
      {"a namespace in itself, listed",
       ns + "{% set ns.l = [ns] %}{{ ns | string }}"},
      {"a namespace behind a macro",
       ns + "{% macro f() %}{{ ns.x }}{% endmacro %}{% set ns.f = f %}"},
      {"a namespace behind a lazy value", ns + "{% set ns.l = [ns.items()] %}"},
      {"two namespaces in a ring",
       ns + "{% set other = namespace(a=ns) %}{% set ns.x = {'o': other} %}"},
      {"nested batches", "{% set x = [1, 2] %}" +
                             Repeat("{% set x = x | batch(1) | list %}", 200) +
                             "{{ x }}"},
      {"replace explodes",
       "{% set n = 5000 %}{% set a = 'a' * n %}{{ a | replace('', a * n) }}"},
      {"replace method explodes",
       "{% set n = 60000 %}{% set a = 'a' * n %}{{ a.replace('a', a) }}"},
      {"join explodes",
       "{% set n = 30000 %}{% set a = 'a' * n %}{{ range(30000) | join(a) }}"},
      {"join method explodes",
       "{% set n = 30000 %}{% set a = 'a' * n %}{{ a.join(range(30000)) }}"},
      {"indent explodes", "{{ 'a\nb' | indent(1000000000) }}"},
      {"indent explodes by name", "{{ 'a\nb' | indent(width=1000000000) }}"},
      {"tojson indent", "{{ [[1]] | tojson(indent=1000000000) * 100000 }}"},
      {"format width", "{{ '%1000000000d' | format(1) }}"},
      {"format star", "{{ '%*d' | format(1000000000, 1) }}"},
      {"format method width", "{{ '{:>1000000000}'.format('a') }}"},
      {"format repeats",
       "{% set n = 60000 %}{% set a = 'a' * n %}{% set f = '{0}' * n %}"
       "{{ f.format(a) }}"},
      {"slices", "{{ [1] | slice(1000000000) | list }}"},
      {"batches", "{{ [1] | batch(1000000000, 0) | list }}"},
      {"paddings", "{{ 'a'.ljust(1000000000) }}"},
      {"zeros", "{{ 'a'.zfill(9223372036854775807) }}"},
      {"expanding tabs", "{{ 'a\tb'.expandtabs(1000000000) }}"},
      {"no such place", "{{ 'a'.index('b') }}"},
      {"an empty separator", "{{ 'a'.rsplit('') }}"},
      {"power", "{{ 9 ** 9 ** 9 }}"},
      {"map of indents", "{{ ['a\nb'] | map('indent', 1000000000) | list }}"},
      {"deep expression", "{{ " + std::string(100000, '(') + "1" +
                              std::string(100000, ')') + " }}"},
      {"deep not", "{{ " + Repeat("not ", 50000) + "1 }}"},
      {"deep blocks",
       Repeat("{% if 1 %}", 20000) + Repeat("{% endif %}", 20000)},
      {"deep lists",
       "{{ " + std::string(100000, '[') + std::string(100000, ']') + " }}"},
      {"long chain", "{{ 1" + Repeat(" + 1", 50000) + " }}{{ fail() }}"},
      {"elif chain",
       "{% if x == 0 %}" + Repeat("{% elif x %}", 15000) + "{% endif %}"},
      {"deep minus", "{{ " + Repeat("- ", 50000) + "1 }}"},
      {"deep power", "{{ 1" + Repeat(" ** 1", 50000) + " }}"},
      {"deep attributes", "{{ x" + Repeat(".a", 50000) + " }}"},
      {"deep filters", "{{ x" + Repeat("|int", 50000) + " }}"},
      {"deep if expressions", "{{ 1" + Repeat(" if x else 1", 20000) + " }}"},
      {"deep calls", "{{ x" + Repeat("()", 50000) + " }}"},
      {"deep for",
       Repeat("{% for a in [1] %}", 10000) + Repeat("{% endfor %}", 10000)},
      {"unknown filter", "{{ 1 | frobnicate }}"},
      {"unknown test", "{{ 1 is frobnicate }}"},
      {"unknown function", "{{ frobnicate() }}"},
      {"unknown method", "{{ 'a'.frobnicate() }}"},
      {"Python internals", "{{ ''.__class__.__mro__ }}"},
      {"Python internals called", "{{ ''.__class__.__base__() }}"},
      {"debug function", "{{ debug() }}"},
      {"takes a filter's name", "{% set range = 1 %}{{ range(3) }}"},
      {"index far out", "{{ [1][9223372036854775808999] .x }}"},
      {"division by zero", "{{ 1 // 0 }}"},
      {"too large", std::string(300 << 10, 'x')},
  };
}

TEST(ChatTemplateHostileTest, HostileTemplatesEndInAnError) {
  const std::vector<HostileTemplate> cases = HostileTemplates();
  double slowest = 0;
  for (const HostileTemplate& c : cases) {
    SCOPED_TRACE(c.what);
    const std::clock_t start = std::clock();
    const auto text = RenderSource(c.source);
    const double seconds =
        static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    EXPECT_FALSE(text.ok());
    EXPECT_TRUE(absl::IsInvalidArgument(text.status()) ||
                absl::IsResourceExhausted(text.status()))
        << text.status();
    EXPECT_LT(text.status().message().size(), 1000u);
    // Not a speed: far beyond any sanitizer, far below forever.
    EXPECT_LT(seconds, 60) << text.status();
    slowest = std::max(slowest, seconds);
  }
  RecordProperty("files", static_cast<int>(cases.size()));
  RecordProperty("slowest_ms", std::to_string(slowest * 1e3));
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  EXPECT_LT(usage.ru_maxrss, 1 << 20) << "KiB at the peak";
}

// A lazy value of a lazy value ... would need the stack when it is printed.
TEST(ChatTemplateHostileTest, LongChainsOfFiltersNestNothing) {
  for (const char* filter :
       {"map('int')", "select", "reject('none')", "reverse", "list", "unique",
        "sort", "selectattr('b', 'undefined')"}) {
    for (const char* list : {"[1]", "[]"}) {
      const auto text = RenderSource(
          "{% set x = " + std::string(list) + " %}" +
          Repeat("{% set x = x|" + std::string(filter) + " %}", 4000) +
          "{{ x|list }}");
      EXPECT_EQ(text.value_or(std::string(text.status().message())), list)
          << filter;
    }
  }
}

TEST(ChatTemplateHostileTest, EndlessWorkIsResourceExhausted) {
  for (const char* source :
       {"{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% set c = 1 %}{% endfor %}{% endfor %}",
        "{% set n = 10**12 %}{{ 'a' * n }}"}) {
    EXPECT_TRUE(absl::IsResourceExhausted(RenderSource(source).status()))
        << source;
  }
}

TEST(ChatTemplateHostileTest, LimitsAreParameters) {
  const ordered_json config = {
      {"chat_template", "{% for i in range(1000) %}abc{% endfor %}"}};
  const auto render = [&](const ChatTemplateLimits& limits) {
    auto chat = FromConfig(config, limits);
    if (!chat.ok()) return absl::StatusOr<std::string>(chat.status());
    return chat->Render({.messages_json = kUserMessage});
  };
  EXPECT_EQ(render({})->size(), 3000u);
  EXPECT_TRUE(absl::IsResourceExhausted(render({.fuel = 1000}).status()));
  EXPECT_TRUE(
      absl::IsResourceExhausted(render({.max_output_bytes = 2000}).status()));
  EXPECT_TRUE(
      absl::IsResourceExhausted(render({.max_work_bytes = 100}).status()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(render({.max_template_bytes = 10}).status()));
}

TEST(ChatTemplateHostileTest, LongConversationsAreNotHostile) {
  const ordered_json golden =
      ordered_json::parse(ReadWhole(GoldenPath("templates.json")));
  ordered_json messages = ordered_json::array();
  for (int i = 0; i < 1000; ++i) {
    messages.push_back({{"role", i % 2 ? "assistant" : "user"},
                        {"content", std::string(1000, 'x')}});
  }
  messages.push_back(
      {{"role", "user"}, {"content", std::string(1 << 20, 'y')}});
  const std::string text = messages.dump();
  int rendered = 0;
  for (const ordered_json& c : golden["cases"]) {
    const auto name = c["name"].get<std::string>();
    if (name != "ChatML" && name != "Llama 3" && name != "Mistral" &&
        name != "Qwen") {
      continue;
    }
    ordered_json config = golden["tokens"];
    config["chat_template"] = c["template"];
    auto prompt = FromConfig(config)->Render({.messages_json = text});
    ASSERT_TRUE(prompt.ok()) << name << ": " << prompt.status();
    EXPECT_GT(prompt->size(), 2000u * 1000u);
    ++rendered;
  }
  EXPECT_EQ(rendered, 4);
}

// Some look from each call at all that follows it, whose text they share.
TEST(ChatTemplateHostileTest, LongSessionsOfToolsAreNotHostile) {
  const ordered_json config = {
      {"chat_template",
       "{% for message in messages %}{% if 'tool_calls' in message %}"
       "{% set later = namespace(found=false) %}"
       "{% for other in messages[loop.index:] %}"
       "{% if other.role == 'assistant' and 'tool_calls' not in other %}"
       "{% set later.found = true %}{% endif %}{% endfor %}"
       "{% if not later.found %}{{ message.thinking }}{% endif %}"
       "{{ message.tool_calls[0].function.arguments | tojson }}"
       "{% else %}{{ message.content }}{% endif %}{% endfor %}"}};
  const size_t calls = 600;
  const std::string result(1000, 'x');
  ordered_json messages = ordered_json::parse(kUserMessage);
  for (size_t i = 0; i < calls; ++i) {
    const ordered_json call = {
        {"function", {{"name", "look"}, {"arguments", {{"at", i}}}}}};
    messages.push_back({{"role", "assistant"},
                        {"thinking", "hm"},
                        {"tool_calls", ordered_json::array({call})}});
    messages.push_back({{"role", "tool"}, {"content", result}});
  }
  const std::string text = messages.dump();
  const auto prompt = FromConfig(config)->Render({.messages_json = text});
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  EXPECT_GT(prompt->size(), calls * result.size());
}

// A template cannot move the sandbox's functions out of the way.
TEST(ChatTemplateHostileTest, TheSandboxIsOutOfReach) {
  for (const char* source : {"{% set %check = 1 %}", "{{ %check(1) }}",
                             "{{ namespace(**{'%check': 1}).y.z }}"}) {
    EXPECT_FALSE(RenderSource(source).ok()) << source;
  }
}

}  // namespace
}  // namespace tandem::text
