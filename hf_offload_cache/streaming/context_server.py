"""A static web server of published contexts, for local testing: it serves only their manifests and objects."""

from __future__ import annotations

import contextlib
import errno
import http.server
import io
import os
import re
import socket
import socketserver
import stat
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from .stream_manifest import NAME

_OBJECT = re.compile(r"[0-9a-f]{40}")
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")
_DEPTH = 8
"""Most folders between the served folder and a context."""
_SECONDS = 10.0
"""Most seconds of a client to send its request, and to receive each piece of the answer."""
_PIECE = 65536
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class ContextServer(http.server.HTTPServer):
    """Serves the contexts published to `folder` or its subfolders, by GET and HEAD.

    A path is served if it ends in `stream.json` or in an object's name, 40 hex digits, and leads through folders to a
    regular file. Links are not followed. Names that begin with a dot, and all others, are not found, and nothing is
    listed. Clients may request a range of bytes.

    Each client has a thread, at most `clients` at a time. Others are answered with 503 and `Retry-After`, and once that
    many of these are waiting, further connections are closed. A client that takes longer than 10 s to send its request,
    or to receive a piece, is disconnected.

    Use as a context manager. Raises `OSError` for an address that is not available, `NotADirectoryError` for `folder`.
    """

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, folder: str | Path, address: tuple[str, int], clients: int = 32) -> None:
        self._slots, self._refusals = threading.BoundedSemaphore(clients), threading.BoundedSemaphore(clients)
        self._lock, self._clients = threading.Lock(), dict[threading.Thread, socket.socket]()
        self.folder_fd = os.open(folder, _FOLDER)
        try:
            if ":" in address[0]:
                self.address_family = socket.AF_INET6
            super().__init__(address, _Handler)
        except BaseException:
            self._close_folder()
            raise

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # without a name lookup
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def server_close(self) -> None:
        """Disconnect all clients, and close the folder."""
        super().server_close()
        with self._lock:
            clients = dict(self._clients)
        for thread, connection in clients.items():
            with contextlib.suppress(OSError):  # it is gone
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
        self._close_folder()

    def _close_folder(self) -> None:
        if self.folder_fd >= 0:
            os.close(self.folder_fd)
        self.folder_fd = -1

    def process_request(self, request: Any, client_address: Any) -> None:
        for handler, slots in ((_Handler, self._slots), (_Refusal, self._refusals)):
            if slots.acquire(blocking=False):
                arguments = (handler, slots, request, client_address)
                thread = threading.Thread(target=self._serve, args=arguments, daemon=True)
                with self._lock:
                    self._clients[thread] = request
                try:
                    thread.start()
                except BaseException:
                    self._gone(thread, slots)
                    raise
                return
        self.shutdown_request(request)

    def _serve(
        self, handler: type[_Handler], slots: threading.Semaphore, request: socket.socket, client_address: Any
    ) -> None:
        try:
            handler(request, client_address, self)
        except OSError:  # the client is gone
            pass
        except Exception:
            self.handle_error(request, client_address)
        finally:
            try:
                self.shutdown_request(request)
            finally:
                self._gone(threading.current_thread(), slots)

    def _gone(self, thread: threading.Thread, slots: threading.Semaphore) -> None:
        with self._lock:
            self._clients.pop(thread, None)
        slots.release()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "hf_offload_cache", ""
    timeout = _SECONDS
    server: ContextServer

    def setup(self) -> None:
        super().setup()
        self._reader = _Reader(self.connection)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        self._reader.until = time.monotonic() + _SECONDS
        super().handle_one_request()

    def do_GET(self) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body, which is not read
        try:
            fd = _opened(self.server.folder_fd, self.path)
        except OSError as error:
            self._answer(503 if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM) else 404)
            return
        try:
            self._send(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    do_HEAD = do_GET

    def _send(self, fd: int, size: int) -> None:
        start, stop, asked = 0, size, _RANGE.fullmatch(self.headers.get("Range", ""))
        if "If-Range" in self.headers:  # objects have no entity tags to compare
            asked = None
        if asked is not None and (asked[1] or asked[2]):
            if not asked[1]:
                start = max(0, size - int(asked[2]))
            else:
                start, stop = int(asked[1]), min(size, int(asked[2]) + 1 if asked[2] else size)
            if start >= stop:
                self._answer(416, ("Content-Range", f"bytes */{size}"))
                return
        else:
            asked = None
        self.send_response(200 if asked is None else 206)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("X-Content-Type-Options", "nosniff")
        if asked is not None:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        self.connection.settimeout(_SECONDS)
        while self.command != "HEAD" and start < stop:
            piece = os.pread(fd, min(_PIECE, stop - start), start)
            if not piece:
                self.close_connection = True  # it has become shorter
                return
            self.wfile.write(piece)
            start += len(piece)

    def _answer(self, status: int, *headers: tuple[str, str]) -> None:
        """A status without a body."""
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer an invalid request or another method, without quoting it. Called by `http.server`."""
        self.close_connection = True
        self._answer(405 if code == 501 else code, ("Connection", "close"))


class _Refusal(_Handler):
    """Answers a client beyond the limit; its request is read first, so that it sees the answer."""

    def do_GET(self) -> None:
        self.close_connection = True
        self._answer(503, ("Retry-After", "1"), ("Connection", "close"))

    do_HEAD = do_GET


class _Reader(io.RawIOBase):
    """A socket's bytes until `until`, by `time.monotonic`. Raises `TimeoutError` after that."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.until = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the client takes too long to send its request")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


def _opened(folder_fd: int, path: str) -> int:
    """A descriptor of the file that a request's path names below an open folder. Raises `OSError` for all that is not
    served."""
    *folders, name = path.partition("?")[0].partition("#")[0].removeprefix("/").split("/")
    folders = [unquote(folder) for folder in folders]
    if name != NAME and _OBJECT.fullmatch(name) is None:
        raise FileNotFoundError(errno.ENOENT, "no file of a published context has this name")
    if len(folders) > _DEPTH or any(not at or at[0] == "." or "/" in at or "\0" in at for at in folders):
        raise FileNotFoundError(errno.ENOENT, "no folder of published contexts has this name")
    at = os.dup(folder_fd)
    try:
        for folder in folders:
            below = os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "it is no regular file")
    return fd
