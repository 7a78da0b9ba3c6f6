"""The best fields of `DiskSwapCache` that a budget allows, without a measured profile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..history.record_format import RecordFormat
from ..memory.fit import LEAST_SELECTED
from ..memory.search import SHORT_TAIL, STREAM_SHARES, Search
from ..predictors.low_rank_keys import default_rank
from .adapter import adapter_rank
from .disk_swap_config import DiskSwapConfig

_LAST_TAIL = 8
"""`num_recent` where not even `SHORT_TAIL` leaves room."""

MAX_COMPRESSION = 32
"""Sigma's limit: bytes of a token's keys over bytes of its compact key (KVSwap, appendix A)."""


def fit_disk_swap(search: Search[DiskSwapConfig], forms: list[RecordFormat], area_bytes: int) -> DiskSwapConfig:
    """The best configuration that fits. What is best, in this order:

    1. `num_selected` 400, and a `rank` of five sixths of the default, a quarter of the joined key width: with less,
       facts are lost that the full cache finds, where fewer slots only cost time. For that, these give way, one after
       another: the staging areas of a look-ahead (`look_ahead=False`, unless they take less than a tenth), the write
       queue and the two buffers that stream a history (from a tenth of the budget each, at most 4 MiB and 1024 tokens,
       to a fortieth), layer budgets (uniform ones need smaller areas), the queue and the blocks to what they need.
    2. What is left goes to blocks of up to 512 tokens again (decoding does not hold them), then to reuse slots up to
       `num_selected`, to the default rank, to slots up to twice `num_selected`, to a rank of up to half of the key
       width, and to slots until all is held.
    3. Where that rank does not fit, the highest that does, with slots for what is left; down to where compact keys are
       a 32nd of the keys' bytes. Below that `num_recent` (16), `num_selected` (down to 64) and then `num_recent` (8)
       give way.

    `group_size` and sinks are never changed.

    Args:
        forms: how records lie, of each kind of layer.
        area_bytes: of one staging area.

    Raises `BudgetError` with the least memory that would do, `ConfigError` for a field that is wrong.
    """
    if search.fields.get("rank", 0) is None:
        del search.fields["rank"]
    least_rank, most_rank = _ranks(forms, search.fields)
    default = max((default_rank(form.key_width) for form in forms), default=1)
    wanted = min(most_rank, max(least_rank, -(-default * 5 // 6)))
    look_ahead = 2 * area_bytes <= search.memory // 10
    for rank in (wanted, least_rank):
        levels = list(_levels(search, look_ahead))
        for level in levels if rank == wanted else reversed(levels):
            chosen = {**level, "rank": rank, "reuse_capacity": 0}
            if search.fits(chosen):
                return search.config(_filled(search, chosen, default, most_rank))
    for level in _frugal(search, forms):
        chosen = {**level, "rank": least_rank, "reuse_capacity": 0}
        if search.fits(chosen):
            return search.config(_filled(search, chosen, default, most_rank))
    raise search.refusal({**_least(search), "rank": least_rank, "reuse_capacity": 0})


def _filled(search: Search[DiskSwapConfig], chosen: dict[str, Any], default: int, most_rank: int) -> dict[str, Any]:
    """`chosen`, which fits, with what is left of the budget spent on blocks, rank and slots."""
    selected = chosen["num_selected"]
    chosen = search.wider_blocks(chosen)
    chosen = search.most(chosen, "rank", min(-(-default * 5 // 6), most_rank))
    chosen = search.most(chosen, "reuse_capacity", selected)
    chosen = search.most(chosen, "rank", min(default, most_rank))
    chosen = search.most(chosen, "reuse_capacity", 2 * selected)
    chosen = search.most(chosen, "rank", most_rank)
    return search.most(chosen, "reuse_capacity", search.max_context)


def _selected(search: Search[DiskSwapConfig]) -> int:
    return search.fields.get("num_selected", DiskSwapConfig.num_selected)


def _levels(search: Search[DiskSwapConfig], look_ahead: bool) -> Iterator[dict[str, Any]]:
    """What is tried with all that is to be selected, best first."""
    streams = [search.streams(share) for share in STREAM_SHARES]
    full: dict[str, Any] = {"num_selected": _selected(search), "look_ahead": False}
    if look_ahead:
        yield {**streams[0], **full, "look_ahead": None}
    for some in streams:
        yield {**some, **full}
    full["layer_budgets"] = "uniform"
    yield {**streams[-1], **full}
    yield {**search.least_streams(), **full}


def _frugal(search: Search[DiskSwapConfig], forms: list[RecordFormat]) -> Iterator[dict[str, Any]]:
    """What is tried where that does not fit at any rank: a shorter tail, fewer groups, then a still shorter tail."""
    group = max((form.group_size for form in forms), default=1)
    for recent in (SHORT_TAIL, _LAST_TAIL):
        full = {"num_selected": _selected(search), "look_ahead": False}
        uniform = {**search.least_streams(recent), **full, "layer_budgets": "uniform"}
        yield uniform
        for selected in range(DiskSwapConfig.num_selected - group, LEAST_SELECTED, -group):
            yield {**uniform, "num_selected": selected}
        yield {**uniform, "num_selected": LEAST_SELECTED}


def _least(search: Search[DiskSwapConfig]) -> dict[str, Any]:
    """The fields of the least memory."""
    chosen = {"num_selected": LEAST_SELECTED, "layer_budgets": "uniform", "look_ahead": False}
    return {**search.least_streams(_LAST_TAIL), **chosen}


def _ranks(forms: list[RecordFormat], fields: dict[str, Any]) -> tuple[int, int]:
    """The least and the greatest rank to try: sigma's limit, and half of the key width or what the adapter has."""
    if fields.get("rank") is not None:
        return fields["rank"], fields["rank"]
    item = getattr(torch, fields.get("summary_dtype", "int8")).itemsize
    least = max((-(-form.key_width * form.dtype.itemsize // (MAX_COMPRESSION * item)) for form in forms), default=1)
    most = max((max(1, form.key_width // 2, default_rank(form.key_width)) for form in forms), default=1)
    if fields.get("adapter") is not None:
        most = min(most, adapter_rank(fields["adapter"]))
    return min(least, most), most
