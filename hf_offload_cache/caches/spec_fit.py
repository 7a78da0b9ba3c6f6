"""The best fields of `SpecCache` that a budget allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..memory.search import LEAST_RECENT, SHORT_TAIL, Search
from .spec_config import SpecConfig

_COPIES = ((4, 64), (2, 32), (2, 64), (1, 32), (1, 64))
"""Bits and group of a copy, the best first."""


def fit_spec(search: Search[SpecConfig]) -> SpecConfig:
    """The copy of most bits that fits, and beside it as many entries as they were stored as fit, up to 256 a key head.

    Where not even the smallest copy fits, fewer latest tokens are kept, and then fewer entries. Raises `BudgetError`
    with the least memory that would do.
    """
    chosen = search.first_fit(_tried(search))
    return search.config(search.wider_blocks(search.most(chosen, "num_selected", 256)))


def _tried(search: Search[SpecConfig]) -> Iterator[dict[str, Any]]:
    copies = [{"bits": bits, "quant_group": group} for bits, group in _COPIES]
    for copy in copies:
        for streams in search.all_streams():
            yield {"num_selected": 64, **copy, **streams}
    for selected in (64, 32, 16, 8, 4):
        for copy in copies[:-3:-1]:  # where there are few tokens, those that wait to be quantised weigh more
            for streams in (search.least_streams(SHORT_TAIL), search.least_streams(LEAST_RECENT)):
                yield {"num_selected": selected, **copy, **streams}
