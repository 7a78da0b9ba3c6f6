"""A client for untrusted web servers, using aiohttp within one event loop. Needs the extra `[stream]`."""

from __future__ import annotations

import base64
import io
import re
import urllib.request
import zlib
from collections.abc import AsyncIterator, Callable, Container
from typing import Any
from urllib.parse import unquote

from ..errors import ConfigError, DamagedObjectError, ObjectError
from .answers import (
    Answer,
    line_of,
    of_error,
    of_status,
    place_error,
    received,
    seconds_of,
    too_large,
    without_secrets,
)
from .places import join

_PIECE, _LARGE = 65536, 1 << 20
_REDIRECTS = 10
_SPARE = 65536
"""Bytes by which a compressed body may be larger than its content."""
_ANYWHERE = (
    "connector", "timeout", "trust_env", "proxy", "proxy_auth", "read_bufsize", "max_line_size", "max_field_size",
)  # fmt: skip
"""Options for every origin. All others may be secrets, and only the URL's own origin gets them."""
_LEGAL = re.compile(r"[!-~]*")
_AUTHORITY = re.compile(r"([a-z]+://)([^/?#]*)@", re.IGNORECASE)


class WebClient:
    """Objects below a web server's URL.

    A redirect to another origin (scheme, host or port) is followed without the given headers, cookies and password. A
    redirect to anything but http and https, or from https to http, raises `ObjectError`. Proxies come from the
    environment (HTTP_PROXY, HTTPS_PROXY, NO_PROXY), unless `options` have one.

    Args:
        url: names are added to its path, before its query. Its user and password are sent to its origin only.
        silence: seconds without a byte after which a request fails.
        options: arguments of aiohttp's `ClientSession`, such as `headers`, directly or as `client_kwargs`; and `ssl`.

    Raises `ConfigError`.
    """

    def __init__(self, url: str, silence: float, options: dict[str, Any] | None = None) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise ConfigError("http needs the package aiohttp: pip install 'hf-offload-cache[stream]'") from error
        self._aiohttp = aiohttp
        given = dict(options or {})
        given = {**given.pop("client_kwargs", {}), **given}
        given.pop("skip_instance_cache", None)  # fsspec's
        self._of_request = {name: given.pop(name) for name in ("ssl",) if name in given}
        self._of_request |= {"allow_redirects": False, "raise_for_status": False}
        timeout = aiohttp.ClientTimeout(total=None, connect=silence, sock_read=silence)
        self._url, self._options = _without_user(url, {"timeout": timeout, **given})
        self._own: Any = None
        self._bare: Any = None
        self._sized = False  # whether bodies are sent with their length

    async def get(
        self, name: str, most: int, came: Callable[[int], None] = lambda count: None, *, fresh: bool = False
    ) -> bytes:
        """The complete content of an object of at most `most` bytes; `came` is called with byte counts as they arrive.
        `fresh`: bypass caches on the way. Raises `ObjectError`, before more than `most` bytes are kept."""
        headers = {"Accept-Encoding": "identity", **({"Cache-Control": "no-cache"} if fresh else {})}
        place = self._shown(name)
        try:
            async with await self._asked("GET", name, headers) as answer:
                self._check(answer, place, (200,))
                return await all_of(_unpacked(answer, place, most, came), place, most)
        except Exception as error:
            raise self._reported(place, error) from error

    async def put(self, name: str, data: bytes) -> None:
        """Send an object in pieces, or with its length if the server asks for that. Raises `ObjectError`."""
        headers, place = {"Content-Type": "application/octet-stream"}, self._shown(name)
        try:
            while True:
                body = (lambda: io.BytesIO(data)) if self._sized else (lambda: _pieces(data))
                async with await self._asked("PUT", name, headers, body) as answer:
                    if answer.status not in (411, 501) or self._sized:
                        self._check(answer, place, range(200, 300))
                        return
                self._sized = True
        except Exception as error:
            raise self._reported(place, error) from error

    async def close(self) -> None:
        """Close connections."""
        for session in (self._bare, self._own):
            if session is not None:
                await session.close()

    # --- one request ---------------------------------------------------------------------------------------------

    async def _asked(
        self, method: str, name: str, headers: dict[str, str], body: Callable[[], Any] = lambda: None
    ) -> Any:
        """The first answer that is not a redirect. The caller closes it."""
        if self._own is None:
            self._own = self._opened(self._options)
        session, url = self._own, _parsed(join(self._url, name))
        for _ in range(_REDIRECTS + 1):
            answer = await session.request(
                method, url, headers=headers, data=body(), proxy=self._proxy(url), **self._of_request
            )
            if answer.status not in (301, 302, 303, 307, 308):
                return answer
            answer.close()
            target = _target(url, answer.headers.get("Location", ""))
            if method != "GET" and answer.status < 307:  # usually to a login page
                raise place_error(Answer.REFUSED, f"{url}: {answer.status}, a redirect of a PUT")
            if session is self._own and target.origin() != url.origin():
                session = self._for_others()
            url = target
        raise place_error(Answer.BROKEN, f"{url}: more than {_REDIRECTS} redirects")

    def _for_others(self) -> Any:
        """The session for other origins."""
        if self._bare is None:
            kept = {name: value for name, value in self._options.items() if name in _ANYWHERE}
            kept["cookie_jar"] = self._aiohttp.DummyCookieJar()  # a jar would give one port's cookies to another
            self._bare = self._opened({**kept, "connector_owner": False} if "connector" in kept else kept)
        return self._bare

    def _opened(self, options: dict[str, Any]) -> Any:
        try:
            return self._aiohttp.ClientSession(**{**options, "auto_decompress": False})
        except TypeError as error:
            raise ConfigError(f"options must be those of aiohttp's ClientSession: {error}") from error

    def _proxy(self, url: Any) -> str | None:
        """The environment's proxy for this URL ("host:port" is an http proxy); None: there is none, or the options
        decide. Raises `ConfigError` for another kind of proxy."""
        if self._options.get("proxy") or self._options.get("trust_env"):
            return None
        if urllib.request.proxy_bypass(f"{url.host}:{url.port}"):
            return None
        if not (proxy := urllib.request.getproxies().get(url.scheme, "").strip()):
            return None
        kind, mark, _ = proxy.partition("://")
        if mark and kind.lower() not in ("http", "https"):
            raise ConfigError(
                f"{url.scheme}_proxy names a {line_of(kind)} proxy, and only http proxies can be used: unset it, or "
                f"name {url.host} in no_proxy"
            )
        return proxy if mark else f"http://{proxy.lstrip('/')}"

    def _shown(self, name: str) -> str:
        return without_secrets(join(self._url, name))

    @staticmethod
    def _check(answer: Any, place: str, good: Container[int]) -> None:
        if answer.status not in good:
            wait = seconds_of(answer.headers.get("Retry-After"))
            reason = line_of(answer.reason or "")
            raise place_error(of_status(answer.status), f"{place}: {answer.status} {reason}", retry_after=wait)

    def _reported(self, place: str, error: Exception) -> Exception:
        if isinstance(error, (ObjectError, ConfigError)):
            return error
        if isinstance(error, TimeoutError):
            return place_error(Answer.LATER, f"{place}: nothing arrived in time")
        text = f"{place}: {type(error).__name__}: {line_of(str(error))}"
        if isinstance(error, self._aiohttp.ClientHttpProxyError):
            return place_error(of_status(error.status), text)
        if isinstance(error, self._aiohttp.ClientResponseError):  # not HTTP, though it has a status
            return place_error(Answer.BROKEN, text)
        return place_error(of_error(error), text)


# --- bodies ------------------------------------------------------------------------------------------------------


async def all_of(pieces: AsyncIterator[bytes], place: str, most: int) -> bytes:
    """The bytes of all pieces, until they exceed `most`. Raises the errors of `received`."""
    kept, total = list[bytes](), 0
    async for piece in pieces:
        total += len(piece)
        kept.append(piece)
        if total > most:
            received(b"".join(kept[:2])[:_SPARE], place, most)  # an HTML page has its own error
            raise too_large(place, most)
    return received(b"".join(kept), place, most)


async def _unpacked(answer: Any, place: str, most: int, came: Callable[[int], None]) -> AsyncIterator[bytes]:
    """A body's pieces, decompressed up to one byte more than `most`."""
    coding, total, left = answer.headers.get("Content-Encoding", "identity").lower(), 0, most + 1
    if coding not in ("identity", "", "gzip", "x-gzip", "deflate"):
        raise place_error(Answer.BROKEN, f"{place}: its content coding is {line_of(coding)}, which was not requested")
    unpacker = None if coding in ("identity", "") else zlib.decompressobj(47)  # with the header of either
    async for piece in answer.content.iter_chunked(_PIECE):
        came(len(piece))
        total += len(piece)
        if unpacker is None:
            yield piece
            continue
        if total > most + _SPARE:
            raise too_large(place, most)
        try:
            unpacked = unpacker.decompress(piece, left)
        except zlib.error as error:
            raise place_error(Answer.BROKEN, f"{place}: is not {coding}: {error}", kind=DamagedObjectError) from error
        left -= len(unpacked)
        if unpacked:
            yield unpacked
        if not left:  # more than `most`; 0 would mean without a limit
            return
    if unpacker is not None and not unpacker.eof:
        raise place_error(Answer.BROKEN, f"{place}: its {coding} ends too early", kind=DamagedObjectError)


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), _LARGE):
        yield data[start : start + _LARGE]


# --- URLs --------------------------------------------------------------------------------------------------------


def _parsed(url: str) -> Any:
    """A URL, unchanged because it may be signed. Raises `ObjectError`."""
    import yarl

    try:
        return yarl.URL(url, encoded=_LEGAL.fullmatch(url) is not None)
    except ValueError as error:
        raise place_error(Answer.BROKEN, f"{url}: is not a URL: {error}") from error


def _target(url: Any, location: str) -> Any:
    """The URL that a redirect leads to. Raises `ObjectError`."""
    target = url.join(_parsed(location)) if location else None
    if target is None or target.scheme not in ("http", "https") or not target.host:
        raise place_error(Answer.BROKEN, f"{url}: redirects to {line_of(location) or 'no place'}, which is no web URL")
    if url.scheme == "https" and target.scheme == "http":
        raise place_error(Answer.BROKEN, f"{url}: redirects from https to http, which anybody could change")
    return target


def _without_user(url: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A URL without its user and password, and options that send them to its origin. Raises `ConfigError`."""
    match = _AUTHORITY.match(url)
    if match is None:
        return url, options
    from multidict import CIMultiDict

    headers = CIMultiDict(options.get("headers") or {})
    if "Authorization" in headers or options.get("auth") is not None:
        raise ConfigError("both url and options have credentials: give one of them")
    user, _, password = match[2].partition(":")
    token = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    headers["Authorization"] = f"Basic {token}"
    return match[1] + url[match.end() :], {**options, "headers": headers}
