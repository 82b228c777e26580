# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 frames by hand, for what no library would send, and one honest gRPC call.

A frame (RFC 9113): length (3 bytes), type, flags, stream (4), payload. Headers are
written as literals that nobody indexes, without Huffman's code.
"""

from __future__ import annotations

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0, 1, 3, 4, 6, 7, 8, 9)
END_STREAM = ACK = 1
END_HEADERS = 4


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return (struct.pack(">I", len(payload))[1:] + bytes([kind, flags])
            + struct.pack(">I", stream) + payload)


def integer(value: int, first: int, bits: int) -> bytes:
    """HPACK's, behind the bits of `first`."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    out, value = [first | most], value - most
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def header(name: bytes, value: bytes) -> bytes:
    return (b"\x00" + integer(len(name), 0, 7) + name + integer(len(value), 0, 7)
            + value)


def call_headers(path: bytes, *more: bytes) -> bytes:
    pairs = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path),
             (b":authority", b"localhost"), (b"te", b"trailers"),
             (b"content-type", b"application/grpc"))
    return b"".join(header(*pair) for pair in pairs) + b"".join(more)


def connect(address: tuple[str, int], timeout: float = 20,
            tls=None) -> socket.socket:
    """A connection on which both sides' settings are underway."""
    s = socket.create_connection(address, timeout)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is not None:
        s = tls.wrap_socket(s, server_hostname="localhost")
    s.sendall(PREFACE + frame(SETTINGS))
    return s


def _exactly(s: socket.socket, count: int) -> bytes:
    got = bytearray()
    while len(got) < count:
        piece = s.recv(count - len(got))
        if not piece:
            raise ConnectionError("closed")
        got += piece
    return bytes(got)


def read_frame(s: socket.socket) -> tuple[int, int, int, bytes]:
    head = _exactly(s, 9)
    length = int.from_bytes(head[:3], "big")
    stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
    return head[3], head[4], stream, _exactly(s, length)


def call(s: socket.socket, path: bytes, message: bytes, stream: int = 1,
         *more: bytes) -> list[bytes]:
    """The messages that answer a call with one; raises where it does not end."""
    s.sendall(frame(HEADERS, END_HEADERS, stream, call_headers(path, *more))
              + frame(DATA, END_STREAM, stream,
                      b"\0" + struct.pack(">I", len(message)) + message))
    data = b""
    while True:
        kind, flags, its, payload = read_frame(s)
        if kind == SETTINGS and not flags & ACK:
            s.sendall(frame(SETTINGS, ACK))
        elif kind == PING and not flags & ACK:
            s.sendall(frame(PING, ACK, 0, payload))
        elif kind == GOAWAY or (kind == RST_STREAM and its == stream):
            raise ConnectionError(f"refused: {payload.hex()}")
        elif its == stream and kind == DATA:
            data += payload
        if its == stream and kind in (DATA, HEADERS) and flags & END_STREAM:
            break
    messages = []
    while data:
        length = int.from_bytes(data[1:5], "big")
        messages.append(data[5:5 + length])
        data = data[5 + length:]
    return messages


def length_delimited(field: int, value: bytes) -> bytes:
    """Of a protobuf message; lengths below 128."""
    return bytes([field << 3 | 2, len(value)]) + value


GENERATE = b"/tandem.v1.InferenceService/Generate"
# GenerateRequest: text, stopping.max_tokens = 8.
REQUEST = length_delimited(3, b"Once upon a time") + length_delimited(7, b"\x08\x08")
DONE = 5 << 3 | 2  # of GenerateResponse: the last message


def generate(address: tuple[str, int], timeout: float = 20, tls=None,
             *more: bytes) -> int:
    """An honest request on a connection of its own; how many messages answered."""
    with connect(address, timeout, tls) as s:
        answers = call(s, GENERATE, REQUEST, 1, *more)
    if not answers or answers[-1][0] != DONE:
        raise ConnectionError(f"an answer without an end: {len(answers)} messages")
    return len(answers)
