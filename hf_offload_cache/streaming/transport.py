"""Objects on their way: asked for in one thread, several at once, and given up at once. Needs the extra `[stream]`."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol
from urllib.parse import quote

from ..errors import ConfigError, StoreError
from .objects import file_system_of

_PIECE = 65536


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
    return FileTransport(url, options)


def fetch(transport: Callable[[], Transport], name: str, most: int) -> bytes:
    """One object, in this thread. Raises as `Transport.get`."""

    async def get() -> bytes:
        own = transport()
        try:
            return await own.get(name, most)
        finally:
            await own.close()

    return asyncio.run(get())


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
            self._session = aiohttp.ClientSession(timeout=self._timeout, **self._options)
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

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class FileTransport:
    """Any file system of fsspec: in threads, a piece at a time."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self._system, self._root = file_system_of(url, options)
        self._url = url

    async def get(self, name: str, most: int, came: Callable[[int], None] = lambda count: None) -> bytes:
        place = f"{self._root.rstrip('/')}/{name}"
        try:
            file = await asyncio.to_thread(self._system.open, place, "rb")
            try:
                return await _all_of(_pieces(file), f"{self._url}/{name}", most, came)
            finally:
                await asyncio.to_thread(file.close)
        except FileNotFoundError as error:
            raise MissingObjectError(errno.ENOENT, f"{self._url}/{name}: there is none") from error
        except StoreError:
            raise
        except Exception as error:  # each file system has its own
            raise StoreError(errno.EIO, f"{self._url}/{name}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Nothing to give back."""


async def _pieces(file: Any) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, 1 << 20):
        yield piece


async def _all_of(pieces: AsyncIterator[bytes], place: str, most: int, came: Callable[[int], None]) -> bytes:
    found, total = [], 0
    async for piece in pieces:
        total += len(piece)
        came(len(piece))
        if total > most:
            raise MissingObjectError(errno.EFBIG, f"{place}: more than {most:,} bytes")
        found.append(piece)
    return b"".join(found)
