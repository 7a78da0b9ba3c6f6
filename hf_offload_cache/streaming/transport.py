"""Reading objects asynchronously, several at a time in one thread, so that requests can be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from ..errors import ObjectError
from .answers import TRIES, Answer, pause_after, place_error, reported, without_secrets
from .places import file_system_of, is_web, join
from .web_client import WebClient, all_of

_LARGE = 1 << 20
_GRACE = 1.0
"""Seconds that cancelled reads have to end."""
Result = TypeVar("Result")


class Transport(Protocol):
    """Used within one event loop."""

    async def get(self, name: str, most: int, came: Callable[[int], None] = lambda count: None) -> bytes:
        """The complete content of an object of at most `most` bytes; `came` is called with byte counts as they arrive.
        Raises `ObjectError`; for a larger object it does so before more bytes are accepted."""

    async def close(self) -> None:
        """Close connections."""


def transport_of(url: str, options: dict[str, Any] | None, timeout: float) -> Transport:
    """A URL's transport: aiohttp for "http(s)://...", fsspec for all others. `timeout`: seconds without a byte."""
    return WebClient(url, timeout, options) if is_web(url) else FileTransport(url, timeout, options)


def fetch(transport: Callable[[], Transport], name: str, most: int, seconds: float) -> bytes:
    """Fetch one object within so many seconds, whether or not this thread runs an event loop. If the store answers
    "later", the request is retried. Raises the errors of `Transport.get`."""

    async def get() -> bytes:
        opened = transport()
        try:
            return await asyncio.wait_for(_tried(opened, name, most, seconds), seconds)
        finally:
            await opened.close()

    def fetching() -> None:
        try:
            result.set_result(run(get()))
        except BaseException as error:
            result.set_exception(error)

    result: Future[bytes] = Future()
    threading.Thread(target=fetching, name="hf_offload_cache fetching", daemon=True).start()
    try:
        return result.result(seconds + _GRACE)
    except TimeoutError as error:
        raise place_error(Answer.LATER, f"{name} did not arrive within {seconds:g} s") from error


async def _tried(transport: Transport, name: str, most: int, seconds: float) -> bytes:
    until = time.monotonic() + seconds
    for tries in itertools.count(1):
        try:
            return await transport.get(name, most)
        except ObjectError as error:
            pause = pause_after(error, tries)
            if error.answer is not Answer.LATER or tries == TRIES or time.monotonic() + pause >= until:
                raise
        await asyncio.sleep(pause)
    raise AssertionError("unreachable")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`, but without waiting for the loop's threads, which may hang in a name lookup."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class FileTransport:
    """Reads from any fsspec file system, each object in a thread of its own. Nobody waits for a cancelled thread."""

    def __init__(self, url: str, timeout: float, options: dict[str, Any] | None = None) -> None:
        self._system, self._root = file_system_of(url, options)
        self._system.invalidate_cache()  # others may have published since it was listed
        self._url, self._timeout = url, timeout
        self._threads: list[threading.Thread] = []

    async def get(self, name: str, most: int, came: Callable[[int], None] = lambda count: None) -> bytes:
        pieces: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        cancelled, loop = threading.Event(), asyncio.get_running_loop()

        def send(piece: bytes | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def read() -> None:
            left = most + 1
            try:
                with self._system.open(join(self._root, name), "rb") as file:
                    while left and not cancelled.is_set() and (piece := file.read(min(left, _LARGE))):
                        left -= len(piece)
                        send(piece)
                send(b"")
            except Exception as error:  # each file system has its own
                send(error)

        thread = threading.Thread(target=read, name="hf_offload_cache reading", daemon=True)
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        thread.start()
        place = without_secrets(join(self._url, name))
        try:
            return await all_of(self._pieces(pieces, came), place, most)
        except ObjectError:
            raise
        except TimeoutError as error:
            raise place_error(Answer.LATER, f"{place}: nothing arrived in time") from error
        except Exception as error:
            raise reported(f"{place}: {type(error).__name__}", error) from error
        finally:
            cancelled.set()

    async def _pieces(
        self, pieces: asyncio.Queue[bytes | Exception], came: Callable[[int], None]
    ) -> AsyncIterator[bytes]:
        while piece := await asyncio.wait_for(pieces.get(), self._timeout):
            if isinstance(piece, Exception):
                raise piece
            came(len(piece))
            yield piece

    async def close(self) -> None:
        """Wait up to a second for reading threads; one that hangs is left to itself."""
        deadline = time.monotonic() + _GRACE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
