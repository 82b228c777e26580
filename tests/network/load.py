# SPDX-License-Identifier: Apache-2.0
"""Streams over HTTP, each compared token by token with what its request gives when
nothing disturbs it."""

from __future__ import annotations

import dataclasses
import http.client
import json
import random
import threading
import time

from cluster import HTTP

WORDS = ("Mia found a red ball near the old oak and ran to Tom who was in his small "
         "house with blue door cat dog big happy river stone apple said hello sun")
# A stream that is not over by then hangs: far above any budget of one request.
HANG = 150.0


@dataclasses.dataclass
class Outcome:
    token_ids: list[int]
    text: str
    error: str  # "" where it ended as it should
    gap: float  # the longest silence within it, in seconds
    hung: bool = False


def requests(count: int, tokens: int, seed: int) -> list[dict]:
    """Greedy and sampled ones, of prompts that need a prefill worker."""
    chance = random.Random(seed)
    made = []
    for i in range(count):
        words = chance.choices(WORDS.split(), k=chance.randint(20, 50))
        body = {"model": "", "prompt": f"Story {i}. " + " ".join(words),
                "max_tokens": tokens, "ignore_eos": True, "stream": True,
                "return_token_ids": True, "temperature": 0, "placement": "split",
                "bypass_prefix_cache": i % 3 == 0}
        if i % 2:
            body |= {"temperature": 0.8, "seed": i}
        if i % 4 == 3:
            body["placement"] = "auto"
        made.append(body)
    return made


def generate(address: str, body: dict, patience: float = HANG) -> Outcome:
    """One request over a connection of its own."""
    begun = last = time.monotonic()
    outcome = Outcome([], "", "", 0)
    finished = False
    connection = http.client.HTTPConnection(address, HTTP, timeout=patience)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body),
                           {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            outcome.error = f"{response.status} {response.read().decode()}"
            return outcome
        for line in response:
            if not line.startswith(b"data: "):
                continue
            now = time.monotonic()
            outcome.gap, last = max(outcome.gap, now - last), now
            if line.strip() == b"data: [DONE]":
                break
            event = json.loads(line[6:])
            if "error" in event:
                outcome.error = json.dumps(event["error"])
                return outcome
            for choice in event["choices"]:
                outcome.token_ids += choice.get("token_ids") or []
                outcome.text += choice["text"]
                finished |= choice["finish_reason"] is not None
        else:
            outcome.error = "the stream broke off"
        if not finished and not outcome.error:
            outcome.error = "no finish reason"
    except TimeoutError:
        outcome.hung = True
    except (OSError, http.client.HTTPException) as error:
        outcome.error = repr(error)
    finally:
        connection.close()
        outcome.hung |= time.monotonic() - begun > patience
    return outcome


class Load:
    """Keeps `streams` requests in flight, round and round, until told to stop."""

    def __init__(self, address: str, bodies: list[dict], expected: list[Outcome],
                 streams: int) -> None:
        self._address = address
        self._work = list(zip(bodies, expected))
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._next = 0
        self.completed = 0
        self.wrong: list[str] = []
        self.failed: list[str] = []
        self.hung = 0
        self.gap = 0.0
        self._threads = [threading.Thread(target=self._run, daemon=True)
                         for _ in range(streams)]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Lets what runs end; what does not in time is a hang."""
        self._stop.set()
        end = time.monotonic() + HANG + 10
        for thread in self._threads:
            thread.join(max(0, end - time.monotonic()))
            self.hung += thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                body, expected = self._work[self._next % len(self._work)]
                self._next += 1
            outcome = generate(self._address, body)
            with self._lock:
                self._judge(body, expected, outcome)
            if outcome.error:
                time.sleep(0.2)  # as a client that was told to come back

    def _judge(self, body: dict, expected: Outcome, outcome: Outcome) -> None:
        self.completed += 1
        self.gap = max(self.gap, outcome.gap)
        got = outcome.token_ids
        # An end before the end is no excuse for other tokens up to there.
        right = (expected.token_ids[:len(got)] == got
                 and expected.text.startswith(outcome.text))
        if outcome.hung:
            self.hung += 1
        if not right:
            self.wrong.append(f"{body['prompt'][:12]}: {got} for {expected.token_ids}")
        elif outcome.error:
            self.failed.append(outcome.error)
        elif outcome.hung is False and (got != expected.token_ids
                                        or outcome.text != expected.text):
            self.wrong.append(f"{body['prompt'][:12]}: ends after {len(got)} tokens")
