# SPDX-License-Identifier: Apache-2.0
"""One thin class over the generated stubs, once for threads and once for asyncio."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

# Only what was refused before it began is tried again (gRFC A6): the server
# sends no header before it has admitted a request.
_SERVICE_CONFIG = json.dumps({
    "methodConfig": [{
        "name": [{"service": "tandem.v1.InferenceService"}],
        "retryPolicy": {
            "maxAttempts": 4,
            "initialBackoff": "0.2s",
            "maxBackoff": "2s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        },
    }],
})
_CHANNEL_OPTIONS = [
    ("grpc.service_config", _SERVICE_CONFIG),
    # A long prompt is a long silence.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 64 << 20),
]


@dataclasses.dataclass(frozen=True)
class Options:
    """How to reach a router. What is None comes from the environment."""

    address: str | None = None  # TANDEM_ADDRESS, else 127.0.0.1:50051
    api_key: str | None = None  # TANDEM_API_KEY
    # PEM files. A CA means TLS; certificate and key, mutual TLS.
    ca: str | None = None  # TANDEM_CA
    cert: str | None = None  # TANDEM_CERT
    key: str | None = None  # TANDEM_KEY
    # Seconds for calls that are given none; None: the server's own limit.
    timeout: float | None = None

    def resolved(self) -> Options:
        def of(value: str | None, name: str, default: str = "") -> str:
            return (os.environ.get(name) or default) if value is None else value

        found = Options(
            address=of(self.address, "TANDEM_ADDRESS", "127.0.0.1:50051"),
            api_key=of(self.api_key, "TANDEM_API_KEY"),
            ca=of(self.ca, "TANDEM_CA"),
            cert=of(self.cert, "TANDEM_CERT"),
            key=of(self.key, "TANDEM_KEY"),
            timeout=self.timeout,
        )
        if bool(found.cert) != bool(found.key):
            raise ValueError("cert and key (TANDEM_CERT, TANDEM_KEY) go together")
        if found.cert and not found.ca:
            raise ValueError("cert (TANDEM_CERT) needs ca (TANDEM_CA)")
        return found

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Of resolved options; None is plain text."""
        if not self.ca:
            return None

        def read(path: str | None) -> bytes | None:
            return pathlib.Path(path).read_bytes() if path else None

        return grpc.ssl_channel_credentials(
            read(self.ca), read(self.key), read(self.cert)
        )

    def metadata(self) -> list[tuple[str, str]]:
        if not self.api_key:
            return []
        return [("authorization", f"Bearer {self.api_key}")]


class TandemError(Exception):
    """A call that failed: the gRPC status, and what its ErrorInfo says."""

    def __init__(
        self, code: grpc.StatusCode, message: str, trailing: Any = None
    ) -> None:
        self.code = code
        self.message = message
        # UPPER_SNAKE, "FIELD_INVALID"; empty where the server did not say.
        self.reason = ""
        self.metadata: dict[str, str] = {}
        # Seconds after which a retry may succeed.
        self.retry_after: float | None = None
        for key, value in trailing or ():
            if key == "grpc-status-details-bin":
                self._read(value)
        # As this takes them: pickle and copy make one of its arguments, and
        # then give it the attributes.
        super().__init__(code, message)

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.code.name}{reason}: {self.message}"

    @classmethod
    def of(cls, error: grpc.RpcError) -> TandemError:
        return cls(error.code(), error.details() or "", error.trailing_metadata())

    def _read(self, details: bytes) -> None:
        for detail in status_pb2.Status.FromString(details).details:
            info = error_details_pb2.ErrorInfo()
            retry = error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                self.reason = info.reason
                self.metadata = dict(info.metadata)
            elif detail.Unpack(retry):
                delay: duration_pb2.Duration = retry.retry_delay
                self.retry_after = delay.ToTimedelta().total_seconds()


def _task_cancelled() -> bool:
    """Whose an asyncio.CancelledError is: the task's own, which goes on, or
    gRPC's word for a call that this client ended."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cancelled(why: str = "cancelled by this client") -> TandemError:
    return TandemError(grpc.StatusCode.CANCELLED, why)


class _Answer:
    """Folds a stream's events into what GenerateOnce would have answered."""

    def __init__(self) -> None:
        self.response = pb.GenerateOnceResponse()
        self._sequences: dict[int, pb.GeneratedSequence] = {}

    def add(self, event: pb.GenerateResponse) -> pb.GenerateDelta | None:
        kind = event.WhichOneof("event")
        if event.request_id:
            self.response.request_id = event.request_id
        if kind == "started":
            self.response.started.CopyFrom(event.started)
        elif kind == "prompt_logprobs":
            self.response.prompt_logprobs.extend(event.prompt_logprobs.tokens)
        elif kind == "delta":
            delta = event.delta
            sequence = self._sequence(delta.index)
            sequence.text += delta.text
            sequence.reasoning_content += delta.reasoning_content
            sequence.token_ids.extend(delta.token_ids)
            sequence.logprobs.extend(delta.logprobs)
            sequence.attention.extend(delta.attention)
            for piece in delta.tool_calls:
                while len(sequence.tool_calls) <= piece.index:
                    sequence.tool_calls.add()
                call = sequence.tool_calls[piece.index]
                call.id = piece.id or call.id
                call.name = piece.name or call.name
                call.arguments_json += piece.arguments_json
            return delta
        elif kind == "finished":
            self._sequence(event.finished.index).finished.CopyFrom(event.finished)
        elif kind == "done":
            self.response.done.CopyFrom(event.done)
            self.response.sequences.extend(
                self._sequences[index] for index in sorted(self._sequences)
            )
        return None

    def _sequence(self, index: int) -> pb.GeneratedSequence:
        if index not in self._sequences:
            self._sequences[index] = pb.GeneratedSequence(index=index)
        return self._sequences[index]


class Stream:
    """Deltas as they come. Leaving the loop, or `cancel`, stops the work."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._answer = _Answer()

    def __iter__(self) -> Iterator[pb.GenerateDelta]:
        try:
            for event in self._call:
                delta = self._answer.add(event)
                if delta is not None:
                    yield delta
        except grpc.RpcError as error:
            raise TandemError.of(error) from None
        finally:
            self._call.cancel()  # nothing, after the last

    def collect(self) -> pb.GenerateOnceResponse:
        """The whole answer; what an iterator that is still open has read is
        part of it."""
        for _ in self:
            pass
        return self._answer.response

    def cancel(self) -> None:
        self._call.cancel()

    @property
    def answer(self) -> pb.GenerateOnceResponse:
        """What is known so far: `started` from the first delta on, `done` and
        the sequences after the last."""
        return self._answer.response


class AsyncStream:
    """`Stream` for asyncio."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._answer = _Answer()

    async def __aiter__(self) -> AsyncIterator[pb.GenerateDelta]:
        try:
            async for event in self._call:
                delta = self._answer.add(event)
                if delta is not None:
                    yield delta
        except grpc.RpcError as error:
            raise TandemError.of(error) from None
        except asyncio.CancelledError:
            if _task_cancelled():
                raise
            raise _cancelled() from None
        finally:
            self._call.cancel()

    async def collect(self) -> pb.GenerateOnceResponse:
        async for _ in self:
            pass
        return self._answer.response

    def cancel(self) -> None:
        self._call.cancel()

    @property
    def answer(self) -> pb.GenerateOnceResponse:
        return self._answer.response


class _Base:
    def __init__(self, address: str | None, options: Options | None) -> None:
        options = options or Options()
        if address is not None:
            options = dataclasses.replace(options, address=address)
        self._options = options.resolved()
        self._metadata = self._options.metadata()
        self._closed = False

    def _start(self, method: Any, request: Any, timeout: float | None) -> Any:
        time = self._options.timeout if timeout is None else timeout
        try:
            return method(request, timeout=time, metadata=self._metadata)
        except (ValueError, grpc.aio.UsageError):
            # gRPC's, of threads and of asyncio, for a channel that is closed.
            if not self._closed:
                raise
            raise _cancelled("the client is closed") from None


class Client(_Base):
    """Thread-safe; one connection. Errors of calls are TandemErrors."""

    def __init__(
        self, address: str | None = None, options: Options | None = None
    ) -> None:
        super().__init__(address, options)
        tls = self._options.credentials()
        where = self._options.address
        self._channel = (
            grpc.secure_channel(where, tls, options=_CHANNEL_OPTIONS)
            if tls
            else grpc.insecure_channel(where, options=_CHANNEL_OPTIONS)
        )
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True
        self._channel.close()

    def generate(
        self, request: pb.GenerateRequest, timeout: float | None = None
    ) -> Stream:
        return Stream(self._start(self._stub.Generate, request, timeout))

    def generate_once(
        self, request: pb.GenerateRequest, timeout: float | None = None
    ) -> pb.GenerateOnceResponse:
        return self._unary(self._stub.GenerateOnce, request, timeout)

    def tokenize(
        self, request: pb.TokenizeRequest, timeout: float | None = None
    ) -> pb.TokenizeResponse:
        return self._unary(self._stub.Tokenize, request, timeout)

    def detokenize(
        self, request: pb.DetokenizeRequest, timeout: float | None = None
    ) -> pb.DetokenizeResponse:
        return self._unary(self._stub.Detokenize, request, timeout)

    def list_models(self, timeout: float | None = None) -> list[pb.ModelInfo]:
        request = pb.ListModelsRequest()
        return list(self._unary(self._stub.ListModels, request, timeout).models)

    def get_model(self, model: str = "", timeout: float | None = None) -> pb.ModelInfo:
        request = pb.GetModelRequest(model=model)
        return self._unary(self._stub.GetModel, request, timeout).model

    def _unary(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            return self._start(method, request, timeout)
        except grpc.RpcError as error:
            raise TandemError.of(error) from None


class AsyncClient(_Base):
    """`Client` for asyncio; made inside the loop that uses it."""

    def __init__(
        self, address: str | None = None, options: Options | None = None
    ) -> None:
        super().__init__(address, options)
        tls = self._options.credentials()
        where = self._options.address
        self._channel = (
            grpc.aio.secure_channel(where, tls, options=_CHANNEL_OPTIONS)
            if tls
            else grpc.aio.insecure_channel(where, options=_CHANNEL_OPTIONS)
        )
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._closed = True
        await self._channel.close()

    def generate(
        self, request: pb.GenerateRequest, timeout: float | None = None
    ) -> AsyncStream:
        return AsyncStream(self._start(self._stub.Generate, request, timeout))

    async def generate_once(
        self, request: pb.GenerateRequest, timeout: float | None = None
    ) -> pb.GenerateOnceResponse:
        return await self._unary(self._stub.GenerateOnce, request, timeout)

    async def tokenize(
        self, request: pb.TokenizeRequest, timeout: float | None = None
    ) -> pb.TokenizeResponse:
        return await self._unary(self._stub.Tokenize, request, timeout)

    async def detokenize(
        self, request: pb.DetokenizeRequest, timeout: float | None = None
    ) -> pb.DetokenizeResponse:
        return await self._unary(self._stub.Detokenize, request, timeout)

    async def list_models(self, timeout: float | None = None) -> list[pb.ModelInfo]:
        request = pb.ListModelsRequest()
        answer = await self._unary(self._stub.ListModels, request, timeout)
        return list(answer.models)

    async def get_model(
        self, model: str = "", timeout: float | None = None
    ) -> pb.ModelInfo:
        request = pb.GetModelRequest(model=model)
        return (await self._unary(self._stub.GetModel, request, timeout)).model

    async def _unary(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            return await self._start(method, request, timeout)
        except grpc.RpcError as error:
            raise TandemError.of(error) from None
        except asyncio.CancelledError:
            if _task_cancelled():
                raise
            raise _cancelled() from None
