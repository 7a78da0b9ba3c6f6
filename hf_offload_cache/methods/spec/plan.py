"""What a layer of `SpecCache` will hold, beside its history: the copy, what is chosen, and what is on its way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...history.records import RecordFormat
from ...memory.fit import LEAST_RECENT, SHORT_TAIL, Search
from .attention import MixedAttention
from .config import SpecConfig

# The best fields of `SpecCache` that a budget allows

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


UNDER_WAY = 2
"""Reads for the next step that are under way at a time: a layer's is collected as so many layers later chooses."""
TOGETHER = 2
"""Queries that are scored at a time: a token, and the guess beside it."""


def scores_of(config: SpecConfig, queries: int) -> int:
    """Scores of each head that are held at a time: where attention decides what is fetched for it, twice."""
    return 2 * queries if keeps_scores(config) else queries


def keeps_scores(config: SpecConfig) -> bool:
    """Whether scores are kept for attending again; else, where it has to be, they are made again."""
    return bool(config.top_up) or not config.speculative


def read_together(form: RecordFormat, config: SpecConfig) -> int:
    """Records a row that are read at a time: a third of what all key heads may want, most of which they had."""
    return -(-form.num_key_heads * config.chosen // 3)


def picked_bytes(form: RecordFormat, rows: int, config: SpecConfig) -> int:
    """What has come out of its records, and is not among what is chosen yet or is for this step alone; and what has
    become a part of the copy in this step."""
    return rows * (config.chosen + config.quant_group) * form.entry_bytes


def stored_bytes(form: RecordFormat, rows: int, heads: int, queries: int, config: SpecConfig, latest: int) -> int:
    """While attention goes over what is as it was stored: see `MixedAttention.stored_bytes`; what is chosen, what was
    fetched only for this step, what has become a part of the copy in it, and the latest ones."""
    entries = config.chosen * (2 if config.top_up else 1) + config.quant_group + latest
    return MixedAttention.stored_bytes(form, rows, heads, queries, entries)
