# SPDX-License-Identifier: Apache-2.0
"""Client of a Tandem cluster.

    from tandem import Client, GenerateRequest

    with Client("127.0.0.1:50051") as client:
        for delta in client.generate(GenerateRequest(text="Once upon a time")):
            print(delta.text, end="", flush=True)

`AsyncClient` is the same for asyncio. Messages are those of
proto/tandem/v1/inference.proto, which says what each field means; nested ones
may be given as dictionaries:

    GenerateRequest(text="...", sampling={"temperature": 0},
                    stopping={"max_tokens": 64})
"""

from tandem.client import (
    AsyncClient,
    AsyncStream,
    Client,
    Options,
    Stream,
    TandemError,
)
from tandem.v1.inference_pb2 import (
    DetokenizeRequest,
    GenerateDelta,
    GenerateOnceResponse,
    GenerateRequest,
    TokenizeRequest,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "DetokenizeRequest",
    "GenerateDelta",
    "GenerateOnceResponse",
    "GenerateRequest",
    "Options",
    "Stream",
    "TandemError",
    "TokenizeRequest",
]
