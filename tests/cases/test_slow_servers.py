"""Case s4: a server that sends a byte now and then, sends without an end, or sends its readers in circles."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from long_llama import long_model

from hf_offload_cache import DiskSwapCache, publish_context, stream_context
from hf_offload_cache.errors import ContextError, StoreError

TOKENS, MIB = 256, 2**20
LONGEST = 25
"""Seconds: `silence` of 2, and its tries."""


def ids() -> torch.Tensor:
    return torch.randint(3, 90, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))


class Attacks(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    how: str

    def log_message(self, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        with contextlib.suppress(OSError):  # the client may have seen enough
            getattr(self, self.how)(self.path.split("/")[-1])

    def _begin(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def serves(self, name: str) -> None:
        data = (self.folder / name).read_bytes()
        self._begin(200, Content_Length=str(len(data)))
        self.wfile.write(data)

    def drips(self, name: str) -> None:
        self._begin(200, Content_Length="1000000")
        for _ in range(600):
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.1)

    def never_ends(self, name: str) -> None:
        self._begin(200, Transfer_Encoding="chunked")
        for _ in range(20_000):
            self.wfile.write(b"10000\r\n" + bytes(65536) + b"\r\n")

    def objects_never_end(self, name: str) -> None:
        if name == "stream.json":
            self.serves(name)
        else:
            self.never_ends(name)

    def sends_in_circles(self, name: str) -> None:
        self._begin(302, Location=self.path + "x", Content_Length="0")

    def sends_to_a_file(self, name: str) -> None:
        self._begin(302, Location="file:///etc/passwd", Content_Length="0")


@contextlib.contextmanager
def server(folder: Path, how: str) -> Iterator[str]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Attacks,), {"folder": folder, "how": how}))
    made.daemon_threads, made.handle_error = True, lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_address[1]}"
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


@contextlib.contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Raises AssertionError where the process grew by more meanwhile."""
    process, done = psutil.Process(), threading.Event()
    before = largest = process.memory_info().rss

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.02):
            largest = max(largest, process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert largest - before < limit, f"{(largest - before) // MIB} MiB"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    with DiskSwapCache(long_model(), path=folder) as cache, torch.no_grad():
        long_model()(ids()[:, :TOKENS], past_key_values=cache)
        publish_context(cache, folder / "pub", level="lossless", chunk_tokens=64)
    return folder / "pub"


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "streams"),
    [
        ("serves", True), ("sends_in_circles", False), ("sends_to_a_file", False), ("never_ends", False),
        pytest.param("objects_never_end", None, marks=SLOW), pytest.param("drips", False, marks=SLOW),
    ],
)  # fmt: skip
def test_reading_ends(how: str, streams: bool | None, published: Path, tmp_path: Path) -> None:
    """In bounded time and memory: with an error of the library's, or with the text computed here. None: either."""
    start = time.monotonic()
    with server(published, how) as url, memory_below(200 * MIB):
        try:
            with stream_context(url, long_model(), ids(), path=tmp_path, silence=2) as cache:
                assert streams is not False
                assert cache.get_seq_length() == TOKENS
                assert cache.stream_report.lost == 0 or how == "objects_never_end"
        except (ContextError, StoreError) as error:
            assert streams is not True, error
    assert time.monotonic() - start < LONGEST
