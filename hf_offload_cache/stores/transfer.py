"""What a store hands out when it has started a read: something to finish."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch

from ..errors import CacheClosedError


class Transfer(ABC):
    """A read that was started. `ids` and `out` belong to it until `finish` returned or raised, or `wait` returned.

    For the thread that started it, except where a subclass says more.

    Attributes:
        runs: True when the transfer goes on while the caller does something else; False when all that is left happens
            in `finish`.
        finished_at: `time.perf_counter()` when the last byte was seen to be there; None before.
    """

    runs = True
    finished_at: float | None = None

    @abstractmethod
    def done(self) -> bool:
        """Whether nothing is under way any more: `finish` would return or raise at once. Does not block."""

    @abstractmethod
    def drop(self) -> None:
        """Give up what has not begun; `finish` raises `CacheClosedError` when that left bytes out. Does not block."""

    @abstractmethod
    def wait(self) -> None:
        """Block until nothing is under way: neither the store nor `out` is touched from then on.

        Raises nothing of the read's. A signal's exception leaves it under way, and it can be waited for again; so does
        `StalledError`, for a device that does not answer in the time that whoever made the transfer gives it. What is
        still under way then holds the store and `out` by itself until it ends, whatever its caller lets go of.
        """

    @abstractmethod
    def finish(self) -> None:
        """Block until the bytes are in `out`. Raises what the read failed with, and the same when called again.

        Raises `StalledError` as `wait` does.
        """


class LateRead(Transfer):
    """A read that was advised: `finish` runs `read`, a store's, on the calling thread, however long that takes."""

    runs = False

    def __init__(
        self, read: Callable[[np.ndarray, torch.Tensor], None], ids: np.ndarray, out: torch.Tensor
    ) -> None:
        self._read = read
        self._ids = ids
        self._out = out
        self._dropped = False

    def done(self) -> bool:
        return self.finished_at is not None

    def drop(self) -> None:
        self._dropped = True

    def wait(self) -> None:
        pass

    def finish(self) -> None:
        if self.finished_at is not None:
            return
        if self._dropped:
            raise CacheClosedError("the read was cancelled: its store was reset or closed")
        self._read(self._ids, self._out)
        self.finished_at = time.perf_counter()
