"""A store's answers, for reading and writing: one table of statuses and exceptions, and the waiting times."""

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
"""Requests for a manifest, and for each object that is published, where the answer is `Answer.LATER`."""
_FIRST_PAUSE = 0.1
"""Seconds before the second try; each later pause is twice as long."""


class Answer(StrEnum):
    """A store's answer to a request that it does not fulfil."""

    ABSENT = "absent"
    """There is no such object."""
    REFUSED = "refused"
    """The store does not allow it: whether there is an object is unknown, and asking again does not help."""
    LATER = "later"
    """The store or the link fails at the moment: whether there is an object is unknown, and asking again may help."""
    BROKEN = "broken"
    """Something else than the object was received."""


_LINE = 300
"""Characters of what is told of a server's words."""

_NUMBERS = {
    Answer.ABSENT: errno.ENOENT, Answer.REFUSED: errno.EACCES, Answer.LATER: errno.EAGAIN, Answer.BROKEN: errno.EIO,
}  # fmt: skip

_ABSENT = (404, 410)
_LATER = (408, 421, 423, 425, 429)
_NEVER = (501, 505, 507, 508, 510, 511)
"""Of the statuses from 500 on, those that another try does not change."""

_ERRNOS: dict[int, Answer] = {
    **dict.fromkeys((errno.ENOENT,), Answer.ABSENT),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), Answer.REFUSED),
    **dict.fromkeys(
        (
            errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET,
            errno.ECONNABORTED, errno.EPIPE, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH,
            errno.ESTALE, getattr(errno, "EREMOTEIO", errno.EAGAIN),  # s3fs has the last one for a status of 500
        ),
        Answer.LATER,
    ),
}  # fmt: skip

_CLASSES: dict[str, Answer] = {
    **dict.fromkeys(
        ("SSLCertVerificationError", "ClientSSLError", "ClientConnectorCertificateError", "SSLError"), Answer.BROKEN
    ),
    "FileNotFoundError": Answer.ABSENT,
    **dict.fromkeys(
        (
            "PermissionError", "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError",
            "TokenRetrievalError", "LocalTokenNotFoundError", "NoAuthTokenError",
        ),
        Answer.REFUSED,
    ),
    **dict.fromkeys(
        (
            "TimeoutError", "ConnectionError", "gaierror", "HTTPClientError", "ClientConnectionError",
            "ClientPayloadError", "TransportError", "Timeout",
        ),
        Answer.LATER,
    ),
}  # fmt: skip
"""By a class's name, since the packages that have them may not be installed; earlier entries win."""


def of_status(status: int) -> Answer:
    """The answer for an HTTP status other than the expected one."""
    if status in _ABSENT:
        return Answer.ABSENT
    if status in _LATER or (status >= 500 and status not in _NEVER):
        return Answer.LATER
    return Answer.REFUSED if status >= 400 else Answer.BROKEN


def of_error(error: BaseException) -> Answer:
    """The answer for an exception of any file system: by the status behind it, else by its class or number."""
    behind = list(_behind(error))
    for one in behind:
        if isinstance(one, ObjectError):
            return Answer(one.answer)
        if (status := _status(one)) is not None:
            return of_status(status)
    for one in behind:
        names = {kind.__name__ for kind in type(one).__mro__}
        for name, answer in _CLASSES.items():
            if name in names:
                return answer
        if isinstance(one, OSError) and one.errno in _ERRNOS:
            return _ERRNOS[one.errno]
    return Answer.BROKEN


def place_error(
    answer: Answer, text: str, *, retry_after: float | None = None, number: int | None = None,
    kind: type[ObjectError] = ObjectError,
) -> ObjectError:  # fmt: skip
    """An `ObjectError` whose message is `text` without any URL's credentials, and with the wait that the store asks
    for."""
    if retry_after is not None and answer is Answer.LATER:
        text += f"; it asks to be tried again in {retry_after:g} s"
    error = kind(_NUMBERS[answer] if number is None else number, without_secrets(text))
    error.answer, error.retry_after = answer, retry_after
    return error


def reported(doing: str, error: BaseException) -> ObjectError:
    """The `ObjectError` to raise from any file system's `error`."""
    waits = [found for one in _behind(error) if (found := _told(one)) is not None]
    number = error.errno if isinstance(error, OSError) else None
    text = getattr(error, "strerror", None) if isinstance(error, ObjectError) else str(error) or type(error).__name__
    kind = type(error) if isinstance(error, ObjectError) else ObjectError
    failure = place_error(of_error(error), f"{doing}: {text}", number=number, kind=kind)
    failure.retry_after = waits[0] if waits else None
    return failure


def seconds_of(value: str | None) -> float | None:
    """Seconds in a `Retry-After` header, given as a number or a date; None: it contains none."""
    if value is None:
        return None
    if re.fullmatch(r"\d{1,9}", value.strip()):
        return float(value)
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


def received(data: bytes, place: str, most: int) -> bytes:
    """Check `data` as an object's bytes and return it. Raises `ObjectError` for an HTML page, which a login or a portal
    on the way sends with a success status, and `DamagedObjectError` for more than `most` bytes."""
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
    """Seconds to wait after so many tries."""
    return _FIRST_PAUSE * 2 ** (tries - 1) if error.retry_after is None else error.retry_after


def line_of(text: str) -> str:
    """A line of it, whatever a server has put in there."""
    line = "".join(one if one.isprintable() else " " for one in text[: 2 * _LINE])
    return line if len(line) <= _LINE else f"{line[:_LINE]}..."


def _behind(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from or while handling."""
    seen = set[int]()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _status(error: BaseException) -> int | None:
    if "HttpProcessingError" in {kind.__name__ for kind in type(error).__mro__}:
        return None  # aiohttp's, of a body that is cut off or no HTTP: its 400 is no server's
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        response = response.get("ResponseMetadata", {})
        candidates = [response.get("HTTPStatusCode")] if isinstance(response, dict) else []
    else:
        candidates = [getattr(response, name, None) for name in ("status_code", "status")]
    candidates += [getattr(error, name, None) for name in ("status", "status_code", "code")]
    return next((int(one) for one in candidates if isinstance(one, int) and 300 <= one < 600), None)


def _told(error: BaseException) -> float | None:
    if isinstance(error, ObjectError):
        return error.retry_after
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(response, "headers", None) or getattr(error, "headers", None)
    try:
        return seconds_of(headers.get("Retry-After") or headers.get("retry-after")) if headers is not None else None
    except AttributeError:  # no mapping
        return None
