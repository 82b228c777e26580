# SPDX-License-Identifier: Apache-2.0
"""Clients that call tools, against a server of make_scripted_model.py: content,
calls, usage and finish reason, whole and streamed, and a turn with the results.

Usage: tool_clients.py http://127.0.0.1:8000/v1 STYLE
"""

import json
import os
import re
import sys

import make_scripted_model as script

BASE, STYLE = sys.argv[1:]
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would look on GitHub
ASK = {"role": "user", "content": "Is it warm in Rome?"}
# Where arguments have tags these give way to an object for strict functions, of
# which the weights know nothing.
STRICT = STYLE not in script.TAGS
TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather of some days", "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"], "additionalProperties": False}, "strict": STRICT}},
    {"type": "function", "function": {"name": "clock", "parameters": {
        "type": "object", "properties": {"zone": {"type": "string"}},
        "required": ["zone"], "additionalProperties": False}, "strict": STRICT}},
]
CALLS = [("get_weather", script.WEATHER), ("clock", script.CLOCK)]
SAID = "".join(text for text in script.CALLS[STYLE][:2]) if STYLE != "llama3_json" else ""
ANSWER = "".join(script.ANSWER)
TOKENS = len(script.CALLS[STYLE]) + 1  # and the end
IDS = {"mistral": r"[a-zA-Z0-9]{9}", "kimi_k2": r"functions\.\w+:\d"}
ID = re.compile(IDS.get(STYLE, r"call_[a-zA-Z0-9]{24}"))


def check(what: str, got, want) -> None:
    if got != want:
        raise SystemExit(f"{STYLE}, {what}: {got!r}, not {want!r}")


def check_calls(what: str, calls: list[tuple[str, str, str]]) -> None:
    """Of (id, name, arguments)."""
    check(what, [call[1:] for call in calls], CALLS)
    check(f"{what}: ids", [bool(ID.fullmatch(call[0])) for call in calls], [True, True])
    check(f"{what}: ids differ", len({call[0] for call in calls}), 2)


def results(calls: list[tuple[str, str, str]]) -> list[dict]:
    return [{"role": "tool", "tool_call_id": call[0], "content": "{\"ok\": true}"} for call in calls]


def of_openai(calls) -> list[tuple[str, str, str]]:
    return [(call.id, call.function.name, call.function.arguments) for call in calls or []]


def openai_whole() -> None:
    import openai

    client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
    answer = client.chat.completions.create(model=STYLE, messages=[ASK], tools=TOOLS)
    message, calls = answer.choices[0].message, of_openai(answer.choices[0].message.tool_calls)
    check_calls("calls", calls)
    check("content", message.content, SAID or None)
    check("reason", answer.choices[0].finish_reason, "tool_calls")
    check("usage", answer.usage.completion_tokens, TOKENS)
    # The turn that follows, with the SDK's own object as history.
    follow = client.chat.completions.create(
        model=STYLE, messages=[ASK, message, *results(calls)], tools=TOOLS)
    check("answer", follow.choices[0].message.content, ANSWER)
    check("answer's reason", follow.choices[0].finish_reason, "stop")
    check("answer's calls", follow.choices[0].message.tool_calls, None)
    talk = "".join(script.TALK)
    for rest in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = client.chat.completions.create(model=STYLE, messages=[ASK], **rest)
        check("no tools", answer.choices[0].message.content, talk)
    one = client.chat.completions.create(
        model=STYLE, messages=[ASK], tools=TOOLS, parallel_tool_calls=False)
    check("one call", [c[1:] for c in of_openai(one.choices[0].message.tool_calls)], CALLS[:1])
    cut = client.chat.completions.create(
        model=STYLE, messages=[ASK], tools=TOOLS, max_tokens=TOKENS - 3)
    check("cut", cut.choices[0].finish_reason, "length")
    several = client.chat.completions.create(model=STYLE, messages=[ASK], tools=TOOLS, n=3)
    for choice in several.choices:
        check_calls("n", of_openai(choice.message.tool_calls))
    try:
        client.chat.completions.create(model=STYLE, messages=[ASK], tools=[
            {"type": "function", "function": {"name": "no spaces"}}])
        raise SystemExit("a name with a space was taken")
    except openai.BadRequestError as error:
        check("param", error.param, "tools[0].function.name")


def forced() -> None:
    """Calls that the model would not make by itself: its weights say others."""
    import openai

    client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
    colours = {"type": "object", "properties": {
        "b": {"enum": ["red", "blue"]}, "a": {"enum": [2, 3]}},
        "required": ["b", "a"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": name, "parameters": colours}}
             for name in ("paint", "wash")]
    for choice in ("required", {"type": "function", "function": {"name": "wash"}}):
        for stream in (False, True):
            asked = {"model": STYLE, "messages": [ASK], "tools": tools, "tool_choice": choice}
            if stream:
                with client.chat.completions.stream(**asked) as events:
                    answer = events.get_final_completion()
            else:
                answer = client.chat.completions.create(**asked)
            calls = of_openai(answer.choices[0].message.tool_calls)
            check("one call", len(calls), 1)
            names = ("paint", "wash") if choice == "required" else ("wash",)
            check("name", calls[0][1] in names, True)
            arguments = json.loads(calls[0][2])
            check("members", list(arguments), ["b", "a"])
            check("values", (arguments["b"] in ("red", "blue"), arguments["a"] in (2, 3)),
                  (True, True))
            check("reason", answer.choices[0].finish_reason, "tool_calls")
            check("no text", answer.choices[0].message.content or "", "")


def strict_alone() -> None:
    """The model calls as it likes, and the arguments are as the schema wants."""
    import openai

    client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
    weather = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}, "days": {"enum": [3]}},
               "required": ["city", "days"], "additionalProperties": False}
    for strict in (False, True):
        tools = [{"type": "function", "function": {
            "name": "get_weather", "parameters": weather, "strict": strict}}, TOOLS[1]]
        # Where the weights' own way is barred, spaces are as likely as all else.
        answer = client.chat.completions.create(
            model=STYLE, messages=[ASK], tools=tools, max_tokens=800)
        call = of_openai(answer.choices[0].message.tool_calls)[0]
        want = {"city": "Oslo", "days": 3} if strict else json.loads(script.WEATHER)
        check("strict", (call[1], json.loads(call[2])), ("get_weather", want))
        check("text before", (answer.choices[0].message.content or "").startswith(SAID), True)


def openai_streamed() -> None:
    import openai

    client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
    text, reason, usage, calls = "", None, None, []
    for chunk in client.chat.completions.create(
            model=STYLE, messages=[ASK], tools=TOOLS, stream=True,
            stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for piece in choice.delta.tool_calls or []:
                if piece.index == len(calls):
                    check("first piece", (piece.type, piece.function.arguments), ("function", ""))
                    calls.append([piece.id, piece.function.name, ""])
                else:
                    check("later piece", (piece.id, piece.function.name), (None, None))
                calls[piece.index][2] += piece.function.arguments
    check_calls("streamed calls", [tuple(call) for call in calls])
    check("streamed content", text, SAID)
    check("streamed reason", reason, "tool_calls")
    check("streamed usage", usage.completion_tokens, TOKENS)


def openai_helpers() -> None:
    import openai
    import pydantic

    # Named as the tools are.
    class get_weather(pydantic.BaseModel):
        city: str
        days: int

    class clock(pydantic.BaseModel):
        zone: str

    client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
    tools = [openai.pydantic_function_tool(one) for one in (get_weather, clock)]
    want = [get_weather(city="Rome", days=2), clock(zone="CET")]
    parsed = client.chat.completions.parse(model=STYLE, messages=[ASK], tools=tools)
    check("parsed", [c.function.parsed_arguments for c in parsed.choices[0].message.tool_calls], want)
    done = []
    with client.chat.completions.stream(model=STYLE, messages=[ASK], tools=tools) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.done":
                done.append(event.parsed_arguments)
        final = stream.get_final_completion()
    check("stream helper", done, want)
    check_calls("final", of_openai(final.choices[0].message.tool_calls))
    check("final reason", final.choices[0].finish_reason, "tool_calls")


def langchain() -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=BASE, api_key="none", model=STYLE).bind_tools(TOOLS)
    want = [(name, json.loads(arguments)) for name, arguments in CALLS]
    human = HumanMessage(ASK["content"])
    answer = chat.invoke([human])
    check("calls", [(c["name"], c["args"]) for c in answer.tool_calls], want)
    check("invalid", answer.invalid_tool_calls, [])
    check("content", answer.content, SAID)
    check("reason", answer.response_metadata["finish_reason"], "tool_calls")
    check("usage", answer.usage_metadata["output_tokens"], TOKENS)
    whole = None
    for chunk in chat.stream([human]):
        whole = chunk if whole is None else whole + chunk
    check("streamed", [(c["name"], c["args"]) for c in whole.tool_calls], want)
    follow = chat.invoke([human, answer, *(
        ToolMessage("{}", tool_call_id=c["id"]) for c in answer.tool_calls)])
    check("answer", follow.content, ANSWER)


def litellm() -> None:
    import litellm as library

    arguments = {"model": f"openai/{STYLE}", "messages": [ASK], "tools": TOOLS, "api_base": BASE,
                 "api_key": "none"}
    answer = library.completion(**arguments)
    calls = of_openai(answer.choices[0].message.tool_calls)
    check_calls("calls", calls)
    check("reason", answer.choices[0].finish_reason, "tool_calls")
    check("usage", answer.usage.completion_tokens, TOKENS)
    chunks = list(library.completion(**arguments, stream=True))
    built = library.stream_chunk_builder(chunks, messages=[ASK])
    check_calls("streamed", of_openai(built.choices[0].message.tool_calls))
    check("streamed reason", built.choices[0].finish_reason, "tool_calls")
    follow = library.completion(**{**arguments, "messages": [
        ASK, answer.choices[0].message.model_dump(), *results(calls)]})
    check("answer", follow.choices[0].message.content, ANSWER)


# The helpers mark all functions strict.
helpers = (openai_helpers,) if STRICT else ()
for client in (openai_whole, forced, strict_alone, openai_streamed, *helpers, langchain, litellm):
    client()
    print(f"{STYLE}, {client.__name__}: ok", flush=True)
