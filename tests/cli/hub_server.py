# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face hub for tests: the routes, headers and redirections of the
real one for a few repositories in memory, and ways to misbehave. Large files
lie behind a redirection to another host name, as on the hub."""

import hashlib
import http.server
import json
import ssl
import threading
import time
from dataclasses import dataclass, field

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    files: dict[str, bytes]
    gated: bool = False
    etag: str = ""  # of all files, instead of their hashes
    size: int = -1  # announced for weights, instead of theirs


@dataclass
class Hub:
    """Set the fields before or between requests."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    token: str = "hf_good"
    cut_after: int = 0  # bytes, once, of the next large file
    corrupt: bool = False  # one byte of the next large file, once
    ranges: bool = True
    delay: float = 0  # seconds for each large file, in twenty parts
    unavailable: int = 0  # so many answers 503 come first
    requests: list[str] = field(default_factory=list)
    leaked: bool = False  # a token reached the other host
    port: int = 0
    certificate: str = ""  # PEM file with its key: HTTPS

    def __post_init__(self):
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if self.certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True
            )
        self.port = self._server.server_address[1]
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=[0.02], daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def scheme(self) -> str:
        return "https" if self.certificate else "http"

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def reply(self, status: int, body: bytes = b"", **headers: str):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer(self):
        hub = self.hub
        byte_range = self.headers.get("Range", "")
        hub.requests.append(f"{self.command} {self.path} {byte_range}".strip())
        if hub.unavailable > 0:
            hub.unavailable -= 1
            return self.reply(503)
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[0] == "cdn":
            if self.headers.get("Authorization"):
                hub.leaked = True
            return self.large("/".join(parts[1:3]), parts[3])
        is_api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        if repo in hub.renamed:
            return self.reply(307, Location=self.path.replace(repo, hub.renamed[repo]))
        found = hub.repositories.get(repo)
        authorised = self.headers.get("Authorization") == f"Bearer {hub.token}"
        if found is None:
            return self.reply(401, X_Error_Code="RepoNotFound")
        if found.gated and not authorised:
            return self.reply(401, X_Error_Code="GatedRepo")
        revision = parts[5] if is_api else parts[3]
        if revision not in ("main", COMMIT):
            return self.reply(404, X_Error_Code="RevisionNotFound")
        if is_api:
            siblings = [{"rfilename": name} for name in found.files]
            body = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
            return self.reply(200, body, Content_Type="application/json")
        return self.file(repo, found, "/".join(parts[4:]))

    def file(self, repo: str, found: Repository, name: str):
        content = found.files.get(name)
        if content is None:
            return self.reply(404, X_Error_Code="EntryNotFound")
        if not name.endswith(".safetensors"):
            etag = found.etag or hashlib.sha1(content).hexdigest()
            return self.reply(200, content, ETag=f'W/"{etag}"', X_Repo_Commit=COMMIT)
        size = found.size if found.size >= 0 else len(content)
        # Not the same host, so no token may go there.
        return self.reply(
            302,
            Location=f"{self.hub.scheme}://localhost:{self.hub.port}/cdn/{repo}/{name}",
            X_Repo_Commit=COMMIT,
            X_Linked_Etag=f'"{hashlib.sha256(content).hexdigest()}"',
            X_Linked_Size=str(size),
        )

    def large(self, repo: str, name: str):
        hub = self.hub
        content = hub.repositories[repo].files[name]
        begin = 0
        byte_range = self.headers.get("Range", "")
        if byte_range and hub.ranges:
            begin = int(byte_range.removeprefix("bytes=").split("-")[0])
        if hub.corrupt:
            hub.corrupt = False
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header(
                "Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}"
            )
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        if hub.cut_after:
            self.wfile.write(content[begin : begin + hub.cut_after])
            hub.cut_after = 0
            self.close_connection = True
            return
        step = max(1, (len(content) - begin) // 20 + 1)
        for at in range(begin, len(content), step):
            self.wfile.write(content[at : at + step])
            self.wfile.flush()
            time.sleep(hub.delay / 20)
