"""Several frozen stores made one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .base import aligned_empty
from .freezable import FreezableStore
from .record_file import BOUNCE_BYTES

FEW_PARTS = 4
"""Parts that are not worth copying anything: a document, and what came in a turn or two."""
MOST_TIMES = 2
"""A part is copied when it is at most so many times as large as what is behind it."""


def parts_that_stay(capacities: Sequence[int]) -> int:
    """How many of the parts with these `capacities` stay; those behind them are to be merged.

    All, or all but one, where there is nothing to merge. Among parts that were merged so after each that was added, the
    4th is more than twice as large as the 5th, that more than twice as large as the 6th, and so on.
    """
    first = len(capacities) - 1
    behind = capacities[-1] if capacities else 0
    if len(capacities) <= FEW_PARTS:
        return len(capacities)
    while first > 1 and capacities[first - 1] <= MOST_TIMES * behind:
        first -= 1
        behind += capacities[first]
    return first


def merge_parts(
    parts: Sequence[FreezableStore], live: np.ndarray | None, make: Callable[[], FreezableStore]
) -> FreezableStore:
    """A frozen store, the caller's, of the records of `parts`, part after part, in an empty one that `make` makes.

    Records that hold nothing, or are not `live` ((sum of capacities,), bool), hold nothing in it. It has the counters
    of `parts` added to its own, so that none is lost with them. Raises `StoreError`, having left nothing behind.
    """
    merged = make()
    try:
        count = sum(part.capacity for part in parts)
        ids = merged.allocate(count)
        assert count == 0 or (ids[0] == 0 and ids[-1] == count - 1), "a new store begins at 0"
        buffer = aligned_empty(max(1, BOUNCE_BYTES // merged.record_bytes), merged.record_bytes)
        first = 0
        for part in parts:
            needed = part.written if live is None else part.written & live[first : first + part.capacity]
            wanted = np.flatnonzero(needed).astype(np.int64)
            for start in range(0, len(wanted), len(buffer)):
                some = wanted[start : start + len(buffer)]
                records = buffer[: len(some)]
                part.read(some, records)
                part.verify(some, records)  # it gets a new tag, which would vouch for what nobody has checked
                merged.write(some + first, records)
            first += part.capacity
        merged.freeze()
        for part in parts:
            merged.bytes_read += part.bytes_read
            merged.bytes_written += part.bytes_written
            merged.reads += part.reads
    except BaseException:
        merged.close()
        raise
    return merged
