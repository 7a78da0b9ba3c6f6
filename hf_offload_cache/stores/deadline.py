"""How long a device is waited for."""

from __future__ import annotations

import errno
import time

from ..errors import StalledError

EXIT_SECONDS = 1.0
"""That the end of the interpreter waits for what is under way, at most."""


class Patience:
    """`seconds` a wait (None: for ever), and none at all once the device has stalled, until it answers again.

    So one stalled read does not make everything that is then given up wait as long again. Any thread.

    Attributes:
        stalled: the last wait ended without an answer.
        at_exit: the interpreter ends.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.stalled = False
        self.at_exit = False

    def deadline(self) -> float | None:
        """`time.monotonic()` when a wait that begins now is to be given up; None: never."""
        if self.stalled:
            return time.monotonic()
        seconds = EXIT_SECONDS if self.at_exit else self.seconds
        return None if seconds is None else time.monotonic() + seconds

    def answered(self) -> None:
        """The device did something."""
        self.stalled = False

    def hurry(self) -> None:
        """The interpreter ends: waits are `EXIT_SECONDS` from now on."""
        self.at_exit = True

    def give_up(self, doing: str = "") -> StalledError:
        """The error to raise for a wait whose deadline has passed; `doing` says where and at what."""
        self.stalled = True
        seconds = "the end of the process" if self.seconds is None else f"{self.seconds:g} seconds (io_timeout)"
        return StalledError(
            errno.ETIMEDOUT,
            f"{doing}{': ' if doing else ''}no answer for {seconds}: the device has stalled; close the cache",
        )


def left(deadline: float | None, most: float) -> float:
    """Seconds to wait now: until `deadline`, `most` at most."""
    return most if deadline is None else max(0.0, min(most, deadline - time.monotonic()))


def passed(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline
