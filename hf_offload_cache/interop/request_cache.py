"""A cache for one request of a known size, where one is of use."""

from __future__ import annotations

import warnings
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

    A share of a short request's full KV may be less than any plan needs. Such a request may hold `floor` a sequence:
    where all its KV fits in that, the answer is None, and else the cache has that as its budget. Where `memory` is in
    bytes, the answer is None if no plan fits in them and all the KV does. So no request holds more than `memory`, or
    `floor` a sequence where that is more and a share does not do.

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
    try:
        return cls.for_budget(model, memory, tokens, rows, path=path, **fields)
    except BudgetError:
        if strict:
            raise
        full = Geometry.of(model).full_kv_bytes(tokens, rows)
        limit = parse_memory(memory, full)
        most = max(limit, rows * parse_size(floor, "floor")) if "/" in str(memory) else limit
        if full <= most:
            return None
        if most == limit:
            raise
        try:
            own = cls.for_budget(model, most, tokens, rows, path=path, **fields)
        except BudgetError:
            own = None
        if own is None:
            raise  # the share's error: it names what would do
    warnings.warn(
        f"memory={memory!r} of a short request is less than {cls.__name__} can do with: such requests may hold "
        f"{floor} a sequence; change that by floor, or refuse them by strict",
        stacklevel=2,
    )
    return own
