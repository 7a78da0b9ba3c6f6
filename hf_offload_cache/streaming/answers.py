"""Meaning of a store's answers: one table of statuses and exceptions for reading and writing, and the pauses between
requests."""

from __future__ import annotations

import contextlib
import email.utils
import errno
import re
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from ..errors import DamagedObjectError, ObjectError

TRIES = 4
"""Most requests for a manifest, and for each published object, if the answer is `Answer.LATER`."""
_FIRST_PAUSE = 0.1
"""Seconds before the second try; each later pause is twice as long."""
_LINE = 300
"""Most characters that are reported of a server's text."""


class Answer(StrEnum):
    """A store's answer to a request that it does not fulfil."""

    ABSENT = "absent"
    """There is no such object."""
    REFUSED = "refused"
    """The store denies access: it is unknown whether the object exists, and a retry does not help."""
    LATER = "later"
    """The store or the link fails at the moment: it is unknown whether the object exists, and a retry may help."""
    BROKEN = "broken"
    """Something other than the object was received."""


_NUMBERS = {
    Answer.ABSENT: errno.ENOENT, Answer.REFUSED: errno.EACCES, Answer.LATER: errno.EAGAIN, Answer.BROKEN: errno.EIO,
}  # fmt: skip

_ABSENT = (404, 410)
_LATER = (408, 421, 423, 425, 429)
_NEVER = (501, 505, 507, 508, 510, 511)
"""Statuses from 500 on for which a retry does not help."""

_ERRNOS: dict[int, Answer] = {
    errno.ENOENT: Answer.ABSENT,
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), Answer.REFUSED),
    **dict.fromkeys(
        (
            errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET,
            errno.ECONNABORTED, errno.EPIPE, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH,
            errno.ESTALE, getattr(errno, "EREMOTEIO", errno.EAGAIN),  # s3fs raises the last one for status 500
        ),
        Answer.LATER,
    ),
}  # fmt: skip
_CERTIFICATE = ("SSLCertVerificationError", "ClientSSLError", "ClientConnectorCertificateError", "SSLError")
_CREDENTIALS = (
    "PermissionError", "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError",
    "TokenRetrievalError", "LocalTokenNotFoundError", "NoAuthTokenError",
)  # fmt: skip
_LINK = (
    "TimeoutError", "ConnectionError", "gaierror", "HTTPClientError", "ClientConnectionError", "ClientPayloadError",
    "TransportError", "Timeout",
)  # fmt: skip
_CLASSES: dict[str, Answer] = {
    **dict.fromkeys(_CERTIFICATE, Answer.BROKEN),
    "FileNotFoundError": Answer.ABSENT,
    **dict.fromkeys(_CREDENTIALS, Answer.REFUSED),
    **dict.fromkeys(_LINK, Answer.LATER),
}
"""By class name, because the packages may not be installed; earlier entries win."""


def of_status(status: int) -> Answer:
    """The answer for an HTTP status other than the expected one."""
    if status in _ABSENT:
        return Answer.ABSENT
    if status in _LATER or (status >= 500 and status not in _NEVER):
        return Answer.LATER
    return Answer.REFUSED if status >= 400 else Answer.BROKEN


def of_error(error: BaseException) -> Answer:
    """The answer for an exception of any file system: by the status in its chain, or else by class or errno."""
    chain = list(_chain(error))
    for cause in chain:
        if isinstance(cause, ObjectError):
            return Answer(cause.answer)
        if (status := _status(cause)) is not None:
            return of_status(status)
    for cause in chain:
        names = {kind.__name__ for kind in type(cause).__mro__}
        for name, answer in _CLASSES.items():
            if name in names:
                return answer
        if isinstance(cause, OSError) and cause.errno in _ERRNOS:
            return _ERRNOS[cause.errno]
    return Answer.BROKEN


def place_error(
    answer: Answer, text: str, *, retry_after: float | None = None, number: int | None = None,
    kind: type[ObjectError] = ObjectError,
) -> ObjectError:  # fmt: skip
    """An `ObjectError` with the message `text`, without the credentials in its URLs, and the wait that the store asks
    for."""
    if retry_after is not None and answer is Answer.LATER:
        text += f"; it asks to be tried again in {retry_after:g} s"
    error = kind(_NUMBERS[answer] if number is None else number, without_secrets(text))
    error.answer, error.retry_after = answer, retry_after
    return error


def reported(doing: str, error: BaseException) -> ObjectError:
    """The `ObjectError` to raise from any file system's `error`."""
    waits = [wait for cause in _chain(error) if (wait := _retry_after(cause)) is not None]
    number = error.errno if isinstance(error, OSError) else None
    text = getattr(error, "strerror", None) if isinstance(error, ObjectError) else str(error) or type(error).__name__
    kind = type(error) if isinstance(error, ObjectError) else ObjectError
    failure = place_error(of_error(error), f"{doing}: {text}", number=number, kind=kind)
    failure.retry_after = waits[0] if waits else None
    return failure


def seconds_of(value: str | None) -> float | None:
    """Seconds of a `Retry-After` header, a number or a date; None: it has neither."""
    if value is None:
        return None
    if re.fullmatch(r"\d{1,9}", value.strip()):
        return float(value)
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


def received(data: bytes, place: str, most: int) -> bytes:
    """Return `data`, an object's bytes. Raises `ObjectError` for an HTML page, which logins and portals send with a
    success status, and `DamagedObjectError` for more than `most` bytes."""
    start = data[:512].decode("utf-16", "ignore").encode() if data.startswith(_UTF16) else data[:256]
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_PAGE):
        raise place_error(Answer.BROKEN, f"{place}: received an HTML page, of a login or a portal on the way")
    if len(data) > most:
        raise too_large(place, most)
    return data


def too_large(place: str, most: int) -> ObjectError:
    return place_error(Answer.BROKEN, f"{place}: more than {most:,} bytes", kind=DamagedObjectError)


_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_PAGE = (b"<!doctype", b"<html", b"<head", b"<body", b"<title", b"<script", b"<meta", b"<?xml", b"<!--")
_URL = re.compile(
    r"([a-z][a-z0-9+.-]*://)(?:[^\s/@'\"]*@)?([^\s?#'\"<>]*)(?:[?#](?:[^\s'\"<>]*[^\s'\"<>:,;])?)?", re.IGNORECASE
)


def without_secrets(text: object) -> str:
    """`text` without the secret parts of its URLs: user and password, query and fragment."""
    return _URL.sub(r"\1\2", str(text))


def pause_after(error: ObjectError, tries: int) -> float:
    """Seconds to wait after the given number of tries."""
    return _FIRST_PAUSE * 2 ** (tries - 1) if error.retry_after is None else error.retry_after


def line_of(text: str) -> str:
    """One printable line of a server's text, at most `_LINE` characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: 2 * _LINE])
    return line if len(line) <= _LINE else f"{line[:_LINE]}..."


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes and contexts."""
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _status(error: BaseException) -> int | None:
    if "HttpProcessingError" in {kind.__name__ for kind in type(error).__mro__}:
        return None  # aiohttp's own 400, for a truncated body or one that is not HTTP
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        response = response.get("ResponseMetadata", {})
        candidates = [response.get("HTTPStatusCode")] if isinstance(response, dict) else []
    else:
        candidates = [getattr(response, name, None) for name in ("status_code", "status")]
    candidates += [getattr(error, name, None) for name in ("status", "status_code", "code")]
    return next((int(code) for code in candidates if isinstance(code, int) and 300 <= code < 600), None)


def _retry_after(error: BaseException) -> float | None:
    if isinstance(error, ObjectError):
        return error.retry_after
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(response, "headers", None) or getattr(error, "headers", None)
    try:
        return seconds_of(headers.get("Retry-After") or headers.get("retry-after")) if headers is not None else None
    except AttributeError:  # not a mapping
        return None
