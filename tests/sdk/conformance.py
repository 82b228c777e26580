# SPDX-License-Identifier: Apache-2.0
"""A list of cases (conformance.json, tools.json) through the Python client, by
threads and by asyncio; and fold.json, without a server.

    conformance.py ADDRESS CASES
"""

import asyncio
import copy
import json
import os
import pathlib
import pickle
import sys
import time
import unittest.mock
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from grpc.aio import UsageError
from tandem import AsyncClient, Client, Options, TandemError
from tandem.client import _Answer
from tandem.v1 import inference_pb2 as pb

CASES = json.loads(pathlib.Path(sys.argv[2]).read_text())["cases"]
FOLD = json.loads(pathlib.Path(__file__).with_name("fold.json").read_text())
REQUESTS = {
    "generate": pb.GenerateRequest,
    "generate_once": pb.GenerateRequest,
    "tokenize": pb.TokenizeRequest,
    "detokenize": pb.DetokenizeRequest,
    "get_model": pb.GetModelRequest,
    "list_models": pb.ListModelsRequest,
}


def differs(want: Any, got: Any, path: str = "") -> str:
    """Where `got` is not what conformance.json means by `want`; or ""."""
    if isinstance(want, dict):
        if not isinstance(got, dict):
            return f"{path}: {got!r}, not an object"
        return next(filter(None, (
            differs(value, got.get(key, 0 if isinstance(value, (int, float)) else None),
                    f"{path}.{key}") for key, value in want.items())), "")
    if isinstance(want, list):
        if not isinstance(got, list) or len(want) != len(got):
            return f"{path}: {got!r}, not {len(want)} items"
        return next(filter(None, (
            differs(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(want, got))
        )), "")
    if isinstance(want, float):
        same = isinstance(got, (int, float)) and abs(want - got) <= 1e-3
        return "" if same else f"{path}: {got!r}, not {want!r}"
    return "" if want == got else f"{path}: {got!r}, not {want!r}"


def verdict(case: dict, answer: Any, error: TandemError | None) -> str:
    if "error" in case:
        if error is None:
            return f"no error, but {answer}"
        got = {"code": error.code.name, "reason": error.reason,
               "field": error.metadata.get("field", "")}
        return differs(case["error"], got, "error")
    if error is not None:
        return f"failed: {error}"
    return differs(case["expect"],
                   MessageToDict(answer, preserving_proto_field_name=True))


def wrap(call: str, answer: Any) -> Any:
    if call == "get_model":
        return pb.GetModelResponse(model=answer)
    if call == "list_models":
        return pb.ListModelsResponse(models=answer)
    return answer


def arguments(case: dict) -> tuple[list, float | None]:
    call = case["call"]
    request = ParseDict(case["request"], REQUESTS[call]())
    timeout = case["timeout_ms"] / 1000 if "timeout_ms" in case else None
    if call == "list_models":
        return [], timeout
    return [request.model if call == "get_model" else request], timeout


def run(client: Client, case: dict) -> str:
    given, timeout = arguments(case)
    try:
        answer = getattr(client, case["call"])(*given, timeout=timeout)
        if case["call"] == "generate":
            stream = answer
            for deltas, _ in enumerate(stream, 1):
                if deltas == case.get("cancel_after_deltas"):
                    stream.cancel()
            answer = stream.answer
    except TandemError as error:
        return verdict(case, None, error)
    return verdict(case, wrap(case["call"], answer), None)


async def run_async(client: AsyncClient, case: dict) -> str:
    given, timeout = arguments(case)
    try:
        answer = getattr(client, case["call"])(*given, timeout=timeout)
        if case["call"] == "generate":
            stream, deltas = answer, 0
            async for _ in stream:
                deltas += 1
                if deltas == case.get("cancel_after_deltas"):
                    stream.cancel()
            answer = stream.answer
        else:
            answer = await answer
    except TandemError as error:
        return verdict(case, None, error)
    return verdict(case, wrap(case["call"], answer), None)


FOLDED = "a stream's events make one answer"


def fold() -> str:
    """Of events to the last field of their answer, which has all there are."""
    folded = _Answer()
    for event in FOLD["events"]:
        folded.add(ParseDict(event, pb.GenerateResponse()))
    want, last = FOLD["answer"], FOLD["answer"]["sequences"][-1]
    for message, has in (pb.GenerateOnceResponse, want), (pb.GeneratedSequence, last):
        for field in message.DESCRIPTOR.fields:
            if field.name not in has:
                return f"fold.json has no {message.__name__}.{field.name}"
    got = folded.response
    same = got == ParseDict(want, pb.GenerateOnceResponse())
    return "" if same else f"{got}, not {want}"


LONG = {
    "text": "a",
    "sampling": {"temperature": 0},
    "stopping": {"max_tokens": 900, "ignore_eos": True},
}
LEFT = "a loop that is left stops the work"


def leave(client: Client) -> str:
    stream = client.generate(ParseDict(LONG, pb.GenerateRequest()))
    for _ in stream:
        break
    code = stream._call.code()  # waits for the call's end
    return "" if code.name == "CANCELLED" else f"{LEFT}: {code}"


CANCELLED = "TandemError CANCELLED"
LEFT_COLLECT = "collect after a left loop is CANCELLED"
CLOSED = "close ends what runs, and calls after it, with CANCELLED"


def outcome(error: BaseException) -> str:
    code = f" {error.code.name}" if isinstance(error, TandemError) else ""
    return type(error).__name__ + code


def ends(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TandemError, ValueError) as error:
        return outcome(error)
    return "no error"


def judge(got: list[str]) -> str:
    return "" if all(g == CANCELLED for g in got) else str(got)


def collect_left(client: Client) -> str:
    stream = client.generate(ParseDict(LONG, pb.GenerateRequest()))
    for _ in stream:
        break
    return judge([ends(stream.collect)])


def close(address: str) -> str:
    request = ParseDict(LONG, pb.GenerateRequest())
    client = Client(address)
    stream = iter(client.generate(request))
    next(stream)
    client.close()
    client.close()
    return judge([
        ends(lambda: list(stream)),
        ends(lambda: client.generate_once(request)),
        ends(lambda: client.generate(request).collect()),
    ])


async def leave_async(client: AsyncClient) -> str:
    stream = client.generate(ParseDict(LONG, pb.GenerateRequest()))
    async for _ in stream:
        break
    code = await stream._call.code()
    return "" if code.name == "CANCELLED" else f"{LEFT}: {code}"


async def ends_async(call: Awaitable) -> str:
    try:
        await call
    except (TandemError, UsageError, asyncio.CancelledError) as error:
        return outcome(error)
    return "no error"


async def collect_left_async(client: AsyncClient) -> str:
    stream = client.generate(ParseDict(LONG, pb.GenerateRequest()))
    async for _ in stream:
        break
    return judge([await ends_async(stream.collect())])


async def close_async(address: str) -> str:
    request = ParseDict(LONG, pb.GenerateRequest())
    client = AsyncClient(address)
    # asyncio.wait: gather would take a CancelledError for its own.
    running = [
        asyncio.create_task(ends_async(client.generate_once(request))),
        asyncio.create_task(ends_async(client.generate(request).collect())),
    ]
    await asyncio.sleep(0.05)
    await client.close()
    await client.close()
    got = [await task for task in running]

    async def collect() -> Any:
        return await client.generate(request).collect()

    got.append(await ends_async(client.generate_once(request)))
    got.append(await ends_async(collect()))
    return judge(got)


CANCELS = "a task's own cancellation goes on"


async def cancels_async(client: AsyncClient) -> str:
    request = ParseDict(LONG, pb.GenerateRequest())
    got = []
    for call in client.generate_once(request), client.generate(request).collect():
        task = asyncio.create_task(call)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        got.append(task.cancelled())
    return "" if all(got) else str(got)


async def all_async(address: str) -> list[tuple[str, str]]:
    async with AsyncClient(address) as client:
        results = [(case["name"], await run_async(client, case)) for case in CASES]
        return [
            *results,
            (LEFT, await leave_async(client)),
            (LEFT_COLLECT, await collect_left_async(client)),
            (CANCELS, await cancels_async(client)),
            (CLOSED, await close_async(address)),
        ]


COPIED = "errors can be pickled and copied"


def copied() -> str:
    error = TandemError(grpc.StatusCode.UNAVAILABLE, "draining")
    error.reason, error.metadata, error.retry_after = "DRAINING", {"a": "b"}, 1.5
    for other in pickle.loads(pickle.dumps(error)), copy.deepcopy(error):
        if vars(other) != vars(error) or str(other) != str(error):
            return f"{other!r} {vars(other)}"
    return "" if str(error) == "UNAVAILABLE (DRAINING): draining" else str(error)


DEFAULTS = "an empty TANDEM_ADDRESS is the default"


def defaults() -> str:
    with unittest.mock.patch.dict(os.environ, {"TANDEM_ADDRESS": ""}):
        address = Options().resolved().address
    return "" if address == "127.0.0.1:50051" else repr(address)


def main() -> None:
    address = sys.argv[1]
    start = time.monotonic()
    with Client(address) as client:
        threads = [(case["name"], run(client, case)) for case in CASES]
        threads.append((LEFT, leave(client)))
        threads.append((LEFT_COLLECT, collect_left(client)))
    threads.append((CLOSED, close(address)))
    results = {
        "threads": threads,
        "asyncio": asyncio.run(all_async(address)),
        "alone": [(FOLDED, fold()), (COPIED, copied()), (DEFAULTS, defaults())],
    }
    failed = 0
    for kind, verdicts in results.items():
        for name, wrong in verdicts:
            if wrong:
                failed += 1
                print(f"python {kind}: {name}: {wrong}")
    passed = sum(map(len, results.values())) - failed
    print(f"python: {passed} passed, {failed} failed, "
          f"{time.monotonic() - start:.1f} s")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
