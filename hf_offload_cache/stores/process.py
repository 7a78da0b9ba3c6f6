"""Which process an object belongs to: a child that was forked has its parent's objects, but none of the threads."""

from __future__ import annotations

import os

from ..errors import ForkedProcessError


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
