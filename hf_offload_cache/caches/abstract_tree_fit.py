"""The best fields of `AbstractTreeCache` that a budget allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..memory.fit import LEAST_SELECTED, LOST_BY
from ..memory.search import LEAST_RECENT, SHORT_TAIL, STREAM_SHARES, Search
from ..stores.base import DEVICE_BLOCK
from .abstract_tree_config import AbstractTreeConfig

_CHUNK_SIZES = (64, 32, 16)
_OPENED = (4.0, 2.5, 2.0, 1.5, 1.25)
"""Tokens of the chunks that are looked into, over those that are attended to: the best, the default, first."""
_NONE_DENSE = {"dense_layers": 0, "resident_layers": 0, "dense_share": 0.001}
"""Where a context has dense layers, they attend to as many tokens as the others."""


def fit_abstract_tree(search: Search[AbstractTreeConfig]) -> AbstractTreeConfig:
    """The best configuration that fits: 400 tokens of 1,600 that are looked into, dense first layers in memory, and
    what is left for slots.

    Where that does not fit, these give way, one after another: dense layers, reading ahead, the queue and the buffers
    of streams, some of what is looked into, the abstracts, which are read from the disk then, early steps and the
    latest tokens, more of what is looked into, what is attended to, and at last the chunks' size. Raises `BudgetError`
    with the least memory that would do.
    """

    def smallest(chosen: dict[str, Any]) -> dict[str, Any]:
        return {**chosen, **_of_size(search, chosen["chunk_size"]).least_streams(chosen.get("num_recent"))}

    chosen = search.first_fit(_tried(search), smallest)
    most = search.most(chosen, "reuse_capacity", search.max_context)
    most = search.most({**most, "host_memory": 0}, "host_memory", search.memory)  # less than a chunk a layer
    return search.config(search.wider_blocks(most))


def _of_size(search: Search[AbstractTreeConfig], size: int) -> Search[AbstractTreeConfig]:
    """`search` with chunks of `size` tokens."""
    sizes = {size, search.fields.get("dense_chunk_size") or size}
    return replace(search, records=[(_record_bytes(*record, one), one) for record in search.records for one in sizes])


def whole_chunks(search: Search[AbstractTreeConfig]) -> Search[AbstractTreeConfig]:
    """Run `search` with blocks that hold the largest chunk, whichever layers a model has."""
    return _of_size(search, search.config({}).group_size or _CHUNK_SIZES[0])


def _tried(search: Search[AbstractTreeConfig]) -> Iterator[dict[str, Any]]:
    wanted = search.config({}).attended(search.max_context)
    given = search.fields.get("chunk_size") or search.fields.get("group_size")
    given = max(given) if isinstance(given, Sequence) else given
    for size in _CHUNK_SIZES if given is None else [given]:
        of_size = _of_size(search, size)
        chunk: dict[str, Any] = {"chunk_size": size}
        yield {**chunk, **_selecting(wanted, _OPENED[0]), **of_size.streams(STREAM_SHARES[0])}
        chunk.update(_NONE_DENSE)
        for opened in _OPENED[:2]:
            chunk.update(_selecting(wanted, opened))
            for look in ({}, {"look_ahead": False}):
                yield from ({**chunk, **of_size.streams(share), **look} for share in STREAM_SHARES)
            yield {**chunk, **of_size.least_streams(), "look_ahead": False}
        chunk.update(abstracts="disk", look_ahead=False)
        for opened in _OPENED[:2]:
            chunk.update(_selecting(wanted, opened))
            yield from ({**chunk, **of_size.streams(share)} for share in STREAM_SHARES)
        chunk["early_steps"] = 0
        chunk.update(of_size.least_streams(SHORT_TAIL))
        yield from ({**chunk, **_selecting(wanted, opened)} for opened in _OPENED)
        fewer = wanted
        while fewer > LEAST_SELECTED and search.fields.get("num_selected") is None:
            fewer = max(LEAST_SELECTED, fewer * 3 // 4)
            yield {**chunk, **_selecting(fewer, _OPENED[-1])}
        for recent in (SHORT_TAIL // 2, LEAST_RECENT):
            yield {**chunk, **of_size.least_streams(recent), **_selecting(fewer, 1)}


def tree_shortfalls(config: AbstractTreeConfig, given: Iterable[str]) -> list[str]:
    """What of `config` gave way to a budget, and was not so `given`: dense layers, and what is looked into."""
    context, found = config.max_context or 1 << 40, []
    wanted, opened = config.attended(context), config.brought(context)
    if config.dense_layers and config.dense_share == _NONE_DENSE["dense_share"] and "dense_share" not in given:
        found.append(
            f"there is no room for dense_layers={config.dense_layers}: they attend to no more tokens than the others"
        )
    if opened < _OPENED[0] * wanted and "num_opened" not in given:
        most = round(_OPENED[0] * wanted)
        found.append(f"a step looks into {opened} tokens for {wanted}; with {most} fewer facts are lost {LOST_BY}")
    return found


def _selecting(tokens: int, opened: float) -> dict[str, Any]:
    brought = None if opened == _OPENED[0] else round(tokens * opened)
    return {"num_selected": tokens, "num_opened": brought, "reuse_capacity": 0}


def _record_bytes(nbytes: int, tokens: int, size: int) -> int:
    """Of a record of `size` tokens, where one of `tokens` has `nbytes`."""
    return -(-nbytes * size // tokens // DEVICE_BLOCK) * DEVICE_BLOCK
