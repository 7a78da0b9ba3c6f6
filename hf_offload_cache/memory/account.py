"""The account of what a cache holds: each owner of an allocation books it here."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from ..errors import BudgetError
from ..report.text import size_text


class MemoryAccount:
    """Bytes that a cache holds, by owner, and the most it ever held at once; any thread may call.

    Each owner of an allocation calls `hold` *before* it allocates and `release` after it freed.

    Args:
        limit: the most that may be held, in bytes; None: no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._lock = threading.Lock()
        self.limit = limit
        self.by_owner: Counter[str] = Counter()
        self.current = 0
        self.peak = 0

    def hold(self, owner: str, nbytes: int) -> None:
        """Book `nbytes` more (or, negative, less). Raises `BudgetError`, with nothing booked, above the limit."""
        with self._lock:
            if nbytes > 0 and self.limit is not None and self.current + nbytes > self.limit:
                held = ", ".join(f"{name} {size_text(part)}" for name, part in self.by_owner.most_common(3) if part)
                raise BudgetError(
                    f"memory: {owner} would take {nbytes:,} bytes beside the {self.current:,} held ({held}), above the "
                    f"{self.limit:,} allowed: give more memory, or let `for_budget` choose the fields"
                )
            self._book(owner, nbytes)

    def release(self, owner: str, nbytes: int) -> None:
        """Book `nbytes` less."""
        self.hold(owner, -nbytes)

    @contextlib.contextmanager
    def holding(self, owner: str, nbytes: int) -> Iterator[None]:
        """`nbytes` are held inside. Raises `BudgetError` as `hold` does, before anything runs."""
        self.hold(owner, nbytes)
        try:
            yield
        finally:
            self.release(owner, nbytes)

    def observe(self, owner: str, nbytes: int) -> None:
        """`owner` was seen to hold `nbytes` in all: what others allocate is booked as it is, and cannot be refused."""
        with self._lock:
            self._book(owner, nbytes - self.by_owner[owner])

    def _book(self, owner: str, nbytes: int) -> None:
        self.by_owner[owner] += nbytes
        self.current += nbytes
        self.peak = max(self.peak, self.current)
