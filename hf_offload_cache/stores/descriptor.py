"""An open descriptor with an owner, from the system call on: an interrupt in between would leave it open for good."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

_OWNED_BY_NOBODY = -1


class Descriptor:
    """The descriptor that `call(*arguments, **named)` opens, owned by its creator; closed at the latest when this
    object is deleted.

    A signal's exception (Ctrl-C) is raised between two operations of the interpreter. Here no operation lies between
    the system call and its owner: one operation calls, and appends the result to a list that a finalizer already knows.
    `call` must therefore be a C function, such as `os.open`. A `with` gives the number, and closes at its end.
    """

    def __init__(self, call: Callable[..., int], *arguments: Any, **named: Any) -> None:
        self._open: list[int] = []
        self._finalizer = weakref.finalize(self, _close, self._open)
        self._finalizer.atexit = False  # the process ends, and its descriptors with it
        self._open.extend(map(functools.partial(call, **named), *((one,) for one in arguments)))

    @property
    def fd(self) -> int:
        """The number; -1 once closed."""
        return self._open[0] if self._open else _OWNED_BY_NOBODY

    def release(self) -> int:
        """Give up the number: the caller closes it, if it is open."""
        return self._open.pop()

    def close(self) -> None:
        """Close the descriptor; idempotent. Raises the errors of `os.close`, but the descriptor is closed then too."""
        _close(self._open)
        self._finalizer.detach()

    def __enter__(self) -> int:
        return self.fd

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_descriptor(path: str, flags: int, mode: int = 0o600, folder_fd: int | None = None) -> Descriptor:
    """Call `os.open` for a descriptor that no program inherits. Raises `OSError`."""
    return Descriptor(os.open, path, flags | os.O_CLOEXEC, mode, dir_fd=folder_fd)


def _close(numbers: list[int]) -> None:
    """Close what is in `numbers`; each leaves the list and is closed in one operation."""
    with contextlib.suppress(IndexError):  # another thread was faster
        while numbers:
            deque(map(os.close, map(numbers.pop, (-1,))), maxlen=0)
