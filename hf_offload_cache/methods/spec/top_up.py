"""Whether what a guess missed is fetched within a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

TRIED = 8
"""Steps after which it is known how fast the store is."""


class TopUp:
    """Of one cache: steps are topped up where the store is fast enough, which is where the reads of the first `TRIED`
    steps took no longer than the rest of these steps. For the thread that runs the model.

    Args:
        asked: `SpecConfig.top_up`; "always": however fast the store is.
    """

    def __init__(self, asked: bool | str) -> None:
        self.on = bool(asked)
        """The next step is topped up."""
        self._left = TRIED if asked is True else 0
        self._read = self._reading = self._took = 0.0

    @contextlib.contextmanager
    def reading(self, device: torch.device) -> Iterator[None]:
        """What a step waits for, because it is topped up, is read in here, to `device`, which is waited for as long as
        it is not known how fast that is."""
        tells = self._left > 0 and device.type == "cuda"
        if tells:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        yield
        if tells:
            torch.cuda.synchronize(device)
        self._reading += time.perf_counter() - started

    def end_step(self, seconds: float) -> str | None:
        """A step has ended, which took so long in all. What there is to say, if no other will be topped up."""
        read, self._reading = self._reading, 0.0
        if not self._left or not read:
            return None
        self._left, self._read, self._took = self._left - 1, self._read + read, self._took + seconds
        if self._left or self._read <= self._took - self._read:
            return None
        self.on = False
        read, rest = (1e3 * each / TRIED for each in (self._read, self._took - self._read))
        return (
            f"steps are topped up no more: what their guesses missed took {read:.0f} ms to read, the rest of a step "
            f"{rest:.0f} ms. top_up='always' fetches it on a slow store, too"
        )
