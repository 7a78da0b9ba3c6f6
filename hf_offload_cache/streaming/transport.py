"""Objects on their way: asked for in one thread, several at once, and given up at once. Needs the extra `[stream]`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from ..errors import ConfigError, StoreError
from .objects import file_system_of

_PIECE, _LARGE = 65536, 1 << 20
_GRACE = 1.0
"""Seconds that are left for what is given up to end."""
Result = TypeVar("Result")


class MissingObjectError(StoreError):
    """There is no such object, or it is no longer what it was: to ask again is of no use."""


class Transport(Protocol):
    """Used within one event loop."""

    async def get(self, name: str, most: int, came: Callable[[int], None] = lambda count: None) -> bytes:
        """All of an object of at most `most` bytes; `came` is told of bytes as they come. Raises `MissingObjectError`,
        also where it has more, before more were taken; `StoreError` for what may be otherwise next time."""

    async def close(self) -> None:
        """Give connections back."""


def transport_of(url: str, options: dict[str, Any] | None, timeout: float) -> Transport:
    """Of a URL: "http(s)://..." by aiohttp, all others by fsspec. `timeout`: seconds without a byte."""
    if url.startswith(("http://", "https://")):
        return HttpTransport(url, timeout, options)
    return FileTransport(url, timeout, options)


def fetch(transport: Callable[[], Transport], name: str, most: int, seconds: float) -> bytes:
    """One object, within so many seconds, whether or not this thread runs an event loop. Raises as `Transport.get`."""

    async def get() -> bytes:
        own = transport()
        try:
            return await asyncio.wait_for(own.get(name, most), seconds)
        finally:
            await own.close()

    found: Future[bytes] = Future()
    threading.Thread(target=_let, args=(found, get), name="hf_offload_cache fetching", daemon=True).start()
    try:
        return found.result(seconds + _GRACE)
    except TimeoutError as error:
        raise StoreError(errno.ETIMEDOUT, f"{name} did not come within {seconds:g} s") from error


def _let(found: Future[bytes], get: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
    try:
        found.set_result(run(get()))
    except BaseException as error:
        found.set_exception(error)


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`, but what the loop's threads still do (a name that is looked up, say) is not waited for."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class HttpTransport:
    """Any static server. `options`: of aiohttp's `ClientSession`, e.g. headers."""

    def __init__(self, url: str, timeout: float, options: dict[str, Any] | None = None) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise ConfigError("http needs the package aiohttp: pip install 'hf-offload-cache[stream]'") from error
        self._url, self._options = url.rstrip("/"), options or {}
        self._timeout = aiohttp.ClientTimeout(total=None, connect=timeout, sock_read=timeout)
        self._session: Any = None

    async def get(self, name: str, most: int, came: Callable[[int], None] = lambda count: None) -> bytes:
        import aiohttp

        place = f"{self._url}/{quote(name)}"
        if self._session is None:
            self._session = self._opened(aiohttp)
        try:
            async with self._session.get(place) as answer:
                if answer.status >= 400:
                    kind = MissingObjectError if answer.status < 500 and answer.status != 429 else StoreError
                    raise kind(errno.ENOENT, f"{place}: {answer.status} {answer.reason}")
                return await _all_of(answer.content.iter_chunked(_PIECE), place, most, came)
        except aiohttp.ClientError as error:
            raise StoreError(errno.EIO, f"{place}: {type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise StoreError(errno.ETIMEDOUT, f"{place}: nothing came in time") from error

    def _opened(self, aiohttp: Any) -> Any:
        try:
            return aiohttp.ClientSession(**{"timeout": self._timeout, **self._options})
        except TypeError as error:
            raise ConfigError(f"options are not of aiohttp's ClientSession: {error}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class FileTransport:
    """Any file system of fsspec: each object in a thread of its own, which nobody waits for when it is given up."""

    def __init__(self, url: str, timeout: float, options: dict[str, Any] | None = None) -> None:
        self._system, self._root = file_system_of(url, options)
        self._url, self._timeout = url, timeout
        self._threads: list[threading.Thread] = []

    async def get(self, name: str, most: int, came: Callable[[int], None] = lambda count: None) -> bytes:
        pieces: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        given_up, loop = threading.Event(), asyncio.get_running_loop()

        def tell(piece: bytes | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def read() -> None:
            left = most + 1
            try:
                with self._system.open(f"{self._root.rstrip('/')}/{name}", "rb") as file:
                    while left and not given_up.is_set() and (piece := file.read(min(left, _LARGE))):
                        left -= len(piece)
                        tell(piece)
                tell(b"")
            except Exception as error:  # each file system has its own
                tell(error)

        thread = threading.Thread(target=read, name="hf_offload_cache reading", daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()
        place = f"{self._url}/{name}"
        try:
            return await _all_of(self._pieces(pieces), place, most, came)
        except FileNotFoundError as error:
            raise MissingObjectError(errno.ENOENT, f"{place}: there is none") from error
        except StoreError:
            raise
        except TimeoutError as error:
            raise StoreError(errno.ETIMEDOUT, f"{place}: nothing came in time") from error
        except Exception as error:
            raise StoreError(errno.EIO, f"{place}: {type(error).__name__}: {error}") from error
        finally:
            given_up.set()

    async def _pieces(self, pieces: asyncio.Queue[bytes | Exception]) -> AsyncIterator[bytes]:
        while piece := await asyncio.wait_for(pieces.get(), self._timeout):
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def close(self) -> None:
        """Threads that read end when they see that nobody wants it; one that hangs is left to itself."""
        deadline = time.monotonic() + _GRACE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


async def _all_of(pieces: AsyncIterator[bytes], place: str, most: int, came: Callable[[int], None]) -> bytes:
    found, total = [], 0
    async for piece in pieces:
        total += len(piece)
        came(len(piece))
        if total > most:
            raise MissingObjectError(errno.EFBIG, f"{place}: more than {most:,} bytes")
        found.append(piece)
    return b"".join(found)
