"""A cache for one request of a known size, where one is of use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import parse_memory, parse_size
from ..core.offload_cache import OffloadCache
from ..errors import BudgetError
from ..model.geometry import Geometry

FLOOR = "64MiB"
"""What a sequence of a short request may hold, whatever share it was given: by default."""


def request_cache(
    cls: type[OffloadCache],
    model: Any,
    tokens: int,
    rows: int = 1,
    *,
    memory: int | str | None = None,
    floor: int | str = FLOOR,
    strict: bool = False,
    path: str | Path | None = None,
    **fields: Any,
) -> OffloadCache | None:
    """A cache for `rows` sequences of up to `tokens` tokens; the caller closes it. None: `DynamicCache` is better.

    A share of a request's full KV may be less than any plan needs, of a short one above all. Such a request may hold
    `floor` a sequence: where all its KV fits in that, the answer is None, and else the cache has that as its budget.
    Where `memory` is in bytes, the answer is None if no plan fits in them and all the KV does. So no request holds more
    than `memory`, or `floor` a sequence where that is more and a share does not do.

    Args:
        memory: the most that the cache may hold: bytes, "300MiB", or a share of what `DynamicCache` would hold
            ("1/13"); None: what `fields` come to.
        floor: bytes or a size, of each sequence.
        strict: raise `BudgetError` in the place of all that.
        path, fields: as of the cache.

    Raises as `for_budget` and the constructor do: `BudgetError` where `floor` does not do either.
    """
    if memory is None:
        return cls(model, path=path, **fields)

    def make(budget: int | str) -> OffloadCache:
        return cls.for_budget(model, budget, tokens, rows, path=path, **fields)

    try:
        return make(memory)
    except BudgetError as error:
        if strict:
            raise
        full = Geometry.of(model).full_kv_bytes(tokens, rows)
        if full <= _most(memory, full, rows, floor):
            return None
        return in_floor(make, error, memory, full, rows, floor)


def beyond_share(cache: OffloadCache, model: Any, memory: int | str | None) -> bool:
    """Whether `request_cache` gave this one `floor`, since its share of `memory` was too little."""
    config = cache.config
    if memory is None or config.memory is None or config.max_context is None:
        return False
    full = Geometry.of(model).full_kv_bytes(config.max_context, config.max_batch or 1)
    return parse_memory(config.memory, full) > parse_memory(memory, full)


def in_floor(
    make: Callable[[int], OffloadCache], error: BudgetError, memory: int | str, full: int, rows: int, floor: int | str
) -> OffloadCache:
    """What `make` makes in `floor` bytes a sequence, where `memory`, a share of the `full` KV's bytes, was too little
    for it by `error`. Warns; raises `error` where `memory` is in bytes, or is as much, or the floor does not do either.
    """
    most = _most(memory, full, rows, floor)
    if most == parse_memory(memory, full):
        raise error
    try:
        own = make(most)
    except BudgetError:
        raise error from None  # the share's: it names what would do
    own.warn(
        f"memory={memory!r} of this request is less than {type(own).__name__} can do with: such requests may hold "
        f"{floor} a sequence; change that by floor, or refuse them by strict",
        stacklevel=3,
    )
    return own


def _most(memory: int | str, full: int, rows: int, floor: int | str) -> int:
    """Bytes that a request may hold at most."""
    limit = parse_memory(memory, full)
    return max(limit, rows * parse_size(floor, "floor")) if "/" in str(memory) else limit
