"""A web server on loopback that takes and gives objects, says what a test wants it to, and notes what it was asked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Asked:
    method: str
    path: str
    """Without the query."""
    query: str
    headers: dict[str, str]


@dataclass
class Reply:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class WebStore:
    """`files`: by path without the query. `reply`: what is said instead; None: what is in `files`. `wants_length`: what
    comes in pieces has 411. `keeps`: what is put there is changed so; None: it is thrown away."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    reply: Callable[[Asked], Reply | None] = lambda asked: None
    keeps: Callable[[str, bytes], bytes | None] = lambda path, data: data
    wants_length: bool = False

    def of(self, method: str) -> list[str]:
        """The paths that were asked for by a method."""
        return [one.path for one in self.asked if one.method == method]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: WebStore

    def log_message(self, *args: Any) -> None:
        """Nothing."""

    def _any(self) -> None:
        path, _, query = self.path.partition("?")
        asked = Asked(self.command, path, query, {name.lower(): value for name, value in self.headers.items()})
        self.store.asked.append(asked)
        data = self._body()
        reply = self.store.reply(asked)
        if reply is None and self.command == "PUT":
            reply = Reply(201)
            if "transfer-encoding" in asked.headers and self.store.wants_length:
                reply = Reply(411)
            elif (kept := self.store.keeps(path, data)) is not None:
                self.store.files[path] = kept
        elif reply is None:
            reply = Reply(200, self.store.files[path]) if path in self.store.files else Reply(404)
        with contextlib.suppress(OSError):  # the client may have seen enough
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.body)

    do_GET = do_PUT = do_HEAD = _any

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data


@contextlib.contextmanager
def web_store() -> Iterator[WebStore]:
    """Until the end of the `with`."""
    store = WebStore()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": store}))
    server.daemon_threads, server.handle_error = True, lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    store.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
