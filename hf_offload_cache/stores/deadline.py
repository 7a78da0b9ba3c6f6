"""How long a wait for a device may take before the device counts as stalled."""

from __future__ import annotations

import errno
import os
import time

from ..errors import ForkedProcessError, StalledError

# Which process an object belongs to: a child that was forked has its parent's objects, but none of the threads

class Process:
    """The process that made this object. Takes no lock, and costs one system call: any thread, any time.

    What runs often looks itself whether `id` is `os.getpid()` before it calls `check`.
    """

    def __init__(self) -> None:
        self.id = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a child that was forked."""
        return self.id == os.getpid()

    def check(self, what: str) -> None:
        """Raises `ForkedProcessError`, which calls the object `what`, in a child that was forked."""
        if self.id != os.getpid():
            raise ForkedProcessError(
                f"{what} belongs to the parent process {self.id} and stays as it is there: open the saved context or "
                "make a new cache in the child"
            )


EXIT_SECONDS = 1.0
"""The longest that the end of the interpreter waits for what is under way."""


class Deadline:
    """A wait may take `seconds` (None: any time); once the device has stalled, no time at all until it answers again.

    So one stalled read costs `seconds` once, and not again for each of the reads that are then given up. Any thread.

    Attributes:
        stalled: the last wait ended without an answer.
        at_exit: the interpreter ends.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.stalled = False
        self.at_exit = False

    def expires(self) -> float | None:
        """The `time.monotonic()` at which a wait that begins now is to be given up; None: never."""
        if self.stalled:
            return time.monotonic()
        seconds = EXIT_SECONDS if self.at_exit else self.seconds
        return None if seconds is None else time.monotonic() + seconds

    def answered(self) -> None:
        """The device did something: waits have their usual time again."""
        self.stalled = False

    def shorten_for_exit(self) -> None:
        """The interpreter ends: waits are `EXIT_SECONDS` from now on."""
        self.at_exit = True

    def missed(self, work: str = "") -> StalledError:
        """The error to raise for a wait that took too long; `work` says where and at what.

        The device counts as stalled from now on."""
        self.stalled = True
        seconds = "the end of the process" if self.seconds is None else f"{self.seconds:g} seconds (io_timeout)"
        return StalledError(
            errno.ETIMEDOUT,
            f"{work}{': ' if work else ''}no answer for {seconds}: the device has stalled; close the cache",
        )


def seconds_left(expires: float | None, most: float) -> float:
    """Seconds to wait now: until `expires` (`time.monotonic()`; None: never), but at most `most`."""
    return most if expires is None else max(0.0, min(most, expires - time.monotonic()))


def has_passed(expires: float | None) -> bool:
    """Whether `expires` (`time.monotonic()`; None: never) is over."""
    return expires is not None and time.monotonic() >= expires
