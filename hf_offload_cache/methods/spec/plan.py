"""Fields of `SpecCache` for a memory budget, and the bytes of its transient memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...history.records import RecordFormat
from ...kernels.mixed_attention import attention_bytes
from ...memory.fit import LEAST_RECENT, SHORT_TAIL, Search
from .attention import MixedAttention
from .config import SpecConfig

# The best fields of `SpecCache` for a budget

_COPIES = ((4, 64), (2, 32), (2, 64), (1, 32), (1, 64))
"""`bits` and `quant_group` of a copy, best first."""


def fit_spec(search: Search[SpecConfig]) -> SpecConfig:
    """The copy with most bits that fits, then as many full-precision entries as fit, up to 256 a key head.

    If not even the smallest copy fits, `num_recent` shrinks, then `num_selected`. Raises `BudgetError` with the minimum
    memory needed.
    """
    chosen = search.first_fit(_tried(search))
    return search.config(search.wider_streams(search.most(chosen, "num_selected", 256)))


def _tried(search: Search[SpecConfig]) -> Iterator[dict[str, Any]]:
    copies = [{"bits": bits, "quant_group": group} for bits, group in _COPIES]
    for copy in copies:
        for streams in search.all_streams():
            yield {"num_selected": 64, **copy, **streams}
    for selected in (64, 32, 16, 8, 4):
        for copy in copies[:-3:-1]:  # with few tokens, those that wait to be quantised weigh more
            for streams in (search.least_streams(SHORT_TAIL), search.least_streams(LEAST_RECENT)):
                yield {"num_selected": selected, **copy, **streams}


UNDER_WAY = 2
"""Reads for the next step in flight at a time: layer i's read is collected when layer i + UNDER_WAY selects."""
TOGETHER = 2
"""Queries scored at a time: a token and its guess."""


def scores_of(config: SpecConfig, queries: int) -> int:
    """Scores of each head and token of the copy that are in memory at a time: twice `queries` if scores are kept."""
    return 2 * queries if keeps_scores(config) else queries


def keeps_scores(config: SpecConfig) -> bool:
    """True if scores are kept for a second attention of the same step. Otherwise they are computed again."""
    return bool(config.top_up) or not config.speculative


def read_together(form: RecordFormat, config: SpecConfig) -> int:
    """Records a row that are read at a time: a third of all key heads' entries, because most of them are resident."""
    return -(-form.num_key_heads * config.chosen // 3)


def picked_bytes(form: RecordFormat, rows: int, config: SpecConfig) -> int:
    """Bytes of entries outside `ChosenEntries`: those on their way from records, those for this step only, and those
    that were added to the copy in this step."""
    return rows * (config.chosen + config.quant_group) * form.entry_bytes


def stored_bytes(form: RecordFormat, rows: int, heads: int, queries: int, config: SpecConfig, latest: int) -> int:
    """`MixedAttention.stored_bytes` for all full-precision entries of a step: the chosen ones, those fetched only for
    this step, those that were added to the copy in it, and the `latest` ones."""
    entries = config.chosen * (2 if config.top_up else 1) + config.quant_group + latest
    return MixedAttention.stored_bytes(form, rows, heads, queries, entries)


def fused_bytes(
    form: RecordFormat, rows: int, heads: int, queries: int, config: SpecConfig, tokens: int, latest: int
) -> int:
    """Bytes in use on a device while `queries` queries of `heads` heads attend to `tokens` of the copy, to the entries
    instead of some, and to the `latest` ones, and select."""
    entries = config.chosen * (2 if config.top_up else 1) + config.quant_group
    return attention_bytes(rows, heads, form.num_key_heads, queries, tokens, entries, latest, form.value_dim)


def joined_bytes(form: RecordFormat, rows: int, config: SpecConfig) -> int:
    """Bytes of all entries instead of the copy's in one tensor, with their tokens, in a step of a device that has some
    besides the chosen ones."""
    entries = config.chosen * (2 if config.top_up else 1) + config.quant_group
    return rows * entries * (form.entry_bytes + 8 * form.num_key_heads)
