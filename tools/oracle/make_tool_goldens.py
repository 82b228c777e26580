# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/text/tool_prompts.json: chats with tools as OpenAI's
clients send them, and the prompts that `transformers` makes of them.

    cd tools/oracle && python make_tool_goldens.py            # checks: no output
    cd tools/oracle && python make_tool_goldens.py --write    # makes it anew

(with the packages of requirements.txt). The templates are written here, in the
styles of those that the families publish: same variables, same forms of tools,
calls and results, same helper functions. Arguments of calls are strings for
clients and objects for templates, as transformers' documentation has it.
"""

import argparse
import copy
import itertools
import json
import pathlib
import sys

from transformers.utils.chat_template_utils import render_jinja_template

OUT = pathlib.Path(__file__).resolve().parents[2] / "tests/golden/text/tool_prompts.json"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Tools in the first user message, one call a turn, results as "ipython".
LLAMA31 = r"""{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") + "\n\n"}}
{%- endif %}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of names and values}.' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there is none!") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of names and values}.\n\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {%- if builtin_tools is defined and tool_call.name in builtin_tools %}
            {{- "<|python_tag|>" + tool_call.name + ".call(" }}
            {%- for arg_name, arg_val in tool_call.arguments | items %}
                {{- arg_name + '="' + arg_val + '"' }}
                {%- if not loop.last %}{{- ", " }}{%- endif %}
            {%- endfor %}
            {{- ")<|eom_id|>" }}
        {%- else %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
            {{- '{"name": "' + tool_call.name + '", ' }}
            {{- '"parameters": ' }}
            {{- tool_call.arguments | tojson }}
            {{- "}<|eot_id|>" }}
        {%- endif %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
# As 3.1, with today's date where the server can tell it.
LLAMA32 = LLAMA31.replace(
    '{%- set date_string = "26 Jul 2024" %}',
    '{%- if strftime_now is defined and dated is defined %}{%- set date_string = strftime_now("%d %b %Y") %}'
    '{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}')

# Hermes' tags, and results gathered in one user turn.
QWEN25 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions.\n\nSignatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
# As 2.5, with reasoning kept where it led to calls after the last question.
QWEN3 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
# Tools before the last user message, members of each function one by one, and
# ids of nine characters in calls and results.
MISTRAL_V3 = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""
# The later tokenizers': no spaces, and each call by itself.
MISTRAL_NEMO = (MISTRAL_V3.replace("[AVAILABLE_TOOLS] [", "[AVAILABLE_TOOLS][")
                .replace("[INST] ", "[INST]").replace("[TOOL_CALLS] [", "[TOOL_CALLS][")
                .replace("[TOOL_RESULTS] {", "[TOOL_RESULTS]{").replace('" " + message', "message"))

# Messages in channels. Tools as types, with their descriptions; one call in a
# message, whose name its result takes; what led to it, in one of two fields, is
# shown until an answer follows.
GPT_OSS = r"""{%- macro type_of(spec) -%}
    {%- if spec.enum -%}
        {{- '"' + spec.enum|join('" | "') + '"' }}
    {%- else -%}
        {{- "number" if spec.type == "integer" else spec.type }}
    {%- endif -%}
    {%- if spec.default is defined %}{{- ", // default: " + spec.default|tojson }}{%- endif -%}
{%- endmacro -%}
{%- macro head() -%}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
    {{- "Reasoning: " + reasoning_effort + "\n\n# Valid channels: analysis, commentary, final." }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" + head() + "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer_message = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set developer_message = "" %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if developer_message or tools %}
    {{- "<|start|>developer<|message|>" + developer_message }}
    {%- for tool in tools or [] %}
        {%- set tool = tool.function %}
        {{- "\n// " + tool.description + "\ntype " + tool.name + " = (" }}
        {%- if tool.parameters and tool.parameters.properties %}
            {%- for name, spec in tool.parameters.properties.items() %}
                {{- name + ("" if name in (tool.parameters.required or []) else "?") + ": " + type_of(spec) + ";" }}
            {%- endfor %}
        {%- endif %}
        {{- ") => any;" }}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == "assistant" -%}
        {%- if "content" in message and "<|channel|>final<|message|>" in message.content %}
            {{- raise_exception("Channels belong in fields of their own.") }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set future = namespace(found=false) %}
            {%- for later in loop_messages[loop.index:] %}
                {%- if later.role == "assistant" and "tool_calls" not in later %}{%- set future.found = true %}{%- endif %}
            {%- endfor %}
            {%- set tool_call = message.tool_calls[0] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {%- if message.content and message.thinking %}
                {{- raise_exception("Either content or thinking beside tool calls, not both!") }}
            {%- elif (message.content or message.thinking) and not future.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + (message.content or message.thinking) + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}
            {{- tool_call.arguments|tojson + "<|call|>" }}
            {%- set last.name = tool_call.name %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last.name = none %}
        {%- endif %}
    {%- elif message.role == "tool" -%}
        {%- if last.name is none %}{{- raise_exception("A result without a call!") }}{%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
    {%- else -%}
        {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
"""

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather <now> & 'later' é",
    "parameters": {"type": "object", "properties": {
        "unit": {"type": "string", "enum": ["°C", "°F"]}, "city": {"type": "string"},
        "days": {"type": "integer", "default": 1.0}}, "required": ["city"]}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK = {"role": "user", "content": "Is it warm in 東京 & \"Köln\"? "}
SYSTEM = {"role": "system", "content": "Be brief."}


def call(name: str, arguments: str, number: int) -> dict:
    return {"id": f"aB3cD4eF{number}", "type": "function",
            "function": {"name": name, "arguments": arguments}}


ONE = {"role": "assistant", "content": None, "tool_calls": [
    call("get_weather", '{"unit": "°C", "city": "東京 </x>", "days": 2, "f": 1.50, "b": [true, null, {}]}', 1)]}
SAID = {**ONE, "content": "Let me look.\n"}
TWO = {**ONE, "tool_calls": [call("get_weather", '{"city":"Köln"}', 1), call("clock", "{}", 2)]}
RESULTS = [{"role": "tool", "tool_call_id": f"aB3cD4eF{i}", "content": text}
           for i, text in [(1, '{"temp": 21.5}'), (2, "12:00")]]
WARM = {"role": "assistant", "content": "It is warm."}


def cases() -> list[dict]:
    both = [WEATHER, CLOCK]
    chats = {
        "asked": {"messages": [ASK], "tools": both},
        "system": {"messages": [SYSTEM, ASK], "tools": [WEATHER]},
        "no tools": {"messages": [SYSTEM, ASK]},
        "not to be used": {"messages": [ASK], "tools": both, "tool_choice": "none"},
        "answered": {"messages": [SYSTEM, ASK, ONE, RESULTS[0]], "tools": both},
        "said and called": {"messages": [ASK, SAID, RESULTS[0], WARM, ASK], "tools": [WEATHER]},
        "history alone": {"messages": [ASK, ONE, RESULTS[0]]},
        "two calls": {"messages": [ASK, TWO, *RESULTS], "tools": both},
    }
    templates = {"Llama 3.1": LLAMA31, "Llama 3.2": LLAMA32, "Qwen 2.5": QWEN25, "Qwen 3": QWEN3,
                 "Mistral v3": MISTRAL_V3, "Mistral Nemo": MISTRAL_NEMO, "gpt-oss": GPT_OSS}
    made = [{"name": f"{family}, {name}", "family": family, "request": chat}
            for family in templates for name, chat in chats.items()
            if not (family.startswith("Llama") and name == "two calls")]
    thought = {**ONE, "reasoning_content": "\nTokyo first.\n"}
    thought_and_said = {**SAID, "reasoning_content": "Tokyo first."}
    warm = {**WARM, "reasoning_content": "21.5."}
    made += [
        {"name": "Qwen 3, thought and called", "family": "Qwen 3",
         "request": {"messages": [ASK, thought, RESULTS[0]], "tools": both}},
        {"name": "Qwen 3, no thinking", "family": "Qwen 3",
         "request": {"messages": [ASK], "tools": both, "chat_template_kwargs": {"enable_thinking": False}}},
        {"name": "Llama 3.1, tools with the system", "family": "Llama 3.1",
         "request": {"messages": [SYSTEM, ASK], "tools": both,
                     "chat_template_kwargs": {"tools_in_user_message": False}}},
        {"name": "gpt-oss, thought and called", "family": "gpt-oss",
         "request": {"messages": [ASK, thought, RESULTS[0]], "tools": both}},
        {"name": "gpt-oss, thought, said and called", "family": "gpt-oss",
         "request": {"messages": [ASK, thought_and_said, RESULTS[0]], "tools": both}},
        {"name": "gpt-oss, results in another order", "family": "gpt-oss",
         "request": {"messages": [ASK, {**TWO, "reasoning_content": "Both."}, *RESULTS[::-1], ONE, RESULTS[0]],
                     "tools": both}},
        {"name": "gpt-oss, thoughts before an answer", "family": "gpt-oss",
         "request": {"messages": [ASK, thought, RESULTS[0], warm, ASK], "tools": both}},
        {"name": "gpt-oss, effort", "family": "gpt-oss",
         "request": {"messages": [SYSTEM, ASK], "chat_template_kwargs": {"reasoning_effort": "high"}}},
    ]
    for one in made:
        one["expected"] = render(templates[one["family"]], one["request"])
    return [{"templates": templates}, *made]


def for_gpt_oss(messages: list[dict]) -> list[dict]:
    """As its template wants them: what led to a call in `thinking` alone, and
    each call by itself, its result behind it."""
    made = []
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            continue
        calls = message.get("tool_calls", [])
        if not calls:
            made.append(message)
        results = list(itertools.takewhile(lambda other: other["role"] == "tool", messages[index + 1:]))
        thinking = "\n".join(filter(None, [message.get("reasoning_content"), message["content"]]))
        for one in calls:
            made.append({"role": "assistant", "tool_calls": [one]} | ({"thinking": thinking} if thinking else {}))
            made += [result for result in results if result["tool_call_id"] == one["id"]]
            thinking = ""
    return made


def render(template: str, request: dict) -> str:
    # Not deepcopy, which would keep what messages share.
    messages = json.loads(json.dumps(request["messages"]))
    for message in messages:
        for one in message.get("tool_calls", []):
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    tools = None if request.get("tool_choice") == "none" else copy.deepcopy(request.get("tools"))
    if template == GPT_OSS:
        messages = for_gpt_oss(messages)
        for tool in tools or []:
            tool["function"].setdefault("description", "")
    rendered, _ = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=template,
        add_generation_prompt=True, **TOKENS, **request.get("chat_template_kwargs", {}))
    return rendered[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write what is expected")
    options = parser.parse_args()
    head, *made = cases()
    lines = [json.dumps(one) for one in made]
    text = ('{"tokens": ' + json.dumps(TOKENS) + ',\n "templates": ' + json.dumps(head["templates"])
            + ',\n "cases": [\n  ' + ",\n  ".join(lines) + "\n]}\n")
    if options.write:
        OUT.write_text(text)
        return 0
    if not OUT.exists() or OUT.read_text() != text:
        print(f"{OUT} differs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
