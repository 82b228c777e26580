# SPDX-License-Identifier: Apache-2.0
"""Clients that people use, against a running server: content, usage and reason.

Every answer is compared with what the server says over plain HTTP, so that the
test is of the client's reading, and with counts that the request fixes.

Usage: python_clients.py http://127.0.0.1:8000/v1
The server's key, if it asks for one, is in TANDEM_API_KEY.
"""

import asyncio
import json
import os
import sys
import urllib.request

BASE = sys.argv[1]
KEY = os.environ.get("TANDEM_API_KEY", "none")
MODEL = "tales"
MESSAGES = [{"role": "user", "content": "Tell me a story about a cat."}]
TOKENS = 24


def plain(path: str, body: dict) -> dict:
    request = urllib.request.Request(
        BASE + path, json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


CHAT = plain("/chat/completions", {"messages": MESSAGES, "temperature": 0,
                                   "max_tokens": TOKENS})
WANT = CHAT["choices"][0]["message"]["content"]
PROMPT_TOKENS = CHAT["usage"]["prompt_tokens"]


def check(what: str, got, want) -> None:
    if got != want:
        raise SystemExit(f"{what}: {got!r}, not {want!r}")


def openai_sdk() -> None:
    import openai

    client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0)
    if KEY != "none":
        try:
            openai.OpenAI(base_url=BASE, api_key="other", max_retries=0).models.list()
            raise SystemExit("another key was taken")
        except openai.AuthenticationError as error:
            check("code", error.code, "invalid_api_key")
    check("models", [m.id for m in client.models.list().data], [MODEL])
    check("model", client.models.retrieve(MODEL).id, MODEL)
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=TOKENS)
    check("content", answer.choices[0].message.content, WANT)
    check("reason", answer.choices[0].finish_reason, "length")
    check("usage", answer.usage.total_tokens, PROMPT_TOKENS + TOKENS)

    text, reason, usage = "", None, None
    for chunk in client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=TOKENS,
            stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    check("streamed content", text, WANT)
    check("streamed reason", reason, "length")
    check("streamed usage", usage.completion_tokens, TOKENS)

    answer = client.completions.create(
        model=MODEL, prompt=["Once upon a time", "The dog"], temperature=0,
        max_tokens=8, logprobs=2, seed=1, extra_body={"ignore_eos": True})
    check("choices", [c.index for c in answer.choices], [0, 1])
    for choice in answer.choices:
        check("logprobs", len(choice.logprobs.token_logprobs), 8)
        check("tokens", "".join(choice.logprobs.tokens), choice.text)
    check("usage", answer.usage.completion_tokens, 16)
    stop = client.completions.create(model=MODEL, prompt="Once upon a time",
                                     temperature=0, max_tokens=30, stop=["."])
    check("stopped", stop.choices[0].finish_reason, "stop")
    check("stop in text", "." in stop.choices[0].text, False)

    try:
        client.completions.create(model=MODEL, prompt="a", temperature=7)
        raise SystemExit("temperature 7 was taken")
    except openai.BadRequestError as error:
        check("param", error.param, "temperature")
    try:
        client.completions.create(model="other", prompt="a")
        raise SystemExit("another model was taken")
    except openai.NotFoundError as error:
        check("code", error.code, "model_not_found")


def openai_async() -> None:
    import openai

    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=BASE, api_key=KEY)

        async def one() -> tuple:
            text, reason, usage = "", None, None
            async for chunk in await client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, temperature=0, max_tokens=TOKENS,
                    stream=True, stream_options={"include_usage": True}):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reason = choice.finish_reason or reason
            return text, reason, usage.prompt_tokens, usage.completion_tokens

        check("32 at once", set(await asyncio.gather(*[one() for _ in range(32)])),
              {(WANT, "length", PROMPT_TOKENS, TOKENS)})

    asyncio.run(run())


def langchain() -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=BASE, api_key=KEY, model=MODEL, temperature=0,
                      max_tokens=TOKENS, stream_usage=True)
    answer = chat.invoke(MESSAGES[0]["content"])
    check("content", answer.content, WANT)
    check("usage", answer.usage_metadata["output_tokens"], TOKENS)
    check("reason", answer.response_metadata["finish_reason"], "length")
    whole = None
    for chunk in chat.stream(MESSAGES[0]["content"]):
        whole = chunk if whole is None else whole + chunk
    check("streamed content", whole.content, WANT)
    check("streamed usage", whole.usage_metadata["output_tokens"], TOKENS)
    check("streamed prompt", whole.usage_metadata["input_tokens"], PROMPT_TOKENS)
    check("streamed reason", whole.response_metadata["finish_reason"], "length")


def litellm() -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks GitHub
    import litellm as library

    arguments = {"model": f"openai/{MODEL}", "messages": MESSAGES, "api_base": BASE,
                 "api_key": KEY, "temperature": 0, "max_tokens": TOKENS}
    answer = library.completion(**arguments)
    check("content", answer.choices[0].message.content, WANT)
    check("reason", answer.choices[0].finish_reason, "length")
    check("usage", answer.usage.completion_tokens, TOKENS)
    text, reason, usage = "", None, None
    for chunk in library.completion(**arguments, stream=True,
                                    stream_options={"include_usage": True}):
        usage = getattr(chunk, "usage", None) or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    check("streamed content", text, WANT)
    check("streamed reason", reason, "length")
    check("streamed usage", usage.completion_tokens, TOKENS)
    # By the words of the error, not by its code.
    long = [{"role": "user", "content": "cat " * 3000}]
    try:
        library.completion(**arguments | {"messages": long, "max_retries": 0})
        raise SystemExit("a prompt beyond the context was taken")
    except library.ContextWindowExceededError as error:
        check("status", error.status_code, 400)


for client in (openai_sdk, openai_async, langchain, litellm):
    client()
    print(f"{client.__name__}: ok", flush=True)
