#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Requests of all options at once, to clusters that work in different ways: answers,
log probabilities and counts of tokens are equal, also while workers are killed.

    python3 tests/network/options_test.py build/release/bin [--seconds 30] [--seed 1]

Alone: one worker without a prefix cache, which the others are compared with.
Looking up: two decode workers, KV by shared memory, guesses looked up, small steps.
Drafting: KV over gRPC, a draft model, so little room that blocks are evicted to memory.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import threading
import time

from serving import MODEL, Serving

ALONE = ("--no-enable-prefix-caching",)
LOOKING_UP = ("--max-num-batched-tokens", "48", "--speculative-config",
              '{"method": "ngram", "num_speculative_tokens": 5}')
DRAFTING = ("--handoff", "grpc", "--kv-cache-memory-bytes", "6MiB",
            "--kv-offload-bytes", "20MiB", "--speculative-config",
            json.dumps({"model": str(MODEL), "num_speculative_tokens": 4}))
WORDS = ("Mia found a red ball in the garden . Tom and Lily went to the park with a big "
         "dog who said hello once upon a time there was a happy little girl")
# Prompts share beginnings of several blocks.
SHARED = "Once upon a time there was a little girl named Mia. She had a red ball. "
GRAMMARS = ({"regex": r"[A-Z][a-z]+ (ran|sat)( [a-z]{2,5}){0,3}\."},
            {"choice": ["yes", "no", "maybe so"]},
            {"json": {"type": "object", "required": ["name", "age"],
                      "properties": {"name": {"type": "string", "maxLength": 8},
                                     "age": {"type": "integer"}}}},
            {"grammar": 'start: "a" start "b" | "c"'})
# Between two kills; a worker's turn comes again when it has long been back.
KILL_EVERY = 4.0
CLIENTS = 32


def words(chance: random.Random, least: int, most: int) -> str:
    text = " ".join(chance.choices(WORDS.split(), k=chance.randint(least, most)))
    return " ".join([text] * chance.choice((1, 1, 1, 3)))


def beam_search(chance: random.Random) -> dict:
    body = {"use_beam_search": True, "n": chance.randint(1, 3),
            "length_penalty": chance.choice((0, 0.5, 1, 2)),
            "early_stopping": chance.choice((True, False))}
    if chance.random() < 0.5:
        body["logprobs"] = chance.randint(0, 3)
    return body


def sampling(chance: random.Random, chat: bool, max_tokens: int) -> dict:
    """Each option now and then."""
    body = {"seed": chance.randrange(2**31), "temperature": chance.choice((0, 0.5, 1, 1.5))}

    def maybe(name: str, values, share: float = 0.2) -> None:
        if chance.random() < share:
            body[name] = chance.choice(values)

    maybe("top_p", (0.5, 0.9, 0.99))
    maybe("top_k", (1, 3, 20, 100))
    maybe("min_p", (0.01, 0.1, 0.3))
    maybe("typical_p", (0.3, 0.8))
    maybe("presence_penalty", (-1, 0.5, 1.5))
    maybe("frequency_penalty", (-0.5, 0.3, 1.9))
    maybe("repetition_penalty", (0.8, 1.1, 1.7))
    maybe("logit_bias", ({str(chance.randint(3, 500)): chance.choice((-100, -5, 3, 50))
                          for _ in range(3)},))
    maybe("bad_words", (chance.choices(WORDS.split(), k=2),), 0.1)
    maybe("allowed_token_ids", (sorted(chance.sample(range(3, 600), 30)),), 0.05)
    maybe("banned_token_ids", (chance.sample(range(3, 600), 30),), 0.05)
    maybe("min_tokens", (0, 1, max_tokens // 2, max_tokens))
    maybe("stop", (chance.sample((" the", " a", ".", "She", "ball", "\n"), 2),))
    maybe("include_stop_str_in_output", (True, False))
    maybe("stop_token_ids", (chance.sample(range(3, 300), 3),), 0.1)
    maybe("ignore_eos", (True,))
    maybe("skip_special_tokens", (False,), 0.1)
    maybe("structured_outputs", GRAMMARS, 0.15)
    maybe("return_token_ids", (True,))
    maybe("no_kv_cache", (True,), 0.05)
    maybe("prompt_logprobs", (0, 1, 4), 0.1)
    if chat:
        if chance.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": chance.randint(0, 5)}
    else:
        maybe("logprobs", (0, 1, 5), 0.3)
        maybe("echo", (True,), 0.1)
    if body["temperature"] > 0 and not body.get("no_kv_cache"):
        maybe("n", (2, 3, 4))
        if not chat and chance.random() < 0.1:
            body["best_of"] = body.get("n", 1) + chance.randint(0, 2)
    return body


def drawn(chance: random.Random) -> tuple[bool, dict]:
    """Whether it is a chat, and what it asks for."""
    chat = chance.random() < 0.35
    prompt = SHARED * chance.choice((0, 0, 1, 3, 6)) + words(chance, 1, 25)
    max_tokens = chance.choice((1, 2, 5, 17, 40, 70))
    body = {"max_tokens": max_tokens}
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt if chance.random() < 0.8 else [prompt, words(chance, 1, 6)]
    if not chat and chance.random() < 0.12:
        return chat, body | beam_search(chance)
    return chat, body | sampling(chance, chat, max_tokens)


def may_stream(body: dict) -> bool:
    return ("prompt_logprobs" not in body and "use_beam_search" not in body
            and body.get("best_of", 1) <= body.get("n", 1))


class Answer:
    """What must be equal: by choice text, token ids, log probabilities, also of the
    prompt, and the reason of the end; and the counts."""

    def __init__(self) -> None:
        self.choices: dict[int, dict] = {}
        self.counts: dict = {}

    def add(self, part: dict) -> None:
        for choice in part["choices"]:
            whole = self.choices.setdefault(
                choice["index"], {"text": "", "ids": [], "logprobs": [], "prompt": None,
                                  "finish": None})
            message = choice.get("message") or choice.get("delta") or {}
            whole["text"] += choice.get("text") or message.get("content") or ""
            whole["ids"] += choice.get("token_ids") or []
            whole["logprobs"] += self._logprobs(choice.get("logprobs"))
            whole["prompt"] = choice.get("prompt_logprobs") or whole["prompt"]
            whole["finish"] = choice["finish_reason"] or whole["finish"]
        if usage := part.get("usage"):
            self.counts = {name: usage[name] for name in ("prompt_tokens",
                                                          "completion_tokens")}

    @staticmethod
    def _logprobs(given: dict | None) -> list:
        if not given:
            return []
        if "content" in given:
            return given["content"] or []
        tops = given["top_logprobs"] or itertools.repeat(None)
        return list(zip(given["tokens"], given["token_logprobs"], tops))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return json.dumps(vars(self))[:800]


def ask(address: tuple[str, int], chat: bool, body: dict) -> Answer | str:
    """What it came to; in words if to nothing."""
    connection = http.client.HTTPConnection(*address, timeout=300)
    try:
        connection.request("POST", "/v1/chat/completions" if chat else "/v1/completions",
                           json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return repr(error)
    finally:
        connection.close()
    if response.status != 200:
        return f"{response.status} {text}"
    answer = Answer()
    if not body.get("stream"):
        answer.add(json.loads(text))
        return answer
    for line in text.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        part = json.loads(line[6:])
        if "error" in part:
            return line
        answer.add(part)
    return answer


def compare(alone: Serving, others: list[Serving], index: int, seed: int) -> str:
    """Of one request; what differs, or nothing."""
    chance = random.Random(seed << 32 | index)
    chat, body = drawn(chance)
    expected = ask(alone.http, chat, body)
    if isinstance(expected, str):
        return f"refused: {expected}\n  {body}"
    for number, serving in enumerate(others):
        own = body | {"placement": chance.choice(("auto", "split", "local")),
                      "bypass_prefix_cache": chance.random() < 0.2}
        if may_stream(body) and chance.random() < 0.5:
            own |= {"stream": True, "stream_options": {"include_usage": True}}
        if (answer := ask(serving.http, chat, own)) != expected:
            return (f"cluster {number + 1}, request {index}: {own}\n  expected "
                    f"{expected}\n  got {answer}")
    return ""


def retries(serving: Serving) -> int:
    connection = http.client.HTTPConnection(*serving.http, timeout=20)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return sum(int(count) for count in
               re.findall(r"^tandem_router_retries_total\{.*\} (\d+)$", text, re.MULTILINE))


@contextlib.contextmanager
def killing(clusters: list[Serving]):
    """Kills workers of both in turn; a list of whom."""
    over = threading.Event()
    killed: list[str] = []

    def run() -> None:
        for turn in itertools.count():
            if over.wait(KILL_EVERY):
                return
            workers = clusters[turn % len(clusters)].workers()
            if not workers:
                continue
            name, pid = workers[turn // len(clusters) % len(workers)]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(name)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield killed
    over.set()
    thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binaries", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=30, help="undisturbed, and again")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    failures = []

    numbers = itertools.count()

    def run(name: str) -> None:
        end = time.monotonic() + args.seconds

        def compare_some() -> list[str]:
            texts = []
            while time.monotonic() < end:
                texts.append(compare(alone, others, next(numbers), args.seed))
            return texts

        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as threads:
            runs = [threads.submit(compare_some) for _ in range(CLIENTS)]
            texts = [text for one in runs for text in one.result()]
        found = [text for text in texts if text]
        print(f"{name}: {len(texts)} requests to each, {len(found)} differ", flush=True)
        failures.extend(found)

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        def serve(name: str, prefill: int, decode: int, *flags: str) -> Serving:
            return stack.enter_context(Serving(
                args.binaries, pathlib.Path(folder) / f"{name}.log", *flags,
                "--enable-no-kv-cache", prefill=prefill, decode=decode))

        alone = serve("alone", 0, 1, *ALONE)
        others = [serve("looking-up", 1, 2, *LOOKING_UP), serve("drafting", 2, 2, *DRAFTING)]
        run("undisturbed")
        with killing(others) as killed:
            run("while workers are killed")
        print(f"killed {len(killed)}: {', '.join(killed)}; retries "
              f"{[retries(serving) for serving in others]}")
        if killed and not any(retries(serving) for serving in others):
            failures.append("workers were killed, and nothing was retried")
    for text in failures[:10]:
        print(text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
